package main

import (
	"fmt"
	"io"
	"testing"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

// The auditor must see each fault, or its zeros are worth nothing.
func TestAudit(t *testing.T) {
	twice := kind{name: "twice", again: true}
	silent := kind{name: "silent", silent: true}
	echo := func(numbers ...int) string {
		text := "<context />\n<messages>\n"
		for _, n := range numbers {
			text += fmt.Sprintf("<message>msg-g000-%05d\necho</message>\n", n)
		}
		return text + "</messages>"
	}
	done := web.Answer{State: web.AnswerDone, Texts: []string{"x"}, Run: "healthy"}
	for _, c := range []struct {
		name  string
		kinds []kind
		bot   []string
		fate  web.Answer
		want  report
	}{
		{"all is well", []kind{plain, plain, silent}, []string{echo(0), echo(1)}, done, report{answered: 2, silent: 1}},
		{"one answer to a batch", []kind{plain, twice, plain}, []string{echo(0, 1, 2)}, done, report{answered: 3}},
		{"after a change of daemons", []kind{plain}, []string{"<memory>\n</memory>\n" + echo(0)}, done, report{answered: 1}},
		{"in two pieces", []kind{plain, twice}, []string{"<context />\n<messages>\n<message>msg-g000-00000", "msg-g000-00001\necho</message>\n</messages>", "again-g000-00001"}, done, report{answered: 2}},
		{"lost", []kind{plain, plain}, []string{echo(1)}, done, report{answered: 1, lost: 1}},
		{"half of it lost", []kind{twice}, []string{echo(0)}, done, report{lost: 1}},
		{"killed before it said anything", []kind{plain}, nil, web.Answer{State: web.AnswerDone, Run: "killed"}, report{lost: 1}},
		{"cut short", []kind{twice}, []string{echo(0)}, web.Answer{State: web.AnswerDone, Texts: []string{"x"}, Run: "killed"}, report{cut: 1}},
		{"given up", []kind{doom}, []string{"I could not answer. Sorry."}, web.Answer{State: web.AnswerFailed}, report{expected: 1, unanswered: 1}},
		{"doubled", []kind{plain}, []string{echo(0), echo(0)}, done, report{answered: 1, doubled: 1}},
		{"second text doubled", []kind{twice}, []string{echo(0), "again-g000-00000", "again-g000-00000"}, done, report{answered: 1, doubled: 1}},
		{"out of order", []kind{plain, plain}, []string{echo(1), echo(0)}, done, report{answered: 2, disordered: 1}},
		{"out of order in a batch", []kind{plain, plain}, []string{echo(1, 0)}, done, report{answered: 2, disordered: 1}},
		{"uncalled for", []kind{plain}, []string{echo(0), "again-g000-00000", "hello"}, done, report{answered: 1, uncalled: 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &soak{out: io.Discard, killed: map[string]bool{"killed": true}}
			chat := &chat{folder: "g000"}
			var messages []berth.Message
			for i, k := range c.kinds {
				m := &message{token: fmt.Sprintf("msg-g000-%05d", i), kind: k, seq: int64(i + 1)}
				chat.sent = append(chat.sent, m)
				messages = append(messages, berth.Message{Text: m.token + "\necho"})
			}
			for _, text := range c.bot {
				messages = append(messages, berth.Message{Bot: true, Text: text})
			}
			got := report{kinds: make(map[string]int)}
			fate := func(int64) (web.Answer, error) { return c.fate, nil }
			if err := s.auditChat(chat, tellStory(messages), fate, &got); err != nil {
				t.Fatal(err)
			}
			c.want.sent, got.kinds = len(c.kinds), nil
			if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}
