package main

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

var tokenPattern = regexp.MustCompile(`msg-g\d{3}-\d{5}`)

// story is a group's chat as its people see it.
type story struct {
	asked   map[string]int // by token: how often a message is there
	echoes  [][]string     // the tokens of each answer, in order
	texts   map[string]int // exact texts of other answers
	notices []string
	lines   []string // all, for a person
}

// read reads a chat. ctx bounds it.
func (s *soak) read(ctx context.Context, folder string) (story, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var messages []berth.Message
	for e, err := range s.daemon.client.Chat(ctx, folder, 0) {
		if err != nil {
			return story{}, err
		}
		if e.Type == web.EventTyping {
			break // all that was there came before
		}
		messages = append(messages, *e.Message)
	}
	return tellStory(messages), nil
}

func tellStory(messages []berth.Message) story {
	st := story{asked: make(map[string]int), texts: make(map[string]int)}
	open := false // an echo that goes on in the next text
	for _, m := range messages {
		st.lines = append(st.lines, fmt.Sprintf("#%d bot=%v %q", m.Seq, m.Bot, m.Text))
		tokens := tokenPattern.FindAllString(m.Text, -1)
		switch {
		case !m.Bot:
			for _, t := range tokens {
				st.asked[t]++
			}
		case strings.HasPrefix(m.Text, "<context "), strings.HasPrefix(m.Text, "<memory>"): // an echoed prompt; the latter in a run that was taken over
			st.echoes = append(st.echoes, tokens)
			open = !strings.HasSuffix(m.Text, "</messages>")
		case strings.HasPrefix(m.Text, "again-"), strings.HasPrefix(m.Text, "file-"):
			st.texts[m.Text]++
		case strings.HasPrefix(m.Text, "I could not answer."):
			st.notices = append(st.notices, m.Text)
		case open:
			last := len(st.echoes) - 1
			st.echoes[last] = append(st.echoes[last], tokens...)
			open = !strings.HasSuffix(m.Text, "</messages>")
		default:
			st.texts[m.Text]++
		}
	}
	return st
}

// tell says every so often how things are.
func (s *soak) tell(ctx context.Context) {
	known := make(map[string]int) // answers by chat, for when the daemon is away
	for pause(ctx, progress) {
		sent, answered := 0, 0
		for i := range groups {
			c := s.chat(folder(i))
			c.mu.Lock()
			sent += len(c.sent)
			c.mu.Unlock()
			if st, err := s.read(ctx, c.folder); err == nil {
				known[c.folder] = 0
				for _, tokens := range st.echoes {
					known[c.folder] += len(tokens)
				}
			}
			answered += known[c.folder]
		}
		s.mu.Lock()
		n := s.counts
		s.mu.Unlock()
		fmt.Fprintf(s.out, "%4.0f s: %d sent, %d answered; killed %d containers, %d daemons; %d losses of the engine\n",
			time.Since(s.begun).Seconds(), sent, answered, n.containers, n.daemons, n.cuts)
	}
}

// audit compares what was sent with what was answered, ends the daemon, and looks
// for what is left.
func (s *soak) audit(ctx context.Context, r *report) error {
	s.mu.Lock()
	r.counts = s.counts
	s.mu.Unlock()
	fate := func(seq int64) (web.Answer, error) { return s.daemon.client.Answer(ctx, seq, 0) }
	for i := range groups {
		c := s.chat(folder(i))
		st, err := s.read(ctx, c.folder)
		if err != nil {
			return fmt.Errorf("read the chat of %s: %w", c.folder, err)
		}
		before := r.faults()
		if err := s.auditChat(c, st, fate, r); err != nil {
			return err
		}
		if r.faults() > before {
			fmt.Fprintf(s.out, "the chat of %s:\n  %s\n", c.folder, strings.Join(st.lines, "\n  "))
		}
	}
	if r.files() > 0 {
		fmt.Fprintf(s.out, "open files early: %q\nand at the end: %q\n", r.early.Files, r.late.Files)
	}
	r.reasons = s.reasons()
	if err := s.daemon.stop(); err != nil {
		return err
	}
	s.daemon.mu.Lock()
	r.deaths = s.daemon.deaths
	s.daemon.mu.Unlock()
	left, err := s.engine.Containers(ctx)
	r.containers = len(left)
	return err
}

// auditChat adds one chat to the report. fate tells what the daemon says of a
// message that lacks something.
func (s *soak) auditChat(c *chat, st story, fate func(seq int64) (web.Answer, error), r *report) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	fault := func(count *int, m *message, format string, args ...any) {
		*count++
		fmt.Fprintf(s.out, "%s (%s, #%d): %s\n", m.token, m.kind.name, m.seq, fmt.Sprintf(format, args...))
	}
	places := make(map[string][]int) // by token: its place among all that was echoed
	ends := make(map[string]bool)    // tokens whose message was the last of an answered batch, and so carried out
	place := 0
	for _, tokens := range st.echoes {
		for _, t := range tokens {
			places[t] = append(places[t], place)
			place++
		}
		if len(tokens) > 0 {
			ends[tokens[len(tokens)-1]] = true
		}
	}
	for range st.notices {
		if len(c.sent) > 0 && c.sent[0].kind.name == doom.name {
			r.expected++
		} else {
			r.givenUp++
		}
	}
	inOrder := slices.Clone(c.sent)
	slices.SortStableFunc(inOrder, func(a, b *message) int { return int(a.seq - b.seq) })
	wanted := make(map[string]bool)
	last := -1
	for _, m := range inOrder {
		r.sent++
		r.kinds[m.kind.name]++
		wanted[m.again()], wanted[m.file()] = m.kind.again, m.kind.file
		if n := st.asked[m.token]; n != 1 {
			count := &r.lost
			if n > 1 {
				count = &r.doubled
			}
			fault(count, m, "stored %d times", n)
		}
		missing := len(places[m.token]) == 0 && !m.kind.silent
		missing = missing || ends[m.token] && m.kind.again && st.texts[m.again()] == 0
		missing = missing || ends[m.token] && m.kind.file && st.texts[m.file()] == 0
		if missing {
			a, err := fate(m.seq)
			if err != nil {
				return err
			}
			switch {
			case a.State == web.AnswerFailed:
				r.unanswered++
			case s.wasKilled(a):
				r.cut++
			default:
				fault(&r.lost, m, "not answered: %+v", a)
			}
		} else if len(places[m.token]) > 0 {
			r.answered++
		} else {
			r.silent++
		}
		for what, n := range map[string]int{"": len(places[m.token]), m.again(): st.texts[m.again()], m.file(): st.texts[m.file()]} {
			if n > 1 {
				fault(&r.doubled, m, "answered %d times %s", n, what)
			}
		}
		if p := places[m.token]; len(p) > 0 {
			if p[0] < last {
				fault(&r.disordered, m, "answered before an earlier message")
			}
			last = max(last, p[0])
		}
	}
	for text, n := range st.texts {
		if !wanted[text] {
			r.uncalled += n
			fmt.Fprintf(s.out, "%s: nobody asked for %q\n", c.folder, text)
		}
	}
	return nil
}

// wasKilled reports the documented exception: the container of the message's run
// was killed after some of what the run had to say to its batch had reached the
// chat. Such a batch is done, since nobody is answered twice; the rest was never
// said.
func (s *soak) wasKilled(a web.Answer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return a.State == web.AnswerDone && len(a.Texts) > 0 && s.killed[a.Run]
}

var (
	givenUpLine  = regexp.MustCompile(`given up until the next message.*`)
	groupField   = regexp.MustCompile(`"group": "([^"]*)"`)
	errorField   = regexp.MustCompile(`"error": "((?:[^"\\]|\\.)*)"`)
	unstableText = regexp.MustCompile(`\b[0-9a-f]{12,}\b`)
)

// reasons returns what the daemons logged when they gave up, and how often.
func (s *soak) reasons() map[string]int {
	text, err := os.ReadFile(s.daemon.logFile())
	if err != nil {
		fmt.Fprintln(s.out, err)
	}
	found := make(map[string]int)
	for _, line := range givenUpLine.FindAllString(string(text), -1) {
		group, reason := groupField.FindStringSubmatch(line), errorField.FindStringSubmatch(line)
		if group == nil || reason == nil {
			continue
		}
		found[unstableText.ReplaceAllString(reason[1], "…")]++
	}
	return found
}
