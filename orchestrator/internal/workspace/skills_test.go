package workspace

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
)

// withSkills returns a group of a root that has a skill, and the group's home.
func withSkills(t *testing.T) (g *Group, root, home string) {
	t.Helper()
	g, root = open(t, "family")
	check(t, g.tree.SeedSkills(fstest.MapFS{"cook/SKILL.md": {Data: []byte("# Cook")}}))
	return g, root, filepath.Join(root, "data/sessions/family")
}

// A root gets the skills once; from then on they are the operator's, who may also
// have none.
func TestSeedSkills(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	g, root, _ := withSkills(t)
	skill := filepath.Join(root, "container/skills/cook/SKILL.md")
	for path, mode := range map[string]fs.FileMode{filepath.Join(root, "container/skills"): 0o755, filepath.Dir(skill): 0o755, skill: 0o644} {
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", path, fi.Mode(), err)
		}
	}
	check(t, os.Remove(skill))
	check(t, g.tree.SeedSkills(fstest.MapFS{"cook/SKILL.md": {Data: []byte("# Cook")}}))
	if _, err := os.Lstat(skill); !errors.Is(err, fs.ErrNotExist) {
		t.Error("what the operator removed is there again")
	}
	left, err := os.ReadDir(filepath.Join(root, "container"))
	check(t, err)
	if len(left) != 1 {
		t.Errorf("left: %v", left)
	}
}

func TestSkillsMount(t *testing.T) {
	g, _ := open(t, "family")
	if m, err := g.Skills(); len(m) > 0 || err != nil {
		t.Errorf("of a root without skills: %+v, %v", m, err)
	}
	g, root, home := withSkills(t)
	want := []berth.Mount{{Source: filepath.Join(root, "container/skills"), Target: "/home/agent/.claude/skills", ReadOnly: true}}
	for range 2 { // what is there stays
		m, err := g.Skills()
		check(t, err)
		if diff := cmp.Diff(want, m); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		check(t, os.WriteFile(filepath.Join(home, ".claude/settings.json"), []byte("{}"), 0o600))
	}
	// A container that took its own rights away took the daemon's too.
	check(t, os.Chmod(filepath.Join(home, ".claude/skills"), 0))
	check(t, os.Chmod(filepath.Join(home, ".claude"), 0))
	_, err := g.Skills()
	check(t, err)
	for _, dir := range []string{".claude", ".claude/skills"} {
		fi, err := os.Lstat(filepath.Join(home, dir))
		check(t, err)
		if fi.Mode().Perm() != 0o755 {
			t.Errorf("%s has %v", dir, fi.Mode())
		}
	}
}

// W59: the place is the container's user's, or an agent could not write beside it.
func TestW59SkillsPlaceBelongsToTheContainersUser(t *testing.T) {
	uid := os.Getuid()
	if uid == 0 {
		uid = 1000
	}
	root := t.TempDir()
	tree, err := NewTree(root, uid, uid)
	check(t, err)
	check(t, tree.SeedSkills(fstest.MapFS{"cook/SKILL.md": {}}))
	g, err := tree.Group("family")
	check(t, err)
	defer g.Close()
	_, err = g.Skills()
	check(t, err)
	for _, dir := range skillsPlace {
		fi, err := os.Lstat(filepath.Join(root, "data/sessions/family", dir))
		check(t, err)
		if got := int(fi.Sys().(*syscall.Stat_t).Uid); got != uid {
			t.Errorf("%s belongs to %d, want %d", dir, got, uid)
		}
	}
}

// What a container puts in the place of the mount is left alone and named; nothing is
// made or changed where it leads.
func TestSkillsPlaceIsTaken(t *testing.T) {
	for name, tt := range map[string]struct {
		make func(place, victim string) error
		said string
	}{
		"link away":        {func(place, victim string) error { return os.Symlink(victim, place) }, "a link"},
		"link inside":      {func(place, _ string) error { return os.Symlink("elsewhere", place) }, "a link"},
		"link to nowhere":  {func(place, victim string) error { return os.Symlink(filepath.Join(victim, "none"), place) }, "a link"},
		"link to itself":   {func(place, _ string) error { return os.Symlink(filepath.Base(place), place) }, "a link"},
		"file":             {func(place, _ string) error { return os.WriteFile(place, nil, 0o600) }, "a file"},
		"pipe":             {func(place, _ string) error { return syscall.Mkfifo(place, 0o600) }, "a pipe"},
		"link to the host": {func(place, _ string) error { return os.Symlink("/", place) }, "a link"},
	} {
		for _, place := range skillsPlace {
			t.Run(name+" at "+place, func(t *testing.T) {
				g, root, home := withSkills(t)
				victim := filepath.Join(root, "victim")
				check(t, os.Mkdir(victim, 0o700))
				check(t, os.Mkdir(filepath.Join(home, "elsewhere"), 0o700))
				if place != skillsPlace[0] {
					check(t, os.Mkdir(filepath.Join(home, skillsPlace[0]), 0o700))
				}
				at := filepath.Join(home, place)
				check(t, tt.make(at, victim))
				before, err := os.Lstat(at)
				check(t, err)
				m, err := g.Skills()
				known, ok := errors.AsType[*berth.Error](err)
				if len(m) > 0 || !ok || known.Kind != berth.Invalid || !strings.Contains(err.Error(), tt.said) || !strings.Contains(err.Error(), at) {
					t.Errorf("%+v, %v", m, err)
				}
				after, err := os.Lstat(at)
				check(t, err)
				if !os.SameFile(before, after) || before.Mode() != after.Mode() {
					t.Errorf("%v became %v", before.Mode(), after.Mode())
				}
				for _, dir := range []string{victim, filepath.Join(home, "elsewhere")} {
					fi, err := os.Stat(dir)
					check(t, err)
					inside, err := os.ReadDir(dir)
					check(t, err)
					if len(inside) > 0 || fi.Mode().Perm() != 0o700 {
						t.Errorf("%s has the mode %o and holds %v", dir, fi.Mode().Perm(), inside)
					}
				}
			})
		}
	}
	// The operator's own folder may be something else too.
	g, root, _ := withSkills(t)
	check(t, os.RemoveAll(filepath.Join(root, "container/skills")))
	check(t, os.Symlink("/etc", filepath.Join(root, "container/skills")))
	if m, err := g.Skills(); len(m) > 0 || err == nil || !strings.Contains(err.Error(), "no folder") {
		t.Errorf("%+v, %v", m, err)
	}
}
