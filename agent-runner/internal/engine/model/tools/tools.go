// Package tools is what a model can do: commands, files, the web, and whatever
// the run's tool servers offer.
//
// A tool's input comes from a model and what it reads comes from anywhere:
// everything is bounded, and a tool that fails is a result and no error.
package tools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/internal/forward"
)

// Limits of one call and of calls together.
const (
	MaxResult   = 32 << 10 // bytes of a result; of a longer one, the first and the last half
	maxAtOnce   = 4        // calls that run at the same time
	maxPerStep  = 32       // calls that one message of the model may have
	maxTools    = 120      // providers take 128
	stopGrace   = time.Second
	callTimeout = 30 * time.Minute // of a call that has no shorter one
)

// Box holds the tools of one run. Start is called first and Close last; Start and
// Run may be called from one goroutine at a time.
type Box struct {
	config  engine.Config
	env     []string
	web     *http.Client
	own     []tool
	tools   []tool // own, and those of the servers; fixed between two calls of Start
	servers []*server
	writing sync.Mutex // one change of a file at a time
}

// tool is a tool and what it does.
type tool struct {
	llm.Tool
	run func(ctx context.Context, input json.RawMessage) (string, error)
}

// refused is an error whose text is all that the model needs to know.
func refused(format string, args ...any) error { return fmt.Errorf(format, args...) }

// New returns a box with the tools that need no server.
func New(c engine.Config) *Box {
	b := &Box{config: c, env: environ(c), web: newWeb(c.Gateway)}
	b.own = []tool{b.bash(), b.read(), b.write(), b.edit(), b.glob(), b.grep(), b.fetch()}
	b.tools = b.own
	for _, s := range c.Tools {
		b.servers = append(b.servers, &server{spec: s, box: b})
	}
	return b
}

// environ is what commands and tool servers get to see: nothing of the runner's
// own.
func environ(c engine.Config) []string {
	or := func(name, fallback string) string {
		if v := os.Getenv(name); v != "" {
			return name + "=" + v
		}
		return name + "=" + fallback
	}
	env := []string{
		or("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
		or("LANG", "C.UTF-8"),
		"HOME=" + c.Home,
		"USER=agent",
	}
	if c.Timezone != "" {
		env = append(env, "TZ="+c.Timezone)
	}
	if c.Gateway != "" {
		env = append(env, forward.Environ(c.Gateway)...)
	}
	return env
}

// Start starts the run's tool servers and asks them for their tools. One that
// does not answer before ctx ends is left out, with a line in the log, until Start is
// called again; the others are then left as they are.
func (b *Box) Start(ctx context.Context) {
	var wg sync.WaitGroup
	for _, s := range b.servers {
		if s.offer != nil {
			continue
		}
		wg.Go(func() {
			var err error
			if s.offer, err = s.start(ctx); err != nil {
				b.config.Log.Printf("tools of %s are not there: %v", s.spec.Name, err)
			}
		})
	}
	wg.Wait()
	b.tools = slices.Clone(b.own)
	var offers []tool
	for _, s := range b.servers {
		offers = append(offers, s.offer...)
	}
	for _, t := range offers {
		switch {
		case len(b.tools) >= maxTools:
			b.config.Log.Printf("there are more than %d tools: %s and those after it are left out", maxTools, t.Name)
			return
		case b.find(t.Name) != nil:
			b.config.Log.Printf("there are two tools of the name %s: the second one is left out", t.Name)
		default:
			b.tools = append(b.tools, t)
		}
	}
}

// Tools returns all tools.
func (b *Box) Tools() []llm.Tool {
	var all []llm.Tool
	for _, t := range b.tools {
		all = append(all, t.Tool)
	}
	return all
}

// Close ends the tool servers and what they started.
func (b *Box) Close() {
	var wg sync.WaitGroup
	for _, s := range b.servers {
		wg.Go(s.stop)
	}
	wg.Wait()
	b.web.CloseIdleConnections()
}

func (b *Box) find(name string) *tool {
	if i := slices.IndexFunc(b.tools, func(t tool) bool { return t.Name == name }); i >= 0 {
		return &b.tools[i]
	}
	return nil
}

// Run carries out calls, several at a time, and returns their results in order.
// When ctx ends it returns soon, whatever the tools do.
func (b *Box) Run(ctx context.Context, calls []llm.Call) []llm.Result {
	type done struct {
		i int
		r llm.Result
	}
	results := make([]llm.Result, len(calls))
	finished := make(chan done, len(calls))
	slots := make(chan struct{}, maxAtOnce)
	waiting := 0
	for i, c := range calls {
		results[i] = llm.Result{CallID: c.ID, Text: "interrupted", Failed: true}
		if i >= maxPerStep {
			results[i].Text = fmt.Sprintf("not run: at most %d calls at once", maxPerStep)
			continue
		}
		waiting++
		go func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			finished <- done{i, b.call(ctx, c)}
		}()
	}
	var giveUp <-chan time.Time
	for ended := ctx.Done(); waiting > 0; {
		select {
		case d := <-finished:
			results[d.i] = d.r
			waiting--
		case <-ended:
			giveUp, ended = time.After(stopGrace), nil
		case <-giveUp:
			return results
		}
	}
	return results
}

// call carries out one call.
func (b *Box) call(ctx context.Context, c llm.Call) (r llm.Result) {
	r.CallID, r.Failed = c.ID, true
	if ctx.Err() != nil {
		r.Text = "interrupted"
		return r
	}
	// What a page or a file holds may hit a fault in a library.
	defer func() {
		if fault := recover(); fault != nil {
			b.config.Log.Printf("tool %.64q: %v", c.Name, fault)
			r.Text, r.Failed = "the tool failed by a fault of its own", true
		}
	}()
	t := b.find(c.Name)
	if t == nil {
		r.Text = fmt.Sprintf("there is no tool %.64q", c.Name)
		return r
	}
	input := strings.TrimSpace(c.Input)
	if input == "" {
		input = "{}"
	}
	if !json.Valid([]byte(input)) || input[0] != '{' {
		r.Text = "the input is not a JSON object; perhaps it was cut off: write less at once"
		return r
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	text, err := t.run(ctx, json.RawMessage(input))
	r.Failed = err != nil
	if err != nil {
		text = strings.TrimSpace(text + "\n" + err.Error())
	}
	r.Text = Bound(printable(text), MaxResult)
	if strings.TrimSpace(r.Text) == "" {
		r.Text = "(nothing)"
	}
	return r
}

// decode reads a tool's input.
func decode[T any](input json.RawMessage) (T, error) {
	var v T
	if err := json.Unmarshal(input, &v); err != nil {
		if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return v, refused("%s must not be of type %s", strings.ToLower(e.Field), e.Value)
		}
		return v, refused("the input cannot be read: %v", err)
	}
	return v, nil
}

// count is a number that small models also write as a string.
type count int

func (n *count) UnmarshalJSON(data []byte) error {
	text := strings.Trim(string(data), `"`)
	if text == "null" || text == "" {
		return nil
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || v < 0 || v > 1e9 {
		return refused("%.32q is not a number from 0 to 1000000000", text)
	}
	*n = count(v)
	return nil
}

// yes is a boolean that small models also write as a string.
type yes bool

func (y *yes) UnmarshalJSON(data []byte) error {
	text := strings.ToLower(strings.Trim(string(data), `"`))
	*y = text == "true" || text == "1" || text == "yes"
	return nil
}

// cutNote is what stands where a text was cut, here and in package shell.
var cutNote = regexp.MustCompile(`… \((\d+) bytes cut here\) …`)

// Bound returns text cut in the middle to about limit bytes, saying so.
func Bound(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	head, tail := limit/2, len(text)-limit/2
	for head > 0 && !utf8.RuneStart(text[head]) {
		head--
	}
	for tail < len(text) && !utf8.RuneStart(text[tail]) {
		tail++
	}
	cut := tail - head
	for _, note := range cutNote.FindAllStringSubmatch(text[head:tail], -1) {
		if n, err := strconv.Atoi(note[1]); err == nil && n < 1<<50 {
			cut += n - len(note[0])
		}
	}
	return fmt.Sprintf("%s\n… (%d bytes cut here) …\n%s", text[:head], cut, text[tail:])
}

// printable returns text if it is one, else a note.
func printable(text string) string {
	if !binary(text) {
		return strings.ToValidUTF8(text, "\uFFFD")
	}
	return fmt.Sprintf("(binary data of about %d bytes, not shown: write it to a file, or encode it)", len(text))
}

// binary reports whether text is none: it has a zero byte, or much that is no
// UTF-8.
func binary(text string) bool {
	if strings.IndexByte(text, 0) >= 0 {
		return true
	}
	broken, all := 0, 0
	for _, r := range text[:min(len(text), 16<<10)] {
		if all++; r == utf8.RuneError {
			broken++
		}
	}
	return broken > 8 && broken*10 > all
}
