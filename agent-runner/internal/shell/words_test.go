package shell

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/reap"
)

// bare runs a command in the built-in shell where nothing is installed.
func bare(t *testing.T, dir, text string, env ...string) Result {
	t.Helper()
	var children reap.Children
	got, err := Run(t.Context(), &children, Command{
		Text: text, Dir: dir, Timeout: time.Minute, Shell: shells["built-in"], Env: environ(t, append(env, "PATH=/nothing/here")...),
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// The words do what the real programs do with the same input.
func TestWordsAreLikeTheRealOnes(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"ten": "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n", "words": "beta two\nAlpha one\nbeta two\n\ngamma  three\nalpha One", "empty": "", "d/deep": "needle\nhay\n", "d/other": "hay\n",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, text := range []string{
		"head ten", "head -3 ten", "head -n 3 ten", "head -n3 ten words", "head -c 5 ten", "head -q -n1 ten words", "head empty", "head -n0 ten", "head < words",
		"tail ten", "tail -3 ten", "tail -n +11 ten", "tail -n +1 words", "tail -c 4 ten", "tail -c +25 ten", "tail -n 1 ten words", "tail empty", "tail -n0 ten",
		"sort words", "sort -r words", "sort -u words", "sort -n ten", "sort -rn ten", "sort -nu ten ten", "uniq words", "sort words | uniq -c", "uniq empty",
		"grep beta words", "grep -i ALPHA words", "grep -vn a words", "grep -c a words ten", "grep -l a words ten empty", "grep -q a words; echo $?", "grep -q z words; echo $?",
		"grep -o '[a-z]*e' words", "grep -E 'one|two' words", "grep -F . words; echo $?", "grep -h 1 ten words", "grep -r needle d", "cd d; grep -rn needle .", "grep -io ONE words", "cat words | grep three",
		"grep -- -x words; echo $?", "wc -l < ten", "wc -c < words", "wc -w < words", "seq 3", "seq 2 4", "seq 10 -3 1", "seq 3 1", "seq -1 1",
		"basename /a/b.txt", "basename /a/b.txt .txt", "basename /", "basename a/", "basename .txt .txt", "dirname /a/b", "dirname a", "dirname /a", "dirname a/b/", "dirname /",
		"echo hi | tee f; cat f", "echo hi > g; echo ho | tee -a g >/dev/null; cat g", "uname", "uname -sm", "uname -r", "whoami", "id -u", "id -un", "id -g", "hostname",
		"date -u +%Y-%m-%d", "date +%F%n%%x", "sleep 0", "sleep 0.01s 0m", "sleep x 2>/dev/null; echo $?", "env | grep ^A=", "seq 100000 | head -n 2",
		"head nix 2>/dev/null; echo $?", "head nix ten 2>/dev/null | tail -n 1", "sort nix 2>/dev/null; echo $?", "grep a nix 2>/dev/null; echo $?", "kill -0 $$; echo $?", "kill -s CONT $$; echo $?",
	} {
		got := bare(t, dir, text, "A=1", "LC_ALL=C", "LANG=C.UTF-8")
		real := exec.CommandContext(t.Context(), "/bin/bash", "-c", text)
		real.Dir, real.Env = dir, []string{"A=1", "LC_ALL=C", "LANG=C.UTF-8", "PATH=/usr/bin:/bin"}
		want, err := real.CombinedOutput()
		code := 0
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			code = exit.ExitCode()
		}
		if got.Output != string(want) || got.Code != code {
			t.Errorf("%s: got %q, %d; the real one says %q, %d", text, got.Output, got.Code, want, code)
		}
	}
}

// What a word does not know it says, with how it is used.
func TestWordsThatAreMisused(t *testing.T) {
	for text, want := range map[string]string{
		"sleep":             "sleep: not understood; it is used as: sleep NUMBER[s|m|h|d]...\n",
		"head -x f":         "head: -x: not understood; it is used as: head [-q] [-n LINES | -c BYTES] [FILE]...\n",
		"tail -f /dev/null": "tail: -f: not understood",
		"head -n":           "head: -n needs a value",
		"grep":              "grep: not understood",
		"grep '(' /":        "grep: error parsing regexp",
		"kill":              "kill: not understood",
		"kill -NIX 1":       "kill: not understood",
		"kill g1":           "kill: \"g1\" is no number of a process",
		"date -d tomorrow":  "date: -d: not understood",
		"date +%Q":          "date: %Q: not understood",
		"env -i ls":         "env: -i: not understood",
		"seq 1 0 5":         "seq: not understood",
	} {
		if got := bare(t, t.TempDir(), text); !strings.HasPrefix(got.Output, want) || got.Code == 0 {
			t.Errorf("%s: %+v", text, got)
		}
	}
	if got := bare(t, t.TempDir(), "date +%s; date"); !regexp.MustCompile(`^\d{10}\n\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \w+ \d{4}\n$`).MatchString(got.Output) {
		t.Errorf("%+v", got)
	}
	if got := bare(t, t.TempDir(), "ps"); !strings.Contains(got.Output, " sh -c ps") {
		t.Errorf("%+v", got)
	}
}

// A signal to the shell ends what sleeps in it, at once and as it would the real
// one; what is in the background goes with it.
func TestSignalsReachWords(t *testing.T) {
	for signal, code := range map[syscall.Signal]int{unix.SIGTERM: 143, unix.SIGINT: 130, unix.SIGHUP: 129, unix.SIGKILL: -1} {
		for _, text := range []string{"echo on; sleep 600; echo never", "sleep 600 & echo on; wait; echo never", "echo on; cat | sleep 600"} {
			cmd := exec.CommandContext(t.Context(), shells["built-in"][0], "sh", "-c", text)
			cmd.Env = environ(t, "PATH=/nothing/here")
			stdin, w, err := os.Pipe() // that cat waits for
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			cmd.Stdin = stdin
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			stdin.Close()
			got := make([]byte, 3)
			if _, err := io.ReadFull(out, got); err != nil || string(got) != "on\n" {
				t.Fatalf("%q, %v", got, err)
			}
			start := time.Now()
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			rest := make([]byte, 10)
			n, _ := out.Read(rest)
			_ = cmd.Wait()
			soon := killGrace + time.Second/2
			if strings.Contains(text, "cat") { // which only the end of the process ends
				soon = time.Minute
			}
			if took := time.Since(start); took > soon || cmd.ProcessState.ExitCode() != code || n > 0 {
				t.Errorf("%s by %v: exit code %d after %v, %q", text, signal, cmd.ProcessState.ExitCode(), took, rest[:n])
			}
		}
	}
}
