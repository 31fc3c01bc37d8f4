package watest

import (
	"context"
	"strconv"

	waBinary "go.mau.fi/whatsmeow/binary"
	"go.mau.fi/whatsmeow/types"
)

type faults struct {
	down         bool
	dials        int
	silent       bool
	failures     []Failure
	always       *Failure
	ackErrors    []int
	dropAcks     int
	dropMessages int
	holding      bool
	held         []heldAck
	iq           func(*waBinary.Node) *waBinary.Node
	iqErrors     map[string]int
	holdMedia    bool
	heldMedia    map[string]chan struct{} // by name
	mediaAsked   int
	mediaCode    int
}

type heldAck struct {
	conn *conn
	node node
}

// Failure is why a login is refused.
type Failure struct {
	Reason  int
	Code    int // of a temporary ban (reason 402)
	Expire  int // of a temporary ban, in seconds
	Message string
}

// The failures that a client has a word of its own for.
var (
	FailGeneric     = Failure{Reason: 400}
	FailLoggedOut   = Failure{Reason: 401}
	FailTempBanned  = Failure{Reason: 402, Code: 101, Expire: 3600}
	FailLocked      = Failure{Reason: 403}
	FailOutdated    = Failure{Reason: 405}
	FailBanned      = Failure{Reason: 406}
	FailUserAgent   = Failure{Reason: 409}
	FailInternal    = Failure{Reason: 500}
	FailUnavailable = Failure{Reason: 503}
)

func (f Failure) node() node {
	n := node{Tag: "failure", Attrs: attrs{"reason": f.Reason}}
	if f.Code != 0 {
		n.Attrs["code"] = f.Code
	}
	if f.Expire != 0 {
		n.Attrs["expire"] = f.Expire
	}
	if f.Message != "" {
		n.Attrs["message"] = f.Message
	}
	return n
}

// RefuseNextLogin refuses one login for each failure, in this order.
func (s *Server) RefuseNextLogin(failures ...Failure) {
	s.do(func() error { s.faults.failures = append(s.faults.failures, failures...); return nil })
}

// RefuseLogins refuses all logins until it is called with nil.
func (s *Server) RefuseLogins(f *Failure) {
	s.do(func() error { s.faults.always = f; return nil })
}

// Down answers each new connection with HTTP 503 until Up.
func (s *Server) Down() { s.do(func() error { s.faults.down = true; return nil }) }

// Up ends Down.
func (s *Server) Up() { s.do(func() error { s.faults.down = false; return nil }) }

// Dials counts the connections that clients have tried so far.
func (s *Server) Dials() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.faults.dials
}

// Silence leaves keep-alives without an answer.
func (s *Server) Silence(silent bool) {
	s.do(func() error { s.faults.silent = silent; return nil })
}

// Connections counts the connections that are open.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// Disconnect cuts all connections without a word.
func (s *Server) Disconnect() {
	s.do(func() error {
		for c := range s.conns {
			s.dropLocked(c)
		}
		return nil
	})
}

// StreamError ends all connections with this code; an empty conflict is left out.
func (s *Server) StreamError(code int, conflict string) {
	s.do(func() error {
		for c := range s.conns {
			if !c.closed {
				s.endLocked(c, streamError(code, conflict))
			}
		}
		return nil
	})
}

func streamError(code int, conflict string) node {
	n := node{Tag: "stream:error", Attrs: attrs{}}
	if code != 0 {
		n.Attrs["code"] = strconv.Itoa(code)
	}
	if conflict != "" {
		n.Content = []node{{Tag: "conflict", Attrs: attrs{"type": conflict}}}
	}
	return n
}

// RefuseNextMessage answers one message of a client for each code with an error:
// 463, 429, 479 and so on. The message reaches nobody.
func (s *Server) RefuseNextMessage(codes ...int) {
	s.do(func() error { s.faults.ackErrors = append(s.faults.ackErrors, codes...); return nil })
}

// DropAcks leaves the next n messages of clients without an answer, though they
// reach their readers.
func (s *Server) DropAcks(n int) { s.do(func() error { s.faults.dropAcks = n; return nil }) }

// DropMessages loses the next n messages of clients on their way to the server.
func (s *Server) DropMessages(n int) { s.do(func() error { s.faults.dropMessages = n; return nil }) }

// Hold keeps the answers to messages of clients back until Release. Those of a
// connection that ends meanwhile are lost.
func (s *Server) Hold() { s.do(func() error { s.faults.holding = true; return nil }) }

// Release ends Hold.
func (s *Server) Release() {
	s.do(func() error {
		for _, held := range s.faults.held {
			s.sendLocked(held.conn, held.node)
		}
		s.faults.holding, s.faults.held = false, nil
		return nil
	})
}

// Held waits until Hold keeps n answers back.
func (s *Server) Held(ctx context.Context, n int) {
	s.t.Helper()
	s.must(s.wait(ctx, "held answers", func() bool { return len(s.faults.held) >= n }))
}

// FailQueries answers queries of this namespace (w:g2, usync, encrypt, w:m …)
// with an error such as 429; 0 ends that.
func (s *Server) FailQueries(namespace string, code int) {
	s.do(func() error {
		if s.faults.iqErrors == nil {
			s.faults.iqErrors = map[string]int{}
		}
		s.faults.iqErrors[namespace] = code
		return nil
	})
}

// OnQuery lets a test answer queries itself: what it returns, if not nil, is the
// answer's attributes and content. It must not call the server.
func (s *Server) OnQuery(answer func(*waBinary.Node) *waBinary.Node) {
	s.do(func() error { s.faults.iq = answer; return nil })
}

// answerLocked sends the answer to a message, or does with it what a fault says.
func (s *Server) answerLocked(c *conn, ack node) {
	switch {
	case c == nil:
	case s.faults.dropAcks > 0:
		s.faults.dropAcks--
	case s.faults.holding:
		s.faults.held = append(s.faults.held, heldAck{c, ack})
	default:
		s.sendLocked(c, ack)
	}
}

// Raw sends any stanza to a phone's linked clients as it stands.
func (s *Server) Raw(to *Phone, n waBinary.Node) {
	s.do(func() error {
		for _, d := range to.account.linkedLocked() {
			if d.conn != nil {
				s.sendLocked(d.conn, n)
			}
		}
		return nil
	})
}

func serverNotification(id, kind string, content ...node) node {
	return node{
		Tag:     "notification",
		Attrs:   attrs{"from": types.ServerJID, "type": kind, "id": id, "t": now()},
		Content: content,
	}
}
