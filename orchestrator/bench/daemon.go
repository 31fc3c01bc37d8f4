package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/rig"
	"berth/orchestrator/internal/web"
)

const (
	registered = 1000
	readings   = 10
	starts     = 10
)

// daemon is a real `berth run`.
type daemon struct {
	pid    int
	ready  time.Duration // from its start
	client *web.Client
	stop   func() error
}

// makeRoot makes a state root of the bench.
func (b *bench) makeRoot(ctx context.Context, name string, n int) (root string, err error) {
	groups := make([]berth.Group, n)
	for i := range groups {
		groups[i] = group(i)
	}
	root = filepath.Join(b.dir, name)
	return root, rig.MakeRoot(ctx, root, b.install, groups)
}

// start runs the daemon of a root until stop, and returns when it is ready: its
// log says so, and its socket answers.
func (b *bench) start(ctx context.Context, root string, env ...string) (*daemon, error) {
	begin := time.Now()
	cmd := exec.Command(b.program, "run", "--root", root)
	cmd.Env = append(b.environ(), env...)
	log := &lastLines{ready: make(chan bool)}
	cmd.Stderr = log
	process, err := rig.Start(cmd)
	if err != nil {
		return nil, err
	}
	d := &daemon{pid: process.PID, client: web.NewClient(filepath.Join(root, "store", "berth.sock"))}
	d.stop = func() error {
		if err := process.Stop(); err != nil {
			return fmt.Errorf("the daemon: %w: %s", err, log)
		}
		return nil
	}
	select {
	case <-log.ready:
	case <-process.Ended():
		err = errors.New("the daemon ended")
	case <-time.After(stepBound):
		err = fmt.Errorf("the daemon is not ready after %v", stepBound)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err == nil {
		var status web.Status
		if status, err = d.client.Status(ctx); err == nil && !status.Ready {
			err = errors.New("the daemon says ready in its log but not in its status")
		}
	}
	if err != nil {
		return nil, errors.Join(err, d.stop())
	}
	d.ready = time.Since(begin)
	return d, nil
}

// lastLines keeps the end of a daemon's log, and tells when the daemon is ready.
type lastLines struct {
	ready chan bool // closed then

	mu   sync.Mutex
	end  []byte
	said bool
}

func (l *lastLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end = append(l.end, p...)
	if !l.said && bytes.Contains(l.end, []byte("\tready\t")) {
		l.said = true
		close(l.ready)
	}
	l.end = l.end[max(0, len(l.end)-2048):]
	return len(p), nil
}

func (l *lastLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.ReplaceAll(strings.TrimSpace(string(l.end)), "\n", "; ")
}

func (b *bench) environ() []string {
	return rig.Environ("HOME="+b.dir, "TZ=UTC", "AGENT_ENGINE=probe")
}

// memory measures the daemon and its containers at rest.
func (b *bench) memory(ctx context.Context, r *report) (err error) {
	root, err := b.makeRoot(ctx, "full", registered)
	if err != nil {
		return err
	}
	d, err := b.start(ctx, root)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	runs, err := d.fill(ctx)
	if err != nil {
		return err
	}
	daemon := row{what: fmt.Sprintf("daemon: resident memory, %d groups, %d idle runs", registered, slots), unit: mb}
	var anonymous []float64
	for range readings {
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
		for name, into := range map[string]*[]float64{"VmRSS": &daemon.ours, "RssAnon": &anonymous} {
			if err := resident(d.pid, name, into); err != nil {
				return err
			}
		}
	}
	runner := row{what: "runner in an idle container: resident memory", unit: mb}
	for _, run := range runs {
		i, err := b.bare.inspect(ctx, run.Container)
		if err != nil {
			return err
		}
		if i.label(docker.LabelInstall) != b.install {
			return errors.New("the daemon's containers do not carry the bench's install id: the key of the store has another name")
		}
		if err := resident(i.State.Pid, "VmRSS", &runner.ours); err != nil {
			return err
		}
	}
	if err := b.waiting(ctx, &daemon.floor, b.program, "send", "--root", root, "--group", group(0).Folder, "-"); err != nil {
		return err
	}
	if err := b.waiting(ctx, &runner.floor, filepath.Join(filepath.Dir(b.program), "agent-runner")); err != nil {
		return err
	}
	daemon.note = fmt.Sprintf("VmRSS of `berth run` soon after its %d runs had their first turn; %s of it are its own (RssAnon), the rest are pages of its file. The floor is the same program as `berth send`, waiting for its stdin.", slots, mb.write(p50(anonymous)))
	runner.note = "VmRSS of process 1 of each container after its first turn, as the host sees it. The floor is the same program outside a container, waiting for its stdin."
	r.add(daemon.atMost(40))
	r.add(runner.atMost(12))
	return nil
}

// fill gives every slot a run that had a turn and is idle.
func (d *daemon) fill(ctx context.Context) ([]web.Run, error) {
	for i := range slots {
		m, err := d.client.Send(ctx, web.NewMessage{Group: group(i).Folder, Text: "hello"})
		if err != nil {
			return nil, err
		}
		if a, err := d.client.Answer(ctx, m.Seq, stepBound); err != nil || a.State != web.AnswerDone {
			return nil, errors.Join(err, fmt.Errorf("a message was not answered: %s %s", a.State, a.Error))
		}
	}
	var runs []web.Run
	return runs, until(ctx, "all runs are idle", func() (bool, error) {
		s, err := d.client.Status(ctx)
		runs = s.Runs
		idle := len(runs) == slots
		for _, run := range runs {
			idle = idle && run.State == berth.RunIdle
		}
		return idle, err
	})
}

// resident appends a size from a process's status, in MB.
func resident(pid int, field string, into *[]float64) error {
	kib, err := rig.ProcField(fmt.Sprintf("/proc/%d/status", pid), field)
	*into = append(*into, float64(kib<<10)/1e6)
	return err
}

// waiting measures a program that waits for its stdin.
func (b *bench) waiting(ctx context.Context, into *[]float64, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = b.environ()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	err = pause(ctx, 300*time.Millisecond)
	if err == nil {
		err = resident(cmd.Process.Pid, "VmRSS", into)
	}
	stdin.Close()
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // killed
	return err
}

// ready measures the start of the daemon.
func (b *bench) ready(ctx context.Context, r *report) error {
	root, err := b.makeRoot(ctx, "ready", registered)
	if err != nil {
		return err
	}
	w := row{what: "ready after start, Docker up, image present", unit: ms,
		note: fmt.Sprintf("From the start of `berth run` on a root with %d groups to the first answer of its socket after the log says ready. The floor is the start of the same program as `berth version`, and four bare questions to the engine: version, info, images, containers.", registered)}
	for range starts {
		d, err := b.start(ctx, root)
		if err != nil {
			return err
		}
		if err := d.stop(); err != nil {
			return err
		}
		w.ours = append(w.ours, millis(d.ready))

		begin := time.Now()
		version := exec.CommandContext(ctx, b.program, "version")
		version.Env = b.environ()
		if err := version.Run(); err != nil {
			return err
		}
		for _, path := range []string{"/version", "/info", "/images/json", "/containers/json"} {
			if err := b.bare.call(ctx, "GET", path, nil, nil); err != nil {
				return err
			}
		}
		w.floor = append(w.floor, millis(time.Since(begin)))
	}
	r.add(w.atMost(300))
	return nil
}
