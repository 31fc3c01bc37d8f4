// Package history keeps a conversation with a model in a file, one line a message.
//
// The agent's tools can write to the file as well. It is the agent's own memory
// and nothing else: whatever stands in it, reading is bounded and yields a
// conversation that a provider takes.
package history

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/protocol"
)

// Caps, in bytes.
const (
	// MaxFile is the most that is read of a file, from its end; a longer one is
	// written anew when it is resumed.
	MaxFile = 8 << 20
	maxLine = 2 << 20
)

// How much is kept of a file full of very small things.
const (
	maxMessages = 10_000
	maxParts    = 256 // of one message, beside results
)

// folder holds the sessions, below the home folder.
const folder = ".berth/model"

// maxSessions is how many sessions are kept. A group makes one for each task
// that runs on its own.
const maxSessions = 2000

// interrupted is the result of a call whose run ended before it did.
const interrupted = "interrupted: the run ended before this was done"

// Session is a conversation and its file. It belongs to one goroutine.
type Session struct {
	ID       string
	Messages []llm.Message // as a provider takes them, up to calls that are open at the end

	root *os.Root
	file *os.File // nil before the first message
	size int64
}

// New makes a session in the home folder. Its file is made with its first message.
func New(home string) (*Session, error) {
	root, err := open(home)
	if err != nil {
		return nil, err
	}
	return &Session{ID: strings.ToLower(rand.Text()), root: root}, nil
}

// Resume reads a session. One that is not there is a stale session.
func Resume(home, id string) (*Session, error) {
	stale := &engine.Error{Class: protocol.ClassStaleSession, Text: fmt.Sprintf("session %.128q not found", id)}
	if !protocol.ValidSessionID(id) {
		return nil, stale
	}
	root, err := open(home)
	if err != nil {
		return nil, err
	}
	s := &Session{ID: id, root: root}
	err = s.read()
	if err == nil {
		return s, nil
	}
	_ = s.Close()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, stale
	}
	return nil, fmt.Errorf("read session %s: %w", id, err)
}

// open opens the folder of the sessions: as a root, so that a link that a tool
// put in leads nowhere else.
func open(home string) (*os.Root, error) {
	in, err := os.OpenRoot(home)
	if err != nil {
		return nil, fmt.Errorf("open the sessions' folder: %w", err)
	}
	defer in.Close()
	if err := in.MkdirAll(folder, 0o700); err != nil {
		return nil, fmt.Errorf("make the sessions' folder: %w", err)
	}
	root, err := in.OpenRoot(folder)
	if err != nil {
		return nil, fmt.Errorf("open the sessions' folder: %w", err)
	}
	return root, nil
}

// Close closes the file, and removes the oldest of very many sessions.
func (s *Session) Close() error {
	var err error
	if s.file != nil {
		err = s.file.Close()
	}
	prune(s.root)
	return errors.Join(err, s.root.Close())
}

// Add takes a message in and writes it to the file, but does not wait for the
// disk. The message counts even if the file fails.
func (s *Session) Add(m llm.Message) error {
	s.Messages = fold(s.Messages, m)
	line, err := protocol.Marshal(m)
	if err != nil {
		return fmt.Errorf("keep a message: %w", err)
	}
	if s.file == nil {
		if s.file, err = s.openFile(s.name(), os.O_WRONLY|os.O_CREATE|os.O_APPEND); err != nil {
			return fmt.Errorf("keep a message: %w", err)
		}
	}
	// The newline stands in front, so that a line that a crash cut off spoils no
	// other.
	n, err := s.file.Write(append([]byte{'\n'}, line...))
	s.size += int64(n)
	if err != nil {
		return fmt.Errorf("keep a message: %w", err)
	}
	return nil
}

// Sync returns when all messages are on the disk. It may run beside other methods
// but Replace and Close.
func (s *Session) Sync() error {
	if s.file == nil {
		return nil
	}
	return s.file.Sync()
}

// Replace makes messages the conversation, in memory and in the file.
func (s *Session) Replace(messages []llm.Message) error {
	s.Messages = nil
	for _, m := range messages {
		s.Messages = fold(s.Messages, m)
	}
	return s.rewrite()
}

// rewrite writes the conversation beside its file and renames it.
func (s *Session) rewrite() error {
	beside := s.name() + ".tmp"
	if err := s.root.Remove(beside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("shorten the session: %w", err)
	}
	f, err := s.openFile(beside, os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND)
	if err != nil {
		return fmt.Errorf("shorten the session: %w", err)
	}
	size, err := writeAll(f, s.Messages)
	if err == nil {
		err = s.root.Rename(beside, s.name())
	}
	if err != nil {
		_ = f.Close()
		_ = s.root.Remove(beside)
		return fmt.Errorf("shorten the session: %w", err)
	}
	if s.file != nil {
		_ = s.file.Close() // of what is gone now
	}
	s.file, s.size = f, size
	return nil
}

func writeAll(f *os.File, messages []llm.Message) (size int64, err error) {
	out := bufio.NewWriter(f)
	for _, m := range messages {
		line, err := protocol.Marshal(m)
		if err != nil {
			return 0, err
		}
		size += int64(len(line)) + 1
		_ = out.WriteByte('\n') // Flush tells
		_, _ = out.Write(line)
	}
	return size, errors.Join(out.Flush(), f.Sync())
}

func (s *Session) name() string { return s.ID + ".jsonl" }

// openFile opens a regular file. Tools can put pipes in its place: they do not
// block.
func (s *Session) openFile(name string, flags int) (*os.File, error) {
	f, err := s.root.OpenFile(name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		_ = f.Close()
		return nil, errors.Join(err, fmt.Errorf("%s is not a regular file", path.Join(folder, name)))
	}
	return f, nil
}

// read reads the file, or its end.
func (s *Session) read() error {
	f, err := s.openFile(s.name(), os.O_RDWR|os.O_APPEND)
	if err != nil {
		return err
	}
	s.file = f
	info, err := f.Stat()
	if err != nil {
		return err
	}
	s.size = info.Size()
	skip := max(0, s.size-MaxFile)
	if s.Messages, err = decode(io.NewSectionReader(f, skip, MaxFile), skip > 0); err != nil {
		return err
	}
	if skip > 0 {
		return s.rewrite()
	}
	return nil
}

// decode reads messages, one a line. Lines that are none are skipped: a crash
// cuts lines off, and tools may write anything. With partial, the first line is
// the end of one.
func decode(r io.Reader, partial bool) (messages []llm.Message, err error) {
	in := bufio.NewReaderSize(r, 64<<10)
	var line []byte
	for {
		piece, err := in.ReadSlice('\n')
		if len(line) <= maxLine { // of a longer one only the end is looked for
			line = append(line, piece...)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		if !partial && len(line) <= maxLine {
			var m llm.Message
			if json.Unmarshal(bytes.TrimSpace(line), &m) == nil {
				messages = fold(messages, m)
			}
			if len(messages) > 2*maxMessages {
				messages = slices.Clone(Since(messages, len(messages)-maxMessages))
			}
		}
		partial, line = false, line[:0]
		if err != nil {
			return messages, nil
		}
	}
}

// fold adds a message to a conversation so that it stays one: roles take turns,
// calls are answered at once, nothing is empty. It may change the last message,
// and takes over m's parts.
func fold(all []llm.Message, m llm.Message) []llm.Message {
	var last *llm.Message
	if len(all) > 0 {
		last = &all[len(all)-1]
	}
	switch m.Role {
	case llm.Assistant:
		if last == nil {
			return all // begins in the middle
		}
		parts := spoken(m.Parts)
		if len(parts) == 0 {
			return all
		}
		if last.Role == llm.User {
			return append(all, llm.Message{Role: llm.Assistant, Parts: parts})
		}
		if open := last.Calls(); len(open) > 0 {
			return append(all, llm.Message{Role: llm.User, Parts: answers(open, nil)}, llm.Message{Role: llm.Assistant, Parts: parts})
		}
		last.Parts = spoken(append(slices.Clip(last.Parts), parts...))
	case llm.User:
		var parts []llm.Part
		if last != nil && last.Role == llm.Assistant {
			parts = answers(last.Calls(), m.Parts)
		}
		for _, p := range m.Parts {
			if p.Call == nil && p.Result == nil && strings.TrimSpace(p.Text) != "" && len(parts) < 2*maxParts {
				parts = append(parts, llm.Part{Text: p.Text})
			}
		}
		switch {
		case len(parts) == 0:
		case last != nil && last.Role == llm.User:
			last.Parts = newest(append(slices.Clip(last.Parts), parts...))
		default:
			return append(all, llm.Message{Role: llm.User, Parts: parts})
		}
	}
	return all
}

// newest drops the oldest texts of a user's message that has too many parts.
func newest(parts []llm.Part) []llm.Part {
	over := len(parts) - 2*maxParts
	return slices.DeleteFunc(parts, func(p llm.Part) bool {
		drop := over > 0 && p.Result == nil
		if drop {
			over--
		}
		return drop
	})
}

// spoken returns the parts that an assistant's message may have.
func spoken(parts []llm.Part) []llm.Part {
	var out []llm.Part
	ids := make(map[string]bool)
	for _, p := range parts {
		switch {
		case len(out) == maxParts:
			return out
		case p.Own != nil:
			out = append(out, p)
		case p.Call != nil:
			if p.Call.ID != "" && p.Call.Name != "" && !ids[p.Call.ID] {
				ids[p.Call.ID] = true
				out = append(out, llm.Part{Call: p.Call})
			}
		case p.Result == nil && strings.TrimSpace(p.Text) != "":
			out = append(out, llm.Part{Text: p.Text})
		}
	}
	return out
}

// answers returns one result for each of calls, from parts if they have it.
func answers(calls []llm.Call, parts []llm.Part) []llm.Part {
	var out []llm.Part
	for _, c := range calls {
		r := &llm.Result{CallID: c.ID, Text: interrupted, Failed: true}
		for _, p := range parts {
			if p.Result != nil && p.Result.CallID == c.ID {
				r = p.Result
			}
		}
		out = append(out, llm.Part{Result: r})
	}
	return out
}

// Since returns the messages from the first turn that begins at from or later; if
// there is none, nothing.
func Since(messages []llm.Message, from int) []llm.Message {
	for i := max(0, from); i < len(messages); i++ {
		if Begins(messages[i]) {
			return messages[i:]
		}
	}
	return nil
}

// Begins reports whether m begins a turn: people say something, and no tool
// answers.
func Begins(m llm.Message) bool {
	return m.Role == llm.User && !slices.ContainsFunc(m.Parts, func(p llm.Part) bool { return p.Result != nil })
}

// prune removes the oldest sessions if there are too many, and what a crash left.
func prune(root *os.Root) {
	dir, err := root.Open(".")
	if err != nil {
		return
	}
	defer dir.Close()
	entries, err := dir.ReadDir(2 * maxSessions) // tools may have made any number
	if err != nil || len(entries) <= maxSessions {
		return
	}
	type session struct {
		name string
		used time.Time
	}
	var sessions []session
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			sessions = append(sessions, session{e.Name(), info.ModTime()})
		}
	}
	slices.SortFunc(sessions, func(a, b session) int { return cmp.Compare(b.used.UnixNano(), a.used.UnixNano()) })
	for _, old := range sessions[min(len(sessions), maxSessions):] {
		_ = root.Remove(old.name) // the next one tries again
	}
}
