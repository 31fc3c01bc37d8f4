// Package outbox sends what the store holds for the chats: in order within a
// chat, at the pace of its channel, again after a failure, and never anything
// that is not stored first.
package outbox

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
)

// Store keeps the outgoing texts.
type Store interface {
	OutboxChats(context.Context) ([]string, error)
	NextOutgoing(ctx context.Context, chatJID string) (berth.Outgoing, bool, error)
	MarkSent(ctx context.Context, id int64) error
	MarkFailed(ctx context.Context, id int64, reason string, retryAt time.Time) error
}

// Channel sends one text. It must send a MessageID that it has sent before in a
// way that the chat shows it once. An error of kind berth.Unavailable means
// that the channel is offline: the text is held, which is no failed attempt,
// until Wake or WakeAll. Invalid, Denied and NotFound mean that trying again
// cannot help. A Channel may be Paced, and a Releaser.
type Channel interface {
	Send(context.Context, berth.Outgoing) error
}

// Releaser is a Channel that holds what goes along with a text until the store
// knows that it was sent. A restart in between leaves it there. Release must not
// block.
type Releaser interface {
	Release(berth.Outgoing)
}

const (
	maxAttempts = 3
	firstRetry  = time.Minute // doubles
	storeRetry  = time.Second
)

// Sender sends. Its methods are safe for concurrent use.
type Sender struct {
	store   Store
	channel Channel
	log     *zap.Logger
	ctx     context.Context // ends the waiting and sending of all workers
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	closing chan struct{} // closed when nobody waits for a later attempt any more

	reading, marking *trouble // with the store

	mu      sync.Mutex
	workers map[string]*worker // by chat; there is one while the chat has texts
	resting map[string]*rhythm // by chat without a worker; for seconds only
	closed  bool
}

type worker struct {
	chat   string
	again  bool         // woken since it last looked
	rhythm *rhythm      // nil: nothing went out lately
	mark   func() error // what came of an attempt, while the store does not take it
	due    time.Time    // the NotBefore that it waits for
	waited bool         // it has waited for due
}

// New returns a Sender. It sends nothing until Wake or WakeAll.
func New(store Store, channel Channel, log *zap.Logger) *Sender {
	ctx, cancel := context.WithCancel(context.Background())
	return &Sender{
		store: store, channel: channel, log: log, ctx: ctx, cancel: cancel, closing: make(chan struct{}),
		reading: newTrouble(log, "read the outbox"), marking: newTrouble(log, "mark a text"),
		workers: make(map[string]*worker), resting: make(map[string]*rhythm),
	}
}

// Wake says that a chat may have something to send. It does not block.
func (s *Sender) Wake(chat string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	if w, ok := s.workers[chat]; ok {
		w.again = true
		return
	}
	w := &worker{chat: chat, rhythm: s.resting[chat]}
	delete(s.resting, chat)
	s.workers[chat] = w
	s.wg.Go(func() { s.work(w) })
}

// WakeAll wakes every chat that has something to send: at start, and when a
// channel came back.
func (s *Sender) WakeAll(ctx context.Context) error {
	chats, err := s.store.OutboxChats(ctx)
	for _, c := range chats {
		s.Wake(c)
	}
	return err
}

// Shutdown waits until all that can be sent now is sent, or until ctx ends. What
// waits for a later attempt stays in the store.
func (s *Sender) Shutdown(ctx context.Context) {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.closing)
	}
	s.mu.Unlock()
	stop := context.AfterFunc(ctx, s.cancel)
	defer stop()
	s.wg.Wait()
	s.cancel()
}

// work sends the texts of a chat until none is left.
func (s *Sender) work(w *worker) {
	if w.rhythm == nil {
		w.rhythm = &rhythm{}
		if c, ok := s.channel.(Paced); ok {
			w.rhythm.pace = c.Pace(w.chat)
		}
	}
	for {
		wait, more := s.next(w)
		if more && wait == 0 {
			continue
		}
		s.mu.Lock()
		if !more && !w.again || s.ctx.Err() != nil || s.closed && wait > 0 {
			delete(s.workers, w.chat)
			s.rest(w.chat, w.rhythm)
			s.mu.Unlock()
			return
		}
		w.again = false
		s.mu.Unlock()
		if wait > 0 {
			select {
			case <-time.After(wait):
				w.waited = true
			case <-s.closing:
			case <-s.ctx.Done():
			}
		}
	}
}

// rest remembers the rhythm of a chat for as long as it matters. s.mu is held.
func (s *Sender) rest(chat string, r *rhythm) {
	left := r.rest(time.Now())
	if left == 0 || s.closed {
		return
	}
	s.resting[chat] = r
	time.AfterFunc(left, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		// A worker may have taken it up and put it back since.
		if s.resting[chat] == r && r.rest(time.Now()) == 0 {
			delete(s.resting, chat)
		}
	})
}

// next sends the oldest text of a chat. It returns how long to wait before the
// next look; more is false if there is nothing to do until the next Wake.
func (s *Sender) next(w *worker) (wait time.Duration, more bool) {
	if w.mark != nil {
		return s.marked(w), true
	}
	o, ok, err := s.store.NextOutgoing(s.ctx, w.chat)
	if err != nil {
		if s.ctx.Err() == nil {
			s.reading.failed(w.chat, err)
		}
		return storeRetry, true
	}
	s.reading.over(w.chat)
	if !ok {
		return 0, false
	}
	// By the wait that was decided at most, and once: the clock may be set back.
	if !o.NotBefore.Equal(w.due) {
		w.due, w.waited = o.NotBefore, false
	}
	if wait := min(time.Until(o.NotBefore), retryAfter(o.Attempts)); wait > 0 && !w.waited {
		return wait, true
	}
	if wait := w.rhythm.wait(o.Key, time.Now()); wait > 0 {
		// No retry: Shutdown waits for this one.
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			return 0, false
		}
	}
	err = s.channel.Send(s.ctx, o)
	ctx := context.WithoutCancel(s.ctx)
	if err == nil {
		crash.At(crash.Sent)
		w.rhythm.out(o.Key, time.Now())
		w.mark = func() error {
			err := s.store.MarkSent(ctx, o.ID)
			if c, ok := s.channel.(Releaser); ok && err == nil {
				c.Release(o)
			}
			return err
		}
		return s.marked(w), true
	}
	if s.ctx.Err() != nil {
		return 0, false
	}
	known, ok := errors.AsType[*berth.Error](err)
	if ok && known.Kind == berth.Unavailable {
		s.log.Debug("channel offline, text held", zap.String("chat", w.chat), zap.Error(err))
		return 0, false
	}
	w.rhythm.out(o.Key, time.Now())
	retryAt := time.Now().Add(retryAfter(o.Attempts + 1))
	if o.Attempts+1 >= maxAttempts || ok && hopeless(known.Kind) {
		retryAt = time.Time{}
		s.log.Error("text given up", zap.String("chat", w.chat), zap.String("key", o.Key), zap.Error(err))
	} else {
		s.log.Warn("send", zap.String("chat", w.chat), zap.Time("retry", retryAt), zap.Error(err))
	}
	reason := err.Error()
	w.mark = func() error { return s.store.MarkFailed(ctx, o.ID, reason, retryAt) }
	return s.marked(w), true
}

// retryAfter returns how long to wait after so many failed attempts.
func retryAfter(attempts int) time.Duration {
	return firstRetry << max(0, attempts-1)
}

// hopeless reports whether trying again cannot help.
func hopeless(k berth.Kind) bool {
	return k == berth.Invalid || k == berth.Denied || k == berth.NotFound
}

// marked stores what came of an attempt. Until the store takes it, nothing else
// of the chat is sent, and not the same again: only a restart repeats it, under
// the same id.
func (s *Sender) marked(w *worker) (wait time.Duration) {
	if err := w.mark(); err != nil {
		s.marking.failed(w.chat, err)
		return storeRetry
	}
	s.marking.over(w.chat)
	w.mark = nil
	return 0
}
