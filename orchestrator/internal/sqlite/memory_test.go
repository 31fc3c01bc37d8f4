package sqlite

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/memory"
)

func fact(folder, text, origin string) memory.Memory {
	return memory.Memory{Folder: folder, Fact: text, Source: "family", CreatedAt: monday, Origin: origin}
}

func remember(t *testing.T, db *DB, m memory.Memory) memory.Memory {
	t.Helper()
	out, known, err := db.AddMemory(t.Context(), m)
	if must(t, out, err); known {
		t.Errorf("%q was known", m.Fact)
	}
	return out
}

func facts(t *testing.T, db *DB, folder string) (out []string) {
	t.Helper()
	list, err := db.Memories(t.Context(), folder)
	for _, m := range must(t, list, err) {
		out = append(out, fmt.Sprint(m.ID, " ", m.Fact))
	}
	return out
}

// What goes in comes out, also after a restart; two spellings are one fact.
func TestMemoryRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "messages.db")
	db, err := Open(t.Context(), path, func(string, bool) {})
	if err != nil {
		t.Fatal(err)
	}
	got := remember(t, db, fact("family", "  Likes TEA ", "ipc/1"))
	want := memory.Memory{ID: 1, Folder: "family", Fact: "Likes TEA", Source: "family", CreatedAt: monday, UpdatedAt: monday, Origin: "ipc/1"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	again, known, err := db.AddMemory(t.Context(), fact("family", "LIKES\ttea", "ipc/2"))
	if err != nil || !known || again.ID != 1 || again.Fact != "Likes TEA" {
		t.Errorf("%+v, %v, %v", again, known, err)
	}
	// The request of before, again after a crash, has the answer of before.
	again, known, err = db.AddMemory(t.Context(), fact("family", "  Likes TEA ", "ipc/1"))
	if err != nil || known || again.ID != 1 {
		t.Errorf("%+v, %v, %v", again, known, err)
	}
	remember(t, db, fact("work", "likes tea", ""))
	remember(t, db, fact(memory.Global, "likes tea", ""))
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if db, err = Open(t.Context(), path, func(string, bool) {}); err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, folder := range []string{"family", "work", memory.Global} {
		if got := facts(t, db, folder); len(got) != 1 || !strings.HasPrefix(got[0], "1 ") {
			t.Errorf("%s: %q", folder, got)
		}
	}
	prompt, err := db.MemoryPrompt(t.Context(), "family")
	if must(t, prompt, err); strings.Count(prompt, "Likes TEA") != 1 || strings.Count(prompt, "likes tea") != 1 {
		t.Errorf("prompt %s", prompt)
	}
	if prompt, err = db.MemoryPrompt(t.Context(), "other"); err != nil || strings.Contains(prompt, "TEA") {
		t.Errorf("another group is told %s, %v", prompt, err)
	}
}

// B-MEM-2, B-MEM-3: an update to what the memory says already is no duplicate of
// itself.
func TestMemoryChanges(t *testing.T) {
	db := open(t)
	remember(t, db, fact("family", "one", ""))
	remember(t, db, fact("family", "two", ""))
	got, err := db.UpdateMemory(t.Context(), memory.Memory{Folder: "family", ID: 1, Fact: " ONE\n", UpdatedAt: monday.AddDate(0, 0, 1)})
	if must(t, got, err); got.Fact != "ONE" || !got.UpdatedAt.After(got.CreatedAt) || got.Source != "family" {
		t.Errorf("%+v", got)
	}
	_, err = db.UpdateMemory(t.Context(), memory.Memory{Folder: "family", ID: 1, Fact: "Two"})
	wantKind(t, err, berth.Conflict)
	for _, m := range []memory.Memory{{Folder: "family", ID: 9, Fact: "x"}, {Folder: "work", ID: 1, Fact: "x"}} {
		_, err = db.UpdateMemory(t.Context(), m)
		wantKind(t, err, berth.NotFound)
	}
	_, err = db.UpdateMemory(t.Context(), memory.Memory{Folder: "family", ID: 1, Fact: strings.Repeat("x", 1<<20)})
	wantKind(t, err, berth.Invalid)
	_, _, err = db.AddMemory(t.Context(), fact("family", "\x00 \n", ""))
	wantKind(t, err, berth.Invalid)

	_, err = db.ForgetMemory(t.Context(), "work", 2, "")
	wantKind(t, err, berth.NotFound)
	got, err = db.ForgetMemory(t.Context(), "family", 2, "ipc/3")
	if must(t, got, err); got.Fact != "two" {
		t.Errorf("%+v", got)
	}
	got, err = db.ForgetMemory(t.Context(), "family", 2, "ipc/3") // the same request, after a crash
	if must(t, got, err); got.ID != 2 {
		t.Errorf("%+v", got)
	}
	_, err = db.ForgetMemory(t.Context(), "family", 2, "ipc/4")
	wantKind(t, err, berth.NotFound)
	_, err = db.UpdateMemory(t.Context(), memory.Memory{Folder: "family", ID: 2, Fact: "x"})
	wantKind(t, err, berth.NotFound)
	// What was forgotten can be remembered again, under another id.
	if got := remember(t, db, fact("family", "two", "")); got.ID != 3 {
		t.Errorf("%+v", got)
	}
	if d := cmp.Diff([]string{"1 ONE", "3 two"}, facts(t, db, "family")); d != "" {
		t.Error(d)
	}
}

// A group cannot fill the store, nor by remembering and forgetting.
func TestMemoryIsBounded(t *testing.T) {
	db := open(t)
	var wg sync.WaitGroup
	for i := range memory.MaxFacts {
		wg.Go(func() {
			if _, known, err := db.AddMemory(t.Context(), fact("family", fmt.Sprint("fact ", i), "")); known || err != nil {
				t.Errorf("%v, %v", known, err)
			}
		})
	}
	wg.Wait()
	_, _, err := db.AddMemory(t.Context(), fact("family", "one more", ""))
	wantKind(t, err, berth.Conflict)
	remember(t, db, fact("work", "one more", ""))
	for i := range keptIDs + 20 {
		id := int64(memory.MaxFacts + i)
		_, err := db.ForgetMemory(t.Context(), "family", id, "")
		must(t, 0, err)
		if got := remember(t, db, fact("family", fmt.Sprint("another ", i), "")); got.ID != id+1 {
			t.Fatalf("%+v", got)
		}
	}
	var rows int
	if err := db.read.QueryRow(`SELECT count(*) FROM memory WHERE group_folder = 'family'`).Scan(&rows); err != nil || rows > memory.MaxFacts+keptIDs+1 {
		t.Errorf("%d rows, %v", rows, err)
	}
}
