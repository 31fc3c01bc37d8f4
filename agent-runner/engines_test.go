package main

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"berth/agent-runner/internal/engine"
)

func TestChoose(t *testing.T) {
	const way = "/workspace/gateway/gateway.sock"
	anthropic := map[string]string{engine.OptionProvider: "anthropic"}
	openai := map[string]string{engine.OptionProvider: "openai", engine.OptionModel: "gpt-x"}
	gemini := map[string]string{engine.OptionProvider: "gemini", engine.OptionModel: "gemini-x"}
	for _, tt := range []struct {
		name    string
		options map[string]string
		gateway string
		image   []string
		want    string
		why     string // part of it
	}{
		{"no key", nil, way, []string{"claude", "opencode"}, "builtin", "no key"},
		{"no way to a provider", anthropic, "", []string{"claude"}, "builtin", "no way"},
		{"an empty image", anthropic, way, nil, "model", "no agent"},
		{"Claude Code", anthropic, way, []string{"claude", "opencode"}, "claude", "has Claude Code"},
		{"Claude Code, and a key for another", openai, way, []string{"claude"}, "model", "a key for Anthropic"},
		{"OpenCode", openai, way, []string{"opencode"}, "opencode", "has OpenCode"},
		{"OpenCode needs a model's name", anthropic, way, []string{"opencode"}, "model", "AGENT_MODEL"},
		{"Gemini CLI", gemini, way, []string{"claude", "opencode", "gemini"}, "gemini", "Gemini"},
		{"a key for Gemini without its program", gemini, way, []string{"claude", "opencode"}, "builtin", "Gemini"},
		{"Gemini CLI, and a key for another", openai, way, []string{"gemini"}, "model", "no agent"},
		{"a command", map[string]string{engine.OptionCommand: "goose acp"}, "", nil, "acp", "a command"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			find := func(program string) (string, error) {
				if slices.Contains(tt.image, program) {
					return "/usr/bin/" + program, nil
				}
				return "", errors.New("not there")
			}
			got, why := choose(tt.options, tt.gateway, find)
			if got != tt.want || !strings.Contains(why, tt.why) {
				t.Errorf("%s, %q; want %s, %q", got, why, tt.want, tt.why)
			}
		})
	}
}
