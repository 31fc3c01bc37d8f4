// Package dispatch decides which stored message wakes which group, and brings
// the containers that an earlier daemon left back under control.
package dispatch

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
	"berth/orchestrator/internal/queue"
)

// Store is where groups and messages are kept.
type Store interface {
	// AddMessage puts a message whose id the chat has into the place of the other;
	// fresh says that it is new, or that only now it is one that wakes.
	AddMessage(context.Context, berth.Message) (seq int64, fresh bool, err error)
	Pending(ctx context.Context, chatJID string) (pending bool, retryAt time.Time, err error)
	Groups(context.Context) ([]berth.Group, error)
	AddGroup(context.Context, berth.Group) error
	UpdateGroup(ctx context.Context, folder string, change func(berth.Group) (berth.Group, error)) (berth.Group, error)
	RemoveGroup(ctx context.Context, folder string) error
	LiveRuns(context.Context) ([]berth.Run, error)
	FinishRun(context.Context, berth.Ending) (berth.Verdict, error)
	AddOutgoing(context.Context, ...berth.Outgoing) error
	TaskStore
}

// Senders decides whose messages count. Its methods must not block.
type Senders interface {
	// Admit says whether a message is stored, and whether it may wake the group.
	Admit(g berth.Group, m berth.Message) (store, wake bool)

	// Answer returns what a sender is told whose message would have woken the
	// group if he were admitted; usually nothing.
	Answer(m berth.Message) string
}

// Commands carries out what people write to Berth itself. Its method is called from
// many goroutines, and with the same message again if the channel brings it again.
type Commands interface {
	// Handle says with handled that the message was for Berth: then it is not
	// stored, and texts are sent to its chat, of which there may be none. An error
	// without handled means that the message has to come again; with handled it is
	// for the operator's log.
	Handle(context.Context, Command) (texts []string, handled bool, err error)
}

// Command is a message that may be a command.
type Command struct {
	Message berth.Message
	Group   berth.Group // of its chat; the zero value: it is not registered
	Allowed bool        // its sender counts there
	Late    bool        // it comes so late that it must not do anything any more
}

// CommandKey returns the idempotency key of the text i that answers a command.
func CommandKey(m berth.Message, i int) string {
	return "command/" + m.ChatJID + "/" + m.ID + "/" + strconv.Itoa(i)
}

// Runs carries runs to their end.
type Runs interface {
	Run(context.Context, *queue.Slot, berth.Group) queue.Result
	Adopt(ctx context.Context, slot *queue.Slot, g berth.Group, run berth.Run, container string, taken func()) queue.Result
}

// Container is one container of this install.
type Container struct {
	ID  string
	Run string // its run, as its label says
}

// Fleet knows the containers of this install.
type Fleet interface {
	Fleet(context.Context) ([]Container, error)
	RemoveContainer(ctx context.Context, id string) error
}

// Dispatcher knows the registered groups. Its methods are safe for concurrent
// use.
type Dispatcher struct {
	store     Store
	runs      Runs
	fleet     Fleet
	queue     *queue.Queue
	assistant string
	senders   Senders
	commands  Commands
	changed   func() // after the groups did
	log       *zap.Logger

	mu      sync.RWMutex
	groups  map[string]berth.Group // by folder
	chats   map[string]string      // folder by JID
	collect func(chatJID string) bool
	late    []string // folders to wake when collecting ends, first come first

	tasks *tasks

	registering sync.Mutex // keeps groups and chats in step with the store
	reconciling sync.Mutex
}

// Options are what a Dispatcher works with.
type Options struct {
	Store       Store
	Runs        Runs
	Fleet       Fleet
	Limit       int           // slots
	IdleTimeout time.Duration // of a run
	Assistant   string
	Senders     Senders  // nil: everybody counts
	Commands    Commands // nil: there are none
	// GroupsChanged is called after groups were added, changed or removed, and
	// must not block. It may be nil.
	GroupsChanged func()
	// TasksChanged is called after tasks of a folder were changed otherwise than by
	// a run, and must not block. It may be nil.
	TasksChanged func(folder string)
	Log          *zap.Logger
}

// New returns a Dispatcher that knows the groups in the store. Its queue is
// paused until Resume.
func New(ctx context.Context, o Options) (*Dispatcher, error) {
	d := &Dispatcher{
		store: o.Store, runs: o.Runs, fleet: o.Fleet, assistant: o.Assistant, senders: o.Senders, commands: o.Commands, changed: o.GroupsChanged, log: o.Log,
		groups: make(map[string]berth.Group), chats: make(map[string]string), tasks: newTasks(o.TasksChanged),
	}
	if d.changed == nil {
		d.changed = func() {}
	}
	d.queue = queue.New(o.Limit, o.IdleTimeout, d.run)
	d.queue.Pause()
	groups, err := o.Store.Groups(ctx)
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		d.remember(g)
	}
	return d, nil
}

func (d *Dispatcher) remember(g berth.Group) {
	d.groups[g.Folder] = g
	d.chats[g.JID] = g.Folder
}

// Receive stores a message of a registered chat and wakes its group, if it is
// to be woken. When it returns nil the message is safe: the channel may
// acknowledge it. One with an id that the chat has takes its place and its
// number. One whose sender is to be dropped is not stored, and returned without a
// number; so is a command, which is carried out before. A message of any other
// chat fails with berth.NotFound, unless it is a command.
func (d *Dispatcher) Receive(ctx context.Context, m berth.Message) (berth.Message, error) {
	g, ok := d.ByChat(m.ChatJID)
	if !ok {
		handled, err := d.command(ctx, Command{Message: m})
		if err == nil && !handled {
			err = berth.Errorf(berth.NotFound, "chat %s is not registered", m.ChatJID)
		}
		return m, err
	}
	store, wake := d.admit(g, m)
	if handled, err := d.command(ctx, Command{Message: m, Group: g, Allowed: wake}); handled || err != nil {
		return m, err
	}
	m.Wakes = !m.Bot && (!g.NeedsTrigger() || m.Addressed || berth.Triggered(m.Text, g.EffectiveTrigger(d.assistant)))
	if !store {
		return m, nil
	}
	refused := m.Wakes && !wake
	m.Wakes = m.Wakes && wake
	seq, fresh, err := d.store.AddMessage(ctx, m)
	if err != nil {
		return m, err
	}
	m.Seq = seq
	crash.At(crash.Stored)
	if fresh && m.Wakes {
		d.rouse(g)
	}
	if fresh && refused {
		d.refuse(ctx, m)
	}
	crash.At(crash.BeforeAck)
	return m, nil
}

// Keep stores a message like Receive, but it wakes nobody. A command is late.
func (d *Dispatcher) Keep(ctx context.Context, m berth.Message) error {
	g, ok := d.ByChat(m.ChatJID)
	if !ok {
		return berth.Errorf(berth.NotFound, "chat %s is not registered", m.ChatJID)
	}
	store, wake := d.admit(g, m)
	if handled, err := d.command(ctx, Command{Message: m, Group: g, Allowed: wake, Late: true}); handled || err != nil || !store {
		return err
	}
	m.Wakes = false
	_, _, err := d.store.AddMessage(ctx, m)
	return err
}

func (d *Dispatcher) admit(g berth.Group, m berth.Message) (store, wake bool) {
	if d.senders == nil || m.Bot || m.FromMe {
		return true, true
	}
	return d.senders.Admit(g, m)
}

// command has a message carried out, if it is a command.
func (d *Dispatcher) command(ctx context.Context, c Command) (handled bool, err error) {
	if d.commands == nil {
		return false, nil
	}
	texts, handled, err := d.commands.Handle(ctx, c)
	if err != nil && !handled {
		return false, err
	}
	if err != nil {
		d.log.Error("command", zap.String("group", c.Group.Folder), zap.String("chat", c.Message.ChatJID), zap.Error(err))
	}
	var out []berth.Outgoing
	for i, text := range texts {
		out = append(out, berth.Outgoing{
			ChatJID: c.Message.ChatJID, Key: CommandKey(c.Message, i), Kind: berth.OutNotice,
			Text: text, MessageID: berth.NewID(10), CreatedAt: time.Now(),
		})
	}
	if len(out) == 0 {
		return handled, nil
	}
	return handled, d.store.AddOutgoing(ctx, out...)
}

// Collect begins a time in which messages of some chats wake nobody, since more
// of them are on their way; with nil it ends, and each group that was to be woken
// meanwhile is, once. It does not block.
func (d *Dispatcher) Collect(chats func(chatJID string) bool) {
	var late []string
	d.mu.Lock()
	d.collect = chats
	if chats == nil {
		late, d.late = d.late, nil
	}
	d.mu.Unlock()
	for _, folder := range late {
		d.queue.Add(folder)
	}
}

// rouse adds a group to the queue, unless its messages are being collected.
func (d *Dispatcher) rouse(g berth.Group) {
	d.mu.Lock()
	collected := d.collect != nil && d.collect(g.JID)
	if collected && !slices.Contains(d.late, g.Folder) {
		d.late = append(d.late, g.Folder)
	}
	d.mu.Unlock()
	if !collected {
		d.queue.Add(g.Folder)
	}
}

// refuse tells a sender who does not count that he does not, if he is to be told.
func (d *Dispatcher) refuse(ctx context.Context, m berth.Message) {
	text := d.senders.Answer(m)
	if text == "" {
		return
	}
	err := d.store.AddOutgoing(ctx, berth.Outgoing{
		ChatJID: m.ChatJID, Key: "refused/" + m.ChatJID + "/" + m.Sender, Kind: berth.OutNotice, // once for all time
		Text: text, MessageID: berth.NewID(10), CreatedAt: time.Now(),
	})
	if err != nil {
		d.log.Warn("answer a sender who is not on the list", zap.String("chat", m.ChatJID), zap.Error(err))
	}
}

// run is what the queue starts.
func (d *Dispatcher) run(ctx context.Context, slot *queue.Slot) (result queue.Result) {
	if id := slot.Task(); id != "" {
		defer func() {
			slot.Seal() // it may be due again before the slot is free
			d.tasks.ended(slot.Folder, id, result.RetryAt)
		}()
	}
	g, ok := d.Group(slot.Folder)
	if !ok {
		return queue.Result{}
	}
	return d.runs.Run(ctx, slot, g)
}

// Start brings everything that the store holds to life again: it reconciles,
// wakes every group that has something pending, and lets the queue run. It may
// be called again whenever the container engine came back.
func (d *Dispatcher) Start(ctx context.Context) error {
	if err := d.Reconcile(ctx); err != nil {
		return err
	}
	for _, g := range d.Groups() {
		if err := d.wake(ctx, g); err != nil {
			return err
		}
	}
	d.queue.Resume()
	d.tasks.letStart(true)
	return nil
}

// Pause starts no more runs until the next Start.
func (d *Dispatcher) Pause() {
	d.queue.Pause()
	d.tasks.letStart(false)
}

func (d *Dispatcher) wake(ctx context.Context, g berth.Group) error {
	pending, retryAt, err := d.store.Pending(ctx, g.JID)
	if err != nil || !pending {
		return err
	}
	if time.Until(retryAt) > 0 {
		d.queue.Hold(g.Folder, retryAt)
	}
	d.rouse(g)
	return nil
}

// Reconcile compares the containers of this install with the runs in the store.
// A run that nobody carries is adopted, which also settles it if its container
// is gone, or ended if its group is; a container without a live run is an orphan
// and removed. It returns when all that is under way.
func (d *Dispatcher) Reconcile(ctx context.Context) error {
	d.reconciling.Lock()
	defer d.reconciling.Unlock()
	// In this order: a run that begins in between is in both lists or in none.
	fleet, err := d.fleet.Fleet(ctx)
	if err != nil {
		return err
	}
	live, err := d.store.LiveRuns(ctx)
	if err != nil {
		return err
	}
	var waiting []chan struct{}
	known := make(map[string]string, len(fleet)) // container by run
	for _, c := range fleet {
		known[c.Run] = c.ID
	}
	for _, run := range live {
		container := known[run.ID]
		g, registered := d.Group(run.Folder)
		done := make(chan struct{})
		adopted := d.queue.Adopt(run.Folder, run.Task, func(ctx context.Context, slot *queue.Slot) (result queue.Result) {
			if run.Task != "" {
				defer func() {
					slot.Seal()
					d.tasks.ended(run.Folder, run.Task, result.RetryAt)
				}()
			}
			taken := sync.OnceFunc(func() { close(done) })
			defer taken()
			if run.Renewed { // the daemon that was told so is gone
				d.queue.Renew(run.Folder)
			}
			if !registered || g.JID != run.ChatJID {
				return d.discard(ctx, run, container)
			}
			return d.runs.Adopt(ctx, slot, g, run, container, taken)
		})
		if adopted {
			waiting = append(waiting, done)
		}
	}
	for _, c := range fleet {
		if slices.ContainsFunc(live, func(r berth.Run) bool { return r.ID == c.Run }) {
			continue
		}
		if err := d.fleet.RemoveContainer(ctx, c.ID); err != nil {
			d.log.Warn("remove an orphan", zap.String("container", c.ID), zap.Error(err))
			continue
		}
		d.log.Info("orphan removed", zap.String("container", c.ID), zap.String("run", c.Run))
	}
	for _, done := range waiting {
		select {
		case <-done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// discard ends a run whose group was removed: what it might still say has no
// chat to go to.
func (d *Dispatcher) discard(ctx context.Context, run berth.Run, container string) queue.Result {
	if container != "" {
		if err := d.fleet.RemoveContainer(ctx, container); err != nil {
			d.log.Warn("remove the container of a removed group", zap.String("group", run.Folder), zap.Error(err))
			return queue.Result{} // the next reconcile tries again
		}
	}
	if _, err := d.store.FinishRun(ctx, berth.Ending{RunID: run.ID, At: time.Now(), ExitCode: -1, Error: "the group was removed", Uncounted: true}); err != nil {
		d.log.Error("end the run of a removed group", zap.String("group", run.Folder), zap.Error(err))
		return queue.Result{}
	}
	d.log.Info("run of a removed group ended", zap.String("group", run.Folder), zap.String("run", run.ID), zap.String("container", container))
	return queue.Result{}
}

// Group returns the group of a folder.
func (d *Dispatcher) Group(folder string) (berth.Group, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	g, ok := d.groups[folder]
	return g, ok
}

// ByChat returns the group of a chat.
func (d *Dispatcher) ByChat(jid string) (berth.Group, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	g, ok := d.groups[d.chats[jid]]
	return g, ok
}

// Registered reports whether a chat belongs to a group.
func (d *Dispatcher) Registered(jid string) bool {
	_, ok := d.ByChat(jid)
	return ok
}

// Groups returns the registered groups, ordered by folder.
func (d *Dispatcher) Groups() []berth.Group {
	d.mu.RLock()
	defer d.mu.RUnlock()
	out := make([]berth.Group, 0, len(d.groups))
	for _, g := range d.groups {
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b berth.Group) int { return strings.Compare(a.Folder, b.Folder) })
	return out
}

// AddGroup registers g, and wakes it if its chat has something pending.
func (d *Dispatcher) AddGroup(ctx context.Context, g berth.Group) error {
	d.registering.Lock()
	defer d.registering.Unlock()
	if err := d.store.AddGroup(ctx, g); err != nil {
		return err
	}
	d.mu.Lock()
	d.remember(g)
	d.mu.Unlock()
	d.changed()
	return d.wake(ctx, g)
}

// UpdateGroup changes the group of a folder and returns it as it is then; change
// may be called more than once. The trigger counts from the next message on, what concerns
// the container from the next run on.
func (d *Dispatcher) UpdateGroup(ctx context.Context, folder string, change func(berth.Group) (berth.Group, error)) (berth.Group, error) {
	d.registering.Lock()
	defer d.registering.Unlock()
	g, err := d.store.UpdateGroup(ctx, folder, change)
	if err != nil {
		return berth.Group{}, err
	}
	d.mu.Lock()
	d.remember(g)
	d.mu.Unlock()
	d.changed()
	return g, nil
}

// RemoveGroup unregisters the group of a folder and closes its run.
func (d *Dispatcher) RemoveGroup(ctx context.Context, folder string) error {
	d.registering.Lock()
	defer d.registering.Unlock()
	if _, ok := d.Group(folder); !ok {
		return berth.Errorf(berth.NotFound, "there is no group %.80q: see berth groups ls", folder)
	}
	if err := d.store.RemoveGroup(ctx, folder); err != nil {
		return err
	}
	d.mu.Lock()
	delete(d.chats, d.groups[folder].JID)
	delete(d.groups, folder)
	d.mu.Unlock()
	d.changed()
	d.queue.Close(folder)
	return nil
}

// Close ends the run of a group; it reports false if there is none.
func (d *Dispatcher) Close(folder string) bool { return d.queue.Close(folder) }

// Interrupt ends the turn that the run of a group is at, and returns when the order
// was taken; it reports false if there is none.
func (d *Dispatcher) Interrupt(folder string) bool { return d.queue.Interrupt(folder) }

// Renew ends the run of a group, if there is one, when its turn is over, without
// keeping its session.
func (d *Dispatcher) Renew(folder string) { d.queue.Renew(folder) }

// State returns how full the pool is.
func (d *Dispatcher) State() queue.State { return d.queue.State() }

// Shutdown ends idle runs and lets go of the others.
func (d *Dispatcher) Shutdown(ctx context.Context) { d.queue.Shutdown(ctx) }
