package loop

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

// patient accepts every prompt and answers at once, but for those that begin with
// "long": they go on until they are stopped.
func patient(ctx context.Context, text string, to engine.Turn) error {
	to.Session("s1")
	to.Accept()
	if strings.HasPrefix(text, "long") {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	to.Answer(engine.Answer{Text: text})
	return nil
}

// order writes a request to stop as the host does.
func (r *run) order(id string) {
	r.t.Helper()
	r.drop(protocol.InputName(1<<63-1), fmt.Sprintf(`{"type":"stop","id":%q}`, id))
	r.ring()
}

// A turn that is stopped ends as others do, and the run goes on with its session.
func TestStop(t *testing.T) {
	for _, id := range []string{"b1", ""} {
		inBubble(t, script(patient), func(r *run) {
			r.loop.Input.Prompt = "long"
			r.start()
			r.said("ready", "ack b1", "state busy")
			r.order(id)
			r.said("output null s1", "state idle")
			r.put(1, "second", "m1")
			r.said("ack m1", "state busy", `output "second" s1`, "state idle")
			r.put(2, "long again", "m2")
			r.order("m2")
			r.said("ack m2", "state busy", "output null s1", "state idle")
			if want := []string{"it was stopped", "it was stopped"}; !slices.Equal(r.notes, want) {
				t.Errorf("notes %q", r.notes)
			}
			r.stays()
			r.closeRun()
		})
	}
}

// The order names a message: it stops no other turn than that one's, also if it
// comes before.
func TestStopNamesItsTurn(t *testing.T) {
	inBubble(t, script(patient), func(r *run) {
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first" s1`, "state idle")
		r.order("b1") // it is over
		r.order("")   // nothing runs
		r.put(1, "long one", "m1")
		r.order("b1")
		time.Sleep(time.Second)
		r.said("ack m1", "state busy")
		r.order("m1")
		r.said("output null s1", "state idle")
		r.order("m2")
		r.said()
		r.put(2, "long two", "m2")
		r.said("ack m2", "state busy", "output null s1", "state idle")
		r.put(3, "third", "m3")
		r.said("ack m3", "state busy", `output "third" s1`, "state idle")
		r.closeRun()
	})
}

// It may be there before the runner is.
func TestStopBeforeTheStart(t *testing.T) {
	inBubble(t, script(patient), func(r *run) {
		r.loop.Input.Prompt = "long"
		r.order("b1")
		r.start()
		r.said("ready", "ack b1", "state busy", "output null s1", "state idle")
		r.closeRun()
	})
}

// What was given to the turn while it ran is part of it, and a turn that is being
// stopped is given nothing.
func TestStopOfASteeredTurn(t *testing.T) {
	agent := steerable{steered: make(chan string, 2)}
	agent.script = func(ctx context.Context, text string, to engine.Turn) error {
		to.Accept()
		if text != "long" {
			to.Answer(engine.Answer{Text: text})
			return nil
		}
		<-ctx.Done()
		time.Sleep(StopGrace / 2)
		return context.Cause(ctx)
	}
	inBubble(t, agent, func(r *run) {
		r.loop.Input.Prompt = "long"
		r.start()
		r.put(1, "more", "m1")
		r.said("ready", "ack b1", "state busy", "ack m1")
		r.order("m1")
		r.put(2, "too late", "m2")
		r.said()
		time.Sleep(StopGrace / 2)
		r.said("output null", "state idle", "ack m2", "state busy", `output "too late"`, "state idle")
		r.closeRun()
	})
}

// What the agent said before it was stopped was said.
func TestStopAfterAnAnswer(t *testing.T) {
	agent := script(func(ctx context.Context, _ string, to engine.Turn) error {
		to.Answer(engine.Answer{Text: "half"})
		<-ctx.Done()
		return context.Cause(ctx)
	})
	inBubble(t, agent, func(r *run) {
		r.start()
		r.said("ready", "ack b1", "state busy", `output "half"`)
		r.order("b1")
		r.said("state idle")
		r.closeRun()
	})
}

// A turn that does not end takes the run with it, and so does an engine that cannot
// go on; the host keeps the session and is told of no failure.
func TestStopThatEndsTheRun(t *testing.T) {
	var free chan struct{}
	deaf := script(func(_ context.Context, _ string, to engine.Turn) error {
		to.Session("s1")
		to.Accept()
		<-free
		return nil
	})
	inBubble(t, deaf, func(r *run) {
		free = make(chan struct{}) // of the bubble
		r.start()
		r.order("b1")
		r.said("ready", "ack b1", "state busy")
		time.Sleep(StopGrace - time.Millisecond)
		r.said()
		time.Sleep(time.Millisecond)
		r.ended(ErrStillBusy)
		r.said("output null s1")
		close(free)
	})
	broken := script(func(ctx context.Context, _ string, to engine.Turn) error {
		to.Session("s1")
		to.Accept()
		<-ctx.Done()
		return errors.New("the agent was killed")
	})
	inBubble(t, broken, func(r *run) {
		r.start()
		r.order("b1")
		r.said("ready", "ack b1", "state busy", "output null s1")
		r.ended(nil)
	})
}

// An engine that died of the stop is noticed with the next message, which is then
// left to another run; without a stop it is a failure.
func TestEngineThatDiedOfAStop(t *testing.T) {
	agent := script(func(ctx context.Context, text string, to engine.Turn) error {
		if text == "second" {
			return errors.New("broken pipe")
		}
		return patient(ctx, text, to)
	})
	inBubble(t, agent, func(r *run) {
		r.loop.Input.Prompt = "long"
		r.start()
		r.order("b1")
		r.said("ready", "ack b1", "state busy", "output null s1", "state idle")
		r.put(1, "second", "m1")
		r.ended(nil)
		r.said()
		r.stays(protocol.InputName(1))
	})
	inBubble(t, agent, func(r *run) {
		r.loop.Input.Prompt = "long"
		r.start()
		r.order("b1")
		r.put(1, "well", "m1")
		r.put(2, "second", "m2")
		r.said("ready", "ack b1", "state busy", "output null s1", "state idle", "ack m1", "state busy", `output "well" s1`, "state idle", `output error "broken pipe" s1`)
		r.ended(ErrTurnFailed)
	})
}

// A script that decides whether the agent is woken is part of the turn.
func TestStopOfAScript(t *testing.T) {
	inBubble(t, script(patient), func(r *run) {
		r.loop.Input.Script = "x"
		r.loop.judge = func(ctx context.Context, _ string) (verdict, error) {
			<-ctx.Done()
			return verdict{}, ctx.Err()
		}
		r.start()
		r.said("ready")
		r.order("b1")
		r.said("ack b1", "state busy", "output null", "state idle")
		r.closeRun()
	})
}

// The end of the run goes before the end of the turn.
func TestSignalDuringAStop(t *testing.T) {
	signal := errors.New("SIGTERM")
	agent := script(func(ctx context.Context, _ string, to engine.Turn) error {
		to.Accept()
		<-ctx.Done()
		time.Sleep(StopGrace / 2)
		return context.Cause(ctx)
	})
	inBubble(t, agent, func(r *run) {
		r.start()
		r.order("b1")
		r.stop(signal)
		time.Sleep(StopGrace)
		synctest.Wait()
		r.ended(signal)
	})
}
