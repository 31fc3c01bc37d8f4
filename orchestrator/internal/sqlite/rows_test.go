package sqlite

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

// batchStates returns the states of a run's batches, oldest first.
func batchStates(t *testing.T, db *DB, run string) []string {
	t.Helper()
	rows, err := db.read.QueryContext(t.Context(), `SELECT state FROM batches WHERE run_id = ? ORDER BY id`, run)
	check(t, err)
	defer rows.Close()
	var out []string
	for rows.Next() {
		var s string
		check(t, rows.Scan(&s))
		out = append(out, s)
	}
	check(t, rows.Err())
	return out
}

func standing(t *testing.T, db *DB) berth.Standing {
	t.Helper()
	all, err := db.Standings(t.Context())
	check(t, err)
	s, ok := all[chat]
	if !ok {
		t.Fatal("the group is not registered")
	}
	return s
}

func addFamily(t *testing.T, db *DB) {
	t.Helper()
	check(t, db.AddGroup(t.Context(), berth.Group{JID: chat, Name: "Family", Folder: "family", AddedAt: time.Unix(1, 0)}))
}

// HS-11: when a run is killed, what it had is taken from it, what it had done
// stays done, and the verdict tells whether there was anything to take.
func TestHS11KilledRunKeepsWhatIsDone(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	done := say(t, db, "1", "one", true)
	begin(t, db, "r")
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 1, Acked: []string{"1"}, TurnEnded: true}))
	taken := say(t, db, "2", "two", true)
	_, ok, err := db.NextBatch(ctx, "r", chat)
	diff(t, "second batch", []any{ok, err}, []any{true, error(nil)})
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 2, Acked: []string{"2"}}))
	given := say(t, db, "3", "three", true)
	_, ok, err = db.NextBatch(ctx, "r", chat)
	diff(t, "third batch", []any{ok, err}, []any{true, error(nil)})

	v, err := db.FinishRun(ctx, berth.Ending{RunID: "r", At: time.Now(), Error: "stuck", Backoff: policy})
	check(t, err)
	diff(t, "returned", v.Returned, true)
	diff(t, "batches", batchStates(t, db, "r"), []string{"done", "returned", "returned"})
	for seq, want := range map[int64]string{done: berth.FateDone, taken: berth.FatePending, given: berth.FatePending} {
		diff(t, fmt.Sprint("fate of ", seq), fate(t, db, seq).State, want)
	}
	b := begin(t, db, "r2")
	diff(t, "next batch", texts(b), []string{"two", "three"})
	open, err := db.OpenBatches(ctx, "r")
	check(t, err)
	diff(t, "claims of the killed run", len(open), 0)

	// Nothing was under way: nothing is returned, and nobody waits for a retry.
	check(t, db.Commit(ctx, berth.Progress{RunID: "r2", Seq: 1, Acked: []string{"3"}, TurnEnded: true}))
	v, err = db.FinishRun(ctx, berth.Ending{RunID: "r2", At: time.Now(), Error: "stuck", Backoff: policy})
	check(t, err)
	diff(t, "verdict of nothing", v, berth.Verdict{})
}

// HS-13: a run that ends by nobody's fault gives its messages back and leaves
// the attempts and the time that was set for the next one.
func TestHS13RescheduledIsLeftAlone(t *testing.T) {
	db := open(t)
	addFamily(t, db)
	say(t, db, "1", "hi", true)
	begin(t, db, "r1")
	at := time.UnixMilli(time.Now().UnixMilli())
	_, err := db.FinishRun(t.Context(), berth.Ending{RunID: "r1", At: at, Error: "boom", Backoff: policy})
	check(t, err)
	before := standing(t, db)
	diff(t, "attempts", before.Attempts, 1)
	diff(t, "retry", before.RetryAt.Equal(at.Add(policy[0])), true)
	begin(t, db, "r2")
	v, err := db.FinishRun(t.Context(), berth.Ending{RunID: "r2", At: at, Error: "the engine went away", Uncounted: true, Backoff: policy})
	check(t, err)
	diff(t, "returned", v.Returned, true)
	diff(t, "batches", batchStates(t, db, "r2"), []string{"returned"})
	after := standing(t, db)
	diff(t, "attempts", after.Attempts, before.Attempts)
	diff(t, "retry", after.RetryAt.Equal(before.RetryAt), true)
}

// W10: a message goes from pending over sent and consumed to done, and only the
// end of its turn moves the cursor.
func TestW10StatesOfABatch(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	addFamily(t, db)
	say(t, db, "1", "hi", true)
	step := func(what, state string, pending int) {
		t.Helper()
		diff(t, what, batchStates(t, db, "r"), []string{state})
		diff(t, what+": behind the cursor", standing(t, db).Pending, pending)
	}
	diff(t, "stored", standing(t, db).Pending, 1)
	begin(t, db, "r")
	step("given", "sent", 1)
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Acked: []string{"another"}}))
	step("an ack of something else", "sent", 1)
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", TurnEnded: true}))
	step("an end without an ack", "sent", 1)
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 1, Acked: []string{"1"}}))
	step("acknowledged", "consumed", 1)
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 2, Out: []berth.Outgoing{answer("r", 2, "hello")}}))
	step("answered", "consumed", 1)
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", TurnEnded: true}))
	step("the turn ended", "done", 0)

	// The end of a turn is not that of what was given to the run meanwhile.
	for _, id := range []string{"2", "3"} {
		say(t, db, id, "more", true)
		_, ok, err := db.NextBatch(ctx, "r", chat)
		check(t, err)
		diff(t, "given", ok, true)
	}
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Acked: []string{"2"}}))
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", TurnEnded: true}))
	diff(t, "at last", batchStates(t, db, "r"), []string{"done", "done", "sent"})
	diff(t, "behind the cursor", standing(t, db).Pending, 1)
}

// W18: a message that arrives after the cursor has passed its time is not lost,
// whatever stamp it bears.
func TestW18LateArrivals(t *testing.T) {
	db := open(t)
	at := time.Unix(1000, 0)
	for i, stamp := range []time.Time{at, at, at.Add(-time.Hour)} {
		id, run := fmt.Sprint("m", i), fmt.Sprint("r", i)
		_, fresh, err := db.AddMessage(t.Context(), berth.Message{ID: id, ChatJID: chat, Text: id, Time: stamp, Wakes: true})
		check(t, err)
		diff(t, id+" is new", fresh, true)
		pending, _, err := db.Pending(t.Context(), chat)
		check(t, err)
		diff(t, id+" is pending", pending, true)
		diff(t, "batch", texts(begin(t, db, run)), []string{id})
		check(t, db.Commit(t.Context(), berth.Progress{RunID: run, Acked: []string{id}, TurnEnded: true}))
		_, err = db.FinishRun(t.Context(), berth.Ending{RunID: run, At: time.Now()})
		check(t, err)
	}
	// The same id in another chat is another message.
	_, fresh, err := db.AddMessage(t.Context(), berth.Message{ID: "m0", ChatJID: "console:other", Text: "m0", Time: at})
	check(t, err)
	diff(t, "in another chat", fresh, true)
}

// W33: when the next attempt is due outlives the daemon.
func TestW33NextAttemptIsDurable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "messages.db")
	db := openAt(t, path)
	say(t, db, "1", "hi", true)
	begin(t, db, "r")
	v, err := db.FinishRun(t.Context(), berth.Ending{RunID: "r", At: time.Now(), Error: "boom", Backoff: policy})
	check(t, err)
	say(t, db, "2", "and this", true) // does not bring it forward
	check(t, db.Close())

	db = openAt(t, path)
	pending, retryAt, err := db.Pending(t.Context(), chat)
	check(t, err)
	diff(t, "pending", pending, true)
	diff(t, "due", retryAt.UnixMilli(), v.RetryAt.UnixMilli())
	diff(t, "batch", texts(begin(t, db, "r2")), []string{"hi", "and this"})
}

// W40: a task has a session of its own unless it says otherwise.
func TestW40TasksAreIsolatedByDefault(t *testing.T) {
	db := open(t)
	check(t, db.writer.do(t.Context(), func(t *tx) error {
		return t.exec(`INSERT INTO scheduled_tasks (id, group_folder, chat_jid, prompt, schedule_type, schedule_value, created_at)
			VALUES ('t1', 'family', ?, 'hi', 'once', '2026-01-01T00:00:00Z', '2026-01-01T00:00:00.000Z')`, chat)
	}))
	var mode, status string
	check(t, db.read.QueryRowContext(t.Context(), `SELECT context_mode, status FROM scheduled_tasks WHERE id = 't1'`).Scan(&mode, &status))
	diff(t, "context, status", []string{mode, status}, []string{"isolated", "active"})
}

// W41: a run's id is given once, also to a run that has ended.
func TestW41RunIDsAreUnique(t *testing.T) {
	db := open(t)
	say(t, db, "1", "hi", true)
	again := func(what string) {
		t.Helper()
		_, ok, err := db.BeginRun(t.Context(), berth.Run{ID: "r", Folder: "other", ChatJID: chat, Kind: berth.KindTask, Nonce: "n", StartedAt: time.Now()})
		if ok || err == nil {
			t.Errorf("%s: a second run of the same id began", what)
		}
	}
	begin(t, db, "r")
	say(t, db, "2", "more", true)
	again("while it lives")
	_, err := db.FinishRun(t.Context(), berth.Ending{RunID: "r", At: time.Now()})
	check(t, err)
	again("after its end")
	diff(t, "batches", batchStates(t, db, "r"), []string{"returned"})
}
