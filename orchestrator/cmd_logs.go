package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/fsnotify/fsnotify"
	"github.com/spf13/cobra"

	"berth/orchestrator/internal/berth"
)

func (a *app) logsCommand() *cobra.Command {
	var (
		followLog bool
		runID     string
	)
	cmd := &cobra.Command{
		Use:   "logs [GROUP]",
		Short: "Show the log of a group's runs, or of the daemon",
		Long: `Show the log of a group's newest run, or without GROUP that of the daemon.

With -f what is added is shown as it comes, also from the runs that follow.`,
		Example: "  berth logs family\n  berth logs family -f\n  berth logs family --run 0123abcd\n  berth logs",
		Args:    cobra.MaximumNArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			cfg, err := a.config()
			if err != nil {
				return err
			}
			l := logReader{out: a.stdout, heading: a.stderr}
			if _, ok := terminal(a.stdout); ok {
				l.out = &cleanWriter{w: a.stdout}
			}
			switch {
			case len(args) == 0 && runID != "":
				return misusef("--run needs a group: berth logs GROUP --run %s", runID)
			case len(args) == 0:
				l.path = cfg.LogFile()
				if _, err := os.Stat(l.path); errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("there is no %s: only a daemon started with \"berth run --detach\" writes it, another one logs where it was started", l.path)
				}
			default:
				if err := berth.ValidFolder(args[0]); err != nil {
					return misusef("%s", err)
				}
				dir := filepath.Join(cfg.Root, "data", "logs", args[0])
				if l.path, err = newestLog(dir, runID); err != nil {
					return err
				}
				if l.path == "" && runID != "" {
					return fmt.Errorf("group %s has no log of a run %q: see %s", args[0], runID, dir)
				}
				if l.path == "" {
					return fmt.Errorf("group %s has no log yet: it has not run", args[0])
				}
				l.newRuns = runID == ""
			}
			return l.copy(ctx, followLog)
		}),
	}
	cmd.Flags().BoolVarP(&followLog, "follow", "f", false, "go on showing what is added, until interrupted")
	cmd.Flags().StringVar(&runID, "run", "", "the run's id, or the beginning of it")
	return cmd
}

// newestLog returns the newest log file in dir, of the given run if runID is
// not empty, or "" if there is none.
func newestLog(dir, runID string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("look for logs: %w", err)
	}
	var newest os.FileInfo
	for _, entry := range entries {
		if !isLog(entry.Name()) || !ofRun(entry.Name(), runID) || !entry.Type().IsRegular() {
			continue
		}
		info, err := entry.Info()
		if err != nil {
			continue // rotated away meanwhile
		}
		// Names decide within one tick of the clock: they sort by time.
		if newest == nil || !info.ModTime().Before(newest.ModTime()) {
			newest = info
		}
	}
	if newest == nil {
		return "", nil
	}
	return filepath.Join(dir, newest.Name()), nil
}

func isLog(name string) bool { return strings.HasSuffix(name, ".log") }

// ofRun reports whether one of the dash-separated parts of name begins with the
// run's id.
func ofRun(name, runID string) bool {
	return strings.HasPrefix(name, runID) || strings.Contains(name, "-"+runID)
}

// logReader copies a log file, and the ones that follow it.
type logReader struct {
	path    string
	newRuns bool // go on with the files of later runs
	out     io.Writer
	heading io.Writer // told when another file begins
	file    *os.File
}

func (l *logReader) copy(ctx context.Context, follow bool) error {
	if !follow {
		defer l.close()
		return l.more()
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch the logs: %w", err)
	}
	defer watcher.Close()
	// Watching before reading, so that nothing is missed in between.
	if err := watcher.Add(filepath.Dir(l.path)); err != nil {
		return fmt.Errorf("watch the logs: %w", err)
	}
	defer l.close()
	if err := l.more(); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil // how following ends
		case err := <-watcher.Errors:
			return fmt.Errorf("watch the logs: %w", err)
		case event := <-watcher.Events:
			if err := l.take(event); err != nil {
				return err
			}
		}
	}
}

func (l *logReader) take(event fsnotify.Event) error {
	same := event.Name == l.path
	switch {
	case event.Has(fsnotify.Create) && (same || l.newRuns && isLog(event.Name)):
		if l.isOpen(event.Name) {
			return nil // the log itself, rotated to another name
		}
		if err := l.more(); err != nil { // the end of the old file
			return err
		}
		l.close()
		l.path = event.Name
		if !same {
			fmt.Fprintf(l.heading, "==> %s <==\n", cleanLine(filepath.Base(l.path)))
		}
		return l.more()
	case event.Has(fsnotify.Write) && same:
		return l.more()
	}
	return nil
}

func (l *logReader) isOpen(path string) bool {
	if l.file == nil {
		return false
	}
	now, err := os.Lstat(path)
	if err != nil {
		return false
	}
	open, err := l.file.Stat()
	return err == nil && os.SameFile(now, open)
}

// more copies what was added since the last call.
func (l *logReader) more() error {
	if l.file == nil {
		f, err := os.Open(l.path)
		if errors.Is(err, os.ErrNotExist) {
			return nil // removed meanwhile
		}
		if err != nil {
			return fmt.Errorf("read the log: %w", err)
		}
		l.file = f
	}
	info, err := l.file.Stat()
	if err == nil {
		var at int64
		if at, err = l.file.Seek(0, io.SeekCurrent); err == nil && at > info.Size() {
			_, err = l.file.Seek(0, io.SeekStart) // emptied and begun anew
		}
	}
	if err == nil {
		_, err = io.Copy(l.out, l.file)
	}
	if err != nil {
		return fmt.Errorf("read the log: %w", err)
	}
	return nil
}

func (l *logReader) close() {
	if l.file != nil {
		_ = l.file.Close()
		l.file = nil
	}
}

// tail returns the last lines of a file from an offset on.
func tail(path string, from int64, lines int) string {
	const most = 64 << 10
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil {
		from = max(from, info.Size()-most)
	}
	data, _ := io.ReadAll(io.NewSectionReader(f, from, most))
	all := bytes.Split(bytes.TrimRight(data, "\n"), []byte("\n"))
	return string(bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
}
