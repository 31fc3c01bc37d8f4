// Command berth gives every chat group its own AI agent in its own container.
// It is the daemon (berth run) and the command line that talks to it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // from then on a second signal ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}

// The exit codes.
const (
	exitDone   = 0
	exitFailed = 1
	exitMisuse = 2
)

// run is the program. It returns the exit code; errors are told on stderr.
func run(ctx context.Context, args, env []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := &app{env: env, stdin: stdin, stdout: stdout, stderr: stderr}
	root := a.rootCommand()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitDone
	}
	if misuse, ok := errors.AsType[*misuseError](err); ok || !a.started {
		text := err.Error()
		if ok {
			text = misuse.text
		}
		// Suggestions come on lines of their own.
		text = strings.Join(strings.Fields(clean(text)), " ")
		fmt.Fprintf(stderr, "berth: %s; see \"%s --help\"\n", text, cmd.CommandPath())
		return exitMisuse
	}
	if !errors.Is(err, errTold) {
		for line := range strings.SplitSeq(clean(err.Error()), "\n") {
			fmt.Fprintln(stderr, "berth:", line)
		}
	}
	return exitFailed
}

// errTold ends a command as failed without another word.
var errTold = errors.New("already told")

// misuseError is a command line that cannot be carried out as it stands.
type misuseError struct{ text string }

func (e *misuseError) Error() string { return e.text }

func misusef(format string, args ...any) error {
	return &misuseError{fmt.Sprintf(format, args...)}
}

// app is what the commands share.
type app struct {
	env            []string
	stdin          io.Reader
	stdout, stderr io.Writer
	root           string // --root
	started        bool   // the command line was understood
}

func (a *app) rootCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "berth",
		Short: "Every chat group its own AI agent in its own container",
		Long: `Berth gives every chat group its own AI agent in its own container.

"berth run" is the daemon; the other commands talk to it over store/berth.sock
in its root. Exit codes: 0 done, 1 failed, 2 misuse.`,
		Example: `  berth run --detach
  berth groups add family
  berth chat family
  berth status`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.PersistentFlags().StringVar(&a.root, "root", "", "folder that holds groups/, data/ and store/ (default BERTH_ROOT, or the current folder)")
	cmd.AddCommand(a.runCommand(), a.chatCommand(), a.sendCommand(), a.statusCommand(), a.groupsCommand(), a.mountsCommand(), a.outboxCommand(), a.tasksCommand(), a.memoryCommand(), a.auditCommand(), a.usageCommand(),
		a.logsCommand(), a.stopCommand(), a.doctorCommand(), a.loginCommand(), a.logoutCommand(), a.backupCommand(), a.restoreCommand(), a.imageCommand(), a.versionCommand())
	return cmd
}

// do wraps a command's body, so that cobra's own complaints before it can be
// told from what went wrong in it.
func (a *app) do(fn func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		a.started = true
		return fn(cmd.Context(), args)
	}
}

func (a *app) config() (Config, error) {
	return LoadConfig(map[string]string{"BERTH_ROOT": a.root}, a.env)
}

// client returns the settings and a client of the root's daemon.
func (a *app) client() (Config, *web.Client, error) {
	cfg, err := a.config()
	if err != nil {
		return Config{}, nil, err
	}
	return cfg, web.NewClient(cfg.Socket()), nil
}

func (a *app) note(format string, args ...any) {
	fmt.Fprintln(a.stderr, clean(fmt.Sprintf(format, args...)))
}

// brief bounds calls that a living daemon answers at once.
func brief(ctx context.Context) (context.Context, context.CancelFunc) {
	const patience = 30 * time.Second
	return context.WithTimeoutCause(ctx, patience, fmt.Errorf("the daemon did not answer within %v", patience))
}

// noDaemon reports whether err means that nobody listens on the socket, or died
// before it answered, as opposed to a daemon that answered with an error.
func noDaemon(err error) bool {
	for _, gone := range []error{syscall.ENOENT, syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE, io.EOF} {
		if errors.Is(err, gone) {
			return true
		}
	}
	return false
}

func unavailable(err error) bool {
	e, ok := errors.AsType[*berth.Error](err)
	return ok && e.Kind == berth.Unavailable
}

// explain turns the errors of the socket into what a person can act on.
func explain(cfg Config, err error) error {
	switch {
	case err == nil:
		return nil
	case noDaemon(err):
		return fmt.Errorf("no daemon runs on this root (%s): start one with \"berth run\"", cfg.Root)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("the daemon on this root (%s) belongs to another user: become that user", cfg.Root)
	default:
		return err
	}
}

// retry calls fn until it works, fails for another reason than a daemon that
// is away, or the daemon stayed away for patience. away is called at the first
// failure.
func retry(ctx context.Context, patience time.Duration, away func(), fn func() error) error {
	const shortest, longest = 50 * time.Millisecond, 2 * time.Second
	pause, since := shortest, time.Now()
	for first := true; ; first = false {
		err := fn()
		if err == nil || !unavailable(err) || ctx.Err() != nil {
			return err
		}
		if first && away != nil {
			away()
		}
		if time.Since(since) >= patience {
			return err
		}
		if wait(ctx, pause) != nil {
			return err
		}
		pause = min(2*pause, longest)
	}
}

// wait returns after d, or earlier with the reason why ctx ended.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
