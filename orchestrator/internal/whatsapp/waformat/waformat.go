// Package waformat turns the Markdown of agents into the markup of WhatsApp, and
// that of people into Markdown.
//
// WhatsApp knows *bold*, _italic_, ~struck~, `code`, ```blocks```, and lines that
// begin with "> ", "- " or "1. ". A mark counts only if it touches the text that
// it holds, has no letter or digit on its other side, and is closed on the same
// line. What cannot be written that way, such as a bold half of a word, is
// written without marks: text always beats beauty. There is nothing like a
// heading, a table or a link, and no way to escape a mark: see joiner.
//
// The functions are pure and take any text, in time and memory of its order; what
// would take the parser more is written as it is.
package waformat

import (
	"fmt"
	"html"
	"slices"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	east "github.com/yuin/goldmark/extension/ast"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
	"github.com/yuin/goldmark/util"
)

// maxCells is the number of cells that the tables of a text may come to. The
// parser fills up rows, so that a wide header and many short rows would cost
// the square of the text's length.
const maxCells = 50_000

// maxMarks is the number of delimiters of emphasis and links that a text may
// have in a paragraph. The parser looks for the partner of each among all.
const maxMarks = 4_000

// maxNested is how many quotes and lists may begin in a line, one in the other:
// the parser looks at each of them for each.
const maxNested = 100

// maxDepth is the longest prefix of a line, in bytes: deeper quotes and lists are
// written no deeper.
const maxDepth = 16

var (
	// Raw HTML is text here, so nothing has to be told about it.
	plainParser = newParser(extension.Strikethrough, extension.TaskList, extension.Linkify)
	tableParser = newParser(extension.Strikethrough, extension.TaskList, extension.Linkify, extension.Table)
)

func newParser(extensions ...goldmark.Extender) parser.Parser {
	return goldmark.New(goldmark.WithExtensions(extensions...)).Parser()
}

// WhatsApp returns Markdown as WhatsApp shows it best. Plain text comes back as
// it was, but for blanks at the ends of lines and more than one empty line in a
// row. What is no UTF-8 is replaced, and zero bytes are dropped.
func WhatsApp(markdown string) string {
	source := clean(markdown)
	cells, marks, nested := size(source)
	if marks > maxMarks || nested > maxNested {
		return strings.Join(lines(source), "\n")
	}
	p := tableParser
	if cells > maxCells {
		p = plainParser
	}
	w := &writer{source: []byte(source)}
	w.blocks(p.Parse(text.NewReader(w.source)))
	return strings.Trim(w.out.String(), "\n")
}

func clean(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	return strings.NewReplacer("\r\n", "\n", "\r", "\n", "\x00", "").Replace(s)
}

// size returns how many cells the tables of a text could have at most, how many
// delimiters its largest paragraph, and how many quotes and lists a line.
func size(source string) (cells, marks, nested int) {
	columns, rows, here := 0, 0, 0
	for line := range strings.Lines(source) {
		rows++
		columns = max(columns, strings.Count(line, "|"))
		if strings.TrimSpace(line) == "" {
			here = 0
		}
		for _, c := range []byte(line) {
			switch c {
			case '*', '_', '~', '[', '!', '<', '`':
				here++
			}
		}
		marks = max(marks, here)
		begins := line[:len(line)-len(strings.TrimLeft(line, "> \t-*+.)0123456789"))]
		nested = max(nested, strings.Count(begins, ">")+len(strings.FieldsFunc(begins, isBlank)))
	}
	return columns * rows, marks, nested
}

func isBlank(r rune) bool { return r == ' ' || r == '\t' || r == '>' }

// lines returns a text without a reading of it: with nothing that WhatsApp would
// take for markup.
func lines(source string) []string {
	var out []string
	for line := range strings.SplitSeq(source, "\n") {
		var l runes
		l.add(line, literal)
		out = append(out, l.finish()...)
	}
	return out
}

// writer writes blocks, line by line.
type writer struct {
	source []byte
	out    strings.Builder
	first  string // before the next line
	rest   string // before the lines after it
	quoted int
	wrote  bool   // something, since an item began
	gap    bool   // an empty line comes before the next one
	behind string // the prefix of that
}

func (w *writer) line(s string) {
	prefix := w.first
	w.first = w.rest
	w.begin()
	w.out.WriteString(strings.TrimRight(prefix+s, " \t"))
	w.out.WriteByte('\n')
}

// begin comes before whatever is written.
func (w *writer) begin() {
	if w.gap {
		w.out.WriteString(strings.TrimRight(w.behind, " ") + "\n")
	}
	w.gap, w.wrote = false, true
}

// apart leaves a line empty before what comes next, if anything comes.
func (w *writer) apart() {
	if w.wrote && !w.gap {
		w.gap, w.behind = true, w.rest
	}
}

func (w *writer) lines(all []string) {
	for _, s := range all {
		w.line(s)
	}
}

// blocks writes the children of n, apart as in the source.
func (w *writer) blocks(n ast.Node) {
	for c := n.FirstChild(); c != nil; c = c.NextSibling() {
		_, isTable := c.(*east.Table) // the parser forgets what was before a table
		if c.PreviousSibling() != nil && (c.HasBlankPreviousLines() || isTable) {
			w.apart()
		}
		w.block(c)
	}
}

func (w *writer) block(n ast.Node) {
	switch n := n.(type) {
	case *ast.Heading:
		if n.HasChildren() {
			w.lines(w.styled(n, '*'))
		}
	case *ast.ThematicBreak:
		w.line("———")
	case *ast.FencedCodeBlock, *ast.CodeBlock:
		w.code(n)
	case *ast.HTMLBlock:
		s := string(n.Lines().Value(w.source))
		if n.HasClosure() {
			s += string(n.ClosureLine.Value(w.source))
		}
		w.lines(lines(strings.TrimRight(s, "\n")))
	case *ast.Blockquote:
		w.nested(n, "> ", "> ")
	case *ast.List:
		w.list(n)
	case *east.Table:
		w.table(n)
	default: // paragraphs, and the text of a tight item
		if n.FirstChild() != nil && n.FirstChild().Type() == ast.TypeInline {
			w.lines(w.styled(n, 0))
			return
		}
		w.blocks(n)
	}
}

// nested writes the children of n behind a prefix.
func (w *writer) nested(n ast.Node, first, rest string) {
	before := w.rest
	if len(w.rest)+len(rest) <= maxDepth {
		w.first += first
		w.rest += rest
	}
	if strings.HasPrefix(first, ">") {
		w.quoted++
		defer func() { w.quoted-- }()
	}
	w.wrote = false
	w.blocks(n)
	if !w.wrote {
		w.line("")
	}
	w.first, w.rest, w.wrote = before, before, true
}

func (w *writer) list(n *ast.List) {
	number := n.Start
	for item := n.FirstChild(); item != nil; item = item.NextSibling() {
		if item.PreviousSibling() != nil && item.HasBlankPreviousLines() {
			w.apart()
		}
		marker := "- "
		if n.IsOrdered() {
			marker = fmt.Sprintf("%d. ", number)
			number++
		}
		w.nested(item, marker, strings.Repeat(" ", len(marker)))
	}
}

func (w *writer) code(n ast.Node) {
	code := strings.Trim(string(n.Lines().Value(w.source)), "\n")
	switch {
	case strings.TrimSpace(code) == "":
		return
	case w.quoted > 0: // a block ends the quote: code by the line stays in it
		for line := range strings.SplitSeq(code, "\n") {
			var l runes
			l.code(line)
			w.lines(l.finish())
		}
		return
	}
	w.fenced(code)
}

// fenced writes a block of code: without a prefix, so that it can be copied, and
// without its language, which WhatsApp would show as the first line.
func (w *writer) fenced(code string) {
	if w.first != w.rest { // the marker of an item stands alone
		w.line("")
	}
	w.begin()
	w.out.WriteString(fence(code))
	w.out.WriteByte('\n')
}

// fence returns code as a block.
func fence(code string) string {
	code = strings.ReplaceAll(code, "```", "``"+joiner+"`")
	if strings.HasPrefix(code, "`") {
		code = "\n" + code
	}
	if strings.HasSuffix(code, "`") {
		code += "\n"
	}
	return "```" + code + "```"
}

// styled returns the inline text of n in lines, within a mark unless that is 0.
func (w *writer) styled(n ast.Node, mark rune) []string {
	var l runes
	if mark != 0 {
		l.open(mark)
	}
	w.inlines(&l, n)
	if mark != 0 {
		l.close(mark)
	}
	// A line can be nothing but blank code.
	return slices.DeleteFunc(l.finish(), func(s string) bool { return s == "" })
}

func (w *writer) inlines(l *runes, n ast.Node) {
	for c := n.FirstChild(); c != nil; c = c.NextSibling() {
		w.inline(l, c)
	}
}

func (w *writer) inline(l *runes, n ast.Node) {
	switch n := n.(type) {
	case *ast.Text:
		l.add(unescape(string(n.Value(w.source))), literal)
		if n.SoftLineBreak() || n.HardLineBreak() {
			l.add("\n", literal)
		}
	case *ast.String:
		l.add(string(n.Value), literal)
	case *ast.CodeSpan:
		var code strings.Builder
		for c := n.FirstChild(); c != nil; c = c.NextSibling() {
			if t, ok := c.(*ast.Text); ok {
				code.Write(t.Value(w.source))
			}
		}
		l.code(strings.ReplaceAll(code.String(), "\n", " "))
	case *ast.Emphasis:
		mark := '_'
		if n.Level == 2 {
			mark = '*'
		}
		w.within(l, n, mark)
	case *east.Strikethrough:
		w.within(l, n, '~')
	case *east.TaskCheckBox:
		if n.IsChecked {
			l.add("☑ ", literal)
		} else {
			l.add("☐ ", literal)
		}
	case *ast.Link:
		w.link(l, n, string(n.Destination))
	case *ast.Image:
		w.link(l, n, string(n.Destination))
	case *ast.AutoLink:
		l.add(string(n.Label(w.source)), exact)
	case *ast.RawHTML:
		tag := string(n.Segments.Value(w.source))
		switch strings.ToLower(strings.ReplaceAll(tag, " ", "")) {
		case "<br>", "<br/>":
			l.add("\n", literal)
		default:
			l.add(tag, literal)
		}
	default:
		w.inlines(l, n)
	}
}

func (w *writer) within(l *runes, n ast.Node, mark rune) {
	l.open(mark)
	w.inlines(l, n)
	l.close(mark)
}

// link writes "text (url)", and either alone if it says it all.
func (w *writer) link(l *runes, n ast.Node, url string) {
	url = unescape(url)
	said := strings.TrimSpace(w.words(n))
	bare := strings.TrimPrefix(strings.TrimPrefix(strings.TrimPrefix(url, "https://"), "http://"), "mailto:")
	switch {
	case url == "" || strings.HasPrefix(url, "#"):
		w.inlines(l, n)
	case said == "" || said == url:
		l.add(url, exact)
	case said == bare || said+"/" == bare:
		if strings.HasPrefix(url, "mailto:") {
			url = bare
		}
		l.add(url, exact)
	default:
		w.inlines(l, n)
		l.add(" (", literal)
		l.add(url, exact)
		l.add(")", literal)
	}
}

// words returns the inline text of n without any marks.
func (w *writer) words(n ast.Node) string {
	var l runes
	w.inlines(&l, n)
	var out strings.Builder
	for _, c := range l.all {
		if c.kind != opening && c.kind != closing {
			out.WriteRune(c.r)
		}
	}
	return out.String()
}

// unescape resolves the escapes and entities of Markdown in one pass: \&amp; is
// no entity, and &#92;* no escape.
func unescape(s string) string {
	if !strings.ContainsAny(s, `\&`) {
		return s
	}
	var out strings.Builder
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '\\' && i+1 < len(s) && util.IsPunct(s[i+1]):
			i++
			out.WriteByte(s[i])
		case s[i] == '&':
			const longest = 33 // of all entities, with & and ;
			end := strings.IndexByte(s[i:min(len(s), i+longest)], ';')
			if end < 0 {
				out.WriteByte('&')
				continue
			}
			out.WriteString(strings.ReplaceAll(html.UnescapeString(s[i:i+end+1]), "\x00", "\uFFFD"))
			i += end
		default:
			out.WriteByte(s[i])
		}
	}
	return out.String()
}
