package whatsapp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mau.fi/whatsmeow/appstate"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/types/events"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/watest"
	"berth/orchestrator/internal/whatsapp/wastate"
)

// patience bounds each wait: a lost event is a failure and not a hang.
const patience = 20 * time.Second

func TestMain(m *testing.M) {
	if config := os.Getenv(otherVariable); config != "" {
		var o other
		err := json.Unmarshal([]byte(config), &o)
		if err == nil {
			err = o.run()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	globals() // while no other goroutine reads what it sets
	os.Exit(m.Run())
}

// world is a server, the people of a group, and the channel with a store.
type world struct {
	*watest.Server
	t          *testing.T
	phone      *watest.Phone
	alice, bob *watest.Device
	group      *watest.Group
	options    Options
	dir        string // of the group
	ch         *Channel
	stop       func()

	mu        sync.Mutex
	changed   chan struct{}
	groups    map[string]berth.Group
	messages  []berth.Message // as they were stored first
	now       map[string]berth.Message
	quiet     map[string]bool
	failing   bool
	refused   int
	states    []wastate.State
	onlines   int
	settled   bool // the client has read the account's settings
	backlogs  []bool
	histories int          // that the channel has read
	longest   atomic.Int64 // that the handler was in an event
	slow      atomic.Int64 // events that it was in for longer than 50 ms
	chats     []berth.Chat
	answered  func(berth.Outgoing) (berth.Message, bool)
}

// outside is a world in which nothing is linked yet.
func outside(t *testing.T, mode types.AddressingMode, set ...func(*Options)) *world {
	t.Helper()
	s := watest.Start(t)
	w := &world{
		Server: s, t: t, phone: s.Phone("15550001111"), alice: s.Peer("15550002222", "Alice"), bob: s.Peer("15550003333", "Bob"),
		dir: t.TempDir(), changed: make(chan struct{}), groups: map[string]berth.Group{}, now: map[string]berth.Message{}, quiet: map[string]bool{},
	}
	w.group = s.Group(mode, "Family", w.alice, w.bob, w.phone)
	w.register(w.group.JID)
	w.options = Options{
		Path: filepath.Join(t.TempDir(), "whatsapp.db"), Name: "Andy", OwnNumber: true,
		Receive: w.receive,
		Quiet: func(ctx context.Context, m berth.Message) error {
			_, err := w.receive(ctx, m)
			w.note(func() { w.quiet[m.ID] = true })
			return err
		},
		Group: func(chat string) (berth.Group, bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			g, ok := w.groups[chat]
			return g, ok
		},
		GroupDir: func(string) (string, bool) { return w.dir, true },
		Answered: func(_ context.Context, o berth.Outgoing) (berth.Message, bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.answered == nil {
				return berth.Message{}, false
			}
			return w.answered(o)
		},
		Online:  func() { w.note(func() { w.onlines++ }) },
		Backlog: func(active bool) { w.note(func() { w.backlogs = append(w.backlogs, active) }) },
		Chats: func(_ context.Context, chats []berth.Chat) error {
			w.note(func() { w.chats = chats })
			return nil
		},
		StateChanged: func(s wastate.State) { w.note(func() { w.states = append(w.states, s) }) },
		Log:          testLog(t),
		Double:       &Double{URL: s.URL(), Root: watest.Root()},
	}
	for _, f := range set {
		f(&w.options)
	}
	w.open()
	t.Cleanup(func() { w.stop() })
	return w
}

// testLog writes until the test ends: whatsmeow does not wait for all it started.
func testLog(t *testing.T) *zap.Logger {
	var over atomic.Bool
	t.Cleanup(func() { over.Store(true) })
	return zaptest.NewLogger(t, zaptest.WrapOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		enabled, _ := zapcore.NewIncreaseLevelCore(core, zap.LevelEnablerFunc(func(l zapcore.Level) bool { return l >= zapcore.ErrorLevel && !over.Load() }))
		return enabled
	})))
}

// open starts a channel, as a new process would.
func (w *world) open(set ...func(*Channel)) {
	w.t.Helper()
	ch, err := New(w.t.Context(), w.options)
	if err != nil {
		w.t.Fatal(err)
	}
	ch.retryFirst = time.Millisecond
	ch.groupsPause = time.Millisecond
	ch.took = func(d time.Duration) {
		w.longest.Store(max(w.longest.Load(), int64(d)))
		if d > 50*time.Millisecond {
			w.slow.Add(1)
		}
	}
	for _, f := range set {
		f(ch)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- ch.Run(ctx) }()
	w.ch = ch
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := errors.Join(<-done, ch.Close()); err != nil {
			w.t.Error(err)
		}
	})
}

// inside is a world with a linked channel.
func inside(t *testing.T, mode types.AddressingMode, set ...func(*Options)) *world {
	t.Helper()
	w := outside(t, mode, set...)
	w.link()
	w.phone.Online(t.Context())
	// Logging out meanwhile is a race within whatsmeow: it exchanges the stores
	// that the reading uses.
	w.until("the end of the first sync", func() bool { return w.settled })
	return w
}

func (w *world) link() {
	w.t.Helper()
	w.ch.current().AddEventHandler(func(event any) {
		switch e := event.(type) {
		case *events.AppStateSyncComplete:
			if e.Name == appstate.AllPatchNames[len(appstate.AllPatchNames)-1] {
				w.note(func() { w.settled = true })
			}
		case *events.HistorySync:
			w.note(func() { w.histories++ })
		}
	})
	done := false
	for e, err := range w.ch.Login(w.t.Context(), "") {
		if err != nil {
			w.t.Fatal(err)
		}
		if e.QR != "" {
			w.phone.Scan(e.QR)
		}
		done = e.Done != ""
	}
	if !done {
		w.t.Fatal("the login did not end")
	}
}

func both(t *testing.T, test func(*testing.T, types.AddressingMode)) {
	for _, mode := range []types.AddressingMode{watest.LID, watest.PN} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			test(t, mode)
		})
	}
}

func (w *world) register(jid types.JID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.groups[jid.String()] = berth.Group{JID: jid.String(), Name: "Family", Folder: "family", RequiresTrigger: true}
}

func (w *world) note(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
	close(w.changed)
	w.changed = make(chan struct{})
}

// until waits for something in the world, which is looked at under its lock.
func (w *world) until(what string, done func() bool) {
	w.t.Helper()
	deadline := time.After(patience)
	for {
		w.mu.Lock()
		ok, changed := done(), w.changed
		w.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			w.mu.Lock()
			defer w.mu.Unlock()
			w.t.Fatalf("no %s; state %v, messages %+v", what, w.ch.State(), w.messages)
		}
	}
}

func (w *world) receive(_ context.Context, m berth.Message) (berth.Message, error) {
	w.mu.Lock()
	_, registered := w.groups[m.ChatJID]
	failing := w.failing
	w.mu.Unlock()
	if failing {
		w.note(func() { w.refused++ })
		return m, errors.New("the disk is full")
	}
	if !registered {
		return m, berth.Errorf(berth.NotFound, "not registered")
	}
	w.note(func() {
		if old, ok := w.now[m.ID]; ok {
			old.Text = m.Text
			w.now[m.ID] = old
			return
		}
		w.messages = append(w.messages, m)
		w.now[m.ID] = m
	})
	return m, nil
}

// message waits for the nth message that was stored, counted from 0.
func (w *world) message(n int) berth.Message {
	w.t.Helper()
	w.until("message", func() bool { return len(w.messages) > n })
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.messages[n]
}

func (w *world) stored() []berth.Message {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.messages)
}

func (w *world) texts() map[string]string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]string{}
	for id, m := range maps.All(w.now) {
		out[id] = m.Text
	}
	return out
}

func (w *world) state(name wastate.Name) wastate.State {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	if err := w.ch.await(ctx, func(s wastate.State) bool { return s.Name == name }); err != nil {
		w.t.Fatalf("not %s but %s (%s)", name, w.ch.State(), w.ch.State().Detail)
	}
	return w.ch.State()
}

func (w *world) out(text string) berth.Outgoing {
	return berth.Outgoing{ChatJID: w.group.JID.String(), Text: text, MessageID: NewMessageID(), Kind: berth.OutAnswer}
}

func (w *world) send(o berth.Outgoing) {
	w.t.Helper()
	if err := w.ch.Send(w.t.Context(), o); err != nil {
		w.t.Fatal(err)
	}
}

func kindOf(err error) berth.Kind {
	if e, ok := errors.AsType[*berth.Error](err); ok {
		return e.Kind
	}
	return berth.Internal
}
