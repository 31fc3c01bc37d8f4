-- +goose Up

-- A session ends when it is too old or has had too many turns.
ALTER TABLE sessions ADD COLUMN began_at TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN turns INTEGER NOT NULL DEFAULT 0;
UPDATE sessions SET began_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now');

-- What people want made shorter, until they are told what came of it.
CREATE TABLE compactions (
	id           INTEGER PRIMARY KEY AUTOINCREMENT,
	group_folder TEXT NOT NULL,
	chat_jid     TEXT NOT NULL, -- of the group
	reply_to     TEXT NOT NULL, -- the chat that is told
	key          TEXT NOT NULL UNIQUE, -- of what it is told
	run_id       TEXT NOT NULL DEFAULT '', -- that was given it last; it waits again when that has ended
	attempts     INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX compactions_chat ON compactions (chat_jid);

-- +goose Down
-- Going back means restoring a backup.
