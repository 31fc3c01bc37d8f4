// Package input reads the folder through which the host speaks to a running
// container.
package input

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"strings"

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

// Look returns the files that wait, in the order of their names, and whether
// the host asks the run to close. It removes files that nobody can read.
func (f *Folder) Look() (files []File, closing bool) {
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
			default:
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

// Watch returns a channel that gets a value after a file came into dir. Many
// files may give one value. The watch ends with ctx.
func Watch(ctx context.Context, dir string, log *log.Logger) (<-chan struct{}, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch the input folder: %w", err)
	}
	if err := w.Add(dir); err != nil {
		_ = w.Close()
		return nil, fmt.Errorf("watch the input folder: %w", err)
	}
	context.AfterFunc(ctx, func() { _ = w.Close() })
	wake := make(chan struct{}, 1)
	notify := func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	go func() {
		for {
			select {
			case event, ok := <-w.Events:
				if !ok {
					return
				}
				if event.Has(fsnotify.Create) { // a rename into the folder is one too
					notify()
				}
			case err, ok := <-w.Errors:
				if !ok {
					return
				}
				log.Printf("watch the input folder: %v", err)
				notify() // events may have been lost
			}
		}
	}()
	return wake, nil
}
