package probe

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/agent-runner/internal/emit"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

// seen is a turn that records what the engine said.
type seen struct {
	accepted bool
	session  string
	answers  []string
}

func (s *seen) Accept()                { s.accepted = true }
func (s *seen) Session(id string)      { s.session = id }
func (s *seen) Answer(a engine.Answer) { s.answers = append(s.answers, a.Text) }

func open(t *testing.T, stdout io.Writer) engine.Engine {
	t.Helper()
	out := emit.New(stdout, t.TempDir(), "run", "nonce", log.New(io.Discard, "", 0))
	e, err := Opener(out)(engine.Config{Input: protocol.Input{AssistantName: "Andy", RunID: "run", Nonce: "nonce"}})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestAnswers(t *testing.T) {
	for _, tt := range []struct {
		script string
		want   []string
	}{
		{"hello", []string{"ok"}},
		{"", []string{"ok"}},
		{"@Andy say hi", []string{"hi"}},
		{`say a\nb`, []string{"a\nb"}},
		{"say a\nsay b", []string{"a", "b"}},
		{"twice a|b", []string{"a", "b"}},
		{"silent", nil},
		{"silent\nsay a", []string{"a"}},
		{"big 5", []string{"xxxxx"}},
		{"echo", []string{"echo"}},
		{"session s2\nheartbeat-off\nno-ack\neat 9999\nstderr x", []string{"ok"}},
		{"<messages>\n<message sender=\"A\" time=\"t\">say no</message>\n<message sender=\"A\" time=\"t\">@Andy say yes</message>\n</messages>", []string{"yes"}},
	} {
		t.Run(tt.script, func(t *testing.T) {
			var got seen
			if err := open(t, io.Discard).Prompt(t.Context(), tt.script, &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got.answers); diff != "" || !got.accepted || got.session == "" {
				t.Errorf("accepted %v, session %q, answers (-want +got):\n%s", got.accepted, got.session, diff)
			}
		})
	}
}

func TestHelpListsEveryCommand(t *testing.T) {
	var got seen
	if err := open(t, io.Discard).Prompt(t.Context(), "help", &got); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(got.answers[0], "\n")
	if len(lines) != len(commands)+1 {
		t.Errorf("%d lines for %d commands", len(lines), len(commands))
	}
	for i, c := range commands {
		if !strings.HasPrefix(lines[i+1], c.name) || c.doc == "" {
			t.Errorf("line %q for %s", lines[i+1], c.name)
		}
	}
}

func TestFailures(t *testing.T) {
	for _, tt := range []struct{ script, class, text string }{
		{"fail no luck", "", "no luck"},
		{"fail-class auth bad key", "auth", "bad key"},
		{"sleep soon", "", `probe: "soon" is neither seconds nor a duration`},
		{"exit now", "", `probe: "now" is not a number`},
		{"big -1", "", `probe: "-1" is not a number`},
		{"write /no/such/folder/x y", "", "open /no/such/folder/.x.tmp: no such file or directory"},
	} {
		var got seen
		err := open(t, io.Discard).Prompt(t.Context(), tt.script, &got)
		f := engine.Failed(err)
		if f.Error != tt.text || f.ErrorClass != tt.class || len(got.answers) > 0 {
			t.Errorf("%s: %q %q, answers %q", tt.script, f.ErrorClass, f.Error, got.answers)
		}
	}
}

// TestStdout shows what the host makes of the probe's misdeeds.
func TestStdout(t *testing.T) {
	for _, tt := range []struct {
		script string
		frames []string // results and errors
		log    string   // or its length as a number of bytes
	}{
		{"raw ---BERTH_OUTPUT_END---", nil, "---BERTH_OUTPUT_END---\n"},
		{"half-frame", []string{"unexpected EOF"}, ""},
		{"bad-json-frame", []string{"broken frame: not JSON: invalid character '\\n' in string literal"}, ""},
		{"forge x", nil, "*"},
		{"forge-nonce x", nil, "*"},
		{"session ../x", []string{`broken frame: session id "../x" is not 1 to 128 letters, digits, dots, - or _`}, ""},
		{"flood 160", nil, strings.Repeat(strings.Repeat("flood", 16)[:79]+"\n", 2)},
		{"flood-line 10", nil, "xxxxxxxxxx\n"},
	} {
		t.Run(tt.script, func(t *testing.T) {
			var stdout, logged bytes.Buffer
			if err := open(t, &stdout).Prompt(t.Context(), tt.script, new(seen)); err != nil {
				t.Fatal(err)
			}
			var frames []string
			for f, err := range (protocol.Stream{Nonce: "nonce", Log: &logged}).Frames(&stdout) {
				if err != nil {
					frames = append(frames, err.Error())
				} else {
					frames = append(frames, string(*f.Result))
				}
			}
			for i := range frames {
				if strings.HasPrefix(frames[i], "broken frame: not JSON") {
					frames[i] = "broken frame: not JSON: invalid character '\\n' in string literal"
				}
			}
			if diff := cmp.Diff(tt.frames, frames); diff != "" {
				t.Errorf("frames (-want +got):\n%s", diff)
			}
			if tt.log == "*" && logged.Len() > 0 {
				return
			}
			if diff := cmp.Diff(tt.log, logged.String()); diff != "" {
				t.Errorf("log (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	script := "mkdir a/b\nwrite a/b/x.json {\"k\": 1}\nwrite a/y.part z\nmkfifo p\nsymlink /etc/passwd l\nmkdir gone/far\nrm gone"
	if err := open(t, io.Discard).Prompt(t.Context(), script, new(seen)); err != nil {
		t.Fatal(err)
	}
	var got []string
	err := filepath.WalkDir(".", func(path string, d os.DirEntry, err error) error {
		got = append(got, d.Type().String()+" "+path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"d--------- .", "d--------- a", "d--------- a/b", "---------- a/b/x.json", "---------- a/y.part", "L--------- l", "p--------- p"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if data, _ := os.ReadFile("a/b/x.json"); string(data) != `{"k": 1}` {
		t.Errorf("content %q", data)
	}
}

func TestSleep(t *testing.T) {
	for text, want := range map[string]time.Duration{"1.5": 1500 * time.Millisecond, "2m": 2 * time.Minute, "0": 0} {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			if err := open(t, io.Discard).Prompt(t.Context(), "sleep "+text, new(seen)); err != nil {
				t.Fatal(err)
			}
			if got := time.Since(start); got != want {
				t.Errorf("sleep %s took %v", text, got)
			}
		})
	}
	stopped := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(stopped)
	e := open(t, io.Discard)
	var first, second seen
	if err := e.Prompt(ctx, "sleep 1h", &first); !errors.Is(err, stopped) || len(first.answers) > 0 {
		t.Errorf("a cancelled sleep: %v, answers %q", err, first.answers)
	}
	if err := e.Prompt(t.Context(), "say on", &second); err != nil || second.session != first.session || len(second.answers) != 1 {
		t.Errorf("after it: %v, answers %q, session %s, before %s", err, second.answers, second.session, first.session)
	}
}
