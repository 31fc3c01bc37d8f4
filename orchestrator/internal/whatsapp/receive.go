package whatsapp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/appstate"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/types/events"
	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waid"
	"berth/orchestrator/internal/whatsapp/wamsg"
)

// idMark parts a message's id from its sender. The id alone is the sender's
// choice: with it anybody could take the place of somebody else's message.
const idMark = "/"

// noticePrefix begins the ids of what is nobody's message.
const noticePrefix = "notice-"

func messageID(id string, sender waid.Person) string {
	if !wamsg.IsID(id) { // no program of WhatsApp's makes such a one
		sum := sha256.Sum256([]byte(id))
		id = "odd-" + hex.EncodeToString(sum[:16])
	}
	return id + idMark + sender.ID()
}

const (
	late        = 15 * time.Minute // from then on the agent is told how long a message waited
	backlogMost = time.Minute      // in case the end of the backlog is not announced
)

// handle takes the client's events. For a message, false means that it is not
// safe and has to come again.
func (c *Channel) handle(cli *whatsmeow.Client, event any) bool {
	if c.current() != cli {
		return true // its session is over
	}
	if c.took != nil {
		defer func(begin time.Time) { c.took(time.Since(begin)) }(time.Now())
	}
	switch e := event.(type) {
	case *events.Message:
		c.tell(e)
		return c.message(cli, e)
	case *events.UndecryptableMessage:
		return c.undecryptable(cli, e)
	case *events.Disconnected:
		// Events come from several goroutines: this one may be older than the
		// connection that is there now.
		if !cli.IsConnected() {
			c.tell(e)
			c.setBacklog(false)
		}
		return true
	case *events.LoggedOut:
		c.setBacklog(false)
		c.drop(cli)
	case *events.Connected:
		c.note(func() { c.early = !c.linked.Load() })
	}
	c.tell(event)
	switch e := event.(type) {
	case *events.Connected:
		c.connected(cli)
	case *events.KeepAliveRestored:
		c.o.online()
	case *events.StreamError:
		// Most often the server hangs up then; otherwise nobody would connect again.
		c.background(func(context.Context) { cli.ResetConnection() })
	case *events.PairSuccess:
		c.belongTo(c.life, e.ID.User)
		c.number.Store("+" + e.ID.User)
		early := false
		c.note(func() {
			c.linked.Store(true)
			early, c.early = c.early, false
		})
		c.wake()
		if early && cli.IsConnected() {
			c.tell(&events.Connected{})
			c.connected(cli)
		}
	case *events.ClientOutdated:
		c.wake()
	case *events.PushNameSetting:
		c.appear(cli)
	case *events.AppStateSyncComplete:
		if e.Name == appstate.WAPatchCriticalBlock {
			c.appear(cli)
		}
	case *events.OfflineSyncPreview:
		if e.Messages > 0 {
			c.setBacklog(true)
		}
	case *events.OfflineSyncCompleted:
		c.endBacklog()
	case *events.HistorySync:
		c.readHistory(e)
	case *events.JoinedGroup:
		c.nameChat(e.JID, e.Name)
		c.regroup()
	case *events.GroupInfo:
		if e.Name != nil {
			c.nameChat(e.JID, e.Name.Name)
		}
		c.groupChange(cli, e)
		c.regroup()
	case *events.CallOffer, *events.CallOfferNotice:
		line, chat, from := wamsg.Call(e)
		c.notice(cli, chat, from, time.Now(), line)
	}
	return true
}

func (c *Channel) connected(cli *whatsmeow.Client) {
	c.mu.Lock()
	named := c.named
	c.mu.Unlock()
	if named {
		c.appear(cli)
	}
	c.o.online()
	c.background(c.sync)
}

func (o Options) online() {
	if o.Online != nil {
		o.Online()
	}
}

func (c *Channel) sync(ctx context.Context) {
	if _, err := c.Groups(ctx, false); err != nil && ctx.Err() == nil {
		c.log.Warn("ask for the groups", zap.Error(err))
	}
}

// appear tells WhatsApp the account's name. A person's phone does not ring while
// a device of the same account is available.
func (c *Channel) appear(cli *whatsmeow.Client) {
	presence := types.PresenceUnavailable
	if c.o.OwnNumber {
		presence = types.PresenceAvailable
	}
	err := cli.SendPresence(c.life, presence)
	if err == nil {
		c.mu.Lock()
		c.named = true
		c.mu.Unlock()
	} else if !errors.Is(err, whatsmeow.ErrNoPushName) {
		c.log.Debug("send presence", zap.Error(err))
	}
}

// setBacklog begins and ends the time in which messages are collected.
func (c *Channel) setBacklog(active bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case active == (c.backlog != nil):
		return
	case active:
		c.backlog = time.AfterFunc(backlogMost, func() { c.setBacklog(false) })
	default:
		c.backlog.Stop()
		c.backlog = nil
	}
	if c.o.Backlog != nil {
		c.o.Backlog(active)
	}
}

// endBacklog ends it when the messages of it that wait for their media are stored.
func (c *Channel) endBacklog() {
	c.mu.Lock()
	this := c.backlog
	c.mu.Unlock()
	if this == nil {
		return
	}
	c.background(func(ctx context.Context) {
		c.lines.settled(ctx)
		c.mu.Lock()
		same := c.backlog == this
		c.mu.Unlock()
		if same {
			c.setBacklog(false)
		}
	})
}

// chat returns under which name a chat is registered.
func (c *Channel) chat(cli *whatsmeow.Client, jid types.JID) (string, berth.Group, bool) {
	if !waid.Served(jid) || c.o.Group == nil {
		return "", berth.Group{}, false
	}
	name := waid.Chat(jid, c.numberOf(cli))
	if g, ok := c.o.Group(name); ok {
		return name, g, true
	}
	p := c.person(cli, jid, types.JID{})
	for _, other := range []types.JID{p.LID, p.PN} {
		if other.IsEmpty() {
			continue
		}
		if g, ok := c.o.Group(other.String()); ok {
			return other.String(), g, true
		}
	}
	return name, berth.Group{}, false
}

// self returns who Berth is. It is to be called where the client handles what it
// received: there nobody changes its addresses.
func (c *Channel) self(cli *whatsmeow.Client) wamsg.Us {
	return wamsg.Us{Person: waid.NewPerson(cli.Store.GetJID(), cli.Store.GetLID()), Prefix: c.us}
}

func (c *Channel) message(cli *whatsmeow.Client, e *events.Message) bool {
	content := wamsg.Read(e.RawMessage)
	if content.Kind == wamsg.None || content.Copy {
		return true
	}
	if c.o.Receive == nil {
		return false // there is no store
	}
	if !e.Info.IsFromMe && !e.Info.IsGroup && waid.Served(e.Info.Chat) {
		c.wrote(c.person(cli, e.Info.Sender, e.Info.SenderAlt))
	}
	chat, group, ok := c.chat(cli, e.Info.Chat)
	stranger := content.Kind == wamsg.Text && !e.Info.IsGroup && !e.Info.IsFromMe && waid.Served(e.Info.Chat)
	if !ok && !(stranger && c.o.Strangers) {
		return true
	}
	sender := c.person(cli, e.Info.Sender, e.Info.SenderAlt)
	if content.Kind == wamsg.Secret {
		content = c.open(cli, e, chat, content)
	}
	if ok {
		c.remember(chat, e.Info.ID, content)
	}

	names := c.names(cli)
	addressed := content.Address(c.self(cli), group.EffectiveTrigger(c.o.Name), names)
	m := berth.Message{
		ID: messageID(e.Info.ID, sender), ChatJID: chat, Sender: sender.ID(), SenderName: wamsg.SenderName(e.Info.PushName, sender),
		Time: e.Info.Timestamp, FromMe: e.Info.IsFromMe, Addressed: addressed.Wakes(),
	}
	if m.FromMe {
		m.Bot = c.o.OwnNumber || strings.HasPrefix(addressed.Text, c.us)
	}
	quiet := time.Since(m.Time) > c.o.MaxBacklogAge
	said := content
	switch content.Kind {
	case wamsg.Edit:
		m.ID = messageID(content.Target.ID, sender) // so only what the sender wrote
		if content.New != nil {
			said = *content.New
		}
	case wamsg.Revoke:
		author := sender
		if by := content.Target.Sender; !by.IsEmpty() && !sender.Is(by) && !content.Target.FromMe {
			if !c.isAdmin(chat, sender) {
				return true
			}
			author = c.person(cli, by, types.JID{})
			m.Sender, m.SenderName = author.ID(), wamsg.SenderName(names(by), author)
		}
		m.ID, quiet = messageID(content.Target.ID, author), true
	case wamsg.Reaction, wamsg.Vote, wamsg.Secret:
		quiet = true
	}
	place := chat + " " + m.ID
	if changes := content.Kind == wamsg.Edit || content.Kind == wamsg.Revoke; changes {
		c.note(func() { c.changes.add(place, struct{}{}) })
	} else if c.isChanged(place) {
		return true // it could not be decrypted at first, and the change came before it
	}
	around := words{Typed: addressed.Text}
	if addressed.Quote != "" {
		who := c.o.Name
		if q := said.Quoted; q != nil && !addressed.Reply {
			who = wamsg.SenderName(names(q.Sender), c.person(cli, q.Sender, types.JID{}))
		}
		around.Before = fmt.Sprintf("[answers %s: “%s”]\n", who, addressed.Quote)
	}
	if waited := time.Since(m.Time); waited > late {
		around.After = "\n" + wamsg.Late(waited)
	}
	var file *medium
	why := ""
	if said.Media != nil {
		file, why = c.medium(chat, e.Info, said)
		if content.Kind == wamsg.Edit {
			file, why = c.sameMedium(place, said, file, why)
		}
		if file != nil {
			c.note(func() { c.media.add(place, *file) })
			file.Words = around
		}
	}
	m.Text = around.around(said.Body(around.Typed, why))
	return m.Text == "" || c.take(cli, messageID(e.Info.ID, sender), waiting{Message: m, Quiet: quiet, Medium: file})
}

// remember keeps what later messages of the chat need.
func (c *Channel) remember(chat, id string, content wamsg.Content) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if content.Poll != nil && wamsg.IsID(id) {
		c.polls.add(chat+" "+id, content.Poll)
	}
	switch content.Kind {
	case wamsg.Text, wamsg.Media:
		if content.Expires > 0 {
			c.expires[chat] = content.Expires
		} else {
			delete(c.expires, chat)
		}
	}
}

// open decrypts what is encrypted once more.
func (c *Channel) open(cli *whatsmeow.Client, e *events.Message, chat string, content wamsg.Content) wamsg.Content {
	var err error
	switch content.Hidden {
	case wamsg.HiddenEdit:
		inside, failed := cli.DecryptSecretEncryptedMessage(c.life, e)
		if err = failed; err == nil {
			return content.Opened(inside)
		}
	case wamsg.HiddenVote:
		vote, failed := cli.DecryptPollVote(c.life, e)
		if err = failed; err == nil {
			c.mu.Lock()
			poll := c.polls.by[chat+" "+content.Target.ID]
			c.mu.Unlock()
			return content.Voted(poll, vote)
		}
	case wamsg.HiddenReaction:
		reaction, failed := cli.DecryptReaction(c.life, e)
		if err = failed; err == nil {
			return content.Reacted(reaction)
		}
	}
	if err != nil {
		c.log.Info("a message's content stays hidden", zap.String("chat", chat), zap.String("id", e.Info.ID), zap.Error(err))
	}
	return content
}

func (c *Channel) undecryptable(cli *whatsmeow.Client, e *events.UndecryptableMessage) bool {
	c.log.Warn("message cannot be decrypted; it was asked for again",
		zap.Stringer("chat", e.Info.Chat), zap.Stringer("sender", e.Info.Sender), zap.String("id", e.Info.ID))
	if line := wamsg.Undecryptable(e); line != "" {
		c.notice(cli, e.Info.Chat, e.Info.Sender, e.Info.Timestamp, line)
	}
	return true
}

func (c *Channel) groupChange(cli *whatsmeow.Client, e *events.GroupInfo) {
	if line := wamsg.GroupChange(e, c.names(cli)); line != "" {
		by := types.JID{}
		if e.Sender != nil {
			by = *e.Sender
		}
		c.notice(cli, e.JID, by, e.Timestamp, line)
	}
}

// notice stores a line that is nobody's message. It is not sent again if that
// does not work.
func (c *Channel) notice(cli *whatsmeow.Client, jid, from types.JID, at time.Time, line string) {
	chat, _, ok := c.chat(cli, jid)
	if !ok || line == "" {
		return
	}
	who := c.person(cli, from, types.JID{})
	sum := sha256.Sum256([]byte(at.String() + line))
	m := berth.Message{
		ID: noticePrefix + hex.EncodeToString(sum[:8]) + idMark + who.ID(), ChatJID: chat, Text: line, Time: at,
		Sender: who.ID(), SenderName: wamsg.SenderName(c.names(cli)(from), who),
	}
	if err := c.store(c.life, m, true); err != nil && c.life.Err() == nil {
		c.log.Warn("store a notice", zap.String("chat", chat), zap.Error(err))
	}
}

// store hands a message over.
func (c *Channel) store(ctx context.Context, m berth.Message, quiet bool) error {
	if quiet && c.o.Quiet != nil {
		return c.o.Quiet(ctx, m)
	}
	_, err := c.o.Receive(ctx, m)
	return err
}

// given says whether a message that could not be stored is to be given up.
func (c *Channel) given(m berth.Message, err error) bool {
	known, ok := errors.AsType[*berth.Error](err)
	switch {
	case ok && known.Kind == berth.NotFound: // the group was removed meanwhile
		return true
	case ok && known.Kind == berth.Invalid: // it would come again for ever
		c.log.Error("message dropped", zap.String("chat", m.ChatJID), zap.String("id", m.ID), zap.Error(err))
		return true
	}
	return false
}

// receive hands a message over; it says whether it is safe.
func (c *Channel) receive(cli *whatsmeow.Client, m berth.Message, quiet bool) bool {
	if err := c.store(c.life, m, quiet); err != nil && !c.given(m, err) {
		return c.unsafe(cli, m, err)
	}
	c.mu.Lock()
	c.refusals = 0
	c.mu.Unlock()
	return true
}

// unsafe has a message sent again.
func (c *Channel) unsafe(cli *whatsmeow.Client, m berth.Message, err error) bool {
	c.log.Error("store a message; it will come again", zap.String("chat", m.ChatJID), zap.String("id", m.ID), zap.Error(err))
	c.refuse(cli)
	return false
}

// refuse asks for another connection, since only then WhatsApp sends again what
// was not acknowledged. It waits and asks in the handler of the message that was
// refused: so none that came later is handled before it.
func (c *Channel) refuse(cli *whatsmeow.Client) {
	const longest = time.Minute
	c.mu.Lock()
	wait := min(c.retryFirst<<min(c.refusals, 10), longest)
	c.refusals++
	c.mu.Unlock()
	select {
	case <-time.After(wait):
		cli.ResetConnection()
	case <-c.life.Done():
	}
}

func (c *Channel) isChanged(place string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.changes.by[place]
	return ok
}

// note changes what Channel.mu guards.
func (c *Channel) note(change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
}

// recent remembers what came last, by key. It is lost with the process: then a
// vote is told without what it was for, and the like.
type recent[T any] struct {
	by    map[string]T
	order []string
}

const maxRecent = 200

func (r *recent[T]) add(key string, value T) {
	if r.by == nil {
		r.by = make(map[string]T)
	}
	if _, ok := r.by[key]; !ok {
		r.order = append(r.order, key)
	}
	r.by[key] = value
	if len(r.order) > maxRecent {
		delete(r.by, r.order[0])
		r.order = r.order[1:]
	}
}
