// Package probe is the engine for tests: it does what the last message says,
// one command a line, good and bad.
package probe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/emit"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/prompt"
	"berth/agent-runner/protocol"
)

var _ engine.Engine = (*Engine)(nil)

// Engine is the probe of one run.
type Engine struct {
	config  engine.Config
	out     *emit.Emitter
	session string
	eaten   [][]byte
}

// Opener returns the engine.Open of a probe that can misuse out.
func Opener(out *emit.Emitter) engine.Open {
	return func(c engine.Config) (engine.Engine, error) {
		session := c.SessionID
		if session == "" {
			session = "probe-" + strings.ToLower(strconv.FormatInt(time.Now().UnixNano(), 36))
		}
		return &Engine{config: c, out: out, session: session}, nil
	}
}

// Close implements engine.Engine.
func (e *Engine) Close() error { return nil }

// Prompt implements engine.Engine. It is answered with "ok" unless a command
// answered or was to be silent.
func (e *Engine) Prompt(ctx context.Context, text string, to engine.Turn) error {
	t := &turn{Engine: e, Turn: to, prompt: text}
	script := prompt.Parse(text).Last(e.config.AssistantName).Text
	var lines []string
	for line := range strings.Lines(script) {
		lines = append(lines, strings.TrimSpace(line))
	}
	if slices.Contains(lines, "no-ack") {
		e.out.Mute(protocol.TypeAck)
	}
	to.Session(e.session)
	to.Accept()
	for _, line := range lines {
		name, rest, _ := strings.Cut(line, " ")
		i := slices.IndexFunc(commands, func(c command) bool { return c.name == name })
		if i < 0 {
			continue // words to people
		}
		if err := commands[i].do(ctx, t, rest); err != nil {
			return err
		}
	}
	if !t.spoke {
		t.say("ok")
	}
	return nil
}

type turn struct {
	*Engine
	engine.Turn
	prompt string
	spoke  bool
}

func (t *turn) say(text string) {
	t.spoke = true
	t.Answer(engine.Answer{Text: text})
}

// command is one word that the probe knows. An error fails the turn.
type command struct {
	name, args, doc string
	do              func(ctx context.Context, t *turn, rest string) error
}

// commands is filled by init because help lists it.
var commands []command

func init() {
	commands = []command{
		{"say", "TEXT", `answers; \n in TEXT is a new line`, say},
		{"echo", "", "answers with the whole prompt as it came", echo},
		{"twice", "A|B", "answers A, then B", twice},
		{"big", "BYTES", "answers with that many letters", big},
		{"silent", "", "gives no answer of its own at the end", silent},
		{"sleep", "TIME", "waits; seconds or a Go duration; stops with the turn", sleep},
		{"hang", "", "waits for ever, whatever happens", hang},
		{"fail", "TEXT", "fails the turn", fail},
		{"fail-class", "CLASS TEXT", "fails the turn with an error class", failClass},
		{"exit", "N", "ends the process at once, without a frame", exit},
		{"ignore-term", "", "ignores SIGTERM from now on", ignoreTerm},
		{"session", "ID", "is that session from now on; an invalid id goes out in a frame of its own", session},
		{"no-ack", "", "prints no ack from the start of this turn on", nothing},
		{"heartbeat-off", "", "prints no heartbeat from now on", heartbeatOff},
		{"raw", "TEXT", "prints TEXT on stdout as a line", raw},
		{"stderr", "TEXT", "prints TEXT on stderr as a line", stderr},
		{"flood", "BYTES", "prints that many bytes of lines on stdout", flood},
		{"flood-line", "BYTES", "prints that many bytes without a newline on stdout", floodLine},
		{"half-frame", "", "prints the first half of a frame", halfFrame},
		{"bad-json-frame", "", "prints a frame that is not JSON", badJSONFrame},
		{"forge", "TEXT", "prints an answer without the nonce", forge},
		{"forge-nonce", "TEXT", "prints an answer with a wrong nonce", forgeNonce},
		{"close-stdout", "", "closes stdout", closeStdout},
		{"eat", "BYTES", "takes that much memory and keeps it", eat},
		{"env", "", "answers with the runner's own environment", env},
		{"write", "PATH CONTENT", "writes a file beside and renames it; a PATH in .part is written plainly", write},
		{"mkdir", "PATH", "makes a folder and those above it", mkdir},
		{"mkfifo", "PATH", "makes a named pipe", mkfifo},
		{"symlink", "TARGET PATH", "makes a symbolic link", symlink},
		{"rm", "PATH", "removes a file or a folder with all in it", rm},
		{"help", "", "answers with this list", help},
	}
}

func say(_ context.Context, t *turn, text string) error {
	t.say(strings.ReplaceAll(text, `\n`, "\n"))
	return nil
}

func echo(_ context.Context, t *turn, _ string) error {
	t.say(t.prompt)
	return nil
}

func twice(_ context.Context, t *turn, both string) error {
	a, b, _ := strings.Cut(both, "|")
	t.say(a)
	t.say(b)
	return nil
}

func big(_ context.Context, t *turn, size string) error {
	n, err := number(size)
	if err == nil {
		t.say(strings.Repeat("x", n))
	}
	return err
}

func silent(_ context.Context, t *turn, _ string) error {
	t.spoke = true
	return nil
}

func nothing(context.Context, *turn, string) error { return nil }

func sleep(ctx context.Context, _ *turn, text string) error {
	d, err := time.ParseDuration(text)
	if err != nil {
		d, err = time.ParseDuration(text + "s")
	}
	if err != nil {
		return fmt.Errorf("probe: %q is neither seconds nor a duration", text)
	}
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func hang(context.Context, *turn, string) error { select {} }

func fail(_ context.Context, _ *turn, text string) error { return errors.New(text) }

func failClass(_ context.Context, _ *turn, rest string) error {
	class, text, _ := strings.Cut(rest, " ")
	return &engine.Error{Class: class, Text: text}
}

func exit(_ context.Context, _ *turn, code string) error {
	n, err := number(code)
	if err == nil {
		os.Exit(n)
	}
	return err
}

func ignoreTerm(context.Context, *turn, string) error {
	signal.Ignore(unix.SIGTERM)
	return nil
}

func session(_ context.Context, t *turn, id string) error {
	if !protocol.ValidSessionID(id) {
		t.out.Emit(protocol.Frame{Type: protocol.TypeOutput, Status: protocol.StatusSuccess, NewSessionID: id})
		return nil
	}
	t.session = id
	t.Session(id)
	return nil
}

func heartbeatOff(_ context.Context, t *turn, _ string) error {
	t.out.Mute(protocol.TypeHeartbeat)
	return nil
}

func raw(_ context.Context, t *turn, text string) error {
	t.out.Raw([]byte(text + "\n"))
	return nil
}

func stderr(_ context.Context, _ *turn, text string) error {
	_, err := fmt.Fprintln(os.Stderr, text)
	return err
}

// floodPiece is how much is printed at once, so that a flood needs no memory.
const floodPiece = 32 << 10

func flood(ctx context.Context, t *turn, size string) error {
	line := strings.Repeat("flood", 16)[:79] + "\n"
	return pour(ctx, t, size, bytes.Repeat([]byte(line), floodPiece/len(line)))
}

func floodLine(ctx context.Context, t *turn, size string) error {
	return pour(ctx, t, size, bytes.Repeat([]byte("x"), floodPiece))
}

func pour(ctx context.Context, t *turn, size string, piece []byte) error {
	n, err := number(size)
	for ; n > 0 && err == nil; n -= len(piece) {
		t.out.Raw(piece[:min(n, len(piece))])
		err = context.Cause(ctx)
	}
	return err
}

func halfFrame(_ context.Context, t *turn, _ string) error {
	frame, err := protocol.Encode(t.answerFrame("half of this"))
	if err == nil {
		t.out.Raw(frame[:len(frame)/2])
	}
	return err
}

func badJSONFrame(_ context.Context, t *turn, _ string) error {
	frame, err := protocol.Encode(t.answerFrame("x"))
	if err == nil {
		t.out.Raw(bytes.Replace(frame, []byte(`"x"`), []byte(`"x`), 1))
	}
	return err
}

func forge(_ context.Context, t *turn, text string) error { return t.forge(text, "") }

func forgeNonce(_ context.Context, t *turn, text string) error { return t.forge(text, "not-the-nonce") }

func (t *turn) forge(text, nonce string) error {
	f := t.answerFrame(text)
	f.Nonce = nonce
	frame, err := protocol.Encode(f)
	if err == nil {
		t.out.Raw(frame)
	}
	return err
}

// answerFrame is a frame that nobody numbered: an emitted one never has its number.
func (t *turn) answerFrame(text string) protocol.Frame {
	return protocol.Frame{
		Seq: 1 << 40, RunID: t.config.RunID, Nonce: t.config.Nonce,
		Type: protocol.TypeOutput, Status: protocol.StatusSuccess, Result: new(protocol.Text(text)),
	}
}

func closeStdout(context.Context, *turn, string) error { return os.Stdout.Close() }

func eat(_ context.Context, t *turn, size string) error {
	n, err := number(size)
	if err != nil {
		return err
	}
	food := make([]byte, n)
	for i := 0; i < n; i += os.Getpagesize() {
		food[i] = 1
	}
	t.eaten = append(t.eaten, food)
	return nil
}

func env(_ context.Context, t *turn, _ string) error {
	t.say(strings.Join(os.Environ(), "\n"))
	return nil
}

func write(_ context.Context, _ *turn, rest string) error {
	path, content, _ := strings.Cut(rest, " ")
	if strings.HasSuffix(path, ".part") {
		return os.WriteFile(path, []byte(content), 0o666)
	}
	beside := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
	if err := os.WriteFile(beside, []byte(content), 0o666); err != nil {
		return err
	}
	return os.Rename(beside, path)
}

func mkdir(_ context.Context, _ *turn, path string) error { return os.MkdirAll(path, 0o777) }

func mkfifo(_ context.Context, _ *turn, path string) error {
	if err := unix.Mkfifo(path, 0o666); err != nil {
		return fmt.Errorf("mkfifo %s: %w", path, err)
	}
	return nil
}

func symlink(_ context.Context, _ *turn, rest string) error {
	target, path, _ := strings.Cut(rest, " ")
	return os.Symlink(target, path)
}

func rm(_ context.Context, _ *turn, path string) error { return os.RemoveAll(path) }

func help(_ context.Context, t *turn, _ string) error {
	var out strings.Builder
	out.WriteString("The probe does what the last message says, one command a line:")
	for _, c := range commands {
		fmt.Fprintf(&out, "\n%s: %s", strings.TrimSpace(c.name+" "+c.args), c.doc)
	}
	t.say(out.String())
	return nil
}

func number(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("probe: %q is not a number", text)
	}
	return n, nil
}
