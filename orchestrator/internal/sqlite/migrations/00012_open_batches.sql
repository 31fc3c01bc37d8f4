-- +goose Up

-- What a chat or a run has under way is few, and what it had is much: without an
-- index of its own every message would look through all that was ever answered.
CREATE INDEX batches_open ON batches (chat_jid, to_seq) WHERE state IN ('sent', 'consumed');
CREATE INDEX batches_under_way ON batches (run_id, to_seq) WHERE state = 'sent' OR state = 'consumed';
DROP INDEX batches_run;
CREATE INDEX batches_run ON batches (run_id, to_seq);

-- +goose Down
-- Going back means restoring a backup.
