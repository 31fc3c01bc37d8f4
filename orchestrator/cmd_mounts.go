package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/mount"
)

// newAllowlist returns the mount allowlist of these settings.
func newAllowlist(cfg Config) *mount.Allowlist {
	list := mount.New(cfg.MountAllowlist, cfg.Root, cfg.Home, dockerSockets(cfg.DockerHost)...)
	list.Protect(cfg.DockerCertPath, cfg.SenderAllowlist)
	return list
}

func (a *app) mountsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mounts",
		Short: "See and change which host folders groups may be given",
		Long: `See and change which host folders groups may be given.

The mount allowlist is a file outside of everything that containers see
(BERTH_MOUNT_ALLOWLIST). These commands work on it, with and without a daemon; a
daemon follows it, from each group's next run on. It only opens folders:
"berth groups set" gives them to a group.`,
		Example: "  berth mounts ls\n  berth mounts add ~/projects --rw\n  berth mounts check ~/projects/app --group family",
		Args:    cobra.NoArgs,
		RunE: a.do(func(context.Context, []string) error {
			return misusef("mounts needs one of check, ls, add, rm")
		}),
	}
	cmd.AddCommand(a.mountsCheckCommand(), a.mountsListCommand(), a.mountsAddCommand(), a.mountsRemoveCommand())
	return cmd
}

// mountCheck is the answer of mounts check.
type mountCheck struct {
	Path      string      `json:"path"`
	Allowlist string      `json:"allowlist"`
	Allowed   bool        `json:"allowed"`
	Rule      mount.Rule  `json:"rule"` // what decided
	Reason    string      `json:"reason,omitempty"`
	Root      string      `json:"root,omitempty"`
	Source    string      `json:"source,omitempty"` // all links resolved
	Target    string      `json:"target,omitempty"`
	Modes     []mountMode `json:"modes,omitempty"`
	Notes     []string    `json:"notes"`
}

type mountMode struct {
	Group    string `json:"group"`
	ReadOnly bool   `json:"readonly"`
	Why      string `json:"why"`
}

func (a *app) mountsCheckCommand() *cobra.Command {
	var (
		group, name string
		rw, asJSON  bool
	)
	cmd := &cobra.Command{
		Use:   "check PATH",
		Short: "Say whether a folder or file may be mounted, and why",
		Long: `Say whether a folder or file may be mounted, and why; exit code 1 if not.

Without --group it tells the difference between the main group and the others.`,
		Example: "  berth mounts check ~/projects/app\n  berth mounts check ~/projects/app --rw --group family\n  berth mounts check /srv/data --json",
		Args:    cobra.ExactArgs(1),
		RunE: a.do(func(_ context.Context, args []string) error {
			cfg, err := a.config()
			if err != nil {
				return err
			}
			groups := []string{berth.MainFolder, "the others"}
			if group != "" {
				if err := berth.ValidFolder(group); err != nil {
					return misusef("%s", err)
				}
				groups = []string{group}
			}
			path, err := hostPath(args[0])
			if err != nil {
				return err
			}
			request := berth.MountRequest{HostPath: path, ContainerPath: name}
			if rw {
				request.ReadOnly = new(false)
			}
			c := checkMount(cfg, request, groups)
			if err := a.printMountCheck(c, asJSON); err != nil {
				return err
			}
			if !c.Allowed {
				return errTold
			}
			return nil
		}),
	}
	f := cmd.Flags()
	f.StringVarP(&group, "group", "g", "", "folder of the group that asks")
	f.StringVar(&name, "name", "", "the name in the container (default that of the folder)")
	f.BoolVar(&rw, "rw", false, "ask for writing")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func checkMount(cfg Config, request berth.MountRequest, groups []string) mountCheck {
	allowlist := newAllowlist(cfg)
	c := mountCheck{Path: request.HostPath, Allowlist: cfg.MountAllowlist, Notes: []string{}}
	if alarm := allowlist.Alarm(); alarm != "" {
		c.Notes = append(c.Notes, alarm)
	}
	for _, group := range groups {
		v := allowlist.Resolve([]berth.MountRequest{request}, group == berth.MainFolder)[0]
		c.Allowed, c.Rule, c.Reason, c.Root = v.Allowed, v.Rule, v.Reason, v.Root
		if !v.Allowed {
			return c // who asks makes no difference
		}
		c.Source, c.Target = v.Mount.Source, v.Mount.Target
		c.Modes = append(c.Modes, mountMode{group, v.Mount.ReadOnly, v.Mode})
	}
	if list, _ := allowlist.List(); list != nil {
		found, complete := list.Below(c.Source)
		if len(found) > 0 {
			c.Notes = append(c.Notes, "blocked names deeper inside would be visible: "+strings.Join(found, ", "))
		}
		if !complete {
			c.Notes = append(c.Notes, "it holds too much to look through to the end")
		}
	}
	return c
}

func (a *app) printMountCheck(c mountCheck, asJSON bool) error {
	if asJSON {
		return a.printJSON(c)
	}
	rows := [][]string{{"refused:", c.Path}, {"why:", c.Reason}, {"rule:", string(c.Rule)}}
	if c.Allowed {
		rows = [][]string{{"allowed:", c.Path}, {"rule:", fmt.Sprintf("%s: %q", c.Rule, c.Root)}, {"host:", c.Source}, {"container:", c.Target}}
		for _, m := range c.Modes {
			mode := "writable"
			if m.ReadOnly {
				mode = "read-only"
			}
			rows = append(rows, []string{m.Group + ":", mode + ": " + m.Why})
		}
	}
	for _, note := range c.Notes {
		rows = append(rows, []string{"note:", note})
	}
	return a.printTable(append(rows, []string{"allowlist:", c.Allowlist}))
}

// allowedRoot is one row of mounts ls.
type allowedRoot struct {
	mount.Root
	Real    string `json:"real,omitempty"` // where it leads
	Problem string `json:"problem,omitempty"`
}

func (a *app) mountsListCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the folders that groups may be given",
		Example: "  berth mounts ls\n  berth mounts ls --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(context.Context, []string) error {
			cfg, err := a.config()
			if err != nil {
				return err
			}
			list, err := mount.Load(cfg.MountAllowlist)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			missing := list == nil
			if missing {
				list = new(mount.List)
			}
			roots := []allowedRoot{}
			for _, r := range list.Roots() {
				roots = append(roots, describeRoot(cfg, r))
			}
			if asJSON {
				return a.printJSON(struct {
					Allowlist       string        `json:"allowlist"`
					Missing         bool          `json:"missing"`
					Roots           []allowedRoot `json:"allowedRoots"`
					NonMainReadOnly bool          `json:"nonMainReadOnly"`
					Patterns        []string      `json:"blockedPatterns"` // the default ones first
					Unknown         []string      `json:"unknown"`
				}{cfg.MountAllowlist, missing, roots, missing || list.NonMainReadOnly(), patternsOf(list, missing), append([]string{}, list.Unknown()...)})
			}
			if missing {
				fmt.Fprintf(a.stdout, "no host folder is mounted: there is no allowlist at %s; berth mounts add makes one\n", cleanLine(cfg.MountAllowlist))
				return nil
			}
			rows := [][]string{{"ROOT", "MODE", "STATE", "DESCRIPTION"}}
			for _, r := range roots {
				mode, state := "read-only", "there"
				if r.AllowReadWrite {
					mode = "writable"
				}
				if r.Problem != "" {
					state = r.Problem
				}
				rows = append(rows, []string{r.Path, mode, state, r.Description})
			}
			if err := a.printTable(rows); err != nil {
				return err
			}
			others := "whoever asks may write where a root is writable"
			if list.NonMainReadOnly() {
				others = "only the main group may write, where a root is writable"
			}
			fmt.Fprintf(a.stdout, "\n%s\nblocked names: %s\nallowlist: %s\n", others, cleanLine(strings.Join(list.Patterns(), " ")), cleanLine(cfg.MountAllowlist))
			for _, text := range list.Unknown() {
				a.note("%s: %s", cfg.MountAllowlist, text)
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func patternsOf(list *mount.List, missing bool) []string {
	if missing {
		return mount.DefaultPatterns()
	}
	return list.Patterns()
}

// describeRoot says whether a root can be used, by asking for the root itself.
func describeRoot(cfg Config, r mount.Root) allowedRoot {
	out := allowedRoot{Root: r}
	v := newAllowlist(cfg).Resolve([]berth.MountRequest{{HostPath: r.Path, ContainerPath: "root"}}, true)[0]
	if v.Allowed {
		out.Real = v.Mount.Source
		return out
	}
	if out.Problem = v.Reason; v.Rule == mount.RulePath {
		return out
	}
	out.Problem = "not as a whole: " + v.Reason
	return out
}

func (a *app) mountsAddCommand() *cobra.Command {
	var (
		description string
		rw          bool
	)
	cmd := &cobra.Command{
		Use:   "add PATH",
		Short: "Let groups be given a folder, or what is in it",
		Long: `Let groups be given a folder, or what is in it.

The allowlist is made if there is none. Of a folder that is listed already, the
right to write is set anew. Without --rw it can only be read.`,
		Example: "  berth mounts add ~/projects --rw\n  berth mounts add ~/Documents/work --description \"Work documents\"",
		Args:    cobra.ExactArgs(1),
		RunE: a.do(func(_ context.Context, args []string) error {
			cfg, err := a.config()
			if err != nil {
				return err
			}
			path, err := rootPath(args[0])
			if err != nil {
				return err
			}
			root := mount.Root{Path: path, AllowReadWrite: rw, Description: description}
			change, err := mount.AddRoot(cfg.MountAllowlist, cfg.Home, root)
			if err != nil {
				return err
			}
			mode := "read-only"
			if rw {
				mode = "writable"
			}
			what := map[mount.Change]string{
				mount.Unchanged: "is there already", mount.Changed: "changed", mount.Added: "added", mount.Created: "added, in a new file",
			}[change]
			fmt.Fprintf(a.stdout, "%s (%s) %s: %s\n", cleanLine(path), mode, what, cleanLine(cfg.MountAllowlist))
			if problem := describeRoot(cfg, root).Problem; problem != "" {
				a.note("for now it cannot be mounted: %s", problem)
			}
			return nil
		}),
	}
	f := cmd.Flags()
	f.BoolVar(&rw, "rw", false, "groups may write, where nonMainReadOnly does not forbid it")
	f.StringVar(&description, "description", "", "what it is, for people")
	return cmd
}

func (a *app) mountsRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "rm PATH",
		Aliases: []string{"remove"},
		Short:   "Take a folder off the list; runs that live keep it until they end",
		Example: "  berth mounts rm ~/projects",
		Args:    cobra.ExactArgs(1),
		RunE: a.do(func(_ context.Context, args []string) error {
			cfg, err := a.config()
			if err != nil {
				return err
			}
			path, err := rootPath(args[0])
			if err != nil {
				return err
			}
			if err := mount.RemoveRoot(cfg.MountAllowlist, cfg.Home, path); err != nil {
				return err
			}
			fmt.Fprintf(a.stdout, "%s removed: %s\n", cleanLine(path), cleanLine(cfg.MountAllowlist))
			if v := newAllowlist(cfg).Resolve([]berth.MountRequest{{HostPath: path, ContainerPath: "root"}}, true)[0]; v.Allowed {
				a.note("it can still be mounted: it lies in the allowed root %q", v.Root)
			}
			return nil
		}),
	}
}

// rootPath makes the path of a root absolute and clean.
func rootPath(text string) (string, error) {
	path, err := hostPath(text)
	if err != nil || text == "" {
		return "", errors.Join(err, misusef("give a path"))
	}
	return filepath.Clean(path), nil
}
