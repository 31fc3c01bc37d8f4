// Package fakemodel is a model provider for tests: an http.Handler that speaks
// OpenAI's chat completions and Anthropic's messages, each streamed and not, and
// does what the last user message says. Program fakemodeld serves it on its own.
//
//	fake := fakemodel.New()
//	server := httptest.NewServer(fake)
//
// Its paths end like the providers' and begin as one likes, so that server.URL
// can also stand for a gateway: "/v1/chat/completions" and "/openai/v1/models"
// are both there.
//
// A message is a script, one command a line; lines that are no command are words
// to people. Of a message of several parts the last one is it. The host's prompt
// and a mention before the script are taken off.
//
//	say TEXT              answers; \n in TEXT is a new line
//	think TEXT            thinks before it answers
//	big BYTES             answers with that many letters
//	echo-history          answers with how many messages there are, and the users' texts
//	tool NAME {JSON}      calls a tool; its result is answered as "tool said: …"
//	tools N {JSON} | N {} calls several in parallel
//	slow MS               waits that long before each piece of a stream
//	stall                 gives half of the answer and then nothing
//	mute                  gives nothing at all
//	drop                  gives half of the answer and hangs up
//	http CODE [TYPE]      fails, always
//	fail N CODE [TYPE]    fails N times, then goes on
//	limit SECONDS         fails with 429 and all headers that say when to come again
//	refuse REASON         fails as the gateway does, for one of its reasons
//
// Each tool line ends a step: what follows it belongs to the answer after the
// tool's result. A tool is found by its name or by the end of it, since engines put
// prefixes before the names, and any case will do. A script without a command is
// answered with "echo: " and its text. Requests that engines make beside
// the chat (titles, summaries, suggestions) get a harmless answer.
//
// A request counts 100 input tokens a message, and one output token a word.
package fakemodel

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Model is the one model that is listed; requests may name any.
const Model = "fake-1"

// The values of Request.Protocol.
const (
	OpenAI    = "openai"
	Anthropic = "anthropic"
)

const (
	maxRequest = 64 << 20 // bytes of a body
	maxKept    = 4096     // requests remembered
)

// Request is what one call for an answer said.
type Request struct {
	Protocol string      `json:"protocol"`
	Path     string      `json:"path"`
	Header   http.Header `json:"header"` // as it came, with the key
	Model    string      `json:"model"`
	Stream   bool        `json:"stream"`
	System   string      `json:"system"`
	Messages int         `json:"messages"` // all but the system's
	Tools    []string    `json:"tools"`    // names
	Text     string      `json:"text"`     // of the last user message: the script
	Results  []string    `json:"results"`  // of tools, since that message
	Aside    bool        `json:"aside"`    // a title or the like
	Status   int         `json:"status"`   // of the answer; 0: none yet
}

// Key returns the key that the request carried, in whichever header.
func (r *Request) Key() string {
	if key := r.Header.Get("X-Api-Key"); key != "" {
		return key
	}
	return strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
}

// Server is the provider. It is safe for concurrent use.
type Server struct {
	// Want is the key that requests have to carry; empty: any will do, and none.
	// It is set before the first request.
	Want string

	mu       sync.Mutex
	news     chan struct{} // closed and made anew at each change
	requests []*Request
	failures map[string]int // by message: how often it failed
	open     int
	number   int
}

// New returns a provider that nobody has asked anything.
func New() *Server {
	return &Server{news: make(chan struct{}), failures: make(map[string]int)}
}

// Requests returns the calls for an answer so far, oldest first; of very many
// the last ones.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requestsLocked()
}

func (s *Server) requestsLocked() []Request {
	all := make([]Request, len(s.requests))
	for i, r := range s.requests {
		all[i] = *r
	}
	return all
}

// Await returns the first request, also of those that came before, for which is
// reports true. is must not call s.
func (s *Server) Await(ctx context.Context, is func(Request) bool) (Request, error) {
	for {
		s.mu.Lock()
		all, news := s.requestsLocked(), s.news
		s.mu.Unlock()
		if i := slices.IndexFunc(all, is); i >= 0 {
			return all[i], nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return Request{}, fmt.Errorf("no such request among %d: %w", len(all), context.Cause(ctx))
		}
	}
}

// AwaitIdle returns when no call is under way: all were answered, or their
// clients hung up.
func (s *Server) AwaitIdle(ctx context.Context) error {
	for {
		s.mu.Lock()
		open, news := s.open, s.news
		s.mu.Unlock()
		if open == 0 {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return fmt.Errorf("%d calls are under way: %w", open, context.Cause(ctx))
		}
	}
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	ends := func(method, end string) bool { return r.Method == method && strings.HasSuffix(path, end) }
	switch {
	case ends(http.MethodPost, "/chat/completions"):
		s.serve(w, r, openAI{})
	case ends(http.MethodPost, "/messages"):
		s.serve(w, r, anthropic{})
	case ends(http.MethodPost, "/messages/count_tokens"):
		a, err := read(r, anthropic{})
		if err != nil {
			anthropic{}.fail(w, failure{code: 400, text: err.Error()})
			return
		}
		reply(w, http.StatusOK, map[string]any{"input_tokens": a.inputTokens()})
	case ends(http.MethodGet, "/models"):
		reply(w, http.StatusOK, map[string]any{"object": "list", "data": []any{model()}, "has_more": false, "first_id": Model, "last_id": Model})
	case ends(http.MethodGet, "/models/"+Model):
		reply(w, http.StatusOK, model())
	case ends(http.MethodGet, "/_requests"):
		reply(w, http.StatusOK, s.Requests())
	case (r.Method == http.MethodHead || r.Method == http.MethodGet) && strings.HasSuffix(path, "/"):
		reply(w, http.StatusOK, map[string]any{})
	default:
		reply(w, http.StatusNotFound, map[string]any{"error": map[string]any{"type": "not_found_error", "message": r.Method + " " + path + " is not here"}})
	}
}

// model is an entry of the list, in the words of both providers.
func model() any {
	return map[string]any{
		"id": Model, "object": "model", "type": "model", "display_name": "Fake 1",
		"created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "berth",
	}
}

// dialect is how one provider says things.
type dialect interface {
	name() string
	// decode reads a request.
	decode(body []byte) (ask, error)
	fail(w http.ResponseWriter, f failure)
	// answer writes all of it at once.
	answer(w http.ResponseWriter, a ask, out output)
	// stream returns the events of a streamed answer: what comes before the
	// pieces, one event a piece, and what comes after.
	stream(a ask, out output) (before []event, pieces []event, after []event)
}

// event is one of a stream; a name is not said in all dialects.
type event struct {
	name string
	data any
}

// serve answers one call.
func (s *Server) serve(w http.ResponseWriter, r *http.Request, d dialect) {
	a, err := read(r, d)
	if err != nil {
		d.fail(w, failure{code: 400, text: err.Error()})
		return
	}
	seen := &Request{
		Protocol: d.name(), Path: r.URL.Path, Header: r.Header.Clone(), Model: a.model, Stream: a.stream, System: a.system,
		Messages: len(a.messages), Tools: a.tools, Text: a.script, Results: a.results, Aside: a.aside(),
	}
	number := s.enter(seen)
	defer s.leave()
	set := func(status int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		seen.Status = status
		s.tellLocked()
	}
	if s.Want != "" && seen.Key() != s.Want {
		set(http.StatusUnauthorized)
		d.fail(w, failure{code: http.StatusUnauthorized, text: "invalid api key"})
		return
	}
	out := a.run(number, s.failed)
	if f := out.failure; f != nil {
		set(f.code)
		d.fail(w, *f)
		return
	}
	if out.end == mute {
		<-r.Context().Done()
		return
	}
	if !a.stream {
		if !pause(r.Context(), out.slow) {
			return
		}
		switch out.end {
		case stall:
			<-r.Context().Done()
		case drop:
			panic(http.ErrAbortHandler)
		default:
			set(http.StatusOK)
			d.answer(w, a, out)
		}
		return
	}
	set(http.StatusOK)
	s.stream(w, r, d, a, out)
}

func (s *Server) stream(w http.ResponseWriter, r *http.Request, d dialect, a ask, out output) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-cache")
	flush := http.NewResponseController(w).Flush
	send := func(events ...event) bool {
		for _, e := range events {
			if e.name != "" {
				fmt.Fprintf(w, "event: %s\n", e.name)
			}
			data, ok := e.data.(string)
			if !ok {
				data = string(encode(e.data))
			}
			fmt.Fprintf(w, "data: %s\n\n", data)
		}
		return flush() == nil
	}
	before, pieces, after := d.stream(a, out)
	if !send(before...) {
		return
	}
	for i, piece := range pieces {
		if out.end != complete && i > 0 && i >= len(pieces)/2 {
			break
		}
		if !pause(r.Context(), out.slow) || !send(piece) {
			return
		}
	}
	switch out.end {
	case stall:
		<-r.Context().Done()
	case drop:
		panic(http.ErrAbortHandler)
	default:
		send(after...)
	}
}

// read returns the call in r.
func read(r *http.Request, d dialect) (ask, error) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxRequest+1))
	if err != nil {
		return ask{}, err
	}
	if len(body) > maxRequest {
		return ask{}, errors.New("the request is too large")
	}
	a, err := d.decode(body)
	if err != nil {
		return ask{}, err
	}
	if len(a.messages) == 0 {
		return ask{}, errors.New("messages: at least one message is required")
	}
	a.look()
	return a, nil
}

// enter records a request and returns its number, from 1.
func (s *Server) enter(r *Request) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, r)
	s.requests = slices.Delete(s.requests, 0, max(0, len(s.requests)-maxKept))
	s.open++
	s.number++
	s.tellLocked()
	return s.number
}

func (s *Server) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open--
	s.tellLocked()
}

func (s *Server) tellLocked() {
	close(s.news)
	s.news = make(chan struct{})
}

// failed counts a failure of the message that key names, and reports whether
// there were fewer than limit before.
func (s *Server) failed(key string, limit int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failures[key] >= limit {
		return false
	}
	s.failures[key]++
	return true
}

// pause waits, and reports false if ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(encode(v))
}

func encode(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // of our own making
	}
	return data
}
