package mount

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"berth/orchestrator/internal/berth"
)

// host is a home folder as in the conformance table: ~/projects writable,
// ~/ro read-only, ~/missing not there.
type host struct {
	home, state, file string
	list              Allowlist
}

const listJSON = `{
	"allowedRoots": [
		{"path": "~/projects", "allowReadWrite": true},
		{"path": "~/ro", "allowReadWrite": false, "description": "read-only"},
		{"path": "~/missing", "allowReadWrite": true}
	],
	"blockedPatterns": ["password", "token", "*.pem"],
	"nonMainReadOnly": true
}`

func newHost(t testing.TB) *host {
	t.Helper()
	home, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h := &host{
		home:  home,
		state: filepath.Join(home, "berth"),
		file:  filepath.Join(home, ".config/berth/mount-allowlist.json"),
	}
	h.mkdir(t, "projects/app/src", "projects/my café", "projects2", "ro/doc", "outside", ".ssh",
		"berth/store", ".config/berth")
	h.write(t, ".config/berth/mount-allowlist.json", listJSON)
	h.list.guard = Guard{Home: h.home, StateRoot: h.state, Allowlist: h.file}
	return h
}

func (h *host) mkdir(t testing.TB, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		if err := os.MkdirAll(filepath.Join(h.home, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
}

func (h *host) write(t testing.TB, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(h.home, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (h *host) link(t testing.TB, target, name string) {
	t.Helper()
	if err := os.Symlink(target, filepath.Join(h.home, name)); err != nil {
		t.Fatal(err)
	}
}

// resolve judges one request; H stands for the home folder in its path.
func (h *host) resolve(request berth.MountRequest, main bool) Verdict {
	request.HostPath = strings.Replace(request.HostPath, "H/", h.home+"/", 1)
	return h.list.Resolve([]berth.MountRequest{request}, main)[0]
}

func (h *host) wantRefused(t *testing.T, hostPath, reason string) {
	t.Helper()
	v := h.resolve(berth.MountRequest{HostPath: hostPath}, true)
	if v.Allowed || !strings.Contains(v.Reason, reason) || v.Mount != (berth.Mount{}) {
		t.Errorf("%q: got %+v, want it refused for %q", hostPath, v, reason)
	}
}

func TestConformance(t *testing.T) {
	h := newHost(t)
	h.link(t, h.home+"/.ssh", "projects/keys")
	h.link(t, h.home+"/outside", "projects/out")
	h.link(t, "app", "projects/current")
	h.link(t, "nowhere", "projects/dangling")
	h.link(t, h.home+"/projects", "p")

	const refused = "" // no source: the mount is refused
	tests := []struct {
		name     string
		request  berth.MountRequest
		group    bool // asked by a group that is not main
		source   string
		target   string
		writable bool
		reason   string
	}{
		{name: "MS-01 read-only by default", request: berth.MountRequest{HostPath: "~/projects/app"}, source: "projects/app", target: "app"},
		{name: "MS-02 read-only asked", request: berth.MountRequest{HostPath: "~/projects/app", ReadOnly: new(true)}, source: "projects/app", target: "app"},
		{name: "MS-03 writing asked by main", request: berth.MountRequest{HostPath: "~/projects/app", ReadOnly: new(false)}, source: "projects/app", target: "app", writable: true},
		{name: "MS-04 writing asked by a group", request: berth.MountRequest{HostPath: "~/projects/app", ReadOnly: new(false)}, group: true, source: "projects/app", target: "app"},
		{name: "MS-05 writing under a read-only root", request: berth.MountRequest{HostPath: "~/ro/doc", ReadOnly: new(false)}, source: "ro/doc", target: "doc"},
		{name: "MS-08 the root itself", request: berth.MountRequest{HostPath: "~/ro"}, source: "ro", target: "ro"},
		{name: "MS-09 below a root", request: berth.MountRequest{HostPath: "~/projects/app/src"}, source: "projects/app/src", target: "src"},
		{name: "MS-10 same prefix", request: berth.MountRequest{HostPath: "~/projects2"}, source: refused, reason: "not under any allowed root"},
		{name: "MS-11 outside", request: berth.MountRequest{HostPath: "~/outside"}, source: refused, reason: "not under any allowed root"},
		{name: "MS-12 out by dots", request: berth.MountRequest{HostPath: "H/projects/../outside"}, source: refused, reason: "not under any allowed root"},
		{name: "MS-13 in by dots", request: berth.MountRequest{HostPath: "H/outside/../projects/app"}, source: "projects/app", target: "app"},
		{name: "MS-14 not there", request: berth.MountRequest{HostPath: "~/projects/none"}, source: refused, reason: "does not exist"},
		{name: "MS-15 blocked", request: berth.MountRequest{HostPath: "~/.ssh"}, source: refused, reason: `".ssh"`},
		{name: "MS-16 link to blocked", request: berth.MountRequest{HostPath: "~/projects/keys"}, source: refused, reason: `".ssh"`},
		{name: "MS-17 link to outside", request: berth.MountRequest{HostPath: "~/projects/out"}, source: refused, reason: "not under any allowed root"},
		{name: "MS-18 link to inside", request: berth.MountRequest{HostPath: "~/projects/current"}, source: "projects/app", target: "current"},
		{name: "MS-19 dangling link", request: berth.MountRequest{HostPath: "~/projects/dangling"}, source: refused, reason: "does not exist"},
		{name: "MS-20 through a link to the root", request: berth.MountRequest{HostPath: "~/p/app"}, source: "projects/app", target: "app"},
		{name: "MS-21 a root that is not there", request: berth.MountRequest{HostPath: "~/missing"}, source: refused, reason: "does not exist"},
		{name: "MS-22 name with dots up", request: berth.MountRequest{HostPath: "~/projects/app", ContainerPath: "../x"}, source: refused, reason: "containerPath"},
		{name: "MS-22 name with dots inside", request: berth.MountRequest{HostPath: "~/projects/app", ContainerPath: "a/../b"}, source: refused, reason: "containerPath"},
		{name: "MS-23 absolute name", request: berth.MountRequest{HostPath: "~/projects/app", ContainerPath: "/etc"}, source: refused, reason: "containerPath"},
		{name: "MS-24 blank name", request: berth.MountRequest{HostPath: "~/projects/app", ContainerPath: "  "}, source: refused, reason: "containerPath"},
		{name: "MS-25 name of the folder", request: berth.MountRequest{HostPath: "~/projects/app/"}, source: "projects/app", target: "app"},
		{name: "MS-25 name asked", request: berth.MountRequest{HostPath: "~/projects/app", ContainerPath: "my_App-1.0"}, source: "projects/app", target: "my_App-1.0"},
		{name: "MS-26 name with a mode", request: berth.MountRequest{HostPath: "~/projects/app", ContainerPath: "x:rw"}, source: refused, reason: "containerPath"},
		{name: "MS-27 the file system", request: berth.MountRequest{HostPath: "/"}, source: refused, reason: "name"},
		{name: "MS-27 nothing", request: berth.MountRequest{}, source: refused, reason: "empty"},
		{name: "MS-28 the file system under a name", request: berth.MountRequest{HostPath: "/", ContainerPath: "x"}, source: refused, reason: "never mounted"},
		{name: "MS-29 home", request: berth.MountRequest{HostPath: "~"}, source: refused, reason: "home folder"},
		{name: "MS-29 another's home", request: berth.MountRequest{HostPath: "~root/x"}, source: refused, reason: "absolute path"},
		{name: "MS-29 relative", request: berth.MountRequest{HostPath: "src"}, source: refused, reason: "absolute path"},
		{name: "MS-30 spaces and Unicode", request: berth.MountRequest{HostPath: "~/projects/my café"}, source: "projects/my café", target: "my café"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := h.resolve(tt.request, !tt.group)
			if tt.source == refused {
				if got.Allowed || !strings.Contains(got.Reason, tt.reason) {
					t.Errorf("got %+v, want it refused for %q", got, tt.reason)
				}
				return
			}
			want := berth.Mount{Source: filepath.Join(h.home, tt.source), Target: "/workspace/extra/" + tt.target, ReadOnly: !tt.writable}
			if !got.Allowed || got.Mount != want || got.Reason != "" {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

func TestMS06WritingForGroups(t *testing.T) {
	h := newHost(t)
	h.write(t, ".config/berth/mount-allowlist.json", strings.Replace(listJSON, `"nonMainReadOnly": true`, `"nonMainReadOnly": false`, 1))
	if v := h.resolve(berth.MountRequest{HostPath: "~/projects/app", ReadOnly: new(false)}, false); !v.Allowed || v.Mount.ReadOnly {
		t.Errorf("got %+v, want it writable", v)
	}
	if v := h.resolve(berth.MountRequest{HostPath: "~/ro/doc", ReadOnly: new(false)}, false); !v.Allowed || !v.Mount.ReadOnly {
		t.Errorf("got %+v, want it read-only", v)
	}
}

func TestMS07OnlyFalseAsksForWriting(t *testing.T) {
	for _, text := range []string{`"false"`, `0`, `null`, `""`} {
		var request berth.MountRequest
		err := json.Unmarshal([]byte(`{"hostPath":"~/projects/app","readonly":`+text+`}`), &request)
		if err != nil {
			continue // never becomes a request
		}
		if v := newHost(t).resolve(request, true); v.Allowed && !v.Mount.ReadOnly {
			t.Errorf("readonly %s: got %+v, want it read-only", text, v)
		}
	}
}

func TestMS31NoFile(t *testing.T) {
	h := newHost(t)
	request := berth.MountRequest{HostPath: "~/projects/app"}
	if err := os.Remove(h.file); err != nil {
		t.Fatal(err)
	}
	if v := h.resolve(request, true); v.Allowed || !strings.Contains(v.Reason, h.file) {
		t.Errorf("got %+v, want a refusal that names the missing file", v)
	}
	if got := h.list.Alarm(); got != "" {
		t.Errorf("got alarm %q, want none: no file is how mounts are off", got)
	}
	h.write(t, ".config/berth/mount-allowlist.json", listJSON)
	if v := h.resolve(request, true); !v.Allowed {
		t.Errorf("got %+v after the file appeared, want it allowed", v)
	}
	if err := os.Remove(h.file); err != nil {
		t.Fatal(err)
	}
	if v := h.resolve(request, true); v.Allowed {
		t.Errorf("got %+v after the file was removed, want it refused", v)
	}
}

func TestMS32BrokenFile(t *testing.T) {
	tests := map[string]struct{ text, want string }{
		"empty":               {"", "empty"},
		"not JSON":            {"{", "JSON"},
		"trailing":            {listJSON + "{}", "follows"},
		"null":                {"null", "missing"},
		"list":                {"[]", "JSON"},
		"no keys":             {"{}", "nonMainReadOnly"},
		"roots no list":       {strings.Replace(listJSON, `"allowedRoots": [`, `"allowedRoots": 1, "x": [`, 1), "JSON"},
		"patterns no list":    {strings.Replace(listJSON, `["password", "token", "*.pem"]`, `"password"`, 1), "JSON"},
		"switch no boolean":   {strings.Replace(listJSON, `"nonMainReadOnly": true`, `"nonMainReadOnly": "yes"`, 1), "JSON"},
		"switch missing":      {strings.Replace(listJSON, `"nonMainReadOnly": true`, `"allowedRoots": []`, 1), "nonMainReadOnly"},
		"unknown key":         {strings.Replace(listJSON, `"description"`, `"descripton"`, 1), "descripton"},
		"relative root":       {strings.Replace(listJSON, `"~/ro"`, `"ro"`, 1), `"ro"`},
		"root without a path": {strings.Replace(listJSON, `"path": "~/ro", `, ``, 1), "empty"},
		"pattern with slash":  {strings.Replace(listJSON, `"token"`, `"a/b"`, 1), `"a/b"`},
		"pattern malformed":   {strings.Replace(listJSON, `"token"`, `"[a"`, 1), `"[a"`},
		"pattern empty":       {strings.Replace(listJSON, `"token"`, `""`, 1), "pattern"},
		"too large":           {listJSON + strings.Repeat(" ", maxFile), "1 MiB"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.write(t, ".config/berth/mount-allowlist.json", tt.text)
			v := h.resolve(berth.MountRequest{HostPath: "~/projects/app"}, true)
			if v.Allowed || !strings.Contains(v.Reason, tt.want) || !strings.Contains(v.Reason, h.file) {
				t.Errorf("got %+v, want it refused for %q, naming the file", v, tt.want)
			}
			if got := h.list.Alarm(); !strings.Contains(got, tt.want) {
				t.Errorf("got alarm %q, want %q in it", got, tt.want)
			}
		})
	}
	t.Run("folder", func(t *testing.T) {
		if _, err := Load(t.TempDir()); err == nil || !strings.Contains(err.Error(), "regular") {
			t.Errorf("got %v, want it refused", err)
		}
	})
	t.Run("missing", func(t *testing.T) {
		if _, err := Load(filepath.Join(t.TempDir(), "none.json")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("got %v, want fs.ErrNotExist", err)
		}
	})
}

func TestMS33DefaultPatterns(t *testing.T) {
	h := newHost(t)
	patterns := DefaultPatterns()
	if len(patterns) != 17 {
		t.Errorf("got %d default patterns, want 17", len(patterns))
	}
	for _, pattern := range patterns {
		dir := "projects/x/" + pattern + "/deep"
		h.mkdir(t, dir)
		h.wantRefused(t, "~/"+dir, fmt.Sprintf("blocked pattern %q", pattern))
		h.wantRefused(t, "~/projects/x/"+pattern, fmt.Sprintf("blocked pattern %q", pattern))
	}
	h.write(t, "projects/id_ed25519", "key")
	h.wantRefused(t, "~/projects/id_ed25519", "id_ed25519")
}

func TestMS34OneBadAmongGood(t *testing.T) {
	h := newHost(t)
	got := h.list.Resolve([]berth.MountRequest{
		{HostPath: "~/projects/app"}, {HostPath: "~/outside"}, {HostPath: "~/ro/doc"},
	}, true)
	if len(got) != 3 || !got[0].Allowed || got[1].Allowed || !got[2].Allowed || got[1].Reason == "" {
		t.Errorf("got %+v, want the middle one refused", got)
	}
}

func TestMS35Example(t *testing.T) {
	list, err := Load("../../../mount-allowlist.example.json")
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Roots()) == 0 || !list.NonMainReadOnly() || !slices.Contains(list.Patterns(), "password") {
		t.Errorf("got %+v, want roots, patterns and nonMainReadOnly", list)
	}
}

func TestMS48AllowlistIsOutOfReach(t *testing.T) {
	h := newHost(t)
	h.openHome(t)
	h.wantRefused(t, "~/.config/berth", "allowlist")
	h.wantRefused(t, "~/.config", "allowlist")
	h.wantRefused(t, "~/.config/berth/mount-allowlist.json", "allowlist")
	h.link(t, h.home+"/.config", "conf")
	h.wantRefused(t, "~/conf", "allowlist")

	// The file may be a link into a folder of dotfiles.
	h.mkdir(t, "dotfiles")
	h.write(t, "dotfiles/list.json", strings.Replace(listJSON, "~/projects", "~", 1))
	if err := os.Remove(h.file); err != nil {
		t.Fatal(err)
	}
	h.link(t, h.home+"/dotfiles/list.json", ".config/berth/mount-allowlist.json")
	h.wantRefused(t, "~/dotfiles", "allowlist")
	h.wantRefused(t, "~/.config/berth", "allowlist")
}

// openHome makes the operator's mistake of allowing the whole home folder.
func (h *host) openHome(t *testing.T) {
	t.Helper()
	h.write(t, ".config/berth/mount-allowlist.json", strings.Replace(listJSON, "~/projects", "~", 1))
}

func TestW47RefusedWhateverTheFileSays(t *testing.T) {
	h := newHost(t)
	h.openHome(t)
	if v := h.resolve(berth.MountRequest{HostPath: "~/outside", ReadOnly: new(false)}, true); !v.Allowed {
		t.Fatalf("got %+v, want an allowed home to work", v)
	}
	h.wantRefused(t, "~", "home folder")
	h.wantRefused(t, "~/berth", "state root")
	h.wantRefused(t, "~/berth/store", "state root")
	h.wantRefused(t, filepath.Dir(h.home), "home folder")

	h.write(t, ".config/berth/mount-allowlist.json", `{"allowedRoots":[{"path":"/","allowReadWrite":true}],"blockedPatterns":[],"nonMainReadOnly":false}`)
	h.wantRefused(t, "/proc/self", "/proc")
	h.wantRefused(t, "/sys", "/sys")
	h.wantRefused(t, "/dev", "/dev")
	h.wantRefused(t, "/run", "")
	h.wantRefused(t, "/tmp/../tmp/..", "name")

	h.mkdir(t, "outer/state/store")
	h.list.guard.StateRoot = filepath.Join(h.home, "outer/state")
	h.wantRefused(t, "~/outer", "state root")
	h.link(t, h.home+"/outer", "o")
	h.wantRefused(t, "~/o/state/store", "state root")

	h.mkdir(t, "opt/bin")
	h.write(t, "opt/bin/berth", "")
	h.list.guard.Program = filepath.Join(h.home, "opt/bin/berth")
	h.wantRefused(t, "~/opt", "program")
	h.wantRefused(t, "~/opt/bin", "program")
}

func TestW47EngineSocket(t *testing.T) {
	h := newHost(t)
	h.openHome(t)
	h.mkdir(t, "s", "t/u")
	for _, name := range []string{"s/docker.sock", "t/u/x.sock"} {
		l, err := net.Listen("unix", filepath.Join(h.home, name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	}
	h.wantRefused(t, "~/s", "socket")
	h.wantRefused(t, "~/s/docker.sock", "neither a folder nor a regular file")
	if v := h.resolve(berth.MountRequest{HostPath: "~/t"}, true); !v.Allowed {
		t.Errorf("got %+v, want another program's socket to be no matter", v)
	}
	h.list.guard.Sockets = []string{filepath.Join(h.home, "t/u/x.sock")}
	h.wantRefused(t, "~/t", "socket")
	h.wantRefused(t, "~/t/u", "socket")
}

func TestW47BlockedChildren(t *testing.T) {
	h := newHost(t)
	h.mkdir(t, "projects/parent/.SSH", "projects/parent/ok", "projects/grand/parent/.aws")
	h.wantRefused(t, "~/projects/parent", ".SSH")
	if v := h.resolve(berth.MountRequest{HostPath: "~/projects/parent/ok"}, true); !v.Allowed {
		t.Errorf("got %+v, want a clean child allowed", v)
	}
	// The documented bound: direct children only.
	if v := h.resolve(berth.MountRequest{HostPath: "~/projects/grand"}, true); !v.Allowed {
		t.Errorf("got %+v, want it allowed", v)
	}
}

func TestW48PatternsMatchComponents(t *testing.T) {
	h := newHost(t)
	for _, dir := range []string{"my.environment", "tokenizer", "docs-credentials-free", "password-store"} {
		h.mkdir(t, "projects/"+dir)
		if v := h.resolve(berth.MountRequest{HostPath: "~/projects/" + dir}, true); !v.Allowed {
			t.Errorf("%s: got %+v, want it allowed", dir, v)
		}
	}
	for _, dir := range []string{".SSH", "PRIVATE_KEY", "Token", "Server.PEM", ".\u212aube", ".\u017fsh"} {
		h.mkdir(t, "projects/"+dir)
		h.wantRefused(t, "~/projects/"+dir, "blocked pattern")
	}
}

func TestW49ForbiddenCharacters(t *testing.T) {
	h := newHost(t)
	for _, dir := range []string{"a:b", "a,b", "a\nb", "a\x7fb", "a\u0085b", "a\xffb"} {
		h.mkdir(t, "projects/"+dir)
		v := h.resolve(berth.MountRequest{HostPath: "~/projects/" + dir, ContainerPath: "x"}, true)
		if v.Allowed {
			t.Errorf("%q: got %+v, want it refused", dir, v)
		}
	}
	h.link(t, "a:b", "projects/innocent")
	h.wantRefused(t, "~/projects/innocent", "colon")
}

func TestW50Names(t *testing.T) {
	h := newHost(t)
	for _, name := range []string{".", "..", "...", "a,b", "a\nb", "a/", "a/b", "a b", "é", "\x00", strings.Repeat("a", 256)} {
		v := h.resolve(berth.MountRequest{HostPath: "~/projects/app", ContainerPath: name}, true)
		if v.Allowed {
			t.Errorf("%q: got %+v, want it refused", name, v)
		}
	}
	got := h.list.Resolve([]berth.MountRequest{
		{HostPath: "~/projects/app"}, {HostPath: "~/ro/doc", ContainerPath: "app"}, {HostPath: "~/ro/doc"},
	}, true)
	if !got[0].Allowed || got[1].Allowed || !strings.Contains(got[1].Reason, "taken") || !got[2].Allowed {
		t.Errorf("got %+v, want the second refused: its name is taken", got)
	}
}

func TestW52EditsWhileRunning(t *testing.T) {
	h := newHost(t)
	app, outside := berth.MountRequest{HostPath: "~/projects/app"}, berth.MountRequest{HostPath: "~/outside"}
	if v := h.resolve(app, true); !v.Allowed {
		t.Fatalf("got %+v, want it allowed", v)
	}
	h.write(t, ".config/berth/mount-allowlist.json", "{ broken")
	if v := h.resolve(app, true); !v.Allowed {
		t.Errorf("got %+v, want the last good list to hold", v)
	}
	if got := h.list.Alarm(); !strings.Contains(got, "last good") {
		t.Errorf("got alarm %q, want one", got)
	}
	h.openHome(t)
	if v := h.resolve(outside, true); !v.Allowed {
		t.Errorf("got %+v, want the good edit to work at once", v)
	}
	if got := h.list.Alarm(); got != "" {
		t.Errorf("got alarm %q, want none", got)
	}
}

func TestFiles(t *testing.T) {
	h := newHost(t)
	h.write(t, "projects/notes.txt", "x")
	if v := h.resolve(berth.MountRequest{HostPath: "~/projects/notes.txt"}, true); !v.Allowed || v.Mount.Target != "/workspace/extra/notes.txt" {
		t.Errorf("got %+v, want a regular file allowed", v)
	}
}

func TestNilList(t *testing.T) {
	var l *List
	if v := l.Resolve([]berth.MountRequest{{HostPath: "/x"}}, true, Guard{}); v[0].Allowed {
		t.Errorf("got %+v, want it refused", v)
	}
}
