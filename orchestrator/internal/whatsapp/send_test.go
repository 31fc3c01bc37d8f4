package whatsapp

import (
	"bytes"
	"errors"
	"fmt"
	"image"
	imagepng "image/png"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/watest"
	"berth/orchestrator/internal/whatsapp/waid"
	"berth/orchestrator/internal/whatsapp/wastate"
)

// WA-23: each peer decrypts the answer once, under the id that we chose.
func TestWA23Send(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode, func(o *Options) { o.OwnNumber = false })
		o := w.out("Hello **all**")
		w.send(o)
		for _, reader := range []*watest.Device{w.alice, w.bob, w.phone.Device} {
			if got := reader.Received(t.Context()); got.Text != "Andy: Hello *all*" || got.ID != o.MessageID || got.Chat != w.group.JID {
				t.Errorf("%s read %+v", reader.Name(), got)
			}
		}
		// The same again, as after a crash between sending and marking.
		w.send(o)
		w.send(w.out("next"))
		for _, reader := range []*watest.Device{w.alice, w.bob} {
			if got := reader.Received(t.Context()); got.Text != "Andy: next" {
				t.Errorf("%s saw a second bubble: %+v", reader.Name(), got)
			}
			if reader.Duplicates() != 1 {
				t.Errorf("%s got it %d times more", reader.Name(), reader.Duplicates())
			}
		}
	})
}

// WA-24.
func TestWA24SendToPerson(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID, func(o *Options) { o.OwnNumber = false })
	w.register(w.alice.JID())
	o := w.out("Hello")
	o.ChatJID = w.alice.JID().String()
	if err := w.ch.Send(t.Context(), o); kindOf(err) != berth.Denied {
		t.Errorf("a cold message: %v", err)
	}
	w.alice.SendText(w.phone, "hi")
	w.message(0)
	w.send(o)
	if got := w.alice.Received(t.Context()); got.Text != "Andy: Hello" {
		t.Errorf("got %+v", got)
	}
}

// WA-05, WA-25, WA-27: what is held while there is no connection goes out in
// order when Online says that there is one.
func TestWA25Offline(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID, func(o *Options) { o.OwnNumber = false })
	w.Down()
	w.Disconnect()
	w.state(wastate.Offline)
	held := []berth.Outgoing{w.out("one"), w.out("two"), w.out("three")}
	for _, o := range held {
		if err := w.ch.Send(t.Context(), o); kindOf(err) != berth.Unavailable {
			t.Fatalf("offline: %v", err)
		}
	}
	w.mu.Lock()
	before := w.onlines
	w.mu.Unlock()
	w.Up()
	w.until("Online", func() bool { return w.onlines > before })
	for _, o := range held {
		w.send(o)
	}
	for _, o := range held {
		if got := w.alice.Received(t.Context()); got.ID != o.MessageID || got.Text != "Andy: "+o.Text {
			t.Errorf("got %+v, want %q", got, o.Text)
		}
	}
}

// An answer that is lost leads to one bubble all the same.
func TestAckLost(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.ch.sendTimeout = 200 * time.Millisecond
	w.send(w.out("warm up"))
	w.alice.Received(t.Context())
	w.DropAcks(1)
	o := w.out("once")
	if err := w.ch.Send(t.Context(), o); err == nil || kindOf(err) != berth.Internal {
		t.Fatalf("got %v", err)
	}
	w.ch.sendTimeout = patience
	w.send(o)
	if got := w.alice.Received(t.Context()); got.ID != o.MessageID {
		t.Errorf("got %+v", got)
	}
	if got := w.alice.Messages(); len(got) != 2 || w.alice.Duplicates() != 1 {
		t.Errorf("%d messages, %d duplicates", len(got), w.alice.Duplicates())
	}
}

// WA-26: what WhatsApp refuses, by what can be done about it.
func TestWA26Refused(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	for code, want := range map[int]berth.Kind{463: berth.Denied, 429: berth.Internal, 479: berth.Invalid, 404: berth.NotFound, 500: berth.Internal} {
		w.RefuseNextMessage(code)
		if err := w.ch.Send(t.Context(), w.out("x")); err == nil || kindOf(err) != want || !strings.Contains(err.Error(), fmt.Sprint(code)) {
			t.Errorf("%d: %v, want %v", code, err, want)
		}
	}
	for chat, want := range map[string]berth.Kind{"tg:1": berth.Invalid, "status@broadcast": berth.Invalid, "999@g.us": berth.NotFound} {
		o := w.out("x")
		o.ChatJID = chat
		if err := w.ch.Send(t.Context(), o); kindOf(err) != want {
			t.Errorf("%s: %v", chat, err)
		}
	}
}

// An answer quotes what it answers.
func TestQuotes(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		id := w.alice.SendText(w.group, "how late is it?")
		m := w.message(0)
		if _, err := w.ch.Groups(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		w.note(func() { w.answered = func(berth.Outgoing) (berth.Message, bool) { return m, true } })
		w.send(w.out("noon"))
		info := w.bob.Received(t.Context()).Proto.GetExtendedTextMessage().GetContextInfo()
		if info.GetStanzaID() != id || info.GetParticipant() != w.group.Address(w.alice).String() || info.GetQuotedMessage().GetConversation() != "how late is it?" {
			t.Errorf("got %v", info)
		}
	})
}

// W20, WA-37 to WA-39: typing is refreshed while busy and cleared when idle.
func TestW20Typing(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.ch.typingEvery = time.Millisecond
	chat := w.group.JID.String()
	w.ch.SetTyping(chat, true)
	for range 5 {
		if got := w.alice.SawTyping(t.Context()); got.State != types.ChatPresenceComposing || got.Chat != w.group.JID {
			t.Fatalf("got %+v", got)
		}
	}
	w.ch.SetTyping(chat, false)
	for w.alice.SawTyping(t.Context()).State != types.ChatPresencePaused {
	}
	w.ch.SetTyping(chat, true)
	if got := w.alice.SawTyping(t.Context()); got.State != types.ChatPresenceComposing {
		t.Errorf("got %+v", got)
	}
	w.Down()
	w.Disconnect()
	w.state(wastate.Offline)
	w.ch.SetTyping(chat, true)
	w.ch.SetTyping(chat, false)
	w.ch.SetTyping("random-string", true)
	w.Up()
}

// The owner's phone rings unless the number is Berth's own.
func TestPresence(t *testing.T) {
	t.Parallel()
	for own, want := range map[bool]string{true: "available", false: "unavailable"} {
		w := inside(t, watest.LID, func(o *Options) { o.OwnNumber = own })
		w.Wait(t.Context(), "presence", func() bool { return len(w.Stanzas("presence")) > 0 })
		for _, s := range w.Stanzas("presence") {
			if s.Node.Attrs["type"] != want {
				t.Errorf("own number %v: %v", own, s.Node.Attrs)
			}
		}
	}
}

// The ids of texts look like those of WhatsApp's own clients.
func TestNewMessageID(t *testing.T) {
	t.Parallel()
	form := regexp.MustCompile(`^3EB0[0-9A-F]{18}$`)
	if theirs := outside(t, watest.LID).ch.current().GenerateMessageID(); !form.MatchString(theirs) {
		t.Errorf("whatsmeow makes %q", theirs)
	}
	seen := map[string]bool{}
	for range 1000 {
		id := NewMessageID()
		if !form.MatchString(id) || seen[id] {
			t.Fatalf("got %q", id)
		}
		seen[id] = true
	}
}

// Names and numbers of members become mentions, in the address that the group uses.
func TestMentions(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		w.alice.SendText(w.group, "hello") // her name comes with it
		w.message(0)
		if _, err := w.ch.Groups(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		w.send(w.out("**@Alice** and @15550003333, not @Andy, @15550001111 or `@Alice`"))
		got := w.bob.Received(t.Context())
		want := "*" + w.group.At(w.alice) + "* and " + w.group.At(w.bob) + ", not @Andy, @15550001111 or `@Alice`"
		mentioned := got.Proto.GetExtendedTextMessage().GetContextInfo().GetMentionedJID()
		if got.Text != want || !slices.Equal(mentioned, []string{w.group.Address(w.alice).String(), w.group.Address(w.bob).String()}) {
			t.Errorf("got %q, %v, want %q", got.Text, mentioned, want)
		}
		w.send(w.out("nobody@example.com"))
		if got := w.bob.Received(t.Context()); got.Proto.GetConversation() != "nobody@example.com" {
			t.Errorf("got %v", got.Proto)
		}
	})
}

// Files go out as what they are, with a caption, under the id that was chosen.
func TestSendFile(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode, func(o *Options) { o.OwnNumber = false })
		if _, err := w.ch.Groups(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		var picture bytes.Buffer
		if err := imagepng.Encode(&picture, image.NewGray(image.Rect(0, 0, 30, 20))); err != nil {
			t.Fatal(err)
		}
		opus := "OggS\x00\x02" + strings.Repeat("\x00", 20) + "\x01\x13OpusHead\x01\x01"
		mp4 := "\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom"
		for name, data := range map[string]string{"charts/a.png": picture.String(), "b.mp4": mp4, "c.ogg": opus, "d e.txt": "hello"} {
			if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(w.dir, name)), 0o755), os.WriteFile(filepath.Join(w.dir, name), []byte(data), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		sent := func(name, text string) *waE2E.Message {
			t.Helper()
			o := w.out(text)
			if err := w.ch.SendFile(t.Context(), o, w.dir, name); err != nil {
				t.Fatal(err)
			}
			got := w.alice.Received(t.Context())
			if got.ID != o.MessageID {
				t.Errorf("id %q, want %q", got.ID, o.MessageID)
			}
			return got.Proto
		}
		i := sent("charts/a.png", "Hello **@15550003333**").GetImageMessage()
		if i.GetCaption() != "Andy: Hello *"+w.group.At(w.bob)+"*" || i.GetMimetype() != "image/png" || i.GetWidth() != 30 || i.GetHeight() != 20 ||
			len(i.GetContextInfo().GetMentionedJID()) != 1 || !bytes.Equal(w.alice.Download(t.Context(), i), picture.Bytes()) {
			t.Errorf("got %v", i)
		}
		v := sent("b.mp4", "").GetVideoMessage()
		if v.GetMimetype() != "video/mp4" || v.GetCaption() != "Andy: b.mp4" || string(w.alice.Download(t.Context(), v)) != mp4 {
			t.Errorf("got %v", v)
		}
		a := sent("c.ogg", "").GetAudioMessage()
		if !a.GetPTT() || string(w.alice.Download(t.Context(), a)) != opus {
			t.Errorf("got %v", a)
		}
		d := sent("c.ogg", "listen").GetDocumentWithCaptionMessage().GetMessage().GetDocumentMessage()
		if d.GetCaption() != "Andy: listen" || d.GetFileName() != "c.ogg" || string(w.alice.Download(t.Context(), d)) != opus {
			t.Errorf("got %v", d)
		}
		d = sent("./charts/../d e.txt", "").GetDocumentWithCaptionMessage().GetMessage().GetDocumentMessage()
		if d.GetFileName() != "d-e.txt" || d.GetMimetype() != "text/plain; charset=utf-8" || string(w.alice.Download(t.Context(), d)) != "hello" {
			t.Errorf("got %v", d)
		}
		if left, _ := filepath.Glob(filepath.Join(filepath.Dir(w.options.Path), mediaFiles)); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
}

// The same file again, as after a crash between sending and marking, is one bubble.
func TestSendFileAgain(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	if err := os.WriteFile(filepath.Join(w.dir, "a.txt"), []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	o := w.out("")
	for range 2 {
		if err := w.ch.SendFile(t.Context(), o, w.dir, "a.txt"); err != nil {
			t.Fatal(err)
		}
	}
	if got := w.alice.Received(t.Context()); got.ID != o.MessageID || w.alice.Duplicates() != 1 {
		t.Errorf("got %+v, %d duplicates", got, w.alice.Duplicates())
	}
}

// What a container can put there instead of a file.
func TestSendFileRefused(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID, func(o *Options) { o.MaxMedia = 1000 })
	outside := t.TempDir()
	in := func(name string) string { return filepath.Join(w.dir, name) }
	if err := errors.Join(
		os.WriteFile(filepath.Join(outside, "secret"), []byte("secret"), 0o644),
		os.Symlink(filepath.Join(outside, "secret"), in("link")), os.Symlink(outside, in("folder-link")), os.Symlink("small", in("inner-link")),
		os.WriteFile(in("small"), []byte("x"), 0o644), os.WriteFile(in("empty"), nil, 0o644), os.WriteFile(in("large"), make([]byte, 1001), 0o644),
		os.Mkdir(in("folder"), 0o755), syscall.Mkfifo(in("pipe"), 0o644),
	); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{
		"", ".", "..", "../secret", "/etc/passwd", "link", "folder-link/secret", "inner-link", "empty", "large", "folder", "pipe", "missing", "small/x",
		"small\x00", "folder/../../x", strings.Repeat("a/", 3000) + "x", "/" + in("small"),
	} {
		if err := w.ch.SendFile(t.Context(), w.out("x"), w.dir, name); kindOf(err) != berth.Invalid || len(err.Error()) > 600 {
			t.Errorf("%.40q: %v", name, err)
		}
	}
	if err := w.ch.SendFile(t.Context(), w.out("x"), w.dir, "small"); err != nil {
		t.Errorf("a small file: %v", err)
	}
	w.FailQueries("w:m", 500)
	w.stop()
	w.phone.Offline(t.Context())
	if err := w.ch.SendFile(t.Context(), w.out("x"), w.dir, "small"); kindOf(err) != berth.Unavailable {
		t.Errorf("offline: %v", err)
	}
}

// Receipts are sent on request only, to each sender for what they wrote.
func TestMarkRead(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		for _, wanted := range []bool{true, false} {
			w := inside(t, mode, func(o *Options) { o.ReadReceipts = wanted })
			w.register(w.alice.JID())
			ids := []string{w.alice.SendText(w.group, "one"), w.alice.SendText(w.group, "two")}
			bobs := w.bob.SendText(w.group, "three")
			direct := w.alice.SendText(w.phone, "four")
			w.phone.SendText(w.group, "mine")
			w.message(4)
			got := w.stored()
			group := slices.DeleteFunc(slices.Clone(got), func(m berth.Message) bool { return m.ChatJID != w.group.JID.String() })
			group = append(group, group[0], berth.Message{ID: noticePrefix + "1/" + w.bob.LID().String(), Sender: w.bob.LID().String()})
			if _, err := w.ch.Groups(t.Context(), true); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(w.ch.MarkRead(t.Context(), w.group.JID.String(), group...), w.ch.MarkRead(t.Context(), w.alice.JID().String(), w.message(3)), w.ch.MarkRead(t.Context(), w.group.JID.String())); err != nil {
				t.Fatal(err)
			}
			if wanted {
				for _, id := range append(ids, direct) {
					w.alice.Receipt(t.Context(), id, "read")
				}
				w.bob.Receipt(t.Context(), bobs, "read")
			}
			w.send(w.out("the end"))
			w.bob.Received(t.Context())
			n := 0
			for _, r := range slices.Concat(w.alice.Receipts(), w.bob.Receipts(), w.phone.Receipts()) {
				if r.Type == "read" || r.Type == "read-self" {
					n++
				}
			}
			if want := 4; wanted && n != want || !wanted && n != 0 {
				t.Errorf("wanted %v: %d receipts", wanted, n)
			}
			w.stop()
			if err := w.ch.MarkRead(t.Context(), w.group.JID.String(), got[0]); wanted && kindOf(err) != berth.Unavailable || !wanted && err != nil {
				t.Errorf("offline: %v", err)
			}
		}
	})
}

// Nobody is written to who did not write first: WhatsApp locks accounts for it.
func TestNeverCold(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	carol, dave := w.Peer("15550004444", "Carol"), w.Peer("15550005555", "Dave")
	to := func(j types.JID) error {
		o := w.out("hello")
		o.ChatJID = j.String()
		return w.ch.Send(t.Context(), o)
	}
	for _, who := range []*watest.Device{w.alice, carol, dave} {
		for _, j := range []types.JID{who.JID(), who.LID()} {
			if err := to(j); kindOf(err) != berth.Denied || !strings.Contains(err.Error(), "has not written") {
				t.Errorf("%s: %v", j, err)
			}
		}
	}
	if n := len(w.Stanzas("message")); n != 0 {
		t.Errorf("%d messages went out", n)
	}
	if err := to(w.phone.JID()); err != nil {
		t.Errorf("a note to oneself: %v", err)
	}
	// In a group one may have written, but not here.
	w.alice.SendText(w.group, "hello")
	w.message(0)
	if err := to(w.alice.JID()); kindOf(err) != berth.Denied {
		t.Errorf("after a group message: %v", err)
	}
	w.alice.SendText(w.phone, "hello", watest.FromNumber())
	w.phone.SendHistory(carol, watest.History{From: carol, Text: "long ago", At: time.Now().Add(-time.Hour)})
	w.phone.SendHistory(dave, watest.History{From: w.phone, Text: "cold", At: time.Now().Add(-time.Hour)})
	w.phone.Drained(t.Context())
	known := func() {
		t.Helper()
		for _, j := range []types.JID{w.alice.JID(), w.alice.LID(), carol.JID(), carol.LID()} {
			if err := to(j); err != nil {
				t.Errorf("%s wrote: %v", j, err)
			}
		}
	}
	w.until("the history", func() bool { return w.histories == 2 })
	known()
	if err := to(dave.JID()); kindOf(err) != berth.Denied {
		t.Errorf("dave never wrote: %v", err)
	}
	w.stop()
	w.phone.Offline(t.Context())
	w.open()
	w.phone.Online(t.Context())
	w.state(wastate.Connected)
	known()
}

// An answer that waited while the account was unlinked still goes to who asked;
// with another account nobody has asked.
func TestWarmAfterRelink(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	// A message would do, but the client notes its sender's name in the background:
	// unlinking meanwhile is a race within whatsmeow.
	w.ch.wrote(waid.NewPerson(w.alice.LID(), w.alice.JID()))
	o := w.out("hello")
	o.ChatJID = w.alice.JID().String()
	w.phone.Unlink()
	w.state(wastate.LoggedOut)
	w.note(func() { w.settled = false })
	w.link()
	w.phone.Online(t.Context())
	w.send(o)
	if got := w.alice.Received(t.Context()); got.Text != "hello" {
		t.Errorf("got %+v", got)
	}
	w.until("the end of the sync", func() bool { return w.settled }) // see inside
	w.phone.Unlink()
	w.state(wastate.LoggedOut)
	w.phone = w.Phone("15550006666")
	w.link()
	w.state(wastate.Connected)
	if err := w.ch.Send(t.Context(), o); kindOf(err) != berth.Denied {
		t.Errorf("another account: %v", err)
	}
}

// A quote shows what it answers, and not all of a long text once more.
func TestLongQuote(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.alice.SendText(w.group, "why? "+strings.Repeat("字", 20_000))
	m := w.message(0)
	w.note(func() { w.answered = func(berth.Outgoing) (berth.Message, bool) { return m, true } })
	w.send(w.out("so"))
	quoted := w.bob.Received(t.Context()).Proto.GetExtendedTextMessage().GetContextInfo().GetQuotedMessage().GetConversation()
	if !strings.HasPrefix(quoted, "why? 字") || utf8.RuneCountInString(quoted) > 1000 {
		t.Errorf("%d characters: %.30q", utf8.RuneCountInString(quoted), quoted)
	}
}

// A reader that cannot decrypt an answer asks for it again, and gets it, also from
// a Berth that was started since.
func TestPeerAsksAgain(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		w.alice.FailNext(1)
		o := w.out("once more")
		w.send(o)
		if got := w.alice.Received(t.Context()); got.Text != "once more" || got.ID != o.MessageID || got.Retry == 0 {
			t.Errorf("got %+v", got)
		}
		if got := w.bob.Received(t.Context()); got.Text != "once more" || got.Retry != 0 {
			t.Errorf("got %+v", got)
		}
	})
}

// What an upload fails with is kept and shown: the token of the address is not.
func TestUploadFails(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	if err := os.WriteFile(filepath.Join(w.dir, "a.txt"), []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	w.ch.current().SetMediaHTTPClient(&http.Client{Transport: rewrite{to: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, next: &http.Transport{}}})
	err := w.ch.SendFile(t.Context(), w.out(""), w.dir, "a.txt")
	if err == nil || strings.Contains(err.Error(), "auth=") || !strings.Contains(err.Error(), "refused") {
		t.Errorf("got %v", err)
	}
}

// Nobody who never wrote sees that an agent writes.
func TestNeverColdTyping(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.ch.SetTyping(w.alice.JID().String(), true)
	w.ch.SetTyping(w.group.JID.String(), true)
	w.bob.SawTyping(t.Context())
	w.ch.SetTyping(w.alice.JID().String(), false)
	w.alice.SendText(w.phone, "hi")
	w.bob.SendText(w.group, "hi")
	w.message(0)
	for _, s := range w.Stanzas("chatstate") {
		if s.Node.Attrs["to"] != w.group.JID {
			t.Errorf("got %v", s.Node)
		}
	}
}
