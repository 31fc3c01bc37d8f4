//go:build docker

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"berth/orchestrator/internal/web"
)

// awaitSaid GROUP PATTERN waits until something that matches is said to a group's
// chat.
func awaitSaid(ts *testscript.TestScript, _ bool, args []string) {
	want := regexp.MustCompile(args[1])
	client := web.NewClient(filepath.Join(ts.Getenv("BERTH_ROOT"), "store", "berth.sock"))
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var texts []string
	for e, err := range client.Chat(ctx, args[0], 0) {
		if err != nil {
			ts.Fatalf("nothing like %q was said in %s: %q, %v", args[1], args[0], texts, err)
		}
		if m := e.Message; m != nil && m.Bot {
			if texts = append(texts, m.Text); want.MatchString(m.Text) {
				return
			}
		}
	}
}

// told waits until a chat is told something that begins with prefix.
func (h *host) told(group, prefix string) {
	h.t.Helper()
	waitFor(h.t, func() bool {
		texts, err := h.said(group)
		return err == nil && slices.ContainsFunc(texts, func(text string) bool { return strings.HasPrefix(text, prefix) })
	})
}

// archives returns what is in the archives of a group.
func (h *host) archives(group string) (all []string) {
	h.t.Helper()
	names, err := filepath.Glob(filepath.Join(h.root, "groups", group, "conversations", "*.md"))
	if err != nil {
		h.t.Fatal(err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			h.t.Fatal(err)
		}
		all = append(all, string(data))
	}
	return all
}

// A model sums its conversation up when people want that, and not what was said
// last; what it kept to itself is in no archive.
func TestCompactWithAModel(t *testing.T) {
	t.Parallel()
	for _, provider := range []string{"anthropic", "openai"} {
		t.Run(provider, func(t *testing.T) {
			h := withModel(t, "AGENT_ENGINE=model", "AGENT_PROVIDER="+provider)
			mustBerth(t, h.root, "groups", "add", "family", "--no-trigger")
			h.ready()
			must := func(text, want string) {
				t.Helper()
				a, err := h.ask("family", text)
				if got := strings.Join(a.Texts, "\n"); err != nil || !strings.Contains(got, want) {
					t.Fatalf("%q: %q, %v; want %q in it\n%s", text, got, err, want, mustBerth(t, h.root, "logs", "family"))
				}
			}
			must("say the beginning "+strings.Repeat("long ", 400), "the beginning")
			must("say seen <internal>hidden</internal>", "seen")
			must("say last", "last")
			h.order("family", "/compact")
			h.told("family", "Shortened the conversation. What was said before is in conversations/")
			all := h.archives("family")
			if len(all) != 1 || !strings.Contains(all[0], "\n**Andy**: the beginning long") || !strings.Contains(all[0], "\n**Andy**: seen\n") || !strings.Contains(all[0], "\n**Andy**: last\n") {
				t.Errorf("archives %q", all)
			}
			must("echo-history", "say last / echo-history")
			h.noKey("family", nil)
			h.finish()
		})
	}
}

// kill -9 of the daemon while somebody waits, with a container and without one: he
// is told once what came of it.
func TestCompactSurvivesAKill(t *testing.T) {
	t.Parallel()
	h := newHost(t, "")
	mustBerth(t, h.root, "groups", "add", "family", "--no-trigger", "--engine", "builtin")
	h.ready()
	for range 7 {
		if _, err := h.ask("family", "hello"); err != nil {
			t.Fatal(err)
		}
	}
	for _, running := range []bool{true, false} {
		if !running {
			for range 7 {
				if _, err := h.ask("family", "hello"); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := h.client.StopGroup(t.Context(), "family"); err != nil {
				t.Fatal(err)
			}
			if err := h.until("stopped", func(s web.Status) bool { return runOf(s, "family").ID == "" }); err != nil {
				t.Fatal(err)
			}
		}
		h.order("family", "/compact")
		_ = h.end(syscall.SIGKILL)
		h.ready()
		waitFor(t, func() bool {
			texts, err := h.said("family")
			n := strings.Count(strings.Join(texts, "\n"), "Shortened the conversation.")
			return err == nil && (running && n == 1 || !running && n == 2)
		})
		if n := len(h.archives("family")); n == 0 {
			t.Error("no archive")
		}
	}
	if a, err := h.ask("family", "history"); err != nil || strings.Contains(a.Texts[0], "turn 8") {
		t.Errorf("%+v, %v", a, err)
	}
	texts, err := h.said("family")
	if n := strings.Count(strings.Join(texts, "\n"), "Shortened the conversation."); n != 2 || err != nil {
		t.Errorf("told %d times: %q, %v", n, texts, err)
	}
	h.finish()
}

// kill -9 of the container: what was said in it is archived with the rest.
func TestConversationSurvivesAKill(t *testing.T) {
	t.Parallel()
	h := newHost(t, "")
	mustBerth(t, h.root, "groups", "add", "family", "--no-trigger", "--engine", "builtin")
	h.ready()
	for _, text := range []string{"the first thing", "the second thing"} {
		if _, err := h.ask("family", text); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("docker", "kill", runOf(h.status(), "family").Container).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := h.until("gone", func(s web.Status) bool { return runOf(s, "family").ID == "" }); err != nil {
			t.Fatal(err)
		}
	}
	h.order("family", "/new")
	if _, err := h.ask("family", "hello"); err != nil {
		t.Fatal(err)
	}
	all := h.archives("family")
	if len(all) != 1 || !strings.Contains(all[0], "\n**operator**: the first thing\n") || !strings.Contains(all[0], "\n**operator**: the second thing\n") || strings.Count(all[0], "\n**Andy**: ") != 2 {
		t.Errorf("archives %q", all)
	}
	h.finish()
}
