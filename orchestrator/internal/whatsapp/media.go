package whatsapp

import (
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
	mediaTimeout = 30 * time.Second // messages wait behind a download
	mediaFiles   = "media-*.part"   // of downloads under way, beside the session
)

var errTooLarge = errors.New("the file is larger than it may be")

// sweepMedia removes what downloads left behind when the process was killed.
func (c *Channel) sweepMedia() {
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(c.o.Path), mediaFiles))
	for _, name := range left {
		_ = os.Remove(name)
	}
}

// save downloads a medium and returns where it is for the agent, or why it is
// nowhere.
func (c *Channel) save(cli *whatsmeow.Client, chat string, info types.MessageInfo, f wamsg.File) string {
	if c.o.GroupDir == nil {
		return ""
	}
	dir, ok := c.o.GroupDir(chat)
	if !ok {
		return ""
	}
	if f.Size > uint64(c.o.MaxMedia) {
		return "not downloaded, it is too large"
	}
	ctx, cancel := context.WithTimeout(c.life, mediaTimeout)
	defer cancel()
	name, err := c.download(ctx, cli, dir, info, f)
	switch {
	case err == nil:
		return name
	case errors.Is(err, errTooLarge):
		return "not downloaded, it is too large"
	case errors.Is(err, whatsmeow.ErrMediaDownloadFailedWith403), errors.Is(err, whatsmeow.ErrMediaDownloadFailedWith404), errors.Is(err, whatsmeow.ErrMediaDownloadFailedWith410):
		return "not downloaded, WhatsApp has it no longer"
	}
	c.log.Warn("download a medium", zap.String("chat", chat), zap.String("id", info.ID), zap.Error(err))
	return "could not be downloaded"
}

// download fetches a file to where no container can reach it, and only then, when
// it is what its sender said, copies it to the group's folder. The names there
// may be traps that the container laid; os.Root does not fall into them.
func (c *Channel) download(ctx context.Context, cli *whatsmeow.Client, dir string, info types.MessageInfo, f wamsg.File) (name string, err error) {
	part, err := os.CreateTemp(filepath.Dir(c.o.Path), mediaFiles)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, part.Close(), os.Remove(part.Name())) }()
	if err := cli.DownloadToFile(ctx, f.Source, &limited{File: part, most: c.o.MaxMedia + 64}); err != nil {
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
	if err := root.Mkdir(wamsg.MediaDir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	name = filepath.Join(wamsg.MediaDir, wamsg.FileName(info.Timestamp, info.Sender, info.ID, f, head[:n]))
	to, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return name, nil // the message came before
	}
	if err != nil {
		return "", err
	}
	_, err = io.Copy(to, part)
	if err = errors.Join(err, to.Close()); err != nil {
		_ = root.Remove(name)
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
