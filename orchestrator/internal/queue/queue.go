// Package queue decides which group runs when: one run a group, a fixed number
// of slots over all, a first-in-first-out line of groups that wait, and room
// made by closing the run that has been idle longest. Within a group tasks go
// before messages; a run is for one task or for messages, never for both. It
// does no I/O and knows nothing of containers; it may be lost at any moment,
// since what it holds can be read from the store again.
package queue

import (
	"context"
	"slices"
	"sync"
	"time"
)

// HoldDown is how long a run that has become idle is kept from making room for
// another group, so that a person's quick follow-up does not meet a closing run.
// Runs that are idle for longer go first. It is granted once: a run that at the
// end of its turn has more to do while others wait makes room at once, and so
// does one that went on working while they waited.
const HoldDown = time.Second

// Result is what a run leaves behind.
type Result struct {
	Again   bool      // the group has messages to answer
	RetryAt time.Time // they are not tried before this; of no effect after a task
}

// Reason says why a run is to close.
type Reason string

// The reasons for closing a run.
const (
	ReasonIdle     Reason = "idle for too long"
	ReasonEvicted  Reason = "another group waits for the slot"
	ReasonTask     Reason = "a task of the group is due"
	ReasonTaskDone Reason = "the task is done"
	ReasonStopped  Reason = "stopped by the operator"
	ReasonRenewed  Reason = "the next message begins a new session"
	ReasonShutdown Reason = "the daemon shuts down"
)

// Queue is the pool and its waiting line. Its methods may be called from any
// goroutine and do not block, Shutdown excepted.
type Queue struct {
	start func(context.Context, *Slot) Result
	limit int
	idle  time.Duration
	wg    sync.WaitGroup

	mu     sync.Mutex
	groups map[string]*group
	line   []string    // groups that wait for a slot, first come first
	room   *time.Timer // runs until the next hold-down is over that a group in the line waits for
	used   int
	paused bool
	closed bool
}

type group struct {
	pending bool        // there may be messages to answer
	tasks   []string    // that wait, first come first
	slot    *Slot       // the live run, if any
	hold    *time.Timer // runs until the next attempt at the messages
}

// New returns a queue with limit slots, at least one. start carries one run to
// its end and is called in a goroutine of its own; when it returns the slot is
// free. A context that ends asks it to leave the run alone and return at once.
// A run that is idle for the time idle is closed.
func New(limit int, idle time.Duration, start func(context.Context, *Slot) Result) *Queue {
	return &Queue{start: start, limit: max(limit, 1), idle: idle, groups: make(map[string]*group)}
}

// Add says that a group has messages to answer: its idle run is woken, or it
// joins the line. Adding it again changes nothing.
func (q *Queue) Add(folder string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	g := q.groupLocked(folder)
	g.pending = true
	if g.slot != nil {
		g.slot.wakeLocked()
		return
	}
	q.waitLocked(folder, g)
	q.dispatchLocked()
}

// AddTask says that a task of a group is due. It gets a run of its own, before
// the group's messages and after the tasks that were added before it: an idle
// run is closed for it at once, a busy one when its turn is over. A task that
// waits or runs already is not added again, but one whose run is sealed is. It is
// started once, whatever becomes of it.
func (q *Queue) AddTask(folder, id string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	g := q.groupLocked(folder)
	if slices.Contains(g.tasks, id) || g.slot != nil && g.slot.task == id && !g.slot.closing {
		return
	}
	g.tasks = append(g.tasks, id)
	if g.slot != nil {
		if g.slot.idle {
			g.slot.closeLocked(ReasonTask)
		}
		return
	}
	q.waitLocked(folder, g)
	q.dispatchLocked()
}

// Hold keeps a group's messages from being tried before a time. Its tasks do
// not wait for that.
func (q *Queue) Hold(folder string, until time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.holdLocked(folder, q.groupLocked(folder), until)
}

// Adopt gives a slot to a run that already exists, for a task or, with an empty
// id, for messages, beyond the limit if need be. It reports false if the group has
// a run.
func (q *Queue) Adopt(folder, id string, carry func(context.Context, *Slot) Result) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	g := q.groupLocked(folder)
	if g.slot != nil {
		return false
	}
	g.tasks = slices.DeleteFunc(g.tasks, func(t string) bool { return t == id })
	q.startLocked(folder, g, id, carry)
	return true
}

// Pause stops new runs from starting; Resume lets them start again.
func (q *Queue) Pause() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.paused = true
}

// Resume undoes Pause.
func (q *Queue) Resume() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.paused = false
	q.dispatchLocked()
}

// Close closes the run of a group. It reports false if there is none.
func (q *Queue) Close(folder string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	g, ok := q.groups[folder]
	if !ok || g.slot == nil {
		return false
	}
	g.slot.closeLocked(ReasonStopped)
	return true
}

// Interrupt has the run of a group end its turn. It reports false if there is none,
// or if it is idle.
func (q *Queue) Interrupt(folder string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	g, ok := q.groups[folder]
	if !ok || g.slot == nil || g.slot.idle || g.slot.rested {
		return false
	}
	select {
	case g.slot.interrupted <- struct{}{}:
	default:
	}
	return true
}

// Renew lets the run of a group, if there is one, answer nothing after the turn that
// it is at: an idle run is closed at once, a busy one when its turn is over.
func (q *Queue) Renew(folder string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	g, ok := q.groups[folder]
	if !ok || g.slot == nil {
		return
	}
	g.slot.renewed = true
	if g.slot.idle {
		g.slot.closeLocked(ReasonRenewed)
	}
}

// Shutdown starts nothing any more, closes the idle runs and tells the others
// to let go, and waits until all have returned. When ctx ends first, it tells
// every run to let go and waits for that.
func (q *Queue) Shutdown(ctx context.Context) {
	q.mu.Lock()
	q.closed = true
	q.line = nil
	if q.room != nil {
		q.room.Stop()
	}
	for _, g := range q.groups {
		if g.hold != nil {
			g.hold.Stop()
		}
		if g.slot == nil {
			continue
		}
		if g.slot.idle {
			g.slot.closeLocked(ReasonShutdown)
		}
		if !g.slot.closing {
			g.slot.cancel()
		}
	}
	q.mu.Unlock()

	letGo := context.AfterFunc(ctx, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		for _, g := range q.groups {
			if g.slot != nil {
				g.slot.cancel()
			}
		}
	})
	defer letGo()
	q.wg.Wait()
}

// State is a view of the queue.
type State struct {
	Limit, Used int
	Waiting     []string
}

// State returns how full the pool is and who waits.
func (q *Queue) State() State {
	q.mu.Lock()
	defer q.mu.Unlock()
	return State{Limit: q.limit, Used: q.used, Waiting: slices.Clone(q.line)}
}

func (q *Queue) groupLocked(folder string) *group {
	g, ok := q.groups[folder]
	if !ok {
		g = &group{}
		q.groups[folder] = g
	}
	return g
}

// waitLocked puts a group without a run into the line, if it has anything that
// may start.
func (q *Queue) waitLocked(folder string, g *group) {
	if (len(g.tasks) > 0 || g.pending && g.hold == nil) && !slices.Contains(q.line, folder) {
		q.line = append(q.line, folder)
	}
}

// leaveLocked takes a group out of the line. A group in the line has no run.
func (q *Queue) leaveLocked(folder string) {
	q.line = slices.DeleteFunc(q.line, func(f string) bool { return f == folder })
}

func (q *Queue) holdLocked(folder string, g *group, until time.Time) {
	if q.closed {
		return
	}
	if g.hold != nil {
		g.hold.Stop()
	}
	if len(g.tasks) == 0 {
		q.leaveLocked(folder)
	}
	var timer *time.Timer
	timer = time.AfterFunc(time.Until(until), func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if g.hold != timer || q.closed {
			return
		}
		g.hold = nil
		if g.slot == nil {
			q.waitLocked(folder, g)
			q.dispatchLocked()
		}
	})
	g.hold = timer
}

// dispatchLocked is the only place that starts runs from the line, and the only
// one that makes room for it.
func (q *Queue) dispatchLocked() {
	if q.paused || q.closed {
		return
	}
	for len(q.line) > 0 && q.used < q.limit {
		folder := q.line[0]
		g := q.groups[folder]
		task := ""
		if len(g.tasks) > 0 {
			task, g.tasks = g.tasks[0], g.tasks[1:]
		} else {
			g.pending = false
		}
		q.startLocked(folder, g, task, q.start)
	}
	q.evictLocked()
}

// evictLocked closes one idle run, the longest idle first, for each group in
// the line that no closing run makes room for. Busy runs are left alone, and
// idle ones until their hold-down is over; then it looks again.
func (q *Queue) evictLocked() {
	if q.room != nil {
		q.room.Stop()
	}
	if q.paused || q.closed {
		return
	}
	closing := 0
	var idle []*Slot
	for _, g := range q.groups {
		switch {
		case g.slot == nil:
		case g.slot.closing:
			closing++
		case g.slot.idle:
			idle = append(idle, g.slot)
		}
	}
	slices.SortFunc(idle, func(a, b *Slot) int { return a.ripe.Compare(b.ripe) })
	for _, s := range idle[:min(len(idle), max(0, len(q.line)-closing))] {
		if wait := time.Until(s.ripe); wait > 0 {
			q.room = time.AfterFunc(wait, func() {
				q.mu.Lock()
				defer q.mu.Unlock()
				q.evictLocked()
			})
			return
		}
		s.closeLocked(ReasonEvicted)
	}
}

func (q *Queue) startLocked(folder string, g *group, task string, carry func(context.Context, *Slot) Result) {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Slot{Folder: folder, task: task, q: q, g: g, cancel: cancel, wake: make(chan struct{}, 1), interrupted: make(chan struct{}, 1), closed: make(chan struct{})}
	g.slot = s
	q.leaveLocked(folder)
	q.used++
	q.wg.Go(func() {
		var result Result
		defer func() { q.done(s, result) }() // also when the run panics
		result = carry(ctx, s)
	})
}

func (q *Queue) done(s *Slot, r Result) {
	s.cancel()
	q.mu.Lock()
	defer q.mu.Unlock()
	s.stopIdleLocked()
	g := s.g
	g.slot = nil
	q.used--
	g.pending = g.pending || r.Again
	if s.task == "" && time.Until(r.RetryAt) > 0 {
		q.holdLocked(s.Folder, g, r.RetryAt)
	}
	if !q.closed {
		q.waitLocked(s.Folder, g)
	}
	q.dispatchLocked()
	if g.slot == nil && !g.pending && len(g.tasks) == 0 && g.hold == nil {
		delete(q.groups, s.Folder)
	}
}
