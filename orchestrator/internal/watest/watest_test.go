package watest_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/watest"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/appstate"
	waBinary "go.mau.fi/whatsmeow/binary"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/store"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/types/events"
)

func TestLink(t *testing.T) {
	t.Parallel()
	s := watest.Start(t)
	s.FullUpload()
	phone := s.Phone("15550001111")
	c := newClient(t, s)
	begin := time.Now()
	s.Link(c.Client, phone)
	next[*events.PairSuccess](t, c)
	next[*events.Connected](t, c)
	t.Logf("linked and connected in %v", time.Since(begin))
	phone.Drained(t.Context())
	if got, want := c.Store.GetJID(), phone.Linked()[0]; got != want {
		t.Errorf("linked as %v, want %v", got, want)
	}
	if got, want := c.Store.GetLID().ToNonAD(), phone.LID(); got != want {
		t.Errorf("LID %v, want %v", got, want)
	}
	if got, want := phone.LinkedNames(), []string{store.DeviceProps.GetOs()}; !slices.Equal(got, want) {
		t.Errorf("linked as %q, want %q", got, want)
	}
	if got := phone.Keys(); got < 800 {
		t.Errorf("%d keys uploaded", got)
	}
}

func TestLinkByCode(t *testing.T) {
	t.Parallel()
	s := watest.Start(t)
	phone := s.Phone("15550001111")
	c := newClient(t, s)
	if err := c.Connect(); err != nil {
		t.Fatal(err)
	}
	next[*events.QR](t, c)
	if _, err := c.PairPhone(t.Context(), "15550001111", true, whatsmeow.PairClientChrome, "Berth"); err == nil {
		t.Error("a display name that is no browser was accepted")
	}
	code, err := c.PairPhone(t.Context(), "+1 555 000-1111", true, whatsmeow.PairClientChrome, "Chrome (Linux)")
	if err != nil {
		t.Fatal(err)
	}
	if err := phone.TryCode(t.Context(), "AAAA-AAAA"); err == nil {
		t.Error("a wrong code was accepted")
	}
	phone.EnterCode(code)
	next[*events.PairSuccess](t, c)
	next[*events.Connected](t, c)
}

func TestLinkWithPasskey(t *testing.T) {
	t.Parallel()
	s := watest.Start(t)
	phone := s.Phone("15550001111")
	phone.RequirePasskey()
	c := newClient(t, s)
	codes, err := c.GetQRChannel(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Connect(); err != nil {
		t.Fatal(err)
	}
	phone.Scan((<-codes).Code)
	asked := <-codes
	if asked.Event != whatsmeow.QRChannelEventPasskeyRequest || asked.PasskeyRequest.PublicKey.RelyingPartID != "whatsapp.com" {
		t.Fatalf("got %+v", asked)
	}
	if err := c.SendPasskeyResponse(t.Context(), &types.WebAuthnResponse{ID: "x", RawID: []byte("x"), Type: "public-key"}); err != nil {
		t.Fatal(err)
	}
	if last := <-codes; last != whatsmeow.QRChannelSuccess {
		t.Fatalf("got %+v", last)
	}
	next[*events.Connected](t, c)
}

func TestOldCode(t *testing.T) {
	t.Parallel()
	s := watest.Start(t)
	phone := s.Phone("15550001111")
	c := newClient(t, s)
	codes, err := c.GetQRChannel(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Connect(); err != nil {
		t.Fatal(err)
	}
	old := (<-codes).Code
	s.RotateQR()
	if fresh := (<-codes).Code; fresh == old {
		t.Error("the code did not change")
	}
	if err := phone.TryScan(t.Context(), old); err == nil || !strings.Contains(err.Error(), "hmac-mismatch") {
		t.Errorf("an old code was taken: %v", err)
	}
	next[*events.PairError](t, c)
	s.Wait(t.Context(), "the end of the connection", func() bool { return s.Connections() == 0 })

	// Without the QR channel, which whatsmeow closes in a race with its own sends
	// when the connection is cut.
	again := newClient(t, s)
	if err := again.Connect(); err != nil {
		t.Fatal(err)
	}
	old = next[*events.QR](t, again).Codes[0]
	s.Disconnect()
	next[*events.Disconnected](t, again)
	if err := phone.TryScan(t.Context(), old); err == nil {
		t.Error("a code of a lost connection was taken")
	}
	if got := phone.Linked(); len(got) != 0 {
		t.Errorf("linked %v", got)
	}
}

func TestCertificates(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for name, certs := range map[string]watest.Certificates{
		"wrong root": {WrongRoot: true, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour)},
		"expired":    {NotBefore: now.Add(-2 * time.Hour), NotAfter: now.Add(-time.Hour)},
		"not yet":    {NotBefore: now.Add(time.Hour), NotAfter: now.Add(2 * time.Hour)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := watest.Start(t)
			s.Certify(certs)
			c := newClient(t, s)
			if err := c.Connect(); err == nil || !strings.Contains(err.Error(), "cert") {
				t.Errorf("connected: %v", err)
			}
		})
	}
}

func TestLogInAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	w.client.stop()
	w.phone.Offline(t.Context())
	c := openClient(t, w.Server, w.client.path)
	begin := time.Now()
	if err := c.Connect(); err != nil {
		t.Fatal(err)
	}
	next[*events.Connected](t, c)
	t.Logf("logged in again in %v", time.Since(begin))
	w.alice.SendText(w.group, "still there?")
	w.client = c
	if m := c.message(); m.Message.GetConversation() != "still there?" {
		t.Errorf("got %v", m.Message)
	}
	if got := w.phone.Logins(); got != 2 {
		t.Errorf("%d logins, want 2", got)
	}
}

func TestGroupBothWays(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, w *world) {
		for _, text := range []string{"one", "two"} {
			w.alice.SendText(w.group, text)
			m := w.client.message()
			if m.Message.GetConversation() != text || m.Info.Chat != w.group.JID || m.Info.Sender.ToNonAD() != w.group.Address(w.alice) || m.Info.PushName != "Alice" {
				t.Errorf("got %q of %v in %v", m.Message.GetConversation(), m.Info.Sender, m.Info.Chat)
			}
			sent := w.client.text(w.group.JID, "re: "+text)
			for _, reader := range []*watest.Device{w.alice, w.bob, w.phone.Device} {
				m := reader.Received(t.Context())
				if m.Text != "re: "+text || m.ID != sent.ID || m.Chat != w.group.JID || m.From != w.client.Store.GetLID() {
					t.Errorf("%s read %+v", reader.Name(), m)
				}
			}
			next(t, w.client, func(r *events.Receipt) bool { return r.MessageIDs[0] == sent.ID })
		}
		w.phone.Drained(t.Context())
		for _, ack := range w.Stanzas("message") {
			if ack.Node.Attrs["phash"] == "" {
				t.Error("no participant hash")
			}
		}
	})
}

func TestDirectBothWays(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	w.alice.SendText(w.phone, "hello")
	m := w.client.message()
	if m.Info.Chat != w.alice.LID() || m.Info.SenderAlt.ToNonAD() != w.alice.JID() || m.Info.IsGroup {
		t.Errorf("got %+v", m.Info.MessageSource)
	}
	w.client.text(m.Info.Chat, "hello yourself")
	if got := w.alice.Received(t.Context()); got.Text != "hello yourself" || got.Chat != w.client.Store.GetLID().ToNonAD() {
		t.Errorf("alice read %+v", got)
	}
	if got := w.phone.Received(t.Context()); got.Text != "hello yourself" {
		t.Errorf("the phone read %+v", got)
	}
	w.bob.SendText(w.phone, "by number", watest.FromNumber())
	if m := w.client.message(); m.Info.Chat != w.bob.JID() || m.Info.SenderAlt.ToNonAD() != w.bob.LID() {
		t.Errorf("got %+v", m.Info.MessageSource)
	}
	w.client.text(w.bob.JID(), "by number too")
	if got := w.bob.Received(t.Context()); got.Text != "by number too" {
		t.Errorf("bob read %+v", got)
	}
	stranger := w.Peer("15550009999", "Stranger")
	w.client.text(stranger.JID(), "who are you?")
	if got := stranger.Received(t.Context()); got.Text != "who are you?" {
		t.Errorf("the stranger read %+v", got)
	}
}

func TestOwnPhone(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, w *world) {
		w.phone.SendText(w.group, "from my phone")
		if m := w.client.message(); !m.Info.IsFromMe || m.Info.Chat != w.group.JID {
			t.Errorf("got %+v", m.Info.MessageSource)
		}
		w.phone.SendText(w.alice, "to alice")
		if m := w.client.message(); !m.Info.IsFromMe || m.Info.Chat != w.alice.LID() || watest.TextOf(m.Message) != "to alice" {
			t.Errorf("got %+v %v", m.Info.MessageSource, m.Message)
		}
		w.phone.SendText(w.phone, "note to self")
		if m := w.client.message(); !m.Info.IsFromMe || m.Info.Chat != w.phone.LID() || watest.TextOf(m.Message) != "note to self" {
			t.Errorf("got %+v %v", m.Info.MessageSource, m.Message)
		}
	})
}

func TestReceiptsAndTyping(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, w *world) {
		id := w.alice.SendText(w.group, "hi")
		m := w.client.message()
		w.alice.Receipt(t.Context(), id, "delivered")
		if err := w.client.MarkRead(t.Context(), []string{id}, time.Now(), m.Info.Chat, m.Info.Sender); err != nil {
			t.Fatal(err)
		}
		w.alice.Receipt(t.Context(), id, "read")

		if err := w.client.SendChatPresence(t.Context(), w.group.JID, types.ChatPresenceComposing, types.ChatPresenceMediaText); err != nil {
			t.Fatal(err)
		}
		if got, want := w.bob.SawTyping(t.Context()), (watest.Typing{Chat: w.group.JID, State: types.ChatPresenceComposing}); got != want {
			t.Errorf("bob saw %+v, want %+v", got, want)
		}
		w.bob.Type(w.group, types.ChatPresenceComposing)
		if e := next[*events.ChatPresence](t, w.client); e.Chat != w.group.JID || e.Sender != w.group.Address(w.bob) {
			t.Errorf("got %+v", e)
		}

		sent := w.client.text(w.group.JID, "answer")
		w.bob.Read(w.bob.Received(t.Context()))
		next(t, w.client, func(r *events.Receipt) bool { return r.Type == types.ReceiptTypeRead && r.MessageIDs[0] == sent.ID })
		w.phone.Drained(t.Context())
	})
}

func TestPresence(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	next(t, w.client, func(e *events.AppStateSyncComplete) bool { return e.Name == appstate.WAPatchCriticalBlock })
	if err := w.client.SendPresence(t.Context(), types.PresenceUnavailable); err != nil {
		t.Fatal(err)
	}
	w.Wait(t.Context(), "presence", func() bool {
		return slices.ContainsFunc(w.Stanzas("presence"), func(s watest.Seen) bool { return s.Node.Attrs["name"] == "Owner" })
	})
	w.phone.SetName("Renamed")
	next(t, w.client, func(e *events.PushNameSetting) bool { return e.Action.GetName() == "Renamed" })
	if err := w.client.SendAppState(t.Context(), appstate.BuildMute(w.group.JID, true, time.Hour)); err != nil {
		t.Error(err)
	}
}

func TestBacklog(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, w *world) {
		w.phone.Drained(t.Context())
		w.client.Disconnect()
		w.phone.Offline(t.Context())
		old := time.Now().Add(-2 * time.Hour)
		w.alice.SendText(w.group, "while you were away", watest.At(old))
		w.bob.SendText(w.phone, "in person", watest.At(old))
		w.group.Rename(w.alice, "Clan")
		if err := w.client.Connect(); err != nil {
			t.Fatal(err)
		}
		preview := next(t, w.client, func(e *events.OfflineSyncPreview) bool { return e.Total > 1 })
		if preview.Messages != 2 || preview.Notifications != 1 {
			t.Errorf("preview %+v", preview)
		}
		if m := w.client.message(); watest.TextOf(m.Message) != "while you were away" || m.Info.Timestamp.Unix() != old.Unix() {
			t.Errorf("got %v at %v", m.Message, m.Info.Timestamp)
		}
		if m := w.client.message(); watest.TextOf(m.Message) != "in person" {
			t.Errorf("got %v", m.Message)
		}
		next(t, w.client, func(e *events.GroupInfo) bool { return e.Name != nil && e.Name.Name == "Clan" })
		next(t, w.client, func(e *events.OfflineSyncCompleted) bool { return e.Count == preview.Total })
		w.phone.Drained(t.Context())
	})
}

// A message that could not be stored is not acknowledged; it comes again after a
// restart, and is there although the ratchet has moved on.
func TestAtLeastOnce(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, w *world) {
		w.phone.Drained(t.Context())
		w.client.mu.Lock()
		w.client.refuse = true
		w.client.mu.Unlock()
		id := w.alice.SendText(w.group, "keep me")
		w.Wait(t.Context(), "the message on its way", func() bool { return w.phone.Waiting() == 1 })
		w.client.stop()
		w.phone.Offline(t.Context())

		c := openClient(t, w.Server, w.client.path)
		if err := c.Connect(); err != nil {
			t.Fatal(err)
		}
		if m := c.message(); m.Info.ID != id || watest.TextOf(m.Message) != "keep me" {
			t.Errorf("got %v", m.Message)
		}
		w.phone.Drained(t.Context())
		w.alice.Receipt(t.Context(), id, "delivered")
	})
}

func TestRedeliveryAfterFailure(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	w.phone.Drained(t.Context())
	w.client.mu.Lock()
	w.client.refuse = true
	w.client.mu.Unlock()
	id := w.alice.SendText(w.group, "keep me")
	next(t, w.client, func(e refused) bool { return string(e) == id })
	w.client.mu.Lock()
	w.client.refuse = false
	w.client.mu.Unlock()
	w.phone.Redeliver()
	if m := w.client.message(); m.Info.ID != id || watest.TextOf(m.Message) != "keep me" {
		t.Errorf("got %v", m.Message)
	}
	w.phone.Drained(t.Context())
}

func TestRedelivery(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	id := w.alice.SendText(w.group, "once")
	w.client.message()
	w.phone.Drained(t.Context())
	w.alice.Resend(id) // encrypted anew, under the same id
	w.phone.Drained(t.Context())
	if n := count(w.client, func(m *events.Message) bool { return m.Info.ID == id }); n != 2 {
		t.Errorf("%d events of %s, want 2, which the daemon has to tell apart", n, id)
	}
}

func TestSendOverReconnect(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	w.Hold()
	sent := make(chan error, 1)
	go func() {
		_, err := w.client.SendMessage(t.Context(), w.group.JID, &waE2E.Message{Conversation: new("twice?")})
		sent <- err
	}()
	w.Held(t.Context(), 1)
	w.Disconnect()
	w.Release()
	next[*events.Disconnected](t, w.client)
	if err := <-sent; err != nil {
		t.Errorf("send: %v", err)
	}
	if m := w.alice.Received(t.Context()); m.Text != "twice?" {
		t.Errorf("alice read %+v", m)
	}
	w.Wait(t.Context(), "the second copy", func() bool { return w.alice.Duplicates() == 1 })
	if n := len(w.alice.Messages()); n != 1 {
		t.Errorf("alice sees %d messages, want 1", n)
	}
}

func TestLostAckAndLostMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	message := &waE2E.Message{Conversation: new("hello?")}
	extra := whatsmeow.SendRequestExtra{ID: "3EB0AA", Timeout: 200 * time.Millisecond}
	for _, lose := range []func(int){w.DropMessages, w.DropAcks} {
		lose(1)
		if _, err := w.client.SendMessage(t.Context(), w.group.JID, message, extra); !errors.Is(err, whatsmeow.ErrMessageTimedOut) {
			t.Errorf("got %v", err)
		}
	}
	extra.Timeout = 20 * time.Second
	if _, err := w.client.SendMessage(t.Context(), w.group.JID, message, extra); err != nil {
		t.Error(err)
	}
	if got := w.alice.Received(t.Context()); got.ID != "3EB0AA" {
		t.Errorf("alice read %+v", got)
	}
	if n, again := len(w.alice.Messages()), w.alice.Duplicates(); n != 1 || again != 1 {
		t.Errorf("alice sees %d messages and %d copies, want 1 and 1", n, again)
	}
}

func TestRefusedMessages(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	for _, code := range []string{"463", "429", "479"} {
		w.RefuseNextMessage(map[string]int{"463": 463, "429": 429, "479": 479}[code])
		_, err := w.client.SendMessage(t.Context(), w.group.JID, &waE2E.Message{Conversation: new("no")})
		if !errors.Is(err, whatsmeow.ErrServerReturnedError) || !strings.Contains(err.Error(), code) {
			t.Errorf("%s: %v", code, err)
		}
	}
	w.client.text(w.group.JID, "yes")
	if m := w.alice.Received(t.Context()); m.Text != "yes" {
		t.Errorf("alice read %+v", m)
	}
	w.FailQueries("w:g2", 429)
	if _, err := w.client.GetJoinedGroups(t.Context()); !errors.Is(err, whatsmeow.ErrIQRateOverLimit) {
		t.Errorf("got %v", err)
	}
	w.FailQueries("w:g2", 0)
	w.phone.ReachoutLock(true, time.Now().Add(time.Hour))
	if e := next[*events.NotifyAccountReachoutTimelock](t, w.client); !e.IsActive || e.TimeEnforcementEnds.Before(time.Now()) {
		t.Errorf("got %+v", e)
	}
}

func TestClientAsksAgain(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]watest.Option{"corrupt": watest.Corrupt(), "no key": watest.WithholdKey()} {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T, w *world) {
				id := w.alice.SendText(w.group, "can you read this?", spoil)
				next[*events.UndecryptableMessage](t, w.client)
				if m := w.client.message(); m.Info.ID != id || m.RetryCount != 1 || watest.TextOf(m.Message) != "can you read this?" {
					t.Errorf("got %v, retry %d", m.Message, m.RetryCount)
				}
				w.alice.Receipt(t.Context(), id, "retry")
				w.alice.SendText(w.group, "and this?")
				if m := w.client.message(); watest.TextOf(m.Message) != "and this?" {
					t.Errorf("got %v", m.Message)
				}
				w.phone.Drained(t.Context())
			})
		})
	}
	t.Run("direct", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, watest.LID)
		id := w.alice.SendText(w.phone, "just you", watest.Corrupt())
		if m := w.client.message(); m.Info.ID != id || m.RetryCount != 1 {
			t.Errorf("got %v, retry %d", m.Message, m.RetryCount)
		}
	})
	t.Run("of the phone", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, watest.LID)
		w.phone.AnswerRequests()
		id := w.alice.SendText(w.group, "ask my phone", watest.Corrupt())
		m := next(t, w.client, func(m *events.Message) bool { return m.UnavailableRequestID != "" })
		if m.Info.ID != id || watest.TextOf(m.Message) != "ask my phone" {
			t.Errorf("got %+v", m)
		}
	})
}

func TestPeerAsksAgain(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, w *world) {
		w.alice.FailNext(2)
		sent := w.client.text(w.group.JID, "once more")
		if m := w.alice.Received(t.Context()); m.ID != sent.ID || m.Text != "once more" || m.Retry != 2 {
			t.Errorf("alice read %+v", m)
		}
		if m := w.bob.Received(t.Context()); m.Retry != 0 {
			t.Errorf("bob read %+v", m)
		}
		w.client.text(w.group.JID, "better now")
		if m := w.alice.Received(t.Context()); m.Text != "better now" || m.Retry != 0 {
			t.Errorf("alice read %+v", m)
		}
		w.bob.SendText(w.phone, "hi")
		w.bob.FailNext(1)
		w.client.text(w.client.message().Info.Chat, "direct")
		if m := w.bob.Received(t.Context()); m.Text != "better now" {
			t.Errorf("bob read %+v", m)
		}
		if m := w.bob.Received(t.Context()); m.Text != "direct" || m.Retry != 1 {
			t.Errorf("bob read %+v", m)
		}
	})
}

func TestPeerReinstalls(t *testing.T) {
	t.Parallel()
	for name, announced := range map[string]bool{"announced": true, "silently": false} {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T, w *world) {
				w.alice.SendText(w.group, "before")
				w.client.message()
				w.client.text(w.group.JID, "before")
				w.alice.Received(t.Context())
				w.alice.Reinstall(announced)
				w.phone.Drained(t.Context())
				w.client.text(w.group.JID, "after")
				if m := w.alice.Received(t.Context()); m.Text != "after" {
					t.Errorf("alice read %+v", m)
				}
				w.alice.SendText(w.group, "new me")
				if m := w.client.message(); watest.TextOf(m.Message) != "new me" {
					t.Errorf("got %v", m.Message)
				}
				next[*events.IdentityChange](t, w.client)
			})
		})
	}
}

func TestPeerAddsDevice(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	w.client.text(w.group.JID, "to the phone")
	w.alice.Received(t.Context())
	tablet := w.alice.AddDevice()
	w.client.text(w.group.JID, "to both")
	for _, reader := range []*watest.Device{w.alice, tablet} {
		if m := reader.Received(t.Context()); m.Text != "to both" {
			t.Errorf("read %+v", m)
		}
	}
	tablet.SendText(w.group, "from the tablet")
	if m := w.client.message(); m.Info.Sender.Device == 0 || m.Info.Sender.ToNonAD() != w.alice.LID() {
		t.Errorf("got %+v", m.Info.MessageSource)
	}
}

func TestGroups(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, w *world) {
		info, err := w.client.GetGroupInfo(t.Context(), w.group.JID)
		if err != nil {
			t.Fatal(err)
		}
		if info.Name != "Family" || len(info.Participants) != 3 || info.Participants[0].PhoneNumber != w.alice.JID() || info.Participants[0].LID != w.alice.LID() || !info.Participants[0].IsAdmin {
			t.Errorf("got %+v", info)
		}
		work := w.Group(watest.LID, "Work", w.bob, w.phone)
		if e := next(t, w.client, func(e *events.JoinedGroup) bool { return e.JID == work.JID }); e.Name != "Work" {
			t.Errorf("got %+v", e)
		}
		groups, err := w.client.GetJoinedGroups(t.Context())
		if err != nil || len(groups) != 2 {
			t.Errorf("%d groups, %v", len(groups), err)
		}
		carol := w.Peer("15550004444", "Carol")
		w.group.Add(w.alice, carol)
		if e := next(t, w.client, func(e *events.GroupInfo) bool { return len(e.Join) > 0 }); e.Join[0] != w.group.Address(carol) {
			t.Errorf("got %+v", e.Join)
		}
		w.client.text(w.group.JID, "welcome")
		if m := carol.Received(t.Context()); m.Text != "welcome" {
			t.Errorf("carol read %+v", m)
		}
		w.group.Promote(w.alice, carol, true)
		next(t, w.client, func(e *events.GroupInfo) bool { return len(e.Promote) > 0 })
		w.group.Describe(w.alice, "us")
		next(t, w.client, func(e *events.GroupInfo) bool { return e.Topic != nil && e.Topic.Topic == "us" })
		if err := w.client.SetGroupName(t.Context(), w.group.JID, "Clan"); err != nil {
			t.Error(err)
		}
		next(t, w.client, func(e *events.GroupInfo) bool { return e.Name != nil && e.Name.Name == "Clan" })

		w.group.Remove(w.alice, w.phone)
		e := next(t, w.client, func(e *events.GroupInfo) bool { return len(e.Leave) > 0 })
		if e.Leave[0] != w.group.Address(w.phone) {
			t.Errorf("got %+v", e.Leave)
		}
		if _, err := w.client.GetGroupInfo(t.Context(), w.group.JID); !errors.Is(err, whatsmeow.ErrNotInGroup) {
			t.Errorf("got %v", err)
		}
		w.group.Add(w.alice, w.phone)
		next(t, w.client, func(e *events.JoinedGroup) bool { return e.JID == w.group.JID && e.Name == "Clan" })
		if err := w.client.LeaveGroup(t.Context(), work.JID); err != nil {
			t.Error(err)
		}
	})
}

func TestHiddenNumber(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	carol := w.Peer("15550004444", "Carol")
	w.group.Add(w.alice, carol)
	w.group.Hide(carol)
	info, err := w.client.GetGroupInfo(t.Context(), w.group.JID)
	if err != nil {
		t.Fatal(err)
	}
	if p := info.Participants[3]; !p.PhoneNumber.IsEmpty() || p.DisplayName == "" {
		t.Errorf("got %+v", p)
	}
	carol.SendText(w.group, "guess who")
	if m := w.client.message(); !m.Info.SenderAlt.IsEmpty() {
		t.Errorf("got %+v", m.Info.MessageSource)
	}
}

func TestMentionsAndReplies(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, w *world) {
		w.alice.SendText(w.group, w.group.At(w.phone)+" hello", watest.Mention(w.phone))
		m := w.client.message()
		if got, want := m.Message.GetExtendedTextMessage().GetContextInfo().GetMentionedJID(), []string{w.group.Address(w.phone).String()}; !slices.Equal(got, want) {
			t.Errorf("mentions %v, want %v", got, want)
		}
		sent := w.client.text(w.group.JID, "yes?")
		read := w.alice.Received(t.Context())
		w.alice.SendText(w.group, "no", watest.Quote(w.group.Address(w.phone), read.ID, read.Proto))
		info := w.client.message().Message.GetExtendedTextMessage().GetContextInfo()
		if info.GetStanzaID() != sent.ID || info.GetParticipant() != w.group.Address(w.phone).String() || info.GetQuotedMessage().GetConversation() != "yes?" {
			t.Errorf("quoted %v", info)
		}
	})
}

func TestEditsReactionsPolls(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, w *world) {
		id := w.alice.SendText(w.group, "tpyo")
		w.client.message()
		w.alice.Edit(w.group, id, "typo")
		m := w.client.message()
		if !m.IsEdit || watest.TextOf(m.Message) != "typo" || m.Message.GetProtocolMessage().GetKey().GetID() != id {
			t.Errorf("got %v", m.Message)
		}
		w.alice.EditSecret(w.group, id, "typed")
		m = next(t, w.client, func(m *events.Message) bool { return m.Message.GetSecretEncryptedMessage() != nil })
		opened, err := w.client.DecryptSecretEncryptedMessage(t.Context(), m)
		if err != nil || watest.TextOf(opened) != "typed" {
			t.Errorf("opened %v, %v", opened, err)
		}
		w.alice.Revoke(w.group, id)
		next(t, w.client, func(m *events.Message) bool {
			return m.Message.GetProtocolMessage().GetType() == waE2E.ProtocolMessage_REVOKE && m.Message.GetProtocolMessage().GetKey().GetID() == id
		})

		poll, err := w.client.SendMessage(t.Context(), w.group.JID, w.client.BuildPollCreation("lunch?", []string{"soup", "salad"}, 1))
		if err != nil {
			t.Fatal(err)
		}
		read := w.alice.Received(t.Context())
		w.alice.React(w.group, w.group.Address(w.phone), poll.ID, "👍")
		m = next(t, w.client, func(m *events.Message) bool { return m.Message.GetReactionMessage() != nil })
		if m.Message.GetReactionMessage().GetText() != "👍" {
			t.Errorf("got %v", m.Message)
		}
		w.alice.Vote(w.group, read, "soup")
		m = next(t, w.client, func(m *events.Message) bool { return m.Message.GetPollUpdateMessage() != nil })
		vote, err := w.client.DecryptPollVote(t.Context(), m)
		if err != nil || len(vote.SelectedOptions) != 1 || !bytes.Equal(vote.SelectedOptions[0], whatsmeow.HashPollOptions([]string{"soup"})[0]) {
			t.Errorf("vote %v, %v", vote, err)
		}
	})
}

func TestMedia(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	picture := bytes.Repeat([]byte("picture"), 1000)
	w.alice.SendImage(w.group, picture, "image/png", "look")
	m := w.client.message()
	got, err := w.client.Download(t.Context(), m.Message.GetImageMessage())
	if err != nil || !bytes.Equal(got, picture) || watest.TextOf(m.Message) != "look" || m.Info.MediaType != "image" {
		t.Errorf("downloaded %d bytes, %v", len(got), err)
	}
	w.alice.SendDocument(w.group, []byte("secret"), "text/plain", "../../etc/passwd", "")
	doc := next(t, w.client, func(m *events.Message) bool { return m.Message.GetDocumentMessage() != nil }).Message.GetDocumentMessage()
	w.ExpireMedia()
	if _, err := w.client.Download(t.Context(), doc); !errors.Is(err, whatsmeow.ErrMediaDownloadFailedWith410) {
		t.Errorf("got %v", err)
	}

	up, err := w.client.Upload(t.Context(), picture, whatsmeow.MediaImage)
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.client.SendMessage(t.Context(), w.group.JID, &waE2E.Message{ImageMessage: &waE2E.ImageMessage{
		URL: new(up.URL), DirectPath: new(up.DirectPath), MediaKey: up.MediaKey, FileSHA256: up.FileSHA256,
		FileEncSHA256: up.FileEncSHA256, FileLength: new(up.FileLength), Mimetype: new("image/png"), Caption: new("mine"),
	}})
	if err != nil {
		t.Fatal(err)
	}
	read := w.alice.Received(t.Context())
	if got := w.alice.Download(t.Context(), read.Proto.GetImageMessage()); !bytes.Equal(got, picture) || read.Text != "mine" {
		t.Errorf("alice downloaded %d bytes of %q", len(got), read.Text)
	}
	w.alice.SendVoice(w.group, []byte("hum"), 2)
	next(t, w.client, func(m *events.Message) bool { return m.Message.GetAudioMessage().GetPTT() })
}

// Downloads that take their time, or fail.
func TestMediaFaults(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	w.HoldMedia(true)
	w.alice.SendImage(w.group, []byte("held"), "image/png", "")
	held := w.client.message()
	w.HoldMedia(false)
	w.alice.SendImage(w.group, []byte("free"), "image/png", "")
	if data, err := w.client.Download(t.Context(), w.client.message().Message.GetImageMessage()); err != nil || string(data) != "free" {
		t.Errorf("got %q, %v", data, err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := w.client.Download(t.Context(), held.Message.GetImageMessage())
		done <- err
	}()
	w.MediaAsked(t.Context(), 1)
	select {
	case err := <-done:
		t.Errorf("not held: %v", err)
	default:
	}
	w.FailMedia(400)
	w.ReleaseMedia()
	if err := <-done; err == nil {
		t.Error("no failure")
	}
	w.FailMedia(0)
	if data, err := w.client.Download(t.Context(), held.Message.GetImageMessage()); err != nil || string(data) != "held" {
		t.Errorf("got %q, %v", data, err)
	}
}

func TestViewOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	w.Raw(w.phone, waBinary.Node{
		Tag:     "message",
		Attrs:   waBinary.Attrs{"from": w.alice.LID(), "sender_pn": w.alice.JID(), "id": "3A00", "t": "1790000000", "type": "media", "notify": "Alice"},
		Content: []waBinary.Node{{Tag: "unavailable", Attrs: waBinary.Attrs{"type": "view_once"}}},
	})
	if e := next[*events.UndecryptableMessage](t, w.client); !e.IsUnavailable || e.UnavailableType != events.UnavailableTypeViewOnce {
		t.Errorf("got %+v", e)
	}
	if m := w.phone.Received(t.Context()); m.Proto.GetProtocolMessage().GetPeerDataOperationRequestMessage() == nil {
		t.Errorf("the phone got %v", m.Proto)
	}
}

func TestHistory(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	w.phone.SendHistory(w.group, watest.History{From: w.alice, Text: "long ago", At: time.Now().Add(-time.Hour)})
	e := next[*events.HistorySync](t, w.client)
	if got := e.Data.GetConversations(); len(got) != 1 || got[0].GetName() != "Family" || got[0].GetMessages()[0].GetMessage().GetMessage().GetConversation() != "long ago" {
		t.Errorf("got %v", got)
	}
	w.phone.Drained(t.Context())
}

func TestQueries(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	found, err := w.client.IsOnWhatsApp(t.Context(), []string{"+15550002222", "+15550008888"})
	if err != nil || len(found) != 2 || !found[0].IsIn || found[0].JID != w.alice.LID() || found[1].IsIn {
		t.Errorf("got %+v, %v", found, err)
	}
	w.OnQuery(func(q *waBinary.Node) *waBinary.Node {
		if q.Attrs["xmlns"] != "usync" {
			return nil
		}
		return &waBinary.Node{Attrs: waBinary.Attrs{"type": "error"}, Content: []waBinary.Node{{Tag: "error", Attrs: waBinary.Attrs{"code": 503}}}}
	})
	if _, err := w.client.GetUserInfo(t.Context(), []types.JID{w.bob.JID()}); err == nil {
		t.Error("no error")
	}
	w.OnQuery(nil)
	info, err := w.client.GetUserInfo(t.Context(), []types.JID{w.alice.JID()})
	if err != nil || info[w.alice.JID()].LID != w.alice.LID() {
		t.Errorf("got %+v, %v", info, err)
	}
	w.phone.LowKeys()
	w.Wait(t.Context(), "new keys", func() bool { return w.phone.Keys() >= 50 })
}

// Ends of a connection after which the client comes back by itself.
func TestComesBack(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*watest.Server){
		"cut":  (*watest.Server).Disconnect,
		"503":  func(s *watest.Server) { s.StreamError(503, "") },
		"515":  func(s *watest.Server) { s.StreamError(515, "") },
		"429":  func(s *watest.Server) { s.StreamError(429, "") },
		"fail": func(s *watest.Server) { s.RefuseNextLogin(watest.FailUnavailable); s.Disconnect() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, watest.LID)
			before := w.phone.Logins()
			end(w.Server)
			w.Wait(t.Context(), "another login", func() bool { return w.phone.Logins() > before })
			next[*events.Connected](t, w.client)
			w.client.text(w.group.JID, "back")
			if m := w.alice.Received(t.Context()); m.Text != "back" {
				t.Errorf("alice read %+v", m)
			}
		})
	}
}

func TestServerDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	w.Down()
	dials := w.Dials()
	w.Disconnect()
	next[*events.Disconnected](t, w.client)
	w.Wait(t.Context(), "a dial in vain", func() bool { return w.Dials() > dials })
	w.alice.SendText(w.group, "anybody?")
	w.Up()
	next[*events.Connected](t, w.client)
	if m := w.client.message(); watest.TextOf(m.Message) != "anybody?" {
		t.Errorf("got %v", m.Message)
	}
}

// Ends of a connection that a person has to do something about.
func TestStaysAway(t *testing.T) {
	t.Parallel()
	refuse := func(f watest.Failure) func(w *world) {
		return func(w *world) { w.RefuseLogins(&f); w.Disconnect() }
	}
	type test struct {
		end     func(w *world)
		event   func(t *testing.T, c *client)
		deleted bool
	}
	for name, test := range map[string]test{
		"unlinked": {func(w *world) { w.phone.Unlink() }, func(t *testing.T, c *client) {
			if e := next[*events.LoggedOut](t, c); e.OnConnect {
				t.Errorf("got %+v", e)
			}
		}, true},
		"replaced": {func(w *world) { w.StreamError(0, "replaced") }, func(t *testing.T, c *client) { next[*events.StreamReplaced](t, c) }, false},
		"401":      {refuse(watest.FailLoggedOut), loggedOut(401), true},
		"403":      {refuse(watest.FailLocked), loggedOut(403), true},
		"406":      {refuse(watest.FailBanned), loggedOut(406), true},
		"402": {refuse(watest.FailTempBanned), func(t *testing.T, c *client) {
			if e := next[*events.TemporaryBan](t, c); e.Code != 101 || e.Expire != time.Hour {
				t.Errorf("got %+v", e)
			}
		}, false},
		"405": {refuse(watest.FailOutdated), func(t *testing.T, c *client) { next[*events.ClientOutdated](t, c) }, false},
		"409": {refuse(watest.FailUserAgent), func(t *testing.T, c *client) {
			if e := next[*events.ConnectFailure](t, c); e.Reason != 409 {
				t.Errorf("got %+v", e)
			}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, watest.LID)
			w.settle(t)
			w.client.over = true
			test.end(w)
			test.event(t, w.client)
			w.Wait(t.Context(), "the end of the connection", func() bool { return w.Connections() == 0 })
			devices, err := w.client.container.GetAllDevices(t.Context())
			if err != nil || test.deleted != (len(devices) == 0) {
				t.Errorf("%d devices stored, %v", len(devices), err)
			}
		})
	}
}

func loggedOut(reason events.ConnectFailureReason) func(t *testing.T, c *client) {
	return func(t *testing.T, c *client) {
		t.Helper()
		if e := next[*events.LoggedOut](t, c); !e.OnConnect || e.Reason != reason {
			t.Errorf("got %+v", e)
		}
	}
}

func TestReplacedByAnotherProcess(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	other := openClient(t, w.Server, w.client.path)
	if err := other.Connect(); err != nil {
		t.Fatal(err)
	}
	w.client.over = true
	next[*events.StreamReplaced](t, w.client)
	next[*events.Connected](t, other)
}

func TestLogout(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	w.settle(t)
	if err := w.client.Logout(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := w.phone.Linked(); len(got) != 0 {
		t.Errorf("still linked: %v", got)
	}
	again := openClient(t, w.Server, w.client.path)
	w.Link(again.Client, w.phone)
	next[*events.Connected](t, again)
}

// Keep-alive times are globals of whatsmeow: the test runs in a process of its own.
func TestKeepAlive(t *testing.T) {
	if os.Getenv("WATEST_KEEPALIVE") == "" {
		t.Parallel()
		cmd := exec.Command(os.Args[0], "-test.run=^TestKeepAlive$")
		cmd.Env = append(os.Environ(), "WATEST_KEEPALIVE=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	whatsmeow.KeepAliveIntervalMin, whatsmeow.KeepAliveIntervalMax = 10*time.Millisecond, 20*time.Millisecond
	whatsmeow.KeepAliveResponseDeadline, whatsmeow.KeepAliveMaxFailTime = 50*time.Millisecond, 100*time.Millisecond
	w := newWorld(t, watest.LID)
	w.Silence(true)
	next[*events.KeepAliveTimeout](t, w.client)
	w.Wait(t.Context(), "another login", func() bool { return w.phone.Logins() > 1 })
	w.Silence(false)
	w.alice.SendText(w.group, "back")
	w.client.message()
}

// Not parallel: the announced version is a global of whatsmeow.
func TestOutdated(t *testing.T) {
	s := watest.Start(t)
	before := store.GetWAVersion()
	t.Cleanup(func() { store.SetWAVersion(before) })
	s.Revision(before[2]+1, true)
	phone := s.Phone("15550001111")
	c := newClient(t, s)
	if err := c.Connect(); err != nil {
		t.Fatal(err)
	}
	c.over = true
	next[*events.ClientOutdated](t, c)
	newest, err := whatsmeow.GetLatestVersion(t.Context(), s.HTTPClient())
	if err != nil {
		t.Fatal(err)
	}
	store.SetWAVersion(*newest)
	again := newClient(t, s)
	s.Link(again.Client, phone)
	next[*events.Connected](t, again)
}

func TestBurst(t *testing.T) {
	t.Parallel()
	w := newWorld(t, watest.LID)
	const each = 50
	for i := range each {
		for _, sender := range []*watest.Device{w.alice, w.bob} {
			sender.SendText(w.group, strings.Repeat("x", i+1))
		}
	}
	for i := range each {
		for _, sender := range []*watest.Device{w.alice, w.bob} {
			if m := w.client.message(); len(m.Message.GetConversation()) != i+1 || m.Info.Sender.ToNonAD() != sender.LID() {
				t.Fatalf("message %d out of order", i)
			}
		}
	}
	w.phone.Drained(t.Context())
}
