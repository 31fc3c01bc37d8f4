package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"berth/orchestrator/internal/berth"
)

// dns is a name server whose answers a test may change between two questions.
type dns struct {
	conn net.PacketConn
	done chan struct{}

	mu      sync.Mutex
	answers map[string][][]netip.Addr // by name with its dot: for each question, the last one repeats
	asked   []string
}

func newDNS(t testing.TB) *dns {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &dns{conn: conn, done: make(chan struct{}), answers: make(map[string][][]netip.Addr)}
	go d.serve()
	t.Cleanup(d.close)
	return d
}

func (d *dns) close() {
	d.conn.Close()
	<-d.done
}

// set says what the name means; each argument answers one question for A, and
// may hold several addresses with commas between them.
func (d *dns) set(name string, answers ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.answers[name] = nil
	for _, list := range answers {
		var addrs []netip.Addr
		for a := range strings.SplitSeq(list, ",") {
			addrs = append(addrs, netip.MustParseAddr(a))
		}
		d.answers[name] = append(d.answers[name], addrs)
	}
}

// names returns what was looked up.
func (d *dns) names() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.asked)
}

func (d *dns) resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", d.conn.LocalAddr().String())
	}}
}

func (d *dns) serve() {
	defer close(d.done)
	buf := make([]byte, 1500)
	for {
		n, from, err := d.conn.ReadFrom(buf)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		q := m.Questions[0]
		reply := dnsmessage.Message{Header: dnsmessage.Header{ID: m.ID, Response: true, Authoritative: true}, Questions: m.Questions}
		d.mu.Lock()
		name := strings.ToLower(q.Name.String())
		d.asked = append(d.asked, name)
		left := d.answers[name]
		if len(left) == 0 {
			reply.RCode = dnsmessage.RCodeNameError
		}
		for _, a := range slices.Concat(left[:min(1, len(left))]...) {
			h := dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, Type: q.Type}
			if a.Is4() && q.Type == dnsmessage.TypeA {
				reply.Answers = append(reply.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AResource{A: a.As4()}})
			}
			if a.Is6() && q.Type == dnsmessage.TypeAAAA {
				reply.Answers = append(reply.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AAAAResource{AAAA: a.As16()}})
			}
		}
		if q.Type == dnsmessage.TypeA && len(left) > 1 {
			d.answers[name] = left[1:]
		}
		d.mu.Unlock()
		if packed, err := reply.Pack(); err == nil {
			_, _ = d.conn.WriteTo(packed, from)
		}
	}
}

// permit lets the gateway take these addresses for public ones; all others are
// judged as always.
func permit(g *Gateway, public ...net.Addr) {
	g.refuses = func(a netip.AddrPort) string {
		if slices.ContainsFunc(public, func(p net.Addr) bool { return p.String() == a.String() }) {
			return ""
		}
		return refusesAddr(a)
	}
}

// echoServer returns what it gets, until the other side ends its half.
func echoServer(t testing.TB) net.Addr {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() { l.Close() })
	return l.Addr()
}

// open returns a rig that may reach the servers by the name web.example.org.
func openTo(t testing.TB, limits Limits, servers ...net.Addr) (*rig, *dns, []string) {
	t.Helper()
	d := newDNS(t)
	d.set("web.example.org.", "127.0.0.1")
	var egress []string
	for _, s := range servers {
		egress = append(egress, fmt.Sprintf("web.example.org:%d", s.(*net.TCPAddr).Port))
	}
	r := newRig(t, Config{Resolver: d.resolver(), Limits: limits}, Run{ID: "run1", Folder: "family", Egress: egress})
	permit(r.Gateway, servers...)
	return r, d, egress
}

func TestTunnel(t *testing.T) {
	r, _, egress := openTo(t, Limits{}, echoServer(t))
	// What follows the request in the same packet is not lost.
	_, _, c := r.raw(t, "CONNECT", "CONNECT WEB.example.org.:"+strings.Split(egress[0], ":")[1]+" HTTP/1.1\r\nHost: other\r\nProxy-Authorization: Basic eA==\r\n\r\nearly ")
	if _, err := io.WriteString(c, "late"); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.UnixConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil || !strings.HasSuffix("early late", string(got)) {
		t.Errorf("got %q, %v", got, err)
	}
}

// unread is the connection of a client that reads nothing of what it is answered.
type unread struct {
	net.Conn
	writing  chan struct{}
	deadline func(net.Conn, time.Time) error
}

func (u *unread) Write(p []byte) (int, error) {
	close(u.writing) // there is one answer
	return u.Conn.Write(p)
}

func (u *unread) SetWriteDeadline(at time.Time) error { return u.deadline(u.Conn, at) }

// Hijack and what follows make it the server's side of a request.
func (u *unread) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return u, bufio.NewReadWriter(bufio.NewReader(u.Conn), bufio.NewWriter(u.Conn)), nil
}
func (u *unread) Header() http.Header { return nil }
func (u *unread) WriteHeader(int)     {}

// TestUnreadTunnel: a client that does not read that its tunnel is open holds up
// neither the end of the run nor the place that the tunnel takes for long.
func TestUnreadTunnel(t *testing.T) {
	open := func(t *testing.T, deadline func(net.Conn, time.Time) error) (*rig, <-chan struct{}) {
		r, _, egress := openTo(t, Limits{}, echoServer(t))
		server, client := net.Pipe() // without a buffer
		t.Cleanup(func() { client.Close() })
		u := &unread{Conn: server, writing: make(chan struct{}), deadline: deadline}
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.door.serve(u, &http.Request{Method: http.MethodConnect, RequestURI: egress[0], URL: &url.URL{Host: egress[0]}})
		}()
		<-u.writing
		return r, done
	}
	within := func(t *testing.T, done <-chan struct{}) {
		t.Helper()
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			t.Fatal("it goes on")
		}
	}
	t.Run("run ends", func(t *testing.T) {
		r, tunnel := open(t, func(net.Conn, time.Time) error { return nil })
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			r.door.Close()
		}()
		within(t, closed)
		within(t, tunnel)
	})
	t.Run("time ends", func(t *testing.T) {
		r, tunnel := open(t, func(c net.Conn, at time.Time) error {
			if left := time.Until(at); left > 10*time.Second {
				t.Errorf("it waits for %v", left)
			}
			return c.SetWriteDeadline(time.Unix(1, 0)) // that time is over
		})
		within(t, tunnel)
		if n := len(r.door.tunnels); n > 0 {
			t.Errorf("%d places are taken", n)
		}
	})
}

func TestForwardPlain(t *testing.T) {
	var seen *http.Request
	var body string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, _ := io.ReadAll(r.Body)
		seen, body = r, string(data)
		w.Header().Set("Connection", "X-Hop")
		w.Header().Set("X-Hop", "1")
		w.Header().Set("X-End", "1")
		w.Header().Set("Location", "http://10.0.0.1/")
		w.WriteHeader(http.StatusFound)
		io.WriteString(w, "answer")
	}))
	defer s.Close()
	r, _, egress := openTo(t, Limits{}, s.Listener.Addr())
	resp, got, _ := r.raw(t, "POST", "POST http://"+egress[0]+"/a%2fb?q=1 HTTP/1.1\r\nHost: 169.254.169.254\r\nX-End: 2\r\nConnection: close, X-Gone\r\nX-Gone: 1\r\nProxy-Authorization: Basic eA==\r\nUpgrade: websocket\r\nContent-Length: 5\r\n\r\nhello")
	if resp.StatusCode != 302 || got != "answer" || resp.Header.Get("X-End") != "1" || resp.Header.Get("X-Hop") != "" {
		t.Errorf("got %v %q", resp, got)
	}
	if seen == nil || body != "hello" || seen.Host != egress[0] || seen.RequestURI != "/a%2fb?q=1" || seen.Header.Get("X-End") != "2" {
		t.Fatalf("the host saw %+v", seen)
	}
	for _, name := range []string{"X-Gone", "Proxy-Authorization", "Upgrade", "User-Agent", "X-Forwarded-For"} {
		if v := seen.Header.Get(name); v != "" {
			t.Errorf("the host saw %s: %s", name, v)
		}
	}
}

// TestEgressRefused: each way out that is none, with the reason that the agent
// reads and the row of audit.
func TestEgressRefused(t *testing.T) {
	d := newDNS(t)
	for name, addr := range map[string]string{
		"private": "10.1.2.3", "loop": "127.0.0.1", "loop6": "::1", "meta": "169.254.169.254", "cgnat": "100.100.100.200", "mapped": "::ffff:10.0.0.1",
		"nat64": "64:ff9b::a00:1", "sixtofour": "2002:a00:1::1", "ula": "fd00:ec2::254", "linklocal6": "fe80::1", "zero": "0.0.0.0", "multi": "224.0.0.1",
		"azure": "168.63.129.16", "both": "10.0.0.1,192.168.0.1",
	} {
		d.set(name+".example.org.", addr)
	}
	r := newRig(t, Config{Resolver: d.resolver(), Limits: Limits{DialTimeout: 5 * time.Second}}, Run{ID: "run1", Folder: "family", Egress: []string{"*.example.org", "api.example.com", "odd.example.net:8443"}})
	tests := []struct {
		connect string // host:port
		status  int
		reason  string
	}{
		{"private.example.org:443", 403, "a private address"},
		{"loop.example.org:443", 403, "a loopback address"},
		{"loop6.example.org:443", 403, "a loopback address"},
		{"meta.example.org:80", 403, "a link-local address"},
		{"cgnat.example.org:80", 403, "a carrier's private address"},
		{"mapped.example.org:80", 403, "a private address"},
		{"nat64.example.org:80", 403, "a NAT64 address"},
		{"sixtofour.example.org:80", 403, "a 6to4 address"},
		{"ula.example.org:80", 403, "a private address"},
		{"linklocal6.example.org:80", 403, "a link-local address"},
		{"zero.example.org:80", 403, "the unspecified address"},
		{"multi.example.org:80", 403, "a multicast address"},
		{"azure.example.org:80", 403, "a metadata address"},
		{"both.example.org:443", 403, "a private address"},
		{"missing.example.org:443", 502, "there is no such name"},
		{"example.org:443", 403, "not on this group's egress list"},
		{"evilexample.org:443", 403, "not on this group's egress list"},
		{"api.example.com.evil.net:443", 403, "not on this group's egress list"},
		{"x.api.example.com:443", 403, "not on this group's egress list"},
		{"api.example.com:22", 403, "may be reached on port 443, 80, not on 22"},
		{"odd.example.net:443", 403, "may be reached on port 8443, not on 443"},
		{"169.254.169.254:80", 403, "not on this group's egress list"},
		{"127.0.0.1:22", 403, "not on this group's egress list"},
		{"[::1]:443", 403, "not on this group's egress list"},
		{"[::ffff:127.0.0.1]:443", 400, "not a host name"},
		{"[fe80::1%25eth0]:443", 400, "not a host name"},
		{"2130706433:80", 400, "not a host name"},
		{"0x7f.1:80", 400, "not a host name"},
		{"127.1:80", 400, "not a host name"},
		{"localhost:80", 403, "not on this group's egress list"},
		{"a.example.org", 400, "the port is missing"},
		{"a.example.org:0", 400, "the port"},
		{"a.example.org:99999", 400, "the port"},
	}
	for _, tt := range tests {
		resp, body, _ := r.raw(t, "CONNECT", "CONNECT "+tt.connect+" HTTP/1.1\r\nHost: api.example.com\r\n\r\n")
		if resp.StatusCode != tt.status || !strings.Contains(body, tt.reason) || !strings.HasPrefix(body, `{"error":{"type":"berth_`) {
			t.Errorf("CONNECT %s: %d %s, want %d and %q", tt.connect, resp.StatusCode, body, tt.status, tt.reason)
		}
		if tt.status == 403 && !strings.Contains(resp.Status, tt.reason) {
			t.Errorf("CONNECT %s: the status line %q does not say why", tt.connect, resp.Status)
		}
		if host, port, err := net.SplitHostPort(tt.connect); err == nil && port == "80" {
			resp, body, _ := r.raw(t, "GET", "GET http://"+host+"/ HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n")
			if resp.StatusCode != tt.status || !strings.Contains(body, tt.reason) {
				t.Errorf("GET http://%s/: %d %s, want %d and %q", host, resp.StatusCode, body, tt.status, tt.reason)
			}
		}
	}
	r.Close()
	audited := r.store.kinds()
	for _, want := range []string{"egress private.example.org:443", "egress example.org:443", "egress 169.254.169.254:80", "egress 2130706433:80"} {
		if !slices.Contains(audited, want) {
			t.Errorf("no row of audit for %q in %q", want, audited)
		}
	}
	for _, a := range r.store.audits {
		if a.Folder != "family" || a.RunID != "run1" || a.Reason == "" || a.At.IsZero() {
			t.Errorf("audit %+v", a)
		}
	}
	// The private address itself is for the operator only.
	if i := slices.IndexFunc(r.store.audits, func(a berth.Audit) bool { return strings.HasPrefix(a.Target, "private.") }); !strings.Contains(r.store.audits[i].Reason, "10.1.2.3:443") {
		t.Errorf("audit %+v does not name the address", r.store.audits[i])
	}
}

// TestEmptyList: without a list nothing goes out, and no name is looked up.
func TestEmptyList(t *testing.T) {
	d := newDNS(t)
	r := newRig(t, Config{Resolver: d.resolver()}, Run{})
	resp, body, _ := r.raw(t, "CONNECT", "CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n")
	if resp.StatusCode != 403 || !strings.Contains(body, "egress list is empty") {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	if asked := d.names(); len(asked) != 0 {
		t.Errorf("names were looked up: %q", asked)
	}
}

// TestRebinding: a name that was public when it was last looked at and is private
// now leads nowhere, and of several addresses only public ones are tried.
func TestRebinding(t *testing.T) {
	echo := echoServer(t)
	r, d, egress := openTo(t, Limits{DialTimeout: 5 * time.Second}, echo)
	port := strings.Split(egress[0], ":")[1]
	connect := "CONNECT web.example.org:" + port + " HTTP/1.1\r\nHost: x\r\n\r\n"
	// 127.0.0.1 plays a public address here; 127.0.0.2 is a private one.
	d.set("web.example.org.", "127.0.0.1", "127.0.0.2")
	if resp, _, _ := r.raw(t, "CONNECT", connect); resp.StatusCode != 200 {
		t.Fatalf("the first time: %d", resp.StatusCode)
	}
	if resp, body, _ := r.raw(t, "CONNECT", connect); resp.StatusCode != 403 || !strings.Contains(body, "a loopback address") {
		t.Fatalf("the second time: %d %s", resp.StatusCode, body)
	}
	d.set("web.example.org.", "127.0.0.2,127.0.0.1")
	if resp, body, _ := r.raw(t, "CONNECT", connect); resp.StatusCode != 200 {
		t.Fatalf("private and public: %d %s", resp.StatusCode, body)
	}
	// Search domains of the host are not tried.
	for _, name := range d.names() {
		if name != "web.example.org." {
			t.Errorf("looked up %q", name)
		}
	}
}

// TestOwnAddress: a public address of the host is no way to its ports.
func TestOwnAddress(t *testing.T) {
	if !isOwn(netip.MustParseAddr("127.0.0.1")) || isOwn(netip.MustParseAddr("192.0.2.1")) {
		t.Error("isOwn does not know this host")
	}
}

func TestEgressLimits(t *testing.T) {
	echo := echoServer(t)
	r, _, egress := openTo(t, Limits{Tunnels: 2, EgressBytes: 1000}, echo)
	connect := "CONNECT " + egress[0] + " HTTP/1.1\r\nHost: x\r\n\r\n"
	_, _, one := r.raw(t, "CONNECT", connect)
	_, _, two := r.raw(t, "CONNECT", connect)
	resp, body, _ := r.raw(t, "CONNECT", connect)
	if resp.StatusCode != 429 || !strings.Contains(body, "2 connections") {
		t.Errorf("a third tunnel: %d %s", resp.StatusCode, body)
	}
	// Both directions count, of all tunnels together.
	_, _ = io.WriteString(one, strings.Repeat("x", 300))
	if _, err := io.ReadFull(one, make([]byte, 300)); err != nil {
		t.Errorf("below the limit: %v", err)
	}
	_, _ = io.WriteString(two, strings.Repeat("x", 450))
	if n, _ := io.Copy(io.Discard, two); n > 450 {
		t.Errorf("%d bytes came back", n)
	}
	one.Close()
	two.Close()
	for deadline := time.Now().Add(10 * time.Second); len(r.door.tunnels) > 0 && time.Now().Before(deadline); {
		runtime.Gosched()
	}
	resp, body, _ = r.raw(t, "CONNECT", connect)
	if resp.StatusCode != 429 || !strings.Contains(body, "1000 bytes") {
		t.Errorf("after the limit: %d %s", resp.StatusCode, body)
	}
	r.Close()
	if n := len(r.store.audits); n < 3 {
		t.Errorf("%d rows of audit, want one for each refusal", n)
	}
}

func TestTunnelTimes(t *testing.T) {
	for name, limits := range map[string]Limits{
		"idle": {IdleTimeout: 20 * time.Millisecond},
		"long": {TunnelTimeout: 20 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			r, _, egress := openTo(t, limits, echoServer(t))
			_, _, c := r.raw(t, "CONNECT", "CONNECT "+egress[0]+" HTTP/1.1\r\nHost: x\r\n\r\n")
			if _, err := io.Copy(io.Discard, c); errors.Is(err, context.DeadlineExceeded) {
				t.Error("the tunnel stays open")
			}
		})
	}
}

// TestSlowHost: a host that takes a request and says nothing is given up.
func TestSlowHost(t *testing.T) {
	hang := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-hang }))
	defer s.Close()
	defer close(hang)
	r, _, egress := openTo(t, Limits{IdleTimeout: 30 * time.Millisecond, HeaderTimeout: 30 * time.Millisecond}, s.Listener.Addr())
	resp, body, _ := r.raw(t, "GET", "GET http://"+egress[0]+"/ HTTP/1.1\r\nHost: x\r\n\r\n")
	if resp.StatusCode != 504 || !strings.Contains(body, "did not answer in time") {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
}

// TestOddAnswers: what a hostile host answers does no harm.
func TestOddAnswers(t *testing.T) {
	for _, answer := range []string{
		"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
		"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("a", 2*maxHeader) + "\r\n\r\n",
		"nonsense\r\n\r\n",
		"",
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
					_, _ = io.WriteString(c, answer)
				}
				c.Close()
			}
		}()
		r, _, egress := openTo(t, Limits{}, l.Addr())
		resp, body, _ := r.raw(t, "GET", "GET http://"+egress[0]+"/ HTTP/1.1\r\nHost: x\r\n\r\n")
		if resp.StatusCode != 502 || !strings.Contains(body, "berth_unreachable") {
			t.Errorf("%.40q became %d %s", answer, resp.StatusCode, body)
		}
		l.Close()
		<-done
	}
}

// TestAuditIsBounded: a container that is refused all the time does not fill the
// store.
func TestAuditIsBounded(t *testing.T) {
	r := newRig(t, Config{}, Run{})
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	r.now = func() time.Time { return now }
	for range 500 {
		r.do(t, "GET", "/anthropic/v1/files", "")
	}
	now = now.Add(25 * time.Second)
	r.do(t, "GET", "/anthropic/v1/files", "")
	r.Close()
	n := len(r.store.audits)
	if n < 2 || n > auditBurst+2 {
		t.Fatalf("%d rows of audit", n)
	}
	if last := r.store.audits[n-1].Reason; !strings.Contains(last, "refusals before this one were not recorded") {
		t.Errorf("the last row is %q", last)
	}
}
