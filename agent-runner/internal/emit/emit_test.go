package emit

import (
	"bytes"
	"errors"
	"io"
	"log"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"berth/agent-runner/protocol"
)

func output(text string) protocol.Frame {
	return protocol.Frame{Type: protocol.TypeOutput, Status: protocol.StatusSuccess, Result: new(protocol.Text(text))}
}

// writes records every single write.
type writes struct{ got [][]byte }

func (w *writes) Write(p []byte) (int, error) {
	w.got = append(w.got, bytes.Clone(p))
	return len(p), nil
}

func (w *writes) frames(t *testing.T) []protocol.Frame {
	t.Helper()
	var frames []protocol.Frame
	for f, err := range (protocol.Stream{Nonce: "n"}).Frames(bytes.NewReader(bytes.Join(w.got, nil))) {
		if err != nil {
			t.Fatal(err)
		}
		frames = append(frames, f)
	}
	return frames
}

func TestEmit(t *testing.T) {
	dir, w := t.TempDir(), new(writes)
	e := New(w, dir, "run", "n", log.New(io.Discard, "", 0))
	e.Emit(protocol.Frame{Type: protocol.TypeReady})
	e.Emit(output("hi"))
	e.Emit(protocol.Frame{Type: protocol.TypeOutput, Status: protocol.StatusError, Error: "broken"})
	if len(w.got) != 3 {
		t.Errorf("%d writes for 3 frames", len(w.got))
	}
	for i, f := range w.frames(t) {
		if f.Seq != int64(i+1) || f.RunID != "run" {
			t.Errorf("frame %d has seq %d, run %q", i+1, f.Seq, f.RunID)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 2 || entries[0].Name() != protocol.FrameName(2) || entries[1].Name() != protocol.FrameName(3) {
		t.Fatalf("files %v, want those of frames 2 and 3", entries)
	}
	data, err := os.ReadFile(filepath.Join(dir, protocol.FrameName(2)))
	if err != nil {
		t.Fatal(err)
	}
	f, err := protocol.Unseal(data, "n")
	if err != nil || f.Seq != 2 || *f.Result != "hi" {
		t.Errorf("unsealed %+v, %v", f, err)
	}
	if bytes.Contains(data, []byte(`"n"`)) {
		t.Errorf("the file holds the nonce: %s", data)
	}
}

// What an agent says that its answer cost never costs the answer.
func TestUsageThatIsNone(t *testing.T) {
	for _, u := range []protocol.Usage{{CostUSD: math.Inf(1)}, {CostUSD: math.NaN()}, {CostUSD: -1}, {InputTokens: -1}, {OutputTokens: math.MinInt64}} {
		w := new(writes)
		f := output("hi")
		f.Usage = &u
		New(w, t.TempDir(), "run", "n", log.New(t.Output(), "", 0)).Emit(f)
		if got := w.frames(t); len(got) != 1 || *got[0].Result != "hi" || got[0].Usage != nil {
			t.Errorf("%+v: frames %+v", u, got)
		}
	}
}

func TestFilePrecedesPrint(t *testing.T) {
	dir := t.TempDir()
	w := writerFunc(func(p []byte) (int, error) {
		if _, err := os.Stat(filepath.Join(dir, protocol.FrameName(1))); err != nil {
			t.Errorf("printed before the file was there: %v", err)
		}
		return len(p), nil
	})
	New(w, dir, "run", "n", log.New(io.Discard, "", 0)).Emit(output("hi"))
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestFoldersAndPipesThatFail(t *testing.T) {
	var stderr bytes.Buffer
	w := new(writes)
	e := New(w, filepath.Join(t.TempDir(), "missing"), "run", "n", log.New(&stderr, "", 0))
	e.Emit(output("a"))
	e.Emit(output("b"))
	if got := len(w.frames(t)); got != 2 {
		t.Errorf("%d frames printed without the folder, want 2", got)
	}
	if got := strings.Count(stderr.String(), "\n"); got != 1 {
		t.Errorf("%d lines on the log, want one:\n%s", got, &stderr)
	}

	stderr.Reset()
	dir := t.TempDir()
	e = New(writerFunc(func([]byte) (int, error) { return 0, errors.New("broken pipe") }), dir, "run", "n", log.New(&stderr, "", 0))
	e.Emit(output("a"))
	e.Emit(output("b"))
	if _, err := os.Stat(filepath.Join(dir, protocol.FrameName(2))); err != nil {
		t.Errorf("no file without a stdout: %v", err)
	}
	if got := strings.Count(stderr.String(), "\n"); got != 1 {
		t.Errorf("%d lines on the log, want one:\n%s", got, &stderr)
	}
}

func TestTemporaryNameIsNeverOpened(t *testing.T) {
	dir := t.TempDir()
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(dir, protocol.FrameName(1)+".tmp")); err != nil {
		t.Fatal(err)
	}
	New(io.Discard, dir, "run", "n", log.New(io.Discard, "", 0)).Emit(output("hi"))
	if got, _ := os.ReadFile(victim); string(got) != "mine" {
		t.Errorf("the link was followed: %q", got)
	}
	if _, err := os.Stat(filepath.Join(dir, protocol.FrameName(1))); err != nil {
		t.Error(err)
	}
}

func TestAnyTextFitsAFrame(t *testing.T) {
	w := new(writes)
	e := New(w, t.TempDir(), "run", "n", log.New(io.Discard, "", 0))
	for _, unit := range []string{"x", "\x00", "\x1b[0m", "\xff", `"`, "\n", "é", "\u2028", "<"} {
		text := strings.Repeat(unit, protocol.MaxResult/len(unit)+10)
		e.Emit(output(text))
		e.Emit(protocol.Frame{Type: protocol.TypeOutput, Status: protocol.StatusError, Error: text})
	}
	frames := w.frames(t)
	if len(frames) != 18 {
		t.Errorf("%d frames, want 18", len(frames))
	}
}

func TestConcurrentFramesStayWholeAndInOrder(t *testing.T) {
	w := new(writes)
	e := New(w, t.TempDir(), "run", "n", log.New(io.Discard, "", 0))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				e.Emit(protocol.Frame{Type: protocol.TypeHeartbeat})
			}
		})
	}
	wg.Wait()
	frames := w.frames(t)
	if len(frames) != 160 {
		t.Fatalf("%d frames", len(frames))
	}
	for i, f := range frames {
		if f.Seq != int64(i+1) {
			t.Fatalf("frame %d has seq %d", i+1, f.Seq)
		}
	}
}

func TestMute(t *testing.T) {
	w := new(writes)
	e := New(w, t.TempDir(), "run", "n", log.New(io.Discard, "", 0))
	e.Mute(protocol.TypeAck)
	e.Emit(protocol.Frame{Type: protocol.TypeAck})
	e.Emit(protocol.Frame{Type: protocol.TypeReady})
	if f := w.frames(t); len(f) != 1 || f[0].Type != protocol.TypeReady || f[0].Seq != 1 {
		t.Errorf("frames %+v", f)
	}
}
