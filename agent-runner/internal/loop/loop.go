// Package loop carries one run: it gives prompts to the engine, one turn after
// the other, and tells the host what became of them.
package loop

import (
	"context"
	"errors"
	"io/fs"
	"log"
	"os"
	"slices"
	"strings"
	"time"

	"berth/agent-runner/internal/emit"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/input"
	"berth/agent-runner/internal/prompt"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/internal/transcript"
	"berth/agent-runner/protocol"
)

// StopGrace is how long a turn may take to end after it was cancelled.
const StopGrace = 2 * time.Second

// maxConsumed is how many ids of consumed messages are remembered.
const maxConsumed = 4096

// maxStops is how many ids of messages are remembered that are to be stopped
// before they came.
const maxStops = 64

// ErrTurnFailed is the end of a run whose engine failed. The host has been told.
var ErrTurnFailed = errors.New("the turn failed")

// ErrStillBusy is joined to the error of a run whose turn did not stop in time.
var ErrStillBusy = errors.New("the turn did not stop in time")

// errStopped is the cause of the end of a turn that the host stopped.
var errStopped = errors.New("the host stopped the turn")

// Loop is one run. Fill the fields, then call Run once.
type Loop struct {
	Input     protocol.Input
	Engine    engine.Engine
	Out       *emit.Emitter
	Folder    *input.Folder
	Wake      <-chan struct{} // says that the folder has something new; may be nil
	LookAgain time.Duration   // between looks that nothing announced; 0 means protocol.LookAgain
	LeasePath string          // the host's lease
	Children  *reap.Children  // starts and waits for the input's script
	WorkDir   string          // where that runs
	Home      string
	Said      *transcript.Keeper // may be nil
	Log       *log.Logger

	// What follows belongs to the goroutine of Run.

	judge    func(ctx context.Context, script string) (verdict, error) // nil: runScript
	session  string
	script   string   // that the next turn begins with
	consumed []string // ids, oldest first
	stops    []string // ids of messages whose turn is to be stopped when it begins
	shaken   bool     // the last turn was stopped
	idle     bool     // nothing to do; false also before the first turn
	turn     *turn    // nil between turns
	calls    chan call
	over     chan struct{} // closed when Run returns
	touched  time.Time     // the lease's time stamp, by the host's clock
	seen     time.Time     // when it was last seen to change
}

// turn is the turn under way. It is the engine.Turn that the engine talks to;
// its methods run in the goroutine of Run.
type turn struct {
	loop     *Loop
	ids      []string // acknowledged once the engine has the prompt
	files    []string // removed before that
	texts    []string // the prompt
	compacts bool     // the turn is for a compaction, and has no prompt
	outcome  engine.Compaction
	accepted bool
	answered bool
	note     string // why there is no answer
	ended    chan error
	beat     *time.Ticker
	cancel   context.CancelCauseFunc
	stopped  *time.Timer // nil: it was not; fires when it should have ended
}

type call struct {
	do   func()
	done chan struct{}
}

// Run carries the run to its end: nil when the host closed it or is gone, or
// stopped a turn without which the engine cannot go on; ErrTurnFailed, ErrStillBusy,
// or the cause of ctx's end.
func (l *Loop) Run(ctx context.Context) error {
	l.session = l.Input.SessionID
	l.calls, l.over = make(chan call), make(chan struct{})
	defer close(l.over)

	// Before ready: after it, a request to close is meant for this run.
	l.Folder.RemoveClose()
	l.Out.Emit(protocol.Frame{Type: protocol.TypeReady})

	text := l.Input.Prompt
	if l.Input.IsScheduledTask {
		text = prompt.Scheduled + text
	}
	waiting, _ := l.look()
	l.script = l.Input.Script
	if l.Input.Compact {
		text, waiting = "", []input.File{{Message: protocol.Message{Compact: true}}} // what waits is looked at again
	}
	l.begin(ctx, text, l.Input.Batch, waiting)

	again := time.NewTicker(orElse(l.LookAgain, protocol.LookAgain))
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return l.abandon(ctx)
		case c := <-l.calls:
			l.serve(c)
			continue
		case <-l.turn.heartbeat():
			l.Out.Emit(protocol.Frame{Type: protocol.TypeHeartbeat})
			continue
		case err := <-l.turn.end():
			if err != nil && ctx.Err() != nil {
				return context.Cause(ctx) // cancelled: no failure of the engine
			}
			if err != nil && l.shaken && !l.turn.accepted {
				l.turn.rest()
				l.Log.Printf("the engine did not outlive that its last turn was stopped, and the message is left to the next run: %v", err)
				return nil
			}
			if err != nil && l.turn.stopped != nil && !errors.Is(err, errStopped) {
				l.Log.Printf("the engine cannot go on after the turn was stopped: %v", err)
				l.leave()
				return nil
			}
			if !l.finish(err) {
				return ErrTurnFailed
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
		case <-l.turn.late():
			l.Log.Printf("the turn goes on %v after it was stopped: this run ends", StopGrace)
			l.leave()
			return errors.Join(errStopped, ErrStillBusy)
		case <-l.Wake:
		case <-again.C:
		}

		waiting, closing := l.look()
		orphaned := l.leaseExpired()
		switch {
		case l.turn != nil:
			l.steer(waiting)
		case len(waiting) > 0:
			l.begin(ctx, "", nil, waiting)
		case closing:
			return nil
		case orphaned:
			l.Log.Printf("the host has not touched its lease for %v: this run ends", protocol.LeaseExpiry)
			return nil
		}
	}
}

// look returns the messages that wait for a turn. It answers a sync, and
// acknowledges again what was consumed before and written again since.
func (l *Loop) look() (waiting []input.File, closing bool) {
	files, closing := l.Folder.Look()
	for _, file := range files {
		switch {
		case l.turn != nil && slices.Contains(l.turn.files, file.Name): // the engine has yet to accept it
		case file.Type == protocol.TypeSync:
			l.Folder.Remove(file.Name)
			l.sync()
		case file.Type == protocol.TypeStop:
			l.Folder.Remove(file.Name)
			l.stop(file.ID)
		case file.ID != "" && slices.Contains(l.consumed, file.ID):
			l.Folder.Remove(file.Name)
			l.ack(file.ID)
		case file.ID != "" && (l.pending(file.ID) || slices.ContainsFunc(waiting, func(w input.File) bool { return w.ID == file.ID })):
			// A copy: it stays until the other one is consumed.
		default:
			waiting = append(waiting, file)
		}
	}
	return waiting, closing
}

// stop ends the turn that has a message, or any with an empty id. If the message
// has yet to come, its turn ends when it begins.
func (l *Loop) stop(id string) {
	switch {
	case l.turn != nil && (id == "" || slices.Contains(l.turn.ids, id)):
		l.turn.stop()
	case id != "" && !slices.Contains(l.consumed, id):
		l.stops = append(l.stops, id)
		l.stops = slices.Delete(l.stops, 0, max(0, len(l.stops)-maxStops))
	}
}

func (t *turn) stop() {
	if t.stopped == nil {
		t.stopped = time.NewTimer(StopGrace)
		t.cancel(errStopped)
	}
}

// pending reports whether the turn under way has the message but no ack yet.
func (l *Loop) pending(id string) bool {
	return l.turn != nil && !l.turn.accepted && slices.Contains(l.turn.ids, id)
}

// sync tells a host that lost sight of the stream where this run stands.
func (l *Loop) sync() {
	l.Out.Emit(protocol.Frame{Type: protocol.TypeReady})
	l.ack(l.consumed[max(0, len(l.consumed)-protocol.MaxSyncedAcks):]...)
	state := protocol.StateBusy
	if l.idle {
		state = protocol.StateIdle
	}
	l.Out.Emit(protocol.Frame{Type: protocol.TypeState, State: state})
}

// begin starts a turn with text and what waits in the folder. A compaction has a
// turn of its own; what comes after it waits.
func (l *Loop) begin(ctx context.Context, text string, ids []string, waiting []input.File) {
	t := &turn{loop: l, ids: slices.Clone(ids), ended: make(chan error, 1), beat: time.NewTicker(protocol.Heartbeat)}
	if text != "" {
		t.texts = append(t.texts, text)
	}
	for _, file := range waiting {
		if file.Compact && len(t.texts) > 0 {
			break
		}
		if file.Name != "" {
			t.files = append(t.files, file.Name)
		}
		t.ids = append(t.ids, idsOf(file)...)
		if file.Compact {
			t.compacts = true
			break
		}
		t.texts = append(t.texts, file.Text)
	}
	ctx, t.cancel = context.WithCancelCause(ctx)
	l.turn, l.idle = t, false
	if slices.ContainsFunc(t.ids, func(id string) bool { return slices.Contains(l.stops, id) }) {
		t.stop()
	}
	l.stops = nil // whatever else they name does not come any more
	if t.compacts {
		go func() { t.ended <- l.compact(ctx, t) }()
		return
	}
	script := l.script
	l.script = ""
	go func() { t.ended <- l.ask(ctx, script, strings.Join(t.texts, "\n"), t) }()
}

// finish ends the turn with its last frames and reports whether the run goes on.
func (l *Loop) finish(err error) bool {
	t := l.turn
	t.rest()
	if l.shaken = t.stopped != nil; l.shaken {
		t.note, err = "it was stopped", nil
	}
	if err != nil {
		f := engine.Failed(err)
		f.NewSessionID = l.session
		l.Out.Emit(f)
		l.turn = nil
		return false
	}
	t.accept()
	archive := l.archive(t)
	if !t.answered {
		f := protocol.Frame{Type: protocol.TypeOutput, Status: protocol.StatusSuccess, NewSessionID: l.session, Note: t.note}
		if t.outcome.Outcome != "" {
			f.Compaction = &protocol.Compaction{Outcome: t.outcome.Outcome, Archive: archive, Reason: clip(t.outcome.Reason)}
		}
		l.Out.Emit(f)
	}
	l.turn, l.idle = nil, true
	l.Out.Emit(protocol.Frame{Type: protocol.TypeState, State: protocol.StateIdle})
	return true
}

// leave ends a stopped turn with which the run ends too. The host gets the session,
// which the next run continues.
func (l *Loop) leave() {
	l.turn.rest()
	l.turn.accept()
	l.Out.Emit(protocol.Frame{Type: protocol.TypeOutput, Status: protocol.StatusSuccess, NewSessionID: l.session, Note: "it was stopped"})
}

// rest ends what the turn holds.
func (t *turn) rest() {
	t.beat.Stop()
	t.cancel(nil)
	if t.stopped != nil {
		t.stopped.Stop()
	}
}

// steer gives messages to the turn under way, if the engine can take them.
func (l *Loop) steer(waiting []input.File) {
	steerer, ok := l.Engine.(engine.Steerer)
	if !ok || !l.turn.accepted || l.turn.stopped != nil {
		return
	}
	for _, file := range waiting {
		if file.Compact || !steerer.Steer(file.Text) {
			return // the order stays: what follows waits too
		}
		l.Said.Asked(file.Text)
		l.turn.ids = append(l.turn.ids, idsOf(file)...)
		l.consume([]string{file.Name}, idsOf(file)...)
	}
}

// consume records that the engine has messages. An id is remembered before its
// file goes and acknowledged after: the host may write the file again until it
// sees the ack, and the message must not run twice.
func (l *Loop) consume(files []string, ids ...string) {
	l.consumed = append(l.consumed, ids...)
	l.consumed = slices.Delete(l.consumed, 0, max(0, len(l.consumed)-maxConsumed))
	for _, name := range files {
		l.Folder.Remove(name)
	}
	l.ack(ids...)
}

// idsOf returns the file's id, if it has one: an old host writes none.
func idsOf(file input.File) []string {
	if file.ID == "" {
		return nil
	}
	return []string{file.ID}
}

func (l *Loop) ack(ids ...string) {
	l.Out.Emit(protocol.Frame{Type: protocol.TypeAck, IDs: slices.Clone(ids)})
}

// abandon gives the cancelled turn a moment to stop.
func (l *Loop) abandon(ctx context.Context) error {
	cause := context.Cause(ctx)
	if l.turn == nil {
		return cause
	}
	defer l.turn.rest()
	grace := time.NewTimer(StopGrace)
	defer grace.Stop()
	for {
		select {
		case c := <-l.calls:
			l.serve(c)
		case <-l.turn.ended:
			return cause
		case <-grace.C:
			return errors.Join(cause, ErrStillBusy)
		}
	}
}

// leaseExpired reports whether the host has not touched its lease for too long.
// What counts is when it was seen to change: the clock may be set meanwhile.
func (l *Loop) leaseExpired() bool {
	info, err := os.Lstat(l.LeasePath)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			l.Log.Printf("look at the lease: %v", err)
		}
		return false // a host without leases
	}
	if l.seen.IsZero() || !info.ModTime().Equal(l.touched) {
		l.touched, l.seen = info.ModTime(), time.Now()
	}
	return time.Since(l.seen) > protocol.LeaseExpiry
}

// do runs f in the goroutine of Run and returns when it is done, or when the
// run is over.
func (l *Loop) do(f func()) {
	c := call{do: f, done: make(chan struct{})}
	select {
	case l.calls <- c:
		<-c.done
	case <-l.over:
	}
}

func (l *Loop) serve(c call) {
	c.do()
	close(c.done)
}

// heartbeat, end and late return nil, which blocks, while there is no turn.

func (t *turn) heartbeat() <-chan time.Time {
	if t == nil {
		return nil
	}
	return t.beat.C
}

func (t *turn) end() <-chan error {
	if t == nil {
		return nil
	}
	return t.ended
}

func (t *turn) late() <-chan time.Time {
	if t == nil || t.stopped == nil {
		return nil
	}
	return t.stopped.C
}

// Accept implements engine.Turn.
func (t *turn) Accept() { t.loop.do(t.accept) }

// Session implements engine.Turn.
func (t *turn) Session(id string) {
	t.loop.do(func() {
		if !protocol.ValidSessionID(id) { // the host would refuse the whole frame
			t.loop.Log.Printf("the engine named a session %.64q, which is not a valid id", id)
			return
		}
		t.loop.session = id
		t.loop.Said.Session(id)
	})
}

// Answer implements engine.Turn.
func (t *turn) Answer(a engine.Answer) {
	t.loop.do(func() {
		t.accept()
		t.answered = true
		t.loop.Said.Answered(a.Text)
		t.loop.Out.Emit(protocol.Frame{
			Type:         protocol.TypeOutput,
			Status:       protocol.StatusSuccess,
			Result:       new(protocol.Text(a.Text)),
			NewSessionID: t.loop.session,
			Usage:        a.Usage,
		})
	})
}

func (t *turn) accept() {
	if t.accepted {
		return
	}
	t.accepted = true
	if !t.compacts {
		t.loop.Said.Asked(strings.Join(t.texts, "\n"))
	}
	t.loop.consume(t.files, t.ids...)
	t.loop.Out.Emit(protocol.Frame{Type: protocol.TypeState, State: protocol.StateBusy})
}

func orElse(d, fallback time.Duration) time.Duration {
	if d == 0 {
		return fallback
	}
	return d
}
