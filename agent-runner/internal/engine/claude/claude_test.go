package claude

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/agent-runner/fakemodel"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/enginetest"
	"berth/agent-runner/protocol"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "rude" {
		rude(os.Args[2], os.Stdin, os.Stdout)
		return
	}
	enginetest.Main(m)
}

func TestTable(t *testing.T) {
	t.Run("new", func(t *testing.T) {
		enginetest.Run(t, enginetest.Subject{Open: Open, Engine: "claude", Command: enginetest.Fake(t, "fake-claude"), System: true, Steers: true})
	})
	t.Run("old", func(t *testing.T) {
		enginetest.Run(t, enginetest.Subject{Open: Open, Engine: "claude", Command: enginetest.Fake(t, "fake-claude-old"), System: true})
	})
}

// rude is a Claude Code that does what the tests need one to do wrong, or seldom.
func rude(how string, in io.Reader, out io.Writer) {
	say := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
	const result = `{"total_cost_usd":0.5,"result":%q,"subtype":"success","is_error":false,"usage":{"input_tokens":1,"cache_read_input_tokens":2,"cache_creation_input_tokens":3,"output_tokens":4},"type":"result"}`
	var first, hello string
	for lines := bufio.NewReader(in); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var m struct {
			Type, UUID string
			RequestID  string `json:"request_id"`
			Request    struct{ Subtype string }
			Response   json.RawMessage
		}
		if err := json.Unmarshal(line, &m); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return
		}
		life := func(id, state string) {
			say(`{"type":"command_lifecycle","command_uuid":%q,"state":%q}`, id, state)
		}
		switch {
		case m.Type == "control_request" && how == "slow":
			hello = m.RequestID
		case m.Type == "control_request" && m.Request.Subtype == "initialize":
			say(`{"type":"control_response","response":{"subtype":"success","request_id":%q}}`, m.RequestID)
			say(`{"type":"control_response","response":{"subtype":"success","request_id":%q}}`, m.RequestID) // again
		case m.Type == "control_response" && how == "curious": // it asks for ever
			say(`{"type":"control_request","request_id":"q","request":{"subtype":"can_use_tool","tool_name":"Bash"}}`)
		case m.Type == "control_response":
			say(result, string(m.Response))
		case m.Type != "user":
		case how == "slow": // it is ready long after it has the first message
			if first == "" {
				first = m.UUID
				fmt.Fprintln(os.Stderr, "it has the first message")
				continue
			}
			say(`{"type":"control_response","response":{"subtype":"success","request_id":%q}}`, hello)
			say(result, "the first answer")
			say(result, "the second answer")
		case how == "early": // something in the background has ended
			life(m.UUID, "queued")
			say(result, "by the way")
			life(m.UUID, "started")
			life(m.UUID, "completed")
			say(result, "hello")
		case how == "moved":
			say(strings.Replace(result, "{", `{"session_id":"`+otherSession+`",`, 1), "hello")
		case how == "usual":
			life(m.UUID, "queued")
			life(m.UUID, "started")
			if strings.Contains(string(line), "fail") {
				say(`{"type":"result","subtype":"error_max_turns","is_error":true}`)
				continue
			}
			say(result, "hello")
			life(m.UUID, "completed")
		case how == "gone":
			say(`{"type":"result","subtype":"error_during_execution","is_error":true,"errors":["No conversation found with session ID: x"]}`)
		case how == "swallow": // what its model's provider says
			resp, err := http.Post(os.Getenv("ANTHROPIC_BASE_URL")+"/v1/messages", "application/json", strings.NewReader(`{"messages":[{"role":"user","content":"http 500"}]}`))
			if err == nil {
				resp.Body.Close()
			}
			say(result, "")
		case how == "flood":
			text := strings.Repeat("x", 1000)
			for range 5_000 {
				say(`{"type":"stream_event","event":{"type":"content_block_delta","delta":{"type":"text_delta","text":%q}}}`, text)
			}
			say(result, "hello")
		case how == "curious":
			say(`{"type":"control_request","request_id":"q","request":{"subtype":"can_use_tool","tool_name":"Bash"}}`)
		case how == "cost":
			say(result, "hello")
		case how == "untold": // it never says that the message is finished
			life(m.UUID, "queued")
			say(result, "hello")
		case how == "lost": // nor what became of the second one
			life(m.UUID, "queued")
			if first == "" {
				first = m.UUID
				life(m.UUID, "started")
				continue
			}
			say(result, "hello")
			life(first, "completed")
		case how == "asks":
			say(`{"type":"control_request","request_id":"q1","request":{"subtype":"can_use_tool","tool_name":"Bash"}}`)
		case how == "wishes":
			say(`{"type":"control_request","request_id":"q2","request":{"subtype":"hook_callback"}}`)
		case how == "deaf":
			say(`{"type":"assistant"}`)
		case how == "empty":
			say(`{"type":"result","subtype":"success","result":"","is_error":false}`)
		case how == "fails":
			say(`{"type":"result","subtype":"error_max_turns","is_error":true}`)
		case how == "odd":
			for _, text := range []string{`{"type":7}`, `{"type":"result","usage":[]}`, `[]`, `{}`, `{"type":"command_lifecycle","state":{}}`, `{"type":"control_request","request":1}`, `{"type":"control_response","response":1}`, `{"type":"later","subtype":"x"}`} {
				say("%s", text)
			}
			say(result, "hello")
		}
	}
}

const otherSession = "11111111-2222-4333-8444-555555555555"

func bench(t *testing.T, how string) *enginetest.Bench {
	t.Helper()
	b := enginetest.New(t, enginetest.Subject{Open: Open, Engine: "claude", Command: enginetest.Fake(t, "rude "+how)})
	b.With(engine.OptionSettle, "300ms")
	return b
}

func TestTurns(t *testing.T) {
	for how, want := range map[string]string{
		"cost":   "hello",
		"untold": "hello",
		"early":  "by the way|hello",
		"flood":  "hello",
		"odd":    "hello",
		"empty":  "",
		"asks":   `{"request_id":"q1","response":{"behavior":"allow","updatedInput":{}},"subtype":"success"}`,
		"wishes": `{"error":"Berth knows no request hook_callback","request_id":"q2","subtype":"error"}`,
	} {
		t.Run(how, func(t *testing.T) {
			b := bench(t, how)
			e := b.Open(t)
			for turns := range 2 {
				var turn enginetest.Turn
				if err := e.Prompt(t.Context(), "hello", &turn); err != nil {
					t.Fatal(err)
				}
				if got := strings.Join(turn.Texts(), "|"); got != want {
					t.Errorf("got %q, want %q", got, want)
				}
				if how == "cost" { // it counts the whole session
					wantUsage := &protocol.Usage{InputTokens: 6, OutputTokens: 4, CostUSD: []float64{0.5, 0}[turns]}
					if diff := cmp.Diff(wantUsage, turn.Usage()); diff != "" {
						t.Errorf("usage (-want +got):\n%s", diff)
					}
				}
			}
			if how == "odd" && strings.Count(b.Log.String(), "not a") < 5 {
				t.Errorf("log %s", b.Log)
			}
		})
	}
}

func TestFails(t *testing.T) {
	if text := bench(t, "fails").Open(t).Fails(t, "hello", "").Text; text != "Claude Code failed: error_max_turns" {
		t.Errorf("text %q", text)
	}
	if text := bench(t, "swallow").Open(t).Fails(t, "hello", "").Text; !strings.Contains(text, "fake error 500") {
		t.Errorf("swallowed: %q", text)
	}
	b := bench(t, "gone")
	b.Config.SessionID = newUUID()
	b.Open(t).Fails(t, "hello", protocol.ClassStaleSession)
}

// TestBetween: what Claude Code says between two turns comes with the next answer,
// and is not taken for that.
func TestBetween(t *testing.T) {
	for text, want := range map[string]string{"hello": "by the way|hello", "fail": ""} {
		e := bench(t, "usual").Open(t)
		e.Ask(t, "hello", "hello")
		for _, line := range []string{
			`{"type":"result","subtype":"success","result":"by the way"}`, `{"type":"result","subtype":"success","result":""}`,
			`{"type":"result","subtype":"error_during_execution","is_error":true}`,
		} {
			e.Engine.(*Engine).line([]byte(line))
		}
		var turn enginetest.Turn
		err := e.Prompt(t.Context(), text, &turn)
		if got := strings.Join(turn.Texts(), "|"); got != want || (err != nil) != (text == "fail") {
			t.Errorf("%s: %v, answers %q, want %q", text, err, got, want)
		}
	}
}

// TestMoved: the session is the one that Claude Code names last.
func TestMoved(t *testing.T) {
	e := bench(t, "moved").Open(t)
	for range 2 {
		if got := e.Ask(t, "hello", "hello").ID(); got != otherSession {
			t.Errorf("session %q", got)
		}
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

// TestLost: a message that was handed over and of which nothing is heard again is
// a failure of the turn, after its answers.
func TestLost(t *testing.T) {
	b := bench(t, "lost")
	b.With(engine.OptionFirst, "500ms")
	e := b.Open(t)
	go func() {
		for !e.Engine.(engine.Steerer).Steer("more") {
			if t.Context().Err() != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	var turn enginetest.Turn
	err := e.Prompt(t.Context(), "hello", &turn)
	if err == nil || !strings.Contains(err.Error(), "no sign of life") || strings.Join(turn.Texts(), "|") != "hello" {
		t.Errorf("%v, answers %q", err, turn.Texts())
	}
}

// TestDeaf: one that does not stop is killed, and the error is not that of a turn
// after which another may come.
func TestDeaf(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	turn := enginetest.Turn{Accepting: func() { cancel(stopped) }}
	begun := time.Now()
	e := bench(t, "deaf").Open(t)
	if err := e.Prompt(ctx, "hello", &turn); err == nil || errors.Is(err, stopped) || time.Since(begun) > 10*time.Second {
		t.Errorf("%v after %v", err, time.Since(begun))
	}
	dead(t, e)
}

// dead fails the test if a killed engine takes a prompt.
func dead(t *testing.T, e *enginetest.Running) {
	t.Helper()
	for range 10 { // a wait that has two reasons to end takes either
		turn := enginetest.Turn{Accepting: func() { t.Error("a dead Claude Code accepts a prompt") }}
		if err := e.Prompt(t.Context(), "hello", &turn); err == nil {
			t.Errorf("a dead Claude Code answers %q", turn.Texts())
		}
	}
}

// TestStoppedBeforeItIsReady: what it has not read yet is not answered in the next
// turn.
func TestStoppedBeforeItIsReady(t *testing.T) {
	b := bench(t, "slow")
	e := b.Open(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	go func() {
		for !strings.Contains(b.Log.String(), "it has the first message") && t.Context().Err() == nil {
			time.Sleep(time.Millisecond)
		}
		cancel(stopped)
	}()
	if err := e.Prompt(ctx, "hello", new(enginetest.Turn)); err == nil || errors.Is(err, stopped) {
		t.Errorf("%v", err)
	}
	dead(t, e)
}

func TestStoppedBeforeItBegan(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	cancel(stopped)
	e := bench(t, "cost").Open(t)
	if err := e.Prompt(ctx, "hello", new(enginetest.Turn)); !errors.Is(err, stopped) || e.Engine.(*Engine).program != nil {
		t.Errorf("%v", err)
	}
	e.Ask(t, "hello", "hello")
}

// TestStopOfAQueuedMessage: what was handed over and not begun is stopped too.
func TestStopOfAQueuedMessage(t *testing.T) {
	b := enginetest.New(t, enginetest.Subject{Open: Open, Engine: "claude", Command: enginetest.Fake(t, "fake-claude")})
	e := b.Open(t)
	e.Ask(t, "say warm", "warm")
	const script = "stall\nsay one two three four"
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	go func() {
		if _, err := b.Model.Await(t.Context(), func(r fakemodel.Request) bool { return r.Text == script }); err != nil {
			t.Error(err)
		}
		if !e.Engine.(engine.Steerer).Steer(enginetest.Host("say queued")) {
			t.Error("it was not taken")
		}
		cancel(stopped)
	}()
	var turn enginetest.Turn
	if err := e.Prompt(ctx, enginetest.Host(script), &turn); err == nil || errors.Is(err, stopped) || len(turn.Texts()) > 0 {
		t.Errorf("%v, answers %q", err, turn.Texts())
	}
	dead(t, e)
}

// TestThousandTurns: they leave nothing behind.
func TestThousandTurns(t *testing.T) {
	e := bench(t, "early").Open(t)
	held := func() (goroutines, descriptors int) {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return runtime.NumGoroutine(), len(entries)
	}
	ask := func() {
		var turn enginetest.Turn
		if err := e.Prompt(t.Context(), "hello", &turn); err != nil || len(turn.Texts()) != 2 {
			t.Fatalf("%v, answers %q", err, turn.Texts())
		}
	}
	ask()
	goroutines, descriptors := held()
	for range 1000 {
		ask()
	}
	if g, d := held(); g > goroutines || d > descriptors {
		t.Errorf("%d goroutines and %d descriptors, before %d and %d", g, d, goroutines, descriptors)
	}
}

func TestOpen(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*enginetest.Bench)
		class  string
	}{
		"broken command":            {func(b *enginetest.Bench) { b.With(engine.OptionCommand, `"sh`) }, protocol.ClassInput},
		"no such program":           {func(b *enginetest.Bench) { b.With(engine.OptionCommand, "/nonexistent") }, protocol.ClassImage},
		"broken time":               {func(b *enginetest.Bench) { b.With(engine.OptionFirst, "soon") }, protocol.ClassInput},
		"no gateway":                {func(b *enginetest.Bench) { b.Config.Gateway = "" }, protocol.ClassInput},
		"session of another engine": {func(b *enginetest.Bench) { b.Config.SessionID = "ses_1" }, protocol.ClassStaleSession},
	} {
		b := bench(t, "cost")
		tt.change(b)
		_, err := Open(b.Config)
		if failure, ok := errors.AsType[*engine.Error](err); !ok || failure.Class != tt.class {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUUID(t *testing.T) {
	seen := make(map[string]bool)
	for range 1000 {
		id := newUUID()
		if !uuid.MatchString(id) || id[14] != '4' || seen[id] {
			t.Fatalf("%s", id)
		}
		seen[id] = true
	}
}

func FuzzDecode(f *testing.F) {
	for _, line := range []string{
		`{"type":"control_request","request_id":"r","request":{"subtype":"can_use_tool","input":{"command":"ls"}}}`,
		`{"type":"control_response","response":{"subtype":"success","request_id":"berth-hello"}}`,
		`{"duration_ms":1,"is_error":true,"errors":["No conversation found"],"subtype":"error_during_execution","type":"result","usage":{"input_tokens":1}}`,
		`{"type":"command_lifecycle","command_uuid":"u","state":"completed"}`,
		`{"type":"system","subtype":"api_retry","error_status":401}`,
		`{"type":"user","isReplay":true}`, `{"type":"stream_event","event":{}}`, `[]`, `null`, `{"type":null}`,
	} {
		f.Add([]byte(line))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		v, err := decode(line)
		if err != nil {
			return
		}
		// What follows takes anything.
		e := &Engine{ready: make(chan struct{}), turn: &turn{signs: make(chan struct{}, 1), step: make(chan struct{}), messages: map[string]bool{"u": true}, own: "u"}}
		if _, ok := v.(controlRequest); ok {
			return // it is answered
		}
		e.line(line)
		e.line(line)
		results, _, _ := e.take(e.turn)
		for _, r := range results {
			if r.failed() && r.said() == "" {
				t.Error("a failure without a word")
			}
		}
	})
}
