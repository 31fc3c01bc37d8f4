package workspace

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/agent-runner/protocol"
)

// W12: input files sort in the order in which they were written, however many
// come within a millisecond.
func TestW12InputKeepsItsOrder(t *testing.T) {
	g, root := open(t, "family")
	var want []string
	for _, from := range []int64{1, 95, 9_990, 1 << 40} {
		for seq := from; seq < from+50; seq++ {
			check(t, g.WriteInput(seq, nil))
			want = append(want, protocol.InputName(seq))
		}
	}
	entries, err := os.ReadDir(filepath.Join(root, "data/ipc/family/input")) // by name
	check(t, err)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if slices.Max(want) != want[len(want)-1] {
		t.Error("the names do not grow")
	}
}

// W13, W64: nothing that an earlier run left, and no sentinel of whatever kind,
// is there for the next one.
func TestW64NextRunFindsNothing(t *testing.T) {
	g, root := open(t, "family")
	check(t, g.WriteClose())
	check(t, g.WriteInput(1, []byte("{}")))
	check(t, g.WriteResponse("r1.json", []byte("{}")))
	dir := filepath.Join(root, "data/ipc/family")
	for _, name := range []string{
		"input/_interrupt", "input/" + protocol.CloseFile + ".1234.tmp", "input/.hidden", "frames/" + protocol.FrameName(7), "frames/x.tmp",
	} {
		check(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	check(t, os.Mkdir(filepath.Join(dir, "input", "_drain"), 0o700))
	// Requests are no sentinels: they were said, and stay until they are taken.
	check(t, os.WriteFile(filepath.Join(dir, "messages", "1.json"), []byte("{}"), 0o600))
	check(t, g.BeginRun())
	for name, want := range map[string]int{"input": 0, "frames": 0, "responses": 0, "messages": 1} {
		entries, err := os.ReadDir(filepath.Join(dir, name))
		check(t, err)
		if len(entries) != want {
			t.Errorf("%s: %v", name, entries)
		}
	}
}
