package web

import (
	"context"
	"errors"
	"iter"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
)

// backend answers what the test says.
type backend struct {
	err     error
	sent    NewMessage
	waited  time.Duration
	stopped bool
	follow  chan struct{} // closed when a chat is followed
	TaskDesk
	MemoryDesk
}

func (b *backend) Status(context.Context) (Status, error)  { return Status{PID: 7}, b.err }
func (b *backend) Groups(context.Context) ([]Group, error) { return []Group{{Folder: "a"}}, b.err }
func (b *backend) AddGroup(_ context.Context, g NewGroup) (Group, error) {
	return Group{Folder: g.Folder}, b.err
}
func (b *backend) UpdateGroup(_ context.Context, f string, in GroupChange) (Group, error) {
	return Group{Folder: f, Name: *in.Name}, b.err
}
func (b *backend) RemoveGroup(context.Context, string) error           { return b.err }
func (b *backend) StopGroup(_ context.Context, f string) (bool, error) { return f == "a/b", b.err }
func (b *backend) StopDaemon()                                         { b.stopped = true }
func (b *backend) Backup(_ context.Context, in NewBackup) (Backup, error) {
	return Backup{File: in.File}, b.err
}
func (b *backend) Audit(_ context.Context, folder string, limit int) ([]Refusal, error) {
	return []Refusal{{Group: folder, ID: int64(limit)}}, b.err
}
func (b *backend) Usage(_ context.Context, folder string, days int) ([]Usage, error) {
	return []Usage{{Group: folder, Requests: int64(days)}}, b.err
}
func (b *backend) Outbox(context.Context) ([]Text, error) { return []Text{{ID: 4}}, b.err }
func (b *backend) RetryTexts(_ context.Context, t Texts) (int, error) {
	return len(t.IDs), b.err
}
func (b *backend) DropTexts(_ context.Context, t Texts) (int, error) {
	return 10 + len(t.IDs), b.err
}
func (b *backend) Send(_ context.Context, m NewMessage) (Accepted, error) {
	b.sent = m
	return Accepted{Seq: 3, Wakes: true}, b.err
}
func (b *backend) Answer(_ context.Context, _ int64, wait time.Duration) (Answer, error) {
	b.waited = wait
	return Answer{State: AnswerDone, Texts: []string{"hi"}}, b.err
}
func (b *backend) Chat(ctx context.Context, _ string, after int64) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		if b.err != nil {
			yield(Event{}, b.err)
			return
		}
		if !yield(Event{Type: EventMessage, Message: &berth.Message{Seq: after + 1}}, nil) {
			return
		}
		close(b.follow)
		<-ctx.Done()
	}
}

func serve(t *testing.T, b Backend) (*Client, string, context.CancelFunc) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, b, zaptest.NewLogger(t)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return NewClient(path), path, cancel
}

func TestCalls(t *testing.T) {
	b := &backend{}
	c, path, _ := serve(t, b)
	ctx := t.Context()
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the socket: %v %v", fi.Mode(), err)
	}
	check := func(what string, got, want any, err error) {
		t.Helper()
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%s: %v %s", what, err, d)
		}
	}
	s, err := c.Status(ctx)
	check("status", s.PID, 7, err)
	groups, err := c.Groups(ctx)
	check("groups", groups[0].Folder, "a", err)
	g, err := c.AddGroup(ctx, NewGroup{Folder: "x"})
	check("add", g.Folder, "x", err)
	g, err = c.UpdateGroup(ctx, "a/b", GroupChange{Name: new("n")})
	check("update", g, Group{Folder: "a/b", Name: "n"}, err)
	check("remove", nil, nil, c.RemoveGroup(ctx, "x"))
	stopped, err := c.StopGroup(ctx, "a/b")
	check("stop, with the name as it is", stopped, true, err)
	backup, err := c.Backup(ctx, NewBackup{File: "/b"})
	check("backup", backup, Backup{File: "/b"}, err)
	audit, err := c.Audit(ctx, "a&b", 5)
	check("audit", audit, []Refusal{{Group: "a&b", ID: 5}}, err)
	usage, err := c.Usage(ctx, "", 7)
	check("usage", usage, []Usage{{Requests: 7}}, err)
	texts, err := c.Outbox(ctx)
	check("outbox", texts[0].ID, int64(4), err)
	n, err := c.RetryTexts(ctx, Texts{IDs: []int64{4, 5}})
	check("retry", n, 2, err)
	n, err = c.DropTexts(ctx, Texts{})
	check("drop", n, 10, err)
	a, err := c.Send(ctx, NewMessage{Group: "a", Text: "t", ID: "i"})
	check("send", a, Accepted{Seq: 3, Wakes: true}, err)
	check("sent", b.sent, NewMessage{Group: "a", Text: "t", ID: "i"}, nil)
	answer, err := c.Answer(ctx, 3, time.Hour)
	check("answer", answer.Texts, []string{"hi"}, err)
	check("waits a minute at most", b.waited, time.Minute, nil)
	check("stop", nil, nil, c.StopDaemon(ctx))
	check("stopped", b.stopped, true, nil)
}

func TestErrorsKeepTheirKind(t *testing.T) {
	b := &backend{}
	c, _, _ := serve(t, b)
	for kind := berth.Invalid; kind <= berth.Unavailable; kind++ {
		b.err = berth.Errorf(kind, "what to do")
		_, err := c.Status(t.Context())
		if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != kind || err.Error() != "what to do" {
			t.Errorf("%v: got %#v", kind, err)
		}
	}
	b.err = errors.New("a secret detail")
	_, err := c.Status(t.Context())
	if err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("got %v", err)
	}
	b.err = berth.Errorf(berth.NotFound, "no such group")
	for _, err := range c.Chat(t.Context(), "x", 0) {
		if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != berth.NotFound {
			t.Errorf("chat: got %v", err)
		}
	}
}

// A chat that is followed ends with the daemon, and the client is told.
func TestChatEndsWithTheDaemon(t *testing.T) {
	b := &backend{follow: make(chan struct{})}
	c, _, cancel := serve(t, b)
	var got []int64
	var last error
	for e, err := range c.Chat(t.Context(), "a", 41) {
		if last = err; err != nil {
			break
		}
		got = append(got, e.Message.Seq)
		go func() {
			<-b.follow
			cancel()
		}()
	}
	if len(got) != 1 || got[0] != 42 {
		t.Errorf("got %v", got)
	}
	if e, ok := errors.AsType[*berth.Error](last); !ok || e.Kind != berth.Unavailable {
		t.Errorf("ended with %v", last)
	}
}

func TestBadRequests(t *testing.T) {
	_, path, _ := serve(t, &backend{})
	client := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", path) }}}
	for _, c := range []struct {
		method, path, body string
		want               int
	}{
		{"POST", "/v1/messages", `{"group":"a","unknown":1}`, 400},
		{"POST", "/v1/messages", `{`, 400},
		{"POST", "/v1/backup", `{"path":"/b"}`, 400},
		{"PATCH", "/v1/groups/a", `{"folder":"b"}`, 400},
		{"POST", "/v1/messages", `{"text":"` + strings.Repeat("x", maxBody) + `"}`, 400},
		{"GET", "/v1/messages/x/answer", ``, 400},
		{"GET", "/v1/messages/1/answer?wait=x", ``, 400},
		{"GET", "/v1/groups/a/chat?after=x", ``, 400},
		{"GET", "/v1/nothing", ``, 404},
		{"PUT", "/v1/status", ``, 405},
	} {
		req, err := http.NewRequestWithContext(t.Context(), c.method, "http://x"+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != c.want {
			t.Errorf("%s %s: got %d, want %d", c.method, c.path, resp.StatusCode, c.want)
		}
	}
}

func TestListen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	if err := os.WriteFile(path, nil, 0o600); err != nil { // left by a dead daemon
		t.Fatal(err)
	}
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := Listen(filepath.Join(dir, strings.Repeat("x", 110))); err == nil || !strings.Contains(err.Error(), "shorter root") {
		t.Errorf("got %v", err)
	}
	_, err = NewClient(filepath.Join(dir, "nobody")).Status(t.Context())
	if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != berth.Unavailable {
		t.Errorf("got %v", err)
	}
}
