package sqlite

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

// fill stores n messages of a chat, about as long as people write them.
func fill(t testing.TB, db *DB, chatJID string, n int) {
	t.Helper()
	var wg sync.WaitGroup
	for from := range 64 {
		wg.Go(func() {
			for i := from; i < n; i += 64 {
				text := fmt.Sprintf("message %d of number%d says %s word%d", i, i%1000, strings.Repeat("something or other ", i%8), i%5000)
				if _, _, err := db.AddMessage(t.Context(), berth.Message{ID: fmt.Sprint(i), ChatJID: chatJID, SenderName: fmt.Sprint("Person", i%9), Text: text, Time: monday}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// meanwhile stores messages of another chat, one after the other, until done is
// closed, and returns how long each took.
func meanwhile(t testing.TB, db *DB, done <-chan struct{}) (took []time.Duration) {
	t.Helper()
	for i := 0; ; i++ {
		select {
		case <-done:
			slices.Sort(took)
			return took
		default:
		}
		start := time.Now()
		if _, _, err := db.AddMessage(t.Context(), berth.Message{ID: fmt.Sprint(i), ChatJID: "other@g.us", Text: "hello", Time: monday}); err != nil {
			t.Error(err)
		}
		took = append(took, time.Since(start))
	}
}

// While a long history is indexed, others store their messages between the pieces,
// and the index is tidied up on the way.
func TestOthersWriteWhileAChatIsIndexed(t *testing.T) {
	db := openFor(t)
	const n = 3000
	fill(t, db, "a@g.us", n)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if got := found(t, db, "a@g.us", "number7 word2007"); len(got) != 1 {
			t.Errorf("found %q", got)
		}
	}()
	if stored := len(meanwhile(t, db, done)); stored < n/100 {
		t.Errorf("%d messages were stored meanwhile", stored)
	}
	if got := segments(t, db); got > 20 {
		t.Errorf("the index is in %d pieces", got)
	}
}

func segments(t testing.TB, db *DB) (n int) {
	t.Helper()
	if err := db.read.QueryRow(`SELECT count(DISTINCT segid) FROM history_idx`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// How long the first search of a huge chat takes, and how long others wait
// meanwhile for a message to be stored.
func BenchmarkFirstSearch(b *testing.B) {
	db := openFor(b)
	fill(b, db, "a@g.us", 200_000)
	idle := make(chan struct{})
	time.AfterFunc(time.Second, func() { close(idle) })
	before := meanwhile(b, db, idle)
	done := make(chan struct{})
	start := time.Now()
	go func() {
		defer close(done)
		if got := found(b, db, "a@g.us", "number7 word7"); len(got) != 40 {
			b.Errorf("found %d", len(got))
		}
	}()
	took := meanwhile(b, db, done)
	b.ReportMetric(time.Since(start).Seconds(), "s-first-search")
	for name, list := range map[string][]time.Duration{"-without": before, "": took} {
		b.ReportMetric(float64(list[len(list)/2].Microseconds())/1000, "ms-p50"+name)
		b.ReportMetric(float64(list[len(list)*99/100].Microseconds())/1000, "ms-p99"+name)
		b.ReportMetric(float64(list[len(list)-1].Microseconds())/1000, "ms-max"+name)
	}
	b.ReportMetric(float64(len(took)), "stored-meanwhile")
	b.ReportMetric(float64(segments(b, db)), "segments")
}
