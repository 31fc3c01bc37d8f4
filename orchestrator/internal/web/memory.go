package web

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"berth/orchestrator/internal/berth"
)

// Memory is one fact that agents are told in every conversation.
type Memory struct {
	ID        int64     `json:"id"`    // within the group
	Group     string    `json:"group"` // the folder, or "global" for what all groups are told
	Fact      string    `json:"fact"`
	Source    string    `json:"source"` // who had it remembered
	CreatedAt time.Time `json:"createdAt"`
	UpdatedAt time.Time `json:"updatedAt"`
	Known     bool      `json:"known,omitempty"` // it was there before it was added
}

// NewMemory is the body of POST /v1/memory.
type NewMemory struct {
	Group string `json:"group"`
	Fact  string `json:"fact"`
}

// MemoryDesk is what the control socket gives access to of the memories.
type MemoryDesk interface {
	// Memories returns the memories of a group, or all if folder is empty, ordered
	// by group and oldest first.
	Memories(ctx context.Context, folder string) ([]Memory, error)
	AddMemory(context.Context, NewMemory) (Memory, error)
	// ForgetMemory returns what it removed.
	ForgetMemory(ctx context.Context, folder string, id int64) (Memory, error)
}

func handleMemory(handle func(pattern string, fn func(*http.Request) (any, error)), b MemoryDesk) {
	handle("GET /v1/memory", func(r *http.Request) (any, error) { return b.Memories(r.Context(), r.FormValue("group")) })
	handle("POST /v1/memory", func(r *http.Request) (any, error) {
		in, err := decode[NewMemory](r)
		if err != nil {
			return nil, err
		}
		return b.AddMemory(r.Context(), in)
	})
	handle("DELETE /v1/memory/{group}/{id}", func(r *http.Request) (any, error) {
		id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
		if err != nil {
			return nil, berth.Errorf(berth.Invalid, "%.40q is no id of a memory: give a number", r.PathValue("id"))
		}
		return b.ForgetMemory(r.Context(), r.PathValue("group"), id)
	})
}

var _ MemoryDesk = (*Client)(nil)

// Memories returns the memories of a group, or all if folder is empty, ordered by
// group and oldest first.
func (c *Client) Memories(ctx context.Context, folder string) ([]Memory, error) {
	return call[[]Memory](ctx, c, "GET", "/v1/memory?group="+url.QueryEscape(folder), nil)
}

// AddMemory has a group, or all, told a fact from now on.
func (c *Client) AddMemory(ctx context.Context, m NewMemory) (Memory, error) {
	return call[Memory](ctx, c, "POST", "/v1/memory", m)
}

// ForgetMemory removes a memory and returns it.
func (c *Client) ForgetMemory(ctx context.Context, folder string, id int64) (Memory, error) {
	return call[Memory](ctx, c, "DELETE", "/v1/memory/"+url.PathEscape(folder)+"/"+strconv.FormatInt(id, 10), nil)
}
