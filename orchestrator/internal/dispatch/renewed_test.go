package dispatch

import (
	"context"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/queue"
)

// What a killed daemon was told by /new, the next one knows of the run that it
// adopts: it is given nothing more.
func TestAdoptedRunOfAnOldSessionCloses(t *testing.T) {
	for _, renewed := range []bool{true, false} {
		play(t, func(w *world) {
			w.runs = resting{w}
			w.add("family", false)
			w.say("family", "1", "work")
			w.live("family", "r1")
			if renewed {
				check(w.t, w.db.DropSessions(w.t.Context(), "family"))
			}
			check(w.t, w.Start(w.t.Context()))
			if !renewed {
				w.want("adopt r1")
				time.Sleep(time.Minute)
				w.want()
				return
			}
			w.want("adopt r1", "closed family: the next message begins a new session", "run family")
		})
	}
}

// resting are runs that are idle when they are adopted.
type resting struct{ *world }

func (r resting) Adopt(ctx context.Context, s *queue.Slot, g berth.Group, run berth.Run, _ string, taken func()) queue.Result {
	r.note("adopt %s", run.ID)
	taken()
	s.Idle()
	select {
	case <-s.Closing():
		r.note("closed %s: %s", g.Folder, s.Reason())
	case <-ctx.Done():
	}
	return queue.Result{}
}

// The tasks of a group that is removed stay: one that is due meanwhile is paused, and
// the others go on when the folder has the same chat again, and not with another.
func TestTasksOfAFolderThatIsAddedAgain(t *testing.T) {
	for _, chat := range []string{"console:a", "1203@g.us"} {
		play(t, func(w *world) {
			w.add("a", true)
			w.schedule(takes(time.Second))
			w.task("a", "often", nil)
			w.task("a", "seldom", func(t *berth.Task) { t.Value = "3600000" })
			check(w.t, w.RemoveGroup(w.t.Context(), "a"))
			time.Sleep(30 * time.Minute)
			check(w.t, w.AddGroup(w.t.Context(), berth.Group{JID: chat, Folder: "a", Name: "a", AddedAt: time.Now()}))
			time.Sleep(time.Hour)
			want, status := []string{"a/seldom"}, berth.TaskActive
			if chat != "console:a" {
				want, status = nil, berth.TaskPaused
			}
			w.want(want...)
			for id, want := range map[string]berth.TaskStatus{"often": berth.TaskPaused, "seldom": status} {
				if got, err := w.db.Task(w.t.Context(), "a", id); err != nil || got.Status != want {
					t.Errorf("%s: %s is %s, %v", chat, id, got.Status, err)
				}
			}
		})
	}
}
