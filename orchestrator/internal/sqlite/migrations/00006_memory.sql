-- +goose Up

-- What agents are told to remember, by folder; 'global' is of all groups. A
-- memory that was forgotten keeps its row for a while, empty: its id must not be
-- given again, and the request that did it may come twice.
CREATE TABLE memory (
	group_folder TEXT NOT NULL,
	id           INTEGER NOT NULL,
	fact         TEXT NOT NULL,
	normal       TEXT, -- what makes two of them the same; NULL: forgotten
	source       TEXT NOT NULL,
	created_at   TEXT NOT NULL,
	updated_at   TEXT NOT NULL,
	origin       TEXT NOT NULL DEFAULT '', -- idempotency key
	forgotten_by TEXT NOT NULL DEFAULT '', -- the same, of the request that did it
	PRIMARY KEY (group_folder, id),
	UNIQUE (group_folder, normal)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX memory_origin ON memory (origin) WHERE origin <> '';

-- The words of messages, by their seq, and of what an agent said and its channel
-- keeps no message of, by the outbox's id below zero. chat is one word. A chat is
-- indexed when it is searched, so that storing a message costs no more:
-- history_upto says how far it is.
CREATE VIRTUAL TABLE history USING fts5 (
	chat, sender, content, content='', contentless_delete=1, tokenize='unicode61 remove_diacritics 2'
);
CREATE TABLE history_upto (
	chat_jid TEXT PRIMARY KEY,
	seq      INTEGER NOT NULL DEFAULT 0,
	outbox   INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX outbox_chat ON outbox (chat_jid, id);

-- +goose StatementBegin
CREATE TRIGGER history_changed AFTER UPDATE OF content, sender_name ON messages
WHEN (new.content <> old.content OR new.sender_name <> old.sender_name)
	AND new.seq <= (SELECT seq FROM history_upto WHERE chat_jid = new.chat_jid)
BEGIN
	INSERT OR REPLACE INTO history (rowid, chat, sender, content) VALUES (new.seq, hex(new.chat_jid), new.sender_name, new.content);
END;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TRIGGER history_removed AFTER DELETE ON messages
BEGIN
	DELETE FROM history WHERE rowid = old.seq;
END;
-- +goose StatementEnd

-- +goose Down
-- Going back means restoring a backup.
