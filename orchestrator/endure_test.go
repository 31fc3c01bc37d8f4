//go:build docker

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/console"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/queue"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
)

// What happens to a daemon that runs for long: the engine, the disk, the daemon
// itself and the agents fail under it, and every message is answered once.

// host is a daemon on a root of its own that can be ended and started again. Its
// methods return errors, so that many things can be tried on one at once.
type host struct {
	t      *testing.T
	root   string
	engine string // empty: the usual one
	env    []string
	client *web.Client

	daemon *exec.Cmd
	ended  chan struct{} // closed when the daemon has ended
	exit   error         // how it ended
}

// newHost makes a root with groups that obey a probe and need no trigger. An
// empty engine is the usual one.
func newHost(t *testing.T, engine string, groups ...string) *host {
	t.Helper()
	h := &host{t: t, root: newRoot(t), engine: engine}
	if engine != "" {
		h.env = append(h.env, "DOCKER_HOST="+engine)
	}
	h.client = web.NewClient(filepath.Join(h.root, "store", "berth.sock"))
	for _, g := range groups {
		h.addGroup(g)
	}
	t.Cleanup(func() {
		if h.daemon != nil {
			_ = h.daemon.Process.Kill()
			<-h.ended
		}
		if log := h.log(); strings.Contains(log, "DATA RACE") || strings.Contains(log, "\ngoroutine ") {
			t.Error("the daemon raced or panicked")
			t.Logf("daemon:\n%s", log)
		}
	})
	return h
}

func (h *host) addGroup(folder string, flags ...string) {
	h.t.Helper()
	mustBerth(h.t, h.root, append([]string{"groups", "add", folder, "--engine", "probe", "--no-trigger"}, flags...)...)
}

// start starts the daemon; it does not wait.
func (h *host) start() {
	h.t.Helper()
	bin, err := programs()
	if err != nil {
		h.t.Fatal(err)
	}
	path := filepath.Join(h.root, "data", "logs", "berth.log")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		h.t.Fatal(err)
	}
	log, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		h.t.Fatal(err)
	}
	defer log.Close()
	h.daemon = exec.Command(filepath.Join(bin, "berth"))
	h.daemon.Args = []string{"berth", "run"} // takeDown knows it by that
	h.daemon.Env = append(append(os.Environ(), "BERTH_ROOT="+h.root, "GORACE=atexit_sleep_ms=0"), h.env...)
	h.daemon.Stderr = log
	if err := h.daemon.Start(); err != nil {
		h.t.Fatal(err)
	}
	h.ended = make(chan struct{})
	go func() {
		h.exit = h.daemon.Wait()
		close(h.ended)
	}()
}

// ready starts the daemon and waits until it is ready.
func (h *host) ready() {
	h.t.Helper()
	h.start()
	if err := h.until("ready", func(s web.Status) bool { return s.Ready }); err != nil {
		h.t.Fatal(err)
	}
}

// end ends the daemon and returns how it ended.
func (h *host) end(how os.Signal) error {
	if err := h.daemon.Process.Signal(how); err != nil {
		return fmt.Errorf("the daemon is gone: %w", err)
	}
	select {
	case <-h.ended:
		return h.exit
	case <-time.After(time.Minute):
		return errors.New("the daemon does not end")
	}
}

// finish ends the daemon as an operator does and holds that it leaves nothing.
func (h *host) finish() {
	h.t.Helper()
	for _, s := range h.status().Runs {
		_, _ = h.client.StopGroup(h.t.Context(), s.Group)
	}
	if err := h.until("without runs", func(s web.Status) bool { return len(s.Runs) == 0 }); err != nil {
		h.t.Error(err)
	}
	if err := h.end(syscall.SIGTERM); err != nil {
		h.t.Errorf("the daemon ended with %v", err)
	}
	left, err := h.containers("")
	if err != nil || len(left) > 0 {
		h.t.Errorf("containers left: %v, %v", left, err)
	}
}

func (h *host) log() string {
	data, _ := os.ReadFile(filepath.Join(h.root, "data", "logs", "berth.log"))
	return string(data)
}

func (h *host) status() web.Status {
	s, _ := h.client.Status(h.t.Context())
	return s
}

// until polls the status; what says what it waits for.
func (h *host) until(what string, ok func(web.Status) bool) error {
	var s web.Status
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if s, err = h.client.Status(h.t.Context()); err == nil && ok(s) {
			return nil
		}
		select {
		case <-h.ended:
			return fmt.Errorf("never %s: the daemon ended: %v", what, h.exit)
		default:
		}
	}
	return fmt.Errorf("never %s: %+v, %v", what, s, err)
}

// run waits until the run of a group has a state and returns it.
func (h *host) run(group, state string) (run web.Run, err error) {
	err = h.until(group+" "+state, func(s web.Status) bool {
		run = runOf(s, group)
		return string(run.State) == state
	})
	return run, err
}

func runOf(s web.Status, group string) web.Run {
	for _, r := range s.Runs {
		if r.Group == group {
			return r
		}
	}
	return web.Run{}
}

// logged waits until the daemon's log has a line with all the words.
func (h *host) logged(words ...string) error {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		for line := range strings.Lines(h.log()) {
			if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
				return nil
			}
		}
	}
	return fmt.Errorf("never logged: %q", words)
}

// containers returns the ids of the containers of a group, or of all.
func (h *host) containers(group string) (ids []string, err error) {
	e, err := docker.New(docker.Options{Install: install(h.root), Host: h.engine})
	if err != nil {
		return nil, err
	}
	defer e.Close()
	all, err := e.Containers(h.t.Context())
	for _, c := range all {
		if group == "" || c.Folder == group {
			ids = append(ids, c.ID)
		}
	}
	slices.Sort(ids)
	return ids, err
}

// send stores a message, also of a daemon that is just starting.
func (h *host) send(group, text string) (seq int64, err error) {
	m := web.NewMessage{Group: group, Text: text, ID: newMessageID()}
	err = retry(h.t.Context(), time.Minute, nil, func() error {
		a, err := h.client.Send(h.t.Context(), m)
		seq = a.Seq
		return err
	})
	return seq, err
}

// answer waits for the answer to a message.
func (h *host) answer(seq int64) (web.Answer, error) {
	a, err := h.client.Answer(h.t.Context(), seq, time.Minute)
	if err == nil && a.State != web.AnswerDone {
		err = fmt.Errorf("message #%d is not answered: %+v", seq, a)
	}
	return a, err
}

// ask sends a message and waits for its answer.
func (h *host) ask(group, text string) (web.Answer, error) {
	seq, err := h.send(group, text)
	if err != nil {
		return web.Answer{}, err
	}
	return h.answer(seq)
}

// said returns what people read in a group's chat.
func (h *host) said(group string) (texts []string, err error) {
	ctx, cancel := context.WithTimeout(h.t.Context(), time.Minute)
	defer cancel()
	for e, err := range h.client.Chat(ctx, group, 0) {
		if err != nil {
			return texts, err
		}
		if e.Type == web.EventTyping {
			break // all that was there came before
		}
		if e.Message.Bot {
			texts = append(texts, e.Message.Text)
		}
	}
	return texts, nil
}

// once holds that each word stands exactly once in what a chat was told, and in
// this order.
func (h *host) once(group string, words ...string) error {
	// What is stored may still be on its way to the chat.
	if err := h.until("all sent", func(s web.Status) bool { return s.Outbox.Pending == 0 }); err != nil {
		return err
	}
	texts, err := h.said(group)
	if err != nil {
		return err
	}
	all, last := strings.Join(texts, "\n"), -1
	for _, w := range words {
		if n := strings.Count(all, w); n != 1 {
			return fmt.Errorf("%s was told %q %d times: %q", group, w, n, texts)
		}
		at := strings.Index(all, w)
		if at < last {
			return fmt.Errorf("%s was told %q too early: %q", group, w, texts)
		}
		last = at
	}
	return nil
}

// private is an engine of the test's own.
type private struct {
	t    *testing.T
	dir  string
	host string
	args []string
	cmd  *exec.Cmd
}

func newPrivate(t *testing.T, args ...string) *private {
	t.Helper()
	if _, err := exec.LookPath("dockerd"); err != nil || os.Getuid() != 0 {
		t.Skip("needs dockerd and root, to start an engine of its own")
	}
	dir, err := os.MkdirTemp("", "be") // short: the path of a socket has at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	p := &private{t: t, dir: dir, host: "unix://" + filepath.Join(dir, "d.sock"), args: args}
	if err := os.WriteFile(filepath.Join(dir, "none.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if p.cmd == nil {
			p.start() // it alone can end what it left running
		}
		waitFor(t, func() bool {
			ids, err := p.docker("ps", "-aq").Output()
			return err == nil && (len(ids) == 0 || p.docker(append([]string{"rm", "-f"}, strings.Fields(string(ids))...)...).Run() == nil)
		})
		p.stop()
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("engine:\n%s", log[max(0, len(log)-4000):])
		}
		_ = unix.Unmount(filepath.Join(dir, "data"), unix.MNT_DETACH) // mounted on itself for live-restore
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *private) start() {
	p.t.Helper()
	log, err := os.OpenFile(filepath.Join(p.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	p.cmd = exec.Command("dockerd", append([]string{"-H", p.host, "--data-root", filepath.Join(p.dir, "data"), "--exec-root", filepath.Join(p.dir, "exec"),
		"--pidfile", filepath.Join(p.dir, "pid"), "--config-file", filepath.Join(p.dir, "none.json"), "--bridge=none", "--iptables=false", "--ip6tables=false"}, p.args...)...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	// A network of its own: without a bridge it would take away that of the host's.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
}

func (p *private) docker(args ...string) *exec.Cmd {
	return exec.Command("docker", append([]string{"-H", p.host}, args...)...)
}

func (p *private) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.cmd.Wait()
	p.cmd = nil
}

// W43: the engine itself is restarted under the daemon, and takes its containers
// along: a busy one, an idle one. The daemon stays, and every message is answered
// once, also those that came while there was no engine.
func TestEngineRestarts(t *testing.T) {
	t.Parallel()
	engine := newPrivate(t)
	engine.start()
	h := newHost(t, engine.host, "busy", "idle", "late")
	h.ready()
	if _, err := h.ask("idle", "t-warm\necho"); err != nil {
		t.Fatal(err)
	}
	seqs := []int64{}
	send := func(group, text string) {
		t.Helper()
		seq, err := h.send(group, text)
		if err != nil {
			t.Fatal(err)
		}
		seqs = append(seqs, seq)
	}
	send("busy", "t-slept\nsleep 3\necho")
	for group, state := range map[string]string{"busy": "busy", "idle": "idle"} {
		if _, err := h.run(group, state); err != nil {
			t.Fatal(err)
		}
	}
	before, err := h.containers("")
	if err != nil || len(before) != 2 {
		t.Fatalf("got %v, %v", before, err)
	}
	engine.stop()
	if err := h.until("without an engine", func(s web.Status) bool { return !s.Docker.Up && s.Docker.Error != "" }); err != nil {
		t.Fatal(err)
	}
	for _, g := range []string{"busy", "idle", "late"} {
		send(g, "t-meanwhile-"+g+"\necho")
	}
	back := time.Now()
	engine.start()
	for _, seq := range seqs {
		if _, err := h.answer(seq); err != nil {
			t.Error(err)
		}
	}
	t.Logf("all answered %v after the engine was started again", time.Since(back).Round(time.Millisecond))
	err = errors.Join(h.once("busy", "t-slept", "t-meanwhile-busy"), h.once("idle", "t-warm", "t-meanwhile-idle"), h.once("late", "t-meanwhile-late"))
	if err != nil {
		t.Error(err)
	}
	after, err := h.containers("")
	if err != nil || slices.ContainsFunc(before, func(id string) bool { return slices.Contains(after, id) }) {
		t.Errorf("containers of before the restart are left: %v of %v, %v", after, before, err)
	}
	h.finish()
}

// An engine that leaves its containers running is restarted: the same containers
// go on, and what they said meanwhile is heard.
func TestEngineRestartsAroundLiveContainers(t *testing.T) {
	t.Parallel()
	engine := newPrivate(t, "--live-restore")
	engine.start()
	h := newHost(t, engine.host, "short", "long")
	h.ready()
	first := map[string]web.Run{}
	seqs := map[string]int64{}
	for _, m := range [][2]string{{"long", "t-long\nsay begun\nsleep 5\necho"}, {"short", "t-short\nsay begun\nsleep 2\necho"}} {
		seq, err := h.send(m[0], m[1])
		if err != nil {
			t.Fatal(err)
		}
		seqs[m[0]] = seq
		if first[m[0]], err = h.run(m[0], "busy"); err != nil {
			t.Fatal(err)
		}
		// The engine copies the prompt into the container after it took it.
		waitFor(t, func() bool {
			texts, err := h.said(m[0])
			return err == nil && slices.Contains(texts, "begun")
		})
	}
	engine.stop()
	if err := h.until("without an engine", func(s web.Status) bool { return !s.Docker.Up }); err != nil {
		t.Fatal(err)
	}
	// The short one answers while nobody can hear it.
	waitFor(t, func() bool {
		found, _ := filepath.Glob(filepath.Join(h.root, "data/ipc/short/frames/*.json"))
		return len(found) > 0
	})
	engine.start()
	for group, seq := range seqs {
		if _, err := h.answer(seq); err != nil {
			t.Error(err)
		}
		a, err := h.ask(group, "t-after\necho")
		if err != nil || a.Run != first[group].ID {
			t.Errorf("%s: %+v, %v, want run %s", group, a, err, first[group].ID)
		}
		ids, err := h.containers(group)
		if err != nil || !slices.Equal(ids, []string{first[group].Container}) {
			t.Errorf("%s: containers %v, %v, want %s", group, ids, err, first[group].Container)
		}
		if err := h.once(group, "t-"+group, "t-after"); err != nil {
			t.Error(err)
		}
	}
	h.finish()
}

// W37: the daemon is restarted in the middle of a turn. The container goes on,
// the answer comes once, and what is said next goes into the same run.
func TestDaemonRestartsInATurn(t *testing.T) {
	t.Parallel()
	for name, how := range map[string]syscall.Signal{"asked to": syscall.SIGTERM, "killed": syscall.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, "", "p")
			h.ready()
			one, err := h.send("p", "t-one\nsleep 2\necho")
			if err != nil {
				t.Fatal(err)
			}
			before, err := h.run("p", "busy")
			if err != nil {
				t.Fatal(err)
			}
			if err := h.end(how); how == syscall.SIGTERM && err != nil {
				t.Errorf("the daemon ended with %v", err)
			}
			h.start()
			two, err := h.send("p", "t-two\necho")
			if err != nil {
				t.Fatal(err)
			}
			if a, err := h.answer(one); err != nil || a.Run != before.ID || len(a.Texts) != 1 {
				t.Errorf("got %+v, %v, want one text of run %s", a, err, before.ID)
			}
			if a, err := h.answer(two); err != nil || a.Run != before.ID {
				t.Errorf("got %+v, %v, want the same run %s", a, err, before.ID)
			}
			if ids, err := h.containers("p"); err != nil || !slices.Equal(ids, []string{before.Container}) {
				t.Errorf("containers %v, %v, want %s alone", ids, err, before.Container)
			}
			if err := h.once("p", "t-one", "t-two"); err != nil {
				t.Error(err)
			}
			h.finish()
		})
	}
}

// W32: with all slots taken by idle runs, a sixth group waits for one close and
// its own cold start. It has the machine for itself, since it measures.
func TestSixthGroup(t *testing.T) {
	groups := []string{"g1", "g2", "g3", "g4", "g5", "g6"}
	h := newHost(t, "", groups...)
	h.ready()
	ask := func(group string) time.Duration {
		t.Helper()
		begun := time.Now()
		if _, err := h.ask(group, "say hello"); err != nil {
			t.Fatal(err)
		}
		took := time.Since(begun)
		if _, err := h.run(group, "idle"); err != nil {
			t.Fatal(err)
		}
		return took
	}
	var cold time.Duration
	for _, g := range groups[:5] {
		cold = max(cold, ask(g))
	}
	begun := time.Now()
	if _, err := h.client.StopGroup(t.Context(), "g5"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.run("g5", ""); err != nil {
		t.Fatal(err)
	}
	closing := time.Since(begun)
	cold = max(cold, ask("g5"))
	if err := h.until("idle for longer than the hold-down", func(s web.Status) bool {
		return time.Since(runOf(s, "g1").Since) > queue.HoldDown
	}); err != nil {
		t.Fatal(err)
	}
	if s := h.status(); s.Pool.Used != 5 || s.Pool.Limit != 5 {
		t.Fatalf("the pool is not full: %+v", s.Pool)
	}
	sixth := ask("g6")
	t.Logf("close %v, cold start %v, sixth group %v", closing, cold, sixth)
	if sixth > 3*(closing+cold) {
		t.Errorf("the sixth group took %v, a close %v and a cold start %v", sixth, closing, cold)
	}
	s := h.status()
	if s.Pool.Used != 5 || runOf(s, "g1").ID != "" || runOf(s, "g2").ID == "" {
		t.Errorf("not the longest idle run made room: %+v", s.Runs)
	}
	h.finish()
}

// W32: one group talks without end, another one works: all the others are still
// answered, and nobody makes room in the middle of a turn.
func TestEndlessTraffic(t *testing.T) {
	t.Parallel()
	others := []string{"a", "b", "c"}
	h := newHost(t, "", append([]string{"talk", "work"}, others...)...)
	h.env = append(h.env, "MAX_CONCURRENT_CONTAINERS=2")
	h.ready()
	work, err := h.send("work", "t-work\nsleep 4\necho")
	if err != nil {
		t.Fatal(err)
	}
	working, err := h.run("work", "busy")
	if err != nil {
		t.Fatal(err)
	}
	// The chat always has the next message before the last one is answered.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	begun := make(chan struct{})
	var words []string
	var g errgroup.Group
	g.Go(func() error {
		var last int64
		for i := 0; ctx.Err() == nil; i++ {
			words = append(words, fmt.Sprintf("t-%04d", i))
			seq, err := h.send("talk", words[i]+"\nsleep 0.05\necho")
			if err != nil {
				return err
			}
			if last > 0 {
				if _, err := h.answer(last); err != nil {
					return err
				}
			}
			if last = seq; i == 3 {
				close(begun)
			}
		}
		_, err := h.answer(last)
		return err
	})
	pressed := false // somebody waited while there was work
	g.Go(func() error {
		for {
			s, err := h.client.Status(t.Context())
			if err != nil {
				return err
			}
			r := runOf(s, "work")
			if a, err := h.client.Answer(t.Context(), work, 0); err != nil || a.State == web.AnswerDone {
				return err
			}
			// It may have become idle since.
			if r.ID != working.ID || r.State != "busy" && r.State != "idle" {
				return fmt.Errorf("the working run was disturbed: %+v", r)
			}
			pressed = pressed || len(s.Pool.Waiting) > 0
			if err := wait(t.Context(), 5*time.Millisecond); err != nil {
				return err
			}
		}
	})
	<-begun
	var rest errgroup.Group
	for _, other := range others {
		rest.Go(func() error {
			begun := time.Now()
			_, err := h.ask(other, "t-"+other+"\necho")
			t.Logf("%s answered after %v", other, time.Since(begun).Round(time.Millisecond))
			return errors.Join(err, h.once(other, "t-"+other))
		})
	}
	if err := rest.Wait(); err != nil {
		t.Error(err)
	}
	cancel()
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if !pressed {
		t.Error("nobody waited while there was work: this shows nothing")
	}
	t.Logf("%d messages of endless traffic", len(words))
	if err := errors.Join(h.once("talk", words...), h.once("work", "t-work")); err != nil {
		t.Error(err)
	}
	if a, err := h.answer(work); err != nil || a.Run != working.ID {
		t.Errorf("got %+v, %v, want run %s", a, err, working.ID)
	}
	h.finish()
}

// W38: two installs share an engine. Whatever becomes of one daemon, it leaves
// the other's containers alone.
func TestTwoDaemonsOnOneEngine(t *testing.T) {
	t.Parallel()
	hosts := []*host{newHost(t, "", "busy", "idle"), newHost(t, "", "busy", "idle")}
	for i, quiet := range hosts {
		other := hosts[1-i]
		word := func(w string) string { return fmt.Sprintf("t-%d-%s", i, w) }
		quiet.ready()
		if _, err := quiet.ask("idle", "say hello"); err != nil {
			t.Fatal(err)
		}
		seq, err := quiet.send("busy", word("busy")+"\nsleep 2\necho")
		if err != nil {
			t.Fatal(err)
		}
		idle, err := quiet.run("idle", "idle")
		if err != nil {
			t.Fatal(err)
		}
		busy, err := quiet.run("busy", "busy")
		if err != nil {
			t.Fatal(err)
		}
		want := []string{idle.Container, busy.Container}
		slices.Sort(want)
		untouched := func(when string) {
			t.Helper()
			if got, err := quiet.containers(""); err != nil || !slices.Equal(got, want) {
				t.Fatalf("when the other %s: got %v, %v, want %v", when, got, err, want)
			}
		}

		other.ready()
		untouched("started")
		if _, err := other.send("busy", word("first")+"\nsleep 1\necho"); err != nil {
			t.Fatal(err)
		}
		if _, err := other.run("busy", "busy"); err != nil {
			t.Fatal(err)
		}
		if err := other.end(syscall.SIGKILL); err == nil {
			t.Fatal("it was to be killed")
		}
		other.ready()
		untouched("was killed and started again")
		if _, err := other.ask("busy", word("second")+"\necho"); err != nil {
			t.Fatal(err)
		}
		if err := other.once("busy", word("first"), word("second")); err != nil {
			t.Error(err)
		}
		other.finish()
		untouched("ended")

		if a, err := quiet.answer(seq); err != nil || a.Run != busy.ID {
			t.Errorf("got %+v, %v, want run %s", a, err, busy.ID)
		}
		if err := quiet.once("busy", word("busy")); err != nil {
			t.Error(err)
		}
		quiet.finish()
	}
}

// What agents and their containers do wrong costs their own group a run, and
// the others nothing. More of it is in trouble.txtar.
func TestBrokenRuns(t *testing.T) {
	t.Parallel()
	h := newHost(t, "", "killed", "deaf", "mute", "full", "good")
	h.addGroup("greedy", "--memory", "32m")
	h.env = append(h.env, "MAX_CONCURRENT_CONTAINERS=10")
	disk := tmpfs(t, filepath.Join(h.root, "data/ipc/full"), 256<<10)
	h.ready()

	var rows sync.WaitGroup
	row := func(name string, do func(group string) error) {
		rows.Go(func() {
			begun := time.Now()
			if err := do(name); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			t.Logf("%s: %v", name, time.Since(begun).Round(time.Millisecond))
		})
	}

	// Somebody kills a busy container: another one answers.
	row("killed", func(g string) error {
		seq, err := h.send(g, "t-killed\nsleep 2\necho")
		if err != nil {
			return err
		}
		first, err := h.run(g, "busy")
		if err != nil {
			return err
		}
		if out, err := exec.Command("docker", "kill", first.Container).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		a, err := h.answer(seq)
		if err != nil {
			return err
		}
		if a.Run == first.ID {
			return fmt.Errorf("answered by the killed run: %+v", a)
		}
		return errors.Join(h.logged(first.ID, "run failed", `"exit": 137`), h.once(g, "t-killed"))
	})

	// More memory than there is: the chat and the operator are told, nothing is
	// tried again, and the next message works.
	row("greedy", func(g string) error {
		seq, err := h.send(g, "eat 200000000")
		if err != nil {
			return err
		}
		a, err := h.client.Answer(t.Context(), seq, time.Minute)
		if err != nil || a.State != web.AnswerFailed {
			return fmt.Errorf("got %+v, %v, want a failure", a, err)
		}
		if !slices.ContainsFunc(h.status().Alarms, func(alarm string) bool {
			return strings.Contains(alarm, "group greedy") && strings.Contains(alarm, "out of memory")
		}) {
			return fmt.Errorf("no alarm: %q", h.status().Alarms)
		}
		if err := h.logged(a.Run, "given up", `"class": "memory"`); err != nil {
			return err
		}
		if _, err := h.ask(g, "t-modest\necho"); err != nil {
			return err
		}
		return h.once(g, "I ran out of memory. The operator has been told.", "t-modest")
	})

	// A container that ignores SIGTERM is killed. What came meanwhile waits until
	// it is gone.
	row("deaf", func(g string) error {
		seq, err := h.send(g, "t-before\nignore-term\necho\nbad-json-frame\nhang")
		if err != nil {
			return err
		}
		first, err := h.run(g, "stopping")
		if err != nil {
			return err
		}
		next, err := h.send(g, "t-after\necho")
		if err != nil {
			return err
		}
		if a, err := h.answer(seq); err != nil || a.Run != first.ID {
			return fmt.Errorf("got %+v, %v, want run %s", a, err, first.ID)
		}
		if a, err := h.answer(next); err != nil || a.Run == first.ID {
			return fmt.Errorf("got %+v, %v, want another run", a, err)
		}
		ids, err := h.containers(g)
		if err != nil || len(ids) != 1 || ids[0] == first.Container {
			return fmt.Errorf("containers %v, %v, want a new one", ids, err)
		}
		return errors.Join(h.logged(first.ID, "run failed", `"exit": 137`), h.once(g, "t-before", "t-after"))
	})

	// No room for an input file: that run fails, and the message is answered when
	// there is room again.
	row("full", func(g string) error {
		first, err := h.ask(g, "t-one\necho")
		if err != nil {
			return err
		}
		if _, err := h.run(g, "idle"); err != nil {
			return err
		}
		free, err := fill(disk)
		if err != nil {
			return err
		}
		seq, err := h.send(g, "t-two\necho")
		if err != nil {
			return err
		}
		if err := h.logged(first.Run, "run failed", "write an input file", "no space left"); err != nil {
			return err
		}
		if err := free(); err != nil {
			return err
		}
		if a, err := h.answer(seq); err != nil || a.Run == first.Run {
			return fmt.Errorf("got %+v, %v", a, err)
		}
		return h.once(g, "t-one", "t-two")
	})

	// And somebody else is served all the while.
	row("good", func(g string) error {
		var words []string
		for i := range 20 {
			words = append(words, fmt.Sprintf("t-%02d", i))
			if _, err := h.ask(g, words[i]+"\nsleep 0.2\necho"); err != nil {
				return err
			}
		}
		return h.once(g, words...)
	})

	rows.Wait()
	h.finish()
}

// A runner whose stdout is gone works on and says nothing any more. When it has
// been silent for as long as a run may be, it is stopped; its answer lies in a
// file and goes out once, and what was said since goes to another run.
func TestMuteRunner(t *testing.T) {
	h := newHost(t, "", "mute")
	h.env = append(h.env, "CONTAINER_TIMEOUT=1s", "IDLE_TIMEOUT=1s") // and 30 s more than that
	h.ready()
	one, err := h.send("mute", "t-one\nclose-stdout\necho")
	if err != nil {
		t.Fatal(err)
	}
	first, err := h.run("mute", "busy")
	if err != nil {
		t.Fatal(err)
	}
	two, err := h.send("mute", "t-two\necho")
	if err != nil {
		t.Fatal(err)
	}
	t.Parallel() // others may run while it is silent
	if a, err := h.answer(one); err != nil || a.Run != first.ID {
		t.Errorf("got %+v, %v, want run %s", a, err, first.ID)
	}
	if a, err := h.answer(two); err != nil || a.Run == first.ID {
		t.Errorf("got %+v, %v, want another run", a, err)
	}
	if err := errors.Join(h.logged(first.ID, "run failed", "no sign of life for 31s"), h.once("mute", "t-one", "t-two")); err != nil {
		t.Error(err)
	}
	h.finish()
}

// tmpfs mounts a small disk.
func tmpfs(t *testing.T, dir string, bytes int) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to mount a small disk")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0755", bytes)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fill fills a disk to its last byte; free makes room again.
func fill(dir string) (free func() error, err error) {
	name := filepath.Join(dir, "filler")
	f, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, unix.ENOSPC) {
		return nil, err
	}
	return func() error { return os.Remove(name) }, nil
}

// W12, W17: what comes all at once for an idle run reaches the agent once, in
// order and in few turns. Of ten thousand messages that nobody read it gets the
// newest, and is told how many were left out.
func TestManyMessages(t *testing.T) {
	t.Parallel()
	h := newHost(t, "", "burst")
	mustBerth(t, h.root, "groups", "add", "quiet", "--engine", "probe")
	const unread = 10_000
	pileUp(t, h, "quiet", unread)
	h.ready()
	token := regexp.MustCompile(`t-\d{5}`)

	if _, err := h.ask("burst", "say hello"); err != nil {
		t.Fatal(err)
	}
	run, err := h.run("burst", "idle")
	if err != nil {
		t.Fatal(err)
	}
	const burst = 200
	var mu sync.Mutex
	order := map[int64]string{}
	var g errgroup.Group
	begun := time.Now()
	for i := range burst {
		g.Go(func() error {
			word := fmt.Sprintf("t-%05d", i)
			seq, err := h.send("burst", word+"\necho")
			mu.Lock()
			defer mu.Unlock()
			order[seq] = word
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	took := time.Since(begun)
	var want []string
	seqs := slices.Sorted(maps.Keys(order))
	for _, seq := range seqs {
		want = append(want, order[seq])
	}
	if a, err := h.answer(seqs[burst-1]); err != nil || a.Run != run.ID {
		t.Errorf("got %+v, %v, want run %s", a, err, run.ID)
	}
	if err := h.once("burst", want...); err != nil {
		t.Error(err)
	}
	texts, err := h.said("burst")
	if err != nil {
		t.Fatal(err)
	}
	batches := strings.Count(strings.Join(texts, "\n"), "<context ")
	t.Logf("%d messages stored in %v, given to the agent in %d turns", burst, took.Round(time.Millisecond), batches)
	if batches > burst/10 {
		t.Errorf("%d messages took %d turns", burst, batches)
	}

	if r := runOf(h.status(), "quiet"); r.ID != "" {
		t.Errorf("somebody was woken: %+v", r)
	}
	a, err := h.ask("quiet", "@Andy\necho")
	if err != nil {
		t.Fatal(err)
	}
	prompt := strings.Join(a.Texts, "\n")
	found := token.FindAllString(prompt, -1)
	t.Logf("%d of %d messages in the prompt", len(found), unread)
	omitted := fmt.Sprintf(`omitted="%d older messages omitted"`, unread-len(found))
	if !strings.Contains(prompt, omitted) || len(found) < 100 {
		t.Fatalf("want %s and the newest ones, got %d in %.300s", omitted, len(found), prompt)
	}
	// The writers are not in step, but none is far behind.
	slices.Sort(found)
	if u := slices.Compact(slices.Clone(found)); len(u) != len(found) || found[0] < fmt.Sprintf("t-%05d", unread/2) {
		t.Errorf("not the newest: %q", found)
	}
	if a, err := h.ask("quiet", "@Andy\necho"); err != nil || token.MatchString(strings.Join(a.Texts, "")) || strings.Contains(a.Texts[0], "omitted") {
		t.Errorf("they are there again: %.300q, %v", a.Texts, err)
	}
	h.finish()
}

// pileUp stores messages without the trigger, as the daemon does.
func pileUp(t *testing.T, h *host, group string, n int) {
	t.Helper()
	db, err := sqlite.Open(t.Context(), filepath.Join(h.root, "store", "messages.db"), func(string, bool) {})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var g errgroup.Group
	const writers = 64 // which share commits
	for w := range writers {
		g.Go(func() error {
			for i := w; i < n; i += writers {
				id := fmt.Sprintf("t-%05d", i)
				m := berth.Message{ID: id, ChatJID: console.JID(group), Sender: "console:ann", SenderName: "ann", Text: id, Time: time.Now()}
				if _, _, err := db.AddMessage(t.Context(), m); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

// The disk of the store is full, or takes no writes: the daemon says so and
// stays, refuses what it cannot keep, and goes on where it was when it can.
func TestStoreCannotBeWritten(t *testing.T) {
	t.Parallel()
	for name, stop := range map[string]func(t *testing.T, h *host) (again func() error){
		"full": func(t *testing.T, h *host) func() error {
			free, err := fill(filepath.Join(h.root, "store"))
			if err != nil {
				t.Fatal(err)
			}
			return free
		},
		"read-only": func(t *testing.T, h *host) func() error {
			var files []string
			for _, name := range []string{"messages.db", "messages.db-wal"} {
				files = append(files, filepath.Join(h.root, "store", name))
			}
			again := func() error { return exec.Command("chattr", append([]string{"-i"}, files...)...).Run() }
			t.Cleanup(func() { _ = again() })
			if err := exec.Command("chattr", append([]string{"+i"}, files...)...).Run(); err != nil {
				t.Skipf("the file system cannot make a file immutable: %v", err)
			}
			return again
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, "")
			if name == "full" {
				tmpfs(t, filepath.Join(h.root, "store"), 4<<20)
			}
			h.addGroup("p")
			h.addGroup("q")
			h.env = append(h.env, "MAX_CONCURRENT_CONTAINERS=1")
			h.ready()
			one, err := h.send("p", "t-one\nsleep 1\necho")
			if err != nil {
				t.Fatal(err)
			}
			run, err := h.run("p", "busy")
			if err != nil {
				t.Fatal(err)
			}
			two, err := h.send("q", "t-two\necho") // waits for the slot
			if err != nil {
				t.Fatal(err)
			}
			again := stop(t, h)
			if err := h.logged("commit a frame", "the disk"); err != nil {
				t.Fatal(err)
			}
			m := web.NewMessage{Group: "q", ID: newMessageID(), Text: "t-three\necho"}
			_, err = h.client.Send(t.Context(), m)
			t.Logf("told to who writes: %v", err)
			if !unavailable(err) {
				t.Errorf("got %v, want a refusal that says why", err)
			}
			t.Logf("alarms: %q", h.status().Alarms)
			if err := again(); err != nil {
				t.Fatal(err)
			}
			if a, err := h.answer(one); err != nil || a.Run != run.ID {
				t.Errorf("got %+v, %v, want run %s", a, err, run.ID)
			}
			if _, err := h.answer(two); err != nil {
				t.Error(err)
			}
			three, err := h.client.Send(t.Context(), m)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := h.answer(three.Seq); err != nil {
				t.Error(err)
			}
			if err := errors.Join(h.once("p", "t-one"), h.once("q", "t-two", "t-three")); err != nil {
				t.Error(err)
			}
			h.finish()
		})
	}
}
