package dispatch

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	_ "time/tzdata"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/queue"
	"berth/orchestrator/internal/sqlite"
)

// worker claims tasks as turn does, works on each for a while and settles it.
type worker struct {
	*world
	work func(berth.Task) // may sleep
	n    int
}

func (k *worker) Run(ctx context.Context, s *queue.Slot, g berth.Group) queue.Result {
	k.mu.Lock()
	k.n++
	run := berth.Run{ID: fmt.Sprint("run", k.n), Folder: g.Folder, ChatJID: g.JID, Kind: berth.KindTask, Task: s.Task(), StartedAt: time.Now()}
	k.mu.Unlock()
	if run.Task == "" {
		return rest(ctx, s, g)
	}
	t, ok, err := k.db.BeginTask(ctx, run)
	if err != nil || !ok {
		return queue.Result{RetryAt: time.Now().Add(time.Second)}
	}
	k.note("%s/%s", g.Folder, t.ID)
	k.work(t)
	v, err := k.db.FinishRun(context.WithoutCancel(ctx), berth.Ending{RunID: run.ID, At: time.Now()})
	check(k.t, err)
	return queue.Result{RetryAt: v.RetryAt}
}

// schedule starts the scheduler, whose runs do some work.
func (w *world) schedule(work func(berth.Task)) {
	w.t.Helper()
	w.runs = &worker{world: w, work: work}
	// Who waits for the kernel would keep the bubble's time from passing.
	w.tasks.watch = func(context.Context) <-chan struct{} { return nil }
	ctx, cancel := context.WithCancel(w.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { check(w.t, w.RunTasks(ctx)) })
	w.t.Cleanup(wg.Wait)
	w.t.Cleanup(cancel)
	check(w.t, w.Start(w.t.Context()))
	synctest.Wait()
}

func takes(d time.Duration) func(berth.Task) { return func(berth.Task) { time.Sleep(d) } }

func (w *world) task(folder, id string, change func(*berth.Task)) berth.Task {
	w.t.Helper()
	t := berth.Task{
		ID: id, Folder: folder, ChatJID: "console:" + folder, Prompt: "p", Kind: berth.ScheduleInterval, Value: "60000", Zone: "UTC",
		Context: berth.ContextIsolated, CatchUp: berth.CatchUpOnce, CreatedAt: time.Now(),
	}
	if change != nil {
		change(&t)
	}
	t, err := w.db.AddTask(w.t.Context(), t)
	check(w.t, err)
	w.TasksChanged(folder)
	return t
}

func (w *world) runsOf(folder, id string) []berth.TaskRun {
	w.t.Helper()
	runs, err := w.db.TaskRuns(w.t.Context(), folder, id, 1000)
	check(w.t, err)
	slices.Reverse(runs)
	return runs
}

// started returns when the runs of a task began, from the bubble's beginning on.
func (w *world) started(folder, id string) (out []string) {
	for _, r := range w.runsOf(folder, id) {
		began := r.StartedAt.Sub(bubble)
		out = append(out, strings.TrimSpace(fmt.Sprintf("%v %s", began, strings.TrimPrefix(string(r.Outcome), "success"))))
	}
	return out
}

var bubble = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

func equal(t *testing.T, what string, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: got %q, want %q", what, got, want)
	}
}

// A task of the clock runs once a day over both changes of three zones, at the
// face that it names, or at the jump that leaves that out.
func TestTS05CronOverClockChanges(t *testing.T) {
	for _, c := range []struct {
		zone string
		from time.Time
		want []string
	}{
		{"Europe/Berlin", time.Date(2000, 3, 25, 0, 0, 0, 0, time.UTC), []string{"25 02:30 CET", "26 03:00 CEST", "27 02:30 CEST"}},
		{"Europe/Berlin", time.Date(2000, 10, 28, 0, 0, 0, 0, time.UTC), []string{"28 02:30 CEST", "29 02:30 CEST", "30 02:30 CET"}},
		{"America/New_York", time.Date(2000, 4, 1, 0, 0, 0, 0, time.UTC), []string{"01 02:30 EST", "02 03:00 EDT", "03 02:30 EDT"}},
		{"America/New_York", time.Date(2000, 10, 28, 0, 0, 0, 0, time.UTC), []string{"28 02:30 EDT", "29 02:30 EST", "30 02:30 EST"}},
		{"Australia/Lord_Howe", time.Date(2000, 3, 25, 0, 0, 0, 0, time.UTC), []string{"26 02:30 +1030", "27 02:30 +1030", "28 02:30 +1030"}},
		{"Australia/Lord_Howe", time.Date(2000, 8, 26, 0, 0, 0, 0, time.UTC), []string{"27 02:30 +11", "28 02:30 +11", "29 02:30 +11"}},
	} {
		t.Run(c.zone+c.from.Format(" Jan"), func(t *testing.T) {
			play(t, func(w *world) {
				time.Sleep(time.Until(c.from))
				w.add("a", true)
				w.schedule(takes(time.Minute))
				w.task("a", "t1", func(t *berth.Task) { t.Kind, t.Value, t.Zone = berth.ScheduleCron, "30 2 * * *", c.zone })
				time.Sleep(3 * 24 * time.Hour)
				zone, err := time.LoadLocation(c.zone)
				check(w.t, err)
				var got []string
				for _, r := range w.runsOf("a", "t1") {
					got = append(got, r.StartedAt.In(zone).Format("02 15:04 MST"))
				}
				equal(t, "runs", got, c.want)
			})
		})
	}
}

// Beats that come while a run is at work are passed over, not queued up, and the
// grid stays.
func TestRunLongerThanTheInterval(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		w.schedule(takes(150 * time.Second))
		w.task("a", "t1", nil)
		time.Sleep(12 * time.Minute)
		equal(t, "runs", w.started("a", "t1"), []string{"1m0s", "4m0s", "7m0s", "10m0s running"})
	})
}

// TS-04: five intervals of downtime are one run or none, as the task wants it, and
// then the grid goes on. A single time is run late, or is over.
func TestTS04Downtime(t *testing.T) {
	single := func(policy string) func(*berth.Task) {
		return func(t *berth.Task) { t.Kind, t.Value, t.CatchUp = berth.ScheduleOnce, "2000-01-01T00:01:00", policy }
	}
	for _, c := range []struct {
		what   string
		change func(*berth.Task)
		want   []string
		status berth.TaskStatus
	}{
		{"once", nil, []string{"5m30s", "6m0s", "7m0s"}, berth.TaskActive},
		{"skip", func(t *berth.Task) { t.CatchUp = berth.CatchUpSkip }, []string{"5m30s skipped", "6m0s", "7m0s"}, berth.TaskActive},
		{"a single time, once", single(berth.CatchUpOnce), []string{"5m30s"}, berth.TaskCompleted},
		{"a single time, skip", single(berth.CatchUpSkip), []string{"5m30s skipped"}, berth.TaskCompleted},
	} {
		play(t, func(w *world) {
			w.add("a", true)
			w.task("a", "t1", c.change)
			time.Sleep(5*time.Minute + 30*time.Second)
			w.schedule(takes(time.Second))
			time.Sleep(2 * time.Minute)
			equal(t, c.what, w.started("a", "t1"), c.want)
			if got, err := w.db.Task(w.t.Context(), "a", "t1"); err != nil || got.Status != c.status {
				t.Errorf("%s: %+v %v", c.what, got, err)
			}
		})
	}
}

// Without a container engine nothing starts; when it is back the time in between
// counts as downtime.
func TestTasksWaitForTheEngine(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		w.schedule(takes(time.Second))
		w.task("a", "t1", nil)
		w.task("a", "t2", func(t *berth.Task) { t.CatchUp = berth.CatchUpSkip })
		w.Pause()
		time.Sleep(5*time.Minute + 30*time.Second)
		w.want()
		check(w.t, w.Start(w.t.Context()))
		time.Sleep(time.Minute)
		equal(t, "once", w.started("a", "t1"), []string{"5m30s", "6m0s"})
		equal(t, "skip", w.started("a", "t2"), []string{"5m30s skipped", "6m1s"})
	})
}

// What waits for a slot is late, not missed, and is started once, whatever its
// policy.
func TestWaitingIsNotMissing(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		w.schedule(func(t berth.Task) {
			if t.ID == "long" {
				time.Sleep(10 * time.Minute)
			}
		})
		w.task("a", "long", func(t *berth.Task) { t.Kind, t.Value = berth.ScheduleOnce, "2000-01-01T00:01:00" })
		w.task("a", "t1", func(t *berth.Task) { t.Value, t.CatchUp = "120000", berth.CatchUpSkip })
		time.Sleep(15 * time.Minute)
		equal(t, "runs", w.started("a", "t1"), []string{"11m0s", "12m0s", "14m0s"})
	})
}

// TS-07: a task that is paused or cancelled while it waits, and one that is while it
// runs, does not run after that.
func TestTS07PauseAndCancel(t *testing.T) {
	for _, during := range []bool{true, false} {
		for what, change := range map[string]func(w *world) error{
			"pause":  func(w *world) error { _, err := w.db.PauseTask(w.t.Context(), "a", "t1", "x", ""); return err },
			"cancel": func(w *world) error { _, err := w.db.CancelTask(w.t.Context(), "a", "t1", ""); return err },
		} {
			play(t, func(w *world) {
				w.add("a", true)
				w.schedule(takes(90 * time.Second))
				other := "00:01:00"
				if during {
					other = "00:09:00"
				}
				w.task("a", "other", func(t *berth.Task) { t.Kind, t.Value = berth.ScheduleOnce, "2000-01-01T"+other })
				w.task("a", "t1", nil)
				time.Sleep(time.Minute + 30*time.Second)
				check(w.t, change(w))
				w.TasksChanged("a")
				time.Sleep(20 * time.Minute)
				var want []string
				if during {
					want = []string{"1m0s"}
				}
				equal(t, fmt.Sprint(what, during), w.started("a", "t1"), want)
			})
		}
	}
}

// TS-01, W42: a task without a group is paused once, the operator is told, and no
// run has to make room for it.
func TestW42TS01TaskWithoutAGroup(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", false)
		w.add("moved", false)
		w.schedule(takes(time.Second))
		w.say("a", "1", "hello") // an idle run
		for _, folder := range []string{"../../outside", "ghost", "moved"} {
			w.task(folder, "t1", func(t *berth.Task) { t.ChatJID = "console:old" })
		}
		time.Sleep(20 * time.Minute)
		w.want()
		if got := w.State(); got.Used != 1 {
			t.Errorf("%d runs, want the idle one", got.Used)
		}
		tasks, err := w.db.Tasks(w.t.Context(), "")
		check(w.t, err)
		for _, task := range tasks {
			if task.Status != berth.TaskPaused || task.PausedBy != "its group is not registered any more" {
				t.Errorf("%+v", task)
			}
		}
		audits, err := w.db.Audits(w.t.Context(), 100, "")
		check(w.t, err)
		if len(audits) != 3 || audits[0].What != "task.due" || audits[0].Target != "t1" || !strings.Contains(audits[0].Reason, "not registered") {
			t.Errorf("told %+v", audits)
		}
	})
}

// A task that is due again when its run has ended, and the slot is not free yet, is
// not forgotten.
func TestDueBeforeTheSlotIsFree(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		w.Dispatcher.queue = queue.New(1, time.Hour, func(ctx context.Context, s *queue.Slot) queue.Result {
			result := w.run(ctx, s)
			time.Sleep(time.Second)
			return result
		})
		w.schedule(takes(time.Second))
		w.task("a", "t1", nil)
		time.Sleep(61500 * time.Millisecond)
		_, err := w.db.RunTask(w.t.Context(), "a", "t1", time.Now())
		check(w.t, err)
		w.TasksChanged("a")
		time.Sleep(time.Minute)
		equal(t, "runs", w.started("a", "t1"), []string{"1m0s", "1m2s", "2m0s"})
	})
}

// TS-15: a second scheduler is none.
func TestTS15SecondScheduler(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		w.schedule(takes(time.Second))
		check(w.t, w.RunTasks(w.t.Context())) // returns
		w.task("a", "t1", nil)
		time.Sleep(90 * time.Second)
		equal(t, "runs", w.started("a", "t1"), []string{"1m0s"})
	})
}

// W41: a run that an earlier daemon left is adopted as that of its task, which is
// not started beside it, however often it is due, and goes on after it.
func TestW41AdoptedTask(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		w.task("a", "t1", nil)
		time.Sleep(time.Minute)
		run := berth.Run{ID: "left", Folder: "a", ChatJID: "console:a", Kind: berth.KindTask, Task: "t1", StartedAt: time.Now()}
		_, ok, err := w.db.BeginTask(w.t.Context(), run)
		if check(w.t, err); !ok {
			t.Fatal("not due")
		}
		time.Sleep(90 * time.Second)
		w.schedule(takes(time.Second))
		w.runs = adopter{w.runs.(*worker)}
		check(w.t, w.Start(w.t.Context()))
		time.Sleep(4 * time.Minute)
		equal(t, "runs", w.started("a", "t1"), []string{"1m0s", "6m0s"})
	})
}

// adopter carries a run of before for three minutes.
type adopter struct{ *worker }

func (a adopter) Adopt(ctx context.Context, s *queue.Slot, g berth.Group, run berth.Run, container string, taken func()) queue.Result {
	taken()
	if s.Task() != run.Task {
		a.t.Errorf("the slot is for %q", s.Task())
	}
	time.Sleep(3 * time.Minute)
	_, err := a.db.FinishRun(ctx, berth.Ending{RunID: run.ID, At: time.Now()})
	check(a.t, err)
	return queue.Result{}
}

// Clocks that are set are noticed: no task waits longer than its interval, and what
// the jump went past was missed.
func TestClockIsSet(t *testing.T) {
	for _, c := range []struct {
		by   time.Duration
		want int // runs within an hour
	}{{-5 * time.Hour, 6}, {48 * time.Hour, 7}} {
		play(t, func(w *world) {
			w.add("a", true)
			var mu sync.Mutex
			var set time.Duration
			now := func() time.Time {
				mu.Lock()
				defer mu.Unlock()
				return time.Now().Round(0).Add(set)
			}
			w.tasks.now = now
			var runs atomic.Int64
			w.schedule(nil)
			w.runs = &ticker{worker: w.runs.(*worker), now: now, runs: &runs}
			w.task("a", "t1", func(t *berth.Task) { t.Value = "600000" })
			time.Sleep(time.Minute)
			mu.Lock()
			set = c.by
			mu.Unlock()
			time.Sleep(time.Hour)
			if got := runs.Load(); got != int64(c.want) {
				t.Errorf("set by %v: %d runs, want %d", c.by, got, c.want)
			}
		})
	}
}

// ticker is a worker with a clock of its own.
type ticker struct {
	*worker
	now  func() time.Time
	runs *atomic.Int64
}

func (k *ticker) Run(ctx context.Context, s *queue.Slot, g berth.Group) queue.Result {
	id := fmt.Sprint("run", k.runs.Add(1))
	_, ok, err := k.db.BeginTask(ctx, berth.Run{ID: id, Folder: g.Folder, ChatJID: g.JID, Kind: berth.KindTask, Task: s.Task(), StartedAt: k.now()})
	if err != nil || !ok {
		k.t.Errorf("begin: %v %v", ok, err)
		return queue.Result{RetryAt: time.Now().Add(time.Second)}
	}
	_, err = k.db.FinishRun(ctx, berth.Ending{RunID: id, At: k.now()})
	check(k.t, err)
	return queue.Result{}
}

// A store that does not answer is asked again.
func TestStoreFailsWhileLooking(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", true)
		failing := &flaky{Store: w.store, fails: 3}
		w.Dispatcher.store = failing
		w.schedule(takes(time.Second))
		w.task("a", "t1", nil)
		time.Sleep(150 * time.Second)
		equal(t, "runs", w.started("a", "t1"), []string{"1m0s", "2m0s"})
	})
}

type flaky struct {
	Store
	fails int
}

func (f *flaky) DueTasks(ctx context.Context, now time.Time) ([]berth.Due, time.Time, error) {
	if f.fails--; f.fails >= 0 {
		return nil, time.Time{}, fmt.Errorf("the disk does not answer")
	}
	return f.Store.DueTasks(ctx, now)
}

// A day of many tasks: each runs once, at its time. What it costs is logged.
func TestManyTasksInADay(t *testing.T) {
	n := 2000
	if raceEnabled {
		n = 200
	}
	if testing.Verbose() && !raceEnabled {
		n = 10_000
	}
	play(t, func(w *world) {
		w.Dispatcher.log = zap.NewNop()
		groups := n / 400
		for g := range groups + 1 {
			w.add(fmt.Sprint("g", g), true)
		}
		late := make(map[time.Duration]int)
		w.schedule(func(t berth.Task) { time.Sleep(2 * time.Second) })
		w.Pause()
		for i := range n {
			w.task(fmt.Sprint("g", i%(groups+1)), fmt.Sprint("t", i), func(t *berth.Task) {
				t.Kind, t.Value = berth.ScheduleOnce, bubble.Add(24*time.Hour*time.Duration(i)/time.Duration(n)+time.Hour).Format("2006-01-02T15:04:05")
			})
		}
		check(w.t, w.Start(w.t.Context()))
		before := cpu()
		time.Sleep(26 * time.Hour)
		used := cpu() - before
		var mem runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&mem)
		total := 0
		for i := range n {
			runs := w.runsOf(fmt.Sprint("g", i%(groups+1)), fmt.Sprint("t", i))
			if len(runs) != 1 {
				t.Fatalf("task %d has %d runs", i, len(runs))
			}
			late[runs[0].StartedAt.Sub(runs[0].DueAt).Round(time.Second)]++
			total++
		}
		t.Logf("%d tasks in a day: %v of processor time, claims and ends on disk included, %d KiB of heap; late by %v", total, used.Round(time.Millisecond), mem.HeapAlloc>>10, late)
	})
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkDueToDispatched tells how long after its time a task is given to a run,
// with 1000 tasks in 1000 groups.
func BenchmarkDueToDispatched(b *testing.B) {
	const n = 1000
	db, err := sqlite.Open(b.Context(), filepath.Join(b.TempDir(), "db"), func(string, bool) {})
	if err != nil {
		b.Fatal(err)
	}
	defer db.Close()
	runs := &stopwatch{due: make(map[string]time.Time), late: make(chan time.Duration, n)}
	d, err := New(b.Context(), Options{Store: db, Runs: runs, Fleet: noFleet{}, Limit: n, IdleTimeout: time.Hour, Log: zap.NewNop()})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Shutdown(b.Context())
	for i := range n {
		folder := fmt.Sprint("g", i)
		if err := d.AddGroup(b.Context(), berth.Group{Folder: folder, JID: "console:" + folder, Name: folder, AddedAt: time.Now()}); err != nil {
			b.Fatal(err)
		}
		_, err := db.AddTask(b.Context(), berth.Task{ID: "t", Folder: folder, ChatJID: "console:" + folder, Prompt: "p", Kind: berth.ScheduleInterval, Value: "86400000", Zone: "UTC", CreatedAt: time.Now()})
		if err != nil {
			b.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	go func() { _ = d.RunTasks(ctx) }()
	if err := d.Start(ctx); err != nil {
		b.Fatal(err)
	}
	var all []time.Duration
	for b.Loop() {
		begin := time.Now().Add(3 * time.Second)
		for i := range n {
			folder, at := fmt.Sprint("g", i), begin.Add(time.Duration(i)*2*time.Millisecond).Truncate(time.Millisecond)
			runs.mu.Lock()
			runs.due[folder] = at
			runs.mu.Unlock()
			if _, err := db.RunTask(ctx, folder, "t", at); err != nil {
				b.Fatal(err)
			}
		}
		d.TasksChanged("")
		for range n {
			all = append(all, <-runs.late)
		}
	}
	slices.Sort(all)
	b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(all[len(all)*99/100].Microseconds())/1000, "p99-ms")
}

// stopwatch notes how late each task was given to it, and claims none.
type stopwatch struct {
	mu   sync.Mutex
	due  map[string]time.Time
	late chan time.Duration
}

func (s *stopwatch) Run(_ context.Context, slot *queue.Slot, g berth.Group) queue.Result {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if due, ok := s.due[g.Folder]; ok {
		delete(s.due, g.Folder)
		s.late <- now.Sub(due)
	}
	return queue.Result{RetryAt: time.Now().Add(time.Hour)} // not claimed: it stays with the queue
}

func (s *stopwatch) Adopt(context.Context, *queue.Slot, berth.Group, berth.Run, string, func()) queue.Result {
	return queue.Result{}
}

type noFleet struct{}

func (noFleet) Fleet(context.Context) ([]Container, error)    { return nil, nil }
func (noFleet) RemoveContainer(context.Context, string) error { return nil }
