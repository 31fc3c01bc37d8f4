package turn

import (
	"fmt"
	"time"

	"berth/orchestrator/internal/berth"
)

// claimTolerance is how long a runner may leave a batch untaken without a sign
// of life. A turn under way beats more often, even if its engine does not move.
const claimTolerance = time.Minute

// claim is a batch that was given to the runner and that it has not taken.
type claim struct {
	id    string
	since time.Time // zero: not known, it counts for nothing
}

// signs is what is known of how a run is.
type signs struct {
	started time.Time // since when this daemon watches
	ready   time.Time // of the first ready frame; zero: none was seen
	open    time.Time // since when the stream is heard; zero: it is broken
	heard   time.Time // of the last valid frame; zero: none was seen
	claims  []claim
	ceiling time.Duration // of silence
}

// verdict is what follows from the signs: the run is stuck, and why, or it is to
// be looked at again.
type verdict struct {
	stuck string
	next  time.Time // zero: nothing to wait for
}

// judge decides at the time now whether a run is stuck.
//
// Silence is counted from the last frame, or from what was given to the run
// since; whatever it has to do, it must not last for the ceiling.
//
// A claim may be held against a runner much sooner, but only if it said ready:
// an older runner says nothing between its results, which may take as long as
// they like, and a container that is slow to start cannot have taken anything.
// So a claim is as old as the ready frame at most, and all the time before
// counts towards the ceiling alone. Any frame since shows that the runner lives.
// While nobody hears the stream silence proves nothing, so the tolerance starts
// when it is open again and the runner was asked for its state.
func judge(now time.Time, s signs) verdict {
	silent := latest(s.started, s.heard)
	for _, c := range s.claims {
		silent = latest(silent, c.since)
	}
	if silent.IsZero() {
		return verdict{}
	}
	next := silent.Add(s.ceiling)
	if !now.Before(next) {
		return verdict{stuck: fmt.Sprintf("the container gave no sign of life for %v, of at most %v: timed out",
			now.Sub(silent).Round(time.Second), s.ceiling)}
	}
	for _, c := range s.claims {
		if c.since.IsZero() || s.ready.IsZero() || s.open.IsZero() {
			continue
		}
		given := latest(c.since, s.ready)
		if s.heard.After(given) {
			continue
		}
		due := latest(given, s.open).Add(claimTolerance)
		if !now.Before(due) {
			return verdict{stuck: fmt.Sprintf("the runner did not take message %.80q for %v, of at most %v, and gave no sign of life since: timed out",
				c.id, now.Sub(given).Round(time.Second), claimTolerance)}
		}
		if due.Before(next) {
			next = due
		}
	}
	return verdict{next: next}
}

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// judge is judge for the run as it is now.
func (l *loop) judge() verdict {
	s := l.signs
	for _, b := range l.batches {
		if b.State == berth.BatchSent {
			s.claims = append(s.claims, claim{id: b.AckID, since: l.given})
		}
	}
	if l.compaction.id != 0 && !l.compaction.taken {
		s.claims = append(s.claims, claim{id: l.compaction.ackID(), since: l.given})
	}
	return judge(time.Now(), s)
}

// watch sets the timer to when the run has to be looked at next. One that is
// being stopped is looked at no more.
func (l *loop) watch() {
	l.look.Stop()
	if v := l.judge(); l.run.State != berth.RunStopping && (v.stuck != "" || !v.next.IsZero()) {
		l.look.Reset(time.Until(v.next)) // at once if it is stuck
	}
}

// stopIfStuck ends a run that is stuck.
func (l *loop) stopIfStuck() {
	if v := l.judge(); v.stuck != "" {
		l.fail(&failure{text: v.stuck})
		l.stop()
	}
}
