package ipc

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

// again carries a request out as after a crash before its file was removed, and
// returns the answer.
func (w *town) again(as, file, text string) answer {
	w.t.Helper()
	box := w.boxes[as]
	check(w.t, os.WriteFile(filepath.Join(box.dir, "taken", file), []byte(strings.Replace(text, "{", `{"requestId":"again",`, 1)), 0o600))
	if _, ok := box.box.carryOut(w.t.Context(), file); !ok {
		w.t.Errorf("%s was not carried out", text)
	}
	return box.reply("again")
}

// A request about a task that comes again, since the daemon was killed before it
// was answered, is told what became of it, and does nothing more, whatever happened
// in between.
func TestRepeatedRequestsAboutTasks(t *testing.T) {
	soon := time.Now().Add(time.Hour).UTC()
	once := fmt.Sprintf(`"schedule_type":"once","schedule_value":"%s"`, soon.Format(time.RFC3339))
	ran := func(w *town, owner string) { // at its time
		g, _ := w.groups.Group(owner)
		run := berth.Run{ID: "r", Folder: owner, ChatJID: g.JID, Kind: berth.KindTask, Task: "t1", StartedAt: soon.Add(time.Second)}
		_, ok, err := w.db.BeginTask(t.Context(), run)
		if check(t, err); !ok {
			t.Error("it was not due")
		}
		_, err = w.db.FinishRun(t.Context(), berth.Ending{RunID: "r", At: run.StartedAt})
		check(t, err)
	}
	for _, c := range []struct {
		what, text string
		between    func(w *town, owner string)
		status     berth.TaskStatus // told and true afterwards
	}{
		{"cancel", `{"type":"cancel_task","taskId":"t1"}`, nil, "cancelled"},
		{"pause", `{"type":"pause_task","taskId":"t1"}`, nil, "paused"},
		{"pause, and the operator resumes", `{"type":"pause_task","taskId":"t1"}`, func(w *town, owner string) {
			_, err := w.db.ResumeTask(t.Context(), owner, "t1", time.Now(), "")
			check(t, err)
		}, "active"},
		{"resume, and the operator pauses", `{"type":"resume_task","taskId":"t1"}`, func(w *town, owner string) {
			_, err := w.db.PauseTask(t.Context(), owner, "t1", "operator", "")
			check(t, err)
		}, "paused"},
		{"pause, and the operator cancels", `{"type":"pause_task","taskId":"t1"}`, func(w *town, owner string) {
			_, err := w.db.CancelTask(t.Context(), owner, "t1", "")
			check(t, err)
		}, "cancelled"},
		{"update, and it ran", `{"type":"update_task","taskId":"t1",` + once + `}`, ran, "completed"},
	} {
		for as, owner := range map[string]string{"other-group": "other-group", "main": "third-group"} {
			w := settle(t)
			w.task(owner, "t1")
			first := w.again(as, "00000000000000000001-tasks-1.json", c.text)
			if !first.OK {
				t.Fatalf("%s: %+v", c.what, first)
			}
			if c.between != nil {
				c.between(w, owner)
			}
			if got := w.again(as, "00000000000000000001-tasks-1.json", c.text); !got.OK || got.Result["status"] != string(c.status) || got.Result["group"] != owner {
				t.Errorf("%s by %s: %+v", c.what, as, got)
			}
			want := c.status
			if want == "cancelled" {
				want = "gone"
			}
			if got := w.status(owner, "t1"); got != want {
				t.Errorf("%s by %s: it is %s", c.what, as, got)
			}
		}
	}
}

// Who asks anew for what is done already is told that it is.
func TestCancelledTwice(t *testing.T) {
	w := settle(t)
	w.task("other-group", "t1")
	w.task("third-group", "t1")
	for range 2 {
		if got := w.ask("other-group", `{"type":"cancel_task","taskId":"t1"}`); !got.OK || got.Result["status"] != "cancelled" || got.Result["group"] != "other-group" {
			t.Errorf("%+v", got)
		}
		if got := w.ask("main", `{"type":"cancel_task","taskId":"t1","targetJid":"other@g.us"}`); !got.OK || got.Result["group"] != "other-group" {
			t.Errorf("main: %+v", got)
		}
	}
	if got := w.status("third-group", "t1"); got != berth.TaskActive {
		t.Errorf("another group's is %s", got)
	}
	w.denied(w.ask("other-group", `{"type":"cancel_task","taskId":"t2"}`), "ipc.cancel_task", "other-group", "there is no task")
	w.denied(w.ask("other-group", `{"type":"pause_task","taskId":"t1"}`), "ipc.pause_task", "other-group", "there is no task")
}
