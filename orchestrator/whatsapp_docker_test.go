//go:build docker

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"berth/orchestrator/internal/web"
)

// TestWhatsAppDockerScripts plays the whole product over a double of WhatsApp: the
// real daemon, real containers, and phones that decrypt what reaches them.
func TestWhatsAppDockerScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/whatsapp_docker",
		Setup: func(env *testscript.Env) error {
			bin, err := programs()
			if err != nil {
				return err
			}
			root, clean, err := shortRoot()
			if err != nil {
				return err
			}
			env.Defer(clean)
			env.Setenv("BERTH_ROOT", root)
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("PATH", bin+string(os.PathListSeparator)+env.Getenv("PATH"))
			env.Setenv("GORACE", "atexit_sleep_ms=0")
			env.Values[doubleKey{}] = &doubleOf{}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"await":       await,
			"await-sent":  awaitSent,
			"await-state": awaitState,
			"containers":  containers,
			"double":      double,
			"kill9":       func(ts *testscript.TestScript, _ bool, _ []string) { kill9(ts) },
			"link":        link,
			"said":        said,
			"wa":          wa,
		},
	})
}

func clientOf(ts *testscript.TestScript) *web.Client {
	return web.NewClient(filepath.Join(ts.Getenv("BERTH_ROOT"), "store", "berth.sock"))
}

// await-state STATE waits until the link to WhatsApp has the state.
func awaitState(ts *testscript.TestScript, _ bool, args []string) {
	awaitStatus(ts, "WhatsApp is "+args[0], func(s web.Status) bool { return len(s.Channels) == 1 && s.Channels[0].State == args[0] })
}

// await-sent waits until the daemon knows that all its texts have arrived.
func awaitSent(ts *testscript.TestScript, _ bool, _ []string) {
	awaitStatus(ts, "all is sent", func(s web.Status) bool { return s.Outbox.Pending == 0 })
}

func awaitStatus(ts *testscript.TestScript, what string, is func(web.Status) bool) {
	var last web.Status
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		s, err := clientOf(ts).Status(context.Background())
		if err != nil {
			continue
		}
		if last = s; is(s) {
			return
		}
	}
	ts.Fatalf("it is not so that %s: %+v", what, last)
}

// said GROUP PATTERN COUNT waits until so many of the newest messages of a group's
// chat match, and fails if there are more.
func said(ts *testscript.TestScript, _ bool, args []string) {
	want := regexp.MustCompile(args[1])
	count, err := strconv.Atoi(args[2])
	ts.Check(err)
	ctx, cancel := context.WithTimeoutCause(context.Background(), 30*time.Second, errors.New("late"))
	defer cancel()
	found, shown := 0, false
	for e, err := range clientOf(ts).Chat(ctx, args[0], -100) {
		if err != nil {
			ts.Fatalf("%d messages of %s like %q: %v", found, args[0], args[1], err)
		}
		shown = shown || e.Message == nil // all that there was
		if e.Message != nil && want.MatchString(e.Message.Text) {
			found++
		}
		if shown && found >= count {
			break
		}
	}
	if found != count {
		ts.Fatalf("%d messages of %s like %q, want %d", found, args[0], args[1], count)
	}
}
