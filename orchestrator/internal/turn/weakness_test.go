package turn

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// W16: a turn that says nothing makes the run idle like any other, and the idle
// timeout counts from the last turn.
func TestW16SilentTurnIsIdle(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.print(protocol.Frame{Status: protocol.StatusSuccess, NewSessionID: "s1"})
		b.state(protocol.StateIdle)
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
		equal(t, "state", w.state(), berth.RunIdle)
		time.Sleep(29 * time.Minute)
		w.say("@Andy more")
		b.take()
		b.turn("here", "m2")
		time.Sleep(29 * time.Minute)
		equal(t, "state", w.state(), berth.RunIdle)
		time.Sleep(time.Minute)
		equal(t, "state", w.state(), berth.RunClosing)
	})
}

// W20: typing is told again and again while the agent works, since chats forget
// it after seconds, and ends with the turn.
func TestW20TypingIsKeptAlive(t *testing.T) {
	play(t, func(w *world) {
		var told atomic.Int32
		w.runner.Typing = func(_ string, on bool) {
			if on {
				told.Add(1)
			}
		}
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		before := told.Load()
		time.Sleep(5*tellInterval + time.Second)
		synctest.Wait()
		equal(t, "told", told.Load(), before+5)
		b.print(said("hi"))
		b.state(protocol.StateIdle)
		time.Sleep(5 * tellInterval)
		synctest.Wait()
		equal(t, "told when idle", told.Load(), before+5)
	})
}

// W62: follow-ups are given to nobody but the run that was asked for them, and
// not before its turn is over.
func TestW62NobodyElseTakesFollowUps(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy one")
		b := w.started()
		b.ready()
		b.turn("first", "m1")
		w.queue.Close("family")
		w.say("@Andy two") // meets a closing run
		for _, m := range b.take() {
			t.Errorf("the closing run was given %+v", m)
		}
		b.end(Exit{})
		next := w.started()
		equal(t, "batch", next.input.Batch, []string{"m2"})
	})
}

// W63: the end of the stream is not the end of the container: no second one
// starts while the first exists.
func TestW63StreamEndIsNotTheEnd(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.lose()
		time.Sleep(time.Minute)
		w.say("@Andy still there?")
		equal(t, "second containers", len(w.engine.boxes), 0)
		equal(t, "used", w.queue.State().Used, 1)
	})
}
