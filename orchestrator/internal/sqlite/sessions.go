package sqlite

import (
	"context"
	"time"

	"berth/orchestrator/internal/berth"
)

// DropSessions forgets the sessions that a group had, of all engines. What a live
// run of it says afterwards does not bring one back, whatever daemon hears it.
func (db *DB) DropSessions(ctx context.Context, folder string) error {
	return db.writer.do(ctx, func(t *tx) error {
		if err := t.exec(`UPDATE runs SET renewed = 1 WHERE ended_at IS NULL AND group_folder = ?`, folder); err != nil {
			return err
		}
		return t.exec(`DELETE FROM sessions WHERE group_folder = ?`, folder)
	})
}

// EndSession forgets the session that a group has with an engine if it began
// before a time, or has had so many turns; a zero time and 0 turns mean no such
// limit. It returns the session that ended, or "".
func (db *DB) EndSession(ctx context.Context, folder, engine string, before time.Time, turns int) (ended string, err error) {
	since := ""
	if !before.IsZero() {
		since = formatTime(before)
	}
	const over = `group_folder = ?1 AND engine = ?2 AND (began_at < ?3 OR ?4 > 0 AND turns >= ?4)`
	var found bool // usually not, and then no run has to wait for the disk
	if err := db.read.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM sessions WHERE `+over+`)`, folder, engine, since, turns).Scan(&found); err != nil || !found {
		return "", explain(err)
	}
	err = db.writer.do(ctx, func(t *tx) error {
		ended = ""
		_, err := t.get([]any{&ended}, `DELETE FROM sessions WHERE `+over+` RETURNING session_id`, folder, engine, since, turns)
		return err
	})
	return ended, err
}

// countTurn counts a turn of the session that a run goes on with. A task that is
// isolated has one of its own.
func (t *tx) countTurn(folder, engine, task string) error {
	return t.exec(`UPDATE sessions SET turns = turns + 1 WHERE group_folder = ?1 AND engine = ?2
		AND (?3 = '' OR EXISTS (SELECT 1 FROM scheduled_tasks WHERE group_folder = ?1 AND id = ?3 AND context_mode = ?4))`,
		folder, engine, task, berth.ContextGroup)
}
