// Package gateway is the only way out of a container that has no network: a unix
// socket a run, in a folder that is mounted for that run alone. Who speaks on
// the socket is the run's group; nothing that is said there can change that.
//
// It puts the operator's keys into calls to a model provider, so that no key is
// ever inside a container; it lets other traffic through to the hosts of the
// group's egress list, and to public addresses only; it counts what providers
// report, and refuses what is over the group's budget.
//
// The other side of the socket is hostile. What it can occupy is bounded for
// each run: connections, bytes, time, memory and rows of audit.
package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/time/rate"

	"berth/orchestrator/internal/berth"
)

// Places inside the container.
const (
	Target = "/workspace/gateway"      // where a run's folder is mounted
	Socket = Target + "/" + socketName // what the runner forwards to
	Listen = "127.0.0.1:8787"          // where the runner forwards from
)

const socketName = "gateway.sock"

// Config is what all runs share.
type Config struct {
	Dir       string // absolute; holds one folder a run, and nothing else
	UID, GID  int    // the containers' user; what they need is handed to it if the daemon is root
	Anthropic Anthropic
	OpenAI    OpenAI
	Gemini    Gemini
	Location  *time.Location // in which a budget's day begins; nil: UTC
	Limits    Limits
	Resolver  *net.Resolver // for egress; nil: the system's
}

// Anthropic is the provider behind /anthropic. Its functions are asked at each
// request, from many goroutines; nil and "" mean that there is no such key. An
// API key comes before a token.
type Anthropic struct {
	BaseURL    string // without /v1; empty: https://api.anthropic.com
	APIKey     func() string
	OAuthToken func() string
}

// OpenAI is the OpenAI-compatible provider behind /openai.
type OpenAI struct {
	BaseURL string // with /v1, if the provider has it; empty: https://api.openai.com/v1
	APIKey  func() string
}

// Gemini is Google's provider behind /gemini.
type Gemini struct {
	BaseURL string // without /v1beta; empty: https://generativelanguage.googleapis.com
	APIKey  func() string
}

// Limits bound one run, so that a container hurts itself at most. Zero means the
// default.
type Limits struct {
	RequestBytes  int64         // of one body to a provider; 32 MiB
	EgressBytes   int64         // both ways, over the whole run; 4 GiB
	Connections   int           // open on the socket; further ones wait; 64
	Rate          int           // connections and requests a second, after a burst of four seconds' worth; further ones wait; 100
	Calls         int           // to providers at the same time; 16
	Tunnels       int           // egress requests at the same time; 32
	DialTimeout   time.Duration // with name lookup; 15 s
	HeaderTimeout time.Duration // from the end of a request to the begin of its answer; 10 min
	IdleTimeout   time.Duration // without a byte either way; 5 min
	TunnelTimeout time.Duration // of one egress request or tunnel; 2 h
}

func (l Limits) withDefaults() Limits {
	set(&l.RequestBytes, 32<<20)
	set(&l.EgressBytes, 4<<30)
	set(&l.Connections, 64)
	set(&l.Rate, 100)
	set(&l.Calls, 16)
	set(&l.Tunnels, 32)
	set(&l.DialTimeout, 15*time.Second)
	set(&l.HeaderTimeout, 10*time.Minute)
	set(&l.IdleTimeout, 5*time.Minute)
	set(&l.TunnelTimeout, 2*time.Hour)
	return l
}

func set[T int | int64 | time.Duration](field *T, def T) {
	if *field <= 0 {
		*field = def
	}
}

// Budget is what a group may use in a day; zero means without limit.
type Budget struct {
	Requests int64 // that may cost something: POST to a provider
	Tokens   int64 // of all kinds, cached ones too
}

// Run says whose socket is opened.
type Run struct {
	ID     string // of berth.Run: 1 to 64 letters, digits, - or _
	Folder string
	Egress []string // see ParseEgress
	Budget Budget
}

// Store keeps what the gateway counts and refuses. Its methods are called from
// many goroutines.
type Store interface {
	// AddUsage adds to what a group used. It is called soon after the answer,
	// and again later if it fails; usage that came meanwhile is then added up.
	AddUsage(context.Context, berth.Usage) error

	// AddAudit records a refusal. A run makes a row every 10 s at most, after a
	// burst of 60.
	AddAudit(context.Context, berth.Audit) error

	// Used returns the sums of requests, and of all kinds of tokens, that a
	// group used since then. It is called once a group and day, if the group
	// has a budget; on an error nothing is let through.
	Used(ctx context.Context, folder string, since time.Time) (requests, tokens int64, err error)
}

// The kinds of refusal, in berth.Audit.What.
const (
	KindEgress   = "egress"
	KindProvider = "provider"
	KindBudget   = "budget"
	KindLimit    = "limit"
)

// Gateway opens the sockets of runs. It is safe for concurrent use.
type Gateway struct {
	cfg       Config
	store     Store
	log       *zap.Logger
	providers []*provider
	upstream  *http.Transport
	ledger    ledger

	// What tests replace.
	now     func() time.Time
	refuses func(netip.AddrPort) string // why an address is not dialed, or an empty string

	mu    sync.Mutex
	doors map[string]*Door // open, by run
}

// New returns a Gateway. The error joins all that is wrong with the settings.
func New(c Config, s Store, log *zap.Logger) (*Gateway, error) {
	c.Limits = c.Limits.withDefaults()
	if c.Location == nil {
		c.Location = time.UTC
	}
	g := &Gateway{cfg: c, store: s, log: log, now: time.Now, refuses: refusesAddr, doors: make(map[string]*Door)}
	g.ledger.accounts = make(map[string]*account)
	var faults []error
	for _, make := range []func(Config) (*provider, error){newAnthropic, newOpenAI, newGemini} {
		p, err := make(c)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		g.providers = append(g.providers, p)
	}
	if !filepath.IsAbs(c.Dir) {
		faults = append(faults, errors.New("the folder of the sockets is no absolute path"))
	}
	g.upstream = &http.Transport{
		DialContext:         (&net.Dialer{Timeout: c.Limits.DialTimeout, KeepAlive: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout: c.Limits.DialTimeout,
		ForceAttemptHTTP2:   true, // a dialer of one's own switches it off
		DisableCompression:  true, // bytes pass as they are
		IdleConnTimeout:     90 * time.Second,
		MaxIdleConnsPerHost: 16,

		MaxResponseHeaderBytes: maxHeader,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second},
	}
	return g, errors.Join(faults...)
}

// maxHeader bounds the headers of a request and of an answer, in bytes.
const maxHeader = 64 << 10

// baseURL reads the address of a provider.
func baseURL(name, given, def string) (*url.URL, error) {
	if given == "" {
		given = def
	}
	u, err := url.Parse(given)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("the address of %s cannot be used: give one such as %s, without a password or a query in it", name, def)
	}
	u.Path, u.RawPath = strings.TrimRight(u.Path, "/"), strings.TrimRight(u.RawPath, "/")
	return u, nil
}

// refusesAddr is asked when the address is known, right before the connection:
// what a name meant a moment earlier proves nothing.
func refusesAddr(a netip.AddrPort) string {
	if why := blocked(a.Addr()); why != "" {
		return why
	}
	if isOwn(a.Addr()) {
		return "an address of the host itself"
	}
	return ""
}

// Door is the open socket of one run.
type Door struct {
	g      *Gateway
	run    Run
	dir    string
	egress Egress
	log    *zap.Logger

	ctx     context.Context // ends with the door
	server  *http.Server
	direct  *http.Transport // to the hosts of the egress list
	calls   chan struct{}   // slots
	tunnels chan struct{}
	pace    *rate.Limiter // of connections and requests
	budget  int64         // bytes of egress left; guarded by mu
	diary   *diary
	end     func() // once
	closed  sync.WaitGroup

	mu     sync.Mutex
	ending bool
	active sync.WaitGroup // requests; no Add once ending
}

var runPattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// Open makes the run's folder and socket and serves it until Close or Remove.
// For a run that an earlier daemon left, the same folder is used again, so that
// its container finds the new socket where the old one was. Errors are of kind
// berth.Invalid (the egress list), berth.Conflict (the run's socket is open) or
// berth.Unavailable (the folder).
func (g *Gateway) Open(r Run) (*Door, error) {
	if !runPattern.MatchString(r.ID) {
		return nil, berth.Errorf(berth.Invalid, "run id %q cannot name a folder", r.ID)
	}
	egress, err := ParseEgress(r.Egress)
	if err != nil {
		return nil, berth.Errorf(berth.Invalid, "%w", err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	d := &Door{
		g: g, run: r, dir: filepath.Join(g.cfg.Dir, r.ID), egress: egress, ctx: ctx,
		log:     g.log.With(zap.String("group", r.Folder), zap.String("run", r.ID)).WithOptions(zap.WrapCore(sampled)),
		calls:   make(chan struct{}, g.cfg.Limits.Calls),
		tunnels: make(chan struct{}, g.cfg.Limits.Tunnels),
		pace:    rate.NewLimiter(rate.Limit(g.cfg.Limits.Rate), 4*g.cfg.Limits.Rate),
		budget:  g.cfg.Limits.EgressBytes,
	}
	d.diary = newDiary(g.store, d.log)
	d.direct = &http.Transport{
		DialContext:            func(ctx context.Context, _, addr string) (net.Conn, error) { return d.dial(ctx, addr) },
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHeader,
		IdleConnTimeout:        30 * time.Second,
		MaxIdleConns:           g.cfg.Limits.Tunnels,
		MaxConnsPerHost:        g.cfg.Limits.Tunnels,
	}
	d.server = &http.Server{
		Handler:           http.HandlerFunc(d.serve),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    maxHeader,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          zap.NewStdLog(d.log),
	}
	d.end = sync.OnceFunc(func() { d.stop(cancel) })

	g.mu.Lock()
	defer g.mu.Unlock()
	if g.doors[r.ID] != nil {
		return nil, berth.Errorf(berth.Conflict, "the gateway of run %s is open already", r.ID)
	}
	l, err := g.listen(d.dir)
	if err != nil {
		return nil, berth.Errorf(berth.Unavailable, "open the gateway of run %s: %w", r.ID, err)
	}
	g.doors[r.ID] = d
	d.closed.Go(d.diary.write)
	d.closed.Go(func() {
		if err := d.server.Serve(newBounded(ctx, l, g.cfg.Limits.Connections, d.pace)); !errors.Is(err, http.ErrServerClosed) {
			d.log.Error("serve the gateway", zap.Error(err))
		}
	})
	return d, nil
}

// sampled keeps a container from filling the log with what it can provoke.
func sampled(core zapcore.Core) zapcore.Core {
	return zapcore.NewSamplerWithOptions(core, 10*time.Second, 20, 1000)
}

// Mount returns the mount that the container needs. It is read-only: connecting
// to the socket is not writing, and so the container cannot replace it.
func (d *Door) Mount() berth.Mount {
	return berth.Mount{Source: d.dir, Target: Target, ReadOnly: true}
}

// Socket returns where the container finds its end.
func (d *Door) Socket() string { return Socket }

// Close ends what is under way, waits for it, and writes down what is left to
// write, for 5 s at most. The folder stays, for a container that lives on.
// Calling it again is harmless.
func (d *Door) Close() { d.end() }

// Remove closes the door and removes the folder: the container is gone.
func (d *Door) Remove() error {
	d.end()
	if err := os.RemoveAll(d.dir); err != nil {
		return fmt.Errorf("remove the gateway of run %s: %w", d.run.ID, err)
	}
	return nil
}

func (d *Door) stop(cancel context.CancelCauseFunc) {
	d.mu.Lock()
	d.ending = true
	d.mu.Unlock()
	cancel(errClosed)
	d.server.Close()
	d.active.Wait()
	d.direct.CloseIdleConnections()
	d.diary.close()
	d.closed.Wait()
	d.g.mu.Lock()
	delete(d.g.doors, d.run.ID)
	d.g.mu.Unlock()
}

var errClosed = errors.New("the gateway was closed")

// Close closes all doors, at once, and leaves their folders for the next daemon.
func (g *Gateway) Close() {
	g.mu.Lock()
	var wg sync.WaitGroup
	for _, d := range g.doors {
		wg.Go(d.Close)
	}
	g.mu.Unlock()
	wg.Wait()
	g.upstream.CloseIdleConnections()
}

// Sweep removes the folders of runs that are not among live and whose sockets are
// not open here. It may be called while runs begin and end: live is asked after the
// folders were listed, so a run that it does not name is over.
func (g *Gateway) Sweep(live func() ([]string, error)) error {
	entries, err := os.ReadDir(g.cfg.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("sweep the gateway's folders: %w", err)
	}
	if len(entries) == 0 {
		return nil
	}
	runs, err := live()
	if err != nil {
		return fmt.Errorf("sweep the gateway's folders: %w", err)
	}
	var faults []error
	for _, entry := range entries {
		id := entry.Name()
		// The lock is held so that no run opens what is removed here.
		g.mu.Lock()
		if runPattern.MatchString(id) && g.doors[id] == nil && !slices.Contains(runs, id) {
			faults = append(faults, os.RemoveAll(filepath.Join(g.cfg.Dir, id)))
		}
		g.mu.Unlock()
	}
	return errors.Join(faults...)
}

// maxSocketPath is what the kernel takes as the path of a unix socket.
const maxSocketPath = 107

// listen makes the socket in dir, in place of one that an earlier daemon left.
func (g *Gateway) listen(dir string) (_ *net.UnixListener, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	path := filepath.Join(dir, socketName)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	address := path
	if len(address) > maxSocketPath {
		address = fmt.Sprintf("/proc/self/fd/%d/%s", f.Fd(), socketName)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: address, Net: "unix"})
	if err != nil {
		return nil, err
	}
	// The address may be one of a moment, and the container that lives on knows
	// what a socket means that nobody listens on.
	l.SetUnlinkOnClose(false)
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	if err := errors.Join(os.Chmod(path, 0o600), os.Chmod(dir, 0o700)); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return l, nil // containers run as this user
	}
	return l, errors.Join(os.Lchown(path, g.cfg.UID, g.cfg.GID), os.Lchown(dir, g.cfg.UID, g.cfg.GID))
}

// bounded lets no more than so many connections in at a time, and in a second.
// Further ones wait: the wait is the container's own.
type bounded struct {
	*net.UnixListener
	ctx   context.Context // ends with the door
	pace  *rate.Limiter
	slots chan struct{}
	done  chan struct{}
	close func() error
}

func newBounded(ctx context.Context, l *net.UnixListener, n int, pace *rate.Limiter) *bounded {
	b := &bounded{UnixListener: l, ctx: ctx, pace: pace, slots: make(chan struct{}, n), done: make(chan struct{})}
	b.close = sync.OnceValue(func() error {
		close(b.done)
		return l.Close()
	})
	return b
}

func (b *bounded) Accept() (net.Conn, error) {
	select {
	case b.slots <- struct{}{}:
	case <-b.done:
		return nil, net.ErrClosed
	}
	c, err := b.AcceptUnix()
	if err != nil {
		<-b.slots
		return nil, err
	}
	if b.pace.Wait(b.ctx) != nil {
		c.Close()
		<-b.slots
		return nil, net.ErrClosed
	}
	return &guest{UnixConn: c, release: sync.OnceFunc(func() { <-b.slots })}, nil
}

func (b *bounded) Close() error { return b.close() }

// guest is one connection of the container.
type guest struct {
	*net.UnixConn
	release func()
}

func (c *guest) Close() error {
	defer c.release()
	return c.UnixConn.Close()
}

// serve takes every request of the container.
func (d *Door) serve(w http.ResponseWriter, r *http.Request) {
	d.mu.Lock()
	if d.ending {
		d.mu.Unlock()
		panic(http.ErrAbortHandler)
	}
	d.active.Add(1)
	d.mu.Unlock()
	defer d.active.Done()

	if d.pace.Wait(r.Context()) != nil {
		panic(http.ErrAbortHandler)
	}
	switch {
	case r.Method == http.MethodConnect:
		d.tunnel(w, r)
	case r.URL.IsAbs() && !isSelf(r.URL.Host):
		d.forward(w, r)
	default:
		d.local(w, r)
	}
}

// isSelf reports whether host is the gateway as the container sees it: some
// clients ask their proxy for everything.
func isSelf(host string) bool {
	_, port, _ := net.SplitHostPort(Listen)
	return host == Listen || strings.EqualFold(host, "localhost:"+port)
}

// local serves what the gateway itself is asked for.
func (d *Door) local(w http.ResponseWriter, r *http.Request) {
	name, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.EscapedPath(), "/"), "/")
	for _, p := range d.g.providers {
		if p.name == name {
			d.call(w, r, p, "/"+rest)
			return
		}
	}
	if r.URL.EscapedPath() != "/" {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		writeRefusal(w, "path", "the gateway has /, /anthropic/, /openai/ and /gemini/; to reach a host, use it as a proxy")
		return
	}
	// An agent may ask what it can reach.
	var about struct {
		Gateway   string   `json:"gateway"`
		Providers []string `json:"providers"`
		Egress    []string `json:"egress"`
	}
	about.Gateway, about.Egress, about.Providers = "berth", d.egress.strings(), []string{}
	for _, p := range d.g.providers {
		if _, missing := p.credential(); missing == "" {
			about.Providers = append(about.Providers, p.name)
		}
	}
	writeJSON(w, http.StatusOK, about)
}

// refused is an error as an agent reads it.
type refused struct {
	Type    string `json:"type"`
	Message string `json:"message"`
}

// writeRefusal writes what an agent reads when something is refused that is no
// call to a provider.
func writeRefusal(w io.Writer, kind, reason string) {
	var v struct {
		Error refused `json:"error"`
	}
	v.Error = refused{Type: "berth_" + kind, Message: "berth's gateway: " + reason}
	_ = json.NewEncoder(w).Encode(v) // the container went away
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the container went away
}

// deny records a refusal.
func (d *Door) deny(kind, target, reason string) {
	d.diary.audit(berth.Audit{
		At: d.g.now(), Folder: d.run.Folder, RunID: d.run.ID,
		What: kind, Target: printable(target, 256), Reason: printable(reason, 512),
	})
}

// enter takes a slot, or reports false.
func enter(slots chan struct{}) bool {
	select {
	case slots <- struct{}{}:
		return true
	default:
		return false
	}
}

// hopHeaders belong to one connection and never pass.
var hopHeaders = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// isHop reports whether the header name of h belongs to the connection.
func isHop(h http.Header, name string) bool {
	if slices.Contains(hopHeaders, name) || strings.HasPrefix(name, "Proxy-") {
		return true
	}
	for _, value := range h["Connection"] {
		for token := range strings.SplitSeq(value, ",") {
			if http.CanonicalHeaderKey(strings.TrimSpace(token)) == name {
				return true
			}
		}
	}
	return false
}
