package forward

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// host listens where the daemon would and serves each connection with handle.
func host(t *testing.T, socket string, handle func(net.Conn)) net.Listener {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				handle(c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return l
}

// upper answers each line in upper case.
func upper(c net.Conn) {
	for lines := bufio.NewScanner(c); lines.Scan(); {
		fmt.Fprintln(c, strings.ToUpper(lines.Text()))
	}
}

func open(t *testing.T, socket string) *Forwarder {
	t.Helper()
	f, err := Open(context.Background(), "127.0.0.1:0", socket, log.New(t.Output(), "", 0))
	if err != nil || f == nil {
		t.Fatalf("Open = %v, %v", f, err)
	}
	t.Cleanup(f.Close)
	return f
}

func dial(t *testing.T, f *Forwarder) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", f.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

func TestForward(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	host(t, socket, upper)
	f := open(t, socket)
	for i := range 3 * maxConns { // slots are given back
		c := dial(t, f)
		fmt.Fprintf(c, "hello %d\n", i)
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		// The end of one direction leaves the other open.
		got, err := io.ReadAll(c)
		if want := fmt.Sprintf("HELLO %d\n", i); err != nil || string(got) != want {
			t.Fatalf("got %q, %v, want %q", got, err, want)
		}
		c.Close()
	}
}

func TestForwardManyAtOnce(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	host(t, socket, upper)
	f := open(t, socket)
	var wg sync.WaitGroup
	for i := range 2 * maxConns {
		wg.Go(func() {
			c, err := net.Dial("tcp", f.Addr())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			fmt.Fprintf(c, "n%d\n", i)
			line, err := bufio.NewReader(c).ReadString('\n')
			if want := fmt.Sprintf("N%d\n", i); line != want {
				t.Errorf("got %q, %v, want %q", line, err, want)
			}
		})
	}
	wg.Wait()
}

func TestNoSocket(t *testing.T) {
	dir := t.TempDir()
	for _, socket := range []string{"", filepath.Join(dir, "none")} {
		f, err := Open(t.Context(), "127.0.0.1:0", socket, nil)
		if f != nil || err != nil {
			t.Errorf("Open(%q) = %v, %v, want nil, nil", socket, f, err)
		}
		f.Close()
		if got := f.Addr(); got != "" {
			t.Errorf("Addr of nothing = %q", got)
		}
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if f, err := Open(t.Context(), "127.0.0.1:0", file, nil); err == nil {
		f.Close()
		t.Error("a regular file passed for a socket")
	}
}

// TestHostStartsAnew: a daemon that is replaced is waited for.
func TestHostStartsAnew(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	old.SetUnlinkOnClose(false)
	f := open(t, socket)
	old.Close() // the socket is there and nobody listens

	c := dial(t, f)
	defer c.Close() // before the host waits for its connections
	fmt.Fprintln(c, "hello")
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	host(t, socket, upper)
	if line, err := bufio.NewReader(c).ReadString('\n'); line != "HELLO\n" {
		t.Errorf("got %q, %v", line, err)
	}
}

// TestTurnedAway: the answer to a client whose host is gone is one of HTTP.
func TestTurnedAway(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		turnAway(c.(*net.TCPConn))
	}()
	resp, err := http.Get("http://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 503 || !strings.HasSuffix(string(body), "}}") {
		t.Errorf("got %d %q, %v", resp.StatusCode, body, err)
	}
	http.DefaultClient.CloseIdleConnections()
	<-done
}

// TestEndsWithItsRun: the end of ctx closes the port and what is open, and
// leaves no goroutine behind.
func TestEndsWithItsRun(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	arrived := make(chan struct{})
	host(t, socket, func(c net.Conn) {
		arrived <- struct{}{}
		_, _ = io.Copy(io.Discard, c)
	})
	before := runtime.NumGoroutine()
	ctx, cancel := context.WithCancel(t.Context())
	f, err := Open(ctx, "127.0.0.1:0", socket, log.New(t.Output(), "", 0))
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t, f)
	<-arrived
	cancel()
	f.Close()
	f.Close()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("the connection lives on")
	}
	if c, err := net.Dial("tcp", f.Addr()); err == nil {
		c.Close()
		t.Error("the port is still open")
	}
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines, want %d", runtime.NumGoroutine(), before)
		}
	}
}

func TestEnviron(t *testing.T) {
	got := Environ(Address)
	for _, want := range []string{
		"ANTHROPIC_BASE_URL=http://127.0.0.1:8787/anthropic", "ANTHROPIC_API_KEY=placeholder",
		"OPENAI_BASE_URL=http://127.0.0.1:8787/openai/v1", "OPENAI_API_KEY=placeholder",
		"GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:8787/gemini", "GEMINI_API_KEY=placeholder",
		"HTTP_PROXY=http://127.0.0.1:8787", "https_proxy=http://127.0.0.1:8787",
		"NO_PROXY=127.0.0.1,localhost", "no_proxy=127.0.0.1,localhost",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("%s is missing", want)
		}
	}
}
