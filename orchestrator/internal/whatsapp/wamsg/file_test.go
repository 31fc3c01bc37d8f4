package wamsg

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"go.mau.fi/whatsmeow/types"
)

const (
	png = "\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
	jpg = "\xff\xd8\xff\xe0\x00\x10JFIF\x00"
	exe = "MZ\x90\x00\x03\x00\x00\x00"
	ogg = "OggS\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x13OpusHead\x01\x01"
	pdf = "%PDF-1.7\n"
)

var (
	someone  = types.NewADJID("100000000000002", types.LIDDomain, 3)
	someTime = time.Date(2026, 9, 18, 23, 30, 0, 0, time.UTC)
)

func TestFileName(t *testing.T) {
	const tag = "-03538eb10f19dc91-"
	for _, c := range []struct {
		name string
		kind FileKind
		head string
		want string
	}{
		{"", Photo, jpg, "photo.jpg"},
		{"", VoiceNote, ogg, "voice-note.oga"},
		{"", Sticker, "RIFF\x10\x00\x00\x00WEBPVP8 ", "sticker.webp"},
		{"a cat", Sticker, "RIFF\x10\x00\x00\x00WEBPVP8 ", "sticker.webp"},
		{"report.pdf", Document, pdf, "report.pdf"},
		{"Report 2026 (final).PDF", Document, pdf, "Report-2026-final.pdf"},
		{"отчёт №5.pdf", Document, pdf, "отчёт-5.pdf"},
		{"re\u0301sume\u0301.txt", Document, "hello", "résumé.txt"},
		{"notes.md", Document, "# hello", "notes.md"},
		{"data.csv", Document, "a,b\n1,2\n3,4\n", "data.csv"},
		{"drawing.blend", Document, "BLENDER\x00\x01\x02", "drawing.blend"},
		{"photo.jpeg", Document, jpg, "photo.jpeg"},
		// What lies about its type keeps the lie, before the truth.
		{"photo.jpg", Document, exe, "photo.jpg.exe"},
		{"photo.jpg", Document, "not a picture", "photo.jpg.txt"},
		{"photo.jpg", Document, "\x00\x01\x02", "photo.jpg.bin"},
		{"x.pdf", Document, png, "x.pdf.png"},
		{"empty.pdf", Document, "", "empty.pdf.txt"},
		{"a.tar.gz", Document, "\x1f\x8b\x08\x00", "a.tar.gz"},
		// What is no name.
		{"../../../etc/passwd", Document, "root:x", "passwd.txt"},
		{`..\..\boot.ini`, Document, "[x]", "boot.ini"},
		{"..", Document, pdf, "document.pdf"},
		{".bashrc", Document, "x", "document.bashrc"},
		{"/", Document, pdf, "document.pdf"},
		{"a\x00b.pdf", Document, pdf, "a-b.pdf"},
		{"\u202efdp.exe", Document, pdf, "fdp.exe.pdf"},
		{"$(rm -rf ~); `x` 'y' \"z\" &|<>*?.pdf", Document, pdf, "rm-rf-x-y-z.pdf"},
		{"-rf.pdf", Document, pdf, "rf.pdf"},
		{"con.txt", Document, "x", "con.txt"},
		{"nul", Document, "x", "nul.txt"},
		{"a\nb\tc .pdf ", Document, pdf, "a-b-c.pdf"},
		{"\xff\xfe.pdf", Document, pdf, "document.pdf"},
		{"🤖.pdf", Document, pdf, "document.pdf"},
		{"\u3164\u115f.pdf", Document, pdf, "document.pdf"},
		{"x.a/b", Document, "x", "b.txt"},
		{"x.ａｂ", Document, "x", "x.ａｂ.txt"},
	} {
		got := FileName(someTime, someone, "3EB0C0FFEE", File{Kind: c.kind, Name: c.name}, []byte(c.head))
		if want := "2026-09-18" + tag + c.want; got != want {
			t.Errorf("%q: got %q, want %q", c.name, got, want)
		}
	}
}

// A file is told from all others by who sent it with which message.
func TestFileNamesOfMessages(t *testing.T) {
	name := func(at time.Time, sender types.JID, id string) string {
		return FileName(at, sender, id, File{Kind: Photo}, []byte(jpg))
	}
	mine := name(someTime, someone, "A")
	if again := name(someTime, someone.ToNonAD(), "A"); again != mine {
		t.Errorf("the same message again: %q, then %q", mine, again)
	}
	other := types.NewJID("100000000000003", types.HiddenUserServer)
	if name(someTime, other, "A") == mine || name(someTime, someone, "B") == mine {
		t.Error("another sender or another message writes over the file")
	}
	for _, at := range []time.Time{{}, time.Unix(1<<40, 0), time.Unix(-1<<40, 0)} {
		if got := name(at, someone, "../x"); !strings.HasPrefix(got, "undated-") {
			t.Errorf("%v: got %q", at, got)
		}
	}
	if got := name(someTime.In(time.FixedZone("", 3600)), someone, "A"); !strings.HasPrefix(got, "2026-09-19-") {
		t.Errorf("in another zone: got %q", got)
	}
}

var safe = regexp.MustCompile(`^(\d{4}-\d\d-\d\d|undated)-[0-9a-f]{16}-[\pL\pN](?:[-_.]?[\pL\pN\pM])*\.[a-z0-9]+$`)

func FuzzFileName(f *testing.F) {
	for _, seed := range []string{"a.pdf", "../../x", "a\x00.jpg", "\u202egpj.exe", ".", "..", "CON", strings.Repeat("é", 500) + ".txt", "a.\u0301", "\u0301", "a..b", "x.tar.gz", "\xffé"} {
		f.Add(seed, "3EB0", int64(1789732800), []byte(jpg))
		f.Add(seed, "../\x00", int64(-1), []byte("text"))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, name, id string, at int64, head []byte) {
		got := FileName(time.Unix(at, 0).UTC(), someone, id, File{Kind: Document, Name: name}, head)
		if len(got) > 200 || !utf8.ValidString(got) || !safe.MatchString(got) || !filepath.IsLocal(got) || filepath.Base(got) != got {
			t.Fatalf("%q: %q is no safe name", name, got)
		}
		if strings.ContainsFunc(got, func(r rune) bool { return unicode.IsControl(r) || unicode.IsSpace(r) || isHidden(r) }) {
			t.Errorf("%q: %q hides something", name, got)
		}
		if again := FileName(time.Unix(at, 0).UTC(), someone, id, File{Kind: Document, Name: name}, head); again != got {
			t.Errorf("%q: %q, then %q", name, got, again)
		}
		full := filepath.Join(dir, got)
		if err := os.WriteFile(full, nil, 0o600); err != nil {
			t.Errorf("%q: %v", name, err)
		}
		_ = os.Remove(full)
	})
}
