package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/mount"
	"berth/orchestrator/internal/web"
)

// check is one line of berth doctor.
type check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"` // what was found, and what to do if that is bad
}

func (a *app) doctorCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check that everything is in place",
		Long: `Check that everything is in place; exit code 1 if something is not.

It changes nothing, and works with and without a daemon.`,
		Example: "  berth doctor\n  berth doctor --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			cfg, err := a.config()
			checks := checkSettings(err)
			if err == nil {
				checks = append(checks, checkRoot(cfg), checkDisk(cfg), checkDaemon(ctx, cfg))
				checks = append(checks, checkDocker(ctx, cfg)...)
				if cfg.Serves(channelWhatsApp) {
					checks = append(checks, checkWhatsApp(ctx, cfg))
				}
				checks = append(checks, checkAllowlist(cfg), checkZone(cfg))
			}
			if err := a.printChecks(checks, cfg.Values(), asJSON); err != nil {
				return err
			}
			for _, c := range checks {
				if !c.OK {
					return errTold
				}
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) printChecks(checks []check, values []Value, asJSON bool) error {
	if asJSON {
		if values == nil {
			values = []Value{}
		}
		return a.printJSON(struct {
			Checks   []check `json:"checks"`
			Settings []Value `json:"settings"`
		}{checks, values})
	}
	for _, c := range checks {
		mark := "✓"
		if !c.OK {
			mark = "✗"
		}
		fmt.Fprintf(a.stdout, "%s %-10s %s\n", mark, c.Name, cleanLine(c.Detail))
	}
	if len(values) == 0 {
		return nil
	}
	fmt.Fprintln(a.stdout)
	rows := [][]string{{"SETTING", "VALUE", "FROM"}}
	for _, v := range values {
		rows = append(rows, []string{v.Name, v.Value, v.Source})
	}
	return a.printTable(rows)
}

func checkSettings(err error) []check {
	if err == nil {
		return []check{{"settings", true, "all can be used"}}
	}
	var checks []check
	for line := range strings.SplitSeq(err.Error(), "\n") {
		checks = append(checks, check{"settings", false, line})
	}
	return checks
}

func checkRoot(cfg Config) check {
	const mayWrite = 2
	for _, dir := range []string{cfg.Root, filepath.Join(cfg.Root, "store"), filepath.Join(cfg.Root, "data"), filepath.Join(cfg.Root, "groups")} {
		err := syscall.Access(dir, mayWrite)
		if errors.Is(err, syscall.ENOENT) && dir != cfg.Root {
			continue // made at the first start
		}
		if err != nil {
			return check{"root", false, fmt.Sprintf("%s cannot be written: %v: make it, or give it to this user", dir, err)}
		}
	}
	return check{"root", true, cfg.Root}
}

func checkDisk(cfg Config) check {
	const least = 1 << 30
	var fs syscall.Statfs_t
	if err := syscall.Statfs(cfg.Root, &fs); err != nil {
		return check{"disk", false, fmt.Sprintf("the free space of %s is not known: %v", cfg.Root, err)}
	}
	free := fs.Bavail * uint64(fs.Bsize)
	text := fmt.Sprintf("%.1f GiB free", float64(free)/(1<<30))
	if free < least {
		return check{"disk", false, text + ": make room, at least 1 GiB"}
	}
	return check{"disk", true, text}
}

func checkDaemon(ctx context.Context, cfg Config) check {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	s, err := web.NewClient(cfg.Socket()).Status(ctx)
	switch {
	case err == nil && s.Ready:
		return check{"daemon", true, fmt.Sprintf("answers (pid %d)", s.PID)}
	case err == nil:
		return check{"daemon", true, fmt.Sprintf("is starting (pid %d): %s", s.PID, startStep(s))}
	case !noDaemon(err):
		return check{"daemon", false, explain(cfg, err).Error()}
	case locked(filepath.Join(cfg.Root, "store", "berth.lock")):
		return check{"daemon", false, "a process holds store/berth.lock but does not answer: wait, or end it"}
	}
	return check{"daemon", true, "none runs: \"berth run\" starts it"}
}

// checkWhatsApp asks the daemon how it stands with the link, or reads what the last
// one wrote.
func checkWhatsApp(ctx context.Context, cfg Config) check {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if s, err := web.NewClient(cfg.Socket()).Status(ctx); err == nil {
		for _, c := range s.Channels {
			if c.Name == channelWhatsApp {
				return check{channelWhatsApp, !c.NeedsPerson, join(channelLine(c), c.WhatToDo)}
			}
		}
		return check{channelWhatsApp, false, "CHANNELS names it, but the daemon was started without: start it again"}
	}
	c, ok, err := readStatus(cfg)
	switch {
	case err != nil:
		return check{channelWhatsApp, false, err.Error()}
	case !ok:
		return check{channelWhatsApp, false, "no account is linked: berth login whatsapp"}
	case c.NeedsPerson:
		return check{channelWhatsApp, false, join("without a daemon; last "+channelLine(c), c.WhatToDo)}
	}
	return check{channelWhatsApp, true, "linked as " + c.Account + "; a daemon connects it"}
}

func join(what, todo string) string {
	if todo == "" {
		return what
	}
	return what + ": " + todo
}

// locked reports whether a process holds the lock on file.
func locked(file string) bool {
	f, err := os.Open(file)
	if err != nil {
		return false
	}
	defer f.Close() // gives the lock back
	return errors.Is(syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB), syscall.EWOULDBLOCK)
}

func checkDocker(ctx context.Context, cfg Config) []check {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	engine, err := openDocker(cfg)
	if err != nil {
		return []check{{"docker", false, err.Error()}}
	}
	defer engine.Close()
	var checks []check
	info, up := engine.Ping(ctx)
	if up != nil {
		checks = append(checks, check{"docker", false, up.Error()})
	} else {
		checks = append(checks, check{"docker", true, fmt.Sprintf("version %s at %s", info.Version, engine.Host())})
	}
	checks = append(checks, checkRunner(engine), checkBusybox())
	if up != nil {
		return checks // where the image would be
	}
	image, err := findImage(ctx, cfg, engine)
	switch {
	case err != nil:
		checks = append(checks, check{"image", false, err.Error()})
	case image.Present:
		checks = append(checks, check{"image", true, image.Ref})
	case image.Own:
		checks = append(checks, check{"image", true, image.Ref + " is not there yet: the daemon builds it when it starts"})
	default:
		checks = append(checks, check{"image", false, image.Ref + " is missing: pull it, or change CONTAINER_IMAGE"})
	}
	return checks
}

func checkRunner(engine *docker.Engine) check {
	files, err := imageFiles()
	if err == nil {
		_, err = engine.ImageRef(docker.ImageFiles{Runner: files.Runner})
	}
	if err != nil {
		return check{"runner", false, err.Error() + ": put the agent-runner beside berth (make build does)"}
	}
	return check{"runner", true, files.Runner}
}

func checkBusybox() check {
	if path := docker.FindBusybox(); path != "" {
		return check{"busybox", true, path}
	}
	return check{"busybox", true, "none: the agent image gets no shell; install busybox-static for one"}
}

func checkAllowlist(cfg Config) check {
	list, err := mount.Load(cfg.MountAllowlist)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return check{"mounts", true, "no allowlist at " + cfg.MountAllowlist + ": no host folder is mounted"}
	case err != nil:
		return check{"mounts", false, strings.ReplaceAll(err.Error(), "\n", "; ") + ": nothing is mounted until that is mended"}
	}
	return check{"mounts", true, fmt.Sprintf("%d allowed roots in %s", len(list.Roots()), cfg.MountAllowlist)}
}

func checkZone(cfg Config) check {
	return check{"time zone", true, fmt.Sprintf("%s, now %s", cfg.TimezoneName, time.Now().In(cfg.Timezone).Format("Mon 15:04 -07:00"))}
}
