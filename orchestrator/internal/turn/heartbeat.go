package turn

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"berth/orchestrator/internal/berth"
)

// heartbeatMark begins what a heartbeat found.
const heartbeatMark = "[Heartbeat summary]"

// What a heartbeat is told of its chat.
const (
	recentMessages = 6
	recentText     = 2000 // characters of all of them, as they stand in the prompt
)

// heartbeatPrompt is taskPrompt for a heartbeat: it knows what was said last in its
// chat, which has another session.
func (c *carrier) heartbeatPrompt(ctx context.Context, prompt string) (string, error) {
	said, err := c.Store.Recent(ctx, c.group.JID, recentMessages)
	if err != nil {
		return "", err
	}
	return prompt + recent(said), nil
}

// recent renders the last messages of a chat, oldest first: a line each, so that
// none can pass for another. The newest ones go first where there is no room for all.
func recent(messages []berth.Message) string {
	text, room := "", recentText
	for i := len(messages) - 1; i >= 0; i-- {
		role := "USER: "
		if messages[i].Bot {
			role = "ASSISTANT: "
		}
		words := strings.Join(strings.Fields(messages[i].Text), " ")
		left := room - len(role) - len("\n")
		if words == "" {
			continue
		}
		if left <= 0 {
			break
		}
		line := role + escaped(words, left) + "\n"
		text, room = line+text, room-utf8.RuneCountInString(line)
	}
	if text == "" {
		return ""
	}
	return strings.ToValidUTF8("\n<recent>\n"+text+"</recent>", "\uFFFD")
}

// escaped escapes a text for a prompt, of one that is longer then than most
// characters its beginning.
func escaped(text string, most int) string {
	if all := escaper.Replace(text); utf8.RuneCountInString(all) <= most {
		return all
	}
	var out strings.Builder
	most -= len([]rune("…"))
	for _, r := range text {
		one := escaper.Replace(string(r))
		if most -= utf8.RuneCountInString(one); most < 0 {
			break
		}
		out.WriteString(one)
	}
	return out.String() + "…"
}

// found returns what a heartbeat says to the agent of its chat: also what it keeps
// from the people there.
func found(result string) string {
	text := strings.NewReplacer("<internal>", "", "</internal>", "").Replace(result)
	return strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(text), heartbeatMark))
}

// writeNotes renders what heartbeats found for the agent of their chat.
func writeNotes(out *strings.Builder, notes []berth.Note) {
	for _, n := range notes {
		fmt.Fprintf(out, "<note time=\"%s\">%s\n%s</note>\n", n.Time.UTC().Format(stampLayout), heartbeatMark, escaper.Replace(n.Text))
	}
}
