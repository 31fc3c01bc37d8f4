package dispatch

import (
	"errors"
	"slices"
	"testing"

	"berth/orchestrator/internal/berth"
)

// Whoever shows the groups hears of each change when it can be read, and of
// nothing else.
func TestGroupsChanged(t *testing.T) {
	play(t, func(w *world) {
		var seen []string
		w.changed = func() {
			names := ""
			for _, g := range w.Groups() {
				names += g.Name + " "
			}
			seen = append(seen, names)
		}
		ctx := w.t.Context()
		check(w.t, w.AddGroup(ctx, berth.Group{JID: "console:a", Name: "a", Folder: "a"}))
		if w.AddGroup(ctx, berth.Group{JID: "console:a", Name: "b", Folder: "a"}) == nil {
			w.t.Error("a group was registered twice")
		}
		rename := func(g berth.Group) (berth.Group, error) {
			g.Name = "c"
			return g, nil
		}
		_, err := w.UpdateGroup(ctx, "a", rename)
		check(w.t, err)
		if _, err := w.UpdateGroup(ctx, "a", func(g berth.Group) (berth.Group, error) { return g, errors.New("no") }); err == nil {
			w.t.Error("a change that failed passes for one")
		}
		check(w.t, w.RemoveGroup(ctx, "a"))
		if want := []string{"a ", "c ", ""}; !slices.Equal(seen, want) {
			w.t.Errorf("got %q, want %q", seen, want)
		}
	})
}
