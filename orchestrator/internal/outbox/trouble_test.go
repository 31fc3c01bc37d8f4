package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"berth/orchestrator/internal/berth"
)

// unreadable is a store whose rows cannot be read while err says so.
type unreadable struct {
	*memory
	err func(chat string) error
}

func (u unreadable) NextOutgoing(ctx context.Context, chat string) (berth.Outgoing, bool, error) {
	if err := u.err(chat); err != nil {
		return berth.Outgoing{}, false, err
	}
	return u.memory.NextOutgoing(ctx, chat)
}

// watched returns a Sender and what it has logged of a kind since the last call.
func watched(m *memory, err func(chat string) error) (*Sender, func(text string) []string) {
	core, logs := observer.New(zap.InfoLevel)
	return New(unreadable{m, err}, m, zap.New(core)), func(text string) (lines []string) {
		synctest.Wait()
		for _, e := range logs.TakeAll() {
			if strings.HasPrefix(e.Message, text) {
				c := e.ContextMap()
				lines = append(lines, fmt.Sprint(e.Level, " ", e.Message, " ", c["chats"], " ", c["times"], " ", c["error"], " ", c["after"]))
			}
		}
		return lines
	}
}

// TestUnreadableStore: a store that cannot be read for hours is a handful of lines,
// of all chats together, and the last one says how often it was tried.
func TestUnreadableStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, m := time.Now(), &memory{}
		s, logged := watched(m, func(string) error {
			switch at := time.Since(began); {
			case at < time.Hour:
				return errors.New("disk full")
			case at < 2*time.Hour:
				return errors.New("disk gone")
			}
			return nil
		})
		for i := range 5 {
			m.add(fmt.Sprint("chat", i), "x")
		}
		if err := s.WakeAll(t.Context()); err != nil {
			t.Fatal(err)
		}
		want(t, "at the begin", fmt.Sprint(logged("read")), "[error read the outbox 1 1 disk full <nil>]")
		time.Sleep(time.Hour - time.Second)
		if lines := logged("read"); len(lines) < 5 || len(lines) > 12 || !strings.Contains(lines[0], " 5 ") {
			t.Errorf("in an hour %d lines: %q", len(lines), lines)
		}
		time.Sleep(firstPause)
		if lines := logged("read"); len(lines) != 1 || !strings.Contains(lines[0], "disk gone") {
			t.Errorf("another error became %q", lines)
		}
		time.Sleep(time.Hour)
		lines := logged("read")
		if n := len(lines); n < 5 || n > 14 || lines[n-1] != "info read the outbox works again <nil> 36000 <nil> 2h0m0s" {
			t.Errorf("%d lines: %q", n, lines)
		}
		if n := len(m.sent); n != 5 {
			t.Errorf("%d texts were sent", n)
		}
		s.Shutdown(t.Context())
	})
}

// TestTroubleOfOneChat: what works for others does not end the trouble of one, and
// two errors in turn are no flood.
func TestTroubleOfOneChat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int64
		began, m := time.Now(), &memory{}
		s, logged := watched(m, func(chat string) error {
			if chat == "broken" && time.Since(began) < time.Minute {
				return fmt.Errorf("row %d", n.Add(1))
			}
			return nil
		})
		m.add("broken", "x")
		s.Wake("broken")
		for i := range 59 {
			m.add("well", fmt.Sprint(i))
			s.Wake("well")
			time.Sleep(time.Second)
		}
		if lines := logged("read"); len(lines) < 2 || len(lines) > 7 {
			t.Errorf("%d lines: %q", len(lines), lines)
		}
		time.Sleep(2 * time.Second)
		if lines := logged("read"); len(lines) != 1 || !strings.Contains(lines[0], "works again") {
			t.Errorf("at the end: %q", lines)
		}
		s.Shutdown(t.Context())
	})
}

// TestUnmarkedText: the same when the store does not take what was sent.
func TestUnmarkedText(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, m := time.Now(), &memory{}
		m.marks = func() error {
			if time.Since(began) < time.Hour {
				return errors.New("disk full")
			}
			return nil
		}
		s, logged := watched(m, func(string) error { return nil })
		m.add("a", "x")
		s.Wake("a")
		time.Sleep(time.Hour + time.Second)
		if lines := logged("mark"); len(lines) < 5 || len(lines) > 14 || lines[len(lines)-1] != "info mark a text works again <nil> 3600 <nil> 1h0m0s" {
			t.Errorf("%d lines: %q", len(lines), lines)
		}
		want(t, "sent", m.got(), "[x]")
		s.Shutdown(t.Context())
	})
}
