// Command hardening is a tool of an agent that went wrong: it tries what a
// container must not do, each thing in a process of its own, and prints a line
// "name: what came of it" for each. "done" means that it worked.
package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	runtime.LockOSThread() // namespaces and tracers belong to a thread
	word, rest := "all", []string(nil)
	if len(os.Args) > 1 {
		word, rest = os.Args[1], os.Args[2:]
	}
	switch word {
	case "all":
		all()
	case "one":
		one(rest[0])
	case "signals":
		signals()
	case "bomb":
		bomb(rest[0])
	case "eat":
		for !enough() {
			eat(16 << 20)
		}
	case "dial":
		_, err := dial("unix", rest[0])()
		fmt.Println("dialled:", err)
	case "id":
		fmt.Printf("uid %d\n", os.Geteuid())
	}
}

type attack struct {
	name string
	do   func() (detail string, err error)
}

func all() {
	for _, a := range attacks() {
		if a.name == os.Getenv("SKIP") {
			continue
		}
		out, err := exec.Command(os.Args[0], "one", a.name).CombinedOutput()
		line := strings.TrimSpace(string(out))
		if err != nil || line == "" {
			line = strings.TrimSpace(fmt.Sprint(line, " ", err))
		}
		fmt.Printf("%s: %s\n", a.name, line)
	}
}

func one(name string) {
	for _, a := range attacks() {
		if a.name != name {
			continue
		}
		detail, err := a.do()
		what := "done"
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			what = unix.ErrnoName(errno)
		} else if err != nil {
			what = err.Error()
		}
		fmt.Println(strings.TrimSpace(what + " " + detail))
	}
}

// raw makes a system call by its number.
func raw(number uintptr, args ...uintptr) func() (string, error) {
	return func() (string, error) {
		var a [6]uintptr
		copy(a[:], args)
		got, _, errno := unix.Syscall6(number, a[0], a[1], a[2], a[3], a[4], a[5])
		if errno != 0 {
			return "", errno
		}
		return strconv.Itoa(int(got)), nil
	}
}

func plain(do func() error) func() (string, error) {
	return func() (string, error) { return "", do() }
}

func pointer[T any](v *T) uintptr { return uintptr(unsafe.Pointer(v)) }

func text(s string) uintptr {
	b, err := unix.BytePtrFromString(s)
	if err != nil {
		panic(err)
	}
	return pointer(b)
}

func write(path string) func() (string, error) {
	return plain(func() error {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if errors.Is(err, os.ErrNotExist) {
			f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
		}
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.WriteString("1")
		return err
	})
}

func read(path string) func() (string, error) {
	return func() (string, error) {
		f, err := os.Open(path)
		if err != nil {
			return "", err
		}
		defer f.Close()
		n, err := f.Read(make([]byte, 64))
		if n == 0 {
			return "", errors.New("empty")
		}
		return "", err
	}
}

func list(path string) func() (string, error) {
	return func() (string, error) {
		entries, err := os.ReadDir(path)
		if err == nil && len(entries) == 0 {
			err = errors.New("empty")
		}
		return "", err
	}
}

func dial(network, address string) func() (string, error) {
	return plain(func() error {
		c, err := net.DialTimeout(network, address, 2*time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
}

func socket(domain, kind, protocol int) func() (string, error) {
	return plain(func() error { _, err := unix.Socket(domain, kind, protocol); return err })
}

// clone starts a child in new namespaces.
func clone(flags uintptr) func() (string, error) {
	return plain(func() error {
		cmd := exec.Command(os.Args[0], "id")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
		return cmd.Run()
	})
}

func attacks() []attack {
	list := []attack{
		// Mounts and namespaces.
		{"mount tmpfs", plain(func() error { return unix.Mount("none", "/tmp", "tmpfs", 0, "") })},
		{"mount bind", plain(func() error { return unix.Mount("/etc", "/tmp", "", unix.MS_BIND, "") })},
		{"remount / writable", plain(func() error { return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND, "") })},
		{"umount ipc", plain(func() error { return unix.Unmount("/workspace/ipc", unix.MNT_DETACH) })},
		{"fsopen", raw(unix.SYS_FSOPEN, text("tmpfs"), 0)},
		{"open_tree", raw(unix.SYS_OPEN_TREE, atFDCWD, text("/"), 1)},
		{"pivot_root", plain(func() error { return unix.PivotRoot("/tmp", "/tmp") })},
		{"chroot", plain(func() error { return unix.Chroot("/tmp") })},
		{"unshare user", plain(func() error { return unix.Unshare(unix.CLONE_NEWUSER) })},
		{"unshare mount", plain(func() error { return unix.Unshare(unix.CLONE_NEWNS) })},
		{"unshare net", plain(func() error { return unix.Unshare(unix.CLONE_NEWNET) })},
		{"clone user", clone(unix.CLONE_NEWUSER)},
		{"clone pid", clone(unix.CLONE_NEWPID)},
		{"setns", plain(func() error {
			fd, err := unix.Open("/proc/self/ns/mnt", unix.O_RDONLY, 0)
			if err != nil {
				return err
			}
			return unix.Setns(fd, unix.CLONE_NEWNS)
		})},

		// The runner, which is process 1 and holds the nonce.
		{"ptrace runner", plain(func() error { return unix.PtraceAttach(1) })},
		{"read runner's memory", func() (string, error) {
			f, err := os.Open("/proc/1/mem")
			if err != nil {
				return "", err
			}
			_, err = f.ReadAt(make([]byte, 1), 0x400000)
			return "", err
		}},
		{"process_vm_readv runner", func() (string, error) {
			var to byte
			local := unix.Iovec{Base: &to, Len: 1}
			remote := unix.RemoteIovec{Base: 0x400000, Len: 1}
			_, err := unix.ProcessVMReadv(1, []unix.Iovec{local}, []unix.RemoteIovec{remote}, 0)
			return "", err
		}},
		{"read runner's environment", read("/proc/1/environ")},
		{"write runner's stdout", write("/proc/1/fd/1")},
		{"runner's folder", list("/proc/1/root")},
		{"take runner's stdout", func() (string, error) {
			fd, err := unix.PidfdOpen(1, 0)
			if err != nil {
				return "", err
			}
			_, err = unix.PidfdGetfd(fd, 1, 0)
			return "", err
		}},

		// The kernel.
		{"raw socket", socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)},
		{"packet socket", socket(unix.AF_PACKET, unix.SOCK_RAW, 0)},
		{"mknod device", plain(func() error { return unix.Mknod("/tmp/null", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) })},
		{"mknod disk", plain(func() error { return unix.Mknod("/tmp/disk", unix.S_IFBLK|0o600, int(unix.Mkdev(254, 0))) })},
		{"init_module", raw(unix.SYS_INIT_MODULE, 0, 0, text(""))},
		{"delete_module", raw(unix.SYS_DELETE_MODULE, text("x"), 0)},
		{"kexec_load", raw(unix.SYS_KEXEC_LOAD)},
		{"keyctl", raw(unix.SYS_KEYCTL, 0, ^uintptr(3), 1)},
		{"add_key", raw(unix.SYS_ADD_KEY, text("user"), text("x"), text("x"), 1, ^uintptr(3))},
		{"bpf", raw(unix.SYS_BPF, 0, 0, 0)},
		{"perf_event_open", func() (string, error) {
			_, err := unix.PerfEventOpen(&unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE}, 0, -1, -1, 0)
			return "", err
		}},
		{"userfaultfd", raw(unix.SYS_USERFAULTFD, 0)},
		{"io_uring", func() (string, error) {
			var params [120]byte
			return raw(unix.SYS_IO_URING_SETUP, 1, pointer(&params))()
		}},
		{"open_by_handle_at", func() (string, error) {
			_, err := unix.OpenByHandleAt(unix.AT_FDCWD, unix.NewFileHandle(1, make([]byte, 8)), unix.O_RDONLY)
			return "", err
		}},
		{"reboot", plain(func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF) })},
		{"swapoff", raw(unix.SYS_SWAPOFF, text("/tmp"))},
		{"set the clock", plain(func() error { return unix.Settimeofday(&unix.Timeval{Sec: 1}) })},
		{"set the host's name", plain(func() error { return unix.Sethostname([]byte("x")) })},
		{"kernel log", func() (string, error) { n, err := unix.Klogctl(10, nil); return strconv.Itoa(n), err }},
		{"acct", plain(func() error { return unix.Acct("/tmp/acct") })},
		{"real-time priority", func() (string, error) {
			priority := int32(1)
			return raw(unix.SYS_SCHED_SETSCHEDULER, 0, 1, pointer(&priority))()
		}},
		{"nice -20", plain(func() error { return unix.Setpriority(unix.PRIO_PROCESS, 0, -20) })},
		{"more open files", plain(func() error {
			return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20})
		})},
		{"core files", plain(func() error {
			return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20})
		})},
		{"spare itself from oom", plain(func() error { return os.WriteFile("/proc/self/oom_score_adj", []byte("-1"), 0) })},

		// Other users.
		{"setuid(0)", plain(func() error { return unix.Setuid(0) })},
		{"setgroups", plain(func() error { return unix.Setgroups([]int{0}) })},
		{"capset", func() (string, error) {
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			all := [2]unix.CapUserData{{Effective: ^uint32(0), Permitted: ^uint32(0)}, {}}
			return "", unix.Capset(&header, &all[0])
		}},
		{"chown to root", plain(func() error {
			if err := os.WriteFile("/workspace/group/chown", nil, 0o600); err != nil {
				return err
			}
			return os.Chown("/workspace/group/chown", 0, 0)
		})},
		{"setuid program", func() (string, error) {
			out, err := exec.Command("/workspace/group/setuid", "id").Output()
			return strings.TrimSpace(string(out)), err
		}},

		// Files.
		{"write /", write("/x")},
		{"write /etc/passwd", write("/etc/passwd")},
		{"write /etc/hosts", write("/etc/hosts")},
		{"write /etc/resolv.conf", write("/etc/resolv.conf")},
		{"write the runner's program", write("/usr/local/bin/agent-runner")},
		{"write /workspace/ipc", write("/workspace/ipc/x")},
		{"write /workspace/ipc/lease", write("/workspace/ipc/lease")},
		{"write responses", write("/workspace/ipc/responses/x")},
		{"replace input", plain(func() error { return os.Rename("/workspace/ipc/input", "/workspace/ipc/tasks/input") })},
		{"write global", write("/workspace/global/x")},
		{"write core_pattern", write("/proc/sys/kernel/core_pattern")},
		{"write modprobe", write("/proc/sys/kernel/modprobe")},
		{"write ip_forward", write("/proc/sys/net/ipv4/ip_forward")},
		{"write sysrq-trigger", write("/proc/sysrq-trigger")},
		{"write uevent_helper", write("/sys/kernel/uevent_helper")},
		{"write a cgroup's limit", func() (string, error) {
			v1, err := write("/sys/fs/cgroup/memory/memory.limit_in_bytes")()
			if err == nil {
				return v1, nil
			}
			return write("/sys/fs/cgroup/memory.max")()
		}},
		{"make a cgroup", plain(func() error {
			if os.Mkdir("/sys/fs/cgroup/memory/x", 0o700) == nil {
				return nil
			}
			return os.Mkdir("/sys/fs/cgroup/x", 0o700)
		})},
		{"read kcore", read("/proc/kcore")},
		{"read keys", read("/proc/keys")},
		{"read timer_list", read("/proc/timer_list")},
		{"read firmware", list("/sys/firmware")},
		{"open /dev/mem", read("/dev/mem")},
		{"open /dev/kmsg", read("/dev/kmsg")},
		{"open /dev/kvm", read("/dev/kvm")},
		{"open /dev/fuse", read("/dev/fuse")},
		{"run a program in /run", plain(func() error { return copyAndRun("/run/x") })},
		{"run a program in /dev/shm", plain(func() error { return copyAndRun("/dev/shm/x") })},
		{"long name", plain(func() error { return os.WriteFile(strings.Repeat("x", 256), nil, 0o600) })},
		{"deep folders", deep},
		{"long request", plain(func() error {
			return os.WriteFile("/workspace/ipc/messages/"+strings.Repeat("é", 125)+".json", []byte("{"), 0o600)
		})},

		// Places of the host and of others.
		{"other group by the host's path", read(os.Getenv("SECRET"))},
		{"other group beside its own", read("/workspace/group/../calm/secret")},
		{"other group's messages", list("/workspace/ipc/../calm")},
		{"the store", list(os.Getenv("STORE"))},
		{"Docker socket", dial("unix", "/var/run/docker.sock")},
		{"control socket", dial("unix", os.Getenv("STORE")+"/berth.sock")},
		{"abstract socket of the host", dial("unix", "@"+os.Getenv("ABSTRACT"))},
		{"metadata address", dial("tcp", "169.254.169.254:80")},
		{"metadata address, version 6", dial("tcp", "[fd00:ec2::254]:80")},
		{"the internet", dial("tcp", "1.1.1.1:443")},
		{"a name server", dial("tcp", "8.8.8.8:53")},
	}
	for address := range strings.FieldsSeq(os.Getenv("ADDRESSES")) {
		list = append(list, attack{"host port " + address, dial("tcp", address)})
	}
	return append(list,
		attack{"100000 open files", func() (string, error) {
			for n := range 100_000 {
				if _, err := unix.Open("/dev/null", unix.O_RDONLY, 0); err != nil {
					return fmt.Sprint(n), err
				}
			}
			return "", nil
		}},
		attack{"fill /tmp", func() (string, error) { return fill("/tmp/fill") }},
		attack{"fill /run", func() (string, error) { return fill("/run/fill") }},
		attack{"fill /dev/shm", func() (string, error) { return fill("/dev/shm/fill") }},
		attack{"fill memory", func() (string, error) {
			for {
				eat(16 << 20)
			}
		}},
	)
}

func copyAndRun(to string) error {
	program, err := os.ReadFile(os.Args[0])
	if err != nil {
		return err
	}
	if err := os.WriteFile(to, program, 0o700); err != nil {
		return err
	}
	defer os.Remove(to)
	return exec.Command(to, "id").Run()
}

// deep makes folders whose path is longer than any call takes.
func deep() (string, error) {
	if err := os.Chdir("/workspace/group"); err != nil {
		return "", err
	}
	name := strings.Repeat("d", 250)
	for n := range 40 {
		if err := unix.Mkdir(name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Sprint(n), err
		}
		if err := unix.Chdir(name); err != nil {
			return fmt.Sprint(n), err
		}
	}
	return "", nil
}

// fill writes to a file until there is no room, and removes it.
func fill(path string) (string, error) {
	f, err := os.Create(path)
	if err != nil {
		return "", err
	}
	defer os.Remove(path)
	defer f.Close()
	piece := make([]byte, 1<<20)
	for n := range 4096 {
		if _, err := f.Write(piece); err != nil {
			return fmt.Sprint(n, " MiB"), err
		}
	}
	return "4 GiB", nil
}

var eaten [][]byte

func eat(n int) {
	food := make([]byte, n)
	for i := 0; i < n; i += os.Getpagesize() {
		food[i] = 1
	}
	eaten = append(eaten, food)
}

// signals sends the runner every signal but the two by which the host ends it.
func signals() {
	for s := unix.Signal(1); s <= 64; s++ {
		if s == unix.SIGTERM || s == unix.SIGINT {
			continue
		}
		if err := unix.Kill(1, s); err != nil && !errors.Is(err, unix.EINVAL) {
			fmt.Printf("signal %d: %v\n", s, err)
		}
	}
	fmt.Println("signals sent")
}

// A bomb goes off, says so by the file "exploded" and goes on until there is a
// file "enough".

func enough() bool {
	_, err := os.Stat("/workspace/group/enough")
	return err == nil
}

// fork makes this process, and all that come of it, fork for ever. They make bare
// system calls only: Go itself cannot live without room for threads.
func fork() {
	path, err := unix.BytePtrFromString("/workspace/group/enough")
	if err != nil {
		panic(err)
	}
	first, pause := true, unix.Timespec{Nsec: 10e6}
	for {
		pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if errno == 0 && pid == 0 {
			first = false
		}
		if gone, _, errno := unix.RawSyscall6(unix.SYS_FACCESSAT, atFDCWD, pointer(path), 0, 0, 0, 0); errno == 0 && gone == 0 {
			if first {
				return
			}
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		if errno != 0 {
			if first {
				exploded("fork refused")
			}
			unix.RawSyscall(unix.SYS_NANOSLEEP, pointer(&pause), 0, 0)
		}
	}
}

const atFDCWD = ^uintptr(99) // unix.AT_FDCWD

func exploded(what string) {
	_ = os.WriteFile("/workspace/group/.exploded", []byte(what), 0o600)
	_ = os.Rename("/workspace/group/.exploded", "/workspace/group/exploded")
}

func bomb(name string) {
	switch name {
	case "fork":
		fork()
	case "memory": // one process after the other eats until it is killed
		for !enough() {
			err := exec.Command(os.Args[0], "eat").Run()
			if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Sys().(syscall.WaitStatus).Signal() == unix.SIGKILL {
				exploded("killed")
			}
		}
	case "inotify": // the kernel counts these by user, over all containers
		n := 0
		for !enough() {
			if _, err := unix.InotifyInit1(0); err != nil {
				exploded(fmt.Sprintf("%s after %d", unix.ErrnoName(err.(syscall.Errno)), n))
				time.Sleep(10 * time.Millisecond)
				continue
			}
			n++
		}
	case "output":
		line := []byte(strings.Repeat("x", 1023) + "\n")
		for n := 0; !enough(); n++ {
			os.Stdout.Write(line)
			os.Stderr.Write(line)
			if n == 64<<10 {
				exploded("64 MiB")
			}
		}
	}
	fmt.Println("enough")
}
