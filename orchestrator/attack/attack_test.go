package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

// The judge must see each breach, or its table is worth nothing.
func TestChangesAreSeen(t *testing.T) {
	for name, do := range map[string]func(dir string) error{
		"changed":  func(dir string) error { return os.WriteFile(filepath.Join(dir, "a"), []byte("B"), 0o644) },
		"removed":  func(dir string) error { return os.Remove(filepath.Join(dir, "a")) },
		"added":    func(dir string) error { return os.WriteFile(filepath.Join(dir, "b"), nil, 0o644) },
		"touched":  func(dir string) error { return os.Chtimes(filepath.Join(dir, "a"), time.Time{}, time.Unix(1, 0)) },
		"replaced": func(dir string) error { return os.Rename(filepath.Join(dir, "c"), filepath.Join(dir, "a")) },
		"linked":   func(dir string) error { return os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "l")) },
	} {
		t.Run(name, func(t *testing.T) {
			p := &play{dir: t.TempDir(), program: os.Args[0]}
			if err := p.place(); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"a", "c"} {
				if err := os.WriteFile(filepath.Join(p.canaries(), name), []byte("A"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			var err error
			if p.secrets, err = p.guarded(); err != nil {
				t.Fatal(err)
			}
			if got, err := p.secrets.changes(p); err != nil || len(got) > 0 {
				t.Fatalf("got %q, %v before anything happened", got, err)
			}
			if err := do(p.canaries()); err != nil {
				t.Fatal(err)
			}
			if got, err := p.secrets.changes(p); err != nil || len(got) == 0 {
				t.Errorf("got %q, %v, want a change", got, err)
			}
		})
	}
}

func TestSongIsHeard(t *testing.T) {
	p := &play{dir: t.TempDir(), program: os.Args[0]}
	if err := p.place(); err != nil {
		t.Fatal(err)
	}
	var err error
	if p.secrets, err = p.guarded(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(p.canaries(), "canary-0"))
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err := p.secrets.heard(p.dir, []byte(song)); err != nil || len(got) > 0 {
		t.Fatalf("got %q, %v before anything happened", got, err)
	}
	// At the far end of a hole, over the border of what is read at once, deep down.
	deep := filepath.Join(p.root(), strings.Repeat("d/", 300))
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	want := []string{filepath.Join(deep, "hole"), filepath.Join(deep, "border")}
	for path, at := range map[string]int64{want[0]: 1 << 35, want[1]: 1<<20 - 5} {
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		if path == want[1] {
			_, err = f.Write(make([]byte, at))
		}
		if _, e := f.WriteAt(text, at); err != nil || e != nil || f.Close() != nil {
			t.Fatal(err, e)
		}
	}
	if got, _, err := p.secrets.heard(p.dir, []byte(song)); err != nil || len(got) != len(want) {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
}

func TestVictimsAreAudited(t *testing.T) {
	ask := func(n string) berth.Message { return berth.Message{Text: "say answer-" + n} }
	answer := func(n string) berth.Message { return berth.Message{Bot: true, Text: "answer-" + n} }
	for _, c := range []struct {
		name string
		chat []berth.Message
		want int
	}{
		{"all is well", []berth.Message{ask("1"), answer("1"), ask("2"), answer("2")}, 0},
		{"lost", []berth.Message{ask("1"), answer("1")}, 1},
		{"not answered", []berth.Message{ask("1"), answer("1"), ask("2")}, 1},
		{"doubled", []berth.Message{ask("1"), answer("1"), ask("2"), answer("2"), answer("2")}, 1},
		{"forged", []berth.Message{ask("1"), answer("1"), ask("2"), answer("2"), {Bot: true, Text: "FORGED"}}, 1},
		{"spoken for", []berth.Message{ask("1"), answer("1"), ask("2"), answer("2"), {Text: "say x"}}, 1},
	} {
		if got := compare("family", []string{"answer-1", "answer-2"}, c.chat); len(got) != c.want {
			t.Errorf("%s: got %q, want %d faults", c.name, got, c.want)
		}
	}
}

func TestReportFails(t *testing.T) {
	const good = "write /: EROFS\nfiles\twrite to main's chat\trefused: no\nfiles\todd-pipe\tdone\n"
	refusals := []web.Refusal{{Target: "messages/odd-pipe.json", Reason: "not a regular file"}}
	for _, c := range []struct {
		name, text string
		want       int
	}{
		{"all is well", good, 0},
		{"written", good + "write /etc/passwd: done\n", 1},
		{"answered", good + "files\tbecome main\tdone\n", 1},
		{"found", good + "keys\thunt for keys in all files\tdone /root/key\n", 1},
		{"not told", good + "files\todd-long-x\tdone\n", 1},
	} {
		r := report{out: io.Discard, partial: true}
		r.read(c.text, refusals)
		failed := 0
		for _, row := range r.rows {
			if !row.ok {
				failed++
			}
		}
		if failed != c.want || (r.end(0) == nil) != (c.want == 0) {
			t.Errorf("%s: got %+v, want %d failed", c.name, r.rows, c.want)
		}
	}
	r := report{out: io.Discard}
	if r.read(good, nil); r.end(0) == nil {
		t.Error("a list that was not tried to its end passed")
	}
}
