package console

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"berth/orchestrator/internal/bell"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
)

func open(t *testing.T) (*Channel, *sqlite.DB) {
	t.Helper()
	var b bell.Bell
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "db"), func(chat string, _ bool) { b.Ring(chat) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return New(db, &b, "Andy", "/berth/groups"), db
}

// follow returns the events of a chat as they come.
func follow(t *testing.T, c *Channel, seq int64) func() string {
	ctx, cancel := context.WithCancel(t.Context())
	events := make(chan string)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e, err := range c.Follow(ctx, "console:a", seq) {
			text := fmt.Sprint("typing ", e.Typing)
			if e.Message != nil {
				text = e.Message.SenderName + ": " + e.Message.Text
			}
			if err != nil {
				text = err.Error()
			}
			select {
			case events <- text:
			case <-ctx.Done():
				return
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return func() string {
		select {
		case e := <-events:
			return e
		case <-time.After(10 * time.Second):
			t.Fatal("nothing came")
			return ""
		}
	}
}

func want(t *testing.T, next func() string, wants ...string) {
	t.Helper()
	for _, w := range wants {
		if got := next(); got != w {
			t.Errorf("got %q, want %q", got, w)
		}
	}
}

func TestFollow(t *testing.T) {
	c, db := open(t)
	say := func(id, text string) int64 {
		seq, _, err := db.AddMessage(t.Context(), berth.Message{ID: id, ChatJID: "console:a", SenderName: "Ann", Text: text, Time: time.Now()})
		if err != nil {
			t.Fatal(err)
		}
		return seq
	}
	one := say("1", "one")
	next := follow(t, c, 0)
	want(t, next, "Ann: one", "typing false")
	c.SetTyping("console:a", true)
	want(t, next, "typing true")
	c.SetTyping("console:a", true) // no news
	out := berth.Outgoing{ChatJID: "console:a", MessageID: "m1", Text: "hello"}
	for range 2 { // sent again after a crash: shown once
		if err := c.Send(t.Context(), out); err != nil {
			t.Fatal(err)
		}
	}
	want(t, next, "Andy: hello")
	c.SetTyping("console:a", false)
	want(t, next, "typing false")
	say("2", "two")
	want(t, next, "Ann: two")

	want(t, follow(t, c, one), "Andy: hello", "Ann: two", "typing false")
	want(t, follow(t, c, -2), "Andy: hello", "Ann: two", "typing false")
	want(t, follow(t, c, -99), "Ann: one")
}

func TestFollowPages(t *testing.T) {
	c, _ := open(t)
	for i := range 250 {
		if err := c.Send(t.Context(), berth.Outgoing{ChatJID: "console:a", MessageID: fmt.Sprint(i), Text: fmt.Sprint(i)}); err != nil {
			t.Fatal(err)
		}
	}
	next := follow(t, c, 0)
	for i := range 250 {
		want(t, next, fmt.Sprint("Andy: ", i))
	}
	want(t, next, "typing false")
}

func TestOwns(t *testing.T) {
	for jid, want := range map[string]bool{"console:a": true, JID("x"): true, "1@g.us": false, "": false} {
		if got := Owns(jid); got != want {
			t.Errorf("%s: got %v", jid, got)
		}
	}
}

// Who sees nothing but text reads what a file is and where it lies, and what is
// reacted to.
func TestSendWhatIsNoText(t *testing.T) {
	c, db := open(t)
	seq, _, err := db.AddMessage(t.Context(), berth.Message{ID: "q", ChatJID: "console:a", SenderName: "Ann", Text: "shall we\nmeet?", Time: time.Unix(1, 0)})
	if err != nil {
		t.Fatal(err)
	}
	for i, o := range []berth.Outgoing{
		{File: "a/out/chart.png", FileSize: 12_300, Text: "look"},
		{File: "a/b.txt", FileSize: 7},
		{Kind: berth.OutReaction, Text: "👍", ReactsTo: seq},
		{Kind: berth.OutReaction, Text: "👍", ReactsTo: 99},
	} {
		o.ChatJID, o.MessageID = "console:a", fmt.Sprint("m", i)
		for range 2 { // as after a crash
			if err := c.Send(t.Context(), o); err != nil {
				t.Fatal(err)
			}
		}
	}
	want(t, follow(t, c, seq),
		"Andy: [file chart.png, 12 KiB] look\n/berth/groups/a/out/chart.png",
		"Andy: [file b.txt, 7 bytes]\n/berth/groups/a/b.txt",
		"Andy: [reaction 👍 to: shall we meet?]",
		"Andy: [reaction 👍 to #99]",
		"typing false",
	)
}
