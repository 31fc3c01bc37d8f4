package shell

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"mvdan.cc/sh/v3/interp"
)

// count returns a number of lines or bytes, or the usual ten.
func (c *call) count(option byte) (n int, err error) {
	text, ok := c.opt[option]
	if !ok {
		return 10, nil
	}
	if n, err = strconv.Atoi(strings.TrimPrefix(text, "+")); err != nil || n < 0 {
		return 0, fmt.Errorf("-%c %.40q: %w", option, text, errUsage)
	}
	return n, nil
}

// title tells the files apart, if there are several.
func (c *call) title(name string, first *bool) error {
	if len(c.args) < 2 || c.has('q') {
		return nil
	}
	gap := "\n"
	if *first {
		gap = ""
	}
	*first = false
	_, err := fmt.Fprintf(c.Stdout, "%s==> %s <==\n", gap, name)
	return err
}

func (c *call) head() error {
	option := byte('n')
	if c.has('c') {
		option = 'c'
	}
	n, err := c.count(option)
	if err != nil {
		return err
	}
	first := true
	return c.each(func(name string, r io.Reader) error {
		if err := c.title(name, &first); err != nil {
			return err
		}
		if option == 'c' {
			_, err := io.CopyN(c.Stdout, r, int64(n))
			return ended(err)
		}
		in := bufio.NewReader(r)
		for range n {
			line, err := in.ReadString('\n')
			if _, failed := io.WriteString(c.Stdout, line); failed != nil {
				return failed
			}
			if err != nil {
				return ended(err)
			}
		}
		return nil
	})
}

func (c *call) tail() error {
	option := byte('n')
	if c.has('c') {
		option = 'c'
	}
	n, err := c.count(option)
	if err != nil {
		return err
	}
	from := strings.HasPrefix(c.opt[option], "+") // the beginning
	first := true
	return c.each(func(name string, r io.Reader) error {
		if err := c.title(name, &first); err != nil {
			return err
		}
		in := bufio.NewReader(r)
		if from {
			for range n - 1 {
				if _, err := take(in, option); err != nil {
					return ended(err)
				}
			}
			_, err := io.Copy(c.Stdout, in)
			return err
		}
		var kept [][]byte
		for {
			piece, err := take(in, option)
			if kept = append(kept, piece); len(kept) > 2*n+100 { // not each time
				kept = append(kept[:0], kept[len(kept)-n-1:]...)
			}
			if err == nil && c.ctx.Err() == nil {
				continue
			}
			if len(piece) == 0 {
				kept = kept[:len(kept)-1]
			}
			_, failed := c.Stdout.Write(slices.Concat(kept[max(0, len(kept)-n):]...))
			return errors.Join(ended(err), failed)
		}
	})
}

// take returns the next line with its end, or the next byte.
func take(in *bufio.Reader, option byte) ([]byte, error) {
	if option == 'n' {
		return in.ReadBytes('\n')
	}
	b, err := in.ReadByte()
	if err != nil {
		return nil, err
	}
	return []byte{b}, nil
}

// ended is no error.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func (c *call) wc() error {
	all := len(c.opt) == 0
	var sums [3]int64
	show := func(n [3]int64, name string) error {
		var parts []string
		for i, option := range []byte{'l', 'w', 'c'} {
			if all || c.has(option) {
				parts = append(parts, strconv.FormatInt(n[i], 10))
			}
		}
		if name != "-" {
			parts = append(parts, name)
		}
		_, err := fmt.Fprintln(c.Stdout, strings.Join(parts, " "))
		return err
	}
	files := 0
	err := c.each(func(name string, r io.Reader) error {
		var n [3]int64
		in := bufio.NewReader(r)
		word := false
		for {
			r, size, err := in.ReadRune()
			if errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return err
			}
			n[2] += int64(size)
			if r == '\n' {
				n[0]++
			}
			if space := unicode.IsSpace(r); word == space {
				if word = !space; word {
					n[1]++
				}
			}
			if n[2]&0xffff == 0 && c.ctx.Err() != nil {
				return c.ctx.Err()
			}
		}
		for i := range sums {
			sums[i] += n[i]
		}
		files++
		return show(n, name)
	})
	if _, told := errors.AsType[interp.ExitStatus](err); files > 1 && (err == nil || told) {
		return errors.Join(err, show(sums, "total"))
	}
	return err
}

func (c *call) sort() error {
	var all []string
	err := c.each(func(_ string, r io.Reader) error {
		return c.lines(r, func(line string) bool { all = append(all, line); return true })
	})
	if _, told := errors.AsType[interp.ExitStatus](err); told {
		return interp.ExitStatus(2)
	} else if err != nil {
		return err
	}
	compare := func(a, b string) int {
		if c.has('f') {
			a, b = strings.ToLower(a), strings.ToLower(b)
		}
		if c.has('n') {
			if n := cmp.Compare(leading(a), leading(b)); n != 0 || c.has('u') {
				return n
			}
		}
		return strings.Compare(a, b)
	}
	slices.SortStableFunc(all, func(a, b string) int {
		if c.has('r') {
			a, b = b, a
		}
		return compare(a, b)
	})
	if c.has('u') {
		all = slices.CompactFunc(all, func(a, b string) bool { return compare(a, b) == 0 })
	}
	return c.print(all)
}

// leading returns the number that a line begins with, or 0.
func leading(line string) float64 {
	line = strings.TrimLeft(line, " \t")
	end := strings.IndexFunc(line, func(r rune) bool { return !strings.ContainsRune("0123456789.-", r) })
	if end < 0 {
		end = len(line)
	}
	n, _ := strconv.ParseFloat(line[:end], 64)
	return n
}

func (c *call) print(lines []string) error {
	out := bufio.NewWriter(c.Stdout)
	for _, line := range lines {
		out.WriteString(line)
		out.WriteByte('\n')
	}
	return out.Flush()
}

func (c *call) uniq() error {
	if len(c.args) > 1 {
		return errUsage
	}
	var out []string
	var counts []int
	if err := c.each(func(_ string, r io.Reader) error {
		return c.lines(r, func(line string) bool {
			if n := len(out); n > 0 && out[n-1] == line {
				counts[n-1]++
			} else {
				out, counts = append(out, line), append(counts, 1)
			}
			return true
		})
	}); err != nil {
		return err
	}
	if c.has('c') {
		for i := range out {
			out[i] = fmt.Sprintf("%7d %s", counts[i], out[i])
		}
	}
	return c.print(out)
}

// grep takes Go's regular expressions, which are the extended ones and more.
func (c *call) grep() error {
	if len(c.args) == 0 {
		return errUsage
	}
	pattern := c.args[0]
	c.args = c.args[1:]
	if c.has('F') {
		pattern = regexp.QuoteMeta(pattern)
	}
	if c.has('i') {
		pattern = "(?i)" + pattern
	}
	exp, err := regexp.Compile(pattern)
	if err != nil {
		return err
	}
	many := len(c.args) > 1
	var status error
	if c.has('r') {
		many = true
		status = c.expand()
	}
	out := bufio.NewWriter(c.Stdout)
	matched := false
	err = c.each(func(name string, r io.Reader) error {
		hits, at := 0, 0
		var failed error
		put := func(text string) {
			if c.has('n') {
				text = strconv.Itoa(at) + ":" + text
			}
			if many && !c.has('h') {
				text = name + ":" + text
			}
			_, failed = fmt.Fprintln(out, text)
		}
		err := c.lines(r, func(line string) bool {
			at++
			if exp.MatchString(line) == c.has('v') {
				return true
			}
			hits++
			switch {
			case c.has('q') || c.has('l'):
				return false
			case c.has('c'):
			case c.has('o') && !c.has('v'):
				for _, text := range exp.FindAllString(line, -1) {
					put(text)
				}
			default:
				put(strings.ToValidUTF8(line, "?"))
			}
			return failed == nil
		})
		matched = matched || hits > 0
		switch {
		case c.has('q'):
		case c.has('l') && hits > 0:
			_, failed = fmt.Fprintln(out, name)
		case c.has('c'):
			text := strconv.Itoa(hits)
			if many && !c.has('h') {
				text = name + ":" + text
			}
			_, failed = fmt.Fprintln(out, text)
		}
		return errors.Join(err, failed)
	})
	if failed := out.Flush(); failed != nil {
		return failed
	}
	if _, told := errors.AsType[interp.ExitStatus](err); told || status != nil && err == nil {
		return interp.ExitStatus(2)
	}
	if err == nil && !matched {
		return interp.ExitStatus(1)
	}
	return err
}

// expand puts the files below the folders that are named in their place.
func (c *call) expand() (status error) {
	names := c.args
	if len(names) == 0 {
		names = []string{""}
	}
	c.args = nil
	for _, name := range names {
		_ = filepath.WalkDir(c.path(name), func(at string, d fs.DirEntry, err error) error {
			switch {
			case c.ctx.Err() != nil:
				return c.ctx.Err()
			case err != nil:
				fmt.Fprintln(c.Stderr, err)
				status = err
			case d.Type().IsRegular():
				below := strings.TrimPrefix(strings.TrimPrefix(at, c.path(name)), "/")
				switch {
				case below == "":
					below = name // a file
				case name != "":
					below = strings.TrimSuffix(name, "/") + "/" + below
				}
				c.args = append(c.args, below)
			}
			return nil
		})
	}
	if len(c.args) == 0 {
		c.args = []string{os.DevNull}
	}
	return status
}
