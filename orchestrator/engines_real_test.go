//go:build docker && engines

package main

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/web"
)

// realImage makes an image of the root file system that holds the real agent
// programs, as make test-engines prepares it.
func realImage(t *testing.T) string {
	t.Helper()
	rootfs := os.Getenv("BERTH_ENGINES_ROOTFS")
	if rootfs == "" {
		t.Fatal("BERTH_ENGINES_ROOTFS names no root file system with agent programs: make test-engines prepares one")
	}
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	e, err := docker.New(docker.Options{Install: "test-" + berth.NewID(6)})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	tag := "berth-test-engines:" + berth.NewID(4)
	t.Cleanup(func() { _ = exec.Command("docker", "rmi", "-f", tag).Run() })
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if _, err := e.BuildFromRootfs(ctx, rootfs, bin+"/agent-runner", tag, nil); err != nil {
		t.Fatal(err)
	}
	return tag
}

// TestRealEngines: OpenCode and Claude Code themselves, in containers without a
// network.
func TestRealEngines(t *testing.T) {
	image := realImage(t)
	for _, tt := range []struct{ engine, provider string }{{"claude", "anthropic"}, {"opencode", "openai"}} {
		t.Run(tt.engine, func(t *testing.T) {
			h := withModel(t, "AGENT_PROVIDER="+tt.provider, "CONTAINER_IMAGE="+image, "AGENT_SESSION_TIMEOUT=1m")
			mustBerth(t, h.root, "groups", "add", "family", "--no-trigger")
			h.ready()
			engineCases(t, h, "family")
			// auto took what the image holds.
			if log := mustBerth(t, h.root, "logs", "family"); !strings.Contains(log, "engine "+tt.engine+": ") {
				t.Errorf("another engine was chosen:\n%s", log)
			}

			// The operator ends a turn that gets nowhere.
			if _, err := h.send("family", "stall"); err != nil {
				t.Fatal(err)
			}
			if _, err := h.run("family", string(berth.RunBusy)); err != nil {
				t.Fatal(err)
			}
			if _, err := h.client.StopGroup(t.Context(), "family"); err != nil {
				t.Fatal(err)
			}
			if err := h.until("gone", func(s web.Status) bool { return runOf(s, "family").State != berth.RunBusy }); err != nil {
				t.Error(err)
			}
			h.finish()
		})
	}
}
