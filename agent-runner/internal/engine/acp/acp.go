// Package acp drives any agent that speaks the Agent Client Protocol, version 1,
// on stdin and stdout: OpenCode, the adapters of Claude and Codex, Gemini CLI, and
// what the image's owner brings.
//
// The agent is offered neither files nor terminals of ours; it has the
// container's. Whatever it asks permission for is allowed: the container is the
// boundary.
package acp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/program"
	"berth/agent-runner/protocol"
)

const (
	protocolVersion = 1
	// cancelGrace is how long a cancelled turn may take to end; the loop waits two
	// seconds in all.
	cancelGrace = time.Second
	closeGrace  = 3 * time.Second
	// maxQuestions is how many questions in a row count as signs of life.
	maxQuestions = 100
	// maxText bounds an answer, in bytes; what is longer is cut there anyway.
	maxText = protocol.MaxResult + 1
)

var _ engine.Engine = (*Engine)(nil)

// Engine drives one agent for one run.
type Engine struct {
	config engine.Config
	preset preset
	times  program.Times

	// What follows is there after the first Prompt began.

	dir      string // of the run, removed at the end
	tap      *program.Tap
	program  *program.Program
	conn     *conn
	session  string
	named    bool // the host may know the session: the agent can continue it
	preface  bool // the system prompt has yet to be said
	commands      // that the agent has announced

	mu   sync.Mutex
	turn *turn   // nil between turns
	cost float64 // of the session so far, as the agent counts
}

// turn is what an agent said in one turn. Engine.mu guards it.
type turn struct {
	text      strings.Builder
	message   string // the last one's id
	gap       bool   // something else came after the last text
	questions int    // since the last other sign of life
	signs     chan struct{}
	cancelled bool
	began     float64 // cost before it
}

// Open is an engine.Open. Config.Engine chooses the preset.
func Open(c engine.Config) (engine.Engine, error) {
	p, err := presetOf(c)
	if err != nil {
		return nil, err
	}
	times, err := program.TimesOf(c.EngineOptions)
	if err != nil {
		return nil, err
	}
	if p.slow && c.EngineOptions[engine.OptionSession] == "" {
		times.Session = 45 * time.Second
	}
	e := &Engine{config: c, preset: p, times: times}
	s := e.spec()
	if err := s.Find(); err != nil {
		return nil, err
	}
	return e, nil
}

func (e *Engine) spec() program.Spec {
	return program.Spec{
		Name: e.preset.name, Install: e.preset.install, Args: e.preset.args,
		Dir: e.config.WorkDir, Children: e.config.Children, Log: e.config.Log,
	}
}

// Prompt implements engine.Engine.
func (e *Engine) Prompt(ctx context.Context, text string, to engine.Turn) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if e.program == nil {
		if err := e.start(); err != nil {
			return err
		}
	} else if e.gone() {
		return e.program.Fault() // before the prompt is accepted: it is left to the next run
	}
	e.tap.Forget()
	if e.session == "" {
		if err := e.open(ctx); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return err
		}
	}
	if e.named {
		to.Session(e.session)
	}
	return program.Settle(e.prompt(ctx, text, to), to)
}

func (e *Engine) gone() bool {
	select {
	case <-e.program.Gone():
		return true
	default:
		return false
	}
}

// start starts the agent.
func (e *Engine) start() error {
	var err error
	if e.dir, err = os.MkdirTemp("", "agent-"); err != nil {
		return fmt.Errorf("make a folder for %s: %w", e.preset.name, err)
	}
	address := ""
	if e.config.Gateway != "" {
		if e.tap, err = program.OpenTap(e.config.Gateway, e.config.Log); err != nil {
			return err
		}
		address = e.tap.Addr()
	}
	s := e.spec()
	s.Env = program.Environ(e.config, address)
	if e.preset.environ != nil {
		more, err := e.preset.environ(e.config, address, e.dir)
		if err != nil {
			return err
		}
		s.Env = append(s.Env, more...)
	}
	if e.preset.arguments != nil {
		s.Args = append(slices.Clone(s.Args), e.preset.arguments(e.config)...)
	}
	c := &conn{requested: e.requested, notified: e.notified}
	started := make(chan struct{}) // a line may come before Start returns
	p, err := program.Start(s, func(b []byte) {
		<-started
		c.line(b)
	})
	c.program, e.conn, e.program = p, c, p
	close(started)
	return err
}

// Close implements engine.Engine.
func (e *Engine) Close() error {
	if e.program != nil {
		e.program.Close(closeGrace)
	}
	if e.tap != nil {
		e.tap.Close()
	}
	if e.dir != "" {
		return os.RemoveAll(e.dir)
	}
	return nil
}

type textBlock struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

type server struct {
	Name    string   `json:"name"`
	Command string   `json:"command"`
	Args    []string `json:"args"`
	Env     []envVar `json:"env"`
}

type envVar struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type sessionParams struct {
	SessionID string         `json:"sessionId,omitempty"`
	Dir       string         `json:"cwd"`
	Servers   []server       `json:"mcpServers"`
	Meta      map[string]any `json:"_meta,omitempty"`
}

// open agrees on the protocol and gets a session. All of it has the session's
// timeout.
func (e *Engine) open(ctx context.Context) error {
	until, cancel := context.WithTimeoutCause(ctx, e.times.Session, &program.Silent{Name: e.preset.name, After: e.times.Session})
	defer cancel()
	var hello struct {
		ProtocolVersion   int `json:"protocolVersion"`
		AgentCapabilities struct {
			LoadSession         bool `json:"loadSession"`
			SessionCapabilities struct {
				Resume json.RawMessage `json:"resume"`
			} `json:"sessionCapabilities"`
		} `json:"agentCapabilities"`
		AgentInfo struct {
			Name    string `json:"name"`
			Version string `json:"version"`
		} `json:"agentInfo"`
	}
	type object = map[string]any
	err := e.ask(until, "initialize", object{
		"protocolVersion":    protocolVersion,
		"clientCapabilities": object{"fs": object{"readTextFile": false, "writeTextFile": false}, "terminal": false},
		"clientInfo":         object{"name": "berth", "title": "Berth", "version": "1"},
	}, &hello)
	if err != nil {
		return e.unready(err)
	}
	if hello.ProtocolVersion != protocolVersion {
		return &engine.Error{
			Class: protocol.ClassImage,
			Text:  fmt.Sprintf("%s in this image speaks version %d of its protocol; version %d is needed. The operator installs another release of it.", e.preset.name, hello.ProtocolVersion, protocolVersion),
		}
	}
	e.config.Log.Printf("%s: %.64q, version %.64q", e.preset.name, hello.AgentInfo.Name, hello.AgentInfo.Version)

	can := hello.AgentCapabilities
	resume, load := present(can.SessionCapabilities.Resume), can.LoadSession
	e.named = resume || load
	params := sessionParams{Dir: e.config.WorkDir, Servers: servers(e.config.Tools)}
	if e.preset.session != nil {
		e.preset.session(e.config, &params)
	}
	if id := e.config.SessionID; id != "" {
		params.SessionID = id
		if err := e.resume(until, params, resume, load); err != nil {
			return err
		}
		e.session = id
		return nil
	}
	var made struct {
		SessionID string `json:"sessionId"`
	}
	if err := e.ask(until, "session/new", params, &made); err != nil {
		return e.unready(err)
	}
	if made.SessionID == "" {
		return &engine.Error{Text: e.preset.name + " made a session without an id."}
	}
	e.session = made.SessionID
	e.preface = !e.preset.instructed && e.config.SystemPrompt != ""
	return nil
}

// resume continues a session; whatever is said against that, the session is no
// good any more.
func (e *Engine) resume(ctx context.Context, params sessionParams, resume, load bool) error {
	err := error(&rpcError{Code: codeNoMethod, Message: "it cannot continue sessions"})
	if resume {
		err = e.ask(ctx, "session/resume", params, nil)
	}
	if refused, ok := errors.AsType[*rpcError](err); ok && refused.Code == codeNoMethod && load {
		err = e.ask(ctx, "session/load", params, nil) // it tells the history again, between turns
	}
	refused, ok := errors.AsType[*rpcError](err)
	if !ok || refused.Code == codeAuthRequired {
		return e.unready(err)
	}
	e.config.Log.Printf("%s cannot continue session %s: %.512v", e.preset.name, params.SessionID, refused)
	return &engine.Error{Class: protocol.ClassStaleSession, Text: e.preset.name + " cannot continue the session."}
}

// unready explains a failure before the first prompt.
func (e *Engine) unready(err error) error {
	if err == nil {
		return nil
	}
	refused, ok := errors.AsType[*rpcError](err)
	switch {
	case ok && refused.Code == codeAuthRequired:
		e.config.Log.Printf("%s: %.512v", e.preset.name, refused)
		return &engine.Error{Class: protocol.ClassAuth, Text: e.preset.name + " wants to be logged in, which it cannot be here. The operator has been told."}
	case ok:
		return e.program.Explain(refused.Error(), e.tap)
	}
	if silent, ok := errors.AsType[*program.Silent](err); ok {
		e.config.Log.Printf("%s is not ready after %v: %s", e.preset.name, silent.After, e.program.Stderr())
		return &engine.Error{Text: fmt.Sprintf("%s was not ready within %v.", e.preset.name, silent.After)}
	}
	return err
}

// ask calls the agent and waits for its answer, which is decoded to into, if that
// is not nil.
func (e *Engine) ask(ctx context.Context, method string, params, into any) error {
	call, err := e.conn.call(method, params)
	if err != nil {
		return err
	}
	if err := e.program.Await(ctx, call.done, program.Watch{First: e.times.Session}); err != nil {
		return err
	}
	if call.err != nil {
		return call.err
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(call.result, into); err != nil {
		return fmt.Errorf("%s answered %s with nonsense: %w", e.preset.name, method, err)
	}
	return nil
}

// prompt runs one turn.
func (e *Engine) prompt(ctx context.Context, text string, to engine.Turn) error {
	blocks := []textBlock{{"text", text}}
	if e.preface {
		blocks = []textBlock{{"text", e.config.SystemPrompt}, {"text", text}}
		e.preface = false
	}
	t := &turn{signs: make(chan struct{}, 1)}
	e.mu.Lock()
	t.began = e.cost
	e.turn = t
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.turn = nil
	}()
	type object = map[string]any
	call, err := e.conn.call("session/prompt", object{"sessionId": e.session, "prompt": blocks})
	if err != nil {
		return err
	}
	to.Accept()
	err = e.program.Await(ctx, call.done, program.Watch{Signs: t.signs, First: e.times.First, Silence: e.times.Silence, Tap: e.tap})
	if err != nil {
		if !e.cancel(t, call) && ctx.Err() != nil {
			// Not the cause: with that the run would go on, and nobody would be there.
			return &engine.Error{Text: e.preset.name + " did not stop and was killed."}
		}
		return e.program.Failed(err, e.tap)
	}
	if call.err != nil {
		if call.err.Code == codeAuthRequired {
			return e.unready(call.err)
		}
		return e.program.Explain(call.err.Error(), e.tap)
	}
	return e.finish(t, call.result, to)
}

// cancel ends the turn, and the agent if it does not take that: then it reports
// false.
func (e *Engine) cancel(t *turn, call *call) (lives bool) {
	e.mu.Lock()
	t.cancelled = true
	e.mu.Unlock()
	_ = e.conn.notify("session/cancel", map[string]string{"sessionId": e.session})
	timer := time.NewTimer(cancelGrace)
	defer timer.Stop()
	select {
	case <-call.done:
		return true
	case <-e.program.Gone():
	case <-timer.C:
		e.config.Log.Printf("%s did not stop its turn: it is killed", e.preset.name)
		e.program.Kill()
	}
	return false
}

// finish sends the turn's answer.
func (e *Engine) finish(t *turn, result json.RawMessage, to engine.Turn) error {
	var end struct {
		StopReason string `json:"stopReason"`
		Usage      *struct {
			Input      int64 `json:"inputTokens"`
			Output     int64 `json:"outputTokens"`
			CacheRead  int64 `json:"cachedReadTokens"`
			CacheWrite int64 `json:"cachedWriteTokens"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(result, &end); err != nil {
		return &engine.Error{Text: fmt.Sprintf("%s ended the turn with nonsense: %v", e.preset.name, err)}
	}
	e.mu.Lock()
	text, cost := strings.TrimSpace(t.text.String()), e.cost-t.began
	e.mu.Unlock()
	if _, refused := e.tap.Last(); refused && (e.preset.prose || text == "") {
		return e.program.Explain(text, e.tap)
	}
	switch end.StopReason {
	case "cancelled":
		return &engine.Error{Text: e.preset.name + " cancelled the turn by itself."}
	case "max_tokens", "max_turn_requests":
		text = strings.TrimSpace(text + "\n\n(I had to stop here: the limit for one answer is reached.)")
	case "refusal":
		if text == "" {
			text = "The model refuses to answer this."
		}
	}
	if text == "" {
		return nil
	}
	var usage *protocol.Usage
	if u := end.Usage; u != nil {
		usage = &protocol.Usage{InputTokens: u.Input + u.CacheRead + u.CacheWrite, OutputTokens: u.Output, CostUSD: max(cost, 0)}
	}
	to.Answer(engine.Answer{Text: text, Usage: usage})
	return nil
}

// update is what the agent says of a session.
type update struct {
	SessionID string `json:"sessionId"`
	Update    struct {
		Kind      string          `json:"sessionUpdate"`
		MessageID string          `json:"messageId"`
		Content   json.RawMessage `json:"content"` // of a chunk one block, of a tool call several
		Cost      *struct {
			Amount   float64 `json:"amount"`
			Currency string  `json:"currency"`
		} `json:"cost"`
	} `json:"update"`
}

// notified takes what the agent says while it works.
func (e *Engine) notified(method string, params json.RawMessage) {
	if method != "session/update" {
		return
	}
	e.announced(params)
	var u update
	if err := json.Unmarshal(params, &u); err != nil {
		e.program.Garbage(params, fmt.Errorf("not an update: %w", err))
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := u.Update.Cost; c != nil && c.Currency == "USD" {
		e.cost = c.Amount
	}
	t := e.turn
	if t == nil || t.cancelled {
		return // the history of a session that is loaded, or late
	}
	switch u.Update.Kind {
	case "agent_message_chunk":
		var block textBlock
		if json.Unmarshal(u.Update.Content, &block) == nil && block.Type == "text" && u.SessionID == e.session {
			t.add(block.Text, u.Update.MessageID)
		}
	case "agent_thought_chunk", "tool_call", "tool_call_update", "plan":
		t.gap = true
	default:
		return // of the session, not of the turn
	}
	t.questions = 0
	t.sign()
}

// add joins a chunk to the answer: what is said after something else is a
// paragraph of its own.
func (t *turn) add(text, message string) {
	if text == "" {
		return
	}
	if t.text.Len() > 0 && (t.gap || message != t.message) {
		text = "\n\n" + text
	}
	t.gap, t.message = false, message
	t.text.WriteString(text[:min(len(text), maxText-t.text.Len())])
}

func (t *turn) sign() {
	select {
	case t.signs <- struct{}{}:
	default:
	}
}

// requested answers what the agent asks.
func (e *Engine) requested(method string, params json.RawMessage) (any, *rpcError) {
	if method != "session/request_permission" {
		return nil, &rpcError{Code: codeNoMethod, Message: fmt.Sprintf("Berth offers no %.64q", method)}
	}
	var p struct {
		Options []option `json:"options"`
	}
	_ = json.Unmarshal(params, &p) // then there are no options
	type outcome struct {
		Outcome  string `json:"outcome"`
		OptionID string `json:"optionId,omitempty"`
	}
	answer := outcome{Outcome: "cancelled"}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.turn != nil && !e.turn.cancelled {
		if e.turn.questions++; e.turn.questions <= maxQuestions {
			e.turn.sign()
		}
		if id, ok := allow(p.Options); ok {
			answer = outcome{"selected", id}
		}
	}
	return map[string]any{"outcome": answer}, nil
}

type option struct {
	ID   string `json:"optionId"`
	Kind string `json:"kind"`
}

// allow chooses by kind; ids are the agent's own.
func allow(options []option) (id string, ok bool) {
	for _, kind := range []string{"allow_once", "allow_always"} {
		if i := slices.IndexFunc(options, func(o option) bool { return o.Kind == kind }); i >= 0 {
			return options[i].ID, true
		}
	}
	return "", false
}

// servers are the tools in the protocol's words.
func servers(tools []engine.ToolServer) []server {
	all := []server{}
	for _, tool := range tools {
		s := server{Name: tool.Name, Command: tool.Command[0], Args: tool.Command[1:], Env: []envVar{}}
		if s.Args == nil {
			s.Args = []string{}
		}
		for _, name := range slices.Sorted(maps.Keys(tool.Env)) {
			s.Env = append(s.Env, envVar{name, tool.Env[name]})
		}
		all = append(all, s)
	}
	return all
}

// present reports whether a capability, which is an object, is there.
func present(raw json.RawMessage) bool {
	return len(raw) > 0 && string(raw) != "null" && string(raw) != "false"
}
