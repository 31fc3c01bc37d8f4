package main

import (
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"testing"
)

// What a package makes before main is there in every command and stays for good. A
// regular expression that counts to 200 has taken 7 MB.
func TestInitsAreSmall(t *testing.T) {
	const most = 1 << 20
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "GODEBUG=inittrace=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	inits := regexp.MustCompile(`(?m)^init (\S+) .* (\d+) bytes,`).FindAllSubmatch(out, -1)
	if len(inits) < 50 {
		t.Fatalf("%d packages in the trace:\n%s", len(inits), out)
	}
	for _, m := range inits {
		if n, err := strconv.Atoi(string(m[2])); err != nil || n > most {
			t.Errorf("%s takes %s bytes, want at most %d", m[1], m[2], most)
		}
	}
}
