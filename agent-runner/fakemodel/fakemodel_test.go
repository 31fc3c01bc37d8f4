package fakemodel

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func serve(t *testing.T) (*Server, string) {
	t.Helper()
	fake := New()
	server := httptest.NewServer(fake)
	t.Cleanup(server.Close)
	return fake, server.URL
}

func post(t *testing.T, ctx context.Context, url string, body any) *http.Response {
	t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer k1")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

type object = map[string]any

// said is an answer as a client of either provider reads it.
type said struct {
	Text    string
	Thought string
	Calls   []string // "name args"
	Finish  string
	In, Out int
}

// ask posts one script in both dialects, streamed and not, and returns the four
// answers in that order.
func askAll(t *testing.T, url, text string, tools ...string) []said {
	t.Helper()
	var all []said
	for _, stream := range []bool{true, false} {
		var a, o []object
		for _, name := range tools {
			a = append(a, object{"name": name, "input_schema": object{"type": "object"}})
			o = append(o, object{"type": "function", "function": object{"name": name}})
		}
		messages := []object{{"role": "user", "content": text}}
		all = append(all,
			readOpenAI(t, post(t, t.Context(), url+"/v1/chat/completions", object{
				"model": Model, "stream": stream, "stream_options": object{"include_usage": true}, "messages": messages, "tools": o,
			}), stream),
			readAnthropic(t, post(t, t.Context(), url+"/v1/messages", object{
				"model": Model, "stream": stream, "messages": messages, "tools": a,
			}), stream))
	}
	return all
}

// events returns the data of a stream's events, and the error that ended it.
func events(r io.Reader) (data []string, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if d, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			data = append(data, d)
		}
	}
	return data, lines.Err()
}

func decode(t *testing.T, data string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(data), into); err != nil {
		t.Fatalf("%s: %v", data, err)
	}
}

func readOpenAI(t *testing.T, resp *http.Response, stream bool) (s said) {
	t.Helper()
	type part struct {
		Content   string `json:"content"`
		Reasoning string `json:"reasoning_content"`
		ToolCalls []struct {
			Index    int
			Function struct{ Name, Arguments string }
		} `json:"tool_calls"`
	}
	type answer struct {
		Choices []struct {
			Delta, Message part
			FinishReason   *string `json:"finish_reason"`
		}
		Usage *struct {
			In  int `json:"prompt_tokens"`
			Out int `json:"completion_tokens"`
		}
	}
	var all []string
	if stream {
		var err error
		if all, err = events(resp.Body); err != nil || all[len(all)-1] != "[DONE]" {
			t.Fatalf("the stream ended with %v after %q", err, all)
		}
		all = all[:len(all)-1]
	} else {
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		all = []string{string(body)}
	}
	for _, data := range all {
		var a answer
		decode(t, data, &a)
		if a.Usage != nil {
			s.In, s.Out = a.Usage.In, a.Usage.Out
		}
		for _, c := range a.Choices {
			for _, p := range []part{c.Delta, c.Message} {
				s.Text += p.Content
				s.Thought += p.Reasoning
				for _, call := range p.ToolCalls {
					if call.Index == len(s.Calls) {
						s.Calls = append(s.Calls, call.Function.Name+" ")
					}
					s.Calls[call.Index] += call.Function.Arguments
				}
			}
			if c.FinishReason != nil {
				s.Finish = map[string]string{"stop": "end", "tool_calls": "tools"}[*c.FinishReason]
			}
		}
	}
	return s
}

func readAnthropic(t *testing.T, resp *http.Response, stream bool) (s said) {
	t.Helper()
	type block struct {
		Type, Text, Thinking, Name string
		Input                      json.RawMessage
	}
	type usage struct {
		In  int `json:"input_tokens"`
		Out int `json:"output_tokens"`
	}
	finish := func(reason string) { s.Finish = map[string]string{"end_turn": "end", "tool_use": "tools"}[reason] }
	if !stream {
		var a struct {
			Content    []block
			StopReason string `json:"stop_reason"`
			Usage      usage
		}
		if err := json.NewDecoder(resp.Body).Decode(&a); err != nil {
			t.Fatal(err)
		}
		for _, b := range a.Content {
			s.Text += b.Text
			s.Thought += b.Thinking
			if b.Type == "tool_use" {
				s.Calls = append(s.Calls, b.Name+" "+string(b.Input))
			}
		}
		finish(a.StopReason)
		s.In, s.Out = a.Usage.In, a.Usage.Out
		return s
	}
	all, err := events(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, data := range all {
		var e struct {
			Type         string
			ContentBlock block `json:"content_block"`
			Delta        struct {
				Text, Thinking string
				PartialJSON    string `json:"partial_json"`
				StopReason     string `json:"stop_reason"`
			}
			Usage usage
		}
		decode(t, data, &e)
		s.Text += e.Delta.Text
		s.Thought += e.Delta.Thinking
		if e.ContentBlock.Type == "tool_use" {
			s.Calls = append(s.Calls, e.ContentBlock.Name+" ")
		}
		if e.Delta.PartialJSON != "" {
			s.Calls[len(s.Calls)-1] += e.Delta.PartialJSON
		}
		if e.Type == "message_delta" {
			finish(e.Delta.StopReason)
			s.In, s.Out = e.Usage.In, e.Usage.Out
		}
	}
	return s
}

func TestScripts(t *testing.T) {
	_, url := serve(t)
	for _, tt := range []struct {
		script string
		want   said
	}{
		{"hello there", said{Text: "echo: hello there", Finish: "end", In: 100, Out: 3}},
		{"@Andy say hi you", said{Text: "hi you", Finish: "end", In: 100, Out: 2}},
		{`say a\nb` + "\nsay c", said{Text: "a\nb\nc", Finish: "end", In: 100, Out: 3}},
		{"think hm\nsay yes", said{Text: "yes", Thought: "hm", Finish: "end", In: 100, Out: 2}},
		{"big 9000", said{Text: strings.Repeat("x", 9000), Finish: "end", In: 100, Out: 1}},
		{"echo-history", said{Text: "history: 1 from users, 0 from assistants: echo-history", Finish: "end", In: 100, Out: 8}},
		{`tool send_message {"text":"hi"}` + "\nsay not yet", said{Calls: []string{`mcp__nano__send_message {"text":"hi"}`}, Finish: "tools", In: 100}},
		{"say first\ntool bash", said{Text: "first", Calls: []string{"Bash {}"}, Finish: "tools", In: 100, Out: 1}},
		{`tools bash {"n":1} | bash {"n":2}`, said{Calls: []string{`Bash {"n":1}`, `Bash {"n":2}`}, Finish: "tools", In: 100}},
		{`tool bash {"to":"ääää"}`, said{Calls: []string{`Bash {"to":"ääää"}`}, Finish: "tools", In: 100}},
		{"say x" + strings.Repeat("ä", 3000), said{Text: "x" + strings.Repeat("ä", 3000), Finish: "end", In: 100, Out: 1}},
		{"tool none", said{Text: "no tool none among mcp__nano__send_message, Bash", Finish: "end", In: 100, Out: 6}},
		{"<context chat=\"c\"/>\n<messages>\n<message sender=\"A\" time=\"t\">say no</message>\n<message sender=\"A\" time=\"t\">@Andy say a &lt; b</message>\n</messages>", said{Text: "a < b", Finish: "end", In: 100, Out: 3}},
		{"say a<system-reminder>\nsay b\n</system-reminder>", said{Text: "a", Finish: "end", In: 100, Out: 1}},
	} {
		for i, got := range askAll(t, url, tt.script, "mcp__nano__send_message", "Bash") {
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("%s, variant %d (-want +got):\n%s", tt.script, i, diff)
			}
		}
	}
}

// TestAfterTools: the script goes on where the results of tools have brought it.
func TestAfterTools(t *testing.T) {
	fake, url := serve(t)
	const script = "tool a {}\ntool b {}\nsay end"
	call := func(id string) object {
		return object{"role": "assistant", "content": nil, "tool_calls": []object{{"id": id, "type": "function", "function": object{"name": "a", "arguments": "{}"}}}}
	}
	tool := func(id, text string) object {
		return object{"role": "tool", "tool_call_id": id, "content": text}
	}
	use := func(id string) object {
		return object{"role": "assistant", "content": []object{{"type": "tool_use", "id": id, "name": "a", "input": object{}}}}
	}
	result := func(id, text string) object {
		return object{"role": "user", "content": []object{{"type": "tool_result", "tool_use_id": id, "content": []object{{"type": "text", "text": text}}}}}
	}
	user := object{"role": "user", "content": script}
	second := said{Text: "tool said: one", Calls: []string{"b {}"}, Finish: "tools"}
	last := said{Text: "tool said: two\nend", Finish: "end"}
	for _, tt := range []struct {
		openAI, anthropic []object
		want              said
	}{
		{[]object{user, call("1"), tool("1", "one")}, []object{user, use("1"), result("1", "one")}, second},
		{[]object{user, call("1"), tool("1", "one"), call("2"), tool("2", "two")}, []object{user, use("1"), result("1", "one"), use("2"), result("2", "two")}, last},
	} {
		got := readOpenAI(t, post(t, t.Context(), url+"/v1/chat/completions", object{
			"messages": tt.openAI, "tools": []object{{"function": object{"name": "b"}}},
		}), false)
		got.In, got.Out = 0, 0
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("openai (-want +got):\n%s", diff)
		}
		got = readAnthropic(t, post(t, t.Context(), url+"/anthropic/v1/messages", object{
			"messages": tt.anthropic, "tools": []object{{"name": "b"}},
		}), false)
		got.In, got.Out = 0, 0
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("anthropic (-want +got):\n%s", diff)
		}
	}
	r := fake.Requests()[3]
	if r.Protocol != Anthropic || r.Text != script || !slices.Equal(r.Results, []string{"one", "two"}) || r.Messages != 5 || r.Key() != "k1" || r.Status != 200 {
		t.Errorf("recorded %+v", r)
	}
}

func TestFailures(t *testing.T) {
	_, url := serve(t)
	for _, tt := range []struct {
		script, openAI, anthropic string
		code                      int
		header                    string
	}{
		{"http 401", "invalid_request_error", "authentication_error", 401, ""},
		{"http 529", "server_error", "overloaded_error", 529, ""},
		{"http 400 context_length_exceeded", "context_length_exceeded", "context_length_exceeded", 400, ""},
		{"limit 7", "rate_limit_error", "rate_limit_error", 429, "Retry-After: 7"},
		{"refuse budget", "billing_error", "billing_error", 402, "Berth-Reason: budget"},
	} {
		for _, path := range []string{"/v1/chat/completions", "/v1/messages"} {
			resp := post(t, t.Context(), url+path, object{"messages": []object{{"role": "user", "content": tt.script}}, "stream": true})
			var body struct{ Error struct{ Type string } }
			if err := json.NewDecoder(resp.Body).Decode(&body); err != nil {
				t.Fatal(err)
			}
			want := tt.openAI
			if path == "/v1/messages" {
				want = tt.anthropic
			}
			name, value, _ := strings.Cut(tt.header, ": ")
			if resp.StatusCode != tt.code || body.Error.Type != want || name != "" && resp.Header.Get(name) != value {
				t.Errorf("%s %s: %d %q %v", path, tt.script, resp.StatusCode, body.Error.Type, resp.Header)
			}
		}
	}
}

func TestFailsSomeTimes(t *testing.T) {
	fake, url := serve(t)
	for range 3 {
		post(t, t.Context(), url+"/v1/messages", object{"messages": []object{{"role": "user", "content": "fail 2 500\nsay at last"}}})
	}
	var got []int
	for _, r := range fake.Requests() {
		got = append(got, r.Status)
	}
	if !slices.Equal(got, []int{500, 500, 200}) {
		t.Errorf("statuses %v", got)
	}
}

func TestKey(t *testing.T) {
	fake, url := serve(t)
	fake.Want = "k2"
	resp := post(t, t.Context(), url+"/v1/messages", object{"messages": []object{{"role": "user", "content": "hello"}}})
	if resp.StatusCode != 401 {
		t.Errorf("status %d with a wrong key", resp.StatusCode)
	}
}

// TestCutShort: an answer that stalls goes on until its client hangs up, and a
// dropped one ends without an end.
func TestCutShort(t *testing.T) {
	fake, url := serve(t)
	body := func(script string) object {
		return object{"stream": true, "messages": []object{{"role": "user", "content": script}}}
	}
	for _, path := range []string{"/v1/chat/completions", "/v1/messages"} {
		ctx, hangUp := context.WithCancel(t.Context())
		resp := post(t, ctx, url+path, body("stall\nsay one two three four"))
		var got strings.Builder
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			got.WriteString(lines.Text())
			if strings.Contains(lines.Text(), "two") {
				break
			}
		}
		hangUp()
		if err := fake.AwaitIdle(t.Context()); err != nil {
			t.Error(err)
		}
		if strings.Contains(got.String(), "four") {
			t.Errorf("all of it came: %s", got.String())
		}
		data, err := events(post(t, t.Context(), url+path, body("drop\nsay one two three four")).Body)
		if all := fmt.Sprint(data); err == nil || !strings.Contains(all, "one") || strings.Contains(all, "four") {
			t.Errorf("dropped: %v, %s", err, all)
		}
	}
	ctx, hangUp := context.WithCancelCause(t.Context())
	bored := errors.New("bored")
	go func() {
		if _, err := fake.Await(t.Context(), func(r Request) bool { return r.Text == "mute" }); err != nil {
			t.Error(err)
		}
		hangUp(bored)
	}()
	data, _ := json.Marshal(body("mute"))
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/messages", bytes.NewReader(data))
	if resp, err := http.DefaultClient.Do(req); err == nil {
		resp.Body.Close()
		t.Error("mute answered")
	}
}

func TestSlow(t *testing.T) {
	_, url := serve(t)
	start := time.Now()
	resp := post(t, t.Context(), url+"/v1/messages", object{"stream": true, "messages": []object{{"role": "user", "content": "slow 5\nsay a b c"}}})
	if got := readAnthropic(t, resp, true); got.Text != "a b c" {
		t.Errorf("got %q", got.Text)
	}
	if took := time.Since(start); took < 25*time.Millisecond { // a start, three words and an end
		t.Errorf("took %v", took)
	}
}

func TestBeside(t *testing.T) {
	fake, url := serve(t)
	resp := post(t, t.Context(), url+"/v1/chat/completions", object{"messages": []object{
		{"role": "system", "content": "You are a title generator."}, {"role": "user", "content": "http 500"},
	}})
	if r := fake.Requests()[0]; resp.StatusCode != 200 || !r.Aside {
		t.Errorf("status %d, %+v", resp.StatusCode, r)
	}
	for path, want := range map[string]string{"/v1/models": Model, "/openai/v1/models/fake-1": Model, "/anthropic/": "{}"} {
		resp, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != 200 || !strings.Contains(string(body), want) {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
	resp = post(t, t.Context(), url+"/v1/messages/count_tokens", object{"messages": []object{{"role": "user", "content": "hello"}}})
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != `{"input_tokens":100}` {
		t.Errorf("count_tokens: %s, %v", body, err)
	}
	for _, bad := range []string{"", "[]", `{"messages":[]}`, `{"messages":"x"}`} {
		resp, err := http.Post(url+"/v1/messages", "application/json", strings.NewReader(bad))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 400 {
			t.Errorf("%q: %d", bad, resp.StatusCode)
		}
	}
}
