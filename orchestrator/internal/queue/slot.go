package queue

import (
	"context"
	"time"
)

// Slot is the place of one run in the pool, from start until start returns.
type Slot struct {
	Folder string

	task        string
	q           *Queue
	g           *group
	cancel      context.CancelFunc
	wake        chan struct{}
	interrupted chan struct{}
	closed      chan struct{}

	// Guarded by the queue's mutex.
	idle    bool
	ripe    time.Time // from when on an idle run makes room for another group
	late    bool      // it went on working while another group waited
	timer   *time.Timer
	closing bool
	rested  bool // it was idle when it was told to close
	renewed bool
	reason  Reason
}

// Task returns the task that the run was started for, or "" if it answers
// messages.
func (s *Slot) Task() string { return s.task }

// Wake delivers when an idle run may have something to do. The run then calls
// Busy before it looks. It never delivers in the run of a task.
func (s *Slot) Wake() <-chan struct{} { return s.wake }

// Interrupted delivers when the run is to end its turn.
func (s *Slot) Interrupted() <-chan struct{} { return s.interrupted }

// Renewed reports whether the next run is to begin a new session.
func (s *Slot) Renewed() bool {
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	return s.renewed
}

// Closing is closed when the run is to end. Reason tells why.
func (s *Slot) Closing() <-chan struct{} { return s.closed }

// Reason tells why the run is to end, or "".
func (s *Slot) Reason() Reason {
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	return s.reason
}

// Idle says that the run waits for input. If its group has messages it is
// woken, unless others wait and it has to make room. It is closed if a task of
// its group waits, if the next message is to begin a new session, or if it was for
// a task itself, since it can be given nothing then.
func (s *Slot) Idle() {
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	if s.closing || s.idle {
		return
	}
	switch {
	case s.task != "":
		s.closeLocked(ReasonTaskDone)
		return
	case len(s.g.tasks) > 0:
		s.closeLocked(ReasonTask)
		return
	case s.renewed:
		s.closeLocked(ReasonRenewed)
		return
	}
	s.idle, s.ripe = true, time.Now()
	if len(s.q.line) == 0 || !s.g.pending && !s.late {
		s.ripe = s.ripe.Add(HoldDown)
	}
	s.timer = time.AfterFunc(s.q.idle, func() {
		s.q.mu.Lock()
		defer s.q.mu.Unlock()
		if s.idle {
			s.closeLocked(ReasonIdle)
		}
	})
	s.q.evictLocked()
	if s.g.pending {
		s.wakeLocked()
	}
}

// Busy takes an idle run to work. It reports false if the run is to close, and
// must then not be given anything; so it does in the run of a task.
func (s *Slot) Busy() bool {
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	if s.closing || s.task != "" {
		return false
	}
	s.workLocked()
	s.g.pending = false
	select {
	case <-s.interrupted: // meant for the turn before
	default:
	}
	return true
}

// Working says that the run has gone to work by itself: it is not idle.
func (s *Slot) Working() {
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	s.workLocked()
}

func (s *Slot) workLocked() {
	if s.idle {
		s.late = len(s.q.line) > 0
	}
	s.stopIdleLocked()
}

// Done says that the run's task has its result: the run is to end, idle or not.
// It changes nothing in a run that answers messages.
func (s *Slot) Done() {
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	if s.task != "" {
		s.closeLocked(ReasonTaskDone)
	}
}

// Seal says that the run ends and can be given nothing any more, for whatever
// reason.
func (s *Slot) Seal() {
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	s.closeLocked("")
}

func (s *Slot) wakeLocked() {
	if !s.idle || s.closing {
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *Slot) closeLocked(why Reason) {
	if s.closing {
		return
	}
	s.rested = s.idle
	s.stopIdleLocked()
	s.closing, s.reason = true, why
	close(s.closed)
}

func (s *Slot) stopIdleLocked() {
	s.idle = false
	if s.timer != nil {
		s.timer.Stop()
	}
}
