package program

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

// Refusal is a call to the model's provider that failed.
type Refusal struct {
	Status     int           // of HTTP; 0: not known
	Reason     string        // the gateway's own: its header Berth-Reason
	Message    string        // the provider's words
	Credit     bool          // they say that the account has no money left
	Key        bool          // or that the key is none
	RetryAfter time.Duration // 0: not said
	Cut        bool          // the answer broke off
}

// Tap is a way to the gateway that notes how calls to the model's provider fare.
// Agent programs tell it in their own words or not at all, and a class that the
// host can act on must not hang on a program's prose. It is safe for concurrent
// use.
//
// The program's tools can use it too: what it notes is good for the run's own
// errors and nothing else.
type Tap struct {
	server *http.Server
	onward *http.Transport
	addr   string
	wg     sync.WaitGroup

	mu       sync.Mutex
	last     *Refusal // since the last call that went well
	past     *Refusal // the last one of the turn
	failures int      // in a row
	news     chan struct{}
}

const (
	maxMessage = 64 << 10 // bytes of an error's body that are read
	maxWords   = 300      // of it that are told
)

// OpenTap listens on the container's loopback and passes calls on to gateway.
func OpenTap(gateway string, logger *log.Logger) (*Tap, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("open the way to the gateway: %w", err)
	}
	t := &Tap{
		addr: l.Addr().String(), news: make(chan struct{}, 1),
		onward: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 8, IdleConnTimeout: time.Minute},
	}
	target := &url.URL{Scheme: "http", Host: gateway}
	quiet := log.New(io.Discard, "", 0) // clients that hang up are nothing to tell
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     t.onward,
		FlushInterval: -1,
		ErrorLog:      quiet,
		ModifyResponse: func(r *http.Response) error {
			if counts(r.Request) {
				t.look(r)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() == nil {
				logger.Printf("reach the gateway: %v", err)
				t.note(&Refusal{Status: http.StatusBadGateway, Reason: "unreachable", Message: "the gateway is not there at the moment"})
			}
			w.WriteHeader(http.StatusBadGateway)
		},
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Or the server closes a request's body once an answer begins, and with that,
		// now and then, the connection to the gateway under its last byte.
		_ = http.NewResponseController(w).EnableFullDuplex()
		proxy.ServeHTTP(w, r)
	})
	t.server = &http.Server{Handler: handler, ErrorLog: quiet, ReadHeaderTimeout: time.Minute}
	t.wg.Go(func() { _ = t.server.Serve(l) })
	return t, nil
}

// Addr returns the address that is listened on.
func (t *Tap) Addr() string { return t.addr }

// Close ends all calls.
func (t *Tap) Close() {
	_ = t.server.Close()
	t.wg.Wait()
	t.onward.CloseIdleConnections()
}

// counts reports whether r asks a model for an answer.
func counts(r *http.Request) bool {
	if r.Method != http.MethodPost {
		return false
	}
	for _, end := range []string{"/messages", "/chat/completions", "/responses", ":generateContent", ":streamGenerateContent"} {
		if strings.HasSuffix(r.URL.Path, end) {
			return true
		}
	}
	return false
}

// look notes what became of a call.
func (t *Tap) look(r *http.Response) {
	if r.StatusCode < 400 {
		r.Body = &watched{ReadCloser: r.Body, tap: t, done: r.Request.Context().Err}
		return
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxMessage))
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(body), r.Body), r.Body}
	if err != nil {
		body = nil
	}
	t.note(&Refusal{
		Status: r.StatusCode, Reason: r.Header.Get("Berth-Reason"), Message: message(body), Credit: says(body, noCredit), Key: says(body, noKey),
		RetryAfter: retryAfter(r.Header, time.Now()),
	})
}

// watched is the body of an answer. Its end says how the call went.
type watched struct {
	io.ReadCloser
	tap  *Tap
	done func() error
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.ReadCloser.Read(p)
	switch {
	case err == io.EOF:
		w.tap.note(nil)
	case err != nil && w.done() == nil:
		w.tap.note(&Refusal{Cut: true, Message: "the answer broke off: " + err.Error()})
	}
	return n, err
}

// note records a failed call, or with nil one that went well.
func (t *Tap) note(r *Refusal) {
	t.mu.Lock()
	if t.last = r; r == nil {
		t.failures = 0
	} else {
		t.past = r
		t.failures++
	}
	t.mu.Unlock()
	select {
	case t.news <- struct{}{}:
	default:
	}
}

// Forget begins a new turn. It does nothing on a nil Tap, as all that follows.
func (t *Tap) Forget() {
	if t != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.last, t.past, t.failures = nil, nil, 0
	}
}

// News has something to receive after a call has ended.
func (t *Tap) News() <-chan struct{} {
	if t == nil {
		return nil
	}
	return t.news
}

// Last returns the last call of the turn if it failed.
func (t *Tap) Last() (Refusal, bool) {
	if t == nil {
		return Refusal{}, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.last == nil {
		return Refusal{}, false
	}
	return *t.last, true
}

// Of returns the failed call that a program speaks of: the last one, or one before
// it, if a call that has nothing to do with it went well meanwhile.
func (t *Tap) Of(said string) (Refusal, bool) {
	if last, failed := t.Last(); failed || t == nil {
		return last, failed
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.past == nil || t.past.Message == "" || !strings.Contains(said, t.past.Message) {
		return Refusal{}, false
	}
	return *t.past, true
}

const (
	longWait    = 20 * time.Second // that the host had better do: it has a slot to give away
	maxFailures = 4                // in a row
)

// Hopeless reports whether the program had better not try again.
func (t *Tap) Hopeless() bool {
	last, failed := t.Last()
	if !failed {
		return false
	}
	t.mu.Lock()
	failures := t.failures
	t.mu.Unlock()
	return last.RetryAfter >= longWait || failures >= maxFailures ||
		failures >= 2 && (last.Status == 401 || last.Status == 402 || last.Status == 403 || last.Credit || last.Key)
}

// Polite returns what to answer in the chat if the refusal is no failure of
// anything: the group has used up what it was given.
func (r Refusal) Polite() string {
	if r.Reason != "budget" {
		return ""
	}
	return "I cannot answer now: " + r.Message
}

// Err returns the error for the host, and the person who waits.
func (r Refusal) Err() *engine.Error {
	said := ""
	if r.Message != "" {
		said = ": " + strings.TrimRight(r.Message, ". ")
	}
	switch {
	case r.Reason == "no_key":
		return &engine.Error{Class: protocol.ClassAuth, Text: "The host has no key for the model. The operator has been told" + said + "."}
	case r.Status == 401, r.Status == 403, r.Key:
		return &engine.Error{Class: protocol.ClassAuth, Text: fmt.Sprintf("The key was refused. The operator has been told (%d%s).", r.Status, said)}
	case r.Status == 402, r.Credit:
		return &engine.Error{Class: protocol.ClassAuth, Text: "The model's provider asks for payment. The operator has been told" + said + "."}
	case r.Status == 404:
		return &engine.Error{Class: protocol.ClassInput, Text: "The model's provider does not know this model, or this call" + said + "."}
	case r.Status == 413:
		return &engine.Error{Class: protocol.ClassInput, Text: "The conversation is too large for the model's provider" + said + "."}
	case r.Status == 429:
		return &engine.Error{Class: protocol.ClassRateLimit, RetryAfter: r.RetryAfter, Text: "The model's provider has had too many requests" + said + "."}
	case r.Status >= 500, r.Status == http.StatusRequestTimeout, r.Status == http.StatusConflict, r.Status == http.StatusTooEarly:
		return &engine.Error{RetryAfter: r.RetryAfter, Text: fmt.Sprintf("The model's provider has trouble at the moment (%d%s).", r.Status, said)}
	case r.Status >= 400:
		return &engine.Error{Class: protocol.ClassInput, Text: fmt.Sprintf("The model's provider did not accept the request (%d%s).", r.Status, said)}
	}
	return &engine.Error{Text: "The model's answer was lost on the way" + said + "."}
}

// What the body of an error says where the status does not.
var (
	noCredit = []string{"credit balance is too low", "insufficient_quota", "billing_error"} // Anthropic with 400, OpenAI with 429
	noKey    = []string{"API_KEY_INVALID"}                                                  // Google with 400
)

func says(body []byte, any []string) bool {
	return slices.ContainsFunc(any, func(words string) bool { return bytes.Contains(body, []byte(words)) })
}

// message returns the words in the body of an error of any provider.
func message(body []byte) string {
	var v struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"`
	}
	var inner struct {
		Message string `json:"message"`
	}
	var text string
	if json.Unmarshal(body, &v) == nil {
		if json.Unmarshal(v.Error, &inner) != nil {
			_ = json.Unmarshal(v.Error, &text) // some say just a string
		}
		text = cmp.Or(inner.Message, text, v.Message)
	}
	return clip(strings.Join(strings.Fields(text), " "), maxWords)
}

// maxRetryAfter bounds what a provider may ask for.
const maxRetryAfter = 24 * time.Hour

// retryAfter returns when to come again, or 0.
func retryAfter(h http.Header, now time.Time) time.Duration {
	var d time.Duration
	if ms, err := strconv.ParseFloat(h.Get("Retry-After-Ms"), 64); err == nil {
		d = seconds(ms / 1000)
	} else if s, err := strconv.ParseFloat(h.Get("Retry-After"), 64); err == nil {
		d = seconds(s)
	} else if at, err := http.ParseTime(h.Get("Retry-After")); err == nil {
		d = at.Sub(now)
	}
	return min(max(d, 0), maxRetryAfter)
}

// seconds is a duration of s seconds, which may be any number.
func seconds(s float64) time.Duration {
	if !(s > 0) {
		return 0
	}
	return time.Duration(min(s, maxRetryAfter.Seconds()) * float64(time.Second))
}
