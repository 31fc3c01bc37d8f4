// Package enginetest is one table of cases for every engine that runs an agent
// program against a model. The program may be the real one, or one of package
// fakeagent.
package enginetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/agent-runner/fakemodel"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/enginetest/fakeagent"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/protocol"
)

// Subject is an engine under test.
type Subject struct {
	Open     engine.Open
	Engine   string // its name
	Command  string // of the agent program, as the option has it
	Provider string // as the option has it; may be empty
	System   bool   // the system prompt reaches the model's own; else it stands before the prompt
	Steers   bool
	Skills   bool // the model is told which skills there are
}

// Main is the TestMain of packages that use this one: it is the fake programs too.
func Main(m *testing.M) {
	if len(os.Args) < 2 || strings.HasPrefix(os.Args[1], "-") {
		os.Exit(m.Run())
	}
	var err error
	switch os.Args[1] {
	case "fake-acp":
		err = fakeagent.ACP(os.Stdin, os.Stdout, true)
	case "fake-acp-load":
		err = fakeagent.ACP(os.Stdin, os.Stdout, false)
	case "fake-claude":
		os.Exit(fakeagent.StreamJSON(os.Args[2:], os.Stdin, os.Stdout, true))
	case "fake-claude-old":
		os.Exit(fakeagent.StreamJSON(os.Args[2:], os.Stdin, os.Stdout, false))
	case "fake-mcp":
		err = fakeagent.MCP(os.Stdin, os.Stdout)
	default:
		err = fmt.Errorf("no fake program is called %q", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Fake returns the command of a fake program of Main.
func Fake(t testing.TB, program string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// A program built with the race detector waits a second before it ends.
	return "env GORACE=atexit_sleep_ms=0 " + self + " " + program
}

// Run runs the cases of the table that fit s.
func Run(t *testing.T, s Subject) {
	cases := slices.Clone(table)
	if s.Command != "" {
		cases = append(cases, ofPrograms...)
	}
	if s.Steers {
		cases = append(cases, ofSteerers...)
	}
	if s.Skills {
		cases = append(cases, ofSkilled...)
	}
	for _, c := range cases {
		t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) { c.run(t, New(t, s)) })
	}
}

// Bench is one group, its model, and the engines that work for it.
type Bench struct {
	Subject Subject
	Model   *fakemodel.Server
	Config  engine.Config
	Log     *Log

	mu     sync.Mutex
	bodies [][]byte // of all requests
}

// asked reports whether a request to the model held text.
func (b *Bench) asked(text string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.ContainsFunc(b.bodies, func(body []byte) bool { return bytes.Contains(body, []byte(text)) })
}

// Log is a log that tests can read. It is safe for concurrent use.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// secret is a key that no agent program may see.
const secret = "sk-ant-only-for-the-host"

// New returns a bench whose model is gone with the test.
func New(t *testing.T, s Subject) *Bench {
	t.Helper()
	fake, logged := fakemodel.New(), &Log{}
	b := &Bench{Subject: s, Model: fake, Log: logged}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // it hung up
		}
		b.mu.Lock()
		b.bodies = append(b.bodies, body)
		b.mu.Unlock()
		r.Body = io.NopCloser(bytes.NewReader(body))
		fake.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	t.Setenv("ANTHROPIC_API_KEY", secret)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the run's log:\n%s", logged)
		}
	})
	b.Config = engine.Config{
		Input: protocol.Input{
			GroupFolder: "family", AssistantName: "Andy", Engine: s.Engine, Secrets: map[string]string{"ANTHROPIC_API_KEY": secret},
			EngineOptions: map[string]string{engine.OptionModel: fakemodel.Model, engine.OptionCommand: s.Command, engine.OptionProvider: s.Provider},
			SystemPrompt:  "You are the agent of the group family.",
		},
		WorkDir:  t.TempDir(),
		Home:     t.TempDir(),
		Gateway:  strings.TrimPrefix(server.URL, "http://"),
		Children: new(reap.Children),
		Log:      log.New(logged, "", 0),
	}
	b.With(engine.OptionSession, "1m") // a machine that tests is busy
	return b
}

// With sets an option.
func (b *Bench) With(option, value string) { b.Config.EngineOptions[option] = value }

// Open opens an engine that is closed at the test's end at the latest.
func (b *Bench) Open(t *testing.T) *Running {
	t.Helper()
	e, err := b.Subject.Open(b.Config)
	if err != nil {
		t.Fatal(err)
	}
	r := &Running{Engine: e}
	t.Cleanup(func() { r.Close(t) })
	return r
}

// Running is an engine.
type Running struct {
	engine.Engine
	closed bool
}

// Close closes it once.
func (r *Running) Close(t testing.TB) {
	if r.closed {
		return
	}
	r.closed = true
	if err := r.Engine.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// Turn is an engine.Turn that records. It is safe for concurrent use.
type Turn struct {
	mu        sync.Mutex
	accepted  bool
	sessions  []string
	answers   []engine.Answer
	Accepting func() // called at the first Accept; may be nil
}

// Accept implements engine.Turn.
func (t *Turn) Accept() {
	t.mu.Lock()
	first := !t.accepted
	t.accepted = true
	t.mu.Unlock()
	if first && t.Accepting != nil {
		t.Accepting()
	}
}

// Session implements engine.Turn.
func (t *Turn) Session(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sessions = append(t.sessions, id)
}

// Answer implements engine.Turn.
func (t *Turn) Answer(a engine.Answer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.answers = append(t.answers, a)
}

// Texts returns the answers so far.
func (t *Turn) Texts() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []string
	for _, a := range t.answers {
		all = append(all, a.Text)
	}
	return all
}

// Usage returns what the last answer cost, or nil.
func (t *Turn) Usage() *protocol.Usage {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.answers) == 0 {
		return nil
	}
	return t.answers[len(t.answers)-1].Usage
}

// ID returns the session's id, or nothing.
func (t *Turn) ID() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.sessions) == 0 {
		return ""
	}
	return t.sessions[len(t.sessions)-1]
}

// Ask prompts with text and wants exactly one answer with want in it.
func (r *Running) Ask(t *testing.T, text, want string) *Turn {
	t.Helper()
	var turn Turn
	if err := r.Prompt(t.Context(), Host(text), &turn); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	if got := turn.Texts(); len(got) != 1 || !strings.Contains(got[0], want) {
		t.Fatalf("%s: answers %q, want one with %q", text, got, want)
	}
	return &turn
}

// Host wraps text as the host does.
func Host(text string) string {
	text = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;").Replace(text)
	return "<context chat=\"c@g.us\" group=\"family\" timezone=\"UTC\"/>\n<messages>\n<message sender=\"Ann\" time=\"2026-02-23T10:00:00.000Z\">@Andy " + text + "</message>\n</messages>"
}

// Fails prompts with text and wants an error of the class.
func (r *Running) Fails(t *testing.T, text, class string) *engine.Error {
	t.Helper()
	var turn Turn
	err := r.Prompt(t.Context(), Host(text), &turn)
	failure, ok := errors.AsType[*engine.Error](err)
	if !ok || failure.Class != class || len(turn.Texts()) > 0 {
		t.Fatalf("%s: error %v (%+v), answers %q; want class %q", text, err, failure, turn.Texts(), class)
	}
	return failure
}

// await returns when a tool has made a file, which is how it tells: no event of ours
// is near. It also returns when the test is over.
func await(t *testing.T, file string) {
	for t.Context().Err() == nil {
		if _, err := os.Stat(file); err == nil {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

type testCase struct {
	name string
	run  func(t *testing.T, b *Bench)
}

// table are the cases of every engine.
var table = []testCase{
	{"answer", func(t *testing.T, b *Bench) {
		turn := b.Open(t).Ask(t, "think hm hm\nsay hello <you> & all", "hello <you> & all")
		if got := turn.Texts()[0]; got != "hello <you> & all" {
			t.Errorf("got %q", got)
		}
		if !turn.accepted || !protocol.ValidSessionID(turn.ID()) {
			t.Errorf("accepted %v, session %q", turn.accepted, turn.ID())
		}
		if u := turn.Usage(); u == nil || u.InputTokens <= 0 || u.OutputTokens <= 0 {
			t.Errorf("usage %+v", u)
		}
	}},
	{"system prompt", func(t *testing.T, b *Bench) {
		b.Open(t).Ask(t, "say yes", "yes")
		for _, r := range b.Model.Requests() {
			if strings.Contains(r.System, b.Config.SystemPrompt) {
				return
			}
		}
		if b.Subject.System {
			t.Error("the model was not told")
		}
	}},
	{"tool of ours", func(t *testing.T, b *Bench) {
		b.Config.Tools = []engine.ToolServer{{Name: "nano", Command: strings.Fields(Fake(t, "fake-mcp")), Env: map[string]string{"NOTE_FOR": "family"}}}
		b.Open(t).Ask(t, "tool note {\"text\":\"milk\"}\nsay done", "tool said: noted for family: milk")
	}},
	{"tool of its own", func(t *testing.T, b *Bench) {
		b.Open(t).Ask(t, `tool bash {"command":"echo $((6*7)) > made; cat made; pwd","description":"count"}`, "42\n"+b.Config.WorkDir)
		if data, err := os.ReadFile(filepath.Join(b.Config.WorkDir, "made")); err != nil || string(data) != "42\n" {
			t.Errorf("file %q, %v", data, err)
		}
	}},
	{"no key in the tools' environment", func(t *testing.T, b *Bench) {
		turn := b.Open(t).Ask(t, `tool bash {"command":"env; cat /proc/$PPID/environ | tr '\\0' '\\n'","description":"look"}`, "placeholder")
		if strings.Contains(turn.Texts()[0], secret) {
			t.Error("the key is there")
		}
		for _, r := range b.Model.Requests() {
			if r.Key() != "placeholder" {
				t.Errorf("the model was asked with the key %q", r.Key())
			}
		}
	}},
	{"follow-up", func(t *testing.T, b *Bench) {
		e := b.Open(t)
		id := e.Ask(t, "say one", "one").ID()
		if again := e.Ask(t, "echo-history", "history: 2 from users").ID(); again != id {
			t.Errorf("session %q became %q", id, again)
		}
	}},
	{"resume in a new process", func(t *testing.T, b *Bench) {
		e := b.Open(t)
		b.Config.SessionID = e.Ask(t, "say one", "one").ID()
		e.Close(t)
		turn := b.Open(t).Ask(t, "echo-history", "history: 2 from users, 1 from assistants: say one / echo-history")
		if turn.ID() != b.Config.SessionID || strings.Contains(turn.Texts()[0], "one\n") {
			t.Errorf("session %q, %q", turn.ID(), turn.Texts())
		}
	}},
	{"stale session", func(t *testing.T, b *Bench) {
		b.Config.SessionID = "99999999-1111-4111-8111-111111111111"
		b.Open(t).Fails(t, "say hello", protocol.ClassStaleSession)
	}},
	{"session of another engine", func(t *testing.T, b *Bench) {
		b.Config.SessionID = "builtin-1"
		e, err := b.Subject.Open(b.Config)
		if err == nil {
			defer e.Close()
			err = e.Prompt(t.Context(), Host("say hello"), new(Turn))
		}
		if failure, ok := errors.AsType[*engine.Error](err); !ok || failure.Class != protocol.ClassStaleSession {
			t.Errorf("error %v", err)
		}
	}},
	{"cancel", func(t *testing.T, b *Bench) {
		e := b.Open(t)
		e.Ask(t, "say warm", "warm")
		for _, script := range []string{"stall\nsay one two three four", "mute"} {
			stopped := errors.New("stopped")
			ctx, cancel := context.WithCancelCause(t.Context())
			var at time.Time
			go func() {
				if _, err := b.Model.Await(t.Context(), func(r fakemodel.Request) bool { return r.Text == script }); err != nil {
					t.Error(err)
				}
				at = time.Now()
				cancel(stopped)
			}()
			var turn Turn
			err := e.Prompt(ctx, Host(script), &turn)
			if took := time.Since(at); !errors.Is(err, stopped) || took > 2*time.Second || len(turn.Texts()) > 0 {
				t.Errorf("%s: %v after %v, answers %q", script, err, took, turn.Texts())
			}
			if err := b.Model.AwaitIdle(t.Context()); err != nil {
				t.Error(err)
			}
			e.Ask(t, "say again", "again") // or the error would have been another one
		}
	}},
	{"cancel during a tool", func(t *testing.T, b *Bench) {
		e := b.Open(t)
		ctx, cancel := context.WithCancelCause(t.Context())
		stopped := errors.New("stopped")
		started := filepath.Join(b.Config.WorkDir, "started")
		go func() {
			await(t, started)
			cancel(stopped)
		}()
		begun := time.Now()
		err := e.Prompt(ctx, Host(`tool bash {"command":"touch started; exec sleep 60","description":"wait"}`), new(Turn))
		if !errors.Is(err, stopped) || time.Since(begun) > 30*time.Second {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
	}},
	{"bad request", func(t *testing.T, b *Bench) { b.Open(t).Fails(t, "http 400", protocol.ClassInput) }},
	{"key refused", func(t *testing.T, b *Bench) {
		begun := time.Now()
		if text := b.Open(t).Fails(t, "http 401", protocol.ClassAuth).Text; !strings.HasPrefix(text, "The key was refused. The operator has been told") {
			t.Errorf("text %q", text)
		}
		if took := time.Since(begun); took > 15*time.Second {
			t.Errorf("took %v", took)
		}
	}},
	{"no credit", func(t *testing.T, b *Bench) { b.Open(t).Fails(t, "http 402", protocol.ClassAuth) }},
	{"forbidden", func(t *testing.T, b *Bench) { b.Open(t).Fails(t, "http 403", protocol.ClassAuth) }},
	{"unknown model", func(t *testing.T, b *Bench) { b.Open(t).Fails(t, "http 404", protocol.ClassInput) }},
	{"rate limit", func(t *testing.T, b *Bench) {
		if wait := b.Open(t).Fails(t, "limit 100", protocol.ClassRateLimit).RetryAfter; wait != 100*time.Second {
			t.Errorf("retry after %v", wait)
		}
	}},
	{"server error", func(t *testing.T, b *Bench) { b.Open(t).Fails(t, "http 500", "") }},
	{"overloaded", func(t *testing.T, b *Bench) { b.Open(t).Fails(t, "http 529", "") }},
	{"trouble that passes", func(t *testing.T, b *Bench) { b.Open(t).Ask(t, "fail 1 529\nsay at last", "at last") }},
	{"no key on the host", func(t *testing.T, b *Bench) { b.Open(t).Fails(t, "refuse no_key", protocol.ClassAuth) }},
	{"budget used up", func(t *testing.T, b *Bench) { b.Open(t).Ask(t, "refuse budget", "used up its budget") }},
	{"half a stream", func(t *testing.T, b *Bench) { b.Open(t).Fails(t, "drop\nsay one two three four", "") }},
	{"stall", func(t *testing.T, b *Bench) {
		b.With(engine.OptionSilence, "1s")
		e := b.Open(t)
		if text := e.Fails(t, "stall\nsay one two three four", "").Text; !strings.Contains(text, "no sign of life for 1s") {
			t.Errorf("text %q", text)
		}
		if err := b.Model.AwaitIdle(t.Context()); err != nil {
			t.Error(err)
		}
	}},
	{"never a first token", func(t *testing.T, b *Bench) {
		b.With(engine.OptionFirst, "2s")
		e := b.Open(t)
		if text := e.Fails(t, "mute", "").Text; !strings.Contains(text, "no sign of life for 2s") {
			t.Errorf("text %q", text)
		}
	}},
	{"large answer", func(t *testing.T, b *Bench) {
		turn := b.Open(t).Ask(t, "big 600000", strings.Repeat("x", protocol.MaxResult))
		if n := len(turn.Texts()[0]); n > 600_000 {
			t.Errorf("%d bytes", n)
		}
	}},
}

// ofPrograms are the cases of engines with a program, which some of them harm.
var ofPrograms = []testCase{
	{"missing from the image", func(t *testing.T, b *Bench) {
		b.With(engine.OptionCommand, "/nonexistent/agent")
		e, err := b.Subject.Open(b.Config)
		if err == nil {
			e.Close()
		}
		if failure, ok := errors.AsType[*engine.Error](err); !ok || failure.Class != protocol.ClassImage || !strings.Contains(failure.Text, "/nonexistent/agent") {
			t.Errorf("error %v", err)
		}
	}},
	{"never ready", func(t *testing.T, b *Bench) {
		b.With(engine.OptionCommand, `sh -c "exec sleep 1000"`)
		b.With(engine.OptionSession, "300ms")
		if text := b.Open(t).Fails(t, "say hello", "").Text; !strings.Contains(text, "not ready within 300ms") {
			t.Errorf("text %q", text)
		}
	}},
	{"garbage before", func(t *testing.T, b *Bench) {
		b.With(engine.OptionCommand, fmt.Sprintf(`sh -c 'echo "Welcome to the agent!"; echo "{\"a\":"; printf "\\377\\376\\n[]\\n\\n"; echo warned >&2; exec %s "$@"' agent`, b.Subject.Command))
		b.Open(t).Ask(t, "say hello", "hello")
		if !strings.Contains(b.Log.String(), "Welcome to the agent!") || !strings.Contains(b.Log.String(), "warned") {
			t.Errorf("log %s", b.Log)
		}
	}},
	{"ends at once", func(t *testing.T, b *Bench) {
		b.With(engine.OptionCommand, `sh -c "echo broken >&2; exit 3"`)
		if text := b.Open(t).Fails(t, "say hello", "").Text; !strings.Contains(text, "exit status 3") || !strings.Contains(text, "broken") {
			t.Errorf("text %q", text)
		}
	}},
	{"killed for memory", func(t *testing.T, b *Bench) {
		e := b.Open(t)
		e.Ask(t, "say warm", "warm")
		e.Fails(t, `tool bash {"command":"kill -9 $PPID; sleep 1","description":"die"}`, protocol.ClassMemory)
	}},
	{"deaf to a stop", func(t *testing.T, b *Bench) {
		e := b.Open(t)
		e.Ask(t, "say warm", "warm")
		ctx, cancel := context.WithCancelCause(t.Context())
		stopped := errors.New("stopped")
		var at time.Time
		go func() {
			await(t, filepath.Join(b.Config.WorkDir, "frozen"))
			at = time.Now()
			cancel(stopped)
		}()
		err := e.Prompt(ctx, Host(`tool bash {"command":"kill -STOP $PPID; touch frozen; exec sleep 60","description":"freeze"}`), new(Turn))
		if took := time.Since(at); took > 2*time.Second {
			t.Errorf("took %v", took)
		}
		if err == nil || errors.Is(err, stopped) {
			t.Errorf("%v: it had to be killed, and the host takes it for one that goes on", err)
		}
	}},
}

// ofSteerers are the cases of engines that take messages during a turn.
var ofSteerers = []testCase{
	{"steer", func(t *testing.T, b *Bench) {
		e := b.Open(t)
		steerer, ok := e.Engine.(engine.Steerer)
		if !ok {
			t.Fatal("it takes no messages during a turn")
		}
		e.Ask(t, "say warm", "warm")
		if steerer.Steer(Host("say lost")) {
			t.Error("a message was steered into no turn")
		}
		steered := 0
		for _, tt := range []struct{ script, want string }{
			{"slow 60\nsay a b c d e f g h", "a b c d e f g h\nsteered 1"},
			{"tool bash {\"command\":\"sleep 1; echo made\",\"description\":\"x\"}\nsay end", "made"},
		} {
			steered++
			message := fmt.Sprintf("say steered %d", steered)
			go func() {
				if _, err := b.Model.Await(t.Context(), func(r fakemodel.Request) bool { return r.Text == tt.script }); err != nil {
					t.Error(err)
				}
				for !steerer.Steer(Host(message)) { // until the engine knows that it has the prompt
					if t.Context().Err() != nil {
						return
					}
					time.Sleep(time.Millisecond)
				}
			}()
			var turn Turn
			if err := e.Prompt(t.Context(), Host(tt.script), &turn); err != nil {
				t.Fatal(err)
			}
			if all := strings.Join(turn.Texts(), "\n"); !strings.Contains(all, tt.want) {
				t.Errorf("answers %q, want %q", turn.Texts(), tt.want)
			}
			told := func(r fakemodel.Request) bool { return strings.Contains(r.System+r.Text, message) }
			if !slices.ContainsFunc(b.Model.Requests(), told) {
				t.Errorf("the model was not told of %q", message)
			}
			if steerer.Steer(Host("say lost")) {
				t.Error("a message was steered into a turn that is over")
			}
		}
		e.Ask(t, "echo-history", "say steered 1")
	}},
}

// ofSkilled are the cases of engines that find skills.
var ofSkilled = []testCase{
	{"skills", func(t *testing.T, b *Bench) {
		skills := b.Skills(t)
		b.Open(t).Ask(t, "say yes", "yes")
		for _, name := range skills {
			if !b.asked(name) {
				t.Errorf("the model was not told of %s", name)
			}
		}
	}},
}

// Skills makes a skill of all groups and one of the group's own, as a run finds them,
// and returns their names.
func (b *Bench) Skills(t *testing.T) []string {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	names := []string{"cook-for-all", "bake-at-home"}
	for i, base := range []string{b.Config.Home, b.Config.WorkDir} {
		dir := filepath.Join(base, ".claude", "skills", names[i])
		must(os.MkdirAll(dir, 0o755))
		must(os.WriteFile(filepath.Join(dir, "SKILL.md"), []byte("---\nname: "+names[i]+"\ndescription: How to do it.\n---\nBoil it.\n"), 0o644))
		must(os.Mkdir(filepath.Join(base, ".agents"), 0o755))
		must(os.Symlink("../.claude/skills", filepath.Join(base, ".agents", "skills")))
	}
	return names
}
