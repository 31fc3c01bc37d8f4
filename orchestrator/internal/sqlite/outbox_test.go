package sqlite

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

func post(t *testing.T, db *DB, jid, text string) berth.Outgoing {
	t.Helper()
	check(t, db.AddOutgoing(t.Context(), berth.Outgoing{
		ChatJID: jid, Key: "ipc/" + jid + "/" + text + "/0", Kind: berth.OutMessage, Text: text, MessageID: berth.NewID(4), CreatedAt: time.Now(),
	}))
	o, ok, err := db.NextOutgoing(t.Context(), jid)
	check(t, err)
	if !ok {
		t.Fatal("nothing to send")
	}
	return o
}

func kill(t *testing.T, db *DB, jid, text string) {
	t.Helper()
	check(t, db.MarkFailed(t.Context(), post(t, db, jid, text).ID, "no such chat", time.Time{}))
}

func outTexts(out []berth.Outgoing) string {
	var texts []string
	for _, o := range out {
		texts = append(texts, o.ChatJID+" "+o.Text+": "+o.Error)
	}
	return strings.Join(texts, ", ")
}

// DL-07: what a daemon did not deliver is there for the next one, as it was.
func TestDL07UndeliveredAreFound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "messages.db")
	var before berth.Outgoing
	t.Run("before", func(t *testing.T) {
		db := openAt(t, path)
		o := post(t, db, "a", "sent")
		check(t, db.MarkSent(t.Context(), o.ID))
		kill(t, db, "b", "dead")
		before = post(t, db, "c", "under way")
	})
	db := openAt(t, path)
	chats, err := db.OutboxChats(t.Context())
	check(t, err)
	diff(t, "chats", chats, []string{"c"})
	o, _, err := db.NextOutgoing(t.Context(), "c")
	check(t, err)
	diff(t, "text", o, before)
}

// DL-04: the operator sees what was given up, and why; the newest first.
func TestDL04DeadLetters(t *testing.T) {
	db := open(t)
	out, err := db.DeadLetters(t.Context(), 2)
	check(t, err)
	diff(t, "at first", outTexts(out), "")
	for _, text := range []string{"1", "2", "3"} {
		kill(t, db, "a", text)
	}
	post(t, db, "a", "pending")
	out, err = db.DeadLetters(t.Context(), 2)
	check(t, err)
	diff(t, "dead", outTexts(out), "a 3: no such chat, a 2: no such chat")
	diff(t, "state", out[0].State, berth.OutDead)
	pending, dead, err := db.OutboxCounts(t.Context())
	check(t, err)
	diff(t, "counts", []int{pending, dead}, []int{1, 3})
}

// W34: the agent of a chat is told once of each of its texts that was given up,
// with the next batch that it takes.
func TestW34UndeliveredIsToldOnce(t *testing.T) {
	db := open(t)
	next := func(run string) string {
		t.Helper()
		say(t, db, "m-"+run, "@Andy hello", true)
		return outTexts(begin(t, db, run).Undelivered)
	}
	diff(t, "at first", next("r1"), "")
	kill(t, db, chat, "1")
	kill(t, db, "b", "2")
	kill(t, db, chat, "3")
	pending := post(t, db, chat, "pending")
	say(t, db, "m1", "@Andy more", true)
	b, ok, err := db.NextBatch(t.Context(), "r1", chat)
	check(t, err)
	const both = chat + " 1: no such chat, " + chat + " 3: no such chat"
	check(t, db.MarkSent(t.Context(), pending.ID))
	diff(t, "follow-up", []any{ok, outTexts(b.Undelivered)}, []any{true, both})
	open, err := db.OpenBatches(t.Context(), "r1")
	check(t, err)
	diff(t, "when it is sent again", []string{outTexts(open[0].Undelivered), outTexts(open[1].Undelivered)}, []string{"", both})

	_, err = db.FinishRun(t.Context(), berth.Ending{RunID: "r1", At: time.Now(), Error: "killed", Backoff: policy})
	check(t, err)
	diff(t, "after a run that took nothing", next("r2"), both)
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r2", Acked: []string{"m-r2"}, TurnEnded: true}))
	_, err = db.FinishRun(t.Context(), berth.Ending{RunID: "r2", At: time.Now()})
	check(t, err)
	diff(t, "after a run that took it", next("r3"), "")
	_, err = db.FinishRun(t.Context(), berth.Ending{RunID: "r3", At: time.Now(), Error: "killed", Backoff: policy})
	check(t, err)

	for i := range 12 {
		kill(t, db, chat, fmt.Sprint("many ", i))
	}
	if got := next("r4"); !strings.HasPrefix(got, chat+" many 2: ") || !strings.HasSuffix(got, " many 11: no such chat") {
		t.Errorf("of many: got %s", got)
	}
	out, err := db.DeadLetters(t.Context(), 100)
	check(t, err)
	diff(t, "the operator still sees", len(out), 15)
}

// A text that the operator had sent again, while the batch that told of it came to
// nothing, is told of again when it is given up again.
func TestUndeliveredTwice(t *testing.T) {
	db := open(t)
	kill(t, db, chat, "lost")
	say(t, db, "m1", "@Andy hello", true)
	diff(t, "first", len(begin(t, db, "r1").Undelivered), 1)
	must2(db.RetryOutgoing(t.Context()))(t)
	must2(db.FinishRun(t.Context(), berth.Ending{RunID: "r1", At: time.Now(), Error: "x", Uncounted: true}))(t)
	o, _, err := db.NextOutgoing(t.Context(), chat)
	check(t, err)
	check(t, db.MarkFailed(t.Context(), o.ID, "no such chat", time.Time{}))
	diff(t, "again", len(begin(t, db, "r2").Undelivered), 1)
}

// An agent cannot fill the store with what nobody takes; what is stored already may
// come again, and Berth's own words always fit.
func TestAgentsWaitForTheChannel(t *testing.T) {
	db := open(t)
	for i := range maxWaiting {
		post(t, db, chat, fmt.Sprint(i))
	}
	o := berth.Outgoing{ChatJID: chat, Key: "one more", Kind: berth.OutMessage, Text: "x", MessageID: "x", CreatedAt: time.Now()}
	diff(t, "kind", kindOf(db.AddOutgoing(t.Context(), o)), berth.Conflict)
	post(t, db, chat, "0")
	post(t, db, "b", "another chat")
	o.Kind = berth.OutNotice
	check(t, db.AddOutgoing(t.Context(), o))
	first, _, err := db.NextOutgoing(t.Context(), chat)
	check(t, err)
	check(t, db.MarkSent(t.Context(), first.ID))
	check(t, db.MarkSent(t.Context(), first.ID+1))
	post(t, db, chat, "now")
}

// Neither a look for work nor a count reads what was sent long ago.
func TestOutboxLooksUseIndexes(t *testing.T) {
	db := open(t)
	for _, query := range []string{
		`SELECT count(*) FROM outbox WHERE state = 'pending'`,
		`SELECT count(*) FROM outbox WHERE state = 'dead'`,
		`SELECT id FROM outbox WHERE state = 'dead' ORDER BY id DESC LIMIT 3`,
		`SELECT 1 FROM outbox WHERE chat_jid = 'a' AND state = 'dead' AND told = 0`,
		`SELECT id FROM outbox WHERE chat_jid = 'a' AND state = 'pending' ORDER BY id LIMIT 1`,
	} {
		var id, parent, unused int
		var plan string
		check(t, db.read.QueryRowContext(t.Context(), `EXPLAIN QUERY PLAN `+query).Scan(&id, &parent, &unused, &plan))
		if !strings.Contains(plan, "outbox_pending") && !strings.Contains(plan, "outbox_dead") {
			t.Errorf("%s: %s", query, plan)
		}
	}
}

// What was sent does not stay for ever, or an agent could fill the store. What
// others count on stays: notices, what waits, other chats.
func TestSentTextsAreForgotten(t *testing.T) {
	db := open(t)
	notice := berth.Outgoing{ChatJID: "a", Key: "once", Kind: berth.OutNotice, Text: "n", MessageID: "n", CreatedAt: time.Now()}
	check(t, db.AddOutgoing(t.Context(), notice))
	check(t, db.MarkSent(t.Context(), 1))
	check(t, db.writer.do(t.Context(), func(x *tx) error {
		for i := range 2 * keptSent {
			err := x.exec(`INSERT INTO outbox (chat_jid, key, kind, text, message_id, state, created_at) VALUES (?, ?, 'message', 'x', 'x', 'sent', '')`,
				[]string{"a", "b"}[i%2], fmt.Sprint("sent ", i))
			if err != nil {
				return err
			}
		}
		return nil
	}))
	for range 64 {
		check(t, db.MarkSent(t.Context(), post(t, db, "a", fmt.Sprint(berth.NewID(4))).ID))
	}
	dead := post(t, db, "a", "dead")
	check(t, db.MarkFailed(t.Context(), dead.ID, "no such chat", time.Time{}))
	count := func(where string) (n int) {
		check(t, db.read.QueryRowContext(t.Context(), `SELECT count(*) FROM outbox WHERE `+where).Scan(&n))
		return n
	}
	if n := count(`chat_jid = 'a' AND state = 'sent' AND kind = 'message'`); n < keptSent || n >= keptSent+64 {
		t.Errorf("%d sent texts are kept, want about %d", n, keptSent)
	}
	if n := count(`chat_jid = 'b'`); n != keptSent {
		t.Errorf("%d texts of another chat", n)
	}
	if count(`key = 'once'`) != 1 || count(`state = 'dead'`) != 1 {
		t.Error("a notice or a dead letter is gone")
	}
}

// What goes along with a text is stored with it, and known by its key as long as it
// matters.
func TestOutgoingFiles(t *testing.T) {
	db := open(t)
	add := func(key string, size int64) (o berth.Outgoing, err error) {
		err = db.AddOutgoing(t.Context(), berth.Outgoing{
			ChatJID: chat, Key: key, Kind: berth.OutMessage, Text: "look", File: "family/out/a.png", FileSize: size, MessageID: key, CreatedAt: time.Now(),
		})
		if err == nil {
			o, _, err = db.Outgoing(t.Context(), key)
		}
		return o, err
	}
	first, err := add("k1", berth.MaxFiles-10)
	check(t, err)
	diff(t, "stored", []any{first.File, first.FileSize, first.Shown()}, []any{"family/out/a.png", int64(berth.MaxFiles - 10), "[file a.png, 256.0 MiB] look"})
	next, _, err := db.NextOutgoing(t.Context(), chat)
	check(t, err)
	diff(t, "the next one", next, first)
	_, err = add("k2", 11)
	diff(t, "too much", kindOf(err), berth.Conflict)
	_, err = add("k1", 11)
	check(t, err)
	_, err = add("k3", 10)
	check(t, err)
	files := func(want ...string) {
		t.Helper()
		got, err := db.OutboxFiles(t.Context())
		check(t, err)
		slices.Sort(got)
		diff(t, "files", strings.Join(got, " "), strings.Join(want, " "))
	}
	files("k1", "k3")
	check(t, db.MarkFailed(t.Context(), first.ID, "no", time.Time{}))
	files("k1", "k3")
	must2(db.DropOutgoing(t.Context(), first.ID))(t)
	files("k3")
	third, _, err := db.Outgoing(t.Context(), "k3")
	check(t, err)
	check(t, db.MarkSent(t.Context(), third.ID))
	files()
	if o, ok, err := db.Outgoing(t.Context(), "k3"); err != nil || !ok || o.State != berth.OutSent {
		t.Errorf("%+v, %t, %v", o, ok, err)
	}
	if _, ok, err := db.Outgoing(t.Context(), "none"); err != nil || ok {
		t.Errorf("%t, %v", ok, err)
	}
	for _, query := range []string{`SELECT sum(file_size) FROM outbox WHERE chat_jid = 'a' AND ` + withFile, `SELECT key FROM outbox WHERE ` + withFile} {
		var id, parent, unused int
		var plan string
		check(t, db.read.QueryRowContext(t.Context(), `EXPLAIN QUERY PLAN `+query).Scan(&id, &parent, &unused, &plan))
		if !strings.Contains(plan, "outbox_files") {
			t.Errorf("%s: %s", query, plan)
		}
	}
}

// Who only reacted has not answered.
func TestReactionIsNoAnswer(t *testing.T) {
	db := open(t)
	say(t, db, "m1", "@Andy hello", true)
	begin(t, db, "r1")
	check(t, db.AddOutgoing(t.Context(), berth.Outgoing{ChatJID: chat, Key: "k", Kind: berth.OutReaction, Text: "👍", ReactsTo: 1, MessageID: "x", CreatedAt: time.Now()}))
	v, err := db.FinishRun(t.Context(), berth.Ending{RunID: "r1", At: time.Now(), Error: "killed", Backoff: policy})
	check(t, err)
	diff(t, "pending again", v.Returned, true)
	o, _, err := db.NextOutgoing(t.Context(), chat)
	check(t, err)
	diff(t, "reaction", []any{o.Kind, o.ReactsTo, o.Shown()}, []any{berth.OutReaction, int64(1), "[reaction 👍 to #1]"})
}
