package claude

import (
	"bytes"
	"context"
	"encoding/json"
	"sync/atomic"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

var _ engine.Compactor = (*Engine)(nil)

// compactions is what Claude Code has said of them.
type compactions struct{ seen atomic.Bool }

// Compact implements engine.Compactor, by Claude Code's own command.
func (e *Engine) Compact(ctx context.Context, to engine.Turn) (engine.Compaction, error) {
	if e.session == "" && e.config.SessionID == "" { // nobody has said anything yet
		to.Accept()
		return engine.Compaction{Outcome: protocol.CompactionNothing}, nil
	}
	e.seen.Store(false)
	err := e.Prompt(ctx, protocol.CompactCommand, engine.Aside{Turn: to})
	switch {
	case err == nil && e.seen.Load():
		return engine.Compaction{Outcome: protocol.CompactionDone}, nil
	case err == nil: // it says in words for a screen why not
		return engine.Compaction{Outcome: protocol.CompactionNothing}, nil
	case ctx.Err() != nil || e.program == nil || isClosed(e.program.Gone()):
		return engine.Compaction{}, err
	}
	return engine.Compaction{Outcome: protocol.CompactionFailed, Reason: err.Error()}, nil
}

// Compacted implements engine.Compactor.
func (e *Engine) Compacted() bool { return e.seen.Swap(false) }

// notice takes a line in which Claude Code tells of a compaction. While it is at
// one it says nothing else for as long as that takes.
func (e *Engine) notice(line []byte) {
	if !bytes.Contains(line, []byte(`"compact`)) {
		return
	}
	var v struct {
		Type    string `json:"type"`
		Subtype string `json:"subtype"`
		Status  string `json:"status"`
	}
	if json.Unmarshal(line, &v) != nil || v.Type != "system" {
		return
	}
	if v.Subtype == "compact_boundary" {
		e.seen.Store(true)
	}
	if v.Subtype == "compact_boundary" || v.Status == "compacting" {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.turn != nil {
			e.turn.signLocked()
		}
	}
}
