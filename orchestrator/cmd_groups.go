package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/web"
)

// groupsAPI is what the groups commands need.
type groupsAPI interface {
	Groups(ctx context.Context) ([]web.Group, error)
	AddGroup(ctx context.Context, g web.NewGroup) (web.Group, error)
	RemoveGroup(ctx context.Context, folder string) error
}

func (a *app) groupsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "groups",
		Short: "List, add and remove groups",
		Long: `List, add and remove groups.

Without a daemon these commands work on the store itself.`,
		Example: "  berth groups ls\n  berth groups add family --trigger @Andy\n  berth groups rm family",
		Args:    cobra.NoArgs,
		RunE: a.do(func(context.Context, []string) error {
			return misusef("groups needs one of ls, add, rm")
		}),
	}
	cmd.AddCommand(a.groupsListCommand(), a.groupsAddCommand(), a.groupsRemoveCommand())
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
	f.StringVar(&memory, "memory", "", "memory of its container, for example 2g")
	f.BoolVar(&ifMissing, "if-missing", false, "a group that is there already is left as it is")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
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
		if !ok || bytes < 6<<20 {
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
	m.HostPath = parts[0]
	if len(parts) == 2 {
		m.ContainerPath = parts[1]
	}
	if !strings.HasPrefix(m.HostPath, "~") {
		path, err := filepath.Abs(m.HostPath)
		if err != nil {
			return berth.MountRequest{}, err
		}
		m.HostPath = path
	}
	return m, nil
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
