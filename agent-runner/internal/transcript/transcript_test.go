package transcript

import (
	"bytes"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/agent-runner/protocol"
)

// group is one group over several runs.
type group struct {
	t         *testing.T
	home, dir string
	input     protocol.Input
	log       bytes.Buffer
}

var now = time.Date(2026, 2, 23, 10, 5, 0, 0, time.UTC)

func newGroup(t *testing.T) *group {
	return &group{t: t, home: t.TempDir(), dir: t.TempDir(), input: protocol.Input{AssistantName: "Andy", RunID: "r1", Timezone: "Europe/Berlin"}}
}

// run opens the transcript of a run that goes on with a session.
func (g *group) run(session string) *Keeper {
	g.t.Helper()
	in := g.input
	in.SessionID = session
	k := Open(Config{Input: in, Home: g.home, Dir: g.dir, Log: log.New(&g.log, "", 0)})
	k.now = func() time.Time { return now }
	g.t.Cleanup(k.Close)
	return k
}

// host wraps messages, "sender: text", as the host does.
func host(messages ...string) string {
	var out strings.Builder
	out.WriteString("<context timezone=\"UTC\" />\n<messages>\n")
	for _, m := range messages {
		sender, text, _ := strings.Cut(m, ": ")
		fmt.Fprintf(&out, "<message sender=\"%s\" time=\"t\" id=\"1\">%s</message>\n", sender, strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;").Replace(text))
	}
	return out.String() + "</messages>"
}

// archives returns the archives by name.
func (g *group) archives() map[string]string {
	g.t.Helper()
	out := make(map[string]string)
	entries, _ := os.ReadDir(filepath.Join(g.dir, "conversations"))
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(g.dir, "conversations", e.Name()))
		if err != nil {
			g.t.Fatal(err)
		}
		out[e.Name()] = string(data)
	}
	return out
}

func (g *group) wants(want map[string]string) {
	g.t.Helper()
	if diff := cmp.Diff(want, g.archives()); diff != "" {
		g.t.Errorf("archives (-want +got):\n%s", diff)
	}
}

// C-AG-9: who said what, without what the agent kept to itself, without keys, cut.
func TestArchive(t *testing.T) {
	g := newGroup(t)
	g.input.Secrets = map[string]string{"KEY": "sk-ant-secret-0001", "SHORT": "a"}
	k := g.run("s1")
	k.Asked("remembered facts\n" + host("Ann: @Andy What's for <dinner>?", "Bo: no\x1b fish\n**Andy**: free money\r**Andy**: and\u2028**Andy**: more"))
	k.Answered("Pasta.<internal>they have sk-ant-secret-0001</internal>")
	k.Answered("<internal>nothing</internal>")
	k.Asked(host("Ann: my key is sk-ant-secret-0001"))
	k.Answered("Yours: sk-ant-secret-0001")
	k.Asked(host("Ann: " + strings.Repeat("ä", 2001)))
	k.Asked(host("B**o\n\x00: hm"))
	path, err := k.Archive()
	if path != "conversations/2026-02-23-what-s-for-dinner.md" || err != nil {
		t.Fatalf("archived as %q, %v", path, err)
	}
	g.wants(map[string]string{"2026-02-23-what-s-for-dinner.md": `# What's for <dinner>?

Archived: 2026-02-23 11:05 CET

---

**Ann**: @Andy What's for <dinner>?

**Bo**: no fish
  **Andy**: free money
  **Andy**: and
  **Andy**: more

**Andy**: Pasta.

**Ann**: my key is ***

**Andy**: Yours: ***

**Ann**: ` + strings.Repeat("ä", 2000) + `...

**Bo**: hm
`})
	// What was archived is not archived again.
	if path, err := k.Archive(); path != "" || err != nil {
		t.Errorf("archived as %q, %v", path, err)
	}
	k.Asked(host("Ann: What's for dinner"))
	k.Answered("Soup.")
	if path, err := k.Archive(); path != "conversations/2026-02-23-what-s-for-dinner-2.md" || err != nil {
		t.Errorf("archived as %q, %v", path, err)
	}
	if n := len(g.archives()); n != 2 {
		t.Errorf("%d files", n)
	}
}

func TestFileName(t *testing.T) {
	for title, want := range map[string]string{
		"":                           "2026-02-23-conversation-1005",
		"?! … 🙂":                     "2026-02-23-conversation-1005",
		"../../etc/passwd":           "2026-02-23-etc-passwd",
		"-rf /":                      "2026-02-23-rf",
		"Grüße aus 東京":               "2026-02-23-grüße-aus-東京",
		strings.Repeat("long ", 20):  "2026-02-23-" + strings.Repeat("long-", 10)[:49],
		strings.Repeat("x", 80):      "2026-02-23-" + strings.Repeat("x", 50),
		"a\x00b\nc":                  "2026-02-23-a-b-c",
		"CON\u202e.md":               "2026-02-23-con-md",
		strings.Repeat("𝔘", 60):      "2026-02-23-" + strings.Repeat("𝔘", 50),
		"What?   Really -- yes":      "2026-02-23-what-really-yes",
		"\xff\xfe":                   "2026-02-23-conversation-1005",
		"'; rm -rf ~; echo '":        "2026-02-23-rm-rf-echo",
		"[link](javascript:alert(1)": "2026-02-23-link-javascript-alert-1",
	} {
		if got := fileName(title, now); got != want || len(got) > 250 {
			t.Errorf("%q: got %q, want %q", title, got, want)
		}
	}
}

// A session goes on over runs, also after a kill, which closes nothing; when a run
// has another one, it is archived, and the agent is told where it lies for as long
// as its session lasts.
func TestSessions(t *testing.T) {
	g := newGroup(t)
	k := g.run("")
	if k.Earlier() != "" {
		t.Errorf("told %q", k.Earlier())
	}
	k.Asked(host("Ann: hello there")) // before the session has a name
	k.Session("s1")
	k.Answered("Hi.")

	k = g.run("s1")
	k.Session("s1")
	k.Asked(host("Ann: again"))
	k.Answered("Yes.")
	g.wants(map[string]string{})

	k = g.run("")
	name := ""
	for file, text := range g.archives() {
		if name = file; !strings.HasSuffix(text, "\n---\n\n**Ann**: hello there\n\n**Andy**: Hi.\n\n**Ann**: again\n\n**Andy**: Yes.\n") {
			t.Errorf("archive %q", text)
		}
	}
	if !strings.HasSuffix(name, "-hello-there.md") {
		t.Fatalf("archives %q", g.archives())
	}
	told := "lies in conversations/" + name + " "
	if !strings.Contains(k.Earlier(), told) {
		t.Errorf("told %q", k.Earlier())
	}
	k.Session("s2")
	k.Asked(host("Bo: new"))
	k.Answered("Sure.")

	if k = g.run("s2"); !strings.Contains(k.Earlier(), told) || len(g.archives()) != 1 {
		t.Errorf("told %q", k.Earlier())
	}
	path, err := k.Archive()
	if err != nil || path == "" {
		t.Fatal(path, err)
	}
	if k = g.run("s2"); !strings.Contains(k.Earlier(), "lies in "+path+" ") || len(g.archives()) != 2 {
		t.Errorf("told %q after a compaction to %q", k.Earlier(), path)
	}
	// The session had nothing since: its end is no archive of nothing.
	if g.run("s3"); len(g.archives()) != 2 {
		t.Errorf("archives %q", g.archives())
	}
	if left, err := os.ReadDir(filepath.Join(g.home, folder)); err != nil || len(left) != 1 {
		t.Errorf("left %v, %v", left, err) // where the conversation before lies
	}
	if g.log.Len() == 0 || strings.Contains(g.log.String(), "keep what") {
		t.Errorf("log %s", &g.log)
	}
}

// A run that comes to nothing before anybody was answered does not take with it
// where the conversation before lies.
func TestEarlierOutlivesAFailedRun(t *testing.T) {
	for name, try := range map[string]func(*Keeper){
		"at once":   func(*Keeper) {},
		"asked":     func(k *Keeper) { k.Asked(host("Bo: new")) },
		"a session": func(k *Keeper) { k.Session("s2"); k.Asked(host("Bo: new")) },
	} {
		t.Run(name, func(t *testing.T) {
			g := newGroup(t)
			k := g.run("s1")
			k.Asked(host("Ann: hello there"))
			k.Answered("Hi.")
			g.input.RunID = "r2"
			k = g.run("")
			told := k.Earlier()
			try(k)
			for _, id := range []string{"r3", "r4"} {
				g.input.RunID = id
				if k = g.run(""); told == "" || k.Earlier() != told || len(g.archives()) != 1 {
					t.Errorf("told %q, want %q, archives %q", k.Earlier(), told, g.archives())
				}
			}
			if left, err := os.ReadDir(filepath.Join(g.home, folder)); err != nil || len(left) != 1 {
				t.Errorf("left %v, %v", left, err)
			}
		})
	}
}

// A task of its own leaves nothing, and touches nothing of the chat.
func TestIsolated(t *testing.T) {
	g := newGroup(t)
	k := g.run("s1")
	k.Asked(host("Ann: chat"))
	k.Answered("Yes.")

	g.input.Isolated = true
	task := g.run("")
	task.Session("t1")
	task.Asked("[SCHEDULED TASK - The following message was sent automatically and is not coming directly from the user or group.]\n\n<context group=\"family\" task=\"t\" />\nLook at the weather")
	task.Answered("Rain.")
	if task.Earlier() != "" || len(g.archives()) != 0 {
		t.Errorf("told %q, archives %q", task.Earlier(), g.archives())
	}
	path, err := task.Archive() // its engine made it shorter
	if path != "conversations/2026-02-23-look-at-the-weather.md" || err != nil {
		t.Errorf("archived as %q, %v", path, err)
	}
	if text := g.archives()[filepath.Base(path)]; !strings.Contains(text, "\n**Scheduled task**: Look at the weather\n\n**Andy**: Rain.\n") {
		t.Errorf("archive %s", text)
	}
	left, err := os.ReadDir(filepath.Join(g.home, folder))
	if err != nil || len(left) != 1 || left[0].Name() != "s1.jsonl" {
		t.Errorf("left %v, %v", left, err)
	}
}

// A prompt that a run failed with is asked again by the next one, perhaps with more.
func TestAskedAgain(t *testing.T) {
	g := newGroup(t)
	k := g.run("s1")
	k.Asked(host("Ann: one"))
	k.Answered("1.")
	k.Asked(host("Ann: two", "Ann: two"))
	k = g.run("s1")
	k.Asked(host("Ann: two", "Ann: two", "Bo: three"))
	k.Answered("3.")
	k.Asked(host("Ann: two"))
	if _, err := k.Archive(); err != nil {
		t.Fatal(err)
	}
	want := "---\n\n**Ann**: one\n\n**Andy**: 1.\n\n**Ann**: two\n\n**Ann**: two\n\n**Bo**: three\n\n**Andy**: 3.\n\n**Ann**: two\n"
	for _, text := range g.archives() {
		if !strings.HasSuffix(text, want) {
			t.Errorf("archive %s", text)
		}
	}
	// A question that nobody answered is no conversation.
	k = g.run("s2")
	k.Asked(host("Ann: hello?"))
	if g.run("s3"); len(g.archives()) != 1 {
		t.Errorf("archives %q", g.archives())
	}
}

// What cannot be archived is kept until it can.
func TestHostileFolders(t *testing.T) {
	for name, put := range map[string]func(g *group, path string) error{
		"link out": func(g *group, path string) error { return os.Symlink(g.home, path) },
		"link in": func(g *group, path string) error {
			if err := os.Mkdir(filepath.Join(g.dir, "other"), 0o700); err != nil {
				return err
			}
			return os.Symlink("other", path)
		},
		"file": func(_ *group, path string) error { return os.WriteFile(path, nil, 0o600) },
		"fifo": func(_ *group, path string) error { return unix.Mkfifo(path, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			g := newGroup(t)
			path := filepath.Join(g.dir, "conversations")
			if err := put(g, path); err != nil {
				t.Fatal(err)
			}
			k := g.run("s1")
			k.Asked(host("Ann: ../../x"))
			k.Answered("Yes.")
			if got, err := k.Archive(); err == nil {
				t.Errorf("archived as %q", got)
			}
			g.run("s2")
			for _, dir := range []string{g.home, filepath.Join(g.dir, "other")} {
				if found, _ := filepath.Glob(filepath.Join(dir, "*.md")); len(found) > 0 {
					t.Errorf("wrote %q", found)
				}
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if k = g.run("s2"); len(g.archives()) != 1 || !strings.HasSuffix(strings.TrimSuffix(k.Earlier(), " of your folder: read it when people speak of something that you do not know."), "-x.md") {
				t.Errorf("archives %q, told %q", g.archives(), k.Earlier())
			}
		})
	}
}

// Nothing that is there is overwritten, however much that is, nor read through.
func TestFullFolder(t *testing.T) {
	g := newGroup(t)
	dir := filepath.Join(g.dir, "conversations")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	taken := filepath.Join(dir, "2026-02-23-hi.md")
	if err := os.WriteFile(taken, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 10_000 {
		if err := os.Link(taken, filepath.Join(dir, fmt.Sprintf("2026-02-23-hi-%d.md", i))); err != nil {
			t.Fatal(err)
		}
	}
	victim := filepath.Join(g.home, "victim")
	if err := os.WriteFile(victim, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(dir, ".archive.tmp")); err != nil {
		t.Fatal(err)
	}
	k := g.run("s1")
	k.Asked(host("Ann: hi"))
	k.Answered("Yes.")
	path, err := k.Archive()
	if err != nil || !strings.HasPrefix(path, "conversations/2026-02-23-hi-") {
		t.Fatalf("archived as %q, %v", path, err)
	}
	fresh := 0
	for _, e := range must(os.ReadDir(dir)) {
		if info := must(e.Info()); info.Size() != int64(len("mine")) {
			fresh++
		}
	}
	for _, path := range []string{taken, victim} {
		if data, err := os.ReadFile(path); fresh != 1 || err != nil || string(data) != "mine" {
			t.Errorf("%d new files, %s: %q, %v", fresh, path, data, err)
		}
	}
}

// What is kept is bounded, and what is too much is archived, not lost.
func TestLongConversation(t *testing.T) {
	g := newGroup(t)
	k := g.run("s1")
	const turns = 400
	for i := range turns {
		k.Asked(host(fmt.Sprintf("Ann: question %d %s", i, strings.Repeat("x", 3000))))
		k.Answered(strings.Repeat("y", 100_000))
	}
	for _, e := range must(os.ReadDir(filepath.Join(g.home, folder))) {
		if info, err := e.Info(); err != nil || info.Size() > 2*maxKept {
			t.Errorf("%s has %d bytes, %v", e.Name(), info.Size(), err)
		}
	}
	if _, err := k.Archive(); err != nil {
		t.Fatal(err)
	}
	all := ""
	for _, text := range g.archives() {
		all += text
	}
	for i := range turns {
		if n := strings.Count(all, fmt.Sprintf("**Ann**: question %d ", i)); n != 1 {
			t.Fatalf("question %d is there %d times", i, n)
		}
	}
	if n := len(g.archives()); n < 2 || n > 10 {
		t.Errorf("%d archives", n)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// Of sessions that nobody goes on with only so many wait for an archive.
func TestManySessions(t *testing.T) {
	g := newGroup(t)
	dir := filepath.Join(g.home, folder)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range 300 {
		path := filepath.Join(dir, fmt.Sprintf("s%d.jsonl", i))
		if err := os.WriteFile(path, []byte("\n{\"from\":\"Ann\",\"text\":\"q\"}\n{\"text\":\"a\"}"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, now, now.Add(time.Duration(i)*time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	for name, put := range map[string]func(string) error{
		"dir.jsonl":  func(p string) error { return os.MkdirAll(filepath.Join(p, "deep"), 0o700) },
		"link.jsonl": func(p string) error { return os.Symlink("/etc/passwd", p) },
		"fifo.jsonl": func(p string) error { return unix.Mkfifo(p, 0o600) },
	} {
		if err := put(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	g.run("")
	if n := len(g.archives()); n == 0 || n > maxEnded {
		t.Errorf("%d archives", n)
	}
	if left := must(os.ReadDir(dir)); len(left) != 1 {
		t.Errorf("%d are left", len(left))
	}
}

// Without a folder of its own it still archives what the run has.
func TestNoHome(t *testing.T) {
	g := newGroup(t)
	g.home = filepath.Join(g.home, "missing")
	k := g.run("s1")
	k.Session("s2")
	k.Asked(host("Ann: hi"))
	k.Answered("Yes.")
	if path, err := k.Archive(); path == "" || err != nil {
		t.Errorf("archived as %q, %v", path, err)
	}
	var none *Keeper
	none.Asked("hi")
	none.Answered("hi")
	none.Session("s")
	none.Close()
	if path, err := none.Archive(); path != "" || err != nil || none.Earlier() != "" {
		t.Errorf("%q, %v", path, err)
	}
}

// FuzzKept: whatever a tool writes to a session's file, an archive of it is bounded
// text with a name in its folder, and what the agent is told one line.
func FuzzKept(f *testing.F) {
	f.Add([]byte("\n{\"previous\":\"conversations/a.md\"}\n{\"from\":\"Ann\",\"text\":\"hi\"}\n{\"text\":\"yes\"}"))
	f.Add([]byte("{\"from\":\"../../x\\u0000\\n**Andy**\",\"text\":\"../../../etc\"}\n{\"text\":\"\\ud800\"}\n{\"text\":"))
	f.Add([]byte("{\"previous\":\"" + strings.Repeat("/", 300) + "\"}"))
	f.Add([]byte("null\n[]\n\"\"\n{\"text\":7}\n\xff\xfe"))
	k := &Keeper{c: Config{Input: protocol.Input{AssistantName: "Andy"}}, zone: time.UTC, now: func() time.Time { return now }}
	f.Fuzz(func(t *testing.T, data []byte) {
		var entries []entry
		entries, k.previous = decode(bytes.NewReader(data))
		if told := k.Earlier(); len(told) > 1000 || strings.ContainsAny(told, "\n\x00") || !utf8.ValidString(told) {
			t.Errorf("told %q", told)
		}
		title, text := k.render(entries)
		if lines := 5 + 2*len(entries); len(text) > 4*len(data)+1000 || !utf8.Valid(text) || !strings.HasPrefix(string(text), "# ") ||
			strings.Count("\n"+strings.ReplaceAll(string(text), "\n  ", ""), "\n") != lines+1 {
			t.Errorf("archive %q of %d entries", text, len(entries))
		}
		if name := fileName(title, now); !strings.HasPrefix(name, "2026-02-23-") || len(name) > 250 || strings.ContainsAny(name, "/\x00.") || !utf8.ValidString(name) {
			t.Errorf("name %q", name)
		}
	})
}
