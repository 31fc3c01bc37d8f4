package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/rig"
	"berth/orchestrator/internal/web"
)

const patience = rig.Patience

// demo is one performance. After the first thing that went wrong, which err
// keeps, its methods do nothing any more.
type demo struct {
	screen
	ctx     context.Context
	program string
	dir     string
	err     error
}

func (d *demo) root() string      { return filepath.Join(d.dir, "root") }
func (d *demo) host() string      { return filepath.Join(d.dir, "host") } // the folders that groups ask for
func (d *demo) allowlist() string { return filepath.Join(d.dir, "config", "mount-allowlist.json") }
func (d *demo) lockFile() string  { return filepath.Join(d.root(), "store", "berth.lock") }

func (d *demo) client() *web.Client {
	return web.NewClient(filepath.Join(d.root(), "store", "berth.sock"))
}

// settings are what the play changes.
func (d *demo) settings() []string {
	return []string{
		"BERTH_ROOT=" + d.root(),
		"BERTH_MOUNT_ALLOWLIST=" + d.allowlist(),
		"MAX_CONCURRENT_CONTAINERS=5",
		"AGENT_ENGINE=builtin",
	}
}

// environ keeps the settings of the person who watches out of the play.
func (d *demo) environ() []string {
	return rig.Environ(append(d.settings(), "HOME="+os.Getenv("HOME"))...)
}

func (d *demo) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf(format, args...)
	}
}

// claim fails the play unless what it says was observed.
func (d *demo) claim(observed bool, format string, args ...any) {
	if !observed {
		d.fail("not observed: "+format, args...)
	}
}

// until waits for what must become true.
func (d *demo) until(what string, observe func() bool) {
	for deadline := time.Now().Add(patience); d.err == nil && !observe(); time.Sleep(20 * time.Millisecond) {
		if d.ctx.Err() != nil {
			d.fail("waiting until %s: %w", what, context.Cause(d.ctx))
		}
		d.claim(time.Now().Before(deadline), "within %v: %s", patience, what)
	}
}

// command shows what a person would type.
func (d *demo) command(text string) {
	if d.err == nil {
		d.screen.command(text)
	}
}

// lines shows what came out.
func (d *demo) lines(text string) {
	if d.err == nil {
		d.screen.lines(text)
	}
}

// call is a command of berth under way.
type call struct {
	args []string
	out  string
	err  error
	took time.Duration
	done chan struct{}
}

// start starts berth with args, in a process group of its own, so that Ctrl-C
// is for the demo alone.
func (d *demo) start(ctx context.Context, args ...string) *call {
	c := &call{args: args, done: make(chan struct{})}
	if d.err != nil {
		close(c.done)
		return c
	}
	cmd := exec.CommandContext(ctx, d.program, args...)
	cmd.Env, cmd.Dir = d.environ(), d.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	go func() {
		defer close(c.done)
		begun := time.Now()
		out, err := cmd.CombinedOutput()
		c.out, c.err, c.took = string(out), err, time.Since(begun)
	}()
	return c
}

// end waits for a call and returns its output.
func (d *demo) end(c *call) string {
	<-c.done
	if c.err != nil {
		d.fail("%s: %w: %s", commandLine(c.args), c.err, strings.TrimSpace(c.out))
	}
	return c.out
}

// berth runs one command and shows its output.
func (d *demo) berth(args ...string) string {
	return d.filtered("", func(out string) string { return out }, args...)
}

// filtered runs one command and shows what filter, which a person would write
// as the pipe, leaves of its output; that is also returned.
func (d *demo) filtered(pipe string, filter func(string) string, args ...string) string {
	d.command(commandLine(args) + pipe)
	out := filter(d.end(d.start(d.ctx, args...)))
	d.lines(out)
	return out
}

// grep runs one command and shows the lines that match.
func (d *demo) grep(pattern string, args ...string) string {
	return d.filtered(" | grep -E "+quote(pattern), func(out string) string { return matching(pattern, out) }, args...)
}

// send writes one message and shows the answer.
func (d *demo) send(group, text string) string {
	return d.berth("send", "-g", group, "--wait", text)
}

// sendAll writes one message a group at the same time and shows the answers.
func (d *demo) sendAll(text string, groups ...string) (calls []*call, took time.Duration) {
	begun := time.Now()
	for _, g := range groups {
		c := d.start(d.ctx, "send", "-g", g, "--wait", text)
		d.command(commandLine(c.args) + " &")
		calls = append(calls, c)
	}
	for _, c := range calls {
		d.end(c)
	}
	took = time.Since(begun)
	d.command("wait")
	for _, c := range calls {
		d.lines(c.out)
	}
	return calls, took
}

func matching(pattern, text string) string {
	re := regexp.MustCompile(pattern)
	var out strings.Builder
	for line := range strings.Lines(text) {
		if re.MatchString(line) {
			out.WriteString(line)
		}
	}
	return out.String()
}

func commandLine(args []string) string {
	words := []string{"berth"}
	for _, a := range args {
		words = append(words, quote(a))
	}
	return strings.Join(words, " ")
}

var plainWord = regexp.MustCompile(`^[\w@%+=:,./-]+$`)

// quote writes a word as one types it in a shell.
func quote(word string) string {
	switch {
	case plainWord.MatchString(word):
		return word
	case strings.Contains(word, "'") && !strings.ContainsAny(word, "\n\"\\$`!"):
		return `"` + word + `"`
	case strings.ContainsAny(word, "\n'"):
		return "$'" + strings.NewReplacer("\\", `\\`, "'", `\'`, "\n", `\n`).Replace(word) + "'"
	default:
		return "'" + word + "'"
	}
}

// startDaemon returns when the daemon is ready. An interrupt waits for it: there
// has to be something that can be ended.
func (d *demo) startDaemon(flags ...string) {
	args := append([]string{"run", "--detach"}, flags...)
	d.command(commandLine(args))
	d.lines(d.end(d.start(context.WithoutCancel(d.ctx), args...)))
}

// killDaemon ends the daemon as a power cut would.
func (d *demo) killDaemon() {
	if d.err != nil {
		return
	}
	d.command("kill -9 $(cat $BERTH_ROOT/store/berth.lock)")
	killed, err := d.kill()
	if err == nil && !killed {
		err = errors.New("none runs")
	}
	if err != nil {
		d.fail("kill the daemon: %w", err)
	}
}

// kill kills the daemon of the root, if there is one, and returns when the
// root's lock is free, and so the process gone.
func (d *demo) kill() (killed bool, err error) {
	lock, err := os.Open(d.lockFile())
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer lock.Close()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil || !errors.Is(err, syscall.EWOULDBLOCK) {
			return killed, err
		}
		if time.Now().After(deadline) {
			return killed, fmt.Errorf("the lock %s is still held", d.lockFile())
		}
		if !killed {
			text, err := os.ReadFile(d.lockFile())
			if err != nil {
				return false, err
			}
			pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
			if err != nil {
				continue // it is just being written
			}
			err = syscall.Kill(pid, syscall.SIGKILL)
			if err != nil && !errors.Is(err, syscall.ESRCH) { // the number of an earlier daemon: look again
				return false, err
			}
			killed = err == nil
		}
	}
}

func (d *demo) status() web.Status {
	if d.err != nil {
		return web.Status{}
	}
	s, err := d.client().Status(d.ctx)
	if err != nil {
		d.fail("ask for the status: %w", err)
	}
	return s
}

// runOf returns the live run of a group, or one without an id.
func (d *demo) runOf(group string) web.Run {
	for _, r := range d.status().Runs {
		if r.Group == group {
			return r
		}
	}
	return web.Run{}
}

// history returns all texts of a group's chat that hold a word.
func (d *demo) history(group, word string) (texts []string) {
	if d.err != nil {
		return nil
	}
	for e, err := range d.client().Chat(d.ctx, group, 0) {
		if err != nil {
			d.fail("read the chat: %w", err)
		}
		if err != nil || e.Message == nil {
			break // the messages come first
		}
		if strings.Contains(e.Message.Text, word) {
			texts = append(texts, fmt.Sprintf("%s: %q", e.Message.SenderName, e.Message.Text))
		}
	}
	return texts
}

// daemonLog returns all that the daemons of this root have logged.
func (d *demo) daemonLog() string {
	text, _ := os.ReadFile(filepath.Join(d.root(), "data", "logs", "berth.log"))
	return string(text)
}

var installPattern = regexp.MustCompile(`"install": "(\w+)"`)

// install returns the id in the labels of this root's containers, or "" if no
// daemon came that far.
func (d *demo) install() string {
	if m := installPattern.FindStringSubmatch(d.daemonLog()); m != nil {
		return m[1]
	}
	return ""
}

// engine returns the container engine as this root sees it.
func (d *demo) engine() (*docker.Engine, error) {
	return docker.New(docker.Options{Install: d.install(), Host: os.Getenv("DOCKER_HOST"), TLSDir: os.Getenv("DOCKER_CERT_PATH")})
}

// containers returns this root's containers.
func (d *demo) containers() []docker.Container {
	if d.err != nil {
		return nil
	}
	e, err := d.engine()
	if err != nil {
		d.fail("%w", err)
		return nil
	}
	defer e.Close()
	found, err := e.Containers(d.ctx)
	if err != nil {
		d.fail("%w", err)
	}
	return found
}

// showContainers shows this root's containers.
func (d *demo) showContainers(of string) []docker.Container {
	found := d.containers()
	filter := ""
	if of != "" {
		filter = " --filter label=berth.group=" + of
	}
	d.command("docker ps -a --filter label=berth.install=" + d.install() + filter)
	var shown []docker.Container
	for _, c := range found {
		if of == "" || c.Folder == of {
			shown = append(shown, c)
			d.lines(fmt.Sprintf("%s  berth-%s-%s  running: %v", c.ID[:12], c.Folder, c.Run, c.Running))
		}
	}
	if len(shown) == 0 {
		d.lines("(none)")
	}
	return shown
}

// cleanUp removes all that the play made: daemon, containers, image, folders.
func (d *demo) cleanUp() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := d.kill(); err != nil {
		return fmt.Errorf("end the daemon of %s: %w", d.root(), err)
	}
	if d.install() != "" {
		if err := d.removeContainers(ctx); err != nil {
			return fmt.Errorf("remove the containers with the label berth.install=%s: %w", d.install(), err)
		}
	}
	return os.RemoveAll(d.dir)
}

func (d *demo) removeContainers(ctx context.Context) error {
	e, err := d.engine()
	if err != nil {
		return err
	}
	defer e.Close()
	return rig.Clear(ctx, e)
}

// write writes a file of the operator.
func (d *demo) write(path, text string) {
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = os.WriteFile(path, []byte(text), 0o644)
	}
	if err != nil {
		d.fail("%w", err)
	}
}

func indented(v any) string {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v)
	return out.String()
}
