package sqlite

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

func note(t *testing.T, db *DB, text string) {
	t.Helper()
	check(t, db.writer.do(t.Context(), func(x *tx) error { return x.addNote(chat, text, monday) }))
}

func noted(b berth.Batch) []string {
	out := []string{}
	for _, n := range b.Notes {
		out = append(out, n.Text)
	}
	return out
}

// What a heartbeat found goes with one batch of its chat, again if that came to
// nothing, and never twice, over restarts.
func TestNotesGoWithOneBatch(t *testing.T) {
	path := filepath.Join(t.TempDir(), "messages.db")
	db := must2(Open(t.Context(), path, func(string, bool) {}))(t)
	begin := func(id string) berth.Batch {
		t.Helper()
		said(t, db, chat, "m-"+id, "hi")
		check(t, db.writer.do(t.Context(), func(x *tx) error { return x.exec(`UPDATE messages SET wakes = 1`) }))
		b, ok, err := db.BeginRun(t.Context(), berth.Run{ID: id, Folder: "family", ChatJID: chat, Kind: berth.KindChat, StartedAt: monday})
		if check(t, err); !ok {
			t.Fatal("nothing is pending")
		}
		return b
	}
	end := func(b berth.Batch, fails bool) {
		t.Helper()
		e := berth.Ending{RunID: b.RunID, At: monday, Backoff: []time.Duration{0, 0, 0}}
		if fails {
			e.Error = "broke"
		} else {
			check(t, db.Commit(t.Context(), berth.Progress{RunID: b.RunID, Acked: []string{b.AckID}, TurnEnded: true}))
		}
		finish(t, db, e)
	}
	diff(t, "none", noted(begin("r0")), []string{})
	finish(t, db, berth.Ending{RunID: "r0", At: monday, Error: "broke", Backoff: []time.Duration{0}})

	note(t, db, "the disk is full")
	note(t, db, "all is well")
	note(t, db, "the disk is full") // is said once, as the newest
	b := begin("r1")
	diff(t, "first", noted(b), []string{"all is well", "the disk is full"})
	if !b.Notes[0].Time.Equal(monday) {
		t.Errorf("%+v", b.Notes)
	}
	check(t, db.Close()) // and killed
	db = must2(Open(t.Context(), path, func(string, bool) {}))(t)
	defer func() { check(t, db.Close()) }()
	open := must2(db.OpenBatches(t.Context(), "r1"))(t)
	diff(t, "after a restart", noted(open[0]), []string{"all is well", "the disk is full"})
	end(b, true)
	note(t, db, "it rains")
	b = begin("r2")
	diff(t, "again", noted(b), []string{"all is well", "the disk is full", "it rains"})
	end(b, false)
	diff(t, "told", noted(begin("r3")), []string{})
	finish(t, db, berth.Ending{RunID: "r3", At: monday, Error: "broke", Backoff: []time.Duration{0, 0}})

	// Nobody asks for a long time.
	for i := range 2 * maxNotes {
		note(t, db, fmt.Sprintf("%d %s", i, strings.Repeat("é", 2*maxNote)))
	}
	var rows int
	check(t, db.read.QueryRow(`SELECT count(*) FROM notes`).Scan(&rows))
	diff(t, "kept", rows, maxNotes)
	b = begin("r4")
	if got := noted(b); len(got) != maxNotes || !strings.HasPrefix(got[0], "6 é") || len([]rune(got[0])) != maxNote {
		t.Errorf("%d notes, %.20q", len(got), got)
	}
}

// What the heartbeat says reaches the notes in the transaction of its frame; a task
// that is none leaves nothing there.
func TestFoundIsNoted(t *testing.T) {
	db := open(t)
	add(t, db, every(1))
	must2(db.RunTask(t.Context(), "family", "t1", at(1)))(t)
	if !claim(t, db, "r1", at(1)) {
		t.Fatal("not due")
	}
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", Seq: 1, Spoke: true, Summary: "shown", Found: "shown and hidden"}))
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", Seq: 2, Spoke: true, Summary: "more"}))
	var text string
	check(t, db.read.QueryRow(`SELECT group_concat(text) FROM notes WHERE chat_jid = ?`, chat).Scan(&text))
	diff(t, "noted", text, "shown and hidden")
	_, spoke, err := db.TaskOf(t.Context(), "r1")
	if check(t, err); !spoke {
		t.Error("a result without words is none")
	}
}

// A live run whose sessions were dropped brings none back, whatever daemon hears it;
// the next run may have one.
func TestDroppedSessionStaysDropped(t *testing.T) {
	db := open(t)
	run := func(id, session string) {
		t.Helper()
		check(t, db.writer.do(t.Context(), func(x *tx) error {
			return x.beginRun(berth.Run{ID: id, Folder: "family", ChatJID: chat, Kind: berth.KindChat, Engine: "builtin", StartedAt: monday})
		}))
		check(t, db.Commit(t.Context(), berth.Progress{RunID: id, Seq: 1, Session: session}))
	}
	session := func() string {
		t.Helper()
		return must2(db.Session(t.Context(), "family", "builtin"))(t)
	}
	run("r1", "old")
	diff(t, "kept", session(), "old")
	check(t, db.DropSessions(t.Context(), "family"))
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r1", Seq: 2, Session: "old"}))
	diff(t, "dropped", session(), "")
	live := must2(db.LiveRuns(t.Context()))(t)
	if len(live) != 1 || !live[0].Renewed {
		t.Errorf("%+v", live)
	}
	finish(t, db, berth.Ending{RunID: "r1", At: monday})
	run("r2", "new")
	diff(t, "kept again", session(), "new")
	if live := must2(db.LiveRuns(t.Context()))(t); live[0].Renewed {
		t.Errorf("%+v", live)
	}
}

// The newest messages of a chat, with what its agent said.
func TestRecent(t *testing.T) {
	db := open(t)
	for i := range 4 {
		_, _, err := db.AddMessage(t.Context(), berth.Message{ID: fmt.Sprint(i), ChatJID: chat, Text: fmt.Sprint("text ", i), Time: at(float64(i))})
		check(t, err)
	}
	said(t, db, "elsewhere@g.us", "x", "a secret")
	for i, text := range []string{"an answer", "one that waits"} {
		check(t, db.AddOutgoing(t.Context(), berth.Outgoing{ChatJID: chat, Key: text, Kind: berth.OutAnswer, Text: text, MessageID: text, CreatedAt: at(2.5)}))
		if i == 0 {
			o, _, err := db.NextOutgoing(t.Context(), chat)
			check(t, db.MarkSent(t.Context(), must(t, o, err).ID))
		}
	}
	var got []string
	for _, m := range must2(db.Recent(t.Context(), chat, 3))(t) {
		got = append(got, fmt.Sprint(m.Text, " ", m.Bot))
	}
	diff(t, "newest", got, []string{"text 2 false", "an answer true", "text 3 false"})
}
