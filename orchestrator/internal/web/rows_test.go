package web

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
)

// known is a backend with a state worth seeing.
type known struct {
	backend
	status Status
	groups []Group
}

func (k *known) Status(context.Context) (Status, error)  { return k.status, nil }
func (k *known) Groups(context.Context) ([]Group, error) { return k.groups, nil }

// W46: all that the daemon knows about its health arrives at who asks: the engine,
// the image, the pool and who waits for it, the runs, what could not be sent,
// what a group failed with and when it is tried again.
func TestW46StatusIsWhole(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	k := &known{
		status: Status{
			Version: "1.2.3", PID: 7, Root: "/r", StartedAt: at, Ready: true, Groups: 3,
			Docker: Docker{Error: "no Docker engine"}, Image: Image{Ref: "i:1", Error: "no space"},
			Pool:   Pool{Limit: 5, Used: 2, Waiting: []string{"work"}},
			Runs:   []Run{{ID: "r1", Group: "family", Kind: berth.KindChat, State: berth.RunBusy, Container: "c1", Turns: 4, StartedAt: at, Since: at.Add(time.Minute)}},
			Outbox: Outbox{Pending: 1, Dead: 2}, Alarms: []string{"no Docker engine", "no agent image"},
		},
		groups: []Group{{
			JID: "console:family", Name: "Family", Folder: "family", Trigger: "@Andy", RequiresTrigger: true, AddedAt: at,
			Pending: 6, State: "busy", LastError: "boom", GivenUp: true, RetryAt: &at,
			Mounts: []MountVerdict{{Request: berth.MountRequest{HostPath: "/x"}, Refused: "not under any root"}},
		}},
	}
	c, _, _ := serve(t, k)
	status, err := c.Status(t.Context())
	if d := cmp.Diff(k.status, status); d != "" || err != nil {
		t.Errorf("status: %v (-want +got):\n%s", err, d)
	}
	groups, err := c.Groups(t.Context())
	if d := cmp.Diff(k.groups, groups); d != "" || err != nil {
		t.Errorf("groups: %v (-want +got):\n%s", err, d)
	}
}
