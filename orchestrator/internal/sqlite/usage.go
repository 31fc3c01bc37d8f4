package sqlite

import (
	"context"
	"time"

	"berth/orchestrator/internal/berth"
)

const (
	slot      = 15 * 60                          // seconds that one row sums up
	keepUsage = int64(400 * 24 * 60 * 60 / slot) // slots
	maxModels = 16                               // names of models in one slot of a group
)

// AddUsage adds to what a group used. Sums are kept a quarter of an hour each,
// and for 400 days. Names of models beyond the first 16 of a quarter count
// together as "".
func (db *DB) AddUsage(ctx context.Context, u berth.Usage) error {
	at := u.At.Unix() / slot
	return db.writer.do(ctx, func(t *tx) error {
		model := u.Model
		var many bool
		if _, err := t.get([]any{&many}, `SELECT count(*) >= ?4 AND NOT EXISTS (SELECT 1 FROM usage WHERE group_folder = ?1 AND slot = ?2 AND model = ?3)
			FROM (SELECT DISTINCT model FROM usage WHERE group_folder = ?1 AND slot = ?2)`, u.Folder, at*slot, model, maxModels); err != nil {
			return err
		}
		if many {
			model = ""
		}
		if err := t.exec(`INSERT INTO usage (group_folder, slot, provider, model, estimated, requests, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET requests = requests + excluded.requests,
				input_tokens = input_tokens + excluded.input_tokens, output_tokens = output_tokens + excluded.output_tokens,
				cache_read_tokens = cache_read_tokens + excluded.cache_read_tokens, cache_write_tokens = cache_write_tokens + excluded.cache_write_tokens`,
			u.Folder, at*slot, u.Provider, model, u.Estimated, u.Requests, u.Input, u.Output, u.CacheRead, u.CacheWrite); err != nil {
			return err
		}
		return t.exec(`DELETE FROM usage WHERE slot < ?`, (at-keepUsage)*slot)
	})
}

// Used returns the sums of requests, and of all kinds of tokens, that a group
// used since then: from the quarter of an hour on that holds it.
func (db *DB) Used(ctx context.Context, folder string, since time.Time) (requests, tokens int64, err error) {
	err = db.read.QueryRowContext(ctx, `SELECT coalesce(sum(requests), 0), coalesce(sum(input_tokens + output_tokens + cache_read_tokens + cache_write_tokens), 0)
		FROM usage WHERE group_folder = ? AND slot >= ?`, folder, since.Unix()/slot*slot).Scan(&requests, &tokens)
	return requests, tokens, explain(err)
}

// Usage returns the sums of each day since then, as days are counted in the zone
// of since: by day, group, provider, model, and whether the numbers are
// estimated. At is the day's begin. An empty folder means all groups.
func (db *DB) Usage(ctx context.Context, folder string, since time.Time) ([]berth.Usage, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT slot, group_folder, provider, model, estimated, requests, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens
		FROM usage WHERE slot >= ?1 AND (?2 = '' OR group_folder = ?2) ORDER BY slot, group_folder, provider, model, estimated`, since.Unix()/slot*slot, folder)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	type key struct {
		day                     time.Time
		folder, provider, model string
		estimated               bool
	}
	var out []berth.Usage
	index := make(map[key]int)
	for rows.Next() {
		var u berth.Usage
		var at int64
		if err := rows.Scan(&at, &u.Folder, &u.Provider, &u.Model, &u.Estimated, &u.Requests, &u.Input, &u.Output, &u.CacheRead, &u.CacheWrite); err != nil {
			return nil, explain(err)
		}
		year, month, date := time.Unix(at, 0).In(since.Location()).Date()
		u.At = time.Date(year, month, date, 0, 0, 0, 0, since.Location())
		k := key{u.At, u.Folder, u.Provider, u.Model, u.Estimated}
		i, known := index[k]
		if !known {
			index[k] = len(out)
			out = append(out, u)
			continue
		}
		sum := &out[i]
		sum.Requests += u.Requests
		sum.Input += u.Input
		sum.Output += u.Output
		sum.CacheRead += u.CacheRead
		sum.CacheWrite += u.CacheWrite
	}
	return out, explain(rows.Err())
}
