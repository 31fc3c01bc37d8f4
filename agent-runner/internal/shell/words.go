package shell

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/user"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/interp"
)

// words are programs that scripts count on everywhere, as far as package coreutils
// has none of them. They know the options that people use most, and say so of any
// other one.
var words = map[string]word{
	"basename": {"PATH [SUFFIX]", "", (*call).basename},
	"date":     {"[-u] [+FORMAT]", "u", (*call).date},
	"dirname":  {"PATH", "", (*call).dirname},
	"env":      {"", "", (*call).env},
	"grep":     {"[-EFchilnoqrv] PATTERN [FILE]...", "EFchilnoqrv", (*call).grep},
	"head":     {"[-q] [-n LINES | -c BYTES] [FILE]...", "n:c:q", (*call).head},
	"hostname": {"", "", (*call).hostname},
	"id":       {"[-u [-n] | -g]", "ung", (*call).id},
	ownKill:    {"[-SIGNAL | -s SIGNAL] PID...", "s:", (*call).kill},
	"ps":       {"[aux]", "aefux", (*call).ps},
	"seq":      {"[FIRST [STEP]] LAST", "", (*call).seq},
	"sleep":    {"NUMBER[s|m|h|d]...", "", (*call).sleep},
	"sort":     {"[-fnru] [FILE]...", "fnru", (*call).sort},
	"tail":     {"[-q] [-n [+]LINES | -c [+]BYTES] [FILE]...", "n:c:q", (*call).tail},
	"tee":      {"[-a] [FILE]...", "a", (*call).tee},
	"uname":    {"[-amnrsv]", "amnrsv", (*call).uname},
	"uniq":     {"[-c] [FILE]", "c", (*call).uniq},
	"wc":       {"[-clw] [FILE]...", "clw", (*call).wc},
	"whoami":   {"", "", (*call).whoami},
}

// word is one of them: how it is used, and what it does.
type word struct {
	usage string
	opts  string // the letters of its options; one with a colon behind it takes a value
	run   func(*call) error
}

// ownKill is what kill is called here: the interpreter takes that name for a builtin
// which it does not have.
const ownKill = "kill (of this shell)"

// renamed lets words have the names of such builtins.
func renamed(_ context.Context, args []string) ([]string, error) {
	if args[0] == "kill" {
		args = append([]string{ownKill}, args[1:]...)
	}
	return args, nil
}

// ownWords runs a word, in this process.
func ownWords(next interp.ExecHandlerFunc) interp.ExecHandlerFunc {
	return func(ctx context.Context, args []string) error {
		w, ok := words[args[0]]
		if !ok {
			return next(ctx, args)
		}
		c := &call{HandlerContext: interp.HandlerCtx(ctx), ctx: ctx, args: args[1:], opt: make(map[byte]string)}
		name, _, _ := strings.Cut(args[0], " ")
		err := c.options(w.opts)
		if err == nil {
			err = w.run(c)
		}
		if _, ok := errors.AsType[interp.ExitStatus](err); ok || err == nil || ctx.Err() != nil {
			return err
		}
		if errors.Is(err, unix.EPIPE) || errors.Is(err, io.ErrClosedPipe) { // as head leaves it to the others
			return interp.ExitStatus(128 + int(unix.SIGPIPE))
		}
		if errors.Is(err, errUsage) {
			err = fmt.Errorf("%w; it is used as: %s", err, strings.TrimSpace(name+" "+w.usage))
		}
		fmt.Fprintf(c.Stderr, "%s: %v\n", name, err)
		if name == "grep" || name == "sort" { // to them 1 says something else
			return interp.ExitStatus(2)
		}
		return interp.ExitStatus(1)
	}
}

var errUsage = errors.New("not understood")

// call is one word with its arguments.
type call struct {
	interp.HandlerContext
	ctx  context.Context
	args []string // without the options
	opt  map[byte]string
}

// options takes the options off the arguments.
func (c *call) options(known string) error {
	for len(c.args) > 0 {
		arg := c.args[0]
		if len(arg) < 2 || arg[0] != '-' {
			return nil
		}
		if number(arg[1:]) && strings.Contains(known, "n:") { // head -5
			arg = "-n" + arg[1:]
		}
		if number(arg[1:]) && known == "" { // seq -5
			return nil
		}
		if known == "s:" && !strings.HasPrefix(arg, "-s") { // kill -9
			return nil
		}
		c.args = c.args[1:]
		if arg == "--" {
			return nil
		}
		for i := 1; i < len(arg); i++ {
			at := strings.IndexByte(known, arg[i])
			if at < 0 || arg[i] == ':' {
				return fmt.Errorf("-%s: %w", arg[i:], errUsage)
			}
			if !strings.HasPrefix(known[at+1:], ":") {
				c.opt[arg[i]] = ""
				continue
			}
			value := arg[i+1:]
			if value == "" {
				if len(c.args) == 0 {
					return fmt.Errorf("%s needs a value: %w", arg, errUsage)
				}
				value, c.args = c.args[0], c.args[1:]
			}
			c.opt[arg[i]] = value
			break
		}
	}
	return nil
}

func number(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

func (c *call) has(option byte) bool {
	_, ok := c.opt[option]
	return ok
}

func (c *call) path(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(c.Dir, name)
}

// each opens the files that are named, or stdin, one after the other. One that
// cannot be read is told and passed over.
func (c *call) each(do func(name string, r io.Reader) error) error {
	names := c.args
	if len(names) == 0 {
		names = []string{"-"}
	}
	var status error
	for _, name := range names {
		if name == "-" {
			if err := do(name, c.Stdin); err != nil {
				return err
			}
			continue
		}
		f, err := os.Open(c.path(name))
		if err == nil {
			err = do(name, f)
			f.Close()
		}
		if pathErr, ok := errors.AsType[*os.PathError](err); ok {
			fmt.Fprintf(c.Stderr, "%s: %v\n", name, pathErr.Err)
			status = interp.ExitStatus(1)
		} else if err != nil {
			return err
		}
	}
	return status
}

// maxLine bounds a line, in bytes.
const maxLine = 8 << 20

// lines calls do with each line of r until it returns false.
func (c *call) lines(r io.Reader, do func(line string) bool) error {
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxLine)
	for s.Scan() {
		if c.ctx.Err() != nil {
			return c.ctx.Err()
		}
		if !do(s.Text()) {
			return nil
		}
	}
	return s.Err()
}

// sleep is cut short when the shell is told to end.
func (c *call) sleep() error {
	if len(c.args) == 0 {
		return errUsage
	}
	var total float64
	for _, arg := range c.args {
		digits, unit := arg, 1.0
		if n := len(arg); n > 0 {
			if u, ok := map[byte]float64{'s': 1, 'm': 60, 'h': 3600, 'd': 86400}[arg[n-1]]; ok {
				digits, unit = arg[:n-1], u
			}
		}
		n, err := strconv.ParseFloat(digits, 64)
		if err != nil || n < 0 || n != n {
			return fmt.Errorf("%.40q: %w", arg, errUsage)
		}
		total += n * unit
	}
	const longest = 1 << 62 // nanoseconds: people write "sleep infinity" too
	timer := time.NewTimer(time.Duration(min(total*float64(time.Second), longest)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-c.ctx.Done():
		return c.ctx.Err()
	}
}

func (c *call) zone() *time.Location {
	if c.has('u') {
		return time.UTC
	}
	if zone, err := time.LoadLocation(c.Env.Get("TZ").String()); err == nil {
		return zone
	}
	return time.Local
}

// date knows what Go has a layout for, and some more.
func (c *call) date() error {
	now := time.Now().In(c.zone())
	format := "+%a %b %e %H:%M:%S %Z %Y"
	if len(c.args) > 0 {
		format = c.args[0]
	}
	if len(c.args) > 1 || !strings.HasPrefix(format, "+") {
		return errUsage
	}
	layouts := map[byte]string{
		'Y': "2006", 'y': "06", 'm': "01", 'd': "02", 'e': "_2", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'Z': "MST", 'z': "-0700", 'N': "000000000",
		'a': "Mon", 'A': "Monday", 'b': "Jan", 'B': "January", 'F': "2006-01-02", 'T': "15:04:05", 'R': "15:04", 'D': "01/02/06", 'j': "002",
	}
	var out strings.Builder
	for i := 1; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			out.WriteByte(format[i])
			continue
		}
		i++
		switch one := format[i]; {
		case one == 's':
			fmt.Fprint(&out, now.Unix())
		case one == 'u':
			fmt.Fprint(&out, (int(now.Weekday())+6)%7+1)
		case one == 'n':
			out.WriteByte('\n')
		case one == '%':
			out.WriteByte('%')
		case one == 'N':
			fmt.Fprintf(&out, "%09d", now.Nanosecond())
		case layouts[one] != "":
			out.WriteString(now.Format(layouts[one]))
		default:
			return fmt.Errorf("%%%c: %w", one, errUsage)
		}
	}
	_, err := fmt.Fprintln(c.Stdout, out.String())
	return err
}

func (c *call) env() error {
	if len(c.args) > 0 {
		return fmt.Errorf("it only lists; a variable for one command is set before it, as in A=1 COMMAND: %w", errUsage)
	}
	all := make(map[string]string)
	for name, v := range c.Env.Each {
		if v.Exported && v.Kind == expand.String {
			all[name] = v.Str
		} else {
			delete(all, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if _, err := fmt.Fprintf(c.Stdout, "%s=%s\n", name, all[name]); err != nil {
			return err
		}
	}
	return nil
}

func (c *call) id() error {
	uid, gid := strconv.Itoa(os.Getuid()), strconv.Itoa(os.Getgid())
	group := gid
	if g, err := user.LookupGroupId(gid); err == nil {
		group = g.Name
	}
	text := fmt.Sprintf("uid=%s(%s) gid=%s(%s)", uid, username(), gid, group)
	switch {
	case len(c.args) > 0:
		return errUsage
	case c.has('u') && c.has('n'):
		text = username()
	case c.has('u'):
		text = uid
	case c.has('g'):
		text = gid
	}
	_, err := fmt.Fprintln(c.Stdout, text)
	return err
}

func (c *call) whoami() error {
	_, err := fmt.Fprintln(c.Stdout, username())
	return err
}

// username returns the name of this process's user, or its number.
func username() string {
	uid := strconv.Itoa(os.Getuid())
	if u, err := user.LookupId(uid); err == nil {
		return u.Username
	}
	return uid
}

func (c *call) hostname() error {
	name, err := os.Hostname()
	if err == nil {
		_, err = fmt.Fprintln(c.Stdout, name)
	}
	return err
}

func (c *call) uname() error {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	var parts []string
	for _, p := range []struct {
		option byte
		text   []byte
	}{{'s', u.Sysname[:]}, {'n', u.Nodename[:]}, {'r', u.Release[:]}, {'v', u.Version[:]}, {'m', u.Machine[:]}} {
		if c.has(p.option) || c.has('a') || len(c.opt) == 0 && p.option == 's' {
			parts = append(parts, unix.ByteSliceToString(p.text))
		}
	}
	_, err := fmt.Fprintln(c.Stdout, strings.Join(parts, " "))
	return err
}

// ps lists the processes of the container.
func (c *call) ps() error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	out := bufio.NewWriter(c.Stdout)
	fmt.Fprintf(out, "%7s COMMAND\n", "PID")
	slices.SortStableFunc(entries, func(a, b os.DirEntry) int { return len(a.Name()) - len(b.Name()) }) // as numbers
	for _, e := range entries {
		if !number(e.Name()) {
			continue
		}
		line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err != nil {
			continue // it is gone
		}
		text := strings.TrimSpace(strings.ReplaceAll(string(line), "\x00", " "))
		if text == "" {
			comm, _ := os.ReadFile("/proc/" + e.Name() + "/comm")
			text = "[" + strings.TrimSpace(string(comm)) + "]"
		}
		fmt.Fprintf(out, "%7s %s\n", e.Name(), strings.ToValidUTF8(text, "?"))
	}
	return out.Flush()
}

// kill sends a signal to processes by their numbers.
func (c *call) kill() error {
	name := "TERM"
	if given, ok := c.opt['s']; ok {
		name = given
	} else if len(c.args) > 1 && len(c.args[0]) > 1 && c.args[0][0] == '-' {
		name, c.args = c.args[0][1:], c.args[1:]
	}
	signal, err := strconv.Atoi(name)
	if err != nil {
		signal = int(unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG")))
	}
	if signal < 0 || signal > 64 || signal == 0 && name != "0" || len(c.args) == 0 {
		return errUsage
	}
	for _, arg := range c.args {
		pid, err := strconv.Atoi(arg)
		if err != nil {
			return fmt.Errorf("%.40q is no number of a process, as ps shows them; what this shell has put into the background ends with it: %w", arg, errUsage)
		}
		if err := unix.Kill(pid, unix.Signal(signal)); err != nil {
			return fmt.Errorf("%d: %w", pid, err)
		}
	}
	return nil
}

func (c *call) basename() error {
	if len(c.args) < 1 || len(c.args) > 2 {
		return errUsage
	}
	name := path.Base(c.args[0])
	if len(c.args) == 2 && name != c.args[1] {
		name = strings.TrimSuffix(name, c.args[1])
	}
	_, err := fmt.Fprintln(c.Stdout, name)
	return err
}

func (c *call) dirname() error {
	if len(c.args) != 1 {
		return errUsage
	}
	name := strings.TrimRight(c.args[0], "/")
	if name == "" && c.args[0] != "" {
		name = "/"
	}
	_, err := fmt.Fprintln(c.Stdout, path.Dir(name))
	return err
}

func (c *call) seq() error {
	from, step, to := int64(1), int64(1), int64(0)
	into := map[int][]*int64{1: {&to}, 2: {&from, &to}, 3: {&from, &step, &to}}[len(c.args)]
	if into == nil {
		return errUsage
	}
	for i, at := range into {
		n, err := strconv.ParseInt(c.args[i], 10, 32)
		if err != nil {
			return fmt.Errorf("%.40q is no whole number: %w", c.args[i], errUsage)
		}
		*at = n
	}
	if step == 0 {
		return errUsage
	}
	out := bufio.NewWriter(c.Stdout)
	for n := from; step > 0 && n <= to || step < 0 && n >= to; n += step {
		if _, err := fmt.Fprintln(out, n); err != nil || c.ctx.Err() != nil {
			return errors.Join(err, c.ctx.Err())
		}
	}
	return out.Flush()
}

func (c *call) tee() error {
	flag := os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	if c.has('a') {
		flag = os.O_WRONLY | os.O_CREATE | os.O_APPEND
	}
	to := []io.Writer{c.Stdout}
	for _, name := range c.args {
		f, err := os.OpenFile(c.path(name), flag, 0o666)
		if err != nil {
			return err
		}
		defer f.Close()
		to = append(to, f)
	}
	_, err := io.Copy(io.MultiWriter(to...), c.Stdin)
	return err
}
