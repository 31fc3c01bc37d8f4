package ipc

import (
	"context"
	"path"
	"strings"
	"time"
	"unicode"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/turn"
)

// fileResult answers send_file.
type fileResult struct {
	File  string `json:"file"`  // its name, as the chat sees it
	Bytes int64  `json:"bytes"` // that will be sent
}

// sendFile queues a file of the group with a caption. What is sent is the file as
// it is now, whatever becomes of it.
func (b *inbox) sendFile(ctx context.Context, r *request) (any, error) {
	chat, err := b.targetChat(r)
	if err != nil {
		return nil, err
	}
	caption := turn.Split(turn.Visible(r.get("caption")))
	if len(caption) > 1 {
		return nil, berth.Errorf(berth.Invalid, "the caption is too long for one message: give its beginning, and send the rest by itself")
	}
	// After a crash the same request comes again, and the file may be gone since.
	if o, known, err := b.Store.Outgoing(ctx, r.key); known || err != nil {
		return fileResult{path.Base(o.File), o.FileSize}, err
	}
	file, size, err := b.files.KeepFile(r.get("path"), r.key)
	if err != nil {
		return nil, err
	}
	err = b.Store.AddOutgoing(ctx, berth.Outgoing{
		ChatJID: chat, Key: r.key, Kind: berth.OutMessage, Text: strings.Join(caption, ""), File: file, FileSize: size,
		MessageID: berth.NewID(10), CreatedAt: time.Now(), OwnTurn: chat == b.group.JID,
	})
	if final(err) {
		if err := b.files.DropFile(r.key); err != nil {
			b.log.Warn("remove a file that is not sent", zap.Error(err))
		}
	}
	return fileResult{path.Base(file), size}, err
}

// react queues a reaction to a message of a chat.
func (b *inbox) react(ctx context.Context, r *request) (any, error) {
	chat, err := b.targetChat(r)
	if err != nil {
		return nil, err
	}
	seq, err := r.number("messageId")
	if err != nil {
		return nil, err
	}
	emoji := strings.TrimSpace(r.get("emoji"))
	if !isEmoji(emoji) {
		return nil, berth.Errorf(berth.Invalid, "%.40q is not one emoji", emoji)
	}
	found, err := b.Store.MessagesAfter(ctx, chat, seq-1, 1)
	if err != nil {
		return nil, err
	}
	if seq == 0 || len(found) == 0 || found[0].Seq != seq {
		return nil, berth.Errorf(berth.NotFound, "this chat has no message with the id %d: give the id that stands in <message id=…>", seq)
	}
	// No OwnTurn: who only reacted, and failed then, has not answered.
	return nil, b.Store.AddOutgoing(ctx, berth.Outgoing{
		ChatJID: chat, Key: r.key, Kind: berth.OutReaction, Text: emoji, ReactsTo: seq, MessageID: berth.NewID(10), CreatedAt: time.Now(),
	})
}

// isEmoji reports whether a text can be one emoji: some take many characters, none
// has a letter or a blank.
func isEmoji(text string) bool {
	const most = 64 // bytes; two people of different skin who kiss take 35
	symbol := false
	for _, r := range text {
		switch {
		case unicode.IsLetter(r), unicode.IsSpace(r), unicode.IsControl(r), r == unicode.ReplacementChar:
			return false
		case unicode.In(r, unicode.So, unicode.Sm) && r > unicode.MaxASCII, strings.ContainsRune("‼⁉〰\u20e3", r): // the last one is a keycap
			symbol = true
		}
	}
	return symbol && len(text) <= most
}
