package fakemodel

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
)

// anthropic is the dialect of messages.
type anthropic struct{}

func (anthropic) name() string { return Anthropic }

func (anthropic) decode(body []byte) (ask, error) {
	var in struct {
		Model    string          `json:"model"`
		Stream   bool            `json:"stream"`
		System   json.RawMessage `json:"system"`
		Messages []struct {
			Role    string          `json:"role"`
			Content json.RawMessage `json:"content"`
		} `json:"messages"`
		Tools []struct {
			Name string `json:"name"`
		} `json:"tools"`
	}
	if err := json.Unmarshal(body, &in); err != nil {
		return ask{}, err
	}
	a := ask{model: in.Model, stream: in.Stream, usage: true}
	system, _, _ := content(in.System)
	a.system = strings.Join(system, "\n")
	for _, t := range in.Tools {
		a.tools = append(a.tools, t.Name)
	}
	for _, m := range in.Messages {
		texts, calls, results := content(m.Content)
		if m.Role == "system" { // Claude Code puts such between the others
			a.system += "\n" + strings.Join(texts, "\n")
			continue
		}
		a.messages = append(a.messages, message{role: m.Role, texts: texts, calls: calls, results: results})
	}
	return a, nil
}

func (anthropic) fail(w http.ResponseWriter, f failure) {
	kind := f.kind
	if kind == "" {
		kind = map[int]string{
			400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error",
			404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 504: "timeout_error", 529: "overloaded_error",
		}[f.code]
	}
	if kind == "" {
		kind = "api_error"
	}
	maps.Copy(w.Header(), f.header)
	reply(w, f.code, map[string]any{"type": "error", "error": map[string]any{"type": kind, "message": f.text}})
}

func (anthropic) usage(a ask, out output) map[string]any {
	return map[string]any{
		"input_tokens": a.inputTokens(), "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
		"output_tokens": words(out.text) + words(out.thought),
	}
}

func (anthropic) finish(out output) string {
	if len(out.calls) > 0 {
		return "tool_use"
	}
	return "end_turn"
}

// block is one part of an answer: how it begins, and its pieces.
type block struct {
	start  map[string]any
	deltas []map[string]any
	whole  map[string]any
}

func (anthropic) blocks(out output) []block {
	var all []block
	if out.thought != "" {
		b := block{
			start: map[string]any{"type": "thinking", "thinking": "", "signature": ""},
			whole: map[string]any{"type": "thinking", "thinking": out.thought, "signature": "c2ln"},
		}
		for _, p := range pieces(out.thought) {
			b.deltas = append(b.deltas, map[string]any{"type": "thinking_delta", "thinking": p})
		}
		b.deltas = append(b.deltas, map[string]any{"type": "signature_delta", "signature": "c2ln"})
		all = append(all, b)
	}
	if out.text != "" {
		b := block{
			start: map[string]any{"type": "text", "text": ""},
			whole: map[string]any{"type": "text", "text": out.text},
		}
		for _, p := range pieces(out.text) {
			b.deltas = append(b.deltas, map[string]any{"type": "text_delta", "text": p})
		}
		all = append(all, b)
	}
	for i, c := range out.calls {
		id := fmt.Sprintf("toolu_%d_%d", out.id, i)
		head, tail := halves(string(c.args))
		all = append(all, block{
			start: map[string]any{"type": "tool_use", "id": id, "name": c.name, "input": map[string]any{}},
			whole: map[string]any{"type": "tool_use", "id": id, "name": c.name, "input": c.args},
			deltas: []map[string]any{
				{"type": "input_json_delta", "partial_json": head},
				{"type": "input_json_delta", "partial_json": tail},
			},
		})
	}
	return all
}

func (d anthropic) answer(w http.ResponseWriter, a ask, out output) {
	content := []any{}
	for _, b := range d.blocks(out) {
		content = append(content, b.whole)
	}
	reply(w, http.StatusOK, map[string]any{
		"id": fmt.Sprintf("msg_%d", out.id), "type": "message", "role": "assistant", "model": a.model, "content": content,
		"stop_reason": d.finish(out), "stop_sequence": nil, "usage": d.usage(a, out),
	})
}

func (d anthropic) stream(a ask, out output) (before, middle, after []event) {
	named := func(name string, fields map[string]any) event {
		fields["type"] = name
		return event{name: name, data: fields}
	}
	usage := d.usage(a, out)
	begun := maps.Clone(usage)
	begun["output_tokens"] = 1
	before = []event{
		named("message_start", map[string]any{"message": map[string]any{
			"id": fmt.Sprintf("msg_%d", out.id), "type": "message", "role": "assistant", "model": a.model, "content": []any{},
			"stop_reason": nil, "stop_sequence": nil, "usage": begun,
		}}),
		named("ping", map[string]any{}),
	}
	for i, b := range d.blocks(out) {
		middle = append(middle, named("content_block_start", map[string]any{"index": i, "content_block": b.start}))
		for _, delta := range b.deltas {
			middle = append(middle, named("content_block_delta", map[string]any{"index": i, "delta": delta}))
		}
		middle = append(middle, named("content_block_stop", map[string]any{"index": i}))
	}
	after = []event{
		named("message_delta", map[string]any{"delta": map[string]any{"stop_reason": d.finish(out), "stop_sequence": nil}, "usage": usage}),
		named("message_stop", map[string]any{}),
	}
	return before, middle, after
}
