// Command helper plays the agent runner in the tests against a real engine. The
// first word on stdin says what to do.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
)

func main() {
	if len(os.Args) > 1 {
		spy()
		return
	}
	input, err := io.ReadAll(os.Stdin)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	}
	word, rest, _ := strings.Cut(string(input), " ")
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGUSR1)
	switch word {
	case "echo":
		fmt.Print(rest)
		fmt.Fprintf(os.Stderr, "%d bytes", len(rest))
	case "exit":
		code, _ := strconv.Atoi(rest)
		os.Exit(code)
	case "serve": // until told to end: SIGUSR1 is answered, SIGTERM ends
		fmt.Println("ready")
		for s := range signals {
			if s == syscall.SIGTERM {
				os.Exit(7)
			}
			fmt.Println("usr1")
		}
	case "ignore": // SIGTERM is answered, and that is all
		fmt.Println("ready")
		for range signals {
			fmt.Println("ignored")
		}
	case "oom":
		var kept [][]byte
		for {
			b := make([]byte, 1<<20)
			for i := range b {
				b[i] = 1
			}
			kept = append(kept, b)
			_ = kept
		}
	case "look":
		look()
	case "write":
		fmt.Print(os.WriteFile(rest, []byte("x"), 0o600))
	}
}

// look prints what a process of a container can see and do.
func look() {
	facts := map[string]string{}
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			facts[k] = strings.TrimSpace(v)
		}
	}
	try := func(what string, err error) {
		facts[what] = "yes"
		if err != nil {
			facts[what] = "no"
		}
	}
	for _, file := range []string{"/x", "/etc/passwd", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/x", "/tmp/x", "/run/x"} {
		try("write "+file, os.WriteFile(file, nil, 0o600))
	}
	program, err := os.ReadFile(os.Args[0])
	if err == nil {
		err = os.WriteFile("/tmp/program", program, 0o755)
	}
	if err == nil {
		err = exec.Command("/tmp/program", "spy").Run()
	}
	try("run /tmp/program", err)
	nets, _ := net.Interfaces()
	var names []string
	for _, n := range nets {
		names = append(names, n.Name)
	}
	facts["interfaces"] = strings.Join(names, " ")
	facts["pid"] = strconv.Itoa(os.Getpid())
	facts["cwd"], _ = os.Getwd()
	facts["home"], facts["tz"] = os.Getenv("HOME"), os.Getenv("TZ")
	var limit syscall.Rlimit
	_ = syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit)
	facts["nofile"] = strconv.FormatUint(limit.Max, 10)

	// As the runner does: see spy.
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_DUMPABLE, 0, 0)
	spying, err := exec.Command(os.Args[0], "spy").Output()
	facts["spy"] = string(spying)
	if err != nil {
		facts["spy"] = err.Error()
	}
	_ = json.NewEncoder(os.Stdout).Encode(facts)
}

// spy is a tool of the same user that tries to speak for process 1.
func spy() {
	if f, err := os.OpenFile("/proc/1/fd/1", os.O_WRONLY, 0); err == nil {
		fmt.Print("stdout ")
		f.Close()
	}
	if _, err := os.ReadFile("/proc/1/environ"); err == nil {
		fmt.Print("environ ")
	}
	if f, err := os.OpenFile("/proc/1/mem", os.O_RDWR, 0); err == nil {
		fmt.Print("memory ")
		f.Close()
	}
}
