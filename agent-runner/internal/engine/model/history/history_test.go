package history

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/protocol"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func said(role llm.Role, text string) llm.Message {
	return llm.Message{Role: role, Parts: []llm.Part{{Text: text}}}
}

func calls(ids ...string) llm.Message {
	m := said(llm.Assistant, "I look")
	for _, id := range ids {
		m.Parts = append(m.Parts, llm.Part{Call: &llm.Call{ID: id, Name: "bash", Input: `{"command":"ls"}`}})
	}
	return m
}

func results(ids ...string) llm.Message {
	m := llm.Message{Role: llm.User}
	for _, id := range ids {
		m.Parts = append(m.Parts, llm.Part{Result: &llm.Result{CallID: id, Text: "of " + id}})
	}
	return m
}

// talk is a conversation with calls.
var talk = []llm.Message{
	said(llm.User, "one"), said(llm.Assistant, "two \u2028 \x00 ünï"),
	said(llm.User, "three"), calls("a", "b"), results("a", "b"), calls("c"), results("c"), said(llm.Assistant, "four"),
	said(llm.User, "five"), said(llm.Assistant, "six"),
}

// fault returns why messages are no conversation, or "".
func fault(messages []llm.Message) string {
	for i, m := range messages {
		if want := []llm.Role{llm.User, llm.Assistant}[i%2]; m.Role != want {
			return fmt.Sprintf("message %d is from %q", i, m.Role)
		}
		if len(m.Parts) == 0 {
			return fmt.Sprintf("message %d is empty", i)
		}
		var open []llm.Call
		if i > 0 {
			open = messages[i-1].Calls()
		}
		for j, p := range m.Parts {
			switch {
			case p.Call != nil && (m.Role != llm.Assistant || p.Call.ID == "" || p.Call.Name == ""):
				return fmt.Sprintf("message %d has a call that is none", i)
			case p.Result != nil && (j >= len(open) || open[j].ID != p.Result.CallID):
				return fmt.Sprintf("message %d has a result of nothing", i)
			case p.Result == nil && p.Call == nil && strings.TrimSpace(p.Text) == "":
				return fmt.Sprintf("message %d has an empty part", i)
			case p.Result == nil && j < len(open):
				return fmt.Sprintf("message %d leaves a call open", i)
			}
		}
		if len(open) > len(m.Parts) {
			return fmt.Sprintf("message %d leaves a call open", i)
		}
	}
	return ""
}

func write(t *testing.T, home string, messages []llm.Message) (id string) {
	t.Helper()
	s, err := New(home)
	check(t, err)
	for _, m := range messages {
		check(t, s.Add(m))
	}
	check(t, s.Sync())
	check(t, s.Close())
	return s.ID
}

func file(home, id string) string { return filepath.Join(home, folder, id+".jsonl") }

func TestResume(t *testing.T) {
	home := t.TempDir()
	id := write(t, home, talk)
	s, err := Resume(home, id)
	check(t, err)
	if diff := cmp.Diff(talk, s.Messages); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	check(t, s.Add(said(llm.User, "seven")))
	check(t, s.Close())
	s, err = Resume(home, id)
	check(t, err)
	if n := len(s.Messages); n != len(talk)+1 {
		t.Errorf("%d messages", n)
	}
	check(t, s.Close())
}

// A kill may leave any part of the file. What comes after it is whole again.
func TestKilledAtAnyByte(t *testing.T) {
	home := t.TempDir()
	id := write(t, home, talk)
	whole, err := os.ReadFile(file(home, id))
	check(t, err)
	for n := range len(whole) + 1 {
		check(t, os.WriteFile(file(home, id), whole[:n], 0o600))
		s, err := Resume(home, id)
		check(t, err)
		complete := bytes.Count(whole[:n], []byte("}]}")) // lines
		if got := len(s.Messages); got != min(complete, len(talk)) {
			t.Fatalf("%d messages after %d bytes, want %d", got, n, complete)
		}
		if why := fault(s.Messages); why != "" {
			t.Fatalf("after %d bytes: %s", n, why)
		}
		check(t, s.Add(said(llm.User, "more")))
		check(t, s.Add(said(llm.Assistant, "yes")))
		want := s.Messages
		check(t, s.Close())
		s, err = Resume(home, id)
		check(t, err)
		if diff := cmp.Diff(want, s.Messages); diff != "" {
			t.Fatalf("after %d bytes (-want +got):\n%s", n, diff)
		}
		if why := fault(s.Messages); why != "" {
			t.Fatalf("after %d bytes and more: %s", n, why)
		}
		check(t, s.Close())
	}
}

func TestOpenCallsAreClosed(t *testing.T) {
	home := t.TempDir()
	id := write(t, home, []llm.Message{said(llm.User, "go"), calls("a", "b")})
	s, err := Resume(home, id)
	check(t, err)
	check(t, s.Add(said(llm.User, "and?")))
	want := []llm.Part{
		{Result: &llm.Result{CallID: "a", Text: interrupted, Failed: true}},
		{Result: &llm.Result{CallID: "b", Text: interrupted, Failed: true}},
		{Text: "and?"},
	}
	if diff := cmp.Diff(want, s.Messages[2].Parts); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	check(t, s.Close())
}

func TestFold(t *testing.T) {
	own := llm.Message{Role: llm.Assistant, Parts: []llm.Part{{Own: json.RawMessage(`{}`)}, {Text: "x"}}}
	for _, tt := range []struct {
		name string
		add  []llm.Message
		want []llm.Message
	}{
		{"begins in the middle", []llm.Message{said(llm.Assistant, "x"), results("a"), said(llm.User, "y")}, []llm.Message{said(llm.User, "y")}},
		{"two of a kind", []llm.Message{said(llm.User, "a"), said(llm.User, "b"), said(llm.Assistant, "c"), said(llm.Assistant, "d")},
			[]llm.Message{{Role: llm.User, Parts: []llm.Part{{Text: "a"}, {Text: "b"}}}, {Role: llm.Assistant, Parts: []llm.Part{{Text: "c"}, {Text: "d"}}}}},
		{"empty ones", []llm.Message{said(llm.User, " \n"), said(llm.User, "a"), said(llm.Assistant, ""), {Role: llm.Assistant}, {Role: "system"}, {}}, []llm.Message{said(llm.User, "a")}},
		{"a call twice", []llm.Message{said(llm.User, "a"), calls("x", "x"), results("x")}, []llm.Message{said(llm.User, "a"), calls("x"), results("x")}},
		{"a result too many", []llm.Message{said(llm.User, "a"), calls("x"), results("x", "y")}, []llm.Message{said(llm.User, "a"), calls("x"), results("x")}},
		{"the provider's own", []llm.Message{said(llm.User, "a"), own}, []llm.Message{said(llm.User, "a"), own}},
	} {
		var got []llm.Message
		for _, m := range tt.add {
			got = fold(got, m)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// Of very many prompts that nobody answered, the last ones count.
func TestManyPrompts(t *testing.T) {
	all := []llm.Message{said(llm.User, "go"), calls("a"), results("a")}
	for i := range 3 * maxParts {
		all = fold(all, said(llm.User, fmt.Sprint(i)))
	}
	last := all[2].Parts
	if n := len(last); n != 2*maxParts || last[0].Result == nil || last[n-1].Text != fmt.Sprint(3*maxParts-1) || fault(all) != "" {
		t.Errorf("%d parts, from %+v to %+v: %s", n, last[0], last[n-1], fault(all))
	}
}

func TestReplace(t *testing.T) {
	home := t.TempDir()
	s, err := New(home)
	check(t, err)
	check(t, s.Replace(talk[:2])) // before there is a file
	for _, m := range talk[2:] {
		check(t, s.Add(m))
	}
	check(t, s.Replace(talk[8:]))
	check(t, s.Add(said(llm.User, "more")))
	check(t, s.Close())
	s, err = Resume(home, s.ID)
	check(t, err)
	if diff := cmp.Diff(append(talk[8:10:10], said(llm.User, "more")), s.Messages); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	check(t, s.Close())
}

func stale(err error) bool {
	e, ok := errors.AsType[*engine.Error](err)
	return ok && e.Class == protocol.ClassStaleSession
}

// What tools can put in the file's place leads nowhere and blocks nobody.
func TestHostileFile(t *testing.T) {
	home := t.TempDir()
	id := write(t, home, talk)
	outside := filepath.Join(t.TempDir(), "x.jsonl")
	check(t, os.WriteFile(outside, []byte(`{"role":"user","parts":[{"text":"outside"}]}`), 0o600))
	for name, put := range map[string]func(path string) error{
		"pipe":        func(path string) error { return unix.Mkfifo(path, 0o600) },
		"link":        func(path string) error { return os.Symlink(outside, path) },
		"link inside": func(path string) error { return os.Symlink("other.jsonl", path) },
		"folder":      func(path string) error { return os.Mkdir(path, 0o700) },
	} {
		check(t, os.RemoveAll(file(home, id)))
		check(t, put(file(home, id)))
		if s, err := Resume(home, id); err == nil {
			t.Errorf("%s: read %v", name, s.Messages)
			check(t, s.Close())
		}
	}
	check(t, os.RemoveAll(filepath.Join(home, folder)))
	check(t, os.Symlink(filepath.Dir(outside), filepath.Join(home, folder)))
	if s, err := Resume(home, "x"); err == nil {
		t.Errorf("a linked folder: read %v", s.Messages)
	}
	for _, id := range []string{"", ".", "..", "../x", "/etc/passwd", strings.Repeat("a", 200), "nothing"} {
		check(t, os.RemoveAll(filepath.Join(home, folder)))
		if _, err := Resume(home, id); !stale(err) {
			t.Errorf("session %q: %v", id, err)
		}
	}
}

// Of a file that grew too large, the end counts, and it does not stay so large.
func TestHugeFile(t *testing.T) {
	home := t.TempDir()
	id := write(t, home, nil)
	check(t, os.MkdirAll(filepath.Join(home, folder), 0o700))
	f, err := os.Create(file(home, id))
	check(t, err)
	line, err := protocol.Marshal(said(llm.User, strings.Repeat("x", 50_000)))
	check(t, err)
	reply, err := protocol.Marshal(said(llm.Assistant, strings.Repeat("y", 50_000)))
	check(t, err)
	pair := append(append(line, '\n'), append(reply, '\n')...)
	for n := 0; n < 60<<20; n += len(pair) {
		_, err := f.Write(pair)
		check(t, err)
	}
	check(t, f.Close())
	began := time.Now()
	s, err := Resume(home, id)
	check(t, err)
	t.Logf("took %v", time.Since(began))
	if n := len(s.Messages); n < 100 || n > MaxFile/50_000 || fault(s.Messages) != "" {
		t.Errorf("%d messages: %s", n, fault(s.Messages))
	}
	check(t, s.Close())
	info, err := os.Stat(file(home, id))
	check(t, err)
	if info.Size() > MaxFile {
		t.Errorf("it still has %d bytes", info.Size())
	}
}

func TestSmallThings(t *testing.T) {
	var data bytes.Buffer
	for range 50_000 {
		data.WriteString(`{"role":"user","parts":[{"text":"a"}]}` + "\n" + `{"role":"assistant","parts":[{"text":"b"}]}` + "\n")
	}
	data.WriteString(strings.Repeat(`{"role":"user","parts":[{"text":"c"},{"text":"c"}]}`+"\n", 10_000))
	data.WriteString(strings.Repeat("z", maxLine+10) + "\n")
	messages, err := decode(&data, false)
	check(t, err)
	if n := len(messages); n > 2*maxMessages || n < maxMessages-1 || fault(messages) != "" {
		t.Errorf("%d messages: %s", n, fault(messages))
	}
	if n := len(messages[len(messages)-1].Parts); n > 2*maxParts {
		t.Errorf("%d parts", n)
	}
}

func TestPrune(t *testing.T) {
	home := t.TempDir()
	id := write(t, home, talk)
	old := time.Now().Add(-time.Hour)
	for i := range maxSessions + 20 {
		path := filepath.Join(home, folder, fmt.Sprintf("old%d.jsonl", i))
		check(t, os.WriteFile(path, nil, 0o600))
		check(t, os.Chtimes(path, old, old))
	}
	s, err := Resume(home, id)
	check(t, err)
	check(t, s.Close())
	entries, err := os.ReadDir(filepath.Join(home, folder))
	check(t, err)
	if len(entries) != maxSessions {
		t.Errorf("%d sessions are left", len(entries))
	}
	if _, err := os.Stat(file(home, id)); err != nil {
		t.Error(err)
	}
}

func FuzzDecode(f *testing.F) {
	var whole bytes.Buffer
	for _, m := range talk {
		line, err := protocol.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		whole.Write(append([]byte{'\n'}, line...))
	}
	f.Add(whole.Bytes(), false)
	f.Add(whole.Bytes()[20:], true)
	f.Add([]byte(`{"role":"assistant","parts":[{"call":{"id":"a","name":"b","input":"c"}}]}`), false)
	f.Add([]byte("{\"role\":\"user\",\"parts\":[{\"text\":\"a\"}]}\n{\"role\":\"assistant\",\"parts\":[{\"call\":{\"id\":\"a\",\"name\":\"b\",\"input\":\"c\"}}]}\n{\"role\":\"assistant\",\"parts\":[{\"text\":\"x\"}]}"), false)
	f.Add([]byte("null\n[]\n{\"role\":\"user\",\"parts\":[null,{\"result\":{}}]}\n\x00"), false)
	f.Fuzz(func(t *testing.T, data []byte, partial bool) {
		messages, err := decode(bytes.NewReader(data), partial)
		if err != nil {
			t.Fatal(err)
		}
		// A session whose calls are open at the end gets a prompt next.
		messages = fold(messages, said(llm.User, "next"))
		if why := fault(messages); why != "" {
			t.Fatalf("%s\n%+v", why, messages)
		}
		// What was read once is written and read again as it is.
		var again []llm.Message
		for _, m := range messages {
			line, err := protocol.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			var back llm.Message
			if err := json.Unmarshal(line, &back); err != nil {
				t.Fatal(err)
			}
			again = fold(again, back)
		}
		if diff := cmp.Diff(messages, again); diff != "" {
			t.Fatalf("(-first +again):\n%s", diff)
		}
	})
}
