package tools

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/internal/reap"
)

// Limits of what a tool server sends.
const (
	maxServerLine  = 4 << 20  // bytes of one message
	maxSchema      = 64 << 10 // bytes of a tool's schema
	maxDescription = 8 << 10  // bytes
	maxComplaints  = 100      // lines of stderr that are logged
	complaintWidth = 500      // bytes of one
	restartWithin  = 15 * time.Second
	byeGrace       = 500 * time.Millisecond // for a server to end after its stdin
)

// protocolVersion is what servers are asked for: old enough for all, and new
// enough for what is used here.
const protocolVersion = "2025-06-18"

// server is a tool server and its process. It is safe for concurrent use.
type server struct {
	spec  engine.ToolServer
	box   *Box
	offer []tool // nil: it was not there yet; of the goroutine of Start

	mu       sync.Mutex
	session  *mcp.ClientSession // nil if there is none
	cmd      *exec.Cmd
	out      *os.File      // the process's stdout
	exited   chan struct{} // closed when the process is gone and waited for
	stopping bool
}

// start starts the server and returns its tools, never nil without an error.
func (s *server) start(ctx context.Context) ([]tool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.connectLocked(ctx); err != nil {
		return nil, err
	}
	tools := []tool{}
	for t, err := range s.session.Tools(ctx, nil) {
		if err != nil {
			s.endLocked()
			return nil, fmt.Errorf("list its tools: %w", err)
		}
		schema, err := schemaOf(t)
		if err != nil {
			s.box.config.Log.Printf("tool %.64q of %s is left out: %v", t.Name, s.spec.Name, err)
			continue
		}
		if len(tools) == maxTools {
			s.box.config.Log.Printf("%s has more than %d tools: the others are left out", s.spec.Name, maxTools)
			break
		}
		name := t.Name
		tools = append(tools, tool{
			llm.Tool{Name: toolName(s.spec.Name, name), Description: Bound(t.Description, maxDescription), Schema: schema},
			func(ctx context.Context, input json.RawMessage) (string, error) { return s.call(ctx, name, input) },
		})
	}
	return tools, nil
}

// toolName returns the name under which a model knows a server's tool.
func toolName(server, name string) string {
	clean := func(s string) string {
		return strings.Map(func(r rune) rune {
			if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-' {
				return r
			}
			return '_'
		}, s)
	}
	name = clean(server) + "_" + clean(name)
	return name[:min(len(name), 64)]
}

// schemaOf returns a tool's input schema, as providers want it.
func schemaOf(t *mcp.Tool) (json.RawMessage, error) {
	schema, ok := t.InputSchema.(map[string]any)
	if !ok {
		schema = make(map[string]any)
	}
	schema["type"] = "object" // some leave it out
	if schema["properties"] == nil {
		schema["properties"] = make(map[string]any)
	}
	delete(schema, "$schema")
	data, err := json.Marshal(schema)
	if err == nil && len(data) > maxSchema {
		err = fmt.Errorf("its schema has %d bytes, more than %d", len(data), maxSchema)
	}
	return data, err
}

// connectLocked starts the process and says hello.
func (s *server) connectLocked(ctx context.Context) error {
	if s.stopping {
		return errors.New("the run ends")
	}
	if len(s.spec.Command) == 0 {
		return errors.New("it has no command")
	}
	cmd := exec.Command(s.spec.Command[0], s.spec.Command[1:]...)
	cmd.Dir = s.box.config.WorkDir
	cmd.Env = slices.Clone(s.box.env)
	for _, name := range slices.Sorted(maps.Keys(s.spec.Env)) {
		cmd.Env = append(cmd.Env, name+"="+s.spec.Env[name])
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, out, complaints, err := s.launch(cmd)
	if err != nil {
		return fmt.Errorf("start it: %w", err)
	}
	exited := make(chan struct{})
	s.cmd, s.out, s.exited = cmd, out, exited
	go func() {
		defer close(exited)
		_ = reap.AwaitExit(cmd)
		// It is a zombie until Wait: its number cannot be another group's yet.
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		_ = s.box.config.Children.Wait(cmd) // the connection's end says enough
	}()
	go s.complain(complaints)

	client := mcp.NewClient(&mcp.Implementation{Name: "berth", Version: "1"}, nil)
	s.session, err = client.Connect(ctx, &mcp.IOTransport{Reader: &lineReader{in: bufio.NewReader(out), close: out.Close}, Writer: in},
		&mcp.ClientSessionOptions{ProtocolVersion: protocolVersion})
	if err != nil {
		s.session = nil
		_ = in.Close()
		s.endLocked()
		if ctx.Err() != nil {
			err = errors.New("it did not answer in time")
		}
		return fmt.Errorf("speak with it: %w", err)
	}
	return nil
}

// launch starts cmd with pipes for its stdin, stdout and stderr. They are files,
// so that waiting for the process waits for nobody who holds its output open.
func (s *server) launch(cmd *exec.Cmd) (stdin, stdout, stderr *os.File, err error) {
	var theirs, ours []*os.File
	for i := range 3 {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll(theirs, ours)
			return nil, nil, nil, err
		}
		if i == 0 {
			theirs, ours = append(theirs, r), append(ours, w)
		} else {
			theirs, ours = append(theirs, w), append(ours, r)
		}
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs[0], theirs[1], theirs[2]
	if err := s.box.config.Children.Start(cmd); err != nil {
		closeAll(theirs, ours)
		return nil, nil, nil, err
	}
	closeAll(theirs)
	return ours[0], ours[1], ours[2], nil
}

func closeAll(lists ...[]*os.File) {
	for _, files := range lists {
		for _, f := range files {
			_ = f.Close() // of a pipe
		}
	}
}

// complain logs what the server prints on stderr, and reads on when that is
// enough.
func (s *server) complain(r *os.File) {
	defer r.Close()
	in := bufio.NewReaderSize(r, complaintWidth)
	for n := 0; ; {
		line, more, err := in.ReadLine()
		if err != nil {
			return
		}
		if n < maxComplaints {
			n++
			s.box.config.Log.Printf("%s: %s", s.spec.Name, strings.ToValidUTF8(string(line), "\uFFFD"))
		}
		for more && err == nil {
			_, more, err = in.ReadLine()
		}
	}
}

// endLocked ends the session and the process, and waits for both.
func (s *server) endLocked() {
	if s.cmd == nil {
		return
	}
	closed := make(chan struct{})
	go func(session *mcp.ClientSession) { // closes stdin, then waits for calls under way
		defer close(closed)
		if session != nil {
			_ = session.Close() // what is left of it does not matter
		}
	}(s.session)
	select {
	case <-s.exited:
	case <-time.After(byeGrace):
		_ = s.cmd.Process.Signal(unix.SIGKILL) // its group follows
		<-s.exited
	}
	_ = s.out.Close() // a process that left the group may hold the other end
	<-closed
	s.session, s.cmd = nil, nil
}

// stop ends the server for good.
func (s *server) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopping = true
	s.endLocked()
}

// live returns the session, of a new process if the last one is gone.
func (s *server) live(ctx context.Context) (*mcp.ClientSession, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session != nil {
		select {
		case <-s.exited:
			s.endLocked()
		default:
			return s.session, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, restartWithin)
	defer cancel()
	if err := s.connectLocked(ctx); err != nil {
		return nil, refused("the tools of %s are gone: %v", s.spec.Name, err)
	}
	return s.session, nil
}

// call carries out one call of a tool.
func (s *server) call(ctx context.Context, name string, input json.RawMessage) (string, error) {
	session, err := s.live(ctx)
	if err != nil {
		return "", err
	}
	result, err := s.ask(ctx, session, &mcp.CallToolParams{Name: name, Arguments: input})
	if err != nil {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return "", err
	}
	text := contents(result)
	if result.IsError {
		return text, refused("the tool failed")
	}
	return text, nil
}

// ask is session.CallTool, but returns soon after ctx has ended also if the server
// does not read: the call would wait for that in a write.
func (s *server) ask(ctx context.Context, session *mcp.ClientSession, params *mcp.CallToolParams) (result *mcp.CallToolResult, err error) {
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		result, err = session.CallTool(ctx, params)
	}()
	select {
	case <-answered:
		return result, err
	case <-ctx.Done():
	}
	select {
	case <-answered:
		return result, err
	case <-time.After(byeGrace):
	}
	s.box.config.Log.Printf("%s does not read what it is asked: it is ended", s.spec.Name)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session == session {
		s.endLocked()
	}
	<-answered // the pipe is closed
	return nil, context.Cause(ctx)
}

// contents returns a result as a text.
func contents(r *mcp.CallToolResult) string {
	var parts []string
	for _, c := range r.Content {
		switch c := c.(type) {
		case *mcp.TextContent:
			parts = append(parts, c.Text)
		case *mcp.ImageContent:
			parts = append(parts, fmt.Sprintf("(an image of %d bytes, not shown)", len(c.Data)))
		case *mcp.AudioContent:
			parts = append(parts, fmt.Sprintf("(a sound of %d bytes, not shown)", len(c.Data)))
		case *mcp.ResourceLink:
			parts = append(parts, c.URI)
		case *mcp.EmbeddedResource:
			if c.Resource != nil {
				parts = append(parts, c.Resource.Text)
			}
		}
	}
	if len(parts) == 0 && r.StructuredContent != nil {
		if data, err := json.Marshal(r.StructuredContent); err == nil {
			parts = append(parts, string(data))
		}
	}
	return strings.Join(parts, "\n")
}

// lineReader passes on the lines that can be messages: some servers print other
// things as well.
type lineReader struct {
	in    *bufio.Reader
	close func() error
	line  []byte
	rest  []byte // of line, not read yet
}

func (r *lineReader) Close() error { return r.close() }

func (r *lineReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if cap(r.line) > 256<<10 {
			r.line = nil // a rare one: not worth the memory
		}
		r.line = r.line[:0]
		for {
			piece, err := r.in.ReadSlice('\n')
			r.line = append(r.line, piece...)
			if len(r.line) > maxServerLine {
				return 0, fmt.Errorf("a message has more than %d bytes", maxServerLine)
			}
			if err == nil {
				break
			}
			if !errors.Is(err, bufio.ErrBufferFull) {
				return 0, err // half a line is no message
			}
		}
		if start := bytes.TrimLeft(r.line, " \t"); start[0] == '{' || start[0] == '[' {
			r.rest = r.line
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

var _ io.ReadCloser = (*lineReader)(nil)
