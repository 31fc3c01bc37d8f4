package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
)

const chat = "console:family"

func open(t *testing.T) *DB {
	t.Helper()
	return openAt(t, filepath.Join(t.TempDir(), "messages.db"))
}

func openAt(t *testing.T, path string) *DB {
	t.Helper()
	db, err := Open(t.Context(), path, func(string, bool) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

// must returns v and fails the test on an error.
func must[T any](t *testing.T, v T, err error) T {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func say(t *testing.T, db *DB, id, text string, wakes bool) int64 {
	t.Helper()
	seq, _, err := db.AddMessage(t.Context(), berth.Message{ID: id, ChatJID: chat, Sender: "a", SenderName: "Ann", Text: text, Time: time.Unix(1, 0), Wakes: wakes})
	return must(t, seq, err)
}

func begin(t *testing.T, db *DB, run string) berth.Batch {
	t.Helper()
	b, ok, err := db.BeginRun(t.Context(), berth.Run{ID: run, Folder: "family", ChatJID: chat, Kind: berth.KindChat, Nonce: "n", StartedAt: time.Now()})
	check(t, err)
	if !ok {
		t.Fatal("nothing to do")
	}
	return b
}

func texts(b berth.Batch) []string {
	var out []string
	for _, m := range b.Messages {
		out = append(out, m.Text)
	}
	return out
}

func diff(t *testing.T, what string, got, want any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

func answer(run string, seq int64, text string) berth.Outgoing {
	return berth.Outgoing{Key: fmt.Sprintf("run/%s/%d/0", run, seq), Kind: berth.OutAnswer, Text: text, MessageID: berth.NewID(4), CreatedAt: time.Now()}
}

func fate(t *testing.T, db *DB, seq int64) berth.Fate {
	t.Helper()
	f, _, err := db.Fate(t.Context(), seq)
	return must(t, f, err)
}

var policy = []time.Duration{5 * time.Second, 10 * time.Second}

func TestPragmasHoldOnEveryConnection(t *testing.T) {
	db := open(t)
	var conns []*sql.Conn
	for range 3 {
		conns = append(conns, must2(db.read.Conn(t.Context()))(t))
	}
	for _, c := range conns {
		var fk, sync int
		var mode string
		check(t, c.QueryRowContext(t.Context(), `SELECT (SELECT foreign_keys FROM pragma_foreign_keys), (SELECT synchronous FROM pragma_synchronous), (SELECT journal_mode FROM pragma_journal_mode)`).Scan(&fk, &sync, &mode))
		diff(t, "foreign keys, synchronous, journal", []any{fk, sync, mode}, []any{1, 2, "wal"})
		c.Close()
	}
}

func must2[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T { t.Helper(); return must(t, v, err) }
}

func TestStoreIsPrivate(t *testing.T) {
	db := open(t)
	fi, err := os.Stat(db.path)
	check(t, err)
	diff(t, "mode", fi.Mode().Perm(), os.FileMode(0o600))
}

func TestDB04SameIDIsOneRow(t *testing.T) {
	db := open(t)
	first := say(t, db, "1", "hi", true)
	seq, fresh, err := db.AddMessage(t.Context(), berth.Message{ID: "1", ChatJID: chat, Text: "hi again", Time: time.Unix(2, 0)})
	check(t, err)
	diff(t, "seq, fresh", []any{seq, fresh}, []any{first, false})
	got, err := db.MessagesAfter(t.Context(), chat, 0, 10)
	check(t, err)
	if len(got) != 1 || got[0].Text != "hi again" || !got[0].Wakes {
		t.Errorf("got %+v", got)
	}
}

// W18: WhatsApp's stamps have seconds; order and cursor must not count on them.
func TestW18OrderIsTheStoresOwn(t *testing.T) {
	db := open(t)
	for i, at := range []int64{100, 100, 50, 100} {
		_, _, err := db.AddMessage(t.Context(), berth.Message{ID: fmt.Sprint(i), ChatJID: chat, Text: fmt.Sprint(i), Time: time.Unix(at, 0), Wakes: true})
		check(t, err)
	}
	diff(t, "batch", texts(begin(t, db, "r")), []string{"0", "1", "2", "3"})
}

// A chat is known from its first message on, and as active as its newest one.
func TestChatsOfMessages(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	add := func(jid, id string, at int64) {
		t.Helper()
		_, _, err := db.AddMessage(ctx, berth.Message{ID: id, ChatJID: jid, Text: "hi", Time: time.Unix(at, 0)})
		check(t, err)
	}
	add("1@g.us", "a", 10)
	add("2@g.us", "a", 20)
	check(t, db.NameChats(ctx, []berth.Chat{{JID: "3@g.us", Name: "silent"}}))
	want := func(jids ...string) {
		t.Helper()
		chats, err := db.Chats(ctx, 10)
		check(t, err)
		var got []string
		for _, c := range chats {
			got = append(got, c.JID)
		}
		diff(t, "chats, the last active first", got, jids)
	}
	want("2@g.us", "1@g.us", "3@g.us")
	add("1@g.us", "b", 30)
	want("1@g.us", "2@g.us", "3@g.us")
}

func TestUntriggeredMessagesWaitForTheTrigger(t *testing.T) {
	db := open(t)
	one := say(t, db, "1", "one", false)
	say(t, db, "2", "two", false)
	if _, ok, err := db.BeginRun(t.Context(), berth.Run{ID: "r0", Folder: "family", ChatJID: chat, StartedAt: time.Now()}); ok || err != nil {
		t.Fatalf("a run began: %v", err)
	}
	runs, err := db.LiveRuns(t.Context())
	check(t, err)
	diff(t, "runs", len(runs), 0)
	diff(t, "fate", fate(t, db, one).State, berth.FateContext)
	say(t, db, "3", "@Andy three", true)
	diff(t, "fate", fate(t, db, one).State, berth.FatePending)
	b := begin(t, db, "r1")
	diff(t, "batch", texts(b), []string{"one", "two", "@Andy three"})
	diff(t, "ack id", b.AckID, "3")
}

func TestTurn(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	seq := say(t, db, "1", "hi", true)
	begin(t, db, "r")
	if pending, _, err := db.Pending(ctx, chat); pending || err != nil {
		t.Errorf("pending while in flight: %v %v", pending, err)
	}
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 2, Acked: []string{"1"}}))
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 3, Session: "s1", Out: []berth.Outgoing{answer("r", 3, "hello")}}))
	// A frame that comes twice is taken once.
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 3, Session: "s1", Out: []berth.Outgoing{answer("r", 3, "hello")}}))
	diff(t, "before the end", fate(t, db, seq), berth.Fate{State: berth.FatePending, Texts: []string{"hello"}, RunID: "r"})
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", TurnEnded: true}))
	diff(t, "after", fate(t, db, seq), berth.Fate{State: berth.FateDone, Texts: []string{"hello"}, RunID: "r"})
	session, err := db.Session(ctx, "family", "")
	check(t, err)
	diff(t, "session", session, "s1")

	say(t, db, "2", "more", true)
	b, ok, err := db.NextBatch(ctx, "r", chat)
	check(t, err)
	if !ok || !b.Input {
		t.Fatalf("no follow-up: %+v", b)
	}
	diff(t, "follow-up", texts(b), []string{"more"})
	if _, ok, err := db.NextBatch(ctx, "r", chat); ok || err != nil {
		t.Errorf("W19: the same messages were given twice: %v", err)
	}
}

// Failed before any output: the batch is pending again. After output: it is
// done, since nobody may be answered twice.
func TestFailureBeforeAndAfterOutput(t *testing.T) {
	for _, answered := range []bool{false, true} {
		t.Run(fmt.Sprintf("answered=%v", answered), func(t *testing.T) {
			db := open(t)
			ctx := t.Context()
			seq := say(t, db, "1", "hi", true)
			begin(t, db, "r")
			p := berth.Progress{RunID: "r", Seq: 2, Acked: []string{"1"}}
			if answered {
				p.Out = []berth.Outgoing{answer("r", 2, "half of it")}
			}
			check(t, db.Commit(ctx, p))
			now := time.Now()
			v, err := db.FinishRun(ctx, berth.Ending{RunID: "r", At: now, ExitCode: 1, Error: "boom", Backoff: policy})
			check(t, err)
			pending, retryAt, err := db.Pending(ctx, chat)
			check(t, err)
			if answered {
				diff(t, "verdict", v, berth.Verdict{})
				diff(t, "fate", fate(t, db, seq).State, berth.FateDone)
				diff(t, "pending", pending, false)
				return
			}
			diff(t, "verdict", v, berth.Verdict{Returned: true, RetryAt: now.Add(5 * time.Second)})
			diff(t, "pending", pending, true)
			diff(t, "retry", retryAt.UnixMilli(), v.RetryAt.UnixMilli())
			say(t, db, "2", "and this", false) // joins the batch
			diff(t, "again", texts(begin(t, db, "r2")), []string{"hi", "and this"})
		})
	}
}

// W34: what is given up stays for the next message, and the chat hears of it once.
func TestW34GivenUpUntilTheNextMessage(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	seq := say(t, db, "1", "hi", true)
	var v berth.Verdict
	var err error
	for i := range 3 {
		run := fmt.Sprint("r", i)
		begin(t, db, run)
		v, err = db.FinishRun(ctx, berth.Ending{RunID: run, At: time.Now(), Error: "boom", Backoff: policy, Notice: "sorry"})
		check(t, err)
	}
	if !v.Parked {
		t.Fatal("not given up after the last attempt")
	}
	f := fate(t, db, seq)
	diff(t, "fate", f, berth.Fate{State: berth.FateFailed, Texts: []string{"sorry"}, RunID: "r2", Error: "boom"})
	if pending, _, err := db.Pending(ctx, chat); pending || err != nil {
		t.Error("still pending")
	}
	say(t, db, "2", "no trigger", false)
	if pending, _, err := db.Pending(ctx, chat); pending || err != nil {
		t.Error("a message without trigger woke it")
	}
	say(t, db, "3", "again", true)
	diff(t, "batch", texts(begin(t, db, "r3")), []string{"hi", "no trigger", "again"})
	v, err = db.FinishRun(ctx, berth.Ending{RunID: "r3", At: time.UnixMilli(1000), Error: "boom", Backoff: policy})
	check(t, err)
	diff(t, "the count began anew", v.RetryAt, time.UnixMilli(6000))
}

func TestNobodysFailureIsNotCounted(t *testing.T) {
	db := open(t)
	say(t, db, "1", "hi", true)
	for i := range 10 {
		run := fmt.Sprint("r", i)
		begin(t, db, run)
		v, err := db.FinishRun(t.Context(), berth.Ending{RunID: run, At: time.Now(), Error: "no engine", Uncounted: true, Backoff: policy})
		check(t, err)
		diff(t, "verdict", v, berth.Verdict{Returned: true})
	}
}

// W11: a follow-up that a closing run never took is no failure.
func TestFollowUpMeetsAClosingRun(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	say(t, db, "1", "hi", true)
	begin(t, db, "r")
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 1, Acked: []string{"1"}, TurnEnded: true}))
	say(t, db, "2", "more", true)
	_, ok, err := db.NextBatch(ctx, "r", chat)
	check(t, err)
	if !ok {
		t.Fatal("no follow-up")
	}
	v, err := db.FinishRun(ctx, berth.Ending{RunID: "r", At: time.Now(), Backoff: policy})
	check(t, err)
	diff(t, "verdict", v, berth.Verdict{Returned: true})
	diff(t, "again", texts(begin(t, db, "r2")), []string{"more"})
}

func TestFinishTwice(t *testing.T) {
	db := open(t)
	say(t, db, "1", "hi", true)
	begin(t, db, "r")
	for i := range 2 {
		v, err := db.FinishRun(t.Context(), berth.Ending{RunID: "r", At: time.Now(), Error: "boom", Backoff: policy})
		check(t, err)
		diff(t, "returned", v.Returned, i == 0)
	}
	s, err := db.Standings(t.Context())
	check(t, err)
	if s[chat].Attempts > 1 {
		t.Errorf("counted %d times", s[chat].Attempts)
	}
}

func TestOneLiveRunAGroup(t *testing.T) {
	db := open(t)
	say(t, db, "1", "hi", true)
	begin(t, db, "r")
	say(t, db, "2", "more", true)
	_, _, err := db.BeginRun(t.Context(), berth.Run{ID: "r2", Folder: "family", ChatJID: chat, StartedAt: time.Now()})
	diff(t, "kind", kindOf(err), berth.Conflict)
}

func kindOf(err error) berth.Kind {
	if e, ok := errors.AsType[*berth.Error](err); ok {
		return e.Kind
	}
	return berth.Internal
}

// W17: a flood is cut to its newest part, and the prompt can say so.
func TestW17OlderMessagesAreOmittedNotLost(t *testing.T) {
	db := open(t)
	for i := range 450 {
		say(t, db, fmt.Sprint(i), fmt.Sprint(i), i == 0)
	}
	b := begin(t, db, "r")
	diff(t, "messages, omitted", []int{len(b.Messages), b.Omitted}, []int{maxBatchMessages, 450 - maxBatchMessages})
	diff(t, "newest", b.Messages[len(b.Messages)-1].Text, "449")
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r", Acked: []string{b.AckID}, TurnEnded: true}))
	if pending, _, err := db.Pending(t.Context(), chat); pending || err != nil {
		t.Error("still pending")
	}
}

func TestBatchIsBoundedInBytes(t *testing.T) {
	db := open(t)
	for i := range 40 {
		say(t, db, fmt.Sprint(i), strings.Repeat("x", 64<<10), true)
	}
	b := begin(t, db, "r")
	diff(t, "messages", len(b.Messages), maxBatchBytes/(64<<10))
}

func TestGroups(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	g := berth.Group{JID: chat, Name: "Family", Folder: "family", RequiresTrigger: true, AddedAt: time.Unix(1, 0).UTC(),
		Container: berth.ContainerConfig{MemoryMiB: 512, AdditionalMounts: []berth.MountRequest{{HostPath: "/x", ReadOnly: new(false)}}}}
	check(t, db.AddGroup(ctx, g))
	got, err := db.Groups(ctx)
	check(t, err)
	diff(t, "groups", got, []berth.Group{g})
	// W29: a folder in use is not taken over, in whatever case.
	for _, other := range []berth.Group{{JID: "console:other", Folder: "FAMILY"}, {JID: chat, Folder: "other"}} {
		diff(t, "kind", kindOf(db.AddGroup(ctx, other)), berth.Conflict)
	}
	check(t, db.RemoveGroup(ctx, "family"))
	diff(t, "kind", kindOf(db.RemoveGroup(ctx, "family")), berth.NotFound)
}

func TestOutbox(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	for _, text := range []string{"one", "two", "one again"} {
		key := strings.Fields(text)[0]
		check(t, db.AddOutgoing(ctx, berth.Outgoing{ChatJID: chat, Key: key, Text: text, MessageID: "m" + key, CreatedAt: time.Now()}))
	}
	chats, err := db.OutboxChats(ctx)
	check(t, err)
	diff(t, "chats", chats, []string{chat})
	o, ok, err := db.NextOutgoing(ctx, chat)
	check(t, err)
	diff(t, "first", []any{o.Text, o.MessageID, ok}, []any{"one", "mone", true})
	retry := time.UnixMilli(99_000)
	check(t, db.MarkFailed(ctx, o.ID, "offline", retry))
	o, _, err = db.NextOutgoing(ctx, chat)
	check(t, err)
	diff(t, "order is kept", []any{o.Text, o.Attempts, o.NotBefore.Equal(retry), o.Error}, []any{"one", 1, true, "offline"})
	check(t, db.MarkSent(ctx, o.ID))
	o, _, err = db.NextOutgoing(ctx, chat)
	check(t, err)
	diff(t, "second", o.Text, "two")
	check(t, db.MarkFailed(ctx, o.ID, "never", time.Time{}))
	_, ok, err = db.NextOutgoing(ctx, chat)
	check(t, err)
	diff(t, "left", ok, false)
	pending, dead, err := db.OutboxCounts(ctx)
	check(t, err)
	diff(t, "counts", []int{pending, dead}, []int{0, 1})
}

// W67: a final text that the same turn has already said is not said again.
func TestW67NothingTwiceInATurn(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	seq := say(t, db, "1", "hi", true)
	begin(t, db, "r")
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Acked: []string{"1"}}))
	check(t, db.AddOutgoing(ctx, berth.Outgoing{ChatJID: chat, Key: "ipc/1", Kind: berth.OutMessage, Text: "done", MessageID: "m", CreatedAt: time.Now(), OwnTurn: true}))
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 3, Out: []berth.Outgoing{answer("r", 3, "done")}, TurnEnded: true}))
	diff(t, "texts", fate(t, db, seq).Texts, []string{"done"})
}

// The pieces of one long answer are all of it, equal or not; a second answer
// that says the same is dropped.
func TestLongAnswersKeepEqualPieces(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	seq := say(t, db, "1", "hi", true)
	begin(t, db, "r")
	pieces := []berth.Outgoing{answer("r", 3, "same"), answer("r", 3, "same"), answer("r", 3, "end")}
	for i := range pieces {
		pieces[i].Key = fmt.Sprint("run/r/3/", i)
	}
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Acked: []string{"1"}, Seq: 3, Out: pieces}))
	check(t, db.Commit(ctx, berth.Progress{RunID: "r", Seq: 4, Out: []berth.Outgoing{answer("r", 4, "end")}}))
	diff(t, "texts", fate(t, db, seq).Texts, []string{"same", "same", "end"})
}

// An agent that answered by a message of its own and then fails has answered.
func TestOwnMessageCountsAsAnswer(t *testing.T) {
	for _, own := range []bool{true, false} {
		db := open(t)
		ctx := t.Context()
		say(t, db, "1", "hi", true)
		begin(t, db, "r")
		check(t, db.Commit(ctx, berth.Progress{RunID: "r", Acked: []string{"1"}}))
		check(t, db.AddOutgoing(ctx, berth.Outgoing{ChatJID: chat, Key: "ipc/1", Kind: berth.OutMessage, Text: "done", MessageID: "m", CreatedAt: time.Now(), OwnTurn: own}))
		v, err := db.FinishRun(ctx, berth.Ending{RunID: "r", At: time.Now(), Error: "boom", Backoff: policy})
		check(t, err)
		diff(t, "returned", v.Returned, !own)
	}
}

// A failing or panicking write among others undoes itself alone.
func TestWritesShareACommitNotTheirFailures(t *testing.T) {
	db := open(t)
	block, started := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = db.writer.do(context.Background(), func(*tx) error { close(started); <-block; return nil })
	})
	<-started // what comes now shares the next commit
	errs := make([]error, 30)
	for i := range errs {
		wg.Go(func() {
			errs[i] = db.writer.do(context.Background(), func(t *tx) error {
				if err := t.exec(`INSERT INTO router_state (key, value) VALUES (?, '')`, fmt.Sprint("k", i)); err != nil {
					return err
				}
				switch i % 3 {
				case 1:
					return errors.New("no")
				case 2:
					panic("oops")
				}
				return nil
			})
		})
	}
	close(block)
	wg.Wait()
	for i, err := range errs {
		if (err == nil) != (i%3 == 0) {
			t.Errorf("write %d: %v", i, err)
		}
	}
	var n int
	check(t, db.read.QueryRowContext(t.Context(), `SELECT count(*) FROM router_state`).Scan(&n))
	diff(t, "rows", n, 10)
}

func TestClosedStore(t *testing.T) {
	db := open(t)
	check(t, db.Close())
	if err := db.SetState(t.Context(), "a", "b"); !errors.Is(err, errClosed) {
		t.Errorf("got %v", err)
	}
}

func TestReopenKeepsEverything(t *testing.T) {
	path := filepath.Join(t.TempDir(), "with space?&%.db")
	db := openAt(t, path)
	seq := say(t, db, "1", "hi", true)
	begin(t, db, "r")
	check(t, db.Close())
	db = openAt(t, path)
	runs, err := db.LiveRuns(t.Context())
	check(t, err)
	diff(t, "live runs", len(runs), 1)
	open, err := db.OpenBatches(t.Context(), "r")
	check(t, err)
	diff(t, "batch", texts(open[0]), []string{"hi"})
	diff(t, "fate", fate(t, db, seq).State, berth.FatePending)
}

func TestUnusableStores(t *testing.T) {
	dir := t.TempDir()
	garbage := filepath.Join(dir, "garbage.db")
	check(t, os.WriteFile(garbage, []byte(strings.Repeat("not a database ", 1000)), 0o600))
	newer := filepath.Join(dir, "newer.db")
	db := openAt(t, newer)
	check(t, db.writer.do(t.Context(), func(t *tx) error {
		return t.exec(`INSERT INTO goose_db_version (version_id, is_applied) VALUES (9999, 1)`)
	}))
	check(t, db.Close())
	for path, want := range map[string]string{
		garbage:                          "damaged",
		newer:                            "newer berth",
		filepath.Join(dir, "none", "db"): "no such file",
	} {
		_, err := Open(t.Context(), path, func(string, bool) {})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", path, err, want)
		}
	}
}

func TestFullDiskLosesNothing(t *testing.T) {
	db := open(t)
	seq := say(t, db, "1", "hi", true)
	check(t, db.writer.do(t.Context(), func(t *tx) error { return t.exec(`PRAGMA max_page_count = 1`) })) // as full as it is
	_, _, err := db.AddMessage(t.Context(), berth.Message{ID: "2", ChatJID: chat, Text: strings.Repeat("x", 1<<20), Time: time.Now()})
	if err == nil || !strings.Contains(err.Error(), "disk is full") {
		t.Fatalf("got %v", err)
	}
	if told := db.Trouble(); told == nil || told.Error() != err.Error() {
		t.Errorf("the operator is told %v", told)
	}
	diff(t, "fate", fate(t, db, seq).State, berth.FatePending)
	if _, err := db.DropOutgoing(t.Context(), 99); kindOf(err) != berth.NotFound || db.Trouble() == nil {
		t.Errorf("a refusal says nothing about the disk: %v, %v", err, db.Trouble())
	}
	check(t, db.writer.do(t.Context(), func(t *tx) error { return t.exec(`PRAGMA max_page_count = 100000`) }))
	if err := db.Trouble(); err != nil {
		t.Errorf("it is over: %v", err)
	}
	if _, _, err := db.Fate(t.Context(), seq+1); kindOf(err) != berth.NotFound {
		t.Errorf("the refused message is there: %v", err)
	}
}

// A clock that is set back by an hour does not put a retry off by an hour, nor
// does one that is set forth lose it.
func TestRetryWhenTheClockJumps(t *testing.T) {
	for _, jump := range []time.Duration{0, time.Hour, -time.Hour} {
		db := open(t)
		say(t, db, "m1", "@Andy hello", true)
		begin(t, db, "r1")
		at := time.Now().Add(jump) // by the clock before it is set
		_, err := db.FinishRun(t.Context(), berth.Ending{RunID: "r1", At: at, Error: "no luck", Backoff: policy})
		check(t, err)
		pending, retryAt, err := db.Pending(t.Context(), chat)
		check(t, err)
		if wait := time.Until(retryAt); !pending || wait > policy[0] || jump == 0 && wait < policy[0]/2 {
			t.Errorf("clock off by %v: pending %t, again in %v; want at most %v", jump, pending, wait, policy[0])
		}
	}
}
