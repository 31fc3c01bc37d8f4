package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/schedule"
)

// taskCancelled is the status of a task that is no more. Its row stays while a
// run of it may still be under way.
const taskCancelled = "cancelled"

// maxOver is how many tasks of a group are kept that will not run again.
const maxOver = 100

// ofOrigin finds what a request made; its second half lets SQLite use the index.
const ofOrigin = `origin = ? AND origin <> ''`

// AddTask stores t as an active task and returns it, with its first run after
// t.CreatedAt, which is also the anchor of an interval. A t.Origin that is known
// returns the task that it made. The error is of kind berth.Invalid for a
// schedule that cannot be used or never runs, berth.Conflict if the group has a
// task of that id, or berth.MaxTasks.
func (db *DB) AddTask(ctx context.Context, t berth.Task) (berth.Task, error) {
	t.Status, t.PausedBy, t.Anchor = berth.TaskActive, "", t.CreatedAt
	unusable := plan(&t, t.CreatedAt)
	out := t
	err := db.writer.do(ctx, func(x *tx) error {
		if t.Origin != "" {
			known, found, err := x.task(ofOrigin, t.Origin)
			if out = known; err != nil || found {
				return err
			}
		}
		if out = t; unusable != nil {
			return unusable
		}
		var taken bool
		var live int
		if _, err := x.get([]any{&taken, &live}, `SELECT EXISTS (SELECT 1 FROM scheduled_tasks WHERE group_folder = ?1 AND id = ?2),
			(SELECT count(*) FROM scheduled_tasks WHERE group_folder = ?1 AND status IN ('active', 'paused'))`, t.Folder, t.ID); err != nil {
			return err
		}
		if taken {
			return berth.Errorf(berth.Conflict, "there is or was a task %s: leave the id out, or choose another", t.ID)
		}
		if live >= berth.MaxTasks {
			return berth.Errorf(berth.Conflict, "group %s has %d tasks, which is the most: cancel one first", t.Folder, live)
		}
		if err := x.forgetOver(t.Folder); err != nil {
			return err
		}
		return x.insertTask(t)
	})
	return out, err
}

func (x *tx) insertTask(t berth.Task) error {
	return x.exec(`INSERT INTO scheduled_tasks (id, group_folder, chat_jid, prompt, schedule_type, schedule_value, time_zone, anchor,
			context_mode, script, catch_up, status, next_run, created_by, created_at, origin)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		t.ID, t.Folder, t.ChatJID, t.Prompt, t.Kind, t.Value, t.Zone, formatTime(t.Anchor),
		t.Context, t.Script, t.CatchUp, t.Status, optionalTime(t.NextRun), t.CreatedBy, formatTime(t.CreatedAt), t.Origin)
}

// KeepTask makes the task of t's id be as t says, and returns it: for a task that
// a setting stands for. One that was cancelled comes back; one that somebody paused
// stays so, but for one of another chat, and the same schedule keeps its next run.
// It fails with berth.Conflict if the group has another's task of that id, and else
// as AddTask.
func (db *DB) KeepTask(ctx context.Context, t berth.Task) (out berth.Task, err error) {
	t.Status, t.PausedBy, t.Anchor, t.Origin = berth.TaskActive, "", t.CreatedAt, ""
	err = db.writer.do(ctx, func(x *tx) error {
		out = t
		have, found, err := x.task(`group_folder = ? AND id = ?`, t.Folder, t.ID)
		switch {
		case err != nil:
			return err
		case !found:
			if err := plan(&out, t.CreatedAt); err != nil {
				return err
			}
			return x.insertTask(out)
		case have.CreatedBy != t.CreatedBy && have.Status != taskCancelled:
			return berth.Errorf(berth.Conflict, "group %s has another task %s, made by %s: cancel it first", t.Folder, t.ID, have.CreatedBy)
		}
		out.CreatedAt, out.LastRun, out.LastResult = have.CreatedAt, have.LastRun, have.LastResult
		same := have.ChatJID == t.ChatJID && have.Kind == t.Kind && have.Value == t.Value && have.Zone == t.Zone
		if have.ChatJID == t.ChatJID && have.Status == berth.TaskPaused {
			out.Status, out.PausedBy = have.Status, have.PausedBy
		}
		if same && have.Status == out.Status {
			out.Anchor, out.NextRun = have.Anchor, have.NextRun
		} else if err := plan(&out, t.CreatedAt); err != nil {
			return err
		}
		if err := x.saveTask(out); err != nil {
			return err
		}
		return x.exec(`UPDATE scheduled_tasks SET chat_jid = ?, created_by = ? WHERE group_folder = ? AND id = ?`, t.ChatJID, t.CreatedBy, t.Folder, t.ID)
	})
	return out, err
}

// TaskChangedBy returns the task that a request changed, given the request's
// idempotency key, as it is now; ok is false if none was, or it was changed by
// another one since. It may have been cancelled.
func (db *DB) TaskChangedBy(ctx context.Context, origin string) (t berth.Task, ok bool, err error) {
	var times [4]string
	err = db.read.QueryRowContext(ctx, `SELECT `+taskColumns+`, prompt, script FROM scheduled_tasks
		WHERE changed_by = ? AND changed_by <> ''`, origin).Scan(taskFields(&t, &times)...)
	if errors.Is(err, sql.ErrNoRows) {
		return berth.Task{}, false, nil
	}
	setTimes(&t, times)
	return t, err == nil, explain(err)
}

// UpdateTask changes a task and returns what it is now. A new kind, value or
// zone gives it a new next run after now, the anchor of an interval, and makes a
// completed task active again; with none of them its next run stays. origin is the
// request's idempotency key for TaskChangedBy, or empty, here and in the methods
// below. Errors are those of AddTask, and berth.NotFound.
func (db *DB) UpdateTask(ctx context.Context, folder, id string, c berth.TaskChange, now time.Time, origin string) (berth.Task, error) {
	return db.changeTask(ctx, folder, id, origin, func(x *tx, t *berth.Task) error {
		for field, value := range map[*string]*string{
			&t.Prompt: c.Prompt, &t.Kind: c.Kind, &t.Value: c.Value, &t.Zone: c.Zone, &t.Context: c.Context, &t.Script: c.Script, &t.CatchUp: c.CatchUp,
		} {
			if value != nil {
				*field = *value
			}
		}
		if c.Kind != nil || c.Value != nil || c.Zone != nil {
			t.Anchor = now
			if t.Status == berth.TaskCompleted {
				t.Status = berth.TaskActive
			}
			if err := plan(t, now); err != nil {
				return err
			}
			return x.exec(`UPDATE scheduled_tasks SET attempts = 0 WHERE group_folder = ? AND id = ?`, folder, id)
		}
		return nil
	})
}

// PauseTask keeps a task from running, and notes for a person who or what wanted
// that. Pausing it again is harmless. It fails with berth.Conflict if the task is
// completed, and berth.NotFound.
func (db *DB) PauseTask(ctx context.Context, folder, id, by, origin string) (berth.Task, error) {
	return db.changeTask(ctx, folder, id, origin, func(x *tx, t *berth.Task) error {
		switch t.Status {
		case berth.TaskCompleted:
			return errCompleted(id)
		case berth.TaskActive:
			t.Status, t.PausedBy, t.NextRun = berth.TaskPaused, by, time.Time{}
		}
		return nil
	})
}

// ResumeTask lets a paused task run again, next after now: what was missed while
// it was paused is not made up for. Resuming an active task is harmless. It fails
// with berth.Conflict if the task is completed, berth.Invalid if its time is
// past, and berth.NotFound.
func (db *DB) ResumeTask(ctx context.Context, folder, id string, now time.Time, origin string) (berth.Task, error) {
	return db.changeTask(ctx, folder, id, origin, func(x *tx, t *berth.Task) error {
		switch t.Status {
		case berth.TaskCompleted:
			return errCompleted(id)
		case berth.TaskPaused:
			t.Status, t.PausedBy = berth.TaskActive, ""
			return plan(t, now)
		}
		return nil
	})
}

// CancelTask ends a task for good; no list has it any more. Cancelling it again is
// harmless, as long as the store knows of it. It fails with berth.NotFound.
func (db *DB) CancelTask(ctx context.Context, folder, id, origin string) (t berth.Task, err error) {
	err = db.writer.do(ctx, func(x *tx) error {
		found := false
		if t, found, err = x.task(`group_folder = ? AND id = ?`, folder, id); err != nil {
			return err
		}
		if !found {
			return noTask(id)
		}
		t.Status, t.NextRun = taskCancelled, time.Time{}
		return x.changedTask(t, origin)
	})
	return t, err
}

func errCompleted(id string) error {
	return berth.Errorf(berth.Conflict, "task %s is completed: give it a new schedule, or make a new task", id)
}

func (db *DB) changeTask(ctx context.Context, folder, id, origin string, change func(*tx, *berth.Task) error) (t berth.Task, err error) {
	err = db.writer.do(ctx, func(x *tx) error {
		if t, err = x.liveTask(folder, id); err != nil {
			return err
		}
		if err := change(x, &t); err != nil {
			return err
		}
		return x.changedTask(t, origin)
	})
	return t, err
}

// changedTask saves a task and what changed it.
func (x *tx) changedTask(t berth.Task, origin string) error {
	if err := x.saveTask(t); err != nil || origin == "" {
		return err
	}
	return x.exec(`UPDATE scheduled_tasks SET changed_by = ? WHERE group_folder = ? AND id = ?`, origin, t.Folder, t.ID)
}

// plan sets the next run of a task after now.
func plan(t *berth.Task, now time.Time) error {
	s, err := readSchedule(*t)
	if err != nil {
		return err
	}
	next, err := s.First(now)
	if t.Status == berth.TaskActive {
		t.NextRun = next
	}
	return err
}

func readSchedule(t berth.Task) (schedule.Schedule, error) {
	zone, err := time.LoadLocation(t.Zone)
	if err != nil || t.Zone == "" || t.Zone == "Local" { // which Go takes for zones
		return schedule.Schedule{}, berth.Errorf(berth.Invalid, "%.64q is no time zone: give one such as Europe/Berlin or UTC", t.Zone)
	}
	return schedule.Parse(t.Kind, t.Value, zone, t.Anchor)
}

func (x *tx) saveTask(t berth.Task) error {
	return x.exec(`UPDATE scheduled_tasks SET prompt = ?, schedule_type = ?, schedule_value = ?, time_zone = ?, anchor = ?,
			context_mode = ?, script = ?, catch_up = ?, status = ?, paused_by = ?, next_run = ? WHERE group_folder = ? AND id = ?`,
		t.Prompt, t.Kind, t.Value, t.Zone, formatTime(t.Anchor), t.Context, t.Script, t.CatchUp, t.Status, t.PausedBy, optionalTime(t.NextRun), t.Folder, t.ID)
}

// forgetOver removes tasks of a group that will not run again, but for the
// newest and one that runs now.
func (x *tx) forgetOver(folder string) error {
	return x.exec(`DELETE FROM scheduled_tasks WHERE rowid IN (SELECT rowid FROM scheduled_tasks
			WHERE group_folder = ?1 AND status IN ('cancelled', 'completed') ORDER BY created_at DESC, rowid DESC LIMIT -1 OFFSET ?2)
		AND id NOT IN (SELECT task_id FROM runs WHERE ended_at IS NULL AND group_folder = ?1)`, folder, maxOver)
}

const taskColumns = `id, group_folder, chat_jid, schedule_type, schedule_value, time_zone, anchor, context_mode, catch_up, status, paused_by,
	coalesce(next_run, ''), coalesce(last_run, ''), coalesce(last_result, ''), created_by, created_at, origin`

func taskFields(t *berth.Task, times *[4]string) []any {
	return []any{&t.ID, &t.Folder, &t.ChatJID, &t.Kind, &t.Value, &t.Zone, &times[0], &t.Context, &t.CatchUp, &t.Status, &t.PausedBy,
		&times[1], &times[2], &t.LastResult, &t.CreatedBy, &times[3], &t.Origin, &t.Prompt, &t.Script}
}

func setTimes(t *berth.Task, times [4]string) {
	t.Anchor, t.NextRun, t.LastRun, t.CreatedAt = parseTime(times[0]), parseTime(times[1]), parseTime(times[2]), parseTime(times[3])
}

// task returns the one task for which where holds.
func (x *tx) task(where string, args ...any) (t berth.Task, found bool, err error) {
	var times [4]string
	found, err = x.get(taskFields(&t, &times), `SELECT `+taskColumns+`, prompt, script FROM scheduled_tasks WHERE `+where, args...)
	setTimes(&t, times)
	return t, found, err
}

func (x *tx) liveTask(folder, id string) (berth.Task, error) {
	t, found, err := x.task(`group_folder = ? AND id = ? AND status <> 'cancelled'`, folder, id)
	if err == nil && !found {
		err = noTask(id)
	}
	return t, err
}

func noTask(id string) error {
	return berth.Errorf(berth.NotFound, "there is no task %.80q", id)
}

// Task returns a task of a group. It fails with berth.NotFound if there is none,
// also if it was cancelled.
func (db *DB) Task(ctx context.Context, folder, id string) (t berth.Task, err error) {
	var times [4]string
	err = db.read.QueryRowContext(ctx, `SELECT `+taskColumns+`, prompt, script FROM scheduled_tasks
		WHERE group_folder = ? AND id = ? AND status <> 'cancelled'`, folder, id).
		Scan(taskFields(&t, &times)...)
	if errors.Is(err, sql.ErrNoRows) {
		return t, noTask(id)
	}
	setTimes(&t, times)
	return t, explain(err)
}

// Tasks returns the tasks of the group of a folder, or all if it is empty: first
// the active ones, by their next run. Of prompts and scripts it returns the first
// berth.TaskPreview characters, and of many tasks the first berth.MaxTasksList.
func (db *DB) Tasks(ctx context.Context, folder string) ([]berth.Task, error) {
	if folder == "" {
		return db.listTasks(ctx, `TRUE`)
	}
	return db.listTasks(ctx, `group_folder = ?3`, folder)
}

// TasksNamed returns the tasks of any group that have an id, as Tasks does.
func (db *DB) TasksNamed(ctx context.Context, id string) ([]berth.Task, error) {
	return db.listTasks(ctx, `id = ?3`, id)
}

func (db *DB) listTasks(ctx context.Context, where string, args ...any) ([]berth.Task, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT `+taskColumns+`, substr(prompt, 1, ?1), substr(script, 1, ?1) FROM scheduled_tasks
		WHERE `+where+` AND status <> 'cancelled' ORDER BY next_run IS NULL, next_run, created_at, group_folder, id LIMIT ?2`,
		append([]any{berth.TaskPreview, berth.MaxTasksList}, args...)...)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	var out []berth.Task
	for rows.Next() {
		var t berth.Task
		var times [4]string
		if err := rows.Scan(taskFields(&t, &times)...); err != nil {
			return nil, explain(err)
		}
		setTimes(&t, times)
		out = append(out, t)
	}
	return out, explain(rows.Err())
}

// optionalTime is NULL for the zero time.
func optionalTime(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return formatTime(t)
}
