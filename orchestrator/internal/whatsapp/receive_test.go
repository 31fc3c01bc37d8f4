package whatsapp

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/watest"
	"berth/orchestrator/internal/whatsapp/wastate"
)

// WA-11, WA-15, WA-21: once, by the same sender in both kinds of group.
func TestWA11GroupMessage(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		id := w.alice.SendText(w.group, "hello")
		w.bob.SendText(w.group, "@Andy hi")
		w.message(1)
		w.phone.Drained(t.Context())
		got := w.stored()
		if len(got) != 2 {
			t.Fatalf("got %+v", got)
		}
		m := got[0]
		if m.Text != "hello" || m.ChatJID != w.group.JID.String() || m.Sender != w.alice.LID().String() || m.SenderName != "Alice" ||
			m.FromMe || m.Bot || m.Addressed || m.ID != id+"/"+w.alice.LID().String() || time.Since(m.Time) > time.Minute {
			t.Errorf("got %+v", m)
		}
		if !got[1].Addressed {
			t.Errorf("the trigger was not seen: %+v", got[1])
		}
	})
}

// WA-12, WA-13, WA-14: other chats, status updates and what says nothing.
func TestWA12Ignored(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	other := w.Group(watest.LID, "Other", w.alice, w.phone)
	w.alice.SendText(other, "nobody asked")
	w.alice.Send(w.group, &waE2E.Message{})
	w.alice.SendText(w.group, "asked")
	if m := w.message(0); m.Text != "asked" {
		t.Errorf("got %+v", m)
	}
	w.phone.Drained(t.Context())
	if n := len(w.stored()); n != 1 {
		t.Errorf("%d messages", n)
	}
}

// WA-20, WA-22: a chat with a person by number, however the message came.
func TestWA20Direct(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.register(w.alice.JID())
	w.register(w.bob.LID())
	w.alice.SendText(w.phone, "by LID")
	w.alice.SendText(w.phone, "by number", watest.FromNumber())
	w.bob.SendText(w.phone, "registered by LID", watest.FromNumber())
	w.message(2)
	for i, want := range []struct{ chat, sender string }{{w.alice.JID().String(), w.alice.LID().String()}, {w.alice.JID().String(), w.alice.LID().String()}, {w.bob.LID().String(), w.bob.LID().String()}} {
		if m := w.message(i); m.ChatJID != want.chat || m.Sender != want.sender {
			t.Errorf("got %+v, want %+v", m, want)
		}
	}
	o := w.out("hello yourself")
	o.ChatJID = w.alice.JID().String()
	w.send(o)
	if got := w.alice.Received(t.Context()); got.Text != "hello yourself" || got.ID != o.MessageID {
		t.Errorf("got %+v", got)
	}
}

// A mention of the account and a reply to it are for Berth, in either form.
func TestAddressed(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		o := w.out("an answer")
		w.send(o)
		answer := w.alice.Received(t.Context())
		w.alice.SendText(w.group, "well "+w.group.At(w.phone)+"?", watest.Mention(w.phone))
		w.alice.SendText(w.group, "indeed", watest.Quote(w.group.Address(w.phone), answer.ID, answer.Proto))
		w.alice.SendText(w.group, "look "+w.group.At(w.bob), watest.Mention(w.bob))
		w.alice.SendText(w.group, "true", watest.Quote(w.group.Address(w.bob), "ABC", &waE2E.Message{Conversation: new("it rains")}))
		for i, want := range []struct {
			addressed bool
			text      string
		}{
			{true, "well @Andy?"}, {true, "[answers Andy: “an answer”]\nindeed"},
			{false, "look @+15550003333"}, {false, "[answers +15550003333: “it rains”]\ntrue"},
		} {
			if m := w.message(i); m.Addressed != want.addressed || m.Text != want.text {
				t.Errorf("got %v %q, want %+v", m.Addressed, m.Text, want)
			}
		}
	})
}

// With a shared number what Berth said is not taken for the person's words.
func TestOwnPhone(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID, func(o *Options) { o.OwnNumber = false })
	w.phone.SendText(w.group, "@Andy from my phone")
	w.phone.SendText(w.group, "Andy: as if")
	if m := w.message(0); !m.FromMe || m.Bot || !m.Addressed {
		t.Errorf("got %+v", m)
	}
	if m := w.message(1); !m.FromMe || !m.Bot {
		t.Errorf("got %+v", m)
	}
}

// What could not be stored comes again, in order and once.
func TestStoreFails(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.note(func() { w.failing = true })
	var want []string
	for i := range 5 {
		want = append(want, fmt.Sprint("message ", i))
		w.alice.SendText(w.group, want[i])
	}
	w.until("refusals", func() bool { return w.refused >= 3 })
	w.note(func() { w.failing = false })
	w.message(4)
	w.phone.Drained(t.Context())
	var got []string
	for _, m := range w.stored() {
		got = append(got, m.Text)
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

// Nothing is lost if the process ends between the message and its place in the
// store, and nothing comes twice if it ends after that.
func TestRestartBeforeStored(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.alice.SendText(w.group, "first")
	w.message(0)
	w.note(func() { w.failing = true })
	w.alice.SendText(w.group, "second")
	w.until("a refusal", func() bool { return w.refused > 0 })
	w.stop()
	w.phone.Offline(t.Context())
	w.note(func() { w.failing = false })
	w.open()
	w.message(1)
	w.phone.Drained(t.Context())
	if got := w.stored(); len(got) != 2 || got[1].Text != "second" {
		t.Errorf("got %+v", got)
	}
}

// What came while Berth was away is announced as a whole, and what is too old
// wakes nobody.
func TestBacklog(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID, func(o *Options) { o.MaxBacklogAge = time.Hour })
	w.alice.SendText(w.group, "before")
	w.message(0)
	w.stop()
	w.phone.Offline(t.Context())
	w.alice.SendText(w.group, "@Andy very old", watest.At(time.Now().Add(-2*time.Hour)))
	w.alice.SendText(w.group, "@Andy old", watest.At(time.Now().Add(-30*time.Minute)))
	w.alice.SendText(w.group, "@Andy new")
	w.note(func() { w.backlogs = nil })
	w.open()
	w.until("the end of the backlog", func() bool { return len(w.backlogs) == 2 })
	got := w.stored()
	if len(got) != 4 || !slices.Equal(w.backlogs, []bool{true, false}) {
		t.Fatalf("got %+v, %v", got, w.backlogs)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, want := range []struct {
		text  string
		quiet bool
	}{{"@Andy very old\n[came 2h0m0s late]", true}, {"@Andy old\n[came 30m0s late]", false}, {"@Andy new", false}} {
		if m := got[i+1]; m.Text != want.text || w.quiet[m.ID] != want.quiet {
			t.Errorf("got %q, quiet %v", m.Text, w.quiet[m.ID])
		}
	}
}

// Edits in both forms, of the sender's own messages only, and deletions.
func TestEdits(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		id := w.alice.SendText(w.group, "one")
		first := w.message(0).ID
		is := func(id, text string) {
			t.Helper()
			w.until(text, func() bool { return w.now[id].Text == text })
		}
		w.alice.Edit(w.group, id, "two")
		is(first, "two")
		if secret := w.alice.EditSecret(w.group, id, "three"); secret == "" {
			t.Error("no edit")
		}
		is(first, "three")
		w.bob.Edit(w.group, id, "not mine")
		if m := w.message(1); m.Text != "not mine" || m.Sender != w.bob.LID().String() || w.texts()[first] != "three" {
			t.Errorf("got %+v; alice's is %q", m, w.texts()[first])
		}
		// The same id by somebody else is another message.
		w.bob.SendText(w.group, "mine now", watest.ID(id))
		is(id+"/"+w.bob.LID().String(), "mine now")
		w.alice.Revoke(w.group, id)
		is(first, "[deleted a message]")
	})
}

func TestReactionsPollsAndPlaces(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	id := w.alice.SendText(w.group, "hi")
	w.bob.React(w.group, w.group.Address(w.alice), id, "👍")
	w.alice.Send(w.group, &waE2E.Message{LocationMessage: &waE2E.LocationMessage{DegreesLatitude: new(52.5), DegreesLongitude: new(13.4), Name: new("Berlin")}})
	w.message(2)
	got := w.stored()
	if got[1].Text != "[reacted with 👍]" || !w.isQuiet(got[1]) {
		t.Errorf("got %+v", got[1])
	}
	if !strings.Contains(got[2].Text, "Berlin") {
		t.Errorf("got %+v", got[2])
	}
}

// WA-16, WA-18: a medium is in the group's folder under a safe name.
func TestMediaIn(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID, func(o *Options) { o.MaxMedia = 10_000 })
	png := append([]byte("\x89PNG\r\n\x1a\n"), bytes.Repeat([]byte{1}, 500)...)
	w.alice.SendImage(w.group, png, "image/png", "@Andy look")
	w.alice.SendDocument(w.group, []byte("hello"), "text/plain", "../../etc/passwd\x00.txt", "")
	w.alice.SendVoice(w.group, []byte("OggS..."), 3)
	w.alice.SendImage(w.group, bytes.Repeat([]byte("x"), 20_000), "image/png", "large")
	w.message(3)
	got := w.stored()
	for i, want := range [][]byte{png, []byte("hello"), []byte("OggS...")} {
		_, name, _ := strings.Cut(strings.Trim(strings.SplitN(got[i].Text, "\n", 2)[0], "[]"), ": ")
		data, err := os.ReadFile(filepath.Join(w.dir, name))
		if err != nil || !bytes.Equal(data, want) || filepath.Dir(name) != "media" {
			t.Errorf("%q: %v", got[i].Text, err)
		}
	}
	if !got[0].Addressed || !strings.HasSuffix(got[0].Text, "\n@Andy look") {
		t.Errorf("got %+v", got[0])
	}
	if !strings.Contains(got[3].Text, "too large") {
		t.Errorf("got %q", got[3].Text)
	}
	w.phone.Drained(t.Context())
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(w.options.Path), mediaFiles)); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A container owns its folder, and may lay traps there.
func TestMediaFolderIsALink(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	elsewhere := t.TempDir()
	if err := os.Symlink(elsewhere, filepath.Join(w.dir, "media")); err != nil {
		t.Fatal(err)
	}
	w.alice.SendDocument(w.group, []byte("hello"), "text/plain", "a.txt", "")
	if m := w.message(0); !strings.Contains(m.Text, "could not be downloaded") {
		t.Errorf("got %q", m.Text)
	}
	if found, _ := os.ReadDir(elsewhere); len(found) > 0 {
		t.Errorf("wrote through the link: %v", found)
	}
}

func TestMediaGone(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.stop()
	w.phone.Offline(t.Context())
	w.alice.SendImage(w.group, []byte("x"), "image/png", "too late")
	w.ExpireMedia()
	w.open()
	if m := w.message(0); !strings.Contains(m.Text, "WhatsApp has it no longer") || !strings.HasSuffix(m.Text, "too late") {
		t.Errorf("got %q", m.Text)
	}
}

// Messages that cannot be decrypted at first, and messages without their key.
func TestRetries(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		w.alice.SendText(w.group, "spoilt", watest.Corrupt())
		w.bob.SendText(w.group, "keyless", watest.WithholdKey())
		w.message(1)
		w.phone.Drained(t.Context())
		if n := len(w.stored()); n != 2 {
			t.Errorf("%d messages", n)
		}
	})
}

// A burst is stored in order, and nothing waits long for the handler.
func TestBurst(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	const each = 250
	senders := []*watest.Device{w.alice, w.bob, w.Peer("15550004444", "Carol"), w.Peer("15550005555", "Dave")}
	for _, d := range senders[2:] {
		w.group.Add(w.alice, d)
	}
	w.message(1) // both were added
	var wg sync.WaitGroup
	for _, d := range senders {
		wg.Go(func() {
			for i := range each {
				d.SendText(w.group, fmt.Sprintf("%s %d", d.Name(), i))
			}
		})
	}
	wg.Wait()
	for n := range len(senders) * each { // patience with each
		w.message(2 + n)
	}
	w.phone.Drained(t.Context())
	next := map[string]int{}
	for _, m := range w.stored()[2:] {
		if want := fmt.Sprintf("%s %d", m.SenderName, next[m.SenderName]); m.Text != want {
			t.Fatalf("got %q, want %q", m.Text, want)
		}
		next[m.SenderName]++
	}
	if w.ch.State().Name != wastate.Connected {
		t.Errorf("state %v", w.ch.State())
	}
}
