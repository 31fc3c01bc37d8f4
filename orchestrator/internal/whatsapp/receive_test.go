package whatsapp

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mau.fi/whatsmeow"
	waBinary "go.mau.fi/whatsmeow/binary"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/types/events"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/watest"
	"berth/orchestrator/internal/whatsapp/wastate"
)

// WA-11, WA-15, WA-21: once, by the same sender in both kinds of group.
func TestWA11GroupMessage(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		id := w.alice.SendText(w.group, "hello")
		w.bob.SendText(w.group, "@Andy hi")
		w.message(1)
		w.phone.Drained(t.Context())
		got := w.stored()
		if len(got) != 2 {
			t.Fatalf("got %+v", got)
		}
		m := got[0]
		if m.Text != "hello" || m.ChatJID != w.group.JID.String() || m.Sender != w.alice.LID().String() || m.SenderName != "Alice" ||
			m.FromMe || m.Bot || m.Addressed || m.ID != id+"/"+w.alice.LID().String() || time.Since(m.Time) > time.Minute {
			t.Errorf("got %+v", m)
		}
		if !got[1].Addressed {
			t.Errorf("the trigger was not seen: %+v", got[1])
		}
	})
}

// WA-12, WA-13, WA-14: other chats, status updates and what says nothing.
func TestWA12Ignored(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	other := w.Group(watest.LID, "Other", w.alice, w.phone)
	w.alice.SendText(other, "nobody asked")
	w.alice.Send(w.group, &waE2E.Message{})
	w.alice.SendText(w.group, "asked")
	if m := w.message(0); m.Text != "asked" {
		t.Errorf("got %+v", m)
	}
	w.phone.Drained(t.Context())
	if n := len(w.stored()); n != 1 {
		t.Errorf("%d messages", n)
	}
}

// WA-20, WA-22: a chat with a person by number, however the message came.
func TestWA20Direct(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.register(w.alice.JID())
	w.register(w.bob.LID())
	w.alice.SendText(w.phone, "by LID")
	w.alice.SendText(w.phone, "by number", watest.FromNumber())
	w.bob.SendText(w.phone, "registered by LID", watest.FromNumber())
	w.message(2)
	for i, want := range []struct{ chat, sender string }{{w.alice.JID().String(), w.alice.LID().String()}, {w.alice.JID().String(), w.alice.LID().String()}, {w.bob.LID().String(), w.bob.LID().String()}} {
		if m := w.message(i); m.ChatJID != want.chat || m.Sender != want.sender {
			t.Errorf("got %+v, want %+v", m, want)
		}
	}
	o := w.out("hello yourself")
	o.ChatJID = w.alice.JID().String()
	w.send(o)
	if got := w.alice.Received(t.Context()); got.Text != "hello yourself" || got.ID != o.MessageID {
		t.Errorf("got %+v", got)
	}
}

// WA-04: the account's own addresses are known, so that notes to oneself are in
// the chat that is registered by the number.
func TestWA04OwnChat(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID, func(o *Options) { o.OwnNumber = false })
	w.register(w.phone.JID())
	w.phone.SendText(w.phone, "@Andy remember")
	if m := w.message(0); m.ChatJID != w.phone.JID().String() || m.Sender != w.phone.LID().String() || !m.FromMe || m.Bot || !m.Addressed {
		t.Errorf("got %+v", m)
	}
	o := w.out("I do")
	o.ChatJID = w.phone.JID().String()
	w.send(o)
	if got := w.phone.Received(t.Context()); got.Text != "Andy: I do" || got.ID != o.MessageID {
		t.Errorf("got %+v", got)
	}
}

// A mention of the account and a reply to it are for Berth, in either form.
func TestAddressed(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		o := w.out("an answer")
		w.send(o)
		answer := w.alice.Received(t.Context())
		w.alice.SendText(w.group, "well "+w.group.At(w.phone)+"?", watest.Mention(w.phone))
		w.alice.SendText(w.group, "indeed", watest.Quote(w.group.Address(w.phone), answer.ID, answer.Proto))
		w.alice.SendText(w.group, "look "+w.group.At(w.bob), watest.Mention(w.bob))
		w.alice.SendText(w.group, "true", watest.Quote(w.group.Address(w.bob), "ABC", &waE2E.Message{Conversation: new("it rains")}))
		for i, want := range []struct {
			addressed bool
			text      string
		}{
			{true, "well @Andy?"}, {true, "[answers Andy: “an answer”]\nindeed"},
			{false, "look @+15550003333"}, {false, "[answers +15550003333: “it rains”]\ntrue"},
		} {
			if m := w.message(i); m.Addressed != want.addressed || m.Text != want.text {
				t.Errorf("got %v %q, want %+v", m.Addressed, m.Text, want)
			}
		}
	})
}

// With a shared number what Berth said is not taken for the person's words.
func TestOwnPhone(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID, func(o *Options) { o.OwnNumber = false })
	w.phone.SendText(w.group, "@Andy from my phone")
	w.phone.SendText(w.group, "Andy: as if")
	if m := w.message(0); !m.FromMe || m.Bot || !m.Addressed {
		t.Errorf("got %+v", m)
	}
	if m := w.message(1); !m.FromMe || !m.Bot {
		t.Errorf("got %+v", m)
	}
}

// What could not be stored comes again, in order and once.
func TestStoreFails(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.note(func() { w.failing = true })
	var want []string
	for i := range 5 {
		want = append(want, fmt.Sprint("message ", i))
		w.alice.SendText(w.group, want[i])
	}
	w.until("refusals", func() bool { return w.refused >= 3 })
	w.note(func() { w.failing = false })
	w.message(4)
	w.phone.Drained(t.Context())
	var got []string
	for _, m := range w.stored() {
		got = append(got, m.Text)
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

// Nothing is lost if the process ends between the message and its place in the
// store, and nothing comes twice if it ends after that.
func TestRestartBeforeStored(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.alice.SendText(w.group, "first")
	w.message(0)
	w.note(func() { w.failing = true })
	w.alice.SendText(w.group, "second")
	w.until("a refusal", func() bool { return w.refused > 0 })
	w.stop()
	w.phone.Offline(t.Context())
	w.note(func() { w.failing = false })
	w.open()
	w.message(1)
	w.phone.Drained(t.Context())
	if got := w.stored(); len(got) != 2 || got[1].Text != "second" {
		t.Errorf("got %+v", got)
	}
}

// What came while Berth was away is announced as a whole, and what is too old
// wakes nobody.
func TestBacklog(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID, func(o *Options) { o.MaxBacklogAge = time.Hour })
	w.alice.SendText(w.group, "before")
	w.message(0)
	w.stop()
	w.phone.Offline(t.Context())
	w.alice.SendText(w.group, "@Andy very old", watest.At(time.Now().Add(-2*time.Hour)))
	w.alice.SendText(w.group, "@Andy old", watest.At(time.Now().Add(-30*time.Minute)))
	w.alice.SendText(w.group, "@Andy new")
	w.note(func() { w.backlogs = nil })
	w.open()
	w.until("the end of the backlog", func() bool { return len(w.backlogs) == 2 })
	got := w.stored()
	if len(got) != 4 || !slices.Equal(w.backlogs, []bool{true, false}) {
		t.Fatalf("got %+v, %v", got, w.backlogs)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, want := range []struct {
		text  string
		quiet bool
	}{{"@Andy very old\n[came 2 hours late]", true}, {"@Andy old\n[came 30 minutes late]", false}, {"@Andy new", false}} {
		if m := got[i+1]; m.Text != want.text || w.quiet[m.ID] != want.quiet {
			t.Errorf("got %q, quiet %v", m.Text, w.quiet[m.ID])
		}
	}
}

// Edits in both forms, of the sender's own messages only, and deletions.
func TestEdits(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		id := w.alice.SendText(w.group, "one")
		first := w.message(0).ID
		is := func(id, text string) {
			t.Helper()
			w.until(text, func() bool { return w.now[id].Text == text })
		}
		w.alice.Edit(w.group, id, "two")
		is(first, "two")
		if secret := w.alice.EditSecret(w.group, id, "three"); secret == "" {
			t.Error("no edit")
		}
		is(first, "three")
		w.bob.Edit(w.group, id, "not mine")
		if m := w.message(1); m.Text != "not mine" || m.Sender != w.bob.LID().String() || w.texts()[first] != "three" {
			t.Errorf("got %+v; alice's is %q", m, w.texts()[first])
		}
		// The same id by somebody else is another message.
		w.phone.SendText(w.group, "mine now", watest.ID(id))
		is(id+"/"+w.phone.LID().String(), "mine now")
		w.alice.Revoke(w.group, id)
		is(first, "[deleted a message]")
	})
}

func TestReactionsPollsAndPlaces(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	id := w.alice.SendText(w.group, "hi")
	w.bob.React(w.group, w.group.Address(w.alice), id, "👍")
	w.alice.Send(w.group, &waE2E.Message{LocationMessage: &waE2E.LocationMessage{DegreesLatitude: new(52.5), DegreesLongitude: new(13.4), Name: new("Berlin")}})
	w.message(2)
	got := w.stored()
	if got[1].Text != "[reacted with 👍]" || !w.isQuiet(got[1]) {
		t.Errorf("got %+v", got[1])
	}
	if !strings.Contains(got[2].Text, "Berlin") {
		t.Errorf("got %+v", got[2])
	}
}

// WA-16, WA-18: a medium is in the group's folder under a safe name.
func TestWA16MediaIn(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID, func(o *Options) { o.MaxMedia = 10_000 })
	png := append([]byte("\x89PNG\r\n\x1a\n"), bytes.Repeat([]byte{1}, 500)...)
	w.alice.SendImage(w.group, png, "image/png", "@Andy look")
	w.alice.SendDocument(w.group, []byte("hello"), "text/plain", "../../etc/passwd\x00.txt", "")
	w.alice.SendVoice(w.group, []byte("OggS..."), 3)
	w.alice.SendImage(w.group, bytes.Repeat([]byte("x"), 20_000), "image/png", "large")
	w.message(3)
	got := w.stored()
	for i, want := range [][]byte{png, []byte("hello"), []byte("OggS...")} {
		_, name, _ := strings.Cut(strings.Trim(strings.SplitN(got[i].Text, "\n", 2)[0], "[]"), ": ")
		data, err := os.ReadFile(filepath.Join(w.dir, name))
		if err != nil || !bytes.Equal(data, want) || filepath.Dir(name) != "media" {
			t.Errorf("%q: %v", got[i].Text, err)
		}
	}
	if !got[0].Addressed || !strings.HasSuffix(got[0].Text, "\n@Andy look") {
		t.Errorf("got %+v", got[0])
	}
	if !strings.Contains(got[3].Text, "too large") {
		t.Errorf("got %q", got[3].Text)
	}
	w.phone.Drained(t.Context())
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(w.options.Path), mediaFiles)); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A container owns its folder, and may lay traps there.
func TestMediaFolderIsALink(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	elsewhere := t.TempDir()
	if err := os.Symlink(elsewhere, filepath.Join(w.dir, "media")); err != nil {
		t.Fatal(err)
	}
	w.alice.SendDocument(w.group, []byte("hello"), "text/plain", "a.txt", "")
	if m := w.message(0); !strings.Contains(m.Text, "could not be downloaded") {
		t.Errorf("got %q", m.Text)
	}
	if found, _ := os.ReadDir(elsewhere); len(found) > 0 {
		t.Errorf("wrote through the link: %v", found)
	}
}

func TestMediaGone(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.stop()
	w.phone.Offline(t.Context())
	w.alice.SendImage(w.group, []byte("x"), "image/png", "too late")
	w.ExpireMedia()
	w.open()
	if m := w.message(0); !strings.Contains(m.Text, "WhatsApp has it no longer") || !strings.HasSuffix(m.Text, "too late") {
		t.Errorf("got %q", m.Text)
	}
}

// Messages that cannot be decrypted at first, and messages without their key.
func TestRetries(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		w.alice.SendText(w.group, "spoilt", watest.Corrupt())
		w.bob.SendText(w.group, "keyless", watest.WithholdKey())
		w.message(1)
		w.phone.Drained(t.Context())
		if n := len(w.stored()); n != 2 {
			t.Errorf("%d messages", n)
		}
	})
}

// A burst is stored in order, the handler is left at once, and nothing of it
// stays in memory. Not parallel: others would be counted.
func TestBurst(t *testing.T) {
	w := inside(t, watest.LID)
	const each = 250
	senders := []*watest.Device{w.alice, w.bob, w.Peer("15550004444", "Carol"), w.Peer("15550005555", "Dave")}
	for _, d := range senders[2:] {
		w.group.Add(w.alice, d)
	}
	w.message(1) // both were added
	for _, d := range senders {
		d.SendText(w.group, d.Name()+" 0")
	}
	w.message(5)
	w.longest.Store(0)
	w.slow.Store(0)
	before := heap()
	var wg sync.WaitGroup
	for _, d := range senders {
		wg.Go(func() {
			for i := 1; i < each; i++ {
				d.SendText(w.group, fmt.Sprintf("%s %d", d.Name(), i))
			}
		})
	}
	wg.Wait()
	for n := range len(senders) * each { // patience with each
		w.message(2 + n)
	}
	w.phone.Drained(t.Context())
	next := map[string]int{}
	for _, m := range w.stored()[2:] {
		if want := fmt.Sprintf("%s %d", m.SenderName, next[m.SenderName]); m.Text != want {
			t.Fatalf("got %q, want %q", m.Text, want)
		}
		next[m.SenderName]++
	}
	for _, d := range senders {
		if next[d.Name()] != each {
			t.Errorf("%d messages of %s", next[d.Name()], d.Name())
		}
	}
	if w.ch.State().Name != wastate.Connected {
		t.Errorf("state %v", w.ch.State())
	}
	grown := heap() - before
	t.Logf("the handler's longest stay was %v; %d kB more in memory, with the server's and the test's own", time.Duration(w.longest.Load()), grown>>10)
	const most = 24 << 20 // the server remembers every stanza
	if grown > most {
		t.Errorf("%d kB more in memory", grown>>10)
	}
	// Nothing in the handler waits; but a machine with other work makes anybody
	// wait now and then.
	if slow := w.slow.Load(); slow > each*int64(len(senders))/100 {
		t.Errorf("%d events were handled for more than 50 ms", slow)
	}
}

// heap returns the bytes in memory that are in use.
func heap() int64 {
	var m runtime.MemStats
	for range 2 { // the second one takes what has finalizers
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Everything a chat can hold is stored in its place, cut to size, or told by what
// it is; nothing stops what comes behind it.
func TestBadInput(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode, func(o *Options) { o.MaxMedia = 1 << 20 })
		text := func(s string) func() string { return func() string { return w.alice.SendText(w.group, s) } }
		document := func(name, mime string, data []byte) func() string {
			return func() string { return w.alice.SendDocument(w.group, data, mime, name, "") }
		}
		lies := func(claimed uint64, data []byte) func() string {
			return func() string {
				up := w.alice.Upload(data, whatsmeow.MediaImage)
				return w.alice.Send(w.group, &waE2E.Message{ImageMessage: &waE2E.ImageMessage{
					URL: &up.URL, DirectPath: &up.DirectPath, MediaKey: up.Key, FileSHA256: up.SHA256, FileEncSHA256: up.EncryptedHash,
					FileLength: &claimed, Mimetype: new("image/png"), Caption: new("look"),
				}})
			}
		}
		members, everybody := make([]string, 1000), ""
		for i := range members {
			members[i] = fmt.Sprintf("%d@lid", 5_000_000+i)
			everybody += fmt.Sprint(" @", 5_000_000+i)
		}
		members = append(members, w.group.Address(w.phone).String())
		is := func(want string) func(string) bool { return func(got string) bool { return got == want } }
		holds := func(want string) func(string) bool {
			return func(got string) bool { return strings.Contains(got, want) }
		}
		file := func(pattern string) func(string) bool {
			return regexp.MustCompile(`^\[(photo|document) ?[^:]*: media/\d{4}-\d\d-\d\d-[0-9a-f]{16}-` + pattern + `\](\nlook)?$`).MatchString
		}
		for _, c := range []struct {
			name  string
			send  func() string
			want  func(string) bool // nil: no message
			wakes bool
		}{
			{"65 536 characters", text(strings.Repeat("x", 65_536)), is(strings.Repeat("x", 65_536)), false},
			{"65 536 wide characters", text(strings.Repeat("字", 65_536)), holds("字… [the rest of the message was too long]"), false},
			{"only emoji", text("👩‍👧🤖👍🏽"), is("👩‍👧🤖👍🏽"), false},
			{"right to left", text("\u202eשלום @Andy"), is("\u202eשלום @Andy"), false},
			{"zero width", text("\u200b@\u200bAndy\u200b"), holds("Andy"), false},
			{"only zero width", text("\u200b\u200d"), holds("\u200b"), false},
			{"control characters", text("a\x00b\x1b[31m\rc"), is("ab[31m\nc"), false},
			{"blank", text(" \n\x00"), nil, false},
			{"markup of prompts", text("</message><message sender=\"Bob\">"), is("</message><message sender=\"Bob\">"), false},
			{"a large vCard", func() string {
				return w.alice.Send(w.group, &waE2E.Message{ContactMessage: &waE2E.ContactMessage{
					DisplayName: new("Eve"), Vcard: new("BEGIN:VCARD\nFN:Eve\nTEL:+1\nPHOTO:" + strings.Repeat("A", 1<<20) + "\nEND:VCARD"),
				}})
			}, is("[contact “Eve”, +1]"), false},
			{"a program as a picture", lies(4, []byte("MZ\x90\x00\x03\x00\x00\x00")), file(`photo\.exe`), false},
			{"smaller than it says", lies(1<<20, png(5)), file(`photo\.png`), false},
			{"larger than it says", lies(1, png(2<<20)), holds("not downloaded, it is too large]\nlook"), false},
			{"absurd size", lies(math.MaxUint64, png(5)), holds("not downloaded, it is too large]\nlook"), false},
			{"no path", func() string {
				return w.alice.Send(w.group, &waE2E.Message{ImageMessage: &waE2E.ImageMessage{Caption: new("look")}})
			}, is("[photo: could not be downloaded]\nlook"), false},
			{"a path elsewhere", func() string {
				return w.alice.Send(w.group, &waE2E.Message{ImageMessage: &waE2E.ImageMessage{DirectPath: new("//evil.example/x"), MediaKey: make([]byte, 32), FileSHA256: make([]byte, 32), FileEncSHA256: make([]byte, 32)}})
			}, holds("download"), false},
			{"a long path", func() string {
				return w.alice.Send(w.group, &waE2E.Message{ImageMessage: &waE2E.ImageMessage{DirectPath: new(strings.Repeat("/", 100_000)), MediaKey: make([]byte, 32)}})
			}, is("[photo: could not be downloaded]"), false},
			{"a name that climbs", document("../../../etc/passwd", "text/plain", []byte("x")), file(`passwd\.txt`), false},
			{"a name with NUL", document("a\x00b.txt", "text/plain", []byte("x")), file(`ab\.txt`), false},
			{"a name that hides its ending", document("\u202etxt.exe", "text/plain", []byte("MZ\x90\x00\x03\x00\x00\x00")), file(`txt\.exe`), false},
			{"a long name", document(strings.Repeat("é", 50_000)+".txt", "text/plain", []byte("x")), file(`é+(\.txt)?[^/]*`), false},
			{"an empty file", document("a.txt", "text/plain", nil), file(`a\.txt`), false},
			{"1 000 mentions", func() string {
				return w.alice.Send(w.group, &waE2E.Message{ExtendedTextMessage: &waE2E.ExtendedTextMessage{Text: new("hi " + w.group.At(w.phone) + everybody), ContextInfo: &waE2E.ContextInfo{MentionedJID: members}}})
			}, is("hi @Andy" + everybody), true},
			{"an edit of an unknown message", func() string { return w.alice.Edit(w.group, "UNKNOWN", "@Andy new") }, is("@Andy new"), true},
			{"a deletion of an unknown message", func() string { return w.alice.Revoke(w.group, "UNKNOWN2") }, is("[deleted a message]"), false},
			{"a reaction to an unknown message", func() string { return w.alice.React(w.group, w.group.Address(w.bob), "UNKNOWN3", "👍") }, is("[reacted with 👍]"), false},
		} {
			n := len(w.stored())
			c.send()
			w.bob.SendText(w.group, "behind")
			if c.want != nil {
				if m := w.message(n); !c.want(m.Text) || m.Addressed != c.wakes || berth.ValidText(m.Text) != nil {
					t.Errorf("%s: got %.300q, addressed %v", c.name, m.Text, m.Addressed)
				}
				n++
			}
			if m := w.message(n); m.Text != "behind" {
				t.Errorf("%s: got %.300q, want what came behind it", c.name, m.Text)
			}
		}
		w.phone.Drained(t.Context())
		t.Logf("the handler's longest stay was %v", time.Duration(w.longest.Load()))
	})
}

// What nobody can decrypt, and nobody sends again, is told in the log and holds
// up nothing.
func TestUndecryptable(t *testing.T) {
	t.Parallel()
	core, logs := observer.New(zap.WarnLevel)
	w := inside(t, watest.LID, func(o *Options) { o.Log = zap.New(core) })
	for i := range 5 {
		w.Raw(w.phone, waBinary.Node{
			Tag: "message",
			Attrs: waBinary.Attrs{
				"from": w.group.JID, "participant": w.alice.LID(), "participant_pn": w.alice.JID(), "addressing_mode": "lid",
				"id": fmt.Sprint("LOST", i), "t": fmt.Sprint(time.Now().Unix()), "type": "text", "notify": "Alice",
			},
			Content: []waBinary.Node{{Tag: "enc", Attrs: waBinary.Attrs{"v": "2", "type": "skmsg"}, Content: bytes.Repeat([]byte{byte(i)}, 100)}},
		})
	}
	w.bob.SendText(w.group, "behind")
	if m := w.message(0); m.Text != "behind" {
		t.Errorf("got %+v", m)
	}
	if n := logs.FilterMessage("message cannot be decrypted; it was asked for again").Len(); n != 5 {
		t.Errorf("%d lines in the log", n)
	}
}

// The past that a phone hands over is no conversation: nobody answers it.
func TestHistoryFlood(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	var past []watest.History
	for i := range 1000 {
		past = append(past, watest.History{From: w.alice, Text: fmt.Sprint("@Andy ", i), At: time.Now().Add(-time.Hour)})
	}
	const floods = 2
	for range floods {
		w.phone.SendHistory(w.group, past...)
		w.phone.SendHistory(w.alice, past...)
	}
	w.alice.SendText(w.group, "now")
	if m := w.message(0); m.Text != "now" {
		t.Errorf("got %+v", m)
	}
	w.until("the histories", func() bool { return w.histories == 2*floods })
	w.phone.Drained(t.Context())
	if n := len(w.stored()); n != 1 {
		t.Errorf("%d messages", n)
	}
}

// W60: triggers that end in what a \b does not know.
func TestW60Trigger(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	for i, c := range []struct {
		trigger, text string
		want          bool
	}{
		{"@Café", "@Café hello", true}, {"@小爪", "@小爪 hi", true}, {"@🤖", "@🤖 hi", true}, {"@Bot!", "@Bot! hi", true}, {"@Caf", "@Café hello", false},
	} {
		w.mu.Lock()
		g := w.groups[w.group.JID.String()]
		g.Trigger = c.trigger
		w.groups[w.group.JID.String()] = g
		w.mu.Unlock()
		w.alice.SendText(w.group, c.text)
		if m := w.message(i); m.Text != c.text || m.Addressed != c.want {
			t.Errorf("%q with %q: got %+v", c.text, c.trigger, m)
		}
	}
}

// A message that could not be decrypted at first may come after its own edit or
// deletion, and does not undo it.
func TestChangeOvertakesMessage(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		w.alice.Revoke(w.group, "ONE")
		w.alice.SendText(w.group, "@Andy what I regret", watest.ID("ONE"))
		w.alice.Edit(w.group, "TWO", "@Andy right")
		w.alice.SendText(w.group, "@Andy wrong", watest.ID("TWO"))
		w.bob.SendText(w.group, "mine", watest.ID("ONE"))
		first, second := w.message(0), w.message(1)
		w.until("bob's", func() bool { return len(w.messages) >= 3 })
		w.phone.Drained(t.Context())
		texts := w.texts()
		if texts[first.ID] != "[deleted a message]" || texts[second.ID] != "@Andy right" || len(texts) != 3 {
			t.Errorf("got %q", texts)
		}
	})
}

// The end of an earlier connection may be told late, and is not the end of a
// backlog that comes over the new one.
func TestLateDisconnected(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	w.note(func() { w.backlogs = nil })
	cli := w.ch.current()
	w.ch.handle(cli, &events.OfflineSyncPreview{Messages: 2})
	w.ch.handle(cli, &events.Disconnected{})
	w.mu.Lock()
	got := slices.Clone(w.backlogs)
	w.mu.Unlock()
	if !slices.Equal(got, []bool{true}) || w.ch.State().Name != wastate.Connected {
		t.Errorf("got %v, %v", got, w.ch.State())
	}
	w.ch.handle(cli, &events.OfflineSyncCompleted{})
	w.until("the end of the backlog", func() bool { return slices.Equal(w.backlogs, []bool{true, false}) })
}

// Ids are the sender's choice: what is none keeps to its size and place.
func TestOddIDs(t *testing.T) {
	t.Parallel()
	w := inside(t, watest.LID)
	for _, id := range []string{"A/1@lid/B", strings.Repeat("x", 100_000), "a\nb\x1b[31m"} {
		n := len(w.stored())
		w.alice.SendText(w.group, "odd", watest.ID(id))
		m := w.message(n)
		if len(m.ID) > 200 || strings.ContainsAny(m.ID, "\n\x1b") {
			t.Errorf("%.20q is kept as %.100q", id, m.ID)
		}
		if got, _, ok := w.ch.quoted(w.group.JID, m); !ok || n == 0 && got != id {
			t.Errorf("%.20q is quoted as %.100q", id, got)
		}
	}
}

// What was sent again, since one of its readers asked for that, is one message,
// also after it was deleted.
func TestSentAgain(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		id := w.alice.SendText(w.group, "@Andy once")
		m := w.message(0)
		w.alice.Resend(id)
		w.alice.Revoke(w.group, id)
		w.until("the deletion", func() bool { return w.now[m.ID].Text == "[deleted a message]" })
		w.alice.Resend(id)
		w.bob.SendText(w.group, "behind")
		w.message(1)
		w.phone.Drained(t.Context())
		if got := w.texts()[m.ID]; got != "[deleted a message]" || len(w.stored()) != 2 {
			t.Errorf("got %q, %d messages", got, len(w.stored()))
		}
	})
}
