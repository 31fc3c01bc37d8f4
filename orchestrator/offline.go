package main

import (
	"context"
	"errors"
	"path/filepath"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
	"berth/orchestrator/internal/workspace"
)

// offline is what can be done to groups without a daemon.
type offline struct {
	cfg Config
	db  *sqlite.DB
}

// offlineGroups opens the store in the place of a daemon, which it keeps from
// starting until the returned function is called.
func offlineGroups(cfg Config) (groupsAPI, func() error, error) {
	tree, err := workspace.NewTree(cfg.Root, agentUID(), agentGID())
	if err != nil {
		return nil, nil, err
	}
	lock, err := lockRoot(tree.StoreDir())
	if err != nil {
		return nil, nil, err
	}
	db, err := sqlite.Open(context.Background(), storeFile(tree), func(string, bool) {})
	if err != nil {
		return nil, nil, errors.Join(err, lock.Close())
	}
	return &offline{cfg, db}, func() error { return errors.Join(db.Close(), lock.Close()) }, nil
}

func (o *offline) Groups(ctx context.Context) ([]web.Group, error) {
	groups, err := o.db.Groups(ctx)
	if err != nil {
		return nil, err
	}
	standings, err := o.db.Standings(ctx)
	if err != nil {
		return nil, err
	}
	out := []web.Group{}
	for _, g := range groups {
		out = append(out, describe(g, o.trigger(g), standings[g.JID]))
	}
	return out, nil
}

func (o *offline) AddGroup(ctx context.Context, in web.NewGroup) (web.Group, error) {
	g, err := newGroup(in)
	if err != nil {
		return web.Group{}, err
	}
	if err := o.db.AddGroup(ctx, g); err != nil {
		return web.Group{}, err
	}
	return describe(g, o.trigger(g), berth.Standing{}), nil
}

func (o *offline) RemoveGroup(ctx context.Context, folder string) error {
	return o.db.RemoveGroup(ctx, folder)
}

func (o *offline) trigger(g berth.Group) string { return g.EffectiveTrigger(o.cfg.AssistantName) }

func storeFile(tree *workspace.Tree) string { return filepath.Join(tree.StoreDir(), "messages.db") }
