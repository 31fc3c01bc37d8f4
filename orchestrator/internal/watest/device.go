package watest

import (
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"go.mau.fi/libsignal/signalerror"
	"go.mau.fi/whatsmeow/proto/waAdv"
	"go.mau.fi/whatsmeow/proto/waCommon"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/util/gcmutil"
	"google.golang.org/protobuf/proto"
)

// Message is what a device decrypted of a client's message.
type Message struct {
	ID    string
	Chat  types.JID // the group, or the LID of the other person
	From  types.JID // the client's LID, with its device
	Text  string    // of a text, caption or edit
	Proto *waE2E.Message
	Edit  string // the stanza's edit attribute
	Retry int    // 1 and more: it came as the answer to a retry receipt
}

// Chat is where a device writes to: a *Group, a *Device or a *Phone.
type Chat interface {
	target() (types.JID, *Group, *account)
}

func (d *Device) target() (types.JID, *Group, *account) { return d.account.lid, nil, d.account }

type sentMessage struct {
	to      Chat
	message *waE2E.Message
	options options
}

type options struct {
	id          string
	at          time.Time
	mode        types.AddressingMode
	corrupt     bool
	withholdKey bool
	context     *waE2E.ContextInfo
	mentions    []Member
}

// Option says how a message is sent.
type Option func(*options)

// ID sends under this id.
func ID(id string) Option { return func(o *options) { o.id = id } }

// At sends with this time in place of now.
func At(t time.Time) Option { return func(o *options) { o.at = t } }

// FromNumber sends a direct message under the sender's number, not under its LID.
func FromNumber() Option { return func(o *options) { o.mode = PN } }

// Corrupt spoils the ciphertext, so that the client asks for it again.
func Corrupt() Option { return func(o *options) { o.corrupt = true } }

// WithholdKey leaves the sender key out, so that the client asks for it.
func WithholdKey() Option { return func(o *options) { o.withholdKey = true } }

// Mention tells that the text mentions these, by the address the chat uses.
func Mention(who ...Member) Option {
	return func(o *options) { o.mentions = append(o.mentions, who...) }
}

// Quote replies to a message of a client or of another device: who sent it, its
// id, and its content.
func Quote(sender types.JID, id string, quoted *waE2E.Message) Option {
	return func(o *options) {
		if o.context == nil {
			o.context = &waE2E.ContextInfo{}
		}
		o.context.StanzaID, o.context.Participant, o.context.QuotedMessage = new(id), new(sender.ToNonAD().String()), quoted
	}
}

// SendText sends a text to a group or person and returns its id.
func (d *Device) SendText(to Chat, text string, opts ...Option) string {
	d.server.t.Helper()
	o := collect(opts)
	message := &waE2E.Message{Conversation: new(text)}
	if info := o.contextInfo(to); info != nil {
		message = &waE2E.Message{ExtendedTextMessage: &waE2E.ExtendedTextMessage{Text: new(text), ContextInfo: info}}
	}
	return d.send(to, message, o)
}

// Send sends any message and returns its id.
func (d *Device) Send(to Chat, message *waE2E.Message, opts ...Option) string {
	d.server.t.Helper()
	return d.send(to, message, collect(opts))
}

func collect(opts []Option) options {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	if o.id == "" {
		o.id = newMessageID()
	}
	if o.at.IsZero() {
		o.at = time.Now()
	}
	return o
}

func (o options) contextInfo(to Chat) *waE2E.ContextInfo {
	info := o.context
	if len(o.mentions) > 0 && info == nil {
		info = &waE2E.ContextInfo{}
	}
	for _, who := range o.mentions {
		jid := who.self().account.lid
		if _, g, _ := to.target(); g != nil {
			jid = g.Address(who)
		}
		info.MentionedJID = append(info.MentionedJID, jid.String())
	}
	return info
}

// Edit changes an earlier text in the older form, which carries the new content
// openly within the encrypted message.
func (d *Device) Edit(to Chat, id, text string, opts ...Option) string {
	d.server.t.Helper()
	return d.Send(to, &waE2E.Message{EditedMessage: &waE2E.FutureProofMessage{Message: &waE2E.Message{
		ProtocolMessage: &waE2E.ProtocolMessage{
			Key:           d.ownKey(to, id),
			Type:          waE2E.ProtocolMessage_MESSAGE_EDIT.Enum(),
			EditedMessage: &waE2E.Message{Conversation: new(text)},
			TimestampMS:   new(time.Now().UnixMilli()),
		},
	}}}, opts...)
}

// EditSecret changes an earlier text in the newer form, sealed with that
// message's secret, which a client has to open by itself.
func (d *Device) EditSecret(to Chat, id, text string, opts ...Option) string {
	d.server.t.Helper()
	plain, err := proto.Marshal(&waE2E.Message{ProtocolMessage: &waE2E.ProtocolMessage{
		Key:           d.ownKey(to, id),
		Type:          waE2E.ProtocolMessage_MESSAGE_EDIT.Enum(),
		EditedMessage: &waE2E.Message{Conversation: new(text)},
		TimestampMS:   new(time.Now().UnixMilli()),
	}})
	d.server.must(err)
	sealed, iv, err := d.sealSecret(to, id, d.addressIn(to).String(), "Message Edit", plain, nil)
	d.server.must(err)
	return d.Send(to, &waE2E.Message{SecretEncryptedMessage: &waE2E.SecretEncryptedMessage{
		TargetMessageKey: d.ownKey(to, id),
		EncPayload:       sealed,
		EncIV:            iv,
		SecretEncType:    waE2E.SecretEncryptedMessage_MESSAGE_EDIT.Enum(),
	}}, opts...)
}

// Vote votes in a poll that a client sent and this device received.
func (d *Device) Vote(to Chat, poll Message, choices ...string) string {
	d.server.t.Helper()
	vote := &waE2E.PollVoteMessage{}
	for _, choice := range choices {
		sum := sha256.Sum256([]byte(choice))
		vote.SelectedOptions = append(vote.SelectedOptions, sum[:])
	}
	plain, err := proto.Marshal(vote)
	d.server.must(err)
	creator := poll.From.ToNonAD()
	if _, g, _ := to.target(); g != nil && g.mode == PN {
		creator = d.server.accountOf(creator).pn
	}
	me := d.addressIn(to).String()
	sealed, iv, err := d.sealSecret(to, poll.ID, creator.String(), "Poll Vote", plain, []byte(poll.ID+"\x00"+me))
	d.server.must(err)
	key := &waCommon.MessageKey{RemoteJID: new(chatName(to)), FromMe: new(false), ID: new(poll.ID), Participant: new(creator.String())}
	return d.Send(to, &waE2E.Message{PollUpdateMessage: &waE2E.PollUpdateMessage{
		PollCreationMessageKey: key,
		Vote:                   &waE2E.PollEncValue{EncPayload: sealed, EncIV: iv},
		SenderTimestampMS:      new(time.Now().UnixMilli()),
	}})
}

func (s *Server) accountOf(jid types.JID) *account {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accounts[jid.User]
}

// sealSecret encrypts with the secret of the message id, which creator sent.
func (d *Device) sealSecret(to Chat, id, creator, use string, plain, additional []byte) (sealed, iv []byte, err error) {
	d.server.mu.Lock()
	secret := d.secrets[id]
	d.server.mu.Unlock()
	if secret == nil {
		return nil, nil, fmt.Errorf("%s has no secret of %s", d.Name(), id)
	}
	key, err := hkdf.Key(sha256.New, secret, nil, id+creator+d.addressIn(to).String()+use, 32)
	if err != nil {
		return nil, nil, err
	}
	iv = randomBytes(12)
	sealed, err = gcmutil.Encrypt(key, iv, plain, additional)
	return sealed, iv, err
}

// React reacts to a message of sender; "" takes the reaction back.
func (d *Device) React(to Chat, sender types.JID, id, emoji string, opts ...Option) string {
	d.server.t.Helper()
	key := &waCommon.MessageKey{RemoteJID: new(chatName(to)), ID: new(id), FromMe: new(sender.User == d.addressIn(to).User)}
	if !key.GetFromMe() {
		key.Participant = new(sender.ToNonAD().String())
	}
	return d.Send(to, &waE2E.Message{ReactionMessage: &waE2E.ReactionMessage{
		Key: key, Text: new(emoji), SenderTimestampMS: new(time.Now().UnixMilli()),
	}}, opts...)
}

// Revoke deletes an own message for all.
func (d *Device) Revoke(to Chat, id string, opts ...Option) string {
	d.server.t.Helper()
	return d.Send(to, &waE2E.Message{ProtocolMessage: &waE2E.ProtocolMessage{
		Key: d.ownKey(to, id), Type: waE2E.ProtocolMessage_REVOKE.Enum(),
	}}, opts...)
}

func (d *Device) ownKey(to Chat, id string) *waCommon.MessageKey {
	return &waCommon.MessageKey{RemoteJID: new(chatName(to)), FromMe: new(true), ID: new(id)}
}

func chatName(to Chat) string {
	jid, _, _ := to.target()
	return jid.String()
}

func (d *Device) addressIn(to Chat) types.JID {
	if _, g, _ := to.target(); g != nil {
		return g.Address(d)
	}
	return d.account.lid
}

func (d *Device) send(to Chat, message *waE2E.Message, o options) string {
	d.server.t.Helper()
	d.server.do(func() error { return d.sendLocked(to, message, o) })
	return o.id
}

func (d *Device) sendLocked(to Chat, message *waE2E.Message, o options) error {
	message = proto.CloneOf(message)
	if message.GetProtocolMessage() == nil && message.GetReactionMessage() == nil {
		secret := randomBytes(32)
		d.secrets[o.id] = secret
		message.MessageContextInfo = &waE2E.MessageContextInfo{MessageSecret: secret}
	}
	sent := &sentMessage{to: to, message: message, options: o}
	d.sent[o.id] = sent
	_, g, with := to.target()
	if g == nil {
		for _, a := range slices.Compact([]*account{with, d.account}) {
			for _, reader := range a.linkedLocked() {
				if err := d.sendDirectLocked(reader, sent, 0); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if g.find(d.account) == nil {
		return fmt.Errorf("%s is not in %s", d.account.name, g.subject)
	}
	key, err := d.distribute(g.JID) // before the message: it tells where the chain stands
	if err != nil {
		return err
	}
	sealed, err := d.encryptGroup(g.JID, message)
	if err != nil {
		return err
	}
	if o.corrupt {
		sealed[len(sealed)-1] ^= 1
	}
	for _, a := range g.accountsLocked() {
		for _, reader := range a.linkedLocked() {
			var parts []node
			if told := g.JID.User + " " + reader.lid().String(); !d.told[told] && !o.withholdKey {
				kind, sealedKey, err := d.encrypt(reader, &waE2E.Message{SenderKeyDistributionMessage: key})
				if err != nil {
					return err
				}
				d.told[told] = true
				parts = append(parts, node{Tag: "enc", Attrs: attrs{"v": "2", "type": kind}, Content: sealedKey})
			}
			enc := node{Tag: "enc", Attrs: attrs{"v": "2", "type": "skmsg"}, Content: sealed}
			n := d.stanza(sent, &enc)
			g.address(n.Attrs, d.device)
			n.Content = append(parts, enc)
			d.server.deliverLocked(reader, n)
		}
	}
	return nil
}

// stanza is a message without address and content.
func (d *Device) stanza(sent *sentMessage, enc *node) node {
	m, n := sent.message, node{Tag: "message", Attrs: attrs{
		"id": sent.options.id, "t": strconv.FormatInt(sent.options.at.Unix(), 10), "type": "text", "notify": d.account.name,
	}}
	media := ""
	switch {
	case m.ImageMessage != nil:
		media = "image"
	case m.VideoMessage != nil:
		media = "video"
	case m.AudioMessage.GetPTT():
		media = "ptt"
	case m.AudioMessage != nil:
		media = "audio"
	case m.DocumentMessage != nil, m.DocumentWithCaptionMessage != nil:
		media = "document"
	case m.StickerMessage != nil:
		media = "sticker"
	case m.ContactMessage != nil:
		media = "vcard"
	case m.LocationMessage != nil:
		media = "location"
	case m.ReactionMessage != nil:
		n.Attrs["type"] = "reaction"
	case m.PollCreationMessage != nil, m.PollCreationMessageV3 != nil, m.PollUpdateMessage != nil:
		n.Attrs["type"] = "poll"
	}
	if media != "" {
		n.Attrs["type"], enc.Attrs["mediatype"] = "media", media
	}
	switch protocol := cmpProtocol(m); protocol.GetType() {
	case waE2E.ProtocolMessage_MESSAGE_EDIT:
		n.Attrs["edit"] = string(types.EditAttributeMessageEdit)
	case waE2E.ProtocolMessage_REVOKE:
		if protocol.GetKey() != nil {
			n.Attrs["edit"] = string(types.EditAttributeSenderRevoke)
		}
	}
	if m.SecretEncryptedMessage != nil {
		n.Attrs["edit"] = string(types.EditAttributeMessageEdit)
	}
	return n
}

func cmpProtocol(m *waE2E.Message) *waE2E.ProtocolMessage {
	if p := m.GetEditedMessage().GetMessage().GetProtocolMessage(); p != nil {
		return p
	}
	return m.GetProtocolMessage()
}

// sendDirectLocked sends a message for one device of a client: the whole of a
// direct one, or the answer to a retry receipt.
func (d *Device) sendDirectLocked(to *device, sent *sentMessage, retry int) error {
	_, g, with := sent.to.target()
	message := sent.message
	switch {
	case g != nil:
		key, err := d.distribute(g.JID)
		if err != nil {
			return err
		}
		message = proto.CloneOf(message)
		message.SenderKeyDistributionMessage = key
		d.told[g.JID.User+" "+to.lid().String()] = true
	case to.account == d.account:
		message = &waE2E.Message{
			DeviceSentMessage:  &waE2E.DeviceSentMessage{DestinationJID: new(with.lid.String()), Message: message},
			MessageContextInfo: message.MessageContextInfo,
		}
	}
	kind, sealed, err := d.encrypt(to, message)
	if err != nil {
		return err
	}
	if sent.options.corrupt && retry == 0 {
		sealed[len(sealed)-1] ^= 1
	}
	enc := node{Tag: "enc", Attrs: attrs{"v": "2", "type": kind}, Content: sealed}
	if retry > 0 {
		enc.Attrs["count"] = retry
	}
	n := d.stanza(sent, &enc)
	n.Content = []node{enc}
	switch {
	case g != nil:
		g.address(n.Attrs, d.device)
	case to.account == d.account:
		n.Attrs["from"], n.Attrs["recipient"], n.Attrs["peer_recipient_pn"] = d.device.lid(), with.lid, with.pn
	case sent.options.mode == PN:
		n.Attrs["from"], n.Attrs["sender_lid"] = d.device.pn(), d.account.lid
	default:
		n.Attrs["from"], n.Attrs["sender_pn"] = d.device.lid(), d.account.pn
	}
	d.server.deliverLocked(to, n)
	return nil
}

// Resend sends an earlier message once more, encrypted anew under the same id.
func (d *Device) Resend(id string) {
	d.server.t.Helper()
	d.server.do(func() error {
		sent := d.sent[id]
		if sent == nil {
			return fmt.Errorf("%s did not send %s", d.account.name, id)
		}
		return d.sendLocked(sent.to, sent.message, sent.options)
	})
}

// retryLocked answers a client that could not decrypt.
func (d *Device) retryLocked(from *device, n *node) {
	sent := d.sent[stringOf(n, "id")]
	if sent == nil {
		return
	}
	retry := n.GetChildByTag("retry")
	count, _ := strconv.Atoi(stringOf(&retry, "count"))
	if keysNode, ok := n.GetOptionalChildByTag("keys"); ok {
		once, err := readPreKey(keysNode.GetChildByTag("key"))
		signed, err2 := readPreKey(keysNode.GetChildByTag("skey"))
		identity, registration := bytesOf(keysNode, "identity"), bytesOf(*n, "registration")
		if errors.Join(err, err2) != nil || len(identity) != 32 || len(registration) != 4 || signed.Signature == nil {
			return
		}
		d.forget(from)
		if d.meet(from, bundleOf(binary.BigEndian.Uint32(registration), uint32(from.id), [32]byte(identity), signed, once)) != nil {
			return
		}
	}
	_ = d.sendDirectLocked(from, sent, count)
}

type arrival struct {
	id    string
	chat  types.JID
	group *Group
	from  *device
	node  *node
	parts []node
}

// receiveLocked decrypts what a client sent, or asks it for another try.
func (d *Device) receiveLocked(a arrival) {
	if a.group == nil && a.from.account != d.account {
		a.chat = a.from.account.lid
	}
	key := a.chat.String() + " " + a.from.lid().String() + " " + a.id
	if d.seen[key] {
		d.duplicates++
		return
	}
	message, retry, err := d.openLocked(a)
	if err == nil && d.failures > 0 {
		d.failures--
		err = errors.New("asked to fail")
	}
	switch {
	case errors.Is(err, signalerror.ErrOldCounter):
		d.duplicates++
		return
	case err != nil:
		d.askAgainLocked(a)
		return
	case message == nil:
		return
	}
	d.seen[key] = true
	if secret := message.GetMessageContextInfo().GetMessageSecret(); secret != nil {
		d.secrets[a.id] = secret
	}
	if sent := message.GetDeviceSentMessage(); sent != nil {
		message = sent.GetMessage()
	}
	if stringOf(a.node, "category") != "peer" && !d.mute && a.from.account != d.account {
		d.server.deliverLocked(a.from, d.receipt(a, "", nil))
	}
	d.inbox = append(d.inbox, Message{
		ID: a.id, Chat: a.chat, From: a.from.lid(), Text: TextOf(message), Proto: message,
		Edit: stringOf(a.node, "edit"), Retry: retry,
	})
	if d.device.id == 0 && stringOf(a.node, "category") == "peer" {
		_ = d.server.peerRequestLocked(d, a.from, a.id, message)
	}
}

// identified checks the proof that comes with each first message: the account
// owns the device, and the device has this key.
func (a arrival) identified() error {
	var proof waAdv.ADVSignedDeviceIdentity
	if err := proto.Unmarshal(bytesOf(*a.node, "device-identity"), &proof); err != nil {
		return fmt.Errorf("device identity: %w", err)
	}
	account := a.from.account.device(0).identity
	switch {
	case !verify64(account[:], slices.Concat([]byte{6, 0}, proof.GetDetails(), a.from.identity[:]), proof.GetAccountSignature()):
		return errors.New("the account did not sign the device")
	case !verify64(a.from.identity[:], slices.Concat([]byte{6, 1}, proof.GetDetails(), a.from.identity[:], account[:]), proof.GetDeviceSignature()):
		return errors.New("the device did not sign itself")
	}
	return nil
}

func (d *Device) openLocked(a arrival) (*waE2E.Message, int, error) {
	var content *waE2E.Message
	retry := 0
	for _, part := range a.parts {
		sealed, _ := part.Content.([]byte)
		var message *waE2E.Message
		var err error
		if kind := stringOf(&part, "type"); kind == "skmsg" {
			message, err = d.decryptGroup(a.chat, a.from, sealed)
		} else {
			if kind == "pkmsg" {
				if err := a.identified(); err != nil {
					return nil, 0, err
				}
			}
			message, err = d.decrypt(a.from, kind, sealed)
		}
		if err != nil {
			return nil, 0, err
		}
		if count, err := strconv.Atoi(stringOf(&part, "count")); err == nil {
			retry = count
		}
		if key := message.GetSenderKeyDistributionMessage(); key != nil {
			if err := d.learn(a.chat, a.from, key); err != nil {
				return nil, 0, err
			}
			message.SenderKeyDistributionMessage = nil
		}
		if proto.Size(message) > 0 {
			content = message
		}
	}
	return content, retry, nil
}

// receipt is the stanza that tells a client what became of its message.
func (d *Device) receipt(a arrival, kind string, content []node) node {
	n := node{Tag: "receipt", Attrs: attrs{"id": a.id, "t": now()}, Content: content}
	if kind != "" {
		n.Attrs["type"] = kind
	}
	if a.group != nil {
		n.Attrs["from"], n.Attrs["participant"] = a.group.JID, d.device.in(a.group.mode)
	} else {
		n.Attrs["from"] = d.device.lid()
	}
	return n
}

func (d *Device) askAgainLocked(a arrival) {
	d.attempts[a.id]++
	count := d.attempts[a.id]
	if count > 4 {
		return
	}
	content := []node{
		{Tag: "retry", Attrs: attrs{"count": count, "id": a.id, "t": now(), "v": 1}},
		{Tag: "registration", Content: binary.BigEndian.AppendUint32(nil, d.device.registration)},
	}
	if count > 1 || !d.hasSession(a.from) {
		once, _ := d.memory().GenOnePreKey(context.Background())
		content = append(content, node{Tag: "keys", Content: []node{
			{Tag: "type", Content: []byte{5}},
			{Tag: "identity", Content: d.device.identity[:]},
			preKeyNode(once),
			preKeyNode(d.device.signed),
		}})
	}
	d.server.deliverLocked(a.from, d.receipt(a, "retry", content))
}

// FailNext makes the device unable to decrypt the next n messages, so that it
// asks the client for each once more.
func (d *Device) FailNext(n int) { d.server.do(func() error { d.failures = n; return nil }) }

// Mute stops the receipts that the device sends for what it received.
func (d *Device) Mute() { d.server.do(func() error { d.mute = true; return nil }) }

// Read tells the client that its messages were read.
func (d *Device) Read(messages ...Message) {
	d.server.t.Helper()
	d.server.do(func() error {
		for _, m := range messages {
			from := d.server.deviceLocked(m.From)
			if from == nil {
				return fmt.Errorf("%s is not linked any more", m.From)
			}
			d.server.deliverLocked(from, d.receipt(arrival{id: m.ID, group: d.server.groups[m.Chat.User]}, "read", nil))
		}
		return nil
	})
}

// Type shows in a chat that the device's owner writes, or has stopped.
func (d *Device) Type(to Chat, state types.ChatPresence) {
	s := d.server
	s.do(func() error {
		_, g, with := to.target()
		n := node{Tag: "chatstate", Attrs: attrs{"from": d.account.lid}, Content: []node{{Tag: string(state)}}}
		readers := []*account{with}
		if g != nil {
			readers = g.accountsLocked()
			n.Attrs = attrs{"from": g.JID, "participant": d.account.in(g.mode)}
		}
		for _, a := range readers {
			for _, reader := range a.linkedLocked() {
				if reader.active && reader.conn != nil {
					s.sendLocked(reader.conn, n)
				}
			}
		}
		return nil
	})
}

// Received waits for the next message that the device decrypts.
func (d *Device) Received(ctx context.Context) Message {
	d.server.t.Helper()
	m, err := d.next(ctx)
	d.server.must(err)
	return m
}

func (d *Device) next(ctx context.Context) (Message, error) {
	var m Message
	err := d.server.wait(ctx, "a message for "+d.Name(), func() bool {
		if d.read >= len(d.inbox) {
			return false
		}
		m = d.inbox[d.read]
		d.read++
		return true
	})
	return m, err
}

// Messages are all that the device has decrypted so far, each id once.
func (d *Device) Messages() []Message {
	d.server.mu.Lock()
	defer d.server.mu.Unlock()
	return slices.Clone(d.inbox)
}

// Duplicates counts messages that came again and would not be shown twice.
func (d *Device) Duplicates() int {
	d.server.mu.Lock()
	defer d.server.mu.Unlock()
	return d.duplicates
}

// Receipts are those that clients have sent for the device's messages.
func (d *Device) Receipts() []Receipt {
	d.server.mu.Lock()
	defer d.server.mu.Unlock()
	return slices.Clone(d.receipts)
}

// Receipt waits for a receipt of this type for this message. "delivered" is any
// that says so, whether the client is active or not.
func (d *Device) Receipt(ctx context.Context, id, kind string) {
	d.server.t.Helper()
	d.server.must(d.server.wait(ctx, "receipt "+kind+" for "+id, func() bool {
		return slices.ContainsFunc(d.receipts, func(r Receipt) bool {
			return r.ID == id && (r.Type == kind || kind == "delivered" && (r.Type == "" || r.Type == "inactive"))
		})
	}))
}

// SawTyping waits for the next sign that a client writes or has stopped.
func (d *Device) SawTyping(ctx context.Context) Typing {
	d.server.t.Helper()
	var typing Typing
	d.server.must(d.server.wait(ctx, "typing", func() bool {
		if d.typingRead >= len(d.typing) {
			return false
		}
		typing = d.typing[d.typingRead]
		d.typingRead++
		return true
	}))
	return typing
}

// TextOf is the text, caption or new text of a message.
func TextOf(m *waE2E.Message) string {
	switch {
	case m == nil:
		return ""
	case m.Conversation != nil:
		return m.GetConversation()
	case m.ExtendedTextMessage != nil:
		return m.GetExtendedTextMessage().GetText()
	case m.ImageMessage != nil:
		return m.GetImageMessage().GetCaption()
	case m.VideoMessage != nil:
		return m.GetVideoMessage().GetCaption()
	case m.DocumentMessage != nil:
		return m.GetDocumentMessage().GetCaption()
	case m.DocumentWithCaptionMessage != nil:
		return TextOf(m.GetDocumentWithCaptionMessage().GetMessage())
	case m.EditedMessage != nil:
		return TextOf(m.GetEditedMessage().GetMessage())
	case m.GetProtocolMessage().GetEditedMessage() != nil:
		return TextOf(m.GetProtocolMessage().GetEditedMessage())
	case m.ReactionMessage != nil:
		return m.GetReactionMessage().GetText()
	}
	return ""
}
