// Package docker fills turn.Engine by the Docker Engine API: it renders the one
// shape that all containers have, starts and watches them, finds those of this
// install again by label, and makes the agent image without a registry. It is
// the only package that imports the Docker client.
//
// An Engine may be used from many goroutines. It survives the loss of the Docker
// engine: calls fail with kind berth.Unavailable while it is away and work again
// when it is back, also if it came back as another version.
package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/client"
	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/turn"
)

// DefaultHost is where the Docker engine listens when Options name no other place.
const DefaultHost = "unix:///var/run/docker.sock"

// AutoCPUSet leaves the first processor to the daemon and the engine, if there are
// two or more: containers that compute, however many, should not delay the
// messages of others. A container that may use more than the rest gets all.
const AutoCPUSet = "auto"

// StopGrace is the time between SIGTERM and SIGKILL.
const StopGrace = 10 * time.Second

const (
	callTimeout = 30 * time.Second // of one call that no caller waits for, or that must be seen through
	retryMin    = 100 * time.Millisecond
	retryMax    = 5 * time.Second
)

// Options say which engine to use, and for whom.
type Options struct {
	// Install names this state root. It is the value of the label
	// berth.install, and part of an image tag.
	Install string

	Host   string // "" for DefaultHost, else unix:///path or tcp://host:port, as in DOCKER_HOST
	TLSDir string // folder with ca.pem, cert.pem and key.pem, as in DOCKER_CERT_PATH; "" for no TLS
	CPUSet string // processors of containers, as in "1-3,5"; "" for all; or AutoCPUSet
	Log    *zap.Logger

	stopGrace time.Duration // whole seconds; 0 for StopGrace
}

// Engine is a Docker engine, used on behalf of one install.
type Engine struct {
	opts   Options
	log    *zap.Logger
	api    atomic.Pointer[client.Client] // nil until the engine answered, and again after it was lost
	cpus   atomic.Int32                  // processors among which AutoCPUSet may choose; 0: not known yet
	warned sync.Map                      // engine's warnings already logged

	ctx   context.Context // ends with Close
	close context.CancelFunc
	wg    sync.WaitGroup
}

var _ turn.Engine = (*Engine)(nil)

var (
	errClosed      = errors.New("docker: closed")
	installPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)
)

// New returns an Engine. It connects to nothing: the Docker engine may come up
// later. Faults of the options are of kind berth.Invalid.
func New(opts Options) (*Engine, error) {
	if !installPattern.MatchString(opts.Install) {
		return nil, berth.Errorf(berth.Invalid, "install id %q is not 1 to 64 letters, digits, dots, - or _", opts.Install)
	}
	if opts.Host == "" {
		opts.Host = DefaultHost
	}
	if !strings.HasPrefix(opts.Host, "unix://") && !strings.HasPrefix(opts.Host, "tcp://") {
		return nil, berth.Errorf(berth.Invalid, "Docker host %q cannot be used: it must be unix:///path or tcp://host:port", opts.Host)
	}
	if opts.Log == nil {
		opts.Log = zap.NewNop()
	}
	if opts.stopGrace == 0 {
		opts.stopGrace = StopGrace
	}
	e := &Engine{opts: opts, log: opts.Log}
	if _, err := e.dial(); err != nil {
		return nil, berth.Errorf(berth.Invalid, "Docker host %q cannot be used: %w", opts.Host, err)
	}
	e.ctx, e.close = context.WithCancel(context.Background())
	return e, nil
}

// Close ends everything that watches containers; the containers live on. Streams
// of boxes end, and Wait returns an error.
func (e *Engine) Close() error {
	e.close()
	e.wg.Wait()
	e.forget()
	return nil
}

// Host returns where the Docker engine is expected.
func (e *Engine) Host() string { return e.opts.Host }

func (e *Engine) dial() (*client.Client, error) {
	opts := []client.Opt{client.WithAPIVersionNegotiation()}
	if dir := e.opts.TLSDir; dir != "" {
		opts = append(opts, client.WithTLSClientConfig(
			filepath.Join(dir, "ca.pem"), filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")))
	}
	return client.NewClientWithOpts(append(opts, client.WithHost(e.opts.Host))...)
}

// client returns a client that speaks the engine's API version. The client
// library would negotiate by itself, but once and for ever, and only downwards: an
// engine that was upgraded while we ran may refuse the old version. So each loss
// of the engine drops the client, and the next call negotiates anew.
func (e *Engine) client(ctx context.Context) (*client.Client, error) {
	if c := e.api.Load(); c != nil {
		return c, nil
	}
	c, err := e.dial()
	if err != nil {
		return nil, fmt.Errorf("set up the Docker client: %w", err)
	}
	ping, err := c.Ping(ctx)
	if err == nil && ping.APIVersion == "" {
		// Ping takes an internal server error for an answer; negotiating with
		// it would settle on a version that engines no longer speak.
		err = errdefs.ErrUnavailable
	}
	if err != nil {
		_ = c.Close()
		return nil, e.explain(ctx, err, "connect")
	}
	c.NegotiateAPIVersionPing(ping)
	e.api.Store(c)
	return c, nil
}

func (e *Engine) forget() {
	e.cpus.Store(0)
	if c := e.api.Swap(nil); c != nil {
		_ = c.Close()
	}
}

// explain gives err, which a call for doing returned, its kind.
func (e *Engine) explain(ctx context.Context, err error, doing string) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", doing, context.Cause(ctx))
	case errors.Is(err, fs.ErrPermission):
		return berth.Errorf(berth.Unavailable, "%s: no permission to use the Docker engine at %s (%w): add this user to the group docker and log in anew, or run as root", doing, e.opts.Host, err)
	case unreachable(err):
		e.forget()
		return berth.Errorf(berth.Unavailable, "%s: no answer from the Docker engine at %s (%w): start it (docker/ensure-engine.sh does), or set DOCKER_HOST", doing, e.opts.Host, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// unreachable reports whether err came from the way to the engine and not from
// the engine.
func unreachable(err error) bool {
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	return client.IsErrConnectionFailed(err) || errdefs.IsUnavailable(err) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// backoff paces repeated attempts: 0.1 s, doubling up to 5 s.
type backoff struct {
	pause time.Duration
	last  time.Time
}

// sleep waits for the next attempt, or returns ctx's error. After a quiet minute
// it starts small again.
func (b *backoff) sleep(ctx context.Context) error {
	b.pause = min(max(2*b.pause, retryMin), retryMax)
	if time.Since(b.last) > time.Minute {
		b.pause = retryMin
	}
	timer := time.NewTimer(b.pause)
	defer timer.Stop()
	defer func() { b.last = time.Now() }()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
