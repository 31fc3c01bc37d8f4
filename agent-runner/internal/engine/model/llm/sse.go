package llm

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"
)

// maxEvent is the most that one event may have, in bytes: a tool's arguments may
// come in one.
const maxEvent = 4 << 20

// longestQuiet is how long events that say nothing count as signs of life: a proxy
// may send them for ever for a model that is gone.
const longestQuiet = 30 * time.Minute

// event is one server-sent event. One without data is a comment, or as good as one:
// a sign of life.
type event struct {
	name string
	data []byte // valid until the next event
}

// errEventTooLarge is the end of a stream that holds an event over maxEvent.
var errEventTooLarge = fmt.Errorf("an event has more than %d bytes", maxEvent)

// events reads a stream of server-sent events up to its end, which is no error.
// An event that the end cuts off counts if it has data: some servers leave out
// the blank line after the last one.
func events(r io.Reader) iter.Seq2[event, error] {
	return func(yield func(event, error) bool) {
		in := bufio.NewReader(r)
		var name string
		var data []byte
		has, first := false, true
		var line []byte
		for {
			var err error
			line, err = readLine(in, line[:0])
			if err != nil && !errors.Is(err, io.EOF) {
				yield(event{}, err)
				return
			}
			if first {
				line = bytes.TrimPrefix(line, []byte("\uFEFF"))
				first = false
			}
			if len(line) == 0 {
				if has && !yield(event{name, full(data)}, nil) {
					return
				}
				name, data, has = "", data[:0], false
			} else if line[0] == ':' {
				if !yield(event{}, nil) {
					return
				}
			} else {
				field, value, _ := bytes.Cut(line, []byte(":"))
				value = bytes.TrimPrefix(value, []byte(" "))
				switch string(field) {
				case "event":
					name = strings.Clone(string(value[:min(len(value), 64)]))
				case "data":
					if len(data)+len(value) > maxEvent {
						yield(event{}, errEventTooLarge)
						return
					}
					if has {
						data = append(data, '\n')
					}
					data, has = append(data, value...), true
				}
			}
			if err != nil { // the end
				if has {
					yield(event{name, full(data)}, nil)
				}
				return
			}
		}
	}
}

// full returns data, or nil if there is nothing in it: some servers keep a
// connection alive with such events.
func full(data []byte) []byte {
	if len(bytes.TrimSpace(data)) == 0 {
		return nil
	}
	return data
}

// readLine appends a line without its end to line: \n or \r\n. The protocol also
// has a bare \r, which nobody sends.
func readLine(in *bufio.Reader, line []byte) ([]byte, error) {
	for {
		piece, err := in.ReadSlice('\n')
		line = append(line, piece...)
		if len(line) > maxEvent {
			return nil, errEventTooLarge
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte("\r")), err
		}
	}
}
