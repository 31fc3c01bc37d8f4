package model

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/protocol"
)

// How much patience there is with a provider, for one request.
const (
	maxTries    = 5 // of a provider that fails
	maxStalls   = 2 // tries of one that does not go on
	usualPause  = 500 * time.Millisecond
	limitPauses = 4                // of these after a rate limit that says nothing
	longestWish = 30 * time.Second // of a provider, that is waited for with the container kept
	maxWaited   = time.Minute      // altogether
)

// stalled is the end of a request that gave no sign of life for too long.
type stalled struct{ after time.Duration }

func (s *stalled) Error() string {
	return fmt.Sprintf("the model's provider gave no sign of life for %v", s.after)
}

// ask asks for one message, again and again while that may help. An error is a
// *llm.Failure, a *stalled, or the cause of ctx's end.
func (e *Engine) ask(ctx context.Context, r llm.Request) (llm.Reply, error) {
	p := patience{unit: e.pause}
	for {
		reply, err := e.try(ctx, r)
		if err == nil {
			return reply, nil
		}
		if ctx.Err() != nil { // also if it ended just after the try
			return reply, context.Cause(ctx)
		}
		pause, again := p.pause(err)
		if !again {
			return reply, err
		}
		e.config.Log.Printf("model: %v; again in %v", err, pause.Round(time.Millisecond))
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return llm.Reply{}, context.Cause(ctx)
		}
	}
}

// try asks once, and watches over it.
func (e *Engine) try(ctx context.Context, r llm.Request) (llm.Reply, error) {
	watched, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var begun atomic.Bool
	watch := time.AfterFunc(e.limits.first, func() {
		if begun.Load() {
			cancel(&stalled{e.limits.silence})
		} else {
			cancel(&stalled{e.limits.first})
		}
	})
	defer watch.Stop()
	reply, err := e.provider.Stream(watched, r, func(text string) {
		begun.Store(true)
		watch.Reset(e.limits.silence)
		if e.seen != nil {
			e.seen(text)
		}
	})
	if err != nil && ctx.Err() != nil {
		return reply, context.Cause(ctx)
	}
	return reply, err
}

// patience is what a request has cost so far.
type patience struct {
	unit                     time.Duration // the first pause
	failed, limited, stalled int
	waited                   time.Duration
}

// pause returns how long to wait after err before the next try, if that is worth
// it.
func (p *patience) pause(err error) (d time.Duration, again bool) {
	if _, ok := errors.AsType[*stalled](err); ok {
		p.stalled++
		return p.unit, p.stalled < maxStalls
	}
	f, ok := errors.AsType[*llm.Failure](err)
	if !ok {
		return 0, false
	}
	switch f.Kind {
	case llm.Unreachable, llm.Broken, llm.Server:
		d = p.unit << p.failed
		p.failed++
	case llm.RateLimit, llm.Overloaded:
		d = limitPauses * p.unit << p.limited
		p.limited++
		if f.RetryAfter > 0 {
			d = 0
		}
	default:
		return 0, false
	}
	if f.RetryAfter > longestWish || p.failed+p.limited >= maxTries {
		return 0, false
	}
	d = max(d, f.RetryAfter)
	d += rand.N(d/8 + 1) // groups that were turned away together do not come back together
	p.waited += d
	return d, p.waited <= maxWaited
}

// fail makes the end of a run of a failure, and logs its cause.
func (e *Engine) fail(f *llm.Failure, doing string) error {
	e.config.Log.Printf("model: %s: %v", doing, f)
	said := ""
	if f.Message != "" {
		said = ": " + strings.TrimRight(f.Message, ". ")
	}
	err := &engine.Error{RetryAfter: f.RetryAfter}
	switch f.Kind {
	case llm.Auth:
		err.Class, err.Text = protocol.ClassAuth, fmt.Sprintf("The key was refused. The operator has been told (%d%s).", f.Status, said)
		if f.Reason == "no_key" {
			err.Text = "The host has no key for the model. The operator has been told" + said + "."
		}
	case llm.Credit:
		err.Class, err.Text = protocol.ClassAuth, "The account at the model's provider has no credit left. The operator has been told"+said+"."
	case llm.Certificate:
		err.Class, err.Text = protocol.ClassAuth, "The certificate of the model's provider is not trusted. The operator has been told"+said+"."
	case llm.RateLimit:
		err.Class, err.Text = protocol.ClassRateLimit, "The model's provider has had too many requests"+said+"."
	case llm.Overloaded:
		err.Text = "The model's provider has more to do than it can" + said + "."
	case llm.NoModel:
		err.Class, err.Text = protocol.ClassInput, fmt.Sprintf("The provider has no model %q. The operator can choose another one with AGENT_MODEL%s.", e.model, said)
	case llm.TooLong:
		err.Class, err.Text = protocol.ClassInput, "The conversation is too long for the model, even shortened. A new session helps"+said+"."
	case llm.Invalid:
		err.Class, err.Text = protocol.ClassInput, fmt.Sprintf("The model's provider did not accept the request (%d%s).", f.Status, said)
	case llm.Unreachable:
		err.Text = "The model's provider cannot be reached" + said + "."
	case llm.Broken:
		err.Text = "The model's answer was lost on the way" + said + "."
	default:
		err.Text = fmt.Sprintf("The model's provider has trouble at the moment (%d%s).", f.Status, said)
	}
	return err
}
