package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptrace"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/client"
	"github.com/docker/docker/pkg/stdcopy"
	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
	"berth/orchestrator/internal/turn"
)

// unknownExit is the exit code of a container that vanished.
const unknownExit = -1

// Start implements turn.Engine. A container that exits before it read all of its
// stdin has started: its Box tells how it ended.
func (e *Engine) Start(ctx context.Context, spec turn.Spec, stdin []byte, created func(id string) error) (turn.Box, error) {
	c, err := e.client(ctx)
	if err != nil {
		return nil, err
	}
	marker, err := e.runnerOf(ctx, &spec)
	if err != nil {
		return nil, err
	}
	want := render(spec, e.opts.Install, e.processors(ctx, c, spec.CPUs))
	// The engine creates the container even when the caller hangs up, and its
	// answer is the only word on it. So this call is seen through.
	through, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	made, err := c.ContainerCreate(through, want.Config, want.Host, nil, nil, want.Name)
	if err != nil && e.opts.CPUSet == AutoCPUSet && strings.Contains(err.Error(), "CPUs are not available") {
		// The engine may use other processors than the first few.
		e.cpus.Store(1)
		want.Host.CpusetCpus = ""
		made, err = c.ContainerCreate(through, want.Config, want.Host, nil, nil, want.Name)
	}
	if err != nil {
		if through.Err() != nil || unreachable(err) {
			e.undo(ctx, want.Name)
		}
		return nil, e.refused(ctx, c, err, spec, "create a container")
	}
	for _, warning := range made.Warnings {
		if _, known := e.warned.LoadOrStore(warning, true); !known {
			e.log.Warn("docker engine warns about containers", zap.String("warning", warning))
		}
	}
	b := e.newBox(made.ID, spec.RunID, marker)
	if err := b.start(ctx, c, spec, stdin, created); err != nil {
		_ = b.Close()
		e.undo(ctx, made.ID)
		return nil, err
	}
	return b, nil
}

// processors returns the set of processors for a container that may use so many; ""
// is all.
func (e *Engine) processors(ctx context.Context, c *client.Client, cpus float64) string {
	if e.opts.CPUSet != AutoCPUSet {
		return e.opts.CPUSet
	}
	n := e.cpus.Load()
	if n == 0 {
		info, err := c.Info(ctx)
		if err != nil {
			return ""
		}
		if n = 1; info.CPUSet {
			n = int32(info.NCPU)
		}
		e.cpus.Store(n)
	}
	if n < 2 || cpus > float64(n-1) {
		return ""
	}
	return fmt.Sprintf("1-%d", n-1)
}

var markerPattern = regexp.MustCompile(`^[A-Z0-9_]{1,64}$`)

// runnerOf returns the marker of an image's runner. An image that names one has a
// runner, so that none is mounted into it.
func (e *Engine) runnerOf(ctx context.Context, spec *turn.Spec) (marker string, err error) {
	marker = protocol.DefaultMarker
	if !strings.HasPrefix(spec.Image, Repository+":") {
		labels, err := e.Labels(ctx, spec.Image)
		if err != nil {
			return "", err
		}
		if labels[protocol.LabelMarker] == "" {
			return marker, nil
		}
		if marker = labels[protocol.LabelMarker]; !markerPattern.MatchString(marker) {
			return "", berth.Errorf(berth.Invalid, "image %s has the label %s=%.80q: give capital letters, digits and _ only", spec.Image, protocol.LabelMarker, marker)
		}
	}
	spec.Runner = ""
	return marker, nil
}

// refused explains why the engine would not create or start a container.
func (e *Engine) refused(ctx context.Context, c *client.Client, err error, spec turn.Spec, doing string) error {
	// A missing network is "not found" too; only the image can tell.
	if errdefs.IsNotFound(err) {
		if _, ierr := c.ImageInspect(ctx, spec.Image); errdefs.IsNotFound(ierr) {
			return berth.Errorf(berth.NotFound, "image %s is missing: build it (berth image build) or pull it, or name another for group %s", spec.Image, spec.Folder)
		}
	}
	if errdefs.IsInvalidArgument(err) || errdefs.IsNotFound(err) {
		return berth.Errorf(berth.Invalid, "%s for group %s: %w; check the group's mounts, network, runtime and image", doing, spec.Folder, err)
	}
	return e.explain(ctx, err, doing)
}

// undo removes what a failed Start created, by id or name. If the engine is lost
// just then, the sweep by label finds the rest.
func (e *Engine) undo(ctx context.Context, name string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	if err := e.removeOnce(ctx, name); unreachable(err) {
		e.log.Warn("container may be left behind", zap.String("container", name), zap.Error(err))
	} else if err != nil {
		if err := e.remove(ctx, name); err != nil {
			e.log.Warn("container left behind", zap.String("container", name), zap.Error(err))
		}
	}
}

// Attach implements turn.Engine.
func (e *Engine) Attach(ctx context.Context, runID string) (turn.Box, error) {
	c, err := e.client(ctx)
	if err != nil {
		return nil, err
	}
	found, err := c.ContainerList(ctx, container.ListOptions{Filters: filters.NewArgs(
		filters.Arg("label", LabelInstall+"="+e.opts.Install),
		filters.Arg("label", LabelRun+"="+runID),
		filters.Arg("status", container.StateRunning),
	)})
	if err != nil {
		return nil, e.explain(ctx, err, "look for the container of run "+runID)
	}
	if len(found) == 0 {
		return nil, berth.Errorf(berth.NotFound, "no container of run %s is running", runID)
	}
	b := e.newBox(found[0].ID, runID, found[0].Labels[protocol.LabelMarker]) // a container has its image's labels
	if err := b.Reattach(ctx); err != nil {
		return nil, err
	}
	e.wg.Go(func() {
		res, errs := c.ContainerWait(e.ctx, b.id, container.WaitConditionNotRunning)
		b.watch(e.ctx, res, errs)
	})
	return b, nil
}

// box is a container that was started or adopted.
type box struct {
	e      *Engine
	id     string
	run    string
	marker string
	log    *zap.Logger

	stdout, stderr stream
	pace           *rate.Limiter // of bytes of both

	exited chan struct{} // closed when exit is set
	exit   turn.Exit

	mu       sync.Mutex
	conn     *types.HijackedResponse
	closed   bool
	stopping bool
}

func (e *Engine) newBox(id, run, marker string) *box {
	return &box{
		e: e, id: id, run: run, marker: marker,
		log:    e.log.With(zap.String("run", run), zap.String("container", id[:min(12, len(id))])),
		exited: make(chan struct{}),
		pace:   rate.NewLimiter(outputRate, outputBurst),
	}
}

// How much a container may print: so much a second after a burst. Beyond it, it
// waits, instead of keeping this process and the engine busy.
const (
	outputRate  = 4 << 20
	outputBurst = 16 << 20
)

// paced is a reader that takes no more than so many bytes a second.
type paced struct {
	io.Reader
	ctx  context.Context
	pace *rate.Limiter
}

func (p paced) Read(data []byte) (int, error) {
	n, err := p.Reader.Read(data[:min(len(data), outputBurst)])
	if n > 0 && err == nil {
		err = p.pace.WaitN(p.ctx, n)
	}
	return n, err
}

// start brings a created container to life, in the order that loses nothing:
// attach and wait before start, because a short run is over before a later call
// arrives.
func (b *box) start(ctx context.Context, c *client.Client, spec turn.Spec, stdin []byte, created func(id string) error) error {
	if err := created(b.id); err != nil {
		return err
	}
	conn, err := c.ContainerAttach(ctx, b.id, container.AttachOptions{Stream: true, Stdin: true, Stdout: true, Stderr: true})
	if err != nil {
		return b.e.explain(ctx, err, "attach to the new container")
	}
	b.carry(conn)

	watching, unwatch := context.WithCancel(b.e.ctx)
	res, errs := c.ContainerWait(watching, b.id, container.WaitConditionNextExit)
	select {
	case err = <-errs:
		err = b.e.explain(ctx, err, "wait for the new container")
	default:
		if err = c.ContainerStart(ctx, b.id, container.StartOptions{}); err != nil {
			err = b.e.refused(ctx, c, err, spec, "start the container")
		}
	}
	if err != nil {
		unwatch()
		return err
	}
	b.e.wg.Go(func() {
		defer unwatch()
		b.watch(watching, res, errs)
	})

	crash.At(crash.Started)
	if spec.Started != nil {
		ins, err := c.ContainerInspect(ctx, b.id)
		if err != nil {
			return b.e.explain(ctx, err, "look at the new container")
		}
		// One that has exited by now is told of by its exit.
		if pid := ins.State.Pid; pid > 0 {
			if err := spec.Started(pid); err != nil {
				return err
			}
		}
	}
	_ = conn.Conn.SetWriteDeadline(time.Now().Add(callTimeout))
	stop := context.AfterFunc(ctx, func() { _ = conn.Conn.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err = conn.Conn.Write(stdin)
	if err == nil {
		err = conn.CloseWrite()
	}
	if err == nil {
		return nil
	}
	if ctx.Err() == nil {
		if ins, ierr := c.ContainerInspect(ctx, b.id); ierr == nil && !ins.State.Running {
			b.log.Debug("container exited before it read its stdin", zap.Error(err))
			return nil
		}
	}
	if ctx.Err() == nil && errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("the container did not read its stdin within %v", callTimeout)
	}
	return b.e.explain(ctx, err, "write the container's stdin")
}

// carry takes over a fresh attachment: its output goes to the box's streams
// until it ends.
func (b *box) carry(conn types.HijackedResponse) {
	outR, outW := io.Pipe()
	errR, errW := io.Pipe()
	b.mu.Lock()
	b.endLocked()
	b.conn = &conn
	b.stdout.cur.Store(outR)
	b.stderr.cur.Store(errR)
	if b.closed {
		b.endLocked()
	}
	b.mu.Unlock()
	b.e.wg.Go(func() {
		unhook := context.AfterFunc(b.e.ctx, func() { _ = b.Close() })
		defer unhook()
		if _, err := stdcopy.StdCopy(outW, errW, paced{conn.Reader, b.e.ctx, b.pace}); err != nil {
			b.log.Debug("streams broke", zap.Error(err))
		}
		conn.Close()
		_ = outW.Close()
		_ = errW.Close()
	})
}

func (b *box) endLocked() {
	if b.conn != nil {
		b.conn.Close()
		_ = b.stdout.cur.Load().Close()
		_ = b.stderr.cur.Load().Close()
		b.conn = nil
	}
}

// Close implements turn.Box. The streams stay ended, also after a Reattach.
func (b *box) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.endLocked()
	return nil
}

func (b *box) ID() string        { return b.id }
func (b *box) Marker() string    { return b.marker }
func (b *box) Stdout() io.Reader { return &b.stdout }
func (b *box) Stderr() io.Reader { return &b.stderr }

// Reattach implements turn.Box. The readers stay the same. A container that
// exited meanwhile is an error of kind berth.NotFound.
func (b *box) Reattach(ctx context.Context) error {
	c, err := b.e.client(ctx)
	if err != nil {
		return err
	}
	conn, err := c.ContainerAttach(ctx, b.id, container.AttachOptions{Stream: true, Stdout: true, Stderr: true})
	// An attachment to an exited container never ends (measured on 20.10 and
	// 28.5), and a refused one says why only in prose. So ask.
	ins, ierr := c.ContainerInspect(ctx, b.id)
	switch {
	case errdefs.IsNotFound(ierr), ierr == nil && !ins.State.Running:
		ierr = berth.Errorf(berth.NotFound, "the container of run %s has exited", b.run)
	case err != nil:
		return b.e.explain(ctx, err, "attach to the container of run "+b.run)
	case ierr != nil:
		ierr = b.e.explain(ctx, ierr, "inspect the container of run "+b.run)
	}
	if ierr != nil {
		if err == nil {
			conn.Close()
		}
		return ierr
	}
	b.carry(conn)
	return nil
}

// watch finds out how the container ended, from a wait that is under way and
// from new ones when the connection breaks.
func (b *box) watch(ctx context.Context, res <-chan container.WaitResponse, errs <-chan error) {
	exit := turn.Exit{Code: unknownExit}
	var retry backoff
	for {
		select {
		case r := <-res:
			exit.Code = int(r.StatusCode)
		case err := <-errs:
			b.log.Debug("wait broke", zap.Error(err))
		}
		// The answer to a wait lacks the reason, and may come from an engine
		// that is going down; the container itself knows.
		for known := false; !known; {
			state, err := b.state(ctx)
			switch {
			case ctx.Err() != nil:
				return
			case errdefs.IsNotFound(err):
				b.ended(exit)
				return
			case err == nil && !state.Running:
				// A tool that ran out of memory may leave the runner alive.
				b.ended(turn.Exit{Code: state.ExitCode, OutOfMemory: state.OOMKilled && state.ExitCode != 0})
				return
			case err == nil:
				known = true
			}
			if retry.sleep(ctx) != nil {
				return
			}
		}
		c, err := b.e.client(ctx)
		if err != nil {
			res, errs = nil, failed(err)
			continue
		}
		res, errs = c.ContainerWait(ctx, b.id, container.WaitConditionNotRunning)
	}
}

func failed(err error) <-chan error {
	errs := make(chan error, 1)
	errs <- err
	return errs
}

func (b *box) state(ctx context.Context) (*container.State, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	c, err := b.e.client(ctx)
	if err != nil {
		return nil, err
	}
	ins, err := c.ContainerInspect(ctx, b.id)
	if err != nil {
		return nil, b.e.explain(ctx, err, "inspect the container")
	}
	return ins.State, nil
}

func (b *box) ended(exit turn.Exit) {
	b.log.Debug("container exited", zap.Int("code", exit.Code), zap.Bool("out of memory", exit.OutOfMemory))
	b.exit = exit
	close(b.exited)
}

// Wait implements turn.Box.
func (b *box) Wait(ctx context.Context) (turn.Exit, error) {
	select {
	case <-b.exited:
		return b.exit, nil
	default:
	}
	select {
	case <-b.exited:
		return b.exit, nil
	case <-ctx.Done():
		return turn.Exit{}, fmt.Errorf("wait for the container: %w", context.Cause(ctx))
	case <-b.e.ctx.Done():
		return turn.Exit{}, fmt.Errorf("wait for the container: %w", errClosed)
	}
}

// Stop implements turn.Box.
func (b *box) Stop(ctx context.Context) error {
	b.mu.Lock()
	busy := b.stopping
	b.stopping = true
	b.mu.Unlock()
	if busy {
		return nil
	}
	// The engine answers when the container has stopped, but goes on without a
	// listener once it has the request. So the order counts as taken when the
	// request is written, and a goroutine hears the end of it.
	took := make(chan error, 1)
	var once sync.Once
	answer := func(err error) (first bool) {
		once.Do(func() { took <- err; first = true })
		return first
	}
	b.e.wg.Go(func() {
		err := b.stop(httptrace.WithClientTrace(b.e.ctx, &httptrace.ClientTrace{
			WroteRequest: func(info httptrace.WroteRequestInfo) {
				if info.Err == nil {
					answer(nil)
				}
			},
		}))
		b.mu.Lock()
		b.stopping = false
		b.mu.Unlock()
		if !answer(err) && err != nil && b.e.ctx.Err() == nil {
			b.log.Warn("stop failed", zap.Error(err))
		}
	})
	select {
	case err := <-took:
		return err
	case <-ctx.Done():
		return fmt.Errorf("stop the container: %w", context.Cause(ctx))
	}
}

// stop returns when the container has stopped. It keeps ctx's trace from the
// negotiation with the engine: only the order itself counts.
func (b *box) stop(ctx context.Context) error {
	c, err := b.e.client(b.e.ctx)
	if err != nil {
		return err
	}
	err = c.ContainerStop(ctx, b.id, container.StopOptions{Timeout: new(int(b.e.opts.stopGrace / time.Second))})
	if err == nil || errdefs.IsNotFound(err) {
		return nil
	}
	return b.e.explain(ctx, err, "stop the container")
}

// Remove implements turn.Box.
func (b *box) Remove(ctx context.Context) error { return b.e.remove(ctx, b.id) }

// remove removes a container until the engine says that it is gone, or ctx ends.
func (e *Engine) remove(ctx context.Context, id string) error {
	var retry backoff
	var last error
	for {
		err := e.removeOnce(ctx, id)
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil { // an attempt that ctx cut off explains nothing
			last = err
		}
		if retry.sleep(ctx) != nil {
			return last
		}
		e.log.Debug("removing the container again", zap.String("container", id), zap.Error(err))
	}
}

func (e *Engine) removeOnce(ctx context.Context, id string) error {
	c, err := e.client(ctx)
	if err != nil {
		return err
	}
	// RemoveVolumes: an image may declare anonymous volumes, which would pile up.
	err = c.ContainerRemove(ctx, id, container.RemoveOptions{Force: true, RemoveVolumes: true})
	if err != nil && !errdefs.IsNotFound(err) {
		// Also when another removal is under way: the next attempt sees its end.
		return e.explain(ctx, err, "remove the container")
	}
	switch _, err := c.ContainerInspect(ctx, id); {
	case errdefs.IsNotFound(err):
		return nil
	case err != nil:
		return e.explain(ctx, err, "inspect the removed container")
	}
	return errors.New("the engine still has the container after its removal")
}

// stream is a reader whose source Reattach replaces.
type stream struct {
	cur atomic.Pointer[io.PipeReader]
}

func (s *stream) Read(p []byte) (int, error) {
	n, err := s.cur.Load().Read(p)
	if errors.Is(err, io.ErrClosedPipe) {
		err = io.EOF
	}
	return n, err
}
