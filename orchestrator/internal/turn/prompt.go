package turn

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

var escaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;")

const stampLayout = "2006-01-02T15:04:05.000Z"

// prompt renders a batch for an agent: where it is, then what was said.
func prompt(g berth.Group, b berth.Batch, assistant string, now time.Time) string {
	var out strings.Builder
	where(&out, g, assistant, now)
	if b.Omitted > 0 {
		out.WriteString(` omitted="` + strconv.Itoa(b.Omitted) + ` older messages omitted"`)
	}
	out.WriteString(" />\n")
	for _, o := range b.Undelivered {
		fmt.Fprintf(&out, "<undelivered time=\"%s\" reason=\"%s\">%s</undelivered>\n",
			o.CreatedAt.UTC().Format(stampLayout), escaper.Replace(o.Error), escaper.Replace(excerpt(o.Shown())))
	}
	writeNotes(&out, b.Notes)
	out.WriteString("<messages>\n")
	for _, m := range b.Messages {
		fmt.Fprintf(&out, "<message sender=\"%s\" time=\"%s\" id=\"%d\">%s</message>\n",
			escaper.Replace(m.SenderName), m.Time.UTC().Format(stampLayout), m.Seq, escaper.Replace(m.Text))
	}
	out.WriteString("</messages>")
	return strings.ToValidUTF8(out.String(), "\uFFFD")
}

// where begins the context block: where the agent is, and when.
func where(out *strings.Builder, g berth.Group, assistant string, now time.Time) {
	fmt.Fprintf(out, `<context timezone="%s" time="%s" chat="%s" group="%s" main="%t" assistant="%s"`,
		escaper.Replace(now.Location().String()), now.Format(time.RFC3339), escaper.Replace(g.JID), g.Folder, g.IsMain(), escaper.Replace(assistant))
}

// taskPrompt renders a task for an agent: where it is, then the words of who made
// the task, which may do no more than the group itself.
func taskPrompt(g berth.Group, t berth.Task, assistant string, now time.Time) string {
	var out strings.Builder
	where(&out, g, assistant, now)
	fmt.Fprintf(&out, " task=\"%s\" />\n%s", escaper.Replace(t.ID), t.Prompt)
	return strings.ToValidUTF8(out.String(), "\uFFFD")
}

// excerpt returns the beginning of a text, as much as it takes to know it again.
func excerpt(text string) string {
	const most = 200
	if utf8.RuneCountInString(text) <= most {
		return text
	}
	return string([]rune(text)[:most]) + "…"
}

// Visible is protocol.Visible.
func Visible(text string) string { return protocol.Visible(text) }

// maxChunk is the longest text sent as one message, in characters.
const maxChunk = 3500

// Split cuts a text into pieces that a chat takes as one message each. A fenced
// code block that is cut is closed at the end of a piece and opened again in the
// next.
func Split(text string) []string {
	var out []string
	for _, p := range split(text, maxChunk) {
		out = append(out, p.text())
	}
	return out
}

// piece is a part of a text, between the lines that make its fences whole.
type piece struct{ open, body, end string }

func (p piece) text() string { return p.open + p.body + p.end }

// split cuts a text into pieces of at most limit characters.
func split(text string, limit int) []piece {
	var out []piece
	for s := (splitter{rest: strings.TrimSpace(text), limit: limit}); s.rest != ""; {
		if p := s.next(); strings.TrimSpace(p.body) != "" {
			out = append(out, p)
		}
	}
	return out
}

// splitter is what is left of a text that is being cut.
type splitter struct {
	rest  string
	limit int
	in    fence // that rest begins in
	mid   bool  // rest begins within a line
}

// cut is a place for a cut.
type cut struct {
	end, next int   // where the piece ends and where the next one begins
	size      int   // of the piece, in characters, without the line that closes the fence
	in        fence // that the cut is in
	mid       bool
}

// The kinds of place, the best first.
const (
	atParagraph = iota
	atFence
	atLine
	atWord
	anywhere
	kinds
)

func (s *splitter) next() piece {
	var p piece
	if s.in.mark != "" {
		p.open = s.in.line + "\n"
	}
	used := utf8.RuneCountInString(p.open)
	if used+utf8.RuneCountInString(s.rest) <= s.limit {
		p.body, s.rest = s.rest, ""
		return p
	}
	c := s.best(used)
	p.body = s.rest[:c.end]
	if c.in.mark != "" {
		p.end = "\n" + c.in.mark
	}
	s.rest, s.in, s.mid = s.rest[c.next:], c.in, c.mid
	if s.in.mark == "" && strings.TrimSpace(firstLine(s.rest)) == "" {
		next, _ := s.skip(0)
		s.rest, s.mid = s.rest[next:], false
	}
	return p
}

// best returns where to end a piece of which used characters are taken: the
// last place of the best kind. A cut in the first half of a piece is not worth
// its beauty, unless it spares a block of code.
func (s *splitter) best(used int) cut {
	var last [kinds]cut
	var latest, before cut // the latest place at a line's end; that before the block that in is
	block := 0             // where that begins
	in, size := s.in, used
	for at := 0; at < len(s.rest) && size <= s.limit; {
		line, _, _ := strings.Cut(s.rest[at:], "\n")
		bare := strings.TrimRightFunc(line, unicode.IsSpace)
		length := utf8.RuneCountInString(bare)
		was := in
		if at > 0 || !s.mid {
			in = in.after(line, s.limit)
		}
		switch {
		case was.mark == "" && in.mark != "":
			before, block = latest, at
		case was.mark != "" && in.mark == "" && size+length <= s.limit:
			before = cut{}
		}
		if in == was { // within a line that is no fence
			for kind, c := range s.within(at, line, size, in) {
				if c.end > 0 {
					last[kind] = c
				}
			}
		}
		stop := at + len(line)
		if c := (cut{end: at + len(bare), next: stop + 1, size: size + length, in: in}); stop < len(s.rest) && c.size+in.cost() <= s.limit {
			switch kind := atLine; {
			case in.mark != "" && was.mark == "": // would close the fence at once
			case in.mark != "":
				last[kind], latest = c, c
			case bare != "":
				if c.next, kind = s.skip(stop + 1); was.mark != "" || in.after(firstLine(s.rest[c.next:]), s.limit).mark != "" {
					kind = min(kind, atFence)
				}
				last[kind], latest = c, c
			}
		}
		size += utf8.RuneCountInString(line) + 1
		at = stop + 1
	}
	for kind, c := range last {
		if kind == atLine && before.end > 0 && s.fits(block) {
			return before
		}
		if c.end > 0 && c.size >= s.limit/2 && kind != anywhere {
			return c
		}
	}
	if last[anywhere].end > latest.end {
		return last[anywhere]
	}
	return latest
}

// within returns the last places between words and anywhere in the line at a
// place that a piece of a size reaches.
func (s *splitter) within(at int, line string, size int, in fence) (last [kinds]cut) {
	room := s.limit - in.cost()
	var gap cut
	begun := false // with more than white space
	for i, r := range line {
		blank := r == ' ' || r == '\t'
		here := cut{end: at + i, next: at + i, size: size, in: in, mid: true}
		switch {
		case blank && gap.end == 0 && begun && size <= room:
			gap = here
		case !blank && gap.end > 0:
			// What is no fence in the middle of a line could be one at its beginning.
			if gap.next = at + i; in.after(line[i:], s.limit) == in {
				last[atWord] = gap
			}
			gap = cut{}
		}
		if i > 0 && size <= room {
			last[anywhere] = here
		}
		if size > room && gap.end == 0 {
			break
		}
		begun = begun || !blank
		size++
	}
	return last
}

// skip returns where the text goes on after blank lines, and what kind of place
// that makes.
func (s *splitter) skip(at int) (next, kind int) {
	for kind = atLine; ; kind = atParagraph {
		line := firstLine(s.rest[at:])
		if strings.TrimSpace(line) != "" {
			return at, kind
		}
		at += len(line) + 1
	}
}

// fits reports whether the block of code that begins at a place is one piece.
func (s *splitter) fits(at int) bool {
	in, size := fence{}, 0
	for first := true; at < len(s.rest) && (first || in.mark != ""); first = false {
		line := firstLine(s.rest[at:])
		in = in.after(line, s.limit)
		if size += utf8.RuneCountInString(line); size > s.limit {
			return false
		}
		size++
		at += len(line) + 1
	}
	return true
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// fence is the beginning of a block of code; the zero fence is none.
type fence struct {
	line string // that opened it
	mark string // that closes it
}

// cost returns the characters that it takes to close the fence.
func (f fence) cost() int {
	if f.mark == "" {
		return 0
	}
	return len(f.mark) + 1
}

// after returns the fence that is open after a line. One that takes more than a
// quarter of a piece is text: it could not be closed and opened again.
func (f fence) after(line string, limit int) fence {
	bare := strings.TrimLeft(line, " \t")
	if len(bare) < 3 || bare[0] != '`' && bare[0] != '~' || len(line) > limit || utf8.RuneCountInString(line) > limit/4 {
		return f
	}
	line, bare = strings.TrimRightFunc(line, unicode.IsSpace), strings.TrimRightFunc(bare, unicode.IsSpace)
	info := strings.TrimLeft(bare, bare[:1])
	marks := bare[:len(bare)-len(info)]
	switch {
	case f.mark != "":
		if open := strings.TrimLeft(f.mark, " \t"); info == "" && strings.HasPrefix(marks, open) {
			return fence{}
		}
	case len(marks) >= 3 && (bare[0] == '~' || !strings.Contains(info, "`")):
		return fence{line: line, mark: line[:len(line)-len(info)]}
	}
	return f
}
