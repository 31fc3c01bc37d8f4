package turn

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"berth/orchestrator/internal/berth"
)

var escaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;")

const stampLayout = "2006-01-02T15:04:05.000Z"

// prompt renders a batch for an agent: where it is, then what was said.
func prompt(g berth.Group, b berth.Batch, assistant string, now time.Time) string {
	var out strings.Builder
	fmt.Fprintf(&out, `<context timezone="%s" time="%s" chat="%s" group="%s" main="%t" assistant="%s"`,
		escaper.Replace(now.Location().String()), now.Format(time.RFC3339), escaper.Replace(g.JID), g.Folder, g.IsMain(), escaper.Replace(assistant))
	if b.Omitted > 0 {
		out.WriteString(` omitted="` + strconv.Itoa(b.Omitted) + ` older messages omitted"`)
	}
	out.WriteString(" />\n<messages>\n")
	for _, m := range b.Messages {
		fmt.Fprintf(&out, "<message sender=\"%s\" time=\"%s\">%s</message>\n",
			escaper.Replace(m.SenderName), m.Time.UTC().Format(stampLayout), escaper.Replace(m.Text))
	}
	out.WriteString("</messages>")
	return strings.ToValidUTF8(out.String(), "\uFFFD")
}

// Visible removes what an agent keeps to itself: <internal> blocks, also nested
// ones; one that is never closed hides the rest.
func Visible(text string) string {
	const open, end = "<internal>", "</internal>"
	var out strings.Builder
	for depth := 0; text != ""; {
		i, j := strings.Index(text, open), strings.Index(text, end)
		switch {
		case i >= 0 && (j < 0 || i < j):
			if depth == 0 {
				out.WriteString(text[:i])
			}
			depth++
			text = text[i+len(open):]
		case j >= 0 && depth > 0:
			depth--
			text = text[j+len(end):]
		case j >= 0: // closes nothing
			out.WriteString(text[:j])
			text = text[j+len(end):]
		default:
			if depth == 0 {
				out.WriteString(text)
			}
			text = ""
		}
	}
	return strings.TrimSpace(out.String())
}

// maxChunk is the longest text sent as one message, in characters.
const maxChunk = 3500

// Split cuts a text into pieces that a chat takes as one message each.
func Split(text string) []string { return split(text, maxChunk) }

// split cuts a text into pieces of at most limit characters: between paragraphs, else
// lines, else words, else anywhere. A cut in the first half of
// a piece is not worth its beauty.
func split(text string, limit int) []string {
	var out []string
	for text = strings.TrimSpace(text); text != ""; {
		size := prefix(text, limit)
		if size < len(text) {
			for _, at := range []string{"\n\n", "\n", " "} {
				if i := strings.LastIndex(text[:size], at); i >= size/2 {
					size = i
					break
				}
			}
		}
		if piece := strings.TrimSpace(text[:size]); piece != "" {
			out = append(out, piece)
		}
		text = strings.TrimSpace(text[size:])
	}
	return out
}

// prefix returns the length in bytes of the first limit characters of text.
func prefix(text string, limit int) int {
	size := 0
	for range limit {
		if size == len(text) {
			break
		}
		_, n := utf8.DecodeRuneInString(text[size:])
		size += n
	}
	return size
}
