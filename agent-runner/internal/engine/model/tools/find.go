package tools

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/bmatcuk/doublestar/v4"

	"berth/agent-runner/internal/engine/model/llm"
)

// Limits of searches.
const (
	maxFound   = 200
	maxVisited = 200_000         // files and folders that one search looks at
	findWithin = 2 * time.Minute // of one search
	shownMatch = 300             // bytes of a line that matches
)

// errEnough ends a walk.
var errEnough = errors.New("enough")

// walk calls visit with each regular file at root and below, as its path and its
// path relative to root. It does not follow links, and leaves out the kernel's
// files and .git. It reports whether it saw everything.
func walk(ctx context.Context, root string, visit func(path, rel string, d fs.DirEntry) error) (complete bool, err error) {
	f, _, err := open(root, os.O_RDONLY, true) // refuses the kernel's
	if err != nil {
		return false, err
	}
	_ = f.Close()
	ctx, cancel := context.WithTimeoutCause(ctx, findWithin, refused("the search took more than %v: look in fewer folders", findWithin))
	defer cancel()
	visited := 0
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if visited++; visited > maxVisited {
			return errEnough
		}
		if err != nil { // of one folder: the others are still worth a look
			if path == root {
				return err
			}
			return nil
		}
		if d.IsDir() {
			if path != root && (d.Name() == ".git" || path == "/proc" || path == "/sys" || path == "/dev") {
				return filepath.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() {
			return nil
		}
		rel, err := filepath.Rel(root, path)
		if err != nil || rel == "." {
			rel = filepath.Base(path)
		}
		return visit(path, rel, d)
	})
	if errors.Is(err, errEnough) {
		return false, nil
	}
	return err == nil, err
}

func (b *Box) glob() tool {
	return tool{llm.Tool{
		Name:        "glob",
		Description: "Finds files by a pattern of their path, such as **/*.go or notes/*.md; those changed last come first.",
		Schema: json.RawMessage(`{"type":"object","properties":{` +
			`"pattern":{"type":"string"},` +
			`"path":{"type":"string","description":"the folder to look in; the group's own if not given"}},` +
			`"required":["pattern"]}`),
	}, func(ctx context.Context, input json.RawMessage) (string, error) {
		in, err := decode[struct{ Pattern, Path string }](input)
		if err != nil {
			return "", err
		}
		root, err := b.path(cmp.Or(in.Path, b.config.WorkDir))
		if err != nil {
			return "", err
		}
		pattern := strings.TrimPrefix(in.Pattern, "./")
		if rest, ok := strings.CutPrefix(pattern, root+"/"); ok {
			pattern = rest
		}
		if pattern == "" || !doublestar.ValidatePattern(pattern) {
			return "", refused("pattern %.200q is none: use *, ?, **, [a-z] and {a,b}", in.Pattern)
		}
		type found struct {
			path    string
			changed time.Time
		}
		var all []found
		complete, err := walk(ctx, root, func(path, rel string, d fs.DirEntry) error {
			if !doublestar.MatchUnvalidated(pattern, rel) {
				return nil
			}
			info, err := d.Info()
			if err != nil { // gone meanwhile
				return nil
			}
			all = append(all, found{path, info.ModTime()})
			return nil
		})
		if err != nil {
			return "", err
		}
		slices.SortFunc(all, func(a, b found) int {
			return cmp.Or(b.changed.Compare(a.changed), cmp.Compare(a.path, b.path))
		})
		var out strings.Builder
		for _, f := range all[:min(len(all), maxFound)] {
			out.WriteString(f.path + "\n")
		}
		return out.String() + remark(len(all), complete), nil
	}}
}

// remark says what a list of found things leaves out.
func remark(n int, complete bool) string {
	switch {
	case !complete:
		return fmt.Sprintf("… (not everything was looked at: there are more than %d files)", maxVisited)
	case n > maxFound:
		return fmt.Sprintf("… (the first %d of more: look for something narrower)", maxFound)
	case n == 0:
		return "nothing found"
	}
	return ""
}

func (b *Box) grep() tool {
	return tool{llm.Tool{
		Name:        "grep",
		Description: "Finds lines in text files by a regular expression (RE2), as path:line: text.",
		Schema: json.RawMessage(`{"type":"object","properties":{` +
			`"pattern":{"type":"string"},` +
			`"path":{"type":"string","description":"a file, or a folder with all below it; the group's folder if not given"},` +
			`"glob":{"type":"string","description":"only in files like this, such as *.go or src/**/*.ts"},` +
			`"ignore_case":{"type":"boolean"}},` +
			`"required":["pattern"]}`),
	}, func(ctx context.Context, input json.RawMessage) (string, error) {
		in, err := decode[struct {
			Pattern, Path, Glob string
			IgnoreCase          yes `json:"ignore_case"`
		}](input)
		if err != nil {
			return "", err
		}
		pattern := in.Pattern
		if in.IgnoreCase {
			pattern = "(?i)" + pattern
		}
		re, err := regexp.Compile(pattern)
		if err != nil || in.Pattern == "" {
			return "", refused("pattern %.200q is no regular expression: %v", in.Pattern, err)
		}
		if in.Glob != "" && !doublestar.ValidatePattern(in.Glob) {
			return "", refused("glob %.200q is no pattern: use *, ?, **, [a-z] and {a,b}", in.Glob)
		}
		root, err := b.path(cmp.Or(in.Path, b.config.WorkDir))
		if err != nil {
			return "", err
		}
		var out strings.Builder
		n := 0
		complete, err := walk(ctx, root, func(path, rel string, _ fs.DirEntry) error {
			if in.Glob != "" && !doublestar.MatchUnvalidated(in.Glob, rel) && !doublestar.MatchUnvalidated(in.Glob, filepath.Base(rel)) {
				return nil
			}
			return search(ctx, path, re, func(line int, text string) error {
				if n++; n > maxFound {
					return errEnough
				}
				fmt.Fprintf(&out, "%s:%d: %s\n", path, line, text)
				return nil
			})
		})
		if err != nil {
			return "", err
		}
		return out.String() + remark(n, complete || n > maxFound), nil
	}}
}

// search calls found with each line of a text file that matches. A file that
// cannot be read has none.
func search(ctx context.Context, path string, re *regexp.Regexp, found func(line int, text string) error) error {
	f, _, err := open(path, os.O_RDONLY, false)
	if err != nil {
		return nil
	}
	defer f.Close()
	in := bufio.NewReaderSize(f, 64<<10)
	if start, _ := in.Peek(1 << 10); strings.IndexByte(string(start), 0) >= 0 {
		return nil
	}
	for n := 1; ; n++ {
		if n%1000 == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		line, _, err := shortLine(in)
		if re.MatchString(line) && (err == nil || line != "") {
			if err := found(n, Bound(strings.ToValidUTF8(line, "\uFFFD"), shownMatch)); err != nil {
				return err
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return nil // as one that cannot be read
		}
	}
}
