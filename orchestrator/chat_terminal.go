package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

const (
	historyShown = 10
	historyQuiet = 150 * time.Millisecond
)

// terminalChat is a chat with a person at a terminal.
type terminalChat struct {
	term   *term.Terminal
	client *web.Client
	group  web.Group
	name   string // the assistant's
	colour bool
	start  time.Time // what is older is history

	mu   sync.Mutex
	mine map[string]bool // ids of messages that are on the screen already
}

const chatHelp = `/help  this text
/quit  leave (or Ctrl-D); the agent goes on
/commands  what Berth itself answers, such as /status and /stop
Everything else is a message to the group.`

// run returns nil when the person leaves.
func (c *terminalChat) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var workers sync.WaitGroup
	defer workers.Wait()
	defer cancel(nil)
	c.mine = make(map[string]bool)
	c.setTyping(false)
	c.say(c.dim("chatting with " + c.group.Name + "; /help for help, Ctrl-D leaves"))

	events, outgoing, lines := make(chan web.Event), make(chan string, 64), make(chan string)
	workers.Go(func() {
		err := follow(ctx, c.client, c.group.Folder, 0, func(e web.Event) {
			select {
			case events <- e:
			case <-ctx.Done():
			}
		})
		cancel(err)
	})
	workers.Go(func() { c.sendAll(ctx, outgoing) })
	go func() { // not waited for: a read of the terminal cannot be interrupted
		defer close(lines)
		for {
			line, err := c.term.ReadLine()
			if err != nil && !errors.Is(err, term.ErrPasteIndicator) {
				return
			}
			select {
			case lines <- line:
			case <-ctx.Done():
				return
			}
		}
	}()

	var history []*berth.Message
	quiet := time.NewTimer(time.Second)
	defer quiet.Stop()
	inHistory := true
	endHistory := func() {
		for _, m := range history {
			c.say(c.dim(c.render(m, false)))
		}
		history, inHistory = nil, false
	}
	for {
		select {
		case <-ctx.Done():
			c.setTyping(false)
			return context.Cause(ctx)
		case <-quiet.C:
			endHistory()
		case e := <-events:
			if m := e.Message; inHistory && m != nil && m.Time.Before(c.start) {
				history = append(history[max(0, len(history)+1-historyShown):], m)
				quiet.Reset(historyQuiet)
				continue
			}
			if inHistory {
				endHistory()
			}
			c.show(e)
		case line, ok := <-lines:
			switch text := strings.TrimSpace(line); {
			case !ok || text == "/quit":
				return nil
			case text == "/help":
				c.say(c.dim(chatHelp))
			case text == "/commands":
				outgoing <- "/help"
			case text != "":
				outgoing <- line
			}
		}
	}
}

// sendAll sends one line after the other.
func (c *terminalChat) sendAll(ctx context.Context, lines <-chan string) {
	for {
		var line string
		select {
		case line = <-lines:
		case <-ctx.Done():
			return
		}
		if err := checkText(line); err != nil {
			c.say(c.paint(red, "not sent: "+err.Error()))
			continue
		}
		message := web.NewMessage{Group: c.group.Folder, Text: line, ID: newMessageID()}
		c.mu.Lock()
		c.mine[message.ID] = true
		c.mu.Unlock()
		var accepted web.Accepted
		away := func() { c.say(c.dim("the daemon is away: trying again")) }
		err := retry(ctx, restart, away, func() (err error) {
			accepted, err = c.client.Send(ctx, message)
			return err
		})
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			c.say(c.paint(red, "not sent: "+err.Error()))
		case !accepted.Wakes && !accepted.Command:
			c.say(c.dim(fmt.Sprintf("kept as context: no trigger (%s)", c.group.Trigger)))
		}
	}
}

func (c *terminalChat) show(e web.Event) {
	switch {
	case e.Type == web.EventTyping:
		c.setTyping(e.Typing)
	case e.Message != nil:
		c.mu.Lock()
		mine := c.mine[e.Message.ID]
		delete(c.mine, e.Message.ID)
		c.mu.Unlock()
		if !mine {
			c.say(c.render(e.Message, true))
		}
	}
}

func (c *terminalChat) render(m *berth.Message, lively bool) string {
	name := cleanLine(m.SenderName)
	if name == "" && m.Bot {
		name = c.name
	}
	if lively && m.Bot {
		return c.paint(green, name+":") + " " + clean(m.Text)
	}
	return name + ": " + clean(m.Text)
}

// say prints above the line that is being edited. text is clean, but for our
// own colours.
func (c *terminalChat) say(text string) {
	_, _ = c.term.Write([]byte(text + "\n"))
}

// setTyping shows the indicator as part of the prompt, where it wipes without
// a trace.
func (c *terminalChat) setTyping(typing bool) {
	prompt := c.paint(cyan, c.group.Folder+"> ")
	if typing {
		prompt = c.dim(c.name+" is typing… ") + prompt
	}
	c.term.SetPrompt(prompt)
	_, _ = c.term.Write(nil) // draws the line anew
}

const (
	red   = "31"
	green = "32"
	cyan  = "36"
)

func (c *terminalChat) dim(text string) string { return c.paint("2", clean(text)) }

func (c *terminalChat) paint(code, text string) string {
	if !c.colour {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}
