package sqlite

import (
	"slices"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

// Only what a power cut makes worthless is not synced; among others it is.
func TestWhatIsSynced(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	synced := func(what string, want int) {
		t.Helper()
		var mode int
		check(t, db.writer.conn.QueryRowContext(ctx, `PRAGMA synchronous`).Scan(&mode))
		diff(t, what+": synchronous", mode, want)
	}
	const normal, full = 1, 2
	say(t, db, "1", "hi", true)
	begin(t, db, "r")
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 1, Acked: []string{"1"}, TurnEnded: true}))
	say(t, db, "2", "more", true)
	synced("a message", full)
	if _, ok, err := db.NextBatch(ctx, "r", chat); !ok || err != nil {
		t.Fatal(ok, err)
	}
	synced("a follow-up", normal)
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 2, Acked: []string{"2"}}))
	synced("a frame", full)

	block, started := make(chan struct{}), make(chan struct{})
	done := make(chan error)
	go func() {
		done <- db.writer.do(ctx, func(*tx) error { close(started); <-block; return nil })
	}()
	<-started // what comes now shares the next commit
	group := []*write{{loose: true}, {}}
	for _, job := range group {
		job.fn, job.done = func(*tx) error { return nil }, make(chan struct{})
		db.writer.queue <- job
	}
	close(block)
	check(t, <-done)
	for _, job := range group {
		<-job.done
		check(t, job.err)
	}
	synced("both together", full)
}

// However much a chat and its run have behind them, a turn looks at a few rows only.
func TestATurnLooksThroughNothing(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	say(t, db, "1", "hi", true)
	begin(t, db, "r")
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 1, Acked: []string{"1"}, TurnEnded: true}))
	say(t, db, "2", "more", true)
	_, _, err := db.NextBatch(ctx, "r", chat)
	check(t, err)
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 2, Acked: []string{"2"}}))
	check(t, db.AddOutgoing(ctx, berth.Outgoing{ChatJID: chat, Key: "ipc/1", Kind: berth.OutMessage, Text: "wait", MessageID: "m", CreatedAt: time.Now(), OwnTurn: true}))
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 3, Out: []berth.Outgoing{answer("r", 3, "so")}, TurnEnded: true}))
	o, _, err := db.NextOutgoing(ctx, chat)
	check(t, err)
	check(t, db.MarkSent(ctx, o.ID))

	seen := 0
	for query := range db.writer.stmts {
		rows, err := db.writer.conn.QueryContext(ctx, "EXPLAIN QUERY PLAN "+query, slices.Repeat([]any{""}, strings.Count(query, "?"))...)
		if err != nil {
			continue // BEGIN, COMMIT
		}
		for rows.Next() {
			var id, parent, unused int
			var step string
			check(t, rows.Scan(&id, &parent, &unused, &step))
			// An index by run or chat alone leads through all of its past, but for its end.
			past := strings.HasSuffix(step, "INDEX batches_run (run_id=?)") || strings.HasSuffix(step, "INDEX batches_chat (chat_jid=?)")
			table, scanned := strings.CutPrefix(step, "SCAN ")
			table, index, _ := strings.Cut(table, " ")
			scanned = scanned && index != "USING INDEX runs_live" // a run a slot
			if past && !strings.Contains(query, "max(to_seq)") || scanned && slices.Contains(tables, table) {
				t.Errorf("%s\n%s", step, query)
			}
			if strings.Contains(step, "batches") {
				seen++
			}
		}
		check(t, rows.Err())
		rows.Close()
	}
	if seen < 5 {
		t.Errorf("%d statements about batches were looked at", seen)
	}
}

var tables = []string{"messages", "batches", "outbox", "runs", "progress", "chats", "sessions"}
