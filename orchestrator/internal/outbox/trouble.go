package outbox

import (
	"sync"
	"time"

	"go.uber.org/zap"
)

// Between two lines of log about the same trouble; the distance doubles.
const (
	firstPause = 10 * time.Second
	lastPause  = 10 * time.Minute
)

// trouble is something that fails for one chat or many, again and again until it is
// over. The log has its begin, its end with the count, and between them a line at
// growing distances; another error comes sooner. It is safe for concurrent use.
type trouble struct {
	log  *zap.Logger
	what string

	mu    sync.Mutex
	chats map[string]bool // for which it lasts
	times int
	began time.Time
	told  time.Time
	text  string // that was told
	pause time.Duration
}

func newTrouble(log *zap.Logger, what string) *trouble {
	return &trouble{log: log, what: what, chats: make(map[string]bool)}
}

// failed notes a failure.
func (t *trouble) failed(chat string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, first := time.Now(), len(t.chats) == 0
	if first {
		t.times, t.began = 0, now
	}
	t.chats[chat] = true
	t.times++
	text := err.Error()
	if text != t.text || first {
		t.pause = firstPause
	}
	if !first && now.Sub(t.told) < t.pause {
		return
	}
	if !first && text == t.text {
		t.pause = min(2*t.pause, lastPause)
	}
	t.told, t.text = now, text
	t.log.Error(t.what, zap.String("chat", chat), zap.Int("chats", len(t.chats)), zap.Int("times", t.times), zap.Error(err))
}

// over notes that it works for a chat.
func (t *trouble) over(chat string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.chats[chat] {
		return
	}
	delete(t.chats, chat)
	if len(t.chats) == 0 {
		t.log.Info(t.what+" works again", zap.Int("times", t.times), zap.Duration("after", time.Since(t.began)))
	}
}
