//go:build docker

package docker

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/client"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/turn"
)

// testImage is the image that BuildImage made of the helper.
var testImage string

var dockerHost = cmp.Or(os.Getenv("DOCKER_HOST"), DefaultHost)

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "berth-docker-test")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		helper := filepath.Join(dir, "helper")
		if err := compileHelper(helper); err != nil {
			panic(err)
		}
		e, err := New(Options{Install: "test-" + berth.NewID(6), Host: dockerHost})
		if err != nil {
			panic(err)
		}
		defer e.Close()
		testImage, _, err = e.BuildImage(context.Background(), ImageFiles{Runner: helper}, nil)
		if err != nil {
			fmt.Fprintln(os.Stderr, "these tests need a Docker engine:", err)
			return 1
		}
		defer func() {
			if err := e.ReleaseImage(context.Background()); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}()
		return m.Run()
	}())
}

// newEngine returns an engine with an install id of its own, whose containers go
// when the test ends.
func newEngine(t testing.TB, host string) *Engine {
	t.Helper()
	e, err := New(Options{Install: "test-" + berth.NewID(6), Host: host, Log: logger(t), stopGrace: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		left, err := e.Containers(ctx)
		if err != nil {
			t.Error(err)
		}
		for _, c := range left {
			if err := e.remove(ctx, c.ID); err != nil {
				t.Error(err)
			}
		}
	})
	return e
}

func logger(t testing.TB) *zap.Logger { return zaptest.NewLogger(t) }

func bare(t testing.TB) *client.Client {
	t.Helper()
	c, err := client.NewClientWithOpts(client.WithHost(dockerHost), client.WithAPIVersionNegotiation())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func testSpec() turn.Spec {
	return turn.Spec{
		RunID: berth.NewID(8), Folder: "family", Kind: berth.KindChat, Image: testImage,
		UID: 1000, GID: 1000, TZ: "Europe/Berlin", Memory: 64 << 20, CPUs: 1, Pids: 64, Network: "none",
	}
}

func anyID(string) error { return nil }

func start(t testing.TB, e *Engine, stdin string) *box {
	t.Helper()
	return startSpec(t, e, testSpec(), stdin)
}

func startSpec(t testing.TB, e *Engine, spec turn.Spec, stdin string) *box {
	t.Helper()
	b, err := e.Start(t.Context(), spec, []byte(stdin), anyID)
	if err != nil {
		t.Fatal(err)
	}
	return b.(*box)
}

// drain reads both streams to their end, as a turn does.
func drain(t testing.TB, b *box) (stdout, stderr string) {
	t.Helper()
	var out, errs []byte
	var oerr, eerr error
	var wg sync.WaitGroup
	wg.Go(func() { out, oerr = io.ReadAll(b.Stdout()) })
	wg.Go(func() { errs, eerr = io.ReadAll(b.Stderr()) })
	wg.Wait()
	if err := errors.Join(oerr, eerr); err != nil {
		t.Fatal(err)
	}
	return string(out), string(errs)
}

// lines reads stdout line by line, and drops stderr.
func lines(t testing.TB, b *box) func() string {
	t.Helper()
	var wg sync.WaitGroup
	t.Cleanup(func() { _ = b.Close(); wg.Wait() })
	wg.Go(func() { _, _ = io.Copy(io.Discard, b.Stderr()) })
	r := bufio.NewReader(b.Stdout())
	return func() string {
		t.Helper()
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatalf("read a line of stdout: %v", err)
		}
		return strings.TrimSpace(line)
	}
}

func wait(t testing.TB, b *box) turn.Exit {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	exit, err := b.Wait(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return exit
}

func TestStdinAndStreams(t *testing.T) {
	e := newEngine(t, dockerHost)
	text := strings.Repeat("all work and no play\n", 50_000) // 1 MB, far over any pipe's buffer
	b := start(t, e, "echo "+text)
	stdout, stderr := drain(t, b)
	if stdout != text {
		t.Errorf("stdout has %d bytes, want %d", len(stdout), len(text))
	}
	if want := fmt.Sprintf("%d bytes", len(text)); stderr != want {
		t.Errorf("stderr: got %q, want %q", stderr, want)
	}
	if got, want := wait(t, b), (turn.Exit{}); got != want {
		t.Errorf("exit: got %+v, want %+v", got, want)
	}
}

func TestExitCodeAndLateWait(t *testing.T) {
	e := newEngine(t, dockerHost)
	b := start(t, e, "exit 42")
	drain(t, b)
	for range 3 {
		if got, want := wait(t, b), (turn.Exit{Code: 42}); got != want {
			t.Errorf("exit: got %+v, want %+v", got, want)
		}
	}
	if err := b.Stop(t.Context()); err != nil {
		t.Errorf("Stop after the exit: %v", err)
	}
	if err := b.Reattach(t.Context()); kind(err) != berth.NotFound {
		t.Errorf("Reattach after the exit: %v, want not found", err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := b.Remove(t.Context()); err != nil {
				t.Errorf("concurrent Remove: %v", err)
			}
		})
	}
	wg.Wait()
	if got := wait(t, b); got.Code != 42 {
		t.Errorf("exit after the removal: got %+v", got)
	}
}

// With "auto", containers leave the first processor alone. An engine that may not use
// those processors gets a container without the wish.
func TestCPUSet(t *testing.T) {
	inspect := bare(t)
	spec := testSpec()
	of := func(e *Engine) string {
		t.Helper()
		spec.RunID = berth.NewID(8)
		b := startSpec(t, e, spec, "exit 0\n")
		wait(t, b)
		ins, err := inspect.ContainerInspect(t.Context(), b.ID())
		if err != nil {
			t.Fatal(err)
		}
		return ins.HostConfig.CpusetCpus
	}
	e := newEngine(t, dockerHost)
	if got := of(e); got != "" {
		t.Errorf("without a setting: processors %q", got)
	}
	info, err := inspect.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := ""
	if info.NCPU > 1 {
		want = fmt.Sprintf("1-%d", info.NCPU-1)
	}
	e.opts.CPUSet = AutoCPUSet
	if got := of(e); got != want {
		t.Errorf("auto, of %d: processors %q, want %q", info.NCPU, got, want)
	}
	spec.CPUs = float64(info.NCPU) // it is to have them all
	if got := of(e); got != "" {
		t.Errorf("of %d all: processors %q", info.NCPU, got)
	}
	spec.CPUs = 1
	e.cpus.Store(4000)
	for range 2 {
		if got := of(e); got != "" {
			t.Errorf("processors that are not there: %q", got)
		}
	}
}

func TestStop(t *testing.T) {
	e := newEngine(t, dockerHost)
	b := start(t, e, "ignore")
	line := lines(t, b)
	line()
	for range 2 { // the second order is harmless
		if err := b.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := line(); got != "ignored" {
		t.Errorf("got %q", got)
	}
	select {
	case <-b.exited:
		t.Error("Stop waited for the end, or killed at once")
	default:
	}
	if got := wait(t, b); got.Code != 137 || got.OutOfMemory {
		t.Errorf("a container that ignores SIGTERM: %+v, want 137", got)
	}

	b = start(t, e, "serve")
	lines(t, b)()
	if err := b.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := wait(t, b); got.Code != 7 {
		t.Errorf("a container that obeys SIGTERM: %+v, want 7", got)
	}
}

func TestOutOfMemory(t *testing.T) {
	e := newEngine(t, dockerHost)
	spec := testSpec()
	spec.Memory = 32 << 20
	b := startSpec(t, e, spec, "oom")
	drain(t, b)
	if got := wait(t, b); got.Code == 0 || !got.OutOfMemory {
		t.Errorf("got %+v, want an out-of-memory kill", got)
	}
}

func TestAttach(t *testing.T) {
	first := newEngine(t, dockerHost)
	b := start(t, first, "serve")
	lines(t, b)()

	// The host dies, and the next one adopts.
	second, err := New(Options{Install: first.opts.Install, Host: dockerHost, Log: logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	found, err := second.Attach(t.Context(), b.run)
	if err != nil {
		t.Fatal(err)
	}
	adopted := found.(*box)
	if adopted.ID() != b.ID() {
		t.Errorf("adopted %s, want %s", adopted.ID(), b.ID())
	}
	line := lines(t, adopted)
	if err := bare(t).ContainerKill(t.Context(), b.ID(), "USR1"); err != nil {
		t.Fatal(err)
	}
	if got := line(); got != "usr1" {
		t.Errorf("got %q", got)
	}
	if err := adopted.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := wait(t, adopted); got.Code != 7 {
		t.Errorf("exit: %+v", got)
	}
	for _, run := range []string{b.run, "unknown"} {
		if _, err := second.Attach(t.Context(), run); kind(err) != berth.NotFound {
			t.Errorf("Attach to run %s, which does not run: %v, want not found", run, err)
		}
	}
}

func TestClose(t *testing.T) {
	e := newEngine(t, dockerHost)
	b := start(t, e, "serve")
	_ = b.Close()
	_ = b.Close()
	if out, errs := drain(t, b); errs != "" {
		t.Errorf("streams after Close: %q %q", out, errs)
	}
	list, err := e.Containers(t.Context())
	if err != nil || len(list) != 1 || !list[0].Running {
		t.Fatalf("the container does not run on: %+v, %v", list, err)
	}
	if err := b.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := wait(t, b).Code; got != 137 && got != unknownExit {
		t.Errorf("exit code of a removed container: %d", got)
	}
}

func TestRemovedBehindOurBack(t *testing.T) {
	e := newEngine(t, dockerHost)
	b := start(t, e, "serve")
	lines(t, b)()
	if err := bare(t).ContainerRemove(t.Context(), b.ID(), container.RemoveOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	// Killed, then removed: which of the two is seen first is the engine's choice.
	if got := wait(t, b).Code; got != 137 && got != unknownExit {
		t.Errorf("got %d", got)
	}
	if err := b.Stop(t.Context()); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if err := b.Remove(t.Context()); err != nil {
		t.Errorf("Remove: %v", err)
	}
}

// W38: containers are known by label, never by name.
func TestInstallsDoNotMeet(t *testing.T) {
	ours, theirs := newEngine(t, dockerHost), newEngine(t, dockerHost)
	b := start(t, theirs, "serve")
	lines(t, b)()
	if list, err := ours.Containers(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("we see %+v, %v", list, err)
	}
	if _, err := ours.Attach(t.Context(), b.run); kind(err) != berth.NotFound {
		t.Errorf("Attach: %v, want not found", err)
	}
	if err := ours.RemoveContainer(t.Context(), b.ID()); kind(err) != berth.Denied {
		t.Errorf("RemoveContainer: %v, want denied", err)
	}
	list, err := theirs.Containers(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatalf("they see %+v, %v", list, err)
	}
	got := list[0]
	if age := time.Since(got.Created); age < -time.Minute || age > time.Hour {
		t.Errorf("created %v ago", age)
	}
	got.Created = time.Time{}
	want := Container{ID: b.ID(), Run: b.run, Folder: "family", Kind: berth.KindChat, Protocol: 1, Running: true}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if err := theirs.RemoveContainer(t.Context(), b.ID()); err != nil {
		t.Fatal(err)
	}
	if err := theirs.RemoveContainer(t.Context(), b.ID()); err != nil {
		t.Errorf("a second removal: %v", err)
	}
	if list, err := theirs.Containers(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("after the removal: %+v, %v", list, err)
	}
}

func TestFailedStartLeavesNothing(t *testing.T) {
	e := newEngine(t, dockerHost)
	refusal := errors.New("refused")
	cancelled, cancel := context.WithCancel(t.Context())
	for _, test := range []struct {
		name    string
		ctx     context.Context
		change  func(*turn.Spec)
		created func(string) error
		check   func(error) bool
	}{
		{name: "image", change: func(s *turn.Spec) { s.Image = "berth-agent:none" },
			check: func(err error) bool {
				return kind(err) == berth.NotFound && strings.Contains(err.Error(), "berth-agent:none")
			}},
		{name: "mount", change: func(s *turn.Spec) {
			s.Mounts = []berth.Mount{{Source: filepath.Join(t.TempDir(), "missing"), Target: "/workspace/group"}}
		}, check: func(err error) bool { return kind(err) == berth.Invalid }},
		{name: "runtime", change: func(s *turn.Spec) { s.Runtime = "no-such-runtime" },
			check: func(err error) bool { return kind(err) == berth.Invalid }},
		{name: "network", change: func(s *turn.Spec) { s.Network = "no-such-network" },
			check: func(err error) bool { return kind(err) == berth.Invalid }},
		{name: "runner", change: func(s *turn.Spec) { s.Image, s.Runner = foreign(t, e, ""), "/etc/passwd" }, // cannot be executed
			check: func(err error) bool { return err != nil }},
		{name: "refused", created: func(string) error { return refusal },
			check: func(err error) bool { return errors.Is(err, refusal) }},
		{name: "cancelled", ctx: cancelled, created: func(string) error { cancel(); return nil },
			check: func(err error) bool { return errors.Is(err, context.Canceled) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			spec, ctx, created := testSpec(), test.ctx, test.created
			if test.change != nil {
				test.change(&spec)
			}
			if ctx == nil {
				ctx = t.Context()
			}
			if created == nil {
				created = anyID
			}
			if _, err := e.Start(ctx, spec, nil, created); !test.check(err) {
				t.Errorf("got %v", err)
			}
			if list, err := e.Containers(t.Context()); err != nil || len(list) != 0 {
				t.Errorf("left behind: %+v, %v", list, err)
			}
		})
	}
}

// foreign makes an image that others might have made, with the helper in it as
// another program.
func foreign(t testing.TB, e *Engine, more string) (tag string) {
	t.Helper()
	tag = "berth-test-foreign:" + berth.NewID(4)
	dockerfile := "FROM scratch\nCOPY agent-runner /other\nENTRYPOINT [\"/other\"]\n" + more
	if err := e.BuildFromDockerfile(t.Context(), []byte(dockerfile), buildHelper(t), tag, nil, nil); err != nil {
		t.Fatal(err)
	}
	c := bare(t)
	t.Cleanup(func() {
		if _, err := c.ImageRemove(context.WithoutCancel(t.Context()), tag, image.RemoveOptions{Force: true}); err != nil {
			t.Error(err)
		}
	})
	return tag
}

// A foreign image gets the runner mounted, unless it says by its marker that it
// has one of its own, which then may be an older one.
func TestRunnerIsMounted(t *testing.T) {
	e := newEngine(t, dockerHost)
	for more, want := range map[string]string{"": "BERTH", "LABEL berth.marker=NANOCLAW": "NANOCLAW"} {
		spec := testSpec()
		spec.Image, spec.Runner = foreign(t, e, more), buildHelper(t)
		if want == "NANOCLAW" {
			spec.Runner = "/etc/passwd" // cannot be executed
		}
		b := startSpec(t, e, spec, "serve")
		next := lines(t, b)
		if got := next(); got != "ready" || b.Marker() != want {
			t.Errorf("%s: got %q, marker %s", want, got, b.Marker())
		}
		again, err := e.Attach(t.Context(), spec.RunID)
		if err != nil {
			t.Fatal(err)
		}
		if got := again.(*box).Marker(); got != want && got != "" {
			t.Errorf("adopted: marker %q, want %s", got, want)
		}
		_ = again.Close()
		if err := b.Remove(t.Context()); err != nil {
			t.Error(err)
		}
	}
	spec := testSpec()
	spec.Image = foreign(t, e, `LABEL berth.marker="A B"`)
	if _, err := e.Start(t.Context(), spec, nil, anyID); kind(err) != berth.Invalid {
		t.Errorf("a marker that is none: %v", err)
	}
}

func TestHardening(t *testing.T) {
	e := newEngine(t, dockerHost)
	b := start(t, e, "look")
	stdout, stderr := drain(t, b)
	var got map[string]string
	if err := json.Unmarshal([]byte(stdout), &got); err != nil {
		t.Fatalf("%v; stdout %q, stderr %q", err, stdout, stderr)
	}
	for fact, want := range map[string]string{
		"Uid": "1000\t1000\t1000\t1000", "Gid": "1000\t1000\t1000\t1000", "Groups": "1000|",
		"CapEff": "0000000000000000", "CapPrm": "0000000000000000", "CapBnd": "0000000000000000",
		"NoNewPrivs": "1", "Seccomp": "2", "pid": "1", "interfaces": "lo", "nofile": "4096",
		"cwd": "/workspace/group", "home": "/home/agent", "tz": "Europe/Berlin",
		"write /x": "no", "write /etc/passwd": "no", "write /proc/sys/kernel/core_pattern": "no",
		"write /proc/sysrq-trigger": "no", "write /sys/x": "no",
		"write /tmp/x": "yes", "write /run/x": "yes", "run /tmp/program": "yes",
		"spy": "",
	} {
		if !slices.Contains(strings.Split(want, "|"), got[fact]) {
			t.Errorf("%s: got %q, want %q", fact, got[fact], want)
		}
	}
}

// Read-only holds also where another file system is mounted below the folder; it
// would come along writable, since read-only is a word about one mount.
func TestReadOnlyBelow(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to mount something")
	}
	folder := t.TempDir()
	disk := filepath.Join(folder, "disk")
	if err := os.Mkdir(disk, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("none", disk, "tmpfs", 0, "mode=0777"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(disk, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	e := newEngine(t, dockerHost)
	for _, readOnly := range []bool{true, false} {
		spec := testSpec()
		spec.Mounts = []berth.Mount{{Source: folder, Target: "/workspace/extra", ReadOnly: readOnly}}
		got, _ := drain(t, startSpec(t, e, spec, "write /workspace/extra/disk/x"))
		_, err := os.Stat(filepath.Join(disk, "x"))
		if written := err == nil; written == readOnly {
			t.Errorf("read-only %v: the container got %q, and the file is there: %v", readOnly, got, written)
		}
	}
}

func TestEvents(t *testing.T) {
	e := newEngine(t, dockerHost)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	opened, actions := make(chan struct{}), make(chan Event, 16)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		if err := e.Events(ctx, func() { close(opened) }, func(ev Event) { actions <- ev }); !errors.Is(err, context.Canceled) {
			t.Errorf("Events returned %v", err)
		}
	})
	<-opened
	b := start(t, e, "exit 0")
	drain(t, b)
	var got []string
	for ev := range actions {
		if ev.Run != b.run || ev.Container != b.ID() {
			t.Errorf("event of %+v", ev)
		}
		if got = append(got, ev.Action); ev.Action == "die" {
			break
		}
	}
	if !slices.Contains(got, "start") {
		t.Errorf("got %v", got)
	}
	cancel()
}

// The connection to the engine breaks while a container runs.
func TestLostConnection(t *testing.T) {
	link := newLink(t)
	e := newEngine(t, link.host())
	direct := bare(t)

	changes := make(chan bool, 16)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { _ = e.Watch(ctx, func(up bool, err error) { changes <- up }) })
	if !<-changes {
		t.Fatal("Watch: the engine is down")
	}

	survivor, victim, late := start(t, e, "serve"), start(t, e, "serve"), start(t, e, "serve")
	for _, b := range []*box{survivor, victim, late} {
		out := bufio.NewReader(b.Stdout())
		if line, err := out.ReadString('\n'); err != nil || line != "ready\n" {
			t.Fatalf("got %q, %v", line, err)
		}
	}
	link.cut()
	if <-changes {
		t.Error("Watch did not see the loss")
	}
	for _, b := range []*box{survivor, victim, late} {
		if out, errs := drain(t, b); out+errs != "" {
			t.Errorf("after the loss: %q %q", out, errs)
		}
	}
	if _, err := e.Start(t.Context(), testSpec(), nil, anyID); kind(err) != berth.Unavailable {
		t.Errorf("Start: %v, want unavailable", err)
	}
	if err := survivor.Stop(t.Context()); kind(err) != berth.Unavailable {
		t.Errorf("Stop: %v, want unavailable", err)
	}
	if err := survivor.Reattach(t.Context()); kind(err) != berth.Unavailable {
		t.Errorf("Reattach: %v, want unavailable", err)
	}
	short, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer stop()
	if err := survivor.Remove(short); kind(err) != berth.Unavailable {
		t.Errorf("Remove: %v, want unavailable", err)
	}
	select {
	case <-survivor.exited:
		t.Error("the loss was taken for an exit")
	default:
	}

	// Meanwhile one container vanishes, and another exits.
	if err := direct.ContainerRemove(t.Context(), victim.ID(), container.RemoveOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	if err := direct.ContainerStop(t.Context(), late.ID(), container.StopOptions{}); err != nil {
		t.Fatal(err)
	}
	link.restore()
	if !<-changes {
		t.Error("Watch did not see the return")
	}
	if got, want := wait(t, victim), (turn.Exit{Code: unknownExit}); got != want {
		t.Errorf("vanished: got %+v, want %+v", got, want)
	}
	if got, want := wait(t, late), (turn.Exit{Code: 7}); got != want {
		t.Errorf("exited unseen: got %+v, want %+v", got, want)
	}
	if err := survivor.Reattach(t.Context()); err != nil {
		t.Fatal(err)
	}
	line := lines(t, survivor)
	if err := direct.ContainerKill(t.Context(), survivor.ID(), "USR1"); err != nil {
		t.Fatal(err)
	}
	if got := line(); got != "usr1" {
		t.Errorf("got %q", got)
	}
	if err := survivor.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := wait(t, survivor), (turn.Exit{Code: 7}); got != want {
		t.Errorf("survivor: got %+v, want %+v", got, want)
	}
}

// The engine itself dies and comes back.
func TestLostEngine(t *testing.T) {
	dockerd, err := exec.LookPath("dockerd")
	if err != nil || os.Getuid() != 0 {
		t.Skip("needs dockerd and root, to start an engine of its own")
	}
	// A short path: a unix socket's name has at most 107 bytes.
	dir, err := os.MkdirTemp("", "be")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	host := "unix://" + filepath.Join(dir, "d.sock")
	e, err := New(Options{Install: "test-" + berth.NewID(6), Host: host, Log: logger(t), stopGrace: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	changes := make(chan bool, 16)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait(); _ = e.Close() })
	wg.Go(func() { _ = e.Watch(ctx, func(up bool, err error) { changes <- up }) })
	expect := func(up bool) {
		t.Helper()
		select {
		case got := <-changes:
			if got != up {
				t.Fatalf("Watch: got %v, want %v", got, up)
			}
		case <-time.After(time.Minute):
			text, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Fatalf("Watch said nothing; the engine's log: %s", text[max(0, len(text)-4000):])
		}
	}
	launch := func() *exec.Cmd {
		log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer log.Close()
		cmd := exec.Command(dockerd, "-H", host, "--data-root", filepath.Join(dir, "data"), "--exec-root", filepath.Join(dir, "exec"),
			"--pidfile", filepath.Join(dir, "pid"), "--config-file", filepath.Join(dir, "none.json"), "--bridge=none", "--iptables=false", "--ip6tables=false")
		cmd.Stdout, cmd.Stderr = log, log
		// A network of its own: without a bridge it would take away that of the host's.
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	if err := os.WriteFile(filepath.Join(dir, "none.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	expect(false)
	cmd := launch()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	expect(true)
	ref, built, err := e.BuildImage(t.Context(), ImageFiles{Runner: buildHelper(t)}, nil)
	if err != nil || !built {
		t.Fatal(built, err)
	}
	spec := testSpec()
	spec.Image = ref
	b := startSpec(t, e, spec, "serve")
	line := bufio.NewReader(b.Stdout())
	if _, err := line.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	// Without live-restore an engine that goes down ends its containers first.
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	expect(false)
	drain(t, b)
	cmd = launch()
	expect(true)
	if got, want := wait(t, b), (turn.Exit{Code: 7}); got != want {
		t.Errorf("exit: got %+v, want %+v", got, want)
	}
	if err := b.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	b = startSpec(t, e, spec, "exit 3")
	drain(t, b)
	if got := wait(t, b); got.Code != 3 {
		t.Errorf("after the return: %+v", got)
	}
	if err := b.Remove(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestPing(t *testing.T) {
	info, err := newEngine(t, dockerHost).Ping(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if info.Version == "" || info.API == "" || info.OS != "linux" || info.Arch == "" || info.CgroupVersion == "" ||
		info.StorageDriver == "" || !slices.Contains(info.Runtimes, info.DefaultRuntime) || info.CPUs == 0 || info.Memory == 0 {
		t.Errorf("got %+v", info)
	}
	t.Logf("%+v", info)
}

func TestBuildImage(t *testing.T) {
	e, other := newEngine(t, dockerHost), newEngine(t, dockerHost)
	t.Cleanup(func() {
		for _, e := range []*Engine{e, other} {
			if err := e.ReleaseImage(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		}
	})
	runner := buildHelper(t)
	program, err := os.ReadFile(runner)
	if err != nil {
		t.Fatal(err)
	}
	version := func() ImageFiles { // a runner that no other test has
		program := append(slices.Clone(program), berth.NewID(8)...)
		file := filepath.Join(t.TempDir(), "runner")
		if err := os.WriteFile(file, program, 0o755); err != nil {
			t.Fatal(err)
		}
		return ImageFiles{Runner: file, Busybox: FindBusybox()}
	}
	build := func(e *Engine, files ImageFiles, wantBuilt bool) string {
		t.Helper()
		var steps []string
		ref, built, err := e.BuildImage(t.Context(), files, func(s string) { steps = append(steps, s) })
		if err != nil || built != wantBuilt || len(steps) == 0 {
			t.Fatalf("BuildImage: %s, %v, %v, %q", ref, built, err, steps)
		}
		if want, err := e.ImageRef(files); err != nil || ref != want {
			t.Errorf("ImageRef: %s, %v, want %s", want, err, ref)
		}
		return ref
	}
	present := func(ref string, want bool) {
		t.Helper()
		if got, err := e.ImagePresent(t.Context(), ref); err != nil || got != want {
			t.Errorf("image %s: present %v, %v, want %v", ref, got, err, want)
		}
	}
	v1, v2, v3 := version(), version(), version()
	ref1 := build(e, v1, true)
	build(e, v1, false)
	labels, err := e.Labels(t.Context(), ref1)
	if err != nil || !strings.HasPrefix(labels[LabelContent], strings.TrimPrefix(ref1, "berth-agent:")) || labels["berth.marker"] != "BERTH" || labels["berth.protocol"] != "1" {
		t.Errorf("labels %v, %v", labels, err)
	}

	// The other install holds the first version, also when we move on.
	build(other, v1, false)
	ref2 := build(e, v2, true)
	present(ref1, true)
	build(other, v2, false)
	present(ref1, false)

	// A container holds its image.
	spec := testSpec()
	spec.Image = ref2
	b := startSpec(t, e, spec, "serve")
	lines(t, b)()
	ref3 := build(e, v3, true)
	build(other, v3, false)
	present(ref2, true)
	present(ref3, true)
	if err := b.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	build(e, v3, false)
	present(ref2, false)

	if v1.Busybox == "" {
		return
	}
	// The image has a shell, and everything in it is where it should be.
	c := bare(t)
	made, err := c.ContainerCreate(t.Context(), &container.Config{
		Image: ref3, Entrypoint: []string{"/bin/sh", "-c", "echo $HOME $PATH; pwd; id -u; ls -ld /tmp /home/agent | cut -c1-10; awk 'BEGIN{print 6*7}'"},
		Labels: map[string]string{LabelInstall: e.opts.Install}, AttachStdout: true, AttachStderr: true, Tty: true,
	}, &container.HostConfig{NetworkMode: "none"}, nil, nil, "")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := c.ContainerAttach(t.Context(), made.ID, container.AttachOptions{Stream: true, Stdout: true, Stderr: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := c.ContainerStart(t.Context(), made.ID, container.StartOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(conn.Reader)
	if err != nil {
		t.Fatal(err)
	}
	want := "/home/agent /usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n/workspace/group\n1000\ndrwxr-xr-x\ndrwxrwxrwt\n42\n"
	if got := string(bytes.ReplaceAll(got, []byte("\r"), nil)); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// link is a way to the engine that can be cut.
type link struct {
	t      testing.TB
	socket string
	target string

	mu       sync.Mutex
	listener net.Listener
	conns    map[net.Conn]bool
	wg       sync.WaitGroup
}

func newLink(t testing.TB) *link {
	t.Helper()
	target, ok := strings.CutPrefix(dockerHost, "unix://")
	if !ok {
		t.Skip("needs an engine on a unix socket")
	}
	dir, err := os.MkdirTemp("", "bl")
	if err != nil {
		t.Fatal(err)
	}
	l := &link{t: t, socket: filepath.Join(dir, "d.sock"), target: target}
	l.restore()
	t.Cleanup(func() { l.cut(); _ = os.RemoveAll(dir) })
	return l
}

func (l *link) host() string { return "unix://" + l.socket }

func (l *link) restore() {
	l.t.Helper()
	listener, err := net.Listen("unix", l.socket)
	if err != nil {
		l.t.Fatal(err)
	}
	l.mu.Lock()
	l.listener, l.conns = listener, map[net.Conn]bool{}
	l.mu.Unlock()
	l.wg.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("unix", l.target)
			if err != nil {
				_ = near.Close()
				continue
			}
			l.mu.Lock()
			if l.listener != listener { // cut meanwhile
				_, _ = near.Close(), far.Close()
			} else {
				l.conns[near], l.conns[far] = true, true
			}
			l.mu.Unlock()
			l.wg.Go(func() { l.pipe(near, far) })
			l.wg.Go(func() { l.pipe(far, near) })
		}
	})
}

func (l *link) pipe(dst, src net.Conn) {
	_, _ = io.Copy(dst, src)
	_ = dst.(*net.UnixConn).CloseWrite()
}

func (l *link) cut() {
	l.mu.Lock()
	if l.listener != nil {
		_ = l.listener.Close()
	}
	for c := range l.conns {
		_ = c.Close()
	}
	l.listener, l.conns = nil, nil
	l.mu.Unlock()
	l.wg.Wait()
}

// W51: what started is looked at before it is told anything, and goes unheard if it
// is not what was asked for.
func TestW51StartedContainerIsLookedAt(t *testing.T) {
	e := newEngine(t, dockerHost)
	dir := t.TempDir()
	spec := testSpec()
	spec.UID, spec.GID = os.Getuid(), os.Getgid()
	spec.Mounts = []berth.Mount{{Source: dir, Target: "/workspace/group"}}
	seen := 0
	spec.Started = func(pid int) error {
		seen = pid
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err != nil {
			t.Errorf("the process is not there: %v", err)
		}
		return berth.Errorf(berth.Denied, "exchanged")
	}
	_, err := e.Start(t.Context(), spec, []byte("secret prompt"), anyID)
	if known, ok := errors.AsType[*berth.Error](err); !ok || known.Kind != berth.Denied || seen == 0 {
		t.Fatalf("got %v, after a look at process %d", err, seen)
	}
	left, err := e.Containers(t.Context())
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
	spec.RunID, spec.Started = berth.NewID(8), func(int) error { return nil }
	startSpec(t, e, spec, "{}")
}

// An image of a root file system: made once for the same content, replaced under
// its name by another, and its containers run as any other.
func TestBuildFromRootfs(t *testing.T) {
	e := newEngine(t, dockerHost)
	dir, tag := aRootfs(t), "berth-test-rootfs:"+berth.NewID(4)
	c := bare(t)
	t.Cleanup(func() {
		if _, err := c.ImageRemove(context.WithoutCancel(t.Context()), tag, image.RemoveOptions{Force: true}); err != nil {
			t.Error(err)
		}
	})
	build := func(want bool) string {
		t.Helper()
		built, err := e.BuildFromRootfs(t.Context(), dir, buildHelper(t), tag, nil)
		if err != nil || built != want {
			t.Fatalf("built %v, %v", built, err)
		}
		ins, err := c.ImageInspect(t.Context(), tag)
		if err != nil {
			t.Fatal(err)
		}
		return ins.ID
	}
	first := build(true)
	build(false)
	if err := os.WriteFile(filepath.Join(dir, "etc/new"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if second := build(true); second == first {
		t.Error("a changed folder made the same image")
	}
	if _, err := c.ImageInspect(t.Context(), first); err == nil {
		t.Error("the image that had the name before is still there")
	}
	spec := testSpec()
	spec.Image = tag
	b := startSpec(t, e, spec, "echo hello")
	if stdout, stderr := drain(t, b); stdout != "hello" {
		t.Errorf("it says %q, %q", stdout, stderr)
	}
}
