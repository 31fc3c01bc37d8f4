package acp

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"mvdan.cc/sh/v3/shell"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/forward"
	"berth/agent-runner/protocol"
)

// preset is what one agent needs beyond the protocol.
type preset struct {
	name    string // for people
	install string // what to do if it is not there
	args    []string

	// gateway says that the agent's model is behind the gateway.
	gateway bool
	// environ returns what the agent needs in its environment, and may write files
	// to a folder of its own that lasts as long as the run.
	environ func(c engine.Config, address, dir string) ([]string, error)
	// arguments returns more of them.
	arguments func(c engine.Config) []string
	// session adds to the parameters of a new session.
	session func(c engine.Config, params *sessionParams)
	// instructed says that environ or session hands the system prompt over; else
	// it stands before the first prompt.
	instructed bool
	// slow says that it takes longer than others until a session is there.
	slow bool
	// prose says that the agent tells of failed calls to its provider as if that
	// were the answer.
	prose bool
}

var presets = map[string]preset{
	"opencode": {
		name: "OpenCode", install: "npm package opencode-ai", args: []string{"opencode", "acp"},
		gateway: true, environ: openCode, instructed: true, slow: true,
	},
	"claude-acp": {
		name: "Claude's ACP adapter", install: "npm package @agentclientprotocol/claude-agent-acp", args: []string{"claude-agent-acp"},
		gateway: true, environ: claude, session: claudeSession, instructed: true,
	},
	"gemini": {
		name: "Gemini CLI", install: "npm package @google/gemini-cli", args: []string{"gemini", "--acp"},
		gateway: true, environ: gemini, slow: true,
		arguments: func(c engine.Config) []string {
			if model := c.EngineOptions[engine.OptionModel]; model != "" {
				return []string{"--model", model}
			}
			return nil
		},
	},
	"codex": {
		name: "Codex's ACP adapter", install: "npm package @agentclientprotocol/codex-acp", args: []string{"codex-acp"},
		gateway: true, environ: codex, prose: true,
	},
	"acp": {name: "the agent", install: "the option command names it"},
}

// presetOf returns the preset that c asks for, with the option's command.
func presetOf(c engine.Config) (preset, error) {
	p, ok := presets[c.Engine]
	if !ok {
		p = presets["acp"]
	}
	text := c.EngineOptions[engine.OptionCommand]
	if text == "" && p.args == nil {
		return p, &engine.Error{
			Class: protocol.ClassInput,
			Text:  "The engine acp needs to know its agent: the operator sets AGENT_COMMAND, such as goose acp.",
		}
	}
	if text != "" {
		args, err := shell.Fields(text, func(string) string { return "" })
		if err != nil || len(args) == 0 {
			return p, &engine.Error{Class: protocol.ClassInput, Text: fmt.Sprintf("the agent's command is %q, which no shell could read", text)}
		}
		p.args = args
	}
	if p.gateway && c.Gateway == "" {
		return p, &engine.Error{
			Class: protocol.ClassInput,
			Text:  p.name + " needs a model, and this run has no gateway to one.",
		}
	}
	return p, nil
}

// openCode is given a provider of its own and nothing else: what it knows by
// itself would lead past the gateway. Only its data is kept between runs, a broken
// configuration is not.
func openCode(c engine.Config, address, dir string) ([]string, error) {
	model := c.EngineOptions[engine.OptionModel]
	if model == "" {
		return nil, &engine.Error{
			Class: protocol.ClassInput,
			Text:  "OpenCode needs the name of a model: the operator sets AGENT_MODEL, or the group's model.",
		}
	}
	window, err := engine.ContextTokens(c.EngineOptions, c.EngineOptions[engine.OptionProvider])
	if err != nil {
		return nil, err
	}
	module, base := "@ai-sdk/openai-compatible", "http://"+address+"/openai/v1"
	if c.EngineOptions[engine.OptionProvider] == "anthropic" {
		module, base = "@ai-sdk/anthropic", "http://"+address+"/anthropic/v1"
	}
	type object = map[string]any
	config := object{
		"autoupdate": false, "share": "disabled", "enabled_providers": []string{"berth"},
		"model": "berth/" + model, "small_model": "berth/" + model,
		"provider": object{"berth": object{
			"npm": module, "name": "Berth",
			// The stages of a turn are watched here: no timeout of OpenCode's own.
			"options": object{"baseURL": base, "apiKey": forward.Placeholder, "timeout": false},
			// Without a limit it would never shorten a long conversation. It asks for the
			// answer's part with each call.
			"models": object{model: object{"name": model, "tool_call": true, "limit": object{"context": window, "output": min(16_000, window/4)}}},
		}},
		"permission": "allow", // the container is the boundary
	}
	if c.SystemPrompt != "" {
		path := filepath.Join(dir, "instructions.md")
		if err := os.WriteFile(path, []byte(c.SystemPrompt), 0o600); err != nil {
			return nil, err
		}
		config["instructions"] = []string{path}
	}
	content, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	data := filepath.Join(c.Home, ".local", "share")
	env := []string{
		"OPENCODE_CONFIG_CONTENT=" + string(content),
		"OPENCODE_DISABLE_PROJECT_CONFIG=1", // a group's files must not choose another provider
		"OPENCODE_DISABLE_MODELS_FETCH=1",
		"OPENCODE_DISABLE_AUTOUPDATE=1",
		"OPENCODE_DISABLE_LSP_DOWNLOAD=1",
		"XDG_DATA_HOME=" + data,
	}
	for _, name := range []string{"state", "cache", "config"} {
		path := filepath.Join(dir, name)
		if err := os.Mkdir(path, 0o700); err != nil {
			return nil, err
		}
		env = append(env, map[string]string{"state": "XDG_STATE_HOME=", "cache": "XDG_CACHE_HOME=", "config": "XDG_CONFIG_HOME="}[name]+path)
	}
	return env, os.MkdirAll(data, 0o700)
}

func claude(c engine.Config, _, _ string) ([]string, error) {
	env := []string{
		"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
		"DISABLE_AUTOUPDATER=1",
		"CLAUDE_CODE_MAX_RETRIES=2", // the host tries again too
		"ENABLE_TOOL_SEARCH=false",  // or the model has to look for the group's tools first
		"IS_SANDBOX=1",              // or it refuses to be root, where it is
	}
	if model := c.EngineOptions[engine.OptionModel]; model != "" {
		env = append(env, "ANTHROPIC_MODEL="+model)
	}
	return env, nil
}

func claudeSession(c engine.Config, params *sessionParams) {
	if c.SystemPrompt != "" {
		params.Meta = map[string]any{"systemPrompt": map[string]string{"append": c.SystemPrompt}}
	}
}

// gemini finds the gateway in the address that all programs get. Settings that the
// group has made for it stay.
func gemini(c engine.Config, _, _ string) ([]string, error) {
	home := filepath.Join(c.Home, ".gemini")
	if err := os.MkdirAll(home, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(home, "settings.json"), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		_, err = f.WriteString(`{"general":{"enableAutoUpdate":false},"privacy":{"usageStatisticsEnabled":false}}`)
		err = errors.Join(err, f.Close())
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return []string{
		"GEMINI_CLI_TRUST_WORKSPACE=true", // the container is the boundary
		"GEMINI_CLI_NO_RELAUNCH=true",     // as a second process with more memory
	}, nil
}

func codex(c engine.Config, address, _ string) ([]string, error) {
	type object = map[string]any
	config := object{
		"model_provider": "berth",
		"model_providers": object{"berth": object{
			"name": "Berth", "base_url": "http://" + address + "/openai/v1", "env_key": "OPENAI_API_KEY",
			"wire_api": "responses", "requires_openai_auth": false,
		}},
		"sandbox_mode": "danger-full-access", "approval_policy": "never", // the container is the boundary
	}
	if model := c.EngineOptions[engine.OptionModel]; model != "" {
		config["model"] = model
	}
	content, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	home := filepath.Join(c.Home, ".codex")
	return []string{"CODEX_CONFIG=" + string(content), "CODEX_HOME=" + home}, os.MkdirAll(home, 0o700)
}
