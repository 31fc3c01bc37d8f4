package wamsg

import (
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waid"
)

const (
	maxName  = 64   // characters of a name
	maxField = 300  // characters of a field of a card, a place, a poll …
	maxQuote = 1000 // characters of a quoted text
	maxList  = 20   // entries that are listed
	maxID    = 128  // bytes of a message's id
)

// cleanText returns s as a text that the store takes: UTF-8 without control
// characters, no longer than berth.MaxText.
func cleanText(s string) string {
	// What is cut away anyway is not looked at; what is replaced may grow.
	long := len(s) > 2*berth.MaxText
	s = strings.ToValidUTF8(firstBytes(s, 2*berth.MaxText), "\uFFFD")
	s = strings.NewReplacer("\r\n", "\n", "\r", "\n", "\u2028", "\n", "\u2029", "\n").Replace(s)
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return -1
		}
		return r
	}, s)
	return cutBytes(strings.TrimSpace(s), berth.MaxText, long)
}

// cutBytes returns s with at most so many bytes, and says so if anything was or
// is left out.
func cutBytes(s string, most int, cut bool) string {
	const note = "… [the rest of the message was too long]"
	if len(s) <= most && !cut {
		return s
	}
	return firstBytes(s, most-len(note)) + note
}

// firstBytes returns the beginning of s, without half a character at its end.
func firstBytes(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}

// firstRunes returns the beginning of s.
func firstRunes(s string, most int) string {
	if utf8.RuneCountInString(s) <= most {
		return s
	}
	return string([]rune(s)[:most-1]) + "…"
}

// oneLine returns s without line breaks, control characters and those that only
// order or hide others, cut to so many characters. Whoever reads it in a list, a
// log or brackets sees what is there, in its place.
func oneLine(s string, most int) string {
	const wide = 8 // bytes looked at for each character that is kept
	s = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case unicode.IsControl(r) || isHidden(r):
			return -1
		}
		return r
	}, strings.ToValidUTF8(firstBytes(s, most*wide), ""))
	return firstRunes(strings.Join(strings.Fields(s), " "), most)
}

// isHidden reports whether r orders or hides other characters. The joiners
// belong to emoji and to the letters of some scripts.
func isHidden(r rune) bool {
	return unicode.Is(unicode.Cf, r) && r != '\u200d' && r != '\u200c'
}

// cleanID returns a message's id, or "" for what cannot be one.
func cleanID(id string) string {
	if !IsID(id) {
		return ""
	}
	return id
}

// IsID reports whether id can be a message's: its sender chose it, and may choose
// a megabyte of control characters.
func IsID(id string) bool {
	for _, c := range []byte(id) {
		if c <= ' ' || c > '~' {
			return false
		}
	}
	return id != "" && len(id) <= maxID
}

// Excerpt returns as much of a text as is shown where it is quoted.
func Excerpt(text string) string { return firstRunes(text, maxQuote) }

// Late says that a message came so late: "[came 2 hours late]".
func Late(by time.Duration) string {
	const exact = 3 * time.Hour // up to which minutes count
	if by < exact {
		return "[came " + duration(by.Round(time.Minute)) + " late]"
	}
	return "[came " + duration(by.Round(time.Hour)) + " late]"
}

// SenderName returns the name to show for somebody: the one that they chose, or
// else their number, or else the digits of their hidden address. It has one line
// and at most 64 characters, and is empty for nobody.
func SenderName(chosen string, p waid.Person) string {
	if name := oneLine(chosen, maxName); name != "-" && strings.ContainsFunc(name, isVisible) { // "-" stands for none
		return name
	}
	if !p.PN.IsEmpty() {
		return p.PN.User
	}
	return p.LID.User
}

// isVisible reports whether r shows: there are letters that do not, and they are
// liked as names.
func isVisible(r rune) bool {
	return unicode.In(r, unicode.L, unicode.N, unicode.P, unicode.S) && !strings.ContainsRune("\u3164\u115f\u1160\uffa0\u2800", r)
}
