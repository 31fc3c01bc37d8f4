package whatsapp

import (
	"context"
	"slices"
	"strings"
	"time"

	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waid"
)

// MarkRead tells the senders of messages of a chat that they were read, if
// Options.ReadReceipts says so; otherwise, and for messages of Berth's own
// account, it does nothing. It fails with berth.Unavailable while there is no
// connection; nobody has to try again.
func (c *Channel) MarkRead(ctx context.Context, chat string, messages ...berth.Message) error {
	if !c.o.ReadReceipts {
		return nil
	}
	to, err := waid.Parse(chat)
	if err != nil {
		return err
	}
	cli := c.current()
	if !waid.IsGroup(to) {
		if p := c.person(cli, to, types.JID{}); !p.LID.IsEmpty() {
			to = p.LID // as all that comes from there
		}
	}
	var senders []types.JID
	ids := make(map[types.JID][]types.MessageID)
	for _, m := range messages {
		id, sender, ok := c.quoted(to, m)
		if !ok || m.FromMe || m.Bot || strings.HasPrefix(id, noticePrefix) || slices.Contains(ids[sender], id) {
			continue
		}
		if ids[sender] == nil {
			senders = append(senders, sender)
		}
		ids[sender] = append(ids[sender], id)
	}
	if len(senders) == 0 {
		return nil
	}
	if s := c.State(); !online(s) {
		return berth.Errorf(berth.Unavailable, "WhatsApp is %s", s)
	}
	const atOnce = 100
	for _, sender := range senders {
		for some := range slices.Chunk(ids[sender], atOnce) {
			if err := cli.MarkRead(ctx, some, time.Now(), to, sender); err != nil {
				return offline(err)
			}
		}
	}
	return nil
}
