package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sync/errgroup"

	"berth/container"
	"berth/orchestrator/internal/bell"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/console"
	"berth/orchestrator/internal/crash"
	"berth/orchestrator/internal/dispatch"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/ipc"
	"berth/orchestrator/internal/outbox"
	"berth/orchestrator/internal/senders"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/web"
	"berth/orchestrator/internal/whatsapp"
	"berth/orchestrator/internal/workspace"
)

const (
	reconcileEvery = 30 * time.Second
	imageRetry     = 30 * time.Second
	shutdownGrace  = 10 * time.Second // for idle runs to end, and then for the outbox
	dyingGrace     = 2 * time.Second  // for a killed daemon to be gone
)

// runDaemon is the daemon: it wires the parts together, top to bottom, serves
// until ctx ends, and takes them down in the order of the last lines.
func runDaemon(ctx context.Context, cfg Config, opts RunOptions, stderr io.Writer) (err error) {
	started := time.Now()
	log := newLogger(cfg.LogLevel, stderr)
	ctx, shutdown := context.WithCancel(ctx)
	defer shutdown()

	tree, err := workspace.NewTree(cfg.Root, agentUID(), agentGID())
	if err != nil {
		return err
	}
	lock, err := lockRoot(tree.StoreDir())
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := tree.SeedSkills(container.Skills()); err != nil {
		log.Warn("the skills that come with Berth are missing", zap.Error(err))
	}

	var chats bell.Bell
	var sender *outbox.Sender
	db, err := sqlite.Open(ctx, storeFile(tree), func(chat string, outgoing bool) {
		chats.Ring(chat)
		if outgoing {
			sender.Wake(chat)
		}
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	sweepFiles(ctx, tree, db, log)
	term := console.New(db, &chats, cfg.AssistantName, filepath.Join(tree.Dir(), "groups"))
	channels := &router{console: term, tree: tree, log: log.Named("outbox")}
	sender = outbox.New(db, channels, log.Named("outbox"))

	install, err := installID(ctx, db)
	if err != nil {
		return err
	}
	engine, err := docker.New(docker.Options{Install: install, Host: cfg.DockerHost, TLSDir: cfg.DockerCertPath, CPUSet: cfg.CPUSet, Log: log.Named("docker")})
	if err != nil {
		return err
	}
	defer engine.Close()

	files, err := imageFiles()
	if err != nil {
		return err
	}
	if _, err := os.Stat(files.Runner); err != nil {
		return berth.Errorf(berth.NotFound, "the program agent-runner is not beside berth (%s): build it with make build", files.Runner)
	}
	state := &health{alarms: make(map[string]string), image: web.Image{Ref: cfg.Image}}
	images := &images{cfg: cfg, engine: engine, files: files, health: state, log: log.Named("image")}
	allowlist := newAllowlist(cfg)
	list := senderList(cfg, tree)
	guests := guests{senders.New(list), channels.aliases, log.Named("senders")}
	doors, err := newDoors(cfg, tree, db, log.Named("gateway"))
	if err != nil {
		return err
	}
	defer doors.Close()
	groups := &registry{} // dispatch needs the runner, which needs the requests
	requests := ipc.New(ipc.Options{
		Store: db, Groups: groups, Zone: cfg.Timezone, ErrorDir: tree.ErrorDir(), SyncChats: channels.syncChats, Log: log.Named("ipc"),
		TasksChanged: func() { groups.TasksChanged("") },
	})
	runner := turn.New(turn.Config{
		Assistant: cfg.AssistantName, Image: state.imageRef, Runner: files.Runner, EngineName: cfg.Engine, Location: cfg.Timezone,
		Options: cfg.engineOptions, Secrets: cfg.secretsOnStdin(),
		Sessions: cfg.Sessions, MaxOutput: cfg.MaxOutput, Timeout: cfg.ContainerTimeout, IdleTimeout: cfg.IdleTimeout, TaskTimeout: cfg.TaskTimeout,
		Memory: cfg.ContainerMemory, CPUs: cfg.ContainerCPUs, Pids: cfg.ContainerPids, Network: cfg.ContainerNetwork, Runtime: cfg.Runtime,
		Limits: turn.Limits{Memory: cfg.MaxMemory, CPUs: cfg.MaxCPUs, Pids: cfg.MaxPids},
	}, turn.Deps{
		Store: receipts{db, channels.read}, Engine: engine, Tree: tree, Mounts: allowlist,
		Requests: requests, Gateway: doors, Typing: channels.SetTyping, Rebuild: images.ensure, Log: log.Named("turn"),
	})
	heart := newHeartbeat(cfg, db, log.Named("heartbeat"))
	orders := newCommands(cfg, db, groups, runner, list, log.Named("commands"))
	dispatcher, err := dispatch.New(ctx, dispatch.Options{
		Store: db, Runs: runner, Fleet: fleet{engine}, Limit: cfg.MaxContainers, IdleTimeout: cfg.IdleTimeout,
		Assistant: cfg.AssistantName, Senders: guests, Commands: orders, GroupsChanged: func() { requests.Refresh(); heart.groupsChanged() },
		TasksChanged: func(folder string) { requests.Refresh(folder) }, Log: log.Named("dispatch"),
	})
	if err != nil {
		return err
	}
	groups.Dispatcher = dispatcher
	heart.main = func() (berth.Group, bool) { return dispatcher.Group(berth.MainFolder) }
	heart.changed = dispatcher.TasksChanged
	if cfg.Serves(channelWhatsApp) {
		channels.phone = newPhone(ctx, cfg, tree, db, dispatcher, state, func(ctx context.Context) {
			if err := sender.WakeAll(ctx); err != nil && ctx.Err() == nil {
				log.Error("wake the outbox", zap.Error(err))
			}
		}, log.Named("whatsapp"))
		defer func() { err = errors.Join(err, channels.phone.close()) }()
	}
	ctl := &control{
		texts: texts{db}, ledger: ledger{db, cfg.Timezone}, cfg: cfg, started: started, bell: &chats, console: term, dispatcher: dispatcher, runner: runner,
		shutdown: shutdown, health: state, allowlist: allowlist, guests: guests, orders: orders, phone: channels.phone, tree: tree,
	}
	if opts.SampleGroups {
		if err := ctl.addSamples(ctx); err != nil {
			return err
		}
	}
	socket, err := web.Listen(cfg.Socket())
	if err != nil {
		return err
	}
	log.Info("starting", zap.String("version", buildVersion()), zap.String("root", cfg.Root), zap.String("install", install), zap.Int("groups", len(dispatcher.Groups())))
	if err := sender.WakeAll(ctx); err != nil {
		return err
	}

	g, intake := errgroup.WithContext(ctx)
	g.Go(func() error { return web.Serve(intake, socket, ctl, log.Named("web")) })
	pool := &pool{
		engine: engine, images: images, dispatcher: dispatcher, health: state, log: log.Named("pool"),
		sweep: func() { sweep(ctx, doors, db, log) },
		ready: sync.OnceFunc(func() {
			state.set(func(h *health) { h.ready = true })
			log.Info("ready", zap.Duration("after", time.Since(started)))
			if opts.Ready != nil {
				opts.Ready()
			}
		}),
	}
	g.Go(func() error { return pool.run(intake) })
	g.Go(func() error { return dispatcher.RunTasks(intake) })
	g.Go(func() error { return heart.run(intake) })
	hangUp := channels.connect()

	err = g.Wait()
	log.Info("shutting down")
	crash.At(crash.Shutdown)
	within(shutdownGrace, dispatcher.Shutdown)
	within(shutdownGrace, sender.Shutdown)
	hangUp()
	log.Info("stopped")
	return err
}

// sweep removes the doors of runs that are over.
func sweep(ctx context.Context, doors doors, db *sqlite.DB, log *zap.Logger) {
	err := doors.Sweep(func() (ids []string, err error) {
		live, err := db.LiveRuns(ctx)
		for _, r := range live {
			ids = append(ids, r.ID)
		}
		return ids, err
	})
	if err != nil && ctx.Err() == nil {
		log.Warn("remove old doors of the gateway", zap.Error(err))
	}
}

// within calls stop with a context that ends after grace, whatever else ended.
func within(grace time.Duration, stop func(context.Context)) {
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	stop(ctx)
}

// pool keeps the runs going while the container engine comes and goes.
type pool struct {
	engine     *docker.Engine
	images     *images
	dispatcher *dispatch.Dispatcher
	health     *health
	log        *zap.Logger
	sweep      func() // of what runs left that are over
	ready      func()
}

// run watches the engine until ctx ends. While it is up, the image is made, what
// an earlier daemon left is taken over, and reconciled from time to time.
func (p *pool) run(ctx context.Context) error {
	states := make(chan error, 1) // nil: up; only the newest counts
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		err := p.engine.Watch(ctx, func(up bool, err error) {
			if up {
				err = nil
			} else if err == nil {
				err = errors.New("the Docker engine does not answer")
			}
			select {
			case <-states:
			default:
			}
			states <- err
		})
		if ctx.Err() != nil {
			return nil
		}
		return err
	})
	g.Go(func() error {
		var current *up
		defer func() { current.end() }()
		for {
			select {
			case <-ctx.Done():
				return nil
			case err := <-states:
				current.end()
				if current = nil; err != nil {
					p.down(err)
					continue
				}
				current = p.begin(ctx)
			}
		}
	})
	return g.Wait()
}

func (p *pool) down(err error) {
	p.log.Warn("no Docker engine; messages are kept until it is back", zap.Error(err))
	p.dispatcher.Pause()
	p.health.set(func(h *health) { h.docker = web.Docker{Error: err.Error()} })
	p.health.alarm("docker", "no Docker engine: "+err.Error())
}

// up is the work of a time in which the engine is up.
type up struct {
	cancel context.CancelFunc
	done   chan struct{}
}

func (p *pool) begin(ctx context.Context) *up {
	ctx, cancel := context.WithCancel(ctx)
	u := &up{cancel, make(chan struct{})}
	go func() {
		defer close(u.done)
		p.up(ctx)
	}()
	return u
}

// end ends the work, if any, and waits for it.
func (u *up) end() {
	if u == nil {
		return
	}
	u.cancel()
	<-u.done
}

// up works while the engine is up.
func (p *pool) up(ctx context.Context) {
	if info, err := p.engine.Ping(ctx); err == nil {
		p.log.Info("Docker engine", zap.String("version", info.Version), zap.String("api", info.API))
		p.health.set(func(h *health) { h.docker = web.Docker{Up: true, Version: info.Version} })
		p.health.alarm("docker", "")
	}
	p.try(ctx, imageRetry, func() error { return p.images.ensure(ctx) })
	p.try(ctx, time.Second, func() error {
		err := p.dispatcher.Start(ctx)
		if err != nil && ctx.Err() == nil {
			p.log.Warn("take over what is there", zap.Error(err))
		}
		return err
	})
	if ctx.Err() != nil {
		return
	}
	p.sweep()
	p.ready()
	again := time.NewTicker(reconcileEvery)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-again.C:
			if err := p.dispatcher.Reconcile(ctx); err != nil && ctx.Err() == nil {
				p.log.Warn("reconcile", zap.Error(err))
			}
			p.sweep()
		}
	}
}

// try repeats do until it succeeds or ctx ends.
func (p *pool) try(ctx context.Context, pause time.Duration, do func() error) {
	for ctx.Err() == nil && do() != nil {
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// images keeps the default agent image present and current.
type images struct {
	cfg    Config
	engine *docker.Engine
	files  docker.ImageFiles
	health *health
	log    *zap.Logger
	mu     sync.Mutex // one build at a time
}

// ensure makes the image if it is missing. A failure is told in the log and in
// the status.
func (i *images) ensure(ctx context.Context) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	ref, err := i.find(ctx)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		i.log.Error("agent image", zap.Error(err))
		i.health.set(func(h *health) { h.image = web.Image{Ref: ref, Error: err.Error()} })
		i.health.alarm("image", "no agent image: "+err.Error())
		return err
	}
	i.health.set(func(h *health) { h.image = web.Image{Ref: ref, Ready: true} })
	i.health.alarm("image", "")
	return nil
}

func (i *images) find(ctx context.Context) (string, error) {
	if i.cfg.Image == "" {
		ref, built, err := i.engine.BuildImage(ctx, i.files, func(step string) { i.log.Debug(step) })
		if built {
			i.log.Info("agent image built", zap.String("image", ref))
		}
		return ref, err
	}
	found, err := i.engine.ImagePresent(ctx, i.cfg.Image)
	if err == nil && !found {
		err = berth.Errorf(berth.NotFound, "CONTAINER_IMAGE=%s is not there: pull or build it, or leave the setting out", i.cfg.Image)
	}
	return i.cfg.Image, err
}

// router finds the channel of a chat.
type router struct {
	console *console.Channel
	phone   *phone // nil: WhatsApp is not served
	tree    *workspace.Tree
	log     *zap.Logger
}

var (
	_ outbox.Paced    = (*router)(nil)
	_ outbox.Releaser = (*router)(nil)
)

func (r *router) Send(ctx context.Context, o berth.Outgoing) error {
	switch {
	case console.Owns(o.ChatJID):
		return r.console.Send(ctx, o)
	case r.calls(o.ChatJID):
		return r.phone.Send(ctx, o)
	}
	return berth.Errorf(berth.Unavailable, "no channel serves chat %s", o.ChatJID)
}

// calls reports whether a chat is one of the phone's.
func (r *router) calls(chat string) bool { return r.phone != nil && whatsapp.Owns(chat) }

// Pace implements outbox.Paced. Who looks at a terminal does not want to wait; what
// comes at the pace of a machine is what WhatsApp looks for.
func (r *router) Pace(chat string) outbox.Pace {
	pace := outbox.DefaultPace
	switch {
	case console.Owns(chat):
		return outbox.Pace{}
	case whatsapp.Owns(chat):
		pace.Jitter = time.Second
	}
	return pace
}

// SetTyping says whether the agent of a chat is at work.
func (r *router) SetTyping(chat string, on bool) {
	switch {
	case console.Owns(chat):
		r.console.SetTyping(chat, on)
	case r.calls(chat):
		r.phone.SetTyping(chat, on)
	}
}

// read says that an agent was given a batch.
func (r *router) read(b berth.Batch) {
	if r.calls(b.ChatJID) {
		r.phone.read(b)
	}
}

// syncChats asks the networks which chats there are.
func (r *router) syncChats(ctx context.Context) error {
	if r.phone == nil {
		return nil
	}
	return r.phone.syncChats(ctx)
}

// connect brings the channels up until the returned function is called. They
// outlive the signal: what the outbox flushes goes through them.
func (r *router) connect() (hangUp func()) {
	if r.phone == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { r.phone.run(ctx) })
	return func() {
		cancel()
		wg.Wait()
	}
}

// registry shows ipc the groups, once dispatch is made: before, no run asks.
type registry struct{ *dispatch.Dispatcher }

// fleet shows dispatch the containers of this install.
type fleet struct{ *docker.Engine }

func (f fleet) Fleet(ctx context.Context) ([]dispatch.Container, error) {
	found, err := f.Containers(ctx)
	out := make([]dispatch.Container, 0, len(found))
	for _, c := range found {
		out = append(out, dispatch.Container{ID: c.ID, Run: c.Run})
	}
	return out, err
}

// addSamples registers the groups of make run, if there are none at all.
func (c *control) addSamples(ctx context.Context) error {
	if len(c.dispatcher.Groups()) > 0 {
		return nil
	}
	for _, folder := range []string{berth.MainFolder, "family", "work"} {
		if _, err := c.AddGroup(ctx, web.NewGroup{Folder: folder}); err != nil {
			return err
		}
	}
	return nil
}

// installID returns the random name of this root, by which its containers are
// known on an engine that it may share.
func installID(ctx context.Context, db *sqlite.DB) (string, error) {
	const key = "install"
	id, err := db.State(ctx, key)
	if err != nil || id != "" {
		return id, err
	}
	id = berth.NewID(8)
	return id, db.SetState(ctx, key, id)
}

// lockRoot makes sure that one daemon alone works on a root. The lock ends with
// the process, however it ends.
func lockRoot(storeDir string) (*os.File, error) {
	path := filepath.Join(storeDir, "berth.lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock: %w", err)
	}
	for deadline := time.Now().Add(dyingGrace); ; time.Sleep(dyingGrace / 100) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("lock the root: %w", err), f.Close())
		}
		text, _ := io.ReadAll(io.NewSectionReader(f, 0, 20))
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		// One that was killed may hold the lock for a moment longer.
		if err == nil && !alive(pid) && time.Now().Before(deadline) {
			continue
		}
		f.Close()
		return nil, berth.Errorf(berth.Conflict, "another berth works on this root (pid %d): talk to it, stop it with berth stop --daemon, or choose another --root", pid)
	}
	if err := f.Truncate(0); err != nil {
		return nil, errors.Join(fmt.Errorf("write the lock: %w", err), f.Close())
	}
	if _, err := f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return nil, errors.Join(fmt.Errorf("write the lock: %w", err), f.Close())
	}
	return f, nil
}

// defaultAgentID is the containers' user and group when the daemon is root,
// whose own must not be used.
const defaultAgentID = 1000

func agentUID() int {
	if uid := os.Geteuid(); uid != 0 {
		return uid
	}
	return defaultAgentID
}

func agentGID() int {
	if os.Geteuid() != 0 {
		return os.Getegid()
	}
	return defaultAgentID
}

// dockerSockets returns the engine's socket, which is never mounted.
func dockerSockets(host string) []string {
	if path, ok := strings.CutPrefix(host, "unix://"); ok {
		return []string{path}
	}
	return nil
}

// newLogger writes one line an entry: for people on a terminal, and easy to cut
// into fields elsewhere.
func newLogger(level zapcore.Level, w io.Writer) *zap.Logger {
	enc := zap.NewProductionEncoderConfig()
	enc.EncodeTime = zapcore.ISO8601TimeEncoder
	enc.EncodeDuration = zapcore.StringDurationEncoder
	enc.EncodeLevel = zapcore.LowercaseLevelEncoder
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(enc), zapcore.Lock(zapcore.AddSync(w)), level))
}
