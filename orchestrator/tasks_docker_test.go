//go:build docker

package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

// completed waits until a task is completed and returns its log.
func (h *host) completed(group, id string) []web.TaskRun {
	h.t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		t, err := h.client.Task(h.t.Context(), group, id)
		if err != nil || t.Status != berth.TaskCompleted {
			continue
		}
		runs, err := h.client.TaskRuns(h.t.Context(), group, id, 10)
		if err != nil {
			h.t.Fatal(err)
		}
		return runs
	}
	h.t.Fatalf("task %s is not completed", id)
	return nil
}

// soon is a single time a few seconds from now.
func soon(in time.Duration) (time.Time, string) {
	at := time.Now().Add(in).Truncate(time.Second).Add(2 * time.Second) // the next one may be over when it is asked for
	return at, at.UTC().Format(time.RFC3339)
}

// A container schedules a task of its own; when that is due the idle run of the
// chat makes room for it, its result comes into the chat, and the log has it.
func TestTaskOfAContainer(t *testing.T) {
	h := newHost(t, "", "p")
	h.ready()
	at, value := soon(3 * time.Second)
	request := fmt.Sprintf(`{"type":"schedule_task","taskId":"t1","prompt":"say it is time","schedule_type":"once","schedule_value":"%s","requestId":"r"}`, value)
	if _, err := h.ask("p", "write /workspace/ipc/tasks/1.json "+request); err != nil {
		t.Fatal(err)
	}
	idle, err := h.run("p", "idle")
	if err != nil {
		t.Fatal(err)
	}
	runs := h.completed("p", "t1")
	if len(runs) != 1 || runs[0].Status != berth.TaskSuccess || runs[0].Result != "it is time" || runs[0].Run == idle.ID {
		t.Errorf("log: %+v", runs)
	}
	if late := runs[0].StartedAt.Sub(at); late < 0 || late > 5*time.Second {
		t.Errorf("begun %v after it was due", late)
	}
	t.Logf("begun %v after it was due, and took %d ms", runs[0].StartedAt.Sub(at), runs[0].DurationMS)
	if err := h.once("p", "ok", "it is time"); err != nil {
		t.Error(err)
	}
	if out := mustBerth(t, h.root, "tasks", "log", "t1"); !strings.Contains(out, "it is time") {
		t.Errorf("tasks log: %s", out)
	}
	// The chat goes on in a run of its own.
	if a, err := h.ask("p", "say hello again"); err != nil || a.Texts[0] != "hello again" {
		t.Errorf("%+v, %v", a, err)
	}
	h.finish()
}

// A model schedules a task by its tool, over MCP; when that is due, the idle run of the
// chat makes room for it, and its answer comes into the chat and into the log.
func TestTaskOfAModel(t *testing.T) {
	t.Parallel()
	h := withModel(t, "AGENT_ENGINE=model")
	mustBerth(t, h.root, "groups", "add", "family", "--no-trigger")
	h.ready()
	at, value := soon(2 * time.Second)
	a, err := h.ask("family", fmt.Sprintf(`tool schedule_task {"prompt":"say it is time","schedule_type":"once","schedule_value":"%s"}`, value))
	if err != nil || !strings.Contains(strings.Join(a.Texts, ""), "is scheduled") {
		t.Fatalf("%q, %v", a.Texts, err)
	}
	tasks, err := h.client.Tasks(t.Context(), "family")
	if err != nil || len(tasks) != 1 {
		t.Fatal(tasks, err)
	}
	idle, err := h.run("family", "idle")
	if err != nil {
		t.Fatal(err)
	}
	runs := h.completed("family", tasks[0].ID)
	if len(runs) != 1 || runs[0].Status != berth.TaskSuccess || runs[0].Result != "it is time" || runs[0].Run == idle.ID {
		t.Errorf("log: %+v", runs)
	}
	if err := h.once("family", "it is time"); err != nil {
		t.Error(err)
	}
	t.Logf("begun %v after it was due, and took %d ms", runs[0].StartedAt.Sub(at), runs[0].DurationMS)
	if out := mustBerth(t, h.root, "tasks", "log", tasks[0].ID); !strings.Contains(out, "it is time") {
		t.Errorf("tasks log: %s", out)
	}
	h.finish()
}

// A task that is at work when the daemon is killed is taken over by the next one,
// and one that became due meanwhile runs then: each once.
func TestTasksOverARestart(t *testing.T) {
	h := newHost(t, "", "p", "q")
	h.ready()
	_, value := soon(0)
	add := func(group, prompt string, when string) {
		t.Helper()
		if _, err := h.client.AddTask(t.Context(), web.NewTask{ID: "t1", Group: group, Prompt: prompt, Type: berth.ScheduleOnce, Value: when}); err != nil {
			t.Fatal(err)
		}
	}
	add("p", "sleep 4\nsay after all", value)
	_, value = soon(2 * time.Second)
	add("q", "say missed", value)
	if _, err := h.run("p", "busy"); err != nil {
		t.Fatal(err)
	}
	_ = h.end(syscall.SIGKILL)
	due, _ := time.Parse(time.RFC3339, value)
	time.Sleep(time.Until(due)) // it is due while nobody is there
	h.ready()
	for group, want := range map[string]string{"p": "after all", "q": "missed"} {
		if runs := h.completed(group, "t1"); len(runs) != 1 || runs[0].Status != berth.TaskSuccess {
			t.Errorf("%s: %+v", group, runs)
		}
		if err := h.once(group, want); err != nil {
			t.Error(err)
		}
	}
	h.finish()
}

// TS-13, TS-14: a script decides in the container whether the agent is woken.
func TestTS13TS14ScriptInAContainer(t *testing.T) {
	h := newHost(t, "", "p")
	h.ready()
	for _, c := range []struct{ script, result string }{
		{`echo '{"wakeAgent":false}'`, "the script did not wake the agent: it said so"},
		{`exit 7`, "the script did not wake the agent: it ended with exit code 7"},
		{`echo noise; echo '{"wakeAgent":true,"data":{"new":2}}'`, "[SCHEDULED TASK - "},
	} {
		id := berth.NewID(4)
		_, value := soon(0)
		_, err := h.client.AddTask(t.Context(), web.NewTask{ID: id, Group: "p", Prompt: "echo", Script: c.script, Type: berth.ScheduleOnce, Value: value})
		if err != nil {
			t.Fatal(err)
		}
		runs := h.completed("p", id)
		if len(runs) != 1 || runs[0].Status != berth.TaskSuccess || !strings.HasPrefix(runs[0].Result, c.result) {
			t.Errorf("%s: %+v", c.script, runs)
		}
	}
	if err := h.once("p", "Script output:\n{\"new\":2}\n\nInstructions:"); err != nil {
		t.Error(err)
	}
	h.finish()
}
