package berth

import (
	"strings"
	"time"
	"unicode/utf8"
)

// The kinds of schedule.
const (
	ScheduleCron     = "cron"
	ScheduleInterval = "interval"
	ScheduleOnce     = "once"
)

// The sessions in which a task can run.
const (
	ContextGroup    = "group"    // the one of the chat
	ContextIsolated = "isolated" // one of its own
)

// What happens when runs were missed.
const (
	CatchUpOnce = "once" // one run, however many were missed
	CatchUpSkip = "skip" // none
)

// TaskStatus says whether a task will run.
type TaskStatus string

// The states of a task. Only an active one runs.
const (
	TaskActive    TaskStatus = "active"
	TaskPaused    TaskStatus = "paused"
	TaskCompleted TaskStatus = "completed" // a single time that is over
)

// Bounds of tasks.
const (
	MaxTasks     = 500 // of one group, active and paused
	TaskPreview  = 500 // characters of a prompt and a script in a list
	MaxTasksList = 2000
	TaskSummary  = 200 // characters of a result in the log
)

// Task is a prompt that a group's agent gets on time.
type Task struct {
	ID       string
	Folder   string // the group that runs it
	ChatJID  string
	Prompt   string
	Kind     string // ScheduleCron, ScheduleInterval or ScheduleOnce
	Value    string // see package schedule
	Zone     string // IANA name of the clocks that Value means
	Anchor   time.Time
	Context  string // ContextGroup or ContextIsolated
	Script   string // decides in the container whether the agent is woken; may be empty
	CatchUp  string // CatchUpOnce or CatchUpSkip
	Status   TaskStatus
	PausedBy string // why it was paused, for a person; may be empty
	// NextRun is zero unless the task is active.
	NextRun    time.Time
	LastRun    time.Time // zero before the first
	LastResult string
	CreatedBy  string // the folder of the group that asked for it, "operator" or HeartbeatOwner
	CreatedAt  time.Time
	// Origin is the idempotency key of the request that made it, or empty.
	Origin string
}

// The heartbeat: a task of main that the daemon itself keeps, by a setting.
const (
	HeartbeatID    = "heartbeat"
	HeartbeatOwner = "setting HEARTBEAT_INTERVAL_MINUTES" // as Task.CreatedBy; no folder has a blank in it
)

// IsHeartbeat reports whether the daemon keeps t.
func (t Task) IsHeartbeat() bool { return t.CreatedBy == HeartbeatOwner }

// TaskChange is what is to become of a task. What is nil stays.
type TaskChange struct {
	Prompt  *string
	Kind    *string
	Value   *string
	Zone    *string
	Context *string
	Script  *string
	CatchUp *string
}

// Due is a task whose time has come.
type Due struct {
	Folder  string
	ID      string
	ChatJID string
	At      time.Time
	CatchUp string
}

// TaskOutcome is what became of one time of a task.
type TaskOutcome string

// The outcomes of a task's run.
const (
	TaskRunning TaskOutcome = "running"
	TaskSuccess TaskOutcome = "success"
	TaskError   TaskOutcome = "error"
	TaskSkipped TaskOutcome = "skipped" // it was missed, and the task does not catch up
)

// TaskRun is one entry of a task's log.
type TaskRun struct {
	RunID        string    // empty: there was none
	DueAt        time.Time // zero: not known
	StartedAt    time.Time
	Duration     time.Duration // zero while it runs
	Outcome      TaskOutcome
	Result       string // its first TaskSummary characters
	Error        string
	InputTokens  int64 // as its agent said
	OutputTokens int64
}

// Audit is one refusal.
type Audit struct {
	ID     int64 // the store's order; 0 before it is stored
	At     time.Time
	Folder string // the group that was refused
	RunID  string // may be empty
	What   string // "ipc.schedule_task", "egress"
	Target string // chat, task, folder or host; the store keeps 256 characters
	Reason string // the store keeps 512 characters
}

// Usage is what calls to a model provider cost: of one request, or the sum of
// several of the same kind.
type Usage struct {
	At         time.Time // when the answer ended
	Folder     string
	RunID      string // not kept
	Provider   string
	Model      string // as the provider named it; may be empty
	Requests   int64
	Input      int64 // tokens that were not cached
	Output     int64
	CacheRead  int64
	CacheWrite int64
	Estimated  bool // the provider did not say
}

// Tokens returns the sum of all kinds.
func (u Usage) Tokens() int64 { return u.Input + u.Output + u.CacheRead + u.CacheWrite }

// Chat is a conversation that a channel knows.
type Chat struct {
	JID          string
	Name         string
	LastActivity time.Time // zero: none
	Folder       string    // of its group; empty: it is not registered
}

// ValidGroup returns an Invalid error unless g can be registered by its folder,
// chat, name and trigger.
func ValidGroup(g Group) error {
	if err := ValidFolder(g.Folder); err != nil {
		return err
	}
	for _, field := range []struct{ what, text string }{{"chat", g.JID}, {"name", g.Name}, {"trigger", g.Trigger}} {
		if len(field.text) > 256 || strings.ContainsFunc(field.text, func(r rune) bool { return r < ' ' || r == 0x7f || r == utf8.RuneError }) {
			return Errorf(Invalid, "the %s %.40q cannot be used: at most 256 bytes and no control characters", field.what, field.text)
		}
	}
	if !strings.ContainsAny(g.JID, "@:") {
		return Errorf(Invalid, "the chat %.80q is none of a channel: give an id such as 1203…@g.us", g.JID)
	}
	if owner, ok := strings.CutPrefix(g.JID, "console:"); ok && owner != g.Folder {
		return Errorf(Invalid, "chat %.80q belongs to the folder %.64q", g.JID, owner)
	}
	return nil
}
