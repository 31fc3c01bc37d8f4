package workspace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

func open(t *testing.T, folder string) (*Group, string) {
	t.Helper()
	root := t.TempDir()
	tree, err := NewTree(root, os.Getuid(), os.Getgid())
	if err != nil {
		t.Fatal(err)
	}
	g, err := tree.Group(folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	return g, root
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func take(t *testing.T, g *Group, dir string, most int) Haul {
	t.Helper()
	h, err := g.Take(dir, most)
	check(t, err)
	return h
}

// The rights are the same under any umask: a container has to read its input.
func TestFoldersOfAGroup(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	g, root := open(t, "family")
	check(t, g.WriteInput(1, nil))
	for dir, mode := range map[string]fs.FileMode{
		"store": 0o700, "data/logs/family": 0o700, "data/ipc/family": 0o755, "data/ipc/family/input": 0o750, "data/ipc/family/responses": 0o755,
		"groups/family": 0o750, "data/sessions/family": 0o750, "data/ipc/family/input/" + protocol.InputName(1): 0o644,
	} {
		fi, err := os.Stat(filepath.Join(root, dir))
		check(t, err)
		if fi.Mode().Perm() != mode {
			t.Errorf("%s: got %o, want %o", dir, fi.Mode().Perm(), mode)
		}
	}
	// A memory file is seeded once, and what the agent makes of it stays.
	memory := filepath.Join(root, "groups/family/AGENTS.md")
	check(t, os.WriteFile(memory, []byte("mine"), 0o600))
	again, err := g.tree.Group("family")
	check(t, err)
	check(t, again.Close())
	if got, _ := os.ReadFile(memory); string(got) != "mine" {
		t.Errorf("memory: %q", got)
	}
}

// W59: what a container writes belongs to its user, who is never root, whoever the
// daemon runs as; what only the host writes stays the host's.
func TestW59FoldersBelongToTheContainersUser(t *testing.T) {
	uid := os.Getuid()
	if uid == 0 {
		uid = 1000
	}
	root := t.TempDir()
	tree, err := NewTree(root, uid, uid)
	check(t, err)
	g, err := tree.Group("family")
	check(t, err)
	defer g.Close()
	for dir, want := range map[string]int{
		"groups/family": uid, "groups/family/AGENTS.md": uid, "data/sessions/family": uid, "data/ipc/family/input": uid, "data/ipc/family/messages": uid,
		"data/ipc/family/tasks": uid, "data/ipc/family/frames": uid, "data/ipc/family": os.Getuid(), "data/ipc/family/responses": os.Getuid(), "store": os.Getuid(),
	} {
		fi, err := os.Stat(filepath.Join(root, dir))
		check(t, err)
		if got := int(fi.Sys().(*syscall.Stat_t).Uid); got != want {
			t.Errorf("%s belongs to %d, want %d", dir, got, want)
		}
	}
}

// A container that runs as the daemon's user can take its own rights away, and with
// them the daemon's.
func TestLockedOut(t *testing.T) {
	g, root := open(t, "family")
	for _, dir := range []string{"groups/family", "data/sessions/family", "data/ipc/family/input", "data/ipc/family/frames"} {
		check(t, os.Chmod(filepath.Join(root, dir), 0))
	}
	again, err := g.tree.Group("family")
	check(t, err)
	defer again.Close()
	for _, dir := range []string{"groups/family", "data/ipc/family/frames"} {
		fi, err := os.Stat(filepath.Join(root, dir))
		check(t, err)
		if fi.Mode()&0o700 != 0o700 {
			t.Errorf("%s has %v", dir, fi.Mode())
		}
	}
}

// The agent puts a link in the place of its memory file: nothing is written
// through it.
func TestSeedFollowsNoLink(t *testing.T) {
	g, root := open(t, "family")
	memory, victim := filepath.Join(root, "groups/family/AGENTS.md"), filepath.Join(root, "victim")
	check(t, os.Remove(memory))
	check(t, os.Symlink(victim, memory))
	again, err := g.tree.Group("family")
	if err == nil {
		again.Close()
	}
	if _, err := os.Lstat(victim); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the link was followed")
	}
}

func TestMountsOfMainAndOthers(t *testing.T) {
	for folder, globalRO := range map[string]bool{"family": true, "main": false} {
		g, root := open(t, folder)
		var got []string
		for _, m := range g.Mounts() {
			rel, err := filepath.Rel(root, m.Source)
			check(t, err)
			got = append(got, fmt.Sprint(rel, " ", m.Target, " ", m.ReadOnly))
		}
		want := []string{
			"groups/" + folder + " /workspace/group false",
			fmt.Sprint("groups/global /workspace/global ", globalRO),
			"data/sessions/" + folder + " /home/agent false",
			"data/ipc/" + folder + " /workspace/ipc true",
			"data/ipc/" + folder + "/input /workspace/ipc/input false",
			"data/ipc/" + folder + "/messages /workspace/ipc/messages false",
			"data/ipc/" + folder + "/tasks /workspace/ipc/tasks false",
			"data/ipc/" + folder + "/frames /workspace/ipc/frames false",
			"data/ipc/" + folder + "/responses /workspace/ipc/responses true",
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	}
}

// W54: main sees the sources, and nothing that lies beside them.
func TestW54ProjectMount(t *testing.T) {
	g, root := open(t, "main")
	before := len(g.Mounts())
	for name, text := range map[string]string{"go.mod": "module berth\n", ".env": "KEY=1", "README.md": "", "store/x": "", "notes.txt": ""} {
		check(t, os.WriteFile(filepath.Join(root, name), []byte(text), 0o600))
	}
	check(t, os.Mkdir(filepath.Join(root, "docs"), 0o755))
	check(t, os.Symlink("/etc", filepath.Join(root, "docker")))
	var got []string
	for _, m := range g.Mounts()[before:] {
		got = append(got, fmt.Sprint(m.Target, " ", m.ReadOnly))
	}
	if d := cmp.Diff([]string{"/workspace/project/README.md true", "/workspace/project/docs true", "/workspace/project/go.mod true"}, got); d != "" {
		t.Error(d)
	}
	family, err := g.tree.Group("family")
	check(t, err)
	defer family.Close()
	if n := len(family.Mounts()); n != before {
		t.Errorf("another group has %d mounts, want %d", n, before)
	}
	check(t, os.WriteFile(filepath.Join(root, "go.mod"), []byte("module other\n"), 0o600))
	if n := len(g.Mounts()); n != before {
		t.Errorf("another project was mounted: %d mounts", n)
	}
}

// W64: what an earlier run left does not end the next one.
func TestInput(t *testing.T) {
	g, root := open(t, "family")
	check(t, g.WriteInput(7, []byte("hi")))
	check(t, g.WriteClose())
	check(t, g.WriteClose())
	dir := filepath.Join(root, "data/ipc/family/input")
	data, err := os.ReadFile(filepath.Join(dir, "00000000000000000007.json"))
	check(t, err)
	if string(data) != "hi" || !g.HasInput(7) || g.HasInput(8) {
		t.Errorf("got %q", data)
	}
	check(t, g.BeginRun())
	entries, err := os.ReadDir(dir)
	check(t, err)
	if len(entries) != 0 {
		t.Errorf("left: %v", entries)
	}
	lease, err := os.Stat(filepath.Join(root, "data/ipc/family/lease"))
	check(t, err)
	if time.Since(lease.ModTime()) > time.Minute {
		t.Error("the lease is old")
	}
}

// W23: what the host writes is led nowhere by links in a folder that the
// container owns, and W21: nothing outside is deleted.
func TestW21AndW23LinksInTheContainersFolders(t *testing.T) {
	g, root := open(t, "family")
	victim := filepath.Join(root, "victim")
	check(t, os.Mkdir(victim, 0o755))
	keep := filepath.Join(victim, "keep.json")
	check(t, os.WriteFile(keep, []byte("precious"), 0o600))
	input := filepath.Join(root, "data/ipc/family/input")
	check(t, os.Symlink(keep, filepath.Join(input, protocol.InputName(1)+".tmp")))
	check(t, os.Symlink(keep, filepath.Join(input, protocol.InputName(1))))
	check(t, os.Symlink(keep, filepath.Join(input, protocol.CloseFile)))
	check(t, os.Symlink(victim, filepath.Join(input, "dir")))
	check(t, g.WriteInput(1, []byte("evil")))
	check(t, g.WriteClose())
	check(t, g.BeginRun())
	if got, err := os.ReadFile(keep); err != nil || string(got) != "precious" {
		t.Errorf("got %q, %v", got, err)
	}

	// The folder itself becomes a link: the opened one is used, not the name.
	check(t, os.Rename(input, input+".old"))
	check(t, os.Symlink(victim, input))
	check(t, g.WriteInput(2, []byte("evil")))
	check(t, g.BeginRun())
	entries, err := os.ReadDir(victim)
	check(t, err)
	if len(entries) != 1 {
		t.Errorf("the victim holds %v", entries)
	}
	if _, err := g.tree.Group("family"); err == nil {
		t.Error("a link was opened as a folder")
	}
}

// W22: pipes, links, folders and devices are refused without blocking.
func TestW22OnlyRegularFilesAreRead(t *testing.T) {
	g, root := open(t, "family")
	dir := filepath.Join(root, "data/ipc/family/messages")
	check(t, syscall.Mkfifo(filepath.Join(dir, "1.json"), 0o666))
	check(t, os.Symlink("/etc/passwd", filepath.Join(dir, "2.json")))
	check(t, os.Mkdir(filepath.Join(dir, "3.json"), 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "4.json"), []byte(strings.Repeat("x", 100)), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "5.json"), []byte("ok"), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "3.json", "full"), nil, 0o600))
	take(t, g, "messages", 100)
	names, err := g.Taken()
	check(t, err)
	if len(names) != 2 {
		t.Fatalf("taken: %v", names)
	}
	if got, err := g.ReadTaken(names[0], 50); err == nil || len(got) != 50 {
		t.Errorf("an over-large file: %d bytes, %v", len(got), err)
	}
	if got, err := g.ReadTaken(names[1], 50); err != nil || string(got) != "ok" {
		t.Errorf("got %q, %v", got, err)
	}
	// Pipes and links are removed; a folder, which could be filled faster than
	// it is emptied, is left until no container runs.
	left, err := os.ReadDir(dir)
	check(t, err)
	if len(left) != 1 || left[0].Name() != "3.json" {
		t.Errorf("left: %v", left)
	}
	if _, err := os.Stat("/etc/passwd"); err != nil {
		t.Error(err)
	}
	// What became something else after it was taken is not opened either.
	for i, make := range []func(string) error{
		func(p string) error { return syscall.Mkfifo(p, 0o666) },
		func(p string) error { return os.Symlink("/etc/passwd", p) },
		func(p string) error { return os.MkdirAll(filepath.Join(p, "a/b"), 0o755) },
	} {
		name := fmt.Sprint("swapped-", i, ".json")
		check(t, make(filepath.Join(root, "data/ipc/family/taken", name)))
		if _, err := g.ReadTaken(name, 50); !errors.Is(err, ErrNotRegular) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	check(t, g.BeginRun())
	if fi, err := os.Stat(filepath.Join(root, "data/ipc/family/taken/swapped-2.json")); err == nil {
		t.Errorf("left: %v", fi.Name())
	}
}

// A container nests folders as deep as it likes and locks us out of them: they
// are gone before the next run, with a handful of open files.
func TestDeepFoldersAreRemoved(t *testing.T) {
	g, root := open(t, "family")
	input := filepath.Join(root, "data/ipc/family/input")
	at, err := os.OpenRoot(input)
	check(t, err)
	for i := range 3000 {
		check(t, at.Mkdir("d", 0o755))
		check(t, at.WriteFile("f", nil, 0o600))
		next, err := at.OpenRoot("d")
		check(t, err)
		if i == 10 {
			check(t, at.Chmod("d", 0))
		}
		check(t, at.Close())
		at = next
	}
	check(t, at.Close())
	var before, after syscall.Rlimit
	check(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &before))
	after = before
	after.Cur = 200
	check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &after))
	defer syscall.Setrlimit(syscall.RLIMIT_NOFILE, &before)
	check(t, g.BeginRun())
	left, err := os.ReadDir(input)
	check(t, err)
	if len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// W08, W12: numbers in names count as numbers, and what is taken keeps its order.
func TestW08RequestsKeepTheirOrder(t *testing.T) {
	g, root := open(t, "family")
	dir := filepath.Join(root, "data/ipc/family/messages")
	for _, name := range []string{"10.json", "2.json", "b.json", "a.json", "002-x.json", "x.json.tmp", "y.txt", "99999999999999999999999.json", "\x1b[31m.json"} {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600))
	}
	take(t, g, "messages", 100)
	check(t, os.WriteFile(filepath.Join(dir, "1.json"), []byte("later"), 0o600))
	take(t, g, "messages", 100)
	names, err := g.Taken()
	check(t, err)
	var got []string
	for _, name := range names {
		data, err := g.ReadTaken(name, 100)
		check(t, err)
		got = append(got, string(data))
		if strings.ContainsAny(name, "\x1b[") {
			t.Errorf("%q", name)
		}
	}
	want := []string{"\x1b[31m.json", "002-x.json", "2.json", "10.json", "99999999999999999999999.json", "a.json", "b.json", "later"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func FuzzClean(f *testing.F) {
	f.Add("a/../b\x00\xff.json")
	f.Fuzz(func(t *testing.T, name string) {
		if got := clean(name); len(got) > 85 || !strings.HasSuffix(got, ".json") || strings.ContainsAny(got, "/\x00\n\x1b") {
			t.Errorf("%q: got %q", name, got)
		}
	})
}

func FuzzCompareNames(f *testing.F) {
	f.Add("1", "2", "10")
	f.Add("007", "7", "a")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		if compareNames(a, b) < 0 != (compareNames(b, a) > 0) {
			t.Errorf("%q and %q", a, b)
		}
		if compareNames(a, b) <= 0 && compareNames(b, c) <= 0 && compareNames(a, c) > 0 {
			t.Errorf("%q, %q, %q are in no order", a, b, c)
		}
	})
}

func TestRunLog(t *testing.T) {
	g, root := open(t, "family")
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for i := range maxRunLogs + 5 {
		l, err := g.OpenRunLog(fmt.Sprint("run", i), at.Add(time.Duration(i)*time.Hour), 100)
		check(t, err)
		check(t, l.Close())
	}
	logs, err := filepath.Glob(filepath.Join(root, "data/logs/family/*.log"))
	check(t, err)
	if len(logs) != maxRunLogs || !strings.HasSuffix(logs[0], "-run5.log") {
		t.Errorf("%d logs, the first is %s", len(logs), logs[0])
	}
	l, err := g.OpenRunLog("full", at.AddDate(1, 0, 0), 20)
	check(t, err)
	for range 10 {
		_, _ = l.Write([]byte("0123456789\n"))
	}
	l.Notef("the end")
	check(t, l.Close())
	text, err := os.ReadFile(filepath.Join(root, "data/logs/family/20270101T000000-full.log"))
	check(t, err)
	if want := "0123456789\nberth: the log of this run is full; the rest is left out\nberth: the end\n"; string(text) != want {
		t.Errorf("got %q", text)
	}
}

func TestGF05UnsafeFolders(t *testing.T) {
	g, _ := open(t, "family")
	for _, folder := range []string{"../../etc", "/tmp", "global", "errors", ""} {
		if _, err := g.tree.Group(folder); err == nil {
			t.Errorf("%q was opened", folder)
		}
	}
}

func TestUnwritableRoot(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	check(t, os.WriteFile(file, nil, 0o600))
	_, err := NewTree(file, 1, 1)
	if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != berth.Unavailable || !strings.Contains(err.Error(), "--root") {
		t.Errorf("got %v", err)
	}
}
