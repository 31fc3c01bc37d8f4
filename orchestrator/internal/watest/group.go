package watest

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"go.mau.fi/whatsmeow/types"
)

// The addressing modes of groups: by hidden address, or by phone number.
const (
	LID = types.AddressingModeLID
	PN  = types.AddressingModePN
)

// Group is a group chat.
type Group struct {
	JID types.JID

	server   *Server
	mode     types.AddressingMode
	subject  string
	topic    string
	creator  *account
	created  time.Time
	members  []*member
	version  int
	announce bool
}

type member struct {
	account *account
	admin   bool
	hidden  bool
}

// Group makes a group. The first member made it and is its admin; a linked
// client hears of it as of being added.
func (s *Server) Group(mode types.AddressingMode, subject string, members ...Member) *Group {
	s.t.Helper()
	var g *Group
	s.do(func() error {
		if len(members) == 0 {
			return fmt.Errorf("group %q has no members", subject)
		}
		g = &Group{
			JID:     types.NewJID(strconv.Itoa(120363000000000001+len(s.order)), types.GroupServer),
			server:  s,
			mode:    mode,
			subject: subject,
			creator: members[0].self().account,
			created: time.Now(),
			version: 1,
		}
		for i, m := range members {
			g.members = append(g.members, &member{account: m.self().account, admin: i == 0})
		}
		s.groups[g.JID.User] = g
		s.order = append(s.order, g)
		for _, m := range g.members {
			g.tellCreatedLocked(m.account)
		}
		return nil
	})
	return g
}

func (g *Group) tellCreatedLocked(a *account) {
	for _, d := range a.linkedLocked() {
		g.server.deliverLocked(d, g.notification(g.creator, node{
			Tag: "create", Attrs: attrs{"type": "new", "reason": "invite"}, Content: []node{g.node()},
		}))
	}
}

func (g *Group) find(a *account) *member {
	i := slices.IndexFunc(g.members, func(m *member) bool { return m.account == a })
	if i < 0 {
		return nil
	}
	return g.members[i]
}

func (g *Group) accountsLocked() []*account {
	accounts := make([]*account, len(g.members))
	for i, m := range g.members {
		accounts[i] = m.account
	}
	return accounts
}

// address fills in who sent something to the group.
func (g *Group) address(to attrs, from *device) {
	to["from"], to["participant"] = g.JID, from.in(g.mode)
	to["addressing_mode"] = string(g.mode)
	if g.mode == PN {
		to["participant_lid"] = from.account.lid
	} else if m := g.find(from.account); m == nil || !m.hidden {
		to["participant_pn"] = from.account.pn
	}
}

func (g *Group) notification(by *account, change node) node {
	n := node{Tag: "notification", Attrs: attrs{
		"from": g.JID, "type": "w:gp2", "id": g.server.idLocked(), "t": now(),
		"participant": by.in(g.mode), "addressing_mode": string(g.mode), "notify": by.name,
	}, Content: []node{change}}
	if g.mode == LID {
		n.Attrs["participant_pn"] = by.pn
	}
	return n
}

func (g *Group) participant(m *member) node {
	n := node{Tag: "participant", Attrs: attrs{"jid": m.account.in(g.mode)}}
	switch {
	case g.mode == PN:
		n.Attrs["lid"] = m.account.lid
	case m.hidden:
		number := m.account.pn.User
		n.Attrs["display_name"] = "+" + number[:2] + "∙∙∙∙∙" + number[len(number)-2:]
	default:
		n.Attrs["phone_number"] = m.account.pn
	}
	if m.admin {
		n.Attrs["type"] = "admin"
	}
	return n
}

func (g *Group) node() node {
	unix := strconv.FormatInt(g.created.Unix(), 10)
	n := node{Tag: "group", Attrs: attrs{
		"id": g.JID.User, "subject": g.subject, "s_t": unix, "s_o": g.creator.in(g.mode),
		"creation": unix, "creator": g.creator.in(g.mode), "size": len(g.members),
		"addressing_mode": string(g.mode), "a_v_id": "1", "p_v_id": strconv.Itoa(g.version),
	}}
	if g.mode == LID {
		n.Attrs["creator_pn"], n.Attrs["s_o_pn"] = g.creator.pn, g.creator.pn
	}
	var content []node
	for _, m := range g.members {
		content = append(content, g.participant(m))
	}
	if g.topic != "" {
		content = append(content, node{
			Tag:     "description",
			Attrs:   attrs{"id": "T1", "t": unix, "participant": g.creator.in(g.mode)},
			Content: []node{{Tag: "body", Content: []byte(g.topic)}},
		})
	}
	if g.announce {
		content = append(content, node{Tag: "announcement"})
	}
	n.Content = append(content, node{Tag: "member_add_mode", Content: []byte("all_member_add")})
	return n
}

// tellLocked tells all linked clients in the group, and those of one more account.
func (g *Group) tellLocked(by *account, change node, also ...*account) {
	told := map[*account]bool{}
	for _, a := range append(g.accountsLocked(), also...) {
		if told[a] {
			continue
		}
		told[a] = true
		for _, d := range a.linkedLocked() {
			g.server.deliverLocked(d, g.notification(by, change))
		}
	}
}

// Add adds a member.
func (g *Group) Add(by, who Member) {
	g.server.do(func() error {
		a := who.self().account
		if g.find(a) != nil {
			return fmt.Errorf("%s is in %s", a.name, g.subject)
		}
		m := &member{account: a}
		before := g.accountsLocked()
		g.members = append(g.members, m)
		if len(a.linkedLocked()) > 0 && !slices.Contains(before, a) {
			g.tellCreatedLocked(a)
		}
		g.changeLocked("add", by.self().account, m)
		return nil
	})
}

// Remove removes a member, who is told so; a member that removes itself leaves.
func (g *Group) Remove(by, who Member) {
	g.server.do(func() error { return g.removeLocked(by.self().account, who.self().account) })
}

func (g *Group) removeLocked(by, who *account) error {
	m := g.find(who)
	if m == nil {
		return fmt.Errorf("%s is not in %s", who.name, g.subject)
	}
	g.members = slices.DeleteFunc(g.members, func(other *member) bool { return other == m })
	g.changeLocked("remove", by, m)
	return nil
}

// Promote makes a member an admin, or takes that away.
func (g *Group) Promote(by, who Member, admin bool) {
	g.server.do(func() error {
		m := g.find(who.self().account)
		if m == nil {
			return fmt.Errorf("%s is not in %s", who.self().Name(), g.subject)
		}
		m.admin = admin
		kind := "demote"
		if admin {
			kind = "promote"
		}
		g.changeLocked(kind, by.self().account, m)
		return nil
	})
}

func (g *Group) changeLocked(kind string, by *account, m *member) {
	previous := g.version
	g.version++
	participant := g.participant(m)
	delete(participant.Attrs, "type")
	g.tellLocked(by, node{
		Tag:     kind,
		Attrs:   attrs{"prev_v_id": strconv.Itoa(previous), "v_id": strconv.Itoa(g.version)},
		Content: []node{participant},
	}, m.account)
}

// Rename changes the subject.
func (g *Group) Rename(by Member, subject string) {
	g.server.do(func() error { g.renameLocked(by.self().account, subject); return nil })
}

func (g *Group) renameLocked(by *account, subject string) {
	g.subject = subject
	change := node{Tag: "subject", Attrs: attrs{"subject": subject, "s_t": now(), "s_o": by.in(g.mode)}}
	if g.mode == LID {
		change.Attrs["s_o_pn"] = by.pn
	}
	g.tellLocked(by, change)
}

// Describe changes the description.
func (g *Group) Describe(by Member, topic string) {
	g.server.do(func() error {
		g.topic = topic
		g.tellLocked(by.self().account, node{
			Tag: "description", Attrs: attrs{"id": g.server.idLocked()},
			Content: []node{{Tag: "body", Content: []byte(topic)}},
		})
		return nil
	})
}

// Hide keeps a member's number from the others of a LID group.
func (g *Group) Hide(who Member) {
	g.server.do(func() error {
		m := g.find(who.self().account)
		if m == nil {
			return fmt.Errorf("%s is not in %s", who.self().Name(), g.subject)
		}
		m.hidden = true
		return nil
	})
}

// Address is how the group calls a member: by LID or by number.
func (g *Group) Address(who Member) types.JID { return who.self().account.in(g.mode) }

// At is a member as a text mentions it.
func (g *Group) At(who Member) string { return "@" + g.Address(who).User }

func (g *Group) target() (types.JID, *Group, *account) { return g.JID, g, nil }

func (s *Server) groupQueryLocked(d *device, n *node) ([]node, func() error, error) {
	child := n.GetChildren()[0]
	to := jidOf(n, "to")
	if child.Tag == "participating" {
		var groups []node
		for _, g := range s.order {
			if g.find(d.account) != nil {
				groups = append(groups, g.node())
			}
		}
		return []node{{Tag: "groups", Content: groups}}, nil, nil
	}
	if child.Tag == "leave" {
		var left []node
		for _, one := range child.GetChildren() {
			if g := s.groups[jidOrString(&one, "id").User]; g != nil {
				left = append(left, node{Tag: "group", Attrs: attrs{"id": g.JID}})
				_ = g.removeLocked(d.account, d.account)
			}
		}
		return []node{{Tag: "leave", Content: left}}, nil, nil
	}
	g := s.groups[to.User]
	if g == nil {
		return nil, nil, queryError{code: 404}
	}
	if g.find(d.account) == nil {
		return nil, nil, queryError{code: 403}
	}
	switch child.Tag {
	case "query":
		return []node{g.node()}, nil, nil
	case "subject":
		content, _ := child.Content.([]byte)
		return nil, func() error { g.renameLocked(d.account, string(content)); return nil }, nil
	}
	return nil, nil, nil
}

func jidOrString(n *node, attr string) types.JID {
	jid, ok := n.Attrs[attr].(types.JID)
	if !ok {
		jid, _ = types.ParseJID(stringOf(n, attr))
	}
	return jid
}
