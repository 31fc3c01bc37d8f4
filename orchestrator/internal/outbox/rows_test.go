package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
)

// DL-01: however many look for what is to be sent at the same time, each text is
// sent once.
func TestDL01ManyLooksSendOnce(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		m.slow = 100 * time.Millisecond
		for i := range 3 {
			m.add("a", fmt.Sprint(i))
		}
		var wg sync.WaitGroup
		for i := range 40 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 10 * time.Millisecond)
				s.Wake("a")
				if err := s.WakeAll(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		time.Sleep(time.Second)
		want(t, "sent", m.got(), "[0 1 2]")
	})
}

// DL-04: a text that was given up is not tried again, however often its chat is
// woken, and does not stand in the way of the next one.
func TestDL04NoFourthAttempt(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		calls := 0
		m.fail = func(o berth.Outgoing) error {
			if o.Text == "y" {
				return nil
			}
			calls++
			return errors.New("no")
		}
		m.add("a", "x")
		s.Wake("a")
		time.Sleep(time.Hour)
		for range 3 {
			s.Wake("a")
			if err := s.WakeAll(t.Context()); err != nil {
				t.Error(err)
			}
			time.Sleep(time.Hour)
		}
		m.add("a", "y")
		s.Wake("a")
		want(t, "sent", m.got(), "[y]")
		want(t, "calls", fmt.Sprint(calls), "3")
		want(t, "row", join(m.rows[0].State, m.rows[0].Attempts, m.rows[0].Error), "dead 3 no")
	})
}

// partly is a store that cannot read one chat.
type partly struct {
	*memory
	broken string
}

func (p *partly) NextOutgoing(ctx context.Context, chat string) (berth.Outgoing, bool, error) {
	p.mu.Lock()
	broken := p.broken
	p.mu.Unlock()
	if chat == broken {
		return berth.Outgoing{}, false, errors.New("the row cannot be read")
	}
	return p.memory.NextOutgoing(ctx, chat)
}

// DL-08: where the store cannot be read, only that chat waits.
func TestDL08BrokenRowsHoldOneChat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		p := &partly{memory: m, broken: "a"}
		s := New(p, m, zaptest.NewLogger(t))
		defer s.Shutdown(t.Context())
		for _, x := range []string{"a1", "b1", "b2"} {
			m.add(x[:1], x)
		}
		if err := s.WakeAll(t.Context()); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		m.add("b", "b3")
		s.Wake("b")
		time.Sleep(10 * storeRetry)
		want(t, "to the others", m.got(), "[b1 b2 b3]")
		m.mu.Lock()
		p.broken = ""
		m.mu.Unlock()
		time.Sleep(storeRetry)
		want(t, "at last", m.got(), "[b1 b2 b3 a1]")
	})
}

// W04: a send that never returns holds up its own chat only, and the end of the
// daemon for no longer than it was given.
func TestW04HangingSendHoldsOneChat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		s := New(m, hanging{m, "a"}, zaptest.NewLogger(t))
		for _, x := range []string{"a1", "b1", "a2", "b2"} {
			m.add(x[:1], x)
		}
		if err := s.WakeAll(t.Context()); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Hour)
		m.add("b", "b3")
		s.Wake("b")
		want(t, "sent", m.got(), "[b1 b2 b3]")
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		start := time.Now()
		s.Shutdown(ctx)
		want(t, "took", fmt.Sprint(time.Since(start)), "10s")
		want(t, "kept", join(m.rows[0].State, m.rows[0].Attempts, m.rows[2].State), "pending 0 pending")
	})
}

// hanging is a channel that never comes back from one chat.
type hanging struct {
	*memory
	chat string
}

func (h hanging) Send(ctx context.Context, o berth.Outgoing) error {
	if o.ChatJID == h.chat {
		<-ctx.Done()
		return ctx.Err()
	}
	return h.memory.Send(ctx, o)
}
