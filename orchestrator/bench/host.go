package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/dispatch"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/gateway"
	"berth/orchestrator/internal/ipc"
	"berth/orchestrator/internal/mount"
	"berth/orchestrator/internal/outbox"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/workspace"
)

const slots = 5

// host is Berth's own parts, put together as the daemon does. It sees when a
// message is committed, when an outgoing text is, and when output of a container
// arrives.
type host struct {
	root       string
	db         *sqlite.DB
	sender     *outbox.Sender
	runner     *turn.Runner
	dispatcher *dispatch.Dispatcher
	stamps     *stamps
	eyes       *eyes
	queued     chan time.Time // outgoing texts, as they are committed
}

func (b *bench) newHost(ctx context.Context, root string) (_ *host, err error) {
	uid, gid := os.Geteuid(), os.Getegid()
	if uid == 0 {
		uid, gid = 1000, 1000
	}
	tree, err := workspace.NewTree(root, uid, gid)
	if err != nil {
		return nil, err
	}
	h := &host{root: root, queued: make(chan time.Time, 1), eyes: &eyes{
		Engine: b.docker, output: make(chan output, 1024), last: make(map[string]launch),
	}}
	h.db, err = sqlite.Open(ctx, filepath.Join(tree.StoreDir(), "messages.db"), func(chat string, outgoing bool) {
		if !outgoing {
			return
		}
		select {
		case h.queued <- time.Now():
		default:
		}
		h.sender.Wake(chat)
	})
	if err != nil {
		return nil, err
	}
	h.sender = outbox.New(h.db, nowhere{}, b.log)
	h.stamps = &stamps{DB: h.db}
	groups := &registry{}
	way, err := gateway.New(gateway.Config{Dir: tree.GatewayDir(), UID: uid, GID: gid}, h.db, b.log)
	if err != nil {
		return nil, err
	}
	h.runner = turn.New(turn.Config{
		Assistant: "Andy", Image: func() (string, bool) { return b.image, true }, EngineName: "probe", Location: time.UTC,
		MaxOutput: 10 << 20, Timeout: 30 * time.Minute, IdleTimeout: 30 * time.Minute,
		Memory: 1 << 30, CPUs: 1, Pids: 256, Network: "none",
	}, turn.Deps{
		Gateway: doors{way},
		Store:   h.db, Engine: h.eyes, Tree: tree, Mounts: mount.New(filepath.Join(root, "no-allowlist.json"), root, ""),
		Requests: ipc.New(ipc.Options{Store: h.db, Groups: groups, Zone: time.UTC, ErrorDir: tree.ErrorDir(), Log: b.log}),
		Typing:   func(string, bool) {}, Rebuild: func(context.Context) error { return errors.New("the image is gone") }, Log: b.log,
	})
	h.dispatcher, err = dispatch.New(ctx, dispatch.Options{
		Store: h.stamps, Runs: h.runner, Fleet: fleet{b.docker}, Limit: slots, IdleTimeout: 30 * time.Minute, Assistant: "Andy", Log: b.log,
	})
	if groups.Dispatcher = h.dispatcher; err == nil {
		err = h.addGroups(ctx)
	}
	if err == nil {
		err = h.dispatcher.Start(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	return h, nil
}

// registry shows ipc the groups, once dispatch is made.
type registry struct{ *dispatch.Dispatcher }

func (h *host) addGroups(ctx context.Context) error {
	for i := range slots {
		if err := h.dispatcher.AddGroup(ctx, group(i)); err != nil {
			return err
		}
	}
	return nil
}

// group is the i-th group, woken by every message.
func group(i int) berth.Group {
	folder := fmt.Sprintf("bench%d", i)
	return berth.Group{JID: "console:" + folder, Name: folder, Folder: folder, AddedAt: time.Now()}
}

// close ends the runs and the parts, in the daemon's order.
func (h *host) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupBound)
	defer cancel()
	if h.dispatcher != nil {
		h.dispatcher.Shutdown(ctx)
	}
	h.sender.Shutdown(ctx)
	return h.db.Close()
}

// send stores a message of the i-th group and returns its id and when it was on
// disk.
func (h *host) send(ctx context.Context, i int) (id string, stored time.Time, err error) {
	id = berth.NewID(10)
	_, err = h.dispatcher.Receive(ctx, berth.Message{
		ID: id, ChatJID: group(i).JID, Sender: "bench", SenderName: "bench", Text: "how long does this take?", Time: time.Now(),
	})
	at, _ := h.stamps.at.LoadAndDelete(id)
	stored, _ = at.(time.Time)
	return id, stored, err
}

// await returns when the next output that matches arrived.
func (h *host) await(ctx context.Context, what string, match func(output) bool) (time.Time, error) {
	for {
		o, err := next(ctx, what, h.eyes.output)
		if err != nil || match(o) {
			return o.at, err
		}
	}
}

// idle waits until the i-th group's run waits for input.
func (h *host) idle(ctx context.Context, i int) error {
	return until(ctx, "the run becomes idle", func() (bool, error) {
		return h.runner.Live()[group(i).Folder].Run.State == berth.RunIdle, nil
	})
}

// end ends the first n groups' idle runs and waits until their slots are free.
func (h *host) end(ctx context.Context, n int) error {
	for i := range n {
		if err := h.idle(ctx, i); err != nil {
			return err
		}
		h.dispatcher.Close(group(i).Folder)
	}
	return until(ctx, "the runs end", func() (bool, error) { return h.dispatcher.State().Used == 0, nil })
}

// stamps is the store, with the time at which each message was on disk.
type stamps struct {
	*sqlite.DB
	at sync.Map // by message id
}

func (s *stamps) AddMessage(ctx context.Context, m berth.Message) (int64, bool, error) {
	seq, fresh, err := s.DB.AddMessage(ctx, m)
	s.at.Store(m.ID, time.Now())
	return seq, fresh, err
}

// eyes is the container engine, with a look at what containers print.
type eyes struct {
	turn.Engine
	output chan output

	mu   sync.Mutex
	last map[string]launch // by folder
}

type output struct {
	folder, text string
	at           time.Time
}

// launch is what a twin is made from.
type launch struct {
	container string
	stdin     []byte
}

func (e *eyes) Start(ctx context.Context, spec turn.Spec, stdin []byte, created func(id string) error) (turn.Box, error) {
	box, err := e.Engine.Start(ctx, spec, stdin, created)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	e.last[spec.Folder] = launch{box.ID(), stdin}
	e.mu.Unlock()
	return seen{box, tap{box.Stdout(), spec.Folder, e.output}}, nil
}

func (e *eyes) lastLaunch(folder string) launch {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last[folder]
}

type seen struct {
	turn.Box
	stdout io.Reader
}

func (s seen) Stdout() io.Reader { return s.stdout }

// tap tells what passes through a reader, and when. A runner writes each frame
// at once, so a frame comes with one read.
type tap struct {
	io.Reader
	folder string
	output chan<- output
}

func (t tap) Read(p []byte) (int, error) {
	n, err := t.Reader.Read(p)
	if n > 0 {
		select {
		case t.output <- output{t.folder, string(p[:n]), time.Now()}:
		default: // nobody waits
		}
	}
	return n, err
}

// fleet shows dispatch the containers of this install.
type fleet struct{ *docker.Engine }

func (f fleet) Fleet(ctx context.Context) ([]dispatch.Container, error) {
	found, err := f.Containers(ctx)
	var out []dispatch.Container
	for _, c := range found {
		out = append(out, dispatch.Container{ID: c.ID, Run: c.Run})
	}
	return out, err
}

// nowhere is a channel whose network takes no time.
type nowhere struct{}

func (nowhere) Send(context.Context, berth.Outgoing) error { return nil }

// doors puts the gateway into turn's words, as the daemon does.
type doors struct{ *gateway.Gateway }

func (d doors) Open(run berth.Run, g berth.Group) (turn.Door, error) {
	opened, err := d.Gateway.Open(gateway.Run{ID: run.ID, Folder: g.Folder})
	return door{opened}, err
}

// door leaves its folder: the floor mounts it again.
type door struct{ *gateway.Door }

func (d door) Remove() error {
	d.Close()
	return nil
}
