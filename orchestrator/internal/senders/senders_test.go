package senders

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// files is a list in a fresh folder.
type files struct {
	Options
	*List
}

func newFiles(t testing.TB, text string) *files {
	t.Helper()
	dir := t.TempDir()
	f := &files{Options: Options{File: filepath.Join(dir, "senders.json"), Kept: filepath.Join(dir, "kept.json")}}
	if text != "" {
		f.write(t, text)
	}
	f.restart()
	return f
}

func (f *files) restart() { f.List = New(f.Options) }

func (f *files) write(t testing.TB, text string) {
	t.Helper()
	if err := os.WriteFile(f.File, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (f *files) remove(t testing.TB) {
	t.Helper()
	if err := os.Remove(f.File); err != nil {
		t.Fatal(err)
	}
}

func (f *files) want(t *testing.T, chat, sender string, want Verdict) {
	t.Helper()
	if got := f.Decide(chat, "folder-of-"+chat, sender); got != want {
		t.Errorf("%s in %s: got %v, want %v (alarm %q)", sender, chat, got, want, f.Alarm())
	}
}

func (f *files) wantAlarm(t *testing.T, want string) {
	t.Helper()
	got := f.Alarm()
	if want == "" && got != "" || !strings.Contains(got, want) || strings.Contains(got, "\n") {
		t.Errorf("got alarm %q, want %q in it", got, want)
	}
}

// SA-02: everybody is let in.
func TestSA02Everybody(t *testing.T) {
	f := newFiles(t, `{"default": {"allow": "*", "mode": "trigger"}, "chats": {}, "logDenied": false}`)
	f.want(t, "g1", "alice", Allowed)
	if f.LogDenied() {
		t.Error("denied senders are logged")
	}
	f.wantAlarm(t, "")
}

// SA-03: an empty list lets nobody in.
func TestSA03Nobody(t *testing.T) {
	f := newFiles(t, `{"default": {"allow": [], "mode": "trigger"}}`)
	f.want(t, "g1", "alice", Context)
	f.want(t, "g1", "", Context)
	if !f.LogDenied() {
		t.Error("denied senders are not logged, want the default")
	}
}

// SA-04, SA-10, SA-11, SA-12: a list lets in whom it names, exactly.
func TestSA12List(t *testing.T) {
	f := newFiles(t, `{"default": {"allow": ["alice"], "mode": "drop"}}`)
	f.want(t, "g1", "alice", Allowed)
	f.want(t, "g1", "eve", Drop)
	f.want(t, "g1", "Alice", Drop)
	f.want(t, "g1", "alice2", Drop)
	f.want(t, "g1", "", Drop)
}

// SA-05, SA-13 to SA-18: a chat's own entry goes before the default.
func TestSA13ChatBeforeDefault(t *testing.T) {
	f := newFiles(t, `{"default": {"allow": ["bob"], "mode": "trigger"}, "chats": {
		"g1@g.us": {"allow": ["alice"], "mode": "drop"}, "family": {"allow": ["carol"]}, "g3@g.us": {"allow": "*"}}}`)
	f.want(t, "g1@g.us", "bob", Drop)
	f.want(t, "g1@G.US", "alice", Allowed)
	f.want(t, "g2@g.us", "bob", Allowed)
	f.want(t, "g2@g.us", "eve", Context)
	f.want(t, "g3@g.us", "eve", Allowed)
	for sender, want := range map[string]Verdict{"carol": Allowed, "bob": Context} {
		if got := f.Decide("g4@g.us", "family", sender); got != want {
			t.Errorf("%s by the folder: got %v, want %v", sender, got, want)
		}
	}
	if got := f.Decide("g1@g.us", "family", "carol"); got != Drop {
		t.Errorf("got %v, want the chat's id to go before its folder", got)
	}
}

// SA-09: one bad entry closes its chat; the good ones are kept.
func TestSA09OneBadEntry(t *testing.T) {
	for name, bad := range map[string]string{
		"mode":        `{"allow": "*", "mode": "open"}`,
		"mode's type": `{"allow": "*", "mode": 1}`,
		"allow":       `{"allow": "everybody"}`,
		"no allow":    `{"mode": "drop"}`,
		"null":        `{"allow": null}`,
		"a number":    `{"allow": [1]}`,
		"star":        `{"allow": ["*"]}`,
		"blank":       `{"allow": [" "]}`,
		"no object":   `"*"`,
	} {
		t.Run(name, func(t *testing.T) {
			f := newFiles(t, `{"default": {"allow": "*"}, "chats": {"bad@g.us": `+bad+`, "good@g.us": {"allow": ["alice"]}}}`)
			f.want(t, "bad@g.us", "alice", Drop)
			f.want(t, "good@g.us", "alice", Allowed)
			f.want(t, "good@g.us", "eve", Context)
			f.wantAlarm(t, "bad@g.us")
		})
	}
	f := newFiles(t, `{"default": {"allow": "*"}, "chats": {"a@s.whatsapp.net": {"allow": "*"}, "a:7@s.whatsapp.net": {"allow": []}}}`)
	f.want(t, "a@s.whatsapp.net", "eve", Drop)
	f.wantAlarm(t, "twice")
}

func TestIDs(t *testing.T) {
	f := newFiles(t, `{"default": {"allow": ["+49 (151) 234-567", "77@lid", "console:Ann"], "mode": "drop"}}`)
	for _, id := range []string{"49151234567@s.whatsapp.net", "49151234567:12@S.WhatsApp.net", "77:3@lid", " console:Ann "} {
		f.want(t, "g", id, Allowed)
	}
	for _, id := range []string{"49151234567@lid", "149151234567@s.whatsapp.net", "49151234567", "console:ann", "77@s.whatsapp.net"} {
		f.want(t, "g", id, Drop)
	}
	if got := f.Decide("g", "f", "unknown@lid", "49151234567@s.whatsapp.net"); got != Allowed {
		t.Errorf("got %v, want another id of the sender to do", got)
	}
}

func TestNoFileIsNoList(t *testing.T) {
	f := newFiles(t, "")
	f.want(t, "g", "anybody", Allowed)
	f.wantAlarm(t, "")
	f.write(t, `{"default": {"allow": []}}`)
	f.want(t, "g", "anybody", Context)

	f = newFiles(t, "")
	f.Required = true
	f.restart()
	f.want(t, "g", "anybody", Context)
	f.wantAlarm(t, "it is gone")
}

// W53: the ancestors let everybody in when the list was missing, unreadable or
// broken.
func TestW53BrokenListLetsNobodyIn(t *testing.T) {
	good := `{"default": {"allow": ["alice"], "mode": "drop"}}`
	for name, tt := range map[string]struct {
		spoil func(*testing.T, *files)
		want  string // in the alarm
	}{
		"empty":            {func(t *testing.T, f *files) { f.write(t, "") }, "empty"},
		"not JSON":         {func(t *testing.T, f *files) { f.write(t, "{\n{") }, "line 2"},
		"null":             {func(t *testing.T, f *files) { f.write(t, "null") }, `"default" is missing`},
		"list":             {func(t *testing.T, f *files) { f.write(t, "[]") }, "JSON"},
		"no default":       {func(t *testing.T, f *files) { f.write(t, `{"chats": {}}`) }, `"default" is missing`},
		"bad default":      {func(t *testing.T, f *files) { f.write(t, `{"default": {"allow": 1}}`) }, `"default": `},
		"bad chats":        {func(t *testing.T, f *files) { f.write(t, `{"default": {"allow": "*"}, "chats": []}`) }, "an object would be right"},
		"misspelt chats":   {func(t *testing.T, f *files) { f.write(t, `{"default": {"allow": "*"}, "chat": {}}`) }, `"chat" means nothing`},
		"misspelt mode":    {func(t *testing.T, f *files) { f.write(t, `{"default": {"allow": "*", "mod": "drop"}}`) }, `"mod" means nothing`},
		"default twice":    {func(t *testing.T, f *files) { f.write(t, `{"default": {"allow": []}, "Default": {"allow": "*"}}`) }, "twice"},
		"10 MB":            {func(t *testing.T, f *files) { f.write(t, `{"default": {"allow": "*"}}`+strings.Repeat(" ", 10<<20)) }, "1 MiB"},
		"removed":          {func(t *testing.T, f *files) { f.remove(t) }, "gone"},
		"others write it":  {func(t *testing.T, f *files) { must(t, os.Chmod(f.File, 0o666)) }, "chmod 600"},
		"leads nowhere":    {func(t *testing.T, f *files) { f.remove(t); must(t, os.Symlink("none", f.File)) }, "leads nowhere"},
		"leads to itself":  {func(t *testing.T, f *files) { f.remove(t); must(t, os.Symlink(f.File, f.File)) }, "symbolic links"},
		"a folder instead": {func(t *testing.T, f *files) { f.remove(t); must(t, os.Mkdir(f.File, 0o700)) }, "regular file"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFiles(t, good)
			f.want(t, "g", "eve", Drop)
			tt.spoil(t, f)
			for range 2 { // before and after a restart
				f.want(t, "g", "eve", Drop)
				f.want(t, "g", "alice", Allowed)
				f.wantAlarm(t, tt.want)
				f.wantAlarm(t, "last good")
				f.restart()
			}

			never := newFiles(t, good)
			tt.spoil(t, never)
			if _, err := os.Lstat(never.File); err != nil {
				return // no file and no list
			}
			never.want(t, "g", "alice", Context)
			never.wantAlarm(t, "no message wakes")
			if Check(never.Options) == nil {
				t.Error("Check finds nothing wrong")
			}
		})
	}
}

// W53: not even the copy of the last good list has to be usable.
func TestW53BrokenCopy(t *testing.T) {
	f := newFiles(t, "")
	must(t, os.WriteFile(f.Kept, []byte("{"), 0o600))
	f.want(t, "g", "alice", Context)
	f.write(t, `{"default": {"allow": ["alice"]}}`)
	f.want(t, "g", "alice", Allowed)
	f.remove(t)
	f.restart()
	f.want(t, "g", "alice", Allowed)
	f.want(t, "g", "eve", Context)
}

// An edit counts at once, also one of the same size within the clock's tick.
func TestEditsCountAtOnce(t *testing.T) {
	f := newFiles(t, "")
	for i := range 50 {
		name := fmt.Sprintf("u%02d", i)
		f.write(t, `{"default": {"allow": ["`+name+`"]}}`)
		f.want(t, "g", name, Allowed)
		f.want(t, "g", "u99", Context)
	}
	f.wantAlarm(t, "")
}

// A list that rests is not read again: messages come by the thousand.
func TestRestingFileIsNotRead(t *testing.T) {
	f := newFiles(t, `{"default": {"allow": ["alice"]}}`)
	now := stateOf(f.File, time.Now().Add(settled+time.Second))
	f.want(t, "g", "alice", Allowed)
	f.mu.Lock()
	f.seen, f.last = now, open
	f.mu.Unlock()
	f.now = func() time.Time { return time.Now().Add(2 * settled) }
	f.want(t, "g", "eve", Allowed) // by what we put there: the file was not read
	must(t, os.Chmod(f.File, 0o640))
	f.want(t, "g", "eve", Context)
}

// One that was just written is read again, whatever its time stamp says: the
// clock of a file system may be coarse.
func TestFreshFileIsReadAgain(t *testing.T) {
	f := newFiles(t, `{"default": {"allow": ["alice"]}}`)
	f.want(t, "g", "alice", Allowed)
	f.mu.Lock()
	f.last = open
	f.mu.Unlock()
	f.want(t, "g", "eve", Context)
}

func TestAnswerOnce(t *testing.T) {
	f := newFiles(t, "")
	for _, tt := range []struct {
		chat, sender string
		want         bool
	}{
		{"g", "eve", true}, {"g", "eve", false}, {"g", " eve", false}, {"h", "eve", true}, {"g", "mal", true}, {"h", "eve", false},
	} {
		if got := f.AnswerOnce(tt.chat, tt.sender); got != tt.want {
			t.Errorf("%s in %s: got %v, want %v", tt.sender, tt.chat, got, tt.want)
		}
	}
	for i := range 2 * maxAnswered {
		f.AnswerOnce("flood", fmt.Sprint(i))
	}
	if len(f.answered) != maxAnswered || f.AnswerOnce("g", "new") || f.AnswerOnce("g", "eve") {
		t.Errorf("%d senders are remembered, want %d, and no more answers", len(f.answered), maxAnswered)
	}
}

func TestManyAtOnce(t *testing.T) {
	f := newFiles(t, `{"default": {"allow": ["alice"], "mode": "drop"}}`)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 200 {
				if f.Decide("g", "f", "eve") == Allowed {
					t.Error("eve is allowed")
				}
				f.AnswerOnce("g", fmt.Sprint(i))
				_ = f.Alarm()
			}
		})
	}
	for i := range 50 {
		f.write(t, `{"default": {"allow": ["alice"], "mode": "drop"}}`[:i%2*20]+`{"default": {"allow": ["alice"], "mode": "drop"}}`)
	}
	wg.Wait()
}

// FuzzParse: whoever is let in stands in the file.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		`{"default": {"allow": "*"}}`, `{"default": {"allow": [], "mode": "drop"}, "chats": {"g": {"allow": ["a"]}}}`,
		`{"default": {"allow": ["\u002a"]}}`, `{"default": {"allow": "\u002a"}, "chats": {"g": 1}}`, `{"Default": {"Allow": ["+1"], "MODE": "trigger"}}`,
		`{"default": {"allow": []}, "default": {"allow": "*"}}`, `{"default": {"allow": []}, "$x": {"allow": "*"}}`, `[[[[`, ``, `{"default": null}`,
	} {
		f.Add([]byte(seed), "g", "a")
	}
	f.Fuzz(func(t *testing.T, data []byte, chat, sender string) {
		l, err := parse(data)
		if (err == nil) != (l != nil) {
			t.Fatalf("got %v and %v", l, err)
		}
		if err != nil {
			return
		}
		for name, e := range l.chats {
			if name == "" && e.any {
				t.Error("a chat without a name lets everybody in")
			}
		}
		e, ok := l.chats[canonical(chat)]
		if !ok {
			e = l.def
		}
		if got := canonical(canonical(sender)); got != canonical(sender) {
			t.Errorf("%q has the spellings %q and %q", sender, canonical(sender), got)
		}
		if e.any && !strings.ContainsAny(string(data), `*\`) {
			t.Error("everybody is let in, and the file does not say so")
		}
		if e.allow[""] || e.allow["*"] {
			t.Error("nobody in particular is let in")
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
