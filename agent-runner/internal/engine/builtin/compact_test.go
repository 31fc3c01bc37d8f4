package builtin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

func (c *chat) compacts(want string) {
	c.t.Helper()
	got, err := c.engine.(engine.Compactor).Compact(c.t.Context(), c)
	if err != nil || got.Outcome != want {
		c.t.Fatalf("got %+v, %v, want %s", got, err, want)
	}
	if is := c.engine.(engine.Compactor).Compacted(); is != (want == protocol.CompactionDone) {
		c.t.Errorf("compacted: %v after %s", is, want)
	}
}

// The last turns stay, in this run and in the next; the first message of a run may
// be the order.
func TestCompact(t *testing.T) {
	home := t.TempDir()
	c := newChat(t, home, "")
	c.compacts(protocol.CompactionNothing)
	for i := range 8 {
		c.say(fmt.Sprintf("Ann: message %d", i))
	}
	first := c.session
	c = newChat(t, home, first)
	c.compacts(protocol.CompactionDone)
	if c.session != first || !c.accepted {
		t.Errorf("session %q, accepted %v", c.session, c.accepted)
	}
	for _, c := range []*chat{c, newChat(t, home, first)} {
		if got := c.say("Ann: history"); strings.Contains(got, "message 2") || !strings.Contains(got, "4. Ann: “message 3”") {
			t.Errorf("got %s", got)
		}
	}
	c.compacts(protocol.CompactionDone)
	c.compacts(protocol.CompactionNothing)
}

func TestCompactOfADamagedSession(t *testing.T) {
	home := t.TempDir()
	_, err := newChat(t, home, "gone").engine.(engine.Compactor).Compact(t.Context(), &chat{})
	if failure, ok := err.(*engine.Error); !ok || failure.Class != protocol.ClassStaleSession {
		t.Errorf("got %v", err)
	}
	c := newChat(t, home, "")
	for i := range 8 {
		c.say(fmt.Sprintf("Ann: message %d", i))
	}
	dir := filepath.Join(home, ".berth", "sessions")
	if err := os.Mkdir(filepath.Join(dir, c.session+".jsonl.tmp"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, c.session+".jsonl.tmp", "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c.compacts(protocol.CompactionFailed)
	if got := c.say("Ann: history"); !strings.Contains(got, "message 0") {
		t.Errorf("got %s", got)
	}
}
