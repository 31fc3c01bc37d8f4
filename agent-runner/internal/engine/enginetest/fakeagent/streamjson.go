package fakeagent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
)

// StreamJSON serves what Claude Code's SDK speaks, given Claude Code's arguments,
// until in ends; it returns the exit code. Messages that come during a tool become
// part of the turn. It says what becomes of messages if lifecycle is true.
func StreamJSON(args []string, in io.Reader, out io.Writer, lifecycle bool) int {
	s := &streamServer{out: out, lifecycle: lifecycle, answers: make(map[string]chan json.RawMessage), more: make(chan struct{}, 1), ended: make(chan struct{})}
	var servers []server
	resumed := false
	for i := 0; i < len(args)-1; i++ {
		switch args[i] {
		case "--resume":
			s.id, resumed = args[i+1], true
		case "--session-id":
			s.id = args[i+1]
		case "--mcp-config":
			var config struct {
				McpServers map[string]struct {
					Command string
					Args    []string
					Env     map[string]string
				} `json:"mcpServers"`
			}
			if err := json.Unmarshal([]byte(args[i+1]), &config); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			for name, c := range config.McpServers {
				one := server{name: name, args: append([]string{c.Command}, c.Args...)}
				for k, v := range c.Env {
					one.env = append(one.env, k+"="+v)
				}
				servers = append(servers, one)
			}
		}
	}
	var err error
	if s.agent, err = openAgent(s.id, resumed, servers); err != nil {
		text := err.Error()
		if errors.Is(err, errUnknown) {
			text = "No conversation found with session ID: " + s.id
		}
		fmt.Fprintln(os.Stderr, text)
		s.write(object{"is_error": true, "errors": []string{text}, "subtype": "error_during_execution", "type": "result"})
		return 1
	}
	defer s.agent.close()
	var wg sync.WaitGroup
	wg.Go(s.work)
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			break
		}
		var m streamMessage
		if err := json.Unmarshal(line, &m); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		s.take(m)
	}
	close(s.ended) // the turn under way finishes
	wg.Wait()
	return 0
}

type streamMessage struct {
	Type      string
	UUID      string
	RequestID string `json:"request_id"`
	Request   struct {
		Subtype            string
		AppendSystemPrompt string `json:"appendSystemPrompt"`
	}
	Message struct {
		Content []struct{ Text string }
	}
	Response struct {
		RequestID string `json:"request_id"`
		Response  json.RawMessage
	}
}

type streamServer struct {
	out       io.Writer
	lifecycle bool
	id        string
	agent     *agent
	more      chan struct{}
	ended     chan struct{}

	mu      sync.Mutex
	system  string
	queue   []streamMessage
	asked   int
	answers map[string]chan json.RawMessage
	cancel  context.CancelFunc
	cost    float64
}

func (s *streamServer) write(v object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v["session_id"] = s.id
	_ = writeLine(s.out, v)
}

func (s *streamServer) tell(m streamMessage, state string) {
	if s.lifecycle {
		s.write(object{"type": "command_lifecycle", "command_uuid": m.UUID, "state": state})
	}
}

func (s *streamServer) take(m streamMessage) {
	switch m.Type {
	case "user":
		s.tell(m, "queued")
		s.mu.Lock()
		s.queue = append(s.queue, m)
		s.mu.Unlock()
		select {
		case s.more <- struct{}{}:
		default:
		}
	case "control_response":
		s.mu.Lock()
		answer := s.answers[m.Response.RequestID]
		s.mu.Unlock()
		if answer != nil {
			answer <- m.Response.Response
		}
	case "control_request":
		s.mu.Lock()
		switch m.Request.Subtype {
		case "initialize":
			s.system = m.Request.AppendSystemPrompt
		case "interrupt":
			if s.cancel != nil {
				s.cancel()
			}
		}
		s.mu.Unlock()
		s.write(object{"type": "control_response", "response": object{"subtype": "success", "request_id": m.RequestID, "response": object{}}})
	}
}

// next takes what is queued.
func (s *streamServer) next() []streamMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.queue
	s.queue = nil
	return all
}

// work carries out the messages, one after the other, to the last.
func (s *streamServer) work() {
	for {
		messages := s.next()
		for _, m := range messages {
			s.turn(m)
		}
		if len(messages) > 0 {
			continue
		}
		select {
		case <-s.more:
		case <-s.ended:
			for _, m := range s.next() {
				s.turn(m)
			}
			return
		}
	}
}

func (s *streamServer) turn(m streamMessage) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s.mu.Lock()
	s.cancel = cancel
	system := s.system
	s.mu.Unlock()
	s.tell(m, "started")
	s.write(object{"type": "system", "subtype": "init", "tools": []string{}})
	delta := func(kind string) func(string) {
		return func(text string) {
			s.write(object{"type": "stream_event", "event": object{"type": "content_block_delta", "delta": object{"type": kind, "text": text}}})
		}
	}
	to := sink{
		thought: delta("thinking_delta"), text: delta("text_delta"),
		tool: func(t *tool, args json.RawMessage) bool { return s.permitted(ctx, t, args) },
		done: func(*tool, string) { s.write(object{"type": "user", "message": object{"role": "user"}}) },
		more: func() (texts []string) {
			for _, m := range s.next() {
				s.tell(m, "started")
				texts = append(texts, m.Message.Content[0].Text)
				s.tell(m, "completed")
			}
			return texts
		},
		retry: func(attempt, status int) {
			s.write(object{"type": "system", "subtype": "api_retry", "attempt": attempt, "error_status": status})
		},
	}
	answer, in, out, err := s.agent.prompt(ctx, system, m.Message.Content[0].Text, to)
	s.mu.Lock()
	s.cost += 0.25
	cost := s.cost
	s.mu.Unlock()
	// Its type is not the first key, as with the real one.
	result := object{
		"duration_ms": 1, "is_error": false, "result": answer, "subtype": "success", "type": "result", "total_cost_usd": cost,
		"usage": object{"input_tokens": in, "output_tokens": out, "cache_read_input_tokens": 0},
	}
	state := "completed"
	switch {
	case ctx.Err() != nil:
		result["is_error"], result["subtype"], result["terminal_reason"] = true, "error_during_execution", "aborted_streaming"
		delete(result, "result")
		state = "cancelled"
	case err != nil:
		result["is_error"], result["result"] = true, err.Error()
		state = "cancelled"
	}
	s.write(result)
	s.tell(m, state)
}

// permitted asks the client.
func (s *streamServer) permitted(ctx context.Context, t *tool, args json.RawMessage) bool {
	answer := make(chan json.RawMessage, 1)
	s.mu.Lock()
	s.asked++
	id := fmt.Sprintf("ask-%d", s.asked)
	s.answers[id] = answer
	s.mu.Unlock()
	s.write(object{"type": "control_request", "request_id": id, "request": object{"subtype": "can_use_tool", "tool_name": t.full, "input": args}})
	select {
	case raw := <-answer:
		var v struct {
			Behavior     string          `json:"behavior"`
			UpdatedInput json.RawMessage `json:"updatedInput"`
		}
		return json.Unmarshal(raw, &v) == nil && v.Behavior == "allow" && len(v.UpdatedInput) > 0
	case <-ctx.Done():
		return false
	}
}
