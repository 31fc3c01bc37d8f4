package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"berth/orchestrator/internal/watest"
)

// ours is the number of the account that Berth is linked to in tests.
const ours = "15550001111"

// TestWhatsAppScripts plays the commands around an account as their user sees
// them, against a double of WhatsApp and without a daemon.
func TestWhatsAppScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/whatsapp",
		Setup: func(env *testscript.Env) error {
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("GORACE", "atexit_sleep_ms=0")
			env.Values[doubleKey{}] = &doubleOf{}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"misuse": misuse,
			"double": double,
			"wa":     wa,
			"link":   link,
		},
	})
}

// doubleKey is where a script's environment keeps the double.
type doubleKey struct{}

type doubleOf struct{ *watest.Server }

// double starts a server in WhatsApp's place, with our phone, and makes berth use
// it.
func double(ts *testscript.TestScript, _ bool, _ []string) {
	s, err := watest.Serve("127.0.0.1:0")
	ts.Check(err)
	ts.Defer(s.Close)
	ts.Value(doubleKey{}).(*doubleOf).Server = s
	ts.Setenv("CHANNELS", "console,whatsapp")
	ts.Setenv("BERTH_WHATSAPP_DOUBLE", s.Hook().URL+"#"+s.Hook().Root)
	_, err = order(s, "phone", map[string]any{"number": ours})
	ts.Check(err)
}

func serverOf(ts *testscript.TestScript) *watest.Server {
	return ts.Value(doubleKey{}).(*doubleOf).Server
}

// order gives the double an order.
func order(s *watest.Server, verb string, c map[string]any) (watest.Reply, error) {
	body, err := json.Marshal(c)
	if err != nil {
		return watest.Reply{}, err
	}
	w := httptest.NewRecorder()
	s.Control().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/"+verb, bytes.NewReader(body)))
	var reply watest.Reply
	if err := json.NewDecoder(w.Body).Decode(&reply); err != nil {
		return reply, err
	}
	if reply.Error != "" {
		return reply, fmt.Errorf("%s: %s", verb, reply.Error)
	}
	return reply, nil
}

// wa VERB [NAME=VALUE...] gives the double an order, puts its answer on stdout, and
// sets $JID and $ID to what it made. "file:" is for a value of several lines.
func wa(ts *testscript.TestScript, neg bool, args []string) {
	c := map[string]any{"number": ours}
	for _, arg := range args[1:] {
		name, value, _ := strings.Cut(arg, "=")
		if file, ok := strings.CutPrefix(value, "file:"); ok {
			value = strings.TrimSpace(ts.ReadFile(file))
		}
		switch {
		case slices.Contains([]string{"members", "mention"}, name):
			c[name] = strings.Split(value, ",")
		case slices.Contains([]string{"age", "timeout", "count", "code"}, name):
			n, err := strconv.Atoi(value)
			ts.Check(err)
			c[name] = n
		default:
			c[name] = value
		}
	}
	reply, err := order(serverOf(ts), args[0], c)
	if (err != nil) != neg {
		ts.Fatalf("wa %s: %v", strings.Join(args, " "), err)
	}
	for name, value := range map[string]string{"JID": reply.JID, "ID": reply.ID} {
		if value != "" {
			ts.Setenv(name, value)
		}
	}
	data, err := json.Marshal(reply)
	ts.Check(err)
	fmt.Fprintf(ts.Stdout(), "%s\n", data)
}

// link [ARG...] runs berth login whatsapp with these arguments and does on the
// phone what it says. "link" wants it to work, "! link" wants it to fail.
func link(ts *testscript.TestScript, neg bool, args []string) {
	cmd := exec.Command("berth", append([]string{"login", "whatsapp"}, args...)...)
	cmd.Dir = ts.MkAbs(".")
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "BERTH_ROOT", "CHANNELS", "BERTH_WHATSAPP_DOUBLE", "GORACE"} {
		cmd.Env = append(cmd.Env, name+"="+ts.Getenv(name))
	}
	cmd.Stderr = ts.Stderr()
	stdin, err := cmd.StdinPipe()
	ts.Check(err)
	stdout, err := cmd.StdoutPipe()
	ts.Check(err)
	ts.Check(cmd.Start())
	late := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	picture := ""
	if i := slices.Index(args, "--png"); i >= 0 {
		picture = ts.MkAbs(args[i+1])
	}
	s := serverOf(ts)
	for lines := bufio.NewScanner(io.TeeReader(stdout, ts.Stdout())); lines.Scan(); {
		line := strings.TrimSpace(lines.Text())
		var step struct{ QR, Code string }
		switch code, text := strings.CutPrefix(line, "code: "); {
		case text:
			step.QR = code
		case strings.HasPrefix(line, "{"):
			ts.Check(json.Unmarshal([]byte(line), &step))
		case len(line) == 9 && line[4] == '-':
			step.Code = line
		case strings.HasPrefix(line, "Paste what it prints"):
			_, err = io.WriteString(stdin, passkeyAnswer+"\n")
			ts.Check(err)
		case strings.HasSuffix(line, "Is it this one?"):
			_, err = io.WriteString(stdin, "yes\n")
			ts.Check(err)
		}
		if step.QR != "" {
			if picture != "" {
				isPicture(ts, picture)
			}
			_, err = order(s, "scan", map[string]any{"number": ours, "text": step.QR})
		} else if step.Code != "" {
			_, err = order(s, "enter", map[string]any{"number": ours, "text": strings.ReplaceAll(step.Code, "-", "")})
		}
		if err != nil && !neg {
			ts.Fatalf("the phone: %v", err)
		}
	}
	if err := cmd.Wait(); (err != nil) != neg {
		ts.Fatalf("berth login whatsapp %s: %v", strings.Join(args, " "), err)
	}
}

// passkeyAnswer is what a browser might print; the double looks at nothing in it.
const passkeyAnswer = `{"id":"eA","rawId":"eA","type":"public-key","response":{"clientDataJSON":"eA","authenticatorData":"eA","signature":"eA"}}`

func isPicture(ts *testscript.TestScript, path string) {
	info, err := os.Stat(path)
	ts.Check(err)
	if info.Mode().Perm() != 0o600 {
		ts.Fatalf("%s has the mode %v", path, info.Mode())
	}
	if !strings.HasPrefix(ts.ReadFile(path), "\x89PNG") {
		ts.Fatalf("%s is no picture", path)
	}
}
