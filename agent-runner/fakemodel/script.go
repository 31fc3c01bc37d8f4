package fakemodel

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"berth/agent-runner/internal/prompt"
)

// ask is a call for an answer, in neither provider's words.
type ask struct {
	model    string
	stream   bool
	usage    bool // wanted at the end of a stream; Anthropic always sends it
	system   string
	messages []message
	tools    []string

	// What look finds.
	script  string   // the last user message with a text
	rounds  int      // of tool calls since then
	results []string // of tools since then
	last    int      // how many of results came with the last message
}

type message struct {
	role    string
	texts   []string
	text    string // the last of texts that a person wrote; look finds it
	calls   int
	results []string
}

// output is what the script makes of a call.
type output struct {
	id      int
	thought string
	text    string
	calls   []call
	slow    time.Duration
	end     end
	failure *failure
}

type call struct {
	name string
	args json.RawMessage
}

// end is how an answer ends.
type end int

const (
	complete end = iota
	stall
	drop
	mute
)

type failure struct {
	code   int
	kind   string // empty: the provider's own for the code
	text   string
	header http.Header
}

// reminder is what Claude Code puts beside a user's words.
var reminder = regexp.MustCompile(`(?s)<system-reminder>.*?</system-reminder>`)

// look finds the script and how far it has come. Results that no answer followed
// yet stay, though another message came after them.
func (a *ask) look() {
	for i := range a.messages {
		m := &a.messages[i]
		for _, text := range m.texts {
			if text = strings.TrimSpace(reminder.ReplaceAllString(text, "")); text != "" {
				m.text = text
			}
		}
		if m.role == "assistant" {
			a.last = 0
		}
		if m.role == "user" && m.text != "" {
			a.script = strings.TrimSpace(prompt.Parse(m.text).Last("").Text)
			a.rounds, a.results = 0, slices.Clone(a.results[len(a.results)-a.last:])
		}
		if m.calls > 0 {
			a.rounds++
		}
		a.results = append(a.results, m.results...)
		a.last += len(m.results)
	}
}

// aside reports whether the call is one that engines make beside the chat.
func (a *ask) aside() bool {
	if strings.HasPrefix(a.script, "[SUGGESTION MODE") {
		return true
	}
	system := strings.ToLower(a.system)
	return len(a.tools) == 0 && (strings.Contains(system, "title") || strings.Contains(system, "summar"))
}

func (a *ask) inputTokens() int { return 100 * len(a.messages) }

// run carries out the step of the script that the call is at.
func (a *ask) run(id int, failed func(key string, limit int) bool) output {
	out := output{id: id}
	if a.aside() {
		out.text = "Of no importance"
		return out
	}
	var says []string
	for _, result := range a.results[len(a.results)-a.last:] {
		says = append(says, "tool said: "+clip(result, 4<<10))
	}
	lines := slices.Collect(strings.Lines(a.script))
	steps := 0
	for _, line := range lines {
		if word, _ := command(line); isTool(word) {
			steps++
		}
	}
	done := min(a.rounds, steps) // an engine may have called tools of its own
	step := 0
	for _, line := range lines {
		word, rest := command(line)
		if isTool(word) {
			if step++; step <= done {
				continue
			}
			var missing string
			if out.calls, missing = a.calls(rest, word == "tools"); missing != "" {
				says = append(says, missing)
			}
			break
		}
		if step < done {
			continue
		}
		switch word {
		case "say":
			says = append(says, strings.ReplaceAll(rest, `\n`, "\n"))
		case "think":
			out.thought = rest
		case "big":
			says = append(says, strings.Repeat("x", number(rest)))
		case "echo-history":
			says = append(says, a.history())
		case "slow":
			out.slow = time.Duration(number(rest)) * time.Millisecond
		case "stall":
			out.end = stall
		case "mute":
			out.end = mute
		case "drop":
			out.end = drop
		case "http":
			out.failure = failureOf(rest)
		case "fail":
			times, rest, _ := strings.Cut(rest, " ")
			if failed(fmt.Sprint(len(a.messages), a.script), number(times)) {
				out.failure = failureOf(rest)
			}
		case "limit":
			out.failure = limitOf(number(rest))
		case "refuse":
			out.failure = refusalOf(rest)
		}
	}
	out.text = strings.Join(says, "\n")
	switch {
	case out.text != "" || len(out.calls) > 0:
	case out.end != complete:
		out.text = "this is half of an answer"
	default:
		out.text = "echo: " + a.script
	}
	return out
}

func command(line string) (word, rest string) {
	word, rest, _ = strings.Cut(strings.TrimSpace(line), " ")
	return word, strings.TrimSpace(rest)
}

func isTool(word string) bool { return word == "tool" || word == "tools" }

// calls reads the tool calls of a line. It returns what to say instead if a tool
// is not offered.
func (a *ask) calls(line string, many bool) (calls []call, missing string) {
	parts := []string{line}
	if many {
		parts = strings.Split(line, "|")
	}
	for _, part := range parts {
		name, args, _ := strings.Cut(strings.TrimSpace(part), " ")
		if args = strings.TrimSpace(args); args == "" {
			args = "{}"
		}
		full := a.tool(name)
		if full == "" {
			return nil, fmt.Sprintf("no tool %s among %s", name, strings.Join(a.tools, ", "))
		}
		if !json.Valid([]byte(args)) {
			return nil, fmt.Sprintf("%s is no JSON", args)
		}
		calls = append(calls, call{name: full, args: json.RawMessage(args)})
	}
	return calls, ""
}

// tool returns the offered tool that name means, or nothing.
func (a *ask) tool(name string) string {
	end := strings.ToLower(name)
	for _, is := range []func(string) bool{
		func(t string) bool { return t == end },
		func(t string) bool { return strings.HasSuffix(t, "_"+end) },
		func(t string) bool { return strings.HasSuffix(t, end) },
	} {
		if i := slices.IndexFunc(a.tools, func(t string) bool { return is(strings.ToLower(t)) }); i >= 0 {
			return a.tools[i]
		}
	}
	return ""
}

func (a *ask) history() string {
	var users []string
	assistants := 0
	for _, m := range a.messages {
		switch {
		case m.role == "assistant":
			assistants++
		case m.role == "user" && m.text != "":
			users = append(users, clip(strings.TrimSpace(prompt.Parse(m.text).Last("").Text), 64))
		}
	}
	return fmt.Sprintf("history: %d from users, %d from assistants: %s", len(users), assistants, strings.Join(users, " / "))
}

func failureOf(rest string) *failure {
	code, kind, _ := strings.Cut(rest, " ")
	f := &failure{code: number(code), kind: strings.TrimSpace(kind)}
	if f.code < 400 || f.code > 599 {
		f.code = http.StatusInternalServerError
	}
	f.text = fmt.Sprintf("fake error %d", f.code)
	return f
}

// limitOf is what providers say when they were asked too often.
func limitOf(seconds int) *failure {
	h := make(http.Header)
	h.Set("Retry-After", strconv.Itoa(seconds))
	h.Set("Retry-After-Ms", strconv.Itoa(1000*seconds))
	again := time.Now().Add(time.Duration(seconds) * time.Second).UTC()
	h.Set("Anthropic-Ratelimit-Requests-Limit", "50")
	h.Set("Anthropic-Ratelimit-Requests-Remaining", "0")
	h.Set("Anthropic-Ratelimit-Requests-Reset", again.Format(time.RFC3339))
	h.Set("Anthropic-Ratelimit-Unified-Reset", strconv.FormatInt(again.Unix(), 10))
	h.Set("X-Ratelimit-Remaining-Requests", "0")
	h.Set("X-Ratelimit-Reset-Requests", fmt.Sprintf("%ds", seconds))
	return &failure{code: http.StatusTooManyRequests, kind: "rate_limit_error", text: fmt.Sprintf("fake rate limit: try again in %d seconds", seconds), header: h}
}

// refusals are the gateway's, by reason.
var refusals = map[string]failure{
	"path":        {code: 404, text: "the gateway does not pass this on"},
	"no_key":      {code: 401, text: "there is no key on the host"},
	"too_large":   {code: 413, text: "the request has more bytes than the gateway passes on"},
	"budget":      {code: 402, kind: "billing_error", text: "this group has used up its budget for today"},
	"busy":        {code: 429, text: "this run has too many calls under way already"},
	"store":       {code: 503, text: "the gateway cannot read this group's budget at the moment"},
	"unreachable": {code: 502, text: "the gateway cannot reach the model's provider"},
	"timeout":     {code: 504, text: "the model's provider did not answer in time"},
}

func refusalOf(reason string) *failure {
	f, ok := refusals[reason]
	if !ok {
		f = failure{code: 500, text: "the fake model knows no refusal " + reason}
	}
	f.header = http.Header{"Berth-Reason": {reason}}
	if f.code < 429 {
		f.header.Set("X-Should-Retry", "false")
	}
	return &f
}

// pieces cuts a text as a model would: at words, and long ones between two runes.
func pieces(text string) []string {
	const longest = 4 << 10
	var all []string
	for _, word := range strings.SplitAfter(text, " ") {
		for len(word) > longest {
			at := border(word, longest)
			all = append(all, word[:at])
			word = word[at:]
		}
		if word != "" {
			all = append(all, word)
		}
	}
	return all
}

func halves(text string) (head, tail string) {
	at := border(text, len(text)/2)
	return text[:at], text[at:]
}

// border returns the place of at, or the nearest before it, that no rune of text
// goes over.
func border(text string, at int) int {
	for at > 0 && at < len(text) && !utf8.RuneStart(text[at]) {
		at--
	}
	return at
}

func words(text string) int { return len(strings.Fields(text)) }

func number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

func clip(s string, limit int) string {
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.ToValidUTF8(s, "")
}
