package whatsapp

import (
	"context"
	"strings"

	"berth/orchestrator/internal/berth"
)

// React reacts to a message of o's chat with an emoji, the text of o. It fails with
// berth.Invalid for a message that nobody sent on WhatsApp, and otherwise as Send
// does.
func (c *Channel) React(ctx context.Context, o berth.Outgoing, m berth.Message) error {
	to, err := c.address(o)
	if err != nil {
		return err
	}
	id, sender, ok := c.quoted(to, m)
	if !ok || strings.HasPrefix(id, noticePrefix) {
		return berth.Errorf(berth.Invalid, "#%d is no message that somebody sent on WhatsApp: nobody can react to it", m.Seq)
	}
	return c.send(ctx, to, o, c.current().BuildReaction(to, sender, id, o.Text))
}
