package acp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/enginetest"
	"berth/agent-runner/protocol"
)

// lister is an agent that announces commands, some time after the session is there,
// and answers the third request with what it is told to.
func lister(t *testing.T, commands, third string) *enginetest.Bench {
	t.Helper()
	say := func(format string, args ...any) string {
		return "printf '%s\\n' '" + `{"jsonrpc":"2.0",` + fmt.Sprintf(format, args...) + "}'; "
	}
	script := "read line; " + say(`"id":1,"result":{"protocolVersion":1,"agentCapabilities":{"sessionCapabilities":{"resume":{}}}}`) +
		"read line; " + say(`"id":2,"result":{"sessionId":"s1"}`)
	if commands != "" {
		script += say(`"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":"available_commands_update","availableCommands":[%s]}}`, commands)
	}
	script += `read line; echo "$line" >&2; ` + say("%s", third) + "read line"
	b := enginetest.New(t, enginetest.Subject{Open: Open, Engine: "acp", Command: `sh -c "` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `\$`).Replace(script) + `"`})
	b.Config.SessionID = "s1"
	return b
}

// An agent that announces a command for it is given that, and no other one is.
func TestCompact(t *testing.T) {
	const ended, refused = `"id":3,"result":{"stopReason":"end_turn"}`, `"id":3,"error":{"code":-32603,"message":"it is too short"}`
	for name, tt := range map[string]struct {
		commands, third string
		want            string
		command         string
	}{
		"compact":  {`{"name":"init"},{"name":"compact","description":"x"},{"name":"compress"}`, ended, protocol.CompactionDone, "/compact"},
		"compress": {`{"name":"compress"}`, ended, protocol.CompactionDone, "/compress"},
		"refused":  {`{"name":"compact"}`, refused, protocol.CompactionFailed, "/compact"},
		"none":     {`{"name":""}`, ended, protocol.CompactionUnable, ""},
		"others":   {`{"name":"init"}`, ended, protocol.CompactionUnable, ""},
		"nonsense": {"7", ended, protocol.CompactionUnable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := lister(t, tt.commands, tt.third)
			e := b.Open(t)
			var turn enginetest.Turn
			got, err := e.Engine.(engine.Compactor).Compact(t.Context(), &turn)
			if err != nil || got.Outcome != tt.want || turn.ID() != "s1" || len(turn.Texts()) > 0 {
				t.Errorf("got %+v, %v, session %q", got, err, turn.ID())
			}
			if tt.want == protocol.CompactionFailed && !strings.Contains(got.Reason, "it is too short") {
				t.Errorf("reason %q", got.Reason)
			}
			e.Close(t)
			sent := strings.Contains(b.Log.String(), `\"text\":\"`+tt.command+`\"`)
			if tt.command == "" {
				sent = !strings.Contains(b.Log.String(), "session/prompt")
			}
			if !sent {
				t.Errorf("log %s", b.Log)
			}
		})
	}
}

// An order that is stopped ends as a turn does.
func TestCompactIsStopped(t *testing.T) {
	b := lister(t, `{"name":"compact"}`, `"method":"nothing"`)
	stopped := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	turn := enginetest.Turn{Accepting: func() { cancel(stopped) }}
	if _, err := b.Open(t).Engine.(engine.Compactor).Compact(ctx, &turn); !errors.Is(err, stopped) {
		t.Errorf("got %v", err)
	}
}

// A session to which nobody has said anything has nothing to shorten.
func TestCompactOfANewSession(t *testing.T) {
	b := lister(t, `{"name":"compact"}`, `"id":3,"result":{"stopReason":"end_turn"}`)
	b.Config.SessionID = ""
	got, err := b.Open(t).Engine.(engine.Compactor).Compact(t.Context(), new(enginetest.Turn))
	if err != nil || got.Outcome != protocol.CompactionNothing {
		t.Errorf("got %+v, %v", got, err)
	}
}

// An agent that ended while it was at nothing has not taken the order, which is left
// to the next run.
func TestCompactWithoutTheAgent(t *testing.T) {
	b := lister(t, `{"name":"compact"}`, `"id":3,"result":{"stopReason":"end_turn"}`)
	e := b.Open(t)
	var turn enginetest.Turn
	if err := e.Prompt(t.Context(), "hello", &turn); err != nil {
		t.Fatal(err)
	}
	agent := e.Engine.(*Engine)
	agent.program.Kill()
	<-agent.program.Gone()
	accepted := false
	turn = enginetest.Turn{Accepting: func() { accepted = true }}
	if got, err := agent.Compact(t.Context(), &turn); err == nil || accepted {
		t.Errorf("got %+v, %v, accepted %v", got, err, accepted)
	}
}
