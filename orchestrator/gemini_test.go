//go:build docker

package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Gemini's API is reached as the other providers' are: with a key that no container
// sees, and counted.
func TestGeminiKeyStaysOnTheHost(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if got := r.Header.Get("X-Goog-Api-Key"); got != secretKey || r.URL.RequestURI() != "/v1beta/models/gemini-x:streamGenerateContent?alt=sse" {
			http.Error(w, "not as it should be: "+r.URL.RequestURI(), http.StatusForbidden)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, `data: {"candidates":[{"content":{"parts":[{"text":"last word, your key is `+secretKey+`"}]}}],`+
			`"usageMetadata":{"promptTokenCount":11,"candidatesTokenCount":31},"modelVersion":"gemini-test"}`+"\r\n\r\n")
	}))
	t.Cleanup(server.Close)
	h := newHost(t, "")
	h.env = append(h.env, "GOOGLE_GEMINI_BASE_URL="+server.URL, "GEMINI_API_KEY="+secretKey)
	mustBerth(t, h.root, "groups", "add", "family", "--no-trigger", "--engine", "builtin")
	h.ready()
	if _, err := h.ask("family", "run echo its folders are there"); err != nil {
		t.Fatal(err)
	}
	request := "POST /gemini/v1beta/models/gemini-x:streamGenerateContent?alt=sse&key=mine HTTP/1.1\r\nHost: gateway\r\nX-Goog-Api-Key: placeholder\r\nContent-Length: 2\r\n\r\n{}"
	if err := os.WriteFile(filepath.Join(h.root, "groups", "family", "request"), []byte(request), 0o644); err != nil {
		t.Fatal(err)
	}
	answer, err := h.ask("family", "run env; (cat request; sleep 60) | nc 127.0.0.1 8787 > answer & p=$!; until grep -q usageMetadata answer; do sleep 0.1; done; kill $p; cat answer")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(answer.Texts, "\n")
	if !strings.Contains(text, "last word") {
		t.Errorf("got %q", text)
	}
	h.noKey("family", map[string]string{"the answer": text})
	waitFor(t, func() bool {
		return strings.Contains(mustBerth(t, h.root, "usage"), "family  gemini    gemini-test  1         11     31")
	})
	h.finish()
}
