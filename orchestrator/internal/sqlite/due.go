package sqlite

import (
	"context"
	"strings"
	"time"

	"berth/orchestrator/internal/berth"
)

const (
	maxTaskRuns  = 100             // entries of one task's log
	tellFailures = 3               // in a row, after which the chat is told
	sameTime     = 5 * time.Minute // a clock set back by less shows the same time again, which has had its run
)

// DueTasks returns the active tasks whose time is not after now, the longest due
// first, and the next time of another one; zero if there is none.
func (db *DB) DueTasks(ctx context.Context, now time.Time) (due []berth.Due, next time.Time, err error) {
	at := formatTime(now)
	rows, err := db.read.QueryContext(ctx, `SELECT group_folder, id, chat_jid, next_run, catch_up FROM scheduled_tasks
		WHERE status = 'active' AND next_run <= ? ORDER BY next_run, group_folder, id`, at)
	if err != nil {
		return nil, next, explain(err)
	}
	defer rows.Close()
	for rows.Next() {
		var d berth.Due
		var when string
		if err := rows.Scan(&d.Folder, &d.ID, &d.ChatJID, &when, &d.CatchUp); err != nil {
			return nil, next, explain(err)
		}
		d.At = parseTime(when)
		due = append(due, d)
	}
	if err := rows.Err(); err != nil {
		return nil, next, explain(err)
	}
	var when string
	err = db.read.QueryRowContext(ctx, `SELECT coalesce((SELECT next_run FROM scheduled_tasks
		WHERE status = 'active' AND next_run > ? ORDER BY next_run LIMIT 1), '')`, at).Scan(&when)
	return due, parseTime(when), explain(err)
}

// BeginTask claims the task of run.Folder that run.Task names for the time that
// is due at run.StartedAt: it records the run and a log entry, and moves the task
// to its next time after that, past those that were missed. ok is false, and
// nothing recorded, if the task is not due, not active or not of that chat. It
// fails with berth.Conflict while the group has another live run, and with
// berth.Invalid if the task's schedule cannot be read any more: then it is paused.
func (db *DB) BeginTask(ctx context.Context, run berth.Run) (t berth.Task, ok bool, err error) {
	var broken error
	err = db.writer.do(ctx, func(x *tx) error {
		ok, broken = false, nil
		found := false
		if t, found, err = x.task(`group_folder = ? AND id = ? AND status = 'active' AND chat_jid = ? AND next_run <= ?`,
			run.Folder, run.Task, run.ChatJID, formatTime(run.StartedAt)); err != nil || !found {
			return err
		}
		s, err := readSchedule(t)
		if err != nil {
			broken = err
			return x.pauseBroken(t, err)
		}
		if err := x.beginRun(run); err != nil {
			return err
		}
		due := t.NextRun
		t.NextRun, t.LastRun = s.Next(run.StartedAt), run.StartedAt
		if err := x.exec(`UPDATE scheduled_tasks SET next_run = ?, last_due = ?, last_run = ? WHERE group_folder = ? AND id = ?`,
			optionalTime(t.NextRun), formatTime(due), formatTime(run.StartedAt), t.Folder, t.ID); err != nil {
			return err
		}
		ok = true
		return x.addTaskRun(t, berth.TaskRun{RunID: run.ID, DueAt: due, StartedAt: run.StartedAt, Outcome: berth.TaskRunning})
	})
	if err == nil {
		err = broken
	}
	return t, ok && err == nil, err
}

func (x *tx) pauseBroken(t berth.Task, why error) error {
	t.Status, t.PausedBy, t.NextRun = berth.TaskPaused, "its schedule cannot be used: "+why.Error(), time.Time{}
	return x.saveTask(t)
}

func (x *tx) addTaskRun(t berth.Task, r berth.TaskRun) error {
	if err := x.exec(`INSERT INTO task_run_logs (group_folder, task_id, run_id, due_at, run_at, status, result) VALUES (?, ?, ?, ?, ?, ?, ?)`,
		t.Folder, t.ID, r.RunID, formatTime(r.DueAt), formatTime(r.StartedAt), r.Outcome, r.Result); err != nil {
		return err
	}
	return x.exec(`DELETE FROM task_run_logs WHERE group_folder = ?1 AND task_id = ?2 AND id <=
		(SELECT id FROM task_run_logs WHERE group_folder = ?1 AND task_id = ?2 ORDER BY id DESC LIMIT 1 OFFSET ?3)`, t.Folder, t.ID, maxTaskRuns)
}

// SkipTask moves a task that is due, and was not claimed meanwhile, to its next
// time after now, and notes that in its log. A task that has none is completed.
func (db *DB) SkipTask(ctx context.Context, d berth.Due, now time.Time) error {
	return db.writer.do(ctx, func(x *tx) error {
		t, found, err := x.task(`group_folder = ? AND id = ? AND status = 'active' AND next_run = ?`, d.Folder, d.ID, formatTime(d.At))
		if err != nil || !found {
			return err
		}
		s, err := readSchedule(t)
		if err != nil {
			return x.pauseBroken(t, err)
		}
		if t.NextRun = s.Next(now); t.NextRun.IsZero() {
			t.Status = berth.TaskCompleted
		}
		if err := x.saveTask(t); err != nil {
			return err
		}
		const why = "missed, and not made up for"
		if err := x.exec(`UPDATE scheduled_tasks SET last_due = ?, last_result = ?, attempts = 0 WHERE group_folder = ? AND id = ?`,
			formatTime(d.At), why, d.Folder, d.ID); err != nil {
			return err
		}
		return x.addTaskRun(t, berth.TaskRun{DueAt: d.At, StartedAt: now, Outcome: berth.TaskSkipped, Result: why})
	})
}

// RunTask makes a task due now, as if its time had come; its schedule stays. It
// fails with berth.Conflict if the task is paused or runs already, and
// berth.NotFound.
func (db *DB) RunTask(ctx context.Context, folder, id string, now time.Time) (berth.Task, error) {
	return db.changeTask(ctx, folder, id, "", func(x *tx, t *berth.Task) error {
		var running bool
		if _, err := x.get([]any{&running}, `SELECT EXISTS (SELECT 1 FROM runs WHERE ended_at IS NULL AND group_folder = ? AND task_id = ?)`, folder, id); err != nil {
			return err
		}
		switch {
		case running:
			return berth.Errorf(berth.Conflict, "task %s runs already", id)
		case t.Status == berth.TaskPaused:
			return berth.Errorf(berth.Conflict, "task %s is paused: resume it first", id)
		}
		t.Status, t.NextRun = berth.TaskActive, now
		return nil
	})
}

// ReplanTasks computes the next times of the active tasks anew, after the clock
// was set or the rules of a time zone changed, and returns how many it moved. A
// time that is due, and one at which a failed run is repeated, stay. Where the
// clock was set back a little, a time that had its run does not get another.
func (db *DB) ReplanTasks(ctx context.Context, now time.Time) (moved int, err error) {
	rows, err := db.read.QueryContext(ctx, `SELECT group_folder, id, schedule_type, schedule_value, time_zone, anchor, next_run, coalesce(last_due, '')
		FROM scheduled_tasks WHERE status = 'active' AND next_run > ? AND attempts = 0`, formatTime(now))
	if err != nil {
		return 0, explain(err)
	}
	defer rows.Close()
	type move struct {
		folder, id, from string
		to               time.Time
	}
	var moves []move
	for rows.Next() {
		var t berth.Task
		var anchor, next, last string
		if err := rows.Scan(&t.Folder, &t.ID, &t.Kind, &t.Value, &t.Zone, &anchor, &next, &last); err != nil {
			return 0, explain(err)
		}
		t.Anchor = parseTime(anchor)
		s, err := readSchedule(t)
		if err != nil {
			continue // it is paused when it is due
		}
		after := now
		had := parseTime(last)
		if had.After(now) && had.Before(now.Add(sameTime)) && (t.Kind == berth.ScheduleCron || s.Next(now).Equal(had)) {
			after = had
		}
		if to := s.Next(after); formatTime(to) != next && !to.IsZero() {
			moves = append(moves, move{t.Folder, t.ID, next, to})
		}
	}
	if err := rows.Err(); err != nil || len(moves) == 0 {
		return 0, explain(err)
	}
	err = db.writer.do(ctx, func(x *tx) error {
		moved = 0
		for _, m := range moves {
			n, err := x.execN(`UPDATE scheduled_tasks SET next_run = ? WHERE group_folder = ? AND id = ? AND status = 'active' AND next_run = ?`,
				formatTime(m.to), m.folder, m.id, m.from)
			if err != nil {
				return err
			}
			moved += int(n)
		}
		return nil
	})
	return moved, err
}

// ofRun finds the entry of a run. Without its second half SQLite does not see that
// the index of entries with a run holds it, and reads the logs of all tasks.
const ofRun = `run_id = ? AND run_id <> ''`

// TaskOf returns the task that a run is for, also if it was cancelled meanwhile;
// spoke says that the run has a result, or sent something, or its turn ended.
func (db *DB) TaskOf(ctx context.Context, runID string) (t berth.Task, spoke bool, err error) {
	err = db.writer.do(ctx, func(x *tx) error {
		var folder, id string
		found, err := x.get([]any{&folder, &id, &spoke}, `SELECT group_folder, task_id, answered FROM task_run_logs WHERE `+ofRun, runID)
		if err == nil && found {
			t, found, err = x.task(`group_folder = ? AND id = ?`, folder, id)
		}
		if err == nil && !found {
			err = berth.Errorf(berth.NotFound, "run %s is for no task", runID)
		}
		return err
	})
	return t, spoke, err
}

// TaskRuns returns up to limit entries of a task's log, newest first.
func (db *DB) TaskRuns(ctx context.Context, folder, id string, limit int) ([]berth.TaskRun, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT run_id, due_at, run_at, duration_ms, status, coalesce(result, ''), coalesce(error, ''), input_tokens, output_tokens
		FROM task_run_logs WHERE group_folder = ? AND task_id = ? ORDER BY id DESC LIMIT ?`, folder, id, limit)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	var out []berth.TaskRun
	for rows.Next() {
		var r berth.TaskRun
		var due, started string
		var ms int64
		if err := rows.Scan(&r.RunID, &due, &started, &ms, &r.Outcome, &r.Result, &r.Error, &r.InputTokens, &r.OutputTokens); err != nil {
			return nil, explain(err)
		}
		r.DueAt, r.StartedAt, r.Duration = parseTime(due), parseTime(started), time.Duration(ms)*time.Millisecond
		out = append(out, r)
	}
	return out, explain(rows.Err())
}

// logTask notes in a task's log what a frame of its run said, and for the agent of
// the chat what it found.
func (x *tx) logTask(p berth.Progress, chat string) error {
	if p.Seq == 0 && !p.TurnEnded {
		return nil
	}
	if p.Found != "" {
		if err := x.addNote(chat, p.Found, time.Now()); err != nil {
			return err
		}
	}
	// What ended without a word did its work all the same.
	return x.exec(`UPDATE task_run_logs SET result = CASE WHEN ?1 = '' THEN result ELSE ?1 END, answered = answered OR ?2,
		input_tokens = input_tokens + ?3, output_tokens = output_tokens + ?4 WHERE `+ofRun,
		firstOf(p.Summary, berth.TaskSummary), p.Spoke || len(p.Out) > 0 || p.TurnEnded, tokens(p.InputTokens), tokens(p.OutputTokens), p.RunID)
}

// tokens returns a number that a container names, so that no sum of them overflows.
func tokens(n int64) int64 { return min(max(n, 0), 1<<40) }

// taskSpoke notes that the agent of a chat has sent a message by itself.
func (x *tx) taskSpoke(chat string) error {
	return x.exec(`UPDATE task_run_logs SET answered = 1 WHERE answered = 0 AND run_id <> ''
		AND run_id IN (SELECT id FROM runs WHERE ended_at IS NULL AND chat_jid = ? AND task_id <> '')`, chat)
}

// saidByTask reports whether the run of a task has sent a text already.
func (x *tx) saidByTask(runID, chat, text string) (said bool, err error) {
	_, err = x.get([]any{&said}, `SELECT EXISTS (SELECT 1 FROM
			(SELECT kind, text, created_at FROM outbox WHERE chat_jid = ?1 AND answers_to = 0 ORDER BY id DESC LIMIT 50) AS newest
		WHERE kind = 'message' AND text = ?2 AND created_at >= (SELECT started_at FROM runs WHERE id = ?3 AND task_id <> ''))`, chat, text, runID)
	return said, err
}

// settleTask records how the run of a task ended, and when the task runs next: a
// run that failed before it said anything may be repeated. Times that came while
// it ran are passed over.
func (x *tx) settleTask(e berth.Ending, folder, chat, id string, v *berth.Verdict) error {
	var answered bool
	var result, began string
	if _, err := x.get([]any{&answered, &result, &began}, `SELECT answered, coalesce(result, ''), run_at FROM task_run_logs WHERE `+ofRun, e.RunID); err != nil {
		return err
	}
	outcome, last := berth.TaskSuccess, result
	switch {
	case e.Error != "":
		outcome, last = berth.TaskError, firstOf("Error: "+e.Error, berth.TaskSummary)
	case last == "":
		last = "Completed"
	}
	if err := x.exec(`UPDATE task_run_logs SET duration_ms = ?, status = ?, error = ? WHERE `+ofRun,
		max(e.At.Sub(parseTime(began)).Milliseconds(), 0), outcome, e.Error, e.RunID); err != nil {
		return err
	}
	t, found, err := x.task(`group_folder = ? AND id = ?`, folder, id)
	if err != nil || !found {
		return err
	}
	var attempts, failures int
	if _, err := x.get([]any{&attempts, &failures}, `SELECT attempts, failures FROM scheduled_tasks WHERE group_folder = ? AND id = ?`, folder, id); err != nil {
		return err
	}
	failed := outcome == berth.TaskError
	if failed && !answered && t.Status == berth.TaskActive && (e.Uncounted || !e.NoRetry && attempts < len(e.Backoff)) {
		wait := e.RetryIn
		if e.Uncounted {
			attempts = max(attempts, 1) // it is repeated: no replan may move it
		} else {
			if wait == 0 {
				wait = e.Backoff[attempts]
			}
			attempts++
		}
		v.Returned, v.RetryAt = true, e.At.Add(wait)
		if t.NextRun.IsZero() || v.RetryAt.Before(t.NextRun) {
			t.NextRun = v.RetryAt
		}
	} else {
		v.Parked = failed
		attempts = 0
		if failures++; !failed {
			failures = 0
		}
		if err := passOver(&t, parseTime(began), e.At); err != nil {
			if err := x.pauseBroken(t, err); err != nil {
				return err
			}
			t.Status, t.NextRun = berth.TaskPaused, time.Time{}
		}
	}
	if err := x.exec(`UPDATE scheduled_tasks SET status = ?, next_run = ?, last_result = ?, attempts = ?, failures = ? WHERE group_folder = ? AND id = ?`,
		t.Status, optionalTime(t.NextRun), last, attempts, failures, folder, id); err != nil {
		return err
	}
	if !v.Parked || e.Notice == "" || t.Status == taskCancelled || t.Status != berth.TaskCompleted && failures != tellFailures {
		return nil
	}
	return x.addOutgoing(berth.Outgoing{
		ChatJID: chat, Key: "task-failed/" + e.RunID, Kind: berth.OutNotice, Text: e.Notice, MessageID: berth.NewID(10), CreatedAt: e.At,
	})
}

// passOver moves a task whose run began and has ended past the times that came
// meanwhile, but for a single time that the task was given since; a task that has
// no other time is completed.
func passOver(t *berth.Task, began, now time.Time) error {
	given := t.Kind == berth.ScheduleOnce && t.Status == berth.TaskActive && !t.NextRun.IsZero() && t.Anchor.After(began)
	if t.Status != berth.TaskActive && t.Status != berth.TaskPaused || t.NextRun.After(now) || given {
		return nil
	}
	s, err := readSchedule(*t)
	if err != nil {
		return err
	}
	next := s.Next(now)
	switch {
	case next.IsZero():
		t.Status, t.NextRun = berth.TaskCompleted, next
	case t.Status == berth.TaskActive:
		t.NextRun = next
	}
	return nil
}

// firstOf returns the first n characters of a text, as UTF-8.
func firstOf(text string, n int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	for i := range text {
		if n--; n < 0 {
			return text[:i]
		}
	}
	return text
}
