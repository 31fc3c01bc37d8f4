// Package claude drives Claude Code by the lines of JSON that its own SDK speaks
// with it. It needs no Node, and answers sooner and in less memory than by way of
// the Agent Client Protocol.
//
// Whatever Claude Code asks permission for is allowed: the container is the
// boundary.
package claude

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"mvdan.cc/sh/v3/shell"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/program"
	"berth/agent-runner/protocol"
)

const (
	name    = "Claude Code"
	install = "npm package @anthropic-ai/claude-code, whose licence is the operator's to accept"

	// cancelGrace is how long an interrupted turn may take to end; the loop waits
	// two seconds in all.
	cancelGrace = time.Second
	// closeGrace is for the transcript: Claude Code writes the last turn to it some
	// time after the answer.
	closeGrace = 5 * time.Second
	// maxQuestions is how many questions in a row count as signs of life.
	maxQuestions = 100
)

var _ engine.Steerer = (*Engine)(nil)

// Engine drives one Claude Code for one run.
type Engine struct {
	config engine.Config
	times  program.Times
	args   []string

	// What follows is there after the first Prompt began.

	tap     *program.Tap
	program *program.Program
	session string
	ready   chan struct{} // closed when Claude Code has answered the first request
	greeted bool          // ready is closed; only the goroutine of the lines touches it
	spent   float64       // of the session so far, as Claude Code counts

	mu   sync.Mutex
	turn *turn // nil between turns
	told bool  // it says what becomes of messages; older releases do not
	// asides are results of turns that Claude Code took by itself, for example when a
	// command in the background had ended. They wait for the next answer: alone they
	// would pass for the answer to a message that is yet to be answered.
	asides []result

	compactions
}

// turn is one Prompt under way. Engine.mu guards it.
type turn struct {
	signs     chan struct{}
	questions int           // since the last other sign of life
	step      chan struct{} // closed when there is something in results, or the turn is over
	results   []result
	ended     bool // a result was there since the last message began
	early     bool // a result was there before the prompt began
	queued    bool // when the last result came, a message was not begun

	// messages are those that Claude Code has yet to finish, by the ids that they
	// were given here, and whether they were begun. There are not as many results as
	// messages: what comes during a tool is answered together with what was there
	// before.
	messages map[string]bool
	told     bool   // as the engine's
	own      string // the id of the prompt itself
}

var uuid = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// Open is an engine.Open.
func Open(c engine.Config) (engine.Engine, error) {
	times, err := program.TimesOf(c.EngineOptions)
	if err != nil {
		return nil, err
	}
	e := &Engine{config: c, times: times, args: []string{"claude"}, ready: make(chan struct{})}
	if text := c.EngineOptions[engine.OptionCommand]; text != "" {
		e.args, err = shell.Fields(text, func(string) string { return "" })
		if err != nil || len(e.args) == 0 {
			return nil, &engine.Error{Class: protocol.ClassInput, Text: fmt.Sprintf("the agent's command is %q, which no shell could read", text)}
		}
	}
	if c.Gateway == "" {
		return nil, &engine.Error{Class: protocol.ClassInput, Text: name + " needs a model, and this run has no gateway to one."}
	}
	if c.SessionID != "" && !uuid.MatchString(c.SessionID) {
		// Another engine made it. Claude Code would take it for something else.
		return nil, stale()
	}
	s := e.spec()
	if err := s.Find(); err != nil {
		return nil, err
	}
	return e, nil
}

func stale() error {
	return &engine.Error{Class: protocol.ClassStaleSession, Text: name + " cannot continue the session."}
}

func (e *Engine) spec() program.Spec {
	return program.Spec{Name: name, Install: install, Args: e.args, Dir: e.config.WorkDir, Children: e.config.Children, Log: e.config.Log}
}

// start starts Claude Code and gives it the first request, which it answers when
// it can take messages. It takes them before too, so nobody has to wait.
func (e *Engine) start() error {
	tap, err := program.OpenTap(e.config.Gateway, e.config.Log)
	if err != nil {
		return err
	}
	e.tap = tap
	s := e.spec()
	s.Args = append(s.Args[:len(s.Args):len(s.Args)],
		"-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose", "--include-partial-messages",
		"--permission-prompt-tool", "stdio",
		"--strict-mcp-config", "--mcp-config", servers(e.config.Tools),
		"--disallowedTools", "AskUserQuestion", // a question on a screen that nobody sees
	)
	if e.session = e.config.SessionID; e.session != "" {
		s.Args = append(s.Args, "--resume", e.session)
	} else {
		e.session = newUUID()
		s.Args = append(s.Args, "--session-id", e.session)
	}
	if model := e.config.EngineOptions[engine.OptionModel]; model != "" {
		s.Args = append(s.Args, "--model", model)
	}
	s.Env = append(program.Environ(e.config, tap.Addr()),
		"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
		"DISABLE_AUTOUPDATER=1",
		"CLAUDE_CODE_MAX_RETRIES=2", // of ten: the host tries again too
		"ENABLE_TOOL_SEARCH=false",  // or the model has to look for the group's tools first
	)
	started := make(chan struct{}) // a line may come before Start returns
	p, err := program.Start(s, func(b []byte) {
		<-started
		e.line(b)
	})
	e.program = p
	close(started)
	if err != nil {
		return err
	}
	hello := map[string]any{"subtype": "initialize", "hooks": nil}
	if e.config.SystemPrompt != "" {
		hello["appendSystemPrompt"] = e.config.SystemPrompt
	}
	return p.Send(map[string]any{"type": "control_request", "request_id": helloID, "request": hello})
}

// Ids of our requests.
const (
	helloID = "berth-hello"
	stopID  = "berth-stop"
)

// Close implements engine.Engine. It waits for Claude Code to put the last turn
// into the transcript.
func (e *Engine) Close() error {
	if e.program != nil {
		e.program.Close(closeGrace)
	}
	if e.tap != nil {
		e.tap.Close()
	}
	return nil
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
	} else if isClosed(e.program.Gone()) {
		return e.program.Fault() // before the prompt is accepted: it is left to the next run
	}
	e.tap.Forget()
	own := newUUID()
	t := &turn{signs: make(chan struct{}, 1), step: make(chan struct{}), messages: map[string]bool{own: false}, own: own}
	e.mu.Lock()
	e.turn, t.told = t, e.told
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.turn = nil
	}()
	if err := e.program.Send(user(text, own)); err != nil {
		return err
	}
	return program.Settle(e.carry(ctx, t, to), to)
}

// carry waits for the turn's results and sends them.
func (e *Engine) carry(ctx context.Context, t *turn, to engine.Turn) error {
	err := e.program.Await(ctx, e.ready, program.Watch{First: e.times.Session})
	if err != nil {
		return e.unready(ctx, err)
	}
	to.Session(e.session)
	to.Accept()
	first := e.times.First
	for {
		e.mu.Lock()
		step := t.step
		e.mu.Unlock()
		err := e.program.Await(ctx, step, program.Watch{Signs: t.signs, First: first, Silence: e.times.Silence, Tap: e.tap})
		results, over, alone := e.take(t)
		silent, _ := errors.AsType[*program.Silent](err)
		if len(results) > 0 && !slices.ContainsFunc(results, result.failed) || silent != nil && alone {
			results = append(e.takeAsides(), results...)
		}
		for _, r := range results {
			if err := e.answer(r, to); err != nil {
				return err
			}
		}
		switch {
		case over:
			return nil
		case silent != nil && alone:
			e.config.Log.Printf("%s has not said what became of a message in %v", name, silent.After)
			return nil
		case err != nil:
			if !e.interrupt(t) && ctx.Err() != nil {
				return errKilled
			}
			return e.program.Failed(err, e.tap)
		}
		// The last result may be there with only the end of its message missing, or a
		// message that was handed over meanwhile has its turn now.
		if first = e.times.First; alone {
			first = e.times.Settle
		}
	}
}

// errKilled is the end of a turn that could be stopped only by a kill. It is not
// the cause: with that the run would go on, and nobody would be there.
var errKilled = &engine.Error{Text: name + " did not stop and was killed."}

// unready explains an end before the first answer.
func (e *Engine) unready(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		e.program.Kill() // it has the message, and would answer it in the next turn
		return errKilled
	}
	if e.lost(e.program.Stderr()) {
		e.config.Log.Printf("%s: %s", name, e.program.Stderr())
		return stale()
	}
	if silent, ok := errors.AsType[*program.Silent](err); ok {
		e.config.Log.Printf("%s is not ready after %v: %s", name, silent.After, e.program.Stderr())
		return &engine.Error{Text: fmt.Sprintf("%s was not ready within %v.", name, silent.After)}
	}
	return err
}

// lost reports whether Claude Code says that it does not know the session that it
// was to continue.
func (e *Engine) lost(said string) bool {
	return e.config.SessionID != "" && strings.Contains(said, "No conversation found")
}

// take returns the results that have come, and whether the turn is over, or waits
// for nothing but the end of its own message. After over nothing can be steered
// into it.
func (e *Engine) take(t *turn) (results []result, over, alone bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	results, t.results = t.results, nil
	over = t.overLocked()
	_, own := t.messages[t.own]
	alone = (t.ended || t.early) && len(t.messages) == 1 && own
	if over {
		e.turn = nil
	} else if isClosed(t.step) {
		t.step = make(chan struct{})
	}
	return results, over, alone
}

func (t *turn) overLocked() bool { return t.ended && (len(t.messages) == 0 || !t.told) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// answer sends one result.
func (e *Engine) answer(r result, to engine.Turn) error {
	if r.failed() {
		if e.lost(r.said()) {
			return stale()
		}
		return e.program.Explain(r.said(), e.tap)
	}
	if uuid.MatchString(r.Session) && r.Session != e.session {
		e.session = r.Session // some releases go on under another name
		to.Session(e.session)
	}
	cost := r.Cost - e.spent
	e.spent = r.Cost
	text := strings.TrimSpace(r.Result)
	if _, refused := e.tap.Last(); refused && text == "" {
		return e.program.Explain(r.said(), e.tap)
	}
	if text != "" {
		u := r.Usage
		to.Answer(engine.Answer{Text: text, Usage: &protocol.Usage{
			InputTokens: u.Input + u.CacheRead + u.CacheWrite, OutputTokens: u.Output, CostUSD: max(cost, 0),
		}})
	}
	return nil
}

// interrupt stops the turn, and Claude Code if it does not take that or has more
// messages of the turn, which it would begin next: then it reports false.
func (e *Engine) interrupt(t *turn) (lives bool) {
	e.mu.Lock()
	if t.overLocked() {
		e.mu.Unlock()
		return true
	}
	if isClosed(t.step) {
		t.step = make(chan struct{})
	}
	t.queued = false
	step := t.step
	e.mu.Unlock()
	_ = e.program.Send(map[string]any{"type": "control_request", "request_id": stopID, "request": map[string]any{"subtype": "interrupt"}})
	timer := time.NewTimer(cancelGrace)
	defer timer.Stop()
	select {
	case <-step:
		e.mu.Lock()
		queued := t.queued // by now it may have begun
		e.mu.Unlock()
		if !queued {
			return true
		}
		e.config.Log.Printf("%s has more messages of the turn that was stopped: it is killed", name)
	case <-e.program.Gone():
	case <-timer.C:
		e.config.Log.Printf("%s did not stop its turn: it is killed", name)
	}
	e.program.Kill()
	return false
}

// queuedLocked reports whether a message was not begun that came after the prompt.
func (t *turn) queuedLocked() bool {
	for id, begun := range t.messages {
		if id != t.own && !begun {
			return true
		}
	}
	return false
}

// Steer implements engine.Steerer. Claude Code takes a message at any time: during
// a tool it becomes part of the turn, else one of its own, with a result of its
// own. Which it was is told by ids; a release that does not tell them gets nothing.
func (e *Engine) Steer(text string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.turn
	if t == nil || !t.told || t.overLocked() {
		return false
	}
	id := newUUID()
	if e.program.Send(user(text, id)) != nil {
		return false
	}
	t.messages[id] = false
	return true
}

// line takes one line of Claude Code's stdout.
func (e *Engine) line(b []byte) {
	e.notice(b)
	v, err := decode(b)
	if err != nil {
		e.program.Garbage(b, err)
		return
	}
	switch v := v.(type) {
	case controlRequest:
		e.requested(v)
	case controlResponse:
		if v.ID == helloID && !e.greeted {
			e.greeted = true
			close(e.ready)
		}
	case lifecycle:
		e.mu.Lock()
		defer e.mu.Unlock()
		t := e.turn
		if t == nil {
			return
		}
		if _, ours := t.messages[v.Message]; ours {
			e.told, t.told = true, true
			if v.State == "started" {
				t.messages[v.Message] = true
				if v.Message != t.own {
					// Its result is yet to come, unless it became part of what runs.
					t.ended = false
				} else if t.early {
					t.early = false
					t.signLocked()
				}
			}
			if v.State == "completed" || v.State == "cancelled" {
				delete(t.messages, v.Message)
				t.stepLocked()
			}
		}
	case result:
		e.mu.Lock()
		defer e.mu.Unlock()
		t := e.turn
		if t == nil {
			e.setAsideLocked(v)
			return
		}
		if begun, waits := t.messages[t.own]; t.told && waits && !begun {
			t.early = true
			e.setAsideLocked(v)
		} else {
			t.ended = true
			t.results = append(t.results, v)
		}
		t.queued = t.queuedLocked()
		t.announceLocked()
	case sign:
		e.mu.Lock()
		defer e.mu.Unlock()
		if t := e.turn; t != nil {
			t.questions = 0
			t.signLocked()
		}
	}
}

// maxAsides is how many are kept: the last ones.
const maxAsides = 8

func (e *Engine) setAsideLocked(r result) {
	if !r.failed() && strings.TrimSpace(r.Result) != "" {
		e.asides = append(e.asides, r)
		e.asides = slices.Delete(e.asides, 0, max(0, len(e.asides)-maxAsides))
	}
}

func (e *Engine) takeAsides() []result {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := e.asides
	e.asides = nil
	return all
}

// stepLocked wakes the turn if it is over.
func (t *turn) stepLocked() {
	if t.overLocked() {
		t.announceLocked()
	}
}

func (t *turn) announceLocked() {
	if !isClosed(t.step) {
		close(t.step)
	}
}

func (t *turn) signLocked() {
	select {
	case t.signs <- struct{}{}:
	default:
	}
}

// requested answers what Claude Code asks.
func (e *Engine) requested(r controlRequest) {
	type object = map[string]any
	answer := object{"subtype": "error", "request_id": r.ID, "error": "Berth knows no request " + r.Subtype}
	if r.Subtype == "can_use_tool" {
		input := r.Input
		if len(input) == 0 {
			input = json.RawMessage("{}")
		}
		answer = object{"subtype": "success", "request_id": r.ID, "response": object{"behavior": "allow", "updatedInput": input}}
	}
	_ = e.program.Send(object{"type": "control_response", "response": answer}) // one that does not read will be missed elsewhere
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.turn; t != nil {
		if t.questions++; t.questions <= maxQuestions {
			t.signLocked()
		}
	}
}

// user is a message to Claude Code.
func user(text, id string) any {
	type object = map[string]any
	return object{
		"type": "user", "uuid": id, "session_id": "", "parent_tool_use_id": nil,
		"message": object{"role": "user", "content": []object{{"type": "text", "text": text}}},
	}
}

// servers are the tools in Claude Code's words.
func servers(tools []engine.ToolServer) string {
	type one struct {
		Type    string            `json:"type"`
		Command string            `json:"command"`
		Args    []string          `json:"args"`
		Env     map[string]string `json:"env,omitempty"`
	}
	all := make(map[string]one)
	for _, t := range tools {
		all[t.Name] = one{"stdio", t.Command[0], append([]string{}, t.Command[1:]...), t.Env}
	}
	data, err := json.Marshal(map[string]any{"mcpServers": all})
	if err != nil {
		panic(err) // of our own making
	}
	return string(data)
}

func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
