package turn

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

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/outbox"
)

// stored returns all messages of the chat, those of Berth included.
func (w *world) stored() int {
	w.t.Helper()
	got, err := w.db.MessagesAfter(w.t.Context(), family.JID, 0, 1000)
	check(w.t, err)
	return len(got)
}

// rested starts a run that has answered m1 and is idle.
func (w *world) rested() *fakeBox {
	w.t.Helper()
	w.say("@Andy one")
	b := w.started()
	b.ready()
	b.turn("first", "m1")
	equal(w.t, "state", w.state(), berth.RunIdle)
	return b
}

// taken returns the one input file that waits, as the runner that takes it.
func (b *fakeBox) taken() protocol.Message {
	b.t.Helper()
	got := b.take()
	if len(got) != 1 {
		b.t.Fatalf("%d input files: %+v", len(got), got)
	}
	return got[0]
}

// GQ-09, GQ-10, GQ-13: a task has _close written to an idle run at once, and to
// a busy one when its turn is over.
func TestGQ10TaskClosesAnIdleRun(t *testing.T) {
	play(t, func(w *world) {
		w.rested()
		w.queue.AddTask(family.Folder, "t1")
		equal(t, "idle", w.input(), []string{protocol.CloseFile})
	})
	play(t, func(w *world) {
		w.say("@Andy one")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.queue.AddTask(family.Folder, "t1")
		time.Sleep(time.Minute)
		equal(t, "busy", w.input(), []string(nil))
		b.print(said("hi"))
		equal(t, "not idle yet", w.input(), []string(nil))
		b.state(protocol.StateIdle)
		equal(t, "idle", w.input(), []string{protocol.CloseFile})
	})
}

// GQ-11, GQ-16: a follow-up goes into the live container and makes it busy, so
// that no task closes it; without one it goes nowhere but into the store.
func TestGQ11FollowUpKeepsTheRun(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		w.say("@Andy two")
		w.queue.AddTask(family.Folder, "t1")
		time.Sleep(time.Minute / 2)
		equal(t, "follow-up", b.taken().ID, "m2")
		b.turn("second", "m2")
		equal(t, "then", w.input(), []string{protocol.CloseFile})
		b.end(Exit{})
		synctest.Wait()
		w.queue.Pause()
		w.say("@Andy three")
		equal(t, "without a run", w.input(), []string{protocol.CloseFile})
	})
}

// WR-01: many messages that arrive at once start one container, also while it is
// at work, and all of them are answered.
func TestWR01ConcurrentWakesStartOneContainer(t *testing.T) {
	play(t, func(w *world) {
		const n = 20
		var mu sync.Mutex
		var seqs []int64
		crowd := func(name string) {
			var wg sync.WaitGroup
			for i := range n {
				wg.Go(func() {
					seq, _, err := w.db.AddMessage(w.t.Context(), berth.Message{ID: fmt.Sprint(name, i), ChatJID: family.JID, Text: "@Andy hi", Time: time.Now(), Wakes: true})
					if err != nil {
						t.Error(err)
					}
					w.queue.Add(family.Folder)
					mu.Lock()
					defer mu.Unlock()
					seqs = append(seqs, seq)
				})
			}
			wg.Wait()
		}
		crowd("a")
		b := w.started()
		b.ready()
		crowd("b")
		b.turn("hi", b.input.Batch...)
		b.turn("hi again", b.taken().ID)
		equal(t, "messages", len(seqs), 2*n)
		for _, seq := range seqs {
			equal(t, "fate", w.fate(seq).State, berth.FateDone)
		}
		equal(t, "more containers", len(w.engine.boxes), 0)
		equal(t, "used", w.queue.State().Used, 1)
	})
}

// WR-02: a container that cannot be started leaves the messages pending; they are
// tried again, and those that came meanwhile with them.
func TestWR02StartFails(t *testing.T) {
	play(t, func(w *world) {
		w.engine.setFail(errors.New("no space left on device"))
		seq := w.say("@Andy hello")
		f := w.fate(seq)
		equal(t, "fate", []string{f.State, f.Error}, []string{berth.FatePending, "no space left on device"})
		equal(t, "used", w.queue.State().Used, 0)
		second := w.say("@Andy are you there?")
		w.engine.setFail(nil)
		equal(t, "before its time", len(w.engine.boxes), 0)
		time.Sleep(5 * time.Second)
		b := w.started()
		equal(t, "batch", b.input.Batch, []string{"m1", "m2"})
		b.ready()
		b.turn("hi", "m2", "m1")
		equal(t, "fates", []string{w.fate(seq).State, w.fate(second).State}, []string{berth.FateDone, berth.FateDone})
		equal(t, "outbox", w.outbox(), []string{"hi"})
	})
}

// WR-03, WR-05: to stop a group starts nothing and says nothing to it.
func TestWR05StopWakesNobody(t *testing.T) {
	play(t, func(w *world) {
		equal(t, "none running", w.queue.Close(family.Folder), false)
		b := w.rested()
		before := w.stored()
		equal(t, "stopped", w.queue.Close(family.Folder), true)
		b.take()
		b.end(Exit{})
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		equal(t, "containers", len(w.engine.boxes), 0)
		equal(t, "stored", w.stored(), before)
		equal(t, "outbox", w.outbox(), []string{"first"})
		equal(t, "a second time", w.queue.Close(family.Folder), false)
	})
}

// WR-06: what is said while a run is stopped wakes a new one, after the old
// container is gone, with the session that it left.
func TestWR06WakeAfterTheExit(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		w.queue.Close(family.Folder)
		w.say("@Andy two")
		time.Sleep(5 * time.Second)
		equal(t, "before the exit", len(w.engine.boxes), 0)
		b.print(protocol.Frame{Status: protocol.StatusSuccess, NewSessionID: "s2"}) // its last words
		b.end(Exit{})
		next := w.started()
		equal(t, "batch, session", []any{next.input.Batch, next.input.SessionID}, []any{[]string{"m2"}, "s2"})
		if next.run == b.run {
			t.Error("the run is the same")
		}
	})
}

// mute is a channel that fails in one of the ways in which channels do.
type mute func(context.Context) error

func (m mute) Send(ctx context.Context, _ berth.Outgoing) error { return m(ctx) }

// W04: a run's slot does not wait for what it said to be delivered, nor does its
// next turn.
func TestW04SlotDoesNotWaitForTheChannel(t *testing.T) {
	for name, send := range map[string]mute{
		"hangs":   func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"fails":   func(context.Context) error { return errors.New("no") },
		"refuses": func(context.Context) error { return berth.Errorf(berth.Denied, "not to this chat") },
		"offline": func(context.Context) error { return berth.Errorf(berth.Unavailable, "offline") },
	} {
		t.Run(name, func(t *testing.T) {
			play(t, func(w *world) {
				sender := outbox.New(w.db, send, zaptest.NewLogger(t))
				defer func() {
					ended, cancel := context.WithCancel(context.Background())
					cancel()
					sender.Shutdown(ended)
				}()
				b := w.rested()
				sender.Wake(family.JID)
				seq := w.say("@Andy two")
				b.take()
				b.turn("second", "m2")
				sender.Wake(family.JID)
				equal(t, "fate", w.fate(seq).State, berth.FateDone)
				w.queue.Close(family.Folder)
				b.end(Exit{})
				synctest.Wait()
				equal(t, "used", w.queue.State().Used, 0)
				w.say("@Andy three")
				equal(t, "batch", w.started().input.Batch, []string{"m3"})
			})
		})
	}
}

// W05: a frame that never ends is a breach as soon as it is over its cap, not
// only at its end.
func TestW05EndlessFrameEndsTheRun(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.raw("---BERTH_OUTPUT_START---\n")
		for range 3 {
			b.raw(strings.Repeat("x", protocol.MaxLine/2))
		}
		equal(t, "stops", b.stopped(), 1)
	})
}

// W05: a frame beyond its cap ends the run; its message is not lost, and the chat
// is told if it never gets better.
func TestW05FrameOverItsCapEndsTheRun(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		for range 6 {
			for len(w.engine.boxes) == 0 {
				time.Sleep(time.Second)
				synctest.Wait()
			}
			b := w.started()
			b.ready()
			b.ack("m1")
			b.raw("---BERTH_OUTPUT_START---\n")
			for range 3 {
				b.raw(strings.Repeat("x", protocol.MaxLine/2))
			}
			b.raw("\n---BERTH_OUTPUT_END---\n")
			equal(t, "stops", b.stopped(), 1)
			equal(t, "removed", b.isRemoved(), true)
			if f := w.fate(seq); !strings.Contains(f.Error, "over the cap of 1048576 bytes") {
				t.Errorf("fate: %+v", f)
			}
		}
		time.Sleep(time.Hour)
		equal(t, "fate", w.fate(seq).State, berth.FateFailed)
		equal(t, "told", len(w.outbox()), 1)
	})
}

// W05: of what a container says on stderr only the end is kept.
func TestW05StderrIsBounded(t *testing.T) {
	var kept tail
	for range 1000 {
		n, err := kept.Write([]byte(strings.Repeat("x", 32<<10)))
		equal(t, "written", []any{n, err}, []any{32 << 10, error(nil)})
	}
	_, _ = kept.Write([]byte("the end\n"))
	if len(kept.buf) > 1024 || cap(kept.buf) > 256<<10 {
		t.Errorf("%d bytes in %d", len(kept.buf), cap(kept.buf))
	}
	equal(t, "last", kept.last(9), "xxthe end"[:9])
}

// W07: what is not framed is log, also in the last line of a container that
// ended well.
func TestW07LastLineIsNoAnswer(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		b.raw("thinking\n" + `{"status":"success","result":"by the last line","newSessionId":"s9"}` + "\n")
		b.end(Exit{})
		f := w.fate(seq)
		equal(t, "fate", f.State, berth.FatePending)
		equal(t, "outbox", w.outbox(), []string(nil))
		time.Sleep(5 * time.Second)
		next := w.started()
		equal(t, "again", next.input.Batch, []string{"m1"})
		equal(t, "session", next.input.SessionID, "")
	})
}

// W08: what an agent sent by file before it answered comes before the answer,
// though nobody looked at the file until then.
func TestW08FilesComeBeforeTheFrameAfterThem(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.send("file 1")
		w.send("file 2")
		b.print(said("frame 1"))
		w.send("file 3")
		b.print(said("frame 2"))
		w.send("file 4")
		b.state(protocol.StateIdle)
		equal(t, "outbox", w.outbox(), []string{"file 1", "file 2", "frame 1", "file 3", "frame 2", "file 4"})
	})
}

// W09: frames far over 64 KiB pass, and those that are still in the pipe when
// the container has exited are read before it counts as gone.
func TestW09LastFramesAreStillInThePipe(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.mu.Lock()
		b.exit = Exit{Code: 0}
		close(b.exited)
		b.mu.Unlock()
		synctest.Wait()
		equal(t, "removed", b.isRemoved(), false)
		b.print(said("small"))
		b.print(said(strings.Repeat("large ", 30_000)))
		b.state(protocol.StateIdle)
		equal(t, "used", w.queue.State().Used, 1)
		check(t, b.out.Close())
		f := w.fate(seq)
		equal(t, "fate", f.State, berth.FateDone)
		if n := len(strings.Join(f.Texts, " ")); n < 180_000 || f.Texts[0] != "small" {
			t.Errorf("%d bytes in %d texts", n, len(f.Texts))
		}
		equal(t, "removed", b.isRemoved(), true)
		equal(t, "used", w.queue.State().Used, 0)
	})
}

// W10, W62: that its file is gone does not make a message answered, whoever took
// it: without an ack or an answer it comes again.
func TestW10UnlinkedIsNotAnswered(t *testing.T) {
	for _, acked := range []bool{false, true} {
		t.Run(fmt.Sprintf("acked=%t", acked), func(t *testing.T) {
			play(t, func(w *world) {
				b := w.rested()
				seq := w.say("@Andy two")
				b.taken()
				if acked {
					b.ack("m2")
				}
				b.end(Exit{Code: 137})
				equal(t, "fate", w.fate(seq).State, berth.FatePending)
				time.Sleep(5 * time.Second)
				next := w.started()
				equal(t, "again", next.input.Batch, []string{"m2"})
				next.ready()
				next.turn("second", "m2")
				equal(t, "outbox", w.outbox(), []string{"first", "second"})
			})
		})
	}
}

// W11: a follow-up that lies unread when the container ends goes to the next one
// at once: nobody failed.
func TestW11UnreadFollowUpComesAgain(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		seq := w.say("@Andy two")
		equal(t, "unread", len(w.input()), 1)
		b.end(Exit{})
		next := w.started()
		equal(t, "batch", next.input.Batch, []string{"m2"})
		equal(t, "left in the folder", w.input(), []string(nil))
		next.ready()
		next.turn("second", "m2")
		equal(t, "fate", w.fate(seq).Texts, []string{"second"})
	})
}

// W13: a request to close that meets a starting container, whose runner removes
// what was there before it, is made again.
func TestW13CloseDuringTheStart(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		b := w.started()
		w.queue.Close(family.Folder)
		equal(t, "at once", w.input(), []string{protocol.CloseFile})
		b.take()
		b.ready()
		equal(t, "eaten", w.input(), []string(nil))
		time.Sleep(protocol.CloseReassert)
		equal(t, "again", w.input(), []string{protocol.CloseFile})
		b.end(Exit{})
		w.say("@Andy two")
		w.started()
		equal(t, "not for the next run", w.input(), []string(nil))
	})
}

// W14: a run that is stopped in its turn has 10 s to end, then the engine ends
// it. The next message goes on with the session.
func TestW14StoppedRunKeepsTheSession(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		seq := w.say("@Andy something long")
		b.take()
		b.ack("m2")
		w.queue.Close(family.Folder)
		time.Sleep(closeGrace - time.Millisecond)
		equal(t, "stops", b.stopped(), 0)
		time.Sleep(time.Millisecond)
		equal(t, "stops", b.stopped(), 1)
		f := w.fate(seq)
		equal(t, "fate", []string{f.State, f.Error}, []string{berth.FateFailed, "stopped by the operator"})
		time.Sleep(time.Hour)
		equal(t, "comes back by itself", len(w.engine.boxes), 0)
		out := w.outbox()
		if len(out) != 2 || !strings.Contains(out[1], "operator stopped me") {
			t.Errorf("told: %q", out)
		}
		w.say("@Andy what was it?")
		next := w.started()
		equal(t, "session", next.input.SessionID, "s1")
		equal(t, "batch", next.input.Batch, []string{"m2", "m3"})
	})
}

// W15: neither a result nor an idle state of before makes a run idle that still
// has something to answer: no task and no other group closes it.
func TestW15OutstandingMessagesKeepTheRunBusy(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		seq := w.say("@Andy two")
		w.queue.AddTask(family.Folder, "t1")
		busy := func(what string) {
			t.Helper()
			equal(t, what, w.state(), berth.RunBusy)
			if slices.Contains(w.input(), protocol.CloseFile) {
				t.Errorf("%s: it is closed", what)
			}
		}
		b.state(protocol.StateIdle) // crossed the follow-up
		busy("idle before the ack")
		equal(t, "fate", w.fate(seq).State, berth.FatePending)
		b.take()
		b.ack("m2")
		b.state(protocol.StateBusy)
		b.print(said("half"))
		busy("a result")
		time.Sleep(10 * time.Minute)
		busy("ten minutes later")
		b.print(said("whole"))
		b.state(protocol.StateIdle)
		equal(t, "fate", w.fate(seq), berth.Fate{State: berth.FateDone, Texts: []string{"half", "whole"}, RunID: b.run})
		equal(t, "at last", w.state(), berth.RunClosing)
	})
}

// W33, W65: who writes while a group fails joins the batch. There is one retry
// at a time, neither more of them nor earlier.
func TestW33MessagesDuringBackoffJoin(t *testing.T) {
	play(t, func(w *world) {
		start := time.Now()
		var at []time.Duration
		var batches []int
		w.say("@Andy hello")
		for range 40 {
			for len(w.engine.boxes) > 0 {
				b := w.started()
				at = append(at, time.Since(start))
				batches = append(batches, len(b.input.Batch))
				b.end(Exit{Code: 1})
				synctest.Wait()
			}
			if w.ids < 6 {
				w.say("@Andy hello?")
			}
			time.Sleep(time.Second)
			synctest.Wait()
		}
		s := time.Second
		equal(t, "runs at", at, []time.Duration{0, 5 * s, 15 * s, 35 * s})
		equal(t, "messages", batches, []int{1, 6, 6, 6})
	})
}

// W35: an image that is missing and cannot be made again is not tried again; the
// chat is told.
func TestW35MissingImageIsNotRetried(t *testing.T) {
	play(t, func(w *world) {
		rebuilds := 0
		w.runner.Rebuild = func(context.Context) error { rebuilds++; return errors.New("no network") }
		w.engine.setFail(berth.Errorf(berth.NotFound, "no image agent"))
		seq := w.say("@Andy hello")
		time.Sleep(time.Hour)
		equal(t, "fate", w.fate(seq).State, berth.FateFailed)
		equal(t, "rebuilds", rebuilds, 1)
		if out := w.outbox(); len(out) != 1 || !strings.Contains(out[0], "image is missing") {
			t.Errorf("told: %q", out)
		}
		w.engine.setFail(nil)
		w.say("@Andy again")
		equal(t, "batch", w.started().input.Batch, []string{"m1", "m2"})
	})
}

// W35: somebody cleaned up the engine's images: the image is made again and the
// container started, and nobody notices.
func TestW35MissingImageIsMadeAgain(t *testing.T) {
	play(t, func(w *world) {
		w.runner.Rebuild = func(context.Context) error { w.engine.setFail(nil); return nil }
		w.engine.setFail(berth.Errorf(berth.NotFound, "no image agent"))
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.turn("hi", "m1")
		equal(t, "fate", w.fate(seq), berth.Fate{State: berth.FateDone, Texts: []string{"hi"}, RunID: b.run})
	})
}

// clingingEngine has containers whose Stop hangs and that cannot be removed until
// they are released.
type clingingEngine struct {
	*fakeEngine
	released chan struct{}
	mu       sync.Mutex
	tries    int
}

func (e *clingingEngine) Start(ctx context.Context, spec Spec, stdin []byte, created func(string) error) (Box, error) {
	b, err := e.fakeEngine.Start(ctx, spec, stdin, created)
	return clingingBox{b, e}, err
}

type clingingBox struct {
	Box
	e *clingingEngine
}

func (b clingingBox) Stop(ctx context.Context) error {
	select {
	case <-b.e.released:
	case <-ctx.Done():
	}
	return ctx.Err()
}

func (b clingingBox) Remove(ctx context.Context) error {
	select {
	case <-b.e.released:
		return b.Box.Remove(ctx)
	default:
	}
	b.e.mu.Lock()
	defer b.e.mu.Unlock()
	b.e.tries++
	return berth.Errorf(berth.Unavailable, "the engine does not answer")
}

// W36, W63: an engine that hangs in a stop holds up nobody, not even the run that
// is stopped; and the slot is taken until the engine says that the container is
// gone.
func TestW36HangingStop(t *testing.T) {
	play(t, func(w *world) {
		e := &clingingEngine{fakeEngine: w.engine, released: make(chan struct{})}
		w.runner.Engine = e
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.queue.Close(family.Folder)
		time.Sleep(closeGrace)
		equal(t, "state", w.state(), berth.RunStopping)
		b.print(said("still here")) // while Stop hangs
		equal(t, "outbox", w.outbox(), []string{"still here"})

		b.end(Exit{Code: 137})
		w.say("@Andy two")
		time.Sleep(time.Minute)
		synctest.Wait()
		equal(t, "containers beside it", len(w.engine.boxes), 0)
		equal(t, "used", w.queue.State().Used, 1)
		e.mu.Lock()
		if e.tries < 5 {
			t.Errorf("%d tries to remove it", e.tries)
		}
		e.mu.Unlock()
		close(e.released)
		time.Sleep(5 * time.Second)
		equal(t, "batch", w.started().input.Batch, []string{"m2"})
		equal(t, "removed", b.isRemoved(), true)
	})
}

// W37: the daemon's end closes idle runs and counts nothing against busy ones.
func TestW37ShutdownClosesIdleRuns(t *testing.T) {
	play(t, func(w *world) {
		b := w.rested()
		done := make(chan struct{})
		go func() { defer close(done); w.queue.Shutdown(context.Background()) }()
		equal(t, "asked", w.input(), []string{protocol.CloseFile})
		b.end(Exit{})
		<-done
		equal(t, "removed", b.isRemoved(), true)
		live, err := w.db.LiveRuns(w.t.Context())
		check(t, err)
		equal(t, "live runs", len(live), 0)
	})
}

// W46: what a run does can be seen from outside.
func TestW46LiveShowsTheRun(t *testing.T) {
	play(t, func(w *world) {
		see := func(state berth.RunState, turns int, since time.Duration) {
			t.Helper()
			synctest.Wait()
			v, ok := w.runner.Live()[family.Folder]
			equal(t, "live", ok, true)
			equal(t, "state, turns", []any{v.Run.State, v.Turns}, []any{state, turns})
			equal(t, "for", time.Since(v.Since), since)
			if v.Run.ID == "" || v.Run.Container != "box-"+v.Run.ID {
				t.Errorf("run %q in container %q", v.Run.ID, v.Run.Container)
			}
		}
		equal(t, "at first", w.runner.Live(), map[string]View{})
		b := w.rested()
		see(berth.RunIdle, 1, 0)
		time.Sleep(time.Minute)
		see(berth.RunIdle, 1, time.Minute)
		w.say("@Andy two")
		see(berth.RunBusy, 2, 0)
		b.take()
		b.turn("second", "m2")
		w.queue.Close(family.Folder)
		see(berth.RunClosing, 2, 0)
		time.Sleep(protocol.CloseReassert)
		see(berth.RunClosing, 2, protocol.CloseReassert)
		b.end(Exit{})
		synctest.Wait()
		equal(t, "at last", w.runner.Live(), map[string]View{})
	})
}

// W66: a busy run is given nothing, however many write to it; they come together
// when its turn is over.
func TestW66FollowUpsWaitForTheTurn(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy one")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.state(protocol.StateBusy)
		for range 3 {
			w.say("@Andy more")
			b.print(protocol.Frame{Type: protocol.TypeHeartbeat})
			equal(t, "input", w.input(), []string(nil))
		}
		b.print(said("first"))
		equal(t, "after a result", w.input(), []string(nil))
		b.state(protocol.StateIdle)
		got := b.taken()
		equal(t, "id", got.ID, "m4")
		equal(t, "messages", strings.Count(got.Text, "@Andy more"), 3)
	})
}

// W67: a result that says what the same turn has said is not said again; one in
// the next turn is.
func TestW67EqualResults(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy one")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.send("done")
		b.print(said("done"))
		b.print(said("more"))
		b.print(said("more"))
		b.state(protocol.StateIdle)
		equal(t, "first turn", w.outbox(), []string{"done", "more"})
		w.say("@Andy two")
		b.take()
		b.turn("done", "m2")
		equal(t, "second turn", w.outbox(), []string{"done"})
	})
}
