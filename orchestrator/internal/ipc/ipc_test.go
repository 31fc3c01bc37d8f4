package ipc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/workspace"
)

// memory is a store that tells of each text, and can fail.
type memory struct {
	mu   sync.Mutex
	keys map[string]bool
	fail error
	news chan berth.Outgoing
}

func (m *memory) AddOutgoing(_ context.Context, out ...berth.Outgoing) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return m.fail
	}
	for _, o := range out {
		if !m.keys[o.Key] {
			m.keys[o.Key] = true
			m.news <- o
		}
	}
	return nil
}

type world struct {
	t     *testing.T
	root  string
	store *memory
	box   turn.Inbox
}

func open(t *testing.T, folder string, before func(dir string)) *world {
	t.Helper()
	root := t.TempDir()
	tree, err := workspace.NewTree(root, os.Getuid(), os.Getgid())
	check(t, err)
	files, err := tree.Group(folder)
	check(t, err)
	t.Cleanup(func() { files.Close() })
	w := &world{t: t, root: root, store: &memory{keys: map[string]bool{}, news: make(chan berth.Outgoing, 1000)}}
	registered := func(jid string) bool {
		return jid == "console:main" || jid == "console:family" || jid == "console:work"
	}
	if before != nil {
		before(w.path("messages"))
	}
	// The folder is the identity.
	w.box, err = New(w.store, registered, tree.ErrorDir(), zaptest.NewLogger(t)).Open(t.Context(), berth.Group{Folder: folder, JID: "console:" + folder}, files)
	check(t, err)
	t.Cleanup(w.box.Close)
	return w
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) path(dir string) string {
	return filepath.Join(w.root, "data/ipc", w.folder(), dir)
}

func (w *world) folder() string {
	entries, err := filepath.Glob(filepath.Join(w.root, "data/ipc/*/messages"))
	if err != nil || len(entries) != 1 {
		w.t.Fatal("not one group")
	}
	return filepath.Base(filepath.Dir(entries[0]))
}

// drop writes a file beside and renames it, as a container does.
func (w *world) drop(name, text string) {
	w.t.Helper()
	tmp := filepath.Join(w.path("messages"), name+".tmp")
	check(w.t, os.WriteFile(tmp, []byte(text), 0o600))
	check(w.t, os.Rename(tmp, filepath.Join(w.path("messages"), name)))
}

func (w *world) next() string {
	w.t.Helper()
	select {
	case o := <-w.store.news:
		return o.ChatJID + " " + o.Text
	case <-time.After(10 * time.Second):
		w.t.Fatal("nothing came")
		return ""
	}
}

func (w *world) nothing() {
	w.t.Helper()
	w.box.Drain(w.t.Context())
	select {
	case o := <-w.store.news:
		w.t.Errorf("got %+v", o)
	default:
	}
}

func (w *world) reply(id string) (ok bool, text string) {
	w.t.Helper()
	data, err := os.ReadFile(filepath.Join(w.path("responses"), id+".json"))
	check(w.t, err)
	var r struct {
		OK    bool
		Error string
	}
	check(w.t, json.Unmarshal(data, &r))
	return r.OK, r.Error
}

func message(chat, text string) string {
	return fmt.Sprintf(`{"type":"message","chatJid":%q,"text":%q,"requestId":"r1"}`, chat, text)
}

func TestFilesAreTakenAsTheyCome(t *testing.T) {
	w := open(t, "family", nil)
	w.drop("1.json", message("console:family", "hello"))
	if got := w.next(); got != "console:family hello" {
		t.Errorf("got %q", got)
	}
	w.drop("1.json", message("console:family", "the same name again"))
	if got := w.next(); got != "console:family the same name again" {
		t.Errorf("got %q", got)
	}
}

func TestFilesOfBeforeInOrder(t *testing.T) {
	w := open(t, "family", func(dir string) {
		for _, n := range []string{"10", "9", "1"} {
			check(t, os.WriteFile(filepath.Join(dir, n+".json"), []byte(message("console:family", n)), 0o600))
		}
	})
	for _, want := range []string{"1", "9", "10"} {
		if got := w.next(); got != "console:family "+want {
			t.Errorf("got %q, want %s", got, want)
		}
	}
}

// IA-17 to IA-21, IA-34: who may write to whom. Berth refuses unregistered
// chats to main too, as the design says.
func TestAuthorisation(t *testing.T) {
	for _, c := range []struct {
		as, to string
		ok     bool
	}{
		{"main", "console:family", true}, {"main", "console:work", true}, {"main", "console:main", true}, {"main", "unknown@g.us", false},
		{"family", "console:family", true}, {"family", "console:main", false}, {"family", "console:work", false}, {"family", "unknown@g.us", false},
		{"stranger", "console:stranger", false}, {"stranger", "console:main", false},
	} {
		t.Run(c.as+" to "+c.to, func(t *testing.T) {
			w := open(t, c.as, nil)
			w.drop("1.json", strings.Replace(message(c.to, "hi"), "{", `{"groupFolder":"main","isMain":true,`, 1))
			w.box.Drain(t.Context())
			if c.ok {
				w.next()
			} else {
				w.nothing()
			}
			// W27: the agent reads what became of its request.
			if ok, text := w.reply("r1"); ok != c.ok || ok == (text != "") {
				t.Errorf("reply %v %q", ok, text)
			}
		})
	}
}

func TestW26BadRequestsAreRefused(t *testing.T) {
	w := open(t, "family", nil)
	for name, text := range map[string]string{
		"empty":  `{"type":"message","chatJid":"console:family","text":"  "}`,
		"number": `{"type":"message","chatJid":"console:family","text":5}`,
		"big":    message("console:family", strings.Repeat("x", maxText+1)),
		"huge":   message("console:family", strings.Repeat("x", maxRequest)),
		"type":   `{"type":"x"}`,
		"broken": `{ not json`,
		"array":  `[]`,
		"id":     `{"type":"x","requestId":"../../../x"}`,
	} {
		w.drop(name+".json", text)
	}
	w.nothing()
	w.drop("z.json", message("console:family", "later files still count")) // IA-39
	if got := w.next(); !strings.HasSuffix(got, "later files still count") {
		t.Errorf("got %q", got)
	}
	left, err := os.ReadDir(w.path("messages"))
	check(t, err)
	if len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	// Those that cannot be read are kept with the reason.
	for _, name := range []string{"number", "huge", "broken", "array"} {
		found, err := filepath.Glob(filepath.Join(w.root, "data/ipc/errors/family/*-"+name+".json.reason"))
		check(t, err)
		if len(found) != 1 {
			t.Errorf("%s: %v", name, found)
		}
	}
}

// IA-41: other names are none of our business.
func TestOtherFilesAreUntouched(t *testing.T) {
	w := open(t, "family", nil)
	w.drop("x.txt", message("console:family", "no"))
	check(t, os.WriteFile(filepath.Join(w.path("messages"), "y.json.tmp"), nil, 0o600))
	w.nothing()
	left, err := os.ReadDir(w.path("messages"))
	check(t, err)
	if len(left) != 2 {
		t.Errorf("left: %v", left)
	}
}

// W21, W22: a pipe does not block, a link is not followed, and neither is left.
func TestW22PipesAndLinks(t *testing.T) {
	w := open(t, "family", nil)
	victim := filepath.Join(w.root, "victim.json")
	check(t, os.WriteFile(victim, []byte(message("console:family", "secret")), 0o600))
	check(t, syscall.Mkfifo(filepath.Join(w.path("messages"), "1.json"), 0o666))
	check(t, os.Symlink(victim, filepath.Join(w.path("messages"), "2.json")))
	check(t, os.Mkdir(filepath.Join(w.path("messages"), "3.json"), 0o755))
	w.nothing()
	if _, err := os.Stat(victim); err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(w.path("messages"))
	check(t, err)
	if len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// W25: while the store fails the file stays.
func TestW25StoreFailureKeepsTheFile(t *testing.T) {
	w := open(t, "family", nil)
	w.store.mu.Lock()
	w.store.fail = errors.New("disk full")
	w.store.mu.Unlock()
	w.drop("1.json", message("console:family", "patience"))
	w.nothing()
	w.store.mu.Lock()
	w.store.fail = nil
	w.store.mu.Unlock()
	w.box.Drain(t.Context())
	if got := w.next(); got != "console:family patience" {
		t.Errorf("got %q", got)
	}
}

func TestQuarantineIsBounded(t *testing.T) {
	w := open(t, "family", nil)
	for i := range maxQuarantined + 20 {
		w.drop(fmt.Sprint(i, ".json"), "broken")
	}
	w.nothing()
	found, err := filepath.Glob(filepath.Join(w.root, "data/ipc/errors/family/*.reason"))
	check(t, err)
	if len(found) != maxQuarantined {
		t.Errorf("%d files", len(found))
	}
}
