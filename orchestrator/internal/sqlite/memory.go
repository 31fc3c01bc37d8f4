package sqlite

import (
	"context"
	"database/sql"
	"errors"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/memory"
)

// keptIDs is how many ids back a forgotten memory is known as such.
const keptIDs = 100

const memoryColumns = `id, group_folder, fact, source, created_at, updated_at, origin`

func scanMemory(scan func(...any) error) (m memory.Memory, err error) {
	var created, updated string
	err = scan(&m.ID, &m.Folder, &m.Fact, &m.Source, &created, &updated, &m.Origin)
	m.CreatedAt, m.UpdatedAt = parseTime(created), parseTime(updated)
	return m, err
}

// memory returns the one memory for which where holds.
func (x *tx) memory(where string, args ...any) (m memory.Memory, found bool, err error) {
	s, err := x.stmt(`SELECT ` + memoryColumns + ` FROM memory WHERE ` + where)
	if err != nil {
		return m, false, err
	}
	m, err = scanMemory(s.QueryRow(args...).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return m, false, nil
	}
	return m, err == nil, err
}

// AddMemory stores m and returns it with its id. If its folder has the same fact
// already, that one is returned and known is true; a m.Origin that is known
// returns the memory that it made. The error is of kind berth.Invalid for a fact
// that cannot be used, berth.Conflict if the folder has memory.MaxFacts.
func (db *DB) AddMemory(ctx context.Context, m memory.Memory) (out memory.Memory, known bool, err error) {
	if m.Fact, err = memory.Clean(m.Fact); err != nil {
		return m, false, err
	}
	m.Source, m.UpdatedAt = memory.Source(m.Source), m.CreatedAt
	normal := memory.Normal(m.Fact)
	err = db.writer.do(ctx, func(x *tx) error {
		known = false
		if m.Origin != "" {
			have, found, err := x.memory(ofOrigin, m.Origin)
			if out = have; err != nil || found {
				return err
			}
		}
		if out, known, err = x.memory(`group_folder = ? AND normal = ?`, m.Folder, normal); err != nil || known {
			return err
		}
		var last, count int64
		if _, err := x.get([]any{&last, &count}, `SELECT coalesce(max(id), 0), count(normal) FROM memory WHERE group_folder = ?`, m.Folder); err != nil {
			return err
		}
		if count >= memory.MaxFacts {
			return berth.Errorf(berth.Conflict, "%s has %d memories, which is the most: forget one first, or put several into one", m.Folder, count)
		}
		if err := x.exec(`DELETE FROM memory WHERE group_folder = ? AND normal IS NULL AND id < ?`, m.Folder, last-keptIDs); err != nil {
			return err
		}
		x.remembered = true
		out = m
		out.ID = last + 1
		return x.exec(`INSERT INTO memory (group_folder, id, fact, normal, source, created_at, updated_at, origin) VALUES (?, ?, ?, ?, ?, ?, ?, ?)`,
			out.Folder, out.ID, out.Fact, normal, out.Source, formatTime(out.CreatedAt), formatTime(out.UpdatedAt), out.Origin)
	})
	return out, known, err
}

// UpdateMemory gives a memory another fact. The error is of kind berth.Invalid
// for a fact that cannot be used, berth.Conflict if another memory of the folder
// says the same, and berth.NotFound. It uses m's Folder, ID, Fact and UpdatedAt.
func (db *DB) UpdateMemory(ctx context.Context, m memory.Memory) (out memory.Memory, err error) {
	if m.Fact, err = memory.Clean(m.Fact); err != nil {
		return m, err
	}
	normal := memory.Normal(m.Fact)
	err = db.writer.do(ctx, func(x *tx) error {
		same, found, err := x.memory(`group_folder = ? AND normal = ?`, m.Folder, normal)
		if err != nil {
			return err
		}
		if found && same.ID != m.ID {
			return berth.Errorf(berth.Conflict, "memory %d says that already: forget one of them", same.ID)
		}
		if out, err = x.liveMemory(m.Folder, m.ID); err != nil {
			return err
		}
		out.Fact, out.UpdatedAt, x.remembered = m.Fact, m.UpdatedAt, true
		return x.exec(`UPDATE memory SET fact = ?, normal = ?, updated_at = ? WHERE group_folder = ? AND id = ?`,
			out.Fact, normal, formatTime(out.UpdatedAt), out.Folder, out.ID)
	})
	return out, err
}

// ForgetMemory removes a memory and returns what it was. It fails with
// berth.NotFound; not so if origin, which may be empty, is what removed it: then
// the returned memory has no fact any more.
func (db *DB) ForgetMemory(ctx context.Context, folder string, id int64, origin string) (out memory.Memory, err error) {
	err = db.writer.do(ctx, func(x *tx) error {
		if origin != "" {
			again, found, err := x.memory(`group_folder = ? AND id = ? AND forgotten_by = ?`, folder, id, origin)
			if out = again; err != nil || found {
				return err
			}
		}
		if out, err = x.liveMemory(folder, id); err != nil {
			return err
		}
		x.remembered = true
		return x.exec(`UPDATE memory SET fact = '', normal = NULL, source = '', origin = '', forgotten_by = ? WHERE group_folder = ? AND id = ?`, origin, folder, id)
	})
	return out, err
}

func (x *tx) liveMemory(folder string, id int64) (memory.Memory, error) {
	m, found, err := x.memory(`group_folder = ? AND id = ? AND normal IS NOT NULL`, folder, id)
	if err == nil && !found {
		err = berth.Errorf(berth.NotFound, "there is no memory %d of %s", id, folder)
	}
	return m, err
}

// Memories returns the memories of a folder, oldest first.
func (db *DB) Memories(ctx context.Context, folder string) ([]memory.Memory, error) {
	return db.memories(ctx, `SELECT `+memoryColumns+` FROM memory WHERE group_folder = ? AND normal IS NOT NULL ORDER BY id`, folder)
}

// AllMemories returns the memories of all folders, ordered by folder and oldest
// first.
func (db *DB) AllMemories(ctx context.Context) ([]memory.Memory, error) {
	return db.memories(ctx, `SELECT `+memoryColumns+` FROM memory WHERE normal IS NOT NULL ORDER BY group_folder, id`)
}

func (db *DB) memories(ctx context.Context, query string, args ...any) ([]memory.Memory, error) {
	rows, err := db.read.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	var out []memory.Memory
	for rows.Next() {
		m, err := scanMemory(rows.Scan)
		if err != nil {
			return nil, explain(err)
		}
		out = append(out, m)
	}
	return out, explain(rows.Err())
}

// MemoryPrompt renders what the agent of a folder is to know, for the system part
// of its prompt. It is asked for with every message, and mostly nothing changed.
func (db *DB) MemoryPrompt(ctx context.Context, folder string) (string, error) {
	return db.writer.prompts.get(folder, func() (string, error) {
		global, err := db.Memories(ctx, memory.Global)
		if err != nil {
			return "", err
		}
		own, err := db.Memories(ctx, folder)
		if err != nil {
			return "", err
		}
		return memory.Prompt(global, own), nil
	})
}
