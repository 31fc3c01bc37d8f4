package acp

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

// rude is an agent that does what the tests need an agent to do wrong, or seldom.
func rude(how string, in io.Reader, out io.Writer) {
	r := &rudeAgent{lines: bufio.NewReader(in), out: bufio.NewWriter(out)}
	for {
		m, ok := r.read()
		if !ok {
			return
		}
		switch m.Method {
		case "initialize":
			version, caps := 1, `{"sessionCapabilities":{"resume":{}}}`
			if how == "version" {
				version = 2
			}
			if how == "forgetful" {
				caps = "{}"
			}
			if how == "slow" { // the first is answered after the second
				if r.first == nil {
					r.first = m.ID
					fmt.Fprintln(os.Stderr, "it has the first request")
					continue
				}
				r.say(`{"id":%s,"result":{"protocolVersion":%d,"agentCapabilities":%s}}`, m.ID, version, caps)
				m.ID = r.first
			}
			r.say(`{"id":%s,"result":{"protocolVersion":%d,"agentCapabilities":%s}}`, m.ID, version, caps)
		case "session/new", "session/resume":
			switch how {
			case "login":
				r.say(`{"id":%s,"error":{"code":-32000,"message":"Authentication required"}}`, m.ID)
			case "nonsense":
				r.say(`{"id":%s,"result":"yes"}`, m.ID)
			case "nameless":
				r.say(`{"id":%s,"result":{}}`, m.ID)
			default:
				r.say(`{"id":%s,"result":{"sessionId":"s1"}}`, m.ID)
			}
		case "session/prompt":
			r.prompt(how, m)
		case "session/cancel":
			if how == "late" {
				r.chunk("too late")
				r.say(`{"id":%d,"result":{"stopReason":"end_turn"}}`, r.prompts)
			}
		}
	}
}

type rudeAgent struct {
	lines   *bufio.Reader
	out     *bufio.Writer
	prompts int
	first   json.RawMessage // id
}

type rudeMessage struct {
	ID     json.RawMessage
	Method string
	Result json.RawMessage
	Error  *struct{ Code int }
}

func (r *rudeAgent) read() (m rudeMessage, ok bool) {
	line, err := r.lines.ReadBytes('\n')
	if err != nil {
		return m, false
	}
	if err := json.Unmarshal(line, &m); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return m, false
	}
	return m, true
}

func (r *rudeAgent) say(format string, args ...any) {
	fmt.Fprintf(r.out, strings.Replace(format, "{", `{"jsonrpc":"2.0",`, 1)+"\n", args...)
	r.out.Flush()
}

func (r *rudeAgent) update(kind, rest string) {
	r.say(`{"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":"%s",%s}}}`, kind, rest)
}

func (r *rudeAgent) chunk(text string) {
	r.update("agent_message_chunk", fmt.Sprintf(`"content":{"type":"text","text":%q}`, text))
}

func (r *rudeAgent) prompt(how string, m rudeMessage) {
	reason := "end_turn"
	switch how {
	case "flood":
		text := strings.Repeat("x", 1000)
		for range 20_000 {
			r.chunk(text)
		}
	case "questions":
		const n = 2_000
		allowed := 0
		for i := range n {
			r.say(`{"id":%d,"method":"session/request_permission","params":{"options":[{"optionId":"b","kind":"reject_always"},{"optionId":"a","kind":"allow_always"}]}}`, i)
		}
		for range n {
			if m, ok := r.read(); ok && strings.Contains(string(m.Result), `"optionId":"a"`) {
				allowed++
			}
		}
		r.chunk(fmt.Sprintf("%d of %d allowed", allowed, n))
	case "curious": // it asks for ever
		for i := 0; ; i++ {
			r.say(`{"id":%d,"method":"session/request_permission","params":{"options":[{"optionId":"a","kind":"allow_once"}]}}`, i)
			if m, ok := r.read(); !ok || m.Method != "" {
				return
			}
		}
	case "swallow": // what its model's provider says
		resp, err := http.Post(os.Getenv("OPENAI_BASE_URL")+"/chat/completions", "application/json", strings.NewReader(`{"messages":[{"role":"user","content":"http 500"}]}`))
		if err == nil {
			resp.Body.Close()
		}
	case "dies":
		r.chunk("half of")
		os.Exit(3)
	case "wishes":
		for i, method := range []string{"fs/read_text_file", "terminal/create", "session/elicitation", "session/request_permission"} {
			r.say(`{"id":"w%d","method":%q,"params":{"options":[{"optionId":"n","kind":"reject_once"}]}}`, i, method)
			m, _ := r.read()
			text := string(m.Result)
			if m.Error != nil {
				text = fmt.Sprint(m.Error.Code)
			}
			r.chunk(string(m.ID) + " " + text + "\n")
		}
	case "deaf", "late":
		r.chunk("half of")
		fmt.Sscan(string(m.ID), &r.prompts)
		return
	case "between":
		r.chunk("in time")
		r.say(`{"id":%s,"result":{"stopReason":"end_turn"}}`, m.ID)
		r.chunk("between the turns")
		return
	case "parts":
		r.update("agent_thought_chunk", `"content":{"type":"text","text":"secret thought"}`)
		r.chunk("Let me ")
		r.chunk("look.")
		r.update("tool_call", `"toolCallId":"1","rawInput":{}`)
		r.update("tool_call_update", `"toolCallId":"1","content":[{"type":"content","content":{"type":"text","text":"secret output"}}]`)
		r.chunk("It is ")
		r.chunk("there.")
		r.say(`{"method":"session/update","params":{"sessionId":"other","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"of a helper"}}}}`)
		r.update("agent_message_chunk", `"content":{"type":"image","data":"AAAA"}`)
		r.update("usage_update", `"cost":{"amount":0.75,"currency":"USD"}`)
		r.say(`{"method":"session/update","params":{"update":7}}`)
		r.say(`{"method":"$/other"}`)
		r.say(`{"id":77,"result":{}}`)
	case "max_tokens", "refusal", "cancelled":
		reason = how
	case "odd":
		r.say(`{"id":%s,"result":[]}`, m.ID)
		return
	case "alone":
		r.say(`{"id":%s,"error":{"code":-32000,"message":"Authentication required"}}`, m.ID)
		return
	}
	r.say(`{"id":%s,"result":{"stopReason":%q,"usage":{"inputTokens":3,"cachedReadTokens":4,"outputTokens":5}}}`, m.ID, reason)
}
