package program

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"berth/agent-runner/protocol"
)

// TestClasses: what the provider's answer to a call means for the run, whatever the
// agent makes of it.
func TestClasses(t *testing.T) {
	var status int
	var body string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}))
	defer server.Close()
	tap, err := OpenTap(strings.TrimPrefix(server.URL, "http://"), log.New(t.Output(), "", 0))
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	for _, tt := range []struct {
		status      int
		body, class string
	}{
		{400, `{"type":"error","error":{"type":"invalid_request_error","message":"Your credit balance is too low to access the Anthropic API."}}`, protocol.ClassAuth},
		{429, `{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","code":"insufficient_quota"}}`, protocol.ClassAuth},
		{400, `{"error":{"code":400,"message":"API key not valid.","status":"INVALID_ARGUMENT","details":[{"reason":"API_KEY_INVALID"}]}}`, protocol.ClassAuth},
		{400, `{"error":{"message":"no"}}`, protocol.ClassInput},
		{401, ``, protocol.ClassAuth},
		{402, ``, protocol.ClassAuth},
		{403, `<html>`, protocol.ClassAuth},
		{404, ``, protocol.ClassInput},
		{408, ``, ""},
		{409, ``, ""},
		{413, ``, protocol.ClassInput},
		{422, ``, protocol.ClassInput},
		{425, ``, ""},
		{429, ``, protocol.ClassRateLimit},
		{500, ``, ""},
		{503, ``, ""},
		{529, ``, ""},
	} {
		tap.Forget()
		status, body = tt.status, tt.body
		resp, err := http.Post("http://"+tap.Addr()+"/v1/messages", "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		passed, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || string(passed) != tt.body || resp.StatusCode != tt.status {
			t.Errorf("%d %s: passed on %d %s, %v", tt.status, tt.body, resp.StatusCode, passed, err)
		}
		refusal, failed := tap.Last()
		if got := refusal.Err(); !failed || got.Class != tt.class {
			t.Errorf("%d %s: class %q (%s), want %q", tt.status, tt.body, got.Class, got.Text, tt.class)
		}
	}
}

// TestTapLeavesNothing: a closed tap holds no connection.
func TestTapLeavesNothing(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	before := runtime.NumGoroutine()
	tap, err := OpenTap(strings.TrimPrefix(server.URL, "http://"), log.New(t.Output(), "", 0))
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post("http://"+tap.Addr()+"/v1/messages", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	tap.Close()
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines, want %d", runtime.NumGoroutine(), before)
		}
	}
}
