-- +goose Up

-- In milliseconds: how far retry_at was away when it was decided. A clock that
-- is set back must not make the wait longer.
ALTER TABLE progress ADD COLUMN retry_wait INTEGER NOT NULL DEFAULT 80000;

-- +goose Down
-- Going back means restoring a backup.
