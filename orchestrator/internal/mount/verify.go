package mount

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"berth/orchestrator/internal/berth"
)

// identity is one file or folder, whatever its name.
type identity struct {
	dev, ino     uint64
	dir, regular bool
}

var errExchanged = errors.New("something else was put in its place")

// hold opens real, a path without links, without reading it: whatever happens to
// the name, the file stays. It fails if a link is on the way by now.
func hold(real string) (*os.File, identity, error) {
	// O_PATH opens a pipe or a device without waiting for it or waking it.
	f, err := os.OpenFile(real, unix.O_PATH|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, identity{}, err
	}
	var id identity
	info, err := f.Stat()
	if err == nil {
		stat := info.Sys().(*syscall.Stat_t)
		id = identity{uint64(stat.Dev), stat.Ino, info.IsDir(), info.Mode().IsRegular()}
		var now string
		if now, err = os.Readlink(fdPath(f)); err == nil && now != real {
			err = errExchanged
		}
	}
	if err != nil {
		return nil, identity{}, errors.Join(err, f.Close())
	}
	return f, id, nil
}

func fdPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// Verify compares what a container has mounted with what Resolve allowed. The
// container is started, pid is its first process as this host counts, and it has
// not run anything that a group could have written. An error is of kind
// berth.Denied and means that the container has to be removed unheard: it has
// something else, or that cannot be known, because its process is not visible here
// (another machine, a virtual machine, a runtime with a kernel of its own), for a
// path that a container may have changed. Such a path lies below a root that allows
// writing; a root itself does not, unless it lies in another.
func Verify(pid int, verdicts []Verdict) error {
	var table map[string]place
	var unreadable error
	var faults []error
	for _, v := range verdicts {
		if !v.Allowed {
			continue
		}
		if table == nil {
			table, unreadable = placesOf(pid)
		}
		mounted, ok := table[v.Mount.Target]
		switch {
		case ok:
			if checked, err := find(v.Mount.Source, v.checked); err != nil || checked != mounted {
				faults = append(faults, fmt.Errorf("host path %q was exchanged between the check and the mount: the container got %q instead", v.Mount.Source, mounted.path))
			}
		case v.movable:
			why := errors.New("its process is not visible, or has a file system of its own")
			if unreadable != nil {
				why = unreadable
			}
			faults = append(faults, fmt.Errorf("host path %q lies below a folder that groups may write, and what the container got for it cannot be checked (%w): list that very folder in the mount allowlist, outside of such a folder", v.Mount.Source, why))
		}
	}
	if len(faults) > 0 {
		return berth.Errorf(berth.Denied, "%w", errors.Join(faults...))
	}
	return nil
}

// place is where a file lies, in words that hold in every mount namespace: its
// file system, and the path from that one's own root.
type place struct {
	major, minor int
	path         string
}

// placesOf returns what process pid sees mounted, by mount point. The table is
// open to every user, while /proc/<pid>/root is not.
func placesOf(pid int) (map[string]place, error) {
	mounts, err := tableOf(strconv.Itoa(pid))
	out := make(map[string]place, len(mounts))
	for _, m := range mounts {
		out[m.Mountpoint] = place{m.Major, m.Minor, m.Root} // of several, the last is on top
	}
	return out, err
}

func tableOf(process string) ([]*mountinfo.Info, error) {
	f, err := os.Open(filepath.Join("/proc", process, "mountinfo"))
	if err != nil {
		return nil, plain(err)
	}
	defer f.Close()
	return mountinfo.GetMountsFromReader(f, nil)
}

// find returns where real lies now; it has to be what was checked.
func find(real string, checked identity) (place, error) {
	f, id, err := hold(real)
	if err != nil {
		return place{}, err
	}
	defer f.Close()
	if id != checked {
		return place{}, errExchanged
	}
	mount, err := mountOf(f)
	if err != nil {
		return place{}, err
	}
	table, err := tableOf("self")
	if err != nil {
		return place{}, err
	}
	for _, m := range table {
		if m.ID == mount {
			rest, err := filepath.Rel(m.Mountpoint, real)
			return place{m.Major, m.Minor, filepath.Join(m.Root, rest)}, err
		}
	}
	return place{}, errors.New("its mount is not known")
}

// mountOf returns the id of the mount through which f was opened.
func mountOf(f *os.File) (int, error) {
	info, err := os.Open(fmt.Sprintf("/proc/self/fdinfo/%d", f.Fd()))
	if err != nil {
		return 0, err
	}
	defer info.Close()
	for s := bufio.NewScanner(info); s.Scan(); {
		if id, ok := strings.CutPrefix(s.Text(), "mnt_id:"); ok {
			return strconv.Atoi(strings.TrimSpace(id))
		}
	}
	return 0, errors.New("its mount is not known")
}
