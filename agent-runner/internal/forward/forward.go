// Package forward is the container's end of the gateway: it opens a port on the
// container's own loopback and carries bytes between it and a unix socket that
// the host mounted. It looks at nothing that passes; the host decides.
package forward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"os"
	"sync"
	"time"
)

// Address is where clients in the container find the gateway.
const Address = "127.0.0.1:8787"

const (
	maxConns  = 64               // as the host takes; further ones wait
	patience  = 10 * time.Second // for a host whose daemon starts anew
	firstTry  = 50 * time.Millisecond
	lastTry   = time.Second
	farewell  = 2 * time.Second // for a client to read why it was turned away
	apologies = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 93\r\nConnection: close\r\n\r\n" +
		`{"error":{"type":"berth_unreachable","message":"berth's gateway is not there at the moment"}}`
)

// Forwarder carries connections between a port and a socket. It is safe for
// concurrent use.
type Forwarder struct {
	socket string
	log    *log.Logger

	ctx    context.Context
	cancel context.CancelFunc
	listen *net.TCPListener
	slots  chan struct{}
	wg     sync.WaitGroup
}

// Open listens on address and forwards to the unix socket until ctx ends or
// Close is called. It returns nil and no error if there is no socket: then the
// run has no gateway.
func Open(ctx context.Context, address, socket string, logger *log.Logger) (*Forwarder, error) {
	info, err := os.Stat(socket)
	if socket == "" || errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the gateway: %w", err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("find the gateway: %s is no socket", socket)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("open the gateway's port: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	f := &Forwarder{
		socket: socket, log: logger, ctx: ctx, cancel: cancel,
		listen: l.(*net.TCPListener), slots: make(chan struct{}, maxConns),
	}
	f.wg.Go(f.accept)
	return f, nil
}

// Addr returns the address that is listened on. A nil Forwarder has none.
func (f *Forwarder) Addr() string {
	if f == nil {
		return ""
	}
	return f.listen.Addr().String()
}

// Close ends all connections and waits for them. It may be called again, and on
// a nil Forwarder.
func (f *Forwarder) Close() {
	if f == nil {
		return
	}
	f.cancel()
	f.wg.Wait()
}

func (f *Forwarder) accept() {
	defer context.AfterFunc(f.ctx, func() { f.listen.Close() })()
	defer f.listen.Close()
	for {
		select {
		case f.slots <- struct{}{}:
		case <-f.ctx.Done():
			return
		}
		c, err := f.listen.AcceptTCP()
		if err != nil {
			<-f.slots
			if f.ctx.Err() != nil {
				return
			}
			// Out of descriptors, or a client that is gone again.
			f.log.Printf("gateway: accept: %v", err)
			if !f.pause(firstTry) {
				return
			}
			continue
		}
		f.wg.Go(func() {
			defer func() { <-f.slots }()
			f.carry(c)
		})
	}
}

// carry serves one connection to its end.
func (f *Forwarder) carry(client *net.TCPConn) {
	defer client.Close()
	host, err := f.dial()
	if err != nil {
		if f.ctx.Err() == nil {
			f.log.Printf("gateway: %v", err)
			turnAway(client)
		}
		return
	}
	defer host.Close()
	// Closing is what unblocks reads and writes.
	defer context.AfterFunc(f.ctx, func() {
		client.Close()
		host.Close()
	})()
	var wg sync.WaitGroup
	wg.Go(func() { pass(host, client, client, host) })
	wg.Go(func() { pass(client, host, client, host) })
	wg.Wait()
}

// half is a connection that can be closed for writing alone.
type half interface {
	net.Conn
	CloseWrite() error
}

// pass copies one direction and hands its end on. A failure ends both, or the
// other direction would wait for a peer that is gone.
func pass(to, from half, both ...net.Conn) {
	if _, err := io.Copy(to, from); err != nil {
		for _, c := range both {
			c.Close()
		}
		return
	}
	_ = to.CloseWrite() // gone already
}

// dial connects to the host. The daemon there may be starting anew, which takes
// a moment and leaves runs alive.
func (f *Forwarder) dial() (*net.UnixConn, error) {
	ctx, cancel := context.WithTimeout(f.ctx, patience)
	defer cancel()
	var d net.Dialer
	for try := firstTry; ; try = min(2*try, lastTry) {
		c, err := d.DialContext(ctx, "unix", f.socket)
		if err == nil {
			return c.(*net.UnixConn), nil
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(try):
		}
	}
}

// pause waits, and reports false if ctx ended.
func (f *Forwarder) pause(d time.Duration) bool {
	select {
	case <-f.ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// turnAway tells a client why nobody answers: after it asked, for an answer
// without a question is an error of its own. What else it sends is read, since a
// connection that is closed with unread bytes loses the answer too.
func turnAway(client *net.TCPConn) {
	_ = client.SetDeadline(time.Now().Add(farewell))
	if _, err := client.Read(make([]byte, 1)); err != nil {
		return
	}
	if _, err := io.WriteString(client, apologies); err != nil {
		return
	}
	_ = client.CloseWrite()
	_, _ = io.CopyN(io.Discard, client, 1<<20)
}
