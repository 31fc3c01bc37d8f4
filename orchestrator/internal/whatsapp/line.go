package whatsapp

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.mau.fi/whatsmeow"
	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
)

// A message with a medium is stored when the medium is there, or has taken too
// long, and so are those that come behind it in its chat. Until then they stand
// in line in the session's database: that makes them safe, so that WhatsApp may
// forget them, and no other chat waits. A medium that took too long is said to be
// on its way, and when it is there the message gets its new text.

const (
	holdMost     = 20 * time.Second // that a message waits for its medium
	downloads    = 4                // at once
	downloadsOne = 2                // of one chat, so that it cannot stop the others
)

// waiting is a message that is not stored yet, or only without its medium.
type waiting struct {
	Message   berth.Message `json:"message"`
	Addressed bool          `json:"addressed,omitempty"` // of Message, whose own is not kept
	Quiet     bool          `json:"quiet,omitempty"`
	Medium    *medium       `json:"medium,omitempty"`
	Since     time.Time     `json:"since"`
}

// place is a waiting message's, in line and in the database.
type place struct {
	seq    int64
	id     string // the message's
	since  time.Time
	medium bool
	done   chan struct{} // closed when it is known what became of the medium
	saved  string        // guarded by done
	left   bool          // it is stored; guarded by lines.mu
}

func (p *place) isDone() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// lines are the chats with waiting messages.
type lines struct {
	db    *sql.DB       // syncs each commit, as the client's own does not
	hold  time.Duration // tests hurry it up
	start time.Time
	slots chan struct{}

	mu    sync.Mutex
	chats map[string]*line
	moved chan struct{} // closed and replaced when a message is stored for good
}

// line is what waits in one chat. The fields are guarded by lines.mu.
type line struct {
	places   []*place          // to be stored, in this order
	media    []*place          // to be downloaded, in this order
	late     map[string]*place // by message id: stored without the medium
	keeping  bool              // somebody stores the places
	fetchers int               // somebody downloads the media

	storing sync.Mutex // of the chat's messages, one at a time
}

// prepare makes the table, and finds what an earlier process left.
func (l *lines) prepare(ctx context.Context) error {
	_, err := l.db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS berth_waiting (
		seq INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, chat TEXT NOT NULL, late INTEGER NOT NULL DEFAULT 0, value TEXT NOT NULL) STRICT`)
	if err != nil {
		return err
	}
	rows, err := l.db.QueryContext(ctx, `SELECT seq, chat, late, value FROM berth_waiting ORDER BY seq`)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var seq int64
		var chat, value string
		var late bool
		if err := rows.Scan(&seq, &chat, &late, &value); err != nil {
			return err
		}
		var w waiting
		if err := json.Unmarshal([]byte(value), &w); err != nil {
			return fmt.Errorf("waiting message %d: %w", seq, err)
		}
		l.addLocked(chat, newPlace(seq, w), late)
	}
	return rows.Err()
}

func newPlace(seq int64, w waiting) *place {
	return &place{seq: seq, id: w.Message.ID, since: w.Since, medium: w.Medium != nil, done: make(chan struct{})}
}

// addLocked puts a place at the end of its chat's line.
func (l *lines) addLocked(chat string, p *place, late bool) *line {
	in := l.chats[chat]
	if in == nil {
		in = &line{late: make(map[string]*place)}
		l.chats[chat] = in
	}
	if p.medium {
		in.media = append(in.media, p)
	}
	if late {
		in.late[p.id] = p
	} else {
		in.places = append(in.places, p)
	}
	return in
}

func (l *lines) moveLocked() {
	close(l.moved)
	l.moved = make(chan struct{})
}

// leaveLocked forgets a line in which nothing waits.
func (l *lines) leaveLocked(chat string, in *line) {
	if l.chats[chat] == in && len(in.places)+len(in.media)+len(in.late)+in.fetchers == 0 && !in.keeping {
		delete(l.chats, chat)
	}
}

// resume goes on with what an earlier process left.
func (c *Channel) resume() {
	if c.o.Receive == nil {
		return // the next process has a store
	}
	c.lines.mu.Lock()
	defer c.lines.mu.Unlock()
	for chat, in := range c.lines.chats {
		c.startLocked(chat, in)
	}
}

// startLocked sees to it that somebody works for a line.
func (c *Channel) startLocked(chat string, in *line) {
	if len(in.places) > 0 && !in.keeping {
		in.keeping = true
		c.background(func(ctx context.Context) { c.keepLine(ctx, chat, in) })
	}
	for in.fetchers < min(downloadsOne, len(in.media)) {
		in.fetchers++
		c.background(func(ctx context.Context) { c.fetchLine(ctx, chat, in) })
	}
}

// take brings a message to the store or into its chat's line, and says whether it
// is safe there. key tells it from all others that it may come with.
func (c *Channel) take(cli *whatsmeow.Client, key string, w waiting) bool {
	chat := w.Message.ChatJID
	c.lines.mu.Lock()
	in := c.lines.chats[chat]
	straight := w.Medium == nil && (in == nil || len(in.places) == 0)
	c.lines.mu.Unlock()
	if straight {
		if in != nil {
			in.storing.Lock()
			defer in.storing.Unlock()
			if err := c.newer(c.life, in, w.Message.ID); err != nil {
				return c.unsafe(cli, w.Message, err)
			}
		}
		return c.receive(cli, w.Message, w.Quiet)
	}
	w.Since = time.Now()
	w.Addressed = w.Message.Addressed
	value, err := json.Marshal(w)
	if err != nil {
		return c.unsafe(cli, w.Message, err)
	}
	var seq int64
	err = c.lines.db.QueryRowContext(c.life, `INSERT INTO berth_waiting (key, chat, value) VALUES (?, ?, ?) ON CONFLICT (key) DO NOTHING RETURNING seq`, key, chat, string(value)).Scan(&seq)
	if errors.Is(err, sql.ErrNoRows) {
		return true // it came before
	}
	if err != nil {
		return c.unsafe(cli, w.Message, fmt.Errorf("write the session's database: %w", err))
	}
	c.lines.mu.Lock()
	defer c.lines.mu.Unlock()
	c.startLocked(chat, c.lines.addLocked(chat, newPlace(seq, w), false))
	return true
}

// keepLine stores the messages of a line, each when its time has come.
func (c *Channel) keepLine(ctx context.Context, chat string, in *line) {
	l := &c.lines
	for {
		l.mu.Lock()
		if len(in.places) == 0 {
			in.keeping = false
			l.leaveLocked(chat, in)
			l.mu.Unlock()
			return
		}
		p := in.places[0]
		l.mu.Unlock()
		if p.medium {
			since := p.since
			if since.Before(l.start) { // while nobody could see to it
				since = l.start
			}
			select {
			case <-p.done:
			case <-time.After(min(time.Until(since.Add(l.hold)), l.hold)): // the clock may be set
			case <-ctx.Done():
				return
			}
		}
		if !c.insist(ctx, chat, func() error { return c.release(ctx, in, p) }) {
			return
		}
		l.mu.Lock()
		in.places, p.left = in.places[1:], true
		l.moveLocked()
		l.mu.Unlock()
		if p.medium && p.isDone() && !c.insist(ctx, chat, func() error { return c.complete(ctx, in, p) }) {
			return
		}
	}
}

// insist does something until it works, and says whether it did before ctx ended.
func (c *Channel) insist(ctx context.Context, chat string, do func() error) bool {
	const longest = time.Minute
	for wait := c.retryFirst; ; wait = min(2*wait, longest) {
		err := do()
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		c.log.Error("store a message; it is kept meanwhile", zap.String("chat", chat), zap.Error(err))
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return false
		}
	}
}

// release stores the message of a place. Afterwards the place is free, or its
// medium is late.
func (c *Channel) release(ctx context.Context, in *line, p *place) error {
	in.storing.Lock()
	defer in.storing.Unlock()
	w, err := c.lines.read(ctx, p)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	} else if err != nil {
		return err
	}
	late := p.medium && !p.isDone()
	switch {
	case late:
		w.Message.Text = w.Medium.text(w.Medium.pending())
	case p.medium:
		w.Message.Text = w.Medium.text(p.saved)
	}
	if err := c.newer(ctx, in, p.id); err != nil {
		return err
	}
	if err := c.store(ctx, w.Message, w.Quiet); err != nil && !c.given(w.Message, err) {
		return err
	}
	if !late {
		return c.lines.remove(ctx, p)
	}
	if _, err := c.lines.db.ExecContext(ctx, `UPDATE berth_waiting SET late = 1 WHERE seq = ?`, p.seq); err != nil {
		return err
	}
	c.lines.mu.Lock()
	in.late[p.id] = p
	c.lines.mu.Unlock()
	return nil
}

// newer is called before a message is stored: what is late under the same id
// must not take its place again. in.storing is held.
func (c *Channel) newer(ctx context.Context, in *line, id string) error {
	c.lines.mu.Lock()
	p := in.late[id]
	c.lines.mu.Unlock()
	if p == nil {
		return nil
	}
	if err := c.lines.remove(ctx, p); err != nil {
		return err
	}
	c.lines.mu.Lock()
	defer c.lines.mu.Unlock()
	delete(in.late, id)
	c.lines.moveLocked()
	return nil
}

// complete gives a message whose medium was late its text, if it is still so.
func (c *Channel) complete(ctx context.Context, in *line, p *place) error {
	in.storing.Lock()
	defer in.storing.Unlock()
	c.lines.mu.Lock()
	late := in.late[p.id] == p
	c.lines.mu.Unlock()
	if !late {
		return nil
	}
	w, err := c.lines.read(ctx, p)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if err == nil {
		w.Message.Text = w.Medium.text(p.saved)
		if err := c.store(ctx, w.Message, w.Quiet); err != nil && !c.given(w.Message, err) {
			return err
		}
		if err := c.lines.remove(ctx, p); err != nil {
			return err
		}
	}
	c.lines.mu.Lock()
	defer c.lines.mu.Unlock()
	delete(in.late, p.id)
	c.lines.moveLocked()
	return nil
}

func (l *lines) read(ctx context.Context, p *place) (w waiting, err error) {
	var value string
	if err := l.db.QueryRowContext(ctx, `SELECT value FROM berth_waiting WHERE seq = ?`, p.seq).Scan(&value); err != nil {
		return w, err
	}
	err = json.Unmarshal([]byte(value), &w)
	w.Message.Addressed = w.Addressed
	return w, err
}

func (l *lines) remove(ctx context.Context, p *place) error {
	_, err := l.db.ExecContext(ctx, `DELETE FROM berth_waiting WHERE seq = ?`, p.seq)
	return err
}

// fetchLine downloads the media of a line, one after another.
func (c *Channel) fetchLine(ctx context.Context, chat string, in *line) {
	l := &c.lines
	for {
		l.mu.Lock()
		if len(in.media) == 0 {
			in.fetchers--
			l.leaveLocked(chat, in)
			l.mu.Unlock()
			return
		}
		p := in.media[0]
		in.media = in.media[1:]
		l.mu.Unlock()
		saved, err := c.fetch(ctx, chat, p)
		if err != nil {
			return // ctx ended
		}
		p.saved = saved
		l.mu.Lock()
		close(p.done)
		l.mu.Unlock()
		if !c.insist(ctx, chat, func() error { return c.complete(ctx, in, p) }) {
			return
		}
	}
}

// fetch downloads a medium when there is a connection. It fails only when ctx
// ends.
func (c *Channel) fetch(ctx context.Context, chat string, p *place) (saved string, err error) {
	for {
		if err := c.await(ctx, online); err != nil {
			return "", err
		}
		select {
		case c.lines.slots <- struct{}{}:
		case <-ctx.Done():
			return "", ctx.Err()
		}
		w, err := c.lines.read(ctx, p)
		if err == nil {
			saved, err = c.save(ctx, chat, w.Medium)
		} else if errors.Is(err, sql.ErrNoRows) {
			err = nil // nobody waits for it any more
		}
		<-c.lines.slots
		if err == nil || ctx.Err() != nil {
			return saved, ctx.Err()
		}
		c.log.Info("a download is tried again", zap.String("chat", chat), zap.Error(err))
		select {
		case <-time.After(c.retryFirst):
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

// settled waits until all that stands in line now is stored, or ctx ends.
func (l *lines) settled(ctx context.Context) {
	l.mu.Lock()
	var left []*place
	for _, in := range l.chats {
		left = append(left, in.places...)
	}
	l.mu.Unlock()
	for {
		l.mu.Lock()
		moved := l.moved
		left = slices.DeleteFunc(left, func(p *place) bool { return p.left })
		l.mu.Unlock()
		if len(left) == 0 {
			return
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return
		}
	}
}
