package claude

import (
	"fmt"
	"strings"
	"testing"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/enginetest"
	"berth/agent-runner/protocol"
)

// Claude Code's own command, and what it says of it; also when nobody asked.
func TestCompact(t *testing.T) {
	const boundary = `{"type":"system","subtype":"compact_boundary","session_id":"s","compact_metadata":{"trigger":"manual","pre_tokens":9}}`
	for name, tt := range map[string]struct {
		lines []string
		want  string
	}{
		"done": {[]string{
			`{"type":"system","subtype":"status","status":"compacting"}`, boundary,
			`{"type":"result","subtype":"success","is_error":false,"result":""}`,
		}, protocol.CompactionDone},
		"nothing": {[]string{
			`{"type":"user","message":{"content":"<local-command-stderr>Not enough \"compact_boundary\" to compact</local-command-stderr>"}}`,
			`{"type":"result","subtype":"success","is_error":false,"result":"Not enough messages to compact."}`,
		}, protocol.CompactionNothing},
		"failed": {[]string{`{"type":"result","subtype":"success","is_error":true,"result":"API Error: 529 overloaded"}`}, protocol.CompactionFailed},
	} {
		t.Run(name, func(t *testing.T) {
			script := `read line; printf '%s\n' '{"type":"control_response","response":{"subtype":"success","request_id":"berth-hello","response":{}}}'; read line; echo "$line" >&2; `
			for _, line := range tt.lines {
				script += fmt.Sprintf("printf '%%s\\n' '%s'; ", line)
			}
			script += "while read line; do :; done"
			b := enginetest.New(t, enginetest.Subject{Open: Open, Engine: "claude", Command: `sh -c "` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `\$`).Replace(script) + `"`})
			b.Config.SessionID = "99999999-1111-4111-8111-111111111111"
			e := b.Open(t)
			var turn enginetest.Turn
			c := e.Engine.(engine.Compactor)
			got, err := c.Compact(t.Context(), &turn)
			if err != nil || got.Outcome != tt.want || len(turn.Texts()) > 0 || turn.ID() == "" {
				t.Errorf("got %+v, %v, answers %q", got, err, turn.Texts())
			}
			if is := c.Compacted(); is != (tt.want == protocol.CompactionDone) || c.Compacted() {
				t.Errorf("compacted: %v", is)
			}
			e.Close(t)
			if !strings.Contains(b.Log.String(), `\"text\":\"/compact\"`) {
				t.Errorf("log %s", b.Log)
			}
		})
	}
}

// A session to which nobody has said anything has nothing to shorten.
func TestCompactOfANewSession(t *testing.T) {
	b := enginetest.New(t, enginetest.Subject{Open: Open, Engine: "claude", Command: "false"})
	got, err := b.Open(t).Engine.(engine.Compactor).Compact(t.Context(), new(enginetest.Turn))
	if err != nil || got.Outcome != protocol.CompactionNothing {
		t.Errorf("got %+v, %v", got, err)
	}
}
