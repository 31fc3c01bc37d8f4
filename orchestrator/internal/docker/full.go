package docker

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/docker/docker/api/types/build"

	"berth/orchestrator/internal/berth"
)

// BuildFromDockerfile has the engine build an image as tag, from a Dockerfile
// whose context holds the runner alone. The engine has to reach the registries
// that the file names. progress, which may be nil, hears the lines of the build.
func (e *Engine) BuildFromDockerfile(ctx context.Context, dockerfile []byte, runner, tag string, args map[string]string, progress func(string)) error {
	if progress == nil {
		progress = func(string) {}
	}
	program, err := readProgram(runner)
	if err != nil {
		return err
	}
	c, err := e.client(ctx)
	if err != nil {
		return err
	}
	files, err := pack([]entry{{path: "Dockerfile", mode: 0o644, data: dockerfile}, {path: "agent-runner", mode: 0o755, data: program}})
	if err != nil {
		return err
	}
	values := make(map[string]*string, len(args))
	for name, value := range args {
		values[name] = &value
	}
	res, err := c.ImageBuild(ctx, bytes.NewReader(files), build.ImageBuildOptions{Tags: []string{tag}, BuildArgs: values, Remove: true, ForceRemove: true})
	if err != nil {
		return e.explain(ctx, err, "build image "+tag)
	}
	defer res.Body.Close()
	// The engine has answered 200 by now; what goes wrong stands in the body.
	for dec := json.NewDecoder(bufio.NewReader(res.Body)); ; {
		var line struct{ Stream, Status, Error string }
		if err := dec.Decode(&line); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read the engine's answer: %w", err)
		}
		if line.Error != "" {
			return berth.Errorf(berth.Unavailable, "build image %s: %s", tag, strings.TrimSpace(line.Error))
		}
		if text := strings.TrimSpace(line.Stream + line.Status); text != "" {
			progress(text)
		}
	}
}
