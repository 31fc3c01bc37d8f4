package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/rig"
	"berth/orchestrator/internal/web"
)

// folders are the victims.
var folders = []string{"main", "family", "work", "club"}

// budget is how many requests to a provider a group may make.
const budget = 100

// prepare makes the root, the canaries and the traps, and starts the daemon.
func (p *play) prepare(ctx context.Context) error {
	p.client = web.NewClient(filepath.Join(p.root(), "store", "berth.sock"))
	p.victims = newVictims(p.client, p.out)
	var err error
	if p.traps, err = setTraps(filepath.Base(p.dir)); err != nil {
		return err
	}
	if err := p.place(); err != nil {
		return err
	}
	groups := []berth.Group{{
		JID: "console:" + attacker, Name: attacker, Folder: attacker, AddedAt: time.Now(),
		Container: berth.ContainerConfig{
			Engine: "builtin", MemoryMiB: 400, Egress: []string{"*.attack.example", "loopback.attack.example:" + p.traps.port},
			AdditionalMounts: p.wishes(),
		},
	}}
	for _, f := range folders {
		groups = append(groups, berth.Group{JID: "console:" + f, Name: f, Folder: f, AddedAt: time.Now()})
	}
	if err := rig.MakeRoot(ctx, p.root(), p.install, groups); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(p.dir, "berth.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.program, "run", "--root", p.root())
	if err := p.privateNames(cmd); err != nil {
		return err
	}
	cmd.Env = rig.Environ("HOME="+filepath.Join(p.dir, "home"), "TZ=UTC", "AGENT_ENGINE=probe", "MAX_CONCURRENT_CONTAINERS=5", "CONTAINER_CPUSET="+p.cpuset,
		"BERTH_MOUNT_ALLOWLIST="+p.allowlist(), fmt.Sprintf("DAILY_REQUESTS=%d", budget),
		"ANTHROPIC_BASE_URL="+p.traps.provider, "ANTHROPIC_API_KEY="+p.traps.key)
	cmd.Dir, cmd.Stderr = p.dir, log
	if p.daemon, err = rig.Start(cmd); err != nil {
		return err
	}
	for deadline := time.Now().Add(rig.Patience); ; {
		if s, err := p.client.Status(ctx); err == nil && s.Ready {
			return nil
		}
		select {
		case <-p.daemon.Ended():
			return fmt.Errorf("the daemon ended: %w", p.daemon.Err())
		default:
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the daemon is not ready after %v", rig.Patience)
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// privateNames gives the daemon names of the egress list that lead to private
// addresses. That takes a mount name space, and so root; without, the names lead
// nowhere.
func (p *play) privateNames(cmd *exec.Cmd) error {
	unshare, err := exec.LookPath("unshare")
	if os.Geteuid() != 0 || err != nil {
		p.say("not root, or no unshare here: names that resolve to private addresses are not tried")
		return nil
	}
	known, err := os.ReadFile("/etc/hosts")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	hosts := filepath.Join(p.dir, "hosts")
	names := "\n127.0.0.1 loopback.attack.example\n169.254.169.254 metadata.attack.example\n10.1.2.3 lan.attack.example\nfd00::1 six.attack.example\n"
	if err := os.WriteFile(hosts, append(known, names...), 0o644); err != nil {
		return err
	}
	cmd.Args = append([]string{unshare, "--mount", "sh", "-c", `mount --bind "$0" /etc/hosts && exec "$@"`, hosts}, cmd.Args...)
	cmd.Path = unshare
	p.report.names = true
	return nil
}

// place puts canaries wherever a container might get at: beside the root, in the
// operator's configuration, the store, and the other groups' folders. Their song is
// searched for everywhere else in the end.
func (p *play) place() error {
	write := func(path, format string) error {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		return os.WriteFile(path, []byte(strings.ReplaceAll(format, "SONG", song+berth.NewID(12))), 0o644)
	}
	list, err := json.MarshalIndent(map[string]any{
		"allowedRoots": []map[string]any{
			{"path": p.open(), "allowReadWrite": true, "description": "SONG"},
			{"path": filepath.Join(p.dir, "host", "readonly"), "allowReadWrite": false},
		},
		"blockedPatterns": []string{}, "nonMainReadOnly": false,
	}, "", "  ")
	if err != nil {
		return err
	}
	errs := []error{write(p.allowlist(), string(list)), os.MkdirAll(filepath.Join(p.dir, "home"), 0o755)}
	for i := range 20 {
		errs = append(errs, write(filepath.Join(p.canaries(), fmt.Sprintf("canary-%d", i)), "SONG\n"))
	}
	request := `{"type":"message","chatJid":"console:evil","text":"SONG"}`
	errs = append(errs,
		write(filepath.Join(p.canaries(), "request.json"), request),
		write(filepath.Join(p.canaries(), "frame"), `{"type":"output","status":"success","seq":1,"result":"SONG"}`),
		write(filepath.Join(p.canaries(), "deep", "er", "canary.json"), request),
		write(filepath.Join(p.root(), "store", "canary"), "SONG\n"),
		write(filepath.Join(p.root(), "groups", "global", "canary"), "nothing that a group may not read\n"),
		write(filepath.Join(p.open(), "photos", "beach"), "sun and sand\n"),
		write(filepath.Join(p.open(), "store", "list"), "bread\n"),
		write(filepath.Join(p.open(), "up", "hill"), "a view\n"),
		write(filepath.Join(p.open(), "keys", ".ssh", "id"), "a key\n"),
		write(filepath.Join(p.dir, "host", "readonly", "book"), "chapter one\n"),
		os.Symlink(p.canaries(), filepath.Join(p.open(), "way-out")),
	)
	for _, f := range folders {
		errs = append(errs, write(filepath.Join(p.root(), "groups", f, "secret"), "SONG\n"), write(filepath.Join(p.root(), "data", "sessions", f, "secret"), "SONG\n"))
	}
	if os.Geteuid() == 0 { // what a group may write is its container's, as in a root that has lived for a while
		errs = append(errs, chown(p.open()))
		for _, f := range folders {
			errs = append(errs, chown(filepath.Join(p.root(), "groups", f)), chown(filepath.Join(p.root(), "data", "sessions", f)))
		}
	}
	return errors.Join(errs...)
}

// agent is the containers' user where the daemon is root. All files that must not
// be seen are open to it: only the containers' walls keep it from them.
const agent = 1000

func chown(dir string) error {
	return filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, agent, agent)
	})
}

// wishes are the folders that the attacker's group asks for.
func (p *play) wishes() []berth.MountRequest {
	ask := func(path, name string) berth.MountRequest {
		return berth.MountRequest{HostPath: path, ContainerPath: name, ReadOnly: new(false)}
	}
	open := p.open()
	return []berth.MountRequest{
		ask(open, "shared"), ask(open+"/photos", ""), ask(open+"/store", ""), ask(open+"/up", ""), ask(filepath.Join(p.dir, "host", "readonly"), ""),
		ask("/", "slash"), ask("/etc", ""), ask("/proc", ""), ask("/proc/self/root", "proc-root"), ask("/var/run/docker.sock", ""), ask("/var/run", ""), ask("/var/lib/docker", ""),
		ask(filepath.Join(p.dir, "home"), ""), ask("~", "tilde"), ask(p.dir, "parent"), ask(p.root(), ""), ask(filepath.Join(p.root(), "store"), "the-store"),
		ask(filepath.Join(p.root(), "groups", "family"), ""), ask(filepath.Dir(p.allowlist()), ""), ask(p.allowlist(), ""), ask(p.program, ""),
		ask(p.canaries(), ""), ask(open+"/../../canary", "dots"), ask(open+"/way-out", ""), ask(open+"/keys", ""), ask(open+"/keys/.ssh", "ssh"),
		ask(open+"/photos", "../up-and-out"), ask(open+"/photos", "a/b"), ask(open+"/photos", "shared"), ask(open+"/photos", "x:rw"), ask(open+"/photos", "x,readonly=false"),
		ask(open+"/photos", "a\nb"), ask(open+"/photos", ".."), ask(open+"/photos:/etc:rw", "colon"), ask("canary", ""), ask(open+"/photos\x00", "zero"), ask(open+"/nowhere", ""),
	}
}

// environ is what the attacker may know: where everything is, but not what is in
// it.
func (p *play) environ() string {
	var canaries, addresses []string
	for _, path := range slices.Sorted(maps.Keys(p.secrets.files)) {
		if info, err := os.Lstat(path); err == nil && info.Mode().IsRegular() && path != p.program {
			canaries = append(canaries, path)
		}
	}
	addresses = append(addresses, net.JoinHostPort("172.17.0.1", p.traps.port)) // the usual bridge of the engine
	interfaces, _ := net.InterfaceAddrs()
	for _, a := range interfaces {
		if n, ok := a.(*net.IPNet); ok && (n.IP.To4() != nil || !n.IP.IsLinkLocalUnicast()) {
			addresses = append(addresses, net.JoinHostPort(n.IP.String(), p.traps.port))
		}
	}
	var words []string
	for name, value := range map[string]string{
		"CHAT": "console:" + attacker, "OTHER": "console:family", "TASK": "task-of-family", "PORT": p.traps.port,
		"CANARY": p.canaries(), "CANARIES": strings.Join(canaries, " "), "STORE": filepath.Join(p.root(), "store"), "ALLOWLIST": p.allowlist(),
		"SECRET": filepath.Join(p.root(), "groups", "family", "secret"), "ABSTRACT": filepath.Base(p.dir), "ADDRESSES": strings.Join(addresses, " "),
	} {
		words = append(words, name+"='"+value+"'")
	}
	return strings.Join(words, " ")
}

// traps are what the host would notice of an attacker that got out.
type traps struct {
	port          string // on all addresses of the host
	provider, key string
	called        atomic.Int64 // connections to the port and to the abstract socket
	served        atomic.Int64 // requests to the provider with the key
	keyless       atomic.Int64 // and without
	closers       []func() error
}

// setTraps listens where nobody may come, and plays a model's API that tells all
// it got.
func setTraps(abstract string) (*traps, error) {
	t := &traps{key: keyPrefix + berth.NewID(16)}
	everywhere, err := net.Listen("tcp", ":0")
	if err != nil {
		return nil, err
	}
	hidden, err := net.Listen("unix", "@"+abstract)
	if err != nil {
		return nil, errors.Join(err, everywhere.Close())
	}
	t.closers = append(t.closers, everywhere.Close, hidden.Close)
	for _, l := range []net.Listener{everywhere, hidden} {
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				t.called.Add(1)
				c.Close()
			}
		}()
	}
	_, t.port, _ = net.SplitHostPort(everywhere.Addr().String())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.close()
		return nil, err
	}
	t.provider = "http://" + l.Addr().String()
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Api-Key") != t.key {
			t.keyless.Add(1)
			http.Error(w, "who are you", http.StatusUnauthorized)
			return
		}
		t.served.Add(1)
		w.Header().Set("X-Echo", t.key)
		fmt.Fprintf(w, "you sent %v, and so your key is %s", r.Header, t.key)
	})}
	t.closers = append(t.closers, server.Close)
	go func() { _ = server.Serve(l) }() // until it is closed
	return t, nil
}

func (t *traps) close() {
	for _, c := range t.closers {
		_ = c() // nothing depends on it any more
	}
}
