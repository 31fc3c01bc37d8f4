package acp

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

// TestOpenCodeContext: OpenCode is told how long a conversation may be, and leaves
// room in it for what the model says.
func TestOpenCodeContext(t *testing.T) {
	for _, tt := range []struct {
		provider, option string
		context, output  int
	}{
		{"openai", "", 128_000, 16_000},
		{"anthropic", "", 200_000, 16_000},
		{"openai", "8192", 8192, 2048},
		{"anthropic", "1000000", 1_000_000, 16_000},
		{"openai", "3999", 0, 0},
		{"openai", "much", 0, 0},
	} {
		c := engine.Config{Home: t.TempDir(), Input: protocol.Input{EngineOptions: map[string]string{
			engine.OptionModel: "m1", engine.OptionProvider: tt.provider, engine.OptionContext: tt.option,
		}}}
		env, err := openCode(c, "127.0.0.1:9", t.TempDir())
		if failure, ok := errors.AsType[*engine.Error](err); ok != (tt.context == 0) || ok && failure.Class != protocol.ClassInput {
			t.Fatalf("%+v: %v", tt, err)
		}
		for _, v := range env {
			content, ok := strings.CutPrefix(v, "OPENCODE_CONFIG_CONTENT=")
			if !ok {
				continue
			}
			var config struct {
				Provider map[string]struct {
					Models map[string]struct{ Limit struct{ Context, Output int } }
				}
			}
			if err := json.Unmarshal([]byte(content), &config); err != nil {
				t.Fatal(err)
			}
			if got := config.Provider["berth"].Models["m1"].Limit; got.Context != tt.context || got.Output != tt.output {
				t.Errorf("%+v: %+v", tt, got)
			}
		}
	}
}
