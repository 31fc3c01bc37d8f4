//go:build engines

package enginetest_test

import (
	"strings"
	"testing"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/acp"
	"berth/agent-runner/internal/engine/claude"
	"berth/agent-runner/internal/engine/enginetest"
	"berth/agent-runner/protocol"
)

// The real agents make their conversation shorter on the order, also as the first
// thing of a run, and go on with their session.
func TestCompact(t *testing.T) {
	openCode := packages(t, "opencode-linux-x64", "bin", "opencode") + " acp"
	for name, s := range map[string]enginetest.Subject{
		"opencode-openai":    {Open: acp.Open, Engine: "opencode", Command: openCode, Provider: "openai"},
		"opencode-anthropic": {Open: acp.Open, Engine: "opencode", Command: openCode, Provider: "anthropic"},
		"claude":             {Open: claude.Open, Engine: "claude", Command: packages(t, "@anthropic-ai", "claude-code-linux-x64", "claude")},
		"claude-acp":         {Open: acp.Open, Engine: "claude-acp", Command: node(t, "@agentclientprotocol", "claude-agent-acp", "dist", "index.js")},
	} {
		t.Run(name, func(t *testing.T) {
			b := enginetest.New(t, s)
			e := b.Open(t)
			compact := func(want string) {
				t.Helper()
				var turn enginetest.Turn
				got, err := e.Engine.(engine.Compactor).Compact(t.Context(), &turn)
				if err != nil || got.Outcome != want || len(turn.Texts()) > 0 {
					t.Fatalf("got %+v, %v, answers %q", got, err, turn.Texts())
				}
			}
			e.Ask(t, "say "+strings.Repeat("long ", 2000), "long")
			e.Ask(t, "say "+strings.Repeat("longer ", 2000), "longer")
			b.Config.SessionID = e.Ask(t, "say two", "two").ID()
			compact(protocol.CompactionDone)
			turn := e.Ask(t, "echo-history", "echo-history")
			if text := turn.Texts()[0]; strings.Contains(text, "longer longer longer longer longer longer longer longer") {
				t.Errorf("it is as long as it was: %.300s", text)
			}
			t.Logf("%.500s", turn.Texts()[0])
			e.Close(t)
			e = b.Open(t)
			compact(protocol.CompactionDone)
			if id := e.Ask(t, "say there", "there").ID(); id != b.Config.SessionID {
				t.Errorf("session %q became %q", b.Config.SessionID, id)
			}
		})
	}
}
