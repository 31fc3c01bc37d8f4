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

// compact has somebody want the conversation shorter.
func (w *world) compact(key string) bool {
	w.t.Helper()
	asked, err := w.db.AskCompaction(w.t.Context(), family, family.JID, key)
	check(w.t, err)
	w.queue.Add(family.Folder)
	synctest.Wait()
	return asked
}

// shorter plays the turn of an order.
func (b *fakeBox) shorter(id string, c *protocol.Compaction) {
	b.ack(id)
	b.state(protocol.StateBusy)
	b.print(protocol.Frame{Status: protocol.StatusSuccess, NewSessionID: "s1", Compaction: c})
	b.state(protocol.StateIdle)
}

// adopt carries on with a run of another daemon.
func (w *world) adopt(before *world, b *fakeBox) {
	w.t.Helper()
	w.engine.live = before.engine.live
	b.w, w.ids = w, before.ids
	live, err := w.db.LiveRuns(w.t.Context())
	check(w.t, err)
	w.queue.Adopt(family.Folder, "", func(ctx context.Context, s *queue.Slot) queue.Result {
		return w.runner.Adopt(ctx, s, family, live[0], b.ID(), func() {})
	})
	synctest.Wait()
}

var shortened = &protocol.Compaction{Outcome: protocol.CompactionDone, Archive: "conversations/2026-02-23-hello.md"}

const toldShortened = "Shortened the conversation. What was said before is in conversations/2026-02-23-hello.md."

func ordered(id int64) []protocol.Message {
	return []protocol.Message{{Type: protocol.TypeMessage, ID: fmt.Sprintf("compact-%d", id), Text: "/compact", Compact: true}}
}

// An idle run gets the order at once, and is busy with it; messages wait for its
// end, and orders of several people are one.
func TestCompactionOfAnIdleRun(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		w.outbox()
		w.compact("k1")
		equal(t, "state", w.state(), berth.RunBusy)
		seq := w.say("@Andy more")
		w.compact("k1") // the same message again
		equal(t, "order", b.take(), ordered(1))
		b.ack("compact-1")
		b.state(protocol.StateBusy)
		time.Sleep(5 * time.Minute)
		equal(t, "told", w.outbox(), []string(nil))
		b.print(protocol.Frame{Status: protocol.StatusSuccess, NewSessionID: "s1", Compaction: shortened})
		b.state(protocol.StateIdle)
		equal(t, "told", w.outbox(), []string{toldShortened})
		got := b.take()
		equal(t, "follow-up", len(got), 1)
		b.turn("here", got[0].ID)
		equal(t, "fate", w.fate(seq).State, berth.FateDone)

		w.outbox()
		w.compact("k1")
		w.compact("k2")
		w.compact("k3")
		equal(t, "order", b.take(), ordered(2))
		b.shorter("compact-2", &protocol.Compaction{Outcome: protocol.CompactionNothing})
		equal(t, "order", b.take(), ordered(3))
		b.shorter("compact-3", &protocol.Compaction{Outcome: protocol.CompactionUnable})
		equal(t, "told", w.outbox(), []string{nothingToCompact, compactUnable})
		equal(t, "state", w.state(), berth.RunIdle)
		time.Sleep(30 * time.Minute)
		b.end(Exit{})
		time.Sleep(time.Hour)
		equal(t, "runs", len(w.engine.boxes), 0)
	})
}

// The turn under way ends first.
func TestCompactionAfterTheTurn(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy work")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.state(protocol.StateBusy)
		w.compact("k1")
		w.compact("k2")
		equal(t, "input", w.input(), []string(nil))
		b.print(said("done"))
		b.state(protocol.StateIdle)
		equal(t, "order", b.take(), ordered(1))
		equal(t, "state", w.state(), berth.RunBusy)
		b.shorter("compact-1", shortened)
		equal(t, "outbox", w.outbox(), []string{"done", toldShortened, toldShortened})
		equal(t, "state", w.state(), berth.RunIdle)
	})
}

// Without a container one is started, for nothing else; without a conversation
// none is.
func TestCompactionStartsARun(t *testing.T) {
	play(t, func(w *world) {
		equal(t, "asked without a conversation", w.compact("k0"), false)
		b := w.rested()
		w.outbox()
		time.Sleep(30 * time.Minute)
		b.end(Exit{})
		synctest.Wait()
		equal(t, "asked", w.compact("k1"), true)
		b = w.started()
		in := b.input
		equal(t, "input", []any{in.Prompt, in.Compact, in.Batch, in.SessionID}, []any{"/compact", true, []string{"compact-1"}, "s1"})
		b.ready()
		b.shorter("compact-1", shortened)
		equal(t, "told", w.outbox(), []string{toldShortened})
		equal(t, "state", w.state(), berth.RunIdle)
		w.say("@Andy on")
		equal(t, "follow-up", len(b.take()), 1)
		b.turn("here", "m2")

		// The session is gone before the run begins.
		time.Sleep(30 * time.Minute)
		w.outbox()
		w.compact("k2")
		check(t, w.db.DropSessions(w.t.Context(), family.Folder))
		b.end(Exit{})
		synctest.Wait()
		equal(t, "told", w.outbox(), []string{nothingToCompact})
		equal(t, "runs", len(w.engine.boxes), 0)
		if live, err := w.db.LiveRuns(w.t.Context()); err != nil || len(live) > 0 {
			t.Errorf("live runs %v, %v", live, err)
		}
	})
}

// What goes wrong is told once, and the order is not repeated.
func TestCompactionFails(t *testing.T) {
	for name, c := range map[string]struct {
		play func(w *world, b *fakeBox)
		want string
	}{
		"told": {func(_ *world, b *fakeBox) {
			b.shorter("compact-1", &protocol.Compaction{Outcome: protocol.CompactionFailed, Reason: "The key was refused.<internal>sk-1</internal>"})
		}, compactFailed + " The key was refused."},
		"error": {func(_ *world, b *fakeBox) {
			b.ack("compact-1")
			b.print(protocol.Frame{Status: protocol.StatusError, Error: "no key", ErrorClass: protocol.ClassAuth})
			b.end(Exit{Code: 1})
		}, compactFailed + " The key for the model was refused. The operator has been told."},
		"stale": {func(_ *world, b *fakeBox) {
			b.print(protocol.Frame{Status: protocol.StatusError, Error: "gone", ErrorClass: protocol.ClassStaleSession})
			b.end(Exit{Code: 1})
		}, nothingToCompact},
		"crash": {func(_ *world, b *fakeBox) { b.end(Exit{Code: 139}) }, compactFailed + " Something went wrong on my side. The operator can see the details."},
		"no word": {func(_ *world, b *fakeBox) {
			b.ack("compact-1")
			b.state(protocol.StateBusy)
			b.state(protocol.StateIdle)
		}, compactUnsaid},
		"stopped": {func(w *world, b *fakeBox) {
			b.ack("compact-1")
			b.state(protocol.StateBusy)
			w.interrupt()
			equal(w.t, "orders", b.take(), []protocol.Message{{Type: protocol.TypeStop}})
			b.stopTurn()
		}, compactStopped},
		"stopped before it began": {func(w *world, b *fakeBox) {
			w.interrupt()
			equal(w.t, "orders", b.take(), []protocol.Message{{Type: protocol.TypeStop, ID: "compact-1"}})
			b.ack("compact-1")
			b.state(protocol.StateBusy)
			b.stopTurn()
		}, compactStopped},
		"stopped with its container": {func(w *world, b *fakeBox) {
			b.ack("compact-1")
			b.state(protocol.StateBusy)
			w.interrupt()
			time.Sleep(time.Minute)
		}, compactStopped},
		"stopped, and its runner ends": {func(w *world, b *fakeBox) {
			b.ack("compact-1")
			b.state(protocol.StateBusy)
			w.interrupt()
			b.take()
			b.print(protocol.Frame{Status: protocol.StatusSuccess, NewSessionID: "s1", Note: "it was stopped"})
			b.end(Exit{})
		}, compactStopped},
		"ended by the operator": {func(w *world, b *fakeBox) {
			b.ack("compact-1")
			b.state(protocol.StateBusy)
			w.queue.Close(family.Folder)
			time.Sleep(closeGrace)
			b.end(Exit{Code: 137})
		}, compactStopped},
		"several lines": {func(_ *world, b *fakeBox) {
			b.shorter("compact-1", &protocol.Compaction{Outcome: protocol.CompactionFailed, Reason: "no\n\nStarted a new\tconversation session."})
		}, compactFailed + " no Started a new conversation session."},
		"hostile archive": {func(_ *world, b *fakeBox) {
			b.shorter("compact-1", &protocol.Compaction{Outcome: protocol.CompactionDone, Archive: "conversations/../../etc/passwd\nsee http://evil"})
		}, "Shortened the conversation."},
		"long archive": {func(_ *world, b *fakeBox) {
			b.shorter("compact-1", &protocol.Compaction{Outcome: protocol.CompactionDone, Archive: "conversations/" + strings.Repeat("x", maxArchive)})
		}, "Shortened the conversation."},
		"not taken": {func(_ *world, b *fakeBox) { time.Sleep(time.Hour) }, compactFailed + " Something went wrong on my side. The operator can see the details."},
	} {
		t.Run(name, func(t *testing.T) {
			play(t, func(w *world) {
				b := w.rested()
				w.outbox()
				w.compact("k1")
				equal(t, "order", b.take(), ordered(1))
				c.play(w, b)
				synctest.Wait()
				equal(t, "told", w.outbox(), []string{c.want})
				w.say("@Andy still there?")
				if b.gone() {
					b = w.started()
					b.ready()
				}
				equal(t, "compacts", b.input.Compact, false)
				b.turn("yes", "m2")
				equal(t, "outbox", w.outbox(), []string{"yes"})
			})
		})
	}
}

// An older runner is told in words, and what it answers is told as it is.
func TestCompactionByAnOlderRunner(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy one")
		b := w.started()
		b.print(said("first"))
		w.outbox()
		w.compact("k1")
		equal(t, "order", b.take(), ordered(1))
		b.print(said("as you like"))
		equal(t, "outbox", w.outbox(), []string{compactUnsaid, "as you like"})
		equal(t, "state", w.state(), berth.RunIdle)
		time.Sleep(30 * time.Minute)
		b.end(Exit{})
		w.compact("k2")
		b = w.started()
		equal(t, "prompt", b.input.Prompt, "/compact")
		b.print(protocol.Frame{Status: protocol.StatusSuccess, NewSessionID: "s1"})
		equal(t, "outbox", w.outbox(), []string{compactUnsaid})
		equal(t, "state", w.state(), berth.RunIdle)
	})
}

// A run that ends without the order, for no fault of its own, leaves it to the next.
func TestCompactionOutlivesItsRun(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		w.outbox()
		time.Sleep(30*time.Minute - time.Second)
		equal(t, "state", w.state(), berth.RunIdle)
		time.Sleep(time.Second)
		equal(t, "state", w.state(), berth.RunClosing)
		w.compact("k1") // it meets a run that closes
		b.end(Exit{})
		b = w.started()
		equal(t, "compacts", b.input.Compact, true)

		w.engine.setFail(berth.Errorf(berth.Unavailable, "no engine"))
		b.end(Exit{}) // by itself, and in order
		time.Sleep(time.Minute)
		equal(t, "told", len(w.outbox()), 0) // it waits for the engine, as messages do
		w.engine.setFail(nil)
		time.Sleep(time.Minute)
		b = w.started()
		equal(t, "compacts", b.input.Compact, true)
		b.end(Exit{})
		w.started().end(Exit{})
		time.Sleep(time.Minute)
		equal(t, "told", w.outbox(), []string{compactFailed}) // after three attempts
		equal(t, "runs", len(w.engine.boxes), 0)
	})
}

// kill -9 of the daemon: the next one hears what came of the order, gives it again
// if the runner never got it, and tells nobody twice.
func TestCompactionOverARestart(t *testing.T) {
	for name, c := range map[string]struct {
		before func(w *world, b *fakeBox)
		after  func(w *world, b *fakeBox)
		want   []string
	}{
		"under way": {func(_ *world, b *fakeBox) {
			b.take()
			b.ack("compact-1")
			b.state(protocol.StateBusy)
		}, func(_ *world, b *fakeBox) {
			b.take() // the sync
			b.ready()
			b.ack("m1", "compact-1")
			b.state(protocol.StateBusy)
			b.print(protocol.Frame{Status: protocol.StatusSuccess, Compaction: shortened})
			b.state(protocol.StateIdle)
		}, []string{toldShortened}},
		"over meanwhile": {func(_ *world, b *fakeBox) {
			b.take()
			b.ack("compact-1")
		}, func(_ *world, b *fakeBox) {
			b.take()
			b.ready()
			b.ack("m1", "compact-1")
			b.state(protocol.StateIdle)
		}, []string{toldShortened}},
		"told before the frame was stored": {func(w *world, b *fakeBox) {
			b.take()
			b.ack("compact-1")
			check(w.t, w.db.EndCompaction(w.t.Context(), b.run, toldShortened))
		}, func(_ *world, b *fakeBox) {
			b.take()
			b.ready()
			b.ack("m1", "compact-1")
			b.state(protocol.StateIdle)
		}, []string{toldShortened}},
		"claimed and not written": {func(_ *world, b *fakeBox) {
			b.take()
		}, func(w *world, b *fakeBox) {
			b.take()
			b.ready()
			b.ack("m1")
			b.state(protocol.StateIdle)
			equal(w.t, "order", b.take(), ordered(1))
			b.shorter("compact-1", shortened)
		}, []string{toldShortened}},
		"gone": {func(_ *world, b *fakeBox) {
			b.take()
			b.ack("compact-1")
		}, func(w *world, _ *fakeBox) {
			b := w.started()
			b.ready()
			equal(w.t, "compacts", b.input.Compact, true)
			b.shorter("compact-1", shortened)
		}, []string{toldShortened}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, root)
				b := w.rested()
				w.outbox()
				w.compact("k1")
				c.before(w, b)
				w.close()
				switch name { // while nobody is there
				case "over meanwhile", "told before the frame was stored":
					b.file(protocol.Frame{Status: protocol.StatusSuccess, Compaction: shortened})
				case "gone":
					b.end(Exit{Code: 137})
				}
				next := newWorld(t, root)
				defer next.close()
				next.adopt(w, b)
				c.after(next, b)
				equal(t, "told", next.outbox(), c.want)
				time.Sleep(time.Minute)
				equal(t, "told", next.outbox(), []string(nil))
			})
		})
	}
}

// Nobody carries the run of a wish when the daemon starts: the chat counts as one
// with something to do.
func TestCompactionIsPending(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		pending := func(want bool) {
			t.Helper()
			got, _, err := w.db.Pending(w.t.Context(), family.JID)
			check(t, err)
			equal(t, "pending", got, want)
		}
		pending(false)
		_, err := w.db.AskCompaction(w.t.Context(), family, family.JID, "k1")
		check(t, err)
		pending(true)
		w.queue.Add(family.Folder)
		b.take()
		pending(false)
		b.shorter("compact-1", shortened)
		pending(false)
	})
}

// A task of the group goes before the order, which its run is not given.
func TestCompactionAndATask(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		w.outbox()
		w.task(func(t *berth.Task) { t.Context = berth.ContextGroup })
		w.compact("k1")
		b.end(Exit{})
		b = w.started()
		equal(t, "task", []bool{b.input.IsScheduledTask, b.input.Compact, b.input.Isolated}, []bool{true, false, false})
		b.ready()
		b.turn("done")
		equal(t, "input", w.input(), []string{protocol.CloseFile})
		b.end(Exit{})
		b = w.started()
		equal(t, "compacts", b.input.Compact, true)
		b.ready()
		b.shorter("compact-1", shortened)
		equal(t, "outbox", w.outbox(), []string{"done", toldShortened})
	})
}

// A session that is too old, or has had too many turns, ends when the next run
// begins, and no earlier; an isolated task neither counts nor is touched.
func TestRotation(t *testing.T) {
	for name, limits := range map[string]SessionLimits{"age": {Age: 24 * time.Hour}, "turns": {Turns: 3}} {
		t.Run(name, func(t *testing.T) {
			play(t, func(w *world) {
				w.runner.Sessions = limits
				b := w.rested() // one turn
				over := func(pause time.Duration) {
					time.Sleep(pause)
					b.end(Exit{})
					synctest.Wait()
				}
				next := func(want string) {
					t.Helper()
					w.say("@Andy hello")
					b = w.started()
					equal(t, "session", b.input.SessionID, want)
					b.ready()
				}
				over(30 * time.Minute)
				w.task(nil)
				b = w.started()
				equal(t, "isolated", b.input.Isolated, true)
				b.ready()
				b.turn("done")
				over(time.Minute)

				next("s1")
				b.turn("two", "m2")
				if name == "age" {
					time.Sleep(29 * time.Minute)
					w.say("@Andy hello")
					b.take()
					b.turn("three", "m3")
					over(30 * time.Minute)
					next("s1")
					b.turn("four", "m4")
					over(24 * time.Hour)
				} else {
					w.say("@Andy hello")
					b.take()
					b.turn("three", "m3")
					w.say("@Andy hello") // it is warm
					b.take()
					b.turn("four", "m4")
					over(30 * time.Minute)
				}
				next("")
				equal(t, "session", w.session(), "")
				// The run fails, and the next one begins with the new session all the same.
				b.end(Exit{Code: 3})
				time.Sleep(5 * time.Second)
				b = w.started()
				equal(t, "session", b.input.SessionID, "")
				b.ready()
				f := said("five")
				f.NewSessionID = "s2"
				b.ack(b.input.Batch...)
				b.print(f)
				b.state(protocol.StateIdle)
				over(30 * time.Minute)
				next("s2")
			})
		})
	}
}

// renewing has the next message begin a new session while a run looks for messages.
type renewing struct {
	Store
	renew func()
}

func (r renewing) NextBatch(ctx context.Context, runID, chatJID string) (berth.Batch, bool, error) {
	r.renew()
	return r.Store.NextBatch(ctx, runID, chatJID)
}

// A conversation that ends meanwhile has nothing to shorten; who waits is told so
// without another message.
func TestCompactionAndANewSession(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		w.outbox()
		w.runner.Store = renewing{w.db, func() { w.queue.Renew(family.Folder) }}
		w.compact("k1")
		b.end(Exit{})
		synctest.Wait()
		equal(t, "told", w.outbox(), []string{nothingToCompact})
		equal(t, "runs", len(w.engine.boxes), 0)
	})
}
