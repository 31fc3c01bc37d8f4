package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/orchestrator/internal/watest"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/store/sqlstore"
	"go.mau.fi/whatsmeow/types/events"
	waLog "go.mau.fi/whatsmeow/util/log"
	_ "modernc.org/sqlite"
)

func TestMain(m *testing.M) {
	if os.Getenv("ECHO_URL") != "" {
		if err := echo(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// echo is a daemon that knows nothing of the double but an address and a key.
func echo() error {
	root, err := hex.DecodeString(os.Getenv("ECHO_ROOT"))
	if err != nil {
		return err
	}
	whatsmeow.WACertPubKey = [32]byte(root)
	to, err := url.Parse(os.Getenv("ECHO_URL"))
	if err != nil {
		return err
	}
	container, err := sqlstore.New(context.Background(), "sqlite", "file:"+os.Getenv("ECHO_STORE")+"?_pragma=foreign_keys(1)&_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_txlock=immediate", nil)
	if err != nil {
		return err
	}
	device, err := container.GetFirstDevice(context.Background())
	if err != nil {
		return err
	}
	log := waLog.Noop
	if os.Getenv("WATEST_LOG") != "" {
		log = waLog.Stdout("client", "DEBUG", false)
	}
	client := whatsmeow.NewClient(device, log)
	h := &http.Client{Transport: redirect{to}}
	client.SetPreLoginHTTPClient(h)
	client.SetWebsocketHTTPClient(h)
	client.SetMediaHTTPClient(h)
	client.AddEventHandler(func(event any) {
		switch e := event.(type) {
		case *events.QR:
			fmt.Println(e.Codes[0])
		case *events.Message:
			if text := watest.TextOf(e.Message); text != "" {
				go func() {
					if _, err := client.SendMessage(context.Background(), e.Info.Chat, &waE2E.Message{Conversation: new("echo " + text)}); err != nil {
						fmt.Fprintln(os.Stderr, err)
					}
				}()
			}
		}
	})
	if err := client.Connect(); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin) // until the test ends
	client.Disconnect()
	return err
}

type redirect struct{ to *url.URL }

func (r redirect) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	request.URL.Scheme, request.URL.Host = r.to.Scheme, r.to.Host
	return http.DefaultTransport.RoundTrip(request)
}

type double struct {
	t *testing.T
	watest.Hook
	Control string `json:"control"`
}

func (d double) do(verb string, c watest.Command) watest.Reply {
	d.t.Helper()
	reply, err := d.try(verb, c)
	if err != nil {
		d.t.Fatal(err)
	}
	if reply.Error != "" {
		d.t.Fatalf("%s: %s", verb, reply.Error)
	}
	return reply
}

func (d double) try(verb string, c watest.Command) (reply watest.Reply, err error) {
	body, err := json.Marshal(c)
	if err != nil {
		return reply, err
	}
	response, err := http.Post(d.Control+"/"+verb, "application/json", bytes.NewReader(body))
	if err != nil {
		return reply, err
	}
	defer func() { _ = response.Body.Close() }()
	return reply, json.NewDecoder(response.Body).Decode(&reply)
}

func start(t *testing.T) double {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	done := make(chan error, 1)
	var args []string
	if os.Getenv("WATEST_LOG") != "" {
		args = append(args, "-trace")
	}
	go func() { done <- run(ctx, args, w, os.Stderr) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	d := double{t: t}
	if err := json.NewDecoder(r).Decode(&d); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestOtherProcess(t *testing.T) {
	d := start(t)
	d.do("phone", watest.Command{Number: "15550001111"})
	d.do("peer", watest.Command{Number: "15550002222", Name: "Alice"})
	d.do("group", watest.Command{Name: "Family", Members: []string{"15550002222", "15550001111"}})

	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "ECHO_URL="+d.URL, "ECHO_ROOT="+d.Root, "ECHO_STORE="+filepath.Join(t.TempDir(), "wa.db"))
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	code := ""
	lines := bufio.NewScanner(stdout)
	for code == "" && lines.Scan() {
		if strings.HasPrefix(lines.Text(), "https://wa.me/") {
			code = lines.Text()
		}
	}
	go func() { _, _ = io.Copy(os.Stderr, stdout) }() // until it ends
	d.do("scan", watest.Command{Number: "15550001111", Text: code})
	d.do("online", watest.Command{Number: "15550001111"})
	begin := time.Now()
	d.do("send", watest.Command{Number: "15550002222", To: "Family", Text: "hello"})
	got := d.do("received", watest.Command{Number: "15550002222", Timeout: 20})
	if got.Messages[0].Text != "echo hello" {
		t.Errorf("got %+v", got)
	}
	t.Logf("echo in %v", time.Since(begin))
	d.do("disconnect", watest.Command{})
	d.do("send", watest.Command{Number: "15550002222", To: "15550001111", Text: "still there?"})
	if got := d.do("received", watest.Command{Number: "15550002222", Timeout: 20}); got.Messages[0].Text != "echo still there?" {
		t.Errorf("got %+v", got)
	}
}

func TestControl(t *testing.T) {
	d := start(t)
	response, err := http.Get(d.Control + "/")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	var reply watest.Reply
	if err := json.NewDecoder(response.Body).Decode(&reply); err != nil || !slices.Contains(reply.Verbs, "received") {
		t.Errorf("verbs %v, %v", reply.Verbs, err)
	}
	d.do("peer", watest.Command{Number: "1", Name: "Alice"})
	for verb, c := range map[string]watest.Command{
		"peer":     {Number: "1"},
		"send":     {Number: "1", To: "nowhere"},
		"scan":     {Number: "1", Text: "x"},
		"online":   {Number: "2"},
		"received": {Number: "1", Timeout: 1},
	} {
		if reply, err := d.try(verb, c); err != nil || reply.Error == "" {
			t.Errorf("%s: %+v, %v", verb, reply, err)
		}
	}
	for _, address := range []string{"0.0.0.0:0", "[::]:0"} {
		if err := run(t.Context(), []string{"-listen", address}, io.Discard, io.Discard); err == nil {
			t.Errorf("listened on %s", address)
		}
		if err := run(t.Context(), []string{"-control", address}, io.Discard, io.Discard); err == nil {
			t.Errorf("controlled on %s", address)
		}
	}
}
