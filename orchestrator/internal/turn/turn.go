// Package turn carries one run: it gives a container its prompt and follow-ups,
// turns its frames into outgoing texts, and settles with the store what became
// of the messages when the container is gone.
package turn

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
	"berth/orchestrator/internal/mount"
	"berth/orchestrator/internal/queue"
	"berth/orchestrator/internal/workspace"
)

// Store is where the truth is kept. Every method is one transaction that is on
// disk when it returns; that of NextBatch may come there later, since a power cut
// ends the run as well.
type Store interface {
	BeginRun(context.Context, berth.Run) (berth.Batch, bool, error)
	BeginTask(context.Context, berth.Run) (berth.Task, bool, error)
	TaskOf(ctx context.Context, runID string) (t berth.Task, spoke bool, err error)
	NextBatch(ctx context.Context, runID, chatJID string) (berth.Batch, bool, error)
	SetContainer(ctx context.Context, runID, container string) error
	Commit(context.Context, berth.Progress) error
	FinishRun(context.Context, berth.Ending) (berth.Verdict, error)
	OpenBatches(ctx context.Context, runID string) ([]berth.Batch, error)
	MemoryPrompt(ctx context.Context, folder string) (string, error) // what a group's agent is to know
	Session(ctx context.Context, folder, engine string) (string, error)
	EndSession(ctx context.Context, folder, engine string, before time.Time, turns int) (ended string, err error)
	BeginCompaction(ctx context.Context, run berth.Run, nothing, failed string) (id int64, ok bool, err error)
	NextCompaction(ctx context.Context, runID, chatJID, failed string) (id int64, ok bool, err error)
	OpenCompaction(ctx context.Context, runID string) (id int64, ok bool, err error)
	EndCompaction(ctx context.Context, runID, text string) error
	Recent(ctx context.Context, chatJID string, limit int) ([]berth.Message, error) // of the chat, oldest first
}

// Requests takes what containers drop as files. Open starts to watch the folders
// of a group; files has to stay open until the Inbox is closed. Refresh has what
// running groups may read written anew, of those named and of main; it must not
// block.
type Requests interface {
	Open(ctx context.Context, g berth.Group, files *workspace.Group) (Inbox, error)
	Refresh(folders ...string)
}

// Inbox is the watched folders of one group. Drain returns when all that lay
// there was handled. Close drains a last time.
type Inbox interface {
	Drain(ctx context.Context)
	Close()
}

// Mounts decides which host folders a group gets.
type Mounts interface {
	Resolve(requests []berth.MountRequest, main bool) []mount.Verdict
}

// Gateway is the way out of containers that have no network.
type Gateway interface {
	// Open opens the door of a run, also of one that an earlier daemon left.
	Open(run berth.Run, g berth.Group) (Door, error)
}

// Door is one run's way out.
type Door interface {
	Mount() berth.Mount
	Socket() string // where the container finds it
	Close()         // the container lives on
	Remove() error  // the container is gone
}

// Config is what all runs share.
type Config struct {
	Assistant  string
	Image      func() (ref string, ready bool) // the default image
	Runner     string                          // host path of agent-runner, for images without a runner
	EngineName string
	// Options returns what the engine of a group is told: its model, its times. It
	// may be nil.
	Options     func(berth.Group) map[string]string
	Secrets     map[string]string // for images whose runner wants them on stdin; usually none
	Location    *time.Location
	MaxOutput   int64         // bytes of log a run
	Timeout     time.Duration // without a sign of life
	IdleTimeout time.Duration
	TaskTimeout time.Duration // for all of a task's run; 0: DefaultTaskTimeout
	Sessions    SessionLimits
	Memory      int64
	CPUs        float64
	Pids        int64
	Network     string
	Runtime     string
	Limits      Limits // of what a group asks for by itself
}

// Limits are the most that a group's own settings can give its container. Zero
// means no limit.
type Limits struct {
	Memory int64 // bytes
	CPUs   float64
	Pids   int64
}

// SessionLimits are when a chat begins a new session. Zero means never.
type SessionLimits struct {
	Age   time.Duration // since it began
	Turns int
}

// Deps are what a Runner works with.
type Deps struct {
	Store    Store
	Engine   Engine
	Tree     *workspace.Tree
	Mounts   Mounts
	Requests Requests
	Gateway  Gateway
	Typing   func(chatJID string, on bool) // must not block
	Rebuild  func(context.Context) error   // makes the default image again
	Log      *zap.Logger
}

// Runner carries runs. Its methods are safe for concurrent use.
type Runner struct {
	Config
	Deps

	mu     sync.Mutex
	live   map[string]*View           // by folder
	mounts map[string][]mount.Verdict // by folder
}

// View is what a person may see of a live run.
type View struct {
	Run   berth.Run
	Turns int       // that this daemon saw
	Since time.Time // of the last change of state
}

// New returns a Runner.
func New(c Config, d Deps) *Runner {
	return &Runner{Config: c, Deps: d, live: make(map[string]*View), mounts: make(map[string][]mount.Verdict)}
}

// LastMounts returns what became of the mounts that a group asked for, at the
// last run that this Runner started.
func (r *Runner) LastMounts(folder string) []mount.Verdict {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mounts[folder]
}

// Live returns the live runs by folder.
func (r *Runner) Live() map[string]View {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[string]View, len(r.live))
	for folder, v := range r.live {
		out[folder] = *v
	}
	return out
}

// Times of a run that ends.
const (
	closeGrace   = 10 * time.Second // for a runner to end after it was asked to
	drainGrace   = 5 * time.Second  // for the stream of an exited container to end
	engineRetry  = time.Second      // after a start that met no container engine
	tellInterval = 20 * time.Second // between two typing signs
)

// backoff is waited before the next attempt after the first failed run, the
// second, and so on.
var backoff = []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second, 80 * time.Second}

// Run starts a container for the slot's task, or else for what g's chat has
// pending, and carries it until it is gone, or until ctx ends: then the container
// is left running, for the next daemon to adopt. It starts none if there is
// nothing to do; a RetryAt in the result of a task says when to try again.
func (r *Runner) Run(ctx context.Context, slot *queue.Slot, g berth.Group) (result queue.Result) {
	defer r.guard(g, &result)
	now := time.Now()
	run := berth.Run{
		ID: berth.NewID(6), Folder: g.Folder, ChatJID: g.JID, Kind: berth.KindChat, Task: slot.Task(), State: berth.RunStarting,
		Image: g.Container.Image, Engine: g.Container.Engine, Nonce: berth.NewID(16), StartedAt: now,
	}
	if run.Engine == "" {
		run.Engine = r.EngineName
	}
	if run.Task != "" {
		run.Kind = berth.KindTask
	}
	log := r.logger(run)
	if run.Image == "" {
		ref, ready := r.Image()
		if !ready {
			return queue.Result{Again: run.Task == "", RetryAt: now.Add(engineRetry)}
		}
		run.Image = ref
	}
	c := &carrier{Runner: r, slot: slot, group: g, run: run, log: log}
	defer c.release()
	// Before the claim: a request that an earlier run left must not pass for an
	// answer of this one.
	unopened := c.open(ctx)
	ok, err := c.claim(ctx)
	if err != nil {
		log.Error("begin run", zap.Error(err))
		return queue.Result{Again: run.Task == "", RetryAt: now.Add(backoff[0])}
	}
	if !ok {
		return queue.Result{}
	}
	crash.At(crash.Claimed)
	if unopened != nil {
		return c.finish(ctx, Exit{Code: -1}, unopened)
	}
	if err := c.start(ctx); err != nil {
		return c.finish(ctx, Exit{Code: -1}, err)
	}
	return c.carry(ctx)
}

// claim records the run with what it is to do; ok is false if that is nothing.
func (c *carrier) claim(ctx context.Context) (ok bool, err error) {
	if c.run.Task != "" {
		if c.task, ok, err = c.Store.BeginTask(ctx, c.run); ok {
			c.Requests.Refresh(c.group.Folder)
		}
		return ok, err
	}
	b, ok, err := c.Store.BeginRun(ctx, c.run)
	if ok {
		c.batches = []berth.Batch{b}
	}
	if ok || err != nil {
		return ok, err
	}
	return c.beginCompaction(ctx)
}

func (r *Runner) logger(run berth.Run) *zap.Logger {
	log := r.Log.With(zap.String("group", run.Folder), zap.String("run", run.ID))
	if run.Task != "" {
		log = log.With(zap.String("task", run.Task))
	}
	return log
}

// Adopt carries a run that an earlier daemon started. If its container does not
// run any more, it delivers what the runner left, removes the container (id
// may be empty) and settles the run. taken is called when one of both is under
// way.
func (r *Runner) Adopt(ctx context.Context, slot *queue.Slot, g berth.Group, run berth.Run, container string, taken func()) (result queue.Result) {
	defer r.guard(g, &result)
	c := &carrier{Runner: r, slot: slot, group: g, run: run, adopted: true, log: r.logger(run)}
	defer c.release()
	later := queue.Result{Again: true, RetryAt: time.Now().Add(engineRetry)}
	var err error
	if c.batches, err = r.Store.OpenBatches(ctx, run.ID); err == nil && run.Task != "" {
		c.task, c.spoke, err = r.Store.TaskOf(ctx, run.ID)
	}
	if err == nil {
		err = c.adoptCompaction(ctx)
	}
	if err != nil {
		c.log.Error("adopt: read what it is to do", zap.Error(err))
		return later
	}
	if err = c.open(ctx); err == nil {
		err = c.enter()
	}
	if err != nil {
		c.log.Error("adopt: open the folders", zap.Error(err))
		if kind(err) == berth.Unavailable {
			return later
		}
		// Nobody can hear it or hold it to its time: it must not go on.
		if container != "" {
			if err := c.Engine.RemoveContainer(ctx, container); err != nil {
				c.log.Error("adopt: remove the container", zap.Error(err))
				return later
			}
		}
		return c.finish(ctx, Exit{Code: -1}, err)
	}
	c.box, err = r.Engine.Attach(ctx, run.ID)
	taken()
	if err == nil {
		crash.At(crash.Adopted)
		return c.carry(ctx)
	}
	if kind(err) != berth.NotFound {
		c.log.Warn("adopt: attach to the container", zap.Error(err))
		return later
	}
	return c.settle(ctx, container)
}

// guard keeps a panic in one run from ending the others. The run stays in the
// store, for the next reconcile to take over or to settle.
func (r *Runner) guard(g berth.Group, result *queue.Result) {
	if p := recover(); p != nil {
		r.Log.Error("panic in a run", zap.String("group", g.Folder), zap.Any("panic", p), zap.Stack("stack"))
		*result = queue.Result{}
	}
}

// carrier is one run on its way.
type carrier struct {
	*Runner
	slot    *queue.Slot
	group   berth.Group
	run     berth.Run
	log     *zap.Logger
	files   *workspace.Group
	runLog  *workspace.RunLog
	inbox   Inbox
	door    Door
	box     Box
	adopted bool

	ready      bool          // the runner speaks our protocol, not an older one
	task       berth.Task    // that the run is for, if any
	spoke      bool          // the task has a result
	batches    []berth.Batch // given to the run, turn not ended
	compaction compaction
	memory     string // what the agent was last told to remember
	failure    *failure
	absent     bool // the container engine could not be reached
	stderr     tail
}

// failure is why a run did not do what was asked.
type failure struct {
	text       string
	class      string
	retryAfter time.Duration
}

// open opens the run's folders, and takes the requests that lie there.
func (c *carrier) open(ctx context.Context) (err error) {
	if c.files, err = c.Tree.Group(c.group.Folder); err != nil {
		return err
	}
	if c.inbox, err = c.Requests.Open(ctx, c.group, c.files); err != nil {
		return err
	}
	c.inbox.Drain(ctx)
	return nil
}

// enter opens the run's log and its way out, and shows the run.
func (c *carrier) enter() (err error) {
	if c.runLog, err = c.files.OpenRunLog(c.run.ID, c.run.StartedAt, c.MaxOutput); err != nil {
		return err
	}
	if c.door, err = c.Gateway.Open(c.run, c.group); err != nil {
		return err
	}
	c.show(berth.RunStarting)
	return nil
}

// release closes what open and enter opened.
func (c *carrier) release() {
	if c.inbox != nil {
		c.inbox.Close()
	}
	if c.runLog != nil {
		c.runLog.Close()
	}
	if c.files != nil {
		c.files.Close()
	}
	if c.door != nil {
		c.door.Close()
	}
	c.mu.Lock()
	delete(c.live, c.group.Folder)
	c.mu.Unlock()
}

// start makes the container and hands it the first batch, or the task.
func (c *carrier) start(ctx context.Context) error {
	if err := c.files.BeginRun(); err != nil {
		return err
	}
	if err := c.enter(); err != nil {
		return err
	}
	verdicts := c.Mounts.Resolve(c.group.Container.AdditionalMounts, c.group.IsMain())
	c.mu.Lock()
	c.mounts[c.group.Folder] = verdicts
	c.mu.Unlock()
	skills, err := c.files.Skills()
	if err != nil { // it can work without them
		c.log.Warn("the skills are left out", zap.Error(err))
		c.runLog.Notef("the skills are left out: %v", err)
	}
	mounts := append(slices.Concat(c.files.Mounts(), skills), c.door.Mount())
	var started func(pid int) error
	for _, v := range verdicts {
		if !v.Allowed {
			c.log.Warn("mount refused", zap.String("path", v.Request.HostPath), zap.String("reason", v.Reason))
			c.runLog.Notef("mount of %q refused: %s", v.Request.HostPath, v.Reason)
			continue
		}
		mounts = append(mounts, v.Mount)
		started = func(pid int) error { return mount.Verify(pid, verdicts) }
	}
	input, err := c.input(ctx)
	if err != nil {
		return err
	}
	stdin, err := protocol.Marshal(input)
	if err != nil {
		return fmt.Errorf("encode the prompt: %w", err)
	}
	c.runLog.Notef("run %s of group %s: image %s, task %q, %d messages, session %q", c.run.ID, c.group.Folder, c.run.Image, c.run.Task, len(input.Batch), input.SessionID)
	created := func(id string) error {
		err := c.Store.SetContainer(ctx, c.run.ID, id)
		crash.At(crash.Created)
		return err
	}
	spec := c.spec(mounts)
	spec.Started = started
	c.box, err = c.Engine.Start(ctx, spec, stdin, created)
	if ref, _ := c.Image(); kind(err) == berth.NotFound && spec.Image == ref && c.Rebuild(ctx) == nil {
		// Somebody cleaned up the engine's images.
		c.box, err = c.Engine.Start(ctx, spec, stdin, created)
	}
	crash.At(crash.Prompted)
	c.absent = kind(err) == berth.Unavailable
	return err
}

// input is what the runner gets on stdin.
func (c *carrier) input(ctx context.Context) (in protocol.Input, err error) {
	in = protocol.Input{
		GroupFolder: c.group.Folder, ChatJID: c.group.JID, IsMain: c.group.IsMain(), AssistantName: c.Assistant,
		Protocol: protocol.Version, RunID: c.run.ID, Nonce: c.run.Nonce,
		Engine: c.run.Engine, Secrets: c.Secrets, Timezone: c.Location.String(), Gateway: c.door.Socket(),
	}
	if c.Options != nil {
		in.EngineOptions = c.Options(c.group)
	}
	if c.memory, err = c.Store.MemoryPrompt(ctx, c.group.Folder); err != nil {
		return in, err
	}
	in.SystemPrompt = c.memory
	if in.Isolated = c.ownSession(); !in.Isolated {
		if in.SessionID, err = c.session(ctx); err != nil {
			return in, err
		}
	}
	now := time.Now().In(c.Location)
	if c.compaction.id != 0 {
		m := c.compaction.message()
		in.Prompt, in.Compact, in.Batch = m.Text, true, []string{m.ID}
		return in, nil
	}
	if c.run.Task != "" {
		in.Prompt, in.IsScheduledTask, in.Script = taskPrompt(c.group, c.task, c.Assistant, now), true, c.task.Script
		if c.task.IsHeartbeat() {
			in.Prompt, err = c.heartbeatPrompt(ctx, in.Prompt)
		}
		return in, err
	}
	batch := c.batches[0]
	in.Prompt = prompt(c.group, batch, c.Assistant, now)
	for _, m := range batch.Messages {
		in.Batch = append(in.Batch, m.ID)
	}
	return in, nil
}

// session returns the session that the run goes on with; empty for a new one. What
// was said before in one that has become too old or too large, the runner archives.
func (c *carrier) session(ctx context.Context) (id string, err error) {
	if limits := c.Sessions; limits != (SessionLimits{}) && c.compaction.id == 0 {
		var before time.Time
		if limits.Age > 0 {
			before = time.Now().Add(-limits.Age)
		}
		ended, err := c.Store.EndSession(ctx, c.group.Folder, c.run.Engine, before, limits.Turns)
		if err != nil {
			return "", err
		}
		if ended != "" {
			c.log.Info("session ended: it is too old, or has had too many turns", zap.String("session", ended))
			c.runLog.Notef("session %s is too old, or has had too many turns: this run begins a new one", ended)
			return "", nil
		}
	}
	return c.Store.Session(ctx, c.group.Folder, c.run.Engine)
}

// ownSession reports whether the run has a session of its own, which nobody goes
// on with.
func (c *carrier) ownSession() bool {
	return c.run.Task != "" && c.task.Context != berth.ContextGroup
}

// kind returns the kind of an error; nil and unknown errors are internal.
func kind(err error) berth.Kind {
	known, ok := errors.AsType[*berth.Error](err)
	if !ok {
		return berth.Internal
	}
	return known.Kind
}

func (c *carrier) spec(mounts []berth.Mount) Spec {
	own := c.group.Container
	s := Spec{
		RunID: c.run.ID, Folder: c.group.Folder, Kind: c.run.Kind, Image: c.run.Image, Mounts: mounts,
		UID: c.Tree.UID(), GID: c.Tree.GID(), TZ: c.Location.String(),
		Memory: c.Memory, CPUs: c.CPUs, Pids: c.Pids, Network: c.Network, Runtime: c.Runtime, Runner: c.Runner.Runner,
	}
	if own.MemoryMiB > 0 {
		s.Memory = limited(c, "memory in MiB", own.MemoryMiB, c.Limits.Memory>>20) << 20
	}
	if own.CPUs > 0 {
		s.CPUs = limited(c, "processors", own.CPUs, c.Limits.CPUs)
	}
	if own.Pids > 0 {
		s.Pids = limited(c, "processes", own.Pids, c.Limits.Pids)
	}
	return s
}

// limited returns what the group asked for, or else the most that it may have, and
// then tells the operator.
func limited[N int64 | float64](c *carrier, what string, asked, most N) N {
	if most == 0 || asked <= most {
		return asked
	}
	c.log.Warn("the group asks for more than the operator's limit", zap.String("what", what), zap.Any("asked", asked), zap.Any("gets", most))
	c.runLog.Notef("the group asks for %v %s: it gets %v, the operator's limit (CONTAINER_MAX_…)", asked, what, most)
	return most
}

// timeout is how long the run may give no sign of life.
func (c *carrier) timeout() time.Duration {
	group := time.Duration(c.group.Container.TimeoutMS) * time.Millisecond
	return max(group, c.Timeout, c.IdleTimeout+30*time.Second)
}

// show publishes the run's state and tells the chat whether somebody writes.
func (c *carrier) show(state berth.RunState) {
	c.mu.Lock()
	v, ok := c.live[c.group.Folder]
	if !ok {
		v = &View{}
		c.live[c.group.Folder] = v
	}
	if v.Run.State != state {
		v.Since = time.Now()
	}
	c.run.State = state
	v.Run = c.run
	if c.box != nil {
		v.Run.Container = c.box.ID()
	}
	if state == berth.RunBusy {
		v.Turns++
	}
	c.mu.Unlock()
	c.tellTyping(state == berth.RunStarting || state == berth.RunBusy)
}

// tellTyping tells the chat whether somebody writes. Nobody waits for a task.
func (c *carrier) tellTyping(on bool) {
	if c.run.Task == "" {
		c.Typing(c.group.JID, on)
	}
}

// settle ends a run whose container is not running: what it left in files is
// delivered, the rest is pending again and nobody's failure.
func (c *carrier) settle(ctx context.Context, container string) queue.Result {
	l := newLoop(ctx, c, nil)
	defer l.end()
	l.collect(0)
	if container != "" && !l.persist("remove the container", func(ctx context.Context) error { return c.Engine.RemoveContainer(ctx, container) }) {
		return queue.Result{}
	}
	return c.finish(ctx, Exit{Code: -1}, errGone)
}

var errGone = berth.Errorf(berth.Unavailable, "the container ended while no daemon was there")

// finish settles with the store what became of the run. start is the error of a
// container that never ran. If ctx ends before the store takes it, the next
// daemon settles the run.
func (c *carrier) finish(ctx context.Context, exit Exit, start error) queue.Result {
	c.slot.Seal()
	crash.At(crash.Exited)
	if c.inbox != nil {
		c.inbox.Drain(ctx)
	}
	e, f := c.ending(exit, start)
	if c.box != nil || c.adopted { // a container that never ran took nothing
		e.Taken = c.taken()
	}
	if start != nil && ctx.Err() != nil {
		e.Uncounted = true // the daemon shut down in the middle of it
	}
	var v berth.Verdict
	if !c.persist(ctx, "record the end of the run", func(ctx context.Context) (err error) {
		v, err = c.Store.FinishRun(context.WithoutCancel(ctx), e)
		return err
	}) {
		return queue.Result{}
	}
	if c.door != nil {
		if err := c.door.Remove(); err != nil {
			c.log.Warn("remove the run's way out", zap.Error(err))
		}
	}
	c.tellTyping(false)
	if c.run.Task != "" {
		crash.At(crash.TaskDone)
		c.Requests.Refresh(c.group.Folder)
	}
	fields := []zap.Field{zap.Int("exit", exit.Code), zap.String("reason", string(c.slot.Reason())), zap.Duration("took", time.Since(c.run.StartedAt))}
	switch {
	case f == nil:
		c.log.Info("run ended", fields...)
	case v.Parked && c.run.Task != "":
		c.log.Error("task failed", append(fields, zap.String("error", f.text), zap.String("class", f.class))...)
	case v.Parked:
		c.log.Error("run failed, given up until the next message", append(fields, zap.String("error", f.text), zap.String("class", f.class))...)
	default:
		c.log.Warn("run failed", append(fields, zap.String("error", f.text), zap.String("class", f.class), zap.Time("retry", v.RetryAt))...)
	}
	if c.runLog != nil {
		c.runLog.Notef("ended with code %d %s", exit.Code, e.Error)
	}
	result := queue.Result{Again: v.Returned && !v.Parked && c.run.Task == "", RetryAt: v.RetryAt}
	if c.endCompaction(ctx, e.Uncounted, f) {
		result.Again = true
	}
	if e.Uncounted && start != errGone {
		result.RetryAt = time.Now().Add(engineRetry)
	}
	return result
}

// taken returns the batches without an ack that the runner took all the same:
// the one on stdin, and those whose file is gone.
func (c *carrier) taken() (ids []string) {
	for _, b := range c.batches {
		if b.State == berth.BatchSent && (!b.Input || c.files != nil && !c.files.HasInput(b.ID)) {
			ids = append(ids, b.AckID)
		}
	}
	return ids
}

// ending classifies how the run ended. The failure is nil if it did what was
// asked, as far as one can tell here.
func (c *carrier) ending(exit Exit, start error) (berth.Ending, *failure) {
	e := berth.Ending{RunID: c.run.ID, At: time.Now(), ExitCode: exit.Code, DropSession: c.slot.Renewed(), Backoff: backoff}
	f := c.failure
	switch {
	case f != nil:
	case start != nil:
		f = &failure{text: start.Error()}
		e.Uncounted = c.absent || start == errGone
		if kind(start) == berth.NotFound {
			f.class = protocol.ClassImage
		}
	case exit.OutOfMemory:
		f = &failure{text: "the agent ran out of memory", class: protocol.ClassMemory}
	case c.slot.Reason() == queue.ReasonStopped && (len(c.batches) > 0 || c.compaction.id != 0 || c.run.Task != "" && !c.spoke):
		f = &failure{text: "stopped by the operator", class: classStopped}
	case exit.Code != 0 && c.slot.Reason() == "":
		f = &failure{text: strings.TrimSuffix(fmt.Sprintf("Container exited with code %d: %s", exit.Code, c.stderr.last(200)), ": ")}
	}
	if f == nil {
		e.Notice = notice("")
		return e, nil
	}
	if c.run.Task != "" {
		return c.taskEnding(e, f, start == errGone || c.unheard(exit))
	}
	e.Error, e.Class, e.RetryIn, e.Notice = f.text, f.class, f.retryAfter, notice(f.class)
	switch f.class {
	case protocol.ClassStaleSession:
		e.DropSession, e.RetryIn = true, time.Millisecond
	case protocol.ClassAuth, protocol.ClassImage, protocol.ClassMemory, protocol.ClassInput, classStopped:
		e.NoRetry = true
	}
	return e, f
}

// classStopped is the class of a run that the operator ended.
const classStopped = "stopped"

// notice is what a chat is told when its messages are given up.
func notice(class string) string {
	return "I could not answer. " + reason(class) + " I will try again with your next message."
}

// reason is what a chat is told of a failure of a class.
func reason(class string) string {
	switch class {
	case classStopped:
		return "The operator stopped me."
	case protocol.ClassAuth:
		return "The key for the model was refused. The operator has been told."
	case protocol.ClassImage:
		return "My container image is missing, or something in it. The operator has been told."
	case protocol.ClassInput:
		return "I am not set up right. The operator has been told."
	case protocol.ClassMemory:
		return "I ran out of memory. The operator has been told."
	case protocol.ClassRateLimit:
		return "The model's rate limit does not let me through."
	}
	return "Something went wrong on my side. The operator can see the details."
}

// persist does what must not be left undone, again and again while it fails. It
// reports false if ctx ended before it was done.
func (c *carrier) persist(ctx context.Context, what string, do func(context.Context) error) bool {
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := do(ctx)
		if err == nil {
			return true
		}
		c.log.Error(what, zap.Error(err))
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

// tail keeps the end of what a container wrote to stderr. Only one goroutine
// writes, and it has ended before last is called.
type tail struct{ buf []byte }

func (t *tail) Write(p []byte) (int, error) {
	const keep = 1024
	t.buf = append(t.buf, p...)
	if len(t.buf) > keep {
		t.buf = append(t.buf[:0], t.buf[len(t.buf)-keep:]...)
	}
	return len(p), nil
}

func (t *tail) last(n int) string {
	text := strings.TrimSpace(strings.ToValidUTF8(string(t.buf), "\uFFFD"))
	if len(text) > n {
		text = strings.ToValidUTF8(text[len(text)-n:], "")
	}
	return text
}
