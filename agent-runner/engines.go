package main

import (
	"fmt"
	"log"

	"berth/agent-runner/internal/emit"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/acp"
	"berth/agent-runner/internal/engine/builtin"
	"berth/agent-runner/internal/engine/claude"
	"berth/agent-runner/internal/engine/model"
	"berth/agent-runner/internal/engine/probe"
)

// engines are all that the runner can drive. Which programs are there is the
// image's affair.
func engines(out *emit.Emitter) engine.Registry {
	r := engine.Registry{
		"builtin": builtin.Open,
		"claude":  claude.Open,
		"model":   model.Open,
		"probe":   probe.Opener(out),
	}
	for _, preset := range []string{"opencode", "claude-acp", "gemini", "codex", "acp"} {
		r[preset] = acp.Open
	}
	return r
}

// open opens the engine that the input asks for. If it leaves the choice to the
// runner, that takes what the image holds and the host has keys for.
func open(c engine.Config, out *emit.Emitter, find func(program string) (string, error), logger *log.Logger) (engine.Engine, error) {
	if c.Engine == "" || c.Engine == "auto" {
		var why string
		c.Engine, why = choose(c.EngineOptions, c.Gateway, find)
		logger.Printf("engine %s: %s", c.Engine, why)
	}
	return engines(out).Open(c, "builtin")
}

// choose says which engine fits best, and why. An agent program in the image is
// there because somebody wants it; without one the runner asks the model itself.
func choose(options map[string]string, gateway string, find func(program string) (string, error)) (name, why string) {
	has := func(program string) bool { _, err := find(program); return err == nil }
	provider := options[engine.OptionProvider]
	switch {
	case options[engine.OptionCommand] != "":
		return "acp", "the operator named a command"
	case gateway == "":
		return "builtin", "this run has no way to a model"
	case provider == "":
		return "builtin", "the host has no key for a model"
	case provider == "gemini" && has("gemini"):
		return "gemini", "the image has Gemini CLI, and the host has a key for it"
	case provider == "gemini":
		return "builtin", "the host has a key for Gemini alone, and the image has no Gemini CLI"
	case provider == "anthropic" && has("claude"):
		return "claude", "the image has Claude Code, and the host has a key for it"
	case options[engine.OptionModel] != "" && has("opencode"):
		return "opencode", "the image has OpenCode, and the host has a key for " + provider
	}
	why = fmt.Sprintf("the host has a key for %s, and the image has no agent for it", provider)
	switch {
	case has("opencode"):
		why += "; OpenCode, which it has, would need AGENT_MODEL"
	case has("claude"):
		why += "; Claude Code, which it has, would need a key for Anthropic"
	}
	return "model", why
}
