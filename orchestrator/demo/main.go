// Command demo plays the uses of Berth: the real daemon, real containers, on a
// root of its own that is gone afterwards. It ends with exit code 0 only if all
// that it claims was really observed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/term"

	"berth/orchestrator/internal/rig"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // from then on a second signal ends the process at once
	berth := flag.String("berth", "bin/berth", "the program under show, with agent-runner beside it")
	flag.Parse()
	colour := term.IsTerminal(int(os.Stdout.Fd())) && os.Getenv("NO_COLOR") == ""
	if err := run(ctx, *berth, screen{os.Stdout, colour}); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// run plays all steps and cleans up, whatever happened.
func run(ctx context.Context, berth string, out screen) (err error) {
	begun := time.Now()
	syscall.Umask(0o022) // the agents are another user if this one is root
	if berth, err = rig.Program(berth); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "berth-demo-")
	if err != nil {
		return err
	}
	d := &demo{ctx: ctx, screen: out, program: berth, dir: dir}
	defer func() {
		if err != nil {
			if log := d.daemonLog(); log != "" && ctx.Err() == nil {
				out.heading("The end of the daemon's log")
				out.lines(lastLines(log, 40))
			}
		}
		err = errors.Join(err, d.cleanUp())
	}()

	for i, s := range steps {
		out.heading(fmt.Sprintf("%d. %s", i, s.title))
		proved := s.play(d)
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		if d.err != nil {
			return fmt.Errorf("step %d: %w", i, d.err)
		}
		out.proves(proved)
	}
	out.heading(fmt.Sprintf("All %d steps were observed, in %.0f s.", len(steps), time.Since(begun).Seconds()))
	return nil
}

// screen is where the play is shown.
type screen struct {
	file   *os.File
	colour bool
}

const (
	bold  = "1"
	green = "32"
	cyan  = "36"
)

func (s screen) print(style, text string) {
	if s.colour && style != "" {
		text = "\x1b[" + style + "m" + text + "\x1b[0m"
	}
	fmt.Fprintln(s.file, text)
}

func (s screen) heading(text string) { s.print(bold, "\n"+text) }
func (s screen) command(text string) { s.print(cyan, "  $ "+text) }
func (s screen) proves(text string)  { s.print(green, "  proves: "+text) }

// lines shows what came out of a command.
func (s screen) lines(text string) {
	for line := range strings.Lines(text) {
		s.print("", strings.TrimRight("    "+line, " \n"))
	}
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
