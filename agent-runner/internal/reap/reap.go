// Package reap takes the place of an init process: orphans that the kernel
// gives to process 1 are waited for, children of os/exec are left to os/exec.
package reap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"sync"

	"golang.org/x/sys/unix"
)

// Children are the processes that this program started itself. Every exec.Cmd
// must be started and waited for through the one value of the process, or else
// its exit status may be taken by Run. All methods may be called from many
// goroutines.
type Children struct {
	mu   sync.Mutex
	pids map[int]int // how many; two, while a number is given to a new process and the old one is not forgotten yet
}

// Start is cmd.Start, and makes the child the first to go when memory is short.
func (c *Children) Start(cmd *exec.Cmd) error {
	// Held over the start: a child may be gone before its pid is known here.
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return err
	}
	if c.pids == nil {
		c.pids = make(map[int]int)
	}
	c.pids[cmd.Process.Pid]++
	// When the container runs out of memory, a tool goes and not this process,
	// which speaks for the run: even when the largest tool was killed just now and
	// its memory is not free yet. A kernel that does not take it is no reason not to
	// start.
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid), []byte("1000"), 0)
	return nil
}

// Wait is cmd.Wait. It must be called without delay after the process may have
// ended: until then no orphan that ended after it is reaped.
func (c *Children) Wait(cmd *exec.Cmd) error {
	err := cmd.Wait()
	c.mu.Lock()
	if c.pids[cmd.Process.Pid]--; c.pids[cmd.Process.Pid] == 0 {
		delete(c.pids, cmd.Process.Pid)
	}
	c.mu.Unlock()
	c.Sweep()
	return err
}

// Run reaps orphans until ctx ends.
func (c *Children) Run(ctx context.Context) {
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	defer signal.Stop(died)
	for {
		c.Sweep()
		select {
		case <-ctx.Done():
			return
		case <-died:
		}
	}
}

// Sweep reaps the orphans that have ended by now.
func (c *Children) Sweep() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		pid, err := ended(unix.P_ALL, 0, unix.WNOHANG)
		// An own child in front hides the others until its Wait sweeps again.
		if err != nil || pid == 0 || c.pids[pid] > 0 {
			return
		}
		if _, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); err != nil {
			return
		}
	}
}

// AwaitExit blocks until cmd's process has ended, but leaves it to Wait, so that
// its pid and its process group's id are not given to another process yet.
func AwaitExit(cmd *exec.Cmd) error {
	_, err := ended(unix.P_PID, cmd.Process.Pid, 0)
	return err
}

// ended returns the pid of a child that ended and is still a zombie.
func ended(idType, id, options int) (int, error) {
	for {
		var info unix.Siginfo
		err := unix.Waitid(idType, id, &info, unix.WEXITED|unix.WNOWAIT|options, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return childPID(&info), err
	}
}
