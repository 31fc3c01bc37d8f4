package watest

import (
	"bytes"
	"compress/zlib"
	"context"
	"fmt"
	"strconv"
	"time"

	"go.mau.fi/whatsmeow/appstate"
	"go.mau.fi/whatsmeow/proto/waCommon"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/proto/waHistorySync"
	"go.mau.fi/whatsmeow/proto/waServerSync"
	"go.mau.fi/whatsmeow/proto/waWeb"
	"go.mau.fi/whatsmeow/store"
	waLog "go.mau.fi/whatsmeow/util/log"
	"google.golang.org/protobuf/proto"
)

// appState is what the phone shares with linked clients by way of the server,
// which holds it sealed.
type appState struct {
	key         []byte
	keyID       []byte
	processor   *appstate.Processor
	collections map[appstate.WAPatchName]*collection
}

type collection struct {
	hash    appstate.HashState
	patches []*waServerSync.SyncdPatch
}

// stateOf makes the state of an account when it is first needed: a key, and the
// owner's push name, without which a client may not show presence.
func (s *Server) stateOf(d *Device) (*appState, error) {
	st := &d.account.state
	if st.key != nil {
		return st, nil
	}
	st.key, st.keyID = randomBytes(32), randomBytes(6)
	st.collections = map[appstate.WAPatchName]*collection{}
	if err := d.memory().PutAppStateSyncKey(context.Background(), st.keyID, store.AppStateSyncKey{Data: st.key, Timestamp: time.Now().UnixMilli()}); err != nil {
		return nil, err
	}
	st.processor = appstate.NewProcessor(d.signal, waLog.Noop)
	return st, st.apply(appstate.BuildSettingPushName(d.account.name))
}

func (st *appState) apply(info appstate.PatchInfo) error {
	c := st.collections[info.Type]
	if c == nil {
		c = &collection{}
		st.collections[info.Type] = c
	}
	encoded, err := st.processor.EncodePatch(context.Background(), st.keyID, c.hash, info)
	if err != nil {
		return err
	}
	return st.appendPatch(info.Type, encoded)
}

// appendPatch gives a patch its number, which is the server's to give.
func (st *appState) appendPatch(name appstate.WAPatchName, encoded []byte) error {
	c := st.collections[name]
	if c == nil {
		c = &collection{}
		st.collections[name] = c
	}
	var patch waServerSync.SyncdPatch
	if err := proto.Unmarshal(encoded, &patch); err != nil {
		return err
	}
	patch.Version = &waServerSync.SyncdVersion{Version: new(c.hash.Version + 1)}
	_, hash, err := st.processor.DecodePatches(context.Background(), &appstate.PatchList{Name: name, Patches: []*waServerSync.SyncdPatch{&patch}}, c.hash, true)
	if err != nil {
		return err
	}
	c.hash, c.patches = hash, append(c.patches, &patch)
	return nil
}

// greetLocked is what the phone does when it sees a newly linked client: it
// shares the key of the app state.
func (s *Server) greetLocked(to *device) error {
	phone := to.account.device(0)
	if phone == nil || phone.sim == nil {
		return nil
	}
	st, err := s.stateOf(phone.sim)
	if err != nil {
		return err
	}
	return phone.sim.sendPeerLocked(to, &waE2E.ProtocolMessage{
		Type: waE2E.ProtocolMessage_APP_STATE_SYNC_KEY_SHARE.Enum(),
		AppStateSyncKeyShare: &waE2E.AppStateSyncKeyShare{Keys: []*waE2E.AppStateSyncKey{{
			KeyID: &waE2E.AppStateSyncKeyId{KeyID: st.keyID},
			KeyData: &waE2E.AppStateSyncKeyData{
				KeyData:     st.key,
				Fingerprint: &waE2E.AppStateSyncKeyFingerprint{RawID: new(uint32(1)), CurrentIndex: new(uint32(0)), DeviceIndexes: []uint32{0}},
				Timestamp:   new(time.Now().UnixMilli()),
			},
		}}},
	})
}

// sendPeerLocked sends what a phone and its linked clients tell each other.
func (d *Device) sendPeerLocked(to *device, message *waE2E.ProtocolMessage) error {
	kind, sealed, err := d.encrypt(to, &waE2E.Message{ProtocolMessage: message})
	if err != nil {
		return err
	}
	d.server.deliverLocked(to, node{
		Tag:     "message",
		Attrs:   attrs{"from": d.account.pn, "id": newMessageID(), "t": now(), "type": "text", "category": "peer"},
		Content: []node{{Tag: "enc", Attrs: attrs{"v": "2", "type": kind}, Content: sealed}},
	})
	return nil
}

// SetName changes the owner's push name on the phone.
func (p *Phone) SetName(name string) {
	p.Sync(appstate.BuildSettingPushName(name))
	p.server.do(func() error { p.account.name = name; return nil })
}

// Sync changes the app state on the phone, and tells the linked clients.
func (p *Phone) Sync(change appstate.PatchInfo) {
	s := p.server
	s.t.Helper()
	s.do(func() error {
		st, err := s.stateOf(p.Device)
		if err != nil {
			return err
		}
		if err := st.apply(change); err != nil {
			return err
		}
		st.tellLocked(s, p.account, change.Type, nil)
		return nil
	})
}

func (st *appState) tellLocked(s *Server, a *account, name appstate.WAPatchName, except *device) {
	for _, d := range a.linkedLocked() {
		if d != except {
			s.deliverLocked(d, serverNotification(s.idLocked(), "server_sync", node{
				Tag: "collection", Attrs: attrs{"name": string(name), "version": st.collections[name].hash.Version},
			}))
		}
	}
}

func (s *Server) stateQueryLocked(d *device, n *node) ([]node, func() error, error) {
	st := &d.account.state
	asked, ok := n.GetOptionalChildByTag("sync", "collection")
	if !ok || st.key == nil {
		return nil, nil, queryError{code: 400}
	}
	name := appstate.WAPatchName(stringOf(&asked, "name"))
	since, _ := strconv.ParseUint(stringOf(&asked, "version"), 10, 64)
	if encoded := bytesOf(asked, "patch"); encoded != nil {
		if err := st.appendPatch(name, encoded); err != nil {
			return nil, nil, queryError{code: 409, text: err.Error()}
		}
		since = st.collections[name].hash.Version
	}
	answer := node{Tag: "collection", Attrs: attrs{"name": string(name), "version": 0}}
	if c := st.collections[name]; c != nil {
		answer.Attrs["version"] = c.hash.Version
		var patches []node
		for _, patch := range c.patches {
			if patch.GetVersion().GetVersion() <= since {
				continue
			}
			encoded, err := proto.Marshal(patch)
			if err != nil {
				return nil, nil, err
			}
			patches = append(patches, node{Tag: "patch", Content: encoded})
		}
		answer.Content = []node{{Tag: "patches", Content: patches}}
	}
	return []node{{Tag: "sync", Content: []node{answer}}}, nil, nil
}

// History is an older message for a history sync.
type History struct {
	From Member
	Text string
	At   time.Time
}

// SendHistory sends linked clients a history sync with one conversation.
func (p *Phone) SendHistory(chat Chat, messages ...History) {
	s := p.server
	s.t.Helper()
	s.do(func() error {
		_, g, _ := chat.target()
		name := chatName(chat)
		conversation := &waHistorySync.Conversation{ID: &name}
		sync := &waHistorySync.HistorySync{
			SyncType:      waHistorySync.HistorySync_INITIAL_BOOTSTRAP.Enum(),
			Conversations: []*waHistorySync.Conversation{conversation},
		}
		if g != nil {
			conversation.Name = new(g.subject)
		}
		for _, m := range messages {
			from := m.From.self()
			key := &waCommon.MessageKey{RemoteJID: &name, FromMe: new(m.From.self().account == p.account), ID: new(newMessageID())}
			if g != nil {
				key.Participant = new(g.Address(from).String())
			}
			conversation.Messages = append(conversation.Messages, &waHistorySync.HistorySyncMsg{Message: &waWeb.WebMessageInfo{
				Key: key, Message: &waE2E.Message{Conversation: &m.Text}, MessageTimestamp: new(uint64(m.At.Unix())), PushName: &from.account.name,
			}})
			sync.PhoneNumberToLidMappings = append(sync.PhoneNumberToLidMappings, &waHistorySync.PhoneNumberToLIDMapping{
				PnJID: proto.String(from.account.pn.String()), LidJID: proto.String(from.account.lid.String()),
			})
		}
		plain, err := proto.Marshal(sync)
		if err != nil {
			return err
		}
		var packed bytes.Buffer
		w := zlib.NewWriter(&packed)
		if _, err := w.Write(plain); err != nil {
			return err
		}
		if err := w.Close(); err != nil {
			return err
		}
		for _, d := range p.account.linkedLocked() {
			err := p.sendPeerLocked(d, &waE2E.ProtocolMessage{
				Type: waE2E.ProtocolMessage_HISTORY_SYNC_NOTIFICATION.Enum(),
				HistorySyncNotification: &waE2E.HistorySyncNotification{
					SyncType: waE2E.HistorySyncType_INITIAL_BOOTSTRAP.Enum(), ChunkOrder: new(uint32(1)), Progress: new(uint32(100)),
					InitialHistBootstrapInlinePayload: packed.Bytes(),
				},
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// AnswerRequests makes the phone send its own copy of what a linked client could
// not decrypt, when the client asks. The client may then get it twice.
func (p *Phone) AnswerRequests() { p.server.do(func() error { p.helpful = true; return nil }) }

// peerRequestLocked answers what a client asks of its phone: a message that it
// could not decrypt, which the phone has too.
func (s *Server) peerRequestLocked(phone *Device, from *device, id string, message *waE2E.Message) error {
	request := message.GetProtocolMessage().GetPeerDataOperationRequestMessage()
	if request.GetPeerDataOperationRequestType() != waE2E.PeerDataOperationRequestType_PLACEHOLDER_MESSAGE_RESEND || !phone.helpful {
		return nil
	}
	var results []*waE2E.PeerDataOperationRequestResponseMessage_PeerDataOperationResult
	for _, one := range request.GetPlaceholderMessageResendRequest() {
		key := one.GetMessageKey()
		sender, sent := s.senderOf(key.GetID())
		if sent == nil {
			continue
		}
		info, err := proto.Marshal(&waWeb.WebMessageInfo{
			Key: key, Message: sent.message, MessageTimestamp: new(uint64(sent.options.at.Unix())),
			PushName: &sender.account.name, Participant: key.Participant,
		})
		if err != nil {
			return err
		}
		results = append(results, &waE2E.PeerDataOperationRequestResponseMessage_PeerDataOperationResult{
			PlaceholderMessageResendResponse: &waE2E.PeerDataOperationRequestResponseMessage_PeerDataOperationResult_PlaceholderMessageResendResponse{
				WebMessageInfoBytes: info,
			},
		})
	}
	if len(results) == 0 {
		return nil
	}
	return phone.sendPeerLocked(from, &waE2E.ProtocolMessage{
		Type: waE2E.ProtocolMessage_PEER_DATA_OPERATION_REQUEST_RESPONSE_MESSAGE.Enum(),
		PeerDataOperationRequestResponseMessage: &waE2E.PeerDataOperationRequestResponseMessage{
			PeerDataOperationRequestType: waE2E.PeerDataOperationRequestType_PLACEHOLDER_MESSAGE_RESEND.Enum(),
			StanzaID:                     new(id),
			PeerDataOperationResult:      results,
		},
	})
}

func (s *Server) senderOf(id string) (*Device, *sentMessage) {
	for _, a := range s.people {
		for _, d := range a.devices {
			if d.sim != nil && d.sim.sent[id] != nil {
				return d.sim, d.sim.sent[id]
			}
		}
	}
	return nil, nil
}

// ReachoutLock tells linked clients that the account may not write to people who
// have not written to it.
func (p *Phone) ReachoutLock(active bool, until time.Time) {
	s := p.server
	s.do(func() error {
		data := fmt.Appendf(nil, `{"data":{"xwa2_notify_account_reachout_timelock":{"is_active":%t,"enforcement_type":"BIZ_QUALITY","time_enforcement_ends":"%d"}}}`, active, until.Unix())
		for _, d := range p.account.linkedLocked() {
			s.deliverLocked(d, serverNotification(s.idLocked(), "mex", node{Tag: "update", Attrs: attrs{"op_name": "NotificationUserReachoutTimelockUpdate"}, Content: data}))
		}
		return nil
	})
}

// LowKeys tells linked clients that only a few of their one-time keys are left.
func (p *Phone) LowKeys() {
	s := p.server
	s.do(func() error {
		for _, d := range p.account.linkedLocked() {
			d.prekeys = d.prekeys[:min(3, len(d.prekeys))]
			s.deliverLocked(d, serverNotification(s.idLocked(), "encrypt", node{Tag: "count", Attrs: attrs{"value": len(d.prekeys)}}))
		}
		return nil
	})
}

// Keys counts the one-time keys that linked clients have left on the server.
func (p *Phone) Keys() int {
	p.server.mu.Lock()
	defer p.server.mu.Unlock()
	n := 0
	for _, d := range p.account.linkedLocked() {
		n += len(d.prekeys)
	}
	return n
}
