package sqlite

import (
	"context"

	"berth/orchestrator/internal/berth"
)

// NameChats stores the names of chats that a channel knows, and the chats
// themselves if they are new.
func (db *DB) NameChats(ctx context.Context, chats []berth.Chat) error {
	return db.writer.do(ctx, func(t *tx) error {
		for _, c := range chats {
			err := t.exec(`INSERT INTO chats (jid, name, channel, is_group) VALUES (?, ?, ?, ?) ON CONFLICT (jid) DO UPDATE SET name = excluded.name`,
				c.JID, c.Name, channelOf(c.JID), isGroup(c.JID))
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// Question returns the newest message of a chat, up to number seq, that woke its
// agent; ok is false if there is none.
func (db *DB) Question(ctx context.Context, chatJID string, seq int64) (m berth.Message, ok bool, err error) {
	rows, err := db.read.QueryContext(ctx, `SELECT `+messageColumns+` FROM messages
		WHERE chat_jid = ? AND seq <= ? AND wakes = 1 ORDER BY seq DESC LIMIT 1`, chatJID, seq)
	if err != nil {
		return m, false, explain(err)
	}
	found, err := scanMessages(rows)
	if err != nil || len(found) == 0 {
		return m, false, err
	}
	return found[0], true, nil
}
