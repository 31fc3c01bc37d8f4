package gateway

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

func TestMeter(t *testing.T) {
	big := strings.Repeat(`{"a":["\"usage\":{\"output_tokens\":7}",{"usage":{"output_tokens":8}}]},`, 20_000)
	tests := []struct {
		name, kind, text string
		inclusive        bool
		want             tokens
		model            string
		reported         bool
	}{
		{"anthropic", "application/json", `{"id":"x","model":"claude","content":[{"text":"usage"}],"usage":{"input_tokens":1,"cache_creation_input_tokens":2,"cache_read_input_tokens":3,"output_tokens":4}}`, false, tokens{1, 4, 3, 2}, "claude", true},
		{"openai", "application/json; charset=utf-8", ` { "usage" : {"prompt_tokens":10,"completion_tokens":4,"total_tokens":14,"prompt_tokens_details":{"cached_tokens":6}} , "model" : "gpt" } `, true, tokens{4, 4, 6, 0}, "gpt", true},
		{"responses", "text/event-stream", "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"model\":\"gpt\",\"usage\":null}}\n\nevent: response.completed\ndata: {\"response\":{\"output\":[" + strings.TrimSuffix(big, ",") + "],\"usage\":{\"input_tokens\":10,\"input_tokens_details\":{\"cached_tokens\":1},\"output_tokens\":4}}}\n\n", true, tokens{9, 4, 1, 0}, "gpt", true},
		{"openai stream", "text/event-stream", "data: {\"model\":\"gpt\",\"choices\":[{\"delta\":{\"content\":\"usage\"}}],\"usage\":null}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":6}}\n\ndata: [DONE]\n\n", true, tokens{5, 6, 0, 0}, "gpt", true},
		{"one event in two lines", "text/event-stream", "data:{\"usage\":\r\ndata: {\"output_tokens\":6}}\r\n\r\n", false, tokens{0, 6, 0, 0}, "", true},
		{"no space, other fields, no end", "text/event-stream", "id: 1\nevent: x\ndatax: {\"usage\":{\"output_tokens\":9}}\ndata:{\"usage\":{\"output_tokens\":6}}", false, tokens{0, 6, 0, 0}, "", true},
		{"google", "application/json; charset=UTF-8", `{"candidates":[{"content":{"parts":[{"text":"\"usageMetadata\":"}]}}],"usageMetadata":{"promptTokenCount":10,"candidatesTokenCount":4,"thoughtsTokenCount":2,"totalTokenCount":16,"cachedContentTokenCount":6},"modelVersion":"gemini"}`, true, tokens{4, 6, 6, 0}, "gemini", true},
		{"google list", "application/json", `[{"usageMetadata":{"promptTokenCount":10}},{"x":{"usageMetadata":{"promptTokenCount":90}},"usageMetadata":{"promptTokenCount":10,"candidatesTokenCount":4}}]`, true, tokens{10, 4, 0, 0}, "", true},
		{"google stream", "text/event-stream", "data: {\"usageMetadata\": {\"promptTokenCount\": 8},\"modelVersion\": \"gemini\"}\r\n\r\ndata: {\"usageMetadata\": {\"promptTokenCount\": 8,\"candidatesTokenCount\": 5}}\r\n\r\n", true, tokens{8, 5, 0, 0}, "gemini", true},
		{"large, usage last", "application/json", `{"data":[` + strings.TrimSuffix(big, ",") + `],"usage":{"prompt_tokens":8}}`, true, tokens{8, 0, 0, 0}, "", true},
		{"usage elsewhere", "application/json", `{"choices":[{"usage":{"output_tokens":1}}],"x":{"usage":{"output_tokens":2}},"message":{"x":{"usage":{"output_tokens":3}}}}`, false, tokens{}, "", false},
		{"odd numbers", "application/json", `{"usage":{"input_tokens":-5,"output_tokens":1e300,"cache_read_input_tokens":"7","cache_creation_input_tokens":2.0}}`, false, tokens{0, 1 << 40, 0, 2}, "", true},
		{"usage too long to keep", "application/json", `{"usage":{"x":"` + strings.Repeat("x", maxValue) + `","output_tokens":3}}`, false, tokens{}, "", false},
		{"escapes", "application/json", `{"a\"usage":{"output_tokens":1},"model":"a\"b\n\u00e9"}`, false, tokens{}, `a"b??`, false},
		{"no JSON", "application/json", `}}]]"usage":{"output_tokens":1}{{,:,"`, false, tokens{}, "", false},
		{"other kind", "audio/mpeg", `{"usage":{"output_tokens":1}}`, false, tokens{}, "", false},
		{"empty", "", "", false, tokens{}, "", false},
	}
	for _, tt := range tests {
		for _, piece := range []int{1, 7, 1 << 20} {
			m := newMeter(tt.kind, tt.inclusive)
			for rest := []byte(tt.text); len(rest) > 0; {
				n := min(piece, len(rest))
				m.write(rest[:n])
				rest = rest[n:]
			}
			if m.tokens != tt.want || m.model != tt.model || m.reported != tt.reported {
				t.Errorf("%s in pieces of %d: %+v, %q, %v, want %+v, %q, %v", tt.name, piece, m.tokens, m.model, m.reported, tt.want, tt.model, tt.reported)
			}
			if c := cap(m.finder.value); c > 2*maxValue {
				t.Errorf("%s: %d bytes are held", tt.name, c)
			}
		}
	}
}

// TestEstimate: not to ask for usage saves nothing.
func TestEstimate(t *testing.T) {
	m := newMeter("text/event-stream", true)
	for range 100 {
		m.write([]byte("data: {\"choices\":[{\"delta\":{\"content\":\"word\"}}]}\n\n"))
	}
	if !m.estimate(4000, false) || m.tokens.input != 1000 || m.tokens.output < 100 {
		t.Errorf("estimated %+v", m.tokens)
	}
	m.reported = true
	if m.estimate(4000, false) {
		t.Error("what the provider said is estimated again")
	}
}

// FuzzMeter: the meter finds what encoding/json finds, in any pieces, and holds
// little of what is no JSON.
func FuzzMeter(f *testing.F) {
	for _, seed := range []string{
		`{"usage":{"output_tokens":4},"model":"m"}`, `{"message":{"usage":{"output_tokens":4}}}`, `[{"usage":{"output_tokens":4}}]`, `{"usage":null}`,
		`{"usage":{"output_tokens":4},"usage":{"output_tokens":3}}`, `"usage"`, `{"a":{"usage":{"output_tokens":4}}}`, `{"response":[{"usage":{"output_tokens":4}}]}`, `{"\u0075sage":{}}`,
		`[{"usageMetadata":{"promptTokenCount":4}},{"modelVersion":"m"}]`,
	} {
		f.Add(seed, uint8(3))
	}
	f.Fuzz(func(t *testing.T, text string, piece uint8) {
		m := newMeter("application/json", false)
		s := newMeter("text/event-stream", false)
		for rest := []byte(text); len(rest) > 0; {
			n := min(int(piece)+1, len(rest))
			m.write(rest[:n])
			s.write(rest[:n])
			rest = rest[n:]
		}
		if cap(m.finder.value) > 2*maxValue || cap(s.finder.value) > 2*maxValue {
			t.Error("too much is held")
		}
		var v map[string]json.RawMessage
		if json.Unmarshal([]byte(text), &v) != nil || strings.Contains(text, `\`) || strings.Count(text, "usage") != 1 || strings.Contains(text, "USAGE") {
			return
		}
		var usage struct {
			Output float64 `json:"output_tokens"`
		}
		if raw, ok := v["usage"]; ok && len(raw) < maxValue-10 && json.Unmarshal(raw, &usage) == nil {
			if got, want := m.tokens.output, count(usage.Output); got != want {
				t.Errorf("%q: %d, want %d", text, got, want)
			}
		}
	})
}

func BenchmarkMeter(b *testing.B) {
	var text strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&text, "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"word %d\"}}\n\n", i)
	}
	p := []byte(text.String())
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		newMeter("text/event-stream", false).write(p)
	}
}
