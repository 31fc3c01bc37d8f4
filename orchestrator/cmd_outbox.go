package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
)

// outboxAPI is what the outbox commands need.
type outboxAPI interface {
	Outbox(context.Context) ([]web.Text, error)
	RetryTexts(context.Context, web.Texts) (int, error)
	DropTexts(context.Context, web.Texts) (int, error)
}

// maxListed bounds a listing of the outbox.
const maxListed = 1000

// texts is outboxAPI over a store.
type texts struct{ db *sqlite.DB }

func (o texts) Outbox(ctx context.Context) ([]web.Text, error) {
	rows, err := o.db.Outbox(ctx, maxListed)
	out := make([]web.Text, 0, len(rows))
	for _, r := range rows {
		t := web.Text{ID: r.ID, Chat: r.ChatJID, Kind: r.Kind, State: r.State, Text: r.Shown(), Attempts: r.Attempts, CreatedAt: r.CreatedAt, Error: r.Error}
		if !r.NotBefore.IsZero() {
			t.NotBefore = &r.NotBefore
		}
		out = append(out, t)
	}
	return out, err
}

func (o texts) RetryTexts(ctx context.Context, t web.Texts) (int, error) {
	return o.db.RetryOutgoing(ctx, t.IDs...)
}

func (o texts) DropTexts(ctx context.Context, t web.Texts) (int, error) {
	return o.db.DropOutgoing(ctx, t.IDs...)
}

func (a *app) outboxCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "outbox",
		Short: "List, repeat and drop texts that could not be sent",
		Long: `List, repeat and drop texts that could not be sent.

A text that fails three times, or cannot be sent at all, is given up: it stays
here and in the alarms of "berth status" until it is sent or dropped. Without a
daemon these commands work on the store itself.`,
		Example: "  berth outbox ls\n  berth outbox retry 17\n  berth outbox drop --all",
		Args:    cobra.NoArgs,
		RunE: a.do(func(context.Context, []string) error {
			return misusef("outbox needs one of ls, retry, drop")
		}),
	}
	cmd.AddCommand(
		a.outboxListCommand(),
		a.outboxChangeCommand("retry", "Send texts again that were given up", "%d to be sent again\n", outboxAPI.RetryTexts),
		a.outboxChangeCommand("drop", "Take back texts that are not sent", "%d dropped\n", outboxAPI.DropTexts),
	)
	return cmd
}

func (a *app) outboxListCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the texts that wait to be sent or were given up",
		Example: "  berth outbox ls --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				texts, err := api.Outbox(ctx)
				if err != nil {
					return err
				}
				if asJSON {
					return a.printJSON(texts)
				}
				rows := [][]string{{"ID", "CHAT", "KIND", "STATE", "TRIED", "TEXT", "ERROR"}}
				for _, t := range texts {
					state := string(t.State)
					if t.State == berth.OutDead {
						state = "given up"
					}
					rows = append(rows, []string{strconv.FormatInt(t.ID, 10), t.Chat, t.Kind, state, strconv.Itoa(t.Attempts), beginning(t.Text), t.Error})
				}
				return a.printTable(rows)
			})
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// beginning returns as much of a text as a table has room for.
func beginning(text string) string {
	const most = 40
	line, _, more := strings.Cut(text, "\n")
	if runes := []rune(line); len(runes) > most {
		line, more = string(runes[:most]), true
	}
	if more {
		line += "…"
	}
	return line
}

func (a *app) outboxChangeCommand(verb, short, done string, change func(outboxAPI, context.Context, web.Texts) (int, error)) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:     verb + " ID... | --all",
		Short:   short,
		Example: fmt.Sprintf("  berth outbox %s 17 18\n  berth outbox %[1]s --all", verb),
		RunE: a.do(func(ctx context.Context, args []string) error {
			if all == (len(args) > 0) {
				return misusef("name the texts by their ids, or give --all for all that were given up")
			}
			var named web.Texts
			for _, arg := range args {
				id, err := strconv.ParseInt(arg, 10, 64)
				if err != nil {
					return misusef("%.40q is no id: see berth outbox ls", arg)
				}
				named.IDs = append(named.IDs, id)
			}
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				n, err := change(api, ctx, named)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(a.stdout, done, n)
				return err
			})
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "all texts that were given up")
	return cmd
}
