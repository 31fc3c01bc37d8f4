package outbox

import (
	"testing"
	"time"
)

// What follows within seconds is held up by a moment more, never less and never
// by more than said; the first text of a while is not.
func TestJitter(t *testing.T) {
	pace := Pace{Chunk: time.Second, Text: 2 * time.Second, Burst: 2, Jitter: time.Second}
	seen := map[time.Duration]bool{}
	for range 200 {
		now := time.Now()
		r := &rhythm{pace: pace}
		if got := r.wait("a/0", now); got != 0 {
			t.Fatalf("the first waits %v", got)
		}
		r.out("a/0", now)
		got := r.wait("a/1", now)
		if got < pace.Chunk || got >= pace.Chunk+pace.Jitter {
			t.Fatalf("a piece waits %v", got)
		}
		seen[got] = true
		if got := r.wait("b/0", now); got < 0 || got >= pace.Jitter {
			t.Fatalf("a text of the burst waits %v", got)
		}
		r.out("b/0", now)
		if got := r.wait("c/0", now); got < pace.Text || got >= pace.Text+pace.Jitter {
			t.Fatalf("a text after the burst waits %v", got)
		}
		if got := r.wait("d/0", now.Add(time.Minute)); got != 0 {
			t.Fatalf("after a while it waits %v", got)
		}
	}
	if len(seen) < 100 {
		t.Errorf("%d different waits of 200", len(seen))
	}
}
