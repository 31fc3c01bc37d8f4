package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/rig"
	"berth/orchestrator/internal/web"
)

// breath is the mean time between an answer and the next message of a chat.
const breath = 100 * time.Millisecond

// phase is what the attacker does while the others talk.
type phase string

const (
	calm  phase = "calm"  // nothing
	work  phase = "work"  // what any agent may do: it computes, with all the processor time that it has
	storm phase = "storm" // its worst
)

// victims are the groups that only talk.
type victims struct {
	client *web.Client
	out    io.Writer

	mu     sync.Mutex
	sent   map[string][]string // texts asked for, by folder
	faults []string
	phase  phase
	took   map[phase][]time.Duration
	told   int           // of the current ones
	slow   time.Duration // the slowest answer to a question for the status
}

func newVictims(c *web.Client, out io.Writer) *victims {
	return &victims{client: c, out: out, sent: make(map[string][]string), phase: calm, took: make(map[phase][]time.Duration)}
}

func (v *victims) enter(p phase) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.phase, v.told = p, 0
}

func (v *victims) now() phase {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.phase
}

// greet starts all containers: what follows is warm.
func (v *victims) greet(ctx context.Context) error {
	for _, f := range folders {
		if _, err := v.ask(ctx, f); err != nil {
			return err
		}
	}
	return nil
}

// talk lets each victim write one message after the other until talk ends. Messages
// under way then are still answered: ctx, not talk.
func (v *victims) talk(ctx, talk context.Context) *sync.WaitGroup {
	var wg sync.WaitGroup
	for _, f := range folders {
		wg.Go(func() {
			for pause(talk, time.Duration(rand.Int64N(int64(2*breath)))) == nil {
				now := v.now()
				took, err := v.ask(ctx, f)
				v.mu.Lock()
				switch {
				case ctx.Err() != nil:
				case err != nil:
					v.faults = append(v.faults, err.Error())
				default:
					v.took[now] = append(v.took[now], took)
				}
				v.mu.Unlock()
			}
		})
	}
	wg.Go(func() { // does the daemon answer its operator?
		for pause(talk, 100*time.Millisecond) == nil {
			begun := time.Now()
			_, err := v.client.Status(ctx)
			v.mu.Lock()
			if err != nil && ctx.Err() == nil {
				v.faults = append(v.faults, err.Error())
			}
			v.slow = max(v.slow, time.Since(begun))
			v.mu.Unlock()
		}
	})
	return &wg
}

// ask has a group say something, and returns how long that took from the message
// to its answer.
func (v *victims) ask(ctx context.Context, folder string) (time.Duration, error) {
	v.mu.Lock()
	text := fmt.Sprintf("answer-%s-%05d", folder, len(v.sent[folder]))
	v.sent[folder] = append(v.sent[folder], text)
	v.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, 2*rig.Patience, fmt.Errorf("%s: no answer to %s within %v", folder, text, 2*rig.Patience))
	defer cancel()
	begun := time.Now()
	m, err := v.client.Send(ctx, web.NewMessage{Group: folder, Text: "say " + text})
	if err != nil {
		return 0, err
	}
	for {
		a, err := v.client.Answer(ctx, m.Seq, rig.Patience)
		if err != nil {
			return 0, err
		}
		switch {
		case a.State == web.AnswerDone && slices.Equal(a.Texts, []string{text}):
			return time.Since(begun), nil
		case a.State != web.AnswerPending:
			return 0, fmt.Errorf("%s asked for %s and got %+v", folder, text, a)
		}
	}
}

// lately returns how many answers there were in this phase, and their latency since
// it was last asked for.
func (v *victims) lately() (n int, p50, p99 time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := v.took[v.phase]
	recent := all[min(v.told, len(all)):]
	v.told = len(all)
	return len(all), quantile(recent, 0.5), quantile(recent, 0.99)
}

// audit returns what is wrong with the victims' chats, and how many messages were
// asked for.
func (v *victims) audit(ctx context.Context) (faults []string, n int, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	faults = slices.Clone(v.faults)
	for _, f := range folders {
		messages, err := history(ctx, v.client, f)
		if err != nil {
			return nil, 0, err
		}
		n += len(v.sent[f])
		faults = append(faults, compare(f, v.sent[f], messages)...)
	}
	return faults, n, nil
}

// compare holds a chat against what was asked for in it.
func compare(folder string, asked []string, messages []berth.Message) (faults []string) {
	questions, answers := make(map[string]int), make(map[string]int)
	for _, m := range messages {
		if m.Bot {
			answers[m.Text]++
		} else {
			questions[strings.TrimPrefix(m.Text, "say ")]++
		}
	}
	for _, text := range asked {
		if questions[text] != 1 || answers[text] != 1 {
			faults = append(faults, fmt.Sprintf("%s: %s is stored %d times and answered %d times", folder, text, questions[text], answers[text]))
		}
		delete(questions, text)
		delete(answers, text)
	}
	for text := range questions {
		faults = append(faults, fmt.Sprintf("%s: nobody wrote %.60q", folder, text))
	}
	for text := range answers {
		faults = append(faults, fmt.Sprintf("%s: nobody asked for %.60q", folder, text))
	}
	return faults
}

// history returns all messages of a group's chat.
func history(ctx context.Context, client *web.Client, folder string) (messages []berth.Message, err error) {
	ctx, cancel := context.WithTimeout(ctx, rig.Patience)
	defer cancel()
	for e, err := range client.Chat(ctx, folder, 0) {
		if err != nil {
			return nil, err
		}
		if e.Type == web.EventTyping {
			break // all that was there came before
		}
		messages = append(messages, *e.Message)
	}
	return messages, nil
}

// quantile returns the value below which the share q lies, or 0 of nothing.
func quantile(values []time.Duration, q float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}
