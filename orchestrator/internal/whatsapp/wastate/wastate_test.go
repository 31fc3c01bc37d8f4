package wastate

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"go.mau.fi/util/jsontime"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/types/events"
)

var start = time.Date(2026, 9, 18, 12, 0, 0, 0, time.UTC)

// after returns the state after events, a minute apart, on a link that begins
// with a session.
func after(list ...any) (*Link, State, time.Time) {
	l, now := New(true, time.Time{}, start), start
	s := l.State(now)
	for _, e := range list {
		now = now.Add(time.Minute)
		s, _ = l.Handle(e, now)
	}
	return l, s, now
}

var (
	up   = []any{Dialing{}, &events.Connected{}}
	gone = &events.Disconnected{}
	out  = &events.LoggedOut{Reason: events.ConnectFailureLoggedOut}
	pair = &events.PairSuccess{ID: types.NewJID("4915112345678", types.DefaultUserServer)}
)

func onceUp(list ...any) []any { return append(append([]any{}, up...), list...) }

// Every way in which a connection begins or ends, as whatsmeow tells it.
func TestStates(t *testing.T) {
	for name, c := range map[string]struct {
		events []any
		want   Name
		detail string // part of it
		person bool
	}{
		"start":                       {nil, Linked, "", false},
		"dialing":                     {[]any{Dialing{}}, Connecting, "", false},
		"WA-03 open":                  {up, Connected, "", false},
		"WA-06 closed by us":          {onceUp(Closed{}), Offline, "closed", false},
		"WA-08 connection lost":       {onceUp(gone), Offline, "broke", false},
		"lost and back":               {onceUp(gone, &events.Connected{}), Connected, "", false},
		"server down":                 {onceUp(gone, DialFailed{errors.New("503 at\n\x1b12:00")}), Offline, "503 at 12:00", false},
		"no network at start":         {[]any{Dialing{}, DialFailed{errors.New("no route")}}, Offline, "no route", false},
		"WA-10 restart after pairing": {[]any{Unlinked{}, &events.QR{}, pair, &events.Connected{}}, Connected, "", false},
		"removed on the phone":        {onceUp(out), LoggedOut, "removed", true},
		"then the socket closes":      {onceUp(out, gone), LoggedOut, "removed", true},
		"the socket closes first":     {onceUp(gone, out), LoggedOut, "removed", true},
		"late word of the connection": {[]any{Dialing{}, out, &events.Connected{}}, LoggedOut, "removed", true},
		"account locked":              {[]any{Dialing{}, &events.LoggedOut{OnConnect: true, Reason: 403}}, LoggedOut, "locked", true},
		"account banned":              {[]any{Dialing{}, &events.LoggedOut{OnConnect: true, Reason: 406}}, LoggedOut, "banned", true},
		"replaced":                    {onceUp(&events.StreamReplaced{}), Replaced, "another program", true},
		"replaced, closed":            {onceUp(&events.StreamReplaced{}, gone), Replaced, "another program", true},
		"replaced, tried again":       {onceUp(&events.StreamReplaced{}, Dialing{}, &events.Connected{}), Connected, "", false},
		"other stream error":          {onceUp(&events.StreamError{Code: "5\x1b00"}), Offline, `"5\x1b00"`, false},
		"stream error and back":       {onceUp(&events.StreamError{Code: "500"}, gone, &events.Connected{}), Connected, "", false},
		"temporary ban":               {[]any{Dialing{}, &events.TemporaryBan{Code: 101, Expire: time.Hour}, gone}, Banned, "too many messages", true},
		"ban of an unknown kind":      {[]any{Dialing{}, &events.TemporaryBan{Code: 999}}, Banned, "999", true},
		"outdated":                    {[]any{Dialing{}, &events.ClientOutdated{}}, Outdated, "version", true},
		"outdated, then refreshed":    {[]any{Dialing{}, &events.ClientOutdated{}, Dialing{}, &events.Connected{}}, Connected, "", false},
		"refused":                     {[]any{Dialing{}, &events.ConnectFailure{Reason: 409, Message: "no\n" + strings.Repeat("x", 1000)}}, Refused, "user agent", true},
		"refused by a token":          {[]any{Dialing{}, &events.CATRefreshError{Error: errors.New("x")}}, Refused, "x", true},
		"silent":                      {onceUp(&events.KeepAliveTimeout{ErrorCount: 1, LastSuccess: start}), Offline, "2026-09-18 12:00 UTC", false},
		"silent, then back":           {onceUp(&events.KeepAliveTimeout{ErrorCount: 3}, &events.KeepAliveRestored{}), Connected, "", false},
		"silent, then lost":           {onceUp(&events.KeepAliveTimeout{}, gone, &events.KeepAliveRestored{}), Offline, "broke", false},
		"logged out here":             {onceUp(Unlinked{}), NotLinked, "Berth logged out", true},
		"after that, late words":      {onceUp(Unlinked{}, gone, &events.Connected{}), NotLinked, "Berth logged out", true},
		"QR":                          {[]any{Unlinked{}, Dialing{}, &events.QR{Codes: []string{"x"}}}, Linking, "code", true},
		"QR not scanned":              {[]any{Unlinked{}, Dialing{}, &events.QR{}, gone}, NotLinked, "no code was used", true},
		"QR on an old phone":          {[]any{Unlinked{}, &events.QR{}, &events.QRScannedWithoutMultidevice{}}, Linking, "does not take", true},
		"QR, outdated":                {[]any{Unlinked{}, Dialing{}, &events.ClientOutdated{}}, Outdated, "version", true},
		"paired":                      {[]any{Unlinked{}, &events.QR{}, pair}, Linked, "+4915112345678", false},
		"paired, restarting":          {[]any{Unlinked{}, &events.QR{}, pair, gone}, Offline, "", false},
		"pairing failed":              {[]any{Unlinked{}, &events.QR{}, &events.PairError{Error: errors.New("hmac")}}, NotLinked, "hmac", true},
		"passkey wanted":              {[]any{Unlinked{}, &events.QR{}, &events.PairPasskeyRequest{}}, PasskeyNeeded, "passkey", true},
		"passkey, compare":            {[]any{Unlinked{}, &events.QR{}, &events.PairPasskeyRequest{}, &events.PairPasskeyConfirmation{Code: "AB12"}}, PasskeyNeeded, `"AB12"`, true},
		"passkey, nothing to compare": {[]any{Unlinked{}, &events.QR{}, &events.PairPasskeyRequest{}, &events.PairPasskeyConfirmation{SkipHandoffUX: true}}, PasskeyNeeded, "wants a passkey", true},
		"passkey, in time":            {[]any{Unlinked{}, &events.QR{}, &events.PairPasskeyRequest{}, pair, &events.Connected{}}, Connected, "", false},
		"passkey, too late":           {[]any{Unlinked{}, &events.QR{}, &events.PairPasskeyRequest{}, gone}, NotLinked, "no code was used", true},
		"passkey failed":              {[]any{Unlinked{}, &events.QR{}, &events.PairPasskeyError{}}, NotLinked, "did not work", true},
		"linked again":                {onceUp(out, gone, &events.QR{}, pair, &events.Connected{}), Connected, "", false},
		"limited":                     {onceUp(&events.NotifyAccountReachoutTimelock{IsActive: true, TimeEnforcementEnds: jsontime.UnixString{Time: start.Add(time.Hour)}}), Connected, "2026-09-18 13:00 UTC", false},
		"limited without an end":      {onceUp(&events.NotifyAccountReachoutTimelock{IsActive: true}), Connected, "wrote first", false},
		"limited no more":             {onceUp(&events.NotifyAccountReachoutTimelock{IsActive: true}, &events.NotifyAccountReachoutTimelock{}), Connected, "", false},
		"limit that is over":          {onceUp(&events.NotifyAccountReachoutTimelock{IsActive: true, TimeEnforcementEnds: jsontime.UnixString{Time: start}}), Connected, "", false},
		"anything else":               {onceUp(nil, 7, &events.OfflineSyncCompleted{}, &events.Message{}, &events.Receipt{}), Connected, "", false},
	} {
		_, s, _ := after(c.events...)
		if s.Name != c.want || s.NeedsPerson() != c.person || !strings.Contains(s.Detail, c.detail) || c.detail == "" && s.Detail != "" && c.want == Connected {
			t.Errorf("%s: got %+v, person %v; want %q with %q, person %v", name, s, s.NeedsPerson(), c.want, c.detail, c.person)
		}
		if (s.WhatToDo != "") != c.person {
			t.Errorf("%s: a person is needed: %v, and is told %q", name, c.person, s.WhatToDo)
		}
		if strings.ContainsAny(s.Detail, "\n\x1b") || utf8.RuneCountInString(s.Detail) > 301 || strings.Contains(s.Detail, "nil") {
			t.Errorf("%s: detail %q", name, s.Detail)
		}
	}
}

// The original exits when a code is wanted; Berth goes on and says so.
func TestWA07NeedsAuth(t *testing.T) {
	l := New(false, time.Time{}, start)
	if s := l.State(start); s.Name != NotLinked || !s.NeedsPerson() || !strings.Contains(s.WhatToDo, "berth login whatsapp") {
		t.Errorf("at start: %+v", s)
	}
	if s, changed := l.Handle(&events.QR{Codes: []string{"x"}}, start); s.Name != Linking || !s.NeedsPerson() || !changed {
		t.Errorf("with a code: %+v, changed %v", s, changed)
	}
}

func TestWA08Reconnects(t *testing.T) {
	l, s, now := after(onceUp(gone)...)
	if s.Name != Offline || s.NeedsPerson() {
		t.Errorf("got %+v", s)
	}
	if s, changed := l.Handle(&events.Connected{}, now); s.Name != Connected || !changed {
		t.Errorf("got %+v", s)
	}
}

func TestWA09LoggedOut(t *testing.T) {
	_, s, _ := after(onceUp(out, gone)...)
	if s.Name != LoggedOut || !s.NeedsPerson() || !strings.Contains(s.WhatToDo, "berth login whatsapp") || !strings.Contains(s.WhatToDo, "kept") {
		t.Errorf("got %+v", s)
	}
}

func TestBanEnds(t *testing.T) {
	l, s, now := after(Dialing{}, &events.TemporaryBan{Code: 104, Expire: 90 * time.Minute})
	if got, want := s.String(), "banned until 2026-09-18 13:32 UTC"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if !strings.Contains(s.WhatToDo, "wait") {
		t.Errorf("got %q", s.WhatToDo)
	}
	if s := l.State(now.Add(90 * time.Minute)); !strings.Contains(s.WhatToDo, "over") {
		t.Errorf("when it is over: %q", s.WhatToDo)
	}
	for _, odd := range []time.Duration{0, -time.Hour, 1 << 62} {
		if _, s, _ := after(Dialing{}, &events.TemporaryBan{Expire: odd}); s.String() != "banned" || !s.Until.IsZero() {
			t.Errorf("%v: got %q", odd, s)
		}
	}
}

func TestPhoneAway(t *testing.T) {
	const day = 24 * time.Hour
	l := New(true, start, start)
	l.Handle(Dialing{}, start)
	l.Handle(&events.Connected{}, start)
	for away, want := range map[time.Duration]string{
		0:          "connected",
		12*day - 1: "connected",
		12 * day:   "phone must come online in 2 days",
		13*day - 1: "phone must come online in 2 days",
		13 * day:   "phone must come online in 1 day",
		14 * day:   "phone must come online now",
		20 * day:   "phone must come online now",
	} {
		s := l.State(start.Add(away))
		if s.String() != want || s.NeedsPerson() != (want != "connected") {
			t.Errorf("after %v: got %q, %+v, want %q", away, s, s, want)
		}
		if s.Name == PhoneNeeded && (!s.Until.Equal(start.Add(PhoneLimit)) || !s.Since.Equal(start.Add(12*day))) {
			t.Errorf("after %v: since %v until %v", away, s.Since, s.Until)
		}
	}
	own, phone := types.NewADJID("4915112345678", 0, 12), types.NewADJID("4915112345678", 0, 0)
	from := func(j types.JID, fromMe bool, at time.Time) *events.Message {
		return &events.Message{Info: types.MessageInfo{MessageSource: types.MessageSource{Sender: j, IsFromMe: fromMe}, Timestamp: at}}
	}
	now := start.Add(13 * day)
	for name, e := range map[string]any{
		"another of our devices": from(own, true, now),
		"somebody else":          from(phone, false, now),
		"an old message":         from(phone, true, start.Add(-day)),
	} {
		if s, changed := l.Handle(e, now); s.Name != PhoneNeeded || changed {
			t.Errorf("%s: got %q, changed %v", name, s, changed)
		}
	}
	if s, changed := l.Handle(from(phone, true, now.Add(100*day)), now); s.Name != Connected || !changed || !l.PhoneSeen().Equal(now) {
		t.Errorf("the phone wrote: %q, changed %v, seen %v", s, changed, l.PhoneSeen())
	}
	later := now.Add(13 * day)
	if s, _ := l.Handle(&events.Receipt{MessageSource: types.MessageSource{Sender: phone, IsFromMe: true}, Timestamp: later}, later); s.Name != Connected {
		t.Errorf("the phone read: %q", s)
	}
	later = later.Add(13 * day)
	if s, _ := l.Handle(&events.HistorySync{}, later); s.Name != Connected {
		t.Errorf("the phone sent its history: %q", s)
	}
	if s, _ := l.Handle(gone, later.Add(13*day)); s.Name != Offline {
		t.Errorf("offline: %q", s)
	}
}

// Since is the beginning of the state, and what is told twice is no change.
func TestSince(t *testing.T) {
	l := New(true, time.Time{}, start)
	l.Handle(gone, start.Add(time.Minute))
	s, changed := l.Handle(gone, start.Add(time.Hour))
	if !s.Since.Equal(start.Add(time.Minute)) || changed {
		t.Errorf("since %v, changed %v", s.Since, changed)
	}
	s, changed = l.Handle(DialFailed{errors.New("x")}, start.Add(2*time.Hour))
	if !s.Since.Equal(start.Add(time.Minute)) || !changed {
		t.Errorf("another detail: since %v, changed %v", s.Since, changed)
	}
	s, changed = l.Handle(&events.Connected{}, start.Add(3*time.Hour))
	if !s.Since.Equal(start.Add(3*time.Hour)) || !changed {
		t.Errorf("since %v, changed %v", s.Since, changed)
	}
}

// FuzzLink tells the events in any order.
func FuzzLink(f *testing.F) {
	all := []any{
		Dialing{}, &events.Connected{}, gone, out, &events.QR{}, pair, Unlinked{}, Closed{}, DialFailed{}, &events.KeepAliveTimeout{}, &events.KeepAliveRestored{},
		&events.StreamReplaced{}, &events.TemporaryBan{Expire: time.Hour}, &events.ClientOutdated{}, &events.ConnectFailure{}, &events.StreamError{}, &events.CATRefreshError{},
		&events.PairError{}, &events.PairPasskeyRequest{}, &events.PairPasskeyError{}, &events.PairPasskeyConfirmation{}, &events.QRScannedWithoutMultidevice{},
		&events.NotifyAccountReachoutTimelock{IsActive: true}, &events.HistorySync{}, nil,
	}
	f.Add([]byte{0, 1, 2, 3, 1, 4, 5, 1})
	f.Add([]byte{0, 11, 1, 2, 0, 1, 12, 13})
	f.Fuzz(func(t *testing.T, order []byte) {
		l, now := New(true, time.Time{}, start), start
		linked, ended := true, false
		for _, b := range order {
			now = now.Add(time.Duration(b) * time.Hour)
			e := all[int(b)%len(all)]
			before := l.State(now)
			s, changed := l.Handle(e, now)
			switch e.(type) {
			case *events.PairSuccess:
				linked, ended = true, false
			case *events.LoggedOut:
				linked, ended = false, true
			case Unlinked, *events.QR:
				linked, ended = false, false
			case Dialing:
				ended = false
			default:
				if ended && s.Name != before.Name {
					t.Fatalf("%T led from %q to %q", e, before, s)
				}
			}
			ended = ended || s.Name.final()
			if (s.Name == Connected || s.Name == PhoneNeeded || s.Name == Offline) && !linked {
				t.Fatalf("%T: %q without a session", e, s)
			}
			if changed != (s.Name != before.Name || s.Detail != before.Detail || !s.Until.Equal(before.Until)) {
				t.Fatalf("%T: changed %v from %+v to %+v", e, changed, before, s)
			}
			if s.Name == "" || s.String() == "" || s.Since.After(now) || s.NeedsPerson() != (s.WhatToDo != "") || strings.Contains(s.Detail, "nil") {
				t.Fatalf("%T: %+v", e, s)
			}
		}
	})
}
