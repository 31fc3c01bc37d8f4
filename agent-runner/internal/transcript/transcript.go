// Package transcript keeps what is asked and answered in a session, for any engine,
// and makes a file of it that people and agents can read when the session ends or
// is made shorter.
//
// What is kept is of the container's own: its tools can write to all of it.
// Reading is bounded, and no link leads out of the folders.
package transcript

import (
	"fmt"
	"log"
	"slices"
	"strings"
	"time"
	_ "time/tzdata" // images have no zones
	"unicode"

	"berth/agent-runner/internal/prompt"
	"berth/agent-runner/protocol"
)

// Bounds.
const (
	maxEntry    = 2000        // characters of one entry
	maxKept     = 512 << 10   // bytes, from which on what is kept is archived
	maxFile     = 4 * maxKept // bytes of it with the marks around it
	maxName     = 60          // characters of who says something
	maxTitle    = 80          // characters
	leastToHide = 8           // bytes; a shorter secret would hide ordinary words
)

// Config is what a Keeper has to know of its run.
type Config struct {
	protocol.Input
	Home string // the group's own, kept between runs
	Dir  string // the group's folder
	Log  *log.Logger
}

// Keeper keeps the transcript of a run's session. It belongs to one goroutine. A
// nil Keeper keeps nothing. It never fails its caller: what goes wrong is said on
// the log, and the conversation is worth more than the record of it.
type Keeper struct {
	c        Config
	zone     *time.Location
	now      func() time.Time
	hide     *strings.Replacer
	store    *store // nil: of an isolated run nothing is left
	entries  []entry
	size     int
	previous string // the last archive that this session follows on
}

// entry is one thing that was said.
type entry struct {
	From string `json:"from,omitempty"` // empty: the assistant
	Text string `json:"text"`
}

// Open takes up the transcript of the session that the run goes on with. Sessions
// that have ended, which are all others, are archived.
func Open(c Config) *Keeper {
	k := &Keeper{c: c, zone: time.UTC, now: time.Now}
	if zone, err := time.LoadLocation(c.Timezone); err == nil {
		k.zone = zone
	}
	var secrets []string
	for _, s := range c.Secrets {
		if len(s) >= leastToHide {
			secrets = append(secrets, s, "***")
		}
	}
	k.hide = strings.NewReplacer(secrets...)
	if c.Isolated {
		return k
	}
	var err error
	if k.store, err = openStore(c.Home, c.SessionID, "run-"+c.RunID); err != nil {
		c.Log.Printf("keep what is said: %v", err)
		return k
	}
	k.entries, k.previous = k.store.load(k.store.name)
	for _, e := range k.entries {
		k.size += len(e.Text)
	}
	k.archiveEnded()
	return k
}

// archiveEnded archives the sessions that nobody goes on with.
func (k *Keeper) archiveEnded() {
	begins := k.previous == ""
	for _, name := range k.store.others() {
		entries, previous := k.store.load(name)
		path, err := k.archive(entries)
		if err != nil {
			k.c.Log.Printf("archive an earlier conversation, which the next run tries again: %v", err)
			return
		}
		if path == "" && begins {
			path = previous // of a run that came to nothing
		}
		if path != "" {
			k.follow(path)
			k.c.Log.Printf("the conversation before this one lies in %s", path)
		}
		k.store.remove(name)
	}
}

// Earlier returns what an agent is told of the conversation before this one; it is
// empty if there is none.
func (k *Keeper) Earlier() string {
	if k == nil || k.previous == "" {
		return ""
	}
	return fmt.Sprintf("What was said in this chat before this conversation lies in %s of your folder: read it when people speak of something that you do not know.", k.previous)
}

// Asked notes a prompt that the engine has taken. What a run that failed asked
// before, and the next one asks again, is noted once.
func (k *Keeper) Asked(text string) {
	if k == nil {
		return
	}
	p := prompt.Parse(text)
	named := slices.ContainsFunc(p.Messages, func(m prompt.Message) bool { return m.Sender != "" })
	var said []entry
	for _, m := range p.Messages {
		from := m.Sender
		switch {
		case from == "" && named:
			continue // of the host, beside what people said
		case from == "" && p.Scheduled:
			from = "Scheduled task"
		case from == "":
			from = "User"
		}
		if text := strings.TrimSpace(m.Text); text != "" {
			said = append(said, entry{oneLine(from, maxName), k.bound(text)})
		}
	}
	if open := k.unanswered(); len(open) <= len(said) && slices.Equal(open, said[:len(open)]) {
		said = said[len(open):]
	}
	for _, e := range said {
		k.add(e)
	}
}

// unanswered returns what was said since the last answer.
func (k *Keeper) unanswered() []entry {
	for i, e := range slices.Backward(k.entries) {
		if e.From == "" {
			return k.entries[i+1:]
		}
	}
	return k.entries
}

// Answered notes what the chat gets to read.
func (k *Keeper) Answered(text string) {
	if k == nil {
		return
	}
	if text = protocol.Visible(text); text != "" {
		k.add(entry{Text: k.bound(text)})
	}
}

// Session names the session, as soon as it is known and when that changes.
func (k *Keeper) Session(id string) {
	if k == nil || k.store == nil || !protocol.ValidSessionID(id) {
		return
	}
	if err := k.store.rename(id); err != nil {
		k.c.Log.Printf("keep what is said: %v", err)
	}
}

// bound returns what is kept of a text.
func (k *Keeper) bound(text string) string { return cut(k.hide.Replace(text), maxEntry) }

func (k *Keeper) add(e entry) {
	if k.size > maxKept {
		if path, err := k.Archive(); path == "" {
			k.c.Log.Printf("what was said so far is too much to keep, and there is no archive of it: %v", err)
			k.reset()
		}
	}
	k.entries = append(k.entries, e)
	k.size += len(e.Text)
	if k.store == nil {
		return
	}
	if err := k.store.add(line{Previous: k.previous, entry: e}); err != nil {
		k.c.Log.Printf("keep what is said: %v", err)
	}
}

// Archive makes a file of what was said since the last archive, and returns its
// path in the group's folder; it is empty if that was no conversation. On an error
// nothing is lost: the next archive has it.
func (k *Keeper) Archive() (path string, err error) {
	if k == nil {
		return "", nil
	}
	if path, err = k.archive(k.entries); path == "" || err != nil {
		return "", err
	}
	k.previous = path
	k.reset()
	return path, nil
}

// reset forgets what was said. A kill between the archive and this leaves it in the
// next archive once more.
func (k *Keeper) reset() {
	k.entries, k.size = nil, 0
	if k.store == nil {
		return
	}
	k.store.remove(k.store.name)
	if k.previous != "" {
		k.follow(k.previous)
	}
}

// follow notes what the session follows on, before anything is said in it.
func (k *Keeper) follow(path string) {
	k.previous = path
	if err := k.store.add(line{Previous: path}); err != nil {
		k.c.Log.Printf("keep what is said: %v", err)
	}
}

// Close lets go of the files.
func (k *Keeper) Close() {
	if k != nil && k.store != nil {
		k.store.close()
	}
}

// archive makes a file of a conversation, if it is one.
func (k *Keeper) archive(entries []entry) (path string, err error) {
	if !slices.ContainsFunc(entries, func(e entry) bool { return e.From == "" }) {
		return "", nil // nobody was answered
	}
	title, text := k.render(entries)
	return write(k.c.Dir, fileName(title, k.now().In(k.zone)), text)
}

// render returns a conversation as Markdown. Only who says something begins a line;
// what he says cannot pass for somebody else's words.
func (k *Keeper) render(entries []entry) (title string, text []byte) {
	assistant := oneLine(k.c.AssistantName, maxName)
	if assistant == "" {
		assistant = "Assistant"
	}
	for _, e := range entries {
		if title == "" && e.From != "" {
			title = oneLine(prompt.WithoutMention(e.Text, k.c.AssistantName), maxTitle)
		}
	}
	var out strings.Builder
	fmt.Fprintf(&out, "# %s\n\nArchived: %s\n\n---\n", orElse(title, "Conversation"), k.now().In(k.zone).Format("2006-01-02 15:04 MST"))
	for _, e := range entries {
		from := orElse(oneLine(e.From, maxName), assistant)
		fmt.Fprintf(&out, "\n**%s**: %s\n", strings.ReplaceAll(from, "*", ""), strings.ReplaceAll(plain(cut(e.Text, maxEntry)), "\n", "\n  "))
	}
	return title, []byte(out.String())
}

// plain removes what is no text, and makes each end of a line one that every
// reader of the file sees as one.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\u2028' || r == '\u2029':
			return '\n'
		case unicode.IsControl(r) && r != '\n' && r != '\t':
			return -1
		}
		return r
	}, strings.ReplaceAll(text, "\r", "\n"))
}

// fileName returns the name of an archive without its end: the day and the
// beginning of the title, or the time of day where the title has no letters.
func fileName(title string, now time.Time) string {
	const most = 50 // letters
	var slug []rune
	for _, r := range strings.ToLower(title) {
		switch {
		case len(slug) == most:
		case unicode.IsLetter(r) || unicode.IsDigit(r):
			slug = append(slug, r)
		case len(slug) > 0 && slug[len(slug)-1] != '-':
			slug = append(slug, '-')
		}
	}
	name := strings.TrimRight(string(slug), "-")
	if name == "" {
		name = "conversation-" + now.Format("1504")
	}
	return now.Format(time.DateOnly) + "-" + name
}

// cut returns the beginning of a text, of at most so many characters.
func cut(text string, most int) string {
	const mark = "..."
	text = strings.ToValidUTF8(text, "\uFFFD")
	n := 0
	for i := range text {
		if n == most {
			return text[:i] + mark
		}
		n++
	}
	return text
}

func oneLine(text string, most int) string {
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
	return cut(strings.Join(strings.Fields(text), " "), most)
}

func orElse(s, fallback string) string {
	if s == "" {
		return fallback
	}
	return s
}
