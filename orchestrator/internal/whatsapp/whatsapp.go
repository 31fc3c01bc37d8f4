// Package whatsapp is the channel to WhatsApp, on an unmodified whatsmeow client
// with a database of its own. What messages say, how addresses compare and what
// state the link is in is decided in its subpackages; here are the connection
// and the order of things: a message is stored before it is acknowledged, and
// comes again if it could not be.
package whatsapp

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"go.mau.fi/libsignal/logger"
	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/proto/waCompanionReg"
	"go.mau.fi/whatsmeow/store"
	"go.mau.fi/whatsmeow/store/sqlstore"
	"go.mau.fi/whatsmeow/types"
	"go.uber.org/zap"
	_ "modernc.org/sqlite" // whatsmeow's store

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waid"
	"berth/orchestrator/internal/whatsapp/wamsg"
	"berth/orchestrator/internal/whatsapp/wastate"
)

// Owns reports whether a chat is one of WhatsApp's.
func Owns(chat string) bool { return waid.Owns(chat) }

// Options are what a Channel works with. The functions may be called from any
// goroutine, until Close returns, and must not call the Channel's Run, Close,
// Login or Logout.
type Options struct {
	Path string // of the session's database, which no other program may open
	Name string // the assistant's
	// OwnNumber says that the account is the assistant's alone. Otherwise a person
	// uses it too, and what Berth says begins with "<Name>: ".
	OwnNumber bool

	// Receive stores a message and wakes its group; nil means that it is safe. A
	// message with an id that the chat has takes its place: that is how edits and
	// deletions come, and where a file is that took long to come. It fails with
	// berth.NotFound for a chat that is not registered. After any other error the
	// message comes again. One with a file comes some seconds after it was sent, and
	// those behind it in its chat as well; the chats do not wait for each other's
	// files, but all wait for a Receive that takes long. Nil, for a program that
	// only links: messages stay with WhatsApp.
	Receive func(context.Context, berth.Message) (berth.Message, error)
	// Quiet stores like Receive what is to wake nobody: reactions, changes of the
	// group, deletions, and what came too late. Nil: Receive.
	Quiet func(context.Context, berth.Message) error
	// Strangers says that Receive gets what people write in chats of their own that are
	// not registered, too: texts alone.
	Strangers bool
	// Group returns the group of a registered chat. It must not block.
	Group func(chatJID string) (berth.Group, bool)
	// GroupDir returns the folder of a chat's group, in which media are kept under
	// media/. Nil: media are not downloaded.
	GroupDir func(chatJID string) (dir string, ok bool)
	UID, GID int // to whom root gives the media, so that agents can move them
	// Answered returns the message that a text answers, if the answer is to quote
	// it. Nil: nothing is quoted.
	Answered func(context.Context, berth.Outgoing) (berth.Message, bool)

	// Online is called when texts can be sent again. It must not block.
	Online func()
	// Backlog is called with true before messages come that waited on the server,
	// and with false when all have come: to answer them together. It must not block.
	Backlog func(active bool)
	// Chats is told the names of the account's groups. It may be nil.
	Chats func(context.Context, []berth.Chat) error
	// StateChanged is told each change, one at a time. It must not block.
	StateChanged func(wastate.State)

	// ReadReceipts says that MarkRead does something.
	ReadReceipts bool

	MaxBacklogAge time.Duration // what is older wakes nobody; default 12 h
	MaxMedia      int64         // bytes of a file, in and out; default 64 MiB
	Log           *zap.Logger
	Double        *Double // for tests; nil: WhatsApp itself
}

// Channel is the link to WhatsApp. Its methods are safe for concurrent use.
type Channel struct {
	o         Options
	us        string // what Berth's texts begin with
	log       *zap.Logger
	db        *sql.DB
	container *sqlstore.Container
	link      *wastate.Link
	http      *http.Client // nil: the client's own
	life      context.Context
	end       context.CancelFunc
	tasks     tasks
	kick      chan struct{} // wakes Run
	telling   sync.Mutex
	news      chan struct{} // closed and replaced when the state changes; telling guards it
	linked    atomic.Bool
	number    atomic.Value // string: the account's

	// What tests hurry up.
	typingEvery time.Duration
	sendTimeout time.Duration
	retryFirst  time.Duration
	groupsPause time.Duration
	refresh     bool
	took        func(time.Duration) // told how long each event was handled; nil: nobody

	linking sync.Mutex // held by Login and Logout

	mu       sync.Mutex
	client   *whatsmeow.Client
	named    bool // the client knows the account's name
	early    bool // it told of its connection before it told that it is linked
	refusals int  // in a row
	backlog  *time.Timer
	expires  map[string]time.Duration // timers of chats for disappearing messages
	typists  map[string]*typist
	polls    recent[*wamsg.Question] // by chat and message id, as the others
	media    recent[medium]
	changes  recent[struct{}] // messages that were edited or deleted
	outdated time.Time        // when the version was refreshed last because it had to be

	groups groups
	lines  lines
	warm   warm
}

var globals = sync.OnceFunc(func() {
	// It would print to stdout, and only what whatsmeow logs as well.
	var silent logger.Loggable = quiet{}
	logger.Setup(&silent)
	store.DeviceProps.Os = new("Berth") // the name in the phone's list
	store.DeviceProps.PlatformType = waCompanionReg.DeviceProps_DESKTOP.Enum()
})

// New opens the session; it does not connect.
func New(ctx context.Context, o Options) (_ *Channel, err error) {
	globals()
	o.MaxBacklogAge = cmp.Or(o.MaxBacklogAge, 12*time.Hour)
	o.MaxMedia = cmp.Or(o.MaxMedia, 64<<20)
	c := &Channel{
		o: o, log: o.Log, kick: make(chan struct{}, 1), news: make(chan struct{}), expires: make(map[string]time.Duration), typists: make(map[string]*typist),
		typingEvery: 10 * time.Second, sendTimeout: time.Minute, retryFirst: time.Second, groupsPause: time.Minute, refresh: o.Double == nil,
	}
	if !o.OwnNumber {
		c.us = o.Name + ": "
	}
	c.number.Store("")
	if c.http, err = o.Double.client(); err != nil {
		return nil, err
	}
	if c.db, err = open(o.Path, "NORMAL"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.db.Close())
		}
	}()
	c.lines = lines{
		hold: holdMost, start: time.Now(), slots: make(chan struct{}, downloads), chats: make(map[string]*line), moved: make(chan struct{}),
	}
	if c.lines.db, err = open(o.Path, "FULL"); err != nil {
		return nil, err
	}
	c.lines.db.SetMaxOpenConns(1)
	defer func() {
		if err != nil {
			err = errors.Join(err, c.lines.db.Close())
		}
	}()
	c.container = sqlstore.NewWithDB(c.db, "sqlite", wrap(c.log.Named("store")))
	if err := c.container.Upgrade(ctx); err != nil {
		return nil, fmt.Errorf("prepare %s: %w", o.Path, err)
	}
	if err := errors.Join(c.prepare(ctx), c.lines.prepare(ctx), c.readWarm(ctx)); err != nil {
		return nil, fmt.Errorf("prepare %s: %w", o.Path, err)
	}
	device, err := c.container.GetFirstDevice(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the session: %w", err)
	}
	if err := c.container.LIDMap.FillCache(ctx); err != nil {
		return nil, fmt.Errorf("read the addresses: %w", err)
	}
	c.life, c.end = context.WithCancel(context.Background())
	c.client = c.newClient(device)
	c.linked.Store(device.ID != nil)
	if device.ID != nil {
		c.number.Store("+" + device.ID.User)
		c.keep(ctx, keptAccount, device.ID.User)
	}
	c.named = device.PushName != ""
	var seen time.Time
	_ = c.kept(ctx, keptPhoneSeen, &seen) // without it the phone's absence is counted from now
	c.link = wastate.New(device.ID != nil, seen, time.Now())
	_ = c.kept(ctx, keptGroups, &c.groups.list)
	c.sweepMedia()
	return c, nil
}

// open opens the database so that every connection has the pragmas, and writers
// take the lock first: whatsmeow loses messages whose decryption finds it taken.
// sync says what of it outlives a power cut.
func open(path, sync string) (*sql.DB, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the WhatsApp session: %w", err)
	}
	if err := errors.Join(f.Chmod(0o600), f.Close()); err != nil {
		return nil, fmt.Errorf("open the WhatsApp session: %w", err)
	}
	path, err = filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	return sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+
		"?_pragma=foreign_keys(1)&_pragma=journal_mode(WAL)&_pragma=synchronous("+sync+")&_pragma=busy_timeout(10000)&_txlock=immediate")
}

func (c *Channel) newClient(device *store.Device) *whatsmeow.Client {
	cli := whatsmeow.NewClient(device, wrap(c.log))
	cli.SynchronousAck = true
	cli.EnableDecryptedEventBuffer = true
	cli.UseRetryMessageStore = true
	cli.AutomaticMessageRerequestFromPhone = true
	cli.SendReportingTokens = true
	cli.BackgroundEventCtx = c.life
	cli.SetMaxParallelRetryReceiptHandling(4)
	cli.AutoReconnectHook = func(err error) bool {
		cli.AutoReconnectErrors = min(cli.AutoReconnectErrors, 30) // a minute: it waits 2 s for each
		c.tell(wastate.DialFailed{Err: err})
		return true
	}
	if c.http != nil {
		cli.SetPreLoginHTTPClient(c.http)
		cli.SetWebsocketHTTPClient(c.http)
		cli.SetMediaHTTPClient(c.http)
	}
	cli.AddEventHandlerWithSuccessStatus(func(event any) bool { return c.handle(cli, event) })
	return cli
}

func (c *Channel) current() *whatsmeow.Client {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.client
}

// State returns how it stands with the link.
func (c *Channel) State() wastate.State { return c.link.State(time.Now()) }

// Number returns the account's number, such as "+4915112345678"; it is empty if
// none is linked.
func (c *Channel) Number() string { return c.number.Load().(string) }

// tell moves the state on.
func (c *Channel) tell(event any) {
	c.telling.Lock()
	defer c.telling.Unlock()
	seen := c.link.PhoneSeen()
	s, changed := c.link.Handle(event, time.Now())
	if now := c.link.PhoneSeen(); now.Sub(seen) > time.Hour {
		c.background(func(ctx context.Context) { c.keep(ctx, keptPhoneSeen, now) })
	}
	if !changed {
		return
	}
	close(c.news)
	c.news = make(chan struct{})
	text := "WhatsApp is " + s.String()
	if s.Detail != "" {
		text += ": " + s.Detail
	}
	c.log.Info(text)
	if c.o.StateChanged != nil {
		c.o.StateChanged(s)
	}
}

// await waits until the state is as asked.
func (c *Channel) await(ctx context.Context, is func(wastate.State) bool) error {
	for {
		c.telling.Lock()
		news := c.news
		c.telling.Unlock()
		if is(c.State()) {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// tasks are goroutines that Close waits for.
type tasks struct {
	sync.WaitGroup
	mu     sync.Mutex
	closed bool
}

func (t *tasks) wait() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.Wait()
}

// background runs what Close waits for.
func (c *Channel) background(do func(context.Context)) {
	c.tasks.mu.Lock()
	defer c.tasks.mu.Unlock()
	if !c.tasks.closed {
		c.tasks.Go(func() { do(c.life) })
	}
}

func (c *Channel) wake() {
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

// Run keeps the connection up while an account is linked, until ctx ends. The
// client connects again by itself; nobody connects again because it is silent.
func (c *Channel) Run(ctx context.Context) error {
	defer func() {
		c.hangUp()
		c.setBacklog(false)
		c.tell(wastate.Closed{})
	}()
	c.resume()
	c.refreshVersion(ctx)
	dial := c.linked.Load()
	for {
		if dial {
			c.connect(ctx)
		}
		// After linking, the client connects once more and does not try again.
		var stuck <-chan time.Time
		if c.linked.Load() && c.State().Name == wastate.Linked {
			stuck = time.After(30 * time.Second)
		}
		dial = false
		select {
		case <-ctx.Done():
			return nil
		case <-stuck:
			dial = !c.current().IsConnected()
		case <-c.kick:
			dial = c.renewed(ctx)
		}
	}
}

// hangUp ends the connection. While the client dials, that waits for the dialing,
// and so not for long.
func (c *Channel) hangUp() {
	const patience = 5 * time.Second
	defer time.AfterFunc(patience, c.end).Stop()
	cli := c.current()
	if ended(c.State()) {
		awaitHangUp(cli)
	}
	cli.Disconnect()
}

// awaitHangUp waits until WhatsApp has ended a connection, as it does when it has
// said why: Disconnect at the same instant is a race within whatsmeow, which does
// not tell when it is over.
func awaitHangUp(cli *whatsmeow.Client) {
	const most, every = time.Second, 10 * time.Millisecond
	for range most / every {
		if !cli.IsConnected() {
			return
		}
		time.Sleep(every)
	}
}

// ended reports whether WhatsApp ended the connection for good.
func ended(s wastate.State) bool {
	return s.Name == wastate.Replaced || s.Name == wastate.Banned || s.Name == wastate.Outdated || s.Name == wastate.Refused
}

// connect dials until it has a connection.
func (c *Channel) connect(ctx context.Context) {
	const longest = time.Minute
	for wait := 100 * time.Millisecond; ctx.Err() == nil && !(online(c.State()) && c.current().IsConnected()); wait = min(2*wait+2*time.Second, longest) {
		c.tell(wastate.Dialing{})
		// ctx ends the dialing only: a connection is ended by Disconnect, which
		// whatsmeow cannot bear at the same time as the end of its context.
		dialing, cancel := context.WithCancel(c.life)
		stop := context.AfterFunc(ctx, cancel)
		err := c.current().ConnectContext(dialing)
		stop()
		if err == nil || errors.Is(err, store.ErrDeviceDeleted) || !c.linked.Load() || ctx.Err() != nil {
			return
		}
		// A connection that was refused is there until WhatsApp hangs up.
		if !errors.Is(err, whatsmeow.ErrAlreadyConnected) {
			c.tell(wastate.DialFailed{Err: err})
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// renewed deals with the ends from which the client does not come back, and says
// whether to connect again.
func (c *Channel) renewed(ctx context.Context) bool {
	if c.State().Name != wastate.Outdated {
		return false
	}
	// Once: if the present version is refused as well, only an update helps.
	const again = time.Hour
	c.mu.Lock()
	tried := time.Since(c.outdated) < again
	c.outdated = time.Now()
	c.mu.Unlock()
	if tried || !c.refreshVersion(ctx) {
		return false
	}
	return true
}

// refreshVersion asks WhatsApp for the version of its client that is in force,
// and falls back to the one that was in force when it last answered. It says
// whether WhatsApp answered.
func (c *Channel) refreshVersion(ctx context.Context) bool {
	if !c.refresh {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	version, err := whatsmeow.GetLatestVersion(ctx, c.http)
	if err == nil {
		c.keep(ctx, keptVersion, *version)
		store.SetWAVersion(*version)
		return true
	}
	c.log.Warn("ask for WhatsApp's version", zap.Error(err))
	var last store.WAVersionContainer
	if c.kept(ctx, keptVersion, &last) == nil && store.GetWAVersion().LessThan(last) {
		store.SetWAVersion(last)
	}
	return false
}

// drop puts a fresh client in the place of one whose session is over. A new link
// needs no restart. It does not wait for the old one, and may be called from its
// handler.
func (c *Channel) drop(old *whatsmeow.Client) {
	c.mu.Lock()
	if c.client == old {
		c.client = c.newClient(c.container.NewDevice())
		c.named, c.early = false, false
		clear(c.expires)
	}
	c.mu.Unlock()
	c.linked.Store(false)
	c.number.Store("")
	c.groups.forget()
	c.background(func(ctx context.Context) {
		old.Disconnect()
		old.RemoveEventHandlers()
		c.keep(ctx, keptGroups, groupList{})
	})
}

// Logout unlinks the device. Without a connection it fails with
// berth.Unavailable, unless there will be none: then it forgets the session, and
// the phone lists the device until somebody removes it there.
func (c *Channel) Logout(ctx context.Context) error {
	if !c.linking.TryLock() {
		return errLinking
	}
	defer c.linking.Unlock()
	cli := c.current()
	if !c.linked.Load() {
		return berth.Errorf(berth.Conflict, "no WhatsApp account is linked")
	}
	switch s := c.State(); {
	case online(s):
		if err := cli.Logout(ctx); err != nil {
			return offline(err)
		}
	case ended(s):
		awaitHangUp(cli)
		cli.Disconnect()
		if err := cli.Store.Delete(ctx); err != nil {
			return fmt.Errorf("forget the session: %w", err)
		}
	default:
		return berth.Errorf(berth.Unavailable, "WhatsApp is %s: to log out, Berth must be connected; or remove the device on the phone", s)
	}
	c.drop(cli)
	c.tell(wastate.Unlinked{})
	return nil
}

// Close ends everything. What is under way and not stored comes again, or goes on
// with the next New and Run.
func (c *Channel) Close() error {
	c.hangUp()
	c.setBacklog(false)
	c.end()
	c.tasks.wait()
	return errors.Join(c.lines.db.Close(), c.db.Close())
}

func online(s wastate.State) bool {
	return s.Name == wastate.Connected || s.Name == wastate.PhoneNeeded
}

// numberOf returns the number of a hidden address, or none.
func (c *Channel) numberOf(cli *whatsmeow.Client) waid.Numbers {
	return func(lid types.JID) types.JID {
		pn, err := cli.Store.LIDs.GetPNForLID(c.life, lid)
		if err != nil {
			c.log.Warn("look up a number", zap.Error(err))
		}
		return pn
	}
}

// person completes what is known of somebody.
func (c *Channel) person(cli *whatsmeow.Client, sender, alt types.JID) waid.Person {
	p := waid.NewPerson(sender, alt)
	switch {
	case p.LID.IsEmpty() && !p.PN.IsEmpty():
		if lid, err := cli.Store.LIDs.GetLIDForPN(c.life, p.PN); err == nil {
			p = waid.NewPerson(p.PN, lid)
		}
	case p.PN.IsEmpty() && !p.LID.IsEmpty():
		p = waid.NewPerson(p.LID, c.numberOf(cli)(p.LID))
	}
	return p
}
