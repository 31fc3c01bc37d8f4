package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"os/exec"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/client"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"go.uber.org/zap"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
)

// Repository is the name of the images made here.
const Repository = "berth-agent"

// Labels of an image of ours, besides protocol.LabelMarker and LabelProtocol.
const LabelContent = "berth.content" // hash of all that the image is made of, in hex

// layout is part of the content's hash. Raise it when the same files would make
// another image.
const layout = "1"

// holderTag marks the image that an install uses now.
const holderTag = "by-"

// ImageFiles are the host's files that an image is made of.
type ImageFiles struct {
	Runner  string // the agent runner: a static ELF program for this machine
	Busybox string // a static busybox; "" for an image without a shell
}

// FindBusybox returns the path of this machine's static busybox, or "".
func FindBusybox() string {
	for _, file := range []string{"/bin/busybox", "/usr/bin/busybox", "/sbin/busybox", "/usr/local/bin/busybox"} {
		f, err := os.Open(file)
		if err != nil {
			continue
		}
		err = checkStatic(f)
		f.Close()
		if err == nil {
			return file
		}
	}
	return ""
}

// ImageRef returns the reference of the image that BuildImage makes of files:
// berth-agent:<12 hex digits of the content's hash>.
func (e *Engine) ImageRef(files ImageFiles) (string, error) {
	c, err := readContent(files)
	if err != nil {
		return "", err
	}
	return c.ref(), nil
}

// ImagePresent reports whether the engine has an image.
func (e *Engine) ImagePresent(ctx context.Context, ref string) (bool, error) {
	_, err := e.Labels(ctx, ref)
	if kind, ok := errors.AsType[*berth.Error](err); ok && kind.Kind == berth.NotFound {
		return false, nil
	}
	return err == nil, err
}

// Labels returns the labels of an image. A missing image is an error of kind
// berth.NotFound.
func (e *Engine) Labels(ctx context.Context, ref string) (map[string]string, error) {
	c, err := e.client(ctx)
	if err != nil {
		return nil, err
	}
	ins, err := c.ImageInspect(ctx, ref)
	switch {
	case errdefs.IsNotFound(err):
		return nil, berth.Errorf(berth.NotFound, "image %s is missing: build it (berth image build) or pull it", ref)
	case err != nil:
		return nil, e.explain(ctx, err, "inspect image "+ref)
	case ins.Config == nil:
		return nil, nil
	}
	return ins.Config.Labels, nil
}

// BuildImage makes the agent image of files and loads it into the engine, without
// a registry or a Dockerfile; built is false when the engine has it already.
// progress, which may be nil, hears in a few words what is being done. Files that
// cannot go into an image are errors of kind berth.Invalid.
func (e *Engine) BuildImage(ctx context.Context, files ImageFiles, progress func(string)) (ref string, built bool, err error) {
	if progress == nil {
		progress = func(string) {}
	}
	content, err := readContent(files)
	if err != nil {
		return "", false, err
	}
	ref = content.ref()
	c, err := e.client(ctx)
	if err != nil {
		return "", false, err
	}
	holder := Repository + ":" + holderTag + e.opts.Install
	err = c.ImageTag(ctx, ref, holder)
	if err == nil {
		progress("image " + ref + " is current")
	} else {
		if !errdefs.IsNotFound(err) {
			return "", false, e.explain(ctx, err, "tag image "+ref)
		}
		progress("making image " + ref)
		img, err := content.image(ctx)
		if err != nil {
			return "", false, err
		}
		progress("loading image " + ref)
		if err := e.load(ctx, c, img, ref, holder); err != nil {
			return "", false, e.explain(ctx, err, "load image "+ref)
		}
		built = true
	}
	if err := sweepImages(ctx, c); err != nil {
		e.log.Warn("old images stay", zap.Error(err))
	}
	return ref, built, nil
}

// ReleaseImage lets go of the image that this install uses and removes what no
// install holds any more. For the end of a root, or of a test.
func (e *Engine) ReleaseImage(ctx context.Context) error {
	c, err := e.client(ctx)
	if err != nil {
		return err
	}
	_, err = c.ImageRemove(ctx, Repository+":"+holderTag+e.opts.Install, image.RemoveOptions{})
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsConflict(err) {
		return e.explain(ctx, err, "release the image")
	}
	return sweepImages(ctx, c)
}

// load streams img into the engine under all refs at once.
func (e *Engine) load(ctx context.Context, c *client.Client, img v1.Image, refs ...string) error {
	named := map[name.Reference]v1.Image{}
	for _, ref := range refs {
		tag, err := name.NewTag(ref)
		if err != nil {
			return err
		}
		named[tag] = img
	}
	r, w := io.Pipe()
	defer r.Close() // ends the writer, however we leave
	e.wg.Go(func() { _ = w.CloseWithError(tarball.MultiRefWrite(named, w)) })
	// The docker format, because an OCI layout is not taken by the engines'
	// classic image stores (measured on 20.10 and 28.5).
	res, err := c.ImageLoad(ctx, r)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	// The engine has answered 200 by now; what goes wrong stands in the body.
	for dec := json.NewDecoder(res.Body); ; {
		var line struct{ Error string }
		if err := dec.Decode(&line); err == io.EOF {
			break
		} else if err != nil {
			return fmt.Errorf("read the engine's answer: %w", err)
		}
		if line.Error != "" {
			return errors.New(line.Error)
		}
	}
	_, err = c.ImageInspect(ctx, refs[0])
	return err
}

// sweepImages removes images of ours that no install holds. Another install on
// this engine may run another version, so age proves nothing: each install's own
// tag moves to the image that it uses, and an image without such a tag is used
// by nobody. The engine itself refuses to remove an image that a container uses;
// that, and a removal by someone else, is no error.
func sweepImages(ctx context.Context, c *client.Client) error {
	found, err := c.ImageList(ctx, image.ListOptions{Filters: filters.NewArgs(filters.Arg("label", LabelContent))})
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	held := func(tag string) bool {
		return !strings.HasPrefix(tag, Repository+":") || strings.HasPrefix(tag, Repository+":"+holderTag)
	}
	var errs []error
	for _, img := range found {
		if slices.ContainsFunc(img.RepoTags, held) {
			continue
		}
		for _, tag := range img.RepoTags {
			_, err := c.ImageRemove(ctx, tag, image.RemoveOptions{PruneChildren: true})
			if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsConflict(err) {
				errs = append(errs, fmt.Errorf("remove image %s: %w", tag, err))
			}
		}
	}
	return errors.Join(errs...)
}

// content is what an image is made of, by its hash. The programs are read only when
// an image is made of them: each start of a daemon asks for the hash, and they are
// as large as the daemon itself.
type content struct {
	files ImageFiles
	hash  string
}

func readContent(files ImageFiles) (content, error) {
	h := sha256.New()
	for _, part := range []string{"berth image " + layout, strconv.Itoa(protocol.Version)} {
		hashSize(h, int64(len(part)))
		_, _ = io.WriteString(h, part)
	}
	if err := hashProgram(h, files.Runner); err != nil {
		return content{}, err
	}
	if files.Busybox == "" {
		hashSize(h, 0)
	} else if err := hashProgram(h, files.Busybox); err != nil {
		return content{}, err
	}
	return content{files, hex.EncodeToString(h.Sum(nil))}, nil
}

func hashSize(h hash.Hash, size int64) {
	_ = binary.Write(h, binary.BigEndian, size) // a hash takes everything
}

func hashProgram(h hash.Hash, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return berth.Errorf(berth.Invalid, "read a program for the image: %w", err)
	}
	defer f.Close()
	if err := checkStatic(f); err != nil {
		return berth.Errorf(berth.Invalid, "%s cannot go into the image: %w", file, err)
	}
	info, err := f.Stat()
	if err == nil {
		hashSize(h, info.Size())
		_, err = io.Copy(h, f)
	}
	if err != nil {
		return berth.Errorf(berth.Invalid, "read a program for the image: %w", err)
	}
	return nil
}

func readProgram(file string) ([]byte, error) {
	program, err := os.ReadFile(file)
	if err != nil {
		return nil, berth.Errorf(berth.Invalid, "read a program for the image: %w", err)
	}
	if err := checkStatic(bytes.NewReader(program)); err != nil {
		return nil, berth.Errorf(berth.Invalid, "%s cannot go into the image: %w", file, err)
	}
	return program, nil
}

var machines = map[string]elf.Machine{
	"386": elf.EM_386, "amd64": elf.EM_X86_64, "arm": elf.EM_ARM, "arm64": elf.EM_AARCH64,
	"loong64": elf.EM_LOONGARCH, "ppc64le": elf.EM_PPC64, "riscv64": elf.EM_RISCV, "s390x": elf.EM_S390,
}

// checkStatic returns why program cannot run in an image that holds no libraries.
func checkStatic(program io.ReaderAt) error {
	f, err := elf.NewFile(program)
	if err != nil {
		return fmt.Errorf("it is no ELF program: %w", err)
	}
	if want, ok := machines[runtime.GOARCH]; ok && f.Machine != want {
		return fmt.Errorf("it is for %v, not for %s", f.Machine, runtime.GOARCH)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return errors.New("it is linked dynamically; a static one is needed (Go: CGO_ENABLED=0)")
		}
	}
	return nil
}

func (c content) ref() string { return Repository + ":" + c.hash[:12] }

// image makes the image: the same bytes for the same content, anywhere.
func (c content) image(ctx context.Context) (v1.Image, error) {
	layers := [][]entry{baseLayer()}
	if c.files.Busybox != "" {
		busybox, err := readProgram(c.files.Busybox)
		if err != nil {
			return nil, err
		}
		links, err := applets(ctx, c.files.Busybox)
		if err != nil {
			return nil, err
		}
		layers = append(layers, append([]entry{{path: "bin/busybox", mode: 0o755, data: busybox}}, links...))
	}
	runner, err := readProgram(c.files.Runner)
	if err != nil {
		return nil, err
	}
	// The runner last: it changes most, and the layers below stay known to the engine.
	layers = append(layers, []entry{{path: strings.TrimPrefix(protocol.RunnerPath, "/"), mode: 0o755, data: runner}})
	// What was read may be newer than the hash.
	if now, err := readContent(c.files); err != nil {
		return nil, err
	} else if now.hash != c.hash {
		return nil, berth.Errorf(berth.Unavailable, "the programs for the image changed while it was made: try again")
	}

	img := empty.Image
	for _, entries := range layers {
		var err error
		if img, err = appendEntries(img, entries); err != nil {
			return nil, err
		}
	}
	return configure(img, c.hash)
}

// appendEntries puts a layer of entries on top of an image.
func appendEntries(img v1.Image, entries []entry) (v1.Image, error) {
	data, err := pack(entries)
	if err != nil {
		return nil, fmt.Errorf("pack a layer: %w", err)
	}
	// Not compressed: it only travels over a socket.
	if img, err = mutate.AppendLayers(img, static.NewLayer(data, types.DockerUncompressedLayer)); err != nil {
		return nil, fmt.Errorf("append a layer: %w", err)
	}
	return img, nil
}

// entry is a file, or a folder (path ends in a slash), or a link, in a layer.
type entry struct {
	path string
	mode int64 // of files and folders
	uid  int   // also the gid
	data []byte
	link string // target
}

func baseLayer() []entry {
	const agent = 1000
	entries := []entry{
		// /tmp and /run open to all: engines of version 20.10 give a tmpfs the mode
		// of the image's folder, whatever the container asks for.
		{path: "tmp/", mode: 0o1777}, {path: "run/", mode: 0o1777},
		{path: "bin/", mode: 0o755}, {path: "sbin/", mode: 0o755}, {path: "dev/", mode: 0o755},
		{path: "etc/", mode: 0o755}, {path: "proc/", mode: 0o555}, {path: "sys/", mode: 0o555},
		{path: "usr/", mode: 0o755}, {path: "usr/bin/", mode: 0o755}, {path: "usr/sbin/", mode: 0o755},
		{path: "usr/local/", mode: 0o755}, {path: "usr/local/bin/", mode: 0o755},
		{path: "etc/passwd", mode: 0o644, data: []byte("root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:" + protocol.HomeDir + ":/bin/sh\n")},
		{path: "etc/group", mode: 0o644, data: []byte("root:x:0:\nagent:x:1000:\n")},
		{path: "home/", mode: 0o755}, {path: "home/agent/", mode: 0o755, uid: agent},
		{path: "workspace/", mode: 0o755},
	}
	for _, dir := range []string{"group", "ipc", "extra", "global", "project"} {
		entries = append(entries, entry{path: "workspace/" + dir + "/", mode: 0o755, uid: agent})
	}
	return entries
}

// applets asks a busybox for its commands and returns a link for each. The answer
// depends on its bytes alone, which are in the content's hash.
func applets(ctx context.Context, busybox string) ([]entry, error) {
	out, err := exec.CommandContext(ctx, busybox, "--list-full").Output()
	if err != nil {
		return nil, berth.Errorf(berth.Invalid, "%s --list-full: %w; is it a busybox?", busybox, err)
	}
	dirs := []string{"bin", "sbin", "usr/bin", "usr/sbin"}
	var links []entry
	for _, line := range strings.Fields(string(out)) {
		p := path.Clean(line)
		if slices.Contains(dirs, path.Dir(p)) && p != "bin/busybox" {
			links = append(links, entry{path: p, link: "/bin/busybox"})
		}
	}
	slices.SortFunc(links, func(a, b entry) int { return strings.Compare(a.path, b.path) })
	return slices.CompactFunc(links, func(a, b entry) bool { return a.path == b.path }), nil
}

// pack writes entries as a tar file, all dated 1970.
func pack(entries []entry) ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := &tar.Header{Name: e.path, Mode: e.mode, Uid: e.uid, Gid: e.uid, Size: int64(len(e.data)), Typeflag: tar.TypeReg, Format: tar.FormatUSTAR}
		switch {
		case strings.HasSuffix(e.path, "/"):
			h.Typeflag = tar.TypeDir
		case e.link != "":
			h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, e.link, 0o777
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}
