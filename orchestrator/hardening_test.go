//go:build docker

package main

import (
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// What an agent that went wrong can do from inside its container. The program in
// testdata/hardening tries everything; the tables say what the kernel and the host
// have to make of it.

// refusals is what has to come of each attack, as patterns.
var refusals = map[string]string{
	"mount tmpfs":        "EPERM",
	"mount bind":         "EPERM",
	"remount / writable": "EPERM",
	"umount ipc":         "EPERM",
	"fsopen":             "EPERM|ENOSYS",
	"open_tree":          "EPERM|ENOSYS",
	"pivot_root":         "EPERM",
	"chroot":             "EPERM",
	"unshare user":       "EPERM",
	"unshare mount":      "EPERM",
	"unshare net":        "EPERM",
	"clone user":         "EPERM",
	"clone pid":          "EPERM",
	"setns":              "EPERM",

	"ptrace runner":             "EPERM",
	"read runner's memory":      "EACCES",
	"process_vm_readv runner":   "EPERM|ENOSYS",
	"read runner's environment": "EACCES",
	"write runner's stdout":     "EACCES",
	"runner's folder":           "EACCES",
	"take runner's stdout":      "EPERM|ENOSYS",

	"raw socket":            "EPERM",
	"packet socket":         "EPERM",
	"mknod device":          "EPERM",
	"mknod disk":            "EPERM",
	"init_module":           "EPERM",
	"delete_module":         "EPERM",
	"kexec_load":            "EPERM|ENOSYS",
	"keyctl":                "EPERM|ENOSYS",
	"add_key":               "EPERM|ENOSYS",
	"bpf":                   "EPERM",
	"perf_event_open":       "EPERM|EACCES|ENOSYS",
	"userfaultfd":           "EPERM|ENOSYS",
	"io_uring":              "EPERM|ENOSYS",
	"open_by_handle_at":     "EPERM",
	"reboot":                "EPERM",
	"swapoff":               "EPERM",
	"set the clock":         "EPERM",
	"set the host's name":   "EPERM",
	"kernel log":            "EPERM.*",
	"acct":                  "EPERM|ENOSYS",
	"real-time priority":    "EPERM",
	"nice -20":              "EACCES|EPERM",
	"more open files":       "EPERM",
	"core files":            "EPERM",
	"spare itself from oom": "EACCES",
	"setuid(0)":             "EPERM",
	"setgroups":             "EPERM",
	"capset":                "EPERM",
	"chown to root":         "EPERM",
	"setuid program":        "done uid 1000", // it runs, and stays who it was

	"write /":                    "EROFS",
	"write /etc/passwd":          "EACCES|EROFS",
	"write /etc/hosts":           "EACCES|EROFS",
	"write /etc/resolv.conf":     "EACCES|EROFS",
	"write the runner's program": "EACCES|EROFS", // W55
	"write /workspace/ipc":       "EROFS",
	"write /workspace/ipc/lease": "EACCES|EROFS",
	"write responses":            "EROFS",
	"replace input":              "EXDEV|EBUSY",
	"write global":               "EROFS",
	"write core_pattern":         "EACCES|EROFS",
	"write modprobe":             "EACCES|EROFS|ENOENT",
	"write ip_forward":           "EACCES|EROFS",
	"write sysrq-trigger":        "EACCES|EROFS|ENOENT",
	"write uevent_helper":        "EACCES|EROFS|ENOENT",
	"write a cgroup's limit":     "EACCES|EROFS|ENOENT",
	"make a cgroup":              "EACCES|EROFS",
	"read kcore":                 "EACCES|ENOENT|empty",
	"read keys":                  "EACCES|ENOENT|empty",
	"read timer_list":            "EACCES|ENOENT|empty",
	"read firmware":              "EACCES|ENOENT|empty",
	"open /dev/mem":              "ENOENT",
	"open /dev/kmsg":             "ENOENT",
	"open /dev/kvm":              "ENOENT",
	"open /dev/fuse":             "ENOENT",
	"run a program in /run":      "EACCES",
	"run a program in /dev/shm":  "EACCES",
	"long name":                  "ENAMETOOLONG",

	// Allowed: they must do no harm.
	"deep folders": "done",
	"long request": "done",

	"other group by the host's path": "ENOENT",
	"other group beside its own":     "ENOENT",
	"other group's messages":         "ENOENT",
	"the store":                      "ENOENT",
	"Docker socket":                  "ENOENT",
	"control socket":                 "ENOENT",
	"abstract socket of the host":    "ECONNREFUSED",
	"metadata address":               "ENETUNREACH",
	"metadata address, version 6":    "ENETUNREACH|EADDRNOTAVAIL",
	"the internet":                   "ENETUNREACH",
	"a name server":                  "ENETUNREACH",
	"host port":                      "ENETUNREACH|ECONNREFUSED|EADDRNOTAVAIL", // of every address; the refusal is the container's own loopback

	"100000 open files": "EMFILE 40[0-9]{2}",
	"fill /tmp":         "ENOSPC 25[56] MiB",
	"fill /run":         "ENOSPC 1[56] MiB",
	"fill /dev/shm":     "ENOSPC 6[34] MiB",
	"fill memory":       "signal: killed",
}

// prison is a daemon with a group that attacks, one that must not notice, and one
// that a probe drives.
type prison struct {
	t    *testing.T
	root string
}

const evilMemory = "400m" // room for a full /tmp, /run and /dev/shm

func newPrison(t *testing.T, env ...string) prison {
	t.Helper()
	p := prison{t, newRoot(t)}
	mustBerth(t, p.root, "groups", "add", "evil", "--no-trigger", "--memory", evilMemory)
	mustBerth(t, p.root, "groups", "add", "calm", "--no-trigger")
	mustBerth(t, p.root, "groups", "add", "probe", "--no-trigger", "--engine", "probe", "--memory", "64g")
	if _, err := berthIn(t, p.root, env, "run", "--detach"); err != nil {
		t.Fatal(err)
	}
	p.say("calm", "run echo mine > /workspace/group/secret; chmod 777 /workspace/group /workspace/group/secret; echo written", "written\n")
	p.say("evil", "run echo here", "here\n")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", p.evil("attack"), "./testdata/hardening")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the attacks: %v\n%s", err, out)
	}
	return p
}

func (p prison) evil(name string) string { return filepath.Join(p.root, "groups", "evil", name) }

// say sends a message and wants an answer with a text in it.
func (p prison) say(group, text, want string) (took time.Duration) {
	p.t.Helper()
	begin := time.Now()
	if got := mustBerth(p.t, p.root, "send", "-g", group, "--wait", "--timeout", "60s", text); !strings.Contains(got, want) {
		p.t.Errorf("%s: got %q, want %q in it", group, got, want)
	}
	return time.Since(begin)
}

// tries lets the group evil try everything, but what skip names, and returns what
// came of it.
func (p prison) tries(skip string) map[string]string {
	p.t.Helper()
	// A program of root's that makes its user root, as an operator may leave one in
	// a folder that is mounted. Without root's rights it is the agent's own.
	if err := copyFile(p.evil("attack"), p.evil("setuid")); err != nil {
		p.t.Fatal(err)
	}
	if err := os.Chmod(p.evil("setuid"), 0o755|os.ModeSetuid); err != nil {
		p.t.Fatal(err)
	}
	// All addresses of the host, the bridge of the engine among them, if it has one.
	port, called := listenEverywhere(p.t)
	addresses := []string{net.JoinHostPort("172.17.0.1", port)} // the bridge's usual one
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		p.t.Fatal(err)
	}
	for _, a := range interfaces {
		if ip := a.(*net.IPNet).IP; ip.To4() != nil || !ip.IsLinkLocalUnicast() { // which make no sense without an interface
			addresses = append(addresses, net.JoinHostPort(ip.String(), port))
		}
	}
	slices.Sort(addresses)
	addresses = slices.Compact(addresses) // the bridge may be there
	abstract := filepath.Base(p.root)
	l, err := net.Listen("unix", "@"+abstract)
	if err != nil {
		p.t.Fatal(err)
	}
	defer l.Close()
	p.say("evil", fmt.Sprintf("run SKIP='%s' SECRET=%s STORE=%s ABSTRACT=%s ADDRESSES='%s' ./attack > report 2>&1; echo tried$((1+1))", skip,
		filepath.Join(p.root, "groups/calm/secret"), filepath.Join(p.root, "store"), abstract, strings.Join(addresses, " ")), "tried2")
	if n := called.Load(); n != 0 {
		p.t.Errorf("the host's ports were reached %d times", n)
	}
	report, err := os.ReadFile(p.evil("report"))
	if err != nil {
		p.t.Fatal(err)
	}
	got := make(map[string]string)
	for line := range strings.Lines(string(report)) {
		name, result, _ := strings.Cut(strings.TrimSpace(line), ": ")
		got[name] = result
	}
	return got
}

// listenEverywhere counts the connections to a port on all addresses of the host.
func listenEverywhere(t *testing.T) (port string, called *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	called = new(atomic.Int64)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			called.Add(1)
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close() })
	_, port, err = net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port, called
}

// compare holds what came of the attacks against the patterns.
func compare(t *testing.T, got, want map[string]string) {
	t.Helper()
	tried := make(map[string]bool)
	for _, name := range slices.Sorted(maps.Keys(got)) {
		kind := name
		if strings.HasPrefix(name, "host port ") {
			kind = "host port"
		}
		tried[kind] = true
		t.Logf("%s: %s", name, got[name])
		if pattern, ok := want[kind]; !ok || !regexp.MustCompile(`\A(`+pattern+`)\z`).MatchString(got[name]) {
			t.Errorf("%s: got %q, want %q", name, got[name], pattern)
		}
	}
	for name := range want {
		if !tried[name] {
			t.Errorf("%s: was not tried", name)
		}
	}
}

// W56: without rights, limits and a closed network, the container is the host.
func TestW56AContainerIsHeld(t *testing.T) {
	p := newPrison(t)
	compare(t, p.tries(""), refusals)
	// The runner outlives every signal that only a tool could send.
	p.say("evil", "run ./attack signals; echo alive$((1+1))", "alive2")
	// And it is one run that lived through all of it: nobody had to try again.
	logs, err := filepath.Glob(filepath.Join(p.root, "data/logs/evil/*.log"))
	if err != nil || len(logs) != 1 {
		t.Errorf("the attacks took %d runs, want 1 (%v)", len(logs), err)
	}
	p.say("calm", "run cat secret", "mine\n")
	// The request with the longest of names was put aside.
	aside, err := filepath.Glob(filepath.Join(p.root, "data/ipc/errors/*/*"))
	if err != nil || len(aside) == 0 {
		t.Errorf("the unreadable request is not in quarantine: %v", err)
	}
}

// W56: what uses up processes, memory, the kernel's objects of a user or output
// hurts nobody else: another group is answered, by a new container and by
// the same one again, while it goes on.
func TestW56BombsStayInside(t *testing.T) {
	const pids = 64
	p := newPrison(t, fmt.Sprintf("CONTAINER_PIDS=%d", pids))
	for _, bomb := range []string{"fork", "memory", "inotify", "output"} {
		t.Run(bomb, func(t *testing.T) {
			p := prison{t, p.root}
			mustBerth(t, p.root, "stop", "calm")
			ended := make(chan error, 1)
			go func() {
				_, err := berthIn(t, p.root, nil, "send", "-g", "evil", "--wait", "--timeout", "90s", "run ./attack bomb "+bomb)
				ended <- err
			}()
			waitFor(t, func() bool { _, err := os.Stat(p.evil("exploded")); return err == nil })
			what, err := os.ReadFile(p.evil("exploded"))
			if err != nil {
				t.Fatal(err)
			}
			cold := p.say("calm", "run echo cold$((1+1))", "cold2")
			warm := p.say("calm", "run echo warm$((1+1))", "warm2")
			processes := attackers(t, p.evil("attack"))
			t.Logf("%s; %d processes; another group's answers took %v and %v", what, processes, cold, warm)
			if processes == 0 || processes > pids {
				t.Errorf("the group has %d processes, want 1 to %d", processes, pids)
			}
			if err := os.WriteFile(p.evil("enough"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
			if err := <-ended; err != nil {
				t.Error(err)
			}
			for _, name := range []string{"enough", "exploded"} {
				if err := os.Remove(p.evil(name)); err != nil {
					t.Fatal(err)
				}
			}
			p.say("evil", "run echo again$((1+1))", "again2")
			if bomb == "inotify" {
				log := mustBerth(t, p.root, "logs", "calm") // of its newest run
				if !strings.Contains(log, "looking every") {
					t.Errorf("there was inotify left for others, which proves nothing: %s", log)
				}
			}
		})
	}
}

// attackers counts the processes that run a program, as the host sees them.
func attackers(t *testing.T, program string) (n int) {
	t.Helper()
	want, err := os.Stat(program)
	if err != nil {
		t.Fatal(err)
	}
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if got, err := os.Stat(link); err == nil && os.SameFile(want, got) {
			n++
		}
	}
	return n
}

// W56: a runner that runs out of memory ends its own run, and the chat is told. The
// group asked for more memory than the operator allows.
func TestW56LimitsOfTheOperatorHold(t *testing.T) {
	p := newPrison(t, "CONTAINER_MEMORY=256m", "CONTAINER_MAX_MEMORY=512m", "CONTAINER_MAX_OUTPUT_SIZE=65536")
	p.say("probe", "eat 400000000\nsay room for this", "room for this")
	out, err := berthIn(t, p.root, nil, "send", "-g", "probe", "--wait", "--timeout", "60s", "eat 600000000\nsay far too much")
	if err == nil || !strings.Contains(out, "I ran out of memory") {
		t.Errorf("got %q, %v, want a notice", out, err)
	}
	log, err := os.ReadFile(filepath.Join(p.root, "data/logs/berth.log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`more than the operator's limit`, `"gets": 512`, "the agent ran out of memory"} {
		if !strings.Contains(string(log), want) {
			t.Errorf("the daemon's log does not say %q", want)
		}
	}
	// The runner's own streams are bounded too.
	p.say("probe", "flood 20000000\nflood-line 20000000\nsay poured", "poured")
	logs, err := filepath.Glob(filepath.Join(p.root, "data/logs/probe/*.log"))
	if err != nil || len(logs) != 2 {
		t.Fatal(logs, err)
	}
	if info, err := os.Stat(slices.Max(logs)); err != nil || info.Size() < 60_000 || info.Size() > 70_000 {
		t.Errorf("the run's log: %v, %v, want about 65536 bytes", info.Size(), err)
	}
	p.say("calm", "run cat secret", "mine\n")
}
