package model

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"berth/agent-runner/fakemodel"
	"berth/agent-runner/internal/engine"
)

// A thousand turns in all, with calls and much to sum up, leave nothing behind.
func TestThousandTurns(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		c := newChat(t, provider, engine.OptionContext, "8000")
		held := func() (goroutines, descriptors int) {
			entries, err := os.ReadDir("/proc/self/fd")
			check(t, err)
			return runtime.NumGoroutine(), len(entries)
		}
		ask := func(i int) {
			if i%50 == 0 {
				c.wants(c.say(`tools bash {"command":"echo a"} | bash {"command":"echo b"}`), "tool said: a\ntool said: b")
				return
			}
			c.wants(c.say("say hello"), "hello")
		}
		for i := range 3 {
			ask(i)
		}
		goroutines, descriptors := held()
		for i := range 500 {
			ask(i)
		}
		valid(t, c.engine.session.Messages)
		if n := size(c.engine.session.Messages); n > 32<<10 {
			t.Errorf("the conversation has %d bytes", n)
		}
		if g, d := held(); g > goroutines+4 || d > descriptors+4 { // connections that wait for the next request
			t.Errorf("%d goroutines and %d descriptors, before %d and %d", g, d, goroutines, descriptors)
		}
	})
}

// What people said while the turn ran is in the conversation, if it was stopped
// before the model read it.
func TestStopKeepsFollowUps(t *testing.T) {
	for name, script := range map[string]string{"in the answer": "stall", "in a tool": `tool bash {"command":"sleep 600"}`} {
		t.Run(name, func(t *testing.T) {
			c := newChat(t, anthropic)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- c.prompt(ctx, script) }()
			_, err := c.fake.Await(t.Context(), func(r fakemodel.Request) bool { return r.Status == 200 })
			check(t, err)
			if !c.engine.Steer(host("and this")) {
				t.Fatal("the engine did not take it")
			}
			cancel()
			if err := <-done; err == nil {
				t.Error("no error")
			}
			c.again()
			c.wants(afterTool(c.say("say yes")), "yes")
			if kept := transcript(c.engine.session.Messages); strings.Count(kept, host("and this")) != 1 {
				t.Errorf("the conversation is %s", kept)
			}
		})
	}
}

// afterTool returns what an answer says after the end of a tool, which it tells if the
// stop came when that had begun.
func afterTool(answer string) string {
	if told, rest, found := strings.Cut(answer, "\n"); found && strings.HasPrefix(told, "tool said: ") {
		return rest
	}
	return answer
}

// The same engine goes on with the same conversation after a turn was stopped,
// wherever that was.
func TestGoesOnAfterAStop(t *testing.T) {
	for name, script := range map[string]string{
		"before the answer": "mute",
		"in the answer":     "stall",
		"in a tool":         `tool bash {"command":"sleep 600"}`,
		"before a try":      "http 500",
	} {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T, provider string) {
				c := newChat(t, provider)
				c.wants(c.say("say before"), "before")
				ctx, cancel := context.WithCancelCause(t.Context())
				stopped := errors.New("stopped")
				done := make(chan error)
				go func() { done <- c.prompt(ctx, script) }()
				_, err := c.fake.Await(t.Context(), func(r fakemodel.Request) bool {
					return strings.Contains(r.Text, script) && (r.Status != 0 || script == "mute")
				})
				check(t, err)
				cancel(stopped)
				began := time.Now()
				if err := <-done; !errors.Is(err, stopped) || time.Since(began) > 5*time.Second {
					t.Errorf("got %v after %v", err, time.Since(began))
				}
				check(t, c.fake.AwaitIdle(t.Context()))
				session := c.session
				for range 2 {
					got := afterTool(c.say("echo-history"))
					if !strings.HasPrefix(got, "history: ") || !strings.Contains(got, "say before") || c.session != session {
						t.Errorf("session %s, then %s: %s", session, c.session, got)
					}
				}
				kept := transcript(c.engine.session.Messages) // the fake model tells one text of each message
				if want := host(script); strings.Count(kept, want) != 1 {
					t.Errorf("what was stopped is not in it: %s", kept)
				}
			})
		})
	}
}
