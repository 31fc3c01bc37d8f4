package gateway

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// BenchmarkStream compares an answer of 200 events that comes straight from a
// provider on loopback with the same through the gateway. first is the time to
// the first byte.
func BenchmarkStream(b *testing.B) {
	event := "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"a few words\"}}\n\n"
	base := upstream(b, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		out := http.NewResponseController(w)
		for range 200 {
			io.WriteString(w, event)
			out.Flush()
		}
	})
	r := newRig(b, both(base), Run{})
	run := func(client *http.Client, url string) func(*testing.B) {
		return func(b *testing.B) {
			var first time.Duration
			one := make([]byte, 1)
			for b.Loop() {
				start := time.Now()
				resp, err := client.Post(url, "application/json", strings.NewReader(`{"stream":true}`))
				if err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(resp.Body, one); err != nil {
					b.Fatal(err)
				}
				first += time.Since(start)
				n, err := io.Copy(io.Discard, resp.Body)
				if err != nil || n != int64(200*len(event)-1) {
					b.Fatal(n, err)
				}
				resp.Body.Close()
			}
			b.ReportMetric(float64(first.Microseconds())/float64(b.N), "µs-first")
		}
	}
	b.Run("direct", run(http.DefaultClient, base+"/v1/messages"))
	b.Run("gateway", run(r.client, "http://gateway/anthropic/v1/messages"))
}

// BenchmarkEvent is the time from the provider's write of one event to its
// arrival in the container's place, straight and through the gateway.
func BenchmarkEvent(b *testing.B) {
	const event = "data: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a few words\"}}\n\n"
	next := make(chan bool)
	base := upstream(b, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		out := http.NewResponseController(w)
		out.Flush()
		for <-next {
			io.WriteString(w, event)
			out.Flush()
		}
	})
	r := newRig(b, both(base), Run{})
	run := func(client *http.Client, url string) func(*testing.B) {
		return func(b *testing.B) {
			resp, err := client.Post(url, "application/json", strings.NewReader(`{"stream":true}`))
			if err != nil {
				b.Fatal(err)
			}
			defer resp.Body.Close()
			buf := make([]byte, len(event))
			for b.Loop() {
				next <- true
				if _, err := io.ReadFull(resp.Body, buf); err != nil {
					b.Fatal(err)
				}
			}
			next <- false
		}
	}
	r.client.Timeout = 0
	b.Run("direct", run(http.DefaultClient, base+"/v1/messages"))
	b.Run("gateway", run(r.client, "http://gateway/anthropic/v1/messages"))
}

// BenchmarkTunnel carries 1 MiB each way through CONNECT.
func BenchmarkTunnel(b *testing.B) {
	r, _, egress := openTo(b, Limits{EgressBytes: 1 << 60}, echoServer(b))
	c, err := dialDoor(b.Context(), r.door)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\n", egress[0])
	if _, err := io.ReadFull(c, make([]byte, len("HTTP/1.1 200 Connection established\r\n\r\n"))); err != nil {
		b.Fatal(err)
	}
	piece := make([]byte, 1<<20)
	b.SetBytes(2 << 20)
	for b.Loop() {
		go c.Write(piece)
		if _, err := io.CopyN(io.Discard, c, int64(len(piece))); err != nil {
			b.Fatal(err)
		}
	}
}
