package turn

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// stopTurn is what the runner does with the order.
func (b *fakeBox) stopTurn() {
	b.print(protocol.Frame{Status: protocol.StatusSuccess, NewSessionID: "s1", Note: "it was stopped"})
	b.state(protocol.StateIdle)
}

func (w *world) interrupt() {
	w.t.Helper()
	if !w.queue.Interrupt(family.Folder) {
		w.t.Error("nothing runs")
	}
	synctest.Wait()
}

// A turn that is stopped is done: nobody is answered, and the next message goes on
// with the same container.
func TestInterrupt(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy work")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.state(protocol.StateBusy)
		later := w.say("@Andy and this")
		w.interrupt()
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
		equal(t, "orders", b.take(), []protocol.Message{{Type: protocol.TypeStop, ID: "m1"}})
		equal(t, "state", w.state(), berth.RunBusy)
		time.Sleep(2 * time.Second)
		b.stopTurn()
		got := b.take()
		equal(t, "follow-up", got[0].ID, "m2")
		b.turn("here", "m2")
		time.Sleep(time.Hour / 4) // nothing of the order is left
		equal(t, "fate", w.fate(later).State, berth.FateDone)
		equal(t, "outbox", w.outbox(), []string{"here"})
		equal(t, "stops", b.stopped(), 0)
		equal(t, "session", w.session(), "s1")
		if w.queue.Interrupt(family.Folder) {
			t.Error("it is idle")
		}
	})
}

// The order may come before the runner took its prompt.
func TestInterruptAtTheStart(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy work")
		b := w.started()
		w.interrupt()
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
		b.ready()
		equal(t, "orders", b.take(), []protocol.Message{{Type: protocol.TypeStop, ID: "m1"}})
		b.ack("m1")
		b.state(protocol.StateBusy)
		b.stopTurn()
		equal(t, "state", w.state(), berth.RunIdle)
		equal(t, "stops", b.stopped(), 0)
		b.end(Exit{})
		time.Sleep(time.Hour)
		equal(t, "runs", len(w.engine.boxes), 0)
		equal(t, "outbox", w.outbox(), []string(nil))
	})
}

// What was said before the order came through is sent.
func TestInterruptMeetsAnAnswer(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy work")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.interrupt()
		b.print(said("just done"))
		b.state(protocol.StateIdle)
		equal(t, "fate", w.fate(seq).Texts, []string{"just done"})
		equal(t, "state", w.state(), berth.RunIdle)
	})
}

// A turn that does not end takes the container with it, and still nothing is
// repeated and nobody told of a failure.
func TestInterruptOfADeafRunner(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy work")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.interrupt()
		time.Sleep(stopGrace - time.Millisecond)
		equal(t, "stops", b.stopped(), 0)
		time.Sleep(time.Millisecond)
		equal(t, "stops", b.stopped(), 1)
		time.Sleep(time.Hour)
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
		equal(t, "runs", len(w.engine.boxes), 0)
		equal(t, "outbox", w.outbox(), []string(nil))
		w.say("@Andy again")
		w.started()
	})
}

// oldEngine starts containers whose runner knows no nonce and no orders.
type oldEngine struct{ *fakeEngine }

func (e oldEngine) Start(ctx context.Context, spec Spec, stdin []byte, created func(string) error) (Box, error) {
	b, err := e.fakeEngine.Start(ctx, spec, stdin, created)
	if err != nil {
		return nil, err
	}
	return oldBox{b.(*fakeBox)}, nil
}

type oldBox struct{ *fakeBox }

func (oldBox) Marker() string { return "CAMBOT_AGENT" }

// A runner of an older protocol can only be stopped whole.
func TestInterruptOfAnOldRunner(t *testing.T) {
	play(t, func(w *world) {
		w.runner.Engine = oldEngine{w.engine}
		seq := w.say("@Andy work")
		b := w.started()
		w.interrupt()
		equal(t, "stops", b.stopped(), 1)
		equal(t, "input", w.input(), []string(nil))
		time.Sleep(time.Hour)
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
		equal(t, "outbox", w.outbox(), []string(nil))
	})
}

// The container of a task is for that task alone.
func TestInterruptOfATask(t *testing.T) {
	play(t, func(w *world) {
		w.task(nil)
		b := w.started()
		b.ready()
		b.state(protocol.StateBusy)
		w.interrupt()
		equal(t, "stops", b.stopped(), 1)
		if got := w.history(); len(got) != 1 || !strings.HasSuffix(got[0], "stopped from the chat") || !strings.HasPrefix(got[0], "error") {
			t.Errorf("log: %q", got)
		}
		time.Sleep(time.Minute)
		equal(t, "runs", len(w.engine.boxes), 0)
	})
}

// Nor is anything repeated if the container goes meanwhile.
func TestInterruptOfARunThatGoes(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy work")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.interrupt()
		b.end(Exit{Code: 1})
		time.Sleep(time.Hour)
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
		equal(t, "runs", len(w.engine.boxes), 0)
		equal(t, "outbox", w.outbox(), []string(nil))
	})
}

// What a renewed run still says does not bring its session back.
func TestRenewedRunKeepsNoSession(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy one")
		b := w.started()
		b.ready()
		b.turn("one", "m1")
		equal(t, "session", w.session(), "s1")
		w.say("@Andy two")
		b.take()
		b.ack("m2")
		b.state(protocol.StateBusy)
		w.queue.Renew(family.Folder)
		check(t, w.db.DropSessions(w.t.Context(), family.Folder))
		b.print(said("two"))
		equal(t, "session", w.session(), "")
		check(t, w.db.Commit(w.t.Context(), berth.Progress{RunID: b.run, Session: "s1"})) // was on its way
		three := w.say("@Andy three")
		b.state(protocol.StateIdle)
		equal(t, "state", w.state(), berth.RunClosing)
		equal(t, "input", w.input(), []string{protocol.CloseFile})
		b.end(Exit{})
		b = w.started()
		equal(t, "session", b.input.SessionID, "")
		b.ready()
		b.turn("three", "m3")
		equal(t, "fate", w.fate(three).State, berth.FateDone)
		equal(t, "outbox", w.outbox(), []string{"one", "two", "three"})
		equal(t, "session", w.session(), "s1")
	})
}
