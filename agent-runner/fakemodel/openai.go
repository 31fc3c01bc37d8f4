package fakemodel

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
)

// openAI is the dialect of chat completions.
type openAI struct{}

func (openAI) name() string { return OpenAI }

func (openAI) decode(body []byte) (ask, error) {
	var in struct {
		Model         string `json:"model"`
		Stream        bool   `json:"stream"`
		StreamOptions struct {
			IncludeUsage bool `json:"include_usage"`
		} `json:"stream_options"`
		Messages []struct {
			Role      string            `json:"role"`
			Content   json.RawMessage   `json:"content"`
			ToolCalls []json.RawMessage `json:"tool_calls"`
		} `json:"messages"`
		Tools []struct {
			Function struct {
				Name string `json:"name"`
			} `json:"function"`
		} `json:"tools"`
	}
	if err := json.Unmarshal(body, &in); err != nil {
		return ask{}, err
	}
	a := ask{model: in.Model, stream: in.Stream, usage: in.StreamOptions.IncludeUsage}
	for _, t := range in.Tools {
		a.tools = append(a.tools, t.Function.Name)
	}
	for _, m := range in.Messages {
		texts, _, _ := content(m.Content)
		switch m.Role {
		case "system", "developer":
			a.system += strings.Join(texts, "\n") + "\n"
		case "tool":
			a.messages = append(a.messages, message{role: "tool", results: []string{strings.Join(texts, "\n")}})
		default:
			a.messages = append(a.messages, message{role: m.Role, texts: texts, calls: len(m.ToolCalls)})
		}
	}
	return a, nil
}

// content reads what is a text or a list of parts, in either dialect.
func content(raw json.RawMessage) (texts []string, calls int, results []string) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return []string{text}, 0, nil
	}
	var parts []struct {
		Type    string          `json:"type"`
		Text    string          `json:"text"`
		Content json.RawMessage `json:"content"`
	}
	_ = json.Unmarshal(raw, &parts) // null, or something without a text
	for _, p := range parts {
		switch p.Type {
		case "text":
			texts = append(texts, p.Text)
		case "tool_use":
			calls++
		case "tool_result":
			result, _, _ := content(p.Content)
			results = append(results, strings.Join(result, "\n"))
		}
	}
	return texts, calls, results
}

func (openAI) fail(w http.ResponseWriter, f failure) {
	kind := f.kind
	if kind == "" {
		kind = map[int]string{
			400: "invalid_request_error", 401: "invalid_request_error", 402: "insufficient_quota", 403: "permission_error",
			404: "invalid_request_error", 429: "rate_limit_error",
		}[f.code]
	}
	if kind == "" {
		kind = "server_error"
	}
	maps.Copy(w.Header(), f.header)
	var code any
	if reason := f.header.Get("Berth-Reason"); reason != "" {
		code = reason
	}
	reply(w, f.code, map[string]any{"error": map[string]any{"message": f.text, "type": kind, "param": nil, "code": code}})
}

func (openAI) usage(a ask, out output) map[string]any {
	in, answer := a.inputTokens(), words(out.text)+words(out.thought)
	return map[string]any{"prompt_tokens": in, "completion_tokens": answer, "total_tokens": in + answer}
}

func (openAI) finish(out output) string {
	if len(out.calls) > 0 {
		return "tool_calls"
	}
	return "stop"
}

func (openAI) calls(out output) []any {
	var all []any
	for i, c := range out.calls {
		all = append(all, map[string]any{
			"index": i, "id": fmt.Sprintf("call_%d_%d", out.id, i), "type": "function",
			"function": map[string]any{"name": c.name, "arguments": string(c.args)},
		})
	}
	return all
}

func (d openAI) answer(w http.ResponseWriter, a ask, out output) {
	m := map[string]any{"role": "assistant", "content": out.text}
	if out.thought != "" {
		m["reasoning_content"] = out.thought
	}
	if len(out.calls) > 0 {
		m["tool_calls"] = d.calls(out)
	}
	reply(w, http.StatusOK, map[string]any{
		"id": fmt.Sprintf("chatcmpl-%d", out.id), "object": "chat.completion", "created": 0, "model": a.model,
		"choices": []any{map[string]any{"index": 0, "message": m, "finish_reason": d.finish(out)}},
		"usage":   d.usage(a, out),
	})
}

func (d openAI) stream(a ask, out output) (before, middle, after []event) {
	chunk := func(choices []any, usage any) event {
		return event{data: map[string]any{
			"id": fmt.Sprintf("chatcmpl-%d", out.id), "object": "chat.completion.chunk", "created": 0, "model": a.model,
			"choices": choices, "usage": usage,
		}}
	}
	delta := func(delta map[string]any, finish any) event {
		return chunk([]any{map[string]any{"index": 0, "delta": delta, "finish_reason": finish}}, nil)
	}
	before = []event{delta(map[string]any{"role": "assistant", "content": ""}, nil)}
	for _, p := range pieces(out.thought) {
		middle = append(middle, delta(map[string]any{"reasoning_content": p}, nil))
	}
	for _, p := range pieces(out.text) {
		middle = append(middle, delta(map[string]any{"content": p}, nil))
	}
	for i, c := range out.calls {
		head, tail := halves(string(c.args))
		middle = append(middle,
			delta(map[string]any{"tool_calls": []any{map[string]any{
				"index": i, "id": fmt.Sprintf("call_%d_%d", out.id, i), "type": "function",
				"function": map[string]any{"name": c.name, "arguments": head},
			}}}, nil),
			delta(map[string]any{"tool_calls": []any{map[string]any{
				"index": i, "function": map[string]any{"arguments": tail},
			}}}, nil))
	}
	after = []event{delta(map[string]any{}, d.finish(out))}
	if a.usage {
		after = append(after, chunk([]any{}, d.usage(a, out)))
	}
	return before, middle, append(after, event{data: "[DONE]"})
}
