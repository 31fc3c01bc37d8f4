package turn

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/queue"
)

// HS-05 and HS-09 are about tools that declare their timeout, which there is no
// frame for; HS-14 is about reading times, which never leave the process here.
func TestHS01To10Judge(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	const s, m = time.Second, time.Minute
	// A run of an hour that said ready and is listened to.
	hour := func(heard time.Time, claims ...claim) signs {
		return signs{started: ago(60 * m), ready: ago(60 * m), open: ago(60 * m), heard: heard, claims: claims, ceiling: 30 * m}
	}
	never := func(age time.Duration, claims ...claim) signs {
		return signs{started: ago(age), open: ago(age), claims: claims, ceiling: 30 * m}
	}
	with := func(s signs, change func(*signs)) signs { change(&s); return s }

	for _, c := range []struct {
		name  string
		signs signs
		stuck []string // words of the verdict; none: it lives
		next  time.Duration
	}{
		{"HS-01 heard 5 s ago", hour(ago(5 * s)), nil, 30*m - 5*s},
		{"HS-02 heard over 30 min ago", hour(ago(31 * m)), []string{"no sign of life for 31m0s", "at most 30m0s"}, 0},
		{"HS-02 at the ceiling", hour(ago(30 * m)), []string{"for 30m0s"}, 0},
		{"HS-02 just before", hour(ago(30*m - 1)), nil, 1},
		{"HS-03 just started", never(0), nil, 30 * m},
		{"HS-03 never heard at all", never(30 * m), []string{"no sign of life for 30m0s"}, 0},
		{"HS-03 nothing known", signs{ceiling: 30 * m}, nil, 0},
		{"HS-04 claim, and only ready was heard", with(never(70*s, claim{"m1", ago(70 * s)}), func(s *signs) { s.ready = ago(61 * time.Second); s.heard = s.ready }),
			[]string{"m1", "for 1m1s", "at most 1m0s"}, 0},
		{"HS-04 ready came late", with(never(70*s, claim{"m1", ago(70 * s)}), func(s *signs) { s.ready = ago(20 * time.Second); s.heard = s.ready }), nil, 40 * s},
		{"HS-04 never ready", never(20*m, claim{"m1", ago(20 * m)}), nil, 10 * m},
		{"HS-04 an older runner", with(hour(ago(20*m), claim{"m1", ago(10 * m)}), func(s *signs) { s.ready = time.Time{} }), nil, 20 * m},
		{"HS-06 heard before the claim", hour(ago(71*s), claim{"m1", ago(70 * s)}), []string{`message "m1"`, "for 1m10s", "at most 1m0s"}, 0},
		{"HS-06 at the tolerance", hour(ago(2*m), claim{"m1", ago(m)}), []string{"for 1m0s"}, 0},
		{"HS-06 the second claim", hour(ago(2*m), claim{"m1", ago(50 * s)}, claim{"m2", ago(61 * s)}), []string{`message "m2"`}, 0},
		{"HS-07 heard since the claim", hour(ago(2*s), claim{"m1", ago(70 * s)}), nil, 30*m - 2*s},
		{"HS-08 fresh claim", hour(ago(25*m), claim{"m1", ago(5 * s)}), nil, 55 * s},
		{"HS-08 fresh claim after a long rest", hour(ago(45*m), claim{"m1", ago(5 * s)}), nil, 55 * s},
		{"HS-10 claim of no known time", hour(ago(25*m), claim{id: "m1"}), nil, 5 * m},
		{"stream broken", with(hour(ago(3*m), claim{"m1", ago(2 * m)}), func(s *signs) { s.open = time.Time{} }), nil, 28 * m},
		{"stream open again", with(hour(ago(3*m), claim{"m1", ago(2 * m)}), func(s *signs) { s.open = ago(10 * time.Second) }), nil, 50 * s},
		{"and still nothing", with(hour(ago(3*m), claim{"m1", ago(2 * m)}), func(s *signs) { s.open = ago(time.Minute) }), []string{"m1", "for 2m0s"}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := judge(now, c.signs)
			equal(t, "stuck", v.stuck != "", c.stuck != nil)
			for _, words := range c.stuck {
				if !strings.Contains(v.stuck, words) {
					t.Errorf("got %q, want %q in it", v.stuck, words)
				}
			}
			next := time.Duration(0)
			if !v.next.IsZero() {
				next = v.next.Sub(now)
			}
			equal(t, "next", next, c.next)
		})
	}
}

// answered starts a run, lets it answer and rest, and gives it m2, which it has
// not taken.
func (w *world) answered() (*fakeBox, int64) {
	w.t.Helper()
	w.say("@Andy one")
	b := w.started()
	b.ready()
	b.turn("hi", "m1")
	time.Sleep(time.Minute)
	seq := w.say("@Andy two")
	equal(w.t, "input", len(w.input()), 1)
	return b, seq
}

// HS-11, HS-12: what a stuck run had is pending again, counted and put off, and
// the next container is not held to it.
func TestHS11And12StuckRunGivesBack(t *testing.T) {
	play(t, func(w *world) {
		b, seq := w.answered()
		b.raw("words are no sign of life\n")
		time.Sleep(claimTolerance - time.Millisecond)
		equal(t, "stops", b.stopped(), 0)
		time.Sleep(time.Millisecond)
		equal(t, "stops", b.stopped(), 1)
		equal(t, "removed", b.isRemoved(), true)
		f := w.fate(seq)
		equal(t, "fate", f.State, berth.FatePending)
		equal(t, "error", f.Error, `the runner did not take message "m2" for 1m0s, of at most 1m0s, and gave no sign of life since: timed out`)
		_, at, err := w.db.Pending(w.t.Context(), family.JID)
		check(t, err)
		equal(t, "put off for", time.Until(at), 5*time.Second)

		time.Sleep(5 * time.Second)
		next := w.started()
		equal(t, "batch", next.input.Batch, []string{"m2"})
		time.Sleep(10 * time.Minute) // it starts slowly
		equal(t, "stops", next.stopped(), 0)
		next.ready()
		next.turn("here", "m2")
		equal(t, "fate", w.fate(seq).State, berth.FateDone)
	})
}

// HS-13: a run is settled once; what became of its messages since is left alone.
func TestHS13SettledOnce(t *testing.T) {
	play(t, func(w *world) {
		b, seq := w.answered()
		time.Sleep(claimTolerance)
		equal(t, "stops", b.stopped(), 1)
		before := w.fate(seq)
		_, at, err := w.db.Pending(w.t.Context(), family.JID)
		check(t, err)
		v, err := w.db.FinishRun(w.t.Context(), berth.Ending{RunID: b.run, At: time.Now(), Error: "again", Backoff: backoff})
		check(t, err)
		equal(t, "verdict", v, berth.Verdict{})
		_, still, err := w.db.Pending(w.t.Context(), family.JID)
		check(t, err)
		equal(t, "put off until", still.Equal(at), true)
		equal(t, "fate", w.fate(seq), before)
	})
}

// HS-04: a runner that said ready and then nothing has not taken its prompt.
func TestHS04SilentAfterReady(t *testing.T) {
	play(t, func(w *world) {
		seq := w.say("@Andy one")
		b := w.started()
		time.Sleep(20 * time.Minute)
		b.ready()
		time.Sleep(claimTolerance - time.Millisecond)
		equal(t, "stops", b.stopped(), 0)
		time.Sleep(time.Millisecond)
		equal(t, "stops", b.stopped(), 1)
		if f := w.fate(seq); !strings.Contains(f.Error, `did not take message "m1" for 1m0s`) {
			t.Errorf("fate: %+v", f)
		}
	})
}

// HS-07: any frame since shows that it lives; so does the ack, after which a
// turn may be silent up to the ceiling.
func TestHS07AnyFrameCounts(t *testing.T) {
	for _, f := range []protocol.Frame{{Type: protocol.TypeHeartbeat}, {Type: protocol.TypeAck, IDs: []string{"m2"}}} {
		t.Run(f.Type, func(t *testing.T) {
			play(t, func(w *world) {
				b, _ := w.answered()
				time.Sleep(claimTolerance - time.Millisecond)
				b.print(f)
				time.Sleep(30 * time.Minute)
				equal(t, "stops", b.stopped(), 0)
				time.Sleep(30 * time.Second)
				equal(t, "stops", b.stopped(), 1)
			})
		})
	}
}

// An older runner is silent for as long as it works.
func TestOldRunnerHasNoClaims(t *testing.T) {
	play(t, func(w *world) {
		w.say("@Andy one")
		b := w.started()
		time.Sleep(20 * time.Minute)
		b.print(said("hi"))
		time.Sleep(20 * time.Minute)
		seq := w.say("@Andy two")
		time.Sleep(30 * time.Minute) // the follow-up started the ceiling anew
		equal(t, "stops", b.stopped(), 0)
		time.Sleep(30 * time.Second)
		equal(t, "stops", b.stopped(), 1)
		if f := w.fate(seq); !strings.Contains(f.Error, "no sign of life for 30m30s, of at most 30m30s") {
			t.Errorf("fate: %+v", f)
		}
	})
}

// Nobody hears a runner while the engine is away. When it is back, the runner
// has the tolerance to answer.
func TestLostStreamIsNotHeldAgainstTheRunner(t *testing.T) {
	for _, answers := range []bool{true, false} {
		play(t, func(w *world) {
			var away atomic.Bool
			w.runner.Engine = remoteEngine{w.engine, &away}
			b, _ := w.answered()
			away.Store(true)
			b.lose()
			time.Sleep(10 * time.Minute)
			equal(t, "stops", b.stopped(), 0)
			away.Store(false)
			time.Sleep(10 * time.Second) // the streams are open again
			if answers {
				b.ready()
			}
			time.Sleep(2 * claimTolerance)
			want := 1
			if answers {
				want = 0
			}
			equal(t, "stops", b.stopped(), want)
		})
	}
}

// remoteEngine opens no streams anew while it is away.
type remoteEngine struct {
	*fakeEngine
	away *atomic.Bool
}

func (e remoteEngine) Start(ctx context.Context, spec Spec, stdin []byte, created func(string) error) (Box, error) {
	b, err := e.fakeEngine.Start(ctx, spec, stdin, created)
	return remoteBox{b, e.away}, err
}

type remoteBox struct {
	Box
	away *atomic.Bool
}

func (b remoteBox) Reattach(ctx context.Context) error {
	if b.away.Load() {
		return berth.Errorf(berth.Unavailable, "no engine")
	}
	return b.Box.Reattach(ctx)
}

// What an earlier daemon gave to a run counts from the answer to the sync on.
func TestAdoptedRunIsNotHeldToOldClaims(t *testing.T) {
	root := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, root)
		b, _ := w.answered()
		w.close()
		time.Sleep(time.Hour)

		next := newWorld(t, root)
		defer next.close()
		next.engine.live = w.engine.live
		b.w = next
		live, err := next.db.LiveRuns(t.Context())
		check(t, err)
		next.queue.Adopt("family", "", func(ctx context.Context, s *queue.Slot) queue.Result {
			return next.runner.Adopt(ctx, s, family, live[0], b.ID(), func() {})
		})
		time.Sleep(30 * time.Minute)
		equal(t, "stops", b.stopped(), 0)
		b.ready()
		time.Sleep(claimTolerance)
		equal(t, "stops", b.stopped(), 1)
	})
}
