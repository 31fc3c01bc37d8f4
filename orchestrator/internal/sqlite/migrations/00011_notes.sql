-- +goose Up

-- What a heartbeat found, until the agent of its chat knows of it.
CREATE TABLE notes (
	id         INTEGER PRIMARY KEY AUTOINCREMENT,
	chat_jid   TEXT NOT NULL,
	text       TEXT NOT NULL,
	created_at TEXT NOT NULL,
	told       INTEGER NOT NULL DEFAULT 0 -- the batch that it goes along with
) STRICT;
CREATE INDEX notes_chat ON notes (chat_jid, told);

-- The idempotency key of the request that changed a task last: it may come twice.
ALTER TABLE scheduled_tasks ADD COLUMN changed_by TEXT NOT NULL DEFAULT '';
CREATE INDEX scheduled_tasks_changed ON scheduled_tasks (changed_by) WHERE changed_by <> '';

-- The sessions of the group were dropped while the run was live: it names them in vain.
ALTER TABLE runs ADD COLUMN renewed INTEGER NOT NULL DEFAULT 0;

-- Indexing merges what it has written in small pieces by itself; by default SQLite
-- does that in ones for which everybody waits.
INSERT INTO history (history, rank) VALUES ('automerge', 16);
INSERT INTO history (history, rank) VALUES ('crisismerge', 64);

-- +goose Down
-- Going back means restoring a backup.
