package tools

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/engine/model/llm"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/internal/shell"
	"berth/agent-runner/protocol"
)

// TestMain lets this test binary be the shell, and a tool server.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "sh":
			os.Exit(shell.Main(os.Args[2:]))
		case "tool-server":
			os.Exit(serveTools(os.Args[2:]))
		}
	}
	os.Exit(m.Run())
}

// serveTools is a tool server; faults are words that say how it misbehaves.
func serveTools(faults []string) int {
	has := make(map[string]bool)
	for _, f := range faults {
		has[f] = true
	}
	if has["mute"] {
		hang()
	}
	if has["deaf"] {
		return serveDeaf()
	}
	if has["garbage"] {
		fmt.Println("starting up …")
		fmt.Fprintln(os.Stderr, "a complaint")
	}
	if has["flood"] {
		junk := []byte(`{"x":"` + strings.Repeat("x", 1<<20))
		for {
			if _, err := os.Stdout.Write(junk[6*len(junk)/7:]); err != nil {
				return 1
			}
		}
	}
	server := mcp.NewServer(&mcp.Implementation{Name: "test", Version: "1"}, nil)
	type input struct {
		Text string `json:"text"`
	}
	add := func(name string, do func(ctx context.Context, text string) (*mcp.CallToolResult, error)) {
		mcp.AddTool(server, &mcp.Tool{Name: name, Description: "does " + name},
			func(ctx context.Context, _ *mcp.CallToolRequest, in input) (*mcp.CallToolResult, any, error) {
				r, err := do(ctx, in.Text)
				return r, nil, err
			})
	}
	says := func(text string) *mcp.CallToolResult {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: text}}}
	}
	add("echo", func(_ context.Context, text string) (*mcp.CallToolResult, error) {
		return says(fmt.Sprintf("%s %s %d", os.Getenv("WHO"), text, os.Getpid())), nil
	})
	add("spawn", func(context.Context, string) (*mcp.CallToolResult, error) {
		cmd := exec.Command("sleep", "1000")
		err := cmd.Start()
		return says(fmt.Sprint(cmd.Process.Pid)), err
	})
	add("fail", func(context.Context, string) (*mcp.CallToolResult, error) { return nil, errors.New("it cannot") })
	add("exit", func(context.Context, string) (*mcp.CallToolResult, error) { os.Exit(3); return nil, nil })
	add("picture", func(context.Context, string) (*mcp.CallToolResult, error) {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.ImageContent{Data: []byte{1, 2, 3}, MIMEType: "image/png"}}}, nil
	})
	add("wait", func(ctx context.Context, pipe string) (*mcp.CallToolResult, error) {
		f, err := os.OpenFile(pipe, os.O_WRONLY, 0)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		fmt.Fprintln(f, "started")
		<-ctx.Done()
		_, err = fmt.Fprintln(f, "cancelled")
		return nil, err
	})
	if err := server.Run(context.Background(), &mcp.StdioTransport{}); err != nil {
		return 1
	}
	return 0
}

// serveDeaf is a tool server that reads nothing more once it has told its tools, or
// after the first piece of what is long.
func serveDeaf() int {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var m struct {
			ID     json.RawMessage
			Method string
		}
		if json.Unmarshal(lines.Bytes(), &m) != nil {
			return 1
		}
		switch m.Method {
		case "initialize":
			fmt.Printf(`{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"deaf","version":"1"}}}`+"\n", m.ID)
		case "tools/list":
			fmt.Printf(`{"jsonrpc":"2.0","id":%s,"result":{"tools":[{"name":"echo","inputSchema":{"type":"object"}}]}}`+"\n", m.ID)
			hang()
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		hang()
	}
	return 0
}

// hang waits for nothing that comes. With select alone the Go runtime would see that
// and end the process.
func hang() {
	signalled := make(chan os.Signal, 1)
	signal.Notify(signalled, unix.SIGUSR2)
	<-signalled
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// output is a log.
type output struct {
	mu   sync.Mutex
	data bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.data.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.data.String()
}

func newBox(t *testing.T, servers ...engine.ToolServer) (*Box, *output) {
	t.Helper()
	out := new(output)
	b := New(engine.Config{
		Input:   protocol.Input{Timezone: "UTC"},
		WorkDir: t.TempDir(), Home: t.TempDir(), Children: new(reap.Children), Tools: servers, Log: log.New(out, "", 0),
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	b.Start(ctx)
	t.Cleanup(b.Close)
	return b, out
}

// run calls one tool. A failed call's result begins with "! ".
func (b *Box) run(t *testing.T, name string, input any) string {
	t.Helper()
	text, ok := input.(string)
	if !ok {
		data, err := json.Marshal(input)
		check(t, err)
		text = string(data)
	}
	r := b.Run(t.Context(), []llm.Call{{ID: "1", Name: name, Input: text}})[0]
	if r.Failed {
		return "! " + r.Text
	}
	return r.Text
}

func wants(t *testing.T, got, want string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

type in map[string]any

func TestBash(t *testing.T) {
	t.Setenv("SECRET", "secret")
	b, _ := newBox(t)
	for _, tt := range []struct {
		command, want string
	}{
		{"echo hi; echo oops >&2", "hi\noops"},
		{"true", "(exit code 0, no output)"},
		{"echo a; exit 3", "! a\nexit code 3"},
		{`echo "$SECRET-$TZ-$HOME-$PWD"`, "-UTC-" + b.config.Home + "-" + b.config.WorkDir},
		{"head -c 1000 /dev/zero", "(binary data of about 1000 bytes, not shown: write it to a file, or encode it)"},
		{"kill -9 $$", "! exit code 137: it was killed, perhaps because the container's memory was used up"},
		{" ", "! command is empty"},
	} {
		wants(t, b.run(t, "bash", in{"command": tt.command}), tt.want)
	}
	wants(t, b.run(t, "bash", in{"command": "echo a; sleep 100", "timeout": "1"}), "! a\nended after 1s: give it more time, or run it in the background")
}

// 100 MB of output cost neither memory nor much time.
func TestMuchOutput(t *testing.T) {
	b, _ := newBox(t)
	got := b.run(t, "bash", in{"command": "echo first; yes 0123456789abcdef | head -c 100000000; echo last"})
	if !strings.HasPrefix(got, "first\n") || !strings.HasSuffix(got, "last") || len(got) > MaxResult+100 {
		t.Errorf("%d bytes: %.100s … %s", len(got), got, got[len(got)-100:])
	}
	var cut int
	if _, err := fmt.Sscanf(got[strings.Index(got, "… ("):], "… (%d bytes cut here)", &cut); err != nil || cut+len(got) < 100_000_000 || cut > 100_000_011 {
		t.Errorf("cut %d, %v", cut, err)
	}
}

// A daemon that a command starts ends with it, or lives on without holding it up.
func TestDaemons(t *testing.T) {
	b, _ := newBox(t)
	began := time.Now()
	b.run(t, "bash", in{"command": "sleep 1000 & echo $! > pid"})
	setsid := b.run(t, "bash", in{"command": "setsid sleep 1000 & echo $!"})
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("took %v", took)
	}
	data, err := os.ReadFile(filepath.Join(b.config.WorkDir, "pid"))
	check(t, err)
	var pid, lives int
	_, err = fmt.Sscan(string(data), &pid)
	check(t, err)
	if err := unix.Kill(pid, 0); err == nil { // an orphan of a killed group may be a zombie of somebody else's
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && !strings.Contains(string(stat), ") Z ") {
			t.Errorf("the daemon lives: %s", stat)
		}
	}
	if _, err := fmt.Sscan(setsid, &lives); err == nil {
		_ = unix.Kill(lives, unix.SIGKILL)
	}
}

func TestFiles(t *testing.T) {
	b, _ := newBox(t)
	dir := b.config.WorkDir
	check(t, unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "binary"), []byte("a\x00b"), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "wide"), []byte(strings.Repeat("w", 5000)+"\nend\n"), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "windows"), []byte("a\r\nb\r\n"), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600))
	check(t, os.Symlink("/proc/self/environ", filepath.Join(dir, "link")))
	var long strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&long, "line %d\n", i+1)
	}
	check(t, os.WriteFile(filepath.Join(dir, "long"), []byte(long.String()), 0o600))
	for _, tt := range []struct {
		tool  string
		input any
		want  string
	}{
		{"write", in{"path": "d/f.txt", "content": "one\ntwo\ntwo\n"}, "wrote 12 bytes to " + dir + "/d/f.txt"},
		{"read", in{"path": "d/f.txt"}, "one\ntwo\ntwo\n"},
		{"read", in{"path": dir + "/d/f.txt", "offset": 2, "limit": "1"}, "two\n… (there is more: go on with offset 3)"},
		{"read", in{"path": "d/f.txt", "offset": 9}, "! the file has only 3 lines"},
		{"read", in{"path": "d"}, "f.txt\n"},
		{"read", in{"path": "windows"}, "a\nb\n"},
		{"read", in{"path": "empty"}, "(an empty file)"},
		{"read", in{"path": "binary"}, "! a binary file of 3 bytes"},
		{"read", in{"path": "pipe"}, "! " + dir + "/pipe is no regular file"},
		{"read", in{"path": "nowhere"}, "! open " + dir + "/nowhere: no such file or directory"},
		{"read", in{"path": "/proc/self/environ"}, "! this tool reads no files of the kernel: use bash"},
		{"read", in{"path": "/proc/self/mem"}, "! this tool reads no files of the kernel: use bash"},
		{"read", in{"path": "/sys/kernel/notes"}, "! this tool reads no files of the kernel: use bash"},
		{"read", in{"path": "link"}, "! this tool reads no files of the kernel: use bash"},
		{"read", in{"path": "/dev/zero"}, "! /dev/zero is no regular file"},
		{"read", in{}, "! path is empty"},
		{"read", "[1]", "! the input is not a JSON object; perhaps it was cut off: write less at once"},
		{"read", `{"path":`, "! the input is not a JSON object; perhaps it was cut off: write less at once"},
		{"read", in{"path": 5}, "! path must not be of type number"},
		{"read", in{"path": "x", "limit": "many"}, `! the input cannot be read: "many" is not a number from 0 to 1000000000`},
		{"write", in{"path": "/proc/self/oom_score_adj", "content": "0"}, "! this tool reads no files of the kernel: use bash"},
		{"write", in{"path": "pipe", "content": "x"}, "! open " + dir + "/pipe: no such device or address"},
		{"write", in{"path": "x"}, "! content is missing"},
		{"edit", in{"path": "d/f.txt", "old": "two", "new": "2"}, "! old is in the file 2 times: take more of what stands around it, or set all"},
		{"edit", in{"path": "d/f.txt", "old": "two", "new": "2", "all": "true"}, "replaced 2 in " + dir + "/d/f.txt"},
		{"edit", in{"path": "d/f.txt", "old": "one\n", "new": ""}, "replaced 1 in " + dir + "/d/f.txt"},
		{"edit", in{"path": "d/f.txt", "old": "one", "new": "x"}, "! old is not in the file: read it again, and mind blanks and line ends"},
		{"edit", in{"path": "d/f.txt", "old": "", "new": "x"}, "! old must not be empty, nor the same as new"},
		{"read", in{"path": "d/f.txt"}, "2\n2\n"},
		{"write", in{"path": "d/f.txt", "content": ""}, "wrote 0 bytes to " + dir + "/d/f.txt"},
		{"read", in{"path": "d/f.txt"}, "(an empty file)"},
		{"nothing", in{}, `! there is no tool "nothing"`},
	} {
		if got := b.run(t, tt.tool, tt.input); got != tt.want {
			t.Errorf("%s %v:\n got %q\nwant %q", tt.tool, tt.input, got, tt.want)
		}
	}
	if got := b.run(t, "read", in{"path": "long"}); !strings.HasSuffix(got, "line 2000\n… (there is more: go on with offset 2001)") {
		t.Errorf("got … %s", got[max(0, len(got)-100):])
	}
	if got := b.run(t, "read", in{"path": "wide"}); !strings.HasSuffix(got, "… (2952 more bytes in this line)\nend\n") {
		t.Errorf("got … %s", got[max(0, len(got)-100):])
	}
}

// Links and modes of a file that is written stay.
func TestWriteKeepsTheFile(t *testing.T) {
	b, _ := newBox(t)
	script, link := filepath.Join(b.config.WorkDir, "script"), filepath.Join(b.config.WorkDir, "link")
	check(t, os.WriteFile(script, []byte("#!/bin/sh\n"), 0o755))
	check(t, os.Symlink("script", link))
	b.run(t, "write", in{"path": "link", "content": "#!/bin/sh\necho it ran"})
	wants(t, b.run(t, "bash", in{"command": "./script; readlink link"}), "it ran\nscript")
}

func TestFind(t *testing.T) {
	b, _ := newBox(t)
	dir := b.config.WorkDir
	old := time.Now().Add(-time.Hour)
	for i, name := range []string{"a.go", "b/c.go", "b/d/e.go", "b/f.txt", ".git/x.go", "bin"} {
		path := filepath.Join(dir, name)
		check(t, os.MkdirAll(filepath.Dir(path), 0o755))
		content := fmt.Sprintf("package x\nfunc Number%d() {}\n", i)
		if name == "bin" {
			content = "\x00Number"
		}
		check(t, os.WriteFile(path, []byte(content), 0o600))
		check(t, os.Chtimes(path, old, old.Add(time.Duration(i)*time.Minute)))
	}
	check(t, unix.Mkfifo(filepath.Join(dir, "pipe.go"), 0o600))
	check(t, os.Symlink("a.go", filepath.Join(dir, "link.go")))
	for _, tt := range []struct {
		tool  string
		input in
		want  string
	}{
		{"glob", in{"pattern": "**/*.go"}, dir + "/b/d/e.go\n" + dir + "/b/c.go\n" + dir + "/a.go\n"},
		{"glob", in{"pattern": "*.go"}, dir + "/a.go\n"},
		{"glob", in{"pattern": dir + "/b/*"}, dir + "/b/f.txt\n" + dir + "/b/c.go\n"},
		{"glob", in{"pattern": "*.{txt,md}", "path": "b"}, dir + "/b/f.txt\n"},
		{"glob", in{"pattern": "*.rs"}, "nothing found"},
		{"glob", in{"pattern": "[a"}, `! pattern "[a" is none: use *, ?, **, [a-z] and {a,b}`},
		{"glob", in{"pattern": "*", "path": "/proc"}, "! this tool reads no files of the kernel: use bash"},
		{"grep", in{"pattern": "Number[12]"}, dir + "/b/c.go:2: func Number1() {}\n" + dir + "/b/d/e.go:2: func Number2() {}\n"},
		{"grep", in{"pattern": "NUMBER0", "ignore_case": true}, dir + "/a.go:2: func Number0() {}\n"},
		{"grep", in{"pattern": "Number", "glob": "*.txt"}, dir + "/b/f.txt:2: func Number3() {}\n"},
		{"grep", in{"pattern": "Number", "path": "b/c.go"}, dir + "/b/c.go:2: func Number1() {}\n"},
		{"grep", in{"pattern": "nowhere"}, "nothing found"},
		{"grep", in{"pattern": "("}, "! pattern \"(\" is no regular expression: error parsing regexp: missing closing ): `(`"},
		{"grep", in{"pattern": "x", "path": "/proc/self"}, "! this tool reads no files of the kernel: use bash"},
		{"grep", in{"pattern": "x", "path": "none"}, "! open " + dir + "/none: no such file or directory"},
	} {
		if got := b.run(t, tt.tool, tt.input); got != tt.want {
			t.Errorf("%s %v:\n got %q\nwant %q", tt.tool, tt.input, got, tt.want)
		}
	}
	check(t, os.WriteFile(filepath.Join(dir, "many"), bytes.Repeat([]byte("hit\n"), 1000), 0o600))
	if got := b.run(t, "grep", in{"pattern": "hit"}); strings.Count(got, "hit\n") != maxFound || !strings.HasSuffix(got, "look for something narrower)") {
		t.Errorf("got %d hits, … %s", strings.Count(got, "hit\n"), got[max(0, len(got)-100):])
	}
}

const webPage = `<!DOCTYPE html><html><head><title>A page</title><style>p { color: red }</style><script>alert("no")</script></head>
<body><nav><a href="/home">Home</a></nav><h1>Top  of
it</h1><p>Some <b>bold</b> words &amp; a <a href="sub?x=1">link</a>.</p><ul><li>one<li>two</ul>
<table><tr><td>a</td><td>b</td></tr></table><pre>x
  y</pre><noscript>no</noscript><svg><text>no</text></svg><p>end<br>here <a href="#top">up</a><a href="javascript:x()">js</a></body></html>`

func TestFetch(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/page":
			fmt.Fprint(w, webPage)
		case "/there":
			http.Redirect(w, r, "/text", http.StatusFound)
		case "/text":
			w.Header().Set("Content-Type", "text/plain")
			fmt.Fprint(w, "plain")
		case "/picture":
			w.Header().Set("Content-Type", "image/png")
			fmt.Fprint(w, "\x89PNG")
		case "/large":
			w.Header().Set("Content-Type", "text/plain")
			_, _ = w.Write(bytes.Repeat([]byte("0123456789"), maxPage/5))
		case "/bomb":
			w.Header().Set("Content-Type", "text/plain")
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			for range 100 {
				_, _ = z.Write(make([]byte, 1<<20))
			}
		case "/gone":
			http.Error(w, "nothing here", http.StatusNotFound)
		case "/cut":
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, "half")
		default:
			panic(http.ErrAbortHandler)
		}
	}))
	defer server.Close()
	b, _ := newBox(t)
	for _, tt := range []struct{ path, want string }{
		{"/page", server.URL + "/page · 200 OK · text/html\n\nA page\nHome (" + server.URL + "/home)\n\n# Top of it\nSome bold words & a link (" + server.URL + "/sub?x=1).\n- one\n- two\na | b\nx\n  y\nend\nhere upjs"},
		{"/there", server.URL + "/text · 200 OK · text/plain\n\nplain"},
		{"/picture", server.URL + "/picture · 200 OK · image/png\n\n(4 bytes, not shown: with bash you can get it into a file)"},
		{"/gone", "! " + server.URL + "/gone · 404 Not Found · text/plain\n\nnothing here\n\nstatus 404"},
		{"/cut", "! " + server.URL + "/cut · 200 OK · text/plain\n\nhalf\nit broke off: unexpected EOF"},
	} {
		wants(t, b.run(t, "fetch", in{"url": server.URL + tt.path}), tt.want)
	}
	if got := b.run(t, "fetch", in{"url": server.URL + "/page", "raw": true}); !strings.Contains(got, "<h1>") {
		t.Errorf("got %s", got)
	}
	for _, path := range []string{"/large", "/bomb"} {
		if got := b.run(t, "fetch", in{"url": server.URL + path}); len(got) > MaxResult || !strings.Contains(got, "only the first") {
			t.Errorf("%s: %d bytes, … %s", path, len(got), got[max(0, len(got)-100):])
		}
	}
	for _, bad := range []string{"", "file:///etc/passwd", "ftp://x", "http://", "gopher"} {
		if got := b.run(t, "fetch", in{"url": bad}); !strings.Contains(got, "is no address") {
			t.Errorf("%s: %s", bad, got)
		}
	}
	if got := b.run(t, "fetch", in{"url": server.URL + "/other"}); !strings.Contains(got, "cannot be reached") {
		t.Errorf("got %s", got)
	}
}

// Everything goes out by the gateway, the container's own addresses too.
func TestFetchByTheGateway(t *testing.T) {
	var asked []string
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.RequestURI)
		if r.Method == http.MethodConnect {
			http.Error(w, "", http.StatusForbidden)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"error":{"type":"berth_egress","message":"berth's gateway: example.org is not on this group's list; the operator can add it"}}`)
	}))
	defer gateway.Close()
	b := New(engine.Config{Gateway: strings.TrimPrefix(gateway.URL, "http://"), WorkDir: t.TempDir(), Children: new(reap.Children), Log: log.New(t.Output(), "", 0)})
	defer b.Close()
	if got := b.run(t, "fetch", in{"url": "http://example.org/x"}); !strings.HasPrefix(got, "! ") || !strings.Contains(got, "the operator can add it") {
		t.Errorf("got %s", got)
	}
	if got := b.run(t, "fetch", in{"url": "https://example.org/x"}); !strings.Contains(got, "example.org cannot be reached: Forbidden") {
		t.Errorf("got %s", got)
	}
	b.run(t, "fetch", in{"url": "http://127.0.0.1:1/"})
	if diff := cmp.Diff([]string{"GET http://example.org/x", "CONNECT example.org:443", "GET http://127.0.0.1:1/"}, asked); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := b.run(t, "bash", in{"command": "echo $HTTPS_PROXY $ANTHROPIC_API_KEY"}); got != gateway.URL+" placeholder" {
		t.Errorf("got %s", got)
	}
}

func FuzzPageText(f *testing.F) {
	f.Add(webPage)
	f.Add("<a><a href=x><script><h7><svg></h1></a></pre><pre>")
	base := &url.URL{Scheme: "http", Host: "h"}
	f.Fuzz(func(t *testing.T, source string) {
		if got := pageText(source, base); len(got) > 60*len(source)+100 {
			t.Errorf("%d bytes of %d", len(got), len(source))
		}
	})
}

func program(name string, faults ...string) engine.ToolServer {
	return engine.ToolServer{
		Name: name, Command: append([]string{os.Args[0], "tool-server"}, faults...),
		Env: map[string]string{"WHO": name, "GORACE": "atexit_sleep_ms=0"},
	}
}

func TestServers(t *testing.T) {
	b, out := newBox(t, program("good one", "garbage"), program("flood", "flood"), engine.ToolServer{Name: "none"}, engine.ToolServer{Name: "gone", Command: []string{"/nowhere"}})
	var names []string
	for _, tool := range b.Tools()[7:] {
		names = append(names, tool.Name)
		if !json.Valid(tool.Schema) || !strings.Contains(string(tool.Schema), `"type":"object"`) {
			t.Errorf("%s: schema %s", tool.Name, tool.Schema)
		}
	}
	if diff := cmp.Diff([]string{"good_one_echo", "good_one_exit", "good_one_fail", "good_one_picture", "good_one_spawn", "good_one_wait"}, names); diff != "" {
		t.Errorf("tools (-want +got):\n%s", diff)
	}
	for _, want := range []string{"good one: a complaint", "tools of flood are not there: speak with it: ", "tools of none are not there", "tools of gone are not there"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in the log:\n%s", want, out)
		}
	}
	if strings.Contains(out.String(), "in time") { // it was stopped by its size
		t.Errorf("log:\n%s", out)
	}
	first := b.run(t, "good_one_echo", in{"text": "hi"})
	if !strings.HasPrefix(first, "good one hi ") {
		t.Errorf("got %s", first)
	}
	wants(t, b.run(t, "good_one_fail", in{"text": "x"}), "! it cannot\nthe tool failed")
	wants(t, b.run(t, "good_one_picture", in{"text": "x"}), "(an image of 3 bytes, not shown)")
	if got := b.run(t, "good_one_echo", in{"wrong": 1}); !strings.HasPrefix(got, "! ") {
		t.Errorf("got %s", got)
	}
	// One that died comes back.
	if got := b.run(t, "good_one_exit", in{"text": "x"}); !strings.HasPrefix(got, "! ") {
		t.Errorf("got %s", got)
	}
	<-b.servers[0].exited
	if again := b.run(t, "good_one_echo", in{"text": "hi"}); !strings.HasPrefix(again, "good one hi ") || again == first {
		t.Errorf("got %s, first %s", again, first)
	}
	spawned, err := strconv.Atoi(b.run(t, "good_one_spawn", in{"text": "x"}))
	check(t, err)
	fd, err := unix.PidfdOpen(spawned, 0)
	check(t, err)
	defer unix.Close(fd)
	cmd := b.servers[0].cmd
	b.Close()
	if err := cmd.Process.Signal(unix.Signal(0)); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("the server lives on: %v", err)
	}
	for err = unix.EINTR; err == unix.EINTR; {
		var n int
		if n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000); n == 0 && err == nil {
			t.Error("what the server started lives on")
		}
	}
}

// A server that does not answer holds the first turn up for a while and no longer.
func TestMuteServer(t *testing.T) {
	out := new(output)
	b := New(engine.Config{WorkDir: t.TempDir(), Children: new(reap.Children), Tools: []engine.ToolServer{program("mute", "mute"), program("good")}, Log: log.New(out, "", 0)})
	defer b.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	b.Start(ctx)
	if !strings.Contains(out.String(), "it did not answer in time") {
		t.Errorf("log: %s", out)
	}
	if got := b.run(t, "good_echo", in{"text": "hi"}); !strings.HasPrefix(got, "good hi ") {
		t.Errorf("got %s", got)
	}
}

// A server that does not read holds a call up until its time is over and no longer,
// also the next one.
func TestDeafServer(t *testing.T) {
	b, out := newBox(t, program("deaf", "deaf"))
	input, err := json.Marshal(in{"text": strings.Repeat("x", 1<<20)})
	check(t, err)
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		ended := make(chan error, 1)
		go func() {
			_, err := b.servers[0].call(ctx, "echo", input)
			ended <- err
		}()
		select {
		case err := <-ended:
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("the call goes on")
		}
		cancel()
	}
	if !strings.Contains(out.String(), "does not read") {
		t.Errorf("log: %s", out)
	}
}

// A second start, after the first one was stopped, starts what is missing alone.
func TestStartAgain(t *testing.T) {
	b, out := newBox(t, program("good"), program("mute", "mute"))
	first := b.run(t, "good_echo", in{"text": "hi"})
	n := len(b.Tools())
	b.config.Log.Print("again")
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	b.Start(ctx)
	if again := b.run(t, "good_echo", in{"text": "hi"}); again != first || len(b.Tools()) != n {
		t.Errorf("first %s and %d tools, then %s and %d", first, n, again, len(b.Tools()))
	}
	if strings.Contains(out.String(), "two tools") || strings.Count(out.String(), "tools of mute are not there") != 2 {
		t.Errorf("log: %s", out)
	}
}

// The end of a turn reaches a tool server.
func TestCancelServer(t *testing.T) {
	b, _ := newBox(t, program("s"))
	path := filepath.Join(b.config.WorkDir, "pipe")
	check(t, unix.Mkfifo(path, 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan []llm.Result)
	go func() { done <- b.Run(ctx, []llm.Call{{ID: "1", Name: "s_wait", Input: `{"text":"` + path + `"}`}}) }()
	f, err := os.Open(path) // waits for the server
	check(t, err)
	defer f.Close()
	news := bufio.NewScanner(f)
	if !news.Scan() || news.Text() != "started" {
		t.Fatalf("got %q", news.Text())
	}
	cancel()
	if r := (<-done)[0]; !r.Failed {
		t.Errorf("got %+v", r)
	}
	if !news.Scan() || news.Text() != "cancelled" {
		t.Errorf("the server was not told, but %q", news.Text())
	}
}

func TestParallel(t *testing.T) {
	b, _ := newBox(t)
	// Two that wait for each other.
	got := b.Run(t.Context(), []llm.Call{
		{ID: "a", Name: "bash", Input: `{"command":"mkfifo p; echo through > p; echo a"}`},
		{ID: "b", Name: "bash", Input: `{"command":"until [ -p p ]; do :; done; cat p"}`},
	})
	if diff := cmp.Diff([]llm.Result{{CallID: "a", Text: "a"}, {CallID: "b", Text: "through"}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestBoundOfParallelCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, _ := newBox(t)
		var running atomic.Int32
		release := make(chan struct{})
		b.tools = append(b.tools, tool{llm.Tool{Name: "wait"}, func(context.Context, json.RawMessage) (string, error) {
			running.Add(1)
			<-release
			return "ok", nil
		}}, tool{llm.Tool{Name: "panic"}, func(context.Context, json.RawMessage) (string, error) { panic("a fault") }})
		calls := []llm.Call{{ID: "p", Name: "panic"}}
		for i := range maxPerStep + 5 {
			calls = append(calls, llm.Call{ID: fmt.Sprint(i), Name: "wait"})
		}
		done := make(chan []llm.Result)
		go func() { done <- b.Run(t.Context(), calls) }()
		synctest.Wait()
		if n := running.Load(); n != maxAtOnce {
			t.Errorf("%d at once, want %d", n, maxAtOnce)
		}
		close(release)
		results := <-done
		if n := running.Load(); n != maxPerStep-1 {
			t.Errorf("%d calls were run", n)
		}
		for i, want := range map[int]string{0: "fault of its own", 1: "ok", len(results) - 1: "not run"} {
			if r := results[i]; r.CallID != calls[i].ID || !strings.Contains(r.Text, want) || r.Failed != (want != "ok") {
				t.Errorf("result %d: %+v", i, r)
			}
		}
	})
}

// A tool that does not stop is left behind.
func TestStubbornTool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, _ := newBox(t)
		release := make(chan struct{})
		defer close(release)
		b.tools = append(b.tools, tool{llm.Tool{Name: "hang"}, func(context.Context, json.RawMessage) (string, error) {
			<-release
			return "", nil
		}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began := time.Now()
		got := b.Run(ctx, []llm.Call{{ID: "1", Name: "hang"}, {ID: "2", Name: "nothing"}})
		if took := time.Since(began); took != time.Minute+stopGrace || !got[0].Failed || got[1].CallID != "2" {
			t.Errorf("took %v: %+v", took, got)
		}
	})
}

func TestBound(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"short", "short"},
		{strings.Repeat("a", 10) + strings.Repeat("b", 10), "aaaaa\n… (10 bytes cut here) …\nbbbbb"},
		{"ääääääääää", "ää\n… (12 bytes cut here) …\nää"},
		{"12345" + "… (100 bytes cut here) …" + "67890", "12345\n… (100 bytes cut here) …\n67890"},
	} {
		wants(t, Bound(tt.text, 10), tt.want)
	}
}
