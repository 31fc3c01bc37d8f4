// Package web serves the control socket: JSON over HTTP for the command line,
// on a unix socket that only its owner can open. Client is its other end.
package web

import (
	"time"

	"berth/orchestrator/internal/berth"
)

// Status is the answer of GET /v1/status.
type Status struct {
	Version   string    `json:"version"`
	PID       int       `json:"pid"`
	Root      string    `json:"root"`
	StartedAt time.Time `json:"startedAt"`
	Ready     bool      `json:"ready"` // start-up is complete
	Docker    Docker    `json:"docker"`
	Image     Image     `json:"image"`
	Pool      Pool      `json:"pool"`
	Runs      []Run     `json:"runs"`
	Groups    int       `json:"groups"`
	Outbox    Outbox    `json:"outbox"`
	Channels  []Channel `json:"channels,omitempty"` // those that need an account
	Alarms    []string  `json:"alarms"`             // what the operator should look at
}

// Docker is the state of the container engine.
type Docker struct {
	Up      bool   `json:"up"`
	Version string `json:"version,omitempty"`
	Error   string `json:"error,omitempty"`
}

// Image is the state of the agent image.
type Image struct {
	Ref   string `json:"ref"`
	Ready bool   `json:"ready"`
	Error string `json:"error,omitempty"`
}

// Pool is the state of the slots.
type Pool struct {
	Limit   int      `json:"limit"`
	Used    int      `json:"used"`
	Waiting []string `json:"waiting"` // folders, first in line first
}

// Run is one live run.
type Run struct {
	ID        string         `json:"id"`
	Group     string         `json:"group"`
	Kind      string         `json:"kind"`
	State     berth.RunState `json:"state"`
	Container string         `json:"container,omitempty"`
	Turns     int            `json:"turns"`
	StartedAt time.Time      `json:"startedAt"`
	Since     time.Time      `json:"since"` // of the last change of state
}

// Outbox counts outgoing texts.
type Outbox struct {
	Pending int `json:"pending"`
	Dead    int `json:"dead"`
}

// Text is one outgoing text that is not sent yet.
type Text struct {
	ID        int64          `json:"id"`
	Chat      string         `json:"chat"`
	Kind      string         `json:"kind"`
	State     berth.OutState `json:"state"` // pending or dead
	Text      string         `json:"text"`
	Attempts  int            `json:"attempts"`
	CreatedAt time.Time      `json:"createdAt"`
	NotBefore *time.Time     `json:"notBefore,omitempty"` // the next attempt
	Error     string         `json:"error,omitempty"`
}

// Texts is the body of POST /v1/outbox/retry and /v1/outbox/drop. Without ids it
// means all that were given up.
type Texts struct {
	IDs []int64 `json:"ids,omitempty"`
}

// Refusal is one thing that a group's container asked for and did not get.
type Refusal struct {
	ID     int64     `json:"id"`
	At     time.Time `json:"at"`
	Group  string    `json:"group"`
	Run    string    `json:"run,omitempty"`
	What   string    `json:"what"` // such as ipc.message or egress
	Target string    `json:"target"`
	Reason string    `json:"reason"`
}

// Usage is what a group used of a model in one day.
type Usage struct {
	Day        string `json:"day"` // 2006-01-02, in the daemon's time zone
	Group      string `json:"group"`
	Provider   string `json:"provider"`
	Model      string `json:"model,omitempty"`
	Requests   int64  `json:"requests"`
	Input      int64  `json:"inputTokens"`
	Output     int64  `json:"outputTokens"`
	CacheRead  int64  `json:"cacheReadTokens"`
	CacheWrite int64  `json:"cacheWriteTokens"`
	Estimated  bool   `json:"estimated,omitempty"` // the provider did not say
}

// Group is one registered group.
type Group struct {
	JID             string                `json:"jid"`
	Name            string                `json:"name"`
	Folder          string                `json:"folder"`
	Trigger         string                `json:"trigger"` // the effective one
	RequiresTrigger bool                  `json:"requiresTrigger"`
	Main            bool                  `json:"main"`
	AddedAt         time.Time             `json:"addedAt"`
	Container       berth.ContainerConfig `json:"container"`
	Pending         int                   `json:"pending"` // messages no run has finished yet
	State           string                `json:"state,omitempty"`
	LastError       string                `json:"lastError,omitempty"`
	GivenUp         bool                  `json:"givenUp,omitempty"` // until the next message
	RetryAt         *time.Time            `json:"retryAt,omitempty"`
	Mounts          []MountVerdict        `json:"mounts,omitempty"` // of the last run that this daemon started
}

// MountVerdict says what became of one requested mount.
type MountVerdict struct {
	Request  berth.MountRequest `json:"request"`
	Target   string             `json:"target,omitempty"`
	ReadOnly bool               `json:"readonly"`
	Refused  string             `json:"refused,omitempty"` // the reason
}

// NewGroup is the body of POST /v1/groups.
type NewGroup struct {
	Folder          string                `json:"folder"`
	JID             string                `json:"jid,omitempty"`  // default console:<folder>
	Name            string                `json:"name,omitempty"` // default the folder
	Trigger         string                `json:"trigger,omitempty"`
	RequiresTrigger *bool                 `json:"requiresTrigger,omitempty"` // default true
	Container       berth.ContainerConfig `json:"container"`
}

// GroupChange is the body of PATCH /v1/groups/{folder}. What is nil stays; an empty
// text or a zero is the default again.
type GroupChange struct {
	Name            *string              `json:"name,omitempty"`
	Trigger         *string              `json:"trigger,omitempty"`
	RequiresTrigger *bool                `json:"requiresTrigger,omitempty"`
	Image           *string              `json:"image,omitempty"`
	Engine          *string              `json:"engine,omitempty"`
	Model           *string              `json:"model,omitempty"`
	MemoryMiB       *int64               `json:"memoryMiB,omitempty"`
	CPUs            *float64             `json:"cpus,omitempty"`
	Pids            *int64               `json:"pids,omitempty"`
	TimeoutMS       *int64               `json:"timeout,omitempty"`
	Egress          *[]string            `json:"egress,omitempty"`
	Unmount         []string             `json:"unmount,omitempty"` // host paths, or names in the container
	Mount           []berth.MountRequest `json:"mount,omitempty"`   // after Unmount; one with the same name takes its place
}

// NewBackup is the body of POST /v1/backup.
type NewBackup struct {
	File    string `json:"file"`              // absolute: the daemon writes it, with its own rights
	Replace bool   `json:"replace,omitempty"` // an existing file
}

// Backup is the answer of POST /v1/backup: the file is written and checked.
type Backup struct {
	File     string     `json:"file"`
	Bytes    int64      `json:"bytes"`
	Messages int        `json:"messages"`
	Groups   int        `json:"groups"`
	Newest   *time.Time `json:"newest,omitempty"` // of the newest message
}

// NewMessage is the body of POST /v1/messages.
type NewMessage struct {
	Group  string `json:"group"`
	Text   string `json:"text"`
	Sender string `json:"sender,omitempty"` // a person's name
	ID     string `json:"id,omitempty"`     // repeating one is harmless
}

// Accepted is the answer of POST /v1/messages: the message is stored.
type Accepted struct {
	Seq   int64 `json:"seq"`
	Wakes bool  `json:"wakes"` // false: kept as context until the trigger comes

	// Command says that the message was for Berth itself and is not stored: Seq is the
	// chat's last message before, and Texts what Berth says to it there.
	Command bool     `json:"command,omitempty"`
	Texts   []string `json:"texts,omitempty"`
}

// The values of Answer.State.
const (
	AnswerPending = "pending" // a run is, or will be, at it
	AnswerDone    = "done"
	AnswerFailed  = "failed"  // given up for now; Error says why
	AnswerContext = "context" // kept until a message with the trigger comes
)

// Answer is the answer of GET /v1/messages/{seq}/answer.
type Answer struct {
	State string   `json:"state"`
	Texts []string `json:"texts"` // so far, in order
	Run   string   `json:"run,omitempty"`
	Error string   `json:"error,omitempty"`
}

// The values of Event.Type.
const (
	EventMessage = "message"
	EventTyping  = "typing"
)

// Event is one line of GET /v1/groups/{folder}/chat.
type Event struct {
	Type    string         `json:"type"`
	Message *berth.Message `json:"message,omitempty"`
	Typing  bool           `json:"typing,omitempty"`
}

// Failure is the body of every answer that is no success.
type Failure struct {
	Error string `json:"error"`
	Kind  string `json:"kind"`
}
