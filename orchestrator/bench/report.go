package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

// row is one line of the table.
type row struct {
	what   string
	unit   unit
	ours   []float64
	floor  []float64
	target string
	met    func(r row) bool
	note   string // what is measured, and what the floor is
}

// unit says how to write a number.
type unit string

const (
	ms    unit = "ms"
	perS  unit = "/s"
	mb    unit = "MB"
	tailN      = 100 // fewer samples have no p99 worth the name
)

func (u unit) write(v float64) string {
	switch {
	case u == perS:
		text := fmt.Sprintf("%.0f", v)
		if n := len(text); n > 3 {
			text = text[:n-3] + " " + text[n-3:]
		}
		return text + "/s"
	case v < 10:
		return fmt.Sprintf("%.2f %s", v, u)
	case v < 100:
		return fmt.Sprintf("%.1f %s", v, u)
	default:
		return fmt.Sprintf("%.0f %s", v, u)
	}
}

// quantile is the nearest rank.
func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

func p50(values []float64) float64 { return quantile(values, 0.5) }

func (r row) ratio() float64 { return p50(r.ours) / p50(r.floor) }

// The targets of the design.

func (r row) withinRatio(limit float64) row {
	r.target = fmt.Sprintf("≤ %.2f × floor", limit)
	r.met = func(r row) bool { return r.ratio() <= limit }
	return r
}

func (r row) atMost(limit float64) row {
	r.target = fmt.Sprintf("≤ %.0f %s", limit, r.unit)
	r.met = func(r row) bool { return p50(r.ours) <= limit }
	return r
}

func (r row) atLeast(limit float64) row {
	r.target = "≥ " + r.unit.write(limit)
	r.met = func(r row) bool { return p50(r.ours) >= limit }
	return r
}

func (r row) quick() row {
	r.target = "p50 ≤ 1 ms, p99 ≤ 5 ms"
	r.met = func(r row) bool { return p50(r.ours) <= 1 && quantile(r.ours, 0.99) <= 5 }
	return r
}

func (r row) mark() string {
	switch {
	case r.met == nil:
		return ""
	case r.met(r):
		return "ok"
	default:
		return "over"
	}
}

// report collects rows.
type report struct {
	at     time.Time
	took   time.Duration
	cores  int
	memory int64
	engine string
	stderr io.Writer
	rows   []row
	parts  []part
}

// add adds a row and says so.
func (r *report) add(w row) {
	r.rows = append(r.rows, w)
	fmt.Fprintf(r.stderr, "%-64s %12s  floor %12s  %5.2f  %s\n", w.what, w.unit.write(p50(w.ours)), w.unit.write(p50(w.floor)), w.ratio(), w.mark())
}

func (r *report) markdown() string {
	var out strings.Builder
	fmt.Fprintf(&out, `# Benchmarks

Written by `+"`make bench`"+` on %s: %d cores and %.0f GB of memory, Docker engine %s. Each row and its floor were
measured in the same run, which took %.0f s; where both start something, they took turns. n is the number of
samples, the ratio is Berth's median by the floor's, and the mark judges Berth against the target.

| | n | Berth p50 | p90 | p99 | floor p50 | ratio | target | |
|---|--:|--:|--:|--:|--:|--:|---|---|
`, r.at.Format(time.DateOnly), r.cores, float64(r.memory)/1e9, r.engine, r.took.Seconds())
	for i, w := range r.rows {
		p90, p99 := "", ""
		if len(w.ours) >= 10 && w.unit == ms {
			p90 = w.unit.write(quantile(w.ours, 0.9))
		}
		if len(w.ours) >= tailN {
			p99 = w.unit.write(quantile(w.ours, 0.99))
		}
		fmt.Fprintf(&out, "| %d. %s | %d | %s | %s | %s | %s | %.2f | %s | %s |\n", i+1, w.what, len(w.ours),
			w.unit.write(p50(w.ours)), p90, p99, w.unit.write(p50(w.floor)), w.ratio(), w.target, w.mark())
	}
	out.WriteString("\nWhat was measured, and what the floor is:\n\n")
	for i, w := range r.rows {
		fmt.Fprintf(&out, "%d. %s\n", i+1, w.note)
	}
	if len(r.parts) > 0 {
		out.WriteString("\nBy the packages' own benchmarks, in the same run:\n\n| | | target | | |\n|---|--:|---|---|---|\n")
	}
	for _, p := range r.parts {
		fmt.Fprintf(&out, "| %s | %s | %s | %s | %s |\n", p.what, p.write(), p.target(), p.mark(), p.detail)
	}
	return out.String()
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
