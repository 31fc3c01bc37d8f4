package loop

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/agent-runner/internal/prompt"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/protocol"
)

// TS-10, TS-13, TS-14: what a script decides before the agent is asked.
func TestTS13TS14ScriptDecides(t *testing.T) {
	for _, c := range []struct {
		what string
		v    verdict
		err  error
		want []string
	}{
		{"TS-13 it does not wake", verdict{why: "it said so"}, nil, []string{"ready", "ack b1", "state busy", "output null", "state idle"}},
		{"TS-13 it fails", verdict{}, errors.New("it ended with exit code 1"), []string{"ready", "ack b1", "state busy", "output null", "state idle"}},
		{"TS-14 it wakes with data", verdict{wake: true, data: `{"n":3}`}, nil, []string{"ready", "ack b1", "state busy",
			fmt.Sprintf("output %q", prompt.Scheduled+"Script output:\n{\"n\":3}\n\nInstructions:\nfirst"), "state idle"}},
		{"it wakes", verdict{wake: true}, nil, []string{"ready", "ack b1", "state busy", fmt.Sprintf("output %q", prompt.Scheduled+"first"), "state idle"}},
	} {
		inBubble(t, script(echo), func(r *run) {
			asked := 0
			r.loop.Input.IsScheduledTask, r.loop.Input.Script = true, "check"
			r.loop.judge = func(_ context.Context, text string) (verdict, error) {
				if asked++; text != "check" {
					t.Errorf("asked to run %q", text)
				}
				time.Sleep(time.Second)
				return c.v, c.err
			}
			r.start()
			r.said("ready")
			time.Sleep(time.Second)
			r.said(c.want[1:]...)
			r.put(1, "more", "m1") // the script is for the first turn alone
			r.said("ack m1", "state busy", `output "more"`, "state idle")
			if asked != 1 {
				t.Errorf("%s: asked %d times", c.what, asked)
			}
			r.closeRun()
		})
	}
}

// The host is told why nobody was woken.
func TestScriptNote(t *testing.T) {
	inBubble(t, script(echo), func(r *run) {
		r.loop.Input.Script = "check"
		r.loop.judge = func(context.Context, string) (verdict, error) {
			return verdict{}, errors.New("it ended with exit code 1")
		}
		r.start()
		synctest.Wait()
		if got := r.loop.turn; got != nil {
			t.Errorf("the turn goes on: %+v", got)
		}
		r.closeRun()
		if want := "the script did not wake the agent: it ended with exit code 1"; !strings.Contains(strings.Join(r.notes, "\n"), want) {
			t.Errorf("got %q, want %q", r.notes, want)
		}
	})
}

// Real scripts. Whatever is not a clear word wakes nobody.
func TestRunScript(t *testing.T) {
	for _, c := range []struct {
		script string
		want   verdict
		err    string
	}{
		{`echo noise; echo '{"wakeAgent":true,"data":{"a":[1, 2]}}'; echo; echo oops >&2`, verdict{wake: true, why: "it said so", data: `{"a":[1,2]}`}, ""},
		{`echo '{"wakeAgent":false}'`, verdict{why: "it said so"}, ""},
		{`echo '{"wakeAgent":true,"data":null}'`, verdict{wake: true, why: "it said so"}, ""},
		{`echo "{\"wakeAgent\":true,\"data\":\"$PWD $HOME $SECRET\"}"`, verdict{wake: true, why: "it said so", data: `"DIR /home/x "`}, ""},
		{`echo '{"wakeAgent":true}'; exit 3`, verdict{}, "exit code 3"},
		{`echo '{"wakeAgent":true}'; echo bye`, verdict{}, `its last line "bye" is not`},
		{`echo '{"wakeAgent":"true"}'`, verdict{}, "is not"},
		{`echo '{"wakeAgent":1}'`, verdict{}, "is not"},
		{`echo '{}'`, verdict{}, "is not"},
		{`echo '[true]'`, verdict{}, "is not"},
		{`true`, verdict{}, `its last line "" is not`},
		{`if`, verdict{}, "exit code"},
	} {
		t.Setenv("SECRET", "secret")
		dir := t.TempDir()
		c.want.data = strings.ReplaceAll(c.want.data, "DIR", dir)
		l := Loop{Children: new(reap.Children), WorkDir: dir, Home: "/home/x", Input: protocol.Input{Timezone: "UTC"}, Log: log.New(os.Stderr, "", 0)}
		got, err := l.runScript(t.Context(), c.script)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: got %+v, %v; want %+v, %q", c.script, got, err, c.want, c.err)
		}
	}
}

// What a script prints is whatever it likes.
func FuzzDecide(f *testing.F) {
	for _, seed := range []string{"", "\n\n", `{"wakeAgent":true}`, "x\n{\"wakeAgent\":false,\"data\":[1, {\"a\": \"</message>\"}]}\n", `{"wakeAgent":null}`, "{\"wakeAgent\":true,\"data\":\"\xff\"}", `{"wakeagent":true}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, output string) {
		v, err := decide(output)
		if err != nil && v != (verdict{}) {
			t.Errorf("%+v and %v", v, err)
		}
		if strings.ContainsAny(v.data, "\n\r") {
			t.Errorf("data of several lines: %q", v.data)
		}
	})
}
