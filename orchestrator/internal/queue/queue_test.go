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

// pool is a queue whose runs do what the test says. The run of a task is noted as
// group/task.
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
		name := s.Folder
		if s.Task() != "" {
			name += "/" + s.Task()
		}
		p.started = append(p.started, name)
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

// closed returns why the runs were closed that have ended.
func (p *pool) closed() []Reason {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.reasons)
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

func TestGQ02LimitOverAllGroups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, takes(time.Second))
		for _, g := range []string{"a", "b", "c"} {
			p.Add(g)
		}
		pass(500 * time.Millisecond)
		equal(t, "started", len(p.order()), 2)
		pass(time.Minute)
		equal(t, "most at once", p.max, 2)
		equal(t, "runs", len(p.order()), 3)
		equal(t, "used", p.State().Used, 0)
	})
}

func TestGQ03TasksBeforeMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, takes(time.Second))
		p.Add("a")
		pass(500 * time.Millisecond)
		p.Add("a")
		p.AddTask("a", "t1")
		p.AddTask("a", "t2")
		pass(time.Minute)
		equal(t, "runs", p.order(), []string{"a", "a/t1", "a/t2", "a"})
		equal(t, "most at once", p.max, 1)
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

func TestGQ07WaitingGroupsAreDrained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, takes(time.Second))
		p.Add("a")
		pass(300 * time.Millisecond)
		for _, g := range []string{"b", "c", "d"} {
			p.Add(g)
		}
		pass(500 * time.Millisecond)
		equal(t, "before", p.order(), []string{"a", "b"})
		equal(t, "waiting", p.State().Waiting, []string{"c", "d"})
		pass(300 * time.Millisecond) // a has ended
		equal(t, "then", p.order(), []string{"a", "b", "c"})
		pass(time.Minute)
		equal(t, "at last", p.order(), []string{"a", "b", "c", "d"})
	})
}

func TestGQ08RunningTaskIsNotAddedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, takes(time.Second))
		p.AddTask("a", "t1")
		pass(500 * time.Millisecond)
		p.AddTask("a", "t1")
		pass(time.Minute)
		equal(t, "runs", p.order(), []string{"a/t1"})
		p.AddTask("a", "t1") // due the next time
		pass(time.Minute)
		equal(t, "runs", p.order(), []string{"a/t1", "a/t1"})
	})
}

// A task that is due again while its last run ends is not forgotten.
func TestGQ08TaskIsAddedWhileItsRunEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, func(_ context.Context, s *Slot) Result {
			s.Seal()
			time.Sleep(time.Second)
			return Result{}
		})
		p.AddTask("a", "t1")
		pass(time.Millisecond)
		p.AddTask("a", "t1")
		p.AddTask("a", "t1")
		pass(time.Minute)
		equal(t, "runs", p.order(), []string{"a/t1", "a/t1"})
	})
}

func TestGQ09BusyRunIsNotClosedForATask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, func(_ context.Context, s *Slot) Result {
			select {
			case <-s.Closing():
				t.Error("it was closed")
			case <-time.After(time.Minute):
			}
			return Result{}
		})
		p.Add("a")
		pass(time.Second)
		p.AddTask("a", "t1")
		pass(58 * time.Second)
		equal(t, "runs", p.order(), []string{"a"})
		pass(2 * time.Second)
		equal(t, "runs", p.order(), []string{"a", "a/t1"})
		pass(time.Hour)
	})
}

func TestGQ10IdleRunIsClosedForATask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, chat(time.Second))
		p.Add("a")
		pass(time.Second) // idle just now: a hold-down is for other groups only
		p.AddTask("a", "t1")
		p.AddTask("a", "t1")
		synctest.Wait()
		equal(t, "closed", p.closed(), []Reason{ReasonTask})
		equal(t, "runs", p.order(), []string{"a", "a/t1"})
		p.Shutdown(t.Context())
	})
}

func TestGQ11FollowUpClearsIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, chat(time.Minute))
		p.Add("a")
		pass(2 * time.Minute)
		p.Add("a")
		synctest.Wait() // it went to work
		p.AddTask("a", "t1")
		pass(59 * time.Second)
		equal(t, "closed", p.closed(), []Reason{})
		pass(2 * time.Second)
		equal(t, "closed", p.closed(), []Reason{ReasonTask})
		p.Shutdown(t.Context())
	})
}

func TestGQ12NoFollowUpIntoATaskRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, func(_ context.Context, s *Slot) Result {
			if s.Task() == "" {
				return Result{}
			}
			for _, wait := range []time.Duration{time.Minute, 2 * time.Minute} {
				select {
				case <-s.Wake():
					t.Error("a task run was woken")
				case <-s.Closing():
					if wait == time.Minute {
						t.Error("a busy task run was closed")
					}
					return Result{}
				case <-time.After(wait):
				}
				if s.Busy() {
					t.Error("a task run took messages")
				}
				s.Idle()
			}
			t.Error("an idle task run was not closed")
			return Result{}
		})
		p.AddTask("a", "t1")
		pass(time.Second)
		p.Add("a")
		pass(58 * time.Second)
		equal(t, "runs", p.order(), []string{"a/t1"})
		pass(2 * time.Second)
		equal(t, "runs", p.order(), []string{"a/t1", "a"})
		equal(t, "closed", p.closed(), []Reason{ReasonTaskDone, ""})
	})
}

func TestGQ13IdleWithATaskWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, chat(time.Minute))
		p.Add("a")
		pass(time.Second)
		p.AddTask("a", "t1")
		p.Add("a") // does not wake it: the task is first
		p.Add("b") // does not close it once more
		pass(58 * time.Second)
		equal(t, "closed", p.closed(), []Reason{})
		pass(2 * time.Second)
		equal(t, "closed", p.closed(), []Reason{ReasonTask})
		pass(5 * time.Minute)
		equal(t, "runs", p.order(), []string{"a", "b", "a/t1", "a"}) // b waited for longer
		p.Shutdown(t.Context())
	})
}

func TestGQ14WaitingTaskIsNotAddedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, takes(time.Second))
		p.Add("b")
		p.AddTask("a", "t1")
		p.AddTask("a", "t1")
		equal(t, "waiting", p.State().Waiting, []string{"a"})
		pass(time.Minute)
		equal(t, "runs", p.order(), []string{"b", "a/t1"})
	})
}

func TestGQ15TaskAtTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, time.Hour, takes(time.Second))
		p.Add("a")
		pass(100 * time.Millisecond)
		p.Add("b")
		pass(100 * time.Millisecond)
		p.Add("c")
		p.AddTask("c", "t1")
		pass(100 * time.Millisecond)
		equal(t, "runs", p.order(), []string{"a", "b"})
		pass(time.Minute)
		equal(t, "runs", p.order(), []string{"a", "b", "c/t1", "c"})
	})
}

// Without a run there is nothing to give a message to: it waits for a new run.
func TestGQ16NoRunToFollowUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, takes(time.Second))
		p.Pause()
		p.Add("a")
		pass(time.Minute)
		equal(t, "runs", p.order(), []string{})
		equal(t, "waiting", p.State().Waiting, []string{"a"})
		equal(t, "closed", p.Close("a"), false)
	})
}

func TestGQ17PanicFreesTheSlot(t *testing.T) {
	// The start recovers (see turn); what has to hold here is the slot.
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
		equal(t, "closed", p.closed(), []Reason{ReasonEvicted})
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
		equal(t, "closed", p.closed(), []Reason{ReasonEvicted})
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
		equal(t, "closed", p.closed(), []Reason{ReasonIdle})
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

// W33, W65: one retry timer a group, and messages during backoff do not bypass it.
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
		equal(t, "adopted", p.Adopt("a", "", takes(10*time.Second)), true)
		equal(t, "twice", p.Adopt("a", "", takes(time.Second)), false)
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
		equal(t, "adopted", p.Adopt("a", "", func(ctx context.Context, s *Slot) Result {
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
		equal(t, "adopted", p.Adopt("a", "", takes(time.Second)), true)
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

// An idle run makes room for another group's task as for its messages.
func TestTaskMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, chat(time.Second))
		p.Add("a")
		pass(10 * time.Second)
		p.AddTask("b", "t1")
		synctest.Wait()
		equal(t, "closed", p.closed(), []Reason{ReasonEvicted})
		equal(t, "runs", p.order(), []string{"a", "b/t1"})
		p.Shutdown(t.Context())
	})
}

// Backoff is for messages. A task does not wait for it, nor end it, and what
// the task's run returns does not count.
func TestTaskDuringBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var at []string
		p := newPool(1, time.Hour, func(_ context.Context, s *Slot) Result {
			at = append(at, fmt.Sprint(s.Task(), time.Since(start)))
			if len(at) == 1 {
				return Result{Again: true, RetryAt: start.Add(10 * time.Second)}
			}
			return Result{RetryAt: start.Add(time.Hour)}
		})
		p.Add("a")
		pass(2 * time.Second)
		p.AddTask("a", "t1")
		pass(time.Second)
		p.Pause()
		p.AddTask("a", "t2")
		p.Hold("a", start.Add(20*time.Second)) // leaves the task in the line
		p.Resume()
		pass(time.Minute)
		equal(t, "runs at", at, []string{"0s", "t12s", "t23s", "20s"})
	})
}

func TestTaskAfterShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, takes(time.Second))
		p.Add("a")
		p.AddTask("a", "t1")
		pass(0)
		p.Shutdown(t.Context())
		p.AddTask("b", "t2")
		pass(time.Minute)
		equal(t, "runs", p.order(), []string{"a"})
	})
}

func TestAdoptedTask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, takes(time.Second))
		p.Pause()
		p.AddTask("a", "t1") // due, before its run was found
		equal(t, "adopted", p.Adopt("a", "t1", func(_ context.Context, s *Slot) Result {
			equal(t, "task", s.Task(), "t1")
			time.Sleep(time.Second)
			s.Idle()
			<-s.Closing()
			return Result{}
		}), true)
		p.AddTask("a", "t1")
		p.Add("a")
		p.Resume()
		pass(time.Minute)
		equal(t, "other runs", p.order(), []string{"a"})
	})
}

func TestAdoptedRunMakesRoomForATask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, takes(time.Second))
		p.AddTask("b", "t0")
		p.AddTask("a", "t1")
		equal(t, "adopted", p.Adopt("a", "", chat(time.Minute)), true)
		pass(59 * time.Second)
		equal(t, "runs", p.order(), []string{"b/t0"})
		pass(2 * time.Second)
		equal(t, "runs", p.order(), []string{"b/t0", "a/t1"})
	})
}

// A person's quick follow-up reaches the run that has just answered, though
// another group waits; that group's turn is next.
func TestHoldDownLetsAFollowUpIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, chat(2*time.Second))
		p.Add("a")
		pass(time.Second)
		p.Add("b")
		pass(1500 * time.Millisecond) // a is idle for half a second
		equal(t, "used", p.State().Used, 1)
		p.Add("a")
		pass(1900 * time.Millisecond)
		equal(t, "runs", p.order(), []string{"a"})
		pass(200 * time.Millisecond)
		equal(t, "runs", p.order(), []string{"a", "b"}) // no second hold-down
		equal(t, "closed", p.closed(), []Reason{ReasonEvicted})
		p.Shutdown(t.Context())
	})
}

// Without a follow-up the run makes room when its hold-down is over.
func TestHoldDownEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, chat(2*time.Second))
		p.Add("a")
		pass(2*time.Second + HoldDown/2)
		p.Add("b")
		pass(HoldDown/2 - time.Millisecond)
		equal(t, "runs", p.order(), []string{"a"})
		pass(time.Millisecond)
		equal(t, "runs", p.order(), []string{"a", "b"})
		p.Shutdown(t.Context())
	})
}

// A run that is idle for longer makes room at once, and only as many as wait.
func TestHoldDownOlderFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(3, time.Hour, chat(time.Second))
		for _, g := range []string{"old", "new"} {
			p.Add(g)
			pass(HoldDown)
		}
		p.Add("newest")
		pass(time.Second)
		p.Add("c")
		synctest.Wait()
		p.Add("d")
		synctest.Wait()
		equal(t, "at once", p.order(), []string{"old", "new", "newest", "c", "d"})
		p.Add("e")
		pass(HoldDown - time.Millisecond)
		equal(t, "in the hold-down", len(p.order()), 5)
		pass(time.Millisecond)
		equal(t, "after", p.order()[5:], []string{"e"})
		equal(t, "closed", p.closed(), []Reason{ReasonEvicted, ReasonEvicted, ReasonEvicted})
		p.Shutdown(t.Context())
	})
}

// A group whose messages always meet the hold-down starves nobody either.
func TestHoldDownStarvesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, chat(time.Second))
		p.Add("loud")
		pass(1500 * time.Millisecond)
		p.Add("quiet")
		for range 3 {
			p.Add("loud")
			pass(1500 * time.Millisecond)
		}
		if !slices.Contains(p.order(), "quiet") {
			t.Error("quiet never ran")
		}
		p.Shutdown(t.Context())
	})
}

// A run that has more to do at the end of its turn makes room at once.
func TestNoHoldDownWithMoreToDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, chat(2*time.Second))
		p.Add("a")
		pass(time.Second)
		p.Add("b")
		p.Add("a")
		pass(time.Second)
		equal(t, "runs", p.order(), []string{"a", "b"})
		pass(2*time.Second + HoldDown) // b has nothing more
		equal(t, "runs", p.order(), []string{"a", "b", "a"})
		p.Shutdown(t.Context())
	})
}

// Having gone on while others waited costs the hold-down only while they do.
func TestHoldDownAgainWhenNobodyWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, chat(2*time.Second))
		p.Add("a")
		pass(2 * time.Second)
		p.Add("b")
		p.Add("a")
		pass(time.Second)
		p.Hold("b", time.Now().Add(time.Second+HoldDown/2)) // it leaves the line
		pass(time.Second + HoldDown/2)                      // and is back, in a's hold-down
		equal(t, "runs", p.order(), []string{"a"})
		pass(HoldDown / 2)
		equal(t, "runs", p.order(), []string{"a", "b"})
		p.Shutdown(t.Context())
	})
}

func TestPauseDuringAHoldDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, time.Hour, chat(time.Second))
		p.Add("a")
		pass(time.Second)
		p.Add("b")
		p.Pause()
		pass(time.Minute)
		equal(t, "closed", p.closed(), []Reason{})
		p.Resume()
		synctest.Wait()
		equal(t, "runs", p.order(), []string{"a", "b"})
		p.Shutdown(t.Context())
	})
}

// Saying that it is idle again does not start the clocks of an idle run anew.
func TestIdleTwice(t *testing.T) {
	for _, waiter := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			p := newPool(1, time.Minute, func(_ context.Context, s *Slot) Result {
				for {
					s.Idle()
					select {
					case <-s.Closing():
						return Result{}
					case <-time.After(HoldDown / 4):
					}
				}
			})
			p.Add("a")
			why, after := ReasonIdle, time.Minute
			if waiter {
				synctest.Wait()
				p.Add("b")
				why, after = ReasonEvicted, HoldDown
			}
			pass(after)
			equal(t, "closed", p.closed(), []Reason{why})
			p.Shutdown(t.Context())
		})
	}
}
