package sqlite

import (
	"context"
	"time"

	"berth/orchestrator/internal/berth"
)

// maxCompactions is how many runs may be given the same wish in vain.
const maxCompactions = 3

// waits is of the compactions that no live run was given.
const waits = `(run_id = '' OR run_id NOT IN (SELECT id FROM runs WHERE ended_at IS NULL))`

// AskCompaction records that the conversation of a group is to be made shorter, and
// that a chat is to be told under a key what came of it. A key that is known
// changes nothing. asked is false, and nothing recorded, if there is no
// conversation.
func (db *DB) AskCompaction(ctx context.Context, g berth.Group, replyTo, key string) (asked bool, err error) {
	err = db.writer.do(ctx, func(t *tx) error {
		var known bool
		if _, err := t.get([]any{&known, &asked}, `SELECT
			EXISTS (SELECT 1 FROM compactions WHERE key = ?1) OR EXISTS (SELECT 1 FROM outbox WHERE key = ?1),
			EXISTS (SELECT 1 FROM sessions WHERE group_folder = ?2) OR EXISTS (SELECT 1 FROM runs WHERE ended_at IS NULL AND group_folder = ?2)`,
			key, g.Folder); err != nil {
			return err
		}
		if known || !asked {
			asked = known
			return nil
		}
		return t.exec(`INSERT INTO compactions (group_folder, chat_jid, reply_to, key) VALUES (?, ?, ?, ?)`, g.Folder, g.JID, replyTo, key)
	})
	return asked, err
}

// BeginCompaction records a new run whose first turn is a compaction, if the run's
// group waits for one; id is never used again. Who waits is told nothing if the
// group has no session, and failed if there were too many attempts: then ok is
// false and no run recorded. It fails with berth.Conflict while the group has
// another live run.
func (db *DB) BeginCompaction(ctx context.Context, run berth.Run, nothing, failed string) (id int64, ok bool, err error) {
	if waiting, err := db.compactionWaits(ctx, run.ChatJID); err != nil || !waiting {
		return 0, false, err
	}
	err = db.writer.do(ctx, func(t *tx) error {
		id, ok = 0, false
		var session bool
		if _, err := t.get([]any{&id, &session}, `SELECT coalesce((SELECT min(id) FROM compactions WHERE chat_jid = ? AND `+waits+`), 0),
			EXISTS (SELECT 1 FROM sessions WHERE group_folder = ? AND engine = ?)`, run.ChatJID, run.Folder, run.Engine); err != nil || id == 0 {
			return err
		}
		if !session {
			return t.tellCompactions(nothing, `chat_jid = ? AND `+waits, run.ChatJID)
		}
		if id, ok, err = t.claimCompaction(run.ID, run.ChatJID, failed); err != nil || !ok {
			return err
		}
		return t.beginRun(run)
	})
	return id, ok && err == nil, err
}

// NextCompaction gives a live run the compaction that its chat waits for; ok is
// false if there is none. failed is as in BeginCompaction.
func (db *DB) NextCompaction(ctx context.Context, runID, chatJID, failed string) (id int64, ok bool, err error) {
	if waiting, err := db.compactionWaits(ctx, chatJID); err != nil || !waiting {
		return 0, false, err
	}
	err = db.writer.do(ctx, func(t *tx) error {
		id, ok, err = t.claimCompaction(runID, chatJID, failed)
		return err
	})
	return id, ok && err == nil, err
}

func (db *DB) compactionWaits(ctx context.Context, chatJID string) (waiting bool, err error) {
	err = db.read.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM compactions WHERE chat_jid = ? AND `+waits+`)`, chatJID).Scan(&waiting)
	return waiting, explain(err)
}

// claimCompaction gives a run all that its chat waits for as one.
func (t *tx) claimCompaction(runID, chatJID, failed string) (id int64, ok bool, err error) {
	if err := t.tellCompactions(failed, `chat_jid = ? AND attempts >= ? AND `+waits, chatJID, maxCompactions); err != nil {
		return 0, false, err
	}
	if _, err := t.get([]any{&id}, `SELECT coalesce((SELECT min(id) FROM compactions WHERE chat_jid = ? AND `+waits+`), 0)`, chatJID); err != nil || id == 0 {
		return 0, false, err
	}
	return id, true, t.exec(`UPDATE compactions SET run_id = ?, attempts = attempts + 1 WHERE chat_jid = ? AND `+waits, runID, chatJID)
}

// OpenCompaction returns the compaction that a run was given and that nobody was
// told of.
func (db *DB) OpenCompaction(ctx context.Context, runID string) (id int64, ok bool, err error) {
	err = db.read.QueryRowContext(ctx, `SELECT coalesce((SELECT min(id) FROM compactions WHERE run_id = ?), 0)`, runID).Scan(&id)
	return id, id != 0, explain(err)
}

// EndCompaction tells who waits for the compaction that a run was given what came of
// it.
func (db *DB) EndCompaction(ctx context.Context, runID, text string) error {
	return db.writer.do(ctx, func(t *tx) error { return t.tellCompactions(text, `run_id = ?`, runID) })
}

// tellCompactions ends the compactions of a condition with a text.
func (t *tx) tellCompactions(text, which string, args ...any) error {
	rows, err := t.query(`SELECT reply_to, key FROM compactions WHERE `+which+` ORDER BY id`, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	var out []berth.Outgoing
	for rows.Next() {
		o := berth.Outgoing{Kind: berth.OutNotice, Text: text, MessageID: berth.NewID(10), CreatedAt: time.Now()}
		if err := rows.Scan(&o.ChatJID, &o.Key); err != nil {
			return err
		}
		out = append(out, o)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	for _, o := range out {
		if err := t.addOutgoing(o); err != nil {
			return err
		}
	}
	return t.exec(`DELETE FROM compactions WHERE `+which, args...)
}
