package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/web"
)

// chat is one group's.
type chat struct {
	folder string

	mu   sync.Mutex // messages of a group are posted one after the other
	sent []*message
}

// message is one that was sent. Its token stands once in its text, and the probe
// answers it with echo, which repeats all messages of the batch: so a message
// that shares a batch with later ones is answered with them, although the probe
// does what the last one says alone.
type message struct {
	token string // msg-…; extra texts that it asks for are again-… and file-…
	id    string
	kind  kind
	text  string
	seq   int64
}

// kind is what a message makes its run do.
type kind struct {
	name   string
	weight int
	script func(s *soak, m *message) string
	silent bool
	again  bool // asks for a second answer
	file   bool // asks for a text by request file
	gated  bool // fails until the soak opens a gate
}

func lines(text string) func(*soak, *message) string {
	return func(*soak, *message) string { return text }
}

var (
	plain = kind{name: "plain", weight: 40, script: lines("echo")}
	doom  = kind{name: "fails on purpose until it is given up", script: lines("fail doomed")}
	final = kind{name: "after it was given up", script: lines("echo")}

	kinds = []kind{
		plain,
		{name: "slow", weight: 12, script: func(s *soak, _ *message) string {
			return "sleep " + s.between(500*time.Millisecond, 4*time.Second).Round(time.Millisecond).String() + "\necho"
		}},
		{name: "answers twice", weight: 5, again: true, script: func(_ *soak, m *message) string { return "echo\nsay " + m.again() }},
		{name: "answers before the slow part", weight: 5, again: true, script: func(_ *soak, m *message) string {
			return "say " + m.again() + "\nsleep 1\necho"
		}},
		{name: "request file", weight: 8, file: true, script: func(_ *soak, m *message) string {
			return fmt.Sprintf(`write /workspace/ipc/messages/%s.json {"type":"message","chatJid":"console:%s","text":"%s"}`+"\nsleep 1\necho", m.file(), m.token[4:8], m.file())
		}},
		{name: "silent", weight: 5, silent: true, script: lines("silent")},
		{name: "fails before output", weight: 5, gated: true, script: func(_ *soak, m *message) string {
			return "write /workspace/group/" + m.gate() + "/x open\necho"
		}},
		{name: "fails after output", weight: 5, script: lines("echo\nfail after output")},
		{name: "exits after output", weight: 4, script: lines("echo\nexit 3")},
		{name: "noise", weight: 5, script: lines("stderr noise\nraw noise\nforge noise\nforge-nonce noise\nflood 300000\necho")},
		{name: "no acknowledgement", weight: 2, script: lines("no-ack\necho")},
		{name: "broken frame", weight: 2, script: lines("echo\nbad-json-frame\nsleep 1")},
		{name: "half a frame", weight: 2, script: lines("echo\nhalf-frame")},
		{name: "deaf to the end", weight: 1, script: lines("ignore-term\necho")},
		{name: "closes stdout", weight: 1, script: lines("close-stdout\necho")},
		{name: "hangs after output", weight: 1, script: lines("echo\nheartbeat-off\nhang")},
	}
)

func (m *message) again() string { return "again-" + m.token[4:] }
func (m *message) file() string  { return "file-" + m.token[4:] }
func (m *message) gate() string  { return "gate-" + m.token[4:] }

func (s *soak) chat(folder string) *chat {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.chats[folder]
}

// say writes one message, however often the daemon goes meanwhile.
func (s *soak) say(ctx context.Context, c *chat, k kind) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k.silent && s.busy(ctx, c) {
		// It would be the last of a batch, and the others never answered.
		k = plain
	}
	m := &message{token: fmt.Sprintf("msg-%s-%05d", c.folder, len(c.sent)), id: berth.NewID(8), kind: k}
	m.text = m.token + "\n" + k.script(s, m)
	c.sent = append(c.sent, m)
	if k.gated {
		time.AfterFunc(s.between(time.Second, 15*time.Second), func() { s.openGate(ctx, c, m) })
	}
	for {
		a, err := s.daemon.client.Send(ctx, web.NewMessage{Group: c.folder, ID: m.id, Text: m.text})
		if err == nil {
			m.seq = a.Seq
			return
		}
		if ctx.Err() != nil {
			return
		}
		if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != berth.Unavailable {
			// Repeating it cannot help; the auditor will miss it.
			fmt.Fprintf(s.out, "post %s: %v\n", m.token, err)
			return
		}
		if !pause(ctx, 20*time.Millisecond) {
			return
		}
	}
}

// busy reports whether a message of the chat may still be waiting.
func (s *soak) busy(ctx context.Context, c *chat) bool {
	if len(c.sent) == 0 {
		return false
	}
	a, err := s.daemon.client.Answer(ctx, c.sent[len(c.sent)-1].seq, 0)
	return err != nil || a.State != web.AnswerDone
}

func (s *soak) openGate(ctx context.Context, c *chat, m *message) {
	dir := filepath.Join(s.root(), "groups", c.folder, m.gate())
	err := os.Mkdir(dir, 0o755)
	for errors.Is(err, os.ErrNotExist) && pause(ctx, time.Second) { // the group's first run makes its folder
		err = os.Mkdir(dir, 0o755)
	}
	if err == nil {
		err = os.Chmod(dir, 0o777) // the agent is another user
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		fmt.Fprintf(s.out, "open the gate of %s: %v\n", m.token, err)
	}
}

// talk writes messages until storm ends.
func (s *soak) talk(ctx, storm context.Context) error {
	var wg errgroup.Group
	for i := range doomed {
		wg.Go(func() error { s.say(ctx, s.chat(folder(groups-1-i)), doom); return nil })
	}
	total := 0
	for _, k := range kinds {
		total += k.weight
	}
	for pause(storm, s.soon(time.Duration(float64(time.Second)/s.rate))) {
		count := 1
		var chosen []kind
		var to int
		chance(s, func(r *rand.Rand) bool {
			to = r.IntN(groups - doomed)
			if r.IntN(3) == 0 {
				to %= 8 // some groups are talkative, and so busy more often than not
			}
			if r.IntN(5) == 0 {
				count = 2 + r.IntN(4)
			}
			for range count {
				at := r.IntN(total)
				for _, k := range kinds {
					if at -= k.weight; at < 0 {
						chosen = append(chosen, k)
						break
					}
				}
			}
			return true
		})
		wg.Go(func() error {
			for _, k := range chosen {
				s.say(ctx, s.chat(folder(to)), k)
			}
			return nil
		})
	}
	return wg.Wait()
}

// killContainers kills containers now and then.
func (s *soak) killContainers(ctx, storm context.Context) error {
	for pause(storm, s.soon(6*time.Second)) {
		if err := s.killContainer(ctx); err != nil {
			return err
		}
	}
	return nil
}

// killContainer kills a random container, if one runs.
func (s *soak) killContainer(ctx context.Context) error {
	found, err := s.engine.Containers(ctx)
	if err != nil {
		return err
	}
	running := slices.DeleteFunc(found, func(c docker.Container) bool { return !c.Running })
	if len(running) == 0 {
		return nil
	}
	victim := running[chance(s, func(r *rand.Rand) int { return r.IntN(len(running)) })]
	err = s.raw.kill(ctx, victim.ID)
	if errors.Is(err, errNotRunning) {
		return nil
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.killed[victim.Run] = true
	s.counts.containers++
	return nil
}

// outage is a time without the daemon, or without the engine. Every other one
// sees a container killed, of which nobody hears until it is over.
func (s *soak) outage(ctx context.Context, d time.Duration) error {
	time.Sleep(d / 2)
	if chance(s, func(r *rand.Rand) bool { return r.IntN(2) == 0 }) {
		if err := s.killContainer(ctx); err != nil {
			return err
		}
	}
	time.Sleep(d / 2)
	return nil
}

// killDaemon kills the daemon. In the last third it does not, so that what the
// last daemon holds at the end tells something.
func (s *soak) killDaemon(ctx, storm context.Context) error {
	for pause(storm, 2*time.Second+s.soon(16*time.Second)) && time.Now().Before(s.quiet) {
		s.daemon.kill()
		if err := errors.Join(s.outage(ctx, s.between(0, 2*time.Second)), s.daemon.start()); err != nil {
			return err
		}
		s.mu.Lock()
		s.counts.daemons++
		s.mu.Unlock()
	}
	return nil
}

// loseEngine cuts the daemon's way to the container engine.
func (s *soak) loseEngine(ctx, storm context.Context) error {
	for pause(storm, 2*time.Second+s.soon(16*time.Second)) {
		s.proxy.cut()
		if err := errors.Join(s.outage(ctx, s.between(200*time.Millisecond, 3*time.Second)), s.proxy.open()); err != nil {
			return err
		}
		s.mu.Lock()
		s.counts.cuts++
		s.mu.Unlock()
	}
	return nil
}

// settle waits until every message is answered or given up, writes to the groups
// that gave up once more, and then until all runs have ended. What does not
// happen in time is the auditor's to judge.
func (s *soak) settle(ctx context.Context, r *report) error {
	s.waitAnswered(ctx)
	found, err := s.daemon.client.Groups(ctx)
	if err != nil {
		return err
	}
	for _, g := range found {
		if g.GivenUp {
			s.say(ctx, s.chat(g.Folder), final)
		}
	}
	s.waitAnswered(ctx)
	if err := s.calm(ctx, 2*time.Minute); err != nil {
		if ctx.Err() != nil {
			return err
		}
		fmt.Fprintln(s.out, err)
	}
	status, err := s.daemon.client.Status(ctx)
	if err != nil {
		return err
	}
	r.slots = max(status.Pool.Used, len(status.Runs))
	r.late, err = s.daemon.sample(ctx)
	return err
}

// waitAnswered waits until no group has a message to answer, or settling is over.
func (s *soak) waitAnswered(ctx context.Context) {
	var waiting []string
	for deadline := time.Now().Add(settling); time.Now().Before(deadline); {
		if found, err := s.daemon.client.Groups(ctx); err == nil {
			waiting = nil
			for _, g := range found {
				if g.Pending > 0 && !g.GivenUp {
					waiting = append(waiting, fmt.Sprintf("%s %s: %d pending, %s", g.Folder, g.State, g.Pending, g.LastError))
				}
			}
			if len(waiting) == 0 {
				return
			}
		}
		if !pause(ctx, 200*time.Millisecond) {
			return
		}
	}
	fmt.Fprintf(s.out, "not settled: %q\n", waiting)
}
