-- +goose Up

-- What is forgotten takes along what was kept for its sake alone.

-- +goose StatementBegin
CREATE TRIGGER history_unsent AFTER DELETE ON outbox
BEGIN
	DELETE FROM history WHERE rowid = -old.id;
END;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TRIGGER task_run_forgotten AFTER DELETE ON task_run_logs WHEN old.run_id <> ''
BEGIN
	DELETE FROM runs WHERE id = old.run_id AND ended_at IS NOT NULL
		AND NOT EXISTS (SELECT 1 FROM batches WHERE run_id = old.run_id);
END;
-- +goose StatementEnd

-- The texts of a chat in order have an index by state each. One of all of them makes
-- SQLite read them all where it looks for the few that are dead.
DROP INDEX outbox_chat;

-- +goose Down
-- Going back means restoring a backup.
