//go:build docker

package docker

import (
	"io"
	"slices"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
)

// BenchmarkColdStart measures create, attach, start to the first byte of stdout of
// a hardened container, once by Engine.Start and once by the bare calls that it
// cannot do without. Run it with -benchtime=20x; the two take turns so that the
// machine's moods meet both.
func BenchmarkColdStart(b *testing.B) {
	e, c := newEngine(b, dockerHost), bare(b)
	var ours, floor []time.Duration
	for b.Loop() {
		ours = append(ours, engineStart(b, e))
		floor = append(floor, bareStart(b, e, c))
	}
	median := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2]) / float64(time.Millisecond)
	}
	b.ReportMetric(median(ours), "ms/engine")
	b.ReportMetric(median(floor), "ms/bare")
	b.ReportMetric(median(ours)/median(floor), "ratio")
}

func engineStart(b *testing.B, e *Engine) time.Duration {
	begin := time.Now()
	box, err := e.Start(b.Context(), testSpec(), []byte("serve"), anyID)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := io.ReadFull(box.Stdout(), make([]byte, 1)); err != nil {
		b.Fatal(err)
	}
	took := time.Since(begin)
	_ = box.Close()
	if err := box.Remove(b.Context()); err != nil {
		b.Fatal(err)
	}
	return took
}

func bareStart(b *testing.B, e *Engine, c *client.Client) time.Duration {
	want := render(testSpec(), e.opts.Install, "")
	begin := time.Now()
	made, err := c.ContainerCreate(b.Context(), want.Config, want.Host, nil, nil, want.Name)
	if err != nil {
		b.Fatal(err)
	}
	conn, err := c.ContainerAttach(b.Context(), made.ID, container.AttachOptions{Stream: true, Stdin: true, Stdout: true, Stderr: true})
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	if err := c.ContainerStart(b.Context(), made.ID, container.StartOptions{}); err != nil {
		b.Fatal(err)
	}
	if _, err := conn.Conn.Write([]byte("serve")); err != nil {
		b.Fatal(err)
	}
	if err := conn.CloseWrite(); err != nil {
		b.Fatal(err)
	}
	if _, err := io.ReadFull(conn.Reader, make([]byte, 9)); err != nil { // a frame's header, and a byte
		b.Fatal(err)
	}
	took := time.Since(begin)
	if err := c.ContainerRemove(b.Context(), made.ID, container.RemoveOptions{Force: true}); err != nil {
		b.Fatal(err)
	}
	return took
}
