package gateway

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
)

// maxValue bounds what is kept of one value while it is read, in bytes.
const maxValue = 8 << 10

// finder looks for a few values in a JSON document that it sees piece by piece,
// and keeps nothing else of it: an answer may be larger than what a daemon wants
// to hold, and its usage comes last. What is no JSON finds nothing.
type finder struct {
	found func(name string, value []byte) // value is valid during the call only

	depth   int       // open brackets
	object  [3]bool   // by depth: it is an object's
	keys    [3]string // by depth: the last key
	key     bool      // the next string at this depth is a key
	text    bool      // inside a string
	escaped bool      // after its backslash
	naming  bool      // the string is a key
	name    [16]byte  // what was read of it
	length  int       // of the key, also beyond name
	value   []byte    // what was read of a value that is wanted
	wanted  string    // its name, or empty
	level   int       // the depth at which it ends
}

// reset begins a new document.
func (f *finder) reset() {
	*f = finder{found: f.found, value: f.value[:0]}
}

func (f *finder) write(c byte) {
	if f.wanted != "" {
		if f.depth == f.level && !f.text && (c == ',' || c == '}') {
			if len(f.value) < maxValue {
				f.found(f.wanted, f.value)
			}
			f.wanted = ""
		} else if len(f.value) < maxValue {
			f.value = append(f.value, c)
		}
	}
	if f.text {
		f.inText(c)
		return
	}
	shallow := f.depth > 0 && f.depth < len(f.object) && f.object[f.depth]
	switch c {
	case '"':
		f.text, f.naming, f.length = true, shallow && f.key, 0
		f.key = false
	case '{', '[':
		f.depth++
		if f.depth < len(f.object) {
			f.object[f.depth], f.keys[f.depth] = c == '{', ""
			f.key = c == '{'
		}
	case '}', ']':
		f.depth = max(f.depth-1, 0)
	case ',':
		f.key = shallow
	case ':':
		if shallow && f.wanted == "" {
			f.wanted, f.level, f.value = f.want(), f.depth, f.value[:0]
		}
	}
}

func (f *finder) inText(c byte) {
	switch {
	case f.escaped:
		f.escaped = false
	case c == '\\':
		f.escaped = true
	case c == '"':
		f.text = false
		if f.naming {
			f.keys[f.depth] = known(f.name[:min(f.length, len(f.name))])
			f.naming = false
		}
		return
	}
	if f.naming {
		if f.length < len(f.name) {
			f.name[f.length] = c
		}
		f.length++
	}
}

// known returns a key that matters, and else an empty string.
func known(name []byte) string {
	for _, key := range [...]string{"usage", "model", "message", "response", "usageMetadata", "modelVersion"} {
		if string(name) == key {
			return key
		}
	}
	return ""
}

// want returns "usage" or "model" if the value that begins is one, in the answer
// itself, in Anthropic's message_start, in the last event of OpenAI's responses,
// or in one of a list of Google's answers.
func (f *finder) want() string {
	if f.depth == 2 && f.object[1] && f.keys[1] != "message" && f.keys[1] != "response" {
		return ""
	}
	switch f.keys[f.depth] {
	case "usage", "usageMetadata":
		return "usage"
	case "model", "modelVersion":
		return "model"
	}
	return ""
}

// tokens is what a provider says that a request cost. Cached input is not part
// of input.
type tokens struct {
	input, output, cacheRead, cacheWrite int64
}

// meter reads along an answer. It never fails, and holds a few kilobytes
// whatever comes.
type meter struct {
	model    string
	tokens   tokens
	reported bool // the provider gave usage

	inclusive bool // the provider counts cached input as input
	events    bool // server-sent events, not one document
	finder    finder
	ignore    bool // neither
	bytes     int64

	line  int  // bytes of this line
	match int  // how much of the line's start is "data:"
	data  bool // the line carries data
}

func newMeter(contentType string, inclusive bool) *meter {
	kind, _, _ := strings.Cut(contentType, ";")
	m := &meter{inclusive: inclusive}
	switch strings.ToLower(strings.TrimSpace(kind)) {
	case "text/event-stream":
		m.events = true
	case "application/json":
	default:
		m.ignore = true
	}
	m.finder.found = m.found
	return m
}

// write takes the next piece of the answer.
func (m *meter) write(p []byte) {
	m.bytes += int64(len(p))
	switch {
	case m.ignore:
	case !m.events:
		for _, c := range p {
			m.finder.write(c)
		}
	default:
		for _, c := range p {
			m.event(c)
		}
	}
}

func (m *meter) event(c byte) {
	const field = "data:"
	switch {
	case c == '\r':
	case c == '\n':
		if m.line == 0 { // the end of an event
			m.finder.reset()
		}
		m.line, m.match, m.data = 0, 0, false
	case m.data:
		m.finder.write(c)
	default:
		if m.match == m.line && m.match < len(field) && c == field[m.match] {
			m.match++
			m.data = m.match == len(field)
		}
		m.line++
	}
}

// reply is the usage of any provider.
type reply struct {
	Input         float64 `json:"input_tokens"`
	Output        float64 `json:"output_tokens"`
	CacheCreation float64 `json:"cache_creation_input_tokens"`
	CacheRead     float64 `json:"cache_read_input_tokens"`
	Prompt        float64 `json:"prompt_tokens"`
	Completion    float64 `json:"completion_tokens"`
	InputDetails  details `json:"input_tokens_details"`
	PromptDetails details `json:"prompt_tokens_details"`

	GooglePrompt   float64 `json:"promptTokenCount"`
	GoogleTools    float64 `json:"toolUsePromptTokenCount"`
	GoogleAnswer   float64 `json:"candidatesTokenCount"`
	GoogleThoughts float64 `json:"thoughtsTokenCount"`
	GoogleCached   float64 `json:"cachedContentTokenCount"`
}

type details struct {
	Cached float64 `json:"cached_tokens"`
}

// found takes a value out of the answer. Providers repeat their counts while an
// answer grows, so the largest counts.
func (m *meter) found(name string, value []byte) {
	if name == "model" {
		var model string
		if json.Unmarshal(value, &model) == nil && model != "" {
			m.model = printable(model, 128)
		}
		return
	}
	value = bytes.TrimSpace(value)
	if len(value) == 0 || value[0] != '{' {
		return // null, in all chunks but the last
	}
	var r reply
	_ = json.Unmarshal(value, &r) // a field of another type leaves the others
	m.reported = true
	t := tokens{
		input:      count(max(r.Input, r.Prompt, r.GooglePrompt+r.GoogleTools)),
		output:     count(max(r.Output, r.Completion, r.GoogleAnswer+r.GoogleThoughts)),
		cacheRead:  count(max(r.CacheRead, r.InputDetails.Cached, r.PromptDetails.Cached, r.GoogleCached)),
		cacheWrite: count(r.CacheCreation),
	}
	if m.inclusive {
		t.input = max(t.input-t.cacheRead, 0)
	}
	m.tokens = tokens{
		input: max(m.tokens.input, t.input), output: max(m.tokens.output, t.output),
		cacheRead: max(m.tokens.cacheRead, t.cacheRead), cacheWrite: max(m.tokens.cacheWrite, t.cacheWrite),
	}
}

// count takes what a provider wrote as a number of tokens.
func count(n float64) int64 {
	if math.IsNaN(n) || n < 0 {
		return 0
	}
	return int64(min(n, 1<<40))
}

// estimate fills in what the provider did not say, from the bytes that were sent
// and received, and reports whether it had to. cut says that the answer broke
// off: then the last word on its length is missing. It errs on the high side, so
// that nobody saves tokens of a budget by hanging up or by not asking for usage.
func (m *meter) estimate(sent int64, cut bool) bool {
	const (
		perToken = 4  // bytes of plain text
		perDelta = 16 // bytes of a stream, most of which is wrapping
	)
	if m.reported && !cut {
		return false
	}
	if !m.reported {
		m.tokens.input = max(m.tokens.input, sent/perToken)
	}
	switch {
	case m.events:
		m.tokens.output = max(m.tokens.output, m.bytes/perDelta)
	case !m.ignore:
		m.tokens.output = max(m.tokens.output, m.bytes/perToken)
	}
	return true
}

// printable cuts s to n bytes and replaces what no log or table should hold.
func printable(s string, n int) string {
	if len(s) > n {
		s = s[:n] + "…"
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' && r != '…' {
			return '?'
		}
		return r
	}, s)
}
