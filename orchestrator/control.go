package main

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"berth/orchestrator/internal/bell"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/console"
	"berth/orchestrator/internal/dispatch"
	"berth/orchestrator/internal/gateway"
	"berth/orchestrator/internal/mount"
	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/web"
	"berth/orchestrator/internal/whatsapp/waid"
	"berth/orchestrator/internal/workspace"
)

// operator begins the ids of senders who write through the control socket.
const operator = "console:"

// control is the daemon as the control socket sees it.
type control struct {
	texts
	ledger
	cfg        Config
	started    time.Time
	bell       *bell.Bell
	console    *console.Channel
	dispatcher *dispatch.Dispatcher
	runner     *turn.Runner
	shutdown   func()
	health     *health
	allowlist  *mount.Allowlist
	guests     guests
	orders     *commands
	phone      *phone // nil: WhatsApp is not served
	tree       *workspace.Tree
}

var _ web.Backend = (*control)(nil)

// health is what the daemon knows about its surroundings.
type health struct {
	mu     sync.Mutex
	ready  bool
	docker web.Docker
	image  web.Image
	alarms map[string]string
}

// set changes the health under its lock.
func (h *health) set(change func(*health)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(h)
}

// alarm raises an alarm, or with an empty text ends it.
func (h *health) alarm(name, text string) {
	h.set(func(h *health) {
		if text == "" {
			delete(h.alarms, name)
			return
		}
		h.alarms[name] = text
	})
}

// imageRef returns the default image and whether it is there.
func (h *health) imageRef() (string, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.image.Ref, h.image.Ready
}

func (c *control) Status(ctx context.Context) (web.Status, error) {
	pending, dead, err := c.db.OutboxCounts(ctx)
	if err != nil {
		return web.Status{}, err
	}
	pool := c.dispatcher.State()
	s := web.Status{
		Version: buildVersion(), PID: os.Getpid(), Root: c.cfg.Root, StartedAt: c.started,
		Pool:   web.Pool{Limit: pool.Limit, Used: pool.Used, Waiting: append([]string{}, pool.Waiting...)},
		Groups: len(c.dispatcher.Groups()),
		Outbox: web.Outbox{Pending: pending, Dead: dead},
		Runs:   []web.Run{},
		Alarms: []string{},
	}
	if c.phone != nil {
		s.Channels = []web.Channel{c.phone.channel()}
	}
	live := c.runner.Live()
	for _, folder := range slices.Sorted(maps.Keys(live)) {
		v := live[folder]
		s.Runs = append(s.Runs, web.Run{
			ID: v.Run.ID, Group: folder, Kind: v.Run.Kind, State: v.Run.State, Container: v.Run.Container,
			Turns: v.Turns, StartedAt: v.Run.StartedAt, Since: v.Since,
		})
	}
	c.health.set(func(h *health) {
		s.Ready, s.Docker, s.Image = h.ready, h.docker, h.image
		for _, name := range slices.Sorted(maps.Keys(h.alarms)) {
			s.Alarms = append(s.Alarms, h.alarms[name])
		}
	})
	if err := c.db.Trouble(); err != nil {
		s.Alarms = append(s.Alarms, err.Error())
	}
	standings, err := c.db.Standings(ctx)
	if err != nil {
		return web.Status{}, err
	}
	for _, g := range c.dispatcher.Groups() {
		if st := standings[g.JID]; st.GivenUp {
			s.Alarms = append(s.Alarms, fmt.Sprintf("group %s: %d messages given up until the next one comes: %s", g.Folder, st.Pending, st.LastError))
		}
	}
	for _, text := range []string{c.allowlist.Alarm(), c.guests.Alarm()} {
		if text != "" {
			s.Alarms = append(s.Alarms, text)
		}
	}
	letters, err := c.db.DeadLetters(ctx, 3)
	if err != nil {
		return web.Status{}, err
	}
	if dead > 0 {
		var newest []string
		for _, o := range letters {
			newest = append(newest, fmt.Sprintf("to %s: %.200s", o.ChatJID, o.Error))
		}
		text := fmt.Sprintf("%d texts could not be sent and were given up (see berth outbox ls); the newest: %s", dead, strings.Join(newest, "; "))
		s.Alarms = append(s.Alarms, text)
	}
	return s, nil
}

func (c *control) Groups(ctx context.Context) ([]web.Group, error) {
	standings, err := c.db.Standings(ctx)
	if err != nil {
		return nil, err
	}
	live := c.runner.Live()
	out := []web.Group{}
	for _, g := range c.dispatcher.Groups() {
		w := describe(g, g.EffectiveTrigger(c.cfg.AssistantName), standings[g.JID])
		if v, ok := live[g.Folder]; ok {
			w.State = string(v.Run.State)
		}
		for _, m := range c.runner.LastMounts(g.Folder) {
			w.Mounts = append(w.Mounts, web.MountVerdict{Request: m.Request, Target: m.Mount.Target, ReadOnly: m.Mount.ReadOnly, Refused: m.Reason})
		}
		out = append(out, w)
	}
	return out, nil
}

// describe puts a group into the words of the control socket.
func describe(g berth.Group, trigger string, s berth.Standing) web.Group {
	w := web.Group{
		JID: g.JID, Name: g.Name, Folder: g.Folder, Trigger: trigger, RequiresTrigger: g.NeedsTrigger(), Main: g.IsMain(),
		AddedAt: g.AddedAt, Container: g.Container, Pending: s.Pending, LastError: s.LastError, GivenUp: s.GivenUp,
	}
	if !s.RetryAt.IsZero() {
		w.RetryAt = &s.RetryAt
	}
	return w
}

// whatsAppServers are what a chat of WhatsApp ends with, one of old included.
var whatsAppServers = []string{"g.us", "s.whatsapp.net", "lid", "c.us"}

// newGroup checks what a person asked for and fills in the defaults.
func newGroup(in web.NewGroup) (berth.Group, error) {
	if err := berth.ValidFolder(in.Folder); err != nil {
		return berth.Group{}, err
	}
	g := berth.Group{
		JID: strings.TrimSpace(in.JID), Name: strings.TrimSpace(in.Name), Folder: in.Folder, Trigger: strings.TrimSpace(in.Trigger),
		RequiresTrigger: in.RequiresTrigger == nil || *in.RequiresTrigger, Container: in.Container, AddedAt: time.Now(),
	}
	if g.JID == "" {
		g.JID = console.JID(g.Folder)
	}
	if g.Name == "" {
		g.Name = g.Folder
	}
	if _, server, ok := strings.Cut(g.JID, "@"); ok && slices.Contains(whatsAppServers, server) {
		j, err := waid.Parse(g.JID)
		if err != nil {
			return berth.Group{}, err
		}
		g.JID = j.String()
	}
	if console.Owns(g.JID) && g.JID != console.JID(g.Folder) {
		return berth.Group{}, berth.Errorf(berth.Invalid, "chat %s belongs to the folder %s: leave --jid out, or choose that folder", g.JID, strings.TrimPrefix(g.JID, console.JID("")))
	}
	return g, validGroup(g)
}

// validGroup returns a berth.Invalid error unless everything that a person may set
// can be used.
func validGroup(g berth.Group) error {
	for what, text := range map[string]string{"chat": g.JID, "name": g.Name, "trigger": g.Trigger} {
		if len(text) > 256 || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\uFFFD' }) {
			return berth.Errorf(berth.Invalid, "the %s %.40q cannot be used: at most 256 bytes and no control characters", what, text)
		}
	}
	c := g.Container
	if e := c.Engine; e != "" && !slices.Contains(engines, e) {
		return berth.Errorf(berth.Invalid, "there is no engine %.40q: give one of %s, or leave it out", e, strings.Join(engines, ", "))
	}
	if c.Model != "" && !modelNames.MatchString(c.Model) {
		return berth.Errorf(berth.Invalid, "the model %.40q cannot be used: give a model's name", c.Model)
	}
	if _, err := gateway.ParseEgress(c.Egress); err != nil {
		return berth.Errorf(berth.Invalid, "egress: %w", err)
	}
	switch {
	case c.Image != "" && (!imagePattern.MatchString(c.Image) || len(c.Image) > 512):
		return berth.Errorf(berth.Invalid, "image %.40q cannot be used: give one such as ghcr.io/you/agent:1", c.Image)
	case c.MemoryMiB != 0 && (c.MemoryMiB < minMemoryMiB || c.MemoryMiB > 1<<30):
		return berth.Errorf(berth.Invalid, "a memory of %d MiB cannot be used: give at least %d", c.MemoryMiB, minMemoryMiB)
	case c.CPUs != 0 && !(c.CPUs >= 0.01 && c.CPUs <= 1024):
		return berth.Errorf(berth.Invalid, "%v processors cannot be used: give a number from 0.01 to 1024", c.CPUs)
	case c.Pids != 0 && (c.Pids < minPids || c.Pids > 1<<22):
		return berth.Errorf(berth.Invalid, "%d processes cannot be used: give a whole number of at least %d", c.Pids, minPids)
	case c.TimeoutMS != 0 && (c.TimeoutMS < 1 || c.TimeoutMS > 10_000*time.Hour.Milliseconds()):
		return berth.Errorf(berth.Invalid, "a timeout of %d ms cannot be used: give at most 10000 hours", c.TimeoutMS)
	case len(c.AdditionalMounts) > maxMounts:
		return berth.Errorf(berth.Invalid, "%d mounts are too many: at most %d", len(c.AdditionalMounts), maxMounts)
	}
	return nil
}

func (c *control) AddGroup(ctx context.Context, in web.NewGroup) (web.Group, error) {
	g, err := newGroup(in)
	if err != nil {
		return web.Group{}, err
	}
	if err := c.dispatcher.AddGroup(ctx, g); err != nil {
		return web.Group{}, err
	}
	return describe(g, g.EffectiveTrigger(c.cfg.AssistantName), berth.Standing{}), nil
}

func (c *control) UpdateGroup(ctx context.Context, folder string, in web.GroupChange) (web.Group, error) {
	g, err := c.dispatcher.UpdateGroup(ctx, folder, func(g berth.Group) (berth.Group, error) { return changeGroup(g, in) })
	if err != nil {
		return web.Group{}, err
	}
	standings, err := c.db.Standings(ctx)
	return describe(g, g.EffectiveTrigger(c.cfg.AssistantName), standings[g.JID]), err
}

func (c *control) RemoveGroup(ctx context.Context, folder string) error {
	return c.dispatcher.RemoveGroup(ctx, folder)
}

func (c *control) StopGroup(_ context.Context, folder string) (bool, error) {
	if _, err := c.group(folder); err != nil {
		return false, err
	}
	return c.dispatcher.Close(folder), nil
}

func (c *control) StopDaemon() { c.shutdown() }

func (c *control) Backup(ctx context.Context, in web.NewBackup) (web.Backup, error) {
	return backUp(ctx, c.cfg, in, c.db.Backup)
}

func (c *control) group(folder string) (berth.Group, error) {
	g, ok := c.dispatcher.Group(folder)
	if !ok {
		return g, berth.Errorf(berth.NotFound, "there is no group %.80q: see berth groups ls, or add it with berth groups add", folder)
	}
	return g, nil
}

func (c *control) Send(ctx context.Context, in web.NewMessage) (web.Accepted, error) {
	g, err := c.group(in.Group)
	if err != nil {
		return web.Accepted{}, err
	}
	if err := berth.ValidText(in.Text); err != nil {
		return web.Accepted{}, err
	}
	if in.Sender == "" {
		in.Sender = "operator"
	}
	if in.ID == "" {
		in.ID = berth.NewID(10)
	}
	if len(in.ID) > 128 || len(in.Sender) > 256 {
		return web.Accepted{}, berth.Errorf(berth.Invalid, "the id may have 128 bytes and the sender 256")
	}
	last, err := c.db.LastSeq(ctx, g.JID, 0)
	if err != nil {
		return web.Accepted{}, err
	}
	m, err := c.dispatcher.Receive(ctx, berth.Message{
		ID: in.ID, ChatJID: g.JID, Sender: operator + in.Sender, SenderName: in.Sender, Text: in.Text, Time: time.Now(),
	})
	if err != nil || m.Seq > 0 {
		return web.Accepted{Seq: m.Seq, Wakes: m.Wakes}, err
	}
	said, err := c.orders.answers(ctx, m) // the operator's messages are never dropped
	return web.Accepted{Seq: last, Command: true, Texts: said}, err
}

func (c *control) Answer(ctx context.Context, seq int64, wait time.Duration) (web.Answer, error) {
	_, chat, err := c.db.Fate(ctx, seq)
	if err != nil {
		return web.Answer{}, err
	}
	deadline := time.NewTimer(wait)
	defer deadline.Stop()
	for {
		changed := c.bell.Wait(chat)
		fate, _, err := c.db.Fate(ctx, seq)
		if err != nil {
			return web.Answer{}, err
		}
		answer := web.Answer{State: fate.State, Texts: append([]string{}, fate.Texts...), Run: fate.RunID, Error: fate.Error}
		if answer.State != web.AnswerPending {
			return answer, nil
		}
		select {
		case <-changed:
		case <-deadline.C:
			return answer, nil
		case <-ctx.Done():
			return answer, context.Cause(ctx)
		}
	}
}

func (c *control) Chat(ctx context.Context, folder string, after int64) iter.Seq2[web.Event, error] {
	return func(yield func(web.Event, error) bool) {
		g, err := c.group(folder)
		if err != nil {
			yield(web.Event{}, err)
			return
		}
		for e, err := range c.console.Follow(ctx, g.JID, after) {
			event := web.Event{Type: web.EventTyping, Typing: e.Typing}
			if e.Message != nil {
				event = web.Event{Type: web.EventMessage, Message: e.Message}
			}
			if !yield(event, err) {
				return
			}
		}
	}
}
