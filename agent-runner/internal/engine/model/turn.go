package model

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/protocol"
)

// What a chat gets to read of what a model says between its steps: people expect
// one answer, and not what the model tells itself on the way. But some models
// give their answer, then do something more, and end with a word or none.
//
// realText is the length, in characters, from which on such a text may be the
// answer itself.
const realText = 300

// turn is one turn under way.
type turn struct {
	*Engine
	to      engine.Turn
	usage   llm.Usage // not reported yet
	between string    // the longest text between two steps
	steps   int
}

// carry makes sure that there is a model, and runs the turn.
func (t *turn) carry(ctx context.Context) error {
	if t.provider == nil {
		if err := t.begin(ctx); err != nil {
			return err
		}
	}
	t.system = t.describe()
	return t.run(ctx)
}

// run asks and does what the model wants until there is an answer and nothing new.
func (t *turn) run(ctx context.Context) error {
	for {
		if t.steps++; t.steps > t.limits.steps {
			text := fmt.Sprintf("I stopped after %d steps without having finished. Say “go on” and I will.", t.limits.steps)
			t.keep(llm.Message{Role: llm.Assistant, Parts: []llm.Part{{Text: text}}}) // so that the model knows
			if t.end(text) {
				return nil
			}
			t.steps = 1
		}
		reply, err := t.next(ctx)
		if f, ok := errors.AsType[*llm.Failure](err); ok && f.Kind == llm.Budget {
			t.config.Log.Printf("model: ask: %v", f)
			text := "I cannot answer now: " + cmp.Or(f.Message, "this group has used up its budget")
			t.keep(llm.Message{Role: llm.Assistant, Parts: []llm.Part{{Text: text}}}) // so that it is not answered some day
			if t.end(text) {
				return nil
			}
			continue
		}
		if err != nil {
			return t.explain(err)
		}
		t.usage.Add(reply.Usage)
		t.keep(reply.Message)
		text := strings.TrimSpace(reply.Text())
		calls := reply.Message.Calls()
		if len(calls) == 0 {
			if t.end(finished(text, reply.Stop)) {
				return nil
			}
			continue
		}
		if len(text) > len(t.between) {
			t.between = text
		}
		var parts []llm.Part
		for _, r := range t.tools.Run(ctx, calls) {
			parts = append(parts, llm.Part{Result: &r})
		}
		if ctx.Err() != nil {
			t.keep(llm.Message{Role: llm.User, Parts: parts})
			return context.Cause(ctx)
		}
		t.keep(llm.Message{Role: llm.User, Parts: append(parts, t.heard(false)...)})
	}
}

// end gives the answer and reports true, unless people have said more meanwhile.
func (t *turn) end(text string) bool {
	more := t.heard(true)
	t.answer(text, len(more) == 0)
	if len(more) == 0 {
		return true
	}
	t.keep(llm.Message{Role: llm.User, Parts: more})
	return false
}

// explain makes the end of a run of what ask returned.
func (t *turn) explain(err error) error {
	if f, ok := errors.AsType[*llm.Failure](err); ok {
		return t.fail(f, "ask")
	}
	if s, ok := errors.AsType[*stalled](err); ok {
		t.config.Log.Printf("model: ask: %v", s)
		return &engine.Error{Text: fmt.Sprintf("The model's provider gave no sign of life for %v: the turn was stopped.", s.after)}
	}
	return err
}

// finished returns a model's last text with what a person has to know about its
// end.
func finished(text string, stop llm.Stop) string {
	switch {
	case stop == llm.StopLength && text == "":
		return "The model ran out of room before it had an answer. Ask for less at once."
	case stop == llm.StopLength:
		return text + "\n\n(It got too long and ends here. Say “go on” for the rest.)"
	case stop == llm.StopRefused && text == "":
		return "The model does not want to answer this."
	}
	return text
}

// answer sends an answer to the chat, and before it a text between two steps if
// that was more of an answer. A last answer without a text still tells the usage.
func (t *turn) answer(text string, last bool) {
	n := utf8.RuneCountInString(t.between)
	if text == "" || n >= realText && n > utf8.RuneCountInString(text) {
		if t.between != "" || last && text == "" {
			t.say(t.between)
		}
	}
	t.between = ""
	if text != "" {
		t.say(text)
	}
}

func (t *turn) say(text string) {
	a := engine.Answer{Text: text}
	if t.usage != (llm.Usage{}) {
		a.Usage = &protocol.Usage{InputTokens: t.usage.Input, OutputTokens: t.usage.Output, CostUSD: t.usage.USD}
	}
	t.usage = llm.Usage{}
	t.to.Answer(a)
}

// next returns the model's next message. A conversation that the provider does
// not take is shortened and sent once more.
func (t *turn) next(ctx context.Context) (llm.Reply, error) {
	if t.over() {
		if err := t.compact(ctx); err != nil {
			return llm.Reply{}, err
		}
	}
	reply, err := t.request(ctx, t.session.Messages)
	f, ok := errors.AsType[*llm.Failure](err)
	if !ok {
		return reply, err
	}
	switch {
	case f.Kind == llm.TooLong:
		t.config.Log.Printf("model: %v; the conversation is shortened", f)
		t.window = max(min(t.window, t.tokens(t.session.Messages))*2/3, leastWindow)
		if err := t.compact(ctx); err != nil {
			return reply, err
		}
		return t.request(ctx, t.session.Messages)
	case f.Kind == llm.Invalid && f.Reason == "":
		// Perhaps something in the memory that this provider does not take: then it
		// would not take any later prompt either.
		current := t.currentTurn()
		if len(current) == len(t.session.Messages) {
			break
		}
		t.config.Log.Printf("model: %v; tried without the conversation before this turn", f)
		if again, err := t.request(ctx, current); err == nil {
			t.replace(current)
			return again, nil
		}
	}
	return reply, err
}

// request asks with messages and learns how the provider counts.
func (t *turn) request(ctx context.Context, messages []llm.Message) (llm.Reply, error) {
	reply, err := t.ask(ctx, llm.Request{Model: t.model, System: t.system, Messages: messages, Tools: t.tools.Tools()})
	if err == nil {
		t.learn(t.bytes(messages), reply.Usage.Input)
	}
	if o, ok := t.provider.(*llm.OpenAI); ok && o.Toolless() && !t.toolless {
		t.toolless = true
		t.config.Log.Printf("model: %s takes no tools: it can only talk", t.model)
	}
	return reply, err
}
