package skills

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestAbout(t *testing.T) {
	for text, want := range map[string]string{
		"---\nname: cook\ndescription: How to cook.\n---\nBoil it.":                 "How to cook.",
		"---\ndescription: \"How: to \\\"cook\\\"\"\nname: x\n---\n":                `How: to "cook"`,
		"---\ndescription: 'Ann''s way'\n---\n":                                     "Ann's way",
		"---\ndescription: >-\n  How to\n  cook.\n\n  Well.\nname: x\n---\n":        "How to cook. Well.",
		"---\ndescription: |\n  How to\n  cook.\n---\nBoil it.":                     "How to cook.",
		"---\ndescription: How to\n  cook.\nlicense: MIT\n---\n":                    "How to cook.",
		"\ufeff---\r\nname: x\r\ndescription: How to cook.\r\n---\r\n":              "How to cook.",
		"---\nname: x\nmeta:\n  description: not this\n---\n\n# Cooking\nBoil it.":  "Cooking",
		"---\nname: x\n---\ndescription: of something else":                         "description: of something else",
		"\n\n## Cooking\nBoil it.":                                                  "Cooking",
		"---\ndescription: no end of it":                                            "no end of it",
		"---\ndescription:\n---\n# Cooking":                                         "Cooking",
		"---\ndescription: a\u202eb\x1b[31mc\u2028# d\x00\xff\n---\n":               "ab[31mc # d",
		"---\n" + strings.Repeat("x: y\n", 100_000) + "description: too far\n---\n": "",
		"":                 "",
		"---":              "",
		"---\ndescription": "",
	} {
		if got := about(text[:min(len(text), maxRead)]); got != want {
			t.Errorf("%.60q: %q, want %q", text, got, want)
		}
	}
	long := about("---\ndescription: " + strings.Repeat("ü", 1000) + "\n---\n")
	if len(long) > maxAbout || !utf8.ValidString(long) || !strings.HasSuffix(long, "ü…") {
		t.Errorf("%d bytes: %s", len(long), long)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestFind: what is there is listed, and nothing that a hostile folder has in its
// place.
func TestFind(t *testing.T) {
	base, other := t.TempDir(), t.TempDir()
	dir := filepath.Join(base, Place)
	write(t, filepath.Join(dir, "b", fileName), "# Bake")
	write(t, filepath.Join(dir, "a", fileName), "---\ndescription: Abide.\n---")
	write(t, filepath.Join(dir, "README.md"), "no skill")
	write(t, filepath.Join(dir, "empty", "NOTES.md"), "no skill")
	write(t, filepath.Join(dir, "odd\n# Memory", fileName), "# A line of its own")
	write(t, filepath.Join(other, "far", fileName), "# Elsewhere")
	for link, to := range map[string]string{
		filepath.Join(dir, "linked"):           filepath.Join(other, "far"),
		filepath.Join(dir, "empty", fileName):  "/proc/self/environ",
		filepath.Join(dir, "looped"):           "looped",
		filepath.Join(dir, "linked-up"):        ".",
		filepath.Join(dir, "linked-beside"):    "a",
		filepath.Join(dir, "beside", fileName): "../a/" + fileName,
	} {
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "pipe"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "pipe", fileName), 0o644); err != nil {
		t.Fatal(err)
	}
	want := []Skill{{filepath.Join(dir, "a", fileName), "Abide."}, {filepath.Join(dir, "b", fileName), "Bake"}}
	if diff := cmp.Diff(want, Find(base)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	piped, linked := t.TempDir(), t.TempDir()
	for _, base := range []string{piped, linked} {
		if err := os.Mkdir(filepath.Join(base, ".claude"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(piped, Place), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, filepath.Join(linked, Place)); err != nil {
		t.Fatal(err)
	}
	for _, none := range []string{piped, linked, other, filepath.Join(other, "missing"), ""} {
		if got := Find(none); len(got) > 0 {
			t.Errorf("in %q: %+v", none, got)
		}
	}
}

func TestShare(t *testing.T) {
	base := t.TempDir()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	other := filepath.Join(base, ".agents/skills")
	check(Share(base))
	if _, err := os.Lstat(filepath.Dir(other)); err == nil {
		t.Error("a place for nothing")
	}
	write(t, filepath.Join(base, Place, "a", fileName), "# Bake")
	for range 2 {
		check(Share(base))
		if text, err := os.ReadFile(filepath.Join(other, "a", fileName)); err != nil || string(text) != "# Bake" {
			t.Errorf("%q, %v", text, err)
		}
	}
	// What the group has made of the name stays.
	check(os.Remove(other))
	write(t, other, "mine")
	check(Share(base))
	if text, err := os.ReadFile(other); err != nil || string(text) != "mine" {
		t.Errorf("%q, %v", text, err)
	}
	check(os.RemoveAll(filepath.Dir(other)))
	write(t, filepath.Dir(other), "mine")
	if err := Share(base); err == nil {
		t.Error("nobody is told of what is in the way")
	}
}

func TestFindIsBounded(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, Place)
	for i := range 2 * maxSkills {
		write(t, filepath.Join(dir, fmt.Sprintf("s%03d", i), fileName), "# Skill")
	}
	write(t, filepath.Join(dir, "huge", fileName), strings.Repeat("x", 1<<20))
	got := Find(base)
	if len(got) != maxSkills || filepath.Base(filepath.Dir(got[0].File)) != "huge" || len(got[0].About) > maxAbout {
		t.Errorf("%d skills, the first %.200v", len(got), got[0])
	}
}

// FuzzAbout: whatever a skill says about itself is one line that can be seen.
func FuzzAbout(f *testing.F) {
	for _, seed := range []string{
		"---\nname: cook\ndescription: How to cook.\n---\nBoil it.", "---\ndescription: >\n a\n b\n---", "---\ndescription: \"\\u202e\\n# x\"\n---", "---\ndescription: 'a\n---",
		"# x", "---\n---\n---", "\ufeff", "---\ndescription: |2-\n", "---\ndescription: \"\n\n\n", "---\r\ndescription:\r\n\t\r\n",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got := about(text)
		if len(got) > maxAbout || !utf8.ValidString(got) || strings.ContainsAny(got, "\n\r\v\f\u0085\u2028\u2029\x1b\x00\u202e") || got != strings.TrimSpace(got) {
			t.Errorf("%q became %q", text, got)
		}
	})
}
