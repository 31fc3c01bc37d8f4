package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/sqlite"
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

// makeRoot makes a state root whose daemon labels its containers with the
// bench's own install id, so that whatever happens they are found again.
func (b *bench) makeRoot(ctx context.Context, name string, groups int) (root string, err error) {
	root = filepath.Join(b.dir, name)
	if err := os.MkdirAll(filepath.Join(root, "store"), 0o700); err != nil {
		return "", err
	}
	db, err := sqlite.Open(ctx, filepath.Join(root, "store", "messages.db"), func(string, bool) {})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := db.SetState(ctx, "install", b.install); err != nil {
		return "", err
	}
	for i := range groups {
		if err := db.AddGroup(ctx, group(i)); err != nil {
			return "", err
		}
	}
	return root, nil
}

// start runs the daemon of a root until stop, and returns when it is ready: its
// log says so, and its socket answers.
func (b *bench) start(ctx context.Context, root string) (*daemon, error) {
	begin := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, b.program, "run", "--root", root)
	cmd.Env = b.environ()
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 15 * time.Second
	log, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	var said []string
	ready, ended := make(chan bool, 1), make(chan bool)
	go func() {
		defer close(ended)
		for lines := bufio.NewScanner(log); lines.Scan(); {
			line := lines.Text()
			if said = append(said, line); len(said) > 5 {
				said = said[1:]
			}
			if strings.Contains(line, "\tready\t") {
				select {
				case ready <- true:
				default: // said before
				}
			}
		}
	}()
	d := &daemon{pid: cmd.Process.Pid, client: web.NewClient(filepath.Join(root, "store", "berth.sock"))}
	d.stop = func() error {
		cancel()
		<-ended
		if err := cmd.Wait(); err != nil && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("the daemon: %w: %s", err, strings.Join(said, "; "))
		}
		return nil
	}
	select {
	case <-ready:
	case <-ended:
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

func (b *bench) environ() []string {
	env := []string{"HOME=" + b.dir, "TZ=UTC", "AGENT_ENGINE=probe"}
	for _, name := range []string{"PATH", "DOCKER_HOST"} {
		if value := os.Getenv(name); value != "" {
			env = append(env, name+"="+value)
		}
	}
	return env
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
	kib, err := procField(fmt.Sprintf("/proc/%d/status", pid), field)
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
