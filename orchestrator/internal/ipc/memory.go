package ipc

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"berth/orchestrator/internal/berth"
	mem "berth/orchestrator/internal/memory"
)

// MemoryStore keeps what agents are told to remember, and searches what was said.
// Its methods are as in package sqlite.
type MemoryStore interface {
	AddMemory(context.Context, mem.Memory) (m mem.Memory, known bool, err error)
	UpdateMemory(context.Context, mem.Memory) (mem.Memory, error)
	ForgetMemory(ctx context.Context, folder string, id int64, origin string) (mem.Memory, error)
	Memories(ctx context.Context, folder string) ([]mem.Memory, error)
	SearchHistory(ctx context.Context, chatJID, query string, before int64, limit int) ([]berth.Message, error)
}

// memoryEntry is a memory as a container sees it.
type memoryEntry struct {
	ID        int64  `json:"id"`    // within the group
	Group     string `json:"group"` // the folder; mem.Global: all groups
	Fact      string `json:"fact"`
	Source    string `json:"source,omitempty"`
	CreatedAt string `json:"createdAt,omitempty"` // UTC
	Known     bool   `json:"known,omitempty"`     // it was remembered before
}

func entryOf(m mem.Memory) memoryEntry {
	return memoryEntry{ID: m.ID, Group: m.Folder, Fact: m.Fact, Source: m.Source, CreatedAt: m.CreatedAt.UTC().Format(stampLayout)}
}

// targetFolder returns the folder that a request is about: the own one, or, if
// main asks, any group's, and mem.Global.
func (b *inbox) targetFolder(r *request) (string, error) {
	folder := r.get("group")
	switch {
	case folder == "" || folder == b.group.Folder:
		return b.group.Folder, nil
	case !b.group.IsMain():
		return "", berth.Errorf(berth.Denied, "group %s may ask about itself only: leave group out", b.group.Folder)
	case folder == mem.Global:
		return folder, nil
	}
	if _, ok := b.Groups.Group(folder); !ok {
		return "", berth.Errorf(berth.Denied, "group %.80q is not registered: give a group's folder, or %s", folder, mem.Global)
	}
	return folder, nil
}

func (b *inbox) remember(ctx context.Context, r *request) (any, error) {
	folder, err := b.targetFolder(r)
	if err != nil {
		return nil, err
	}
	m, known, err := b.Store.AddMemory(ctx, mem.Memory{Folder: folder, Fact: r.get("fact"), Source: b.group.Folder, CreatedAt: time.Now(), Origin: r.key})
	if err != nil {
		return nil, err
	}
	e := entryOf(m)
	e.Known = known
	return e, nil
}

func (b *inbox) updateMemory(ctx context.Context, r *request) (any, error) {
	folder, id, err := b.targetMemory(r)
	if err != nil {
		return nil, err
	}
	m, err := b.Store.UpdateMemory(ctx, mem.Memory{Folder: folder, ID: id, Fact: r.get("fact"), UpdatedAt: time.Now()})
	if err != nil {
		return nil, err
	}
	return entryOf(m), nil
}

func (b *inbox) forget(ctx context.Context, r *request) (any, error) {
	folder, id, err := b.targetMemory(r)
	if err != nil {
		return nil, err
	}
	m, err := b.Store.ForgetMemory(ctx, folder, id, r.key)
	if err != nil {
		return nil, err
	}
	return memoryEntry{ID: m.ID, Group: m.Folder, Fact: m.Fact}, nil
}

func (b *inbox) targetMemory(r *request) (folder string, id int64, err error) {
	if folder, err = b.targetFolder(r); err != nil {
		return "", 0, err
	}
	if id, err = r.number("memoryId"); err == nil && id <= 0 {
		err = berth.Errorf(berth.Invalid, "%s needs the field memoryId, a number as in list_memory", r.verb)
	}
	return folder, id, err
}

// listMemory returns the memories of the group and of all groups, or those of one
// that main names.
func (b *inbox) listMemory(ctx context.Context, r *request) (any, error) {
	folder, err := b.targetFolder(r)
	if err != nil {
		return nil, err
	}
	folders := []string{folder}
	if !r.has("group") {
		folders = []string{mem.Global, folder}
	}
	out := struct {
		Memories []memoryEntry `json:"memories"`
	}{[]memoryEntry{}}
	for _, folder := range folders {
		memories, err := b.Store.Memories(ctx, folder)
		if err != nil {
			return nil, err
		}
		for _, m := range memories {
			out.Memories = append(out.Memories, entryOf(m))
		}
	}
	return out, nil
}

// What a search returns.
const (
	usualFound = 20
	maxExcerpt = 600 // characters of one message
)

// foundEntry is a message that a search found.
type foundEntry struct {
	Seq       int64  `json:"seq,omitempty"` // 0: the agent said it, and the channel keeps no message of it
	Time      string `json:"time"`          // UTC
	Sender    string `json:"sender"`
	Assistant bool   `json:"assistant,omitempty"` // the agent said it
	Text      string `json:"text"`                // what stands around the first word
}

// searchHistory searches the messages of the group's own chat, or of that of
// another group for main.
func (b *inbox) searchHistory(ctx context.Context, r *request) (any, error) {
	folder, err := b.targetFolder(r)
	if err != nil {
		return nil, err
	}
	chat := b.group.JID
	if folder != b.group.Folder {
		g, ok := b.Groups.Group(folder)
		if !ok {
			return nil, berth.Errorf(berth.Invalid, "only a group has a history: give its folder")
		}
		chat = g.JID
	}
	before, err := r.number("before")
	if err != nil {
		return nil, err
	}
	limit, err := r.number("limit")
	if err != nil {
		return nil, err
	}
	if limit == 0 {
		limit = usualFound
	}
	query := r.get("query")
	messages, err := b.Store.SearchHistory(ctx, chat, query, before, int(min(max(limit, 1), 1000)))
	if err != nil {
		return nil, err
	}
	out := struct {
		Messages []foundEntry `json:"messages"`
	}{[]foundEntry{}}
	for _, m := range messages {
		out.Messages = append(out.Messages, foundEntry{
			Seq: m.Seq, Time: m.Time.UTC().Format(stampLayout), Sender: m.SenderName, Assistant: m.Bot, Text: around(m.Text, query),
		})
	}
	return out, nil
}

// around returns the part of a long text in which the first word of a query is.
func around(text, query string) string {
	if utf8.RuneCountInString(text) <= maxExcerpt {
		return text
	}
	word := ""
	if words := strings.Fields(strings.Trim(query, `"`)); len(words) > 0 {
		word = strings.ToLower(strings.Trim(words[0], `"*`))
	}
	runes := []rune(text)
	from := 0
	if at := strings.Index(strings.ToLower(text), word); at > 0 {
		// Lower case may have another length: about the place is enough.
		from = max(0, utf8.RuneCountInString(text[:min(at, len(text))])-maxExcerpt/2)
	}
	to := min(len(runes), from+maxExcerpt)
	out := string(runes[from:to])
	if from > 0 {
		out = "…" + out
	}
	if to < len(runes) {
		out += "…"
	}
	return out
}

// number returns a whole number, given as such or as a text, or 0 if it is not
// given.
func (r *request) number(name string) (int64, error) {
	if !r.has(name) {
		return 0, nil
	}
	var text string
	var number json.Number
	if json.Unmarshal(r.fields[name], &text) != nil && json.Unmarshal(r.fields[name], &number) == nil {
		text = number.String()
	}
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil || n < 0 {
		return 0, berth.Errorf(berth.Invalid, "the field %s has to be a whole number", name)
	}
	return n, nil
}
