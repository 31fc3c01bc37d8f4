package ipc

import (
	"context"
	"time"

	"go.uber.org/zap"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/workspace"
)

// maxChats bounds how many chats main is shown.
const maxChats = 1000

const stampLayout = "2006-01-02T15:04:05.000Z"

// taskEntry is a task as a container sees it. The first fields are the
// ancestors'.
type taskEntry struct {
	ID          string           `json:"id"`
	GroupFolder string           `json:"groupFolder"`
	Prompt      string           `json:"prompt"` // the first berth.TaskPreview characters
	Type        string           `json:"schedule_type"`
	Value       string           `json:"schedule_value"`
	Status      berth.TaskStatus `json:"status"`
	NextRun     *string          `json:"next_run"` // UTC; null: none
	TimeZone    string           `json:"time_zone"`
	Context     string           `json:"context_mode"`
	CatchUp     string           `json:"catch_up"`
	LastResult  string           `json:"last_result,omitempty"`
}

// runEntry is a run of a task as a container sees it.
type runEntry struct {
	StartedAt string            `json:"started_at"` // UTC
	Seconds   float64           `json:"seconds"`
	Status    berth.TaskOutcome `json:"status"`
	Result    string            `json:"result,omitempty"` // its beginning
	Error     string            `json:"error,omitempty"`
}

// groupEntry is a chat as a container sees it. The first fields are the
// ancestors'.
type groupEntry struct {
	JID          string `json:"jid"`
	Name         string `json:"name"`
	LastActivity string `json:"lastActivity"` // UTC; empty: none
	IsRegistered bool   `json:"isRegistered"`
	Folder       string `json:"folder,omitempty"`
}

// taskResult answers a request about one task.
type taskResult struct {
	TaskID  string           `json:"taskId"`
	Group   string           `json:"group"`
	Status  berth.TaskStatus `json:"status"`
	NextRun *string          `json:"nextRun"` // by the clocks of the task's zone; null: none
}

func describe(t berth.Task) taskResult {
	r := taskResult{TaskID: t.ID, Group: t.Folder, Status: t.Status}
	if !t.NextRun.IsZero() {
		zone, err := time.LoadLocation(t.Zone)
		if err != nil {
			zone = time.UTC
		}
		next := t.NextRun.In(zone).Format(time.RFC3339)
		r.NextRun = &next
	}
	return r
}

// visibleTasks returns the tasks of the group, or all for main.
func (b *inbox) visibleTasks(ctx context.Context) ([]taskEntry, error) {
	folder := b.group.Folder
	if b.group.IsMain() {
		folder = ""
	}
	tasks, err := b.Store.Tasks(ctx, folder)
	out := make([]taskEntry, 0, len(tasks))
	for _, t := range tasks {
		e := taskEntry{
			ID: t.ID, GroupFolder: t.Folder, Prompt: t.Prompt, Type: t.Kind, Value: t.Value, Status: t.Status,
			TimeZone: t.Zone, Context: t.Context, CatchUp: t.CatchUp, LastResult: t.LastResult,
		}
		if !t.NextRun.IsZero() {
			e.NextRun = new(t.NextRun.UTC().Format(stampLayout))
		}
		out = append(out, e)
	}
	return out, err
}

// visibleGroups returns the group itself, or all chats for main.
func (b *inbox) visibleGroups(ctx context.Context) ([]groupEntry, error) {
	if !b.group.IsMain() {
		g, ok := b.Groups.Group(b.group.Folder)
		if !ok {
			return []groupEntry{}, nil
		}
		return []groupEntry{{JID: g.JID, Name: g.Name, IsRegistered: true, Folder: g.Folder}}, nil
	}
	chats, err := b.Store.Chats(ctx, maxChats)
	out := make([]groupEntry, 0, len(chats))
	for _, c := range chats {
		e := groupEntry{JID: c.JID, Name: c.Name, IsRegistered: c.Folder != "", Folder: c.Folder}
		if !c.LastActivity.IsZero() {
			e.LastActivity = c.LastActivity.UTC().Format(stampLayout)
		}
		out = append(out, e)
	}
	return out, err
}

// snapshots writes what the container may read without asking.
func (b *inbox) snapshots(ctx context.Context) {
	b.tasksSnapshot(ctx)
	b.groupsSnapshot(ctx)
}

func (b *inbox) tasksSnapshot(ctx context.Context) {
	tasks, err := b.visibleTasks(ctx)
	b.snapshot(workspace.TasksSnapshot, tasks, err)
}

func (b *inbox) groupsSnapshot(ctx context.Context) {
	groups, err := b.visibleGroups(ctx)
	b.snapshot(workspace.GroupsSnapshot, struct {
		Groups   []groupEntry `json:"groups"`
		LastSync string       `json:"lastSync"`
	}{groups, time.Now().UTC().Format(stampLayout)}, err)
}

// snapshot writes one; a failure leaves the one that is there.
func (b *inbox) snapshot(name string, v any, err error) {
	var data []byte
	if err == nil {
		data, err = protocol.Marshal(v)
	}
	if err == nil {
		err = b.files.WriteSnapshot(name, data)
	}
	if err != nil {
		b.log.Warn("write a snapshot", zap.String("file", name), zap.Error(err))
	}
}
