package docker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"

	"berth/orchestrator/internal/berth"
)

// Info is what the Docker engine says about itself.
type Info struct {
	Version        string // of the engine
	API            string // version in use
	OS, Arch       string // as in GOOS and GOARCH
	CgroupDriver   string
	CgroupVersion  string // "1" or "2"
	StorageDriver  string
	Runtimes       []string // sorted
	DefaultRuntime string
	CPUs           int
	Memory         int64 // bytes
}

// Ping asks the engine who it is.
func (e *Engine) Ping(ctx context.Context) (Info, error) {
	c, err := e.client(ctx)
	if err != nil {
		return Info{}, err
	}
	version, err := c.ServerVersion(ctx)
	if err != nil {
		return Info{}, e.explain(ctx, err, "ask the Docker engine for its version")
	}
	info, err := c.Info(ctx)
	if err != nil {
		return Info{}, e.explain(ctx, err, "ask the Docker engine about itself")
	}
	out := Info{
		Version: version.Version, API: c.ClientVersion(), OS: version.Os, Arch: version.Arch,
		CgroupDriver: info.CgroupDriver, CgroupVersion: info.CgroupVersion,
		StorageDriver: info.Driver, DefaultRuntime: info.DefaultRuntime,
		CPUs: info.NCPU, Memory: info.MemTotal,
	}
	for name := range info.Runtimes {
		out.Runtimes = append(out.Runtimes, name)
	}
	slices.Sort(out.Runtimes)
	return out, nil
}

// Watch tells report whether the engine is up, at once and after each change,
// until ctx ends; it returns ctx's error. It holds the engine's event stream open
// and so hears of a loss without polling; while the engine is away it tries again
// after 0.1 s, doubling up to 5 s. report is called from this goroutine, with the
// reason when up is false.
func (e *Engine) Watch(ctx context.Context, report func(up bool, err error)) error {
	var retry backoff
	known, wasUp := false, false
	tell := func(up bool, err error) {
		if !known || up != wasUp {
			known, wasUp = true, up
			report(up, err)
		}
	}
	for {
		err := e.follow(ctx, func() { tell(true, nil) }, func(Event) {})
		if ctx.Err() != nil {
			return fmt.Errorf("watch the Docker engine: %w", context.Cause(ctx))
		}
		tell(false, err)
		if err := retry.sleep(ctx); err != nil {
			return fmt.Errorf("watch the Docker engine: %w", context.Cause(ctx))
		}
	}
}

// Event is a change of one container of this install.
type Event struct {
	Action    string // "start", "die", "oom", "destroy", …, as Docker says
	Container string // id
	Run       string
	Time      time.Time
}

// Events calls seen with each event of this install's containers until ctx ends or
// the connection breaks, and returns why. opened, which may be nil, is called when
// nothing that happens from then on is missed.
func (e *Engine) Events(ctx context.Context, opened func(), seen func(Event)) error {
	if opened == nil {
		opened = func() {}
	}
	return e.follow(ctx, opened, seen)
}

func (e *Engine) follow(ctx context.Context, opened func(), seen func(Event)) error {
	c, err := e.client(ctx)
	if err != nil {
		return err
	}
	// Ends the client's reader if we leave first.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	messages, errs := c.Events(ctx, events.ListOptions{Filters: filters.NewArgs(
		filters.Arg("type", string(events.ContainerEventType)),
		filters.Arg("label", LabelInstall+"="+e.opts.Install),
	)})
	// The client returns as soon as the request was answered or has failed, and
	// tells of a failure only later; an answer to a second call is the proof.
	if _, err := c.Ping(ctx); err != nil {
		return e.explain(ctx, err, "connect")
	}
	opened()
	for {
		select {
		case m := <-messages:
			seen(Event{
				Action: string(m.Action), Container: m.Actor.ID,
				Run: m.Actor.Attributes[LabelRun], Time: time.Unix(0, m.TimeNano),
			})
		case err := <-errs:
			if err == nil {
				err = errors.New("the stream ended")
			}
			return e.explain(ctx, err, "follow the Docker engine's events")
		}
	}
}

// Container is a container of this install.
type Container struct {
	ID       string
	Run      string
	Folder   string
	Kind     string
	Protocol int // 0 when the label is no number
	Running  bool
	Created  time.Time
}

// Containers lists the containers of this install, running or not.
func (e *Engine) Containers(ctx context.Context) ([]Container, error) {
	c, err := e.client(ctx)
	if err != nil {
		return nil, err
	}
	found, err := c.ContainerList(ctx, container.ListOptions{
		All:     true,
		Filters: filters.NewArgs(filters.Arg("label", LabelInstall+"="+e.opts.Install)),
	})
	if err != nil {
		return nil, e.explain(ctx, err, "list containers")
	}
	out := make([]Container, 0, len(found))
	for _, f := range found {
		version, _ := strconv.Atoi(f.Labels[LabelProtocol])
		out = append(out, Container{
			ID: f.ID, Run: f.Labels[LabelRun], Folder: f.Labels[LabelGroup], Kind: f.Labels[LabelKind],
			Protocol: version, Running: f.State == container.StateRunning, Created: time.Unix(f.Created, 0),
		})
	}
	return out, nil
}

// RemoveContainer stops a container of this install, waits for StopGrace, kills it
// if need be, removes it, and returns nil only when the engine says that it is
// gone. A container of someone else is refused with kind berth.Denied.
func (e *Engine) RemoveContainer(ctx context.Context, id string) error {
	c, err := e.client(ctx)
	if err != nil {
		return err
	}
	ins, err := c.ContainerInspect(ctx, id)
	if err == nil {
		if ins.Config.Labels[LabelInstall] != e.opts.Install {
			return berth.Errorf(berth.Denied, "container %s is not of this install", id)
		}
		err = c.ContainerStop(ctx, id, container.StopOptions{Timeout: new(int(e.opts.stopGrace / time.Second))})
	}
	if err != nil && (ctx.Err() != nil || unreachable(err)) {
		return e.explain(ctx, err, "stop the container")
	}
	// Whatever else went wrong with stopping, removal kills.
	return e.remove(ctx, id)
}
