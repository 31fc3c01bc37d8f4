package tools

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"berth/agent-runner/protocol"
)

const (
	maxRequest = 1<<20 - 4096 // bytes of a file that the host reads
	maxAnswer  = 16 << 20
	// patience is how long the host may take. Clients of this protocol usually
	// wait for a minute.
	patience = 50 * time.Second
	// lookAgain is the time between looks that no event announced. On gVisor none
	// ever comes: the host's changes are no events inside.
	lookAgain = 500 * time.Millisecond
)

// host is the other end of the IPC folder. Its methods may be called from many
// goroutines.
type host struct {
	ipc       string
	patience  time.Duration
	lookAgain time.Duration

	mu   sync.Mutex
	news chan struct{} // closed when an answer may have come
}

func newHost(ipc string) *host {
	return &host{ipc: ipc, patience: patience, lookAgain: lookAgain, news: make(chan struct{})}
}

func (h *host) path(elem ...string) string {
	return filepath.Join(append([]string{h.ipc}, elem...)...)
}

// watch has the kernel tell of answers until stop is called.
func (h *host) watch(log *log.Logger) (stop func()) {
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		if err = watcher.Add(h.path("responses")); err != nil {
			_ = watcher.Close()
		}
	}
	if err != nil {
		log.Printf("watch for answers: %v; looking every %v instead", err, h.lookAgain)
		return func() {}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		errs := watcher.Errors
		for {
			select {
			case e, ok := <-watcher.Events:
				if !ok {
					return
				}
				if e.Has(fsnotify.Create) {
					h.ring()
				}
			case _, ok := <-errs: // events were lost
				if !ok {
					errs = nil
				}
				h.ring()
			}
		}
	})
	return func() { _ = watcher.Close(); wg.Wait() }
}

func (h *host) ring() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.news)
	h.news = make(chan struct{})
}

func (h *host) heard() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.news
}

// ask drops a request into the folder dir and returns the host's result. An error
// says to an agent what became of the request: it was refused, or it was taken
// back, or nobody knows yet.
func (h *host) ask(ctx context.Context, dir string, fields map[string]any) (json.RawMessage, error) {
	id := rand.Text()
	fields["requestId"] = id
	data, err := protocol.Marshal(fields)
	if err != nil {
		return nil, fmt.Errorf("nothing was done: %w", err)
	}
	if len(data) > maxRequest {
		return nil, fmt.Errorf("nothing was done: the arguments have %d bytes and may have %d", len(data), maxRequest)
	}
	// The host takes what lies there in the order of these numbers.
	name := fmt.Sprintf("%020d-%s.json", time.Now().UnixNano(), id)
	if err := h.drop(dir, name, data); err != nil {
		return nil, fmt.Errorf("nothing was done: the host cannot be asked: %w", err)
	}
	late := time.NewTimer(h.patience)
	defer late.Stop()
	again := time.NewTicker(h.lookAgain)
	defer again.Stop()
	for {
		heard := h.heard()
		if result, ok, err := h.answer(id); ok {
			return result, err
		}
		select {
		case <-heard:
		case <-again.C:
		case <-late.C:
			return h.giveUp(dir, name, id, fmt.Sprintf("the host did not take the request within %v", h.patience))
		case <-ctx.Done():
			return h.giveUp(dir, name, id, "the call was cancelled")
		}
	}
}

// drop writes a request beside and renames it.
func (h *host) drop(dir, name string, data []byte) error {
	beside, path := h.path(dir, name+".tmp"), h.path(dir, name)
	f, err := os.OpenFile(beside, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(beside, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(beside))
	}
	return nil
}

// giveUp takes a request back. Either that or the host's taking it comes first:
// both rename or remove the one file.
func (h *host) giveUp(dir, name, id, why string) (json.RawMessage, error) {
	if os.Remove(h.path(dir, name)) == nil {
		return nil, fmt.Errorf("nothing was done: %s, and it was taken back. Try again later", why)
	}
	if result, ok, err := h.answer(id); ok {
		return result, err
	}
	return nil, errors.New("it is not known yet whether this was done: the host took the request and has not answered so far. It will still be carried out; look at what is there before you ask again")
}

// answer returns what the host says to a request; ok is false if it has not yet.
func (h *host) answer(id string) (result json.RawMessage, ok bool, err error) {
	f, err := os.OpenFile(h.path("responses", id+".json"), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, true, fmt.Errorf("the host answered, and the answer cannot be read: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxAnswer))
	var a struct {
		OK     bool            `json:"ok"`
		Error  string          `json:"error"`
		Result json.RawMessage `json:"result"`
	}
	if err == nil {
		err = json.Unmarshal(data, &a)
	}
	switch {
	case err != nil:
		return nil, true, fmt.Errorf("the host answered, and the answer cannot be read: %w", err)
	case !a.OK:
		return nil, true, fmt.Errorf("refused, nothing was done: %s", a.Error)
	}
	return a.Result, true, nil
}
