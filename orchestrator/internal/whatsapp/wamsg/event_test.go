package wamsg

import (
	"strings"
	"testing"

	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/types/events"
)

func TestGroupChange(t *testing.T) {
	bob, eve := types.NewJID("100000000000002", types.HiddenUserServer), types.NewJID("100000000000003", types.HiddenUserServer)
	name := func(j types.JID) string {
		if j == bob {
			return "Bob\n]"
		}
		return ""
	}
	for want, e := range map[string]*events.GroupInfo{
		"":                                   {},
		"[Bob ] added 100000000000003]":      {Sender: &bob, Join: []types.JID{eve}},
		"[100000000000003 joined]":           {Sender: &eve, Join: []types.JID{eve}},
		"[Bob ], 100000000000003 joined]":    {JoinReason: "invite", Join: []types.JID{bob, eve}},
		"[100000000000003 left]":             {Sender: &eve, Leave: []types.JID{eve}},
		"[Bob ] removed 100000000000003]":    {Sender: &bob, Leave: []types.JID{eve}},
		"[Bob ] made 100000000000003 admin]": {Sender: &bob, Promote: []types.JID{eve}},
		"[Bob ] took the admin's rights from 100000000000003]":                                                                                                {Sender: &bob, Demote: []types.JID{eve}},
		"[somebody renamed the group to “New name”; messages now disappear after 24 hours]":                                                                   {Name: &types.GroupName{Name: "New\nname\u202e"}, Ephemeral: &types.GroupEphemeral{IsEphemeral: true, DisappearingTimer: 90000 - 3600}},
		"[Bob ] changed the group's description to “x”; only admins may write now]":                                                                           {Sender: &bob, Topic: &types.GroupTopic{Topic: "x"}, Announce: &types.GroupAnnounce{IsAnnounce: true}},
		"[Bob ] removed the group's description; everybody may write now; messages no longer disappear; the group was deleted; WhatsApp suspended the group]": {Sender: &bob, Topic: &types.GroupTopic{TopicDeleted: true}, Announce: &types.GroupAnnounce{}, Ephemeral: &types.GroupEphemeral{}, Delete: &types.GroupDelete{Deleted: true}, Suspended: true},
	} {
		want = strings.Replace(want, "24 hours", "1 day", 1)
		if got := GroupChange(e, name); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	long := &events.GroupInfo{Join: make([]types.JID, 1000), Name: &types.GroupName{Name: strings.Repeat("x", 1<<20)}}
	if got := GroupChange(long, name); len(got) > 4000 || !strings.Contains(got, "and 980 more") {
		t.Errorf("1 000 members and a name of 1 MiB: %d bytes", len(got))
	}
}

func TestCall(t *testing.T) {
	bob := types.NewJID("100000000000002", types.HiddenUserServer)
	group := types.NewJID("120363012345678901", types.GroupServer)
	for _, c := range []struct {
		event any
		line  string
		chat  types.JID
	}{
		{&events.CallOffer{BasicCallMeta: types.BasicCallMeta{From: bob}}, "[is calling]", bob},
		{&events.CallOffer{BasicCallMeta: types.BasicCallMeta{CallCreator: bob, GroupJID: group}}, "[is calling]", group},
		{&events.CallOfferNotice{BasicCallMeta: types.BasicCallMeta{From: bob, GroupJID: group}, Media: "video"}, "[started a video call]", group},
		{&events.CallOfferNotice{BasicCallMeta: types.BasicCallMeta{CallCreator: bob}, Media: "audio"}, "[started a voice call]", bob},
	} {
		if line, chat, from := Call(c.event); line != c.line || chat != c.chat || from != bob {
			t.Errorf("%T: got %q in %v from %v", c.event, line, chat, from)
		}
	}
	if line, chat, from := Call(&events.CallTerminate{BasicCallMeta: types.BasicCallMeta{From: bob}}); line != "" || !chat.IsEmpty() || !from.IsEmpty() {
		t.Errorf("the end of a call: got %q in %v from %v", line, chat, from)
	}
}

func TestUndecryptable(t *testing.T) {
	if got := Undecryptable(&events.UndecryptableMessage{UnavailableType: events.UnavailableTypeViewOnce}); got == "" {
		t.Error("nothing stands for a view-once message")
	}
	if got := Undecryptable(&events.UndecryptableMessage{IsUnavailable: true}); got != "" {
		t.Errorf("%q, though it will be sent again", got)
	}
}
