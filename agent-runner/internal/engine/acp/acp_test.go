package acp

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/enginetest"
	"berth/agent-runner/protocol"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "rude" {
		rude(os.Args[2], os.Stdin, os.Stdout)
		return
	}
	enginetest.Main(m)
}

func TestTable(t *testing.T) {
	for name, program := range map[string]string{"resume": "fake-acp", "load": "fake-acp-load"} {
		t.Run(name, func(t *testing.T) {
			enginetest.Run(t, enginetest.Subject{Open: Open, Engine: "acp", Command: enginetest.Fake(t, program)})
		})
	}
}

func bench(t *testing.T, how string) *enginetest.Bench {
	t.Helper()
	return enginetest.New(t, enginetest.Subject{Open: Open, Engine: "acp", Command: enginetest.Fake(t, "rude "+how)})
}

func TestTurns(t *testing.T) {
	for how, want := range map[string]string{
		"parts":      "Let me look.\n\nIt is there.",
		"questions":  "2000 of 2000 allowed",
		"wishes":     "\"w0\" -32601\n\"w1\" -32601\n\"w2\" -32601\n\"w3\" {\"outcome\":{\"outcome\":\"cancelled\"}}",
		"max_tokens": "(I had to stop here: the limit for one answer is reached.)",
		"refusal":    "The model refuses to answer this.",
		"nothing":    "",
	} {
		t.Run(how, func(t *testing.T) {
			var turn enginetest.Turn
			if err := bench(t, how).Open(t).Prompt(t.Context(), "hello", &turn); err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(turn.Texts(), "|"); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
			if how == "parts" {
				if diff := cmp.Diff(&protocol.Usage{InputTokens: 7, OutputTokens: 5, CostUSD: 0.75}, turn.Usage()); diff != "" {
					t.Errorf("usage (-want +got):\n%s", diff)
				}
			}
		})
	}
}

func TestErrors(t *testing.T) {
	for how, want := range map[string]engine.Error{
		"version":   {Class: protocol.ClassImage, Text: "the agent in this image speaks version 2 of its protocol; version 1 is needed. The operator installs another release of it."},
		"login":     {Class: protocol.ClassAuth, Text: "the agent wants to be logged in, which it cannot be here. The operator has been told."},
		"alone":     {Class: protocol.ClassAuth, Text: "the agent wants to be logged in, which it cannot be here. The operator has been told."},
		"nameless":  {Text: "the agent made a session without an id."},
		"cancelled": {Text: "the agent cancelled the turn by itself."},
	} {
		t.Run(how, func(t *testing.T) {
			got := bench(t, how).Open(t).Fails(t, "hello", want.Class)
			if diff := cmp.Diff(want, *got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	if got := bench(t, "swallow").Open(t).Fails(t, "hello", ""); !strings.Contains(got.Text, "fake error 500") {
		t.Errorf("swallowed: %q", got.Text)
	}
	if got := bench(t, "dies").Open(t).Fails(t, "hello", ""); !strings.Contains(got.Text, "exit status 3") {
		t.Errorf("dies: %q", got.Text)
	}
	for _, how := range []string{"nonsense", "odd"} {
		err := bench(t, how).Open(t).Prompt(t.Context(), "hello", new(enginetest.Turn))
		if err == nil || !strings.Contains(err.Error(), "nonsense") {
			t.Errorf("%s: %v", how, err)
		}
	}
}

// TestFlood: an agent that talks for ever costs no more memory than an answer.
func TestFlood(t *testing.T) {
	var turn enginetest.Turn
	if err := bench(t, "flood").Open(t).Prompt(t.Context(), "hello", &turn); err != nil {
		t.Fatal(err)
	}
	if n := len(turn.Texts()[0]); n != maxText {
		t.Errorf("%d bytes of answer, want %d", n, maxText)
	}
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if m.HeapAlloc > 32<<20 {
		t.Errorf("%d bytes of heap", m.HeapAlloc)
	}
}

// TestBoundOfAnAnswer: what is thrown away leaves nothing behind.
func TestBoundOfAnAnswer(t *testing.T) {
	var one turn
	for i := range 2 * maxText {
		one.add("x", strconv.Itoa(i))
	}
	if n := one.text.Len(); n != maxText {
		t.Errorf("%d bytes are kept, want %d", n, maxText)
	}
}

// TestCurious: questions alone are no work.
func TestCurious(t *testing.T) {
	b := bench(t, "curious")
	b.With(engine.OptionSilence, "300ms")
	if text := b.Open(t).Fails(t, "hello", "").Text; !strings.Contains(text, "no sign of life for 300ms") {
		t.Errorf("text %q", text)
	}
}

// TestCancelled: what is said too late is no answer. One that does not stop is
// killed: the error says that no other turn may come, and none is accepted.
func TestCancelled(t *testing.T) {
	for _, how := range []string{"deaf", "late"} {
		ctx, cancel := context.WithCancelCause(t.Context())
		stopped := errors.New("stopped")
		turn := enginetest.Turn{Accepting: func() { cancel(stopped) }}
		begun := time.Now()
		e := bench(t, how).Open(t)
		err := e.Prompt(ctx, "hello", &turn)
		if took := time.Since(begun); err == nil || errors.Is(err, stopped) != (how == "late") || took > 10*time.Second || len(turn.Texts()) > 0 {
			t.Errorf("%s: %v after %v, answers %q", how, err, took, turn.Texts())
		}
		if how == "deaf" {
			again := enginetest.Turn{Accepting: func() { t.Error("a dead agent accepts a prompt") }}
			if err := e.Prompt(t.Context(), "hello", &again); err == nil {
				t.Error("a dead agent answers")
			}
		}
	}
}

// TestStoppedBeforeItBegan: then the agent does not hear of it.
func TestStoppedBeforeItBegan(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	cancel(stopped)
	e := bench(t, "parts").Open(t)
	if err := e.Prompt(ctx, "hello", new(enginetest.Turn)); !errors.Is(err, stopped) || e.Engine.(*Engine).program != nil {
		t.Errorf("%v", err)
	}
	e.Ask(t, "hello", "Let me look.")
}

// TestStoppedBeforeTheSession: the next prompt gets one, whatever comes late.
func TestStoppedBeforeTheSession(t *testing.T) {
	b := bench(t, "slow")
	e := b.Open(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	go func() {
		for !strings.Contains(b.Log.String(), "it has the first request") && t.Context().Err() == nil {
			time.Sleep(time.Millisecond)
		}
		cancel(stopped)
	}()
	if err := e.Prompt(ctx, "hello", new(enginetest.Turn)); !errors.Is(err, stopped) {
		t.Errorf("%v", err)
	}
	var turn enginetest.Turn
	if err := e.Prompt(t.Context(), "hello", &turn); err != nil || turn.ID() != "s1" {
		t.Errorf("%v, session %q", err, turn.ID())
	}
}

// TestThousandTurns: they leave nothing behind.
func TestThousandTurns(t *testing.T) {
	e := bench(t, "parts").Open(t)
	held := func() (goroutines, descriptors int) {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return runtime.NumGoroutine(), len(entries)
	}
	e.Ask(t, "hello", "there")
	goroutines, descriptors := held()
	for range 1000 {
		e.Ask(t, "hello", "there")
	}
	if g, d := held(); g > goroutines || d > descriptors {
		t.Errorf("%d goroutines and %d descriptors, before %d and %d", g, d, goroutines, descriptors)
	}
	if n := len(e.Engine.(*Engine).conn.waiting); n > 0 {
		t.Errorf("%d calls wait", n)
	}
}

func TestBetweenTurns(t *testing.T) {
	e := bench(t, "between").Open(t)
	for range 3 {
		e.Ask(t, "hello", "in time")
		e.Ask(t, "hello", "in time")
	}
}

// TestForgetful: a session that cannot be continued is not told to the host, and
// one that the host tells is stale.
func TestForgetful(t *testing.T) {
	b := bench(t, "forgetful")
	var turn enginetest.Turn
	if err := b.Open(t).Prompt(t.Context(), "hello", &turn); err != nil || turn.ID() != "" {
		t.Errorf("%v, session %q", err, turn.ID())
	}
	b.Config.SessionID = "s1"
	b.Open(t).Fails(t, "hello", protocol.ClassStaleSession)
}

// TestPreface: an agent without a place for it is given the system prompt before
// the first message of a session.
func TestPreface(t *testing.T) {
	b := enginetest.New(t, enginetest.Subject{Open: Open, Engine: "acp", Command: enginetest.Fake(t, "fake-acp")})
	e := b.Open(t)
	e.Ask(t, "echo-blocks", "2 blocks, the first: "+b.Config.SystemPrompt)
	e.Ask(t, "echo-blocks", "1 blocks")
}

func TestOpen(t *testing.T) {
	base := bench(t, "nothing").Config
	for name, tt := range map[string]struct {
		change func(*engine.Config)
		class  string
	}{
		"no command":     {func(c *engine.Config) { delete(c.EngineOptions, engine.OptionCommand) }, protocol.ClassInput},
		"broken command": {func(c *engine.Config) { c.EngineOptions[engine.OptionCommand] = `"sh` }, protocol.ClassInput},
		"no such agent":  {func(c *engine.Config) { c.EngineOptions[engine.OptionCommand] = "/nonexistent" }, protocol.ClassImage},
		"broken time":    {func(c *engine.Config) { c.EngineOptions[engine.OptionFirst] = "soon" }, protocol.ClassInput},
		"no gateway":     {func(c *engine.Config) { c.Engine, c.Gateway = "opencode", "" }, protocol.ClassInput},
	} {
		c := base
		c.EngineOptions = map[string]string{}
		for k, v := range base.EngineOptions {
			c.EngineOptions[k] = v
		}
		tt.change(&c)
		_, err := Open(c)
		if failure, ok := errors.AsType[*engine.Error](err); !ok || failure.Class != tt.class {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestOpenCode: what it is given leads to the gateway and nowhere else.
func TestOpenCode(t *testing.T) {
	c := engine.Config{Home: t.TempDir(), Input: protocol.Input{SystemPrompt: "be kind", EngineOptions: map[string]string{engine.OptionModel: "m1"}}}
	env, err := openCode(c, "127.0.0.1:9", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Providers    []string `json:"enabled_providers"`
		Model        string
		Instructions []string
		Provider     map[string]struct {
			NPM     string
			Options struct {
				BaseURL string `json:"baseURL"`
				APIKey  string `json:"apiKey"`
			}
		}
	}
	for _, v := range env {
		if content, ok := strings.CutPrefix(v, "OPENCODE_CONFIG_CONTENT="); ok {
			if err := json.Unmarshal([]byte(content), &config); err != nil {
				t.Fatal(err)
			}
		}
	}
	p := config.Provider["berth"]
	if config.Model != "berth/m1" || len(config.Providers) != 1 || p.Options.BaseURL != "http://127.0.0.1:9/openai/v1" || p.Options.APIKey != "placeholder" {
		t.Errorf("%+v", config)
	}
	if text, err := os.ReadFile(config.Instructions[0]); err != nil || string(text) != "be kind" {
		t.Errorf("instructions %q, %v", text, err)
	}
	c.EngineOptions = nil
	_, err = openCode(c, "127.0.0.1:9", t.TempDir())
	if failure, ok := errors.AsType[*engine.Error](err); !ok || failure.Class != protocol.ClassInput {
		t.Errorf("without a model: %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, line := range []string{
		`{"jsonrpc":"2.0","id":0,"method":"session/request_permission","params":{"options":[{"optionId":"once","kind":"allow_once"}]}}`,
		`{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"hi"}}}}`,
		`{"jsonrpc":"2.0","id":3,"result":{"stopReason":"end_turn"}}`,
		`{"jsonrpc":"2.0","id":3,"error":{"code":-32603,"message":"x","data":{}}}`,
		`{"id":null,"error":{"code":1}}`, `[]`, `{}`, `null`, `{"id":{"a":1},"method":"x"}`, `{"id":1e400}`,
	} {
		f.Add([]byte(line))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		m, kind, err := decode(line)
		if err != nil {
			return
		}
		switch {
		case kind == request && (m.ID == nil || m.Method == ""), kind == notification && m.ID != nil, kind == response && m.Method != "":
			t.Errorf("%q is a %d", line, kind)
		case len(m.ID) > maxID:
			t.Errorf("an id of %d bytes", len(m.ID))
		}
		// What follows takes anything.
		e := &Engine{session: "s", turn: &turn{signs: make(chan struct{}, 1)}}
		if json.Valid(m.Params) && kind == request {
			e.requested(m.Method, m.Params)
		}
		if kind == notification && json.Unmarshal(m.Params, new(update)) == nil { // else it is garbage
			e.notified(m.Method, m.Params)
			e.notified(m.Method, m.Params)
			if n := e.turn.text.Len(); n > 6*len(line)+2 {
				t.Errorf("%d bytes of text from %d", n, len(line))
			}
		}
	})
}
