package schedule

import (
	"errors"
	"strings"
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
)

func zone(t testing.TB, name string) *time.Location {
	t.Helper()
	loc, err := time.LoadLocation(name)
	if err != nil {
		t.Fatal(err)
	}
	return loc
}

func at(t testing.TB, text string) time.Time {
	t.Helper()
	out, err := time.Parse(time.RFC3339, text)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// runs returns the next n times after from, as clocks of the zone show them.
func runs(t *testing.T, kind, value, zoneName, from string, n int) []string {
	t.Helper()
	loc := zone(t, zoneName)
	after := at(t, from)
	s, err := Parse(kind, value, loc, after)
	if err != nil {
		t.Fatalf("%s: %v", value, err)
	}
	var out []string
	for range n {
		if after = s.Next(after); after.IsZero() {
			break
		}
		out = append(out, after.In(loc).Format(time.RFC3339))
	}
	return out
}

// W28: what the ancestors took and should not have. IA-23, IA-25 to IA-27.
func TestW28SchedulesThatAreRefused(t *testing.T) {
	now := at(t, "2026-03-01T12:00:00Z")
	for _, c := range []struct{ why, kind, value, want string }{
		{"an unknown kind", "hourly", "1", "none of cron, interval and once"},
		{"no kind", "", "0 9 * * *", "none of cron"},
		{"an exponent", "interval", "1e9", "no whole number"},
		{"a number with a tail", "interval", "60000abc", "no whole number"},
		{"a blank before", "interval", " 60000", "no whole number"},
		{"a sign", "interval", "+60000", "no whole number"},
		{"a leading zero", "interval", "060000", "no whole number"},
		{"a fraction", "interval", "60000.0", "no whole number"},
		{"hexadecimal", "interval", "0xEA60", "no whole number"},
		{"digits of another script", "interval", "６００００", "no whole number"},
		{"IA-25", "interval", "abc", "no whole number"},
		{"IA-26", "interval", "0", "no whole number"},
		{"negative", "interval", "-60000", "no whole number"},
		{"nothing", "interval", "", "no whole number"},
		{"a millisecond", "interval", "1", "cannot be used"},
		{"below a minute", "interval", "59999", "cannot be used"},
		{"above ten years", "interval", "316224000001", "cannot be used"},
		{"beyond 64 bits", "interval", "99999999999999999999", "no whole number"},
		{"year 2001", "once", "5", "is no time"},
		{"IA-27", "once", "not-a-date", "is no time"},
		{"a day only", "once", "2026-04-01", "is no time"},
		{"American", "once", "04/01/2026 10:00", "is no time"},
		{"30 February", "once", "2027-02-30T10:00:00", "is no time"},
		{"29 February of no leap year", "once", "2027-02-29T10:00:00Z", "is no time"},
		{"hour 24", "once", "2027-02-01T24:00:00", "is no time"},
		{"a long zone", "once", "2027-02-01T10:00:00+99:00", "is no time"},
		{"a tail", "once", "2027-02-01T10:00:00 or so", "is no time"},
		{"past", "once", "2026-03-01T11:59:59", "is past"},
		{"this instant", "once", "2026-03-01T12:00:00Z", "is past"},
		{"far ahead", "once", "2126-03-02T12:00:00", "years ahead"},
		{"IA-23", "cron", "not a cron", "is no cron"},
		{"seconds", "cron", "* * * * * *", "is no cron"},
		{"four fields", "cron", "* * * *", "is no cron"},
		{"@every", "cron", "@every 1s", "is no cron"},
		{"@reboot", "cron", "@reboot", "is no cron"},
		{"a zone of its own", "cron", "TZ=Europe/Berlin 0 9 * * *", "is no cron"},
		{"what panics in the parser", "cron", "TZ=", "is no cron"},
		{"minute 60", "cron", "60 * * * *", "is no cron"},
		{"step 0", "cron", "*/0 * * * *", "is no cron"},
		{"nothing", "cron", "", "is no cron"},
		{"two lines", "cron", "0 9 * * *\n0 10 * * *", "is no cron"},
		{"30 February", "cron", "0 0 30 2 *", "never runs"},
		{"31 of short months", "cron", "0 0 31 4,6,9,11 *", "never runs"},
		{"long", "cron", strings.Repeat("1,", 200) + "1 * * * *", "bytes"},
	} {
		s, err := Parse(c.kind, c.value, zone(t, "UTC"), now)
		if err == nil {
			_, err = s.First(now)
		}
		if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != berth.Invalid || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %s %q: got %v, want %q", c.why, c.kind, c.value, err, c.want)
		}
	}
}

// IA-22, IA-24, TV-05: times without a zone are of the task's, others of their own.
func TestTV05First(t *testing.T) {
	now := at(t, "2026-03-01T12:00:00.5Z")
	for _, c := range []struct{ kind, value, zone, want string }{
		{"cron", "0 9 * * *", "UTC", "2026-03-02T09:00:00Z"},
		{"cron", "0 9 * * *", "America/New_York", "2026-03-01T14:00:00Z"},
		{"cron", " 0  9 * * mon-fri ", "UTC", "2026-03-02T09:00:00Z"},
		{"cron", "@daily", "Asia/Kolkata", "2026-03-01T18:30:00Z"},
		{"cron", "@hourly", "UTC", "2026-03-01T13:00:00Z"},
		{"cron", "0 0 29 2 *", "UTC", "2028-02-29T00:00:00Z"},
		{"interval", "3600000", "UTC", "2026-03-01T13:00:00.5Z"},
		{"interval", "60000", "UTC", "2026-03-01T12:01:00.5Z"},
		{"interval", "316224000000", "UTC", "2036-03-08T12:00:00.5Z"},
		{"once", "2026-03-01T12:00:01", "UTC", "2026-03-01T12:00:01Z"},
		{"once", "2026-03-01T07:30", "America/New_York", "2026-03-01T12:30:00Z"},
		{"once", "2026-03-02 07:30:00.250", "UTC", "2026-03-02T07:30:00Z"},
		{"once", "2026-03-01T13:00:00+00:30", "America/New_York", "2026-03-01T12:30:00Z"},
		{"once", "2026-03-01T12:30:00Z", "America/New_York", "2026-03-01T12:30:00Z"},
		{"once", "2126-02-28T12:00:00Z", "UTC", "2126-02-28T12:00:00Z"},
	} {
		s, err := Parse(c.kind, c.value, zone(t, c.zone), now)
		if err != nil {
			t.Errorf("%s %q: %v", c.kind, c.value, err)
			continue
		}
		if got, err := s.First(now); err != nil || !got.Equal(at(t, c.want)) {
			t.Errorf("%s %q: got %v, %v, want %s", c.kind, c.value, got, err, c.want)
		}
	}
}

// W28: however long the daemon was down, the next time is one division away and
// on the grid.
func TestW28IntervalAfterLongDowntime(t *testing.T) {
	anchor := at(t, "2000-01-01T00:00:00.123Z")
	s, err := Parse("interval", "60000", time.UTC, anchor)
	if err != nil {
		t.Fatal(err)
	}
	for after, want := range map[string]string{
		"1970-01-01T00:00:00Z":           "1970-01-01T00:00:00.123Z",
		"1999-12-31T23:59:00.123Z":       "2000-01-01T00:00:00.123Z",
		"2000-01-01T00:00:00.123Z":       "2000-01-01T00:01:00.123Z",
		"2000-01-01T00:01:00.122999999Z": "2000-01-01T00:01:00.123Z",
		"2000-01-01T00:01:00.123Z":       "2000-01-01T00:02:00.123Z",
		"2000-01-01T00:01:00.123000001Z": "2000-01-01T00:02:00.123Z",
		"2300-06-01T00:00:30Z":           "2300-06-01T00:01:00.123Z",
	} {
		if got := s.Next(at(t, after)); !got.Equal(at(t, want)) {
			t.Errorf("after %s: got %v, want %s", after, got, want)
		}
	}
}

func TestOnceIsOver(t *testing.T) {
	if got := runs(t, "once", "2026-03-01T12:00:00", "UTC", "2026-03-01T11:00:00Z", 3); len(got) != 1 {
		t.Errorf("got %v", got)
	}
}

// Where clocks jump, each face that a cron names counts once, and a cron of
// every hour follows the hours that pass.
func TestCronOverClockChanges(t *testing.T) {
	for _, c := range []struct {
		why, value, zone, from string
		want                   []string
	}{
		{"forward, a face that is left out", "30 2 * * *", "Europe/Berlin", "2026-03-28T00:00:00+01:00",
			[]string{"2026-03-28T02:30:00+01:00", "2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"}},
		{"forward, several", "0,30 2,3 * * *", "Europe/Berlin", "2026-03-29T00:00:00+01:00",
			[]string{"2026-03-29T03:00:00+02:00", "2026-03-29T03:30:00+02:00", "2026-03-30T02:00:00+02:00"}},
		{"forward, every hour", "30 * * * *", "Europe/Berlin", "2026-03-29T00:45:00+01:00",
			[]string{"2026-03-29T01:30:00+01:00", "2026-03-29T03:30:00+02:00", "2026-03-29T04:30:00+02:00"}},
		{"back, a face that is shown twice", "30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00+02:00",
			[]string{"2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"}},
		{"back, begun between", "30 2 * * *", "Europe/Berlin", "2026-10-25T02:10:00+01:00",
			[]string{"2026-10-26T02:30:00+01:00"}},
		{"back, the hour after", "0 3 * * *", "Europe/Berlin", "2026-10-25T02:10:00+02:00",
			[]string{"2026-10-25T03:00:00+01:00"}},
		{"back, every hour", "30 * * * *", "Europe/Berlin", "2026-10-25T01:45:00+02:00",
			[]string{"2026-10-25T02:30:00+02:00", "2026-10-25T02:30:00+01:00", "2026-10-25T03:30:00+01:00"}},
		{"back, every quarter", "*/15 * * * *", "America/New_York", "2026-11-01T01:40:00-04:00",
			[]string{"2026-11-01T01:45:00-04:00", "2026-11-01T01:00:00-05:00", "2026-11-01T01:15:00-05:00"}},
		{"forward at midnight", "0 0 * * *", "Africa/Cairo", "2026-04-23T12:00:00+02:00",
			[]string{"2026-04-24T01:00:00+03:00", "2026-04-25T00:00:00+03:00"}},
		{"half an hour, forward", "15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00:00+10:30",
			[]string{"2026-10-04T02:30:00+11:00", "2026-10-05T02:15:00+11:00"}},
		{"half an hour, back", "45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00:00+11:00",
			[]string{"2026-04-05T01:45:00+11:00", "2026-04-06T01:45:00+10:30"}},
		{"a day left out", "0 9 * * *", "Pacific/Apia", "2011-12-29T00:00:00-10:00",
			[]string{"2011-12-29T09:00:00-10:00", "2011-12-31T00:00:00+14:00", "2011-12-31T09:00:00+14:00"}},
	} {
		if d := cmp.Diff(c.want, runs(t, "cron", c.value, c.zone, c.from, len(c.want))); d != "" {
			t.Errorf("%s: %s", c.why, d)
		}
	}
}

// Over a year, against looking at the clock of each minute.
func TestCronAgainstTheClock(t *testing.T) {
	for _, name := range []string{"Europe/Berlin", "America/Sao_Paulo", "Australia/Lord_Howe", "Asia/Kolkata"} {
		loc := zone(t, name)
		begin := time.Date(2025, 1, 1, 0, 0, 0, 0, loc)
		s, err := Parse("cron", "*/20 * * * *", loc, begin)
		if err != nil {
			t.Fatal(err)
		}
		next := s.Next(begin)
		for now := begin.Add(time.Minute); now.Before(begin.AddDate(1, 0, 0)); now = now.Add(time.Minute) {
			if now.In(loc).Minute()%20 != 0 {
				continue
			}
			if !next.Equal(now) {
				t.Fatalf("%s: got %v, want %v", name, next, now.In(loc))
			}
			next = s.Next(next)
		}
	}
}

func TestOnceAtClockChanges(t *testing.T) {
	berlin := zone(t, "Europe/Berlin")
	if _, err := Parse("once", "2026-03-29T02:30:00", berlin, time.Time{}); err == nil || !strings.Contains(err.Error(), "leave out") {
		t.Errorf("a face that is left out: %v", err)
	}
	for value, want := range map[string]string{
		"2026-10-25T02:30:00": "2026-10-25T02:30:00+02:00", // shown twice: the first
		"2026-10-25T03:00:00": "2026-10-25T03:00:00+01:00",
		"2026-03-29T01:59:59": "2026-03-29T01:59:59+01:00",
		"2026-03-29T03:00:00": "2026-03-29T03:00:00+02:00",
	} {
		s, err := Parse("once", value, berlin, time.Time{})
		if got := s.Next(time.Unix(0, 0)); err != nil || !got.Equal(at(t, want)) {
			t.Errorf("%s: got %v, %v, want %s", value, got, err, want)
		}
	}
}

// On the last day of a leap year that no table of zones covers, no search goes on for
// ever.
func TestLastDayOfALeapYear(t *testing.T) {
	for zone, want := range map[string]string{"Europe/Berlin": "2044-02-29T00:00:00+01:00", "Australia/Lord_Howe": "2044-02-29T00:00:00+11:00"} {
		loc, err := time.LoadLocation(zone)
		if err != nil {
			t.Fatal(err)
		}
		s, err := Parse("cron", "0 0 29 2 *", loc, time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		for _, from := range []string{"2040-03-01T00:00:00Z", "2040-12-31T12:00:00Z"} {
			if got := s.Next(at(t, from)); !got.Equal(at(t, want)) {
				t.Errorf("%s from %s: %v, want %s", zone, from, got, want)
			}
		}
		s, err = Parse("cron", "0 9 * * *", loc, time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		for day := time.Date(2040, 12, 29, 9, 0, 0, 0, loc); day.Year() < 2041; {
			next := s.Next(day)
			if want := day.AddDate(0, 0, 1); !next.Equal(want) {
				t.Fatalf("%s: after %v comes %v, want %v", zone, day, next, want)
			}
			day = next
		}
	}
}

func FuzzParse(f *testing.F) {
	// Zones whose clocks jump by an hour and by half of one, over midnight and over a
	// whole day, and some that do not.
	zones := []string{"Europe/Berlin", "Australia/Lord_Howe", "America/New_York", "Pacific/Apia", "America/Sao_Paulo", "Asia/Kathmandu", "Africa/Casablanca", "UTC"}
	kinds := []string{"cron", "once", "interval", "weekly"}
	for i, value := range []string{"0 9 * * 1-5", "*/7 */5 1,15 * ?", "@daily", "3600000", "2026-02-01T15:30:00", "2026-02-01T15:30:00+02:00", "TZ= x", "@every 1h", "5-1 * * * *", "0 0 29 2 *", "2026-03-29 02:30", "2026-10-25T02:30:00.5"} {
		for kind := range kinds {
			f.Add(uint8(kind), value, uint8(i), int64(1774746000))
		}
	}
	f.Add(uint8(0), "30 1 * * *", uint8(1), int64(1775310000))
	f.Add(uint8(0), "0 0 30 12 *", uint8(3), int64(1325160000)) // a day that Samoa did not have
	f.Fuzz(func(t *testing.T, which uint8, value string, zone uint8, unix int64) {
		kind := kinds[int(which)%len(kinds)]
		loc, err := time.LoadLocation(zones[int(zone)%len(zones)])
		if err != nil {
			t.Fatal(err)
		}
		if unix < 0 || unix > 4e9 {
			return
		}
		now := time.Unix(unix, 0)
		s, err := Parse(kind, value, loc, time.Unix(4e9-unix, 0)) // an anchor of before or after
		if err != nil {
			if _, ok := errors.AsType[*berth.Error](err); !ok {
				t.Errorf("%v", err)
			}
			return
		}
		last := now
		for i := range 5 {
			next := s.Next(last)
			if next.IsZero() {
				return
			}
			if !next.After(last) {
				t.Fatalf("%v is not after %v", next, last)
			}
			// Clocks may jump by an hour or so, and a cron with them.
			if kind == "interval" && i > 0 && next.Sub(last) < MinInterval {
				t.Fatalf("%v is too soon after %v", next, last)
			}
			// No time in between would have come first.
			if mid := last.Add(next.Sub(last) / 2); !s.Next(mid).Equal(next) {
				t.Fatalf("after %v comes %v, after %v in between %v", last, next, mid, s.Next(mid))
			}
			last = next
		}
	})
}
