package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"time"

	"berth/orchestrator/internal/berth"
)

// AddOutgoing queues texts for their chats. One whose key is known is already
// queued, or sent, and is skipped. One of the chat's own turn answers what that
// turn was given, so that a failure afterwards does not answer it again. Messages
// of agents fail with berth.Conflict while a chat has 500 texts that wait, and those
// with a file while its files have berth.MaxFiles bytes.
func (db *DB) AddOutgoing(ctx context.Context, out ...berth.Outgoing) error {
	return db.writer.do(ctx, func(t *tx) error {
		for _, o := range out {
			if o.OwnTurn {
				if _, err := t.get([]any{&o.AnswersTo}, `SELECT coalesce(max(to_seq), 0) FROM batches WHERE chat_jid = ? AND state IN ('sent', 'consumed')`, o.ChatJID); err != nil {
					return err
				}
				if err := t.exec(`UPDATE batches SET answered = 1 WHERE chat_jid = ? AND state IN ('sent', 'consumed')`, o.ChatJID); err != nil {
					return err
				}
				if err := t.taskSpoke(o.ChatJID); err != nil {
					return err
				}
			}
			if o.Kind == berth.OutMessage || o.Kind == berth.OutReaction {
				if err := t.room(o); err != nil {
					return err
				}
			}
			if err := t.addOutgoing(o); err != nil {
				return err
			}
		}
		return nil
	})
}

// maxWaiting bounds what an agent can make wait in the store for a chat.
const maxWaiting = 500

// room fails if a chat has too much waiting for one more text.
func (t *tx) room(o berth.Outgoing) error {
	var full, known bool
	_, err := t.get([]any{&full, &known}, `SELECT
		(SELECT count(*) FROM (SELECT 1 FROM outbox WHERE chat_jid = ?1 AND state = 'pending'`+limit(maxWaiting)+`)) >= ?2,
		EXISTS (SELECT 1 FROM outbox WHERE key = ?3)`, o.ChatJID, maxWaiting, o.Key)
	if err == nil && full && !known {
		err = berth.Errorf(berth.Conflict, "%d texts wait to be sent to this chat: wait until they are", maxWaiting)
	}
	if err != nil || known || o.File == "" {
		return err
	}
	var held int64
	_, err = t.get([]any{&held}, `SELECT coalesce(sum(file_size), 0) FROM outbox WHERE chat_jid = ? AND `+withFile, o.ChatJID)
	if err == nil && held+o.FileSize > berth.MaxFiles {
		err = berth.Errorf(berth.Conflict, "files with %d MiB wait to be sent to this chat, and %d may: wait until they are, or ask the operator to look at the outbox",
			held>>20, berth.MaxFiles>>20)
	}
	return err
}

// withFile is of the texts whose files are still needed.
const withFile = `file <> '' AND state IN ('pending', 'dead')`

func (t *tx) addOutgoing(o berth.Outgoing) error {
	t.touchOut(o.ChatJID)
	return t.exec(`INSERT INTO outbox (chat_jid, key, kind, text, file, file_size, reacts_to, message_id, answers_to, state, created_at)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'pending', ?) ON CONFLICT (key) DO NOTHING`,
		o.ChatJID, o.Key, o.Kind, o.Text, o.File, o.FileSize, o.ReactsTo, o.MessageID, o.AnswersTo, formatTime(o.CreatedAt))
}

// OutboxChats returns the chats that have texts to send.
func (db *DB) OutboxChats(ctx context.Context) ([]string, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT DISTINCT chat_jid FROM outbox WHERE state = 'pending'`)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	var out []string
	for rows.Next() {
		var jid string
		if err := rows.Scan(&jid); err != nil {
			return nil, explain(err)
		}
		out = append(out, jid)
	}
	return out, explain(rows.Err())
}

const outColumns = `id, chat_jid, key, kind, text, file, file_size, reacts_to, message_id, answers_to, state, attempts, not_before, created_at, error`

func scanOutgoing(scan func(...any) error) (o berth.Outgoing, err error) {
	var notBefore int64
	var created string
	err = scan(&o.ID, &o.ChatJID, &o.Key, &o.Kind, &o.Text, &o.File, &o.FileSize, &o.ReactsTo, &o.MessageID, &o.AnswersTo, &o.State, &o.Attempts, &notBefore, &created, &o.Error)
	o.NotBefore, o.CreatedAt = parseMilli(notBefore), parseTime(created)
	return o, err
}

// NextOutgoing returns the oldest text that a chat still has to get; ok is
// false if there is none. Later ones wait for it, whatever its NotBefore.
func (db *DB) NextOutgoing(ctx context.Context, chatJID string) (o berth.Outgoing, ok bool, err error) {
	o, err = scanOutgoing(db.read.QueryRowContext(ctx, `SELECT `+outColumns+`
		FROM outbox WHERE chat_jid = ? AND state = 'pending' ORDER BY id LIMIT 1`, chatJID).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return berth.Outgoing{}, false, nil
	}
	return o, err == nil, explain(err)
}

// Outgoing returns the text of an idempotency key, whatever became of it; ok is
// false if none was queued, or it was sent long ago.
func (db *DB) Outgoing(ctx context.Context, key string) (o berth.Outgoing, ok bool, err error) {
	o, err = scanOutgoing(db.read.QueryRowContext(ctx, `SELECT `+outColumns+` FROM outbox WHERE key = ?`, key).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return berth.Outgoing{}, false, nil
	}
	return o, err == nil, explain(err)
}

// OutboxFiles returns the keys of the texts whose files are still needed: they wait
// to be sent or were given up.
func (db *DB) OutboxFiles(ctx context.Context) ([]string, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT key FROM outbox WHERE `+withFile)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	var out []string
	for rows.Next() {
		var key string
		if err := rows.Scan(&key); err != nil {
			return nil, explain(err)
		}
		out = append(out, key)
	}
	return out, explain(rows.Err())
}

// keptSent is how many texts of a chat are kept after they were sent: to tell what
// answered a message, and to know a text that comes again. Notices stay: some are
// for once and all time.
const keptSent = 1000

// MarkSent notes that the channel took a text.
func (db *DB) MarkSent(ctx context.Context, id int64) error {
	return db.writer.do(ctx, func(t *tx) error {
		var chat string
		if _, err := t.get([]any{&chat}, `UPDATE outbox SET state = 'sent', error = '' WHERE id = ? RETURNING chat_jid`, id); err != nil {
			return err
		}
		if id%64 != 0 {
			return nil // looking costs as much as there is
		}
		return t.exec(`DELETE FROM outbox WHERE id IN (SELECT id FROM outbox
			WHERE chat_jid = ? AND state = 'sent' AND kind <> 'notice' ORDER BY id DESC LIMIT -1 OFFSET ?)`, chat, keptSent)
	})
}

// MarkFailed notes a failed attempt: the text is tried again at the given time,
// or never if that is zero.
func (db *DB) MarkFailed(ctx context.Context, id int64, reason string, retryAt time.Time) error {
	state := berth.OutPending
	if retryAt.IsZero() {
		state = berth.OutDead
	}
	return db.writer.do(ctx, func(t *tx) error {
		return t.exec(`UPDATE outbox SET state = ?, attempts = attempts + 1, not_before = ?, error = ? WHERE id = ?`,
			string(state), formatMilli(retryAt), reason, id)
	})
}

// OutboxCounts returns how many texts wait to be sent and how many were given up.
func (db *DB) OutboxCounts(ctx context.Context) (pending, dead int, err error) {
	// Each count reads an index of few rows; the outbox itself keeps what was sent.
	err = db.read.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM outbox WHERE state = 'pending'),
		(SELECT count(*) FROM outbox WHERE state = 'dead')`).Scan(&pending, &dead)
	return pending, dead, explain(err)
}

// DeadLetters returns the newest texts that were given up, newest first: for
// which chat, and in Error why.
func (db *DB) DeadLetters(ctx context.Context, limit int) ([]berth.Outgoing, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT `+outColumns+` FROM outbox WHERE state = 'dead' ORDER BY id DESC LIMIT ?`, limit)
	if err != nil {
		return nil, explain(err)
	}
	out, err := collectOutgoing(rows)
	return out, explain(err)
}

// Outbox returns the texts that wait to be sent or were given up, oldest first.
func (db *DB) Outbox(ctx context.Context, limit int) ([]berth.Outgoing, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT `+outColumns+` FROM outbox WHERE state = 'pending'
		UNION ALL SELECT `+outColumns+` FROM outbox WHERE state = 'dead' ORDER BY id LIMIT ?`, limit)
	if err != nil {
		return nil, explain(err)
	}
	out, err := collectOutgoing(rows)
	return out, explain(err)
}

// RetryOutgoing makes texts that were given up wait to be sent again, as if they
// had never been tried: the named ones, or all. One that was not given up fails
// with berth.NotFound, and then nothing is changed.
func (db *DB) RetryOutgoing(ctx context.Context, ids ...int64) (n int, err error) {
	return db.revive(ctx, ids, `state IN ('dead')`, `state = 'pending', attempts = 0, not_before = 0`)
}

// DropOutgoing takes back texts that are not sent yet: the named ones, or all
// that were given up. One that is not there, or was sent, fails with
// berth.NotFound, and then nothing is changed.
func (db *DB) DropOutgoing(ctx context.Context, ids ...int64) (n int, err error) {
	return db.revive(ctx, ids, `state IN ('dead', 'pending')`, `state = 'dropped'`)
}

// revive changes texts: those with the ids, which must be in a state, or all
// that were given up.
func (db *DB) revive(ctx context.Context, ids []int64, state, change string) (n int, err error) {
	err = db.writer.do(ctx, func(t *tx) error {
		n = 0
		if len(ids) == 0 {
			rows, err := t.query(`SELECT id FROM outbox WHERE state = 'dead'`)
			if err != nil {
				return err
			}
			if ids, err = scanIDs(rows); err != nil {
				return err
			}
		}
		for _, id := range ids {
			var chat string
			found, err := t.get([]any{&chat}, `UPDATE outbox SET `+change+` WHERE id = ? AND `+state+` RETURNING chat_jid`, id)
			if err != nil {
				return err
			}
			if !found {
				return berth.Errorf(berth.NotFound, "text %d is not in the outbox, or not in a state for that: see berth outbox ls", id)
			}
			t.touchOut(chat)
			n++
		}
		return nil
	})
	return n, err
}

func scanIDs(rows *sql.Rows) (ids []int64, err error) {
	defer rows.Close()
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}

func collectOutgoing(rows *sql.Rows) ([]berth.Outgoing, error) {
	defer rows.Close()
	var out []berth.Outgoing
	for rows.Next() {
		o, err := scanOutgoing(rows.Scan)
		if err != nil {
			return nil, err
		}
		out = append(out, o)
	}
	return out, rows.Err()
}

// maxUndelivered bounds what a prompt has to say about texts that were given up.
const maxUndelivered = 10

// tell gives a batch the texts of its chat that were given up and that the agent
// was not told of. Of many it takes the newest, and the others as told.
func (t *tx) tell(b *berth.Batch) error {
	n, err := t.execN(`UPDATE outbox SET told = ? WHERE chat_jid = ? AND state = 'dead' AND told = 0`, b.ID, b.ChatJID)
	if err != nil || n == 0 {
		return err
	}
	return t.undelivered(b)
}

// undelivered reads what tell gave to a batch.
func (t *tx) undelivered(b *berth.Batch) error {
	rows, err := t.query(`SELECT `+outColumns+` FROM outbox
		WHERE chat_jid = ? AND state = 'dead' AND told = ? ORDER BY id DESC`+limit(maxUndelivered), b.ChatJID, b.ID)
	if err != nil {
		return err
	}
	b.Undelivered, err = collectOutgoing(rows)
	slices.Reverse(b.Undelivered)
	return err
}

// untell takes back what a batch was given that came to nothing.
func (t *tx) untell(b berth.Batch) error {
	return t.exec(`UPDATE outbox SET told = 0 WHERE chat_jid = ? AND state IN ('dead', 'pending') AND told = ?`, b.ChatJID, b.ID)
}
