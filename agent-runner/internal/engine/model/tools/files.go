package tools

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/engine/model/llm"
)

// Limits of the file tools.
const (
	readLines  = 2000     // if the model does not say
	maxLine    = 2 << 10  // bytes of a line that are shown
	maxEdited  = 16 << 20 // bytes of a file that is edited
	maxEntries = 1000     // of a folder that are shown
)

// path returns the path that a model means.
func (b *Box) path(name string) (string, error) {
	if strings.TrimSpace(name) == "" {
		return "", refused("path is empty")
	}
	if rest, ok := strings.CutPrefix(name, "~/"); ok {
		return filepath.Join(b.config.Home, rest), nil
	}
	if !filepath.IsAbs(name) {
		return filepath.Join(b.config.WorkDir, name), nil
	}
	return filepath.Clean(name), nil
}

// kernels are file systems that show what processes are and hold, this one too.
// Commands are kept from it by the kernel; these tools are this process.
var kernels = map[int64]bool{
	unix.PROC_SUPER_MAGIC: true, unix.SYSFS_MAGIC: true, unix.DEBUGFS_MAGIC: true, unix.TRACEFS_MAGIC: true,
	unix.SECURITYFS_MAGIC: true, unix.BPF_FS_MAGIC: true, unix.CGROUP_SUPER_MAGIC: true, unix.CGROUP2_SUPER_MAGIC: true,
}

// errKernel is the refusal of a file of the kernel's.
var errKernel = refused("this tool reads no files of the kernel: use bash")

// open opens a regular file, or with folder a folder, without waiting for anybody.
func open(path string, flags int, folder bool) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(path, flags|unix.O_NONBLOCK|unix.O_NOCTTY, 0o666)
	if err != nil {
		return nil, nil, err
	}
	var info fs.FileInfo
	var system unix.Statfs_t
	if info, err = f.Stat(); err == nil {
		err = unix.Fstatfs(int(f.Fd()), &system)
	}
	switch {
	case err != nil:
	case kernels[int64(system.Type)]:
		err = errKernel
	case info.IsDir() && !folder:
		err = refused("%s is a folder", path)
	case !info.Mode().IsRegular() && !info.IsDir():
		err = refused("%s is no regular file", path)
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

func (b *Box) read() tool {
	return tool{llm.Tool{
		Name:        "read",
		Description: "Reads a text file, or lists a folder. Relative paths start in the group's folder.",
		Schema: json.RawMessage(`{"type":"object","properties":{` +
			`"path":{"type":"string"},` +
			`"offset":{"type":"integer","description":"the first line, from 1"},` +
			`"limit":{"type":"integer","description":"how many lines; 2000 if not given"}},` +
			`"required":["path"]}`),
	}, func(ctx context.Context, input json.RawMessage) (string, error) {
		in, err := decode[struct {
			Path          string
			Offset, Limit count
		}](input)
		if err != nil {
			return "", err
		}
		path, err := b.path(in.Path)
		if err != nil {
			return "", err
		}
		f, info, err := open(path, os.O_RDONLY, true)
		if err != nil {
			return "", err
		}
		defer f.Close()
		if info.IsDir() {
			return list(f)
		}
		limit := int(in.Limit)
		if limit == 0 {
			limit = readLines
		}
		return lines(ctx, f, max(int(in.Offset), 1), limit, info.Size())
	}}
}

func list(dir *os.File) (string, error) {
	entries, err := dir.ReadDir(maxEntries + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	var out strings.Builder
	for _, e := range entries[:min(len(entries), maxEntries)] {
		out.WriteString(e.Name())
		if e.IsDir() {
			out.WriteByte('/')
		}
		out.WriteByte('\n')
	}
	switch {
	case len(entries) == 0:
		return "(an empty folder)", nil
	case len(entries) > maxEntries:
		fmt.Fprintf(&out, "… and more than these %d", maxEntries)
	}
	return out.String(), nil
}

// lines returns limit lines of a file from line first on, as many as fit.
func lines(ctx context.Context, r io.Reader, first, limit int, size int64) (string, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	start, _ := in.Peek(8 << 10) // an error comes again
	if binary(string(start)) && bytes.IndexByte(start, 0) >= 0 {
		return "", refused("a binary file of %d bytes", size)
	}
	var out strings.Builder
	for n := 1; ; n++ {
		if n%1000 == 0 && ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		line, more, err := shortLine(in)
		if err != nil && !errors.Is(err, io.EOF) {
			return "", err
		}
		if err != nil && line == "" {
			switch {
			case n == 1:
				return "(an empty file)", nil
			case n <= first:
				return "", refused("the file has only %d lines", n-1)
			}
			return out.String(), nil
		}
		if n < first {
			continue
		}
		if n >= first+limit || out.Len()+len(line) > MaxResult-200 {
			fmt.Fprintf(&out, "… (there is more: go on with offset %d)", n)
			return out.String(), nil
		}
		out.WriteString(line)
		if more > 0 {
			fmt.Fprintf(&out, "… (%d more bytes in this line)", more)
		}
		out.WriteByte('\n')
	}
}

// shortLine reads a line without its end, the first maxLine bytes of it, and
// tells how many more it has.
func shortLine(in *bufio.Reader) (line string, more int, err error) {
	var kept []byte
	for {
		piece, err := in.ReadSlice('\n')
		whole := !errors.Is(err, bufio.ErrBufferFull)
		if whole {
			piece = bytes.TrimSuffix(bytes.TrimSuffix(piece, []byte("\n")), []byte("\r"))
		}
		room := min(maxLine-len(kept), len(piece))
		kept = append(kept, piece[:room]...)
		more += len(piece) - room
		if whole {
			return string(kept), more, err
		}
	}
}

func (b *Box) write() tool {
	return tool{llm.Tool{
		Name:        "write",
		Description: "Writes a file, in place of what was in it. Makes the folders above it.",
		Schema: json.RawMessage(`{"type":"object","properties":{` +
			`"path":{"type":"string"},` +
			`"content":{"type":"string"}},` +
			`"required":["path","content"]}`),
	}, func(_ context.Context, input json.RawMessage) (string, error) {
		in, err := decode[struct {
			Path    string
			Content *string
		}](input)
		if err != nil {
			return "", err
		}
		if in.Content == nil {
			return "", refused("content is missing")
		}
		path, err := b.path(in.Path)
		if err != nil {
			return "", err
		}
		b.writing.Lock()
		defer b.writing.Unlock()
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			return "", err
		}
		f, _, err := open(path, os.O_WRONLY|os.O_CREATE, false)
		if err != nil {
			return "", err
		}
		if err := errors.Join(fill(f, *in.Content), f.Close()); err != nil {
			return "", err
		}
		return fmt.Sprintf("wrote %d bytes to %s", len(*in.Content), path), nil
	}}
}

// fill makes content all that f has. It keeps the file itself: links to it and
// its mode stay.
func fill(f *os.File, content string) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt([]byte(content), 0)
	return err
}

func (b *Box) edit() tool {
	return tool{llm.Tool{
		Name:        "edit",
		Description: "Replaces a text in a file by another one. The old text must stand in the file exactly so, and only once unless all is true.",
		Schema: json.RawMessage(`{"type":"object","properties":{` +
			`"path":{"type":"string"},` +
			`"old":{"type":"string","description":"the text to replace, with enough around it to be the only one"},` +
			`"new":{"type":"string"},` +
			`"all":{"type":"boolean","description":"replace all of them"}},` +
			`"required":["path","old","new"]}`),
	}, func(_ context.Context, input json.RawMessage) (string, error) {
		in, err := decode[struct {
			Path, Old, New string
			All            yes
		}](input)
		if err != nil {
			return "", err
		}
		if in.Old == "" || in.Old == in.New {
			return "", refused("old must not be empty, nor the same as new")
		}
		path, err := b.path(in.Path)
		if err != nil {
			return "", err
		}
		b.writing.Lock()
		defer b.writing.Unlock()
		f, info, err := open(path, os.O_RDWR, false)
		if err != nil {
			return "", err
		}
		defer f.Close()
		if info.Size() > maxEdited {
			return "", refused("the file has %d bytes, more than the %d that can be edited: use bash", info.Size(), maxEdited)
		}
		data, err := io.ReadAll(io.LimitReader(f, maxEdited))
		if err != nil {
			return "", err
		}
		text := string(data)
		n := strings.Count(text, in.Old)
		switch {
		case n == 0:
			return "", refused("old is not in the file: read it again, and mind blanks and line ends")
		case n > 1 && !bool(in.All):
			return "", refused("old is in the file %d times: take more of what stands around it, or set all", n)
		case len(text)+n*(len(in.New)-len(in.Old)) > maxEdited:
			return "", refused("the file would get too large to be edited: use bash")
		}
		if err := fill(f, strings.ReplaceAll(text, in.Old, in.New)); err != nil {
			return "", err
		}
		return fmt.Sprintf("replaced %d in %s", n, path), nil
	}}
}
