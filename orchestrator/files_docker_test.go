//go:build docker

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

// A container sends a file, and reacts to the message that it got; both are told
// where the operator sees them, and nothing is left in the outbox.
func TestFileAndReactionOfAContainer(t *testing.T) {
	h := newHost(t, "", "p")
	h.ready()
	a, err := h.ask("p", "echo")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(a.Texts[0], ` id="`)
	id, _, _ := strings.Cut(rest, `"`)
	if id == "" || strings.Trim(id, "0123456789") != "" {
		t.Fatalf("the prompt shows no id: %s", a.Texts[0])
	}
	script := strings.Join([]string{
		"write /workspace/group/chart.txt up and up",
		`write /workspace/ipc/messages/1.json {"type":"send_file","chatJid":"console:p","path":"chart.txt","caption":"the chart","requestId":"a"}`,
		`write /workspace/ipc/messages/2.json {"type":"send_file","chatJid":"console:p","path":"/workspace/ipc/lease","requestId":"b"}`,
		`write /workspace/ipc/messages/3.json {"type":"react","chatJid":"console:p","messageId":"` + id + `","emoji":"👍","requestId":"c"}`,
		"say asked",
	}, "\n")
	if _, err := h.ask("p", script); err != nil {
		t.Fatal(err)
	}
	if _, err := h.run("p", "idle"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"[file chart.txt, ", "] the chart\n" + filepath.Join(h.root, "groups/p/chart.txt"), "[reaction 👍 to: echo]"} {
		if err := h.once("p", want); err != nil {
			t.Error(err)
		}
	}
	told, err := os.ReadFile(filepath.Join(h.root, "data/ipc/p/responses/b.json"))
	if err != nil || !strings.Contains(string(told), "name a file below /workspace/group") {
		t.Errorf("%s, %v", told, err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		left, err := os.ReadDir(filepath.Join(h.root, "data/outbox"))
		if err != nil {
			t.Fatal(err)
		}
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("left: %v", left)
		}
	}
	h.finish()
}

// The heartbeat wakes main's agent only if there is something to check.
func TestHeartbeatInAContainer(t *testing.T) {
	h := newHost(t, "")
	h.env = append(h.env, "HEARTBEAT_INTERVAL_MINUTES=60")
	h.addGroup("main")
	h.ready()
	var runs int
	beat := func(want string) {
		t.Helper()
		runs++
		if _, err := h.client.ChangeTask(t.Context(), "run", "main", berth.HeartbeatID); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			log, err := h.client.TaskRuns(t.Context(), "main", berth.HeartbeatID, 10)
			if err != nil {
				t.Fatal(err)
			}
			if len(log) == runs && log[0].Status == berth.TaskSuccess {
				if !strings.Contains(log[0].Result, want) {
					t.Errorf("%q, want %q", log[0].Result, want)
				}
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("the heartbeat did not end: %+v", log)
			}
		}
	}
	file := filepath.Join(h.root, "groups/main/HEARTBEAT.md")
	beat("did not wake the agent: it said so")
	if err := os.WriteFile(file, []byte("# Checks\n\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	beat("did not wake the agent: it said so")
	if err := os.WriteFile(file, []byte("# Checks\n\n* is the backup there?"), 0o644); err != nil {
		t.Fatal(err)
	}
	beat("ok") // the probe's word for anything
	h.finish()
}
