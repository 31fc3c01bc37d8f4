package tools

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/jsonschema-go/jsonschema"
	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/internal/shell"
	"berth/agent-runner/protocol"
)

// Bounds of what a group brings itself.
const (
	maxOwn      = 64        // tools, and servers
	maxOwnFile  = 256 << 10 // bytes of one description
	maxArgs     = 100 << 10 // bytes: the kernel takes 128 KiB as one argument
	usualTime   = time.Minute
	longestTime = 10 * time.Minute
)

var toolName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{0,47}$`)

// ownTool is a program of the group.
type ownTool struct {
	name    string
	about   string
	path    string
	input   *jsonschema.Schema
	timeout time.Duration
}

// ownTools returns the programs in dir that can be offered, ordered by name: the
// executable weather, or weather.py, is described by weather.json. What cannot be
// used, or has a name in taken, is said on the log.
func ownTools(dir string, taken map[string]bool, log *log.Logger) (tools []ownTool) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			log.Printf("the group's tools: %v", err)
		}
		return nil
	}
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		// A link is as good as what it leads to: it is run in this container only.
		info, err := os.Stat(path)
		if err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 || strings.HasSuffix(path, ".json") {
			continue
		}
		if len(tools) == maxOwn {
			log.Printf("the group's tools: more than %d; the others are left out", maxOwn)
			break
		}
		name, _, _ := strings.Cut(entry.Name(), ".")
		t, err := describe(dir, name)
		if err == nil && taken[name] {
			err = errors.New("another tool has this name")
		}
		if err != nil {
			log.Printf("the group's tool %s is left out: %v", entry.Name(), err)
			continue
		}
		taken[name] = true
		t.path = path
		tools = append(tools, t)
	}
	return tools
}

// describe reads the description of a tool.
func describe(dir, name string) (t ownTool, err error) {
	if !toolName.MatchString(name) {
		return t, errors.New("its name is not 1 to 48 letters, digits, - or _, beginning with a letter")
	}
	data, err := readOwn(filepath.Join(dir, name+".json"))
	if errors.Is(err, fs.ErrNotExist) {
		return t, fmt.Errorf(`%s.json is missing: {"description": "…", "inputSchema": {…}, "timeoutSeconds": 60}`, name)
	}
	var file struct {
		Description    string          `json:"description"`
		InputSchema    json.RawMessage `json:"inputSchema"`
		TimeoutSeconds int64           `json:"timeoutSeconds"`
	}
	if err == nil {
		err = decode(data, &file)
	}
	if err != nil {
		return t, fmt.Errorf("%s.json: %w", name, err)
	}
	t = ownTool{name: name, about: file.Description, timeout: usualTime}
	t.input = &jsonschema.Schema{Type: "object", AdditionalProperties: nothing()}
	if len(file.InputSchema) > 0 {
		var raw any
		t.input = new(jsonschema.Schema)
		if err := errors.Join(json.Unmarshal(file.InputSchema, &raw), json.Unmarshal(file.InputSchema, t.input)); err != nil {
			return t, fmt.Errorf("%s.json: inputSchema: %w", name, err)
		}
		if refers(raw) {
			return t, fmt.Errorf("%s.json: inputSchema has a $ref: write out what it refers to", name)
		}
	}
	if file.TimeoutSeconds != 0 {
		t.timeout = time.Duration(file.TimeoutSeconds) * time.Second
	}
	switch {
	case strings.TrimSpace(t.about) == "":
		return t, fmt.Errorf("%s.json: description is missing", name)
	case t.input.Type != "object":
		return t, fmt.Errorf(`%s.json: the type of inputSchema has to be "object"`, name)
	case t.timeout <= 0 || t.timeout > longestTime:
		return t, fmt.Errorf("%s.json: timeoutSeconds has to be 1 to %.0f", name, longestTime.Seconds())
	}
	if _, err := t.input.Resolve(nil); err != nil {
		return t, fmt.Errorf("%s.json: inputSchema: %w", name, err)
	}
	return t, nil
}

// refers reports whether there is a reference in a schema. One that leads back to
// itself would be followed without end, and that ends the process.
func refers(schema any) bool {
	switch s := schema.(type) {
	case map[string]any:
		for name, value := range s {
			if name == "$ref" || name == "$dynamicRef" || refers(value) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(s, refers)
	}
	return false
}

// call runs the program with the arguments as JSON in its only argument; what it
// prints is the answer.
func (t ownTool) call(ctx context.Context, dir string, args map[string]any) (string, error) {
	text, err := protocol.Marshal(args)
	if err == nil && len(text) > maxArgs {
		err = fmt.Errorf("the arguments have %d bytes and may have %d", len(text), maxArgs)
	}
	if err != nil {
		return "", fmt.Errorf("nothing was done: %w", err)
	}
	result, err := shell.Run(ctx, new(reap.Children), shell.Command{
		Shell: []string{t.path}, Text: string(text), Dir: dir, Env: os.Environ(), Timeout: t.timeout,
	})
	output := strings.ToValidUTF8(strings.TrimRight(result.Output, "\n"), "\uFFFD")
	switch {
	case err != nil:
		return "", fmt.Errorf("%s could not be run: %w", t.name, err)
	case result.TimedOut:
		return "", fmt.Errorf("%s was stopped: it ran for %v. It had printed:\n%s", t.name, t.timeout, output)
	case result.Code != 0:
		return "", fmt.Errorf("%s failed with exit code %d:\n%s", t.name, result.Code, output)
	}
	return output, nil
}

// ownServers returns the servers that the group names in its mcp.json, ordered by
// name. What cannot be used is said on the log.
func ownServers(dir string, log *log.Logger) (servers []engine.ToolServer) {
	data, err := readOwn(filepath.Join(dir, "mcp.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var file struct {
		Servers map[string]json.RawMessage `json:"mcpServers"`
	}
	if err == nil {
		err = decode(data, &file)
	}
	if err != nil {
		log.Printf("the group's mcp.json is left out: %v", err)
		return nil
	}
	for name, text := range file.Servers {
		var one struct {
			Type    string            `json:"type"`
			Command string            `json:"command"`
			Args    []string          `json:"args"`
			Env     map[string]string `json:"env"`
		}
		err := json.Unmarshal(text, &one)
		switch {
		case err != nil:
		case !toolName.MatchString(name):
			err = errors.New("its name is not 1 to 48 letters, digits, - or _, beginning with a letter")
		case strings.EqualFold(name, ServerName):
			err = errors.New("the name is taken")
		case one.Type != "" && one.Type != "stdio":
			err = fmt.Errorf("its type is %.20q: only programs that speak on stdin and stdout can be used", one.Type)
		case one.Command == "":
			err = errors.New("command is missing: only programs that speak on stdin and stdout can be used")
		case strings.Contains(one.Command+strings.Join(one.Args, ""), "\x00"):
			err = errors.New("a zero byte in its command")
		}
		if err != nil {
			log.Printf("the server %.60q in the group's mcp.json is left out: %v", name, err)
			continue
		}
		if strings.Contains(one.Command, "/") && !filepath.IsAbs(one.Command) {
			one.Command = filepath.Join(dir, one.Command)
		}
		servers = append(servers, engine.ToolServer{Name: name, Command: append([]string{one.Command}, one.Args...), Env: one.Env})
	}
	slices.SortFunc(servers, func(a, b engine.ToolServer) int { return strings.Compare(a.Name, b.Name) })
	if len(servers) > maxOwn {
		log.Printf("the group's mcp.json names more than %d servers; the others are left out", maxOwn)
		servers = servers[:maxOwn]
	}
	return servers
}

// readOwn reads a file that an agent may have made: a pipe does not block.
func readOwn(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	data, err := io.ReadAll(io.LimitReader(f, maxOwnFile+1))
	if err == nil && len(data) > maxOwnFile {
		err = fmt.Errorf("it has more than %d bytes", maxOwnFile)
	}
	return data, err
}

// decode reads one JSON object and nothing after it. Names that mean nothing are
// faults, since they may be spelling mistakes.
func decode(data []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the JSON object")
	}
	return nil
}
