package sqlite

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
)

var monday = time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)

func aTask(id string) berth.Task {
	return berth.Task{
		ID: id, Folder: "family", ChatJID: chat, Prompt: "water the plants", Kind: berth.ScheduleCron, Value: "0 9 * * *", Zone: "Europe/Berlin",
		Context: berth.ContextIsolated, CatchUp: berth.CatchUpOnce, CreatedBy: "main", CreatedAt: monday,
	}
}

func add(t *testing.T, db *DB, task berth.Task) berth.Task {
	t.Helper()
	out, err := db.AddTask(t.Context(), task)
	return must(t, out, err)
}

func wantKind(t *testing.T, err error, want berth.Kind) {
	t.Helper()
	if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != want {
		t.Errorf("got %v, want %v", err, want)
	}
}

// DB-22: what goes in comes out, by each of the three ways.
func TestTaskRoundTrip(t *testing.T) {
	db := open(t)
	in := aTask("t1")
	in.Script, in.Origin = "test -e x", "ipc/1"
	got := add(t, db, in)
	want := in
	want.Status, want.Anchor, want.NextRun = berth.TaskActive, monday, time.Date(2026, 3, 3, 8, 0, 0, 0, time.UTC)
	equal := cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })
	if d := cmp.Diff(want, got, equal); d != "" {
		t.Error(d)
	}
	stored, err := db.Task(t.Context(), "family", "t1")
	if d := cmp.Diff(want, must(t, stored, err), equal); d != "" {
		t.Error(d)
	}
	list, err := db.Tasks(t.Context(), "family")
	if d := cmp.Diff([]berth.Task{want}, must(t, list, err), equal); d != "" {
		t.Error(d)
	}
	other, err := db.Tasks(t.Context(), "work")
	if len(must(t, other, err)) != 0 {
		t.Errorf("another group has %v", other)
	}
}

// W34 of the inventory: a request that is repeated after a crash makes one task,
// even if that was cancelled meanwhile; another one may not take its id.
func TestTaskIsMadeOnce(t *testing.T) {
	db := open(t)
	in := aTask("t1")
	in.Origin = "ipc/1"
	first := add(t, db, in)
	in.ID = "t2"
	if again := add(t, db, in); again.ID != first.ID {
		t.Errorf("got %s", again.ID)
	}
	_, err := db.CancelTask(t.Context(), "family", "t1", "")
	check(t, err)
	if again := add(t, db, in); again.ID != first.ID || again.Status != taskCancelled {
		t.Errorf("got %+v", again)
	}
	in.CreatedAt, in.Kind, in.Value = monday.AddDate(1, 0, 0), berth.ScheduleOnce, "2026-03-02T13:00:00Z"
	if again := add(t, db, in); again.ID != first.ID {
		t.Errorf("when its time was over: %+v", again)
	}
	in.Origin, in.ID, in.Value = "ipc/2", "t1", "2030-03-02T13:00:00Z"
	_, err = db.AddTask(t.Context(), in)
	wantKind(t, err, berth.Conflict)
	if list, err := db.Tasks(t.Context(), ""); len(must(t, list, err)) != 0 {
		t.Errorf("got %v", list)
	}
}

func TestTaskOfNoUse(t *testing.T) {
	db := open(t)
	for name, change := range map[string]func(*berth.Task){
		"kind":  func(t *berth.Task) { t.Kind = "weekly" },
		"value": func(t *berth.Task) { t.Value = "60 * * * *" },
		"never": func(t *berth.Task) { t.Value = "0 0 30 2 *" },
		"past":  func(t *berth.Task) { t.Kind, t.Value = berth.ScheduleOnce, "2026-03-02T12:59:00" },
		"zone":  func(t *berth.Task) { t.Zone = "Mars/Base" },
		"local": func(t *berth.Task) { t.Zone = "Local" },
		"path":  func(t *berth.Task) { t.Zone = "../../etc/passwd" },
	} {
		in := aTask(name)
		change(&in)
		_, err := db.AddTask(t.Context(), in)
		wantKind(t, err, berth.Invalid)
	}
	if list, err := db.Tasks(t.Context(), ""); len(must(t, list, err)) != 0 {
		t.Errorf("got %v", list)
	}
}

// W28: an update computes the next run anew, of a single time as well, and one
// that changes no schedule leaves it alone.
func TestW28UpdateComputesTheNextRun(t *testing.T) {
	db := open(t)
	add(t, db, aTask("t1"))
	now := monday.Add(time.Hour)
	kind, value, prompt := berth.ScheduleOnce, "2026-03-05T10:00:00", "other"
	got, err := db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Kind: &kind, Value: &value}, now, "")
	if want := time.Date(2026, 3, 5, 9, 0, 0, 0, time.UTC); !must(t, got, err).NextRun.Equal(want) {
		t.Errorf("got %v", got.NextRun)
	}
	value = "2026-03-06T10:00:00"
	got, err = db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Value: &value}, now, "")
	if want := time.Date(2026, 3, 6, 9, 0, 0, 0, time.UTC); !must(t, got, err).NextRun.Equal(want) {
		t.Errorf("got %v", got.NextRun)
	}
	// A run that is due is not lost to a change of words.
	got, err = db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Prompt: &prompt}, now.AddDate(0, 1, 0), "")
	if want := time.Date(2026, 3, 6, 9, 0, 0, 0, time.UTC); !must(t, got, err).NextRun.Equal(want) || got.Prompt != "other" {
		t.Errorf("got %+v", got)
	}
	// The grid of an interval begins anew.
	kind, value = berth.ScheduleInterval, "7200000"
	got, err = db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Kind: &kind, Value: &value}, now, "")
	if !must(t, got, err).NextRun.Equal(now.Add(2*time.Hour)) || !got.Anchor.Equal(now) {
		t.Errorf("got %+v", got)
	}
	// IA-38: a change that cannot be changes nothing.
	kind, value = berth.ScheduleCron, "not a cron"
	_, err = db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Kind: &kind, Value: &value, Prompt: &value}, now, "")
	wantKind(t, err, berth.Invalid)
	after, err := db.Task(t.Context(), "family", "t1")
	if must(t, after, err).Kind != berth.ScheduleInterval || after.Prompt != "other" {
		t.Errorf("got %+v", after)
	}
	_, err = db.UpdateTask(t.Context(), "family", "t9", berth.TaskChange{}, now, "")
	wantKind(t, err, berth.NotFound)
}

// DB-23: a pause leaves nothing to run, and a resume does not make up for it.
func TestPauseAndResume(t *testing.T) {
	db := open(t)
	in := aTask("t1")
	in.Kind, in.Value = berth.ScheduleInterval, "3600000"
	add(t, db, in)
	got, err := db.PauseTask(t.Context(), "family", "t1", "main", "")
	if must(t, got, err).Status != berth.TaskPaused || !got.NextRun.IsZero() || got.PausedBy != "main" {
		t.Errorf("got %+v", got)
	}
	got, err = db.PauseTask(t.Context(), "family", "t1", "family", "")
	if must(t, got, err).PausedBy != "main" {
		t.Errorf("a second pause: %+v", got)
	}
	// A schedule given to a paused task is checked, and leaves it paused.
	bad, good := "1", "7200000"
	_, err = db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Value: &bad}, monday, "")
	wantKind(t, err, berth.Invalid)
	got, err = db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Value: &good}, monday, "")
	if must(t, got, err).Status != berth.TaskPaused || !got.NextRun.IsZero() {
		t.Errorf("got %+v", got)
	}
	now := monday.Add(7*time.Hour + time.Minute)
	got, err = db.ResumeTask(t.Context(), "family", "t1", now, "")
	if must(t, got, err).Status != berth.TaskActive || !got.NextRun.Equal(monday.Add(8*time.Hour)) || got.PausedBy != "" {
		t.Errorf("got %+v", got)
	}
	got, err = db.ResumeTask(t.Context(), "family", "t1", now.Add(24*time.Hour), "")
	if !must(t, got, err).NextRun.Equal(monday.Add(8 * time.Hour)) {
		t.Errorf("resuming an active task moved it: %+v", got)
	}

	once := aTask("t2")
	once.Kind, once.Value = berth.ScheduleOnce, "2026-03-02T14:00:00"
	add(t, db, once)
	_, err = db.PauseTask(t.Context(), "family", "t2", "", "")
	check(t, err)
	_, err = db.ResumeTask(t.Context(), "family", "t2", now, "")
	wantKind(t, err, berth.Invalid)
	after, err := db.Task(t.Context(), "family", "t2")
	if must(t, after, err).Status != berth.TaskPaused {
		t.Errorf("got %+v", after)
	}
}

// A completed task is not resumed; a new time makes it active again.
func TestCompletedTask(t *testing.T) {
	db := open(t)
	once := aTask("t1")
	once.Kind, once.Value = berth.ScheduleOnce, "2026-03-02T14:00:00"
	add(t, db, once)
	check(t, db.writer.do(t.Context(), func(x *tx) error {
		return x.exec(`UPDATE scheduled_tasks SET status = 'completed', next_run = NULL`)
	}))
	_, err := db.ResumeTask(t.Context(), "family", "t1", monday, "")
	wantKind(t, err, berth.Conflict)
	_, err = db.PauseTask(t.Context(), "family", "t1", "", "")
	wantKind(t, err, berth.Conflict)
	value := "2026-03-03T14:00:00"
	got, err := db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Value: &value}, monday, "")
	if must(t, got, err).Status != berth.TaskActive || got.NextRun.IsZero() {
		t.Errorf("got %+v", got)
	}
}

// DB-24: a cancelled task is in no list, but the log of its last run still finds it.
func TestCancelledTask(t *testing.T) {
	db := open(t)
	add(t, db, aTask("t1"))
	got, err := db.CancelTask(t.Context(), "family", "t1", "")
	if must(t, got, err).ID != "t1" {
		t.Errorf("got %+v", got)
	}
	check(t, db.writer.do(t.Context(), func(x *tx) error {
		return x.exec(`INSERT INTO task_run_logs (group_folder, task_id, run_at, duration_ms, status) VALUES ('family', 't1', '', 1, 'success')`)
	}))
	_, err = db.Task(t.Context(), "family", "t1")
	wantKind(t, err, berth.NotFound)
	got, err = db.CancelTask(t.Context(), "family", "t1", "")
	if must(t, got, err).Status != taskCancelled {
		t.Errorf("again: %+v", got)
	}
	_, err = db.CancelTask(t.Context(), "family", "t2", "")
	wantKind(t, err, berth.NotFound)
	_, err = db.ResumeTask(t.Context(), "family", "t1", monday, "")
	wantKind(t, err, berth.NotFound)
	list, err := db.Tasks(t.Context(), "")
	if len(must(t, list, err)) != 0 {
		t.Errorf("got %v", list)
	}
}

// A group cannot fill the store with tasks, neither live nor cancelled ones.
func TestTasksAreBounded(t *testing.T) {
	db := open(t)
	fill := func(id string, n int, status string) {
		check(t, db.writer.do(t.Context(), func(x *tx) error {
			for i := range n {
				if err := x.exec(`INSERT INTO scheduled_tasks (id, group_folder, chat_jid, prompt, schedule_type, schedule_value, status, created_at)
					VALUES (?, 'family', '', ?, 'cron', '', ?, '')`, fmt.Sprint(id, i), strings.Repeat("é", berth.TaskPreview+1), status); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	fill("over-", maxOver+20, taskCancelled)
	fill("live-", berth.MaxTasks-1, "active")
	add(t, db, aTask("the last"))
	_, err := db.AddTask(t.Context(), aTask("one more"))
	wantKind(t, err, berth.Conflict)
	work := aTask("of work")
	work.Folder = "work"
	add(t, db, work)
	var over int
	check(t, db.read.QueryRow(`SELECT count(*) FROM scheduled_tasks WHERE status = 'cancelled'`).Scan(&over))
	if over != maxOver {
		t.Errorf("%d cancelled ones are kept", over)
	}
	list, err := db.Tasks(t.Context(), "family")
	if len(must(t, list, err)) != berth.MaxTasks || list[0].ID != "the last" || list[1].Prompt != strings.Repeat("é", berth.TaskPreview) {
		t.Errorf("%d, the first is %s, the second has %d bytes", len(list), list[0].ID, len(list[1].Prompt))
	}
	_, err = db.CancelTask(t.Context(), "family", "live-0", "")
	check(t, err)
	add(t, db, aTask("one more"))
}

func TestAudit(t *testing.T) {
	db := open(t)
	check(t, db.AddAudit(t.Context(), berth.Audit{At: monday, Folder: "quiet", RunID: "r", What: "egress", Target: "evil\x1b[2J\n" + strings.Repeat("x", 300), Reason: "no"}))
	// One group that is refused all the time does not push out the others.
	fill := func(n int, folder func(int) string) {
		check(t, db.writer.do(t.Context(), func(x *tx) error {
			for i := range n {
				if err := x.exec(`INSERT INTO audit (at, group_folder, run_id, what, target, reason) VALUES ('', ?, '', '', '', '')`, folder(i)); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	fill(maxGroupAudits, func(int) string { return "loud" })
	for i := range 3 {
		check(t, db.AddAudit(t.Context(), berth.Audit{At: monday, Folder: "loud", What: "ipc.message", Target: fmt.Sprint(i), Reason: "no"}))
	}
	all, err := db.Audits(t.Context(), 100_000, "")
	if len(must(t, all, err)) != maxGroupAudits+1 || all[0].Target != "2" {
		t.Errorf("%d rows, the newest is %+v", len(all), all[0])
	}
	quiet, err := db.Audits(t.Context(), 10, "quiet")
	want := []berth.Audit{{ID: 1, At: monday, Folder: "quiet", RunID: "r", What: "egress", Target: "evil\uFFFD[2J\uFFFD" + strings.Repeat("x", 247), Reason: "no"}}
	if d := cmp.Diff(want, must(t, quiet, err)); d != "" {
		t.Error(d)
	}
	few, err := db.Audits(t.Context(), 3, "loud")
	if len(must(t, few, err)) != 3 {
		t.Errorf("got %d", len(few))
	}
	// Many groups together.
	fill(maxAudits, func(i int) string { return fmt.Sprint(i) })
	check(t, db.AddAudit(t.Context(), berth.Audit{At: monday, Folder: "last"}))
	all, err = db.Audits(t.Context(), 100_000, "")
	if len(must(t, all, err)) != maxAudits || all[0].Folder != "last" {
		t.Errorf("%d rows", len(all))
	}
}

func TestUsage(t *testing.T) {
	db := open(t)
	kathmandu := time.FixedZone("Kathmandu", 5*3600+45*60)
	midnight := time.Date(2026, 3, 2, 0, 0, 0, 0, kathmandu)
	one := berth.Usage{Folder: "family", Provider: "anthropic", Model: "m", Requests: 1, Input: 1, Output: 10, CacheRead: 100, CacheWrite: 1000}
	for _, at := range []time.Time{midnight.Add(-time.Second), midnight, midnight.Add(20 * time.Hour), midnight.Add(24 * time.Hour)} {
		one.At = at
		check(t, db.AddUsage(t.Context(), one))
	}
	one.At, one.Folder = midnight, "work"
	check(t, db.AddUsage(t.Context(), one))
	requests, tokens, err := db.Used(t.Context(), "family", midnight)
	check(t, err)
	if requests != 3 || tokens != 3*1111 {
		t.Errorf("got %d, %d", requests, tokens)
	}
	days, err := db.Usage(t.Context(), "family", midnight)
	want := []berth.Usage{
		{At: midnight, Folder: "family", Provider: "anthropic", Model: "m", Requests: 2, Input: 2, Output: 20, CacheRead: 200, CacheWrite: 2000},
		{At: midnight.AddDate(0, 0, 1), Folder: "family", Provider: "anthropic", Model: "m", Requests: 1, Input: 1, Output: 10, CacheRead: 100, CacheWrite: 1000},
	}
	if d := cmp.Diff(want, must(t, days, err)); d != "" {
		t.Error(d)
	}
	all, err := db.Usage(t.Context(), "", midnight.AddDate(0, 0, -1))
	if len(must(t, all, err)) != 4 {
		t.Errorf("got %v", all)
	}
	// Names that a container makes up do not fill the store.
	one.Folder = "loud"
	for i := range 50 {
		one.Model = fmt.Sprint("model ", i)
		check(t, db.AddUsage(t.Context(), one))
	}
	loud, err := db.Usage(t.Context(), "loud", midnight)
	if len(must(t, loud, err)) != maxModels+1 || loud[0].Model != "" || loud[0].Requests != 50-maxModels {
		t.Errorf("%d rows, the first is %+v", len(loud), loud[0])
	}
	one.At = midnight.AddDate(2, 0, 0)
	check(t, db.AddUsage(t.Context(), one))
	if all, err = db.Usage(t.Context(), "", midnight.AddDate(-1, 0, 0)); len(must(t, all, err)) != 1 {
		t.Errorf("what is old is kept: %v", all)
	}
}

func TestChats(t *testing.T) {
	db := open(t)
	for _, jid := range []string{"old@g.us", "new@g.us", "person@s.whatsapp.net"} {
		at := monday
		if jid == "new@g.us" {
			at = monday.Add(time.Hour)
		}
		_, _, err := db.AddMessage(t.Context(), berth.Message{ID: "1", ChatJID: jid, Text: "hi", Time: at})
		check(t, err)
	}
	check(t, db.AddGroup(t.Context(), berth.Group{JID: "friend@s.whatsapp.net", Name: "Friend", Folder: "friend", AddedAt: monday}))
	got, err := db.Chats(t.Context(), 10)
	want := []berth.Chat{
		{JID: "friend@s.whatsapp.net", Name: "Friend", Folder: "friend"},
		{JID: "new@g.us", Name: "new@g.us", LastActivity: monday.Add(time.Hour)}, {JID: "old@g.us", Name: "old@g.us", LastActivity: monday},
	}
	if d := cmp.Diff(want, must(t, got, err)); d != "" {
		t.Error(d)
	}
}

// No group pushes out what others were refused, however often it asks.
func TestAuditIsKeptByGroup(t *testing.T) {
	db := open(t)
	add := func(folder string) {
		t.Helper()
		check(t, db.AddAudit(t.Context(), berth.Audit{At: time.Now(), Folder: folder, What: "egress", Target: "x", Reason: "y"}))
	}
	add("calm")
	check(t, db.writer.do(t.Context(), func(t *tx) error { // as many rows as it takes, and quicker
		return t.exec(`UPDATE sqlite_sequence SET seq = 20000 WHERE name = 'audit'`)
	}))
	for range 3 {
		add("noisy")
	}
	diff(t, "kept", len(must2(db.Audits(t.Context(), 100, "calm"))(t)), 1)
}

// A task that a setting stands for is there as the setting says, whatever became of
// it, but for one that somebody paused.
func TestKeepTask(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	keep := func(at time.Time, change func(*berth.Task)) berth.Task {
		t.Helper()
		task := aTask("heartbeat")
		task.Kind, task.Value, task.Zone, task.CreatedBy, task.CreatedAt = berth.ScheduleInterval, "1800000", "UTC", berth.HeartbeatOwner, at
		if change != nil {
			change(&task)
		}
		kept, err := db.KeepTask(ctx, task)
		must(t, kept, err)
		stored, err := db.Task(ctx, task.Folder, task.ID)
		if d := cmp.Diff(kept, must(t, stored, err), cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })); d != "" {
			t.Errorf("stored is something else: %s", d)
		}
		return kept
	}
	next := func(what string, got berth.Task, want time.Time) {
		t.Helper()
		if !got.NextRun.Equal(want) {
			t.Errorf("%s: next %v, want %v", what, got.NextRun, want)
		}
	}
	next("new", keep(monday, nil), monday.Add(30*time.Minute))
	next("the same", keep(monday.Add(10*time.Minute), nil), monday.Add(30*time.Minute))
	got := keep(monday.Add(10*time.Minute), func(t *berth.Task) { t.Prompt = "other words" })
	next("other words", got, monday.Add(30*time.Minute))
	if got.Prompt != "other words" {
		t.Errorf("%q", got.Prompt)
	}
	next("another interval", keep(monday.Add(10*time.Minute), func(t *berth.Task) { t.Value = "3600000" }), monday.Add(70*time.Minute))
	must2(db.PauseTask(ctx, "family", "heartbeat", "operator", ""))(t)
	if got := keep(monday.Add(20*time.Minute), nil); got.Status != berth.TaskPaused || got.PausedBy != "operator" || !got.NextRun.IsZero() {
		t.Errorf("%+v", got)
	}
	if got := keep(monday.Add(20*time.Minute), func(t *berth.Task) { t.ChatJID = "new@g.us" }); got.Status != berth.TaskActive || got.ChatJID != "new@g.us" {
		t.Errorf("%+v", got)
	}
	must2(db.CancelTask(ctx, "family", "heartbeat", ""))(t)
	next("again", keep(monday.Add(time.Hour), nil), monday.Add(90*time.Minute))

	// What others made is theirs, unless it is over.
	add(t, db, aTask("other"))
	mine := aTask("other")
	mine.CreatedBy = berth.HeartbeatOwner
	_, err := db.KeepTask(ctx, mine)
	wantKind(t, err, berth.Conflict)
	must2(db.CancelTask(ctx, "family", "other", ""))(t)
	if got, err := db.KeepTask(ctx, mine); err != nil || !got.IsHeartbeat() {
		t.Errorf("%+v, %v", got, err)
	}
	bad := aTask("bad")
	bad.Value = "no cron"
	_, err = db.KeepTask(ctx, bad)
	wantKind(t, err, berth.Invalid)
}

// A request that changed a task is known by its key, until another one changes it.
func TestTaskChangedBy(t *testing.T) {
	db := open(t)
	add(t, db, aTask("t1"))
	who := func(key, want string) {
		t.Helper()
		got, ok, err := db.TaskChangedBy(t.Context(), key)
		check(t, err)
		if text := string(got.Status); ok != (want != "") || text != want {
			t.Errorf("%q: %q, %v", key, text, ok)
		}
	}
	who("", "")
	who("ipc/1", "")
	must2(db.PauseTask(t.Context(), "family", "t1", "main", "ipc/1"))(t)
	who("ipc/1", "paused")
	must2(db.ResumeTask(t.Context(), "family", "t1", monday, ""))(t) // the operator
	who("ipc/1", "active")
	who("", "")
	_, err := db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Value: new("nonsense")}, monday, "ipc/2")
	wantKind(t, err, berth.Invalid)
	who("ipc/2", "")
	must2(db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Prompt: new("more")}, monday, "ipc/3"))(t)
	who("ipc/1", "")
	who("ipc/3", "active")
	must2(db.CancelTask(t.Context(), "family", "t1", "ipc/4"))(t)
	who("ipc/4", taskCancelled)
}
