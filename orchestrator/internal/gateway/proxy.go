package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
)

// kindUnreachable is a failure that is nobody's refusal, and so no row of audit.
const kindUnreachable = "unreachable"

// refusedAddr is the error of a connection to an address that is not public.
type refusedAddr struct {
	addr netip.AddrPort
	why  string
}

func (e *refusedAddr) Error() string { return fmt.Sprintf("%s is %s", e.addr, e.why) }

// dial connects to a host of the egress list. The check is at the socket, after
// the name was looked up.
func (d *Door) dial(ctx context.Context, addr string) (net.Conn, error) {
	dialer := net.Dialer{
		Timeout:  d.g.cfg.Limits.DialTimeout,
		Resolver: d.g.cfg.Resolver,
		ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
			a, err := netip.ParseAddrPort(address)
			if err != nil {
				return fmt.Errorf("dial %q: %w", address, err)
			}
			if why := d.g.refuses(a); why != "" {
				return &refusedAddr{a, why}
			}
			return nil
		},
	}
	return dialer.DialContext(ctx, "tcp", addr)
}

// admit decides about one egress request. The caller gives the slot back if it
// is admitted; if not, the refusal was answered.
func (d *Door) admit(authority string, def uint16, answer func(status int, kind, reason string)) (target, bool) {
	refuse := func(status int, kind, to, reason string) (target, bool) {
		d.deny(kind, to, reason)
		answer(status, kind, reason)
		return target{}, false
	}
	t, err := parseTarget(authority, def)
	if err == nil && t.port == 0 {
		err = errors.New("the port is missing")
	}
	if err != nil {
		return refuse(http.StatusBadRequest, KindEgress, authority, fmt.Sprintf("%q: %v", printable(authority, 100), err))
	}
	if why := d.egress.refuse(t); why != "" {
		return refuse(http.StatusForbidden, KindEgress, t.String(), why+"; the operator can add it")
	}
	if !d.spend(0) {
		return refuse(http.StatusTooManyRequests, KindLimit, t.String(), fmt.Sprintf("this run's %d bytes of egress are spent", d.g.cfg.Limits.EgressBytes))
	}
	if !enter(d.tunnels) {
		return refuse(http.StatusTooManyRequests, KindLimit, t.String(), fmt.Sprintf("this run has %d connections to other hosts already: wait for one of them", cap(d.tunnels)))
	}
	return t, true
}

// spend takes n bytes of the run's egress and reports whether any are left.
func (d *Door) spend(n int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.budget -= int64(n)
	return d.budget > 0
}

// undialed answers for a connection that did not come about.
func (d *Door) undialed(t target, err error, answer func(status int, kind, reason string)) {
	if e, ok := errors.AsType[*refusedAddr](err); ok {
		d.deny(KindEgress, t.String(), e.Error())
		reason := fmt.Sprintf("%s leads to %s: the gateway connects to public addresses only", t, e.why)
		answer(http.StatusForbidden, KindEgress, reason)
		return
	}
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		answer(http.StatusGatewayTimeout, kindUnreachable, fmt.Sprintf("%s does not answer", t))
		return
	}
	why := "it refuses the connection"
	if e, ok := errors.AsType[*net.DNSError](err); ok {
		why = "its name cannot be looked up"
		if e.IsNotFound {
			why = "there is no such name"
		}
	}
	d.log.Debug("reach a host", zap.Stringer("target", t), zap.Error(err))
	answer(http.StatusBadGateway, kindUnreachable, fmt.Sprintf("%s cannot be reached: %s", t, why))
}

// tunnel serves CONNECT.
func (d *Door) tunnel(w http.ResponseWriter, r *http.Request) {
	answer := func(status int, kind, reason string) { answerConnect(w, status, kind, reason) }
	t, ok := d.admit(r.RequestURI, 0, answer)
	if !ok {
		return
	}
	defer func() { <-d.tunnels }()
	up, err := d.dial(r.Context(), t.dialed())
	if err != nil {
		d.undialed(t, err, answer)
		return
	}
	defer up.Close()
	client, buffered, err := hijack(w)
	if err != nil {
		d.log.Warn("take over a connection", zap.Error(err))
		return
	}
	defer client.Close()
	// The server closes it no more, and nobody may read on the other side.
	defer context.AfterFunc(d.ctx, func() { client.Close() })()
	_ = client.SetWriteDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(client, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	_ = client.SetWriteDeadline(time.Time{})
	d.pump(t, client, buffered, up)
}

// hijack takes the connection over from the server. What it has read already
// comes first out of the reader.
func hijack(w http.ResponseWriter) (net.Conn, io.Reader, error) {
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, nil, err
	}
	_ = conn.SetDeadline(time.Time{}) // of a connection that is open
	early := make([]byte, rw.Reader.Buffered())
	if _, err := io.ReadFull(rw.Reader, early); err != nil {
		conn.Close()
		return nil, nil, err
	}
	return conn, io.MultiReader(strings.NewReader(string(early)), conn), nil
}

// answerConnect refuses a CONNECT. Few clients show its body, but most show the
// status line, so the reason stands in both.
func answerConnect(w http.ResponseWriter, status int, kind, reason string) {
	conn, _, err := hijack(w)
	if err != nil {
		return
	}
	defer conn.Close()
	var body strings.Builder
	writeRefusal(&body, kind, reason)
	_ = conn.SetWriteDeadline(time.Now().Add(10 * time.Second))
	out := bufio.NewWriter(conn)
	fmt.Fprintf(out, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", status, printable(reason, 200), body.Len(), body.String())
	_ = out.Flush() // the container went away
}

// pump carries bytes both ways until both are done, nothing moves, or the time,
// the bytes or the run are over.
func (d *Door) pump(t target, client net.Conn, fromClient io.Reader, up net.Conn) {
	limits := d.g.cfg.Limits
	ctx, cancel := context.WithTimeout(d.ctx, limits.TunnelTimeout)
	defer cancel()
	_, watch, stop := newWatch(ctx, limits.IdleTimeout, func() {
		client.Close()
		up.Close()
	})
	defer stop()
	var wg sync.WaitGroup
	both := func(to net.Conn, from io.Reader) {
		wg.Go(func() {
			if errors.Is(d.carry(to, from, watch), errSpent) {
				d.deny(KindLimit, t.String(), fmt.Sprintf("this run's %d bytes of egress are spent", limits.EgressBytes))
				cancel()
			}
		})
	}
	both(up, fromClient)
	both(client, up)
	wg.Wait()
}

// carry copies one direction and passes its end on.
func (d *Door) carry(to net.Conn, from io.Reader, watch *watch) error {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	defer func() {
		if half, ok := to.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite() // the other side went away
		}
	}()
	for {
		n, err := from.Read(buf[:])
		watch.alive()
		if !d.spend(n) {
			return errSpent
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return err
		}
		if err != nil {
			return err
		}
	}
}

// forward serves a request in absolute form.
func (d *Door) forward(w http.ResponseWriter, r *http.Request) {
	answer := func(status int, kind, reason string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		writeRefusal(w, kind, reason)
	}
	if r.URL.Scheme != "http" || r.URL.User != nil {
		d.deny(KindEgress, r.URL.Host, "not a plain http address")
		answer(http.StatusBadRequest, KindEgress, "a proxy request is CONNECT host:port, or has an http:// address without a password in it")
		return
	}
	t, ok := d.admit(r.URL.Host, 80, answer)
	if !ok {
		return
	}
	defer func() { <-d.tunnels }()

	limits := d.g.cfg.Limits
	ctx, cancel := context.WithTimeout(r.Context(), limits.TunnelTimeout)
	defer cancel()
	ctx, body, stop := newUpload(ctx, w, r, limits)
	defer stop()
	body.spend = d.spend
	resp, err := d.direct.RoundTrip(t.request(ctx, r, body))
	if err != nil {
		switch {
		case r.Context().Err() != nil:
			panic(http.ErrAbortHandler)
		case errors.Is(err, errSpent):
			d.deny(KindLimit, t.String(), "the run's bytes of egress are spent")
			answer(http.StatusTooManyRequests, KindLimit, "this run's bytes of egress are spent")
		case ctx.Err() != nil:
			w.Header().Set("Connection", "close")
			answer(http.StatusGatewayTimeout, kindUnreachable, fmt.Sprintf("%s did not answer in time", t))
		default:
			d.undialed(t, err, answer)
		}
		return
	}
	defer resp.Body.Close()
	body.watch.alive()
	if !usable(resp) {
		answer(http.StatusBadGateway, kindUnreachable, fmt.Sprintf("%s answered with status %d, which cannot be passed on", t, resp.StatusCode))
		return
	}
	passBack(w.Header(), resp.Header, "", func(string) bool { return false })
	w.WriteHeader(resp.StatusCode)
	down := download{spend: d.spend, watch: body.watch, idle: limits.IdleTimeout}
	if err := down.copy(w, resp.Body); err != nil {
		if errors.Is(err, errSpent) {
			d.deny(KindLimit, t.String(), fmt.Sprintf("this run's %d bytes of egress are spent", limits.EgressBytes))
		}
		panic(http.ErrAbortHandler)
	}
}

// request is what the host gets: what the container sent, without what belonged
// to its connection to the gateway.
func (t target) request(ctx context.Context, r *http.Request, body *upload) *http.Request {
	u := *r.URL
	u.Host = t.dialed()
	host := t
	if host.port == 80 {
		host.port = 0
	}
	out := &http.Request{
		Method: r.Method, URL: &u, Host: host.authority(), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: make(http.Header), Body: body, ContentLength: r.ContentLength,
	}
	if r.ContentLength == 0 {
		out.Body = http.NoBody
	}
	for name, values := range r.Header {
		if !isHop(r.Header, name) {
			out.Header[name] = values
		}
	}
	if _, ok := out.Header["User-Agent"]; !ok {
		out.Header["User-Agent"] = []string{""}
	}
	return out.WithContext(ctx)
}

// authority is t as it stands in a Host header.
func (t target) authority() string {
	if t.port == 0 && t.addr.Is6() {
		return "[" + t.host + "]"
	}
	return t.String()
}
