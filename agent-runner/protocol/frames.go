package protocol

import (
	"bufio"
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"unicode/utf8"
)

// FrameError is a broken frame: an error of the run that printed it. The stream
// goes on after it.
type FrameError struct{ Reason string }

func (e *FrameError) Error() string { return "broken frame: " + e.Reason }

// Stream says how to read a runner's stdout.
type Stream struct {
	Marker string    // empty means DefaultMarker
	Nonce  string    // frames without it are log; empty accepts every frame, for old runners
	Log    io.Writer // everything that is not a frame, in whole lines of at most MaxLine bytes; may be nil
}

// Frames yields the frames of a runner's stdout in order. A *FrameError is
// yielded in its place and reading goes on; any other error of r but EOF is
// yielded last, io.ErrUnexpectedEOF if the stream ends inside a frame. It holds
// at most two lines in memory.
func (s Stream) Frames(r io.Reader) iter.Seq2[Frame, error] {
	start, end := markerLines(s.Marker)
	return func(yield func(Frame, error) bool) {
		const (
			outside = iota
			wantBody
			wantEnd
		)
		var (
			lines = lineReader{r: bufio.NewReaderSize(r, 64<<10)}
			state = outside
			body  []byte
			long  bool
		)
		broken := func(why string) bool { return yield(Frame{}, &FrameError{why}) }
		for {
			line, cut, err := lines.next()
			if err != nil {
				if errors.Is(err, io.EOF) && state != outside {
					err = io.ErrUnexpectedEOF // the connection broke; the frame may come another way
				}
				if !errors.Is(err, io.EOF) {
					yield(Frame{}, err)
				}
				return
			}
			switch {
			case bytes.Equal(line, start):
				if state != outside && !broken("another one starts inside it") {
					return
				}
				state, body, long = wantBody, nil, false
			case state == outside:
				s.log(line)
			case state == wantBody:
				if bytes.Equal(line, end) {
					state = outside
					if !broken("it is empty") {
						return
					}
					continue
				}
				body, long, state = bytes.Clone(line), cut, wantEnd
				// At once: its end may never come.
				if long && !broken(fmt.Sprintf("it is over the cap of %d bytes", MaxLine)) {
					return
				}
			case !bytes.Equal(line, end):
				state = outside
				if !long && !broken("it has more than one line") {
					return
				}
				s.log(line)
			case long:
				state = outside
			default:
				state = outside
				frame, err := s.decode(body)
				if errors.Is(err, errForeign) {
					s.log(start)
					s.log(body)
					s.log(end)
					continue
				}
				if !yield(frame, err) {
					return
				}
			}
		}
	}
}

var errForeign = errors.New("no valid nonce")

func (s Stream) decode(body []byte) (Frame, error) {
	var f Frame
	if err := json.Unmarshal(body, &f); err != nil {
		return Frame{}, &FrameError{"not JSON: " + clip(err.Error())}
	}
	if s.Nonce != "" && !hmac.Equal([]byte(f.Nonce), []byte(s.Nonce)) {
		return Frame{}, errForeign
	}
	if err := f.check(); err != nil {
		return Frame{}, &FrameError{err.Error()}
	}
	return f, nil
}

func (s Stream) log(line []byte) {
	if s.Log == nil {
		return
	}
	// A full disk must not stop the frames.
	_, _ = s.Log.Write(append(bytes.Clone(line), '\n'))
}

// markerLines returns the lines that stand around a frame.
func markerLines(marker string) (start, end []byte) {
	if marker == "" {
		marker = DefaultMarker
	}
	return []byte("---" + marker + "_OUTPUT_START---"), []byte("---" + marker + "_OUTPUT_END---")
}

// lineReader reads lines of at most MaxLine bytes. A longer one is marked as cut
// and returned as soon as it is too long; the rest of it is thrown away.
type lineReader struct {
	r    *bufio.Reader
	line []byte
	rest bool // the rest of a line comes first
}

func (l *lineReader) next() (line []byte, cut bool, err error) {
	l.line = l.line[:0]
	for {
		piece, err := l.r.ReadSlice('\n')
		if l.rest {
			l.rest = errors.Is(err, bufio.ErrBufferFull)
			if err == nil || l.rest {
				continue
			}
			return nil, false, err
		}
		if room := MaxLine + 1 - len(l.line); len(piece) > room { // one more for the newline
			l.rest = err != nil
			return append(l.line, piece[:room]...), true, nil
		}
		l.line = append(l.line, piece...)
		switch {
		case err == nil:
			return bytes.TrimSuffix(bytes.TrimSuffix(l.line, []byte("\n")), []byte("\r")), false, nil
		case errors.Is(err, bufio.ErrBufferFull):
		case len(l.line) > 0 && errors.Is(err, io.EOF):
			return l.line, false, nil // a last line without its newline
		default:
			return nil, false, err
		}
	}
}

// Encode returns f as it stands on stdout: three whole lines, to be written at
// once. A result over MaxResult is cut.
func Encode(f Frame) ([]byte, error) {
	data, err := marshal(f)
	if err != nil {
		return nil, err
	}
	start, end := markerLines("")
	var out bytes.Buffer
	out.Grow(len(data) + len(start) + len(end) + 3)
	for _, line := range [][]byte{start, data, end} {
		out.Write(line)
		out.WriteByte('\n')
	}
	return out.Bytes(), nil
}

func marshal(f Frame) ([]byte, error) {
	if f.Result != nil && len(*f.Result) > MaxResult {
		const note = "\n… (cut here: the answer was too long)"
		keep := MaxResult - len(note)
		for keep > 0 && !utf8.RuneStart((*f.Result)[keep]) {
			keep--
		}
		f.Result = new((*f.Result)[:keep] + note)
	}
	data, err := Marshal(f)
	if err != nil {
		return nil, err
	}
	if len(data) > MaxLine {
		return nil, fmt.Errorf("frame of %d bytes is over the cap of %d", len(data), MaxLine)
	}
	return data, nil
}

// sealed is a canonical frame file. Tools in the container can read it, so it
// carries a MAC in the place of the nonce.
type sealed struct {
	Frame json.RawMessage `json:"frame"`
	MAC   string          `json:"mac"`
}

// Seal returns the content of f's canonical file.
func Seal(f Frame, nonce string) ([]byte, error) {
	f.Nonce = ""
	data, err := marshal(f)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, `{"frame":%s,"mac":"%s"}`, data, mac(data, nonce)), nil
}

// Unseal decodes a canonical file. It fails with a *FrameError unless the file
// was sealed with nonce.
func Unseal(data []byte, nonce string) (Frame, error) {
	var s sealed
	if err := json.Unmarshal(data, &s); err != nil {
		return Frame{}, &FrameError{"canonical file is not JSON: " + clip(err.Error())}
	}
	if !hmac.Equal([]byte(s.MAC), []byte(mac(s.Frame, nonce))) {
		return Frame{}, &FrameError{"canonical file was not written by the runner"}
	}
	var f Frame
	if err := json.Unmarshal(s.Frame, &f); err != nil {
		return Frame{}, &FrameError{"canonical file is not JSON: " + clip(err.Error())}
	}
	if err := f.check(); err != nil {
		return Frame{}, &FrameError{err.Error()}
	}
	return f, nil
}

func mac(data []byte, nonce string) string {
	h := hmac.New(sha256.New, []byte(nonce))
	h.Write(data)
	return hex.EncodeToString(h.Sum(nil))
}

// FrameName returns the name of the canonical file of frame seq.
func FrameName(seq int64) string { return InputName(seq) }
