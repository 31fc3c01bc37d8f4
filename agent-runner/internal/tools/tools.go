// Package tools is the agent's way to act beyond its container: a server of the
// Model Context Protocol that every engine gets. Each tool asks the host by a file
// and tells the agent what the host answered, not what was asked for. Beside them
// it offers the programs that a group keeps in its own folder.
//
// The host knows by the folder who asks. What this program believes about its
// group decides only what it offers.
package tools

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/google/jsonschema-go/jsonschema"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

// The environment of the server and of the group's own programs: what they may
// believe about the group.
const (
	envChat  = "BERTH_CHAT"
	envGroup = "BERTH_GROUP" // name of its folder
	envMain  = "BERTH_MAIN"
)

// ServerName is the name of our server among those of an engine. No other may
// have it.
const ServerName = "berth"

// Options say for whom tools are offered.
type Options struct {
	IPC  string // folder through which the host is asked
	Dir  string // the group's folder
	Chat string // the group's own
	Main bool
	Log  *log.Logger
}

// Main is the program "agent-runner tools": it serves on stdin and stdout until
// stdin ends. It asks through the folder ipc; dir is the group's.
func Main(ipc, dir string) int {
	logger := log.New(os.Stderr, "tools: ", 0)
	main, _ := strconv.ParseBool(os.Getenv(envMain))
	err := Serve(context.Background(), os.Stdin, os.Stdout, Options{
		IPC: ipc, Dir: dir, Chat: os.Getenv(envChat), Main: main, Log: logger,
	})
	if err != nil {
		logger.Print(err)
		return 1
	}
	return 0
}

// Serve offers the tools on in and out until in ends, which is no error, or ctx
// does.
func Serve(ctx context.Context, in io.ReadCloser, out io.WriteCloser, o Options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h := newHost(o.IPC)
	stop := h.watch(o.Log)
	defer stop()
	server := mcp.NewServer(&mcp.Implementation{Name: ServerName, Version: strconv.Itoa(protocol.Version)}, &mcp.ServerOptions{
		Capabilities: &mcp.ServerCapabilities{Tools: &mcp.ToolCapabilities{}},
	})
	taken := make(map[string]bool)
	for _, t := range table {
		taken[t.name] = true
		if t.main && !o.Main {
			continue
		}
		offer(server, t.name, t.about, t.schema(o.Main), func(ctx context.Context, args map[string]any) (string, error) {
			return t.call(ctx, h, o, args)
		})
	}
	for _, t := range ownTools(filepath.Join(o.Dir, "tools"), taken, o.Log) {
		offer(server, t.name, t.about, t.input, func(ctx context.Context, args map[string]any) (string, error) {
			return t.call(ctx, o.Dir, args)
		})
	}
	return server.Run(ctx, &mcp.IOTransport{Reader: in, Writer: out, MaxLineLength: 4 * maxRequest})
}

// offer adds a tool whose arguments are checked before call gets them. An error of
// call is for the agent.
func offer(server *mcp.Server, name, about string, input *jsonschema.Schema, call func(context.Context, map[string]any) (string, error)) {
	resolved, err := input.Resolve(nil)
	if err != nil {
		panic(fmt.Sprintf("the schema of %s: %v", name, err)) // of ours, or checked
	}
	server.AddTool(&mcp.Tool{Name: name, Description: about, InputSchema: input}, func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		args := make(map[string]any)
		if raw := req.Params.Arguments; len(raw) > 0 {
			if err := json.Unmarshal(raw, &args); err != nil {
				return failed(fmt.Errorf("nothing was done: the arguments are not a JSON object: %w", err)), nil
			}
		}
		if args == nil {
			args = make(map[string]any)
		}
		if err := resolved.Validate(args); err != nil {
			return failed(fmt.Errorf("nothing was done: the arguments of %s cannot be used: %.500s", name, err)), nil
		}
		text, err := call(ctx, args)
		if err != nil {
			return failed(err), nil
		}
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: text}}}, nil
	})
}

func failed(err error) *mcp.CallToolResult {
	return &mcp.CallToolResult{IsError: true, Content: []mcp.Content{&mcp.TextContent{Text: err.Error()}}}
}

// Servers returns what an engine starts for its agent: our own server, and then
// those that the group names in its mcp.json.
func Servers(c engine.Config) ([]engine.ToolServer, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the tools in this program: %w", err)
	}
	own := engine.ToolServer{Name: ServerName, Command: []string{self, "tools"}, Env: map[string]string{
		envChat: c.ChatJID, envGroup: c.GroupFolder, envMain: strconv.FormatBool(c.IsMain),
	}}
	return append([]engine.ToolServer{own}, ownServers(c.WorkDir, c.Log)...), nil
}

// clock is a time as an agent reads it.
func clock(stamp string) string {
	at, err := time.Parse(time.RFC3339, stamp)
	if err != nil {
		return stamp
	}
	return at.Format("2006-01-02 15:04:05 -07:00")
}
