package sqlite

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
)

// What is edited keeps its place; one that gets the trigger is news, once.
func TestEdit(t *testing.T) {
	db := open(t)
	seq := say(t, db, "1", "hello", false)
	say(t, db, "2", "more", false)
	pending := func() bool {
		t.Helper()
		is, _, err := db.Pending(t.Context(), chat)
		return must(t, is, err)
	}
	edit := func(text string, wakes, want bool) {
		t.Helper()
		got, fresh, err := db.AddMessage(t.Context(), berth.Message{ID: "1", ChatJID: chat, Text: text, Wakes: wakes})
		if err != nil || got != seq || fresh != want {
			t.Errorf("%s: got #%d, %v, %v, want #%d, %v", text, got, fresh, err, seq, want)
		}
	}
	edit("hello all", false, false)
	if pending() {
		t.Error("an edit without the trigger woke")
	}
	edit("@Andy hello all", true, true)
	if !pending() {
		t.Error("an edit with the trigger did not wake")
	}
	edit("@Andy hello all", true, false) // it came again
	edit("hello", false, false)
	if !pending() {
		t.Error("the question is forgotten")
	}
	batch, ok, err := db.BeginRun(t.Context(), berth.Run{ID: "r", Folder: "family", ChatJID: chat})
	if err != nil || !ok || len(batch.Messages) != 2 || batch.Messages[0].Text != "hello" {
		t.Errorf("got %+v, %v, %v, want the new text in the old place", batch.Messages, ok, err)
	}
}

func TestQuestion(t *testing.T) {
	db := open(t)
	if _, ok, err := db.Question(t.Context(), chat, 9); ok || err != nil {
		t.Errorf("got %v, %v in an empty chat", ok, err)
	}
	first := say(t, db, "1", "one", true)
	say(t, db, "2", "context", false)
	second := say(t, db, "3", "two", true)
	for seq, want := range map[int64]string{first: "1", first + 1: "1", second: "3", second + 5: "3"} {
		if m, ok, err := db.Question(t.Context(), chat, seq); err != nil || !ok || m.ID != want {
			t.Errorf("#%d: got %q, %v, %v, want %q", seq, m.ID, ok, err, want)
		}
	}
	if _, ok, _ := db.Question(t.Context(), chat, first-1); ok {
		t.Error("found a question before the first")
	}
}

func TestNameChats(t *testing.T) {
	db := open(t)
	check(t, db.NameChats(t.Context(), []berth.Chat{{JID: "1@g.us", Name: "Old"}, {JID: "2@g.us", Name: "Two"}}))
	check(t, db.NameChats(t.Context(), []berth.Chat{{JID: "1@g.us", Name: "New"}}))
	got, err := db.Chats(t.Context(), 10)
	check(t, err)
	if d := cmp.Diff([]berth.Chat{{JID: "1@g.us", Name: "New"}, {JID: "2@g.us", Name: "Two"}}, got); d != "" {
		t.Error(d)
	}
}

// A message that gets the trigger when later ones were answered is asked anew, in
// a new place: the cursor is beyond the old one.
func TestEditAfterAnswer(t *testing.T) {
	db := open(t)
	seq := say(t, db, "1", "Andy, what time is it?", false)
	say(t, db, "2", "@Andy hello", true)
	b, ok, err := db.BeginRun(t.Context(), berth.Run{ID: "r", Folder: "family", ChatJID: chat})
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	check(t, db.Commit(t.Context(), berth.Progress{RunID: "r", Acked: []string{b.AckID}, TurnEnded: true}))
	got, fresh, err := db.AddMessage(t.Context(), berth.Message{ID: "1", ChatJID: chat, Text: "@Andy, what time is it?", Wakes: true})
	if err != nil || !fresh || got <= seq {
		t.Errorf("got #%d, %v, %v", got, fresh, err)
	}
	if is, _, err := db.Pending(t.Context(), chat); err != nil || !is {
		t.Errorf("pending %v, %v", is, err)
	}
	b, ok, err = db.NextBatch(t.Context(), "r", chat)
	if err != nil || !ok || len(b.Messages) != 1 || b.Messages[0].Text != "@Andy, what time is it?" {
		t.Errorf("got %+v, %v, %v", b.Messages, ok, err)
	}
}
