package whatsapp

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/watest"
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
	o := w.out("Hello")
	o.ChatJID = w.alice.JID().String()
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
