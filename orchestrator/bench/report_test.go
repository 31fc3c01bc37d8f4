package main

import (
	"strings"
	"testing"
	"time"
)

func TestReport(t *testing.T) {
	var said strings.Builder
	r := report{at: time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC), cores: 2, memory: 8e9, engine: "1.2.3", stderr: &said}
	r.add(row{what: "slow", unit: ms, ours: []float64{3, 1, 2}, floor: []float64{1}, note: "N1"}.withinRatio(1.25))
	r.add(row{what: "many", unit: perS, ours: []float64{21_500}, floor: []float64{43_000}, note: "N2"}.atLeast(20_000))
	got := r.markdown()
	for _, want := range []string{
		"on 2026-11-21: 2 cores and 8 GB of memory, Docker engine 1.2.3",
		"| 1. slow | 3 | 2.00 ms |  |  | 1.00 ms | 2.00 | ≤ 1.25 × floor | over |",
		"| 2. many | 1 | 21 500/s |  |  | 43 000/s | 0.50 | ≥ 20 000/s | ok |",
		"1. N1\n2. N2\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("got %s\nwant %q in it", got, want)
		}
	}
	if strings.Count(said.String(), "\n") != 2 {
		t.Errorf("got %q, want one line a row", said.String())
	}
}

func TestQuantile(t *testing.T) {
	var values []float64
	for i := range 100 {
		values = append(values, float64(100-i))
	}
	for q, want := range map[float64]float64{0.5: 50, 0.9: 90, 0.99: 99, 1: 100} {
		if got := quantile(values, q); got != want {
			t.Errorf("quantile %v: got %v, want %v", q, got, want)
		}
	}
}

func TestMetrics(t *testing.T) {
	out := "goos: linux\nBenchmarkFirstToken/openai-2 \t 200\t 5 ns/op\t 0.61 bare-p50-ms\t 1.27 overhead-ms\nPASS\n"
	got, err := metrics(out, "BenchmarkFirstToken/openai")
	if err != nil || got["overhead-ms"] != 1.27 || got["bare-p50-ms"] != 0.61 {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := metrics(out, "BenchmarkFirstToken/open"); err == nil {
		t.Errorf("of another benchmark: got %v", got)
	}
	r := report{stderr: new(strings.Builder)}
	r.part(part{"fast", 1.5, "ms", 5, "D"})
	r.part(part{"much", 50, "MB", 30, "E"})
	for _, want := range []string{"| fast | 1.50 ms | ≤ 5 ms | ok | D |", "| much | 50.00 MB | ≤ 30 MB | over | E |"} {
		if got := r.markdown(); !strings.Contains(got, want) {
			t.Errorf("got %s\nwant %q in it", got, want)
		}
	}
}
