package ipc

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
)

// write puts a file into the folder of a group.
func (w *town) write(folder, name, text string) {
	w.t.Helper()
	check(w.t, os.WriteFile(filepath.Join(w.tree.Dir(), "groups", folder, name), []byte(text), 0o644))
}

// copies returns how many files wait in data/outbox.
func (w *town) copies() int {
	w.t.Helper()
	found, err := filepath.Glob(filepath.Join(w.tree.Dir(), "data/outbox/*/*"))
	check(w.t, err)
	return len(found)
}

func (w *town) outbox() (out []berth.Outgoing) {
	w.t.Helper()
	out, err := w.db.Outbox(w.t.Context(), 100)
	check(w.t, err)
	return out
}

// A group sends its own files to its own chat, main to any registered one; what is
// refused leaves nothing behind.
func TestSendFile(t *testing.T) {
	w := settle(t)
	w.write("other-group", "chart.png", "a picture")
	w.write("main", "note.txt", "a note")
	got := w.ask("other-group", `{"type":"send_file","chatJid":"other@g.us","path":"chart.png","caption":"here <internal>psst</internal>"}`)
	if !got.OK || got.Result["file"] != "chart.png" || got.Result["bytes"] != 9.0 {
		t.Errorf("answered %+v", got)
	}
	if got := w.ask("main", `{"type":"send_file","chatJid":"third@g.us","path":"/workspace/group/note.txt"}`); !got.OK {
		t.Errorf("answered %+v", got)
	}
	out := w.outbox()
	if len(out) != 2 || w.copies() != 2 {
		t.Fatalf("%+v, %d copies", out, w.copies())
	}
	if o := out[0]; o.ChatJID != "other@g.us" || o.File != "other-group/chart.png" || o.FileSize != 9 || o.Text != "here" || o.Kind != berth.OutMessage || o.MessageID == "" {
		t.Errorf("%+v", o)
	}
	if o := out[1]; o.ChatJID != "third@g.us" || o.File != "main/note.txt" || o.Shown() != "[file note.txt, 6 bytes]" {
		t.Errorf("%+v, %s", o, o.Shown())
	}

	w.denied(w.ask("other-group", `{"type":"send_file","chatJid":"main@g.us","path":"chart.png"}`), "ipc.send_file", "other-group", "its own chat only")
	w.denied(w.ask("main", `{"type":"send_file","chatJid":"unknown@g.us","path":"note.txt"}`), "ipc.send_file", "main", "not registered")
	w.denied(w.ask("other-group", `{"type":"send_file","chatJid":"other@g.us","path":"../main/note.txt"}`), "ipc.send_file", "other-group", "name a file below")
	w.denied(w.ask("other-group", `{"type":"send_file","chatJid":"other@g.us","path":"note.txt"}`), "ipc.send_file", "other-group", "no such file")
	w.denied(w.ask("other-group", `{"type":"send_file","chatJid":"other@g.us","path":7}`), "ipc.send_file", "other-group", "has to be a text")
	w.denied(w.ask("other-group", `{"type":"send_file","chatJid":"other@g.us","path":"chart.png","caption":"`+strings.Repeat("long ", 1000)+`"}`), "ipc.send_file", "other-group", "caption is too long")
	if len(w.outbox()) != 2 || w.copies() != 2 {
		t.Errorf("%d texts, %d copies", len(w.outbox()), w.copies())
	}
}

// A request that comes again after a crash does nothing more: neither is the file
// sent as it is now, nor a copy left that nobody sends.
func TestSendFileTwice(t *testing.T) {
	w := settle(t)
	w.write("other-group", "f", "first")
	box := w.boxes["other-group"].box
	again := func() any {
		t.Helper()
		r, err := parse([]byte(`{"type":"send_file","chatJid":"other@g.us","path":"f"}`))
		check(t, err)
		r.key = "ipc/other-group/1.json"
		result, err := box.do(t.Context(), &r)
		check(t, err)
		return result
	}
	first := again()
	w.write("other-group", "f", "second one")
	if got := again(); got != first {
		t.Errorf("got %+v, want %+v", got, first)
	}
	out := w.outbox()
	data, err := os.ReadFile(filepath.Join(w.tree.OutboxDir(out[0].Key), "f"))
	if len(out) != 1 || err != nil || string(data) != "first" {
		t.Errorf("%+v: %q, %v", out, data, err)
	}
	check(t, w.db.MarkSent(t.Context(), out[0].ID))
	check(t, w.tree.DropFile(out[0].Key))
	again()
	if w.copies() != 0 || len(w.outbox()) != 0 {
		t.Errorf("%d copies, %d texts", w.copies(), len(w.outbox()))
	}
}

// What a chat does not take cannot fill the disk.
func TestSendFileIsBounded(t *testing.T) {
	w := settle(t)
	w.write("other-group", "f", "x")
	check(t, w.db.AddOutgoing(t.Context(), berth.Outgoing{
		ChatJID: "other@g.us", Key: "before", Kind: berth.OutMessage, File: "other-group/f", FileSize: berth.MaxFiles, MessageID: "m", CreatedAt: time.Now(),
	}))
	const request = `{"type":"send_file","chatJid":"other@g.us","path":"f"}`
	w.denied(w.ask("other-group", request), "ipc.send_file", "other-group", "files with 256 MiB wait")
	if got := w.copies(); got != 0 {
		t.Errorf("%d copies", got)
	}
	// One that was given up still counts, one that was dropped does not.
	id := w.outbox()[0].ID
	check(t, w.db.MarkFailed(t.Context(), id, "no", time.Time{}))
	w.denied(w.ask("other-group", request), "ipc.send_file", "other-group", "files with 256 MiB wait")
	_, err := w.db.DropOutgoing(t.Context(), id)
	check(t, err)
	if got := w.ask("other-group", request); !got.OK {
		t.Errorf("answered %+v", got)
	}
}

// A store that does not answer is asked again, and the file is sent once, as it was
// at first.
func TestSendFileWaitsForTheStore(t *testing.T) {
	w := prepare(t, "family", zaptest.NewLogger(t))
	check(t, os.WriteFile(filepath.Join(w.root, "groups/family/f"), []byte("x"), 0o644))
	w.store.setFail(berth.Errorf(berth.Unavailable, "the disk is full"))
	w.drop("1.json", `{"type":"send_file","chatJid":"console:family","path":"f","requestId":"r"}`)
	w.box.Drain(t.Context())
	check(t, os.Remove(filepath.Join(w.root, "groups/family/f")))
	w.store.setFail(nil)
	w.box.Drain(t.Context())
	if got := w.now(); len(got) != 1 || !w.reply("r").OK {
		t.Errorf("got %q", got)
	}
}

// A group reacts in its own chat, main in any registered one, to a message that is
// there.
func TestReact(t *testing.T) {
	w := settle(t)
	seqs := make(map[string]int64)
	for _, chat := range []string{"other@g.us", "third@g.us"} {
		seq, _, err := w.db.AddMessage(t.Context(), berth.Message{ID: "m", ChatJID: chat, Sender: "ann", Text: "hi", Time: time.Unix(1, 0)})
		check(t, err)
		seqs[chat] = seq
	}
	ask := func(as, chat string, id any, emoji string) answer {
		return w.ask(as, fmt.Sprintf(`{"type":"react","chatJid":%q,"messageId":%v,"emoji":%q}`, chat, id, emoji))
	}
	if got := ask("other-group", "other@g.us", seqs["other@g.us"], "👍"); !got.OK {
		t.Errorf("answered %+v", got)
	}
	if got := ask("main", "third@g.us", fmt.Sprintf("%q", fmt.Sprint(seqs["third@g.us"])), "👩🏽‍❤️‍💋‍👩🏿"); !got.OK {
		t.Errorf("answered %+v", got)
	}
	out := w.outbox()
	if len(out) != 2 || out[0].Kind != berth.OutReaction || out[0].Text != "👍" || out[0].ReactsTo != seqs["other@g.us"] || out[0].OwnTurn || out[1].ReactsTo != seqs["third@g.us"] {
		t.Fatalf("%+v", out)
	}
	w.denied(ask("other-group", "third@g.us", seqs["third@g.us"], "👍"), "ipc.react", "other-group", "its own chat only")
	for _, id := range []any{seqs["third@g.us"], 0, 99, `""`, "null"} {
		reason := "no message with the id"
		if id == `""` {
			reason = "whole number"
		}
		w.denied(ask("other-group", "other@g.us", id, "👍"), "ipc.react", "other-group", reason)
	}
	w.denied(ask("other-group", "other@g.us", `"m1"`, "👍"), "ipc.react", "other-group", "whole number")
	w.denied(ask("other-group", "other@g.us", -1, "👍"), "ipc.react", "other-group", "whole number")
	w.denied(ask("other-group", "other@g.us", seqs["other@g.us"], "ok"), "ipc.react", "other-group", "not one emoji")
	if got := len(w.outbox()); got != 2 {
		t.Errorf("%d texts", got)
	}
}

func TestIsEmoji(t *testing.T) {
	for text, want := range map[string]bool{
		"👍": true, "❤️": true, "👍🏿": true, "🇩🇪": true, "1️⃣": true, "👨‍👩‍👧‍👦": true, "🏴󠁧󠁢󠁥󠁮󠁧󠁿": true, "✅": true, "‼️": true, "➕": true, "↔️": true,
		"": false, "a": false, "1": false, "ok 👍": false, "👍 👍": false, "\n": false, "\x00": false, "\xff": false, "🏿": false, strings.Repeat("👍", 17): false, "ä": false, "!": false,
	} {
		if got := isEmoji(text); got != want {
			t.Errorf("%q: got %t", text, got)
		}
	}
}
