// Package input reads the folder through which the host speaks to a running
// container.
package input

import (
	"context"
	"errors"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"berth/agent-runner/protocol"
)

// File is one readable input file.
type File struct {
	Name string // in the folder
	protocol.Message
}

// Folder is the input folder. It belongs to one goroutine.
type Folder struct {
	dir   string
	log   *log.Logger
	stuck map[string]bool // used, but could not be removed: never seen again
}

// NewFolder returns the folder dir, which need not exist yet.
func NewFolder(dir string, log *log.Logger) *Folder {
	return &Folder{dir: dir, log: log, stuck: make(map[string]bool)}
}

// maxHeld is how many bytes of messages one look returns, one message at least: tools
// can write here too.
const maxHeld = 16 << 20

// Look returns the files that wait, in the order of their names, and whether
// the host asks the run to close. It removes files that nobody can read. What is too
// much for one look stays for another one.
func (f *Folder) Look() (files []File, closing bool) {
	held := 0
	entries, err := os.ReadDir(f.dir) // sorted by name
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.log.Printf("look for input: %v", err)
	}
	for _, entry := range entries {
		name := entry.Name()
		switch {
		case name == protocol.CloseFile:
			closing = true
		case !strings.HasSuffix(name, ".json") || f.stuck[name]:
		default:
			m, err := read(filepath.Join(f.dir, name))
			switch {
			case errors.Is(err, fs.ErrNotExist): // the host took it back
			case err != nil:
				f.log.Printf("remove unreadable input %s: %v", name, err)
				f.Remove(name)
			case m.Type == protocol.TypeMessage && held > 0 && held+len(m.Text)+len(m.ID) > maxHeld:
				held = maxHeld // the order stays: what follows waits too
			default:
				held += len(m.Text) + len(m.ID)
				files = append(files, File{Name: name, Message: m})
			}
		}
	}
	return files, closing
}

// Remove removes a file that was used. One that cannot be removed is said on
// the log and not returned by Look again.
func (f *Folder) Remove(name string) {
	if err := os.Remove(filepath.Join(f.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.stuck[name] = true
		f.log.Printf("remove used input: %v", err)
	}
}

// RemoveClose removes a request to close that was meant for an earlier run.
func (f *Folder) RemoveClose() {
	if err := os.Remove(filepath.Join(f.dir, protocol.CloseFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.log.Printf("remove a request to close of an earlier run: %v", err)
	}
}

// read decodes one file. Tools in the container can put anything here: a link
// is not followed, a pipe does not block.
func read(path string) (protocol.Message, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return protocol.Message{}, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return protocol.Message{}, err
	}
	if !info.Mode().IsRegular() {
		return protocol.Message{}, errors.New("not a regular file")
	}
	return protocol.ReadMessage(file)
}

// often is the time between two looks where events are not known to come. A look
// takes a few microseconds.
const often = 100 * time.Millisecond

// Watch returns a channel that gets a value after a file came into dir. Many
// files may give one value. The watch ends with ctx.
//
// Not every container runtime passes on to its containers what the host does to a
// mounted folder; gVisor does not, but has events for what the container itself
// does there. So events are trusted from the moment that one tells of lease: the
// host alone can change that file, and does so twice a minute. Until then, which
// may be for ever, Watch looks into dir by itself.
func Watch(ctx context.Context, dir, lease string, log *log.Logger) <-chan struct{} {
	watcher := &watcher{dir: dir, lease: lease, log: log, wake: make(chan struct{}, 1)}
	source, err := fsnotify.NewWatcher()
	if err == nil {
		err = errors.Join(source.Add(dir), source.Add(filepath.Dir(lease)))
	}
	if err != nil {
		log.Printf("watch the input folder: %v; looking every %v instead", err, often)
		if source != nil {
			_ = source.Close()
		}
		go watcher.run(ctx, nil, nil)
		return watcher.wake
	}
	go func() {
		defer source.Close()
		watcher.run(ctx, source.Events, source.Errors)
	}()
	return watcher.wake
}

type watcher struct {
	dir, lease string
	log        *log.Logger
	wake       chan struct{}
	known      map[string]bool // at the last look
}

func (w *watcher) run(ctx context.Context, events <-chan fsnotify.Event, errs <-chan error) {
	again := time.NewTicker(often)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-events:
			switch {
			case filepath.Dir(event.Name) == w.dir && event.Has(fsnotify.Create): // a rename into the folder is one too
				w.notify()
			case event.Name == w.lease:
				again.Stop()
			}
		case err := <-errs:
			w.log.Printf("watch the input folder: %v", err)
			w.notify() // events may have been lost
		case <-again.C:
			if w.look() {
				w.notify()
			}
		}
	}
}

// look reports whether the folder holds a name that it did not hold before.
func (w *watcher) look() (found bool) {
	entries, _ := os.ReadDir(w.dir) // Folder.Look tells what is wrong with it
	names := make(map[string]bool, len(entries))
	for _, entry := range entries {
		names[entry.Name()] = true
		found = found || !w.known[entry.Name()]
	}
	w.known = names
	return found
}

func (w *watcher) notify() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}
