package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

// chatPlain sends each line of stdin as a message and prints the answers.
func (a *app) chatPlain(ctx context.Context, client *web.Client, group web.Group) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var streams sync.WaitGroup
	defer streams.Wait()
	defer cancel(nil)

	printer := &answerPrinter{app: a, changed: make(chan struct{}, 1)}
	var wakes []int64       // messages to be answered
	var expected [][]string // that are known
	following, failed := false, false
	lines, readErr := a.readLines(ctx)
	for open := true; open; {
		var line string
		select {
		case line, open = <-lines:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if strings.TrimSpace(line) == "" {
			continue
		}
		if err := checkText(line); err != nil {
			a.note("berth: not sent: %s", err)
			failed = true
			continue
		}
		message := web.NewMessage{Group: group.Folder, Text: line, ID: newMessageID()}
		var accepted web.Accepted
		err := retry(ctx, restart, nil, func() (err error) {
			accepted, err = client.Send(ctx, message)
			return err
		})
		if err != nil {
			return err
		}
		switch {
		case accepted.Command:
			expected = append(expected, accepted.Texts)
		case accepted.Wakes:
			wakes = append(wakes, accepted.Seq)
		default:
			a.note("kept as context: no trigger (%s)", group.Trigger)
		}
		if !following {
			// Everything that answers comes after the first message.
			following = true
			streams.Go(func() {
				if err := follow(ctx, client, group.Folder, accepted.Seq, printer.handle); ctx.Err() == nil {
					cancel(err)
				}
			})
		}
	}
	select {
	case err := <-readErr:
		if err != nil {
			return err
		}
	case <-ctx.Done(): // the reader gave up
		return context.Cause(ctx)
	}
	for _, seq := range wakes {
		answer, err := waitForAnswer(ctx, client, seq)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return err
		}
		expected = append(expected, answer.Texts)
		if answer.State == web.AnswerFailed {
			a.note("berth: %s", answerError(answer))
			failed = true
		}
	}
	if err := printer.settle(ctx, expected); err != nil {
		return err
	}
	if failed {
		return errTold
	}
	return nil
}

// readLines reads stdin in the background, because a read cannot be
// interrupted. After lines is closed there is one value in the second channel.
func (a *app) readLines(ctx context.Context) (<-chan string, <-chan error) {
	lines, result := make(chan string), make(chan error, 1)
	go func() {
		defer close(lines)
		scanner := bufio.NewScanner(a.stdin)
		scanner.Buffer(nil, 2*berth.MaxText)
		for scanner.Scan() {
			select {
			case lines <- scanner.Text():
			case <-ctx.Done():
				return
			}
		}
		err := scanner.Err()
		if errors.Is(err, bufio.ErrTooLong) {
			err = errors.New("a line of the input is larger than 64 KiB")
		}
		result <- err
	}()
	return lines, result
}

// answerPrinter prints what the assistant says, in the chat's order.
type answerPrinter struct {
	app     *app
	changed chan struct{} // holds a token after something was printed

	mu      sync.Mutex
	printed []string
}

func (p *answerPrinter) handle(e web.Event) {
	if e.Message == nil || !e.Message.Bot {
		return
	}
	p.print(e.Message.Text)
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

func (p *answerPrinter) print(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintln(p.app.stdout, p.app.forPeople(text))
	p.printed = append(p.printed, text)
}

// missing returns the texts that were not printed, each as often as it is
// missing, and those that were not printed even once.
func (p *answerPrinter) missing(expected []string) (some, never []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	printed := slices.Clone(p.printed)
	for _, text := range expected {
		// A channel may put the assistant's name before the text.
		is := func(s string) bool { return strings.HasSuffix(s, text) }
		if i := slices.IndexFunc(printed, is); i >= 0 {
			printed = slices.Delete(printed, i, i+1)
			continue
		}
		some = append(some, text)
		if !slices.ContainsFunc(p.printed, is) && !slices.Contains(never, text) {
			never = append(never, text)
		}
	}
	return some, never
}

// settle returns when the answers are printed. They reach the chat a moment
// after they are known; one that does not is printed from what is known. Two
// messages with equal texts may have been answered together, so for a second
// copy it waits only while more keeps coming.
func (p *answerPrinter) settle(ctx context.Context, answers [][]string) error {
	const quiet, patience = 500 * time.Millisecond, 2 * time.Second
	expected := slices.Concat(answers...)
	for begun := time.Now(); ; {
		some, never := p.missing(expected)
		if len(some) == 0 {
			return nil
		}
		left := patience - time.Since(begun)
		if len(never) == 0 {
			left = quiet
		}
		timer := time.NewTimer(left)
		select {
		case <-p.changed:
			timer.Stop()
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
			for _, text := range never {
				p.print(text)
			}
			return nil
		}
	}
}
