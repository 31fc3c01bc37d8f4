package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"berth/orchestrator/internal/berth"
)

const messageColumns = `seq, id, chat_jid, sender, sender_name, content, timestamp, is_from_me, is_bot_message, wakes`

// AddMessage stores m and returns its sequence number. A message whose id the
// chat already has keeps its number and takes the new text; fresh is false then,
// unless m wakes the group and the other did not.
func (db *DB) AddMessage(ctx context.Context, m berth.Message) (seq int64, fresh bool, err error) {
	err = db.writer.do(ctx, func(t *tx) error {
		t.touch(m.ChatJID)
		seq, fresh, err = t.addMessage(m)
		if unknownChat(err) {
			if err := t.exec(`INSERT INTO chats (jid, name, channel, is_group) VALUES (?, ?, ?, ?)`,
				m.ChatJID, m.ChatJID, channelOf(m.ChatJID), isGroup(m.ChatJID)); err != nil {
				return err
			}
			seq, fresh, err = t.addMessage(m)
		}
		if err != nil || fresh {
			return err
		}
		_, err = t.get([]any{&seq}, `UPDATE messages SET content = ?, sender_name = ? WHERE chat_jid = ? AND id = ? RETURNING seq`,
			m.Text, m.SenderName, m.ChatJID, m.ID)
		if err == nil && m.Wakes {
			var known int64
			known, err = t.execN(`UPDATE messages SET wakes = 1 WHERE seq = ? AND wakes = 0`, seq)
			fresh = known > 0
		}
		if err != nil || !fresh {
			return err
		}
		return t.askAnew(m, &seq)
	})
	return seq, fresh, err
}

// addMessage stores m, unless the chat has its id already.
func (t *tx) addMessage(m berth.Message) (seq int64, fresh bool, err error) {
	return t.insert(`INSERT INTO messages (id, chat_jid, sender, sender_name, content, timestamp, is_from_me, is_bot_message, wakes)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (chat_jid, id) DO NOTHING`,
		m.ID, m.ChatJID, m.Sender, m.SenderName, m.Text, formatTime(m.Time), m.FromMe, m.Bot, m.Wakes)
}

// unknownChat reports whether a message was refused because nothing is known of its
// chat. To look first would cost every message that much more.
func unknownChat(err error) bool {
	e, ok := errors.AsType[*sqlite.Error](err)
	return ok && e.Code() == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY
}

// askAnew gives a message that wakes only now a new place, if its agent was given
// messages behind the old one: it would never look back.
func (t *tx) askAnew(m berth.Message, seq *int64) error {
	gone, err := t.execN(`DELETE FROM messages WHERE seq = ?1 AND ?1 <= max(
		coalesce((SELECT max(agent_seq, parked_seq) FROM progress WHERE chat_jid = ?2), 0),
		coalesce((SELECT max(to_seq) FROM batches WHERE chat_jid = ?2 AND state IN ('sent', 'consumed')), 0))`, *seq, m.ChatJID)
	if err != nil || gone == 0 {
		return err
	}
	_, err = t.get([]any{seq}, `INSERT INTO messages (id, chat_jid, sender, sender_name, content, timestamp, is_from_me, is_bot_message, wakes)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1) RETURNING seq`, m.ID, m.ChatJID, m.Sender, m.SenderName, m.Text, formatTime(m.Time), m.FromMe, m.Bot)
	return err
}

// MessagesAfter returns up to limit messages of a chat with a sequence number
// above seq, oldest first, those of Berth included.
func (db *DB) MessagesAfter(ctx context.Context, chatJID string, seq int64, limit int) ([]berth.Message, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT `+messageColumns+` FROM messages WHERE chat_jid = ? AND seq > ? ORDER BY seq LIMIT ?`, chatJID, seq, limit)
	if err != nil {
		return nil, explain(err)
	}
	return scanMessages(rows)
}

// LastSeq returns the number of the newest message but skip in a chat, or 0.
func (db *DB) LastSeq(ctx context.Context, chatJID string, skip int) (seq int64, err error) {
	err = db.read.QueryRowContext(ctx, `SELECT coalesce((SELECT seq FROM messages WHERE chat_jid = ? ORDER BY seq DESC LIMIT 1 OFFSET ?), 0)`, chatJID, skip).Scan(&seq)
	return seq, explain(err)
}

// Fate returns what became of message seq. It fails with berth.NotFound if
// there is no such message.
func (db *DB) Fate(ctx context.Context, seq int64) (fate berth.Fate, chatJID string, err error) {
	tx, err := db.read.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return fate, "", explain(err)
	}
	defer tx.Rollback()
	var parked int64
	var waking bool
	err = tx.QueryRowContext(ctx, `SELECT m.chat_jid, coalesce(p.parked_seq, 0), coalesce(p.last_error, ''),
			EXISTS (SELECT 1 FROM messages w WHERE w.chat_jid = m.chat_jid AND w.seq >= m.seq AND w.wakes = 1)
		FROM messages m LEFT JOIN progress p ON p.chat_jid = m.chat_jid WHERE m.seq = ?`, seq).
		Scan(&chatJID, &parked, &fate.Error, &waking)
	if err == sql.ErrNoRows {
		return fate, "", berth.Errorf(berth.NotFound, "there is no message #%d", seq)
	} else if err != nil {
		return fate, "", explain(err)
	}
	var state berth.BatchState
	var to int64
	err = tx.QueryRowContext(ctx, `SELECT state, run_id, to_seq FROM batches
		WHERE chat_jid = ? AND from_seq < ? AND to_seq >= ? ORDER BY id DESC LIMIT 1`, chatJID, seq, seq).
		Scan(&state, &fate.RunID, &to)
	if err != nil && err != sql.ErrNoRows {
		return fate, "", explain(err)
	}
	switch {
	case state == berth.BatchDone:
		fate.State, fate.Error = berth.FateDone, ""
	case state == berth.BatchSent || state == berth.BatchConsumed:
		fate.State, fate.Error = berth.FatePending, ""
	case parked >= seq:
		fate.State = berth.FateFailed
	case waking:
		fate.State = berth.FatePending
	default:
		fate.State, fate.Error = berth.FateContext, ""
	}
	if to == 0 {
		return fate, chatJID, nil
	}
	rows, err := tx.QueryContext(ctx, `SELECT kind, text, file, file_size FROM outbox WHERE chat_jid = ? AND answers_to = ? ORDER BY id`, chatJID, to)
	if err != nil {
		return fate, "", explain(err)
	}
	defer rows.Close()
	for rows.Next() {
		var o berth.Outgoing
		if err := rows.Scan(&o.Kind, &o.Text, &o.File, &o.FileSize); err != nil {
			return fate, "", explain(err)
		}
		fate.Texts = append(fate.Texts, o.Shown())
	}
	return fate, chatJID, explain(rows.Err())
}

func scanMessages(rows *sql.Rows) ([]berth.Message, error) {
	defer rows.Close()
	var out []berth.Message
	for rows.Next() {
		m, err := scanMessage(rows)
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, explain(rows.Err())
}

func scanMessage(rows *sql.Rows) (m berth.Message, err error) {
	var at string
	err = rows.Scan(&m.Seq, &m.ID, &m.ChatJID, &m.Sender, &m.SenderName, &m.Text, &at, &m.FromMe, &m.Bot, &m.Wakes)
	m.Time = parseTime(at)
	return m, explain(err)
}

const timeLayout = "2006-01-02T15:04:05.000Z"

func formatTime(t time.Time) string { return t.UTC().Format(timeLayout) }

// parseTime returns the zero time for what formatTime did not write.
func parseTime(s string) time.Time {
	t, _ := time.Parse(time.RFC3339Nano, s)
	return t
}

func formatMilli(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func parseMilli(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

func channelOf(jid string) string {
	if strings.HasPrefix(jid, "console:") {
		return "console"
	}
	if strings.HasSuffix(jid, "@g.us") || strings.HasSuffix(jid, "@s.whatsapp.net") || strings.HasSuffix(jid, "@lid") {
		return "whatsapp"
	}
	return ""
}

func isGroup(jid string) bool {
	return strings.HasPrefix(jid, "console:") || strings.HasSuffix(jid, "@g.us")
}
