package loop

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/transcript"
	"berth/agent-runner/protocol"
)

// compactable is an engine whose conversation can be made shorter.
type compactable struct {
	script
	compact func(ctx context.Context, to engine.Turn) (engine.Compaction, error)
	itself  bool // it was made shorter without an order
}

func (c *compactable) Compact(ctx context.Context, to engine.Turn) (engine.Compaction, error) {
	return c.compact(ctx, to)
}

func (c *compactable) Compacted() bool {
	was := c.itself
	c.itself = false
	return was
}

func done(_ context.Context, to engine.Turn) (engine.Compaction, error) {
	to.Session("s1")
	to.Accept()
	return engine.Compaction{Outcome: protocol.CompactionDone}, nil
}

const order = `{"type":"message","text":"/compact","id":"compact-1","compact":true}`

// keeping gives the run a transcript, and returns the folder of its archives.
func (r *run) keeping(in protocol.Input) (conversations string) {
	home, dir := r.t.TempDir(), r.t.TempDir()
	r.loop.Said = transcript.Open(transcript.Config{Input: in, Home: home, Dir: dir, Log: r.loop.Log})
	r.t.Cleanup(r.loop.Said.Close)
	return filepath.Join(dir, "conversations")
}

func texts(t *testing.T, dir string) (all []string) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		_, text, _ := strings.Cut(string(data), "---\n\n")
		all = append(all, text)
	}
	return all
}

// The order has a turn of its own, between the messages that were there before it
// and those that came after; what was said is archived, without those.
func TestCompactionHasItsTurn(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent := &compactable{script: echo, compact: done}
		r := newRun(t, dir, agent)
		conversations := r.keeping(protocol.Input{AssistantName: "Andy"})
		r.loop.Input.AssistantName = "Andy"
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`, "state idle")
		r.drop(protocol.InputName(1), `{"type":"message","text":"before","id":"m1"}`)
		r.drop(protocol.InputName(2), order)
		r.drop(protocol.InputName(3), `{"type":"message","text":"after","id":"m2"}`)
		r.ring()
		r.said("ack m1", "state busy", `output "before"`, "state idle",
			"ack compact-1", "state busy", "output null s1 done archived", "state idle",
			"ack m2", "state busy", `output "after" s1`, "state idle")
		want := "**User**: first\n\n**Andy**: first\n\n**User**: before\n\n**Andy**: before\n"
		if got := texts(t, conversations); len(got) != 1 || got[0] != want {
			t.Errorf("archives %q", got)
		}
		// The same order again does nothing but say so.
		r.drop(protocol.InputName(4), order)
		r.ring()
		r.said("ack compact-1")
		// What the engine does by itself is archived as well.
		agent.itself = true
		r.drop(protocol.InputName(5), `{"type":"message","text":"more","id":"m3"}`)
		r.ring()
		r.said("ack m3", "state busy", `output "more" s1`, "state idle")
		if got := texts(t, conversations); len(got) != 2 {
			t.Errorf("archives %q", got)
		}
		r.closeRun()
	})
}

// A run may begin with the order.
func TestRunBeginsWithCompaction(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRun(t, dir, &compactable{script: echo, compact: done})
		r.loop.Input = protocol.Input{SessionID: "s1", Prompt: "/compact", Compact: true, Batch: []string{"compact-7"}}
		r.drop(protocol.InputName(1), `{"type":"message","text":"waits","id":"m1"}`)
		r.start()
		r.said("ready", "ack compact-7", "state busy", "output null s1 done", "state idle",
			"ack m1", "state busy", `output "waits" s1`, "state idle")
		r.closeRun()
	})
}

func TestCompactionOutcomes(t *testing.T) {
	for name, c := range map[string]struct {
		agent engine.Engine
		want  []string
	}{
		"cannot": {script(echo), []string{"ack compact-1", "state busy", "output null unable", "state idle"}},
		"nothing": {&compactable{script: echo, compact: func(_ context.Context, to engine.Turn) (engine.Compaction, error) {
			return engine.Compaction{Outcome: protocol.CompactionNothing}, nil
		}}, []string{"ack compact-1", "state busy", "output null nothing", "state idle"}},
		"failed": {&compactable{script: echo, compact: func(_ context.Context, to engine.Turn) (engine.Compaction, error) {
			return engine.Compaction{Outcome: protocol.CompactionFailed, Reason: "no key"}, nil
		}}, []string{"ack compact-1", "state busy", "output null failed no key", "state idle"}},
		"failed at length": {&compactable{script: echo, compact: func(_ context.Context, to engine.Turn) (engine.Compaction, error) {
			return engine.Compaction{Outcome: protocol.CompactionFailed, Reason: strings.Repeat("𝔘", 10_000)}, nil
		}}, []string{"ack compact-1", "state busy", "output null failed " + strings.Repeat("𝔘", 500) + "…", "state idle"}},
		"error": {&compactable{script: echo, compact: func(_ context.Context, to engine.Turn) (engine.Compaction, error) {
			return engine.Compaction{}, errors.New("gone")
		}}, []string{`output error "gone"`}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				r := newRun(t, dir, c.agent)
				r.start()
				r.said("ready", "ack b1", "state busy", `output "first"`, "state idle")
				r.drop(protocol.InputName(1), order)
				r.ring()
				r.said(c.want...)
				if name != "error" {
					r.closeRun()
				}
			})
		})
	}
}

// An order is stopped as a turn is; one that has yet to come, when it comes.
func TestStoppedCompaction(t *testing.T) {
	for _, early := range []bool{false, true} {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			r := newRun(t, dir, &compactable{script: echo, compact: func(ctx context.Context, to engine.Turn) (engine.Compaction, error) {
				to.Accept()
				<-ctx.Done()
				return engine.Compaction{}, context.Cause(ctx)
			}})
			r.start()
			r.said("ready", "ack b1", "state busy", `output "first"`, "state idle")
			stop := `{"type":"stop","id":"compact-1"}`
			if early {
				r.drop(protocol.InputName(1), stop)
				r.ring()
			}
			r.drop(protocol.InputName(2), order)
			r.ring()
			if !early {
				r.said("ack compact-1", "state busy")
				r.drop(protocol.InputName(3), stop)
				r.ring()
				r.said("output null", "state idle")
			} else {
				r.said("ack compact-1", "state busy", "output null", "state idle")
			}
			if notes := strings.Join(r.notes, ""); notes != "it was stopped" {
				t.Errorf("notes %q", notes)
			}
			r.closeRun()
		})
	}
}

// An order is not steered into the turn under way, and what follows waits with it.
func TestCompactionIsNotSteered(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		agent, gate := gated()
		steered := make(chan string, 9)
		r := newRun(t, dir, steerable{agent, steered})
		conversations := r.keeping(protocol.Input{AssistantName: "Andy"})
		r.start()
		r.said("ready", "ack b1", "state busy", `output "first"`)
		r.put(1, "before", "m1")
		r.drop(protocol.InputName(2), order)
		r.put(3, "after", "m2")
		r.said("ack m1")
		if n := len(steered); n != 1 {
			t.Errorf("%d messages were steered", n)
		}
		gate <- nil
		r.said("state idle", "ack compact-1", "state busy", "output null unable", "state idle", "ack m2", "state busy", `output "after"`)
		gate <- nil
		r.said("state idle")
		if _, err := r.loop.Said.Archive(); err != nil {
			t.Error(err)
		}
		if got, want := strings.Join(texts(t, conversations), ""), "**User**: first\n\n**Andy**: first\n\n**User**: before\n\n**User**: after\n\n**Andy**: after\n"; got != want {
			t.Errorf("archive %q, want %q", got, want)
		}
		r.closeRun()
	})
}
