package whatsapp

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waformat"
	"berth/orchestrator/internal/whatsapp/waid"
	"berth/orchestrator/internal/whatsapp/wamsg"
)

// NewMessageID returns an id for berth.Outgoing.MessageID of a WhatsApp chat, in
// the form that WhatsApp's own clients on computers use: readers may tell others
// by it.
func NewMessageID() string {
	b := make([]byte, 9)
	_, _ = rand.Read(b) // crypto/rand.Read never fails
	return whatsmeow.WebMessageIDPrefix + strings.ToUpper(hex.EncodeToString(b))
}

// Send sends a text under its MessageID, in which the readers' devices see that
// they have it already. "@" and the name or number of a member mentions them. It
// fails with berth.Unavailable while there is no connection: then Online will be
// called. It fails with berth.Denied for somebody who never wrote to the account.
func (c *Channel) Send(ctx context.Context, o berth.Outgoing) error {
	to, err := c.address(o)
	if err != nil {
		return err
	}
	text, info := c.us+waformat.WhatsApp(o.Text), c.contextFor(ctx, to, o)
	text = c.mention(to, text, info)
	m := &waE2E.Message{ExtendedTextMessage: &waE2E.ExtendedTextMessage{Text: &text, ContextInfo: info}}
	if info.Expiration == nil && info.StanzaID == nil && len(info.MentionedJID) == 0 {
		m = &waE2E.Message{Conversation: &text}
	}
	return c.send(ctx, to, o, m)
}

// address returns where a text goes, if it can go there now.
func (c *Channel) address(o berth.Outgoing) (types.JID, error) {
	to, err := waid.Parse(o.ChatJID)
	if err != nil {
		return to, err
	}
	if !waid.Served(to) {
		return to, berth.Errorf(berth.Invalid, "%s is no chat that Berth takes part in", o.ChatJID)
	}
	if s := c.State(); !online(s) || !c.current().IsConnected() {
		return to, berth.Errorf(berth.Unavailable, "WhatsApp is %s", s)
	}
	if c.isCold(to) {
		return to, cold(o.ChatJID)
	}
	return to, nil
}

func (c *Channel) send(ctx context.Context, to types.JID, o berth.Outgoing, m *waE2E.Message) error {
	cli := c.current()
	_, err := cli.SendMessage(ctx, to, m, whatsmeow.SendRequestExtra{ID: o.MessageID, Timeout: c.sendTimeout})
	c.retype(o.ChatJID) // a message ends the sign that somebody writes
	if err != nil && ctx.Err() == nil {
		return c.explain(cli, err)
	}
	return err
}

// contextFor returns what goes with a text: the chat's timer, and what is answered.
func (c *Channel) contextFor(ctx context.Context, to types.JID, o berth.Outgoing) *waE2E.ContextInfo {
	info := &waE2E.ContextInfo{}
	c.mu.Lock()
	expires := c.expires[o.ChatJID]
	c.mu.Unlock()
	if expires > 0 {
		info.Expiration = new(uint32(expires / time.Second))
	}
	if c.o.Answered != nil {
		if m, ok := c.o.Answered(ctx, o); ok {
			if id, by, ok := c.quoted(to, m); ok {
				sender := by.String()
				info.StanzaID, info.Participant = &id, &sender
				info.QuotedMessage = &waE2E.Message{Conversation: new(wamsg.Excerpt(m.Text))}
			}
		}
	}
	return info
}

// mention makes mentions of members of a group real.
func (c *Channel) mention(to types.JID, text string, info *waE2E.ContextInfo) string {
	g, ok := c.groups.find(to.String())
	if !ok || !strings.Contains(text, "@") {
		return text
	}
	cli := c.current()
	var members []wamsg.Member
	for _, p := range g.Participants {
		jid, err := waid.Parse(p.ID)
		if err != nil || p.Number != "" && p.Number == c.Number() { // we ourselves
			continue
		}
		m := wamsg.Member{Address: jid, Digits: []string{jid.User}, Names: c.called(cli, c.person(cli, jid, types.JID{}))}
		if p.Number != "" {
			number := types.NewJID(strings.TrimPrefix(p.Number, "+"), types.DefaultUserServer)
			m.Digits = append(m.Digits, number.User)
			if g.ByNumber {
				m.Address = number
			}
		}
		members = append(members, m)
	}
	text, who := wamsg.Mention(text, members)
	for _, j := range who {
		info.MentionedJID = append(info.MentionedJID, j.String())
	}
	return text
}

// quoted returns how a chat names a message and who sent it.
func (c *Channel) quoted(to types.JID, m berth.Message) (id string, sender types.JID, ok bool) {
	sender, err := waid.Parse(m.Sender)
	id = strings.TrimSuffix(m.ID, idMark+m.Sender)
	if err != nil || id == "" {
		return "", sender, false
	}
	if g, _ := c.groups.find(to.String()); g.ByNumber {
		if p := c.person(c.current(), sender, types.JID{}); !p.PN.IsEmpty() {
			sender = p.PN
		}
	}
	return id, sender, true
}

// explain says what a failed attempt to send means.
func (c *Channel) explain(cli *whatsmeow.Client, err error) error {
	if errors.Is(err, whatsmeow.ErrServerReturnedError) {
		// The code is in the text only.
		code := 0
		_, _ = fmt.Sscanf(strings.TrimPrefix(err.Error(), whatsmeow.ErrServerReturnedError.Error()), "%d", &code)
		switch code {
		case 404:
			return berth.Errorf(berth.NotFound, "WhatsApp does not know this chat any more (%w)", err)
		case 429:
			return fmt.Errorf("WhatsApp wants fewer messages: %w", err)
		case 463:
			return berth.Errorf(berth.Denied, "WhatsApp lets this account write only to groups and to people who wrote first (%w)", err)
		case 479:
			return berth.Errorf(berth.Invalid, "WhatsApp does not take this message (%w)", err)
		}
		return err
	}
	switch {
	case errors.Is(err, whatsmeow.ErrGroupNotFound):
		return berth.Errorf(berth.NotFound, "the group does not exist any more")
	case errors.Is(err, whatsmeow.ErrNotInGroup):
		return berth.Errorf(berth.Denied, "the account is no member of the group: add it again")
	case errors.Is(err, whatsmeow.ErrIQRateOverLimit):
		return fmt.Errorf("WhatsApp wants fewer requests: %w", err)
	case !cli.IsConnected():
		return berth.Errorf(berth.Unavailable, "the connection to WhatsApp broke: %w", err)
	}
	return offline(err)
}

// offline gives an error its kind if it says that there is no connection.
func offline(err error) error {
	_, broke := errors.AsType[*whatsmeow.DisconnectedError](err)
	if broke || errors.Is(err, whatsmeow.ErrNotConnected) || errors.Is(err, whatsmeow.ErrNotLoggedIn) {
		return berth.Errorf(berth.Unavailable, "no connection to WhatsApp: %w", err)
	}
	return err
}
