package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"path/filepath"
	"testing"
	"time"

	"github.com/pressly/goose/v3"

	"berth/orchestrator/internal/berth"
)

// turns has a run take so many turns in a session.
func turns(t *testing.T, db *DB, run, session string, n int) {
	t.Helper()
	say(t, db, run, "hi", true)
	begin(t, db, run)
	for range n {
		check(t, db.Commit(t.Context(), berth.Progress{RunID: run, Session: session}))
		check(t, db.Commit(t.Context(), berth.Progress{RunID: run, Acked: []string{run}, TurnEnded: true}))
	}
	_, err := db.FinishRun(t.Context(), berth.Ending{RunID: run, At: time.Now()})
	check(t, err)
}

// A session is as old as its conversation, whatever ids it had, and ends once.
func TestEndSession(t *testing.T) {
	db := open(t)
	before := time.Now().Add(-time.Second)
	end := func(engine string, since time.Time, most int, want string) {
		t.Helper()
		got, err := db.EndSession(t.Context(), "family", engine, since, most)
		if err != nil || got != want {
			t.Errorf("ended %q, %v, want %q", got, err, want)
		}
	}
	end("", time.Now(), 1, "")
	turns(t, db, "r1", "s1", 2)
	turns(t, db, "r2", "s2", 1)
	end("", before, 4, "")
	end("", time.Time{}, 0, "")
	end("other", time.Now(), 1, "")
	end("", time.Time{}, 3, "s2")
	end("", time.Time{}, 3, "")
	turns(t, db, "r3", "s3", 1)
	end("", before, 3, "")
	end("", time.Now().Add(time.Second), 3, "s3")
	if id, err := db.Session(t.Context(), "family", ""); id != "" || err != nil {
		t.Errorf("session %q, %v", id, err)
	}
}

// A session that an older version left is as old as the new one.
func TestSessionsOfAnOlderVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "messages.db")
	old, err := sql.Open("sqlite", dsn(path))
	check(t, err)
	files, err := fs.Sub(migrations, "migrations")
	check(t, err)
	p, err := goose.NewProvider(goose.DialectSQLite3, old, files, goose.WithLogger(goose.NopLogger()))
	check(t, err)
	_, err = p.UpTo(context.Background(), 9)
	check(t, err)
	_, err = old.ExecContext(t.Context(), `INSERT INTO sessions (group_folder, engine, session_id) VALUES ('family', '', 's1')`)
	check(t, err)
	check(t, old.Close())
	db := openAt(t, path)
	for _, c := range []struct {
		since time.Duration
		want  string
	}{{-time.Minute, ""}, {time.Minute, "s1"}} {
		if got, err := db.EndSession(t.Context(), "family", "", time.Now().Add(c.since), 1); err != nil || got != c.want {
			t.Errorf("%v: ended %q, %v, want %q", c.since, got, err, c.want)
		}
	}
}

// What people wanted of a group that was removed is not done when it is back.
func TestCompactionOfARemovedGroup(t *testing.T) {
	db := open(t)
	g := berth.Group{JID: chat, Name: "Family", Folder: "family", AddedAt: time.Now()}
	check(t, db.AddGroup(t.Context(), g))
	turns(t, db, "r1", "s1", 1)
	if asked, err := db.AskCompaction(t.Context(), g, chat, "k1"); err != nil || !asked {
		t.Fatal(asked, err)
	}
	pending := func(want bool) {
		t.Helper()
		if got, _, err := db.Pending(t.Context(), chat); err != nil || got != want {
			t.Errorf("pending %v, %v", got, err)
		}
	}
	pending(true)
	check(t, db.RemoveGroup(t.Context(), "family"))
	check(t, db.AddGroup(t.Context(), g))
	pending(false)
}

// Everybody who asked is told once, whatever is asked again and whoever dies.
func TestCompactions(t *testing.T) {
	db := open(t)
	family := berth.Group{Folder: "family", JID: chat}
	ask := func(to, key string, want bool) {
		t.Helper()
		if got, err := db.AskCompaction(t.Context(), family, to, key); err != nil || got != want {
			t.Errorf("%s: asked %v, %v", key, got, err)
		}
	}
	told := func(to string, want ...string) {
		t.Helper()
		var got []string
		for {
			o, ok, err := db.NextOutgoing(t.Context(), to)
			check(t, err)
			if !ok {
				break
			}
			got = append(got, o.Key+" "+o.Text)
			check(t, db.MarkSent(t.Context(), o.ID))
		}
		diff(t, "told "+to, got, want)
	}
	next := func(run string, want int64) {
		t.Helper()
		if id, ok, err := db.NextCompaction(t.Context(), run, chat, "failed"); err != nil || id != want || ok != (want > 0) {
			t.Errorf("run %s: %d, %v, %v; want %d", run, id, ok, err, want)
		}
	}
	ask(chat, "k0", false)
	turns(t, db, "r1", "s1", 1)
	ask(chat, "k1", true)
	ask(chat, "k1", true)
	ask("console:main", "k2", true)
	say(t, db, "m2", "hi", true)
	begin(t, db, "r2")
	next("r2", 1)
	ask(chat, "k3", true) // for the next
	next("r2", 3)
	if id, ok, err := db.OpenCompaction(t.Context(), "r2"); id != 1 || !ok || err != nil {
		t.Errorf("open %d, %v, %v", id, ok, err)
	}
	check(t, db.EndCompaction(t.Context(), "r2", "done"))
	check(t, db.EndCompaction(t.Context(), "r2", "done again"))
	told(chat, "k1 done", "k3 done")
	told("console:main", "k2 done")
	ask(chat, "k1", true) // it was told
	next("r2", 0)

	// Runs that end without a word, three times; where the fault is nobody's, that is
	// no attempt.
	ask(chat, "k4", true)
	next("r2", 4)
	for i := range 8 {
		_, err := db.FinishRun(t.Context(), berth.Ending{RunID: fmt.Sprintf("r%d", i+2), At: time.Now(), Uncounted: i < 5})
		check(t, err)
		run := berth.Run{ID: fmt.Sprintf("r%d", i+3), Folder: "family", ChatJID: chat, Nonce: "n", StartedAt: time.Now()}
		if id, ok, err := db.BeginCompaction(t.Context(), run, "nothing", "failed"); err != nil || ok != (i < 7) || ok && id != 4 {
			t.Errorf("attempt %d: %d, %v, %v", i+2, id, ok, err)
		}
	}
	told(chat, "k4 failed")
	if live, err := db.LiveRuns(t.Context()); err != nil || len(live) > 0 {
		t.Errorf("live %v, %v", live, err)
	}
}
