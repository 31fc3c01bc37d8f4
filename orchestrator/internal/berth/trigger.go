package berth

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Triggered reports whether text starts with trigger in any case, after blanks,
// followed by the end or by a rune that is no letter, digit or underscore.
// A regular expression's \b would miss names that end in a non-ASCII rune.
func Triggered(text, trigger string) bool {
	trigger = strings.TrimSpace(trigger)
	if trigger == "" {
		return false
	}
	rest := strings.TrimSpace(text)
	for _, want := range trigger {
		got, size := utf8.DecodeRuneInString(rest)
		if size == 0 || !equalFold(got, want) {
			return false
		}
		rest = rest[size:]
	}
	next, size := utf8.DecodeRuneInString(rest)
	return size == 0 || !(unicode.IsLetter(next) || unicode.IsDigit(next) || next == '_')
}

func equalFold(a, b rune) bool {
	return a == b || strings.EqualFold(string(a), string(b))
}
