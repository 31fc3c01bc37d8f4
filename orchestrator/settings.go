package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	_ "time/tzdata" // zones must load where the system has none

	"go.uber.org/zap/zapcore"

	"berth/orchestrator/internal/gateway"
	"berth/orchestrator/internal/pairing"
	"berth/orchestrator/internal/whatsapp"
)

// settings is the table of all settings, in the order in which people see them.
var settings = []setting{
	{name: "BERTH_ROOT", def: ".", help: "folder that holds groups/, data/ and store/ (not in .env: it lies there)", set: setRoot},
	{name: "ASSISTANT_NAME", def: "Andy", help: "the assistant's name; @name is the trigger", set: setName},
	{name: "ASSISTANT_HAS_OWN_NUMBER", def: "false", help: "true: the assistant has a phone number of its own", set: boolean(func(c *Config) *bool { return &c.AssistantHasOwnNumber })},
	{name: "CHANNELS", def: "console", help: "chat networks: console, which is always there, and whatsapp", set: setChannels},

	{name: "MAX_BACKLOG_AGE", def: "12h", help: "what was written longer ago while Berth was away wakes no agent", set: duration(func(c *Config) *time.Duration { return &c.MaxBacklogAge })},
	{name: "WHATSAPP_READ_RECEIPTS", def: "false", help: "true: messages are shown as read when an agent gets them", set: boolean(func(c *Config) *bool { return &c.ReadReceipts })},
	{name: "WHATSAPP_MAX_MEDIA", def: "64MiB", help: "largest file that is downloaded for an agent", set: size(func(c *Config) *int64 { return &c.MaxMedia }, 1024)},
	{name: "BERTH_WHATSAPP_DOUBLE", hidden: true, help: "for tests: a server on this host that stands in for WhatsApp, and its root key", set: setDouble},

	{name: "CONTAINER_IMAGE", help: "agent image; empty: built from Berth's own runner", set: pattern(func(c *Config) *string { return &c.Image }, `^[A-Za-z0-9][A-Za-z0-9._/:@-]*$`, "give an image such as ghcr.io/you/agent:1")},
	{name: "CONTAINER_TIMEOUT", def: "30m", help: "a run without a sign of life ends after this: milliseconds, or a duration", set: duration(func(c *Config) *time.Duration { return &c.ContainerTimeout })},
	{name: "IDLE_TIMEOUT", def: "30m", help: "an idle container ends after this: milliseconds, or a duration", set: duration(func(c *Config) *time.Duration { return &c.IdleTimeout })},
	{name: "TASK_TIMEOUT", def: "30m", help: "a task's run ends after this: milliseconds, or a duration", set: duration(func(c *Config) *time.Duration { return &c.TaskTimeout })},
	{name: "HEARTBEAT_INTERVAL_MINUTES", def: "0", help: "how often main's agent goes through the checks in HEARTBEAT.md; 0: never", set: setHeartbeat},
	{name: "SESSION_MAX_AGE", def: "720h", help: "a chat begins a new session when the old one is older; the old one is archived; 0: never", set: setSessionAge},
	{name: "SESSION_MAX_TURNS", def: "1000", help: "and when it has had so many turns; 0: never", set: setSessionTurns},
	{name: "CONTAINER_MAX_OUTPUT_SIZE", def: "10485760", help: "bytes of log kept of one run", set: size(func(c *Config) *int64 { return &c.MaxOutput }, 1024)},
	{name: "MAX_CONCURRENT_CONTAINERS", def: "5", help: "containers at the same time", set: setMaxContainers},
	{name: "CONTAINER_MEMORY", def: "1GiB", help: "memory of one container", set: size(func(c *Config) *int64 { return &c.ContainerMemory }, 6<<20)},
	{name: "CONTAINER_CPUS", def: "1", help: "processors of one container", set: setCPUs},
	{name: "CONTAINER_CPUSET", def: "auto", help: "which processors containers may use: auto leaves the first one to Berth and the engine; all; or a list such as 1-3,5", set: setCPUSet},
	{name: "CONTAINER_PIDS", def: "256", help: "processes of one container", set: setPids},
	{name: "CONTAINER_MAX_MEMORY", def: "4GiB", help: "most memory that a group may have by a setting of its own", set: size(func(c *Config) *int64 { return &c.MaxMemory }, 6<<20)},
	{name: "CONTAINER_MAX_CPUS", def: "4", help: "most processors of the same", set: cpus(func(c *Config) *float64 { return &c.MaxCPUs })},
	{name: "CONTAINER_MAX_PIDS", def: "1024", help: "most processes of the same", set: pids(func(c *Config) *int64 { return &c.MaxPids })},
	{name: "CONTAINER_NETWORK", def: "none", help: "none, or bridge for the open network", set: oneOf(func(c *Config) *string { return &c.ContainerNetwork }, "none", "bridge")},
	{name: "CONTAINER_RUNTIME", help: "container runtime, for example runsc for gVisor", set: pattern(func(c *Config) *string { return &c.Runtime }, `^[A-Za-z0-9][A-Za-z0-9._-]*$`, "give a runtime's name such as runsc")},
	{name: "DOCKER_HOST", help: "the Docker engine; empty: its usual socket", set: setDockerHost},
	{name: "DOCKER_CERT_PATH", help: "folder with ca.pem, cert.pem and key.pem for a Docker engine over TLS", set: setDockerCerts},
	{name: "BERTH_MOUNT_ALLOWLIST", def: "~/.config/berth/mount-allowlist.json", help: "host folders that groups may be given", set: setMountAllowlist},
	{name: "WHITELIST_PAIR_TOKEN", help: "who writes /pair and this counts from then on; empty: nobody can", secret: true, set: setPairToken},
	{name: "BERTH_SENDER_ALLOWLIST", help: "whose messages count; empty: everybody's, unless ~/.config/berth/sender-allowlist.json is there", set: setSenderAllowlist},

	{name: "TZ", help: "time zone of schedules and containers; empty: the system's", set: setTimezone},
	{name: "LOG_LEVEL", def: "info", help: "trace, debug, info, warn, error, fatal or silent", set: setLogLevel},

	{name: "AGENT_ENGINE", def: "auto", help: "auto, builtin, model, claude, opencode, claude-acp, gemini, codex, acp or probe: see docs/engines.md", set: oneOf(func(c *Config) *string { return &c.Engine }, engines...)},
	{name: "AGENT_MODEL", help: "the model's name, for engines with a model", set: pattern(func(c *Config) *string { return &c.AgentModel }, modelPattern, "give a model's name")},
	{name: "AGENT_CONTEXT", help: "tokens that the model takes at most, 4000 or more; empty: 200000 with Anthropic, else 128000", set: setContext},
	{name: "AGENT_PROVIDER", help: "anthropic or openai, where there are keys for both; empty: the model's name decides", set: oneOf(func(c *Config) *string { return &c.AgentProvider }, providerAnthropic, providerOpenAI)},
	{name: "AGENT_COMMAND", help: "the program that the engine acp starts, such as \"goose acp\"", set: pattern(func(c *Config) *string { return &c.AgentCommand }, `^[ -~]+$`, "give a command on one line")},
	{name: "AGENT_SESSION_TIMEOUT", help: "an agent has a session after this, or the run fails; empty: 15s, and 45s for OpenCode", set: duration(func(c *Config) *time.Duration { return &c.SessionTimeout })},
	{name: "AGENT_FIRST_TIMEOUT", def: "2m", help: "a turn shows a first sign of life after this, or it is stopped", set: duration(func(c *Config) *time.Duration { return &c.FirstTimeout })},
	{name: "AGENT_SILENCE_TIMEOUT", def: "10m", help: "and another one after each of this", set: duration(func(c *Config) *time.Duration { return &c.SilenceTimeout })},
	{name: "AGENT_SETTLE_TIMEOUT", def: "30s", help: "the final form of an answer is there after this, or what was streamed is taken", set: duration(func(c *Config) *time.Duration { return &c.SettleTimeout })},
	{name: "CREDENTIALS", def: "gateway", help: "gateway: keys stay on the host; stdin: they are given to each container, for old images", set: oneOf(func(c *Config) *string { return &c.Credentials }, "gateway", credentialsStdin)},
	{name: "FOLLOW_UP", def: "queue", help: "queue: messages for a busy agent wait for the end of its turn", set: oneOf(func(c *Config) *string { return &c.FollowUp }, "queue")},

	{name: "EGRESS", help: "hosts that every container may reach through the gateway, such as pypi.org,*.example.org:443", set: setEgress},
	{name: "DAILY_REQUESTS", def: "0", help: "requests to a model that a group may make in a day; 0: no limit", set: number(func(c *Config) *int64 { return &c.Budget.Requests })},
	{name: "DAILY_TOKENS", def: "0", help: "tokens that a group may use in a day; 0: no limit", set: number(func(c *Config) *int64 { return &c.Budget.Tokens })},

	{name: "ANTHROPIC_API_KEY", help: "key for Anthropic's API", secret: true, set: secret(func(c *Config) *Secret { return &c.AnthropicAPIKey })},
	{name: "CLAUDE_CODE_OAUTH_TOKEN", help: "token of a Claude subscription", secret: true, set: secret(func(c *Config) *Secret { return &c.ClaudeCodeOAuthToken })},
	{name: "ANTHROPIC_BASE_URL", help: "address of an API like Anthropic's; empty: its own", set: baseURL(func(c *Config) *string { return &c.AnthropicBaseURL }, "http://localhost:4000")},
	{name: "OPENAI_API_KEY", help: "key for an OpenAI-compatible API", secret: true, set: secret(func(c *Config) *Secret { return &c.OpenAIAPIKey })},
	{name: "OPENAI_BASE_URL", help: "address of an OpenAI-compatible API", set: baseURL(func(c *Config) *string { return &c.OpenAIBaseURL }, "http://localhost:11434/v1")},
	{name: "GEMINI_API_KEY", help: "key for Google's Gemini API, for Gemini CLI", secret: true, set: secret(func(c *Config) *Secret { return &c.GeminiAPIKey })},
	{name: "GOOGLE_GEMINI_BASE_URL", help: "address of an API like Gemini's; empty: its own", set: baseURL(func(c *Config) *string { return &c.GeminiBaseURL }, "http://localhost:4000")},
}

const modelPattern = `^[\w./:@-]{1,128}$`

// maxSocketPath is what the kernel takes as the path of a unix socket.
const maxSocketPath = 107

func setRoot(c *Config, value string) error {
	root, err := filepath.Abs(expandHome(value, c.Home))
	if err != nil {
		return err
	}
	if info, err := os.Stat(root); err == nil && !info.IsDir() {
		return errors.New("not a folder")
	}
	c.Root = root
	if n := len(c.Socket()); n > maxSocketPath {
		return fmt.Errorf("the path is %d bytes too long for the control socket in it: use a shorter one", n-maxSocketPath)
	}
	return nil
}

func expandHome(path, home string) string {
	if home != "" && (path == "~" || strings.HasPrefix(path, "~/")) {
		return home + path[1:]
	}
	return path
}

func setName(c *Config, value string) error {
	name := strings.TrimSpace(value)
	if strings.HasPrefix(name, "@") {
		return errors.New("give the name without the @")
	}
	if name == "" || utf8.RuneCountInString(name) > 64 || !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsGraphic(r) }) {
		return errors.New("give a name of 1 to 64 printable characters")
	}
	c.AssistantName = name
	return nil
}

// The channels, as CHANNELS names them.
const (
	channelConsole  = "console"
	channelWhatsApp = "whatsapp"
)

var knownChannels = []string{channelConsole, channelWhatsApp}

func setChannels(c *Config, value string) error {
	for name := range strings.SplitSeq(value, ",") {
		name = strings.TrimSpace(name)
		if !slices.Contains(knownChannels, name) {
			return fmt.Errorf("no channel is called %q: give some of %s", name, strings.Join(knownChannels, ", "))
		}
		if !slices.Contains(c.Channels, name) {
			c.Channels = append(c.Channels, name)
		}
	}
	return nil
}

// setDouble reads what watestd prints, as http://127.0.0.1:port#root. Anything but
// this host is refused: the setting is no way to another WhatsApp.
func setDouble(c *Config, value string) error {
	const right = "give http://127.0.0.1:port#root, with the root key in hexadecimal"
	u, err := url.Parse(value)
	if err != nil {
		return errors.New(right)
	}
	ip, err := netip.ParseAddr(u.Hostname())
	root, bad := hex.DecodeString(u.Fragment)
	if u.Scheme != "http" || err != nil || !ip.IsLoopback() || bad != nil || len(root) != 32 {
		return errors.New(right)
	}
	c.Double = &whatsapp.Double{URL: "http://" + u.Host, Root: [32]byte(root)}
	return nil
}

func setMaxContainers(c *Config, value string) error {
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 || n > 1000 {
		return errors.New("give a whole number from 1 to 1000")
	}
	c.MaxContainers = n
	return nil
}

func setHeartbeat(c *Config, value string) error {
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 || n > 7*24*60 {
		return errors.New("give a whole number of minutes from 1 to 10080, or 0 for never")
	}
	c.Heartbeat = time.Duration(n) * time.Minute
	return nil
}

func setSessionAge(c *Config, value string) error {
	if value == "0" {
		c.Sessions.Age = 0
		return nil
	}
	if duration(func(c *Config) *time.Duration { return &c.Sessions.Age })(c, value) != nil {
		return errors.New("give a duration such as 720h, or 0 for never")
	}
	return nil
}

func setSessionTurns(c *Config, value string) error {
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 || n > 1_000_000 {
		return errors.New("give a whole number of turns from 1 to 1000000, or 0 for never")
	}
	c.Sessions.Turns = n
	return nil
}

func setCPUSet(c *Config, value string) error {
	if value == "all" {
		c.CPUSet = ""
		return nil
	}
	return pattern(func(c *Config) *string { return &c.CPUSet }, `^(auto|[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*)$`, "give auto, all, or a list such as 1-3,5")(c, value)
}

func setCPUs(c *Config, value string) error {
	return cpus(func(c *Config) *float64 { return &c.ContainerCPUs })(c, value)
}

func cpus(field func(*Config) *float64) func(*Config, string) error {
	return func(c *Config, value string) error {
		n, err := strconv.ParseFloat(value, 64)
		if err != nil || !(n >= 0.01 && n <= 1024) {
			return errors.New("give a number from 0.01 to 1024, such as 1.5")
		}
		*field(c) = n
		return nil
	}
}

// minPids leaves room for the runner's own threads and a few tools.
const minPids = 32

func setPids(c *Config, value string) error {
	return pids(func(c *Config) *int64 { return &c.ContainerPids })(c, value)
}

func pids(field func(*Config) *int64) func(*Config, string) error {
	return func(c *Config, value string) error {
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil || n < minPids || n > 1<<22 {
			return fmt.Errorf("give a whole number of at least %d", minPids)
		}
		*field(c) = n
		return nil
	}
}

func setDockerHost(c *Config, value string) error {
	u, err := url.Parse(value)
	usable := err == nil && (u.Scheme == "unix" && filepath.IsAbs(u.Path) ||
		u.Scheme == "tcp" && u.Host != "")
	if !usable {
		return errors.New("give unix:///path/docker.sock or tcp://host:port")
	}
	c.DockerHost = value
	return nil
}

func setDockerCerts(c *Config, value string) error {
	path := expandHome(value, c.Home)
	if !filepath.IsAbs(path) {
		return errors.New("give an absolute path, or one that starts with ~/ and a HOME")
	}
	c.DockerCertPath = filepath.Clean(path)
	return nil
}

func setMountAllowlist(c *Config, value string) error {
	return listFile(&c.MountAllowlist, c.Home, value)
}

func setSenderAllowlist(c *Config, value string) error {
	return listFile(&c.SenderAllowlist, c.Home, value)
}

func setPairToken(c *Config, value string) error {
	c.PairToken = Secret(value)
	return pairing.ValidToken(value)
}

func listFile(field *string, home, value string) error {
	path := expandHome(value, home)
	if !filepath.IsAbs(path) {
		return errors.New("give an absolute path, or one that starts with ~/ and a HOME")
	}
	*field = filepath.Clean(path)
	return nil
}

func setTimezone(c *Config, value string) error {
	zone, err := time.LoadLocation(value)
	if err != nil || value == "Local" {
		return errors.New("not a known time zone: give one such as Europe/Berlin or UTC")
	}
	c.Timezone, c.TimezoneName = zone, value
	return nil
}

// systemZone finds the name of the system's zone, which a container needs; Go's
// own time.Local has none.
func systemZone(localtime, timezone string) (string, *time.Location) {
	var names []string
	if target, err := filepath.EvalSymlinks(localtime); err == nil {
		if _, name, ok := strings.Cut(target, "zoneinfo/"); ok {
			names = append(names, name)
		}
	}
	if text, err := os.ReadFile(timezone); err == nil {
		names = append(names, strings.TrimSpace(string(text)))
	}
	for _, name := range names {
		if zone, err := time.LoadLocation(name); err == nil && name != "" && name != "Local" {
			return name, zone
		}
	}
	return "UTC", time.UTC
}

var logLevels = map[string]zapcore.Level{
	"trace":  zapcore.DebugLevel,
	"debug":  zapcore.DebugLevel,
	"info":   zapcore.InfoLevel,
	"warn":   zapcore.WarnLevel,
	"error":  zapcore.ErrorLevel,
	"fatal":  zapcore.FatalLevel,
	"silent": zapcore.FatalLevel + 1, // above everything
}

func setLogLevel(c *Config, value string) error {
	level, ok := logLevels[strings.ToLower(value)]
	if !ok {
		return errors.New("give one of trace, debug, info, warn, error, fatal, silent")
	}
	c.LogLevel = level
	return nil
}

func baseURL(field func(*Config) *string, example string) func(*Config, string) error {
	return func(c *Config, value string) error {
		u, err := url.Parse(value)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
			return fmt.Errorf("give an address such as %s, without a password or a query in it", example)
		}
		*field(c) = value
		return nil
	}
}

func setEgress(c *Config, value string) error {
	list := strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == ' ' })
	if _, err := gateway.ParseEgress(list); err != nil {
		return err
	}
	c.Egress = list
	return nil
}

// number takes a whole number that is not negative.
func number(field func(*Config) *int64) func(*Config, string) error {
	return func(c *Config, value string) error {
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil || n < 0 {
			return errors.New("give a whole number, 0 for no limit")
		}
		*field(c) = n
		return nil
	}
}

func setContext(c *Config, value string) error {
	n, err := strconv.Atoi(value)
	if err != nil || n < 4000 {
		return errors.New("give a number of tokens, 4000 or more")
	}
	c.AgentContext = n
	return nil
}

func boolean(field func(*Config) *bool) func(*Config, string) error {
	return func(c *Config, value string) error {
		switch strings.ToLower(value) {
		case "true", "1", "yes", "on":
			*field(c) = true
		case "false", "0", "no", "off":
			*field(c) = false
		default:
			return errors.New("give true or false")
		}
		return nil
	}
}

func oneOf(field func(*Config) *string, values ...string) func(*Config, string) error {
	return func(c *Config, value string) error {
		if !slices.Contains(values, value) {
			return fmt.Errorf("give one of %s", strings.Join(values, ", "))
		}
		*field(c) = value
		return nil
	}
}

func pattern(field func(*Config) *string, expr, right string) func(*Config, string) error {
	re := regexp.MustCompile(expr)
	return func(c *Config, value string) error {
		if !re.MatchString(value) {
			return errors.New(right)
		}
		*field(c) = value
		return nil
	}
}

// duration takes the ancestors' milliseconds, or a Go duration.
func duration(field func(*Config) *time.Duration) func(*Config, string) error {
	const longest = 10_000 * time.Hour
	return func(c *Config, value string) error {
		d, err := time.ParseDuration(value)
		if ms, e := strconv.ParseInt(value, 10, 64); e == nil {
			if ms > int64(longest/time.Millisecond) {
				ms = -1
			}
			d, err = time.Duration(ms)*time.Millisecond, nil
		}
		if err != nil || d < time.Millisecond || d > longest {
			return errors.New("give a duration such as 30m, or milliseconds such as 1800000")
		}
		*field(c) = d
		return nil
	}
}

var sizePattern = regexp.MustCompile(`^([0-9]{1,18}(?:\.[0-9]{1,6})?) *([kmgt]?)(?:i?b)?$`)

// parseSize reads bytes as Docker does: units are powers of 1024, whatever
// their spelling.
func parseSize(text string) (int64, bool) {
	m := sizePattern.FindStringSubmatch(strings.ToLower(text))
	if m == nil {
		return 0, false
	}
	n, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		return 0, false
	}
	// No unit is the empty string, found at 0.
	for range strings.Index(" kmgt", m[2]) {
		n *= 1024
	}
	if n > 1<<60 {
		return 0, false
	}
	return int64(n), true
}

func size(field func(*Config) *int64, least int64) func(*Config, string) error {
	return func(c *Config, value string) error {
		n, ok := parseSize(value)
		if !ok || n < least {
			return fmt.Errorf("give a size of at least %d bytes, such as 512m or 1GiB", least)
		}
		*field(c) = n
		return nil
	}
}

func secret(field func(*Config) *Secret) func(*Config, string) error {
	return func(c *Config, value string) error {
		if strings.ContainsFunc(value, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return errors.New("it holds a blank or a character that no key has: copy it again")
		}
		*field(c) = Secret(value)
		return nil
	}
}
