package gateway

import (
	"context"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
)

const (
	diaryTimeout  = 5 * time.Second // for one write
	auditBurst    = 60
	auditInterval = 10 * time.Second // for one more row
	maxPending    = 64               // rows of either kind that wait for the store
)

// diary writes down what a run used and what it was refused, behind the answers:
// no answer waits for the store. It holds a bounded number of rows: usage of the
// same kind is added up, and refusals beyond a rate are only counted.
type diary struct {
	store Store
	log   *zap.Logger
	wake  chan struct{}
	done  chan struct{}

	mu      sync.Mutex
	usage   []berth.Usage
	audits  []berth.Audit
	tokens  float64 // audit rows that may be written now
	filled  time.Time
	skipped int
}

func newDiary(s Store, log *zap.Logger) *diary {
	return &diary{store: s, log: log, wake: make(chan struct{}, 1), done: make(chan struct{}), tokens: auditBurst}
}

// used takes a cost.
func (d *diary) used(u berth.Usage) {
	d.mu.Lock()
	d.usedLocked(u)
	d.mu.Unlock()
	d.signal()
}

func (d *diary) usedLocked(u berth.Usage) {
	for i := range d.usage {
		have := &d.usage[i]
		// A container may make up names of models: the last place takes all.
		if i == maxPending-1 {
			have.Model = ""
		} else if have.Provider != u.Provider || have.Model != u.Model || have.Estimated != u.Estimated {
			continue
		}
		have.At = u.At
		have.Requests += u.Requests
		have.Input += u.Input
		have.Output += u.Output
		have.CacheRead += u.CacheRead
		have.CacheWrite += u.CacheWrite
		return
	}
	d.usage = append(d.usage, u)
}

// audit takes a refusal.
func (d *diary) audit(a berth.Audit) {
	d.mu.Lock()
	if d.filled.IsZero() {
		d.filled = a.At
	}
	d.tokens = min(auditBurst, d.tokens+a.At.Sub(d.filled).Seconds()/auditInterval.Seconds())
	d.filled = a.At
	if d.tokens < 1 || len(d.audits) == maxPending {
		d.skipped++
		d.mu.Unlock()
		return
	}
	d.tokens--
	if d.skipped > 0 {
		a.Reason += fmt.Sprintf(" (%d refusals before this one were not recorded)", d.skipped)
		d.skipped = 0
	}
	d.audits = append(d.audits, a)
	d.mu.Unlock()
	d.log.Info("refused", zap.String("kind", a.What), zap.String("target", a.Target), zap.String("reason", a.Reason))
	d.signal()
}

func (d *diary) signal() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// close lets write end when all is written. Nothing may be added any more.
func (d *diary) close() { close(d.done) }

// write writes until close.
func (d *diary) write() {
	for {
		select {
		case <-d.wake:
			d.flush()
		case <-d.done:
			d.flush()
			if n := len(d.usage); n > 0 {
				d.log.Error("usage is lost", zap.Int("rows", n))
			}
			return
		}
	}
}

// flush hands everything to the store. Usage that it does not take waits for the
// next time.
func (d *diary) flush() {
	d.mu.Lock()
	usage, audits := d.usage, d.audits
	d.usage, d.audits = nil, nil
	d.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), diaryTimeout)
	defer cancel()
	for _, u := range usage {
		if err := d.store.AddUsage(ctx, u); err != nil {
			d.log.Error("record usage", zap.Error(err))
			d.mu.Lock()
			d.usedLocked(u)
			d.mu.Unlock()
		}
	}
	for _, a := range audits {
		if err := d.store.AddAudit(ctx, a); err != nil {
			d.log.Error("record a refusal", zap.Error(err))
		}
	}
}

// ledger knows what groups with a budget used today. It is safe for concurrent
// use.
type ledger struct {
	mu       sync.Mutex
	accounts map[string]*account // by folder
}

type account struct {
	mu       sync.Mutex
	day      time.Time // its begin; zero: not read from the store yet
	requests int64
	tokens   int64
}

func (l *ledger) account(folder string) *account {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[folder]
	if a == nil {
		a = &account{}
		l.accounts[folder] = a
	}
	return a
}

// take counts one request of the group, unless its budget is spent: then it
// returns why.
func (g *Gateway) take(ctx context.Context, r Run) (spent string, err error) {
	if r.Budget == (Budget{}) {
		return "", nil
	}
	now := g.now().In(g.cfg.Location)
	year, month, date := now.Date()
	day := time.Date(year, month, date, 0, 0, 0, 0, g.cfg.Location)
	a := g.ledger.account(r.Folder)
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.day.IsZero():
		requests, tokens, err := g.store.Used(ctx, r.Folder, day)
		if err != nil {
			return "", fmt.Errorf("read what group %s used: %w", r.Folder, err)
		}
		a.day, a.requests, a.tokens = day, requests, tokens
	case day.After(a.day):
		a.day, a.requests, a.tokens = day, 0, 0
	}
	const until = "; it begins anew at midnight (%s), or the operator raises it"
	zone := g.cfg.Location.String()
	switch {
	case r.Budget.Requests > 0 && a.requests >= r.Budget.Requests:
		return fmt.Sprintf("this group's budget of %d requests a day is spent"+until, r.Budget.Requests, zone), nil
	case r.Budget.Tokens > 0 && a.tokens >= r.Budget.Tokens:
		return fmt.Sprintf("this group's budget of %d tokens a day is spent (%d were used)"+until, r.Budget.Tokens, a.tokens, zone), nil
	}
	a.requests++
	return "", nil
}

// charge counts tokens of a request that take let through.
func (g *Gateway) charge(r Run, tokens int64) {
	if r.Budget == (Budget{}) {
		return
	}
	a := g.ledger.account(r.Folder)
	a.mu.Lock()
	a.tokens += tokens
	a.mu.Unlock()
}
