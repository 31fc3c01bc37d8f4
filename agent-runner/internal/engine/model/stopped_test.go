package model

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"berth/agent-runner/fakemodel"
)

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
					got := c.say("echo-history")
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
