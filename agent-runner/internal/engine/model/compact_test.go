package model

import (
	"fmt"
	"strings"
	"testing"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/history"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/protocol"
)

// fill has a conversation of turns of about size bytes each.
func (c *chat) fill(provider *script, turns, size int) {
	c.t.Helper()
	for i := range turns {
		provider.steps = append(provider.steps, step{reply: text(fmt.Sprintf("answer %d", i))})
		c.say(fmt.Sprintf("turn %d %s", i, strings.Repeat("x", size)))
	}
}

// valid fails the test unless messages are a conversation that providers take.
func valid(t *testing.T, messages []llm.Message) {
	t.Helper()
	if len(messages) == 0 || !history.Begins(messages[0]) {
		t.Fatalf("the conversation does not begin with a prompt: %v", messages)
	}
	for i, m := range messages {
		if want := []llm.Role{llm.User, llm.Assistant}[i%2]; m.Role != want || len(m.Parts) == 0 {
			t.Fatalf("message %d: %+v", i, m)
		}
		results := 0
		for _, p := range m.Parts {
			if p.Result != nil {
				results++
			}
		}
		if calls := 0; i > 0 {
			calls = len(messages[i-1].Calls())
			if results != calls {
				t.Fatalf("message %d has %d results for %d calls", i, results, calls)
			}
		}
	}
}

func TestCompaction(t *testing.T) {
	provider := &script{}
	c := scripted(t, provider)
	c.fill(provider, 12, 3000)
	c.engine.window = c.engine.tokens(c.engine.session.Messages)
	before := size(c.engine.session.Messages)
	provider.requests = nil
	provider.steps = []step{
		{reply: llm.Reply{Message: text("Ann likes tea.").Message, Usage: llm.Usage{Input: 10, Output: 5}}},
		{reply: llm.Reply{Message: text("done").Message, Usage: llm.Usage{Input: 3, Output: 1}}},
	}
	c.wants(c.say("now"), "done")
	if u := c.answers[0].Usage; *u != (protocol.Usage{InputTokens: 13, OutputTokens: 6}) {
		t.Errorf("usage %+v", u)
	}
	summed, asked := provider.requests[0], provider.requests[1]
	if len(summed.Tools) != 0 || !strings.Contains(summed.Messages[0].Text(), "turn 0") || strings.Contains(summed.Messages[0].Text(), ">now<") {
		t.Errorf("summed up: %.2000s", summed.Messages[0].Text())
	}
	valid(t, asked.Messages)
	if first := asked.Messages[0].Text(); !strings.HasPrefix(first, summaryHead+"Ann likes tea.") || !strings.Contains(first, "<context ") {
		t.Errorf("begins with %.300s", first)
	}
	if last := asked.Messages[len(asked.Messages)-1].Text(); last != host("now") {
		t.Errorf("ends with %.300s", last)
	}
	if after := size(asked.Messages); after > before/2 || len(asked.Messages) < 3 {
		t.Errorf("%d bytes of %d are left in %d messages", after, before, len(asked.Messages))
	}

	// The file has the same.
	c.again()
	provider.steps = []step{{reply: text("there")}}
	d := scripted(t, provider)
	d.engine.config.SessionID, d.engine.config.Home = c.session, c.config.Home
	d.say("after")
	last := provider.requests[len(provider.requests)-1]
	if !strings.HasPrefix(last.Messages[0].Text(), summaryHead) || len(last.Messages) != len(asked.Messages)+2 {
		t.Errorf("resumed with %d messages, want %d", len(last.Messages), len(asked.Messages)+2)
	}
}

// A model that cannot sum up loses the beginning; a provider that does not answer
// costs nothing.
func TestCompactionFails(t *testing.T) {
	provider := &script{}
	c := scripted(t, provider)
	c.fill(provider, 8, 5000)
	c.engine.window = c.engine.tokens(c.engine.session.Messages)
	n := len(c.engine.session.Messages)
	provider.steps = []step{{err: &llm.Failure{Kind: llm.Auth}}}
	if err := c.prompt(t.Context(), "now"); err == nil {
		t.Fatal("no error")
	}
	if got := len(c.engine.session.Messages); got != n {
		t.Errorf("%d messages are left of %d", got, n)
	}
	provider.steps = []step{{err: &llm.Failure{Kind: llm.TooLong}}, {reply: text("done")}}
	c.wants(c.say("again"), "done")
	last := provider.requests[len(provider.requests)-1]
	valid(t, last.Messages)
	if first := last.Messages[0].Text(); !strings.HasPrefix(first, cutHead) {
		t.Errorf("begins with %.300s", first)
	}
}

// The provider may know better how much it takes.
func TestTooLong(t *testing.T) {
	provider := &script{}
	c := scripted(t, provider)
	c.fill(provider, 10, 5000)
	provider.requests = nil
	provider.steps = []step{{err: &llm.Failure{Kind: llm.TooLong, Status: 400}}, {reply: text("sum")}, {reply: text("done")}}
	c.wants(c.say("now"), "done")
	if before, after := size(provider.requests[0].Messages), size(provider.requests[2].Messages); after > before/2 {
		t.Errorf("%d bytes of %d are left", after, before)
	}
	// Once is enough.
	provider.steps = []step{{err: &llm.Failure{Kind: llm.TooLong}}, {reply: text("sum")}, {err: &llm.Failure{Kind: llm.TooLong}}, {reply: text("no")}}
	err := c.prompt(t.Context(), "again")
	if err == nil || !strings.Contains(err.Error(), "too long") {
		t.Errorf("got %v", err)
	}
}

// One turn that is too large alone: its prompt stays, and what its last tools said.
func TestLongTurn(t *testing.T) {
	provider := &script{}
	c := scripted(t, provider, engine.OptionContext, "10000")
	for i := range 30 {
		reply := call("bash", map[string]string{"command": fmt.Sprintf("printf 'result %d '; head -c 4000 /dev/zero | tr '\\0' x", i)})
		provider.steps = append(provider.steps, step{reply: reply})
	}
	provider.steps = append(provider.steps, step{reply: text("done")})
	c.wants(c.say("do much"), "done")
	for _, r := range provider.requests {
		valid(t, r.Messages)
		if n := size(r.Messages); n > 40_000 {
			t.Errorf("a request has %d bytes", n)
		}
		if !strings.Contains(r.Messages[0].Text(), "do much") {
			t.Error("the prompt is lost")
		}
	}
	last := provider.requests[len(provider.requests)-1].Messages
	if r := last[len(last)-1].Parts[0].Result; r == nil || !strings.HasPrefix(r.Text, "result 29") {
		t.Errorf("the last result is %+v", r)
	}
}

// A window that the tools fill is no reason to forget what was said just now.
func TestWindowFullOfTools(t *testing.T) {
	provider := &script{}
	c := scripted(t, provider, engine.OptionContext, "4000")
	c.engine.config.SystemPrompt = strings.Repeat("x ", 10_000)
	c.fill(provider, 4, 20)
	if n := len(provider.requests); n != 4 {
		t.Errorf("asked %d times for 4 turns", n)
	}
	last := provider.requests[len(provider.requests)-1].Messages
	if len(last) != 7 {
		t.Errorf("%d messages in the last request, want 7", len(last))
	}
}

// What people say while a long turn runs is not cut out of it with the steps.
func TestFollowUpsOutliveSteps(t *testing.T) {
	messages := []llm.Message{{Role: llm.User, Parts: []llm.Part{{Text: host("do much")}}}}
	for i := range 20 {
		id := fmt.Sprint(i)
		results := llm.Message{Role: llm.User, Parts: []llm.Part{{Result: &llm.Result{CallID: id, Text: strings.Repeat("r", 300)}}}}
		if i%5 == 1 {
			results.Parts = append(results.Parts, llm.Part{Text: host(fmt.Sprint("and ", i))})
		}
		messages = append(messages, llm.Message{Role: llm.Assistant, Parts: []llm.Part{{Call: &llm.Call{ID: id, Name: "x", Input: "{}"}}}}, results)
	}
	got := shorten(messages, 3000)
	valid(t, got)
	if n := size(got); n > 3000 || len(got) == len(messages) {
		t.Errorf("%d bytes in %d messages", n, len(got))
	}
	text := transcript(got)
	at := 0
	for _, want := range []string{">do much<", ">and 1<", ">and 6<", ">and 11<", ">and 16<"} {
		i := strings.Index(text[at:], want)
		if i < 0 {
			t.Fatalf("no %q after byte %d of %s", want, at, text)
		}
		at += i
	}
}

func TestShortenKeepsWithinRoom(t *testing.T) {
	var messages []llm.Message
	for i := range 20 {
		id := fmt.Sprint(i)
		role := llm.Message{Role: llm.Assistant, Parts: []llm.Part{{Text: strings.Repeat("t", 500)}, {Call: &llm.Call{ID: id, Name: "x", Input: `{"a":"` + strings.Repeat("i", 3000) + `"}`}}}}
		messages = append(messages, role, llm.Message{Role: llm.User, Parts: []llm.Part{{Result: &llm.Result{CallID: id, Text: strings.Repeat("r", 9000)}}}})
	}
	messages = append([]llm.Message{{Role: llm.User, Parts: []llm.Part{{Text: strings.Repeat("p", 50_000)}}}}, messages...)
	for _, room := range []int{1 << 20, 100_000, 60_000, 20_000, 5000} {
		got := shorten(messages, room)
		valid(t, got)
		if n := size(got); n > room+2000 {
			t.Errorf("%d bytes for a room of %d", n, room)
		}
	}
	if size(messages) < 300_000 {
		t.Error("the messages themselves were changed")
	}
}
