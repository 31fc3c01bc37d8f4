package tools

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/google/go-cmp/cmp"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// TestMain lets this test binary be the server, for a client on its stdin and
// stdout.
func TestMain(m *testing.M) {
	if dir := os.Getenv("BERTH_TEST_TOOLS"); dir != "" {
		os.Exit(Main(filepath.Join(dir, "ipc"), filepath.Join(dir, "group")))
	}
	os.Exit(m.Run())
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is the folders of a container, with a host that answers.
type world struct {
	t   testing.TB
	dir string
	ipc string

	mu     sync.Mutex
	asked  []map[string]any
	answer func(fields map[string]any) (result any, refusal string)
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir()}
	w.ipc = filepath.Join(w.dir, "ipc")
	for _, dir := range []string{"ipc/messages", "ipc/tasks", "ipc/responses", "group/tools"} {
		check(t, os.MkdirAll(filepath.Join(w.dir, dir), 0o700))
	}
	return w
}

// host answers requests until the test ends.
func (w *world) host(answer func(fields map[string]any) (result any, refusal string)) {
	w.t.Helper()
	w.answer = answer
	watcher, err := fsnotify.NewWatcher()
	check(w.t, err)
	for _, dir := range []string{"messages", "tasks"} {
		check(w.t, watcher.Add(filepath.Join(w.ipc, dir)))
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for e := range watcher.Events {
			if e.Has(fsnotify.Create) && strings.HasSuffix(e.Name, ".json") {
				w.take(e.Name)
			}
		}
	})
	w.t.Cleanup(func() { watcher.Close(); wg.Wait() })
}

// sure is check for other goroutines than the test's.
func sure(err error) {
	if err != nil {
		panic(err)
	}
}

func (w *world) take(path string) {
	data, err := os.ReadFile(path)
	if err != nil {
		return // it was taken back
	}
	sure(os.Remove(path))
	var fields map[string]any
	sure(json.Unmarshal(data, &fields))
	id := fields["requestId"].(string)
	delete(fields, "requestId")
	fields["in"] = filepath.Base(filepath.Dir(path))
	w.mu.Lock()
	w.asked = append(w.asked, fields)
	answer := w.answer
	w.mu.Unlock()
	result, refusal := answer(fields)
	w.respond(id, map[string]any{"ok": refusal == "", "error": refusal, "result": result})
}

func (w *world) respond(id string, reply any) {
	data, err := json.Marshal(reply)
	sure(err)
	path := filepath.Join(w.ipc, "responses", id+".json")
	sure(os.WriteFile(path+".tmp", data, 0o600))
	sure(os.Rename(path+".tmp", path))
}

// last returns what was asked last, and how often anything was.
func (w *world) last() (map[string]any, int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.asked) == 0 {
		return nil, 0
	}
	return w.asked[len(w.asked)-1], len(w.asked)
}

// stdio starts the server as a process and returns a client of it.
func (w *world) stdio(env ...string) *mcp.ClientSession {
	w.t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), append(env, "BERTH_TEST_TOOLS="+w.dir)...)
	cmd.Stderr = os.Stderr
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(w.t.Context(), &mcp.CommandTransport{Command: cmd}, nil)
	check(w.t, err)
	w.t.Cleanup(func() { check(w.t, session.Close()) })
	return session
}

// within starts the server in this process.
func (w *world) within(o Options) *mcp.ClientSession {
	w.t.Helper()
	o.IPC, o.Dir = w.ipc, filepath.Join(w.dir, "group")
	if o.Log == nil {
		o.Log = log.New(io.Discard, "", 0)
	}
	toServer, fromClient := io.Pipe()
	toClient, fromServer := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- Serve(context.Background(), toServer, fromServer, o) }()
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).
		Connect(context.Background(), &mcp.IOTransport{Reader: toClient, Writer: fromClient}, nil)
	check(w.t, err)
	w.t.Cleanup(func() {
		check(w.t, session.Close())
		if err := <-done; err != nil && !errors.Is(err, io.ErrClosedPipe) {
			w.t.Errorf("serve: %v", err)
		}
	})
	return session
}

func call(t testing.TB, session *mcp.ClientSession, name string, args any) (text string, failed bool) {
	t.Helper()
	result, err := session.CallTool(t.Context(), &mcp.CallToolParams{Name: name, Arguments: args})
	check(t, err)
	for _, c := range result.Content {
		text += c.(*mcp.TextContent).Text
	}
	return text, result.IsError
}

type obj = map[string]any

// Every tool, by a client on stdin and stdout: what it asks for, and what it makes
// of the host's answer.
func TestEveryTool(t *testing.T) {
	task := obj{"taskId": "task-1", "group": "family", "status": "active", "nextRun": "2026-03-02T09:00:00+01:00"}
	memory := obj{"id": 3, "group": "family", "fact": "likes tea"}
	cases := []struct {
		tool   string
		args   obj
		asked  obj
		result any
		text   string
	}{
		{"send_message", obj{"text": "hi"}, obj{"in": "messages", "type": "message", "chatJid": "own@g.us", "text": "hi"}, obj{"texts": 1}, "The message is on its way."},
		{"send_message", obj{"text": "hi", "chat": "other@g.us"}, obj{"in": "messages", "type": "message", "chatJid": "other@g.us", "text": "hi"}, obj{"texts": 2}, "in 2 parts"},
		{"send_message", obj{"text": "<internal>x</internal>"}, obj{"in": "messages", "type": "message", "chatJid": "own@g.us", "text": "<internal>x</internal>"}, obj{"texts": 0}, "Nothing was sent"},
		{"send_file", obj{"path": "a.pdf", "caption": "c"}, obj{"in": "messages", "type": "send_file", "chatJid": "own@g.us", "path": "a.pdf", "caption": "c"}, obj{"file": "a.pdf", "bytes": 7}, "The file a.pdf (7 bytes) is on its way."},
		{"react", obj{"message_id": "m1", "emoji": "👍"}, obj{"in": "messages", "type": "react", "chatJid": "own@g.us", "messageId": "m1", "emoji": "👍"}, nil, "on its way"},
		{"ask_user", obj{"question": "Tea?", "options": []any{"yes", "no"}}, obj{"in": "messages", "type": "message", "chatJid": "own@g.us", "text": "Tea?\n1. yes\n2. no"}, obj{"texts": 1}, "End your turn"},
		{"schedule_task", obj{"prompt": "p", "schedule_type": "cron", "schedule_value": "0 9 * * *"},
			obj{"in": "tasks", "type": "schedule_task", "prompt": "p", "schedule_type": "cron", "schedule_value": "0 9 * * *", "context_mode": "group"}, task,
			"Task task-1 of group family is scheduled. It is active now. Next run: 2026-03-02 09:00:00 +01:00."},
		{"schedule_task", obj{"prompt": "p", "schedule_type": "once", "schedule_value": "2026-03-02T09:00:00", "context_mode": "isolated", "time_zone": "Asia/Tokyo", "script": "true", "catch_up": "skip", "chat": "other@g.us"},
			obj{"in": "tasks", "type": "schedule_task", "prompt": "p", "schedule_type": "once", "schedule_value": "2026-03-02T09:00:00", "context_mode": "isolated", "time_zone": "Asia/Tokyo", "script": "true", "catch_up": "skip", "targetJid": "other@g.us"}, task, "is scheduled"},
		{"update_task", obj{"task_id": "task-1", "prompt": "q"}, obj{"in": "tasks", "type": "update_task", "taskId": "task-1", "prompt": "q"}, task, "is changed"},
		{"list_tasks", obj{}, obj{"in": "tasks", "type": "list_tasks"}, obj{"tasks": []any{}}, "No scheduled tasks found."},
		{"list_tasks", obj{}, obj{"in": "tasks", "type": "list_tasks"},
			obj{"tasks": []any{obj{"id": "task-1", "groupFolder": "family", "prompt": "do\nit", "schedule_type": "cron", "schedule_value": "0 9 * * *", "time_zone": "UTC", "status": "active", "next_run": "2026-03-02T09:00:00.000Z", "last_result": "ok"}}},
			"- [task-1] group family: do it (cron: 0 9 * * *, UTC) - active, next: 2026-03-02 09:00:00 +00:00, last: ok"},
		{"pause_task", obj{"task_id": "task-1"}, obj{"in": "tasks", "type": "pause_task", "taskId": "task-1"}, obj{"taskId": "task-1", "group": "family", "status": "paused", "nextRun": nil}, "It is paused now. It will not run."},
		{"resume_task", obj{"task_id": "task-1", "chat": "other@g.us"}, obj{"in": "tasks", "type": "resume_task", "taskId": "task-1", "targetJid": "other@g.us"}, task, "Next run"},
		{"cancel_task", obj{"task_id": "task-1"}, obj{"in": "tasks", "type": "cancel_task", "taskId": "task-1"}, obj{"taskId": "task-1", "group": "family", "status": "cancelled"}, "is cancelled"},
		{"task_history", obj{"task_id": "task-1"}, obj{"in": "tasks", "type": "task_history", "taskId": "task-1"},
			obj{"taskId": "task-1", "group": "family", "runs": []any{obj{"started_at": "2026-03-02T09:00:00.000Z", "seconds": 2.4, "status": "success", "result": "done"}}}, "- 2026-03-02 09:00:00 +00:00, 2 s: success: done"},
		{"task_history", obj{"task_id": "task-1"}, obj{"in": "tasks", "type": "task_history", "taskId": "task-1"}, obj{"taskId": "task-1", "group": "family", "runs": []any{}}, "has not run yet"},
		{"remember", obj{"fact": "likes tea"}, obj{"in": "tasks", "type": "remember", "fact": "likes tea"}, memory, "Saved as memory 3 of family: likes tea"},
		{"remember", obj{"fact": "likes tea", "group": "global"}, obj{"in": "tasks", "type": "remember", "fact": "likes tea", "group": "global"}, obj{"id": 3, "group": "global", "fact": "Likes tea", "known": true}, "Skipped: memory 3 of global says that already: Likes tea"},
		{"forget", obj{"memory_id": 3}, obj{"in": "tasks", "type": "forget", "memoryId": 3.0}, memory, "Memory 3 of family is forgotten: likes tea"},
		{"update_memory", obj{"memory_id": 3, "fact": "likes tea"}, obj{"in": "tasks", "type": "update_memory", "memoryId": 3.0, "fact": "likes tea"}, memory, "is changed: likes tea"},
		{"list_memory", obj{}, obj{"in": "tasks", "type": "list_memory"}, obj{"memories": []any{}}, "No saved durable facts."},
		{"list_memory", obj{"group": "work"}, obj{"in": "tasks", "type": "list_memory", "group": "work"}, obj{"memories": []any{obj{"id": 3, "group": "work", "fact": "likes tea", "source": "Ann", "createdAt": "2026-03-02T09:00:00.000Z"}}}, "- [3] of work: likes tea (from Ann, 2026-03-02T09:00:00.000Z)"},
		{"search_history", obj{"query": "tea", "limit": 5, "before": 90}, obj{"in": "tasks", "type": "search_history", "query": "tea", "limit": 5.0, "before": 90.0},
			obj{"messages": []any{obj{"seq": 7, "time": "2026-03-02T09:00:00.000Z", "sender": "Ann", "text": "tea?"}, obj{"seq": 5, "time": "2026-03-02T08:00:00.000Z", "sender": "Andy", "assistant": true, "text": "tea!"}, obj{"time": "2026-03-02T07:00:00.000Z", "assistant": true, "text": "tea."}}},
			"#7 2026-03-02T09:00:00.000Z Ann: tea?\n#5 2026-03-02T08:00:00.000Z Andy (you): tea!\n2026-03-02T07:00:00.000Z (you): tea.\nFor older ones search again with before=5."},
		{"search_history", obj{"query": "tea"}, obj{"in": "tasks", "type": "search_history", "query": "tea"}, obj{"messages": []any{}}, "No message holds"},
		{"register_group", obj{"jid": "1@g.us", "name": "N", "folder": "f", "trigger": "@A", "requires_trigger": false},
			obj{"in": "tasks", "type": "register_group", "jid": "1@g.us", "name": "N", "folder": "f", "trigger": "@A", "requiresTrigger": false}, obj{"jid": "1@g.us", "folder": "f", "requiresTrigger": false}, "Chat 1@g.us is now the group f. Every message wakes"},
		{"refresh_groups", obj{}, obj{"in": "tasks", "type": "refresh_groups"}, obj{"groups": 4}, "4 chats"},
		{"list_groups", obj{}, obj{"in": "tasks", "type": "list_groups"}, obj{"groups": []any{obj{"jid": "1@g.us", "name": "N", "isRegistered": true, "folder": "f"}, obj{"jid": "2@g.us", "name": "M", "lastActivity": "2026-03-02T09:00:00.000Z"}}},
			"- 1@g.us \"N\": group f, last message: none\n- 2@g.us \"M\": not registered, last message: 2026-03-02 09:00:00 +00:00"},
	}
	w := newWorld(t)
	var next any
	refusal := ""
	w.host(func(obj) (any, string) { return next, refusal })
	session := w.stdio("BERTH_CHAT=own@g.us", "BERTH_GROUP=main", "BERTH_MAIN=true")
	listed, err := session.ListTools(t.Context(), nil)
	check(t, err)
	if len(listed.Tools) != 19 || len(table) != 19 {
		t.Errorf("%d tools are offered", len(listed.Tools))
	}
	called := make(map[string]bool)
	for _, c := range cases {
		called[c.tool] = true
		w.mu.Lock()
		next, refusal = c.result, ""
		w.mu.Unlock()
		text, failed := call(t, session, c.tool, c.args)
		asked, _ := w.last()
		if d := cmp.Diff(c.asked, asked); d != "" {
			t.Errorf("%s %v: %s", c.tool, c.args, d)
		}
		if failed || !strings.Contains(text, c.text) {
			t.Errorf("%s %v says %q, want %q", c.tool, c.args, text, c.text)
		}
		// The host's refusal is the answer.
		w.mu.Lock()
		refusal = "group family may not, for this reason"
		w.mu.Unlock()
		if text, failed := call(t, session, c.tool, c.args); !failed || text != "refused, nothing was done: group family may not, for this reason" {
			t.Errorf("%s refused says %q, %v", c.tool, text, failed)
		}
	}
	for _, tool := range listed.Tools {
		if !called[tool.Name] {
			t.Errorf("%s was not called", tool.Name)
		}
	}
}

// Arguments that do not fit never come to the host.
func TestStrictArguments(t *testing.T) {
	w := newWorld(t)
	w.host(func(obj) (any, string) { return nil, "" })
	session := w.stdio("BERTH_CHAT=own@g.us", "BERTH_GROUP=family", "BERTH_MAIN=false")
	for _, c := range []struct {
		tool string
		args any
		want string
	}{
		{"send_message", obj{}, "text"}, {"send_message", obj{"text": ""}, "text"}, {"send_message", obj{"text": 5}, "string"}, {"send_message", obj{"text": nil}, "string"},
		{"send_message", obj{"text": []string{"a"}}, "string"}, {"send_message", obj{"text": "a", "type": "register_group"}, "type"}, {"send_message", obj{"text": "a", "Text": "b"}, "Text"},
		{"send_message", obj{"text": "a", "requestId": "../x"}, "requestId"},
		{"send_message", obj{"text": "a", "chat": "main@g.us"}, "chat"}, // not offered outside main
		{"remember", obj{"fact": "a", "group": "main"}, "group"},
		{"send_message", []any{"text"}, "not a JSON object"}, {"send_message", "text", "not a JSON object"},
		{"schedule_task", obj{"prompt": "p", "schedule_type": "daily", "schedule_value": "9"}, "schedule_type"},
		{"schedule_task", obj{"prompt": "p", "schedule_type": "interval", "schedule_value": 60000}, "string"},
		{"schedule_task", obj{"prompt": "p", "schedule_type": "cron", "schedule_value": "0 9 * * *", "context_mode": "mine"}, "context_mode"},
		{"forget", obj{"memory_id": "3"}, "integer"}, {"forget", obj{"memory_id": 3.5}, "integer"}, {"forget", obj{}, "memory_id"},
		{"ask_user", obj{"question": "q", "options": "yes"}, "array"}, {"ask_user", obj{"question": "q", "options": []any{1}}, "string"},
		{"list_tasks", obj{"groupFolder": "main"}, "groupFolder"},
		{"remember", obj{"fact": strings.Repeat("x", 2<<20)}, "may have"},
		{"remember", obj{"fact": strings.Repeat("<", 1<<20-100)}, "may have"},
	} {
		text, failed := call(t, session, c.tool, c.args)
		if !failed || !strings.Contains(text, "nothing was done") || !strings.Contains(text, c.want) || len(text) > 1000 {
			t.Errorf("%s %.80v says %.300q, want %q", c.tool, c.args, text, c.want)
		}
	}
	if asked, n := w.last(); n > 0 {
		t.Errorf("the host was asked for %v", asked)
	}
	for _, dir := range []string{"messages", "tasks"} {
		if left, err := os.ReadDir(filepath.Join(w.ipc, dir)); err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
	listed, err := session.ListTools(t.Context(), nil)
	check(t, err)
	for _, tool := range listed.Tools {
		if schema, _ := json.Marshal(tool); tool.Name == "register_group" || tool.Name == "refresh_groups" || bytes.Contains(schema, []byte(`another group`)) {
			t.Errorf("offered outside main: %s", schema)
		}
	}
	if _, err := session.CallTool(t.Context(), &mcp.CallToolParams{Name: "register_group", Arguments: obj{}}); err == nil {
		t.Error("register_group can be called outside main")
	}
}

// hostFor is the other end as this package sees it, with other times.
func (w *world) hostFor(patience, lookAgain time.Duration) *host {
	h := newHost(w.ipc)
	h.patience, h.lookAgain = patience, lookAgain
	return h
}

// A host that is away: what it did not take is taken back, what it took is not
// told as done or not done.
func TestHostThatDoesNotAnswer(t *testing.T) {
	w := newWorld(t)
	h := w.hostFor(time.Millisecond, time.Hour)
	_, err := h.ask(t.Context(), "tasks", obj{"type": "x"})
	if err == nil || !strings.Contains(err.Error(), "nothing was done: the host did not take the request within 1ms, and it was taken back") {
		t.Errorf("got %v", err)
	}
	if left, err := os.ReadDir(filepath.Join(w.ipc, "tasks")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}

	watcher, err := fsnotify.NewWatcher()
	check(t, err)
	defer watcher.Close()
	check(t, watcher.Add(filepath.Join(w.ipc, "tasks")))
	ctx, cancel := context.WithCancel(t.Context())
	var taken sync.WaitGroup
	taken.Go(func() { // a host that dies at once
		for e := range watcher.Events {
			if e.Has(fsnotify.Create) && strings.HasSuffix(e.Name, ".json") {
				check(t, os.Rename(e.Name, filepath.Join(w.dir, "taken")))
				cancel()
				return
			}
		}
	})
	_, err = w.hostFor(time.Hour, time.Hour).ask(ctx, "tasks", obj{"type": "x"})
	taken.Wait()
	if err == nil || !strings.Contains(err.Error(), "not known yet") {
		t.Errorf("got %v", err)
	}

	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	_, err = w.hostFor(time.Hour, time.Hour).ask(ctx, "messages", obj{"type": "x"})
	if err == nil || !strings.Contains(err.Error(), "the call was cancelled, and it was taken back") {
		t.Errorf("got %v", err)
	}
	check(t, os.RemoveAll(filepath.Join(w.ipc, "messages")))
	_, err = h.ask(t.Context(), "messages", obj{"type": "x"})
	if err == nil || !strings.Contains(err.Error(), "the host cannot be asked") {
		t.Errorf("got %v", err)
	}
}

// Where the host's changes are no events, answers are looked for; where they are,
// nothing waits for the next look.
func TestAnswersWithAndWithoutEvents(t *testing.T) {
	w := newWorld(t)
	w.host(func(obj) (any, string) { return obj{"a": 1}, "" })
	silent := w.hostFor(time.Minute, time.Millisecond)
	if result, err := silent.ask(t.Context(), "tasks", obj{"type": "x"}); err != nil || string(result) != `{"a":1}` {
		t.Errorf("%s, %v", result, err)
	}
	events := w.hostFor(time.Minute, time.Hour)
	defer events.watch(log.New(io.Discard, "", 0))()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if result, err := events.ask(t.Context(), "messages", obj{"type": "x"}); err != nil || string(result) != `{"a":1}` {
				t.Errorf("%s, %v", result, err)
			}
		})
	}
	wg.Wait()
	var logged bytes.Buffer
	nowhere := newHost(filepath.Join(w.dir, "nowhere"))
	nowhere.watch(log.New(&logged, "", 0))()
	if !strings.Contains(logged.String(), "looking every 500ms instead") {
		t.Errorf("logged %q", &logged)
	}
}

// What lies in the place of an answer cannot hold up or mislead the server.
func TestBadAnswers(t *testing.T) {
	w := newWorld(t)
	h := w.hostFor(time.Minute, time.Millisecond)
	path := filepath.Join(w.ipc, "responses", "r.json")
	for name, prepare := range map[string]func() error{
		"garbage": func() error { return os.WriteFile(path, []byte("{"), 0o600) },
		"list":    func() error { return os.WriteFile(path, []byte("[]"), 0o600) },
		"folder":  func() error { return os.Mkdir(path, 0o700) },
		"link":    func() error { return os.Symlink("/etc/passwd", path) },
	} {
		check(t, prepare())
		if result, ok, err := h.answer("r"); !ok || err == nil || !strings.Contains(err.Error(), "cannot be read") {
			t.Errorf("%s: %s, %v, %v", name, result, ok, err)
		}
		check(t, os.RemoveAll(path))
	}
	w.host(func(obj) (any, string) { return "no object", "" })
	if text, failed := call(t, w.within(Options{}), "list_tasks", obj{}); !failed || !strings.Contains(text, "it was done, but") {
		t.Errorf("%q, %v", text, failed)
	}
}

func (w *world) put(name, text string, mode os.FileMode) {
	w.t.Helper()
	check(w.t, os.WriteFile(filepath.Join(w.dir, "group", name), []byte(text), mode))
}

// Whatever arguments a model or a tool of the group makes up, the host is asked
// for what the tool is for and for nothing else.
func FuzzArguments(f *testing.F) {
	for i, args := range []string{
		`{"text":"hi"}`, `{"text":"hi","type":"cancel_task","requestId":"x"}`, `{"text":{"a":1}}`, `{"memory_id":1e99}`, `{"memory_id":-0}`, `[]`, `null`, `"x"`,
		`{"text":"\u0000\ud800"}`, `{"question":"q","options":["\n2. x"]}`, `{"text":"a","text":"b"}`, `{"task_id":"../../x"}`, `{"group":"main","fact":"x"}`,
	} {
		f.Add(uint8(i), args)
	}
	w := newWorld(f)
	w.host(func(obj) (any, string) { return obj{}, "" })
	session := w.within(Options{Chat: "own@g.us", Main: true})
	f.Fuzz(func(t *testing.T, which uint8, args string) {
		if !json.Valid([]byte(args)) {
			t.Skip()
		}
		tool := table[int(which)%len(table)]
		_, before := w.last()
		result, err := session.CallTool(t.Context(), &mcp.CallToolParams{Name: tool.name, Arguments: json.RawMessage(args)})
		if err != nil {
			t.Fatalf("%s %s: %v", tool.name, args, err)
		}
		asked, after := w.last()
		if result.IsError && strings.Contains(result.Content[0].(*mcp.TextContent).Text, "arguments") {
			if after != before {
				t.Fatalf("%s %s: refused and asked for %v", tool.name, args, asked)
			}
			return
		}
		if after != before+1 || asked["type"] != tool.verb || asked["in"] != tool.dir {
			t.Fatalf("%s %s: asked for %v", tool.name, args, asked)
		}
		for name := range asked {
			if name != "type" && name != "in" && name != "context_mode" && !slices.ContainsFunc(tool.params, func(p param) bool { return p.key() == name }) && name != "chatJid" {
				t.Fatalf("%s %s: asked with %s", tool.name, args, name)
			}
		}
	})
}

func FuzzOwn(f *testing.F) {
	f.Add(`{"description":"d","inputSchema":{"type":"object","properties":{"a":{"type":"string"}}},"timeoutSeconds":5}`)
	f.Add(`{"mcpServers":{"a":{"command":"./x","args":["-y"],"env":{"A":"b"}}}}`)
	f.Add(`{"description":"d","inputSchema":{"$ref":"#/a/b","type":"object"}}`)
	f.Add(`{"description":"d","inputSchema":{"type":"object","pattern":"(((","$defs":{"a":{"$ref":"#/$defs/a"}}}}`)
	f.Add(`{"description":"d","inputSchema":{"type":"object","$ref":"#"}}`)
	f.Add(`{"mcpServers":{"berth":{"command":"x"},"b":{"url":"http://x"},"c":null,"d":[]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		dir := t.TempDir()
		logger := log.New(io.Discard, "", 0)
		check(t, os.WriteFile(filepath.Join(dir, "mcp.json"), []byte(text), 0o600))
		for _, s := range ownServers(dir, logger) {
			if s.Name == ServerName || len(s.Command) == 0 || s.Command[0] == "" {
				t.Fatalf("%+v", s)
			}
		}
		check(t, os.WriteFile(filepath.Join(dir, "a.json"), []byte(text), 0o600))
		check(t, os.WriteFile(filepath.Join(dir, "a"), nil, 0o700))
		for _, tool := range ownTools(dir, map[string]bool{}, logger) {
			server := mcp.NewServer(&mcp.Implementation{Name: "x", Version: "1"}, nil)
			offer(server, tool.name, tool.about, tool.input, func(context.Context, map[string]any) (string, error) { return "", nil })
			resolved, err := tool.input.Resolve(nil)
			check(t, err)
			_ = resolved.Validate(map[string]any{"a": map[string]any{"a": "b"}})
		}
	})
}
