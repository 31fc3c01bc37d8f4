package acp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"berth/agent-runner/internal/engine/program"
)

// Codes of JSON-RPC, and of the protocol's own.
const (
	codeNoMethod     = -32601
	codeAuthRequired = -32000
)

// maxID is how long an id of the agent's may be, in bytes: it is sent back.
const maxID = 256

// message is one line, from either side.
type message struct {
	Version string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *rpcError       `json:"error,omitempty"`
}

type rpcError struct {
	Code    int             `json:"code"`
	Message string          `json:"message"`
	Data    json.RawMessage `json:"data,omitempty"`
}

func (e *rpcError) Error() string {
	text := fmt.Sprintf("%s (%d)", e.Message, e.Code)
	if len(e.Data) > 0 && !bytes.Equal(e.Data, []byte("null")) {
		text += " " + string(e.Data)
	}
	return text
}

// kind is what a line is.
type kind int

const (
	request kind = iota
	notification
	response
)

// decode reads a line that the agent printed.
func decode(line []byte) (message, kind, error) {
	var m message
	if err := json.Unmarshal(line, &m); err != nil {
		return m, 0, fmt.Errorf("not a message: %w", err)
	}
	if bytes.Equal(m.ID, []byte("null")) {
		m.ID = nil
	}
	switch {
	case len(m.ID) > maxID:
		return m, 0, errors.New("not a message: its id is too long")
	case m.Method != "" && m.ID != nil: // an id may be 0
		return m, request, nil
	case m.Method != "":
		return m, notification, nil
	case m.ID != nil:
		return m, response, nil
	}
	return m, 0, errors.New("not a message: it has neither a method nor an id")
}

// conn is the connection to an agent: calls out, and what comes in.
type conn struct {
	program *program.Program

	// What comes in, in the order of the lines, from one goroutine. A request is
	// answered with what is returned.
	requested func(method string, params json.RawMessage) (any, *rpcError)
	notified  func(method string, params json.RawMessage)

	mu      sync.Mutex
	calls   int64
	waiting map[int64]*call
}

// call is a request that was sent. Its fields may be read after done is closed.
type call struct {
	done   chan struct{}
	result json.RawMessage
	err    *rpcError
}

// line takes one line of the agent's stdout.
func (c *conn) line(b []byte) {
	m, kind, err := decode(b)
	if err != nil {
		c.program.Garbage(b, err)
		return
	}
	switch kind {
	case notification:
		c.notified(m.Method, m.Params)
	case request:
		answer := message{ID: m.ID}
		result, refused := c.requested(m.Method, m.Params)
		if answer.Error = refused; refused == nil {
			if answer.Result, err = json.Marshal(result); err != nil {
				panic(err) // of our own making
			}
		}
		_ = c.send(answer) // an agent that does not read will be missed elsewhere
	case response:
		id, err := strconv.ParseInt(string(m.ID), 10, 64)
		if err != nil {
			return
		}
		c.mu.Lock()
		waiting := c.waiting[id]
		delete(c.waiting, id)
		c.mu.Unlock()
		if waiting != nil { // else it comes too late, or twice
			waiting.result, waiting.err = m.Result, m.Error
			close(waiting.done)
		}
	}
}

func (c *conn) send(m message) error {
	m.Version = "2.0"
	return c.program.Send(m)
}

// call sends a request.
func (c *conn) call(method string, params any) (*call, error) {
	data, err := json.Marshal(params)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.calls++
	id, waiting := c.calls, &call{done: make(chan struct{})}
	if c.waiting == nil {
		c.waiting = make(map[int64]*call)
	}
	c.waiting[id] = waiting
	c.mu.Unlock()
	return waiting, c.send(message{ID: json.RawMessage(strconv.FormatInt(id, 10)), Method: method, Params: data})
}

// notify sends a notification.
func (c *conn) notify(method string, params any) error {
	data, err := json.Marshal(params)
	if err != nil {
		return err
	}
	return c.send(message{Method: method, Params: data})
}
