package program

import (
	"fmt"
	"os"
	"time"

	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/forward"
	"berth/agent-runner/protocol"
)

// Times are the stages of a turn and how long each may take.
type Times struct {
	Session time.Duration // until a session is there
	First   time.Duration // until the first sign of life
	Silence time.Duration // between two
	Settle  time.Duration // until the final form after the end
}

// TimesOf reads the options that change the usual times.
func TimesOf(options map[string]string) (Times, error) {
	t := Times{Session: 15 * time.Second, First: 2 * time.Minute, Silence: 10 * time.Minute, Settle: 30 * time.Second}
	for name, d := range map[string]*time.Duration{
		engine.OptionSession: &t.Session, engine.OptionFirst: &t.First,
		engine.OptionSilence: &t.Silence, engine.OptionSettle: &t.Settle,
	} {
		text := options[name]
		if text == "" {
			continue
		}
		var err error
		if *d, err = time.ParseDuration(text); err != nil || *d <= 0 {
			return t, &engine.Error{
				Class: protocol.ClassInput,
				Text:  fmt.Sprintf("%s is %q: it must be a duration like 90s or 10m", name, text),
			}
		}
	}
	return t, nil
}

// Environ is the environment of an agent program, and of its tools, which get all
// of it: nothing of the runner's own, and no key. Its providers are at address,
// everything else is behind the run's gateway; address is empty if there is none.
func Environ(c engine.Config, address string) []string {
	env := []string{
		"PATH=" + orElse(os.Getenv("PATH"), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
		"HOME=" + c.Home,
		"LANG=" + orElse(os.Getenv("LANG"), "C.UTF-8"),
		"USER=agent",
		"TMPDIR=" + os.TempDir(),
	}
	if c.Timezone != "" {
		env = append(env, "TZ="+c.Timezone)
	}
	if c.Gateway != "" {
		env = append(env, forward.Environ(c.Gateway)...)
	}
	if address != "" {
		// Of a name that is there twice the last one holds.
		env = append(env, "ANTHROPIC_BASE_URL=http://"+address+"/anthropic", "OPENAI_BASE_URL=http://"+address+"/openai/v1", "GOOGLE_GEMINI_BASE_URL=http://"+address+"/gemini")
	}
	return env
}

func orElse(s, fallback string) string {
	if s == "" {
		return fallback
	}
	return s
}
