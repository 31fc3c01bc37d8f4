package queue

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// pool is a queue whose runs do what the test says.
type pool struct {
	*Queue
	mu      sync.Mutex
	started []string
	max     int
	live    int
	reasons []Reason
}

// newPool returns a pool whose runs call work.
func newPool(limit int, idle time.Duration, work func(context.Context, *Slot) Result) *pool {
	p := &pool{}
	p.Queue = New(limit, idle, func(ctx context.Context, s *Slot) Result {
		p.mu.Lock()
		p.started = append(p.started, s.Folder)
		p.live++
		p.max = max(p.max, p.live)
		p.mu.Unlock()
		r := work(ctx, s)
		p.mu.Lock()
		p.live--
		p.reasons = append(p.reasons, s.Reason())
		p.mu.Unlock()
		return r
	})
	return p
}

func (p *pool) order() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.started)
}

func takes(d time.Duration) func(context.Context, *Slot) Result {
	return func(context.Context, *Slot) Result { time.Sleep(d); return Result{} }
}

// chat answers for a while, then stays idle until it is closed.
func chat(busy time.Duration) func(context.Context, *Slot) Result {
	return func(ctx context.Context, s *Slot) Result {
		time.Sleep(busy)
		s.Idle()
		for {
			select {
			case <-s.Wake():
				if s.Busy() {
					time.Sleep(busy)
					s.Idle()
				}
			case <-s.Closing():
				return Result{}
			case <-ctx.Done():
				return Result{}
			}
		}
	}
}

// pass lets time go by and waits until nothing moves.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func equal(t *testing.T, what string, got, want any) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func TestGQ01OneRunAGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, takes(100*time.Millisecond))
		p.Add("a")
		p.Add("a")
		p.Add("a")
		pass(time.Second)
		equal(t, "most at once", p.max, 1)
		equal(t, "runs", p.order(), []string{"a", "a"})
	})
}

func TestGQ02And07LimitAndLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, takes(time.Second))
		for _, g := range []string{"a", "b", "c", "d"} {
			p.Add(g)
		}
		pass(500 * time.Millisecond)
		equal(t, "started", len(p.order()), 2)
		equal(t, "waiting", p.State().Waiting, []string{"c", "d"})
		pass(time.Minute)
		equal(t, "most at once", p.max, 2)
		got := p.order()
		slices.Sort(got[:2])
		slices.Sort(got[2:])
		equal(t, "order", got, []string{"a", "b", "c", "d"})
		equal(t, "used", p.State().Used, 0)
	})
}

func TestGQ05NothingAfterShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, takes(time.Second))
		p.Shutdown(t.Context())
		p.Add("a")
		pass(time.Minute)
		equal(t, "runs", p.order(), []string{})
	})
}

func TestGQ17PanicFreesTheSlot(t *testing.T) {
	// A panic in a run ends the program, as everywhere in Go; what has to hold
	// is that the slot was returned by then, for a start that recovers.
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, func(_ context.Context, s *Slot) (r Result) {
			defer func() { _ = recover() }()
			panic("agent")
		})
		p.Add("a")
		p.Add("b")
		pass(time.Second)
		equal(t, "used", p.State().Used, 0)
		equal(t, "runs", p.order(), []string{"a", "b"})
	})
}

// W32: idle runs must not hold all slots while a group waits.
func TestW32LongestIdleMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, chat(time.Second))
		p.Add("old")
		pass(10 * time.Second)
		p.Add("new")
		pass(10 * time.Second)
		p.Add("third")
		pass(10 * time.Second)
		equal(t, "runs", p.order(), []string{"old", "new", "third"})
		equal(t, "closed", p.reasons, []Reason{ReasonEvicted})
		p.Add("new") // still there: a follow-up, no new run
		pass(10 * time.Second)
		equal(t, "runs", len(p.order()), 3)
		p.Shutdown(t.Context())
	})
}

func TestBusyRunsAreNotEvicted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, chat(time.Minute))
		p.Add("a")
		pass(time.Second)
		p.Add("b")
		pass(58 * time.Second)
		equal(t, "runs after 59 s", p.order(), []string{"a"})
		pass(2 * time.Second) // a turned idle at 60 s
		equal(t, "runs after 61 s", p.order(), []string{"a", "b"})
		p.Shutdown(t.Context())
	})
}

func TestOneEvictionAWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(3, time.Hour, chat(time.Second))
		for _, g := range []string{"a", "b", "c"} {
			p.Add(g)
			pass(10 * time.Second)
		}
		p.Add("d")
		p.Add("d")
		pass(10 * time.Second)
		equal(t, "closed", p.reasons, []Reason{ReasonEvicted})
		equal(t, "used", p.State().Used, 3)
		p.Shutdown(t.Context())
	})
}

// A group with endless traffic goes to the back of the line.
func TestEndlessTrafficStarvesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, chat(time.Second))
		stop := make(chan struct{})
		go func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(100 * time.Millisecond):
					p.Add("loud")
				}
			}
		}()
		pass(5 * time.Second)
		p.Add("quiet")
		pass(3 * time.Second)
		if !slices.Contains(p.order(), "quiet") {
			t.Error("quiet never ran")
		}
		close(stop)
		p.Shutdown(t.Context())
	})
}

func TestIdleTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, 30*time.Minute, chat(time.Second))
		p.Add("a")
		pass(20 * time.Minute)
		p.Add("a") // the clock starts again after this turn
		pass(29 * time.Minute)
		equal(t, "used", p.State().Used, 1)
		pass(2 * time.Minute)
		equal(t, "used", p.State().Used, 0)
		equal(t, "closed", p.reasons, []Reason{ReasonIdle})
	})
}

// W11: a message that meets a closing run is not lost: it waits for the next.
func TestW11MessageDuringClosing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, func(ctx context.Context, s *Slot) Result {
			s.Idle()
			<-s.Closing()
			if s.Busy() {
				t.Error("a closing run took work")
			}
			time.Sleep(time.Second)
			return Result{}
		})
		p.Add("a")
		pass(time.Second)
		equal(t, "closed", p.Close("a"), true)
		p.Add("a")
		pass(1500 * time.Millisecond)
		equal(t, "runs", p.order(), []string{"a", "a"})
		p.Shutdown(t.Context())
	})
}

// W33: one retry timer a group, and messages during backoff do not bypass it.
func TestW33BackoffIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var at []time.Duration
		fails := 0
		p := newPool(2, time.Hour, func(context.Context, *Slot) Result {
			at = append(at, time.Since(start))
			if fails++; fails > 2 {
				return Result{}
			}
			return Result{Again: true, RetryAt: time.Now().Add(time.Duration(fails*5) * time.Second)}
		})
		p.Add("a")
		for range 5 {
			pass(500 * time.Millisecond)
			p.Add("a")
		}
		pass(time.Minute)
		equal(t, "runs at", at, []time.Duration{0, 5 * time.Second, 15 * time.Second})
	})
}

func TestHoldBeforeTheFirstRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var at time.Duration
		p := newPool(1, time.Hour, func(context.Context, *Slot) Result { at = time.Since(start); return Result{} })
		p.Hold("a", start.Add(7*time.Second))
		p.Add("a")
		pass(time.Minute)
		equal(t, "ran at", at, 7*time.Second)
	})
}

func TestPauseAndResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, takes(time.Second))
		p.Pause()
		p.Add("a")
		pass(time.Minute)
		equal(t, "while paused", p.order(), []string{})
		p.Resume()
		pass(time.Minute)
		equal(t, "after", p.order(), []string{"a"})
	})
}

func TestAdoptedRunTakesASlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, takes(time.Second))
		equal(t, "adopted", p.Adopt("a", takes(10*time.Second)), true)
		equal(t, "twice", p.Adopt("a", takes(time.Second)), false)
		p.Add("b")
		pass(9 * time.Second)
		equal(t, "runs", p.order(), []string{})
		pass(2 * time.Second)
		equal(t, "runs", p.order(), []string{"b"})
		p.Shutdown(t.Context())
	})
}

func TestShutdownClosesIdleAndLeavesBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, func(ctx context.Context, s *Slot) Result {
			if s.Folder == "idle" {
				return chat(0)(ctx, s)
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Hour):
				t.Error("a busy run was waited for")
			}
			return Result{Again: true}
		})
		p.Add("idle")
		p.Add("busy")
		pass(time.Second)
		start := time.Now()
		p.Shutdown(t.Context())
		equal(t, "took", time.Since(start), time.Duration(0))
		slices.Sort(p.reasons)
		equal(t, "reasons", p.reasons, []Reason{"", ReasonShutdown})
	})
}

func TestShutdownDoesNotWaitForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, func(ctx context.Context, s *Slot) Result {
			s.Idle()
			<-ctx.Done() // does not care about closing
			return Result{}
		})
		p.Add("a")
		pass(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		start := time.Now()
		p.Shutdown(ctx)
		equal(t, "took", time.Since(start), 10*time.Second)
	})
}

// A group that waits in the line when its run is adopted has one run, not two,
// and what it waited for is not forgotten.
func TestAdoptedWhileInLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, takes(time.Second))
		p.Pause()
		p.Add("a") // a message, before anything was taken over
		woken := 0
		equal(t, "adopted", p.Adopt("a", func(ctx context.Context, s *Slot) Result {
			s.Idle()
			select {
			case <-s.Wake():
				woken++
			case <-ctx.Done():
			}
			return Result{}
		}), true)
		p.Resume()
		pass(time.Second)
		equal(t, "woken", woken, 1)
		equal(t, "other runs", p.order(), []string{"a"}) // the pending message, after the adopted run
		equal(t, "used", p.State().Used, 0)
	})
}

func TestAdoptedWhileThePoolIsFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, takes(10*time.Second))
		p.Add("full")
		pass(time.Second)
		p.Add("a")
		equal(t, "adopted", p.Adopt("a", takes(time.Second)), true)
		equal(t, "waiting", p.State().Waiting, []string{})
		pass(time.Minute)
		equal(t, "used", p.State().Used, 0)
		equal(t, "runs", p.order(), []string{"full", "a"})
	})
}

// A run that goes to work by itself is not idle.
func TestWorkingRunIsNotClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Minute, func(_ context.Context, s *Slot) Result {
			s.Idle()
			s.Working()
			select {
			case <-s.Closing():
				t.Error("it was closed")
			case <-time.After(time.Hour):
			}
			return Result{}
		})
		p.Add("a")
		pass(time.Second)
		p.Add("b")
		pass(3 * time.Hour)
	})
}
