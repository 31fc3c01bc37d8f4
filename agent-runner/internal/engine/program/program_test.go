package program

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"berth/agent-runner/fakemodel"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/protocol"
)

// started is a program under test and what it said.
type started struct {
	*Program
	mu    sync.Mutex
	lines []string
	log   bytes.Buffer
	news  chan string
}

func run(t *testing.T, script string) *started {
	t.Helper()
	s := &started{news: make(chan string, 100)}
	p, err := Start(Spec{
		Name: "Agent", Install: "install it", Args: []string{"/bin/sh", "-c", script}, Dir: t.TempDir(),
		Env: []string{"PATH=/usr/bin:/bin"}, Children: new(reap.Children), Log: log.New(&s.log, "", 0),
	}, func(b []byte) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.lines = append(s.lines, string(b))
		select {
		case s.news <- string(b):
		default:
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Program = p
	t.Cleanup(p.Kill)
	return s
}

func TestFaults(t *testing.T) {
	for _, tt := range []struct{ script, class, text string }{
		{"echo bad luck >&2; exit 3", "", "Agent ended in the middle of its work (exit status 3): bad luck"},
		{"exit 0", "", "Agent ended in the middle of its work (exit status 0)"},
		{"kill -9 $$", protocol.ClassMemory, "Agent was killed, most likely because the container's memory is used up"},
		{"exit 137", protocol.ClassMemory, "Agent was killed"},
		{"exec /nonexistent/x", protocol.ClassImage, "Agent is not in this image"},
		{"kill -TERM $$", "", "Agent ended in the middle of its work (signal: terminated)"},
	} {
		p := run(t, tt.script)
		<-p.Gone()
		failure, ok := errors.AsType[*engine.Error](p.Fault())
		if !ok || failure.Class != tt.class || !strings.HasPrefix(failure.Text, tt.text) {
			t.Errorf("%s: %+v, want %q %q", tt.script, failure, tt.class, tt.text)
		}
		if err := p.Send("hello"); err != nil {
			t.Errorf("send to one that is gone: %v", err)
		}
	}
}

func TestMissing(t *testing.T) {
	s := Spec{Name: "Agent", Install: "buy it", Args: []string{"/nonexistent/agent"}, Children: new(reap.Children), Log: log.New(io.Discard, "", 0)}
	// A script whose interpreter is missing, as a program for another libc is.
	odd := filepath.Join(t.TempDir(), "odd")
	if err := os.WriteFile(odd, []byte("#!/nonexistent/ld.so\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{s.Args, {odd}} {
		s.Args = args
		_, err := Start(s, func([]byte) {})
		failure, ok := errors.AsType[*engine.Error](err)
		if !ok || failure.Class != protocol.ClassImage || !strings.Contains(failure.Text, args[0]) || !strings.Contains(failure.Text, "buy it") {
			t.Errorf("%v: %v", args, err)
		}
	}
	if s.Args = []string{"/nonexistent/agent"}; s.Find() == nil {
		t.Error("found")
	}
}

func TestTalk(t *testing.T) {
	p := run(t, "while read -r line; do echo got $line; done; echo end")
	for i := range 3 {
		if err := p.Send(map[string]int{"n": i}); err != nil {
			t.Fatal(err)
		}
	}
	p.Close(time.Minute)
	if want := []string{`got {"n":0}`, `got {"n":1}`, `got {"n":2}`, "end"}; !slices.Equal(p.lines, want) {
		t.Errorf("lines %q", p.lines)
	}
}

// TestCloseEndsTheGroup: one that ignores everything, and what it started, is
// gone after Close.
func TestCloseEndsTheGroup(t *testing.T) {
	p := run(t, `trap "" TERM; sleep 1000 & echo $!; wait; wait; sleep 1000`)
	pid, err := strconv.Atoi(<-p.news)
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	p.Close(50 * time.Millisecond)
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("took %v", took)
	}
	// It is gone, or about to be: the kernel ends a group one by one.
	child, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(child)
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(child), Events: unix.POLLIN}}, 10_000); n != 1 {
		t.Errorf("the child lives: %v", err)
	}
}

// TestDaemonHoldsThePipe: what left the group holds stdout and cannot hold the
// end up.
func TestDaemonHoldsThePipe(t *testing.T) {
	if _, err := os.Stat("/usr/bin/setsid"); err != nil {
		t.Skip("no setsid here")
	}
	p := run(t, "setsid sleep 30 & echo $!")
	begun := time.Now()
	<-p.Gone()
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("took %v", took)
	}
	pid, _ := strconv.Atoi(<-p.news)
	_ = unix.Kill(pid, syscall.SIGKILL)
}

// TestFlood: whatever it prints, little is kept and little is logged.
func TestFlood(t *testing.T) {
	p := run(t, `head -c 60000000 /dev/zero | tr '\0' x; echo; yes 'not json' | head -n 100000; yes trouble | head -n 100000 >&2; echo '{"ok":1}'`)
	<-p.Gone()
	if p.lines[len(p.lines)-1] != `{"ok":1}` || len(p.lines) != 100_001 {
		t.Errorf("%d lines, the last %q", len(p.lines), p.lines[len(p.lines)-1])
	}
	for range 10_000 {
		p.Garbage([]byte("not json"), errors.New("garbage"))
	}
	if n := p.log.Len(); n > 4*maxLogged || !strings.Contains(p.log.String(), "further lines are not shown") || !strings.Contains(p.log.String(), "skipped") {
		t.Errorf("%d bytes of log", n)
	}
	if n := len(p.Stderr()); n > maxTail {
		t.Errorf("%d bytes of stderr", n)
	}
}

// TestDoesNotRead: what is not read has a bound, and nobody waits for it.
func TestDoesNotRead(t *testing.T) {
	p := run(t, "exec sleep 1000")
	text := strings.Repeat("x", 8<<20)
	var err error
	for range 2 * maxUnsent / len(text) {
		if err = p.Send(text); err != nil {
			break
		}
	}
	if err == nil {
		t.Error("all of it was taken")
	}
	p.Kill()
}

func TestAwait(t *testing.T) {
	p := run(t, "exec sleep 1000")
	done := make(chan struct{})
	if err := p.Await(t.Context(), done, Watch{First: time.Millisecond}); err == nil || err.Error() != "Agent gave no sign of life for 1ms" {
		t.Errorf("silent: %v", err)
	}
	stopped := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(stopped)
	if err := p.Await(ctx, done, Watch{First: time.Hour}); !errors.Is(err, stopped) {
		t.Errorf("stopped: %v", err)
	}
	close(done)
	if err := p.Await(t.Context(), done, Watch{First: time.Hour}); err != nil {
		t.Errorf("done: %v", err)
	}
	p.Kill()
	if err := p.Await(t.Context(), make(chan struct{}), Watch{First: time.Hour}); err == nil {
		t.Error("gone: no error")
	}
}

// TestSigns: each sign of life gives the program as long again.
func TestSigns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &Program{spec: Spec{Name: "Agent"}, gone: make(chan struct{})}
		signs := make(chan struct{}, 1)
		go func() {
			for range 3 {
				time.Sleep(9 * time.Minute)
				signs <- struct{}{}
			}
		}()
		begun := time.Now()
		err := p.Await(t.Context(), nil, Watch{Signs: signs, First: 10 * time.Minute, Silence: 10 * time.Minute})
		if got, want := time.Since(begun), 37*time.Minute; got != want || err == nil {
			t.Errorf("%v after %v, want %v", err, got, want)
		}
		begun = time.Now()
		err = p.Await(t.Context(), nil, Watch{Signs: signs, First: 2 * time.Minute, Silence: time.Hour})
		if got := time.Since(begun); got != 2*time.Minute || err.Error() != "Agent gave no sign of life for 2m0s" {
			t.Errorf("%v after %v", err, got)
		}
	})
}

func TestTimesOf(t *testing.T) {
	got, err := TimesOf(map[string]string{engine.OptionFirst: "90s", engine.OptionSettle: ""})
	if want := (Times{15 * time.Second, 90 * time.Second, 10 * time.Minute, 30 * time.Second}); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"soon", "-1s", "0"} {
		_, err := TimesOf(map[string]string{engine.OptionSilence: bad})
		if failure, ok := errors.AsType[*engine.Error](err); !ok || failure.Class != protocol.ClassInput || !strings.Contains(failure.Text, engine.OptionSilence) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestRefusals(t *testing.T) {
	for _, tt := range []struct {
		r     Refusal
		class string
		text  string
	}{
		{Refusal{Status: 401, Message: "invalid x-api-key"}, protocol.ClassAuth, "The key was refused. The operator has been told (401: invalid x-api-key)."},
		{Refusal{Status: 401, Reason: "no_key", Message: "there is no key"}, protocol.ClassAuth, "The host has no key for the model. The operator has been told: there is no key."},
		{Refusal{Status: 402}, protocol.ClassAuth, "The model's provider asks for payment. The operator has been told."},
		{Refusal{Status: 404, Message: "model x"}, protocol.ClassInput, "The model's provider does not know this model, or this call: model x."},
		{Refusal{Status: 413}, protocol.ClassInput, "The conversation is too large for the model's provider."},
		{Refusal{Status: 429, RetryAfter: time.Minute}, protocol.ClassRateLimit, "The model's provider has had too many requests."},
		{Refusal{Status: 529}, "", "The model's provider has trouble at the moment (529)."},
		{Refusal{Status: 400}, protocol.ClassInput, "The model's provider did not accept the request (400)."},
		{Refusal{Cut: true, Message: "it broke off"}, "", "The model's answer was lost on the way: it broke off."},
	} {
		if got := tt.r.Err(); got.Class != tt.class || got.Text != tt.text || got.RetryAfter != tt.r.RetryAfter {
			t.Errorf("%+v: %+v", tt.r, got)
		}
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	for _, tt := range []struct {
		name, value string
		want        time.Duration
	}{
		{"Retry-After", "7", 7 * time.Second},
		{"Retry-After", "0.5", 500 * time.Millisecond},
		{"Retry-After-Ms", "250", 250 * time.Millisecond},
		{"Retry-After", "Sat, 21 Nov 2026 12:01:00 GMT", time.Minute},
		{"Retry-After", "Sat, 21 Nov 2026 11:00:00 GMT", 0},
		{"Retry-After", "-3", 0},
		{"Retry-After", "NaN", 0},
		{"Retry-After", "1e300", maxRetryAfter},
		{"Retry-After", "soon", 0},
	} {
		if got := retryAfter(http.Header{tt.name: {tt.value}}, now); got != tt.want {
			t.Errorf("%s: %s = %v, want %v", tt.name, tt.value, got, tt.want)
		}
	}
}

// TestTap: the tap passes everything on as it comes, and knows what went wrong.
func TestTap(t *testing.T) {
	fake := fakemodel.New()
	server := httptest.NewServer(fake)
	defer server.Close()
	tap, err := OpenTap(strings.TrimPrefix(server.URL, "http://"), log.New(t.Output(), "", 0))
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	post := func(script string) (int, string, error) {
		t.Helper()
		body := `{"stream":true,"messages":[{"role":"user","content":"` + script + `"}]}`
		resp, err := http.Post("http://"+tap.Addr()+"/anthropic/v1/messages", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		return resp.StatusCode, string(data), err
	}
	if code, data, err := post("say hello"); code != 200 || err != nil || !strings.Contains(data, "hello") {
		t.Errorf("%d %s %v", code, data, err)
	}
	if r, failed := tap.Last(); failed {
		t.Errorf("failed: %+v", r)
	}
	if code, data, _ := post("refuse budget"); code != 402 || !strings.Contains(data, "used up its budget") {
		t.Errorf("%d %s", code, data)
	}
	r, failed := tap.Last()
	if !failed || r.Status != 402 || r.Reason != "budget" || r.Polite() == "" || tap.Hopeless() {
		t.Errorf("%+v, %v", r, failed)
	}
	post("say something else") // beside the chat
	if r, ok := tap.Of("API Error: this group has used up its budget for today"); !ok || r.Reason != "budget" {
		t.Errorf("of what was said: %+v, %v", r, ok)
	}
	if r, ok := tap.Of("the disk is full"); ok {
		t.Errorf("of something else: %+v", r)
	}
	post("limit 100")
	if r, _ := tap.Last(); !tap.Hopeless() || r.RetryAfter != 100*time.Second {
		t.Errorf("%+v", r)
	}
	tap.Forget()
	if _, _, err := post("drop"); err == nil {
		t.Error("half a stream passed for a whole one")
	}
	if r, _ := tap.Last(); !r.Cut || tap.Hopeless() {
		t.Errorf("%+v", r)
	}
	for range maxFailures {
		post("http 500")
	}
	if !tap.Hopeless() {
		t.Error("there is hope")
	}
	server.Close()
	if code, _, _ := post("say hello"); code != 502 {
		t.Errorf("code %d without a gateway", code)
	}
}

// TestTapFullDuplex: an answer may begin before its request has ended, which is
// what a quick one looks like now and then.
func TestTapFullDuplex(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(w)
		if err := errors.Join(c.EnableFullDuplex(), c.Flush()); err != nil {
			t.Error(err)
		}
		if _, err := io.Copy(w, r.Body); err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	tap, err := OpenTap(strings.TrimPrefix(server.URL, "http://"), log.New(t.Output(), "", 0))
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	body, rest := io.Pipe()
	defer rest.Close()
	go func() { _, _ = rest.Write([]byte("begin, ")) }()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+tap.Addr()+"/v1/messages", body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	go func() {
		_, _ = rest.Write([]byte("end"))
		_ = rest.Close()
	}()
	if data, err := io.ReadAll(resp.Body); string(data) != "begin, end" {
		t.Errorf("%q, %v", data, err)
	}
	if r, failed := tap.Last(); failed {
		t.Errorf("%+v", r)
	}
}

func TestMessage(t *testing.T) {
	for body, want := range map[string]string{
		`{"type":"error","error":{"type":"x","message":"a\n b"}}`: "a b",
		`{"error":"plain"}`:   "plain",
		`{"message":"outer"}`: "outer",
		`{"error":null}`:      "",
		"<html>":              "",
		"":                    "",
	} {
		if got := message([]byte(body)); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
}

func TestExplainByProse(t *testing.T) {
	p := run(t, "exec sleep 1000")
	for said, class := range map[string]string{
		"API Error: 401 invalid key":                 protocol.ClassAuth,
		"API Error: Request rejected (429) · slow":   protocol.ClassRateLimit,
		"request failed with status code 404":        protocol.ClassInput,
		"I ran 500 tests and 401 of them were green": "",
	} {
		failure, ok := errors.AsType[*engine.Error](p.Explain(said, nil))
		if !ok || failure.Class != class {
			t.Errorf("%s: %+v", said, failure)
		}
	}
}

// FuzzLines: whatever comes in whatever pieces, lines come out whole and in
// order, and none is longer than the limit.
func FuzzLines(f *testing.F) {
	f.Add([]byte("a\nbb\n\nccc"), 2)
	f.Add([]byte(strings.Repeat("x", 70_000)+"\ny\n"), 66_000)
	f.Add([]byte(strings.Repeat("x", 70_000)), 100_000)
	f.Add([]byte("\n"), 1)
	f.Fuzz(func(t *testing.T, data []byte, limit int) {
		if limit < 1 || limit > 1<<20 {
			return
		}
		var got []string
		skipped := lines(bytes.NewReader(data), limit, func(b []byte) { got = append(got, string(b)) })
		var want []string
		over := 0
		for _, line := range strings.SplitAfter(string(data), "\n") {
			switch line = strings.TrimSuffix(line, "\n"); {
			case len(line) > limit:
				over++
			default:
				want = append(want, line)
			}
		}
		if n := len(want); n > 0 && want[n-1] == "" && (len(data) == 0 || data[len(data)-1] == '\n') {
			want = want[:n-1]
		}
		if !slices.Equal(got, want) || skipped != over {
			t.Errorf("%d lines and %d skipped, want %d and %d", len(got), skipped, len(want), over)
		}
	})
}

// TestCounts: which calls say how the provider treats a run.
func TestCounts(t *testing.T) {
	for call, want := range map[string]bool{
		"POST /anthropic/v1/messages": true, "POST /openai/v1/chat/completions": true, "POST /openai/v1/responses": true,
		"POST /gemini/v1beta/models/gemini-x:generateContent": true, "POST /gemini/v1beta/models/gemini-x:streamGenerateContent": true,
		"GET /anthropic/v1/messages": false, "POST /anthropic/v1/messages/count_tokens": false, "POST /gemini/v1beta/models/gemini-x:countTokens": false,
	} {
		method, path, _ := strings.Cut(call, " ")
		if got := counts(httptest.NewRequest(method, path, nil)); got != want {
			t.Errorf("%s: %v", call, got)
		}
	}
}
