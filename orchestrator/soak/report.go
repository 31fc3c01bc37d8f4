package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"berth/orchestrator/internal/rig"
)

// moreFiles is how many descriptors more the last daemon may hold than the
// first: the soak's own connections to its control socket come and go.
const moreFiles = 4

// report is what was found.
type report struct {
	at      time.Time
	took    time.Duration
	minutes float64
	seed    uint64
	rate    float64
	cores   int
	memory  int64
	engine  string

	counts                 counts
	kinds                  map[string]int // sent
	sent, answered, silent int
	cut                    int // the documented exception
	expected, givenUp      int // notices
	unanswered             int // given up to the end
	reasons                map[string]int

	lost, doubled, disordered, uncalled int
	slots, containers, deaths           int
	early, late                         rig.Usage
}

func (r *report) files() int { return max(0, len(r.late.Files)-len(r.early.Files)-moreFiles) }

// faults is how much speaks against Berth.
func (r *report) faults() int {
	return r.lost + r.doubled + r.disordered + r.uncalled + r.slots + r.containers + r.deaths + r.files()
}

func (r *report) markdown() string {
	var out strings.Builder
	fmt.Fprintf(&out, `# Reliability

Written by `+"`go run ./orchestrator/soak -minutes %g -seed %d -rate %g`"+` on %s: %d cores and %.0f GB of memory, Docker engine
%s. %d groups on %d slots wrote for %g minutes to the real daemon with real containers, while containers and the daemon
were killed and the way to the engine was cut; with the time to settle it took %.0f s.

| disturbed | |
|---|--:|
| containers killed (docker kill) | %d |
| daemons killed (SIGKILL), started again after 0–2 s | %d |
| losses of the container engine, 0.2–3 s each | %d |

| messages | | |
|---|--:|---|
| sent | %d | |
| answered | %d | |
| carried out in silence, as asked | %d | |
| cut short | %d | documented, see below |
| given up, on purpose | %d | told by a notice; answered with the next message |
| given up, otherwise | %d | told by a notice |
| given up and never answered | %d | |
| **lost** | %d | must be 0 |
| **doubled** | %d | must be 0 |
| **out of order** | %d | must be 0 |
| **texts that nobody asked for** | %d | must be 0 |

| left behind | | |
|---|--:|---|
| slots in use when all was quiet | %d | must be 0 |
| containers after the daemon's end | %d | must be 0 |
| deaths of the daemon by itself | %d | must be 0 |
| open files of the daemon, early → end | %d → %d | at most %d more |
| threads, early → end | %d → %d | |
| resident memory, early → end | %.1f → %.1f MB | |

`, r.minutes, r.seed, r.rate, r.at.Format(time.DateOnly), r.cores, float64(r.memory)/1e9, r.engine, groups, slots, r.minutes, r.took.Seconds(),
		r.counts.containers, r.counts.daemons, r.counts.cuts,
		r.sent, r.answered, r.silent, r.cut, r.expected, r.givenUp, r.unanswered, r.lost, r.doubled, r.disordered, r.uncalled,
		r.slots, r.containers, r.deaths, len(r.early.Files), len(r.late.Files), moreFiles, r.early.Threads, r.late.Threads,
		float64(r.early.Resident)/1e6, float64(r.late.Resident)/1e6)
	out.WriteString(`*Cut short* is a message whose run's container was killed by ` + "`docker kill`" + ` after some, but not all, of what the run had to
say to the batch had reached the chat. The batch is done then, because nobody is answered twice; what was not yet said is
never said. Every other message that lacks its answer counts as lost, unless its group gave up and said so.

*Doubled* is any text with a message's token beyond what the message asked for, and a message that is stored twice although it
was posted again under the same id after a broken connection. *Out of order* is an answer that came before the answer to an
earlier message of its group. Open files, threads and memory were looked at before the first disturbance and at the end, both
times after 35 s of rest; the daemon of the end had lived through the last third of the time.

Sent, by what the message made its run do:

`)
	for _, name := range slices.Sorted(maps.Keys(r.kinds)) {
		fmt.Fprintf(&out, "* %s: %d\n", name, r.kinds[name])
	}
	if len(r.reasons) > 0 {
		out.WriteString("\nWhy a group gave up, as the daemon logged it:\n\n")
		for _, reason := range slices.Sorted(maps.Keys(r.reasons)) {
			fmt.Fprintf(&out, "* %d × %s\n", r.reasons[reason], reason)
		}
	}
	return out.String()
}
