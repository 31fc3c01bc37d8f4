package watest_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"berth/orchestrator/internal/watest"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/appstate"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/store/sqlstore"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/types/events"
	waLog "go.mau.fi/whatsmeow/util/log"
	_ "modernc.org/sqlite"
)

// client is an unmodified whatsmeow client, set up as a careful daemon would,
// that remembers its events.
type client struct {
	*whatsmeow.Client
	t         *testing.T
	container *sqlstore.Container
	path      string

	mu      sync.Mutex
	all     []any
	taken   map[int]bool
	changed chan struct{}
	refuse  bool // the handler fails, as when nothing can be stored
	over    bool // the server hangs up, and whatsmeow's Disconnect races with that
}

func newClient(t *testing.T, s *watest.Server) *client {
	t.Helper()
	return openClient(t, s, filepath.Join(t.TempDir(), "wa.db"))
}

// openClient opens the session at path as a newly started process would.
func openClient(t *testing.T, s *watest.Server, path string) *client {
	t.Helper()
	dsn := "file:" + path + "?_pragma=foreign_keys(1)&_pragma=journal_mode(WAL)&_pragma=synchronous(OFF)&_pragma=busy_timeout(10000)&_txlock=immediate"
	container, err := sqlstore.New(t.Context(), "sqlite", dsn, nil)
	if err != nil {
		t.Fatal(err)
	}
	device, err := container.GetFirstDevice(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	log := waLog.Noop
	if os.Getenv("WATEST_LOG") != "" {
		log = waLog.Stdout("client", "DEBUG", false)
		s.Trace(os.Stderr)
	}
	c := &client{Client: whatsmeow.NewClient(device, log), t: t, container: container, path: path, taken: map[int]bool{}, changed: make(chan struct{})}
	c.SynchronousAck, c.EnableDecryptedEventBuffer, c.UseRetryMessageStore = true, true, true
	c.AddEventHandlerWithSuccessStatus(c.handle)
	s.Apply(c.Client)
	t.Cleanup(c.stop)
	return c
}

func (c *client) stop() {
	if !c.over {
		c.Disconnect()
	}
	_ = c.container.Close()
}

func (c *client) handle(event any) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m, ok := event.(*events.Message); ok {
		if c.refuse {
			c.noteLocked(refused(m.Info.ID))
			return false
		}
		if watest.TextOf(m.Message) == "" && m.Message.GetSenderKeyDistributionMessage() != nil {
			return true // only carries a key
		}
	}
	c.noteLocked(event)
	return true
}

// refused is the id of a message that the handler failed on.
type refused string

func (c *client) noteLocked(event any) {
	c.all = append(c.all, event)
	close(c.changed)
	c.changed = make(chan struct{})
}

// next waits for the first event of this type that was not taken before.
func next[E any](t *testing.T, c *client, match ...func(E) bool) E {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		c.mu.Lock()
		changed := c.changed
		for i, event := range c.all {
			if e, ok := event.(E); ok && !c.taken[i] && !slices.ContainsFunc(match, func(m func(E) bool) bool { return !m(e) }) {
				c.taken[i] = true
				c.mu.Unlock()
				return e
			}
		}
		c.mu.Unlock()
		select {
		case <-changed:
		case <-deadline:
			c.mu.Lock()
			defer c.mu.Unlock()
			var have []string
			for _, event := range c.all {
				have = append(have, fmt.Sprintf("%T", event))
			}
			var want E
			t.Fatalf("no %T; have %v", want, have)
		}
	}
}

// count says how many events of this type there were.
func count[E any](c *client, match func(E) bool) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, event := range c.all {
		if e, ok := event.(E); ok && match(e) {
			n++
		}
	}
	return n
}

// message waits for the next message with content.
func (c *client) message() *events.Message {
	c.t.Helper()
	return next(c.t, c, func(m *events.Message) bool {
		return m.Message.GetProtocolMessage() == nil || m.IsEdit || watest.TextOf(m.Message) != ""
	})
}

func (c *client) text(to types.JID, text string) whatsmeow.SendResponse {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 20*time.Second)
	defer cancel()
	sent, err := c.SendMessage(ctx, to, &waE2E.Message{Conversation: new(text)})
	if err != nil {
		c.t.Fatalf("send %q: %v", text, err)
	}
	return sent
}

// world is a server with a linked client and two friends in a group.
type world struct {
	*watest.Server
	phone      *watest.Phone
	alice, bob *watest.Device
	group      *watest.Group
	client     *client
}

func newWorld(t *testing.T, mode types.AddressingMode) *world {
	t.Helper()
	s := watest.Start(t)
	w := &world{Server: s, phone: s.Phone("15550001111"), alice: s.Peer("15550002222", "Alice"), bob: s.Peer("15550003333", "Bob")}
	w.group = s.Group(mode, "Family", w.alice, w.bob, w.phone)
	w.client = newClient(t, s)
	s.Link(w.client.Client, w.phone)
	next[*events.Connected](t, w.client)
	return w
}

// settle waits until the client has done what it does after it was linked. A
// client that is logged out swaps its stores without a lock, so none of that may
// still be going on then.
func (w *world) settle(t *testing.T) {
	t.Helper()
	for range appstate.AllPatchNames {
		next[*events.AppStateSyncComplete](t, w.client)
	}
	w.phone.Drained(t.Context())
}

func both(t *testing.T, test func(t *testing.T, w *world)) {
	for _, mode := range []types.AddressingMode{watest.LID, watest.PN} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			test(t, newWorld(t, mode))
		})
	}
}
