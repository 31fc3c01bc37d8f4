package tools

import (
	"bytes"
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

// The group's own programs are tools like any other; what is broken is left out
// and said, and nothing of it ends the server.
func TestOwnTools(t *testing.T) {
	w := newWorld(t)
	const script = "#!/bin/sh\n"
	w.put("tools/weather.sh", script+`printf 'args %s in %s\n' "$1" "$(basename "$PWD")"`, 0o700)
	w.put("tools/weather.json", `{"description":"Tells the weather.","inputSchema":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"],"additionalProperties":false},"timeoutSeconds":600}`, 0o600)
	w.put("tools/fails", script+"echo broken >&2; exit 3", 0o700)
	w.put("tools/fails.json", `{"description":"Fails."}`, 0o600)
	w.put("tools/endless", script+"sleep 1000 & sleep 1000", 0o700)
	w.put("tools/endless.json", `{"description":"Takes long.","timeoutSeconds":1}`, 0o600)
	w.put("tools/noisy", script+`yes "$(printf '\377')" | head -c 1000000`, 0o700)
	w.put("tools/noisy.json", `{"description":"Prints much."}`, 0o600)
	w.put("tools/noprogram", "\x7fELF no", 0o700)
	w.put("tools/noprogram.json", `{"description":"Cannot be run."}`, 0o600)
	broken := map[string]string{
		"nosidecar": "nosidecar.json is missing", "nojson": "nojson.json", "typo": "unknown field", "noabout": "description is missing", "nottype": "has to be \"object\"",
		"noschema": "has a $ref", "round": "has a $ref", "regexp": "inputSchema", "slow": "timeoutSeconds", "two": "something follows", "big": "more than", "pipe": "not a regular file", "send_message": "another tool has this name", "-x": "its name is not", "weather.zz": "another tool has this name",
	}
	for name := range broken {
		w.put("tools/"+name, script, 0o700)
	}
	for name, text := range map[string]string{
		"nojson": "{", "typo": `{"descripton":"x"}`, "noabout": `{"description":" "}`, "nottype": `{"description":"x","inputSchema":{"type":"string"}}`,
		"noschema": `{"description":"x","inputSchema":{"type":"object","$ref":"#/nowhere"}}`, "round": `{"description":"x","inputSchema":{"type":"object","properties":{"a":{"$ref":"#/properties/a"}}}}`, "regexp": `{"description":"x","inputSchema":{"type":"object","properties":{"a":{"pattern":"("}}}}`, "slow": `{"description":"x","timeoutSeconds":601}`,
		"two": `{"description":"x"} {}`, "big": `{"description":"` + strings.Repeat("x", maxOwnFile) + `"}`, "send_message": `{"description":"x"}`,
	} {
		w.put("tools/"+name+".json", text, 0o600)
	}
	check(t, unix.Mkfifo(filepath.Join(w.dir, "group/tools/pipe.json"), 0o600))
	check(t, unix.Mkfifo(filepath.Join(w.dir, "group/tools/fifo"), 0o700))
	check(t, os.Symlink("/nowhere", filepath.Join(w.dir, "group/tools/dangling")))
	w.put("tools/readme.txt", "not executable", 0o600)

	var logged bytes.Buffer
	session := w.within(Options{Main: true, Log: log.New(&logged, "", 0)})
	listed, err := session.ListTools(t.Context(), nil)
	check(t, err)
	if n := len(listed.Tools); n != len(table)+5 {
		t.Errorf("%d tools are offered", n)
	}
	for name, want := range broken {
		if i := strings.Index(logged.String(), "tool "+name+" is left out: "); i < 0 || !strings.Contains(strings.SplitN(logged.String()[i:], "\n", 2)[0], want) {
			t.Errorf("%s: not said: %q in\n%s", name, want, &logged)
		}
	}
	for _, c := range []struct {
		tool   string
		args   obj
		failed bool
		want   string
	}{
		{"weather", obj{"city": "a'b\n$(id)"}, false, `args {"city":"a'b\n$(id)"} in group`},
		{"weather", obj{}, true, "nothing was done"},
		{"weather", obj{"city": "x", "y": 1}, true, "nothing was done"},
		{"weather", obj{"city": strings.Repeat("x", maxArgs)}, true, "may have"},
		{"fails", obj{}, true, "fails failed with exit code 3:\nbroken"},
		{"endless", obj{}, true, "endless was stopped: it ran for 1s"},
		{"noisy", obj{}, false, "bytes cut here"},
		{"noprogram", obj{}, true, "noprogram could not be run"},
	} {
		text, failed := call(t, session, c.tool, c.args)
		if failed != c.failed || !strings.Contains(text, c.want) || len(text) > 200<<10 {
			t.Errorf("%s: %v %.300q, want %q", c.tool, failed, text, c.want)
		}
	}
}

func TestServers(t *testing.T) {
	dir := t.TempDir()
	var logged bytes.Buffer
	c := engine.Config{Input: protocol.Input{ChatJID: "own@g.us", GroupFolder: "main", IsMain: true}, WorkDir: dir, Log: log.New(&logged, "", 0)}
	self, err := os.Executable()
	check(t, err)
	own := engine.ToolServer{Name: "berth", Command: []string{self, "tools"}, Env: map[string]string{"BERTH_CHAT": "own@g.us", "BERTH_GROUP": "main", "BERTH_MAIN": "true"}}
	servers := func(text string) []engine.ToolServer {
		t.Helper()
		if text != "" {
			check(t, os.WriteFile(filepath.Join(dir, "mcp.json"), []byte(text), 0o600))
		}
		logged.Reset()
		got, err := Servers(c)
		check(t, err)
		return got
	}
	if d := cmp.Diff([]engine.ToolServer{own}, servers("")); d != "" || logged.Len() > 0 {
		t.Errorf("%s, logged %q", d, &logged)
	}
	got := servers(`{"mcpServers":{
		"b":{"command":"./bin/b","args":["-x"],"env":{"A":"1"}}, "a":{"type":"stdio","command":"npx"},
		"berth":{"command":"evil"}, "Berth":{"command":"evil"}, "web":{"url":"https://x"}, "sse":{"type":"sse","command":"x"}, "no name":{"command":"x"}, "n":7, "z":{"command":"a\u0000b"}
	}}`)
	want := []engine.ToolServer{own, {Name: "a", Command: []string{"npx"}}, {Name: "b", Command: []string{filepath.Join(dir, "bin/b"), "-x"}, Env: map[string]string{"A": "1"}}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if n := strings.Count(logged.String(), "is left out"); n != 7 {
		t.Errorf("%d are said to be left out:\n%s", n, &logged)
	}
	for _, text := range []string{"{", "[]", `{"servers":{}}`, `{"mcpServers":[]}`, strings.Repeat(" ", maxOwnFile+1)} {
		if got := servers(text); len(got) != 1 || strings.Count(logged.String(), "\n") != 1 {
			t.Errorf("%.20q: %v, logged %q", text, got, &logged)
		}
	}
	check(t, os.Remove(filepath.Join(dir, "mcp.json")))
	check(t, unix.Mkfifo(filepath.Join(dir, "mcp.json"), 0o600))
	if got := servers(""); len(got) != 1 || !strings.Contains(logged.String(), "not a regular file") {
		t.Errorf("%v, logged %q", got, &logged)
	}
}
