package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/pressly/goose/v3"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"berth/orchestrator/internal/berth"
)

// Contents is what a store holds.
type Contents struct {
	Bytes    int64
	Groups   int
	Messages int
	Newest   time.Time // of the newest message; zero if there is none
	Waiting  int       // messages that are still to be answered
	Unsent   int       // texts that are still to be sent
}

// Backup writes the store as it is now into file, as the function Backup does.
func (db *DB) Backup(ctx context.Context, file string, replace bool) (Contents, error) {
	return Backup(ctx, db.path, file, replace)
}

// Backup writes the store at path as it is now into file: one checked file that
// only its owner can read. It reads from a connection of its own, so writers go
// on meanwhile, and leaves the schema as it is. An existing file is replaced
// only if replace is true.
func Backup(ctx context.Context, path, file string, replace bool) (c Contents, err error) {
	if !holds(path) {
		return c, berth.Errorf(berth.NotFound, "there is no store at %s: there is nothing to back up", path)
	}
	if err := vacant(file, replace); err != nil {
		return c, err
	}
	// It is made here, since SQLite would make it readable for everybody.
	tmp, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".*")
	if errors.Is(err, fs.ErrNotExist) {
		return c, berth.Errorf(berth.NotFound, "there is no folder %s: make it, or choose another place for the backup", filepath.Dir(file))
	} else if err != nil {
		return c, failed("write the backup "+file, err)
	}
	defer func() {
		tmp.Close()
		if err != nil {
			os.Remove(tmp.Name())
			os.Remove(tmp.Name() + "-journal")
		}
	}()
	db, err := sql.Open("sqlite", uri(path, "rw"))
	if err != nil {
		return c, err
	}
	_, err = db.ExecContext(ctx, `VACUUM INTO ?`, tmp.Name())
	if err = errors.Join(err, db.Close()); err != nil {
		return c, failed("write the backup "+file, err)
	}
	if err := tmp.Sync(); err != nil {
		return c, failed("write the backup "+file, err)
	}
	if c, err = inspect(ctx, tmp.Name()); damaged(err) {
		return c, berth.Errorf(berth.Unavailable, "the backup %s came out damaged and was removed: write it to another disk (%w)", file, err)
	} else if err != nil {
		return c, failed("check the backup "+file, err)
	}
	if err := vacant(file, replace); err != nil {
		return c, err
	}
	if err := os.Rename(tmp.Name(), file); err != nil {
		return c, failed("write the backup "+file, err)
	}
	return c, failed("write the backup "+file, syncDir(filepath.Dir(file)))
}

// vacant returns an error unless file can be written.
func vacant(file string, replace bool) error {
	fi, err := os.Lstat(file)
	switch {
	case err != nil:
		return nil // there is none, or writing it tells what is wrong
	case !fi.Mode().IsRegular():
		return berth.Errorf(berth.Conflict, "%s is there and no plain file: choose another name for the backup", file)
	case !replace:
		return berth.Errorf(berth.Conflict, "%s is there already: choose another name, or replace it with --force", file)
	}
	return nil
}

// RestoreOptions say how a backup is restored.
type RestoreOptions struct {
	Force       bool     // also replace a sound store that holds something
	DropPending bool     // answer and send nothing that the backup has pending
	Keep        []string // keys of State that keep the value of the replaced store
	Now         time.Time
}

// Restored is what Restore did.
type Restored struct {
	Contents        // of the store now
	Runs     int    // runs that were live in the backup and were ended
	Kept     string // the replaced store, or ""
}

// Restore puts a copy of the backup in file in the place of the store at path,
// which nobody may have open. The replaced store is kept beside it. If it fails,
// the store is as before.
//
// The runs that were live at the time of the backup are ended: their containers,
// if they are still there, have gone on since, and what they say next would not
// fit. What they had not answered is pending again.
func Restore(ctx context.Context, path, file string, o RestoreOptions) (r Restored, err error) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real // the store may lie on another disk, and its -wal beside it
	}
	if err := usable(path, file); err != nil {
		return r, err
	}
	keep, err := replaceable(ctx, path, o)
	if err != nil {
		return r, err
	}
	tmp := path + ".restoring"
	removeAll(tmp) // of one that was killed
	defer removeAll(tmp)
	for _, suffix := range []string{"", "-wal"} {
		if err := copyFile(file+suffix, tmp+suffix); err != nil && (suffix == "" || !errors.Is(err, fs.ErrNotExist)) {
			return r, failed("copy "+file, err)
		}
	}
	if err := checkBackup(ctx, tmp); err != nil {
		if damaged(err) {
			err = berth.Errorf(berth.Invalid, "it is damaged (%w)", err)
		}
		return r, failed(fmt.Sprintf("%s cannot be restored", file), err)
	}
	if r, err = settle(ctx, tmp, keep, o); err != nil {
		return r, failed("restore "+file, err)
	}
	if r.Kept, err = swap(path, tmp, o.Now); err != nil {
		return r, failed("put the backup in the place of the store", err)
	}
	return r, nil
}

// usable looks at a backup from outside.
func usable(path, file string) error {
	fi, err := os.Stat(file)
	if err != nil {
		return failed("read the backup", err)
	}
	if old, err := os.Stat(path); err == nil && os.SameFile(old, fi) {
		return berth.Errorf(berth.Invalid, "%s is the store itself: name a backup of it", file)
	}
	if !fi.Mode().IsRegular() {
		return berth.Errorf(berth.Invalid, "%s is no plain file: name one that berth backup wrote", file)
	}
	f, err := os.Open(file)
	if err != nil {
		return failed("read the backup", err)
	}
	defer f.Close()
	const magic = "SQLite format 3\x00"
	head := make([]byte, len(magic))
	if _, err := io.ReadFull(f, head); err != nil || string(head) != magic {
		return berth.Errorf(berth.Invalid, "%s is no SQLite database: name a file that berth backup wrote", file)
	}
	return nil
}

// replaceable looks at the store that is to be replaced. It returns what of it
// stays.
func replaceable(ctx context.Context, path string, o RestoreOptions) (keep map[string]string, err error) {
	keep = make(map[string]string)
	if !holds(path) {
		return keep, nil
	}
	db, err := readOnly(path)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	for _, key := range o.Keep {
		var value string
		if db.QueryRowContext(ctx, `SELECT value FROM router_state WHERE key = ?`, key).Scan(&value) == nil {
			keep[key] = value
		}
	}
	c, err := contents(ctx, db)
	if err == nil {
		err = sound(ctx, db, "quick_check")
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err == nil && !o.Force && c.Messages+c.Groups > 0 {
		return nil, berth.Errorf(berth.Conflict, "the store is sound and holds messages or groups (%d, %d): replace it with --force, it is kept beside the restored one", c.Messages, c.Groups)
	}
	return keep, nil // one that is damaged in whatever way may go
}

// checkBackup returns an error unless the database is a sound store that this
// program can read.
func checkBackup(ctx context.Context, path string) error {
	db, err := readOnly(path)
	if err != nil {
		return err
	}
	defer db.Close()
	// The thorough check takes 1.7 s for 100 MB, but a restore is rare.
	if err := sound(ctx, db, "integrity_check"); err != nil {
		return err
	}
	tables := []any{"goose_db_version", "messages", "chats", "registered_groups", "router_state", "progress", "runs", "batches", "outbox"}
	var found int
	err = db.QueryRowContext(ctx, `SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name IN (?`+strings.Repeat(", ?", len(tables)-1)+`)`, tables...).Scan(&found)
	if err != nil {
		return err
	}
	if found < len(tables) {
		return berth.Errorf(berth.Invalid, "it is no store of berth: name a file that berth backup wrote")
	}
	var version int64
	if err := db.QueryRowContext(ctx, `SELECT coalesce(max(version_id), 0) FROM goose_db_version WHERE is_applied = 1`).Scan(&version); err != nil {
		return err
	}
	newest, err := newestSchema()
	if err == nil && version > newest {
		err = berth.Errorf(berth.Invalid, "its schema has version %d and this program knows %d: use a newer berth", version, newest)
	}
	return err
}

func newestSchema() (newest int64, err error) {
	files, err := fs.Glob(migrations, "migrations/*.sql")
	for _, name := range files {
		v, err := goose.NumericComponent(name)
		if err != nil {
			return 0, err
		}
		newest = max(newest, v)
	}
	return newest, err
}

// settle makes the copy of a backup a store that a daemon can go on with.
func settle(ctx context.Context, path string, keep map[string]string, o RestoreOptions) (r Restored, err error) {
	db, err := Open(ctx, path, func(string, bool) {})
	if err != nil {
		return r, err
	}
	defer func() {
		if err = errors.Join(err, db.Close()); err == nil && holds(path+"-wal") {
			err = berth.Errorf(berth.Unavailable, "%s-wal could not be taken into %[1]s: try again", path)
		}
	}()
	live, err := db.LiveRuns(ctx)
	if err != nil {
		return r, err
	}
	for _, run := range live {
		if _, err := db.FinishRun(ctx, berth.Ending{RunID: run.ID, At: o.Now, ExitCode: -1, Error: "the store was restored from a backup", Uncounted: true}); err != nil {
			return r, err
		}
	}
	if o.DropPending {
		if err := db.dropPending(ctx); err != nil {
			return r, err
		}
	}
	for key, value := range keep {
		if err := db.SetState(ctx, key, value); err != nil {
			return r, err
		}
	}
	r.Runs = len(live)
	r.Contents, err = contents(ctx, db.read)
	return r, explain(err)
}

// dropPending takes all messages for answered and gives all texts up.
func (db *DB) dropPending(ctx context.Context) error {
	return db.writer.do(ctx, func(t *tx) error {
		// What lies behind the last message that wakes a group stays its context.
		if err := t.exec(`INSERT INTO progress (chat_jid, agent_seq)
			SELECT chat_jid, max(seq) FROM messages WHERE wakes = 1 GROUP BY chat_jid
			ON CONFLICT (chat_jid) DO UPDATE SET agent_seq = max(agent_seq, excluded.agent_seq), attempts = 0, retry_at = 0, last_error = ''`); err != nil {
			return err
		}
		// Their agents are not told, or they might say it again.
		return t.exec(`UPDATE outbox SET state = 'dead', told = -1, error = 'dropped when a backup was restored' WHERE state = 'pending'`)
	})
}

// swap puts the database tmp in the place of the one at path, which is kept with
// its -wal under the name that is returned. There is a store at path at every
// moment, and never one with the -wal of another.
func swap(path, tmp string, now time.Time) (kept string, err error) {
	if err := syncFile(tmp); err != nil {
		return "", err
	}
	kept = path + ".before-" + now.UTC().Format("20060102T150405.000Z")
	if _, err := os.Lstat(kept); err == nil {
		return "", berth.Errorf(berth.Conflict, "%s is there already: try again", kept)
	}
	// Both as they are: a checkpoint would bring what is wrong with the -wal
	// into the database.
	for _, suffix := range []string{"-wal", ""} {
		err := os.Link(path+suffix, kept+suffix)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			err = os.Rename(path+suffix, kept+suffix) // a folder, or a file system without links
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		if err != nil && suffix == "" {
			kept = ""
		}
	}
	dir := filepath.Dir(path)
	if err := syncDir(dir); err != nil {
		return kept, err
	}
	for _, suffix := range sideFiles {
		if err := os.Remove(path + suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return kept, err
		}
	}
	if err := os.Rename(tmp, path); err != nil {
		return kept, err
	}
	return kept, syncDir(dir)
}

var sideFiles = []string{"-wal", "-shm", "-journal"}

func removeAll(path string) {
	os.Remove(path)
	for _, suffix := range sideFiles {
		os.Remove(path + suffix)
	}
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// syncDir makes a rename last.
func syncDir(path string) error {
	err := syncFile(path)
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTSUP) {
		return nil // some network file systems cannot
	}
	return err
}

// holds reports whether there is something in a file.
func holds(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Size() > 0
}

// failed says what went wrong with a file, in a person's words.
func failed(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return berth.Errorf(berth.Unavailable, "%s: the disk is full: free some space, nothing was changed (%w)", what, err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return berth.Errorf(berth.Denied, "%s: %w (choose a place that this user, or the daemon's, has the right to)", what, err)
	}
	if _, ok := errors.AsType[syscall.Errno](err); ok {
		return berth.Errorf(berth.Unavailable, "%s: %w", what, err)
	}
	return fmt.Errorf("%s: %w", what, explain(err))
}

// How long a start may take to look for damage. One quick_check takes 0.2 s for
// 100 MB that the page cache holds, and a start may take 0.3 s.
var (
	checkFor        = 100 * time.Millisecond
	checkUncleanFor = 5 * time.Second // the last daemon was killed, or the power failed
)

// checkStore finds damage before anything is written to the store. What it has
// no time to find is found when it is read.
func checkStore(ctx context.Context, path string) error {
	unclean := holds(path + "-wal")
	fi, err := os.Stat(path)
	switch {
	case err == nil && !fi.Mode().IsRegular():
		return berth.Errorf(berth.Invalid, "it is no plain file: move it away, or put a backup in its place with \"berth restore FILE\"")
	case err == nil && fi.Size() == 0, errors.Is(err, fs.ErrNotExist):
		if unclean { // SQLite would remove the -wal
			return fmt.Errorf("%w: it is empty but %s-wal is not; without that one a new store begins", errDamaged, filepath.Base(path))
		}
		return nil // a new one
	case err != nil:
		return nil // opening it says what is wrong
	}
	patience := checkFor
	if unclean {
		patience = checkUncleanFor
	}
	db, err := readOnly(path)
	if err != nil {
		return err
	}
	defer db.Close()
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := sound(limited, db, "quick_check"); damaged(err) {
		return err
	}
	return nil
}

var errDamaged = errors.New("database disk image is malformed")

// damaged reports whether err means that a database is damaged.
func damaged(err error) bool {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		code := e.Code() & 0xff
		return code == sqlite3.SQLITE_CORRUPT || code == sqlite3.SQLITE_NOTADB
	}
	return errors.Is(err, errDamaged)
}

// sound runs quick_check or integrity_check.
func sound(ctx context.Context, db *sql.DB, pragma string) error {
	var found string
	if err := db.QueryRowContext(ctx, "PRAGMA "+pragma+"(1)").Scan(&found); err != nil {
		return err
	}
	if found != "ok" {
		found = strings.TrimPrefix(strings.Join(strings.Fields(found), " "), "*** in database main *** ")
		return fmt.Errorf("%w: %s", errDamaged, found)
	}
	return nil
}

// inspect checks a database that nobody writes to and says what it holds.
func inspect(ctx context.Context, path string) (c Contents, err error) {
	db, err := readOnly(path)
	if err != nil {
		return c, err
	}
	defer db.Close()
	if err := sound(ctx, db, "quick_check"); err != nil {
		return c, err
	}
	if c, err = contents(ctx, db); err != nil {
		return c, err
	}
	fi, err := os.Stat(path)
	if err == nil {
		c.Bytes = fi.Size()
	}
	return c, err
}

// contents keeps to what the first schema had: a backup may be older than this
// program.
func contents(ctx context.Context, db *sql.DB) (c Contents, err error) {
	var newest string
	err = db.QueryRowContext(ctx, `SELECT
		(SELECT count(*) FROM messages),
		(SELECT count(*) FROM registered_groups),
		coalesce((SELECT timestamp FROM messages ORDER BY seq DESC LIMIT 1), ''),
		(SELECT count(*) FROM registered_groups g JOIN messages m ON m.chat_jid = g.jid AND m.wakes = 1
			LEFT JOIN progress p ON p.chat_jid = g.jid WHERE m.seq > coalesce(max(p.agent_seq, p.parked_seq), 0)),
		(SELECT count(*) FROM outbox WHERE state = 'pending')`).
		Scan(&c.Messages, &c.Groups, &newest, &c.Waiting, &c.Unsent)
	c.Newest = parseTime(newest)
	return c, err
}

// readOnly opens a database that nobody writes to and changes nothing: a -wal is
// read, but not taken into the database.
func readOnly(path string) (*sql.DB, error) {
	switch {
	case holds(path + "-wal"):
		return sql.Open("sqlite", uri(path, "ro"))
	case holds(path + "-journal"):
		return sql.Open("sqlite", uri(path, "rw")) // has to be rolled back first
	}
	return sql.Open("sqlite", uri(path, "ro")+"&immutable=1") // or SQLite would make a -wal
}

func uri(path, mode string) string {
	q := url.Values{"mode": {mode}, "_pragma": {"busy_timeout(5000)"}}
	return (&url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}).String()
}
