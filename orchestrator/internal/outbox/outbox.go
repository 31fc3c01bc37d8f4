// Package outbox sends what the store holds for the chats: in order within a
// chat, again after a failure, and never anything that is not stored first.
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
// until Wake or WakeAll.
type Channel interface {
	Send(context.Context, berth.Outgoing) error
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

	mu      sync.Mutex
	workers map[string]*worker // by chat; there is one while the chat has texts
	closed  bool
}

type worker struct {
	again bool // woken since it last looked
}

// New returns a Sender. It sends nothing until Wake or WakeAll.
func New(store Store, channel Channel, log *zap.Logger) *Sender {
	ctx, cancel := context.WithCancel(context.Background())
	return &Sender{store: store, channel: channel, log: log, ctx: ctx, cancel: cancel, closing: make(chan struct{}), workers: make(map[string]*worker)}
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
	w := &worker{}
	s.workers[chat] = w
	s.wg.Go(func() { s.work(chat, w) })
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
func (s *Sender) work(chat string, w *worker) {
	for {
		wait, more := s.next(chat)
		if more && wait == 0 {
			continue
		}
		s.mu.Lock()
		if !more && !w.again || s.ctx.Err() != nil || s.closed && wait > 0 {
			delete(s.workers, chat)
			s.mu.Unlock()
			return
		}
		w.again = false
		s.mu.Unlock()
		if wait > 0 {
			select {
			case <-time.After(wait):
			case <-s.closing:
			case <-s.ctx.Done():
			}
		}
	}
}

// next sends the oldest text of a chat. It returns how long to wait before the
// next look; more is false if there is nothing to do until the next Wake.
func (s *Sender) next(chat string) (wait time.Duration, more bool) {
	o, ok, err := s.store.NextOutgoing(s.ctx, chat)
	if err != nil {
		if s.ctx.Err() == nil {
			s.log.Error("read the outbox", zap.String("chat", chat), zap.Error(err))
		}
		return storeRetry, true
	}
	if !ok {
		return 0, false
	}
	if wait := time.Until(o.NotBefore); wait > 0 {
		return wait, true
	}
	err = s.channel.Send(s.ctx, o)
	if err == nil {
		crash.At(crash.Sent)
		// Not marked means sent again, under the same id: the chat shows it once.
		if err := s.store.MarkSent(context.WithoutCancel(s.ctx), o.ID); err != nil {
			s.log.Error("mark as sent", zap.String("chat", chat), zap.Error(err))
			return storeRetry, true
		}
		return 0, true
	}
	if s.ctx.Err() != nil {
		return 0, false
	}
	if known, ok := errors.AsType[*berth.Error](err); ok && known.Kind == berth.Unavailable {
		s.log.Debug("channel offline, text held", zap.String("chat", chat), zap.Error(err))
		return 0, false
	}
	retryAt := time.Now().Add(firstRetry << o.Attempts)
	if o.Attempts+1 >= maxAttempts {
		retryAt = time.Time{}
		s.log.Error("text given up", zap.String("chat", chat), zap.String("key", o.Key), zap.Error(err))
	} else {
		s.log.Warn("send", zap.String("chat", chat), zap.Time("retry", retryAt), zap.Error(err))
	}
	if err := s.store.MarkFailed(s.ctx, o.ID, err.Error(), retryAt); err != nil {
		s.log.Error("mark as failed", zap.String("chat", chat), zap.Error(err))
		return storeRetry, true
	}
	return 0, true
}
