package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/reap"
	"berth/agent-runner/protocol"
)

// TestMain lets this test binary be the runner, for what only a process shows.
func TestMain(m *testing.M) {
	if os.Getenv("BERTH_TEST_RUNNER") != "" {
		main()
	}
	os.Exit(m.Run())
}

// start runs the runner in this process on folders of its own.
func start(t *testing.T, stdin string) (at places, stdout io.Reader, code <-chan int) {
	t.Helper()
	dir := t.TempDir()
	at = places{ipc: filepath.Join(dir, "ipc"), group: filepath.Join(dir, "group"), home: filepath.Join(dir, "home")}
	for _, path := range []string{filepath.Join(at.ipc, "input"), filepath.Join(at.ipc, "frames"), at.group, at.home} {
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	r, w := io.Pipe()
	done := make(chan int, 1)
	go func() {
		done <- run(t.Context(), strings.NewReader(stdin), w, new(reap.Children), at, log.New(io.Discard, "", 0))
		_ = w.Close()
	}()
	return at, r, done
}

func put(t *testing.T, at places, name, content string) {
	t.Helper()
	beside := filepath.Join(at.ipc, "input", name+".tmp")
	if err := os.WriteFile(beside, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(beside, filepath.Join(at.ipc, "input", name)); err != nil {
		t.Fatal(err)
	}
}

func stdin(t *testing.T, in protocol.Input) string {
	t.Helper()
	in.Nonce, in.RunID, in.GroupFolder = "nonce", "run", "family"
	data, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestRU01BadStdin(t *testing.T) {
	for _, text := range []string{"", "{", "[]", "hello"} {
		_, stdout, code := start(t, text)
		var frames []protocol.Frame
		for f, err := range (protocol.Stream{}).Frames(stdout) {
			if err != nil {
				t.Fatal(err)
			}
			frames = append(frames, f)
		}
		if got := <-code; got != 1 {
			t.Errorf("%q: exit %d, want 1", text, got)
		}
		if len(frames) != 1 || frames[0].Status != protocol.StatusError || frames[0].ErrorClass != protocol.ClassInput ||
			!strings.HasPrefix(frames[0].Error, "Failed to parse input: ") || frames[0].Nonce != "" {
			t.Errorf("%q: frames %+v", text, frames)
		}
	}
}

func TestUnknownEngine(t *testing.T) {
	_, stdout, code := start(t, stdin(t, protocol.Input{Engine: "gpt"}))
	for f, err := range (protocol.Stream{Nonce: "nonce"}).Frames(stdout) {
		if err != nil || f.ErrorClass != protocol.ClassInput || f.Error != `unknown engine "gpt": this image has acp, builtin, claude, claude-acp, codex, gemini, model, opencode, probe` {
			t.Errorf("%+v, %v", f, err)
		}
	}
	if got := <-code; got != 1 {
		t.Errorf("exit %d, want 1", got)
	}
}

// TestConversation is a run with the real watch, files and built-in engine.
func TestConversation(t *testing.T) {
	at, stdout, code := start(t, stdin(t, protocol.Input{Prompt: "run echo hi > f", Batch: []string{"b1"}}))
	var results []string
	for f, err := range (protocol.Stream{Nonce: "nonce"}).Frames(stdout) {
		if err != nil {
			t.Fatal(err)
		}
		if f.Result != nil {
			results = append(results, string(*f.Result))
		}
		if f.State != protocol.StateIdle {
			continue
		}
		switch len(results) {
		case 1:
			put(t, at, protocol.InputName(1), `{"type":"message","text":"run cat f","id":"m1"}`)
		case 2:
			put(t, at, protocol.CloseFile, "")
		}
	}
	if got := <-code; got != 0 {
		t.Errorf("exit %d, want 0", got)
	}
	if len(results) != 2 || !strings.Contains(results[1], "hi\n") {
		t.Errorf("results %q", results)
	}
	kept, err := os.ReadDir(filepath.Join(at.ipc, "frames"))
	if err != nil || len(kept) != 2 {
		t.Errorf("%d frames kept, %v", len(kept), err)
	}
}

// process is the runner as a process. It finds none of its mounted folders.
type process struct {
	*testing.T
	cmd    *exec.Cmd
	stdout *os.File
	lines  *bufio.Reader
	stderr bytes.Buffer
}

func newProcess(t *testing.T, script string) *process {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &process{T: t, cmd: exec.CommandContext(ctx, os.Args[0])}
	t.Cleanup(cancel)
	p.cmd.Env = append(os.Environ(), "BERTH_TEST_RUNNER=1", "GORACE=atexit_sleep_ms=0")
	p.cmd.Stdin = strings.NewReader(stdin(t, protocol.Input{Engine: "probe", Prompt: script, SessionID: "s1"}))
	p.cmd.Stderr = &p.stderr
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout, p.stdout, p.lines = w, r, bufio.NewReader(r)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	return p
}

// until reads stdout up to a line that holds text.
func (p *process) until(text string) {
	p.Helper()
	for {
		line, err := p.lines.ReadString('\n')
		if strings.Contains(line, text) {
			return
		}
		if err != nil {
			p.Fatalf("stdout ended before %q: %v\n%s", text, err, &p.stderr)
		}
	}
}

func (p *process) exits(want int) {
	p.Helper()
	_ = p.cmd.Wait()
	if got := p.cmd.ProcessState; got.ExitCode() != want {
		p.Errorf("%v, want exit status %d\n%s", got, want, &p.stderr)
	}
}

func TestSignals(t *testing.T) {
	for _, tt := range []struct {
		name, script, ready string
		signal              unix.Signal
		code                int
	}{
		{"idle", "say hi", `"idle"`, unix.SIGTERM, 143},
		{"turn", "say hi\nsleep 1h", `"hi"`, unix.SIGTERM, 143},
		{"interrupt", "say hi\nsleep 1h", `"hi"`, unix.SIGINT, 130},
		{"turn that hangs", "say hi\nhang", `"hi"`, unix.SIGTERM, 143},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := newProcess(t, tt.script)
			p.until(tt.ready)
			if err := p.cmd.Process.Signal(tt.signal); err != nil {
				t.Fatal(err)
			}
			p.exits(tt.code)
		})
	}
}

func TestIgnoredTerm(t *testing.T) {
	p := newProcess(t, "ignore-term\nsay deaf\nsleep 100ms\nexit 7")
	p.until(`"deaf"`)
	if err := p.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.exits(7)
}

func TestProbeExit(t *testing.T) {
	p := newProcess(t, "say last\nexit 9")
	p.until(`"last"`)
	p.exits(9)
}

// The flood does not fit the pipe, so that it is under way when the pipe breaks.
func TestClosedStdoutIsNoDeath(t *testing.T) {
	p := newProcess(t, "say first\nflood 1000000\nsay second\nstderr alive\nexit 5")
	p.until(`"first"`)
	_ = p.stdout.Close()
	p.exits(5)
	if log := p.stderr.String(); !strings.Contains(log, "alive") || strings.Count(log, "broken pipe") != 1 {
		t.Errorf("log:\n%s", log)
	}
}

// Engines look for the memory file under two names; what a group has made of the
// second one stays.
func TestMemoryFileHasTwoNames(t *testing.T) {
	var stderr bytes.Buffer
	logger := log.New(&stderr, "", 0)
	dir := t.TempDir()
	file, link := filepath.Join(dir, "AGENTS.md"), filepath.Join(dir, "CLAUDE.md")
	shareMemory(dir, logger)
	if _, err := os.Lstat(link); err == nil {
		t.Error("a link to nothing")
	}
	if err := os.WriteFile(file, []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	shareMemory(dir, logger)
	if text, err := os.ReadFile(link); err != nil || string(text) != "one" {
		t.Errorf("%q, %v", text, err)
	}
	if to, err := os.Readlink(link); err != nil || to != "AGENTS.md" {
		t.Errorf("it leads to %q, %v", to, err)
	}
	shareMemory(dir, logger)
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(link, []byte("own"), 0o600); err != nil {
		t.Fatal(err)
	}
	shareMemory(dir, logger)
	if text, err := os.ReadFile(link); err != nil || string(text) != "own" || stderr.Len() > 0 {
		t.Errorf("%q, %v, logged %q", text, err, &stderr)
	}
}
