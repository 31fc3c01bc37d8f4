package web

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"berth/orchestrator/internal/berth"
)

// Client talks to a daemon over its control socket. It is safe for concurrent
// use. Errors of kind berth.Unavailable mean that no daemon answers there.
type Client struct {
	http *http.Client
}

// NewClient returns a client of the daemon behind socket. It connects at the
// first call.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}
	return &Client{http: &http.Client{Transport: &http.Transport{DialContext: dial}}}
}

// Status returns the daemon's state.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return call[Status](ctx, c, "GET", "/v1/status", nil)
}

// Groups returns the registered groups, ordered by folder.
func (c *Client) Groups(ctx context.Context) ([]Group, error) {
	return call[[]Group](ctx, c, "GET", "/v1/groups", nil)
}

// AddGroup registers a group.
func (c *Client) AddGroup(ctx context.Context, g NewGroup) (Group, error) {
	return call[Group](ctx, c, "POST", "/v1/groups", g)
}

// UpdateGroup changes a group.
func (c *Client) UpdateGroup(ctx context.Context, folder string, change GroupChange) (Group, error) {
	return call[Group](ctx, c, "PATCH", "/v1/groups/"+url.PathEscape(folder), change)
}

// RemoveGroup unregisters a group; its files stay.
func (c *Client) RemoveGroup(ctx context.Context, folder string) error {
	_, err := call[struct{}](ctx, c, "DELETE", "/v1/groups/"+url.PathEscape(folder), nil)
	return err
}

// StopGroup ends the run of a group; it returns when the order was taken.
// stopped is false if there was none.
func (c *Client) StopGroup(ctx context.Context, folder string) (stopped bool, err error) {
	return call[bool](ctx, c, "POST", "/v1/groups/"+url.PathEscape(folder)+"/stop", nil)
}

// StopDaemon makes the daemon shut down; it returns when the order was taken.
func (c *Client) StopDaemon(ctx context.Context) error {
	_, err := call[struct{}](ctx, c, "POST", "/v1/stop", nil)
	return err
}

// Backup makes the daemon write a backup of the store.
func (c *Client) Backup(ctx context.Context, b NewBackup) (Backup, error) {
	return call[Backup](ctx, c, "POST", "/v1/backup", b)
}

// Audit returns up to limit refusals, newest first: of one group, or of all if
// folder is empty.
func (c *Client) Audit(ctx context.Context, folder string, limit int) ([]Refusal, error) {
	return call[[]Refusal](ctx, c, "GET", fmt.Sprintf("/v1/audit?group=%s&limit=%d", url.QueryEscape(folder), limit), nil)
}

// Usage returns what one group, or all if folder is empty, used in the last days,
// today included, oldest first.
func (c *Client) Usage(ctx context.Context, folder string, days int) ([]Usage, error) {
	return call[[]Usage](ctx, c, "GET", fmt.Sprintf("/v1/usage?group=%s&days=%d", url.QueryEscape(folder), days), nil)
}

// Outbox returns the texts that wait to be sent or were given up, oldest first.
func (c *Client) Outbox(ctx context.Context) ([]Text, error) {
	return call[[]Text](ctx, c, "GET", "/v1/outbox", nil)
}

// RetryTexts sends texts again that were given up, and returns how many.
func (c *Client) RetryTexts(ctx context.Context, t Texts) (n int, err error) {
	return call[int](ctx, c, "POST", "/v1/outbox/retry", t)
}

// DropTexts takes back texts that are not sent, and returns how many.
func (c *Client) DropTexts(ctx context.Context, t Texts) (n int, err error) {
	return call[int](ctx, c, "POST", "/v1/outbox/drop", t)
}

// Send stores a message as if it had been written in the group's chat.
func (c *Client) Send(ctx context.Context, m NewMessage) (Accepted, error) {
	return call[Accepted](ctx, c, "POST", "/v1/messages", m)
}

// Answer returns what became of message seq. It waits up to wait (at most one
// minute) for the state to leave AnswerPending.
func (c *Client) Answer(ctx context.Context, seq int64, wait time.Duration) (Answer, error) {
	path := fmt.Sprintf("/v1/messages/%d/answer?wait=%s", seq, url.QueryEscape(wait.String()))
	return call[Answer](ctx, c, "GET", path, nil)
}

// Chat yields what happens in a group's chat after message seq (negative: from
// now on) until ctx ends or the daemon goes, which is the last error.
func (c *Client) Chat(ctx context.Context, folder string, seq int64) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		path := "/v1/groups/" + url.PathEscape(folder) + "/chat?after=" + strconv.FormatInt(seq, 10)
		body, err := c.do(ctx, "GET", path, nil)
		if err != nil {
			yield(Event{}, err)
			return
		}
		defer body.Close()
		for dec := json.NewDecoder(body); ; {
			var e Event
			if err := dec.Decode(&e); err != nil {
				if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
					err = berth.Errorf(berth.Unavailable, "the daemon ended the connection")
				}
				yield(Event{}, err)
				return
			}
			if !yield(e, nil) {
				return
			}
		}
	}
}

func call[T any](ctx context.Context, c *Client, method, path string, in any) (T, error) {
	var out T
	body, err := c.do(ctx, method, path, in)
	if err != nil {
		return out, err
	}
	defer body.Close()
	if err := json.NewDecoder(body).Decode(&out); err != nil && !errors.Is(err, io.EOF) {
		return out, fmt.Errorf("read the daemon's answer: %w", err)
	}
	return out, nil
}

// do returns the body of a successful answer, and any other as an error.
func (c *Client) do(ctx context.Context, method, path string, in any) (io.ReadCloser, error) {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://berth"+path, body)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, berth.Errorf(berth.Unavailable, "no daemon answers on this root: %w", err)
	}
	if resp.StatusCode < 300 {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	var f Failure
	if err := json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(&f); err != nil {
		return nil, fmt.Errorf("the daemon answered %s", resp.Status)
	}
	return nil, berth.Errorf(kindOf(f.Kind), "%s", f.Error)
}

func kindOf(name string) berth.Kind {
	for k := berth.Internal; k <= berth.Unavailable; k++ {
		if k.String() == name {
			return k
		}
	}
	return berth.Internal
}
