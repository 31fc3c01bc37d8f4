package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"berth/orchestrator/internal/bell"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/dispatch"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
	"berth/orchestrator/internal/whatsapp"
	"berth/orchestrator/internal/whatsapp/wastate"
	"berth/orchestrator/internal/workspace"
)

const (
	sessionFile = "whatsapp.db"     // in store/
	statusFile  = "whatsapp.status" // beside it, for scripts

	// stateEvery is how often the state is looked at that changes with the time
	// alone: the phone is away for too long.
	stateEvery = time.Hour
)

// phone puts WhatsApp into the daemon's words, and tells people how it stands
// with the link. It stands in for a channel that could not be opened as well:
// that must not stop anything else.
type phone struct {
	ch         *whatsapp.Channel // nil: see failed
	failed     error
	tree       *workspace.Tree
	db         *sqlite.DB           // nil for a program that only links, and so
	dispatcher *dispatch.Dispatcher // this
	health     *health
	online     func(context.Context) // texts can be sent again
	receipts   bool                  // senders are told what was read
	log        *zap.Logger

	changed bell.Bell // rung for channelWhatsApp when the state is another one
	kick    chan struct{}
	again   chan struct{} // texts can be sent again
	given   chan struct{} // there is something in taken

	mu     sync.Mutex
	states []wastate.State // that nobody was told of yet
	taken  []berth.Batch   // whose senders were not told yet
}

// newPhone opens the session; it does not connect. online is called whenever
// texts can be sent again, and never after run has returned.
func newPhone(ctx context.Context, cfg Config, tree *workspace.Tree, db *sqlite.DB, d *dispatch.Dispatcher, h *health, online func(context.Context), log *zap.Logger) *phone {
	p := &phone{db: db, tree: tree, dispatcher: d, health: h, online: online, receipts: cfg.ReadReceipts, log: log}
	p.open(ctx, cfg, whatsapp.Options{
		Receive: d.Receive, Quiet: d.Keep, Strangers: cfg.PairToken != "", Group: d.ByChat, GroupDir: p.groupDir, UID: tree.UID(), GID: tree.GID(), Answered: p.answered,
		Online: func() { poke(p.again) }, Backlog: p.backlog, Chats: db.NameChats,
		ReadReceipts: cfg.ReadReceipts, MaxBacklogAge: cfg.MaxBacklogAge, MaxMedia: cfg.MaxMedia,
	})
	return p
}

// newLink is newPhone for a program that only links: messages stay with WhatsApp
// for the next daemon.
func newLink(ctx context.Context, cfg Config, tree *workspace.Tree) *phone {
	p := &phone{tree: tree, health: &health{alarms: make(map[string]string)}, log: zap.NewNop()}
	p.open(ctx, cfg, whatsapp.Options{})
	return p
}

func (p *phone) open(ctx context.Context, cfg Config, o whatsapp.Options) {
	p.kick, p.again, p.given = make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{}, 1)
	o.Path, o.Name, o.OwnNumber = filepath.Join(p.tree.StoreDir(), sessionFile), cfg.AssistantName, cfg.AssistantHasOwnNumber
	o.StateChanged, o.Log, o.Double = p.stateChanged, p.log, cfg.Double
	p.ch, p.failed = whatsapp.New(ctx, o)
	if p.failed != nil {
		p.log.Error("WhatsApp cannot be opened; everything else goes on", zap.Error(p.failed))
	}
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// run keeps the link up until ctx ends. Nothing that happens to it ends the
// daemon.
func (p *phone) run(ctx context.Context) {
	p.tell(p.state())
	if p.ch == nil {
		<-ctx.Done()
		return
	}
	over := make(chan error, 1)
	go func() { over <- p.ch.Run(ctx) }()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { p.tellSenders(ctx) })
	clock := time.NewTicker(stateEvery)
	defer clock.Stop()
	for {
		select {
		case err := <-over:
			if err != nil {
				p.log.Error("WhatsApp ended; everything else goes on", zap.Error(err))
			}
			p.tellAll()
			return
		case <-p.kick:
			p.tellAll()
		case <-p.again:
			p.online(ctx)
		case <-clock.C:
			p.tell(p.state())
		}
	}
}

// close ends what run left.
func (p *phone) close() error {
	if p.ch == nil {
		return nil
	}
	return p.ch.Close()
}

func (p *phone) backlog(active bool) {
	if active {
		p.dispatcher.Collect(whatsapp.Owns)
	} else {
		p.dispatcher.Collect(nil)
	}
}

// groupDir returns the folder of a chat's group, which it makes if there is none
// yet.
func (p *phone) groupDir(chat string) (string, bool) {
	g, ok := p.dispatcher.ByChat(chat)
	if !ok {
		return "", false
	}
	files, err := p.tree.Group(g.Folder)
	if err != nil {
		p.log.Warn("folder for media", zap.String("group", g.Folder), zap.Error(err))
		return "", false
	}
	_ = files.Close()
	return filepath.Join(p.tree.Dir(), "groups", g.Folder), true
}

// answered says what an answer quotes: in a group, where others may have written
// since, the first piece of it names the message that woke the agent.
func (p *phone) answered(ctx context.Context, o berth.Outgoing) (berth.Message, bool) {
	if o.Kind != berth.OutAnswer || o.AnswersTo == 0 || !strings.HasSuffix(o.Key, "/0") || !strings.HasSuffix(o.ChatJID, "@g.us") {
		return berth.Message{}, false
	}
	m, ok, err := p.db.Question(ctx, o.ChatJID, o.AnswersTo)
	if err != nil {
		p.log.Warn("find the message that is answered", zap.String("chat", o.ChatJID), zap.Error(err))
	}
	return m, ok && err == nil
}

// Send sends a text, a file or a reaction.
func (p *phone) Send(ctx context.Context, o berth.Outgoing) error {
	if p.ch == nil {
		return p.unusable()
	}
	o.MessageID = wireID(o.MessageID)
	switch {
	case o.File != "":
		return p.ch.SendFile(ctx, o, p.tree.OutboxDir(o.Key), filepath.Base(o.File))
	case o.Kind == berth.OutReaction:
		to, err := p.db.MessagesAfter(ctx, o.ChatJID, o.ReactsTo-1, 1)
		if err != nil {
			return err
		}
		if len(to) == 0 || to[0].Seq != o.ReactsTo {
			return berth.Errorf(berth.NotFound, "the message #%d is gone: nobody can react to it", o.ReactsTo)
		}
		return p.ch.React(ctx, o, to[0])
	}
	return p.ch.Send(ctx, o)
}

// wireID puts the id of a text into the form that WhatsApp's own clients use, from
// which readers can tell others: the same one whenever it is sent again.
func wireID(id string) string {
	sum := sha256.Sum256([]byte(id))
	return "3EB0" + strings.ToUpper(hex.EncodeToString(sum[:9]))
}

// read says that an agent was given a batch. It does not block.
func (p *phone) read(b berth.Batch) {
	if p.ch == nil || !p.receipts {
		return
	}
	p.mu.Lock()
	p.taken = append(p.taken, b)
	p.mu.Unlock()
	poke(p.given)
}

// tellSenders tells them until ctx ends. It is apart from what tells people about
// the link, since WhatsApp may take a minute to answer.
func (p *phone) tellSenders(ctx context.Context) {
	for {
		select {
		case <-p.given:
			p.markRead(ctx)
		case <-ctx.Done():
			return
		}
	}
}

// markRead tells senders that their messages were read. Without a connection
// nobody is told: it is not worth a wait.
func (p *phone) markRead(ctx context.Context) {
	p.mu.Lock()
	taken := p.taken
	p.taken = nil
	p.mu.Unlock()
	for _, b := range taken {
		if err := p.ch.MarkRead(ctx, b.ChatJID, b.Messages...); err != nil && ctx.Err() == nil {
			p.log.Info("mark messages as read", zap.String("chat", b.ChatJID), zap.Error(err))
		}
	}
}

// receipts tells the phone which batches were taken from a store.
type receipts struct {
	*sqlite.DB
	read func(berth.Batch)
}

func (r receipts) BeginRun(ctx context.Context, run berth.Run) (b berth.Batch, ok bool, err error) {
	if b, ok, err = r.DB.BeginRun(ctx, run); ok && err == nil {
		r.read(b)
	}
	return b, ok, err
}

func (r receipts) NextBatch(ctx context.Context, runID, chatJID string) (b berth.Batch, ok bool, err error) {
	if b, ok, err = r.DB.NextBatch(ctx, runID, chatJID); ok && err == nil {
		r.read(b)
	}
	return b, ok, err
}

// aliases returns the other addresses of a sender, by which a list may name him.
func (r *router) aliases(sender string) []string {
	if r.phone == nil || r.phone.ch == nil {
		return nil
	}
	return r.phone.ch.Aliases(sender)
}

// SetTyping says whether the agent of a chat is at work.
func (p *phone) SetTyping(chat string, on bool) {
	if p.ch != nil {
		p.ch.SetTyping(chat, on)
	}
}

// syncChats asks WhatsApp which groups there are.
func (p *phone) syncChats(ctx context.Context) error {
	if p.ch == nil {
		return p.unusable()
	}
	_, err := p.ch.Groups(ctx, true)
	return err
}

func (p *phone) state() wastate.State {
	if p.ch == nil {
		return wastate.State{
			Name: "unusable", Detail: p.failed.Error(),
			WhatToDo: "see that store/" + sessionFile + " can be read and written; if it is damaged, stop Berth, move it away and link again",
		}
	}
	return p.ch.State()
}

// needsPerson reports whether somebody has to do something.
func (p *phone) needsPerson(s wastate.State) bool { return p.ch == nil || s.NeedsPerson() }

// channel returns how it stands with the link.
func (p *phone) channel() web.Channel { return p.describe(p.state()) }

func (p *phone) describe(s wastate.State) web.Channel {
	c := web.Channel{
		Name: channelWhatsApp, State: string(s.Name), Text: s.String(), Since: s.Since, Detail: s.Detail, WhatToDo: s.WhatToDo, NeedsPerson: p.needsPerson(s),
	}
	if !s.Until.IsZero() {
		c.Until = &s.Until
	}
	if p.ch != nil {
		c.Account = p.ch.Number()
	}
	return c
}

func (p *phone) stateChanged(s wastate.State) {
	p.mu.Lock()
	p.states = append(p.states, s)
	p.mu.Unlock()
	poke(p.kick)
	p.changed.Ring(channelWhatsApp)
}

func (p *phone) tellAll() {
	p.mu.Lock()
	states := p.states
	p.states = nil
	p.mu.Unlock()
	for _, s := range states {
		p.tell(s)
	}
}

// tell says everywhere how it stands.
func (p *phone) tell(s wastate.State) {
	c := p.describe(s)
	if err := writeStatus(filepath.Join(p.tree.StoreDir(), statusFile), c); err != nil {
		p.log.Warn("write the status file", zap.Error(err))
	}
	alarm := ""
	if c.NeedsPerson {
		alarm = linkText(c)
	}
	p.health.alarm(channelWhatsApp, alarm)
	if err := p.notify(s, c); err != nil {
		p.log.Warn("tell the operator about WhatsApp", zap.Error(err))
	}
}

// linkText says in a line how it stands with the link and what to do.
func linkText(c web.Channel) string {
	text := "WhatsApp is " + c.Text
	if c.Detail != "" {
		text += " (" + c.Detail + ")"
	}
	if c.WhatToDo != "" {
		text += ": " + c.WhatToDo
	}
	return text
}

// keyTold is where the store keeps what the operator was told last.
const keyTold = "whatsapp told"

// notify tells main's chat what somebody must act on, once a change, also over
// restarts. Linking is under way before the eyes of who does it.
func (p *phone) notify(s wastate.State, c web.Channel) error {
	if p.db == nil {
		return nil
	}
	ctx := context.Background() // what changed last is told even while the daemon shuts down
	told, err := p.db.State(ctx, keyTold)
	if err != nil {
		return err
	}
	before, _, _ := strings.Cut(told, "\n")
	switch s.Name {
	case wastate.Connected, wastate.NotLinked:
		if before != "" {
			return p.db.SetState(ctx, keyTold, "\n"+berth.NewID(8))
		}
		return nil
	case wastate.LoggedOut, wastate.Replaced, wastate.Banned, wastate.Outdated, wastate.Refused, wastate.PasskeyNeeded, wastate.PhoneNeeded:
	default:
		return nil
	}
	main, ok := p.dispatcher.Group(berth.MainFolder)
	if before == string(s.Name) || !ok || whatsapp.Owns(main.JID) && s.Name != wastate.PhoneNeeded {
		return nil // the link itself cannot carry the news that it is broken
	}
	// The key names the change: a kill in between does not tell it twice.
	err = p.db.AddOutgoing(ctx, berth.Outgoing{
		ChatJID: main.JID, Key: "whatsapp/" + string(s.Name) + "/" + told, Kind: berth.OutNotice,
		Text: linkText(c), MessageID: berth.NewID(10), CreatedAt: time.Now(),
	})
	if err != nil {
		return err
	}
	return p.db.SetState(ctx, keyTold, string(s.Name)+"\n"+berth.NewID(8))
}

// statusFor is the content of the status file. After a kill it is what was true
// last: whether its writer lives, its pid says.
type statusFor struct {
	web.Channel
	PID int `json:"pid"`
}

// writeStatus puts the state where scripts find it, whole or not at all.
func writeStatus(path string, c web.Channel) error {
	data, err := json.MarshalIndent(statusFor{c, os.Getpid()}, "", "  ")
	if err != nil {
		return err
	}
	return writeBeside(path, append(data, '\n'))
}

// writeBeside puts a file for this user alone into the place of another.
func writeBeside(path string, data []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if _, err = f.Write(data); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// Login yields what a person has to do to link an account.
func (p *phone) Login(ctx context.Context, in web.NewLogin) iter.Seq2[web.LoginEvent, error] {
	return func(yield func(web.LoginEvent, error) bool) {
		if p.ch == nil {
			yield(web.LoginEvent{}, p.unusable())
			return
		}
		for e, err := range p.ch.Login(ctx, in.Phone) {
			if !yield(web.LoginEvent(e), forLogin(err)) {
				return
			}
		}
	}
}

func (p *phone) AnswerPasskey(ctx context.Context, in web.Passkey) error {
	switch {
	case p.ch == nil:
		return p.unusable()
	case in.Same:
		return forLogin(p.ch.ConfirmPasskey(ctx))
	}
	return forLogin(p.ch.Passkey(ctx, in.Response))
}

func (p *phone) Logout(ctx context.Context) error {
	if p.ch == nil {
		return p.unusable()
	}
	return forLogin(p.ch.Logout(ctx))
}

func (p *phone) unusable() error {
	return berth.Errorf(berth.Unavailable, "WhatsApp cannot be opened: %w: %s", p.failed, p.state().WhatToDo)
}

// forLogin gives what WhatsApp says to whoever is linking.
func forLogin(err error) error {
	if _, known := errors.AsType[*berth.Error](err); err == nil || known || errors.Is(err, context.Canceled) {
		return err
	}
	return berth.Errorf(berth.Unavailable, "WhatsApp did not do it: %w: try again in some minutes", err)
}

// listChats returns the chats that the store knows.
func listChats(ctx context.Context, db *sqlite.DB) ([]web.Chat, error) {
	const most = 1000
	chats, err := db.Chats(ctx, most)
	out := make([]web.Chat, 0, len(chats))
	for _, c := range chats {
		w := web.Chat{JID: c.JID, Name: c.Name, Folder: c.Folder}
		if !c.LastActivity.IsZero() {
			w.LastActivity = &c.LastActivity
		}
		out = append(out, w)
	}
	return out, err
}

// Chats implements web.Channels.
func (c *control) Chats(ctx context.Context, refresh bool) ([]web.Chat, error) {
	if refresh && c.phone != nil {
		if err := c.phone.syncChats(ctx); err != nil {
			return nil, err
		}
	}
	return listChats(ctx, c.db)
}

// link returns the link of a channel.
func (c *control) link(channel string) (*phone, error) {
	switch {
	case channel != channelWhatsApp:
		return nil, berth.Errorf(berth.NotFound, "no channel %.40q needs an account: there is %s", channel, channelWhatsApp)
	case c.phone == nil:
		return nil, berth.Errorf(berth.NotFound, "this daemon does not serve WhatsApp: set CHANNELS=%s,%s, and start it again", channelConsole, channelWhatsApp)
	}
	return c.phone, nil
}

func (c *control) Login(ctx context.Context, channel string, in web.NewLogin) iter.Seq2[web.LoginEvent, error] {
	p, err := c.link(channel)
	if err != nil {
		return func(yield func(web.LoginEvent, error) bool) { yield(web.LoginEvent{}, err) }
	}
	return p.Login(ctx, in)
}

func (c *control) AnswerPasskey(ctx context.Context, channel string, in web.Passkey) error {
	p, err := c.link(channel)
	if err != nil {
		return err
	}
	return p.AnswerPasskey(ctx, in)
}

func (c *control) Logout(ctx context.Context, channel string) error {
	p, err := c.link(channel)
	if err != nil {
		return err
	}
	return p.Logout(ctx)
}

// readStatus returns what the last daemon or login wrote; ok is false if there is
// nothing.
func readStatus(cfg Config) (c web.Channel, ok bool, err error) {
	data, err := os.ReadFile(filepath.Join(cfg.Root, "store", statusFile))
	if errors.Is(err, os.ErrNotExist) {
		return c, false, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &c)
	}
	if err != nil {
		return c, false, fmt.Errorf("read store/%s: %w", statusFile, err)
	}
	return c, true, nil
}
