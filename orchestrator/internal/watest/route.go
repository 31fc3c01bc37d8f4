package watest

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"

	waBinary "go.mau.fi/whatsmeow/binary"
	"go.mau.fi/whatsmeow/types"
)

// deliverLocked gives a stanza to a linked client: at once if it is there, and
// again at each login until it is acknowledged.
func (s *Server) deliverLocked(to *device, n node) {
	waiting := &stanza{node: n}
	to.waiting = append(to.waiting, waiting)
	if to.active && to.conn != nil {
		waiting.sent = true
		s.sendLocked(to.conn, n)
	}
}

// settleLocked forgets the first stanza that a client has acknowledged.
func (d *device) settleLocked(match func(n *node) bool) {
	i := slices.IndexFunc(d.waiting, func(waiting *stanza) bool { return waiting.sent && match(&waiting.node) })
	if i >= 0 {
		d.waiting = slices.Delete(d.waiting, i, i+1)
	}
}

// Waiting counts what linked clients have not acknowledged yet.
func (p *Phone) Waiting() int {
	p.server.mu.Lock()
	defer p.server.mu.Unlock()
	return p.waitingLocked()
}

func (p *Phone) waitingLocked() int {
	n := 0
	for _, d := range p.account.linkedLocked() {
		n += len(d.waiting)
	}
	return n
}

// Drained waits until the linked clients have acknowledged everything.
func (p *Phone) Drained(ctx context.Context) {
	p.server.t.Helper()
	p.server.must(p.server.wait(ctx, "acknowledgements", func() bool { return p.waitingLocked() == 0 }))
}

// Redeliver sends once more what was sent and not acknowledged, in the same
// connection.
func (p *Phone) Redeliver() {
	s := p.server
	s.do(func() error {
		for _, d := range p.account.linkedLocked() {
			for _, waiting := range d.waiting {
				if d.conn != nil && waiting.sent {
					s.sendLocked(d.conn, waiting.node)
				}
			}
		}
		return nil
	})
}

// ackLocked takes a client's ack of a message, receipt or notification.
func (s *Server) ackLocked(d *device, n *node) {
	class, id := stringOf(n, "class"), stringOf(n, "id")
	d.settleLocked(func(waiting *node) bool {
		return waiting.Tag == class && waiting.Attrs["id"] == id &&
			jidOf(waiting, "participant") == jidOf(n, "participant") &&
			(class == "message" || stringOf(waiting, "type") == stringOf(n, "type"))
	})
}

// Receipt is what a client told the sender of a message.
type Receipt struct {
	ID   string
	Type string // "" and "inactive": delivered; "read", "retry" …
	From types.JID
}

func (s *Server) receiptLocked(d *device, n *node) {
	kind, id := stringOf(n, "type"), stringOf(n, "id")
	ack := node{Tag: "ack", Attrs: attrs{"class": "receipt", "id": id, "from": n.Attrs["to"]}}
	for _, name := range []string{"type", "participant"} {
		if value, ok := n.Attrs[name]; ok {
			ack.Attrs[name] = value
		}
	}
	s.sendLocked(d.conn, ack)
	switch kind {
	case "", "inactive", "sender", "peer_msg", "hist_sync":
		d.settleLocked(func(waiting *node) bool { return waiting.Tag == "message" && waiting.Attrs["id"] == id })
	}
	to, participant := jidOf(n, "to"), jidOf(n, "participant")
	if to.Server == types.GroupServer {
		to = participant
	}
	a := s.accounts[to.User]
	if a == nil {
		return
	}
	ids := []string{id}
	list := n.GetChildByTag("list")
	for _, item := range list.GetChildren() {
		ids = append(ids, stringOf(&item, "id"))
	}
	for _, other := range a.devices {
		if other.sim == nil {
			continue
		}
		for _, id := range ids {
			other.sim.receipts = append(other.sim.receipts, Receipt{ID: id, Type: kind, From: d.lid()})
		}
		if kind == "retry" && other.id == to.Device {
			other.sim.retryLocked(d, n)
		}
	}
}

// Typing is what a client shows of its writing in a chat.
type Typing struct {
	Chat  types.JID
	State types.ChatPresence
	Media types.ChatPresenceMedia
}

func (s *Server) chatstateLocked(d *device, n *node) {
	children := n.GetChildren()
	if len(children) != 1 {
		return
	}
	to := jidOf(n, "to")
	typing := Typing{Chat: to, State: types.ChatPresence(children[0].Tag), Media: types.ChatPresenceMedia(stringOf(&children[0], "media"))}
	readers := []*account{s.accounts[to.User]}
	if g := s.groups[to.User]; g != nil {
		readers = g.accountsLocked()
	}
	for _, a := range readers {
		if a == nil || a == d.account {
			continue
		}
		for _, other := range a.devices {
			if other.sim != nil {
				other.sim.typing = append(other.sim.typing, typing)
			}
		}
	}
}

// messageLocked takes a message of a client: checks it, answers it, passes it on.
func (s *Server) messageLocked(d *device, n *node) {
	if s.faults.dropMessages > 0 {
		s.faults.dropMessages--
		return
	}
	to := jidOf(n, "to")
	ack := node{Tag: "ack", Attrs: attrs{"class": "message", "id": n.Attrs["id"], "from": to, "t": now()}}
	if participant, ok := n.Attrs["participant"]; ok { // an answer to a retry receipt
		ack.Attrs["participant"] = participant
	}
	refuse := func(code int) {
		ack.Attrs["error"] = code
		s.answerLocked(d.conn, ack)
	}
	if len(s.faults.ackErrors) > 0 {
		code := s.faults.ackErrors[0]
		s.faults.ackErrors = s.faults.ackErrors[1:]
		refuse(code)
		return
	}
	var chat types.JID
	var readers []*device
	g := s.groups[to.User]
	switch {
	case to.Server == types.GroupServer && g == nil:
		refuse(404)
		return
	case to.Server == types.GroupServer && g.find(d.account) == nil:
		refuse(403)
		return
	case to.Server == types.GroupServer:
		chat = to
		for _, a := range g.accountsLocked() {
			readers = append(readers, a.devices...)
		}
		if participant := jidOf(n, "participant"); !participant.IsEmpty() {
			readers = []*device{s.deviceLocked(participant)}
		} else if phash := stringOf(n, "phash"); phash != "" {
			if want := participantHash(g.mode, readers); want != phash {
				ack.Attrs["phash"] = want
			}
		}
	default:
		a := s.accounts[to.User]
		if a == nil {
			refuse(404)
			return
		}
		chat = a.lid
		readers = slices.Concat(a.devices, d.account.devices)
		if to.Device != 0 || stringOf(n, "device_fanout") == "false" || stringOf(n, "category") == "peer" {
			readers = []*device{a.device(to.Device)}
		}
	}
	s.answerLocked(d.conn, ack)
	direct := map[types.JID]node{}
	participants := n.GetChildByTag("participants")
	for _, one := range participants.GetChildren() {
		if enc, ok := one.GetOptionalChildByTag("enc"); ok {
			direct[jidOf(&one, "jid")] = enc
		}
	}
	var shared *waBinary.Node
	if enc, ok := n.GetOptionalChildByTag("enc"); ok {
		shared = &enc
	}
	for _, reader := range readers {
		if reader == nil || reader == d {
			continue
		}
		enc, ok := direct[reader.lid()]
		if !ok {
			enc, ok = direct[reader.pn()]
		}
		var parts []node
		if ok {
			parts = append(parts, enc)
		}
		if shared != nil {
			parts = append(parts, *shared)
		}
		if len(parts) == 0 {
			continue
		}
		if reader.sim != nil {
			reader.sim.receiveLocked(arrival{id: stringOf(n, "id"), chat: chat, group: g, from: d, node: n, parts: parts})
			continue
		}
		s.deliverLocked(reader, s.forward(n, g, chat, d, reader, parts))
	}
}

// forward is a client's message as another client gets it.
func (s *Server) forward(n *node, g *Group, chat types.JID, from, to *device, parts []node) node {
	out := node{Tag: "message", Attrs: attrs{"id": n.Attrs["id"], "t": now(), "type": n.Attrs["type"], "notify": from.account.name}, Content: parts}
	if edit, ok := n.Attrs["edit"]; ok {
		out.Attrs["edit"] = edit
	}
	switch {
	case g != nil:
		g.address(out.Attrs, from)
	default:
		out.Attrs["from"], out.Attrs["sender_pn"] = from.lid(), from.account.pn
		if from.account == to.account {
			out.Attrs["recipient"] = chat
		}
	}
	return out
}

func participantHash(mode types.AddressingMode, devices []*device) string {
	var names []string
	for _, d := range devices {
		names = append(names, d.in(mode).ADString())
	}
	slices.Sort(names)
	sum := sha256.Sum256([]byte(strings.Join(names, "")))
	return fmt.Sprintf("2:%s", base64.RawStdEncoding.EncodeToString(sum[:6]))
}
