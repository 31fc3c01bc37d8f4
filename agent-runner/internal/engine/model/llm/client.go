package llm

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"berth/agent-runner/protocol"
)

// Caps of what a provider sends, in bytes.
const (
	maxReply   = 8 << 20 // of one message
	maxError   = 64 << 10
	maxMessage = 500 // of a Failure
	maxCalls   = 128 // in one message; this one counts calls
)

// Endpoint is where a provider is.
type Endpoint struct {
	Base string // address without a last slash
	Key  string // or what stands for it
}

// client carries requests of one protocol.
type client struct {
	Endpoint
	http   *http.Client
	header http.Header
}

func newClient(e Endpoint, header http.Header) client {
	header.Set("Content-Type", "application/json")
	header.Set("User-Agent", "berth")
	return client{
		Endpoint: Endpoint{Base: strings.TrimRight(e.Base, "/"), Key: e.Key},
		header:   header,
		http: &http.Client{
			// No proxy: the gateway's address is in reach. How long an answer may take
			// is for the caller's ctx.
			Transport: &http.Transport{
				DialContext:           (&net.Dialer{Timeout: 15 * time.Second}).DialContext,
				TLSHandshakeTimeout:   15 * time.Second,
				ExpectContinueTimeout: time.Second,
				ForceAttemptHTTP2:     true,
				MaxIdleConns:          4,
				IdleConnTimeout:       90 * time.Second,
			},
			// A key must not follow a redirection.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// do sends one request and returns an answer with a status of 200. The caller
// closes its body.
func (c client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var payload io.Reader
	if body != nil {
		data, err := protocol.Marshal(body)
		if err != nil {
			return nil, &Failure{Kind: Invalid, Message: err.Error()}
		}
		payload = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.Base+path, payload)
	if err != nil {
		return nil, &Failure{Kind: Invalid, Message: shorten(err.Error())}
	}
	req.Header = c.header.Clone()
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, broken(ctx, Unreachable, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	data, _ := io.ReadAll(io.LimitReader(resp.Body, maxError)) // what there is will do
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return nil, refusal(resp.StatusCode, resp.Header, data)
}

// models lists what path answers; both protocols do it alike.
func (c client) models(ctx context.Context, path string) ([]string, error) {
	resp, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxReply)).Decode(&list); err != nil {
		return nil, broken(ctx, Broken, fmt.Errorf("the list of models: %w", err))
	}
	var names []string
	for _, m := range list.Data {
		if m.ID != "" {
			names = append(names, shorten(m.ID))
		}
	}
	return names, nil
}

// streams reports whether resp is a stream of events.
func streams(resp *http.Response) bool {
	kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	return err == nil && kind == "text/event-stream"
}

// broken makes a failure of what the machine says, or returns why ctx ended.
func broken(ctx context.Context, kind Kind, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if f, ok := errors.AsType[*Failure](err); ok {
		return f
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		kind = Certificate
	}
	return &Failure{Kind: kind, Message: shorten(err.Error())}
}

// refusal makes a failure of an answer with another status than 200.
func refusal(status int, header http.Header, body []byte) *Failure {
	e := readError(body)
	f := &Failure{Status: status, Reason: shorten(header.Get("Berth-Reason")), Message: e.message, RetryAfter: retryAfter(header, time.Now())}
	if f.Message == "" {
		f.Message = shorten(string(body))
	}
	f.Kind = e.kind(status)
	switch f.Reason {
	case "budget":
		f.Kind = Budget
	case "path":
		f.Kind = Invalid
	case "no_key":
		f.Kind = Auth
	}
	return f
}

// providerError is an error as providers write it.
type providerError struct {
	message string
	words   string // type and code, lower case
}

// readError reads the shapes that errors have: {"error": {…}}, {"error": "…"},
// {"message": "…"}, {"detail": "…"}, and a list around any of these.
func readError(body []byte) providerError {
	var list []json.RawMessage
	if json.Unmarshal(body, &list) == nil && len(list) > 0 {
		body = list[0]
	}
	var outer struct {
		Error   json.RawMessage `json:"error"`
		Message any             `json:"message"`
		Detail  any             `json:"detail"`
	}
	var inner struct {
		Type    any `json:"type"`
		Code    any `json:"code"`
		Message any `json:"message"`
		Status  any `json:"status"`
	}
	if json.Unmarshal(body, &outer) != nil {
		return providerError{}
	}
	var e providerError
	switch {
	case json.Unmarshal(outer.Error, &e.message) == nil:
	case json.Unmarshal(outer.Error, &inner) == nil:
		e.message = word(inner.Message)
		e.words = strings.ToLower(word(inner.Type) + " " + word(inner.Code) + " " + word(inner.Status))
	}
	e.message = shorten(cmp.Or(e.message, word(outer.Message), word(outer.Detail)))
	return e
}

func word(v any) string {
	switch v := v.(type) {
	case string:
		return v
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return ""
}

// kind says what can be done about an error that came with status, or within a
// stream with none.
func (e providerError) kind(status int) Kind {
	text := strings.ToLower(e.message)
	says := func(parts ...string) bool {
		for _, part := range parts {
			if strings.Contains(text, part) || strings.Contains(e.words, part) {
				return true
			}
		}
		return false
	}
	if code, err := strconv.Atoi(strings.TrimSpace(strings.Trim(e.words, "abcdefghijklmnopqrstuvwxyz_ "))); status == 0 && err == nil {
		status = code // OpenRouter's in a stream
	}
	switch {
	case says("context_length", "context length", "context window", "prompt is too long", "too many tokens", "maximum context", "exceed_context", "input is too long"),
		status == http.StatusRequestEntityTooLarge:
		return TooLong
	case status == http.StatusPaymentRequired,
		says("credit balance", "insufficient_quota", "billing_error", "insufficient credits", "insufficient balance"):
		return Credit
	case status == http.StatusUnauthorized, status == http.StatusForbidden, says("authentication_error", "permission_error", "invalid_api_key"):
		return Auth
	case status == 529, says("overloaded"):
		return Overloaded
	case status == http.StatusTooManyRequests, says("rate_limit"):
		return RateLimit
	case status == http.StatusNotFound, says("not_found_error", "model_not_found"):
		return NoModel
	case status == http.StatusRequestTimeout, status == http.StatusConflict, status == http.StatusTooEarly, status >= 500,
		status == 0 && !says("invalid_request"):
		return Server
	}
	return Invalid
}

// longestWait is the most that a provider's wish counts for.
const longestWait = 24 * time.Hour

// retryAfter reads the headers in which providers say when to come again.
func retryAfter(header http.Header, now time.Time) time.Duration {
	bounded := func(d time.Duration) time.Duration { return max(0, min(d, longestWait)) }
	if ms, err := strconv.ParseFloat(header.Get("Retry-After-Ms"), 64); err == nil && ms > 0 {
		return bounded(time.Duration(min(ms, 1e9)) * time.Millisecond)
	}
	if text := header.Get("Retry-After"); text != "" {
		if s, err := strconv.ParseFloat(text, 64); err == nil {
			return bounded(time.Duration(min(max(s, 0), 1e6) * float64(time.Second)))
		}
		if at, err := http.ParseTime(text); err == nil {
			return bounded(at.Sub(now))
		}
	}
	// Without a plain word, the limit that is used up says when it is full again.
	var wait time.Duration
	for _, limit := range []string{"Requests", "Tokens", "Input-Tokens", "Output-Tokens"} {
		for _, names := range [][2]string{
			{"Anthropic-Ratelimit-" + limit + "-Remaining", "Anthropic-Ratelimit-" + limit + "-Reset"},
			{"X-Ratelimit-Remaining-" + limit, "X-Ratelimit-Reset-" + limit},
		} {
			if header.Get(names[0]) != "0" {
				continue
			}
			reset := header.Get(names[1])
			if at, err := time.Parse(time.RFC3339, reset); err == nil {
				wait = max(wait, at.Sub(now))
			} else if d, err := time.ParseDuration(reset); err == nil {
				wait = max(wait, d)
			} else if s, err := strconv.ParseFloat(reset, 64); err == nil && s < 1e6 {
				wait = max(wait, time.Duration(s*float64(time.Second)))
			}
		}
	}
	return bounded(wait)
}

// shorten makes a provider's words fit for one line of a log.
func shorten(text string) string {
	text = strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) {
			return ' '
		}
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, strings.ToValidUTF8(text[:min(len(text), 4*maxMessage)], ""))
	text = strings.TrimSpace(text)
	if len(text) <= maxMessage {
		return text
	}
	end := maxMessage
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "…"
}
