package turn

import (
	"context"
	"io"

	"berth/orchestrator/internal/berth"
)

// Engine starts containers. Its methods may be called from many goroutines.
// Errors of kind berth.Unavailable mean that the container engine itself cannot
// be reached and that the call may be repeated later; errors of kind
// berth.NotFound that the image (Start) or the container (Attach) is missing.
type Engine interface {
	// Start creates a container, attaches to it, starts it, writes stdin and
	// closes it. spec.Started is called, if it is not nil, when the container
	// runs and before it is told anything; an error from it ends the container.
	// created is called with the container's id before it starts; an
	// error from it undoes the creation. On any error nothing is left behind.
	// The container outlives ctx.
	Start(ctx context.Context, spec Spec, stdin []byte, created func(id string) error) (Box, error)

	// Attach finds the running container of a run of this install.
	Attach(ctx context.Context, runID string) (Box, error)

	// RemoveContainer stops and removes a container of this install, and
	// returns nil only when the engine says that it is gone.
	RemoveContainer(ctx context.Context, id string) error
}

// Box is one running container.
type Box interface {
	ID() string

	// Marker is what stands around the frames of the image's runner. Another one
	// than protocol.DefaultMarker is that of an older runner, which knows no nonce.
	Marker() string

	// Stdout and Stderr are what the container prints from the moment of
	// Start or Attach on. Both must be read; they end when the container
	// exits, or when the connection to the engine breaks.
	Stdout() io.Reader
	Stderr() io.Reader

	// Reattach opens the streams anew after they broke while the container
	// runs; what was printed in between is lost. Only the reader of the
	// streams may call it.
	Reattach(ctx context.Context) error

	// Wait returns when the container has exited, however often the
	// connection to the engine breaks meanwhile, or with ctx's error. A
	// container that vanished counts as exited with code -1. Any number of
	// goroutines may wait.
	Wait(ctx context.Context) (Exit, error)

	// Stop makes the container exit: SIGTERM, after StopGrace SIGKILL. It
	// returns when the engine took the order; Wait tells the outcome. Calling
	// it again is harmless.
	Stop(ctx context.Context) error

	// Close lets go of the streams, which then end, and leaves the container
	// as it is. Calling it again is harmless.
	Close() error

	// Remove kills the container if need be and removes it, and returns nil
	// only when the engine says that it is gone.
	Remove(ctx context.Context) error
}

// Exit is how a container ended.
type Exit struct {
	Code        int // -1 when unknown
	OutOfMemory bool
}

// Spec is a container to start. Everything that is the same for all containers
// (hardening, labels' names, working folder) is the engine's own.
type Spec struct {
	RunID   string
	Folder  string
	Kind    string // berth.KindChat or berth.KindTask
	Image   string
	Runner  string        // host path of the runner to mount into an image that has none
	Mounts  []berth.Mount // parents before children
	UID     int
	GID     int
	TZ      string
	Memory  int64   // bytes
	CPUs    float64 // of one core
	Pids    int64
	Network string              // "none", "bridge" or a network's name
	Runtime string              // "" for the engine's default
	Started func(pid int) error // pid is the container's first process as its host counts
}
