package command

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/memory"
	"berth/orchestrator/internal/pairing"
	"berth/orchestrator/internal/sqlite"
)

var _ Pairing = (*pairing.Desk)(nil)

// daemon is a Host, a Memory and a Pairing that tells what it was asked.
type daemon struct {
	asked    []string
	fail     error
	running  bool
	states   map[string]Status
	tasks    []berth.Task
	used     []berth.Usage
	memories map[string][]memory.Memory
}

func (d *daemon) note(format string, args ...any) error {
	d.asked = append(d.asked, fmt.Sprintf(format, args...))
	return d.fail
}

func (d *daemon) Group(folder string) (berth.Group, bool) {
	for _, g := range d.Groups() {
		if g.Folder == folder {
			return g, true
		}
	}
	return berth.Group{}, false
}

func (d *daemon) Groups() []berth.Group {
	return []berth.Group{{Folder: "family", JID: "family@g.us"}, {Folder: "main", JID: "main@g.us"}, {Folder: "work", JID: "work@g.us", Trigger: "@Büro"}}
}

func (d *daemon) Status(context.Context) (map[string]Status, error) {
	return d.states, d.note("status")
}
func (d *daemon) Stop(_ context.Context, folder string) (bool, error) {
	return d.running, d.note("stop %s", folder)
}
func (d *daemon) NewSession(_ context.Context, folder string) error { return d.note("new %s", folder) }
func (d *daemon) Compact(_ context.Context, folder string, m berth.Message) (bool, error) {
	return d.running, d.note("compact %s for %s", folder, m.ChatJID)
}
func (d *daemon) Tasks(_ context.Context, folder string) ([]berth.Task, error) {
	return d.tasks, d.note("tasks %s", folder)
}
func (d *daemon) Usage(_ context.Context, folder string) ([]berth.Usage, error) {
	return d.used, d.note("usage %s", folder)
}
func (d *daemon) AddMemory(_ context.Context, m memory.Memory) (memory.Memory, bool, error) {
	known := false
	for _, have := range d.memories[m.Folder] {
		known = known || memory.Normal(have.Fact) == memory.Normal(m.Fact)
	}
	return m, known, d.note("remember %s %q from %s by %s", m.Folder, m.Fact, m.Source, m.Origin)
}
func (d *daemon) ForgetMemory(_ context.Context, folder string, id int64, origin string) (memory.Memory, error) {
	err := d.note("forget %s %d by %s", folder, id, origin)
	if err == nil && id != 3 {
		err = berth.Errorf(berth.NotFound, "there is no memory")
	}
	return memory.Memory{}, err
}
func (d *daemon) Memories(_ context.Context, folder string) ([]memory.Memory, error) {
	return d.memories[folder], d.note("memory %s", folder)
}
func (d *daemon) Pair(_ context.Context, a pairing.Attempt) (string, error) {
	return "paired", d.note("pair %s %s %s %q", a.ChatJID, a.Folder, a.Sender, a.Token)
}

func (d *daemon) last() string {
	if len(d.asked) == 0 {
		return ""
	}
	return d.asked[len(d.asked)-1]
}

func (d *daemon) say(t *testing.T, folder, text string, allowed bool) (string, bool, error) {
	t.Helper()
	h := Handler{Host: d, Memory: d, Pairing: d, Assistant: "Andy", Location: time.UTC}
	g, _ := d.Group(folder)
	return h.Handle(t.Context(), Call{
		Message: berth.Message{ID: "m1", ChatJID: g.JID, Sender: "1@lid", SenderName: "Ann", Text: text}, Group: g, Allowed: allowed,
	})
}

// B-WA-3, and the others: what each does in a group, and what it says.
func TestCommands(t *testing.T) {
	now := time.Now()
	d := &daemon{
		running: true,
		states: map[string]Status{
			"family": {State: berth.RunBusy, Since: now.Add(-90 * time.Second), Pending: 2}, "work": {Waits: 3},
			"main": {Error: "no\nkey", GivenUp: true},
		},
		tasks: []berth.Task{
			{ID: "t1", Prompt: "water\nthe plants", Kind: "cron", Value: "0 9 * * *", Zone: "Europe/Berlin", Status: berth.TaskActive, NextRun: time.Date(2026, 3, 2, 8, 0, 0, 0, time.UTC)},
			{ID: "t2", Prompt: "p", Kind: "interval", Value: "60000", Status: berth.TaskPaused},
		},
		used:     []berth.Usage{{Provider: "anthropic", Model: "m", Requests: 2, Input: 10, CacheRead: 5, Output: 7, Estimated: true}},
		memories: map[string][]memory.Memory{"family": {{ID: 3, Fact: "likes tea"}}, memory.Global: {{ID: 1, Fact: "closed on Sundays"}}},
	}
	for _, c := range []struct{ folder, text, asked, reply string }{
		{"family", "/help", "", "Commands:\n/help - this list\n/status - "},
		{"family", " /STATUS ", "status", "Busy for 1m30s, 2 messages to be answered"},
		{"main", "/status", "status", "Family: busy for 1m30s, 2 messages to be answered\nmain: no container runs, given up until the next message, last error: no key\nwork: waits for a free container, place 3"},
		{"main", "/status work", "status", "Work: waits for a free container, place 3"},
		{"family", "/stop", "stop family", "Stopped. The conversation is kept."},
		{"main", "/stop work", "stop work", "Stopped."},
		{"family", "/stop family", "stop family", "Stopped."},
		{"family", "/stop work", "", "Only the main group may name another group"},
		{"family", "/new main", "", "Only the main group may name another group"},
		{"main", "/stop nobody", "", "There is no group \"nobody\""},
		{"family", "/new", "new family", "Started a new conversation session."},
		{"family", "/compact", "compact family for family@g.us", "I will make the conversation shorter, and say what came of it."},
		{"main", "/compact work", "compact work for main@g.us", "I will make the conversation shorter"},
		{"family", "/compact work", "", "Only the main group may name another group"},
		{"family", "@Andy /new", "new family", "Started a new conversation session."},
		{"family", "@andy: /New", "new family", "Started a new conversation session."},
		{"work", "@BÜRO, /new", "new work", "Started a new conversation session."},
		{"family", "/tasks", "tasks family", "t1: water the plants (cron 0 9 * * *), next Mon 2026-03-02 09:00 CET\nt2: p (interval 60000), paused"},
		{"family", "/remember  two\nlines ", `remember family "two\nlines" from Ann by command/family@g.us/m1`, "Saved to long-term memory."},
		{"family", "/remember LIKES tea", `remember family "LIKES tea" from Ann by command/family@g.us/m1`, "Skipped: similar fact already exists."},
		{"family", "/remember", "", "Usage: /remember <text>"},
		{"family", "/memory", "memory family", "for all groups: closed on Sundays\n3: likes tea"},
		{"main", "/memory family", "memory family", "3: likes tea"},
		{"main", "/memory global", "memory global", "for all groups: closed on Sundays"},
		{"family", "/memory main", "", "Only the main group"},
		{"family", "/memory global", "", "Only the main group"},
		{"work", "/memory work", "memory work", "No saved durable facts."},
		{"family", "/forget 3", "forget family 3 by command/family@g.us/m1", "Memory 3 deleted."},
		{"family", "/forget #4", "forget family 4 by command/family@g.us/m1", "Memory 4 not found."},
		{"family", "/forget", "", "Usage: /forget <id>"}, {"family", "/forget tea", "", "Usage: /forget <id>"}, {"family", "/forget -1", "", "Usage: /forget <id>"},
		{"family", "/usage", "usage family", "anthropic m: 2 requests, about 15 tokens in, 7 out"},
		{"family", "/pair secret token", `pair family@g.us family 1@lid "secret token"`, "paired"},
		{"", "/pair secret", `pair   1@lid "secret"`, "paired"},
	} {
		d.asked = nil
		reply, handled, err := d.say(t, c.folder, c.text, true)
		if !handled || err != nil || !strings.HasPrefix(reply, c.reply) || d.last() != c.asked {
			t.Errorf("%s in %s: %q, %v, %v, asked for %q; want %q, %q", c.text, c.folder, reply, handled, err, d.asked, c.reply, c.asked)
		}
	}
	d.running, d.tasks, d.used = false, nil, nil
	for text, want := range map[string]string{"/stop": "Nothing is running.", "/tasks": "No scheduled tasks found.", "/usage": "Nothing was used today."} {
		if reply, _, err := d.say(t, "family", text, true); reply != want || err != nil {
			t.Errorf("%s: %q, %v", text, reply, err)
		}
	}
	if reply, _, _ := d.say(t, "main", "/help", true); !strings.Contains(reply, "take the folder of another group") {
		t.Errorf("main's help: %q", reply)
	}
}

// What is no command, or not this sender's, is a message like any other. A token
// never is: it must come to no store and no agent.
func TestNoCommands(t *testing.T) {
	d := &daemon{}
	for _, text := range []string{"", "/", "hello", "see /help", "/helpme", "/unknown x", "//help", "/ help", "@Andy hello /stop", "@Andyman /stop", "@Bob /stop", "/stop@work", "\\/stop"} {
		if reply, handled, err := d.say(t, "family", text, true); handled || reply != "" || err != nil {
			t.Errorf("%q: %q, %v", text, reply, err)
		}
	}
	for _, c := range commands() {
		if reply, handled, err := d.say(t, "family", "/"+c.name+" 3", false); handled || reply != "" || err != nil {
			t.Errorf("/%s of a stranger: %q, %v", c.name, reply, err)
		}
		if reply, handled, err := d.say(t, "", "/"+c.name, true); handled || reply != "" || err != nil {
			t.Errorf("/%s in an unregistered chat: %q, %v", c.name, reply, err)
		}
	}
	if len(d.asked) > 0 {
		t.Errorf("asked for %q", d.asked)
	}
	for _, folder := range []string{"family", ""} {
		if _, handled, _ := d.say(t, folder, "@Andy /PAIR x", false); !handled {
			t.Errorf("a token in %q is a message", folder)
		}
	}
	h := Handler{Host: d, Memory: d, Pairing: d, Assistant: "Andy"}
	if _, handled, _ := h.Handle(t.Context(), Call{Message: berth.Message{Text: "/stop", Bot: true}, Group: berth.Group{Folder: "family"}, Allowed: true}); handled {
		t.Error("Berth obeys itself")
	}
}

// A command that was answered before does nothing, one that is late neither; both
// are no messages.
func TestSeenAndLate(t *testing.T) {
	d := &daemon{running: true}
	seen := map[string]bool{}
	var fail error
	h := Handler{Host: d, Memory: d, Pairing: d, Assistant: "Andy", Location: time.UTC, Seen: func(_ context.Context, m berth.Message) (bool, error) { return seen[m.ID], fail }}
	say := func(id, text string, late bool) (string, bool, error) {
		g, _ := d.Group("family")
		return h.Handle(t.Context(), Call{Message: berth.Message{ID: id, ChatJID: g.JID, Sender: "1@lid", Text: text}, Group: g, Allowed: true, Late: late})
	}
	for _, text := range []string{"/stop", "/pair a-good-token"} {
		d.asked, seen = nil, map[string]bool{"1": true}
		if reply, handled, err := say("1", text, false); reply != "" || !handled || err != nil || d.asked != nil {
			t.Errorf("%s again: %q, %v, %v, asked for %q", text, reply, handled, err, d.asked)
		}
		if reply, handled, err := say("2", text, false); reply == "" || !handled || err != nil || len(d.asked) != 1 {
			t.Errorf("%s: %q, %v, %v, asked for %q", text, reply, handled, err, d.asked)
		}
		d.asked = nil
		want := map[bool]string{true: "", false: late}[text != "/stop"]
		if reply, handled, err := say("3", text, true); reply != want || !handled || err != nil || d.asked != nil {
			t.Errorf("%s late: %q, %v, %v, asked for %q", text, reply, handled, err, d.asked)
		}
	}
	fail = errors.New("disk")
	if _, handled, err := say("4", "/stop", false); handled || err == nil || d.asked != nil {
		t.Errorf("without a store: %v, %v, asked for %q", handled, err, d.asked)
	}
	if _, handled, err := say("5", "hello", false); handled || err != nil {
		t.Errorf("a message: %v, %v", handled, err)
	}
}

// What people can act on is told, what is not for them is logged.
func TestFailures(t *testing.T) {
	d := &daemon{fail: berth.Errorf(berth.Unavailable, "the disk is full: free some space")}
	for _, c := range commands() {
		if c.name == "help" {
			continue
		}
		d.fail = berth.Errorf(berth.Unavailable, "the disk is full: free some space")
		if reply, handled, err := d.say(t, "family", "/"+c.name+" "+map[string]string{"remember": "x", "forget": "3"}[c.name], true); !handled || err != nil || reply != "The disk is full: free some space" {
			t.Errorf("/%s: %q, %v", c.name, reply, err)
		}
		d.fail = errors.New("secret path")
		if reply, handled, err := d.say(t, "family", "/"+c.name+" "+map[string]string{"remember": "x", "forget": "3"}[c.name], true); !handled || err == nil || reply != failure {
			t.Errorf("/%s: %q, %v", c.name, reply, err)
		}
	}
}

// What people have remembered is in the store, once, also if the channel brings
// the message again.
func TestMemoryInTheStore(t *testing.T) {
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "messages.db"), func(string, bool) {})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	h := Handler{Host: &daemon{}, Memory: db, Assistant: "Andy", Location: time.UTC}
	for i, c := range []struct{ id, folder, text, want string }{
		{"1", "family", "/remember  Likes TEA ", "Saved to long-term memory."},
		{"1", "family", "/remember  Likes TEA ", "Saved to long-term memory."},
		{"2", "family", "/remember likes tea", "Skipped: similar fact already exists."},
		{"3", "work", "/memory", "No saved durable facts."},
		{"4", "work", "/forget 1", "Memory 1 not found."},
		{"5", "family", "/memory", "1: Likes TEA"},
		{"6", "family", "/remember " + strings.Repeat("x", 1<<16), "The memory has 65536 bytes and may have 2000"},
		{"7", "family", "/forget 1", "Memory 1 deleted."},
		{"7", "family", "/forget 1", "Memory 1 deleted."},
		{"8", "family", "/forget 1", "Memory 1 not found."},
		{"9", "family", "/memory", "No saved durable facts."},
	} {
		g := berth.Group{Folder: c.folder, JID: c.folder + "@g.us"}
		reply, handled, err := h.Handle(t.Context(), Call{Message: berth.Message{ID: c.id, ChatJID: g.JID, Sender: "1@lid", SenderName: "Ann", Text: c.text}, Group: g, Allowed: true})
		if !handled || err != nil || !strings.HasPrefix(reply, c.want) {
			t.Errorf("%d %.30s: %q, %v, want %q", i, c.text, reply, err, c.want)
		}
	}
}

// However long a list is, a reply is one for a chat.
func TestRepliesAreBounded(t *testing.T) {
	d := &daemon{memories: map[string][]memory.Memory{}}
	for i := range memory.MaxFacts {
		d.tasks = append(d.tasks, berth.Task{ID: fmt.Sprint("t", i), Prompt: strings.Repeat("x", 1000), Kind: "cron", Value: strings.Repeat("*", 1000)})
		d.memories["family"] = append(d.memories["family"], memory.Memory{ID: int64(i), Fact: strings.Repeat("x", memory.MaxFact)})
	}
	for _, text := range []string{"/tasks", "/memory"} {
		reply, _, err := d.say(t, "family", text, true)
		if err != nil || len(reply) > 16<<10 || !strings.Contains(reply, "… and 470 more") {
			t.Errorf("%s: %d bytes, %v", text, len(reply), err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{"/help", "@Andy /new x", "@ANDY\xff/new", "/pair \x00", "/\u212aelp", "@\u212andy /stop", "/STOP\u2028x"} {
		f.Add(text, "@Andy")
		f.Add(text, "@\u212andy")
		f.Add(text, " / ")
	}
	f.Fuzz(func(t *testing.T, text, trigger string) {
		name, arg, ok := parse(text, trigger)
		if ok && (name == "" || strings.ContainsAny(name, " \n") || strings.TrimSpace(arg) != arg) {
			t.Fatalf("%q with %q: %q, %q", text, trigger, name, arg)
		}
	})
}
