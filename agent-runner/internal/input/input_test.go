package input

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"berth/agent-runner/protocol"
)

func drop(t *testing.T, dir, name, content string) {
	t.Helper()
	beside := filepath.Join(dir, name+".tmp")
	if err := os.WriteFile(beside, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(beside, filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

func TestLook(t *testing.T) {
	dir := t.TempDir()
	var stderr bytes.Buffer
	folder := NewFolder(dir, log.New(&stderr, "", 0))
	drop(t, dir, protocol.InputName(10), `{"type":"message","text":"b","id":"2"}`)
	drop(t, dir, protocol.InputName(9), `{"type":"message","text":"a","id":"1"}`)
	drop(t, dir, "notes.txt", "")
	drop(t, dir, "big.json", `{"type":"message","text":"`+strings.Repeat("x", protocol.MaxInput)+`"}`)
	if err := os.Mkdir(filepath.Join(dir, "dir.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "pipe.json"), 0o600); err != nil {
		t.Fatal(err)
	}
	files, closing := folder.Look()
	if len(files) != 2 || files[0].Text != "a" || files[1].Text != "b" || closing {
		t.Errorf("files %+v, closing %v", files, closing)
	}
	if got := strings.Count(stderr.String(), "remove unreadable input"); got != 3 {
		t.Errorf("log names %d unreadable files, want 3:\n%s", got, &stderr)
	}
	drop(t, dir, protocol.CloseFile, "")
	if _, closing = folder.Look(); !closing {
		t.Error("close not seen")
	}
	folder.RemoveClose()
	if _, closing = folder.Look(); closing {
		t.Error("close seen after it was removed")
	}
}

// However much tools put into the folder, little is held at once, in order, and a
// request to stop is seen behind it.
func TestLooksAreBounded(t *testing.T) {
	dir := t.TempDir()
	text := strings.Repeat("x", maxHeld/3)
	for i := range 4 {
		drop(t, dir, protocol.InputName(int64(i+1)), `{"type":"message","text":"`+text+`"}`)
	}
	drop(t, dir, protocol.InputName(5), `{"type":"message","text":"small"}`)
	drop(t, dir, protocol.InputName(6), `{"type":"stop"}`)
	f := NewFolder(dir, log.New(t.Output(), "", 0))
	var seen []string
	for looks := range 2 {
		files, _ := f.Look()
		if last := files[len(files)-1]; last.Type != protocol.TypeStop {
			t.Errorf("look %d: the last file is %s", looks, last.Name)
		}
		held := 0
		for _, file := range files {
			held += len(file.Text)
			if file.Type == protocol.TypeMessage {
				seen = append(seen, file.Name)
				f.Remove(file.Name)
			}
		}
		if held > maxHeld {
			t.Errorf("look %d: %d bytes", looks, held)
		}
	}
	if !slices.IsSorted(seen) || len(seen) != 5 {
		t.Errorf("seen %q", seen)
	}
}

func TestFileThatCannotBeRemovedIsNotSeenAgain(t *testing.T) {
	dir := t.TempDir()
	folder := NewFolder(dir, log.New(io.Discard, "", 0))
	name := protocol.InputName(1)
	drop(t, dir, name, `{"type":"message","text":"a"}`)
	if files, _ := folder.Look(); len(files) != 1 {
		t.Fatalf("files %+v", files)
	}
	// A folder that is not empty takes its place: it cannot be removed as a file.
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, name, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	folder.log = log.New(&stderr, "", 0)
	for range 3 {
		folder.Look()
	}
	if got := strings.Count(stderr.String(), "\n"); got != 2 { // unreadable, cannot be removed
		t.Errorf("%d lines on the log, want 2:\n%s", got, &stderr)
	}
}

func TestMissingFolderIsEmpty(t *testing.T) {
	var stderr bytes.Buffer
	folder := NewFolder(filepath.Join(t.TempDir(), "missing"), log.New(&stderr, "", 0))
	if files, closing := folder.Look(); files != nil || closing || stderr.Len() > 0 {
		t.Errorf("files %v, closing %v, log %s", files, closing, &stderr)
	}
	folder.RemoveClose()
}

func TestWatch(t *testing.T) {
	dir, lease := ipc(t)
	wake := Watch(t.Context(), dir, lease, log.New(io.Discard, "", 0))
	folder := NewFolder(dir, log.New(io.Discard, "", 0))
	for i := range int64(5) {
		drop(t, dir, protocol.InputName(i), `{"type":"message","text":"a"}`)
		for seen := false; !seen; { // the temporary file wakes too
			<-wake
			files, _ := folder.Look()
			seen = len(files) == 1
		}
		folder.Remove(protocol.InputName(i))
	}
}

// ipc returns an input folder and the lease above it.
func ipc(t *testing.T) (dir, lease string) {
	t.Helper()
	above := t.TempDir()
	dir, lease = filepath.Join(above, "input"), filepath.Join(above, protocol.LeaseFile)
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(lease, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir, lease
}

// What the host does to the lease is an event here, as on every usual runtime.
func TestWatchTrustsEventsAfterTheLease(t *testing.T) {
	dir, lease := ipc(t)
	source, err := fsnotify.NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	defer source.Close()
	if err := source.Add(filepath.Dir(lease)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(lease, time.Now(), time.Now()); err != nil {
		t.Fatal(err)
	}
	event := <-source.Events

	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		events := make(chan fsnotify.Event)
		w := &watcher{dir: dir, lease: lease, log: log.New(io.Discard, "", 0), wake: make(chan struct{}, 1)}
		ended := make(chan struct{})
		go func() { defer close(ended); w.run(ctx, events, nil) }()
		woken := func() bool {
			time.Sleep(often)
			synctest.Wait()
			select {
			case <-w.wake:
				return true
			default:
				return false
			}
		}

		// No event comes: what comes is found all the same, and told once.
		drop(t, dir, protocol.InputName(1), `{}`)
		if !woken() || woken() {
			t.Error("not woken once by a file without an event")
		}
		// An event in the folder proves nothing: a tool may have caused it.
		events <- fsnotify.Event{Name: filepath.Join(dir, "x.json"), Op: fsnotify.Create}
		if !woken() {
			t.Error("not woken by an event")
		}
		drop(t, dir, protocol.InputName(2), `{}`)
		if !woken() {
			t.Error("not woken by a second file without an event")
		}
		events <- event
		drop(t, dir, protocol.InputName(3), `{}`)
		if woken() {
			t.Error("it still looks, though events come")
		}
		events <- fsnotify.Event{Name: filepath.Join(dir, protocol.InputName(3)), Op: fsnotify.Create}
		if !woken() {
			t.Error("not woken by an event after the lease's")
		}
		cancel()
		<-ended
	})
}

// Without inotify, for example when the user's instances are used up, files are
// found as well.
func TestWatchWithoutEvents(t *testing.T) {
	dir, _ := ipc(t)
	var stderr bytes.Buffer
	wake := Watch(t.Context(), dir, filepath.Join(dir, "missing", protocol.LeaseFile), log.New(&stderr, "", 0))
	if !strings.Contains(stderr.String(), "looking every") {
		t.Errorf("log: %s", &stderr)
	}
	drop(t, dir, protocol.InputName(1), `{}`)
	<-wake
}
