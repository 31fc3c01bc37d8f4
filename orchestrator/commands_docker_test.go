//go:build docker

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

// order writes a command into a group's chat and returns what Berth says to it.
func (h *host) order(group, text string) string {
	h.t.Helper()
	a, err := h.client.Send(h.t.Context(), web.NewMessage{Group: group, Text: text, ID: newMessageID()})
	if err != nil || !a.Command {
		h.t.Fatalf("%s: %+v, %v", text, a, err)
	}
	return strings.Join(a.Texts, "\n")
}

// processes returns how many processes a container has.
func processes(t *testing.T, container string) int {
	t.Helper()
	out, err := exec.Command("docker", "top", container, "-o", "pid").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(out), "\n") - 1
}

// /stop ends a tool that would run for ever, within five seconds; the next
// message goes on in the same session and the same container. /new begins a new
// one.
func TestStopAndNew(t *testing.T) {
	h := newHost(t, "")
	mustBerth(t, h.root, "groups", "add", "family", "--no-trigger", "--engine", "builtin")
	h.ready()
	must := func(text, want string) web.Run {
		t.Helper()
		a, err := h.ask("family", text)
		if got := strings.Join(a.Texts, "\n"); err != nil || !strings.Contains(got, want) {
			t.Fatalf("%q: %q, %v; want %q in it", text, got, err, want)
		}
		return runOf(h.status(), "family")
	}
	if got := h.order("family", "/stop"); got != "Nothing is running." {
		t.Errorf("told %q", got)
	}
	first := must("my name is Ann", "turn 1")
	// Nobody ever writes into it.
	folder := filepath.Join(h.root, "groups", "family")
	if err := unix.Mkfifo(filepath.Join(folder, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(folder, "fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	seq, err := h.send("family", "run echo begun > begun; cat fifo")
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		_, err := os.Stat(filepath.Join(folder, "begun"))
		return err == nil
	})
	if n := processes(t, first.Container); n < 2 {
		t.Errorf("%d processes while the tool runs", n)
	}
	begun := time.Now()
	if got := h.order("family", "/stop"); got != "Stopped. The conversation is kept." {
		t.Errorf("told %q", got)
	}
	if _, err := h.run("family", "idle"); err != nil {
		t.Fatal(err)
	}
	took := time.Since(begun)
	if n := processes(t, first.Container); n != 1 || took > 5*time.Second {
		t.Errorf("%d processes %v after /stop", n, took)
	}
	t.Logf("stopped after %v", took)
	if a, err := h.answer(seq); err != nil || len(a.Texts) > 0 {
		t.Errorf("the stopped message: %+v, %v", a, err)
	}
	again := must("history", "my name is Ann")
	if again.ID != first.ID || again.Container != first.Container {
		t.Errorf("the next message went to run %s, after %s", again.ID, first.ID)
	}
	if err := h.once("family", "turn 1]", "Stopped. The conversation is kept.", "turn 3]"); err != nil {
		t.Error(err)
	}

	if got := h.order("family", "/new"); got != "Started a new conversation session." {
		t.Errorf("told %q", got)
	}
	if last := must("history", "This is the first turn of this session."); last.ID == first.ID {
		t.Error("it is still the first run")
	}
	if got := h.order("family", "/status"); !strings.HasPrefix(got, "Idle") && !strings.HasPrefix(got, "Busy") {
		t.Errorf("status: %q", got)
	}
	if out := mustBerth(t, h.root, "send", "-g", "family", "--wait", "/help"); !strings.Contains(out, "/stop - ") {
		t.Errorf("help: %q", out)
	}
	h.finish()
}

// An engine that does not hear of it goes with its container; nothing is said
// twice, and the next message is answered.
func TestStopOfADeafEngine(t *testing.T) {
	h := newHost(t, "", "p")
	h.ready()
	if _, err := h.ask("p", "say one"); err != nil {
		t.Fatal(err)
	}
	seq, err := h.send("p", "say two\nhang")
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		texts, err := h.said("p")
		return err == nil && slices.Contains(texts, "two")
	})
	begun := time.Now()
	h.order("p", "/stop")
	if err := h.until("gone", func(s web.Status) bool { return runOf(s, "p").ID == "" }); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("gone after %v", took)
	}
	if a, err := h.answer(seq); err != nil || a.State != berth.FateDone {
		t.Errorf("the stopped message: %+v, %v", a, err)
	}
	if a, err := h.ask("p", "say three"); err != nil || a.Texts[0] != "three" {
		t.Errorf("%+v, %v", a, err)
	}
	if err := h.once("p", "one", "two", "Stopped.", "three"); err != nil {
		t.Error(err)
	}
	h.finish()
}

// The daemon that takes a busy run over can stop its turn as well.
func TestStopOfAnAdoptedRun(t *testing.T) {
	h := newHost(t, "", "p")
	h.ready()
	seq, err := h.send("p", "sleep 600\nsay much later")
	if err != nil {
		t.Fatal(err)
	}
	first, err := h.run("p", "busy")
	if err != nil {
		t.Fatal(err)
	}
	_ = h.end(syscall.SIGKILL)
	h.ready()
	begun := time.Now()
	if got := h.order("p", "/stop"); got != "Stopped. The conversation is kept." {
		t.Errorf("told %q", got)
	}
	last, err := h.run("p", "idle")
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took > 5*time.Second || last.Container != first.Container {
		t.Errorf("stopped after %v, in %s and then %s", took, first.Container, last.Container)
	}
	if a, err := h.answer(seq); err != nil || len(a.Texts) > 0 {
		t.Errorf("the stopped message: %+v, %v", a, err)
	}
	if a, err := h.ask("p", "say on"); err != nil || a.Texts[0] != "on" {
		t.Errorf("%+v, %v", a, err)
	}
	h.finish()
}
