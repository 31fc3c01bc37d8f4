package whatsapp

import (
	"context"
	"time"

	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/whatsapp/waid"
)

// typist shows in one chat that somebody writes. It lives while it is on.
type typist struct {
	on      bool
	changed chan struct{}
}

// SetTyping says whether the agent of a chat is at work. It does not block.
func (c *Channel) SetTyping(chat string, on bool) {
	to, err := waid.Parse(chat)
	if err != nil || !waid.Served(to) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.typists[chat]
	switch {
	case t != nil:
		if t.on != on {
			t.on = on
			t.poke()
		}
	case on:
		t = &typist{on: true, changed: make(chan struct{}, 1)}
		c.typists[chat] = t
		c.background(func(ctx context.Context) { c.typing(ctx, to, chat, t) })
	}
}

func (t *typist) poke() {
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// retype shows it again after a message.
func (c *Channel) retype(chat string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t := c.typists[chat]; t != nil && t.on {
		t.poke()
	}
}

// typed forgets a typist who has paused, unless he writes again.
func (c *Channel) typed(chat string, t *typist) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.on {
		return false
	}
	delete(c.typists, chat)
	return true
}

// typing says it again and again, since phones forget it after half a minute,
// and the server at each new connection.
func (c *Channel) typing(ctx context.Context, to types.JID, chat string, t *typist) {
	for {
		c.mu.Lock()
		on := t.on
		c.mu.Unlock()
		state := types.ChatPresencePaused
		if on {
			state = types.ChatPresenceComposing
		}
		if online(c.State()) && !c.isCold(to) {
			_ = c.current().SendChatPresence(ctx, to, state, types.ChatPresenceMediaText) // the next one may do
		}
		if !on && c.typed(chat, t) {
			return
		}
		select {
		case <-t.changed:
		case <-time.After(c.typingEvery):
		case <-ctx.Done():
			return
		}
	}
}
