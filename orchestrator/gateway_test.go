//go:build docker

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// secretKey is what must never be found anywhere near a container.
const secretKey = "sk-ant-test-9f2c71d05b8e4a63"

// provider plays a model's API: it streams one word, waits, and streams another.
func provider(t *testing.T) (url string, goOn chan struct{}) {
	t.Helper()
	goOn = make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Api-Key") != secretKey || r.URL.Path != "/v1/messages" {
			http.Error(w, "who are you", http.StatusUnauthorized)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		event := func(name, data string) {
			fmt.Fprintf(w, "event: %s\ndata: %s\n\n", name, data)
			w.(http.Flusher).Flush()
		}
		event("message_start", `{"type":"message_start","message":{"model":"claude-test","usage":{"input_tokens":11,"output_tokens":1}}}`)
		event("content_block_delta", `{"type":"content_block_delta","delta":{"text":"first word"}}`)
		select {
		case <-goOn:
		case <-r.Context().Done():
		}
		event("content_block_delta", `{"type":"content_block_delta","delta":{"text":"last word, your key is `+secretKey+`"}}`)
		event("message_delta", `{"type":"message_delta","usage":{"output_tokens":31}}`)
		event("message_stop", `{"type":"message_stop"}`)
	}))
	t.Cleanup(server.Close)
	return server.URL, goOn
}

// A container without a network gets a streamed answer through the gateway, and
// the key is nowhere that it, or anybody who looks at it, could read.
func TestW58KeyStaysOnTheHost(t *testing.T) {
	t.Parallel()
	url, goOn := provider(t)
	h := newHost(t, "")
	h.env = append(h.env, "ANTHROPIC_BASE_URL="+url, "ANTHROPIC_API_KEY="+secretKey)
	mustBerth(t, h.root, "groups", "add", "family", "--no-trigger", "--engine", "builtin")
	h.ready()
	group := filepath.Join(h.root, "groups", "family")
	if _, err := h.ask("family", "run echo its folders are there"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(group, "request"), []byte("POST /anthropic/v1/messages HTTP/1.1\r\nHost: gateway\r\n"+
		"X-Api-Key: placeholder\r\nContent-Type: application/json\r\nContent-Length: 15\r\nConnection: close\r\n\r\n"+`{"stream":true}`), 0o644); err != nil {
		t.Fatal(err)
	}
	seq, err := h.send("family", "run env; ip addr; (cat request; sleep 60) | nc 127.0.0.1 8787 > answer & p=$!; "+
		"until grep -q message_stop answer; do sleep 0.1; done; kill $p; cat answer")
	if err != nil {
		t.Fatal(err)
	}
	read := func() string {
		data, err := os.ReadFile(filepath.Join(group, "answer"))
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return string(data)
	}
	waitFor(t, func() bool { return strings.Contains(read(), "first word") })
	if strings.Contains(read(), "last word") {
		t.Error("the answer was not streamed")
	}
	close(goOn)
	got, err := h.answer(seq)
	if err != nil {
		t.Fatal(err)
	}
	answer := strings.Join(got.Texts, "\n")
	for _, want := range []string{"last word", "127.0.0.1"} {
		if !strings.Contains(answer, want) {
			t.Errorf("got %q, want %q in it", answer, want)
		}
	}
	if strings.Contains(answer, "eth0") {
		t.Errorf("the container has a network: %s", answer)
	}

	h.noKey("family", map[string]string{"the answer": answer})
	waitFor(t, func() bool {
		return strings.Contains(mustBerth(t, h.root, "usage"), "family  anthropic  claude-test  1         11     31")
	})
	h.finish()
}

// noKey looks for secretKey in all that has to do with the container of a group,
// and in what the daemon keeps and says.
func (h *host) noKey(group string, more map[string]string) {
	t := h.t
	t.Helper()
	ids, err := h.containers(group)
	if err != nil || len(ids) != 1 {
		t.Fatal(ids, err)
	}
	places := make(map[string][]byte)
	for name, text := range more {
		places[name] = []byte(text)
	}
	for name, args := range map[string][]string{"docker inspect": {"inspect", ids[0]}, "docker diff": {"diff", ids[0]}, "docker top": {"top", ids[0], "-eo", "pid"}} {
		out, err := exec.Command("docker", args...).Output()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		places[name] = out
	}
	for _, pid := range strings.Fields(string(places["docker top"]))[1:] {
		for _, file := range []string{"environ", "cmdline"} {
			data, err := os.ReadFile("/proc/" + pid + "/" + file)
			if err != nil && !os.IsNotExist(err) && !os.IsPermission(err) {
				t.Fatal(err)
			}
			places["/proc/"+pid+"/"+file] = data
		}
	}
	files := 0
	err = filepath.WalkDir(h.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		files++
		places[path], err = os.ReadFile(path)
		return err
	})
	if err != nil || files < 10 {
		t.Fatal(files, err)
	}
	places["status"] = []byte(mustBerth(t, h.root, "status", "--json") + mustBerth(t, h.root, "audit", "--json") + mustBerth(t, h.root, "groups", "ls", "--json"))
	for place, data := range places {
		if bytes.Contains(data, []byte(secretKey)) {
			t.Errorf("the key is in %s", place)
		}
	}
	export := exec.Command("docker", "export", ids[0])
	image, err := export.StdoutPipe()
	if err == nil {
		err = export.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	found, err := contains(image, secretKey)
	if err = errors.Join(err, export.Wait()); found || err != nil {
		t.Errorf("the key is in the container's files: %t, %v", found, err)
	}
}

// contains reads all of r and reports whether word is in it.
func contains(r io.Reader, word string) (found bool, err error) {
	buf := make([]byte, 1<<20)
	for kept := 0; ; {
		n, err := io.ReadFull(r, buf[kept:])
		found = found || bytes.Contains(buf[:kept+n], []byte(word))
		if err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				err = nil
			}
			return found, err
		}
		kept = copy(buf, buf[len(buf)-len(word):])
	}
}

// What is not on the list, and what leads to the host or its network, is refused;
// the agent reads why, and so does the operator. Names that resolve to private
// addresses are the gateway's own tests'.
func TestEgressIsRefused(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the host was reached") }))
	defer server.Close()
	port := server.URL[strings.LastIndexByte(server.URL, ':')+1:]
	h := newHost(t, "")
	mustBerth(t, h.root, "groups", "add", "family", "--no-trigger", "--engine", "builtin")
	mustBerth(t, h.root, "groups", "set", "family", "--egress", "listed.example")
	h.ready()
	for target, reason := range map[string]string{
		"off.example:443":      "off.example",
		"169.254.169.254:80":   "169.254.169.254",
		"127.0.0.1:" + port:    "127.0.0.1",
		"listed.example:22":    "port",
		"[::1]:" + port:        "::1",
		"localhost:" + port:    "localhost",
		"LISTED.example.:8443": "8443",
	} {
		answer, err := h.ask("family", fmt.Sprintf(`run printf 'CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\n' | nc 127.0.0.1 8787`, target))
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Join(answer.Texts, "\n")
		if !strings.Contains(text, "HTTP/1.1 403") || !strings.Contains(text, reason) {
			t.Errorf("%s: got %q, want it refused for %q", target, text, reason)
		}
		name := strings.TrimSuffix(strings.ToLower(target), ".")
		waitFor(t, func() bool {
			audit := strings.ToLower(mustBerth(t, h.root, "audit", "-g", "family", "--json"))
			return strings.Contains(audit, strings.Replace(name, ".:", ":", 1)) && strings.Contains(audit, `"egress"`)
		})
	}
	if _, err := berthIn(t, h.root, nil, "groups", "set", "family", "--egress", "http://x"); err == nil {
		t.Error("an address was taken as a host")
	}
	h.finish()
}
