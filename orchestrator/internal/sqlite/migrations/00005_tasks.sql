-- +goose Up

-- An id of a task is unique within its group. SQLite cannot change a primary
-- key, so the tables are made anew; the logs go first, since dropping the tasks
-- would delete them.
CREATE TABLE new_tasks (
	id             TEXT NOT NULL,
	group_folder   TEXT NOT NULL,
	chat_jid       TEXT NOT NULL,
	prompt         TEXT NOT NULL,
	schedule_type  TEXT NOT NULL,
	schedule_value TEXT NOT NULL,
	time_zone      TEXT NOT NULL DEFAULT 'UTC',
	anchor         TEXT NOT NULL DEFAULT '',
	context_mode   TEXT NOT NULL DEFAULT 'isolated',
	script         TEXT NOT NULL DEFAULT '',
	catch_up       TEXT NOT NULL DEFAULT 'once',
	status         TEXT NOT NULL DEFAULT 'active',
	paused_by      TEXT NOT NULL DEFAULT '',
	next_run       TEXT, -- NULL unless active; also while the last run is under way
	last_due       TEXT, -- the time for which the last run was
	last_run       TEXT,
	last_result    TEXT,
	attempts       INTEGER NOT NULL DEFAULT 0, -- at last_due, that failed and are repeated
	failures       INTEGER NOT NULL DEFAULT 0, -- runs in a row that failed for good
	created_by     TEXT NOT NULL DEFAULT '',
	created_at     TEXT NOT NULL,
	origin         TEXT NOT NULL DEFAULT '',
	PRIMARY KEY (group_folder, id)
) STRICT;
INSERT INTO new_tasks (id, group_folder, chat_jid, prompt, schedule_type, schedule_value, time_zone, anchor, context_mode, script, catch_up,
		status, paused_by, next_run, last_run, last_result, created_by, created_at, origin)
	SELECT id, group_folder, chat_jid, prompt, schedule_type, schedule_value, time_zone, anchor, context_mode, script, catch_up,
		status, paused_by, next_run, last_run, last_result, created_by, created_at, origin FROM scheduled_tasks;

CREATE TABLE new_logs (
	id            INTEGER PRIMARY KEY AUTOINCREMENT,
	group_folder  TEXT NOT NULL,
	task_id       TEXT NOT NULL,
	run_id        TEXT NOT NULL DEFAULT '', -- empty: it was skipped
	due_at        TEXT NOT NULL DEFAULT '',
	run_at        TEXT NOT NULL,
	duration_ms   INTEGER NOT NULL DEFAULT 0,
	status        TEXT NOT NULL,
	answered      INTEGER NOT NULL DEFAULT 0, -- some output of it reached the outbox
	result        TEXT,
	error         TEXT,
	input_tokens  INTEGER NOT NULL DEFAULT 0,
	output_tokens INTEGER NOT NULL DEFAULT 0,
	FOREIGN KEY (group_folder, task_id) REFERENCES new_tasks (group_folder, id) ON DELETE CASCADE
) STRICT;
INSERT INTO new_logs (group_folder, task_id, run_at, duration_ms, status, result, error)
	SELECT t.group_folder, l.task_id, l.run_at, l.duration_ms, l.status, l.result, l.error
	FROM task_run_logs l JOIN scheduled_tasks t ON t.id = l.task_id ORDER BY l.id;

DROP TABLE task_run_logs;
DROP TABLE scheduled_tasks;
ALTER TABLE new_tasks RENAME TO scheduled_tasks;
ALTER TABLE new_logs RENAME TO task_run_logs;

CREATE INDEX scheduled_tasks_due ON scheduled_tasks (next_run, group_folder, id, chat_jid, catch_up) WHERE status = 'active';
CREATE INDEX scheduled_tasks_status ON scheduled_tasks (group_folder, status);
CREATE INDEX scheduled_tasks_id ON scheduled_tasks (id);
CREATE UNIQUE INDEX scheduled_tasks_origin ON scheduled_tasks (origin) WHERE origin <> '';
CREATE INDEX task_run_logs_task ON task_run_logs (group_folder, task_id, id);
CREATE UNIQUE INDEX task_run_logs_run ON task_run_logs (run_id) WHERE run_id <> '';

ALTER TABLE runs ADD COLUMN task_id TEXT NOT NULL DEFAULT ''; -- of a run that is for a task

-- +goose Down
-- Going back means restoring a backup.
