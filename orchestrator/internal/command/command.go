// Package command answers what people write to Berth itself, such as /status or
// /stop: on the host, before any agent and without one.
package command

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/memory"
	"berth/orchestrator/internal/pairing"
)

// Host knows the groups and carries out what commands ask for. Folders are those
// of registered groups. Its methods are called from many goroutines; a berth.Error
// is told to who asked, any other error is not.
type Host interface {
	Group(folder string) (berth.Group, bool)
	Groups() []berth.Group                                 // ordered by folder
	Status(ctx context.Context) (map[string]Status, error) // of all groups, by folder
	// Stop ends the turn that the group's agent is at, tools included, and keeps
	// its session. It returns when the order was taken; running is false if there
	// was nothing to stop.
	Stop(ctx context.Context, folder string) (running bool, err error)
	// NewSession has the group's next message begin an empty conversation.
	NewSession(ctx context.Context, folder string) error
	// Compact has the group's agent make its conversation shorter when it is at
	// nothing else; the chat of the message that wants it is told later what came of
	// it. asked is false if there is no conversation.
	Compact(ctx context.Context, folder string, m berth.Message) (asked bool, err error)
	Tasks(ctx context.Context, folder string) ([]berth.Task, error)
	// Usage returns what the group used today.
	Usage(ctx context.Context, folder string) ([]berth.Usage, error)
}

// Status is what a group's agent is doing.
type Status struct {
	State   berth.RunState // empty: no container runs
	Since   time.Time      // of the state
	Waits   int            // place in the line for a container, from 1; 0: none
	Pending int            // messages that no run has finished yet
	Error   string         // of the last run; empty: none
	GivenUp bool           // until the next message
}

// Memory keeps what is to be remembered; as in package sqlite.
type Memory interface {
	AddMemory(context.Context, memory.Memory) (m memory.Memory, known bool, err error)
	ForgetMemory(ctx context.Context, folder string, id int64, origin string) (memory.Memory, error)
	Memories(ctx context.Context, folder string) ([]memory.Memory, error)
}

// Pairing takes a token; as pairing.Desk.
type Pairing interface {
	Pair(context.Context, pairing.Attempt) (reply string, err error)
}

// Call is a message that may be a command.
type Call struct {
	Message berth.Message
	Group   berth.Group // of its chat; the zero value: it is not registered
	Allowed bool        // the sender's messages count in the chat
	Late    bool        // it comes so late that nothing is to be done any more
}

// Handler answers commands. Fill the fields; its method is safe for concurrent use.
type Handler struct {
	Host    Host
	Memory  Memory
	Pairing Pairing
	// Seen reports whether a command was answered before: then nothing is done. It
	// may be nil.
	Seen      func(context.Context, berth.Message) (bool, error)
	Assistant string
	Location  *time.Location
}

// late is told who wrote a command that nobody could carry out in time.
const late = "I was away when you wrote that, and did nothing. Write it again if you still want it."

// failure is told when something went wrong that is not for people.
const failure = "I hit an internal error while processing that. Please try again."

// Handle carries out c if it is a command that its sender may use. Then handled is
// true: the message must not be stored nor come to an agent, and reply, unless it
// is empty, is to be sent to its chat. An error with handled is for the operator's
// log; one without means that Seen failed, and the message has to come again. The
// same message handled again has the same effect once, also without Seen, but for
// /new and /stop, which do no harm twice.
//
// /pair is everybody's. All other commands are for senders who count in a
// registered chat, and about its group only; in main they may name another one.
// One that comes late is not carried out, and not a message either.
func (h *Handler) Handle(ctx context.Context, c Call) (reply string, handled bool, err error) {
	if c.Message.Bot {
		return "", false, nil
	}
	name, arg, ok := parse(c.Message.Text, c.Group.EffectiveTrigger(h.Assistant))
	if !ok {
		return "", false, nil
	}
	one, known := find(name)
	if name != pairName && (!known || c.Group.Folder == "" || !c.Allowed) {
		return "", false, nil
	}
	if h.Seen != nil {
		if seen, err := h.Seen(ctx, c.Message); seen || err != nil {
			return "", seen, err
		}
	}
	switch {
	case c.Late && name == pairName:
		return "", true, nil // it may be anybody's
	case c.Late:
		return late, true, nil
	case name == pairName:
		reply, err = h.Pairing.Pair(ctx, pairing.Attempt{
			ChatJID: c.Message.ChatJID, Folder: c.Group.Folder, Sender: c.Message.Sender, Name: c.Message.SenderName, Token: arg,
		})
		return reply, true, err
	}
	reply, err = one.do(h, ctx, c, arg)
	if known, ok := errors.AsType[*berth.Error](err); ok && known.Kind != berth.Internal {
		return sentence(known.Text), true, nil
	}
	if err != nil {
		return failure, true, fmt.Errorf("carry out /%s: %w", name, err)
	}
	return reply, true, nil
}

const pairName = "pair"

// one is a command.
type one struct {
	name, arg string
	about     string
	do        func(*Handler, context.Context, Call, string) (string, error)
}

// commands returns all but /pair. It is a function because help tells them all.
func commands() []one {
	return []one{
		{"help", "", "this list", (*Handler).help},
		{"status", "", "what the agent is doing", (*Handler).status},
		{"stop", "", "stop what it is doing; the conversation is kept", (*Handler).stop},
		{"new", "", "start a new conversation", (*Handler).fresh},
		{"compact", "", "make the conversation shorter", (*Handler).compact},
		{"tasks", "", "the scheduled tasks", (*Handler).tasks},
		{"remember", "<text>", "remember a fact in all later conversations", (*Handler).remember},
		{"memory", "", "what is remembered", (*Handler).memory},
		{"forget", "<id>", "forget one of that", (*Handler).forget},
		{"usage", "", "what was used of the model today", (*Handler).usage},
	}
}

func find(name string) (one, bool) {
	all := commands()
	i := slices.IndexFunc(all, func(c one) bool { return c.name == name })
	if i < 0 {
		return one{}, false
	}
	return all[i], true
}

// parse takes a command apart: /name and the rest, with or without the trigger
// before it.
func parse(text, trigger string) (name, arg string, ok bool) {
	text, trigger = strings.TrimSpace(text), strings.TrimSpace(trigger)
	if berth.Triggered(text, trigger) {
		// Case may change the length, so it is counted in characters.
		rest := []rune(text)[utf8.RuneCountInString(trigger):]
		text = strings.TrimLeft(string(rest), " \t\n,:;")
	}
	text, ok = strings.CutPrefix(text, "/")
	if !ok {
		return "", "", false
	}
	if i := strings.IndexFunc(text, unicode.IsSpace); i >= 0 {
		text, arg = text[:i], strings.TrimSpace(text[i:])
	}
	name = strings.ToLower(text)
	_, ok = find(name)
	return name, arg, ok || name == pairName
}

// target returns the group that a command is about: the chat's own, or in main the
// named one.
func (h *Handler) target(c Call, arg string) (berth.Group, error) {
	switch {
	case arg == "" || arg == c.Group.Folder:
		return c.Group, nil
	case !c.Group.IsMain():
		return berth.Group{}, berth.Errorf(berth.Denied, "only the main group may name another group: leave %.40q out", arg)
	}
	g, ok := h.Host.Group(arg)
	if !ok {
		return g, berth.Errorf(berth.NotFound, "there is no group %.40q: /status lists them", arg)
	}
	return g, nil
}

func (h *Handler) help(_ context.Context, c Call, _ string) (string, error) {
	var out strings.Builder
	out.WriteString("Commands:\n")
	for _, one := range commands() {
		out.WriteString(strings.TrimSpace("/"+one.name+" "+one.arg) + " - " + one.about + "\n")
	}
	out.WriteString("/pair <token> - put yourself on the list of people who count here")
	if c.Group.IsMain() {
		out.WriteString("\n\nHere /status, /stop, /new, /compact, /tasks, /memory and /usage take the folder of another group, as in /stop family.")
	}
	return out.String(), nil
}

// maxLines bounds a list in a chat.
const maxLines = 30

// lines joins the lines of a list, or says empty if there are none.
func lines(list []string, empty string) string {
	if len(list) == 0 {
		return empty
	}
	if n := len(list) - maxLines; n > 0 {
		list = append(list[:maxLines:maxLines], fmt.Sprintf("… and %d more", n))
	}
	return strings.Join(list, "\n")
}

func (h *Handler) status(ctx context.Context, c Call, arg string) (string, error) {
	g, err := h.target(c, arg)
	if err != nil {
		return "", err
	}
	groups := []berth.Group{g}
	if c.Group.IsMain() && arg == "" {
		groups = h.Host.Groups()
	}
	all, err := h.Host.Status(ctx)
	if err != nil {
		return "", err
	}
	var list []string
	for _, g := range groups {
		text := all[g.Folder].text(time.Now())
		if len(groups) > 1 || arg != "" {
			text = g.Folder + ": " + text
		}
		list = append(list, text)
	}
	return sentence(lines(list, "no groups are registered")), nil
}

func (s Status) text(now time.Time) string {
	text := "no container runs"
	switch {
	case s.Waits > 0:
		text = fmt.Sprintf("waits for a free container, place %d", s.Waits)
	case s.State != "":
		text = string(s.State)
		if !s.Since.IsZero() {
			text += " for " + now.Sub(s.Since).Round(time.Second).String()
		}
	}
	if s.Pending > 0 {
		text += fmt.Sprintf(", %d messages to be answered", s.Pending)
	}
	if s.GivenUp {
		text += ", given up until the next message"
	}
	if s.Error != "" {
		text += ", last error: " + oneLine(s.Error, 200)
	}
	return text
}

func (h *Handler) stop(ctx context.Context, c Call, arg string) (string, error) {
	g, err := h.target(c, arg)
	if err != nil {
		return "", err
	}
	running, err := h.Host.Stop(ctx, g.Folder)
	if err != nil || running {
		return "Stopped. The conversation is kept.", err
	}
	return "Nothing is running.", nil
}

func (h *Handler) fresh(ctx context.Context, c Call, arg string) (string, error) {
	g, err := h.target(c, arg)
	if err == nil {
		err = h.Host.NewSession(ctx, g.Folder)
	}
	return "Started a new conversation session.", err
}

func (h *Handler) compact(ctx context.Context, c Call, arg string) (string, error) {
	g, err := h.target(c, arg)
	if err != nil {
		return "", err
	}
	asked, err := h.Host.Compact(ctx, g.Folder, c.Message)
	if err != nil || asked {
		return "I will make the conversation shorter, and say what came of it.", err
	}
	return "There is nothing to shorten.", nil
}

func (h *Handler) tasks(ctx context.Context, c Call, arg string) (string, error) {
	g, err := h.target(c, arg)
	if err != nil {
		return "", err
	}
	tasks, err := h.Host.Tasks(ctx, g.Folder)
	if err != nil {
		return "", err
	}
	var list []string
	for _, t := range tasks {
		next := string(t.Status)
		if !t.NextRun.IsZero() {
			zone, err := time.LoadLocation(t.Zone)
			if err != nil {
				zone = h.Location
			}
			next = "next " + t.NextRun.In(zone).Format("Mon 2006-01-02 15:04 MST")
		}
		list = append(list, fmt.Sprintf("%s: %s (%s %s), %s", t.ID, oneLine(t.Prompt, 80), t.Kind, oneLine(t.Value, 40), next))
	}
	return lines(list, "No scheduled tasks found."), nil
}

func (h *Handler) remember(ctx context.Context, c Call, arg string) (string, error) {
	if arg == "" {
		return "Usage: /remember <text>", nil
	}
	_, known, err := h.Memory.AddMemory(ctx, memory.Memory{
		Folder: c.Group.Folder, Fact: arg, Source: source(c.Message), CreatedAt: time.Now(), Origin: origin(c.Message),
	})
	if known {
		return "Skipped: similar fact already exists.", err
	}
	return "Saved to long-term memory.", err
}

func source(m berth.Message) string {
	if m.SenderName != "" {
		return m.SenderName
	}
	return m.Sender
}

// origin is the idempotency key of what a message asked for.
func origin(m berth.Message) string { return "command/" + m.ChatJID + "/" + m.ID }

func (h *Handler) memory(ctx context.Context, c Call, arg string) (string, error) {
	folders := []string{memory.Global, c.Group.Folder}
	if arg != "" {
		if !c.Group.IsMain() || arg != memory.Global {
			g, err := h.target(c, arg)
			if err != nil {
				return "", err
			}
			arg = g.Folder
		}
		folders = []string{arg}
	}
	var list []string
	for _, folder := range folders {
		memories, err := h.Memory.Memories(ctx, folder)
		if err != nil {
			return "", err
		}
		for _, m := range memories {
			text := fmt.Sprintf("%d: %s", m.ID, oneLine(m.Fact, 300))
			if folder == memory.Global {
				text = "for all groups: " + oneLine(m.Fact, 300)
			}
			list = append(list, text)
		}
	}
	return lines(list, "No saved durable facts."), nil
}

func (h *Handler) forget(ctx context.Context, c Call, arg string) (string, error) {
	id, err := strconv.ParseInt(strings.TrimPrefix(arg, "#"), 10, 64)
	if err != nil || id <= 0 {
		return "Usage: /forget <id>, a number as in /memory", nil
	}
	_, err = h.Memory.ForgetMemory(ctx, c.Group.Folder, id, origin(c.Message))
	if known, ok := errors.AsType[*berth.Error](err); ok && known.Kind == berth.NotFound {
		return fmt.Sprintf("Memory %d not found.", id), nil
	}
	return fmt.Sprintf("Memory %d deleted.", id), err
}

func (h *Handler) usage(ctx context.Context, c Call, arg string) (string, error) {
	g, err := h.target(c, arg)
	if err != nil {
		return "", err
	}
	used, err := h.Host.Usage(ctx, g.Folder)
	if err != nil {
		return "", err
	}
	var list []string
	for _, u := range used {
		about := ""
		if u.Estimated {
			about = "about "
		}
		list = append(list, fmt.Sprintf("%s: %d requests, %s%d tokens in, %d out", strings.TrimSpace(u.Provider+" "+u.Model), u.Requests, about, u.Input+u.CacheRead+u.CacheWrite, u.Output))
	}
	return lines(list, "Nothing was used today."), nil
}

// oneLine returns the beginning of a text on one line, of at most about so many
// characters.
func oneLine(text string, most int) string {
	runes := []rune(strings.Join(strings.Fields(text), " "))
	if len(runes) <= most {
		return string(runes)
	}
	return string(runes[:most]) + "…"
}

// sentence begins an error's text like a sentence.
func sentence(text string) string {
	first, size := utf8.DecodeRuneInString(text)
	return string(unicode.ToUpper(first)) + text[size:]
}
