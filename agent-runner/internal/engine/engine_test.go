package engine

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/agent-runner/protocol"
)

func TestRegistry(t *testing.T) {
	opened := ""
	open := func(name string) Open {
		return func(Config) (Engine, error) { opened = name; return nil, nil }
	}
	r := Registry{"builtin": open("builtin"), "other": open("other")}
	for name, want := range map[string]string{"": "builtin", "auto": "builtin", "other": "other", "builtin": "builtin"} {
		if _, err := r.Open(Config{Input: protocol.Input{Engine: name}}, "builtin"); err != nil || opened != want {
			t.Errorf("%q opens %q, %v; want %q", name, opened, err, want)
		}
	}
	_, err := r.Open(Config{Input: protocol.Input{Engine: "claude"}}, "builtin")
	failure, ok := errors.AsType[*Error](err)
	if !ok || failure.Class != protocol.ClassInput || failure.Text != `unknown engine "claude": this image has builtin, other` {
		t.Errorf("got %#v", err)
	}
}

func TestFailed(t *testing.T) {
	got := Failed(fmt.Errorf("ask the model: %w", &Error{Class: protocol.ClassRateLimit, Text: "slow down", RetryAfter: time.Second}))
	want := protocol.Frame{
		Type: protocol.TypeOutput, Status: protocol.StatusError,
		Error: "ask the model: slow down", ErrorClass: protocol.ClassRateLimit, RetryAfterMS: 1000,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
