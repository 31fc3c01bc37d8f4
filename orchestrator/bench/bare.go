package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
)

// bare talks to the Docker engine without a client library.
type bare struct {
	network, address string
	http             *http.Client
}

func newBare(host string) (*bare, error) {
	if host == "" {
		host = docker.DefaultHost
	}
	network, address, ok := strings.Cut(host, "://")
	if !ok || network != "unix" && network != "tcp" || os.Getenv("DOCKER_CERT_PATH") != "" {
		return nil, fmt.Errorf("DOCKER_HOST=%s: the bench can use unix:///path and plain tcp://host:port only", host)
	}
	b := &bare{network: network, address: address}
	b.http = &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 8,
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return b.dial(ctx) },
	}}
	return b, nil
}

func (b *bare) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, b.network, b.address)
}

// call sends in as JSON, if it is not nil, and decodes the answer into out, if
// that is not nil.
func (b *bare) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://docker"+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := b.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, bytes.TrimSpace(data))
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(data, out)
}

func (b *bare) remove(ctx context.Context, id string) error {
	return b.call(ctx, "DELETE", "/containers/"+id+"?force=1&v=1", nil, nil)
}

// inspected is what the engine says about a container.
type inspected struct {
	State      struct{ Pid int }
	Config     map[string]any
	HostConfig map[string]any
}

func (b *bare) inspect(ctx context.Context, id string) (i inspected, err error) {
	return i, b.call(ctx, "GET", "/containers/"+id+"/json", nil, &i)
}

func (i inspected) label(name string) string {
	labels, _ := i.Config["Labels"].(map[string]any)
	value, _ := labels[name].(string)
	return value
}

// twin is what a bare start needs to make the container that Berth made.
type twin struct {
	create map[string]any
	stdin  []byte
}

func (b *bare) twin(ctx context.Context, id string, stdin []byte) (twin, error) {
	i, err := b.inspect(ctx, id)
	if err != nil {
		return twin{}, err
	}
	delete(i.Config, "Hostname") // the id of the first one
	i.Config["HostConfig"] = i.HostConfig
	return twin{create: i.Config, stdin: stdin}, nil
}

// unhardened is the same program with the same folders, but else as the engine makes
// a container when nothing is asked for: root with the usual rights, no limits, a
// root file system that can be written, a log. It has no network either, for that
// is what a start without one does not pay.
func (t twin) unhardened() twin {
	host, _ := t.create["HostConfig"].(map[string]any)
	plain := map[string]any{"HostConfig": map[string]any{"Mounts": host["Mounts"], "NetworkMode": host["NetworkMode"]}}
	for _, name := range []string{"Image", "Labels", "Env", "OpenStdin", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr"} {
		plain[name] = t.create[name]
	}
	return twin{create: plain, stdin: t.stdin}
}

// start creates a container, attaches, starts it, hands it its stdin, and
// returns when its first byte is here.
func (b *bare) start(ctx context.Context, t twin) (id string, err error) {
	var made struct{ Id string }
	if err := b.call(ctx, "POST", "/containers/create?name=berth-bench-floor-"+berth.NewID(6), t.create, &made); err != nil {
		return "", err
	}
	conn, err := b.dial(ctx)
	if err != nil {
		return made.Id, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	_, err = fmt.Fprintf(conn, "POST /containers/%s/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n", made.Id)
	if err != nil {
		return made.Id, err
	}
	stream := bufio.NewReader(conn)
	resp, err := http.ReadResponse(stream, nil)
	if err != nil {
		return made.Id, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols && resp.StatusCode != http.StatusOK {
		return made.Id, fmt.Errorf("attach: %s", resp.Status)
	}
	if err := b.call(ctx, "POST", "/containers/"+made.Id+"/start", nil, nil); err != nil {
		return made.Id, err
	}
	if _, err := conn.Write(t.stdin); err != nil {
		return made.Id, err
	}
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		err = half.CloseWrite()
	}
	if err == nil {
		_, err = io.ReadFull(stream, make([]byte, 9)) // a header of the multiplexed stream, and a byte
	}
	return made.Id, err
}

// startAll starts all twins at once and returns how long the last one took. The
// containers are removed when it returns.
func (b *bare) startAll(ctx context.Context, twins []twin) (time.Duration, error) {
	ids, errs := make([]string, len(twins)), make([]error, len(twins))
	var wg sync.WaitGroup
	begin := time.Now()
	for i, t := range twins {
		wg.Go(func() { ids[i], errs[i] = b.start(ctx, t) })
	}
	wg.Wait()
	took := time.Since(begin)
	for _, id := range ids {
		if id != "" {
			errs = append(errs, b.remove(ctx, id))
		}
	}
	return took, errors.Join(errs...)
}

// watch calls each for every event in a folder, from one bare inotify reader,
// until that fails or the returned file is closed.
func watch(dir string, mask uint32, each func() error) (io.Closer, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	events := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, dir, mask); err != nil {
		return nil, errors.Join(err, events.Close())
	}
	go func() {
		for buf := make([]byte, 4096); ; {
			if _, err := events.Read(buf); err != nil || each() != nil {
				return
			}
		}
	}()
	return events, nil
}

// bareWatch writes n files beside a folder's names and renames them. It appends
// how long each took, from before it was written and from before it was renamed,
// until one inotify reader had seen it and put that on disk by a synced append,
// as Berth too keeps what it did.
func bareWatch(ctx context.Context, dir string, n int, written, renamed *[]float64) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	journal, err := os.OpenFile(filepath.Join(dir, "journal"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer journal.Close()
	seen := make(chan time.Time, 1)
	events, err := watch(dir, unix.IN_MOVED_TO, func() error {
		if _, err := journal.Write(record); err != nil {
			return err
		}
		if err := journal.Sync(); err != nil {
			return err
		}
		seen <- time.Now()
		return nil
	})
	if err != nil {
		return err
	}
	defer events.Close()
	tmp, name := filepath.Join(dir, ".tmp"), filepath.Join(dir, "message.json")
	for range n {
		beforeWrite := time.Now()
		if err := os.WriteFile(tmp, record, 0o600); err != nil {
			return err
		}
		beforeRename := time.Now()
		if err := os.Rename(tmp, name); err != nil {
			return err
		}
		at, err := next(ctx, "a renamed file is seen", seen)
		if err != nil {
			return err
		}
		*written = append(*written, millis(at.Sub(beforeWrite)))
		*renamed = append(*renamed, millis(at.Sub(beforeRename)))
		if err := os.Remove(name); err != nil {
			return err
		}
		if err := pause(ctx, pace); err != nil {
			return err
		}
	}
	return nil
}

// record stands for a message on disk.
var record = bytes.Repeat([]byte("x"), 200)
