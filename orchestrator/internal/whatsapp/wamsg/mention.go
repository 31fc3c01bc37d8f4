package wamsg

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"go.mau.fi/whatsmeow/types"
)

// Member is somebody in a group who can be mentioned there.
type Member struct {
	Address types.JID // as the group addresses its members
	Digits  []string  // of all known addresses
	Names   []string  // as far as they are known; chosen by strangers
}

// Mention makes real mentions of "@" and the digits or the name of a member, in
// any case, and returns whom the text mentions then, each once. A name that is
// not one member's alone is left as it is, and so is all code. The longest name
// counts. text is in WhatsApp's form.
func Mention(text string, members []Member) (string, []types.JID) {
	if !strings.Contains(text, "@") || len(members) == 0 {
		return text, nil
	}
	named := directory(members)
	var out strings.Builder
	var all []types.JID
	seen := make(map[types.JID]bool)
	mention := func(s string) {
		for {
			i := strings.IndexByte(s, '@')
			if i < 0 {
				out.WriteString(s)
				return
			}
			out.WriteString(s[:i])
			who, length := named.find(s[i+1:])
			before, _ := utf8.DecodeLastRuneInString(s[:i])
			if i == 0 { // of a piece: what is before it is code
				before = ' '
			}
			s = s[i+1:]
			out.WriteByte('@')
			if length == 0 || isPartOfWord(before) || strings.ContainsRune(".-+/@", before) {
				continue
			}
			out.WriteString(who.User)
			s = s[length:]
			if !seen[who] {
				seen[who] = true
				all = append(all, who)
			}
		}
	}
	for text != "" {
		before, code, rest := cutCode(text)
		mention(before)
		out.WriteString(code)
		text = rest
	}
	return out.String(), all
}

// cutCode cuts text at the first code in it: a block, or a piece of a line.
func cutCode(text string) (before, code, rest string) {
	for at := 0; ; {
		i := strings.IndexByte(text[at:], '`')
		if i < 0 {
			return text, "", ""
		}
		at += i
		mark, inside := "`", text[at+1:]
		if strings.HasPrefix(text[at:], "```") {
			mark, inside = "```", text[at+3:]
		} else if line, _, ok := strings.Cut(inside, "\n"); ok {
			inside = line
		}
		if end := strings.Index(inside, mark); end > 0 {
			end += at + 2*len(mark)
			return text[:at], text[at:end], text[end:]
		}
		at += len(mark)
	}
}

// book finds members by what they are called.
type book struct {
	by      map[string]types.JID // zero: several
	longest int                  // name, in characters
}

func directory(members []Member) book {
	b := book{by: make(map[string]types.JID)}
	add := func(name string, who types.JID) {
		if name == "" {
			return
		}
		b.longest = max(b.longest, utf8.RuneCountInString(name))
		name = fold(name)
		if other, ok := b.by[name]; ok && other != who {
			who = types.JID{}
		}
		b.by[name] = who
	}
	for _, m := range members {
		for _, digits := range m.Digits {
			add(digits, m.Address)
			add("+"+digits, m.Address)
		}
		for _, name := range m.Names {
			add(strings.TrimLeft(oneLine(name, maxName), "@"), m.Address)
		}
	}
	return b
}

// find returns whom the beginning of s names, and how many bytes that takes.
func (b book) find(s string) (who types.JID, length int) {
	runes := 0
	for i, r := range s {
		if runes > b.longest {
			break
		}
		if runes > 0 && isEnd(r, s[i:]) {
			if found, ok := b.by[fold(s[:i])]; ok {
				who, length = found, i
			}
		}
		runes++
	}
	if runes <= b.longest {
		if found, ok := b.by[fold(s)]; ok {
			who, length = found, len(s)
		}
	}
	if who.IsEmpty() {
		length = 0
	}
	return who, length
}

// isEnd reports whether a name can end before rest, which begins with r: it does
// not in "Ann-Marie", "ann.example" and "ann@example".
func isEnd(r rune, rest string) bool {
	switch r {
	case '@':
		return false
	case '-', '.':
		next, _ := utf8.DecodeRuneInString(rest[1:])
		return !isPartOfWord(next)
	}
	return !isPartOfWord(r)
}

func fold(s string) string { return strings.ToLower(strings.ToUpper(s)) }

func isPartOfWord(r rune) bool {
	return unicode.IsLetter(r) || unicode.IsDigit(r) || unicode.IsMark(r) || r == '_'
}
