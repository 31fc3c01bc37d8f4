package dispatch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/queue"
)

// carried lets runs do what the test says.
type carried struct {
	*world
	run func(context.Context, *queue.Slot, berth.Group) queue.Result
}

func (c carried) Run(ctx context.Context, s *queue.Slot, g berth.Group) queue.Result {
	c.note("run %s", g.Folder)
	return c.run(ctx, s, g)
}

func (w *world) carry(run func(context.Context, *queue.Slot, berth.Group) queue.Result) {
	w.runs = carried{w, run}
}

// rest is a run that is idle until it is closed.
func rest(ctx context.Context, s *queue.Slot, _ berth.Group) queue.Result {
	s.Idle()
	select {
	case <-s.Closing():
	case <-ctx.Done():
	}
	return queue.Result{}
}

// WR-01: messages that arrive at once wake one run.
func TestWR01ConcurrentMessagesWakeOneRun(t *testing.T) {
	play(t, func(w *world) {
		w.carry(func(context.Context, *queue.Slot, berth.Group) queue.Result {
			time.Sleep(time.Minute)
			return queue.Result{}
		})
		w.add("a", false)
		check(w.t, w.Start(w.t.Context()))
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				_, err := w.Receive(w.t.Context(), berth.Message{ID: fmt.Sprint(i), ChatJID: "console:a", Text: "hello", Time: time.Now()})
				if err != nil {
					w.t.Error(err)
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		if got := w.State().Used; got != 1 {
			w.t.Errorf("%d runs", got)
		}
		w.want("run a")
		time.Sleep(time.Minute)
		w.want("run a") // for those that came while it ran
		time.Sleep(time.Hour)
		w.want()
	})
}

// WR-02: who brings a message does not hear of a container that cannot start.
// The message stays pending and is tried again.
func TestWR02FailedStartIsNotTheSendersError(t *testing.T) {
	play(t, func(w *world) {
		var broken atomic.Bool
		broken.Store(true)
		w.carry(func(context.Context, *queue.Slot, berth.Group) queue.Result {
			if broken.Load() {
				return queue.Result{Again: true, RetryAt: time.Now().Add(5 * time.Second)}
			}
			return queue.Result{}
		})
		w.add("a", false)
		check(w.t, w.Start(w.t.Context()))
		for i := range 3 {
			w.say("a", fmt.Sprint(i), "hello") // fails the test on an error
		}
		w.want("run a")
		pending, _, err := w.db.Pending(w.t.Context(), "console:a")
		check(w.t, err)
		if !pending {
			w.t.Error("it is not pending any more")
		}
		broken.Store(false)
		time.Sleep(5 * time.Second)
		w.want("run a")
		time.Sleep(time.Hour)
		w.want()
	})
}

// WR-03, WR-04: Close stops the run of one group, and says whether there was one.
func TestWR03AndWR04StopAGroup(t *testing.T) {
	play(t, func(w *world) {
		w.carry(rest)
		w.add("a", false)
		w.add("b", false)
		w.add("quiet", false)
		check(w.t, w.Start(w.t.Context()))
		w.say("a", "1", "hello")
		w.say("b", "1", "hello")
		w.want("run a", "run b")
		stop := func(folder string, want bool, left int) {
			w.t.Helper()
			if got := w.Close(folder); got != want {
				w.t.Errorf("%s: got %t", folder, got)
			}
			synctest.Wait()
			if got := w.State().Used; got != left {
				w.t.Errorf("%s: %d runs are left, want %d", folder, got, left)
			}
		}
		stop("quiet", false, 2)
		stop("nobody", false, 2)
		stop("a", true, 1)
		stop("a", false, 1)
		w.want()
	})
}

// W38: also long after the start an orphan is removed, once, and a container
// whose run lives is not.
func TestW38OrphansAreRemovedLaterToo(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", false)
		w.say("a", "1", "hello")
		w.live("a", "r")
		w.fleet = []Container{{ID: "c1", Run: "r"}}
		check(w.t, w.Start(w.t.Context()))
		check(w.t, w.Reconcile(w.t.Context()))
		if len(w.removed) != 0 {
			w.t.Errorf("removed %q", w.removed)
		}
		w.fleet = append(w.fleet, Container{ID: "c2", Run: "r2"}, Container{ID: "berth-r", Run: ""})
		check(w.t, w.Reconcile(w.t.Context()))
		if want := []string{"c2", "berth-r"}; !slices.Equal(w.removed, want) {
			w.t.Errorf("removed %q, want %q", w.removed, want)
		}
	})
}

// W42: a group that is gone starts no run, for a task or for messages. It is not
// tried for ever, and nobody's idle run is closed for it later.
func TestW42MissingGroupStartsNothing(t *testing.T) {
	play(t, func(w *world) {
		w.carry(func(ctx context.Context, s *queue.Slot, g berth.Group) queue.Result {
			defer w.note("end %s", g.Folder)
			return rest(ctx, s, g)
		})
		check(w.t, w.Start(w.t.Context()))
		w.queue.AddTask("ghost", "t1")
		w.queue.Add("ghost")
		synctest.Wait()
		if s := w.State(); s.Used != 0 || len(s.Waiting) != 0 {
			w.t.Errorf("state: %+v", s)
		}
		for _, folder := range []string{"a", "b", "c", "d", "e"} { // all slots
			w.add(folder, false)
			w.say(folder, "1", "hello")
			w.want("run " + folder)
		}
		time.Sleep(50 * time.Minute)
		w.want()
	})
}

// W43: without a container engine, at the start or later, messages are received
// and kept; they wake their groups when it is there.
func TestW43MessagesAreKeptWithoutAnEngine(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", false)
		w.add("b", false)
		w.down = errors.New("no engine")
		for i := range 3 {
			w.say("a", fmt.Sprint(i), "hello")
			if err := w.Start(w.t.Context()); !errors.Is(err, w.down) {
				w.t.Errorf("got %v", err)
			}
			time.Sleep(time.Minute)
		}
		w.want()
		w.down = nil
		check(w.t, w.Start(w.t.Context()))
		w.want("run a")

		w.Pause() // it went away
		w.say("b", "1", "hello")
		time.Sleep(time.Hour)
		w.want()
		w.live("a", "r") // a is at work
		check(w.t, w.Start(w.t.Context()))
		synctest.Wait()
		slices.Sort(w.notes)
		w.want("adopt a r ", "run b")
	})
}
