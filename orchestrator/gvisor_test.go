//go:build docker

package main

import (
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// configured is a private engine with a configuration of its own.
func configured(t *testing.T, config string) *private {
	t.Helper()
	p := newPrivate(t)
	if err := os.WriteFile(filepath.Join(p.dir, "none.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(p.dir, 0o711); err != nil { // a remapped root is somebody else here
		t.Fatal(err)
	}
	p.start()
	return p
}

// followUps has a conversation with a group that a probe drives, and returns the
// shortest time in which a message for its idle run was answered.
func (p prison) followUps() time.Duration {
	p.t.Helper()
	p.say("probe", "say first", "first\n")
	least := time.Hour
	for i := range 5 {
		text := fmt.Sprintf("follow-up %d", i)
		least = min(least, p.say("probe", "say "+text, text+"\n"))
	}
	runs, err := filepath.Glob(filepath.Join(p.root, "data/logs/probe/*.log"))
	if err != nil || len(runs) != 1 {
		p.t.Errorf("the conversation took %d runs, want 1 (%v)", len(runs), err)
	}
	return least
}

// CONTAINER_RUNTIME=runsc: gVisor does not pass on what the host does to a folder,
// and all the same a follow-up does not wait for the runner's next look. Each attack
// is held, too.
func TestGVisor(t *testing.T) {
	runsc, err := exec.LookPath("runsc")
	if err != nil && os.Getuid() == 0 {
		t.Fatal("no runsc: docker/ensure-engine.sh --runsc installs it")
	}
	engine := configured(t, fmt.Sprintf(`{"runtimes": {"runsc": {"path": %q, "runtimeArgs": ["--platform=ptrace", "--network=none", "--host-uds=open"]}}}`, runsc))
	p := newPrison(t, "DOCKER_HOST="+engine.host, "CONTAINER_RUNTIME=runsc")
	p.say("evil", "run dmesg", "gVisor")
	took := p.followUps()
	t.Logf("a follow-up takes %v", took)
	if took > 2*time.Second {
		t.Errorf("a follow-up takes %v: the runner waits for events that do not come", took)
	}
	// A socket of the host's that is mounted can be reached, as the gateway's is.
	l, err := net.Listen("unix", p.evil("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Chmod(p.evil("socket"), 0o777); err != nil {
		t.Fatal(err)
	}
	p.say("evil", "run ./attack dial socket", "dialled: <nil>")
	compare(t, p.tries("fill memory"), refusalsOfGVisor())
	p.say("calm", "run cat secret", "mine\n")
}

// refusalsOfGVisor are the same but for what gVisor's own kernel grants or names
// otherwise: none of it leaves the sandbox. That a tool can write to the runner's
// stdout there means that frames are held by their nonce alone, which lies in
// memory that no tool can read.
func refusalsOfGVisor() map[string]string {
	want := maps.Clone(refusals)
	delete(want, "fill memory") // ends the whole sandbox
	maps.Copy(want, map[string]string{
		"clone user":                "done|EPERM|EINVAL",
		"unshare user":              "EINVAL|EPERM",
		"unshare mount":             "done|EPERM",
		"setns":                     "ENOENT|EPERM",
		"read runner's environment": "done|EACCES",
		"write runner's stdout":     "done|EACCES",
		"mknod device":              "done|EPERM",
		"mknod disk":                "done|EPERM",
		"keyctl":                    "EACCES|EPERM|ENOSYS",
		"add_key":                   "EACCES|EPERM|ENOSYS",
		"perf_event_open":           "ENODEV|EPERM|ENOSYS",
		"open_by_handle_at":         "ENOTSUP|EPERM|ENOSYS",
		"kernel log":                "(done|EPERM).*",
		"real-time priority":        "EINVAL|EPERM",
		"nice -20":                  "done|EACCES|EPERM",
		"spare itself from oom":     "done|EACCES",
		"open /dev/fuse":            "empty|EACCES|ENOENT",
		"write /":                   "EACCES|EROFS",
		"write /workspace/ipc":      "EACCES|EROFS",
		"write responses":           "EACCES|EROFS",
	})
	for _, place := range []string{"host port", "metadata address", "metadata address, version 6", "the internet", "a name server"} {
		want[place] += "|EHOSTUNREACH"
	}
	return want
}

// An engine that shifts the numbers of users (userns-remap): the folders of groups
// belong to the same user inside and outside all the same.
func TestUsersRemapped(t *testing.T) {
	dockerd, err := exec.LookPath("dockerd")
	if err != nil || os.Getuid() != 0 {
		t.Skip("needs dockerd and root, to start an engine of its own")
	}
	// The engine reads who is mapped where from files in /etc: it gets its own.
	etc := t.TempDir()
	for name, line := range map[string]string{"passwd": "berth-remap:x:64999:64999::/:/bin/false\n", "group": "berth-remap:x:64999:\n", "subuid": "berth-remap:200000:65536\n", "subgid": "berth-remap:200000:65536\n"} {
		data, err := os.ReadFile(filepath.Join("/etc", name))
		if os.IsNotExist(err) {
			t.Skipf("no /etc/%s to mount a file over", name)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(etc, name), append(data, line...), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	script := fmt.Sprintf("#!/bin/sh\nexec unshare -m sh -c 'for f in passwd group subuid subgid; do mount --bind %s/$f /etc/$f || exit 1; done; exec %s \"$@\"' dockerd \"$@\"\n", etc, dockerd)
	if err := os.WriteFile(filepath.Join(etc, "dockerd"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", etc+":"+os.Getenv("PATH"))
	engine := configured(t, `{"userns-remap": "berth-remap"}`)
	p := newPrison(t, "DOCKER_HOST="+engine.host)
	out, err := engine.docker("info", "--format", "{{.SecurityOptions}}").Output()
	if err != nil || !strings.Contains(string(out), "name=userns") {
		t.Fatalf("the engine does not map users: %s, %v", out, err)
	}
	p.say("evil", "run touch made; id -u; cat AGENTS.md", "\n1000\n")
	if owner := ownerOf(t, p.evil("made")); owner != 1000 {
		t.Errorf("what the container made belongs to %d on the host, want 1000", owner)
	}
	t.Logf("a follow-up takes %v", p.followUps())
	// It is nobody's root.
	if got := p.tries("")["setuid(0)"]; got != "EPERM" {
		t.Errorf("setuid(0): %s", got)
	}
}

func ownerOf(t *testing.T, path string) uint32 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Uid
}
