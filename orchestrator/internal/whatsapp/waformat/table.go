package waformat

import (
	"strings"
	"unicode"

	"github.com/yuin/goldmark/ast"
	east "github.com/yuin/goldmark/extension/ast"
	"golang.org/x/text/width"
)

const (
	// maxWidth is the widest table that is drawn, in columns: what a phone shows
	// of a line of code without breaking it.
	maxWidth = 32
	// maxLabel is the longest header that is repeated for each row, in characters,
	// and maxLabels what all the repetitions together may have.
	maxLabel  = 40
	maxLabels = 16_000
)

// table draws a narrow table as a block of code, and writes a wide one with one
// line a cell, named by its header.
func (w *writer) table(n *east.Table) {
	var rows [][]string
	for row := n.FirstChild(); row != nil; row = row.NextSibling() {
		var cells []string
		for cell := row.FirstChild(); cell != nil; cell = cell.NextSibling() {
			cells = append(cells, strings.Join(strings.Fields(w.words(cell)), " "))
		}
		rows = append(rows, cells)
	}
	widths := make([]int, len(rows[0]))
	total := 2 * (len(widths) - 1)
	for i := range widths {
		for _, row := range rows {
			if i < len(row) {
				widths[i] = max(widths[i], columns(row[i]))
			}
		}
		total += widths[i]
	}
	switch {
	case total <= maxWidth && w.quoted == 0:
		w.draw(rows, widths, n.Alignments)
	case len(rows) == 1:
		w.line(w.bold(strings.Join(rows[0], ", ")))
	default:
		w.cells(n, rows[0])
	}
}

func (w *writer) draw(rows [][]string, widths []int, align []east.Alignment) {
	var out strings.Builder
	write := func(row []string) {
		var line strings.Builder
		for i, width := range widths {
			cell := ""
			if i < len(row) {
				cell = row[i]
			}
			pad := strings.Repeat(" ", width-columns(cell))
			if i > 0 {
				line.WriteString("  ")
			}
			if i < len(align) && align[i] == east.AlignRight {
				cell, pad = pad, cell
			}
			line.WriteString(cell + pad)
		}
		out.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	for i, row := range rows {
		write(row)
		if i > 0 {
			continue
		}
		rules := make([]string, len(widths))
		for i, width := range widths {
			rules[i] = strings.Repeat("-", width)
		}
		write(rules)
	}
	w.fenced(strings.TrimRight(out.String(), "\n"))
}

// cells writes the rows of a table, each as lines.
func (w *writer) cells(n ast.Node, header []string) {
	labels := 0
	for i := range header {
		header[i] = cut(header[i], maxLabel)
		labels += len(header[i]) * (n.ChildCount() - 1)
	}
	if labels > maxLabels {
		clear(header)
	}
	for row := n.FirstChild().NextSibling(); row != nil; row = row.NextSibling() {
		if row.PreviousSibling() != n.FirstChild() {
			w.apart()
		}
		i := 0 // the parser gives each row as many cells as the header
		for cell := row.FirstChild(); cell != nil; cell = cell.NextSibling() {
			label := header[i]
			i++
			if cell.FirstChild() == nil {
				continue
			}
			var l runes
			if label != "" {
				l.open('*')
				l.add(label+":", literal)
				l.close('*')
				l.add(" ", literal)
			}
			before := len(l.all)
			w.inlines(&l, cell)
			for k := range l.all[before:] {
				if l.all[before+k].r == '\n' {
					l.all[before+k].r = ' '
				}
			}
			w.lines(l.finish())
		}
	}
}

func (w *writer) bold(s string) string {
	var l runes
	l.open('*')
	l.add(s, literal)
	l.close('*')
	return strings.Join(l.finish(), " ")
}

func cut(s string, most int) string {
	r := []rune(s)
	if len(r) <= most {
		return s
	}
	return strings.TrimSpace(string(r[:most-1])) + "…"
}

// columns returns how wide s is in a monospaced font.
func columns(s string) int {
	n := 0
	for _, r := range s {
		switch k := width.LookupRune(r).Kind(); {
		case unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf):
		case k == width.EastAsianWide || k == width.EastAsianFullwidth:
			n += 2
		default:
			n++
		}
	}
	return n
}
