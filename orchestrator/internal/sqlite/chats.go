package sqlite

import (
	"context"

	"berth/orchestrator/internal/berth"
)

// Chats returns the registered chats, and then the other ones that are groups,
// each by the last activity, newest first, and up to limit of them.
func (db *DB) Chats(ctx context.Context, limit int) ([]berth.Chat, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT c.jid, coalesce(g.name, c.name), max(c.last_message_time,
			coalesce((SELECT timestamp FROM messages WHERE chat_jid = c.jid ORDER BY seq DESC LIMIT 1), '')) AS active, coalesce(g.folder, '')
		FROM chats c LEFT JOIN registered_groups g ON g.jid = c.jid WHERE g.jid IS NOT NULL OR c.is_group = 1
		ORDER BY g.jid IS NULL, active DESC, c.jid LIMIT ?`, limit)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	var out []berth.Chat
	for rows.Next() {
		var c berth.Chat
		var at string
		if err := rows.Scan(&c.JID, &c.Name, &at, &c.Folder); err != nil {
			return nil, explain(err)
		}
		c.LastActivity = parseTime(at)
		out = append(out, c)
	}
	return out, explain(rows.Err())
}
