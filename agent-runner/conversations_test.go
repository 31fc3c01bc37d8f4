package main

import (
	"io"
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/protocol"
)

// speaker is an agent that keeps its first prompt in a file and answers.
const speaker = `sh -c "read -r l; echo '{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"protocolVersion\":1,\"agentCapabilities\":{\"loadSession\":true}}}'; ` +
	`read -r l; echo '{\"jsonrpc\":\"2.0\",\"id\":2,\"result\":{\"sessionId\":\"SESSION\"}}'; ` +
	`read -r l; echo \"\$l\" > prompt; echo '{\"jsonrpc\":\"2.0\",\"method\":\"session/update\",\"params\":{\"sessionId\":\"SESSION\",\"update\":{\"sessionUpdate\":\"agent_message_chunk\",\"content\":{\"type\":\"text\",\"text\":\"Yes.\"}}}}'; ` +
	`echo '{\"jsonrpc\":\"2.0\",\"id\":3,\"result\":{\"stopReason\":\"end_turn\"}}'; read -r l"`

// A conversation that ended is archived when the next one begins, and that one's
// agent is told where it lies.
func TestNextConversationKnowsTheLast(t *testing.T) {
	home, group := t.TempDir(), t.TempDir()
	for _, session := range []string{"first", "second"} {
		at := places{ipc: t.TempDir(), group: group, home: home}
		for _, name := range []string{"input", "frames"} {
			if err := os.Mkdir(filepath.Join(at.ipc, name), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		in := strings.NewReader(stdin(t, protocol.Input{
			Prompt: "are you there in the " + session, Batch: []string{"b1"}, Engine: "acp", SystemPrompt: "You are kind.",
			EngineOptions: map[string]string{engine.OptionCommand: strings.ReplaceAll(speaker, "SESSION", session)},
		}))
		stdout, w := io.Pipe()
		code := make(chan int, 1)
		go func() {
			code <- run(t.Context(), in, w, new(reap.Children), at, log.New(t.Output(), "", 0))
			_ = w.Close()
		}()
		for f, err := range (protocol.Stream{Nonce: "nonce"}).Frames(stdout) {
			if err != nil {
				t.Fatal(err)
			}
			if f.Error != "" {
				t.Fatal(f.Error)
			}
			if f.State == protocol.StateIdle {
				put(t, at, protocol.CloseFile, "")
			}
		}
		if got := <-code; got != 0 {
			t.Fatalf("exit %d", got)
		}
	}
	archives, err := filepath.Glob(filepath.Join(group, "conversations", "*-are-you-there-in-the-first.md"))
	if err != nil || len(archives) != 1 {
		t.Fatal(archives, err)
	}
	prompt, err := os.ReadFile(filepath.Join(group, "prompt"))
	if err != nil || !strings.Contains(string(prompt), "lies in conversations/"+filepath.Base(archives[0])+" ") {
		t.Errorf("prompt %s, %v", prompt, err)
	}
}
