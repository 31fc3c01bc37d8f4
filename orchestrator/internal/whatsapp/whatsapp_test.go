package whatsapp

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mau.fi/whatsmeow/store"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/types/events"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/watest"
	"berth/orchestrator/internal/whatsapp/wastate"
)

// WA-03, WA-06, WA-07: what a person sees while linking; nothing has to restart.
func TestWA03LinkByQR(t *testing.T) {
	t.Parallel()
	w := outside(t, watest.LID)
	if got := w.ch.State(); got.Name != wastate.NotLinked || !got.NeedsPerson() {
		t.Errorf("before: %v", got)
	}
	w.link()
	w.state(wastate.Connected)
	if got := w.ch.Number(); got != "+15550001111" {
		t.Errorf("linked as %q", got)
	}
	for _, err := range w.ch.Login(t.Context(), "") {
		if kindOf(err) != berth.Conflict {
			t.Errorf("linked twice: %v", err)
		}
	}
	info, err := os.Stat(w.options.Path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("session %v, %v", info.Mode(), err)
	}
	w.stop()
	w.phone.Offline(t.Context())
	if got := w.ch.State(); got.Name != wastate.Offline {
		t.Errorf("after: %v", got)
	}
	w.open()
	w.phone.Online(t.Context())
	w.state(wastate.Connected)
}

func TestLinkByCode(t *testing.T) {
	t.Parallel()
	w := outside(t, watest.LID)
	for _, err := range w.ch.Login(t.Context(), "123") {
		if kindOf(err) != berth.Invalid {
			t.Errorf("a short number: %v", err)
		}
	}
	var done string
	for e, err := range w.ch.Login(t.Context(), "+1 555 000-1111") {
		if err != nil {
			t.Fatal(err)
		}
		if e.Code != "" {
			w.phone.EnterCode(e.Code)
		}
		done = e.Done
	}
	if done != "+15550001111" {
		t.Errorf("linked %q", done)
	}
}

func TestLinkWithPasskey(t *testing.T) {
	t.Parallel()
	w := outside(t, watest.LID)
	w.phone.RequirePasskey()
	asked, done := false, false
	for e, err := range w.ch.Login(t.Context(), "") {
		switch {
		case err != nil:
			t.Fatal(err)
		case e.QR != "":
			w.phone.Scan(e.QR)
		case e.Passkey != "":
			asked = true
			if s := w.state(wastate.PasskeyNeeded); s.WhatToDo == "" || !strings.Contains(string(e.Request), "whatsapp.com") {
				t.Errorf("%v, %s", s, e.Request)
			}
			if err := w.ch.Passkey(t.Context(), []byte(`{"id":"eA","rawId":"eA","type":"public-key"}`)); err != nil {
				t.Fatal(err)
			}
		case e.Compare != "":
			if err := w.ch.ConfirmPasskey(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		done = e.Done != ""
	}
	if !asked || !done {
		t.Errorf("asked %v, done %v", asked, done)
	}
}

// A login that is left leaves nothing behind.
func TestLoginLeft(t *testing.T) {
	t.Parallel()
	w := outside(t, watest.LID)
	for e, err := range w.ch.Login(t.Context(), "") {
		if err != nil || e.QR == "" {
			t.Fatalf("%+v, %v", e, err)
		}
		w.state(wastate.Linking)
		break
	}
	w.state(wastate.NotLinked)
	w.link()
}

// A double anywhere else would be somebody who says that he is WhatsApp.
func TestDoubleOnLoopbackOnly(t *testing.T) {
	t.Parallel()
	for _, u := range []string{"http://192.0.2.1:80", "https://127.0.0.1:1", "http://localhost.example.com", "http://localhost:1", "http://127.0.0.1.example.com", "://", ""} {
		_, err := New(t.Context(), Options{Path: filepath.Join(t.TempDir(), "wa.db"), Double: &Double{URL: u, Root: watest.Root()}})
		if kindOf(err) != berth.Invalid {
			t.Errorf("%q: %v", u, err)
		}
	}
}

// WA-08, WA-10: the connection comes back by itself, and Online says so.
func TestWA08Reconnects(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	for i, cut := range []func(){w.Disconnect, func() { w.StreamError(503, "") }, func() { w.StreamError(515, "") }} {
		cut()
		w.Wait(t.Context(), "a login", func() bool { return w.phone.Logins() >= 2+i })
		w.phone.Online(t.Context())
		w.until("Online", func() bool { return w.onlines >= 2+i })
	}
	w.state(wastate.Connected)
	w.send(w.out("still here"))
	if got := w.alice.Received(t.Context()); got.Text != "still here" {
		t.Errorf("got %+v", got)
	}
}

// WA-09 and the ends that need a person: each has its state and says what to do.
func TestWA09Ends(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end  func(*world)
		want wastate.Name
	}{
		"logged out": {func(w *world) { w.phone.Unlink() }, wastate.LoggedOut},
		"replaced":   {func(w *world) { w.StreamError(0, "replaced") }, wastate.Replaced},
		"banned":     {func(w *world) { w.RefuseLogins(&watest.FailTempBanned); w.Disconnect() }, wastate.Banned},
		"locked":     {func(w *world) { w.RefuseNextLogin(watest.FailLocked); w.Disconnect() }, wastate.LoggedOut},
		"outdated":   {func(w *world) { w.RefuseLogins(&watest.FailOutdated); w.Disconnect() }, wastate.Outdated},
		"refused":    {func(w *world) { w.RefuseLogins(&watest.FailUserAgent); w.Disconnect() }, wastate.Refused},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := inside(t, watest.LID)
			c.end(w)
			s := w.state(c.want)
			if s.WhatToDo == "" || !s.NeedsPerson() {
				t.Errorf("%v says nothing to do", s)
			}
			if c.want == wastate.Banned && s.Until.IsZero() {
				t.Errorf("banned without an end: %+v", s)
			}
			if err := w.ch.Send(t.Context(), w.out("x")); kindOf(err) != berth.Unavailable {
				t.Errorf("sent: %v", err)
			}
			if c.want != wastate.LoggedOut {
				return
			}
			// Linking again needs no restart.
			w.RefuseLogins(nil)
			w.link()
			w.state(wastate.Connected)
			w.alice.SendText(w.group, "welcome back")
			if m := w.message(0); m.Text != "welcome back" {
				t.Errorf("got %+v", m)
			}
		})
	}
}

func TestLogout(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	if err := w.ch.Logout(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.state(wastate.NotLinked)
	if got := w.phone.Linked(); len(got) != 0 {
		t.Errorf("still linked: %v", got)
	}
	if err := w.ch.Logout(t.Context()); kindOf(err) != berth.Conflict {
		t.Errorf("logged out twice: %v", err)
	}
	w.link()
}

// WA-28 to WA-32.
func TestWA28Groups(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.until("the names of the groups", func() bool { return len(w.chats) == 1 && w.chats[0].Name == "Family" })
	queries := func() (n int) {
		for _, s := range w.Stanzas("iq") {
			if s.Node.Attrs["xmlns"] == "w:g2" && s.Node.Attrs["to"] == types.GroupServerJID {
				n++
			}
		}
		return n
	}
	list, err := w.ch.Groups(t.Context(), false)
	if err != nil || len(list) != 1 || len(list[0].Participants) != 3 || !list[0].Participants[0].Admin || list[0].Participants[0].Number != "+15550002222" {
		t.Fatalf("got %+v, %v", list, err)
	}
	w.stop()
	w.open()
	w.until("a second connection", func() bool { return w.onlines >= 2 })
	if _, err := w.ch.Groups(t.Context(), false); err != nil || queries() != 1 {
		t.Errorf("asked %d times, %v", queries(), err)
	}
	if _, err := w.ch.Groups(t.Context(), true); err != nil || queries() != 2 {
		t.Errorf("forced: asked %d times, %v", queries(), err)
	}
	w.FailQueries("w:g2", 429)
	if _, err := w.ch.Groups(t.Context(), true); err == nil {
		t.Error("a failure that was asked for is hidden")
	}
	if list, err := w.ch.Groups(t.Context(), false); err != nil || len(list) != 1 {
		t.Errorf("what was known is lost: %v, %v", list, err)
	}
	w.FailQueries("w:g2", 0)
	w.Group(watest.LID, "", w.alice, w.phone)
	if list, err := w.ch.Groups(t.Context(), true); err != nil || len(list) != 1 || list[0].Name != "Family" {
		t.Errorf("a group without a subject: got %+v, %v", list, err)
	}
	w.group.Rename(w.alice, "Relatives")
	w.until("the new name", func() bool { return w.chats[0].Name == "Relatives" })
	if m := w.message(0); !strings.Contains(m.Text, "Relatives") || !w.isQuiet(m) {
		t.Errorf("got %+v", m)
	}
}

func (w *world) isQuiet(m berth.Message) bool {
	w.until("Quiet", func() bool { return w.quiet[m.ID] })
	return true
}

// How long the phone was away is known after a restart, too. A linked device
// that runs connects often enough by itself.
func TestPhoneAway(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	const day = 24 * time.Hour
	w.ch.keep(t.Context(), keptPhoneSeen, time.Now().Add(-13*day))
	w.stop()
	w.phone.Offline(t.Context())
	w.open()
	if s := w.state(wastate.PhoneNeeded); s.String() != "phone must come online in 1 day" || !s.NeedsPerson() || s.WhatToDo == "" {
		t.Errorf("got %v: %+v", s, s)
	}
	w.send(w.out("still here"))
	w.phone.SendText(w.group, "so am I")
	w.state(wastate.Connected)
}

// WA-33 to WA-36.
func TestWA33Owns(t *testing.T) {
	t.Parallel()
	for chat, want := range map[string]bool{
		"120363012345678901@g.us": true, "15551234567@s.whatsapp.net": true, "100000000000001@lid": true,
		"tg:12345": false, "random-string": false, "status@broadcast": false, "console:main": false,
	} {
		if got := Owns(chat); got != want {
			t.Errorf("%q: %v", chat, got)
		}
	}
}

// WA-01, WA-02: the version is asked for before connecting and when WhatsApp
// wants a newer one, and it does no harm if there is no answer. Not parallel:
// the version is the process's.
func TestWA01Version(t *testing.T) {
	builtIn := store.GetWAVersion()
	w := inside(t, watest.LID)
	defer func() { w.stop(); store.SetWAVersion(builtIn) }()
	restart := func(set func(*Channel)) {
		t.Helper()
		w.stop()
		w.phone.Offline(t.Context())
		w.open(set)
		w.state(wastate.Connected)
	}
	w.Revision(builtIn[2]+1, true)
	restart(func(c *Channel) { c.refresh = true })
	w.Revision(builtIn[2]+2, true)
	w.Disconnect()
	w.Wait(t.Context(), "a login", func() bool { return w.phone.Logins() == 3 })
	w.state(wastate.Connected)
	if got := store.GetWAVersion()[2]; got != builtIn[2]+2 {
		t.Errorf("version %d", got)
	}
	store.SetWAVersion(builtIn)
	restart(func(c *Channel) {
		c.refresh, c.http = true, &http.Client{Transport: rewrite{to: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, next: &http.Transport{}}}
	})
	if got := store.GetWAVersion()[2]; got != builtIn[2]+2 {
		t.Errorf("the last answer was forgotten: %d", got)
	}
}

// A group in which something changes all the time does not make Berth ask all the
// time.
func TestManyGroupChanges(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.until("the names of the groups", func() bool { return len(w.chats) == 1 })
	w.stop()
	w.phone.Offline(t.Context())
	w.open(func(c *Channel) { c.groupsPause = time.Hour })
	w.phone.Online(t.Context())
	w.state(wastate.Connected)
	const changes = 30
	for i := range changes {
		w.group.Rename(w.alice, fmt.Sprint("Name ", i))
		w.message(i)
	}
	w.alice.SendText(w.group, "behind")
	w.message(changes)
	w.phone.Drained(t.Context())
	asked := 0
	for _, s := range w.Stanzas("iq") {
		if s.Node.Attrs["xmlns"] == "w:g2" && s.Node.Attrs["to"] == types.GroupServerJID {
			asked++
		}
	}
	// The names are known all the same.
	w.Group(watest.LID, "Another", w.alice, w.phone)
	w.until("the name of a new group", func() bool { return len(w.chats) == 1 && w.chats[0].Name == "Another" })
	if asked > 3 { // at the start, when the first change came, and at the new connection
		t.Errorf("asked %d times for %d changes", asked, changes)
	}
}

// The client tells of the linking and of the connection that follows in any order.
func TestConnectedBeforePairSuccess(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	cli := w.ch.current()
	w.ch.handle(cli, &events.QR{})
	w.ch.linked.Store(false)
	w.ch.handle(cli, &events.Connected{})
	w.mu.Lock()
	before := w.onlines
	w.mu.Unlock()
	w.ch.handle(cli, &events.PairSuccess{ID: w.phone.JID()})
	w.state(wastate.Connected)
	w.until("Online", func() bool { return w.onlines > before })
}

// People are kept by their hidden addresses and listed by their numbers.
func TestAliases(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		w.alice.SendText(w.group, "hello")
		m := w.message(0)
		if got := w.ch.Aliases(m.Sender); !slices.Equal(got, []string{w.alice.JID().String()}) {
			t.Errorf("%s is also %q", m.Sender, got)
		}
		if got := w.ch.Aliases(w.alice.JID().String()); !slices.Equal(got, []string{w.alice.LID().String()}) {
			t.Errorf("%s is also %q", w.alice.JID(), got)
		}
		for _, nobody := range []string{"", "operator", "999@lid"} {
			if got := w.ch.Aliases(nobody); len(got) > 0 {
				t.Errorf("%q is also %q", nobody, got)
			}
		}
	})
}
