package ipc

import (
	"testing"

	"go.uber.org/zap"
)

// From the renaming of a file to its effect, without a store.
func BenchmarkRequest(b *testing.B) {
	w := prepare(b, "family", zap.NewNop())
	end, err := w.box.subscribe()
	check(b, err)
	defer end()
	w.box.budget.requests.SetLimit(1e9)
	w.box.budget.events.SetLimit(1e9)
	w.box.wg.Go(w.box.watch)
	for b.Loop() {
		w.drop("1.json", message("console:family", "hi"))
		w.next()
	}
	w.box.Close()
}
