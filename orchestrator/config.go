package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/joho/godotenv"
	"go.uber.org/zap/zapcore"

	"berth/orchestrator/internal/gateway"
	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/whatsapp"
)

// Config is every setting of the program. It is read once, at the start.
type Config struct {
	Root     string // absolute
	Home     string // of the user that runs the program; may be empty
	NoColor  bool   // NO_COLOR is set
	Channels []string

	AssistantName         string
	AssistantHasOwnNumber bool

	MaxBacklogAge time.Duration
	ReadReceipts  bool
	MaxMedia      int64            // bytes of a file
	Double        *whatsapp.Double // for tests; nil: WhatsApp itself

	Image            string // empty: the image built from our own runner
	ContainerTimeout time.Duration
	IdleTimeout      time.Duration
	TaskTimeout      time.Duration
	Heartbeat        time.Duration // between two; 0: never
	Sessions         turn.SessionLimits
	MaxOutput        int64 // bytes of log a run
	MaxContainers    int
	ContainerMemory  int64 // bytes
	ContainerCPUs    float64
	CPUSet           string // as docker.Options has it
	ContainerPids    int64
	MaxMemory        int64 // what a group may have by a setting of its own
	MaxCPUs          float64
	MaxPids          int64
	ContainerNetwork string // "none" or "bridge"
	Runtime          string // empty: the container engine's default
	DockerHost       string // empty: the usual socket
	DockerCertPath   string // empty: no TLS
	MountAllowlist   string // absolute
	SenderAllowlist  string // absolute; empty: none was named
	PairToken        Secret // empty: nobody can pair
	Egress           []string
	Budget           gateway.Budget // of each group

	Timezone     *time.Location
	TimezoneName string // what containers get as TZ
	LogLevel     zapcore.Level

	Engine      string
	Credentials string
	FollowUp    string

	AnthropicAPIKey      Secret
	ClaudeCodeOAuthToken Secret
	AnthropicBaseURL     string
	OpenAIAPIKey         Secret
	OpenAIBaseURL        string
	GeminiAPIKey         Secret
	GeminiBaseURL        string
	AgentModel           string
	AgentContext         int    // tokens; 0: the usual number of the provider
	AgentProvider        string // empty: the model's name decides
	AgentCommand         string
	SessionTimeout       time.Duration
	FirstTimeout         time.Duration
	SilenceTimeout       time.Duration
	SettleTimeout        time.Duration

	values []Value
}

// Serves reports whether CHANNELS names a channel.
func (c Config) Serves(channel string) bool { return slices.Contains(c.Channels, channel) }

// Socket returns the path of the control socket.
func (c Config) Socket() string { return filepath.Join(c.Root, "store", "berth.sock") }

// LogFile returns the path of the log of a detached daemon.
func (c Config) LogFile() string { return filepath.Join(c.Root, "data", "logs", "berth.log") }

// Values returns every setting as it was given, in the order of the table;
// secrets read "***".
func (c Config) Values() []Value { return c.values }

// Value is where a setting came from and what was written there.
type Value struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Source string `json:"source"` // "default", ".env", "environment" or "flag"
}

// Secret is text that shows itself only to Reveal.
type Secret string

const hidden = "***"

// Reveal returns the text itself.
func (s Secret) Reveal() string { return string(s) }

func (s Secret) String() string   { return hidden }
func (s Secret) GoString() string { return hidden }

// Format covers the verbs that pass by String, such as %d.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, hidden) }

// MarshalText keeps the secret out of JSON.
func (s Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// setting is one line of the table that parsing, .env.example and berth doctor
// share.
type setting struct {
	name   string
	def    string // as it would be written; empty: no value
	help   string
	secret bool
	hidden bool                                // from people, unless it is set
	set    func(c *Config, value string) error // value is not empty; the error says what would be right
}

// LoadConfig puts the settings together: defaults, then .env in the root, then
// environ ("NAME=value"), then flags by the variable's name. An empty value
// counts as none. The error joins every fault, one line each.
func LoadConfig(flags map[string]string, environ []string) (Config, error) {
	env := make(map[string]string)
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		env[name] = value
	}
	c := Config{Home: home(env["HOME"]), NoColor: env["NO_COLOR"] != ""}

	var faults []error
	root, rootSource := pick("BERTH_ROOT", ".", nil, env, flags)
	if err := setRoot(&c, root); err != nil {
		return Config{}, fmt.Errorf("BERTH_ROOT=%q: %w", root, err)
	}
	file, err := readEnvFile(filepath.Join(c.Root, ".env"))
	if err != nil {
		faults = append(faults, err)
	}
	if file["BERTH_ROOT"] != "" {
		faults = append(faults, errors.New("BERTH_ROOT in .env: the file lies in the root, so it cannot name it: set it in the environment, or give --root"))
	}
	if value, ok := env["TZ"]; ok && value == "" && flags["TZ"] == "" {
		faults = append(faults, errors.New(`TZ="": give a zone such as Europe/Berlin, or leave it unset for the system's`))
	}
	for _, s := range settings {
		value, source := root, rootSource
		if s.name != "BERTH_ROOT" {
			value, source = pick(s.name, s.def, file, env, flags)
			if value == "" && s.hidden {
				continue
			}
			if value == "" {
				c.values = append(c.values, Value{Name: s.name, Source: source})
				continue
			}
			if err := s.set(&c, value); err != nil {
				shown := fmt.Sprintf("%q", value)
				if s.secret {
					shown = hidden
				}
				faults = append(faults, fmt.Errorf("%s=%s (%s): %w", s.name, shown, source, err))
			}
		}
		if s.secret {
			value = hidden
		}
		c.values = append(c.values, Value{Name: s.name, Value: value, Source: source})
	}
	if c.Timezone == nil {
		c.TimezoneName, c.Timezone = systemZone("/etc/localtime", "/etc/timezone")
	}
	if err := c.checkAllowlist(); err != nil {
		faults = append(faults, err)
	}
	faults = append(faults, c.checkLimits()...)
	if len(faults) > 0 {
		return Config{}, errors.Join(faults...)
	}
	return c, nil
}

// pick returns the value that wins and where it stands.
func pick(name, def string, file, env, flags map[string]string) (value, source string) {
	switch {
	case flags[name] != "":
		return flags[name], "flag"
	case env[name] != "":
		return env[name], "environment"
	case file[name] != "":
		return file[name], ".env"
	default:
		return def, "default"
	}
}

func home(fromEnv string) string {
	if fromEnv != "" {
		return fromEnv
	}
	if u, err := user.Current(); err == nil {
		return u.HomeDir
	}
	return ""
}

// checkAllowlist keeps the allowlists out of the folders that containers see.
func (c Config) checkAllowlist() error {
	for _, dir := range []string{"groups", "data", "store"} {
		for name, file := range map[string]string{"BERTH_MOUNT_ALLOWLIST": c.MountAllowlist, "BERTH_SENDER_ALLOWLIST": c.SenderAllowlist} {
			if strings.HasPrefix(file, filepath.Join(c.Root, dir)+"/") {
				return fmt.Errorf("%s=%q: it lies in %s/, which holds what containers write: keep it outside the root", name, file, dir)
			}
		}
	}
	return nil
}

// checkLimits returns the limits of a single group that are below what every group
// gets. A limit that nobody set gives way instead.
func (c *Config) checkLimits() (faults []error) {
	given := make(map[string]Value)
	for _, v := range c.values {
		given[v.Name] = v
	}
	check := func(what string, below bool, giveWay func()) {
		most, all := given["CONTAINER_MAX_"+what], given["CONTAINER_"+what]
		switch {
		case !below:
		case most.Source == "default":
			giveWay()
		default:
			faults = append(faults, fmt.Errorf("%s=%q (%s): it is less than %s=%s, which every group gets: raise the one or lower the other",
				most.Name, most.Value, most.Source, all.Name, all.Value))
		}
	}
	check("MEMORY", c.MaxMemory < c.ContainerMemory, func() { c.MaxMemory = c.ContainerMemory })
	check("CPUS", c.MaxCPUs < c.ContainerCPUs, func() { c.MaxCPUs = c.ContainerCPUs })
	check("PIDS", c.MaxPids < c.ContainerPids, func() { c.MaxPids = c.ContainerPids })
	return faults
}

const maxEnvFile = 1 << 20

// readEnvFile reads a file of NAME=value lines without exporting them. Its
// errors never quote the file, which holds secrets.
func readEnvFile(path string) (map[string]string, error) {
	// Without O_NONBLOCK a pipe in this place would block the start.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read settings: %w: make it readable, or remove it", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read settings: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read settings: %s is not a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxEnvFile+1))
	if err != nil {
		return nil, fmt.Errorf("read settings: %w", err)
	}
	if len(data) > maxEnvFile {
		return nil, fmt.Errorf("read settings: %s is larger than 1 MiB: it should hold a few NAME=value lines", path)
	}
	values, ok := parseEnv(data)
	if !ok {
		where := path
		if line := badLine(data); line > 0 {
			where = fmt.Sprintf("%s:%d", path, line)
		}
		return nil, fmt.Errorf("read settings: %s: not a NAME=value line, or a quote that does not end", where)
	}
	return values, nil
}

func parseEnv(data []byte) (map[string]string, bool) {
	values, err := godotenv.UnmarshalBytes(data)
	_, nameless := values[""]
	return values, err == nil && !nameless
}

// badLine returns the number of the first line after which the file cannot be
// read any more, or 0 for a file too large to find it by trying. godotenv tells
// no line, and its errors quote what they choke on.
func badLine(data []byte) int {
	lines := bytes.SplitAfter(data, []byte("\n"))
	if len(data) > 64<<10 || len(lines) > 2000 {
		return 0
	}
	good, size := 0, 0
	for i, line := range lines {
		size += len(line)
		if _, ok := parseEnv(data[:size]); ok {
			good = i + 1 // an open quote may have been closed here
		}
	}
	return good + 1
}
