package claude

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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
	var first string
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
		case m.Type == "control_request" && m.Request.Subtype == "initialize":
			say(`{"type":"control_response","response":{"subtype":"success","request_id":%q}}`, m.RequestID)
			say(`{"type":"control_response","response":{"subtype":"success","request_id":%q}}`, m.RequestID) // again
		case m.Type == "control_response":
			say(result, string(m.Response))
		case m.Type != "user":
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

// TestDeaf: one that does not stop is killed.
func TestDeaf(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	turn := enginetest.Turn{Accepting: func() { cancel(stopped) }}
	begun := time.Now()
	if err := bench(t, "deaf").Open(t).Prompt(ctx, "hello", &turn); !errors.Is(err, stopped) || time.Since(begun) > 10*time.Second {
		t.Errorf("%v after %v", err, time.Since(begun))
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
