package senders

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A sender is put where the decision about the chat is taken, counts from then
// on, and nothing else of the file changes.
func TestAdd(t *testing.T) {
	o := Options{File: filepath.Join(t.TempDir(), "list.json")}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(o.File, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	add := func(chat, folder, sender string, there bool, fault string) {
		t.Helper()
		got, err := Add(o, chat, folder, sender)
		if got != there || (err != nil) != (fault != "") || err != nil && !strings.Contains(err.Error(), fault) {
			t.Errorf("%s in %s: %v, %v, want %v, %q", sender, chat, got, err, there, fault)
		}
		if fault == "" && New(o).Decide(chat, folder, sender) != Allowed {
			t.Errorf("%s does not count in %s", sender, chat)
		}
	}
	add("a@g.us", "a", "1@lid", true, "") // no list: everybody counts
	if _, err := os.Stat(o.File); err == nil {
		t.Error("a list was made")
	}
	o.Required = true
	add("a@g.us", "a", "1@lid", false, "it is not there")
	o.Required = false

	write(`{"_note": "mine", "default": {"allow": []}, "chats": {"a/~b@G.us": {"allow": ["9@lid"], "mode": "drop"}, "work": {"allow": "*"}, "shut": {"allow": 7}}}`)
	add("x@g.us", "x", "1:5@lid", false, "")
	add("x@g.us", "x", "1@lid", true, "")
	add("a/~b@g.us", "a", "2@lid", false, "")
	add("w@g.us", "work", "3@lid", true, "")
	add("s@g.us", "shut", "3@lid", false, "has a fault")
	for _, bad := range []string{"", " ", "*", "a\nb", strings.Repeat("x", 300)} {
		add("x@g.us", "x", bad, false, "is no sender")
	}
	data, err := os.ReadFile(o.File)
	if err != nil || strings.Count(string(data), "1@lid") != 1 || !strings.Contains(string(data), `"mine"`) || strings.Contains(string(data), "3@lid") {
		t.Errorf("%s, %v", data, err)
	}
	l := New(o)
	if l.Decide("a/~b@g.us", "a", "1@lid") != Drop || l.Decide("a/~b@g.us", "a", "9@lid") != Allowed || l.Decide("x@g.us", "x", "2@lid") != Context {
		t.Errorf("others are let in too: %s", data)
	}
	write(`{"default": {"allow": ["1@lid"]`)
	add("x@g.us", "x", "2@lid", false, "not usable JSON")
	write(`{"default": {"allow": []}}`)
	if err := os.Chmod(o.File, 0o666); err != nil {
		t.Fatal(err)
	}
	add("x@g.us", "x", "2@lid", false, "others than its owner can write it")
}
