package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

func (a *app) chatCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "chat [GROUP]",
		Short: "Chat with a group's agent",
		Long: `Chat with a group's agent; GROUP is "main" if not given.

In a terminal, Ctrl-D or /quit leaves. Otherwise every line of the standard
input is a message, the answers come on the standard output, and at the end of
the input the command waits for the answers that are still to come.`,
		Example: `  berth chat
  berth chat family
  echo "@Andy good morning" | berth chat family`,
		Args: cobra.MaximumNArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			folder := berth.MainFolder
			if len(args) == 1 {
				folder = args[0]
			}
			if err := berth.ValidFolder(folder); err != nil {
				return misusef("%s", err)
			}
			cfg, client, err := a.client()
			if err != nil {
				return err
			}
			group, err := findGroup(ctx, client, folder)
			if err != nil {
				return explain(cfg, err)
			}
			in, isTerminal := terminal(a.stdin)
			out, alsoOut := terminal(a.stdout)
			if !isTerminal || !alsoOut {
				return explain(cfg, a.chatPlain(ctx, client, group))
			}
			return explain(cfg, chatInTerminal(ctx, in, out, &terminalChat{
				client: client, group: group, name: cfg.AssistantName, colour: !cfg.NoColor, start: time.Now(),
			}))
		}),
	}
}

func findGroup(ctx context.Context, client *web.Client, folder string) (web.Group, error) {
	ctx, cancel := brief(ctx)
	defer cancel()
	groups, err := client.Groups(ctx)
	if err != nil {
		return web.Group{}, err
	}
	for _, g := range groups {
		if g.Folder == folder {
			return g, nil
		}
	}
	return web.Group{}, fmt.Errorf("no group is called %q: see \"berth groups ls\", or add it with \"berth groups add %[1]s\"", folder)
}

// chatInTerminal puts the terminal into raw mode while c runs.
func chatInTerminal(ctx context.Context, in, out *os.File, c *terminalChat) error {
	state, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return fmt.Errorf("prepare the terminal: %w", err)
	}
	defer func() { _ = term.Restore(int(in.Fd()), state) }()
	c.term = term.NewTerminal(struct {
		readOnly
		writeOnly
	}{readOnly{in}, writeOnly{out}}, "")

	resize := make(chan os.Signal, 1)
	signal.Notify(resize, syscall.SIGWINCH)
	defer signal.Stop(resize)
	size := func() {
		if width, height, err := term.GetSize(int(out.Fd())); err == nil && width > 0 {
			_ = c.term.SetSize(width, height)
		}
	}
	size()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		for {
			select {
			case <-resize:
				size()
			case <-ctx.Done():
				return
			}
		}
	}()
	err = c.run(ctx)
	_, _ = out.WriteString("\r\x1b[K") // wipes the prompt that nobody answers
	return err
}

type readOnly struct{ f *os.File }

func (r readOnly) Read(p []byte) (int, error) { return r.f.Read(p) }

type writeOnly struct{ f *os.File }

func (w writeOnly) Write(p []byte) (int, error) { return w.f.Write(p) }

// follow hands every event of a chat after message seq to handle, each message
// once, also over restarts of the daemon. It returns when ctx ends, the daemon
// stays away, or it refuses.
func follow(ctx context.Context, client *web.Client, folder string, seq int64, handle func(web.Event)) error {
	const shortest, longest = 50 * time.Millisecond, 2 * time.Second
	pause, contact := shortest, time.Now()
	for {
		begun := time.Now()
		var last error
		for event, err := range client.Chat(ctx, folder, seq) {
			if err != nil {
				last = err
				break
			}
			contact, pause = time.Now(), shortest
			if m := event.Message; m != nil && m.Seq > 0 {
				if m.Seq <= seq {
					continue
				}
				seq = m.Seq
			}
			handle(event)
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case last != nil && !unavailable(last):
			return last
		case time.Since(begun) > time.Second: // a quiet stream was a contact too
			contact, pause = time.Now(), shortest
		case time.Since(contact) > restart:
			return last
		}
		if err := wait(ctx, pause); err != nil {
			return err
		}
		pause = min(2*pause, longest)
	}
}
