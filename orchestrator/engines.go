package main

import (
	"regexp"
	"strconv"
	"strings"
	"time"

	"berth/orchestrator/internal/berth"
)

// engines are the agent engines that the runner has.
var engines = []string{"auto", "builtin", "model", "claude", "opencode", "claude-acp", "gemini", "codex", "acp", "probe"}

// The model providers behind the gateway.
const (
	providerAnthropic = "anthropic"
	providerOpenAI    = "openai"
	providerGemini    = "gemini" // of the engine gemini alone
)

// engineOptions returns what the engine of a group is told. Nothing in it is
// secret.
func (c Config) engineOptions(g berth.Group) map[string]string {
	model := c.AgentModel
	if g.Container.Model != "" {
		model = g.Container.Model
	}
	options := make(map[string]string)
	for name, value := range map[string]string{"model": model, "provider": c.provider(model), "command": c.AgentCommand} {
		if value != "" {
			options[name] = value
		}
	}
	for name, d := range map[string]time.Duration{
		"sessionTimeout": c.SessionTimeout, "firstTimeout": c.FirstTimeout, "silenceTimeout": c.SilenceTimeout, "settleTimeout": c.SettleTimeout,
	} {
		if d > 0 {
			options[name] = d.String()
		}
	}
	if c.AgentContext > 0 {
		options["contextTokens"] = strconv.Itoa(c.AgentContext)
	}
	return options
}

// provider says whose protocol a model speaks; it is empty if there is no
// provider. Where there are two, the model's name decides.
func (c Config) provider(model string) string {
	if c.AgentProvider != "" {
		return c.AgentProvider
	}
	anthropic := c.AnthropicAPIKey != "" || c.ClaudeCodeOAuthToken != "" || c.AnthropicBaseURL != ""
	openAI := c.OpenAIAPIKey != "" || c.OpenAIBaseURL != ""
	switch {
	case !anthropic && !openAI && (c.GeminiAPIKey != "" || c.GeminiBaseURL != ""):
		return providerGemini
	case !anthropic && !openAI:
		return ""
	case anthropic && (!openAI || model == "" || strings.HasPrefix(model, "claude")):
		return providerAnthropic
	}
	return providerOpenAI
}

// secretsOnStdin returns the keys for runners that know no gateway, under the
// names that they know.
func (c Config) secretsOnStdin() map[string]string {
	if c.Credentials != credentialsStdin {
		return nil
	}
	secrets := make(map[string]string)
	for name, key := range map[string]Secret{"ANTHROPIC_API_KEY": c.AnthropicAPIKey, "CLAUDE_CODE_OAUTH_TOKEN": c.ClaudeCodeOAuthToken} {
		if key != "" {
			secrets[name] = key.Reveal()
		}
	}
	return secrets
}

const credentialsStdin = "stdin"

var modelNames = regexp.MustCompile(modelPattern)
