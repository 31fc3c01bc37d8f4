package berth

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

func TestGF01ValidFolders(t *testing.T) {
	for name, want := range map[string]bool{
		"main": true, "family-chat": true, "Team_42": true, "9": true, strings.Repeat("x", 64): true,
		"../../etc": false, "/tmp": false, "global": false, "GLOBAL": false, "errors": false, "": false, " a": false, "a ": false,
		`a\b`: false, "-a": false, "_a": false, ".a": false, "a\n": false, "é": false, strings.Repeat("x", 65): false,
	} {
		if got := ValidFolder(name) == nil; got != want {
			t.Errorf("%q: got %v, want %v", name, got, want)
		}
	}
}

// FM-18 to FM-27, and W60: names that end in a letter which \b does not know.
func TestTriggered(t *testing.T) {
	for _, c := range []struct {
		id, text, trigger string
		want              bool
	}{
		{"FM-18", "@Andy hello", "@Andy", true},
		{"FM-19", "@andy hello", "@Andy", true},
		{"FM-19", "@ANDY hello", "@Andy", true},
		{"FM-20", "hello @Andy", "@Andy", false},
		{"FM-21", "@Andyextra hello", "@Andy", false},
		{"FM-21", "@Andy_ hello", "@Andy", false},
		{"FM-21", "@Andy2 hello", "@Andy", false},
		{"FM-22", "@Andy's thing", "@Andy", true},
		{"FM-23", "@Andy", "@Andy", true},
		{"FM-24", "  @Andy hey", "@Andy", true},
		{"FM-25", "@Claw hello", "@Claw", true},
		{"FM-25", "@Andy hello", "@Claw", false},
		{"FM-27", "@C.L.A.U.D.E hello", "@C.L.A.U.D.E", true},
		{"FM-27", "@CXLXAUXDXE hello", "@C.L.A.U.D.E", false},
		{"W60", "@Café hello", "@Café", true},
		{"W60", "@CAFÉ, hello", "@Café", true},
		{"W60", "@小爪 hi", "@小爪", true},
		{"W60", "@🤖 hi", "@🤖", true},
		{"W60", "@Bot! hi", "@Bot!", true},
		{"empty trigger", "hi", "", false},
		{"empty text", "", "@Andy", false},
		{"broken UTF-8", "@And\xff", "@Andy", false},
	} {
		if got := Triggered(c.text, c.trigger); got != c.want {
			t.Errorf("%s: %q with %q: got %v, want %v", c.id, c.text, c.trigger, got, c.want)
		}
	}
}

func FuzzTriggered(f *testing.F) {
	f.Add("@Andy hello", "@Andy")
	f.Add("@ſ", "@s")
	f.Fuzz(func(t *testing.T, text, trigger string) {
		if Triggered(text, trigger) && strings.TrimSpace(trigger) == "" {
			t.Error("an empty trigger fired")
		}
	})
}

// FM-26: none set, or blank.
func TestEffectiveTrigger(t *testing.T) {
	for given, want := range map[string]string{"": "@Andy", "  ": "@Andy", " @Claw ": "@Claw"} {
		if got := (Group{Trigger: given}).EffectiveTrigger("Andy"); got != want {
			t.Errorf("%q: got %q, want %q", given, got, want)
		}
	}
}

// FM-35 to FM-42.
func TestNeedsTrigger(t *testing.T) {
	for _, c := range []struct {
		g    Group
		want bool
	}{
		{Group{Folder: "main"}, false},
		{Group{Folder: "main", RequiresTrigger: true}, false},
		{Group{Folder: "family", RequiresTrigger: true}, true},
		{Group{Folder: "family"}, false},
	} {
		if got := c.g.NeedsTrigger(); got != c.want {
			t.Errorf("%+v: got %v", c.g, got)
		}
	}
}

// MS-07: only the boolean false asks for writing.
func TestMS07ReadOnlyUnlessFalse(t *testing.T) {
	for text, want := range map[string]bool{`false`: false, `true`: true, `"false"`: true, `0`: true, `null`: true, `{}`: true} {
		var m MountRequest
		if err := json.Unmarshal([]byte(`{"hostPath":"/x","readonly":`+text+`}`), &m); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		if got := m.ReadOnly == nil || *m.ReadOnly; got != want {
			t.Errorf("%s: read-only %v, want %v", text, got, want)
		}
	}
}

func TestValidText(t *testing.T) {
	for text, want := range map[string]bool{
		"hi": true, "": false, " \n\t": false, "a\x00b": false, "\xff": false,
		strings.Repeat("x", MaxText): true, strings.Repeat("x", MaxText+1): false,
	} {
		if got := ValidText(text) == nil; got != want {
			t.Errorf("%.10q: got %v, want %v", text, got, want)
		}
	}
}

func TestErrorKeepsItsCause(t *testing.T) {
	cause := errors.New("cause")
	err := Errorf(Denied, "no: %w", cause)
	if e, ok := errors.AsType[*Error](err); !ok || e.Kind != Denied || !errors.Is(err, cause) || err.Error() != "no: cause" {
		t.Errorf("got %#v", err)
	}
}
