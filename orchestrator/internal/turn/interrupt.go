package turn

import (
	"fmt"
	"time"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// stopGrace is how long a turn may go on after the runner was told to stop it, which
// takes two seconds of that.
const stopGrace = 3 * time.Second

// interrupt ends the turn under way and keeps the session. What the turn was given
// counts as done from now on: people said that they want no answer. A runner that
// cannot stop a turn is stopped itself, and so is one that was started for a task.
func (l *loop) interrupt() {
	switch {
	case l.run.State == berth.RunIdle || l.run.State == berth.RunStopping || l.failure != nil:
		return
	case l.run.Task != "":
		l.halted("it was stopped from the chat")
		return
	}
	p := berth.Progress{RunID: l.run.ID}
	stop := protocol.Message{Type: protocol.TypeStop}
	for i := range l.batches {
		b := &l.batches[i]
		if stop.ID = b.AckID; b.State == berth.BatchSent {
			p.Acked = append(p.Acked, b.AckID)
			b.State = berth.BatchConsumed
		}
	}
	if l.compaction.id != 0 {
		if l.compaction.stopped = true; !l.compaction.taken {
			stop.ID = l.compaction.ackID()
		}
	}
	if !l.turnEnded(p) {
		return
	}
	l.runLog.Notef("the turn was stopped from the chat")
	if l.older() {
		l.halted("it was stopped from the chat, and its runner cannot stop a turn alone")
		return
	}
	data, err := protocol.Marshal(stop)
	if err == nil {
		err = l.files.WriteInput(stopSeq, data)
	}
	if err != nil {
		l.halted(fmt.Sprintf("tell the runner to stop: %v", err))
		return
	}
	l.halt.Reset(stopGrace)
}

// stopSeq numbers the input file behind all messages.
const stopSeq = 1<<63 - 1

// tooLate ends a run whose turn did not stop.
func (l *loop) tooLate() {
	l.halted(fmt.Sprintf("the turn did not stop within %v", stopGrace))
}

// halted ends the run since there is no other way to end its turn.
func (l *loop) halted(why string) {
	l.fail(&failure{text: why, class: classStopped})
	if l.run.State != berth.RunStopping {
		l.stop()
	}
}
