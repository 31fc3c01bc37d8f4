package acp

import (
	"testing"

	"berth/agent-runner/internal/engine/enginetest"
)

func TestStop(t *testing.T) {
	for name, program := range map[string]string{"resume": "fake-acp", "load": "fake-acp-load"} {
		t.Run(name, func(t *testing.T) {
			enginetest.Stop(t, enginetest.Subject{Open: Open, Engine: "acp", Command: enginetest.Fake(t, program)})
		})
	}
}
