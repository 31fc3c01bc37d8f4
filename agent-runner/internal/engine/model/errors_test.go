package model

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/protocol"
)

// What a provider or the gateway refuses, and what the host is told of it.
func TestFailures(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		for _, tt := range []struct {
			script, class, text string
			tries               int
			wait                time.Duration
		}{
			{"http 400", protocol.ClassInput, "did not accept", 1, 0},
			{"http 401", protocol.ClassAuth, "The key was refused. The operator has been told", 1, 0},
			{"http 402", protocol.ClassAuth, "no credit", 1, 0},
			{"http 403", protocol.ClassAuth, "was refused", 1, 0},
			{"http 404", protocol.ClassInput, `no model "fake-1"`, 1, 0},
			{"limit 3600", protocol.ClassRateLimit, "too many requests", 1, time.Hour},
			{"refuse no_key", protocol.ClassAuth, "has no key", 1, 0},
			{"refuse path", protocol.ClassInput, "did not accept", 1, 0},
		} {
			t.Run(tt.script, func(t *testing.T) {
				c := newChat(t, provider)
				err := c.prompt(t.Context(), tt.script)
				e, ok := errors.AsType[*engine.Error](err)
				if !ok || e.Class != tt.class || !strings.Contains(e.Text, tt.text) || e.RetryAfter != tt.wait {
					t.Errorf("got %#v", err)
				}
				if n := len(c.fake.Requests()); n != tt.tries {
					t.Errorf("asked %d times, want %d", n, tt.tries)
				}
				if n := strings.Count(c.log.String(), "model: ask: "); n != 1 {
					t.Errorf("%d lines in the log tell the cause, want 1:\n%s", n, c.log)
				}
			})
		}
	})
}

// A used-up budget is no failure: people are told, and nothing is tried again.
func TestBudget(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		c := newChat(t, provider)
		if got := c.say("refuse budget"); !strings.Contains(got, "used up") {
			t.Errorf("got %s", got)
		}
		if n := len(c.fake.Requests()); n != 1 {
			t.Errorf("asked %d times", n)
		}
		if got := c.say("say hi"); got != "hi" {
			t.Errorf("later: %s", got)
		}
	})
}

// What may pass is tried again.
func TestRetry(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		for _, script := range []string{"fail 1 503"} {
			c := newChat(t, provider)
			if got := c.say(script, "say through"); got != "through" {
				t.Errorf("%s: %s", script, got)
			}
		}
	})
}

// Half a stream is no answer.
func TestDrop(t *testing.T) {
	c := newChat(t, anthropic)
	drops := 1
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if drops--; drops >= 0 {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{}}\n\n"+
				"event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"half\"}}\n\n")
			check(t, http.NewResponseController(w).Flush())
			panic(http.ErrAbortHandler)
		}
		c.fake.ServeHTTP(w, r)
	}))
	defer server.Close()
	c.config.Gateway = strings.TrimPrefix(server.URL, "http://")
	if got := c.say("say whole"); got != "whole" {
		t.Errorf("got %s", got)
	}
}

// script is a provider that answers from a list, and takes its time.
type script struct {
	steps    []step
	requests []llm.Request
	at       []time.Duration // of the requests, since the first
	began    time.Time
}

type step struct {
	wait, between time.Duration // before the first sign of life, and before the second
	reply         llm.Reply
	err           error
}

func (s *script) Name() string { return "script" }

func (s *script) Models(context.Context) ([]string, error) { return nil, nil }

func (s *script) Stream(ctx context.Context, r llm.Request, seen func(string)) (llm.Reply, error) {
	if s.began.IsZero() {
		s.began = time.Now()
	}
	s.requests = append(s.requests, llm.Request{System: r.System, Messages: slices.Clone(r.Messages), Tools: r.Tools})
	s.at = append(s.at, time.Since(s.began))
	if len(s.steps) == 0 {
		return llm.Reply{}, &llm.Failure{Kind: llm.Invalid, Message: "the script is over"}
	}
	now := s.steps[0]
	s.steps = s.steps[1:]
	for _, d := range []time.Duration{now.wait, now.between} {
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return llm.Reply{}, context.Cause(ctx)
		}
		seen("")
	}
	return now.reply, now.err
}

// text is a reply.
func text(s string) llm.Reply {
	return llm.Reply{Message: llm.Message{Role: llm.Assistant, Parts: []llm.Part{{Text: s}}}}
}

// scripted returns a chat whose engine has s for a provider.
func scripted(t *testing.T, s *script, options ...string) *chat {
	c := newChat(t, anthropic, options...)
	e, err := Open(c.config)
	check(t, err)
	c.engine = e.(*Engine)
	c.engine.provider, c.engine.model = s, "m"
	c.engine.window, err = engine.ContextTokens(c.config.EngineOptions, anthropic)
	check(t, err)
	return c
}

func TestPatience(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	limit := func(after time.Duration) step {
		return step{err: &llm.Failure{Kind: llm.RateLimit, Status: 429, RetryAfter: after}}
	}
	server := step{err: &llm.Failure{Kind: llm.Server, Status: 500}}
	done := step{reply: text("done")}
	for _, tt := range []struct {
		name  string
		steps []step
		least []time.Duration // between the requests; an eighth more is right too
		class string
		wait  time.Duration
		fails bool
	}{
		{name: "a fault", steps: []step{server, server, done}, least: []time.Duration{500 * ms, s}},
		{name: "faults", steps: []step{server, server, server, server, server, done}, least: []time.Duration{500 * ms, s, 2 * s, 4 * s}, fails: true},
		{name: "a fault with a wish", steps: []step{{err: &llm.Failure{Kind: llm.Server, RetryAfter: 20 * s}}, done}, least: []time.Duration{20 * s}},
		{name: "a short wish", steps: []step{limit(7 * s), done}, least: []time.Duration{7 * s}},
		{name: "a long wish", steps: []step{limit(31 * s)}, class: protocol.ClassRateLimit, wait: 31 * s, fails: true},
		{name: "many wishes", steps: []step{limit(25 * s), limit(25 * s), limit(25 * s), done}, least: []time.Duration{25 * s, 25 * s}, class: protocol.ClassRateLimit, wait: 25 * s, fails: true},
		{name: "no wish", steps: []step{limit(0), limit(0), done}, least: []time.Duration{2 * s, 4 * s}},
		{name: "a slow start", steps: []step{{wait: 119 * s, reply: text("done")}}},
		{name: "a long silence", steps: []step{{wait: s, between: 9 * time.Minute, reply: text("done")}}},
		{name: "no start", steps: []step{{wait: time.Hour}, done}, least: []time.Duration{2 * time.Minute}},
		{name: "no start twice", steps: []step{{wait: time.Hour}, {wait: time.Hour}, done}, least: []time.Duration{2 * time.Minute}, fails: true},
		{name: "too long a silence", steps: []step{{between: time.Hour}, done}, least: []time.Duration{10 * time.Minute}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			provider := &script{steps: tt.steps}
			c := scripted(t, provider)
			synctest.Test(t, func(t *testing.T) {
				err := c.prompt(t.Context(), "hi")
				if tt.fails != (err != nil) {
					t.Fatalf("got %v", err)
				}
				if e, ok := errors.AsType[*engine.Error](err); err != nil && (!ok || e.Class != tt.class || e.RetryAfter != tt.wait) {
					t.Errorf("got %#v", err)
				}
				if err == nil && c.said() != "done" {
					t.Errorf("got %q", c.said())
				}
				if len(provider.at) != len(tt.least)+1 {
					t.Fatalf("asked at %v", provider.at)
				}
				for i, least := range tt.least {
					if d := provider.at[i+1] - provider.at[i]; d < least || d > least+least/8+time.Second {
						t.Errorf("pause %d was %v, want about %v", i, d, least)
					}
				}
			})
		})
	}
}

// A long pause ends with the run.
func TestStopInPause(t *testing.T) {
	c := scripted(t, &script{steps: []step{{err: &llm.Failure{Kind: llm.RateLimit, RetryAfter: 20 * time.Second}}}})
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		began := time.Now()
		if err := c.prompt(ctx, "hi"); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 5*time.Second {
			t.Errorf("got %v after %v", err, time.Since(began))
		}
	})
}

func TestStops(t *testing.T) {
	for _, tt := range []struct {
		reply llm.Reply
		want  string
	}{
		{llm.Reply{Stop: llm.StopLength, Message: text("begun").Message}, "begun\n\n(It got too long and ends here. Say “go on” for the rest.)"},
		{llm.Reply{Stop: llm.StopLength}, "The model ran out of room before it had an answer. Ask for less at once."},
		{llm.Reply{Stop: llm.StopRefused}, "The model does not want to answer this."},
		{llm.Reply{}, ""},
	} {
		tt.reply.Message.Role = llm.Assistant
		c := scripted(t, &script{steps: []step{{reply: tt.reply}}})
		c.wants(c.say("hi"), tt.want)
	}
}

// One message too many does not make the session useless.
func TestBadMemory(t *testing.T) {
	bad := step{err: &llm.Failure{Kind: llm.Invalid, Status: 400, Message: "messages.0: something"}}
	provider := &script{steps: []step{{reply: text("one")}, bad, {reply: text("two")}, {reply: text("three")}}}
	c := scripted(t, provider)
	c.say("first")
	c.wants(c.say("second"), "two")
	c.wants(c.say("third"), "three")
	if n := len(provider.requests[3].Messages); n != 3 {
		t.Errorf("%d messages in the last request, want 3", n)
	}

	// If that does not help, nothing is forgotten.
	provider.steps = []step{bad, bad}
	err := c.prompt(t.Context(), "fourth")
	if e, ok := errors.AsType[*engine.Error](err); !ok || e.Class != protocol.ClassInput {
		t.Errorf("got %v", err)
	}
	if n := len(c.engine.session.Messages); n != 4 {
		t.Errorf("%d messages are left, want 4", n)
	}
}

// A prompt that came to nothing is given again by the host, and is in the
// conversation once.
func TestFailedPromptIsThereOnce(t *testing.T) {
	bad := step{err: &llm.Failure{Kind: llm.Auth, Status: 401}}
	provider := &script{steps: []step{{reply: text("one")}, bad, bad, bad, {reply: call("bash", map[string]string{"command": "true"})}, bad}}
	c := scripted(t, provider)
	c.say("first")
	for range 3 {
		if err := c.prompt(t.Context(), "second"); err == nil {
			t.Fatal("no error")
		}
	}
	// What was done stays: the model is to know.
	if err := c.prompt(t.Context(), "second"); err == nil {
		t.Fatal("no error")
	}
	if got := transcript(c.engine.session.Messages); strings.Count(got, ">second<") != 1 || !strings.Contains(got, "calls bash") {
		t.Errorf("the conversation is %s", got)
	}
	c.again()
	d := scripted(t, &script{steps: []step{bad, {reply: text("two")}}})
	d.engine.config.SessionID, d.engine.config.Home = c.session, c.config.Home
	if err := d.prompt(t.Context(), "third"); err == nil {
		t.Fatal("no error")
	}
	d.say("fourth")
	if got := transcript(d.engine.session.Messages); strings.Contains(got, ">third<") || strings.Count(got, ">first<") != 1 || strings.Count(got, ">fourth<") != 1 {
		t.Errorf("the conversation is %s", got)
	}
}

// A turn that fails in its first message leaves an empty session behind, not a stale one.
func TestFirstPromptFails(t *testing.T) {
	c := scripted(t, &script{steps: []step{{err: &llm.Failure{Kind: llm.Auth, Status: 401}}}})
	if err := c.prompt(t.Context(), "first"); err == nil {
		t.Fatal("no error")
	}
	c.again()
	d := scripted(t, &script{steps: []step{{reply: text("one")}}})
	d.engine.config.SessionID, d.engine.config.Home = c.session, c.config.Home
	d.wants(d.say("first"), "one")
	if n := len(d.engine.session.Messages); n != 2 {
		t.Errorf("%d messages, want 2", n)
	}
}

// call is a reply that calls a tool.
func call(name string, input any) llm.Reply {
	data, err := json.Marshal(input)
	if err != nil {
		panic(err)
	}
	return llm.Reply{Message: llm.Message{Role: llm.Assistant, Parts: []llm.Part{{Call: &llm.Call{ID: name, Name: name, Input: string(data)}}}}}
}
