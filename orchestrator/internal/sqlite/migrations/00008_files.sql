-- +goose Up

-- A file that goes with a text, and the message that a reaction is to.
ALTER TABLE outbox ADD COLUMN file TEXT NOT NULL DEFAULT ''; -- below groups/
ALTER TABLE outbox ADD COLUMN file_size INTEGER NOT NULL DEFAULT 0;
ALTER TABLE outbox ADD COLUMN reacts_to INTEGER NOT NULL DEFAULT 0;
CREATE INDEX outbox_files ON outbox (chat_jid, file_size, key) WHERE file <> '' AND state IN ('pending', 'dead');

-- +goose Down
-- Going back means restoring a backup.
