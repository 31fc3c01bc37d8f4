package turn

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// compactSeq numbers the input file of a compaction: behind all messages.
const compactSeq = stopSeq - 1

// compaction is the order to make the conversation shorter that a run was given.
// The zero value is none.
type compaction struct {
	id      int64
	taken   bool // the runner has said so
	stopped bool
}

// ackID is by what the runner knows the order again.
func (c compaction) ackID() string { return fmt.Sprintf("compact-%d", c.id) }

func (c compaction) message() protocol.Message {
	return protocol.Message{Type: protocol.TypeMessage, ID: c.ackID(), Text: protocol.CompactCommand, Compact: true}
}

// What people are told who wanted the conversation shorter.
const (
	nothingToCompact = "There is nothing to shorten."
	compactUnable    = "This agent cannot shorten its conversation. /new begins an empty one."
	compactFailed    = "I could not shorten the conversation; it is as it was."
	compactUnsaid    = "I told the agent to shorten the conversation. It does not say what came of it."
	compactStopped   = "The conversation is as it was: I was stopped before it was shorter."
)

// archivePath is of an archive that a runner may name to a chat, if it has no more than
// maxArchive characters: to count so far would take the expression megabytes.
var archivePath = regexp.MustCompile(`^` + protocol.ConversationsDir + `/[^/\pC\s]+$`)

const maxArchive = 200

// compacted returns what people are told of the outcome.
func compacted(c protocol.Compaction) string {
	switch c.Outcome {
	case protocol.CompactionNothing:
		return nothingToCompact
	case protocol.CompactionUnable:
		return compactUnable
	case protocol.CompactionFailed:
		return strings.TrimSpace(compactFailed + " " + excerpt(oneLine(Visible(c.Reason))))
	}
	text := "Shortened the conversation."
	if utf8.RuneCountInString(c.Archive) <= maxArchive && archivePath.MatchString(c.Archive) {
		text += " What was said before is in " + c.Archive + "."
	}
	return text
}

// oneLine keeps what a container says from passing for more than one thing said.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// beginCompaction claims the compaction that the group waits for, as the first turn
// of a new run.
func (c *carrier) beginCompaction(ctx context.Context) (ok bool, err error) {
	c.compaction.id, ok, err = c.Store.BeginCompaction(ctx, c.run, nothingToCompact, compactFailed)
	if !ok {
		c.compaction = compaction{}
	}
	return ok, err
}

// compact gives the run, which has nothing else to do, the compaction that its chat
// waits for, and reports whether one is under way.
func (l *loop) compact() bool {
	switch {
	case l.compaction.id != 0:
		return true
	case l.run.Task != "": // the next run sees to it
		return false
	}
	var next compaction
	var ok bool
	if !l.persist("claim a compaction", func(ctx context.Context) (err error) {
		next.id, ok, err = l.Store.NextCompaction(ctx, l.run.ID, l.group.JID, compactFailed)
		return err
	}) || !ok {
		return false
	}
	l.compaction = next
	if l.slot.Renewed() {
		l.told(nothingToCompact) // the conversation ends with this run
		return false
	}
	if l.order() {
		l.slot.Working()
		l.show(berth.RunBusy)
	}
	return true
}

// order writes the compaction's input file.
func (l *loop) order() bool {
	data, err := protocol.Marshal(l.compaction.message())
	if err == nil {
		err = l.files.WriteInput(compactSeq, data)
		l.given = time.Now()
	}
	if err != nil {
		l.fail(&failure{text: fmt.Sprintf("write an input file: %v", err)})
		l.close()
		return false
	}
	return true
}

// compactionTaken notes that the runner has the order, if ids say so.
func (l *loop) compactionTaken(ids []string) {
	if l.compaction.id != 0 && slices.Contains(ids, l.compaction.ackID()) {
		l.compaction.taken = true
	}
}

// compactionRests tells who waits, at the end of the turn that the runner took the
// order for, if it did not say what came of it.
func (l *loop) compactionRests() {
	switch {
	case l.compaction.stopped:
		l.told(compactStopped)
	case l.compaction.taken:
		l.told(compactUnsaid)
	}
}

// told ends the compaction with what people are told.
func (l *loop) told(text string) {
	if l.compaction.id == 0 {
		return
	}
	if l.persist("tell of a compaction", func(ctx context.Context) error { return l.Store.EndCompaction(ctx, l.run.ID, text) }) {
		l.compaction = compaction{}
	}
}

// endCompaction settles the compaction of a run that has ended without a word of
// it, and reports whether it waits for another run.
func (c *carrier) endCompaction(ctx context.Context, lost bool, f *failure) (again bool) {
	if c.compaction.id == 0 {
		return false
	}
	var text string
	switch {
	case c.compaction.stopped || f != nil && f.class == classStopped:
		text = compactStopped
	case f == nil || lost:
		return true
	case f.class == protocol.ClassStaleSession:
		text = nothingToCompact
	default:
		text = compactFailed + " " + reason(f.class)
	}
	if err := c.Store.EndCompaction(context.WithoutCancel(ctx), c.run.ID, text); err != nil {
		c.log.Error("tell of a compaction", zap.Error(err))
		return true
	}
	return false
}

// adoptCompaction reads what the run was given by an earlier daemon.
func (c *carrier) adoptCompaction(ctx context.Context) error {
	id, ok, err := c.Store.OpenCompaction(ctx, c.run.ID)
	if ok {
		c.compaction.id = id
	}
	return err
}
