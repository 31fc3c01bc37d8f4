package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
)

// TestEngineOptions: what the runner is told of the model, and of whose it is.
func TestEngineOptions(t *testing.T) {
	group := berth.Group{Container: berth.ContainerConfig{Model: "claude-x"}}
	for _, tt := range []struct {
		name string
		c    Config
		g    berth.Group
		want map[string]string
	}{
		{"no key", Config{}, berth.Group{}, map[string]string{}},
		{"Gemini alone", Config{GeminiAPIKey: "k", AgentModel: "gemini-x"}, berth.Group{}, map[string]string{"provider": "gemini", "model": "gemini-x"}},
		{"Gemini beside another", Config{GeminiAPIKey: "k", OpenAIBaseURL: "http://x", AgentModel: "m"}, berth.Group{}, map[string]string{"provider": "openai", "model": "m"}},
		{"two, and the group's model", Config{AnthropicAPIKey: "k", OpenAIAPIKey: "k", AgentModel: "gpt-x"}, group, map[string]string{"provider": "anthropic", "model": "claude-x"}},
		{"a small one at home", Config{OpenAIBaseURL: "http://x", AgentContext: 8192}, berth.Group{}, map[string]string{"provider": "openai", "contextTokens": "8192"}},
	} {
		if diff := cmp.Diff(tt.want, tt.c.engineOptions(tt.g)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}
