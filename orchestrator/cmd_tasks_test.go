package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/dispatch"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
)

// newTaskDaemon serves the tasks of a store with the groups family and work, until
// stop.
func newTaskDaemon(t *testing.T) (d *storeDaemon, stop func()) {
	t.Helper()
	root, err := os.MkdirTemp("", "berth") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.Mkdir(filepath.Join(root, "store"), 0o700); err != nil {
		t.Fatal(err)
	}
	cfg := Config{Root: root, Timezone: time.UTC}
	lock, err := lockRoot(filepath.Join(root, "store"))
	if err != nil {
		t.Fatal(err)
	}
	db, err := sqlite.Open(t.Context(), storePath(cfg), func(string, bool) {})
	if err != nil {
		t.Fatal(err)
	}
	dispatcher, err := dispatch.New(t.Context(), dispatch.Options{Store: db, Limit: 1, IdleTimeout: time.Hour, Log: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{"family", "work"} {
		if err := dispatcher.AddGroup(t.Context(), berth.Group{JID: "console:" + folder, Name: folder, Folder: folder, AddedAt: time.Now()}); err != nil {
			t.Fatal(err)
		}
	}
	l, err := web.Listen(cfg.Socket())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := contextWithCancel(t)
	done := make(chan error, 1)
	go func() {
		done <- web.Serve(ctx, l, &control{texts: texts{db}, cfg: cfg, dispatcher: dispatcher}, zaptest.NewLogger(t))
	}()
	return &storeDaemon{t, root, db}, func() {
		cancel()
		for _, err := range []error{<-done, db.Close(), lock.Close()} {
			if err != nil {
				t.Error(err)
			}
		}
	}
}

// The tasks commands do the same with a daemon and without one, but for running a
// task, which needs one.
func TestTasksCommands(t *testing.T) {
	for _, daemon := range []bool{true, false} {
		t.Run(fmt.Sprintf("daemon %t", daemon), func(t *testing.T) {
			d, stop := newTaskDaemon(t)
			if daemon {
				defer stop()
			} else {
				stop()
			}
			run := "task builds of work is due now, next 20.* UTC\n"
			runError := ""
			if !daemon {
				run, runError = "", "no daemon runs that could run it"
			}
			add := []string{"add", "-g", "work", "--id", "builds"}
			for _, c := range []struct {
				args []string
				out  string // pattern
				errs string
			}{
				{[]string{}, "", "tasks needs one of"},
				{[]string{"ls"}, `^ID +GROUP +STATUS +NEXT +SCHEDULE +PROMPT +LAST RESULT\n$`, ""},
				{[]string{"ls", "--json"}, `^\[\]\n$`, ""},
				{append(add, "--interval", "90m", "--catch-up", "skip", "--script", "check", "Is the build\ngreen?"), `^task builds of work added, next 20\d\d-.* UTC\n$`, ""},
				{append(add, "--interval", "90m", "again"), "", "there is or was a task builds"},
				{append(add, "x"), "", "give one of --cron, --interval and --once"},
				{append(add, "--cron", "@daily", "--once", "2027-01-01T00:00", "x"), "", "give one of --cron, --interval and --once"},
				{append(add, "--interval", "30s", "x"), "", "an interval of 30000 ms cannot be used"},
				{append(add, "--cron", "not a cron", "x"), "", "is no cron"},
				{append(add, "--once", "2020-01-01T00:00", "x"), "", "is past"},
				{append(add, "--cron", "@daily", "--zone", "Mars/Base", "x"), "", "is no time zone"},
				{append(add, "--cron", "@daily", "--context", "bogus", "x"), "", "neither group nor isolated"},
				{append(add, "--cron", "@daily", "--catch-up", "bogus", "x"), "", "neither once nor skip"},
				{append(add, "--cron", "@daily", " "), "", "the text is empty"},
				{[]string{"add", "-g", "work", "--id", "a/b", "--cron", "@daily", "x"}, "", "is not 1 to 64 letters"},
				{[]string{"add", "-g", "ghost", "--cron", "@daily", "x"}, "", "there is no group"},
				{[]string{"add", "--cron", "@daily", "x"}, "", "name the group"},
				{[]string{"add", "-g", "family", "--cron", "0 9 * * *", "--zone", "Asia/Tokyo", "--context", "group", "--json", "x"}, `"schedule_value": "0 9 \* \* \*"`, ""},
				{[]string{"add", "-g", "family", "--id", "builds", "--once", "2099-06-01T15:30", "--zone", "Europe/Berlin", "x"}, `^task builds of family added, next 2099-06-01 15:30:00 CEST\n$`, ""},
				{[]string{"ls", "-g", "work"}, `builds +work +active +20.* UTC +interval 5400000 +Is the build… +-`, ""},
				{[]string{"show", "builds"}, "", "the groups work, family have a task"},
				{[]string{"show", "builds", "-g", "work"}, `(?s)status +active.*catch-up +skip.*made by +operator, 2.*script +check.*prompt +Is the build`, ""},
				{[]string{"show", "nix"}, "", "there is no task \"nix\""},
				{[]string{"show", "nix", "-g", "work"}, "", "there is no task \"nix\""},
				{[]string{"pause", "builds", "-g", "work"}, `^task builds of work is paused\n$`, ""},
				{[]string{"show", "builds", "-g", "work"}, `paused by +operator`, ""},
				{[]string{"resume", "builds", "-g", "work"}, `^task builds of work goes on, next 20.* UTC\n$`, ""},
				{[]string{"set", "builds", "-g", "work", "--interval", "2h", "--prompt", "Is it?", "--script", "", "--catch-up", "once"}, `^task builds of work is changed, next 20.* UTC\n$`, ""},
				{[]string{"show", "builds", "-g", "work"}, `(?s)schedule +interval 7200000.*catch-up +once.*operator, [^\n]*\nprompt +Is it\?`, ""},
				{[]string{"set", "builds", "-g", "work", "--cron", "0 9 * * *", "--zone", "UTC", "--json"}, `"schedule_value": "0 9 \* \* \*"`, ""},
				{[]string{"set", "builds", "-g", "work"}, "", "say what to change"},
				{[]string{"set", "builds", "-g", "work", "--cron", "@daily", "--once", "2099-01-01T00:00"}, "", "at most one of"},
				{[]string{"set", "builds", "-g", "work", "--prompt", " "}, "", "the text is empty"},
				{[]string{"set", "builds", "-g", "work", "--context", "bogus"}, "", "neither group nor isolated"},
				{[]string{"set", "builds", "-g", "work", "--interval", "1s"}, "", "an interval of 1000 ms cannot be used"},
				{[]string{"set", "builds", "-g", "work", "--zone", "Mars/Base"}, "", "is no time zone"},
				{[]string{"set", "builds", "--prompt", "x"}, "", "the groups work, family have a task"},
				{[]string{"set", "nix", "--prompt", "x"}, "", "there is no task \"nix\""},
				{[]string{"run", "builds", "-g", "work"}, run, runError},
				{[]string{"log", "builds", "-g", "work"}, `^STARTED +TOOK +STATUS +RUN +TOKENS +RESULT +ERROR\n$`, ""},
				{[]string{"log", "builds", "--limit", "0"}, "", "give a number from 1"},
				{[]string{"cancel", "builds", "-g", "family"}, `^task builds of family is cancelled\n$`, ""},
				{[]string{"cancel", "builds"}, `^task builds of work is cancelled\n$`, ""},
				{[]string{"cancel", "builds"}, "", "there is no task"},
			} {
				code, out, errs := d.berth(append([]string{"tasks"}, c.args...)...)
				errs = strings.TrimPrefix(errs, "no daemon: working on the store\n")
				if (code == exitDone) != (c.errs == "") || !regexp.MustCompile(c.out).MatchString(out) || !strings.Contains(errs, c.errs) {
					t.Errorf("tasks %q: got %d, %q, %q", c.args, code, out, errs)
				}
			}
		})
	}
}

// A task's log tells what became of it.
func TestTasksLog(t *testing.T) {
	d, stop := newTaskDaemon(t)
	defer stop()
	if code, _, errs := d.berth("tasks", "add", "-g", "family", "--id", "t1", "--interval", "60000", "hi"); code != exitDone {
		t.Fatal(errs)
	}
	now := time.Now().Add(2 * time.Minute)
	run := berth.Run{ID: "r1", Folder: "family", ChatJID: "console:family", Kind: berth.KindTask, Task: "t1", StartedAt: now}
	if _, ok, err := d.db.BeginTask(t.Context(), run); err != nil || !ok {
		t.Fatal(ok, err)
	}
	if _, err := d.db.FinishRun(t.Context(), berth.Ending{RunID: "r1", At: now.Add(2500 * time.Millisecond), Error: "it broke", NoRetry: true}); err != nil {
		t.Fatal(err)
	}
	code, out, errs := d.berth("tasks", "log", "t1")
	if code != exitDone || !regexp.MustCompile(`2\.5s +error +r1 +0 +- +it broke`).MatchString(out) {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
	code, out, _ = d.berth("tasks", "log", "t1", "--json")
	var runs []web.TaskRun
	if err := json.Unmarshal([]byte(out), &runs); code != exitDone || err != nil || len(runs) != 1 || runs[0].DurationMS != 2500 || runs[0].Status != berth.TaskError || runs[0].DueAt == nil {
		t.Errorf("got %d, %v, %q", code, err, out)
	}
}
