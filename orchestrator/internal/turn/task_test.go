package turn

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/queue"
)

// task makes a task of family that is due now, and hands it to the queue.
func (w *world) task(change func(*berth.Task)) {
	w.t.Helper()
	t := berth.Task{
		ID: "t1", Folder: family.Folder, ChatJID: family.JID, Prompt: "water <the> plants", Kind: berth.ScheduleInterval, Value: "3600000", Zone: "UTC",
		Context: berth.ContextIsolated, CatchUp: berth.CatchUpOnce, CreatedAt: time.Now(),
	}
	if change != nil {
		change(&t)
	}
	_, err := w.db.AddTask(w.t.Context(), t)
	check(w.t, err)
	if t.Kind == berth.ScheduleOnce {
		time.Sleep(time.Second)
	}
	_, err = w.db.RunTask(w.t.Context(), family.Folder, "t1", time.Now())
	check(w.t, err)
	w.queue.AddTask(family.Folder, "t1")
	synctest.Wait()
}

func (w *world) history() (out []string) {
	w.t.Helper()
	synctest.Wait()
	runs, err := w.db.TaskRuns(w.t.Context(), family.Folder, "t1", 10)
	check(w.t, err)
	for _, r := range runs {
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %v %s%s", r.Outcome, r.Duration, r.Result, r.Error)))
	}
	return out
}

func (w *world) due() bool {
	w.t.Helper()
	due, _, err := w.db.DueTasks(w.t.Context(), time.Now())
	check(w.t, err)
	return len(due) > 0
}

func (w *world) session() string {
	w.t.Helper()
	id, err := w.db.Session(w.t.Context(), family.Folder, "builtin")
	check(w.t, err)
	return id
}

// A whole task: its words, its result in the chat without what is internal, its
// log, and no sign of typing that nobody waits for.
func TestTask(t *testing.T) {
	play(t, func(w *world) {
		w.runner.Typing = func(string, bool) { t.Error("somebody types") }
		w.task(func(t *berth.Task) { t.Script = "check" })
		b := w.started()
		in := b.input
		if !in.IsScheduledTask || in.Script != "check" || in.SessionID != "" || len(in.Batch) != 0 ||
			!strings.HasPrefix(in.Prompt, `<context timezone="UTC" `) || !strings.HasSuffix(in.Prompt, ` task="t1" />`+"\nwater <the> plants") {
			t.Errorf("input: %+v", in)
		}
		equal(t, "log", w.history(), []string{"running 0s"})
		live := w.runner.Live()[family.Folder].Run
		equal(t, "run", []string{live.Kind, live.Task}, []string{berth.KindTask, "t1"})
		b.ready()
		b.ack()
		b.state(protocol.StateBusy)
		time.Sleep(3 * time.Second)
		f := said("done <internal>psst</internal>")
		f.Usage = &protocol.Usage{InputTokens: 7, OutputTokens: 2}
		b.print(f)
		equal(t, "not yet closed", w.input(), []string(nil))
		b.state(protocol.StateIdle)
		equal(t, "closed at once", w.input(), []string{protocol.CloseFile})
		b.end(Exit{})
		equal(t, "outbox", w.outbox(), []string{"done"})
		equal(t, "log", w.history(), []string{"success 3s done"})
		runs, err := w.db.TaskRuns(w.t.Context(), family.Folder, "t1", 1)
		check(t, err)
		equal(t, "tokens", []int64{runs[0].InputTokens, runs[0].OutputTokens}, []int64{7, 2})
		equal(t, "kept session", w.session(), "")
		equal(t, "due", w.due(), false)
		equal(t, "slots", w.queue.State().Used, 0)
	})
}

// TS-08: a task of the group's context goes on with the chat's session, and the
// chat with what became of it.
func TestTS08GroupContext(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested() // a conversation, in session s1
		w.task(func(t *berth.Task) { t.Context = berth.ContextGroup })
		b.end(Exit{})
		b = w.started()
		equal(t, "session", b.input.SessionID, "s1")
		b.ready()
		f := said("done")
		f.NewSessionID = "s2"
		b.print(f)
		b.state(protocol.StateIdle)
		b.end(Exit{})
		synctest.Wait()
		equal(t, "session", w.session(), "s2")
	})
}

// TS-09: the run of a task is closed 10 s after its first result, once, be it
// without words, when it is still at work then.
func TestTS09CloseAfterTheFirstResult(t *testing.T) {
	silent := protocol.Frame{Status: protocol.StatusSuccess}
	for _, c := range []struct {
		what  string
		ready bool
		first protocol.Frame
	}{{"our runner", true, said("one")}, {"an older runner", false, said("one")}, {"an older runner, without words", false, silent}} {
		play(t, func(w *world) {
			w.task(nil)
			b := w.started()
			if c.ready {
				b.ready()
				b.state(protocol.StateBusy)
			}
			b.print(c.first)
			time.Sleep(9 * time.Second)
			b.print(said("two"))
			equal(t, c.what+": at 9 s", w.input(), []string(nil))
			time.Sleep(time.Second)
			equal(t, c.what+": at 10 s", w.input(), []string{protocol.CloseFile})
			b.end(Exit{})
			equal(t, c.what, w.history(), []string{"success 10s two"})
		})
	}
}

// A result without words sends nothing; the log has what the runner says of it.
func TestTS13TaskWithoutWords(t *testing.T) {
	play(t, func(w *world) {
		w.task(nil)
		b := w.started()
		b.ready()
		b.print(protocol.Frame{Status: protocol.StatusSuccess, Note: "the script did not wake the agent: it said so"})
		b.state(protocol.StateIdle)
		b.end(Exit{})
		equal(t, "log", w.history(), []string{"success 0s the script did not wake the agent: it said so"})
		equal(t, "outbox", w.outbox(), []string(nil))
	})
}

// No task takes longer than it may, whatever signs of life it gives.
func TestTaskTimeout(t *testing.T) {
	play(t, func(w *world) {
		w.runner.TaskTimeout = 5 * time.Minute
		w.task(nil)
		b := w.started()
		b.ready()
		for range 10 {
			time.Sleep(29 * time.Second)
			b.print(protocol.Frame{Type: protocol.TypeHeartbeat})
		}
		equal(t, "stopped", b.stopped(), 0)
		time.Sleep(10 * time.Second)
		equal(t, "stopped", b.stopped(), 1)
		equal(t, "log", w.history(), []string{"error 5m0s the task took longer than 5m0s: timed out"})
		equal(t, "due", w.due(), false)
	})
}

// What failed by itself is logged and not repeated; what came to nothing through no
// fault of the task is, after a while.
func TestFailedTasks(t *testing.T) {
	fails := func(class string, after int64) func(*world, *fakeBox) {
		return func(_ *world, b *fakeBox) {
			b.ready()
			b.print(protocol.Frame{Status: protocol.StatusError, Error: "no", ErrorClass: class, RetryAfterMS: after})
			b.end(Exit{Code: 1})
		}
	}
	for _, c := range []struct {
		what  string
		play  func(*world, *fakeBox)
		again time.Duration // negative: never
		log   string
	}{
		{"exit", func(_ *world, b *fakeBox) { b.ready(); b.end(Exit{Code: 3}) }, -1, "Container exited with code 3: some words"},
		{"memory", func(_ *world, b *fakeBox) { b.ready(); b.end(Exit{Code: 137, OutOfMemory: true}) }, -1, "the agent ran out of memory"},
		{"error", fails("", 0), -1, "no"},
		{"key", fails(protocol.ClassAuth, 0), -1, "no"},
		{"rate limit", fails(protocol.ClassRateLimit, 60_000), time.Minute, "no"},
		{"stale session of its own", fails(protocol.ClassStaleSession, 0), -1, "no"},
		{"stopped", func(w *world, b *fakeBox) { b.ready(); w.queue.Close("family"); synctest.Wait(); b.end(Exit{}) }, -1, "stopped by the operator"},
		{"answered before", func(_ *world, b *fakeBox) {
			b.ready()
			b.print(said("half"))
			fails(protocol.ClassRateLimit, 60_000)(nil, b)
		}, -1, "halfno"},
	} {
		play(t, func(w *world) {
			w.task(nil)
			b := w.started()
			c.play(w, b)
			equal(t, c.what, w.history(), []string{"error 0s " + c.log})
			if c.again > 0 {
				time.Sleep(c.again - time.Millisecond)
				equal(t, c.what+": due before", w.due(), false)
				time.Sleep(time.Millisecond)
			} else {
				time.Sleep(50 * time.Minute)
			}
			equal(t, c.what+": due", w.due(), c.again > 0)
		})
	}
	// A stale session of the chat is dropped, and the task runs again at once.
	play(t, func(w *world) {
		b := w.rested()
		w.task(func(t *berth.Task) { t.Context = berth.ContextGroup })
		b.end(Exit{})
		fails(protocol.ClassStaleSession, 0)(w, w.started())
		time.Sleep(time.Millisecond)
		equal(t, "session", w.session(), "")
		equal(t, "due", w.due(), true)
	})
	// A single time that fails is told to the chat.
	play(t, func(w *world) {
		w.task(func(t *berth.Task) { t.Kind, t.Value = berth.ScheduleOnce, "2000-01-01T00:00:01" })
		fails("", 0)(w, w.started())
		synctest.Wait()
		equal(t, "outbox", w.outbox(), []string{"A scheduled task failed: water <the> plants\nSomething went wrong on my side. The operator can see the details."})
	})
}

// Without an engine or an image a task stays due, and is tried again soon.
func TestTaskThatCannotStart(t *testing.T) {
	for what, spoil := range map[string]func(*world){
		"engine": func(w *world) { w.engine.setFail(berth.Errorf(berth.Unavailable, "no engine")) },
		"image":  func(w *world) { w.runner.Image = func() (string, bool) { return "", false } },
	} {
		play(t, func(w *world) {
			var results []queue.Result
			w.queue = queue.New(1, time.Hour, func(ctx context.Context, s *queue.Slot) queue.Result {
				r := w.runner.Run(ctx, s, family)
				results = append(results, r)
				return r
			})
			spoil(w)
			w.task(nil)
			time.Sleep(engineRetry)
			synctest.Wait()
			equal(t, what+": due", w.due(), true)
			if len(results) != 1 || results[0].Again || !results[0].RetryAt.Equal(time.Now()) {
				t.Errorf("%s: %+v", what, results)
			}
		})
	}
}

// handOver ends the daemon and lets the next one find what it left.
func (w *world) handOver(container string) *world {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	w.queue.Shutdown(ctx)
	live, err := w.db.LiveRuns(w.t.Context())
	check(w.t, err)
	if len(live) != 1 || live[0].Task != "t1" {
		w.t.Fatalf("live: %+v", live)
	}
	w.queue = queue.New(5, 30*time.Minute, func(ctx context.Context, s *queue.Slot) queue.Result { return w.runner.Run(ctx, s, family) })
	w.queue.Adopt("family", "t1", func(ctx context.Context, s *queue.Slot) queue.Result {
		return w.runner.Adopt(ctx, s, family, live[0], container, func() {})
	})
	synctest.Wait()
	return w
}

// A task's run is adopted after a restart: its result goes to the chat, and its
// time goes on where it was.
func TestAdoptedTask(t *testing.T) {
	play(t, func(w *world) {
		w.runner.TaskTimeout = 5 * time.Minute
		w.task(nil)
		b := w.started()
		b.ready()
		b.state(protocol.StateBusy)
		time.Sleep(2 * time.Minute)
		w.handOver(b.ID())
		b.ready()
		b.state(protocol.StateBusy)
		equal(t, "log", w.history(), []string{"running 0s"})
		b.print(said("done"))
		b.state(protocol.StateIdle)
		equal(t, "closed", w.input()[len(w.input())-1], protocol.CloseFile)
		b.end(Exit{})
		equal(t, "outbox", w.outbox(), []string{"done"})
		equal(t, "log", w.history(), []string{"success 2m0s done"})
		equal(t, "due", w.due(), false)
	})
	play(t, func(w *world) {
		w.runner.TaskTimeout = 5 * time.Minute
		w.task(nil)
		b := w.started()
		b.ready()
		time.Sleep(2 * time.Minute)
		w.handOver(b.ID())
		time.Sleep(3 * time.Minute)
		equal(t, "stopped", b.stopped(), 1)
	})
	// It had its result: nothing more comes of an older runner.
	play(t, func(w *world) {
		w.task(nil)
		b := w.started()
		b.print(said("done"))
		w.handOver(b.ID())
		time.Sleep(10 * time.Second)
		equal(t, "closed", w.input()[len(w.input())-1], protocol.CloseFile)
	})
}

// A run that lost its host settles right: what it said is delivered once and it is
// done; if it said nothing the task is due again.
func TestTaskThatLostItsHost(t *testing.T) {
	for _, c := range []struct {
		what string
		play func(*fakeBox)
		log  string
		due  bool
		out  []string
	}{
		{"it was never prompted", func(b *fakeBox) { b.end(Exit{Code: -1}) }, "error 0s the container ended while no daemon was there", true, nil},
		{"it was at work", func(b *fakeBox) { b.ready(); b.state(protocol.StateBusy); b.end(Exit{Code: -1}) }, "error 0s the container ended while no daemon was there", true, nil},
		{"it had said something", func(b *fakeBox) { b.ready(); b.print(said("done")); b.end(Exit{}) }, "success 0s done", false, []string{"done"}},
		{"it said it alone", func(b *fakeBox) { b.ready(); b.file(said("done")); b.end(Exit{}) }, "success 0s done", false, []string{"done"}},
	} {
		play(t, func(w *world) {
			w.task(nil)
			b := w.started()
			w.queue.Pause()
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			w.queue.Shutdown(ctx) // before it ends
			b.open()
			if c.what == "it had said something" {
				// It was heard, and settled by nobody.
				w.handOver(b.ID())
				b.ready()
				b.print(said("done"))
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				w.queue.Shutdown(ctx)
				b.end(Exit{})
			} else if c.what == "it said it alone" {
				b.file(said("done"))
				b.end(Exit{})
			} else {
				b.end(Exit{Code: -1})
			}
			w.handOver("")
			time.Sleep(time.Millisecond)
			equal(t, c.what+": log", w.history(), []string{c.log})
			equal(t, c.what+": due", w.due(), c.due)
			equal(t, c.what+": outbox", w.outbox(), c.out)
		})
	}
	// Attached to, but it ended without a word: it may not have read its prompt.
	play(t, func(w *world) {
		w.task(nil)
		b := w.started()
		w.handOver(b.ID())
		b.end(Exit{Code: 1})
		synctest.Wait()
		time.Sleep(time.Millisecond)
		equal(t, "due", w.due(), true)
	})
}

// A heartbeat that fails is tried twice more, after a minute and after two; a key
// that is wrong does not get better. Its third failure in a row is told.
func TestHeartbeatIsTriedAgain(t *testing.T) {
	fail := func(w *world, class string) {
		w.t.Helper()
		b := w.started()
		b.ready()
		b.print(protocol.Frame{Status: protocol.StatusError, Error: "no", ErrorClass: class})
		b.end(Exit{Code: 1})
		synctest.Wait()
	}
	due := func(w *world, what string, want time.Duration) {
		w.t.Helper()
		time.Sleep(want - time.Millisecond)
		equal(w.t, what+": due before", w.due(), false)
		time.Sleep(time.Millisecond)
		equal(w.t, what+": due", w.due(), true)
		w.queue.AddTask(family.Folder, "t1")
		synctest.Wait()
	}
	heartbeat := func(t *berth.Task) { t.CreatedBy = berth.HeartbeatOwner }
	play(t, func(w *world) {
		w.task(heartbeat)
		for i := range 3 {
			fail(w, "")
			due(w, "second try", time.Minute)
			fail(w, "")
			due(w, "third try", 2*time.Minute)
			equal(t, "told before", w.outbox(), []string(nil))
			fail(w, "")
			if i < 2 {
				due(w, "the next time", 57*time.Minute)
			}
		}
		equal(t, "told", w.outbox(), []string{"A scheduled task failed: water <the> plants\nSomething went wrong on my side. The operator can see the details."})
	})
	play(t, func(w *world) {
		w.task(heartbeat)
		fail(w, protocol.ClassAuth)
		time.Sleep(50 * time.Minute)
		equal(t, "due", w.due(), false)
	})
}
