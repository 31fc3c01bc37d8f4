//go:build docker

package main

import (
	"context"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"berth/agent-runner/fakemodel"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/web"
)

// withModel makes a host whose provider, for both protocols, is a fake one that
// wants secretKey.
func withModel(t *testing.T, env ...string) *host {
	t.Helper()
	fake := fakemodel.New()
	fake.Want = secretKey
	server := httptest.NewServer(fake)
	t.Cleanup(server.Close)
	h := newHost(t, "")
	h.env = append(h.env, "ANTHROPIC_BASE_URL="+server.URL, "ANTHROPIC_API_KEY="+secretKey,
		"OPENAI_BASE_URL="+server.URL+"/v1", "OPENAI_API_KEY="+secretKey, "AGENT_MODEL="+fakemodel.Model)
	h.env = append(h.env, env...)
	return h
}

// engineCases is what every engine with a model has to do in its container, which
// has no network.
func engineCases(t *testing.T, h *host, group string) {
	t.Helper()
	must := func(text, want string) {
		t.Helper()
		a, err := h.ask(group, text)
		if got := strings.Join(a.Texts, "\n"); err != nil || !strings.Contains(got, want) {
			t.Fatalf("%q: %q, %v; want %q in it\n%s", text, got, err, want, mustBerth(t, h.root, "logs", group))
		}
	}
	runID := func() string { return runOf(h.status(), group).ID }

	must("say hello from the model", "hello from the model")
	first := runID()
	must("say and a follow-up", "and a follow-up")
	if again := runID(); again != first {
		t.Errorf("the follow-up went to run %s, after %s", again, first)
	}
	must(`tool send_message {"text":"said by a tool"}`, "tool said:")
	if err := h.once(group, "said by a tool"); err != nil {
		t.Error(err)
	}
	h.noKey(group, nil)
	ids, err := h.containers(group)
	if err != nil || len(ids) != 1 {
		t.Fatal(ids, err)
	}
	if out, err := exec.Command("docker", "inspect", "-f", "{{.HostConfig.NetworkMode}}", ids[0]).Output(); strings.TrimSpace(string(out)) != "none" {
		t.Errorf("network %s, %v", out, err)
	}

	// A new container goes on with the session.
	if _, err := h.client.StopGroup(t.Context(), group); err != nil {
		t.Fatal(err)
	}
	if err := h.until("stopped", func(s web.Status) bool { return runOf(s, group).ID == "" }); err != nil {
		t.Fatal(err)
	}
	must("echo-history", "hello from the model")
	if runID() == first {
		t.Error("it is still the first run")
	}

	// What the provider refuses is told in words for people, and the group is not
	// lost.
	if _, err := h.send(group, "http 401 authentication_error"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		texts, err := h.said(group)
		return err == nil && strings.Contains(strings.ToLower(strings.Join(texts, "\n")), "key")
	})
	must("say back again", "back again")
}

// The engine that is part of the runner.
func TestModelEngine(t *testing.T) {
	t.Parallel()
	for _, provider := range []string{"anthropic", "openai"} {
		t.Run(provider, func(t *testing.T) {
			h := withModel(t, "AGENT_ENGINE=model", "AGENT_PROVIDER="+provider)
			mustBerth(t, h.root, "groups", "add", "family", "--no-trigger")
			h.ready()
			engineCases(t, h, "family")
			h.finish()
		})
	}
}

// A container of an image that was made for CamBot-Agent is told all that it needs
// by the old rules: its marker, no nonce, files that are gone count as read.
func TestOldRunner(t *testing.T) {
	t.Parallel()
	runner := filepath.Join(t.TempDir(), "old")
	build := exec.Command("go", "build", "-trimpath", "-o", runner, "berth/orchestrator/testdata/oldrunner")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	e, err := docker.New(docker.Options{Install: "test-" + berth.NewID(6)})
	if err != nil {
		t.Fatal(err)
	}
	tag := "berth-test-old:" + berth.NewID(4)
	t.Cleanup(func() {
		_ = exec.Command("docker", "rmi", "-f", tag).Run()
		_ = e.Close()
	})
	dockerfile := "FROM scratch\nCOPY agent-runner /old\nLABEL berth.marker=CAMBOT_AGENT\nENTRYPOINT [\"/old\"]\n"
	if err := e.BuildFromDockerfile(context.Background(), []byte(dockerfile), runner, tag, nil, nil); err != nil {
		t.Fatal(err)
	}

	h := newHost(t, "")
	h.env = append(h.env, "CREDENTIALS=stdin", "ANTHROPIC_API_KEY="+secretKey)
	mustBerth(t, h.root, "groups", "add", "family", "--no-trigger", "--image", tag)
	h.ready()
	must := func(text, want string) {
		t.Helper()
		a, err := h.ask("family", text)
		if got := strings.Join(a.Texts, "\n"); err != nil || got != want {
			t.Fatalf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
	must("one", "old: one (resumed false, 1 secrets)")
	first := runOf(h.status(), "family").ID
	must("two", "old: two (resumed true, 1 secrets)")
	must("three", "old: three (resumed true, 1 secrets)")
	if again := runOf(h.status(), "family").ID; again != first {
		t.Errorf("follow-ups went to run %s, after %s", again, first)
	}

	// The daemon ends and comes back while it is idle; then in the middle.
	if _, err := h.client.StopGroup(t.Context(), "family"); err != nil {
		t.Fatal(err)
	}
	if err := h.until("closed", func(s web.Status) bool { return len(s.Runs) == 0 }); err != nil {
		t.Fatal(err)
	}
	must("four", "old: four (resumed true, 1 secrets)")
	if err := h.end(os.Kill); err != nil && !strings.Contains(err.Error(), "killed") {
		t.Fatal(err)
	}
	h.ready()
	must("five", "old: five (resumed true, 1 secrets)")
	if err := h.once("family", "old: one", "old: two", "old: three", "old: four", "old: five"); err != nil {
		t.Error(err)
	}
	h.finish()
}
