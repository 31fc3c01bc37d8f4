// Package ipc takes the requests that containers drop as files, asks whether
// the group may do what it asks for, does it, and answers what became of it. The
// folder that a file lies in is who asks, whatever the file claims; everything in
// it is hostile.
package ipc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/workspace"
)

// What one group may cost. What is over the budget stays where it lies until
// there is room; nothing is lost.
const (
	requestRate  = 5 // a second, after a burst
	requestBurst = 60
	maxRequest   = 1 << 20          // bytes of one file
	maxLook      = 4 << 20          // bytes that one look reads
	closeGrace   = 10 * time.Second // for requests over the budget when a run ends
	storeRetry   = time.Second
	pollEvery    = 500 * time.Millisecond // where there are no events

	eventRate  = 500 // a second, after a burst; beyond it a look a second has to do
	eventBurst = 1000
	eventPause = time.Second

	warnEvery = 10 * time.Second // after a burst
	warnBurst = 10
)

// folders are where requests come from, in the order in which one look takes
// them.
var folders = []string{"messages", "tasks"}

// Store keeps what was accepted, and what was refused. Tasks are as in package
// sqlite; errors of kind berth.Unavailable, or of none, are no answer: the
// request is carried out again later, under the same idempotency key.
type Store interface {
	AddOutgoing(context.Context, ...berth.Outgoing) error
	AddAudit(context.Context, berth.Audit) error
	AddTask(context.Context, berth.Task) (berth.Task, error)
	UpdateTask(ctx context.Context, folder, id string, c berth.TaskChange, now time.Time, origin string) (berth.Task, error)
	PauseTask(ctx context.Context, folder, id, by, origin string) (berth.Task, error)
	ResumeTask(ctx context.Context, folder, id string, now time.Time, origin string) (berth.Task, error)
	CancelTask(ctx context.Context, folder, id, origin string) (berth.Task, error)
	TaskChangedBy(ctx context.Context, origin string) (t berth.Task, ok bool, err error)
	Task(ctx context.Context, folder, id string) (berth.Task, error)
	TasksNamed(ctx context.Context, id string) ([]berth.Task, error)
	Tasks(ctx context.Context, folder string) ([]berth.Task, error)
	TaskRuns(ctx context.Context, folder, id string, limit int) ([]berth.TaskRun, error)
	Chats(ctx context.Context, limit int) ([]berth.Chat, error)
	Outgoing(ctx context.Context, key string) (o berth.Outgoing, ok bool, err error)
	MessagesAfter(ctx context.Context, chatJID string, seq int64, limit int) ([]berth.Message, error)
	MemoryStore
}

// Groups knows the registered groups. It is called from many goroutines.
type Groups interface {
	Group(folder string) (berth.Group, bool)
	Registered(chatJID string) bool
	Groups() []berth.Group
	AddGroup(context.Context, berth.Group) error
}

// Options are what a Service works with.
type Options struct {
	Store    Store
	Groups   Groups
	Zone     *time.Location // of tasks that name none
	ErrorDir string         // for files that cannot be used
	// TasksChanged is called after a request changed tasks, from many
	// goroutines, and must not block. If it is nil nobody runs tasks, and
	// requests about them are refused.
	TasksChanged func()
	// SyncChats asks the channels which chats there are; main's requests wait
	// for it. It may be nil.
	SyncChats func(context.Context) error
	Log       *zap.Logger
}

// Service takes requests of all groups. Its methods are safe for concurrent use.
type Service struct {
	Options

	mu      sync.Mutex
	open    map[string]*inbox  // by folder
	budgets map[string]*budget // by folder; they outlive a run
}

// New returns a Service.
func New(o Options) *Service {
	return &Service{Options: o, open: make(map[string]*inbox), budgets: make(map[string]*budget)}
}

// budget is what a group has left.
type budget struct {
	requests, warnings, events *rate.Limiter
	silent                     int // warnings that were not logged
}

func (s *Service) budget(folder string) *budget {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.budgets[folder]
	if b == nil {
		b = &budget{
			requests: rate.NewLimiter(requestRate, requestBurst),
			warnings: rate.NewLimiter(rate.Every(warnEvery), warnBurst),
			events:   rate.NewLimiter(eventRate, eventBurst),
		}
		s.budgets[folder] = b
	}
	return b
}

// Open implements turn.Requests. It writes the snapshots of the group. Each inbox
// has a goroutine of its own, so that no group can slow another.
func (s *Service) Open(ctx context.Context, g berth.Group, files *workspace.Group) (turn.Inbox, error) {
	b := s.inbox(ctx, g, files)
	end, err := b.subscribe()
	if err != nil {
		// Watches are counted by user, and containers may be of the same one.
		b.log.Warn("no events of the IPC folders; looking every so often instead", zap.Duration("every", pollEvery), zap.Error(err))
		b.every = pollEvery
	}
	s.mu.Lock()
	s.open[g.Folder] = b
	s.mu.Unlock()
	b.snapshots(b.ctx)
	b.wg.Go(func() {
		defer end()
		b.watch()
	})
	return b, nil
}

func (s *Service) inbox(ctx context.Context, g berth.Group, files *workspace.Group) *inbox {
	return &inbox{
		Service: s, alive: ctx, group: g, files: files, budget: s.budget(g.Folder), every: protocol.LookAgain, again: time.NewTimer(0),
		closed: make(chan struct{}), stale: make(chan struct{}, 1), left: true, log: s.Log.With(zap.String("group", g.Folder)),
		// Files accepted are carried out even while the daemon shuts down.
		ctx: context.WithoutCancel(ctx),
	}
}

// Refresh has the snapshots of running groups written anew, soon: of those named,
// or of all, and of main in any case. It does not block.
func (s *Service) Refresh(folders ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for folder, b := range s.open {
		if len(folders) == 0 || folder == berth.MainFolder || slices.Contains(folders, folder) {
			select {
			case b.stale <- struct{}{}:
			default:
			}
		}
	}
}

type inbox struct {
	*Service
	ctx    context.Context // outlives the daemon's
	alive  context.Context // ends with the daemon
	group  berth.Group
	files  *workspace.Group
	budget *budget
	events chan fsnotify.Event // nil: there are none
	faults chan error
	every  time.Duration // between looks that no event announced
	again  *time.Timer   // there is more to do than the budget allowed
	over   atomic.Bool   // so it is now, and events tell nothing new
	stale  chan struct{} // the snapshots are
	closed chan struct{}
	log    *zap.Logger
	wg     sync.WaitGroup

	mu      sync.Mutex // one look at a time, so that files keep their order
	waiting []string   // taken, not carried out, oldest first
	left    bool       // an earlier inbox may have left some
	stuck   bool       // it was told that something cannot be removed
	answers []answered // that lie there, oldest first
	size    int        // of all answers, in bytes
}

// subscribe has the kernel tell of files. end, which is never nil, undoes it.
func (b *inbox) subscribe() (end func(), err error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return func() {}, err
	}
	for _, dir := range folders {
		if err := watcher.Add(b.files.Path(dir)); err != nil {
			return func() {}, errors.Join(err, watcher.Close())
		}
	}
	b.events, b.faults = watcher.Events, watcher.Errors
	return func() { watcher.Close() }, nil
}

// watch looks whenever a file arrives, and every few seconds in case an event
// was lost.
func (b *inbox) watch() {
	tick := time.NewTicker(b.every)
	defer tick.Stop()
	calm := time.NewTimer(0) // after too many events
	defer calm.Stop()
	events := b.events
	for {
		select {
		case <-b.closed:
			return
		case e := <-events:
			if !b.budget.events.Allow() {
				// The kernel drops what nobody reads, at no cost to us.
				events = nil
				calm.Reset(eventPause)
			}
			if b.over.Load() || !e.Has(fsnotify.Create) || !strings.HasSuffix(e.Name, ".json") {
				continue
			}
		case err := <-b.faults:
			b.log.Debug("watch the IPC folders", zap.Error(err))
		case <-calm.C:
			events = b.events
		case <-b.stale:
			b.mu.Lock()
			b.snapshots(b.ctx)
			b.mu.Unlock()
			continue
		case <-b.again.C:
		case <-tick.C:
			if b.over.Load() {
				continue
			}
		}
		b.Drain(b.ctx)
	}
}

// Close drains a last time and ends the watch. Requests over the budget are
// waited for a while, unless the daemon shuts down; those that are left then are
// the first of the group's next run.
func (b *inbox) Close() {
	close(b.closed)
	b.wg.Wait()
	defer b.again.Stop()
	for grace := time.Now().Add(closeGrace); ; {
		b.Drain(b.ctx)
		if !b.over.Load() || time.Now().After(grace) {
			break
		}
		select {
		case <-b.again.C:
			continue
		case <-b.alive.Done():
		}
		break
	}
	b.Service.mu.Lock()
	if b.open[b.group.Folder] == b {
		delete(b.open, b.group.Folder)
	}
	b.Service.mu.Unlock()
}

// Drain handles the files that lie there, in order, within the budget.
func (b *inbox) Drain(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	wait := b.look(ctx)
	if wait > 0 {
		b.again.Reset(wait)
	}
	b.over.Store(wait > 0)
}

// look handles what the budget allows. It returns how long the rest, if any, has
// to wait.
func (b *inbox) look(ctx context.Context) (wait time.Duration) {
	if b.left {
		names, err := b.files.Taken()
		if err != nil {
			b.log.Warn("list requests", zap.Error(err))
		}
		b.waiting, b.left = names, err != nil
	}
	more := false
	for _, dir := range folders {
		more = b.take(ctx, dir) || more
	}
	room := maxLook
	for len(b.waiting) > 0 {
		n, ok := b.carryOut(ctx, b.waiting[0])
		if !ok {
			return storeRetry // it stays, and those after it
		}
		b.waiting = b.waiting[1:]
		if room -= n; room <= 0 {
			more = true
			break
		}
	}
	if !more && len(b.waiting) == 0 {
		return 0
	}
	if !b.over.Load() {
		b.warn("more requests than the budget allows; the rest waits", zap.Int("a second", requestRate))
	}
	return time.Second / requestRate
}

// take takes what the budget allows from a folder, and reports whether there is
// more. What cannot be a request is refused.
func (b *inbox) take(ctx context.Context, dir string) (more bool) {
	now := time.Now()
	if len(b.waiting) >= requestBurst {
		return true // the store does not take them
	}
	h, err := b.files.Take(dir, int(b.budget.requests.TokensAt(now)))
	if err != nil {
		b.warn("take requests", zap.Error(err))
	}
	b.waiting = append(b.waiting, h.Taken...)
	spent := len(h.Taken)
	for _, r := range h.Refused {
		if r.Left && b.stuck {
			continue
		}
		b.stuck = b.stuck || r.Left
		spent++
		if err := b.refused(ctx, fileVerb, dir+"/"+r.Name, r.Reason); err != nil {
			b.log.Error("record a refusal", zap.Error(err))
		}
	}
	b.budget.requests.AllowN(now, spent)
	return h.More
}

const fileVerb = "ipc.file" // what is no request of any kind

// carryOut handles one request, and returns how many bytes it had. It is removed
// when its effect is stored; a crash in between repeats it under the same key. ok
// is false if the store does not take it now.
func (b *inbox) carryOut(ctx context.Context, name string) (size int, ok bool) {
	data, err := b.files.ReadTaken(name, maxRequest)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, true
	}
	var r request
	if err == nil {
		r, err = parse(data)
	}
	if err != nil {
		if err := b.refused(ctx, fileVerb, name, err); err != nil {
			b.log.Error("record a refusal", zap.Error(err))
			return 0, false
		}
		b.quarantine(name, data, err)
		b.remove(name)
		return len(data), true
	}
	r.key = "ipc/" + b.group.Folder + "/" + name
	result, err := b.do(ctx, &r)
	if err != nil && !final(err) {
		b.log.Error("store a request", zap.Error(err))
		return 0, false
	}
	if err != nil {
		if err := b.refused(ctx, r.what(), r.target, errors.Join(err, r.secret)); err != nil {
			b.log.Error("record a refusal", zap.Error(err))
			return 0, false
		}
	}
	crash.At(crash.Requested)
	b.answer(r.id, result, err)
	b.remove(name)
	return len(data), true
}

// final reports whether an error is the answer to a request.
func final(err error) bool {
	known, ok := errors.AsType[*berth.Error](err)
	return ok && known.Kind != berth.Unavailable
}

func (b *inbox) remove(name string) {
	if err := b.files.RemoveTaken(name); err != nil {
		b.log.Warn("remove a request", zap.Error(err))
	}
}

// refused records a refusal for the operator.
func (b *inbox) refused(ctx context.Context, what, target string, reason error) error {
	why := strings.ReplaceAll(reason.Error(), "\n", "; ")
	b.warn("request refused", zap.String("what", what), zap.String("target", fmt.Sprintf("%.256s", target)), zap.String("reason", fmt.Sprintf("%.512s", why)))
	return b.Store.AddAudit(ctx, berth.Audit{At: time.Now(), Folder: b.group.Folder, What: what, Target: target, Reason: why})
}

// warn logs at most so often, and then how much it did not log. b.mu is held.
func (b *inbox) warn(text string, fields ...zap.Field) {
	if !b.budget.warnings.Allow() {
		b.budget.silent++
		return
	}
	if b.budget.silent > 0 {
		fields = append(fields, zap.Int("not logged before", b.budget.silent))
		b.budget.silent = 0
	}
	b.log.Warn(text, fields...)
}
