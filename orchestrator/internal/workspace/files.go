package workspace

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// outboxDir holds the files that are on their way to a chat, each in a folder of
// its own: no container reaches them.
const outboxDir = "data/outbox"

// OutboxDir returns the folder in which the file lies that goes with the text of a
// key. It has the name that the group gave it.
func (t *Tree) OutboxDir(key string) string {
	sum := sha256.Sum256([]byte(key))
	return t.path(outboxDir, hex.EncodeToString(sum[:16]))
}

// DropFile removes the file that goes with the text of a key, if there is one.
func (t *Tree) DropFile(key string) error { return os.RemoveAll(t.OutboxDir(key)) }

// SweepFiles removes the files that go with none of the texts of these keys. No run
// may be under way.
func (t *Tree) SweepFiles(keys []string) error {
	keep := make(map[string]bool, len(keys))
	for _, key := range keys {
		keep[filepath.Base(t.OutboxDir(key))] = true
	}
	entries, err := os.ReadDir(t.path(outboxDir))
	errs := []error{err}
	for _, e := range entries {
		if !keep[e.Name()] {
			errs = append(errs, os.RemoveAll(t.path(outboxDir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// KeepFile copies a file of the group, as it is now, to where no container reaches
// it: to OutboxDir of a key, which is copied once. name is the path inside the container, or relative to
// the group's folder; file is the path below groups/. What its own container could
// not read, links, folders, empty files and those above berth.MaxFile are refused
// with berth.Invalid.
func (g *Group) KeepFile(name, key string) (file string, size int64, err error) {
	shown := fmt.Sprintf("%.200q", name)
	local := filepath.Clean(strings.TrimPrefix(name, protocol.GroupDir+"/"))
	base := filepath.Base(local)
	switch {
	case !filepath.IsLocal(local) || local == "." || strings.ContainsRune(local, 0):
		return "", 0, berth.Errorf(berth.Invalid, "%s cannot be sent: name a file below %s, such as chart.png", shown, protocol.GroupDir)
	case len(base) > 200 || !utf8.ValidString(base) || strings.ContainsFunc(base, func(r rune) bool { return !unicode.IsGraphic(r) }):
		return "", 0, berth.Errorf(berth.Invalid, "%s cannot be sent: rename it, its name may have 200 bytes and only characters that can be seen", shown)
	}
	file, dir := path.Join(g.folder, filepath.ToSlash(local)), g.tree.OutboxDir(key)
	if fi, err := os.Lstat(filepath.Join(dir, base)); err == nil {
		return file, fi.Size(), nil // it was asked for before: the store did not take it then
	}
	from, err := g.openOwn(local)
	if err != nil {
		if _, known := errors.AsType[*berth.Error](err); !known {
			err = berth.Errorf(berth.Invalid, "%s cannot be sent: %w", shown, unwrapPath(err))
		}
		return "", 0, err
	}
	defer from.Close()
	defer func() {
		if err != nil {
			_ = os.RemoveAll(dir) // or the next start does
		}
	}()
	size, err = keep(from, dir, base)
	switch {
	case err != nil:
		return "", 0, berth.Errorf(berth.Internal, "%s could not be copied: %w: try again later, or tell the operator", shown, unwrapPath(err))
	case size == 0:
		return "", 0, berth.Errorf(berth.Invalid, "%s cannot be sent: it is empty", shown)
	case size > berth.MaxFile:
		return "", 0, berth.Errorf(berth.Invalid, "%s cannot be sent: it has more than %d MiB", shown, berth.MaxFile>>20)
	}
	return file, size, nil
}

// keep copies what is left of a file to dir, and a byte more than may be sent at
// most.
func keep(from io.Reader, dir, name string) (size int64, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return 0, err
	}
	to, err := os.CreateTemp(filepath.Dir(dir), ".part-*") // swept, if we are killed
	if err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(to.Name())
		}
	}()
	size, err = io.Copy(to, io.LimitReader(from, berth.MaxFile+1))
	if err == nil {
		err = to.Sync()
	}
	if err = errors.Join(err, to.Close()); err != nil {
		return size, err
	}
	return size, os.Rename(to.Name(), filepath.Join(dir, name))
}

// DropFile removes what KeepFile kept, if there is something.
func (g *Group) DropFile(key string) error { return g.tree.DropFile(key) }

var (
	errNone    = errors.New("there is no such file")
	errLink    = errors.New("it is a link, or lies behind one; copy the file itself")
	errClosed  = errors.New("you may not read it yourself")
	errChanged = errors.New("it was exchanged just now: try again")
)

// openOwn opens a file of the group's folder that its own container could read: a
// link would lead elsewhere, and this user may read more. Each folder on the way is
// opened from the one above it, so that nothing can be exchanged behind us.
func (g *Group) openOwn(name string) (*os.File, error) {
	dir, err := os.OpenRoot(g.tree.path("groups", g.folder))
	if err != nil {
		return nil, err
	}
	defer func() { dir.Close() }()
	parts := strings.Split(name, string(filepath.Separator))
	for _, part := range parts[:len(parts)-1] {
		next, err := g.enter(dir, part)
		if err != nil {
			return nil, err
		}
		dir.Close()
		dir = next
	}
	last := parts[len(parts)-1]
	f, info, err := openPlain(dir, last)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errNone
	case errors.Is(err, ErrNotRegular):
		if fi, err := dir.Lstat(last); err == nil && fi.Mode()&fs.ModeSymlink != 0 {
			return nil, errLink
		}
		return nil, err
	case err != nil:
		return nil, err
	case !g.tree.allows(info, 0o4):
		f.Close()
		return nil, errClosed
	}
	return f, nil
}

// enter opens a folder.
func (g *Group) enter(dir *os.Root, name string) (*os.Root, error) {
	before, err := dir.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && before.Mode().IsRegular():
		return nil, errNone
	case err != nil:
		return nil, err
	case before.Mode()&fs.ModeSymlink != 0:
		return nil, errLink
	case !before.IsDir():
		return nil, errNone
	}
	next, err := openFolder(dir, name)
	if err != nil {
		return nil, err
	}
	after, err := next.Lstat(".")
	switch {
	case err != nil:
	case !os.SameFile(before, after):
		err = errChanged
	case !g.tree.allows(after, 0o1):
		err = errClosed
	default:
		return next, nil
	}
	return nil, errors.Join(err, next.Close())
}

// allows reports whether the rights of a file, bits as for the others, hold for the
// containers' user.
func (t *Tree) allows(fi fs.FileInfo, bits fs.FileMode) bool {
	switch stat := fi.Sys().(*syscall.Stat_t); {
	case int(stat.Uid) == t.uid:
		bits <<= 6
	case int(stat.Gid) == t.gid:
		bits <<= 3
	}
	return fi.Mode().Perm()&bits == bits
}
