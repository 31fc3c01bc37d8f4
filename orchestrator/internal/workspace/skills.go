package workspace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// skillsDir holds what the agents of all groups can read before they do something: a
// folder a skill. It is the operator's.
const skillsDir = "container/skills"

// skillsPlace is where agents look for skills, in their home folder.
var skillsPlace = []string{".claude", ".claude/skills"}

// SeedSkills gives a root that has no folder of skills the ones in from. It leaves
// one that exists alone, also an empty one.
func (t *Tree) SeedSkills(from fs.FS) error {
	dir := t.path(skillsDir)
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return fmt.Errorf("make the folder of skills: %w", err)
	}
	made, err := os.MkdirTemp(parent, ".skills-*")
	if err != nil {
		return fmt.Errorf("make the folder of skills: %w", err)
	}
	err = os.CopyFS(made, from)
	if err == nil {
		err = filepath.WalkDir(made, func(name string, d fs.DirEntry, err error) error {
			switch { // whatever our umask says: containers read it as another user
			case err != nil:
				return err
			case d.IsDir():
				return os.Chmod(name, 0o755)
			}
			return os.Chmod(name, 0o644)
		})
	}
	if err == nil {
		err = os.Rename(made, dir)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("make the folder of skills: %w", err), os.RemoveAll(made))
	}
	return nil
}

// Skills returns the mount that shows the group's agent the skills of the root, and
// makes the place for it; there is none if the root has no skills. It is called
// before the container is made, and changes nothing but folders in the place where
// the mount belongs. If something else is there, the error, which is of kind
// berth.Invalid, says what; a run does not need the mount.
func (g *Group) Skills() ([]berth.Mount, error) {
	source := g.tree.path(skillsDir)
	switch fi, err := os.Lstat(source); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	case !fi.IsDir():
		return nil, berth.Errorf(berth.Invalid, "%s is no folder: move it away, or put a folder of skills there", source)
	}
	name := path.Join("data/sessions", g.folder)
	home, err := os.OpenRoot(g.tree.path(name))
	if err != nil {
		return nil, fmt.Errorf("open the home folder of %s: %w", g.folder, err)
	}
	defer home.Close()
	for _, place := range skillsPlace {
		if err := g.tree.makePlace(home, place); err != nil {
			return nil, fmt.Errorf("%s: %w", g.tree.path(name, place), err)
		}
	}
	return []berth.Mount{{Source: source, Target: path.Join(protocol.HomeDir, skillsPlace[len(skillsPlace)-1]), ReadOnly: true}}, nil
}

// makePlace makes a folder in a home, for the containers' user, unless it is there.
// Its parents are folders, and no container runs that could change that.
func (t *Tree) makePlace(home *os.Root, name string) error {
	err := home.Mkdir(name, 0o755)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return unwrapPath(err)
	}
	fi, err := home.Lstat(name)
	switch {
	case err != nil:
		return unwrapPath(err)
	case !fi.IsDir():
		return berth.Errorf(berth.Invalid, "a container made a %s of it: remove it to have a folder there", kindOf(fi.Mode()))
	}
	if fi.Mode()&0o700 != 0o700 { // a container can lock out us and itself
		if err := home.Chmod(name, 0o755); err != nil {
			return unwrapPath(err)
		}
	}
	if os.Geteuid() != 0 {
		return nil
	}
	return home.Lchown(name, t.uid, t.gid)
}

// kindOf names what is no folder.
func kindOf(mode fs.FileMode) string {
	switch {
	case mode&fs.ModeSymlink != 0:
		return "link"
	case mode.IsRegular():
		return "file"
	case mode&fs.ModeNamedPipe != 0:
		return "pipe"
	}
	return "thing that is no folder"
}
