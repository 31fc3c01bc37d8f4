// Package protocol is what the host and the runner inside a container say to
// each other: one JSON object on stdin, input files, and framed lines on
// stdout. Both programs import it. It is a superset of the wire of CamBot-Agent
// and NanoClaw v1, whose images run under Berth unchanged.
//
// Everything that the host decodes here was written by a container and is
// hostile; everything is bounded by the caps below.
package protocol

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// Version is the wire spoken by this package.
const Version = 1

// DefaultMarker stands in the lines around a frame. An image may name another
// by LabelMarker.
const (
	DefaultMarker = "BERTH"
	LabelMarker   = "berth.marker"
)

// Caps, in bytes.
const (
	MaxLine   = 1 << 20   // one line of stdout, and so one frame
	MaxResult = 256 << 10 // the text of one result
	MaxInput  = 16 << 20  // the stdin object, and an input file
)

// Times that both sides count on.
const (
	LookAgain      = 5 * time.Second  // the runner looks for input that no event announced
	Heartbeat      = 30 * time.Second // between heartbeats of a busy runner
	LeaseInterval  = 30 * time.Second // between the host's touches of the lease
	LeaseExpiry    = 10 * time.Minute // a runner whose lease is older ends after its turn
	CloseReassert  = 2 * time.Second  // between the host's writes of CloseFile
	MaxSessionID   = 128              // characters
	MaxSyncedAcks  = 256              // most ids repeated in the ack that answers a sync
	InputNameWidth = 20               // digits of an input file's sequence number
)

// Places inside the container.
const (
	IPCDir       = "/workspace/ipc"
	InputDir     = IPCDir + "/input"
	MessagesDir  = IPCDir + "/messages"
	TasksDir     = IPCDir + "/tasks"
	FramesDir    = IPCDir + "/frames"
	ResponsesDir = IPCDir + "/responses"
	GroupDir     = "/workspace/group"
	HomeDir      = "/home/agent"
	CloseFile    = "_close"
	LeaseFile    = "lease"
	RunnerPath   = "/usr/local/bin/agent-runner"
)

// Input is the JSON object on the runner's stdin.
type Input struct {
	Prompt          string            `json:"prompt"`
	SessionID       string            `json:"sessionId,omitempty"`
	GroupFolder     string            `json:"groupFolder"`
	ChatJID         string            `json:"chatJid"`
	IsMain          bool              `json:"isMain"`
	IsScheduledTask bool              `json:"isScheduledTask,omitempty"`
	AssistantName   string            `json:"assistantName,omitempty"`
	Secrets         map[string]string `json:"secrets,omitempty"`

	// Berth's own.
	Protocol      int               `json:"protocol,omitempty"`
	RunID         string            `json:"runId,omitempty"`
	Nonce         string            `json:"nonce,omitempty"` // echoed in every frame
	Batch         []string          `json:"batch,omitempty"` // ids of the prompt's messages
	Engine        string            `json:"engine,omitempty"`
	EngineOptions map[string]string `json:"engineOptions,omitempty"`
	SystemPrompt  string            `json:"systemPrompt,omitempty"`
	Timezone      string            `json:"timezone,omitempty"`
	Gateway       string            `json:"gateway,omitempty"`
	// Isolated says that nobody goes on with the session when the run is over.
	Isolated bool `json:"isolated,omitempty"`
	// Compact says that the run begins with a compaction, not with the prompt. That
	// is CompactCommand then, for runners that do not know this field.
	Compact bool `json:"compact,omitempty"`
	// Script is run first, by the container's shell. The last line that it prints
	// on stdout decides whether the agent is woken: {"wakeAgent":true,"data":…}.
	Script string `json:"script,omitempty"`
}

// ReadInput reads the one object on stdin up to EOF.
func ReadInput(r io.Reader) (Input, error) {
	var in Input
	data, err := readAll(r, MaxInput)
	if err != nil {
		return in, err
	}
	if err := json.Unmarshal(data, &in); err != nil {
		return in, fmt.Errorf("stdin is not one JSON object: %w", err)
	}
	return in, nil
}

// The types of an input file.
const (
	TypeMessage = "message"
	// TypeSync asks the runner to repeat ready, its state and the ids that it
	// consumed. The host sends it after it lost sight of the stream.
	TypeSync = "sync"
	// TypeStop has the runner end a turn and keep its session: the one that has the
	// message of the file's id, now or later, or without an id the one under way.
	TypeStop = "stop"
)

// CompactCommand is what agents know that shorten their conversation when they are
// told to.
const CompactCommand = "/compact"

// Message is the content of one input file.
type Message struct {
	Type string `json:"type"`
	Text string `json:"text,omitempty"`
	ID   string `json:"id,omitempty"`
	// Compact says that the conversation is to be made shorter, in a turn of its own.
	// The text is CompactCommand, for runners that do not know this field.
	Compact bool `json:"compact,omitempty"`
}

// InputName returns the name of the input file with sequence number seq.
// Names sort in the order of their numbers.
func InputName(seq int64) string {
	return fmt.Sprintf("%0*d.json", InputNameWidth, seq)
}

// ReadMessage decodes one input file.
func ReadMessage(r io.Reader) (Message, error) {
	var m Message
	data, err := readAll(r, MaxInput)
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, fmt.Errorf("not a JSON object: %w", err)
	}
	switch {
	case m.Type == TypeSync || m.Type == TypeStop:
	case m.Type != TypeMessage:
		return m, fmt.Errorf("unknown type %q", m.Type)
	case m.Text == "":
		return m, errors.New("no text")
	}
	return m, nil
}

// The types of a frame. An absent type means output.
const (
	TypeReady     = "ready"
	TypeAck       = "ack"
	TypeState     = "state"
	TypeHeartbeat = "heartbeat"
	TypeOutput    = "output"
)

// The values of Frame.Status and Frame.State.
const (
	StatusSuccess = "success"
	StatusError   = "error"
	StateBusy     = "busy"
	StateIdle     = "idle"
)

// Error classes decide what the host does after a failed turn.
const (
	ClassStaleSession = "stale_session" // drop the session, once more at once
	ClassRateLimit    = "rate_limit"    // wait as told
	ClassAuth         = "auth"          // no retry, tell the operator
	ClassImage        = "image"         // no retry, tell the operator
	ClassMemory       = "memory"        // no retry, tell the operator
	ClassInput        = "input"         // no retry: the runner could not use what it was given
)

// Frame is one record on the runner's stdout.
type Frame struct {
	Type   string `json:"type,omitempty"`
	Seq    int64  `json:"seq,omitempty"` // 1, 2, … within a run; 0 from an old runner
	RunID  string `json:"runId,omitempty"`
	Nonce  string `json:"nonce,omitempty"`
	Status string `json:"status,omitempty"`
	Result *Text  `json:"result,omitempty"`

	NewSessionID string   `json:"newSessionId,omitempty"`
	Error        string   `json:"error,omitempty"`
	ErrorClass   string   `json:"errorClass,omitempty"`
	RetryAfterMS int64    `json:"retryAfterMs,omitempty"` // with ClassRateLimit
	IDs          []string `json:"ids,omitempty"`          // acknowledged batch
	State        string   `json:"state,omitempty"`
	Usage        *Usage   `json:"usage,omitempty"`
	Note         string   `json:"note,omitempty"` // why there is no result, for the operator

	Compaction *Compaction `json:"compaction,omitempty"` // of an output without a result
}

// Canonical reports whether f is also kept as a file: every output is. With one
// that has no result, the session would be lost, and a task that is over run again.
func (f *Frame) Canonical() bool { return f.Type == "" || f.Type == TypeOutput }

// Compaction is what came of the order to make the conversation shorter.
type Compaction struct {
	Outcome string `json:"outcome"`
	Archive string `json:"archive,omitempty"` // where in the group's folder lies what was said before
	Reason  string `json:"reason,omitempty"`  // of CompactionFailed, for people
}

// The values of Compaction.Outcome.
const (
	CompactionDone    = "done"
	CompactionNothing = "nothing" // it is short
	CompactionUnable  = "unable"  // this agent has no way to do it
	CompactionFailed  = "failed"  // the conversation is as it was
)

// ConversationsDir is the folder of the archives, in the group's folder.
const ConversationsDir = "conversations"

// maxReason bounds what a Compaction says, in bytes.
const maxReason = 2 << 10

// check returns why c cannot be used, or nil.
func (c *Compaction) check() error {
	switch c.Outcome {
	case CompactionDone, CompactionNothing, CompactionUnable, CompactionFailed:
	default:
		return fmt.Errorf("outcome %q of a compaction is not known", clip(c.Outcome))
	}
	if len(c.Archive) > maxReason || len(c.Reason) > maxReason {
		return fmt.Errorf("a compaction says more than %d bytes", maxReason)
	}
	return nil
}

// Text is a result. The ancestors may send any JSON value; what is no string is
// taken as its JSON text.
type Text string

// UnmarshalJSON implements json.Unmarshaler.
func (t *Text) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '"' {
		return json.Unmarshal(data, (*string)(t))
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, data); err != nil {
		return err
	}
	*t = Text(compact.String())
	return nil
}

// Usage is what a turn cost.
type Usage struct {
	InputTokens  int64   `json:"inputTokens,omitempty"`
	OutputTokens int64   `json:"outputTokens,omitempty"`
	CostUSD      float64 `json:"costUsd,omitempty"`
}

// ValidSessionID reports whether id may be stored and handed back to a runner:
// 1 to MaxSessionID letters, digits, dots, - or _.
func ValidSessionID(id string) bool {
	for i := range len(id) {
		c := id[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	return len(id) > 0 && len(id) <= MaxSessionID
}

// check returns why f cannot be used, or nil.
func (f *Frame) check() error {
	switch f.Type {
	case "", TypeOutput:
		if f.Status != StatusSuccess && f.Status != StatusError {
			return fmt.Errorf("status %q is neither success nor error", clip(f.Status))
		}
	case TypeReady, TypeAck, TypeHeartbeat:
	case TypeState:
		if f.State != StateBusy && f.State != StateIdle {
			return fmt.Errorf("state %q is neither busy nor idle", clip(f.State))
		}
	default:
		return fmt.Errorf("unknown frame type %q", clip(f.Type))
	}
	if f.Result != nil && len(*f.Result) > MaxResult {
		return fmt.Errorf("result of %d bytes is over the cap of %d", len(*f.Result), MaxResult)
	}
	if f.NewSessionID != "" && !ValidSessionID(f.NewSessionID) {
		return fmt.Errorf("session id %q is not 1 to %d letters, digits, dots, - or _", clip(f.NewSessionID), MaxSessionID)
	}
	if f.Seq < 0 {
		return fmt.Errorf("sequence number %d is negative", f.Seq)
	}
	if f.Compaction != nil {
		return f.Compaction.check()
	}
	return nil
}

// Marshal returns v as one line of JSON. Unlike json.Marshal it leaves < > & as
// they are: a prompt is full of them.
func Marshal(v any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), nil
}

func clip(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return strings.ToValidUTF8(s, "�")
}

func readAll(r io.Reader, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("over the cap of %d bytes", limit)
	}
	return data, nil
}
