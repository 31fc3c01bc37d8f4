package model

import (
	"testing"
	"time"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/enginetest"
)

// The cases that every engine has to pass.
func TestTable(t *testing.T) {
	open := func(c engine.Config) (engine.Engine, error) {
		e, err := Open(c)
		if err == nil {
			e.(*Engine).pause = time.Millisecond // TestPatience has the real ones
		}
		return e, err
	}
	both(t, func(t *testing.T, provider string) {
		enginetest.Run(t, enginetest.Subject{Open: open, Engine: "model", Provider: provider, System: true, Steers: true, Skills: true})
	})
}
