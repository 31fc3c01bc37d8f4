package sqlite

import (
	"fmt"
	"path/filepath"
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

// W34: the agent of a chat is told once of each of its texts that was given up.
func TestW34UndeliveredIsToldOnce(t *testing.T) {
	db := open(t)
	told := func(jid string) string {
		t.Helper()
		out, err := db.Undelivered(t.Context(), jid)
		check(t, err)
		return outTexts(out)
	}
	diff(t, "at first", told("a"), "")
	kill(t, db, "a", "1")
	kill(t, db, "b", "2")
	kill(t, db, "a", "3")
	post(t, db, "a", "pending")
	diff(t, "a", told("a"), "a 1: no such chat, a 3: no such chat")
	diff(t, "a again", told("a"), "")
	diff(t, "b", told("b"), "b 2: no such chat")
	for i := range 12 {
		kill(t, db, "c", fmt.Sprint(i))
	}
	if got := told("c"); !strings.HasPrefix(got, "c 2: ") || !strings.HasSuffix(got, "c 11: no such chat") {
		t.Errorf("of many: got %s", got)
	}
	diff(t, "c again", told("c"), "")
	out, err := db.DeadLetters(t.Context(), 100)
	check(t, err)
	diff(t, "the operator still sees", len(out), 15)
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
