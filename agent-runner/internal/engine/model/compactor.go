package model

import (
	"context"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

var _ engine.Compactor = (*Engine)(nil)

// leastSummed is how much there has to be for a summary to be shorter, in bytes.
const leastSummed = 1 << 10

// Compact implements engine.Compactor: all but the last turn is summed up, also
// where the model would take far more.
func (e *Engine) Compact(ctx context.Context, to engine.Turn) (engine.Compaction, error) {
	if err := e.resume(to); err != nil {
		return engine.Compaction{}, err
	}
	to.Accept()
	all := e.session.Messages
	from := len(all) - len(e.currentTurn())
	before := size(all)
	if size(all[:from]) < leastSummed {
		return engine.Compaction{Outcome: protocol.CompactionNothing}, nil
	}
	if e.provider == nil {
		if err := e.begin(ctx); err != nil {
			return uncompacted(ctx, err)
		}
	}
	e.system = e.describe()
	t := turn{Engine: e, to: to}
	room := e.room()
	summary, err := t.summary(ctx, all[:from], room/2)
	if err != nil {
		return uncompacted(ctx, t.explain(err))
	}
	recent := shorten(all[from:], room/4)
	prefix(recent, summed(summary, room))
	if size(recent) >= before {
		return engine.Compaction{Outcome: protocol.CompactionNothing}, nil
	}
	t.shortened(before, recent)
	return engine.Compaction{Outcome: protocol.CompactionDone}, nil
}

// uncompacted tells why the conversation is as it was. That it was stopped ends the
// turn.
func uncompacted(ctx context.Context, err error) (engine.Compaction, error) {
	if ctx.Err() != nil {
		return engine.Compaction{}, context.Cause(ctx)
	}
	return engine.Compaction{Outcome: protocol.CompactionFailed, Reason: err.Error()}, nil
}

// Compacted implements engine.Compactor.
func (e *Engine) Compacted() bool {
	was := e.shorter
	e.shorter = false
	return was
}
