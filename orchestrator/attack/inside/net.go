package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// door is the container's end of the gateway.
const door = "/workspace/gateway/gateway.sock"

// exchange sends bytes to the gateway and returns what comes back.
func exchange(request string) (string, error) {
	c, err := net.Dial("unix", door)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	go func() { _, _ = io.WriteString(c, request) }() // it may be cut off
	answer, err := io.ReadAll(io.LimitReader(c, 1<<20))
	if len(answer) > 0 {
		err = nil
	}
	return string(answer), err
}

// attempt tells what the gateway made of a request: its status and its reason.
func attempt(name, request string) {
	answer, err := exchange(request)
	if err != nil {
		tell(name, err)
		return
	}
	if bytes.Contains([]byte(answer), key()) {
		tell(name, nil, "and the key came back")
		return
	}
	resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader(answer)), nil)
	if err != nil {
		tell(name, fmt.Errorf("closed: %w", err))
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 400))
	if resp.StatusCode < 300 {
		tell(name, nil, resp.Status, string(body))
		return
	}
	tell(name, fmt.Errorf("refused: %d %s", resp.StatusCode, strings.TrimSpace(string(body))))
}

// key is the beginning of the operator's key.
func key() []byte { return joined("sk", "ant", "attack", "") }

// gate asks the gateway for what it must not give.
func gate() {
	port := os.Getenv("PORT")
	post := "POST /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\n"
	const body = `{"model":"m","messages":[]}`
	// The provider of this play tells all headers that it got.
	answer, err := exchange(post + "X-Api-Key: mine\r\nAuthorization: Bearer mine\r\nConnection: close\r\n" + fmt.Sprintf("Content-Length: %d\r\n\r\n", len(body)) + body)
	switch {
	case err != nil:
		tell("read the key in the provider's answer", err)
	case bytes.Contains([]byte(answer), key()):
		tell("read the key in the provider's answer", nil, "it is there")
	case !strings.Contains(answer, "you sent"):
		tell("read the key in the provider's answer", errors.New("the provider did not answer: "+answer))
	default:
		tell("read the key in the provider's answer", errors.New("not there"))
	}

	for _, to := range append([]string{
		"example.com:443", "169.254.169.254:80", "[fd00:ec2::254]:80", "metadata.google.internal:80",
		"127.0.0.1:" + port, "[::1]:" + port, "localhost:" + port, "0.0.0.0:" + port, "[::]:" + port,
		"[::ffff:127.0.0.1]:" + port, "2130706433:" + port, "127.1:" + port, "0x7f000001:" + port, "0177.0.0.1:" + port,
		"172.17.0.1:" + port, "127.0.0.1:2375",
		"loopback.attack.example:" + port, "metadata.attack.example:80", "lan.attack.example:443", "six.attack.example:443",
		"loopback.attack.example.:443", "open.attack.example:22", "attack.example:443",
		"", ":443", "a b:443", "example.com", "example.com:0", "example.com:99999", "user:secret@example.com:443",
		"open.attack.example:443\x00.evil.example:443", "..:443", strings.Repeat("a.", 400) + "example:443",
	}, strings.Fields(os.Getenv("ADDRESSES"))...) {
		attempt(fmt.Sprintf("CONNECT %.40q", to), "CONNECT "+to+" HTTP/1.1\r\nHost: "+to+"\r\n\r\n")
	}
	for _, url := range []string{
		"http://127.0.0.1:" + port + "/", "http://169.254.169.254/latest/meta-data/", "http://loopback.attack.example/",
		"http://user:secret@open.attack.example/", "https://example.com/", "ftp://example.com/", "file:///etc/passwd", "unix:///var/run/docker.sock",
	} {
		attempt("GET "+url, "GET "+url+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	}
	for _, path := range []string{"/", "/v1/status", "/debug/pprof/", "/anthropic/../v1/status", "/anthropic/%2e%2e/%2e%2e/v1/status", "/anthropic", "//127.0.0.1:" + port + "/", "*"} {
		attempt("GET "+path, "GET "+path+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	}
	// The host waits for the rest of some of these.
	var wg sync.WaitGroup
	wg.Go(func() {
		attempt("two lengths of one request", post+"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}")
	})
	wg.Go(func() {
		attempt("length and chunks of one request", post+"Connection: close\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/status HTTP/1.1\r\n\r\n")
	})
	wg.Go(func() { attempt("a header of 1 MiB", post+"X: "+strings.Repeat("x", 1<<20)+"\r\n\r\n") })
	wg.Go(func() { attempt("100 000 headers", post+strings.Repeat("X: x\r\n", 100_000)+"\r\n") })
	wg.Go(func() { attempt("a body of 1 TiB", post+"Content-Length: 1099511627776\r\n\r\n") })
	wg.Go(func() { attempt("a broken request", "\x16\x03\x01\x02\x00\x01\x00") })
	wg.Go(func() { attempt("HTTP/2 in the clear", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") })
	wg.Go(func() {
		attempt("upgrade to something else", "GET /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: docker\r\n\r\n")
	})
	wg.Wait()
}

// besiege keeps the gateway busy until then.
func besiege(until time.Time) {
	time.Sleep(time.Until(until) / 10) // what comes after it is refused for the budget alone
	half := until.Add(-time.Until(until) / 2)
	var mu sync.Mutex
	answers := make(map[string]int)
	var wg sync.WaitGroup
	storm := func(workers int, name, request string) {
		for range workers {
			wg.Go(func() {
				for time.Now().Before(half) {
					answer, err := exchange(request)
					status := "no answer"
					if err == nil && len(answer) > 12 {
						status = answer[9:12]
					}
					mu.Lock()
					answers[name+" "+status]++
					mu.Unlock()
				}
			})
		}
	}
	storm(16, "CONNECT", "CONNECT forbidden.example:443 HTTP/1.1\r\n\r\n")
	storm(8, "CONNECT to the host", "CONNECT loopback.attack.example:"+os.Getenv("PORT")+" HTTP/1.1\r\n\r\n")
	storm(8, "provider", "POST /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
	wg.Wait()
	for name, statuses := range map[string][]string{"CONNECT": {"403"}, "CONNECT to the host": {"403"}, "provider": {"200", "402"}} {
		var told []string
		for _, status := range append(statuses, "no answer") {
			told = append(told, fmt.Sprintf("%d × %s", answers[name+" "+status], status))
			delete(answers, name+" "+status)
		}
		tell("a flood: "+name, errors.New(strings.Join(told, ", ")))
	}
	for what, n := range answers {
		tell("a flood: another answer", nil, fmt.Sprintf("%s: %d", what, n))
	}

	// Half requests, which the host has to give up by itself.
	begun := time.Now()
	var cut atomic.Int64
	for range 200 {
		wg.Go(func() {
			c, err := net.Dial("unix", door)
			if err != nil {
				return
			}
			defer c.Close()
			_, _ = io.WriteString(c, "POST /anthropic/v1/messages HTTP/1.1\r\nHost: x")
			_ = c.SetDeadline(until)
			if _, err := io.Copy(io.Discard, c); err == nil {
				cut.Add(1)
			}
		})
	}
	wg.Wait()
	tell("200 half requests", fmt.Errorf("%d of them cut off within %.0f s, 64 at a time", cut.Load(), time.Since(begun).Seconds()))
}

// hunt looks for the operator's key and the canaries' song wherever this process
// may look.
func hunt() {
	song := joined("canary", "song", "")
	var files, hidden int
	var found []string
	look := func(path string) {
		f, err := os.Open(path)
		if err != nil {
			hidden++
			return
		}
		defer f.Close()
		data, _ := io.ReadAll(io.LimitReader(f, 32<<20))
		files++
		if bytes.Contains(data, key()) || bytes.Contains(data, song) {
			found = append(found, path)
		}
	}
	_ = filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			hidden++
			return nil
		case path == "/sys" || path == "/proc" || strings.HasPrefix(path, "/workspace/ipc/"):
			return fs.SkipDir
		case d.Type().IsRegular():
			look(path)
		}
		return nil
	})
	result := func(name string) {
		if len(found) > 0 {
			tell(name, nil, strings.Join(found, " "))
		} else {
			tell(name, fmt.Errorf("not found: %d files read, %d closed", files, hidden))
		}
		files, hidden, found = 0, 0, nil
	}
	result("hunt for keys in all files")
	for _, pattern := range []string{"/proc/[0-9]*/environ", "/proc/[0-9]*/cmdline", "/proc/[0-9]*/task/*/environ", "/proc/[0-9]*/stat", "/proc/[0-9]*/auxv"} {
		paths, _ := filepath.Glob(pattern)
		for _, path := range paths {
			look(path)
		}
	}
	for _, path := range []string{"/proc/mounts", "/proc/self/mountinfo", "/proc/cmdline", "/proc/net/unix", "/proc/1/maps", "/proc/1/mem", "/proc/keys"} {
		look(path)
	}
	result("hunt for keys in all processes")
	var mounted []string
	entries, err := os.ReadDir("/workspace/extra")
	for _, e := range entries {
		mounted = append(mounted, e.Name())
	}
	tell("what is mounted", err, strings.Join(mounted, " "))
	for _, path := range strings.Fields(os.Getenv("CANARIES")) {
		_, err := os.ReadFile(path)
		tell("read "+filepath.Join(filepath.Base(filepath.Dir(path)), filepath.Base(path))+" by the host's path", err)
	}
}
