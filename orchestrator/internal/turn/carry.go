package turn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
	"berth/orchestrator/internal/queue"
)

// event is what the reader of the stream found.
type event struct {
	frame  protocol.Frame
	err    error
	lost   bool // the stream broke
	resync bool // it is open again
}

// carry serves a started run until its container is gone or ctx ends.
func (c *carrier) carry(ctx context.Context) queue.Result {
	var wg sync.WaitGroup
	work, stop := context.WithCancel(ctx)
	defer func() {
		stop()
		c.box.Close()
		wg.Wait()
	}()

	var exit Exit
	exited := make(chan struct{})
	wg.Go(func() {
		if e, err := c.box.Wait(work); err == nil {
			exit = e
			close(exited)
		}
	})
	events := make(chan event)
	wg.Go(func() { c.read(work, exited, events) })

	l := newLoop(work, c, &wg)
	defer l.end()
	wg.Go(func() { c.touchLease(work) })
	typing := time.NewTicker(tellInterval)
	defer typing.Stop()

	if c.adopted {
		c.log.Info("run adopted", zap.String("container", c.box.ID()))
		l.resync()
	} else {
		c.log.Info("run started", zap.String("container", c.box.ID()))
		c.show(berth.RunBusy)
	}
	l.beginTask()
	closing := c.slot.Closing()
	for {
		l.watch()
		select {
		case e, ok := <-events:
			if !ok {
				events = nil // the container has exited, or is about to be seen to have
				continue
			}
			l.handle(e)
		case <-c.slot.Wake():
			l.followUp()
		case <-c.slot.Interrupted():
			l.interrupt()
		case <-l.halt.C:
			l.tooLate()
		case <-closing:
			closing = nil
			l.close()
		case <-l.closeAgain.C:
			if c.run.State == berth.RunClosing {
				l.writeClose()
			}
		case <-l.escalate.C:
			l.stop()
		case <-l.look.C:
			select {
			case e, ok := <-events: // it spoke while nobody had the time to listen
				if ok {
					l.handle(e)
				} else {
					events = nil
				}
			default:
				l.stopIfStuck()
			}
		case <-l.result.C:
			c.slot.Done()
		case <-l.limit.C:
			l.fail(&failure{text: fmt.Sprintf("the task took longer than %v: timed out", l.taskTimeout())})
			l.stop()
		case <-typing.C:
			c.tellTyping(c.run.State == berth.RunBusy)
		case <-ctx.Done():
			c.log.Info("run left to the next daemon", zap.String("state", string(c.run.State)))
			return queue.Result{}
		case <-exited:
			l.drain(events)
			// Only when the container is gone may the slot be free.
			if !l.persist("remove the container", c.box.Remove) {
				return queue.Result{}
			}
			return c.finish(ctx, exit, nil)
		}
	}
}

// touchLease tells the runner until ctx ends that the host lives, also while the
// run waits for the store.
func (c *carrier) touchLease(ctx context.Context) {
	lease := time.NewTicker(protocol.LeaseInterval)
	defer lease.Stop()
	for {
		select {
		case <-lease.C:
			if err := c.files.TouchLease(); err != nil {
				c.log.Warn("touch the lease", zap.Error(err))
			}
		case <-ctx.Done():
			return
		}
	}
}

// older reports whether the image's runner speaks no protocol of ours. Of a container
// that is gone nobody knows.
func (c *carrier) older() bool { return c.box != nil && c.box.Marker() != protocol.DefaultMarker }

// read turns the streams into events until the container exits. A stream that
// breaks before is opened anew.
func (c *carrier) read(ctx context.Context, exited <-chan struct{}, out chan<- event) {
	defer close(out)
	var errStream sync.WaitGroup
	defer errStream.Wait()
	defer func() {
		if p := recover(); p != nil { // nobody would hear the container any more
			c.log.Error("panic in a run", zap.Any("panic", p), zap.Stack("stack"))
			_ = c.box.Stop(ctx)
		}
	}()
	send := func(e event) bool {
		select {
		case out <- e:
			return true
		case <-ctx.Done():
			return false
		}
	}
	stream := protocol.Stream{Marker: c.box.Marker(), Nonce: c.run.Nonce, Log: c.runLog}
	if c.older() {
		stream.Nonce = ""
	}
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		errStream.Go(func() { io.Copy(io.MultiWriter(c.runLog, &c.stderr), c.box.Stderr()) })
		for f, err := range stream.Frames(c.box.Stdout()) {
			if !send(event{frame: f, err: err}) {
				return
			}
		}
		errStream.Wait()
		if !send(event{lost: true}) {
			return
		}
		for open := false; !open; {
			select {
			case <-exited:
				return
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
			if err := c.box.Reattach(ctx); err != nil {
				c.log.Debug("open the streams anew", zap.Error(err))
				pause = min(2*pause, 5*time.Second)
				continue
			}
			open = true
		}
		if !send(event{resync: true}) {
			return
		}
	}
}

// loop is the single goroutine that moves a run through its states.
type loop struct {
	*carrier
	ctx        context.Context
	wg         *sync.WaitGroup
	look       *time.Timer // for signs of life
	signs      signs
	given      time.Time // when the runner was last given a batch
	closeAgain *time.Ticker
	escalate   *time.Timer
	result     *time.Timer // runs from the first result of a task
	limit      *time.Timer // of a task's run
	halt       *time.Timer // for a turn to end that was interrupted
	syncing    bool        // a sync is under way; what it does not acknowledge is sent again
	said       int64       // bytes that an older runner's answers cost the store
}

func newLoop(ctx context.Context, c *carrier, wg *sync.WaitGroup) *loop {
	now := time.Now()
	l := &loop{
		carrier: c, ctx: ctx, wg: wg, signs: signs{started: now, open: now, ceiling: c.timeout()}, given: now,
		look: time.NewTimer(c.timeout()), closeAgain: time.NewTicker(protocol.CloseReassert),
	}
	for _, timer := range []**time.Timer{&l.escalate, &l.result, &l.limit, &l.halt} {
		*timer = time.NewTimer(time.Hour)
		(*timer).Stop()
	}
	return l
}

func (l *loop) end() {
	l.look.Stop()
	l.closeAgain.Stop()
	l.escalate.Stop()
	l.result.Stop()
	l.limit.Stop()
	l.halt.Stop()
}

// persist is carrier.persist for the life of the loop.
func (l *loop) persist(what string, do func(context.Context) error) bool {
	return l.carrier.persist(l.ctx, what, do)
}

func (l *loop) handle(e event) {
	if e.lost {
		l.signs.open = time.Time{}
		return
	}
	if e.resync {
		l.signs.open = time.Now()
		l.resync()
		return
	}
	if broken, ok := errors.AsType[*protocol.FrameError](e.err); ok {
		fmt.Fprintf(l.runLog, "berth: %v\n", broken)
		l.fail(&failure{text: broken.Error()})
		if l.run.State != berth.RunStopping {
			l.stop()
		}
		return
	}
	if e.err != nil {
		l.log.Debug("read the stream", zap.Error(e.err))
		return
	}
	f := e.frame
	if f.Seq > l.run.LastSeq+1 {
		l.collect(f.Seq) // something between was printed while nobody listened
	}
	l.take(f)
}

// take acts on one frame. Each sequence number counts once.
func (l *loop) take(f protocol.Frame) {
	if f.Seq == 0 {
		f.Seq = l.run.LastSeq + 1 // an older runner
	}
	if f.Seq <= l.run.LastSeq {
		l.drop(f.Seq)
		return
	}
	l.run.LastSeq = f.Seq
	l.signs.heard = time.Now()
	switch f.Type {
	case protocol.TypeReady:
		if !l.ready {
			l.ready, l.signs.ready = true, l.signs.heard
		}
	case protocol.TypeAck:
		l.acknowledge(f.IDs)
	case protocol.TypeState:
		l.state(f.State)
	case protocol.TypeHeartbeat:
	default:
		l.output(f)
	}
}

// acknowledge notes which batches the runner has taken.
func (l *loop) acknowledge(ids []string) {
	var acked []string
	for i := range l.batches {
		b := &l.batches[i]
		if b.State == berth.BatchSent && slices.Contains(ids, b.AckID) {
			b.State = berth.BatchConsumed
			acked = append(acked, b.AckID)
		}
	}
	l.compactionTaken(ids)
	if len(acked) > 0 {
		l.commit(berth.Progress{RunID: l.run.ID, Acked: acked})
		crash.At(crash.Consumed)
	}
}

// implied notes what an output shows to be taken, though no ack said so.
func (l *loop) implied() []string {
	acked := l.taken()
	for i := range l.batches {
		if slices.Contains(acked, l.batches[i].AckID) {
			l.batches[i].State = berth.BatchConsumed
		}
	}
	return acked
}

func (l *loop) state(state string) {
	if l.syncing {
		l.syncing = false
		l.resend()
	}
	ending := l.run.State == berth.RunClosing || l.run.State == berth.RunStopping
	switch {
	case l.failure != nil: // whatever it says, this turn did not end well
	case state == protocol.StateIdle:
		l.halt.Stop()
		l.compactionRests()
		if l.turnEnded(berth.Progress{RunID: l.run.ID}) && !ending {
			l.rest()
		}
	case !ending && l.run.State != berth.RunBusy:
		l.slot.Working()
		l.show(berth.RunBusy)
	}
}

// turnEnded commits p as the end of a turn.
func (l *loop) turnEnded(p berth.Progress) bool {
	p.TurnEnded = true
	l.inbox.Drain(l.ctx) // what the agent sent in this turn must not answer the next one
	if !l.commit(p) {
		return false
	}
	crash.At(crash.TurnEnded)
	l.batches = slices.DeleteFunc(l.batches, func(b berth.Batch) bool { return b.State == berth.BatchConsumed })
	return true
}

// rest makes the run idle, if nothing that it was given is still on its way.
func (l *loop) rest() {
	if len(l.batches) > 0 || l.failure != nil || !l.taskRests() || l.compact() {
		return
	}
	l.show(berth.RunIdle)
	l.slot.Idle()
}

// output commits a result or an error.
func (l *loop) output(f protocol.Frame) {
	p := berth.Progress{RunID: l.run.ID, Seq: f.Seq, Session: f.NewSessionID, Acked: l.implied(), Summary: f.Note, Spoke: f.Status == protocol.StatusSuccess}
	if l.ownSession() || l.slot.Renewed() {
		p.Session = ""
	}
	if f.Usage != nil {
		p.InputTokens, p.OutputTokens = f.Usage.InputTokens, f.Usage.OutputTokens
	}
	if f.Result != nil {
		visible := Visible(string(*f.Result))
		p.Summary = visible
		if l.task.IsHeartbeat() && l.ownSession() {
			p.Found = found(string(*f.Result))
		}
		for i, text := range Split(visible) {
			p.Out = append(p.Out, berth.Outgoing{
				Key:  "run/" + l.run.ID + "/" + strconv.FormatInt(f.Seq, 10) + "/" + strconv.Itoa(i),
				Kind: berth.OutAnswer, Text: text, MessageID: berth.NewID(10), CreatedAt: time.Now(),
			})
		}
	}
	if l.older() && l.tooMuch(p) {
		return
	}
	crash.At(crash.Printed)
	if f.Compaction != nil {
		l.told(compacted(*f.Compaction)) // before the frame counts as taken: it is told of once
	}
	if len(p.Out) > 0 {
		l.inbox.Drain(l.ctx) // what the agent sent before comes before
	}
	old := (l.older() || !l.ready && !l.adopted) && f.Status == protocol.StatusSuccess // an older runner says no more than this
	stored := false
	if old {
		l.told(compactUnsaid)
		stored = l.turnEnded(p)
	} else {
		stored = l.commit(p)
	}
	if !stored {
		return
	}
	crash.At(crash.Committed)
	l.drop(f.Seq)
	if f.Status == protocol.StatusSuccess {
		l.taskSpoke()
	}
	if f.Status == protocol.StatusError {
		l.fail(&failure{text: f.Error, class: f.ErrorClass, retryAfter: time.Duration(f.RetryAfterMS) * time.Millisecond})
		l.close()
		return
	}
	if old {
		l.rest()
	}
}

// commit stores p. While the store fails, for example because the disk is full,
// nothing else could be done for the run anyway. It reports false if the daemon
// shut down before.
func (l *loop) commit(p berth.Progress) bool {
	return l.persist("commit a frame", func(ctx context.Context) error {
		err := l.Store.Commit(context.WithoutCancel(ctx), p)
		switch kind(err) { // trying again cannot help
		case berth.NotFound: // the run is over
			l.log.Error("commit a frame", zap.Error(err))
			return nil
		case berth.Conflict:
			l.log.Error("commit a frame", zap.Error(err))
			l.fail(&failure{text: fmt.Sprintf("what the container said cannot be stored: %v", err)})
			if l.run.State != berth.RunStopping {
				l.stop()
			}
			return nil
		}
		return err
	})
}

// drop removes a canonical frame that is committed.
func (l *loop) drop(seq int64) {
	if err := l.files.RemoveFrame(seq); err != nil {
		l.log.Warn("remove a frame file", zap.Error(err))
	}
}

// collect takes the canonical frames that the stream did not bring, up to but
// not including the sequence number before; 0 means all.
func (l *loop) collect(before int64) {
	names, err := l.files.Frames()
	if err != nil {
		l.log.Warn("list the frame files", zap.Error(err))
	}
	unreadable := 0
	for _, name := range names {
		if before > 0 && name >= protocol.FrameName(before) {
			return
		}
		if name <= protocol.FrameName(l.run.LastSeq) {
			continue // committed; its removal was interrupted
		}
		data, err := l.files.ReadFrame(name)
		if err != nil {
			if unreadable++; unreadable == 1 { // a container can make as many as it likes
				l.log.Warn("read a frame file", zap.String("file", name), zap.Error(err))
			}
			continue
		}
		f, err := protocol.Unseal(data, l.run.Nonce)
		if err != nil || protocol.FrameName(f.Seq) != name {
			fmt.Fprintf(l.runLog, "berth: frame file %q is not the runner's own\n", name)
			continue
		}
		l.take(f)
	}
}

// resync finds out what happened while nobody listened.
func (l *loop) resync() {
	if l.older() { // it could not say; what it owes an answer is in the store
		l.told(compactUnsaid)
		l.rest()
		return
	}
	l.collect(0)
	l.syncing = true
	data, err := protocol.Marshal(protocol.Message{Type: protocol.TypeSync})
	if err == nil {
		err = l.files.WriteInput(0, data)
	}
	if err != nil {
		l.log.Warn("ask the runner for its state", zap.Error(err))
	}
}

// resend writes the input files again that an earlier daemon may not have
// written. The runner knows those that it has taken.
func (l *loop) resend() {
	if l.compaction.id != 0 && !l.compaction.taken && !l.files.HasInput(compactSeq) {
		l.order()
	}
	for _, b := range l.batches {
		if b.Input && b.State == berth.BatchSent && !l.files.HasInput(b.ID) {
			l.deliver(b)
		}
	}
}

// followUp gives the idle run what its chat has pending.
func (l *loop) followUp() {
	if l.run.State != berth.RunIdle || !l.slot.Busy() {
		return
	}
	var b berth.Batch
	var ok bool
	if !l.persist("claim a follow-up", func(ctx context.Context) (err error) {
		b, ok, err = l.Store.NextBatch(ctx, l.run.ID, l.group.JID)
		return err
	}) {
		return
	}
	if !ok {
		if !l.compact() {
			l.slot.Idle()
		}
		return
	}
	crash.At(crash.Claimed)
	l.batches = append(l.batches, b)
	if l.deliver(b) {
		l.show(berth.RunBusy)
	}
}

func (l *loop) deliver(b berth.Batch) bool {
	text := prompt(l.group, b, l.Assistant, time.Now().In(l.Location))
	// What the agent was told at its start it knows. An error only means that it
	// is told later.
	if now, err := l.Store.MemoryPrompt(l.ctx, l.group.Folder); err == nil && now != l.memory {
		l.memory, text = now, now+"\n"+text
	}
	data, err := protocol.Marshal(protocol.Message{Type: protocol.TypeMessage, ID: b.AckID, Text: text})
	if err == nil {
		err = l.files.WriteInput(b.ID, data)
		crash.At(crash.Input)
		l.given = time.Now()
	}
	if err != nil {
		l.fail(&failure{text: fmt.Sprintf("write an input file: %v", err)})
		l.close()
		return false
	}
	return true
}

// fail notes the first failure and lets the run have nothing more.
func (l *loop) fail(f *failure) {
	if l.failure == nil {
		l.failure = f
	}
	l.slot.Seal()
}

// close asks the runner to end, and sees to it that it does.
func (l *loop) close() {
	if l.run.State == berth.RunClosing || l.run.State == berth.RunStopping {
		return
	}
	l.show(berth.RunClosing)
	l.runLog.Notef("closing: %s", l.slot.Reason())
	l.writeClose()
	l.escalate.Reset(closeGrace)
}

func (l *loop) writeClose() {
	if err := l.files.WriteClose(); err != nil {
		l.log.Warn("write _close", zap.Error(err))
	}
}

// stop makes the engine end the container. It is repeated until that happened.
func (l *loop) stop() {
	if l.run.State != berth.RunStopping {
		l.slot.Seal()
		l.show(berth.RunStopping)
		l.runLog.Notef("stopping the container")
	}
	l.escalate.Reset(3 * closeGrace)
	l.wg.Go(func() {
		if err := l.box.Stop(l.ctx); err != nil && l.ctx.Err() == nil {
			l.log.Warn("stop the container", zap.Error(err))
		}
	})
}

// drain takes what the stream of an exited container still holds, and the
// canonical frames that it did not bring.
func (l *loop) drain(events <-chan event) {
	grace := time.AfterFunc(drainGrace, func() { l.box.Close() })
	defer grace.Stop()
	if events != nil {
		for e := range events {
			l.handle(e)
		}
	}
	l.collect(0)
}
