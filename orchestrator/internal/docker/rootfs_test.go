package docker

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
)

// aRootfs makes a small root file system with what real ones hold.
func aRootfs(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, sub := range []string{"etc", "usr/bin", "usr/local/bin", "dev", "proc", "home"} {
		check(os.MkdirAll(filepath.Join(dir, sub), 0o755))
	}
	write := func(name, text string, mode os.FileMode) {
		check(os.WriteFile(filepath.Join(dir, name), []byte(text), mode))
		check(os.Chmod(filepath.Join(dir, name), mode))
	}
	write("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n", 0o644)
	write("usr/bin/tool", "#!/bin/sh\n", 0o755|os.ModeSetuid)
	write("dev/null", "from elsewhere", 0o644)
	check(os.Link(filepath.Join(dir, "usr/bin/tool"), filepath.Join(dir, "usr/bin/tool2")))
	check(os.Symlink("usr/bin", filepath.Join(dir, "bin")))
	check(os.Symlink("/etc/shadow", filepath.Join(dir, "usr/out")))
	check(syscall.Mkfifo(filepath.Join(dir, "usr/pipe"), 0o644))
	return dir
}

func TestRootfsLayer(t *testing.T) {
	root, err := openRootfs(aRootfs(t))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	l, err := newRootfsLayer(t.Context(), root, "x")
	if err != nil {
		t.Fatal(err)
	}
	r, _ := l.Uncompressed()
	data, err := io.ReadAll(r)
	if err != nil || int64(len(data)) != l.size {
		t.Fatalf("%d bytes, %v; it says %d", len(data), err, l.size)
	}
	var got []string
	for tr := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, strings.TrimSpace(fmt.Sprintf("%c %o %s %s", h.Typeflag, h.Mode, h.Name, h.Linkname)))
	}
	want := []string{
		"2 777 bin usr/bin", "5 755 etc/", "0 644 etc/passwd", "5 755 home/", "5 755 usr/", "5 755 usr/bin/", "0 4755 usr/bin/tool", "1 4755 usr/bin/tool2 usr/bin/tool",
		"5 755 usr/local/", "5 755 usr/local/bin/", "2 777 usr/out /etc/shadow",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	again, err := newRootfsLayer(t.Context(), root, "x")
	if err != nil || again.diff != l.diff {
		t.Errorf("the same folder gave %v and %v, %v", l.diff, again.diff, err)
	}
	extra, err := missing(root)
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]string)
	for _, e := range extra {
		names[e.path] = string(e.data)
	}
	_, bin := names["bin/"]
	_, tmp := names["tmp/"]
	if bin || !tmp || names["etc/passwd"] != "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/sh\n" {
		t.Errorf("added: %v", names)
	}
}

func TestRootfsRefused(t *testing.T) {
	e, err := New(Options{Install: "test", Host: "unix://" + filepath.Join(t.TempDir(), "docker.sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, tag := range []string{"", "berth-agent:1", "a b", "UPPER:1", "x:" + strings.Repeat("y", 200)} {
		_, err := e.BuildFromRootfs(t.Context(), t.TempDir(), "runner", tag, nil)
		if known, ok := errors.AsType[*berth.Error](err); !ok || known.Kind != berth.Invalid {
			t.Errorf("tag %q: %v", tag, err)
		}
	}
	for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "missing")} {
		_, err := openRootfs(dir)
		if known, ok := errors.AsType[*berth.Error](err); !ok || known.Kind != berth.Invalid {
			t.Errorf("%s: %v", dir, err)
		}
	}
}
