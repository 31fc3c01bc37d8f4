package queue

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// obeys answers for a minute, or until it is interrupted, and says which.
func obeys(notes chan<- string) func(context.Context, *Slot) Result {
	return func(ctx context.Context, s *Slot) Result {
		work := func() {
			select {
			case <-s.Interrupted():
				notes <- "interrupted"
			case <-time.After(time.Minute):
				notes <- "done"
			}
			s.Idle()
		}
		work()
		for {
			select {
			case <-s.Wake():
				if s.Busy() {
					work()
				}
			case <-s.Closing():
				if s.Renewed() {
					notes <- "renewed"
				}
				return Result{}
			case <-ctx.Done():
				return Result{}
			}
		}
	}
}

func TestInterrupt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		notes := make(chan string, 10)
		p := newPool(1, time.Hour, obeys(notes))
		defer p.Shutdown(t.Context())
		if p.Interrupt("a") {
			t.Error("there is no run")
		}
		p.Add("a")
		p.Add("b")
		synctest.Wait()
		if p.Interrupt("b") {
			t.Error("b has no run, it waits")
		}
		for range 3 { // impatience
			if !p.Interrupt("a") {
				t.Error("a is at work")
			}
		}
		synctest.Wait()
		if p.Interrupt("a") {
			t.Error("a is idle")
		}
		p.Add("a") // the run goes on, and what is left of the order does not concern it
		synctest.Wait()
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := []string{<-notes, <-notes}; !slices.Equal(got, []string{"interrupted", "done"}) {
			t.Errorf("got %q", got)
		}
	})
}

// A closing run that was idle has nothing to stop; one that works on has.
func TestInterruptOfAClosingRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		leave := make(chan struct{})
		p := newPool(2, time.Hour, func(_ context.Context, s *Slot) Result {
			if s.Folder == "idle" {
				s.Idle()
			}
			<-leave
			return Result{}
		})
		p.Add("idle")
		p.Add("busy")
		synctest.Wait()
		p.Close("idle")
		p.Close("busy")
		if p.Interrupt("idle") || !p.Interrupt("busy") {
			t.Error("the wrong one has something to stop")
		}
		close(leave)
		p.Shutdown(t.Context())
	})
}

// An idle run is closed at once, a busy one after its turn, and neither is given
// what comes meanwhile.
func TestRenew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		notes := make(chan string, 10)
		p := newPool(1, time.Hour, obeys(notes))
		defer p.Shutdown(t.Context())
		p.Renew("a") // without a run nothing has to be done
		p.Add("a")
		synctest.Wait()
		p.Renew("a")
		p.Add("a")
		time.Sleep(time.Minute - time.Second)
		synctest.Wait()
		if len(notes) > 0 || len(p.closed()) > 0 {
			t.Error("the turn was ended")
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if got := p.closed(); !slices.Equal(got, []Reason{ReasonRenewed}) {
			t.Errorf("closed: %q", got)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := len(p.order()); n != 2 {
			t.Errorf("%d runs began", n)
		}
		p.Renew("a") // idle now
		synctest.Wait()
		if got := p.closed(); !slices.Equal(got, []Reason{ReasonRenewed, ReasonRenewed}) {
			t.Errorf("closed: %q", got)
		}
		close(notes)
		var got []string
		for n := range notes {
			got = append(got, n)
		}
		if !slices.Equal(got, []string{"done", "renewed", "done", "renewed"}) {
			t.Errorf("got %q", got)
		}
	})
}
