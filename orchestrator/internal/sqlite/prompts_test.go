package sqlite

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/memory"
)

// What was committed is in the next prompt, whatever was asked for before.
func TestPromptFollowsEachChange(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	holds := func(folder string, want ...string) {
		t.Helper()
		for range 2 { // read, then remembered
			text, err := db.MemoryPrompt(ctx, folder)
			check(t, err)
			for _, fact := range []string{"tea", "coffee", "milk"} {
				if wanted := strings.Contains(strings.Join(want, " "), fact); strings.Contains(text, fact) != wanted {
					t.Errorf("%s: %q in the prompt: %t, want %t:\n%s", folder, fact, !wanted, wanted, text)
				}
			}
		}
	}
	holds("family")
	m, _, err := db.AddMemory(ctx, memory.Memory{Folder: "family", Fact: "They drink tea.", CreatedAt: time.Now()})
	check(t, err)
	holds("family", "tea")
	holds("work")
	_, _, err = db.AddMemory(ctx, memory.Memory{Folder: memory.Global, Fact: "There is milk.", CreatedAt: time.Now()})
	check(t, err)
	holds("family", "tea", "milk")
	holds("work", "milk")
	m.Fact = "They drink coffee."
	_, err = db.UpdateMemory(ctx, m)
	check(t, err)
	holds("family", "coffee", "milk")
	_, err = db.ForgetMemory(ctx, "family", m.ID, "")
	check(t, err)
	holds("family", "milk")
}

// A prompt that was read before a change and rendered after it is not kept.
func TestPromptOfBeforeAChangeIsNotKept(t *testing.T) {
	var p prompts
	text, err := p.get("family", func() (string, error) {
		p.forget()
		return "old", nil
	})
	diff(t, "the one who asked", []any{text, err}, []any{"old", nil})
	text, err = p.get("family", func() (string, error) { return "new", nil })
	diff(t, "the next one", []any{text, err}, []any{"new", nil})
	if _, err := p.get("work", func() (string, error) { return "", errors.New("no") }); err == nil {
		t.Error("an error is lost")
	}
	for i := range 10 * maxPrompts {
		_, _ = p.get(fmt.Sprint(i), func() (string, error) { return "", nil })
	}
	if len(p.texts) > maxPrompts {
		t.Errorf("%d are kept, want at most %d", len(p.texts), maxPrompts)
	}
}
