package tools

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/google/jsonschema-go/jsonschema"
)

// tool is one that asks the host.
type tool struct {
	name   string
	about  string // for a model
	main   bool   // of the main group alone
	params []param
	dir    string // where its requests go
	verb   string // their type
	// request changes what is asked; the arguments are in it under their fields'
	// names. It may be nil.
	request func(o Options, fields map[string]any)
	say     func(json.RawMessage) (string, error)
}

// param is one argument. It is a text unless it says otherwise.
type param struct {
	name     string
	field    string // of the request; empty: the same name
	about    string
	typ      string // JSON type
	required bool
	main     bool // of the main group alone
	enum     []any
}

func (p param) key() string {
	if p.field != "" {
		return p.field
	}
	return p.name
}

func (t tool) schema(main bool) *jsonschema.Schema {
	s := &jsonschema.Schema{Type: "object", Properties: map[string]*jsonschema.Schema{}, AdditionalProperties: nothing()}
	for _, p := range t.params {
		if p.main && !main {
			continue
		}
		one := &jsonschema.Schema{Type: "string", Description: p.about, Enum: p.enum}
		switch {
		case p.typ == "array":
			one.Type, one.Items = p.typ, &jsonschema.Schema{Type: "string"}
		case p.typ != "":
			one.Type = p.typ
		case p.required:
			one.MinLength = new(1)
		}
		s.Properties[p.name] = one
		s.PropertyOrder = append(s.PropertyOrder, p.name)
		if p.required {
			s.Required = append(s.Required, p.name)
		}
	}
	return s
}

// nothing is the schema that no value fits.
func nothing() *jsonschema.Schema { return &jsonschema.Schema{Not: &jsonschema.Schema{}} }

func (t tool) call(ctx context.Context, h *host, o Options, args map[string]any) (string, error) {
	fields := map[string]any{"type": t.verb}
	for _, p := range t.params {
		if value, ok := args[p.name]; ok {
			fields[p.key()] = value
		}
	}
	if t.request != nil {
		t.request(o, fields)
	}
	result, err := h.ask(ctx, t.dir, fields)
	if err != nil {
		return "", err
	}
	return t.say(result)
}

var (
	chatParam  = param{name: "chat", field: "chatJid", main: true, about: "Chat to use instead of the own one, such as 1203…@g.us: any registered one, see list_groups."}
	groupParam = param{name: "group", main: true, about: `Folder of another group to act for, or "global" for what all groups share. Leave it out for the own group.`}
	taskParam  = param{name: "task_id", field: "taskId", required: true, about: "Id of the task, as in list_tasks."}
	ownerParam = param{name: "chat", field: "targetJid", main: true, about: "Chat of the group that has the task, if several have one of that id. Leave it out otherwise."}
	idParam    = param{name: "memory_id", field: "memoryId", typ: "integer", required: true, about: "Id of the memory, as in list_memory."}

	kindParam = param{name: "schedule_type", enum: []any{"cron", "interval", "once"},
		about: "cron: at times of the calendar. interval: again and again after a fixed time. once: a single time."}
	valueParam = param{name: "schedule_value",
		about: `For cron five fields such as "0 9 * * 1-5", or @daily and the like. For interval milliseconds as digits, at least "60000". For once a local time such as "2026-03-01T15:30:00".`}
	promptParam  = param{name: "prompt", about: "What is to be done then, in words that can be understood without this conversation."}
	zoneParam    = param{name: "time_zone", about: "IANA name of the zone whose clocks count, such as Europe/Berlin. Leave it out for the usual one."}
	sessionParam = param{name: "context_mode", enum: []any{"group", "isolated"},
		about: "group: the task runs in this conversation and knows it. isolated: it begins with an empty one. Usually group."}
	scriptParam = param{name: "script",
		about: `Shell command that is run first, without a model. The last line that it prints, {"wakeAgent": true or false, "data": …}, decides whether you are woken for the task. Leave it out to be woken always.`}
	catchUpParam = param{name: "catch_up", enum: []any{"once", "skip"},
		about: "When times were missed because the host was down: once makes up for them by one run, skip does not. Usually once."}
)

func must(p param) param { p.required = true; return p }

const (
	inMessages = "messages"
	inTasks    = "tasks"
)

// table is every tool that asks the host. One whose verb the host does not know is
// refused by the host, which says so.
var table = []tool{
	{
		name: "send_message", dir: inMessages, verb: "message",
		about:   "Send a message to the chat at once, while you go on working: for progress, or several messages. Your final answer is sent by itself; do not send it with this tool too. In a scheduled task nothing else is needed to report a result either.",
		params:  []param{{name: "text", required: true, about: "The message, in Markdown."}, chatParam},
		request: ownChat, say: saySent,
	},
	{
		name: "send_file", dir: inMessages, verb: "send_file",
		about:   "Send a file from your working folder to the chat, as it is now. At most 64 MiB.",
		params:  []param{{name: "path", required: true, about: "Path of the file, below /workspace/group."}, {name: "caption", about: "Text to go with it, at most one message long."}, chatParam},
		request: ownChat, say: sayFile,
	},
	{
		name: "react", dir: inMessages, verb: "react",
		about:   "React to a message of the chat with an emoji.",
		params:  []param{{name: "message_id", field: "messageId", required: true, about: "Id of the message, as in <message id=…>: a number."}, {name: "emoji", required: true, about: "One emoji."}, chatParam},
		request: ownChat, say: sayDone("The reaction is on its way."),
	},
	{
		name: "ask_user", dir: inMessages, verb: "message",
		about: "Ask the people in the chat a question. It is sent at once and this tool does not wait: end your turn after it. The answer comes as the next message.",
		params: []param{
			{name: "question", field: "text", required: true, about: "The question."},
			{name: "options", typ: "array", about: "Answers to choose from, if there are any; they are numbered for the reader."},
		},
		request: func(o Options, fields map[string]any) {
			ownChat(o, fields)
			question, _ := fields["text"].(string)
			options, _ := fields["options"].([]any)
			delete(fields, "options")
			for i, option := range options {
				question += fmt.Sprintf("\n%d. %v", i+1, option)
			}
			fields["text"] = question
		},
		say: sayDone("The question is on its way. End your turn now: the answer comes as the next message."),
	},
	{
		name: "schedule_task", dir: inTasks, verb: "schedule_task",
		about:  "Have something done later or regularly: at the time you are woken with the prompt, and your answer goes to the chat. Returns the task's id and its next run.",
		params: []param{must(promptParam), must(kindParam), must(valueParam), zoneParam, sessionParam, scriptParam, catchUpParam, {name: "chat", field: "targetJid", main: true, about: "Chat of another registered group that is to do it. Leave it out for the own one."}},
		request: func(_ Options, fields map[string]any) {
			if _, ok := fields["context_mode"]; !ok {
				fields["context_mode"] = "group"
			}
		},
		say: sayTask("is scheduled"),
	},
	{
		name: "update_task", dir: inTasks, verb: "update_task",
		about:  "Change a scheduled task. What you leave out stays as it is. Returns its next run.",
		params: []param{taskParam, promptParam, kindParam, valueParam, zoneParam, sessionParam, scriptParam, catchUpParam, ownerParam}, say: sayTask("is changed"),
	},
	{name: "list_tasks", dir: inTasks, verb: "list_tasks", about: "List the scheduled tasks with their ids, schedules and next runs.", say: sayTasks},
	{name: "pause_task", dir: inTasks, verb: "pause_task", about: "Keep a task from running until resume_task.", params: []param{taskParam, ownerParam}, say: sayTask("is paused")},
	{name: "resume_task", dir: inTasks, verb: "resume_task", about: "Let a paused task run again. What it missed is not made up for.", params: []param{taskParam, ownerParam}, say: sayTask("runs again")},
	{name: "cancel_task", dir: inTasks, verb: "cancel_task", about: "End a task for good.", params: []param{taskParam, ownerParam}, say: sayTask("is cancelled")},
	{
		name: "task_history", dir: inTasks, verb: "task_history", about: "Show when a task ran and what came of it, newest first.",
		params: []param{taskParam, ownerParam}, say: sayRuns,
	},
	{
		name: "remember", dir: inTasks, verb: "remember",
		about:  "Remember one durable fact about the people or the work here, in one short sentence. Every later conversation of this group is told it. Not for what is of use today only, and never for passwords. Longer notes belong into AGENTS.md in your working folder.",
		params: []param{{name: "fact", required: true, about: "The fact, understandable by itself."}, groupParam}, say: sayRemembered,
	},
	{name: "forget", dir: inTasks, verb: "forget", about: "Remove a memory that is wrong or no longer wanted.", params: []param{idParam, groupParam}, say: sayMemory("is forgotten")},
	{
		name: "update_memory", dir: inTasks, verb: "update_memory", about: "Give a memory other words, when what it says has changed.",
		params: []param{idParam, {name: "fact", required: true, about: "The whole new fact."}, groupParam}, say: sayMemory("is changed"),
	},
	{name: "list_memory", dir: inTasks, verb: "list_memory", about: "List what you were told to remember, with ids.", params: []param{groupParam}, say: sayMemories},
	{
		name: "search_history", dir: inTasks, verb: "search_history",
		about: "Search the earlier messages of this chat, newest first.",
		params: []param{
			{name: "query", required: true, about: `Words that a message must all hold. "two words" in quotes stand together; begin* finds every word that begins so, in the newest 20 000 messages.`},
			{name: "limit", typ: "integer", about: "How many to return, from 1 to 50; usually 20."},
			{name: "before", typ: "integer", about: "Only messages before this number, to read on after an earlier search."},
			groupParam,
		}, say: sayFound,
	},
	{
		name: "register_group", dir: inTasks, verb: "register_group", main: true,
		about: "Make a group of a chat, so that it gets an agent of its own. See list_groups for chats. Only main may.",
		params: []param{
			{name: "jid", required: true, about: "The chat, such as 1203…@g.us."},
			{name: "name", required: true, about: "Name for people."},
			{name: "folder", required: true, about: "Name of its folder: letters, digits, - and _."},
			{name: "trigger", required: true, about: "What a message has to begin with to wake the agent, such as @Andy."},
			{name: "requires_trigger", field: "requiresTrigger", typ: "boolean", about: "false: every message wakes it. Usually true."},
		}, say: sayRegistered,
	},
	{name: "refresh_groups", dir: inTasks, verb: "refresh_groups", main: true, about: "Have the list of chats brought up to date. Only main may.", say: sayRefreshed},
	{name: "list_groups", dir: inTasks, verb: "list_groups", about: "List the chats that you may act for, and which of them are registered groups.", say: sayGroups},
}

// ownChat names the chat that is meant when the agent names none.
func ownChat(o Options, fields map[string]any) {
	if _, ok := fields["chatJid"]; !ok {
		fields["chatJid"] = o.Chat
	}
}

// read decodes a result and says it.
func read[T any](say func(T) string) func(json.RawMessage) (string, error) {
	return func(result json.RawMessage) (string, error) {
		var r T
		if len(result) > 0 {
			if err := json.Unmarshal(result, &r); err != nil {
				return "", fmt.Errorf("it was done, but what the host says about it cannot be read: %w", err)
			}
		}
		return say(r), nil
	}
}

func sayDone(text string) func(json.RawMessage) (string, error) {
	return func(json.RawMessage) (string, error) { return text, nil }
}

var saySent = read(func(r struct{ Texts int }) string {
	switch r.Texts {
	case 0:
		return "Nothing was sent: the text has nothing to show, <internal> parts are not sent."
	case 1:
		return "The message is on its way."
	}
	return fmt.Sprintf("The message is on its way, in %d parts.", r.Texts)
})

var sayFile = read(func(r struct {
	File  string
	Bytes int64
}) string {
	return fmt.Sprintf("The file %s (%d bytes) is on its way.", r.File, r.Bytes)
})

func sayTask(what string) func(json.RawMessage) (string, error) {
	return read(func(r struct {
		TaskID  string
		Group   string
		Status  string
		NextRun string
	}) string {
		next := "It will not run."
		if r.NextRun != "" {
			next = "Next run: " + clock(r.NextRun) + "."
		}
		return fmt.Sprintf("Task %s of group %s %s. It is %s now. %s", r.TaskID, r.Group, what, r.Status, next)
	})
}

var sayTasks = read(func(r struct {
	Tasks []struct {
		ID         string `json:"id"`
		Group      string `json:"groupFolder"`
		Prompt     string `json:"prompt"`
		Type       string `json:"schedule_type"`
		Value      string `json:"schedule_value"`
		Zone       string `json:"time_zone"`
		Status     string `json:"status"`
		NextRun    string `json:"next_run"`
		LastResult string `json:"last_result"`
	}
}) string {
	if len(r.Tasks) == 0 {
		return "No scheduled tasks found."
	}
	var out strings.Builder
	for _, t := range r.Tasks {
		fmt.Fprintf(&out, "- [%s] group %s: %s (%s: %s, %s) - %s, next: %s", t.ID, t.Group, oneLine(t.Prompt, 100), t.Type, t.Value, t.Zone, t.Status, orNone(clock(t.NextRun)))
		if t.LastResult != "" {
			fmt.Fprintf(&out, ", last: %s", oneLine(t.LastResult, 100))
		}
		out.WriteString("\n")
	}
	return strings.TrimRight(out.String(), "\n")
})

var sayRuns = read(func(r struct {
	TaskID string
	Group  string
	Runs   []struct {
		StartedAt string `json:"started_at"`
		Seconds   float64
		Status    string
		Result    string
		Error     string
	}
}) string {
	if len(r.Runs) == 0 {
		return fmt.Sprintf("Task %s of group %s has not run yet.", r.TaskID, r.Group)
	}
	var out strings.Builder
	for _, run := range r.Runs {
		fmt.Fprintf(&out, "- %s, %.0f s: %s", clock(run.StartedAt), run.Seconds, run.Status)
		if text := oneLine(run.Error+" "+run.Result, 300); text != "" {
			out.WriteString(": " + text)
		}
		out.WriteString("\n")
	}
	return strings.TrimRight(out.String(), "\n")
})

type memoryResult struct {
	ID        int64
	Group     string
	Fact      string
	Source    string
	CreatedAt string
	Known     bool
}

var sayRemembered = read(func(r memoryResult) string {
	if r.Known {
		return fmt.Sprintf("Skipped: memory %d of %s says that already: %s", r.ID, r.Group, r.Fact)
	}
	return fmt.Sprintf("Saved as memory %d of %s: %s", r.ID, r.Group, r.Fact)
})

func sayMemory(what string) func(json.RawMessage) (string, error) {
	return read(func(r memoryResult) string {
		return strings.TrimRight(fmt.Sprintf("Memory %d of %s %s: %s", r.ID, r.Group, what, r.Fact), ": ")
	})
}

var sayMemories = read(func(r struct{ Memories []memoryResult }) string {
	if len(r.Memories) == 0 {
		return "No saved durable facts."
	}
	var out strings.Builder
	for _, m := range r.Memories {
		fmt.Fprintf(&out, "- [%d] of %s: %s (from %s, %s)\n", m.ID, m.Group, m.Fact, m.Source, m.CreatedAt)
	}
	return strings.TrimRight(out.String(), "\n")
})

var sayFound = read(func(r struct {
	Messages []struct {
		Seq       int64
		Time      string
		Sender    string
		Assistant bool
		Text      string
	}
}) string {
	if len(r.Messages) == 0 {
		return "No message holds all these words."
	}
	var out strings.Builder
	var oldest int64
	for _, m := range r.Messages {
		who := oneLine(m.Sender, 60)
		if m.Assistant {
			who = strings.TrimSpace(who + " (you)")
		}
		if m.Seq > 0 {
			fmt.Fprintf(&out, "#%d ", m.Seq)
			if oldest == 0 || m.Seq < oldest {
				oldest = m.Seq
			}
		}
		fmt.Fprintf(&out, "%s %s: %s\n", m.Time, who, m.Text)
	}
	if oldest > 0 {
		fmt.Fprintf(&out, "For older ones search again with before=%d.", oldest)
	}
	return strings.TrimRight(out.String(), "\n")
})

var sayRegistered = read(func(r struct {
	JID             string
	Folder          string
	RequiresTrigger bool
}) string {
	wakes := "Every message wakes its agent."
	if r.RequiresTrigger {
		wakes = "A message wakes its agent if it begins with the trigger."
	}
	return fmt.Sprintf("Chat %s is now the group %s. %s", r.JID, r.Folder, wakes)
})

var sayRefreshed = read(func(r struct{ Groups int }) string {
	return fmt.Sprintf("The list is up to date: %d chats. See list_groups.", r.Groups)
})

var sayGroups = read(func(r struct {
	Groups []struct {
		JID          string
		Name         string
		LastActivity string
		IsRegistered bool
		Folder       string
	}
}) string {
	if len(r.Groups) == 0 {
		return "No chats are known."
	}
	var out strings.Builder
	for _, g := range r.Groups {
		state := "not registered"
		if g.IsRegistered {
			state = "group " + g.Folder
		}
		fmt.Fprintf(&out, "- %s %q: %s, last message: %s\n", g.JID, g.Name, state, orNone(clock(g.LastActivity)))
	}
	return strings.TrimRight(out.String(), "\n")
})

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// oneLine returns at most about so many bytes of a text on one line.
func oneLine(text string, most int) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}
