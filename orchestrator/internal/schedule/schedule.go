// Package schedule reads when a task is to run, and computes its next time. It
// is pure: it knows no clock but what it is given. A Schedule does not change
// and may be used from many goroutines.
package schedule

import (
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/robfig/cron/v3"

	"berth/orchestrator/internal/berth"
)

// Bounds of what can be asked for.
const (
	MinInterval = time.Minute
	MaxInterval = 3660 * 24 * time.Hour
	MaxAhead    = 100 // years until a single time
	maxValue    = 256 // bytes of a schedule
)

// Schedule is when a task runs. The zero Schedule never does.
type Schedule struct {
	cron   *cron.SpecSchedule
	hourly bool // the cron runs in every hour of its days
	zone   *time.Location
	every  int64 // milliseconds; 0: no interval
	anchor int64 // Unix milliseconds
	once   time.Time
}

// Parse reads a schedule: a kind of berth.ScheduleCron, ScheduleInterval or
// ScheduleOnce, and its value. It fails with berth.Invalid.
//
// A cron has five fields, or is one of @yearly, @monthly, @weekly, @daily and
// @hourly, by the clocks of zone. An interval is a whole number of milliseconds,
// from MinInterval to MaxInterval, counted from anchor. A single time is
// YYYY-MM-DDTHH:MM[:SS], by the clocks of zone, or with a zone of its own (Z or
// +02:00).
func Parse(kind, value string, zone *time.Location, anchor time.Time) (Schedule, error) {
	if len(value) > maxValue {
		return Schedule{}, berth.Errorf(berth.Invalid, "the schedule has %d bytes and may have %d", len(value), maxValue)
	}
	switch kind {
	case berth.ScheduleCron:
		return parseCron(value, zone)
	case berth.ScheduleInterval:
		return parseInterval(value, anchor)
	case berth.ScheduleOnce:
		return parseOnce(value, zone)
	}
	return Schedule{}, berth.Errorf(berth.Invalid, "the kind of schedule %.40q is none of cron, interval and once", kind)
}

// Next returns the first time after t, or the zero time if there is none within
// five years.
func (s Schedule) Next(t time.Time) time.Time {
	switch {
	case s.cron != nil:
		return s.nextCron(t)
	case s.every > 0:
		// Arithmetic, however long ago the last run was. The grid has no beginning:
		// the clock may have been set back since the anchor.
		since := t.UnixMilli() - s.anchor
		into := (since%s.every + s.every) % s.every
		return time.UnixMilli(t.UnixMilli() - into + s.every).In(t.Location())
	case s.once.After(t):
		return s.once
	}
	return time.Time{}
}

// First is Next for a schedule that is new: that it never runs is an error of
// kind berth.Invalid.
func (s Schedule) First(now time.Time) (time.Time, error) {
	next := s.Next(now)
	switch {
	case next.IsZero() && !s.once.IsZero():
		return next, berth.Errorf(berth.Invalid, "the time %s is past (it is %s now): give one in the future",
			s.once.Format(time.RFC3339), now.In(s.once.Location()).Format(time.RFC3339))
	case next.IsZero():
		return next, berth.Errorf(berth.Invalid, "this schedule never runs: no day has that date")
	case next.After(now.AddDate(MaxAhead, 0, 0)):
		return time.Time{}, berth.Errorf(berth.Invalid, "the time %s is more than %d years ahead", next.Format(time.RFC3339), MaxAhead)
	}
	return next, nil
}

// Descriptors that are a cron of their own. @every is none: it counts from when
// it was read.
var descriptors = map[string]bool{
	"@yearly": true, "@annually": true, "@monthly": true, "@weekly": true, "@daily": true, "@midnight": true, "@hourly": true,
}

var (
	cronParser  = cron.NewParser(cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)
	cronPattern = regexp.MustCompile(`^[0-9A-Za-z*/,?-]+( +[0-9A-Za-z*/,?-]+){4}$`)
)

const everyHour = 1<<24 - 1

func parseCron(value string, zone *time.Location) (Schedule, error) {
	const help = `give five fields such as "0 9 * * 1-5" (minute, hour, day, month, weekday), or one of @hourly, @daily, @weekly, @monthly, @yearly`
	value = strings.TrimSpace(value)
	if !descriptors[value] && !cronPattern.MatchString(value) {
		return Schedule{}, berth.Errorf(berth.Invalid, "%.80q is no cron: %s", value, help)
	}
	parsed, err := cronParser.Parse(value)
	if err != nil {
		return Schedule{}, berth.Errorf(berth.Invalid, "%.80q is no cron (%w): %s", value, err, help)
	}
	spec := parsed.(*cron.SpecSchedule) // what is not is @every
	spec.Location = time.UTC
	return Schedule{cron: spec, hourly: spec.Hour&everyHour == everyHour, zone: zone}, nil
}

// nextCron asks the cron about the faces of clocks, and finds the instants that
// show them itself. Where the clocks jump, a cron of every hour runs by the hours
// that really pass. Any other one runs once for each face that it names: at the
// jump if the clocks leave it out, and the first time only if they show it twice.
func (s Schedule) nextCron(t time.Time) time.Time {
	t = t.In(s.zone)
	_, offset := t.Zone()
	for at, face := t, asUTC(t, offset); ; {
		start, end := bounds(at)
		if !s.hourly && !start.IsZero() {
			_, before := start.Add(-1).Zone()
			if shown := asUTC(start, before); face.Before(shown) {
				face = shown.Add(-1)
			}
		}
		next := s.cron.Next(face)
		if next.IsZero() {
			return time.Time{}
		}
		found := next.Add(-time.Duration(offset) * time.Second).In(s.zone)
		if end.IsZero() || found.Before(end) {
			return found
		}
		at = end.In(s.zone)
		_, offset = at.Zone()
		face = asUTC(at, offset)
		if !s.hourly && next.Before(face) {
			return at
		}
		face = face.Add(-1) // what begins at the jump counts
	}
}

// bounds is t.ZoneBounds, which for years that no table covers ends a leap year a day
// too early: on that day the end is not after t.
func bounds(t time.Time) (start, end time.Time) {
	start, end = t.ZoneBounds()
	if !end.IsZero() && !end.After(t) {
		_, end = t.Add(24 * time.Hour).ZoneBounds()
	}
	return start, end
}

// asUTC returns the time at which clocks of UTC show what those of an offset, in
// seconds, show at t.
func asUTC(t time.Time, offset int) time.Time {
	return t.UTC().Add(time.Duration(offset) * time.Second)
}

var intervalPattern = regexp.MustCompile(`^[1-9][0-9]{0,15}$`)

func parseInterval(value string, anchor time.Time) (Schedule, error) {
	ms, err := strconv.ParseInt(value, 10, 64)
	if err != nil || !intervalPattern.MatchString(value) {
		return Schedule{}, berth.Errorf(berth.Invalid, "the interval %.40q is no whole number of milliseconds: an hour is 3600000", value)
	}
	if ms < MinInterval.Milliseconds() || ms > MaxInterval.Milliseconds() {
		return Schedule{}, berth.Errorf(berth.Invalid, "an interval of %d ms cannot be used: give %d (a minute) to %d (ten years)", ms, MinInterval.Milliseconds(), MaxInterval.Milliseconds())
	}
	return Schedule{every: ms, anchor: anchor.UnixMilli()}, nil
}

var oncePattern = regexp.MustCompile(`^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d)?(?:\.\d{1,9})?(Z|[+-]\d\d:\d\d)?$`)

func parseOnce(value string, zone *time.Location) (Schedule, error) {
	const help = `give one such as "2026-02-01T15:30:00", by the clocks of %s, or with Z or an offset behind it`
	part := oncePattern.FindStringSubmatch(strings.TrimSpace(value))
	if part == nil {
		return Schedule{}, berth.Errorf(berth.Invalid, "%.40q is no time: "+help, value, zone)
	}
	if part[3] == "" {
		part[3] = ":00"
	}
	text := part[1] + "T" + part[2] + part[3]
	if part[4] != "" {
		at, err := time.Parse(time.RFC3339, text+part[4])
		if err != nil {
			return Schedule{}, berth.Errorf(berth.Invalid, "%.40q is no time (%w): "+help, value, err, zone)
		}
		return Schedule{once: at}, nil
	}
	const layout = "2006-01-02T15:04:05"
	face, err := time.Parse(layout, text)
	if err != nil {
		return Schedule{}, berth.Errorf(berth.Invalid, "%.40q is no time (%w): "+help, value, err, zone)
	}
	at, ok := firstShowing(face, zone)
	if !ok {
		return Schedule{}, berth.Errorf(berth.Invalid, "the clocks of %s leave out %s: give a time an hour later or earlier", zone, text)
	}
	return Schedule{once: at}, nil
}

// firstShowing returns the first instant at which the clocks of a zone show a
// face, which is given as if in UTC; ok is false if they leave it out.
func firstShowing(face time.Time, zone *time.Location) (first time.Time, ok bool) {
	// No zone is further from UTC than a day, and none changes twice in two.
	for _, t := range []time.Time{face.AddDate(0, 0, -1), face.AddDate(0, 0, 1)} {
		_, offset := t.In(zone).Zone()
		at := face.Add(-time.Duration(offset) * time.Second).In(zone)
		if _, there := at.Zone(); there == offset && (!ok || at.Before(first)) {
			first, ok = at, true
		}
	}
	return first, ok
}
