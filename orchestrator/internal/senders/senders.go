// Package senders decides whose messages count in which chat, by a list that the
// operator keeps in a file: who is not on it is either not heard at all, or heard
// only as context that wakes nobody.
//
// Everything fails closed. A list that was once in force stays so, whatever
// becomes of the file, until another good one takes its place.
package senders

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/listfile"
)

// Verdict says what becomes of a message. The zero value is the strictest.
type Verdict int

// The verdicts.
const (
	Drop    Verdict = iota // it is not stored
	Context                // it is stored and wakes nobody
	Allowed                // it is like any other
)

// String returns the verdict's name in logs.
func (v Verdict) String() string { return [...]string{"drop", "context", "allowed"}[v] }

// Answer is what a sender who may not wake the agent is told, once.
const Answer = "I answer only people whom my operator has put on the list."

// maxAnswered bounds how many senders are remembered as answered. Who comes after
// them gets no answer: at most one is promised, not one.
const maxAnswered = 1 << 16

// settled is how old a file's last change must be before its time stamp tells
// one state from the next.
const settled = 2 * time.Second

// Options say where the list is kept.
type Options struct {
	File string // need not exist

	// Kept is where the last good list is kept over restarts, in a folder that
	// no container sees. Empty: it is forgotten at the end of the process.
	Kept string

	// Required: without a file nobody wakes an agent. Otherwise no file means
	// that there is no list, and everybody counts.
	Required bool
}

// List follows its file without a restart. Its methods are safe for concurrent
// use; they look at the file's state each time and read it when that changed.
type List struct {
	opts Options
	seed maphash.Seed
	now  func() time.Time // tests have their own

	mu       sync.Mutex
	seen     state // of the file when it was read
	begun    bool  // the kept list was looked for
	last     *list // the last good one; nil: there never was one
	fault    error // what is wrong with the file
	answered map[uint64]struct{}
}

// New returns the list in o.File. Nothing is read before it is asked.
func New(o Options) *List {
	return &List{opts: o, seed: maphash.MakeSeed(), now: time.Now, answered: make(map[uint64]struct{})}
}

// list is a file's meaning. It does not change.
type list struct {
	def       entry
	chats     map[string]entry // by JID or folder
	logDenied bool
	faults    []error // of single chats, which are closed
}

type entry struct {
	any    bool
	allow  map[string]bool
	denied Verdict // for everybody else
}

// closed is in force when nothing is known: nothing may wake anybody. It does not
// drop, since no list ever said so, and what is dropped is lost.
var closed = &list{def: entry{denied: Context}, logDenied: true}

// open is in force when there is no list.
var open = &list{def: entry{any: true}}

// Decide says what becomes of a message of sender in a chat, which belongs to the
// group of folder. A sender who is known by several ids counts as the most welcome
// of them. An entry for the chat goes before one for the folder, and that before
// the default. Messages of the assistant's own account are not asked about: they
// always count.
func (l *List) Decide(chatJID, folder, sender string, aliases ...string) Verdict {
	l.mu.Lock()
	current := l.current()
	l.mu.Unlock()
	e, ok := current.chats[canonical(chatJID)]
	if !ok {
		e, ok = current.chats[folder]
	}
	if !ok {
		e = current.def
	}
	if e.any || e.allow[canonical(sender)] {
		return Allowed
	}
	for _, alias := range aliases {
		if e.allow[canonical(alias)] {
			return Allowed
		}
	}
	return e.denied
}

// AnswerOnce reports true the first time that it is asked about a sender in a
// chat, and never again: whoever gets true sends Answer. After 65 536 senders it
// is always false. It is meant for senders whose verdict is Context and whose
// message would have woken the agent; who is dropped hears nothing.
func (l *List) AnswerOnce(chatJID, sender string) bool {
	// A hash keeps memory bounded whatever length ids have; who collides is
	// not answered.
	id := maphash.Comparable(l.seed, [2]string{canonical(chatJID), canonical(sender)})
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.answered[id]; known || len(l.answered) >= maxAnswered {
		return false
	}
	l.answered[id] = struct{}{}
	return true
}

// LogDenied reports whether the operator wants a log line for each sender who is
// not on the list.
func (l *List) LogDenied() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.current().logDenied
}

// Alarm says in one line what is wrong with the file as it is now, and what holds
// meanwhile, or returns an empty string.
func (l *List) Alarm() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	current := l.current()
	if l.fault == nil {
		if len(current.faults) == 0 {
			return ""
		}
		return oneLine(fmt.Errorf("sender allowlist %s: %w", l.opts.File, errors.Join(current.faults...)))
	}
	if l.last == nil {
		return "no message wakes an agent: " + oneLine(l.fault)
	}
	return "the last good sender allowlist is still in use: " + oneLine(l.fault)
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// state tells one state of the file from another.
type state struct {
	dev, ino, size int64
	changed        syscall.Timespec // of anything, also of the rights
	missing        bool
	sure           bool // a later change would show
}

func stateOf(file string, now time.Time) state {
	var st syscall.Stat_t
	if err := syscall.Stat(file, &st); err != nil {
		return state{missing: true, sure: errors.Is(err, syscall.ENOENT)}
	}
	return state{
		dev: int64(st.Dev), ino: int64(st.Ino), size: st.Size, changed: st.Ctim,
		sure: now.Sub(time.Unix(st.Ctim.Unix())) > settled,
	}
}

// current returns the list in force. The caller holds the lock.
func (l *List) current() *list {
	now := stateOf(l.opts.File, l.now())
	if !l.begun || now != l.seen || !now.sure {
		l.begin()
		l.seen = now
		l.load()
	}
	switch {
	case l.last != nil:
		return l.last
	case l.fault != nil:
		return closed
	default:
		return open
	}
}

// begin takes over what an earlier process kept.
func (l *List) begin() {
	if l.begun {
		return
	}
	l.begun = true
	if l.opts.Kept == "" {
		return
	}
	data, err := listfile.Read(l.opts.Kept)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if err == nil {
		l.last, err = parse(data)
	}
	if err != nil {
		l.last = closed // there was a list, and nobody knows what it said
	}
}

func (l *List) load() {
	data, err := listfile.Read(l.opts.File)
	if errors.Is(err, os.ErrNotExist) && l.last == nil && !l.opts.Required {
		l.fault = nil
		return
	}
	var fresh *list
	if err == nil {
		fresh, err = parse(data)
	} else if errors.Is(err, os.ErrNotExist) {
		err = errors.New(`it is gone: put it back; {"default": {"allow": "*"}} lets everybody in`)
	}
	if err != nil {
		l.fault = fmt.Errorf("sender allowlist %s: %w", l.opts.File, err)
		return
	}
	l.last, l.fault = fresh, nil
	if err := l.keep(data); err != nil {
		l.fault = fmt.Errorf("sender allowlist %s: it is good but cannot be kept for the next start: %w", l.opts.File, err)
	}
}

func (l *List) keep(data []byte) error {
	if l.opts.Kept == "" {
		return nil
	}
	if old, err := listfile.Read(l.opts.Kept); err == nil && bytes.Equal(old, data) {
		return nil
	}
	return listfile.Write(l.opts.Kept, data)
}

var knownNames = map[string][]string{
	"":        {"default", "chats", "logDenied"},
	"default": {"allow", "mode"},
	"chats/*": {"allow", "mode"},
}

// parse reads a file. A fault in one chat's entry closes that chat and leaves the
// others alone; any other makes the file unusable. Names that mean nothing are
// faults too, unless they begin with $ or _: with "chat" for "chats" a list that
// was meant to shut would be open.
func parse(data []byte) (*list, error) {
	var file struct {
		Default   *json.RawMessage           `json:"default"`
		Chats     map[string]json.RawMessage `json:"chats"`
		LogDenied *bool                      `json:"logDenied"`
	}
	unknown, err := listfile.Decode(data, &file, knownNames)
	if err != nil {
		return nil, err
	}
	if err := strange(unknown); err != nil {
		return nil, err
	}
	if file.Default == nil {
		return nil, errors.New(`"default" is missing: {"allow": "*"} for everybody, {"allow": []} for nobody`)
	}
	l := &list{chats: make(map[string]entry), logDenied: file.LogDenied == nil || *file.LogDenied}
	if l.def, err = parseEntry(*file.Default); err != nil {
		return nil, fmt.Errorf(`"default": %w`, err)
	}
	for _, name := range slices.Sorted(maps.Keys(file.Chats)) {
		key := canonical(name)
		e, err := parseEntry(file.Chats[name])
		if _, twice := l.chats[key]; twice && err == nil {
			e, err = entry{denied: Drop}, errors.New("the chat stands there twice")
		}
		if key == "" && err == nil {
			err = errors.New("give a chat's id or a group's folder")
		}
		if err != nil {
			l.faults = append(l.faults, fmt.Errorf("nobody counts in chat %.80q: %w", name, err))
		}
		l.chats[key] = e
	}
	return l, nil
}

// parseEntry returns an entry that lets nobody in together with an error.
func parseEntry(data []byte) (entry, error) {
	shut := entry{denied: Drop}
	var raw struct {
		Allow json.RawMessage `json:"allow"`
		Mode  any             `json:"mode"`
	}
	if json.Unmarshal(data, &raw) != nil {
		return shut, errors.New(`it has to be an object, {"allow": …, "mode": …}`)
	}
	e := entry{denied: Context, allow: make(map[string]bool)}
	switch raw.Mode {
	case nil, "trigger":
	case "drop":
		e.denied = Drop
	default:
		return shut, fmt.Errorf(`"mode" is %.80v: "trigger" (who is not on the list wakes nobody) or "drop" (is not heard at all)`, raw.Mode)
	}
	var all string
	if json.Unmarshal(raw.Allow, &all) == nil && all == "*" {
		e.any = true
		return e, nil
	}
	var ids []string
	if err := json.Unmarshal(raw.Allow, &ids); err != nil || ids == nil {
		return shut, errors.New(`"allow" has to be "*", or a list of senders, [] for nobody`)
	}
	for _, id := range ids {
		key := canonical(id)
		if key == "" || key == "*" {
			return shut, fmt.Errorf(`%.80q in "allow" is no sender: "allow": "*" without brackets is for everybody`, id)
		}
		e.allow[key] = true
	}
	return e, nil
}

func strange(unknown []string) error {
	for _, text := range unknown {
		if !strings.Contains(text, `: "$`) && !strings.Contains(text, `: "_`) {
			return errors.New(text)
		}
	}
	return nil
}

// canonical returns the spelling under which an id is compared: without the
// device that a message came from, and a phone number as its WhatsApp id.
func canonical(id string) string {
	id = strings.TrimSpace(id)
	if at := strings.LastIndexByte(id, '@'); at >= 0 {
		user, server := id[:at], strings.ToLower(id[at+1:])
		user, _, _ = strings.Cut(user, ":")
		return user + "@" + server
	}
	if strings.HasPrefix(id, "+") && strings.Trim(id, "+0123456789 -()./") == "" {
		digits := strings.Map(func(r rune) rune {
			if r < '0' || r > '9' {
				return -1
			}
			return r
		}, id)
		return digits + "@s.whatsapp.net"
	}
	return id
}

// Check returns a berth.Invalid error if the file as it is now cannot be used, or
// nil; no file is no fault unless o.Required. It is for commands, and keeps nothing.
func Check(o Options) error {
	o.Kept = ""
	if alarm := New(o).Alarm(); alarm != "" {
		return berth.Errorf(berth.Invalid, "%s", alarm)
	}
	return nil
}
