package main

import (
	"errors"
	"slices"
	"testing"

	"berth/agent-runner/internal/engine"
)

func TestChoose(t *testing.T) {
	const way = "/workspace/gateway/gateway.sock"
	anthropic := map[string]string{engine.OptionProvider: "anthropic"}
	openai := map[string]string{engine.OptionProvider: "openai", engine.OptionModel: "gpt-x"}
	for _, tt := range []struct {
		name    string
		options map[string]string
		gateway string
		image   []string
		want    string
	}{
		{"no key", nil, way, []string{"claude", "opencode"}, "builtin"},
		{"no way to a provider", anthropic, "", []string{"claude"}, "builtin"},
		{"an empty image", anthropic, way, nil, "model"},
		{"Claude Code", anthropic, way, []string{"claude", "opencode"}, "claude"},
		{"Claude Code, and a key for another", openai, way, []string{"claude"}, "model"},
		{"OpenCode", openai, way, []string{"opencode"}, "opencode"},
		{"OpenCode needs a model's name", anthropic, way, []string{"opencode"}, "model"},
		{"a command", map[string]string{engine.OptionCommand: "goose acp"}, "", nil, "acp"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			find := func(program string) (string, error) {
				if slices.Contains(tt.image, program) {
					return "/usr/bin/" + program, nil
				}
				return "", errors.New("not there")
			}
			got, why := choose(tt.options, tt.gateway, find)
			if got != tt.want || why == "" {
				t.Errorf("%s, %q; want %s", got, why, tt.want)
			}
		})
	}
}
