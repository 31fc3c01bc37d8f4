package dispatch

import (
	"errors"
	"sync"
	"testing"

	"berth/orchestrator/internal/berth"
)

// A change counts from the next message on, and after a restart.
func TestUpdateGroup(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		check(w.t, w.Start(w.t.Context()))
		w.say("a", "1", "hi")
		w.want()
		quiet := func(g berth.Group) (berth.Group, error) {
			g.RequiresTrigger = false
			return g, nil
		}
		g, err := w.UpdateGroup(w.t.Context(), "a", quiet)
		check(w.t, err)
		if g.RequiresTrigger {
			w.t.Errorf("got %+v, want the new group", g)
		}
		w.say("a", "2", "hi")
		w.want("run a")
		stored, err := w.db.Groups(w.t.Context())
		check(w.t, err)
		if stored[0].RequiresTrigger {
			w.t.Errorf("stored is %+v", stored[0])
		}

		no := errors.New("no")
		_, err = w.UpdateGroup(w.t.Context(), "a", func(g berth.Group) (berth.Group, error) { g.Name = "x"; return g, no })
		if known, _ := w.Group("a"); !errors.Is(err, no) || known.Name == "x" {
			w.t.Errorf("got %v and %+v, want nothing changed", err, known)
		}
		_, err = w.UpdateGroup(w.t.Context(), "none", quiet)
		if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != berth.NotFound {
			w.t.Errorf("got %v, want berth.NotFound", err)
		}
	})
}

// What the daemon knows is what is stored, however changes meet.
func TestUpdateGroupAtTheSameTime(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				_, err := w.UpdateGroup(w.t.Context(), "a", func(g berth.Group) (berth.Group, error) {
					g.Container.Pids++
					return g, nil
				})
				check(w.t, err)
			})
		}
		wg.Wait()
		if g, _ := w.Group("a"); g.Container.Pids != 10 {
			w.t.Errorf("got %d changes, want 10", g.Container.Pids)
		}
	})
}
