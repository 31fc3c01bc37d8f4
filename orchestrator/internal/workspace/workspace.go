// Package workspace keeps the folders of groups: their files, sessions, IPC
// and run logs. What a container can write is opened as an os.Root and treated
// as hostile: nothing here follows a link out of it or blocks on a pipe.
package workspace

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// seeds are the memory files that a new group starts with, and all share.
//
//go:embed seeds/*.md
var seeds embed.FS

const memoryFile = "AGENTS.md"

// Tree is the state root: groups, data and store below one folder.
type Tree struct {
	dir      string
	uid, gid int
}

// NewTree makes the folders of the state root dir, which must be an absolute
// path. Files for containers will belong to uid and gid.
func NewTree(dir string, uid, gid int) (*Tree, error) {
	t := &Tree{dir: dir, uid: uid, gid: gid}
	for _, d := range []struct {
		name string
		mode fs.FileMode
	}{{"groups", 0o755}, {"groups/global", 0o755}, {"data", 0o755}, {"data/ipc", 0o755}, {"data/ipc/errors", 0o700}, {"data/sessions", 0o755}, {"data/logs", 0o700}, {outboxDir, 0o700}, {"store", 0o700}} {
		p := t.path(d.name)
		if err := os.MkdirAll(p, d.mode); err != nil {
			return nil, berth.Errorf(berth.Unavailable, "make the folder %s: %w (choose a root that this user may write, with --root)", p, unwrapPath(err))
		}
		if err := os.Chmod(p, d.mode); err != nil {
			return nil, berth.Errorf(berth.Unavailable, "set the rights of %s: %w (it has to belong to this user)", p, unwrapPath(err))
		}
	}
	if err := t.own("groups/global"); err != nil {
		return nil, err
	}
	return t, t.seed("global", "global.md")
}

// Dir returns the state root.
func (t *Tree) Dir() string { return t.dir }

// UID and GID are the user of all containers.
func (t *Tree) UID() int { return t.uid }
func (t *Tree) GID() int { return t.gid }

// StoreDir returns the folder of the databases, the lock and the socket.
func (t *Tree) StoreDir() string { return t.path("store") }

// LogDir returns the folder of a group's run logs.
func (t *Tree) LogDir(folder string) string { return t.path("data/logs", folder) }

// ErrorDir returns the folder of quarantined files.
func (t *Tree) ErrorDir() string { return t.path("data/ipc/errors") }

// GatewayDir returns the folder of the sockets that lead out of containers.
func (t *Tree) GatewayDir() string { return t.path("data/gateway") }

func (t *Tree) path(elem ...string) string {
	return filepath.Join(append([]string{t.dir}, elem...)...)
}

// own hands a folder to the containers' user. Only root can and has to: any
// other daemon runs containers as itself.
func (t *Tree) own(name string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	if err := os.Lchown(t.path(name), t.uid, t.gid); err != nil {
		return fmt.Errorf("hand %s to the containers' user: %w", name, err)
	}
	return nil
}

// Group makes the folders of a group if they are missing, seeds its memory file
// if it has none, and opens its IPC folders. The caller closes the Group.
func (t *Tree) Group(folder string) (_ *Group, err error) {
	if err := berth.ValidFolder(folder); err != nil {
		return nil, err
	}
	g := &Group{tree: t, folder: folder, dirs: make(map[string]*os.Root), quiet: make(map[string]time.Time)}
	defer func() {
		if err != nil {
			g.Close()
		}
	}()
	for _, dir := range []string{"groups/" + folder, "data/sessions/" + folder} {
		if err := t.mkdir(dir, 0o750, true); err != nil {
			return nil, err
		}
	}
	if err := t.mkdir("data/logs/"+folder, 0o700, false); err != nil {
		return nil, err
	}
	if err := t.mkdir("data/ipc/"+folder, 0o755, false); err != nil {
		return nil, err
	}
	if g.ipc, err = os.OpenRoot(t.path("data/ipc", folder)); err != nil {
		return nil, fmt.Errorf("open the IPC folder of %s: %w", folder, err)
	}
	for _, dir := range ipcDirs {
		if err := t.mkdir("data/ipc/"+folder+"/"+dir.name, dir.mode, dir.writable); err != nil {
			return nil, err
		}
		if g.dirs[dir.name], err = g.ipc.OpenRoot(dir.name); err != nil {
			return nil, fmt.Errorf("open the IPC folder of %s: %w", folder, err)
		}
	}
	if err := t.mkdir("data/ipc/"+folder+"/"+takenDir, 0o700, false); err != nil {
		return nil, err
	}
	if g.dirs[takenDir], err = g.ipc.OpenRoot(takenDir); err != nil {
		return nil, fmt.Errorf("open the IPC folder of %s: %w", folder, err)
	}
	if folder == berth.MainFolder {
		return g, t.seed(folder, "main.md")
	}
	return g, t.seed(folder, "group.md")
}

// ipcDirs are the folders inside a group's IPC folder. They are mounted one by
// one, so that a container cannot put a link in the place of one.
var ipcDirs = []struct {
	name     string
	mode     fs.FileMode
	writable bool
}{
	{"input", 0o750, true},
	{"messages", 0o750, true},
	{"tasks", 0o750, true},
	{"frames", 0o750, true},
	{"responses", 0o755, false},
}

// takenDir holds requests that the host took out of a container's reach but has
// not carried out yet. It is not mounted.
const takenDir = "taken"

// mkdir makes one folder of our own tree; its parents exist and are no
// container's.
func (t *Tree) mkdir(name string, mode fs.FileMode, forContainer bool) error {
	p := t.path(name)
	err := os.Mkdir(p, mode)
	if err == nil {
		err = os.Chmod(p, mode) // whatever our umask says
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return berth.Errorf(berth.Unavailable, "make the folder %s: %w", p, unwrapPath(err))
	}
	fi, err := os.Lstat(p)
	if err != nil {
		return err
	} else if !fi.IsDir() {
		return berth.Errorf(berth.Invalid, "%s is no folder: move it away", p)
	}
	if !forContainer {
		return nil
	}
	// A container that runs as this user can lock us out.
	if fi.Mode()&0o700 != 0o700 {
		if err := os.Chmod(p, mode); err != nil {
			return err
		}
	}
	return t.own(name)
}

// Group is one group's open folders. Its methods may be called from several
// goroutines.
type Group struct {
	tree   *Tree
	folder string
	ipc    *os.Root
	dirs   map[string]*os.Root

	mu    sync.Mutex
	last  int64                // stamp given to a request
	quiet map[string]time.Time // folders that held nothing to take, and when they had changed
}

// Close closes the folders.
func (g *Group) Close() error {
	errs := make([]error, 0, len(g.dirs)+1)
	for _, d := range g.dirs {
		if d != nil {
			errs = append(errs, d.Close())
		}
	}
	if g.ipc != nil {
		errs = append(errs, g.ipc.Close())
	}
	return errors.Join(errs...)
}

// seed writes the first memory file of a folder. An agent may change or delete it;
// an existing file, link or whatever stands there is left alone.
func (t *Tree) seed(folder, from string) error {
	text, err := seeds.ReadFile("seeds/" + from)
	if err != nil {
		return err
	}
	home, err := os.OpenRoot(t.path("groups", folder))
	if err != nil {
		return fmt.Errorf("open the folder of %s: %w", folder, err)
	}
	defer home.Close()
	f, err := home.OpenFile(memoryFile, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o640)
	if errors.Is(err, fs.ErrExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("seed the memory of %s: %w", folder, err)
	}
	defer f.Close()
	if _, err := f.Write(text); err != nil {
		return fmt.Errorf("seed the memory of %s: %w", folder, err)
	}
	if os.Geteuid() == 0 {
		return f.Chown(t.uid, t.gid)
	}
	return nil
}

// Mounts returns what every container of the group gets, parents before
// children.
func (g *Group) Mounts() []berth.Mount {
	main := g.folder == berth.MainFolder
	m := []berth.Mount{
		{Source: g.tree.path("groups", g.folder), Target: protocol.GroupDir},
		{Source: g.tree.path("groups/global"), Target: "/workspace/global", ReadOnly: !main},
		{Source: g.tree.path("data/sessions", g.folder), Target: protocol.HomeDir},
		{Source: g.tree.path("data/ipc", g.folder), Target: protocol.IPCDir, ReadOnly: true},
	}
	for _, d := range ipcDirs {
		m = append(m, berth.Mount{
			Source: g.tree.path("data/ipc", g.folder, d.name), Target: path.Join(protocol.IPCDir, d.name), ReadOnly: !d.writable,
		})
	}
	if main {
		m = append(m, g.tree.project()...)
	}
	return m
}

// projectParts are what main sees of a root that is a source checkout. They are
// named one by one: whatever else lies or later appears in the root (.env, the
// store, other groups) is not among them.
var projectParts = []string{
	"ARCHITECTURE.md", "CHANGELOG.md", "Makefile", "README.md", "agent-runner", "container", "docker", "docs", "go.mod", "go.sum", "orchestrator",
}

// project returns the read-only mounts of Berth's own source, if the root holds
// it.
func (t *Tree) project() []berth.Mount {
	mod, err := os.ReadFile(t.path("go.mod"))
	if err != nil || !strings.HasPrefix(string(mod), "module berth\n") {
		return nil
	}
	var m []berth.Mount
	for _, name := range projectParts {
		if fi, err := os.Lstat(t.path(name)); err == nil && (fi.IsDir() || fi.Mode().IsRegular()) {
			m = append(m, berth.Mount{Source: t.path(name), Target: "/workspace/project/" + name, ReadOnly: true})
		}
	}
	return m
}

// unwrapPath drops the path that the caller's own text already names.
func unwrapPath(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	return err
}
