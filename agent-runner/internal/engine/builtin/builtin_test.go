package builtin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/prompt"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/protocol"
)

// chat is an engine with what it said.
type chat struct {
	t        *testing.T
	engine   engine.Engine
	accepted bool
	session  string
	answers  []string
}

func (c *chat) Accept()                { c.accepted = true }
func (c *chat) Session(id string)      { c.session = id }
func (c *chat) Answer(a engine.Answer) { c.answers = append(c.answers, a.Text) }

func newChat(t *testing.T, home, session string) *chat {
	t.Helper()
	e, err := Open(engine.Config{
		Input:   protocol.Input{GroupFolder: "family", AssistantName: "Andy", SessionID: session, Timezone: "UTC"},
		WorkDir: t.TempDir(), Home: home, Children: new(reap.Children), Log: log.New(t.Output(), "", 0),
	})
	if err != nil {
		t.Fatal(err)
	}
	return &chat{t: t, engine: e}
}

// say sends messages, "sender: text" each, and returns the answer.
func (c *chat) say(messages ...string) string {
	c.t.Helper()
	var text strings.Builder
	text.WriteString("<context timezone=\"UTC\" />\n<messages>\n")
	for _, m := range messages {
		sender, body, _ := strings.Cut(m, ": ")
		fmt.Fprintf(&text, "<message sender=%q time=\"t\">%s</message>\n", sender, strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;").Replace(body))
	}
	text.WriteString("</messages>")
	return c.prompt(text.String())
}

func (c *chat) prompt(text string) string {
	c.t.Helper()
	c.answers = nil
	if err := c.engine.Prompt(c.t.Context(), text, c); err != nil {
		c.t.Fatal(err)
	}
	if len(c.answers) != 1 || !c.accepted {
		c.t.Fatalf("answers %q, accepted %v", c.answers, c.accepted)
	}
	return c.answers[0]
}

func (c *chat) wants(got, want string) {
	c.t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		c.t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestAnswers(t *testing.T) {
	c := newChat(t, t.TempDir(), "")
	c.wants(c.say("Ann: @Andy hi there"), "[family · turn 1] I got a message from Ann: “hi there”\n"+
		"This session has seen 1 message. I have no model here; say “help” to see what I can do.")
	c.wants(c.say("Ann: one", "Bob: two\nlines", "Ann:  "), "[family · turn 2] I got 3 messages from Ann and Bob. The last one, from Bob: “two lines”\n"+
		"This session has seen 4 messages. I have no model here; say “help” to see what I can do.")
	c.wants(c.prompt("just text"), "[family · turn 3] I got a message: “just text”\n"+
		"This session has seen 5 messages. I have no model here; say “help” to see what I can do.")
	c.wants(c.prompt(prompt.Scheduled+"water the plants"), "[family · turn 4] I got a scheduled task: “water the plants”\n"+
		"This session has seen 6 messages. I have no model here; say “help” to see what I can do.")
	c.wants(c.prompt(""), "[family · turn 5] I got 0 messages, without a text.\n"+
		"This session has seen 6 messages. I have no model here; say “help” to see what I can do.")
	c.wants(c.say("Bob: @Andy What did I say?"), "[family · turn 6] What I remember of session "+c.session+":\n"+
		"1. Ann: “hi there”\n2. Ann and Bob: “two lines”\n3. someone: “just text”\n4. someone: “water the plants”\n5. someone: “”")
	help := c.say("Bob: @andy, help!")
	for _, setting := range []string{"AGENT_ENGINE", "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "AGENT_MODEL"} {
		if !strings.Contains(help, setting) {
			t.Errorf("help does not name %s", setting)
		}
	}
}

func TestManySenders(t *testing.T) {
	c := newChat(t, t.TempDir(), "")
	var messages []string
	for i := range 8 {
		messages = append(messages, fmt.Sprintf("P%d: hi", i))
	}
	if got, want := c.say(messages...), "from P0, P1, P2, P3, P4 and 3 more. The last one, from P7: “hi”"; !strings.Contains(got, want) {
		t.Errorf("got %s, want %s in it", got, want)
	}
}

func TestRunCommand(t *testing.T) {
	t.Setenv("SECRET", "secret")
	home := t.TempDir()
	c := newChat(t, home, "")
	c.wants(c.say("Ann: @Andy run echo \"$HOME $TZ $USER-$SECRET\" > f && cat f"),
		"[family · turn 1] $ echo \"$HOME $TZ $USER-$SECRET\" > f && cat f\n```\n"+home+" UTC agent-\n```\nexit code 0")
	c.wants(c.say("Ann: Run\nls\nexit 4"), "[family · turn 2] $ ls exit 4\n```\nf\n```\nexit code 4")
	c.wants(c.say("Ann: run echo '```'"), "[family · turn 3] $ echo '```'\n````\n```\n````\nexit code 0")
	c.wants(c.say("Ann: run true"), "[family · turn 4] $ true\nexit code 0")
	if got := c.say("Ann: run"); !strings.Contains(got, "I got a message") {
		t.Errorf("a bare run: %s", got)
	}
	c.wants(c.prompt(prompt.Scheduled+"run echo task"), "[family · turn 6] $ echo task\n```\ntask\n```\nexit code 0")
}

func TestCommandTimeout(t *testing.T) {
	c := newChat(t, t.TempDir(), "")
	c.engine.(*Engine).timeout = 1
	if got := c.say("Ann: run sleep 100"); !strings.HasSuffix(got, "stopped: it ran for 1ns\nexit code 137") {
		t.Error(got)
	}
	for _, bad := range []string{"", "soon", "-1s", "0"} {
		_, err := Open(engine.Config{Input: protocol.Input{EngineOptions: map[string]string{"commandTimeout": bad}}})
		if failure, ok := errors.AsType[*engine.Error](err); !ok || failure.Class != protocol.ClassInput {
			t.Errorf("commandTimeout %q: %v", bad, err)
		}
	}
	e, err := Open(engine.Config{Input: protocol.Input{EngineOptions: map[string]string{"commandTimeout": "90s"}}})
	if err != nil || e.(*Engine).timeout.Seconds() != 90 {
		t.Errorf("%+v, %v", e, err)
	}
}

func TestCancelledCommandEndsTheTurn(t *testing.T) {
	c := newChat(t, t.TempDir(), "")
	stopped := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(stopped)
	if err := c.engine.Prompt(ctx, "run sleep 100", c); !errors.Is(err, stopped) || len(c.answers) > 0 {
		t.Errorf("got %v, answers %q", err, c.answers)
	}
}

// A turn that was stopped is part of the session, and the session goes on, in this
// run and in the next.
func TestStoppedTurnIsRemembered(t *testing.T) {
	home := t.TempDir()
	c := newChat(t, home, "")
	fifo := filepath.Join(t.TempDir(), "started")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	stopped := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		_, _ = os.ReadFile(fifo) // blocks until the command runs
		cancel(stopped)
	}()
	begun := time.Now()
	if err := c.engine.Prompt(ctx, "run echo > "+fifo+"; sleep 600", c); !errors.Is(err, stopped) || len(c.answers) > 0 {
		t.Fatalf("got %v, answers %q", err, c.answers)
	}
	if took := time.Since(begun); took > time.Minute {
		t.Errorf("took %v", took)
	}
	for _, c := range []*chat{c, newChat(t, home, c.session)} {
		if got := c.say("Ann: history"); !strings.Contains(got, "1. someone: “run echo >") {
			t.Errorf("got %s", got)
		}
	}
}

func TestSessionIsResumed(t *testing.T) {
	home := t.TempDir()
	first := newChat(t, home, "")
	first.say("Ann: my name is Ann")
	if !protocol.ValidSessionID(first.session) || len(first.session) != 16 {
		t.Errorf("session id %q", first.session)
	}
	second := newChat(t, home, first.session)
	second.wants(second.say("Ann: history"), "[family · turn 2] What I remember of session "+first.session+":\n1. Ann: “my name is Ann”")
	if second.session != first.session {
		t.Errorf("session %s became %s", first.session, second.session)
	}
	other := newChat(t, home, "")
	other.wants(other.say("Ann: history"), "[family · turn 1] This is the first turn of this session.")
}

func TestUnknownSessionIsStale(t *testing.T) {
	home := t.TempDir()
	if err := os.MkdirAll(filepath.Join(home, ".berth", "sessions"), 0o700); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]string{
		"gone":     "session gone not found",
		"..":       `session ".." not found`,
		".":        `session "." not found`,
		"../../it": `session "../../it" not found`,
	} {
		c := newChat(t, home, id)
		err := c.engine.Prompt(t.Context(), "hi", c)
		failure, ok := errors.AsType[*engine.Error](err)
		if !ok || failure.Class != protocol.ClassStaleSession || failure.Text != want || c.accepted {
			t.Errorf("%s: %v, accepted %v", id, err, c.accepted)
		}
	}
}

func TestDamagedSession(t *testing.T) {
	home := t.TempDir()
	c := newChat(t, home, "")
	c.say("Ann: one")
	path := filepath.Join(home, ".berth", "sessions", c.session+".jsonl")
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteString("\n{\"turn\":2,\"te"); err != nil { // a crash
		t.Fatal(err)
	}
	_ = file.Close()
	c = newChat(t, home, c.session)
	c.say("Ann: two")
	c = newChat(t, home, c.session)
	c.wants(c.say("Ann: history"), "[family · turn 3] What I remember of session "+c.session+":\n1. Ann: “one”\n2. Ann: “two”")
}

func TestSessionIsNoLinkAndNoPipe(t *testing.T) {
	home := t.TempDir()
	c := newChat(t, home, "")
	c.say("Ann: one")
	dir := filepath.Join(home, ".berth", "sessions")
	if err := os.Symlink(filepath.Join(dir, c.session+".jsonl"), filepath.Join(dir, "linked.jsonl")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "dir.jsonl"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"linked", "dir"} {
		c := newChat(t, home, id)
		if err := c.engine.Prompt(t.Context(), "hi", c); err == nil {
			t.Errorf("session %s was opened", id)
		}
	}
}

func TestSessionIsBounded(t *testing.T) {
	home := t.TempDir()
	c := newChat(t, home, "")
	c.say("Ann: one")
	s, err := resume(filepath.Join(home, ".berth", "sessions"), c.session)
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 30<<10)
	for i := range 200 {
		if err := s.add(record{Turn: i + 2, Seen: i + 2, Text: long}); err != nil {
			t.Fatal(err)
		}
	}
	s, err = resume(filepath.Join(home, ".berth", "sessions"), c.session)
	if err != nil {
		t.Fatal(err)
	}
	if n, last := len(s.turns), s.last(); n > keepTurns || last.Turn != 201 || last.Seen != 201 {
		t.Errorf("%d turns, the last is %d", n, last.Turn)
	}
	info, err := os.Stat(s.path)
	if err != nil || info.Size() > 2*maxFile {
		t.Errorf("%v bytes, %v", info.Size(), err)
	}
}

func TestAnswerGoesOutWithoutMemory(t *testing.T) {
	var stderr bytes.Buffer
	c := newChat(t, t.TempDir(), "")
	c.engine.(*Engine).config.Log = log.New(&stderr, "", 0)
	c.say("Ann: one")
	s := c.engine.(*Engine).session
	s.path = filepath.Join(t.TempDir(), "missing", "x.jsonl")
	c.say("Ann: two")
	if !strings.Contains(stderr.String(), "keep the turn") {
		t.Errorf("log: %s", &stderr)
	}
}
