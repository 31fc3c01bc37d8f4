package whatsapp

import (
	"context"
	"encoding/json"
	"fmt"

	"go.uber.org/zap"
)

// What is kept beside the session, and lost with it.
const (
	keptVersion   = "version"
	keptPhoneSeen = "phone seen"
	keptAccount   = "account"
	keptGroups    = "groups"
)

func (c *Channel) prepare(ctx context.Context) error {
	_, err := c.db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS berth_kept (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
		CREATE TABLE IF NOT EXISTS berth_wrote (address TEXT PRIMARY KEY) STRICT`)
	return err
}

func (c *Channel) kept(ctx context.Context, name string, into any) error {
	var text string
	if err := c.db.QueryRowContext(ctx, `SELECT value FROM berth_kept WHERE name = ?`, name).Scan(&text); err != nil {
		return err
	}
	return json.Unmarshal([]byte(text), into)
}

// keep stores what can be had again: a failure is only logged.
func (c *Channel) keep(ctx context.Context, name string, value any) {
	text, err := json.Marshal(value)
	if err == nil {
		_, err = c.db.ExecContext(ctx, `INSERT INTO berth_kept (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value`, name, string(text))
	}
	if err != nil && ctx.Err() == nil {
		c.log.Warn("keep "+name, zap.Error(fmt.Errorf("write the session's database: %w", err)))
	}
}
