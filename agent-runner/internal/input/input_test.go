package input

import (
	"bytes"
	"io"
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
	if _, err := Watch(t.Context(), filepath.Join(t.TempDir(), "missing"), log.New(io.Discard, "", 0)); err == nil {
		t.Error("watching a missing folder works")
	}
}

func TestWatch(t *testing.T) {
	dir := t.TempDir()
	wake, err := Watch(t.Context(), dir, log.New(io.Discard, "", 0))
	if err != nil {
		t.Fatal(err)
	}
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
