// Package prompt reads the text that the host makes of chat messages, for
// engines that answer without a model.
package prompt

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Scheduled stands before the prompt of a task.
const Scheduled = "[SCHEDULED TASK - The following message was sent automatically and is not coming directly from the user or group.]\n\n"

// Prompt is a prompt taken apart.
type Prompt struct {
	Context   map[string]string // attributes of the last context block
	Messages  []Message         // in order; text outside any message is one from nobody
	Scheduled bool
}

// Message is one chat message.
type Message struct {
	Sender string // empty: not said
	Time   string // as the host wrote it
	Text   string
	Quote  string // the message that this one answers, if it came along
}

var (
	contextTag = regexp.MustCompile(`<context((?:\s+[\w-]+="[^"]*")*)\s*/>`)
	messageTag = regexp.MustCompile(`(?s)<message((?:\s+[\w-]+="[^"]*")*)\s*>(.*?)</message>`)
	quoteTag   = regexp.MustCompile(`(?s)^\s*<quoted_message(?:\s+[\w-]+="[^"]*")*\s*>(.*?)</quoted_message>`)
	blockTag   = regexp.MustCompile(`(?m)^\s*</?messages>\s*$`)
	attribute  = regexp.MustCompile(`([\w-]+)="([^"]*)"`)
	entities   = strings.NewReplacer("&lt;", "<", "&gt;", ">", "&quot;", `"`, "&#39;", "'", "&apos;", "'", "&amp;", "&")
)

// Parse takes any text apart; it never fails. The host escapes what people
// wrote, so a tag in the text is one that the host wrote.
func Parse(text string) Prompt {
	p := Prompt{Context: make(map[string]string)}
	text, p.Scheduled = strings.CutPrefix(text, Scheduled)
	text = contextTag.ReplaceAllStringFunc(text, func(tag string) string {
		p.Context = attributes(tag)
		return ""
	})
	outside := 0
	loose := func(s string) {
		if s = strings.TrimSpace(blockTag.ReplaceAllString(s, "")); s != "" {
			p.Messages = append(p.Messages, Message{Text: s})
		}
	}
	for _, m := range messageTag.FindAllStringSubmatchIndex(text, -1) {
		loose(text[outside:m[0]])
		attrs, body := attributes(text[m[2]:m[3]]), text[m[4]:m[5]]
		message := Message{Sender: attrs["sender"], Time: attrs["time"]}
		if quote := quoteTag.FindStringSubmatchIndex(body); quote != nil {
			message.Quote = entities.Replace(body[quote[2]:quote[3]])
			body = body[quote[1]:]
		}
		message.Text = entities.Replace(body)
		p.Messages = append(p.Messages, message)
		outside = m[1]
	}
	loose(text[outside:])
	return p
}

// Last returns the last message with a text, without the mention that it begins
// with; assistant is the name that people call, empty if unknown.
func (p Prompt) Last(assistant string) Message {
	for i := len(p.Messages) - 1; i >= 0; i-- {
		if m := p.Messages[i]; strings.TrimSpace(m.Text) != "" {
			m.Text = WithoutMention(m.Text, assistant)
			return m
		}
	}
	return Message{}
}

// Senders returns who wrote, each once, in the order of their first message.
func (p Prompt) Senders() []string {
	var names []string
	seen := make(map[string]bool)
	for _, m := range p.Messages {
		if m.Sender != "" && !seen[m.Sender] {
			seen[m.Sender] = true
			names = append(names, m.Sender)
		}
	}
	return names
}

// WithoutMention removes "@name" and the blanks or the punctuation after it from
// the start of text.
func WithoutMention(text, assistant string) string {
	text = strings.TrimSpace(text)
	if !strings.HasPrefix(text, "@") {
		return text
	}
	end := strings.IndexFunc(text, unicode.IsSpace)
	if end < 0 {
		end = len(text)
	}
	// A name may have blanks in it.
	if n := len("@" + assistant); assistant != "" && len(text) >= n && strings.EqualFold(text[:n], "@"+assistant) {
		if next, _ := utf8.DecodeRuneInString(text[n:]); n == len(text) || !wordRune(next) {
			end = n
		}
	}
	return strings.TrimSpace(strings.TrimLeft(strings.TrimSpace(text[end:]), ",:;"))
}

func wordRune(r rune) bool { return r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r) }

func attributes(tag string) map[string]string {
	attrs := make(map[string]string)
	for _, m := range attribute.FindAllStringSubmatch(tag, -1) {
		attrs[m[1]] = entities.Replace(m[2])
	}
	return attrs
}
