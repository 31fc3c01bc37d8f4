package ipc

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/outbox"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/workspace"
)

// told is a channel that tells which chats it was asked to write to.
type told chan string

func (c told) Send(_ context.Context, o berth.Outgoing) error {
	c <- o.ChatJID + " " + o.Text
	return nil
}

// DL-06: a text for a chat that its agent may not write to never comes to the
// channel, nor into the outbox; the agent is told that it failed.
func TestDL06ForbiddenTargetNeverReachesTheChannel(t *testing.T) {
	root := t.TempDir()
	tree, err := workspace.NewTree(root, os.Getuid(), os.Getgid())
	check(t, err)
	var sender *outbox.Sender
	db, err := sqlite.Open(t.Context(), filepath.Join(root, "store", "messages.db"), func(chat string, outgoing bool) {
		if outgoing {
			sender.Wake(chat)
		}
	})
	check(t, err)
	t.Cleanup(func() { check(t, db.Close()) })
	channel := make(told, 10)
	sender = outbox.New(db, channel, zaptest.NewLogger(t))
	files, err := tree.Group("family")
	check(t, err)
	t.Cleanup(func() { check(t, files.Close()) })
	box, err := New(Options{Store: db, Groups: registered("family", "work"), Zone: time.UTC, ErrorDir: tree.ErrorDir(), Log: zaptest.NewLogger(t)}).
		Open(t.Context(), group("family"), files)
	check(t, err)
	w := &world{t: t, root: root, dir: filepath.Join(root, "data/ipc/family")}
	w.drop("1.json", `{"type":"message","chatJid":"console:work","text":"to another group","requestId":"r1"}`)
	w.drop("2.json", `{"type":"message","chatJid":"console:nobody","text":"to nobody","requestId":"r2"}`)
	w.drop("3.json", `{"type":"message","chatJid":"console:family","text":"to ourselves","requestId":"r3"}`)
	box.Close() // when all is carried out

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	sender.Shutdown(ctx) // when all is sent
	close(channel)
	var got []string
	for text := range channel {
		got = append(got, text)
	}
	if len(got) != 1 || got[0] != "console:family to ourselves" {
		t.Errorf("the channel was asked for %q", got)
	}
	for id, want := range map[string]string{"r1": "may write to its own chat only", "r2": "may write to its own chat only", "r3": ""} {
		if got := w.reply(id); got.OK != (want == "") || !strings.Contains(got.Error, want) {
			t.Errorf("%s: %+v", id, got)
		}
	}
	pending, dead, err := db.OutboxCounts(t.Context())
	check(t, err)
	if pending != 0 || dead != 0 {
		t.Errorf("%d are to be sent, %d dead", pending, dead)
	}
}
