package dispatch

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/queue"
)

// desk takes what begins with a slash; "/pair" from everybody, the rest from who
// counts in a registered chat.
type desk struct {
	w     *world
	fail  error
	texts []string
}

func (d *desk) Handle(_ context.Context, c Command) ([]string, bool, error) {
	if !strings.HasPrefix(c.Message.Text, "/") || c.Message.Text != "/pair" && (c.Group.Folder == "" || !c.Allowed) {
		return nil, false, nil
	}
	if d.fail != nil && c.Message.Text == "/again" {
		return nil, false, d.fail
	}
	d.w.note("%s %q late %v", c.Message.Text, c.Group.Folder, c.Late)
	return d.texts, true, d.fail
}

func (w *world) told(chat string) (texts []string) {
	w.t.Helper()
	for {
		o, ok, err := w.db.NextOutgoing(w.t.Context(), chat)
		check(w.t, err)
		if !ok {
			return texts
		}
		if o.Kind != berth.OutNotice || o.MessageID == "" {
			w.t.Errorf("told %+v", o)
		}
		texts = append(texts, o.Text)
		check(w.t, w.db.MarkSent(w.t.Context(), o.ID))
	}
}

// A command is carried out, answered once and not stored, whoever counts; without
// one everything is as before.
func TestCommands(t *testing.T) {
	play(t, func(w *world) {
		w.senders = &guests{}
		d := &desk{w: w, texts: []string{"one", "two"}}
		w.commands = d
		family := w.add("family", true)
		check(t, w.Start(w.t.Context()))
		say := func(chat, id, sender, text string) (berth.Message, error) {
			return w.Receive(w.t.Context(), berth.Message{ID: id, ChatJID: chat, Sender: sender, Text: text, Time: time.Now()})
		}
		must := func(id, sender, text string) berth.Message {
			t.Helper()
			m, err := say(family.JID, id, sender, text)
			check(t, err)
			return m
		}
		if m := must("1", "friend", "/stop"); m.Seq != 0 || m.Wakes {
			t.Errorf("stored: %+v", m)
		}
		w.want(`/stop "family" late false`)
		if got := strings.Join(w.told(family.JID), "|"); got != "one|two" {
			t.Errorf("told %s", got)
		}
		must("1", "friend", "/stop") // the channel brings it again
		w.want(`/stop "family" late false`)
		if got := w.told(family.JID); got != nil {
			t.Errorf("told again: %q", got)
		}

		if m := must("2", "stranger", "/stop"); m.Seq == 0 || m.Wakes {
			t.Errorf("a stranger's is a message: %+v", m)
		}
		if m := must("3", "dropped", "/stop"); m.Seq != 0 {
			t.Errorf("one who is not heard: %+v", m)
		}
		w.want()
		d.texts = nil
		must("4", "dropped", "/pair")
		w.want(`/pair "family" late false`)
		m, err := say("1@lid", "1", "1@lid", "/pair")
		check(t, err)
		if m.Seq != 0 {
			t.Errorf("stored: %+v", m)
		}
		w.want(`/pair "" late false`)
		for _, text := range []string{"/stop", "hello"} {
			if _, err := say("1@lid", text, "1@lid", text); !notFound(err) {
				t.Errorf("%s in an unregistered chat: %v", text, err)
			}
		}
		w.want()

		check(t, w.Keep(w.t.Context(), berth.Message{ID: "5", ChatJID: family.JID, Sender: "friend", Text: "/stop", Time: time.Now()}))
		w.want(`/stop "family" late true`)

		w.Collect(func(string) bool { return true }) // a backlog is still from people
		must("6", "friend", "/stop")
		w.want(`/stop "family" late false`)

		all, err := w.db.MessagesAfter(w.t.Context(), family.JID, 0, 10)
		check(t, err)
		if len(all) != 1 || all[0].ID != "2" {
			t.Errorf("stored %+v", all)
		}
	})
}

// A command that failed is answered and over; one of which nothing is known comes
// again.
func TestCommandsThatFail(t *testing.T) {
	play(t, func(w *world) {
		d := &desk{w: w, texts: []string{"sorry"}, fail: errors.New("disk full")}
		w.commands = d
		family := w.add("family", true)
		receive := func(text string) error {
			_, err := w.Receive(w.t.Context(), berth.Message{ID: text, ChatJID: family.JID, Text: text, Time: time.Now()})
			return err
		}
		check(t, receive("/stop"))
		if got := strings.Join(w.told(family.JID), "|"); got != "sorry" {
			t.Errorf("told %s", got)
		}
		if err := receive("/again"); !errors.Is(err, d.fail) {
			t.Errorf("got %v", err)
		}
		all, err := w.db.MessagesAfter(w.t.Context(), family.JID, 0, 10)
		check(t, err)
		if len(all) > 0 {
			t.Errorf("stored %+v", all)
		}
	})
}

// Interrupt and Renew reach the run of the group.
func TestInterruptAndRenew(t *testing.T) {
	play(t, func(w *world) {
		w.runs = turns{w}
		w.add("family", false)
		check(t, w.Start(w.t.Context()))
		if w.Interrupt("family") {
			t.Error("nothing runs")
		}
		w.say("family", "1", "work")
		synctest.Wait()
		if !w.Interrupt("family") {
			t.Error("it works")
		}
		w.want("interrupted family")
		if w.Interrupt("family") {
			t.Error("it is idle")
		}
		w.Renew("family")
		w.want("closed family: the next message begins a new session")
	})
}

// turns are runs that work until they are interrupted, and are idle then.
type turns struct{ *world }

func (r turns) Run(ctx context.Context, s *queue.Slot, g berth.Group) queue.Result {
	for {
		select {
		case <-s.Interrupted():
			r.note("interrupted %s", g.Folder)
			s.Idle()
		case <-s.Closing():
			r.note("closed %s: %s", g.Folder, s.Reason())
			return queue.Result{}
		case <-ctx.Done():
			return queue.Result{}
		}
	}
}

func notFound(err error) bool {
	known, ok := errors.AsType[*berth.Error](err)
	return ok && known.Kind == berth.NotFound
}
