// Command oldrunner speaks to its host as CamBot-Agent's runner did, and knows
// nothing newer: marker CAMBOT_AGENT, no nonce, no acknowledgements, a folder that
// it looks into twice a second. It answers what it is told, with what it was told.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const inputs = "/workspace/ipc/input"

type result struct {
	Status  string  `json:"status"`
	Result  *string `json:"result"`
	Session string  `json:"newSessionId,omitempty"`
	Error   string  `json:"error,omitempty"`
}

func emit(r result) {
	data, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	fmt.Printf("---CAMBOT_AGENT_OUTPUT_START---\n%s\n---CAMBOT_AGENT_OUTPUT_END---\n", data)
}

func main() {
	var in struct {
		Prompt          string            `json:"prompt"`
		SessionID       string            `json:"sessionId"`
		IsScheduledTask bool              `json:"isScheduledTask"`
		Secrets         map[string]string `json:"secrets"`
	}
	data, err := io.ReadAll(os.Stdin)
	if err == nil {
		err = json.Unmarshal(data, &in)
	}
	if err != nil {
		emit(result{Status: "error", Error: "Failed to parse input: " + err.Error()})
		os.Exit(1)
	}
	_ = os.Remove(filepath.Join(inputs, "_close"))
	session, resumed := in.SessionID, in.SessionID != ""
	if session == "" {
		session = fmt.Sprintf("old-%d", time.Now().UnixNano())
	}
	prompt := in.Prompt
	if more := drain(); more != "" {
		prompt += "\n" + more
	}
	for {
		fmt.Println("query: the log of an old runner")
		last := prompt[strings.LastIndex(prompt[:max(strings.LastIndex(prompt, "</message>"), 0)], ">")+1:]
		last, _, _ = strings.Cut(last, "</message>")
		if strings.Contains(last, "fail") {
			emit(result{Status: "error", Session: session, Error: "the agent broke"})
			os.Exit(1)
		}
		text := fmt.Sprintf("old: %s (resumed %t, %d secrets)", last, resumed, len(in.Secrets))
		emit(result{Status: "success", Result: &text, Session: session})
		emit(result{Status: "success", Session: session})
		for {
			if _, err := os.Stat(filepath.Join(inputs, "_close")); err == nil {
				_ = os.Remove(filepath.Join(inputs, "_close"))
				return
			}
			if prompt = drain(); prompt != "" {
				break
			}
			time.Sleep(500 * time.Millisecond)
		}
		resumed = true
	}
}

// drain takes the texts that lie there, in the order of their names.
func drain() string {
	names, _ := filepath.Glob(filepath.Join(inputs, "*.json"))
	slices.Sort(names)
	var texts []string
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		_ = os.Remove(name)
		var m struct{ Type, Text string }
		if json.Unmarshal(data, &m) == nil && m.Type == "message" && m.Text != "" {
			texts = append(texts, m.Text)
		}
	}
	return strings.Join(texts, "\n")
}
