package web

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/orchestrator/internal/berth"
)

func (b *backend) Chats(_ context.Context, refresh bool) ([]Chat, error) {
	if refresh {
		return []Chat{{JID: "new@g.us"}}, b.err
	}
	return []Chat{{JID: "1@g.us"}}, b.err
}

func (b *backend) Login(ctx context.Context, channel string, in NewLogin) iter.Seq2[LoginEvent, error] {
	return func(yield func(LoginEvent, error) bool) {
		if channel != "whatsapp" {
			yield(LoginEvent{}, b.err)
			return
		}
		if b.follow != nil {
			defer close(b.follow)
		}
		if !yield(LoginEvent{Code: in.Phone}, nil) || !yield(LoginEvent{Passkey: "explained", Request: json.RawMessage(`{"a":1}`)}, nil) {
			return
		}
		if b.follow != nil { // a person takes time
			<-ctx.Done()
			return
		}
		if b.err != nil {
			yield(LoginEvent{}, b.err)
			return
		}
		yield(LoginEvent{Done: "+49"}, nil)
	}
}

func (b *backend) AnswerPasskey(_ context.Context, channel string, in Passkey) error {
	if channel != "a/b" || !in.Same && string(in.Response) != `{"x":1}` {
		return berth.Errorf(berth.Invalid, "got %s %+v", channel, in)
	}
	return b.err
}

func (b *backend) Logout(_ context.Context, channel string) error {
	if channel != "whatsapp" {
		return berth.Errorf(berth.NotFound, "no %s", channel)
	}
	return b.err
}

func collect(c *Client, channel string) (events []LoginEvent, err error) {
	for e, failed := range c.Login(context.Background(), channel, NewLogin{Phone: "+1"}) {
		if failed != nil {
			return events, failed
		}
		events = append(events, e)
	}
	return events, nil
}

func TestChannels(t *testing.T) {
	b := &backend{}
	c, _, _ := serve(t, b)
	steps := []LoginEvent{{Code: "+1"}, {Passkey: "explained", Request: json.RawMessage(`{"a":1}`)}}
	got, err := collect(c, "whatsapp")
	if d := cmp.Diff(append(steps, LoginEvent{Done: "+49"}), got); d != "" || err != nil {
		t.Errorf("login: %v %s", err, d)
	}
	for refresh, want := range map[bool]string{true: "new@g.us", false: "1@g.us"} {
		if chats, err := c.Chats(t.Context(), refresh); err != nil || chats[0].JID != want {
			t.Errorf("chats: got %+v, %v", chats, err)
		}
	}
	for _, in := range []Passkey{{Same: true}, {Response: json.RawMessage(`{"x":1}`)}} {
		if err := c.AnswerPasskey(t.Context(), "a/b", in); err != nil {
			t.Error(err)
		}
	}
	if err := c.Logout(t.Context(), "whatsapp"); err != nil {
		t.Error(err)
	}

	// A failure keeps its kind, at the beginning and after it; what is internal
	// stays inside.
	b.err = berth.Errorf(berth.Conflict, "linked already")
	for channel, want := range map[string]int{"nobody": 0, "whatsapp": 2} {
		got, err := collect(c, channel)
		if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != berth.Conflict || e.Text != "linked already" || len(got) != want {
			t.Errorf("%s: got %d steps and %v", channel, len(got), err)
		}
	}
	b.err = errors.New("a secret detail")
	if _, err := collect(c, "whatsapp"); err == nil || err.Error() != "internal error: see the daemon's log" {
		t.Errorf("got %v", err)
	}
	b.err = berth.Errorf(berth.Internal, "it broke")
	if _, err := c.Chats(t.Context(), true); err == nil || err.Error() != "it broke" {
		t.Errorf("got %v", err)
	}
}

// Who stops waiting ends the login.
func TestLoginEndsWithTheClient(t *testing.T) {
	b := &backend{follow: make(chan struct{})}
	c, _, _ := serve(t, b)
	for _, err := range c.Login(t.Context(), "whatsapp", NewLogin{}) {
		if err != nil {
			t.Fatal(err)
		}
		break
	}
	<-b.follow
}
