// Package engine says what the runner needs of an agent program.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"berth/agent-runner/internal/reap"
	"berth/agent-runner/protocol"
)

// Engine drives one agent program for the life of one run.
//
// Calls of Prompt and Close come one after the other and never overlap, with one
// exception: a Prompt that did not return within a moment after its ctx ended is
// left behind, the program ends, and Close is not called. The same goes for the
// Compact of a Compactor.
type Engine interface {
	// Prompt runs one turn and returns when it is over: nothing of to is
	// called after that. The first Prompt of a run with a Config.SessionID
	// continues that session; any other first Prompt makes a session, and
	// later ones continue it.
	//
	// An error ends the run. An *Error carries a class for the host; a
	// session that is gone has protocol.ClassStaleSession. When ctx ends,
	// Prompt stops its work, tools included, and returns soon: with the cause
	// of ctx's end if the engine can take another Prompt, else with another
	// error.
	Prompt(ctx context.Context, text string, to Turn) error

	// Close ends the agent program. It is called once.
	Close() error
}

// Steerer is an Engine that takes input while a turn runs.
type Steerer interface {
	Engine

	// Steer hands text to the turn that runs, and reports whether the engine
	// has it now; if not, it becomes a turn of its own. It is called while
	// Prompt runs and after Turn.Accept, from another goroutine than Prompt's,
	// must not wait for the engine's answer, and must not call the Turn.
	Steer(text string) bool
}

// Compactor is an Engine whose conversation can be made shorter.
type Compactor interface {
	Engine

	// Compact makes the conversation shorter now, and returns when that is over.
	// It is called as Prompt is, with the same meaning of the session, of ctx and of
	// an error; of to it calls Accept and Session only. Whatever else is in the way
	// of it, the conversation is as it was and goes on.
	Compact(ctx context.Context, to Turn) (Compaction, error)

	// Compacted reports whether the conversation was made shorter since the last
	// call, also by the engine itself. It is called between turns.
	Compacted() bool
}

// Compaction is what came of a Compact.
type Compaction struct {
	Outcome string // one of the protocol's
	Reason  string // of protocol.CompactionFailed, for people
}

// Turn takes what happens in a turn. Its methods may be called from many
// goroutines while Prompt runs. They return when the host can see the effect,
// which is then in the order of the calls.
type Turn interface {
	// Accept says that the engine has the prompt: losing it is now the engine's
	// fault, and the host is told so. An answer, and the end of a turn without
	// an error, imply it.
	Accept()

	// Session names the session, as soon as it is known and whenever it changes.
	Session(id string)

	// Answer sends one answer to the chat. A turn may have any number.
	Answer(Answer)
}

// Aside is a Turn whose answers are not for the chat.
type Aside struct{ Turn }

// Answer implements Turn.
func (Aside) Answer(Answer) {}

// Answer is one answer of a turn.
type Answer struct {
	Text  string
	Usage *protocol.Usage // what the turn cost since the last answer; may be nil
}

// Config is what an engine gets to know about its run.
type Config struct {
	protocol.Input                // all but the prompt
	WorkDir        string         // the group's folder
	Home           string         // the group's own, kept between runs
	Gateway        string         // address of the way out, as in forward.Environ; empty: there is none
	Tools          []ToolServer   // what the agent gets beside its own tools
	Children       *reap.Children // starts and waits for every process
	Log            *log.Logger
}

// ToolServer is a program that offers tools by the Model Context Protocol on
// stdin and stdout. The engine starts it, or has its agent start it.
type ToolServer struct {
	Name    string
	Command []string          // program and arguments
	Env     map[string]string // beside what the engine gives every tool
}

// Options of Config.EngineOptions. All may be missing.
const (
	OptionModel    = "model"          // the model's name
	OptionProvider = "provider"       // "anthropic" or "openai": whose protocol the model's endpoint speaks
	OptionCommand  = "command"        // of an agent that the image's owner brings, split like a shell does
	OptionSession  = "sessionTimeout" // Go durations: until a session is there,
	OptionFirst    = "firstTimeout"   // until the first sign of life in a turn,
	OptionSilence  = "silenceTimeout" // between two signs of life
	OptionSettle   = "settleTimeout"  // until the answer's final form is there after the turn's end
	OptionContext  = "contextTokens"  // how many tokens the model takes at most: 4000 or more
)

// ContextTokens returns how many tokens the model takes at most: what OptionContext
// says, else what is usual where provider's protocol is spoken. Errors are of
// protocol.ClassInput.
func ContextTokens(options map[string]string, provider string) (int, error) {
	const least, usual, anthropic = 4_000, 128_000, 200_000
	text := options[OptionContext]
	if text == "" {
		if provider == "anthropic" {
			return anthropic, nil
		}
		return usual, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least {
		return 0, &Error{Class: protocol.ClassInput, Text: fmt.Sprintf("%s is %q: it must be a number of at least %d", OptionContext, text, least)}
	}
	return n, nil
}

// Error is a failure of the agent program that the host can act on.
type Error struct {
	Class      string // one of the protocol's classes, or empty
	Text       string // for a person
	RetryAfter time.Duration
}

func (e *Error) Error() string { return e.Text }

// Failed returns the frame that reports err.
func Failed(err error) protocol.Frame {
	f := protocol.Frame{Type: protocol.TypeOutput, Status: protocol.StatusError, Error: err.Error()}
	if failure, ok := errors.AsType[*Error](err); ok {
		f.ErrorClass, f.RetryAfterMS = failure.Class, failure.RetryAfter.Milliseconds()
	}
	return f
}

// Open makes an engine. It checks the configuration and starts nothing slow:
// that is for the first Prompt.
type Open func(Config) (Engine, error)

// Registry holds the engines by name.
type Registry map[string]Open

// Open opens the engine that the input names, or fallback if it leaves the
// choice to the runner.
func (r Registry) Open(c Config, fallback string) (Engine, error) {
	name := c.Engine
	if name == "" || name == "auto" {
		name = fallback
	}
	open, ok := r[name]
	if !ok {
		return nil, &Error{
			Class: protocol.ClassInput,
			Text:  fmt.Sprintf("unknown engine %q: this image has %s", name, strings.Join(slices.Sorted(maps.Keys(r)), ", ")),
		}
	}
	return open(c)
}
