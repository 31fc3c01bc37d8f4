package web

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"berth/orchestrator/internal/berth"
)

// Task is one task of a group. Its words are those of the requests that
// containers make.
type Task struct {
	ID         string           `json:"id"`
	Group      string           `json:"group"`
	Prompt     string           `json:"prompt"` // in a list its beginning
	Type       string           `json:"schedule_type"`
	Value      string           `json:"schedule_value"`
	Zone       string           `json:"time_zone"`
	Context    string           `json:"context_mode"`
	Script     string           `json:"script,omitempty"` // in a list its beginning
	CatchUp    string           `json:"catch_up"`
	Status     berth.TaskStatus `json:"status"`
	PausedBy   string           `json:"pausedBy,omitempty"` // a group, or the reason
	NextRun    *time.Time       `json:"nextRun,omitempty"`
	LastRun    *time.Time       `json:"lastRun,omitempty"`
	LastResult string           `json:"lastResult,omitempty"` // its beginning
	CreatedBy  string           `json:"createdBy"`
	CreatedAt  time.Time        `json:"createdAt"`
}

// NewTask is the body of POST /v1/tasks.
type NewTask struct {
	ID      string `json:"id,omitempty"` // default a random one
	Group   string `json:"group"`
	Prompt  string `json:"prompt"`
	Type    string `json:"schedule_type"`
	Value   string `json:"schedule_value"`
	Zone    string `json:"time_zone,omitempty"`    // default the daemon's
	Context string `json:"context_mode,omitempty"` // default isolated
	Script  string `json:"script,omitempty"`
	CatchUp string `json:"catch_up,omitempty"` // default once
}

// TaskChange is the body of PATCH /v1/tasks/{id}. What is left out stays.
type TaskChange struct {
	Prompt  *string `json:"prompt,omitempty"`
	Type    *string `json:"schedule_type,omitempty"`
	Value   *string `json:"schedule_value,omitempty"`
	Zone    *string `json:"time_zone,omitempty"`
	Context *string `json:"context_mode,omitempty"`
	Script  *string `json:"script,omitempty"` // empty: none any more
	CatchUp *string `json:"catch_up,omitempty"`
}

// TaskRun is one entry of a task's log.
type TaskRun struct {
	Run          string            `json:"run,omitempty"` // empty: there was none
	DueAt        *time.Time        `json:"dueAt,omitempty"`
	StartedAt    time.Time         `json:"startedAt"`
	DurationMS   int64             `json:"durationMs"`
	Status       berth.TaskOutcome `json:"status"`
	Result       string            `json:"result,omitempty"` // its beginning
	Error        string            `json:"error,omitempty"`
	InputTokens  int64             `json:"inputTokens,omitempty"`
	OutputTokens int64             `json:"outputTokens,omitempty"`
}

// TaskVerb is what can be done with a task.
type TaskVerb string

// The verbs.
const (
	TaskRunNow TaskVerb = "run" // as if it were due
	TaskPause  TaskVerb = "pause"
	TaskResume TaskVerb = "resume"
	TaskCancel TaskVerb = "cancel"
)

// TaskDesk is what the control socket gives access to of the tasks. Groups may use
// the same ids: a folder that is empty means the only group that has such a task,
// and it fails with berth.Conflict if there are several.
type TaskDesk interface {
	// Tasks returns the tasks of a group, or all if folder is empty, the next one
	// first.
	Tasks(ctx context.Context, folder string) ([]Task, error)
	AddTask(context.Context, NewTask) (Task, error)
	Task(ctx context.Context, folder, id string) (Task, error)
	UpdateTask(ctx context.Context, folder, id string, change TaskChange) (Task, error)
	ChangeTask(ctx context.Context, verb TaskVerb, folder, id string) (Task, error)
	// TaskRuns returns up to limit entries, newest first.
	TaskRuns(ctx context.Context, folder, id string, limit int) ([]TaskRun, error)
}

func handleTasks(handle func(pattern string, fn func(*http.Request) (any, error)), b TaskDesk) {
	handle("GET /v1/tasks", func(r *http.Request) (any, error) { return b.Tasks(r.Context(), r.FormValue("group")) })
	handle("POST /v1/tasks", func(r *http.Request) (any, error) {
		in, err := decode[NewTask](r)
		if err != nil {
			return nil, err
		}
		return b.AddTask(r.Context(), in)
	})
	handle("GET /v1/tasks/{id}", func(r *http.Request) (any, error) {
		return b.Task(r.Context(), r.FormValue("group"), r.PathValue("id"))
	})
	handle("PATCH /v1/tasks/{id}", func(r *http.Request) (any, error) {
		in, err := decode[TaskChange](r)
		if err != nil {
			return nil, err
		}
		return b.UpdateTask(r.Context(), r.FormValue("group"), r.PathValue("id"), in)
	})
	handle("GET /v1/tasks/{id}/log", func(r *http.Request) (any, error) {
		limit, err := strconv.Atoi(r.FormValue("limit"))
		if err != nil {
			return nil, berth.Errorf(berth.Invalid, "limit %q is no number", r.FormValue("limit"))
		}
		return b.TaskRuns(r.Context(), r.FormValue("group"), r.PathValue("id"), limit)
	})
	handle("POST /v1/tasks/{id}/{verb}", func(r *http.Request) (any, error) {
		return b.ChangeTask(r.Context(), TaskVerb(r.PathValue("verb")), r.FormValue("group"), r.PathValue("id"))
	})
}

var _ TaskDesk = (*Client)(nil)

// Tasks returns the tasks of a group, or all if folder is empty.
func (c *Client) Tasks(ctx context.Context, folder string) ([]Task, error) {
	return call[[]Task](ctx, c, "GET", "/v1/tasks?group="+url.QueryEscape(folder), nil)
}

// AddTask makes a task.
func (c *Client) AddTask(ctx context.Context, t NewTask) (Task, error) {
	return call[Task](ctx, c, "POST", "/v1/tasks", t)
}

// Task returns a task; folder may be empty if no other group has one of that id.
func (c *Client) Task(ctx context.Context, folder, id string) (Task, error) {
	return call[Task](ctx, c, "GET", taskPath(folder, id, ""), nil)
}

// UpdateTask changes a task; folder is as for Task.
func (c *Client) UpdateTask(ctx context.Context, folder, id string, change TaskChange) (Task, error) {
	return call[Task](ctx, c, "PATCH", taskPath(folder, id, ""), change)
}

// ChangeTask does something with a task; folder is as for Task.
func (c *Client) ChangeTask(ctx context.Context, verb TaskVerb, folder, id string) (Task, error) {
	return call[Task](ctx, c, "POST", taskPath(folder, id, "/"+url.PathEscape(string(verb))), nil)
}

// TaskRuns returns up to limit entries of a task's log, newest first; folder is
// as for Task.
func (c *Client) TaskRuns(ctx context.Context, folder, id string, limit int) ([]TaskRun, error) {
	return call[[]TaskRun](ctx, c, "GET", taskPath(folder, id, "/log")+fmt.Sprintf("&limit=%d", limit), nil)
}

func taskPath(folder, id, what string) string {
	return "/v1/tasks/" + url.PathEscape(id) + what + "?group=" + url.QueryEscape(folder)
}
