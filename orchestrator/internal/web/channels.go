package web

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
)

// Channel is the link to a chat network that needs an account.
type Channel struct {
	Name  string    `json:"name"`  // such as "whatsapp"
	State string    `json:"state"` // one of the channel's words, for programs
	Text  string    `json:"text"`  // the state for people, such as "banned until 2026-09-18 12:00 UTC"
	Since time.Time `json:"since"`
	// Until is when a ban ends, or when the account is unlinked if nobody does
	// anything.
	Until       *time.Time `json:"until,omitempty"`
	Account     string     `json:"account,omitempty"` // empty: none is linked
	Detail      string     `json:"detail,omitempty"`  // what happened
	WhatToDo    string     `json:"whatToDo,omitempty"`
	NeedsPerson bool       `json:"needsPerson,omitempty"` // it stays like this until somebody does WhatToDo
}

// Chat is a conversation that a channel knows.
type Chat struct {
	JID          string     `json:"jid"`
	Name         string     `json:"name"`
	LastActivity *time.Time `json:"lastActivity,omitempty"`
	Folder       string     `json:"folder,omitempty"` // of its group; empty: it is not registered
}

// NewLogin is the body of POST /v1/channels/{channel}/login.
type NewLogin struct {
	Phone string `json:"phone,omitempty"` // asks for a code to type there; empty: for QR codes
}

// LoginEvent is one line of the answer: a step of linking an account. One of its
// fields says which.
type LoginEvent struct {
	QR    string    `json:"qr,omitempty"`   // what to show as a QR code
	Code  string    `json:"code,omitempty"` // what to type on the phone
	Until time.Time `json:"until,omitzero"` // of QR and Code: another one comes then

	// Passkey says what to do about a passkey, and Request is what a browser needs
	// to make the answer.
	Passkey string          `json:"passkey,omitempty"`
	Request json.RawMessage `json:"request,omitempty"`
	Compare string          `json:"compare,omitempty"` // the phone must show the same

	Done string `json:"done,omitempty"` // the account that is linked now
}

// Passkey is the body of POST /v1/channels/{channel}/passkey.
type Passkey struct {
	Response json.RawMessage `json:"response,omitempty"` // the browser's answer
	Same     bool            `json:"same,omitempty"`     // the phone shows LoginEvent.Compare
}

// Channels is what the control socket gives access to of the chat networks. Its
// methods fail with berth.NotFound for a channel that the daemon does not serve.
type Channels interface {
	// Chats returns the registered chats and the known groups; refresh asks the
	// networks first.
	Chats(ctx context.Context, refresh bool) ([]Chat, error)
	// Login yields until an account is linked, it fails or ctx ends.
	Login(ctx context.Context, channel string, in NewLogin) iter.Seq2[LoginEvent, error]
	AnswerPasskey(ctx context.Context, channel string, in Passkey) error
	Logout(ctx context.Context, channel string) error
}

// loginLine is a LoginEvent, or why there will be no other.
type loginLine struct {
	LoginEvent
	*Failure
}

func handleChannels(mux *http.ServeMux, handle func(string, func(*http.Request) (any, error)), b Channels, log *zap.Logger) {
	handle("GET /v1/chats", func(r *http.Request) (any, error) {
		refresh, err := strconv.ParseBool(r.FormValue("refresh"))
		if err != nil {
			return nil, berth.Errorf(berth.Invalid, "refresh %q is neither true nor false", r.FormValue("refresh"))
		}
		return b.Chats(r.Context(), refresh)
	})
	handle("POST /v1/channels/{channel}/passkey", func(r *http.Request) (any, error) {
		in, err := decode[Passkey](r)
		if err != nil {
			return nil, err
		}
		return struct{}{}, b.AnswerPasskey(r.Context(), r.PathValue("channel"), in)
	})
	handle("POST /v1/channels/{channel}/logout", func(r *http.Request) (any, error) {
		return struct{}{}, b.Logout(r.Context(), r.PathValue("channel"))
	})
	mux.HandleFunc("POST /v1/channels/{channel}/login", func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		in, err := decode[NewLogin](r)
		if err != nil {
			fail(w, r, err, log)
			return
		}
		lines := func(yield func(loginLine, error) bool) {
			begun := false
			for e, err := range b.Login(r.Context(), r.PathValue("channel"), in) {
				line := loginLine{LoginEvent: e}
				if err != nil && begun {
					// The status is on its way: the reason comes as a line.
					f, _ := failure(r, err, log)
					line.Failure, err = &f, nil
				}
				if !yield(line, err) {
					return
				}
				begun = true
			}
		}
		stream(w, r, lines, log)
	})
}

// Chats returns the registered chats and the known groups; refresh asks the
// networks first.
func (c *Client) Chats(ctx context.Context, refresh bool) ([]Chat, error) {
	return call[[]Chat](ctx, c, "GET", "/v1/chats?refresh="+strconv.FormatBool(refresh), nil)
}

// Login yields what a person has to do to link an account, until it is linked, it
// fails or ctx ends. Leaving the loop ends the linking.
func (c *Client) Login(ctx context.Context, channel string, in NewLogin) iter.Seq2[LoginEvent, error] {
	return func(yield func(LoginEvent, error) bool) {
		body, err := c.do(ctx, "POST", channelPath(channel, "login"), in)
		if err != nil {
			yield(LoginEvent{}, err)
			return
		}
		defer body.Close()
		for dec := json.NewDecoder(body); ; {
			var line loginLine
			err := dec.Decode(&line)
			switch {
			case errors.Is(err, io.EOF):
				return
			case ctx.Err() != nil:
				yield(LoginEvent{}, context.Cause(ctx))
				return
			case err != nil:
				yield(LoginEvent{}, berth.Errorf(berth.Unavailable, "the daemon ended the connection"))
				return
			case line.Failure != nil:
				yield(LoginEvent{}, berth.Errorf(kindOf(line.Kind), "%s", line.Error))
				return
			}
			if !yield(line.LoginEvent, nil) {
				return
			}
		}
	}
}

// AnswerPasskey hands over what a login waits for.
func (c *Client) AnswerPasskey(ctx context.Context, channel string, in Passkey) error {
	_, err := call[struct{}](ctx, c, "POST", channelPath(channel, "passkey"), in)
	return err
}

// Logout unlinks a channel's account.
func (c *Client) Logout(ctx context.Context, channel string) error {
	_, err := call[struct{}](ctx, c, "POST", channelPath(channel, "logout"), nil)
	return err
}

func channelPath(channel, what string) string {
	return "/v1/channels/" + url.PathEscape(channel) + "/" + what
}
