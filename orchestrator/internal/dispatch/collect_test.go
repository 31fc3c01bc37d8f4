package dispatch

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/orchestrator/internal/berth"
)

func isA(chat string) bool { return strings.HasPrefix(chat, "console:a") }

// What comes while a channel hands over its backlog wakes its group once, when all
// is there; other chats do not notice.
func TestCollect(t *testing.T) {
	play(t, func(w *world) {
		for _, folder := range []string{"a1", "a2", "b"} {
			w.add(folder, false)
		}
		check(w.t, w.Start(w.t.Context()))
		w.Collect(isA)
		w.say("a2", "1", "one")
		w.say("a1", "1", "one")
		w.say("a2", "2", "two")
		w.say("b", "1", "one")
		w.want("run b")
		time.Sleep(time.Hour)
		w.want()
		w.Collect(nil)
		synctest.Wait()
		slices.Sort(w.notes)
		w.want("run a1", "run a2")
		w.Collect(nil)
		w.want()
		w.say("a1", "2", "two")
		w.want("run a1")
	})
}

// Neither a start that falls into it nor a new group answers a part of it.
func TestCollectHoldsWhateverWakes(t *testing.T) {
	play(t, func(w *world) {
		w.add("a1", false)
		w.Collect(isA)
		w.say("a1", "1", "one")
		check(w.t, w.Start(w.t.Context()))
		w.want()
		g, _ := w.Group("a1")
		check(w.t, w.RemoveGroup(w.t.Context(), "a1"))
		check(w.t, w.AddGroup(w.t.Context(), g))
		w.want()
		w.Collect(isA) // once more changes nothing
		w.want()
		w.Collect(nil)
		w.want("run a1")
	})
}

// A message that was given the trigger afterwards wakes; one that comes again does
// not.
func TestEditWakes(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		check(w.t, w.Start(w.t.Context()))
		w.say("a", "1", "hello")
		w.want()
		m := w.say("a", "1", "@Andy hello")
		w.want("run a")
		if m.Seq != 1 {
			w.t.Errorf("got #%d, want the old place", m.Seq)
		}
		w.say("a", "1", "@Andy hello")
		w.say("a", "1", "hello")
		w.want()
	})
}

// What is kept wakes nobody, whatever it says, and is context for the next one.
func TestKeep(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		check(w.t, w.Start(w.t.Context()))
		check(w.t, w.Keep(w.t.Context(), berth.Message{ID: "1", ChatJID: "console:a", Text: "@Andy old news", Addressed: true, Wakes: true, Time: time.Now()}))
		w.want()
		check(w.t, w.Start(w.t.Context()))
		w.want()
		if err := w.Keep(w.t.Context(), berth.Message{ID: "1", ChatJID: "console:b", Text: "x"}); err == nil {
			w.t.Error("a chat that is not registered was stored")
		}
		w.say("a", "2", "@Andy hi")
		w.want("run a")
		all, err := w.db.MessagesAfter(w.t.Context(), "console:a", 0, 10)
		check(w.t, err)
		if len(all) != 2 || all[0].Text != "@Andy old news" || all[0].Wakes {
			w.t.Errorf("got %+v", all)
		}
	})
}
