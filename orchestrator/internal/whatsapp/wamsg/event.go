package wamsg

import (
	"fmt"
	"strings"
	"time"

	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/types/events"
)

// GroupChange says in one line what became different in a group, such as
// "[Bob added Eve; Bob renamed the group to “Pasta”]"; it is empty for what
// nobody has to know. name returns how somebody is called, and is not nil.
func GroupChange(e *events.GroupInfo, name func(types.JID) string) string {
	who := func(j types.JID) string {
		if called := oneLine(name(j), maxName); called != "" {
			return called
		}
		return oneLine(j.User, maxName)
	}
	all := func(list []types.JID) string {
		var out []string
		for _, j := range list[:min(len(list), maxList)] {
			out = append(out, who(j))
		}
		s := strings.Join(out, ", ")
		if len(list) > len(out) {
			s += fmt.Sprintf(" and %d more", len(list)-len(out))
		}
		return s
	}
	by := "somebody"
	if e.Sender != nil {
		by = who(*e.Sender)
	}
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	self := func(list []types.JID) bool {
		return len(list) == 1 && e.Sender != nil && list[0].ToNonAD() == e.Sender.ToNonAD()
	}
	switch {
	case len(e.Join) == 0:
	case e.JoinReason == "invite" || self(e.Join):
		say("%s joined", all(e.Join))
	default:
		say("%s added %s", by, all(e.Join))
	}
	switch {
	case len(e.Leave) == 0:
	case e.Sender == nil || self(e.Leave):
		say("%s left", all(e.Leave))
	default:
		say("%s removed %s", by, all(e.Leave))
	}
	if len(e.Promote) > 0 {
		say("%s made %s admin", by, all(e.Promote))
	}
	if len(e.Demote) > 0 {
		say("%s took the admin's rights from %s", by, all(e.Demote))
	}
	if e.Name != nil {
		say("%s renamed the group to %s", by, inQuotes(e.Name.Name))
	}
	switch {
	case e.Topic == nil:
	case e.Topic.TopicDeleted || e.Topic.Topic == "":
		say("%s removed the group's description", by)
	default:
		say("%s changed the group's description to %s", by, inQuotes(e.Topic.Topic))
	}
	switch {
	case e.Announce == nil:
	case e.Announce.IsAnnounce:
		say("only admins may write now")
	default:
		say("everybody may write now")
	}
	switch {
	case e.Ephemeral == nil:
	case e.Ephemeral.IsEphemeral:
		say("messages now disappear after %s", duration(time.Duration(e.Ephemeral.DisappearingTimer)*time.Second))
	default:
		say("messages no longer disappear")
	}
	if e.Delete != nil && e.Delete.Deleted {
		say("the group was deleted")
	}
	if e.Suspended {
		say("WhatsApp suspended the group")
	}
	if len(out) == 0 {
		return ""
	}
	return "[" + strings.Join(out, "; ") + "]"
}

// Call says in one line that somebody calls; it is empty for any other event.
// chat is the group, or else the person, and from who calls.
func Call(event any) (line string, chat, from types.JID) {
	switch e := event.(type) {
	case *events.CallOffer:
		line, chat, from = "[is calling]", e.GroupJID, e.CallCreator
		if from.IsEmpty() {
			from = e.From
		}
	case *events.CallOfferNotice:
		line, chat, from = "[started a voice call]", e.GroupJID, e.CallCreator
		if e.Media == "video" {
			line = "[started a video call]"
		}
		if from.IsEmpty() {
			from = e.From
		}
	default:
		return "", types.JID{}, types.JID{}
	}
	if chat.IsEmpty() {
		chat = from
	}
	return line, chat, from
}

// Undecryptable says what stands for a message that never came through; it is
// empty while the sender may still send it again.
func Undecryptable(e *events.UndecryptableMessage) string {
	if e.UnavailableType == events.UnavailableTypeViewOnce {
		return "[view-once message: only the phone shows it]"
	}
	return ""
}
