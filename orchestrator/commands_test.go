package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/dispatch"
	"berth/orchestrator/internal/queue"
	"berth/orchestrator/internal/senders"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/turn"
)

const pairToken = "a-good-token"

// office is a dispatcher with commands and a sender list, without containers.
type office struct {
	*dispatch.Dispatcher
	t    *testing.T
	db   *sqlite.DB
	list string // the sender list's file

	orders *commands
	run    func(context.Context, *queue.Slot) // nil: runs end at once
}

func newOffice(t *testing.T, list string) *office {
	t.Helper()
	dir := t.TempDir()
	o := &office{t: t, list: filepath.Join(dir, "list.json")}
	if list != "" {
		if err := os.WriteFile(o.list, []byte(list), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	if o.db, err = sqlite.Open(t.Context(), filepath.Join(dir, "db"), func(string, bool) {}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = o.db.Close() })
	log := zaptest.NewLogger(t)
	cfg := Config{AssistantName: "Andy", Timezone: time.UTC, PairToken: pairToken}
	options, groups := senders.Options{File: o.list}, &registry{}
	o.orders = newCommands(cfg, o.db, groups, turn.New(turn.Config{}, turn.Deps{}), options, log)
	o.Dispatcher, err = dispatch.New(t.Context(), dispatch.Options{
		Store: o.db, Runs: o, Fleet: o, Limit: 1, Assistant: "Andy", Senders: guests{senders.New(options), nil, log}, Commands: o.orders, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	groups.Dispatcher = o.Dispatcher
	t.Cleanup(func() { o.Shutdown(context.Background()) })
	return o
}

// Run implements dispatch.Runs.
func (o *office) Run(ctx context.Context, slot *queue.Slot, _ berth.Group) queue.Result {
	if o.run != nil {
		o.run(ctx, slot)
	}
	return queue.Result{}
}

// Fleet implements dispatch.Fleet: no container runs.
func (o *office) Fleet(context.Context) ([]dispatch.Container, error) { return nil, nil }

// RemoveContainer implements dispatch.Fleet.
func (o *office) RemoveContainer(context.Context, string) error { return nil }

// Adopt implements dispatch.Runs.
func (o *office) Adopt(context.Context, *queue.Slot, berth.Group, berth.Run, string, func()) queue.Result {
	return queue.Result{}
}

func (o *office) add(folder, jid string) {
	o.t.Helper()
	if err := o.AddGroup(o.t.Context(), berth.Group{JID: jid, Name: folder, Folder: folder, AddedAt: time.Now()}); err != nil {
		o.t.Fatal(err)
	}
}

// says has somebody write in a chat, and returns what the chat is told and whether
// the message was stored as one.
func (o *office) says(chat, id, sender, text string) (told string, stored bool) {
	o.t.Helper()
	m, err := o.Receive(o.t.Context(), berth.Message{ID: id, ChatJID: chat, Sender: sender, SenderName: "Ann", Text: text, Time: time.Now()})
	if err != nil && !strings.Contains(err.Error(), "not registered") {
		o.t.Fatal(err)
	}
	var texts []string
	for {
		out, ok, err := o.db.NextOutgoing(o.t.Context(), chat)
		if err != nil {
			o.t.Fatal(err)
		}
		if !ok {
			return strings.Join(texts, "|"), m.Seq > 0
		}
		texts = append(texts, out.Text)
		if err := o.db.MarkSent(o.t.Context(), out.ID); err != nil {
			o.t.Fatal(err)
		}
	}
}

func (o *office) wants(chat, id, sender, text, want string) {
	o.t.Helper()
	if told, stored := o.says(chat, id, sender, text); told != want || stored {
		o.t.Errorf("%s says %q in %s: told %q, stored %v; want %q", sender, text, chat, told, stored, want)
	}
}

const shut = `{"default": {"allow": ["9@lid"], "mode": "drop"}}`

// Who knows the token counts from then on, and his own chat is a group; the token
// is in no store.
func TestPairing(t *testing.T) {
	o := newOffice(t, shut)
	o.add("family", "120363000000000001@g.us")
	const ann, bob = "15550002222@s.whatsapp.net", "15550003333@lid"

	o.wants(ann, "1", ann, "hello", "") // no group, no answer
	o.wants(ann, "2", ann, "/pair not-the-token", "Invalid pairing token.")
	o.wants(ann, "2", ann, "/pair not-the-token", "") // brought again
	if audits, err := o.db.Audits(t.Context(), 10, ""); err != nil || len(audits) != 1 || audits[0].What != "pair" || strings.Contains(audits[0].Target+audits[0].Reason, "not-the-token") {
		t.Errorf("audits %+v, %v", audits, err)
	}
	o.wants(ann, "3", ann, "/pair "+pairToken, "Please wait 5s before you try again.")

	o.wants(bob, "1", bob, "/pair "+pairToken+"\n[came 20 minutes late]", "Pairing successful. You are now whitelisted.")
	g, ok := o.ByChat(bob)
	if !ok || g.Folder != "dm-lid-15550003333" || g.Name != "Ann" || g.NeedsTrigger() {
		t.Errorf("the chat's group: %+v, %v", g, ok)
	}
	if told, stored := o.says(bob, "2", bob, "hello"); told != "" || !stored {
		t.Errorf("told %q, stored %v", told, stored)
	}
	o.wants(bob, "2a", bob, "[answers Andy: “is it /new?”]\n/memory\n[came 1 hour late]", "No saved durable facts.")
	o.wants(bob, "3", bob, "/pair "+pairToken, "You are already whitelisted.")

	// In a group everybody may pair, also who is not heard otherwise.
	const carol, group = "15550004444@lid", "120363000000000001@g.us"
	o.wants(group, "1", carol, "hello", "")
	o.wants(group, "2", carol, "/pair "+pairToken, "Pairing successful. You are now whitelisted.")
	if told, stored := o.says(group, "3", carol, "hello"); told != "" || !stored {
		t.Errorf("told %q, stored %v", told, stored)
	}
	if n := len(o.Groups()); n != 2 {
		t.Errorf("%d groups", n)
	}
	o.wants(group, "4", operator+"operator", "/pair "+pairToken, "You are already whitelisted.")
	for _, chat := range []string{ann, bob, group} {
		all, err := o.db.MessagesAfter(t.Context(), chat, 0, 10)
		if err != nil || slices.ContainsFunc(all, func(m berth.Message) bool { return strings.Contains(m.Text, "token") }) {
			t.Errorf("stored %+v, %v", all, err)
		}
	}
}

// Where everybody counts, the token still makes a chat a group; where the list
// cannot be changed, nobody learns why.
func TestPairingWithoutAList(t *testing.T) {
	o := newOffice(t, "")
	const ann = "15550002222@s.whatsapp.net"
	o.wants(ann, "1", ann, "/pair "+pairToken, "Pairing successful. You are now whitelisted.")
	if g, ok := o.ByChat(ann); !ok || g.Folder != "dm-15550002222" {
		t.Errorf("got %+v, %v", g, ok)
	}
	o = newOffice(t, `{"default": `)
	o.wants(ann, "1", ann, "/pair "+pairToken, "I hit an internal error while processing that. Please try again.")
	if _, ok := o.ByChat(ann); ok {
		t.Error("the chat is a group")
	}
}

// What the host tells and does, over the real store.
func TestCommandsOfTheDaemon(t *testing.T) {
	o := newOffice(t, "")
	const main, family = "console:main", "console:family"
	o.add("main", main)
	o.add("family", family)
	ctx, me := t.Context(), operator+"operator"

	// A run that had a session ended well; then messages came.
	if _, stored := o.says(family, "m1", me, "work"); !stored {
		t.Fatal("not stored")
	}
	if _, _, err := o.db.BeginRun(ctx, berth.Run{ID: "r", Folder: "family", ChatJID: family, Engine: "builtin", StartedAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
	if err := o.db.Commit(ctx, berth.Progress{RunID: "r", Acked: []string{"m1"}, Session: "s1", TurnEnded: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := o.db.FinishRun(ctx, berth.Ending{RunID: "r", At: time.Now()}); err != nil {
		t.Fatal(err)
	}
	o.says(family, "m2", me, "and more")
	task := berth.Task{
		ID: "t1", Folder: "family", ChatJID: family, Prompt: "water the plants", Kind: berth.ScheduleInterval, Value: "3600000", Zone: "UTC",
		Context: berth.ContextIsolated, CatchUp: berth.CatchUpOnce, CreatedAt: time.Now(),
	}
	if _, err := o.db.AddTask(ctx, task); err != nil {
		t.Fatal(err)
	}
	for _, u := range []berth.Usage{
		{At: time.Now(), Folder: "family", Provider: "anthropic", Model: "m", Requests: 1, Input: 5, Output: 2},
		{At: time.Now().AddDate(0, 0, -1), Folder: "family", Provider: "anthropic", Model: "m", Requests: 1, Input: 500, Output: 200},
	} {
		if err := o.db.AddUsage(ctx, u); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ chat, text, want string }{
		{family, "/status", "Waits for a free container, place 1, 1 messages to be answered"},
		{main, "/status", "Family: waits for a free container, place 1, 1 messages to be answered\nmain: no container runs"},
		{family, "/stop", "Nothing is running."},
		{family, "/remember likes tea", "Saved to long-term memory."},
		{family, "/memory", "1: likes tea"},
		{family, "/usage", "anthropic m: 1 requests, 5 tokens in, 2 out"},
		{main, "/usage", "Nothing was used today."},
		{main, "/stop nobody", `There is no group "nobody": /status lists them`},
		{main, "/compact", "There is nothing to shorten."},
		{family, "/compact", "I will make the conversation shorter, and say what came of it."},
		{main, "/compact family", "I will make the conversation shorter, and say what came of it."},
		{family, "/new", "Started a new conversation session."},
	} {
		o.wants(c.chat, c.chat+c.text, me, c.text, c.want)
	}
	if told, _ := o.says(family, "tasks", me, "/tasks"); !strings.HasPrefix(told, "t1: water the plants (interval 3600000), next ") {
		t.Errorf("tasks: %q", told)
	}
	if id, err := o.db.Session(ctx, "family", "builtin"); id != "" || err != nil {
		t.Errorf("session %q, %v", id, err)
	}
	// Each chat that wanted the conversation shorter is told: there is none any more.
	if _, ok, err := o.db.BeginCompaction(ctx, berth.Run{ID: "r2", Folder: "family", ChatJID: family, Engine: "builtin"}, "nothing", "failed"); ok || err != nil {
		t.Errorf("begun %v, %v", ok, err)
	}
	o.wants(main, "help", me, "/compact nobody", "nothing|There is no group \"nobody\": /status lists them")
	o.wants(family, "help", me, "/stop", "nothing|Nothing is running.")
	// The same message again does nothing.
	o.wants(family, family+"/remember likes tea", me, "/remember likes tea", "")
}

// A /new that failed ended nothing: the run goes on with the session that is still
// there. With the order the other way round, a run that begins in between would go on
// with one that is gone.
func TestNewSessionFails(t *testing.T) {
	o := newOffice(t, "")
	o.add("family", "a@g.us")
	slots := make(chan *queue.Slot)
	o.run = func(ctx context.Context, s *queue.Slot) { slots <- s; <-ctx.Done() }
	if err := o.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	o.Wake("family")
	slot := <-slots
	for _, want := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		if !want {
			cancel()
		}
		err := o.orders.NewSession(ctx, "family")
		cancel()
		if got := slot.Renewed(); got != want || (err == nil) != want {
			t.Errorf("renewed %v, %v; want %v", got, err, want)
		}
	}
}
