//go:build docker && crash

package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/web"
)

// TestCrashRequests kills the daemon when what an agent asked for about a task is
// done and the agent has no answer yet: the next daemon tells it what is true.
func TestCrashRequests(t *testing.T) {
	bin := crashable(t)
	for verb, want := range map[string]string{"cancel_task": "cancelled", "pause_task": "paused", "resume_task": "active", `update_task","prompt":"new`: "active"} {
		root := newRoot(t)
		v := &victim{t: t, bin: bin, root: root, client: web.NewClient(filepath.Join(root, "store", "berth.sock"))}
		if _, err := berthIn(t, root, nil, "groups", "add", "p", "--engine", "probe", "--no-trigger"); err != nil {
			t.Fatal(err)
		}
		v.start(crash.Requested)
		first := v.ended
		v.patiently(func() error {
			_, err := v.client.AddTask(t.Context(), web.NewTask{ID: "t1", Group: "p", Prompt: "say hi", Type: berth.ScheduleCron, Value: "@daily"})
			return err
		})
		v.post(web.NewMessage{Group: "p", ID: berth.NewID(8), Text: `write /workspace/ipc/tasks/1.json {"requestId":"r","taskId":"t1","type":"` + verb + `"}`})
		select {
		case <-first:
		case <-time.After(time.Minute):
			t.Fatal("it was not killed: nothing came by")
		}
		file := filepath.Join(root, "data", "ipc", "p", "responses", "r.json")
		if _, err := os.Stat(file); err == nil {
			t.Error("it was answered before the kill")
		}
		v.start("")
		var answer struct {
			OK     bool
			Error  string
			Result struct{ TaskID, Status string }
		}
		waitFor(t, func() bool {
			data, err := os.ReadFile(file)
			return err == nil && json.Unmarshal(data, &answer) == nil
		})
		if !answer.OK || answer.Result.TaskID != "t1" || answer.Result.Status != want {
			t.Errorf("%s: answered %+v, want %s", verb, answer, want)
		}
		v.kill9()
	}
}

// TestCrashSilentTasks kills the daemon around a result without words, and lets the
// container end before the next daemon is there: the task has run once all the same.
func TestCrashSilentTasks(t *testing.T) {
	bin := crashable(t)
	for _, point := range []string{crash.Printed, crash.Committed, crash.TurnEnded} {
		for _, prompt := range []string{"silent", "say <internal>all is well</internal>"} {
			root := newRoot(t)
			v := &victim{t: t, bin: bin, root: root, client: web.NewClient(filepath.Join(root, "store", "berth.sock"))}
			if _, err := berthIn(t, root, nil, "groups", "add", "p", "--engine", "probe", "--no-trigger"); err != nil {
				t.Fatal(err)
			}
			v.start(point)
			first := v.ended
			_, value := soon(0)
			v.patiently(func() error {
				_, err := v.client.AddTask(t.Context(), web.NewTask{ID: "t1", Group: "p", Prompt: prompt, Type: berth.ScheduleOnce, Value: value})
				return err
			})
			select {
			case <-first:
			case <-time.After(time.Minute):
				t.Fatal("it was not killed: nothing came by")
			}
			e, err := docker.New(docker.Options{Install: install(root)})
			if err != nil {
				t.Fatal(err)
			}
			left, err := e.Containers(t.Context())
			if err != nil || len(left) != 1 {
				t.Fatalf("containers: %+v, %v", left, err)
			}
			if out, err := exec.Command("docker", "kill", left[0].ID).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			_ = e.Close()
			v.start("")
			v.patiently(func() error {
				task, err := v.client.Task(t.Context(), "p", "t1")
				if err == nil && task.Status != berth.TaskCompleted {
					err = berth.Errorf(berth.Unavailable, "it is %s", task.Status)
				}
				return err
			})
			runs, err := v.client.TaskRuns(t.Context(), "p", "t1", 10)
			if err != nil || len(runs) != 1 || runs[0].Status != berth.TaskSuccess {
				t.Errorf("%s at %s: %+v, %v", prompt, point, runs, err)
			}
			v.kill9()
		}
	}
}
