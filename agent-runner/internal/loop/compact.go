package loop

import (
	"context"
	"strings"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

// compact has the engine make its conversation shorter.
func (l *Loop) compact(ctx context.Context, t *turn) error {
	outcome := engine.Compaction{Outcome: protocol.CompactionUnable}
	if c, ok := l.Engine.(engine.Compactor); ok {
		var err error
		if outcome, err = c.Compact(ctx, t); err != nil {
			return err
		}
	}
	l.do(func() { t.outcome = outcome })
	return nil
}

// archive keeps what was said up to a turn with which the conversation was made
// shorter, and returns where that lies; empty if it was not, or nothing was said.
func (l *Loop) archive(t *turn) string {
	c, ok := l.Engine.(engine.Compactor)
	if !ok || !c.Compacted() && t.outcome.Outcome != protocol.CompactionDone {
		return ""
	}
	path, err := l.Said.Archive()
	if err != nil {
		l.Log.Printf("archive the conversation: %v", err)
	}
	if path != "" {
		l.Log.Printf("the conversation was made shorter: what was said before lies in %s", path)
	}
	return path
}

// clip returns the beginning of a reason, within what the host takes.
func clip(text string) string {
	const most = 500 // characters
	runes := []rune(strings.ToValidUTF8(text, "\uFFFD"))
	if len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return string(runes)
}
