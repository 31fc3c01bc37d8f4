package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

// groupsAPI is what the groups commands need.
type groupsAPI interface {
	Groups(ctx context.Context) ([]web.Group, error)
	AddGroup(ctx context.Context, g web.NewGroup) (web.Group, error)
	UpdateGroup(ctx context.Context, folder string, change web.GroupChange) (web.Group, error)
	RemoveGroup(ctx context.Context, folder string) error
	Chats(ctx context.Context, refresh bool) ([]web.Chat, error)
}

func (a *app) groupsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "groups",
		Short: "List, add, change and remove groups; list the chats that can be",
		Long: `List, add, change and remove groups, and list the chats that can be registered.

Without a daemon these commands work on the store itself.`,
		Example: "  berth groups ls\n  berth groups add family --trigger @Andy\n  berth groups set family --memory 2g\n  berth groups rm family",
		Args:    cobra.NoArgs,
		RunE: a.do(func(context.Context, []string) error {
			return misusef("groups needs one of ls, add, set, rm, chats")
		}),
	}
	cmd.AddCommand(a.groupsListCommand(), a.groupsAddCommand(), a.groupsSetCommand(), a.groupsRemoveCommand(), a.groupsChatsCommand())
	return cmd
}

func (a *app) groupsChatsCommand() *cobra.Command {
	var refresh, asJSON bool
	cmd := &cobra.Command{
		Use:   "chats",
		Short: "List the chats that can be registered",
		Long: `List the chats that can be registered: the groups of the WhatsApp account, as of
at most a day ago, and what is registered already. The chat is what --jid of
"berth groups add" takes; one with a single person is the number, such as
4915112345678@s.whatsapp.net.`,
		Example: "  berth groups chats\n  berth groups chats --refresh --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				chats, err := api.Chats(ctx, refresh)
				if err != nil {
					return err
				}
				if asJSON {
					return a.printJSON(chats)
				}
				rows := [][]string{{"CHAT", "NAME", "GROUP", "ACTIVE"}}
				for _, c := range chats {
					active := ""
					if c.LastActivity != nil {
						active = ago(*c.LastActivity)
					}
					rows = append(rows, []string{c.JID, c.Name, c.Folder, active})
				}
				return a.printTable(rows)
			})
		}),
	}
	cmd.Flags().BoolVar(&refresh, "refresh", false, "ask WhatsApp now; it locks out who asks often")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) groupsListCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the groups",
		Example: "  berth groups ls --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				groups, err := api.Groups(ctx)
				if err != nil {
					return err
				}
				if asJSON {
					if groups == nil {
						groups = []web.Group{}
					}
					return a.printJSON(groups)
				}
				rows := [][]string{{"FOLDER", "NAME", "CHAT", "TRIGGER", "STATE", "PENDING", "ERROR"}}
				for _, g := range groups {
					trigger := g.Trigger
					if g.Main || !g.RequiresTrigger {
						trigger = "none needed"
					}
					rows = append(rows, []string{g.Folder, g.Name, g.JID, trigger, g.State, strconv.Itoa(g.Pending), g.LastError})
				}
				return a.printTable(rows)
			})
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) groupsAddCommand() *cobra.Command {
	var (
		group             web.NewGroup
		noTrigger         bool
		mounts            []string
		memory            string
		ifMissing, asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "add FOLDER",
		Short: "Register a group",
		Long: `Register a group.

FOLDER names the group and its working folder, groups/FOLDER. The folder "main"
is the operator's own chat. A mount is a wish: the mount allowlist decides.`,
		Example: `  berth groups add family
  berth groups add work --jid 120363012345678901@g.us --name "Work" --trigger @Andy
  berth groups add notes --no-trigger --mount ~/projects/notes:notes:rw
  berth groups add family --if-missing`,
		Args: cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			group.Folder = args[0]
			if err := berth.ValidFolder(group.Folder); err != nil {
				return misusef("%s", err)
			}
			if noTrigger {
				if group.Trigger != "" {
					return misusef("give --trigger or --no-trigger, not both")
				}
				group.RequiresTrigger = new(false)
			}
			if err := a.containerConfig(&group.Container, mounts, memory); err != nil {
				return err
			}
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				if ifMissing {
					groups, err := api.Groups(ctx)
					if err != nil {
						return err
					}
					for _, g := range groups {
						if g.Folder == group.Folder {
							return a.printGroup(g, "is there already", asJSON)
						}
					}
				}
				added, err := api.AddGroup(ctx, group)
				if err != nil {
					return err
				}
				return a.printGroup(added, "added", asJSON)
			})
		}),
	}
	f := cmd.Flags()
	f.StringVar(&group.JID, "jid", "", "the chat (default console:FOLDER)")
	f.StringVar(&group.Name, "name", "", "the name that people see (default FOLDER)")
	f.StringVar(&group.Trigger, "trigger", "", "word that wakes the agent (default @ and the assistant's name)")
	f.BoolVar(&noTrigger, "no-trigger", false, "every message wakes the agent")
	f.StringArrayVar(&mounts, "mount", nil, "host folder for the container, HOST[:NAME][:ro|rw]; may be repeated")
	f.StringVar(&group.Container.Image, "image", "", "an agent image of its own")
	f.StringVar(&group.Container.Engine, "engine", "", "an agent engine of its own")
	f.StringVar(&group.Container.Model, "model", "", "a model of its own, for engines with a model")
	f.StringVar(&memory, "memory", "", "memory of its container, for example 2g")
	f.BoolVar(&ifMissing, "if-missing", false, "a group that is there already is left as it is")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// groupOptions are the options of groups set that take a value; the empty one is
// the daemon's default.
var groupOptions = []struct {
	name, help string
	set        func(c *web.GroupChange, value string) error
}{
	{"name", "the name that people see (default FOLDER)", func(c *web.GroupChange, value string) error {
		c.Name = &value
		return nil
	}},
	{"trigger", "word that wakes the agent (default @ and the assistant's name)", func(c *web.GroupChange, value string) error {
		c.Trigger = &value
		return nil
	}},
	{"image", "an agent image of its own", func(c *web.GroupChange, value string) error {
		c.Image = &value
		return nil
	}},
	{"engine", "an agent engine of its own", func(c *web.GroupChange, value string) error {
		c.Engine = &value
		return nil
	}},
	{"model", "a model of its own, for engines with a model", func(c *web.GroupChange, value string) error {
		c.Model = &value
		return nil
	}},
	{"egress", "hosts that it may reach, such as pypi.org,*.example.org:443", limit(setEgress, func(g *web.GroupChange, c Config) { g.Egress = &c.Egress })},
	{"memory", "memory of its container, for example 2g", limit(size(func(c *Config) *int64 { return &c.ContainerMemory }, minMemoryMiB<<20), func(g *web.GroupChange, c Config) {
		g.MemoryMiB = new(c.ContainerMemory >> 20)
	})},
	{"cpus", "processors of its container, for example 1.5", limit(cpus(func(c *Config) *float64 { return &c.ContainerCPUs }), func(g *web.GroupChange, c Config) { g.CPUs = &c.ContainerCPUs })},
	{"pids", "processes of its container, for example 512", limit(pids(func(c *Config) *int64 { return &c.ContainerPids }), func(g *web.GroupChange, c Config) { g.Pids = &c.ContainerPids })},
	{"timeout", "a run without a sign of life ends after this: milliseconds, or a duration", limit(duration(func(c *Config) *time.Duration { return &c.ContainerTimeout }), func(g *web.GroupChange, c Config) {
		g.TimeoutMS = new(c.ContainerTimeout.Milliseconds())
	})},
}

// limit reads a value as the setting of the same meaning does.
func limit(read func(*Config, string) error, use func(*web.GroupChange, Config)) func(*web.GroupChange, string) error {
	return func(g *web.GroupChange, value string) error {
		var c Config
		if value != "" {
			if err := read(&c, value); err != nil {
				return err
			}
		}
		use(g, c)
		return nil
	}
}

func (a *app) groupsSetCommand() *cobra.Command {
	var (
		requiresTrigger, noTrigger, asJSON bool
		mounts, unmounts                   []string
	)
	cmd := &cobra.Command{
		Use:   "set FOLDER",
		Short: "Change a group",
		Long: `Change a group; what is not named stays as it is.

"default" sets an option back to the daemon's own. A new trigger counts from the
next message on, everything else from the group's next run on: a run that lives
keeps what it has, and "berth stop FOLDER" ends it.

A mount is a wish: the mount allowlist decides, at the start of each run. A mount
with the name of another takes its place.`,
		Example: `  berth groups set family --mount ~/photos --mount ~/lists:lists:rw
  berth groups set family --unmount ~/photos
  berth groups set work --memory 2g --cpus 1.5 --pids 512 --timeout 45m
  berth groups set work --memory default --requires-trigger=false`,
		Args: cobra.ExactArgs(1),
	}
	f := cmd.Flags()
	for _, o := range groupOptions {
		f.String(o.name, "", o.help)
	}
	f.BoolVar(&requiresTrigger, "requires-trigger", true, "only messages with the trigger wake the agent")
	f.BoolVar(&noTrigger, "no-trigger", false, "every message wakes the agent")
	f.StringArrayVar(&mounts, "mount", nil, "host folder for the container, HOST[:NAME][:ro|rw]; may be repeated")
	f.StringArrayVar(&unmounts, "unmount", nil, "take a mount away, by HOST or NAME; may be repeated")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	cmd.RunE = a.do(func(ctx context.Context, args []string) error {
		var change web.GroupChange
		for _, o := range groupOptions {
			if !f.Changed(o.name) {
				continue
			}
			value, err := f.GetString(o.name)
			if value == "default" {
				value = ""
			}
			if err = errors.Join(err, o.set(&change, value)); err != nil {
				return misusef("--%s %q: %s, or default", o.name, value, err)
			}
		}
		switch {
		case f.Changed("requires-trigger") && f.Changed("no-trigger"):
			return misusef("give --requires-trigger or --no-trigger, not both")
		case f.Changed("requires-trigger"):
			change.RequiresTrigger = &requiresTrigger
		case f.Changed("no-trigger"):
			change.RequiresTrigger = new(!noTrigger)
		}
		for _, text := range mounts {
			m, err := parseMount(text)
			if err != nil {
				return err
			}
			change.Mount = append(change.Mount, m)
		}
		for _, text := range unmounts {
			// A path is made absolute as --mount does; a name has no slash.
			if strings.Contains(text, "/") {
				path, err := hostPath(text)
				if err != nil {
					return err
				}
				text = path
			}
			change.Unmount = append(change.Unmount, text)
		}
		if reflect.ValueOf(change).IsZero() {
			return misusef("say what to change")
		}
		return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
			g, err := api.UpdateGroup(ctx, args[0], change)
			if err != nil {
				return err
			}
			if err := a.noteMounts(g); err != nil {
				return err
			}
			return a.printGroup(g, "changed", asJSON)
		})
	})
	return cmd
}

// noteMounts tells which of a group's mounts the allowlist would refuse now.
func (a *app) noteMounts(g web.Group) error {
	cfg, err := a.config()
	if err != nil {
		return err
	}
	for _, v := range newAllowlist(cfg).Resolve(g.Container.AdditionalMounts, g.Main) {
		switch {
		case !v.Allowed:
			a.note("a mount is refused for now: %s", v.Reason)
		case v.Mount.ReadOnly && v.Request.ReadOnly != nil && !*v.Request.ReadOnly:
			a.note("%s is mounted read-only: %s", v.Mount.Source, v.Mode)
		}
	}
	return nil
}

const (
	minMemoryMiB = 6 // the engine takes no less
	maxMounts    = 64
)

var imagePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/:@-]*$`)

// changeGroup returns g as a change leaves it.
func changeGroup(g berth.Group, in web.GroupChange) (berth.Group, error) {
	if in.Name != nil {
		if g.Name = strings.TrimSpace(*in.Name); g.Name == "" {
			g.Name = g.Folder
		}
	}
	if in.Trigger != nil {
		g.Trigger = strings.TrimSpace(*in.Trigger)
	}
	change(&g.RequiresTrigger, in.RequiresTrigger)
	c := &g.Container
	change(&c.Image, in.Image)
	change(&c.Engine, in.Engine)
	change(&c.Model, in.Model)
	change(&c.Egress, in.Egress)
	change(&c.MemoryMiB, in.MemoryMiB)
	change(&c.CPUs, in.CPUs)
	change(&c.Pids, in.Pids)
	change(&c.TimeoutMS, in.TimeoutMS)
	mounts := slices.Clone(c.AdditionalMounts)
	for _, what := range in.Unmount {
		kept := slices.DeleteFunc(slices.Clone(mounts), func(m berth.MountRequest) bool {
			return filepath.Clean(m.HostPath) == filepath.Clean(what) || mountName(m) == what
		})
		if len(kept) == len(mounts) {
			return g, berth.Errorf(berth.NotFound, "group %s has no mount %.200q: see berth groups ls --json", g.Folder, what)
		}
		mounts = kept
	}
	for _, m := range in.Mount {
		same := func(old berth.MountRequest) bool { return mountName(old) == mountName(m) }
		if i := slices.IndexFunc(mounts, same); i >= 0 {
			mounts[i] = m
		} else {
			mounts = append(mounts, m)
		}
	}
	c.AdditionalMounts = mounts
	return g, validGroup(g)
}

func change[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}

// mountName is the name that a mount has in the container.
func mountName(m berth.MountRequest) string {
	if m.ContainerPath != "" {
		return m.ContainerPath
	}
	return filepath.Base(m.HostPath)
}

func (a *app) containerConfig(c *berth.ContainerConfig, mounts []string, memory string) error {
	for _, text := range mounts {
		m, err := parseMount(text)
		if err != nil {
			return err
		}
		c.AdditionalMounts = append(c.AdditionalMounts, m)
	}
	if memory != "" {
		bytes, ok := parseSize(memory)
		if !ok || bytes < minMemoryMiB<<20 {
			return misusef("--memory %q: give a size of at least 6m, such as 512m or 2g", memory)
		}
		c.MemoryMiB = bytes >> 20
	}
	return nil
}

// parseMount reads HOST[:NAME][:ro|rw]. A relative HOST is made absolute here:
// the daemon has another current folder.
func parseMount(text string) (berth.MountRequest, error) {
	parts := strings.Split(text, ":")
	var m berth.MountRequest
	if last := parts[len(parts)-1]; len(parts) > 1 && (last == "ro" || last == "rw") {
		m.ReadOnly = new(last == "ro")
		parts = parts[:len(parts)-1]
	}
	if len(parts) > 2 || parts[0] == "" || len(parts) == 2 && parts[1] == "" {
		return berth.MountRequest{}, misusef("--mount %q: give HOST, HOST:NAME, HOST:rw or HOST:NAME:rw", text)
	}
	if len(parts) == 2 {
		m.ContainerPath = parts[1]
	}
	var err error
	m.HostPath, err = hostPath(parts[0])
	return m, err
}

// hostPath makes a path absolute, but for one that starts in the home folder: the
// daemon's may be another.
func hostPath(path string) (string, error) {
	if strings.HasPrefix(path, "~") {
		return path, nil
	}
	return filepath.Abs(path)
}

func (a *app) printGroup(g web.Group, what string, asJSON bool) error {
	if asJSON {
		return a.printJSON(g)
	}
	text := fmt.Sprintf("group %s (%s) %s", g.Folder, g.JID, what)
	if g.RequiresTrigger && !g.Main {
		text += fmt.Sprintf(": %s wakes it", g.Trigger)
	}
	_, err := fmt.Fprintln(a.stdout, cleanLine(text))
	return err
}

func (a *app) groupsRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "rm FOLDER",
		Aliases: []string{"remove"},
		Short:   "Unregister a group; its files stay",
		Example: "  berth groups rm family",
		Args:    cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			folder := args[0]
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				if err := api.RemoveGroup(ctx, folder); err != nil {
					return err
				}
				_, err := fmt.Fprintf(a.stdout, "group %s removed; its files stay in groups/%[1]s, data/sessions/%[1]s and data/logs/%[1]s\n", cleanLine(folder))
				return err
			})
		}),
	}
}
