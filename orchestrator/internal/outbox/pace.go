package outbox

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// Pace keeps a channel from being flooded. It is per chat, and lost at a
// restart. The zero Pace holds nothing up.
type Pace struct {
	Chunk  time.Duration // from one piece of a text to the next
	Text   time.Duration // between texts, once Burst of them went out faster
	Burst  int           // at least 1 is meant
	Jitter time.Duration // up to so much more, at random, for what follows another within seconds
}

// DefaultPace is that of people's messengers.
var DefaultPace = Pace{Chunk: 500 * time.Millisecond, Text: time.Second, Burst: 5}

// Paced is a Channel that wants its texts at a pace, which may differ by chat.
// Pace must not block.
type Paced interface {
	Pace(chatJID string) Pace
}

// rhythm is how the texts of one chat went out lately.
type rhythm struct {
	pace Pace
	key  string    // of the last text
	at   time.Time // when it was out
	full time.Time // when all of Burst may go out at once again
}

// wait returns how long a text must wait.
func (r *rhythm) wait(key string, now time.Time) time.Duration {
	wait := r.least(key, now)
	if r.pace.Jitter > 0 && r.rest(now) > 0 {
		wait += rand.N(r.pace.Jitter)
	}
	return wait
}

func (r *rhythm) least(key string, now time.Time) time.Duration {
	if follows(r.key, key) {
		return max(0, r.at.Add(r.pace.Chunk).Sub(now))
	}
	spare := r.pace.Text * time.Duration(max(r.pace.Burst, 1)-1)
	return max(0, r.full.Add(-spare).Sub(now))
}

// out notes that a text went out. The pieces of a text count as one.
func (r *rhythm) out(key string, now time.Time) {
	if !follows(r.key, key) {
		if r.full.Before(now) {
			r.full = now
		}
		r.full = r.full.Add(r.pace.Text)
	}
	r.key, r.at = key, now
}

// rest returns how long until nothing of it matters any more.
func (r *rhythm) rest(now time.Time) time.Duration {
	return max(0, r.full.Sub(now), r.at.Add(r.pace.Chunk).Sub(now))
}

// follows reports whether two keys are of pieces of the same text, one after
// the other: they differ in their last element, the number of the piece.
func follows(before, key string) bool {
	text, piece := cutKey(before)
	next, number := cutKey(key)
	return text == next && piece >= 0 && number > piece
}

func cutKey(key string) (text string, piece int) {
	i := strings.LastIndexByte(key, '/')
	piece, err := strconv.Atoi(key[i+1:])
	if err != nil || i < 0 {
		return key, -1
	}
	return key[:i], piece
}
