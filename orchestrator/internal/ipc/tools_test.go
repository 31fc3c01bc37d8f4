package ipc

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"berth/orchestrator/internal/berth"
	mem "berth/orchestrator/internal/memory"
)

// runner builds agent-runner.
func runner(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent-runner")
	if out, err := exec.Command("go", "build", "-o", path, "berth/agent-runner").CombinedOutput(); err != nil {
		t.Fatalf("build agent-runner: %v: %s", err, out)
	}
	return path
}

// agent is the tools of a group's container: the real program, and a real client.
type agent struct {
	t       *testing.T
	session *mcp.ClientSession
}

// agent starts the tools of a group. What the program believes is a lie: that it
// is main.
func (w *town) agent(path, folder string) agent {
	w.t.Helper()
	g, _ := w.groups.Group(folder)
	files, err := w.tree.Group(folder)
	check(w.t, err)
	w.service.budget(folder).requests.SetLimit(1e9)
	box, err := w.service.Open(w.t.Context(), g, files)
	check(w.t, err)
	cmd := exec.Command(path, "tools", filepath.Join(w.tree.Dir(), "data/ipc", folder), filepath.Join(w.tree.Dir(), "groups", folder))
	cmd.Env = append(os.Environ(), "BERTH_CHAT="+g.JID, "BERTH_GROUP=main", "BERTH_MAIN=true")
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(w.t.Context(), &mcp.CommandTransport{Command: cmd}, nil)
	check(w.t, err)
	w.t.Cleanup(func() {
		check(w.t, session.Close())
		box.Close()
		files.Close()
	})
	return agent{w.t, session}
}

func (a agent) call(tool string, args map[string]any) (text string, refused bool) {
	a.t.Helper()
	result, err := a.session.CallTool(a.t.Context(), &mcp.CallToolParams{Name: tool, Arguments: args})
	check(a.t, err)
	return result.Content[0].(*mcp.TextContent).Text, result.IsError
}

type args = map[string]any

// The agent's tools tell what the store holds, over the real program, and a group
// reaches nothing of another's, whatever its arguments and its program say.
func TestToolsTellTheTruth(t *testing.T) {
	w := settle(t)
	path := runner(t)
	main, other := w.agent(path, "main"), w.agent(path, "other-group")
	do := func(a agent, tool string, in args, want string) string {
		t.Helper()
		text, refused := a.call(tool, in)
		if refused || !strings.Contains(text, want) {
			t.Errorf("%s %v says %q, want %q", tool, in, text, want)
		}
		return text
	}
	refuse := func(a agent, tool string, in args, want string) {
		t.Helper()
		text, refused := a.call(tool, in)
		if !refused || !strings.HasPrefix(text, "refused, nothing was done: ") || !strings.Contains(text, want) {
			t.Errorf("%s %v says %q, want the refusal %q", tool, in, text, want)
		}
	}

	// Texts.
	do(other, "send_message", args{"text": "hi"}, "The message is on its way.")
	do(other, "ask_user", args{"question": "Tea?", "options": []string{"yes", "no"}}, "End your turn")
	do(main, "send_message", args{"text": "hi", "chat": "third@g.us"}, "on its way")
	refuse(other, "send_message", args{"text": "hi", "chat": "main@g.us"}, "its own chat only")
	refuse(main, "send_message", args{"text": "hi", "chat": "unknown@g.us"}, "not registered")
	refuse(other, "send_message", args{"text": strings.Repeat("x", 64<<10+1)}, "may have 65536")
	waiting, err := w.db.Outbox(t.Context(), 10)
	check(t, err)
	var texts []string
	for _, o := range waiting {
		texts = append(texts, o.ChatJID+" "+o.Text)
	}
	if got := strings.Join(texts, "; "); got != "other@g.us hi; other@g.us Tea?\n1. yes\n2. no; third@g.us hi" {
		t.Errorf("the outbox has %q", got)
	}

	// Files and reactions.
	w.write("other-group", "a.pdf", "paper")
	do(other, "send_file", args{"path": "a.pdf", "caption": "read"}, "The file a.pdf (5 bytes) is on its way.")
	refuse(other, "send_file", args{"path": "/etc/passwd"}, "name a file below /workspace/group")
	refuse(other, "send_file", args{"path": "a.pdf", "chat": "main@g.us"}, "its own chat only")
	seq, _, err := w.db.AddMessage(t.Context(), berth.Message{ID: "m", ChatJID: "other@g.us", Sender: "ann", Text: "hi", Time: time.Unix(1, 0)})
	check(t, err)
	do(other, "react", args{"message_id": fmt.Sprint(seq), "emoji": "👍"}, "The reaction is on its way.")
	refuse(other, "react", args{"message_id": "99", "emoji": "👍"}, "no message with the id 99")
	refuse(main, "react", args{"message_id": fmt.Sprint(seq), "emoji": "👍"}, "no message with the id")

	// Tasks.
	text := do(other, "schedule_task", args{"prompt": "water", "schedule_type": "cron", "schedule_value": "0 9 * * *"}, "of group other-group is scheduled. It is active now. Next run: ")
	tasks := w.tasks()
	if len(tasks) != 1 || tasks[0].Folder != "other-group" || tasks[0].Context != berth.ContextGroup || !strings.Contains(text, tasks[0].ID) ||
		!strings.Contains(text, tasks[0].NextRun.UTC().Format("2006-01-02 15:04:05 -07:00")) {
		t.Fatalf("%q, %+v", text, tasks)
	}
	id := tasks[0].ID
	refuse(other, "schedule_task", args{"prompt": "x", "schedule_type": "cron", "schedule_value": "not a cron"}, "cron")
	refuse(other, "schedule_task", args{"prompt": "x", "schedule_type": "interval", "schedule_value": "5"}, "")
	refuse(other, "schedule_task", args{"prompt": "x", "schedule_type": "once", "schedule_value": "2020-01-01T00:00:00"}, "")
	refuse(other, "schedule_task", args{"prompt": "x", "schedule_type": "cron", "schedule_value": "0 9 * * *", "chat": "main@g.us"}, "itself only")
	do(main, "schedule_task", args{"prompt": "of main", "schedule_type": "cron", "schedule_value": "0 9 * * *"}, "of group main")
	var mains string
	for _, task := range w.tasks() {
		if task.Folder == "main" {
			mains = task.ID
		}
	}
	for _, tool := range []string{"pause_task", "resume_task", "cancel_task", "task_history"} {
		refuse(other, tool, args{"task_id": mains}, "there is no task")
		refuse(other, tool, args{"task_id": mains, "chat": "main@g.us"}, "")
		refuse(other, tool, args{"task_id": "task-none"}, "there is no task")
	}
	refuse(other, "update_task", args{"task_id": mains, "prompt": "evil"}, "there is no task")
	refuse(other, "update_task", args{"task_id": id}, "nothing to change")
	if text, _ := other.call("list_tasks", nil); !strings.Contains(text, id) || strings.Contains(text, mains) {
		t.Errorf("other sees %q", text)
	}
	if text, _ := main.call("list_tasks", nil); !strings.Contains(text, id) || !strings.Contains(text, mains) {
		t.Errorf("main sees %q", text)
	}
	do(other, "update_task", args{"task_id": id, "prompt": "water twice"}, "is changed. It is active now. Next run: ")
	do(other, "pause_task", args{"task_id": id}, "It is paused now. It will not run.")
	do(main, "resume_task", args{"task_id": id}, "It is active now. Next run: ")
	do(other, "task_history", args{"task_id": id}, "has not run yet")
	do(other, "cancel_task", args{"task_id": id}, "is cancelled")
	if got := w.status("other-group", id); got != "gone" {
		t.Errorf("the task is %s", got)
	}
	if task, err := w.db.Task(t.Context(), "main", mains); err != nil || task.Prompt != "of main" || task.Status != berth.TaskActive {
		t.Errorf("main's task: %+v, %v", task, err)
	}

	// Memory.
	do(other, "remember", args{"fact": "  Likes TEA "}, "Saved as memory 1 of other-group: Likes TEA")
	do(other, "remember", args{"fact": "likes tea"}, "Skipped: memory 1 of other-group says that already: Likes TEA")
	do(main, "remember", args{"fact": "for all", "group": "global"}, "Saved as memory 1 of global")
	do(main, "remember", args{"fact": "secret"}, "Saved as memory 1 of main")
	refuse(other, "remember", args{"fact": "evil", "group": "global"}, "about itself only")
	refuse(other, "remember", args{"fact": "evil", "group": "main"}, "about itself only")
	refuse(other, "remember", args{"fact": strings.Repeat("x", 2001)}, "may have 2000")
	refuse(other, "update_memory", args{"memory_id": 1, "fact": "evil", "group": "main"}, "about itself only")
	refuse(other, "forget", args{"memory_id": 1, "group": "global"}, "about itself only")
	refuse(other, "forget", args{"memory_id": 7}, "no memory 7")
	refuse(other, "list_memory", args{"group": "main"}, "about itself only")
	if text, _ := other.call("list_memory", nil); !strings.Contains(text, "Likes TEA") || !strings.Contains(text, "for all") || strings.Contains(text, "secret") {
		t.Errorf("other sees %q", text)
	}
	do(other, "update_memory", args{"memory_id": 1, "fact": "likes coffee"}, "is changed: likes coffee")
	do(other, "forget", args{"memory_id": 1}, "is forgotten: likes coffee")
	if len(w.facts("other-group")) != 0 || len(w.facts(mem.Global)) != 1 || len(w.facts("main")) != 1 {
		t.Errorf("left: %q, %q, %q", w.facts("other-group"), w.facts(mem.Global), w.facts("main"))
	}

	// History.
	for i, chat := range []string{"main@g.us", "other@g.us"} {
		_, _, err := w.db.AddMessage(t.Context(), berth.Message{ID: fmt.Sprint(i), ChatJID: chat, SenderName: "Ann", Text: "a word in " + chat, Time: time.Unix(1, 0)})
		check(t, err)
	}
	if text := do(other, "search_history", args{"query": "word"}, "Ann: a word in other@g.us"); strings.Contains(text, "main@g.us") {
		t.Errorf("other finds %q", text)
	}
	do(other, "search_history", args{"query": "main"}, "No message")
	refuse(other, "search_history", args{"query": "word", "group": "main"}, "about itself only")
	refuse(other, "search_history", args{"query": `( " *`}, "names no word")
	do(main, "search_history", args{"query": "word", "group": "other-group", "limit": 1}, "a word in other@g.us")

	// Groups.
	refuse(other, "register_group", args{"jid": "new@g.us", "name": "N", "folder": "new", "trigger": "@A"}, "only the main group")
	refuse(other, "refresh_groups", nil, "only the main group")
	if text := do(other, "list_groups", nil, "other@g.us"); strings.Contains(text, "main@g.us") {
		t.Errorf("other sees %q", text)
	}
	refuse(main, "register_group", args{"jid": "new@g.us", "name": "N", "folder": "../x", "trigger": "@A"}, "folder")
	refuse(main, "register_group", args{"jid": "new@g.us", "name": "N", "folder": "third-group", "trigger": "@A"}, "already registered")
	do(main, "register_group", args{"jid": "new@g.us", "name": "N", "folder": "new", "trigger": "@A", "requires_trigger": false}, "Chat new@g.us is now the group new. Every message wakes")
	do(main, "list_groups", nil, `new@g.us "N": group new`)
	do(main, "refresh_groups", nil, "4 chats")
	if g, ok := w.groups.Group("new"); !ok || g.RequiresTrigger || g.JID != "new@g.us" {
		t.Errorf("%+v", g)
	}
}
