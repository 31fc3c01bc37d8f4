// Command attack lets one group do to the real daemon whatever a container can do
// to it, all at once, while other groups go on talking, and says what came of each
// attack. It ends with exit code 0 only if nothing outside of the group's own
// folders was read, changed or removed, and no message of the others was lost or
// doubled.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/rig"
	"berth/orchestrator/internal/web"
)

const (
	attacker = "evil"
	settling = 40 * time.Second // for what the storm left open in the daemon
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // from then on a second signal ends the process at once
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "attack:", err)
		os.Exit(1)
	}
}

// play is one performance.
type play struct {
	program string
	dir     string // everything on disk; removed at the end
	install string // label of everything on the engine; removed at the end
	storm   time.Duration
	only    string // programs of the attacker; empty: all
	cpuset  string // as the setting CONTAINER_CPUSET
	keep    bool
	out     io.Writer
	begun   time.Time
	engine  *docker.Engine
	client  *web.Client
	daemon  *rig.Daemon
	traps   *traps
	secrets secrets
	victims *victims
	report  report
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	flags := flag.NewFlagSet("attack", flag.ContinueOnError)
	flags.SetOutput(stderr)
	program := flags.String("berth", "bin/berth", "the program to attack, with agent-runner beside it")
	seconds := flags.Int("seconds", 40, "how long the storm of attacks lasts, at least 20")
	only := flags.String("only", "", "for the storm, start only these of the attacker's programs, such as \"files besiege\", to see what costs what")
	cpuset := flags.String("cpuset", "auto", "the daemon's CONTAINER_CPUSET, to see what a processor of its own is worth to it")
	keep := flags.Bool("keep", false, "leave the folder with store and logs")
	if err := flags.Parse(args); err != nil {
		return err
	}
	syscall.Umask(0o022) // the agents are another user if this one is root
	p := &play{storm: max(20, time.Duration(*seconds)) * time.Second, out: stdout, begun: time.Now(), install: "attack-" + berth.NewID(6)}
	p.only, p.keep, p.cpuset = *only, *keep, *cpuset
	p.report.out, p.report.partial = stdout, *only != ""
	if p.program, err = rig.Program(*program); err != nil {
		return err
	}
	p.engine, err = docker.New(docker.Options{Install: p.install, Host: os.Getenv("DOCKER_HOST"), TLSDir: os.Getenv("DOCKER_CERT_PATH")})
	if err != nil {
		return err
	}
	defer p.engine.Close()
	if _, err := p.engine.Ping(ctx); err != nil {
		return fmt.Errorf("the attack needs a Docker engine: %w", err)
	}
	if p.dir, err = os.MkdirTemp("", "berth-attack-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.cleanUp()) }()
	if err := p.perform(ctx); err != nil {
		if ctx.Err() != nil {
			p.say("interrupted")
			return errors.New("interrupted")
		}
		fmt.Fprintln(stderr, lastLines(p.log(), 20))
		return err
	}
	return p.report.end(time.Since(p.begun))
}

func (p *play) root() string      { return filepath.Join(p.dir, "root") }
func (p *play) canaries() string  { return filepath.Join(p.dir, "canary") }
func (p *play) open() string      { return filepath.Join(p.dir, "host", "open") }
func (p *play) allowlist() string { return filepath.Join(p.dir, "config", "mount-allowlist.json") }
func (p *play) own(name string) string {
	return filepath.Join(p.root(), "groups", attacker, name)
}

func (p *play) log() string {
	text, _ := os.ReadFile(filepath.Join(p.dir, "berth.log"))
	return string(text)
}

// say tells how far the play is.
func (p *play) say(format string, args ...any) {
	fmt.Fprintf(p.out, "%4.0f s: %s\n", time.Since(p.begun).Seconds(), fmt.Sprintf(format, args...))
}

// perform is the whole: calm, work, storm, a second run, and what is left of it all.
func (p *play) perform(ctx context.Context) error {
	if err := p.prepare(ctx); err != nil {
		return err
	}
	if err := p.victims.greet(ctx); err != nil {
		return err
	}
	if err := p.tell(ctx, "run echo the container is there"); err != nil {
		return err
	}
	if err := p.arm(ctx); err != nil {
		return err
	}
	before, err := p.measure(ctx)
	if err != nil {
		return err
	}
	if p.secrets, err = p.guarded(); err != nil {
		return err
	}

	quiet := p.storm / 2
	p.say("calm: %d groups talk for %v without attacks", len(folders), quiet)
	talk, hush := context.WithCancel(ctx)
	defer hush()
	talking := p.victims.talk(ctx, talk)
	defer talking.Wait()
	defer hush()
	talking.Go(func() { p.progress(talk) })
	if err := pause(ctx, quiet); err != nil {
		return err
	}

	p.victims.enter(work)
	p.say("work: the same while one group computes, as any agent may")
	if err := p.tell(ctx, "run ./inside compute "+strconv.Itoa(int(quiet.Seconds()))); err != nil {
		return err
	}

	p.victims.enter(storm)
	p.say("storm: one group attacks for %v, with %d programs at once", p.storm, 10)
	if err := p.attack(ctx); err != nil {
		return err
	}
	p.victims.enter(calm)
	hush()
	talking.Wait()

	p.say("no more messages; looking at what is left")
	if err := p.judge(ctx, before); err != nil {
		return err
	}
	if err := p.daemon.Stop(); err != nil {
		return err
	}
	return p.inspect(ctx)
}

// progress tells every so often how the victims are.
func (p *play) progress(ctx context.Context) {
	for pause(ctx, 10*time.Second) == nil {
		n, p50, p99 := p.victims.lately()
		p.say("%s: %d answers to the others, p50 %.1f ms, p99 %.1f ms", p.victims.now(), n, millis(p50), millis(p99))
	}
}

// tell gives the attacker a message and waits for its answer.
func (p *play) tell(ctx context.Context, text string) error {
	m, err := p.client.Send(ctx, web.NewMessage{Group: attacker, Text: text})
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(p.storm + 90*time.Second); time.Now().Before(deadline); {
		a, err := p.client.Answer(ctx, m.Seq, 10*time.Second)
		if err != nil {
			return err
		}
		if a.State == web.AnswerFailed {
			return fmt.Errorf("the attacker's container failed: %s", a.Error)
		}
		if a.State == web.AnswerDone {
			return nil
		}
	}
	return fmt.Errorf("the attacker was not answered: %.60q", text)
}

// attack is all that the attacker does, in two runs.
func (p *play) attack(ctx context.Context) error {
	if err := p.tell(ctx, "run ./inside forge"); err != nil {
		return err
	}
	p.report.mounts("mounts, at the first run", p.verdicts(ctx), firstRun)
	env := p.environ()
	if err := p.tell(ctx, "run ONLY='"+p.only+"' "+env+" ./inside all "+strconv.Itoa(int(p.storm.Seconds()))); err != nil {
		return err
	}
	// The end of the run is its own wish this time.
	if err := p.tell(ctx, "run ./inside end"); err != nil {
		return err
	}
	first := p.runOf(ctx)
	p.report.add("process", "write _close itself", p.gone(ctx, first), `^its own run ended`)

	if _, err := p.client.UpdateGroup(ctx, attacker, web.GroupChange{Engine: new("probe")}); err != nil {
		return err
	}
	for _, step := range []string{
		"say hello",
		"env",
		"forge FORGED-without-nonce\nforge-nonce FORGED-with-nonce\nsay forged",
		"flood 67108864\nflood-line 67108864\nsay poured",
		"big 2000000",
		"session ../../../canary\nsay session",
	} {
		begun := time.Now()
		err := p.tell(ctx, step)
		p.report.second(step, time.Since(begun), err)
		if step == "say hello" {
			p.report.mounts("mounts, at the second run", p.verdicts(ctx), secondRun)
		}
	}
	// Neither the host's wish nor SIGTERM ends the next one. The broken frame of
	// the last step ends this one.
	p.report.add("process", "a broken frame", p.gone(ctx, p.runOf(ctx)), `^its own run ended`)
	if _, err := p.client.Send(ctx, web.NewMessage{Group: attacker, Text: "mkdir /workspace/ipc/input/_close/x\nignore-term\nhang"}); err != nil {
		return err
	}
	var run web.Run
	for deadline := time.Now().Add(2 * rig.Patience); run.State != berth.RunBusy; run = p.runOf(ctx) {
		if time.Now().After(deadline) {
			return errors.New("the attacker's last run does not start")
		}
		if err := pause(ctx, 500*time.Millisecond); err != nil {
			return err
		}
	}
	if _, err := p.client.StopGroup(ctx, attacker); err != nil {
		return err
	}
	p.report.add("process", "a folder named _close, deaf to SIGTERM, stopped", p.gone(ctx, run), `^its own run ended`)
	return nil
}

func (p *play) runOf(ctx context.Context) web.Run {
	s, err := p.client.Status(ctx)
	if err != nil {
		return web.Run{}
	}
	for _, r := range s.Runs {
		if r.Group == attacker {
			return r
		}
	}
	return web.Run{}
}

// gone waits until a run of the attacker has ended, and says how long it took.
func (p *play) gone(ctx context.Context, r web.Run) string {
	begun := time.Now()
	for now := r; now.ID == r.ID && r.ID != ""; now = p.runOf(ctx) {
		if time.Since(begun) > 2*rig.Patience {
			return fmt.Sprintf("the run is still %s after %v", now.State, 2*rig.Patience)
		}
		if pause(ctx, 200*time.Millisecond) != nil {
			return "interrupted"
		}
	}
	return fmt.Sprintf("its own run ended %.0f s later, and nothing else", time.Since(begun).Seconds())
}

func (p *play) verdicts(ctx context.Context) []web.MountVerdict {
	groups, err := p.client.Groups(ctx)
	if err != nil {
		return nil
	}
	for _, g := range groups {
		if g.Folder == attacker {
			return g.Mounts
		}
	}
	return nil
}

// arm builds the attacker's tools into its own folder, as an agent with a compiler
// would.
func (p *play) arm(ctx context.Context) error {
	for name, pkg := range map[string]string{"inside": "berth/orchestrator/attack/inside", "hardening": "berth/orchestrator/testdata/hardening"} {
		build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", p.own(name), pkg)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w: %s", pkg, err, out)
		}
	}
	// A program of root's that makes its user root, as an operator may leave one.
	text, err := os.ReadFile(p.own("hardening"))
	if err == nil {
		err = os.WriteFile(p.own("setuid"), text, 0o755)
	}
	if err == nil {
		err = os.Chmod(p.own("setuid"), 0o755|os.ModeSetuid)
	}
	return err
}

// measure returns the least that the daemon holds within a few seconds.
func (p *play) measure(ctx context.Context) (rig.Usage, error) {
	least, err := rig.Measure(p.daemon.PID)
	for range 10 {
		if err != nil {
			break
		}
		if err = pause(ctx, 200*time.Millisecond); err != nil {
			break
		}
		var now rig.Usage
		if now, err = rig.Measure(p.daemon.PID); err == nil {
			least = least.Least(now)
		}
	}
	return least, err
}

// cleanUp removes all that the play made, also after a failure or a signal.
func (p *play) cleanUp() error {
	ctx, cancel := context.WithTimeout(context.Background(), rig.Patience)
	defer cancel()
	p.say("cleaning up")
	if p.daemon != nil {
		p.daemon.Kill()
	}
	if p.traps != nil {
		p.traps.close()
	}
	err := rig.Clear(ctx, p.engine)
	p.say("the containers are gone; removing what they wrote")
	if p.keep {
		fmt.Fprintln(p.out, "kept:", p.dir)
		return err
	}
	return errors.Join(err, os.RemoveAll(p.dir))
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
