// Package fakeagent is what agent programs are made of, for tests that have none:
// it asks a model, calls its tools, and keeps its sessions. ACP and StreamJSON
// speak for it as the real ones do.
package fakeagent

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

type object = map[string]any

// server is a program that offers tools.
type server struct {
	name string
	args []string
	env  []string
}

// agent is one session.
type agent struct {
	path    string // of the session's file
	history []object
	tools   []*tool
	servers []*exec.Cmd
}

type tool struct {
	name, full  string
	description string
	call        func(ctx context.Context, args json.RawMessage) string
}

// sink takes what happens in a turn.
type sink struct {
	thought func(text string)
	text    func(text string)
	tool    func(t *tool, args json.RawMessage) bool // asks for permission
	done    func(t *tool, result string)
	more    func() []string // messages that came meanwhile; asked after tools
	retry   func(attempt, status int)
}

// refusal is an answer of the provider's that is none.
type refusal struct {
	status  int
	message string
}

func (r *refusal) Error() string { return fmt.Sprintf("API Error: %d %s", r.status, r.message) }

var errUnknown = errors.New("no such session")

func newID() string { return "fake-" + strings.ToLower(rand.Text()) }

// openAgent opens the session, which has to be there if it is resumed.
func openAgent(id string, resumed bool, servers []server) (*agent, error) {
	dir := filepath.Join(os.Getenv("HOME"), ".fakeagent")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	a := &agent{path: filepath.Join(dir, filepath.Base(id)+".json")}
	data, err := os.ReadFile(a.path)
	if err == nil {
		err = json.Unmarshal(data, &a.history)
	}
	if resumed && err != nil {
		return nil, errUnknown
	}
	a.tools = append(a.tools, &tool{name: "bash", full: "bash", description: "runs a command", call: bash})
	for _, s := range servers {
		if err := a.connect(s); err != nil {
			return nil, fmt.Errorf("tools of %s: %w", s.name, err)
		}
	}
	return a, nil
}

func (a *agent) close() {
	for _, cmd := range a.servers {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

func bash(ctx context.Context, args json.RawMessage) string {
	var in struct {
		Command string `json:"command"`
	}
	if err := json.Unmarshal(args, &in); err != nil {
		return err.Error()
	}
	out, _ := exec.CommandContext(ctx, "/bin/sh", "-c", in.Command).CombinedOutput()
	return string(out)
}

// connect starts a server of the Model Context Protocol and takes its tools.
func (a *agent) connect(s server) error {
	cmd := exec.Command(s.args[0], s.args[1:]...)
	cmd.Env = append(os.Environ(), s.env...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	a.servers = append(a.servers, cmd)
	lines := bufio.NewReader(out)
	var mu sync.Mutex
	n := 0
	call := func(method string, params, into any) error {
		mu.Lock()
		defer mu.Unlock()
		n++
		if err := writeLine(in, object{"jsonrpc": "2.0", "id": n, "method": method, "params": params}); err != nil {
			return err
		}
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				return err
			}
			var m struct {
				ID     *int
				Result json.RawMessage
				Error  *struct{ Message string }
			}
			if json.Unmarshal(line, &m) != nil || m.ID == nil || *m.ID != n {
				continue
			}
			if m.Error != nil {
				return errors.New(m.Error.Message)
			}
			return json.Unmarshal(m.Result, into)
		}
	}
	var hello object
	err = call("initialize", object{"protocolVersion": "2025-06-18", "capabilities": object{}, "clientInfo": object{"name": "fakeagent", "version": "1"}}, &hello)
	if err != nil {
		return err
	}
	if err := writeLine(in, object{"jsonrpc": "2.0", "method": "notifications/initialized"}); err != nil {
		return err
	}
	var offered struct {
		Tools []struct{ Name, Description string }
	}
	if err := call("tools/list", object{}, &offered); err != nil {
		return err
	}
	for _, t := range offered.Tools {
		a.tools = append(a.tools, &tool{
			name: t.Name, full: "mcp__" + s.name + "__" + t.Name, description: t.Description,
			call: func(_ context.Context, args json.RawMessage) string {
				var result struct{ Content []struct{ Text string } }
				if err := call("tools/call", object{"name": t.Name, "arguments": args}, &result); err != nil {
					return err.Error()
				}
				var all []string
				for _, c := range result.Content {
					all = append(all, c.Text)
				}
				return strings.Join(all, "\n")
			},
		})
	}
	return nil
}

// prompt runs one turn and returns its whole text, and how many tokens went in and
// out.
func (a *agent) prompt(ctx context.Context, system, text string, to sink) (answer string, in, out int, err error) {
	a.history = append(a.history, object{"role": "user", "content": text})
	for {
		said, calls, usage, err := a.ask(ctx, system, to)
		for attempt := 1; attempt <= 2 && ctx.Err() == nil; attempt++ {
			refused, ok := errors.AsType[*refusal](err)
			if !ok {
				break
			}
			to.retry(attempt, refused.status)
			said, calls, usage, err = a.ask(ctx, system, to)
		}
		in, out = in+usage[0], out+usage[1]
		if err != nil {
			return said, in, out, err
		}
		turn := object{"role": "assistant", "content": said}
		if len(calls) > 0 {
			turn["tool_calls"] = calls
		}
		a.history = append(a.history, turn)
		if len(calls) == 0 {
			return said, in, out, a.save()
		}
		for _, c := range calls {
			f := c["function"].(object)
			args := json.RawMessage(f["arguments"].(string))
			result := "no such tool"
			if i := slices.IndexFunc(a.tools, func(t *tool) bool { return t.full == f["name"] }); i >= 0 {
				t := a.tools[i]
				result = "not allowed"
				if to.tool(t, args) {
					result = t.call(ctx, args)
				}
				to.done(t, result)
			}
			if ctx.Err() != nil {
				return said, in, out, ctx.Err()
			}
			a.history = append(a.history, object{"role": "tool", "tool_call_id": c["id"], "content": result})
		}
		for _, text := range to.more() {
			a.history = append(a.history, object{"role": "user", "content": text})
		}
	}
}

// save keeps the session; a turn that failed is not in it.
func (a *agent) save() error {
	data, err := json.Marshal(a.history)
	if err != nil {
		return err
	}
	if err := os.WriteFile(a.path+".tmp", data, 0o600); err != nil {
		return err
	}
	return os.Rename(a.path+".tmp", a.path)
}

// ask asks the model once.
func (a *agent) ask(ctx context.Context, system string, to sink) (said string, calls []object, usage [2]int, err error) {
	messages := append([]object{{"role": "system", "content": system}}, a.history...)
	var tools []object
	for _, t := range a.tools {
		tools = append(tools, object{"type": "function", "function": object{"name": t.full, "description": t.description, "parameters": object{"type": "object"}}})
	}
	body, err := json.Marshal(object{"model": "fake-1", "stream": true, "stream_options": object{"include_usage": true}, "messages": messages, "tools": tools})
	if err != nil {
		return "", nil, usage, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, os.Getenv("OPENAI_BASE_URL")+"/chat/completions", bytes.NewReader(body))
	if err != nil {
		return "", nil, usage, err
	}
	req.Header.Set("Authorization", "Bearer "+os.Getenv("OPENAI_API_KEY"))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", nil, usage, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		var v struct{ Error struct{ Message string } }
		_ = json.NewDecoder(resp.Body).Decode(&v)
		return "", nil, usage, &refusal{resp.StatusCode, v.Error.Message}
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return said, calls, usage, nil
		}
		var chunk struct {
			Choices []struct {
				Delta struct {
					Content   string
					Reasoning string `json:"reasoning_content"`
					ToolCalls []struct {
						Index    int
						ID       string
						Function struct{ Name, Arguments string }
					} `json:"tool_calls"`
				}
			}
			Usage *struct {
				In  int `json:"prompt_tokens"`
				Out int `json:"completion_tokens"`
			}
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return said, nil, usage, err
		}
		if u := chunk.Usage; u != nil {
			usage = [2]int{u.In, u.Out}
		}
		for _, choice := range chunk.Choices {
			if d := choice.Delta.Reasoning; d != "" {
				to.thought(d)
			}
			if d := choice.Delta.Content; d != "" {
				said += d
				to.text(d)
			}
			for _, c := range choice.Delta.ToolCalls {
				if c.Index == len(calls) {
					calls = append(calls, object{"id": c.ID, "type": "function", "function": object{"name": c.Function.Name, "arguments": ""}})
				}
				f := calls[c.Index]["function"].(object)
				f["arguments"] = f["arguments"].(string) + c.Function.Arguments
			}
		}
	}
	return said, nil, usage, errors.Join(errors.New("the stream broke off"), lines.Err())
}

func writeLine(w io.Writer, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(data, '\n'))
	return err
}
