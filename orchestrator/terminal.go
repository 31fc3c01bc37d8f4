package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// clean takes everything out of text that could command a terminal or turn
// its reading order: control characters but \n and \t, escape sequences'
// beginnings, bidirectional overrides. Bytes that are no UTF-8 become U+FFFD.
// What a container says may be hostile.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		if hostile(r) {
			return -1
		}
		return r
	}, text)
}

// cleanLine is clean for a text that must stay on one line.
func cleanLine(text string) string {
	return strings.Join(strings.Fields(clean(text)), " ")
}

func hostile(r rune) bool {
	switch {
	case r == '\n' || r == '\t':
		return false
	case r < ' ', r >= 0x7f && r <= 0x9f: // C0, DEL, C1
		return true
	case r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069, r == 0x200e, r == 0x200f, r == 0x061c: // bidi
		return true
	case r == 0x2028, r == 0x2029: // some terminals break lines here
		return true
	}
	return false
}

// cleanWriter cleans what is written to it, also where a rune is split over
// two writes.
type cleanWriter struct {
	w    io.Writer
	rest []byte // the beginning of a rune
}

func (c *cleanWriter) Write(p []byte) (int, error) {
	data := append(c.rest, p...)
	whole := len(data)
	for i := 1; i < utf8.UTFMax && i <= len(data); i++ {
		if tail := data[len(data)-i:]; utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				whole -= i
			}
			break
		}
	}
	c.rest = bytes.Clone(data[whole:])
	if _, err := io.WriteString(c.w, clean(string(data[:whole]))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// terminal returns the file behind s if that is a terminal.
func terminal(s any) (*os.File, bool) {
	f, ok := s.(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd()))
}

// forPeople returns text as it may be written to stdout: cleaned if that is a
// terminal, untouched if a program reads it.
func (a *app) forPeople(text string) string {
	if _, ok := terminal(a.stdout); ok {
		return clean(text)
	}
	return text
}

// printJSON writes v, with whatever could command a terminal escaped.
func (a *app) printJSON(v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(a.stdout, harmless(data))
	return err
}

// harmless escapes in JSON what could command a terminal.
func harmless(data []byte) string {
	var out strings.Builder
	for _, r := range string(data) {
		if hostile(r) { // all below U+10000
			fmt.Fprintf(&out, `\u%04x`, r)
		} else {
			out.WriteRune(r)
		}
	}
	return out.String()
}

// printTable writes rows in columns; the first row is the heading.
func (a *app) printTable(rows [][]string) error {
	w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			if row[i] = cleanLine(cell); row[i] == "" {
				row[i] = "-"
			}
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	return w.Flush()
}

// ago says how long ago t was, in the two largest units.
func ago(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	d := max(time.Since(t), 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	default:
		return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
	}
}
