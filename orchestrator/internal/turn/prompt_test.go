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
	dead := berth.Outgoing{Text: strings.Repeat("é", 300), Error: `no "such" chat`, CreatedAt: at}
	b := berth.Batch{Omitted: 3, Undelivered: []berth.Outgoing{dead}, Messages: []berth.Message{
		{Seq: 7, SenderName: "A & B <Co>", Text: `<script>alert("xss")</script>`, Time: at},
		{Seq: 9, SenderName: "Bob", Text: "</message>\n</messages>", Time: at},
	}}
	got := prompt(g, b, "Andy", at.In(zone))
	want := `<context timezone="America/New_York" time="2024-01-01T13:30:00-05:00" chat="a&quot;b@g.us" group="main" main="true" assistant="Andy" omitted="3 older messages omitted" />
<undelivered time="2024-01-01T18:30:00.000Z" reason="no &quot;such&quot; chat">` + strings.Repeat("é", 200) + `…</undelivered>
<messages>
<message sender="A &amp; B &lt;Co&gt;" time="2024-01-01T18:30:00.000Z" id="7">&lt;script&gt;alert(&quot;xss&quot;)&lt;/script&gt;</message>
<message sender="Bob" time="2024-01-01T18:30:00.000Z" id="9">&lt;/message&gt;
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

func splitTexts(text string, limit int) []string {
	var out []string
	for _, p := range split(text, limit) {
		out = append(out, p.text())
	}
	return out
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
		{"the gap takes no room", "one two three", 7, []string{"one two", "three"}},
		{"an early line is no reason", "a\nbbbb cccc", 9, []string{"a\nbbbb", "cccc"}},
		{"a paragraph before a later line", "aaaa\n\nbbbb\ncc", 12, []string{"aaaa\n\nbbbb", "cc"}},
		{"characters, not bytes", "ééééé", 5, []string{"ééééé"}},
		{"empty", "  \n ", 5, nil},
		{"indentation stays", "one two\n  three", 10, []string{"one two", "  three"}},
		{"one character", "a b\nc", 1, []string{"a", "b", "c"}},

		{"fits with a fence", "a\n```go\nb\n```", 20, []string{"a\n```go\nb\n```"}},
		{"before a block", "some words\n```\ncode\n```", 20, []string{"some words", "```\ncode\n```"}},
		{"before a block rather than in it", "words\n```\ncode\ncode\n```", 20, []string{"words", "```\ncode\ncode\n```"}},
		{"after a block", "```\ncode\n```\nsome words", 20, []string{"```\ncode\n```", "some words"}},
		{"a paragraph before a fence", "some long words\n\n```\na\n```\nb c d", 26, []string{"some long words", "```\na\n```\nb c d"}},
		{"in a block", "```go\none one\n  two two\nthree\n```", 27, []string{"```go\none one\n  two two\n```", "```go\nthree\n```"}},
		{"empty lines are no paragraph in a block", "```\na\n\nbbbbbbbb\nccccccc\n```", 20, []string{"```\na\n\nbbbbbbbb\n```", "```\nccccccc\n```"}},
		{"too large a block for sparing it", "one\n~~~\naaaaa\nbbbbb\nccccc\nddddd\n~~~", 22, []string{"one\n~~~\naaaaa\n~~~", "~~~\nbbbbb\nccccc\n~~~", "~~~\nddddd\n~~~"}},
		{"a longer fence holds a shorter", "`````\n```\na\n```\nb\n`````\nc d e f", 24, []string{"`````\n```\na\n```\nb\n`````", "c d e f"}},
		{"never closed", "```go\none one one\ntwo two two\nthree", 26, []string{"```go\none one one\n```", "```go\ntwo two two\nthree"}},
		{"a word in a block", "```\naaa bbb ccc ddd\n```", 16, []string{"```\naaa bbb\n```", "```\nccc ddd\n```"}},
		{"anywhere in a block", "```\naaaaaaaaaaaaaaaa\n```", 16, []string{"```\naaaaaaaa\n```", "```\naaaaaaaa\n```"}},
		{"indented", "- x\n  ```\n  aaaaa\n  bbbbb\n  ccccc\n  ```", 28, []string{"- x\n  ```\n  aaaaa\n  ```", "  ```\n  bbbbb\n  ccccc\n  ```"}},
		{"in a line it is no fence", "```a``` bbbbbb ```c``` dddddd", 16, []string{"```a``` bbbbbb", "```c``` dddddd"}},
		{"a fence that could not be opened again is text", strings.Repeat("`", 20), 12, []string{strings.Repeat("`", 12), strings.Repeat("`", 8)}},
	} {
		got := splitTexts(c.in, c.limit)
		equal(t, c.id, got, c.want)
		for _, p := range got {
			if utf8.RuneCountInString(p) > c.limit {
				t.Errorf("%s: %q is longer than %d", c.id, p, c.limit)
			}
		}
	}
	if got := splitTexts(strings.Repeat("x", 100), 30); len(got) != 4 || strings.Join(got, "") != strings.Repeat("x", 100) {
		t.Errorf("SP-01 hard cut: %q", got)
	}
	equal(t, "SP-01 3500 characters", len(Split(strings.Repeat("é", 3500))), 1)
	equal(t, "SP-01 3501 characters", len(Split(strings.Repeat("é", 3501))), 2)
}

func FuzzSplit(f *testing.F) {
	f.Add("one two\n\nthree", uint16(5))
	f.Add("\xff\xfe é", uint16(1))
	f.Add("a\n```go\nfunc main() {\n\tprintln(1)\n}\n```\nb\n\nc", uint16(20))
	f.Add("~~~~\n```\nx\n~~~~\ny", uint16(14))
	f.Add("  ````md\n\n\n ```\n``````   \nx   \n  \n\ny", uint16(17))
	f.Add("```      \n\n\taaaaaaaaaaaaaaaaaaaax", uint16(11))
	f.Add("```\naaaa aaaa ```\n```` ~~~ ```\n~~~x", uint16(12))
	f.Fuzz(func(t *testing.T, text string, most uint16) {
		limit := 1 + int(most)
		pieces := split(text, limit)
		rest, reopened := text, ""
		for i, p := range pieces {
			if n := utf8.RuneCountInString(p.text()); n > limit {
				t.Errorf("%q has %d characters, more than %d", p.text(), n, limit)
			}
			// The text is the bodies, in order, with white space between them.
			at := strings.Index(rest, p.body)
			for at < 0 || strings.TrimSpace(rest[:at]) != "" {
				t.Fatalf("%q is not what follows: %q", p.body, rest)
			}
			rest = rest[at+len(p.body):]
			// A piece opens what was open, and leaves nothing open unless it is the last.
			in := fence{}
			if p.open != "" {
				in = in.after(strings.TrimSuffix(p.open, "\n"), limit)
			}
			if in.mark != reopened || (p.open != "") != (reopened != "") {
				t.Errorf("piece %d opens %q after %q", i, p.open, reopened)
			}
			if reopened = strings.TrimPrefix(p.end, "\n"); reopened != "" && i == len(pieces)-1 {
				t.Errorf("the last piece adds %q", p.end)
			}
		}
		if strings.TrimSpace(rest) != "" {
			t.Errorf("lost: %q", rest)
		}
	})
}

// Where lines are short enough to be cut between, each piece but the last has
// all its fences closed, as a reader of that piece alone sees them.
func FuzzSplitClosesFences(f *testing.F) {
	f.Add([]byte("abcdefghijklmnop"))
	f.Add([]byte{0, 1, 2, 3, 9, 9, 9, 9, 9, 9, 5, 5, 5, 4})
	lines := []string{"```go", "```", "````", "~~~", "~~~~ md", "", "x", "  y = 1", "some words", "a line that is longer", "  ```", "   "}
	f.Fuzz(func(t *testing.T, which []byte) {
		var text []string
		for _, b := range which {
			text = append(text, lines[int(b)%len(lines)])
		}
		const limit = 80
		pieces := splitTexts(strings.Join(text, "\n"), limit)
		for i, p := range pieces {
			in := fence{}
			for line := range strings.SplitSeq(p, "\n") {
				in = in.after(line, limit)
			}
			if in.mark != "" && i < len(pieces)-1 {
				t.Errorf("piece %d of %q leaves %q open", i, pieces, in.mark)
			}
		}
	})
}
