package ipc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/workspace"
)

// town is three groups, as in the ancestors' tests, on a real store: main,
// other-group with the chat other@g.us, and third-group with third@g.us.
type town struct {
	t       *testing.T
	db      *sqlite.DB
	tree    *workspace.Tree
	groups  *registry
	service *Service
	boxes   map[string]*world
	changes atomic.Int64
	asked   int
}

func settle(t *testing.T) *town {
	t.Helper()
	root := t.TempDir()
	tree, err := workspace.NewTree(root, os.Getuid(), os.Getgid())
	check(t, err)
	db, err := sqlite.Open(t.Context(), filepath.Join(root, "store", "messages.db"), func(string, bool) {})
	check(t, err)
	t.Cleanup(func() { check(t, db.Close()) })
	w := &town{t: t, db: db, tree: tree, groups: &registry{add: db.AddGroup}, boxes: make(map[string]*world)}
	w.service = New(Options{
		Store: db, Groups: w.groups, Zone: time.UTC, ErrorDir: tree.ErrorDir(), Log: zap.NewNop(),
		TasksChanged: func() { w.changes.Add(1) },
	})
	for folder, jid := range map[string]string{"main": "main@g.us", "other-group": "other@g.us", "third-group": "third@g.us"} {
		g := berth.Group{Folder: folder, JID: jid, Name: folder, Trigger: "@Andy", RequiresTrigger: true, AddedAt: time.Now()}
		check(t, w.groups.AddGroup(t.Context(), g))
		w.settle(g)
	}
	return w
}

func (w *town) settle(g berth.Group) {
	w.t.Helper()
	files, err := w.tree.Group(g.Folder)
	check(w.t, err)
	w.t.Cleanup(func() { files.Close() })
	box := w.service.inbox(w.t.Context(), g, files)
	box.budget.requests = rate.NewLimiter(1e9, 1e6)
	w.boxes[g.Folder] = &world{t: w.t, dir: filepath.Join(w.tree.Dir(), "data/ipc", g.Folder), box: box}
}

// ask drops a request in the folder of a group and returns the answer.
func (w *town) ask(as, text string) answer {
	w.t.Helper()
	box := w.boxes[as]
	w.asked++
	id := fmt.Sprint("r", w.asked)
	box.dropIn("tasks", id+".json", strings.Replace(text, "{", `{"requestId":"`+id+`",`, 1))
	box.box.Drain(w.t.Context())
	return box.reply(id)
}

// schedule drops a schedule_task with changes to a good one; nil leaves a field
// out.
func (w *town) schedule(as, target string, changes map[string]any) answer {
	w.t.Helper()
	fields := map[string]any{
		"type": "schedule_task", "prompt": "do it", "schedule_type": "once", "schedule_value": time.Now().Add(24 * time.Hour).UTC().Format("2006-01-02T15:04:05"),
		"targetJid": target, "createdBy": "main", "timestamp": "2026-01-01T00:00:00.000Z", "groupFolder": "main", "isMain": true,
	}
	maps.Copy(fields, changes)
	maps.DeleteFunc(fields, func(_ string, v any) bool { return v == nil })
	data, err := json.Marshal(fields)
	check(w.t, err)
	return w.ask(as, string(data))
}

func (w *town) tasks() []berth.Task {
	w.t.Helper()
	tasks, err := w.db.Tasks(w.t.Context(), "")
	check(w.t, err)
	return tasks
}

// task makes a task of a group.
func (w *town) task(folder, id string) {
	w.t.Helper()
	g, _ := w.groups.Group(folder)
	_, err := w.db.AddTask(w.t.Context(), berth.Task{
		ID: id, Folder: folder, ChatJID: g.JID, Prompt: "p", Kind: berth.ScheduleCron, Value: "0 9 * * *", Zone: "UTC",
		Context: berth.ContextGroup, CatchUp: berth.CatchUpOnce, CreatedBy: "operator", CreatedAt: time.Now(),
	})
	check(w.t, err)
}

func (w *town) status(folder, id string) berth.TaskStatus {
	w.t.Helper()
	task, err := w.db.Task(w.t.Context(), folder, id)
	if known, ok := errors.AsType[*berth.Error](err); ok && known.Kind == berth.NotFound {
		return "gone"
	}
	check(w.t, err)
	return task.Status
}

// denied checks that a request was refused, with the reason for the container,
// and recorded for the operator.
func (w *town) denied(got answer, what, folder, reason string) {
	w.t.Helper()
	if got.OK || !strings.Contains(got.Error, reason) {
		w.t.Errorf("answered %+v, want %q", got, reason)
	}
	audits, err := w.db.Audits(w.t.Context(), 1, "")
	check(w.t, err)
	if len(audits) != 1 || audits[0].What != what || audits[0].Folder != folder || !strings.Contains(audits[0].Reason, reason) {
		w.t.Errorf("recorded %+v, want %s of %s: %q", audits, what, folder, reason)
	}
}

// IA-01 to IA-04, IA-34: for whom a group may schedule, whatever the file says
// that it is.
func TestIA01to04WhoSchedulesForWhom(t *testing.T) {
	for _, c := range []struct{ id, as, target, folder, reason string }{
		{"IA-01 main for another", "main", "other@g.us", "other-group", ""},
		{"IA-02 a group for itself", "other-group", "other@g.us", "other-group", ""},
		{"IA-02 a group that names nobody", "other-group", "", "other-group", ""},
		{"IA-03 a group for main", "other-group", "main@g.us", "", "for itself only"},
		{"IA-03 a group for a third", "other-group", "third@g.us", "", "for itself only"},
		{"IA-34 a group for one that is not registered", "other-group", "unknown@g.us", "", "for itself only"},
		{"IA-04 main for one that is not registered", "main", "unknown@g.us", "", "not registered"},
	} {
		t.Run(c.id, func(t *testing.T) {
			w := settle(t)
			got := w.schedule(c.as, c.target, nil)
			tasks := w.tasks()
			if c.reason != "" {
				w.denied(got, "ipc.schedule_task", c.as, c.reason)
				if len(tasks) != 0 || w.changes.Load() != 0 {
					t.Errorf("got %+v", tasks)
				}
				return
			}
			if !got.OK || len(tasks) != 1 || tasks[0].Folder != c.folder || tasks[0].CreatedBy != c.as || w.changes.Load() != 1 {
				t.Fatalf("%+v, %+v", got, tasks)
			}
			// The answer says what is stored.
			want := map[string]any{"taskId": tasks[0].ID, "group": c.folder, "status": "active", "nextRun": tasks[0].NextRun.UTC().Format(time.RFC3339)}
			if d := cmp.Diff(want, got.Result); d != "" {
				t.Error(d)
			}
		})
	}
}

// IA-05 to IA-13: whose tasks a group may pause, resume and cancel. That a
// foreign task exists is told to the operator only.
func TestIA05to13WhoseTasks(t *testing.T) {
	w := settle(t)
	for i, c := range []struct {
		id, verb, as, owner string
		want                berth.TaskStatus
		denied              bool
	}{
		{"IA-05", "pause_task", "main", "other-group", "paused", false},
		{"IA-06", "pause_task", "other-group", "other-group", "paused", false},
		{"IA-07", "pause_task", "other-group", "main", "active", true},
		{"IA-08", "resume_task", "main", "other-group", "active", false},
		{"IA-09", "resume_task", "other-group", "other-group", "active", false},
		{"IA-10", "resume_task", "third-group", "other-group", "paused", true},
		{"IA-11", "cancel_task", "main", "other-group", "gone", false},
		{"IA-12", "cancel_task", "other-group", "other-group", "gone", false},
		{"IA-13", "cancel_task", "other-group", "main", "active", true},
	} {
		id := fmt.Sprint("task-", i)
		w.task(c.owner, id)
		if c.verb == "resume_task" {
			_, err := w.db.PauseTask(t.Context(), c.owner, id, "", "")
			check(t, err)
		}
		got := w.ask(c.as, `{"type":"`+c.verb+`","taskId":"`+id+`","groupFolder":"main","isMain":true}`)
		if now := w.status(c.owner, id); now != c.want {
			t.Errorf("%s: the task is %s, want %s", c.id, now, c.want)
		}
		if c.denied {
			w.denied(got, "ipc."+c.verb, c.as, "there is no task")
			audits, err := w.db.Audits(t.Context(), 1, "")
			if check(t, err); audits[0].Target != id || !strings.Contains(audits[0].Reason, "a task of group "+c.owner) {
				t.Errorf("%s: recorded %+v", c.id, audits[0])
			}
			if unknown := w.ask(c.as, `{"type":"`+c.verb+`","taskId":"nix"}`); strings.Replace(unknown.Error, "nix", id, 1) != got.Error {
				t.Errorf("%s: the answers tell a foreign task from none: %q, %q", c.id, got.Error, unknown.Error)
			}
		} else if !got.OK || got.Result["taskId"] != id {
			t.Errorf("%s: answered %+v", c.id, got)
		}
	}
}

// IA-14, IA-15, IA-32, IA-33, W29: who registers what.
func TestIA14W29RegisterGroup(t *testing.T) {
	const good = `{"type":"register_group","jid":"new@g.us","name":"New","folder":"new-group","trigger":"@Andy"}`
	change := func(from, to string) string { return strings.Replace(good, from, to, 1) }
	w := settle(t)
	for _, c := range []struct{ id, as, text, reason string }{
		{"IA-14 another group", "other-group", good, "only the main group"},
		{"IA-14 another group that says it is main", "other-group", change(`{`, `{"isMain":true,"groupFolder":"main",`), "only the main group"},
		{"IA-15 a path", "main", change("new-group", "../../outside"), "cannot be used"},
		{"IA-15 an absolute path", "main", change("new-group", "/tmp"), "cannot be used"},
		{"IA-15 a reserved folder", "main", change("new-group", "global"), "cannot be used"},
		{"IA-33 no folder", "main", change(`"folder":"new-group",`, ""), "needs the field folder"},
		{"IA-33 no trigger", "main", change(`,"trigger":"@Andy"`, ""), "needs the field trigger"},
		{"IA-33 no name", "main", change(`"name":"New"`, `"name":" "`), "needs the field name"},
		{"IA-33 no chat", "main", change(`"jid":"new@g.us",`, ""), "needs the field jid"},
		{"W29 a folder of another chat", "main", change("new-group", "other-group"), "already registered"},
		{"W29 the same in capitals", "main", change("new-group", "OTHER-group"), "already registered"},
		{"W29 a chat of another folder", "main", change("new@g.us", "other@g.us"), "already registered"},
		{"W29 main itself", "main", change("new-group", "main"), "no request can register the main group"},
		{"W29 main in capitals", "main", change("new-group", "Main"), "no request can register the main group"},
		{"W29 mounts", "main", change(`{`, `{"containerConfig":{"additionalMounts":[{"hostPath":"~/x","readonly":false}]},`), "set by the operator"},
		{"W29 a timeout", "main", change(`{`, `{"containerConfig":{"timeout":1e12},`), "set by the operator"},
		{"W29 limits, not in an object", "main", change(`{`, `{"containerConfig":[1],`), "set by the operator"},
		{"W29 egress", "main", change(`{`, `{"egress":["example.com"],`), `no field "egress"`},
		{"a trigger flag of another type", "main", change(`{`, `{"requiresTrigger":"no",`), "true or false"},
		{"a console chat of another folder", "main", change("new@g.us", "console:family"), "belongs to the folder"},
		{"a chat of no channel", "main", change("new@g.us", "New"), "none of a channel"},
		{"a name with control characters", "main", change(`"New"`, `"New\u001b[2J"`), "control characters"},
	} {
		before := w.groups.Groups()
		w.denied(w.ask(c.as, c.text), "ipc.register_group", c.as, c.reason)
		if d := cmp.Diff(before, w.groups.Groups()); d != "" {
			t.Fatalf("%s: groups: %s", c.id, d)
		}
		stored, err := w.db.Groups(t.Context())
		if check(t, err); len(stored) != 3 {
			t.Fatalf("%s: stored: %+v", c.id, stored)
		}
	}
	t.Run("IA-32 main", func(t *testing.T) {
		w := settle(t)
		for range 2 { // after a crash the same request comes again
			got := w.ask("main", change(`{`, `{"containerConfig":{ },"requiresTrigger":false,`))
			want := map[string]any{"jid": "new@g.us", "folder": "new-group", "requiresTrigger": false}
			if d := cmp.Diff(want, got.Result); !got.OK || d != "" {
				t.Errorf("%+v: %s", got, d)
			}
		}
		stored, err := w.db.Groups(t.Context())
		check(t, err)
		i := slices.IndexFunc(stored, func(g berth.Group) bool { return g.Folder == "new-group" })
		if i < 0 || stored[i].JID != "new@g.us" || stored[i].Name != "New" || stored[i].Trigger != "@Andy" || stored[i].RequiresTrigger || stored[i].AddedAt.IsZero() {
			t.Errorf("stored: %+v", stored)
		}
		if got := w.ask("main", change("New", "Other name")); got.OK {
			t.Error("a group was registered anew with other values")
		}
	})
	t.Run("IA-35 isMain cannot be set", func(t *testing.T) {
		w := settle(t)
		if got := w.ask("main", change(`{`, `{"isMain":true,`)); !got.OK {
			t.Fatalf("%+v", got)
		}
		if g, ok := w.groups.Group("new-group"); !ok || g.IsMain() || !g.NeedsTrigger() {
			t.Errorf("%+v", g)
		}
		if main, ok := w.groups.Group("main"); !ok || !main.IsMain() || main.JID != "main@g.us" {
			t.Errorf("%+v", main)
		}
	})
}

// IA-16: only main has the channels asked.
func TestIA16RefreshGroups(t *testing.T) {
	w := settle(t)
	syncs := 0
	var fail error
	w.service.SyncChats = func(context.Context) error { syncs++; return fail }
	w.denied(w.ask("other-group", `{"type":"refresh_groups","isMain":true}`), "ipc.refresh_groups", "other-group", "only the main group")
	if syncs != 0 {
		t.Errorf("%d syncs", syncs)
	}
	if got := w.ask("main", `{"type":"refresh_groups"}`); !got.OK || got.Result["groups"] != 3.0 || syncs != 1 {
		t.Errorf("%+v, %d syncs", got, syncs)
	}
	fail = errors.New("the network at 10.0.0.7 is down")
	got := w.ask("main", `{"type":"refresh_groups"}`)
	w.denied(got, "ipc.refresh_groups", "main", "did not say which chats")
	if strings.Contains(got.Error, "10.0.0.7") {
		t.Errorf("answered %q", got.Error)
	}
	w.service.SyncChats = nil
	if got := w.ask("main", `{"type":"refresh_groups"}`); !got.OK {
		t.Errorf("%+v", got)
	}
}

// IA-17 to IA-21, IA-34: who may write to whom. IA-21 lets main write to a chat
// that is not registered; Berth does not, as its design says.
func TestIA17to21WhoWritesToWhom(t *testing.T) {
	w := settle(t)
	for _, c := range []struct{ id, as, to, reason string }{
		{"IA-17", "main", "other@g.us", ""}, {"IA-17", "main", "third@g.us", ""},
		{"IA-18", "other-group", "other@g.us", ""}, {"IA-18", "main", "main@g.us", ""},
		{"IA-19", "other-group", "main@g.us", "its own chat only"}, {"IA-19", "other-group", "third@g.us", "its own chat only"},
		{"IA-20", "other-group", "unknown@g.us", "its own chat only"},
		{"IA-21", "main", "unknown@g.us", "not registered"}, {"IA-21", "main", "person@s.whatsapp.net", "not registered"},
	} {
		before, _, err := w.db.OutboxCounts(t.Context())
		check(t, err)
		got := w.ask(c.as, `{"type":"message","chatJid":"`+c.to+`","text":"hi","groupFolder":"main","isMain":true,"sender":"main"}`)
		after, _, err := w.db.OutboxCounts(t.Context())
		check(t, err)
		if c.reason == "" {
			if !got.OK || got.Result["texts"] != 1.0 || after != before+1 {
				t.Errorf("%s %s to %s: %+v", c.id, c.as, c.to, got)
			}
			continue
		}
		w.denied(got, "ipc.message", c.as, c.reason)
		if after != before {
			t.Errorf("%s %s to %s: a text waits to be sent", c.id, c.as, c.to)
		}
	}
	// What an agent keeps to itself is nothing to send, and so it is told.
	if got := w.ask("main", `{"type":"message","chatJid":"main@g.us","text":"<internal>hm</internal>"}`); !got.OK || got.Result["texts"] != 0.0 {
		t.Errorf("%+v", got)
	}
}

// IA-22 to IA-27, IA-36, W28: schedules.
func TestIA22to27Schedules(t *testing.T) {
	w := settle(t)
	for i, c := range []struct {
		id, kind, value string
		within          time.Duration // of the next run; 0: refused
	}{
		{"IA-22", "cron", "0 9 * * *", 24 * time.Hour},
		{"IA-24", "interval", "3600000", time.Hour},
		{"IA-23", "cron", "not a cron", 0}, {"IA-25", "interval", "abc", 0}, {"IA-26", "interval", "0", 0}, {"IA-27", "once", "not-a-date", 0},
		{"W28", "interval", "1e9", 0}, {"W28", "interval", "60000abc", 0}, {"W28", "interval", "1000", 0}, {"W28", "once", "5", 0},
		{"W28", "once", "2020-01-01T00:00:00", 0}, {"W28", "cron", "* * * * * *", 0}, {"W28", "fortnightly", "1", 0},
	} {
		now, before := time.Now(), len(w.tasks())
		got := w.schedule("other-group", "other@g.us", map[string]any{"schedule_type": c.kind, "schedule_value": c.value, "taskId": fmt.Sprint("t", i)})
		if c.within == 0 {
			if w.denied(got, "ipc.schedule_task", "other-group", ""); len(w.tasks()) != before {
				t.Errorf("%s: %s %q was taken", c.id, c.kind, c.value)
			}
			continue
		}
		// The ancestors' tools tell the agent the id that they chose.
		task, err := w.db.Task(t.Context(), "other-group", fmt.Sprint("t", i))
		check(t, err)
		if task.Kind != c.kind || task.NextRun.Before(now) || task.NextRun.After(now.Add(c.within+time.Second)) {
			t.Errorf("%s: %+v", c.id, task)
		}
		if c.kind == "interval" && task.NextRun.Before(now.Add(c.within-time.Second)) {
			t.Errorf("%s: %v", c.id, task.NextRun)
		}
	}
	for _, c := range []struct {
		id     string
		change map[string]any
		reason string
	}{
		{"IA-36", map[string]any{"prompt": nil}, "needs the field prompt"}, {"IA-36", map[string]any{"prompt": " "}, "needs the field prompt"},
		{"IA-36", map[string]any{"schedule_type": nil}, "schedule_type"}, {"IA-36", map[string]any{"schedule_value": nil}, "schedule_value"},
		{"W26", map[string]any{"schedule_type": "interval", "schedule_value": 60000}, "has to be a text"},
		{"W26", map[string]any{"prompt": []string{"x"}}, "has to be a text"}, {"W26", map[string]any{"script": strings.Repeat("x", 64<<10+1)}, "may have 65536"},
		{"W26", map[string]any{"status": "active"}, `no field "status"`},
		{"an id that is none", map[string]any{"taskId": "../x"}, "taskId is not"}, {"an id that is taken", map[string]any{"taskId": "t0"}, "there is or was a task t0"},
		{"a zone that is none", map[string]any{"time_zone": "Mars"}, "no time zone"}, {"catch_up", map[string]any{"catch_up": "all"}, "neither once nor skip"},
	} {
		before := len(w.tasks())
		if w.denied(w.schedule("other-group", "other@g.us", c.change), "ipc.schedule_task", "other-group", c.reason); len(w.tasks()) != before {
			t.Errorf("%s: %v was taken", c.id, c.change)
		}
	}
}

// IA-28 to IA-31: nothing but the exact word gives a task the chat's session.
func TestIA28to31ContextMode(t *testing.T) {
	w := settle(t)
	for i, c := range []struct {
		id    string
		given any
		want  string
	}{
		{"IA-28", "group", "group"}, {"IA-29", "isolated", "isolated"}, {"IA-30", "bogus", "isolated"}, {"IA-30", "Group", "isolated"}, {"IA-31", nil, "isolated"},
	} {
		id := fmt.Sprint("t", i)
		w.schedule("other-group", "other@g.us", map[string]any{"context_mode": c.given, "taskId": id, "script": "true", "catch_up": "skip", "time_zone": "Asia/Tokyo"})
		task, err := w.db.Task(t.Context(), "other-group", id)
		if check(t, err); task.Context != c.want || task.Script != "true" || task.CatchUp != "skip" || task.Zone != "Asia/Tokyo" {
			t.Errorf("%s: %+v", c.id, task)
		}
	}
}

// IA-37, IA-38: an update by whom it may be, with what can be.
func TestIA37UpdateTask(t *testing.T) {
	w := settle(t)
	w.task("other-group", "t1")
	w.task("main", "t2")
	now := time.Now()
	got := w.ask("other-group", `{"type":"update_task","taskId":"t1","schedule_type":"interval","schedule_value":"7200000","prompt":"new","script":"","context_mode":"bogus","groupFolder":"other-group","isMain":"false"}`)
	task, err := w.db.Task(t.Context(), "other-group", "t1")
	check(t, err)
	if !got.OK || task.Prompt != "new" || task.Context != "isolated" || task.NextRun.Before(now.Add(2*time.Hour-time.Second)) || task.NextRun.After(now.Add(2*time.Hour+time.Minute)) {
		t.Errorf("%+v, %+v", got, task)
	}
	for _, c := range []struct{ id, as, text, reason string }{
		{"IA-37 foreign", "other-group", `{"type":"update_task","taskId":"t2","prompt":"evil"}`, "there is no task"},
		{"IA-37 unknown", "other-group", `{"type":"update_task","taskId":"t9","prompt":"evil"}`, "there is no task"},
		{"IA-38", "other-group", `{"type":"update_task","taskId":"t1","schedule_type":"cron","schedule_value":"not a cron","prompt":"evil"}`, "is no cron"},
		{"IA-38 the value alone", "other-group", `{"type":"update_task","taskId":"t1","schedule_value":"0 9 * * *"}`, "no whole number"},
		{"an empty prompt", "other-group", `{"type":"update_task","taskId":"t1","prompt":" "}`, "needs a prompt"},
		{"catch_up", "other-group", `{"type":"update_task","taskId":"t1","catch_up":"x"}`, "neither"},
		{"nothing", "other-group", `{"type":"update_task","taskId":"t1"}`, "nothing to change"},
		{"no task", "other-group", `{"type":"update_task","prompt":"x"}`, "needs the field taskId"},
	} {
		w.denied(w.ask(c.as, c.text), "ipc.update_task", c.as, c.reason)
	}
	after, err := w.db.Task(t.Context(), "other-group", "t1")
	if d := cmp.Diff(task, after); err != nil || d != "" {
		t.Errorf("%v %s", err, d)
	}
	if t2, err := w.db.Task(t.Context(), "main", "t2"); err != nil || t2.Prompt != "p" {
		t.Errorf("%+v, %v", t2, err)
	}
	if got := w.ask("main", `{"type":"update_task","taskId":"t1","catch_up":"skip"}`); !got.OK {
		t.Errorf("%+v", got)
	}
}

// IA-40: an unknown type is consumed, and told.
func TestIA40UnknownType(t *testing.T) {
	w := settle(t)
	w.denied(w.ask("main", `{"type":"x"}`), "ipc.unknown", "main", "no request of the type")
	if left := names(t, filepath.Join(w.boxes["main"].dir, "tasks")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// The same request, carried out again after a crash, has the same effect once.
func TestRepeatedRequests(t *testing.T) {
	w := settle(t)
	box := w.boxes["other-group"]
	for name, text := range map[string]string{
		"1": `{"type":"schedule_task","prompt":"p","schedule_type":"cron","schedule_value":"0 9 * * *","requestId":"a"}`,
		"2": `{"type":"message","chatJid":"other@g.us","text":"hi","requestId":"b"}`,
	} {
		file := "00000000000000000001-tasks-" + name + ".json"
		for range 2 {
			check(t, os.WriteFile(filepath.Join(box.dir, "taken", file), []byte(text), 0o600))
			if _, ok := box.box.carryOut(t.Context(), file); !ok {
				t.Errorf("%s was not carried out", name)
			}
		}
	}
	texts, _, err := w.db.OutboxCounts(t.Context())
	if check(t, err); len(w.tasks()) != 1 || texts != 1 {
		t.Errorf("%d tasks, %d texts", len(w.tasks()), texts)
	}
	if a := box.reply("a"); !a.OK || a.Result["taskId"] != w.tasks()[0].ID {
		t.Errorf("answered %+v", a)
	}
}

// SN-01, SN-02: who sees which tasks and groups, asked for and in the snapshots. These are
// there when a run begins, and follow each change: the own one before the answer.
func TestListsAndSnapshots(t *testing.T) {
	w := settle(t)
	w.task("main", "of-main")
	w.task("third-group", "of-third")
	read := func(folder, name string, v any) {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(w.boxes[folder].dir, name))
		check(t, err)
		check(t, json.Unmarshal(data, v))
	}
	tasksOf := func(folder string) []string {
		t.Helper()
		var list []map[string]any
		read(folder, workspace.TasksSnapshot, &list)
		ids := []string{}
		for _, e := range list {
			ids = append(ids, e["id"].(string))
		}
		slices.Sort(ids)
		return ids
	}
	groupsOf := func(folder string) []string {
		t.Helper()
		var list struct {
			Groups []struct {
				JID          string `json:"jid"`
				IsRegistered bool   `json:"isRegistered"`
			}
			LastSync time.Time
		}
		if read(folder, workspace.GroupsSnapshot, &list); list.LastSync.IsZero() {
			t.Error("no lastSync")
		}
		out := []string{}
		for _, g := range list.Groups {
			out = append(out, fmt.Sprint(g.JID, " ", g.IsRegistered))
		}
		slices.Sort(out)
		return out
	}
	// A chat that main may register.
	_, _, err := w.db.AddMessage(t.Context(), berth.Message{ID: "1", ChatJID: "new@g.us", Text: "x", Time: time.Unix(1, 0)})
	check(t, err)
	for _, box := range w.boxes { // what Open does
		box.box.snapshots(t.Context())
		w.service.open[box.box.group.Folder] = box.box
	}
	want := func(what string, got, want []string) {
		t.Helper()
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", what, d)
		}
	}
	want("main's tasks", tasksOf("main"), []string{"of-main", "of-third"})
	want("other's tasks", tasksOf("other-group"), []string{})
	want("third's tasks", tasksOf("third-group"), []string{"of-third"})
	want("main's groups", groupsOf("main"), []string{"main@g.us true", "new@g.us false", "other@g.us true", "third@g.us true"})
	want("other's groups", groupsOf("other-group"), []string{"other@g.us true"})
	// A container reads the ancestors' fields.
	var list []map[string]any
	read("third-group", workspace.TasksSnapshot, &list)
	task, err := w.db.Task(t.Context(), "third-group", "of-third")
	check(t, err)
	for name, want := range map[string]any{
		"id": "of-third", "groupFolder": "third-group", "prompt": "p", "schedule_type": "cron", "schedule_value": "0 9 * * *", "status": "active",
		"next_run": task.NextRun.UTC().Format("2006-01-02T15:04:05.000Z"),
	} {
		if list[0][name] != want {
			t.Errorf("%s is %v, want %v", name, list[0][name], want)
		}
	}

	if got := w.schedule("other-group", "other@g.us", map[string]any{"taskId": "mine"}); !got.OK {
		t.Fatalf("%+v", got)
	}
	want("other's tasks", tasksOf("other-group"), []string{"mine"})
	stale := func(folder string) bool {
		select {
		case <-w.boxes[folder].box.stale:
			return true
		default:
			return false
		}
	}
	if !stale("main") || stale("third-group") {
		t.Error("main is to see the new task, and third is not")
	}
	if got := w.ask("main", `{"type":"cancel_task","taskId":"mine"}`); !got.OK || !stale("other-group") {
		t.Errorf("other is to see that its task is cancelled: %+v", got)
	}
	if got := w.ask("main", `{"type":"register_group","jid":"new@g.us","name":"New","folder":"new","trigger":"@A"}`); !got.OK {
		t.Fatalf("%+v", got)
	}
	want("main's groups", groupsOf("main"), []string{"main@g.us true", "new@g.us true", "other@g.us true", "third@g.us true"})
	w.service.Refresh()
	if !stale("third-group") || !stale("other-group") {
		t.Error("all are to be refreshed")
	}

	for folder, n := range map[string]int{"main": 2, "other-group": 0, "third-group": 1} {
		if got := w.ask(folder, `{"type":"list_tasks","groupFolder":"main"}`); !got.OK || len(got.Result["tasks"].([]any)) != n {
			t.Errorf("%s sees %+v", folder, got)
		}
	}
	for folder, n := range map[string]int{"main": 4, "other-group": 1} {
		if got := w.ask(folder, `{"type":"list_groups","isMain":true}`); !got.OK || len(got.Result["groups"].([]any)) != n {
			t.Errorf("%s sees %+v", folder, got)
		}
	}
}

// SN-03: a run finds its snapshots when it begins, and an open inbox writes them anew.
func TestOpenWritesSnapshots(t *testing.T) {
	w := settle(t)
	files, err := w.tree.Group("other-group")
	check(t, err)
	defer files.Close()
	box, err := w.service.Open(t.Context(), w.boxes["other-group"].box.group, files)
	check(t, err)
	file := filepath.Join(w.boxes["other-group"].dir, workspace.TasksSnapshot)
	check(t, files.BeginRun())
	if data, err := os.ReadFile(file); err != nil || string(data) != "[]" {
		t.Errorf("%q, %v", data, err)
	}
	watcher, err := fsnotify.NewWatcher()
	check(t, err)
	defer watcher.Close()
	check(t, watcher.Add(filepath.Dir(file)))
	w.task("other-group", "by-the-operator")
	w.service.Refresh("other-group")
	for deadline := time.After(20 * time.Second); ; {
		select {
		case e := <-watcher.Events:
			if e.Name != file || !e.Has(fsnotify.Create) {
				continue
			}
		case <-deadline:
			t.Fatal("not written anew")
		}
		break
	}
	if data, err := os.ReadFile(file); err != nil || !strings.Contains(string(data), "by-the-operator") {
		t.Errorf("%q, %v", data, err)
	}
	box.Close()
	if len(w.service.open) != 0 {
		t.Errorf("still open: %v", w.service.open)
	}
}
