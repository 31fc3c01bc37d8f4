package queue

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// GQ-17: a run's slot is free however its goroutine ends. A panic goes this way
// too, and then ends the program.
func TestGQ17SlotIsFreeHoweverTheRunEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, func(_ context.Context, s *Slot) Result {
			if s.Folder == "a" {
				runtime.Goexit()
			}
			return Result{}
		})
		p.Add("a")
		p.AddTask("a", "t1")
		p.Add("b")
		pass(time.Second)
		equal(t, "used", p.State().Used, 0)
		order := p.order()
		slices.Sort(order)
		equal(t, "runs", order, []string{"a", "a/t1", "b"})
		p.Shutdown(t.Context()) // returns
	})
}

// WR-01: however many wake a group at once, it has one run at a time, and all
// that came while it ran is one more.
func TestWR01ConcurrentWakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(5, time.Hour, takes(time.Second))
		wake := func() {
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() { p.Add("a") })
			}
			wg.Wait()
		}
		wake()
		pass(500 * time.Millisecond)
		wake()
		equal(t, "used", p.State().Used, 1)
		pass(time.Minute)
		equal(t, "most at once", p.max, 1)
		equal(t, "runs", p.order(), []string{"a", "a"})
	})
}

// WR-03: where there is nothing to stop, nothing is stopped, nor started.
func TestWR03CloseWithoutARun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, func(ctx context.Context, s *Slot) Result {
			if s.Folder == "over" {
				return Result{}
			}
			return chat(time.Second)(ctx, s)
		})
		p.Add("other")
		p.Add("over")
		pass(time.Minute)
		equal(t, "never there", p.Close("nobody"), false)
		equal(t, "over", p.Close("over"), false)
		pass(time.Minute)
		equal(t, "closed", p.closed(), []Reason{""}) // "over", which ended by itself
		equal(t, "runs", len(p.order()), 2)
		equal(t, "used", p.State().Used, 1)
		p.Shutdown(t.Context())
	})
}

// WR-04: of two runs one is stopped.
func TestWR04CloseStopsOneOfTwo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, chat(time.Second))
		p.Add("a")
		p.Add("b")
		pass(time.Minute)
		equal(t, "closed", p.Close("a"), true)
		pass(time.Minute)
		equal(t, "reasons", p.closed(), []Reason{ReasonStopped})
		equal(t, "used", p.State().Used, 1)
		equal(t, "the other", p.Close("b"), true)
		p.Shutdown(t.Context())
	})
}

// WR-05: a stop starts nothing.
func TestWR05StopStartsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, chat(time.Second))
		p.Add("a")
		pass(time.Minute)
		p.Close("a")
		pass(24 * time.Hour)
		equal(t, "runs", p.order(), []string{"a"})
		equal(t, "used", p.State().Used, 0)
	})
}

// W40: a task has a run of its own. It shares its group's only slot with the
// chat, which GQ-03, GQ-09 and GQ-13 want, and holds up no other group.
func TestW40LongTaskHoldsUpItsOwnGroupOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, func(_ context.Context, s *Slot) Result {
			if s.Task() != "" {
				time.Sleep(10 * time.Minute)
			}
			return Result{}
		})
		p.AddTask("a", "t1")
		pass(time.Second)
		p.Add("a")
		for range 3 {
			p.Add("b")
			pass(time.Minute)
		}
		equal(t, "during the task", p.order(), []string{"a/t1", "b", "b", "b"})
		equal(t, "waiting", p.State().Waiting, []string{})
		pass(7 * time.Minute)
		equal(t, "after it", p.order(), []string{"a/t1", "b", "b", "b", "a"})
		equal(t, "most at once", p.max, 2)
	})
}

// W41: a task whose run outlives the daemon is not started once more by the next
// one, however often it is found to be due; one that had not begun is started once.
func TestW41TaskStartsOnceAroundARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		letGo := func(ctx context.Context, _ *Slot) Result { <-ctx.Done(); return Result{} }
		first := newPool(1, time.Hour, letGo)
		first.AddTask("a", "t1")
		first.AddTask("a", "t2")
		pass(time.Second)
		first.Shutdown(t.Context())
		equal(t, "first daemon", first.order(), []string{"a/t1"})

		next := newPool(1, time.Hour, takes(time.Second))
		next.Pause()
		due := func() { next.AddTask("a", "t1"); next.AddTask("a", "t2") }
		due()
		equal(t, "adopted", next.Adopt("a", "t1", takes(time.Minute)), true)
		due()
		next.Resume()
		pass(30 * time.Second)
		due()
		equal(t, "while it runs", next.order(), []string{})
		pass(time.Minute)
		equal(t, "next daemon", next.order(), []string{"a/t2"})
	})
}

// TS-09: a task that has its result is closed though it is at work; a run that
// answers messages is not closed that way.
func TestTS09DoneClosesATask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reasons []Reason
		p := newPool(2, time.Hour, func(ctx context.Context, s *Slot) Result {
			s.Done()
			s.Done()
			select {
			case <-s.Closing():
			case <-ctx.Done():
			}
			reasons = append(reasons, s.Reason())
			return Result{}
		})
		p.AddTask("a", "t1")
		pass(time.Second)
		equal(t, "reasons", reasons, []Reason{ReasonTaskDone})
		p.Add("a")
		pass(time.Hour)
		equal(t, "used", p.State().Used, 1)
		p.Shutdown(t.Context())
	})
}
