package sqlite

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
)

func openFor(t testing.TB) *DB {
	t.Helper()
	db, err := Open(context.Background(), filepath.Join(t.TempDir(), "messages.db"), func(string, bool) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func said(t testing.TB, db *DB, chatJID, id, text string) int64 {
	t.Helper()
	seq, _, err := db.AddMessage(t.Context(), berth.Message{ID: id, ChatJID: chatJID, SenderName: "Ann", Text: text, Time: monday})
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

func found(t testing.TB, db *DB, chatJID, query string) []string {
	t.Helper()
	messages, err := db.SearchHistory(t.Context(), chatJID, query, 0, 50)
	if err != nil {
		t.Fatalf("%q: %v", query, err)
	}
	out := []string{}
	for _, m := range messages {
		out = append(out, m.ID)
	}
	return out
}

func TestSearchHistory(t *testing.T) {
	db := open(t)
	said(t, db, "a@g.us", "1", "The café opens at nine")
	said(t, db, "a@g.us", "2", "nine people like TEA")
	said(t, db, "a@g.us", "3", "people, tea at nine")
	said(t, db, "a@g.us", "4", "明日は会議があります")
	said(t, db, "a@g.us", "5", "price: 3*4 AND (more) NOT \"less\" col:umn -x +y ^z")
	said(t, db, "b@g.us", "6", "nine secrets and tea")
	said(t, db, "a-g.us@x", "7", "nine")
	for query, want := range map[string][]string{
		"nine":                {"3", "2", "1"},
		"NINE tea":            {"3", "2"},
		`"nine people"`:       {"2"},
		`"nine people`:        {"2"},
		"cafe":                {"1"},
		"peop*":               {"3", "2"},
		"peop":                {},
		"eopl*":               {},
		"CAF* ni*":            {"1"},
		"peop* (tea)":         {"3", "2"},
		`"nine peo*`:          {"2"},
		`nine* "people tea"`:  {"3"},
		"secr*":               {},
		"An*":                 {"5", "4", "3", "2", "1"},
		"secrets":             {},
		"Ann opens":           {"1"},
		"会議":                  {"4"},
		"会議 tea":              {},
		"AND":                 {"5"},
		"NOT (more)":          {"5"},
		"col:umn":             {"5"},
		"nine OR tea":         {},
		"NEAR(nine people)":   {},
		"nine -tea ^ + *":     {"3", "2"},
		"chat:nine":           {},
		`{sender} : "nine" )`: {},
		"612e672e7573":        {},
	} {
		if d := cmp.Diff(want, found(t, db, "a@g.us", query)); d != "" {
			t.Errorf("%q: %s", query, d)
		}
	}
	for _, query := range []string{"", " \n", `"`, "* ( ) - ^ \"\" :", strings.Repeat("x", 1001), strings.Repeat("a ", 17), "\xff"} {
		_, err := db.SearchHistory(t.Context(), "a@g.us", query, 0, 10)
		wantKind(t, err, berth.Invalid)
	}
	page, err := db.SearchHistory(t.Context(), "a@g.us", "nine", 0, 1)
	if must(t, page, err); len(page) != 1 || page[0].ID != "3" {
		t.Errorf("%+v", page)
	}
	page, err = db.SearchHistory(t.Context(), "a@g.us", "nine", page[0].Seq, 1)
	if must(t, page, err); len(page) != 1 || page[0].ID != "2" {
		t.Errorf("%+v", page)
	}
}

// The index follows: what was said since, and what was said in other words.
func TestSearchHistoryFollows(t *testing.T) {
	db := open(t)
	var wg sync.WaitGroup
	for i := range indexStep + 10 {
		wg.Go(func() {
			if _, _, err := db.AddMessage(t.Context(), berth.Message{ID: fmt.Sprint(i), ChatJID: "a@g.us", Text: fmt.Sprintf("number%d old", i), Time: monday}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := found(t, db, "a@g.us", fmt.Sprintf("number%d", indexStep+9)); len(got) != 1 {
		t.Errorf("got %q", got)
	}
	said(t, db, "a@g.us", "new", "fresh words")
	said(t, db, "a@g.us", "3", "edited words")
	if d := cmp.Diff([]string{"new", "3"}, found(t, db, "a@g.us", "words")); d != "" {
		t.Error(d)
	}
	if got := found(t, db, "a@g.us", "number3"); len(got) != 0 {
		t.Errorf("got %q", got)
	}
	if got := found(t, db, "b@g.us", "words"); len(got) != 0 {
		t.Errorf("another chat finds %q", got)
	}
}

// What the agent said is found too: once, and not before it was sent.
func TestSearchHistoryFindsAnswers(t *testing.T) {
	db := open(t)
	first := said(t, db, "a@g.us", "1", "a question")
	for i, o := range []berth.Outgoing{
		{ChatJID: "a@g.us", Text: "an answer 会議", Kind: berth.OutAnswer}, {ChatJID: "a@g.us", Text: "a kept answer", Kind: berth.OutAnswer, MessageID: "kept"},
		{ChatJID: "b@g.us", Text: "an answer elsewhere", Kind: berth.OutAnswer}, {ChatJID: "a@g.us", Text: "an answer of nobody", Kind: berth.OutNotice},
		{ChatJID: "a@g.us", Text: "an answer that waits", Kind: berth.OutAnswer},
	} {
		o.Key, o.CreatedAt = fmt.Sprint(i), monday.Add(time.Duration(i+1)*time.Second)
		if o.MessageID == "" {
			o.MessageID = fmt.Sprint("out", i)
		}
		if err := db.AddOutgoing(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		if i == 4 {
			continue
		}
		next, _, err := db.NextOutgoing(t.Context(), o.ChatJID)
		if must(t, next, err); db.MarkSent(t.Context(), next.ID) != nil {
			t.Fatal("not marked")
		}
	}
	_, _, err := db.AddMessage(t.Context(), berth.Message{ID: "kept", ChatJID: "a@g.us", SenderName: "Andy", Bot: true, Text: "a kept answer", Time: monday.Add(2 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	last, _, err := db.AddMessage(t.Context(), berth.Message{ID: "2", ChatJID: "a@g.us", Text: "another question", Time: monday.Add(time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	for query, want := range map[string][]string{"answer": {"kept", "out0"}, "an answer": {"out0"}, "会議": {"out0"}, "waits": {}, "question": {"2", "1"}} {
		if d := cmp.Diff(want, found(t, db, "a@g.us", query)); d != "" {
			t.Errorf("%q: %s", query, d)
		}
	}
	for before, want := range map[int64]int{first: 0, last: 2} {
		got, err := db.SearchHistory(t.Context(), "a@g.us", "answer", before, 10)
		if err != nil || len(got) != want {
			t.Errorf("before %d: %+v, %v", before, got, err)
		}
	}
	waiting, _, err := db.NextOutgoing(t.Context(), "a@g.us")
	if must(t, waiting, err); db.MarkSent(t.Context(), waiting.ID) != nil {
		t.Fatal("not marked")
	}
	got, err := db.SearchHistory(t.Context(), "a@g.us", "waits", 0, 10)
	if err != nil || len(got) != 1 || got[0].Seq != 0 || !got[0].Bot || got[0].Time.IsZero() {
		t.Errorf("%+v, %v", got, err)
	}
}

// A chat pays for its own history only.
func TestSearchHistoryIndexesOneChat(t *testing.T) {
	db := open(t)
	said(t, db, "a@g.us", "1", "words")
	said(t, db, "b@g.us", "2", "words")
	found(t, db, "a@g.us", "words")
	var n int
	if err := db.read.QueryRow(`SELECT count(*) FROM history WHERE history MATCH 'words'`).Scan(&n); err != nil || n != 1 {
		t.Errorf("%d messages are indexed, %v", n, err)
	}
}

// How long it takes to find the beginnings of words in the index depends on what
// all chats say.
func TestBeginningsAreNotLookedForInTheIndex(t *testing.T) {
	db := open(t)
	said(t, db, "a@g.us", "1", "words")
	if got := found(t, db, "a@g.us", "wor*"); len(got) != 1 {
		t.Errorf("found %q", got)
	}
	diff(t, "indexed", indexed(t, db), 0)
}

func indexed(t *testing.T, db *DB) (n int) {
	t.Helper()
	check(t, db.read.QueryRow(`SELECT count(*) FROM history`).Scan(&n))
	return n
}

// Long messages are indexed a few at a time: others write meanwhile.
func TestLongMessagesAreIndexedInSteps(t *testing.T) {
	db := open(t)
	for i := range 5 {
		said(t, db, "a@g.us", fmt.Sprint(i), "needle "+strings.Repeat("hay ", indexBytes/8))
	}
	check(t, db.writer.do(t.Context(), func(x *tx) error {
		done, err := x.indexSome("a@g.us")
		if done {
			t.Error("all at once")
		}
		return err
	}))
	diff(t, "indexed", indexed(t, db), 2)
	diff(t, "found", found(t, db, "a@g.us", "needle"), []string{"4", "3", "2", "1", "0"})
}

// What is no longer kept of an agent's texts is no longer in the index.
func TestIndexForgetsOldAnswers(t *testing.T) {
	db := open(t)
	for i := range 3 {
		check(t, db.AddOutgoing(t.Context(), berth.Outgoing{ChatJID: "a@g.us", Key: fmt.Sprint(i), Kind: berth.OutAnswer, Text: "an answer", MessageID: fmt.Sprint("m", i), CreatedAt: monday}))
		next, _, err := db.NextOutgoing(t.Context(), "a@g.us")
		check(t, db.MarkSent(t.Context(), must(t, next, err).ID))
	}
	diff(t, "found", found(t, db, "a@g.us", "answer"), []string{"m2", "m1", "m0"})
	check(t, db.writer.do(t.Context(), func(x *tx) error { return x.exec(`DELETE FROM outbox WHERE key <> '2'`) }))
	diff(t, "indexed", indexed(t, db), 1)
	diff(t, "found", found(t, db, "a@g.us", "answer"), []string{"m2"})
}

func FuzzSearchHistory(f *testing.F) {
	for _, query := range []string{"nine", `"nine people"`, `a" OR b`, "NEAR(a b, 3)", "{chat} : x*", "^a + -b", "\x00*", "会議", `""""`, "\ue000", "a\u0301*", "٣", "nin* \"e p*\" 会*"} {
		f.Add(query)
	}
	db := openFor(f)
	said(f, db, "a@g.us", "1", "nine people")
	said(f, db, "b@g.us", "2", "a secret with every word: nine people a b OR AND NOT x 会議 \ue000 ٣")
	f.Fuzz(func(t *testing.T, query string) {
		messages, err := db.SearchHistory(t.Context(), "a@g.us", query, 0, 10)
		if known, ok := errors.AsType[*berth.Error](err); err != nil && (!ok || known.Kind != berth.Invalid) {
			t.Fatalf("%q: %v", query, err)
		}
		for _, m := range messages {
			if m.ChatJID != "a@g.us" {
				t.Fatalf("%q found %+v", query, m)
			}
		}
	})
}

func BenchmarkSearchHistory(b *testing.B) {
	db := openFor(b)
	for i := range 10_000 {
		said(b, db, "a@g.us", fmt.Sprint(i), fmt.Sprintf("message %d says that word%d is here", i, i%100))
	}
	start := time.Now()
	if got := found(b, db, "a@g.us", "word42 here"); len(got) != 50 {
		b.Fatalf("found %d", len(got))
	}
	indexed := time.Since(start)
	for b.Loop() {
		found(b, db, "a@g.us", "word42 here")
	}
	b.ReportMetric(float64(indexed.Milliseconds()), "ms-to-index-10000")
}
