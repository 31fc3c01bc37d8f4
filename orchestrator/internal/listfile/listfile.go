// Package listfile reads and edits the small JSON files in which an operator
// writes down what is allowed. Such a file opens doors, so it is read strictly:
// whoever else could write it, or a second reading that it admits, is a fault,
// and a fault says where it is and what would be right.
//
// The functions keep nothing and are safe for concurrent use.
package listfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unicode"

	"github.com/tailscale/hujson"
)

// MaxSize is the largest file that is read, in bytes.
const MaxSize = 1 << 20

// Read returns what file holds. The error is an fs.ErrNotExist only if nothing
// of that name is there; it does not name the file. Refused are: what is no
// regular file, or larger than MaxSize, or does not belong to this process's
// user or root, or can be written by its group or by others. A link is followed:
// what it leads to has to satisfy the same.
func Read(file string) ([]byte, error) {
	// Without O_NONBLOCK a pipe in this place would hang the daemon.
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		if _, linkErr := os.Lstat(file); linkErr == nil {
			return nil, errors.New("it is a link that leads nowhere: mend it, or remove it")
		}
	}
	if err != nil {
		if e, ok := errors.AsType[*os.PathError](err); ok {
			err = e.Err // still an fs.ErrNotExist where it was one
		}
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	if err := trusted(info); err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxSize+1))
	if err == nil && len(data) > MaxSize {
		err = errors.New("larger than 1 MiB: it should hold a short list")
	}
	return data, err
}

// trusted refuses a file that somebody else can write: who can write the list
// opens doors with this user's rights, so it is ssh's rule for its files.
func trusted(info os.FileInfo) error {
	if mode := info.Mode().Perm(); mode&0o022 != 0 {
		return fmt.Errorf("others than its owner can write it (mode %04o): chmod 600 it", mode)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("its owner is not known")
	}
	if uid := int(stat.Uid); uid != 0 && uid != os.Geteuid() {
		return fmt.Errorf("it belongs to user %d, who is neither root nor this one (%d): chown it", uid, os.Geteuid())
	}
	return nil
}

// Decode reads one JSON object into the struct that into points to. A name that
// stands twice in an object is a fault, also in other case: the second would win
// in silence. Names that known does not have are returned, each with its line: known
// says for an object, named by the names that lead to it ("" the outermost, "a/*"
// a member or an element of a), which names it may have; an object that known does
// not list may have any.
func Decode(data []byte, into any, known map[string][]string) (unknown []string, err error) {
	if len(bytes.TrimSpace(data)) == 0 {
		return nil, errors.New("not usable JSON: the file is empty")
	}
	// First, since it bounds how deep the file nests.
	if err := json.Unmarshal(data, into); err != nil {
		return nil, explain(data, err)
	}
	value, err := hujson.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("not usable JSON: %w", err)
	}
	w := walker{data: data, known: known}
	w.walk(&value, "")
	return w.unknown, w.err
}

func explain(data []byte, err error) error {
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Errorf("not usable JSON: line %d: %w", lineAt(data, int(e.Offset)), err)
	}
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		where := "the whole"
		if e.Field != "" {
			where = fmt.Sprintf("%q", e.Field)
		}
		return fmt.Errorf("not usable JSON: line %d: %s is a %s: %s would be right", lineAt(data, int(e.Offset)), where, e.Value, article(e.Type.Kind().String()))
	}
	return fmt.Errorf("not usable JSON: %w", err)
}

func article(kind string) string {
	switch kind {
	case "slice":
		return "a list"
	case "struct", "map":
		return "an object"
	case "bool":
		return "true or false"
	default:
		return "a " + kind
	}
}

func lineAt(data []byte, offset int) int {
	return 1 + bytes.Count(data[:min(max(offset, 0), len(data))], []byte("\n"))
}

type walker struct {
	data    []byte
	known   map[string][]string
	unknown []string
	err     error // the first
}

func (w *walker) walk(v *hujson.Value, at string) {
	inner := strings.TrimPrefix(at+"/*", "/")
	switch t := v.Value.(type) {
	case *hujson.Object:
		names, closed := w.known[at]
		seen := make(map[string]bool, len(t.Members))
		for i := range t.Members {
			m := &t.Members[i]
			name := m.Name.Value.(hujson.Literal).String()
			line := lineAt(w.data, m.Name.StartOffset)
			fold := Fold(name)
			if seen[fold] && w.err == nil {
				w.err = fmt.Errorf("not usable JSON: line %d: %.80q stands there twice", line, name)
			}
			seen[fold] = true
			at, isKnown := inner, false
			for _, k := range names {
				if strings.EqualFold(k, name) {
					isKnown, at = true, strings.TrimPrefix(at[:len(at)-1]+k, "/")
				}
			}
			if closed && !isKnown {
				w.unknown = append(w.unknown, fmt.Sprintf("line %d: %.80q means nothing here", line, name))
				continue
			}
			w.walk(&m.Value, at)
		}
	case *hujson.Array:
		for i := range t.Elements {
			w.walk(&t.Elements[i], inner)
		}
	}
}

// Fold returns the same text for all spellings that differ in case only: each
// rune becomes the smallest that it equals in some case, which also joins the
// odd ones, such as the Kelvin sign with k.
func Fold(s string) string {
	return strings.Map(func(r rune) rune {
		least := r
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			least = min(least, f)
		}
		return least
	}, s)
}

// Patch returns data with a JSON patch (RFC 6902) applied. Everything else keeps
// its order and its unknown names; spacing becomes uniform.
func Patch(data, patch []byte) ([]byte, error) {
	v, err := hujson.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("not usable JSON: %w", err)
	}
	if err := v.Patch(patch); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, v.Pack(), "", "  "); err != nil {
		return nil, err
	}
	return append(bytes.TrimSpace(out.Bytes()), '\n'), nil
}

// Edit gives what file holds to change, nil if it is not there, and puts what comes
// back in its place, for its owner alone: written beside, synced, renamed. Nothing
// is written if the file cannot be read as Read does, or change fails. A link
// stays, and what it leads to is replaced. The folder is made if need be. Of
// several editors one waits for the other.
func Edit(file string, change func(data []byte) ([]byte, error)) error {
	if real, err := filepath.EvalSymlinks(file); err == nil {
		file = real
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	defer dir.Close() // gives the lock back
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", dir.Name(), err)
	}
	data, err := Read(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if data, err = change(data); err != nil {
		return err
	}
	return replace(dir, file, data)
}

// Write puts data in the place of file, as Edit does, whatever is there.
func Write(file string, data []byte) error {
	dir, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	defer dir.Close()
	return replace(dir, file, data)
}

func replace(dir *os.File, file string, data []byte) error {
	f, err := os.CreateTemp(dir.Name(), ".berth-*") // made 0600
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return dir.Sync()
}
