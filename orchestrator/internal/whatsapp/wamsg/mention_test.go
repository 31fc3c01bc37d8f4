package wamsg

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"go.mau.fi/whatsmeow/types"
)

func member(lid string, number string, names ...string) Member {
	return Member{Address: types.NewJID(lid, types.HiddenUserServer), Digits: []string{lid, number}, Names: names}
}

var family = []Member{
	member("101", "4915100000001", "Ann", "Ann Example"),
	member("102", "4915100000002", "Bob"),
	member("103", "4915100000003", "Bob"),
	member("104", "4915100000004", "Ann-Marie"),
	member("105", "4915100000005", "小爪", "@Claw", ""),
	member("106", "4915100000006", "Élodie\nX\u202e"),
}

func TestMention(t *testing.T) {
	for _, c := range []struct{ in, want, who string }{
		{"hi @Ann!", "hi @101!", "101"},
		{"@ann, @ANN's", "@101, @101's", "101"},
		{"@Ann Example: yes", "@101: yes", "101"},
		{"@Ann-Marie and @Ann-Lise", "@104 and @Ann-Lise", "104"},
		{"@Bob", "@Bob", ""}, // there are two
		{"@4915100000002 @+4915100000003 @104", "@102 @103 @104", "102 103 104"},
		{"@49151000000020", "@49151000000020", ""},
		{"*@Ann* (@小爪) _@claw_", "*@101* (@105) _@claw_", "101 105"},
		{"@Élodie X.", "@106.", "106"},
		{"@Annabel ann@ann.example x@Ann @Ann@x a.@Ann /@Ann @Ann.example", "@Annabel ann@ann.example x@Ann @Ann@x a.@Ann /@Ann @Ann.example", ""},
		{"`@Ann` ```@Ann\n@Ann``` @Ann", "`@Ann` ```@Ann\n@Ann``` @101", "101"},
		{"`@Ann\n` @Ann ``", "`@101\n` @Ann ``", "101"},
		{"@", "@", ""}, {"@ Ann @@Ann", "@ Ann @@101", "101"}, {"", "", ""},
	} {
		got, who := Mention(c.in, family)
		var users []string
		for _, j := range who {
			users = append(users, j.User)
		}
		if got != c.want || strings.Join(users, " ") != c.who {
			t.Errorf("%q: got %q, %v, want %q, %s", c.in, got, users, c.want, c.who)
		}
	}
	if got, who := Mention("@Ann", nil); got != "@Ann" || who != nil {
		t.Errorf("got %q, %v", got, who)
	}
}

// Nothing but names changes, whom it mentions is mentioned in it, and reading it
// gives the text again.
func FuzzMention(f *testing.F) {
	for _, seed := range []string{"hi @Ann!", "`@Ann` @Bob @bob", "```@a", "@ann@ann", "@+4915100000002", "@Élodie X", "@\xff", strings.Repeat("@", 100)} {
		f.Add(seed, "Bob")
	}
	f.Add("@,@,", ",")
	f.Fuzz(func(t *testing.T, text, name string) {
		members := append([]Member{member("107", "4915100000007", name)}, family...)
		got, who := Mention(text, members)
		if len(who) == 0 {
			if got != text {
				t.Fatalf("%q became %q and mentions nobody", text, got)
			}
			return
		}
		if strings.Count(got, "@") > strings.Count(text, "@") || strings.Count(got, "`") > strings.Count(text, "`") || utf8.ValidString(text) && !utf8.ValidString(got) {
			t.Errorf("%q became %q", text, got)
		}
		for _, j := range who {
			if !strings.Contains(got, "@"+j.User) {
				t.Errorf("%q mentions %s, who is not in it", got, j)
			}
		}
		again, whom := Mention(got, members)
		if again != got || !cmp.Equal(who, whom) && !strings.Contains(text, "@1") {
			t.Errorf("%q: %q, then %q; %v, then %v", text, got, again, who, whom)
		}
	})
}

// What a file is sent as does not depend on what it is called.
func TestSending(t *testing.T) {
	const mp4 = "\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom"
	for _, c := range []struct {
		path, head, mime, name string
		kind                   FileKind
	}{
		{"charts/a chart.png", png, "image/png", "a-chart.png", Photo},
		{"x.jpg", jpg, "image/jpeg", "x.jpg", Photo},
		{"x.pdf", jpg, "image/jpeg", "x.pdf.jpg", Photo},
		{"clip.mp4", mp4, "video/mp4", "clip.mp4", Video},
		{"say.ogg", ogg, "audio/ogg; codecs=opus", "say.ogg", VoiceNote},
		{"a.mp3", "\xff\xfb\x90\x44", "audio/mpeg", "a.mp3", Audio},
		{"a.gif", "GIF89a", "image/gif", "a.gif", Document},
		{"r.pdf", pdf, "application/pdf", "r.pdf", Document},
		{"data.csv", "a,b\n1,2\n", "text/csv", "data.csv", Document},
		{"../\u202e\x00gpj.exe", exe, "application/vnd.microsoft.portable-executable", "gpj.exe", Document},
		{"", "", "text/plain", "document.txt", Document},
	} {
		kind, mime, name := Sending(c.path, []byte(c.head))
		if kind != c.kind || mime != c.mime || name != c.name {
			t.Errorf("%q: got %s, %q, %q, want %s, %q, %q", c.path, kind, mime, name, c.kind, c.mime, c.name)
		}
	}
}
