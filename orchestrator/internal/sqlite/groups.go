package sqlite

import (
	"context"
	"encoding/json"
	"fmt"

	"berth/orchestrator/internal/berth"
)

// AddGroup registers g. It fails with berth.Conflict if the folder or the chat
// is already registered.
func (db *DB) AddGroup(ctx context.Context, g berth.Group) error {
	config, err := json.Marshal(g.Container)
	if err != nil {
		return fmt.Errorf("encode the container settings: %w", err)
	}
	return db.writer.do(ctx, func(t *tx) error {
		var jid, folder string
		found, err := t.get([]any{&jid, &folder}, `SELECT jid, folder FROM registered_groups WHERE jid = ? OR folder = ?`, g.JID, g.Folder)
		if err != nil {
			return err
		}
		if found {
			return berth.Errorf(berth.Conflict, "chat %s is already registered with the folder %s: remove that group first, or choose another folder", jid, folder)
		}
		t.touch(g.JID)
		if err := t.exec(`INSERT INTO chats (jid, name, channel, is_group) VALUES (?, ?, ?, ?)
			ON CONFLICT (jid) DO UPDATE SET name = excluded.name`, g.JID, g.Name, channelOf(g.JID), isGroup(g.JID)); err != nil {
			return err
		}
		return t.exec(`INSERT INTO registered_groups (jid, name, folder, trigger_pattern, requires_trigger, container_config, added_at)
			VALUES (?, ?, ?, ?, ?, ?, ?)`, g.JID, g.Name, g.Folder, g.Trigger, g.RequiresTrigger, string(config), formatTime(g.AddedAt))
	})
}

// UpdateGroup changes the group of a folder: change gets it as it is and returns
// it as it shall be, of which the name, the trigger and the container settings
// count. It may be called more than once; its error is returned, and then nothing
// was changed. UpdateGroup returns the new group; it fails with berth.NotFound if
// there is none.
func (db *DB) UpdateGroup(ctx context.Context, folder string, change func(berth.Group) (berth.Group, error)) (berth.Group, error) {
	var out berth.Group
	err := db.writer.do(ctx, func(t *tx) error {
		var g berth.Group
		var config, added string
		found, err := t.get([]any{&g.JID, &g.Name, &g.Folder, &g.Trigger, &g.RequiresTrigger, &config, &added},
			`SELECT jid, name, folder, trigger_pattern, requires_trigger, container_config, added_at
			FROM registered_groups WHERE folder = ? COLLATE BINARY`, folder)
		if err != nil {
			return err
		}
		if !found {
			return berth.Errorf(berth.NotFound, "no group has the folder %.80q: see berth groups ls", folder)
		}
		if g, err = readGroup(g, config, added); err != nil {
			return err
		}
		if out, err = change(g); err != nil {
			return err
		}
		fresh, err := json.Marshal(out.Container)
		if err != nil {
			return fmt.Errorf("encode the container settings: %w", err)
		}
		t.touch(g.JID)
		if err := t.exec(`UPDATE chats SET name = ? WHERE jid = ?`, out.Name, g.JID); err != nil {
			return err
		}
		return t.exec(`UPDATE registered_groups SET name = ?, trigger_pattern = ?, requires_trigger = ?, container_config = ? WHERE jid = ?`,
			out.Name, out.Trigger, out.RequiresTrigger, string(fresh), g.JID)
	})
	return out, err
}

// readGroup fills in what the store keeps as text.
func readGroup(g berth.Group, config, added string) (berth.Group, error) {
	if err := json.Unmarshal([]byte(config), &g.Container); err != nil {
		return g, berth.Errorf(berth.Invalid, "the container settings of group %s cannot be read: %w", g.Folder, err)
	}
	g.AddedAt = parseTime(added)
	return g, nil
}

// RemoveGroup unregisters the group of a folder. Its messages and files stay; that
// its conversation should be made shorter is forgotten.
// It fails with berth.NotFound if there is none.
func (db *DB) RemoveGroup(ctx context.Context, folder string) error {
	return db.writer.do(ctx, func(t *tx) error {
		n, err := t.execN(`DELETE FROM registered_groups WHERE folder = ? COLLATE BINARY`, folder)
		if err == nil && n == 0 {
			return berth.Errorf(berth.NotFound, "no group has the folder %s: see berth groups ls", folder)
		}
		if err != nil {
			return err
		}
		return t.exec(`DELETE FROM compactions WHERE group_folder = ?`, folder)
	})
}

// Groups returns all registered groups, ordered by folder.
func (db *DB) Groups(ctx context.Context) ([]berth.Group, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT jid, name, folder, trigger_pattern, requires_trigger, container_config, added_at
		FROM registered_groups ORDER BY folder`)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	var out []berth.Group
	for rows.Next() {
		var g berth.Group
		var config, added string
		if err := rows.Scan(&g.JID, &g.Name, &g.Folder, &g.Trigger, &g.RequiresTrigger, &config, &added); err != nil {
			return nil, explain(err)
		}
		if g, err = readGroup(g, config, added); err != nil {
			return nil, err
		}
		out = append(out, g)
	}
	return out, explain(rows.Err())
}

// Standings returns how far the agent of each registered chat has come.
func (db *DB) Standings(ctx context.Context) (map[string]berth.Standing, error) {
	rows, err := db.read.QueryContext(ctx, `SELECT g.jid, coalesce(p.attempts, 0), coalesce(p.retry_at, 0), coalesce(p.last_error, ''), coalesce(p.parked_seq > p.agent_seq, 0),
			(SELECT count(*) FROM messages m WHERE m.chat_jid = g.jid AND m.seq > coalesce(p.agent_seq, 0) AND m.is_bot_message = 0)
		FROM registered_groups g LEFT JOIN progress p ON p.chat_jid = g.jid`)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	out := make(map[string]berth.Standing)
	for rows.Next() {
		var jid string
		var s berth.Standing
		var retry int64
		if err := rows.Scan(&jid, &s.Attempts, &retry, &s.LastError, &s.GivenUp, &s.Pending); err != nil {
			return nil, explain(err)
		}
		s.RetryAt = parseMilli(retry)
		out[jid] = s
	}
	return out, explain(rows.Err())
}

// State returns the value of a key, or "".
func (db *DB) State(ctx context.Context, key string) (value string, err error) {
	err = db.read.QueryRowContext(ctx, `SELECT coalesce((SELECT value FROM router_state WHERE key = ?), '')`, key).Scan(&value)
	return value, explain(err)
}

// SetState stores the value of a key.
func (db *DB) SetState(ctx context.Context, key, value string) error {
	return db.writer.do(ctx, func(t *tx) error {
		return t.exec(`INSERT INTO router_state (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value`, key, value)
	})
}
