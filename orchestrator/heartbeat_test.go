package main

import (
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
)

// The heartbeat is there while the setting says so and main is there, over restarts,
// and is not touched where it is somebody else's.
func TestHeartbeatFollowsTheSetting(t *testing.T) {
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "db"), func(string, bool) {})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var main *berth.Group
	changes := 0
	daemon := func(every time.Duration) {
		t.Helper()
		h := newHeartbeat(Config{Heartbeat: every, Timezone: time.UTC}, db, zaptest.NewLogger(t))
		h.main = func() (berth.Group, bool) {
			if main == nil {
				return berth.Group{}, false
			}
			return *main, true
		}
		h.changed = func(string) { changes++ }
		if err := h.keep(t.Context()); err != nil {
			t.Error(err)
		}
	}
	is := func(want string) {
		t.Helper()
		got := "none"
		if task, err := db.Task(t.Context(), "main", berth.HeartbeatID); err == nil {
			got = strings.Join([]string{string(task.Status), task.Value, task.ChatJID}, " ")
			if task.Context != berth.ContextIsolated || !strings.Contains(task.Prompt, "HEARTBEAT.md") || !strings.Contains(task.Script, "HEARTBEAT.md") {
				t.Errorf("%+v", task)
			}
		}
		if got != want {
			t.Errorf("the heartbeat is %q, want %q", got, want)
		}
	}
	daemon(time.Hour)
	is("none") // nobody is there who could have it
	main = &berth.Group{Folder: "main", JID: "console:main"}
	daemon(0)
	is("none")
	daemon(30 * time.Minute)
	is("active 1800000 console:main")
	daemon(30 * time.Minute)
	if changes != 1 {
		t.Errorf("%d changes were told", changes)
	}
	daemon(time.Hour)
	is("active 3600000 console:main")
	main.JID = "1@g.us"
	daemon(time.Hour)
	is("active 3600000 1@g.us")
	daemon(0)
	is("none")
	daemon(time.Hour)
	is("active 3600000 1@g.us")
}

// What the operator made under that name stays, and the daemon says so and goes on.
func TestHeartbeatOfTheOperator(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "db"), func(string, bool) {})
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		own := berth.Task{
			ID: berth.HeartbeatID, Folder: "main", ChatJID: "console:main", Prompt: "mine", Kind: berth.ScheduleCron, Value: "@daily", Zone: "UTC",
			Context: berth.ContextGroup, CatchUp: berth.CatchUpOnce, CreatedBy: operatorTask, CreatedAt: time.Now(),
		}
		if _, err := db.AddTask(t.Context(), own); err != nil {
			t.Fatal(err)
		}
		h := newHeartbeat(Config{Timezone: time.UTC}, db, zaptest.NewLogger(t))
		h.main = func() (berth.Group, bool) { return berth.Group{Folder: "main", JID: "console:main"}, true }
		h.changed = func(string) {}
		if err := h.keep(t.Context()); err != nil {
			t.Error(err)
		}
		h.every = time.Hour
		ctx, cancel := contextWithCancel(t)
		done := make(chan error)
		go func() { done <- h.run(ctx) }()
		synctest.Wait()
		if task, err := db.Task(t.Context(), "main", berth.HeartbeatID); err != nil || task.Prompt != "mine" {
			t.Errorf("%+v, %v", task, err)
		}
		if _, err := db.CancelTask(t.Context(), "main", berth.HeartbeatID, ""); err != nil {
			t.Error(err)
		}
		time.Sleep(heartbeatRetry)
		synctest.Wait()
		if task, err := db.Task(t.Context(), "main", berth.HeartbeatID); err != nil || !task.IsHeartbeat() {
			t.Errorf("%+v, %v", task, err)
		}
		h.every = 0
		h.groupsChanged()
		synctest.Wait()
		if task, err := db.Task(t.Context(), "main", berth.HeartbeatID); err == nil {
			t.Errorf("%+v", task)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
