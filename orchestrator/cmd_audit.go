package main

import (
	"context"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
)

// ledgerAPI is what the audit and usage commands need.
type ledgerAPI interface {
	Audit(ctx context.Context, folder string, limit int) ([]web.Refusal, error)
	Usage(ctx context.Context, folder string, days int) ([]web.Usage, error)
}

// ledger is ledgerAPI over a store.
type ledger struct {
	store *sqlite.DB
	zone  *time.Location
}

func (l ledger) Audit(ctx context.Context, folder string, limit int) ([]web.Refusal, error) {
	rows, err := l.store.Audits(ctx, min(max(limit, 1), maxListed), folder)
	out := make([]web.Refusal, 0, len(rows))
	for _, a := range rows {
		out = append(out, web.Refusal{ID: a.ID, At: a.At, Group: a.Folder, Run: a.RunID, What: a.What, Target: a.Target, Reason: a.Reason})
	}
	return out, err
}

func (l ledger) Usage(ctx context.Context, folder string, days int) ([]web.Usage, error) {
	year, month, day := time.Now().In(l.zone).Date()
	since := time.Date(year, month, day-min(max(days, 1), maxDays)+1, 0, 0, 0, 0, l.zone)
	rows, err := l.store.Usage(ctx, folder, since)
	out := make([]web.Usage, 0, len(rows))
	for _, u := range rows {
		out = append(out, web.Usage{
			Day: u.At.Format(time.DateOnly), Group: u.Folder, Provider: u.Provider, Model: u.Model,
			Requests: u.Requests, Input: u.Input, Output: u.Output, CacheRead: u.CacheRead, CacheWrite: u.CacheWrite, Estimated: u.Estimated,
		})
	}
	return out, err
}

// maxDays is how long usage is kept.
const maxDays = 400

func (a *app) auditCommand() *cobra.Command {
	var group string
	var limit int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "List what containers asked for and did not get",
		Long: `List what containers asked for and did not get, newest first.

A refusal is no fault of Berth: it is an agent that tried something that its
group may not do, with the reason that it was told.`,
		Example: "  berth audit\n  berth audit -g family --limit 100 --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			if limit < 1 || limit > maxListed {
				return misusef("--limit %d: give a number from 1 to %d", limit, maxListed)
			}
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				refusals, err := api.Audit(ctx, group, limit)
				if err != nil {
					return err
				}
				if asJSON {
					return a.printJSON(refusals)
				}
				rows := [][]string{{"TIME", "GROUP", "WHAT", "TARGET", "REASON"}}
				for _, r := range refusals {
					rows = append(rows, []string{r.At.Local().Format(time.DateTime), r.Group, r.What, beginning(r.Target), r.Reason})
				}
				return a.printTable(rows)
			})
		}),
	}
	f := cmd.Flags()
	f.StringVarP(&group, "group", "g", "", "of this group alone")
	f.IntVar(&limit, "limit", 20, "how many")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) usageCommand() *cobra.Command {
	var group string
	var days int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "usage",
		Short: "Show what groups used of a model",
		Long: `Show what groups used of a model, by day.

Counted are requests and tokens that went through the gateway. Numbers that the
provider did not tell are estimated from above and marked with ~.`,
		Example: "  berth usage\n  berth usage -g family --days 30 --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			if days < 1 || days > maxDays {
				return misusef("--days %d: give a number from 1 to %d", days, maxDays)
			}
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				usage, err := api.Usage(ctx, group, days)
				if err != nil {
					return err
				}
				if asJSON {
					return a.printJSON(usage)
				}
				rows := [][]string{{"DAY", "GROUP", "PROVIDER", "MODEL", "REQUESTS", "INPUT", "OUTPUT", "CACHE READ", "CACHE WRITTEN"}}
				for _, u := range usage {
					mark := ""
					if u.Estimated {
						mark = "~"
					}
					row := []string{u.Day, u.Group, u.Provider, u.Model, strconv.FormatInt(u.Requests, 10)}
					for _, n := range []int64{u.Input, u.Output, u.CacheRead, u.CacheWrite} {
						row = append(row, mark+strconv.FormatInt(n, 10))
					}
					rows = append(rows, row)
				}
				return a.printTable(rows)
			})
		}),
	}
	f := cmd.Flags()
	f.StringVarP(&group, "group", "g", "", "of this group alone")
	f.IntVar(&days, "days", 7, "how many days, today included")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
