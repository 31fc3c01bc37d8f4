package fakeagent

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
)

// MCP serves the Model Context Protocol with one tool, note, which returns its
// text and what the environment says of NOTE_FOR.
func MCP(in io.Reader, out io.Writer) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return nil
		}
		var m struct {
			ID     json.RawMessage
			Method string
			Params struct {
				ProtocolVersion string `json:"protocolVersion"`
				Arguments       struct{ Text string }
			}
		}
		if err := json.Unmarshal(line, &m); err != nil {
			return err
		}
		if m.ID == nil {
			continue
		}
		answer := object{"jsonrpc": "2.0", "id": m.ID}
		switch m.Method {
		case "initialize":
			answer["result"] = object{"protocolVersion": m.Params.ProtocolVersion, "capabilities": object{"tools": object{}}, "serverInfo": object{"name": "notes", "version": "1"}}
		case "ping":
			answer["result"] = object{}
		case "tools/list":
			answer["result"] = object{"tools": []object{{
				"name": "note", "description": "Takes a note.",
				"inputSchema": object{"type": "object", "properties": object{"text": object{"type": "string"}}, "required": []string{"text"}},
			}}}
		case "tools/call":
			text := "noted for " + os.Getenv("NOTE_FOR") + ": " + m.Params.Arguments.Text
			answer["result"] = object{"content": []object{{"type": "text", "text": text}}}
		default:
			answer["error"] = object{"code": -32601, "message": "no method " + m.Method}
		}
		if err := writeLine(out, answer); err != nil {
			return err
		}
	}
}
