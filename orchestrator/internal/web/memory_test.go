package web

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"berth/orchestrator/internal/berth"
)

// shelf answers with what it was asked.
type shelf struct{ asked string }

func (s *shelf) Memories(_ context.Context, folder string) ([]Memory, error) {
	s.asked = fmt.Sprintf("ls %q", folder)
	return []Memory{{ID: 3, Fact: "likes tea"}}, nil
}

func (s *shelf) AddMemory(_ context.Context, m NewMemory) (Memory, error) {
	s.asked = fmt.Sprintf("add %q %q", m.Group, m.Fact)
	return Memory{ID: 4}, nil
}

func (s *shelf) ForgetMemory(_ context.Context, folder string, id int64) (Memory, error) {
	s.asked = fmt.Sprintf("forget %q %d", folder, id)
	return Memory{}, berth.Errorf(berth.NotFound, "there is no memory %d", id)
}

// What the client asks for arrives, whatever is in a folder's name.
func TestMemoryCalls(t *testing.T) {
	s := &shelf{}
	c, _, _ := serve(t, &backend{MemoryDesk: s})
	list, err := c.Memories(t.Context(), "a&b c")
	if len(list) != 1 || list[0].Fact != "likes tea" || err != nil || s.asked != `ls "a&b c"` {
		t.Errorf("%+v, %v, asked for %s", list, err, s.asked)
	}
	m, err := c.AddMemory(t.Context(), NewMemory{Group: "global", Fact: "x\ny"})
	if m.ID != 4 || err != nil || s.asked != `add "global" "x\ny"` {
		t.Errorf("%+v, %v, asked for %s", m, err, s.asked)
	}
	_, err = c.ForgetMemory(t.Context(), "a/b", 7)
	if known, ok := errors.AsType[*berth.Error](err); !ok || known.Kind != berth.NotFound || s.asked != `forget "a/b" 7` {
		t.Errorf("%v, asked for %s", err, s.asked)
	}
	if _, err := call[Memory](t.Context(), c, "DELETE", "/v1/memory/a/x", nil); err == nil {
		t.Error("an id that is no number was taken")
	}
}
