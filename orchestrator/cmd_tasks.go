package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
)

// taskDesk is web.TaskDesk over a store.
type taskDesk struct {
	store   *sqlite.DB
	zone    *time.Location // of tasks that name none
	groups  func(context.Context) ([]berth.Group, error)
	changed func(folder string) // tells the daemon; nil: there is none
}

// operatorTask says in a task that no group made or paused it.
const operatorTask = "operator"

func (d taskDesk) Tasks(ctx context.Context, folder string) ([]web.Task, error) {
	rows, err := d.store.Tasks(ctx, folder)
	out := make([]web.Task, 0, len(rows))
	for _, t := range rows {
		out = append(out, describeTask(t))
	}
	return out, err
}

func describeTask(t berth.Task) web.Task {
	w := web.Task{
		ID: t.ID, Group: t.Folder, Prompt: t.Prompt, Type: t.Kind, Value: t.Value, Zone: t.Zone, Context: t.Context, Script: t.Script, CatchUp: t.CatchUp,
		Status: t.Status, PausedBy: t.PausedBy, LastResult: t.LastResult, CreatedBy: t.CreatedBy, CreatedAt: t.CreatedAt,
	}
	if zone, err := time.LoadLocation(t.Zone); err == nil && !t.NextRun.IsZero() {
		t.NextRun = t.NextRun.In(zone)
	}
	w.NextRun, w.LastRun = given(t.NextRun), given(t.LastRun)
	return w
}

// given is nil for the zero time.
func given(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

func (d taskDesk) AddTask(ctx context.Context, in web.NewTask) (web.Task, error) {
	t := berth.Task{
		ID: in.ID, Folder: in.Group, Prompt: in.Prompt, Kind: in.Type, Value: in.Value, Zone: in.Zone, Context: in.Context, Script: in.Script, CatchUp: in.CatchUp,
		CreatedBy: operatorTask, CreatedAt: time.Now(),
	}
	if t.ID == "" {
		t.ID = "task-" + berth.NewID(6)
	}
	if t.Zone == "" {
		t.Zone = d.zone.String()
	}
	if t.Context == "" {
		t.Context = berth.ContextIsolated
	}
	if t.CatchUp == "" {
		t.CatchUp = berth.CatchUpOnce
	}
	if err := validTask(t); err != nil {
		return web.Task{}, err
	}
	groups, err := d.groups(ctx)
	if err != nil {
		return web.Task{}, err
	}
	i := slices.IndexFunc(groups, func(g berth.Group) bool { return g.Folder == t.Folder })
	if i < 0 {
		return web.Task{}, berth.Errorf(berth.NotFound, "there is no group %.80q: see berth groups ls, or add it with berth groups add", t.Folder)
	}
	t.ChatJID = groups[i].JID
	return d.tell(d.store.AddTask(ctx, t))
}

func (d taskDesk) UpdateTask(ctx context.Context, folder, id string, in web.TaskChange) (web.Task, error) {
	if in == (web.TaskChange{}) {
		return web.Task{}, berth.Errorf(berth.Invalid, "there is nothing to change: say what")
	}
	folder, err := d.find(ctx, folder, id)
	if err != nil {
		return web.Task{}, err
	}
	t, err := d.store.Task(ctx, folder, id)
	if err != nil {
		return web.Task{}, err
	}
	for field, value := range map[*string]*string{&t.Prompt: in.Prompt, &t.Context: in.Context, &t.Script: in.Script, &t.CatchUp: in.CatchUp} {
		if value != nil {
			*field = *value
		}
	}
	if err := validTask(t); err != nil {
		return web.Task{}, err
	}
	return d.tell(d.store.UpdateTask(ctx, folder, id, berth.TaskChange{
		Prompt: in.Prompt, Kind: in.Type, Value: in.Value, Zone: in.Zone, Context: in.Context, Script: in.Script, CatchUp: in.CatchUp,
	}, time.Now(), ""))
}

// validTask returns a berth.Invalid error unless all but the schedule of a task
// can be used.
func validTask(t berth.Task) error {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
	switch {
	case strings.Trim(t.ID, allowed) != "" || len(t.ID) > 64:
		return berth.Errorf(berth.Invalid, "the id %.80q is not 1 to 64 letters, digits, - or _", t.ID)
	case t.Context != berth.ContextGroup && t.Context != berth.ContextIsolated:
		return berth.Errorf(berth.Invalid, "the context %.40q is neither group nor isolated", t.Context)
	case t.CatchUp != berth.CatchUpOnce && t.CatchUp != berth.CatchUpSkip:
		return berth.Errorf(berth.Invalid, "catch-up %.40q is neither once nor skip", t.CatchUp)
	case t.Script != "" && berth.ValidText(t.Script) != nil:
		return berth.Errorf(berth.Invalid, "the script: %w", berth.ValidText(t.Script))
	}
	return berth.ValidText(t.Prompt)
}

// tell passes on what a change returned, and tells the daemon of it.
func (d taskDesk) tell(t berth.Task, err error) (web.Task, error) {
	if err != nil {
		return web.Task{}, err
	}
	if d.changed != nil {
		d.changed(t.Folder)
	}
	return describeTask(t), nil
}

// find returns the folder of the task that is meant.
func (d taskDesk) find(ctx context.Context, folder, id string) (string, error) {
	if folder != "" {
		return folder, nil
	}
	found, err := d.store.TasksNamed(ctx, id)
	if err != nil {
		return "", err
	}
	var folders []string
	for _, t := range found {
		folders = append(folders, t.Folder)
	}
	switch len(folders) {
	case 0:
		return "", berth.Errorf(berth.NotFound, "there is no task %.80q: see berth tasks ls", id)
	case 1:
		return folders[0], nil
	}
	return "", berth.Errorf(berth.Conflict, "the groups %s have a task %.80q each: name one with --group", strings.Join(folders, ", "), id)
}

func (d taskDesk) Task(ctx context.Context, folder, id string) (web.Task, error) {
	folder, err := d.find(ctx, folder, id)
	if err != nil {
		return web.Task{}, err
	}
	t, err := d.store.Task(ctx, folder, id)
	return describeTask(t), err
}

func (d taskDesk) ChangeTask(ctx context.Context, verb web.TaskVerb, folder, id string) (web.Task, error) {
	folder, err := d.find(ctx, folder, id)
	if err != nil {
		return web.Task{}, err
	}
	switch verb {
	case web.TaskRunNow:
		if d.changed == nil {
			return web.Task{}, berth.Errorf(berth.Unavailable, "no daemon runs that could run it: start one with berth run")
		}
		return d.tell(d.store.RunTask(ctx, folder, id, time.Now()))
	case web.TaskPause:
		return d.tell(d.store.PauseTask(ctx, folder, id, operatorTask, ""))
	case web.TaskResume:
		return d.tell(d.store.ResumeTask(ctx, folder, id, time.Now(), ""))
	case web.TaskCancel:
		return d.tell(d.store.CancelTask(ctx, folder, id, ""))
	}
	return web.Task{}, berth.Errorf(berth.Invalid, "nobody can %.40q a task: only run, pause, resume and cancel it", verb)
}

func (d taskDesk) TaskRuns(ctx context.Context, folder, id string, limit int) ([]web.TaskRun, error) {
	t, err := d.Task(ctx, folder, id)
	if err != nil {
		return nil, err
	}
	rows, err := d.store.TaskRuns(ctx, t.Group, id, min(max(limit, 1), maxListed))
	out := make([]web.TaskRun, 0, len(rows))
	for _, r := range rows {
		out = append(out, web.TaskRun{
			Run: r.RunID, DueAt: given(r.DueAt), StartedAt: r.StartedAt, DurationMS: r.Duration.Milliseconds(), Status: r.Outcome,
			Result: r.Result, Error: r.Error, InputTokens: r.InputTokens, OutputTokens: r.OutputTokens,
		})
	}
	return out, err
}

func (c *control) desk() taskDesk {
	groups := func(context.Context) ([]berth.Group, error) { return c.dispatcher.Groups(), nil }
	return taskDesk{c.db, c.cfg.Timezone, groups, c.dispatcher.TasksChanged}
}

func (c *control) Tasks(ctx context.Context, folder string) ([]web.Task, error) {
	return c.desk().Tasks(ctx, folder)
}

func (c *control) AddTask(ctx context.Context, in web.NewTask) (web.Task, error) {
	return c.desk().AddTask(ctx, in)
}

func (c *control) Task(ctx context.Context, folder, id string) (web.Task, error) {
	return c.desk().Task(ctx, folder, id)
}

func (c *control) UpdateTask(ctx context.Context, folder, id string, in web.TaskChange) (web.Task, error) {
	return c.desk().UpdateTask(ctx, folder, id, in)
}

func (c *control) ChangeTask(ctx context.Context, verb web.TaskVerb, folder, id string) (web.Task, error) {
	return c.desk().ChangeTask(ctx, verb, folder, id)
}

func (c *control) TaskRuns(ctx context.Context, folder, id string, limit int) ([]web.TaskRun, error) {
	return c.desk().TaskRuns(ctx, folder, id, limit)
}

func (a *app) tasksCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "tasks",
		Short: "Schedule prompts for a group's agent",
		Long: `Schedule prompts for a group's agent.

A task has an id, which is unique within its group: name the group with --group
where several use the same. Its result goes to the group's chat. Without a
daemon these commands work on the store itself, and nothing runs.`,
		Example: `  berth tasks add -g family --cron "0 9 * * 1-5" "What is on today?"
  berth tasks ls
  berth tasks log morning
  berth tasks cancel morning -g family`,
		Args: cobra.NoArgs,
		RunE: a.do(func(context.Context, []string) error {
			return misusef("tasks needs one of add, ls, show, set, run, pause, resume, cancel, log")
		}),
	}
	cmd.AddCommand(
		a.tasksAddCommand(), a.tasksListCommand(), a.tasksShowCommand(), a.tasksSetCommand(),
		a.tasksChangeCommand(web.TaskRunNow, "Run a task now; its schedule stays", "is due now"),
		a.tasksChangeCommand(web.TaskPause, "Keep a task from running", "is paused"),
		a.tasksChangeCommand(web.TaskResume, "Let a paused task run again; what it missed is not made up for", "goes on"),
		a.tasksChangeCommand(web.TaskCancel, "End a task for good", "is cancelled"),
		a.tasksLogCommand(),
	)
	return cmd
}

func (a *app) tasksAddCommand() *cobra.Command {
	var in web.NewTask
	var when when
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "add -g GROUP --cron|--interval|--once WHEN PROMPT",
		Short: "Schedule a prompt",
		Long: `Schedule a prompt.

A script is run first, in the group's container. The last line that it prints
decides whether the agent is woken: {"wakeAgent":true,"data":...}; the data goes
into the prompt. A script that fails, or takes longer than 30 s, wakes nobody.`,
		Example: `  berth tasks add -g family --cron "0 9 * * 1-5" --zone Europe/Berlin "What is on today?"
  berth tasks add -g work --interval 90m --id builds --catch-up skip "Is the build green?"
  berth tasks add -g family --once 2027-02-01T15:30 --context group "Remind Ann of the dentist"
  berth tasks add -g work --cron @hourly --script 'test -e inbox/new && echo "{\"wakeAgent\":true}"' "Sort the inbox"`,
		Args: cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			in.Prompt = args[0]
			if in.Group == "" {
				return misusef("name the group with --group")
			}
			var given int
			if in.Type, in.Value, given = when.read(); given != 1 {
				return misusef("give one of --cron, --interval and --once")
			}
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				t, err := api.AddTask(ctx, in)
				if err != nil {
					return err
				}
				return a.printTask(t, "added", asJSON)
			})
		}),
	}
	f := cmd.Flags()
	f.StringVarP(&in.Group, "group", "g", "", "the group that runs it")
	when.flags(cmd)
	f.StringVar(&in.ID, "id", "", "its id within the group (default a random one)")
	f.StringVar(&in.Zone, "zone", "", "time zone such as Europe/Berlin (default the daemon's)")
	f.StringVar(&in.Context, "context", berth.ContextIsolated, "group (the chat's session) or isolated (a new one each time)")
	f.StringVar(&in.Script, "script", "", "command that decides in the container whether the agent is woken")
	f.StringVar(&in.CatchUp, "catch-up", berth.CatchUpOnce, "what is missed is made up for with one run (once), or not (skip)")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// when is a schedule on the command line.
type when struct{ cron, interval, once string }

func (w *when) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&w.cron, "cron", "", "five fields such as \"0 9 * * 1-5\", or @hourly, @daily, @weekly, @monthly, @yearly")
	f.StringVar(&w.interval, "interval", "", "milliseconds, or a duration such as 90m; at least a minute")
	f.StringVar(&w.once, "once", "", "a single time such as 2027-02-01T15:30, with Z or an offset behind it if it is not of the time zone")
}

// read returns the last one of the schedules that were given, and how many were.
func (w *when) read() (kind, value string, given int) {
	for _, s := range []struct{ kind, value string }{{berth.ScheduleCron, w.cron}, {berth.ScheduleInterval, w.interval}, {berth.ScheduleOnce, w.once}} {
		if s.value != "" {
			kind, value = s.kind, s.value
			given++
		}
	}
	if d, err := time.ParseDuration(value); kind == berth.ScheduleInterval && err == nil {
		value = strconv.FormatInt(d.Milliseconds(), 10)
	}
	return kind, value, given
}

func (a *app) tasksSetCommand() *cobra.Command {
	var group string
	var when when
	var texts struct{ prompt, zone, context, script, catchUp string }
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "set ID",
		Short: "Change a task; what is not given stays",
		Long: `Change a task; what is not given stays.

A new schedule or time zone gives it a new next run, and makes a completed task
active again. A paused one stays paused.`,
		Example: `  berth tasks set builds --interval 2h
  berth tasks set morning -g family --cron "0 8 * * 1-5" --prompt "What is on today, and the weather?"
  berth tasks set builds --script ""`,
		Args: cobra.ExactArgs(1),
	}
	cmd.RunE = a.do(func(ctx context.Context, args []string) error {
		var in web.TaskChange
		kind, value, given := when.read()
		switch {
		case given > 1:
			return misusef("give at most one of --cron, --interval and --once")
		case given == 1:
			in.Type, in.Value = &kind, &value
		}
		for name, field := range map[string]struct {
			to   **string
			from *string
		}{
			"prompt": {&in.Prompt, &texts.prompt}, "zone": {&in.Zone, &texts.zone}, "context": {&in.Context, &texts.context},
			"script": {&in.Script, &texts.script}, "catch-up": {&in.CatchUp, &texts.catchUp},
		} {
			if cmd.Flags().Changed(name) {
				*field.to = field.from
			}
		}
		if in == (web.TaskChange{}) {
			return misusef("say what to change: see berth tasks set --help")
		}
		return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
			t, err := api.UpdateTask(ctx, group, args[0], in)
			if err != nil {
				return err
			}
			return a.printTask(t, "is changed", asJSON)
		})
	})
	f := cmd.Flags()
	f.StringVarP(&group, "group", "g", "", "its group")
	f.StringVar(&texts.prompt, "prompt", "", "what is to be done")
	when.flags(cmd)
	f.StringVar(&texts.zone, "zone", "", "time zone such as Europe/Berlin")
	f.StringVar(&texts.context, "context", "", "group (the chat's session) or isolated (a new one each time)")
	f.StringVar(&texts.script, "script", "", "command that decides in the container whether the agent is woken; \"\" for none")
	f.StringVar(&texts.catchUp, "catch-up", "", "what is missed is made up for with one run (once), or not (skip)")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) printTask(t web.Task, what string, asJSON bool) error {
	if asJSON {
		return a.printJSON(t)
	}
	_, err := fmt.Fprintf(a.stdout, "task %s of %s %s%s\n", t.ID, t.Group, what, nextRun(", next ", t))
	return err
}

// nextRun tells when a task runs next, by the clocks of its zone, after some words;
// nothing if it does not.
func nextRun(before string, t web.Task) string {
	if t.NextRun == nil {
		return ""
	}
	next := *t.NextRun
	if zone, err := time.LoadLocation(t.Zone); err == nil {
		next = next.In(zone)
	}
	return before + next.Format("2006-01-02 15:04:05 MST")
}

func (a *app) tasksListCommand() *cobra.Command {
	var group string
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the tasks, the next one first",
		Example: "  berth tasks ls\n  berth tasks ls -g family --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				tasks, err := api.Tasks(ctx, group)
				if err != nil {
					return err
				}
				if asJSON {
					return a.printJSON(tasks)
				}
				rows := [][]string{{"ID", "GROUP", "STATUS", "NEXT", "SCHEDULE", "PROMPT", "LAST RESULT"}}
				for _, t := range tasks {
					rows = append(rows, []string{t.ID, t.Group, string(t.Status), nextRun("", t), t.Type + " " + t.Value, beginning(t.Prompt), beginning(t.LastResult)})
				}
				return a.printTable(rows)
			})
		}),
	}
	cmd.Flags().StringVarP(&group, "group", "g", "", "of this group alone")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) tasksShowCommand() *cobra.Command {
	var group string
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "show ID",
		Short:   "Show all of a task",
		Example: "  berth tasks show builds\n  berth tasks show builds -g work --json",
		Args:    cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				t, err := api.Task(ctx, group, args[0])
				if err != nil {
					return err
				}
				if asJSON {
					return a.printJSON(t)
				}
				rows := [][]string{
					{"id", t.ID}, {"group", t.Group}, {"status", string(t.Status)}, {"paused by", t.PausedBy}, {"next run", nextRun("", t)},
					{"schedule", t.Type + " " + t.Value}, {"time zone", t.Zone}, {"context", t.Context}, {"catch-up", t.CatchUp},
					{"made by", t.CreatedBy + ", " + t.CreatedAt.Local().Format(time.DateTime)}, {"last result", t.LastResult}, {"script", t.Script}, {"prompt", t.Prompt},
				}
				return a.printTable(slices.DeleteFunc(rows, func(row []string) bool { return row[1] == "" }))
			})
		}),
	}
	cmd.Flags().StringVarP(&group, "group", "g", "", "its group")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) tasksChangeCommand(verb web.TaskVerb, short, done string) *cobra.Command {
	var group string
	var asJSON bool
	cmd := &cobra.Command{
		Use:     string(verb) + " ID",
		Short:   short,
		Example: fmt.Sprintf("  berth tasks %s builds\n  berth tasks %[1]s builds -g work", verb),
		Args:    cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				t, err := api.ChangeTask(ctx, verb, group, args[0])
				if err != nil {
					return err
				}
				return a.printTask(t, done, asJSON)
			})
		}),
	}
	cmd.Flags().StringVarP(&group, "group", "g", "", "its group")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) tasksLogCommand() *cobra.Command {
	var group string
	var limit int
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "log ID",
		Short:   "List the runs of a task, newest first",
		Example: "  berth tasks log builds\n  berth tasks log builds -g work --limit 100 --json",
		Args:    cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			if limit < 1 || limit > maxListed {
				return misusef("--limit %d: give a number from 1 to %d", limit, maxListed)
			}
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				runs, err := api.TaskRuns(ctx, group, args[0], limit)
				if err != nil {
					return err
				}
				if asJSON {
					return a.printJSON(runs)
				}
				rows := [][]string{{"STARTED", "TOOK", "STATUS", "RUN", "TOKENS", "RESULT", "ERROR"}}
				for _, r := range runs {
					took := (time.Duration(r.DurationMS) * time.Millisecond).Round(100 * time.Millisecond).String()
					rows = append(rows, []string{
						r.StartedAt.Local().Format(time.DateTime), took, string(r.Status), r.Run, strconv.FormatInt(r.InputTokens+r.OutputTokens, 10), beginning(r.Result), r.Error,
					})
				}
				return a.printTable(rows)
			})
		}),
	}
	f := cmd.Flags()
	f.StringVarP(&group, "group", "g", "", "its group")
	f.IntVar(&limit, "limit", 20, "how many")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
