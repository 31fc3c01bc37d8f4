-- +goose Up

-- told says that the agent of the chat knows of a text that was given up.
ALTER TABLE outbox ADD COLUMN told INTEGER NOT NULL DEFAULT 0;
CREATE INDEX outbox_dead ON outbox (chat_jid, id) WHERE state = 'dead';

-- +goose Down
-- Going back means restoring a backup.
