package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/web"
)

// RunOptions say how the daemon runs, besides the settings.
type RunOptions struct {
	SampleGroups bool   // register main, family and work on the console if there are no groups
	Ready        func() // called once, when start-up is complete; may be nil
}

func (a *app) runCommand() *cobra.Command {
	var (
		opts   RunOptions
		detach bool
	)
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the daemon",
		Long: `Run the daemon until SIGTERM or SIGINT; a second signal ends it at once.

With --detach it runs in the background, logs to data/logs/berth.log, and the
command returns when the daemon is ready.`,
		Example: "  berth run\n  berth run --detach --sample-groups\n  berth run --root /var/lib/berth",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			cfg, err := a.config()
			if err != nil {
				return err
			}
			if detach {
				return a.runDetached(ctx, cfg, opts)
			}
			return runDaemon(ctx, cfg, opts, a.stderr)
		}),
	}
	cmd.Flags().BoolVar(&detach, "detach", false, "run in the background")
	cmd.Flags().BoolVar(&opts.SampleGroups, "sample-groups", false, "add three groups on the console channel to try things with")
	return cmd
}

// runDetached starts this program again in the background and waits until it
// is ready.
func (a *app) runDetached(ctx context.Context, cfg Config, opts RunOptions) error {
	client := web.NewClient(cfg.Socket())
	if s, err := client.Status(ctx); err == nil {
		_, err := fmt.Fprintf(a.stdout, "a daemon runs on this root already (pid %d)\n", s.PID)
		return err
	} else if !noDaemon(err) {
		return explain(cfg, err)
	}
	log, offset, err := openLog(cfg.LogFile())
	if err != nil {
		return fmt.Errorf("open the daemon's log: %w", err)
	}
	defer log.Close()
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	args := []string{"berth", "run", "--root", cfg.Root}
	if opts.SampleGroups {
		args = append(args, "--sample-groups")
	}
	daemon := &exec.Cmd{
		Path: self, Args: args, Env: a.env, // nil Stdin is the null device
		Stdout: log, Stderr: log,
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := daemon.Start(); err != nil {
		return fmt.Errorf("start the daemon: %w", err)
	}
	died := make(chan error, 1)
	go func() { died <- daemon.Wait() }()
	return a.awaitReady(ctx, client, daemon.Process.Pid, died, func() string { return tail(cfg.LogFile(), offset, 10) })
}

func openLog(path string) (*os.File, int64, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, 0, err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return nil, 0, err
	}
	return f, info.Size(), nil
}

// awaitReady shows on stderr what a starting daemon waits for.
func (a *app) awaitReady(ctx context.Context, client *web.Client, pid int, died <-chan error, lastLines func() string) error {
	const step, patience = 100 * time.Millisecond, 60 * time.Second
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	ticker := time.NewTicker(step)
	defer ticker.Stop()
	shown := ""
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("not waiting any longer; the daemon (pid %d) goes on starting", pid)
		case err := <-died:
			if err == nil {
				err = errors.New("exit status 0")
			}
			if text := lastLines(); text != "" {
				a.note("%s", text)
			}
			return fmt.Errorf("the daemon ended before it was ready: %w", err)
		case <-deadline.C:
			return fmt.Errorf("the daemon (pid %d) is not ready after %v but goes on: see \"berth status\" and \"berth logs\"", pid, patience)
		case <-ticker.C:
		}
		s, err := client.Status(ctx)
		if err != nil {
			continue // the socket comes later
		}
		if s.Ready {
			_, err := fmt.Fprintf(a.stdout, "ready (pid %d)\n", s.PID)
			return err
		}
		if step := startStep(s); step != shown {
			shown = step
			a.note("%s", step)
		}
	}
}
