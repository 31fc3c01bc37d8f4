package mount

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"

	"berth/orchestrator/internal/berth"
)

// maxFile bounds the allowlist file.
const maxFile = 1 << 20

// defaultPatterns always hold; a file can only add to them.
var defaultPatterns = []string{
	".ssh", ".gnupg", ".gpg", ".aws", ".azure", ".gcloud", ".kube", ".docker",
	"credentials", ".env", ".netrc", ".npmrc", ".pypirc", "id_rsa", "id_ed25519",
	"private_key", ".secret",
}

// DefaultPatterns returns the patterns that hold whatever the file says.
func DefaultPatterns() []string { return slices.Clone(defaultPatterns) }

// Root is a host folder that groups may be given, or parts of it.
type Root struct {
	Path           string `json:"path"` // absolute, or starting with ~/
	AllowReadWrite bool   `json:"allowReadWrite"`
	Description    string `json:"description,omitempty"`
}

// List is a loaded allowlist. It does not change and is safe for concurrent use.
type List struct {
	roots           []Root
	patterns        []string
	nonMainReadOnly bool
}

// Roots returns the allowed roots as the file has them.
func (l *List) Roots() []Root { return slices.Clone(l.roots) }

// Patterns returns the blocked patterns, the default ones first.
func (l *List) Patterns() []string { return slices.Clone(l.patterns) }

// NonMainReadOnly reports whether only the main group may write.
func (l *List) NonMainReadOnly() bool { return l.nonMainReadOnly }

// Load reads an allowlist. The error names the file and the fault; it is an
// fs.ErrNotExist if there is no file.
func Load(file string) (*List, error) {
	data, err := read(file)
	if err != nil {
		return nil, fmt.Errorf("mount allowlist %s: %w", file, err)
	}
	l, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("mount allowlist %s: %w", file, err)
	}
	return l, nil
}

func read(file string) ([]byte, error) {
	// Without O_NONBLOCK a pipe in this place would hang the daemon.
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		if e, ok := errors.AsType[*os.PathError](err); ok {
			err = e.Err // still an fs.ErrNotExist where it was one
		}
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = errors.New("larger than 1 MiB")
	}
	return data, err
}

func parse(data []byte) (*List, error) {
	// Pointers tell a missing key from an empty value.
	var file struct {
		AllowedRoots    *[]Root   `json:"allowedRoots"`
		BlockedPatterns *[]string `json:"blockedPatterns"`
		NonMainReadOnly *bool     `json:"nonMainReadOnly"`
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&file); err != nil {
		if errors.Is(err, io.EOF) {
			err = errors.New("the file is empty")
		}
		return nil, fmt.Errorf("not usable JSON: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("not usable JSON: something follows the object")
	}
	var faults []error
	if file.AllowedRoots == nil {
		faults = append(faults, errors.New(`"allowedRoots" is missing: a list of {"path", "allowReadWrite"}`))
		file.AllowedRoots = new([]Root)
	}
	if file.BlockedPatterns == nil {
		faults = append(faults, errors.New(`"blockedPatterns" is missing: a list of names, [] for none of your own`))
		file.BlockedPatterns = new([]string)
	}
	if file.NonMainReadOnly == nil {
		faults = append(faults, errors.New(`"nonMainReadOnly" is missing: true or false`))
		file.NonMainReadOnly = new(bool)
	}
	for _, root := range *file.AllowedRoots {
		// Any absolute path does for home here: only the form is checked.
		if _, err := absolute(root.Path, "/"); err != nil {
			faults = append(faults, fmt.Errorf("allowed root: %w", err))
		}
	}
	for _, pattern := range *file.BlockedPatterns {
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" || strings.Contains(pattern, "/") {
			faults = append(faults, fmt.Errorf("blocked pattern %q cannot match: give one name, * and ? and [a-z] as in a shell", pattern))
		}
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	return &List{
		roots:           *file.AllowedRoots,
		patterns:        append(DefaultPatterns(), *file.BlockedPatterns...),
		nonMainReadOnly: *file.NonMainReadOnly,
	}, nil
}

// Allowlist is the allowlist of a running daemon: it follows its file without a
// restart. It is safe for concurrent use.
type Allowlist struct {
	guard Guard

	mu   sync.Mutex
	last *List // the last good one; nil if there was none, or the file is gone
}

// New returns the allowlist kept in file. Nothing is read before it is asked.
// sockets are the container engine's, besides those in the usual places.
func New(file, stateRoot, home string, sockets ...string) *Allowlist {
	program, _ := os.Executable() // unknown is empty, which guards nothing
	return &Allowlist{guard: Guard{
		Home: home, StateRoot: stateRoot, Allowlist: file, Program: program, Sockets: sockets,
	}}
}

// Resolve judges requests by the file as it is now; see List.Resolve. While the
// file is broken the last good list counts. Without a file, or before the first
// good one, everything is refused.
func (a *Allowlist) Resolve(requests []berth.MountRequest, main bool) []Verdict {
	if len(requests) == 0 {
		return nil
	}
	list, fault := a.load()
	verdicts := list.Resolve(requests, main, a.guard)
	if list == nil {
		for i := range verdicts {
			verdicts[i].Reason = "nothing can be mounted: " + fault.Error()
		}
	}
	return verdicts
}

// Alarm says what is wrong with the file as it is now, or returns an empty
// string. No file is no fault: it is how mounts are switched off.
func (a *Allowlist) Alarm() string {
	list, fault := a.load()
	if fault == nil || errors.Is(fault, os.ErrNotExist) {
		return ""
	}
	if list != nil {
		return "the last good mount allowlist is still in use: " + fault.Error()
	}
	return "no host folder is mounted: " + fault.Error()
}

// load reads the file anew each time: it is small, and a cache by its time
// stamp would miss an edit within the clock's tick.
func (a *Allowlist) load() (*List, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	list, err := Load(a.guard.Allowlist)
	if err == nil || errors.Is(err, os.ErrNotExist) {
		a.last = list
	}
	return a.last, err
}
