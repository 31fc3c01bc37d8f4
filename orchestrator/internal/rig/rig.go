// Package rig is what the programs behind make demo, soak, bench and attack
// share: a state root whose containers are found again whatever happens, the
// daemon that works on it, what that daemon holds, and the end of its containers.
package rig

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/sqlite"
)

// Patience bounds every wait for something that should happen soon.
const Patience = 30 * time.Second

// Program returns the absolute path of a built program.
func Program(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("%w: build it with make build", err)
	}
	return path, nil
}

// MakeRoot makes a state root whose daemon labels its containers with install.
func MakeRoot(ctx context.Context, root, install string, groups []berth.Group) (err error) {
	if err := os.MkdirAll(filepath.Join(root, "store"), 0o700); err != nil {
		return err
	}
	db, err := sqlite.Open(ctx, filepath.Join(root, "store", "messages.db"), func(string, bool) {})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := db.SetState(ctx, "install", install); err != nil {
		return err
	}
	for _, g := range groups {
		if err := db.AddGroup(ctx, g); err != nil {
			return err
		}
	}
	return nil
}

// Environ returns settings, and of our own environment only what a daemon needs:
// the settings of the person at the keyboard are kept out.
func Environ(settings ...string) []string {
	var env []string
	for _, name := range []string{"PATH", "DOCKER_HOST", "DOCKER_CERT_PATH"} {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return append(env, settings...) // of two values the last counts
}

// Daemon is a running `berth run`.
type Daemon struct {
	PID     int
	process *os.Process
	ended   chan struct{}
	err     error
}

// Start starts a daemon, in a process group of its own, so that Ctrl-C is for the
// caller alone.
func Start(cmd *exec.Cmd) (*Daemon, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	d := &Daemon{PID: cmd.Process.Pid, process: cmd.Process, ended: make(chan struct{})}
	go func() {
		d.err = cmd.Wait()
		close(d.ended)
	}()
	return d, nil
}

// Ended is closed when the process is gone.
func (d *Daemon) Ended() <-chan struct{} { return d.ended }

// Err returns how the process ended. It may be called once Ended is closed.
func (d *Daemon) Err() error { return d.err }

// Kill ends the daemon as a power cut would.
func (d *Daemon) Kill() {
	_ = d.process.Kill() // gone already
	<-d.ended
}

// Stop ends the daemon as an operator does. One that does not end in time is
// killed.
func (d *Daemon) Stop() error {
	if err := d.process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-d.ended:
		return d.err
	case <-time.After(Patience):
		d.Kill()
		return fmt.Errorf("the daemon has not ended after %v", Patience)
	}
}

// Clear removes the containers of an install and lets go of its image. ctx bounds
// it.
func Clear(ctx context.Context, engine *docker.Engine) error {
	found, err := engine.Containers(ctx)
	if err != nil {
		return err
	}
	var g errgroup.Group
	for _, c := range found {
		g.Go(func() error { return engine.RemoveContainer(ctx, c.ID) })
	}
	return errors.Join(g.Wait(), engine.ReleaseImage(ctx))
}

// Usage is what a process holds.
type Usage struct {
	Files    []string // what the descriptors lead to
	Threads  int
	Resident int64 // bytes
}

// Measure returns what a process holds now.
func Measure(pid int) (Usage, error) {
	proc := fmt.Sprintf("/proc/%d/", pid)
	open, err := os.ReadDir(proc + "fd")
	if err != nil {
		return Usage{}, err
	}
	resident, err := ProcField(proc+"status", "VmRSS")
	if err != nil {
		return Usage{}, err
	}
	threads, err := ProcField(proc+"status", "Threads")
	if err != nil {
		return Usage{}, err
	}
	u := Usage{Threads: int(threads), Resident: resident << 10}
	for _, f := range open {
		target, _ := os.Readlink(proc + "fd/" + f.Name()) // closed meanwhile
		u.Files = append(u.Files, target)
	}
	return u, nil
}

// Least returns the least of both, each by itself: at any instant something may be
// under way.
func (u Usage) Least(v Usage) Usage {
	if len(v.Files) < len(u.Files) {
		u.Files = v.Files
	}
	u.Threads, u.Resident = min(u.Threads, v.Threads), min(u.Resident, v.Resident)
	return u
}

// Memory returns the machine's memory in bytes, or 0.
func Memory() int64 {
	kib, _ := ProcField("/proc/meminfo", "MemTotal")
	return kib << 10
}

// ProcField returns a number from a file of "name: number kB" lines, as it stands
// there.
func ProcField(path, name string) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if text, ok := strings.CutPrefix(lines.Text(), name+":"); ok {
			return strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(text, "kB")), 10, 64)
		}
	}
	return 0, fmt.Errorf("no %s in %s", name, path)
}
