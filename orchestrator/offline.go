package main

import (
	"context"
	"errors"
	"iter"
	"path/filepath"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
	"berth/orchestrator/internal/whatsapp/wastate"
	"berth/orchestrator/internal/workspace"
)

// storeAPI is what can be done with a daemon, or to the store itself when there
// is none.
type storeAPI interface {
	groupsAPI
	outboxAPI
	ledgerAPI
	web.TaskDesk
	web.MemoryDesk
}

var _ storeAPI = (*web.Client)(nil)

// withStore calls fn with the daemon, or with the store if none runs.
func (a *app) withStore(ctx context.Context, fn func(context.Context, storeAPI) error) error {
	cfg, client, err := a.client()
	if err != nil {
		return err
	}
	ctx, cancel := brief(ctx)
	defer cancel()
	err = fn(ctx, client)
	if !noDaemon(err) {
		return explain(cfg, err)
	}
	store, closeStore, err := openOffline(cfg)
	if err != nil {
		return err
	}
	a.note("no daemon: working on the store")
	return errors.Join(fn(ctx, store), closeStore())
}

// offline is the store without a daemon.
type offline struct {
	texts
	ledger
	taskDesk
	shelf
	cfg Config
}

// openOffline opens the store in the place of a daemon, which it keeps from
// starting until the returned function is called.
func openOffline(cfg Config) (storeAPI, func() error, error) {
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
	desk := taskDesk{store: db, zone: cfg.Timezone, groups: db.Groups}
	return &offline{texts{db}, ledger{db, cfg.Timezone}, desk, shelf{db, db.Groups}, cfg}, func() error { return errors.Join(db.Close(), lock.Close()) }, nil
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

func (o *offline) UpdateGroup(ctx context.Context, folder string, in web.GroupChange) (web.Group, error) {
	g, err := o.db.UpdateGroup(ctx, folder, func(g berth.Group) (berth.Group, error) { return changeGroup(g, in) })
	if err != nil {
		return web.Group{}, err
	}
	standings, err := o.db.Standings(ctx)
	return describe(g, o.trigger(g), standings[g.JID]), err
}

func (o *offline) RemoveGroup(ctx context.Context, folder string) error {
	return o.db.RemoveGroup(ctx, folder)
}

// Chats implements groupsAPI: without a daemon nobody can ask the networks.
func (o *offline) Chats(ctx context.Context, refresh bool) ([]web.Chat, error) {
	if refresh {
		return nil, berth.Errorf(berth.Unavailable, "no daemon runs that could ask: start one with berth run, or leave --refresh out")
	}
	return listChats(ctx, o.db)
}

func (o *offline) trigger(g berth.Group) string { return g.EffectiveTrigger(o.cfg.AssistantName) }

func storeFile(tree *workspace.Tree) string { return filepath.Join(tree.StoreDir(), "messages.db") }

// openLink opens the session of WhatsApp in the place of a daemon, and connects.
func openLink(ctx context.Context, cfg Config) (_ linkAPI, hangUp func() error, err error) {
	tree, err := workspace.NewTree(cfg.Root, agentUID(), agentGID())
	if err != nil {
		return nil, nil, err
	}
	lock, err := lockRoot(tree.StoreDir())
	if err != nil {
		return nil, nil, err
	}
	p := newLink(ctx, cfg, tree)
	disconnect := (&router{phone: p}).connect()
	return offlineLink{p}, func() error {
		disconnect()
		return errors.Join(p.close(), lock.Close())
	}, nil
}

// offlineLink is a link without a daemon.
type offlineLink struct{ *phone }

// Channel waits for the connection first, which this process has only just begun:
// only then it is known whether the account is still linked.
func (l offlineLink) Channel(ctx context.Context) (web.Channel, error) {
	const patience = 20 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		changed := l.changed.Wait(channelWhatsApp)
		c := l.channel()
		if c.Account == "" || c.State == string(wastate.Connected) || c.NeedsPerson {
			return c, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return l.channel(), nil
		}
	}
}

func (l offlineLink) Login(ctx context.Context, _ string, in web.NewLogin) iter.Seq2[web.LoginEvent, error] {
	return l.phone.Login(ctx, in)
}

func (l offlineLink) AnswerPasskey(ctx context.Context, _ string, in web.Passkey) error {
	return l.phone.AnswerPasskey(ctx, in)
}

func (l offlineLink) Logout(ctx context.Context, _ string) error { return l.phone.Logout(ctx) }
