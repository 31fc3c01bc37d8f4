package docker

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/client"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// BuildFromRootfs makes an image of a folder that holds a root file system, such
// as debootstrap makes one, with the runner in it, and loads it as tag; built is
// false when the engine has the same one there already. No registry is needed.
// The folder is read twice and never held in memory. Devices, sockets and pipes in
// it are left out. A folder or a tag that cannot be used is an error of kind
// berth.Invalid.
func (e *Engine) BuildFromRootfs(ctx context.Context, folder, runner, tag string, progress func(string)) (built bool, err error) {
	if progress == nil {
		progress = func(string) {}
	}
	ref, err := name.NewTag(tag)
	if err != nil || strings.HasPrefix(tag, Repository+":") {
		return false, berth.Errorf(berth.Invalid, "%.80q cannot be the name of this image: give one such as my-agent:1", tag)
	}
	c, err := e.client(ctx)
	if err != nil {
		return false, err
	}
	program, err := readProgram(runner)
	if err != nil {
		return false, err
	}
	root, err := openRootfs(folder)
	if err != nil {
		return false, err
	}
	defer root.Close()

	progress("reading " + folder)
	base, err := newRootfsLayer(ctx, root, folder)
	if err != nil {
		return false, err
	}
	h := sha256.New()
	for _, part := range [][]byte{[]byte("berth rootfs " + layout), []byte(strconv.Itoa(protocol.Version)), []byte(base.diff.Hex), program} {
		_ = binary.Write(h, binary.BigEndian, int64(len(part))) // a hash takes everything
		_, _ = h.Write(part)
	}
	content := hex.EncodeToString(h.Sum(nil))
	labels, err := e.Labels(ctx, tag)
	if known, ok := errors.AsType[*berth.Error](err); err != nil && (!ok || known.Kind != berth.NotFound) {
		return false, err
	}
	if labels[LabelContent] == content {
		progress("image " + tag + " is current")
		return false, nil
	}

	img, err := rootfsImage(root, base, program, content)
	if err != nil {
		return false, err
	}
	progress(fmt.Sprintf("loading image %s, %d MiB", tag, base.size>>20))
	if err := e.load(ctx, c, img, ref.Name()); err != nil {
		return false, e.explain(ctx, err, "load image "+tag)
	}
	return true, e.dropUntagged(ctx, c, labels[LabelContent])
}

// dropUntagged removes the image of that content if it lost its last name to a
// newer one.
func (e *Engine) dropUntagged(ctx context.Context, c *client.Client, content string) error {
	if content == "" {
		return nil
	}
	found, err := c.ImageList(ctx, image.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", LabelContent+"="+content))})
	if err != nil {
		return e.explain(ctx, err, "list images")
	}
	for _, img := range found {
		if slices.ContainsFunc(img.RepoTags, func(t string) bool { return t != "<none>:<none>" }) {
			continue
		}
		if _, err := c.ImageRemove(ctx, img.ID, image.RemoveOptions{PruneChildren: true}); err != nil && !errdefs.IsNotFound(err) && !errdefs.IsConflict(err) {
			return e.explain(ctx, err, "remove the image that had the name before")
		}
	}
	return nil
}

func openRootfs(folder string) (*os.Root, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return nil, berth.Errorf(berth.Invalid, "open the root file system: %w", err)
	}
	for _, dir := range []string{"etc", "usr"} {
		if info, err := root.Stat(dir); err != nil || !info.IsDir() {
			root.Close()
			return nil, berth.Errorf(berth.Invalid, "%s holds no %s folder: give a folder that is a whole root file system, such as debootstrap makes", folder, dir)
		}
	}
	return root, nil
}

// rootfsImage puts what every agent image needs, and the runner, on top of base.
func rootfsImage(root *os.Root, base *rootfsLayer, program []byte, content string) (v1.Image, error) {
	img, err := mutate.AppendLayers(empty.Image, base)
	if err != nil {
		return nil, fmt.Errorf("append a layer: %w", err)
	}
	extra, err := missing(root)
	if err != nil {
		return nil, err
	}
	extra = append(extra, entry{path: strings.TrimPrefix(protocol.RunnerPath, "/"), mode: 0o755, data: program})
	if img, err = appendEntries(img, extra); err != nil {
		return nil, err
	}
	return configure(img, content)
}

// missing returns what the image needs and the root file system does not have.
func missing(root *os.Root) ([]entry, error) {
	var out []entry
	for _, e := range baseLayer() {
		name := strings.TrimSuffix(e.path, "/")
		_, err := root.Lstat(name)
		switch {
		case name == "tmp" || name == "run": // whatever mode they have there
		case err == nil:
			continue // a folder, or a link to one, as /bin is today
		case !errors.Is(err, fs.ErrNotExist):
			return nil, err
		}
		out = append(out, e)
	}
	users, err := readSmall(root, "etc/passwd")
	if err != nil || slices.ContainsFunc(strings.Split(string(users), "\n"), hasAgentID) {
		return out, err
	}
	// Programs ask who they are.
	line := "agent:x:1000:1000:agent:" + protocol.HomeDir + ":/bin/sh\n"
	return append(out, entry{path: "etc/passwd", mode: 0o644, data: append(slices.Clip(users), line...)}), nil
}

func hasAgentID(line string) bool {
	fields := strings.Split(line, ":")
	return len(fields) > 2 && fields[2] == "1000"
}

func readSmall(root *os.Root, name string) ([]byte, error) {
	f, err := root.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, 1<<20))
}

// rootfsLayer is a layer whose bytes are made from a folder whenever they are
// asked for: the same bytes for the same content.
type rootfsLayer struct {
	root *os.Root
	ctx  context.Context // of the build
	diff v1.Hash
	size int64
}

var _ v1.Layer = (*rootfsLayer)(nil)

func newRootfsLayer(ctx context.Context, root *os.Root, folder string) (*rootfsLayer, error) {
	l := &rootfsLayer{root: root, ctx: ctx}
	sum := sha256.New()
	if err := l.write(counter{sum, &l.size}); err != nil {
		return nil, berth.Errorf(berth.Invalid, "%s cannot become an image: %w", folder, err)
	}
	l.diff = v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}
	return l, nil
}

type counter struct {
	hash.Hash
	n *int64
}

func (c counter) Write(p []byte) (int, error) {
	*c.n += int64(len(p))
	return c.Hash.Write(p)
}

// Not compressed: it only travels over a socket.

func (l *rootfsLayer) Digest() (v1.Hash, error)            { return l.diff, nil }
func (l *rootfsLayer) DiffID() (v1.Hash, error)            { return l.diff, nil }
func (l *rootfsLayer) Size() (int64, error)                { return l.size, nil }
func (l *rootfsLayer) MediaType() (types.MediaType, error) { return types.DockerUncompressedLayer, nil }
func (l *rootfsLayer) Compressed() (io.ReadCloser, error)  { return l.Uncompressed() }
func (l *rootfsLayer) Uncompressed() (io.ReadCloser, error) {
	r, w := io.Pipe()
	go func() { w.CloseWithError(l.write(w)) }()
	return r, nil
}

// write writes the folder as a tar file, in the order of its names, all dated
// 1970, never following a link.
func (l *rootfsLayer) write(to io.Writer) error {
	w := tar.NewWriter(to)
	type inode struct{ dev, ino uint64 }
	linked := make(map[inode]string)
	err := fs.WalkDir(l.root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || l.ctx.Err() != nil {
			return errors.Join(err, context.Cause(l.ctx))
		}
		if path == "." {
			return nil
		}
		if d.IsDir() && (path == "proc" || path == "sys" || path == "dev") {
			return fs.SkipDir // of the machine where it was made
		}
		info, err := l.root.Lstat(path)
		if err != nil {
			return err
		}
		h := &tar.Header{Name: filepath.ToSlash(path), Mode: int64(info.Mode().Perm()) | special(info.Mode()), Format: tar.FormatPAX}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if ok {
			h.Uid, h.Gid = int(stat.Uid), int(stat.Gid)
		}
		switch {
		case info.IsDir():
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		case info.Mode()&fs.ModeSymlink != 0:
			h.Typeflag = tar.TypeSymlink
			if h.Linkname, err = l.root.Readlink(path); err != nil {
				return err
			}
		case info.Mode().IsRegular():
			h.Typeflag = tar.TypeReg
			if ok && stat.Nlink > 1 {
				key := inode{uint64(stat.Dev), stat.Ino}
				if first, seen := linked[key]; seen {
					h.Typeflag, h.Linkname = tar.TypeLink, first
					return w.WriteHeader(h)
				}
				linked[key] = h.Name
			}
			h.Size = info.Size()
			return l.copyFile(w, h, path)
		default:
			return nil
		}
		return w.WriteHeader(h)
	})
	return errors.Join(err, w.Close())
}

func (l *rootfsLayer) copyFile(w *tar.Writer, h *tar.Header, path string) error {
	f, err := l.root.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.Copy(w, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size {
		err = fmt.Errorf("%s became shorter meanwhile", path)
	}
	return err
}

// special returns the bits of a mode that a file's permissions leave out.
func special(m fs.FileMode) (bits int64) {
	for bit, value := range map[fs.FileMode]int64{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if m&bit != 0 {
			bits |= value
		}
	}
	return bits
}

// configure says how an image is started.
func configure(img v1.Image, content string) (v1.Image, error) {
	config, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("configure the image: %w", err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config = v1.Config{
		User:       "1000:1000",
		WorkingDir: protocol.GroupDir,
		Entrypoint: []string{protocol.RunnerPath},
		Env:        []string{"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME=" + protocol.HomeDir},
		Labels: map[string]string{
			LabelContent:         content,
			LabelProtocol:        strconv.Itoa(protocol.Version),
			protocol.LabelMarker: protocol.DefaultMarker,
		},
	}
	return mutate.ConfigFile(img, config)
}
