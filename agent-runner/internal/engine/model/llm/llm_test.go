package llm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/agent-runner/fakemodel"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// read returns the events of a stream as "name: data", and its error.
func read(r io.Reader) (got []string, err error) {
	for e, fault := range events(r) {
		if fault != nil {
			return got, fault
		}
		got = append(got, e.name+": "+string(e.data))
	}
	return got, nil
}

func TestEvents(t *testing.T) {
	for _, tt := range []struct {
		name, stream string
		want         []string
	}{
		{"one", "event: a\ndata: {}\n\n", []string{"a: {}"}},
		{"without a blank", "data:x\n\n", []string{": x"}},
		{"lines", "data: a\ndata: b\ndata\n\n", []string{": a\nb\n"}},
		{"ends of Windows", "event: a\r\ndata: x\r\n\r\ndata: y\r\n\r\n", []string{"a: x", ": y"}},
		{"comments", ": PROCESSING\n\n:\ndata: x\n\n", []string{": ", ": ", ": x"}},
		{"other fields", "id: 1\nretry: 5\nfoo\ndata: x\n\n", []string{": x"}},
		{"a name alone", "event: a\n\ndata: x\n\n", []string{": x"}},
		{"no data", "data:\n\ndata: x\n\ndata: \n\ndata: y\n\n", []string{": ", ": x", ": ", ": y"}},
		{"cut off", "data: x\n\ndata: y", []string{": x", ": y"}},
		{"cut off in a field", "data: x\n\ndat", []string{": x"}},
		{"a mark at the start", "\uFEFFdata: x\n\n", []string{": x"}},
		{"nothing", "", nil},
	} {
		for _, slow := range []bool{false, true} {
			var r io.Reader = strings.NewReader(tt.stream)
			if slow {
				r = iotest.OneByteReader(r)
			}
			got, err := read(r)
			if diff := cmp.Diff(tt.want, got); diff != "" || err != nil {
				t.Errorf("%s: %v (-want +got):\n%s", tt.name, err, diff)
			}
		}
	}
}

// endless gives the same again and again.
type endless string

func (e endless) Read(p []byte) (int, error) {
	n := 0
	for n+len(e) <= len(p) {
		n += copy(p[n:], e)
	}
	return n, nil
}

func TestEventsAreBounded(t *testing.T) {
	for name, r := range map[string]io.Reader{
		"a line":   io.MultiReader(strings.NewReader("data: "), endless("x")),
		"an event": endless("data: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n"),
	} {
		if _, err := read(r); !errors.Is(err, errEventTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
	fault := errors.New("the line is gone")
	if _, err := read(io.MultiReader(strings.NewReader("data: x\n"), iotest.ErrReader(fault))); !errors.Is(err, fault) {
		t.Errorf("a broken one: %v", err)
	}
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte("event: message_start\ndata: {\"type\":\"message_start\"}\n\n: ping\n\ndata: [DONE]\n\n"))
	f.Add([]byte("data: a\r\ndata: b\r\n\r\n\uFEFFdata"))
	f.Fuzz(func(t *testing.T, data []byte) {
		whole, err := read(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		pieces, err := read(iotest.HalfReader(bytes.NewReader(data)))
		if diff := cmp.Diff(whole, pieces); diff != "" || err != nil {
			t.Fatalf("%v (-whole +pieces):\n%s", err, diff)
		}
	})
}

// FuzzStreams gives both protocols any events: they end, with a reply or an error.
func FuzzStreams(f *testing.F) {
	f.Add([]byte(anthropicStreamText))
	f.Add([]byte(openAIStreamText))
	f.Add([]byte("data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":-1,\"function\":{\"arguments\":{}}}]}}]}\n\n"))
	f.Add([]byte("data: {\"type\":\"content_block_delta\",\"index\":-1}\n\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var a anthropicStream
		for e := range events(bytes.NewReader(data)) {
			if _, err := a.take(e); err != nil {
				break
			}
		}
		o := openAIStream{seen: func(string) {}}
		for e := range events(bytes.NewReader(data)) {
			if e.data != nil && o.take(e.data) != nil {
				break
			}
		}
		for _, r := range []Reply{a.reply(), o.reply()} {
			if _, err := json.Marshal(r.Message); err != nil {
				t.Fatal(err)
			}
			request := Request{Messages: []Message{{Role: User, Parts: []Part{{Text: "x"}}}, r.Message}}
			if _, err := json.Marshal(NewOpenAI(Endpoint{}).encode(request)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := json.Marshal(NewAnthropic(Endpoint{}).encode(Request{Messages: []Message{a.reply().Message}})); err != nil {
			t.Fatal(err)
		}
	})
}

const anthropicStreamText = `event: message_start
data: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":10,"cache_read_input_tokens":5,"cache_creation_input_tokens":2,"output_tokens":1}}}

event: ping
data: {"type":"ping"}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"sig"}}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"redacted_thinking","data":"xyz"}}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"text_delta","text":"Let me "}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"text_delta","text":"see."}}

event: content_block_start
data: {"type":"content_block_start","index":3,"content_block":{"type":"tool_use","id":"t1","name":"bash","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":"{\"a\":"}}

event: content_block_delta
data: {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":"1}"}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":42}}

event: message_stop
data: {"type":"message_stop"}

`

const openAIStreamText = `: PROCESSING

data: {"choices":[{"delta":{"role":"assistant","content":null,"reasoning_content":"hm"}}],"usage":null}

data: {"choices":[{"delta":{"content":"Let me "}}]}

data: {"choices":[{"delta":{"content":"see."}}]}

data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"t1","type":"function","function":{"name":"bash","arguments":""}}]}}]}

data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\":"}}]}}]}

data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}}]}

data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}

data: {"choices":[],"usage":{"prompt_tokens":17,"completion_tokens":42,"cost":0.5}}

data: [DONE]

`

// serve returns a server that gives one answer, and what it was asked.
func serve(t *testing.T, status int, header http.Header, body string) (url string, asked *[]string) {
	asked = new([]string)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, _ := io.ReadAll(r.Body)
		*asked = append(*asked, string(data))
		w.Header().Set("Content-Type", "text/event-stream")
		for name, values := range header {
			w.Header()[name] = values
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(server.Close)
	return server.URL, asked
}

func ask(t *testing.T, p Provider, r Request) (Reply, string, error) {
	var seen strings.Builder
	reply, err := p.Stream(t.Context(), r, func(text string) { seen.WriteString(text) })
	return reply, seen.String(), err
}

var hello = Request{Model: "m", Messages: []Message{{Role: User, Parts: []Part{{Text: "hi"}}}}}

func TestAnthropicStream(t *testing.T) {
	url, _ := serve(t, 200, nil, anthropicStreamText)
	got, seen, err := ask(t, NewAnthropic(Endpoint{Base: url + "/", Key: "k"}), hello)
	check(t, err)
	want := Reply{
		Message: Message{Role: Assistant, Parts: []Part{
			{Own: json.RawMessage(`{"signature":"sig","thinking":"hm","type":"thinking"}`)},
			{Own: json.RawMessage(`{"type":"redacted_thinking","data":"xyz"}`)},
			{Text: "Let me see."},
			{Call: &Call{ID: "t1", Name: "bash", Input: `{"a":1}`}},
		}},
		Usage: Usage{Input: 17, Output: 42},
	}
	if diff := cmp.Diff(want, got); diff != "" || seen != "Let me see." {
		t.Errorf("seen %q (-want +got):\n%s", seen, diff)
	}
}

func TestOpenAIStream(t *testing.T) {
	url, _ := serve(t, 200, nil, openAIStreamText)
	got, seen, err := ask(t, NewOpenAI(Endpoint{Base: url, Key: "k"}), hello)
	check(t, err)
	want := Reply{
		Message: Message{Role: Assistant, Parts: []Part{
			{Own: json.RawMessage(`"hm"`)},
			{Text: "Let me see."},
			{Call: &Call{ID: "t1", Name: "bash", Input: `{"a":1}`}},
		}},
		Usage: Usage{Input: 17, Output: 42, USD: 0.5},
	}
	if diff := cmp.Diff(want, got); diff != "" || seen != "Let me see." {
		t.Errorf("seen %q (-want +got):\n%s", seen, diff)
	}
}

// A stream that is kept alive and says nothing else does not live for ever.
func TestKeepAlives(t *testing.T) {
	for name, tt := range map[string]struct {
		keep, said string
		provider   func(Endpoint) Provider
	}{
		"comments":           {": still here\n\n", `{"choices":[{"delta":{"content":"a"}}]}`, func(e Endpoint) Provider { return NewOpenAI(e) }},
		"pings":              {"event: ping\ndata: {\"type\":\"ping\"}\n\n", `{"type":"message_start"}`, func(e Endpoint) Provider { return NewAnthropic(e) }},
		"anthropic comments": {":\n", `{"type":"message_start"}`, func(e Endpoint) Provider { return NewAnthropic(e) }},
	} {
		synctest.Test(t, func(t *testing.T) {
			r, w := io.Pipe()
			answer := roundTrip(func(*http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: r}, nil
			})
			p := tt.provider(Endpoint{Base: "http://x"})
			switch p := p.(type) {
			case *OpenAI:
				p.client.http.Transport = answer
			case *Anthropic:
				p.client.http.Transport = answer
			}
			go func() {
				for i := range 2 * int(longestQuiet/(15*time.Second)) {
					time.Sleep(15 * time.Second)
					text := tt.keep
					if i == 9 {
						text = "data: " + tt.said + "\n\n"
					}
					if _, err := io.WriteString(w, text); err != nil {
						t.Error(err)
					}
				}
				_ = w.Close()
			}()
			began, last := time.Now(), time.Duration(0)
			_, err := p.Stream(t.Context(), hello, func(string) { last = time.Since(began) })
			if f, ok := errors.AsType[*Failure](err); !ok || f.Kind != Broken {
				t.Errorf("%s: %v", name, err)
			}
			if want := 10*15*time.Second + longestQuiet - 15*time.Second; last != want {
				t.Errorf("%s: the last sign of life was after %v, want %v", name, last, want)
			}
		})
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Calls of one message that have one id are calls of their own all the same.
func TestOpenAICallsOfOneID(t *testing.T) {
	url, _ := serve(t, 200, nil, `data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"x","function":{"name":"x","arguments":"{}"}}]}}]}

data: {"choices":[{"delta":{"tool_calls":[{"index":1,"id":"x","function":{"name":"x","arguments":"{\"b\":1}"}}]},"finish_reason":"tool_calls"}]}

`)
	got, _, err := ask(t, NewOpenAI(Endpoint{Base: url}), hello)
	check(t, err)
	calls := got.Message.Calls()
	if len(calls) != 2 || calls[0].ID != "x" || calls[1].ID == "x" || calls[1].ID == "" || calls[1].Input != `{"b":1}` {
		t.Errorf("calls %+v", calls)
	}
}

// Servers that almost speak the protocol.
func TestOpenAIQuirks(t *testing.T) {
	chunk := func(choice string) string { return "data: {\"choices\":[" + choice + "]}\n\n" }
	stop := chunk(`{"delta":{},"finish_reason":"stop"}`)
	call := func(id, args string) Part { return Part{Call: &Call{ID: id, Name: "x", Input: args}} }
	json200 := http.Header{"Content-Type": {"application/json; charset=utf-8"}}
	for _, tt := range []struct {
		name, body string
		header     http.Header
		want       []Part
		fails      Kind
	}{
		{name: "no end mark", body: chunk(`{"delta":{"content":"a"}}`) + stop, want: []Part{{Text: "a"}}},
		{name: "an end mark alone", body: chunk(`{"delta":{"content":"a"}}`) + "data: [DONE]\n\n", fails: Broken},
		{name: "half a stream", body: chunk(`{"delta":{"content":"a"}}`), fails: Broken},
		{name: "nothing", body: "", fails: Broken},
		{name: "not streamed", header: json200, body: `{"choices":[{"message":{"content":"a","tool_calls":[{"id":"1","function":{"name":"x","arguments":"{}"}}]}}]}`, want: []Part{{Text: "a"}, call("1", "{}")}},
		{name: "empty events", body: "data:\n\n" + chunk(`{"delta":{"content":"a"}}`) + "data: \n\n" + stop + "data: \n\n", want: []Part{{Text: "a"}}},
		{name: "not JSON", header: json200, body: `<html>`, fails: Broken},
		{name: "whole calls with one index", body: chunk(`{"delta":{"tool_calls":[{"index":0,"id":"1","function":{"name":"x","arguments":"{}"}}]}}`) +
			chunk(`{"delta":{"tool_calls":[{"index":0,"id":"2","function":{"name":"x","arguments":"{\"b\":1}"}}]}}`) + stop, want: []Part{call("1", "{}"), call("2", `{"b":1}`)}},
		{name: "no index", body: chunk(`{"delta":{"tool_calls":[{"id":"1","function":{"name":"x","arguments":"{\"a\""}}]}}`) +
			chunk(`{"delta":{"tool_calls":[{"function":{"arguments":":1}"}}]}}`) + stop, want: []Part{call("1", `{"a":1}`)}},
		{name: "arguments as an object", body: chunk(`{"delta":{"tool_calls":[{"index":0,"id":"1","function":{"name":"x","arguments":{"a":1}}}]}}`) + stop, want: []Part{call("1", `{"a":1}`)}},
		{name: "the name again and again", body: chunk(`{"delta":{"tool_calls":[{"index":0,"id":"1","function":{"name":"x","arguments":"{"}}]}}`) +
			chunk(`{"delta":{"tool_calls":[{"index":0,"id":"1","function":{"name":"x","arguments":"}"}}]}}`) + stop, want: []Part{call("1", "{}")}},
		{name: "parts", body: chunk(`{"delta":{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}}`) + stop, want: []Part{{Text: "ab"}}},
		{name: "thoughts in the text", body: chunk(`{"delta":{"content":"<think>\nhm</think>\n\na"}}`) + stop, want: []Part{{Text: "a"}}},
		{name: "an error in the stream", body: chunk(`{"delta":{"content":"a"}}`) + "data: {\"error\":{\"code\":429,\"message\":\"slow down\"}}\n\n", fails: RateLimit},
		{name: "an error in a choice", body: chunk(`{"delta":{},"error":{"code":502,"message":"upstream"},"finish_reason":"error"}`), fails: Server},
		{name: "a signature", body: chunk(`{"delta":{"tool_calls":[{"index":0,"id":"1","extra_content":{"google":{"thought_signature":"s"}},"function":{"name":"x","arguments":"{}"}}]}}`) + stop,
			want: []Part{{Call: &Call{ID: "1", Name: "x", Input: "{}", Extra: json.RawMessage(`{"google":{"thought_signature":"s"}}`)}}}},
	} {
		url, _ := serve(t, 200, tt.header, tt.body)
		got, _, err := ask(t, NewOpenAI(Endpoint{Base: url}), hello)
		if f, ok := errors.AsType[*Failure](err); tt.fails != "" && (!ok || f.Kind != tt.fails) || tt.fails == "" && err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if diff := cmp.Diff(tt.want, got.Message.Parts); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestAnthropicBroken(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		kind       Kind
	}{
		{"half a stream", anthropicStreamText[:strings.Index(anthropicStreamText, "event: message_stop")], Broken},
		{"half an event", anthropicStreamText[:len(anthropicStreamText)-20], Broken},
		{"overloaded", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n", Overloaded},
		{"a fault", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"x\"}}\n\n", Server},
		{"garbage", "data: {{{\n\n", Broken},
		{"out of order", "data: {\"type\":\"content_block_start\",\"index\":7,\"content_block\":{\"type\":\"text\"}}\n\n", Broken},
	} {
		url, _ := serve(t, 200, nil, tt.body)
		_, _, err := ask(t, NewAnthropic(Endpoint{Base: url}), hello)
		if f, ok := errors.AsType[*Failure](err); !ok || f.Kind != tt.kind {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestKinds(t *testing.T) {
	for _, tt := range []struct {
		status int
		body   string
		want   Kind
	}{
		{400, `{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: 210000 tokens > 200000 maximum"}}`, TooLong},
		{400, `{"error":{"message":"This model's maximum context length is 8192 tokens.","code":"context_length_exceeded"}}`, TooLong},
		{400, `{"error":{"code":400,"message":"request (9000 tokens) exceeds the available context size","type":"exceed_context_size_error"}}`, TooLong},
		{413, ``, TooLong},
		{400, `{"type":"error","error":{"type":"invalid_request_error","message":"Your credit balance is too low to access the Anthropic API."}}`, Credit},
		{429, `{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","code":"insufficient_quota"}}`, Credit},
		{402, `{"error":{"message":"Insufficient credits","code":402}}`, Credit},
		{401, `{"error":"invalid key"}`, Auth},
		{403, ``, Auth},
		{404, `{"error":"model \"x\" not found, try pulling it first"}`, NoModel},
		{400, `{"error":{"message":"x","code":"model_not_found"}}`, NoModel},
		{429, ``, RateLimit},
		{529, `{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}`, Overloaded},
		{500, `<html>`, Server},
		{502, ``, Server},
		{408, ``, Server},
		{400, `{"detail":"bad"}`, Invalid},
		{422, `[{"error":{"message":"bad"}}]`, Invalid},
		{302, ``, Invalid},
	} {
		for _, p := range []func(Endpoint) Provider{func(e Endpoint) Provider { return NewAnthropic(e) }, func(e Endpoint) Provider { return NewOpenAI(e) }} {
			url, _ := serve(t, tt.status, http.Header{"Location": {"/elsewhere"}}, tt.body)
			provider := p(Endpoint{Base: url})
			_, _, err := ask(t, provider, hello)
			if f, ok := errors.AsType[*Failure](err); !ok || f.Kind != tt.want || f.Status != tt.status {
				t.Errorf("%s, %d %s: %v", provider.Name(), tt.status, tt.body, err)
			}
		}
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, tt := range []struct {
		header map[string]string
		want   time.Duration
	}{
		{nil, 0},
		{map[string]string{"Retry-After": "7"}, 7 * time.Second},
		{map[string]string{"Retry-After": "0.5"}, 500 * time.Millisecond},
		{map[string]string{"Retry-After-Ms": "250", "Retry-After": "1"}, 250 * time.Millisecond},
		{map[string]string{"Retry-After": now.Add(time.Minute).Format(http.TimeFormat)}, time.Minute},
		{map[string]string{"Retry-After": now.Add(-time.Minute).Format(http.TimeFormat)}, 0},
		{map[string]string{"Retry-After": "-5"}, 0},
		{map[string]string{"Retry-After": "1e99"}, longestWait},
		{map[string]string{"Retry-After": "NaN"}, 0},
		{map[string]string{"Retry-After": "soon"}, 0},
		{map[string]string{"Anthropic-Ratelimit-Tokens-Remaining": "0", "Anthropic-Ratelimit-Tokens-Reset": now.Add(9 * time.Second).Format(time.RFC3339)}, 9 * time.Second},
		{map[string]string{"Anthropic-Ratelimit-Tokens-Remaining": "5", "Anthropic-Ratelimit-Tokens-Reset": now.Add(9 * time.Second).Format(time.RFC3339)}, 0},
		{map[string]string{"X-Ratelimit-Remaining-Requests": "0", "X-Ratelimit-Reset-Requests": "6m0s"}, 6 * time.Minute},
		{map[string]string{"X-Ratelimit-Remaining-Tokens": "0", "X-Ratelimit-Reset-Tokens": "1.5"}, 1500 * time.Millisecond},
	} {
		header := http.Header{}
		for name, value := range tt.header {
			header.Set(name, value)
		}
		if got := retryAfter(header, now); got != tt.want {
			t.Errorf("%v: got %v, want %v", tt.header, got, tt.want)
		}
	}
}

// What a server does not know is left out from then on.
func TestAdapts(t *testing.T) {
	fake := fakemodel.New()
	refuse := "stream_options"
	refusals := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, err := io.ReadAll(r.Body)
		check(t, err)
		if bytes.Contains(data, []byte(refuse)) {
			refusals++
			message := map[string]string{"stream_options": "Unknown parameter: stream_options", `"tools"`: "x does not support tools", "16384": "max_tokens: 16384 > 4096, which is the maximum allowed"}[refuse]
			w.WriteHeader(400)
			check(t, json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"type": "invalid_request_error", "message": message}}))
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(data))
		fake.ServeHTTP(w, r)
	}))
	defer server.Close()
	request := hello
	request.Tools = []Tool{{Name: "x", Schema: json.RawMessage(`{"type":"object"}`)}}
	for _, tt := range []struct {
		refuse   string
		provider Provider
	}{
		{"stream_options", NewOpenAI(Endpoint{Base: server.URL})},
		{`"tools"`, NewOpenAI(Endpoint{Base: server.URL})},
		{"16384", NewAnthropic(Endpoint{Base: server.URL})},
	} {
		refuse, refusals = tt.refuse, 0
		for range 2 {
			got, _, err := ask(t, tt.provider, request)
			check(t, err)
			if got.Text() != "echo: hi" {
				t.Errorf("got %q", got.Text())
			}
		}
		if refusals != 1 {
			t.Errorf("%s was refused %d times, want 1", tt.refuse, refusals)
		}
	}
}

func TestEncode(t *testing.T) {
	messages := []Message{
		{Role: User, Parts: []Part{{Text: "a <b>"}, {Text: " "}}},
		{Role: Assistant, Parts: []Part{{Text: "b"}, {Call: &Call{ID: "functions.x:0", Name: "x", Input: "broken"}}}},
		{Role: User, Parts: []Part{{Result: &Result{CallID: "functions.x:0", Text: "no", Failed: true}}, {Text: "c"}}},
	}
	tool := []Tool{{Name: "x", Description: "d", Schema: json.RawMessage(`{"type":"object"}`)}}
	for _, tt := range []struct {
		request any
		want    string
	}{
		{NewAnthropic(Endpoint{}).encode(Request{Model: "m", System: "s", Messages: messages, Tools: tool}),
			`{"model":"m","max_tokens":16384,"stream":true,"system":[{"type":"text","text":"s","cache_control":{"type":"ephemeral"}}],"messages":[` +
				`{"role":"user","content":[{"type":"text","text":"a \u003cb\u003e"}]},` +
				`{"role":"assistant","content":[{"type":"text","text":"b"},{"type":"tool_use","id":"functions_x_0","name":"x","input":{}}]},` +
				`{"role":"user","content":[{"type":"tool_result","tool_use_id":"functions_x_0","content":"no","is_error":true},{"type":"text","text":"c","cache_control":{"type":"ephemeral"}}]}],` +
				`"tools":[{"name":"x","description":"d","input_schema":{"type":"object"}}]}`},
		{NewOpenAI(Endpoint{}).encode(Request{Model: "m", System: "s", Messages: messages, Tools: tool}),
			`{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"a \u003cb\u003e"},` +
				`{"role":"assistant","content":"b","tool_calls":[{"id":"functions.x:0","type":"function","function":{"name":"x","arguments":"{}"}}]},` +
				`{"role":"tool","content":"Error: no","tool_call_id":"functions.x:0"},{"role":"user","content":"c"}],` +
				`"tools":[{"type":"function","function":{"name":"x","description":"d","parameters":{"type":"object"}}}],"stream":true,"stream_options":{"include_usage":true}}`},
	} {
		got, err := json.Marshal(tt.request)
		check(t, err)
		if diff := cmp.Diff(tt.want, string(got)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestUnreachable(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	url := server.URL
	server.Close()
	_, _, err := ask(t, NewAnthropic(Endpoint{Base: url}), hello)
	if f, ok := errors.AsType[*Failure](err); !ok || f.Kind != Unreachable {
		t.Errorf("got %v", err)
	}

	secure := httptest.NewTLSServer(http.NotFoundHandler())
	defer secure.Close()
	secure.Config.ErrorLog = nil
	_, _, err = ask(t, NewOpenAI(Endpoint{Base: secure.URL}), hello)
	if f, ok := errors.AsType[*Failure](err); !ok || f.Kind != Certificate {
		t.Errorf("got %v", err)
	}

	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("stopped")
	cancel(cause)
	if _, err := NewOpenAI(Endpoint{Base: secure.URL}).Stream(ctx, hello, func(string) {}); !errors.Is(err, cause) {
		t.Errorf("got %v", err)
	}
}

func TestRepliesAreBounded(t *testing.T) {
	for name, piece := range map[string]string{
		"anthropic": "data: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"text\":%q}}\n\n",
		"openai":    "data: {\"choices\":[{\"delta\":{\"content\":%q}}]}\n\n",
	} {
		var body strings.Builder
		body.WriteString("data: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\"},\"choices\":[]}\n\n")
		for range maxReply/(1<<20) + 2 {
			fmt.Fprintf(&body, piece, strings.Repeat("x", 1<<20))
		}
		url, _ := serve(t, 200, nil, body.String())
		var p Provider = NewAnthropic(Endpoint{Base: url})
		if name == "openai" {
			p = NewOpenAI(Endpoint{Base: url})
		}
		_, _, err := ask(t, p, hello)
		if f, ok := errors.AsType[*Failure](err); !ok || f.Message != errTooLarge.Error() {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestLogLinesAreShort(t *testing.T) {
	if got := shorten("a\nb\x1b[31m" + strings.Repeat("ü", 5000)); strings.ContainsAny(got, "\n\x1b") || len(got) > maxMessage+4 || !strings.HasPrefix(got, "a b[31m") {
		t.Errorf("got %q", got)
	}
}
