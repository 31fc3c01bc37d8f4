package turn

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zaptest"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/mount"
	"berth/orchestrator/internal/queue"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/workspace"
)

var family = berth.Group{JID: "console:family", Name: "Family", Folder: "family", RequiresTrigger: true}

// world is a Runner over a real store and real folders, with an engine whose
// containers the test plays. Everything happens in a bubble, so time is exact.
type world struct {
	t      *testing.T
	db     *sqlite.DB
	root   string
	engine *fakeEngine
	runner *Runner
	queue  *queue.Queue
	ids    int

	mu       sync.Mutex
	typing   bool
	requests []string
}

// play runs fn in a bubble with a new world, and takes it down.
func play(t *testing.T, fn func(*world)) {
	t.Helper()
	root := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, root)
		defer w.close()
		fn(w)
	})
}

func newWorld(t *testing.T, root string) *world {
	tree, err := workspace.NewTree(root, os.Getuid(), os.Getgid())
	check(t, err)
	db, err := sqlite.Open(t.Context(), filepath.Join(root, "store", "messages.db"), func(string, bool) {})
	check(t, err)
	w := &world{t: t, db: db, root: root, engine: &fakeEngine{t: t, boxes: make(chan *fakeBox, 10)}}
	w.runner = New(Config{
		Assistant: "Andy", Image: func() (string, bool) { return "agent", true }, EngineName: "builtin", Location: time.UTC,
		Options: func(g berth.Group) map[string]string { return map[string]string{"model": g.Container.Model} }, MaxOutput: 1 << 20, Timeout: 30 * time.Minute, IdleTimeout: 30 * time.Minute,
	}, Deps{
		Store: db, Engine: w.engine, Tree: tree, Mounts: noMounts{}, Requests: w, Gateway: noGateway{},
		Typing: func(_ string, on bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.typing = on
		},
		Rebuild: func(context.Context) error { return errors.New("no image") }, Log: zaptest.NewLogger(t),
	})
	w.queue = queue.New(5, 30*time.Minute, func(ctx context.Context, s *queue.Slot) queue.Result { return w.runner.Run(ctx, s, family) })
	return w
}

func (w *world) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	w.queue.Shutdown(ctx)
	check(w.t, w.db.Close())
}

// Open implements Requests.
func (w *world) Open(context.Context, berth.Group, *workspace.Group) (Inbox, error) { return w, nil }
func (w *world) Close()                                                             {}
func (w *world) Refresh(...string)                                                  {}

// Drain stores what the agent sent by files, if that is what it does.
func (w *world) Drain(ctx context.Context) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, text := range w.requests {
		check(w.t, w.db.AddOutgoing(context.WithoutCancel(ctx), berth.Outgoing{
			ChatJID: family.JID, Key: "ipc/family/" + text, Kind: berth.OutMessage, Text: text, MessageID: text, CreatedAt: time.Now(), OwnTurn: true,
		}))
	}
	w.requests = nil
}

// send drops a request; it is not noticed before the next Drain.
func (w *world) send(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.requests = append(w.requests, text)
}

type noGateway struct{}

func (noGateway) Open(berth.Run, berth.Group) (Door, error) { return noDoor{}, nil }

type noDoor struct{}

func (noDoor) Mount() berth.Mount {
	return berth.Mount{Source: "/door", Target: "/workspace/gateway", ReadOnly: true}
}
func (noDoor) Socket() string { return "/workspace/gateway/gateway.sock" }
func (noDoor) Close()         {}
func (noDoor) Remove() error  { return nil }

type noMounts struct{}

func (noMounts) Resolve([]berth.MountRequest, bool) []mount.Verdict { return nil }

// say stores a message that wakes the group and wakes it.
func (w *world) say(text string) int64 {
	w.t.Helper()
	w.ids++
	seq, _, err := w.db.AddMessage(w.t.Context(), berth.Message{
		ID: "m" + string(rune('0'+w.ids)), ChatJID: family.JID, SenderName: "Ann", Text: text, Time: time.Unix(0, 0), Wakes: true,
	})
	check(w.t, err)
	w.queue.Add(family.Folder)
	synctest.Wait()
	return seq
}

// started returns the next container.
func (w *world) started() *fakeBox {
	w.t.Helper()
	synctest.Wait()
	select {
	case b := <-w.engine.boxes:
		b.w = w
		return b
	default:
		w.t.Fatal("no container was started")
		return nil
	}
}

func (w *world) fate(seq int64) berth.Fate {
	w.t.Helper()
	synctest.Wait()
	f, _, err := w.db.Fate(w.t.Context(), seq)
	check(w.t, err)
	return f
}

func (w *world) outbox() []string {
	w.t.Helper()
	var out []string
	for {
		o, ok, err := w.db.NextOutgoing(w.t.Context(), family.JID)
		check(w.t, err)
		if !ok {
			return out
		}
		out = append(out, o.Text)
		check(w.t, w.db.MarkSent(w.t.Context(), o.ID))
	}
}

func (w *world) state() berth.RunState {
	synctest.Wait()
	return w.runner.Live()[family.Folder].Run.State
}

func (w *world) input() []string {
	w.t.Helper()
	synctest.Wait()
	entries, err := os.ReadDir(filepath.Join(w.root, "data/ipc/family/input"))
	check(w.t, err)
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal(t *testing.T, what string, got, want any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// fakeEngine starts containers that do nothing by themselves.
type fakeEngine struct {
	t      *testing.T
	boxes  chan *fakeBox
	fail   error
	bug    any // the next start panics with it
	mu     sync.Mutex
	live   map[string]*fakeBox // by run
	remove []string
}

func (e *fakeEngine) Start(_ context.Context, spec Spec, stdin []byte, created func(string) error) (Box, error) {
	e.mu.Lock()
	fail, bug := e.fail, e.bug
	e.bug = nil
	e.mu.Unlock()
	if bug != nil {
		panic(bug)
	}
	if fail != nil {
		return nil, fail
	}
	b := &fakeBox{t: e.t, run: spec.RunID, exited: make(chan struct{})}
	check(e.t, json.Unmarshal(stdin, &b.input))
	check(e.t, created("box-"+spec.RunID))
	b.open()
	e.mu.Lock()
	if e.live == nil {
		e.live = make(map[string]*fakeBox)
	}
	e.live[spec.RunID] = b
	e.mu.Unlock()
	e.boxes <- b
	return b, nil
}

func (e *fakeEngine) setFail(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fail = err
}

func (e *fakeEngine) Attach(_ context.Context, run string) (Box, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, ok := e.live[run]
	if !ok || b.gone() {
		return nil, berth.Errorf(berth.NotFound, "no such container")
	}
	b.open()
	return b, nil
}

func (e *fakeEngine) RemoveContainer(_ context.Context, id string) error {
	e.remove = append(e.remove, id)
	return nil
}

// fakeBox is a container that the test plays.
type fakeBox struct {
	t     *testing.T
	w     *world
	run   string
	input protocol.Input
	seq   int64

	mu       sync.Mutex
	out      *io.PipeWriter
	outR     *io.PipeReader
	exited   chan struct{}
	exit     Exit
	stops    int
	removed  bool
	stubborn bool // ignores Stop
}

func (b *fakeBox) open() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.outR, b.out = io.Pipe()
}

func (b *fakeBox) ID() string { return "box-" + b.run }

func (b *fakeBox) Marker() string { return protocol.DefaultMarker }

func (b *fakeBox) Stdout() io.Reader {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.outR
}

func (b *fakeBox) Stderr() io.Reader { return strings.NewReader("some words\n") }

func (b *fakeBox) Reattach(context.Context) error {
	if b.gone() {
		return berth.Errorf(berth.NotFound, "gone")
	}
	b.open()
	return nil
}

func (b *fakeBox) Wait(ctx context.Context) (Exit, error) {
	select {
	case <-b.exited:
		return b.exit, nil
	case <-ctx.Done():
		return Exit{}, ctx.Err()
	}
}

func (b *fakeBox) Stop(context.Context) error {
	b.mu.Lock()
	b.stops++
	stubborn := b.stubborn
	b.mu.Unlock()
	if !stubborn {
		b.end(Exit{Code: 137})
	}
	return nil
}

func (b *fakeBox) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.outR.Close()
}

func (b *fakeBox) Remove(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.removed = true
	return nil
}

func (b *fakeBox) stopped() int {
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.stops
}

func (b *fakeBox) isRemoved() bool {
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.removed
}

func (b *fakeBox) gone() bool {
	select {
	case <-b.exited:
		return true
	default:
		return false
	}
}

// end makes the container exit.
func (b *fakeBox) end(e Exit) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.gone() {
		b.exit = e
		close(b.exited)
	}
	b.out.Close()
}

// lose breaks the streams.
func (b *fakeBox) lose() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.out.CloseWithError(errors.New("connection reset"))
}

// raw prints bytes.
func (b *fakeBox) raw(text string) {
	b.mu.Lock()
	out := b.out
	b.mu.Unlock()
	_, _ = io.WriteString(out, text)
	synctest.Wait()
}

// number gives a frame its number and the run's own marks.
func (b *fakeBox) number(f protocol.Frame) protocol.Frame {
	b.seq++
	f.Seq, f.RunID, f.Nonce = b.seq, b.input.RunID, b.input.Nonce
	return f
}

// print sends a frame on stdout.
func (b *fakeBox) print(f protocol.Frame) protocol.Frame {
	b.t.Helper()
	f = b.number(f)
	data, err := protocol.Encode(f)
	check(b.t, err)
	b.raw(string(data))
	return f
}

// file writes a frame's canonical file only.
func (b *fakeBox) file(f protocol.Frame) {
	b.t.Helper()
	f = b.number(f)
	data, err := protocol.Seal(f, b.input.Nonce)
	check(b.t, err)
	check(b.t, os.WriteFile(filepath.Join(b.w.root, "data/ipc/family/frames", protocol.FrameName(f.Seq)), data, 0o600))
}

func (b *fakeBox) ready() { b.print(protocol.Frame{Type: protocol.TypeReady}) }
func (b *fakeBox) ack(ids ...string) {
	b.print(protocol.Frame{Type: protocol.TypeAck, IDs: ids})
}
func (b *fakeBox) state(s string) { b.print(protocol.Frame{Type: protocol.TypeState, State: s}) }

func said(text string) protocol.Frame {
	return protocol.Frame{Status: protocol.StatusSuccess, Result: new(protocol.Text(text)), NewSessionID: "s1"}
}

// turn plays a whole turn.
func (b *fakeBox) turn(answer string, ids ...string) {
	b.ack(ids...)
	b.state(protocol.StateBusy)
	b.print(said(answer))
	b.state(protocol.StateIdle)
}

// take reads and removes the input files, as a runner does.
func (b *fakeBox) take() []protocol.Message {
	b.t.Helper()
	var out []protocol.Message
	for _, name := range b.w.input() {
		path := filepath.Join(b.w.root, "data/ipc/family/input", name)
		if name != protocol.CloseFile {
			data, err := os.ReadFile(path)
			check(b.t, err)
			m, err := protocol.ReadMessage(strings.NewReader(string(data)))
			check(b.t, err)
			out = append(out, m)
		}
		check(b.t, os.Remove(path))
	}
	return out
}

func TestConversation(t *testing.T) {
	play(t, func(w *world) {
		first := w.say("@Andy hello <b>")
		b := w.started()
		equal(t, "state", w.state(), berth.RunBusy)
		equal(t, "batch", b.input.Batch, []string{"m1"})
		if !strings.Contains(b.input.Prompt, `<message sender="Ann" time="1970-01-01T00:00:00.000Z" id="1">@Andy hello &lt;b&gt;</message>`) ||
			!strings.HasPrefix(b.input.Prompt, `<context timezone="UTC" `) {
			t.Errorf("prompt: %s", b.input.Prompt)
		}
		b.ready()
		b.turn("hi <internal>psst</internal>there", "m1")
		equal(t, "fate", w.fate(first), berth.Fate{State: berth.FateDone, Texts: []string{"hi there"}, RunID: b.run})
		equal(t, "state", w.state(), berth.RunIdle)

		time.Sleep(20 * time.Minute)
		second := w.say("@Andy and now?") // the same container
		got := b.take()
		equal(t, "input", []string{got[0].Type, got[0].ID}, []string{protocol.TypeMessage, "m2"})
		if !strings.HasPrefix(got[0].Text, "<context ") || !strings.Contains(got[0].Text, "and now?") {
			t.Errorf("follow-up: %s", got[0].Text)
		}
		equal(t, "state", w.state(), berth.RunBusy)
		b.turn("still here", "m2")
		equal(t, "fate", w.fate(second).State, berth.FateDone)
		equal(t, "outbox", w.outbox(), []string{"hi there", "still here"})

		time.Sleep(30 * time.Minute) // idle timeout
		equal(t, "input", w.input(), []string{protocol.CloseFile})
		equal(t, "state", w.state(), berth.RunClosing)
		b.end(Exit{})
		synctest.Wait()
		equal(t, "removed", b.isRemoved(), true)
		equal(t, "slots", w.queue.State().Used, 0)
		w.mu.Lock()
		equal(t, "typing at the end", w.typing, false)
		w.mu.Unlock()

		w.say("@Andy once more")
		equal(t, "session", w.started().input.SessionID, "s1")
	})
}

// W15, W66: a busy run is given nothing, however sure it seems to be done.
func TestMessageDuringATurnWaits(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy one")
		b := w.started()
		b.ready()
		b.ack("m1")
		two := w.say("@Andy two")
		equal(t, "input", w.input(), []string(nil))
		b.print(said("first"))
		b.state(protocol.StateIdle)
		got := b.take()
		equal(t, "follow-up", got[0].ID, "m2")
		b.turn("second", "m2")
		equal(t, "fate", w.fate(two).State, berth.FateDone)
	})
}

// RN-14, RN-04, W10: failed before any text, so the same prompt comes again, after 5 s.
func TestRN14FailureBeforeOutputIsRetried(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		start := time.Now()
		b.end(Exit{Code: 3})
		synctest.Wait()
		f := w.fate(seq)
		equal(t, "fate", []string{f.State, f.Error}, []string{berth.FatePending, "Container exited with code 3: some words"})
		time.Sleep(5 * time.Second)
		b = w.started()
		equal(t, "after", time.Since(start), 5*time.Second)
		b.ready()
		b.turn("better now", "m1")
		equal(t, "fate", w.fate(seq).Texts, []string{"better now"})
	})
}

// RN-13: error after text was sent: nobody is answered twice.
func TestRN13FailureAfterOutputIsNot(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.print(said("half"))
		b.print(protocol.Frame{Status: protocol.StatusError, Error: "boom"})
		b.end(Exit{Code: 1})
		time.Sleep(time.Hour)
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
		equal(t, "runs", len(w.engine.boxes), 0)
		equal(t, "outbox", w.outbox(), []string{"half"})
	})
}

// W34, GQ-06: six runs at 0, 5, 15, 35, 75, 155 s, then one notice.
func TestW34GivesUpWithOneNotice(t *testing.T) {
	play(t, func(w *world) {
		start := time.Now()
		seq := w.say("@Andy hello")
		var at []time.Duration
		for range 6 {
			for len(w.engine.boxes) == 0 {
				time.Sleep(time.Second)
				synctest.Wait()
			}
			b := w.started()
			at = append(at, time.Since(start).Truncate(time.Second))
			b.end(Exit{Code: 1})
			synctest.Wait()
		}
		s := time.Second
		equal(t, "runs at", at, []time.Duration{0, 5 * s, 15 * s, 35 * s, 75 * s, 155 * s})
		time.Sleep(200 * time.Second)
		equal(t, "more runs", len(w.engine.boxes), 0)
		equal(t, "fate", w.fate(seq).State, berth.FateFailed)
		equal(t, "notices", len(w.outbox()), 1)
		w.say("@Andy again")
		equal(t, "batch", w.started().input.Batch, []string{"m1", "m2"})
	})
}

// W35: what failed decides what is done about it.
func TestErrorClasses(t *testing.T) {
	for _, c := range []struct {
		class   string
		retry   time.Duration // 0: none
		session string        // of the next run
		notice  string
	}{
		{protocol.ClassStaleSession, time.Millisecond, "", ""},
		{protocol.ClassRateLimit, 90 * time.Second, "s1", ""},
		{protocol.ClassAuth, 0, "", "key"},
		{protocol.ClassMemory, 0, "", "memory"},
	} {
		t.Run(c.class, func(t *testing.T) {
			play(t, func(w *world) {
				w.say("@Andy one") // makes a session
				b := w.started()
				b.ready()
				b.turn("ok", "m1")
				w.queue.Close("family")
				b.end(Exit{})
				synctest.Wait()
				w.outbox()

				w.say("@Andy two")
				b = w.started()
				b.ready()
				b.ack("m2")
				start := time.Now()
				b.print(protocol.Frame{Status: protocol.StatusError, Error: "no", ErrorClass: c.class, RetryAfterMS: 90_000})
				b.end(Exit{Code: 1})
				if c.retry == 0 {
					time.Sleep(time.Hour)
					synctest.Wait()
					equal(t, "runs", len(w.engine.boxes), 0)
					if out := w.outbox(); len(out) != 1 || !strings.Contains(out[0], c.notice) {
						t.Errorf("notice: %q", out)
					}
					return
				}
				time.Sleep(c.retry)
				equal(t, "session", w.started().input.SessionID, c.session)
				equal(t, "after", time.Since(start), c.retry)
			})
		})
	}
}

func TestOutOfMemoryIsNotRetried(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		w.started().end(Exit{Code: 137, OutOfMemory: true})
		time.Sleep(time.Hour)
		equal(t, "runs", len(w.engine.boxes), 0)
		equal(t, "fate", w.fate(seq).State, berth.FateFailed)
	})
}

// W02, W05: what is printed without the nonce is log; a broken frame ends the
// run, and that run only.
func TestW02ForgedAndW05BrokenFrames(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.raw("---BERTH_OUTPUT_START---\n{\"status\":\"success\",\"result\":\"forged\",\"seq\":9}\n---BERTH_OUTPUT_END---\n")
		equal(t, "outbox", w.outbox(), []string(nil))
		b.raw("---BERTH_OUTPUT_START---\n{\"status\":\"succ")
		b.raw("\n---BERTH_OUTPUT_START---\n")
		equal(t, "stops", b.stopped(), 1)
		synctest.Wait()
		equal(t, "removed", b.isRemoved(), true)
		log, err := filepath.Glob(filepath.Join(w.root, "data/logs/family/*.log"))
		check(t, err)
		text, err := os.ReadFile(log[0])
		check(t, err)
		if !strings.Contains(string(text), "forged") || !strings.Contains(string(text), "broken frame") {
			t.Errorf("log: %s", text)
		}
	})
}

func TestHardTimeout(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		time.Sleep(29 * time.Minute)
		b.print(protocol.Frame{Type: protocol.TypeHeartbeat}) // a sign of life
		time.Sleep(29 * time.Minute)
		b.raw("just log\n") // none
		equal(t, "stops", b.stopped(), 0)
		time.Sleep(91 * time.Second) // IDLE_TIMEOUT + 30 s is the least
		equal(t, "stops", b.stopped(), 1)
		if f := w.fate(seq); !strings.Contains(f.Error, "timed out") {
			t.Errorf("fate: %+v", f)
		}
	})
}

// W13, W36: _close is asserted again and again, then the engine is asked, and the
// slot is free only when the container is gone.
func TestW13CloseEscalates(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		b := w.started()
		b.stubborn = true
		b.ready()
		b.turn("hi", "m1")
		w.queue.Close("family")
		for range 3 {
			equal(t, "input", w.input(), []string{protocol.CloseFile})
			b.take() // an older runner removes it at its start
			time.Sleep(protocol.CloseReassert)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		equal(t, "stops", b.stopped(), 1)
		equal(t, "state", w.state(), berth.RunStopping)
		equal(t, "used", w.queue.State().Used, 1)
		b.end(Exit{Code: 137})
		synctest.Wait()
		equal(t, "used", w.queue.State().Used, 0)
	})
}

// The stream breaks; what was printed meanwhile is taken from the files, once.
func TestLostStream(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.lose()
		b.ack("m1") // into the void
		b.file(said("you did not hear this"))
		time.Sleep(time.Second)
		got := b.take()
		if len(got) != 1 || got[0].Type != protocol.TypeSync {
			t.Fatalf("no sync: %+v", got)
		}
		b.ready()
		b.ack("m1")
		b.state(protocol.StateIdle)
		equal(t, "fate", w.fate(seq), berth.Fate{State: berth.FateDone, Texts: []string{"you did not hear this"}, RunID: b.run})
		equal(t, "state", w.state(), berth.RunIdle)
		equal(t, "stops", b.stopped(), 0)
	})
}

// A follow-up whose ack nobody heard, which was answered by a message that the
// agent sent, is answered: it does not come again.
func TestAnsweredUnderALostStream(t *testing.T) {
	for _, took := range []bool{true, false} {
		play(t, func(w *world) {
			w.say("@Andy hello")
			b := w.started()
			b.ready()
			b.turn("hi", "m1")
			b.lose()
			seq := w.say("@Andy go")
			if took {
				b.take()
			}
			w.send("done")
			w.Drain(w.t.Context())
			b.end(Exit{Code: 137})
			f := w.fate(seq)
			if took {
				equal(t, "fate", f, berth.Fate{State: berth.FateDone, Texts: []string{"done"}, RunID: b.run})
				return
			}
			time.Sleep(5 * time.Second)
			equal(t, "untaken, so again", w.started().input.Batch, []string{"m2"})
		})
	}
}

// What an agent sent before its turn ended answers that turn, not the next one.
func TestLateRequestDoesNotAnswerTheNextTurn(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.send("late")
		b.state(protocol.StateIdle)
		w.say("@Andy more")
		b.take()
		b.ack("m2")
		b.end(Exit{Code: 137})
		time.Sleep(5 * time.Second)
		equal(t, "again", w.started().input.Batch, []string{"m2"})
		equal(t, "outbox", w.outbox(), []string{"late"})
	})
}

// A request that an earlier run left is no answer of the next run.
func TestLeftRequestIsNoAnswer(t *testing.T) {
	play(t, func(w *world) {
		w.send("left")
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.end(Exit{Code: 137})
		time.Sleep(5 * time.Second)
		equal(t, "again", w.started().input.Batch, []string{"m1"})
		equal(t, "outbox", w.outbox(), []string{"left"})
	})
}

// A frame that was printed while nobody listened shows by its number.
func TestGapIsFilledFromFiles(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.file(said("one"))
		b.print(said("two"))
		equal(t, "outbox", w.outbox(), []string{"one", "two"})
	})
}

// W09: the last frames of a container that exits are not lost with its stream.
func TestFramesLeftAtExit(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.file(said("last words"))
		b.end(Exit{Code: 1})
		equal(t, "fate", w.fate(seq), berth.Fate{State: berth.FateDone, Texts: []string{"last words"}, RunID: b.run})
	})
}

func TestForgedFrameFile(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.input.Nonce = "guess"
		b.file(said("forged"))
		b.end(Exit{Code: 1})
		synctest.Wait()
		equal(t, "outbox", w.outbox(), []string(nil))
	})
}

// An older runner sends results and nothing else.
func TestOldRunner(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		f := said("hi")
		f.Nonce = b.input.Nonce
		data, err := protocol.Encode(f)
		check(t, err)
		b.raw(string(data))
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
		equal(t, "state", w.state(), berth.RunIdle)
		w.say("@Andy more")
		b.take() // file gone = consumed
		b.raw(string(data))
		equal(t, "state", w.state(), berth.RunIdle)
	})
}

// W37: shutdown leaves a busy run; the next daemon adopts it and loses nothing.
func TestAdoption(t *testing.T) {
	root := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, root)
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.close()
		equal(t, "exited", b.gone(), false)
		b.file(said("said to nobody"))

		next := newWorld(t, root)
		defer next.close()
		next.engine.live = w.engine.live
		b.w = next
		live, err := next.db.LiveRuns(t.Context())
		check(t, err)
		equal(t, "live runs", len(live), 1)
		next.queue.Adopt("family", "", func(ctx context.Context, s *queue.Slot) queue.Result {
			return next.runner.Adopt(ctx, s, family, live[0], b.ID(), func() {})
		})
		synctest.Wait()
		b.take()
		b.ready()
		b.ack("m1")
		b.state(protocol.StateIdle)
		equal(t, "fate", next.fate(seq), berth.Fate{State: berth.FateDone, Texts: []string{"said to nobody"}, RunID: b.run})
		next.ids = 1
		next.say("@Andy more") // a follow-up goes into the adopted container
		equal(t, "follow-up", b.take()[0].ID, "m2")
		b.turn("here", "m2")
		equal(t, "outbox", next.outbox(), []string{"said to nobody", "here"})
	})
}

// A container that ended while no daemon was there: what it left is delivered;
// what it did not answer is pending again and nobody's failure.
func TestSettle(t *testing.T) {
	for _, answered := range []bool{true, false} {
		root := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, root)
			seq := w.say("@Andy hello")
			b := w.started()
			b.ready()
			b.ack("m1")
			w.close()
			if answered {
				b.file(said("last words"))
			}
			b.end(Exit{Code: 137})

			next := newWorld(t, root)
			defer next.close()
			live, err := next.db.LiveRuns(t.Context())
			check(t, err)
			next.queue.Adopt("family", "", func(ctx context.Context, s *queue.Slot) queue.Result {
				return next.runner.Adopt(ctx, s, family, live[0], b.ID(), func() {})
			})
			f := next.fate(seq)
			equal(t, "removed", next.engine.remove, []string{b.ID()})
			if answered {
				equal(t, "fate", []any{f.State, f.Texts}, []any{berth.FateDone, []string{"last words"}})
				return
			}
			equal(t, "again", next.started().input.Batch, []string{"m1"})
		})
	}
}

func TestNoEngineIsNobodysFailure(t *testing.T) {
	play(t, func(w *world) {
		w.engine.setFail(berth.Errorf(berth.Unavailable, "no engine"))
		seq := w.say("@Andy hello")
		time.Sleep(10 * time.Minute)
		equal(t, "fate", w.fate(seq).State, berth.FatePending)
		w.engine.setFail(nil)
		time.Sleep(time.Second)
		b := w.started()
		b.ready()
		b.turn("hi", "m1")
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
		equal(t, "outbox", w.outbox(), []string{"hi"})
	})
}

// W14: a busy run can be stopped, and does not come back by itself.
func TestStoppedByTheOperator(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.queue.Close("family")
		time.Sleep(time.Hour)
		equal(t, "stops", b.stopped(), 1)
		equal(t, "runs", len(w.engine.boxes), 0)
		equal(t, "fate", w.fate(seq).State, berth.FateFailed)
	})
}

// The daemon shuts down while a container starts: that is nobody's failure.
func TestShutdownDuringAStart(t *testing.T) {
	play(t, func(w *world) {
		w.engine.setFail(errors.New("context canceled"))
		w.runner.Store = cancelling{w.db, w}
		seq := w.say("@Andy hello")
		time.Sleep(time.Second)
		_, retryAt, err := w.db.Pending(w.t.Context(), family.JID)
		check(w.t, err)
		equal(w.t, "no retry was counted", retryAt.IsZero(), true)
		equal(w.t, "fate", w.fate(seq).State, berth.FatePending)
	})
}

// cancelling lets the daemon shut down as soon as a run begins.
type cancelling struct {
	*sqlite.DB
	w *world
}

func (c cancelling) Session(ctx context.Context, folder, engine string) (string, error) {
	go c.w.queue.Shutdown(context.Background())
	synctestPause()
	return c.DB.Session(context.Background(), folder, engine)
}

// synctestPause lets other goroutines of the bubble move.
func synctestPause() { time.Sleep(time.Millisecond) }

// The connection breaks in the middle of a frame: the run goes on, and the frame
// is taken from its file.
func TestStreamBreaksInsideAFrame(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.file(said("long"))
		b.raw("---BERTH_OUTPUT_START---\n{\"status\":\"succ")
		b.lose()
		time.Sleep(time.Second)
		b.take()
		b.ready()
		b.state(protocol.StateIdle)
		equal(t, "stops", b.stopped(), 0)
		equal(t, "fate", w.fate(seq).Texts, []string{"long"})
	})
}

// fails lets the next n runs fail and returns when they were started.
func (w *world) fails(n int) (at []time.Duration) {
	w.t.Helper()
	start := time.Now()
	for range n {
		for len(w.engine.boxes) == 0 {
			time.Sleep(time.Second)
			synctest.Wait()
		}
		b := w.started()
		at = append(at, time.Since(start))
		b.end(Exit{Code: 1})
		synctest.Wait()
	}
	return at
}

func TestGQ04Backoff(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		equal(t, "runs at", w.fails(3), []time.Duration{0, 5 * time.Second, 15 * time.Second})
	})
}

// GQ-06: see also TestW34GivesUpWithOneNotice.
func TestGQ06GivingUpResetsTheCount(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		w.fails(6)
		time.Sleep(200 * time.Second)
		equal(t, "more runs", len(w.engine.boxes), 0)
		w.say("@Andy again")
		equal(t, "runs at", w.fails(3), []time.Duration{0, 5 * time.Second, 15 * time.Second})
	})
}

func TestGQ18SuccessResetsTheCount(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy hello")
		w.fails(2)
		time.Sleep(10 * time.Second)
		b := w.started()
		b.ready()
		b.turn("hi", "m1")
		w.queue.Close("family")
		b.end(Exit{})
		synctest.Wait()
		w.say("@Andy more")
		equal(t, "runs at", w.fails(2), []time.Duration{0, 5 * time.Second})
	})
}

// GQ-17: a panic in one run frees its slot and ends nobody else; reconciling
// finds the run and its messages again.
func TestGQ17PanicInARun(t *testing.T) {
	play(t, func(w *world) {
		w.engine.bug = "a bug"
		w.say("@Andy hello")
		equal(t, "slots", w.queue.State().Used, 0)
		live, err := w.db.LiveRuns(w.t.Context())
		check(t, err)
		w.queue.Adopt("family", "", func(ctx context.Context, s *queue.Slot) queue.Result {
			return w.runner.Adopt(ctx, s, family, live[0], "", func() {})
		})
		equal(t, "again", w.started().input.Batch, []string{"m1"})
	})
}

type badGateway struct{ err error }

func (g badGateway) Open(berth.Run, berth.Group) (Door, error) { return nil, g.err }

// A run whose folders or way out cannot be opened is not left running with nobody
// to hold it to its time.
func TestAdoptionThatCannotBeCarried(t *testing.T) {
	root := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, root)
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		w.close()
		next := newWorld(t, root)
		defer next.close()
		next.runner.Gateway = badGateway{berth.Errorf(berth.Invalid, "the egress list has too many entries")}
		live, err := next.db.LiveRuns(t.Context())
		check(t, err)
		next.queue.Adopt("family", "", func(ctx context.Context, s *queue.Slot) queue.Result {
			return next.runner.Adopt(ctx, s, family, live[0], b.ID(), func() {})
		})
		synctest.Wait()
		equal(t, "removed", next.engine.remove, []string{b.ID()})
		live, err = next.db.LiveRuns(t.Context())
		check(t, err)
		equal(t, "live runs", len(live), 0)
	})
}

// A way out that cannot be opened is a failure like any other: it is given up in
// the end, and told.
func TestNoWayOutIsCounted(t *testing.T) {
	play(t, func(w *world) {
		w.runner.Gateway = badGateway{berth.Errorf(berth.Unavailable, "no space left on device")}
		seq := w.say("@Andy hello")
		time.Sleep(10 * time.Minute)
		equal(t, "fate", w.fate(seq).State, berth.FateFailed)
		equal(t, "told", len(w.outbox()), 1)
	})
}

// What an earlier run left does not answer a batch whose container never ran.
func TestNothingIsTakenWithoutAContainer(t *testing.T) {
	play(t, func(w *world) {
		w.engine.setFail(berth.Errorf(berth.Denied, "exchanged"))
		w.runner.Requests = lateInbox{w}
		w.send("left over")
		seq := w.say("@Andy hello")
		equal(t, "fate", w.fate(seq).State, berth.FatePending)
	})
}

// lateInbox carries requests out only after the claim.
type lateInbox struct{ *world }

func (l lateInbox) Open(context.Context, berth.Group, *workspace.Group) (Inbox, error) {
	return &late{w: l.world}, nil
}

type late struct {
	w     *world
	looks int
}

func (*late) Close() {}
func (l *late) Drain(ctx context.Context) {
	if l.looks++; l.looks > 1 {
		l.w.Drain(ctx)
	}
}

// choosy is a store that takes no texts.
type choosy struct{ *sqlite.DB }

func (c choosy) Commit(ctx context.Context, p berth.Progress) error {
	if len(p.Out) > 0 {
		return berth.Errorf(berth.Conflict, "no such number")
	}
	return c.DB.Commit(ctx, p)
}

// What the store will never take ends the run, instead of holding its slot for
// ever.
func TestWhatCannotBeStored(t *testing.T) {
	play(t, func(w *world) {
		w.runner.Store = choosy{w.db}
		w.say("@Andy hello")
		b := w.started()
		b.ready()
		b.ack("m1")
		b.print(said("hi"))
		synctest.Wait()
		equal(t, "stops", b.stopped(), 1)
		time.Sleep(backoff[0])
		w.started() // it is tried again as after any failure
	})
}
