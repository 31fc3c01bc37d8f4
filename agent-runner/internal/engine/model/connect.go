package model

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/internal/forward"
	"berth/agent-runner/protocol"
)

// The providers, as options and the gateway name them.
const (
	anthropic = "anthropic"
	openAI    = "openai"
)

// connect chooses the provider and the model.
func (e *Engine) connect(ctx context.Context) error {
	model := e.config.EngineOptions[engine.OptionModel]
	name := e.config.EngineOptions[engine.OptionProvider]
	if name == "" {
		var err error
		if name, err = e.choose(ctx, model); err != nil {
			return err
		}
	}
	at, err := e.endpoint(name)
	if err != nil {
		return err
	}
	if e.window, err = engine.ContextTokens(e.config.EngineOptions, name); err != nil {
		return err
	}
	var provider llm.Provider = llm.NewOpenAI(at)
	if name == anthropic {
		provider = llm.NewAnthropic(at)
	}
	if model == "" {
		if model, err = e.pick(ctx, name, provider); err != nil {
			return err
		}
	}
	e.provider, e.model = provider, model
	e.config.Log.Printf("model: %s, %s, %d tokens", model, provider.Name(), e.window)
	return nil
}

// endpoint returns where a provider is: at the gateway, or, where there is none,
// where the keys that came with the run are for.
func (e *Engine) endpoint(name string) (llm.Endpoint, error) {
	if g := e.config.Gateway; g != "" {
		path := map[string]string{anthropic: "/anthropic", openAI: "/openai/v1"}[name]
		return llm.Endpoint{Base: "http://" + g + path, Key: forward.Placeholder}, nil
	}
	key, base := "ANTHROPIC_API_KEY", cmp.Or(e.config.Secrets["ANTHROPIC_BASE_URL"], "https://api.anthropic.com")
	if name == openAI {
		key, base = "OPENAI_API_KEY", cmp.Or(e.config.Secrets["OPENAI_BASE_URL"], "https://api.openai.com/v1")
	}
	if e.config.Secrets[key] == "" {
		return llm.Endpoint{}, &engine.Error{
			Class: protocol.ClassAuth,
			Text:  fmt.Sprintf("there is no way to a model: this run has neither a gateway nor %s", key),
		}
	}
	return llm.Endpoint{Base: base, Key: e.config.Secrets[key]}, nil
}

// choose returns the provider that there is a key for, or among several the one
// whose model it is.
func (e *Engine) choose(ctx context.Context, model string) (string, error) {
	names, known := e.configured(ctx)
	if known && len(names) == 0 {
		return "", &engine.Error{
			Class: protocol.ClassAuth,
			Text:  "there is no key for a model on the host: the operator sets ANTHROPIC_API_KEY, or OPENAI_API_KEY and OPENAI_BASE_URL, and restarts berth",
		}
	}
	if len(names) == 1 {
		return names[0], nil
	}
	if model == "" || strings.HasPrefix(strings.ToLower(model), "claude") {
		return anthropic, nil
	}
	return openAI, nil
}

// configured returns the providers that have what they need; known is false if
// nobody can tell.
func (e *Engine) configured(ctx context.Context) (names []string, known bool) {
	if e.config.Gateway == "" {
		for name, key := range map[string]string{anthropic: "ANTHROPIC_API_KEY", openAI: "OPENAI_API_KEY"} {
			if e.config.Secrets[key] != "" {
				names = append(names, name)
			}
		}
		return names, true
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+e.config.Gateway+"/", nil)
	if err != nil {
		return nil, false
	}
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return nil, false // the first request will tell why
	}
	defer resp.Body.Close()
	var about struct {
		Gateway   string   `json:"gateway"`
		Providers []string `json:"providers"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(&about); err != nil || about.Gateway == "" {
		return nil, false
	}
	for _, name := range []string{anthropic, openAI} {
		if slices.Contains(about.Providers, name) {
			names = append(names, name)
		}
	}
	return names, true
}

// pick returns the model to use if nobody chose one: Anthropic's newest in the
// middle, or the only one of a server.
func (e *Engine) pick(ctx context.Context, name string, p llm.Provider) (string, error) {
	models, err := p.Models(ctx)
	if err != nil {
		if f, ok := errors.AsType[*llm.Failure](err); ok {
			return "", e.fail(f, "ask which models there are")
		}
		return "", err
	}
	if name == anthropic {
		if i := slices.IndexFunc(models, func(m string) bool { return strings.Contains(m, "sonnet") }); i >= 0 {
			return models[i], nil
		}
	}
	if len(models) == 1 || name == anthropic && len(models) > 0 {
		return models[0], nil
	}
	text := "no model is chosen: the operator sets AGENT_MODEL"
	if n := len(models); n > 0 {
		text += fmt.Sprintf(", for example to %s; the provider has %d models", strings.Join(models[:min(n, 3)], " or "), n)
	}
	return "", &engine.Error{Class: protocol.ClassInput, Text: text}
}
