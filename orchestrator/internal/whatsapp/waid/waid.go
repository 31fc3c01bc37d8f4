// Package waid reads and compares WhatsApp's addresses. One person has two of
// them, a phone number (PN) and a hidden one (LID), each with a device part on
// the wire; one chat has one, and only some kinds of chat are served.
//
// What comes from the network is hostile: Parse accepts digits where whatsmeow's
// own parser accepts anything. All functions are pure.
package waid

import (
	"strconv"
	"strings"

	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
)

// maxUser is the longest user part, in bytes: an old group's address is a phone
// number, a hyphen and a time.
const maxUser = 40

// Parse reads an address and returns it as Normal does. It fails with
// berth.Invalid unless text is one user, group, broadcast list, channel or bot.
func Parse(text string) (types.JID, error) {
	user, server, ok := strings.Cut(text, "@")
	if !ok {
		return types.JID{}, invalid(text)
	}
	user, device, devices := strings.Cut(user, ":")
	user, agent, agents := strings.Cut(user, ".")
	if devices && !number(device, 1<<16-1) || agents && !number(agent, 1<<8-1) {
		return types.JID{}, invalid(text)
	}
	j := Normal(types.JID{User: user, Server: server})
	if !valid(j) || (devices || agents) && !isPerson(j) {
		return types.JID{}, invalid(text)
	}
	return j, nil
}

func invalid(text string) error {
	return berth.Errorf(berth.Invalid, "%.80q is no WhatsApp address: it would be like 4915112345678@s.whatsapp.net or 120363012345678901@g.us", text)
}

func valid(j types.JID) bool {
	if len(j.User) > maxUser {
		return false
	}
	switch j.Server {
	case types.DefaultUserServer, types.HiddenUserServer, types.NewsletterServer, types.BotServer:
		return digits(j.User)
	case types.GroupServer:
		creator, at, old := strings.Cut(j.User, "-")
		return digits(creator) && (!old || digits(at))
	case types.BroadcastServer:
		return j.User == types.StatusBroadcastJID.User || digits(j.User)
	}
	return false
}

func digits(s string) bool {
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return false
		}
	}
	return s != ""
}

func number(s string, most uint64) bool {
	n, err := strconv.ParseUint(s, 10, 32)
	return err == nil && n <= most && digits(s)
}

// Normal returns j without agent and device, and with the server that everyone
// else uses for the same account: accounts that a company hosts have servers of
// their own, and contact cards still name the one of old.
func Normal(j types.JID) types.JID {
	switch j.Server {
	case types.LegacyUserServer, types.HostedServer:
		j.Server = types.DefaultUserServer
	case types.HostedLIDServer:
		j.Server = types.HiddenUserServer
	}
	return types.JID{User: j.User, Server: j.Server}
}

// Same reports whether two addresses are one, whatever their devices. It does
// not know which number belongs to which hidden address.
func Same(a, b types.JID) bool {
	return !a.IsEmpty() && Normal(a) == Normal(b)
}

func isPerson(j types.JID) bool {
	return j.Server == types.DefaultUserServer || j.Server == types.HiddenUserServer
}

// Served reports whether Berth takes part in a chat: in groups and with people.
// Status updates, broadcast lists and channels are nobody's conversation, and
// talking to WhatsApp itself or to its bots would be a loop of machines.
func Served(chat types.JID) bool {
	chat = Normal(chat)
	if !valid(chat) || chat.IsBot() || chat == types.PSAJID || chat == Normal(types.OfficialBusinessJID) {
		return false
	}
	return chat.Server == types.GroupServer || isPerson(chat)
}

// Owns reports whether a chat of Berth is one of WhatsApp's, and one that Chat
// could have returned.
func Owns(chat string) bool {
	j, err := Parse(chat)
	return err == nil && j.String() == chat && Served(j)
}

// IsGroup reports whether a chat is a group.
func IsGroup(chat types.JID) bool { return chat.Server == types.GroupServer }

// Numbers finds the number of a hidden address, or returns the zero JID when it
// is not known.
type Numbers func(lid types.JID) types.JID

// Chat returns the name under which Berth keeps a chat. A chat with a person is
// kept under the number when that is known, since this is what people register;
// whoever registered it earlier under the hidden address must be asked for
// that, too.
func Chat(chat types.JID, numbers Numbers) string {
	chat = Normal(chat)
	if chat.Server == types.HiddenUserServer && numbers != nil {
		if pn := Normal(numbers(chat)); pn.Server == types.DefaultUserServer && valid(pn) {
			return pn.String()
		}
	}
	return chat.String()
}

// Person is somebody who writes, by both addresses as far as they are known.
type Person struct {
	LID, PN types.JID // normal; zero when not known
}

// NewPerson puts the two addresses of a message's sender in their places.
// Anything that is no person's address is ignored.
func NewPerson(sender, alt types.JID) Person {
	var p Person
	for _, j := range []types.JID{Normal(alt), Normal(sender)} { // the sender's own word counts more
		switch {
		case !valid(j):
		case j.Server == types.HiddenUserServer:
			p.LID = j
		case j.Server == types.DefaultUserServer:
			p.PN = j
		}
	}
	return p
}

// ID returns what Berth keeps as the sender: the hidden address, which stays when
// somebody changes the number, or else the number. It is empty for nobody.
func (p Person) ID() string {
	if p.LID.IsEmpty() {
		return p.PN.String()
	}
	return p.LID.String()
}

// Number returns the phone number as "+4915112345678", or "" when it is not
// known.
func (p Person) Number() string {
	if p.PN.IsEmpty() {
		return ""
	}
	return "+" + p.PN.User
}

// Is reports whether j, in whatever form, is an address of p.
func (p Person) Is(j types.JID) bool {
	return Same(p.LID, j) || Same(p.PN, j)
}
