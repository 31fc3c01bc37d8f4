-- +goose Up

-- The first seven tables carry the names that CamBot-Agent and NanoClaw use.
CREATE TABLE chats (
	jid               TEXT PRIMARY KEY,
	name              TEXT NOT NULL,
	channel           TEXT NOT NULL DEFAULT '',
	is_group          INTEGER NOT NULL DEFAULT 0,
	last_message_time TEXT NOT NULL DEFAULT ''
) STRICT;

-- seq is the order of everything; timestamp is what the channel said.
-- wakes is decided once, when the message arrives.
CREATE TABLE messages (
	seq            INTEGER PRIMARY KEY AUTOINCREMENT,
	id             TEXT NOT NULL,
	chat_jid       TEXT NOT NULL REFERENCES chats(jid),
	sender         TEXT NOT NULL DEFAULT '',
	sender_name    TEXT NOT NULL DEFAULT '',
	content        TEXT NOT NULL,
	timestamp      TEXT NOT NULL,
	is_from_me     INTEGER NOT NULL DEFAULT 0,
	is_bot_message INTEGER NOT NULL DEFAULT 0,
	wakes          INTEGER NOT NULL DEFAULT 0,
	UNIQUE (chat_jid, id)
) STRICT;
CREATE INDEX messages_chat ON messages (chat_jid, seq);
CREATE INDEX messages_wakes ON messages (chat_jid, seq) WHERE wakes = 1;

CREATE TABLE registered_groups (
	jid              TEXT PRIMARY KEY,
	name             TEXT NOT NULL,
	folder           TEXT NOT NULL UNIQUE COLLATE NOCASE,
	trigger_pattern  TEXT NOT NULL DEFAULT '',
	requires_trigger INTEGER NOT NULL DEFAULT 1,
	container_config TEXT NOT NULL DEFAULT '{}',
	added_at         TEXT NOT NULL
) STRICT;

CREATE TABLE sessions (
	group_folder TEXT NOT NULL,
	engine       TEXT NOT NULL DEFAULT '',
	session_id   TEXT NOT NULL,
	PRIMARY KEY (group_folder, engine)
) STRICT;

CREATE TABLE router_state (
	key   TEXT PRIMARY KEY,
	value TEXT NOT NULL
) STRICT;

CREATE TABLE scheduled_tasks (
	id             TEXT PRIMARY KEY,
	group_folder   TEXT NOT NULL,
	chat_jid       TEXT NOT NULL,
	prompt         TEXT NOT NULL,
	schedule_type  TEXT NOT NULL,
	schedule_value TEXT NOT NULL,
	context_mode   TEXT NOT NULL DEFAULT 'isolated',
	next_run       TEXT,
	last_run       TEXT,
	last_result    TEXT,
	status         TEXT NOT NULL DEFAULT 'active',
	created_at     TEXT NOT NULL
) STRICT;
CREATE INDEX scheduled_tasks_due ON scheduled_tasks (next_run) WHERE status = 'active';

CREATE TABLE task_run_logs (
	id          INTEGER PRIMARY KEY AUTOINCREMENT,
	task_id     TEXT NOT NULL REFERENCES scheduled_tasks(id) ON DELETE CASCADE,
	run_at      TEXT NOT NULL,
	duration_ms INTEGER NOT NULL,
	status      TEXT NOT NULL,
	result      TEXT,
	error       TEXT
) STRICT;
CREATE INDEX task_run_logs_task ON task_run_logs (task_id, run_at);

-- How far the agent of a chat has come. It outlives the group's registration,
-- so that a group that is added again does not answer old messages.
CREATE TABLE progress (
	chat_jid   TEXT PRIMARY KEY,
	agent_seq  INTEGER NOT NULL DEFAULT 0, -- the agent cursor: all up to here is done
	parked_seq INTEGER NOT NULL DEFAULT 0, -- given up for now: only a later message wakes the group
	attempts   INTEGER NOT NULL DEFAULT 0, -- failed runs in a row
	retry_at   INTEGER NOT NULL DEFAULT 0, -- Unix milliseconds; 0 = no retry is due
	last_error TEXT NOT NULL DEFAULT ''
) STRICT;

CREATE TABLE runs (
	id           TEXT PRIMARY KEY,
	group_folder TEXT NOT NULL,
	chat_jid     TEXT NOT NULL,
	kind         TEXT NOT NULL,
	container_id TEXT NOT NULL DEFAULT '',
	image        TEXT NOT NULL DEFAULT '',
	engine       TEXT NOT NULL DEFAULT '',
	nonce        TEXT NOT NULL,
	last_seq     INTEGER NOT NULL DEFAULT 0,
	started_at   TEXT NOT NULL,
	ended_at     TEXT,
	exit_code    INTEGER,
	error        TEXT NOT NULL DEFAULT '',
	error_class  TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX runs_live ON runs (started_at) WHERE ended_at IS NULL;

CREATE TABLE batches (
	id       INTEGER PRIMARY KEY AUTOINCREMENT,
	run_id   TEXT NOT NULL REFERENCES runs(id),
	chat_jid TEXT NOT NULL,
	from_seq INTEGER NOT NULL, -- exclusive
	to_seq   INTEGER NOT NULL, -- inclusive
	ack_id   TEXT NOT NULL,
	input    INTEGER NOT NULL DEFAULT 0,
	state    TEXT NOT NULL,
	answered INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX batches_run ON batches (run_id);
CREATE INDEX batches_chat ON batches (chat_jid, to_seq);

CREATE TABLE outbox (
	id         INTEGER PRIMARY KEY AUTOINCREMENT,
	chat_jid   TEXT NOT NULL,
	key        TEXT NOT NULL UNIQUE,
	kind       TEXT NOT NULL,
	text       TEXT NOT NULL,
	message_id TEXT NOT NULL,
	answers_to INTEGER NOT NULL DEFAULT 0,
	state      TEXT NOT NULL,
	attempts   INTEGER NOT NULL DEFAULT 0,
	not_before INTEGER NOT NULL DEFAULT 0, -- Unix milliseconds
	created_at TEXT NOT NULL,
	error      TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX outbox_pending ON outbox (chat_jid, id) WHERE state = 'pending';
CREATE INDEX outbox_answers ON outbox (chat_jid, answers_to);

-- +goose Down
-- Going back means restoring a backup.
