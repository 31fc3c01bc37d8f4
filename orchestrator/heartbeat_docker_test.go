//go:build docker

package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"berth/orchestrator/internal/berth"
)

// What a heartbeat found is told to main's agent with the next message, once, though
// the daemon is killed in between; what main's chat said last is told to the
// heartbeat.
func TestHeartbeatAndTheChatKnowOfEachOther(t *testing.T) {
	h := newHost(t, "")
	h.env = append(h.env, "HEARTBEAT_INTERVAL_MINUTES=60")
	h.addGroup("main")
	h.ready()
	if a, err := h.ask("main", "say the cat is called Minka"); err != nil || len(a.Texts) != 1 {
		t.Fatalf("%+v, %v", a, err)
	}
	file := filepath.Join(h.root, "groups/main/HEARTBEAT.md")
	if err := os.WriteFile(file, []byte("* is the backup there?"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := h.client.ChangeTask(t.Context(), "run", "main", berth.HeartbeatID); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		log, err := h.client.TaskRuns(t.Context(), "main", berth.HeartbeatID, 1)
		return err == nil && len(log) == 1 && log[0].Status == berth.TaskSuccess
	})
	_ = h.end(syscall.SIGKILL)
	h.ready()
	for i, want := range []bool{true, false} {
		a, err := h.ask("main", "echo")
		if err != nil || len(a.Texts) != 1 {
			t.Fatalf("%+v, %v", a, err)
		}
		if told := strings.Contains(a.Texts[0], "[Heartbeat summary]\nok</note>"); told != want {
			t.Errorf("message %d: %s", i, a.Texts[0])
		}
	}
	h.finish()
}
