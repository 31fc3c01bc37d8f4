// Package pairing lets people put themselves on the list of senders with a token
// that the operator gave them. Who guesses is slowed down, and the operator can
// see it.
package pairing

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"berth/orchestrator/internal/berth"
)

// What a sender is told.
const (
	disabled = "Pairing is disabled by admin. Ask admin to whitelist your account."
	usage    = "Usage: /pair <token>"
	invalid  = "Invalid pairing token."
	paired   = "Pairing successful. You are now whitelisted."
	already  = "You are already whitelisted."
	failure  = "I hit an internal error while processing that. Please try again."
)

const (
	minToken   = 8
	shortest   = 5 * time.Second // after a sender's first wrong token; it doubles
	longest    = time.Hour
	maxSenders = 4096        // remembered; who comes after them is not heard
	triesEvery = time.Minute // of all senders together, after a burst
	triesBurst = 10
)

// ValidToken returns a berth.Invalid error unless token is one that nobody guesses
// at the rate that a Desk allows.
func ValidToken(token string) error {
	if len(token) < minToken || len(token) > 256 || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return berth.Errorf(berth.Invalid, "give %d to 256 characters without blanks", minToken)
	}
	return nil
}

// Attempt is one /pair of a sender.
type Attempt struct {
	ChatJID string
	Folder  string // of the chat's group; empty: it is not registered
	Sender  string
	Name    string // of the sender, as he wrote it; may be empty
	Token   string // as it was written
}

// Desk checks tokens. Fill the fields; its method is safe for concurrent use.
type Desk struct {
	Token string // empty: nobody can pair
	// Add puts a sender on the list that decides about the chat; there is true if
	// he counted there before.
	Add   func(context.Context, Attempt) (there bool, err error)
	Audit func(context.Context, berth.Audit) error

	mu      sync.Mutex
	senders map[string]*sender
	tries   *rate.Limiter // of all; made at the first
}

// sender is one who has to wait.
type sender struct {
	wrong int       // tokens in a row
	until time.Time // not heard before
	told  bool      // that he has to wait
}

// Pair carries out an attempt and returns what to tell the sender, which may be
// nothing. A wrong token makes him wait for 5 s, then for twice as long each time
// up to an hour, and all senders together have one try a minute after a burst
// of 10. An error is for the operator; the sender is told something all the same.
func (d *Desk) Pair(ctx context.Context, a Attempt) (reply string, err error) {
	reply, right := d.check(a)
	switch {
	case right:
		there, err := d.Add(ctx, a)
		if err != nil {
			return failure, fmt.Errorf("put a sender on the list: %w", err)
		}
		if there {
			return already, nil
		}
		return paired, nil
	case reply == invalid:
		err = d.Audit(ctx, berth.Audit{At: time.Now(), Folder: a.Folder, What: "pair", Target: a.Sender + " in " + a.ChatJID, Reason: "a wrong pairing token"})
	}
	return reply, err
}

// check decides about an attempt.
func (d *Desk) check(a Attempt) (reply string, right bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now, id := time.Now(), person(a.Sender)
	if d.senders == nil {
		d.senders, d.tries = make(map[string]*sender), rate.NewLimiter(rate.Every(triesEvery), triesBurst)
	}
	s := d.senders[id]
	if s == nil {
		if d.forgetLocked(now); len(d.senders) >= maxSenders {
			return "", false
		}
		s = new(sender)
		d.senders[id] = s
	}
	token := strings.TrimSpace(a.Token)
	switch {
	case now.Before(s.until):
		if s.told {
			return "", false
		}
		s.told = true
		return fmt.Sprintf("Please wait %v before you try again.", s.until.Sub(now).Round(time.Second)), false
	case d.Token == "":
		s.until, s.told = now.Add(longest), true
		return disabled, false
	case token == "":
		s.until, s.told = now.Add(shortest), false
		return usage, false
	case !d.tries.AllowN(now, 1):
		s.until, s.told = now.Add(triesEvery), true
		return "", false
	}
	// Of equal length, so that the time tells nothing of the token's.
	given, want := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(d.Token))
	if subtle.ConstantTimeCompare(given[:], want[:]) == 1 {
		delete(d.senders, id)
		return "", true
	}
	s.until, s.told = now.Add(min(shortest<<min(s.wrong, 20), longest)), false
	s.wrong++
	return invalid, false
}

// forgetLocked forgets whose wait is long over, when there are many.
func (d *Desk) forgetLocked(now time.Time) {
	if len(d.senders) < maxSenders {
		return
	}
	for id, s := range d.senders {
		if now.Sub(s.until) > longest {
			delete(d.senders, id)
		}
	}
}

// person returns a sender's id without the device that he wrote from: he may have
// many.
func person(id string) string {
	user, server, ok := strings.Cut(id, "@")
	if !ok {
		return id
	}
	user, _, _ = strings.Cut(user, ":")
	return user + "@" + strings.ToLower(server)
}

var directChat = regexp.MustCompile(`^([0-9]{5,20})@(s\.whatsapp\.net|lid)$`)

// DirectGroup returns the group that a person's own chat becomes; ok is false for
// any other chat. It needs no trigger.
func DirectGroup(chatJID, name string) (g berth.Group, ok bool) {
	m := directChat.FindStringSubmatch(chatJID)
	if m == nil {
		return g, false
	}
	g = berth.Group{JID: chatJID, Name: m[1], Folder: "dm-" + m[1], AddedAt: time.Now()}
	if m[2] == "lid" { // another number than the one of a telephone
		g.Folder = "dm-lid-" + m[1]
	}
	if name = strings.TrimSpace(name); name != "" {
		named := g
		named.Name = name
		if berth.ValidGroup(named) == nil {
			g = named
		}
	}
	return g, true
}
