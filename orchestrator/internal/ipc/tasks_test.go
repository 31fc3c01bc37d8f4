package ipc

import (
	"errors"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

// Groups may use the same ids. None reaches another's task by one, or learns of it;
// main says whose it means, where that is not clear.
func TestTaskIDsOfTwoGroups(t *testing.T) {
	w := settle(t)
	for as, jid := range map[string]string{"other-group": "other@g.us", "third-group": "third@g.us"} {
		if got := w.schedule(as, jid, map[string]any{"taskId": "daily"}); !got.OK {
			t.Fatalf("%s: %+v", as, got)
		}
	}
	if got := w.schedule("other-group", "other@g.us", map[string]any{"taskId": "daily"}); got.OK || !strings.Contains(got.Error, "there is or was a task daily") {
		t.Errorf("its own id again: %+v", got)
	}
	for _, verb := range []string{"pause_task", "resume_task"} {
		if got := w.ask("other-group", `{"type":"`+verb+`","taskId":"daily"}`); !got.OK || got.Result["group"] != "other-group" {
			t.Errorf("%s: %+v", verb, got)
		}
	}
	for _, verb := range []string{"update_task", "pause_task", "resume_task", "cancel_task", "task_history"} {
		w.denied(w.ask("other-group", `{"type":"`+verb+`","taskId":"daily","targetJid":"third@g.us"}`), "ipc."+verb, "other-group", "for itself only")
	}
	w.denied(w.ask("main", `{"type":"cancel_task","taskId":"daily"}`), "ipc.cancel_task", "main", `2 groups have a task "daily"`)
	if got := w.ask("main", `{"type":"cancel_task","taskId":"daily","targetJid":"third@g.us"}`); !got.OK || got.Result["group"] != "third-group" {
		t.Errorf("main: %+v", got)
	}
	if w.status("other-group", "daily") != "active" || w.status("third-group", "daily") != "gone" {
		t.Error("main reached the wrong one")
	}
	if got := w.ask("main", `{"type":"pause_task","taskId":"daily"}`); !got.OK || got.Result["group"] != "other-group" {
		t.Errorf("the only one: %+v", got)
	}
	w.task("main", "daily") // main's own comes first
	if got := w.ask("main", `{"type":"cancel_task","taskId":"daily"}`); !got.OK || got.Result["group"] != "main" {
		t.Errorf("main's own: %+v", got)
	}
}

// A group is told what became of its task, and of no other.
func TestTaskHistory(t *testing.T) {
	w := settle(t)
	w.task("other-group", "t1")
	now := time.Now()
	for i := range maxHistory + 3 {
		_, err := w.db.RunTask(t.Context(), "other-group", "t1", now)
		check(t, err)
		id := string(rune('a' + i))
		_, ok, err := w.db.BeginTask(t.Context(), berth.Run{ID: id, Folder: "other-group", ChatJID: "other@g.us", Kind: berth.KindTask, Task: "t1", StartedAt: now})
		if check(t, err); !ok {
			t.Fatal("not due")
		}
		_, err = w.db.FinishRun(t.Context(), berth.Ending{RunID: id, At: now.Add(1500 * time.Millisecond), Error: "broke", NoRetry: true})
		check(t, err)
		now = now.Add(time.Minute)
	}
	for _, as := range []string{"other-group", "main"} {
		got := w.ask(as, `{"type":"task_history","taskId":"t1"}`)
		runs, _ := got.Result["runs"].([]any)
		if !got.OK || len(runs) != maxHistory {
			t.Fatalf("%s: %+v", as, got)
		}
		newest := runs[0].(map[string]any)
		if newest["status"] != "error" || newest["error"] != "broke" || newest["seconds"] != 1.5 || newest["started_at"] != now.Add(-time.Minute).UTC().Format(stampLayout) {
			t.Errorf("%s: %+v", as, newest)
		}
	}
	w.denied(w.ask("third-group", `{"type":"task_history","taskId":"t1"}`), "ipc.task_history", "third-group", "there is no task")
}

// TV-02 to TV-04: a recurring task keeps its id over its runs; changes by it reach
// the times to come and leave what is over alone, and merge with what was there.
func TestTV02TV03TV04ChangesReachTheTimesToCome(t *testing.T) {
	w := settle(t)
	w.task("other-group", "t1")
	now := time.Now()
	_, err := w.db.RunTask(t.Context(), "other-group", "t1", now)
	check(t, err)
	before, ok, err := w.db.BeginTask(t.Context(), berth.Run{ID: "r", Folder: "other-group", ChatJID: "other@g.us", Kind: berth.KindTask, Task: "t1", StartedAt: now})
	if check(t, err); !ok {
		t.Fatal("not due")
	}
	_, err = w.db.FinishRun(t.Context(), berth.Ending{RunID: "r", At: now})
	check(t, err)
	for _, verb := range []string{`"pause_task"`, `"resume_task"`, `"update_task","prompt":"new"`} {
		if got := w.ask("other-group", `{"type":`+verb+`,"taskId":"t1"}`); !got.OK {
			t.Errorf("%s: %+v", verb, got)
		}
	}
	after, err := w.db.Task(t.Context(), "other-group", "t1")
	check(t, err)
	if after.Prompt != "new" || after.Value != before.Value || !after.NextRun.After(now) || after.Status != berth.TaskActive {
		t.Errorf("%+v", after)
	}
	runs, err := w.db.TaskRuns(t.Context(), "other-group", "t1", 10)
	if check(t, err); len(runs) != 1 || runs[0].Outcome != berth.TaskSuccess {
		t.Errorf("%+v", runs)
	}
	// A single time ends the recurrence: after it there is no next one.
	once := now.Add(time.Hour).UTC().Format("2006-01-02T15:04:05Z")
	if got := w.ask("other-group", `{"type":"update_task","taskId":"t1","schedule_type":"once","schedule_value":"`+once+`"}`); !got.OK {
		t.Errorf("%+v", got)
	}
	late := berth.Run{ID: "r2", Folder: "other-group", ChatJID: "other@g.us", Kind: berth.KindTask, Task: "t1", StartedAt: now.Add(2 * time.Hour)}
	_, ok, err = w.db.BeginTask(t.Context(), late)
	if check(t, err); !ok {
		t.Error("not due")
	}
	_, err = w.db.FinishRun(t.Context(), berth.Ending{RunID: "r2", At: late.StartedAt})
	check(t, err)
	if got := w.status("other-group", "t1"); got != berth.TaskCompleted {
		t.Errorf("TV-02: it is %s", got)
	}
	if got := w.ask("other-group", `{"type":"resume_task","taskId":"t1"}`); got.OK {
		t.Errorf("a completed one: %+v", got)
	}
	if got := w.ask("other-group", `{"type":"cancel_task","taskId":"none"}`); got.OK {
		t.Errorf("none: %+v", got)
	}
	_, err = w.db.Task(t.Context(), "other-group", "none")
	if known, ok := errors.AsType[*berth.Error](err); !ok || known.Kind != berth.NotFound {
		t.Errorf("none: %v", err)
	}
}
