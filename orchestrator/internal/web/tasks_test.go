package web

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"berth/orchestrator/internal/berth"
)

// desk answers with what it was asked.
type desk struct{ asked string }

func (d *desk) task(err error, format string, args ...any) (Task, error) {
	d.asked = fmt.Sprintf(format, args...)
	return Task{ID: "t"}, err
}

func (d *desk) Tasks(_ context.Context, folder string) ([]Task, error) {
	t, err := d.task(nil, "tasks %q", folder)
	return []Task{t}, err
}

func (d *desk) AddTask(_ context.Context, in NewTask) (Task, error) {
	return d.task(nil, "add %+v", in)
}

func (d *desk) Task(_ context.Context, folder, id string) (Task, error) {
	return d.task(berth.Errorf(berth.NotFound, "no %s", id), "show %q %q", folder, id)
}

func (d *desk) UpdateTask(_ context.Context, folder, id string, c TaskChange) (Task, error) {
	return d.task(nil, "set %q %q %t %q", folder, id, c.Prompt == nil, *c.Script)
}

func (d *desk) ChangeTask(_ context.Context, verb TaskVerb, folder, id string) (Task, error) {
	return d.task(nil, "%s %q %q", verb, folder, id)
}

func (d *desk) TaskRuns(_ context.Context, folder, id string, limit int) ([]TaskRun, error) {
	_, err := d.task(nil, "log %q %q %d", folder, id, limit)
	return []TaskRun{{Run: "r"}}, err
}

// What the client asks for arrives, whatever is in an id.
func TestTaskCalls(t *testing.T) {
	d := &desk{}
	c, _, _ := serve(t, &backend{TaskDesk: d})
	ctx := t.Context()
	for _, call := range []struct {
		want string
		kind berth.Kind
		do   func() error
	}{
		{`tasks "a b"`, 0, func() error { _, err := c.Tasks(ctx, "a b"); return err }},
		{`add {ID: Group:a Prompt:p Type:cron Value:@daily Zone: Context: Script: CatchUp:}`, 0, func() error {
			_, err := c.AddTask(ctx, NewTask{Group: "a", Prompt: "p", Type: "cron", Value: "@daily"})
			return err
		}},
		{`show "" "x/../y"`, berth.NotFound, func() error { _, err := c.Task(ctx, "", "x/../y"); return err }},
		{`set "a b" "t/1" true ""`, 0, func() error { _, err := c.UpdateTask(ctx, "a b", "t/1", TaskChange{Script: new("")}); return err }},
		{`pause "a&b" "t?1"`, 0, func() error { _, err := c.ChangeTask(ctx, TaskPause, "a&b", "t?1"); return err }},
		{`log "a" "log" 7`, 0, func() error { _, err := c.TaskRuns(ctx, "a", "log", 7); return err }},
	} {
		err := call.do()
		if known, ok := errors.AsType[*berth.Error](err); (err == nil) != (call.kind == 0) || ok && known.Kind != call.kind {
			t.Errorf("%s: %v", call.want, err)
		}
		if d.asked != call.want {
			t.Errorf("asked %s, want %s", d.asked, call.want)
		}
	}
}
