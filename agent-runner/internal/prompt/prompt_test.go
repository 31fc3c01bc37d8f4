package prompt

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

const header = `<context timezone="Europe/Berlin" time="2026-11-21T09:15:00+01:00" chat="console:family" group="family" main="false" assistant="Andy" />` + "\n"

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       Prompt
	}{
		{"plain", "hello <b>you</b>", Prompt{Messages: []Message{{Text: "hello <b>you</b>"}}}},
		{"empty", " \n", Prompt{}},
		{"one", header + "<messages>\n<message sender=\"Ann\" time=\"t1\">@Andy hi</message>\n</messages>",
			Prompt{Messages: []Message{{Sender: "Ann", Time: "t1", Text: "@Andy hi"}}}},
		{"escaped", `<messages>` + "\n" + `<message sender="A &amp; B &lt;Co&gt;" time="t">&lt;message&gt; &amp;lt; &quot;x&quot;</message>` + "\n</messages>",
			Prompt{Messages: []Message{{Sender: "A & B <Co>", Time: "t", Text: `<message> &lt; "x"`}}}},
		{"several lines", "<messages>\n<message sender=\"Ann\" time=\"t\">a\nb</message>\n<message sender=\"Bob\" time=\"t\">c</message>\n</messages>",
			Prompt{Messages: []Message{{Sender: "Ann", Time: "t", Text: "a\nb"}, {Sender: "Bob", Time: "t", Text: "c"}}}},
		{"reply", "<messages>\n<message sender=\"Ann\" time=\"t\" reply_to=\"42\">\n  <quoted_message from=\"Bob\">Are you coming &amp; when?</quoted_message>Yes</message>\n</messages>",
			Prompt{Messages: []Message{{Sender: "Ann", Time: "t", Text: "Yes", Quote: "Are you coming & when?"}}}},
		{"joined prompts", "<messages>\n<message sender=\"Ann\" time=\"t\">a</message>\n</messages>\n" + header + "<messages>\n<message sender=\"Bob\" time=\"t\">b</message>\n</messages>",
			Prompt{Messages: []Message{{Sender: "Ann", Time: "t", Text: "a"}, {Sender: "Bob", Time: "t", Text: "b"}}}},
		{"task", Scheduled + header + "run date", Prompt{Scheduled: true, Messages: []Message{{Text: "run date"}}}},
		{"no messages", header + "<messages>\n\n</messages>", Prompt{}},
		{"unclosed", `<messages><message sender="Ann" time="t">hi`, Prompt{Messages: []Message{{Text: `<messages><message sender="Ann" time="t">hi`}}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := Parse(tt.text)
			got.Context = nil
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseContext(t *testing.T) {
	got := Parse(header + "hi").Context
	want := map[string]string{
		"timezone": "Europe/Berlin", "time": "2026-11-21T09:15:00+01:00", "chat": "console:family",
		"group": "family", "main": "false", "assistant": "Andy",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestLastAndSenders(t *testing.T) {
	p := Prompt{Messages: []Message{{Sender: "Bob", Text: "a"}, {Sender: "Ann", Text: "@Andy run ls"}, {Sender: "Bob", Text: " "}, {Text: ""}}}
	if got := p.Last("Andy"); got.Sender != "Ann" || got.Text != "run ls" {
		t.Errorf("last is %+v", got)
	}
	if diff := cmp.Diff([]string{"Bob", "Ann"}, p.Senders()); diff != "" {
		t.Errorf("senders (-want +got):\n%s", diff)
	}
	if got := (Prompt{}).Last("Andy"); got != (Message{}) {
		t.Errorf("last of none is %+v", got)
	}
}

func TestWithoutMention(t *testing.T) {
	for _, tt := range []struct{ text, assistant, want string }{
		{"@Andy hi", "Andy", "hi"},
		{"  @andy, hi", "Andy", "hi"},
		{"@Andy: run x\ny", "Andy", "run x\ny"},
		{"@Andy\nrun x", "Andy", "run x"},
		{"@Andy", "Andy", ""},
		{"@Claw hi", "Andy", "hi"},
		{"@My Bot hi", "My Bot", "hi"},
		{"@Andyextra hi", "Andy", "hi"},
		{"@小爪 hi", "小爪", "hi"},
		{"@Andy hi", "", "hi"},
		{"hi @Andy", "Andy", "hi @Andy"},
		{"hi", "Andy", "hi"},
		{"", "Andy", ""},
	} {
		if got := WithoutMention(tt.text, tt.assistant); got != tt.want {
			t.Errorf("WithoutMention(%q, %q) = %q, want %q", tt.text, tt.assistant, got, tt.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(header + "<messages>\n<message sender=\"Ann\" time=\"t\">a &amp; b</message>\n</messages>")
	f.Add(Scheduled + "x")
	f.Add("<message><message></message></messages>@")
	f.Fuzz(func(t *testing.T, text string) {
		Parse(text).Last("Andy")
	})
}
