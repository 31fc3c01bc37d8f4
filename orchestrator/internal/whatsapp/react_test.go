package whatsapp

import (
	"testing"

	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/watest"
)

// A reaction names the message as the chat does; sent again it is the same one. What
// nobody sent on WhatsApp cannot be reacted to.
func TestReact(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		id := w.alice.SendText(w.group, "@Andy shall we?")
		m := w.message(0)
		o := w.out("👍")
		o.Kind = berth.OutReaction
		for range 2 {
			if err := w.ch.React(t.Context(), o, m); err != nil {
				t.Fatal(err)
			}
		}
		w.send(w.out("done"))
		for _, reader := range []*watest.Device{w.alice, w.bob} {
			got := reader.Received(t.Context())
			r := got.Proto.GetReactionMessage()
			who, err := types.ParseJID(r.GetKey().GetParticipant())
			if r.GetText() != "👍" || r.GetKey().GetID() != id || r.GetKey().GetFromMe() || err != nil || who != w.alice.LID() && who != w.alice.JID() || got.ID != o.MessageID {
				t.Errorf("%s read %+v: %v", reader.Name(), got, r)
			}
			if got := reader.Received(t.Context()); got.Text != "Andy: done" && got.Text != "done" {
				t.Errorf("%s saw another one: %+v", reader.Name(), got)
			}
		}
		for what, m := range map[string]berth.Message{
			"of the operator":     {Seq: 7, ID: "x", Sender: "console:operator"},
			"of the group itself": {Seq: 8, ID: noticePrefix + "x/" + m.Sender, Sender: m.Sender},
		} {
			if err := w.ch.React(t.Context(), o, m); kindOf(err) != berth.Invalid {
				t.Errorf("%s: %v", what, err)
			}
		}
	})
}
