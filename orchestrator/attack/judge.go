package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/rig"
	"berth/orchestrator/internal/web"
)

// refused is what has to come of an attack of which nothing else is said.
const refused = `^(E[A-Z0-9]+\b|refused: |empty$|signal: killed$|closed: )`

// wants are patterns of what else may come of an attack, by its name or the
// beginning of that. What may be done must do no harm: the checks of the end say so.
var wants = map[string]string{
	"setuid program": `^done uid 1000$`, // it runs, and stays who it was
	"deep folders":   `^done`,
	"long request":   `^done$`,

	"see the groups":                       `^done$`, // its own
	"link in frames":                       `^done$`,
	"links in the place of":                `^done$`,
	"a forged frame":                       `^done$`,
	"a deep tree":                          `^(done|ENOENT)$`, // the host may remove it while it grows
	"a flood of":                           `^done [1-9]\d* files$`,
	"files that":                           `^done [1-9]\d* files$`,
	"a file that":                          `^done [1-9]\d* times$`,
	"odd-":                                 `^(EPERM$|refused: |unread: )`,
	"odd-long":                             `^refused: `,
	"fill its own":                         `^done 256 MiB`, // a quota is the operator's file system's
	"swap ":                                `^done$`,
	"link /":                               `^done$`,
	"a flood: CONNECT":                     `^[1-9]\d* × 403, 0 × no answer$`,
	"a flood: provider":                    `^\d+ × 200, [1-9]\d* × 402, 0 × no answer$`,
	"length and chunks of one request":     `^(refused: |done 200 OK you sent )`, // as one request, which it is
	"200 half requests":                    `^[1-9]\d* of them cut off`,
	"hunt for keys":                        `^not found: `,
	"read the key in the provider's answe": `^not there$`,
	"what is mounted":                      `^done photos readonly shared store up$`,
}

// last are the attacks that end a program's list: if one is missing, the list was
// not tried to its end.
var last = []string{
	"fill memory", "rename a link over available_groups.json", "files that vanish while they are read", "link /workspace/group/logs to a canary",
	"fill its own folder", "a broken request", "200 half requests", "hunt for keys in all processes", "what is mounted",
}

// row is one line of the table.
type row struct {
	section, name, result string
	ok                    bool
}

// report gathers what came of everything.
type report struct {
	out     io.Writer
	names   bool // some of the egress list lead to private addresses
	partial bool // not all was to be tried
	rows    []row
	ratio   string
}

func (r *report) add(section, name, result, want string) {
	r.rows = append(r.rows, row{section, name, result, regexp.MustCompile(want).MatchString(result)})
}

// check adds a row for a fact of the host's.
func (r *report) check(section, name string, ok bool, format string, args ...any) {
	r.rows = append(r.rows, row{section, name, fmt.Sprintf(format, args...), ok})
}

func want(name string) string {
	switch name {
	case "GET /", "GET /anthropic": // what the gateway is; nothing goes out
		return `^done 200 OK \{`
	}
	longest, pattern := -1, refused
	for prefix, p := range wants {
		if strings.HasPrefix(name, prefix) && len(prefix) > longest {
			longest, pattern = len(prefix), p
		}
	}
	return pattern
}

// firstRun and secondRun say which of the wishes are granted. Between the two, the
// attacker put links in the place of three of them.
func firstRun(i int) string {
	return map[int]string{0: `shared, writable$`, 1: `photos, writable$`, 2: `store, writable$`, 3: `up, writable$`, 4: `readonly, read-only$`}[i]
}

func secondRun(i int) string { return map[int]string{0: firstRun(0), 4: firstRun(4)}[i] }

func (r *report) mounts(section string, verdicts []web.MountVerdict, granted func(i int) string) {
	for i, v := range verdicts {
		name := fmt.Sprintf("%.60q", v.Request.HostPath)
		if v.Request.ContainerPath != "" {
			name += fmt.Sprintf(" as %.20q", v.Request.ContainerPath)
		}
		result, mode := "refused: "+v.Refused, "writable"
		if v.ReadOnly {
			mode = "read-only"
		}
		if v.Refused == "" {
			result = fmt.Sprintf("mounted at %s, %s", v.Target, mode)
		}
		want := granted(i)
		if want == "" {
			want = `^refused: `
		}
		r.add(section, name, result, want)
	}
	if len(verdicts) == 0 {
		r.check(section, "mounts", false, "the daemon says nothing about them")
	}
}

// second adds what came of a message of the second run, whose engine is the probe.
func (r *report) second(step string, took time.Duration, err error) {
	result := fmt.Sprintf("answered after %.1f s", took.Seconds())
	if err != nil {
		result = err.Error()
	}
	step, _, _ = strings.Cut(strings.ReplaceAll(step, "\n", "; "), "; say ")
	r.add("the runner's own output", step, result, `^(answered|the attacker's container failed)`)
}

// read takes the attacker's own report. refusals are what the host wrote down of
// it.
func (r *report) read(text string, refusals []web.Refusal) {
	tried := make(map[string]bool)
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		section, name, result := "kernel", "", ""
		if fields := strings.SplitN(line, "\t", 3); len(fields) == 3 {
			section, name, result = fields[0], fields[1], fields[2]
		} else {
			name, result, _ = strings.Cut(line, ": ")
		}
		if result == "" {
			continue
		}
		tried[name] = true
		if strings.HasPrefix(name, "odd-") && result == "done" {
			result = fate(name, refusals)
		}
		pattern := want(name)
		if r.names && regexp.MustCompile(`(loopback|metadata|lan|six)\.attack\.example`).MatchString(name) {
			pattern = `^refused: 403 .*( leads to | may be reached on port )`
		}
		r.add(section, name, result, pattern)
	}
	for _, name := range last {
		if !tried[name] && !r.partial {
			r.check("kernel", name, false, "not tried: the attacker did not come that far")
		}
	}
}

// fate returns what the host says that it did with something odd. In its name
// only plain letters are left.
func fate(name string, refusals []web.Refusal) string {
	plain := regexp.MustCompile(`^[a-zA-Z0-9-]*`).FindString(name)
	for _, a := range refusals {
		if strings.Contains(a.Target, plain) {
			return "refused: " + a.Reason
		}
	}
	return "unread: nobody looked at it"
}

// judge looks at what the daemon says after the storm.
func (p *play) judge(ctx context.Context, before rig.Usage) error {
	r := &p.report
	text, err := os.ReadFile(p.own("report"))
	if err != nil {
		return fmt.Errorf("the attacker left no report: %w", err)
	}
	refusals, err := p.client.Audit(ctx, attacker, 100_000)
	if err != nil {
		return err
	}
	r.read(string(text), refusals)

	r.check("traps", "ports and sockets of the host", p.traps.called.Load() == 0, "%d connections", p.traps.called.Load())
	served, keyless := p.traps.served.Load(), p.traps.keyless.Load()
	r.check("traps", "the provider", served > 0 && served <= budget && keyless == 0, "%d requests of %d that the group may make, %d without the key", served, budget, keyless)
	log := p.log()
	r.check("traps", "the daemon's log", !strings.Contains(log, "panic") && len(log) < 4<<20, "%d KiB, %d refusals of %d audited are in it", len(log)>>10, strings.Count(log, "request refused"), len(refusals))
	kept, size := 0, int64(0)
	_ = filepath.WalkDir(filepath.Join(p.root(), "data", "ipc", "errors"), func(_ string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			kept++
			if info, err := d.Info(); err == nil {
				size += info.Size()
			}
		}
		return nil
	})
	r.check("traps", "quarantine", kept <= 200 && size < 8<<20, "%d files and reasons, %d KiB", kept, size>>10)
	runLogs, size := 0, int64(0)
	logs, _ := filepath.Glob(filepath.Join(p.root(), "data", "logs", attacker, "*"))
	for _, path := range logs {
		if info, err := os.Stat(path); err == nil {
			runLogs++
			size += info.Size()
		}
	}
	r.check("traps", "logs of its runs", size < 25<<20, "%d files, %d KiB", runLogs, size>>10)

	groups, err := p.client.Groups(ctx)
	if err != nil {
		return err
	}
	var registered []string
	for _, g := range groups {
		registered = append(registered, g.Folder)
	}
	r.check("others", "registered groups", slices.Equal(registered, []string{"club", attacker, "family", "main", "work"}), "%s", strings.Join(registered, " "))
	said, err := history(ctx, p.client, attacker)
	if err != nil {
		return err
	}
	forged := slices.ContainsFunc(said, func(m berth.Message) bool { return m.Bot && strings.HasPrefix(m.Text, "FORGED") })
	r.check("others", "forged answers", !forged, "none among the %d texts of the attacker's chat: %t", len(said), !forged)
	faults, n, err := p.victims.audit(ctx)
	if err != nil {
		return err
	}
	result := fmt.Sprintf("%d, each stored once and answered once", n)
	if len(faults) > 0 {
		result = fmt.Sprintf("%d of %d: %s", len(faults), n, strings.Join(faults[:min(3, len(faults))], "; "))
	}
	r.check("others", "messages of the other groups", len(faults) == 0, "%s", result)
	v := p.victims
	r.latency(v.took)
	r.check("daemon", "its operator is answered", v.slow < 5*time.Second, "within %.0f ms at the worst", millis(v.slow))
	return p.burden(ctx, before)
}

// latency compares the others' answers in the storm with those without, and, since
// any agent may use its processor, tells how they are beside one that does.
func (r *report) latency(took map[phase][]time.Duration) {
	for _, q := range []float64{0.5, 0.99} {
		at := func(p phase) time.Duration { return max(quantile(took[p], q), 1) }
		ratio := func(of, to phase) float64 { return float64(at(of)) / float64(at(to)) }
		line := fmt.Sprintf("p%.0f %.1f ms alone, %.1f ms beside an agent that computes, %.1f ms during attacks (%d, %d and %d answers): %.2f and %.2f × alone",
			q*100, millis(at(calm)), millis(at(work)), millis(at(storm)), len(took[calm]), len(took[work]), len(took[storm]), ratio(work, calm), ratio(storm, calm))
		if q == 0.99 {
			word := "met"
			if ratio(storm, calm) > 2 {
				word = "missed"
			}
			r.ratio = line + ", target ≤ 2 × alone: " + word
		}
		r.check("daemon", "warm latency of the others", len(took[calm]) > 0 && len(took[work]) > 0 && len(took[storm]) > 0, "%s", line)
	}
}

// What the storm may leave in the daemon: the play's own connections come and go,
// and memory that was used once is not given back at once.
const (
	moreFiles  = 8
	moreMemory = 64 << 20
)

// burden compares what the daemon holds with what it held before. What lies in the
// way of that for a while, such as unused connections, is waited for.
func (p *play) burden(ctx context.Context, before rig.Usage) error {
	var after rig.Usage
	for deadline := time.Now().Add(settling); ; {
		var err error
		if after, err = p.measure(ctx); err != nil {
			return err
		}
		if len(after.Files) <= len(before.Files)+moreFiles || time.Now().After(deadline) {
			break
		}
	}
	peak, err := rig.ProcField(fmt.Sprintf("/proc/%d/status", p.daemon.PID), "VmHWM")
	if err != nil {
		return err
	}
	p.report.check("daemon", "open files", len(after.Files) <= len(before.Files)+moreFiles, "%d before, %d after", len(before.Files), len(after.Files))
	p.report.check("daemon", "memory", after.Resident <= before.Resident+moreMemory, "%d MiB before, %d MiB after, %d MiB at the most; %d and %d threads",
		before.Resident>>20, after.Resident>>20, peak>>10, before.Threads, after.Threads)
	return nil
}

// inspect looks at what is left on disk and on the engine when the daemon is gone.
func (p *play) inspect(ctx context.Context) error {
	r := &p.report
	changes, err := p.secrets.changes(p)
	if err != nil {
		return err
	}
	result := fmt.Sprintf("none of %d files and folders (kind, size, time, hash)", len(p.secrets.files))
	if len(changes) > 0 {
		result = strings.Join(changes[:min(5, len(changes))], "; ")
	}
	r.check("canaries", "changed, removed or added", len(changes) == 0, "%s", result)
	found, files, err := p.secrets.heard(p.dir, []byte(song), []byte(p.traps.key))
	if err != nil {
		return err
	}
	result = fmt.Sprintf("in none of the %d other files: store, logs, answers, quarantine, the attacker's own", files)
	if len(found) > 0 {
		result = strings.Join(found[:min(5, len(found))], "; ")
	}
	r.check("canaries", "their song, or the key, elsewhere", len(found) == 0, "%s", result)

	db, err := sql.Open("sqlite", "file:"+filepath.Join(p.root(), "store", "messages.db"))
	if err != nil {
		return err
	}
	defer db.Close()
	var sound string
	var tasks, strangers int
	err = errors.Join(db.QueryRowContext(ctx, "PRAGMA integrity_check").Scan(&sound),
		db.QueryRowContext(ctx, "SELECT count(*) FROM scheduled_tasks").Scan(&tasks),
		db.QueryRowContext(ctx, "SELECT count(*) FROM outbox WHERE chat_jid NOT IN (SELECT jid FROM registered_groups) OR text GLOB 'FORGED*'").Scan(&strangers))
	if err != nil {
		return err
	}
	r.check("canaries", "the store", sound == "ok" && tasks == 0 && strangers == 0, "integrity %s, %d tasks, %d texts to strangers or forged", sound, tasks, strangers)
	left, err := p.engine.Containers(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, c := range left {
		names = append(names, c.Folder)
	}
	r.check("daemon", "containers after its end", len(left) == 0, "%d %s", len(left), strings.Join(names, " "))
	return nil
}

// end prints the table and returns what it comes to.
func (r *report) end(took time.Duration) error {
	failed, section := 0, ""
	slices.SortStableFunc(r.rows, func(a, b row) int { return strings.Compare(a.section, b.section) })
	for _, row := range r.rows {
		if row.section != section {
			section = row.section
			fmt.Fprintf(r.out, "\n%s\n", section)
		}
		mark := "ok"
		if !row.ok {
			mark = "FAIL"
			failed++
		}
		fmt.Fprintf(r.out, "  %-4s  %-58s  %s\n", mark, short(row.name, 58), short(row.result, 160))
	}
	fmt.Fprintf(r.out, "\n%d attacks and checks in %.0f s, %d failed.\n%s\n", len(r.rows), took.Seconds(), failed, r.ratio)
	if failed > 0 {
		return fmt.Errorf("%d failed", failed)
	}
	return nil
}

// short cuts a text for a column, and keeps what a container chose from the
// terminal.
func short(text string, n int) string {
	runes := []rune(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r >= 0x202a && r <= 0x202e {
			return '?'
		}
		return r
	}, text))
	if len(runes) > n {
		runes = append(runes[:n-1], '…')
	}
	return string(runes)
}
