package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/rig"
	"berth/orchestrator/internal/web"
)

// daemon is a real `berth run` that is started again and again.
type daemon struct {
	*soak
	client *web.Client

	mu      sync.Mutex
	process *rig.Daemon
	wanted  bool // to be alive
	deaths  int  // that nobody wanted
}

func (d *daemon) logFile() string { return filepath.Join(d.dir, "berth.log") }

func (d *daemon) environ() []string {
	return rig.Environ("HOME="+d.dir, "TZ=UTC", "AGENT_ENGINE=probe", "DOCKER_HOST=unix://"+d.proxy.path,
		"MAX_CONCURRENT_CONTAINERS="+strconv.Itoa(slots), "IDLE_TIMEOUT="+idle.String(), "CONTAINER_TIMEOUT=30s")
}

func (d *daemon) start() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.startLocked()
}

func (d *daemon) startLocked() error {
	log, err := os.OpenFile(d.logFile(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(d.program, "run", "--root", d.root())
	cmd.Env, cmd.Dir, cmd.Stderr = d.environ(), d.dir, log
	process, err := rig.Start(cmd)
	if err != nil {
		return err
	}
	d.process, d.wanted = process, true
	go func() {
		<-process.Ended()
		d.mu.Lock()
		defer d.mu.Unlock()
		if !d.wanted || d.process != process {
			return
		}
		d.deaths++
		fmt.Fprintf(d.out, "the daemon ended by itself: %v\n", process.Err())
		if err := d.startLocked(); err != nil {
			fmt.Fprintf(d.out, "start it again: %v\n", err)
		}
	}()
	return nil
}

// unwant returns the process, whose end is wanted from now on; nil if it was
// never started.
func (d *daemon) unwant() *rig.Daemon {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wanted = false
	return d.process
}

// kill ends the daemon as a power cut would.
func (d *daemon) kill() {
	if process := d.unwant(); process != nil {
		process.Kill()
	}
}

// stop ends the daemon as an operator does.
func (d *daemon) stop() error { return d.unwant().Stop() }

// unused is longer than the Docker client keeps a connection that nobody uses.
const unused = 35 * time.Second

// sample returns the least that the daemon holds within some seconds: at any
// instant a question to the engine may be under way.
func (d *daemon) sample(ctx context.Context) (rig.Usage, error) {
	if !pause(ctx, unused) {
		return rig.Usage{}, context.Cause(ctx)
	}
	var least rig.Usage
	for i := range 8 {
		if !pause(ctx, 500*time.Millisecond) {
			return rig.Usage{}, context.Cause(ctx)
		}
		d.mu.Lock()
		pid := d.process.PID
		d.mu.Unlock()
		now, err := rig.Measure(pid)
		if err != nil {
			return rig.Usage{}, err
		}
		if i == 0 {
			least = now
		}
		least = least.Least(now)
	}
	return least, nil
}

// engineSocket is the Docker engine without a client library: internal/docker
// has no kill, since Berth has no use for one.
type engineSocket struct {
	network, address string
	http             *http.Client
}

func newEngineSocket(host string) (*engineSocket, error) {
	if host == "" {
		host = docker.DefaultHost
	}
	network, address, ok := strings.Cut(host, "://")
	if !ok || network != "unix" && network != "tcp" || os.Getenv("DOCKER_CERT_PATH") != "" {
		return nil, fmt.Errorf("DOCKER_HOST=%s: the soak can use unix:///path and plain tcp://host:port only", host)
	}
	e := &engineSocket{network: network, address: address}
	e.http = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return e.dial(ctx) },
	}}
	return e, nil
}

func (e *engineSocket) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, e.network, e.address)
}

var errNotRunning = errors.New("the container does not run")

// kill is docker kill.
func (e *engineSocket) kill(ctx context.Context, id string) error {
	req, err := http.NewRequestWithContext(ctx, "POST", "http://docker/containers/"+id+"/kill", nil)
	if err != nil {
		return err
	}
	resp, err := e.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusNoContent:
		return nil
	case http.StatusNotFound, http.StatusConflict:
		return errNotRunning
	}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 1024))
	return fmt.Errorf("kill a container: %s: %s", resp.Status, bytes.TrimSpace(text))
}

// proxy passes the daemon's connections on to the Docker engine until it is cut.
type proxy struct {
	path string
	to   *engineSocket

	mu    sync.Mutex
	l     net.Listener
	conns map[net.Conn]bool // nil while it is cut
}

func (p *proxy) open() error {
	if err := os.Remove(p.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", p.path)
	if err != nil {
		return err
	}
	conns := make(map[net.Conn]bool)
	p.mu.Lock()
	p.l, p.conns = l, conns
	p.mu.Unlock()
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go p.pass(l, in)
		}
	}()
	return nil
}

// pass carries one connection. Either side may end its half first: that is how
// stdin of a container ends.
func (p *proxy) pass(l net.Listener, in net.Conn) {
	defer in.Close()
	out, err := p.to.dial(context.Background())
	if err != nil {
		return
	}
	defer out.Close()
	p.mu.Lock()
	if p.l != l {
		p.mu.Unlock()
		return
	}
	p.conns[in], p.conns[out] = true, true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.conns, in)
		delete(p.conns, out)
	}()
	var wg sync.WaitGroup
	half := func(to, from net.Conn) {
		_, _ = io.Copy(to, from) // cut
		if c, ok := to.(interface{ CloseWrite() error }); ok {
			_ = c.CloseWrite()
		}
	}
	wg.Go(func() { half(out, in) })
	half(in, out)
	// Without the engine nobody listens any more.
	in.Close()
	wg.Wait()
}

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.l == nil {
		return
	}
	p.l.Close()
	for c := range p.conns {
		c.Close()
	}
	p.l, p.conns = nil, nil
}
