package shell

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/reap"
)

// TestMain lets this test binary be the shell, as the runner is in its image.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "sh" {
		os.Exit(Main(os.Args[2:]))
	}
	os.Exit(m.Run())
}

// environ is env and what this test binary needs to be a quiet shell under the
// race detector and with coverage.
func environ(t *testing.T, env ...string) []string {
	return append(env, "GORACE=atexit_sleep_ms=0", "GOCOVERDIR="+t.TempDir())
}

var shells = map[string][]string{
	"system":   nil,
	"built-in": {os.Args[0], "sh", "-c"},
}

func TestRun(t *testing.T) {
	for name, shell := range shells {
		for _, tt := range []struct {
			name, text string
			want       Result
		}{
			{"output", "echo hi; echo oops >&2", Result{Output: "hi\noops\n"}},
			{"exit code", "exit 3", Result{Code: 3}},
			{"lines", "for i in a b; do\n  echo $i\ndone", Result{Output: "a\nb\n"}},
			{"file tools", "mkdir d && touch d/x && ls d && cat d/x && rm -r d", Result{Output: "x\n"}},
			{"environment", `echo "$HOME-$SECRET"`, Result{Output: "/here-\n"}},
			{"no input", "read x; echo $?", Result{Output: "1\n"}},
			{"pipes", "echo a | cat", Result{Output: "a\n"}},
		} {
			t.Run(name+"/"+tt.name, func(t *testing.T) {
				t.Setenv("SECRET", "secret")
				var children reap.Children
				got, err := Run(t.Context(), &children, Command{
					Text: tt.text, Dir: t.TempDir(), Timeout: time.Minute, Shell: shell,
					Env: environ(t, "HOME=/here", "PATH=/usr/bin:/bin"),
				})
				if err != nil || got != tt.want {
					t.Errorf("got %+v, %v; want %+v", got, err, tt.want)
				}
			})
		}
	}
}

func TestBuiltInShellNeedsNothingInTheImage(t *testing.T) {
	var children reap.Children
	for _, tt := range []struct {
		text string
		want Result
	}{
		{"echo one > f && cp f g && ls && cat g", Result{Output: "f\ng\none\n"}},
		{"no-such-program", Result{Output: "\"no-such-program\": executable file not found in $PATH\n", Code: 127}},
		{"if then", Result{Output: "sh: 1:1: `if` must be followed by a statement list\n", Code: 2}},
	} {
		got, err := Run(t.Context(), &children, Command{
			Text: tt.text, Dir: t.TempDir(), Timeout: time.Minute, Shell: shells["built-in"],
			Env: environ(t, "PATH=/nothing/here"),
		})
		if err != nil || got != tt.want {
			t.Errorf("%s: got %+v, %v; want %+v", tt.text, got, err, tt.want)
		}
	}
}

func TestLongOutputKeepsBothEnds(t *testing.T) {
	var children reap.Children
	got, err := Run(t.Context(), &children, Command{
		Text:    "echo first; i=0; while [ $i -lt 3000 ]; do echo 0123456789012345678901234567890123456789; i=$((i+1)); done; echo last",
		Timeout: time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	const total = len("first\n") + 3000*41 + len("last\n")
	if !strings.HasPrefix(got.Output, "first\n") || !strings.HasSuffix(got.Output, "last\n") ||
		!strings.Contains(got.Output, "(57475 bytes cut here)") || total-MaxOutput != 57475 {
		t.Errorf("%d bytes kept of %d: %.40q … %q", len(got.Output), total, got.Output, got.Output[len(got.Output)-40:])
	}
}

// The pipe is at its end when the last process of the group is gone, so that
// these return at all is what they show.
func TestNothingOfTheGroupIsLeft(t *testing.T) {
	for name, shell := range shells {
		t.Run(name, func(t *testing.T) {
			var children reap.Children
			start := time.Now()
			got, err := Run(t.Context(), &children, Command{
				Text: "/bin/sleep 1000 & echo started", Timeout: time.Minute, Shell: shell, Env: environ(t, "PATH=/bin"),
			})
			if err != nil || got.Output != "started\n" {
				t.Errorf("got %+v, %v", got, err)
			}
			if took := time.Since(start); took > 30*time.Second {
				t.Errorf("took %v", took)
			}
		})
	}
}

func TestTimeout(t *testing.T) {
	for name, shell := range shells {
		t.Run(name, func(t *testing.T) {
			var children reap.Children
			got, err := Run(t.Context(), &children, Command{
				Text: "echo before; while :; do :; done", Timeout: 200 * time.Millisecond, Shell: shell, Env: environ(t),
			})
			want := Result{Output: "before\n", Code: 137, TimedOut: true}
			if err != nil || got != want {
				t.Errorf("got %+v, %v; want %+v", got, err, want)
			}
		})
	}
}

func TestCancel(t *testing.T) {
	stopped := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	fifo := filepath.Join(t.TempDir(), "started")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	var children reap.Children
	done := make(chan error, 1)
	go func() {
		_, err := Run(ctx, &children, Command{Text: "echo > " + fifo + "; sleep 1000", Timeout: time.Hour, Env: []string{"PATH=/usr/bin:/bin"}})
		done <- err
	}()
	if _, err := os.ReadFile(fifo); err != nil { // blocks until the command runs
		t.Fatal(err)
	}
	cancel(stopped)
	if err := <-done; !errors.Is(err, stopped) {
		t.Errorf("got %v, want the cause", err)
	}
}

func TestDetachedProcessDoesNotHoldTheAnswer(t *testing.T) {
	if _, err := os.Stat("/usr/bin/setsid"); err != nil {
		t.Skip("no setsid here")
	}
	var children reap.Children
	got, err := Run(t.Context(), &children, Command{
		Text: "setsid sleep 20 & echo started; sleep 0.1", Timeout: time.Minute, Env: []string{"PATH=/usr/bin:/bin"},
	})
	if err != nil || got.Output != "started\n" {
		t.Errorf("got %+v, %v", got, err)
	}
}
