package workspace

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"berth/agent-runner/protocol"
)

// Budgets for what one look at a folder may cost.
const (
	maxEntries  = 4096
	maxFileSize = protocol.MaxLine + 4096
)

// settled is how long ago a folder must have changed for its time stamp to tell
// that it did not change since: some file systems stamp every two seconds only.
const settled = 3 * time.Second

// Why a file of a container is not read.
var (
	ErrNotRegular = errors.New("not a regular file") // a link leads elsewhere and a pipe blocks
	ErrLinked     = errors.New("it has other names: rename it into place, do not link it")
	ErrOwner      = errors.New("it belongs to somebody else")
)

// Files at the root of the IPC folder, which a container reads and cannot write.
const (
	TasksSnapshot  = "current_tasks.json"
	GroupsSnapshot = "available_groups.json"
)

// BeginRun removes what an earlier run left: unread input, frames, which are
// worth nothing without the nonce of their run, answers, and folders in the
// place of requests.
func (g *Group) BeginRun() error {
	for _, dir := range []string{"input", "frames", "responses"} {
		if err := g.empty(g.dirs[dir]); err != nil {
			return fmt.Errorf("clean %s/%s: %w", g.folder, dir, err)
		}
	}
	for _, dir := range []string{takenDir, "messages", "tasks"} {
		if err := g.emptyFolders(g.dirs[dir]); err != nil {
			return fmt.Errorf("clean %s/%s: %w", g.folder, dir, err)
		}
	}
	return g.TouchLease()
}

// emptyFolders removes the folders of root, and leaves its files. Each name is
// looked at once, however deep the folders are nested.
func (g *Group) emptyFolders(root *os.Root) error {
	names, err := list(root)
	if err != nil {
		return err
	}
	for len(names) > 0 {
		name := names[len(names)-1]
		names = names[:len(names)-1]
		if fi, err := root.Lstat(name); err != nil || !fi.IsDir() {
			continue
		}
		moved, err := g.flatten(root, name)
		if err := errors.Join(err, root.Remove(name)); err != nil {
			return err
		}
		names = append(names, moved...)
	}
	return nil
}

// empty removes what a container made, when no container runs. However deep its
// folders are nested, it never looks deeper than two levels: what lies below is
// moved up first.
func (g *Group) empty(root *os.Root) error {
	for {
		names, err := list(root)
		if err != nil || len(names) == 0 {
			return err
		}
		for _, name := range names {
			if fi, err := root.Lstat(name); err == nil && fi.IsDir() {
				if _, err := g.flatten(root, name); err != nil {
					return err
				}
			}
			if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
}

// flatten empties the folder name: its files are removed, its folders moved up
// beside it, under the names that it returns.
func (g *Group) flatten(root *os.Root, name string) (moved []string, err error) {
	if err := root.Chmod(name, 0o700); err != nil { // the container may have locked us out
		return nil, err
	}
	dir, err := openFolder(root, name)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	for {
		names, err := list(dir)
		if err != nil || len(names) == 0 {
			return moved, err
		}
		for _, child := range names {
			if dir.Remove(child) == nil { // a file, a link or an empty folder
				continue
			}
			to := fmt.Sprintf("berth-%d", g.stamp())
			if err := root.Rename(name+"/"+child, to); err != nil {
				return moved, err
			}
			moved = append(moved, to)
		}
	}
}

// TouchLease tells the runner that the host lives.
func (g *Group) TouchLease() error {
	now := time.Now()
	err := g.ipc.Chtimes(protocol.LeaseFile, now, now)
	if errors.Is(err, fs.ErrNotExist) {
		return writeFile(g.ipc, protocol.LeaseFile, nil, forAll)
	}
	return err
}

// WriteInput puts a message into the run's input folder, whole or not at all.
// It is not synced: the store holds the message, and a container does not
// survive what a sync would guard against.
func (g *Group) WriteInput(seq int64, data []byte) error {
	return writeFile(g.dirs["input"], protocol.InputName(seq), data, forAll)
}

// HasInput reports whether the runner has yet to take an input file.
func (g *Group) HasInput(seq int64) bool {
	_, err := g.dirs["input"].Lstat(protocol.InputName(seq))
	return err == nil
}

// WriteClose asks the runner to end. Repeating it is harmless.
func (g *Group) WriteClose() error {
	return writeFile(g.dirs["input"], protocol.CloseFile, nil, forAll)
}

// forAll lets the container's user read a file as one of the others, where the
// folder above keeps them out.
func forAll(f *os.File) error { return f.Chmod(0o644) } // whatever our umask says

// forGroup lets the container's user read a file by its group, in a folder that
// others may enter.
func (g *Group) forGroup(f *os.File) error {
	if os.Geteuid() == 0 {
		if err := f.Chown(-1, g.tree.gid); err != nil {
			return err
		}
	}
	return f.Chmod(0o640)
}

// writeFile makes a file beside its name and renames it. A container that owns
// the folder can spoil what is written, but not lead it elsewhere.
func writeFile(root *os.Root, name string, data []byte, show func(*os.File) error) error {
	// A name that the container cannot guess, so that nothing is in the way.
	tmp := fmt.Sprintf("%s.%016x.tmp", name, rand.Uint64())
	f, err := root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, show(f), f.Close()); err == nil {
		err = root.Rename(tmp, name)
	}
	if err != nil {
		return errors.Join(err, root.Remove(tmp))
	}
	return nil
}

// Frames returns the names of the canonical frames that wait, in order.
func (g *Group) Frames() ([]string, error) {
	names, _, err := jsonNames(g.dirs["frames"])
	return names, err
}

// ReadFrame returns the content of a canonical frame.
func (g *Group) ReadFrame(name string) ([]byte, error) {
	return g.read(g.dirs["frames"], name, maxFileSize)
}

// RemoveFrame removes the canonical frame with a sequence number, if it exists.
func (g *Group) RemoveFrame(seq int64) error {
	err := g.dirs["frames"].Remove(protocol.FrameName(seq))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Haul is what one Take found.
type Haul struct {
	Taken   []string // names for ReadTaken, in order
	Refused []Refusal
	More    bool // there may be more
}

// Refusal is something in the place of a request that was not taken.
type Refusal struct {
	Name   string // printable
	Reason error
	Left   bool // it is still there; otherwise it was removed
}

// Take moves up to most requests that a container dropped into a folder (messages
// or tasks) out of its reach, in order. Each gets a name by which it is known from
// then on, also after a crash, and which no other request ever has. What is no
// file, or not the container's own, is removed and counts as one of most. An
// error does not keep it from taking the others. That nothing is new costs one
// system call.
func (g *Group) Take(dir string, most int) (h Haul, err error) {
	looked := time.Now()
	changed, err := changed(g.dirs[dir])
	if err != nil {
		return h, fmt.Errorf("look at %s/%s: %w", g.folder, dir, err)
	}
	g.mu.Lock()
	quiet := g.quiet[dir].Equal(changed)
	g.mu.Unlock()
	if quiet {
		return h, nil
	}
	names, full, err := jsonNames(g.dirs[dir])
	if err != nil {
		return h, fmt.Errorf("list %s/%s: %w", g.folder, dir, err)
	}
	if len(names) == 0 && !full && looked.Sub(changed) > settled {
		g.mu.Lock()
		g.quiet[dir] = changed
		g.mu.Unlock()
	}
	var faults []error
	h.More = full
	for _, name := range names {
		if most == 0 {
			h.More = true
			break
		}
		to, err := g.take(dir, name)
		switch {
		case err == nil:
			h.Taken = append(h.Taken, to)
		case errors.Is(err, fs.ErrNotExist):
			continue // the container removed it again
		case errors.Is(err, ErrNotRegular), errors.Is(err, ErrLinked), errors.Is(err, ErrOwner):
			// Only what costs one call: a folder could be refilled for ever.
			left := g.dirs[dir].Remove(name) != nil
			h.Refused = append(h.Refused, Refusal{Name: clean(name), Reason: err, Left: left})
			if left {
				continue
			}
		default:
			if len(faults) < 3 {
				faults = append(faults, fmt.Errorf("take a request of %s: %w", g.folder, err))
			}
			h.More = true
			continue
		}
		most--
	}
	return h, errors.Join(faults...)
}

func (g *Group) take(dir, name string) (string, error) {
	fi, err := g.dirs[dir].Lstat(name)
	if err == nil {
		err = g.trusted(fi)
	}
	if err != nil {
		return "", err
	}
	to := fmt.Sprintf("%020d-%s-%s", g.stamp(), dir, clean(name))
	return to, g.ipc.Rename(dir+"/"+name, takenDir+"/"+to)
}

// changed returns when names last came into a folder or left it. Unlike the time
// of modification, the owner of a folder cannot set that.
func changed(root *os.Root) (time.Time, error) {
	fi, err := root.Lstat(".")
	if err != nil {
		return time.Time{}, err
	}
	sec, nsec := fi.Sys().(*syscall.Stat_t).Ctim.Unix()
	return time.Unix(sec, nsec), nil
}

// trusted returns why a file is not read, or nil: one that a container wrote is
// regular, has one name and one of two owners.
func (g *Group) trusted(fi fs.FileInfo) error {
	stat := fi.Sys().(*syscall.Stat_t)
	switch {
	case !fi.Mode().IsRegular():
		return ErrNotRegular
	case stat.Nlink > 1:
		return ErrLinked
	case int(stat.Uid) != g.tree.uid && int(stat.Uid) != os.Geteuid():
		return ErrOwner
	}
	return nil
}

// stamp returns a number that grows, even if the clock is set back.
func (g *Group) stamp() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.last = max(g.last+1, time.Now().UnixNano())
	return g.last
}

// Taken returns the requests that were taken and not removed yet, in order.
func (g *Group) Taken() ([]string, error) {
	names, _, err := jsonNames(g.dirs[takenDir])
	return slices.DeleteFunc(names, func(name string) bool {
		// A folder may have been swapped in at the last moment; it is removed
		// before the next run.
		fi, err := g.dirs[takenDir].Lstat(name)
		return err == nil && fi.IsDir()
	}), err
}

// ReadTaken returns the content of a taken request. Of one with more than limit
// bytes it returns the first ones, and an error.
func (g *Group) ReadTaken(name string, limit int64) ([]byte, error) {
	return g.read(g.dirs[takenDir], name, limit)
}

// RemoveTaken removes a request that was carried out.
func (g *Group) RemoveTaken(name string) error { return g.dirs[takenDir].Remove(name) }

// WriteResponse puts the answer to a request where the container reads it.
func (g *Group) WriteResponse(name string, data []byte) error {
	return writeFile(g.dirs["responses"], name, data, g.forGroup)
}

// WriteSnapshot puts TasksSnapshot or GroupsSnapshot where the container reads
// it, whole or not at all.
func (g *Group) WriteSnapshot(name string, data []byte) error {
	return writeFile(g.ipc, name, data, g.forGroup)
}

// RemoveResponse removes such an answer.
func (g *Group) RemoveResponse(name string) error { return g.dirs["responses"].Remove(name) }

// Path returns where an IPC folder lies, for watching it. No container can put
// another in its place.
func (g *Group) Path(dir string) string { return g.tree.path("data/ipc", g.folder, dir) }

// jsonNames returns the *.json files of a folder by name, numbers by value; full
// says that the folder may hold more.
func jsonNames(root *os.Root) (names []string, full bool, err error) {
	names, err = list(root)
	full = len(names) == maxEntries
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasSuffix(n, ".json") })
	slices.SortFunc(names, compareNames)
	return names, full, err
}

// compareNames orders "2" before "10": leading digits count as a number.
func compareNames(a, b string) int {
	na, nb := digits(a), digits(b)
	if na != "" && nb != "" {
		va, vb := strings.TrimLeft(na, "0"), strings.TrimLeft(nb, "0")
		if len(va) != len(vb) {
			return len(va) - len(vb)
		}
		if c := strings.Compare(va, vb); c != 0 {
			return c
		}
	}
	return strings.Compare(a, b)
}

func digits(s string) string {
	end := strings.IndexFunc(s, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		return s
	}
	return s[:end]
}

// openFolder opens a folder of root. What else has the name, perhaps since a moment
// ago, is an error at once: without the dot os.Root would wait for the other end of
// a pipe.
func openFolder(root *os.Root, name string) (*os.Root, error) { return root.OpenRoot(name + "/.") }

// list returns up to maxEntries names of a folder.
func list(root *os.Root) ([]string, error) {
	dir, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(maxEntries)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

// read returns what a container wrote into a file, up to limit bytes.
func (g *Group) read(root *os.Root, name string, limit int64) ([]byte, error) {
	f, err := g.openRegular(root, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return data[:limit], fmt.Errorf("over the limit of %d bytes", limit)
	}
	return data, nil
}

// openRegular opens a file for reading that a container wrote.
func (g *Group) openRegular(root *os.Root, name string) (*os.File, error) {
	f, info, err := openPlain(root, name)
	if err != nil {
		return nil, err
	}
	if err := g.trusted(info); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// openPlain opens a regular file for reading, without blocking and without
// following a link.
func openPlain(root *os.Root, name string) (*os.File, fs.FileInfo, error) {
	before, err := root.Lstat(name)
	if err != nil {
		return nil, nil, err
	}
	if !before.Mode().IsRegular() {
		return nil, nil, ErrNotRegular
	}
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, nil, err
	}
	// Between the two calls the name may have become something else.
	after, err := f.Stat()
	if err == nil && !os.SameFile(before, after) {
		err = ErrNotRegular
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, after, nil
}

// clean makes a hostile file name fit for a name of ours and for a log.
func clean(name string) string {
	name = strings.Map(func(r rune) rune {
		if r == '.' || r == '-' || r == '_' || r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' {
			return r
		}
		return '_'
	}, strings.TrimSuffix(name, ".json"))
	return name[:min(len(name), 80)] + ".json"
}
