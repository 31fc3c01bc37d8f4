package whatsapp

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/proto/waCommon"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/watest"
	"berth/orchestrator/internal/whatsapp/wastate"
)

// textsOf returns the texts of a chat in the order in which they were stored.
func (w *world) textsOf(g *watest.Group) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for _, m := range w.messages {
		if m.ChatJID == g.JID.String() {
			out = append(out, w.now[m.ID].Text)
		}
	}
	return out
}

func png(n int) []byte {
	return append([]byte("\x89PNG\r\n\x1a\n"), bytes.Repeat([]byte{1}, n)...)
}

// kept returns what lies where a text says that its file is.
func (w *world) file(text string) []byte {
	w.t.Helper()
	_, name, _ := strings.Cut(strings.Trim(strings.SplitN(text, "\n", 2)[0], "[]"), ": ")
	data, err := os.ReadFile(filepath.Join(w.dir, name))
	if err != nil {
		w.t.Errorf("%q: %v", text, err)
	}
	return data
}

// A slow download holds up its own chat, whose order stays, and no other; and
// WhatsApp does not wait for it.
func TestSlowMedia(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.ch.lines.hold = patience
	other := w.Group(watest.LID, "Other", w.bob, w.phone)
	w.register(other.JID)
	w.HoldMedia(true)
	const photos = 5
	for i := range photos {
		w.alice.SendImage(w.group, png(i), "image/png", fmt.Sprint("photo ", i))
	}
	w.alice.SendText(w.group, "after")
	w.MediaAsked(t.Context(), downloadsOne)
	w.HoldMedia(false)
	w.bob.SendImage(other, png(100), "image/png", "quick")
	w.bob.SendText(other, "quicker")
	w.until("the other chat's messages", func() bool { return len(w.messages) == 2 })
	w.phone.Drained(t.Context())
	if got := w.textsOf(other); !strings.HasSuffix(got[0], "\nquick") || got[1] != "quicker" || !bytes.Equal(w.file(got[0]), png(100)) {
		t.Errorf("got %q", got)
	}
	if got := w.textsOf(w.group); len(got) > 0 {
		t.Errorf("stored without their media: %q", got)
	}
	w.ReleaseMedia()
	w.message(2 + photos)
	got := w.textsOf(w.group)
	for i := range photos {
		if !strings.HasSuffix(got[i], fmt.Sprint("\nphoto ", i)) || !bytes.Equal(w.file(got[i]), png(i)) {
			t.Errorf("%d: got %q", i, got[i])
		}
	}
	if got[photos] != "after" {
		t.Errorf("got %q", got)
	}
	w.emptied()
}

// emptied waits until nothing stands in line, in the database and in memory.
func (w *world) emptied() {
	w.t.Helper()
	deadline := time.After(patience)
	for {
		l := &w.ch.lines
		l.mu.Lock()
		n, moved := 0, l.moved
		for _, in := range l.chats {
			n += len(in.places) + len(in.late)
		}
		l.mu.Unlock()
		var rows int
		if err := l.db.QueryRow(`SELECT count(*) FROM berth_waiting`).Scan(&rows); err != nil {
			w.t.Fatal(err)
		}
		if n+rows == 0 {
			return
		}
		select {
		case <-moved:
		case <-deadline:
			w.t.Fatalf("%d in line, %d in the database", n, rows)
		}
	}
}

// What takes too long is stored with the name that the file will have, and gets
// it when it is there, unless its sender has changed the message since.
func TestLateMedia(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.ch.lines.hold = time.Millisecond
	w.HoldMedia(true)
	w.alice.SendDocument(w.group, []byte("hello"), "text/plain", "a.txt", "@Andy read this")
	deleted := w.alice.SendImage(w.group, png(1), "image/png", "oops")
	w.alice.SendText(w.group, "after")
	first, second := w.message(0), w.message(1)
	if m := w.message(2); m.Text != "after" || !first.Addressed {
		t.Errorf("got %+v, %+v", first, m)
	}
	_, promised, ok := strings.Cut(first.Text, "is being downloaded, will be ")
	promised, _, _ = strings.Cut(promised, "*]\n@Andy read this")
	if !ok || filepath.Dir(promised) != "media" {
		t.Fatalf("got %q", first.Text)
	}
	w.alice.Revoke(w.group, deleted)
	w.until("the deletion", func() bool { return w.now[second.ID].Text == "[deleted a message]" })
	w.ReleaseMedia()
	w.until("the file", func() bool { return !strings.Contains(w.now[first.ID].Text, "is being") })
	text := w.texts()[first.ID]
	if !strings.Contains(text, ": "+promised) || !strings.HasSuffix(text, "]\n@Andy read this") || string(w.file(text)) != "hello" {
		t.Errorf("got %q, promised %q", text, promised)
	}
	w.emptied()
	if got := w.texts()[second.ID]; got != "[deleted a message]" {
		t.Errorf("the deleted message is back: %q", got)
	}
}

// What stood in line when Berth ended is stored by the next one, also if nobody
// is online.
func TestLineOutlivesRestart(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.ch.lines.hold = patience
	w.HoldMedia(true)
	w.alice.SendImage(w.group, png(1), "image/png", "@Andy one")
	w.alice.SendText(w.group, "two")
	w.MediaAsked(t.Context(), 1)
	w.phone.Drained(t.Context())
	w.stop()
	if n := len(w.stored()); n != 0 {
		t.Fatalf("%d messages", n)
	}
	w.phone.Offline(t.Context())
	w.Down()
	w.open(func(c *Channel) { c.lines.hold = time.Millisecond })
	first := w.message(0)
	if m := w.message(1); !strings.Contains(first.Text, "is being downloaded") || !first.Addressed || m.Text != "two" {
		t.Errorf("got %+v, %+v", first, m)
	}
	w.stop() // late now
	w.Up()
	w.ReleaseMedia()
	w.open()
	w.until("the file", func() bool { return !strings.Contains(w.now[first.ID].Text, "is being") })
	if text := w.texts()[first.ID]; !bytes.Equal(w.file(text), png(1)) {
		t.Errorf("got %q", text)
	}
	w.emptied()
	if n := len(w.stored()); n != 2 {
		t.Errorf("%d messages", n)
	}
}

// A store that fails keeps the line in order; what can never be stored leaves it.
func TestLineWhenStoreFails(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.HoldMedia(true)
	w.alice.SendImage(w.group, png(1), "image/png", "one")
	w.alice.SendText(w.group, "two")
	w.MediaAsked(t.Context(), 1)
	w.phone.Drained(t.Context())
	w.note(func() { w.failing = true })
	w.ReleaseMedia()
	w.until("refusals", func() bool { return w.refused >= 3 })
	w.alice.SendText(w.group, "three")
	w.phone.Drained(t.Context())
	w.note(func() { w.failing = false })
	w.message(2)
	if got := w.textsOf(w.group); !strings.HasSuffix(got[0], "\none") || !slices.Equal(got[1:], []string{"two", "three"}) {
		t.Errorf("got %q", got)
	}
	w.HoldMedia(true)
	w.alice.SendImage(w.group, png(1), "image/png", "of a group that is removed")
	w.alice.SendText(w.group, "also")
	w.phone.Drained(t.Context())
	w.note(func() { delete(w.groups, w.group.JID.String()) })
	w.ReleaseMedia()
	w.emptied()
}

// A backlog has come when its media have.
func TestBacklogWithMedia(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.stop()
	w.phone.Offline(t.Context())
	w.HoldMedia(true)
	w.alice.SendImage(w.group, png(1), "image/png", "look")
	w.alice.SendText(w.group, "@Andy what is it?")
	w.note(func() { w.backlogs = nil })
	w.open(func(c *Channel) { c.lines.hold = patience })
	w.MediaAsked(t.Context(), 1)
	w.phone.Drained(t.Context())
	w.mu.Lock()
	begun := slices.Clone(w.backlogs)
	w.mu.Unlock()
	if !slices.Equal(begun, []bool{true}) {
		t.Errorf("got %v", begun)
	}
	w.ReleaseMedia()
	w.until("the end of the backlog", func() bool {
		if len(w.backlogs) == 2 && len(w.messages) < 2 {
			t.Error("the backlog ended too early")
		}
		return len(w.backlogs) == 2
	})
}

// A download that the connection breaks is not given up.
func TestMediaOverReconnect(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.FailQueries("w:m", 503)
	w.alice.SendImage(w.group, png(1), "image/png", "failed")
	if m := w.message(0); !strings.Contains(m.Text, "could not be downloaded") {
		t.Errorf("got %q", m.Text)
	}
	w.FailQueries("w:m", 0)
	w.HoldMedia(true)
	w.FailMedia(400)
	w.alice.SendImage(w.group, png(2), "image/png", "held")
	w.MediaAsked(t.Context(), 1)
	w.Down()
	w.Disconnect()
	w.state(wastate.Offline)
	w.ReleaseMedia()
	w.MediaAsked(t.Context(), 2)
	w.FailMedia(0)
	w.Up()
	if m := w.message(1); !bytes.Equal(w.file(m.Text), png(2)) {
		t.Errorf("got %q", m.Text)
	}
}

// A half-written file of an earlier process is no file.
func TestMediaHalf(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.HoldMedia(true)
	w.ch.lines.hold = time.Millisecond
	w.alice.SendImage(w.group, png(1000), "image/png", "")
	m := w.message(0)
	_, promised, _ := strings.Cut(m.Text, "will be media/")
	promised, _, _ = strings.Cut(promised, "*")
	if err := os.Mkdir(filepath.Join(w.dir, "media"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w.dir, "media", "."+promised+"part"), []byte("half"), 0o644); err != nil {
		t.Fatal(err)
	}
	w.ReleaseMedia()
	w.until("the file", func() bool { return !strings.Contains(w.now[m.ID].Text, "is being") })
	if got := w.file(w.texts()[m.ID]); !bytes.Equal(got, png(1000)) {
		t.Errorf("%d bytes", len(got))
	}
	if left, err := os.ReadDir(filepath.Join(w.dir, "media")); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Without a store, messages wait at WhatsApp.
func TestWithoutStore(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.HoldMedia(true)
	w.alice.SendImage(w.group, png(1), "image/png", "before")
	w.MediaAsked(t.Context(), 1)
	w.phone.Drained(t.Context())
	w.stop()
	w.ReleaseMedia()
	w.phone.Offline(t.Context())
	options := w.options
	w.options = Options{Path: options.Path, Log: options.Log, Double: options.Double}
	w.open()
	w.phone.Online(t.Context())
	w.alice.SendText(w.group, "hello")
	w.group.Rename(w.alice, "Relatives")
	w.stop()
	w.phone.Offline(t.Context())
	w.options = options
	w.open()
	w.until("the messages", func() bool {
		has := func(end string) bool {
			return slices.ContainsFunc(w.messages, func(m berth.Message) bool { return strings.HasSuffix(m.Text, end) })
		}
		return has("\nbefore") && has("hello")
	})
}

// What comes in belongs to the group's agent, which may move and delete it.
func TestMediaBelongToAgent(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root gives files away")
	}
	t.Parallel()
	const agent = 1000
	w := inside(t, watest.LID, func(o *Options) { o.UID, o.GID = agent, agent })
	w.alice.SendImage(w.group, png(1), "image/png", "")
	_, name, _ := strings.Cut(strings.Trim(w.message(0).Text, "[]"), ": ")
	for _, path := range []string{"media", name} {
		info, err := os.Lstat(filepath.Join(w.dir, path))
		if err != nil {
			t.Fatal(err)
		}
		if is := info.Sys().(*syscall.Stat_t); is.Uid != agent || is.Gid != agent {
			t.Errorf("%s belongs to %d:%d", path, is.Uid, is.Gid)
		}
	}
}

// Who edits a caption often sends the words alone: the file stays where it is.
func TestEditOfCaption(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		edit := func(id string, image *waE2E.ImageMessage) {
			w.alice.Send(w.group, &waE2E.Message{EditedMessage: &waE2E.FutureProofMessage{Message: &waE2E.Message{ProtocolMessage: &waE2E.ProtocolMessage{
				Key: &waCommon.MessageKey{RemoteJID: new(w.group.JID.String()), FromMe: new(true), ID: &id}, Type: waE2E.ProtocolMessage_MESSAGE_EDIT.Enum(),
				EditedMessage: &waE2E.Message{ImageMessage: image},
			}}}})
		}
		up := w.alice.Upload(png(1), whatsmeow.MediaImage)
		image := func(caption string) *waE2E.ImageMessage {
			return &waE2E.ImageMessage{URL: &up.URL, DirectPath: &up.DirectPath, MediaKey: up.Key, FileSHA256: up.SHA256, FileEncSHA256: up.EncryptedHash, Caption: &caption}
		}
		id := w.alice.Send(w.group, &waE2E.Message{ImageMessage: image("one")})
		first := w.message(0)
		line, _, _ := strings.Cut(first.Text, "\n")
		is := func(want string) {
			t.Helper()
			w.until(want, func() bool { return w.now[first.ID].Text == want })
		}
		edit(id, &waE2E.ImageMessage{Caption: new("two")})
		is(line + "\ntwo")
		edit(id, image("three"))
		is(line + "\nthree")
		if files, err := os.ReadDir(filepath.Join(w.dir, "media")); err != nil || len(files) != 1 || !bytes.Equal(w.file(first.Text), png(1)) {
			t.Errorf("got %v, %v", files, err)
		}
		edit("UNKNOWN", &waE2E.ImageMessage{Caption: new("what was it?")})
		if m := w.message(1); m.Text != "[photo]\nwhat was it?" {
			t.Errorf("got %q", m.Text)
		}
		// While the file is on its way the edit takes over the wait for it.
		w.ch.lines.mu.Lock()
		w.ch.lines.hold = time.Millisecond
		w.ch.lines.mu.Unlock()
		w.HoldMedia(true)
		id = w.alice.SendImage(w.group, png(2), "image/png", "slow")
		late := w.message(2)
		edit(id, &waE2E.ImageMessage{Caption: new("slow, edited")})
		w.ReleaseMedia()
		w.until("the file", func() bool {
			text := w.now[late.ID].Text
			return strings.HasSuffix(text, "]\nslow, edited") && !strings.Contains(text, "is being")
		})
		if !bytes.Equal(w.file(w.texts()[late.ID]), png(2)) {
			t.Errorf("got %q", w.texts()[late.ID])
		}
		w.emptied()
	})
}
