package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"berth/orchestrator/internal/berth"
)

func TestMain(m *testing.M) {
	testscript.Main(tidy{m}, map[string]func(){"berth": main})
}

// afterAll is called when all tests have run.
var afterAll = func() {}

type tidy struct{ *testing.M }

func (t tidy) Run() int {
	defer func() { afterAll() }()
	return t.M.Run()
}

// TestScripts plays the command line as its user sees it, in a fresh root
// without a daemon.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("GORACE", "atexit_sleep_ms=0") // or each command takes a second more
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"misuse":  misuse,
			"touchat": touchAt,
		},
	})
}

// misuse runs berth and wants exit code 2, one line on stderr and nothing on
// stdout.
func misuse(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec("berth", args...)
	exit, ok := err.(*exec.ExitError)
	if !ok || exit.ExitCode() != exitMisuse {
		ts.Fatalf("berth %s: got %v, want exit status 2", strings.Join(args, " "), err)
	}
	if out := ts.ReadFile("stdout"); out != "" {
		ts.Fatalf("got %q on stdout, want nothing", out)
	}
	if text := ts.ReadFile("stderr"); strings.Count(text, "\n") != 1 || !strings.HasPrefix(text, "berth: ") {
		ts.Fatalf("got %q on stderr, want one line", text)
	}
}

func touchAt(ts *testscript.TestScript, _ bool, args []string) {
	at, err := time.Parse(time.RFC3339, args[1])
	ts.Check(err)
	ts.Check(os.Chtimes(ts.MkAbs(args[0]), at, at))
}

func TestSendRefusesBadText(t *testing.T) {
	for name, text := range map[string]string{
		"NUL": "a\x00b", "not UTF-8": "a\xff", "too large": strings.Repeat("x", berth.MaxText+1), "far too large": strings.Repeat("x", 3*berth.MaxText),
	} {
		for _, args := range [][]string{{"send", "-g", "main", text}, {"send", "-g", "main", "-"}} {
			var out, errs bytes.Buffer
			if got := run(t.Context(), args, nil, strings.NewReader(text), &out, &errs); got != exitMisuse || strings.Count(errs.String(), "\n") != 1 {
				t.Errorf("%s: got %d, %q, want misuse in one line", name, got, errs.String())
			}
		}
	}
}

func contextWithCancel(t *testing.T) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	return ctx, cancel
}

func appendTo(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = f.WriteString(text)
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}
