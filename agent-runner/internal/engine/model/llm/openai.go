package llm

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

var _ Provider = (*OpenAI)(nil)

// OpenAI speaks OpenAI's chat completions, with patience for the many servers
// that almost do.
type OpenAI struct {
	client client

	// What the server turned out not to take.
	noUsage atomic.Bool
	noTools atomic.Bool
}

// NewOpenAI returns the provider at e: the address with /v1, if it has one.
func NewOpenAI(e Endpoint) *OpenAI {
	header := http.Header{}
	if e.Key != "" {
		header.Set("Authorization", "Bearer "+e.Key)
	}
	return &OpenAI{client: newClient(e, header)}
}

// Name implements Provider.
func (*OpenAI) Name() string { return "OpenAI-compatible" }

// Models implements Provider.
func (o *OpenAI) Models(ctx context.Context) ([]string, error) {
	return o.client.models(ctx, "/models")
}

// Stream implements Provider.
func (o *OpenAI) Stream(ctx context.Context, r Request, seen func(string)) (Reply, error) {
	resp, err := o.client.do(ctx, http.MethodPost, "/chat/completions", o.encode(r))
	for o.adapt(err, len(r.Tools) > 0) {
		resp, err = o.client.do(ctx, http.MethodPost, "/chat/completions", o.encode(r))
	}
	if err != nil {
		return Reply{}, err
	}
	defer resp.Body.Close()
	seen("")
	s := openAIStream{seen: seen}
	if !streams(resp) { // some servers do not stream when there are tools
		data, err := io.ReadAll(io.LimitReader(resp.Body, maxReply+1))
		if err == nil && len(data) > maxReply {
			err = errTooLarge
		}
		if err == nil {
			err = s.take(data)
		}
		if err != nil {
			return Reply{}, broken(ctx, Broken, err)
		}
		return s.reply(), nil
	}
	said := time.Now()
	for e, err := range events(resp.Body) {
		switch {
		case err != nil:
		case e.data == nil: // a comment
			if time.Since(said) < longestQuiet {
				seen("")
			}
			continue
		case string(bytes.TrimSpace(e.data)) == "[DONE]":
			if s.ended {
				return s.reply(), nil
			}
			err = errCut
		default:
			said = time.Now()
			err = s.take(e.data)
		}
		if err != nil {
			return Reply{}, broken(ctx, Broken, err)
		}
	}
	if ctx.Err() == nil && s.ended {
		return s.reply(), nil
	}
	return Reply{}, broken(ctx, Broken, errCut)
}

// adapt reports whether err is the refusal of something that the server does not
// know and the next request will leave out.
func (o *OpenAI) adapt(err error, tools bool) bool {
	f, ok := errors.AsType[*Failure](err)
	if !ok || f.Status < 400 || f.Status >= 500 {
		return false
	}
	text := strings.ToLower(f.Message)
	if strings.Contains(text, "stream_options") || strings.Contains(text, "include_usage") {
		return o.noUsage.CompareAndSwap(false, true)
	}
	for _, words := range []string{"does not support tools", "support tool use", "does not support function calling", "tools is not supported"} {
		if tools && strings.Contains(text, words) {
			return o.noTools.CompareAndSwap(false, true)
		}
	}
	return false
}

// Toolless reports whether the model turned out to take no tools: it is asked
// without them since then.
func (o *OpenAI) Toolless() bool { return o.noTools.Load() }

// What follows is the protocol's.

type openAIRequest struct {
	Model         string          `json:"model"`
	Messages      []openAIMessage `json:"messages"`
	Tools         []openAITool    `json:"tools,omitempty"`
	Stream        bool            `json:"stream"`
	StreamOptions *streamOptions  `json:"stream_options,omitempty"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

type openAIMessage struct {
	Role       string       `json:"role"`
	Content    string       `json:"content"`
	ToolCalls  []openAICall `json:"tool_calls,omitempty"`
	ToolCallID string       `json:"tool_call_id,omitempty"`

	// What a reasoning model thought; within a turn some want it back.
	ReasoningContent string `json:"reasoning_content,omitempty"`
}

type openAICall struct {
	ID       string          `json:"id"`
	Type     string          `json:"type"`
	Function openAIFunction  `json:"function"`
	Extra    json.RawMessage `json:"extra_content,omitempty"` // Gemini's signature
}

type openAIFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

type openAITool struct {
	Type     string `json:"type"`
	Function struct {
		Name        string          `json:"name"`
		Description string          `json:"description,omitempty"`
		Parameters  json.RawMessage `json:"parameters"`
	} `json:"function"`
}

func (o *OpenAI) encode(r Request) openAIRequest {
	out := openAIRequest{Model: r.Model, Stream: true}
	if !o.noUsage.Load() {
		out.StreamOptions = &streamOptions{IncludeUsage: true}
	}
	if r.System != "" {
		out.Messages = append(out.Messages, openAIMessage{Role: "system", Content: r.System})
	}
	if !o.noTools.Load() {
		for _, t := range r.Tools {
			tool := openAITool{Type: "function"}
			tool.Function.Name, tool.Function.Description, tool.Function.Parameters = t.Name, t.Description, t.Schema
			out.Tools = append(out.Tools, tool)
		}
	}
	for _, m := range r.Messages {
		var texts []string
		said := openAIMessage{Role: string(m.Role)}
		for _, p := range m.Parts {
			switch {
			case p.Own != nil:
				_ = json.Unmarshal(p.Own, &said.ReasoningContent) // another provider's is none
			case p.Call != nil:
				said.ToolCalls = append(said.ToolCalls, openAICall{
					ID: p.Call.ID, Type: "function", Extra: p.Call.Extra,
					Function: openAIFunction{p.Call.Name, string(object(p.Call.Input))},
				})
			case p.Result != nil:
				text := p.Result.Text
				if p.Result.Failed {
					text = "Error: " + text
				}
				out.Messages = append(out.Messages, openAIMessage{Role: "tool", ToolCallID: p.Result.CallID, Content: text})
			case strings.TrimSpace(p.Text) != "":
				texts = append(texts, p.Text)
			}
		}
		said.Content = strings.Join(texts, "\n")
		if said.Content != "" || len(said.ToolCalls) > 0 {
			out.Messages = append(out.Messages, said)
		}
	}
	return out
}

// openAIStream puts a message together from its chunks.
type openAIStream struct {
	seen    func(string)
	text    strings.Builder
	thought strings.Builder
	calls   []*openAIPart
	size    int
	stop    string
	ended   bool
	usage   Usage
}

type openAIPart struct {
	index    int
	id, name string
	args     strings.Builder
	extra    json.RawMessage
}

type openAIDelta struct {
	Content          json.RawMessage `json:"content"`
	Reasoning        string          `json:"reasoning"`
	ReasoningContent string          `json:"reasoning_content"`
	Refusal          string          `json:"refusal"`
	ToolCalls        []struct {
		Index    *int   `json:"index"`
		ID       string `json:"id"`
		Function struct {
			Name      string          `json:"name"`
			Arguments json.RawMessage `json:"arguments"`
		} `json:"function"`
		Extra json.RawMessage `json:"extra_content"`
	} `json:"tool_calls"`
}

// take reads one chunk, or a whole message that was not streamed.
func (s *openAIStream) take(data []byte) error {
	var in struct {
		Choices []struct {
			Delta        openAIDelta     `json:"delta"`
			Message      *openAIDelta    `json:"message"`
			FinishReason string          `json:"finish_reason"`
			Error        json.RawMessage `json:"error"`
		} `json:"choices"`
		Usage *struct {
			Prompt     int64   `json:"prompt_tokens"`
			Completion int64   `json:"completion_tokens"`
			Cost       float64 `json:"cost"`
		} `json:"usage"`
		Error json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(data, &in); err != nil {
		return err
	}
	if len(in.Error) > 0 && string(in.Error) != "null" {
		return inStream(data)
	}
	if s.size += len(data); s.size > 4*maxReply {
		return errTooLarge
	}
	if in.Usage != nil { // several are running totals
		s.usage = Usage{Input: in.Usage.Prompt, Output: in.Usage.Completion, USD: in.Usage.Cost}
	}
	if len(in.Choices) == 0 {
		s.seen("")
		return nil
	}
	c := in.Choices[0]
	if len(c.Error) > 0 && string(c.Error) != "null" {
		return inStream([]byte(fmt.Sprintf(`{"error":%s}`, c.Error)))
	}
	if c.Message != nil {
		c.Delta = *c.Message
		c.FinishReason = orStop(c.FinishReason)
	}
	if c.FinishReason != "" {
		s.stop, s.ended = c.FinishReason, true
	}
	return s.add(c.Delta)
}

func orStop(reason string) string {
	if reason == "" {
		return "stop"
	}
	return reason
}

func inStream(data []byte) error {
	e := readError(data)
	return &Failure{Kind: e.kind(0), Message: e.message}
}

func (s *openAIStream) add(d openAIDelta) error {
	text := content(d.Content) + d.Refusal
	s.text.WriteString(text)
	s.thought.WriteString(d.ReasoningContent)
	for _, c := range d.ToolCalls {
		args := content(c.Function.Arguments)
		p := s.part(c.Index, c.ID, c.Function.Name)
		if p == nil {
			if len(s.calls) >= maxCalls {
				return fmt.Errorf("the answer has more than %d calls", maxCalls)
			}
			p = &openAIPart{}
			if c.Index != nil {
				p.index = *c.Index
			}
			s.calls = append(s.calls, p)
		}
		if c.ID != "" {
			p.id = c.ID
		}
		if c.Function.Name != "" && p.name == "" {
			p.name = c.Function.Name
		}
		if len(c.Extra) > 0 {
			p.extra = bytes.Clone(c.Extra)
		}
		p.args.WriteString(args)
	}
	if s.text.Len()+s.thought.Len() > maxReply {
		return errTooLarge
	}
	s.seen(text)
	return nil
}

// part returns the call that a chunk goes on with, or nil. Some servers send whole
// calls, all with the same index or with none.
func (s *openAIStream) part(index *int, id, name string) *openAIPart {
	for _, p := range slices.Backward(s.calls) {
		switch {
		case index == nil && id == "" && name == "":
			return p
		case index != nil && p.index == *index && (id == "" || p.id == id):
			return p
		}
	}
	return nil
}

// content reads a text, a list of parts with texts, or any other value as its JSON.
func content(raw json.RawMessage) string {
	if len(raw) == 0 || string(raw) == "null" {
		return ""
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text
	}
	var parts []struct {
		Text string `json:"text"`
	}
	if json.Unmarshal(raw, &parts) == nil {
		for _, p := range parts {
			text += p.Text
		}
		return text
	}
	return string(raw)
}

func (s *openAIStream) reply() Reply {
	r := Reply{Message: Message{Role: Assistant}, Usage: s.usage}
	switch s.stop {
	case "length":
		r.Stop = StopLength
	case "content_filter":
		r.Stop = StopRefused
	}
	if s.thought.Len() > 0 {
		own, err := json.Marshal(s.thought.String())
		if err == nil {
			r.Message.Parts = append(r.Message.Parts, Part{Own: own})
		}
	}
	if text := withoutThought(s.text.String()); text != "" {
		r.Message.Parts = append(r.Message.Parts, Part{Text: text})
	}
	ids := make(map[string]bool)
	for _, p := range s.calls {
		// Some servers name calls by their function, or not at all.
		if p.id == "" || ids[p.id] {
			p.id = "call_" + rand.Text()
		}
		ids[p.id] = true
		r.Message.Parts = append(r.Message.Parts, Part{Call: &Call{ID: p.id, Name: p.name, Input: p.args.String(), Extra: p.extra}})
	}
	return r
}

// withoutThought removes what a local reasoning model thinks before its answer.
func withoutThought(text string) string {
	rest, ok := strings.CutPrefix(strings.TrimSpace(text), "<think>")
	if !ok {
		return text
	}
	_, answer, closed := strings.Cut(rest, "</think>")
	if !closed {
		return ""
	}
	return strings.TrimSpace(answer)
}
