package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/console"
	"berth/orchestrator/internal/dispatch"
	"berth/orchestrator/internal/outbox"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
	"berth/orchestrator/internal/whatsapp"
	"berth/orchestrator/internal/whatsapp/wastate"
	"berth/orchestrator/internal/workspace"
)

// desk is a phone that is not connected, and what a person sees of it.
type desk struct {
	*phone
	t    *testing.T
	root string
	main string // the chat of main
}

func newDesk(t *testing.T, main string) *desk {
	t.Helper()
	d := &desk{t: t, root: t.TempDir(), main: main}
	d.start()
	if err := d.dispatcher.AddGroup(t.Context(), berth.Group{JID: main, Name: "main", Folder: "main", AddedAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
	return d
}

// start begins as a new daemon does.
func (d *desk) start() {
	t := d.t
	t.Helper()
	tree, err := workspace.NewTree(d.root, os.Geteuid(), os.Getegid())
	if err != nil {
		t.Fatal(err)
	}
	db, err := sqlite.Open(context.Background(), storeFile(tree), func(string, bool) {})
	if err != nil {
		t.Fatal(err)
	}
	dispatcher, err := dispatch.New(t.Context(), dispatch.Options{Store: db, Limit: 1, Assistant: "Andy", Log: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	d.phone = newPhone(t.Context(), Config{AssistantName: "Andy"}, tree, db, dispatcher, &health{alarms: make(map[string]string)}, func(context.Context) {}, zaptest.NewLogger(t))
	t.Cleanup(d.stop)
}

func (d *desk) stop() {
	if d.phone == nil {
		return
	}
	if err := d.close(); err != nil {
		d.t.Error(err)
	}
	if err := d.db.Close(); err != nil {
		d.t.Error(err)
	}
	d.phone = nil
}

func (d *desk) restart() {
	d.stop()
	d.start()
}

// is tells a state, and returns what main was told since it was asked last.
func (d *desk) is(names ...wastate.Name) []string {
	d.t.Helper()
	for _, name := range names {
		d.tell(wastate.State{Name: name, Since: time.Unix(1, 0), Detail: "why", WhatToDo: "do it"})
	}
	var texts []string
	for {
		o, ok, err := d.db.NextOutgoing(d.t.Context(), d.main)
		if err != nil {
			d.t.Fatal(err)
		}
		if !ok {
			return texts
		}
		texts = append(texts, o.Text)
		if err := d.db.MarkSent(d.t.Context(), o.ID); err != nil {
			d.t.Fatal(err)
		}
	}
}

func (d *desk) want(got []string, want ...string) {
	d.t.Helper()
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		d.t.Errorf("main was told %q, want %q", got, want)
	}
}

// A change that somebody must act on is told once, also over restarts; what goes
// by itself is not told.
func TestNotices(t *testing.T) {
	d := newDesk(t, "console:main")
	d.want(d.is(wastate.Linked, wastate.Connecting, wastate.Connected, wastate.Offline, wastate.Connected, wastate.NotLinked, wastate.Linking))
	d.want(d.is(wastate.Connected, wastate.LoggedOut, wastate.LoggedOut), "WhatsApp is logged out (why): do it")
	d.restart()
	d.want(d.is(wastate.Linked, wastate.Connecting, wastate.LoggedOut))
	d.want(d.is(wastate.Banned, wastate.Connecting, wastate.Banned), "WhatsApp is banned (why): do it")
	d.want(d.is(wastate.Outdated, wastate.Banned), "WhatsApp is outdated (why): do it", "WhatsApp is banned (why): do it")
	d.restart()
	d.want(d.is(wastate.Banned, wastate.Connected))
	for _, name := range []wastate.Name{wastate.Replaced, wastate.Refused, wastate.PasskeyNeeded, wastate.PhoneNeeded} {
		d.want(d.is(name, name), "WhatsApp is "+string(name)+" (why): do it")
		d.want(d.is(wastate.Connected, name), "WhatsApp is "+string(name)+" (why): do it")
	}

	// The alarm stays as long as it is so, and no longer.
	alarm := func() (text string) {
		d.health.set(func(h *health) { text = h.alarms[channelWhatsApp] })
		return text
	}
	if got := alarm(); got != "WhatsApp is phone must come online (why): do it" {
		t.Errorf("the alarm is %q", got)
	}
	if d.is(wastate.Connected); alarm() != "" {
		t.Errorf("the alarm %q stays", alarm())
	}
}

// Where main's own chat is the one that is down, nothing waits to be told late.
func TestNoticesWhenMainIsOnWhatsApp(t *testing.T) {
	d := newDesk(t, "15550009999@s.whatsapp.net")
	d.want(d.is(wastate.LoggedOut, wastate.Banned))
	d.want(d.is(wastate.Connected, wastate.PhoneNeeded), "WhatsApp is phone must come online (why): do it")
}

// Scripts read the state from a file that nobody else may read. WA-40: the
// channel's name is whatsapp.
func TestStatusFile(t *testing.T) {
	d := newDesk(t, "console:main")
	path := filepath.Join(d.root, "store", statusFile)
	until := time.Date(2026, 9, 18, 12, 0, 0, 0, time.UTC)
	d.tell(wastate.State{Name: wastate.Banned, Since: until.Add(-time.Hour), Until: until, Detail: "why", WhatToDo: "wait"})
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", info, err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var c web.Channel
	if err := json.Unmarshal(data, &c); err != nil {
		t.Fatal(err)
	}
	if c.State != "banned" || c.Text != "banned until 2026-09-18 12:00 UTC" || !c.Until.Equal(until) || c.WhatToDo != "wait" || !c.NeedsPerson || c.Name != "whatsapp" {
		t.Errorf("got %s", data)
	}
	if c, ok, err := readStatus(Config{Root: d.root}); err != nil || !ok || c.State != "banned" {
		t.Errorf("got %+v, %v, %v", c, ok, err)
	}
	left, err := filepath.Glob(filepath.Join(d.root, "store", ".whatsapp*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %q, %v", left, err)
	}
}

// What a group is answered quotes the question, once; nobody quotes to one person,
// and what Berth itself says quotes nothing.
func TestQuotes(t *testing.T) {
	d := newDesk(t, "console:main")
	group, person := "120363012345678901@g.us", "15550009999@s.whatsapp.net"
	ctx := t.Context()
	for _, chat := range []string{group, person} {
		if _, _, err := d.db.AddMessage(ctx, berth.Message{ID: "q/1@lid", ChatJID: chat, Sender: "1@lid", Text: "@Andy?", Wakes: true}); err != nil {
			t.Fatal(err)
		}
		if _, _, err := d.db.AddMessage(ctx, berth.Message{ID: "c/2@lid", ChatJID: chat, Sender: "2@lid", Text: "aside"}); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		o    berth.Outgoing
		want bool
	}{
		{berth.Outgoing{ChatJID: group, Key: "run/r/1/0", Kind: berth.OutAnswer, AnswersTo: 2}, true},
		{berth.Outgoing{ChatJID: group, Key: "run/r/1/1", Kind: berth.OutAnswer, AnswersTo: 2}, false},
		{berth.Outgoing{ChatJID: group, Key: "run/r/1/0", Kind: berth.OutAnswer}, false},
		{berth.Outgoing{ChatJID: group, Key: "run/r/1/0", Kind: berth.OutNotice, AnswersTo: 2}, false},
		{berth.Outgoing{ChatJID: person, Key: "run/r/1/0", Kind: berth.OutAnswer, AnswersTo: 4}, false},
	} {
		m, ok := d.answered(ctx, tt.o)
		if ok != tt.want || ok && m.ID != "q/1@lid" {
			t.Errorf("%+v: got %q, %v", tt.o, m.ID, ok)
		}
	}
}

// A text has one id on the wire, whenever it is sent, in the form of WhatsApp's own.
func TestWireID(t *testing.T) {
	a, again, b := wireID("a"), wireID("a"), wireID("b")
	if a != again || a == b {
		t.Errorf("got %s, %s and %s", a, again, b)
	}
	if like := whatsapp.NewMessageID(); len(a) != len(like) || a[:4] != like[:4] || a != strings.ToUpper(a) {
		t.Errorf("got %s, want something like %s", a, like)
	}
}

// The state that changes with the time alone is noticed within the hour.
func TestStateIsLookedAt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "db")
		db, err := sqlite.Open(t.Context(), path, func(string, bool) {})
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		tree, err := workspace.NewTree(t.TempDir(), os.Geteuid(), os.Getegid())
		if err != nil {
			t.Fatal(err)
		}
		dispatcher, err := dispatch.New(t.Context(), dispatch.Options{Store: db, Limit: 1, Assistant: "Andy", Log: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		p := newPhone(t.Context(), Config{AssistantName: "Andy"}, tree, db, dispatcher, &health{alarms: make(map[string]string)}, func(context.Context) {}, zap.NewNop())
		hangUp := (&router{phone: p}).connect()
		synctest.Wait()
		status := filepath.Join(tree.StoreDir(), statusFile)
		if err := os.Remove(status); err != nil {
			t.Error(err)
		}
		time.Sleep(stateEvery)
		synctest.Wait()
		if _, err := os.Stat(status); err != nil {
			t.Error(err)
		}
		hangUp()
		if err := p.close(); err != nil {
			t.Error(err)
		}
		dispatcher.Shutdown(t.Context())
	})
}

// Each chat has its channel, and its pace.
func TestRouter(t *testing.T) {
	r := &router{console: console.New(nil, nil, "Andy", "")}
	for chat, want := range map[string]outbox.Pace{
		"console:a":              {},
		"1@g.us":                 {Chunk: outbox.DefaultPace.Chunk, Text: outbox.DefaultPace.Text, Burst: outbox.DefaultPace.Burst, Jitter: time.Second},
		"1555000@s.whatsapp.net": {Chunk: outbox.DefaultPace.Chunk, Text: outbox.DefaultPace.Text, Burst: outbox.DefaultPace.Burst, Jitter: time.Second},
		"tg:1":                   outbox.DefaultPace,
	} {
		if got := r.Pace(chat); got != want {
			t.Errorf("%s: got %+v, want %+v", chat, got, want)
		}
	}
	// Without WhatsApp its texts wait.
	err := r.Send(t.Context(), berth.Outgoing{ChatJID: "1@g.us"})
	if !unavailable(err) {
		t.Errorf("got %v", err)
	}
	r.SetTyping("1@g.us", true)
	if err := r.syncChats(t.Context()); err != nil {
		t.Error(err)
	}
}

// What nobody will be told is not remembered.
func TestReceiptsAreNotKept(t *testing.T) {
	d := newDesk(t, "console:main")
	d.read(berth.Batch{ChatJID: "1@g.us"})
	if n := len(d.taken); n != 0 {
		t.Errorf("%d batches are kept without receipts", n)
	}
	d.receipts = true
	d.read(berth.Batch{ChatJID: "1@g.us"})
	if n := len(d.taken); n != 1 {
		t.Errorf("%d batches are kept", n)
	}
	broken := &phone{failed: errors.New("damaged"), receipts: true, given: make(chan struct{}, 1)}
	broken.read(berth.Batch{ChatJID: "1@g.us"})
	if n := len(broken.taken); n != 0 {
		t.Errorf("%d batches are kept without a session", n)
	}
}
