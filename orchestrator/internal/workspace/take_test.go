package workspace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// contents reads what was taken.
func contents(t *testing.T, g *Group, names []string) (out []string) {
	t.Helper()
	for _, name := range names {
		data, err := g.ReadTaken(name, 1000)
		check(t, err)
		out = append(out, string(data))
	}
	return out
}

// W26: one look takes so many and leaves the others for later, in order.
func TestW26TakeWithinABudget(t *testing.T) {
	g, root := open(t, "family")
	dir := filepath.Join(root, "data/ipc/family/tasks")
	for i := range 7 {
		check(t, os.WriteFile(filepath.Join(dir, fmt.Sprint(i, ".json")), []byte(fmt.Sprint(i)), 0o600))
	}
	check(t, os.Symlink("/etc/passwd", filepath.Join(dir, "2a.json"))) // costs as much as a file
	var got []string
	for _, want := range []bool{true, true, false} {
		h := take(t, g, "tasks", 3)
		got = append(got, contents(t, g, h.Taken)...)
		if h.More != want {
			t.Errorf("after %v: more %t", got, h.More)
		}
	}
	if d := cmp.Diff([]string{"0", "1", "2", "3", "4", "5", "6"}, got); d != "" {
		t.Error(d)
	}
	if h := take(t, g, "tasks", 0); len(h.Taken) > 0 || h.More {
		t.Errorf("got %+v", h)
	}
}

// W21: a file with a second name, which the container could change while it is
// read, and one of another owner are not taken, nor read if they got that way
// later.
func TestW21LinkedAndForeignFiles(t *testing.T) {
	g, root := open(t, "family")
	dir := filepath.Join(root, "data/ipc/family/messages")
	taken := filepath.Join(root, "data/ipc/family/taken")
	check(t, os.WriteFile(filepath.Join(dir, "1.json"), []byte("x"), 0o600))
	check(t, os.Link(filepath.Join(dir, "1.json"), filepath.Join(dir, "second-name")))
	h := take(t, g, "messages", 10)
	if len(h.Taken) != 0 || len(h.Refused) != 1 || !errors.Is(h.Refused[0].Reason, ErrLinked) || h.Refused[0].Left {
		t.Errorf("got %+v", h)
	}
	if _, err := os.Stat(filepath.Join(dir, "second-name")); err != nil {
		t.Errorf("the other name: %v", err)
	}
	check(t, os.WriteFile(filepath.Join(dir, "2.json"), []byte("x"), 0o600))
	h = take(t, g, "messages", 10)
	check(t, os.Link(filepath.Join(taken, h.Taken[0]), filepath.Join(dir, "later")))
	if _, err := g.ReadTaken(h.Taken[0], 10); !errors.Is(err, ErrLinked) {
		t.Errorf("got %v", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can make a file of somebody else")
	}
	for uid, want := range map[int]error{0: nil, 12345: ErrOwner} {
		check(t, os.WriteFile(filepath.Join(dir, "3.json"), []byte("x"), 0o600))
		check(t, os.Chown(filepath.Join(dir, "3.json"), uid, uid))
		h = take(t, g, "messages", 10)
		if want == nil && len(h.Taken) != 1 || want != nil && (len(h.Refused) != 1 || !errors.Is(h.Refused[0].Reason, want)) {
			t.Errorf("of user %d: got %+v", uid, h)
		}
	}
}

// W31: what cannot be taken is left out alone.
func TestW31OneFileDoesNotHinderTheOthers(t *testing.T) {
	g, root := open(t, "family")
	dir := filepath.Join(root, "data/ipc/family/messages")
	for _, name := range []string{"1.json", "2.json", "3.json"} {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600))
	}
	check(t, os.MkdirAll(filepath.Join(dir, "0.json", "full"), 0o755))
	// The name that the second one is about to get is taken by a folder.
	from := time.Now().Add(time.Hour).UnixNano()
	g.last = from
	check(t, os.Mkdir(filepath.Join(root, "data/ipc/family/taken", fmt.Sprintf("%020d-messages-2.json", from+2)), 0o755))
	h, err := g.Take("messages", 10)
	if err == nil || !h.More {
		t.Errorf("the fault was not told: %v, %+v", err, h)
	}
	if d := cmp.Diff([]string{"1.json", "3.json"}, contents(t, g, h.Taken)); d != "" {
		t.Error(d)
	}
	if len(h.Refused) != 1 || h.Refused[0].Name != "0.json" || !h.Refused[0].Left {
		t.Errorf("refused: %+v", h.Refused)
	}
	h = take(t, g, "messages", 10)
	if d := cmp.Diff([]string{"2.json"}, contents(t, g, h.Taken)); d != "" {
		t.Error(d)
	}
	check(t, g.BeginRun())
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left for the next run: %v, %v", left, err)
	}
}

// A folder without news is not listed, but never so that news are missed.
func TestTakeSkipsAQuietFolder(t *testing.T) {
	g, root := open(t, "family")
	dir := filepath.Join(root, "data/ipc/family/messages")
	now, err := changed(g.dirs["messages"])
	check(t, err)
	take(t, g, "messages", 10)
	if _, ok := g.quiet["messages"]; ok {
		t.Error("a folder that has just changed passes for quiet")
	}
	g.quiet["messages"] = now // as if that were long ago
	check(t, os.Chmod(dir, 0o770))
	check(t, os.WriteFile(filepath.Join(dir, "1.json"), []byte("x"), 0o600))
	// A container may set the time of modification of its folder.
	check(t, os.Chtimes(dir, now, now))
	if h := take(t, g, "messages", 10); len(h.Taken) != 1 {
		t.Errorf("the file was missed: %+v", h)
	}
	check(t, os.WriteFile(filepath.Join(dir, "2.json"), []byte("x"), 0o600))
	if g.quiet["messages"], err = changed(g.dirs["messages"]); err != nil {
		t.Fatal(err)
	}
	if h := take(t, g, "messages", 10); len(h.Taken) != 0 {
		t.Errorf("the folder was listed: %+v", h)
	}
}

// W23: a snapshot is led nowhere, and only the container's user and ours read it.
func TestW23SnapshotsAndAnswersFollowNoLink(t *testing.T) {
	g, root := open(t, "family")
	victim := filepath.Join(root, "victim")
	check(t, os.WriteFile(victim, []byte("precious"), 0o600))
	ipc := filepath.Join(root, "data/ipc/family")
	for _, name := range []string{TasksSnapshot, GroupsSnapshot, "responses/r1.json"} {
		check(t, os.Symlink(victim, filepath.Join(ipc, name)))
	}
	check(t, g.WriteSnapshot(TasksSnapshot, []byte("tasks")))
	check(t, g.WriteSnapshot(GroupsSnapshot, []byte("groups")))
	check(t, g.WriteResponse("r1.json", []byte("answer")))
	if got, err := os.ReadFile(victim); err != nil || string(got) != "precious" {
		t.Errorf("the victim: %q, %v", got, err)
	}
	for name, want := range map[string]string{TasksSnapshot: "tasks", GroupsSnapshot: "groups", "responses/r1.json": "answer"} {
		fi, err := os.Lstat(filepath.Join(ipc, name))
		check(t, err)
		got, err := os.ReadFile(filepath.Join(ipc, name))
		if check(t, err); string(got) != want || fi.Mode() != 0o640 {
			t.Errorf("%s: %q, %v", name, got, fi.Mode())
		}
	}
	// No container may write there.
	for _, m := range g.Mounts() {
		if m.Source == ipc && !m.ReadOnly {
			t.Errorf("%s is writable", m.Target)
		}
	}
	left, err := fs.Glob(os.DirFS(ipc), "*.tmp")
	check(t, err)
	if len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// The folders themselves are opened once: a link in the place of one is refused
// when a group is opened, and not followed afterwards.
func TestW21FolderBecomesALink(t *testing.T) {
	g, root := open(t, "family")
	victim := filepath.Join(root, "victim")
	check(t, os.Mkdir(victim, 0o755))
	check(t, os.WriteFile(filepath.Join(victim, "keep.json"), []byte("precious"), 0o600))
	for _, dir := range []string{"messages", "tasks"} {
		p := filepath.Join(root, "data/ipc/family", dir)
		check(t, os.Rename(p, p+".old"))
		check(t, os.Symlink(victim, p))
		if h, _ := g.Take(dir, 10); len(h.Taken) > 0 {
			t.Errorf("%s: took %v", dir, h.Taken)
		}
	}
	check(t, g.BeginRun())
	names, err := fs.Glob(os.DirFS(victim), "*")
	if check(t, err); !slices.Equal(names, []string{"keep.json"}) {
		t.Errorf("the victim holds %v", names)
	}
	if _, err := g.tree.Group("family"); err == nil || !strings.Contains(err.Error(), "no folder") {
		t.Errorf("got %v", err)
	}
}

// W24: the log of a run lies outside everything that a container has.
func TestW24RunLogsAreOutsideEveryMount(t *testing.T) {
	for _, folder := range []string{"main", "family"} {
		g, root := open(t, folder)
		check(t, os.WriteFile(filepath.Join(root, "go.mod"), []byte("module berth\n"), 0o600)) // main sees the sources
		check(t, os.Mkdir(filepath.Join(root, "docs"), 0o755))
		l, err := g.OpenRunLog("r1", time.Unix(1, 0), 100)
		check(t, err)
		check(t, l.Close())
		logs, err := filepath.Glob(filepath.Join(g.tree.LogDir(folder), "*-r1.log"))
		if check(t, err); len(logs) != 1 {
			t.Fatalf("logs: %v", logs)
		}
		for _, m := range g.Mounts() {
			if rel, err := filepath.Rel(m.Source, logs[0]); err != nil || filepath.IsLocal(rel) {
				t.Errorf("%s shows %s", m.Target, logs[0])
			}
		}
	}
}

// What the answer to a message pays for, twice: a folder without news.
func BenchmarkTakeNothing(b *testing.B) {
	tree, err := NewTree(b.TempDir(), os.Getuid(), os.Getgid())
	if err != nil {
		b.Fatal(err)
	}
	g, err := tree.Group("family")
	if err != nil {
		b.Fatal(err)
	}
	defer g.Close()
	if g.quiet["messages"], err = changed(g.dirs["messages"]); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := g.Take("messages", 10); err != nil {
			b.Fatal(err)
		}
	}
}
