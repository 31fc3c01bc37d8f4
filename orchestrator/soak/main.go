// Command soak lets a hundred groups talk with Berth for a while, the real
// daemon with real containers, and meanwhile kills containers and the daemon and
// cuts the way to the container engine. In the end it counts what became of each
// message. It ends with exit code 0 only if nothing was lost, doubled, out of
// order or left behind.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/rig"
	"berth/orchestrator/internal/web"
)

const (
	groups   = 100
	doomed   = 3 // of the groups: their one message fails on purpose until it is given up
	slots    = 5
	patience = rig.Patience
	// settling is for all that was asked: a message that fails on purpose
	// waits 155 s between its attempts.
	settling = 6 * time.Minute
	idle     = 5 * time.Second
	progress = 30 * time.Second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // from then on a second signal ends the process at once
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

// soak is one play.
type soak struct {
	program string
	dir     string // everything on disk; removed at the end
	install string // label of everything on the engine; removed at the end
	rate    float64
	out     io.Writer
	engine  *docker.Engine // past the proxy
	raw     *engineSocket
	proxy   *proxy
	daemon  *daemon
	begun   time.Time
	quiet   time.Time // from then on the daemon is not killed

	mu     sync.Mutex
	random *rand.Rand
	chats  map[string]*chat
	counts counts
	killed map[string]bool // runs whose container was killed
}

// counts are the disturbances.
type counts struct{ containers, daemons, cuts int }

func (s *soak) root() string { return filepath.Join(s.dir, "root") }

func folder(i int) string { return fmt.Sprintf("g%03d", i) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	flags.SetOutput(stderr)
	program := flags.String("berth", "bin/berth", "the program to try, with agent-runner beside it")
	minutes := flags.Float64("minutes", 20, "how long messages are sent and things disturbed")
	out := flags.String("out", "", "file to write the table to, besides stdout")
	seed := flags.Uint64("seed", uint64(time.Now().Unix()), "of what is random")
	rate := flags.Float64("rate", 1.5, "single messages and bursts a second, in the mean")
	keep := flags.Bool("keep", false, "leave the folder with store and logs when something was found")
	if err := flags.Parse(args); err != nil {
		return err
	}
	syscall.Umask(0o022) // the agents are another user if this one is root
	s := &soak{
		install: "soak-" + berth.NewID(6), out: stdout, rate: *rate, begun: time.Now(),
		random: rand.New(rand.NewPCG(*seed, 0)), chats: make(map[string]*chat), killed: make(map[string]bool),
	}
	if s.program, err = rig.Program(*program); err != nil {
		return err
	}
	if s.raw, err = newEngineSocket(os.Getenv("DOCKER_HOST")); err != nil {
		return err
	}
	if s.engine, err = docker.New(docker.Options{Install: s.install, Host: os.Getenv("DOCKER_HOST")}); err != nil {
		return err
	}
	defer s.engine.Close()
	info, err := s.engine.Ping(ctx)
	if err != nil {
		return fmt.Errorf("the soak needs a Docker engine: %w", err)
	}
	if s.dir, err = os.MkdirTemp("", "berth-soak-"); err != nil {
		return err
	}
	found := 0
	defer func() { err = errors.Join(err, s.cleanUp(*keep && found > 0)) }()

	length := time.Duration(*minutes * float64(time.Minute))
	r := &report{at: s.begun, minutes: *minutes, seed: *seed, rate: *rate, cores: runtime.NumCPU(), memory: rig.Memory(), engine: info.Version, kinds: make(map[string]int)}
	if err := s.play(ctx, length, r); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
		return err
	}
	found = r.faults()
	r.took = time.Since(s.begun)
	fmt.Fprint(stdout, "\n"+r.markdown())
	if *out != "" {
		if err := os.MkdirAll(filepath.Dir(*out), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(*out, []byte(r.markdown()), 0o644); err != nil {
			return err
		}
	}
	if found > 0 {
		return fmt.Errorf("%d faults", found)
	}
	return nil
}

// play is the whole: start, storm, calm, audit, end.
func (s *soak) play(ctx context.Context, length time.Duration, r *report) error {
	if err := s.makeRoot(ctx); err != nil {
		return err
	}
	s.proxy = &proxy{path: filepath.Join(s.dir, "docker.sock"), to: s.raw}
	if err := s.proxy.open(); err != nil {
		return err
	}
	s.daemon = &daemon{soak: s, client: web.NewClient(filepath.Join(s.root(), "store", "berth.sock"))}
	if err := s.daemon.start(); err != nil {
		return err
	}
	if err := s.until(ctx, patience, "the daemon is ready", func(st web.Status) bool { return st.Ready }); err != nil {
		return err
	}
	// One message to each of a few groups first, so that the early sample is of
	// a daemon that has had runs.
	var warm sync.WaitGroup
	for i := range 2 * slots {
		warm.Go(func() { s.say(ctx, s.chat(folder(i)), plain) })
	}
	warm.Wait()
	if err := s.calm(ctx, time.Minute); err != nil {
		return err
	}
	var err error
	if r.early, err = s.daemon.sample(ctx); err != nil {
		return err
	}

	fmt.Fprintf(s.out, "%d groups, %d slots, %v: seed %d\n", groups, slots, length, r.seed)
	s.quiet = time.Now().Add(length * 2 / 3)
	storm, end := context.WithTimeout(ctx, length)
	defer end()
	// Messages under way at the end are still stored: ctx, not storm.
	var wg errgroup.Group
	wg.Go(func() error { return s.talk(ctx, storm) })
	wg.Go(func() error { return s.killContainers(ctx, storm) })
	wg.Go(func() error { return s.killDaemon(ctx, storm) })
	wg.Go(func() error { return s.loseEngine(ctx, storm) })
	told, quiet := context.WithCancel(ctx)
	defer quiet()
	var telling sync.WaitGroup
	defer telling.Wait()
	defer quiet()
	telling.Go(func() { s.tell(told) })
	if err := wg.Wait(); err != nil {
		return err
	}
	fmt.Fprintln(s.out, "no more messages and disturbances")
	if err := s.settle(ctx, r); err != nil {
		return err
	}
	quiet()
	telling.Wait()
	return s.audit(ctx, r)
}

// makeRoot makes the soak's state root.
func (s *soak) makeRoot(ctx context.Context) error {
	var all []berth.Group
	for i := range groups {
		f := folder(i)
		s.chats[f] = &chat{folder: f}
		all = append(all, berth.Group{JID: "console:" + f, Name: f, Folder: f, AddedAt: time.Now()})
	}
	return rig.MakeRoot(ctx, s.root(), s.install, all)
}

// cleanUp removes all that the soak made, also after a failure or a signal.
func (s *soak) cleanUp(keep bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if s.daemon != nil {
		s.daemon.kill()
	}
	if s.proxy != nil {
		s.proxy.cut()
	}
	err := rig.Clear(ctx, s.engine)
	if keep {
		fmt.Fprintln(s.out, "kept:", s.dir)
		return err
	}
	return errors.Join(err, os.RemoveAll(s.dir))
}

// chance draws from the seeded source.
func chance[T any](s *soak, draw func(*rand.Rand) T) T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return draw(s.random)
}

// between draws a time.
func (s *soak) between(from, to time.Duration) time.Duration {
	return from + time.Duration(chance(s, func(r *rand.Rand) int64 { return r.Int64N(int64(to - from)) }))
}

// soon draws the time until something that happens every so often.
func (s *soak) soon(mean time.Duration) time.Duration {
	return time.Duration(chance(s, (*rand.Rand).ExpFloat64) * float64(mean))
}

// pause reports false if ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// until waits for what the status must come to say.
func (s *soak) until(ctx context.Context, bound time.Duration, what string, ok func(web.Status) bool) error {
	var last web.Status
	for deadline := time.Now().Add(bound); time.Now().Before(deadline); {
		if st, err := s.daemon.client.Status(ctx); err == nil {
			if last = st; ok(st) {
				return nil
			}
		}
		if !pause(ctx, 50*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
	return fmt.Errorf("not within %v: %s; pool %+v, runs %+v, outbox %+v, alarms %q", bound, what, last.Pool, last.Runs, last.Outbox, last.Alarms)
}

// calm waits until there is no run and nothing to be sent.
func (s *soak) calm(ctx context.Context, bound time.Duration) error {
	return s.until(ctx, bound, "all runs have ended", func(st web.Status) bool {
		return st.Ready && st.Docker.Up && st.Pool.Used == 0 && len(st.Pool.Waiting) == 0 && len(st.Runs) == 0 && st.Outbox.Pending == 0
	})
}
