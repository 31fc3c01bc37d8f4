package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
)

// memory is a store and a channel that work and can be told to fail.
type memory struct {
	mu    sync.Mutex
	rows  []berth.Outgoing
	sent  []string
	fail  func(berth.Outgoing) error
	marks func() error
	slow  time.Duration
}

func (m *memory) add(chat, text string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rows = append(m.rows, berth.Outgoing{ID: int64(len(m.rows) + 1), ChatJID: chat, Key: "run/" + text + "/0", Text: text, MessageID: "m" + fmt.Sprint(len(m.rows)+1), State: berth.OutPending})
}

func (m *memory) OutboxChats(context.Context) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, r := range m.rows {
		if r.State == berth.OutPending && !slices.Contains(out, r.ChatJID) {
			out = append(out, r.ChatJID)
		}
	}
	return out, nil
}

func (m *memory) NextOutgoing(_ context.Context, chat string) (berth.Outgoing, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.rows {
		if r.ChatJID == chat && r.State == berth.OutPending {
			return r, true, nil
		}
	}
	return berth.Outgoing{}, false, nil
}

func (m *memory) MarkSent(_ context.Context, id int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.marks != nil {
		if err := m.marks(); err != nil {
			return err
		}
	}
	m.rows[id-1].State = berth.OutSent
	return nil
}

func (m *memory) MarkFailed(_ context.Context, id int64, reason string, retryAt time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.marks != nil {
		if err := m.marks(); err != nil {
			return err
		}
	}
	r := &m.rows[id-1]
	r.Attempts++
	r.NotBefore, r.Error = retryAt, reason
	if retryAt.IsZero() {
		r.State = berth.OutDead
	}
	return nil
}

func (m *memory) Send(ctx context.Context, o berth.Outgoing) error {
	m.mu.Lock()
	fail, slow := m.fail, m.slow
	m.mu.Unlock()
	time.Sleep(slow)
	if fail != nil {
		if err := fail(o); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sent = append(m.sent, o.Text)
	return nil
}

func (m *memory) got() string {
	synctest.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	return fmt.Sprint(m.sent)
}

func play(t *testing.T, fn func(t *testing.T, m *memory, s *Sender)) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		s := New(m, m, zaptest.NewLogger(t))
		fn(t, m, s)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		s.Shutdown(ctx)
	})
}

func want(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %s, want %s", what, got, want)
	}
}

func TestOrderWithinAChat(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		for i := range 5 {
			m.add("a", fmt.Sprint(i))
			s.Wake("a")
		}
		want(t, "sent", m.got(), "[0 1 2 3 4]")
	})
}

// DL-01: two wakes while one text is being sent send it once.
func TestDL01SentOnce(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		m.slow = 100 * time.Millisecond
		m.add("a", "x")
		s.Wake("a")
		time.Sleep(50 * time.Millisecond)
		s.Wake("a")
		time.Sleep(time.Second)
		want(t, "sent", m.got(), "[x]")
	})
}

// DL-02: a text that comes when the one before is sent is sent as well.
func TestDL02TheNextOne(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		for _, text := range []string{"x", "y"} {
			m.add("a", text)
			s.Wake("a")
			synctest.Wait()
		}
		want(t, "sent", m.got(), "[x y]")
	})
}

// DL-03: a text that was sent is not sent again because that was not noted.
func TestDL03NotAgainAfterALostMark(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		lost := errors.New("disk")
		m.marks = func() error { err := lost; lost = nil; return err }
		m.add("a", "x")
		m.add("a", "y")
		s.Wake("a")
		want(t, "at first", m.got(), "[x]")
		time.Sleep(time.Second)
		want(t, "a second later", m.got(), "[x y]")
		want(t, "states", join(m.rows[0].State, m.rows[1].State), "sent sent")
	})
}

// DL-04: three attempts, a minute and two apart, then never again.
func TestDL04ThreeAttempts(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		start := time.Now()
		var at []time.Duration
		m.fail = func(berth.Outgoing) error { at = append(at, time.Since(start)); return errors.New("no") }
		m.add("a", "x")
		s.Wake("a")
		time.Sleep(time.Hour)
		synctest.Wait()
		want(t, "attempts at", fmt.Sprint(at), "[0s 1m0s 3m0s]")
		want(t, "state", string(m.rows[0].State), string(berth.OutDead))
	})
}

// DL-05: what failed once is sent once, and the next text has all its attempts.
func TestDL05FailsOnce(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		calls, broken := map[string]int{}, false
		m.fail = func(o berth.Outgoing) error {
			if calls[o.Text]++; calls[o.Text] == 1 || broken {
				return errors.New("no")
			}
			return nil
		}
		m.add("a", "x")
		s.Wake("a")
		time.Sleep(time.Minute)
		want(t, "sent", m.got(), "[x]")
		broken = true
		m.add("a", "y")
		s.Wake("a")
		time.Sleep(time.Hour)
		synctest.Wait()
		want(t, "calls", fmt.Sprint(calls), "map[x:2 y:3]")
	})
}

// DL-06: a refusal is final. The one who refuses stands before the channel,
// which is not asked.
func TestDL06RefusedIsDeadAtOnce(t *testing.T) {
	for _, kind := range []berth.Kind{berth.Denied, berth.Invalid, berth.NotFound} {
		t.Run(kind.String(), func(t *testing.T) {
			play(t, func(t *testing.T, m *memory, s *Sender) {
				asked := 0
				m.fail = func(o berth.Outgoing) error {
					if o.Text != "x" {
						return nil
					}
					asked++
					return fmt.Errorf("send: %w", berth.Errorf(kind, "not to this chat"))
				}
				m.add("a", "x")
				m.add("a", "y")
				s.Wake("a")
				time.Sleep(time.Hour)
				want(t, "sent", m.got(), "[y]")
				want(t, "row", join(asked, m.rows[0].Attempts, m.rows[0].State, m.rows[0].Error), "1 1 dead send: not to this chat")
			})
		})
	}
}

// DL-07: what a daemon left behind, the next one finds.
func TestDL07UndeliveredAreFound(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		for _, x := range []string{"a1", "b1", "a2"} {
			m.add(x[:1], x)
		}
		m.rows[0].State = berth.OutSent
		if err := s.WakeAll(t.Context()); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		slices.Sort(m.sent)
		want(t, "sent", m.got(), "[a2 b1]")
	})
}

// DL-08: a chat that fails holds up itself only, and keeps its order.
func TestDL08FailureHoldsOneChat(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		failed := false
		m.fail = func(o berth.Outgoing) error {
			if o.Text == "a1" && !failed {
				failed = true
				return errors.New("once")
			}
			return nil
		}
		for _, x := range []string{"a1", "a2", "b1"} {
			m.add(x[:1], x)
		}
		if err := s.WakeAll(t.Context()); err != nil {
			t.Error(err)
		}
		want(t, "at first", m.got(), "[b1]")
		time.Sleep(time.Minute)
		want(t, "after a minute", m.got(), "[b1 a1 a2]")
	})
}

// A store that is broken too does not take an attempt away: nothing is sent
// until it took what came of the last one.
func TestFailureIsMarkedBeforeTheNextAttempt(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		start := time.Now()
		var at []time.Duration
		m.fail = func(berth.Outgoing) error { at = append(at, time.Since(start)); return errors.New("no") }
		left := 70
		m.marks = func() error {
			if left--; left >= 0 {
				return errors.New("disk")
			}
			return nil
		}
		m.add("a", "x")
		s.Wake("a")
		time.Sleep(time.Hour)
		synctest.Wait()
		want(t, "attempts at", fmt.Sprint(at), "[0s 1m10s 3m10s]")
	})
}

// An attempt under way at a kill is repeated under the same id.
func TestKillRepeatsUnderTheSameID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		var ids []string
		m.fail = func(o berth.Outgoing) error { ids = append(ids, o.MessageID); return nil }
		m.add("a", "x")
		killed := errors.New("killed")
		m.marks = func() error { return killed }
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for range 2 {
			s := New(m, m, zaptest.NewLogger(t))
			if err := s.WakeAll(t.Context()); err != nil {
				t.Error(err)
			}
			synctest.Wait()
			s.Shutdown(ended)
			m.marks = nil
		}
		want(t, "sent as", fmt.Sprint(ids), "[m1 m1]")
		want(t, "row", join(m.rows[0].State, m.rows[0].Attempts), "sent 0")
	})
}

// W04: an offline channel costs no attempt; the text waits until it is back.
func TestW04OfflineHoldsTheText(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		offline := true
		m.fail = func(berth.Outgoing) error {
			if offline {
				return berth.Errorf(berth.Unavailable, "offline")
			}
			return nil
		}
		m.add("a", "x")
		s.Wake("a")
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if m.rows[0].Attempts != 0 {
			t.Errorf("%d attempts while offline", m.rows[0].Attempts)
		}
		offline = false
		if err := s.WakeAll(t.Context()); err != nil {
			t.Error(err)
		}
		want(t, "sent", m.got(), "[x]")
	})
}

func TestShutdownSendsWhatItCan(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		m.slow = time.Second
		for i := range 5 {
			m.add("a", fmt.Sprint(i))
		}
		s.Wake("a")
		start := time.Now()
		s.Shutdown(t.Context())
		want(t, "sent", m.got(), "[0 1 2 3 4]")
		want(t, "took", fmt.Sprint(time.Since(start)), "5s")
		m.add("a", "late")
		s.Wake("a")
		want(t, "sent", m.got(), "[0 1 2 3 4]")
	})
}

// A chat that waits for a retry does not keep another from its last texts.
func TestShutdownSendsDespiteARetryElsewhere(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		m.fail = func(o berth.Outgoing) error {
			if o.ChatJID == "a" {
				return errors.New("no")
			}
			return nil
		}
		m.add("a", "x")
		s.Wake("a")
		synctest.Wait()
		m.slow = time.Second
		m.add("b", "1")
		m.add("b", "2")
		s.Wake("b")
		s.Shutdown(t.Context())
		want(t, "sent", m.got(), "[1 2]")
	})
}

func TestShutdownDoesNotWaitForARetry(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		m.fail = func(berth.Outgoing) error { return errors.New("no") }
		m.add("a", "x")
		s.Wake("a")
		synctest.Wait()
		start := time.Now()
		s.Shutdown(t.Context())
		want(t, "took", fmt.Sprint(time.Since(start)), "0s")
	})
}

// join returns its arguments with spaces between.
func join(args ...any) string { return strings.TrimSpace(fmt.Sprintln(args...)) }

// A clock that was set back since a retry was stored, or while it is waited for,
// does not put it off: the wait is what was decided, and that once.
func TestRetryWhenTheClockJumpsBack(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		m.add("a", "x")
		m.rows[0].Attempts = 1
		m.rows[0].NotBefore = time.Now().Add(time.Hour + firstRetry) // by the clock before
		s.Wake("a")
		time.Sleep(firstRetry - time.Second)
		want(t, "before", m.got(), "[]")
		time.Sleep(time.Second)
		want(t, "after the wait", m.got(), "[x]")
	})
}

// What still waits for its time is not sent early because the daemon shuts down.
func TestShutdownDoesNotHurryARetry(t *testing.T) {
	play(t, func(t *testing.T, m *memory, s *Sender) {
		m.add("a", "x")
		m.rows[0].Attempts = 1
		m.rows[0].NotBefore = time.Now().Add(firstRetry)
		s.Wake("a")
		synctest.Wait()
		s.Shutdown(t.Context())
		want(t, "sent", m.got(), "[]")
	})
}

// releaser is a channel that holds what goes along with a text.
type releaser struct {
	*memory
	released []string
}

func (r *releaser) Release(o berth.Outgoing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.released = append(r.released, o.Text+" "+string(r.rows[o.ID-1].State))
}

func (r *releaser) let() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return fmt.Sprint(r.released)
}

// What goes along with a text is let go when the store knows that it was sent, and
// not before: a restart would need it again.
func TestRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &releaser{memory: &memory{}}
		s := New(r.memory, r, zaptest.NewLogger(t))
		defer s.Shutdown(t.Context())
		fails := 3
		r.marks = func() error {
			if fails--; fails >= 0 {
				return errors.New("no store")
			}
			return nil
		}
		r.add("a", "x")
		s.Wake("a")
		want(t, "sent", r.got(), "[x]")
		want(t, "released", r.let(), "[]")
		time.Sleep(3 * storeRetry)
		synctest.Wait()
		want(t, "released", r.let(), "[x sent]")
		r.fail = func(berth.Outgoing) error { return berth.Errorf(berth.Invalid, "never") }
		r.add("a", "y")
		s.Wake("a")
		synctest.Wait()
		want(t, "given up, and kept for another try", r.let(), "[x sent]")
	})
}
