package program

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"berth/agent-runner/internal/engine"
)

// Watch is what Await looks at. Nil channels and no Tap are fine.
type Watch struct {
	Signs   <-chan struct{} // of life
	First   time.Duration   // until the first
	Silence time.Duration   // between two; 0: only the first counts
	Tap     *Tap
}

// Silent is the error of a program that gave no sign of life for too long.
type Silent struct {
	Name  string
	After time.Duration
}

func (s *Silent) Error() string {
	return fmt.Sprintf("%s gave no sign of life for %v", s.Name, s.After)
}

// ErrHopeless is the end of a turn whose calls to the provider fail again and
// again.
var ErrHopeless = errors.New("the model's provider refuses")

// Await returns nil when done is closed, and else why it will not be: the cause
// of ctx's end, a *Silent, ErrHopeless, or what ended the program.
func (p *Program) Await(ctx context.Context, done <-chan struct{}, w Watch) error {
	timer := time.NewTimer(w.First)
	defer timer.Stop()
	patience := w.First
	for {
		select {
		case <-done:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-w.Signs:
			if w.Silence > 0 {
				patience = w.Silence
				timer.Reset(patience)
			}
		case <-w.Tap.News():
			if w.Tap.Hopeless() {
				return ErrHopeless
			}
		case <-timer.C:
			return &Silent{p.spec.Name, patience}
		case <-p.gone:
			select {
			case <-done: // with its last words
				return nil
			default:
				return p.Fault()
			}
		}
	}
}

// status finds an HTTP status in a program's prose.
var status = regexp.MustCompile(`(?i)(?:API Error:?|status(?: code)?:?|HTTP|rejected|\()\s*\(?(4\d\d|5\d\d)\b`)

// Explain makes an error of what a program said about its failure, and of how the
// provider treated it.
func (p *Program) Explain(said string, tap *Tap) error {
	refusal, known := tap.Of(said)
	if !known {
		if m := status.FindStringSubmatch(said); m != nil {
			refusal.Status, _ = strconv.Atoi(m[1])
			refusal.Message, known = clip(said, maxWords), true
		}
	}
	p.spec.Log.Printf("%s failed: %q, and of the provider: %+v", p.spec.Name, clip(said, maxShown), refusal)
	if !known && strings.Contains(said+p.Stderr(), "SIGKILL") { // a part of it
		return p.outOfMemory()
	}
	if !known {
		return &engine.Error{Text: fmt.Sprintf("%s failed: %s", p.spec.Name, clip(said, maxWords))}
	}
	if polite := refusal.Polite(); polite != "" {
		return &Polite{polite}
	}
	return refusal.Err()
}

// Polite is a failure that the chat is to be told of as an answer: nobody has to
// do anything about it, and trying again does not help.
type Polite struct{ Text string }

func (p *Polite) Error() string { return p.Text }

// Settle ends a turn with err: a Polite is an answer.
func Settle(err error, to engine.Turn) error {
	if polite, ok := errors.AsType[*Polite](err); ok {
		to.Answer(engine.Answer{Text: polite.Text})
		return nil
	}
	return err
}

// Failed makes a *Silent or ErrHopeless an error for the host, with what the tap
// knows.
func (p *Program) Failed(err error, tap *Tap) error {
	silent, ok := errors.AsType[*Silent](err)
	switch {
	case errors.Is(err, ErrHopeless):
		return p.Explain(err.Error(), tap)
	case ok:
		if _, refused := tap.Last(); refused {
			return p.Explain(err.Error(), tap)
		}
		p.spec.Log.Print(err)
		return &engine.Error{Text: silent.Error() + ": the turn was stopped."}
	}
	return err
}
