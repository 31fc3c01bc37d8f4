package pairing

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"berth/orchestrator/internal/berth"
)

const right = "a-good-token"

// office is a Desk whose list and audit can be looked at.
type office struct {
	Desk
	t      *testing.T
	list   map[string]bool
	audits []berth.Audit
	fail   error
}

func open(t *testing.T, token string) *office {
	o := &office{t: t, list: make(map[string]bool)}
	o.Desk = Desk{
		Token: token,
		Add: func(_ context.Context, a Attempt) (bool, error) {
			there := o.list[a.Sender]
			o.list[a.Sender] = o.fail == nil
			return there, o.fail
		},
		Audit: func(_ context.Context, a berth.Audit) error {
			o.audits = append(o.audits, a)
			return o.fail
		},
	}
	return o
}

func (o *office) say(sender, token, want string) {
	o.t.Helper()
	got, err := o.Pair(o.t.Context(), Attempt{ChatJID: sender, Sender: sender, Token: token})
	if got != want || err != nil {
		o.t.Errorf("%s says %q: got %q, %v, want %q", sender, token, got, err, want)
	}
}

// B-WA-3.
func TestPair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := open(t, right)
		o.say("1@lid", "", "Usage: /pair <token>")
		time.Sleep(shortest)
		o.say("1@lid", "wrong", "Invalid pairing token.")
		time.Sleep(shortest)
		o.say("1@lid", " "+right+"\n", "Pairing successful. You are now whitelisted.")
		o.say("1@lid", right, "You are already whitelisted.")
		if len(o.audits) != 1 || o.audits[0].What != "pair" || !strings.Contains(o.audits[0].Target, "1@lid") || strings.Contains(fmt.Sprint(o.audits), "wrong\"") {
			t.Errorf("recorded %+v", o.audits)
		}
		for _, token := range []string{right + "x", right[1:], strings.ToUpper(right), strings.Repeat("x", 1<<20)} {
			o.say(fmt.Sprint(len(token))+"@lid", token, "Invalid pairing token.")
		}
		o.fail = errors.New("disk full")
		if got, err := o.Pair(t.Context(), Attempt{Sender: "9@lid", Token: right}); err == nil || got != failure {
			t.Errorf("got %q, %v", got, err)
		}
	})
}

// Where pairing is off, each sender hears so once an hour at most.
func TestPairDisabled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := open(t, "")
		o.say("1@lid", "", "Pairing is disabled by admin. Ask admin to whitelist your account.")
		o.say("1@lid", "x", "")
		o.say("2@lid", right, "Pairing is disabled by admin. Ask admin to whitelist your account.")
		if len(o.list) > 0 {
			t.Errorf("listed %v", o.list)
		}
	})
}

// Who guesses waits longer and longer, is told so once a wait, and cannot get
// around it: not by the right token, not from another device.
func TestGuessingIsSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := open(t, right)
		wait := shortest
		for range 13 {
			o.say("1@lid", "guess", invalid)
			o.say("1:7@lid", right, fmt.Sprintf("Please wait %v before you try again.", wait))
			o.say("1@LID", right, "")
			time.Sleep(wait - time.Nanosecond)
			o.say("1@lid", right, "")
			time.Sleep(time.Nanosecond)
			wait = min(2*wait, longest)
		}
		if wait != longest || len(o.list) > 0 {
			t.Errorf("waits %v, listed %v", wait, o.list)
		}
		o.say("1@lid", right, paired)
	})
}

// Many senders together are no faster, cost bounded memory, and hear nothing.
func TestGuessingByMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := open(t, right)
		checked := 0
		for i := range 2 * maxSenders {
			reply, err := o.Pair(t.Context(), Attempt{Sender: fmt.Sprint(i, "@lid"), Token: "guess"})
			if err != nil {
				t.Fatal(err)
			}
			if reply != "" {
				checked++
			}
		}
		if checked != triesBurst || len(o.senders) > maxSenders || len(o.audits) != triesBurst {
			t.Errorf("%d tries, %d remembered, %d recorded", checked, len(o.senders), len(o.audits))
		}
		time.Sleep(3 * longest)
		o.say("new@lid", right, paired)
	})
}

func TestPairAtOnce(t *testing.T) {
	o := open(t, right)
	var mu sync.Mutex
	o.Add = func(context.Context, Attempt) (bool, error) { mu.Lock(); defer mu.Unlock(); return false, nil }
	o.Audit = func(context.Context, berth.Audit) error { return nil }
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			_, _ = o.Pair(t.Context(), Attempt{Sender: fmt.Sprint(i%5, "@lid"), Token: []string{right, "x"}[i%2]})
		})
	}
	wg.Wait()
}

func TestValidToken(t *testing.T) {
	for _, token := range []string{"", "1234567", "with blank", "naïve-token", strings.Repeat("x", 257)} {
		if ValidToken(token) == nil {
			t.Errorf("%q is taken", token)
		}
	}
	if err := ValidToken(right); err != nil {
		t.Error(err)
	}
}

func TestDirectGroup(t *testing.T) {
	for jid, want := range map[string]string{
		"4915112345678@s.whatsapp.net": "dm-4915112345678", "123456789@lid": "dm-lid-123456789", "1203630@g.us": "", "4915112345678:3@s.whatsapp.net": "",
		"../x@lid": "", "status@broadcast": "", "console:main": "", "": "", "123456789@lid\n": "", strings.Repeat("1", 21) + "@lid": "",
	} {
		g, ok := DirectGroup(jid, "Ann")
		if g.Folder != want || ok != (want != "") || ok && (berth.ValidGroup(g) != nil || g.Name != "Ann" || g.RequiresTrigger || g.JID != jid) {
			t.Errorf("%q: %+v, %v", jid, g, ok)
		}
	}
	if g, _ := DirectGroup("123456789@lid", "An\nn"); g.Name != "123456789" {
		t.Errorf("name %q", g.Name)
	}
}
