package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
)

// storeDaemon is as much of a daemon as a backup needs: the lock, the store and
// the control socket.
type storeDaemon struct {
	t    *testing.T
	root string
	db   *sqlite.DB
}

func newStoreDaemon(t *testing.T) (d *storeDaemon, stop func()) {
	t.Helper()
	root, err := os.MkdirTemp("", "berth") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.Mkdir(filepath.Join(root, "store"), 0o700); err != nil {
		t.Fatal(err)
	}
	cfg := Config{Root: root}
	lock, err := lockRoot(filepath.Join(root, "store"))
	if err != nil {
		t.Fatal(err)
	}
	db, err := sqlite.Open(t.Context(), storePath(cfg), func(string, bool) {})
	if err != nil {
		t.Fatal(err)
	}
	l, err := web.Listen(cfg.Socket())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := contextWithCancel(t)
	done := make(chan error, 1)
	go func() { done <- web.Serve(ctx, l, &control{texts: texts{db}, cfg: cfg}, zaptest.NewLogger(t)) }()
	return &storeDaemon{t, root, db}, func() {
		cancel()
		for _, err := range []error{<-done, db.Close(), lock.Close()} {
			if err != nil {
				t.Error(err)
			}
		}
	}
}

func (d *storeDaemon) berth(args ...string) (code int, stdout, stderr string) {
	d.t.Helper()
	var out, errs strings.Builder
	code = run(d.t.Context(), append(args, "--root", d.root), []string{"HOME=/nonexistent"}, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

func TestBackupOverTheDaemon(t *testing.T) {
	d, stop := newStoreDaemon(t)
	g := berth.Group{JID: "console:main", Name: "Main", Folder: "main", AddedAt: time.Now()}
	if err := d.db.AddGroup(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	ask := func(id string) {
		m := berth.Message{ID: id, ChatJID: g.JID, Text: "hi", Time: time.Now(), Wakes: true}
		if _, _, err := d.db.AddMessage(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	ask("1")
	dir := t.TempDir()
	t.Chdir(dir)
	code, out, errs := d.berth("backup", "--json", "b.db") // relative to here, not to the daemon
	var b web.Backup
	if err := json.Unmarshal([]byte(out), &b); code != exitDone || errs != "" || err != nil {
		t.Fatalf("got %d, %q, %q, %v", code, out, errs, err)
	}
	fi, err := os.Stat("b.db")
	if err != nil || fi.Mode() != 0o600 || b.File != filepath.Join(dir, "b.db") || b.Bytes != fi.Size() || b.Messages != 1 || b.Groups != 1 || b.Newest == nil {
		t.Errorf("got %+v, %v, %v", b, fi, err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"backup", "b.db"}, "is there already"},
		{[]string{"backup", "none/b.db"}, "there is no folder " + dir + "/none"},
		{[]string{"backup", filepath.Join(d.root, "store", "b.db")}, "the live files are there"},
		{[]string{"restore", "b.db"}, fmt.Sprintf("another berth works on this root (pid %d)", os.Getpid())},
	} {
		if code, out, errs := d.berth(c.args...); code != exitFailed || out != "" || !strings.Contains(errs, c.want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%q: got %d, %q, %q, want %q", c.args, code, out, errs, c.want)
		}
	}
	ask("2")
	if code, out, errs := d.berth("backup", "--force", "b.db"); code != exitDone || errs != "" || !strings.Contains(out, "2 messages, 1 group\n") {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
	stop()

	code, out, errs = d.berth("restore", "--force", "b.db")
	for _, want := range []string{"restored b.db: 2 messages, 1 group; the newest message is of ", "s ago\n", "kept as ", "the next start answers 2 messages and sends 0 texts of then", "berth restore --force --drop-pending b.db"} {
		if code != exitDone || errs != "" || !strings.Contains(out, want) {
			t.Errorf("got %d, %q, %q, want %q in it", code, out, errs, want)
		}
	}
	code, out, errs = d.berth("restore", "--force", "--drop-pending", "b.db")
	if code != exitDone || errs != "" || !strings.Contains(out, "nothing of then is pending") {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
}

func TestBackupPlaceIsAbsolute(t *testing.T) {
	d, stop := newStoreDaemon(t)
	defer stop()
	_, err := web.NewClient(Config{Root: d.root}.Socket()).Backup(t.Context(), web.NewBackup{File: "b.db"})
	if err == nil || !strings.Contains(err.Error(), "not absolute") {
		t.Errorf("got %v", err)
	}
}
