package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
	"berth/orchestrator/internal/workspace"
)

// A file is there as long as its text can still be sent: a restart keeps it, an
// operator who drops the text drops it too, and what is left over goes at the start.
func TestFilesOfTheOutbox(t *testing.T) {
	tree, err := workspace.NewTree(t.TempDir(), os.Geteuid(), os.Getegid())
	if err != nil {
		t.Fatal(err)
	}
	db, err := sqlite.Open(t.Context(), storeFile(tree), func(string, bool) {})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	g, err := tree.Group("family")
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	var ids []int64
	for _, key := range []string{"sent", "dropped", "given up", "pending", "left over"} {
		file, size, err := g.KeepFile("AGENTS.md", key)
		if err != nil {
			t.Fatal(err)
		}
		if key == "left over" {
			continue // killed before its text was stored
		}
		if err := db.AddOutgoing(t.Context(), berth.Outgoing{ChatJID: "a", Key: key, Kind: berth.OutMessage, File: file, FileSize: size, MessageID: key, CreatedAt: time.Now()}); err != nil {
			t.Fatal(err)
		}
		o, _, err := db.Outgoing(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, o.ID)
	}
	there := func(keys ...string) {
		t.Helper()
		found, err := filepath.Glob(filepath.Join(tree.Dir(), "data/outbox/*"))
		if err != nil || len(found) != len(keys) {
			t.Errorf("%d are there, want %q: %v", len(found), keys, err)
		}
		for _, key := range keys {
			if _, err := os.Stat(filepath.Join(tree.OutboxDir(key), "AGENTS.md")); err != nil {
				t.Errorf("%s: %v", key, err)
			}
		}
	}
	c := &control{texts: texts{db}, tree: tree}
	if n, err := c.DropTexts(t.Context(), web.Texts{IDs: ids[1:2]}); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	there("sent", "given up", "pending", "left over")
	if err := db.MarkFailed(t.Context(), ids[2], "no", time.Time{}); err != nil {
		t.Error(err)
	}
	if err := db.MarkSent(t.Context(), ids[0]); err != nil { // and killed then
		t.Error(err)
	}
	sweepFiles(t.Context(), tree, db, zaptest.NewLogger(t))
	there("given up", "pending")
	if n, err := c.DropTexts(t.Context(), web.Texts{}); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	there("pending")
	r := &router{tree: tree, log: zaptest.NewLogger(t)}
	r.Release(berth.Outgoing{Key: "pending"}) // of a text without a file
	there("pending")
	r.Release(berth.Outgoing{Key: "pending", File: "family/AGENTS.md"})
	there()
}
