package sqlite

import (
	"time"

	"berth/orchestrator/internal/berth"
)

// Bounds of what waits for a chat's agent to be told.
const (
	maxNotes = 6
	maxNote  = 2000 // characters of one
)

// addNote keeps a text until the agent of a chat is told it. Of the same text only
// the newest is kept.
func (x *tx) addNote(chat, text string, at time.Time) error {
	text = firstOf(text, maxNote)
	// What was told, in a turn that is over, is not needed any more.
	if err := x.exec(`DELETE FROM notes WHERE chat_jid = ? AND (told = 0 AND text = ?
		OR EXISTS (SELECT 1 FROM batches WHERE id = notes.told AND state = 'done'))`, chat, text); err != nil {
		return err
	}
	if err := x.exec(`INSERT INTO notes (chat_jid, text, created_at) VALUES (?, ?, ?)`, chat, text, formatTime(at)); err != nil {
		return err
	}
	return x.exec(`DELETE FROM notes WHERE id IN (SELECT id FROM notes WHERE chat_jid = ? AND told = 0 ORDER BY id DESC LIMIT -1 OFFSET ?)`, chat, maxNotes)
}

// takeNotes gives a batch what its chat's agent was not told yet.
func (x *tx) takeNotes(b *berth.Batch) error {
	n, err := x.execN(`UPDATE notes SET told = ? WHERE chat_jid = ? AND told = 0`, b.ID, b.ChatJID)
	if err != nil || n == 0 {
		return err
	}
	return x.notes(b)
}

// notes reads what takeNotes gave to a batch.
func (x *tx) notes(b *berth.Batch) error {
	rows, err := x.query(`SELECT text, created_at FROM notes WHERE chat_jid = ? AND told = ? ORDER BY id`, b.ChatJID, b.ID)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var n berth.Note
		var at string
		if err := rows.Scan(&n.Text, &at); err != nil {
			return err
		}
		n.Time = parseTime(at)
		b.Notes = append(b.Notes, n)
	}
	return rows.Err()
}

// untakeNotes takes back what a batch was given that came to nothing.
func (x *tx) untakeNotes(b berth.Batch) error {
	return x.exec(`UPDATE notes SET told = 0 WHERE chat_jid = ? AND told = ?`, b.ChatJID, b.ID)
}
