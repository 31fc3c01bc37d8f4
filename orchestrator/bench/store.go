package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
)

const (
	storeRounds = 8
	storeFor    = 500 * time.Millisecond // one measurement
	writers     = 8
	inFlight    = 64
	oneCommit   = 256 // messages in a bare transaction
)

// store measures how many messages a second become durable.
func (b *bench) store(ctx context.Context, r *report) (err error) {
	dir := filepath.Join(b.dir, "store")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	db, err := sqlite.Open(ctx, filepath.Join(dir, "messages.db"), func(string, bool) {})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	add := func(ctx context.Context, writer int) error {
		_, _, err := db.AddMessage(ctx, message(writer))
		return err
	}
	var files [writers]*os.File
	for w := range files {
		if files[w], err = os.Create(filepath.Join(dir, fmt.Sprintf("appended-%d", w))); err != nil {
			return err
		}
		defer files[w].Close()
	}
	synced := func(_ context.Context, writer int) error {
		if _, err := files[writer].Write(record); err != nil {
			return err
		}
		return files[writer].Sync()
	}
	plain, err := openPlain(ctx, filepath.Join(dir, "plain.db"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plain.Close()) }()

	one := row{what: "inbound messages stored, durable, 8 writers", unit: perS}
	burst := row{what: "the same, each writer with up to 64 in flight", unit: perS}
	var alone []float64
	for range storeRounds {
		for _, m := range []struct {
			into    *[]float64
			workers int
			scale   float64
			do      func(context.Context, int) error
		}{
			{&one.ours, writers, 1, add},
			{&one.floor, writers, 1, synced},
			{&alone, writers, 1, func(ctx context.Context, w int) error { return plain.insert(ctx, w, 1) }},
			{&burst.ours, writers * inFlight, 1, add},
			{&burst.floor, 1, oneCommit, func(ctx context.Context, w int) error { return plain.insert(ctx, w, oneCommit) }},
		} {
			rate, err := throughput(ctx, m.workers, m.do)
			if err != nil {
				return err
			}
			*m.into = append(*m.into, rate*m.scale)
		}
	}
	one.note = fmt.Sprintf("AddMessage with synchronous=FULL; each of 8 writers waits for one message before it gives the next. The floor is 8 writers that each append %d bytes to a file of their own and sync it. Plain SQLite with one transaction a message, by the same driver into the same tables, does %s.", len(record), perS.write(p50(alone)))
	burst.note = fmt.Sprintf("A burst, as a channel delivers after it was offline: 8 × %d writers. The floor is the insert alone, by the same driver into the same tables, %d in a transaction.", inFlight, oneCommit)
	r.add(one.atLeast(20_000))
	r.add(burst.atLeast(20_000))
	return nil
}

// throughput returns how often a second the workers got something done.
func throughput(ctx context.Context, workers int, do func(ctx context.Context, worker int) error) (float64, error) {
	var done atomic.Int64
	var failed atomic.Pointer[error]
	var wg sync.WaitGroup
	begin := time.Now()
	for w := range workers {
		wg.Go(func() {
			for time.Since(begin) < storeFor && ctx.Err() == nil {
				if err := do(ctx, w); err != nil {
					failed.Store(&err)
					return
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	took := time.Since(begin)
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return float64(done.Load()) / took.Seconds(), context.Cause(ctx)
}

func message(writer int) berth.Message {
	return berth.Message{
		ID: berth.NewID(10), ChatJID: fmt.Sprintf("console:bench%d", writer%writers), Sender: "console:ann", SenderName: "Ann",
		Text: "Could somebody bring the keys of the boat house on Saturday, please? I am there at ten.", Time: time.Now(),
	}
}

// plain is the store's file, used without the store.
type plain struct {
	db   *sql.DB
	stmt *sql.Stmt
}

func openPlain(ctx context.Context, path string) (*plain, error) {
	made, err := sqlite.Open(ctx, path, func(string, bool) {})
	if err != nil {
		return nil, err
	}
	for w := range writers {
		if _, _, err := made.AddMessage(ctx, message(w)); err != nil { // makes the chat
			return nil, errors.Join(err, made.Close())
		}
	}
	if err := made.Close(); err != nil {
		return nil, err
	}
	db, err := sql.Open("sqlite", "file:"+path+"?_txlock=immediate&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=busy_timeout(5000)&_pragma=foreign_keys(1)")
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1) // one writer at a time, as SQLite wants it
	stmt, err := db.PrepareContext(ctx, `INSERT INTO messages (id, chat_jid, sender, sender_name, content, timestamp) VALUES (?, ?, ?, ?, ?, ?)`)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &plain{db, stmt}, nil
}

// insert stores n messages in one transaction.
func (p *plain) insert(ctx context.Context, writer, n int) error {
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for range n {
		m := message(writer)
		if _, err := tx.StmtContext(ctx, p.stmt).ExecContext(ctx, m.ID, m.ChatJID, m.Sender, m.SenderName, m.Text, m.Time.UTC().Format(time.RFC3339)); err != nil {
			return err
		}
	}
	return tx.Commit()
}

func (p *plain) Close() error { return errors.Join(p.stmt.Close(), p.db.Close()) }
