package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/web"
)

func (a *app) statusCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Show what the daemon is doing",
		Example: "  berth status\n  berth status --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			cfg, client, err := a.client()
			if err != nil {
				return err
			}
			ctx, cancel := brief(ctx)
			defer cancel()
			s, err := client.Status(ctx)
			if err != nil {
				return explain(cfg, err)
			}
			if asJSON {
				return a.printJSON(s)
			}
			return a.printStatus(s)
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) printStatus(s web.Status) error {
	state := "ready"
	if !s.Ready {
		state = "starting: " + startStep(s)
	}
	docker := "up, " + s.Docker.Version
	if !s.Docker.Up {
		docker = "down: " + s.Docker.Error
	}
	image := s.Image.Ref
	if s.Image.Error != "" {
		image += ", failed: " + s.Image.Error
	} else if !s.Image.Ready {
		image += ", not there yet"
	}
	pool := fmt.Sprintf("%d of %d", s.Pool.Used, s.Pool.Limit)
	if len(s.Pool.Waiting) > 0 {
		pool += ", waiting: " + strings.Join(s.Pool.Waiting, ", ")
	}
	rows := [][]string{
		{"daemon:", fmt.Sprintf("%s (pid %d, up %s, version %s)", state, s.PID, ago(s.StartedAt), s.Version)},
		{"root:", s.Root},
		{"docker:", docker},
		{"image:", image},
		{"groups:", strconv.Itoa(s.Groups)},
		{"pool:", pool},
		{"outbox:", fmt.Sprintf("%d to send, %d given up", s.Outbox.Pending, s.Outbox.Dead)},
	}
	for _, c := range s.Channels {
		rows = append(rows, []string{c.Name + ":", channelLine(c)})
	}
	for _, alarm := range s.Alarms {
		rows = append(rows, []string{"alarm:", alarm})
	}
	if err := a.printTable(rows); err != nil || len(s.Runs) == 0 {
		return err
	}
	fmt.Fprintln(a.stdout)
	rows = [][]string{{"RUN", "GROUP", "KIND", "STATE", "SINCE", "AGE", "TURNS"}}
	for _, r := range s.Runs {
		rows = append(rows, []string{r.ID, r.Group, r.Kind, string(r.State), ago(r.Since), ago(r.StartedAt), strconv.Itoa(r.Turns)})
	}
	return a.printTable(rows)
}

// channelLine says in a line how it stands with a channel; what to do about it is
// an alarm.
func channelLine(c web.Channel) string {
	text := c.Text
	if c.Account != "" {
		text += " as " + c.Account
	}
	if since := ago(c.Since); since != "" {
		text += ", since " + since
	}
	if c.Detail != "" {
		text += ": " + c.Detail
	}
	return text
}

// startStep says what a daemon that is not ready is waiting for.
func startStep(s web.Status) string {
	switch {
	case !s.Docker.Up && s.Docker.Error != "":
		return "waiting for Docker: " + s.Docker.Error
	case !s.Docker.Up:
		return "waiting for Docker"
	case s.Image.Error != "":
		return "the agent image: " + s.Image.Error
	case !s.Image.Ready:
		return "building the agent image"
	default:
		return "taking over what the last daemon left"
	}
}
