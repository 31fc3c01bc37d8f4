// Bench measures Berth beside the bare floor of the same machine, in one run,
// and writes the table of docs/benchmarks.md.
//
// Most rows put Berth's own parts together in this process, as the daemon does,
// so that the instants that count can be seen; memory and start-up are measured
// on the real program. Floors use the Docker API, files and SQLite directly.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/rig"
)

const (
	bound        = 9 * time.Minute // of everything
	cleanupBound = 30 * time.Second
	stepBound    = 30 * time.Second // of a single thing that is waited for
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// bench is what all rows share.
type bench struct {
	program string // bin/berth
	dir     string // everything on disk; removed at the end
	install string // label of everything on the engine; removed at the end
	image   string
	rootfs  string // with agent programs; may be empty
	docker  *docker.Engine
	bare    *bare
	log     *zap.Logger
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	program := flags.String("berth", "bin/berth", "the program to measure, with agent-runner beside it")
	out := flags.String("out", "", "file to write the table to, besides stdout")
	only := flags.String("only", "", "measure only the rows of these groups, separated by commas: cold, warm, store, memory, ready, engines, parts")
	rootfs := flags.String("rootfs", "", "a root file system with the programs claude and opencode, to measure them too")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("not done after %v", bound))
	defer cancel()

	b := &bench{install: "bench-" + berth.NewID(6), rootfs: *rootfs, log: newLogger(stderr)}
	if b.program, err = rig.Program(*program); err != nil {
		return err
	}
	if b.bare, err = newBare(os.Getenv("DOCKER_HOST")); err != nil {
		return err
	}
	if b.docker, err = docker.New(docker.Options{Install: b.install, Host: os.Getenv("DOCKER_HOST"), CPUSet: docker.AutoCPUSet, Log: b.log}); err != nil {
		return err
	}
	defer b.docker.Close()
	info, err := b.docker.Ping(ctx)
	if err != nil {
		return fmt.Errorf("the bench needs a Docker engine: %w", err)
	}
	// Beside the program and not in /tmp, which may be memory.
	if b.dir, err = os.MkdirTemp(filepath.Dir(b.program), "bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.cleanUp(ctx)) }()
	b.image, _, err = b.docker.BuildImage(ctx, docker.ImageFiles{
		Runner: filepath.Join(filepath.Dir(b.program), "agent-runner"), Busybox: docker.FindBusybox(),
	}, nil)
	if err != nil {
		return err
	}

	r := report{at: time.Now(), cores: runtime.NumCPU(), memory: rig.Memory(), engine: info.Version, stderr: stderr}
	for _, group := range []struct {
		name    string
		measure func(context.Context, *report) error
	}{{"cold", b.cold}, {"warm", b.warm}, {"store", b.store}, {"memory", b.memory}, {"ready", b.ready}, {"engines", b.engines}, {"parts", b.parts}} {
		if *only != "" && !strings.Contains(","+*only+",", ","+group.name+",") {
			continue
		}
		if err := group.measure(ctx, &r); err != nil {
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return fmt.Errorf("%s: %w", group.name, err)
		}
	}
	r.took = time.Since(r.at)
	fmt.Fprint(stdout, r.markdown())
	if *out == "" {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(*out), 0o755); err != nil {
		return err
	}
	return os.WriteFile(*out, []byte(r.markdown()), 0o644)
}

// cleanUp removes what the bench made, also after a failure or a signal.
func (b *bench) cleanUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	return errors.Join(rig.Clear(ctx, b.docker), os.RemoveAll(b.dir))
}

// until looks every few milliseconds whether something has come true.
func until(ctx context.Context, what string, holds func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, stepBound, fmt.Errorf("%s: not within %v", what, stepBound))
	defer cancel()
	for {
		if ok, err := holds(); ok || err != nil {
			return err
		}
		if err := pause(ctx, 2*time.Millisecond); err != nil {
			return err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// next waits for what a channel brings.
func next[T any](ctx context.Context, what string, from <-chan T) (T, error) {
	select {
	case v := <-from:
		return v, nil
	case <-time.After(stepBound):
		return *new(T), fmt.Errorf("%s: not within %v", what, stepBound)
	case <-ctx.Done():
		return *new(T), context.Cause(ctx)
	}
}

func newLogger(w io.Writer) *zap.Logger {
	enc := zapcore.NewConsoleEncoder(zap.NewDevelopmentEncoderConfig())
	return zap.New(zapcore.NewCore(enc, zapcore.Lock(zapcore.AddSync(w)), zap.ErrorLevel))
}
