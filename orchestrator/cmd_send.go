package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

// restart is how long commands wait for a daemon that went away meanwhile.
const restart = 60 * time.Second

func (a *app) sendCommand() *cobra.Command {
	var (
		message web.NewMessage
		waiting bool
		timeout time.Duration
	)
	cmd := &cobra.Command{
		Use:   "send -g GROUP TEXT...",
		Short: "Write a message into a group's chat",
		Long: `Write a message into a group's chat, as a person would.

TEXT "-" is read from the standard input. With --wait the answer comes on the
standard output, and a restart of the daemon meanwhile does no harm. Commands such
as /status are answered by Berth itself, at once; /help lists them.`,
		Example: `  berth send -g main what can you do?
  berth send -g family --wait "@Andy what is for dinner?"
  git log -1 | berth send -g work --sender ci -`,
		Args: cobra.MinimumNArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			if err := berth.ValidFolder(message.Group); err != nil {
				return misusef("-g: %s", err)
			}
			if timeout <= 0 {
				return misusef("--timeout %v: give a duration above zero, such as 20s", timeout)
			}
			text := strings.Join(args, " ")
			if text == "-" {
				data, err := io.ReadAll(io.LimitReader(a.stdin, berth.MaxText+2))
				if err != nil {
					return fmt.Errorf("read the message: %w", err)
				}
				text = strings.TrimSuffix(string(data), "\n")
			}
			if err := checkText(text); err != nil {
				return err
			}
			message.Text = text
			message.ID = newMessageID()
			cfg, client, err := a.client()
			if err != nil {
				return err
			}
			if waiting {
				return a.sendAndWait(ctx, cfg, client, message, timeout)
			}
			ctx, cancel := brief(ctx)
			defer cancel()
			accepted, err := client.Send(ctx, message)
			if err != nil {
				return explain(cfg, err)
			}
			if accepted.Command {
				return a.printAnswer(accepted.Texts)
			}
			text = fmt.Sprintf("stored as #%d", accepted.Seq)
			if !accepted.Wakes {
				text += "; kept as context until a message with " + trigger(ctx, client, message.Group) + " comes"
			}
			_, err = fmt.Fprintln(a.stdout, text)
			return err
		}),
	}
	f := cmd.Flags()
	f.StringVarP(&message.Group, "group", "g", "", "the group's folder")
	f.StringVar(&message.Sender, "sender", "", "the sender's name (default: the operator)")
	f.BoolVar(&waiting, "wait", false, "wait for the answer and print it")
	f.DurationVar(&timeout, "timeout", 5*time.Minute, "how long --wait waits")
	_ = cmd.MarkFlagRequired("group")
	return cmd
}

// newMessageID makes the id here, so that a repeated POST stores nothing twice.
func newMessageID() string { return "CLI" + strings.ToUpper(berth.NewID(12)) }

// checkText refuses, before anything is sent, what the daemon would refuse.
func checkText(text string) error {
	if err := berth.ValidText(text); err != nil {
		return misusef("%s", err)
	}
	return nil
}

// trigger returns what wakes the group, for a hint to a person.
func trigger(ctx context.Context, client *web.Client, folder string) string {
	groups, err := client.Groups(ctx)
	if err == nil {
		for _, g := range groups {
			if g.Folder == folder && g.Trigger != "" {
				return cleanLine(g.Trigger)
			}
		}
	}
	return "the trigger"
}

func (a *app) sendAndWait(ctx context.Context, cfg Config, client *web.Client, message web.NewMessage, timeout time.Duration) error {
	errLate := fmt.Errorf("no answer within %v: the message stays, see \"berth status\"", timeout)
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errLate)
	defer cancel()
	var accepted web.Accepted
	away := func() { a.note("no daemon answers: trying again until %v have passed", timeout) }
	err := retry(ctx, timeout, away, func() (err error) {
		accepted, err = client.Send(ctx, message)
		return err
	})
	if err != nil {
		return explain(cfg, err)
	}
	if accepted.Command {
		return a.printAnswer(accepted.Texts)
	}
	if !accepted.Wakes {
		return fmt.Errorf("kept as context: no trigger (%s)", trigger(ctx, client, message.Group))
	}
	answer, err := waitForAnswer(ctx, client, accepted.Seq)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return explain(cfg, err)
	case answer.State == web.AnswerContext:
		return fmt.Errorf("kept as context: no trigger (%s)", trigger(ctx, client, message.Group))
	}
	if err := a.printAnswer(answer.Texts); err != nil {
		return err
	}
	if answer.State == web.AnswerFailed {
		return answerError(answer)
	}
	return nil
}

func (a *app) printAnswer(texts []string) error {
	if len(texts) == 0 {
		return nil
	}
	_, err := fmt.Fprintln(a.stdout, a.forPeople(strings.Join(texts, "\n\n")))
	return err
}

func answerError(answer web.Answer) error {
	if answer.Error == "" {
		return errors.New("the agent failed: see \"berth logs GROUP\"")
	}
	return fmt.Errorf("the agent failed: %s", cleanLine(answer.Error))
}

// waitForAnswer returns what became of message seq once that is settled. A
// daemon that restarts meanwhile is waited for.
func waitForAnswer(ctx context.Context, client *web.Client, seq int64) (web.Answer, error) {
	for {
		var answer web.Answer
		err := retry(ctx, restart, nil, func() (err error) {
			answer, err = client.Answer(ctx, seq, 30*time.Second)
			return err
		})
		if err != nil || answer.State != web.AnswerPending {
			return answer, err
		}
	}
}
