package tools

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/internal/shell"
)

// How long a command may run.
const (
	commandTimeout    = 2 * time.Minute
	maxCommandTimeout = 30 * time.Minute
)

func (b *Box) bash() tool {
	return tool{llm.Tool{
		Name: "bash",
		Description: "Runs a command line in the group's folder and returns what it prints. Each call is a new shell. " +
			"What it leaves running in the background is ended with it; to keep a program running, start it with setsid and send its output to a file.",
		Schema: json.RawMessage(`{"type":"object","properties":{` +
			`"command":{"type":"string","description":"the command line, for sh or bash"},` +
			`"timeout":{"type":"integer","description":"seconds after which it is ended; 120 if not given, 1800 at most"}},` +
			`"required":["command"]}`),
	}, func(ctx context.Context, input json.RawMessage) (string, error) {
		in, err := decode[struct {
			Command string
			Timeout count
		}](input)
		if err != nil {
			return "", err
		}
		if strings.TrimSpace(in.Command) == "" {
			return "", refused("command is empty")
		}
		timeout := commandTimeout
		if in.Timeout > 0 {
			timeout = min(time.Duration(in.Timeout)*time.Second, maxCommandTimeout)
		}
		result, err := shell.Run(ctx, b.config.Children, shell.Command{Text: in.Command, Dir: b.config.WorkDir, Env: b.env, Timeout: timeout})
		if err != nil {
			return "", err
		}
		// Before anything is added: it is judged as it came.
		out := strings.TrimRight(printable(result.Output), "\n")
		switch {
		case result.TimedOut:
			return out, refused("ended after %v: give it more time, or run it in the background", timeout)
		case result.Code == 137:
			return out, refused("exit code 137: it was killed, perhaps because the container's memory was used up")
		case result.Code != 0:
			return out, refused("exit code %d", result.Code)
		case out == "":
			out = fmt.Sprintf("(exit code %d, no output)", result.Code)
		}
		return out, nil
	}}
}
