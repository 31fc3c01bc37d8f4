// Package llm speaks to model providers: one way to say what a conversation is,
// and two protocols that carry it, Anthropic's messages and OpenAI's chat
// completions, which most other providers and local servers speak too.
//
// What a provider sends is bounded everywhere: it may be any server.
package llm

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
)

// Role says whose message it is.
type Role string

// The roles.
const (
	User      Role = "user"      // people, and the results of tools
	Assistant Role = "assistant" // the model
)

// Message is one message of a conversation. Roles take turns, the first message
// is a user's, and each call is answered by a result in the next message, before
// its texts.
type Message struct {
	Role  Role   `json:"role"`
	Parts []Part `json:"parts"`
}

// Part is a part of a message: the first that is set of these.
type Part struct {
	Text   string  `json:"text,omitempty"`
	Call   *Call   `json:"call,omitempty"`   // of an assistant's message
	Result *Result `json:"result,omitempty"` // of a user's message

	// Own is what only its provider understands and wants back within the turn.
	Own json.RawMessage `json:"-"`
}

// Call is the model's wish to run a tool.
type Call struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	Input string `json:"input"` // as the model wrote it: a JSON object, if all is well

	// Extra is the provider's own, to be sent back; for no other provider.
	Extra json.RawMessage `json:"extra,omitempty"`
}

// Result is what a tool answered.
type Result struct {
	CallID string `json:"callId"`
	Text   string `json:"text"`
	Failed bool   `json:"failed,omitempty"`
}

// Tool is a tool as a model gets to know it.
type Tool struct {
	Name        string          // 1 to 64 letters, digits, _ or -
	Description string          // for the model
	Schema      json.RawMessage // of the input, a JSON schema of type object
}

// Request asks for one message.
type Request struct {
	Model    string
	System   string
	Messages []Message
	Tools    []Tool
}

// Reply is one message of the model.
type Reply struct {
	Message Message
	Stop    Stop
	Usage   Usage
}

// Text returns the reply's text.
func (r Reply) Text() string { return r.Message.Text() }

// Text returns the message's texts, one after the other.
func (m Message) Text() string {
	text := ""
	for _, p := range m.Parts {
		text += p.Text
	}
	return text
}

// Calls returns the message's calls.
func (m Message) Calls() []Call {
	var calls []Call
	for _, p := range m.Parts {
		if p.Call != nil {
			calls = append(calls, *p.Call)
		}
	}
	return calls
}

// Stop says why a message ended.
type Stop string

// The reasons that make a difference. Any other one is a usual end.
const (
	StopLength  Stop = "length"  // the model may not write more at once
	StopRefused Stop = "refused" // the model or its provider does not want to
)

// Usage is what a message cost.
type Usage struct {
	Input  int64 // tokens, cached ones too
	Output int64
	USD    float64 // 0: not said
}

// Add adds v to u.
func (u *Usage) Add(v Usage) {
	u.Input += v.Input
	u.Output += v.Output
	u.USD += v.USD
}

// Provider is a model provider. It is safe for concurrent use.
type Provider interface {
	// Name is the provider's name, for people.
	Name() string

	// Stream asks for one message and returns it when it is complete. Meanwhile
	// seen is called, from the same goroutine, with each piece of text, and with
	// "" for any other sign of life. An error is a *Failure, or the cause of
	// ctx's end.
	Stream(ctx context.Context, r Request, seen func(text string)) (Reply, error)

	// Models returns the names of the models that there are, as the provider
	// orders them.
	Models(ctx context.Context) ([]string, error)
}

// Kind says what can be done about a failure.
type Kind string

// The kinds.
const (
	Unreachable Kind = "unreachable" // no connection, or it broke before an answer
	Broken      Kind = "broken"      // the answer broke off, or is no answer
	Server      Kind = "server"      // the provider failed
	RateLimit   Kind = "rate limit"  // too much in too short a time
	Overloaded  Kind = "overloaded"  // the provider has more to do than it can
	TooLong     Kind = "too long"    // the conversation does not fit into the model
	Invalid     Kind = "invalid"     // the provider does not take the request
	Auth        Kind = "auth"        // no key, or a refused one
	Credit      Kind = "credit"      // the account has no money left
	Budget      Kind = "budget"      // the group has used up what the operator allows
	NoModel     Kind = "no model"    // no such model
	Certificate Kind = "certificate" // the provider's certificate is not trusted
)

// Failure is a call that failed.
type Failure struct {
	Kind       Kind
	Status     int           // of HTTP; 0 if there was none
	Reason     string        // of Berth's gateway, if it refused
	Message    string        // for the log: what the provider or the machine said, shortened
	RetryAfter time.Duration // the provider's wish; 0: not said
}

func (f *Failure) Error() string {
	text := string(f.Kind)
	if f.Status != 0 {
		text += fmt.Sprintf(", status %d", f.Status)
	}
	if f.Reason != "" {
		text += ", refused by the gateway (" + f.Reason + ")"
	}
	if f.Message != "" {
		text += ": " + f.Message
	}
	return text
}
