package workspace

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// maxRunLogs is how many run logs a group keeps.
const maxRunLogs = 50

// RunLog is what a run printed beside its frames, and what the host did with
// it. It lies outside every mount. Writes never fail: a full disk must not
// disturb the run. It is safe for concurrent use.
type RunLog struct {
	mu   sync.Mutex
	file *os.File
	room int64 // bytes that still fit
	full bool
}

// OpenRunLog starts the log of a run, of at most limit bytes, and removes the
// oldest logs of the group. The file's name sorts by time.
func (g *Group) OpenRunLog(runID string, at time.Time, limit int64) (*RunLog, error) {
	dir := g.tree.LogDir(g.folder)
	name := at.UTC().Format("20060102T150405") + "-" + runID + ".log"
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the run log: %w", err)
	}
	return &RunLog{file: f, room: limit}, g.pruneLogs(dir)
}

func (g *Group) pruneLogs(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list the run logs: %w", err)
	}
	entries = slices.DeleteFunc(entries, func(e os.DirEntry) bool { return !strings.HasSuffix(e.Name(), ".log") })
	var errs []error
	for _, e := range entries[:max(0, len(entries)-maxRunLogs)] {
		errs = append(errs, os.Remove(filepath.Join(dir, e.Name())))
	}
	return errors.Join(errs...)
}

// Write implements io.Writer for lines that the container printed.
func (l *RunLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.writeLocked(p)
	return len(p), nil
}

func (l *RunLog) writeLocked(p []byte) {
	if l.full {
		return
	}
	if int64(len(p)) > l.room {
		l.full = true
		p = []byte("berth: the log of this run is full; the rest is left out\n")
	}
	l.room -= int64(len(p))
	_, _ = l.file.Write(p)
}

// Notef adds a line of the host's own. It is written even when the log is full.
func (l *RunLog) Notef(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = fmt.Fprintf(l.file, "berth: "+format+"\n", args...)
}

// Close ends the log.
func (l *RunLog) Close() error { return l.file.Close() }
