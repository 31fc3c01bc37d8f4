package watest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	waBinary "go.mau.fi/whatsmeow/binary"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/util/keys"
)

// queryError is an answer of type error.
type queryError struct {
	code int
	text string
}

func (e queryError) Error() string { return fmt.Sprintf("%d %s", e.code, e.text) }

var queryTexts = map[int]string{
	400: "bad-request", 401: "not-authorized", 403: "forbidden", 404: "item-not-found", 406: "not-acceptable", 429: "rate-overlimit", 500: "internal-server-error", 503: "service-unavailable",
}

// iqLocked answers a query, or takes the answer to one of ours.
func (s *Server) iqLocked(c *conn, n *node) {
	if kind := stringOf(n, "type"); kind == "result" || kind == "error" {
		if c.link != nil && stringOf(n, "id") == c.link.request && !c.link.done {
			s.signedLocked(c, n)
		}
		return
	}
	namespace := stringOf(n, "xmlns")
	if namespace == "w:p" && s.faults.silent {
		return
	}
	answer := node{Tag: "iq", Attrs: attrs{"from": n.Attrs["to"], "id": n.Attrs["id"], "type": "result"}}
	var then func() error
	var err error
	own := (*waBinary.Node)(nil)
	if s.faults.iq != nil {
		own = s.faults.iq(n)
	}
	switch {
	case own != nil:
		answer.Content = own.Content
		for name, value := range own.Attrs {
			answer.Attrs[name] = value
		}
	case s.faults.iqErrors[namespace] != 0:
		err = queryError{code: s.faults.iqErrors[namespace]}
	default:
		var content []node
		content, then, err = s.queryLocked(c, namespace, n)
		if len(content) > 0 {
			answer.Content = content
		}
	}
	if err != nil {
		e := queryError{code: 500}
		if !errors.As(err, &e) {
			e.text = err.Error()
		}
		if e.text == "" {
			e.text = queryTexts[e.code]
		}
		answer.Attrs["type"] = "error"
		answer.Content = []node{{Tag: "error", Attrs: attrs{"code": e.code, "text": e.text}}}
	}
	s.sendLocked(c, answer)
	if err == nil && then != nil {
		if err := then(); err != nil && c.link != nil {
			c.link.done, c.link.err = true, err
		}
	}
}

func (s *Server) queryLocked(c *conn, namespace string, n *node) (content []node, then func() error, err error) {
	if c.device == nil {
		if c.link == nil || namespace != "md" || len(n.GetChildren()) != 1 {
			return nil, nil, nil
		}
		return s.linkQueryLocked(c, n)
	}
	d, children := c.device, n.GetChildren()
	if len(children) == 0 {
		return nil, nil, nil
	}
	child := children[0]
	switch namespace {
	case "passive":
		if child.Tag == "active" {
			return nil, func() error { return s.activateLocked(d) }, nil
		}
	case "encrypt":
		content, err = s.keysLocked(d, n)
	case "usync":
		content, err = s.usyncLocked(child)
	case "w:g2":
		content, then, err = s.groupQueryLocked(d, n)
	case "w:m":
		content = []node{{
			Tag:     "media_conn",
			Attrs:   attrs{"auth": "auth", "ttl": 3600, "auth_ttl": 3600, "max_buckets": 12},
			Content: []node{{Tag: "host", Attrs: attrs{"hostname": "mmg.whatsapp.net"}}},
		}}
	case "w:sync:app:state":
		content, then, err = s.stateQueryLocked(d, n)
	case "privacy":
		if child.Tag == "privacy" {
			content = []node{{Tag: "privacy", Content: []node{
				{Tag: "category", Attrs: attrs{"name": "readreceipts", "value": "all"}},
				{Tag: "category", Attrs: attrs{"name": "groupadd", "value": "all"}},
			}}}
		}
	case "md":
		if child.Tag == "remove-companion-device" {
			return nil, func() error {
				d.account.devices = slices.DeleteFunc(d.account.devices, func(other *device) bool { return other == d })
				return nil
			}, nil
		}
	case "blocklist":
		content = []node{{Tag: "list", Attrs: attrs{"dhash": "0"}}}
	case "w:profile:picture":
		err = queryError{code: 404}
	}
	return content, then, err
}

// activateLocked begins to send what waited, as a backlog.
func (s *Server) activateLocked(d *device) error {
	if d.conn == nil {
		return nil
	}
	if !d.greeted {
		d.greeted = true
		if err := s.greetLocked(d); err != nil {
			return err
		}
	}
	count := map[string]int{}
	for _, waiting := range d.waiting {
		count[waiting.node.Tag]++
	}
	s.sendLocked(d.conn, node{Tag: "ib", Attrs: attrs{"from": types.ServerJID}, Content: []node{{
		Tag: "offline_preview",
		Attrs: attrs{
			"count": len(d.waiting), "message": count["message"], "receipt": count["receipt"],
			"notification": count["notification"], "call": 0, "appdata": 0,
		},
	}}})
	for i, waiting := range d.waiting {
		n := waiting.node
		n.Attrs = attrs{"offline": i}
		for name, value := range waiting.node.Attrs {
			n.Attrs[name] = value
		}
		waiting.sent = true
		s.sendLocked(d.conn, n)
	}
	s.sendLocked(d.conn, node{Tag: "ib", Attrs: attrs{"from": types.ServerJID}, Content: []node{{Tag: "offline", Attrs: attrs{"count": len(d.waiting)}}}})
	d.active = true
	return nil
}

func (s *Server) keysLocked(d *device, n *node) ([]node, error) {
	if n.Attrs["type"] == "set" {
		registration, identity := bytesOf(*n, "registration"), bytesOf(*n, "identity")
		if len(registration) != 4 || len(identity) != 32 {
			return nil, queryError{code: 400}
		}
		signed, err := readPreKey(n.GetChildByTag("skey"))
		if err != nil {
			return nil, err
		}
		if signed.Signature == nil || !verify64(identity, append([]byte{5}, signed.Pub[:]...), signed.Signature[:]) {
			return nil, queryError{code: 406, text: "the signed key's signature is wrong"}
		}
		list := n.GetChildByTag("list")
		var uploaded []*keys.PreKey
		for _, child := range list.GetChildren() {
			key, err := readPreKey(child)
			if err != nil {
				return nil, err
			}
			uploaded = append(uploaded, key)
		}
		d.registration, d.identity, d.signed = binary.BigEndian.Uint32(registration), [32]byte(identity), signed
		d.prekeys = append(d.prekeys, uploaded...)
		return nil, nil
	}
	if _, ok := n.GetOptionalChildByTag("count"); ok {
		n := len(d.prekeys)
		if n == 0 && !s.fullUpload {
			n = 1
		}
		return []node{{Tag: "count", Attrs: attrs{"value": n}}}, nil
	}
	asked := n.GetChildByTag("key")
	var users []node
	for _, user := range asked.GetChildren() {
		answer := node{Tag: "user", Attrs: attrs{"jid": user.Attrs["jid"]}}
		content, err := []node(nil), error(queryError{code: 404})
		if other := s.deviceLocked(jidOf(&user, "jid")); other != nil {
			content, err = other.bundleNodes()
		}
		if err != nil {
			content = []node{{Tag: "error", Attrs: attrs{"code": 404, "text": "item-not-found"}}}
		}
		answer.Content = content
		users = append(users, answer)
	}
	return []node{{Tag: "list", Content: users}}, nil
}

func (s *Server) usyncLocked(n node) ([]node, error) {
	query := n.GetChildByTag("query")
	wanted := map[string]bool{}
	for _, child := range query.GetChildren() {
		wanted[child.Tag] = true
	}
	list := n.GetChildByTag("list")
	var users []node
	for _, user := range list.GetChildren() {
		if contact := bytesOf(user, "contact"); contact != nil {
			number := strings.TrimPrefix(strings.TrimSuffix(string(contact), "@"+types.LegacyUserServer), "+")
			answer := node{Tag: "user", Content: []node{{Tag: "contact", Attrs: attrs{"type": "out"}, Content: contact}}}
			if a := s.accounts[number]; a != nil {
				answer.Attrs = attrs{"jid": a.lid, "pn_jid": a.pn}
				answer.Content = []node{{Tag: "contact", Attrs: attrs{"type": "in"}, Content: contact}}
			} else {
				answer.Attrs = attrs{"pn_jid": types.NewJID(number, types.DefaultUserServer)}
			}
			users = append(users, answer)
			continue
		}
		jid := jidOf(&user, "jid")
		a := s.accounts[jid.User]
		if a == nil {
			continue
		}
		var content []node
		if wanted["devices"] {
			var devices []node
			for _, d := range a.devices {
				one := node{Tag: "device", Attrs: attrs{"id": int(d.id)}}
				if d.id != 0 {
					one.Attrs["key-index"] = int(d.id)
				}
				devices = append(devices, one)
			}
			content = append(content, node{Tag: "devices", Content: []node{{Tag: "device-list", Content: devices}}})
		}
		if wanted["lid"] {
			content = append(content, node{Tag: "lid", Attrs: attrs{"val": a.lid}})
		}
		if wanted["status"] {
			content = append(content, node{Tag: "status", Content: []byte("there")})
		}
		users = append(users, node{Tag: "user", Attrs: attrs{"jid": jid}, Content: content})
	}
	return []node{{Tag: "usync", Attrs: attrs{"sid": n.Attrs["sid"]}, Content: []node{
		{Tag: "result"}, {Tag: "list", Content: users},
	}}}, nil
}
