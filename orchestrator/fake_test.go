package main

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

// fakeDaemon speaks the control socket's API. What it holds survives stop and
// start, as the store of a real one does. It answers each message that wakes it
// at once with "re: " and the text, unless told otherwise.
type fakeDaemon struct {
	t    *testing.T
	root string

	mu       sync.Mutex
	changed  chan struct{} // closed at each change
	groups   []web.Group
	messages []berth.Message
	answers  map[int64]web.Answer
	typing   bool
	status   web.Status
	hold     bool           // answer nothing for now
	fail     string         // answers fail with this
	reply    []string       // instead of "re: …"
	posts    map[string]int // how often each message id came
	onPost   func()         // called, unlocked, after a message was stored and before the answer
	server   *http.Server
	done     chan struct{}
}

func newFakeDaemon(t *testing.T) *fakeDaemon {
	t.Helper()
	root, err := os.MkdirTemp("", "berth") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.Mkdir(filepath.Join(root, "store"), 0o700); err != nil {
		t.Fatal(err)
	}
	d := &fakeDaemon{
		t: t, root: root, changed: make(chan struct{}), answers: map[int64]web.Answer{}, posts: map[string]int{},
		groups: []web.Group{
			{Folder: "family", Name: "Family", Trigger: "@Andy", RequiresTrigger: true, JID: "console:family"},
			{Folder: "main", Name: "Main", Trigger: "@Andy", Main: true, JID: "console:main"},
		},
		status: web.Status{Ready: true, Version: "1", Docker: web.Docker{Up: true, Version: "28"}, Image: web.Image{Ready: true, Ref: "i:1"}, Root: root},
	}
	d.start()
	t.Cleanup(d.stop)
	return d
}

func (d *fakeDaemon) start() {
	d.t.Helper()
	l, err := net.Listen("unix", filepath.Join(d.root, "store", "berth.sock"))
	if err != nil {
		d.t.Error(err)
		return
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) { d.locked(func() { answer(w, d.status) }) })
	mux.HandleFunc("GET /v1/groups", func(w http.ResponseWriter, _ *http.Request) { d.locked(func() { answer(w, d.groups) }) })
	mux.HandleFunc("POST /v1/groups", d.addGroup)
	mux.HandleFunc("DELETE /v1/groups/{folder}", func(w http.ResponseWriter, _ *http.Request) { answer(w, struct{}{}) })
	mux.HandleFunc("POST /v1/groups/{folder}/stop", func(w http.ResponseWriter, r *http.Request) { answer(w, r.PathValue("folder") == "main") })
	mux.HandleFunc("POST /v1/stop", func(w http.ResponseWriter, _ *http.Request) { answer(w, struct{}{}); go d.stop() })
	mux.HandleFunc("POST /v1/messages", d.post)
	mux.HandleFunc("GET /v1/messages/{seq}/answer", d.answer)
	mux.HandleFunc("GET /v1/groups/{folder}/chat", d.chat)
	server, done := &http.Server{Handler: mux}, make(chan struct{})
	d.locked(func() { d.server, d.done = server, done })
	go func() {
		defer close(done)
		_ = server.Serve(l)
	}()
}

// stop breaks all connections, as a killed daemon does.
func (d *fakeDaemon) stop() {
	d.mu.Lock()
	server, done := d.server, d.done
	d.mu.Unlock()
	_ = server.Close()
	<-done
}

func (d *fakeDaemon) locked(fn func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fn()
	close(d.changed)
	d.changed = make(chan struct{})
}

// await returns when the fact holds.
func (d *fakeDaemon) await(fact func() bool) {
	d.t.Helper()
	late := time.After(10 * time.Second)
	for {
		d.mu.Lock()
		ok, changed := fact(), d.changed
		d.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-late:
			d.t.Error("waited in vain")
			return
		}
	}
}

func answer(w http.ResponseWriter, v any) { _ = json.NewEncoder(w).Encode(v) }

func refuse(w http.ResponseWriter, code int, kind berth.Kind, text string) {
	w.WriteHeader(code)
	answer(w, web.Failure{Error: text, Kind: kind.String()})
}

func (d *fakeDaemon) addGroup(w http.ResponseWriter, r *http.Request) {
	var g web.NewGroup
	_ = json.NewDecoder(r.Body).Decode(&g)
	if g.Folder == "family" {
		refuse(w, http.StatusConflict, berth.Conflict, "folder \"family\" is in use")
		return
	}
	answer(w, web.Group{Folder: g.Folder, JID: "console:" + g.Folder, Trigger: "@Andy", RequiresTrigger: true, Container: g.Container})
}

func (d *fakeDaemon) post(w http.ResponseWriter, r *http.Request) {
	var m web.NewMessage
	_ = json.NewDecoder(r.Body).Decode(&m)
	var accepted web.Accepted
	known := false
	d.locked(func() {
		for _, g := range d.groups {
			known = known || g.Folder == m.Group
		}
		if !known {
			return
		}
		d.posts[m.ID]++
		for _, old := range d.messages {
			if old.ID == m.ID {
				accepted = web.Accepted{Seq: old.Seq, Wakes: old.Wakes}
				return
			}
		}
		accepted = web.Accepted{Wakes: m.Group == berth.MainFolder || berth.Triggered(m.Text, "@Andy")}
		accepted.Seq = d.addLocked(berth.Message{ID: m.ID, ChatJID: m.Group, SenderName: m.Sender, Text: m.Text, Wakes: accepted.Wakes})
		d.answers[accepted.Seq] = web.Answer{State: web.AnswerContext}
		if accepted.Wakes {
			d.answers[accepted.Seq] = web.Answer{State: web.AnswerPending}
		}
	})
	if !known {
		refuse(w, http.StatusNotFound, berth.NotFound, "no group is called "+m.Group)
		return
	}
	if d.onPost != nil {
		d.onPost()
	}
	d.locked(func() {
		if !d.hold {
			d.settleLocked()
		}
	})
	answer(w, accepted)
}

func (d *fakeDaemon) addLocked(m berth.Message) int64 {
	m.Seq = int64(len(d.messages) + 1)
	m.Time = time.Now()
	d.messages = append(d.messages, m)
	return m.Seq
}

// settleLocked answers everything that waits, in order.
func (d *fakeDaemon) settleLocked() {
	for _, m := range append([]berth.Message{}, d.messages...) {
		a := d.answers[m.Seq]
		if m.Bot || a.State != web.AnswerPending {
			continue
		}
		if a.State = web.AnswerDone; d.fail != "" {
			a.State, a.Error = web.AnswerFailed, d.fail
		} else if a.Texts = d.reply; a.Texts == nil {
			a.Texts = []string{"re: " + m.Text}
		}
		d.answers[m.Seq] = a
		for _, text := range a.Texts {
			d.addLocked(berth.Message{ID: berth.NewID(4), ChatJID: m.ChatJID, SenderName: "Andy", Text: text, Bot: true})
		}
	}
}

func (d *fakeDaemon) answer(w http.ResponseWriter, r *http.Request) {
	seq, _ := strconv.ParseInt(r.PathValue("seq"), 10, 64)
	wait, _ := time.ParseDuration(r.URL.Query().Get("wait"))
	ctx, cancel := context.WithTimeout(r.Context(), wait)
	defer cancel()
	for {
		d.mu.Lock()
		a, changed := d.answers[seq], d.changed
		d.mu.Unlock()
		if a.State != web.AnswerPending || ctx.Err() != nil {
			answer(w, a)
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

func (d *fakeDaemon) chat(w http.ResponseWriter, r *http.Request) {
	after, _ := strconv.ParseInt(r.URL.Query().Get("after"), 10, 64)
	rc, typing := http.NewResponseController(w), false
	_ = rc.Flush()
	for {
		d.mu.Lock()
		messages, now, changed := d.messages, d.typing, d.changed
		d.mu.Unlock()
		if now != typing {
			typing = now
			answer(w, web.Event{Type: web.EventTyping, Typing: typing})
		}
		for _, m := range messages {
			if m.Seq > after && m.ChatJID == r.PathValue("folder") {
				after = m.Seq
				answer(w, web.Event{Type: web.EventMessage, Message: &m})
			}
		}
		_ = rc.Flush()
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// berth runs the program on the fake's root.
func (d *fakeDaemon) berth(stdin string, args ...string) (code int, stdout, stderr string) {
	d.t.Helper()
	var out, errs strings.Builder
	code = run(d.t.Context(), append(args, "--root", d.root), []string{"HOME=/nonexistent"}, strings.NewReader(stdin), &out, &errs)
	return code, out.String(), errs.String()
}
