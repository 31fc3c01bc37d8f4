//go:build docker && crash

package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/crash"
	"berth/orchestrator/internal/web"
)

// TestCrashTasks kills the daemon at every point that a task comes by, starts it
// again, and counts what became of the tasks: each that is due has one result.
func TestCrashTasks(t *testing.T) {
	bin := crashable(t)
	all := crash.TaskPoints
	if *points != "" {
		all = strings.Split(*points, ",")
	}
	table := new(strings.Builder)
	w := tabwriter.NewWriter(table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "killed at\tkills\ttasks\tanswered\tlost\tdoubled\tout of order\tcontainers left")
	for _, point := range all {
		var sum tally
		for i := range *times {
			sum.add(crashTasks(t, bin, fmt.Sprintf("%s:%d", point, 1+i%2)))
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n", point, sum.kills, sum.sent, sum.answered, sum.lost, sum.doubled, sum.disordered, sum.left)
		if sum.kills < *times {
			t.Errorf("%s: the daemon was killed %d times, want %d: nothing came by", point, sum.kills, *times)
		}
		if sum.lost+sum.doubled+sum.disordered+sum.left > 0 {
			t.Errorf("%s: %+v", point, sum)
		}
	}
	w.Flush()
	t.Logf("\n%s", table)
}

// crashTasks kills the daemon at a point while one task after the other is due.
func crashTasks(t *testing.T, bin, at string) (sum tally) {
	root := newRoot(t)
	v := &victim{t: t, bin: bin, root: root, client: web.NewClient(filepath.Join(root, "store", "berth.sock"))}
	if _, err := berthIn(t, root, nil, "groups", "add", "p", "--engine", "probe", "--no-trigger"); err != nil {
		t.Fatal(err)
	}
	v.start(at)
	defer func() {
		v.mu.Lock()
		_ = v.daemon.Process.Kill()
		v.mu.Unlock()
		<-v.ended
	}()
	first := v.ended
	var tokens []string
	for i := range 3 {
		token := fmt.Sprintf("token-%d-", i+1)
		tokens = append(tokens, token)
		sum.sent++
		v.patiently(func() error {
			_, err := v.client.AddTask(t.Context(), web.NewTask{
				ID: fmt.Sprint("t", i), Group: "p", Prompt: "say " + token, Type: berth.ScheduleOnce, Value: time.Now().Add(2 * time.Second).UTC().Format(time.RFC3339),
			})
			return err
		})
		v.patiently(func() error {
			task, err := v.client.Task(t.Context(), "p", fmt.Sprint("t", i))
			if err == nil && task.Status != berth.TaskCompleted {
				err = berth.Errorf(berth.Unavailable, "task %d is %s", i, task.Status)
			}
			return err
		})
	}
	v.patiently(func() error { // what is stored may still be on its way to the chat
		s, err := v.client.Status(t.Context())
		if err == nil && (s.Outbox.Pending > 0 || len(s.Runs) > 0 || !s.Ready) {
			err = berth.Errorf(berth.Unavailable, "it is at work: %+v", s)
		}
		return err
	})
	select {
	case <-first:
		sum.kills++
	default:
	}
	sum.audit(t, v, tokens)
	return sum
}

// patiently repeats do until it works, however often the daemon dies meanwhile.
func (v *victim) patiently(do func() error) {
	v.t.Helper()
	var err error
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); {
		if err = do(); err == nil {
			return
		}
		if !unavailable(err) {
			break
		}
		if v.dead(20 * time.Millisecond) {
			v.start("")
		}
	}
	v.t.Errorf("in vain: %v", err)
}
