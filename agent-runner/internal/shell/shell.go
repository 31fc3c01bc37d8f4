// Package shell runs one command of a chat in a real shell, and is that shell
// where the image has none.
package shell

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/reap"
)

// systemShell is used where it exists.
const systemShell = "/bin/sh"

// MaxOutput is how much of a command's output is kept, in bytes: the first and
// the last half of it.
const MaxOutput = 64 << 10

// drainGrace is how long to read on after the command's group was killed. A
// process that left the group may hold the pipe open for ever.
const drainGrace = time.Second

// Command is one command line.
type Command struct {
	Text    string
	Dir     string
	Env     []string // all of it: nothing is inherited
	Timeout time.Duration
	Stderr  *os.File // nil: stderr is part of the output

	// Shell is the program and its arguments before Text; nil means /bin/sh, or
	// this program itself where there is none.
	Shell []string
}

// Result is what became of a command.
type Result struct {
	Output   string // stdout and stderr as they came, cut in the middle to MaxOutput
	Code     int    // as a shell would say it: 128 and the signal's number if one ended it
	TimedOut bool
}

// Run runs the command in a process group of its own with nothing on stdin, and
// kills what is left of the group when the command ends, after the timeout, and
// when ctx ends. Errors are those of the machine; a command that fails is a
// Result.
func Run(ctx context.Context, children *reap.Children, c Command) (Result, error) {
	shell := c.Shell
	if shell == nil {
		var err error
		if shell, err = find(); err != nil {
			return Result{}, err
		}
	}
	r, w, err := os.Pipe()
	if err != nil {
		return Result{}, fmt.Errorf("make a pipe for the command: %w", err)
	}
	defer r.Close()
	cmd := exec.Command(shell[0], append(shell[1:len(shell):len(shell)], c.Text)...)
	cmd.Dir, cmd.Env = c.Dir, c.Env
	cmd.Stdout, cmd.Stderr = w, w
	if c.Stderr != nil {
		cmd.Stderr = c.Stderr
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = children.Start(cmd)
	_ = w.Close()
	if err != nil {
		return Result{}, fmt.Errorf("start the shell: %w", err)
	}

	var out headTail
	drained := make(chan struct{})
	go func() { defer close(drained); _, _ = io.Copy(&out, r) }()
	exited := make(chan struct{})
	go func() { defer close(exited); _ = reap.AwaitExit(cmd) }()

	ctx, cancel := context.WithTimeoutCause(ctx, c.Timeout, errTimeout)
	defer cancel()
	group := -cmd.Process.Pid
	select {
	case <-exited:
	case <-ctx.Done():
		_ = unix.Kill(group, unix.SIGKILL)
		<-exited
	}
	// The shell is a zombie until Wait: its number cannot be another group's yet.
	_ = unix.Kill(group, unix.SIGKILL)
	_ = children.Wait(cmd) // the state says how it ended

	select {
	case <-drained:
	case <-time.After(drainGrace):
		_ = r.Close()
		<-drained
	}
	timedOut := errors.Is(context.Cause(ctx), errTimeout)
	if ctx.Err() != nil && !timedOut {
		return Result{}, context.Cause(ctx)
	}
	return Result{Output: out.String(), Code: code(cmd.ProcessState), TimedOut: timedOut}, nil
}

var errTimeout = errors.New("the command took too long")

func find() ([]string, error) {
	if _, err := exec.LookPath(systemShell); err == nil {
		return []string{systemShell, "-c"}, nil
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the shell in this program: %w", err)
	}
	return []string{self, "sh", "-c"}, nil
}

func code(state *os.ProcessState) int {
	if status := state.Sys().(syscall.WaitStatus); status.Signaled() {
		return 128 + int(status.Signal())
	}
	return state.ExitCode()
}

// headTail keeps the first and the last half of MaxOutput.
type headTail struct {
	head, tail []byte
	cut        int64
}

func (h *headTail) Write(p []byte) (int, error) {
	n := len(p)
	room := min(MaxOutput/2-len(h.head), len(p))
	h.head = append(h.head, p[:room]...)
	h.tail = append(h.tail, p[room:]...)
	if over := len(h.tail) - MaxOutput/2; over > 0 {
		h.cut += int64(over)
		h.tail = append(h.tail[:0], h.tail[over:]...)
	}
	return n, nil
}

func (h *headTail) String() string {
	if h.cut == 0 {
		return string(h.head) + string(h.tail)
	}
	return fmt.Sprintf("%s\n… (%d bytes cut here) …\n%s", h.head, h.cut, h.tail)
}
