package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

func TestSend(t *testing.T) {
	d := newFakeDaemon(t)
	if code, out, errs := d.berth("", "send", "-g", "main", "hello", "there", "--sender", "ci"); code != exitDone || out != "stored as #1\n" || errs != "" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
	if m := d.messages[0]; m.Text != "hello there" || m.SenderName != "ci" || m.ID == "" {
		t.Errorf("got %+v", m)
	}
	code, out, _ := d.berth("from\nstdin\n", "send", "-g", "family", "-")
	if want := "stored as #3; kept as context until a message with @Andy comes\n"; code != exitDone || out != want || d.messages[2].Text != "from\nstdin" {
		t.Errorf("got %d, %q, %+v, want %q", code, out, d.messages[2], want)
	}
	if code, _, errs := d.berth("", "send", "-g", "nobody", "x"); code != exitFailed || errs != "berth: no group is called nobody\n" {
		t.Errorf("got %d, %q", code, errs)
	}
}

func TestSendWait(t *testing.T) {
	d := newFakeDaemon(t)
	d.reply = []string{"first", "second\nline"}
	if code, out, errs := d.berth("", "send", "-g", "main", "--wait", "x"); code != exitDone || out != "first\n\nsecond\nline\n" || errs != "" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
	d.reply = []string{}
	if code, out, errs := d.berth("", "send", "-g", "main", "--wait", "x"); code != exitDone || out+errs != "" {
		t.Errorf("silent answer: got %d, %q, %q", code, out, errs)
	}
	if code, out, errs := d.berth("", "send", "-g", "family", "--wait", "x"); code != exitFailed || out != "" || errs != "berth: kept as context: no trigger (@Andy)\n" {
		t.Errorf("context: got %d, %q, %q", code, out, errs)
	}
	d.fail = "no key"
	if code, _, errs := d.berth("", "send", "-g", "main", "--wait", "x"); code != exitFailed || errs != "berth: the agent failed: no key\n" {
		t.Errorf("failure: got %d, %q", code, errs)
	}
	d.hold = true
	if code, _, errs := d.berth("", "send", "-g", "main", "--wait", "--timeout", "200ms", "x"); code != exitFailed || !strings.Contains(errs, "no answer within 200ms") {
		t.Errorf("timeout: got %d, %q", code, errs)
	}
}

// The daemon dies after it stored the message and before it said so.
func TestSendWaitOverRestart(t *testing.T) {
	d := newFakeDaemon(t)
	d.hold = true
	var once sync.Once
	var worker sync.WaitGroup
	restarted := make(chan struct{})
	d.onPost = func() {
		once.Do(func() {
			worker.Go(func() {
				d.stop()
				d.start()
				close(restarted)
			})
			<-restarted // the connection is broken by now
		})
	}
	worker.Go(func() {
		d.await(func() bool { return len(d.posts) == 1 && d.posts[d.messages[0].ID] == 2 })
		d.stop() // once more, while the answer is waited for
		d.locked(func() { d.settleLocked() })
		d.start()
	})
	code, out, errs := d.berth("", "send", "-g", "main", "--wait", "--timeout", "20s", "hi")
	worker.Wait()
	if code != exitDone || out != "re: hi\n" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
	if len(d.messages) != 2 {
		t.Errorf("got %d messages, want the question and its answer, once each: %+v", len(d.messages), d.messages)
	}
}

func TestStatus(t *testing.T) {
	d := newFakeDaemon(t)
	d.status = web.Status{
		Version: "1.2", PID: 42, Root: "/r", Docker: web.Docker{Error: "connection refused"}, Image: web.Image{Ref: "i:1"},
		Pool:   web.Pool{Limit: 5, Used: 1, Waiting: []string{"work", "family"}},
		Runs:   []web.Run{{ID: "r1", Group: "main", Kind: "chat", State: berth.RunBusy, Turns: 3, Since: time.Now(), StartedAt: time.Now()}},
		Outbox: web.Outbox{Pending: 2, Dead: 1}, Alarms: []string{"look\x1b[2J here\nand there"},
	}
	code, out, errs := d.berth("", "status")
	for _, want := range []string{"starting: waiting for Docker: connection refused (pid 42", "1 of 5, waiting: work, family", "2 to send, 1 given up", "look[2J here and there", "r1   main   chat  busy"} {
		if code != exitDone || !strings.Contains(out, want) || errs != "" {
			t.Errorf("got %d, %q, %q, want %q in it", code, out, errs, want)
		}
	}
	code, out, _ = d.berth("", "status", "--json")
	var got web.Status
	if err := json.Unmarshal([]byte(out), &got); code != exitDone || err != nil || got.PID != 42 || got.Alarms[0] != d.status.Alarms[0] {
		t.Errorf("got %d, %v, %q", code, err, out)
	}
}

func TestGroupsOverTheDaemon(t *testing.T) {
	d := newFakeDaemon(t)
	code, out, errs := d.berth("", "groups", "ls")
	if code != exitDone || errs != "" || !strings.Contains(out, "family") || !strings.Contains(out, "none needed") {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
	if code, out, errs = d.berth("", "groups", "add", "work"); code != exitDone || out != "group work (console:work) added: @Andy wakes it\n" || errs != "" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
	if code, _, errs = d.berth("", "groups", "add", "family"); code != exitFailed || errs != "berth: folder \"family\" is in use\n" {
		t.Errorf("got %d, %q", code, errs)
	}
	if code, out, _ = d.berth("", "groups", "add", "family", "--if-missing"); code != exitDone || !strings.Contains(out, "is there already") {
		t.Errorf("got %d, %q", code, out)
	}
	if code, out, errs = d.berth("", "groups", "rm", "work"); code != exitDone || !strings.Contains(out, "files stay") || errs != "" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
}

func TestStop(t *testing.T) {
	d := newFakeDaemon(t)
	if code, out, errs := d.berth("", "stop", "main"); code != exitDone || out != "ending the run of main\n" || errs != "" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
	if code, out, _ := d.berth("", "stop", "family"); code != exitDone || out != "family has no run\n" {
		t.Errorf("got %d, %q", code, out)
	}
	if code, out, errs := d.berth("", "stop", "--daemon"); code != exitDone || !strings.Contains(out, "has ended") || errs != "" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
	if code, _, _ := d.berth("", "status"); code != exitFailed {
		t.Errorf("got %d, want the daemon gone", code)
	}
}

func TestRunDetachedBesideADaemon(t *testing.T) {
	d := newFakeDaemon(t)
	d.status.PID = 42
	if code, out, errs := d.berth("", "run", "--detach"); code != exitDone || out != "a daemon runs on this root already (pid 42)\n" || errs != "" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
}

func TestAwaitReady(t *testing.T) {
	d := newFakeDaemon(t)
	d.status = web.Status{PID: 42, Docker: web.Docker{Error: "refused"}}
	s := &screen{changed: make(chan struct{}, 1)}
	var out strings.Builder
	a := &app{stdout: &out, stderr: s}
	client := web.NewClient(filepath.Join(d.root, "store/berth.sock"))
	ended := make(chan error, 1)
	died := make(chan error, 1)
	lines := func() string { return "last words" }
	go func() { ended <- a.awaitReady(t.Context(), client, 42, died, lines) }()
	s.await(t, "waiting for Docker: refused\n")
	d.locked(func() { d.status.Docker = web.Docker{Up: true} })
	s.await(t, "building the agent image\n")
	d.locked(func() { d.status.Ready = true })
	if err := <-ended; err != nil || out.String() != "ready (pid 42)\n" {
		t.Errorf("got %v, %q", err, out.String())
	}

	d.locked(func() { d.status.Ready = false })
	died <- nil
	err := a.awaitReady(t.Context(), client, 42, died, lines)
	if err == nil || !strings.Contains(s.text(), "last words") {
		t.Errorf("got %v, %q, want its death told with the last lines of its log", err, s.text())
	}
}

func TestLogsFollow(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "data/logs/family")
	appendTo(t, filepath.Join(dir, "1.log"), "one\n")
	s := &screen{changed: make(chan struct{}, 1)}
	l := &logReader{path: filepath.Join(dir, "1.log"), newRuns: true, out: s, heading: s}
	ctx, cancel := contextWithCancel(t)
	ended := make(chan error, 1)
	go func() { ended <- l.copy(ctx, true) }()
	s.await(t, "one\n")
	appendTo(t, filepath.Join(dir, "1.log"), "two\n")
	s.await(t, "two\n")
	appendTo(t, filepath.Join(dir, "2.log"), "three\n")
	s.await(t, "==> 2.log <==\nthree\n")
	// Rotation: the file gets another name, a new one takes its place.
	rename(t, filepath.Join(dir, "2.log"), filepath.Join(dir, "2-old.log"))
	appendTo(t, filepath.Join(dir, "2.log"), "four\n")
	s.await(t, "four\n")
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("got %v, want nil when interrupted", err)
	}
	if got, want := s.text(), "one\ntwo\n==> 2.log <==\nthree\nfour\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAlive(t *testing.T) {
	child := exec.Command("true")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if !alive(os.Getpid()) {
		t.Error("got this process dead")
	}
	if err := child.Wait(); err != nil {
		t.Fatal(err)
	}
	if alive(child.Process.Pid) || alive(0) {
		t.Error("got an ended process alive")
	}
}
