package waformat

import (
	"slices"
	"strings"
	"unicode"
)

// joiner goes before a character that WhatsApp would take for a mark. WhatsApp
// has no escape; but a mark begins something only after a blank, another mark or
// punctuation, and this is none of them. Of the invisible characters it is the
// one that changes nothing else: a zero-width space lets the line break, and
// counts as a blank for some; zero-width joiners change emoji and Arabic letters.
// It is put only where a mark would find its partner, since whoever copies the
// text copies it, too.
const joiner = "\u2060"

// kind is what a rune is there for.
type kind uint8

const (
	literal kind = iota // text: must not become markup
	exact               // an address: nothing may be put into it
	code                // between ` and `
	opening             // a mark of ours
	closing
	dropped // a mark that cannot stand there
)

type char struct {
	r    rune
	kind kind
}

func (c char) isMark() bool { return c.kind == opening || c.kind == closing }

const marks = "*_~`"

// runes is inline text under construction.
type runes struct {
	all    []char
	active []rune       // the marks that are open, outermost first
	depth  ['~' + 1]int // by mark: how often it was opened
}

func (l *runes) add(s string, k kind) {
	for _, r := range s {
		if r != '\n' {
			l.all = append(l.all, char{r, k})
			continue
		}
		// No mark reaches across a line.
		for _, mark := range slices.Backward(l.active) {
			l.all = append(l.all, char{mark, closing})
		}
		l.all = append(l.all, char{'\n', literal})
		for _, mark := range l.active {
			l.all = append(l.all, char{mark, opening})
		}
	}
}

// open begins a mark; within itself it means nothing.
func (l *runes) open(mark rune) {
	if l.depth[mark]++; l.depth[mark] == 1 {
		l.active = append(l.active, mark)
		l.all = append(l.all, char{mark, opening})
	}
}

// close ends the mark that was opened last.
func (l *runes) close(mark rune) {
	if l.depth[mark]--; l.depth[mark] == 0 {
		l.active = l.active[:len(l.active)-1]
		l.all = append(l.all, char{mark, closing})
	}
}

func (l *runes) code(s string) {
	switch {
	case strings.TrimSpace(s) == "":
		l.add(s, literal)
	case strings.Contains(s, "`"):
		l.add(fence(strings.TrimSpace(s)), exact)
	default:
		l.all = append(l.all, char{'`', opening})
		l.add(s, code)
		l.all = append(l.all, char{'`', closing})
	}
}

// finish returns the text in lines.
func (l *runes) finish() []string {
	var out []string
	for rest, more := l.all, true; more; {
		line := rest
		i := slices.Index(rest, char{'\n', literal})
		if more = i >= 0; more {
			line, rest = rest[:i], rest[i+1:]
		}
		out = append(out, finish(line))
	}
	return out
}

// finish writes a line: it drops the marks that WhatsApp would not take for
// marks there, and keeps it from taking anything else for one.
func finish(line []char) string {
	judge(line)
	line = slices.DeleteFunc(line, func(c char) bool { return c.kind == dropped })
	var last ['~' + 1]int // by mark: the last place where it could end something
	for i, c := range line {
		if c.kind != code && isMark(c.r) && i > 0 && touches(c.r, line[i-1].r) && (i+1 == len(line) || !isWord(line[i+1].r)) {
			last[c.r] = i
		}
	}
	var out strings.Builder
	for i, c := range line {
		next, before := ' ', ' '
		if i+1 < len(line) {
			next = line[i+1].r
		}
		if i > 0 {
			before = line[i-1].r
		}
		switch {
		case c.kind != literal:
		case isMark(c.r) && touches(c.r, next) && isBorder(before) && (last[c.r] > i+1 || next == '`' && last[c.r] > i),
			c.r == '`' && before == '`',
			i == 0 && i+1 < len(line) && next == ' ' && strings.ContainsRune(">-*", c.r):
			out.WriteString(joiner)
		}
		out.WriteRune(c.r)
	}
	return strings.TrimRight(out.String(), " \t")
}

// judge drops the pairs of marks in a line that WhatsApp would show.
func judge(line []char) {
	const border = ' '
	before, after := make([]rune, len(line)), make([]rune, len(line)) // the nearest that is no mark
	seen := border
	for i, c := range line {
		if before[i] = seen; !c.isMark() {
			seen = c.r
		}
	}
	seen = border
	for i, c := range slices.Backward(line) {
		if after[i] = seen; !c.isMark() {
			seen = c.r
		}
	}
	var count ['~' + 1]int // by mark: how many in the text so far
	type begun struct{ at, count int }
	var open []begun
	for j, c := range line {
		switch {
		case c.kind == opening:
			open = append(open, begun{j, count[c.r]})
		case c.kind == closing:
			o := open[len(open)-1]
			open = open[:len(open)-1]
			if isBorder(before[o.at]) && !isWord(after[j]) && !unicode.IsSpace(after[o.at]) && !unicode.IsSpace(before[j]) &&
				count[c.r] == o.count && hasText(line[o.at:j]) {
				continue
			}
			line[o.at].kind, line[j].kind = dropped, dropped
			for i := o.at; c.r == '`' && i < j; i++ {
				if line[i].kind == code {
					line[i].kind = literal
				}
			}
		case isMark(c.r):
			count[c.r]++
		}
	}
}

func hasText(line []char) bool {
	return slices.ContainsFunc(line, func(c char) bool { return c.kind <= code })
}

// touches reports whether a mark could belong to what r begins or ends. Whether
// code may be blank is not known.
func touches(mark, r rune) bool { return mark == '`' || !unicode.IsSpace(r) }

func isMark(r rune) bool { return strings.ContainsRune(marks, r) }

func isWord(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) || unicode.IsMark(r) }

// isBorder reports whether a mark may begin something after r. In addresses,
// paths and formulas it does not.
func isBorder(r rune) bool {
	return !isWord(r) && !strings.ContainsRune(`/\.:=&#%@+$|`+joiner, r)
}
