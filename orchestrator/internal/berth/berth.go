// Package berth holds the words that the rest of Berth speaks: groups, messages,
// runs, batches, outgoing texts, and the kinds of error that a person may see.
// It imports the standard library only; everything here is a plain value and
// safe to copy.
package berth

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"
)

// MainFolder is the folder of the operator's own group.
const MainFolder = "main"

// Group is a registered chat, the unit of isolation.
type Group struct {
	JID             string // the chat, for example "console:family" or "1203…@g.us"
	Name            string
	Folder          string // unique; see ValidFolder
	Trigger         string // "@Name", or empty for the assistant's own name
	RequiresTrigger bool
	Container       ContainerConfig
	AddedAt         time.Time
}

// IsMain reports whether g is the operator's own group.
func (g Group) IsMain() bool { return g.Folder == MainFolder }

// NeedsTrigger reports whether a message has to carry the trigger to wake g.
// The main group never needs one.
func (g Group) NeedsTrigger() bool { return g.RequiresTrigger && !g.IsMain() }

// EffectiveTrigger returns what a message has to start with to wake g.
func (g Group) EffectiveTrigger(assistant string) string {
	if t := strings.TrimSpace(g.Trigger); t != "" {
		return t
	}
	return "@" + assistant
}

// ContainerConfig is what an operator may set for one group. Zero values mean
// the daemon's defaults. Its JSON is the ancestors' container_config column.
type ContainerConfig struct {
	AdditionalMounts []MountRequest `json:"additionalMounts,omitempty"`
	TimeoutMS        int64          `json:"timeout,omitempty"` // hard timeout in milliseconds
	Image            string         `json:"image,omitempty"`
	Engine           string         `json:"engine,omitempty"`
	Model            string         `json:"model,omitempty"` // for engines with a model
	MemoryMiB        int64          `json:"memoryMiB,omitempty"`
	CPUs             float64        `json:"cpus,omitempty"`
	Pids             int64          `json:"pids,omitempty"`
	Egress           []string       `json:"egress,omitempty"` // hosts that it may reach
}

// MountRequest asks for a host folder inside the container. It is only a wish:
// the allowlist decides.
type MountRequest struct {
	HostPath      string `json:"hostPath"`
	ContainerPath string `json:"containerPath,omitempty"`
	// ReadOnly is a pointer because only an explicit false asks for writing.
	ReadOnly *bool `json:"readonly,omitempty"`
}

// UnmarshalJSON takes nothing but the boolean false for a wish to write: a
// decoder would leave false behind when it fails on "false" or 0.
func (m *MountRequest) UnmarshalJSON(data []byte) error {
	var raw struct {
		HostPath      string `json:"hostPath"`
		ContainerPath string `json:"containerPath"`
		ReadOnly      any    `json:"readonly"`
	}
	if err := json.Unmarshal(data, &raw); err != nil {
		return err
	}
	*m = MountRequest{HostPath: raw.HostPath, ContainerPath: raw.ContainerPath}
	if given, ok := raw.ReadOnly.(bool); ok {
		m.ReadOnly = &given
	}
	return nil
}

// Mount is one bind mount of a container.
type Mount struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readonly"`
	Alone    bool   `json:"-"` // without the file systems that are mounted below Source
}

// Message is one stored chat message.
type Message struct {
	Seq        int64     `json:"seq"` // the store's order; 0 before it is stored
	ID         string    `json:"id"`  // the channel's id, unique within the chat
	ChatJID    string    `json:"chat"`
	Sender     string    `json:"sender"`
	SenderName string    `json:"senderName"`
	Text       string    `json:"text"`
	Time       time.Time `json:"time"` // by the channel's clock; never used for order
	FromMe     bool      `json:"fromMe,omitempty"`
	Bot        bool      `json:"bot,omitempty"`   // written by Berth itself
	Wakes      bool      `json:"wakes,omitempty"` // carried a trigger, or needed none
	Addressed  bool      `json:"-"`               // mentions the assistant's account, or replies to it; not stored
}

// RunState is a step in the life of a container.
type RunState string

// The states of a run, in order. A run goes back and forth between busy and
// idle and ends as gone.
const (
	RunStarting RunState = "starting"
	RunBusy     RunState = "busy"
	RunIdle     RunState = "idle"
	RunClosing  RunState = "closing"
	RunStopping RunState = "stopping"
	RunGone     RunState = "gone"
)

// The kinds of run.
const (
	KindChat = "chat"
	KindTask = "task"
)

// Run is the life of one container, from create to gone.
type Run struct {
	ID        string
	Folder    string
	ChatJID   string
	Kind      string // KindChat or KindTask
	Task      string // id of the group's task that it is for; empty: none
	State     RunState
	Container string // engine's id, empty until created
	Image     string
	Engine    string
	Nonce     string // secret between host and runner
	LastSeq   int64  // highest frame sequence number committed
	Renewed   bool   // its group's next run is to begin a new session
	StartedAt time.Time
	EndedAt   time.Time // zero while the run lives
	Error     string
}

// BatchState says how far a batch came.
type BatchState string

// A batch is sent when its delivery to a run was attempted, consumed when the
// runner acknowledged it, done when its turn ended, and returned when its run
// ended before any output: then its messages are pending again.
const (
	BatchSent     BatchState = "sent"
	BatchConsumed BatchState = "consumed"
	BatchDone     BatchState = "done"
	BatchReturned BatchState = "returned"
)

// Batch is a contiguous piece of a chat's messages that one run was given.
type Batch struct {
	ID       int64
	RunID    string
	ChatJID  string
	From, To int64 // message sequence numbers: From exclusive, To inclusive
	AckID    string
	State    BatchState
	Answered bool // some output of it reached the outbox
	Input    bool // delivered as an input file, not on stdin
	Messages []Message
	Omitted  int // older messages left out of Messages for size
	// Texts for the chat that were given up since the last batch, oldest first;
	// of many the newest.
	Undelivered []Outgoing
	Notes       []Note // what heartbeats found since the last batch, likewise
}

// Note is something that an agent is told with the next batch of its chat.
type Note struct {
	Text string
	Time time.Time
}

// OutState says how far an outgoing text came.
type OutState string

// The states of an outgoing text.
const (
	OutPending OutState = "pending"
	OutSent    OutState = "sent"
	OutDead    OutState = "dead"    // given up after the last attempt
	OutDropped OutState = "dropped" // by the operator
)

// Outgoing is one text on its way to a chat: at most one chunk long.
type Outgoing struct {
	ID        int64
	ChatJID   string
	Key       string // idempotency key of the fact that caused it
	Kind      string // OutAnswer, OutMessage, OutReaction or OutNotice
	Text      string // of an OutReaction its emoji
	File      string // path below groups/ of a file that goes along, with Text as its caption; empty: none
	FileSize  int64  // in bytes, when it was queued
	ReactsTo  int64  // sequence number of the message that an OutReaction is to
	MessageID string // chosen before the first attempt and kept
	AnswersTo int64  // sequence number of the last message it answers, or 0
	OwnTurn   bool   // said by the agent of that chat: part of the answer of a turn under way
	State     OutState
	Attempts  int
	NotBefore time.Time
	CreatedAt time.Time
	Error     string
}

// The kinds of outgoing text.
const (
	OutAnswer   = "answer"   // an agent's result
	OutMessage  = "message"  // sent by an agent during its turn
	OutReaction = "reaction" // to a message, by the same
	OutNotice   = "notice"   // Berth itself speaking
)

// Bounds of the files that agents send, in bytes.
const (
	MaxFile  = 64 << 20
	MaxFiles = 256 << 20 // of one chat, on their way or given up
)

// Shown returns the text for those who see nothing but text: what goes along is
// named in brackets.
func (o Outgoing) Shown() string {
	switch {
	case o.File != "":
		return strings.TrimSpace(fmt.Sprintf("[file %s, %s] %s", path.Base(o.File), size(o.FileSize), o.Text))
	case o.Kind == OutReaction:
		return fmt.Sprintf("[reaction %s to #%d]", o.Text, o.ReactsTo)
	}
	return o.Text
}

// size returns a number of bytes as people read it.
func size(n int64) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.0f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d bytes", n)
}

var folderPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`)

// ValidFolder returns an Invalid error unless name can be a group's folder.
func ValidFolder(name string) error {
	lower := strings.ToLower(name)
	if !folderPattern.MatchString(name) || lower == "global" || lower == "errors" {
		return Errorf(Invalid, "folder %q cannot be used: 1 to 64 letters, digits, - or _, starting with a letter or digit, and not global or errors", name)
	}
	return nil
}

// NewID returns n random bytes in hex.
func NewID(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // crypto/rand.Read never fails
	return hex.EncodeToString(b)
}

// Kind sorts errors by what a person can do about them.
type Kind int

// The kinds of error. Anything without a kind is Internal.
const (
	Internal Kind = iota
	Invalid
	NotFound
	Conflict
	Denied
	Unavailable
)

// String returns the kind's name on the control socket.
func (k Kind) String() string {
	return [...]string{"internal", "invalid", "not found", "conflict", "denied", "unavailable"}[k]
}

// Error is an error meant to be read by a person: what, why, what to do.
type Error struct {
	Kind Kind
	Text string
	err  error
}

func (e *Error) Error() string { return e.Text }
func (e *Error) Unwrap() error { return e.err }

// Errorf makes an Error; %w works as in fmt.Errorf.
func Errorf(kind Kind, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &Error{Kind: kind, Text: err.Error(), err: err}
}

// Progress is what one frame of a run changed.
type Progress struct {
	RunID     string
	Seq       int64    // the frame's number, or 0
	Acked     []string // ids of acknowledged batches
	Session   string   // new session id, or empty
	Out       []Outgoing
	TurnEnded bool // what was acknowledged is done

	// For the log of a task.
	Summary      string // the beginning of the result; empty: no news
	Found        string // what the agent of the chat is to be told of it; empty: nothing
	Spoke        bool   // it has a result, if one without words
	InputTokens  int64
	OutputTokens int64
}

// Ending is how a run ended, and what is to become of the batches whose turn
// did not end: those that were answered are done, the others pending again. The
// run of a task that was not answered is repeated in the same way.
type Ending struct {
	RunID       string
	At          time.Time
	ExitCode    int
	Taken       []string // ids of batches that the run took, though no ack said so
	Error       string   // empty: the run did what was asked
	Class       string
	DropSession bool
	Uncounted   bool            // nobody's fault: not an attempt
	NoRetry     bool            // trying again cannot help
	RetryIn     time.Duration   // when above zero, instead of Backoff
	Backoff     []time.Duration // before attempt 2, 3, …; after the last one the batch is given up
	Notice      string          // told to the chat when the batch is given up
}

// Verdict says what became of a run's open batches.
type Verdict struct {
	Returned bool      // messages are pending again, or the task is due again
	RetryAt  time.Time // zero: at once, or not at all
	Parked   bool      // given up until the next message, or the task's next time
}

// Standing is how far the agent of a chat has come.
type Standing struct {
	Pending   int // messages after the cursor
	Attempts  int // failed runs in a row
	RetryAt   time.Time
	GivenUp   bool // until the next message
	LastError string
}

// Fate is what became of one message.
type Fate struct {
	State string // FateContext, FatePending, FateDone or FateFailed
	Texts []string
	RunID string
	Error string
}

// The values of Fate.State.
const (
	FateContext = "context" // waits for a message with the trigger
	FatePending = "pending"
	FateDone    = "done"
	FateFailed  = "failed" // given up until the next message
)

// MaxText is the longest message text, in bytes.
const MaxText = 64 << 10

// ValidText returns an Invalid error unless text can be a message.
func ValidText(text string) error {
	switch {
	case strings.TrimSpace(text) == "":
		return Errorf(Invalid, "the text is empty: write something")
	case len(text) > MaxText:
		return Errorf(Invalid, "the text has %d bytes and may have %d: send it in parts, or put it into a file of the group", len(text), MaxText)
	case !utf8.ValidString(text) || strings.ContainsRune(text, 0):
		return Errorf(Invalid, "the text is not UTF-8, or holds a zero byte: send plain text")
	}
	return nil
}
