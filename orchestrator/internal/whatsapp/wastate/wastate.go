// Package wastate knows how it stands with the link to WhatsApp, in words for
// people. It is told the client's events and says what state they make; it does
// nothing itself.
package wastate

import (
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode"

	"go.mau.fi/whatsmeow/types/events"
)

// Name is a state of the link.
type Name string

// The states.
const (
	NotLinked     Name = "not linked"
	Linking       Name = "linking" // a code waits to be scanned
	PasskeyNeeded Name = "passkey needed"
	Linked        Name = "linked" // and not connected for the first time yet
	Connecting    Name = "connecting"
	Connected     Name = "connected"
	PhoneNeeded   Name = "phone must come online" // connected, but not for long
	Offline       Name = "offline"                // the client connects again by itself

	// From these the client does not come back by itself: only after Dialing.
	LoggedOut Name = "logged out"
	Replaced  Name = "replaced"
	Banned    Name = "banned"
	Outdated  Name = "outdated"
	Refused   Name = "refused"
)

// final reports whether only a person, or another attempt, changes the state.
func (n Name) final() bool {
	switch n {
	case LoggedOut, Replaced, Banned, Outdated, Refused:
		return true
	}
	return false
}

// State is how it stands.
type State struct {
	Name  Name      `json:"state"`
	Since time.Time `json:"since"`
	// Until is the end of a ban, or when WhatsApp unlinks this device because the
	// phone was away; zero if there is none, or none was said.
	Until    time.Time `json:"until,omitzero"`
	Detail   string    `json:"detail,omitempty"`   // what happened, in a line
	WhatToDo string    `json:"whatToDo,omitempty"` // for a person; empty if nothing

	now time.Time
}

// NeedsPerson reports whether it stays like this until somebody does WhatToDo.
func (s State) NeedsPerson() bool {
	switch s.Name {
	case NotLinked, Linking, PasskeyNeeded, PhoneNeeded:
		return true
	}
	return s.Name.final()
}

// String names the state: "banned until 2026-09-18 12:00 UTC", "phone must come
// online in 2 days".
func (s State) String() string {
	switch {
	case s.Until.IsZero():
	case s.Name == Banned:
		return string(s.Name) + " until " + stamp(s.Until)
	case s.Name == PhoneNeeded:
		const day = 24 * time.Hour
		switch days := (s.Until.Sub(s.now) + day - 1) / day; {
		case days <= 0:
			return string(s.Name) + " now"
		case days == 1:
			return string(s.Name) + " in 1 day"
		default:
			return fmt.Sprintf("%s in %d days", s.Name, days)
		}
	}
	return string(s.Name)
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04") + " UTC" }

// What the channel tells beside the client's events.
type (
	// Dialing says that a connection is tried that was not under way by itself.
	Dialing struct{}
	// DialFailed says that an attempt failed, also one of the client's own.
	DialFailed struct{ Err error }
	// Closed says that Berth itself ended the connection.
	Closed struct{}
	// Unlinked says that Berth itself logged out.
	Unlinked struct{}
)

const (
	// PhoneLimit is how long the phone may be away before WhatsApp unlinks its
	// devices.
	PhoneLimit = 14 * 24 * time.Hour
	// phoneWarning is when people are told.
	phoneWarning = 12 * 24 * time.Hour
)

// Link follows the link. Its methods are safe for concurrent use: the client
// tells its events from several goroutines, and so not always in their order.
type Link struct {
	mu        sync.Mutex
	linked    bool // there is a session
	state     State
	silent    bool      // offline only because nothing was answered
	phoneSeen time.Time // zero: not known
	limited   time.Time // until then only who wrote first may be written to
	isLimited bool
}

// New returns the link as it is when the daemon starts: linked says that there
// is a session, phoneSeen when the phone was last heard of, if that is known.
func New(linked bool, phoneSeen, now time.Time) *Link {
	l := &Link{linked: linked, phoneSeen: phoneSeen}
	name := NotLinked
	if linked {
		name = Linked
	}
	l.setLocked(now, name, "")
	return l
}

// State returns how it stands at a time.
func (l *Link) State(now time.Time) State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stateLocked(now)
}

func (l *Link) stateLocked(now time.Time) State {
	s := l.state
	s.now = now
	if s.Name == Connected {
		if away := now.Sub(l.phoneSeen); !l.phoneSeen.IsZero() && away >= phoneWarning {
			s.Name, s.Since, s.Until = PhoneNeeded, l.phoneSeen.Add(phoneWarning), l.phoneSeen.Add(PhoneLimit)
			s.Detail = "the phone was last heard of on " + stamp(l.phoneSeen)
		} else if l.isLimited && (l.limited.IsZero() || now.Before(l.limited)) {
			s.Detail = "WhatsApp lets this account write only to groups and to people who wrote first"
			if !l.limited.IsZero() {
				s.Detail += ", until " + stamp(l.limited)
			}
		}
	}
	s.WhatToDo = l.whatToDo(s)
	return s
}

// PhoneSeen returns when the phone was last heard of, or zero: to be kept over a
// restart.
func (l *Link) PhoneSeen() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.phoneSeen
}

// Handle takes an event of the client or of this package at the time at which it
// came, and returns how it stands then. changed is whether that is another state
// than before, or another detail of it. Events of any other type change nothing,
// but that some of them prove that the phone is there.
func (l *Link) Handle(event any, now time.Time) (s State, changed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.stateLocked(now)
	l.heardLocked(event, now)
	l.handleLocked(event, now)
	s = l.stateLocked(now)
	return s, s.Name != before.Name || s.Detail != before.Detail || !s.Until.Equal(before.Until)
}

func (l *Link) handleLocked(event any, now time.Time) {
	is := l.state.Name
	switch e := event.(type) {
	case Dialing:
		if l.linked {
			l.setLocked(now, Connecting, "")
		} else {
			l.setLocked(now, NotLinked, "")
		}
		return
	case Unlinked:
		l.linked = false
		l.setLocked(now, NotLinked, "Berth logged out")
		return
	case *events.LoggedOut:
		l.linked = false
		l.setLocked(now, LoggedOut, loggedOut(e.Reason))
		return
	case *events.QR:
		l.linked = false
		l.setLocked(now, Linking, "a code waits to be scanned")
		return
	case *events.PairSuccess:
		l.linked, l.phoneSeen = true, now
		l.setLocked(now, Linked, "linked as +"+e.ID.User)
		return
	case *events.NotifyAccountReachoutTimelock:
		l.isLimited, l.limited = e.IsActive, e.TimeEnforcementEnds.Time
		return
	}
	// An event that was on its way when the end came does not undo it.
	if is.final() {
		return
	}
	switch e := event.(type) {
	case *events.Connected:
		if l.linked {
			l.setLocked(now, Connected, "")
		}
	case *events.Disconnected:
		l.lostLocked(now, "the connection broke")
	case DialFailed:
		l.lostLocked(now, because("no connection", e.Err))
	case Closed:
		l.lostLocked(now, "Berth closed the connection")
	case *events.KeepAliveTimeout:
		if is == Connected {
			detail := "WhatsApp has not answered for some time"
			if !e.LastSuccess.IsZero() {
				detail = "WhatsApp has not answered since " + stamp(e.LastSuccess)
			}
			l.setLocked(now, Offline, detail)
			l.silent = true
		}
	case *events.KeepAliveRestored:
		if is == Offline && l.silent {
			l.setLocked(now, Connected, "")
		}
	case *events.StreamError:
		l.lostLocked(now, fmt.Sprintf("WhatsApp ended the session of this connection with code %q", e.Code))
	case *events.StreamReplaced:
		l.setLocked(now, Replaced, "another program connected with the same session")
	case *events.TemporaryBan:
		l.setLocked(now, Banned, e.Code.String())
		const longest = 100 * 365 * 24 * time.Hour
		if e.Expire > 0 && e.Expire < longest {
			l.state.Until = now.Add(e.Expire)
		}
	case *events.ClientOutdated:
		l.setLocked(now, Outdated, "WhatsApp does not take this version any more")
	case *events.ConnectFailure:
		detail := "WhatsApp refused the connection: " + e.Reason.String()
		if e.Message != "" {
			detail += fmt.Sprintf(" (%q)", e.Message)
		}
		l.setLocked(now, Refused, detail)
	case *events.CATRefreshError:
		l.setLocked(now, Refused, because("WhatsApp refused the connection", e.Error))
	case *events.QRScannedWithoutMultidevice:
		l.setLocked(now, Linking, "the phone that scanned the code does not take linked devices")
	case *events.PairPasskeyRequest:
		l.setLocked(now, PasskeyNeeded, "WhatsApp wants a passkey for this account")
	case *events.PairPasskeyConfirmation:
		if !e.SkipHandoffUX {
			l.setLocked(now, PasskeyNeeded, fmt.Sprintf("compare the code %q with the phone", e.Code))
		}
	case *events.PairPasskeyError:
		l.setLocked(now, NotLinked, because("linking with a passkey did not work", e.Error))
	case *events.PairError:
		l.setLocked(now, NotLinked, because("linking did not work", e.Error))
	}
}

// lostLocked says that there is no connection.
func (l *Link) lostLocked(now time.Time, why string) {
	switch {
	case l.linked:
		l.setLocked(now, Offline, why)
	case l.state.Name == Linking || l.state.Name == PasskeyNeeded:
		l.setLocked(now, NotLinked, "no code was used before the linking ended")
	}
}

func (l *Link) setLocked(now time.Time, name Name, detail string) {
	l.silent = false
	since := now
	if l.state.Name == name {
		since = l.state.Since
	}
	l.state = State{Name: name, Since: since, Detail: line(detail)}
}

func because(what string, err error) string {
	if err == nil {
		return what
	}
	return what + ": " + err.Error()
}

// line returns s in one line of bounded length without control characters: some
// of it comes from outside.
func line(s string) string {
	s = strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, "\uFFFD"), func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }), " ")
	const most = 300
	if r := []rune(s); len(r) > most {
		s = string(r[:most]) + "…"
	}
	return s
}

// heardLocked notes what only the phone itself can have caused. What it says
// about the time is not believed beyond now.
func (l *Link) heardLocked(event any, now time.Time) {
	at := time.Time{}
	switch e := event.(type) {
	case *events.Message:
		if e.Info.IsFromMe && e.Info.Sender.Device == 0 {
			at = e.Info.Timestamp
		}
	case *events.Receipt:
		if e.IsFromMe && e.Sender.Device == 0 {
			at = e.Timestamp
		}
	case *events.HistorySync:
		at = now
	}
	if at.After(now) {
		at = now
	}
	if at.After(l.phoneSeen) {
		l.phoneSeen = at
	}
}

func loggedOut(r events.ConnectFailureReason) string {
	switch r {
	case events.ConnectFailureMainDeviceGone:
		return "WhatsApp locked the account, or it moved to another phone"
	case events.ConnectFailureUnknownLogout:
		return "WhatsApp banned the account"
	}
	return "this device was removed on the phone"
}

const login = "link it again: berth login whatsapp"

func (l *Link) whatToDo(s State) string {
	switch s.Name {
	case NotLinked:
		return "link the account: berth login whatsapp"
	case Linking:
		return "scan the code with the phone, under Linked devices; berth login whatsapp shows it"
	case PasskeyNeeded:
		return "confirm the linking with the passkey of the account: berth login whatsapp says how"
	case PhoneNeeded:
		return "open WhatsApp on the phone, with the network on; otherwise this device is unlinked"
	case LoggedOut:
		if strings.Contains(s.Detail, "banned") {
			return "see on the phone what WhatsApp says, and ask for a review there; once the account works again, " + login
		}
		if strings.Contains(s.Detail, "locked") {
			return "see on the phone what WhatsApp says; once it works there, " + login
		}
		return login + "; groups and messages are kept"
	case Replaced:
		return "stop the other program that uses this session, such as a second Berth with the same store, then restart Berth"
	case Banned:
		if !s.Until.IsZero() && !s.now.Before(s.Until) {
			return "the ban should be over: restart Berth"
		}
		return "wait, and do not link again: that makes bans longer. Afterwards write only to groups and to people who wrote first"
	case Outdated:
		return "Berth asks for the present version number and tries again; if this stays, update Berth"
	case Refused:
		return "restart Berth in some minutes; if it is refused again, update it"
	}
	return ""
}
