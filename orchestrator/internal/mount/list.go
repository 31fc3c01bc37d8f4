package mount

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/listfile"
)

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
	unknown         []string
}

// Roots returns the allowed roots as the file has them.
func (l *List) Roots() []Root { return slices.Clone(l.roots) }

// Patterns returns the blocked patterns, the default ones first.
func (l *List) Patterns() []string { return slices.Clone(l.patterns) }

// NonMainReadOnly reports whether only the main group may write.
func (l *List) NonMainReadOnly() bool { return l.nonMainReadOnly }

// Unknown returns what the file says and nobody reads, one sentence each. It is
// no fault: the three keys that matter must be there, and a root's keys are on the
// strict side when they are missing.
func (l *List) Unknown() []string { return slices.Clone(l.unknown) }

// Load reads an allowlist. The error names the file and the fault; it is an
// fs.ErrNotExist if there is no file. See listfile.Read for what a file must be.
func Load(file string) (*List, error) {
	data, err := listfile.Read(file)
	if err != nil {
		return nil, fmt.Errorf("mount allowlist %s: %w", file, err)
	}
	l, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("mount allowlist %s: %w", file, err)
	}
	return l, nil
}

var knownNames = map[string][]string{
	"":               {"allowedRoots", "blockedPatterns", "nonMainReadOnly"},
	"allowedRoots/*": {"path", "allowReadWrite", "description"},
}

func parse(data []byte) (*List, error) {
	// Pointers tell a missing key from an empty value.
	var file struct {
		AllowedRoots    *[]Root   `json:"allowedRoots"`
		BlockedPatterns *[]string `json:"blockedPatterns"`
		NonMainReadOnly *bool     `json:"nonMainReadOnly"`
	}
	unknown, err := listfile.Decode(data, &file, knownNames)
	if err != nil {
		return nil, err
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
	if len(faults) > 0 && len(unknown) > 0 {
		faults = append(faults, errors.New(strings.Join(unknown, "; "))) // a slip of the pen, perhaps
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
		unknown:         unknown,
	}, nil
}

// Change says what an edit of the file did.
type Change int

// The kinds of change.
const (
	Unchanged Change = iota // it was so already
	Added
	Changed // what the root allows, or its description
	Created // the file itself, with the root in it
)

// AddRoot writes root into the file, which is made if it is not there; of a root
// that is listed already, the right to write is set, and the description unless
// it is empty. The folder need not exist. A broken file is left as it is.
func AddRoot(file, home string, root Root) (Change, error) {
	if _, err := absolute(root.Path, home); err != nil {
		return Unchanged, err
	}
	change := Unchanged
	err := edit(file, func(list *List) ([]operation, error) {
		if list == nil {
			change = Created
			return []operation{{"add", "/allowedRoots/-", root}}, nil
		}
		i := list.find(root.Path, home)
		if i < 0 {
			change = Added
			return []operation{{"add", "/allowedRoots/-", root}}, nil
		}
		var ops []operation
		if old := list.roots[i]; old.AllowReadWrite != root.AllowReadWrite {
			ops = append(ops, operation{"add", fmt.Sprintf("/allowedRoots/%d/allowReadWrite", i), root.AllowReadWrite})
		}
		if old := list.roots[i]; root.Description != "" && old.Description != root.Description {
			ops = append(ops, operation{"add", fmt.Sprintf("/allowedRoots/%d/description", i), root.Description})
		}
		if len(ops) > 0 {
			change = Changed
		}
		return ops, nil
	})
	if err != nil {
		return Unchanged, err
	}
	return change, nil
}

// RemoveRoot takes the root of a path out of the file. It fails with
// berth.NotFound if no root has that path; a root above it stays.
func RemoveRoot(file, home, path string) error {
	return edit(file, func(list *List) ([]operation, error) {
		i := -1
		if list != nil {
			i = list.find(path, home)
		}
		if i < 0 {
			return nil, berth.Errorf(berth.NotFound, "%s is no allowed root: see berth mounts ls", path)
		}
		return []operation{{"remove", fmt.Sprintf("/allowedRoots/%d", i), nil}}, nil
	})
}

// find returns the place of the root that is written as path, or -1. Links are
// not followed: what is written is meant.
func (l *List) find(path, home string) int {
	want, err := absolute(path, home)
	if err != nil {
		return -1
	}
	return slices.IndexFunc(l.roots, func(r Root) bool {
		got, err := absolute(r.Path, home)
		return err == nil && got == want
	})
}

// operation is one step of a JSON patch.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

const emptyList = `{"allowedRoots": [], "blockedPatterns": [], "nonMainReadOnly": true}`

// edit applies what change returns; it gets nil if there is no file.
func edit(file string, change func(*List) ([]operation, error)) error {
	err := listfile.Edit(file, func(data []byte) ([]byte, error) {
		var list *List
		if data == nil {
			data = []byte(emptyList)
		} else if parsed, err := parse(data); err != nil {
			return nil, err
		} else {
			list = parsed
		}
		ops, err := change(list)
		if err != nil || len(ops) == 0 {
			return data, err
		}
		patch, err := json.Marshal(ops)
		if err != nil {
			return nil, err
		}
		if data, err = listfile.Patch(data, patch); err != nil {
			return nil, err
		}
		_, err = parse(data)
		return data, err
	})
	if known, ok := errors.AsType[*berth.Error](err); ok {
		return known
	}
	if err != nil {
		return berth.Errorf(berth.Invalid, "mount allowlist %s: %w", file, err)
	}
	return nil
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

// Protect names further files and folders of the operator's that are never
// mounted, nor what holds them; empty names are none. It is for the start, before
// the list is asked for anything.
func (a *Allowlist) Protect(paths ...string) { a.guard.Own = append(a.guard.Own, paths...) }

// Resolve judges requests by the file as it is now; see List.Resolve. While the
// file is broken the last good list counts. Without a file, or before the first
// good one, everything is refused.
func (a *Allowlist) Resolve(requests []berth.MountRequest, main bool) []Verdict {
	if len(requests) == 0 {
		return nil
	}
	list, fault := a.List()
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
	list, fault := a.List()
	if fault == nil || errors.Is(fault, os.ErrNotExist) {
		return ""
	}
	text := strings.ReplaceAll(fault.Error(), "\n", "; ")
	if list != nil {
		return "the last good mount allowlist is still in use: " + text
	}
	return "no host folder is mounted: " + text
}

// List returns the list that counts, nil if none does, and what is wrong with
// the file as it is now. Both may be set: then the list is the last good one.
//
// The file is read anew each time: it is small, a run begins rarely, and a cache
// by its time stamp would miss an edit within the clock's tick.
func (a *Allowlist) List() (*List, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	list, err := Load(a.guard.Allowlist)
	if err == nil || errors.Is(err, os.ErrNotExist) {
		a.last = list
	}
	return a.last, err
}

// Below returns blocked names deeper inside a folder than a mount's check looks,
// at most ten, as paths from dir, and whether everything was looked through; it
// looks at 20 000 names, near ones first. It is advice for the operator.
func (l *List) Below(dir string) (found []string, complete bool) {
	const most, many = 20_000, 10
	left := most
	for level := []string{"."}; len(level) > 0; {
		var next []string
		for _, sub := range level {
			entries, err := os.ReadDir(filepath.Join(dir, sub))
			if err != nil {
				continue
			}
			for _, e := range entries {
				if left--; left < 0 || len(found) == many {
					return found, false
				}
				name := filepath.Join(sub, e.Name())
				if l.blocked(e.Name()) != "" {
					found = append(found, name)
				} else if e.IsDir() {
					next = append(next, name)
				}
			}
		}
		level = next
	}
	return found, true
}
