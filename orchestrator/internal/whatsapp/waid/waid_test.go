package waid

import (
	"errors"
	"strings"
	"testing"

	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"4915112345678@s.whatsapp.net":       "4915112345678@s.whatsapp.net",
		"4915112345678:12@s.whatsapp.net":    "4915112345678@s.whatsapp.net",
		"4915112345678.0:12@s.whatsapp.net":  "4915112345678@s.whatsapp.net",
		"4915112345678.1@s.whatsapp.net":     "4915112345678@s.whatsapp.net",
		"4915112345678@c.us":                 "4915112345678@s.whatsapp.net",
		"4915112345678:99@hosted":            "4915112345678@s.whatsapp.net",
		"100000000000002:99@hosted.lid":      "100000000000002@lid",
		"100000000000002:3@lid":              "100000000000002@lid",
		"120363012345678901@g.us":            "120363012345678901@g.us",
		"4915112345678-1611111111@g.us":      "4915112345678-1611111111@g.us",
		"status@broadcast":                   "status@broadcast",
		"1611111111@broadcast":               "1611111111@broadcast",
		"120363012345678901@newsletter":      "120363012345678901@newsletter",
		"867051314767696@bot":                "867051314767696@bot",
		"":                                   "",
		"@":                                  "",
		"@s.whatsapp.net":                    "",
		"s.whatsapp.net":                     "",
		"4915112345678":                      "",
		"4915112345678@s.whatsapp.net@g.us":  "",
		"4915112345678@evil.example":         "",
		"4915112345678@S.WHATSAPP.NET":       "",
		"4915112345678@s.whatsapp.net ":      "",
		"+4915112345678@s.whatsapp.net":      "",
		"４９１５@s.whatsapp.net":                "",
		"../../etc@g.us":                     "",
		"123-@g.us":                          "",
		"-123@g.us":                          "",
		"1-2-3@g.us":                         "",
		"123:4@g.us":                         "",
		"123:@lid":                           "",
		"123:-1@lid":                         "",
		"123:+1@lid":                         "",
		"123:65536@lid":                      "",
		"123.256@lid":                        "",
		"123:1:2@lid":                        "",
		"12\x003@lid":                        "",
		"tg:12345":                           "",
		strings.Repeat("1", 41) + "@lid":     "",
		strings.Repeat("1", 1<<20) + "@g.us": "",
	} {
		got, err := Parse(text)
		if got.String() != want || (err != nil) != (want == "") {
			t.Errorf("%.60q: got %q, %v, want %q", text, got, err, want)
		}
		if known, ok := errors.AsType[*berth.Error](err); err != nil && (!ok || known.Kind != berth.Invalid || len(known.Text) > 600) {
			t.Errorf("%.60q: %.700v is no short berth.Invalid", text, err)
		}
	}
}

func TestWA33to36Ownership(t *testing.T) {
	for chat, want := range map[string]bool{
		"120363012345678901@g.us":       true,
		"4915112345678@s.whatsapp.net":  true,
		"100000000000002@lid":           true,
		"tg:12345":                      false,
		"random-string":                 false,
		"console:main":                  false,
		"4915112345678:1@lid":           false, // never the name of a chat
		"4915112345678@c.us":            false,
		"120363012345678901@newsletter": false,
		"1611111111@broadcast":          false,
		"13135550002@s.whatsapp.net":    false,
		"0@s.whatsapp.net":              false,
		"16505361212@s.whatsapp.net":    false,
	} {
		if got := Owns(chat); got != want {
			t.Errorf("%q: got %v, want %v", chat, got, want)
		}
	}
}

func TestWA13StatusIsNotServed(t *testing.T) {
	if Served(types.StatusBroadcastJID) || Served(types.EmptyJID) || Served(types.GroupServerJID) || Served(types.NewMetaAIJID) {
		t.Error("the status, nobody, a server or a bot is served")
	}
	if !Served(types.NewADJID("4915112345678", types.LIDDomain, 7)) {
		t.Error("a person's device is not served")
	}
}

func TestWA20to22Chat(t *testing.T) {
	numbers := func(lid types.JID) types.JID {
		switch lid.User {
		case "100000000000002":
			return types.NewADJID("4915112345678", 0, 3)
		case "100000000000009":
			return types.NewJID("../x", types.DefaultUserServer)
		}
		return types.JID{}
	}
	for _, c := range []struct{ id, chat, want string }{
		{"WA-20", "100000000000002@lid", "4915112345678@s.whatsapp.net"},
		{"WA-21", "4917112345678@s.whatsapp.net", "4917112345678@s.whatsapp.net"},
		{"WA-21", "120363012345678901@g.us", "120363012345678901@g.us"},
		{"WA-22", "100000000000003@lid", "100000000000003@lid"},
		{"a hostile number", "100000000000009@lid", "100000000000009@lid"},
	} {
		chat, err := Parse(c.chat)
		if err != nil {
			t.Fatal(err)
		}
		if got := Chat(chat, numbers); got != c.want {
			t.Errorf("%s: got %q, want %q", c.id, got, c.want)
		}
		if got := Chat(chat, nil); got != c.chat {
			t.Errorf("%s without numbers: got %q, want %q", c.id, got, c.chat)
		}
		if got, want := IsGroup(chat), strings.HasSuffix(c.chat, "@g.us"); got != want {
			t.Errorf("%s: group is %v, want %v", c.id, got, want)
		}
	}
}

func TestPerson(t *testing.T) {
	lid, pn := types.NewADJID("100000000000002", types.LIDDomain, 3), types.NewADJID("4915112345678", 0, 3)
	for _, c := range []struct {
		sender, alt types.JID
		id, number  string
	}{
		{lid, pn, "100000000000002@lid", "+4915112345678"},
		{pn, lid, "100000000000002@lid", "+4915112345678"},
		{pn, types.JID{}, "4915112345678@s.whatsapp.net", "+4915112345678"},
		{lid, types.JID{}, "100000000000002@lid", ""},
		{lid, types.NewJID("5", types.HiddenUserServer), "100000000000002@lid", ""},
		{types.NewJID("../..", types.HiddenUserServer), pn, "4915112345678@s.whatsapp.net", "+4915112345678"},
		{types.JID{}, types.StatusBroadcastJID, "", ""},
	} {
		p := NewPerson(c.sender, c.alt)
		if p.ID() != c.id || p.Number() != c.number {
			t.Errorf("%v, %v: got %q and %q, want %q and %q", c.sender, c.alt, p.ID(), p.Number(), c.id, c.number)
		}
	}
	us := NewPerson(lid, pn)
	if !us.Is(types.NewJID("100000000000002", types.HiddenUserServer)) || !us.Is(types.NewJID("4915112345678", types.LegacyUserServer)) {
		t.Error("a person is not known by the other form of an address")
	}
	if us.Is(types.NewJID("4915112345678", types.HiddenUserServer)) || us.Is(types.JID{}) || (Person{}).Is(types.JID{}) {
		t.Error("a number of the same digits on another server, or nobody, is taken for the person")
	}
}

// What Parse accepts is a plain address: it reads the same again, and is safe
// in a file name or a line of a log.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"4915112345678.0:12@s.whatsapp.net", "123:4@lid", "1-2@g.us", "status@broadcast", "1@newsletter", "1@hosted", "a.b:c@d", "1@2@3", "",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		j, err := Parse(text)
		if err != nil {
			if !j.IsEmpty() {
				t.Errorf("%q: refused and yet %q", text, j)
			}
			if Owns(text) {
				t.Errorf("%q: owned, though no address", text)
			}
			return
		}
		if j != Normal(j) || j.Device != 0 || j.RawAgent != 0 {
			t.Errorf("%q: %#v is not normal", text, j)
		}
		again, err := Parse(j.String())
		if err != nil || again != j {
			t.Errorf("%q: %q reads as %q, %v", text, j, again, err)
		}
		if theirs, err := types.ParseJID(text); err != nil || !Same(theirs, j) {
			t.Errorf("%q: whatsmeow reads %q, %v; we %q", text, theirs, err, j)
		}
		if strings.Trim(j.String(), "0123456789-@.abcdefghijklmnopqrstuvwxyz") != "" {
			t.Errorf("%q: %q holds an odd character", text, j)
		}
		if got := Chat(j, nil); Served(j) != Owns(got) {
			t.Errorf("%q: served is %v, owned %v", text, Served(j), Owns(got))
		}
	})
}
