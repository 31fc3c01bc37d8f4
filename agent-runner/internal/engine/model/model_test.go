package model

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
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"berth/agent-runner/fakemodel"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/enginetest"
	"berth/agent-runner/internal/forward"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/internal/shell"
	"berth/agent-runner/protocol"
)

// TestMain lets this test binary be the shell, a tool server, and an engine.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "sh":
			os.Exit(shell.Main(os.Args[2:]))
		case "tool-server":
			os.Exit(serveTools())
		case "one-turn":
			if err := oneTurn(os.Args[2], os.Args[3], os.Args[4]); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		}
	}
	enginetest.Main(m)
}

// serveTools is a tool server with one tool.
func serveTools() int {
	server := mcp.NewServer(&mcp.Implementation{Name: "nano", Version: "1"}, nil)
	type input struct {
		Text string `json:"text" jsonschema:"what to send"`
	}
	mcp.AddTool(server, &mcp.Tool{Name: "send_message", Description: "sends a message"},
		func(_ context.Context, _ *mcp.CallToolRequest, in input) (*mcp.CallToolResult, any, error) {
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: os.Getenv("CHAT") + " got " + in.Text}}}, nil, nil
		})
	if err := server.Run(context.Background(), &mcp.StdioTransport{}); err != nil {
		return 1
	}
	return 0
}

// both runs a test with either provider.
func both(t *testing.T, test func(t *testing.T, provider string)) {
	for _, provider := range []string{anthropic, openAI} {
		t.Run(provider, func(t *testing.T) { test(t, provider) })
	}
}

// chat is an engine, its provider, and what it said.
type chat struct {
	t      *testing.T
	config engine.Config
	engine *Engine
	fake   *fakemodel.Server
	log    *buffer

	mu       sync.Mutex
	accepted chan struct{} // closed by Accept
	session  string
	answers  []engine.Answer
	onAnswer func() // may be nil
}

func (c *chat) Accept() { close(c.accepted) }

func (c *chat) Session(id string) { c.session = id }

func (c *chat) Answer(a engine.Answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answers = append(c.answers, a)
	if c.onAnswer != nil {
		c.onAnswer()
	}
}

// buffer is a log.
type buffer struct {
	mu   sync.Mutex
	data bytes.Buffer
	t    *testing.T
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, _ = b.t.Output().Write(p)
	return b.data.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.data.String()
}

// newChat returns an engine whose gateway is a fake model. Options come as name,
// value, …
func newChat(t *testing.T, provider string, options ...string) *chat {
	t.Helper()
	fake := fakemodel.New()
	server := httptest.NewServer(fake)
	t.Cleanup(server.Close)
	c := &chat{t: t, fake: fake, log: &buffer{t: t}}
	workspace := t.TempDir()
	c.config = engine.Config{
		Input: protocol.Input{
			GroupFolder: "family", AssistantName: "Andy", Timezone: "UTC",
			EngineOptions: map[string]string{engine.OptionProvider: provider, engine.OptionModel: fakemodel.Model},
		},
		WorkDir: filepath.Join(workspace, "group"), Home: t.TempDir(), Gateway: strings.TrimPrefix(server.URL, "http://"),
		Children: new(reap.Children), Log: log.New(c.log, "", 0),
	}
	check(t, os.Mkdir(c.config.WorkDir, 0o755))
	for i := 0; i < len(options); i += 2 {
		c.config.EngineOptions[options[i]] = options[i+1]
	}
	t.Cleanup(func() { c.close() })
	return c
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (c *chat) close() {
	if c.engine != nil {
		if err := c.engine.Close(); err != nil {
			c.t.Error(err)
		}
		c.engine = nil
	}
}

// again ends the engine and begins another one with the session.
func (c *chat) again() {
	c.close()
	c.config.SessionID = c.session
}

// prompt has the engine answer a text of the host's kind.
func (c *chat) prompt(ctx context.Context, text string) error {
	c.t.Helper()
	if c.engine == nil {
		e, err := Open(c.config)
		check(c.t, err)
		c.engine = e.(*Engine)
	}
	c.answers, c.accepted = nil, make(chan struct{})
	return c.engine.Prompt(ctx, host(text), c)
}

// host makes a prompt of a message, as the host does.
func host(text string) string {
	text = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;").Replace(text)
	return "<context timezone=\"UTC\" chat=\"family@g.us\" />\n<messages>\n<message sender=\"Ann\" time=\"t\">" + text + "</message>\n</messages>"
}

// say returns what the engine answers to lines of a script.
func (c *chat) say(lines ...string) string {
	c.t.Helper()
	check(c.t, c.prompt(c.t.Context(), strings.Join(lines, "\n")))
	return c.said()
}

func (c *chat) said() string {
	var texts []string
	for _, a := range c.answers {
		texts = append(texts, a.Text)
	}
	return strings.Join(texts, " | ")
}

func (c *chat) wants(got, want string) {
	c.t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		c.t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestAnswer(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		c := newChat(t, provider)
		c.wants(c.say("hello there"), "echo: hello there")
		if c.session == "" || !protocol.ValidSessionID(c.session) {
			t.Errorf("session %q", c.session)
		}
		if diff := cmp.Diff(&protocol.Usage{InputTokens: 100, OutputTokens: 3}, c.answers[0].Usage); diff != "" {
			t.Errorf("usage (-want +got):\n%s", diff)
		}
		c.wants(c.say("echo-history"), "history: 2 from users, 1 from assistants: hello there / echo-history")
		r := c.fake.Requests()[0]
		if r.Protocol != provider || r.Key() != forward.Placeholder || !r.Stream || r.Model != fakemodel.Model {
			t.Errorf("asked with %+v", r)
		}
		for _, want := range []string{"You are Andy", `"family"`, c.config.WorkDir} {
			if !strings.Contains(r.System, want) {
				t.Errorf("the system prompt has no %q:\n%s", want, r.System)
			}
		}
	})
}

func TestToolCalls(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		c := newChat(t, provider)
		c.wants(c.say(`tool bash {"command":"echo hi > f; echo done"}`, "say ready"), "tool said: done\nready")
		c.wants(c.say(`tools read {"path":"f"} | bash {"command":"exit 3"}`), "tool said: hi\n\ntool said: "+failed(provider)+"exit code 3")
		c.wants(c.say(`tool write {"path":"g","content":"1"}`, `tool read {"path":"g"}`, "say end"), "tool said: 1\n\nend")
	})
}

// failed stands before a result that failed, where the protocol has no field.
func failed(provider string) string {
	if provider == openAI {
		return "Error: "
	}
	return ""
}

func TestToolServer(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		c := newChat(t, provider)
		c.config.Tools = []engine.ToolServer{
			{Name: "nano", Command: []string{os.Args[0], "tool-server"}, Env: map[string]string{"CHAT": "family@g.us", "GORACE": "atexit_sleep_ms=0"}},
			{Name: "gone", Command: []string{"/nowhere/at/all"}},
		}
		c.wants(c.say(`tool send_message {"text":"hi"}`), "tool said: family@g.us got hi")
		if tools := c.fake.Requests()[0].Tools; tools[len(tools)-1] != "nano_send_message" {
			t.Errorf("tools %q", tools)
		}
		if !strings.Contains(c.log.String(), "tools of gone are not there") {
			t.Errorf("log: %s", c.log)
		}
	})
}

func TestResume(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		c := newChat(t, provider)
		c.say("one")
		c.say(`tool bash {"command":"echo x"}`)
		first := c.session
		c.again()
		c.wants(c.say("echo-history"), `history: 3 from users, 3 from assistants: one / tool bash {"command":"echo x"} / echo-history`)
		if c.session != first {
			t.Errorf("session %q, want %q", c.session, first)
		}
	})
}

func TestStaleSession(t *testing.T) {
	for _, id := range []string{"nothing-of-the-kind", "..", ".", "../x", "a/b", strings.Repeat("x", 200)} {
		c := newChat(t, anthropic)
		c.config.SessionID = id
		err := c.prompt(t.Context(), "hi")
		if e, ok := errors.AsType[*engine.Error](err); !ok || e.Class != protocol.ClassStaleSession {
			t.Errorf("session %q: %v", id, err)
		}
	}
}

func TestFollowUpsBetweenSteps(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		c := newChat(t, provider)
		fifo := filepath.Join(c.config.WorkDir, "fifo")
		c.say(`tool bash {"command":"mkfifo fifo"}`)
		done := make(chan error)
		go func() { done <- c.prompt(t.Context(), `tool bash {"command":"cat fifo"}`) }()
		_, err := c.fake.Await(t.Context(), func(r fakemodel.Request) bool { return strings.Contains(r.Text, "cat fifo") && r.Status == 200 })
		check(t, err)
		<-c.accepted
		if !c.engine.Steer(host("say and this")) {
			t.Fatal("the engine did not take it")
		}
		check(t, os.WriteFile(fifo, []byte("through"), 0)) // waits for the reader
		check(t, <-done)
		if !strings.HasSuffix(c.said(), "and this") {
			t.Errorf("got %s", c.said())
		}
		if n := len(c.fake.Requests()); n != 4 {
			t.Errorf("asked %d times, want 4: the message belongs to the step", n)
		}
		if c.engine.Steer("too late") {
			t.Error("the engine took a message without a turn")
		}
	})
}

// A message that comes while the last answer is written gets an answer of its own.
func TestFollowUpAtTheEnd(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		c := newChat(t, provider)
		done := make(chan error)
		go func() { done <- c.prompt(t.Context(), "slow 100\nsay one two three") }()
		_, err := c.fake.Await(t.Context(), func(r fakemodel.Request) bool { return r.Status == 200 })
		check(t, err)
		if !c.engine.Steer(host("say four")) {
			t.Fatal("the engine did not take it")
		}
		check(t, <-done)
		c.wants(c.said(), "one two three | four")
	})
}

// A message that comes with the last answer is none of this turn's.
func TestFollowUpAfterTheEnd(t *testing.T) {
	c := newChat(t, anthropic)
	c.onAnswer = func() {
		if c.engine.Steer("too late") {
			t.Error("the engine took a message that nobody will answer")
		}
	}
	c.wants(c.say("say bye"), "bye")
}

func TestStop(t *testing.T) {
	for name, script := range map[string]string{
		"before the answer": "mute",
		"in the answer":     "stall",
		"in a tool":         `tool bash {"command":"trap '' TERM INT; sleep 100 & wait; sleep 100"}`,
		"before a try":      "http 500",
	} {
		t.Run(name, func(t *testing.T) {
			c := newChat(t, anthropic)
			ctx, cancel := context.WithCancelCause(t.Context())
			cause := errors.New("stopped")
			done := make(chan error)
			go func() { done <- c.prompt(ctx, script) }()
			_, err := c.fake.Await(t.Context(), func(r fakemodel.Request) bool { return r.Status != 0 || script == "mute" })
			check(t, err)
			cancel(cause)
			began := time.Now()
			if err := <-done; !errors.Is(err, cause) {
				t.Errorf("got %v", err)
			}
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("took %v", took)
			}
			check(t, c.fake.AwaitIdle(t.Context()))
			c.again()
			if got := afterTool(c.say("echo-history")); !strings.HasPrefix(got, "history: ") {
				t.Errorf("after it: %s", got)
			}
		})
	}
}

func TestStepLimit(t *testing.T) {
	c := newChat(t, anthropic, OptionSteps, "2")
	call := `tool bash {"command":"true"}`
	c.wants(c.say(call, call, call, "say done"), "I stopped after 2 steps without having finished. Say “go on” and I will.")
	c.wants(c.say("say hi"), "hi")
}

// A text before a call is the answer if the model says nothing better after it.
func TestTextBetweenSteps(t *testing.T) {
	both(t, func(t *testing.T, provider string) {
		c := newChat(t, provider)
		long := strings.TrimSpace(strings.Repeat("words ", 60))
		c.wants(c.say("say one moment", `tool bash {"command":"true"}`, "say done"), "tool said: (exit code 0, no output)\ndone")
		c.wants(c.say("say "+long, `tool bash {"command":"true"}`, "say done"), long+" | tool said: (exit code 0, no output)\ndone")
	})
}

func TestOptions(t *testing.T) {
	for name, value := range map[string]string{
		engine.OptionFirst: "soon", engine.OptionSilence: "-1s", engine.OptionSession: "0",
		engine.OptionProvider: "acme", engine.OptionContext: "1", OptionSteps: "x",
	} {
		_, err := Open(engine.Config{Input: protocol.Input{EngineOptions: map[string]string{name: value}}})
		if e, ok := errors.AsType[*engine.Error](err); !ok || e.Class != protocol.ClassInput || !strings.Contains(e.Text, name) {
			t.Errorf("%s=%s: %v", name, value, err)
		}
	}
}

func TestMemoryAndSkills(t *testing.T) {
	c := newChat(t, anthropic)
	global := filepath.Join(filepath.Dir(c.config.WorkDir), "global")
	skill := filepath.Join(c.config.Home, ".claude/skills/cook")
	for path, text := range map[string]string{
		filepath.Join(c.config.WorkDir, "CLAUDE.md"): "Ann likes tea.",
		filepath.Join(global, "AGENTS.md"):           "The house rules.",
		filepath.Join(skill, "SKILL.md"):             "---\nname: cook\ndescription: How to cook.\n---\nBoil it.",
	} {
		check(t, os.MkdirAll(filepath.Dir(path), 0o755))
		check(t, os.WriteFile(path, []byte(text), 0o644))
	}
	check(t, os.Symlink("/proc/self/environ", filepath.Join(c.config.WorkDir, "AGENTS.md")))
	c.config.SystemPrompt = "Be kind."
	c.say("hi")
	got := c.fake.Requests()[0].System
	for _, want := range []string{"Ann likes tea.", "The house rules.", "cook/SKILL.md: How to cook.", "Be kind."} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
	if strings.Contains(got, "PATH=") {
		t.Error("a link led to the runner's environment")
	}
}

// A model without tools can still talk, and the operator is told.
func TestModelWithoutTools(t *testing.T) {
	c := newChat(t, openAI)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, err := io.ReadAll(r.Body)
		check(t, err)
		if bytes.Contains(data, []byte(`"tools"`)) {
			http.Error(w, `{"error":{"message":"fake-1 does not support tools"}}`, http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(data))
		c.fake.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	c.config.Gateway = strings.TrimPrefix(server.URL, "http://")
	c.wants(c.say("say hi"), "hi")
	c.wants(c.say("say again"), "again")
	if n := strings.Count(c.log.String(), "takes no tools"); n != 1 {
		t.Errorf("told %d times:\n%s", n, c.log)
	}
}

// gateway is a gateway in front of a fake model that knows these providers.
func (c *chat) gateway(providers string, models string) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/":
			fmt.Fprintf(w, `{"gateway":"berth","providers":[%s]}`, providers)
		case models != "" && strings.HasSuffix(r.URL.Path, "/models"):
			fmt.Fprintf(w, `{"data":[%s]}`, models)
		default:
			c.fake.ServeHTTP(w, r)
		}
	}))
	c.t.Cleanup(server.Close)
	c.config.Gateway = strings.TrimPrefix(server.URL, "http://")
}

func TestChoice(t *testing.T) {
	for _, tt := range []struct {
		name, providers, models, model string
		protocol, chosen, fails        string
	}{
		{name: "the only provider", providers: `"openai"`, model: "claude-x", protocol: openAI, chosen: "claude-x"},
		{name: "by the model", providers: `"anthropic","openai"`, model: "claude-x", protocol: anthropic, chosen: "claude-x"},
		{name: "another model", providers: `"anthropic","openai"`, model: "qwen3", protocol: openAI, chosen: "qwen3"},
		{name: "a route's model", providers: `"anthropic","openai"`, model: "anthropic/claude-x", protocol: openAI, chosen: "anthropic/claude-x"},
		{name: "nothing said", providers: `"anthropic","openai"`, models: `{"id":"claude-opus-9"},{"id":"claude-sonnet-9"}`, protocol: anthropic, chosen: "claude-sonnet-9"},
		{name: "a server's only model", providers: `"openai"`, models: `{"id":"local"}`, protocol: openAI, chosen: "local"},
		{name: "many models", providers: `"openai"`, models: `{"id":"a"},{"id":"b"}`, fails: protocol.ClassInput},
		{name: "no key", providers: ``, fails: protocol.ClassAuth},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newChat(t, "")
			c.config.EngineOptions[engine.OptionModel] = tt.model
			c.gateway(tt.providers, tt.models)
			err := c.prompt(t.Context(), "hi")
			if tt.fails != "" {
				if e, ok := errors.AsType[*engine.Error](err); !ok || e.Class != tt.fails {
					t.Errorf("got %v", err)
				}
				return
			}
			check(t, err)
			r := c.fake.Requests()[0]
			if r.Protocol != tt.protocol || r.Model != tt.chosen {
				t.Errorf("asked %s for %s", r.Protocol, r.Model)
			}
		})
	}
}

func TestNoWayOut(t *testing.T) {
	c := newChat(t, anthropic)
	c.config.Gateway = ""
	err := c.prompt(t.Context(), "hi")
	if e, ok := errors.AsType[*engine.Error](err); !ok || e.Class != protocol.ClassAuth {
		t.Errorf("got %v", err)
	}
}

// Keys that come with the run go to their provider, and into no tool.
func TestOwnKey(t *testing.T) {
	c := newChat(t, anthropic)
	c.config.Secrets = map[string]string{"ANTHROPIC_API_KEY": "sk-secret", "ANTHROPIC_BASE_URL": "http://" + c.config.Gateway}
	c.config.Gateway = ""
	if got := c.say(`tool bash {"command":"env"}`); strings.Contains(got, "sk-secret") {
		t.Errorf("a tool sees the key: %s", got)
	}
	if r := c.fake.Requests()[0]; r.Key() != "sk-secret" {
		t.Errorf("asked with %q", r.Key())
	}
}
