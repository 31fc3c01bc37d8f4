// Package watest is a WhatsApp server for tests: it listens on loopback, speaks
// the real protocol, and has phones and peers of its own whose devices encrypt
// and decrypt for themselves. The client under test is an unmodified whatsmeow.
//
//	s := watest.Start(t)
//	phone := s.Phone("15550001111")
//	alice := s.Peer("15550002222", "Alice")
//	g := s.Group(watest.LID, "Family", alice, phone)
//	s.Apply(client)
//	s.Link(client, phone)
//	alice.SendText(g, "hello")
//	answer := alice.Received(ctx)
//
// All methods may be called from any goroutine, and what fails ends the test.
// Nothing sleeps: each wait ends with its event, its context, or after 30 s.
//
// Two globals of the libraries are set once, by the first server: whatsmeow's
// root key, and the logger of libsignal, which would print to stdout.
package watest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/coder/websocket"
	"go.mau.fi/libsignal/logger"
	"go.mau.fi/whatsmeow"
	waBinary "go.mau.fi/whatsmeow/binary"
	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/util/keys"
)

type (
	node  = waBinary.Node
	attrs = waBinary.Attrs
)

// patience bounds each wait, so that a lost event is a failure and not a hang.
const patience = 30 * time.Second

// TB is what a server needs of a test.
type TB interface {
	Helper()
	Fatalf(format string, args ...any)
	Cleanup(func())
}

// Server is the double. Its lock guards all of the simulated world, the Signal
// stores of the simulated devices too.
type Server struct {
	t      TB
	url    *url.URL
	http   *http.Server
	static *keys.KeyPair
	life   context.Context
	end    context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	changed  chan struct{}
	accounts map[string]*account // by the digits of the number, and of the LID
	people   []*account
	groups   map[string]*Group
	order    []*Group
	conns    map[*conn]bool
	media    map[string][]byte
	seen     []Seen
	trace    io.Writer
	serial   int
	revision uint32
	required uint32

	fullUpload bool
	certs      Certificates
	faults     faults
}

// Seen is a stanza that a client sent.
type Seen struct {
	From types.JID // empty before it is linked
	Node waBinary.Node
}

// Start serves until the test ends.
func Start(t TB) *Server {
	t.Helper()
	s, err := Serve("127.0.0.1:0")
	if err != nil {
		t.Fatalf("watest: %v", err)
	}
	s.t = t
	t.Cleanup(s.Close)
	return s
}

// Serve serves at a loopback address until Close. Without a test, what fails
// panics with an error.
func Serve(address string) (*Server, error) {
	globals()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	if !listener.Addr().(*net.TCPAddr).IP.IsLoopback() {
		return nil, errors.Join(fmt.Errorf("%s is not a loopback address", address), listener.Close())
	}
	s := &Server{
		t:        alone{},
		url:      &url.URL{Scheme: "http", Host: listener.Addr().String()},
		static:   keys.NewKeyPair(),
		changed:  make(chan struct{}),
		accounts: map[string]*account{},
		groups:   map[string]*Group{},
		conns:    map[*conn]bool{},
		media:    map[string][]byte{},
		revision: 1047451014,
		certs:    Certificates{NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour)},
	}
	s.life, s.end = context.WithCancel(context.Background())
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ws/chat", s.serveSocket)
	mux.HandleFunc("POST /mms/{kind}/{token}", s.serveUpload)
	mux.HandleFunc("DELETE /mms/{kind}/{token}", s.serveDelete)
	mux.HandleFunc("GET /media/{name}", s.serveDownload)
	mux.HandleFunc("GET /{$}", s.servePage)
	s.http = &http.Server{Handler: mux}
	s.wg.Go(func() { _ = s.http.Serve(listener) })
	return s, nil
}

// alone stands in for a test.
type alone struct{}

func (alone) Helper()                           {}
func (alone) Cleanup(func())                    {}
func (alone) Fatalf(format string, args ...any) { panic(fmt.Errorf(format, args...)) }

type quiet struct{}

func (quiet) Debug(string, string)   {}
func (quiet) Info(string, string)    {}
func (quiet) Warning(string, string) {}
func (quiet) Error(string, string)   {}
func (quiet) Configure(string)       {}

var globals = sync.OnceFunc(func() {
	whatsmeow.WACertPubKey = Root()
	var silent logger.Loggable = quiet{}
	logger.Setup(&silent)
})

// Root is the key that a client in another process has to trust in place of
// WhatsApp's; URL is the address that it has to dial.
func Root() [32]byte { return *rootKey().Pub }

// URL is the address that stands for all of WhatsApp's hosts.
func (s *Server) URL() string { return s.url.String() }

// Close ends all connections and waits for them.
func (s *Server) Close() {
	s.end()
	_ = s.http.Close()
	s.mu.Lock()
	for c := range s.conns {
		c.cancel()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// rewrite sends each request to the double, whatever its host.
type rewrite struct {
	to   *url.URL
	next *http.Transport
}

func (r rewrite) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	request.Host = cmp.Or(request.Host, request.URL.Host)
	request.URL.Scheme, request.URL.Host = r.to.Scheme, r.to.Host
	return r.next.RoundTrip(request)
}

func (r rewrite) CloseIdleConnections() { r.next.CloseIdleConnections() }

// HTTPClient reaches the double under WhatsApp's own addresses, and nothing else.
func (s *Server) HTTPClient() *http.Client {
	transport := &http.Transport{}
	context.AfterFunc(s.life, transport.CloseIdleConnections)
	return &http.Client{Transport: rewrite{s.url, transport}}
}

// Apply points a client at the double. It comes before Connect.
func (s *Server) Apply(client *whatsmeow.Client) {
	h := s.HTTPClient()
	client.SetPreLoginHTTPClient(h)
	client.SetWebsocketHTTPClient(h)
	client.SetMediaHTTPClient(h)
}

func (s *Server) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("watest: %v", err)
	}
}

// do runs a step of the simulated world.
func (s *Server) do(step func() error) {
	s.t.Helper()
	s.must(s.try(step))
}

func (s *Server) try(step func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.announceLocked()
	return step()
}

func (s *Server) announceLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// wait returns when done, which is asked under the lock after each change.
func (s *Server) wait(ctx context.Context, what string, done func() bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("nothing in %v", patience))
	defer cancel()
	for {
		s.mu.Lock()
		ok, changed := done(), s.changed
		s.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-s.life.Done():
			return fmt.Errorf("wait for %s: the server is closed", what)
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", what, context.Cause(ctx))
		}
	}
}

// Wait returns when done says so. It is asked after each change, and may call
// the methods of the server.
func (s *Server) Wait(ctx context.Context, what string, done func() bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("nothing in %v", patience))
	defer cancel()
	for {
		s.mu.Lock()
		changed := s.changed
		s.mu.Unlock()
		if done() {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			s.must(fmt.Errorf("wait for %s: %w", what, context.Cause(ctx)))
		}
	}
}

// Trace writes all stanzas of all connections to w.
func (s *Server) Trace(w io.Writer) {
	s.do(func() error { s.trace = w; return nil })
}

func (s *Server) traceLocked(direction string, c *conn, n *waBinary.Node) {
	if s.trace != nil {
		who := "-"
		if c.device != nil {
			who = c.device.pn().String()
		}
		fmt.Fprintln(s.trace, direction, who, n.String())
	}
}

func (s *Server) sendLocked(c *conn, n node) {
	if !c.closed {
		s.traceLocked("<-", c, &n)
		c.send(n)
	}
}

// Stanzas are those with this tag that clients have sent so far.
func (s *Server) Stanzas(tag string) []Seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []Seen
	for _, seen := range s.seen {
		if seen.Node.Tag == tag {
			found = append(found, seen)
		}
	}
	return found
}

func (s *Server) idLocked() string {
	s.serial++
	return fmt.Sprintf("%d.%d", 4000+s.serial/1000, s.serial)
}

func now() string { return strconv.FormatInt(time.Now().Unix(), 10) }

// Revision sets the number that WhatsApp's page tells as the newest client's,
// and whether older clients are refused as outdated.
func (s *Server) Revision(revision uint32, required bool) {
	s.do(func() error {
		s.revision, s.required = revision, 0
		if required {
			s.required = revision
		}
		return nil
	})
}

// FullUpload makes a newly linked client upload 812 one-time keys, as the real
// server does. Otherwise the server claims to have one already, and 50 do: making
// the keys is most of the time that linking takes.
func (s *Server) FullUpload() { s.do(func() error { s.fullUpload = true; return nil }) }

// Certify replaces the certificates of the handshake.
func (s *Server) Certify(c Certificates) {
	s.do(func() error { s.certs = c; return nil })
}

func (s *Server) servePage(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(w, `<script>{"client_revision":%d,"x":1}</script>`, s.revision)
}

func (s *Server) serveSocket(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	down, certs := s.faults.down, s.certs
	s.faults.dials++
	s.announceLocked()
	s.mu.Unlock()
	if down {
		http.Error(w, "down", http.StatusServiceUnavailable)
		return
	}
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return
	}
	defer func() { _ = ws.CloseNow() }()
	c := newConn(s.life, ws)
	s.mu.Lock()
	closing := s.life.Err() != nil
	if !closing {
		s.conns[c] = true
		s.wg.Add(1) // for this handler: a hijacked connection is not the http server's
	}
	s.mu.Unlock()
	if closing {
		return
	}
	defer s.wg.Done()
	defer s.lost(c)
	defer c.cancel()
	chain, err := certs.chain(s.static)
	if err != nil {
		return
	}
	payload, err := c.handshake(s.static, chain)
	if err != nil {
		return
	}
	var writer sync.WaitGroup
	defer writer.Wait()
	defer c.cancel()
	writer.Go(c.write)
	s.do(func() error { s.welcomeLocked(c, payload); return nil })
	for {
		n, err := c.readNode()
		if err != nil {
			return
		}
		s.do(func() error { s.handleLocked(c, n); return nil })
	}
}

func (s *Server) lost(c *conn) {
	s.do(func() error { s.dropLocked(c); return nil })
}

// dropLocked forgets a connection, as if the cable had been pulled.
func (s *Server) dropLocked(c *conn) {
	c.cancel()
	delete(s.conns, c)
	if c.closed {
		return
	}
	c.closed = true
	if d := c.device; d != nil && d.conn == c {
		d.conn, d.active = nil, false
	}
}

// endLocked says a last word and hangs up when the client has taken it: whatsmeow
// loses what it read but has not handled when the connection ends. It handles in
// order, so its answer to a notification tells that it has come so far.
func (s *Server) endLocked(c *conn, last node) {
	s.sendLocked(c, last)
	c.farewell = s.idLocked()
	s.sendLocked(c, serverNotification(c.farewell, "farewell"))
	c.closed = true
	if d := c.device; d != nil && d.conn == c {
		d.conn, d.active = nil, false
	}
}

func (s *Server) handleLocked(c *conn, n *node) {
	s.traceLocked("->", c, n)
	if c.closed {
		if n.Tag == "ack" && stringOf(n, "id") == c.farewell {
			c.cancel()
		}
		return
	}
	seen := Seen{Node: *n}
	if c.device != nil {
		seen.From = c.device.pn()
	}
	s.seen = append(s.seen, seen)
	switch n.Tag {
	case "iq":
		s.iqLocked(c, n)
	case "message":
		if c.device != nil {
			s.messageLocked(c.device, n)
		}
	case "receipt":
		if c.device != nil {
			s.receiptLocked(c.device, n)
		}
	case "ack":
		if c.device != nil {
			s.ackLocked(c.device, n)
		}
	case "chatstate":
		if c.device != nil {
			s.chatstateLocked(c.device, n)
		}
	}
}

// group finds a group by its subject or JID, for the control.
func (s *Server) group(name string) (*Group, error) {
	i := slices.IndexFunc(s.order, func(g *Group) bool { return g.subject == name || g.JID.String() == name })
	if i < 0 {
		return nil, fmt.Errorf("no group %q", name)
	}
	return s.order[i], nil
}
