package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
)

const key = "sk-test-0123456789abcdefSECRET"

func theKey() string { return key }

// memory is a store in memory that can be told to fail.
type memory struct {
	mu       sync.Mutex
	usage    []berth.Usage
	audits   []berth.Audit
	requests int64
	tokens   int64
	asked    int
	err      error
}

func (m *memory) AddUsage(_ context.Context, u berth.Usage) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil {
		m.usage = append(m.usage, u)
	}
	return m.err
}

func (m *memory) AddAudit(_ context.Context, a berth.Audit) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil {
		m.audits = append(m.audits, a)
	}
	return m.err
}

func (m *memory) Used(context.Context, string, time.Time) (int64, int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked++
	return m.requests, m.tokens, m.err
}

func (m *memory) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

// kinds returns what was refused, as "kind target".
func (m *memory) kinds() (out []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range m.audits {
		out = append(out, a.What+" "+a.Target)
	}
	return out
}

// rig is a gateway with one open door and a client in the container's place.
type rig struct {
	*Gateway
	store  *memory
	door   *Door
	client *http.Client
}

func newRig(t testing.TB, c Config, r Run) *rig {
	t.Helper()
	c.Dir, c.UID, c.GID = filepath.Join(t.TempDir(), "gateway"), os.Getuid(), os.Getgid()
	log := zap.NewNop()
	if _, ok := t.(*testing.T); ok {
		log = zaptest.NewLogger(t)
	} else {
		c.Limits.Rate = 1 << 20 // what is measured is not the wait
	}
	store := &memory{}
	g, err := New(c, store, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	if r.ID == "" {
		r.ID, r.Folder = "run1", "family"
	}
	d, err := g.Open(r)
	if err != nil {
		t.Fatal(err)
	}
	return &rig{Gateway: g, store: store, door: d, client: client(t, d)}
}

// client returns a client that reaches the door as "http://gateway/".
func client(t testing.TB, d *Door) *http.Client {
	transport := &http.Transport{
		DisableCompression: true,
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return dialDoor(ctx, d) },
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{
		Transport:     transport,
		Timeout:       30 * time.Second,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// dialDoor connects as a container does, however long the path is.
func dialDoor(ctx context.Context, d *Door) (net.Conn, error) {
	dir, err := os.Open(d.Mount().Source)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return new(net.Dialer).DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), socketName))
}

// do sends a request and reads the answer.
func (r *rig) do(t testing.TB, method, path, body string, header ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://gateway"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	resp, err := r.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(data)
}

// raw sends bytes and returns the answer to a request with that method.
func (r *rig) raw(t testing.TB, method, text string) (*http.Response, string, net.Conn) {
	t.Helper()
	c, err := dialDoor(t.Context(), r.door)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: method})
	if err != nil {
		t.Fatal(err)
	}
	if method == http.MethodConnect && resp.StatusCode == http.StatusOK {
		return resp, "", c
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body), c
}

// upstream serves a provider on loopback.
func upstream(t testing.TB, handle http.HandlerFunc) string {
	s := httptest.NewServer(handle)
	t.Cleanup(s.Close)
	return s.URL
}

// leaks returns a check that goroutines and descriptors are as many as now.
func leaks(t *testing.T) func() {
	t.Helper()
	descriptors := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("no /proc here")
		}
		return len(entries)
	}
	goroutines, files := runtime.NumGoroutine(), descriptors()
	return func() {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > goroutines || descriptors() > files; runtime.Gosched() {
			if time.Now().After(deadline) {
				stacks := make([]byte, 1<<20)
				t.Fatalf("%d goroutines, want %d; %d descriptors, want %d\n%s", runtime.NumGoroutine(), goroutines, descriptors(), files, stacks[:runtime.Stack(stacks, true)])
			}
		}
	}
}

// TestFolder: what the container gets is one socket, for its user alone, mounted
// read-only; a run that an earlier daemon left keeps its folder.
func TestFolder(t *testing.T) {
	r := newRig(t, Config{}, Run{})
	m := r.door.Mount()
	if want := (berth.Mount{Source: filepath.Join(r.cfg.Dir, "run1"), Target: "/workspace/gateway", ReadOnly: true}); m != want {
		t.Errorf("mount %+v, want %+v", m, want)
	}
	for path, want := range map[string]fs.FileMode{m.Source: fs.ModeDir | 0o700, filepath.Join(m.Source, socketName): fs.ModeSocket | 0o600} {
		info, err := os.Lstat(path)
		if err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v, want %v", path, info.Mode(), err, want)
		}
	}
	if _, err := r.Open(r.door.run); kindOf(err) != berth.Conflict {
		t.Errorf("a second door of the run: %v", err)
	}

	before, err := os.Stat(m.Source)
	if err != nil {
		t.Fatal(err)
	}
	r.door.Close()
	r.door.Close()
	again, err := r.Open(r.door.run)
	if err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(again.Mount().Source)
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("the folder is another one (%v): a container that lives on would not see the new socket", err)
	}
	if resp, err := client(t, again).Get("http://gateway/"); err != nil || resp.StatusCode != 200 {
		t.Errorf("the new socket does not answer: %v", err)
	} else {
		resp.Body.Close()
	}
	if err := again.Remove(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(m.Source); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder is left after Remove: %v", err)
	}
}

func kindOf(err error) berth.Kind {
	known, ok := errors.AsType[*berth.Error](err)
	if !ok {
		return berth.Internal
	}
	return known.Kind
}

func TestLongPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 40))
	g, err := New(Config{Dir: dir, UID: os.Getuid(), GID: os.Getgid()}, &memory{}, zaptest.NewLogger(t))
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	d, err := g.Open(Run{ID: "run1"})
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client(t, d).Get("http://gateway/")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
}

func TestOpenRefuses(t *testing.T) {
	r := newRig(t, Config{}, Run{})
	for _, run := range []Run{{ID: ""}, {ID: "../x"}, {ID: "a/b"}, {ID: strings.Repeat("a", 65)}, {ID: "ok", Egress: []string{"10.0.0.1"}}} {
		if _, err := r.Open(run); kindOf(err) != berth.Invalid {
			t.Errorf("%+v: %v, want an Invalid error", run, err)
		}
	}
	_, err := New(Config{Dir: "relative", Anthropic: Anthropic{BaseURL: "ftp://x"}, OpenAI: OpenAI{BaseURL: "https://user:pw@x"}, Gemini: Gemini{BaseURL: "https://x/?key=pw"}}, &memory{}, zap.NewNop())
	if err == nil || strings.Count(err.Error(), "\n") != 3 || strings.Contains(err.Error(), "pw") {
		t.Errorf("New: %v, want four faults and no password", err)
	}
}

func TestSweep(t *testing.T) {
	r := newRig(t, Config{}, Run{})
	for _, id := range []string{"gone", "live"} {
		if err := os.Mkdir(filepath.Join(r.cfg.Dir, id), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	unread := errors.New("the store cannot be read")
	if err := r.Sweep(func() ([]string, error) { return nil, unread }); !errors.Is(err, unread) {
		t.Errorf("a sweep that knows of no run: %v", err)
	}
	// What begins after the folders were listed is left alone.
	err := r.Sweep(func() ([]string, error) {
		return []string{"live"}, os.Mkdir(filepath.Join(r.cfg.Dir, "new"), 0o700)
	})
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(r.cfg.Dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if want := []string{"live", "new", "run1"}; !slices.Equal(names, want) {
		t.Errorf("left are %v, want %v", names, want)
	}
}

// W57: the socket says whose request it is; nothing that is said on it, and no
// likeness of names, makes it another's.
func TestW57OneGroupASocket(t *testing.T) {
	base := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"model":"m","usage":{"input_tokens":3,"output_tokens":4}}`)
	})
	r := newRig(t, Config{Anthropic: Anthropic{BaseURL: base, APIKey: theKey}}, Run{})
	other, err := r.Open(Run{ID: "run2", Folder: "Fam_ily"})
	if err != nil {
		t.Fatal(err)
	}
	r.do(t, "POST", "/anthropic/v1/messages", "{}", "X-Berth-Group", "work", "X-Berth-Run", "run2", "Host", "work")
	resp, err := client(t, other).Post("http://family/anthropic/v1/messages?run=run1", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	r.Close()
	got := map[string]string{}
	for _, u := range r.store.usage {
		got[u.RunID] = u.Folder
	}
	if len(r.store.usage) != 2 || got["run1"] != "family" || got["run2"] != "Fam_ily" {
		t.Errorf("usage %+v", r.store.usage)
	}
}

func TestAbout(t *testing.T) {
	r := newRig(t, Config{OpenAI: OpenAI{APIKey: theKey}}, Run{ID: "r", Egress: []string{"API.Example.org", "*.Bücher.example:8443", "[2606:4700::1111]:53"}})
	resp, body := r.do(t, "GET", "/", "")
	want := `{"gateway":"berth","providers":["openai"],"egress":["api.example.org","*.xn--bcher-kva.example:8443","[2606:4700::1111]:53"]}` + "\n"
	if resp.StatusCode != 200 || body != want {
		t.Errorf("got %d %s, want %s", resp.StatusCode, body, want)
	}
	if resp, body := r.do(t, "GET", "/other/thing", ""); resp.StatusCode != 404 || !strings.Contains(body, "/anthropic/") {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
}

// TestNothingIsLeft: after a storm of all kinds of use, cut off in the middle, no
// goroutine and no descriptor stays.
func TestNothingIsLeft(t *testing.T) {
	arrived := make(chan struct{}, 100)
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {}\n\n")
		http.NewResponseController(w).Flush()
		arrived <- struct{}{}
		<-r.Context().Done()
	}))
	defer slow.Close()
	echo := echoServer(t)
	check := leaks(t)

	dns := newDNS(t)
	dns.set("slow.example.org.", "127.0.0.1")
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(slow.URL, "http://"))
	g, err := New(Config{
		Dir: t.TempDir(), UID: os.Getuid(), GID: os.Getgid(), Anthropic: Anthropic{BaseURL: slow.URL}, Resolver: dns.resolver(),
	}, &memory{}, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	permit(g, slow.Listener.Addr(), echo)
	d, err := g.Open(Run{ID: "r", Egress: []string{"slow.example.org:" + port, fmt.Sprintf("slow.example.org:%d", echo.(*net.TCPAddr).Port)}})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() { // calls
			c := client(t, d)
			defer c.CloseIdleConnections()
			if resp, err := c.Post("http://gateway/anthropic/v1/messages", "", strings.NewReader("{}")); err == nil {
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
		wg.Go(func() { // plain requests
			c, err := dialDoor(t.Context(), d)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			fmt.Fprintf(c, "GET http://slow.example.org:%s/ HTTP/1.1\r\nHost: x\r\n\r\n", port)
			io.Copy(io.Discard, c)
		})
		wg.Go(func() { // tunnels
			c, err := dialDoor(t.Context(), d)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			fmt.Fprintf(c, "CONNECT slow.example.org:%d HTTP/1.1\r\nHost: x\r\n\r\nhello", echo.(*net.TCPAddr).Port)
			buf := make([]byte, 1024)
			for got := ""; !strings.HasSuffix(got, "hello"); {
				n, err := c.Read(buf)
				if err != nil {
					t.Error(err)
					break
				}
				got += string(buf[:n])
			}
			arrived <- struct{}{}
			io.Copy(io.Discard, c)
		})
	}
	for range 15 {
		<-arrived
	}
	g.Close()
	wg.Wait()
	dns.close()
	slow.CloseClientConnections()
	check()
}

// A container that comes again and again waits, and no other does.
func TestPace(t *testing.T) {
	r := newRig(t, Config{Limits: Limits{Rate: 1}}, Run{})
	ask := func(c *http.Client, patience time.Duration) error {
		c.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://gateway/", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	for range 2 { // a connection and a request each
		if err := ask(r.client, 10*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	if err := ask(r.client, 50*time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("beyond the burst: %v", err)
	}
	other, err := r.Open(Run{ID: "run2", Folder: "work"})
	if err != nil {
		t.Fatal(err)
	}
	if err := ask(client(t, other), 10*time.Second); err != nil {
		t.Error(err)
	}
}
