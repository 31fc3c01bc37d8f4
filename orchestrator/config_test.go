package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/joho/godotenv"
	"go.uber.org/zap/zapcore"

	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/whatsapp"
)

// load loads the settings of a fresh root with a .env of the given text.
func load(t *testing.T, file string, environ ...string) (Config, error) {
	t.Helper()
	root := t.TempDir()
	if file != "" {
		if err := os.WriteFile(filepath.Join(root, ".env"), []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return LoadConfig(map[string]string{"BERTH_ROOT": root}, append(environ, "HOME=/home/ann"))
}

func TestConfigDefaults(t *testing.T) {
	c, err := load(t, "")
	if err != nil {
		t.Fatal(err)
	}
	c.Root, c.values = "", nil
	got := fmt.Sprintf("%+v", c)
	want := Config{
		Home: "/home/ann", Channels: []string{"console"}, AssistantName: "Andy", MaxBacklogAge: 12 * time.Hour, MaxMedia: 64 << 20,
		ContainerTimeout: 30 * time.Minute, IdleTimeout: 30 * time.Minute, TaskTimeout: 30 * time.Minute, MaxOutput: 10 << 20, MaxContainers: 5,
		ContainerMemory: 1 << 30, ContainerCPUs: 1, CPUSet: "auto", ContainerPids: 256, ContainerNetwork: "none",
		MaxMemory: 4 << 30, MaxCPUs: 4, MaxPids: 1024,
		Sessions:       turn.SessionLimits{Age: 720 * time.Hour, Turns: 1000},
		MountAllowlist: "/home/ann/.config/berth/mount-allowlist.json",
		Timezone:       c.Timezone, TimezoneName: c.TimezoneName, LogLevel: zapcore.InfoLevel,
		Engine: "auto", Credentials: "gateway", FollowUp: "queue",
		FirstTimeout: 2 * time.Minute, SilenceTimeout: 10 * time.Minute, SettleTimeout: 30 * time.Second,
	}
	if want := fmt.Sprintf("%+v", want); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if c.Timezone == nil || c.TimezoneName == "" {
		t.Errorf("got no time zone")
	}
}

func TestConfigOrder(t *testing.T) {
	file := "ASSISTANT_NAME=File\nexport CONTAINER_PIDS='99' # few\nOTHER=x\nIDLE_TIMEOUT=\n"
	c, err := load(t, file, "ASSISTANT_NAME=Env")
	if err != nil {
		t.Fatal(err)
	}
	if c.AssistantName != "Env" || c.ContainerPids != 99 || c.IdleTimeout != 30*time.Minute {
		t.Errorf("got %+v, want the environment before the file, and an empty value as none", c)
	}
	sources := map[string]string{}
	for _, v := range c.Values() {
		sources[v.Name] = v.Source
	}
	for name, want := range map[string]string{"BERTH_ROOT": "flag", "ASSISTANT_NAME": "environment", "CONTAINER_PIDS": ".env", "TZ": "default"} {
		if sources[name] != want {
			t.Errorf("%s: got source %q, want %q", name, sources[name], want)
		}
	}
	if os.Getenv("OTHER") == "x" || os.Getenv("CONTAINER_PIDS") == "99" {
		t.Error("the file was exported")
	}
}

var testKey = strings.Repeat("0", 63) + "1"

func TestConfigValues(t *testing.T) {
	tests := []struct {
		setting string
		got     func(Config) any
		want    any // nil: refused
	}{
		{"ASSISTANT_NAME=小爪", func(c Config) any { return c.AssistantName }, "小爪"},
		{"ASSISTANT_NAME=@Andy", nil, nil},
		{"ASSISTANT_NAME=a\nb", nil, nil},
		{"ASSISTANT_NAME= ", nil, nil},
		{"ASSISTANT_HAS_OWN_NUMBER=true", func(c Config) any { return c.AssistantHasOwnNumber }, true},
		{"ASSISTANT_HAS_OWN_NUMBER=maybe", nil, nil},
		{"CHANNELS=console, console", func(c Config) any { return fmt.Sprint(c.Channels) }, "[console]"},
		{"CHANNELS=console,whatsapp", func(c Config) any { return c.Serves("whatsapp") }, true},
		{"CHANNELS=telegram", nil, nil},
		{"MAX_BACKLOG_AGE=30m", func(c Config) any { return c.MaxBacklogAge }, 30 * time.Minute},
		{"WHATSAPP_READ_RECEIPTS=true", func(c Config) any { return c.ReadReceipts }, true},
		{"WHATSAPP_MAX_MEDIA=1m", func(c Config) any { return c.MaxMedia }, int64(1 << 20)},
		{"BERTH_WHATSAPP_DOUBLE=http://127.0.0.1:8080#" + testKey, func(c Config) any { return *c.Double }, whatsapp.Double{URL: "http://127.0.0.1:8080", Root: [32]byte{31: 1}}},
		{"BERTH_WHATSAPP_DOUBLE=http://[::1]:8080#" + testKey, func(c Config) any { return c.Double.URL }, "http://[::1]:8080"},
		{"BERTH_WHATSAPP_DOUBLE=http://192.0.2.1:8080#" + testKey, nil, nil},
		{"BERTH_WHATSAPP_DOUBLE=http://localhost:8080#" + testKey, nil, nil},
		{"BERTH_WHATSAPP_DOUBLE=https://127.0.0.1:8080#" + testKey, nil, nil},
		{"BERTH_WHATSAPP_DOUBLE=http://127.0.0.1:8080#01", nil, nil},
		{"CHANNELS=console,", nil, nil},
		{"CONTAINER_IMAGE=ghcr.io/a/b:1", func(c Config) any { return c.Image }, "ghcr.io/a/b:1"},
		{"CONTAINER_IMAGE=--privileged", nil, nil},
		{"CONTAINER_TIMEOUT=1800000", func(c Config) any { return c.ContainerTimeout }, 30 * time.Minute},
		{"CONTAINER_TIMEOUT=90s", func(c Config) any { return c.ContainerTimeout }, 90 * time.Second},
		{"CONTAINER_TIMEOUT=0", nil, nil},
		{"CONTAINER_TIMEOUT=-5", nil, nil},
		{"CONTAINER_TIMEOUT=99999999999999999", nil, nil},
		{"IDLE_TIMEOUT=abc", nil, nil},
		{"SESSION_MAX_AGE=24h", func(c Config) any { return c.Sessions.Age }, 24 * time.Hour},
		{"SESSION_MAX_AGE=0", func(c Config) any { return c.Sessions.Age }, time.Duration(0)},
		{"SESSION_MAX_AGE=-1h", nil, nil},
		{"SESSION_MAX_AGE=never", nil, nil},
		{"SESSION_MAX_TURNS=5", func(c Config) any { return c.Sessions.Turns }, 5},
		{"SESSION_MAX_TURNS=0", func(c Config) any { return c.Sessions.Turns }, 0},
		{"SESSION_MAX_TURNS=-1", nil, nil},
		{"SESSION_MAX_TURNS=2.5", nil, nil},
		{"CONTAINER_MAX_OUTPUT_SIZE=2048", func(c Config) any { return c.MaxOutput }, int64(2048)},
		{"CONTAINER_MAX_OUTPUT_SIZE=0", nil, nil},
		{"MAX_CONCURRENT_CONTAINERS=1", func(c Config) any { return c.MaxContainers }, 1},
		{"MAX_CONCURRENT_CONTAINERS=0", nil, nil},
		{"MAX_CONCURRENT_CONTAINERS=-1", nil, nil},
		{"MAX_CONCURRENT_CONTAINERS=5x", nil, nil},
		{"CONTAINER_MEMORY=512m", func(c Config) any { return c.ContainerMemory }, int64(512 << 20)},
		{"CONTAINER_MEMORY=1g", func(c Config) any { return c.ContainerMemory }, int64(1 << 30)},
		{"CONTAINER_MEMORY=1.5GiB", func(c Config) any { return c.ContainerMemory }, int64(3 << 29)},
		{"CONTAINER_MEMORY=67108864", func(c Config) any { return c.ContainerMemory }, int64(64 << 20)},
		{"CONTAINER_MEMORY=1m", nil, nil},
		{"CONTAINER_MEMORY=-1g", nil, nil},
		{"CONTAINER_MEMORY=1x", nil, nil},
		{"CONTAINER_MEMORY=999999999999999999t", nil, nil},
		{"CONTAINER_CPUS=0.5", func(c Config) any { return c.ContainerCPUs }, 0.5},
		{"CONTAINER_CPUS=NaN", nil, nil},
		{"CONTAINER_CPUS=0", nil, nil},
		{"", func(c Config) any { return c.CPUSet }, "auto"},
		{"CONTAINER_CPUSET=all", func(c Config) any { return c.CPUSet }, ""},
		{"CONTAINER_CPUSET=0,2-3", func(c Config) any { return c.CPUSet }, "0,2-3"},
		{"CONTAINER_CPUSET=2-", nil, nil},
		{"CONTAINER_PIDS=1", nil, nil},
		{"CONTAINER_MAX_MEMORY=2g", func(c Config) any { return c.MaxMemory }, int64(2 << 30)},
		{"CONTAINER_MAX_MEMORY=512m", nil, nil}, // less than every group has
		{"CONTAINER_MEMORY=8g", func(c Config) any { return c.MaxMemory }, int64(8 << 30)},
		{"CONTAINER_MAX_CPUS=2", func(c Config) any { return c.MaxCPUs }, 2.0},
		{"CONTAINER_MAX_CPUS=0.5", nil, nil},
		{"CONTAINER_MAX_PIDS=300", func(c Config) any { return c.MaxPids }, int64(300)},
		{"CONTAINER_MAX_PIDS=255", nil, nil},
		{"CONTAINER_NETWORK=bridge", func(c Config) any { return c.ContainerNetwork }, "bridge"},
		{"CONTAINER_NETWORK=host", nil, nil},
		{"CONTAINER_RUNTIME=runsc", func(c Config) any { return c.Runtime }, "runsc"},
		{"CONTAINER_RUNTIME=run sc", nil, nil},
		{"DOCKER_HOST=unix:///run/x.sock", func(c Config) any { return c.DockerHost }, "unix:///run/x.sock"},
		{"DOCKER_HOST=tcp://10.0.0.1:2376", func(c Config) any { return c.DockerHost }, "tcp://10.0.0.1:2376"},
		{"DOCKER_HOST=/run/x.sock", nil, nil},
		{"DOCKER_CERT_PATH=~/certs", func(c Config) any { return c.DockerCertPath }, "/home/ann/certs"},
		{"DOCKER_CERT_PATH=certs", nil, nil},
		{"BERTH_MOUNT_ALLOWLIST=~/x.json", func(c Config) any { return c.MountAllowlist }, "/home/ann/x.json"},
		{"BERTH_MOUNT_ALLOWLIST=x.json", nil, nil},
		{"WHITELIST_PAIR_TOKEN=eight888", func(c Config) any { return c.PairToken.Reveal() }, "eight888"},
		{"WHITELIST_PAIR_TOKEN=seven77", nil, nil},
		{"WHITELIST_PAIR_TOKEN=two words", nil, nil},
		{"TZ=Asia/Tokyo", func(c Config) any { return c.TimezoneName + c.Timezone.String() }, "Asia/TokyoAsia/Tokyo"},
		{"TZ=UTC", func(c Config) any { return c.Timezone.String() }, "UTC"},
		{"TZ=", nil, nil},
		{"TZ=Local", nil, nil},
		{"TZ=Mars/Olympus", nil, nil},
		{"TZ=../../etc/passwd", nil, nil},
		{"LOG_LEVEL=trace", func(c Config) any { return c.LogLevel }, zapcore.DebugLevel},
		{"LOG_LEVEL=WARN", func(c Config) any { return c.LogLevel }, zapcore.WarnLevel},
		{"LOG_LEVEL=silent", func(c Config) any { return c.LogLevel.Enabled(zapcore.FatalLevel) }, false},
		{"LOG_LEVEL=loud", nil, nil},
		{"AGENT_ENGINE=gpt", nil, nil},
		{"AGENT_ENGINE=gpt", nil, nil},
		{"AGENT_MODEL=org/model-1:free", func(c Config) any { return c.AgentModel }, "org/model-1:free"},
		{"AGENT_MODEL=a b", nil, nil},
		{"CREDENTIALS=container", nil, nil},
		{"CREDENTIALS=file", nil, nil},
		{"FOLLOW_UP=steer", nil, nil},
		{"FOLLOW_UP=now", nil, nil},
		{"ANTHROPIC_API_KEY=sk-1", func(c Config) any { return c.AnthropicAPIKey.Reveal() }, "sk-1"},
		{"CLAUDE_CODE_OAUTH_TOKEN=t", func(c Config) any { return c.ClaudeCodeOAuthToken.Reveal() }, "t"},
		{"OPENAI_API_KEY=k", func(c Config) any { return c.OpenAIAPIKey.Reveal() }, "k"},
		{"OPENAI_API_KEY=two words", nil, nil},
		{"OPENAI_BASE_URL=http://localhost:11434/v1", func(c Config) any { return c.OpenAIBaseURL }, "http://localhost:11434/v1"},
		{"OPENAI_BASE_URL=localhost", nil, nil},
	}
	for _, tt := range tests {
		t.Run(tt.setting, func(t *testing.T) {
			c, err := load(t, "", tt.setting)
			if tt.want == nil {
				name, value, _ := strings.Cut(tt.setting, "=")
				if err == nil || !strings.Contains(err.Error(), name+"=") {
					t.Fatalf("got %v, want an error that names %s", err, name)
				}
				secret := strings.Contains(name, "_KEY") || strings.Contains(name, "_TOKEN")
				if shown := strings.Contains(err.Error(), fmt.Sprintf("%q", value)); shown == secret {
					t.Errorf("got %q: want the value shown unless it is secret", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := tt.got(c); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestConfigTellsAllFaults(t *testing.T) {
	_, err := load(t, "LOG_LEVEL=loud\nBERTH_ROOT=/x\n", "CONTAINER_CPUS=many", "OPENAI_API_KEY=geheim geheim", "TZ=")
	if err == nil {
		t.Fatal("got no error")
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != 5 {
		t.Errorf("got %d lines, want 5: %v", len(lines), lines)
	}
	for _, want := range []string{`LOG_LEVEL="loud" (.env): give one of`, `CONTAINER_CPUS="many" (environment): give`, "OPENAI_API_KEY=*** (environment)", "BERTH_ROOT in .env", `TZ=""`} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("got %q, want %q in it", err, want)
		}
	}
	if strings.Contains(err.Error(), "geheim") {
		t.Errorf("got %q: it shows the secret", err)
	}
}

func TestConfigAllowlistOutsideTheRoot(t *testing.T) {
	root := t.TempDir()
	_, err := LoadConfig(map[string]string{"BERTH_ROOT": root}, []string{"BERTH_MOUNT_ALLOWLIST=" + root + "/groups/main/list.json"})
	if err == nil || !strings.Contains(err.Error(), "BERTH_MOUNT_ALLOWLIST") {
		t.Errorf("got %v, want it refused", err)
	}
}

func TestConfigRoot(t *testing.T) {
	t.Chdir(t.TempDir())
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	c, err := LoadConfig(nil, nil)
	if err != nil || c.Root != here {
		t.Errorf("got %q, %v, want the current folder %q", c.Root, err, here)
	}
	c, err = LoadConfig(nil, []string{"BERTH_ROOT=sub"})
	if err != nil || c.Root != filepath.Join(here, "sub") || c.Socket() != filepath.Join(here, "sub/store/berth.sock") {
		t.Errorf("got %q, %v, want the folder sub, absolute", c.Root, err)
	}
	if err := os.WriteFile("file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, root := range []string{"file", "/" + strings.Repeat("long/", 30)} {
		if _, err := LoadConfig(map[string]string{"BERTH_ROOT": root}, nil); err == nil || !strings.Contains(err.Error(), "BERTH_ROOT") {
			t.Errorf("%s: got %v, want an error that names BERTH_ROOT", root, err)
		}
	}
}

func TestEnvFileFaults(t *testing.T) {
	tests := map[string]struct{ text, want string }{
		"no assignment": {"A=1\n\nsecret words\nB=2\n", ".env:3"},
		"open quote":    {"A=1\nB=\"secret\nC=3\n", ".env:2"},
		"good quotes":   {"A=\"1\n2\"\nB = 'x y'\nsecret!\n", ".env:4"},
		"last line":     {"A=1\nsecret", ".env:2"},
		"too large":     {"A=secret" + strings.Repeat("x", maxEnvFile), "1 MiB"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := load(t, tt.text)
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "secret") {
				t.Errorf("got %v, want %q in it and nothing of the file", err, tt.want)
			}
		})
	}
	t.Run("folder", func(t *testing.T) {
		root := t.TempDir()
		if err := os.Mkdir(filepath.Join(root, ".env"), 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadConfig(map[string]string{"BERTH_ROOT": root}, nil); err == nil || !strings.Contains(err.Error(), "regular") {
			t.Errorf("got %v, want it refused", err)
		}
	})
}

func TestEnvExample(t *testing.T) {
	data, err := os.ReadFile("../.env.example")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^# ([A-Z_]+)=(.*)$`).FindAllStringSubmatch(string(data), -1) {
		listed[m[1]] = m[2]
	}
	for _, s := range settings {
		if s.hidden {
			continue
		}
		got, ok := listed[s.name]
		if !ok || got != s.def {
			t.Errorf("%s: the example has %q (listed: %v), want the default %q", s.name, got, ok, s.def)
		}
		delete(listed, s.name)
	}
	for name := range listed {
		t.Errorf("the example lists %s, which is no setting", name)
	}
	if values, err := godotenv.Unmarshal(string(data)); err != nil || len(values) != 0 {
		t.Errorf("got %v, %v, want an example that changes nothing as it is", values, err)
	}
}

func TestSecret(t *testing.T) {
	s := Secret("geheim")
	data, err := json.Marshal(struct{ S Secret }{s})
	if err != nil {
		t.Fatal(err)
	}
	for _, got := range []string{
		s.String(), fmt.Sprint(s), fmt.Sprintf("%v %+v %#v %q %x %d %s", s, s, s, s, s, s, s),
		fmt.Sprintf("%+v", Config{OpenAIAPIKey: s}), fmt.Sprintf("%#v", Config{OpenAIAPIKey: s}), string(data),
	} {
		if strings.Contains(got, "geheim") || strings.Contains(got, "67656865696d") || !strings.Contains(got, "***") {
			t.Errorf("got %q, want ***", got)
		}
	}
}

func TestSystemZone(t *testing.T) {
	dir := t.TempDir()
	zone := filepath.Join(dir, "zoneinfo/Europe/Vienna")
	if err := os.MkdirAll(filepath.Dir(zone), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"zoneinfo/Europe/Vienna": "", "timezone": "Asia/Tokyo\n", "odd": "Local\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(zone, filepath.Join(dir, "localtime")); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ localtime, timezone, want string }{
		{"localtime", "timezone", "Europe/Vienna"},
		{"none", "timezone", "Asia/Tokyo"},
		{"none", "odd", "UTC"},
		{"none", "none", "UTC"},
	} {
		if got, zone := systemZone(filepath.Join(dir, tt.localtime), filepath.Join(dir, tt.timezone)); got != tt.want || zone.String() != tt.want {
			t.Errorf("%+v: got %q, %v", tt, got, zone)
		}
	}
}

func TestProvider(t *testing.T) {
	for _, tt := range []struct{ env, model, want string }{
		{"", "", ""},
		{"ANTHROPIC_API_KEY=k", "gpt-5", "anthropic"},
		{"CLAUDE_CODE_OAUTH_TOKEN=k", "", "anthropic"},
		{"OPENAI_BASE_URL=http://127.0.0.1:11434/v1", "qwen3", "openai"},
		{"OPENAI_API_KEY=k", "claude-x", "openai"},
		{"ANTHROPIC_API_KEY=k OPENAI_API_KEY=k", "", "anthropic"},
		{"ANTHROPIC_API_KEY=k OPENAI_API_KEY=k", "claude-x", "anthropic"},
		{"ANTHROPIC_API_KEY=k OPENAI_API_KEY=k", "gpt-5", "openai"},
		{"ANTHROPIC_API_KEY=k OPENAI_API_KEY=k AGENT_PROVIDER=openai", "claude-x", "openai"},
	} {
		c, err := load(t, "", strings.Fields(tt.env)...)
		if err != nil {
			t.Fatal(err)
		}
		if got := c.provider(tt.model); got != tt.want {
			t.Errorf("%s, model %q: %q, want %q", tt.env, tt.model, got, tt.want)
		}
	}
}
