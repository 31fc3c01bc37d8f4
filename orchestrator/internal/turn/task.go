package turn

import (
	"time"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// DefaultTaskTimeout is how long the run of a task may take.
const DefaultTaskTimeout = 30 * time.Minute

// resultGrace is how long the run of a task may go on after its first result.
const resultGrace = 10 * time.Second

// heartbeatBackoff is waited before a heartbeat that failed is tried again, which
// other tasks are not: min(60 s·2ⁿ, 30 min), twice.
var heartbeatBackoff = []time.Duration{time.Minute, 2 * time.Minute}

func (c *carrier) taskTimeout() time.Duration {
	if c.TaskTimeout > 0 {
		return c.TaskTimeout
	}
	return DefaultTaskTimeout
}

// beginTask sets the limits of a task's run.
func (l *loop) beginTask() {
	if l.run.Task == "" {
		return
	}
	took := max(time.Since(l.run.StartedAt), 0) // the clock may have been set since
	l.limit.Reset(max(l.taskTimeout()-took, 0))
	if l.spoke {
		l.result.Reset(resultGrace)
	}
}

// taskSpoke notes that a task has a result, also one without words.
func (l *loop) taskSpoke() {
	if l.run.Task == "" || l.spoke {
		return
	}
	l.spoke = true
	l.result.Reset(resultGrace)
}

// taskRests reports whether the end of a turn is the end of the run's task. An
// older runner says so with each result, and may have more to say.
func (l *loop) taskRests() bool {
	if l.run.Task == "" {
		return true
	}
	l.spoke = true
	return l.ready || l.adopted
}

// unheard reports whether the runner of an adopted task ended badly and said
// nothing under the run's nonce: it may not even have read its prompt.
func (c *carrier) unheard(exit Exit) bool {
	return c.adopted && !c.ready && c.run.LastSeq == 0 && exit.Code != 0 && c.failure == nil
}

// taskEnding is the ending of a task's run that failed. Tasks are not repeated as
// messages are, since nobody waits for them and most come again; only what is
// lost through no fault of theirs is. lost says that the run lost its host.
func (c *carrier) taskEnding(e berth.Ending, f *failure, lost bool) (berth.Ending, *failure) {
	if lost && c.spoke {
		return e, nil // it had ended its work
	}
	e.Error, e.Class, e.RetryIn, e.NoRetry = f.text, f.class, f.retryAfter, true
	e.Notice = taskNotice(c.task, f.class)
	switch {
	case e.Uncounted && !lost:
		e.RetryIn = engineRetry
	case lost:
		e.Uncounted, e.NoRetry, e.RetryIn = false, false, time.Millisecond
	case f.class == protocol.ClassRateLimit:
		e.NoRetry = false
	case f.class == protocol.ClassStaleSession && !c.ownSession():
		e.DropSession, e.NoRetry, e.RetryIn = true, false, time.Millisecond
	case f.class == "" && c.task.IsHeartbeat():
		e.NoRetry, e.Backoff = false, heartbeatBackoff
	}
	return e, f
}

// taskNotice is what a chat is told of a task that does not come again, or fails
// again and again.
func taskNotice(t berth.Task, class string) string {
	return "A scheduled task failed: " + excerpt(t.Prompt) + "\n" + reason(class)
}
