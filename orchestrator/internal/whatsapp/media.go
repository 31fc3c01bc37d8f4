package whatsapp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/types"
	"go.uber.org/zap"

	"berth/orchestrator/internal/whatsapp/wamsg"
)

const (
	mediaTimeout = 10 * time.Minute // of a download that the connection outlives
	mediaFiles   = "media-*.part"   // of transfers under way, beside the session
	maxMediaPath = 4096             // bytes, with the keys and the message's id
)

var errTooLarge = errors.New("the file is larger than it may be")

// sweepMedia removes what transfers left behind when the process was killed.
func (c *Channel) sweepMedia() {
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(c.o.Path), mediaFiles))
	for _, name := range left {
		_ = os.Remove(name)
	}
}

// medium is a file to download, and the text of its message, which says where it
// is. It is a whatsmeow.DownloadableMessage.
type medium struct {
	Kind     wamsg.FileKind      `json:"kind"`
	Name     string              `json:"name,omitempty"`
	Size     uint64              `json:"size,omitempty"`
	Length   time.Duration       `json:"length,omitempty"`
	ViewOnce bool                `json:"viewOnce,omitempty"`
	Path     string              `json:"path"`
	Key      []byte              `json:"key"`
	Sum      []byte              `json:"sum"`
	Sealed   []byte              `json:"sealed"` // the encrypted file's sum
	Type     whatsmeow.MediaType `json:"type"`

	// Whose message it is, for the file's name.
	ID     string    `json:"id"`
	Sender types.JID `json:"sender"`
	At     time.Time `json:"at"`

	Words words `json:"words"`
}

func (d *medium) GetDirectPath() string             { return d.Path }
func (d *medium) GetMediaKey() []byte               { return d.Key }
func (d *medium) GetFileSHA256() []byte             { return d.Sum }
func (d *medium) GetFileEncSHA256() []byte          { return d.Sealed }
func (d *medium) GetMediaType() whatsmeow.MediaType { return d.Type }

func (d *medium) file() wamsg.File {
	return wamsg.File{Kind: d.Kind, Name: d.Name, Size: d.Size, Length: d.Length, Source: d}
}

// text returns what the message says. saved is where the file is, or why it is
// nowhere.
func (d *medium) text(saved string) string {
	f := d.file()
	return d.Words.around(wamsg.Content{Kind: wamsg.Media, Media: &f, ViewOnce: d.ViewOnce}.Body(d.Words.Typed, saved))
}

// pending is said of a file that is not there yet. An agent that is told so finds
// it under this name when it looks later.
func (d *medium) pending() string {
	return "is being downloaded, will be " + wamsg.MediaDir + "/" + wamsg.FilePrefix(d.At, d.Sender, d.ID) + "*"
}

// words are the parts of a message's text that do not depend on its medium.
type words struct {
	Before string `json:"before,omitempty"`
	Typed  string `json:"typed,omitempty"`
	After  string `json:"after,omitempty"`
}

func (w words) around(body string) string {
	if body == "" {
		return ""
	}
	return w.Before + body + w.After
}

// medium returns what a message's file is downloaded by. There is none if it
// will not be downloaded; why then says why not.
func (c *Channel) medium(chat string, info types.MessageInfo, said wamsg.Content) (d *medium, why string) {
	if c.o.GroupDir == nil {
		return nil, ""
	}
	if _, ok := c.o.GroupDir(chat); !ok {
		return nil, ""
	}
	f := said.Media
	if f.Size > uint64(c.o.MaxMedia) {
		return nil, "not downloaded, it is too large"
	}
	d = &medium{
		Kind: f.Kind, Name: f.Name, Size: f.Size, Length: f.Length, ViewOnce: said.ViewOnce,
		Path: f.Source.GetDirectPath(), Key: f.Source.GetMediaKey(), Sum: f.Source.GetFileSHA256(), Sealed: f.Source.GetFileEncSHA256(), Type: whatsmeow.GetMediaType(f.Source),
		ID: info.ID, Sender: info.Sender, At: info.Timestamp,
	}
	if d.Type == "" || d.Path == "" || len(d.Path)+len(d.Key)+len(d.Sum)+len(d.Sealed)+len(d.ID) > maxMediaPath {
		return nil, "could not be downloaded"
	}
	return d, ""
}

// sameMedium returns what an edited message's file is downloaded by. Who edits a
// caption often sends no file with it, or the same again.
func (c *Channel) sameMedium(place string, said wamsg.Content, file *medium, why string) (*medium, string) {
	c.mu.Lock()
	before, ok := c.media.by[place]
	c.mu.Unlock()
	switch bare := said.Media.Source.GetDirectPath() == ""; {
	case ok && (bare || bytes.Equal(before.Sum, said.Media.Source.GetFileSHA256())):
		return &before, ""
	case bare:
		return nil, ""
	}
	return file, why
}

// save downloads a medium and returns where it is for the agent, or why it is
// nowhere. It fails if it could not be told: there was no connection, or ctx ended.
func (c *Channel) save(ctx context.Context, chat string, d *medium) (saved string, err error) {
	if c.o.GroupDir == nil { // not as when the message came
		return "could not be downloaded", nil
	}
	dir, ok := c.o.GroupDir(chat)
	if !ok {
		return "", nil
	}
	cli := c.current()
	within, cancel := context.WithTimeout(ctx, mediaTimeout)
	defer cancel()
	name, err := c.download(within, cli, dir, d)
	switch {
	case err == nil:
		return name, nil
	case ctx.Err() != nil:
		return "", ctx.Err()
	case errors.Is(err, errTooLarge):
		return "not downloaded, it is too large", nil
	case errors.Is(err, whatsmeow.ErrMediaDownloadFailedWith403), errors.Is(err, whatsmeow.ErrMediaDownloadFailedWith404), errors.Is(err, whatsmeow.ErrMediaDownloadFailedWith410):
		return "not downloaded, WhatsApp has it no longer", nil
	case c.current() != cli || !online(c.State()) || !cli.IsConnected():
		return "", err
	}
	c.log.Warn("download a medium", zap.String("chat", chat), zap.String("id", d.ID), zap.Error(err))
	return "could not be downloaded", nil
}

// download fetches a file to where no container can reach it, and only then, when
// it is what its sender said, copies it to the group's folder. The names there
// may be traps that the container laid; os.Root does not fall into them.
func (c *Channel) download(ctx context.Context, cli *whatsmeow.Client, dir string, d *medium) (name string, err error) {
	part, err := os.CreateTemp(filepath.Dir(c.o.Path), mediaFiles)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, part.Close(), os.Remove(part.Name())) }()
	if err := cli.DownloadToFile(ctx, d, &limited{File: part, most: c.o.MaxMedia + 64}); err != nil {
		return "", err
	}
	head := make([]byte, wamsg.SniffLen)
	n, err := part.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return "", err
	}
	if _, err := part.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", err
	}
	defer root.Close()
	switch err := root.Mkdir(wamsg.MediaDir, 0o755); {
	case err == nil && os.Geteuid() == 0:
		if err := root.Lchown(wamsg.MediaDir, c.o.UID, c.o.GID); err != nil {
			return "", err
		}
	case err != nil && !errors.Is(err, fs.ErrExist):
		return "", err
	}
	name = filepath.Join(wamsg.MediaDir, wamsg.FileName(d.At, d.Sender, d.ID, d.file(), head[:n]))
	if _, err := root.Lstat(name); err == nil {
		return name, nil // the message came before
	}
	// Whoever finds the file finds all of it, also after a crash.
	half := filepath.Join(wamsg.MediaDir, "."+wamsg.FilePrefix(d.At, d.Sender, d.ID)+"part")
	_ = root.Remove(half)
	to, err := root.OpenFile(half, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return "", err
	}
	_, err = io.Copy(to, part)
	if err == nil && os.Geteuid() == 0 {
		err = to.Chown(c.o.UID, c.o.GID)
	}
	if err = errors.Join(err, to.Sync(), to.Close()); err == nil {
		err = root.Rename(half, name)
	}
	if err != nil {
		_ = root.Remove(half)
		return "", fmt.Errorf("write %s: %w", name, err)
	}
	return name, nil
}

// limited is a file that does not grow beyond what it may.
type limited struct {
	*os.File
	at, most int64
}

func (l *limited) Write(p []byte) (int, error) {
	if l.at+int64(len(p)) > l.most {
		return 0, errTooLarge
	}
	n, err := l.File.Write(p)
	l.at += int64(n)
	return n, err
}

// ReadFrom hides the file's own, which would not count.
func (l *limited) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{l}, r)
}

func (l *limited) Seek(offset int64, whence int) (int64, error) {
	at, err := l.File.Seek(offset, whence)
	l.at = at
	return at, err
}
