-- +goose Up

-- What was sent is kept for a while only.
CREATE INDEX outbox_sent ON outbox (chat_jid, id) WHERE state = 'sent' AND kind <> 'notice';

-- +goose Down
-- Going back means restoring a backup.
