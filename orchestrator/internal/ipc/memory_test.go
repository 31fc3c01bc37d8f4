package ipc

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
	mem "berth/orchestrator/internal/memory"
)

func (w *town) facts(folder string) (out []string) {
	w.t.Helper()
	list, err := w.db.Memories(w.t.Context(), folder)
	check(w.t, err)
	for _, m := range list {
		out = append(out, fmt.Sprint(m.ID, " ", m.Fact))
	}
	return out
}

// Who may remember, change and forget what, whatever the file says that it is.
func TestWhoRemembersForWhom(t *testing.T) {
	w := settle(t)
	for _, c := range []struct{ as, group, folder, reason string }{
		{"other-group", "", "other-group", ""}, {"other-group", "other-group", "other-group", ""},
		{"other-group", "main", "", "about itself only"}, {"other-group", "global", "", "about itself only"}, {"other-group", "../main", "", "about itself only"},
		{"other-group", "nobody", "", "about itself only"}, // as if there were one
		{"main", "", "main", ""}, {"main", "global", "global", ""}, {"main", "third-group", "third-group", ""},
		{"main", "nobody", "", "not registered"}, {"main", "Global", "", "not registered"},
	} {
		fact := fmt.Sprintf("%s for %q", c.as, c.group)
		got := w.ask(c.as, fmt.Sprintf(`{"type":"remember","fact":%q,"group":%q,"groupFolder":"main","isMain":true}`, fact, c.group))
		if c.reason != "" {
			w.denied(got, "ipc.remember", c.as, c.reason)
			continue
		}
		if !got.OK || got.Result["group"] != c.folder || got.Result["fact"] != fact || !strings.Contains(strings.Join(w.facts(c.folder), "\n"), fact) {
			t.Errorf("%s for %q: %+v, %q", c.as, c.group, got, w.facts(c.folder))
		}
	}
	before := map[string][]string{}
	for _, folder := range []string{"main", "global", "other-group"} {
		before[folder] = w.facts(folder)
	}
	for _, c := range []struct{ as, text, reason string }{
		{"third-group", `"memoryId":2`, "no memory 2 of third-group"},
		{"third-group", `"memoryId":1,"group":"main"`, "about itself only"},
		{"third-group", `"memoryId":1,"group":"global"`, "about itself only"},
		{"third-group", `"memoryId":1,"group":"other-group"`, "about itself only"},
		{"main", `"memoryId":1,"group":"nobody"`, "not registered"},
		{"main", `"memoryId":99`, "no memory 99 of main"},
	} {
		w.denied(w.ask(c.as, `{"type":"forget",`+c.text+`}`), "ipc.forget", c.as, c.reason)
		w.denied(w.ask(c.as, `{"type":"update_memory","fact":"evil",`+c.text+`}`), "ipc.update_memory", c.as, c.reason)
	}
	for folder, want := range before {
		if d := cmp.Diff(want, w.facts(folder)); d != "" {
			t.Errorf("%s: %s", folder, d)
		}
	}
	if got := w.ask("main", `{"type":"update_memory","memoryId":"1","group":"other-group","fact":"changed"}`); !got.OK || w.facts("other-group")[0] != "1 changed" {
		t.Errorf("%+v, %q", got, w.facts("other-group"))
	}
	if got := w.ask("other-group", `{"type":"forget","memoryId":1}`); !got.OK || got.Result["fact"] != "changed" || len(w.facts("other-group")) != 1 {
		t.Errorf("%+v, %q", got, w.facts("other-group"))
	}
}

// "  Likes TEA " and "likes tea" are one memory, and a request says so. What
// cannot be one is refused with the reason.
func TestRemember(t *testing.T) {
	w := settle(t)
	got := w.ask("other-group", `{"type":"remember","fact":"  Likes\u0007 TEA "}`)
	if d := cmp.Diff("Likes TEA", got.Result["fact"]); !got.OK || d != "" || got.Result["id"] != 1.0 || got.Result["known"] != nil {
		t.Errorf("%+v", got)
	}
	if got := w.ask("other-group", `{"type":"remember","fact":"likes tea"}`); !got.OK || got.Result["known"] != true || got.Result["id"] != 1.0 || got.Result["fact"] != "Likes TEA" {
		t.Errorf("%+v", got)
	}
	for _, c := range []struct{ text, reason string }{
		{`"fact":""`, "needs the field fact"}, {`"fact":" \n"`, "needs the field fact"}, {`"fact":"\u0007\u200b"`, "is empty"}, {`"fact":7`, "has to be a text"},
		{`"fact":["x"]`, "has to be a text"}, {`"fact":"x","id":9`, `no field "id"`}, {`"fact":"x","source":"main"`, `no field "source"`}, {`"fact":"a\u0000b"`, "zero byte"},
		{`"fact":"` + strings.Repeat("x", 2001) + `"`, "may have 2000"}, {`"fact":"` + strings.Repeat("x", 64<<10+1) + `"`, "may have 65536"},
	} {
		w.denied(w.ask("other-group", `{"type":"remember",`+c.text+`}`), "ipc.remember", "other-group", c.reason)
	}
	for _, text := range []string{`{"type":"forget"}`, `{"type":"forget","memoryId":"x"}`, `{"type":"forget","memoryId":1.5}`, `{"type":"forget","memoryId":-1}`, `{"type":"forget","memoryId":[1]}`, `{"type":"forget","memoryId":1e30}`, `{"type":"forget","memoryId":0}`} {
		w.denied(w.ask("other-group", text), "ipc.forget", "other-group", "memoryId")
	}
	if d := cmp.Diff([]string{"1 Likes TEA"}, w.facts("other-group")); d != "" {
		t.Error(d)
	}
	// The group sees its own and what all know; main what it names as well.
	for folder, fact := range map[string]string{mem.Global: "for all", "main": "of main", "third-group": "of third"} {
		_, _, err := w.db.AddMemory(t.Context(), mem.Memory{Folder: folder, Fact: fact, CreatedAt: time.Now()})
		check(t, err)
	}
	for _, c := range []struct{ as, text, want string }{
		{"other-group", `{"type":"list_memory"}`, "global for all; other-group Likes TEA"},
		{"third-group", `{"type":"list_memory","isMain":true}`, "global for all; third-group of third"},
		{"main", `{"type":"list_memory"}`, "global for all; main of main"},
		{"main", `{"type":"list_memory","group":"third-group"}`, "third-group of third"},
		{"main", `{"type":"list_memory","group":"global"}`, "global for all"},
	} {
		got := w.ask(c.as, c.text)
		var list []string
		for _, m := range got.Result["memories"].([]any) {
			m := m.(map[string]any)
			list = append(list, fmt.Sprint(m["group"], " ", m["fact"]))
		}
		if strings.Join(list, "; ") != c.want {
			t.Errorf("%s %s: %q, want %q", c.as, c.text, list, c.want)
		}
	}
	w.denied(w.ask("other-group", `{"type":"list_memory","group":"third-group"}`), "ipc.list_memory", "other-group", "about itself only")
}

// What was said in a group is found by that group, and by main if it names it.
func TestSearchHistory(t *testing.T) {
	w := settle(t)
	for i, chat := range []string{"main@g.us", "other@g.us", "third@g.us"} {
		_, _, err := w.db.AddMessage(t.Context(), berth.Message{ID: fmt.Sprint(i), ChatJID: chat, SenderName: "Ann", Text: "the word in " + chat, Time: time.Unix(1, 0)})
		check(t, err)
	}
	long := strings.Repeat("before ", 500) + "needle" + strings.Repeat(" after", 500)
	_, _, err := w.db.AddMessage(t.Context(), berth.Message{ID: "long", ChatJID: "other@g.us", SenderName: "Andy", Bot: true, Text: long, Time: time.Unix(2, 0)})
	check(t, err)
	texts := func(a answer) string {
		var out []string
		for _, m := range a.Result["messages"].([]any) {
			out = append(out, m.(map[string]any)["text"].(string))
		}
		return strings.Join(out, "; ")
	}
	for _, c := range []struct{ as, text, want string }{
		{"other-group", `{"type":"search_history","query":"word"}`, "the word in other@g.us"},
		{"other-group", `{"type":"search_history","query":"word","chatJid":"main@g.us"}`, "no field"},
		{"other-group", `{"type":"search_history","query":"third"}`, ""},
		{"main", `{"type":"search_history","query":"word"}`, "the word in main@g.us"},
		{"main", `{"type":"search_history","query":"word","group":"third-group"}`, "the word in third@g.us"},
	} {
		got := w.ask(c.as, c.text)
		if !got.OK {
			w.denied(got, "ipc.search_history", c.as, c.want)
		} else if texts(got) != c.want {
			t.Errorf("%s %s: %q, want %q", c.as, c.text, texts(got), c.want)
		}
	}
	got := w.ask("other-group", `{"type":"search_history","query":"\"NEEDLE\"","limit":"1","before":1000}`)
	text := texts(got)
	if !strings.Contains(text, "before needle after") || !strings.HasPrefix(text, "…") || !strings.HasSuffix(text, "…") || len(text) > 700 || got.Result["messages"].([]any)[0].(map[string]any)["assistant"] != true {
		t.Errorf("%+v", got)
	}
	for _, c := range []struct{ as, text, reason string }{
		{"other-group", `"query":"word","group":"main"`, "about itself only"}, {"other-group", `"query":"word","group":"global"`, "about itself only"},
		{"main", `"query":"word","group":"global"`, "only a group has a history"}, {"main", `"query":"word","group":"nobody"`, "not registered"},
		{"main", `"query":""`, "needs the field query"}, {"main", `"query":"\"( *"`, "names no word"}, {"main", `"query":"x","limit":"many"`, "limit has to be"},
		{"main", `"query":"x","before":{}`, "before has to be"}, {"main", `"query":"` + strings.Repeat("x", 1001) + `"`, "may have 1000"},
	} {
		w.denied(w.ask(c.as, `{"type":"search_history",`+c.text+`}`), "ipc.search_history", c.as, c.reason)
	}
}

func FuzzAround(f *testing.F) {
	f.Add(strings.Repeat("a ", 400)+"needle", `"Needle*"`)
	f.Add(strings.Repeat("İ", 900)+"x", "x")
	f.Add(strings.Repeat("\xff", 900), "")
	f.Fuzz(func(t *testing.T, text, query string) {
		if got := around(text, query); len([]rune(got)) > maxExcerpt+2 {
			t.Fatalf("%d characters", len([]rune(got)))
		}
	})
}
