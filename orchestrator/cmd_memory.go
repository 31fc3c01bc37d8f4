package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/memory"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
)

// shelf is web.MemoryDesk over a store.
type shelf struct {
	store  *sqlite.DB
	groups func(context.Context) ([]berth.Group, error)
}

func (s shelf) Memories(ctx context.Context, folder string) ([]web.Memory, error) {
	read := s.store.AllMemories
	if folder != "" {
		read = func(ctx context.Context) ([]memory.Memory, error) { return s.store.Memories(ctx, folder) }
	}
	rows, err := read(ctx)
	out := make([]web.Memory, 0, len(rows))
	for _, m := range rows {
		out = append(out, describeMemory(m))
	}
	return out, err
}

func describeMemory(m memory.Memory) web.Memory {
	return web.Memory{ID: m.ID, Group: m.Folder, Fact: m.Fact, Source: m.Source, CreatedAt: m.CreatedAt, UpdatedAt: m.UpdatedAt}
}

func (s shelf) AddMemory(ctx context.Context, in web.NewMemory) (web.Memory, error) {
	groups, err := s.groups(ctx)
	if err != nil {
		return web.Memory{}, err
	}
	if in.Group != memory.Global && !slices.ContainsFunc(groups, func(g berth.Group) bool { return g.Folder == in.Group }) {
		return web.Memory{}, berth.Errorf(berth.NotFound, "there is no group %.80q: see berth groups ls, or add it with berth groups add", in.Group)
	}
	m, known, err := s.store.AddMemory(ctx, memory.Memory{Folder: in.Group, Fact: in.Fact, Source: "operator", CreatedAt: time.Now()})
	out := describeMemory(m)
	out.Known = known
	return out, err
}

func (s shelf) ForgetMemory(ctx context.Context, folder string, id int64) (web.Memory, error) {
	m, err := s.store.ForgetMemory(ctx, folder, id, "")
	return describeMemory(m), err
}

func (c *control) shelf() shelf {
	return shelf{c.db, func(context.Context) ([]berth.Group, error) { return c.dispatcher.Groups(), nil }}
}

func (c *control) Memories(ctx context.Context, folder string) ([]web.Memory, error) {
	return c.shelf().Memories(ctx, folder)
}

func (c *control) AddMemory(ctx context.Context, in web.NewMemory) (web.Memory, error) {
	return c.shelf().AddMemory(ctx, in)
}

func (c *control) ForgetMemory(ctx context.Context, folder string, id int64) (web.Memory, error) {
	return c.shelf().ForgetMemory(ctx, folder, id)
}

func (a *app) memoryCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "memory",
		Short: "See and change what agents remember",
		Long: `See and change what agents remember.

A memory is a short fact that a group's agent is told at the beginning of every
conversation; those with --global are told to the agents of all groups. Agents
and people in the chat add to them as well. Without a daemon these commands work
on the store itself.`,
		Example: `  berth memory ls -g family
  berth memory add -g family "Ann does not eat nuts"
  berth memory add --global "The office is closed in August"
  berth memory forget -g family 3`,
		Args: cobra.NoArgs,
		RunE: a.do(func(context.Context, []string) error {
			return misusef("memory needs one of ls, add, forget")
		}),
	}
	cmd.AddCommand(a.memoryListCommand(), a.memoryAddCommand(), a.memoryForgetCommand())
	return cmd
}

// whose is the choice of a folder of memories.
type whose struct {
	group  string
	global bool
}

func (w *whose) flags(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&w.group, "group", "g", "", "of this group")
	cmd.Flags().BoolVar(&w.global, "global", false, "of all groups")
}

// folder returns the folder that is meant, which is empty if none was named.
func (w *whose) folder() (string, error) {
	switch {
	case w.global && w.group != "":
		return "", misusef("give either --group or --global")
	case w.global:
		return memory.Global, nil
	}
	return w.group, nil
}

// one is folder where one has to be named.
func (w *whose) one() (string, error) {
	folder, err := w.folder()
	if err == nil && folder == "" {
		err = misusef("name the group with --group, or give --global")
	}
	return folder, err
}

func (a *app) memoryListCommand() *cobra.Command {
	var of whose
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List what is remembered",
		Example: "  berth memory ls\n  berth memory ls -g family --json\n  berth memory ls --global",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			folder, err := of.folder()
			if err != nil {
				return err
			}
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				memories, err := api.Memories(ctx, folder)
				if err != nil {
					return err
				}
				if asJSON {
					return a.printJSON(memories)
				}
				rows := [][]string{{"GROUP", "ID", "FROM", "SINCE", "FACT"}}
				for _, m := range memories {
					rows = append(rows, []string{m.Group, strconv.FormatInt(m.ID, 10), m.Source, m.CreatedAt.Local().Format(time.DateOnly), m.Fact})
				}
				return a.printTable(rows)
			})
		}),
	}
	of.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) memoryAddCommand() *cobra.Command {
	var of whose
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "add -g GROUP|--global FACT",
		Short:   "Have a fact remembered",
		Example: "  berth memory add -g family \"Ann does not eat nuts\"\n  berth memory add --global \"The office is closed in August\"",
		Args:    cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			folder, err := of.one()
			if err != nil {
				return err
			}
			if strings.TrimSpace(args[0]) == "" {
				return misusef("the fact is empty: say what to remember")
			}
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				m, err := api.AddMemory(ctx, web.NewMemory{Group: folder, Fact: args[0]})
				if err != nil {
					return err
				}
				what := "saved"
				if m.Known {
					what = "says that already"
				}
				return a.printMemory(m, what, asJSON)
			})
		}),
	}
	of.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) memoryForgetCommand() *cobra.Command {
	var of whose
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "forget -g GROUP|--global ID",
		Aliases: []string{"rm"},
		Short:   "Forget a fact",
		Example: "  berth memory forget -g family 3",
		Args:    cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			folder, err := of.one()
			if err != nil {
				return err
			}
			id, err := strconv.ParseInt(args[0], 10, 64)
			if err != nil || id <= 0 {
				return misusef("%.40q is no id: see berth memory ls", args[0])
			}
			return a.withStore(ctx, func(ctx context.Context, api storeAPI) error {
				m, err := api.ForgetMemory(ctx, folder, id)
				if err != nil {
					return err
				}
				return a.printMemory(m, "forgotten", asJSON)
			})
		}),
	}
	of.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) printMemory(m web.Memory, what string, asJSON bool) error {
	if asJSON {
		return a.printJSON(m)
	}
	_, err := fmt.Fprintf(a.stdout, "memory %d of %s %s: %s\n", m.ID, m.Group, what, m.Fact)
	return err
}
