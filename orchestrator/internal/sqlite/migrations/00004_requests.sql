-- +goose Up

-- A task that is cancelled keeps its row for a while: a run of it may be under
-- way, and its log refers to it. next_run is NULL unless the status is active.
ALTER TABLE scheduled_tasks ADD COLUMN time_zone TEXT NOT NULL DEFAULT 'UTC';
ALTER TABLE scheduled_tasks ADD COLUMN anchor TEXT NOT NULL DEFAULT ''; -- of an interval's grid
ALTER TABLE scheduled_tasks ADD COLUMN script TEXT NOT NULL DEFAULT '';
ALTER TABLE scheduled_tasks ADD COLUMN catch_up TEXT NOT NULL DEFAULT 'once';
ALTER TABLE scheduled_tasks ADD COLUMN paused_by TEXT NOT NULL DEFAULT '';
ALTER TABLE scheduled_tasks ADD COLUMN created_by TEXT NOT NULL DEFAULT '';
ALTER TABLE scheduled_tasks ADD COLUMN origin TEXT NOT NULL DEFAULT ''; -- idempotency key
CREATE UNIQUE INDEX scheduled_tasks_origin ON scheduled_tasks (origin) WHERE origin <> '';
CREATE INDEX scheduled_tasks_group ON scheduled_tasks (group_folder, status);

CREATE TABLE audit (
	id           INTEGER PRIMARY KEY AUTOINCREMENT,
	at           TEXT NOT NULL,
	group_folder TEXT NOT NULL,
	run_id       TEXT NOT NULL,
	what         TEXT NOT NULL,
	target       TEXT NOT NULL,
	reason       TEXT NOT NULL
) STRICT;
CREATE INDEX audit_group ON audit (group_folder, id);

-- slot is the quarter of an hour, in Unix seconds: a day begins with one in
-- every time zone there is.
CREATE TABLE usage (
	group_folder       TEXT NOT NULL,
	slot               INTEGER NOT NULL,
	provider           TEXT NOT NULL,
	model              TEXT NOT NULL,
	estimated          INTEGER NOT NULL,
	requests           INTEGER NOT NULL DEFAULT 0,
	input_tokens       INTEGER NOT NULL DEFAULT 0,
	output_tokens      INTEGER NOT NULL DEFAULT 0,
	cache_read_tokens  INTEGER NOT NULL DEFAULT 0,
	cache_write_tokens INTEGER NOT NULL DEFAULT 0,
	PRIMARY KEY (group_folder, slot, provider, model, estimated)
) STRICT, WITHOUT ROWID;
CREATE INDEX usage_slot ON usage (slot);

-- +goose Down
-- Going back means restoring a backup.
