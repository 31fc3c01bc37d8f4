package ipc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/turn"
)

// verb is what a container can ask for. Whatever is not in verbs is refused.
type verb struct {
	schema
	mainOnly bool
	tasks    bool   // only where somebody runs tasks
	target   string // the field that the operator is told about
	do       func(*inbox, context.Context, *request) (result any, err error)
}

var verbs = map[string]verb{
	"message":   {schema: schema{required: []string{"chatJid", "text"}, optional: fields("sender")}, target: "chatJid", do: (*inbox).message},
	"send_file": {schema: schema{required: []string{"chatJid", "path"}, optional: fields("caption")}, target: "chatJid", do: (*inbox).sendFile},
	"react":     {schema: schema{required: []string{"chatJid", "emoji"}, optional: map[string]kind{"messageId": anything}}, target: "chatJid", do: (*inbox).react},

	"schedule_task": {schema: schema{required: []string{"prompt", "schedule_type", "schedule_value"}, optional: fields("targetJid", "taskId", "time_zone", "context_mode", "script", "catch_up")},
		tasks: true, target: "targetJid", do: (*inbox).scheduleTask},
	"update_task": {schema: schema{required: []string{"taskId"}, optional: fields("targetJid", "prompt", "schedule_type", "schedule_value", "time_zone", "context_mode", "script", "catch_up")},
		tasks: true, target: "taskId", do: (*inbox).updateTask},
	"pause_task":   {schema: oneTask, tasks: true, target: "taskId", do: (*inbox).pauseTask},
	"resume_task":  {schema: oneTask, tasks: true, target: "taskId", do: (*inbox).resumeTask},
	"cancel_task":  {schema: oneTask, tasks: true, target: "taskId", do: (*inbox).cancelTask},
	"task_history": {schema: oneTask, tasks: true, target: "taskId", do: (*inbox).taskHistory},
	"list_tasks":   {tasks: true, do: (*inbox).listTasks},

	"register_group": {schema: schema{required: []string{"jid", "name", "folder", "trigger"}, optional: map[string]kind{"requiresTrigger": aBool, "containerConfig": anything}},
		mainOnly: true, target: "jid", do: (*inbox).registerGroup},
	"refresh_groups": {mainOnly: true, do: (*inbox).refreshGroups},
	"list_groups":    {do: (*inbox).listGroups},

	"remember":       {schema: schema{required: []string{"fact"}, optional: fields("group")}, target: "group", do: (*inbox).remember},
	"update_memory":  {schema: schema{required: []string{"fact"}, optional: map[string]kind{"memoryId": anything, "group": aText}}, target: "group", do: (*inbox).updateMemory},
	"forget":         {schema: schema{optional: map[string]kind{"memoryId": anything, "group": aText}}, target: "group", do: (*inbox).forget},
	"list_memory":    {schema: schema{optional: fields("group")}, target: "group", do: (*inbox).listMemory},
	"search_history": {schema: schema{required: []string{"query"}, optional: map[string]kind{"group": aText, "before": anything, "limit": anything}}, target: "group", do: (*inbox).searchHistory},
}

// oneTask names a task. Groups may use the same ids, so main may have to name the
// group as well.
var oneTask = schema{required: []string{"taskId"}, optional: fields("targetJid")}

// fields makes texts that may be left out.
func fields(names ...string) map[string]kind {
	out := make(map[string]kind, len(names))
	for _, name := range names {
		out[name] = aText
	}
	return out
}

// do carries out a request, if the group may. An error that is a berth.Error,
// and not of kind Unavailable, is its answer.
func (b *inbox) do(ctx context.Context, r *request) (any, error) {
	name, err := r.text("type")
	if err != nil {
		return nil, err
	}
	v, known := verbs[name]
	if !known {
		r.target = name
		return nil, berth.Errorf(berth.Invalid, "there is no request of the type %.40q", name)
	}
	r.verb = name
	r.target, _ = r.text(v.target)
	own, registered := b.Groups.Group(b.group.Folder)
	switch {
	case !registered || own.JID != b.group.JID:
		return nil, berth.Errorf(berth.Denied, "group %s is not registered", b.group.Folder)
	case v.mainOnly && !own.IsMain():
		return nil, berth.Errorf(berth.Denied, "only the main group may ask for %s", name)
	case v.tasks && b.TasksChanged == nil:
		return nil, berth.Errorf(berth.Denied, "tasks are not available in this version")
	}
	if err := r.check(v.schema); err != nil {
		return nil, err
	}
	return v.do(b, ctx, r)
}

// targetChat returns the chat that something is for: a group's own, or any
// registered one if the group is main.
func (b *inbox) targetChat(r *request) (string, error) {
	chat := r.get("chatJid")
	switch {
	case chat != b.group.JID && !b.group.IsMain():
		return "", berth.Errorf(berth.Denied, "group %s may write to its own chat only", b.group.Folder)
	case !b.Groups.Registered(chat):
		return "", berth.Errorf(berth.Denied, "chat %.80q is not registered", chat)
	}
	return chat, nil
}

// message queues a text.
func (b *inbox) message(ctx context.Context, r *request) (any, error) {
	chat, err := b.targetChat(r)
	if err != nil {
		return nil, err
	}
	text, now := r.get("text"), time.Now()
	var out []berth.Outgoing
	for i, text := range turn.Split(turn.Visible(text)) {
		out = append(out, berth.Outgoing{
			ChatJID: chat, Key: fmt.Sprintf("%s/%d", r.key, i), Kind: berth.OutMessage, Text: text,
			MessageID: berth.NewID(10), CreatedAt: now, OwnTurn: chat == b.group.JID,
		})
	}
	result := struct {
		Texts int `json:"texts"` // that will be sent
	}{len(out)}
	if len(out) == 0 {
		return result, nil
	}
	return result, b.Store.AddOutgoing(ctx, out...)
}

func (b *inbox) scheduleTask(ctx context.Context, r *request) (any, error) {
	g, err := b.targetGroup(r)
	if err != nil {
		return nil, err
	}
	t := berth.Task{
		ID: r.get("taskId"), Folder: g.Folder, ChatJID: g.JID, Prompt: r.get("prompt"), Script: r.get("script"),
		Kind: r.get("schedule_type"), Value: r.get("schedule_value"), Zone: r.get("time_zone"),
		Context: contextMode(r.get("context_mode")), CatchUp: r.get("catch_up"),
		CreatedBy: b.group.Folder, CreatedAt: time.Now(), Origin: r.key,
	}
	if t.ID == "" {
		t.ID = "task-" + berth.NewID(6)
	}
	if t.Zone == "" {
		t.Zone = b.Zone.String()
	}
	if t.CatchUp == "" {
		t.CatchUp = berth.CatchUpOnce
	}
	// The ancestors' tools choose the id, and tell it to the agent.
	if !isID(t.ID) {
		return nil, berth.Errorf(berth.Invalid, "taskId is not 1 to 64 letters, digits, - or _")
	}
	if err := checkCatchUp(t.CatchUp); err != nil {
		return nil, err
	}
	return b.changed(ctx, func() (berth.Task, error) { return b.Store.AddTask(ctx, t) })
}

// targetGroup returns the group that a task is for: the own one, or any if main
// asks.
func (b *inbox) targetGroup(r *request) (berth.Group, error) {
	chat := r.get("targetJid")
	if chat == "" || chat == b.group.JID {
		return b.group, nil
	}
	if !b.group.IsMain() {
		return berth.Group{}, berth.Errorf(berth.Denied, "group %s may schedule tasks for itself only", b.group.Folder)
	}
	for _, g := range b.Groups.Groups() {
		if g.JID == chat {
			return g, nil
		}
	}
	return berth.Group{}, berth.Errorf(berth.Denied, "chat %.80q is not registered", chat)
}

// contextMode takes nothing but the exact word for the chat's own session.
func contextMode(given string) string {
	if given == berth.ContextGroup {
		return given
	}
	return berth.ContextIsolated
}

func checkCatchUp(given string) error {
	if given != berth.CatchUpOnce && given != berth.CatchUpSkip {
		return berth.Errorf(berth.Invalid, "catch_up is neither once nor skip")
	}
	return nil
}

func (b *inbox) updateTask(ctx context.Context, r *request) (any, error) {
	c := berth.TaskChange{
		Prompt: r.optional("prompt"), Kind: r.optional("schedule_type"), Value: r.optional("schedule_value"), Zone: r.optional("time_zone"),
		Context: r.optional("context_mode"), Script: r.optional("script"), CatchUp: r.optional("catch_up"),
	}
	return b.change(ctx, r, func(t berth.Task) (berth.Task, error) {
		switch {
		case c == (berth.TaskChange{}):
			return t, berth.Errorf(berth.Invalid, "update_task names nothing to change")
		case c.Prompt != nil && strings.TrimSpace(*c.Prompt) == "":
			return t, berth.Errorf(berth.Invalid, "a task needs a prompt")
		}
		if c.Context != nil {
			*c.Context = contextMode(*c.Context)
		}
		if c.CatchUp != nil {
			if err := checkCatchUp(*c.CatchUp); err != nil {
				return t, err
			}
		}
		return b.Store.UpdateTask(ctx, t.Folder, t.ID, c, time.Now(), r.key)
	})
}

func (b *inbox) pauseTask(ctx context.Context, r *request) (any, error) {
	return b.change(ctx, r, func(t berth.Task) (berth.Task, error) {
		return b.Store.PauseTask(ctx, t.Folder, t.ID, b.group.Folder, r.key)
	})
}

func (b *inbox) resumeTask(ctx context.Context, r *request) (any, error) {
	return b.change(ctx, r, func(t berth.Task) (berth.Task, error) {
		return b.Store.ResumeTask(ctx, t.Folder, t.ID, time.Now(), r.key)
	})
}

func (b *inbox) cancelTask(ctx context.Context, r *request) (any, error) {
	cancel := func(t berth.Task) (berth.Task, error) { return b.Store.CancelTask(ctx, t.Folder, t.ID, r.key) }
	result, err := b.change(ctx, r, cancel)
	if !notFound(err) {
		return result, err
	}
	// One that was cancelled before is what the agent wants it to be.
	g, denied := b.targetGroup(r)
	if denied != nil {
		return nil, denied
	}
	t, again := cancel(berth.Task{Folder: g.Folder, ID: r.get("taskId")})
	if notFound(again) {
		return nil, err
	}
	return describe(t), again
}

func notFound(err error) bool {
	known, ok := errors.AsType[*berth.Error](err)
	return ok && known.Kind == berth.NotFound
}

// change changes the task that a request names, once: after a crash the same
// request comes again, and is told what became of it.
func (b *inbox) change(ctx context.Context, r *request, do func(berth.Task) (berth.Task, error)) (any, error) {
	if t, done, err := b.Store.TaskChangedBy(ctx, r.key); done || err != nil {
		return describe(t), err
	}
	t, err := b.ownTask(ctx, r)
	if err != nil {
		return nil, err
	}
	return b.changed(ctx, func() (berth.Task, error) { return do(t) })
}

// ownTask returns the task that a request names, if it is the group's, or main
// asks. A container does not learn that others have such a task.
func (b *inbox) ownTask(ctx context.Context, r *request) (berth.Task, error) {
	id := r.get("taskId")
	g, err := b.targetGroup(r)
	if err != nil {
		return berth.Task{}, err
	}
	t, err := b.Store.Task(ctx, g.Folder, id)
	if !notFound(err) || r.has("targetJid") {
		return t, err
	}
	others, failed := b.Store.TasksNamed(ctx, id)
	switch {
	case failed != nil:
		return t, failed
	case len(others) == 0:
	case !b.group.IsMain():
		r.secret = errors.New("it is a task of group " + others[0].Folder)
	case len(others) == 1:
		return others[0], nil
	default:
		err = berth.Errorf(berth.Conflict, "%d groups have a task %.80q: give the chat of one as targetJid", len(others), id)
	}
	return t, err
}

// changed carries out a change of a task and tells everybody whom it concerns.
func (b *inbox) changed(ctx context.Context, do func() (berth.Task, error)) (any, error) {
	t, err := do()
	if err != nil {
		return nil, err
	}
	b.TasksChanged()
	b.Refresh(t.Folder)
	b.tasksSnapshot(ctx) // before the answer: who reads it then reads on here
	return describe(t), nil
}

func (b *inbox) listTasks(ctx context.Context, _ *request) (any, error) {
	tasks, err := b.visibleTasks(ctx)
	return struct {
		Tasks []taskEntry `json:"tasks"`
	}{tasks}, err
}

// maxHistory bounds the runs of a task that a container is told.
const maxHistory = 20

func (b *inbox) taskHistory(ctx context.Context, r *request) (any, error) {
	t, err := b.ownTask(ctx, r)
	if err != nil {
		return nil, err
	}
	runs, err := b.Store.TaskRuns(ctx, t.Folder, t.ID, maxHistory)
	out := struct {
		TaskID string     `json:"taskId"`
		Group  string     `json:"group"`
		Runs   []runEntry `json:"runs"` // newest first
	}{t.ID, t.Folder, make([]runEntry, 0, len(runs))}
	for _, run := range runs {
		out.Runs = append(out.Runs, runEntry{
			StartedAt: run.StartedAt.UTC().Format(stampLayout), Seconds: run.Duration.Seconds(), Status: run.Outcome, Result: run.Result, Error: run.Error,
		})
	}
	return out, err
}

func (b *inbox) listGroups(ctx context.Context, _ *request) (any, error) {
	groups, err := b.visibleGroups(ctx)
	return struct {
		Groups []groupEntry `json:"groups"`
	}{groups}, err
}

func (b *inbox) refreshGroups(ctx context.Context, r *request) (any, error) {
	if b.SyncChats != nil {
		if err := b.SyncChats(ctx); err != nil {
			r.secret = err
			return nil, berth.Errorf(berth.Internal, "a channel did not say which chats there are: try again later")
		}
	}
	groups, err := b.visibleGroups(ctx)
	if err != nil {
		return nil, err
	}
	b.groupsSnapshot(ctx)
	return struct {
		Groups int `json:"groups"`
	}{len(groups)}, nil
}

// registerGroup makes a group of a chat. What its container may have is the
// operator's to decide, not a file's.
func (b *inbox) registerGroup(ctx context.Context, r *request) (any, error) {
	requires, _ := r.flag("requiresTrigger")
	g := berth.Group{
		JID: strings.TrimSpace(r.get("jid")), Name: strings.TrimSpace(r.get("name")), Folder: r.get("folder"), Trigger: strings.TrimSpace(r.get("trigger")),
		RequiresTrigger: requires == nil || *requires, AddedAt: time.Now(),
	}
	if err := berth.ValidGroup(g); err != nil {
		return nil, err
	}
	if strings.EqualFold(g.Folder, berth.MainFolder) {
		return nil, berth.Errorf(berth.Denied, "no request can register the main group")
	}
	var config map[string]any
	if r.has("containerConfig") && (json.Unmarshal(r.fields["containerConfig"], &config) != nil || len(config) > 0) {
		return nil, berth.Errorf(berth.Denied, "mounts, limits and time-outs of a group are set by the operator: leave containerConfig out")
	}
	err := b.Groups.AddGroup(ctx, g)
	if known, ok := errors.AsType[*berth.Error](err); ok && known.Kind == berth.Conflict {
		// After a crash the same request comes again.
		have, ok := b.Groups.Group(g.Folder)
		if ok && have.JID == g.JID && have.Name == g.Name && have.Trigger == g.Trigger && have.RequiresTrigger == g.RequiresTrigger {
			err = nil
		}
	}
	if err != nil {
		return nil, err
	}
	b.Refresh(b.group.Folder)
	b.groupsSnapshot(ctx)
	return struct {
		JID             string `json:"jid"`
		Folder          string `json:"folder"`
		RequiresTrigger bool   `json:"requiresTrigger"`
	}{g.JID, g.Folder, g.RequiresTrigger}, nil
}
