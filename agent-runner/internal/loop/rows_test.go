package loop

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

// stays checks what waits in the input folder, now and after many looks.
func (r *run) stays(names ...string) {
	r.t.Helper()
	for range 3 {
		if diff := cmp.Diff(names, r.waiting()); diff != "" {
			r.t.Errorf("input (-want +got):\n%s", diff)
		}
		time.Sleep(10 * protocol.LookAgain)
		synctest.Wait()
	}
}

// W10: a message's file is there until the engine has the message, however long
// that takes, and the ack comes after that.
func TestW10FileStaysUntilTheEngineHasIt(t *testing.T) {
	var accept chan struct{}
	turns := 0
	agent := script(func(ctx context.Context, text string, to engine.Turn) error {
		if turns++; turns > 1 {
			select {
			case <-accept:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return echo(ctx, text, to)
	})
	inBubble(t, agent, func(r *run) {
		accept = make(chan struct{}) // of the bubble
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`, "state idle")
		r.put(1, "second", "m1")
		for range 3 {
			if diff := cmp.Diff([]string{protocol.InputName(1)}, r.waiting()); diff != "" {
				t.Errorf("input (-want +got):\n%s", diff)
			}
			time.Sleep(protocol.LookAgain)
			synctest.Wait()
		}
		r.said()
		close(accept)
		r.said("ack m1", "state busy", `output "second"`, "state idle")
		r.stays()
		r.closeRun()
	})
}

// W62: when a run has failed or was closed, nobody takes what still comes: it is
// there for the next one.
func TestW62NobodyTakesInputAfterTheEnd(t *testing.T) {
	var gate chan error
	failing := script(func(_ context.Context, _ string, to engine.Turn) error {
		to.Accept()
		return <-gate
	})
	inBubble(t, failing, func(r *run) {
		gate = make(chan error) // of the bubble
		r.start()
		r.said("ready", "ack b1", "state busy")
		r.put(1, "during the turn", "m1")
		gate <- errors.New("the query ended")
		r.said(`output error "the query ended"`)
		r.ended(ErrTurnFailed)
		r.put(2, "after the end", "m2")
		r.stays(protocol.InputName(1), protocol.InputName(2))
		r.said()
	})
	inBubble(t, script(echo), func(r *run) {
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`, "state idle")
		r.closeRun()
		r.put(1, "after the close", "m1")
		r.stays(protocol.InputName(1), protocol.CloseFile)
		r.said()
	})
}

// W67, W15: a turn has one end, however many results it has, and idle comes after
// the last of them.
func TestW15IdleComesLast(t *testing.T) {
	agent := script(func(_ context.Context, text string, to engine.Turn) error {
		to.Accept()
		for _, part := range []string{"a", "b", "c"} {
			to.Answer(engine.Answer{Text: part})
			time.Sleep(time.Second)
		}
		return nil
	})
	inBubble(t, agent, func(r *run) {
		r.start()
		r.put(1, "more", "m1")
		time.Sleep(2500 * time.Millisecond)
		r.said("ready", "ack b1", "state busy", `output "a"`, `output "b"`, `output "c"`)
		time.Sleep(time.Second)
		synctest.Wait()
		time.Sleep(2 * time.Second)
		r.said("state idle", "ack m1", "state busy", `output "a"`, `output "b"`, `output "c"`)
		time.Sleep(time.Second)
		r.said("state idle")
		r.closeRun()
	})
}
