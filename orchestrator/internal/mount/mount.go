// Package mount decides which host folders a group's container may see. The
// operator's allowlist says what is open; a group's wish is checked against it,
// and against a set of refusals that no file can lift, each with a reason that
// a person can act on.
//
// Everything fails closed: without a good allowlist nothing is mounted.
//
// The container engine binds by path, later than the check. In between, a
// container that may write an allowed folder can put a link where a folder was.
// So a container is started, but gets no word from us, until Verify found that
// what it has mounted is what was checked.
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

	"golang.org/x/text/unicode/norm"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/listfile"
)

// TargetRoot is the folder inside the container that holds the extra mounts.
const TargetRoot = "/workspace/extra"

// maxEntries bounds how many names of a requested folder are looked at. A
// folder with more is refused: it cannot be looked through in good time.
const maxEntries = 100_000

// Rule names what decided about a request.
type Rule string

// The rules, in the order in which they are asked.
const (
	RuleList    Rule = "allowlist file"  // it is missing or broken
	RulePath    Rule = "host path"       // its form, or it is not there
	RuleName    Rule = "containerPath"   // the name inside the container
	RuleNever   Rule = "never mounted"   // no file can lift it
	RulePattern Rule = "blockedPatterns" // also the default ones
	RuleRoots   Rule = "allowedRoots"    // the root that allows it, or none does
)

// Verdict says what became of one request, and why.
type Verdict struct {
	Request berth.MountRequest
	Mount   berth.Mount // set if Allowed
	Allowed bool
	Rule    Rule   // what decided
	Reason  string // why not; empty if Allowed
	Root    string // the allowed root that decided, as the file has it; set if Allowed
	Mode    string // why it is read-only, or writable; set if Allowed
	Note    string // what else the operator should know; may be empty

	checked identity // what was looked at
	movable bool     // a container may put something else in its place
}

// Guard names what is never mounted, whatever the allowlist says.
type Guard struct {
	Home      string   // the home folder; also what ~ means
	StateRoot string   // the daemon's root
	Allowlist string   // the allowlist file
	Program   string   // the running program's file
	Own       []string // further files and folders of the operator's
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

// engineData are folders in which an engine keeps all containers' files.
var engineData = []string{"/var/lib/docker", "/var/lib/containerd", "/var/lib/containers"}

// refusal is why a request was refused.
type refusal struct {
	rule Rule
	text string
}

func (r *refusal) Error() string { return r.text }

func refuse(rule Rule, format string, args ...any) error {
	return &refusal{rule, fmt.Errorf(format, args...).Error()}
}

// Resolve judges requests in order; verdict i belongs to request i. One bad
// request leaves the others alone. A nil List refuses everything.
//
// A request is allowed if its real path (all links resolved) is a folder or a
// regular file inside an allowed root, no component of that path matches a
// blocked pattern, none of its direct children does (deeper ones are not looked
// at), and guard has nothing against it. Of several roots that hold the path
// the first counts. The mount is read-only unless the request says
// "readonly": false and nothing forbids writing: the list for groups that are not
// main, the root, or a read-only root inside that one which the mount touches.
func (l *List) Resolve(requests []berth.MountRequest, main bool, guard Guard) []Verdict {
	verdicts := make([]Verdict, len(requests))
	taken := make(map[string]bool)
	for i, request := range requests {
		v, err := l.resolve(request, main, guard)
		if err == nil && taken[v.Mount.Target] {
			err = refuse(RuleName, "the name %q is taken by an earlier mount: give one of them another containerPath", path.Base(v.Mount.Target))
		}
		if err != nil {
			v = Verdict{Reason: err.Error(), Rule: RulePath}
			if r, ok := errors.AsType[*refusal](err); ok {
				v.Rule = r.rule
			}
		}
		v.Request = request
		if v.Allowed {
			taken[v.Mount.Target] = true
		}
		verdicts[i] = v
	}
	for i, v := range verdicts {
		for _, w := range verdicts {
			if v.Allowed && w.Allowed && v.Mount.ReadOnly && !w.Mount.ReadOnly && below(v.Mount.Source, w.Mount.Source) {
				verdicts[i].Note = fmt.Sprintf("the group can write it all the same: it lies in %s", w.Mount.Target)
			}
		}
	}
	return verdicts
}

func (l *List) resolve(request berth.MountRequest, main bool, guard Guard) (Verdict, error) {
	if l == nil {
		return Verdict{}, refuse(RuleList, "there is no mount allowlist")
	}
	host, err := absolute(request.HostPath, guard.Home)
	if err != nil {
		return Verdict{}, err
	}
	name, err := targetName(request.ContainerPath, host)
	if err != nil {
		return Verdict{}, err
	}
	real, err := filepath.EvalSymlinks(host)
	if err != nil {
		return Verdict{}, fmt.Errorf("host path %q cannot be used: %w", request.HostPath, plain(err))
	}
	if err := plainPath(real); err != nil {
		return Verdict{}, err
	}
	if err := guard.check(real); err != nil {
		return Verdict{}, err
	}
	if pattern := l.blocked(strings.Split(real, "/")...); pattern != "" {
		return Verdict{}, refuse(RulePattern, "host path %q matches the blocked pattern %q", real, pattern)
	}
	roots := l.open(guard.Home)
	i := holder(roots, real)
	if i < 0 {
		return Verdict{}, refuse(RuleRoots, "host path %q is not under any allowed root: add one to the allowlist", real)
	}
	if hidden := guard.hidden(real, roots[i].dir); hidden != "" {
		return Verdict{}, refuse(RuleNever, "host path %q lies in %q, where programs keep keys and settings: name that folder itself in the allowlist", real, hidden)
	}
	checked, err := l.look(real)
	if err != nil {
		return Verdict{}, err
	}
	v := Verdict{
		Mount:   berth.Mount{Source: real, Target: TargetRoot + "/" + name, ReadOnly: true, Alone: true},
		Allowed: true, Rule: RuleRoots, Root: roots[i].Path, checked: checked,
	}
	for _, r := range roots {
		v.movable = v.movable || r.AllowReadWrite && real != r.dir && below(real, r.dir)
	}
	frozen := frozenBy(roots, i, real)
	switch {
	case request.ReadOnly == nil:
		v.Mode = "the default, since the request does not ask for writing"
	case *request.ReadOnly:
		v.Mode = "the request asks for reading only"
	case !main && l.nonMainReadOnly:
		v.Mode = "only the main group may write (nonMainReadOnly)"
	case !roots[i].AllowReadWrite:
		v.Mode = fmt.Sprintf("the allowed root %q is read-only (allowReadWrite)", roots[i].Path)
	case frozen != "":
		v.Mode = fmt.Sprintf("it touches the allowed root %q, which is read-only", frozen)
	default:
		v.Mode = fmt.Sprintf("the request asks for writing, and the allowed root %q allows it", roots[i].Path)
		v.Mount.ReadOnly = false
	}
	return v, nil
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
// container engine, in a log or by a person.
func plainPath(p string) error {
	if !utf8.ValidString(p) {
		return fmt.Errorf("host path %q cannot be used: it is not valid UTF-8", p)
	}
	if strings.ContainsFunc(p, misleading) {
		return fmt.Errorf("host path %q cannot be used: it holds a colon, a comma, or a control or invisible character", p)
	}
	return nil
}

// misleading reports whether r ends an option or a line, or changes how the
// text around it looks. The joiners stay: names in Persian or Hindi need them.
func misleading(r rune) bool {
	const zeroWidthNonJoiner, zeroWidthJoiner = 0x200c, 0x200d
	if r == zeroWidthNonJoiner || r == zeroWidthJoiner {
		return false
	}
	return r == ':' || r == ',' || unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp)
}

// targetName returns the one path component below TargetRoot. A name taken from
// the host path may hold spaces and any letters, one asked for may not.
func targetName(asked, host string) (string, error) {
	name := asked
	if name == "" {
		name = filepath.Base(host)
	} else if strings.ContainsFunc(name, func(r rune) bool { return !nameRune(r) }) {
		return "", refuse(RuleName, "containerPath %q cannot be used: one name of letters, digits, '.', '_' and '-'", asked)
	}
	if strings.Trim(name, ".") == "" || strings.TrimSpace(name) == "" || name == "/" || len(name) > 255 {
		return "", refuse(RuleName, "the name %q inside the container cannot be used: give a containerPath of 1 to 255 letters, digits, '.', '_' and '-'", name)
	}
	return name, nil
}

func nameRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r)
}

// check refuses what no allowlist can open. real has no links in it.
func (g Guard) check(real string) error {
	if real == "/" {
		return refuse(RuleNever, "the whole file system is never mounted")
	}
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		if inside(real, dir) {
			return refuse(RuleNever, "host path %q is never mounted: it lies in %s", real, dir)
		}
	}
	for _, home := range spellings(g.Home) {
		if inside(home, real) {
			return refuse(RuleNever, "host path %q is never mounted: it is, or holds, the whole home folder", real)
		}
	}
	for _, root := range spellings(g.StateRoot) {
		if inside(root, real) || inside(real, root) {
			return refuse(RuleNever, "host path %q is never mounted: it holds, or lies in, the state root %q", real, root)
		}
	}
	for _, file := range spellings(g.Allowlist) {
		if inside(filepath.Dir(file), real) || inside(real, file) {
			return refuse(RuleNever, "host path %q is never mounted: the mount allowlist lies in it", real)
		}
	}
	for _, own := range g.Own {
		for _, own := range spellings(own) {
			if inside(own, real) || inside(real, own) {
				return refuse(RuleNever, "host path %q is never mounted: %q is for the operator alone", real, own)
			}
		}
	}
	for _, program := range spellings(g.Program) {
		if inside(program, real) {
			return refuse(RuleNever, "host path %q is never mounted: Berth's own program lies in it", real)
		}
	}
	sockets := append([]string{}, usualSockets...)
	for _, socket := range append(sockets, g.Sockets...) {
		for _, socket := range spellings(socket) {
			if inside(socket, real) {
				return refuse(RuleNever, "host path %q is never mounted: it is, or holds, the container engine's socket", real)
			}
		}
	}
	for _, data := range engineData {
		for _, data := range spellings(data) {
			if inside(data, real) || inside(real, data) {
				return refuse(RuleNever, "host path %q is never mounted: the container engine keeps all containers in %q", real, data)
			}
		}
	}
	return nil
}

// hidden returns the hidden folder or file of the home that real lies in, unless
// the allowed root lies in it as well. An allowed home folder would open
// everything there: start-up scripts, browsers, other agents' keys and hooks.
func (g Guard) hidden(real, root string) string {
	for _, home := range spellings(g.Home) {
		if real == home || !below(real, home) {
			continue
		}
		first, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(real, home), "/"), "/")
		if dir := filepath.Join(home, first); strings.HasPrefix(first, ".") && !below(root, dir) {
			return dir
		}
	}
	return ""
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

// openRoot is an allowed root that exists.
type openRoot struct {
	Root
	dir string // its real path
}

// open returns the roots that exist, in order.
func (l *List) open(home string) []openRoot {
	var out []openRoot
	for _, root := range l.roots {
		dir, err := absolute(root.Path, home)
		if err != nil {
			continue
		}
		if dir, err = filepath.EvalSymlinks(dir); err == nil {
			out = append(out, openRoot{root, dir})
		}
	}
	return out
}

// holder returns which root holds real, the first of several, or -1.
func holder(roots []openRoot, real string) int {
	for i, r := range roots {
		if below(real, r.dir) {
			return i
		}
	}
	return -1
}

// frozenBy returns a read-only root inside root i that a mount of real would
// open for writing, or "".
func frozenBy(roots []openRoot, i int, real string) string {
	for _, r := range roots {
		nested := r.dir != roots[i].dir && below(r.dir, roots[i].dir)
		if nested && !r.AllowReadWrite && (below(real, r.dir) || below(r.dir, real)) {
			return r.Path
		}
	}
	return ""
}

// look checks what real is and, for a folder, its direct children. It holds on
// to what it opened, and so returns what exactly it looked at.
func (l *List) look(real string) (identity, error) {
	held, id, err := hold(real)
	if err != nil {
		return identity{}, fmt.Errorf("host path %q cannot be used: %w", real, plain(err))
	}
	defer held.Close()
	if id.regular {
		return id, nil
	}
	if !id.dir {
		return identity{}, refuse(RulePath, "host path %q cannot be used: neither a folder nor a regular file", real)
	}
	dir, err := os.Open(fdPath(held))
	if err != nil {
		return identity{}, fmt.Errorf("host path %q cannot be looked through: %w", real, plain(err))
	}
	defer dir.Close()
	for seen := 0; ; {
		entries, err := dir.ReadDir(1024)
		for _, entry := range entries {
			if pattern := l.blocked(entry.Name()); pattern != "" {
				return identity{}, refuse(RulePattern, "host path %q holds %q, which matches the blocked pattern %q: ask for a folder without it", real, entry.Name(), pattern)
			}
			if entry.Type()&os.ModeSocket != 0 && matches(socketNames, entry.Name()) != "" {
				return identity{}, refuse(RuleNever, "host path %q is never mounted: it holds the container engine's socket %q", real, entry.Name())
			}
		}
		if errors.Is(err, io.EOF) {
			return id, nil
		}
		if err != nil {
			return identity{}, fmt.Errorf("host path %q cannot be looked through: %w", real, plain(err))
		}
		if seen += len(entries); seen >= maxEntries {
			return identity{}, refuse(RulePath, "host path %q holds more than %d entries: ask for a smaller folder", real, maxEntries)
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

// fold makes spellings of one name equal: of its case, and of its accents.
func fold(s string) string { return listfile.Fold(norm.NFC.String(s)) }

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
