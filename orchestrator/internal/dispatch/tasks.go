package dispatch

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
)

// TaskStore is where tasks are kept; they are as in package sqlite.
type TaskStore interface {
	DueTasks(ctx context.Context, now time.Time) (due []berth.Due, next time.Time, err error)
	SkipTask(ctx context.Context, d berth.Due, now time.Time) error
	ReplanTasks(ctx context.Context, now time.Time) (moved int, err error)
	PauseTask(ctx context.Context, folder, id, by, origin string) (berth.Task, error)
	AddAudit(context.Context, berth.Audit) error
}

const (
	maxLook   = 3 * time.Minute // between two looks at the clock: it may have been set
	lookAgain = time.Second     // after the store did not answer
	clockSlip = time.Second     // that a clock may be off from the time that passed

	// lateness is how late a task may be without being missed. Waiting for a slot
	// does not count.
	lateness = time.Minute
)

// tasks is what the Dispatcher knows about tasks that are due.
type tasks struct {
	changed func(folder string)
	now     func() time.Time                      // by the clock on the wall
	watch   func(context.Context) <-chan struct{} // tells when that is set
	wake    chan struct{}
	running sync.Mutex // RunTasks is

	// For the goroutine of RunTasks alone.
	seen   time.Time // the time of the last look
	atSeen time.Time // the monotonic clock then

	mu     sync.Mutex
	awake  bool // tasks may start
	replan bool
	handed map[taskName]bool // to the queue, and their run has not ended
}

type taskName struct{ folder, id string }

func newTasks(changed func(folder string)) *tasks {
	if changed == nil {
		changed = func(string) {}
	}
	return &tasks{changed: changed, now: time.Now, watch: watchClock, wake: make(chan struct{}, 1), handed: make(map[taskName]bool)}
}

// RunTasks hands tasks to the queue as they become due, until ctx ends, and none
// before the first Start or between Pause and Start. While it runs, another call
// returns at once.
//
// A task that became due while nobody looked is started once, or passed over if
// it does not catch up. One whose group is not registered, or has another chat
// now, is paused and closes nobody's run.
func (d *Dispatcher) RunTasks(ctx context.Context) error {
	if !d.tasks.running.TryLock() {
		return nil
	}
	defer d.tasks.running.Unlock()
	clockSet := d.tasks.watch(ctx)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.tasks.wake:
		case <-timer.C:
		case <-clockSet:
			d.tasks.plan()
		}
		timer.Reset(d.lookForTasks(ctx))
	}
}

// TasksChanged says that tasks in the store were added or changed: all of a
// folder's, or of any if it is empty. It does not block.
func (d *Dispatcher) TasksChanged(folder string) {
	d.tasks.look()
	if folder != "" {
		d.tasks.changed(folder)
	}
}

func (t *tasks) look() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// plan has the next look compute all times anew.
func (t *tasks) plan() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.replan = true
}

// letStart says whether tasks may start.
func (t *tasks) letStart(may bool) {
	t.mu.Lock()
	t.replan = t.replan || may && !t.awake
	t.awake = may
	t.mu.Unlock()
	t.look()
}

// hand notes that a task is handed to the queue; it reports false if it was.
func (t *tasks) hand(n taskName) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.handed[n] {
		return false
	}
	t.handed[n] = true
	return true
}

// ended says that the run of a task is over, or was none. If the store still has
// it due, it is not started again before retry.
func (t *tasks) ended(folder, id string, retry time.Time) {
	free := func() {
		t.mu.Lock()
		delete(t.handed, taskName{folder, id})
		t.mu.Unlock()
		t.look()
	}
	if wait := time.Until(retry); wait > 0 {
		time.AfterFunc(wait, free)
		return
	}
	free()
}

// lookForTasks hands over what is due, and returns how long nothing else will be.
func (d *Dispatcher) lookForTasks(ctx context.Context) time.Duration {
	t := d.tasks
	now, mono := t.now(), time.Now()
	t.mu.Lock()
	awake, replan := t.awake, t.replan
	t.mu.Unlock()
	if !awake {
		return maxLook
	}
	if slip := now.Round(0).Sub(t.seen.Round(0)) - mono.Sub(t.atSeen); !t.seen.IsZero() && slip.Abs() > clockSlip {
		d.log.Info("the clock was set", zap.Duration("by", slip))
		t.plan()
		replan = true
	}
	t.seen, t.atSeen = now, mono
	if replan {
		moved, err := d.store.ReplanTasks(ctx, now)
		if err != nil {
			return d.lookLater(ctx, err)
		}
		if moved > 0 {
			d.log.Info("next times of tasks computed anew", zap.Int("tasks", moved))
		}
		t.mu.Lock()
		t.replan = false
		t.mu.Unlock()
	}
	due, next, err := d.store.DueTasks(ctx, now)
	if err != nil {
		return d.lookLater(ctx, err)
	}
	for _, task := range due {
		if err := d.handOver(ctx, task, now); err != nil {
			return d.lookLater(ctx, err)
		}
	}
	if next.IsZero() {
		return maxLook
	}
	return min(max(next.Sub(t.now()), 0), maxLook)
}

func (d *Dispatcher) lookLater(ctx context.Context, err error) time.Duration {
	if ctx.Err() == nil {
		d.log.Error("look for tasks that are due", zap.Error(err))
	}
	return lookAgain
}

func (d *Dispatcher) handOver(ctx context.Context, task berth.Due, now time.Time) error {
	name := taskName{task.Folder, task.ID}
	if g, ok := d.Group(task.Folder); !ok || g.JID != task.ChatJID {
		return d.orphaned(ctx, task)
	}
	if !d.tasks.hand(name) {
		return nil
	}
	if task.CatchUp == berth.CatchUpSkip && now.Sub(task.At) > lateness {
		defer d.tasks.ended(task.Folder, task.ID, time.Time{})
		if err := d.store.SkipTask(ctx, task, now); err != nil {
			return err
		}
		d.log.Info("task passed over", zap.String("group", task.Folder), zap.String("task", task.ID), zap.Time("due", task.At))
		d.tasks.changed(task.Folder)
		return nil
	}
	d.queue.AddTask(task.Folder, task.ID)
	crash.At(crash.TaskDue)
	return nil
}

// orphaned pauses a task that has nobody to run it, and tells the operator.
func (d *Dispatcher) orphaned(ctx context.Context, task berth.Due) error {
	const why = "its group is not registered any more"
	_, err := d.store.PauseTask(ctx, task.Folder, task.ID, why, "")
	if known, ok := errors.AsType[*berth.Error](err); ok && known.Kind == berth.NotFound {
		return nil // it was cancelled meanwhile
	} else if err != nil {
		return err
	}
	d.log.Warn("task paused", zap.String("group", task.Folder), zap.String("task", task.ID), zap.String("reason", why))
	d.tasks.changed(task.Folder)
	return d.store.AddAudit(ctx, berth.Audit{At: time.Now(), Folder: task.Folder, What: "task.due", Target: task.ID, Reason: "paused: " + why})
}
