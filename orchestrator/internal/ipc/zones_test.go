package ipc

import (
	"testing"
	"time"
	_ "time/tzdata"

	"berth/orchestrator/internal/berth"
)

// TZ-04 to TZ-06: which zones a task can have. What is none is refused, also when a
// task is changed, and never taken for UTC in silence.
func TestTZ04to06ZonesOfTasks(t *testing.T) {
	w := settle(t)
	for zone, good := range map[string]bool{
		"America/New_York": true, "UTC": true, "Asia/Tokyo": true, "Asia/Jerusalem": true,
		"IST-2": false, "XYZ+3": false, "NotATimezone": false, "Local": false, "../UTC": false, "/usr/share/zoneinfo/UTC": false, "UTC\n": false,
	} {
		got := w.schedule("other-group", "other@g.us", map[string]any{"schedule_type": "cron", "schedule_value": "0 9 * * *", "time_zone": zone})
		if got.OK != good {
			t.Errorf("TZ-04, TZ-05: %q: %+v", zone, got)
		}
	}
	if got := w.schedule("other-group", "other@g.us", map[string]any{"taskId": "t1", "schedule_type": "cron", "schedule_value": "0 9 * * *", "time_zone": ""}); !got.OK {
		t.Errorf("no zone is the usual one: %+v", got)
	}
	for _, zone := range []string{"", "NotATimezone", "Local"} {
		w.denied(w.ask("other-group", `{"type":"update_task","taskId":"t1","time_zone":"`+zone+`"}`), "ipc.update_task", "other-group", "is no time zone")
	}
	if task, err := w.db.Task(t.Context(), "other-group", "t1"); err != nil || task.Zone != "UTC" {
		t.Errorf("TZ-06: %+v, %v", task, err)
	}
}

// TZ-01 to TZ-03, TZ-07, TZ-08: an agent is told times by the clocks of the task's
// zone, and by those of UTC if that is not known any more.
func TestTZ01to03TimesThatAreTold(t *testing.T) {
	for _, c := range []struct{ id, at, zone, want string }{
		{"TZ-01", "2026-02-04T18:30:00Z", "America/New_York", "2026-02-04T13:30:00-05:00"},
		{"TZ-02, TZ-07", "2026-06-15T12:00:00Z", "America/New_York", "2026-06-15T08:00:00-04:00"},
		{"TZ-02", "2026-06-15T12:00:00Z", "Asia/Tokyo", "2026-06-15T21:00:00+09:00"},
		{"TZ-03, TZ-08", "2026-01-01T12:00:00Z", "IST-2", "2026-01-01T12:00:00Z"},
		{"TZ-08", "2026-01-01T12:00:00Z", "", "2026-01-01T12:00:00Z"},
	} {
		at, err := time.Parse(time.RFC3339, c.at)
		check(t, err)
		if got := describe(berth.Task{NextRun: at.Local(), Zone: c.zone}); got.NextRun == nil || *got.NextRun != c.want {
			t.Errorf("%s: %v, want %s", c.id, got.NextRun, c.want)
		}
	}
}
