package shell

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"time"

	"mvdan.cc/sh/moreinterp/coreutils"
	"mvdan.cc/sh/v3/interp"
	"mvdan.cc/sh/v3/syntax"

	"golang.org/x/sys/unix"
)

// killGrace is between the interrupt and the kill of a program that the
// interpreter started, when the interpreter is told to stop.
const killGrace = 2 * time.Second

// Main is the program "sh": it interprets "-c COMMAND" and returns the exit
// code. It knows bash's language, the tools of package coreutils and words; any
// other program must be in the image. A signal that asks it to end is passed on to
// what it runs.
func Main(args []string) int {
	if len(args) != 2 || args[0] != "-c" {
		fmt.Fprintln(os.Stderr, "usage: sh -c COMMAND")
		return 2
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	done := make(chan int, 1)
	go func() { done <- interpret(ctx, args[1]) }()
	select {
	case code := <-done:
		return code
	case s := <-signals:
		cancel()
		select {
		case <-done:
		case <-time.After(killGrace + time.Second): // something reads what never comes
		}
		return 128 + int(s.(unix.Signal))
	}
}

func interpret(ctx context.Context, command string) int {
	program, err := syntax.NewParser().Parse(strings.NewReader(command), "")
	if err != nil {
		fmt.Fprintf(os.Stderr, "sh: %v\n", err)
		return 2
	}
	runner, err := interp.New(
		interp.StdIO(os.Stdin, os.Stdout, os.Stderr),
		interp.CallHandler(renamed),
		// Programs of the image come before the ones built in here.
		interp.ExecHandlers(preferInstalled, ownWords, coreutils.ExecHandler),
	)
	if err != nil {
		fmt.Fprintf(os.Stderr, "sh: %v\n", err)
		return 1
	}
	err = runner.Run(ctx, program)
	if status, ok := errors.AsType[interp.ExitStatus](err); ok {
		return int(status)
	}
	if err != nil && ctx.Err() == nil {
		fmt.Fprintf(os.Stderr, "sh: %v\n", err)
		return 1
	}
	return 0
}

// preferInstalled runs a program of the image if it has one of that name.
func preferInstalled(next interp.ExecHandlerFunc) interp.ExecHandlerFunc {
	run := interp.DefaultExecHandler(killGrace)
	return func(ctx context.Context, args []string) error {
		c := interp.HandlerCtx(ctx)
		if _, err := interp.LookPathDir(c.Dir, c.Env, args[0]); err == nil {
			return run(ctx, args)
		}
		return next(ctx, args)
	}
}
