package wamsg

import (
	"strings"
	"unicode"

	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waid"
)

// maxNamed is how many people in a message are called by name: name is asked
// where everybody waits for the message.
const maxNamed = 100

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
	asked := 0
	names := func(mentions []types.JID) (ours bool, called func(digits string) (string, bool)) {
		by, known := make(map[string]types.JID, len(mentions)), make(map[string]string)
		for _, j := range mentions {
			by[j.User] = j
			ours = ours || us.Is(j) && us.Prefix == ""
		}
		return ours, func(digits string) (string, bool) {
			j, ok := by[digits]
			if text, again := known[digits]; again || !ok {
				return text, again
			}
			called := ""
			switch {
			case us.Is(j) && us.Prefix == "":
				called = strings.TrimPrefix(trigger, "@")
			case name != nil && asked < maxNamed:
				asked++
				called = strings.TrimLeft(oneLine(name(j), maxName), "@")
			}
			switch {
			case called != "":
			case j.Server == types.DefaultUserServer:
				called = "+" + j.User
			default:
				called = j.User
			}
			known[digits] = "@" + called
			return known[digits], true
		}
	}
	ours, known := names(c.Mentions)
	a := Addressed{Mentioned: ours, Text: cleanText(readable(c.Text, known))}
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
func readable(text string, called func(digits string) (string, bool)) string {
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
		if name, ok := called(digits); ok {
			out.WriteString(name)
		} else {
			out.WriteString("@" + digits)
		}
		text = text[i+1+len(digits):]
	}
}
