package wamsg

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"go.mau.fi/whatsmeow/proto/waE2E"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// carriers are the parts of a message that say nothing to anybody: they carry
// keys and settings, announce what comes by itself, or belong to status updates.
var carriers = []protoreflect.Name{
	"senderKeyDistributionMessage", "fastRatchetKeySenderKeyDistributionMessage", "messageContextInfo", "protocolMessage",
	"deviceSentMessage", "commentMessage", "call", "chat", "stickerSyncRmrMessage", "albumMessage", "messageHistoryBundle", "messageHistoryNotice",
	"groupRootKeyShare", "rootSecretDistributeMessage", "encEventResponseMessage", "statusNotificationMessage", "statusLinkPreviewMetadata",
	"statusStickerInteractionMessage", "statusQuotedMessage", "keepInChatMessage",
	"conversation", "extendedTextMessage", // empty ones: any other was read before
}

// say reads what m says by itself; m is no wrapper.
func (c *Content) say(m *waE2E.Message, quotes bool) {
	switch {
	case m.GetProtocolMessage() != nil:
		c.protocol(m.ProtocolMessage, quotes)
	case m.SecretEncryptedMessage != nil:
		c.secret(HiddenOther, "changed a message in a way that cannot be read here")
		c.Target = key(m.SecretEncryptedMessage.GetTargetMessageKey())
		switch m.SecretEncryptedMessage.GetSecretEncType() {
		case waE2E.SecretEncryptedMessage_MESSAGE_EDIT, waE2E.SecretEncryptedMessage_EVENT_EDIT, waE2E.SecretEncryptedMessage_POLL_EDIT:
			c.secret(HiddenEdit, "edited a message; the new text cannot be read here")
		}
	case m.EncReactionMessage != nil:
		c.secret(HiddenReaction, "reacted to a message")
		c.Target = key(m.EncReactionMessage.GetTargetMessageKey())
	case m.PollUpdateMessage != nil:
		c.secret(HiddenVote, "voted in a poll")
		c.Target = key(m.PollUpdateMessage.GetPollCreationMessageKey())
	case m.EncCommentMessage != nil:
		c.secret(HiddenOther, "commented on a message in a way that cannot be read here")
		c.Target = key(m.EncCommentMessage.GetTargetMessageKey())
	case m.ReactionMessage != nil:
		c.Kind, c.Target = Reaction, key(m.ReactionMessage.GetKey())
		c.react(m.ReactionMessage.GetText())
	case m.GetConversation() != "":
		c.typed(m.GetConversation())
	case m.GetExtendedTextMessage().GetText() != "":
		c.ViewOnce = c.ViewOnce || m.ExtendedTextMessage.GetViewOnce()
		c.typed(m.ExtendedTextMessage.GetText())
	case c.file(m):
	case c.poll(m):
	case m.LocationMessage != nil:
		l := m.LocationMessage
		kind := "location"
		if l.GetIsLive() {
			kind = "live location"
		}
		c.place(kind, l.GetDegreesLatitude(), l.GetDegreesLongitude(), l.GetName(), l.GetAddress(), l.GetURL())
		c.Text = cleanText(l.GetComment())
	case m.LiveLocationMessage != nil:
		l := m.LiveLocationMessage
		c.place("live location", l.GetDegreesLatitude(), l.GetDegreesLongitude())
		c.Text = cleanText(l.GetCaption())
	case m.ContactMessage != nil:
		c.cards([]*waE2E.ContactMessage{m.ContactMessage})
	case m.ContactsArrayMessage != nil:
		c.cards(m.ContactsArrayMessage.GetContacts())
	case c.business(m):
	case c.other(m):
	default:
		c.unknown(m)
	}
}

func (c *Content) typed(text string) {
	if c.Text = cleanText(text); c.Text != "" {
		c.Kind = Text
	}
}

func (c *Content) notice(format string, args ...any) {
	c.Kind, c.line = Notice, strings.TrimSpace(fmt.Sprintf(format, args...))
}

func (c *Content) secret(h Hidden, line string) {
	c.Kind, c.Hidden, c.line = Secret, h, line
}

// unknown says that there is something, unless it is nothing.
func (c *Content) unknown(m *waE2E.Message) {
	r := m.ProtoReflect()
	fields := r.Descriptor().Fields()
	known := false
	for i := range fields.Len() {
		f := fields.Get(i)
		if !r.Has(f) {
			continue
		}
		known = true
		if !slices.Contains(carriers, f.Name()) && (f.Message() == nil || f.Message().Name() != "FutureProofMessage") {
			c.notice("a message that cannot be read here: %s", f.Name())
			return
		}
	}
	if !known && len(r.GetUnknown()) > 0 {
		c.notice("a message that cannot be read here: newer than this program")
	}
}

func (c *Content) protocol(p *waE2E.ProtocolMessage, quotes bool) {
	target := key(p.GetKey())
	switch p.GetType() {
	case waE2E.ProtocolMessage_REVOKE:
		// The type is 0, and so that of a message without one.
		if p.Type != nil && target.ID != "" {
			c.Kind, c.Target, c.line = Revoke, target, "deleted a message"
		}
	case waE2E.ProtocolMessage_MESSAGE_EDIT:
		edited := read(p.GetEditedMessage(), quotes)
		if target.ID == "" || edited.Kind == None || edited.Kind == Edit {
			return
		}
		c.Kind, c.Target, c.New, c.Mentions = Edit, target, &edited, edited.Mentions
	case waE2E.ProtocolMessage_EPHEMERAL_SETTING:
		if t := p.GetEphemeralExpiration(); t > 0 {
			c.notice("messages of this chat now disappear after %s", duration(time.Duration(t)*time.Second))
		} else {
			c.notice("messages of this chat no longer disappear")
		}
	case waE2E.ProtocolMessage_STATUS_MENTION_MESSAGE:
		c.notice("mentioned this chat in a status update")
	}
}

// file reads a medium.
func (c *Content) file(m *waE2E.Message) bool {
	switch {
	case m.ImageMessage != nil:
		i := m.ImageMessage
		c.Media = &File{Kind: Photo, MIME: i.GetMimetype(), Size: i.GetFileLength(), Source: i}
		c.Text, c.ViewOnce = i.GetCaption(), c.ViewOnce || i.GetViewOnce()
	case m.VideoMessage != nil, m.PtvMessage != nil:
		v, kind := m.VideoMessage, Video
		if v == nil {
			v, kind = m.PtvMessage, VideoNote
		}
		if v.GetGifPlayback() {
			kind = GIF
		}
		c.Media = &File{Kind: kind, MIME: v.GetMimetype(), Size: v.GetFileLength(), Length: seconds(v.GetSeconds()), Source: v}
		c.Text, c.ViewOnce = v.GetCaption(), c.ViewOnce || v.GetViewOnce()
	case m.AudioMessage != nil:
		a, kind := m.AudioMessage, Audio
		if a.GetPTT() {
			kind = VoiceNote
		}
		c.Media = &File{Kind: kind, MIME: a.GetMimetype(), Size: a.GetFileLength(), Length: seconds(a.GetSeconds()), Source: a}
		c.ViewOnce = c.ViewOnce || a.GetViewOnce()
	case m.DocumentMessage != nil:
		d := m.DocumentMessage
		name := d.GetFileName()
		if name == "" {
			name = d.GetTitle()
		}
		c.Media = &File{Kind: Document, MIME: d.GetMimetype(), Name: oneLine(name, maxField), Size: d.GetFileLength(), Source: d}
		c.Text = d.GetCaption()
	case m.StickerMessage != nil:
		s := m.StickerMessage
		c.Media = &File{Kind: Sticker, MIME: s.GetMimetype(), Size: s.GetFileLength(), Source: s}
		if label := s.GetAccessibilityLabel(); label != "" {
			c.Media.Name = oneLine(label, maxName)
		}
	default:
		return false
	}
	c.Kind, c.Text, c.Media.MIME = Media, cleanText(c.Text), oneLine(c.Media.MIME, maxField)
	return true
}

func seconds(n uint32) time.Duration { return time.Duration(n) * time.Second }

// String says what the file is: "voice note, 0:07", "document “a.pdf”, 1.2 MB".
func (f File) String() string {
	s := string(f.Kind)
	if f.Name != "" {
		s += " " + inQuotes(f.Name)
	}
	if f.Length > 0 {
		s += fmt.Sprintf(", %d:%02d", int(f.Length.Minutes()), int(f.Length.Seconds())%60)
	}
	if f.Size > 0 && f.Kind != Sticker {
		s += ", " + bytesOf(f.Size)
	}
	return s
}

func bytesOf(n uint64) string {
	switch {
	case n < 1000:
		return fmt.Sprintf("%d bytes", n)
	case n < 1_000_000:
		return fmt.Sprintf("%d kB", n/1000)
	case n < 1_000_000_000:
		return fmt.Sprintf("%.1f MB", float64(n)/1e6)
	}
	return fmt.Sprintf("%.1f GB", float64(n)/1e9)
}

func (c *Content) poll(m *waE2E.Message) bool {
	var p *waE2E.PollCreationMessage
	for _, version := range []*waE2E.PollCreationMessage{
		m.PollCreationMessage, m.PollCreationMessageV2, m.PollCreationMessageV3, m.PollCreationMessageV5, m.PollCreationMessageV6,
	} {
		if version != nil {
			p = version
		}
	}
	if p == nil {
		return c.results(m)
	}
	q := Question{Text: oneLine(p.GetName(), maxField), Several: p.GetSelectableOptionsCount() != 1}
	shown := make([]string, 0, maxOptions)
	for _, o := range p.GetOptions()[:min(len(p.GetOptions()), maxOptions)] {
		// As it is: a vote names it by its hash.
		name := o.GetOptionName()
		q.Options = append(q.Options, strings.ToValidUTF8(firstBytes(name, 1000), "\uFFFD"))
		shown = append(shown, oneLine(name, maxField))
	}
	c.Kind, c.Poll = Poll, &q
	c.line = "poll " + inQuotes(q.Text) + ": " + list(shown, len(p.GetOptions()))
	return true
}

func (c *Content) results(m *waE2E.Message) bool {
	r := m.GetPollResultSnapshotMessage()
	if r == nil {
		r = m.GetPollResultSnapshotMessageV3()
	}
	if r == nil {
		return false
	}
	var votes []string
	for _, v := range r.GetPollVotes()[:min(len(r.GetPollVotes()), maxList)] {
		votes = append(votes, fmt.Sprintf("%s %d", oneLine(v.GetOptionName(), maxField), v.GetOptionVoteCount()))
	}
	c.notice("result of the poll %s: %s", inQuotes(r.GetName()), list(votes, len(r.GetPollVotes())))
	return true
}

// list joins what is shown of a number of things.
func list(shown []string, all int) string {
	s := strings.Join(shown, "; ")
	if all > len(shown) {
		s += fmt.Sprintf("; and %d more", all-len(shown))
	}
	return s
}

func inQuotes(s string) string { return "“" + oneLine(s, maxField) + "”" }

func (c *Content) place(kind string, lat, long float64, more ...string) {
	c.Kind, c.line = Location, kind
	if math.Abs(lat) <= 90 && math.Abs(long) <= 180 { // also not for NaN
		c.line += fmt.Sprintf(" %.5f, %.5f", lat, long)
	}
	for _, s := range more {
		if s = oneLine(s, maxField); s != "" {
			c.line += "; " + s
		}
	}
}

func (c *Content) cards(contacts []*waE2E.ContactMessage) {
	const fewest = 10 // entries: each has up to ten fields
	var shown []string
	for _, card := range contacts[:min(len(contacts), fewest)] {
		shown = append(shown, describeCard(card.GetDisplayName(), card.GetVcard()))
	}
	c.Kind, c.line = Contacts, "contact "+list(shown, len(contacts))
	if len(contacts) != 1 {
		c.line = fmt.Sprintf("%d contacts: %s", len(contacts), list(shown, len(contacts)))
	}
}

var cardProperties = []string{"FN", "ORG", "TEL", "EMAIL", "URL", "ADR", "BDAY"}

var unescapeCard = strings.NewReplacer(`\n`, " ", `\,`, ",", `\;`, ";", ";", " ")

// describeCard returns name, company, numbers and addresses of a vCard. It may be
// any size: pictures are in it.
func describeCard(name, card string) string {
	const (
		maxCard   = 1 << 20 // bytes that are looked at
		maxFields = 8
		maxTries  = 100 // that are read to find these: they may be empty
	)
	tries := 0
	var fields []string
	full := ""
	for line := range strings.Lines(card[:min(len(card), maxCard)]) {
		property, value, ok := strings.Cut(line, ":")
		if !ok || len(property) > 200 || len(fields) >= maxFields {
			continue
		}
		property, _, _ = strings.Cut(property, ";")
		if _, after, grouped := strings.Cut(property, "."); grouped {
			property = after
		}
		property = strings.ToUpper(property)
		if !slices.Contains(cardProperties, property) {
			continue
		}
		if tries++; tries > maxTries {
			break
		}
		value = oneLine(unescapeCard.Replace(value[:min(len(value), 8*maxField)]), maxField)
		if value == "" {
			continue
		}
		if property == "FN" {
			full = value
		} else {
			fields = append(fields, value)
		}
	}
	if name = oneLine(name, maxName); name == "" {
		name = oneLine(full, maxName)
	}
	return strings.Join(append([]string{inQuotes(name)}, fields...), ", ")
}

// business reads what shops and their programs send: text with buttons, and what
// somebody chose.
func (c *Content) business(m *waE2E.Message) bool {
	var parts []string
	switch {
	case m.TemplateMessage != nil:
		parts = template(m.TemplateMessage)
	case m.GetHighlyStructuredMessage().GetHydratedHsm() != nil:
		parts = template(m.HighlyStructuredMessage.HydratedHsm)
	case m.ButtonsMessage != nil:
		b := m.ButtonsMessage
		parts = []string{b.GetText(), b.GetContentText(), b.GetFooterText()}
		for _, button := range b.GetButtons()[:min(len(b.GetButtons()), maxList)] {
			parts = append(parts, button.GetButtonText().GetDisplayText())
		}
	case m.ListMessage != nil:
		l := m.ListMessage
		parts = []string{l.GetTitle(), l.GetDescription(), l.GetFooterText()}
		for _, section := range l.GetSections()[:min(len(l.GetSections()), maxList)] {
			parts = append(parts, section.GetTitle())
			for _, row := range section.GetRows()[:min(len(section.GetRows()), maxList)] {
				parts = append(parts, row.GetTitle()+" "+row.GetDescription())
			}
		}
	case m.InteractiveMessage != nil:
		parts = interactive(m.InteractiveMessage)
	case m.ButtonsResponseMessage != nil:
		parts = []string{m.ButtonsResponseMessage.GetSelectedDisplayText()}
	case m.TemplateButtonReplyMessage != nil:
		parts = []string{m.TemplateButtonReplyMessage.GetSelectedDisplayText()}
	case m.ListResponseMessage != nil:
		parts = []string{m.ListResponseMessage.GetTitle(), m.ListResponseMessage.GetDescription()}
	case m.InteractiveResponseMessage != nil:
		parts = []string{m.InteractiveResponseMessage.GetBody().GetText()}
	case m.RichResponseMessage != nil:
		for _, sub := range m.RichResponseMessage.GetSubmessages()[:min(len(m.RichResponseMessage.GetSubmessages()), maxList)] {
			parts = append(parts, sub.GetMessageText())
		}
	default:
		return false
	}
	var out []string
	for _, p := range parts {
		if p = cleanText(p); p != "" {
			out = append(out, p)
		}
	}
	if c.typed(strings.Join(out, "\n")); c.Kind == None {
		c.notice("a message of a business that cannot be read here")
	}
	return true
}

func template(t *waE2E.TemplateMessage) []string {
	h := t.GetHydratedTemplate()
	if h == nil {
		h = t.GetHydratedFourRowTemplate()
	}
	if i := t.GetInteractiveMessageTemplate(); h == nil && i != nil {
		return interactive(i)
	}
	return []string{h.GetHydratedTitleText(), h.GetHydratedContentText(), h.GetHydratedFooterText()}
}

func interactive(i *waE2E.InteractiveMessage) []string {
	return []string{i.GetHeader().GetTitle(), i.GetHeader().GetSubtitle(), i.GetBody().GetText(), i.GetFooter().GetText()}
}

// other reads what can be said in a line.
func (c *Content) other(m *waE2E.Message) bool {
	switch {
	case m.GroupInviteMessage != nil:
		c.notice("invitation to the group %s", inQuotes(m.GroupInviteMessage.GetGroupName()))
		c.Text = cleanText(m.GroupInviteMessage.GetCaption())
	case m.NewsletterAdminInviteMessage != nil:
		c.notice("invitation to run the channel %s", inQuotes(m.NewsletterAdminInviteMessage.GetNewsletterName()))
	case m.NewsletterFollowerInviteMessageV2 != nil:
		c.notice("invitation to a channel")
	case m.EventMessage != nil:
		e := m.EventMessage
		what := "event"
		if e.GetIsCanceled() {
			what = "cancelled event"
		}
		c.notice("%s %s%s", what, inQuotes(e.GetName()), at(e.GetStartTime()))
		if place := oneLine(e.GetLocation().GetName()+" "+e.GetLocation().GetAddress(), maxField); place != "" {
			c.line += "; " + place
		}
		if link := oneLine(e.GetJoinLink(), maxField); link != "" {
			c.line += "; " + link
		}
		c.Text = cleanText(e.GetDescription())
	case m.EventInviteMessage != nil:
		c.notice("invitation to the event %s%s", inQuotes(m.EventInviteMessage.GetEventTitle()), at(m.EventInviteMessage.GetStartTime()))
		c.Text = cleanText(m.EventInviteMessage.GetCaption())
	case m.CallLogMesssage != nil:
		call := m.CallLogMesssage
		kind, outcome := "voice", "call"
		if call.GetIsVideo() {
			kind = "video"
		}
		if call.GetCallOutcome() == waE2E.CallLogMessage_MISSED {
			outcome = "call that nobody answered"
		}
		c.notice("%s %s%s", kind, outcome, lasting(call.GetDurationSecs()))
	case m.ScheduledCallCreationMessage != nil:
		c.notice("call %s planned%s", inQuotes(m.ScheduledCallCreationMessage.GetTitle()), at(m.ScheduledCallCreationMessage.GetScheduledTimestampMS()/1000))
	case m.ScheduledCallEditMessage != nil:
		c.notice("a planned call was cancelled")
	case m.BcallMessage != nil:
		c.notice("started a call for listeners")
		c.Text = cleanText(m.BcallMessage.GetCaption())
	case m.PinInChatMessage != nil:
		c.Target = key(m.PinInChatMessage.GetKey())
		switch m.PinInChatMessage.GetType() {
		case waE2E.PinInChatMessage_PIN_FOR_ALL:
			c.notice("pinned a message")
		default:
			c.notice("unpinned a message")
		}
	case m.PlaceholderMessage != nil:
		c.notice("a message that only the phone shows")
	case m.StickerPackMessage != nil:
		c.notice("sticker pack %s", inQuotes(m.StickerPackMessage.GetName()))
		c.Text = cleanText(m.StickerPackMessage.GetCaption())
	case m.ProductMessage != nil:
		p := m.ProductMessage
		c.notice("product %s%s", inQuotes(p.GetProduct().GetTitle()), price(p.GetProduct().GetPriceAmount1000(), p.GetProduct().GetCurrencyCode()))
		c.Text = cleanText(p.GetBody())
	case m.OrderMessage != nil:
		o := m.OrderMessage
		c.notice("order of %d items%s", o.GetItemCount(), price(o.GetTotalAmount1000(), o.GetTotalCurrencyCode()))
		c.Text = cleanText(o.GetMessage())
	case m.InvoiceMessage != nil:
		c.notice("invoice")
		c.Text = cleanText(m.InvoiceMessage.GetNote())
	case m.SendPaymentMessage != nil:
		c.notice("payment")
		c.Text = read(m.SendPaymentMessage.GetNoteMessage(), false).Text
	case m.RequestPaymentMessage != nil:
		r := m.RequestPaymentMessage
		c.notice("request for payment%s", price(int64(min(r.GetAmount1000(), math.MaxInt64)), r.GetCurrencyCodeIso4217()))
		c.Text = read(r.GetNoteMessage(), false).Text
	case m.DeclinePaymentRequestMessage != nil:
		c.notice("declined a request for payment")
	case m.CancelPaymentRequestMessage != nil:
		c.notice("cancelled a request for payment")
	case m.PaymentInviteMessage != nil:
		c.notice("invitation to WhatsApp payments")
	case m.SplitPaymentMessage != nil:
		c.notice("shared bill %s", inQuotes(m.SplitPaymentMessage.GetDescription()))
	case m.PaymentReminderMessage != nil:
		c.notice("reminder of a payment %s", inQuotes(m.PaymentReminderMessage.GetDescription()))
	case m.RequestPhoneNumberMessage != nil:
		c.notice("asks for the phone number")
	case m.QuestionResponseMessage != nil:
		c.typed(m.QuestionResponseMessage.GetText())
	case m.StatusQuestionAnswerMessage != nil:
		c.typed(m.StatusQuestionAnswerMessage.GetText())
	case m.MusicMessage != nil:
		music := m.MusicMessage.GetEmbeddedMusic()
		c.notice("song %s by %s", inQuotes(music.GetTitle()), inQuotes(music.GetAuthor()))
	case m.PollAddOptionMessage != nil:
		c.Target = key(m.PollAddOptionMessage.GetPollCreationMessageKey())
		c.notice("added %s to a poll", inQuotes(m.PollAddOptionMessage.GetAddOption().GetOptionName()))
	default:
		return false
	}
	return true
}

// at says when something is, for a time in Unix seconds.
func at(unix int64) string {
	t := time.Unix(unix, 0).UTC()
	if unix <= 0 || t.Year() > 9999 {
		return ""
	}
	return " on " + t.Format("2006-01-02 15:04") + " UTC"
}

func lasting(seconds int64) string {
	if seconds <= 0 || seconds > 7*24*3600 {
		return ""
	}
	return " of " + duration(time.Duration(seconds)*time.Second)
}

func price(thousandths int64, currency string) string {
	if thousandths == 0 {
		return ""
	}
	return fmt.Sprintf(", %.2f %s", float64(thousandths)/1000, oneLine(currency, 8))
}

// duration says how long something lasts: "7 days", "24 hours", "90 seconds".
func duration(d time.Duration) string {
	n, unit := int64(d/time.Second), "second"
	for _, u := range []struct {
		name string
		size time.Duration
	}{{"day", 24 * time.Hour}, {"hour", time.Hour}, {"minute", time.Minute}} {
		if d >= u.size && d%u.size == 0 {
			n, unit = int64(d/u.size), u.name
			break
		}
	}
	if n != 1 {
		unit += "s"
	}
	return fmt.Sprintf("%d %s", n, unit)
}
