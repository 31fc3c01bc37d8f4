package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/mdp/qrterminal/v3"
	"github.com/spf13/cobra"
	"golang.org/x/term"
	"rsc.io/qr"

	"berth/orchestrator/internal/web"
)

// linkAPI is what the login commands need of a daemon, or of the session itself
// when there is none.
type linkAPI interface {
	// Channel returns how it stands with the link.
	Channel(ctx context.Context) (web.Channel, error)
	Login(ctx context.Context, channel string, in web.NewLogin) iter.Seq2[web.LoginEvent, error]
	AnswerPasskey(ctx context.Context, channel string, in web.Passkey) error
	Logout(ctx context.Context, channel string) error
}

// loginOptions say how an account is linked.
type loginOptions struct {
	phone, png, passkey string
	json                bool
	timeout             time.Duration
}

func (a *app) loginCommand() *cobra.Command {
	var o loginOptions
	cmd := &cobra.Command{
		Use:   "login whatsapp",
		Short: "Link a WhatsApp account",
		Long: `Link a WhatsApp account.

The phone scans a code under Linked devices, or with --phone somebody types one
there. While a daemon serves WhatsApp it is linked at once, without a restart;
without a daemon the next one uses the session.

With --json each step is a line: qr, code, passkey, compare, done.
Exit codes: 0 an account is linked, 1 none is, 2 misuse.`,
		Example: `  berth login whatsapp
  berth login whatsapp --png /tmp/code.png
  berth login whatsapp --phone +4915112345678
  berth login whatsapp --json --timeout 3m`,
		Args: cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			if err := checkLogin(args[0], &o); err != nil {
				return err
			}
			return a.withLink(ctx, func(ctx context.Context, api linkAPI, offline bool) error {
				return a.login(ctx, api, o, offline)
			})
		}),
	}
	f := cmd.Flags()
	f.StringVar(&o.phone, "phone", "", "the account's number, such as +4915112345678: for a code to type instead of one to scan")
	f.StringVar(&o.png, "png", "", "also write the code to scan as a picture; it is removed at the end")
	f.StringVar(&o.passkey, "passkey", "", "file in which the browser's answer about a passkey will be (default: it is asked for)")
	f.BoolVar(&o.json, "json", false, "print each step as a line of JSON")
	f.DurationVar(&o.timeout, "timeout", 10*time.Minute, "how long to wait for the phone")
	return cmd
}

var phonePattern = regexp.MustCompile(`^\+?[1-9][0-9 ().-]{5,24}$`)

func checkLogin(channel string, o *loginOptions) error {
	switch {
	case channel != channelWhatsApp:
		return misusef("login %.40q: no such account: give %s", channel, channelWhatsApp)
	case o.phone != "" && !phonePattern.MatchString(o.phone):
		return misusef("--phone %.40q: give a number with its country code, such as +4915112345678", o.phone)
	case o.phone != "" && o.png != "":
		return misusef("give --phone or --png, not both: a code to type is no picture")
	case o.timeout <= 0:
		return misusef("--timeout %v: give a duration above zero, such as 5m", o.timeout)
	}
	for name, file := range map[string]string{"--png": o.png, "--passkey": o.passkey} {
		if _, err := os.Lstat(file); file != "" && err == nil {
			return misusef("%s %s: the file is there already: name another, or remove it", name, file)
		}
	}
	return nil
}

func (a *app) logoutCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "logout whatsapp",
		Short: "Unlink the WhatsApp account",
		Long: `Unlink the WhatsApp account. Groups and messages are kept.

Link once and keep it: WhatsApp looks at accounts that are linked again and again.`,
		Example: "  berth logout whatsapp",
		Args:    cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			if args[0] != channelWhatsApp {
				return misusef("logout %.40q: no such account: give %s", args[0], channelWhatsApp)
			}
			return a.withLink(ctx, func(ctx context.Context, api linkAPI, _ bool) error {
				ctx, cancel := context.WithTimeoutCause(ctx, logoutPatience, fmt.Errorf("no answer within %v: see berth status", logoutPatience))
				defer cancel()
				before, err := api.Channel(ctx)
				if err != nil {
					return err
				}
				if err := api.Logout(ctx, channelWhatsApp); err != nil {
					return err
				}
				_, err = fmt.Fprintf(a.stdout, "%s is unlinked; groups and messages are kept\n", before.Account)
				return err
			})
		}),
	}
}

const logoutPatience = time.Minute

// withLink calls fn with the daemon, or with the session itself if none runs.
func (a *app) withLink(ctx context.Context, fn func(ctx context.Context, api linkAPI, offline bool) error) error {
	cfg, client, err := a.client()
	if err != nil {
		return err
	}
	err = fn(ctx, daemonLink{client}, false)
	if !noDaemon(err) {
		return explain(cfg, err)
	}
	link, hangUp, err := openLink(ctx, cfg)
	if err != nil {
		return err
	}
	a.note("no daemon: working on the session itself")
	return errors.Join(fn(ctx, link, true), hangUp())
}

// daemonLink is the link of a daemon.
type daemonLink struct{ *web.Client }

func (d daemonLink) Channel(ctx context.Context) (web.Channel, error) {
	s, err := d.Status(ctx)
	if err != nil {
		return web.Channel{}, err
	}
	for _, c := range s.Channels {
		if c.Name == channelWhatsApp {
			return c, nil
		}
	}
	return web.Channel{}, fmt.Errorf("the daemon does not serve WhatsApp: set CHANNELS=%s,%s, and start it again", channelConsole, channelWhatsApp)
}

// login shows a person what to do until an account is linked.
func (a *app) login(ctx context.Context, api linkAPI, o loginOptions, offline bool) error {
	now, err := api.Channel(ctx)
	if err != nil {
		return err
	}
	s := &loginScreen{app: a, loginOptions: o}
	if now.Account != "" {
		return s.done(now.Account, "is linked already; \"berth logout whatsapp\" unlinks it")
	}
	outside := ctx
	ctx, giveUp := context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("nothing is linked: nobody used a code within %v", o.timeout))
	defer giveUp()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer s.wipe()
	for e, err := range api.Login(ctx, channelWhatsApp, web.NewLogin{Phone: o.phone}) {
		switch {
		case outside.Err() != nil:
			return fmt.Errorf("nothing is linked: %w", context.Cause(outside))
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return err
		case e.Done != "":
			if offline {
				a.note("the next daemon uses the session: start it soon, with %s in CHANNELS", channelWhatsApp)
			}
			return s.done(e.Done, "is linked")
		}
		if err := s.show(e); err != nil {
			return err
		}
		if e.Request != nil || e.Compare != "" {
			s.ask(ctx, api, e, cancel)
		}
	}
	switch {
	case outside.Err() != nil:
		return fmt.Errorf("nothing is linked: %w", context.Cause(outside))
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return errors.New("nothing is linked: the linking ended without a word; try again")
}

// loginScreen shows the steps of a login.
type loginScreen struct {
	*app
	loginOptions
	lines int // that the last code takes on a terminal

	typed    chan typed // what the person types; nil before the first question
	withdraw func()     // the last question; nil likewise
}

// typed is a line of the standard input.
type typed struct {
	text string
	err  error
}

func (s *loginScreen) done(account, what string) error {
	if s.json {
		return s.line(web.LoginEvent{Done: account})
	}
	_, err := fmt.Fprintf(s.stdout, "%s %s\n", account, what)
	return err
}

func (s *loginScreen) line(e web.LoginEvent) error {
	data, err := json.Marshal(e)
	if err == nil {
		_, err = fmt.Fprintln(s.stdout, harmless(data))
	}
	return err
}

func (s *loginScreen) show(e web.LoginEvent) error {
	if e.QR != "" && s.png != "" {
		if err := s.picture(e.QR); err != nil {
			return fmt.Errorf("write the picture: %w", err)
		}
	}
	if s.json {
		return s.line(e)
	}
	switch {
	case e.QR != "":
		return s.code(e)
	case e.Code != "":
		return s.print(`
Type this code on the phone (WhatsApp, Settings, Linked devices, Link a device,
Link with phone number instead):

    %s

It is good until %s.
`, e.Code, clock(e.Until))
	case e.Passkey != "":
		return s.print(`
%s

To make the answer, open https://web.whatsapp.com in a browser that has the
passkey, open its console (F12), and run this there:

navigator.credentials.get({publicKey: PublicKeyCredential.parseRequestOptionsFromJSON(%s)}).then(c => console.log(JSON.stringify(c)))

%s
`, clean(e.Passkey), compact(e.Request), s.whereTo())
	case e.Compare != "":
		return s.print("\nThe phone shows a code. Is it this one?\n\n    %s\n\nType yes if it is, and nothing else: ", clean(e.Compare))
	}
	return nil
}

func (s *loginScreen) whereTo() string {
	if s.passkey != "" {
		return "Save what it prints as " + s.passkey + "; Berth waits for it."
	}
	return "Paste what it prints here, in one line:"
}

func (s *loginScreen) print(format string, args ...any) error {
	s.lines = 0
	_, err := fmt.Fprintf(s.stdout, format, args...)
	return err
}

// clock returns when something ends, in the clock of whoever looks.
func clock(t time.Time) string { return t.Local().Format("15:04:05") }

func compact(data json.RawMessage) string {
	var out bytes.Buffer
	if json.Compact(&out, data) != nil {
		return "{}"
	}
	return clean(out.String())
}

// code shows a code to scan: in the place of the last one on a terminal with room
// for it, below it elsewhere, and there as text as well.
func (s *loginScreen) code(e web.LoginEvent) error {
	picture, err := blocks(e.QR)
	if err != nil {
		return err
	}
	out, isTerminal := terminal(s.stdout)
	text := "\nScan this with the phone: WhatsApp, Settings, Linked devices, Link a device.\n\n"
	after := fmt.Sprintf("\nIt is good until %s, then another one comes.\n", clock(e.Until))
	if !isTerminal {
		_, err = fmt.Fprintf(s.stdout, "%s%s\ncode: %s\n%s", text, picture, clean(e.QR), after)
		return err
	}
	columns := utf8.RuneCountInString(picture[:strings.IndexByte(picture, '\n')])
	// White on black, whatever the terminal's own colours are.
	const on, off = "\x1b[97;40m", "\x1b[0m"
	picture = on + strings.ReplaceAll(strings.TrimSuffix(picture, "\n"), "\n", off+"\n"+on) + off + "\n"
	screen := text + picture + after
	if s.lines > 0 {
		screen = fmt.Sprintf("\x1b[%dA\x1b[J", s.lines) + screen
	}
	s.lines = strings.Count(text+picture+after, "\n")
	width, height, err := term.GetSize(int(out.Fd()))
	if err == nil {
		hint := tooSmall(width, height, columns, s.lines)
		screen += hint
		s.lines += strings.Count(hint, "\n")
	}
	if err != nil || width < columns || height <= s.lines {
		s.lines = 0
	}
	_, err = io.WriteString(s.stdout, screen)
	return err
}

// tooSmall says what to do if a code does not fit into a window: then no camera
// can see all of it.
func tooSmall(width, height, columns, lines int) string {
	if width >= columns && height > lines {
		return ""
	}
	return fmt.Sprintf("This window has %d columns and %d lines, and the code needs %d and %d: make it\nlarger or its letters smaller, or stop this and use --png FILE or --phone NUMBER.\n", width, height, columns, lines+1)
}

// blocks draws a code with two of its rows to a line of text.
func blocks(text string) (string, error) {
	if _, err := qr.Encode(text, qr.L); err != nil {
		return "", fmt.Errorf("draw the code: %w", err)
	}
	var out strings.Builder
	qrterminal.GenerateWithConfig(text, qrterminal.Config{Level: qrterminal.L, Writer: &out, HalfBlocks: true, QuietZone: 2})
	return out.String(), nil
}

func (s *loginScreen) picture(text string) error {
	code, err := qr.Encode(text, qr.L)
	if err != nil {
		return err
	}
	return writeBeside(s.png, code.PNG())
}

// wipe removes the picture of a code that is of no use any more.
func (s *loginScreen) wipe() {
	if s.png != "" {
		_ = os.Remove(s.png)
	}
}

// ask has a person answer a step, beside all else: it takes time, in which the
// linking may end for another reason, or ask anew after a code that nobody used.
func (s *loginScreen) ask(ctx context.Context, api linkAPI, e web.LoginEvent, fail func(error)) {
	if s.typed == nil {
		s.typed = make(chan typed)
		go s.read(ctx)
	}
	if s.withdraw != nil {
		s.withdraw()
	}
	open, withdraw := context.WithCancel(ctx)
	s.withdraw = withdraw
	go func() {
		if err := s.answer(ctx, open, api, e); err != nil {
			fail(err)
		}
	}()
}

// read reads lines until ctx ends. A read from a terminal cannot be ended, but
// then the program is.
func (s *loginScreen) read(ctx context.Context) {
	for in := bufio.NewReader(s.stdin); ; {
		text, err := in.ReadString('\n')
		select {
		case s.typed <- typed{text, err}:
		case <-ctx.Done():
			return
		}
	}
}

// answer hands over what a person says about the passkey, unless open ends before.
func (s *loginScreen) answer(ctx, open context.Context, api linkAPI, e web.LoginEvent) error {
	if e.Compare != "" {
		text, err := s.typedLine(open)
		if open.Err() != nil {
			return nil
		}
		switch word := strings.ToLower(strings.TrimSpace(text)); {
		case word == "yes":
			return api.AnswerPasskey(ctx, channelWhatsApp, web.Passkey{Same: true})
		case word == "" && err != nil:
			return errors.New("nothing is linked: nobody compared the codes")
		}
		return errors.New("nothing is linked: the codes differ, so somebody else may be at it; try again")
	}
	data, err := s.browserAnswer(open)
	if open.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	return api.AnswerPasskey(ctx, channelWhatsApp, web.Passkey{Response: data})
}

// typedLine waits for a line of the standard input.
func (s *loginScreen) typedLine(ctx context.Context) (string, error) {
	select {
	case t := <-s.typed:
		return t.text, t.err
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// browserAnswer waits for a line of the standard input, or for the file.
func (s *loginScreen) browserAnswer(ctx context.Context) (json.RawMessage, error) {
	if s.passkey == "" {
		text, err := s.typedLine(ctx)
		if data := []byte(strings.TrimSpace(text)); json.Valid(data) {
			return data, nil
		}
		if err != nil && strings.TrimSpace(text) == "" {
			return nil, errors.New("nothing is linked: the browser's answer did not come")
		}
		return nil, errors.New("nothing is linked: that is no answer of a browser: paste all that it printed, in one line")
	}
	const look = time.Second
	for {
		data, err := os.ReadFile(s.passkey)
		if err == nil && json.Valid(data) { // else it is still being written
			return data, nil
		}
		if err := wait(ctx, look); err != nil {
			return nil, err
		}
	}
}
