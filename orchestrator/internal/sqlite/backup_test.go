package sqlite

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/orchestrator/internal/berth"
)

const perMiB = 16 // messages

// grow fills a store with n MiB of messages of chat.
func grow(t *testing.T, db *DB, n int) {
	t.Helper()
	text := strings.Repeat("x", 1<<20/perMiB)
	for i := range n {
		check(t, db.writer.do(t.Context(), func(tx *tx) error {
			if err := tx.exec(`INSERT OR IGNORE INTO chats (jid, name) VALUES (?, '')`, chat); err != nil {
				return err
			}
			for j := range perMiB {
				if err := tx.exec(`INSERT INTO messages (id, chat_jid, content, timestamp) VALUES (?, ?, ?, ?)`,
					fmt.Sprintf("grown %d %d", i, j), chat, text, formatTime(time.Unix(1, 0))); err != nil {
					return err
				}
			}
			return nil
		}))
	}
}

func family(t *testing.T, db *DB) {
	t.Helper()
	check(t, db.AddGroup(t.Context(), berth.Group{JID: chat, Name: "Family", Folder: "family", AddedAt: time.Unix(1, 0)}))
}

// fails wants an error with all of these words, in one line.
func fails(t *testing.T, what string, err error, want ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: no error, want %q", what, want)
		return
	}
	for _, w := range append(want, "") {
		if !strings.Contains(err.Error(), w) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %q, want one line with %q", what, err, w)
		}
	}
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestBackup(t *testing.T) {
	db := open(t)
	family(t, db)
	say(t, db, "1", "hi", true)
	dir := t.TempDir()
	file := filepath.Join(dir, "with space?&%.db")
	c, err := db.Backup(t.Context(), file, false)
	check(t, err)
	fi, err := os.Stat(file)
	check(t, err)
	diff(t, "contents", c, Contents{Bytes: fi.Size(), Groups: 1, Messages: 1, Newest: time.Unix(1, 0).UTC(), Waiting: 1})
	diff(t, "mode", fi.Mode(), os.FileMode(0o600))
	diff(t, "files", files(t, dir), []string{filepath.Base(file)})

	_, err = db.Backup(t.Context(), file, false)
	fails(t, "there", err, "is there already", "--force")
	say(t, db, "2", "more", true)
	c, err = db.Backup(t.Context(), file, true)
	check(t, err)
	diff(t, "messages", c.Messages, 2)

	_, err = db.Backup(t.Context(), dir, true)
	fails(t, "a folder", err, "no plain file")
	_, err = db.Backup(t.Context(), filepath.Join(dir, "none", "b.db"), false)
	fails(t, "no folder", err, "there is no folder "+filepath.Join(dir, "none"))
	_, err = Backup(t.Context(), filepath.Join(dir, "none.db"), filepath.Join(dir, "b.db"), false)
	fails(t, "no store", err, "nothing to back up")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := db.Backup(ended, filepath.Join(dir, "b.db"), false); err == nil {
		t.Error("written without a context")
	}
	diff(t, "files", files(t, dir), []string{filepath.Base(file)})
}

// Writers go on during a backup, which holds all that was stored when it began.
func TestBackupDuringWrites(t *testing.T) {
	db := open(t)
	grow(t, db, 40)
	file := filepath.Join(t.TempDir(), "b.db")
	begun, done := make(chan struct{}), make(chan struct{})
	var c Contents
	var err error
	var took time.Duration
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(done)
		<-begun
		since := time.Now()
		c, err = db.Backup(context.Background(), file, false)
		took = time.Since(since)
	})
	before, during := 0, 0
	var slowest time.Duration
	for i, busy := 0, true; busy; i++ {
		if i == 10 {
			before = i
			close(begun)
		}
		since := time.Now()
		say(t, db, fmt.Sprint(i), "hi", true)
		slowest = max(slowest, time.Since(since))
		during++
		select {
		case <-done:
			busy = false
		default:
		}
	}
	wg.Wait()
	check(t, err)
	t.Logf("backup of %d MiB took %v; %d messages meanwhile, the slowest in %v", c.Bytes>>20, took, during-before, slowest)
	if c.Messages < 40*perMiB+before || c.Messages > 40*perMiB+during {
		t.Errorf("got %d messages", c.Messages)
	}
	if during-before < 10 || slowest > took*3/4 {
		t.Errorf("%d messages during the backup of %v, the slowest in %v", during-before, took, slowest)
	}
}

func TestBackupToAFullDisk(t *testing.T) {
	db := open(t)
	grow(t, db, 2)
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skip("cannot make a small disk:", err)
	}
	defer unix.Unmount(dir, 0)
	_, err := db.Backup(t.Context(), filepath.Join(dir, "b.db"), false)
	fails(t, "full", err, "disk is full", "b.db")
	diff(t, "files", len(files(t, dir)), 0)
}

func TestBackupIsNotWritable(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may write everywhere")
	}
	db := open(t)
	dir := t.TempDir()
	check(t, os.Chmod(dir, 0o500))
	_, err := db.Backup(t.Context(), filepath.Join(dir, "b.db"), false)
	fails(t, "read-only", err, "permission denied", "choose a place")
}

// backedUp makes a store and its backup, with a message under way, one answered
// but not sent, and one that came later.
func backedUp(t *testing.T) (path, file string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "messages.db")
	db := openAt(t, path)
	family(t, db)
	check(t, db.SetState(t.Context(), "install", "old"))
	say(t, db, "1", "one", true)
	begin(t, db, "r1")
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", Seq: 1, Acked: []string{"1"}, Out: []berth.Outgoing{answer("r1", 1, "re: one")}, TurnEnded: true}))
	_, err := db.FinishRun(t.Context(), berth.Ending{RunID: "r1", At: time.Now()})
	check(t, err)
	say(t, db, "2", "two", true)
	begin(t, db, "r2")
	file = filepath.Join(t.TempDir(), "b.db")
	_, err = db.Backup(t.Context(), file, false)
	check(t, err)
	say(t, db, "3", "three", true)
	check(t, db.SetState(t.Context(), "install", "new"))
	check(t, db.Close())
	return path, file
}

func now() RestoreOptions {
	return RestoreOptions{Now: time.Date(2026, 11, 21, 10, 15, 0, 0, time.UTC), Keep: []string{"install"}}
}

func TestRestore(t *testing.T) {
	path, file := backedUp(t)
	_, err := Restore(t.Context(), path, file, now())
	fails(t, "a sound store", err, "--force", "(3, 1)")
	o := now()
	o.Force = true
	r, err := Restore(t.Context(), path, file, o)
	check(t, err)
	kept := path + ".before-20261121T101500.000Z"
	diff(t, "restored", r, Restored{Contents: Contents{Groups: 1, Messages: 2, Newest: time.Unix(1, 0).UTC(), Waiting: 1, Unsent: 1}, Runs: 1, Kept: kept})
	diff(t, "files", files(t, filepath.Dir(path)), []string{"messages.db", filepath.Base(kept)})
	fi, err := os.Stat(path)
	check(t, err)
	diff(t, "mode", fi.Mode(), os.FileMode(0o600))

	db := openAt(t, path)
	install, err := db.State(t.Context(), "install")
	check(t, err)
	diff(t, "the root keeps its install", install, "new")
	runs, err := db.LiveRuns(t.Context())
	check(t, err)
	diff(t, "live runs", len(runs), 0)
	diff(t, "pending again", texts(begin(t, db, "r3")), []string{"two"})
	out, ok, err := db.NextOutgoing(t.Context(), chat)
	check(t, err)
	diff(t, "to send", []any{ok, out.Text}, []any{true, "re: one"})
	check(t, db.Close())

	// What was kept is a backup too.
	r, err = Restore(t.Context(), path, kept, RestoreOptions{Force: true, Now: o.Now.Add(time.Hour)})
	check(t, err)
	diff(t, "messages", r.Messages, 3)
	check(t, checkBackup(t.Context(), file)) // the backup itself stays
}

func TestRestoreDropsWhatIsPending(t *testing.T) {
	_, file := backedUp(t)
	path := filepath.Join(t.TempDir(), "messages.db")
	o := now()
	o.DropPending = true
	r, err := Restore(t.Context(), path, file, o)
	check(t, err)
	diff(t, "restored", r, Restored{Contents: Contents{Groups: 1, Messages: 2, Newest: time.Unix(1, 0).UTC()}, Runs: 1})
	db := openAt(t, path)
	pending, _, err := db.Pending(t.Context(), chat)
	check(t, err)
	chats, err := db.OutboxChats(t.Context())
	check(t, err)
	diff(t, "pending, to send", []any{pending, len(chats)}, []any{false, 0})
	say(t, db, "4", "four", true)
	diff(t, "a new message", texts(begin(t, db, "r3")), []string{"four"})
}

// A killed daemon leaves a -wal. It goes with the store that it belongs to, and
// comes back with it.
func TestRestoreKeepsTheWALWithItsStore(t *testing.T) {
	path, file := backedUp(t)
	killed(t, path, func(db *DB) { say(t, db, "4", "four", true) })
	o := now()
	o.Force = true
	r, err := Restore(t.Context(), path, file, o)
	check(t, err)
	diff(t, "messages", r.Messages, 2)
	base := filepath.Base(r.Kept)
	diff(t, "files", files(t, filepath.Dir(path)), []string{"messages.db", base, base + "-wal"})
	o.Now = o.Now.Add(time.Hour)
	r, err = Restore(t.Context(), path, r.Kept, o)
	check(t, err)
	diff(t, "messages", r.Messages, 4)
}

// killed does something with the store and leaves the files that it has then.
func killed(t *testing.T, path string, do func(*DB)) {
	t.Helper()
	db := openAt(t, path)
	do(db)
	left := make(map[string][]byte)
	for _, suffix := range []string{"", "-wal"} {
		data, err := os.ReadFile(path + suffix)
		check(t, err)
		left[suffix] = data
	}
	check(t, db.Close())
	for suffix, data := range left {
		check(t, os.WriteFile(path+suffix, data, 0o600))
	}
}

func TestRestoreRefuses(t *testing.T) {
	path, file := backedUp(t)
	store, err := os.ReadFile(path)
	check(t, err)
	dir := t.TempDir()
	good, err := os.ReadFile(file)
	check(t, err)
	write := func(name string, data []byte) string {
		p := filepath.Join(dir, name)
		check(t, os.WriteFile(p, data, 0o600))
		return p
	}
	foreign := filepath.Join(dir, "foreign.db")
	other, err := sql.Open("sqlite", foreign)
	check(t, err)
	_, err = other.Exec(`CREATE TABLE messages (a)`)
	check(t, err)
	check(t, other.Close())
	newer := filepath.Join(dir, "newer.db")
	db := openAt(t, newer)
	check(t, db.writer.do(t.Context(), func(t *tx) error {
		return t.exec(`INSERT INTO goose_db_version (version_id, is_applied) VALUES (9999, 1)`)
	}))
	check(t, db.Close())
	for _, c := range []struct{ file, want string }{
		{filepath.Join(dir, "none.db"), "no such file"},
		{write("empty.db", nil), "no SQLite database"},
		{write("garbage.db", bytes.Repeat([]byte("garbage "), 1000)), "no SQLite database"},
		{write("truncated.db", good[:len(good)/2]), "it is damaged"},
		{write("flipped.db", flip(good, 3)), "it is damaged"},
		{foreign, "no store of berth"},
		{newer, "newer berth"},
		{dir, "no plain file"},
		{path, "is the store itself"},
	} {
		o := now()
		o.Force = true
		_, err := Restore(t.Context(), path, c.file, o)
		fails(t, c.file, err, c.want)
	}
	after, err := os.ReadFile(path)
	check(t, err)
	diff(t, "files", files(t, filepath.Dir(path)), []string{"messages.db"})
	if !bytes.Equal(store, after) {
		t.Error("the store was changed")
	}
}

// flip damages the head of a page, counted from 1.
func flip(data []byte, page int) []byte {
	const pageSize = 4096
	out := bytes.Clone(data)
	for i := range 64 {
		out[(page-1)*pageSize+i] ^= 0x5a
	}
	return out
}

// Any damage keeps the daemon from starting, in one line that names the file and
// what to do, changes nothing, and is mended by a restore.
func TestDamagedStores(t *testing.T) {
	defer func(d time.Duration) { checkFor = d }(checkFor)
	checkFor = time.Minute // however busy the machine is
	source, file := backedUp(t)
	good, err := os.ReadFile(source)
	check(t, err)
	old, wal := copiedOver(t)
	type damage struct{ store, wal []byte }
	cases := map[string]damage{
		"garbage":             {store: bytes.Repeat([]byte("not a database "), 1000)},
		"truncated":           {store: good[:len(good)-3*4096]},
		"a few bytes":         {store: good[:50]},
		"the -wal of another": {store: old, wal: wal},
		"only a -wal":         {wal: wal},
		"the first page":      {store: flip(good, 1)},
		"zeros at the end":    {store: append(bytes.Clone(good[:len(good)/2]), make([]byte, len(good)-len(good)/2)...)},
	}
	for page := 2; page <= len(good)/4096; page++ {
		cases[fmt.Sprint("page ", page)] = damage{store: flip(good, page)}
	}
	for name, c := range cases {
		path := filepath.Join(t.TempDir(), "messages.db")
		check(t, os.WriteFile(path, c.store, 0o600))
		if c.wal != nil {
			check(t, os.WriteFile(path+"-wal", c.wal, 0o600))
		}
		db, err := Open(t.Context(), path, func(string, bool) {})
		if err == nil {
			check(t, db.Close())
		}
		fails(t, name, err, path, "damaged", "berth restore FILE")
		if now, _ := os.ReadFile(path); !bytes.Equal(now, c.store) {
			t.Errorf("%s: the store was changed", name)
		}
		r, err := Restore(t.Context(), path, file, now())
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if kept, _ := os.ReadFile(r.Kept); !bytes.Equal(kept, c.store) {
			t.Errorf("%s: the damaged store was not kept as it was", name)
		}
		diff(t, name, r.Messages, 2)
		check(t, openAt(t, path).Close())
	}
}

// copiedOver is what there is when somebody copies a backup over a store by hand
// and leaves the store's -wal.
func copiedOver(t *testing.T) (store, wal []byte) {
	t.Helper()
	path, file := filepath.Join(t.TempDir(), "messages.db"), filepath.Join(t.TempDir(), "b.db")
	db := openAt(t, path)
	family(t, db)
	grow(t, db, 1)
	_, err := db.Backup(t.Context(), file, false)
	check(t, err)
	for i := range 300 {
		say(t, db, fmt.Sprint(i), "hi there", true)
	}
	check(t, db.Close())
	killed(t, path, func(db *DB) {
		for i := range 20 {
			say(t, db, fmt.Sprint("later ", i), "hi there", true)
		}
	})
	store, err = os.ReadFile(file)
	check(t, err)
	wal, err = os.ReadFile(path + "-wal")
	check(t, err)
	return store, wal
}

func TestOddStores(t *testing.T) {
	dir := t.TempDir()
	_, err := Open(t.Context(), dir, func(string, bool) {})
	fails(t, "a folder", err, dir, "no plain file")
	// A daemon that dies just after it made the file leaves this: a new store.
	empty := filepath.Join(dir, "messages.db")
	check(t, os.WriteFile(empty, nil, 0o600))
	say(t, openAt(t, empty), "1", "hi", true)
}

// A folder in the store's place is moved away as well.
func TestRestoreOverAFolder(t *testing.T) {
	_, file := backedUp(t)
	path := filepath.Join(t.TempDir(), "messages.db")
	check(t, os.Mkdir(path, 0o700))
	r, err := Restore(t.Context(), path, file, now())
	check(t, err)
	fi, err := os.Stat(r.Kept)
	check(t, err)
	diff(t, "kept", fi.IsDir(), true)
	check(t, openAt(t, path).Close())
}

// Damage that comes while the store is open is told by whatever meets it.
func TestDamageWhileRunning(t *testing.T) {
	path := filepath.Join(t.TempDir(), "messages.db")
	db := openAt(t, path)
	family(t, db)
	grow(t, db, 20)
	check(t, db.Close())
	db = openAt(t, path)
	data, err := os.ReadFile(path)
	check(t, err)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	check(t, err)
	_, err = f.WriteAt(bytes.Repeat([]byte{0x5a}, len(data)-50*4096), 50*4096)
	check(t, err)
	// The file stays open: closing it would take SQLite's locks away.
	defer f.Close()
	_, err = db.MessagesAfter(t.Context(), chat, 10*perMiB, 1000)
	fails(t, "read", err, "the store is damaged", "berth restore FILE")
	_, _, err = db.AddMessage(t.Context(), berth.Message{ID: "x", ChatJID: chat, Text: "hi", Time: time.Unix(1, 0)})
	fails(t, "write", err, "the store is damaged", "berth restore FILE")
	_, err = db.Backup(t.Context(), filepath.Join(t.TempDir(), "b.db"), false)
	fails(t, "backup", err, "the store is damaged")
}

// A start looks for damage for a short while only, however large the store is.
func TestStartIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "messages.db")
	db := openAt(t, path)
	grow(t, db, 30)
	check(t, db.Close())
	since := time.Now()
	check(t, checkStore(t.Context(), path))
	if took := time.Since(since); took > 10*checkFor {
		t.Errorf("took %v", took)
	}
}
