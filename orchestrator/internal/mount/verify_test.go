package mount

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"berth/orchestrator/internal/berth"
)

// TestMain makes this program a container for TestW51: it mounts as an engine
// does, by path, and then waits.
func TestMain(m *testing.M) {
	if root := os.Getenv("MOUNT_TEST_ROOT"); root != "" {
		if err := contain(root, os.Args[1:]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func contain(root string, mounts []string) error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	for i := 0; i+1 < len(mounts); i += 2 {
		if err := syscall.Mount(mounts[i], root+mounts[i+1], "", syscall.MS_BIND, ""); err != nil {
			return err
		}
	}
	if err := syscall.Chroot(root); err != nil {
		return err
	}
	fmt.Println("started")
	_, _ = bufio.NewReader(os.Stdin).ReadByte()
	return nil
}

// container starts a process that sees the verdicts' mounts, and returns its id.
func container(t *testing.T, verdicts []Verdict) int {
	t.Helper()
	root := t.TempDir()
	var args []string
	for _, v := range verdicts {
		target := filepath.Join(root, v.Mount.Target)
		err := os.MkdirAll(filepath.Dir(target), 0o700)
		if err == nil {
			if info, statErr := os.Stat(v.Mount.Source); statErr == nil && !info.IsDir() {
				err = os.WriteFile(target, nil, 0o600)
			} else {
				err = os.Mkdir(target, 0o700)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		args = append(args, v.Mount.Source, v.Mount.Target)
	}
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "MOUNT_TEST_ROOT="+root)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Skipf("no mount namespace here: %v", err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Wait()
	})
	if line, _ := bufio.NewReader(stdout).ReadString('\n'); line != "started\n" {
		t.Fatalf("the container said %q", line)
	}
	return cmd.Process.Pid
}

// W51: between the check and the mount somebody with a writable mount of the
// parent exchanges the folder.
func TestW51ExchangedBeforeTheMount(t *testing.T) {
	for name, tt := range map[string]struct {
		path string
		swap func(*testing.T, *host)
		want string
	}{
		"nothing happens": {"~/projects/app", func(*testing.T, *host) {}, ""},
		"a file":          {"~/projects/notes", func(*testing.T, *host) {}, ""},
		"a link to a folder outside": {"~/projects/app", func(t *testing.T, h *host) {
			rename(t, h.home+"/projects/app", h.home+"/projects/old")
			h.link(t, h.home+"/outside", "projects/app")
		}, "outside"},
		"a link further up": {"~/projects/app/src", func(t *testing.T, h *host) {
			h.mkdir(t, "outside/src")
			rename(t, h.home+"/projects/app", h.home+"/projects/old")
			h.link(t, h.home+"/outside", "projects/app")
		}, "outside/src"},
		"a link to a file outside": {"~/projects/notes", func(t *testing.T, h *host) {
			remove(t, h.home+"/projects/notes")
			h.link(t, h.home+"/secret", "projects/notes")
		}, "secret"},
		"another folder of the same name": {"~/projects/app", func(t *testing.T, h *host) {
			rename(t, h.home+"/projects/app", h.home+"/projects/old")
			h.mkdir(t, "projects/app")
		}, "projects/app"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.write(t, "projects/notes", "")
			h.write(t, "secret", "")
			verdicts := h.list.Resolve([]berth.MountRequest{{HostPath: tt.path}, {HostPath: "~/ro"}, {HostPath: "~/none"}}, true)
			tt.swap(t, h)
			err := Verify(container(t, verdicts[:2]), verdicts)
			if tt.want == "" {
				if err != nil {
					t.Errorf("got %v, want what was checked", err)
				}
				return
			}
			if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != berth.Denied || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want berth.Denied naming %q", err, tt.want)
			}
		})
	}
}

// W51: what a swap did before the mount cannot be hidden by undoing it.
func TestW51ExchangedAndPutBack(t *testing.T) {
	h := newHost(t)
	verdicts := h.list.Resolve([]berth.MountRequest{{HostPath: "~/projects/app"}}, true)
	rename(t, h.home+"/projects/app", h.home+"/projects/old")
	h.link(t, h.home+"/outside", "projects/app")
	pid := container(t, verdicts)
	remove(t, h.home+"/projects/app")
	rename(t, h.home+"/projects/old", h.home+"/projects/app")
	if err := Verify(pid, verdicts); err == nil || !strings.Contains(err.Error(), "outside") {
		t.Errorf("got %v, want the exchange seen", err)
	}
}

// W51: where nobody can look, only paths that no container can change are good.
func TestW51CannotBeChecked(t *testing.T) {
	h := newHost(t)
	for path, want := range map[string]string{
		"~/projects": "", "~/ro": "", "~/ro/doc": "", "~/projects/app": "cannot be checked",
	} {
		verdicts := h.list.Resolve([]berth.MountRequest{{HostPath: path}}, true)
		for _, pid := range []int{os.Getpid(), 1 << 30} {
			err := Verify(pid, verdicts)
			if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%s with pid %d: got %v, want %q", path, pid, err, want)
			}
		}
	}
	if err := Verify(1<<30, nil); err != nil {
		t.Errorf("got %v, want nothing to check", err)
	}
}
