package acp

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/protocol"
)

var _ engine.Compactor = (*Engine)(nil)

// compactors are what agents call the command that makes their conversation
// shorter.
var compactors = []string{"compact", "compress"}

// unannounced are the commands that agents take though they do not announce them:
// OpenCode up to 1.18 at least forgets this one in its list.
var unannounced = map[string]string{"opencode": "compact"}

// listGrace is how long an agent may take to announce its commands, which it does
// at some time after the session is there.
const listGrace = 3 * time.Second

// commands are what an agent has announced.
type commands struct {
	mu     sync.Mutex
	names  []string
	listed chan struct{} // closed when there is a list; nil before anybody waits
	known  bool
}

// announced takes a list of commands. It is called for each update.
func (c *commands) announced(params json.RawMessage) {
	var u struct {
		Update struct {
			Kind     string `json:"sessionUpdate"`
			Commands []struct {
				Name string `json:"name"`
			} `json:"availableCommands"`
		} `json:"update"`
	}
	if json.Unmarshal(params, &u) != nil || u.Update.Kind != "available_commands_update" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.names = nil
	for _, one := range u.Update.Commands {
		if slices.Contains(compactors, one.Name) { // of others there may be any number
			c.names = append(c.names, one.Name)
		}
	}
	if !c.known && c.listed != nil {
		close(c.listed)
	}
	c.known = true
}

// compactor returns the agent's command for a compaction; it is empty if it has
// announced none.
func (c *commands) compactor(ctx context.Context) string {
	c.mu.Lock()
	if c.listed == nil {
		c.listed = make(chan struct{})
		if c.known {
			close(c.listed)
		}
	}
	listed := c.listed
	c.mu.Unlock()
	wait := time.NewTimer(listGrace)
	defer wait.Stop()
	select {
	case <-listed:
	case <-wait.C:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range compactors {
		if slices.Contains(c.names, name) {
			return name
		}
	}
	return ""
}

// Compact implements engine.Compactor, by the agent's own command.
func (e *Engine) Compact(ctx context.Context, to engine.Turn) (engine.Compaction, error) {
	if e.session == "" && e.config.SessionID == "" { // nobody has said anything yet
		to.Accept()
		return engine.Compaction{Outcome: protocol.CompactionNothing}, nil
	}
	if e.program == nil {
		if err := e.start(); err != nil {
			return engine.Compaction{}, err
		}
	} else if e.gone() {
		return engine.Compaction{}, e.program.Fault()
	}
	if e.session == "" {
		if err := e.open(ctx); err != nil {
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return engine.Compaction{}, err
		}
	}
	if e.named {
		to.Session(e.session)
	}
	to.Accept()
	command, ok := unannounced[e.config.Engine]
	if !ok {
		command = e.commands.compactor(ctx)
	}
	switch {
	case ctx.Err() != nil:
		return engine.Compaction{}, context.Cause(ctx)
	case command == "":
		return engine.Compaction{Outcome: protocol.CompactionUnable}, nil
	}
	e.tap.Forget()
	err := e.prompt(ctx, "/"+command, engine.Aside{Turn: to})
	switch {
	case err == nil:
		return engine.Compaction{Outcome: protocol.CompactionDone}, nil
	case ctx.Err() != nil || e.gone():
		return engine.Compaction{}, err
	}
	return engine.Compaction{Outcome: protocol.CompactionFailed, Reason: err.Error()}, nil
}

// Compacted implements engine.Compactor. The protocol has no word for what an agent
// does by itself.
func (e *Engine) Compacted() bool { return false }
