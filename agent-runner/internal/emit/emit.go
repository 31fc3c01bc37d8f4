// Package emit writes the runner's frames. Nothing else writes to stdout.
package emit

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"berth/agent-runner/protocol"
)

// maxError is the longest error text in a frame, in bytes.
const maxError = 8 << 10

// Emitter numbers frames and writes them, each with one write. It may be used
// from many goroutines; the numbers on the stream are in order.
//
// An Emitter never fails its caller: a frame that could not be printed may still
// be in its file, and the other way round. It says on the log what it could not do.
type Emitter struct {
	w            io.Writer
	dir          string
	runID, nonce string
	log          *log.Logger

	mu              sync.Mutex
	seq             int64
	muted           []string
	noFile, noPrint bool // said once on the log
}

// New returns an emitter that prints on w and keeps the frames that a person is
// waiting for in the folder dir. It starts nothing.
func New(w io.Writer, dir, runID, nonce string, log *log.Logger) *Emitter {
	return &Emitter{w: w, dir: dir, runID: runID, nonce: nonce, log: log}
}

// Emit adds the number, the run and the nonce to f and writes it. Texts are made
// valid UTF-8 without control characters, so that they fit the caps. A usage that is
// no number, or none that anything can cost, is left out.
func (e *Emitter) Emit(f protocol.Frame) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if slices.Contains(e.muted, f.Type) {
		return
	}
	f.Seq, f.RunID, f.Nonce = e.seq+1, e.runID, e.nonce
	if f.Result != nil {
		f.Result = new(protocol.Text(clean(string(*f.Result))))
	}
	f.Error = clip(clean(f.Error), maxError)
	if u := f.Usage; u != nil && (u.InputTokens < 0 || u.OutputTokens < 0 || !(u.CostUSD >= 0) || math.IsInf(u.CostUSD, 0)) {
		f.Usage = nil // JSON has no word for some of it, and the answer is worth more
	}
	printed, err := protocol.Encode(f)
	if err != nil {
		e.log.Printf("drop a %s frame: %v", f.Type, err)
		return
	}
	e.seq++
	if f.Canonical() {
		if err := e.keep(f); err != nil && !e.noFile {
			e.noFile = true
			e.log.Printf("keep frame %d (further ones are not reported): %v", f.Seq, err)
		}
	}
	e.writeLocked(printed)
}

// Raw writes p between two frames, as it is. Only the probe does that.
func (e *Emitter) Raw(p []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.writeLocked(p)
}

// Mute drops all later frames of the type. Only the probe does that.
func (e *Emitter) Mute(frameType string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.muted = append(e.muted, frameType)
}

func (e *Emitter) writeLocked(p []byte) {
	if _, err := e.w.Write(p); err != nil && !e.noPrint {
		e.noPrint = true
		e.log.Printf("print on stdout (further failures are not reported): %v", err)
	}
}

// keep writes f's canonical file. Tools in the container can write to the
// folder too, so whatever has the temporary name is removed and never opened.
func (e *Emitter) keep(f protocol.Frame) error {
	data, err := protocol.Seal(f, e.nonce)
	if err != nil {
		return err
	}
	name := filepath.Join(e.dir, protocol.FrameName(f.Seq))
	beside := name + ".tmp"
	if err := os.Remove(beside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	file, err := os.OpenFile(beside, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(beside, name)
	}
	if err != nil {
		_ = os.Remove(beside)
		return fmt.Errorf("write the frame's file: %w", err)
	}
	return nil
}

// clean makes text printable: JSON writes a control character or a broken byte
// in six, which would break the cap of a line that the host holds.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' && r != '\t' {
			return -1
		}
		return r
	}, strings.ToValidUTF8(text, "\uFFFD"))
}

func clip(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	for limit > 0 && !utf8.RuneStart(text[limit]) {
		limit--
	}
	return text[:limit] + "…"
}
