package gateway

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"berth/orchestrator/internal/berth"
)

func both(base string) Config {
	return Config{
		Anthropic: Anthropic{BaseURL: base, APIKey: theKey}, OpenAI: OpenAI{BaseURL: base + "/v1", APIKey: theKey}, Gemini: Gemini{BaseURL: base, APIKey: theKey},
	}
}

// TestKeys: whatever stands where a key belongs is replaced by the real one, in
// the header that this kind of key takes.
func TestKeys(t *testing.T) {
	var seen http.Header
	var path string
	base := upstream(t, func(w http.ResponseWriter, r *http.Request) { seen, path = r.Header, r.URL.RequestURI() })
	oauth := Config{Anthropic: Anthropic{BaseURL: base, OAuthToken: theKey}}
	none := Config{Anthropic: Anthropic{BaseURL: base}, OpenAI: OpenAI{BaseURL: base}, Gemini: Gemini{BaseURL: base}}
	tests := []struct {
		name, path string
		c          Config
		header     []string
		want       map[string]string // "" for absent
		upstream   string
	}{
		{"api key", "/anthropic/v1/messages?beta=true", both(base), []string{"X-Api-Key", "placeholder"}, map[string]string{"X-Api-Key": key, "Authorization": "", "Anthropic-Beta": ""}, "/v1/messages?beta=true"},
		{"api key, asked as bearer", "/anthropic/v1/messages", both(base), []string{"Authorization", "Bearer placeholder"}, map[string]string{"X-Api-Key": key, "Authorization": ""}, "/v1/messages"},
		{"token", "/anthropic/v1/messages", oauth, []string{"X-Api-Key", "placeholder", "Anthropic-Beta", "a,b"}, map[string]string{"X-Api-Key": "", "Authorization": "Bearer " + key, "Anthropic-Beta": "a,b|oauth-2025-04-20"}, "/v1/messages"},
		{"token, beta given", "/anthropic/v1/messages", oauth, []string{"Anthropic-Beta", "oauth-2025-04-20,b"}, map[string]string{"Anthropic-Beta": "oauth-2025-04-20,b"}, "/v1/messages"},
		{"openai", "/openai/v1/chat/completions", both(base), []string{"Authorization", "Bearer x", "Api-Key", "y"}, map[string]string{"Authorization": "Bearer " + key, "X-Api-Key": "", "Api-Key": ""}, "/v1/chat/completions"},
		{"openai without v1", "/openai/chat/completions", both(base), nil, map[string]string{"Authorization": "Bearer " + key}, "/v1/chat/completions"},
		{"a server of one's own", "/openai/chat/completions", none, []string{"Authorization", "Bearer x"}, map[string]string{"Authorization": ""}, "/chat/completions"},
		{"gemini", "/gemini/v1beta/models/gemini-x:generateContent", both(base), []string{"X-Goog-Api-Key", "placeholder", "Authorization", "Bearer x", "X-Goog-User-Project", "p"}, map[string]string{"X-Goog-Api-Key": key, "Authorization": "", "X-Goog-User-Project": ""}, "/v1beta/models/gemini-x:generateContent"},
		{"gemini, as its program asks", "/gemini/v1beta/models/gemini-x:streamGenerateContent?alt=sse", both(base), nil, map[string]string{"X-Goog-Api-Key": key}, "/v1beta/models/gemini-x:streamGenerateContent?alt=sse"},
		{"gemini, with more behind", "/gemini/v1beta/models/gemini-x:streamGenerateContent?key=mine&alt=sse&fields=candidates&$httpHeaders=X:%20y&access_token=z&%6bey=mine&alt=proto&alt=sse&pageSize=5", both(base), nil, map[string]string{"X-Goog-Api-Key": key}, "/v1beta/models/gemini-x:streamGenerateContent?alt=sse&alt=sse&pageSize=5"},
		{"its gemini", "/gemini/v1beta/models/gemini-x:generateContent", none, []string{"X-Goog-Api-Key", "x"}, map[string]string{"X-Goog-Api-Key": ""}, "/v1beta/models/gemini-x:generateContent"},
		{"its anthropic", "/anthropic/v1/messages", none, []string{"X-Api-Key", "x"}, map[string]string{"X-Api-Key": "", "Authorization": ""}, "/v1/messages"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			seen = nil
			resp, body := newRig(t, tt.c, Run{}).do(t, "POST", tt.path, "{}", tt.header...)
			if resp.StatusCode != 200 || path != tt.upstream {
				t.Fatalf("got %d %s; the provider saw %s, want %s", resp.StatusCode, body, path, tt.upstream)
			}
			for name, want := range tt.want {
				if got := strings.Join(seen[name], "|"); got != want {
					t.Errorf("%s: %q, want %q", name, got, want)
				}
			}
		})
	}
}

// TestHeaders: only headers that mean nothing to anybody in between pass.
func TestHeaders(t *testing.T) {
	var seen *http.Request
	base := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		seen = r
		w.Header().Set("Connection", "X-Hop")
		w.Header().Set("X-Hop", "1")
		w.Header().Set("Set-Cookie", "a=b")
		w.Header().Set("Request-Id", "req_1")
		w.Header().Set("Location", "https://elsewhere.example/"+key)
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	r := newRig(t, both(base), Run{})
	bad := []string{
		"X-Forwarded-For", "X-Forwarded-Host", "Forwarded", "X-Real-Ip", "Via", "Proxy-Authorization", "Proxy-Connection", "Cookie", "Te", "Upgrade",
		"X-Http-Method-Override", "X-Original-Url", "Openai-Organization", "Openai-Project", "Accept-Encoding", "Origin",
	}
	good := []string{"Anthropic-Version", "Anthropic-Beta", "X-Stainless-Lang", "X-Claude-Code-Session-Id", "Content-Type", "X-App"}
	var header []string
	for _, name := range slices.Concat(bad, good) {
		header = append(header, name, "value")
	}
	resp, _ := r.do(t, "POST", "/anthropic/v1/messages", "{}", append(header, "Connection", "X-App, close")...)
	for _, name := range bad {
		if v := seen.Header.Get(name); v != "" && v != "identity" {
			t.Errorf("the provider saw %s: %s", name, v)
		}
	}
	for _, name := range good {
		want := "value"
		if name == "X-App" {
			want = "" // named by Connection
		}
		if v := seen.Header.Get(name); v != want {
			t.Errorf("the provider saw %s: %q, want %q", name, v, want)
		}
	}
	if !strings.HasPrefix(base, "http://"+seen.Host) || seen.Header.Get("User-Agent") != "Go-http-client/1.1" {
		t.Errorf("host %s, agent %s", seen.Host, seen.Header.Get("User-Agent"))
	}
	// The redirect is the container's to see, and nobody's to follow.
	if resp.StatusCode != 307 || resp.Header.Get("Request-Id") != "req_1" || resp.Header.Get("X-Hop") != "" || resp.Header.Get("Set-Cookie") != "" {
		t.Errorf("got %v", resp)
	}
	if l := resp.Header.Get("Location"); l != "https://elsewhere.example/"+strings.Repeat("*", len(key)) {
		t.Errorf("Location %s", l)
	}
}

// TestPaths: the key opens what runs need, and not what other groups left at the
// provider.
func TestPaths(t *testing.T) {
	var seen []string
	base := upstream(t, func(w http.ResponseWriter, r *http.Request) { seen = append(seen, r.Method+" "+r.RequestURI) })
	r := newRig(t, both(base), Run{})
	for _, ok := range []string{
		"POST /anthropic/v1/messages", "POST /anthropic/v1/messages/count_tokens", "GET /anthropic/v1/models", "GET /anthropic/v1/models/claude-x.1:2",
		"POST /openai/v1/responses", "GET /openai/models/vendor/model-1", "POST /openai/embeddings",
		"POST /gemini/v1beta/models/gemini-2.5-pro:generateContent", "POST /gemini/v1beta/models/gemini-2.5-pro:streamGenerateContent", "POST /gemini/v1beta/models/g:countTokens",
		"GET /gemini/v1beta/models", "GET /gemini/v1beta/models/gemini-2.5-pro", "POST /gemini/v1beta/models/e:batchEmbedContents",
	} {
		method, path, _ := strings.Cut(ok, " ")
		if resp, body := r.do(t, method, path, ""); resp.StatusCode != 200 {
			t.Errorf("%s: %d %s", ok, resp.StatusCode, body)
		}
	}
	n := len(seen)
	for _, bad := range []string{
		"GET /anthropic/v1/files", "GET /anthropic/v1/messages/batches", "POST /anthropic/v1/messages/batches", "GET /anthropic/v1/messages", "DELETE /anthropic/v1/models/x",
		"GET /anthropic/v1/organizations/me", "GET /openai/v1/files", "GET /openai/v1/responses/resp_1", "POST /openai/v1/fine_tuning/jobs", "GET /openai/v1/v1/models",
		"GET /anthropic/v1/models/../files", "GET /anthropic/v1/models/%2e%2e/files", "GET /anthropic/v1/models/a%2f..%2f..%2ffiles", "GET /anthropic/v1/models/", "GET /anthropic/v1/models//x",
		"GET /gemini/v1beta/files", "POST /gemini/upload/v1beta/files", "GET /gemini/v1beta/cachedContents", "POST /gemini/v1beta/cachedContents", "POST /gemini/v1beta/tunedModels/x:generateContent",
		"POST /gemini/v1beta/models/x:batchGenerateContent", "POST /gemini/v1beta/models/x:predictLongRunning", "GET /gemini/v1beta/models/x/operations", "POST /gemini/v1beta/models/:generateContent",
		"POST /gemini/v1beta/models/a:b:generateContent", "POST /gemini/v1beta/models/a/b:generateContent", "POST /gemini/v1beta/models/..:generateContent", "GET /gemini/v1beta/models/x:generateContent",
		"POST /gemini/v1beta/models/x%3agenerateContent", "DELETE /gemini/v1beta/models/x", "POST /gemini/v1beta/models/{name}:generateContent:countTokens", "GET /gemini/v1beta/models/{name}",
		"GET /anthropic//v1/models", "POST /anthropic/v1/messages/", "POST /anthropic/V1/messages", "POST /anthropic/v1/messages;x", "POST /openaiv1/responses", "GET //api.anthropic.com/v1/models",
	} {
		method, path, _ := strings.Cut(bad, " ")
		resp, body, _ := r.raw(t, method, method+" "+path+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		if resp.StatusCode != 404 || !json.Valid([]byte(body)) {
			t.Errorf("%s: %d %s", bad, resp.StatusCode, body)
		}
	}
	if len(seen) != n {
		t.Errorf("the provider saw %q", seen[n:])
	}
	// Claude Code looks whether the address is there, and some clients ask their
	// proxy for it.
	if resp, _ := r.do(t, "HEAD", "/anthropic/", ""); resp.StatusCode != 200 {
		t.Errorf("HEAD: %d", resp.StatusCode)
	}
	if resp, body, _ := r.raw(t, "GET", "GET http://127.0.0.1:8787/anthropic/v1/models HTTP/1.1\r\nHost: x\r\n\r\n"); resp.StatusCode != 200 {
		t.Errorf("by proxy: %d %s", resp.StatusCode, body)
	}
}

// TestNoKey: the error has the provider's shape and says what to do.
func TestNoKey(t *testing.T) {
	r := newRig(t, Config{}, Run{})
	for path, want := range map[string]string{
		"/anthropic/v1/messages":                  `{"type":"error","error":{"type":"authentication_error","message":"there is no key for Anthropic on the host: the operator has to set ANTHROPIC_API_KEY or CLAUDE_CODE_OAUTH_TOKEN there and restart berth"}}`,
		"/openai/v1/chat/completions":             `{"error":{"message":"there is no key for OpenAI on the host: the operator has to set OPENAI_API_KEY there, or OPENAI_BASE_URL for another provider, and restart berth","type":"authentication_error","param":null,"code":"no_key"}}`,
		"/gemini/v1beta/models/x:generateContent": `{"error":{"code":401,"message":"there is no key for Gemini on the host: the operator has to set GEMINI_API_KEY there and restart berth","status":"UNAUTHENTICATED"}}`,
	} {
		resp, body := r.do(t, "POST", path, "{}", "X-Api-Key", "sk-mine")
		if resp.StatusCode != 401 || body != want+"\n" || resp.Header.Get("X-Should-Retry") != "false" || resp.Header.Get("Berth-Reason") != "no_key" {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
}

// TestStreaming: each event arrives before the provider sends the next one, and
// the bytes are the same.
func TestStreaming(t *testing.T) {
	next := make(chan struct{})
	events := []string{
		"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-x\",\"usage\":{\"input_tokens\":10,\"cache_read_input_tokens\":5,\"cache_creation_input_tokens\":7,\"output_tokens\":1}}}\n\n",
		"event: ping\r\ndata: {\"type\":\"ping\"}\r\n\r\n",
		": a comment with the begin of a key at its end: sk-test-\n\n",
		"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"\\\"usage\\\":{\\\"output_tokens\\\":999999}\"}}\n\n",
		"event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":42}}\n\n",
	}
	base := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(200)
		out := http.NewResponseController(w)
		out.Flush()
		for _, e := range events {
			<-next
			io.WriteString(w, e)
			out.Flush()
		}
		<-next
	})
	r := newRig(t, both(base), Run{})
	resp, err := r.client.Post("http://gateway/anthropic/v1/messages", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	for i, want := range events {
		next <- struct{}{} // only now may the provider send it
		got := make([]byte, len(want))
		if _, err := io.ReadFull(in, got); err != nil || string(got) != want {
			t.Fatalf("event %d: %q, %v, want %q", i, got, err, want)
		}
	}
	next <- struct{}{}
	if rest, err := io.ReadAll(in); err != nil || len(rest) != 0 {
		t.Fatalf("after the end: %q, %v", rest, err)
	}
	r.Close()
	if len(r.store.usage) != 1 {
		t.Fatalf("usage %+v", r.store.usage)
	}
	got := r.store.usage[0]
	got.At = time.Time{}
	want := berth.Usage{Folder: "family", RunID: "run1", Provider: "anthropic", Model: "claude-x", Requests: 1, Input: 10, Output: 42, CacheRead: 5, CacheWrite: 7}
	if got != want {
		t.Errorf("usage %+v, want %+v", got, want)
	}
}

// TestGeminiUsage: what Google says that an answer cost is counted, of a stream as
// it grows, and to count tokens costs nothing.
func TestGeminiUsage(t *testing.T) {
	base := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		const usage = `"usageMetadata":{"promptTokenCount":100,"cachedContentTokenCount":30,"toolUsePromptTokenCount":5,"candidatesTokenCount":%d,"thoughtsTokenCount":7},"modelVersion":"gemini-x-001"}`
		switch {
		case strings.HasSuffix(r.URL.Path, ":countTokens"):
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, `{"totalTokens":100}`)
		case r.URL.RawQuery == "alt=sse":
			w.Header().Set("Content-Type", "text/event-stream")
			for _, n := range []int{1, 20, 40} {
				fmt.Fprintf(w, "data: {\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"usageMetadata\"}]}}],"+usage+"\r\n\r\n", n)
			}
		default: // a whole answer, or a list of them
			w.Header().Set("Content-Type", "application/json; charset=UTF-8")
			fmt.Fprintf(w, `[{"candidates":[{"usageMetadata":{"promptTokenCount":9999}}],`+usage+`,{"candidates":[],`+usage+`]`, 20, 40)
		}
	})
	r := newRig(t, both(base), Run{})
	for _, call := range []string{":streamGenerateContent?alt=sse", ":streamGenerateContent", ":countTokens"} {
		if resp, body := r.do(t, "POST", "/gemini/v1beta/models/gemini-x"+call, "{}"); resp.StatusCode != 200 {
			t.Fatalf("%s: %d %s", call, resp.StatusCode, body)
		}
	}
	r.Close()
	var sum berth.Usage
	for _, u := range r.store.usage {
		if u.Provider != "gemini" || u.Model != "gemini-x-001" || u.Estimated {
			t.Errorf("usage %+v", u)
		}
		sum.Requests += u.Requests
		sum.Input += u.Input
		sum.Output += u.Output
		sum.CacheRead += u.CacheRead
	}
	if want := (berth.Usage{Requests: 2, Input: 2 * 75, Output: 2 * 47, CacheRead: 2 * 30}); sum != want {
		t.Errorf("all in all %+v, want %+v", sum, want)
	}
}

// TestScrub: a provider that repeats the key does not give it to the container,
// however the answer is cut into pieces.
func TestScrub(t *testing.T) {
	var cut int
	var status int
	text := `{"error":{"message":"bad key ` + key + `, I said ` + key + key + `, sk-test-0123 is not one; sk-test-`
	base := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Api-Key") != key {
			t.Error("the provider did not get the key")
		}
		w.Header().Set("X-Echo", "Bearer "+key)
		w.WriteHeader(status)
		io.WriteString(w, text[:cut])
		http.NewResponseController(w).Flush()
		io.WriteString(w, text[cut:])
	})
	r := newRig(t, both(base), Run{})
	want := strings.ReplaceAll(text, key, strings.Repeat("*", len(key)))
	for _, status = range []int{200, 401} {
		for cut = range text {
			resp, got := r.do(t, "POST", "/anthropic/v1/messages", "{}")
			if got != want || resp.StatusCode != status || strings.Contains(fmt.Sprint(resp.Header), key) {
				t.Fatalf("cut at %d: %d %v\n got %q\nwant %q", cut, resp.StatusCode, resp.Header, got, want)
			}
		}
	}
}

// TestKeyIsNowhere: not in the log, the store, the answers or the folder,
// whatever goes wrong.
func TestKeyIsNowhere(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	var current atomic.Value
	base := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch current.Load() {
		case "cut":
			w.Header().Set("Content-Length", "100")
			io.WriteString(w, "data: "+key)
			panic(http.ErrAbortHandler)
		case "drop":
			panic(http.ErrAbortHandler)
		case "model":
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, `{"model":"`+key+`","usage":{"input_tokens":1}}`)
		case "encoding":
			w.Header().Set("Content-Encoding", "gzip")
			io.WriteString(w, key)
		case "length":
			conn, _, _ := http.NewResponseController(w).Hijack()
			io.WriteString(conn, "HTTP/1.1 200 "+key+"\r\n"+key+"\r\n\r\n")
			conn.Close()
		}
	})
	c := both(base)
	c.Dir, c.UID, c.GID = t.TempDir(), os.Getuid(), os.Getgid()
	store := &memory{}
	g, err := New(c, store, zap.New(core))
	if err != nil {
		t.Fatal(err)
	}
	d, err := g.Open(Run{ID: "run1", Folder: "family"})
	if err != nil {
		t.Fatal(err)
	}
	var answers strings.Builder
	fmt.Fprintf(&answers, "%v %+v", c, c)
	for _, mode := range []string{"cut", "drop", "model", "encoding", "length"} {
		current.Store(mode)
		for _, path := range []string{"/anthropic/v1/messages", "/openai/v1/responses", "/gemini/v1beta/models/x:generateContent", "/anthropic/v1/files", "/"} {
			resp, err := client(t, d).Post("http://gateway"+path, "", strings.NewReader("{}"))
			if err != nil {
				fmt.Fprintln(&answers, err)
				continue
			}
			fmt.Fprintln(&answers, resp.Header)
			_, err = io.Copy(&answers, resp.Body)
			fmt.Fprintln(&answers, err)
			resp.Body.Close()
		}
	}
	g.Close()
	fmt.Fprintf(&answers, "%+v %+v", store.usage, store.audits)
	for _, e := range logs.All() {
		fmt.Fprintf(&answers, "%s %v\n", e.Message, e.ContextMap())
	}
	filepath.WalkDir(c.Dir, func(path string, e os.DirEntry, _ error) error {
		if e.Type().IsRegular() {
			t.Errorf("a file: %s", path)
		}
		return nil
	})
	if strings.Contains(answers.String(), key) {
		t.Errorf("the key is in\n%s", answers.String())
	}
	if len(store.usage) == 0 || logs.Len() == 0 {
		t.Error("nothing was recorded: the test looks at nothing")
	}
}

func TestRequestSize(t *testing.T) {
	base := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		data, err := io.ReadAll(r.Body)
		if err == nil {
			fmt.Fprint(w, len(data))
		}
	})
	c := both(base)
	c.Limits.RequestBytes = 100_000
	r := newRig(t, c, Run{})
	for _, tt := range []struct {
		bytes   int
		chunked bool
		status  int
	}{{100_000, false, 200}, {100_000, true, 200}, {100_001, false, 413}, {100_001, true, 413}, {3_000_000, true, 413}} {
		var body io.Reader = strings.NewReader(strings.Repeat("x", tt.bytes))
		if tt.chunked {
			body = io.MultiReader(body) // of unknown length
		}
		resp, err := r.client.Post("http://gateway/anthropic/v1/messages", "", body)
		if err != nil {
			// A client that still sends may lose the answer with the connection.
			if tt.status == 200 || tt.bytes < 1_000_000 {
				t.Errorf("%+v: %v", tt, err)
			}
			continue
		}
		got, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != tt.status {
			t.Errorf("%+v: %d %s", tt, resp.StatusCode, got)
		}
		if tt.status == 200 && string(got) != fmt.Sprint(tt.bytes) || tt.status == 413 && !strings.Contains(string(got), `"request_too_large"`) {
			t.Errorf("%+v: %s", tt, got)
		}
	}
}

// TestEarlyAnswer: a provider that answers before it has read the request is
// heard all the same, and both directions go on.
func TestEarlyAnswer(t *testing.T) {
	base := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		out := http.NewResponseController(w)
		if err := out.EnableFullDuplex(); err != nil {
			t.Error(err)
		}
		w.WriteHeader(401)
		io.WriteString(w, "early ")
		out.Flush()
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "late %d", n)
	})
	r := newRig(t, both(base), Run{})
	conn, err := dialDoor(t.Context(), r.door)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "POST /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(resp.Body, make([]byte, 6)); err != nil || resp.StatusCode != 401 {
		t.Fatalf("got %d, %v", resp.StatusCode, err)
	}
	fmt.Fprint(conn, strings.Repeat("x", 100_000))
	if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != "late 100000" {
		t.Errorf("got %q, %v", rest, err)
	}
}

func TestProviderTimes(t *testing.T) {
	var headers atomic.Bool
	hang := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if headers.Load() {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: {}\n\n")
			http.NewResponseController(w).Flush()
		}
		<-hang
	}))
	defer s.Close()
	defer close(hang)
	c := both(s.URL)
	c.Limits.HeaderTimeout, c.Limits.IdleTimeout = 50*time.Millisecond, 50*time.Millisecond
	r := newRig(t, c, Run{})
	resp, body := r.do(t, "POST", "/anthropic/v1/messages", "{}")
	if resp.StatusCode != 504 || !strings.Contains(body, "timeout_error") || resp.Header.Get("X-Should-Retry") != "" {
		t.Errorf("no answer: %d %s", resp.StatusCode, body)
	}
	headers.Store(true)
	resp, err := r.client.Post("http://gateway/anthropic/v1/messages", "", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); err == nil || string(got) != "data: {}\n\n" {
		t.Errorf("an answer that stalls: %q, %v: it must not look whole", got, err)
	}

	// A container that stops in the middle of its own request.
	conn, err := dialDoor(t.Context(), r.door)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "POST /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
	if got, err := io.ReadAll(conn); err != nil || !bytes.HasPrefix(got, []byte("HTTP/1.1 504")) {
		t.Errorf("half a request: %q, %v", got, err)
	}
}

func TestUnreachable(t *testing.T) {
	s := httptest.NewServer(nil)
	s.Close()
	r := newRig(t, both(s.URL), Run{})
	resp, body := r.do(t, "POST", "/openai/v1/chat/completions", "{}")
	if resp.StatusCode != 502 || !strings.Contains(body, `"type":"server_error"`) || strings.Contains(body, s.URL[7:]) {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
}

func TestCallsAtOnce(t *testing.T) {
	arrived, hang := make(chan struct{}), make(chan struct{})
	base := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		arrived <- struct{}{}
		<-hang
	})
	c := both(base)
	c.Limits.Calls = 2
	r := newRig(t, c, Run{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() { r.do(t, "POST", "/anthropic/v1/messages", "{}") })
		<-arrived
	}
	resp, body := r.do(t, "POST", "/anthropic/v1/messages", "{}")
	if resp.StatusCode != 429 || !strings.Contains(body, "rate_limit_error") {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	close(hang)
	wg.Wait()
}

// TestBudget: what is spent is spent until midnight, over a restart too, and the
// provider does not see what is refused.
func TestBudget(t *testing.T) {
	calls := 0
	base := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		calls++
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"model":"m","usage":{"input_tokens":10,"output_tokens":20,"cache_read_input_tokens":30,"cache_creation_input_tokens":40}}`)
	})
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	c := both(base)
	c.Location = berlin
	r := newRig(t, c, Run{ID: "r", Folder: "family", Budget: Budget{Tokens: 250}})
	now := time.Date(2026, 11, 21, 22, 59, 0, 0, time.UTC) // a minute before midnight
	r.now = func() time.Time { return now }
	for i := range 3 {
		if resp, body := r.do(t, "POST", "/anthropic/v1/messages", "{}"); resp.StatusCode != 200 {
			t.Fatalf("call %d: %d %s", i, resp.StatusCode, body)
		}
	}
	for path, want := range map[string]string{
		"/anthropic/v1/messages":      `{"type":"error","error":{"type":"billing_error","message":"this group's budget of 250 tokens a day is spent (300 were used)`,
		"/openai/v1/chat/completions": `{"error":{"message":"this group's budget of 250 tokens a day is spent (300 were used)`,
	} {
		resp, body := r.do(t, "POST", path, "{}")
		if resp.StatusCode != 402 || !strings.HasPrefix(body, want) || resp.Header.Get("X-Should-Retry") != "false" || resp.Header.Get("Berth-Reason") != "budget" {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
	if resp, _ := r.do(t, "POST", "/anthropic/v1/messages/count_tokens", "{}"); resp.StatusCode != 200 {
		t.Errorf("counting costs nothing and was refused: %d", resp.StatusCode)
	}
	now = now.Add(2 * time.Minute)
	if resp, body := r.do(t, "POST", "/anthropic/v1/messages", "{}"); resp.StatusCode != 200 {
		t.Errorf("the next day: %d %s", resp.StatusCode, body)
	}
	if calls != 5 || r.store.asked != 1 {
		t.Errorf("%d calls, want 5; %d questions to the store, want 1", calls, r.store.asked)
	}
	r.door.Close()
	if !slices.Contains(r.store.kinds(), "budget POST /anthropic/v1/messages") {
		t.Errorf("audited: %q", r.store.kinds())
	}

	// A new daemon asks the store, and lets nothing through without an answer.
	r = newRig(t, c, Run{ID: "r", Folder: "family", Budget: Budget{Requests: 5}})
	r.store.fail(errors.New("disk"))
	if resp, body := r.do(t, "POST", "/openai/v1/responses", "{}"); resp.StatusCode != 503 || strings.Contains(body, "disk") {
		t.Errorf("without the store: %d %s", resp.StatusCode, body)
	}
	r.store.fail(nil)
	r.store.requests = 4
	if resp, _ := r.do(t, "POST", "/openai/v1/responses", "{}"); resp.StatusCode != 200 {
		t.Errorf("the fifth request: %d", resp.StatusCode)
	}
	if resp, body := r.do(t, "POST", "/openai/v1/responses", "{}"); resp.StatusCode != 402 || !strings.Contains(body, "5 requests a day") {
		t.Errorf("the sixth request: %d %s", resp.StatusCode, body)
	}
}

// TestHangUp: who leaves in the middle of an answer has used what came so far.
func TestHangUp(t *testing.T) {
	left := make(chan struct{})
	base := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":10,\"output_tokens\":1}}}\n\n"+strings.Repeat("data: {\"delta\":1}\n\n", 100))
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(left)
	})
	r := newRig(t, both(base), Run{})
	conn, err := dialDoor(t.Context(), r.door)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "POST /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
	if _, err := io.ReadFull(conn, make([]byte, 1900)); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	<-left // the provider is told at once
	r.Close()
	if len(r.store.usage) != 1 {
		t.Fatalf("usage %+v", r.store.usage)
	}
	if u := r.store.usage[0]; !u.Estimated || u.Input != 10 || u.Output < 100 || u.Output > 200 {
		t.Errorf("usage %+v", u)
	}
}

// TestUsageWaitsForTheStore: nothing is lost while the store does not take it,
// and no answer waits.
func TestUsageWaitsForTheStore(t *testing.T) {
	base := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"model":"m","usage":{"prompt_tokens":10,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}`)
	})
	r := newRig(t, both(base), Run{})
	r.store.fail(errors.New("disk"))
	for range 10 {
		r.do(t, "POST", "/openai/v1/chat/completions", "{}")
	}
	r.store.fail(nil)
	r.do(t, "POST", "/openai/v1/chat/completions", "{}")
	r.Close()
	var sum berth.Usage
	for _, u := range r.store.usage {
		sum.Requests += u.Requests
		sum.Input += u.Input
		sum.Output += u.Output
		sum.CacheRead += u.CacheRead
	}
	if want := (berth.Usage{Requests: 11, Input: 66, Output: 55, CacheRead: 44}); sum != want {
		t.Errorf("sum %+v, want %+v", sum, want)
	}
}
