package claude

import (
	"testing"

	"berth/agent-runner/internal/engine/enginetest"
)

func TestStop(t *testing.T) {
	for name, program := range map[string]string{"new": "fake-claude", "old": "fake-claude-old"} {
		t.Run(name, func(t *testing.T) {
			enginetest.Stop(t, enginetest.Subject{Open: Open, Engine: "claude", Command: enginetest.Fake(t, program), System: true})
		})
	}
}
