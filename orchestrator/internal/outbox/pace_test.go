package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
)

// paced is a channel with a pace for every chat but those whose name begins
// with an x. It notes when each text was sent.
type paced struct {
	*memory
	start time.Time
	at    []string
}

func (p *paced) Pace(chat string) Pace {
	if strings.HasPrefix(chat, "x") {
		return Pace{}
	}
	return Pace{Chunk: 500 * time.Millisecond, Text: time.Second, Burst: 3}
}

func (p *paced) Send(ctx context.Context, o berth.Outgoing) error {
	err := p.memory.Send(ctx, o)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.at = append(p.at, fmt.Sprint(o.Text, " ", time.Since(p.start)))
	return err
}

func (p *paced) times() string {
	synctest.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	out := strings.Join(p.at, ", ")
	p.at, p.start = nil, time.Now()
	return out
}

// addPieces adds the pieces of one text.
func (p *paced) addPieces(chat, text string, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range n {
		p.rows = append(p.rows, berth.Outgoing{
			ID: int64(len(p.rows) + 1), ChatJID: chat, Key: fmt.Sprintf("run/%s/%d", text, i), Text: fmt.Sprint(text, i), State: berth.OutPending,
		})
	}
}

func playPaced(t *testing.T, fn func(t *testing.T, p *paced, s *Sender)) {
	synctest.Test(t, func(t *testing.T) {
		p := &paced{memory: &memory{}, start: time.Now()}
		s := New(p, p, zaptest.NewLogger(t))
		fn(t, p, s)
		s.Shutdown(t.Context())
	})
}

func TestPiecesFollowAtHalfASecond(t *testing.T) {
	playPaced(t, func(t *testing.T, p *paced, s *Sender) {
		p.slow = 100 * time.Millisecond
		p.addPieces("a", "p", 4)
		p.add("a", "next")
		s.Wake("a")
		time.Sleep(time.Minute)
		// From the end of one to the beginning of the next; the next text has
		// two of the burst left.
		want(t, "sent", p.times(), "p0 100ms, p1 700ms, p2 1.3s, p3 1.9s, next 2s")
	})
}

func TestTextsMayBurstThenKeepASecond(t *testing.T) {
	playPaced(t, func(t *testing.T, p *paced, s *Sender) {
		for i := range 6 {
			p.add("a", fmt.Sprint(i))
		}
		s.Wake("a")
		time.Sleep(4 * time.Second)
		want(t, "sent", p.times(), "0 0s, 1 0s, 2 0s, 3 1s, 4 2s, 5 3s")
		// A second after the last one there is one again.
		p.add("a", "6")
		p.add("a", "7")
		s.Wake("a")
		time.Sleep(time.Minute)
		want(t, "then", p.times(), "6 0s, 7 1s")
		for i := range 4 {
			p.add("a", fmt.Sprint("later", i))
		}
		s.Wake("a")
		time.Sleep(time.Minute)
		want(t, "after a pause", p.times(), "later0 0s, later1 0s, later2 0s, later3 1s")
	})
}

// The pace holds although every text has a worker of its own.
func TestPaceOutlivesTheWorker(t *testing.T) {
	playPaced(t, func(t *testing.T, p *paced, s *Sender) {
		for i := range 5 {
			p.add("a", fmt.Sprint(i))
			s.Wake("a")
			synctest.Wait()
		}
		time.Sleep(time.Minute)
		want(t, "sent", p.times(), "0 0s, 1 0s, 2 0s, 3 1s, 4 2s")
	})
}

func TestPaceIsOfOneChat(t *testing.T) {
	playPaced(t, func(t *testing.T, p *paced, s *Sender) {
		p.addPieces("a", "p", 3)
		p.addPieces("x", "q", 3)
		s.Wake("a")
		synctest.Wait()
		s.Wake("x")
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		s.Wake("b")
		p.add("b", "r")
		s.Wake("b")
		time.Sleep(time.Minute)
		want(t, "sent", p.times(), "p0 0s, q0 0s, q1 0s, q2 0s, r 200ms, p1 500ms, p2 1s")
	})
}

// A pace is no retry: it uses no attempt, and a retry waits for its own time.
func TestPaceIsNoRetry(t *testing.T) {
	playPaced(t, func(t *testing.T, p *paced, s *Sender) {
		failed := false
		p.fail = func(o berth.Outgoing) error {
			if o.Text == "p1" && !failed {
				failed = true
				return errors.New("once")
			}
			return nil
		}
		p.addPieces("a", "p", 3)
		s.Wake("a")
		time.Sleep(time.Hour)
		want(t, "sent", p.times(), "p0 0s, p1 500ms, p1 1m0.5s, p2 1m1s")
		for _, r := range p.rows {
			want(t, r.Text, fmt.Sprint(r.State, r.Attempts), map[bool]string{true: "sent1", false: "sent0"}[r.Text == "p1"])
		}
	})
}

// What an offline channel refused has not gone out and costs nothing later.
func TestOfflineHasNoPace(t *testing.T) {
	playPaced(t, func(t *testing.T, p *paced, s *Sender) {
		p.fail = func(berth.Outgoing) error { return berth.Errorf(berth.Unavailable, "offline") }
		for i := range 4 {
			p.add("a", fmt.Sprint(i))
			s.Wake("a")
			synctest.Wait()
		}
		p.times()
		p.fail = nil
		s.Wake("a")
		time.Sleep(time.Minute)
		want(t, "sent", p.times(), "0 0s, 1 0s, 2 0s, 3 1s")
	})
}

func TestShutdownKeepsThePace(t *testing.T) {
	playPaced(t, func(t *testing.T, p *paced, s *Sender) {
		p.addPieces("a", "p", 3)
		s.Wake("a")
		synctest.Wait()
		s.Shutdown(t.Context())
		want(t, "sent", p.times(), "p0 0s, p1 500ms, p2 1s")
	})
}

// W04: nothing is remembered of a chat for long, nor of one without a pace.
func TestPaceIsForgotten(t *testing.T) {
	playPaced(t, func(t *testing.T, p *paced, s *Sender) {
		held := func() int {
			synctest.Wait()
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(s.resting) + len(s.workers)
		}
		for i := range 100 {
			p.add(fmt.Sprint(i), "t")
			p.add(fmt.Sprint("x", i), "t")
		}
		if err := s.WakeAll(t.Context()); err != nil {
			t.Error(err)
		}
		want(t, "at first", fmt.Sprint(held()), "100")
		time.Sleep(900 * time.Millisecond)
		p.add("0", "again")
		s.Wake("0")
		time.Sleep(100 * time.Millisecond)
		want(t, "after a second", fmt.Sprint(held()), "1")
		time.Sleep(time.Second)
		want(t, "after two", fmt.Sprint(held()), "0")
	})
}

func TestFollows(t *testing.T) {
	for _, c := range []struct {
		before, key string
		want        bool
	}{
		{"run/r/3/0", "run/r/3/1", true},
		{"run/r/3/9", "run/r/3/10", true},
		{"run/r/3/0", "run/r/3/0", false}, // a retry
		{"run/r/3/1", "run/r/4/2", false},
		{"ipc/family/1.json/0", "ipc/family/1.json/1", true},
		{"parked/r1", "parked/r2", false}, // notices that have only the first element in common
		{"", "run/r/3/0", false},
		{"x", "x", false},
	} {
		if got := follows(c.before, c.key); got != c.want {
			t.Errorf("%q, %q: got %t", c.before, c.key, got)
		}
	}
}
