package waformat

import (
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func TestWhatsApp(t *testing.T) {
	for name, c := range map[string]struct{ in, want string }{
		"plain":              {"Hello, world.\nSecond line: 2 * 3 * 4 = 24, a_b_c and ~5 or ~6.\n\nBye!", "Hello, world.\nSecond line: 2 * 3 * 4 = 24, a_b_c and ~5 or ~6.\n\nBye!"},
		"long rule":          {"a\n\n" + strings.Repeat("-", 500) + "\n**b**", "a\n\n———\n*b*"},
		"empty":              {"", ""},
		"blank":              {" \n\t\n", ""},
		"only emoji":         {"🤖👍🏽", "🤖👍🏽"},
		"right to left":      {"שלום **עולם**", "שלום *עולם*"},
		"bold":               {"a **b** c __d__", "a *b* c *d*"},
		"italic":             {"a *b* c _d_", "a _b_ c _d_"},
		"both":               {"***a*** **b *c* d**", "_*a*_ *b _c_ d*"},
		"struck":             {"a ~~b~~ c", "a ~b~ c"},
		"bold in bold":       {"**a **b** c**", "*a b c*"},
		"over lines":         {"**a\nb** c", "*a*\n*b* c"},
		"half a word":        {"un**believ**able", "unbelievable"},
		"no spaces":          {"这是**重点**内容", "这是重点内容"},
		"in parentheses":     {"(**a**), \"*b*\".", "(*a*), \"_b_\"."},
		"mark within itself": {`**2 \* 3\***`, `2 * 3*`},
		"escaped marks":      {`\*no\* \_no\_ \~no\~`, joiner + "*no* " + joiner + "_no_ " + joiner + "~no~"},
		"marks that pair":    {`\*a **b**`, joiner + `*a *b*`},
		"globs":              {`\*.go \*.md`, `*.go *.md`},
		"underscores":        {`snake\_case\_name /a/\_b\_/c`, `snake_case_name /a/_b_/c`},
		"no list":            {"\\- a\n\\> b\n\\* c", joiner + "- a\n" + joiner + "> b\n" + joiner + "* c"},
		"code":               {"run `a*b*` and ``x`y``", "run `a*b*` and ```x`y```"},
		"code in a word":     {"the `file`s of `*a*`s", "the files of *a*s"},
		"blank code":         {"a\n\n`\n`\nb", "a\n\nb"},
		"backticks":          {"\\`a\\` \\`\\`\\`b\\`\\`\\`", joiner + "`a` " + joiner + "`" + joiner + "`" + joiner + "`b`" + joiner + "`" + joiner + "`"},
		"fence":              {"a\n\n```go\nfunc f() {\n\treturn *p, **q\n}\n```\n\nb", "a\n\n```func f() {\n\treturn *p, **q\n}```\n\nb"},
		"tildes":             {"~~~\na\n~~~", "```a```"},
		"fence in a fence":   {"````\n```\na\n```\n````", "```\n``" + joiner + "`\na\n``" + joiner + "`\n```"},
		"open fence":         {"```\na", "```a```"},
		"empty fence":        {"a\n```\n```\n\nb", "a\n\nb"},
		"indented code":      {"    a\n      b", "```a\n  b```"},
		"headings":           {"# A\n\n## B **c** `d`\nText\n\nE\n=", "*A*\n\n*B c `d`*\nText\n\n*E*"},
		"heading with mark":  {`# 2 \* 3`, `2 * 3`},
		"list":               {"Do:\n* a\n* b\n  more", "Do:\n- a\n- b\n  more"},
		"loose list":         {"- a\n\n- b", "- a\n\n- b"},
		"nested list":        {"1. a\n   - b\n     1. c\n2. d", "1. a\n   - b\n     1. c\n2. d"},
		"numbers":            {"7) a\n8) b", "7. a\n8. b"},
		"tasks":              {"- [ ] a\n- [x] b", "- ☐ a\n- ☑ b"},
		"code in a list":     {"- a\n  ```\n  b\n  ```\n- c", "- a\n```b```\n- c"},
		"quote":              {"> a\n> **b**\n>\n> - c\n\nd", "> a\n> *b*\n>\n> - c\n\nd"},
		"quote in a quote":   {"> a\n> > b", "> a\n> > b"},
		"code in a quote":    {"> ```\n> a\n> b\n> ```", "> `a`\n> `b`"},
		"rule":               {"a\n\n***\n\nb", "a\n\n———\n\nb"},
		"link":               {"[a **b**](https://x.example/y_z_)", "a *b* (https://x.example/y_z_)"},
		"link that says it":  {"[https://x.example](https://x.example) [x.example](https://x.example/) [](https://y.example) [me@x.example](mailto:me@x.example)", "https://x.example https://x.example/ https://y.example me@x.example"},
		"reference":          {"[a][1] [b](#b) [c]\n\n[1]: https://x.example 'title'", "a (https://x.example) b [c]"},
		"bare addresses":     {"https://x.example/_a_b_ <https://y.example/*c*>", "https://x.example/_a_b_ https://y.example/*c*"},
		"image":              {"![a cat](cat.png) ![](https://x.example/i.png)", "a cat (cat.png) https://x.example/i.png"},
		"html":               {"a <b>b</b><br>c\n\n<div>\n  *d*\n</div>", "a <b>b</b>\nc\n\n<div>\n  " + joiner + "*d*\n</div>"},
		"entities":           {`&lt;&amp;&copy;&#42;a&#42; \&amp; &x; &`, `<&©` + joiner + `*a* &amp; &x; &`},
		"hard breaks":        {"a  \nb\\\nc", "a\nb\nc"},
		"zero and broken":    {"a\x00b\xff\r\nc", "ab\uFFFD\nc"},
		"narrow table":       {"| Name | Qty |\n|---|--:|\n| Apple | 3 |\n| **日本** | 12 |", "```Name   Qty\n-----  ---\nApple    3\n日本    12```"},
		"wide table":         {"| Name | | Why |\n|---|---|---|\n| Apple | x | because **of** a `very` long text |\n| Pear | | \\| |", "*Name:* Apple\nx\n*Why:* because *of* a `very` long text\n\n*Name:* Pear\n*Why:* |"},
		"table in a quote":   {"> | A | B |\n> |---|---|\n> | 1 | 2 |", "> *A:* 1\n> *B:* 2"},
		"header only":        {"> | A | B |\n> |---|---|", "> *A, B*"},
		"table after text":   {"So:\n\n| A |\n|---|\n| `a` |\n\nend", "So:\n\n```A\n-\na```\n\nend"},
	} {
		got := WhatsApp(c.in)
		if got != c.want {
			t.Errorf("%s:\n%s", name, cmp.Diff(c.want, got))
		}
	}
}

// A peer's markup becomes what it stands for, and the rest stays.
func TestMarkdown(t *testing.T) {
	for in, want := range map[string]string{
		"*a* _b_ ~c~ `d*e*`":             "**a** _b_ ~~c~~ `d*e*`",
		"*a b* *c*":                      "**a b** **c**",
		"2*3*4 * a *":                    "2*3*4 * a *",
		"*a\nb*":                         "*a\nb*",
		"*a":                             "*a",
		"*a *b*":                         "**a *b**",
		"/x/*y*":                         "/x/*y*",
		"> a\n- b\n1. *c*":               "> a\n- b\n1. **c**",
		"x ```a *b*\nc``` y":             "x \n```\na *b*\nc\n```\n y",
		"```\na\n```":                    "```\na\n```",
		"```*a*``` *b*":                  "```*a*``` **b**",
		"```*a*":                         "```**a**",
		"``` ``` *a*":                    "``` ``` **a**",
		"":                               "",
		joiner + "*no* x" + joiner + "y": "**no** x" + joiner + "y",
		"a\r\nb\x00\xff":                 "a\nb\uFFFD",
	} {
		if got := Markdown(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

// What an agent says once more of what a person said looks the same.
func TestThereAndBack(t *testing.T) {
	for _, text := range []string{
		"*a* _b_ ~c~ `d`", "- a\n- *b*", "1. a\n2. b", "> a\n> b", "a\n\nb", "```a\nb```", "*a _b_ c*",
	} {
		if got := WhatsApp(Markdown(text)); got != text {
			t.Errorf("%q: got %q", text, got)
		}
	}
}

// However odd, a text neither stops the daemon nor swells.
func TestOddTexts(t *testing.T) {
	const size = 64 << 10
	again := func(s string) string { return strings.Repeat(s, size/len(s)) }
	for _, s := range []string{
		again("*a "), again("**a"), again("_a*b "), again("["), again("[a]("), again("![["), again("`a ``b "), again("`"), again("<a "),
		strings.Repeat(">", 99) + "a\n" + again("b\n"), strings.Repeat("- ", 99) + "a\n" + again("b\n"), again(strings.Repeat("> ", 99) + "\n"), again("\\u2028- "),
		again("&"), again("\\"), again(">"), again("- "), again("1. "), again("- > "), again("- a\n"), again("~~a~"), again("www.a."), again("a@b."),
		strings.Repeat(">", size/2) + "a\n" + again("b\n"), strings.Repeat("- ", size/4) + "a\n" + again("b\n"),
		strings.Repeat("|a", 8000) + "\n" + strings.Repeat("|-", 8000) + "\n" + strings.Repeat("|\n", 16000),
		"|" + strings.Repeat("h", 1000) + "|b|\n|-|-|\n" + again("|x\n"), again("*a*\n\n"), again("```\n"), again("\u202e*\u200b"),
	} {
		begin := time.Now()
		got := WhatsApp(s)
		Markdown(s)
		if took := time.Since(begin); took > 5*time.Second { // milliseconds without the race detector
			t.Errorf("%.20q…: took %v", s, took)
		}
		if len(got) > 10*len(s) {
			t.Errorf("%.20q…: %d bytes became %d", s, len(s), len(got))
		}
	}
}

// shown finds what the plainest reading of WhatsApp's rules would format.
var shown = regexp.MustCompile("(?:^|[\\s([\"'])(?:\\*\\S(?:.*?\\S)??\\*|_\\S(?:.*?\\S)??_|~\\S(?:.*?\\S)??~|`[^`]+`)(?:$|[^\\pL\\pN\\pM])")

func FuzzWhatsApp(f *testing.F) {
	for _, seed := range []string{
		"**a** *b* ~~c~~ `d`", "# a\n- b\n  1. c\n> d", "```go\na\n```", "|a|b|\n|-|-:|\n|c|d|", "[a](b) ![c](d) <e@f.g>", "&amp;\\*<br>", "a\x00\xff\u202e\u200d",
		"*a *b*", "***", "- [x] a\n\n      b", "____*_", "~a*b~*", "1. a\n2. b\n\n\n\n3. c", "<div>\n*a*\n</div>\n\n*b*", "`a`b`` c ```",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, in string) {
		got := WhatsApp(in)
		switch {
		case !utf8.ValidString(got) || strings.ContainsAny(got, "\x00\r"):
			t.Errorf("%q: not clean: %q", in, got)
		case len(got) > 40*len(in)+2*maxLabels:
			t.Errorf("%d bytes became %d", len(in), len(got))
		case strings.Contains(got, "\n\n\n") && !strings.Contains(in, "```") && !strings.Contains(in, "~~~") && !strings.Contains(in, "    ") && !strings.ContainsAny(in, "\t<"):
			t.Errorf("%q: more than one empty line: %q", in, got)
		}
		if back := Markdown(got); !utf8.ValidString(back) || len(back) > 3*len(got)+10 {
			t.Errorf("%q: back to %q", got, back)
		}
	})
}

// FuzzLiteral quotes all that Markdown could take for markup. What comes out has
// to be the text, and none of it may be shown as anything else.
func FuzzLiteral(f *testing.F) {
	for _, seed := range []string{
		"*a*", "_a_", "~a~ b~", "`a`", "```a```", "*_a_*", "**a**", "> a", "- a", "1. a", "a *b* c", "* a*", "*a*b*", "(*a*)", "\"_a b_\"", "a_b_c", "*é*", "https://x.y/_a_",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, in string) {
		in = strings.Join(strings.Fields(clean(in)), " ")
		var quoted strings.Builder
		for _, r := range in {
			if r < utf8.RuneSelf && unicode.In(r, unicode.P, unicode.S) {
				quoted.WriteByte('\\')
			}
			quoted.WriteRune(r)
		}
		if digits := strings.TrimLeft(in, "0123456789"); digits != in && strings.HasPrefix(digits, ".") {
			return // a number reads as a number
		}
		got := WhatsApp(quoted.String())
		if bare := strings.ReplaceAll(got, joiner, ""); bare != strings.ReplaceAll(in, joiner, "") {
			t.Fatalf("%q: got %q", in, bare)
		}
		if m := shown.FindString(got); m != "" {
			t.Errorf("%q: %q in %q would be shown as markup", in, m, got)
		}
		if strings.HasPrefix(got, "> ") || strings.HasPrefix(got, "- ") || strings.HasPrefix(got, "* ") || strings.Contains(got, "```") {
			t.Errorf("%q: %q would be shown as a block", in, got)
		}
	})
}

// FuzzPlain holds that text without any marks comes back as it is.
func FuzzPlain(f *testing.F) {
	f.Add("Hello, world! It is 5 o'clock; come (soon)?\n\nשלום 你好 🤖")
	f.Fuzz(func(t *testing.T, in string) {
		var paragraphs []string
		for p := range strings.SplitSeq(clean(in), "\n") {
			p = strings.Join(strings.FieldsFunc(p, func(r rune) bool {
				return unicode.IsSpace(r) || r < utf8.RuneSelf && unicode.IsControl(r) || strings.ContainsRune("*_~`\\&<>[]|#=-+:@/.)", r)
			}), " ")
			if p != "" {
				paragraphs = append(paragraphs, p)
			}
		}
		want := strings.Join(paragraphs, "\n\n")
		if got := WhatsApp(want); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		if got := Markdown(want); got != want && !strings.Contains(want, joiner) {
			t.Errorf("back: got %q, want %q", got, want)
		}
	})
}
