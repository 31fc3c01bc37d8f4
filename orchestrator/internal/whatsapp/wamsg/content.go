// Package wamsg reads WhatsApp's messages: what was said, in words that an agent
// reads, and to whom.
//
// All of it was written by strangers. Nothing here panics, blocks or asks
// anybody; every text that comes out is UTF-8 without control characters and of
// bounded length; and what cannot be read is said to be there. The functions are
// pure and safe for concurrent use.
package wamsg

import (
	"crypto/sha256"
	"slices"
	"strings"
	"time"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/proto/waCommon"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/types"
	"google.golang.org/protobuf/reflect/protoreflect"

	"berth/orchestrator/internal/whatsapp/waid"
)

// Kind is what a message is.
type Kind string

// The kinds of message.
const (
	// None says nothing to anybody: keys, settings, acknowledgements. It is to be
	// dropped before its id is looked at, since a message that says something may
	// come under the same id.
	None Kind = ""

	Text     Kind = "text"
	Media    Kind = "media" // with or without text
	Poll     Kind = "poll"
	Location Kind = "location"
	Contacts Kind = "contacts"
	Notice   Kind = "notice" // anything else that can be said in a line

	// These concern another message, the Target. WhatsApp leaves it to the
	// receiver to check that the sender may do so: only who wrote a message may
	// edit it, and only they or an admin of the group may revoke it.
	Edit     Kind = "edit" // New says what it says now
	Revoke   Kind = "revoke"
	Reaction Kind = "reaction"
	Vote     Kind = "vote"

	// Secret is an edit, a vote or a reaction whose content only the client can
	// decrypt: see Hidden, Opened, Voted and Reacted.
	Secret Kind = "secret"
)

const (
	// MaxMentions is the number of mentions that are kept: that of the members of
	// WhatsApp's largest group.
	MaxMentions = 1024
	// maxWrappers is how deep a message may be wrapped: in truth it is three.
	maxWrappers = 16
	maxOptions  = 32
)

// Content is what a message says.
type Content struct {
	Kind     Kind
	Text     string      // as typed, or the caption; at most berth.MaxText bytes
	Mentions []types.JID // normal, each once, at most MaxMentions
	Quoted   *Quote      // the message that it answers
	Media    *File
	Poll     *Question
	Target   Key
	New      *Content // of an Edit
	Emoji    string   // of a Reaction; empty if it was taken back
	Hidden   Hidden   // of a Secret

	// Copy is set for a medium that was sent before in lower quality, as Target.
	Copy      bool
	Forwarded bool
	ViewOnce  bool
	// Expires is the chat's timer for disappearing messages, as the sender knew
	// it; answers carry the same one. Zero: off.
	Expires time.Duration

	line string // what stands for what was not typed
}

// Key names a message. Its parts are what the sender of the Content claims.
type Key struct {
	ID     string
	Chat   types.JID // normal; zero: the same chat
	Sender types.JID // normal; zero in a chat with one person
	FromMe bool      // written by the account of whoever sent the Key
}

// Quote is a message that another one answers, as its sender tells it.
type Quote struct {
	Key
	Text     string      // at most 1 000 characters
	Mentions []types.JID // in Text

	typed string // of Text
}

// Question is a poll.
type Question struct {
	Text    string
	Options []string // as they were typed: a vote names them by their hashes
	Several bool     // more than one may be chosen
}

// Chosen returns the options that the hashes of a vote stand for.
func (q Question) Chosen(hashes [][]byte) []string {
	var out []string
	for _, option := range q.Options {
		sum := sha256.Sum256([]byte(option))
		if slices.ContainsFunc(hashes, func(h []byte) bool { return string(h) == string(sum[:]) }) {
			out = append(out, option)
		}
	}
	return out
}

// Hidden is what a Secret holds.
type Hidden string

// The kinds of Secret, and who opens them.
const (
	HiddenEdit     Hidden = "edit"     // Client.DecryptSecretEncryptedMessage, then Opened
	HiddenVote     Hidden = "vote"     // Client.DecryptPollVote, then Voted
	HiddenReaction Hidden = "reaction" // Client.DecryptReaction, then Reacted
	HiddenOther    Hidden = "other"    // nobody
)

// FileKind is the kind of a medium.
type FileKind string

// The kinds of media.
const (
	Photo     FileKind = "photo"
	Video     FileKind = "video"
	GIF       FileKind = "GIF"
	VideoNote FileKind = "video note"
	VoiceNote FileKind = "voice note"
	Audio     FileKind = "audio"
	Document  FileKind = "document"
	Sticker   FileKind = "sticker"
)

// File is a medium. All that it says about itself is a claim.
type File struct {
	Kind   FileKind
	MIME   string
	Name   string // of a document; one line, but no safe file name: see FileName
	Size   uint64 // in bytes; may be wrong, also absurdly
	Length time.Duration
	Source whatsmeow.DownloadableMessage // what the client downloads
}

// Read returns what a message says. It wants the raw message, in all its
// wrappers; nil says nothing.
func Read(m *waE2E.Message) Content {
	return read(m, true)
}

// read reads a message, and the one that it quotes if quotes is set.
func read(m *waE2E.Message, quotes bool) Content {
	var c Content
	var association *waE2E.MessageAssociation
	m = unwrap(m, func(wrapper *waE2E.Message) {
		c.ViewOnce = c.ViewOnce || wrapper.ViewOnceMessage != nil || wrapper.ViewOnceMessageV2 != nil || wrapper.ViewOnceMessageV2Extension != nil
		if a := wrapper.GetMessageContextInfo().GetMessageAssociation(); a != nil {
			association = a
		}
		if t := wrapper.GetCommentMessage().GetTargetMessageKey(); t != nil && quotes {
			c.Quoted = &Quote{Key: key(t)}
		}
	})
	if m == nil {
		return Content{}
	}
	c.say(m, quotes)
	if c.Kind == None {
		return Content{}
	}
	c.context(contextOf(m), quotes)
	switch association.GetAssociationType() {
	case waE2E.MessageAssociation_HD_IMAGE_DUAL_UPLOAD, waE2E.MessageAssociation_HD_VIDEO_DUAL_UPLOAD,
		waE2E.MessageAssociation_HEVC_VIDEO_DUAL_UPLOAD, waE2E.MessageAssociation_MOTION_PHOTO:
		if t := key(association.GetParentMessageKey()); t.ID != "" && c.Kind == Media {
			c.Copy, c.Target = true, t
		}
	}
	return c
}

// unwrap returns the innermost message, and tells about each on the way. It
// returns nil for one that is wrapped without an end.
func unwrap(m *waE2E.Message, visit func(*waE2E.Message)) *waE2E.Message {
	for range maxWrappers {
		if m == nil {
			return nil
		}
		visit(m)
		inner := inside(m)
		if inner == nil {
			return m
		}
		m = inner
	}
	return nil
}

// inside returns the message that m wraps, or nil. WhatsApp adds a wrapper every
// few weeks, and all of them have the same type.
func inside(m *waE2E.Message) *waE2E.Message {
	if inner := m.GetDeviceSentMessage().GetMessage(); inner != nil {
		return inner
	}
	if inner := m.GetCommentMessage().GetMessage(); inner != nil {
		return inner
	}
	for _, part := range parts(m) {
		if wrapper, ok := part.Interface().(*waE2E.FutureProofMessage); ok && wrapper.GetMessage() != nil {
			return wrapper.GetMessage()
		}
	}
	return nil
}

// parts returns what m is made of, but for plain text, in the order of the
// fields, so that a message with several always reads the same.
func parts(m *waE2E.Message) []protoreflect.Message {
	var out []protoreflect.Message
	r := m.ProtoReflect()
	fields := r.Descriptor().Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); f.Message() != nil && !f.IsList() && !f.IsMap() && r.Has(f) {
			out = append(out, r.Get(f).Message())
		}
	}
	return out
}

// contextOf returns the context of what m says, wherever that is.
func contextOf(m *waE2E.Message) *waE2E.ContextInfo {
	for _, part := range parts(m) {
		if p, ok := part.Interface().(interface{ GetContextInfo() *waE2E.ContextInfo }); ok && p.GetContextInfo() != nil {
			return p.GetContextInfo()
		}
	}
	return nil
}

func (c *Content) context(info *waE2E.ContextInfo, quotes bool) {
	if info == nil {
		return
	}
	c.Mentions = mentions(info.GetMentionedJID())
	c.Forwarded = info.GetIsForwarded()
	const longest = 365 * 24 * time.Hour
	c.Expires = min(time.Duration(info.GetExpiration())*time.Second, longest)
	if !quotes || info.GetStanzaID() == "" && info.GetQuotedMessage() == nil {
		return
	}
	quoted := read(info.GetQuotedMessage(), false)
	q := Quote{
		Key:      Key{ID: cleanID(info.GetStanzaID()), Chat: address(info.GetRemoteJID()), Sender: address(info.GetParticipant())},
		Mentions: quoted.Mentions,
		typed:    quoted.Text,
	}
	q.Text = firstRunes(quoted.Body(quoted.Text, ""), maxQuote)
	c.Quoted = &q
}

// mentions returns who is mentioned. A list that is longer than any group is
// read as far as one of that length could be, with everybody in it twice.
func mentions(list []string) []types.JID {
	var out []types.JID
	seen := make(map[types.JID]bool)
	for _, text := range list[:min(len(list), 2*MaxMentions)] {
		if j := address(text); !j.IsEmpty() && !seen[j] && len(out) < MaxMentions {
			seen[j] = true
			out = append(out, j)
		}
	}
	return out
}

// address returns a normal address, or none for what is no address.
func address(text string) types.JID {
	j, _ := waid.Parse(text)
	return j
}

func key(k *waCommon.MessageKey) Key {
	return Key{ID: cleanID(k.GetID()), Chat: address(k.GetRemoteJID()), Sender: address(k.GetParticipant()), FromMe: k.GetFromMe()}
}

// Opened returns a Secret edit with its content, as the client decrypted it.
func (c Content) Opened(m *waE2E.Message) Content {
	opened := Read(m)
	if opened.Kind == Edit { // in the old form inside
		opened = *opened.New
	}
	if opened.Kind == None {
		return c
	}
	// Whatever is inside, only what the outside names was proved to be meant.
	return Content{Kind: Edit, Target: c.Target, New: &opened, Mentions: opened.Mentions, Expires: opened.Expires}
}

// Voted returns a Secret vote with what was chosen: nothing if a vote was taken
// back. Without the poll (nil) it is not known what the choice means.
func (c Content) Voted(poll *Question, vote *waE2E.PollVoteMessage) Content {
	out := Content{Kind: Vote, Target: c.Target, line: "voted in a poll"}
	hashes := vote.GetSelectedOptions()
	hashes = hashes[:min(len(hashes), 2*maxOptions)]
	switch {
	case poll == nil:
	case len(hashes) == 0:
		out.line = "took back the vote in the poll " + inQuotes(poll.Text)
	default:
		var chosen []string
		for _, o := range poll.Chosen(hashes) {
			chosen = append(chosen, oneLine(o, maxField))
		}
		out.line = "voted in the poll " + inQuotes(poll.Text) + ": " + strings.Join(chosen, "; ")
	}
	return out
}

// Reacted returns a Secret reaction with its content.
func (c Content) Reacted(r *waE2E.ReactionMessage) Content {
	out := Content{Kind: Reaction, Target: c.Target}
	out.react(r.GetText())
	return out
}

func (c *Content) react(emoji string) {
	c.Emoji = oneLine(emoji, 16)
	c.line = "reacted with " + c.Emoji
	if c.Emoji == "" {
		c.line = "took back a reaction"
	}
}

// Line returns what stands for what was not typed, such as
// "[photo, 1.2 MB: media/x.jpg]"; it is empty if all was. saved is where the
// medium went, or why it went nowhere, or empty.
func (c Content) Line(saved string) string {
	line := c.line
	if c.Media != nil {
		line = c.Media.String()
		if c.ViewOnce {
			line = "view-once " + line
		}
		if saved != "" {
			line += ": " + oneLine(saved, maxField)
		}
	}
	if line == "" {
		return ""
	}
	return "[" + line + "]"
}

// Body returns what the agent reads: Line and text, which is c.Text with the
// mentions made readable. It is empty if nothing is said, and has at most
// berth.MaxText bytes.
func (c Content) Body(text, saved string) string {
	if c.Kind == Edit && c.New != nil {
		return c.New.Body(text, saved)
	}
	line := c.Line(saved)
	if line != "" && text != "" {
		line += "\n"
	}
	return cleanText(line + text)
}
