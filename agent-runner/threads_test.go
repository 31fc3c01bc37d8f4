package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// The threads are there afterwards. In a process of its own, since this one has
// many.
func TestSpareThreads(t *testing.T) {
	if os.Getenv("TEST_SPARE_THREADS") != "" {
		spareThreads(24)
		entries, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) < 24 {
			t.Fatalf("%d threads, want at least 24", len(entries))
		}
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestSpareThreads$", "-test.v")
	cmd.Env = append(os.Environ(), "TEST_SPARE_THREADS=1")
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
		t.Errorf("%v\n%s", err, out)
	}
}
