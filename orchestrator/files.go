package main

import (
	"context"
	"errors"
	"slices"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
	"berth/orchestrator/internal/workspace"
)

// sweepFiles removes the files of texts that are not sent any more, before anything
// runs.
func sweepFiles(ctx context.Context, tree *workspace.Tree, db *sqlite.DB, log *zap.Logger) {
	keys, err := db.OutboxFiles(ctx)
	if err == nil {
		err = tree.SweepFiles(keys)
	}
	if err != nil {
		log.Warn("remove old files from data/outbox", zap.Error(err))
	}
}

// Release implements outbox.Releaser.
func (r *router) Release(o berth.Outgoing) {
	if o.File == "" {
		return
	}
	if err := r.tree.DropFile(o.Key); err != nil {
		r.log.Warn("remove a file that was sent", zap.Error(err))
	}
}

// DropTexts takes back texts, and the files that go with them. Without a daemon
// the next one removes those.
func (c *control) DropTexts(ctx context.Context, t web.Texts) (n int, err error) {
	before, err := c.db.OutboxFiles(ctx)
	if err != nil {
		return 0, err
	}
	if n, err = c.texts.DropTexts(ctx, t); err != nil || len(before) == 0 {
		return n, err
	}
	after, err := c.db.OutboxFiles(ctx)
	if err != nil {
		return n, err
	}
	var errs []error
	for _, key := range before {
		if !slices.Contains(after, key) {
			errs = append(errs, c.tree.DropFile(key))
		}
	}
	return n, errors.Join(errs...)
}
