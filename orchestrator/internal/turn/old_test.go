package turn

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/orchestrator/internal/berth"
)

// TestOldRunnerThatNeverStops: where any tool can print an answer, what the store
// takes of a run has an end: of large answers and of small ones.
func TestOldRunnerThatNeverStops(t *testing.T) {
	for name, size := range map[string]int{"large": 60 << 10, "small": 6} {
		t.Run(name, func(t *testing.T) {
			play(t, func(w *world) {
				w.runner.Engine, w.runner.MaxOutput = oldEngine{w.engine}, 200<<10
				seq := w.say("@Andy work")
				b := w.started()
				say := func(n int) {
					fmt.Fprintf(b.out, "---CAMBOT_AGENT_OUTPUT_START---\n{\"status\":\"success\",\"result\":\"%0*d\"}\n---CAMBOT_AGENT_OUTPUT_END---\n", size, n)
					synctest.Wait()
				}
				within := int(w.runner.MaxOutput) / (size + textCost)
				for i := range within {
					say(i)
				}
				equal(t, "stops within the bound", b.stopped(), 0)
				b.mu.Lock()
				b.stubborn = true // and goes on to print
				b.mu.Unlock()
				for i := range 3 {
					say(within + i)
				}
				equal(t, "stops", b.stopped(), 1)
				b.end(Exit{Code: 137})
				equal(t, "fate", w.fate(seq).State, berth.FateDone)
				equal(t, "bytes", len(strings.Join(w.outbox(), "")), within*size)
				time.Sleep(time.Hour)
				equal(t, "runs", len(w.engine.boxes), 0)
			})
		})
	}
}
