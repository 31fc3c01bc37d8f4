package whatsapp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.mau.fi/whatsmeow/types"
	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/watest"
)

// other is a daemon in another process: a channel, and a store that is a file.
type other struct {
	Path, Dir, Store, URL, Chat string
	Out                         []berth.Outgoing // what is to be sent
	KillAt                      string           // dies there as by kill -9
}

// row is a line of the other daemon's store.
type row struct {
	Message *berth.Message `json:"message,omitempty"`
	Sent    string         `json:"sent,omitempty"` // id of what was sent
}

const otherVariable = "WHATSAPP_TEST_OTHER"

func (o other) at(point string) {
	if point == o.KillAt {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

// run is the other daemon. It tells each row that is safe on stdout, and ends
// with stdin.
func (o other) run() error {
	file, err := os.OpenFile(o.Store, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	rows, err := readRows(o.Store)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	add := func(r row) error {
		mu.Lock()
		defer mu.Unlock()
		data, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if _, err := file.Write(append(data, '\n')); err != nil {
			return err
		}
		return file.Sync()
	}
	online := make(chan struct{}, 1)
	var ch *Channel
	ch, err = New(context.Background(), Options{
		Path: o.Path, Name: "Andy", OwnNumber: true, Log: zap.NewNop(), Double: &Double{URL: o.URL, Root: watest.Root()},
		Group:    func(chat string) (berth.Group, bool) { return berth.Group{JID: chat, Folder: "family"}, chat == o.Chat },
		GroupDir: func(string) (string, bool) { return o.Dir, true },
		Receive: func(_ context.Context, m berth.Message) (berth.Message, error) {
			if o.KillAt == "received" {
				// What was acknowledged too early is so when this was answered.
				if _, err := ch.Groups(context.Background(), true); err != nil {
					fmt.Fprintln(os.Stderr, "groups:", err)
				}
			}
			o.at("received")
			if err := add(row{Message: &m}); err != nil {
				return m, err
			}
			o.at("stored")
			fmt.Println("stored")
			return m, nil
		},
		Online: func() {
			select {
			case online <- struct{}{}:
			default:
			}
		},
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- ch.Run(ctx) }()
	go func() {
		<-online
		for _, out := range o.Out {
			if slices.ContainsFunc(rows, func(r row) bool { return r.Sent == out.MessageID }) {
				continue
			}
			if err := ch.Send(ctx, out); err != nil {
				fmt.Fprintln(os.Stderr, "send:", err)
				return
			}
			o.at("sent")
			if err := add(row{Sent: out.MessageID}); err != nil {
				fmt.Fprintln(os.Stderr, "mark:", err)
				return
			}
			fmt.Println("marked")
		}
	}()
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel()
	return errors.Join(<-done, ch.Close(), file.Close())
}

func readRows(path string) (rows []row, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var r row
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, err
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// process is a started other.
type process struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.Closer
	said  *bufio.Scanner
	late  context.Context // ends when the wait is too long
}

func (o other) start(t *testing.T) *process {
	t.Helper()
	config, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), otherVariable+"="+string(config))
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return &process{t: t, cmd: cmd, stdin: stdin, said: bufio.NewScanner(stdout), late: ctx}
}

func (p *process) says(n int, want string) {
	p.t.Helper()
	for range n {
		if !p.said.Scan() || p.said.Text() != want {
			p.t.Fatalf("it said %q, want %q", p.said.Text(), want)
		}
	}
}

// wait waits for the end: by kill -9, or by the end of stdin.
func (p *process) wait(killed bool) {
	p.t.Helper()
	for p.said.Scan() {
	}
	err := p.cmd.Wait()
	status, _ := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if p.late.Err() != nil {
		p.t.Fatal("it did not end in time")
	}
	if killed != (status.Signaled() && status.Signal() == syscall.SIGKILL) || !killed && err != nil {
		p.t.Fatalf("it ended by itself: %v", err)
	}
}

// Wherever the process is killed, no message is lost and none comes twice.
func TestKilled(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		at    string
		photo bool
	}{
		"between receive and store":                  {"received", false},
		"between store and ack":                      {"stored", false},
		"medium, between receive and store":          {"received", true},
		"medium, between store and leaving the line": {"stored", true},
		"medium, while it is downloaded":             {"", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := inside(t, watest.LID)
			w.stop()
			w.phone.Offline(t.Context())
			o := other{Path: w.options.Path, Dir: w.dir, Store: filepath.Join(t.TempDir(), "rows"), URL: w.URL(), Chat: w.group.JID.String(), KillAt: c.at}
			if c.at == "" {
				w.HoldMedia(true)
			}
			p := o.start(t)
			w.phone.Online(t.Context())
			if c.photo {
				w.alice.SendImage(w.group, png(10), "image/png", "one")
			} else {
				w.alice.SendText(w.group, "one")
			}
			w.alice.SendText(w.group, "two")
			if c.at == "" {
				w.MediaAsked(t.Context(), 1)
				w.phone.Drained(t.Context()) // WhatsApp has forgotten both
				if err := p.cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
			p.wait(true)
			w.phone.Offline(t.Context())
			w.ReleaseMedia()
			w.alice.SendText(w.group, "three")
			o.KillAt = ""
			p = o.start(t)
			p.says(3, "stored")
			w.phone.Drained(t.Context())
			if err := p.stdin.Close(); err != nil {
				t.Fatal(err)
			}
			p.wait(false)
			rows, err := readRows(o.Store)
			if err != nil {
				t.Fatal(err)
			}
			var ids []string
			now := map[string]string{}
			for _, r := range rows {
				if now[r.Message.ID] == "" {
					ids = append(ids, r.Message.ID)
				}
				now[r.Message.ID] = r.Message.Text
			}
			if len(ids) != 3 || now[ids[1]] != "two" || now[ids[2]] != "three" {
				t.Fatalf("got %v, %v", ids, now)
			}
			first := now[ids[0]]
			if c.photo && (!strings.HasSuffix(first, "\none") || string(w.file(first)) != string(png(10))) || !c.photo && first != "one" {
				t.Errorf("got %q", first)
			}
		})
	}
}

// A process that is killed between sending and marking sends again, and the
// reader sees one bubble.
func TestKilledBetweenSendAndMark(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, mode types.AddressingMode) {
		w := inside(t, mode)
		w.stop()
		w.phone.Offline(t.Context())
		o := other{
			Path: w.options.Path, Dir: w.dir, Store: filepath.Join(t.TempDir(), "rows"), URL: w.URL(), Chat: w.group.JID.String(), KillAt: "sent",
			Out: []berth.Outgoing{w.out("one"), w.out("two")},
		}
		o.start(t).wait(true)
		w.phone.Offline(t.Context())
		if got := w.alice.Received(t.Context()); got.Text != "one" {
			t.Errorf("got %+v", got)
		}
		o.KillAt = ""
		p := o.start(t)
		p.says(2, "marked")
		if err := p.stdin.Close(); err != nil {
			t.Fatal(err)
		}
		p.wait(false)
		if got := w.alice.Received(t.Context()); got.Text != "two" {
			t.Errorf("got %+v", got)
		}
		if n, again := len(w.alice.Messages()), w.alice.Duplicates(); n != 2 || again != 1 {
			t.Errorf("%d bubbles, %d duplicates", n, again)
		}
	})
}
