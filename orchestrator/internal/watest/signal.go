package watest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mau.fi/libsignal/ecc"
	"go.mau.fi/libsignal/groups"
	"go.mau.fi/libsignal/keys/identity"
	"go.mau.fi/libsignal/keys/prekey"
	"go.mau.fi/libsignal/protocol"
	"go.mau.fi/libsignal/session"
	"go.mau.fi/libsignal/util/optional"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/store"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/util/keys"
	waLog "go.mau.fi/whatsmeow/util/log"
	"google.golang.org/protobuf/proto"
)

// memory is a Signal store of one simulated device. The rest of whatsmeow's
// stores is not needed and comes from NoopStore.
type memory struct {
	store.NoopStore
	identities map[string][32]byte
	sessions   map[string][]byte
	prekeys    map[uint32]*keys.PreKey
	senderKeys map[string][]byte
	syncKeys   map[string]store.AppStateSyncKey
	macs       map[string][]byte
}

var _ store.AllSessionSpecificStores = (*memory)(nil)

func newSignal() *store.Device {
	identityKey := keys.NewKeyPair()
	d := &store.Device{
		Log:            waLog.Noop,
		IdentityKey:    identityKey,
		SignedPreKey:   identityKey.CreateSignedPreKey(1),
		RegistrationID: 4711,
	}
	d.SetAllStores(&memory{
		identities: map[string][32]byte{},
		sessions:   map[string][]byte{},
		prekeys:    map[uint32]*keys.PreKey{},
		senderKeys: map[string][]byte{},
		syncKeys:   map[string]store.AppStateSyncKey{},
		macs:       map[string][]byte{},
	})
	return d
}

func (m *memory) PutIdentity(_ context.Context, address string, key [32]byte) error {
	m.identities[address] = key
	return nil
}

func (m *memory) IsTrustedIdentity(_ context.Context, address string, key [32]byte) (bool, error) {
	known, ok := m.identities[address]
	return !ok || known == key, nil
}

func (m *memory) GetSession(_ context.Context, address string) ([]byte, error) {
	return m.sessions[address], nil
}

func (m *memory) HasSession(_ context.Context, address string) (bool, error) {
	return m.sessions[address] != nil, nil
}

func (m *memory) PutSession(_ context.Context, address string, session []byte) error {
	m.sessions[address] = session
	return nil
}

func (m *memory) DeleteSession(_ context.Context, address string) error {
	delete(m.sessions, address)
	return nil
}

func (m *memory) GenOnePreKey(context.Context) (*keys.PreKey, error) {
	key := keys.NewPreKey(uint32(len(m.prekeys) + 1))
	m.prekeys[key.KeyID] = key
	return key, nil
}

func (m *memory) GetPreKey(_ context.Context, id uint32) (*keys.PreKey, error) {
	return m.prekeys[id], nil
}

// RemovePreKey keeps the place, so that no identifier comes twice.
func (m *memory) RemovePreKey(_ context.Context, id uint32) error {
	m.prekeys[id] = nil
	return nil
}

func (m *memory) PutSenderKey(_ context.Context, group, user string, key []byte) error {
	m.senderKeys[group+" "+user] = key
	return nil
}

func (m *memory) GetSenderKey(_ context.Context, group, user string) ([]byte, error) {
	return m.senderKeys[group+" "+user], nil
}

func (m *memory) PutAppStateSyncKey(_ context.Context, id []byte, key store.AppStateSyncKey) error {
	m.syncKeys[string(id)] = key
	return nil
}

func (m *memory) GetAppStateSyncKey(_ context.Context, id []byte) (*store.AppStateSyncKey, error) {
	if key, ok := m.syncKeys[string(id)]; ok {
		return &key, nil
	}
	return nil, nil
}

func (m *memory) PutAppStateMutationMACs(_ context.Context, name string, _ uint64, mutations []store.AppStateMutationMAC) error {
	for _, mutation := range mutations {
		m.macs[name+string(mutation.IndexMAC)] = mutation.ValueMAC
	}
	return nil
}

func (m *memory) DeleteAppStateMutationMACs(_ context.Context, name string, indexes [][]byte) error {
	for _, index := range indexes {
		delete(m.macs, name+string(index))
	}
	return nil
}

func (m *memory) GetAppStateMutationMAC(_ context.Context, name string, index []byte) ([]byte, error) {
	return m.macs[name+string(index)], nil
}

func (d *Device) memory() *memory { return d.signal.Sessions.(*memory) }

// pad appends up to 15 bytes that each say how many they are.
func pad(plain []byte) []byte {
	n := 1 + len(plain)%15
	return append(slices.Clip(plain), bytes.Repeat([]byte{byte(n)}, n)...)
}

func unpad(padded []byte) ([]byte, error) {
	if len(padded) == 0 {
		return nil, errors.New("nothing but padding")
	}
	n := int(padded[len(padded)-1])
	if n == 0 || n > 15 || n > len(padded) || !bytes.HasSuffix(padded, bytes.Repeat([]byte{byte(n)}, n)) {
		return nil, fmt.Errorf("padding of %d", n)
	}
	return padded[:len(padded)-n], nil
}

func (d *Device) cipher(with *device) *session.Cipher {
	address := with.lid().SignalAddress()
	return session.NewCipher(session.NewBuilderFromSignal(d.signal, address, store.SignalProtobufSerializer), address)
}

func (d *Device) hasSession(with *device) bool {
	return d.memory().sessions[with.lid().SignalAddress().String()] != nil
}

func (d *Device) forget(with *device) {
	address := with.lid().SignalAddress().String()
	delete(d.memory().sessions, address)
	delete(d.memory().identities, address)
}

// meet starts a session by a bundle of the other's keys.
func (d *Device) meet(with *device, bundle *prekey.Bundle) error {
	address := with.lid().SignalAddress()
	return session.NewBuilderFromSignal(d.signal, address, store.SignalProtobufSerializer).ProcessBundle(context.Background(), bundle)
}

func bundleOf(registration, id uint32, identityKey [32]byte, signed, once *keys.PreKey) *prekey.Bundle {
	onceID, oncePub := optional.NewEmptyUint32(), ecc.ECPublicKeyable(nil)
	if once != nil {
		onceID, oncePub = optional.NewOptionalUint32(once.KeyID), ecc.NewDjbECPublicKey(*once.Pub)
	}
	return prekey.NewBundle(registration, id, onceID, signed.KeyID, oncePub, ecc.NewDjbECPublicKey(*signed.Pub),
		*signed.Signature, identity.NewKey(ecc.NewDjbECPublicKey(identityKey)))
}

// encrypt seals a message for one device of a client, as pkmsg or msg.
func (d *Device) encrypt(to *device, message *waE2E.Message) (kind string, sealed []byte, err error) {
	if !d.hasSession(to) {
		if to.signed == nil {
			return "", nil, fmt.Errorf("%s has not uploaded keys yet", to.pn())
		}
		var once *keys.PreKey
		if len(to.prekeys) > 0 {
			once, to.prekeys = to.prekeys[0], to.prekeys[1:]
		}
		if err := d.meet(to, bundleOf(to.registration, uint32(to.id), to.identity, to.signed, once)); err != nil {
			return "", nil, err
		}
	}
	plain, err := proto.Marshal(message)
	if err != nil {
		return "", nil, err
	}
	out, err := d.cipher(to).Encrypt(context.Background(), pad(plain))
	if err != nil {
		return "", nil, err
	}
	kind = "msg"
	if out.Type() == protocol.PREKEY_TYPE {
		kind = "pkmsg"
	}
	return kind, out.Serialize(), nil
}

// decrypt opens what a client encrypted for this device alone.
func (d *Device) decrypt(from *device, kind string, sealed []byte) (*waE2E.Message, error) {
	var padded []byte
	switch kind {
	case "pkmsg":
		message, err := protocol.NewPreKeySignalMessageFromBytes(sealed, store.SignalProtobufSerializer.PreKeySignalMessage, store.SignalProtobufSerializer.SignalMessage)
		if err != nil {
			return nil, err
		}
		if padded, err = d.cipher(from).DecryptMessage(context.Background(), message); err != nil {
			return nil, err
		}
	case "msg":
		message, err := protocol.NewSignalMessageFromBytes(sealed, store.SignalProtobufSerializer.SignalMessage)
		if err != nil {
			return nil, err
		}
		if padded, err = d.cipher(from).Decrypt(context.Background(), message); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("encryption %q", kind)
	}
	return parse(padded)
}

func parse(padded []byte) (*waE2E.Message, error) {
	plain, err := unpad(padded)
	if err != nil {
		return nil, err
	}
	var message waE2E.Message
	return &message, proto.Unmarshal(plain, &message)
}

func senderKeyName(group types.JID, sender *device) *protocol.SenderKeyName {
	return protocol.NewSenderKeyName(group.String(), sender.lid().SignalAddress())
}

func (d *Device) groupBuilder() *groups.SessionBuilder {
	return groups.NewGroupSessionBuilder(d.signal, store.SignalProtobufSerializer)
}

// distribute makes the message that tells others this device's sender key.
func (d *Device) distribute(group types.JID) (*waE2E.SenderKeyDistributionMessage, error) {
	key, err := d.groupBuilder().Create(context.Background(), senderKeyName(group, d.device))
	if err != nil {
		return nil, err
	}
	return &waE2E.SenderKeyDistributionMessage{GroupID: new(group.String()), AxolotlSenderKeyDistributionMessage: key.Serialize()}, nil
}

func (d *Device) learn(group types.JID, from *device, message *waE2E.SenderKeyDistributionMessage) error {
	key, err := protocol.NewSenderKeyDistributionMessageFromBytes(message.GetAxolotlSenderKeyDistributionMessage(), store.SignalProtobufSerializer.SenderKeyDistributionMessage)
	if err != nil {
		return err
	}
	return d.groupBuilder().Process(context.Background(), senderKeyName(group, from), key)
}

func (d *Device) encryptGroup(group types.JID, message *waE2E.Message) ([]byte, error) {
	plain, err := proto.Marshal(message)
	if err != nil {
		return nil, err
	}
	out, err := groups.NewGroupCipher(d.groupBuilder(), senderKeyName(group, d.device), d.signal).Encrypt(context.Background(), pad(plain))
	if err != nil {
		return nil, err
	}
	return out.SignedSerialize(), nil
}

func (d *Device) decryptGroup(group types.JID, from *device, sealed []byte) (*waE2E.Message, error) {
	message, err := protocol.NewSenderKeyMessageFromBytes(sealed, store.SignalProtobufSerializer.SenderKeyMessage)
	if err != nil {
		return nil, err
	}
	padded, err := groups.NewGroupCipher(d.groupBuilder(), senderKeyName(group, from), d.signal).Decrypt(context.Background(), message)
	if err != nil {
		return nil, err
	}
	return parse(padded)
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return b
}

func newMessageID() string { return "3A" + strings.ToUpper(rand.Text()[:18]) }
