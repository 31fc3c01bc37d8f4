// Package builtin is the engine that needs no model and no key. It answers
// simple requests, runs commands in the container's shell, and remembers its
// sessions, so that everything around an agent can be used and tried without one.
package builtin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/prompt"
	"berth/agent-runner/internal/shell"
	"berth/agent-runner/protocol"
)

// commandTimeout is how long a command may run; the engine option of that name,
// a Go duration, changes it.
const commandTimeout = 10 * time.Minute

var _ engine.Compactor = (*Engine)(nil)

// Engine is the builtin engine of one run.
type Engine struct {
	config   engine.Config
	sessions string
	timeout  time.Duration
	session  *session // nil before the first turn
	shorter  bool     // since Compacted was asked
}

// Open is an engine.Open.
func Open(c engine.Config) (engine.Engine, error) {
	e := &Engine{config: c, sessions: filepath.Join(c.Home, ".berth", "sessions"), timeout: commandTimeout}
	if text, ok := c.EngineOptions["commandTimeout"]; ok {
		d, err := time.ParseDuration(text)
		if err != nil || d <= 0 {
			return nil, &engine.Error{
				Class: protocol.ClassInput,
				Text:  fmt.Sprintf("commandTimeout is %q: it must be a duration like 90s or 10m", text),
			}
		}
		e.timeout = d
	}
	return e, nil
}

// Close implements engine.Engine.
func (e *Engine) Close() error { return nil }

// Prompt implements engine.Engine.
func (e *Engine) Prompt(ctx context.Context, text string, to engine.Turn) error {
	if err := e.begin(to); err != nil {
		return err
	}

	p := prompt.Parse(text)
	last := p.Last(e.config.AssistantName)
	before := e.session.last()
	now := record{
		Turn: before.Turn + 1,
		Seen: before.Seen + len(p.Messages),
		From: and(p.Senders()),
		Text: quote(last.Text, maxRemembered),
	}
	answer, stopped := e.answer(ctx, p, last, now)
	now.Answer = quote(answer, maxRemembered)
	if stopped != nil {
		now.Answer = "(stopped)"
	}
	if err := e.session.add(now); err != nil {
		// The answer is worth more than the memory of it.
		e.config.Log.Print(err)
	}
	if stopped != nil {
		return stopped
	}
	to.Answer(engine.Answer{Text: fmt.Sprintf("[%s · turn %d] %s", e.config.GroupFolder, now.Turn, answer)})
	return nil
}

// begin takes up the session, if that was not done, and accepts the turn.
func (e *Engine) begin(to engine.Turn) (err error) {
	if e.session == nil {
		if e.config.SessionID == "" {
			e.session, err = newSession(e.sessions)
		} else {
			e.session, err = resume(e.sessions, e.config.SessionID)
		}
		if err != nil {
			return err
		}
	}
	to.Session(e.session.id)
	to.Accept()
	return nil
}

// keptTurns is how many turns a compaction leaves.
const keptTurns = 5

// Compact implements engine.Compactor: without a model there is no summary, so all
// but the last turns are forgotten.
func (e *Engine) Compact(_ context.Context, to engine.Turn) (engine.Compaction, error) {
	if err := e.begin(to); err != nil {
		return engine.Compaction{}, err
	}
	if len(e.session.turns) <= keptTurns {
		return engine.Compaction{Outcome: protocol.CompactionNothing}, nil
	}
	if err := e.session.keep(keptTurns); err != nil {
		e.config.Log.Print(err)
		return engine.Compaction{Outcome: protocol.CompactionFailed, Reason: "the session cannot be written"}, nil
	}
	e.shorter = true
	return engine.Compaction{Outcome: protocol.CompactionDone}, nil
}

// Compacted implements engine.Compactor.
func (e *Engine) Compacted() bool {
	was := e.shorter
	e.shorter = false
	return was
}

// maxRemembered is how much of a text a session keeps, in bytes.
const maxRemembered = 2 << 10

// answer returns what to say, or the cause of ctx's end.
func (e *Engine) answer(ctx context.Context, p prompt.Prompt, last prompt.Message, now record) (string, error) {
	word, rest := last.Text, ""
	if i := strings.IndexFunc(last.Text, unicode.IsSpace); i >= 0 {
		word, rest = last.Text[:i], strings.TrimSpace(last.Text[i:])
	}
	switch request := strings.Trim(strings.ToLower(last.Text), "?!. "); {
	case strings.EqualFold(word, "run") && rest != "":
		return e.run(ctx, rest)
	case request == "history", request == "what did i say":
		return e.history(), nil
	case request == "help":
		return help, nil
	}
	return e.received(p, last, now), nil
}

// run answers with what a command printed.
func (e *Engine) run(ctx context.Context, command string) (string, error) {
	result, err := shell.Run(ctx, e.config.Children, shell.Command{
		Text:    command,
		Dir:     e.config.WorkDir,
		Env:     e.environ(),
		Timeout: e.timeout,
	})
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	if err != nil {
		return "I could not run that: " + err.Error(), nil
	}
	var out strings.Builder
	fmt.Fprintf(&out, "$ %s\n", quote(command, 200))
	if text := strings.TrimRight(result.Output, "\n"); text != "" {
		mark := fence(text)
		fmt.Fprintf(&out, "%s\n%s\n%s\n", mark, text, mark)
	}
	if result.TimedOut {
		fmt.Fprintf(&out, "stopped: it ran for %v\n", e.timeout)
	}
	fmt.Fprintf(&out, "exit code %d", result.Code)
	return out.String(), nil
}

// environ is what a command gets to see: nothing of the runner's own.
func (e *Engine) environ() []string {
	env := []string{
		"PATH=" + orElse(os.Getenv("PATH"), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
		"HOME=" + e.config.Home,
		"LANG=" + orElse(os.Getenv("LANG"), "C.UTF-8"),
		"USER=agent",
	}
	if e.config.Timezone != "" {
		env = append(env, "TZ="+e.config.Timezone)
	}
	return env
}

// shownTurns is how many turns history tells.
const shownTurns = 20

func (e *Engine) history() string {
	turns := e.session.turns
	if len(turns) == 0 {
		return "This is the first turn of this session."
	}
	var out strings.Builder
	fmt.Fprintf(&out, "What I remember of session %s:", e.session.id)
	if over := len(turns) - shownTurns; over > 0 {
		fmt.Fprintf(&out, "\n… and %d turns before these", turns[over].Turn-1)
		turns = turns[over:]
	}
	for _, t := range turns {
		fmt.Fprintf(&out, "\n%d. %s: “%s”", t.Turn, orElse(t.From, "someone"), quote(t.Text, 80))
	}
	return out.String()
}

// received says what came in.
func (e *Engine) received(p prompt.Prompt, last prompt.Message, now record) string {
	var out strings.Builder
	what := "a message"
	if p.Scheduled {
		what = "a scheduled task"
	} else if n := len(p.Messages); n != 1 {
		what = fmt.Sprintf("%d messages", n)
	}
	fmt.Fprintf(&out, "I got %s", what)
	if now.From != "" {
		fmt.Fprintf(&out, " from %s", now.From)
	}
	switch text := quote(last.Text, 120); {
	case text == "":
		out.WriteString(", without a text.")
	case last.Sender != "" && now.From != and([]string{last.Sender}):
		fmt.Fprintf(&out, ". The last one, from %s: “%s”", quote(last.Sender, maxName), text)
	default:
		fmt.Fprintf(&out, ": “%s”", text)
	}
	messages := "messages"
	if now.Seen == 1 {
		messages = "message"
	}
	fmt.Fprintf(&out, "\nThis session has seen %d %s. I have no model here; say “help” to see what I can do.", now.Seen, messages)
	return out.String()
}

const help = `I am Berth's built-in engine: no model, no key. I run in this group's own container and I can:
- run COMMAND: run it in the group's folder and show what it prints
- history: tell the earlier turns of this session
- help: this text
To talk with a model, the operator chooses an engine that has one: AGENT_ENGINE in Berth's settings (.env), or berth groups add --engine for one group, with the key beside it (ANTHROPIC_API_KEY, or OPENAI_API_KEY and OPENAI_BASE_URL) and AGENT_MODEL. This version has no such engine yet; the settings are there.`

// quote returns text on one line, shortened to about limit bytes.
func quote(text string, limit int) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) <= limit {
		return text
	}
	for limit > 0 && !utf8.RuneStart(text[limit]) {
		limit--
	}
	return text[:limit] + "…"
}

// fence returns a line of backticks that does not occur in text.
func fence(text string) string {
	mark := "```"
	for strings.Contains(text, mark) {
		mark += "`"
	}
	return mark
}

// How many names are told, and how much of each, in bytes.
const (
	maxNames = 5
	maxName  = 60
)

// and joins names as people write them.
func and(names []string) string {
	var told []string
	for _, name := range names[:min(len(names), maxNames)] {
		told = append(told, quote(name, maxName))
	}
	if n := len(names) - maxNames; n > 0 {
		told = append(told, fmt.Sprintf("%d more", n))
	}
	if len(told) < 2 {
		return strings.Join(told, "")
	}
	return strings.Join(told[:len(told)-1], ", ") + " and " + told[len(told)-1]
}

func orElse(s, fallback string) string {
	if s == "" {
		return fallback
	}
	return s
}
