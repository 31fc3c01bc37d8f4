// Package console is the channel that needs no account: chats named
// console:<folder>, reached over the control socket. Its chats live in the
// store, so nothing is lost when nobody listens.
package console

import (
	"context"
	"iter"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"berth/orchestrator/internal/bell"
	"berth/orchestrator/internal/berth"
)

const prefix = "console:"

// JID returns the chat of a folder.
func JID(folder string) string { return prefix + folder }

// Owns reports whether a chat is one of the console's.
func Owns(jid string) bool { return strings.HasPrefix(jid, prefix) }

// Store keeps the chats.
type Store interface {
	AddMessage(context.Context, berth.Message) (seq int64, fresh bool, err error)
	MessagesAfter(ctx context.Context, chatJID string, seq int64, limit int) ([]berth.Message, error)
	LastSeq(ctx context.Context, chatJID string, skip int) (int64, error)
}

// Channel is the console. Its methods are safe for concurrent use.
type Channel struct {
	store     Store
	bell      *bell.Bell // rung when a chat changed
	assistant string
	groups    string

	mu     sync.Mutex
	typing map[string]bool
}

// New returns the console. bell must be rung for a chat whenever its messages
// change. groups is the folder of the groups' folders, for who reads of a file.
func New(store Store, b *bell.Bell, assistant, groups string) *Channel {
	return &Channel{store: store, bell: b, assistant: assistant, groups: groups, typing: make(map[string]bool)}
}

// Send puts a text into its chat. Sending a MessageID again changes nothing. Of a
// file it says where the group has it, which may have changed it since; of a
// reaction, to what it is.
func (c *Channel) Send(ctx context.Context, o berth.Outgoing) error {
	text := o.Shown()
	switch {
	case o.File != "":
		text += "\n" + filepath.Join(c.groups, o.File)
	case o.Kind == berth.OutReaction:
		to, err := c.store.MessagesAfter(ctx, o.ChatJID, o.ReactsTo-1, 1)
		if err != nil {
			return err
		}
		if len(to) == 1 && to[0].Seq == o.ReactsTo {
			text = "[reaction " + o.Text + " to: " + beginning(to[0].Text) + "]"
		}
	}
	_, _, err := c.store.AddMessage(ctx, berth.Message{
		ID: o.MessageID, ChatJID: o.ChatJID, Sender: "berth", SenderName: c.assistant,
		Text: text, Time: time.Now(), FromMe: true, Bot: true,
	})
	return err
}

// beginning returns as much of a text as it takes to know it again.
func beginning(text string) string {
	const most = 60
	text = strings.Join(strings.Fields(text), " ")
	if runes := []rune(text); len(runes) > most {
		text = string(runes[:most]) + "…"
	}
	return text
}

// SetTyping says whether the agent of a chat is at work.
func (c *Channel) SetTyping(chat string, on bool) {
	c.mu.Lock()
	changed := c.typing[chat] != on
	if on {
		c.typing[chat] = true
	} else {
		delete(c.typing, chat)
	}
	c.mu.Unlock()
	if changed {
		c.bell.Ring(chat)
	}
}

func (c *Channel) isTyping(chat string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.typing[chat]
}

// Event is something that happened in a chat: a message, or else a change of
// whether the agent is typing.
type Event struct {
	Message *berth.Message
	Typing  bool
}

// Follow yields what happens in a chat after message seq until ctx ends; first
// comes a page of messages, if there are any, and whether the agent is typing.
// With a negative seq it begins with the -seq newest messages.
func (c *Channel) Follow(ctx context.Context, chat string, seq int64) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		if seq < 0 {
			last, err := c.store.LastSeq(ctx, chat, int(-seq))
			if err != nil {
				yield(Event{}, err)
				return
			}
			seq = last
		}
		const page = 100
		for typing, told := false, false; ; {
			rung := c.bell.Wait(chat)
			now := c.isTyping(chat)
			messages, err := c.store.MessagesAfter(ctx, chat, seq, page)
			if err != nil {
				yield(Event{}, err)
				return
			}
			for _, m := range messages {
				seq = m.Seq
				if !yield(Event{Message: &m}, nil) {
					return
				}
			}
			if len(messages) == page {
				continue
			}
			if now != typing || !told {
				typing, told = now, true
				if !yield(Event{Typing: typing}, nil) {
					return
				}
			}
			select {
			case <-rung:
			case <-ctx.Done():
				return
			}
		}
	}
}
