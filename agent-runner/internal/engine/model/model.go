// Package model is the engine that talks to a model provider itself: a loop of
// asking the model and running the tools that it calls, until it has an answer.
package model

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/history"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/internal/engine/model/tools"
	"berth/agent-runner/protocol"
)

// OptionSteps is an option of this engine's own: how often a turn may ask the model,
// 1 or more.
const OptionSteps = "maxSteps"

// Defaults.
const (
	maxSteps       = 100
	sessionTimeout = 15 * time.Second
	firstTimeout   = 2 * time.Minute
	silenceTimeout = 10 * time.Minute
)

// maxPrompt is how much of one prompt a model gets to see, in bytes.
const maxPrompt = 512 << 10

var _ engine.Steerer = (*Engine)(nil)

// Engine is the model engine of one run.
type Engine struct {
	config engine.Config
	limits limits
	tools  *tools.Box

	// Of the goroutine of Prompt.
	session  *history.Session // nil before the first turn
	synced   chan error       // of the file's last change; nil: there is none
	provider llm.Provider     // nil before the first turn
	model    string
	window   int     // tokens that the model takes
	scale    float64 // tokens a byte, as the provider counts them
	system   string
	shorter  bool              // the conversation, since Compacted was asked
	warned   bool              // that the provider seems to cut
	toolless bool              // the model takes no tools, which was logged
	pause    time.Duration     // before the second try of a request
	seen     func(text string) // sees what is streamed; may be nil

	mu        sync.Mutex
	waiting   []string // steered, not given to the model yet
	listening bool     // a turn runs that will look at waiting again
}

// limits are what the options say.
type limits struct {
	session, first, silence time.Duration
	steps                   int
}

// Open is an engine.Open.
func Open(c engine.Config) (engine.Engine, error) {
	l := limits{session: sessionTimeout, first: firstTimeout, silence: silenceTimeout, steps: maxSteps}
	var faults []error
	for name, field := range map[string]*time.Duration{
		engine.OptionSession: &l.session, engine.OptionFirst: &l.first, engine.OptionSilence: &l.silence,
	} {
		if text := c.EngineOptions[name]; text != "" {
			d, err := time.ParseDuration(text)
			if err != nil || d <= 0 {
				faults = append(faults, fmt.Errorf("%s is %q: it must be a duration like 90s or 10m", name, text))
			}
			*field = d
		}
	}
	if text := c.EngineOptions[OptionSteps]; text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			faults = append(faults, fmt.Errorf("%s is %q: it must be a number of at least 1", OptionSteps, text))
		}
		l.steps = n
	}
	if _, err := engine.ContextTokens(c.EngineOptions, ""); err != nil {
		faults = append(faults, err)
	}
	switch p := c.EngineOptions[engine.OptionProvider]; p {
	case "", anthropic, openAI:
	default:
		faults = append(faults, fmt.Errorf("%s is %q: it must be %s or %s", engine.OptionProvider, p, anthropic, openAI))
	}
	if err := errors.Join(faults...); err != nil {
		return nil, &engine.Error{Class: protocol.ClassInput, Text: err.Error()}
	}
	return &Engine{config: c, limits: l, tools: tools.New(c), scale: usualScale, pause: usualPause}, nil
}

// Close implements engine.Engine.
func (e *Engine) Close() error {
	e.tools.Close()
	if e.session == nil {
		return nil
	}
	e.settle()
	return e.session.Close()
}

// Prompt implements engine.Engine.
func (e *Engine) Prompt(ctx context.Context, text string, to engine.Turn) error {
	if err := e.resume(to); err != nil {
		return err
	}
	prompt := said(text)
	e.keep(prompt)
	e.listen()
	defer e.deafen()
	to.Accept()
	t := turn{Engine: e, to: to}
	err := t.carry(ctx)
	switch {
	case ctx.Err() != nil:
		if more := e.heard(false); len(more) > 0 { // it counts as read
			e.keep(llm.Message{Role: llm.User, Parts: more})
		}
	case err != nil:
		e.takeBack(prompt)
	}
	e.settle()
	return err
}

// takeBack drops a prompt that nothing followed: the host gives it again, perhaps
// many times, and the model is to read it once.
func (e *Engine) takeBack(prompt llm.Message) {
	all := e.session.Messages
	if len(all) == 0 || all[len(all)-1].Role != llm.User {
		return
	}
	rest, last := all[:len(all)-1:len(all)-1], all[len(all)-1].Parts
	if p := last[len(last)-1]; p.Result != nil || p.Text != prompt.Text() {
		return
	}
	if last = last[:len(last)-1]; len(last) > 0 {
		rest = append(rest, llm.Message{Role: llm.User, Parts: last})
	}
	e.replace(rest)
}

// resume takes up the session, if that was not done.
func (e *Engine) resume(to engine.Turn) (err error) {
	if e.session == nil {
		if e.config.SessionID == "" {
			e.session, err = history.New(e.config.Home)
		} else {
			e.session, err = history.Resume(e.config.Home, e.config.SessionID)
		}
		if err != nil {
			return err
		}
	}
	to.Session(e.session.ID)
	e.forgetOwn()
	return nil
}

// Steer implements engine.Steerer. The model gets text with its next step.
func (e *Engine) Steer(text string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.listening {
		e.waiting = append(e.waiting, text)
	}
	return e.listening
}

func (e *Engine) listen() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.waiting, e.listening = nil, true
}

// deafen ends listening. What still waits is lost with the turn that failed.
func (e *Engine) deafen() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.waiting, e.listening = nil, false
}

// heard returns what was steered since the last call. With last it ends
// listening if that is nothing.
func (e *Engine) heard(last bool) []llm.Part {
	e.mu.Lock()
	defer e.mu.Unlock()
	if last && len(e.waiting) == 0 {
		e.listening = false
	}
	var parts []llm.Part
	for _, text := range e.waiting {
		parts = append(parts, said(text).Parts...)
	}
	e.waiting = nil
	return parts
}

// said returns a prompt as a message.
func said(text string) llm.Message {
	if strings.TrimSpace(text) == "" {
		text = "(an empty message)"
	}
	return llm.Message{Role: llm.User, Parts: []llm.Part{{Text: tools.Bound(text, maxPrompt)}}}
}

// begin starts what the run needs beside its session.
func (e *Engine) begin(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, e.limits.session, errNotReady)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { e.tools.Start(ctx) })
	err := e.connect(ctx)
	wg.Wait()
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errNotReady) {
		return cause
	}
	return err
}

// errNotReady is the end of a provider's time to say which models it has.
var errNotReady = errors.New("the model's provider did not answer in time")

// keep takes a message into the session. The file is written before this
// returns, so that a kill loses nothing; the disk has it a little later.
func (e *Engine) keep(m llm.Message) {
	e.settle()
	if err := e.session.Add(m); err != nil {
		// The answer is worth more than the memory of it.
		e.config.Log.Print(err)
		return
	}
	synced := make(chan error, 1)
	e.synced = synced
	go func(s *history.Session) { synced <- s.Sync() }(e.session)
}

// settle waits until the disk has the session.
func (e *Engine) settle() {
	if e.synced == nil {
		return
	}
	if err := <-e.synced; err != nil {
		e.config.Log.Printf("keep the session: %v", err)
	}
	e.synced = nil
}

// forgetOwn drops what the provider wanted back within the last turn.
func (e *Engine) forgetOwn() {
	for i := range e.session.Messages {
		m := &e.session.Messages[i]
		var parts []llm.Part
		for j, p := range m.Parts {
			if p.Own != nil && parts == nil {
				parts = append(make([]llm.Part, 0, len(m.Parts)), m.Parts[:j]...)
			}
			if p.Own == nil && parts != nil {
				parts = append(parts, p)
			}
		}
		if parts != nil {
			m.Parts = parts
		}
	}
}
