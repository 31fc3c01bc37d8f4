package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"berth/orchestrator/internal/berth"
)

// maxGroup bounds how many writes share one commit, and so how long the first
// of them waits.
const maxGroup = 256

var errClosed = errors.New("the store is closed")

// writer owns the only writing connection. Its goroutine takes all writes that
// wait, carries them out in one transaction, commits, and only then lets them
// return: many writers cost one sync of the disk. If one of them fails, each is
// carried out again in a transaction of its own, so that none suffers from
// another; a write must bear being run twice.
type writer struct {
	conn    *sql.Conn
	changed Changed
	prompts prompts
	stmts   map[string]*sql.Stmt
	synced  bool // the connection syncs what it commits
	queue   chan *write
	done    chan struct{}

	mu     sync.RWMutex // guards closing the queue
	closed bool

	trouble atomic.Pointer[error] // of the last transaction, if the disk did not take it
}

type write struct {
	fn    func(*tx) error
	loose bool // need not be on disk when it returns
	err   error
	done  chan struct{}
}

func newWriter(conn *sql.Conn, changed Changed) *writer {
	w := &writer{
		conn:    conn,
		changed: changed,
		stmts:   make(map[string]*sql.Stmt),
		synced:  true, // as dsn says
		queue:   make(chan *write, maxGroup),
		done:    make(chan struct{}),
	}
	go w.run()
	return w
}

// do runs fn in a transaction. When it returns nil the change is on disk; when
// it returns an error nothing was changed. A write that was accepted is carried
// out even if ctx ends meanwhile.
func (w *writer) do(ctx context.Context, fn func(*tx) error) error {
	return w.add(ctx, &write{fn: fn, done: make(chan struct{})})
}

// doLoosely is do for what a power cut makes worthless, since what it is about ends
// with it: its commit is not synced, which is most of what a lone write takes. The
// end of this process loses nothing of it, and no later commit is on disk without it.
func (w *writer) doLoosely(ctx context.Context, fn func(*tx) error) error {
	return w.add(ctx, &write{fn: fn, loose: true, done: make(chan struct{})})
}

func (w *writer) add(ctx context.Context, job *write) error {
	w.mu.RLock()
	if w.closed {
		w.mu.RUnlock()
		return errClosed
	}
	select {
	case w.queue <- job:
		w.mu.RUnlock()
	case <-ctx.Done():
		w.mu.RUnlock()
		return context.Cause(ctx)
	}
	<-job.done
	return explain(job.err)
}

func (w *writer) close() error {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return nil
	}
	w.closed = true
	close(w.queue)
	w.mu.Unlock()
	<-w.done
	return w.conn.Close()
}

func (w *writer) run() {
	defer close(w.done)
	for first := range w.queue {
		w.commit(w.gather(first))
	}
	for _, s := range w.stmts {
		s.Close()
	}
}

// gather returns first and the writes that wait with it. Those whose last write
// has just returned are about to queue the next one: they are let through first,
// or else every second commit would be of half of them.
func (w *writer) gather(first *write) []*write {
	group := []*write{first}
	for more := true; more && len(group) < maxGroup; {
		runtime.Gosched()
		more = len(w.queue) > 0
		for len(group) < maxGroup && len(w.queue) > 0 {
			group = append(group, <-w.queue)
		}
	}
	return group
}

// commit carries out a group in one transaction. If one of it fails, nothing of
// the group was done, and each is carried out by itself.
func (w *writer) commit(group []*write) {
	t, failed, err := w.try(group)
	if failed && len(group) > 1 {
		for _, job := range group {
			w.commit([]*write{job})
		}
		return
	}
	w.note(err)
	if err == nil {
		t.announce()
	}
	for _, job := range group {
		job.err = err
		close(job.done)
	}
}

// note remembers whether the disk takes what is written. A write that was refused
// for what it holds says nothing about that.
func (w *writer) note(err error) {
	if err == nil {
		w.trouble.Store(nil)
		return
	}
	err = explain(err)
	if known, ok := errors.AsType[*berth.Error](err); ok && (known.Kind == berth.Unavailable || damaged(err)) {
		w.trouble.Store(&err)
	}
}

// try runs a group in one transaction. failed says that it was undone because
// one of its writes failed, with err, and not the commit itself.
func (w *writer) try(group []*write) (t *tx, failed bool, err error) {
	t = &tx{w: w, touched: make(map[string]bool)}
	if err := w.sync(slices.ContainsFunc(group, func(job *write) bool { return !job.loose })); err != nil {
		return nil, false, err
	}
	if err := t.exec("BEGIN IMMEDIATE"); err != nil {
		return nil, false, err
	}
	for _, job := range group {
		if err = t.run(job.fn); err != nil {
			failed = true
			break
		}
	}
	if err == nil {
		err = t.exec("COMMIT")
	}
	if err != nil {
		// SQLite may have rolled back by itself, for example on a full disk.
		_ = t.exec("ROLLBACK")
		return nil, failed, err
	}
	return t, false, nil
}

// sync makes the commits that follow return when they are on disk, or not so.
func (w *writer) sync(on bool) error {
	if on == w.synced {
		return nil
	}
	pragma := "PRAGMA synchronous = NORMAL"
	if on {
		pragma = "PRAGMA synchronous = FULL"
	}
	// It takes effect when it is prepared, so it cannot be kept.
	if _, err := w.conn.ExecContext(context.Background(), pragma); err != nil {
		return err
	}
	w.synced = on
	return nil
}

// tx is the transaction that a write runs in. Its statements are prepared once
// for the life of the store, so every query must be a constant.
type tx struct {
	w          *writer
	touched    map[string]bool // by chat; true: it has new outgoing texts
	remembered bool            // memories changed
}

// announce tells what changed, before those that wrote it go on.
func (t *tx) announce() {
	if t.remembered {
		t.w.prompts.forget()
	}
	for chat, out := range t.touched {
		t.w.changed(chat, out)
	}
}

// run calls fn and turns a panic into an error.
func (t *tx) run(fn func(*tx) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic in a store method: %v\n%s", p, debug.Stack())
		}
	}()
	return fn(t)
}

// touch notes that the chat changed.
func (t *tx) touch(chatJID string) {
	if _, ok := t.touched[chatJID]; !ok {
		t.touched[chatJID] = false
	}
}

// touchOut notes that the chat has a new outgoing text.
func (t *tx) touchOut(chatJID string) { t.touched[chatJID] = true }

// limit ends a query that takes at most n rows, if n is a constant. A limit that is
// bound makes SQLite prepare the statement anew each time.
func limit(n int) string { return " LIMIT " + strconv.Itoa(n) }

func (t *tx) stmt(query string) (*sql.Stmt, error) {
	if s, ok := t.w.stmts[query]; ok {
		return s, nil
	}
	s, err := t.w.conn.PrepareContext(context.Background(), query)
	if err != nil {
		return nil, err
	}
	t.w.stmts[query] = s
	return s, nil
}

func (t *tx) exec(query string, args ...any) error {
	_, err := t.execN(query, args...)
	return err
}

// execN returns the number of rows changed.
func (t *tx) execN(query string, args ...any) (int64, error) {
	s, err := t.stmt(query)
	if err != nil {
		return 0, err
	}
	res, err := s.Exec(args...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

// insert returns the number of the new row; ok is false if there is none.
func (t *tx) insert(query string, args ...any) (id int64, ok bool, err error) {
	s, err := t.stmt(query)
	if err != nil {
		return 0, false, err
	}
	res, err := s.Exec(args...)
	if err != nil {
		return 0, false, err
	}
	n, err := res.RowsAffected()
	if err != nil || n == 0 {
		return 0, false, err
	}
	id, err = res.LastInsertId()
	return id, err == nil, err
}

// get scans one row into dest; found is false if there is none.
func (t *tx) get(dest []any, query string, args ...any) (found bool, err error) {
	s, err := t.stmt(query)
	if err != nil {
		return false, err
	}
	err = s.QueryRow(args...).Scan(dest...)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

func (t *tx) query(query string, args ...any) (*sql.Rows, error) {
	s, err := t.stmt(query)
	if err != nil {
		return nil, err
	}
	return s.Query(args...)
}
