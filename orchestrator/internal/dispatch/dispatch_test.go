package dispatch

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/queue"
	"berth/orchestrator/internal/sqlite"
)

// world is a Dispatcher over a real store, with runs that only take notes.
type world struct {
	*Dispatcher
	t  *testing.T
	db *sqlite.DB

	mu      sync.Mutex
	notes   []string
	fleet   []Container
	removed []string
	down    error
}

func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.notes = append(w.notes, fmt.Sprintf(format, args...))
}

func (w *world) Run(_ context.Context, _ *queue.Slot, g berth.Group) queue.Result {
	w.note("run %s", g.Folder)
	return queue.Result{}
}

func (w *world) Adopt(_ context.Context, _ *queue.Slot, g berth.Group, run berth.Run, container string, _ func()) queue.Result {
	w.note("adopt %s %s %s", g.Folder, run.ID, container)
	return queue.Result{}
}

func (w *world) Fleet(context.Context) ([]Container, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.fleet), w.down
}

func (w *world) RemoveContainer(_ context.Context, id string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.removed = append(w.removed, id)
	return nil
}

func (w *world) want(what ...string) {
	w.t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Equal(w.notes, what) {
		w.t.Errorf("got %q, want %q", w.notes, what)
	}
	w.notes = nil
}

func play(t *testing.T, fn func(*world)) {
	path := filepath.Join(t.TempDir(), "db")
	synctest.Test(t, func(t *testing.T) {
		db, err := sqlite.Open(t.Context(), path, func(string, bool) {})
		check(t, err)
		defer func() { check(t, db.Close()) }()
		w := &world{t: t, db: db}
		w.Dispatcher, err = New(t.Context(), Options{Store: db, Runs: w, Fleet: w, Limit: 5, IdleTimeout: time.Hour, Assistant: "Andy", Log: zaptest.NewLogger(t)})
		check(t, err)
		defer w.Shutdown(t.Context())
		fn(w)
	})
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) add(folder string, trigger bool) berth.Group {
	w.t.Helper()
	g := berth.Group{JID: "console:" + folder, Folder: folder, Name: folder, RequiresTrigger: trigger, AddedAt: time.Now()}
	check(w.t, w.AddGroup(w.t.Context(), g))
	return g
}

func (w *world) say(folder, id, text string) berth.Message {
	w.t.Helper()
	m, err := w.Receive(w.t.Context(), berth.Message{ID: id, ChatJID: "console:" + folder, Text: text, Time: time.Now()})
	check(w.t, err)
	return m
}

// live makes a run that an earlier daemon left.
func (w *world) live(folder, id string) {
	w.t.Helper()
	_, ok, err := w.db.BeginRun(w.t.Context(), berth.Run{ID: id, Folder: folder, ChatJID: "console:" + folder, StartedAt: time.Now()})
	check(w.t, err)
	if !ok {
		w.t.Fatal("nothing to do")
	}
}

// ML-04, C-MSG-3: only the trigger wakes; main and groups without need none.
func TestWhatWakes(t *testing.T) {
	play(t, func(w *world) {
		w.add("family", true)
		w.add("main", true)
		w.add("open", false)
		check(w.t, w.Start(w.t.Context()))
		if w.say("family", "1", "hello").Wakes {
			w.t.Error("it woke")
		}
		w.want()
		w.say("family", "2", " @andy, hello")
		w.want("run family")
		w.say("family", "2", " @andy, hello") // redelivered
		w.want()
		w.say("main", "1", "hello")
		w.want("run main")
		w.say("open", "1", "hello")
		w.want("run open")
		_, err := w.Receive(w.t.Context(), berth.Message{ID: "a", ChatJID: "console:family", Text: "a reply to it", Addressed: true, Time: time.Now()})
		check(w.t, err)
		w.want("run family")
		// Berth's own words wake nobody.
		_, err = w.Receive(w.t.Context(), berth.Message{ID: "b", ChatJID: "console:open", Text: "hi", Bot: true, Time: time.Now()})
		check(w.t, err)
		w.want()
	})
}

// ML-06: a chat that is not registered is not stored.
func TestUnregisteredChat(t *testing.T) {
	play(t, func(w *world) {
		_, err := w.Receive(w.t.Context(), berth.Message{ID: "1", ChatJID: "x@g.us", Text: "@Andy hi", Time: time.Now()})
		if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != berth.NotFound {
			w.t.Errorf("got %v", err)
		}
	})
}

// Guarantee 5: what was pending is dispatched at the start, and not before the
// engine is there.
func TestStartWakesWhatIsPending(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", false)
		w.add("b", true)
		w.say("a", "1", "hello")
		w.say("b", "1", "no trigger")
		w.down = errors.New("no engine")
		if w.Start(w.t.Context()) == nil {
			w.t.Error("started without an engine")
		}
		w.want()
		w.down = nil
		check(w.t, w.Start(w.t.Context()))
		w.want("run a")
	})
}

func TestStoredRetryIsKept(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", false)
		w.say("a", "1", "hello")
		w.live("a", "r")
		_, err := w.db.FinishRun(w.t.Context(), berth.Ending{RunID: "r", At: time.Now(), Error: "no", Backoff: []time.Duration{time.Minute}})
		check(w.t, err)
		check(w.t, w.Start(w.t.Context()))
		time.Sleep(59 * time.Second)
		w.want()
		time.Sleep(time.Second)
		w.want("run a")
	})
}

func TestReconcile(t *testing.T) {
	play(t, func(w *world) {
		w.add("running", false)
		w.add("gone", false)
		removed := w.add("removed", false)
		for _, folder := range []string{"running", "gone", "removed"} {
			w.say(folder, "1", "hello")
			w.live(folder, "run-"+folder)
		}
		check(w.t, w.RemoveGroup(w.t.Context(), removed.Folder))
		w.fleet = []Container{{ID: "c1", Run: "run-running"}, {ID: "c2", Run: "nobody"}, {ID: "c3", Run: "run-removed"}}
		check(w.t, w.Reconcile(w.t.Context()))
		synctest.Wait()
		slices.Sort(w.notes)
		w.want("adopt gone run-gone ", "adopt running run-running c1")
		slices.Sort(w.removed)
		if !slices.Equal(w.removed, []string{"c2", "c3"}) {
			w.t.Errorf("removed %q", w.removed)
		}
		live, err := w.db.LiveRuns(w.t.Context())
		check(w.t, err)
		for _, r := range live {
			if r.Folder == "removed" {
				w.t.Error("the run of the removed group lives")
			}
		}
	})
}

func TestGroupAddedAgainDoesNotAnswerOldMessages(t *testing.T) {
	play(t, func(w *world) {
		w.add("a", false)
		check(w.t, w.Start(w.t.Context()))
		w.say("a", "1", "hello")
		w.want("run a")
		w.live("a", "r")
		check(w.t, w.db.Commit(w.t.Context(), berth.Progress{RunID: "r", Acked: []string{"1"}, TurnEnded: true}))
		check(w.t, w.RemoveGroup(w.t.Context(), "a"))
		w.add("a", false)
		w.want()
	})
}
