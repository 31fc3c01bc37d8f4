package main

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/command"
	"berth/orchestrator/internal/dispatch"
	"berth/orchestrator/internal/pairing"
	"berth/orchestrator/internal/senders"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/whatsapp"
)

// commands is the daemon as people see it who write commands in a chat.
type commands struct {
	*registry
	db      *sqlite.DB
	runner  *turn.Runner
	senders senders.Options
	zone    *time.Location
	handler command.Handler
	log     *zap.Logger
}

var (
	_ dispatch.Commands = (*commands)(nil)
	_ command.Host      = (*commands)(nil)
)

// newCommands returns the commands of these settings. list is where senders are put
// who know the token.
func newCommands(cfg Config, db *sqlite.DB, groups *registry, runner *turn.Runner, list senders.Options, log *zap.Logger) *commands {
	c := &commands{registry: groups, db: db, runner: runner, senders: list, zone: cfg.Timezone, log: log}
	c.handler = command.Handler{
		Host: c, Memory: db, Assistant: cfg.AssistantName, Location: cfg.Timezone,
		Pairing: &pairing.Desk{Token: cfg.PairToken.Reveal(), Add: c.pair, Audit: db.AddAudit},
		Seen: func(ctx context.Context, m berth.Message) (bool, error) {
			_, seen, err := db.Outgoing(ctx, dispatch.CommandKey(m, 0))
			return seen, err
		},
	}
	return c
}

// frame is what the channel puts around what somebody wrote: what it answers, and
// that it waited at WhatsApp.
var frame = regexp.MustCompile(`^\[answers [^\n]*\]\n|\n\[came [^\n\]]* late\]$`)

// Handle implements dispatch.Commands.
func (c *commands) Handle(ctx context.Context, in dispatch.Command) ([]string, bool, error) {
	if whatsapp.Owns(in.Message.ChatJID) {
		in.Message.Text = frame.ReplaceAllString(in.Message.Text, "")
	}
	reply, handled, err := c.handler.Handle(ctx, command.Call(in))
	return turn.Split(reply), handled, err
}

// answers returns what Berth said to a command.
func (c *commands) answers(ctx context.Context, m berth.Message) (texts []string, err error) {
	for {
		o, ok, err := c.db.Outgoing(ctx, dispatch.CommandKey(m, len(texts)))
		if err != nil || !ok {
			return texts, err
		}
		texts = append(texts, o.Text)
	}
}

// Status implements command.Host.
func (c *commands) Status(ctx context.Context) (map[string]command.Status, error) {
	standings, err := c.db.Standings(ctx)
	if err != nil {
		return nil, err
	}
	live, waiting := c.runner.Live(), c.State().Waiting
	out := make(map[string]command.Status)
	for _, g := range c.Groups() {
		st := standings[g.JID]
		s := command.Status{Waits: slices.Index(waiting, g.Folder) + 1, Pending: st.Pending, Error: st.LastError, GivenUp: st.GivenUp}
		if v, ok := live[g.Folder]; ok {
			s.State, s.Since = v.Run.State, v.Since
		}
		out[g.Folder] = s
	}
	return out, nil
}

// Stop implements command.Host.
func (c *commands) Stop(_ context.Context, folder string) (bool, error) {
	return c.Interrupt(folder), nil
}

// NewSession implements command.Host.
func (c *commands) NewSession(ctx context.Context, folder string) error {
	if err := c.db.DropSessions(ctx, folder); err != nil {
		return err
	}
	c.Renew(folder) // last: a run may have begun meanwhile, with the session that is gone
	return nil
}

// Compact implements command.Host.
func (c *commands) Compact(ctx context.Context, folder string, m berth.Message) (bool, error) {
	g, ok := c.Group(folder)
	if !ok {
		return false, berth.Errorf(berth.NotFound, "there is no group %.40q any more", folder)
	}
	asked, err := c.db.AskCompaction(ctx, g, m.ChatJID, "compact/"+m.ChatJID+"/"+m.ID)
	if asked {
		c.Wake(folder)
	}
	return asked, err
}

// Tasks implements command.Host.
func (c *commands) Tasks(ctx context.Context, folder string) ([]berth.Task, error) {
	tasks, err := c.db.Tasks(ctx, folder)
	return slices.DeleteFunc(tasks, func(t berth.Task) bool { return t.Status == berth.TaskCompleted }), err
}

// Usage implements command.Host.
func (c *commands) Usage(ctx context.Context, folder string) ([]berth.Usage, error) {
	year, month, day := time.Now().In(c.zone).Date()
	return c.db.Usage(ctx, folder, time.Date(year, month, day, 0, 0, 0, 0, c.zone))
}

// pair puts a sender on the list who knew the token, and makes a chat with him alone
// a group.
func (c *commands) pair(ctx context.Context, a pairing.Attempt) (there bool, err error) {
	if strings.HasPrefix(a.Sender, operator) {
		return true, nil
	}
	folder, fresh := a.Folder, false
	var g berth.Group
	if folder == "" {
		if g, fresh = pairing.DirectGroup(a.ChatJID, a.Name); fresh {
			folder = g.Folder
		}
	}
	if there, err = senders.Add(c.senders, a.ChatJID, folder, a.Sender); err != nil {
		return false, err
	}
	if fresh {
		if err := c.AddGroup(ctx, g); err != nil {
			return false, err
		}
	}
	c.log.Info("sender paired", zap.String("sender", a.Sender), zap.String("chat", a.ChatJID), zap.String("group", folder), zap.Bool("newGroup", fresh))
	return there && !fresh, nil
}
