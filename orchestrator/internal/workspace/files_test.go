package workspace

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// kept returns what the outbox holds for a key: name and content.
func kept(t *testing.T, g *Group, key string) (name, text string) {
	t.Helper()
	entries, err := os.ReadDir(g.tree.OutboxDir(key))
	if errors.Is(err, fs.ErrNotExist) {
		return "", ""
	}
	check(t, err)
	if len(entries) != 1 {
		t.Fatalf("%d files of one text", len(entries))
	}
	data, err := os.ReadFile(filepath.Join(g.tree.OutboxDir(key), entries[0].Name()))
	check(t, err)
	return entries[0].Name(), string(data)
}

// What is sent is the file as it was when it was asked for.
func TestKeepFile(t *testing.T) {
	g, root := open(t, "family")
	home := filepath.Join(root, "groups/family")
	check(t, os.MkdirAll(filepath.Join(home, "out/a b"), 0o750))
	check(t, os.WriteFile(filepath.Join(home, "out/a b/Bericht ä.pdf"), []byte("one"), 0o640))
	for _, name := range []string{"out/a b/Bericht ä.pdf", "./out//a b/../a b/Bericht ä.pdf", protocol.GroupDir + "/out/a b/Bericht ä.pdf"} {
		file, size, err := g.KeepFile(name, name)
		if err != nil || file != "family/out/a b/Bericht ä.pdf" || size != 3 {
			t.Errorf("%s: got %q, %d, %v", name, file, size, err)
		}
	}
	check(t, os.WriteFile(filepath.Join(home, "out/a b/Bericht ä.pdf"), []byte("another"), 0o640))
	if name, text := kept(t, g, "out/a b/Bericht ä.pdf"); name != "Bericht ä.pdf" || text != "one" {
		t.Errorf("kept %q: %q", name, text)
	}
	fi, err := os.Stat(filepath.Join(root, outboxDir))
	check(t, err)
	if fi.Mode().Perm() != 0o700 {
		t.Errorf("the outbox has the mode %o", fi.Mode().Perm())
	}
	for _, m := range g.Mounts() {
		if strings.HasPrefix(filepath.Join(root, outboxDir), m.Source+"/") || m.Source == filepath.Join(root, outboxDir) {
			t.Errorf("a container sees the outbox: %+v", m)
		}
	}

	// What is needed no more goes, also what a copy left that was cut off.
	check(t, os.WriteFile(filepath.Join(root, outboxDir, ".part-1"), nil, 0o600))
	check(t, g.DropFile("./out//a b/../a b/Bericht ä.pdf"))
	check(t, g.DropFile("there is none"))
	check(t, g.tree.SweepFiles([]string{"out/a b/Bericht ä.pdf", "gone"}))
	left, err := os.ReadDir(filepath.Join(root, outboxDir))
	check(t, err)
	if len(left) != 1 || left[0].Name() != filepath.Base(g.tree.OutboxDir("out/a b/Bericht ä.pdf")) {
		t.Errorf("left: %v", left)
	}
}

// Nothing but the group's own files can be sent, and nothing is kept of what cannot.
func TestKeepFileRefuses(t *testing.T) {
	g, root := open(t, "family")
	home := filepath.Join(root, "groups/family")
	secret := filepath.Join(root, "store/secret")
	check(t, os.WriteFile(secret, []byte("secret"), 0o644))
	check(t, os.Mkdir(filepath.Join(home, "dir"), 0o755))
	check(t, os.WriteFile(filepath.Join(home, "dir/file"), []byte("x"), 0o644))
	check(t, os.WriteFile(filepath.Join(home, "empty"), nil, 0o644))
	check(t, os.WriteFile(filepath.Join(home, "two\nlines"), []byte("x"), 0o644))
	check(t, os.WriteFile(filepath.Join(home, "closed"), []byte("x"), 0))
	check(t, os.Symlink(secret, filepath.Join(home, "link")))
	check(t, os.Symlink("dir/file", filepath.Join(home, "inner")))
	check(t, os.Symlink(filepath.Join(root, "store"), filepath.Join(home, "linked")))
	check(t, os.Symlink("dir", filepath.Join(home, "near")))
	check(t, syscall.Mkfifo(filepath.Join(home, "pipe"), 0o644))
	large, err := os.Create(filepath.Join(home, "large"))
	check(t, err)
	check(t, errors.Join(large.Truncate(berth.MaxFile+1), large.Close()))
	for name, want := range map[string]string{
		"":                        "name a file below",
		".":                       "name a file below",
		"/etc/passwd":             "name a file below",
		"../family/dir/file":      "name a file below",
		"dir/../../main/x":        "name a file below",
		"a\x00b":                  "name a file below",
		protocol.GroupDir:         "name a file below",
		"two\nlines":              "rename it",
		"\xff":                    "rename it",
		"missing":                 "no such file",
		"missing/file":            "no such file",
		"dir/file/deeper":         "no such file",
		"dir":                     "not a regular file",
		"pipe":                    "not a regular file",
		"pipe/x":                  "no such file",
		"link":                    "it is a link",
		"inner":                   "it is a link",
		"linked/secret":           "it is a link",
		"near/file":               "it is a link",
		"empty":                   "it is empty",
		"large":                   "more than 64 MiB",
		"closed":                  "read it",
		strings.Repeat("x", 9000): "rename it",
	} {
		if name == "closed" && os.Geteuid() != 0 {
			want = "permission denied"
		}
		file, _, err := g.KeepFile(name, "key")
		if known, ok := errors.AsType[*berth.Error](err); !ok || known.Kind != berth.Invalid || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), root) {
			t.Errorf("%.40q: got %q, %v, want %q", name, file, err, want)
		}
		if name, text := kept(t, g, "key"); name != "" {
			t.Errorf("%.40q: kept %q: %q", name, name, text)
		}
	}
}

// The daemon may read more than a container: what lies in a group's folder and is
// not for the agent cannot be sent either.
func TestKeepFileOnlyWhatTheContainerMayRead(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: anybody else's containers are the same user")
	}
	root := t.TempDir()
	tree, err := NewTree(root, 1000, 1001)
	check(t, err)
	g, err := tree.Group("family")
	check(t, err)
	defer g.Close()
	home := filepath.Join(root, "groups/family")
	make := func(name string, uid, gid int, mode fs.FileMode) {
		path := filepath.Join(home, name)
		if mode.IsDir() {
			check(t, os.Mkdir(path, 0o700))
			check(t, os.WriteFile(filepath.Join(path, "f"), []byte("x"), 0o644))
		} else {
			check(t, os.WriteFile(path, []byte("x"), 0o600))
		}
		check(t, os.Chown(path, uid, gid))
		check(t, os.Chmod(path, mode.Perm()))
	}
	for _, c := range []struct {
		name     string
		uid, gid int
		mode     fs.FileMode
		may      bool
	}{
		{"own", 1000, 1001, 0o400, true}, {"own closed", 1000, 1001, 0o077, false},
		{"group", 0, 1001, 0o640, true}, {"group closed", 0, 1001, 0o604, false},
		{"others", 0, 0, 0o604, true}, {"others closed", 0, 0, 0o640, false},
		{"dir", 1000, 1001, fs.ModeDir | 0o700, true}, {"dir of root", 0, 0, fs.ModeDir | 0o700, false}, {"dir for all", 0, 0, fs.ModeDir | 0o711, true},
	} {
		make(c.name, c.uid, c.gid, c.mode)
		name := c.name
		if c.mode.IsDir() {
			name += "/f"
		}
		if _, _, err := g.KeepFile(name, c.name); (err == nil) != c.may || err != nil && !strings.Contains(err.Error(), "you may not read it yourself") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// The agents of all groups share a memory file; what main's agent makes of it stays.
func TestSeedOfAll(t *testing.T) {
	g, root := open(t, "family")
	memory := filepath.Join(root, "groups/global/AGENTS.md")
	if data, err := os.ReadFile(memory); err != nil || len(data) == 0 {
		t.Errorf("%q, %v", data, err)
	}
	check(t, os.WriteFile(memory, []byte("ours"), 0o600))
	_, err := NewTree(root, g.tree.uid, g.tree.gid)
	check(t, err)
	if data, _ := os.ReadFile(memory); string(data) != "ours" {
		t.Errorf("%q", data)
	}
	victim := filepath.Join(root, "victim")
	check(t, os.Remove(memory))
	check(t, os.Symlink(victim, memory))
	_, err = NewTree(root, g.tree.uid, g.tree.gid)
	check(t, err)
	if _, err := os.Lstat(victim); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the link was followed")
	}
	own, err := os.ReadFile(filepath.Join(root, "groups/family/AGENTS.md"))
	check(t, err)
	if !strings.Contains(string(own), "`tools/`") {
		t.Errorf("%s", own)
	}
}

// Whatever a name is, only a file of the group is kept, in one place.
func FuzzKeepFile(f *testing.F) {
	for _, name := range []string{"a", "d/b", "../x", "/etc/passwd", "d/../a", "l", "l/secret", "a/", "d//b", "..\x00", "\n"} {
		f.Add(name)
	}
	root := f.TempDir()
	tree, err := NewTree(root, os.Getuid(), os.Getgid())
	if err != nil {
		f.Fatal(err)
	}
	g, err := tree.Group("family")
	if err != nil {
		f.Fatal(err)
	}
	home := filepath.Join(root, "groups/family")
	for _, err := range []error{
		os.WriteFile(filepath.Join(root, "groups/secret"), []byte("secret"), 0o644),
		os.WriteFile(filepath.Join(home, "a"), []byte("fine"), 0o644), os.Mkdir(filepath.Join(home, "d"), 0o755),
		os.WriteFile(filepath.Join(home, "d/b"), []byte("fine"), 0o644), os.Symlink("..", filepath.Join(home, "l")),
		os.Remove(filepath.Join(home, memoryFile)),
	} {
		if err != nil {
			f.Fatal(err)
		}
	}
	f.Fuzz(func(t *testing.T, name string) {
		file, size, err := g.KeepFile(name, "key")
		if err != nil {
			if _, text := kept(t, g, "key"); text != "" {
				t.Errorf("%q: %v, and %q is kept", name, err, text)
			}
			return
		}
		if _, text := kept(t, g, "key"); text != "fine" || size != 4 || !filepath.IsLocal(file) || !strings.HasPrefix(file, "family/") {
			t.Errorf("%q: %q of %d bytes: %q", name, file, size, text)
		}
		check(t, g.DropFile("key"))
	})
}

// A folder that a container exchanges for something else at the last moment holds
// nobody up.
func TestOpenFolder(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	check(t, err)
	defer root.Close()
	check(t, os.Mkdir(filepath.Join(dir, "folder"), 0o700))
	check(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	check(t, syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	check(t, os.Symlink("/etc", filepath.Join(dir, "link")))
	for _, name := range []string{"file", "pipe", "link", "missing"} {
		if f, err := openFolder(root, name); err == nil {
			f.Close()
			t.Errorf("%s was opened", name)
		}
	}
	f, err := openFolder(root, "folder")
	check(t, err)
	check(t, f.Close())
}
