package program

import (
	"bufio"
	"errors"
	"io"
)

// maxKept is the largest buffer that is kept for the next line.
const maxKept = 256 << 10

// lines calls f with each line of r, without its end, until r ends. Lines of more
// than limit bytes are skipped; it returns how many.
func lines(r io.Reader, limit int, f func([]byte)) (skipped int) {
	in := bufio.NewReaderSize(r, 32<<10)
	var long []byte // a line that is longer than the reader's buffer, so far
	over := false   // and than limit
	for {
		part, err := in.ReadSlice('\n')
		switch whole := err == nil || len(part)+len(long) > 0 && !errors.Is(err, bufio.ErrBufferFull); {
		case over || len(long)+len(trimEnd(part)) > limit:
			if long, over = nil, true; whole {
				skipped++
				over = false
			}
		case !whole:
			long = append(long, part...)
		case len(long) > 0:
			f(trimEnd(append(long, part...)))
			if long = long[:0]; cap(long) > maxKept {
				long = nil
			}
		default:
			f(trimEnd(part))
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			if over {
				skipped++
			}
			return skipped
		}
	}
}

func trimEnd(line []byte) []byte {
	if n := len(line); n > 0 && line[n-1] == '\n' {
		line = line[:n-1]
	}
	return line
}
