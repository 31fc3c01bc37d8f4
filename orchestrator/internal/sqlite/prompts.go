package sqlite

import "sync"

// maxPrompts bounds what is kept; not many groups have a run at a time.
const maxPrompts = 64

// prompts are what MemoryPrompt rendered since a memory changed, by folder. Its
// methods may be called from any goroutine.
type prompts struct {
	mu      sync.Mutex
	texts   map[string]string
	changes int // of memories
}

// get returns what render returned the last time, if that still holds.
func (p *prompts) get(folder string, render func() (string, error)) (string, error) {
	p.mu.Lock()
	text, known := p.texts[folder]
	changes := p.changes
	p.mu.Unlock()
	if known {
		return text, nil
	}
	text, err := render()
	if err != nil {
		return "", err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changes != changes {
		return text, nil // it may be of before the change
	}
	if p.texts == nil || len(p.texts) >= maxPrompts {
		p.texts = make(map[string]string)
	}
	p.texts[folder] = text
	return text, nil
}

// forget is called when a change is committed, before who made it goes on.
func (p *prompts) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.texts = nil
	p.changes++
}
