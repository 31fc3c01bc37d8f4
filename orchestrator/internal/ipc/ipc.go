// Package ipc takes the requests that containers drop as files. The folder that
// a file lies in is who asks, whatever the file claims; everything in it is
// hostile.
package ipc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/workspace"
)

const (
	maxText        = 64 << 10
	maxRequest     = 512 << 10 // bytes of one file
	maxQuarantined = 100       // files a group
	maxAnswers     = 1000      // that lie there for a container to read
	pollEvery      = 500 * time.Millisecond
)

// Store keeps what was accepted.
type Store interface {
	AddOutgoing(context.Context, ...berth.Outgoing) error
}

// Service takes requests of all groups. Its methods are safe for concurrent use.
type Service struct {
	store      Store
	registered func(chatJID string) bool
	errorDir   string
	log        *zap.Logger
}

// New returns a Service. Files that cannot be used go to errorDir.
func New(store Store, registered func(chatJID string) bool, errorDir string, log *zap.Logger) *Service {
	return &Service{store: store, registered: registered, errorDir: errorDir, log: log}
}

// Open implements turn.Requests. Each inbox has a goroutine of its own, so that
// no group can slow another.
func (s *Service) Open(ctx context.Context, g berth.Group, files *workspace.Group) (turn.Inbox, error) {
	b := &inbox{Service: s, group: g, files: files, closed: make(chan struct{}), every: protocol.LookAgain, log: s.log.With(zap.String("group", g.Folder))}
	if err := b.subscribe(); err != nil {
		// Watches are counted by user, and containers may be of the same one.
		b.log.Warn("no events of the IPC folders; looking every so often instead", zap.Duration("every", pollEvery), zap.Error(err))
		b.every = pollEvery
	}
	// Files accepted are carried out even while the daemon shuts down.
	b.ctx = context.WithoutCancel(ctx)
	b.wg.Go(b.watch)
	return b, nil
}

type inbox struct {
	*Service
	ctx     context.Context
	group   berth.Group
	files   *workspace.Group
	watcher *fsnotify.Watcher // nil: there are no events
	every   time.Duration     // between looks that no event announced
	closed  chan struct{}
	answers []string // responses that lie there, oldest first
	log     *zap.Logger
	wg      sync.WaitGroup
	mu      sync.Mutex // one look at a time, so that files keep their order
}

func (b *inbox) subscribe() error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	if err := watcher.Add(b.files.Path("messages")); err != nil {
		return errors.Join(err, watcher.Close())
	}
	b.watcher = watcher
	return nil
}

// watch looks whenever a file arrives, and every few seconds in case an event
// was lost.
func (b *inbox) watch() {
	again := time.NewTicker(b.every)
	defer again.Stop()
	var events chan fsnotify.Event
	var failures chan error
	if b.watcher != nil {
		defer b.watcher.Close()
		events, failures = b.watcher.Events, b.watcher.Errors
	}
	b.Drain(b.ctx)
	for {
		select {
		case <-b.closed:
			return
		case e := <-events:
			if !e.Has(fsnotify.Create) || !strings.HasSuffix(e.Name, ".json") {
				continue
			}
		case err := <-failures:
			b.log.Debug("watch the IPC folders", zap.Error(err))
		case <-again.C:
		}
		b.Drain(b.ctx)
	}
}

// Close drains a last time and ends the watch.
func (b *inbox) Close() {
	close(b.closed)
	b.wg.Wait()
	b.Drain(b.ctx)
}

// Drain handles the files that lie there, in order.
func (b *inbox) Drain(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.files.Take("messages"); err != nil {
		b.log.Warn("take requests", zap.Error(err))
	}
	names, err := b.files.Taken()
	if err != nil {
		b.log.Warn("list requests", zap.Error(err))
	}
	for _, name := range names {
		if !b.carryOut(ctx, name) {
			return // it stays, and those after it, for the next look
		}
	}
}

// request is what a file may hold.
type request struct {
	Type      string `json:"type"`
	ChatJID   string `json:"chatJid"`
	Text      string `json:"text"`
	Sender    string `json:"sender"`
	RequestID string `json:"requestId"`
}

// carryOut handles one request. It is removed when its effect is stored; a crash
// in between repeats it under the same key.
func (b *inbox) carryOut(ctx context.Context, name string) bool {
	data, err := b.files.ReadTaken(name, maxRequest)
	var r request
	if err == nil {
		if err = json.Unmarshal(data, &r); err != nil {
			err = fmt.Errorf("not a JSON object as expected: %w", err)
		}
	}
	if err != nil {
		b.quarantine(name, data, err)
		return true
	}
	err = b.message(ctx, r, "ipc/"+b.group.Folder+"/"+name)
	known, refused := errors.AsType[*berth.Error](err)
	if err != nil && (!refused || known.Kind == berth.Unavailable) {
		b.log.Error("store a request", zap.Error(err))
		return false
	}
	if err != nil {
		b.log.Warn("request refused", zap.String("file", name), zap.Error(err))
	}
	crash.At(crash.Requested)
	b.answer(r.RequestID, err)
	b.remove(name)
	return true
}

func (b *inbox) remove(name string) {
	if err := b.files.RemoveTaken(name); err != nil {
		b.log.Warn("remove a request", zap.Error(err))
	}
}

// message queues a text for a chat: a group's own, or any registered one if the
// group is main.
func (b *inbox) message(ctx context.Context, r request, key string) error {
	switch {
	case r.Type != "message":
		return berth.Errorf(berth.Invalid, "unknown type %.40q", r.Type)
	case strings.TrimSpace(r.Text) == "":
		return berth.Errorf(berth.Invalid, "the text is empty")
	case len(r.Text) > maxText:
		return berth.Errorf(berth.Invalid, "the text has %d bytes; the most is %d", len(r.Text), maxText)
	case r.ChatJID != b.group.JID && !b.group.IsMain():
		return berth.Errorf(berth.Denied, "group %s may write to its own chat only", b.group.Folder)
	case !b.registered(r.ChatJID):
		return berth.Errorf(berth.Denied, "chat %.80q is not registered", r.ChatJID)
	}
	now := time.Now()
	var out []berth.Outgoing
	for i, text := range turn.Split(turn.Visible(r.Text)) {
		out = append(out, berth.Outgoing{
			ChatJID: r.ChatJID, Key: fmt.Sprintf("%s/%d", key, i), Kind: berth.OutMessage, Text: text,
			MessageID: berth.NewID(10), CreatedAt: now, OwnTurn: r.ChatJID == b.group.JID,
		})
	}
	if len(out) == 0 {
		return nil
	}
	return b.store.AddOutgoing(ctx, out...)
}

// answer tells the container what became of its request, if it gave an id that
// can be a file name.
func (b *inbox) answer(id string, err error) {
	if id == "" || len(id) > 64 || strings.Trim(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") != "" {
		return
	}
	reply := struct {
		OK    bool   `json:"ok"`
		Error string `json:"error,omitempty"`
	}{OK: err == nil}
	if err != nil {
		reply.Error = err.Error()
	}
	data, err := json.Marshal(reply)
	if err == nil {
		err = b.files.WriteResponse(id+".json", data)
	}
	if err != nil {
		b.log.Warn("answer a request", zap.Error(err))
		return
	}
	if b.answers = append(b.answers, id+".json"); len(b.answers) > maxAnswers {
		if err := b.files.RemoveResponse(b.answers[0]); err != nil {
			b.log.Warn("remove an old answer", zap.Error(err))
		}
		b.answers = b.answers[1:]
	}
}

// quarantine keeps a file that cannot be used, with the reason beside it.
func (b *inbox) quarantine(name string, data []byte, reason error) {
	b.log.Warn("request cannot be used", zap.String("file", name), zap.Error(reason))
	if err := b.keep(name, data, reason); err != nil {
		b.log.Warn("quarantine a request", zap.Error(err))
	}
	b.remove(name)
}

func (b *inbox) keep(name string, data []byte, reason error) error {
	dir := filepath.Join(b.errorDir, b.group.Folder)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	old, err := os.ReadDir(dir)
	if err != nil || len(old) >= 2*maxQuarantined { // a file and its reason
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, name), data, 0o600),
		os.WriteFile(filepath.Join(dir, name+".reason"), []byte(reason.Error()+"\n"), 0o600),
	)
}
