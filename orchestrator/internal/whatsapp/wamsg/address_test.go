package wamsg

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waid"
)

var (
	ownLID = types.NewADJID("100000000000009", types.LIDDomain, 12)
	ownPN  = types.NewADJID("4915199999999", 0, 12)
	alone  = Us{Person: waid.NewPerson(ownLID, ownPN)}
	shared = Us{Person: waid.NewPerson(ownLID, ownPN), Prefix: "Andy: "}
)

func says(text string, mentioned ...string) *waE2E.Message {
	return &waE2E.Message{ExtendedTextMessage: &waE2E.ExtendedTextMessage{Text: &text, ContextInfo: &waE2E.ContextInfo{MentionedJID: mentioned}}}
}

func answers(text, who, quoted string) *waE2E.Message {
	m := says(text)
	m.ExtendedTextMessage.ContextInfo = &waE2E.ContextInfo{StanzaID: new("Q"), Participant: &who, QuotedMessage: typed(quoted)}
	return m
}

func TestAddress(t *testing.T) {
	names := func(j types.JID) string {
		switch j.User {
		case "100000000000002":
			return "@Bob\n\u202eB."
		case "100000000000009":
			return "Dad"
		}
		return ""
	}
	for _, c := range []struct {
		name  string
		us    Us
		m     *waE2E.Message
		want  Addressed
		wakes bool
	}{
		{"plain", alone, typed("hello"), Addressed{Text: "hello"}, false},
		{"trigger", alone, typed("@andy hello"), Addressed{Text: "@andy hello", Trigger: true}, true},
		{"trigger after marks of direction", alone, typed("\u200e\u2068@Andy\u2069 hello"), Addressed{Text: "\u200e\u2068@Andy\u2069 hello", Trigger: true}, true},
		{"longer name", alone, typed("@Andyextra"), Addressed{Text: "@Andyextra"}, false},
		{"caption", alone, &waE2E.Message{ImageMessage: &waE2E.ImageMessage{Caption: new("@Andy who?")}}, Addressed{Text: "@Andy who?", Trigger: true}, true},
		{"mention by LID", alone, says("hi @100000000000009 there", "100000000000009@lid"), Addressed{Text: "hi @Andy there", Mentioned: true}, true},
		{"mention by number", alone, says("@4915199999999 hi", "4915199999999@s.whatsapp.net"), Addressed{Text: "@Andy hi", Trigger: true, Mentioned: true}, true},
		{"mention of a device", alone, says("hi @100000000000009", "100000000000009:3@lid"), Addressed{Text: "hi @Andy", Mentioned: true}, true},
		{"digits without a mention", alone, typed("hi @100000000000009"), Addressed{Text: "hi @100000000000009"}, false},
		{"the number as a LID", alone, says("hi @4915199999999", "4915199999999@lid"), Addressed{Text: "hi @4915199999999"}, false},
		{"others", alone, says("@100000000000002 @100000000000003 @4915100000000 @1000 @", "100000000000002@lid", "100000000000003@lid", "4915100000000@s.whatsapp.net"), Addressed{Text: "@Bob B. @100000000000003 @+4915100000000 @1000 @"}, false},
		{"shared number", shared, says("hi @100000000000009", "100000000000009@lid"), Addressed{Text: "hi @Dad"}, false},
		{"answer by LID", alone, answers("why?", "100000000000009@lid", "Because."), Addressed{Text: "why?", Quote: "Because.", Reply: true}, true},
		{"answer by number", alone, answers("why?", "4915199999999:2@s.whatsapp.net", "Because."), Addressed{Text: "why?", Quote: "Because.", Reply: true}, true},
		{"answer to another", alone, answers("why?", "100000000000002@lid", "Andy: Because."), Addressed{Text: "why?", Quote: "Andy: Because."}, false},
		{"answer on a shared number", shared, answers("why?", "100000000000009@lid", "Andy: Because."), Addressed{Text: "why?", Quote: "Andy: Because.", Reply: true}, true},
		{"answer to the person", shared, answers("why?", "100000000000009@lid", "Because."), Addressed{Text: "why?", Quote: "Because."}, false},
		{"answer without a sender", alone, answers("why?", "", "Because."), Addressed{Text: "why?", Quote: "Because."}, false},
	} {
		got := Read(c.m).Address(c.us, "@Andy", names)
		if got != c.want || got.Wakes() != c.wakes {
			t.Errorf("%s: got %+v, want %+v; wakes: %v", c.name, got, c.want, got.Wakes())
		}
	}
	if a := Read(answers("x", "100000000000009@lid", "y")); a.Quoted == nil {
		t.Fatal("no quote")
	} else if a.Quoted.Chat = types.StatusBroadcastJID; a.Address(alone, "@Andy", nil).Reply {
		t.Error("an answer to a status update is taken for one in the chat")
	}
	if a := Read(answers("x", "100000000000002@lid", "@100000000000009")); a.Address(alone, "@Andy", nil).Mentioned {
		t.Error("a mention in the quoted text counts")
	}
	if got := Read(says("hi @100000000000009", "100000000000009@lid")).Address(alone, "Claw", nil); got.Text != "hi @Claw" || !got.Wakes() {
		t.Errorf("trigger without @: got %+v", got)
	}
	if got := Read(typed("@Andy")).Address(Us{}, "", nil); got.Wakes() {
		t.Errorf("nobody is addressed: got %+v", got)
	}
}

// Replacing is one walk, and a name that is longer than its digits cannot make a
// text that the store refuses.
func TestAddressOfManyMentions(t *testing.T) {
	var mentions []string
	for i := range 1000 {
		mentions = append(mentions, fmt.Sprintf("%d@lid", i))
	}
	mentions = append(mentions, "100000000000009@lid")
	c := Read(says(strings.Repeat("@1 ", 21_000)+"@100000000000009", mentions...))
	a := c.Address(alone, "@Andy", func(types.JID) string { return strings.Repeat("ы", 1000) })
	if !a.Mentioned {
		t.Error("the last of 1 001 mentions is not seen")
	}
	if err := berth.ValidText(a.Text); err != nil {
		t.Error(err)
	}
	if !strings.HasPrefix(a.Text, "@"+strings.Repeat("ы", 63)+"… @") {
		t.Errorf("got %.200q", a.Text)
	}
	var all strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&all, "@%d ", i)
	}
	asked := 0
	a = Read(says(all.String(), mentions...)).Address(alone, "@Andy", func(types.JID) string { asked++; return "Bob" })
	if asked != maxNamed || !strings.Contains(a.Text, "@Bob @100 ") {
		t.Errorf("asked for %d names: %.700q", asked, a.Text)
	}
}

func FuzzAddress(f *testing.F) {
	f.Add("@Andy hi @100000000000009", "100000000000009@lid", "Andy: x", "Bob")
	f.Add("\u2068@1\u2069@1@", "1@lid", "", "@\n")
	f.Add("@", "4915199999999@s.whatsapp.net", "@4915199999999", strings.Repeat("x", 100))
	f.Fuzz(func(t *testing.T, text, mention, quoted, name string) {
		m := answers(text, mention, quoted)
		m.ExtendedTextMessage.ContextInfo.MentionedJID = []string{mention, mention}
		c := Read(m)
		for _, us := range []Us{alone, shared} {
			a := c.Address(us, "@Andy", func(types.JID) string { return name })
			if !clean(a.Text) || len(a.Text) > berth.MaxText || !utf8.ValidString(a.Quote) {
				t.Errorf("got %+v", a)
			}
			if a.Mentioned != (c.Kind == Text && us.Prefix == "" && us.Is(address(mention))) {
				t.Errorf("%q mentioned: %v", mention, a.Mentioned)
			}
			if a.Reply && !us.Is(address(mention)) {
				t.Errorf("%q answered: %v", mention, a.Reply)
			}
			if !strings.Contains(c.Text, "@") && a.Text != c.Text {
				t.Errorf("%q became %q", c.Text, a.Text)
			}
		}
	})
}
