package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"time"

	"berth/orchestrator/internal/berth"
)

// Limits of one batch. Older messages are left out of the prompt, and said to be.
const (
	maxBatchMessages = 200
	maxBatchBytes    = 1 << 20
)

// Characters that are kept of how a run ended: a container may have said it.
const (
	maxRunError = 2 << 10
	maxClass    = 64
)

// Pending reports whether a chat has a message that should wake its agent, or wants
// its conversation made shorter, and no live run was given that, and when the next
// attempt is due (zero: now). If the clock was set back since that was decided, it
// is not later than decided.
func (db *DB) Pending(ctx context.Context, chatJID string) (pending bool, retryAt time.Time, err error) {
	var retry, wait int64
	err = db.read.QueryRowContext(ctx, `SELECT
		EXISTS (SELECT 1 FROM messages WHERE chat_jid = ?1 AND wakes = 1 AND seq > max(
			coalesce((SELECT max(agent_seq, parked_seq) FROM progress WHERE chat_jid = ?1), 0),
			coalesce((SELECT max(to_seq) FROM batches WHERE chat_jid = ?1 AND state IN ('sent', 'consumed')), 0)))
		OR EXISTS (SELECT 1 FROM compactions WHERE chat_jid = ?1 AND `+waits+`),
		coalesce((SELECT retry_at FROM progress WHERE chat_jid = ?1), 0),
		coalesce((SELECT retry_wait FROM progress WHERE chat_jid = ?1), 0)`, chatJID).Scan(&pending, &retry, &wait)
	if retry > 0 {
		retry = min(retry, time.Now().UnixMilli()+wait)
	}
	return pending, parseMilli(retry), explain(err)
}

// BeginRun records a new run and gives it all that its chat has pending; ok is
// false, and nothing recorded, if that is nothing. It fails with berth.Conflict
// while the group has another live run.
func (db *DB) BeginRun(ctx context.Context, run berth.Run) (batch berth.Batch, ok bool, err error) {
	err = db.writer.do(ctx, func(t *tx) error {
		if err := t.beginRun(run); err != nil {
			return err
		}
		batch, ok, err = t.claim(run.ID, run.ChatJID, false)
		if err == nil && !ok {
			err = t.exec(`DELETE FROM runs WHERE id = ?`, run.ID)
		}
		return err
	})
	return batch, ok && err == nil, err
}

// beginRun records a new run, the only live one of its group.
func (t *tx) beginRun(run berth.Run) error {
	var other string
	if found, err := t.get([]any{&other}, `SELECT id FROM runs WHERE ended_at IS NULL AND group_folder = ?`, run.Folder); err != nil {
		return err
	} else if found {
		return berth.Errorf(berth.Conflict, "group %s still has the run %s", run.Folder, other)
	}
	return t.exec(`INSERT INTO runs (id, group_folder, chat_jid, kind, task_id, image, engine, nonce, started_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		run.ID, run.Folder, run.ChatJID, run.Kind, run.Task, run.Image, run.Engine, run.Nonce, formatTime(run.StartedAt))
}

// NextBatch gives a live run what its chat has pending by now; ok is false if
// that is nothing. A power cut may take that back: it ends the run as well, and
// what the run was given is pending again in any case.
func (db *DB) NextBatch(ctx context.Context, runID, chatJID string) (batch berth.Batch, ok bool, err error) {
	err = db.writer.doLoosely(ctx, func(t *tx) error {
		batch, ok, err = t.claim(runID, chatJID, true)
		return err
	})
	return batch, ok && err == nil, err
}

// claim takes all pending messages of a chat as one batch, if one of them wakes
// the group.
func (t *tx) claim(runID, chatJID string, input bool) (b berth.Batch, ok bool, err error) {
	var from, to int64
	var wakes bool
	var count int
	if _, err := t.get([]any{&from, &wakes, &count, &to}, `WITH
		p(agent, parked, flying) AS (SELECT
			coalesce((SELECT agent_seq FROM progress WHERE chat_jid = ?1), 0),
			coalesce((SELECT parked_seq FROM progress WHERE chat_jid = ?1), 0),
			coalesce((SELECT max(to_seq) FROM batches WHERE chat_jid = ?1 AND state IN ('sent', 'consumed')), 0)),
		c(first, wake) AS (SELECT max(agent, flying), max(agent, flying, parked) FROM p)
		SELECT first,
			EXISTS (SELECT 1 FROM messages WHERE chat_jid = ?1 AND seq > wake AND wakes = 1),
			(SELECT count(*) FROM messages WHERE chat_jid = ?1 AND seq > first AND is_bot_message = 0),
			(SELECT coalesce(max(seq), 0) FROM messages WHERE chat_jid = ?1 AND seq > first AND is_bot_message = 0)
		FROM c`, chatJID); err != nil || !wakes {
		return b, false, err
	}
	b = berth.Batch{RunID: runID, ChatJID: chatJID, From: from, To: to, State: berth.BatchSent, Input: input}
	if b.Messages, err = t.batchMessages(chatJID, from, to); err != nil {
		return b, false, err
	}
	b.Omitted = count - len(b.Messages)
	b.AckID = b.Messages[len(b.Messages)-1].ID
	t.touch(chatJID)
	_, err = t.get([]any{&b.ID}, `INSERT INTO batches (run_id, chat_jid, from_seq, to_seq, ack_id, input, state) VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING id`,
		runID, chatJID, from, to, b.AckID, input, string(b.State))
	if err == nil {
		err = t.tell(&b)
	}
	if err == nil {
		err = t.takeNotes(&b)
	}
	return b, err == nil, err
}

// batchMessages returns the newest messages that fit, oldest first, at least one.
func (t *tx) batchMessages(chatJID string, from, to int64) ([]berth.Message, error) {
	rows, err := t.query(`SELECT `+messageColumns+` FROM messages
		WHERE chat_jid = ? AND seq > ? AND seq <= ? AND is_bot_message = 0 ORDER BY seq DESC`+limit(maxBatchMessages), chatJID, from, to)
	if err != nil {
		return nil, err
	}
	newest, err := scanMessages(rows)
	if err != nil {
		return nil, err
	}
	size := 0
	for i, m := range newest {
		if size += len(m.Text); size > maxBatchBytes && i > 0 {
			newest = newest[:i]
			break
		}
	}
	slices.Reverse(newest)
	return newest, nil
}

// SetContainer notes which container carries a run.
func (db *DB) SetContainer(ctx context.Context, runID, container string) error {
	return db.writer.do(ctx, func(t *tx) error {
		return t.exec(`UPDATE runs SET container_id = ? WHERE id = ?`, container, runID)
	})
}

// Commit records what a frame of a live run changed.
func (db *DB) Commit(ctx context.Context, p berth.Progress) error {
	return db.writer.do(ctx, func(t *tx) error {
		var folder, engine, chat, task string
		var renewed bool
		found, err := t.get([]any{&folder, &engine, &chat, &task, &renewed}, `SELECT group_folder, engine, chat_jid, task_id, renewed FROM runs WHERE id = ? AND ended_at IS NULL`, p.RunID)
		if err != nil {
			return err
		}
		if !found {
			return berth.Errorf(berth.NotFound, "run %s is not live", p.RunID)
		}
		t.touch(chat)
		if p.Seq > 0 {
			if err := t.exec(`UPDATE runs SET last_seq = max(last_seq, ?) WHERE id = ?`, p.Seq, p.RunID); err != nil {
				return err
			}
		}
		for _, id := range p.Acked {
			if err := t.exec(`UPDATE batches SET state = 'consumed' WHERE run_id = ? AND ack_id = ? AND state = 'sent'`, p.RunID, id); err != nil {
				return err
			}
		}
		if p.Session != "" && !renewed {
			if err := t.exec(`INSERT INTO sessions (group_folder, engine, session_id, began_at) VALUES (?, ?, ?, ?)
				ON CONFLICT (group_folder, engine) DO UPDATE SET session_id = excluded.session_id`, folder, engine, p.Session, formatTime(time.Now())); err != nil {
				return err
			}
		}
		if err := t.answer(p, chat); err != nil {
			return err
		}
		if task != "" {
			if err := t.logTask(p, chat); err != nil {
				return err
			}
		}
		if !p.TurnEnded {
			return nil
		}
		if err := t.countTurn(folder, engine, task); err != nil {
			return err
		}
		return t.endTurn(p.RunID, chat)
	})
}

// answer queues the texts of a frame. A short one that the same turn already
// said, for example by an agent's own message, is not said again; the pieces of
// a long one are never compared.
func (t *tx) answer(p berth.Progress, chat string) error {
	if len(p.Out) == 0 {
		return nil
	}
	var to int64
	_, err := t.get([]any{&to}, `SELECT coalesce(max(to_seq), 0) FROM batches WHERE run_id = ? AND state IN ('consumed', 'done')`, p.RunID)
	if err != nil {
		return err
	}
	for _, o := range p.Out {
		o.ChatJID, o.AnswersTo = chat, to
		said := false
		if len(p.Out) == 1 && to > 0 {
			if _, err := t.get([]any{&said}, `SELECT EXISTS (SELECT 1 FROM outbox WHERE chat_jid = ? AND answers_to = ? AND text = ?)`, chat, to, o.Text); err != nil {
				return err
			}
		}
		if len(p.Out) == 1 && to == 0 {
			if said, err = t.saidByTask(p.RunID, chat, o.Text); err != nil {
				return err
			}
		}
		if said {
			continue
		}
		if err := t.addOutgoing(o); err != nil {
			return err
		}
	}
	return t.exec(`UPDATE batches SET answered = 1 WHERE run_id = ? AND state = 'consumed'`, p.RunID)
}

// endTurn moves the cursor over what the run consumed.
func (t *tx) endTurn(runID, chat string) error {
	var to int64
	if _, err := t.get([]any{&to}, `SELECT coalesce(max(to_seq), 0) FROM batches WHERE run_id = ? AND state = 'consumed'`, runID); err != nil || to == 0 {
		return err
	}
	if err := t.exec(`UPDATE batches SET state = 'done' WHERE run_id = ? AND state = 'consumed'`, runID); err != nil {
		return err
	}
	return t.advance(chat, to)
}

func (t *tx) advance(chat string, to int64) error {
	return t.exec(`INSERT INTO progress (chat_jid, agent_seq) VALUES (?, ?) ON CONFLICT (chat_jid) DO UPDATE
		SET agent_seq = max(agent_seq, excluded.agent_seq), attempts = 0, retry_at = 0, last_error = ''`, chat, to)
}

// FinishRun records how a run ended and settles its open batches. Finishing a
// run twice changes nothing.
func (db *DB) FinishRun(ctx context.Context, e berth.Ending) (v berth.Verdict, err error) {
	e.Error, e.Class = firstOf(e.Error, maxRunError), firstOf(e.Class, maxClass)
	err = db.writer.do(ctx, func(t *tx) error {
		v = berth.Verdict{}
		var folder, engine, chat, task string
		found, err := t.get([]any{&folder, &engine, &chat, &task}, `SELECT group_folder, engine, chat_jid, task_id FROM runs WHERE id = ? AND ended_at IS NULL`, e.RunID)
		if err != nil || !found {
			return err
		}
		t.touch(chat)
		if err := t.exec(`UPDATE runs SET ended_at = ?, exit_code = ?, error = ?, error_class = ? WHERE id = ?`,
			formatTime(e.At), e.ExitCode, e.Error, e.Class, e.RunID); err != nil {
			return err
		}
		if e.DropSession {
			if err := t.exec(`DELETE FROM sessions WHERE group_folder = ? AND engine = ?`, folder, engine); err != nil {
				return err
			}
		}
		if task != "" {
			return t.settleTask(e, folder, chat, task, &v)
		}
		if e.Uncounted {
			if err := t.exec(`UPDATE compactions SET attempts = attempts - 1 WHERE run_id = ?`, e.RunID); err != nil {
				return err
			}
		}
		open, err := t.openBatches(e.RunID)
		if err != nil {
			return err
		}
		var last berth.Batch // the last one that is pending again
		failed := false
		for _, b := range open {
			if b.Answered && (b.State == berth.BatchConsumed || slices.Contains(e.Taken, b.AckID)) {
				if err := t.exec(`UPDATE batches SET state = 'done' WHERE id = ?`, b.ID); err != nil {
					return err
				}
				if err := t.advance(chat, b.To); err != nil {
					return err
				}
				continue
			}
			if err := t.exec(`UPDATE batches SET state = 'returned' WHERE id = ?`, b.ID); err != nil {
				return err
			}
			if err := errors.Join(t.untell(b), t.untakeNotes(b)); err != nil {
				return err
			}
			last = b
			// A follow-up that met a closing run was nobody's failure.
			if e.Error != "" || !b.Input || b.State != berth.BatchSent {
				failed = true
			}
		}
		v.Returned = last.ID != 0
		if !failed || e.Uncounted {
			return nil
		}
		return t.failed(e, chat, last, &v)
	})
	return v, err
}

// failed decides about the next attempt.
func (t *tx) failed(e berth.Ending, chat string, last berth.Batch, v *berth.Verdict) error {
	var attempts int
	if _, err := t.get([]any{&attempts}, `SELECT coalesce((SELECT attempts FROM progress WHERE chat_jid = ?), 0)`, chat); err != nil {
		return err
	}
	attempts++
	v.Parked = e.NoRetry || attempts > len(e.Backoff)
	if v.Parked {
		if err := t.exec(`INSERT INTO progress (chat_jid, parked_seq, last_error) VALUES (?, ?, ?) ON CONFLICT (chat_jid) DO UPDATE
			SET parked_seq = excluded.parked_seq, attempts = 0, retry_at = 0, last_error = excluded.last_error`, chat, last.To, e.Error); err != nil {
			return err
		}
		if e.Notice == "" {
			return nil
		}
		return t.addOutgoing(berth.Outgoing{
			ChatJID: chat, Key: "parked/" + e.RunID, Kind: berth.OutNotice, Text: e.Notice,
			MessageID: berth.NewID(10), AnswersTo: last.To, CreatedAt: e.At,
		})
	}
	wait := e.Backoff[attempts-1]
	if e.RetryIn > 0 {
		wait = e.RetryIn
	}
	v.RetryAt = e.At.Add(wait)
	return t.exec(`INSERT INTO progress (chat_jid, attempts, retry_at, retry_wait, last_error) VALUES (?, ?, ?, ?, ?) ON CONFLICT (chat_jid) DO UPDATE
		SET attempts = excluded.attempts, retry_at = excluded.retry_at, retry_wait = excluded.retry_wait, last_error = excluded.last_error`,
		chat, attempts, formatMilli(v.RetryAt), wait.Milliseconds(), e.Error)
}

const batchColumns = `id, run_id, chat_jid, from_seq, to_seq, ack_id, input, state, answered`

func scanBatches(rows *sql.Rows) ([]berth.Batch, error) {
	defer rows.Close()
	var out []berth.Batch
	for rows.Next() {
		var b berth.Batch
		if err := rows.Scan(&b.ID, &b.RunID, &b.ChatJID, &b.From, &b.To, &b.AckID, &b.Input, &b.State, &b.Answered); err != nil {
			return nil, explain(err)
		}
		out = append(out, b)
	}
	return out, explain(rows.Err())
}

func (t *tx) openBatches(runID string) ([]berth.Batch, error) {
	rows, err := t.query(`SELECT `+batchColumns+` FROM batches WHERE run_id = ? AND state IN ('sent', 'consumed') ORDER BY id`, runID)
	if err != nil {
		return nil, err
	}
	return scanBatches(rows)
}

// OpenBatches returns the batches of a run whose turn has not ended, oldest
// first, with their messages.
func (db *DB) OpenBatches(ctx context.Context, runID string) (open []berth.Batch, err error) {
	err = db.writer.do(ctx, func(t *tx) error {
		if open, err = t.openBatches(runID); err != nil {
			return err
		}
		for i := range open {
			b := &open[i]
			if b.Messages, err = t.batchMessages(b.ChatJID, b.From, b.To); err != nil {
				return err
			}
			if err := errors.Join(t.undelivered(b), t.notes(b)); err != nil {
				return err
			}
		}
		return nil
	})
	return open, err
}

// LiveRuns returns the runs that have not ended, oldest first.
func (db *DB) LiveRuns(ctx context.Context) ([]berth.Run, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT id, group_folder, chat_jid, kind, task_id, container_id, image, engine, nonce, last_seq, renewed, started_at
		FROM runs WHERE ended_at IS NULL ORDER BY started_at`)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	var out []berth.Run
	for rows.Next() {
		r := berth.Run{State: berth.RunStarting}
		var started string
		if err := rows.Scan(&r.ID, &r.Folder, &r.ChatJID, &r.Kind, &r.Task, &r.Container, &r.Image, &r.Engine, &r.Nonce, &r.LastSeq, &r.Renewed, &started); err != nil {
			return nil, explain(err)
		}
		r.StartedAt = parseTime(started)
		out = append(out, r)
	}
	return out, explain(rows.Err())
}

// Session returns the session that a group last had with an engine, or "".
func (db *DB) Session(ctx context.Context, folder, engine string) (id string, err error) {
	err = db.read.QueryRowContext(ctx, `SELECT session_id FROM sessions WHERE group_folder = ? AND engine = ?`, folder, engine).Scan(&id)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return strings.TrimSpace(id), explain(err)
}
