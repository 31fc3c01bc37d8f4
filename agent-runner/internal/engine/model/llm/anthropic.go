package llm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"berth/agent-runner/protocol"
)

var _ Provider = (*Anthropic)(nil)

// The most tokens of one reply. Models of before 2025 take the second.
const (
	maxTokens    = 16384
	maxTokensOld = 4096
)

// Anthropic speaks Anthropic's messages.
type Anthropic struct {
	client client
	old    atomic.Bool // the model takes maxTokensOld at most
}

// NewAnthropic returns the provider at e: the address without /v1.
func NewAnthropic(e Endpoint) *Anthropic {
	header := http.Header{}
	header.Set("X-Api-Key", e.Key)
	header.Set("Anthropic-Version", "2023-06-01")
	return &Anthropic{client: newClient(e, header)}
}

// Name implements Provider.
func (*Anthropic) Name() string { return "Anthropic" }

// Models implements Provider.
func (a *Anthropic) Models(ctx context.Context) ([]string, error) {
	return a.client.models(ctx, "/v1/models?limit=100")
}

// Stream implements Provider.
func (a *Anthropic) Stream(ctx context.Context, r Request, seen func(string)) (Reply, error) {
	resp, err := a.client.do(ctx, http.MethodPost, "/v1/messages", a.encode(r))
	if f, ok := errors.AsType[*Failure](err); ok && f.Status == http.StatusBadRequest && !a.old.Load() &&
		strings.Contains(f.Message, "max_tokens") && f.Kind == Invalid {
		a.old.Store(true)
		resp, err = a.client.do(ctx, http.MethodPost, "/v1/messages", a.encode(r))
	}
	if err != nil {
		return Reply{}, err
	}
	defer resp.Body.Close()
	seen("")
	if !streams(resp) {
		return Reply{}, &Failure{Kind: Broken, Message: "the answer is no stream but " + shorten(resp.Header.Get("Content-Type"))}
	}
	var s anthropicStream
	said := time.Now()
	for e, err := range events(resp.Body) {
		if err != nil {
			return Reply{}, broken(ctx, Broken, err)
		}
		text, err := s.take(e)
		if err != nil {
			return Reply{}, broken(ctx, Broken, err)
		}
		if s.over {
			return s.reply(), nil
		}
		if !s.quiet {
			said = time.Now()
		}
		if time.Since(said) < longestQuiet {
			seen(text)
		}
	}
	return Reply{}, broken(ctx, Broken, errCut)
}

var (
	errCut      = errors.New("the answer broke off")
	errTooLarge = errors.New("the answer is too large")
)

// What follows is the protocol's.

type anthropicRequest struct {
	Model     string             `json:"model"`
	MaxTokens int                `json:"max_tokens"`
	Stream    bool               `json:"stream"`
	System    []anthropicBlock   `json:"system,omitempty"`
	Messages  []anthropicMessage `json:"messages"`
	Tools     []anthropicTool    `json:"tools,omitempty"`
}

type anthropicMessage struct {
	Role    Role  `json:"role"`
	Content []any `json:"content"`
}

type anthropicTool struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	InputSchema json.RawMessage `json:"input_schema"`
}

type anthropicBlock struct {
	Type         string          `json:"type"`
	Text         string          `json:"text,omitempty"`
	ID           string          `json:"id,omitempty"`
	Name         string          `json:"name,omitempty"`
	Input        json.RawMessage `json:"input,omitempty"`
	ToolUseID    string          `json:"tool_use_id,omitempty"`
	Content      string          `json:"content,omitempty"`
	IsError      bool            `json:"is_error,omitempty"`
	CacheControl *cacheControl   `json:"cache_control,omitempty"`
}

type cacheControl struct {
	Type string `json:"type"`
}

// ephemeral marks the end of what the provider may keep for the next request:
// reading it again costs a tenth.
var ephemeral = &cacheControl{Type: "ephemeral"}

func (a *Anthropic) encode(r Request) anthropicRequest {
	out := anthropicRequest{Model: r.Model, MaxTokens: maxTokens, Stream: true}
	if a.old.Load() {
		out.MaxTokens = maxTokensOld
	}
	if r.System != "" {
		out.System = []anthropicBlock{{Type: "text", Text: r.System, CacheControl: ephemeral}}
	}
	for _, t := range r.Tools {
		out.Tools = append(out.Tools, anthropicTool{t.Name, t.Description, t.Schema})
	}
	for i, m := range r.Messages {
		var content []any
		for _, p := range m.Parts {
			switch {
			case p.Own != nil:
				content = append(content, p.Own)
			case p.Call != nil:
				content = append(content, &anthropicBlock{Type: "tool_use", ID: plain(p.Call.ID), Name: plain(p.Call.Name), Input: object(p.Call.Input)})
			case p.Result != nil:
				content = append(content, &anthropicBlock{Type: "tool_result", ToolUseID: plain(p.Result.CallID), Content: p.Result.Text, IsError: p.Result.Failed})
			case strings.TrimSpace(p.Text) != "": // an empty text is refused
				content = append(content, &anthropicBlock{Type: "text", Text: p.Text})
			}
		}
		if len(content) == 0 {
			continue
		}
		if last, ok := content[len(content)-1].(*anthropicBlock); ok && i == len(r.Messages)-1 {
			last.CacheControl = ephemeral
		}
		out.Messages = append(out.Messages, anthropicMessage{m.Role, content})
	}
	return out
}

// object returns input if it is a JSON object, else an empty one: the model is
// told by the call's result what was wrong.
func object(input string) json.RawMessage {
	raw := json.RawMessage(strings.TrimSpace(input))
	if len(raw) == 0 || raw[0] != '{' || !json.Valid(raw) {
		return json.RawMessage("{}")
	}
	return raw
}

// plain makes an id or a name of another provider one that this one takes.
func plain(id string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-' {
			return r
		}
		return '_'
	}, id)
}

// anthropicStream puts a message together from its events.
type anthropicStream struct {
	blocks []*anthropicPart
	size   int
	stop   string
	usage  anthropicUsage
	quiet  bool // the last event said nothing
	over   bool
}

type anthropicPart struct {
	kind      string
	id, name  string
	text      strings.Builder // of a text, a thought, or a call's input
	signature strings.Builder
	whole     json.RawMessage // as it began
}

type anthropicUsage struct {
	Input      int64 `json:"input_tokens"`
	CacheRead  int64 `json:"cache_read_input_tokens"`
	CacheWrite int64 `json:"cache_creation_input_tokens"`
	Output     int64 `json:"output_tokens"`
}

// take reads one event and returns the text that it adds.
func (s *anthropicStream) take(e event) (text string, err error) {
	if s.quiet = e.data == nil; s.quiet {
		return "", nil
	}
	var in struct {
		Type    string `json:"type"`
		Index   int    `json:"index"`
		Message struct {
			Usage anthropicUsage `json:"usage"`
		} `json:"message"`
		Block json.RawMessage `json:"content_block"`
		Delta struct {
			Text        string `json:"text"`
			PartialJSON string `json:"partial_json"`
			Thinking    string `json:"thinking"`
			Signature   string `json:"signature"`
			StopReason  string `json:"stop_reason"`
		} `json:"delta"`
		Usage anthropicUsage `json:"usage"`
	}
	if err := json.Unmarshal(e.data, &in); err != nil {
		return "", err
	}
	s.quiet = in.Type == "ping"
	switch in.Type {
	case "message_start":
		s.usage = in.Message.Usage
	case "content_block_start":
		var b struct {
			Type, ID, Name, Text string
			Input                json.RawMessage
		}
		if err := json.Unmarshal(in.Block, &b); err != nil {
			return "", err
		}
		if in.Index != len(s.blocks) || in.Index >= 4*maxCalls {
			return "", errors.New("the answer's parts are out of order")
		}
		if s.size += len(in.Block); s.size > maxReply {
			return "", errTooLarge
		}
		s.blocks = append(s.blocks, &anthropicPart{kind: b.Type, id: b.ID, name: b.Name, whole: bytes.Clone(in.Block)})
		if b.Type == "text" {
			s.blocks[in.Index].text.WriteString(b.Text)
			return b.Text, nil
		}
		if b.Type == "tool_use" && string(object(string(b.Input))) != "{}" { // a server that does not stream it
			s.blocks[in.Index].text.Write(b.Input)
		}
	case "content_block_delta":
		if in.Index < 0 || in.Index >= len(s.blocks) {
			return "", errors.New("the answer's parts are out of order")
		}
		b, d := s.blocks[in.Index], &in.Delta
		if s.size += len(d.Text) + len(d.PartialJSON) + len(d.Thinking) + len(d.Signature); s.size > maxReply {
			return "", errTooLarge
		}
		b.text.WriteString(d.Text + d.PartialJSON + d.Thinking)
		b.signature.WriteString(d.Signature)
		if b.kind == "text" {
			return d.Text, nil
		}
	case "message_delta":
		if in.Delta.StopReason != "" {
			s.stop = in.Delta.StopReason
		}
		// It repeats what the start said, and some servers say it only here.
		s.usage.Output = max(s.usage.Output, in.Usage.Output)
		s.usage.Input = max(s.usage.Input, in.Usage.Input)
		s.usage.CacheRead = max(s.usage.CacheRead, in.Usage.CacheRead)
		s.usage.CacheWrite = max(s.usage.CacheWrite, in.Usage.CacheWrite)
	case "message_stop":
		s.over = true
	case "error":
		p := readError(e.data)
		return "", &Failure{Kind: p.kind(0), Message: p.message}
	}
	return "", nil
}

func (s *anthropicStream) reply() Reply {
	r := Reply{
		Message: Message{Role: Assistant},
		Usage:   Usage{Input: s.usage.Input + s.usage.CacheRead + s.usage.CacheWrite, Output: s.usage.Output},
	}
	switch s.stop {
	case "max_tokens", "model_context_window_exceeded":
		r.Stop = StopLength
	case "refusal":
		r.Stop = StopRefused
	}
	for _, b := range s.blocks {
		var p Part
		switch b.kind {
		case "text":
			p.Text = b.text.String()
		case "tool_use":
			p.Call = &Call{ID: b.id, Name: b.name, Input: b.text.String()}
		case "thinking":
			p.Own, _ = protocol.Marshal(map[string]string{"type": "thinking", "thinking": b.text.String(), "signature": b.signature.String()}) // cannot fail
		default: // such as a thought that only the provider can read
			p.Own = b.whole
		}
		r.Message.Parts = append(r.Message.Parts, p)
	}
	return r
}
