package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"go.uber.org/zap/zaptest"
	"golang.org/x/time/rate"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/turn"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestRender(t *testing.T) {
	spec := turn.Spec{
		RunID: "0011aabb", Folder: "family", Kind: berth.KindChat, Image: "berth-agent:0123456789ab",
		Mounts: []berth.Mount{
			{Source: "/srv/berth/groups/family", Target: "/workspace/group"},
			{Source: "/srv/berth/data/ipc/family", Target: "/workspace/ipc", ReadOnly: true},
			{Source: "/srv/berth/data/ipc/family/input", Target: "/workspace/ipc/input"},
			{Source: "/srv/with:colon, and comma", Target: "/workspace/extra/odd", ReadOnly: true},
		},
		UID: 1000, GID: 1000, TZ: "Europe/Berlin",
		Memory: 1 << 30, CPUs: 1.5, Pids: 256, Network: "none",
	}
	foreign := spec
	foreign.Image, foreign.Runner = "debian:stable", "/srv/berth/agent-runner"
	foreign.Network, foreign.Runtime, foreign.TZ = "", "runsc", ""
	for file, spec := range map[string]turn.Spec{"container.json": spec, "container-foreign.json": foreign} {
		got, err := json.MarshalIndent(render(spec, "inst01", "1-3"), "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, '\n')
		file = filepath.Join("testdata", file)
		if *update {
			if err := os.WriteFile(file, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", file, diff)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, opts := range []Options{
		{},
		{Install: "a b"},
		{Install: "a", Host: "ssh://host"},
		{Install: "a", Host: "/var/run/docker.sock"},
		{Install: "a", Host: "tcp://host:2376", TLSDir: filepath.Join(t.TempDir(), "missing")},
	} {
		_, err := New(opts)
		if got := kind(err); err == nil || got != berth.Invalid {
			t.Errorf("New(%+v): %v, want an invalid error", opts, err)
		}
	}
}

// An engine that is not there is an error of its own kind from every call, says
// where it was sought, and does not prevent New.
func TestUnreachable(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "docker.sock")
	e, err := New(Options{Install: "test", Host: "unix://" + socket, Log: zaptest.NewLogger(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	created := func(string) error { t.Error("created was called"); return nil }
	_, start := e.Start(t.Context(), turn.Spec{RunID: "r", Folder: "f"}, nil, created)
	_, attach := e.Attach(t.Context(), "r")
	_, ping := e.Ping(t.Context())
	_, list := e.Containers(t.Context())
	_, present := e.ImagePresent(t.Context(), "image")
	remove := e.RemoveContainer(t.Context(), "id")
	for i, err := range []error{start, attach, ping, list, present, remove} {
		if kind(err) != berth.Unavailable || !strings.Contains(err.Error(), socket) {
			t.Errorf("call %d: %v, want an unavailable error that names the socket", i, err)
		}
	}

	ctx, cancel := context.WithCancel(t.Context())
	err = e.Watch(ctx, func(up bool, err error) {
		if up || kind(err) != berth.Unavailable {
			t.Errorf("Watch reported %v, %v", up, err)
		}
		cancel()
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Watch returned %v", err)
	}
}

func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b backoff
		var got []time.Duration
		for range 8 {
			start := time.Now()
			if err := b.sleep(t.Context()); err != nil {
				t.Fatal(err)
			}
			got = append(got, time.Since(start))
		}
		ms := time.Millisecond
		want := []time.Duration{100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 5000 * ms, 5000 * ms}
		if !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		time.Sleep(2 * time.Minute)
		start := time.Now()
		_ = b.sleep(t.Context())
		if got := time.Since(start); got != retryMin {
			t.Errorf("after a quiet time: got %v, want %v", got, retryMin)
		}
	})
}

func TestImageIsDeterministic(t *testing.T) {
	files := ImageFiles{Runner: buildHelper(t), Busybox: FindBusybox()}
	pack := func() (string, []byte) {
		c, err := readContent(files)
		if err != nil {
			t.Fatal(err)
		}
		img, err := c.image(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		tag, err := name.NewTag(c.ref())
		if err != nil {
			t.Fatal(err)
		}
		var buf strings.Builder
		if err := tarball.Write(tag, img, &buf); err != nil {
			t.Fatal(err)
		}
		return c.ref(), []byte(buf.String())
	}
	ref1, tar1 := pack()
	ref2, tar2 := pack()
	if ref1 != ref2 || !slices.Equal(tar1, tar2) {
		t.Errorf("two images of the same files differ: %s and %s", ref1, ref2)
	}

	e, err := New(Options{Install: "test"})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if ref, err := e.ImageRef(files); err != nil || ref != ref1 {
		t.Errorf("ImageRef: %s, %v, want %s", ref, err, ref1)
	}
	if files.Busybox == "" {
		return
	}
	files.Busybox = ""
	if ref, err := e.ImageRef(files); err != nil || ref == ref1 {
		t.Errorf("without busybox: %s, %v, want another reference", ref, err)
	}
}

func TestApplets(t *testing.T) {
	busybox := filepath.Join(t.TempDir(), "busybox")
	list := "bin/sh\nusr/bin/env\nbin/busybox\n../evil\n/etc/passwd\nusr/bin/env\nbin/../../x\nlinuxrc\nsbin/ip\n"
	if err := os.WriteFile(busybox, []byte("#!/bin/sh\ncat <<X\n"+list+"X\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	links, err := applets(t.Context(), busybox)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range links {
		got = append(got, l.path)
	}
	if want := []string{"bin/sh", "sbin/ip", "usr/bin/env"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestCheckStatic(t *testing.T) {
	helper, err := os.ReadFile(buildHelper(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := checkStatic(bytes.NewReader(helper)); err != nil {
		t.Errorf("static program: %v", err)
	}
	foreign := slices.Clone(helper)
	foreign[18], foreign[19] = 0xf3, 0x07 // e_machine: no machine that Go runs on
	if err := checkStatic(bytes.NewReader(foreign)); err == nil {
		t.Error("a program for another machine passes")
	}
	if err := checkStatic(strings.NewReader("#!/bin/sh\n")); err == nil {
		t.Error("a script passes")
	}
	file := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := readContent(ImageFiles{Runner: file}); kind(err) != berth.Invalid {
		t.Errorf("a script as runner: %v, want an invalid error", err)
	}
	// The shell of a normal system is linked dynamically; where it is not,
	// there is nothing to test.
	shell, err := os.ReadFile("/bin/sh")
	if err == nil && strings.Contains(string(shell[:min(4096, len(shell))]), "ld-linux") && checkStatic(bytes.NewReader(shell)) == nil {
		t.Error("a dynamic program passes")
	}
}

func kind(err error) berth.Kind {
	if e, ok := errors.AsType[*berth.Error](err); ok {
		return e.Kind
	}
	return berth.Internal
}

// buildHelper returns the path of the program that plays the runner.
func buildHelper(t testing.TB) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "helper")
	if err := compileHelper(out); err != nil {
		t.Fatal(err)
	}
	return out
}

func compileHelper(out string) error {
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "./testdata/helper")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		return errors.New(string(text))
	}
	return nil
}

func TestCPUShare(t *testing.T) {
	for _, tt := range []struct {
		cpus          float64
		period, quota int64
	}{
		{0, 0, 0}, {1, 10_000, 10_000}, {1.5, 10_000, 15_000}, {0.5, 10_000, 5_000}, {64, 10_000, 640_000},
		{0.1, 10_000, 1_000}, {0.03, 33_334, 1_000}, {0.01, 100_000, 1_000}, {0.0001, 1_000_000, 1_000},
	} {
		if period, quota := cpuShare(tt.cpus); period != tt.period || quota != tt.quota {
			t.Errorf("%v processors: %d of %d µs, want %d of %d", tt.cpus, quota, period, tt.quota, tt.period)
		}
	}
}

// A container that prints without end costs so much a second and no more.
func TestPaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		endless := paced{zeros{}, t.Context(), rate.NewLimiter(outputRate, outputBurst)}
		read := func(n int64) time.Duration {
			begun := time.Now()
			if _, err := io.CopyN(io.Discard, endless, n); err != nil {
				t.Fatal(err)
			}
			return time.Since(begun)
		}
		if took := read(outputBurst); took > 0 {
			t.Errorf("the burst took %v", took)
		}
		if took := read(10 * outputRate); took < 9*time.Second || took > 11*time.Second {
			t.Errorf("ten seconds' worth took %v", took)
		}
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
