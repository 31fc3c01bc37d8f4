package turn

import (
	"context"
	"testing"
	"time"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/queue"
)

// A result without words ends a task as any other does, whatever happens to the
// daemon, the stream or the container around it.
func TestResultWithoutWordsOverARestart(t *testing.T) {
	null := protocol.Frame{Status: protocol.StatusSuccess, Note: "nothing to say"}
	hidden := said("<internal>all is well</internal>")
	for _, c := range []struct {
		what string
		play func(w *world, b *fakeBox)
		log  string
	}{
		{"it lies in a file", func(w *world, b *fakeBox) {
			w.leave()
			b.file(null)
			b.end(Exit{})
			w.handOver("")
		}, "success 0s nothing to say"},
		{"it was heard, and the container is gone", func(w *world, b *fakeBox) {
			b.print(null)
			w.leave()
			b.end(Exit{Code: -1})
			w.handOver("")
		}, "success 0s nothing to say"},
		{"what is internal alone was heard", func(w *world, b *fakeBox) {
			b.print(hidden)
			w.leave()
			b.end(Exit{Code: -1})
			w.handOver("")
		}, "success 0s"},
		{"it was heard, and the container goes on", func(w *world, b *fakeBox) {
			b.print(null)
			w.handOver(b.ID())
			time.Sleep(resultGrace)
			equal(t, "closed", w.input()[len(w.input())-1], protocol.CloseFile)
			b.end(Exit{})
		}, "success 10s nothing to say"},
		{"the stream broke", func(w *world, b *fakeBox) {
			b.lose()
			b.file(null)
			time.Sleep(time.Second)
			b.state(protocol.StateIdle)
			b.end(Exit{})
		}, "success 1s nothing to say"},
	} {
		play(t, func(w *world) {
			w.task(nil)
			b := w.started()
			b.ready()
			b.state(protocol.StateBusy)
			c.play(w, b)
			time.Sleep(time.Millisecond)
			log := w.history()
			if len(log) != 1 || log[0] != c.log && log[0] != c.log[:len("success ")]+"1ms"+c.log[len("success 0s"):] {
				t.Errorf("%s: log %q, want %q", c.what, log, c.log)
			}
			equal(t, c.what+": due", w.due(), false)
			equal(t, c.what+": outbox", w.outbox(), []string(nil))
		})
	}
}

// leave ends the daemon, and leaves the container running.
func (w *world) leave() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	w.queue.Shutdown(ctx)
}

// The session of a turn without words is kept, though the stream did not bring it.
func TestSessionOfATurnWithoutWords(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy be quiet")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.state(protocol.StateBusy)
		b.lose()
		b.file(protocol.Frame{Status: protocol.StatusSuccess, NewSessionID: "s7"})
		time.Sleep(time.Second)
		equal(t, "session", w.session(), "s7")
		b.state(protocol.StateIdle)
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
	})
}

// /new, a kill, and the old run goes on in the next daemon: its session does not
// come back, and its container is given nothing more.
func TestAdoptedRunOfAnOldSession(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy one")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.state(protocol.StateBusy)
		check(t, w.db.DropSessions(w.t.Context(), family.Folder))
		w.leave()
		live, err := w.db.LiveRuns(w.t.Context())
		check(t, err)
		if len(live) != 1 || !live[0].Renewed {
			t.Fatalf("%+v", live)
		}
		w.queue = queue.New(5, 30*time.Minute, func(ctx context.Context, s *queue.Slot) queue.Result { return w.runner.Run(ctx, s, family) })
		w.queue.Adopt(family.Folder, "", func(ctx context.Context, s *queue.Slot) queue.Result {
			w.queue.Renew(family.Folder) // what dispatch does
			return w.runner.Adopt(ctx, s, family, live[0], b.ID(), func() {})
		})
		b.ready()
		b.state(protocol.StateBusy)
		b.print(said("one"))
		equal(t, "session", w.session(), "")
		w.say("@Andy two")
		b.state(protocol.StateIdle)
		b.end(Exit{})
		next := w.started()
		equal(t, "session", next.input.SessionID, "")
		equal(t, "outbox", w.outbox(), []string{"one"})
	})
}
