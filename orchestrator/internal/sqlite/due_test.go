package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/pressly/goose/v3"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/memory"
)

// every is a task of family that runs every so many minutes, from monday on.
func every(minutes int) berth.Task {
	t := aTask("t1")
	t.Kind, t.Value, t.Zone = berth.ScheduleInterval, fmt.Sprint(minutes*60_000), "UTC"
	return t
}

func once(at time.Time) berth.Task {
	t := aTask("t1")
	t.Kind, t.Value, t.Zone = berth.ScheduleOnce, at.UTC().Format(time.RFC3339), "UTC"
	return t
}

func taskRun(id string, at time.Time) berth.Run {
	return berth.Run{ID: id, Folder: "family", ChatJID: chat, Kind: berth.KindTask, Task: "t1", Engine: "builtin", Nonce: "n", StartedAt: at}
}

func claim(t *testing.T, db *DB, id string, at time.Time) bool {
	t.Helper()
	_, ok, err := db.BeginTask(t.Context(), taskRun(id, at))
	check(t, err)
	return ok
}

func finish(t *testing.T, db *DB, e berth.Ending) berth.Verdict {
	t.Helper()
	v, err := db.FinishRun(t.Context(), e)
	return must(t, v, err)
}

// t1 returns the task as it is now.
func t1(t *testing.T, db *DB) berth.Task {
	t.Helper()
	out, err := db.Task(t.Context(), "family", "t1")
	return must(t, out, err)
}

func history(t *testing.T, db *DB) []string {
	t.Helper()
	runs, err := db.TaskRuns(t.Context(), "family", "t1", 100)
	check(t, err)
	var out []string
	for _, r := range runs {
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s %v %s%s", r.RunID, r.Outcome, r.Duration, r.Result, r.Error)))
	}
	return out
}

func at(minutes float64) time.Time {
	return monday.Add(time.Duration(minutes * float64(time.Minute)))
}

// TS-02, TS-04, TS-11, TV-01, W41: a claim takes the time that is due, and moves the task
// along its grid past all that were missed, however many. It is had once.
func TestW41TS02TS04TS11TV01ClaimIsHadOnce(t *testing.T) {
	db := open(t)
	add(t, db, every(1))
	if claim(t, db, "early", at(0.9)) {
		t.Error("it was had before its time")
	}
	due, next, err := db.DueTasks(t.Context(), at(10.5))
	check(t, err)
	diff(t, "due", due, []berth.Due{{Folder: "family", ID: "t1", ChatJID: chat, At: at(1), CatchUp: "once"}})
	if !next.IsZero() {
		t.Errorf("next is %v", next)
	}
	if !claim(t, db, "r1", at(10.5)) || claim(t, db, "r2", at(10.5)) {
		t.Error("it is not had once")
	}
	diff(t, "next", t1(t, db).NextRun, at(11))
	due, next, err = db.DueTasks(t.Context(), at(10.6))
	check(t, err)
	if len(due) > 0 || !next.Equal(at(11)) {
		t.Errorf("%v, next %v", due, next)
	}
	// The next time has come, and its run cannot begin while the first one lives.
	_, _, err = db.BeginTask(t.Context(), taskRun("r3", at(11)))
	wantKind(t, err, berth.Conflict)
	diff(t, "log", history(t, db), []string{"r1 running 0s"})
	live, err := db.LiveRuns(t.Context())
	check(t, err)
	if len(live) != 1 || live[0].Task != "t1" || live[0].Kind != berth.KindTask {
		t.Errorf("live: %+v", live)
	}

	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", Seq: 3, Session: "s1", InputTokens: 10, OutputTokens: 5, Summary: strings.Repeat("é", 300),
		Out: []berth.Outgoing{{Key: "k", Kind: berth.OutAnswer, Text: "done", MessageID: "m", CreatedAt: at(11)}}}))
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", Seq: 4, InputTokens: 1}))
	// A run that is longer than the interval passes over what came meanwhile.
	diff(t, "verdict", finish(t, db, berth.Ending{RunID: "r1", At: at(13.5)}), berth.Verdict{})
	got := t1(t, db)
	diff(t, "next", got.NextRun, at(14))
	diff(t, "last run", got.LastRun, at(10.5))
	diff(t, "last result", got.LastResult, strings.Repeat("é", berth.TaskSummary))
	runs, err := db.TaskRuns(t.Context(), "family", "t1", 5)
	want := []berth.TaskRun{{RunID: "r1", DueAt: at(1), StartedAt: at(10.5), Duration: 3 * time.Minute, Outcome: berth.TaskSuccess,
		Result: strings.Repeat("é", berth.TaskSummary), InputTokens: 11, OutputTokens: 5}}
	diff(t, "log", must(t, runs, err), want)
	session, err := db.Session(t.Context(), "family", "builtin")
	diff(t, "session", must(t, session, err), "s1")
}

// TS-03, TS-12: a single time runs once, and is completed when its run is over.
func TestTS03TS12OnceIsCompleted(t *testing.T) {
	db := open(t)
	add(t, db, once(at(5)))
	claim(t, db, "r1", at(5))
	if got := t1(t, db); got.Status != berth.TaskActive || !got.NextRun.IsZero() {
		t.Errorf("while it runs: %+v", got)
	}
	finish(t, db, berth.Ending{RunID: "r1", At: at(6)})
	if got := t1(t, db); got.Status != berth.TaskCompleted || !got.NextRun.IsZero() || got.LastResult != "Completed" {
		t.Errorf("after it: %+v", got)
	}
	if claim(t, db, "r2", at(7)) {
		t.Error("it ran again")
	}
}

// TS-07: what was paused, cancelled or moved between being due and its claim does
// not run.
func TestTS07ClaimOfWhatIsNotDueAnyMore(t *testing.T) {
	for what, change := range map[string]func(*DB) error{
		"pause":  func(db *DB) error { _, err := db.PauseTask(t.Context(), "family", "t1", "x", ""); return err },
		"cancel": func(db *DB) error { _, err := db.CancelTask(t.Context(), "family", "t1", ""); return err },
		"update": func(db *DB) error {
			_, err := db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Value: new("7200000")}, at(10), "")
			return err
		},
		"another chat": func(db *DB) error {
			return db.writer.do(t.Context(), func(x *tx) error { return x.exec(`UPDATE scheduled_tasks SET chat_jid = 'x'`) })
		},
	} {
		db := open(t)
		add(t, db, every(1))
		check(t, change(db))
		if claim(t, db, "r1", at(10)) {
			t.Errorf("%s: it was had", what)
		}
		if runs, _ := db.LiveRuns(t.Context()); len(runs) > 0 {
			t.Errorf("%s: %+v", what, runs)
		}
	}
}

// What is changed while a task runs is as it was changed when the run is over.
func TestChangesDuringARun(t *testing.T) {
	for _, c := range []struct {
		what   string
		change func(*DB) error
		status berth.TaskStatus
		next   time.Time
	}{
		{"pause", func(db *DB) error { _, err := db.PauseTask(t.Context(), "family", "t1", "x", ""); return err }, berth.TaskPaused, time.Time{}},
		{"update", func(db *DB) error {
			_, err := db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Value: new("7200000")}, at(2), "")
			return err
		}, berth.TaskActive, at(122)},
		{"resume", func(db *DB) error {
			if _, err := db.PauseTask(t.Context(), "family", "t1", "x", ""); err != nil {
				return err
			}
			_, err := db.ResumeTask(t.Context(), "family", "t1", at(2.5), "")
			return err
		}, berth.TaskActive, at(10)},
	} {
		for _, failed := range []string{"", "lost"} {
			db := open(t)
			add(t, db, every(1))
			claim(t, db, "r1", at(1))
			check(t, c.change(db))
			finish(t, db, berth.Ending{RunID: "r1", At: at(9.5), Error: failed, NoRetry: true})
			if got := t1(t, db); got.Status != c.status || !got.NextRun.Equal(c.next) || got.LastResult == "" {
				t.Errorf("%s: %+v", c.what, got)
			}
		}
	}
	// A single time that a task is given in its own run, and that comes before that is
	// over, is not passed over: there is no other.
	for _, failed := range []string{"", "x"} {
		db := open(t)
		add(t, db, once(at(5)))
		claim(t, db, "r1", at(5))
		_, err := db.UpdateTask(t.Context(), "family", "t1", berth.TaskChange{Value: new(at(6).Format(time.RFC3339))}, at(5.5), "")
		check(t, err)
		finish(t, db, berth.Ending{RunID: "r1", At: at(7), Error: failed, NoRetry: true})
		if !claim(t, db, "r2", at(7)) {
			t.Errorf("snoozed, its run %q: %+v", failed, t1(t, db))
		}
		finish(t, db, berth.Ending{RunID: "r2", At: at(8)})
		diff(t, "then", t1(t, db).Status, berth.TaskCompleted)
	}
	// Inventory 42: the log of a cancelled task's last run is kept.
	db := open(t)
	add(t, db, every(1))
	claim(t, db, "r1", at(1))
	_, err := db.CancelTask(t.Context(), "family", "t1", "")
	check(t, err)
	for i := range maxOver + 5 { // nor is it forgotten while it runs
		task := aTask(fmt.Sprint("over", i))
		task.CreatedAt = at(float64(i))
		add(t, db, task)
		_, err := db.CancelTask(t.Context(), "family", task.ID, "")
		check(t, err)
	}
	got, _, err := db.TaskOf(t.Context(), "r1")
	diff(t, "its task", must(t, got, err).ID, "t1")
	finish(t, db, berth.Ending{RunID: "r1", At: at(2)})
	diff(t, "log", history(t, db), []string{"r1 success 1m0s"})
	_, err = db.Task(t.Context(), "family", "t1")
	wantKind(t, err, berth.NotFound)
}

// A run that came to nothing through no fault of the task is repeated, unless its
// chat has heard something. The task's grid stays.
func TestFailedTaskRuns(t *testing.T) {
	backoff := []time.Duration{time.Second, time.Minute, time.Hour}
	lost := berth.Ending{Error: "lost", Backoff: backoff, RetryIn: time.Millisecond}
	for _, c := range []struct {
		what     string
		task     berth.Task
		ending   berth.Ending
		answered bool
		want     berth.Verdict
		next     time.Time
		status   berth.TaskStatus
	}{
		{"uncounted", every(60), berth.Ending{Error: "x", Uncounted: true, NoRetry: true, RetryIn: time.Second}, false, berth.Verdict{Returned: true, RetryAt: at(62).Add(time.Second)}, at(62).Add(time.Second), berth.TaskActive},
		{"lost", every(60), lost, false, berth.Verdict{Returned: true, RetryAt: at(62).Add(time.Millisecond)}, at(62).Add(time.Millisecond), berth.TaskActive},
		{"lost, once", once(at(60)), lost, false, berth.Verdict{Returned: true, RetryAt: at(62).Add(time.Millisecond)}, at(62).Add(time.Millisecond), berth.TaskActive},
		{"lost, answered", every(60), lost, true, berth.Verdict{Parked: true}, at(120), berth.TaskActive},
		{"lost, once, answered", once(at(60)), lost, true, berth.Verdict{Parked: true}, time.Time{}, berth.TaskCompleted},
		{"its own fault", every(60), berth.Ending{Error: "x", NoRetry: true, Backoff: backoff}, false, berth.Verdict{Parked: true}, at(120), berth.TaskActive},
		{"told when", every(60), berth.Ending{Error: "x", Backoff: backoff, RetryIn: 10 * time.Minute}, false, berth.Verdict{Returned: true, RetryAt: at(72)}, at(72), berth.TaskActive},
		{"not told when", every(60), berth.Ending{Error: "x", Backoff: backoff}, false, berth.Verdict{Returned: true, RetryAt: at(62).Add(time.Second)}, at(62).Add(time.Second), berth.TaskActive},
		{"the next time comes first", every(1), berth.Ending{Error: "x", Backoff: backoff, RetryIn: time.Hour}, false, berth.Verdict{Returned: true, RetryAt: at(122)}, at(61), berth.TaskActive},
	} {
		db := open(t)
		add(t, db, c.task)
		claim(t, db, "r1", at(60))
		if c.answered {
			// Sent by the agent itself, which counts as well.
			check(t, db.AddOutgoing(t.Context(), berth.Outgoing{ChatJID: chat, Key: "k", Kind: berth.OutMessage, Text: "hi", OwnTurn: true}))
		}
		c.ending.RunID, c.ending.At = "r1", at(62)
		diff(t, c.what, finish(t, db, c.ending), c.want)
		got := t1(t, db)
		if !got.NextRun.Equal(c.next) || got.Status != c.status || got.LastResult != "Error: "+c.ending.Error {
			t.Errorf("%s: %+v, want next %v", c.what, got, c.next)
		}
		if c.want.Returned && c.task.Kind == berth.ScheduleInterval && !claim(t, db, "again", c.want.RetryAt) {
			t.Errorf("%s: it is not due again", c.what)
		}
		if grid := t1(t, db).NextRun; !grid.IsZero() && c.what == "lost" && !grid.Equal(at(120)) {
			t.Errorf("%s: then it runs at %v", c.what, grid)
		}
	}
	// No more often than it may.
	db := open(t)
	add(t, db, once(at(60)))
	now := at(60)
	for i := range len(backoff) + 1 {
		claim(t, db, fmt.Sprint(i), now)
		e := lost
		e.RunID, e.At = fmt.Sprint(i), now
		v := finish(t, db, e)
		if v.Returned != (i < len(backoff)) {
			t.Errorf("attempt %d: %+v", i, v)
		}
		now = now.Add(time.Second)
	}
	diff(t, "status", t1(t, db).Status, berth.TaskCompleted)
}

// The chat is told when a task fails that does not come again, and when one fails
// for the third time in a row, once.
func TestChatIsToldOfFailures(t *testing.T) {
	texts := func(db *DB) (out []string) {
		all, err := db.Outbox(t.Context(), 100)
		for _, o := range must(t, all, err) {
			out = append(out, o.Key)
		}
		return out
	}
	db := open(t)
	add(t, db, once(at(5)))
	claim(t, db, "r1", at(5))
	finish(t, db, berth.Ending{RunID: "r1", At: at(6), Error: "x", NoRetry: true, Notice: "it failed"})
	diff(t, "once", texts(db), []string{"task-failed/r1"})

	db = open(t)
	add(t, db, every(1))
	for i, failure := range []string{"x", "x", "", "x", "x", "x", "x", "x"} {
		id, now := fmt.Sprint("r", i), at(float64(i+1))
		claim(t, db, id, now)
		finish(t, db, berth.Ending{RunID: id, At: now, Error: failure, NoRetry: true, Notice: "it failed"})
	}
	diff(t, "again and again", texts(db), []string{"task-failed/r5"})
}

// A missed time of a task that does not catch up is noted, and nothing else.
func TestSkip(t *testing.T) {
	db := open(t)
	add(t, db, every(1))
	due, _, err := db.DueTasks(t.Context(), at(5.5))
	check(t, err)
	check(t, db.SkipTask(t.Context(), due[0], at(5.5)))
	check(t, db.SkipTask(t.Context(), due[0], at(50.5))) // was moved already
	diff(t, "next", t1(t, db).NextRun, at(6))
	diff(t, "log", history(t, db), []string{"skipped 0s missed, and not made up for"})

	db = open(t)
	add(t, db, once(at(5)))
	due, _, err = db.DueTasks(t.Context(), at(55))
	check(t, err)
	check(t, db.SkipTask(t.Context(), due[0], at(55)))
	if got := t1(t, db); got.Status != berth.TaskCompleted || got.LastResult != "missed, and not made up for" {
		t.Errorf("got %+v", got)
	}
}

// RunTask makes a task due out of turn; its grid stays.
func TestRunTaskNow(t *testing.T) {
	db := open(t)
	add(t, db, every(60))
	got, err := db.RunTask(t.Context(), "family", "t1", at(10))
	diff(t, "next", must(t, got, err).NextRun, at(10))
	if !claim(t, db, "r1", at(10)) {
		t.Error("it is not due")
	}
	diff(t, "grid", t1(t, db).NextRun, at(60))
	_, err = db.RunTask(t.Context(), "family", "t1", at(11))
	wantKind(t, err, berth.Conflict) // it runs
	finish(t, db, berth.Ending{RunID: "r1", At: at(12)})
	_, err = db.PauseTask(t.Context(), "family", "t1", "", "")
	check(t, err)
	_, err = db.RunTask(t.Context(), "family", "t1", at(13))
	wantKind(t, err, berth.Conflict)
	_, err = db.RunTask(t.Context(), "work", "t1", at(13))
	wantKind(t, err, berth.NotFound)

	db = open(t)
	add(t, db, once(at(5)))
	claim(t, db, "r1", at(5))
	finish(t, db, berth.Ending{RunID: "r1", At: at(5)})
	_, err = db.RunTask(t.Context(), "family", "t1", at(20))
	check(t, err)
	claim(t, db, "r2", at(20))
	finish(t, db, berth.Ending{RunID: "r2", At: at(21)})
	diff(t, "completed again", t1(t, db).Status, berth.TaskCompleted)
	diff(t, "log", history(t, db), []string{"r2 success 1m0s", "r1 success 0s"})
}

// TS-06: a schedule that cannot be read any more pauses its task, with the reason,
// and is not tried again and again.
func TestTS06MalformedScheduleIsPaused(t *testing.T) {
	spoil := func(db *DB) {
		check(t, db.writer.do(t.Context(), func(x *tx) error { return x.exec(`UPDATE scheduled_tasks SET schedule_value = 'abc'`) }))
	}
	for what, do := range map[string]func(*DB){
		"claim": func(db *DB) {
			_, ok, err := db.BeginTask(t.Context(), taskRun("r1", at(1)))
			wantKind(t, err, berth.Invalid)
			if runs, _ := db.LiveRuns(t.Context()); ok || len(runs) > 0 {
				t.Error("it runs")
			}
		},
		"skip": func(db *DB) {
			check(t, db.SkipTask(t.Context(), berth.Due{Folder: "family", ID: "t1", At: at(1)}, at(9)))
		},
	} {
		db := open(t)
		add(t, db, every(1))
		spoil(db)
		do(db)
		if got := t1(t, db); got.Status != berth.TaskPaused || !strings.Contains(got.PausedBy, `"abc" is no whole number`) {
			t.Errorf("%s: %+v", what, got)
		}
	}
	db := open(t)
	add(t, db, every(1))
	claim(t, db, "r1", at(1))
	spoil(db)
	finish(t, db, berth.Ending{RunID: "r1", At: at(5)})
	if got := t1(t, db); got.Status != berth.TaskPaused || !got.NextRun.IsZero() {
		t.Errorf("during its run: %+v", got)
	}
}

// Two groups may use the same id. Neither reaches the other's task.
func TestIDsAreUniqueWithinAGroup(t *testing.T) {
	db := open(t)
	add(t, db, every(1))
	work := aTask("t1")
	work.Folder, work.ChatJID, work.Prompt = "work", "console:work", "work"
	add(t, db, work)
	_, err := db.AddTask(t.Context(), work)
	wantKind(t, err, berth.Conflict)
	named, err := db.TasksNamed(t.Context(), "t1")
	diff(t, "named", len(must(t, named, err)), 2)
	before := t1(t, db)
	for _, change := range []func() (berth.Task, error){
		func() (berth.Task, error) {
			return db.UpdateTask(t.Context(), "work", "t1", berth.TaskChange{Prompt: new("changed")}, monday, "")
		},
		func() (berth.Task, error) { return db.PauseTask(t.Context(), "work", "t1", "x", "") },
		func() (berth.Task, error) { return db.ResumeTask(t.Context(), "work", "t1", monday, "") },
		func() (berth.Task, error) { return db.CancelTask(t.Context(), "work", "t1", "") },
	} {
		got, err := change()
		diff(t, "changed", must(t, got, err).Folder, "work")
	}
	diff(t, "the other", t1(t, db), before)
	claim(t, db, "r1", at(1))
	finish(t, db, berth.Ending{RunID: "r1", At: at(1)})
	runs, err := db.TaskRuns(t.Context(), "work", "t1", 10)
	diff(t, "log of the other", len(must(t, runs, err)), 0)
}

// Clocks that are set: no task waits longer than its schedule says, and none runs
// twice because the clock went back a little.
func TestReplan(t *testing.T) {
	daily := aTask("t1")
	daily.Value, daily.Zone = "0 9 * * *", "UTC" // it is monday, noon
	nine := func(day int) time.Time { return time.Date(2026, 3, day, 9, 0, 0, 0, time.UTC) }
	for _, c := range []struct {
		what string
		task berth.Task
		ran  time.Time // when it last did
		now  time.Time // by the clock that was set
		want time.Time
	}{
		{"an interval, an hour back", every(10), at(120), at(60.5), at(70)},
		{"an interval, a second back", every(10), at(120), at(119.99), at(130)},
		{"an interval, more than a beat back", every(1), at(120), at(117.5), at(118)},
		{"a cron, a second back", daily, nine(3), nine(3).Add(-time.Second), nine(4)},
		{"a cron, a week back", daily, nine(10), nine(3).Add(time.Minute), nine(4)},
		{"a cron, a year back", daily, nine(3).AddDate(1, 0, 0), nine(4).Add(-time.Hour), nine(4)},
		{"a cron, nothing", daily, nine(3), nine(3).Add(time.Hour), nine(4)},
		{"a single time", once(at(500)), time.Time{}, at(-1000), at(500)},
	} {
		db := open(t)
		add(t, db, c.task)
		if !c.ran.IsZero() {
			before := c.ran.Add(-time.Minute / 2)
			if claim(t, db, "r0", before) { // for what was missed
				finish(t, db, berth.Ending{RunID: "r0", At: before})
			}
			claim(t, db, "r1", c.ran)
			finish(t, db, berth.Ending{RunID: "r1", At: c.ran})
		}
		moved, err := db.ReplanTasks(t.Context(), c.now)
		check(t, err)
		if got := t1(t, db).NextRun; !got.Equal(c.want) {
			t.Errorf("%s: moved %d, next is %v, want %v", c.what, moved, got, c.want)
		}
		moved, err = db.ReplanTasks(t.Context(), c.now)
		diff(t, "then", must(t, moved, err), 0)
	}
	// A time that is due stays, and one at which a run is repeated.
	db := open(t)
	add(t, db, every(10))
	moved, err := db.ReplanTasks(t.Context(), at(100))
	diff(t, "due", must(t, moved, err), 0)
	claim(t, db, "r1", at(100))
	finish(t, db, berth.Ending{RunID: "r1", At: at(101), Error: "x", Backoff: []time.Duration{time.Minute}})
	moved, err = db.ReplanTasks(t.Context(), at(101))
	diff(t, "repeated", must(t, moved, err), 0)
	// Also where that was nobody's fault: the engine is back, and the run has to be.
	db = open(t)
	add(t, db, every(10))
	claim(t, db, "r1", at(100))
	finish(t, db, berth.Ending{RunID: "r1", At: at(101), Error: "no engine", Uncounted: true, NoRetry: true, RetryIn: time.Second})
	moved, err = db.ReplanTasks(t.Context(), at(101))
	diff(t, "repeated, uncounted", must(t, moved, err), 0)
}

// W67 for tasks: what the agent sent itself is not said again as its result.
func TestW67TaskSaysNothingTwice(t *testing.T) {
	db := open(t)
	add(t, db, every(60))
	say := func(key, text string, when time.Time) {
		check(t, db.AddOutgoing(t.Context(), berth.Outgoing{ChatJID: chat, Key: key, Kind: berth.OutMessage, Text: text, MessageID: key, OwnTurn: true, CreatedAt: when}))
	}
	say("before", "old news", at(1))
	claim(t, db, "r1", at(60))
	say("during", "news", at(61))
	for i, text := range []string{"news", "old news"} {
		check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", Seq: int64(i + 1), Summary: text, Out: []berth.Outgoing{{Key: text, Kind: berth.OutAnswer, Text: text, MessageID: text, CreatedAt: at(62)}}}))
	}
	all, err := db.Outbox(t.Context(), 100)
	var got []string
	for _, o := range must(t, all, err) {
		got = append(got, o.Key)
	}
	diff(t, "texts", got, []string{"before", "during", "old news"})
}

// Inventory 46: a log does not grow for ever.
func TestTaskLogIsBounded(t *testing.T) {
	db := open(t)
	add(t, db, every(1))
	for i := range maxTaskRuns + 10 {
		claim(t, db, fmt.Sprint(i), at(float64(i+1)))
		finish(t, db, berth.Ending{RunID: fmt.Sprint(i), At: at(float64(i + 1))})
	}
	runs, err := db.TaskRuns(t.Context(), "family", "t1", 1000)
	if len(must(t, runs, err)) != maxTaskRuns || runs[0].RunID != fmt.Sprint(maxTaskRuns+9) {
		t.Errorf("%d entries, the newest is %s", len(runs), runs[0].RunID)
	}
	var kept int
	check(t, db.read.QueryRow(`SELECT count(*) FROM runs`).Scan(&kept))
	diff(t, "runs", kept, maxTaskRuns) // nor do the runs themselves
}

// A silent run that ended its turn is over, though it lost its host before it was
// settled: what it did without a word is not done twice.
func TestSilentTurnCounts(t *testing.T) {
	db := open(t)
	add(t, db, every(60))
	claim(t, db, "r1", at(60))
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", Seq: 3}))
	_, spoke, err := db.TaskOf(t.Context(), "r1")
	diff(t, "before its turn ended", must(t, spoke, err), false)
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", TurnEnded: true}))
	_, spoke, err = db.TaskOf(t.Context(), "r1")
	diff(t, "after", must(t, spoke, err), true)
}

// A container says what it likes about tokens and errors: neither keeps a frame or an
// end from being recorded, nor fills the store.
func TestWhatAContainerSaysIsBounded(t *testing.T) {
	db := open(t)
	add(t, db, every(1))
	claim(t, db, "r1", at(1))
	for seq := range int64(3) {
		check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", Seq: seq + 1, InputTokens: 1<<63 - 1, OutputTokens: -1}))
	}
	finish(t, db, berth.Ending{RunID: "r1", At: at(2), Error: strings.Repeat("é", 1<<20), Class: strings.Repeat("x", 1<<20)})
	var size int
	check(t, db.read.QueryRow(`SELECT length(error) + length(error_class) FROM runs`).Scan(&size))
	diff(t, "kept of its end", size, maxRunError+maxClass)
	runs, err := db.TaskRuns(t.Context(), "family", "t1", 1)
	if r := must(t, runs, err)[0]; r.InputTokens <= 0 || r.OutputTokens != 0 || utf8.RuneCountInString(r.Error) != maxRunError {
		t.Errorf("%d and %d tokens", r.InputTokens, r.OutputTokens)
	}
}

// No write and no claim reads more than its own rows, however many tasks, logs,
// memories and messages there are.
func TestStatementsUseIndexes(t *testing.T) {
	db := open(t)
	task := every(1)
	task.Origin = "o1"
	add(t, db, task)
	_, _, err := db.AddMemory(t.Context(), memory.Memory{Folder: "family", Fact: "likes tea", Origin: "o2", CreatedAt: monday})
	check(t, err)
	claim(t, db, "r1", at(1))
	check(t, db.AddOutgoing(t.Context(), berth.Outgoing{ChatJID: chat, Key: "k", Kind: berth.OutMessage, Text: "hi", MessageID: "m", OwnTurn: true}))
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", Seq: 1, Out: []berth.Outgoing{{Key: "k2", Kind: berth.OutAnswer, Text: "a", MessageID: "m2"}}}))
	_, _, err = db.TaskOf(t.Context(), "r1")
	check(t, err)
	finish(t, db, berth.Ending{RunID: "r1", At: at(2)})
	check(t, db.writer.do(t.Context(), func(x *tx) error {
		for query := range x.w.stmts {
			rows, err := x.w.conn.QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+query, make([]any, 40)[:strings.Count(query, "?")]...)
			if err != nil {
				continue // BEGIN and the like
			}
			for rows.Next() {
				var id, parent, unused int
				var step string
				if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
					return err
				}
				for _, table := range []string{"task_run_logs", "scheduled_tasks", "memory", "messages", "outbox"} {
					if step == "SCAN "+table {
						t.Errorf("%s of\n%s", step, query)
					}
				}
			}
			if err := errors.Join(rows.Err(), rows.Close()); err != nil {
				return err
			}
		}
		return nil
	}))
}

// A store of before keeps its tasks and their logs.
func TestTasksOfAnOldStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "messages.db")
	old, err := sql.Open("sqlite", dsn(path))
	check(t, err)
	files, err := fs.Sub(migrations, "migrations")
	check(t, err)
	p, err := goose.NewProvider(goose.DialectSQLite3, old, files, goose.WithLogger(goose.NopLogger()))
	check(t, err)
	_, err = p.UpTo(context.Background(), 4)
	check(t, err)
	for _, query := range []string{
		`INSERT INTO scheduled_tasks (id, group_folder, chat_jid, prompt, schedule_type, schedule_value, time_zone, next_run, created_at, origin)
			VALUES ('t1', 'family', 'console:family', 'p', 'cron', '0 9 * * *', 'Europe/Berlin', '2026-03-03T08:00:00.000Z', '2026-03-02T12:00:00.000Z', 'o1')`,
		`INSERT INTO scheduled_tasks (id, group_folder, chat_jid, prompt, schedule_type, schedule_value, status, created_at)
			VALUES ('t2', 'family', 'console:family', 'p', 'cron', '0 9 * * *', 'cancelled', '2026-03-02T12:00:00.000Z')`,
		`INSERT INTO task_run_logs (task_id, run_at, duration_ms, status, result) VALUES ('t1', '2026-03-01T08:00:00.000Z', 1500, 'success', 'fine')`,
		`INSERT INTO runs (id, group_folder, chat_jid, kind, nonce, started_at) VALUES ('r', 'family', 'console:family', 'chat', 'n', '2026-03-02T12:00:00.000Z')`,
	} {
		_, err := old.Exec(query)
		check(t, err)
	}
	check(t, old.Close())
	db := openAt(t, path)
	got := t1(t, db)
	want := berth.Task{
		ID: "t1", Folder: "family", ChatJID: chat, Prompt: "p", Kind: "cron", Value: "0 9 * * *", Zone: "Europe/Berlin", Context: "isolated", CatchUp: "once",
		Status: berth.TaskActive, NextRun: time.Date(2026, 3, 3, 8, 0, 0, 0, time.UTC), CreatedAt: monday, Origin: "o1",
	}
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
		t.Error(d)
	}
	diff(t, "log", history(t, db), []string{"success 1.5s fine"})
	all, err := db.Tasks(t.Context(), "")
	diff(t, "tasks", len(must(t, all, err)), 1)
	if _, ok, err := db.BeginTask(t.Context(), taskRun("r2", monday.AddDate(0, 0, 2))); ok || err == nil {
		t.Error("a live run of before does not count")
	}
	check(t, db.read.QueryRow(`SELECT count(*) FROM pragma_foreign_key_check`).Scan(new(int)))
}
