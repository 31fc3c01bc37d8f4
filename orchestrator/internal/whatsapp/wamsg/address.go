package wamsg

import (
	"strings"
	"unicode"

	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waid"
)

// Us is the account that Berth writes with.
type Us struct {
	waid.Person
	// Prefix is what Berth's own messages begin with when a person uses the same
	// account, such as "Andy: "; empty when the account is Berth's alone.
	Prefix string
}

// Addressed is a text and whom it is for.
type Addressed struct {
	Text    string // with the mentions made readable, at most berth.MaxText bytes
	Quote   string // what it answers, likewise
	Trigger bool   // begins with the trigger
	// Mentioned says that it mentions Berth's account, and Reply that it answers
	// one of Berth's messages. With a shared account a mention means the person,
	// and so does an answer to what the person wrote.
	Mentioned bool
	Reply     bool
}

// Wakes reports whether the text is for Berth, by any of the signs.
func (a Addressed) Wakes() bool { return a.Trigger || a.Mentioned || a.Reply }

// Address finds out whom a message is for. trigger is the group's, such as
// "@Andy"; the mention of an account that is Berth's alone reads as the trigger.
// name returns how somebody is called, or "" if it is not known, and may be nil.
// The edit of a message is read in its new form.
func (c Content) Address(us Us, trigger string, name func(types.JID) string) Addressed {
	if c.Kind == Edit && c.New != nil {
		return c.New.Address(us, trigger, name)
	}
	names := func(mentions []types.JID) (string, map[string]string) {
		out, ours := make(map[string]string, len(mentions)), ""
		for _, j := range mentions {
			called := ""
			if name != nil {
				called = strings.TrimLeft(oneLine(name(j), maxName), "@")
			}
			switch {
			case us.Is(j) && us.Prefix == "":
				ours = j.User
				called = strings.TrimPrefix(trigger, "@")
			case called == "" && j.Server == types.DefaultUserServer:
				called = "+" + j.User
			case called == "":
				called = j.User
			}
			out[j.User] = "@" + called
		}
		return ours, out
	}
	ours, known := names(c.Mentions)
	a := Addressed{Mentioned: ours != "", Text: cleanText(readable(c.Text, known))}
	a.Trigger = berth.Triggered(strings.TrimLeftFunc(a.Text, isBlank), trigger)
	if q := c.Quoted; q != nil {
		_, known := names(q.Mentions)
		a.Quote = readable(q.Text, known)
		a.Reply = us.Is(q.Sender) && strings.HasPrefix(q.typed, us.Prefix) && (q.Chat.IsEmpty() || waid.Served(q.Chat))
	}
	return a
}

// isBlank reports whether r at the beginning of a text is invisible: phones put
// marks of direction there.
func isBlank(r rune) bool { return unicode.IsSpace(r) || unicode.Is(unicode.Cf, r) }

// readable replaces "@" and the digits of an address by a name.
func readable(text string, names map[string]string) string {
	if len(names) == 0 {
		return text
	}
	var out strings.Builder
	for {
		i := strings.IndexByte(text, '@')
		if i < 0 || out.Len() > berth.MaxText { // names may be longer than digits
			out.WriteString(text)
			return out.String()
		}
		digits := text[i+1:]
		digits = digits[:len(digits)-len(strings.TrimLeft(digits, "0123456789"))]
		out.WriteString(text[:i])
		if called, ok := names[digits]; ok {
			out.WriteString(called)
		} else {
			out.WriteString("@" + digits)
		}
		text = text[i+1+len(digits):]
	}
}
