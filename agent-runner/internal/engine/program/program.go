// Package program runs an agent program for an engine: a process that speaks
// lines of JSON on its stdin and stdout. What the program prints is bounded, its
// end is explained, and its calls to the model's provider are watched.
package program

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/protocol"
)

// Bounds, in bytes.
const (
	maxLine   = 16 << 20 // of stdout; longer ones are skipped
	maxUnsent = 64 << 20 // for a program that does not read
	maxLogged = 64 << 10 // of what the program prints, in the run's log
	maxShown  = 512      // of one line of it
	maxTail   = 2 << 10  // of stderr, to explain an end
)

const (
	drainGrace = 500 * time.Millisecond // to read on after the end: a daemon may hold the pipe
	termGrace  = 2 * time.Second        // between SIGTERM and SIGKILL
)

// Spec is a program to run.
type Spec struct {
	Name     string   // for people
	Install  string   // what to do if the image does not have it
	Args     []string // program and arguments
	Dir      string
	Env      []string // all of it: nothing is inherited
	Children *reap.Children
	Log      *log.Logger
}

// Program is a process under way. Its methods may be called from many
// goroutines.
type Program struct {
	spec   Spec
	cmd    *exec.Cmd
	gone   chan struct{}
	log    *budget
	stderr tail

	mu      sync.Mutex
	unsent  [][]byte
	size    int
	more    chan struct{} // has room for one: something was added to unsent
	closing bool          // stdin ends after what is unsent
	ended   bool          // the process is reaped: its number is not ours any more
	killed  bool          // by us
}

// Find returns an error of protocol.ClassImage if the image does not have s's
// program.
func (s *Spec) Find() error {
	if _, err := exec.LookPath(s.Args[0]); err != nil {
		return s.missing(err)
	}
	return nil
}

func (s *Spec) missing(err error) error {
	s.Log.Printf("%s: %v", s.Name, err)
	return &engine.Error{
		Class: protocol.ClassImage,
		Text:  fmt.Sprintf("%s is not in this image: %s is missing or cannot run. The operator installs it there (%s) or chooses another engine.", s.Name, s.Args[0], s.Install),
	}
}

// Start starts the program in a process group of its own. Each line of its stdout
// goes to line, which must not keep it, from one goroutine, until Gone is closed.
func Start(s Spec, line func([]byte)) (*Program, error) {
	var pipes [3]struct{ r, w *os.File }
	for i := range pipes {
		var err error
		if pipes[i].r, pipes[i].w, err = os.Pipe(); err != nil {
			return nil, fmt.Errorf("make a pipe for %s: %w", s.Name, err)
		}
	}
	stdin, stdout, stderr := pipes[0], pipes[1], pipes[2]
	p := &Program{
		spec: s, gone: make(chan struct{}), more: make(chan struct{}, 1),
		log: &budget{log: s.Log, name: s.Name, left: maxLogged},
	}
	p.cmd = exec.Command(s.Args[0], s.Args[1:]...)
	p.cmd.Dir, p.cmd.Env = s.Dir, s.Env
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = stdin.r, stdout.w, stderr.w
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err := s.Children.Start(p.cmd)
	_, _, _ = stdin.r.Close(), stdout.w.Close(), stderr.w.Close()
	if err != nil {
		_, _, _ = stdin.w.Close(), stdout.r.Close(), stderr.r.Close()
		// Also a program for another libc or another kind of processor.
		return nil, s.missing(err)
	}

	var readers, writer sync.WaitGroup
	readers.Go(func() { p.read(stdout.r, line) })
	readers.Go(func() {
		p.eachLine(stderr.r, func(b []byte) {
			p.stderr.write(b)
			p.log.print("stderr", b)
		})
	})
	stop := make(chan struct{})
	writer.Go(func() { p.write(stdin.w, stop) })
	go func() {
		defer close(p.gone)
		_ = reap.AwaitExit(p.cmd)
		p.mu.Lock()
		// The program is a zombie until Wait: its number cannot be another group's yet.
		_ = unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL)
		_ = s.Children.Wait(p.cmd) // the state says how it ended
		p.ended = true
		p.mu.Unlock()
		close(stop)
		_ = stdin.w.Close() // ends a write that waits
		writer.Wait()
		late := time.AfterFunc(drainGrace, func() { _, _ = stdout.r.Close(), stderr.r.Close() })
		readers.Wait()
		late.Stop()
		_, _ = stdout.r.Close(), stderr.r.Close()
	}()
	return p, nil
}

func (p *Program) read(r io.Reader, line func([]byte)) {
	p.eachLine(r, func(b []byte) {
		if b = bytes.TrimSpace(b); len(b) > 0 {
			line(b)
		}
	})
}

func (p *Program) eachLine(r io.Reader, f func([]byte)) {
	skipped := lines(r, maxLine, f)
	if skipped > 0 {
		p.spec.Log.Printf("%s printed %d lines of more than %d bytes: they were skipped", p.spec.Name, skipped, maxLine)
	}
}

// Send gives the program v as a line of JSON. It does not wait for the program to
// read it; what a program that is gone is given is lost. One that does not read
// what is meant for it is an error.
func (p *Program) Send(v any) error {
	data, err := protocol.Marshal(v)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended || p.closing {
		return nil
	}
	if p.size+len(data)+1 > maxUnsent {
		return fmt.Errorf("%s does not read what it is given", p.spec.Name)
	}
	p.size += len(data) + 1
	p.unsent = append(p.unsent, append(data, '\n'))
	p.wake()
	return nil
}

// wake tells the writer to look again.
func (p *Program) wake() {
	select {
	case p.more <- struct{}{}:
	default:
	}
}

func (p *Program) write(w *os.File, stop <-chan struct{}) {
	for {
		p.mu.Lock()
		next, closing := p.unsent, p.closing
		p.unsent, p.size = nil, 0
		p.mu.Unlock()
		for _, data := range next {
			if _, err := w.Write(data); err != nil {
				return // gone, or it closed its stdin: what else it does tells more
			}
		}
		if len(next) > 0 {
			continue
		}
		if closing {
			_ = w.Close()
			return
		}
		select {
		case <-p.more:
		case <-stop:
			return
		}
	}
}

// Garbage takes down in the run's log that the program printed what it must not.
func (p *Program) Garbage(line []byte, why error) { p.log.print(why.Error(), line) }

// Gone is closed when the program has ended and all its lines were handed over.
func (p *Program) Gone() <-chan struct{} { return p.gone }

// Stderr returns the end of what the program said there.
func (p *Program) Stderr() string { return p.stderr.String() }

// Fault explains the end of a program that nobody asked to end. It may be called
// after Gone.
func (p *Program) Fault() error {
	state := p.cmd.ProcessState
	status := state.Sys().(syscall.WaitStatus)
	code := state.ExitCode()
	said := p.Stderr()
	p.spec.Log.Printf("%s ended by itself: %v", p.spec.Name, state)
	p.mu.Lock()
	killed := p.killed
	p.mu.Unlock()
	if !killed && status.Signaled() && status.Signal() == unix.SIGKILL || code == 137 {
		return p.outOfMemory()
	}
	if code == 126 || code == 127 {
		return p.spec.missing(fmt.Errorf("%v: %s", state, said))
	}
	text := fmt.Sprintf("%s ended in the middle of its work (%v)", p.spec.Name, state)
	if said != "" {
		text += ": " + said
	}
	return &engine.Error{Text: text}
}

func (p *Program) outOfMemory() error {
	return &engine.Error{
		Class: protocol.ClassMemory,
		Text:  fmt.Sprintf("%s was killed, most likely because the container's memory is used up. The operator can give this group more of it.", p.spec.Name),
	}
}

// Close ends the program's input and waits until it has ended; after grace it is
// told to end, and then killed, with all of its group.
func (p *Program) Close(grace time.Duration) {
	p.mu.Lock()
	p.closing, p.killed = true, true
	p.wake()
	p.mu.Unlock()
	for _, step := range []struct {
		signal unix.Signal
		wait   time.Duration
	}{{0, grace}, {unix.SIGTERM, termGrace}} {
		p.signal(step.signal)
		timer := time.NewTimer(step.wait)
		select {
		case <-p.gone:
			timer.Stop()
			return
		case <-timer.C:
		}
	}
	p.Kill()
}

// Kill ends the program and its group at once and waits for that.
func (p *Program) Kill() {
	p.mu.Lock()
	p.killed = true
	p.mu.Unlock()
	p.signal(unix.SIGKILL)
	<-p.gone
}

func (p *Program) signal(s unix.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s != 0 && !p.ended {
		_ = unix.Kill(-p.cmd.Process.Pid, s)
	}
}

// budget is a log for what a program prints: only so much of it.
type budget struct {
	log  *log.Logger
	name string

	mu   sync.Mutex
	left int
}

func (b *budget) print(what string, line []byte) {
	text := strings.TrimSpace(clip(string(line), maxShown))
	b.mu.Lock()
	defer b.mu.Unlock()
	if text == "" || b.left <= 0 {
		return
	}
	b.log.Printf("%s: %s: %q", b.name, what, text)
	if b.left -= len(text); b.left <= 0 {
		b.log.Printf("%s prints a lot: further lines are not shown", b.name)
	}
}

// tail keeps the end of what it is given.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

func (t *tail) write(line []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(append(t.buf, line...), '\n')
	t.buf = append(t.buf[:0], t.buf[max(0, len(t.buf)-maxTail):]...)
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(strings.ToValidUTF8(string(t.buf), ""))
}

func clip(s string, limit int) string {
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.ToValidUTF8(s, "")
}
