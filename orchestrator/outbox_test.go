package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

// The outbox commands do the same with a daemon and without one.
func TestOutboxCommands(t *testing.T) {
	for _, daemon := range []bool{true, false} {
		t.Run(fmt.Sprintf("daemon %t", daemon), func(t *testing.T) {
			d, stop := newStoreDaemon(t)
			for i, text := range []string{"one\nmore", strings.Repeat("long ", 20), "three", "four"} {
				o := berth.Outgoing{ChatJID: "console:main", Key: text, Kind: berth.OutMessage, Text: text, MessageID: text, CreatedAt: time.Now()}
				if err := d.db.AddOutgoing(t.Context(), o); err != nil {
					t.Fatal(err)
				}
				if i == 3 {
					break // waits
				}
				if err := d.db.MarkFailed(t.Context(), int64(i+1), "no such chat", time.Time{}); err != nil {
					t.Fatal(err)
				}
			}
			if daemon {
				defer stop()
			} else {
				stop()
			}
			for _, c := range []struct{ args, out, errs string }{
				{"ls", "given up  1      one…", ""},
				{"ls", "long long long long long long long long …  no such chat", ""},
				{"ls", "pending   0      four", ""},
				{"ls --json", `"state": "dead"`, ""},
				{"retry 1 99", "", "text 99 is not in the outbox"},
				{"retry 4", "", "text 4 is not in the outbox, or not in a state for that"},
				{"retry x", "", `"x" is no id`},
				{"drop", "", "or give --all"},
				{"drop 1 --all", "", "or give --all"},
				{"retry 1", "1 to be sent again", ""},
				{"drop 4", "1 dropped", ""},
				{"drop --all", "2 dropped", ""},
				{"drop --all", "0 dropped", ""},
				{"drop 2", "", "text 2 is not in the outbox"},
				{"ls", "pending  0      one…", ""},
			} {
				code, out, errs := d.berth(append([]string{"outbox"}, strings.Fields(c.args)...)...)
				if (code == exitDone) != (c.errs == "") || !strings.Contains(out, c.out) || !strings.Contains(errs, c.errs) {
					t.Errorf("outbox %s: got %d, %q, %q", c.args, code, out, errs)
				}
			}
		})
	}
}
