package sqlite

import (
	"context"
	"strings"
	"unicode"

	"berth/orchestrator/internal/berth"
)

// What is kept of refusals. A group that is refused all the time does not push
// out what others were refused.
const (
	maxAudits      = 10_000
	maxGroupAudits = 1_000
)

// AddAudit records a refusal. The newest 1 000 of a group are kept, and the
// newest 10 000 of all. Control characters are replaced.
func (db *DB) AddAudit(ctx context.Context, a berth.Audit) error {
	return db.writer.do(ctx, func(t *tx) error {
		if err := t.exec(`INSERT INTO audit (at, group_folder, run_id, what, target, reason) VALUES (?, ?, ?, ?, ?, ?)`,
			formatTime(a.At), a.Folder, a.RunID, a.What, printable(a.Target, 256), printable(a.Reason, 512)); err != nil {
			return err
		}
		if err := t.exec(`DELETE FROM audit WHERE id <= (SELECT id FROM audit ORDER BY id DESC LIMIT 1 OFFSET ?)`, maxAudits); err != nil {
			return err
		}
		return t.exec(`DELETE FROM audit WHERE group_folder = ? AND id <=
			(SELECT id FROM audit WHERE group_folder = ? ORDER BY id DESC LIMIT 1 OFFSET ?)`, a.Folder, a.Folder, maxGroupAudits)
	})
}

// Audits returns up to limit refusals, newest first: those of a folder, or all
// if it is empty.
func (db *DB) Audits(ctx context.Context, limit int, folder string) ([]berth.Audit, error) {
	query, args := `SELECT id, at, group_folder, run_id, what, target, reason FROM audit ORDER BY id DESC LIMIT ?`, []any{limit}
	if folder != "" {
		query, args = `SELECT id, at, group_folder, run_id, what, target, reason FROM audit WHERE group_folder = ? ORDER BY id DESC LIMIT ?`, []any{folder, limit}
	}
	rows, err := db.read.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	var out []berth.Audit
	for rows.Next() {
		var a berth.Audit
		var at string
		if err := rows.Scan(&a.ID, &at, &a.Folder, &a.RunID, &a.What, &a.Target, &a.Reason); err != nil {
			return nil, explain(err)
		}
		a.At = parseTime(at)
		out = append(out, a)
	}
	return out, explain(rows.Err())
}

// printable returns the first n characters of s, and replaces those that are not
// for a terminal.
func printable(s string, n int) string {
	var out strings.Builder
	for _, r := range s {
		if n--; n < 0 {
			break
		}
		if !unicode.IsPrint(r) {
			r = '\uFFFD'
		}
		out.WriteRune(r)
	}
	return out.String()
}
