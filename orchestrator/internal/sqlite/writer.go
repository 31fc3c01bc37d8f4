package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
)

// maxGroup bounds how many writes share one commit, and so how long the first
// of them waits.
const maxGroup = 256

var errClosed = errors.New("the store is closed")

// writer owns the only writing connection. Its goroutine takes all writes that
// wait, runs each in a savepoint of its own inside one transaction, commits,
// and only then lets them return: many writers cost one sync of the disk.
type writer struct {
	conn    *sql.Conn
	changed Changed
	stmts   map[string]*sql.Stmt
	queue   chan *write
	done    chan struct{}

	mu     sync.RWMutex // guards closing the queue
	closed bool
}

type write struct {
	fn   func(*tx) error
	err  error
	done chan struct{}
}

func newWriter(conn *sql.Conn, changed Changed) *writer {
	w := &writer{
		conn:    conn,
		changed: changed,
		stmts:   make(map[string]*sql.Stmt),
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
	job := &write{fn: fn, done: make(chan struct{})}
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
		group := []*write{first}
		for len(group) < maxGroup && len(w.queue) > 0 {
			group = append(group, <-w.queue)
		}
		w.commit(group)
	}
	for _, s := range w.stmts {
		s.Close()
	}
}

func (w *writer) commit(group []*write) {
	t := &tx{w: w, touched: make(map[string]bool)}
	err := t.exec("BEGIN IMMEDIATE")
	if err == nil {
		for _, job := range group {
			job.err = t.savepoint(job.fn)
		}
		err = t.exec("COMMIT")
		if err != nil {
			err = errors.Join(err, t.exec("ROLLBACK"))
		}
	}
	if err == nil {
		for chat, out := range t.touched {
			w.changed(chat, out)
		}
	}
	for _, job := range group {
		if job.err == nil {
			job.err = err
		}
		close(job.done)
	}
}

// tx is the transaction that a write runs in. Its statements are prepared once
// for the life of the store, so every query must be a constant.
type tx struct {
	w       *writer
	touched map[string]bool // by chat; true: it has new outgoing texts
}

// savepoint runs fn so that its failure, also by a panic, undoes its own
// changes only.
func (t *tx) savepoint(fn func(*tx) error) (err error) {
	if err := t.exec("SAVEPOINT w"); err != nil {
		return err
	}
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic in a store method: %v\n%s", p, debug.Stack())
		}
		if err != nil {
			err = errors.Join(err, t.exec("ROLLBACK TO w"))
		}
		if rerr := t.exec("RELEASE w"); err == nil {
			err = rerr
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
