package transcript

import (
	"bufio"
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/agent-runner/protocol"
)

const (
	folder   = ".berth/transcripts" // below the home folder
	suffix   = ".jsonl"
	maxLine  = 64 << 10 // bytes; an entry has 2000 characters
	maxFiles = 1000     // that are looked at
	maxEnded = 20       // that are archived at once; there is usually one
	maxTries = 40       // names for an archive; the later ones are random
)

// store is the folder of the sessions' transcripts, and the file of the one that
// goes on: a line an entry, the first of which may name the archive before it.
type store struct {
	root *os.Root
	name string // of the session, or of the run while that is not known
	file *os.File
}

type line struct {
	Previous string `json:"previous,omitempty"`
	entry
}

func openStore(home, session, run string) (*store, error) {
	in, err := os.OpenRoot(home)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	if err := in.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	root, err := in.OpenRoot(folder + "/.") // a pipe in its place would be waited for
	if err != nil {
		return nil, err
	}
	s := &store{root: root, name: run}
	if protocol.ValidSessionID(session) {
		s.name = session
	}
	return s, nil
}

func (s *store) close() {
	if s.file != nil {
		_ = s.file.Close()
		s.file = nil
	}
	_ = s.root.Close()
}

// load reads what a session has, at most the last maxFile bytes. Whatever is not
// ours counts as nothing.
func (s *store) load(name string) (entries []entry, previous string) {
	f, err := s.open(name+suffix, os.O_RDONLY)
	if err != nil {
		return nil, ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > maxFile {
		if _, err := f.Seek(-maxFile, io.SeekEnd); err != nil {
			return nil, ""
		}
	}
	return decode(f)
}

// decode reads lines. What a kill cut off, or is none of ours, is skipped; a line
// that is far too long ends it.
func decode(r io.Reader) (entries []entry, previous string) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		var l line
		if json.Unmarshal(lines.Bytes(), &l) != nil {
			continue
		}
		if l.Previous != "" {
			previous = oneLine(l.Previous, 2*maxTitle)
		}
		if l.Text != "" {
			entries = append(entries, l.entry)
		}
	}
	return entries, previous
}

// add appends a line. A kill of this process loses nothing of it.
func (s *store) add(l line) error {
	data, err := protocol.Marshal(l)
	if err != nil {
		return err
	}
	if s.file == nil {
		if s.file, err = s.open(s.name+suffix, os.O_WRONLY|os.O_CREATE|os.O_APPEND); err != nil {
			return err
		}
	}
	// The newline stands in front, so that a line that a kill cut off spoils no other.
	_, err = s.file.Write(append([]byte{'\n'}, data...))
	return err
}

// rename gives the session that goes on another name.
func (s *store) rename(name string) error {
	if name == s.name {
		return nil
	}
	old := s.name
	s.name = name
	if err := s.root.Rename(old+suffix, name+suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (s *store) remove(name string) {
	if name == s.name && s.file != nil {
		_ = s.file.Close()
		s.file = nil
	}
	_ = s.root.RemoveAll(name + suffix) // tools may have put a folder in its place
}

// others returns the sessions that do not go on, the one that was used last at the
// end. Of very many the oldest are forgotten.
func (s *store) others() []string {
	dir, err := s.root.Open(".")
	if err != nil {
		return nil
	}
	defer dir.Close()
	entries, _ := dir.ReadDir(maxFiles) // what there is will do
	type session struct {
		name string
		used time.Time
	}
	var all []session
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), suffix)
		if info, err := e.Info(); ok && err == nil && name != s.name {
			all = append(all, session{name, info.ModTime()})
		}
	}
	slices.SortFunc(all, func(a, b session) int { return cmp.Compare(a.used.UnixNano(), b.used.UnixNano()) })
	for over := len(all) - maxEnded; over > 0; over-- {
		s.remove(all[0].name)
		all = all[1:]
	}
	var names []string
	for _, one := range all {
		names = append(names, one.name)
	}
	return names
}

func (s *store) open(name string, flags int) (*os.File, error) {
	return openRegular(s.root, name, flags, 0o600)
}

// openRegular opens a regular file. Tools can put links and pipes in its place: the
// one is not followed, the other does not block.
func openRegular(root *os.Root, name string, flags int, mode fs.FileMode) (*os.File, error) {
	f, err := root.OpenFile(name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK, mode)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		_ = f.Close()
		return nil, errors.Join(err, fmt.Errorf("%s is not a regular file", name))
	}
	return f, nil
}

// write makes a file of the conversations folder, which nothing there is
// overwritten for, and returns its path in the group's folder.
func write(group, name string, data []byte) (path string, err error) {
	in, err := os.OpenRoot(group)
	if err != nil {
		return "", err
	}
	defer in.Close()
	if err := in.Mkdir(protocol.ConversationsDir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	if info, err := in.Lstat(protocol.ConversationsDir); err != nil || !info.IsDir() {
		return "", errors.Join(err, fmt.Errorf("%s is no folder, where conversations are kept: move it away", protocol.ConversationsDir))
	}
	dir, err := in.OpenRoot(protocol.ConversationsDir + "/.")
	if err != nil {
		return "", err
	}
	defer dir.Close()
	const beside = ".archive.tmp"
	if err := dir.RemoveAll(beside); err != nil {
		return "", err
	}
	defer func() { _ = dir.RemoveAll(beside) }()
	if err := create(dir, beside, data); err != nil {
		return "", err
	}
	for i := range maxTries {
		file := name
		switch {
		case i >= maxTries/2:
			file += "-" + strings.ToLower(rand.Text()[:8])
		case i > 0:
			file += "-" + strconv.Itoa(i+1)
		}
		file += ".md"
		err = dir.Link(beside, file) // unlike a rename it overwrites nothing
		if err != nil && !errors.Is(err, fs.ErrExist) {
			err = create(dir, file, data) // not every file system has links
		}
		if err == nil {
			return protocol.ConversationsDir + "/" + file, nil
		}
		if !errors.Is(err, fs.ErrExist) {
			break
		}
	}
	return "", err
}

// create makes a file that is not there, on the disk when it returns.
func create(dir *os.Root, name string, data []byte) error {
	f, err := openRegular(dir, name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		_ = dir.Remove(name) // half of it is no archive
	}
	return err
}
