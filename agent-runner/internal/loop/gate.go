package loop

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"berth/agent-runner/internal/forward"
	"berth/agent-runner/internal/prompt"
	"berth/agent-runner/internal/shell"
)

// ScriptTimeout is how long the input's script may take.
const ScriptTimeout = 30 * time.Second

// ask has the engine answer. A script decides before whether it is asked at all.
func (l *Loop) ask(ctx context.Context, script, text string, t *turn) error {
	if script == "" {
		return l.Engine.Prompt(ctx, text, t)
	}
	judge := l.runScript
	if l.judge != nil {
		judge = l.judge
	}
	v, err := judge(ctx, script)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		v = verdict{why: err.Error()}
	}
	if !v.wake {
		l.do(func() { t.note, t.texts = "the script did not wake the agent: "+v.why, nil })
		return nil
	}
	if v.data != "" {
		text = prompt.Scheduled + "Script output:\n" + v.data + "\n\nInstructions:\n" + strings.TrimPrefix(text, prompt.Scheduled)
	}
	return l.Engine.Prompt(ctx, text, t)
}

// verdict is what a script decided.
type verdict struct {
	wake bool
	why  string // it does not wake
	data string // one line of JSON; may be empty
}

// runScript returns what a script decided. An error is its failure, or the
// machine's.
func (l *Loop) runScript(ctx context.Context, script string) (verdict, error) {
	env := []string{"PATH=" + os.Getenv("PATH"), "HOME=" + l.Home, "LANG=C.UTF-8", "USER=agent", "TZ=" + l.Input.Timezone}
	if l.Input.Gateway != "" {
		env = append(env, forward.Environ(forward.Address)...)
	}
	r, err := shell.Run(ctx, l.Children, shell.Command{Text: script, Dir: l.WorkDir, Env: env, Timeout: ScriptTimeout, Stderr: os.Stderr})
	switch {
	case err != nil:
		return verdict{}, fmt.Errorf("it could not be run: %w", err)
	case r.TimedOut:
		return verdict{}, fmt.Errorf("it took longer than %v", ScriptTimeout)
	case r.Code != 0:
		return verdict{}, fmt.Errorf("it ended with exit code %d", r.Code)
	}
	return decide(r.Output)
}

// decide reads the last line of what a script printed.
func decide(output string) (verdict, error) {
	output = strings.TrimSpace(output)
	line := output[strings.LastIndexByte(output, '\n')+1:]
	var said struct {
		WakeAgent *bool           `json:"wakeAgent"`
		Data      json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal([]byte(line), &said); err != nil || said.WakeAgent == nil {
		return verdict{}, fmt.Errorf(`its last line %.80q is not {"wakeAgent":true} or {"wakeAgent":false}`, line)
	}
	v := verdict{wake: *said.WakeAgent, why: "it said so"}
	if len(said.Data) > 0 && string(said.Data) != "null" {
		var compact bytes.Buffer
		if err := json.Compact(&compact, said.Data); err != nil {
			return verdict{}, err
		}
		v.data = compact.String()
	}
	return v, nil
}
