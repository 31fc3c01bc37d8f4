package whatsapp

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/types"
	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waid"
	"berth/orchestrator/internal/whatsapp/wamsg"
)

// GroupInfo is a group of the account.
type GroupInfo struct {
	JID          string        `json:"jid"`
	Name         string        `json:"name"`
	ByNumber     bool          `json:"byNumber,omitempty"` // its members are addressed by number
	Participants []Participant `json:"participants"`
}

// Participant is a member of a group.
type Participant struct {
	ID     string `json:"id"`               // as in berth.Message.Sender
	Number string `json:"number,omitempty"` // empty if it is hidden
	Admin  bool   `json:"admin,omitempty"`
}

// groupsFor is how long the list of groups is good: WhatsApp locks out who asks
// often.
const groupsFor = 24 * time.Hour

type groups struct {
	fetching sync.Mutex

	mu      sync.Mutex
	list    groupList
	changed time.Time // when a change made us ask last
	due     bool      // somebody waits to ask for a change
}

type groupList struct {
	At     time.Time   `json:"at"`
	Groups []GroupInfo `json:"groups"`
}

func (g *groups) get() groupList {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.list
}

func (g *groups) set(list groupList) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.list = list
}

func (g *groups) forget() { g.set(groupList{}) }

// find returns what is known of a group.
func (g *groups) find(chat string) (GroupInfo, bool) {
	list := g.get().Groups
	i := slices.IndexFunc(list, func(g GroupInfo) bool { return g.JID == chat })
	if i < 0 {
		return GroupInfo{}, false
	}
	return list[i], true
}

// Groups returns the groups of the account by name, as of at most a day ago, or
// as of now if fresh is set. When WhatsApp cannot be asked it returns what was
// known last, and an error only if that is nothing.
func (c *Channel) Groups(ctx context.Context, fresh bool) ([]GroupInfo, error) {
	c.groups.fetching.Lock()
	defer c.groups.fetching.Unlock()
	known := c.groups.get()
	if !fresh && time.Since(known.At) < groupsFor {
		return slices.Clone(known.Groups), nil
	}
	list, err := c.fetchGroups(ctx)
	if err != nil {
		if known.At.IsZero() || fresh {
			return nil, err
		}
		c.log.Warn("ask for the groups", zap.Error(err))
		return slices.Clone(known.Groups), nil
	}
	c.groups.set(list)
	c.keep(ctx, keptGroups, list)
	var chats []berth.Chat
	for _, g := range list.Groups {
		chats = append(chats, berth.Chat{JID: g.JID, Name: g.Name})
	}
	c.nameChats(ctx, chats...)
	return slices.Clone(list.Groups), nil
}

func (c *Channel) nameChats(ctx context.Context, chats ...berth.Chat) {
	if c.o.Chats == nil {
		return
	}
	if err := c.o.Chats(ctx, chats); err != nil && ctx.Err() == nil {
		c.log.Warn("store the names of the groups", zap.Error(err))
	}
}

// nameChat tells the name of a group that was just given or first heard of.
func (c *Channel) nameChat(jid types.JID, name string) {
	chat := berth.Chat{JID: waid.Normal(jid).String(), Name: wamsg.SenderName(name, waid.Person{})}
	if chat.Name != "" && waid.Served(jid) {
		c.background(func(ctx context.Context) { c.nameChats(ctx, chat) })
	}
}

func (c *Channel) fetchGroups(ctx context.Context) (groupList, error) {
	cli := c.current()
	if s := c.State(); !online(s) {
		return groupList{}, berth.Errorf(berth.Unavailable, "WhatsApp is %s", s)
	}
	joined, err := cli.GetJoinedGroups(ctx)
	if err != nil {
		return groupList{}, offline(err)
	}
	list := groupList{At: time.Now()}
	for _, g := range joined {
		if g.Name == "" || !waid.Served(g.JID) {
			continue
		}
		info := GroupInfo{JID: waid.Normal(g.JID).String(), Name: wamsg.SenderName(g.Name, waid.Person{}), ByNumber: g.AddressingMode == types.AddressingModePN}
		for _, p := range g.Participants {
			who := waid.NewPerson(p.JID, p.PhoneNumber)
			if who.LID.IsEmpty() {
				who = waid.NewPerson(p.JID, p.LID)
			}
			if who.ID() != "" {
				info.Participants = append(info.Participants, Participant{ID: who.ID(), Number: who.Number(), Admin: p.IsAdmin || p.IsSuperAdmin})
			}
		}
		list.Groups = append(list.Groups, info)
	}
	slices.SortStableFunc(list.Groups, func(a, b GroupInfo) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// regroup asks for the groups again, since something changed. In large groups
// something does all the time, so changes in quick succession are asked for once.
func (c *Channel) regroup() {
	g := &c.groups
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.list.At.IsZero() {
		g.list.At = time.Unix(0, 0)
	}
	if g.due {
		return
	}
	g.due = true
	wait := min(time.Until(g.changed.Add(c.groupsPause)), c.groupsPause) // the clock may be set
	c.background(func(ctx context.Context) {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		g.mu.Lock()
		g.due, g.changed = false, time.Now()
		g.mu.Unlock()
		c.sync(ctx)
	})
}

// isAdmin reports whether somebody is known to be an admin of a chat.
func (c *Channel) isAdmin(chat string, who waid.Person) bool {
	g, ok := c.groups.find(chat)
	return ok && slices.ContainsFunc(g.Participants, func(p Participant) bool { return p.Admin && p.ID == who.ID() })
}

// Aliases returns the other addresses of a sender that are known: the number of
// who is kept by a hidden address. An operator lists people by their numbers.
func (c *Channel) Aliases(sender string) []string {
	jid, err := waid.Parse(sender)
	if err != nil {
		return nil
	}
	var out []string
	p := c.person(c.current(), jid, types.JID{})
	for _, j := range []types.JID{p.LID, p.PN} {
		if !j.IsEmpty() && j != jid {
			out = append(out, j.String())
		}
	}
	return out
}

// names returns how people are called.
func (c *Channel) names(cli *whatsmeow.Client) func(types.JID) string {
	return func(j types.JID) string {
		p := c.person(cli, j, types.JID{})
		if names := c.called(cli, p); len(names) > 0 {
			return names[0]
		}
		return p.Number()
	}
}

// called returns the names of somebody that are known, the owner's own for them
// first.
func (c *Channel) called(cli *whatsmeow.Client, p waid.Person) []string {
	var names []string
	for _, address := range []types.JID{p.LID, p.PN} {
		if address.IsEmpty() {
			continue
		}
		who, err := cli.Store.Contacts.GetContact(c.life, address)
		if err != nil || !who.Found {
			continue
		}
		for _, name := range []string{who.FullName, who.PushName, who.BusinessName} {
			if name != "" && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}
