package builtin

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

// The size of a session's file, in bytes: over maxFile it is rewritten with its
// last keepTurns turns when it is resumed.
const (
	maxFile   = 1 << 20
	maxLine   = 64 << 10
	keepTurns = 100
)

// record is one turn in a session's file.
type record struct {
	Turn   int    `json:"turn"`   // 1, 2, … in the session
	Seen   int    `json:"seen"`   // messages in the session so far
	From   string `json:"from"`   // who wrote in this turn
	Text   string `json:"text"`   // the last message, shortened
	Answer string `json:"answer"` // shortened
}

// session is what the engine remembers, in <id>.jsonl.
type session struct {
	id    string
	path  string
	turns []record // the last ones, oldest first
}

func (s *session) last() record {
	if len(s.turns) == 0 {
		return record{}
	}
	return s.turns[len(s.turns)-1]
}

// newSession makes a session whose file is written with its first turn.
func newSession(dir string) (*session, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the sessions' folder: %w", err)
	}
	const letters = "abcdefghijklmnopqrstuvwxyz012345" // 32, so that every byte is fair
	raw := make([]byte, 16)
	_, _ = rand.Read(raw) // never fails
	for i, b := range raw {
		raw[i] = letters[b%32]
	}
	id := string(raw)
	return &session{id: id, path: file(dir, id)}, nil
}

// resume reads a session. One that is not there is a stale session.
func resume(dir, id string) (*session, error) {
	stale := &engine.Error{Class: protocol.ClassStaleSession, Text: fmt.Sprintf("session %.128q not found", id)}
	if !protocol.ValidSessionID(id) || id == "." || id == ".." {
		return nil, stale
	}
	stale.Text = "session " + id + " not found"
	s := &session{id: id, path: file(dir, id)}
	f, err := open(s.path, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, stale
	}
	if err != nil {
		return nil, fmt.Errorf("open session %s: %w", id, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open session %s: %w", id, err)
	}
	// A file that something else blew up is not worth more than its end.
	if _, err := f.Seek(max(0, info.Size()-2*maxFile), io.SeekStart); err != nil {
		return nil, fmt.Errorf("read session %s: %w", id, err)
	}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		var r record
		if json.Unmarshal(lines.Bytes(), &r) == nil && r.Turn > 0 { // a line cut off by a crash is skipped
			s.turns = append(s.turns, r)
		}
	}
	if err := lines.Err(); err != nil && !errors.Is(err, bufio.ErrTooLong) {
		return nil, fmt.Errorf("read session %s: %w", id, err)
	}
	s.forget()
	if info.Size() > maxFile {
		if err := s.rewrite(); err != nil {
			return nil, fmt.Errorf("shorten session %s: %w", id, err)
		}
	}
	return s, nil
}

// add appends a turn to the session and its file.
func (s *session) add(r record) error {
	s.turns = append(s.turns, r)
	s.forget()
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := open(s.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND)
	if err != nil {
		return fmt.Errorf("keep the turn: %w", err)
	}
	// The newline stands in front, so that a line that a crash cut off spoils no other.
	_, err = f.Write(append([]byte{'\n'}, line...))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("keep the turn: %w", err)
	}
	return nil
}

func (s *session) forget() {
	if over := len(s.turns) - keepTurns; over > 0 {
		s.turns = append(s.turns[:0], s.turns[over:]...)
	}
}

// keep forgets all but the last n turns.
func (s *session) keep(n int) error {
	all := s.turns
	s.turns = slices.Clone(all[len(all)-n:])
	if err := s.rewrite(); err != nil {
		s.turns = all
		return fmt.Errorf("shorten session %s: %w", s.id, err)
	}
	return nil
}

func (s *session) rewrite() error {
	var data bytes.Buffer
	for _, r := range s.turns {
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		data.WriteByte('\n')
		data.Write(line)
	}
	beside := s.path + ".tmp"
	_ = os.Remove(beside)
	f, err := open(beside, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	_, err = f.Write(data.Bytes())
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(beside, s.path)
}

// file returns the path of a session; id is one of ours or was checked.
func file(dir, id string) string { return filepath.Join(dir, id+".jsonl") }

// open opens a regular file. Commands in the container can put links and pipes
// in its place: the one is not followed, the other does not block.
func open(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		_ = f.Close()
		return nil, errors.Join(err, fmt.Errorf("%s is not a regular file", path))
	}
	return f, nil
}
