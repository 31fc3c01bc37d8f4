package ipc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/time/rate"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/workspace"
)

var _ turn.Requests = (*Service)(nil)

// memory is a store that tells of each text, and can fail. It has no tasks.
type memory struct {
	Store
	mu     sync.Mutex
	keys   map[string]bool
	fail   error
	news   chan berth.Outgoing
	audits []berth.Audit
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

func (m *memory) AddAudit(_ context.Context, a berth.Audit) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail == nil {
		m.audits = append(m.audits, a)
	}
	return m.fail
}

func (m *memory) refusals() []berth.Audit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.audits)
}

func (m *memory) setFail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = err
}

func (m *memory) Tasks(context.Context, string) ([]berth.Task, error) { return nil, nil }
func (m *memory) Chats(context.Context, int) ([]berth.Chat, error)    { return nil, nil }
func (m *memory) Outgoing(context.Context, string) (o berth.Outgoing, ok bool, err error) {
	return o, false, nil
}
func (m *memory) TasksNamed(context.Context, string) ([]berth.Task, error) { return nil, nil }
func (m *memory) Task(_ context.Context, _, id string) (t berth.Task, err error) {
	return t, berth.Errorf(berth.NotFound, "there is no task %s", id)
}
func (m *memory) CancelTask(ctx context.Context, folder, id, _ string) (berth.Task, error) {
	return m.Task(ctx, folder, id)
}
func (m *memory) TaskChangedBy(context.Context, string) (t berth.Task, ok bool, err error) {
	return t, false, nil
}

// registry is the groups that are registered. add is where they are kept.
type registry struct {
	mu     sync.Mutex
	groups []berth.Group
	add    func(context.Context, berth.Group) error
}

func registered(folders ...string) *registry {
	r := &registry{add: func(context.Context, berth.Group) error { return nil }}
	for _, folder := range folders {
		r.groups = append(r.groups, group(folder))
	}
	return r
}

func group(folder string) berth.Group {
	return berth.Group{Folder: folder, JID: "console:" + folder, Name: folder}
}

func (r *registry) Groups() []berth.Group {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.groups)
}

func (r *registry) find(match func(berth.Group) bool) (berth.Group, bool) {
	groups := r.Groups()
	if i := slices.IndexFunc(groups, match); i >= 0 {
		return groups[i], true
	}
	return berth.Group{}, false
}

func (r *registry) Group(folder string) (berth.Group, bool) {
	return r.find(func(g berth.Group) bool { return g.Folder == folder })
}

func (r *registry) Registered(jid string) bool {
	_, ok := r.find(func(g berth.Group) bool { return g.JID == jid })
	return ok
}

func (r *registry) AddGroup(ctx context.Context, g berth.Group) error {
	if err := r.add(ctx, g); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.groups = append(r.groups, g)
	return nil
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is one group's open folders.
type world struct {
	t     testing.TB
	dir   string // of its IPC
	root  string
	store *memory
	box   *inbox
}

// open opens the folders of a group and watches them.
func open(t *testing.T, folder string, before func(dir string)) *world {
	t.Helper()
	w := prepare(t, folder, zaptest.NewLogger(t))
	if before != nil {
		before(filepath.Join(w.dir, "messages"))
	}
	box, err := w.box.Service.Open(t.Context(), w.box.group, w.box.files)
	check(t, err)
	w.box = box.(*inbox)
	t.Cleanup(w.box.Close)
	return w
}

// prepare opens the folders of a group, and looks only when Drain is called.
func prepare(t testing.TB, folder string, log *zap.Logger) *world {
	t.Helper()
	root := t.TempDir()
	tree, err := workspace.NewTree(root, os.Getuid(), os.Getgid())
	check(t, err)
	files, err := tree.Group(folder)
	check(t, err)
	t.Cleanup(func() { files.Close() })
	w := &world{
		t: t, root: root, dir: filepath.Join(root, "data/ipc", folder),
		store: &memory{keys: map[string]bool{}, news: make(chan berth.Outgoing, 1000)},
	}
	s := New(Options{Store: w.store, Groups: registered("main", "family", "work"), Zone: time.UTC, ErrorDir: tree.ErrorDir(), Log: log})
	// The folder is the identity.
	w.box = s.inbox(t.Context(), group(folder), files)
	return w
}

// drop writes a file beside and renames it, as a container does.
func (w *world) drop(name, text string) { w.dropIn("messages", name, text) }

func (w *world) dropIn(dir, name, text string) {
	w.t.Helper()
	tmp := filepath.Join(w.dir, dir, name+".tmp")
	check(w.t, os.WriteFile(tmp, []byte(text), 0o600))
	check(w.t, os.Rename(tmp, filepath.Join(w.dir, dir, name)))
}

// next waits for a text.
func (w *world) next() string {
	w.t.Helper()
	select {
	case o := <-w.store.news:
		return o.ChatJID + " " + o.Text
	case <-time.After(20 * time.Second):
		w.t.Fatal("nothing came")
		return ""
	}
}

// now returns the texts that have come by now.
func (w *world) now() (out []string) {
	for {
		select {
		case o := <-w.store.news:
			out = append(out, o.Text)
		default:
			return out
		}
	}
}

func (w *world) nothing() {
	w.t.Helper()
	w.box.Drain(w.t.Context())
	if got := w.now(); len(got) > 0 {
		w.t.Errorf("got %q", got)
	}
}

type answer struct {
	OK     bool
	Error  string
	Result map[string]any
}

func (w *world) reply(id string) (a answer) {
	w.t.Helper()
	data, err := os.ReadFile(filepath.Join(w.dir, "responses", id+".json"))
	check(w.t, err)
	check(w.t, json.Unmarshal(data, &a))
	return a
}

// names returns what a folder holds.
func names(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	check(t, err)
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func message(chat, text string) string {
	return fmt.Sprintf(`{"type":"message","chatJid":%q,"text":%q,"requestId":"r1"}`, chat, text)
}

// W30: a file is taken when it comes, not when somebody looks; from both
// folders.
func TestW30FilesAreTakenAsTheyCome(t *testing.T) {
	w := open(t, "family", nil)
	w.drop("1.json", message("console:family", "hello"))
	if got := w.next(); got != "console:family hello" {
		t.Errorf("got %q", got)
	}
	w.drop("1.json", message("console:family", "the same name again"))
	if got := w.next(); got != "console:family the same name again" {
		t.Errorf("got %q", got)
	}
	w.dropIn("tasks", "1.json", message("console:family", "the other folder"))
	if got := w.next(); got != "console:family the other folder" {
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

// W26: each text is one, and of a bounded size; what is not known is refused.
// W27: and each refusal is answered, recorded and logged.
func TestW26W27StrictSchemas(t *testing.T) {
	const big = 64<<10 + 1
	log, logged := observer.New(zap.WarnLevel)
	w := prepare(t, "family", zap.New(log))
	w.box.budget.warnings = rate.NewLimiter(1, 100)
	cases := []struct{ name, text, want string }{
		{"empty", `{"type":"message","chatJid":"console:family","text":"  "}`, "needs the field text"},
		{"missing", `{"type":"message","chatJid":"console:family"}`, "needs the field text"},
		{"null", `{"type":"message","chatJid":"console:family","text":null}`, "needs the field text"},
		{"number", `{"type":"message","chatJid":"console:family","text":5}`, "has to be a text"},
		{"list", `{"type":"message","chatJid":["console:family"],"text":"x"}`, "has to be a text"},
		{"object", `{"type":"message","chatJid":"console:family","text":{"a":1}}`, "has to be a text"},
		{"sender", `{"type":"message","chatJid":"console:family","text":"x","sender":false}`, "has to be a text"},
		{"big", fmt.Sprintf(`{"type":"message","chatJid":"console:family","text":%q}`, strings.Repeat("x", big)), "may have 65536"},
		{"zero", `{"type":"message","chatJid":"console:family","text":"a\u0000b"}`, "zero byte"},
		{"unknown", `{"type":"message","chatJid":"console:family","text":"x","attachments":[]}`, `no field "attachments"`},
		{"case", `{"type":"message","chatJid":"console:family","text":"x","Text":"y"}`, `no field "Text"`},
		{"verb", `{"type":"message ","chatJid":"console:family","text":"x"}`, "no request of the type"},
		{"number-verb", `{"type":7}`, "type has to be a text"},
		{"no-verb", `{}`, "no request of the type"},
	}
	for _, c := range cases {
		text := `{"requestId":"` + c.name + `"}`
		if body, _ := strings.CutPrefix(c.text, "{"); body != "}" {
			text = `{"requestId":"` + c.name + `",` + body
		}
		w.drop(c.name+".json", text)
		w.nothing()
		if got := w.reply(c.name); got.OK || !strings.Contains(got.Error, c.want) {
			t.Errorf("%s: answered %+v, want %q", c.name, got, c.want)
		}
		audits := w.store.refusals()
		if last := audits[len(audits)-1]; !strings.Contains(last.Reason, c.want) || last.Folder != "family" || !strings.HasPrefix(last.What, "ipc.") || last.At.IsZero() {
			t.Errorf("%s: recorded %+v", c.name, last)
		}
	}
	if n := len(w.store.refusals()); n != len(cases) {
		t.Errorf("%d refusals are recorded, want %d", n, len(cases))
	}
	if n := logged.FilterMessage("request refused").Len(); n != len(cases) {
		t.Errorf("%d refusals are logged, want %d", n, len(cases))
	}
	if kept := names(t, filepath.Join(w.root, "data/ipc/errors/family")); len(kept) > 0 {
		t.Errorf("what was answered is kept as well: %v", kept)
	}
	// An id that cannot be a file name is no way out of the folder.
	for _, id := range []string{`"../../../x"`, `"a/b"`, `7`, `"` + strings.Repeat("x", 65) + `"`} {
		w.drop("id.json", `{"type":"message","chatJid":"console:family","text":"x","requestId":`+id+`}`)
		w.nothing()
	}
	if got := names(t, filepath.Join(w.dir, "responses")); len(got) != len(cases) {
		t.Errorf("answers: %v", got)
	}
	if n := len(w.store.refusals()); n != len(cases)+4 {
		t.Errorf("%d refusals are recorded", n)
	}
	// What the ancestors' containers send besides is not even looked at.
	w.drop("ok.json", `{"type":"message","chatJid":"console:family","text":"x","sender":"Researcher","groupFolder":5,"isMain":"true","createdBy":[],"timestamp":{}}`)
	w.box.Drain(t.Context())
	if got := w.now(); len(got) != 1 {
		t.Errorf("got %q", got)
	}
}

// IA-39, W31: what cannot be read is kept with the reason, and the others are
// handled.
func TestIA39BrokenFilesAreKept(t *testing.T) {
	w := prepare(t, "family", zaptest.NewLogger(t))
	for name, text := range map[string]string{
		"broken": `{ not json`, "array": `[]`, "null": `null`, "nothing": ``, "two": `{} {}`, "deep": strings.Repeat(`{"a":`, 20_000),
		"huge": message("console:family", strings.Repeat("x", maxRequest)),
	} {
		w.drop(name+".json", text)
	}
	w.drop("z.json", message("console:family", "later files still count"))
	w.box.Drain(t.Context())
	if got := w.now(); len(got) != 1 || got[0] != "later files still count" {
		t.Errorf("got %q", got)
	}
	if left := names(t, filepath.Join(w.dir, "messages")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if left := names(t, filepath.Join(w.dir, "taken")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	dir := filepath.Join(w.root, "data/ipc/errors/family")
	for _, name := range []string{"broken", "array", "null", "nothing", "two", "deep", "huge"} {
		found, err := filepath.Glob(filepath.Join(dir, "*-"+name+".json.reason"))
		if check(t, err); len(found) != 1 {
			t.Errorf("%s: %v", name, found)
		}
	}
	if n := len(w.store.refusals()); n != 7 {
		t.Errorf("%d refusals are recorded", n)
	}
	huge, err := filepath.Glob(filepath.Join(dir, "*-huge.json"))
	check(t, err)
	if fi, err := os.Stat(huge[0]); err != nil || fi.Size() != maxKept {
		t.Errorf("of the huge one %v is kept, %v", fi, err)
	}
}

func TestQuarantineIsBounded(t *testing.T) {
	w := prepare(t, "family", zap.NewNop())
	w.box.budget.requests = rate.NewLimiter(1, 1000)
	for i := range maxQuarantined + 20 {
		w.drop(fmt.Sprint(i, ".json"), "broken")
		w.nothing()
	}
	if n := len(names(t, filepath.Join(w.root, "data/ipc/errors/family"))); n != 2*maxQuarantined {
		t.Errorf("%d files", n)
	}
	if left := names(t, filepath.Join(w.dir, "taken")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// IA-41: other names are none of our business.
func TestIA41OtherFilesAreUntouched(t *testing.T) {
	w := prepare(t, "family", zaptest.NewLogger(t))
	w.drop("x.txt", message("console:family", "no"))
	check(t, os.WriteFile(filepath.Join(w.dir, "messages", "y.json.tmp"), []byte(message("console:family", "no")), 0o600))
	w.nothing()
	if left := names(t, filepath.Join(w.dir, "messages")); len(left) != 2 {
		t.Errorf("left: %v", left)
	}
}

// W21, W22: a pipe does not block, a link is not followed, a file with a second
// name is not read; none is left, and the operator is told of each.
func TestW22PipesAndLinks(t *testing.T) {
	w := prepare(t, "family", zaptest.NewLogger(t))
	dir := filepath.Join(w.dir, "messages")
	victim := filepath.Join(w.root, "victim.json")
	check(t, os.WriteFile(victim, []byte(message("console:family", "secret")), 0o600))
	check(t, syscall.Mkfifo(filepath.Join(dir, "1.json"), 0o666))
	check(t, os.Symlink(victim, filepath.Join(dir, "2.json")))
	check(t, os.Mkdir(filepath.Join(dir, "3.json"), 0o755))
	check(t, os.Link(victim, filepath.Join(dir, "4.json")))
	check(t, os.MkdirAll(filepath.Join(dir, "5.json", "full"), 0o755))
	for range 3 {
		w.nothing()
	}
	if got, err := os.ReadFile(victim); err != nil || !strings.Contains(string(got), "secret") {
		t.Errorf("%q, %v", got, err)
	}
	if left := names(t, dir); !slices.Equal(left, []string{"5.json"}) {
		t.Errorf("left: %v", left)
	}
	var targets []string
	for _, a := range w.store.refusals() {
		targets = append(targets, a.Target)
	}
	if want := []string{"messages/1.json", "messages/2.json", "messages/3.json", "messages/4.json", "messages/5.json"}; !slices.Equal(targets, want) {
		t.Errorf("recorded: %v", targets)
	}
}

// W25: while the store fails the file stays, and those after it, in order; so
// does one whose refusal cannot be recorded.
func TestW25StoreFailureKeepsTheFiles(t *testing.T) {
	w := prepare(t, "family", zaptest.NewLogger(t))
	for _, err := range []error{errors.New("disk full"), berth.Errorf(berth.Unavailable, "disk full")} {
		w.store.setFail(err)
		w.drop("0.json", `{"type":"x"}`)
		w.drop("1.json", message("console:family", "patience"))
		w.nothing()
		w.drop("2.json", message("console:family", "more patience"))
		w.nothing()
		w.store.setFail(nil)
		w.box.Drain(t.Context())
		if got := w.now(); !slices.Equal(got, []string{"patience", "more patience"}) {
			t.Errorf("got %q", got)
		}
	}
	if n := len(w.store.refusals()); n != 2 {
		t.Errorf("%d refusals are recorded", n)
	}
}

// W25: what an earlier daemon took and did not carry out comes first.
func TestLeftOverFromBefore(t *testing.T) {
	w := prepare(t, "family", zaptest.NewLogger(t))
	w.store.setFail(errors.New("disk full"))
	w.drop("1.json", message("console:family", "first"))
	w.nothing()
	w.store.setFail(nil)
	again := w.box.Service.inbox(t.Context(), w.box.group, w.box.files)
	w.drop("0.json", message("console:family", "second"))
	again.Drain(t.Context())
	if got := w.now(); !slices.Equal(got, []string{"first", "second"}) {
		t.Errorf("got %q", got)
	}
}

// W26: what is over the budget waits where it lies, in order, and is told once.
func TestW26Budget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, logged := observer.New(zap.WarnLevel)
		w := prepare(t, "family", zap.New(log))
		var want []string
		for i := range requestBurst + 40 {
			w.drop(fmt.Sprintf("%03d.json", i), message("console:family", fmt.Sprint(i)))
			want = append(want, fmt.Sprint(i))
		}
		w.box.Drain(t.Context())
		got := w.now()
		if len(got) != requestBurst {
			t.Errorf("%d at once", len(got))
		}
		if n := len(names(t, filepath.Join(w.dir, "messages"))); n != 40 {
			t.Errorf("%d lie there", n)
		}
		for second := range 3 {
			time.Sleep(time.Second)
			w.box.Drain(t.Context())
			w.box.Drain(t.Context())
			more := w.now()
			if got = append(got, more...); len(more) != requestRate {
				t.Errorf("in second %d: %d", second, len(more))
			}
		}
		if n := logged.FilterMessageSnippet("more requests than").Len(); n != 1 {
			t.Errorf("told %d times", n)
		}
		// The run ends: the rest is carried out as fast as the budget allows.
		start := time.Now()
		w.box.Close()
		got = append(got, w.now()...)
		if !slices.Equal(got, want) {
			t.Errorf("got %v", got)
		}
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("took %v", took)
		}
		// Another run of the same group has no fresh budget.
		again := w.box.Service.inbox(t.Context(), w.box.group, w.box.files)
		w.drop("1.json", message("console:family", "too soon"))
		if again.Drain(t.Context()); len(w.now()) != 0 {
			t.Error("a new run has a budget of its own")
		}
		time.Sleep(time.Second)
		if again.Drain(t.Context()); len(w.now()) != 1 {
			t.Error("the request is lost")
		}
	})
}

// A run does not wait for ever for requests over the budget, and not at all
// when the daemon shuts down. What is left is the next run's.
func TestCloseIsBounded(t *testing.T) {
	for _, down := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := prepare(t, "family", zap.NewNop())
			ctx, shutdown := context.WithCancel(t.Context())
			w.box = w.box.Service.inbox(ctx, w.box.group, w.box.files)
			for i := range 300 {
				w.drop(fmt.Sprintf("%03d.json", i), message("console:family", fmt.Sprint(i)))
			}
			want := closeGrace
			if down {
				shutdown()
				want = 0
			}
			start := time.Now()
			w.box.Close()
			shutdown()
			if took := time.Since(start); took < want || took > want+time.Second {
				t.Errorf("took %v, want %v", took, want)
			}
			if n := len(w.now()) + len(names(t, filepath.Join(w.dir, "messages"))) + len(names(t, filepath.Join(w.dir, "taken"))); n != 300 {
				t.Errorf("%d of 300", n)
			}
		})
	}
}

// One look reads so many bytes; what is taken and not read comes next.
func TestBytesOfOneLook(t *testing.T) {
	w := prepare(t, "family", zap.NewNop())
	const n = 10
	for i := range n {
		// Escapes make a text of 64 KiB a file of 384.
		text := strings.Repeat(`\u0061`, 64<<10)
		w.drop(fmt.Sprint(i, ".json"), `{"type":"message","chatJid":"console:work","text":"`+text+`","sender":"`+text+`"}`)
	}
	var looks []int
	for range 4 {
		before := len(w.store.refusals())
		w.box.Drain(t.Context())
		looks = append(looks, len(w.store.refusals())-before)
	}
	if !slices.Equal(looks, []int{6, 4, 0, 0}) {
		t.Errorf("in each look: %v", looks)
	}
}

// A container that makes events faster than they are worth is looked at once a
// second instead, at no cost to others.
func TestTooManyEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := prepare(t, "family", zap.NewNop())
		events := make(chan fsnotify.Event)
		w.box.events = events
		w.box.wg.Go(w.box.watch)
		start := time.Now()
		for range eventBurst + 2*eventRate {
			events <- fsnotify.Event{Op: fsnotify.Create, Name: "x.tmp"}
		}
		if took := time.Since(start); took < 2*eventPause-time.Second/2 {
			t.Errorf("took %v", took)
		}
		w.drop("1.json", message("console:family", "still heard"))
		time.Sleep(2 * eventPause)
		events <- fsnotify.Event{Op: fsnotify.Create, Name: "1.json"}
		synctest.Wait()
		if got := w.now(); len(got) != 1 {
			t.Errorf("got %q", got)
		}
		w.box.Close()
	})
}

// W22: the group that misbehaves is the only one to notice.
func TestW22OneGroupDoesNotSlowAnother(t *testing.T) {
	w := prepare(t, "work", zap.NewNop())
	tree, err := workspace.NewTree(w.root, os.Getuid(), os.Getgid())
	check(t, err)
	files, err := tree.Group("family")
	check(t, err)
	defer files.Close()
	w.box.mu.Lock() // work is in the middle of something that takes for ever
	defer w.box.mu.Unlock()
	family, err := w.box.Service.Open(t.Context(), group("family"), files)
	check(t, err)
	defer family.Close()
	other := &world{t: t, dir: filepath.Join(w.root, "data/ipc/family"), store: w.store}
	other.drop("1.json", message("console:family", "hello"))
	if got := other.next(); got != "console:family hello" {
		t.Errorf("got %q", got)
	}
}

// Warnings about one group are rare, and say how many there were not.
func TestWarningsAreRare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, logged := observer.New(zap.WarnLevel)
		w := prepare(t, "family", zap.New(log))
		for i := range 50 {
			w.drop(fmt.Sprint(i, ".json"), `{"type":"x"}`)
		}
		w.box.Drain(t.Context())
		if n := logged.Len(); n != warnBurst {
			t.Errorf("%d warnings", n)
		}
		time.Sleep(time.Minute)
		w.drop("1.json", `{"type":"x"}`)
		w.box.Drain(t.Context())
		entries := logged.All()
		if got := entries[len(entries)-1].ContextMap()["not logged before"]; got != int64(50-warnBurst) {
			t.Errorf("not logged: %v", got)
		}
		if n := len(w.store.refusals()); n != 51 {
			t.Errorf("%d refusals are recorded", n)
		}
	})
}

// Answers do not fill the disk.
func TestAnswersAreBounded(t *testing.T) {
	w := prepare(t, "family", zap.NewNop())
	for i := range maxAnswers + 5 {
		w.box.answer(fmt.Sprint(i), nil, nil)
		w.box.answer("again", nil, nil)
	}
	got := names(t, filepath.Join(w.dir, "responses"))
	if len(got) != maxAnswers || !slices.Contains(got, "again.json") || slices.Contains(got, "0.json") {
		t.Errorf("%d answers", len(got))
	}
	for i := range 5 {
		w.box.answer(fmt.Sprint("big", i), strings.Repeat("x", maxAnswerBytes/3), nil)
	}
	if got := names(t, filepath.Join(w.dir, "responses")); len(got) != 2 || w.box.size > maxAnswerBytes {
		t.Errorf("%d answers, %d bytes", len(got), w.box.size)
	}
}

// Without somebody who runs tasks, a task is not taken: it would never run.
func TestTasksAreRefusedWithoutAScheduler(t *testing.T) {
	w := prepare(t, "main", zaptest.NewLogger(t))
	for _, verb := range []string{"schedule_task", "update_task", "pause_task", "resume_task", "cancel_task", "task_history", "list_tasks"} {
		w.dropIn("tasks", verb+".json", `{"type":"`+verb+`","requestId":"`+verb+`","taskId":"t1","prompt":"p","schedule_type":"cron","schedule_value":"* * * * *"}`)
		w.box.Drain(t.Context())
		if got := w.reply(verb); got.OK || got.Error != "tasks are not available in this version" {
			t.Errorf("%s: %+v", verb, got)
		}
	}
}

// What is no group any more may do nothing, though its container still runs.
func TestRemovedGroup(t *testing.T) {
	w := prepare(t, "family", zaptest.NewLogger(t))
	groups := w.box.Groups.(*registry)
	for _, now := range [][]berth.Group{nil, {{Folder: "family", JID: "console:another"}, {Folder: "work", JID: "console:family"}}} {
		groups.groups = now
		w.drop("1.json", message("console:family", "hi"))
		w.nothing()
		if got := w.reply("r1"); !strings.Contains(got.Error, "not registered") {
			t.Errorf("got %+v", got)
		}
		for _, verb := range []string{"list_groups", "refresh_groups"} {
			w.dropIn("tasks", "1.json", `{"type":"`+verb+`","requestId":"r1"}`)
			w.nothing()
			if got := w.reply("r1"); !strings.Contains(got.Error, "not registered") {
				t.Errorf("%s: got %+v", verb, got)
			}
		}
	}
}

func FuzzRequest(f *testing.F) {
	for _, seed := range []string{
		message("console:family", "hi"),
		`{"type":"message","chatJid":"console:main","text":"<internal>x</internal>","sender":"R","groupFolder":"main","timestamp":"2026"}`,
		`{"type":"schedule_task","prompt":"p","schedule_type":"cron","schedule_value":"0 9 * * *","context_mode":"group","targetJid":"console:main","createdBy":"main","timestamp":"","taskId":"task-1-a"}`,
		`{"type":"schedule_task","prompt":"p","schedule_type":"interval","schedule_value":60000}`,
		`{"type":"update_task","taskId":"t1","schedule_value":"1e9","requestId":"x"}`,
		`{"type":"pause_task","taskId":"../../x","isMain":true}`, `{"type":"list_tasks","requestId":"../x"}`,
		`{"type":"register_group","jid":"x@g.us","name":"X","folder":"../x","trigger":"@A","containerConfig":{"timeout":1e12}}`,
		`{"type":"list_groups","requestId":"ok"}`, `{"type":"refresh_groups"}`, `{ not json`, `[]`, `null`, `{"type":{"type":"message"}}`, "{\"type\":\"message\",\"text\":\"\xff\"}",
	} {
		f.Add([]byte(seed))
	}
	w := prepare(f, "family", zap.NewNop())
	w.store.news = make(chan berth.Outgoing, 1<<16)
	w.box.TasksChanged = func() { f.Error("a task was changed in a store that has none") }
	w.box.budget.requests = rate.NewLimiter(1e9, 1e6)
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > maxRequest {
			return
		}
		clear(w.store.keys)
		before := len(w.store.audits)
		check(t, os.WriteFile(filepath.Join(w.dir, "tasks", "x.json"), data, 0o600))
		w.box.Drain(context.Background())
		for _, dir := range []string{"taken", "tasks"} {
			if left := names(t, filepath.Join(w.dir, dir)); len(left) > 0 {
				t.Fatalf("%s holds %v", dir, left)
			}
		}
		// Whatever it says: this group writes to its own chat only, and what is
		// not carried out is recorded.
		sent := 0
		for len(w.store.news) > 0 {
			if o := <-w.store.news; o.ChatJID != "console:family" {
				t.Fatalf("sent %+v", o)
			}
			sent++
		}
		if refused := len(w.store.audits) - before; refused > 1 || refused == 1 && sent > 0 {
			t.Fatalf("%d texts, %d refusals", sent, refused)
		}
		for _, name := range names(t, filepath.Join(w.dir, "responses")) {
			answer, err := os.ReadFile(filepath.Join(w.dir, "responses", name))
			if check(t, err); !json.Valid(answer) {
				t.Fatalf("answered %q", answer)
			}
			check(t, os.Remove(filepath.Join(w.dir, "responses", name)))
		}
	})
}
