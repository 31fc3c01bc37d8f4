package main

import (
	"bytes"
	"context"
	"io"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/term"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

func TestChatPlain(t *testing.T) {
	d := newFakeDaemon(t)
	code, out, errs := d.berth("one\n\n  \ntwo\nthree", "chat")
	if want := "re: one\nre: two\nre: three\n"; code != exitDone || out != want || errs != "" {
		t.Errorf("got %d, %q, %q, want %q", code, out, errs, want)
	}
	// What was said before is not repeated.
	code, out, errs = d.berth("four\n", "chat", "main")
	if want := "re: four\n"; code != exitDone || out != want || errs != "" {
		t.Errorf("got %d, %q, %q, want %q", code, out, errs, want)
	}
	if code, out, errs = d.berth("", "chat"); code != exitDone || out+errs != "" {
		t.Errorf("no input: got %d, %q, %q", code, out, errs)
	}
}

func TestChatPlainEqualAnswers(t *testing.T) {
	d := newFakeDaemon(t)
	d.reply = []string{"ok\nfine", "\x1b[1mdone"}
	code, out, errs := d.berth("one\ntwo\n", "chat")
	if want := strings.Repeat("ok\nfine\n\x1b[1mdone\n", 2); code != exitDone || out != want || errs != "" {
		t.Errorf("got %d, %q, %q, want %q, as it is: a program reads it", code, out, errs, want)
	}
}

func TestChatPlainContext(t *testing.T) {
	d := newFakeDaemon(t)
	code, out, errs := d.berth("just so\n@Andy hi\n", "chat", "family")
	if code != exitDone || out != "re: @Andy hi\n" || errs != "kept as context: no trigger (@Andy)\n" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
}

func TestChatPlainFailures(t *testing.T) {
	d := newFakeDaemon(t)
	d.fail = "out of\x1b memory"
	code, out, errs := d.berth("hi\n", "chat")
	if code != exitFailed || out != "" || errs != "berth: the agent failed: out of memory\n" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
	d.fail = ""
	code, out, errs = d.berth("a\x00b\nok\n", "chat")
	if code != exitFailed || out != "re: ok\n" || !strings.Contains(errs, "not sent") {
		t.Errorf("bad line: got %d, %q, %q, want the good line answered and a failure", code, out, errs)
	}
	code, _, errs = d.berth(strings.Repeat("x", 3*berth.MaxText), "chat")
	if code != exitFailed || !strings.Contains(errs, "64 KiB") {
		t.Errorf("long line: got %d, %q", code, errs)
	}
	code, _, errs = d.berth("hi\n", "chat", "nobody")
	if code != exitFailed || !strings.Contains(errs, `no group is called "nobody"`) {
		t.Errorf("no group: got %d, %q", code, errs)
	}
}

// A text that is known as an answer but never comes over the chat is not lost.
func TestChatPlainAnswerNotInChat(t *testing.T) {
	d := newFakeDaemon(t)
	d.hold = true
	d.onPost = func() {
		d.locked(func() {
			d.answers[1] = web.Answer{State: web.AnswerDone, Texts: []string{"quiet"}}
		})
	}
	if code, out, errs := d.berth("hi\n", "chat"); code != exitDone || out != "quiet\n" || errs != "" {
		t.Errorf("got %d, %q, %q", code, out, errs)
	}
}

func TestChatPlainOverRestart(t *testing.T) {
	d := newFakeDaemon(t)
	d.hold = true
	var worker sync.WaitGroup
	worker.Go(func() {
		d.await(func() bool { return len(d.messages) == 2 })
		d.locked(func() { d.settleLocked(); d.messages = d.messages[:3] }) // the first answer went out
		d.stop()
		d.locked(func() {
			d.addLocked(berth.Message{ID: "x", ChatJID: "main", Text: "re: two", Bot: true})
		})
		d.start()
	})
	code, out, errs := d.berth("one\ntwo\n", "chat")
	worker.Wait()
	if want := "re: one\nre: two\n"; code != exitDone || out != want {
		t.Errorf("got %d, %q, %q, want %q once each", code, out, errs, want)
	}
}

func TestChatPlainInterrupted(t *testing.T) {
	d := newFakeDaemon(t)
	d.hold = true
	ctx, cancel := context.WithCancel(t.Context())
	d.onPost = cancel
	in, w := io.Pipe()
	defer w.Close()
	go func() { _, _ = io.WriteString(w, "hi\n") }()
	var out, errs bytes.Buffer
	if code := run(ctx, []string{"chat", "--root", d.root}, nil, in, &out, &errs); code != exitFailed {
		t.Errorf("got %d, %q, want a failure", code, errs.String())
	}
}

// screen is a terminal's other side: what a person types, and what they see.
type screen struct {
	io.Reader
	mu      sync.Mutex
	seen    strings.Builder
	changed chan struct{}
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen.Write(p)
	select {
	case s.changed <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (s *screen) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen.String()
}

func (s *screen) await(t *testing.T, text string) {
	t.Helper()
	late := time.After(10 * time.Second)
	for !strings.Contains(s.text(), text) {
		select {
		case <-s.changed:
		case <-late:
			t.Fatalf("got %q on the screen, want %q", s.text(), text)
		}
	}
}

func TestChatTerminal(t *testing.T) {
	d := newFakeDaemon(t)
	d.locked(func() {
		for _, text := range []string{"too old", "2", "3", "4", "5", "6", "7", "8", "9", "10", "\x1b]0;evil\x07before"} {
			d.addLocked(berth.Message{ID: text, ChatJID: "family", SenderName: "Ann", Text: text})
		}
	})
	keys, typed := io.Pipe()
	s := &screen{Reader: keys, changed: make(chan struct{}, 1)}
	chat := &terminalChat{
		term: term.NewTerminal(s, ""), client: web.NewClient(d.root + "/store/berth.sock"),
		group: d.groups[0], name: "Andy", colour: true, start: time.Now(),
	}
	left := make(chan error, 1)
	go func() { left <- chat.run(t.Context()) }()
	keyboard := func(text string) { _, _ = io.WriteString(typed, text) }

	s.await(t, "]0;evilbefore")
	if text := s.text(); strings.Contains(text, "too old") || strings.Contains(text, "\x1b]") || !strings.Contains(text, "\x1b[2mAnn: 10") {
		t.Errorf("got %q, want the last ten messages, dim and harmless", text)
	}
	keyboard("/help\r")
	s.await(t, "/quit  leave")

	keyboard("@Andy hi\r")
	s.await(t, "re: @Andy hi")
	if got := strings.Count(s.text(), "Andy:"); got != 1 {
		t.Errorf("got %d answers on the screen, want 1: %q", got, s.text())
	}
	keyboard("so so\r")
	s.await(t, "kept as context: no trigger (@Andy)")

	keyboard("half a li")
	d.locked(func() { d.typing = true })
	s.await(t, "Andy is typing…")
	d.locked(func() { d.typing = false })
	d.stop()
	d.locked(func() {
		d.addLocked(berth.Message{ID: "b", ChatJID: "family", SenderName: "Bob\x1b", Text: "evening\u009b2J"})
	})
	d.start()
	s.await(t, "evening2J")
	if redrawn := regexp.MustCompile(`evening2J\r\n.*family> .*half a li`); !redrawn.MatchString(s.text()) {
		s.await(t, "half a li") // the line comes in a write of its own
	}
	keyboard("\x15/quit\r")
	if err := <-left; err != nil {
		t.Errorf("got %v, want nil on leaving", err)
	}
	for _, m := range d.messages {
		if strings.HasPrefix(m.Text, "/") {
			t.Errorf("%q was sent", m.Text)
		}
	}
}

func TestChatTerminalEndsWithDaemonsRefusal(t *testing.T) {
	d := newFakeDaemon(t)
	keys, typed := io.Pipe()
	defer typed.Close()
	s := &screen{Reader: keys, changed: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(t.Context())
	chat := &terminalChat{
		term: term.NewTerminal(s, ""), client: web.NewClient(d.root + "/store/berth.sock"),
		group: d.groups[0], name: "Andy", start: time.Now(),
	}
	left := make(chan error, 1)
	go func() { left <- chat.run(ctx) }()
	s.await(t, "family> ")
	if strings.Contains(s.text(), "\x1b[2m") {
		t.Errorf("got %q, want no colours", s.text())
	}
	cancel()
	if err := <-left; err == nil {
		t.Error("got nil, want the reason")
	}
}
