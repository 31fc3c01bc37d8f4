package model

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/agent-runner/fakemodel"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/history"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/protocol"
)

// silent is a turn of which nobody hears.
type silent struct{}

func (silent) Accept()              {}
func (silent) Session(string)       {}
func (silent) Answer(engine.Answer) {}

// BenchmarkFirstToken compares the time to the first piece of text with that of a
// bare request. The goal is a median of 5 ms more or less. The session is warm
// and of 200 messages at most.
func BenchmarkFirstToken(b *testing.B) {
	for _, provider := range []string{anthropic, openAI} {
		b.Run(provider, func(b *testing.B) {
			server := httptest.NewServer(fakemodel.New())
			defer server.Close()
			config := benchConfig(b.TempDir(), strings.TrimPrefix(server.URL, "http://"), provider)
			var bare, ours []time.Duration
			var e *Engine
			turns := 0
			for b.Loop() {
				if turns++; e == nil || turns%100 == 0 {
					if e != nil {
						_ = e.Close()
					}
					opened, err := Open(config)
					if err != nil {
						b.Fatal(err)
					}
					e = opened.(*Engine)
					if err := e.Prompt(b.Context(), host("say one"), silent{}); err != nil {
						b.Fatal(err)
					}
				}
				bare = append(bare, bareRequest(b, server.URL, provider))
				began, took := time.Now(), time.Duration(0)
				e.seen = func(text string) {
					if took == 0 && text != "" {
						took = time.Since(began)
					}
				}
				if err := e.Prompt(b.Context(), host("say one two three"), silent{}); err != nil {
					b.Fatal(err)
				}
				ours = append(ours, took)
			}
			_ = e.Close()
			ms := func(all []time.Duration, percent int) float64 {
				slices.Sort(all)
				return float64(all[len(all)*percent/100].Microseconds()) / 1000
			}
			b.ReportMetric(ms(bare, 50), "bare-p50-ms")
			b.ReportMetric(ms(ours, 50), "p50-ms")
			b.ReportMetric(ms(ours, 99), "p99-ms")
			b.ReportMetric(ms(ours, 50)-ms(bare, 50), "overhead-ms")
		})
	}
}

func benchConfig(home, gateway, provider string) engine.Config {
	return engine.Config{
		Input:   protocol.Input{EngineOptions: map[string]string{engine.OptionProvider: provider, engine.OptionModel: fakemodel.Model}},
		WorkDir: home, Home: home, Gateway: gateway, Children: new(reap.Children), Log: log.New(io.Discard, "", 0),
	}
}

// bareRequest returns how long a plain request waits for its first text.
func bareRequest(b *testing.B, url, provider string) time.Duration {
	path, mark := "/v1/messages", "text_delta"
	if provider == openAI {
		path, mark = "/v1/chat/completions", `"content":"`
	}
	began := time.Now()
	resp, err := http.Post(url+path, "application/json", strings.NewReader(`{"model":"fake-1","max_tokens":10,"stream":true,"messages":[{"role":"user","content":"say one two three"}]}`))
	if err != nil {
		b.Fatal(err)
	}
	defer resp.Body.Close()
	var took time.Duration
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if took == 0 && strings.Contains(lines.Text(), mark) {
			took = time.Since(began)
		}
	}
	if took == 0 {
		b.Fatal("no text came")
	}
	return took
}

// BenchmarkMemory tells how much memory a process takes that resumed a session of
// 200 messages and had one turn. The goal is 30 MB for the whole runner; here it
// is the test's program, which is larger.
func BenchmarkMemory(b *testing.B) {
	server := httptest.NewServer(fakemodel.New())
	defer server.Close()
	home := b.TempDir()
	session := longSession(b, home)
	var most int
	for b.Loop() {
		out, err := exec.Command(os.Args[0], "one-turn", home, strings.TrimPrefix(server.URL, "http://"), session).Output()
		if err != nil {
			b.Fatal(err)
		}
		var kb int
		if _, err := fmt.Sscan(string(out), &kb); err != nil {
			b.Fatalf("%q: %v", out, err)
		}
		most = max(most, kb)
	}
	b.ReportMetric(float64(most)/1024, "MB")
}

// longSession makes a session of 200 messages, half a megabyte in all.
func longSession(b *testing.B, home string) (id string) {
	s, err := history.New(home)
	for i := range 100 {
		err = errors.Join(err,
			s.Add(llm.Message{Role: llm.User, Parts: []llm.Part{{Text: host(fmt.Sprintf("say %d %s", i, strings.Repeat("word ", 500)))}}}),
			s.Add(llm.Message{Role: llm.Assistant, Parts: []llm.Part{{Text: strings.Repeat("answer ", 350)}}}))
	}
	if err = errors.Join(err, s.Close()); err != nil {
		b.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(home, ".berth/model", s.ID+".jsonl")); err != nil || info.Size() < 400_000 {
		b.Fatal(info, err)
	}
	return s.ID
}

// oneTurn resumes a session, has a turn and prints the memory that is resident, in kB.
func oneTurn(home, gateway, session string) error {
	debug.SetGCPercent(50) // as the runner does
	config := benchConfig(home, gateway, anthropic)
	config.SessionID = session
	e, err := Open(config)
	if err != nil {
		return err
	}
	if err := e.Prompt(context.Background(), host("say hi"), silent{}); err != nil {
		return err
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	_, err = fmt.Println(strings.Fields(rest)[0])
	return errors.Join(err, e.Close())
}
