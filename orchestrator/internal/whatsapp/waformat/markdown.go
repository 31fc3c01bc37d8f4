package waformat

import (
	"strings"
	"unicode"
)

// Markdown returns the text of a WhatsApp message as Markdown: what a person
// sees bold or struck out is so there. What only looks like markup of Markdown
// stays as it was typed, since an agent reads it best that way.
func Markdown(text string) string {
	text = clean(text)
	for _, mark := range marks + ">-" {
		text = strings.ReplaceAll(text, joiner+string(mark), string(mark))
	}
	var out strings.Builder
	for {
		before, block, rest := cutBlock(text)
		for i, line := range strings.Split(before, "\n") {
			if i > 0 {
				out.WriteByte('\n')
			}
			out.WriteString(markdownLine(line))
		}
		if block == "" {
			return out.String()
		}
		if strings.Contains(block, "\n") {
			// Markdown wants the fences on lines of their own.
			if before != "" && !strings.HasSuffix(before, "\n") {
				out.WriteByte('\n')
			}
			out.WriteString("```\n" + strings.Trim(block, "\n") + "\n```")
			if rest != "" && !strings.HasPrefix(rest, "\n") {
				out.WriteByte('\n')
			}
		} else {
			out.WriteString("```" + block + "```")
		}
		text = rest
	}
}

// cutBlock cuts text at its first block of code.
func cutBlock(text string) (before, block, rest string) {
	const fence = "```"
	before, tail, ok := strings.Cut(text, fence)
	if !ok {
		return text, "", ""
	}
	block, rest, ok = strings.Cut(tail, fence)
	if !ok || strings.TrimSpace(block) == "" {
		return text, "", ""
	}
	return before, block, rest
}

// markdownLine doubles the marks of a line that stand for bold and struck out.
func markdownLine(s string) string {
	line := []rune(s)
	// next[i] is the nearest place from i on where the mark at i could end; it is
	// looked for from the end, so that a line of marks only takes no longer.
	next := make([]int, len(line))
	var nearest ['~' + 1]int
	for i := len(line) - 1; i >= 0; i-- {
		r := line[i]
		if !isMark(r) {
			continue
		}
		next[i] = nearest[r]
		if i > 0 && !unicode.IsSpace(line[i-1]) && (i+1 == len(line) || !isWord(line[i+1])) {
			nearest[r] = i
		}
	}
	double := make([]bool, len(line))
	var end ['~' + 1]int // by mark: where the pair ends that was found last
	for i := 0; i < len(line); i++ {
		r := line[i]
		if !isMark(r) || i < end[r] || double[i] || i > 0 && !isBorder(line[i-1]) || i+1 < len(line) && unicode.IsSpace(line[i+1]) || next[i] <= i+1 {
			continue
		}
		end[r] = next[i]
		switch r {
		case '`':
			i = next[i]
		case '*', '~':
			double[i], double[next[i]] = true, true
		}
	}
	var out strings.Builder
	for i, r := range line {
		out.WriteRune(r)
		if double[i] {
			out.WriteRune(r)
		}
	}
	return out.String()
}
