package reap

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// The reaper takes every child of its process that it does not know, so it is
// tried in a process of its own: this test binary, started again.
func TestMain(m *testing.M) {
	if os.Getenv("REAP_TEST_CHILD") != "" {
		if err := adopt(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("ok")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestOrphansAreReaped(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "REAP_TEST_CHILD=1")
	out, err := cmd.CombinedOutput()
	if err != nil || string(out) != "ok\n" {
		t.Fatalf("%v: %s", err, out)
	}
}

// adopt makes orphans, and commands beside them, and looks what became of them.
func adopt() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return err
	}
	var children Children
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go children.Run(ctx)
	// Own children keep their exit codes while orphans come and go.
	var wg sync.WaitGroup
	errs := make(chan error, 20)
	for range 10 {
		wg.Go(func() {
			cmd := exec.Command("/bin/sh", "-c", "(exit 0) & exit 7")
			if err := children.Start(cmd); err != nil {
				errs <- err
				return
			}
			if _ = children.Wait(cmd); cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != 7 {
				errs <- fmt.Errorf("own child ended with %v, want 7", cmd.ProcessState)
			}
		})
	}
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
	}

	// An orphan that holds a pipe open until it dies: its end is seen as EOF.
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd := exec.Command("/bin/sh", "-c", "cat <&3 >/dev/null 3<&- & echo $!")
	keepR, keepW, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd.Stdout = w
	cmd.ExtraFiles = []*os.File{keepR}
	if err := children.Start(cmd); err != nil {
		return err
	}
	_, _ = w.Close(), keepR.Close()
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		return err
	}
	if err := children.Wait(cmd); err != nil {
		return err
	}
	if parent, err := parentOf(pid); err != nil || parent != os.Getpid() {
		return fmt.Errorf("the orphan's parent is %d, want this process (%v)", parent, err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	_ = keepW.Close()                          // the orphan ends
	for err = unix.EINTR; err == unix.EINTR; { // SIGCHLD may come first
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
	}
	if err != nil {
		return err
	}
	children.Sweep() // whether SIGCHLD or this one was first
	if state, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat")); err == nil {
		return fmt.Errorf("the orphan was not reaped: %s", state)
	}
	return nil
}

func parentOf(pid int) (int, error) {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	return strconv.Atoi(fields[1])
}

func TestToolsGoFirst(t *testing.T) {
	var children Children
	cmd := exec.Command("cat")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := children.Start(cmd); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid))
	if err != nil || string(got) != "1000\n" {
		t.Errorf("got %q, %v, want 1000", got, err)
	}
	if err := stdin.Close(); err != nil {
		t.Fatal(err)
	}
	if err := children.Wait(cmd); err != nil {
		t.Error(err)
	}
}
