// Package sqlite keeps Berth's words in store/messages.db. One exported method
// is one transaction. All methods are safe for concurrent use; writes that
// arrive at the same time share one commit, and none returns before its commit
// is on disk, but for what a power cut makes worthless (NextBatch).
package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"time"

	"github.com/pressly/goose/v3"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"berth/orchestrator/internal/berth"
)

//go:embed migrations/*.sql
var migrations embed.FS

// DB is an open store.
type DB struct {
	path   string
	read   *sql.DB
	write  *sql.DB
	writer *writer
}

// Changed is called after a commit with every chat whose messages, batches or
// outgoing texts it changed; outgoing says that there are new ones of these. It
// must not block and not call the DB.
type Changed func(chatJID string, outgoing bool)

// Open opens the store at path, making it if it does not exist, and brings its
// schema up to date. The caller closes the DB.
func Open(ctx context.Context, path string, changed Changed) (*DB, error) {
	if err := checkStore(ctx, path); err != nil {
		return nil, fmt.Errorf("open the store %s: %w", path, explain(err))
	}
	// SQLite would make it readable for everybody; it holds people's chats.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, berth.Errorf(berth.Unavailable, "open the store: %w (make the folder writable for this user)", err)
	}
	f.Close()
	db := &DB{path: path}
	if err := db.open(ctx, changed); err != nil {
		return nil, errors.Join(fmt.Errorf("open the store %s: %w", path, explain(err)), db.Close())
	}
	return db, nil
}

func (db *DB) open(ctx context.Context, changed Changed) (err error) {
	if db.write, err = sql.Open("sqlite", dsn(db.path, "cache_size(-4096)", checkpoint)); err != nil {
		return err
	}
	db.write.SetMaxOpenConns(1)
	if err := migrate(ctx, db.write); err != nil {
		return err
	}
	// Each commit empties the readers' caches, so large ones would be no use.
	if db.read, err = sql.Open("sqlite", dsn(db.path, "cache_size(-1024)", "query_only(1)")); err != nil {
		return err
	}
	db.read.SetMaxOpenConns(readers)
	db.read.SetMaxIdleConns(readers)
	db.read.SetConnMaxIdleTime(10 * time.Minute) // longer than the schedule looks away: that one stays open
	conn, err := db.write.Conn(ctx)
	if err != nil {
		return err
	}
	db.writer = newWriter(conn, changed)
	return nil
}

const (
	readers = 4

	// checkpoint is how many pages the write-ahead log holds before they go into the
	// database, 8 MiB: one that changes again until then goes there once.
	checkpoint = "wal_autocheckpoint(2000)"
)

// dsn sets the pragmas where every pooled connection gets them. Writers take
// the lock up front: a transaction that reads first and then writes would
// otherwise fail with SQLITE_BUSY.
func dsn(path string, pragmas ...string) string {
	q := url.Values{"_txlock": {"immediate"}, "_pragma": append([]string{
		"busy_timeout(5000)", "foreign_keys(1)", "journal_mode(WAL)", "synchronous(FULL)",
	}, pragmas...)}
	return (&url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}).String()
}

func migrate(ctx context.Context, db *sql.DB) error {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	p, err := goose.NewProvider(goose.DialectSQLite3, db, files, goose.WithLogger(goose.NopLogger()))
	if err != nil {
		return fmt.Errorf("read the migrations: %w", err)
	}
	have, err := p.GetDBVersion(ctx)
	if err != nil {
		return err
	}
	sources := p.ListSources()
	if newest := sources[len(sources)-1].Version; have > newest {
		return berth.Errorf(berth.Invalid, "its schema has version %d and this program knows %d: use a newer berth", have, newest)
	}
	_, err = p.Up(ctx)
	return err
}

// Trouble returns why the last write could not reach the disk, or nil.
func (db *DB) Trouble() error {
	if err := db.writer.trouble.Load(); err != nil {
		return *err
	}
	return nil
}

// Close waits for the writes that were accepted and closes the store.
func (db *DB) Close() error {
	var errs []error
	if db.writer != nil {
		errs = append(errs, db.writer.close())
	}
	for _, pool := range []*sql.DB{db.read, db.write} {
		if pool != nil {
			errs = append(errs, pool.Close())
		}
	}
	return errors.Join(errs...)
}

// explain gives a person's words to the failures of a disk.
func explain(err error) error {
	if _, ok := errors.AsType[*berth.Error](err); ok {
		return err
	}
	if damaged(err) {
		return berth.Errorf(berth.Invalid, "the store is damaged: put a backup in its place with \"berth restore FILE\" (%w)", err)
	}
	e, ok := errors.AsType[*sqlite.Error](err)
	if !ok {
		return err
	}
	if e.Code() == sqlite3.SQLITE_IOERR_WRITE {
		return berth.Errorf(berth.Unavailable, "the store cannot be written: check the disk and the rights of the store folder (%w)", err)
	}
	switch e.Code() & 0xff {
	case sqlite3.SQLITE_FULL:
		return berth.Errorf(berth.Unavailable, "the disk is full: free some space, nothing was lost (%w)", err)
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM:
		return berth.Errorf(berth.Unavailable, "the store is not writable: check the rights of the store folder (%w)", err)
	case sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG:
		return berth.Errorf(berth.Conflict, "the store refuses this (%w)", err)
	case sqlite3.SQLITE_IOERR:
		return berth.Errorf(berth.Unavailable, "the disk does not answer properly (%w)", err)
	}
	return err
}
