package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/web"
)

func (a *app) stopCommand() *cobra.Command {
	var daemon bool
	cmd := &cobra.Command{
		Use:   "stop GROUP | --daemon",
		Short: "End a group's run, or the daemon",
		Long: `End a group's run, or the daemon.

A group's next message starts a new run. A daemon that ends leaves busy
containers running; the next daemon takes them over.`,
		Example: "  berth stop family\n  berth stop --daemon",
		Args:    cobra.MaximumNArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			if daemon == (len(args) == 1) {
				return misusef("name a group, or give --daemon")
			}
			cfg, client, err := a.client()
			if err != nil {
				return err
			}
			if daemon {
				return a.stopDaemon(ctx, cfg, client)
			}
			ctx, cancel := brief(ctx)
			defer cancel()
			stopped, err := client.StopGroup(ctx, args[0])
			if err != nil {
				return explain(cfg, err)
			}
			if stopped {
				fmt.Fprintf(a.stdout, "ending the run of %s\n", args[0])
			} else {
				fmt.Fprintf(a.stdout, "%s has no run\n", args[0])
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&daemon, "daemon", false, "end the daemon itself")
	return cmd
}

// stopDaemon returns when the daemon is gone: its socket closed, its process
// ended.
func (a *app) stopDaemon(ctx context.Context, cfg Config, client *web.Client) error {
	const patience = 40 * time.Second // the daemon flushes for 10 s, and closes idle runs
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("the daemon has not ended within %v: see \"berth logs\"", patience))
	defer cancel()
	s, err := client.Status(ctx)
	if noDaemon(err) {
		fmt.Fprintln(a.stdout, "no daemon runs on this root")
		return nil
	}
	if err != nil {
		return explain(cfg, err)
	}
	if err := client.StopDaemon(ctx); err != nil && !unavailable(err) {
		return err
	}
	// The process lives a moment longer than its socket. Its id may be another
	// process's here if the daemon runs in a container, so do not insist.
	var gone time.Time
	for {
		now, err := client.Status(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case noDaemon(err) && gone.IsZero():
			gone = time.Now()
		}
		if err == nil && now.PID != s.PID || noDaemon(err) && (!alive(s.PID) || time.Since(gone) > 5*time.Second) {
			fmt.Fprintf(a.stdout, "the daemon (pid %d) has ended\n", s.PID)
			return nil
		}
		if err := wait(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// alive reports whether a process has the id. A zombie has ended; nobody took
// note of it yet.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// "pid (name) state …", and the name may hold anything.
	_, rest, ok := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
	return ok && !bytes.HasPrefix(rest, []byte("Z"))
}
