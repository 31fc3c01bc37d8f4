// Package skills finds what an agent can read before it does something: folders
// with a SKILL.md in them. A group's agent writes some of them itself, perhaps by
// what a stranger told it, so nothing in them is trusted: what is returned is one
// line a skill, and bounded; no link leads elsewhere and no pipe is waited for.
package skills

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"
)

// Bounds of what is read of a folder of skills.
const (
	maxEntries = 1024    // that are looked at
	maxSkills  = 50      // that are returned
	maxRead    = 8 << 10 // bytes of a SKILL.md: its head
	maxAbout   = 300     // bytes
)

const (
	// Place is where engines look for skills, in the home folder and in the working
	// folder.
	Place    = ".claude/skills"
	fileName = "SKILL.md"
)

// Share gives the Place of a folder the other name under which agents look for it, if
// there is one and nothing has the name.
func Share(base string) error {
	const other = ".agents/skills"
	if info, err := os.Lstat(filepath.Join(base, Place)); err != nil || !info.IsDir() {
		return nil
	}
	err := os.Mkdir(filepath.Join(base, filepath.Dir(other)), 0o755)
	if err == nil || errors.Is(err, fs.ErrExist) {
		err = os.Symlink(filepath.Join("..", Place), filepath.Join(base, other))
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// Skill is one of them.
type Skill struct {
	File  string // path of its SKILL.md
	About string // one line; may be empty
}

// names are those of folders that are no text to a model.
var names = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// Find returns the skills in the Place of a folder, by name. Whatever cannot be read
// is left out.
func Find(base string) []Skill {
	in, err := os.OpenRoot(base)
	if err != nil {
		return nil
	}
	defer in.Close()
	root, err := openFolder(in, Place)
	if err != nil {
		return nil
	}
	defer root.Close()
	list, err := root.Open(".")
	if err != nil {
		return nil
	}
	defer list.Close()
	entries, _ := list.Readdirnames(maxEntries) // what there is will do
	slices.Sort(entries)
	var found []Skill
	for _, name := range entries {
		if len(found) == maxSkills {
			break
		}
		if !names.MatchString(name) {
			continue
		}
		if text, ok := head(root, name); ok {
			found = append(found, Skill{File: filepath.Join(base, Place, name, fileName), About: about(text)})
		}
	}
	return found
}

// openFolder opens a folder of root. What else has the name is an error at once:
// without the dot os.Root would wait for the other end of a pipe.
func openFolder(root *os.Root, name string) (*os.Root, error) { return root.OpenRoot(name + "/.") }

// head returns the begin of the file of a skill.
func head(root *os.Root, name string) (text string, ok bool) {
	if info, err := root.Lstat(name); err != nil || !info.IsDir() {
		return "", false
	}
	dir, err := openFolder(root, name)
	if err != nil {
		return "", false
	}
	defer dir.Close()
	f, err := dir.OpenFile(fileName, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return "", false
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return "", false
	}
	data := make([]byte, maxRead)
	n, err := io.ReadFull(f, data)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return "", false // it is empty, or cannot be read
	}
	return string(data[:n]), true
}

// about returns what a skill says about itself: the description at its top, or its
// first line.
func about(text string) string {
	lines := bufio.NewScanner(strings.NewReader(strings.TrimPrefix(text, "\ufeff")))
	lines.Buffer(nil, maxRead+1)
	var first string
	for inHead, inAbout := false, false; lines.Scan(); {
		line := lines.Text()
		trimmed := strings.TrimSpace(line)
		switch {
		case !inHead && trimmed == "---" && first == "":
			inHead = true
		case !inHead:
			if first = strings.TrimSpace(strings.TrimLeft(trimmed, "#")); first != "" {
				return oneLine(first)
			}
		case trimmed == "---" || trimmed == "...":
			if first != "" {
				return oneLine(value(first))
			}
			inHead = false
		case inAbout && (trimmed == "" || line[0] == ' ' || line[0] == '\t'): // its text goes on
			first += " " + trimmed
		case inAbout:
			return oneLine(value(first))
		default:
			first, inAbout = strings.CutPrefix(line, "description:")
			if !inAbout {
				first = ""
			}
		}
	}
	return oneLine(value(first))
}

// value returns what YAML means by the text of a scalar.
func value(text string) string {
	text = strings.TrimSpace(text)
	switch {
	case text == "":
	case text[0] == '>' || text[0] == '|': // its text is in the lines below
		mark, rest, _ := strings.Cut(text, " ")
		if strings.Trim(mark, ">|+-0123456789") == "" {
			return rest
		}
	case text[0] == '"':
		if s, err := strconv.Unquote(text); err == nil {
			return s
		}
		return strings.Trim(text, `"`)
	case text[0] == '\'':
		return strings.ReplaceAll(strings.Trim(text, "'"), "''", "'")
	}
	return text
}

// oneLine returns text without what could be taken for more than a line, or is not
// seen.
func oneLine(text string) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case r == utf8.RuneError || !unicode.IsGraphic(r):
			return -1
		}
		return r
	}, text)
	text = strings.Join(strings.Fields(text), " ")
	if len(text) <= maxAbout {
		return text
	}
	end := maxAbout - len("…")
	for !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "…"
}
