package whatsapp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	_ "image/jpeg" // for the size of pictures
	_ "image/png"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/proto/waE2E"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waformat"
	"berth/orchestrator/internal/whatsapp/wamsg"
)

// maxShown is the largest picture that is sent as one, in bytes: larger ones go
// as documents, as from a phone.
const maxShown = 16 << 20

// SendFile sends a file of a group's folder dir under the MessageID of o, with its
// text as the caption. name is relative to dir, and no part of it may be a link.
// It fails with berth.Invalid for what is no file that can be sent, and otherwise
// as Send does.
func (c *Channel) SendFile(ctx context.Context, o berth.Outgoing, dir, name string) error {
	to, err := c.address(o)
	if err != nil {
		return err
	}
	f, size, err := openFile(dir, name, c.o.MaxMedia)
	if err != nil {
		return err
	}
	defer f.Close()
	head := make([]byte, wamsg.SniffLen)
	n, err := io.ReadFull(f, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("read %s: %w", name, err)
	}
	kind, mime, called := wamsg.Sending(name, head[:n])
	info := c.contextFor(ctx, to, o)
	caption := waformat.WhatsApp(o.Text)
	switch {
	case caption == "" && c.us != "": // it says whose file it is
		caption = c.us + called
	case caption != "":
		caption = c.mention(to, c.us+caption, info)
	}
	if kind == wamsg.Photo && size > maxShown || (kind == wamsg.Audio || kind == wamsg.VoiceNote) && strings.TrimSpace(o.Text) != "" { // which have no caption
		kind = wamsg.Document
	}
	part, err := os.CreateTemp(filepath.Dir(c.o.Path), mediaFiles)
	if err != nil {
		return fmt.Errorf("encrypt %s: %w", name, err)
	}
	defer func() { _ = errors.Join(part.Close(), os.Remove(part.Name())) }()
	cli := c.current()
	plain := io.LimitReader(io.MultiReader(bytes.NewReader(head[:n]), f), c.o.MaxMedia) // it may grow meanwhile
	up, err := cli.UploadReader(ctx, plain, part, mediaTypes[kind])
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		if u, ok := errors.AsType[*url.Error](err); ok { // the address holds a token
			err = fmt.Errorf("%s: %w", u.Op, u.Err)
		}
		return c.explain(cli, fmt.Errorf("upload %s: %w", name, err))
	}
	m := &waE2E.Message{}
	switch kind {
	case wamsg.Photo:
		i := &waE2E.ImageMessage{
			URL: &up.URL, DirectPath: &up.DirectPath, MediaKey: up.MediaKey, FileSHA256: up.FileSHA256, FileEncSHA256: up.FileEncSHA256, FileLength: &up.FileLength,
			Mimetype: &mime, Caption: optional(caption), ContextInfo: info,
		}
		if picture, _, err := image.DecodeConfig(bytes.NewReader(head[:n])); err == nil {
			width, height := uint32(picture.Width), uint32(picture.Height)
			i.Width, i.Height = &width, &height
		}
		m.ImageMessage = i
	case wamsg.Video:
		m.VideoMessage = &waE2E.VideoMessage{
			URL: &up.URL, DirectPath: &up.DirectPath, MediaKey: up.MediaKey, FileSHA256: up.FileSHA256, FileEncSHA256: up.FileEncSHA256, FileLength: &up.FileLength,
			Mimetype: &mime, Caption: optional(caption), ContextInfo: info,
		}
	case wamsg.Audio, wamsg.VoiceNote:
		m.AudioMessage = &waE2E.AudioMessage{
			URL: &up.URL, DirectPath: &up.DirectPath, MediaKey: up.MediaKey, FileSHA256: up.FileSHA256, FileEncSHA256: up.FileEncSHA256, FileLength: &up.FileLength,
			Mimetype: &mime, PTT: new(kind == wamsg.VoiceNote), ContextInfo: info,
		}
	default:
		d := &waE2E.DocumentMessage{
			URL: &up.URL, DirectPath: &up.DirectPath, MediaKey: up.MediaKey, FileSHA256: up.FileSHA256, FileEncSHA256: up.FileEncSHA256, FileLength: &up.FileLength,
			Mimetype: &mime, FileName: &called, Title: &called, Caption: optional(caption), ContextInfo: info,
		}
		m.DocumentMessage = d
		if caption != "" { // older phones show none without the wrapper
			m = &waE2E.Message{DocumentWithCaptionMessage: &waE2E.FutureProofMessage{Message: m}}
		}
	}
	return c.send(ctx, to, o, m)
}

var mediaTypes = map[wamsg.FileKind]whatsmeow.MediaType{
	wamsg.Photo: whatsmeow.MediaImage, wamsg.Video: whatsmeow.MediaVideo,
	wamsg.Audio: whatsmeow.MediaAudio, wamsg.VoiceNote: whatsmeow.MediaAudio, wamsg.Document: whatsmeow.MediaDocument,
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// openFile opens a file that a container may have exchanged for anything.
func openFile(dir, name string, most int64) (f *os.File, size int64, err error) {
	shown := fmt.Sprintf("%.200q", name)
	if !filepath.IsLocal(name) || strings.ContainsRune(name, 0) {
		return nil, 0, berth.Errorf(berth.Invalid, "%s cannot be sent: name a file in the group's folder, such as media/chart.png", shown)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, 0, fmt.Errorf("open the group's folder: %w", err)
	}
	defer root.Close()
	name = filepath.Clean(name)
	for i := range len(name) + 1 {
		if i < len(name) && name[i] != filepath.Separator {
			continue
		}
		switch part, err := root.Lstat(name[:i]); {
		case errors.Is(err, fs.ErrNotExist):
			return nil, 0, berth.Errorf(berth.Invalid, "%s cannot be sent: there is no such file in the group's folder", shown)
		case err != nil:
			return nil, 0, berth.Errorf(berth.Invalid, "%s cannot be sent: %w", shown, err)
		case part.Mode()&fs.ModeSymlink != 0:
			return nil, 0, berth.Errorf(berth.Invalid, "%s cannot be sent: it is a link, or lies behind one; copy the file itself", shown)
		}
	}
	f, err = root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, 0, berth.Errorf(berth.Invalid, "%s cannot be sent: %w", shown, err)
	}
	info, err := f.Stat()
	switch {
	case err != nil:
		err = fmt.Errorf("look at %s: %w", shown, err)
	case !info.Mode().IsRegular():
		err = berth.Errorf(berth.Invalid, "%s cannot be sent: it is no file", shown)
	case info.Size() == 0:
		err = berth.Errorf(berth.Invalid, "%s cannot be sent: it is empty", shown)
	case info.Size() > most:
		err = berth.Errorf(berth.Invalid, "%s cannot be sent: it has %d bytes and may have %d", shown, info.Size(), most)
	default:
		return f, info.Size(), nil
	}
	return nil, 0, errors.Join(err, f.Close())
}
