//go:build docker && crash

package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/web"
)

var (
	times  = flag.Int("times", 5, "how often the daemon is killed at each point")
	points = flag.String("points", "", "only these, separated by commas")
)

// TestCrash kills the daemon at every point that a message comes by, starts it
// again, and counts what became of the messages: none may be lost, none answered
// twice, and the answers of a chat keep their order.
func TestCrash(t *testing.T) {
	bin := crashable(t)
	all := crash.Points
	if *points != "" {
		all = strings.Split(*points, ",")
	}
	table := new(strings.Builder)
	w := tabwriter.NewWriter(table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "killed at\tkills\tsent\tanswered\tlost\tdoubled\tout of order\tcontainers left")
	for _, point := range all {
		var sum tally
		for i := range *times {
			sum.add(crashOnce(t, bin, point, i+1))
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n", point, sum.kills, sum.sent, sum.answered, sum.lost, sum.doubled, sum.disordered, sum.left)
		if sum.kills < *times {
			t.Errorf("%s: the daemon was killed %d times, want %d: nothing came by", point, sum.kills, *times)
		}
		if sum.lost+sum.doubled+sum.disordered+sum.left > 0 {
			t.Errorf("%s: %+v", point, sum)
		}
	}
	w.Flush()
	t.Logf("\n%s", table)
}

type tally struct{ kills, sent, answered, lost, doubled, disordered, left int }

func (a *tally) add(b tally) {
	a.kills += b.kills
	a.sent += b.sent
	a.answered += b.answered
	a.lost += b.lost
	a.doubled += b.doubled
	a.disordered += b.disordered
	a.left += b.left
}

// crashable builds a berth that can be killed at a point, and the runner.
func crashable(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth-bin-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for name, pkg := range map[string]string{"berth": "berth/orchestrator", "agent-runner": "berth/agent-runner"} {
		build := exec.Command("go", "build", "-trimpath", "-tags", "crash", "-o", filepath.Join(dir, name), pkg)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", pkg, err, out)
		}
	}
	return dir
}

// victim is a daemon on a root of its own that is started again and again.
type victim struct {
	t      *testing.T
	bin    string
	root   string
	client *web.Client

	mu     sync.Mutex
	daemon *exec.Cmd
	ended  chan struct{}
}

// start starts the daemon, which dies at a point if one is given.
func (v *victim) start(at string) {
	v.t.Helper()
	logDir := filepath.Join(v.root, "data", "logs")
	if err := os.MkdirAll(logDir, 0o700); err != nil {
		v.t.Fatal(err)
	}
	log, err := os.OpenFile(filepath.Join(logDir, "berth.log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		v.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(v.bin, "berth"), "run", "--root", v.root)
	cmd.Env = append(os.Environ(), crash.Variable+"="+at)
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		v.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // killed, mostly
		close(ended)
	}()
	v.mu.Lock()
	v.daemon, v.ended = cmd, ended
	v.mu.Unlock()
}

// dead reports whether the daemon ends within a time.
func (v *victim) dead(within time.Duration) bool {
	select {
	case <-v.ended:
		return true
	case <-time.After(within):
		return false
	}
}

// post stores a message, however often the daemon dies meanwhile.
func (v *victim) post(m web.NewMessage) web.Accepted {
	for {
		a, err := v.client.Send(v.t.Context(), m)
		if err == nil {
			return a
		}
		if !unavailable(err) {
			v.t.Errorf("post: %v", err)
			return a
		}
		if v.dead(20 * time.Millisecond) {
			v.start("")
		}
	}
}

// answered waits until a message is done, and starts the daemon again when it
// dies.
func (v *victim) answered(seq int64) bool {
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); {
		a, err := v.client.Answer(v.t.Context(), seq, time.Second)
		if err == nil && a.State == web.AnswerDone {
			return true
		}
		if err != nil && v.dead(20*time.Millisecond) {
			v.start("")
		}
	}
	return false
}

// crashOnce kills the daemon the nth time that a message comes by a point, while
// a conversation goes on: a cold start, follow-ups, a request by file, the end
// of the run and a new one.
func crashOnce(t *testing.T, bin, point string, n int) (sum tally) {
	root := newRoot(t)
	v := &victim{t: t, bin: bin, root: root, client: web.NewClient(filepath.Join(root, "store", "berth.sock"))}
	if _, err := berthIn(t, root, nil, "groups", "add", "p", "--engine", "probe", "--no-trigger"); err != nil {
		t.Fatal(err)
	}
	// Some points are passed once or twice a round, and adoption only after
	// another death.
	at := fmt.Sprintf("%s:%d", point, n)
	switch point {
	case crash.Created, crash.Started, crash.Prompted, crash.Exited, crash.Requested:
		at = fmt.Sprintf("%s:%d", point, 1+n%2)
	case crash.Input:
		at = fmt.Sprintf("%s:%d", point, 1+n%4)
	case crash.Adopted, crash.Shutdown:
		at = point
	}
	v.start(at)
	defer func() {
		v.mu.Lock()
		_ = v.daemon.Process.Kill()
		v.mu.Unlock()
		<-v.ended
	}()
	first := v.ended

	var tokens []string
	say := func(format string) int64 {
		token := fmt.Sprintf("token-%d-", len(tokens)+1)
		tokens = append(tokens, token)
		sum.sent++
		return v.post(web.NewMessage{Group: "p", ID: berth.NewID(8), Text: fmt.Sprintf(format, token)}).Seq
	}
	byFile := `write /workspace/ipc/messages/1.json {"type":"message","chatJid":"console:p","text":"%s"}` + "\nsilent"
	for round := range 2 {
		for i := range 3 {
			format := "say %s"
			if i == 1 {
				format = byFile
			}
			if i == 2 {
				format = "sleep 0.3\nsay %s"
			}
			seq := say(format)
			if i == 2 && point == crash.Adopted {
				v.kill9()
				v.start(at)
				first = v.ended
			}
			v.answered(seq)
		}
		if point == crash.Shutdown && round == 0 {
			_ = v.client.StopDaemon(t.Context())
			if !v.dead(30 * time.Second) {
				t.Error("the daemon does not end")
			}
			v.start("")
		}
		v.stopRun()
	}
	select {
	case <-first:
		sum.kills++
	default:
	}
	sum.audit(t, v, tokens)
	return sum
}

func (v *victim) kill9() {
	v.mu.Lock()
	_ = v.daemon.Process.Kill()
	v.mu.Unlock()
	<-v.ended
}

// stopRun ends the group's run and waits until it is gone.
func (v *victim) stopRun() {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		if _, err := v.client.StopGroup(v.t.Context(), "p"); err != nil && v.dead(20*time.Millisecond) {
			v.start("")
			continue
		}
		if s, err := v.client.Status(v.t.Context()); err == nil && s.Ready && len(s.Runs) == 0 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	v.t.Error("the run does not end")
}

// audit reads the chat as its people saw it.
func (a *tally) audit(t *testing.T, v *victim, tokens []string) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var said []string
	for e, err := range v.client.Chat(ctx, "p", 0) {
		if err != nil {
			t.Errorf("read the chat: %v", err)
			break
		}
		if e.Type == web.EventTyping {
			break // all that was there came before
		}
		if e.Message.Bot {
			said = append(said, e.Message.Text)
		}
	}
	last := -1
	for _, token := range tokens {
		count, at := 0, -1
		for i, text := range said {
			if strings.Contains(text, token) {
				count++
				at = i
			}
		}
		switch {
		case count == 0:
			a.lost++
		case count > 1:
			a.doubled++
		default:
			a.answered++
		}
		if at >= 0 && at < last {
			a.disordered++
		}
		last = max(last, at)
	}
	if a.lost+a.doubled+a.disordered > 0 {
		t.Logf("said: %q", said)
	}
	e, err := docker.New(docker.Options{Install: install(v.root)})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	left, err := e.Containers(ctx)
	if err != nil {
		t.Error(err)
	}
	a.left = len(left)
}
