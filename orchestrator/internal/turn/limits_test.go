package turn

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"berth/orchestrator/internal/berth"
)

// A group gets what its own settings ask for, up to the operator's limits; one
// that asks for more gets the limit, and the logs say so.
func TestLimits(t *testing.T) {
	limits := Limits{Memory: 2 << 30, CPUs: 2, Pids: 512}
	for _, tt := range []struct {
		name   string
		own    berth.ContainerConfig
		limits Limits
		memory int64
		cpus   float64
		pids   int64
		told   int
	}{
		{"nothing of its own", berth.ContainerConfig{}, limits, 1 << 30, 1, 256, 0},
		{"less", berth.ContainerConfig{MemoryMiB: 64, CPUs: 0.5, Pids: 32}, limits, 64 << 20, 0.5, 32, 0},
		{"all there is", berth.ContainerConfig{MemoryMiB: 2048, CPUs: 2, Pids: 512}, limits, 2 << 30, 2, 512, 0},
		{"more", berth.ContainerConfig{MemoryMiB: 2049, CPUs: 2.5, Pids: 513}, limits, 2 << 30, 2, 512, 3},
		{"more than a number holds", berth.ContainerConfig{MemoryMiB: 1 << 62, CPUs: 1e300, Pids: 1 << 62}, limits, 2 << 30, 2, 512, 3},
		{"no limits", berth.ContainerConfig{MemoryMiB: 1 << 20, CPUs: 64, Pids: 1 << 20}, Limits{}, 1 << 40, 64, 1 << 20, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, t.TempDir())
				defer w.close()
				core, logged := observer.New(zap.WarnLevel)
				w.runner.Log = zap.New(core)
				w.runner.Memory, w.runner.CPUs, w.runner.Pids, w.runner.Limits = 1<<30, 1, 256, tt.limits
				c := &carrier{Runner: w.runner, group: family, run: berth.Run{ID: "r"}, log: w.runner.Log}
				c.group.Container = tt.own
				check(t, c.open(t.Context()))
				defer c.release()
				check(t, c.enter())
				got := c.spec(nil)
				if got.Memory != tt.memory || got.CPUs != tt.cpus || got.Pids != tt.pids {
					t.Errorf("got memory %d, CPUs %v, pids %d, want %d, %v, %d", got.Memory, got.CPUs, got.Pids, tt.memory, tt.cpus, tt.pids)
				}
				if n := logged.Len(); n != tt.told {
					t.Errorf("the operator was told %d times, want %d: %v", n, tt.told, logged.All())
				}
				logs, err := filepath.Glob(filepath.Join(w.root, "data/logs/family/*"))
				check(t, err)
				text, err := os.ReadFile(logs[0])
				check(t, err)
				if strings.Count(string(text), "CONTAINER_MAX") != tt.told {
					t.Errorf("the run's log: %q", text)
				}
			})
		})
	}
}
