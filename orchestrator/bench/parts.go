package main

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// part is a line of the second table: what one of the packages' own benchmarks says.
type part struct {
	what   string
	value  float64
	unit   string
	limit  float64 // 0: no target
	detail string
}

// parts has go test measure what a running daemon does not show by itself.
func (b *bench) parts(ctx context.Context, r *report) error {
	const model, dispatch = "./agent-runner/internal/engine/model", "./orchestrator/internal/dispatch"
	out, err := goTest(ctx, model, "-run", "^$", "-bench", "FirstToken", "-benchtime", "200x")
	if err != nil {
		return err
	}
	for _, provider := range []string{"anthropic", "openai"} {
		ours, err := metrics(out, "BenchmarkFirstToken/"+provider)
		if err != nil {
			return err
		}
		r.part(part{"model, " + provider + ": first token, over a bare request's", ours["overhead-ms"], "ms", 5,
			fmt.Sprintf("medians of 200: %.2f ms, and %.2f ms without Berth; p99 %.2f ms", ours["p50-ms"], ours["bare-p50-ms"], ours["p99-ms"])})
	}
	if out, err = goTest(ctx, model, "-run", "^$", "-bench", "Memory", "-benchtime", "5x"); err != nil {
		return err
	}
	ours, err := metrics(out, "BenchmarkMemory")
	if err != nil {
		return err
	}
	r.part(part{"model: resident memory with a session of 200 messages", ours["MB"], "MB", 30, "the most of five processes, after a turn"})

	if out, err = goTest(ctx, dispatch, "-run", "^$", "-bench", "DueToDispatched", "-benchtime", "1x"); err != nil {
		return err
	}
	if ours, err = metrics(out, "BenchmarkDueToDispatched"); err != nil {
		return err
	}
	r.part(part{"1 000 tasks: due → dispatched, p99", ours["p99-ms"], "ms", 20, fmt.Sprintf("one every 2 ms in real time, p50 %.2f ms", ours["p50-ms"])})

	if out, err = goTest(ctx, dispatch, "-v", "-run", "^TestManyTasksInADay$"); err != nil {
		return err
	}
	said := regexp.MustCompile(`(10000) tasks in a day: ([0-9.]+)s of processor time.* (\d+) KiB of heap`).FindStringSubmatch(out)
	if said == nil {
		return fmt.Errorf("no result of 10 000 tasks in: %s", out)
	}
	cpu, _ := strconv.ParseFloat(said[2], 64)
	heap, _ := strconv.ParseFloat(said[3], 64)
	r.part(part{"10 000 tasks over a day of virtual time: processor time", cpu, "s", 0, "claims and ends on disk included"})
	r.part(part{"the same: heap", heap / 1024, "MB", 0, "after a collection"})
	return nil
}

func goTest(ctx context.Context, pkg string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", append(append([]string{"test", "-count=1"}, args...), pkg)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go test %s: %w: %s", pkg, err, out)
	}
	return string(out), nil
}

// metrics reads the line of a benchmark: its name, a count, and pairs of value and
// unit.
func metrics(out, name string) (map[string]float64, error) {
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) < 4 || fields[0] != name && !strings.HasPrefix(fields[0], name+"-") {
			continue
		}
		found := make(map[string]float64)
		for i := 2; i+1 < len(fields); i += 2 {
			v, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			found[fields[i+1]] = v
		}
		return found, nil
	}
	return nil, fmt.Errorf("%s did not run: %s", name, out)
}

// part adds a line to the second table and says so.
func (r *report) part(p part) {
	r.parts = append(r.parts, p)
	fmt.Fprintf(r.stderr, "%-64s %12s  %s\n", p.what, p.write(), p.mark())
}

func (p part) write() string { return strconv.FormatFloat(p.value, 'f', 2, 64) + " " + p.unit }

func (p part) target() string {
	if p.limit == 0 {
		return ""
	}
	return fmt.Sprintf("≤ %g %s", p.limit, p.unit)
}

func (p part) mark() string {
	switch {
	case p.limit == 0:
		return ""
	case p.value <= p.limit:
		return "ok"
	default:
		return "over"
	}
}
