package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

// scriptedLink plays a login: each step waits for what the one before needs.
type scriptedLink struct {
	account string
	steps   []web.LoginEvent
	err     error // at the end
	given   chan web.Passkey
	refuse  error  // what is given
	shown   func() // before the first step
}

func (l *scriptedLink) Channel(context.Context) (web.Channel, error) {
	return web.Channel{Account: l.account}, nil
}

func (l *scriptedLink) Login(ctx context.Context, _ string, _ web.NewLogin) iter.Seq2[web.LoginEvent, error] {
	return func(yield func(web.LoginEvent, error) bool) {
		for _, e := range l.steps {
			if !yield(e, nil) {
				return
			}
			if e.Request == nil && e.Compare == "" {
				continue
			}
			if l.shown != nil {
				l.shown()
			}
			select {
			case <-l.given:
			case <-ctx.Done():
				yield(web.LoginEvent{}, context.Cause(ctx))
				return
			}
		}
		if l.err != nil {
			yield(web.LoginEvent{}, l.err)
		}
	}
}

func (l *scriptedLink) AnswerPasskey(_ context.Context, _ string, in web.Passkey) error {
	if l.refuse != nil {
		return l.refuse
	}
	l.given <- in
	return nil
}

func (l *scriptedLink) Logout(context.Context, string) error { return nil }

var (
	passkeyStep = web.LoginEvent{Passkey: "Explained.", Request: json.RawMessage("{\n\"challenge\": \"\\u001b[31mx\"}")}
	compareStep = web.LoginEvent{Compare: "AB12"}
	doneStep    = web.LoginEvent{Done: "+1"}
)

func TestLogin(t *testing.T) {
	steps := []web.LoginEvent{passkeyStep, compareStep, doneStep}
	for name, tt := range map[string]struct {
		link  *scriptedLink
		stdin string
		o     loginOptions
		out   string // a part
		err   string // a part; empty: linked
	}{
		"both answered":        {link: &scriptedLink{steps: steps}, stdin: passkeyAnswer + "\nyes\n", out: "+1 is linked\n"},
		"for programs":         {link: &scriptedLink{steps: steps}, stdin: passkeyAnswer + "\nYES\n", o: loginOptions{json: true}, out: `{"compare":"AB12"}` + "\n" + `{"done":"+1"}` + "\n"},
		"linked already":       {link: &scriptedLink{account: "+2"}, out: "+2 is linked already"},
		"no answer":            {link: &scriptedLink{steps: steps}, err: "the browser's answer did not come"},
		"no answer of a kind":  {link: &scriptedLink{steps: steps}, stdin: "what?\n", err: "no answer of a browser"},
		"answer refused":       {link: &scriptedLink{steps: steps, refuse: berth.Errorf(berth.Invalid, "not that")}, stdin: passkeyAnswer + "\n", err: "not that"},
		"codes differ":         {link: &scriptedLink{steps: steps[1:]}, stdin: "no\n", err: "the codes differ"},
		"nobody compares":      {link: &scriptedLink{steps: steps[1:]}, err: "nobody compared"},
		"nobody does anything": {link: &scriptedLink{steps: []web.LoginEvent{{Compare: "x"}}}, stdin: "\x00", o: loginOptions{timeout: time.Millisecond}, err: "nothing is linked"},
		"WhatsApp refuses":     {link: &scriptedLink{steps: []web.LoginEvent{{Code: "ABCD-EFGH", Until: time.Now()}}, err: berth.Errorf(berth.Unavailable, "the code was not used in time")}, out: "    ABCD-EFGH\n", err: "not used in time"},
		"it ends silently":     {link: &scriptedLink{}, err: "without a word"},
	} {
		t.Run(name, func(t *testing.T) {
			var out, errs bytes.Buffer
			a := &app{stdin: strings.NewReader(tt.stdin), stdout: &out, stderr: &errs}
			tt.link.given = make(chan web.Passkey, 1)
			if tt.o.timeout == 0 {
				tt.o.timeout = time.Minute
			}
			err := a.login(t.Context(), tt.link, tt.o, false)
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("got %v, want %q", err, tt.err)
			}
			if !strings.Contains(out.String(), tt.out) {
				t.Errorf("got %q, want %q", out.String(), tt.out)
			}
			// What WhatsApp says may not command the terminal.
			if strings.Contains(out.String(), "\x1b") {
				t.Errorf("got %q", out.String())
			}
		})
	}
}

// The browser's answer may come as a file, which may take its time.
func TestLoginPasskeyFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "answer")
	link := &scriptedLink{steps: []web.LoginEvent{passkeyStep, doneStep}, given: make(chan web.Passkey, 1)}
	link.shown = func() {
		if err := os.WriteFile(file, []byte(passkeyAnswer), 0o600); err != nil {
			t.Error(err)
		}
	}
	var out bytes.Buffer
	a := &app{stdin: strings.NewReader(""), stdout: &out, stderr: &out}
	if err := a.login(t.Context(), link, loginOptions{passkey: file, timeout: time.Minute}, false); err != nil {
		t.Error(err)
	}
	if !strings.Contains(out.String(), "Save what it prints as "+file) {
		t.Errorf("got %q", out.String())
	}
}

// Who interrupts it is told that nothing is linked, and the picture goes.
func TestLoginInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	png := filepath.Join(t.TempDir(), "code.png")
	link := &scriptedLink{steps: []web.LoginEvent{{QR: "https://wa.me/settings/linked_devices#2@abc,def", Until: time.Now()}, compareStep}, given: make(chan web.Passkey)}
	link.shown = func() {
		if _, err := os.Stat(png); err != nil {
			t.Error(err)
		}
		cancel(errors.New("interrupted"))
	}
	var out bytes.Buffer
	in := silent(t)
	a := &app{stdin: in, stdout: &out, stderr: &out}
	if err := a.login(ctx, link, loginOptions{png: png, timeout: time.Minute}, false); err == nil || err.Error() != "nothing is linked: interrupted" {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(png); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the picture is left: %v", err)
	}
}

// silent returns a file that holds nothing and does not end before the test.
func silent(t *testing.T) *os.File {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = r.Close(), w.Close() })
	return r
}

// Who takes too long for the passkey is asked again: then the one question counts
// that was asked last, and what is typed goes to nobody else.
func TestLoginAsksAgain(t *testing.T) {
	link := &scriptedLink{steps: []web.LoginEvent{passkeyStep, passkeyStep, compareStep, doneStep}, given: make(chan web.Passkey, 1)}
	in, stdin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = in.Close(), stdin.Close() })
	asked := 0
	link.shown = func() {
		line := passkeyAnswer + "\n"
		switch asked++; asked {
		case 1:
			link.given <- web.Passkey{} // nobody answers, and the round is over
			return
		case 3:
			line = "yes\n"
		}
		if _, err := stdin.WriteString(line); err != nil {
			t.Error(err)
		}
	}
	var out bytes.Buffer
	a := &app{stdin: in, stdout: &out, stderr: &out}
	if err := a.login(t.Context(), link, loginOptions{timeout: time.Minute}, false); err != nil {
		t.Error(err)
	}
	if asked != 3 || !strings.HasSuffix(out.String(), "+1 is linked\n") {
		t.Errorf("asked %d times, got %q", asked, out.String())
	}
}

// A code that does not fit into the window is of no use, and that is said.
func TestTooSmall(t *testing.T) {
	for _, tt := range []struct {
		width, height int
		want          bool
	}{{80, 24, true}, {60, 60, true}, {80, 39, true}, {80, 40, false}, {200, 60, false}} {
		if got := tooSmall(tt.width, tt.height, 65, 39); (got != "") != tt.want || tt.want && !strings.Contains(got, "--png") {
			t.Errorf("%d times %d: got %q", tt.width, tt.height, got)
		}
	}
}
