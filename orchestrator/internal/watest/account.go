package watest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	waBinary "go.mau.fi/whatsmeow/binary"
	"go.mau.fi/whatsmeow/store"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/util/keys"
)

// account is one person's number, with all devices.
type account struct {
	pn, lid types.JID
	name    string
	devices []*device
	next    uint16
	state   appState
}

// device is what the server knows of a device: its public keys and, for a linked
// client, its connection and what it has not acknowledged yet.
type device struct {
	account      *account
	id           uint16
	registration uint32
	identity     [32]byte
	signed       *keys.PreKey
	prekeys      []*keys.PreKey

	sim *Device // or else it is a linked client:

	noise   []byte
	name    string
	conn    *conn
	active  bool
	greeted bool
	logins  int
	waiting []*stanza
}

// stanza waits until the client acknowledges it, and is sent again at each login.
type stanza struct {
	node node
	sent bool
}

func (d *device) pn() types.JID  { return withDevice(d.account.pn, d.id) }
func (d *device) lid() types.JID { return withDevice(d.account.lid, d.id) }

// in is the address of the device in this addressing mode.
func (d *device) in(mode types.AddressingMode) types.JID {
	if mode == PN {
		return d.pn()
	}
	return d.lid()
}

func (a *account) in(mode types.AddressingMode) types.JID {
	if mode == PN {
		return a.pn
	}
	return a.lid
}

func withDevice(jid types.JID, id uint16) types.JID {
	jid.Device = id
	return jid
}

func (a *account) linkedLocked() []*device {
	return slices.DeleteFunc(slices.Clone(a.devices), func(d *device) bool { return d.sim != nil })
}

func (a *account) device(id uint16) *device {
	i := slices.IndexFunc(a.devices, func(d *device) bool { return d.id == id })
	if i < 0 {
		return nil
	}
	return a.devices[i]
}

func (s *Server) deviceLocked(jid types.JID) *device {
	if a := s.accounts[jid.User]; a != nil {
		return a.device(jid.Device)
	}
	return nil
}

// addAccountLocked makes a number, whose LID has other digits, as real ones have.
func (s *Server) addAccountLocked(number, name string) (*account, error) {
	if s.accounts[number] != nil {
		return nil, fmt.Errorf("%s is taken", number)
	}
	lid := fmt.Sprintf("%d", 100000000000001+7919*len(s.people))
	a := &account{
		pn:   types.NewJID(number, types.DefaultUserServer),
		lid:  types.NewJID(lid, types.HiddenUserServer),
		name: name,
		next: 12, // of two digits, since a suffix of one digit hides mistakes
	}
	s.accounts[number], s.accounts[lid] = a, a
	s.people = append(s.people, a)
	return a, nil
}

// Device is a simulated device: a peer's phone, a peer's further device, or the
// phone that clients are linked to.
type Device struct {
	server  *Server
	account *account
	device  *device
	signal  *store.Device

	told       map[string]bool // who has our sender key of which group
	sent       map[string]*sentMessage
	seen       map[string]bool
	secrets    map[string][]byte
	inbox      []Message
	read       int
	duplicates int
	failures   int
	receipts   []Receipt
	typing     []Typing
	typingRead int
	attempts   map[string]int
	mute       bool
	helpful    bool // a phone that answers requests
	passkey    bool // a phone that asks for a passkey
}

// Member is who can be in a group, or written to: a *Device or a *Phone.
type Member interface{ self() *Device }

func (d *Device) self() *Device { return d }

// JID is the phone number's address, LID the hidden one.
func (d *Device) JID() types.JID { return d.account.pn }

// LID is the address that says nothing of the number.
func (d *Device) LID() types.JID { return d.account.lid }

// Name is the push name.
func (d *Device) Name() string { return d.account.name }

func (s *Server) addDeviceLocked(a *account, id uint16) *Device {
	d := &Device{server: s, account: a, device: &device{account: a, id: id}}
	d.device.sim = d
	d.resetLocked()
	a.devices = append(a.devices, d.device)
	return d
}

func (d *Device) resetLocked() {
	d.signal = newSignal()
	d.device.registration = d.signal.RegistrationID
	d.device.identity = *d.signal.IdentityKey.Pub
	d.device.signed = d.signal.SignedPreKey
	d.told, d.attempts = map[string]bool{}, map[string]int{}
	if d.sent == nil {
		d.sent, d.seen, d.secrets = map[string]*sentMessage{}, map[string]bool{}, map[string][]byte{}
	}
}

// Peer adds a person with one device.
func (s *Server) Peer(number, name string) *Device {
	s.t.Helper()
	var d *Device
	s.do(func() error {
		a, err := s.addAccountLocked(number, name)
		if err == nil {
			d = s.addDeviceLocked(a, 0)
		}
		return err
	})
	return d
}

// AddDevice gives the person a further device, of which no client knows yet.
func (d *Device) AddDevice() *Device {
	var added *Device
	d.server.do(func() error {
		added = d.server.addDeviceLocked(d.account, d.account.next)
		d.account.next++
		return nil
	})
	return added
}

// Reinstall gives the device new keys and tells the clients, if announced.
func (d *Device) Reinstall(announced bool) {
	d.server.do(func() error {
		d.resetLocked()
		if !announced {
			return nil
		}
		for _, a := range d.server.people {
			for _, to := range a.linkedLocked() {
				d.server.deliverLocked(to, node{
					Tag:     "notification",
					Attrs:   attrs{"from": d.account.lid, "type": "encrypt", "id": d.server.idLocked(), "t": now()},
					Content: []node{{Tag: "identity"}},
				})
			}
		}
		return nil
	})
}

// bundleNodes answers a query for the keys of one device.
func (d *device) bundleNodes() ([]node, error) {
	if d.signed == nil {
		return nil, errors.New("no keys yet")
	}
	content := []node{
		{Tag: "registration", Content: binary.BigEndian.AppendUint32(nil, d.registration)},
		{Tag: "type", Content: []byte{5}},
		{Tag: "identity", Content: d.identity[:]},
		preKeyNode(d.signed),
	}
	if d.sim != nil {
		key, _ := d.sim.memory().GenOnePreKey(context.Background())
		content = append(content, preKeyNode(key))
	} else if len(d.prekeys) > 0 {
		content = append(content, preKeyNode(d.prekeys[0]))
		d.prekeys = d.prekeys[1:]
	}
	return content, nil
}

func preKeyNode(key *keys.PreKey) node {
	n := node{Tag: "key", Content: []node{
		{Tag: "id", Content: binary.BigEndian.AppendUint32(nil, key.KeyID)[1:]},
		{Tag: "value", Content: key.Pub[:]},
	}}
	if key.Signature != nil {
		n.Tag = "skey"
		n.Content = append(n.GetChildren(), node{Tag: "signature", Content: key.Signature[:]})
	}
	return n
}

func readPreKey(n waBinary.Node) (*keys.PreKey, error) {
	id, value := bytesOf(n, "id"), bytesOf(n, "value")
	if len(id) != 3 || len(value) != 32 {
		return nil, fmt.Errorf("key %s", n.String())
	}
	key := &keys.PreKey{KeyPair: keys.KeyPair{Pub: (*[32]byte)(value)}, KeyID: binary.BigEndian.Uint32(append([]byte{0}, id...))}
	if signature := bytesOf(n, "signature"); len(signature) == 64 {
		key.Signature = (*[64]byte)(signature)
	}
	return key, nil
}

func bytesOf(n waBinary.Node, path ...string) []byte {
	child, ok := n.GetOptionalChildByTag(path...)
	if !ok {
		return nil
	}
	content, _ := child.Content.([]byte)
	return content
}

func jidOf(n *waBinary.Node, attr string) types.JID {
	jid, _ := n.Attrs[attr].(types.JID)
	return jid
}

func stringOf(n *waBinary.Node, attr string) string {
	value, _ := n.Attrs[attr].(string)
	return value
}
