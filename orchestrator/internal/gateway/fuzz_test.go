package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// FuzzEgress lists one entry and asks for one place. What is let through has to
// be what the entry says, by a second and simpler reckoning.
func FuzzEgress(f *testing.F) {
	for _, rule := range []string{"example.org", "*.example.org", "*.example.org:8443", "1.1.1.1", "[2606:4700::1111]:53", "bücher.example", "[2600::]", "10.0.0.1", "*", "*.1.1.1.1"} {
		for _, asked := range []string{
			"example.org:443", "EXAMPLE.ORG.:80", "a.example.org:443", "evilexample.org:443", "a.example.org:8443", "1.1.1.1:443", "[::ffff:1.1.1.1]:443", "[2600::]:443", "0x1.1:80",
			"xn--bcher-kva.example:443", "b\u00fccher。example:443", "example.org:443@evil:443", "[fe80::1%25x]:443", "example.org%00.evil:443", "１.1.1.1:80", "a.b.*.example.org:80",
		} {
			f.Add(rule, asked)
		}
	}
	f.Fuzz(func(t *testing.T, entry, asked string) {
		e, err := ParseEgress([]string{entry})
		at, atErr := parseTarget(asked, 80)
		if atErr == nil {
			again, err := parseTarget(at.String(), 0)
			if err != nil || again != at {
				t.Errorf("%q is %+v, and %q is %+v, %v", asked, at, at.String(), again, err)
			}
			if strings.Trim(at.host, "abcdefghijklmnopqrstuvwxyz0123456789.-:") != "" || len(at.host) > maxHost || at.port == 0 {
				t.Errorf("%q is %+v", asked, at)
			}
			if _, _, err := net.SplitHostPort(at.dialed()); err != nil {
				t.Errorf("%q would be dialed as %q", asked, at.dialed())
			}
			if addr, err := netip.ParseAddr(at.host); (err == nil) != at.addr.IsValid() || err == nil && addr != at.addr {
				t.Errorf("%q is %+v", asked, at)
			}
		}
		if err != nil {
			return
		}
		if again, err := ParseEgress(e.strings()); err != nil || !slices.Equal(again.rules, e.rules) {
			t.Errorf("%q is %+v, and %q is %+v, %v", entry, e.rules, e.strings(), again.rules, err)
		}
		if r := e.rules[0]; !r.wild && strings.Trim(r.host, "0123456789.") == "" {
			if addr, err := netip.ParseAddr(r.host); err != nil || blocked(addr) != "" {
				t.Errorf("%q lists %q", entry, r.host)
			}
		}
		if atErr != nil || e.refuse(at) != "" {
			return
		}
		written := e.strings()[0]
		port := "443"
		if at.port == 80 {
			port = "80"
		}
		if host, own, err := net.SplitHostPort(written); err == nil {
			written, port = host, own
		}
		written = strings.Trim(written, "[]")
		host, gotPort, _ := net.SplitHostPort(at.String())
		matches := host == written
		if suffix, ok := strings.CutPrefix(written, "*"); ok {
			matches = strings.HasSuffix(host, suffix) && len(host) > len(suffix) && !at.addr.IsValid()
		}
		if !matches || gotPort != port {
			t.Errorf("%q lets %q (%+v) through", entry, asked, at)
		}
	})
}

// FuzzRequest says anything on the socket. The provider sees what it may see
// only, no connection is made to anywhere else, and nothing breaks.
func FuzzRequest(f *testing.F) {
	for _, seed := range []string{
		"POST /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\nX-Api-Key: y\r\nContent-Length: 2\r\n\r\n{}",
		"POST /openai/v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
		"POST /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nGET /anthropic/v1/files HTTP/1.1\r\n\r\n",
		"GET /openai/models/a/b HTTP/1.1\r\nHost: x\r\nConnection: Authorization, X-Api-Key\r\n\r\n",
		"GET /anthropic/v1/models/%2e%2e/files HTTP/1.1\r\nHost: x\r\n\r\n", "GET /openai/../anthropic/v1/files HTTP/1.1\r\nHost: x\r\n\r\n",
		"GET http://127.0.0.1:8787/anthropic/v1/models HTTP/1.1\r\nHost: x\r\n\r\n", "GET http://127.0.0.1/ HTTP/1.1\r\nHost: x\r\n\r\n",
		"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: x\r\n\r\nSSH", "CONNECT ok.example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n", "CONNECT a@b:443 HTTP/1.1\r\nHost: x\r\n\r\n",
		"GET http://u:p@ok.example.org/ HTTP/1.1\r\nHost: x\r\n\r\n", "GET https://ok.example.org/ HTTP/1.1\r\nHost: x\r\n\r\n", "GET http://ok.example.org:80/ HTTP/1.1\r\nHost: x\r\n\r\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", "GET /anthropic/v1/models?x=%0d%0aX:y HTTP/1.0\r\n\r\n", "\x16\x03\x01\x00",
		"POST /gemini/v1beta/models/m:streamGenerateContent?alt=sse&key=x HTTP/1.1\r\nHost: x\r\nX-Goog-Api-Key: y\r\nContent-Length: 2\r\n\r\n{}",
		"GET /gemini/v1beta/models?$httpHeaders=X-Goog-Api-Key:z&pageSize=1 HTTP/1.1\r\nHost: x\r\n\r\n", "POST /gemini/v1beta/models/../files:generateContent HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /anthropic/v1/messages HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n{}", "HEAD /anthropic HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
	} {
		f.Add([]byte(seed))
	}
	var fault string
	provider := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		p, base := &provider{paths: anthropicPaths}, "/a"
		carried := r.Header.Get("X-Api-Key")
		switch {
		case strings.HasPrefix(r.URL.Path, "/o/"):
			p, base = &provider{paths: openAIPaths}, "/o"
			carried, _ = strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		case strings.HasPrefix(r.URL.Path, "/g/"):
			p, base = &provider{paths: geminiPaths}, "/g"
			carried = r.Header.Get("X-Goog-Api-Key")
			for name, values := range r.URL.Query() {
				if value := strings.Join(values, ""); name != "pageSize" && name != "pageToken" && (name != "alt" || strings.Trim(value, "jsone") != "") {
					fault = "query " + r.URL.RawQuery
				}
			}
		}
		keys := len(r.Header["X-Api-Key"]) + len(r.Header["Authorization"]) + len(r.Header["X-Goog-Api-Key"])
		if _, _, ok := p.match(r.Method, strings.TrimPrefix(r.URL.EscapedPath(), base)); !ok || carried != key || keys != 1 {
			fault = fmt.Sprint(r.Method, " ", r.RequestURI, " ", r.Header)
		}
		for name := range r.Header {
			if !passed(name) && !slices.Contains([]string{"X-Api-Key", "Authorization", "X-Goog-Api-Key", "Accept-Encoding", "Content-Length"}, name) {
				fault = "header " + name
			}
		}
		w.Header().Set("X-Echo", key)
		io.WriteString(w, key)
	}))
	f.Cleanup(provider.Close)
	core, logs := observer.New(zap.DebugLevel)
	g, err := New(Config{
		Dir: f.TempDir(), UID: os.Getuid(), GID: os.Getgid(),
		Anthropic: Anthropic{BaseURL: provider.URL + "/a", APIKey: theKey}, OpenAI: OpenAI{BaseURL: provider.URL + "/o", APIKey: theKey}, Gemini: Gemini{BaseURL: provider.URL + "/g", APIKey: theKey},
		Resolver: &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no names here") }},
		Limits:   Limits{Rate: 1 << 20, RequestBytes: 1 << 10, HeaderTimeout: time.Second, IdleTimeout: time.Second, DialTimeout: time.Second},
	}, &memory{}, zap.New(core))
	if err != nil {
		f.Fatal(err)
	}
	g.refuses = func(a netip.AddrPort) string {
		fault = "dialed " + a.String()
		return "nothing is dialed here"
	}
	f.Cleanup(g.Close)
	d, err := g.Open(Run{ID: "fuzz", Egress: []string{"ok.example.org"}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, said []byte) {
		c, err := dialDoor(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(said) // it may be turned away in the middle
		_ = c.(*net.UnixConn).CloseWrite()
		answer, err := io.ReadAll(c)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("the gateway hangs")
		}
		if strings.Contains(string(answer), key) {
			t.Errorf("the answer holds the key: %q", answer)
		}
		if fault != "" {
			t.Errorf("got through: %s", fault)
			fault = ""
		}
		for _, e := range logs.TakeAll() {
			if strings.Contains(e.Message, "panic") {
				t.Error(e.Message)
			}
		}
	})
}
