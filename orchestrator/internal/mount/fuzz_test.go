package mount

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"berth/orchestrator/internal/berth"
)

// FuzzResolve asks for any path, by itself and as the target of a link in an
// allowed root. What is allowed must really lie inside an allowed root, and
// nowhere that is blocked.
func FuzzResolve(f *testing.F) {
	h := newHost(f)
	h.mkdir(f, "projects/App", "projects/.SSH/in", "projects/x/credentials", "projects/ſ", "ro/.Env", "projects/שלום", "projects/re\u0301sume\u0301", ".claude/hooks")
	h.link(f, h.home+"/outside", "projects/out")
	h.link(f, "../.ssh", "projects/keys")
	h.link(f, "/", "projects/root")
	h.link(f, "../.claude", "projects/claude")
	h.link(f, h.home+"/projects", "ro/across")
	link := filepath.Join(h.home, "projects/fuzz")

	for _, seed := range []string{
		"~", "~/projects", "~/projects/app", "~/projects/../outside", "~/projects/keys", "~/projects/root/etc",
		"~/ro/across/app/", "~/ro/.env", "~//projects/./App", "/", "//", "", ".", "src", "~root", "/proc/self/root",
		"~/projects/root/proc/self/cwd", "~/projects/.ſsh", "~/PROJECTS/app", "~/projects/app\x00", "~/projects:ro",
		"~/projects/claude/hooks", "~/projects/שלום", "~/projects/app\u202e", "~/projects/re\u0301sume\u0301", "~/projects/résumé",
		"~/projects/ａｐｐ", "~/projects/.ＳＳＨ", "~/projects/.sſh/..", "/var/lib/docker", "~/projects/app\u2066,ro\u2069", "~/projects/root/../app",
	} {
		f.Add(seed, "", true, false)
		f.Add(seed, "name", false, true)
	}
	f.Add("~/projects/app", "..", true, true)
	f.Fuzz(func(t *testing.T, hostPath, name string, main, readOnly bool) {
		requests := []berth.MountRequest{{HostPath: hostPath, ContainerPath: name, ReadOnly: &readOnly}}
		if target := strings.Replace(hostPath, "~", h.home, 1); os.Symlink(target, link) == nil {
			defer os.Remove(link)
			requests = append(requests, berth.MountRequest{HostPath: link, ReadOnly: &readOnly})
		}
		seen := map[string]bool{}
		for _, v := range h.list.Resolve(requests, main) {
			if !v.Allowed {
				if v.Reason == "" || v.Mount != (berth.Mount{}) {
					t.Errorf("%+v: refused without a reason, or with a mount", v)
				}
				continue
			}
			m := v.Mount
			if real, err := filepath.EvalSymlinks(m.Source); err != nil || real != m.Source {
				t.Errorf("%+v: the source is no real path: %q, %v", v, real, err)
			}
			projects, ro := filepath.Join(h.home, "projects"), filepath.Join(h.home, "ro")
			inProjects := m.Source == projects || strings.HasPrefix(m.Source, projects+"/")
			if !inProjects && m.Source != ro && !strings.HasPrefix(m.Source, ro+"/") {
				t.Errorf("%+v: not inside an allowed root", v)
			}
			for component := range strings.SplitSeq(m.Source, "/") {
				if slices.ContainsFunc(DefaultPatterns(), func(p string) bool { return strings.EqualFold(p, component) }) {
					t.Errorf("%+v: blocked component %q", v, component)
				}
			}
			if !m.ReadOnly && (readOnly || !main || !inProjects) {
				t.Errorf("%+v: writable", v)
			}
			if filepath.Clean(m.Target) != m.Target || filepath.Dir(m.Target) != TargetRoot || !utf8.ValidString(m.Target) {
				t.Errorf("%+v: the target is not one folder below %s", v, TargetRoot)
			}
			if seen[m.Target] {
				t.Errorf("%+v: the target is taken twice", v)
			}
			if strings.ContainsFunc(m.Source+m.Target, misleading) {
				t.Errorf("%+v: a misleading character", v)
			}
			if v.Mode == "" || v.Root == "" || v.Reason != "" {
				t.Errorf("%+v: not explained", v)
			}
			if err := Verify(os.Getpid(), []Verdict{v}); (err != nil) != v.movable {
				t.Errorf("%+v: got %v where nothing can be checked", v, err)
			}
			seen[m.Target] = true
		}
	})
}
