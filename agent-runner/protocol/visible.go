package protocol

import "strings"

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
