package wamsg

import (
	"bytes"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/proto/waCommon"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waid"
)

func typed(s string) *waE2E.Message { return &waE2E.Message{Conversation: &s} }

func wrapped(m *waE2E.Message) *waE2E.FutureProofMessage {
	return &waE2E.FutureProofMessage{Message: m}
}

func keyOf(id string) *waCommon.MessageKey {
	return &waCommon.MessageKey{ID: &id, Participant: new("100000000000002:7@lid"), RemoteJID: new("120363012345678901@g.us")}
}

func protocol(kind waE2E.ProtocolMessage_Type, p *waE2E.ProtocolMessage) *waE2E.Message {
	p.Type = kind.Enum()
	return &waE2E.Message{ProtocolMessage: p}
}

var keys = &waE2E.SenderKeyDistributionMessage{GroupID: new("1@g.us")}

func TestWA14NothingSaid(t *testing.T) {
	deep := typed("x")
	for range maxWrappers {
		deep = &waE2E.Message{EphemeralMessage: wrapped(deep)}
	}
	for name, m := range map[string]*waE2E.Message{
		"nil":             nil,
		"empty":           {},
		"empty text":      typed(""),
		"blank text":      typed(" \u2028\n\x00"),
		"keys":            {SenderKeyDistributionMessage: keys, MessageContextInfo: &waE2E.MessageContextInfo{}},
		"wrapped keys":    {DeviceSentMessage: &waE2E.DeviceSentMessage{Message: &waE2E.Message{SenderKeyDistributionMessage: keys}}},
		"empty wrapper":   {EphemeralMessage: &waE2E.FutureProofMessage{}},
		"endless":         deep,
		"history sync":    protocol(waE2E.ProtocolMessage_HISTORY_SYNC_NOTIFICATION, &waE2E.ProtocolMessage{}),
		"key share":       protocol(waE2E.ProtocolMessage_APP_STATE_SYNC_KEY_SHARE, &waE2E.ProtocolMessage{}),
		"no type":         {ProtocolMessage: &waE2E.ProtocolMessage{Key: keyOf("A")}},
		"revoke nothing":  protocol(waE2E.ProtocolMessage_REVOKE, &waE2E.ProtocolMessage{}),
		"edit to nothing": protocol(waE2E.ProtocolMessage_MESSAGE_EDIT, &waE2E.ProtocolMessage{Key: keyOf("A"), EditedMessage: &waE2E.Message{}}),
		"edit of an edit": protocol(waE2E.ProtocolMessage_MESSAGE_EDIT, &waE2E.ProtocolMessage{Key: keyOf("A"), EditedMessage: protocol(waE2E.ProtocolMessage_MESSAGE_EDIT, &waE2E.ProtocolMessage{Key: keyOf("B"), EditedMessage: typed("x")})}),
		"album":           {AlbumMessage: &waE2E.AlbumMessage{ExpectedImageCount: new(uint32(3))}},
		"ringing":         {Call: &waE2E.Call{CallKey: []byte{1}}},
	} {
		if got := Read(m); got.Kind != None || got.Body(got.Text, "") != "" {
			t.Errorf("%s: got %+v", name, got)
		}
	}
}

func TestWA15to17Text(t *testing.T) {
	for name, m := range map[string]*waE2E.Message{
		"plain":              typed("hello"),
		"WA-15 extended":     {ExtendedTextMessage: &waE2E.ExtendedTextMessage{Text: new("hello")}},
		"WA-16 photo":        {ImageMessage: &waE2E.ImageMessage{Caption: new("hello")}},
		"WA-17 video":        {VideoMessage: &waE2E.VideoMessage{Caption: new("hello")}},
		"document":           {DocumentWithCaptionMessage: wrapped(&waE2E.Message{DocumentMessage: &waE2E.DocumentMessage{Caption: new("hello")}})},
		"with keys":          {Conversation: new("hello"), SenderKeyDistributionMessage: keys},
		"ephemeral":          {EphemeralMessage: wrapped(typed("hello"))},
		"own phone":          {DeviceSentMessage: &waE2E.DeviceSentMessage{Message: &waE2E.Message{EphemeralMessage: wrapped(typed("hello"))}}},
		"to a bot":           {BotInvokeMessage: wrapped(typed("hello"))},
		"group status":       {GroupStatusMessageV2: wrapped(typed("hello"))},
		"question":           {QuestionMessage: wrapped(typed("hello"))},
		"comment":            {CommentMessage: &waE2E.CommentMessage{Message: typed("hello"), TargetMessageKey: keyOf("A")}},
		"view once":          {ViewOnceMessageV2: wrapped(&waE2E.Message{ImageMessage: &waE2E.ImageMessage{Caption: new("hello")}})},
		"button":             {ButtonsResponseMessage: &waE2E.ButtonsResponseMessage{Response: &waE2E.ButtonsResponseMessage_SelectedDisplayText{SelectedDisplayText: "hello"}}},
		"template":           {TemplateMessage: &waE2E.TemplateMessage{HydratedTemplate: &waE2E.TemplateMessage_HydratedFourRowTemplate{HydratedContentText: new("hello")}}},
		"choice":             {ListResponseMessage: &waE2E.ListResponseMessage{Title: new("hello")}},
		"interactive":        {InteractiveMessage: &waE2E.InteractiveMessage{Body: &waE2E.InteractiveMessage_Body{Text: new("hello")}}},
		"answer to that":     {InteractiveResponseMessage: &waE2E.InteractiveResponseMessage{Body: &waE2E.InteractiveResponseMessage_Body{Text: new("hello")}}},
		"control characters": typed("\x1bhe\x00l\u0085lo\r\n"),
	} {
		got := Read(m)
		if got.Text != "hello" {
			t.Errorf("%s: got %+v", name, got)
		}
		if (got.Kind == Media) != (m.ImageMessage != nil || m.VideoMessage != nil || m.DocumentWithCaptionMessage != nil || m.ViewOnceMessageV2 != nil) {
			t.Errorf("%s: is a %q", name, got.Kind)
		}
		if got.ViewOnce != (m.ViewOnceMessageV2 != nil) {
			t.Errorf("%s: view once is %v", name, got.ViewOnce)
		}
	}
}

// Each kind says in words what it is. WA-18: where the original hears nothing,
// the agent is told of the voice note, and where it lies.
func TestWA18Lines(t *testing.T) {
	options := []*waE2E.PollCreationMessage_Option{{OptionName: new("Pizza")}, {OptionName: new("Pasta\n")}}
	for want, m := range map[string]*waE2E.Message{
		"[voice note, 0:07, 12 kB: media/x]":                             {AudioMessage: &waE2E.AudioMessage{PTT: new(true), Seconds: new(uint32(7)), FileLength: new(uint64(12345))}},
		"[audio, 61:01: media/x]":                                        {AudioMessage: &waE2E.AudioMessage{Seconds: new(uint32(3661))}},
		"[photo, 1.2 MB: media/x]\nlook":                                 {ImageMessage: &waE2E.ImageMessage{FileLength: new(uint64(1_234_567)), Caption: new("look")}},
		"[view-once photo: media/x]":                                     {ViewOnceMessage: wrapped(&waE2E.Message{ImageMessage: &waE2E.ImageMessage{}})},
		"[GIF, 900 bytes: media/x]":                                      {VideoMessage: &waE2E.VideoMessage{GifPlayback: new(true), FileLength: new(uint64(900))}},
		"[video note: media/x]":                                          {PtvMessage: &waE2E.VideoMessage{}},
		"[sticker “a cat”: media/x]":                                     {StickerMessage: &waE2E.StickerMessage{AccessibilityLabel: new("a cat"), FileLength: new(uint64(5))}},
		"[sticker: media/x]":                                             {LottieStickerMessage: wrapped(&waE2E.Message{StickerMessage: &waE2E.StickerMessage{}})},
		"[document “fdp.exe”, 18446744073.7 GB: media/x]":                {DocumentMessage: &waE2E.DocumentMessage{FileName: new("\u202efdp.exe\x00"), FileLength: new(uint64(math.MaxUint64))}},
		"[poll “Lunch?”: Pizza; Pasta]":                                  {PollCreationMessageV3: &waE2E.PollCreationMessage{Name: new("Lunch?"), Options: options}},
		"[poll “Dinner?”: Pizza; Pasta]":                                 {PollCreationMessageV4: wrapped(&waE2E.Message{PollCreationMessage: &waE2E.PollCreationMessage{Name: new("Dinner?"), Options: options}})},
		"[result of the poll “Lunch?”: Pizza 2]":                         {PollResultSnapshotMessage: &waE2E.PollResultSnapshotMessage{Name: new("Lunch?"), PollVotes: []*waE2E.PollResultSnapshotMessage_PollVote{{OptionName: new("Pizza"), OptionVoteCount: new(int64(2))}}}},
		"[voted in a poll]":                                              {PollUpdateMessage: &waE2E.PollUpdateMessage{PollCreationMessageKey: keyOf("A")}},
		"[reacted with 👍]":                                               {ReactionMessage: &waE2E.ReactionMessage{Key: keyOf("A"), Text: new("👍")}},
		"[took back a reaction]":                                         {ReactionMessage: &waE2E.ReactionMessage{Key: keyOf("A")}},
		"[reacted to a message]":                                         {EncReactionMessage: &waE2E.EncReactionMessage{TargetMessageKey: keyOf("A")}},
		"[location 52.50000, 13.40000; Café; Street 1]\nhere":            {LocationMessage: &waE2E.LocationMessage{DegreesLatitude: new(52.5), DegreesLongitude: new(13.4), Name: new("Café"), Address: new("Street\n1"), Comment: new("here")}},
		"[location; nowhere]":                                            {LocationMessage: &waE2E.LocationMessage{DegreesLatitude: new(math.NaN()), DegreesLongitude: new(math.Inf(1)), Name: new("nowhere")}},
		"[live location 1.00000, 2.00000]\non my way":                    {LiveLocationMessage: &waE2E.LiveLocationMessage{DegreesLatitude: new(1.0), DegreesLongitude: new(2.0), Caption: new("on my way")}},
		"[contact “Bob B.”, Acme, Inc, +49 151 1, bob@x.example]":        {ContactMessage: &waE2E.ContactMessage{DisplayName: new("Bob B."), Vcard: new("BEGIN:VCARD\r\nN:B.;Bob\r\nFN:Bob B.\r\nORG:Acme\\, Inc;\r\nitem1.TEL;waid=491511:+49 151 1\r\nEMAIL;TYPE=x:bob@x.example\r\nEND:VCARD\r\n")}},
		"[2 contacts: “A”; “B”]":                                         {ContactsArrayMessage: &waE2E.ContactsArrayMessage{Contacts: []*waE2E.ContactMessage{{DisplayName: new("A")}, {Vcard: new("FN:B")}}}},
		"[deleted a message]":                                            protocol(waE2E.ProtocolMessage_REVOKE, &waE2E.ProtocolMessage{Key: keyOf("A")}),
		"[messages of this chat now disappear after 7 days]":             protocol(waE2E.ProtocolMessage_EPHEMERAL_SETTING, &waE2E.ProtocolMessage{EphemeralExpiration: new(uint32(604800))}),
		"[messages of this chat no longer disappear]":                    protocol(waE2E.ProtocolMessage_EPHEMERAL_SETTING, &waE2E.ProtocolMessage{}),
		"[mentioned this chat in a status update]":                       {GroupStatusMentionMessage: wrapped(protocol(waE2E.ProtocolMessage_STATUS_MENTION_MESSAGE, &waE2E.ProtocolMessage{}))},
		"[edited a message; the new text cannot be read here]":           {SecretEncryptedMessage: &waE2E.SecretEncryptedMessage{SecretEncType: waE2E.SecretEncryptedMessage_MESSAGE_EDIT.Enum(), TargetMessageKey: keyOf("A")}},
		"[invitation to the group “G”]":                                  {GroupInviteMessage: &waE2E.GroupInviteMessage{GroupName: new("G"), InviteCode: new("secret")}},
		"[event “Party” on 2026-09-18 12:00 UTC; Home]\nbring x":         {EventMessage: &waE2E.EventMessage{Name: new("Party"), StartTime: new(int64(1789732800)), Description: new("bring x"), Location: &waE2E.LocationMessage{Name: new("Home")}}},
		"[cancelled event “Never”]":                                      {EventMessage: &waE2E.EventMessage{Name: new("Never"), StartTime: new(int64(math.MaxInt64)), IsCanceled: new(true)}},
		"[video call that nobody answered]":                              {CallLogMesssage: &waE2E.CallLogMessage{IsVideo: new(true), CallOutcome: waE2E.CallLogMessage_MISSED.Enum()}},
		"[voice call of 90 seconds]":                                     {CallLogMesssage: &waE2E.CallLogMessage{DurationSecs: new(int64(90))}},
		"[pinned a message]":                                             {PinInChatMessage: &waE2E.PinInChatMessage{Type: waE2E.PinInChatMessage_PIN_FOR_ALL.Enum(), Key: keyOf("A")}},
		"[a message that only the phone shows]":                          {PlaceholderMessage: &waE2E.PlaceholderMessage{}},
		"[request for payment, 12.50 EUR]\nlunch":                        {RequestPaymentMessage: &waE2E.RequestPaymentMessage{Amount1000: new(uint64(12500)), CurrencyCodeIso4217: new("EUR"), NoteMessage: typed("lunch")}},
		"[product “Bread”, 2.00 EUR]":                                    {ProductMessage: &waE2E.ProductMessage{Product: &waE2E.ProductMessage_ProductSnapshot{Title: new("Bread"), PriceAmount1000: new(int64(2000)), CurrencyCode: new("EUR")}}},
		"[a message of a business that cannot be read here]":             {ListMessage: &waE2E.ListMessage{}},
		"[a message that cannot be read here: conditionalRevealMessage]": {ConditionalRevealMessage: &waE2E.ConditionalRevealMessage{}},
	} {
		c := Read(m)
		saved := ""
		if c.Media != nil {
			saved = "media/x"
		}
		if got := c.Body(c.Text, saved); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// A message of a kind that did not exist when this was written is not lost in
// silence.
func TestUnknownMessage(t *testing.T) {
	var m waE2E.Message
	if err := proto.Unmarshal([]byte{0xfa, 0x7f, 3, 'x', 'y', 'z'}, &m); err != nil { // field 2047
		t.Fatal(err)
	}
	if got, want := Read(&m).Line(""), "[a message that cannot be read here: newer than this program]"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestTargets(t *testing.T) {
	want := Key{ID: "A", Chat: types.NewJID("120363012345678901", types.GroupServer), Sender: types.NewJID("100000000000002", types.HiddenUserServer)}
	for name, m := range map[string]*waE2E.Message{
		"revoke":         protocol(waE2E.ProtocolMessage_REVOKE, &waE2E.ProtocolMessage{Key: keyOf("A")}),
		"edit":           {EditedMessage: wrapped(protocol(waE2E.ProtocolMessage_MESSAGE_EDIT, &waE2E.ProtocolMessage{Key: keyOf("A"), EditedMessage: typed("new")}))},
		"bare edit":      protocol(waE2E.ProtocolMessage_MESSAGE_EDIT, &waE2E.ProtocolMessage{Key: keyOf("A"), EditedMessage: typed("new")}),
		"encrypted edit": {SecretEncryptedMessage: &waE2E.SecretEncryptedMessage{SecretEncType: waE2E.SecretEncryptedMessage_MESSAGE_EDIT.Enum(), TargetMessageKey: keyOf("A")}},
		"reaction":       {ReactionMessage: &waE2E.ReactionMessage{Key: keyOf("A"), Text: new("x")}},
		"enc. reaction":  {EncReactionMessage: &waE2E.EncReactionMessage{TargetMessageKey: keyOf("A")}},
		"vote":           {PollUpdateMessage: &waE2E.PollUpdateMessage{PollCreationMessageKey: keyOf("A")}},
		"better picture": {AssociatedChildMessage: wrapped(&waE2E.Message{ImageMessage: &waE2E.ImageMessage{}, MessageContextInfo: &waE2E.MessageContextInfo{MessageAssociation: &waE2E.MessageAssociation{AssociationType: waE2E.MessageAssociation_HD_IMAGE_DUAL_UPLOAD.Enum(), ParentMessageKey: keyOf("A")}}})},
		"broken id":      protocol(waE2E.ProtocolMessage_MESSAGE_EDIT, &waE2E.ProtocolMessage{Key: keyOf("A\n"), EditedMessage: typed("new")}),
		"much too long":  protocol(waE2E.ProtocolMessage_REVOKE, &waE2E.ProtocolMessage{Key: keyOf(strings.Repeat("A", 129))}),
		"nobody's":       {ReactionMessage: &waE2E.ReactionMessage{Key: &waCommon.MessageKey{ID: new("A"), Participant: new("../x"), RemoteJID: new("@")}, Text: new("x")}},
	} {
		got, want := Read(m).Target, want
		switch name {
		case "broken id", "much too long":
			want = Key{}
		case "nobody's":
			want = Key{ID: "A"}
		}
		if got != want {
			t.Errorf("%s: got %+v, want %+v", name, got, want)
		}
	}
}

// Both forms of an edit end as the same: what the message says now.
func TestEdits(t *testing.T) {
	inner := &waE2E.Message{ExtendedTextMessage: &waE2E.ExtendedTextMessage{Text: new("@100000000000009 new"), ContextInfo: &waE2E.ContextInfo{MentionedJID: []string{"100000000000009@lid"}}}}
	old := Read(&waE2E.Message{EditedMessage: wrapped(protocol(waE2E.ProtocolMessage_MESSAGE_EDIT, &waE2E.ProtocolMessage{Key: keyOf("A"), EditedMessage: inner}))})
	secret := Read(&waE2E.Message{SecretEncryptedMessage: &waE2E.SecretEncryptedMessage{SecretEncType: waE2E.SecretEncryptedMessage_MESSAGE_EDIT.Enum(), TargetMessageKey: keyOf("A")}})
	if secret.Kind != Secret || secret.Hidden != HiddenEdit {
		t.Fatalf("got %+v", secret)
	}
	// What is inside may name another message: only the outer name is proved.
	lie := protocol(waE2E.ProtocolMessage_MESSAGE_EDIT, &waE2E.ProtocolMessage{Key: keyOf("ANOTHER"), EditedMessage: inner})
	for name, c := range map[string]Content{"old": old, "new": secret.Opened(inner), "new around old": secret.Opened(lie)} {
		if c.Kind != Edit || c.Target.ID != "A" || c.New == nil || c.New.Text != "@100000000000009 new" || len(c.Mentions) != 1 {
			t.Errorf("%s: got %+v", name, c)
			continue
		}
		a := c.Address(Us{Person: waid.NewPerson(types.NewJID("100000000000009", types.HiddenUserServer), types.JID{})}, "@Andy", nil)
		if got, want := c.Body(a.Text, ""), "@Andy new"; got != want || !a.Mentioned {
			t.Errorf("%s: got %q, %+v, want %q", name, got, a, want)
		}
	}
	if got := secret.Opened(nil); !cmp.Equal(got, secret, cmp.AllowUnexported(Content{})) {
		t.Errorf("opened without content: got %+v", got)
	}
}

func TestVotesAndReactions(t *testing.T) {
	poll := Read(&waE2E.Message{PollCreationMessage: &waE2E.PollCreationMessage{Name: new("Lunch?"), SelectableOptionsCount: new(uint32(1)), Options: []*waE2E.PollCreationMessage_Option{{OptionName: new("Pizza")}, {OptionName: new("Pasta\n")}}}})
	if poll.Poll == nil || poll.Poll.Several || len(poll.Poll.Options) != 2 {
		t.Fatalf("got %+v", poll)
	}
	vote := Read(&waE2E.Message{PollUpdateMessage: &waE2E.PollUpdateMessage{PollCreationMessageKey: keyOf("A")}})
	for want, got := range map[string]Content{
		"[voted in the poll “Lunch?”: Pasta]":       vote.Voted(poll.Poll, &waE2E.PollVoteMessage{SelectedOptions: whatsmeow.HashPollOptions([]string{"Pasta\n", "Beer"})}),
		"[took back the vote in the poll “Lunch?”]": vote.Voted(poll.Poll, nil),
		"[voted in a poll]":                         vote.Voted(nil, nil),
		"[reacted with ❤️]":                         Read(&waE2E.Message{EncReactionMessage: &waE2E.EncReactionMessage{TargetMessageKey: keyOf("A")}}).Reacted(&waE2E.ReactionMessage{Text: new("❤️")}),
	} {
		if line := got.Line(""); line != want || got.Target.ID != "A" {
			t.Errorf("got %q of %+v, want %q", line, got.Target, want)
		}
	}
}

func TestQuote(t *testing.T) {
	info := &waE2E.ContextInfo{
		StanzaID: new("Q1"), Participant: new("100000000000002:3@lid"), RemoteJID: new("120363012345678901@g.us"),
		QuotedMessage: &waE2E.Message{EphemeralMessage: wrapped(&waE2E.Message{ImageMessage: &waE2E.ImageMessage{Caption: new("Are you coming tonight? " + strings.Repeat("é", 2000)), ContextInfo: &waE2E.ContextInfo{StanzaID: new("Q0"), QuotedMessage: typed("deeper")}}})},
		MentionedJID:  []string{"100000000000009@lid", "100000000000009:4@lid", "rubbish", "4915112345678@c.us"}, IsForwarded: new(true), Expiration: new(uint32(86400)),
	}
	c := Read(&waE2E.Message{ExtendedTextMessage: &waE2E.ExtendedTextMessage{Text: new("yes"), ContextInfo: info}})
	if q := c.Quoted; q == nil || q.ID != "Q1" || q.Sender.String() != "100000000000002@lid" || q.Chat.User != "120363012345678901" ||
		!strings.HasPrefix(q.Text, "[photo]\nAre you coming tonight? é") || utf8.RuneCountInString(q.Text) != maxQuote {
		t.Errorf("got %+v", q)
	}
	if got, want := fmt.Sprint(c.Mentions), "[100000000000009@lid 4915112345678@s.whatsapp.net]"; got != want {
		t.Errorf("got mentions %s, want %s", got, want)
	}
	if !c.Forwarded || c.Expires != 24*time.Hour {
		t.Errorf("got %+v", c)
	}
	if c := Read(typed("x")); c.Quoted != nil {
		t.Errorf("quotes %+v", c.Quoted)
	}
}

// What a hostile phone can send stays small.
func TestHostileSizes(t *testing.T) {
	mentions := make([]string, 100_000)
	for i := range mentions {
		mentions[i] = fmt.Sprintf("%d@lid", i)
	}
	options := make([]*waE2E.PollCreationMessage_Option, 10_000)
	contacts := make([]*waE2E.ContactMessage, 10_000)
	for i := range options {
		options[i] = &waE2E.PollCreationMessage_Option{OptionName: new(strings.Repeat("o", 10_000))}
		contacts[i] = &waE2E.ContactMessage{DisplayName: new(strings.Repeat("c", 1000)), Vcard: new(strings.Repeat("TEL:"+strings.Repeat("1", 500)+"\n", 20))}
	}
	card := "BEGIN:VCARD\nFN:Bob\nPHOTO;ENCODING=b:" + strings.Repeat("A", 10<<20) + "\nTEL:+1\nEND:VCARD"
	for name, m := range map[string]*waE2E.Message{
		"65 536 characters":  typed(strings.Repeat("字", 65_536)),
		"a full text":        typed(strings.Repeat("a", berth.MaxText)),
		"10 MB of text":      typed(strings.Repeat("x", 10<<20)),
		"10 MB of nothing":   typed(strings.Repeat("\x00", 10<<20)),
		"broken UTF-8":       typed(strings.Repeat("\xff", 200_000)),
		"a vCard of 10 MB":   {ContactMessage: &waE2E.ContactMessage{Vcard: &card}},
		"10 000 contacts":    {ContactsArrayMessage: &waE2E.ContactsArrayMessage{Contacts: contacts}},
		"10 000 options":     {PollCreationMessage: &waE2E.PollCreationMessage{Options: options}},
		"100 000 mentions":   {ExtendedTextMessage: &waE2E.ExtendedTextMessage{Text: new("x"), ContextInfo: &waE2E.ContextInfo{MentionedJID: mentions}}},
		"a long file name":   {DocumentMessage: &waE2E.DocumentMessage{FileName: new(strings.Repeat("../", 1<<20)), Mimetype: new(strings.Repeat("a", 1<<20))}},
		"a long reaction":    {ReactionMessage: &waE2E.ReactionMessage{Text: new(strings.Repeat("👍", 1<<20))}},
		"a long description": {EventMessage: &waE2E.EventMessage{Name: new(strings.Repeat("n", 1<<20)), Description: new(strings.Repeat("d", 1<<20))}},
	} {
		c := Read(m)
		body := c.Body(c.Text, strings.Repeat("p", 10_000))
		if err := berth.ValidText(body); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if cut := strings.Contains(body, "too long]"); cut != (len(m.GetConversation()) > berth.MaxText || name == "a long description") {
			t.Errorf("%s: says that it was cut: %v", name, cut)
		}
		if len(c.Mentions) > MaxMentions || c.Poll != nil && len(c.Poll.Options) > maxOptions || c.Media != nil && len(c.Media.Name)+len(c.Media.MIME) > 4*maxField {
			t.Errorf("%s: kept too much", name)
		}
	}
	if c := Read(&waE2E.Message{ExtendedTextMessage: &waE2E.ExtendedTextMessage{Text: new("x"), ContextInfo: &waE2E.ContextInfo{MentionedJID: mentions}}}); len(c.Mentions) != MaxMentions {
		t.Errorf("%d mentions, want %d", len(c.Mentions), MaxMentions)
	}
	if got, want := describeCard("", card[:len(card)-len("\nTEL:+1\nEND:VCARD")]), "“Bob”"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A card of nothing but empty lines costs no more than any other.
func TestHostileCard(t *testing.T) {
	card := strings.Repeat("TEL:;\n", 1<<20/6)
	allocs := testing.AllocsPerRun(1, func() { describeCard("", card) })
	const most = 10_000
	if allocs > most {
		t.Errorf("%.0f allocations", allocs)
	}
	if got, want := describeCard("", strings.Repeat("NOTE:;\n", 10_000)+"TEL:+1\n"), "“”, +1"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestWA19SenderName(t *testing.T) {
	p := waid.NewPerson(types.NewJID("100000000000002", types.HiddenUserServer), types.NewJID("5551234", types.DefaultUserServer))
	for chosen, want := range map[string]string{
		"":                         "5551234",
		"-":                        "5551234",
		" \u200b\u3164\u200d ":     "5551234",
		"Alice":                    "Alice",
		"  Al\n\tice\u202e  B\x00": "Al ice B",
		"👩‍👧":                      "👩‍👧",
		"\xff":                     "5551234",
		strings.Repeat("ж", 1000):  strings.Repeat("ж", 63) + "…",
	} {
		if got := SenderName(chosen, p); got != want {
			t.Errorf("%q: got %q, want %q", chosen, got, want)
		}
	}
	p.PN = types.JID{}
	if got := SenderName("", p); got != "100000000000002" {
		t.Errorf("without a number: got %q", got)
	}
	if got := SenderName("", waid.Person{}); got != "" {
		t.Errorf("nobody: got %q", got)
	}
}

// FuzzRead reads anything that is a message on the wire.
func FuzzRead(f *testing.F) {
	for _, m := range []*waE2E.Message{
		typed("hello"), {EphemeralMessage: wrapped(typed("x"))},
		protocol(waE2E.ProtocolMessage_MESSAGE_EDIT, &waE2E.ProtocolMessage{Key: keyOf("A"), EditedMessage: typed("new")}),
		{ContactMessage: &waE2E.ContactMessage{Vcard: new("item1.TEL;x:+1\n")}}, {PollCreationMessage: &waE2E.PollCreationMessage{Options: []*waE2E.PollCreationMessage_Option{{OptionName: new("\xff")}}}},
		{ExtendedTextMessage: &waE2E.ExtendedTextMessage{Text: new("@1 \u2068x"), ContextInfo: &waE2E.ContextInfo{StanzaID: new("Q"), Participant: new("1@lid"), QuotedMessage: typed("q"), MentionedJID: []string{"1@lid"}}}},
		{LocationMessage: &waE2E.LocationMessage{DegreesLatitude: new(math.NaN())}}, {TemplateMessage: &waE2E.TemplateMessage{}}, {InteractiveMessage: &waE2E.InteractiveMessage{}},
		{DocumentMessage: &waE2E.DocumentMessage{FileName: new("../x\x00"), FileLength: new(uint64(math.MaxUint64))}}, {RichResponseMessage: &waE2E.AIRichResponseMessage{}},
		{CallLogMesssage: &waE2E.CallLogMessage{}}, {EventMessage: &waE2E.EventMessage{StartTime: new(int64(math.MinInt64))}}, {HighlyStructuredMessage: &waE2E.HighlyStructuredMessage{}},
	} {
		data, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	us := Us{Person: waid.NewPerson(types.NewJID("1", types.HiddenUserServer), types.NewJID("2", types.DefaultUserServer))}
	f.Fuzz(func(t *testing.T, data []byte) {
		var m waE2E.Message
		if proto.Unmarshal(data, &m) != nil {
			return
		}
		c := Read(&m)
		if again := Read(&m); c.Kind != again.Kind || c.Text != again.Text || c.Line("") != again.Line("") {
			t.Errorf("reads differently: %+v and %+v", c, again)
		}
		a := c.Address(us, "@Andy", func(types.JID) string { return "N\n@\u202e" })
		for _, all := range []Content{c, c.Opened(&m), c.Voted(&Question{}, nil), c.Reacted(m.GetReactionMessage())} {
			body := all.Body(a.Text, "media/x")
			if body != "" && berth.ValidText(body) != nil || !clean(body) {
				t.Errorf("%v in %q", berth.ValidText(body), body)
			}
			if line := all.Line(""); strings.Contains(line, "\n") || len(line) > 64_000 {
				t.Errorf("line of %d bytes: %q", len(line), line)
			}
			if (all.Kind == Edit) != (all.New != nil) || all.Kind == Edit && (all.Target.ID == "" && all.Target == c.Target && c.Kind == Edit || all.New.Kind == Edit) {
				t.Errorf("edit without content: %+v", all)
			}
		}
		if (c.Kind == None) != (c.Body(c.Text, "") == "" && c.Kind != Edit) {
			t.Errorf("%q says %q", c.Kind, c.Body(c.Text, ""))
		}
		if (c.Media != nil) != (c.Kind == Media) || c.Media != nil && c.Media.Source == nil {
			t.Errorf("media: %+v", c)
		}
		if c.Quoted != nil && (utf8.RuneCountInString(c.Quoted.Text) > maxQuote || !clean(a.Quote)) {
			t.Errorf("quote: %q", c.Quoted.Text)
		}
		if bytes.ContainsAny([]byte(c.Target.ID), " \n\x00") || len(c.Target.ID) > maxID {
			t.Errorf("id: %q", c.Target.ID)
		}
	})
}

func clean(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' })
}
