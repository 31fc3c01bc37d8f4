package main

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"

	"berth/orchestrator/internal/docker"
)

// census knows at every instant which containers of this root exist, by the
// container engine's own events.
type census struct {
	engine *docker.Engine
	stop   context.CancelFunc
	ended  chan error

	mu     sync.Mutex
	exist  map[string]bool
	counts []int // how many existed, after each change
}

// takeCensus returns when nothing that happens from then on is missed.
func takeCensus(ctx context.Context, engine *docker.Engine) (*census, error) {
	ctx, stop := context.WithCancel(ctx)
	c := &census{engine: engine, stop: stop, ended: make(chan error, 1), exist: make(map[string]bool)}
	ready := make(chan error, 1)
	go func() {
		err := engine.Events(ctx, func() { ready <- c.begin(ctx) }, c.see)
		c.ended <- err
		ready <- err // if it never began
	}()
	if err := <-ready; err != nil {
		stop()
		return nil, fmt.Errorf("watch the containers: %w", err)
	}
	return c, nil
}

func (c *census) begin(ctx context.Context) error {
	found, err := c.engine.Containers(ctx)
	for _, f := range found {
		c.exist[f.ID] = true
	}
	c.counts = []int{len(c.exist)}
	return err
}

func (c *census) see(e docker.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch e.Action {
	case "create":
		c.exist[e.Container] = true
	case "destroy":
		delete(c.exist, e.Container)
	default:
		return
	}
	c.counts = append(c.counts, len(c.exist))
}

// current reports whether every event up to now has been seen.
func (c *census) current(ctx context.Context) (bool, error) {
	select {
	case err := <-c.ended:
		return false, fmt.Errorf("watch the containers: %w", err)
	default:
	}
	found, err := c.engine.Containers(ctx)
	now := make(map[string]bool)
	for _, f := range found {
		now[f.ID] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Equal(now, c.exist), err
}

// story tells how many containers there were, change by change, and the most.
func (c *census) story() (text string, most int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var words []string
	for _, n := range c.counts {
		words = append(words, fmt.Sprint(n))
		most = max(most, n)
	}
	return strings.Join(words, " → "), most
}
