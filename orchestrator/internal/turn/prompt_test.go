package turn

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"berth/orchestrator/internal/berth"
)

func TestPrompt(t *testing.T) {
	zone, err := time.LoadLocation("America/New_York")
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2024, 1, 1, 18, 30, 0, 0, time.UTC)
	g := berth.Group{JID: `a"b@g.us`, Folder: "main"}
	b := berth.Batch{Omitted: 3, Messages: []berth.Message{
		{SenderName: "A & B <Co>", Text: `<script>alert("xss")</script>`, Time: at},
		{SenderName: "Bob", Text: "</message>\n</messages>", Time: at},
	}}
	got := prompt(g, b, "Andy", at.In(zone))
	want := `<context timezone="America/New_York" time="2024-01-01T13:30:00-05:00" chat="a&quot;b@g.us" group="main" main="true" assistant="Andy" omitted="3 older messages omitted" />
<messages>
<message sender="A &amp; B &lt;Co&gt;" time="2024-01-01T18:30:00.000Z">&lt;script&gt;alert(&quot;xss&quot;)&lt;/script&gt;</message>
<message sender="Bob" time="2024-01-01T18:30:00.000Z">&lt;/message&gt;
&lt;/messages&gt;</message>
</messages>`
	equal(t, "FM-08 to FM-11, FM-17", got, want)
}

func TestVisible(t *testing.T) {
	for _, c := range []struct{ id, in, want string }{
		{"FM-28", "hello <internal>secret</internal> world", "hello  world"},
		{"FM-29", "hello <internal>\nsecret\nstuff\n</internal> world", "hello  world"},
		{"FM-30", "<internal>a</internal>hello<internal>b</internal>", "hello"},
		{"FM-31", "<internal>only this</internal>", ""},
		{"FM-32", "hello world", "hello world"},
		{"FM-34", "<internal>thinking</internal>The answer is 42", "The answer is 42"},
		{"W61 unclosed", "a<internal>secret", "a"},
		{"W61 nested", "a<internal>b<internal>c</internal>d</internal>e", "ae"},
		{"stray end", "a</internal>b", "ab"},
	} {
		if got := Visible(c.in); got != c.want {
			t.Errorf("%s: got %q, want %q", c.id, got, c.want)
		}
	}
}

func FuzzVisible(f *testing.F) {
	f.Add("a<internal>b</internal>c")
	f.Add("<internal><internal>x</internal>")
	f.Fuzz(func(t *testing.T, text string) {
		if got := Visible(text); strings.Contains(got, "<internal>") && !strings.Contains(strings.ReplaceAll(text, "</internal>", ""), got) {
			t.Errorf("%q: got %q", text, got)
		}
		if hidden := Visible("<internal>" + strings.ReplaceAll(text, "</internal>", "")); hidden != "" {
			t.Errorf("%q leaked %q", text, hidden)
		}
	})
}

func TestSplit(t *testing.T) {
	for _, c := range []struct {
		id, in string
		limit  int
		want   []string
	}{
		{"SP-01 fits", "hello", 10, []string{"hello"}},
		{"SP-01 paragraphs", "one two\n\nthree four", 12, []string{"one two", "three four"}},
		{"SP-01 lines", "one two\nthree", 10, []string{"one two", "three"}},
		{"words", "one two three", 9, []string{"one two", "three"}},
		{"an early line is no reason", "a\nbbbb cccc", 9, []string{"a\nbbbb", "cccc"}},
		{"characters, not bytes", "ééééé", 5, []string{"ééééé"}},
		{"empty", "  \n ", 5, nil},
	} {
		equal(t, c.id, split(c.in, c.limit), c.want)
	}
	if got := split(strings.Repeat("x", 100), 30); len(got) != 4 || strings.Join(got, "") != strings.Repeat("x", 100) {
		t.Errorf("SP-01 hard cut: %q", got)
	}
}

func FuzzSplit(f *testing.F) {
	f.Add("one two\n\nthree", uint16(5))
	f.Add("\xff\xfe é", uint16(1))
	f.Fuzz(func(t *testing.T, text string, most uint16) {
		limit := 1 + int(most)
		pieces := split(text, limit)
		bare := func(s string) string { return strings.Join(strings.Fields(s), "") }
		if bare(strings.Join(pieces, "")) != bare(text) {
			t.Errorf("%q: %q", text, pieces)
		}
		for _, p := range pieces {
			if utf8.RuneCountInString(p) > limit {
				t.Errorf("%q has more than %d characters", p, limit)
			}
		}
	})
}
