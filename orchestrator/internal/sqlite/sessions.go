package sqlite

import "context"

// DropSessions forgets the sessions that a group had, of all engines.
func (db *DB) DropSessions(ctx context.Context, folder string) error {
	return db.writer.do(ctx, func(t *tx) error {
		return t.exec(`DELETE FROM sessions WHERE group_folder = ?`, folder)
	})
}
