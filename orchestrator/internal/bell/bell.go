// Package bell wakes whoever waits for news about a chat. It carries no news
// itself: the woken look for themselves, so a ring that nobody hears is never
// a loss.
package bell

import "sync"

// Bell has one rope a chat. The zero value is ready to use; all methods are
// safe for concurrent use.
type Bell struct {
	mu      sync.Mutex
	waiting map[string]chan struct{}
}

// Wait returns a channel that the next Ring for chat closes. Ask for it before
// looking at the state, or a change in between goes unnoticed.
func (b *Bell) Wait(chat string) <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	c, ok := b.waiting[chat]
	if !ok {
		c = make(chan struct{})
		if b.waiting == nil {
			b.waiting = make(map[string]chan struct{})
		}
		b.waiting[chat] = c
	}
	return c
}

// Ring wakes all who wait for chat.
func (b *Bell) Ring(chat string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c, ok := b.waiting[chat]; ok {
		close(c)
		delete(b.waiting, chat)
	}
}
