package enginetest

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/agent-runner/fakemodel"
	"berth/agent-runner/internal/emit"
	"berth/agent-runner/internal/input"
	"berth/agent-runner/internal/loop"
	"berth/agent-runner/protocol"
)

// Stop holds that the host's order to stop reaches the agent program in a whole run,
// while the model is asked and while a tool runs, and that the next message is
// answered by the same process in the same session.
func Stop(t *testing.T, s Subject) {
	b := New(t, s)
	r := b.run(t, "say warm")
	session := r.turn("warm")
	r.put(1, `tool bash {"command":"echo process $PPID.","description":"who"}`)
	r.turn("process ")
	process := r.last

	stopped := func(what string) {
		t.Helper()
		begun := time.Now()
		r.order()
		if got := r.turn(""); got != session || r.last != "(it was stopped)" {
			t.Errorf("%s: session %q, %q", what, got, r.last)
		}
		if took := time.Since(begun); took > 5*time.Second {
			t.Errorf("%s: it took %v", what, took)
		}
		if err := b.Model.AwaitIdle(t.Context()); err != nil {
			t.Errorf("%s: the agent still asks the model: %v", what, err)
		}
	}
	const script = "stall\nsay one two three four"
	r.put(2, script)
	if _, err := b.Model.Await(t.Context(), func(r fakemodel.Request) bool { return r.Text == script }); err != nil {
		t.Fatal(err)
	}
	stopped("the model stalls")
	r.put(3, `tool bash {"command":"touch started; exec sleep 60","description":"wait"}`)
	await(t, filepath.Join(b.Config.WorkDir, "started"))
	stopped("a tool runs")

	r.put(4, `tool bash {"command":"echo process $PPID.","description":"who"}`)
	if got := r.turn("process "); got != session || r.last != process {
		t.Errorf("session %q, %q; want %q, %q", got, r.last, session, process)
	}
}

// wholeRun is a run that a test speaks to as the host does.
type wholeRun struct {
	t      *testing.T
	dir    string // of its input
	id     string // of the last message
	wake   chan struct{}
	frames chan protocol.Frame
	last   string // the last answer, or why there was none
}

// run begins a run whose prompt is text.
func (b *Bench) run(t *testing.T, text string) *wholeRun {
	t.Helper()
	ipc := t.TempDir()
	r := &wholeRun{t: t, dir: filepath.Join(ipc, "input"), id: "b1", wake: make(chan struct{}, 1), frames: make(chan protocol.Frame, 100)}
	for _, name := range []string{"input", "frames"} {
		if err := os.Mkdir(filepath.Join(ipc, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	out, w := io.Pipe()
	go func() {
		defer close(r.frames)
		for f, err := range (protocol.Stream{Nonce: "n"}).Frames(out) {
			if err != nil {
				t.Error(err)
			}
			r.frames <- f
		}
	}()
	b.Config.Prompt, b.Config.Batch = Host(text), []string{r.id}
	l := &loop.Loop{
		Input: b.Config.Input, Engine: b.Open(t).Engine, Out: emit.New(w, filepath.Join(ipc, "frames"), "run", "n", b.Config.Log),
		Folder: input.NewFolder(r.dir, b.Config.Log), Wake: r.wake, LeasePath: filepath.Join(ipc, protocol.LeaseFile),
		Children: b.Config.Children, WorkDir: b.Config.WorkDir, Home: b.Config.Home, Log: b.Config.Log,
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx); w.Close() }()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return r
}

func (r *wholeRun) write(seq int64, m protocol.Message) {
	r.t.Helper()
	data, err := protocol.Marshal(m)
	name := filepath.Join(r.dir, protocol.InputName(seq))
	if err == nil {
		err = os.WriteFile(name+".tmp", data, 0o600)
	}
	if err == nil {
		err = os.Rename(name+".tmp", name)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.wake <- struct{}{}
}

func (r *wholeRun) put(seq int64, text string) {
	r.t.Helper()
	r.id = fmt.Sprint("m", seq)
	r.write(seq, protocol.Message{Type: protocol.TypeMessage, ID: r.id, Text: Host(text)})
}

// order stops the turn of the last message.
func (r *wholeRun) order() {
	r.t.Helper()
	r.write(1<<63-1, protocol.Message{Type: protocol.TypeStop, ID: r.id})
}

// turn waits for the end of a turn, wants words in its answer, and returns its
// session.
func (r *wholeRun) turn(words string) (session string) {
	r.t.Helper()
	late := time.After(time.Minute)
	for {
		select {
		case f, ok := <-r.frames:
			switch {
			case !ok:
				r.t.Fatal("the run has ended")
			case f.Error != "":
				r.t.Fatalf("the turn failed: %s", f.Error)
			case f.Result != nil:
				r.last, session = string(*f.Result), f.NewSessionID
			case f.Type == protocol.TypeOutput:
				r.last, session = "("+f.Note+")", f.NewSessionID
			case f.State == protocol.StateIdle:
				if !strings.Contains(r.last, words) {
					r.t.Fatalf("answer %q, want %q in it", r.last, words)
				}
				return session
			}
		case <-late:
			r.t.Fatal("the turn does not end")
		}
	}
}
