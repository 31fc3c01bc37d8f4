// Package mount decides which host folders a group's container may see. The
// operator's allowlist says what is open; a group's wish is checked against it,
// and against a set of refusals that no file can lift, each with a reason that
// a person can act on.
//
// Everything fails closed: without a good allowlist nothing is mounted.
package mount

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"

	"berth/orchestrator/internal/berth"
)

// TargetRoot is the folder inside the container that holds the extra mounts.
const TargetRoot = "/workspace/extra"

// maxEntries bounds how many names of a requested folder are looked at. A
// folder with more is refused: it cannot be looked through in good time.
const maxEntries = 100_000

// Verdict says what became of one request.
type Verdict struct {
	Request berth.MountRequest
	Mount   berth.Mount // set if Allowed
	Allowed bool
	Reason  string // why not; empty if Allowed
}

// Guard names what is never mounted, whatever the allowlist says.
type Guard struct {
	Home      string   // the home folder; also what ~ means
	StateRoot string   // the daemon's root
	Allowlist string   // the allowlist file
	Program   string   // the running program's file
	Sockets   []string // further sockets of a container engine, besides the usual places
}

// usualSockets are doors to the host: who can write to one is root.
var usualSockets = []string{
	"/run/docker.sock",
	"/var/run/docker.sock",
	"/run/containerd/containerd.sock",
	"/run/podman/podman.sock",
}

var socketNames = []string{"*docker*.sock", "*containerd*.sock", "*podman*.sock"}

// Resolve judges requests in order; verdict i belongs to request i. One bad
// request leaves the others alone. A nil List refuses everything.
//
// A request is allowed if its real path (all links resolved) is a folder or a
// regular file inside an allowed root, no component of that path matches a
// blocked pattern, none of its direct children does (deeper ones are not looked
// at), and guard has nothing against it. Of several roots that hold the path
// the first counts. The mount is read-only unless the request says
// "readonly": false and nothing forbids writing.
func (l *List) Resolve(requests []berth.MountRequest, main bool, guard Guard) []Verdict {
	verdicts := make([]Verdict, len(requests))
	taken := make(map[string]bool)
	for i, request := range requests {
		verdicts[i].Request = request
		m, err := l.resolve(request, main, guard)
		if err == nil && taken[m.Target] {
			err = fmt.Errorf("the name %q is taken by an earlier mount: give one of them another containerPath", path.Base(m.Target))
		}
		if err != nil {
			verdicts[i].Reason = err.Error()
			continue
		}
		taken[m.Target] = true
		verdicts[i].Mount, verdicts[i].Allowed = m, true
	}
	return verdicts
}

func (l *List) resolve(request berth.MountRequest, main bool, guard Guard) (berth.Mount, error) {
	if l == nil {
		return berth.Mount{}, errors.New("there is no mount allowlist")
	}
	host, err := absolute(request.HostPath, guard.Home)
	if err != nil {
		return berth.Mount{}, err
	}
	name, err := targetName(request.ContainerPath, host)
	if err != nil {
		return berth.Mount{}, err
	}
	real, err := filepath.EvalSymlinks(host)
	if err != nil {
		return berth.Mount{}, fmt.Errorf("host path %q cannot be used: %w", request.HostPath, plain(err))
	}
	if err := plainPath(real); err != nil {
		return berth.Mount{}, err
	}
	if err := guard.check(real); err != nil {
		return berth.Mount{}, err
	}
	if pattern := l.blocked(strings.Split(real, "/")...); pattern != "" {
		return berth.Mount{}, fmt.Errorf("host path %q matches the blocked pattern %q", real, pattern)
	}
	root, ok := l.rootOf(real, guard.Home)
	if !ok {
		return berth.Mount{}, fmt.Errorf("host path %q is not under any allowed root: add one to the allowlist", real)
	}
	if err := l.look(real); err != nil {
		return berth.Mount{}, err
	}
	wantsWriting := request.ReadOnly != nil && !*request.ReadOnly
	mayWrite := root.AllowReadWrite && (main || !l.nonMainReadOnly)
	return berth.Mount{
		Source:   real,
		Target:   TargetRoot + "/" + name,
		ReadOnly: !wantsWriting || !mayWrite,
	}, nil
}

// absolute expands ~ and cleans p. Links are not resolved yet: cleaning first
// is what makes "a/../b" mean what it says.
func absolute(p, home string) (string, error) {
	if p == "" {
		return "", errors.New("the host path is empty")
	}
	if err := plainPath(p); err != nil {
		return "", err
	}
	if p == "~" || strings.HasPrefix(p, "~/") {
		if !filepath.IsAbs(home) {
			return "", fmt.Errorf("host path %q cannot be used: the home folder is not known", p)
		}
		p = home + p[1:]
	}
	if !filepath.IsAbs(p) {
		return "", fmt.Errorf("host path %q cannot be used: give an absolute path, or one that starts with ~/", p)
	}
	return filepath.Clean(p), nil
}

// plainPath refuses what could be read as something else on the way to the
// container engine or in a log.
func plainPath(p string) error {
	if !utf8.ValidString(p) {
		return fmt.Errorf("host path %q cannot be used: it is not valid UTF-8", p)
	}
	if i := strings.IndexFunc(p, func(r rune) bool { return r == ':' || r == ',' || unicode.IsControl(r) }); i >= 0 {
		return fmt.Errorf("host path %q cannot be used: it holds a colon, a comma or a control character", p)
	}
	return nil
}

// targetName returns the one path component below TargetRoot. A name taken from
// the host path may hold spaces and any letters, one asked for may not.
func targetName(asked, host string) (string, error) {
	name := asked
	if name == "" {
		name = filepath.Base(host)
	} else if i := strings.IndexFunc(name, func(r rune) bool { return !nameRune(r) }); i >= 0 {
		return "", fmt.Errorf("containerPath %q cannot be used: one name of letters, digits, '.', '_' and '-'", asked)
	}
	if strings.Trim(name, ".") == "" || strings.TrimSpace(name) == "" || name == "/" || len(name) > 255 {
		return "", fmt.Errorf("the name %q inside the container cannot be used: give a containerPath of 1 to 255 letters, digits, '.', '_' and '-'", name)
	}
	return name, nil
}

func nameRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r)
}

// check refuses what no allowlist can open. real has no links in it.
func (g Guard) check(real string) error {
	if real == "/" {
		return errors.New("the whole file system is never mounted")
	}
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		if inside(real, dir) {
			return fmt.Errorf("host path %q is never mounted: it lies in %s", real, dir)
		}
	}
	for _, home := range spellings(g.Home) {
		if inside(home, real) {
			return fmt.Errorf("host path %q is never mounted: it is, or holds, the whole home folder", real)
		}
	}
	for _, root := range spellings(g.StateRoot) {
		if inside(root, real) || inside(real, root) {
			return fmt.Errorf("host path %q is never mounted: it holds, or lies in, the state root %q", real, root)
		}
	}
	for _, file := range spellings(g.Allowlist) {
		if inside(filepath.Dir(file), real) || inside(real, file) {
			return fmt.Errorf("host path %q is never mounted: the mount allowlist lies in it", real)
		}
	}
	for _, program := range spellings(g.Program) {
		if inside(program, real) {
			return fmt.Errorf("host path %q is never mounted: Berth's own program lies in it", real)
		}
	}
	sockets := append([]string{}, usualSockets...)
	for _, socket := range append(sockets, g.Sockets...) {
		for _, socket := range spellings(socket) {
			if inside(socket, real) {
				return fmt.Errorf("host path %q is never mounted: it is, or holds, the container engine's socket", real)
			}
		}
	}
	return nil
}

// spellings returns p as written and, if links lead elsewhere, its real path.
func spellings(p string) []string {
	if p == "" {
		return nil
	}
	p = filepath.Clean(p)
	// What does not exist yet is found by its nearest existing parent.
	for dir, rest := p, ""; ; dir, rest = filepath.Dir(dir), filepath.Join(filepath.Base(dir), rest) {
		real, err := filepath.EvalSymlinks(dir)
		if err == nil {
			if real = filepath.Join(real, rest); real != p {
				return []string{p, real}
			}
			return []string{p}
		}
		if dir == filepath.Dir(dir) {
			return []string{p}
		}
	}
}

// inside reports whether p is dir or lies below it, by name or because the same
// folder appears under another name (a bind mount).
func inside(p, dir string) bool {
	if below(p, dir) {
		return true
	}
	want, err := os.Stat(dir)
	if err != nil {
		return false
	}
	for ; ; p = filepath.Dir(p) {
		if got, err := os.Stat(p); err == nil && os.SameFile(got, want) {
			return true
		}
		if p == filepath.Dir(p) {
			return false
		}
	}
}

// below reports whether p is dir or lies below it by name.
func below(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}

// rootOf returns the first allowed root that holds real. Roots that do not
// exist are skipped.
func (l *List) rootOf(real, home string) (Root, bool) {
	for _, root := range l.roots {
		dir, err := absolute(root.Path, home)
		if err != nil {
			continue
		}
		if dir, err = filepath.EvalSymlinks(dir); err != nil {
			continue
		}
		if below(real, dir) {
			return root, true
		}
	}
	return Root{}, false
}

// look checks what real is and, for a folder, its direct children.
func (l *List) look(real string) error {
	info, err := os.Lstat(real)
	if err != nil {
		return fmt.Errorf("host path %q cannot be used: %w", real, plain(err))
	}
	if info.Mode().IsRegular() {
		return nil
	}
	if !info.IsDir() {
		return fmt.Errorf("host path %q cannot be used: neither a folder nor a regular file", real)
	}
	dir, err := os.Open(real)
	if err != nil {
		return fmt.Errorf("host path %q cannot be looked through: %w", real, plain(err))
	}
	defer dir.Close()
	for seen := 0; ; {
		entries, err := dir.ReadDir(1024)
		for _, entry := range entries {
			if pattern := l.blocked(entry.Name()); pattern != "" {
				return fmt.Errorf("host path %q holds %q, which matches the blocked pattern %q: ask for a folder without it", real, entry.Name(), pattern)
			}
			if entry.Type()&os.ModeSocket != 0 && matches(socketNames, entry.Name()) != "" {
				return fmt.Errorf("host path %q is never mounted: it holds the container engine's socket %q", real, entry.Name())
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("host path %q cannot be looked through: %w", real, plain(err))
		}
		if seen += len(entries); seen >= maxEntries {
			return fmt.Errorf("host path %q holds more than %d entries: ask for a smaller folder", real, maxEntries)
		}
	}
}

// blocked returns the first pattern that one of the path components matches.
func (l *List) blocked(components ...string) string {
	for _, component := range components {
		if pattern := matches(l.patterns, component); pattern != "" {
			return pattern
		}
	}
	return ""
}

func matches(patterns []string, component string) string {
	folded := fold(component)
	for _, pattern := range patterns {
		if ok, _ := path.Match(fold(pattern), folded); ok {
			return pattern
		}
	}
	return ""
}

// fold maps every rune to the smallest one it equals in some case, which also
// joins the odd ones, such as the Kelvin sign with k.
func fold(s string) string {
	return strings.Map(func(r rune) rune {
		least := r
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			least = min(least, f)
		}
		return least
	}, s)
}

// plain drops the operation and the path of a file error: the caller names the
// path that the person wrote.
func plain(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return errors.New("it does not exist")
	}
	if e, ok := errors.AsType[*os.PathError](err); ok {
		return e.Err
	}
	return err
}
