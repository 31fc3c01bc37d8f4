package loop

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/agent-runner/internal/emit"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/input"
	"berth/agent-runner/internal/prompt"
	"berth/agent-runner/protocol"
)

const nonce = "nonce"

// script is an engine that does what the test says.
type script func(ctx context.Context, text string, to engine.Turn) error

func (s script) Prompt(ctx context.Context, text string, to engine.Turn) error {
	return s(ctx, text, to)
}
func (script) Close() error { return nil }

// echo answers with the prompt.
func echo(_ context.Context, text string, to engine.Turn) error {
	to.Accept()
	to.Answer(engine.Answer{Text: text})
	return nil
}

// steerable is an engine that takes input mid-turn.
type steerable struct {
	script
	steered chan string
}

func (s steerable) Steer(text string) bool {
	s.steered <- text
	return true
}

// run is a Loop under test. It lives in a synctest bubble, so that "settled" is
// exact and time costs nothing.
type run struct {
	t      *testing.T
	dir    string // the IPC folder
	loop   *Loop
	wake   chan struct{}
	stop   context.CancelCauseFunc
	result chan error
	stderr syncBuffer

	mu    sync.Mutex
	lines []string // frames since the last call of said
	notes []string // of all frames
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// newRun makes a run that has not begun.
func newRun(t *testing.T, dir string, agent engine.Engine) *run {
	r := &run{t: t, dir: dir, wake: make(chan struct{}, 1), result: make(chan error, 1)}
	for _, name := range []string{"input", "frames"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	logger := log.New(&r.stderr, "", 0)
	stdout, w := io.Pipe()
	t.Cleanup(func() { _ = w.Close() })
	go func() {
		for f, err := range (protocol.Stream{Nonce: nonce}).Frames(stdout) {
			r.mu.Lock()
			if f.Note != "" {
				r.notes = append(r.notes, f.Note)
			}
			if err != nil {
				r.lines = append(r.lines, err.Error())
			} else {
				r.lines = append(r.lines, say(f))
			}
			r.mu.Unlock()
		}
	}()
	r.loop = &Loop{
		Input:     protocol.Input{Prompt: "first", Batch: []string{"b1"}},
		Engine:    agent,
		Out:       emit.New(w, filepath.Join(dir, "frames"), "run", nonce, logger),
		Folder:    input.NewFolder(filepath.Join(dir, "input"), logger),
		Wake:      r.wake,
		LeasePath: filepath.Join(dir, protocol.LeaseFile),
		Log:       logger,
	}
	return r
}

// start lets the run begin and settle.
func (r *run) start() {
	ctx, stop := context.WithCancelCause(r.t.Context())
	r.stop = stop
	go func() { r.result <- r.loop.Run(ctx) }()
	synctest.Wait()
}

// say tells a frame in one line.
func say(f protocol.Frame) string {
	line := f.Type
	if f.State != "" {
		line += " " + f.State
	}
	if f.Type == protocol.TypeAck {
		line += " " + strings.Join(f.IDs, ",")
	}
	switch {
	case f.Error != "":
		line += fmt.Sprintf(" error %q", f.Error)
	case f.Result != nil:
		line += fmt.Sprintf(" %q", *f.Result)
	case f.Type == protocol.TypeOutput:
		line += " null"
	}
	for _, more := range []string{f.ErrorClass, f.NewSessionID} {
		if more != "" {
			line += " " + more
		}
	}
	if c := f.Compaction; c != nil {
		line += strings.TrimRight(" "+c.Outcome+" "+c.Reason, " ")
		if c.Archive != "" {
			line += " archived"
		}
	}
	return line
}

// said waits until all is settled and checks the frames since the last call.
func (r *run) said(want ...string) {
	r.t.Helper()
	synctest.Wait()
	r.mu.Lock()
	got := r.lines
	r.lines = nil
	r.mu.Unlock()
	if diff := cmp.Diff(want, got); diff != "" {
		r.t.Fatalf("frames (-want +got):\n%s\nlog:\n%s", diff, &r.stderr)
	}
}

// put writes a message file as the host does, and wakes the loop.
func (r *run) put(seq int64, text, id string) {
	r.t.Helper()
	r.drop(protocol.InputName(seq), fmt.Sprintf(`{"type":"message","text":%q,"id":%q}`, text, id))
	r.ring()
}

func (r *run) drop(name, content string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, "input", name), []byte(content), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

func (r *run) ring() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
	synctest.Wait()
}

func (r *run) waiting() []string {
	entries, err := os.ReadDir(filepath.Join(r.dir, "input"))
	if err != nil {
		r.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// ended checks how the run ended.
func (r *run) ended(want error) {
	r.t.Helper()
	synctest.Wait()
	select {
	case err := <-r.result:
		if !errors.Is(err, want) {
			r.t.Fatalf("run ended with %v, want %v", err, want)
		}
	default:
		r.t.Fatalf("run goes on, want end with %v", want)
	}
}

// closeRun ends an idle run.
func (r *run) closeRun() {
	r.t.Helper()
	r.drop(protocol.CloseFile, "")
	r.ring()
	r.ended(nil)
}

// inBubble runs a test with a run that answers through agent.
func inBubble(t *testing.T, agent engine.Engine, test func(r *run)) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) { test(newRun(t, dir, agent)) })
}

// gated returns an engine whose turns accept at once and end with what the test
// sends. It answers with the prompt.
func gated() (script, chan error) {
	gate := make(chan error)
	return func(ctx context.Context, text string, to engine.Turn) error {
		to.Accept()
		to.Answer(engine.Answer{Text: text})
		select {
		case err := <-gate:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}, gate
}

func TestOrderOfFrames(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		r.loop.Input.SessionID = "s1"
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first" s1`, "state idle")
		r.closeRun()
	})
}

func TestRU02WaitingFilesJoinTheFirstPrompt(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		r.put(2, "third", "m2")
		r.put(1, "second", "m1")
		r.start()
		r.said("ready", "ack b1,m1,m2", "state busy", `output "first\nsecond\nthird"`, "state idle")
		if left := r.waiting(); left != nil {
			t.Errorf("files left: %q", left)
		}
		r.closeRun()
	})
}

func TestRU03StaleCloseIsRemoved(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		r.drop(protocol.CloseFile, "")
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`, "state idle")
		r.closeRun()
	})
}

func TestRU04CloseWhileWaiting(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`, "state idle")
		r.closeRun()
		r.said()
	})
}

func TestRU05CloseDuringTurn(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent, gate := gated()
		r := newRun(t, dir, agent)
		r.start()
		r.drop(protocol.CloseFile, "")
		r.ring()
		r.said("ready", "ack b1", "state busy", `output "first"`)
		gate <- nil
		r.said("state idle")
		r.ended(nil)
	})
}

func TestCloseLetsEarlierMessagesGoFirst(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent, gate := gated()
		r := newRun(t, dir, agent)
		r.start()
		r.drop(protocol.CloseFile, "")
		r.put(1, "more", "m1")
		r.said("ready", "ack b1", "state busy", `output "first"`)
		gate <- nil
		r.said("state idle", "ack m1", "state busy", `output "more"`)
		gate <- nil
		r.said("state idle")
		r.ended(nil)
	})
}

func TestRU06WaitingFilesAreJoined(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent, gate := gated()
		r := newRun(t, dir, agent)
		r.start()
		r.put(2, "c", "m3")
		r.put(1, "b", "m2")
		r.said("ready", "ack b1", "state busy", `output "first"`)
		if got := len(r.waiting()); got != 2 {
			t.Errorf("%d files while busy, want both to stay", got)
		}
		gate <- nil
		r.said("state idle", "ack m2,m3", "state busy", `output "b\nc"`)
		gate <- nil
		r.said("state idle")
		r.closeRun()
	})
}

func TestRU07BrokenFiles(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`, "state idle")
		r.drop(protocol.InputName(1), "{")
		r.drop(protocol.InputName(2), `{"type":"strange"}`)
		r.drop("3.json.tmp", `half`)
		if err := os.Symlink("/etc/hostname", filepath.Join(r.dir, "input", protocol.InputName(3))); err != nil {
			t.Fatal(err)
		}
		r.put(4, "good", "m4")
		r.said("ack m4", "state busy", `output "good"`, "state idle")
		if diff := cmp.Diff([]string{"3.json.tmp"}, r.waiting()); diff != "" {
			t.Errorf("files left (-want +got):\n%s", diff)
		}
		if got := strings.Count(r.stderr.String(), "remove unreadable input"); got != 3 {
			t.Errorf("log names %d broken files, want 3:\n%s", got, &r.stderr)
		}
		r.closeRun()
	})
}

func TestRU08EngineError(t *testing.T) {
	failing := script(func(_ context.Context, _ string, to engine.Turn) error {
		to.Session("s2")
		to.Accept()
		return &engine.Error{Class: protocol.ClassRateLimit, Text: "too much", RetryAfter: time.Minute}
	})
	inBubble(t, failing, func(r *run) {
		r.start()
		r.said("ready", "ack b1", "state busy", `output error "too much" rate_limit s2`)
		r.ended(ErrTurnFailed)
	})
}

func TestErrorBeforeAcceptKeepsTheMessages(t *testing.T) {
	failing := script(func(context.Context, string, engine.Turn) error { return errors.New("no such program") })
	inBubble(t, failing, func(r *run) {
		r.put(1, "more", "m1")
		r.start()
		r.said("ready", `output error "no such program"`)
		r.ended(ErrTurnFailed)
		if got := len(r.waiting()); got != 1 {
			t.Errorf("%d files, want the unconsumed one to stay", got)
		}
	})
}

func TestRU09SeveralAnswersAndSilence(t *testing.T) {
	turns := 0
	agent := script(func(_ context.Context, _ string, to engine.Turn) error {
		to.Session("s1")
		turns++
		if turns == 1 {
			to.Answer(engine.Answer{Text: "a"})
			to.Answer(engine.Answer{Text: "b"})
		}
		return nil
	})
	inBubble(t, agent, func(r *run) {
		r.start()
		r.said("ready", "ack b1", "state busy", `output "a" s1`, `output "b" s1`, "state idle")
		r.put(1, "hush", "m1")
		r.said("ack m1", "state busy", "output null s1", "state idle")
		r.closeRun()
	})
}

func TestInvalidSessionIsNotSent(t *testing.T) {
	agent := script(func(_ context.Context, _ string, to engine.Turn) error {
		to.Session("../../evil")
		to.Answer(engine.Answer{Text: "hi"})
		return nil
	})
	inBubble(t, agent, func(r *run) {
		r.start()
		r.said("ready", "ack b1", "state busy", `output "hi"`, "state idle")
		r.closeRun()
	})
}

func TestScheduledTaskIsMarked(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		r.loop.Input.IsScheduledTask = true
		r.start()
		r.said("ready", "ack b1", "state busy", fmt.Sprintf("output %q", prompt.Scheduled+"first"), "state idle")
		r.closeRun()
	})
}

func TestConsumedMessageNeverRunsTwice(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent, gate := gated()
		r := newRun(t, dir, agent)
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`)
		r.put(7, "first", "b1") // also while busy
		r.said("ack b1")
		gate <- nil
		r.said("state idle")
		r.put(1, "x", "m1")
		r.said("ack m1", "state busy", `output "x"`)
		gate <- nil
		r.said("state idle")
		r.put(1, "x", "m1")
		r.said("ack m1")
		// Two copies at once, and one that was never seen.
		r.drop(protocol.InputName(3), `{"type":"message","text":"y","id":"m2"}`)
		r.drop(protocol.InputName(4), `{"type":"message","text":"y","id":"m2"}`)
		r.ring()
		r.said("ack m2", "state busy", `output "y"`)
		gate <- nil
		r.said("state idle", "ack m2")
		if left := r.waiting(); left != nil {
			t.Errorf("files left: %q", left)
		}
		r.closeRun()
	})
}

func TestSlowAcceptKeepsFilesUntilThen(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		accept := make(chan struct{})
		r := newRun(t, dir, script(func(ctx context.Context, text string, to engine.Turn) error {
			<-accept
			return echo(ctx, text, to)
		}))
		r.put(1, "second", "m1")
		r.start()
		r.put(2, "again", "m1") // a copy under another name, before the ack
		r.said("ready")
		if got := len(r.waiting()); got != 2 {
			t.Errorf("%d files before the engine has them, want 2", got)
		}
		accept <- struct{}{}
		r.said("ack b1,m1", "state busy", `output "first\nsecond"`, "state idle", "ack m1")
		r.closeRun()
	})
}

func TestMessageWithoutID(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`, "state idle")
		for range 2 {
			r.put(1, "old host", "")
			r.said("ack ", "state busy", `output "old host"`, "state idle")
		}
		r.closeRun()
	})
}

func TestSync(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent, gate := gated()
		r := newRun(t, dir, agent)
		r.drop("00-sync.json", `{"type":"sync"}`)
		r.start()
		r.said("ready", "ready", "ack ", "state busy", "ack b1", "state busy", `output "first"`)
		r.drop("00-sync.json", `{"type":"sync"}`)
		r.ring()
		r.said("ready", "ack b1", "state busy")
		gate <- nil
		r.said("state idle")
		r.drop("00-sync.json", `{"type":"sync"}`)
		r.ring()
		r.said("ready", "ack b1", "state idle")
		if left := r.waiting(); left != nil {
			t.Errorf("files left: %q", left)
		}
		r.closeRun()
	})
}

func TestSyncRepeatsTheLatestIDs(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		var want []string
		for i := range protocol.MaxSyncedAcks + 10 {
			id := fmt.Sprintf("b%d", i)
			r.loop.Input.Batch = append(r.loop.Input.Batch, id)
			if i >= 10 {
				want = append(want, id)
			}
		}
		r.start()
		r.said("ready", "ack "+strings.Join(r.loop.Input.Batch, ","), "state busy", `output "first"`, "state idle")
		r.drop("sync.json", `{"type":"sync"}`)
		r.ring()
		r.said("ready", "ack "+strings.Join(want, ","), "state idle")
		r.closeRun()
	})
}

func TestConsumedIDsAreBounded(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		for i := range maxConsumed + 5 {
			r.loop.Input.Batch = append(r.loop.Input.Batch, fmt.Sprint(i))
		}
		r.start()
		r.closeRun()
		if got := len(r.loop.consumed); got != maxConsumed {
			t.Errorf("%d ids remembered, want %d", got, maxConsumed)
		}
	})
}

func TestSteerer(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent, gate := gated()
		steered := make(chan string, 1)
		r := newRun(t, dir, steerable{agent, steered})
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`)
		r.put(1, "by the way", "m1")
		r.said("ack m1")
		if got := <-steered; got != "by the way" {
			t.Errorf("steered %q", got)
		}
		gate <- nil
		r.said("state idle")
		r.closeRun()
	})
}

func TestLookAgainFindsWhatNoEventAnnounced(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`, "state idle")
		r.drop(protocol.InputName(1), `{"type":"message","text":"x","id":"m1"}`)
		time.Sleep(protocol.LookAgain - 1)
		r.said()
		time.Sleep(time.Nanosecond)
		r.said("ack m1", "state busy", `output "x"`, "state idle")
		r.closeRun()
	})
}

func TestHeartbeatWhileBusy(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent, gate := gated()
		r := newRun(t, dir, agent)
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`)
		time.Sleep(2 * protocol.Heartbeat)
		r.said("heartbeat", "heartbeat")
		gate <- nil
		time.Sleep(2 * protocol.Heartbeat)
		r.said("state idle")
		r.closeRun()
	})
}

// touch touches the lease as a host does whose clock is ahead by some time.
func (r *run) touch(ahead time.Duration) {
	r.t.Helper()
	if err := os.WriteFile(r.loop.LeasePath, nil, 0o600); err != nil {
		r.t.Fatal(err)
	}
	at := time.Now().Add(ahead)
	if err := os.Chtimes(r.loop.LeasePath, at, at); err != nil {
		r.t.Fatal(err)
	}
}

func TestLease(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent, gate := gated()
		r := newRun(t, dir, agent)
		r.touch(0)
		r.start()
		time.Sleep(protocol.LeaseExpiry - time.Minute)
		gate <- nil
		synctest.Wait()
		r.touch(0)
		time.Sleep(protocol.LeaseExpiry)
		synctest.Wait()
		if len(r.result) != 0 {
			t.Fatalf("ended with a fresh lease:\n%s", &r.stderr)
		}
		time.Sleep(2 * protocol.LookAgain)
		r.ended(nil)
		if !strings.Contains(r.stderr.String(), "lease") {
			t.Errorf("log does not say why:\n%s", &r.stderr)
		}
	})
}

func TestLeaseExpiredDuringTurn(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent, gate := gated()
		r := newRun(t, dir, agent)
		r.touch(0)
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`)
		time.Sleep(protocol.LeaseExpiry + 2*protocol.LookAgain)
		synctest.Wait()
		if len(r.result) != 0 {
			t.Fatal("ended in the middle of a turn")
		}
		gate <- nil
		r.ended(nil)
	})
}

// A clock that is set does not end a run whose host lives.
func TestLeaseWhenTheClockJumps(t *testing.T) {
	for _, jump := range []time.Duration{time.Hour, -time.Hour} {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			agent, gate := gated()
			r := newRun(t, dir, agent)
			r.touch(jump) // before the jump, or not by our clock
			r.start()
			gate <- nil
			for range 3 {
				time.Sleep(protocol.LeaseExpiry - protocol.LookAgain)
				r.touch(0)
			}
			synctest.Wait()
			if len(r.result) != 0 {
				t.Fatalf("ended after a jump of %v:\n%s", jump, &r.stderr)
			}
			time.Sleep(protocol.LeaseExpiry + 2*protocol.LookAgain)
			r.ended(nil)
		})
	}
}

var errStop = errors.New("stopped by a test")

func TestStopWhileIdle(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		r.start()
		r.stop(errStop)
		r.ended(errStop)
	})
}

func TestStopCancelsTheTurn(t *testing.T) {
	agent := script(func(ctx context.Context, _ string, to engine.Turn) error {
		to.Accept()
		<-ctx.Done()
		to.Answer(engine.Answer{Text: "last words"})
		return ctx.Err()
	})
	inBubble(t, agent, func(r *run) {
		r.start()
		r.stop(errStop)
		r.said("ready", "ack b1", "state busy", `output "last words"`)
		r.ended(errStop)
	})
}

func TestStopLeavesATurnThatHangs(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		defer close(gate)
		r := newRun(t, dir, script(func(context.Context, string, engine.Turn) error { <-gate; return nil }))
		r.start()
		r.stop(errStop)
		time.Sleep(StopGrace - 1)
		synctest.Wait()
		if len(r.result) != 0 {
			t.Fatal("ended before the turn had its moment")
		}
		time.Sleep(time.Nanosecond)
		r.ended(ErrStillBusy)
	})
}
