package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"berth/agent-runner/fakemodel"
	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/web"
)

const (
	coldTurns = 4
	warmTurns = 30
)

// turns is what the messages of one engine cost.
type turns struct{ cold, warm, memory []float64 }

// engines measures what an engine adds to a turn, against a provider on this host
// that answers at once.
func (b *bench) engines(ctx context.Context, r *report) (err error) {
	provider := httptest.NewServer(fakemodel.New())
	defer provider.Close()
	names := []string{"model"}
	image := ""
	if b.rootfs != "" {
		names = append(names, "claude", "opencode")
		image = "berth-bench-engines:" + berth.NewID(4)
		if _, err := b.docker.BuildFromRootfs(ctx, b.rootfs, filepath.Join(filepath.Dir(b.program), "agent-runner"), image, nil); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, exec.Command("docker", "rmi", "-f", image).Run()) }()
	}
	floor, err := b.turns(ctx, "builtin", provider.URL, "")
	if err != nil {
		return fmt.Errorf("builtin: %w", err)
	}
	var bare []float64
	for range warmTurns {
		begun := time.Now()
		if err := ask(ctx, provider.URL); err != nil {
			return err
		}
		bare = append(bare, millis(time.Since(begun)))
	}
	for _, name := range names {
		its := ""
		if name != "model" {
			its = image
		}
		t, err := b.turns(ctx, name, provider.URL, its)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		r.add(row{what: name + ": message → answer, cold", unit: ms, ours: t.cold, floor: floor.cold,
			note: "From the message to its answer in a new container, over the control socket, with a provider on this host that answers at once. The floor is the same with the engine builtin, which asks nobody."})
		r.add(row{what: name + ": message → answer, warm", unit: ms, ours: t.warm, floor: floor.warm,
			note: "The same in a container that is idle. A streamed request straight to the provider takes " + ms.write(p50(bare)) + "."})
		r.add(row{what: name + ": resident memory of the container", unit: mb, ours: t.memory, floor: floor.memory,
			note: "The sum of VmRSS of all its processes after the turns. The floor is the same with the engine builtin."})
	}
	return nil
}

// ask makes one streamed request without Berth.
func ask(ctx context.Context, url string) error {
	body := `{"model":"` + fakemodel.Model + `","stream":true,"max_tokens":100,"messages":[{"role":"user","content":"say hello"}]}`
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/messages", strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && (resp.StatusCode != http.StatusOK || !strings.Contains(string(text), "hello")) {
		err = fmt.Errorf("the provider says %s", resp.Status)
	}
	return err
}

// turns has one engine answer, in new containers and in one that is idle.
func (b *bench) turns(ctx context.Context, engine, provider, image string) (t turns, err error) {
	root, err := b.makeRoot(ctx, "engine-"+engine, 1)
	if err != nil {
		return t, err
	}
	kind := "anthropic"
	if engine == "opencode" {
		kind = "openai"
	}
	d, err := b.start(ctx, root, "AGENT_ENGINE="+engine, "CONTAINER_IMAGE="+image, "AGENT_MODEL="+fakemodel.Model, "AGENT_PROVIDER="+kind, "AGENT_SESSION_TIMEOUT=1m",
		"ANTHROPIC_BASE_URL="+provider, "ANTHROPIC_API_KEY=sk-bench", "OPENAI_BASE_URL="+provider+"/v1", "OPENAI_API_KEY=sk-bench")
	if err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	folder := group(0).Folder
	for i := range coldTurns + warmTurns {
		if i > 0 && i < coldTurns {
			if _, err := d.client.StopGroup(ctx, folder); err != nil {
				return t, err
			}
			err := until(ctx, "the run is gone", func() (bool, error) {
				s, err := d.client.Status(ctx)
				return len(s.Runs) == 0, err
			})
			if err != nil {
				return t, err
			}
		}
		begun := time.Now()
		m, err := d.client.Send(ctx, web.NewMessage{Group: folder, Text: "say hello"})
		if err != nil {
			return t, err
		}
		a, err := d.client.Answer(ctx, m.Seq, stepBound)
		if err != nil || a.State != web.AnswerDone {
			return t, errors.Join(err, fmt.Errorf("a message was not answered: %s %s", a.State, a.Error))
		}
		if took := millis(time.Since(begun)); i < coldTurns {
			t.cold = append(t.cold, took)
		} else {
			t.warm = append(t.warm, took)
		}
	}
	s, err := d.client.Status(ctx)
	if err != nil || len(s.Runs) != 1 {
		return t, errors.Join(err, fmt.Errorf("%d runs after the turns", len(s.Runs)))
	}
	i, err := b.bare.inspect(ctx, s.Runs[0].Container)
	if err != nil {
		return t, err
	}
	if i.label(docker.LabelInstall) != b.install {
		return t, errors.New("the run's container is not the bench's")
	}
	sum, err := residentOfAll(i.State.Pid)
	t.memory = append(t.memory, sum)
	return t, err
}

// residentOfAll returns the resident memory of all processes in the container of
// a process, in MB.
func residentOfAll(pid int) (sum float64, err error) {
	own, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
	if err != nil {
		return 0, err
	}
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, err
	}
	for _, dir := range all {
		if space, err := os.Readlink(dir + "/ns/pid"); err != nil || space != own {
			continue
		}
		id, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			return 0, err
		}
		var one []float64
		if err := resident(id, "VmRSS", &one); err == nil { // it may be gone by now
			sum += one[0]
		}
	}
	return sum, nil
}
