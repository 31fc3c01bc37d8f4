package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/sqlite"
	"berth/orchestrator/internal/web"
	"berth/orchestrator/internal/workspace"
)

func (a *app) backupCommand() *cobra.Command {
	var force, asJSON bool
	cmd := &cobra.Command{
		Use:   "backup FILE",
		Short: "Write a backup of the store",
		Long: `Write a backup of the store into one file, and check it.

The store holds messages, groups, tasks and how far each agent has come. The
folders groups/ and data/ are not in it: copy them by other means.

A running daemon writes the file, with its own rights, and goes on working
meanwhile. Without a daemon this command reads the store itself. FILE is
readable for its owner alone. "berth restore" puts it back.`,
		Example: `  berth backup ~/berth-$(date +%F).db
  berth backup --force /mnt/backup/berth.db
  berth backup --json ~/berth.db`,
		Args: cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			if args[0] == "" {
				return misusef("name the file to write")
			}
			// The daemon has another current folder.
			file, err := filepath.Abs(args[0])
			if err != nil {
				return err
			}
			b, err := a.writeBackup(ctx, web.NewBackup{File: file, Replace: force})
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(b)
			}
			text := fmt.Sprintf("backup written to %s: %s, %s, %s", b.File, units.BytesSize(float64(b.Bytes)), count(b.Messages, "message"), count(b.Groups, "group"))
			_, err = fmt.Fprintln(a.stdout, cleanLine(text))
			return err
		}),
	}
	cmd.Flags().BoolVar(&force, "force", false, "replace FILE if it is there")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// writeBackup lets the daemon write a backup, or reads the store if none runs.
func (a *app) writeBackup(ctx context.Context, in web.NewBackup) (b web.Backup, err error) {
	cfg, client, err := a.client()
	if err != nil {
		return b, err
	}
	// A large store takes its time: only the user ends the wait.
	if b, err = client.Backup(ctx, in); !noDaemon(err) {
		return b, explain(cfg, err)
	}
	store := storePath(cfg)
	if _, err := os.Stat(store); errors.Is(err, os.ErrNotExist) {
		return b, fmt.Errorf("there is no store at %s: there is nothing to back up; choose another --root", store)
	}
	lock, err := lockRoot(filepath.Dir(store))
	if err != nil {
		return b, err
	}
	defer lock.Close()
	a.note("no daemon: working on the store")
	// Not through sqlite.Open: that would bring the schema up to date, and a
	// backup may be wanted because of the next version.
	return backUp(ctx, cfg, in, func(ctx context.Context, file string, replace bool) (sqlite.Contents, error) {
		return sqlite.Backup(ctx, store, file, replace)
	})
}

// backUp writes a backup to where one may be.
func backUp(ctx context.Context, cfg Config, in web.NewBackup, write func(ctx context.Context, file string, replace bool) (sqlite.Contents, error)) (web.Backup, error) {
	if err := backupPlace(cfg.Root, in.File); err != nil {
		return web.Backup{}, err
	}
	c, err := write(ctx, in.File, in.Replace)
	if err != nil {
		return web.Backup{}, err
	}
	b := web.Backup{File: in.File, Bytes: c.Bytes, Messages: c.Messages, Groups: c.Groups}
	if !c.Newest.IsZero() {
		b.Newest = &c.Newest
	}
	return b, nil
}

// backupPlace refuses folders that containers see, since a backup holds
// everybody's chats, and the store's own, where it could replace a live file.
func backupPlace(root, file string) error {
	if !filepath.IsAbs(file) {
		return berth.Errorf(berth.Invalid, "the backup's path %q is not absolute", file)
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(file))
	if err != nil {
		return nil // writing it says what is wrong
	}
	for name, why := range map[string]string{
		"groups": "agents can read it there", "data": "agents can read it there", "store": "the live files are there",
	} {
		closed, err := filepath.EvalSymlinks(filepath.Join(root, name))
		if err != nil {
			continue
		}
		if rel, err := filepath.Rel(closed, dir); err == nil && filepath.IsLocal(rel) {
			return berth.Errorf(berth.Invalid, "a backup does not belong into %s: %s; choose another folder", closed, why)
		}
	}
	return nil
}

func (a *app) restoreCommand() *cobra.Command {
	var o sqlite.RestoreOptions
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Put a backup in the place of the store",
		Long: `Put a backup in the place of the store. No daemon may run.

FILE is checked first and stays as it is. The store that was there is kept
beside the restored one, as store/messages.db.before-<time>; it can be restored
in turn. Replacing a store that is sound and holds something needs --force.

What happened after the backup is unknown to it. Runs that were live then are
ended: the next start removes their containers. Messages without an answer and
texts not yet sent are answered and sent at the next start, perhaps once more;
with --drop-pending they are not.`,
		Example: `  berth stop --daemon && berth restore ~/berth-2026-11-20.db
  berth restore --drop-pending ~/berth-2026-11-20.db
  berth restore --force store/messages.db.before-20261121T101500.000Z`,
		Args: cobra.ExactArgs(1),
		RunE: a.do(func(ctx context.Context, args []string) error {
			if args[0] == "" {
				return misusef("name the backup")
			}
			return a.restore(ctx, args[0], o)
		}),
	}
	cmd.Flags().BoolVar(&o.Force, "force", false, "replace also a store that is sound and holds something")
	cmd.Flags().BoolVar(&o.DropPending, "drop-pending", false, "answer and send nothing that was pending in the backup")
	return cmd
}

func (a *app) restore(ctx context.Context, file string, o sqlite.RestoreOptions) error {
	cfg, err := a.config()
	if err != nil {
		return err
	}
	if _, err := os.Stat(file); err != nil {
		return fmt.Errorf("read the backup: %w", err) // before anything is made in a fresh root
	}
	tree, err := workspace.NewTree(cfg.Root, agentUID(), agentGID())
	if err != nil {
		return err
	}
	lock, err := lockRoot(tree.StoreDir())
	if err != nil {
		return err
	}
	defer lock.Close()
	// The install is the root's: with that of another root, this one's daemon
	// would remove the other's containers.
	o.Keep = []string{"install"}
	o.Now = time.Now()
	r, err := sqlite.Restore(ctx, storeFile(tree), file, o)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(a.stdout, clean(restored(file, o, r)))
	return err
}

// restored says what a restore did and what follows from it.
func restored(file string, o sqlite.RestoreOptions, r sqlite.Restored) string {
	what := fmt.Sprintf("restored %s: %s, %s", cleanLine(file), count(r.Messages, "message"), count(r.Groups, "group"))
	since := "the backup"
	if !r.Newest.IsZero() {
		what += fmt.Sprintf("; the newest message is of %s, %s ago", r.Newest.Local().Format("2006-01-02 15:04:05 MST"), ago(r.Newest))
		since = "that"
	}
	lines := []string{what}
	if r.Kept != "" {
		lines = append(lines, "the store that was there is kept as "+r.Kept)
	} else {
		lines = append(lines, "there was no store: if the root that the backup is of is still in use, do not run both on one Docker engine")
	}
	lines = append(lines, fmt.Sprintf("messages and answers after %s are unknown to this store", since))
	if r.Runs > 0 {
		lines = append(lines, count(r.Runs, "run")+" of then ended: the next start removes their containers")
	}
	switch {
	case o.DropPending:
		lines = append(lines, "nothing of then is pending: what had no answer is left without")
	case r.Waiting+r.Unsent > 0:
		lines = append(lines,
			fmt.Sprintf("the next start answers %s and sends %s of then, also if that was done since", count(r.Waiting, "message"), count(r.Unsent, "text")),
			fmt.Sprintf("to prevent that, first: berth restore --force --drop-pending %s", cleanLine(file)))
	}
	return strings.Join(lines, "\n")
}

func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

func storePath(cfg Config) string { return filepath.Join(cfg.Root, "store", "messages.db") }
