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
	"syscall"
	"testing"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/listfile"
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
			want := berth.Mount{Source: filepath.Join(h.home, tt.source), Target: "/workspace/extra/" + tt.target, ReadOnly: !tt.writable, Alone: true}
			if !got.Allowed || got.Mount != want || got.Reason != "" {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// MS-06: with nonMainReadOnly false, others than main may write as well.
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

// MS-07: readonly "false", 0 and the like ask for nothing.
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

// MS-31: without a file everything is refused, and it may appear at any time.
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

// MS-32: a file of the wrong form opens nothing, and says where it is wrong.
func TestMS32BrokenFile(t *testing.T) {
	tests := map[string]struct{ text, want string }{
		"empty":                {"", "empty"},
		"not JSON":             {"{", "JSON"},
		"trailing":             {listJSON + "{}", "after top-level"},
		"null":                 {"null", "missing"},
		"list":                 {"[]", "JSON"},
		"no keys":              {"{}", "nonMainReadOnly"},
		"roots no list":        {strings.Replace(listJSON, `"allowedRoots": [`, `"allowedRoots": 1, "x": [`, 1), "JSON"},
		"patterns no list":     {strings.Replace(listJSON, `["password", "token", "*.pem"]`, `"password"`, 1), "JSON"},
		"switch no boolean":    {strings.Replace(listJSON, `"nonMainReadOnly": true`, `"nonMainReadOnly": "yes"`, 1), "JSON"},
		"switch missing":       {strings.Replace(listJSON, `"nonMainReadOnly": true`, `"x": true`, 1), "nonMainReadOnly"},
		"a name misspelt":      {strings.Replace(listJSON, `"nonMainReadOnly"`, `"mainReadOnly"`, 1), `line 8: "mainReadOnly"`},
		"said twice":           {strings.Replace(listJSON, `"blockedPatterns"`, `"allowedroots": [], "blockedPatterns"`, 1), "twice"},
		"said twice in a root": {strings.Replace(listJSON, `{"path": "~/ro"`, `{"path": "~/ro", "Path": "~"`, 1), "twice"},
		"names its line":       {strings.Replace(listJSON, `"nonMainReadOnly": true`, `"nonMainReadOnly": true,`, 1), "line 9"},
		"names the type":       {strings.Replace(listJSON, `"allowReadWrite": false`, `"allowReadWrite": "no"`, 1), "true or false would be right"},
		"nested without end":   {strings.Repeat("[", 100_000), "depth"},
		"10 MB":                {listJSON + strings.Repeat(" ", 10<<20), "1 MiB"},
		"root in disguise":     {strings.Replace(listJSON, `"~/ro"`, `"~/ro\u202e"`, 1), "invisible"},
		"relative root":        {strings.Replace(listJSON, `"~/ro"`, `"ro"`, 1), `"ro"`},
		"root without a path":  {strings.Replace(listJSON, `"path": "~/ro", `, ``, 1), "empty"},
		"pattern with slash":   {strings.Replace(listJSON, `"token"`, `"a/b"`, 1), `"a/b"`},
		"pattern malformed":    {strings.Replace(listJSON, `"token"`, `"[a"`, 1), `"[a"`},
		"pattern empty":        {strings.Replace(listJSON, `"token"`, `""`, 1), "pattern"},
		"too large":            {listJSON + strings.Repeat(" ", listfile.MaxSize), "1 MiB"},
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

// MS-33: the 17 default patterns always hold.
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

// MS-34: of several requests the good ones are kept.
func TestMS34OneBadAmongGood(t *testing.T) {
	h := newHost(t)
	got := h.list.Resolve([]berth.MountRequest{
		{HostPath: "~/projects/app"}, {HostPath: "~/outside"}, {HostPath: "~/ro/doc"},
	}, true)
	if len(got) != 3 || !got[0].Allowed || got[1].Allowed || !got[2].Allowed || got[1].Reason == "" {
		t.Errorf("got %+v, want the middle one refused", got)
	}
}

// MS-35: the template is a good list.
func TestMS35Example(t *testing.T) {
	data, err := os.ReadFile("../../../mount-allowlist.example.json") // with the rights that a checkout gave it
	if err != nil {
		t.Fatal(err)
	}
	list, err := parse(data)
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Roots()) == 0 || !list.NonMainReadOnly() || !slices.Contains(list.Patterns(), "password") || len(list.Unknown()) > 0 {
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
	for _, dir := range []string{
		"a:b", "a,b", "a\nb", "a\x7fb", "a\u0085b", "a\xffb", "a\u202eb", "a\u2066b", "a\u200fb", "a\u200bb", "a\u2028b", "a\ufeffb", "a\u00adb",
	} {
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

// Letters that are written from right to left are letters; only what turns the
// text around is refused.
func TestW49LettersOfAllScripts(t *testing.T) {
	h := newHost(t)
	for _, dir := range []string{"שלום", "كتاب", "می\u200cخواهم", "👩\u200d🚀", "日本"} {
		h.mkdir(t, "projects/"+dir)
		if v := h.resolve(berth.MountRequest{HostPath: "~/projects/" + dir}, true); !v.Allowed || v.Mount.Target != TargetRoot+"/"+dir {
			t.Errorf("%q: got %+v, want it allowed", dir, v)
		}
	}
}

func TestW48PatternsMatchAllSpellings(t *testing.T) {
	h := newHost(t)
	h.write(t, ".config/berth/mount-allowlist.json", strings.Replace(listJSON, `"token"`, `"Résumé"`, 1))
	for _, dir := range []string{"résumé", "re\u0301sume\u0301", "RÉSUMÉ"} {
		h.mkdir(t, "projects/"+dir)
		h.wantRefused(t, "~/projects/"+dir, "blocked pattern")
	}
}

func TestW47HiddenFoldersOfHome(t *testing.T) {
	h := newHost(t)
	h.openHome(t)
	h.mkdir(t, ".claude/hooks", ".config/other", "visible/.inner")
	h.write(t, ".bashrc", "")
	h.link(t, "../.claude", "projects/claude")
	h.wantRefused(t, "~/.claude", "name that folder itself")
	h.wantRefused(t, "~/.claude/hooks", "name that folder itself")
	h.wantRefused(t, "~/.config/other", "name that folder itself")
	h.wantRefused(t, "~/.bashrc", "name that folder itself")
	h.wantRefused(t, "~/projects/claude", "name that folder itself")
	if v := h.resolve(berth.MountRequest{HostPath: "~/visible/.inner"}, true); !v.Allowed {
		t.Errorf("got %+v, want hidden folders further down allowed", v)
	}
	h.write(t, ".config/berth/mount-allowlist.json", strings.Replace(listJSON, "~/projects", "~/.claude/hooks", 1))
	if v := h.resolve(berth.MountRequest{HostPath: "~/.claude/hooks"}, true); !v.Allowed {
		t.Errorf("got %+v, want a folder that is named itself allowed", v)
	}
}

func TestW47WhatIsTheOperatorsOwn(t *testing.T) {
	h := newHost(t)
	h.openHome(t)
	h.mkdir(t, "keys/docker", "keys/other")
	h.list.Protect(filepath.Join(h.home, "keys/docker"), "")
	h.wantRefused(t, "~/keys", "operator alone")
	h.wantRefused(t, "~/keys/docker", "operator alone")
	if v := h.resolve(berth.MountRequest{HostPath: "~/keys/other"}, true); !v.Allowed {
		t.Errorf("got %+v, want its neighbour allowed", v)
	}
	if err := (Guard{}).check("/var/lib/docker/volumes/x"); err == nil || !strings.Contains(err.Error(), "all containers") {
		t.Errorf("got %v, want the engine's data refused", err)
	}
	if err := (Guard{}).check("/var/lib"); err == nil {
		t.Error("what holds the engine's data is allowed")
	}
}

// Every verdict says which rule decided, and why a mount is read-only or not.
func TestVerdictsExplain(t *testing.T) {
	h := newHost(t)
	for _, tt := range []struct {
		request berth.MountRequest
		main    bool
		rule    Rule
		text    string // in Reason or Mode
	}{
		{berth.MountRequest{HostPath: "src"}, true, RulePath, "absolute path"},
		{berth.MountRequest{HostPath: "~/projects/app", ContainerPath: ".."}, true, RuleName, "containerPath"},
		{berth.MountRequest{HostPath: "~"}, true, RuleNever, "home folder"},
		{berth.MountRequest{HostPath: "~/.ssh"}, true, RulePattern, ".ssh"},
		{berth.MountRequest{HostPath: "~/outside"}, true, RuleRoots, "not under"},
		{berth.MountRequest{HostPath: "~/projects/app"}, true, RuleRoots, "does not ask for writing"},
		{berth.MountRequest{HostPath: "~/projects/app", ReadOnly: new(true)}, true, RuleRoots, "reading only"},
		{berth.MountRequest{HostPath: "~/projects/app", ReadOnly: new(false)}, true, RuleRoots, "allows it"},
		{berth.MountRequest{HostPath: "~/projects/app", ReadOnly: new(false)}, false, RuleRoots, "nonMainReadOnly"},
		{berth.MountRequest{HostPath: "~/ro/doc", ReadOnly: new(false)}, true, RuleRoots, `"~/ro" is read-only`},
	} {
		v := h.resolve(tt.request, tt.main)
		if v.Rule != tt.rule || !strings.Contains(v.Reason+v.Mode, tt.text) || v.Allowed != (v.Reason == "" && v.Mode != "" && v.Root != "") {
			t.Errorf("%+v: got %+v, want rule %q and %q", tt.request, v, tt.rule, tt.text)
		}
	}
	if v := (*List)(nil).Resolve([]berth.MountRequest{{HostPath: "/x"}}, true, Guard{}); v[0].Rule != RuleList {
		t.Errorf("got %+v, want rule %q", v[0], RuleList)
	}
}

// A read-only root inside one that allows writing stays read-only, also in a
// mount of what holds it.
func TestRootsInsideRoots(t *testing.T) {
	h := newHost(t)
	h.mkdir(t, "projects/frozen/sub", "ro/scratch", "projects/deep/frozen")
	h.write(t, ".config/berth/mount-allowlist.json", `{"allowedRoots": [
		{"path": "~/projects", "allowReadWrite": true}, {"path": "~/projects/frozen", "allowReadWrite": false},
		{"path": "~/ro", "allowReadWrite": false}, {"path": "~/ro/scratch", "allowReadWrite": true}
	], "blockedPatterns": [], "nonMainReadOnly": false}`)
	for path, writable := range map[string]bool{
		"~/projects": false, "~/projects/frozen": false, "~/projects/frozen/sub": false, "~/projects/app": true,
		"~/ro/scratch": false, // the first root counts
	} {
		v := h.resolve(berth.MountRequest{HostPath: path, ReadOnly: new(false)}, true)
		if !v.Allowed || v.Mount.ReadOnly == writable {
			t.Errorf("%s: got %+v, want writable %v", path, v, writable)
		}
	}
	got := h.list.Resolve([]berth.MountRequest{{HostPath: "~/projects/app", ReadOnly: new(false)}, {HostPath: "~/projects/app/src"}}, true)
	if !strings.Contains(got[1].Note, "all the same") || got[0].Note != "" {
		t.Errorf("got %+v, want a word about the writable parent", got)
	}
}

func TestUnknownNamesAreTold(t *testing.T) {
	h := newHost(t)
	h.write(t, ".config/berth/mount-allowlist.json", strings.Replace(listJSON, `"description"`, `"$comment": {"path": 1}, "x"`, 1))
	if v := h.resolve(berth.MountRequest{HostPath: "~/ro/doc"}, true); !v.Allowed {
		t.Errorf("got %+v, want it allowed", v)
	}
	list, err := h.list.List()
	if err != nil || len(list.Unknown()) != 2 || list.Unknown()[0] != `line 4: "$comment" means nothing here` {
		t.Errorf("got %q, %v, want two names told with their line", list.Unknown(), err)
	}
}

func TestBelow(t *testing.T) {
	h := newHost(t)
	h.mkdir(t, "projects/app/a/b/.AWS/deep")
	h.write(t, "projects/app/a/.env", "")
	list, err := h.list.List()
	if err != nil {
		t.Fatal(err)
	}
	found, complete := list.Below(filepath.Join(h.home, "projects/app"))
	if !complete || !slices.Equal(found, []string{"a/.env", "a/b/.AWS"}) {
		t.Errorf("got %q, %v", found, complete)
	}
}

// W52: a file in any bad state keeps the last good list, and an alarm says why.
func TestW52StatesOfTheFile(t *testing.T) {
	app := berth.MountRequest{HostPath: "~/projects/app"}
	for name, tt := range map[string]struct {
		spoil func(*testing.T, *host)
		want  string // in the alarm; empty: none
		gone  bool   // everything is refused
	}{
		"empty":       {func(t *testing.T, h *host) { h.write(t, ".config/berth/mount-allowlist.json", "") }, "empty", false},
		"for others":  {func(t *testing.T, h *host) { chmod(t, h.file, 0o606) }, "chmod 600", false},
		"for a group": {func(t *testing.T, h *host) { chmod(t, h.file, 0o660) }, "mode 0660", false},
		"readable":    {func(t *testing.T, h *host) { chmod(t, h.file, 0o644) }, "", false},
		"a folder":    {func(t *testing.T, h *host) { remove(t, h.file); h.mkdir(t, ".config/berth/mount-allowlist.json") }, "not a regular file", false},
		"a pipe":      {func(t *testing.T, h *host) { remove(t, h.file); mkfifo(t, h.file) }, "not a regular file", false},
		"a loop": {func(t *testing.T, h *host) {
			remove(t, h.file)
			h.link(t, h.file, ".config/berth/mount-allowlist.json")
		}, "symbolic links", false},
		"leads astray": {func(t *testing.T, h *host) {
			remove(t, h.file)
			h.link(t, "none", ".config/berth/mount-allowlist.json")
		}, "leads nowhere", false},
		"a good link": {func(t *testing.T, h *host) {
			rename(t, h.file, h.home+"/dot.json")
			h.link(t, h.home+"/dot.json", ".config/berth/mount-allowlist.json")
		}, "", false},
		"a link to what others write": {func(t *testing.T, h *host) {
			rename(t, h.file, h.home+"/dot.json")
			chmod(t, h.home+"/dot.json", 0o666)
			h.link(t, h.home+"/dot.json", ".config/berth/mount-allowlist.json")
		}, "chmod 600", false},
		"a stranger's": {func(t *testing.T, h *host) {
			if os.Geteuid() != 0 {
				t.Skip("only root can give a file away")
			}
			if err := os.Chown(h.file, 12345, 0); err != nil {
				t.Fatal(err)
			}
		}, "belongs to user 12345", false},
		"unreadable": {func(t *testing.T, h *host) {
			if os.Geteuid() == 0 {
				t.Skip("root reads everything")
			}
			chmod(t, h.file, 0)
		}, "permission denied", false},
		"removed": {func(t *testing.T, h *host) { remove(t, h.file) }, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			if v := h.resolve(app, true); !v.Allowed {
				t.Fatalf("got %+v, want it allowed", v)
			}
			tt.spoil(t, h)
			if v := h.resolve(app, true); v.Allowed == tt.gone {
				t.Errorf("got %+v, want allowed %v", v, !tt.gone)
			}
			if got := h.list.Alarm(); !strings.Contains(got, tt.want) || (got == "") != (tt.want == "") || strings.Contains(got, "\n") {
				t.Errorf("got alarm %q, want %q", got, tt.want)
			}
		})
	}
}

// A root that vanishes takes its mounts with it, at the next run.
func TestRootVanishes(t *testing.T) {
	h := newHost(t)
	remove(t, h.home+"/ro/doc")
	remove(t, h.home+"/ro")
	h.wantRefused(t, "~/ro/doc", "does not exist")
	if v := h.resolve(berth.MountRequest{HostPath: "~/projects/app"}, true); !v.Allowed || h.list.Alarm() != "" {
		t.Errorf("got %+v and alarm %q, want the others to work", v, h.list.Alarm())
	}
}

func TestEdits(t *testing.T) {
	h := newHost(t)
	text := strings.Replace(listJSON, `"blockedPatterns"`, `"later": {"z": 1, "a": 2}, "blockedPatterns"`, 1)
	h.write(t, ".config/berth/mount-allowlist.json", text)
	steps := []struct {
		root Root
		want Change
	}{
		{Root{Path: h.home + "/outside", AllowReadWrite: true, Description: "new"}, Added},
		{Root{Path: "~/outside", AllowReadWrite: true}, Unchanged},
		{Root{Path: "~/outside/"}, Changed},
		{Root{Path: "~/outside", Description: "other"}, Changed},
	}
	for _, s := range steps {
		if got, err := AddRoot(h.file, h.home, s.root); err != nil || got != s.want {
			t.Errorf("%+v: got %v, %v, want %v", s.root, got, err, s.want)
		}
	}
	list, err := Load(h.file)
	if err != nil {
		t.Fatal(err)
	}
	want := Root{Path: h.home + "/outside", Description: "other"}
	if roots := list.Roots(); len(roots) != 4 || roots[3] != want {
		t.Errorf("got %+v, want %+v last", roots, want)
	}
	if err := RemoveRoot(h.file, h.home, "~/ro"); err != nil {
		t.Error(err)
	}
	err = RemoveRoot(h.file, h.home, "~/ro")
	if e, ok := errors.AsType[*berth.Error](err); !ok || e.Kind != berth.NotFound {
		t.Errorf("got %v, want berth.NotFound", err)
	}
	data, err := os.ReadFile(h.file)
	if err != nil {
		t.Fatal(err)
	}
	places := []int{}
	for _, name := range []string{`"allowedRoots"`, `~/projects`, `~/missing`, `/outside`, `"later"`, `"z"`, `"a"`, `"blockedPatterns"`, `"nonMainReadOnly"`} {
		places = append(places, strings.Index(string(data), name))
	}
	if !slices.IsSorted(places) || places[0] < 0 {
		t.Errorf("the order is lost: %v\n%s", places, data)
	}
	if info, err := os.Stat(h.file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("got %v, %v, want mode 0600", info.Mode(), err)
	}
	if left, _ := filepath.Glob(filepath.Dir(h.file) + "/.*"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

func TestEditsOfOtherFiles(t *testing.T) {
	h := newHost(t)
	broken := strings.Replace(listJSON, `"~/ro",`, `"~/ro"`, 1)
	h.write(t, ".config/berth/mount-allowlist.json", broken)
	_, err := AddRoot(h.file, h.home, Root{Path: "~/outside"})
	if data, _ := os.ReadFile(h.file); err == nil || !strings.Contains(err.Error(), "line 4") || string(data) != broken {
		t.Errorf("got %v, want a broken file left as it is, and the line told", err)
	}
	h.write(t, ".config/berth/mount-allowlist.json", listJSON)
	if _, err := AddRoot(h.file, h.home, Root{Path: "relative"}); err == nil {
		t.Error("a relative root was added")
	}
	chmod(t, h.file, 0o666)
	if _, err := AddRoot(h.file, h.home, Root{Path: "~/outside"}); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("got %v, want a file that others write refused", err)
	}

	fresh := h.home + "/new/dir/list.json"
	if got, err := AddRoot(fresh, h.home, Root{Path: "~/outside"}); err != nil || got != Created {
		t.Errorf("got %v, %v, want the file made", got, err)
	}
	if list, err := Load(fresh); err != nil || !list.NonMainReadOnly() || len(list.Roots()) != 1 {
		t.Errorf("got %+v, %v", list, err)
	}
	h.link(t, fresh, "dot.json")
	if _, err := AddRoot(h.home+"/dot.json", h.home, Root{Path: "~/ro"}); err != nil {
		t.Error(err)
	}
	if info, err := os.Lstat(h.home + "/dot.json"); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is gone: %v", err)
	}
	if list, err := Load(fresh); err != nil || len(list.Roots()) != 2 {
		t.Errorf("got %+v, %v, want the link followed", list, err)
	}
}

func chmod(t *testing.T, file string, mode os.FileMode) {
	t.Helper()
	if err := os.Chmod(file, mode); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, file string) {
	t.Helper()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func mkfifo(t *testing.T, file string) {
	t.Helper()
	if err := syscall.Mkfifo(file, 0o600); err != nil {
		t.Fatal(err)
	}
}
