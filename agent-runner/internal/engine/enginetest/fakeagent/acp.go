package fakeagent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
)

// ACP serves the Agent Client Protocol until in ends. It announces session/load
// alone, which tells the history again, if resume is false.
func ACP(in io.Reader, out io.Writer, resume bool) error {
	s := &acpServer{out: out, resume: resume, answers: make(map[int]chan json.RawMessage)}
	defer s.end()
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return nil
		}
		var m acpMessage
		if err := json.Unmarshal(line, &m); err != nil {
			return err
		}
		s.take(m)
	}
}

type acpMessage struct {
	ID     *int
	Method string
	Params struct {
		SessionID  string `json:"sessionId"`
		McpServers []struct {
			Name, Command string
			Args          []string
			Env           []struct{ Name, Value string }
		} `json:"mcpServers"`
		Prompt []struct{ Text string }
	}
	Result json.RawMessage
}

type acpServer struct {
	out    io.Writer
	resume bool
	agent  *agent
	wg     sync.WaitGroup

	mu      sync.Mutex
	id      string
	asked   int // requests to the client: ids from 0
	answers map[int]chan json.RawMessage
	cancel  context.CancelFunc
}

func (s *acpServer) write(v object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v["jsonrpc"] = "2.0"
	_ = writeLine(s.out, v)
}

func (s *acpServer) reply(m acpMessage, result any) { s.write(object{"id": *m.ID, "result": result}) }

func (s *acpServer) refuse(m acpMessage, code int, text string) {
	s.write(object{"id": *m.ID, "error": object{"code": code, "message": text}})
}

func (s *acpServer) update(u object) {
	s.write(object{"method": "session/update", "params": object{"sessionId": s.id, "update": u}})
}

func (s *acpServer) end() {
	s.mu.Lock()
	if s.cancel != nil {
		s.cancel()
	}
	s.mu.Unlock()
	s.wg.Wait()
	if s.agent != nil {
		s.agent.close()
	}
}

func (s *acpServer) take(m acpMessage) {
	switch m.Method {
	case "initialize":
		sessions := object{}
		if s.resume {
			sessions["resume"] = object{}
		}
		s.reply(m, object{"protocolVersion": 1, "agentCapabilities": object{"loadSession": true, "sessionCapabilities": sessions}, "agentInfo": object{"name": "fake", "version": "1"}})
	case "session/new", "session/resume", "session/load":
		s.open(m)
	case "session/prompt":
		ctx, cancel := context.WithCancel(context.Background())
		s.mu.Lock()
		s.cancel = cancel
		s.mu.Unlock()
		s.wg.Go(func() { s.prompt(ctx, m) })
	case "session/cancel":
		s.mu.Lock()
		if s.cancel != nil {
			s.cancel()
		}
		s.mu.Unlock()
	case "":
		s.mu.Lock()
		answer := s.answers[*m.ID]
		s.mu.Unlock()
		if answer != nil {
			answer <- m.Result
		}
	default:
		s.refuse(m, -32601, "no method "+m.Method)
	}
}

func (s *acpServer) open(m acpMessage) {
	id, resumed := m.Params.SessionID, m.Method != "session/new"
	if !resumed {
		id = newID()
	}
	var servers []server
	for _, t := range m.Params.McpServers {
		one := server{name: t.Name, args: append([]string{t.Command}, t.Args...)}
		for _, e := range t.Env {
			one.env = append(one.env, e.Name+"="+e.Value)
		}
		servers = append(servers, one)
	}
	a, err := openAgent(id, resumed, servers)
	if err != nil {
		s.refuse(m, -32603, err.Error())
		return
	}
	s.agent, s.id = a, id
	if m.Method == "session/load" {
		for _, said := range a.history {
			kind := map[any]string{"user": "user_message_chunk", "assistant": "agent_message_chunk"}[said["role"]]
			if text, ok := said["content"].(string); ok && kind != "" {
				s.update(object{"sessionUpdate": kind, "content": object{"type": "text", "text": text}})
			}
		}
	}
	s.reply(m, object{"sessionId": id})
	s.update(object{"sessionUpdate": "available_commands_update", "availableCommands": []any{}})
}

func (s *acpServer) prompt(ctx context.Context, m acpMessage) {
	var text string
	for _, block := range m.Params.Prompt {
		text = block.Text
	}
	if n := len(m.Params.Prompt); strings.Contains(text, "echo-blocks") {
		first, _, _ := strings.Cut(m.Params.Prompt[0].Text, "\n")
		text = fmt.Sprintf("say %d blocks, the first: %s", n, first)
	}
	chunk := func(kind string) func(string) {
		return func(text string) {
			s.update(object{"sessionUpdate": kind, "content": object{"type": "text", "text": text}})
		}
	}
	_, in, out, err := s.agent.prompt(ctx, "", text, sink{
		thought: chunk("agent_thought_chunk"), text: chunk("agent_message_chunk"),
		tool: func(t *tool, args json.RawMessage) bool {
			s.update(object{"sessionUpdate": "tool_call", "toolCallId": "1", "title": t.name, "status": "pending", "rawInput": args})
			return s.permitted(ctx)
		},
		done: func(_ *tool, result string) {
			s.update(object{"sessionUpdate": "tool_call_update", "toolCallId": "1", "status": "completed", "content": []object{{"type": "content", "content": object{"type": "text", "text": result}}}})
		},
		more:  func() []string { return nil },
		retry: func(int, int) {}, // the protocol has no word for it
	})
	switch {
	case ctx.Err() != nil:
		s.reply(m, object{"stopReason": "cancelled"})
	case err != nil:
		text := err.Error()
		if r, ok := errors.AsType[*refusal](err); ok {
			text = r.message // as OpenCode does: no status
		}
		s.refuse(m, -32603, "Internal error: "+text)
	default:
		s.reply(m, object{"stopReason": "end_turn", "usage": object{"inputTokens": in, "outputTokens": out, "totalTokens": in + out}})
	}
}

// permitted asks the client.
func (s *acpServer) permitted(ctx context.Context) bool {
	answer := make(chan json.RawMessage, 1)
	s.mu.Lock()
	id := s.asked
	s.asked++
	s.answers[id] = answer
	s.mu.Unlock()
	s.write(object{"id": id, "method": "session/request_permission", "params": object{"sessionId": s.id, "toolCall": object{"toolCallId": "1"}, "options": []object{
		{"optionId": "allow", "kind": "reject_once", "name": "No"}, // the kind counts
		{"optionId": "yes", "kind": "allow_once", "name": "Yes"},
	}}})
	select {
	case raw := <-answer:
		var v struct {
			Outcome struct {
				Outcome  string `json:"outcome"`
				OptionID string `json:"optionId"`
			} `json:"outcome"`
		}
		return json.Unmarshal(raw, &v) == nil && v.Outcome.Outcome == "selected" && v.Outcome.OptionID == "yes"
	case <-ctx.Done():
		return false
	}
}
