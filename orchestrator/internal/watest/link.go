package watest

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.mau.fi/whatsmeow"
	waBinary "go.mau.fi/whatsmeow/binary"
	"go.mau.fi/whatsmeow/proto/waAdv"
	"go.mau.fi/whatsmeow/proto/waCompanionReg"
	"go.mau.fi/whatsmeow/proto/waWa6"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/util/gcmutil"
	"go.mau.fi/whatsmeow/util/keys"
	"google.golang.org/protobuf/proto"
)

// linking is the state of a connection that asks to be linked.
type linking struct {
	refs    []string
	data    *waWa6.ClientPayload_DevicePairingRegistrationData
	name    string
	request string // id of the iq that tells the client it is linked

	phone  *Phone
	signed *waAdv.ADVSignedDeviceIdentity
	done   bool
	err    error

	// By code.
	jid       types.JID
	hello     []byte
	ephemeral *keys.KeyPair
	code      string
	companion []byte

	// By passkey.
	prologue *waCompanionReg.CompanionEphemeralIdentity
	identity []byte
	commit   []byte
	proof    bool
	nonce    []byte
}

// Phone is the phone that clients are linked to.
type Phone struct{ *Device }

// Phone adds the owner's phone.
func (s *Server) Phone(number string) *Phone {
	s.t.Helper()
	return &Phone{Device: s.Peer(number, "Owner")}
}

// RequirePasskey makes the phone ask for a passkey when it scans a code.
func (p *Phone) RequirePasskey() {
	p.server.do(func() error { p.passkey = true; return nil })
}

func (s *Server) welcomeLocked(c *conn, payload *waWa6.ClientPayload) {
	if f := s.refusalLocked(payload); f != nil {
		s.endLocked(c, f.node())
		return
	}
	if data := payload.GetDevicePairingData(); data != nil {
		c.link = &linking{data: data}
		var refs []node
		for range 6 {
			ref := "2@" + base64.StdEncoding.EncodeToString(randomBytes(24))
			c.link.refs = append(c.link.refs, ref)
			refs = append(refs, node{Tag: "ref", Content: []byte(ref)})
		}
		s.sendLocked(c, node{
			Tag:     "iq",
			Attrs:   attrs{"from": types.ServerJID, "type": "set", "id": s.idLocked(), "xmlns": "md"},
			Content: []node{{Tag: "pair-device", Content: refs}},
		})
		return
	}
	var d *device
	if a := s.accounts[strconv.FormatUint(payload.GetUsername(), 10)]; a != nil {
		d = a.device(uint16(payload.GetDevice()))
	}
	if d == nil || d.sim != nil || !bytes.Equal(d.noise, c.static) {
		s.endLocked(c, FailLoggedOut.node())
		return
	}
	if d.conn != nil {
		s.endLocked(d.conn, streamError(0, "replaced"))
	}
	c.device, d.conn = d, c
	d.logins++
	for _, waiting := range d.waiting {
		waiting.sent = false
	}
	s.sendLocked(c, node{Tag: "success", Attrs: attrs{
		"t": now(), "lid": d.lid(), "props": 1, "abprops": 1, "location": "lo", "creation": now(),
	}})
}

func (s *Server) refusalLocked(payload *waWa6.ClientPayload) *Failure {
	if payload.GetUserAgent().GetAppVersion().GetTertiary() < s.required {
		return &FailOutdated
	}
	if len(s.faults.failures) > 0 {
		f := s.faults.failures[0]
		s.faults.failures = s.faults.failures[1:]
		return &f
	}
	return s.faults.always
}

func (s *Server) unlinkedLocked(match func(*conn) bool) *conn {
	for c := range s.conns {
		if c.link != nil && !c.closed && match(c) {
			return c
		}
	}
	return nil
}

// Scan takes the text of a QR code. It returns when the client is linked, or,
// with a passkey, when the client has been asked for it.
func (p *Phone) Scan(code string) {
	p.server.t.Helper()
	p.server.must(p.TryScan(context.Background(), code))
}

// TryScan is Scan for a code that may be too old.
func (p *Phone) TryScan(ctx context.Context, code string) error {
	s := p.server
	_, code, _ = strings.Cut(code, "#")
	parts := strings.Split(code, ",")
	if len(parts) != 5 {
		return fmt.Errorf("QR code of %d parts", len(parts))
	}
	noiseKey, err := base64.StdEncoding.DecodeString(parts[1])
	identity, err2 := base64.StdEncoding.DecodeString(parts[2])
	secret, err3 := base64.StdEncoding.DecodeString(parts[3])
	if err := errors.Join(err, err2, err3); err != nil {
		return fmt.Errorf("QR code: %w", err)
	}
	var l *linking
	err = s.try(func() error {
		c := s.unlinkedLocked(func(c *conn) bool { return slices.Contains(c.link.refs, parts[0]) })
		if c == nil {
			return errors.New("nobody shows this QR code any more")
		}
		if !bytes.Equal(noiseKey, c.static) {
			return errors.New("the QR code's noise key is not the connection's")
		}
		if p.passkey {
			c.link.phone, c.link.proof = p, true
			options, err := json.Marshal(types.WebAuthnPublicKey{
				Challenge: randomBytes(32), Timeout: 60000, RelyingPartID: "whatsapp.com", UserVerification: "required",
				AllowCredentials: []types.AllowedCredential{{ID: randomBytes(16), Type: "public-key"}},
			})
			if err != nil {
				return err
			}
			s.sendLocked(c, serverNotification(s.idLocked(), "passkey_prologue_request", node{Tag: "passkey_request_options", Content: options}))
			return nil
		}
		l = c.link
		return p.adoptLocked(c, identity, secret)
	})
	if err != nil || l == nil {
		return err
	}
	return p.linked(ctx, l)
}

func (p *Phone) linked(ctx context.Context, l *linking) error {
	return errors.Join(p.server.wait(ctx, "the client's answer to its pairing", func() bool { return l.done }), l.err)
}

// EnterCode types the code that the client shows. It returns when the client is
// linked, or fails if the code is wrong.
func (p *Phone) EnterCode(code string) {
	p.server.t.Helper()
	p.server.must(p.TryCode(context.Background(), code))
}

// TryCode is EnterCode for a code that may be wrong.
func (p *Phone) TryCode(ctx context.Context, code string) error {
	s := p.server
	code = strings.ReplaceAll(code, "-", "")
	var l *linking
	err := s.try(func() error {
		c := s.unlinkedLocked(func(c *conn) bool { return c.link.hello != nil && c.link.jid == p.account.pn })
		if c == nil {
			return errors.New("nobody asked for a pairing code")
		}
		l = c.link
		l.phone, l.code, l.ephemeral, l.err, l.done = p, code, keys.NewKeyPair(), nil, false
		salt, iv := randomBytes(32), randomBytes(16)
		wrapped, err := wrap(code, salt, iv, l.ephemeral.Pub[:])
		if err != nil {
			return err
		}
		s.sendLocked(c, serverNotification(s.idLocked(), "link_code_companion_reg", node{
			Tag: "link_code_companion_reg", Attrs: attrs{"stage": "primary_hello"},
			Content: []node{
				{Tag: "link_code_pairing_wrapped_primary_ephemeral_pub", Content: slices.Concat(salt, iv, wrapped)},
				{Tag: "primary_identity_pub", Content: p.device.identity[:]},
				{Tag: "link_code_pairing_ref", Content: []byte(l.refs[0])},
			},
		}))
		return nil
	})
	if err != nil {
		return err
	}
	return p.linked(ctx, l)
}

// wrap hides a key, or shows it, by the code that both sides know.
func wrap(code string, salt, iv, key []byte) ([]byte, error) {
	secret, err := pbkdf2.Key(sha256.New, code, salt, 2<<16, 32)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(secret)
	if err != nil {
		return nil, err
	}
	out := make([]byte, len(key))
	cipher.NewCTR(block, iv).XORKeyStream(out, key)
	return out, nil
}

// adoptLocked signs the client's identity and tells it that it is linked.
func (p *Phone) adoptLocked(c *conn, identity, secret []byte) error {
	s, l := p.server, c.link
	id := p.account.next
	p.account.next++
	details, err := proto.Marshal(&waAdv.ADVDeviceIdentity{
		RawID: new(uint32(id)), Timestamp: new(uint64(time.Now().Unix())), KeyIndex: new(uint32(id)),
		AccountType: waAdv.ADVEncryptionType_E2EE.Enum(), DeviceType: waAdv.ADVEncryptionType_E2EE.Enum(),
	})
	if err != nil {
		return err
	}
	l.phone = p
	l.signed = &waAdv.ADVSignedDeviceIdentity{
		Details:             details,
		AccountSignatureKey: p.device.identity[:],
		AccountSignature:    signature64(p.signal.IdentityKey, slices.Concat([]byte{6, 0}, details, identity)),
	}
	signed, err := proto.Marshal(l.signed)
	if err != nil {
		return err
	}
	mac := hmac.New(sha256.New, secret)
	mac.Write(signed)
	container, err := proto.Marshal(&waAdv.ADVSignedDeviceIdentityHMAC{Details: signed, HMAC: mac.Sum(nil)})
	if err != nil {
		return err
	}
	l.request = s.idLocked()
	s.sendLocked(c, node{
		Tag:   "iq",
		Attrs: attrs{"from": types.ServerJID, "type": "set", "id": l.request, "t": now()},
		Content: []node{{Tag: "pair-success", Content: []node{
			{Tag: "device-identity", Content: container},
			{Tag: "biz", Attrs: attrs{"name": ""}},
			{Tag: "device", Attrs: attrs{"jid": withDevice(p.account.pn, id), "lid": withDevice(p.account.lid, id)}},
			{Tag: "platform", Attrs: attrs{"name": "android"}},
		}}},
	})
	return nil
}

// signedLocked checks the client's signature and makes it a device of the account.
func (s *Server) signedLocked(c *conn, n *node) {
	l := c.link
	l.done = true
	if n.Attrs["type"] == "error" {
		e := n.GetChildByTag("error")
		l.err = fmt.Errorf("the client refused: %s", e.String())
		return
	}
	var theirs waAdv.ADVSignedDeviceIdentity
	if err := proto.Unmarshal(bytesOf(*n, "pair-device-sign", "device-identity"), &theirs); err != nil {
		l.err = fmt.Errorf("signed identity: %w", err)
		return
	}
	message := slices.Concat([]byte{6, 1}, l.signed.Details, l.data.GetEIdent(), l.signed.AccountSignatureKey)
	var details waAdv.ADVDeviceIdentity
	switch {
	case !verify64(l.data.GetEIdent(), message, theirs.GetDeviceSignature()):
		l.err = errors.New("the client's signature is wrong")
	case len(theirs.GetAccountSignatureKey()) != 0:
		l.err = errors.New("the client sent the account's key back")
	default:
		l.err = proto.Unmarshal(l.signed.Details, &details)
	}
	if l.err != nil {
		return
	}
	var props waCompanionReg.DeviceProps
	if l.err = proto.Unmarshal(l.data.GetDeviceProps(), &props); l.err != nil {
		return
	}
	a := l.phone.account
	a.devices = append(a.devices, &device{
		account:      a,
		id:           uint16(details.GetKeyIndex()),
		noise:        c.static,
		name:         props.GetOs(),
		identity:     [32]byte(l.data.GetEIdent()),
		registration: binary.BigEndian.Uint32(l.data.GetERegid()),
	})
	s.endLocked(c, streamError(515, ""))
}

// linkQueryLocked answers what a client asks before it is linked; then comes
// after the answer.
func (s *Server) linkQueryLocked(c *conn, n *node) (content []node, then func() error, err error) {
	l := c.link
	child := n.GetChildren()[0]
	switch child.Tag {
	case "link_code_companion_reg":
		if stringOf(&child, "stage") == "companion_hello" {
			l.jid, l.hello = jidOf(&child, "jid"), bytesOf(child, "link_code_pairing_wrapped_companion_ephemeral_pub")
			if s.accounts[l.jid.User] == nil || len(l.hello) != 80 {
				return nil, nil, queryError{400, "bad-request"}
			}
			l.name = string(bytesOf(child, "companion_platform_display"))
			if open := strings.Index(l.name, " ("); open < 1 || !strings.HasSuffix(l.name, ")") {
				return nil, nil, queryError{400, "bad-request"}
			}
			return []node{{Tag: "link_code_companion_reg", Attrs: attrs{"stage": "companion_hello"}, Content: []node{
				{Tag: "link_code_pairing_ref", Content: []byte(l.refs[0])},
			}}}, nil, nil
		}
		secret, err := l.finish(child)
		if err != nil {
			l.done, l.err = true, fmt.Errorf("pairing code: %w", err)
			return nil, nil, queryError{400, "bad-request"}
		}
		identity := l.companion
		return nil, func() error { return l.phone.adoptLocked(c, identity, secret) }, nil
	case "ref":
		return []node{{Tag: "ref", Content: []byte(l.refs[0])}}, nil, nil
	case "passkey_prologue":
		var payload waCompanionReg.ProloguePayload
		l.prologue = &waCompanionReg.CompanionEphemeralIdentity{}
		if err := proto.Unmarshal(bytesOf(child, "prologue_payload"), &payload); err != nil {
			return nil, nil, err
		}
		if err := proto.Unmarshal(payload.GetCompanionEphemeralIdentity(), l.prologue); err != nil {
			return nil, nil, err
		}
		if !l.proof || len(bytesOf(child, "webauthn_assertion")) == 0 || l.prologue.GetRef() != l.refs[0] {
			return nil, nil, queryError{401, "not-authorized"}
		}
		l.identity, l.commit = payload.GetCompanionEphemeralIdentity(), payload.GetCommitment().GetHash()
		l.ephemeral = keys.NewKeyPair()
		mine, err := proto.Marshal(&waCompanionReg.PrimaryEphemeralIdentity{PublicKey: l.ephemeral.Pub[:], Nonce: randomBytes(32)})
		if err != nil {
			return nil, nil, err
		}
		return nil, func() error {
			s.sendLocked(c, serverNotification(s.idLocked(), "crsc_continuation", node{Tag: "primary_ephemeral_identity", Content: mine}))
			return nil
		}, nil
	case "companion_nonce":
		l.nonce, _ = child.Content.([]byte)
		if sum := sha256.Sum256(slices.Concat(l.identity, l.nonce)); !bytes.Equal(sum[:], l.commit) {
			return nil, nil, queryError{401, "not-authorized"}
		}
		return nil, nil, nil
	case "encrypted_pairing_request":
		request, err := l.open(child)
		if err != nil {
			return nil, nil, err
		}
		return nil, func() error {
			return l.phone.adoptLocked(c, request.GetCompanionIdentityKey(), request.GetAdvSecret())
		}, nil
	}
	return nil, nil, nil
}

// finish opens the key bundle that a client sends after the code was entered,
// and derives the secret that proves the pairing.
func (l *linking) finish(n waBinary.Node) ([]byte, error) {
	if l.ephemeral == nil {
		return nil, errors.New("no code was entered")
	}
	theirs, err := wrap(l.code, l.hello[:32], l.hello[32:48], l.hello[48:])
	if err != nil {
		return nil, err
	}
	shared, err := dh(l.ephemeral.Priv, theirs)
	if err != nil {
		return nil, err
	}
	bundle := bytesOf(n, "link_code_pairing_wrapped_key_bundle")
	if len(bundle) < 44 {
		return nil, errors.New("short key bundle")
	}
	key, err := hkdf.Key(sha256.New, shared, bundle[:32], "link_code_pairing_key_bundle_encryption_key", 32)
	if err != nil {
		return nil, err
	}
	plain, err := gcmutil.Decrypt(key, bundle[32:44], bundle[44:], nil)
	if err != nil {
		return nil, err
	}
	if len(plain) != 96 || !bytes.Equal(plain[32:64], l.phone.device.identity[:]) {
		return nil, errors.New("wrong key bundle")
	}
	l.companion = plain[:32]
	agreed, err := dh(l.phone.signal.IdentityKey.Priv, l.companion)
	if err != nil {
		return nil, err
	}
	return hkdf.Key(sha256.New, slices.Concat(shared, agreed, plain[64:]), nil, "adv_secret", 32)
}

// open reads what a client that holds a passkey asks for.
func (l *linking) open(n waBinary.Node) (*waCompanionReg.PairingRequest, error) {
	if l.nonce == nil {
		return nil, errors.New("no nonce yet")
	}
	var sealed waCompanionReg.EncryptedPairingRequest
	content, _ := n.Content.([]byte)
	if err := proto.Unmarshal(content, &sealed); err != nil {
		return nil, err
	}
	shared, err := dh(l.ephemeral.Priv, l.prologue.GetPublicKey())
	if err != nil {
		return nil, err
	}
	salt := fmt.Sprintf("Companion Pairing %d with ref %s", l.prologue.GetDeviceType(), l.prologue.GetRef())
	key, err := hkdf.Key(sha256.New, shared, []byte(salt), "Pairing Information Encryption Key", 32)
	if err != nil {
		return nil, err
	}
	plain, err := gcmutil.Decrypt(key, sealed.GetIV(), sealed.GetEncryptedPayload(), nil)
	if err != nil {
		return nil, err
	}
	var request waCompanionReg.PairingRequest
	return &request, proto.Unmarshal(plain, &request)
}

// Link connects a client that is not linked yet, lets the phone scan its first
// QR code, and returns when it has logged in.
func (s *Server) Link(client *whatsmeow.Client, phone *Phone) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	codes, err := client.GetQRChannel(ctx)
	s.must(err)
	s.must(client.Connect())
	select {
	case item := <-codes:
		if item.Event != whatsmeow.QRChannelEventCode {
			s.must(fmt.Errorf("the client says %s: %w", item.Event, item.Error))
		}
		s.must(phone.TryScan(ctx, item.Code))
	case <-ctx.Done():
		s.must(errors.New("the client shows no QR code"))
	}
	for item := range codes {
		if item.Event != whatsmeow.QRChannelEventCode && item != whatsmeow.QRChannelSuccess {
			s.must(fmt.Errorf("the client says %s: %w", item.Event, item.Error))
		}
	}
	phone.Online(ctx)
}

// Online waits until each linked client is logged in and takes messages.
func (p *Phone) Online(ctx context.Context) {
	p.server.t.Helper()
	p.server.must(p.server.wait(ctx, "login", func() bool {
		linked := p.account.linkedLocked()
		return len(linked) > 0 && !slices.ContainsFunc(linked, func(d *device) bool { return !d.active })
	}))
}

// Offline waits until no linked client is connected.
func (p *Phone) Offline(ctx context.Context) {
	p.server.t.Helper()
	p.server.must(p.server.wait(ctx, "disconnection", func() bool {
		return !slices.ContainsFunc(p.account.linkedLocked(), func(d *device) bool { return d.conn != nil })
	}))
}

// RotateQR makes clients that show QR codes replace the secret in them, so that
// the codes shown before are worth nothing.
func (s *Server) RotateQR() {
	s.do(func() error {
		for c := range s.conns {
			if c.link != nil {
				s.sendLocked(c, serverNotification(s.idLocked(), "companion_reg_refresh", node{Tag: "pair-device-rotate-qr"}))
			}
		}
		return nil
	})
}

// LinkedNames are the linked clients as the phone's list of devices shows them.
func (p *Phone) LinkedNames() []string {
	p.server.mu.Lock()
	defer p.server.mu.Unlock()
	var names []string
	for _, d := range p.account.linkedLocked() {
		names = append(names, d.name)
	}
	return names
}

// Logins counts how often linked clients have logged in.
func (p *Phone) Logins() int {
	p.server.mu.Lock()
	defer p.server.mu.Unlock()
	n := 0
	for _, d := range p.account.linkedLocked() {
		n += d.logins
	}
	return n
}

// Linked are the addresses of the linked clients.
func (p *Phone) Linked() []types.JID {
	p.server.mu.Lock()
	defer p.server.mu.Unlock()
	var jids []types.JID
	for _, d := range p.account.linkedLocked() {
		jids = append(jids, d.pn())
	}
	return jids
}

// Unlink removes all linked clients, as the phone's list of devices can.
func (p *Phone) Unlink() {
	s := p.server
	s.do(func() error {
		for _, d := range p.account.linkedLocked() {
			c := d.conn
			p.account.devices = slices.DeleteFunc(p.account.devices, func(other *device) bool { return other == d })
			if c != nil {
				s.endLocked(c, streamError(401, "device_removed"))
			}
		}
		return nil
	})
}
