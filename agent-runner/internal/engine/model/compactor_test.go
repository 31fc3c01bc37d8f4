package model

import (
	"context"
	"errors"
	"strings"
	"testing"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/enginetest"
	"berth/agent-runner/protocol"
)

// compacts orders a compaction and wants an outcome, and no answer.
func compacts(t *testing.T, e *enginetest.Running, want string) engine.Compaction {
	t.Helper()
	var turn enginetest.Turn
	c := e.Engine.(engine.Compactor)
	got, err := c.Compact(t.Context(), &turn)
	if err != nil || got.Outcome != want || len(turn.Texts()) > 0 || turn.ID() == "" {
		t.Fatalf("got %+v, %v, answers %q, want %s", got, err, turn.Texts(), want)
	}
	if is := c.Compacted(); is != (want == protocol.CompactionDone) {
		t.Errorf("compacted: %v after %s", is, want)
	}
	return got
}

// On the order all but the last turn is summed up, in this run and as the first
// thing of another one; what is short stays.
func TestCompact(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		b := enginetest.New(t, enginetest.Subject{Open: Open, Engine: "model", Provider: provider})
		e := b.Open(t)
		compacts(t, e, protocol.CompactionNothing)
		e.Ask(t, "say one", "one")
		compacts(t, e, protocol.CompactionNothing)
		long := "say " + strings.Repeat("long ", 500)
		e.Ask(t, long, "long")
		compacts(t, e, protocol.CompactionNothing) // the long one is the last
		b.Config.SessionID = e.Ask(t, "say two", "two").ID()
		e.Close(t)

		e = b.Open(t)
		compacts(t, e, protocol.CompactionDone)
		turn := e.Ask(t, "echo-history", "say two / echo-history")
		if got := turn.Texts()[0]; strings.Contains(got, "long") || turn.ID() != b.Config.SessionID {
			t.Errorf("session %q, %s", turn.ID(), got)
		}
		requests := b.Model.Requests()
		if first := requests[len(requests)-1]; !strings.Contains(first.System, "family") {
			t.Errorf("asked with %+v", first)
		}
		e.Close(t)
		b.Open(t).Ask(t, "echo-history", "say two / echo-history / echo-history")
	})
}

// What goes wrong costs nothing: the conversation is as it was and goes on.
func TestCompactFails(t *testing.T) {
	provider := &script{}
	c := scripted(t, provider)
	c.fill(provider, 4, 2000)
	before := size(c.engine.session.Messages)
	for _, tt := range []struct {
		step step
		want string
	}{
		{step{err: errors.New("strange")}, "strange"},
		{step{reply: text(" ")}, "the model said nothing"},
		{step{reply: text(strings.Repeat("a longer summary than what was said ", 1000))}, ""},
	} {
		provider.steps = []step{tt.step}
		c.accepted = make(chan struct{})
		got, err := c.engine.Compact(t.Context(), c)
		want := engine.Compaction{Outcome: protocol.CompactionFailed, Reason: tt.want}
		if tt.want == "" {
			want = engine.Compaction{Outcome: protocol.CompactionNothing}
		}
		if err != nil || got != want || c.engine.Compacted() || size(c.engine.session.Messages) != before {
			t.Errorf("got %+v, %v, want %+v; %d bytes of %d", got, err, want, size(c.engine.session.Messages), before)
		}
	}
	stopped := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(stopped)
	c.accepted = make(chan struct{})
	if _, err := c.engine.Compact(ctx, c); !errors.Is(err, stopped) {
		t.Errorf("got %v", err)
	}
	provider.steps = []step{{reply: text("there")}}
	c.wants(c.say("still"), "there")
}

// A session that is gone is told as with a prompt; a key that is refused is told to
// who wants the conversation shorter, and ends nothing.
func TestCompactMeetsTheProvider(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		b := enginetest.New(t, enginetest.Subject{Open: Open, Engine: "model", Provider: provider})
		e := b.Open(t)
		e.Ask(t, "say "+strings.Repeat("long ", 500), "long")
		b.Config.SessionID = e.Ask(t, "say two", "two").ID()
		e.Close(t)
		b.Model.Want = "another key"
		got := compacts(t, b.Open(t), protocol.CompactionFailed)
		if !strings.HasPrefix(got.Reason, "The key was refused.") {
			t.Errorf("got %q", got.Reason)
		}
		b.Config.SessionID = "gone"
		_, err := b.Open(t).Engine.(engine.Compactor).Compact(t.Context(), new(enginetest.Turn))
		if failure, ok := errors.AsType[*engine.Error](err); !ok || failure.Class != protocol.ClassStaleSession {
			t.Errorf("got %v", err)
		}
	})
}
