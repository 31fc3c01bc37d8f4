package dispatch

import (
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

// guests admits by the sender's name.
type guests struct{ asked int }

func (*guests) Admit(_ berth.Group, m berth.Message) (store, wake bool) {
	return m.Sender != "dropped", m.Sender == "friend"
}

func (g *guests) Answer(berth.Message) string {
	g.asked++
	return "not you"
}

// W53: who is not on the list wakes nobody, and is told so once; who is to be
// dropped leaves nothing.
func TestW53Senders(t *testing.T) {
	play(t, func(w *world) {
		list := &guests{}
		w.senders = list
		family := w.add("family", true)
		say := func(id, sender, text string, change func(*berth.Message)) berth.Message {
			w.t.Helper()
			m := berth.Message{ID: id, ChatJID: family.JID, Sender: sender, Text: text, Time: time.Now()}
			if change != nil {
				change(&m)
			}
			m, err := w.Receive(w.t.Context(), m)
			check(w.t, err)
			return m
		}
		if m := say("1", "dropped", "@Andy hello", nil); m.Seq != 0 {
			w.t.Errorf("stored: %+v", m)
		}
		if m := say("2", "stranger", "@Andy hello", nil); m.Seq == 0 || m.Wakes {
			w.t.Errorf("got %+v", m)
		}
		say("2", "stranger", "@Andy hello", nil) // the same again
		say("3", "stranger", "@Andy again", nil)
		say("4", "stranger", "no trigger", nil)
		if list.asked != 2 {
			w.t.Errorf("asked %d times for an answer, want 2", list.asked)
		}
		o, ok, err := w.db.NextOutgoing(w.t.Context(), family.JID)
		check(w.t, err)
		if !ok || o.Text != "not you" || o.Kind != berth.OutNotice {
			w.t.Errorf("told %+v", o)
		}
		check(w.t, w.db.MarkSent(w.t.Context(), o.ID))
		if _, more, _ := w.db.NextOutgoing(w.t.Context(), family.JID); more {
			w.t.Error("told twice")
		}
		if m := say("5", "dropped", "@Andy it is me", func(m *berth.Message) { m.FromMe = true }); !m.Wakes {
			w.t.Error("our own account does not count")
		}
		if m := say("6", "friend", "@Andy hello", nil); !m.Wakes {
			w.t.Error("a friend does not count")
		}
		messages, err := w.db.MessagesAfter(w.t.Context(), family.JID, 0, 10)
		check(w.t, err)
		var ids []string
		for _, m := range messages {
			ids = append(ids, m.ID)
		}
		if got := strings.Join(ids, ""); got != "23456" {
			w.t.Errorf("stored %s", got)
		}
	})
}
