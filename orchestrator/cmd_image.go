package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"berth/container"
	"berth/orchestrator/internal/docker"
)

func (a *app) imageCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "image",
		Short: "Build the agent image, or look at it",
		Long: `Build the agent image, or look at it.

The image is made from the agent-runner beside berth, without a registry; the
daemon does it by itself when it starts.`,
		Example: "  berth image build\n  berth image status --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(context.Context, []string) error {
			return misusef("image needs one of build, status")
		}),
	}
	cmd.AddCommand(a.imageBuildCommand(), a.imageStatusCommand())
	return cmd
}

// imageFiles returns what the agent image is made of: the runner beside this
// program, and the machine's busybox if it has a static one.
func imageFiles() (docker.ImageFiles, error) {
	self, err := os.Executable()
	if err != nil {
		return docker.ImageFiles{}, fmt.Errorf("find this program: %w", err)
	}
	if real, err := filepath.EvalSymlinks(self); err == nil {
		self = real
	}
	return docker.ImageFiles{
		Runner:  filepath.Join(filepath.Dir(self), "agent-runner"),
		Busybox: docker.FindBusybox(),
	}, nil
}

// openDocker returns an engine for looking at images and building them. The
// images it builds are kept for the command line until it builds the next.
func openDocker(cfg Config) (*docker.Engine, error) {
	return docker.New(docker.Options{Install: "cli", Host: cfg.DockerHost, TLSDir: cfg.DockerCertPath})
}

// fullImage is the name of the images that are made on demand.
const fullImage = "berth-full:latest"

func (a *app) imageBuildCommand() *cobra.Command {
	var full bool
	var rootfs, tag string
	var args []string
	cmd := &cobra.Command{
		Use:   "build",
		Short: "Build the agent image if it is not there, and print its reference",
		Long: `Build the agent image if it is not there, and print its reference.

Without a flag it is the small image that the daemon makes by itself. --full
makes a larger one with git, ripgrep, curl, jq and agent programs, from
registries. --from-rootfs makes one without a registry, from a folder that holds
a root file system; container/make-rootfs.sh makes such a folder.

Name the image in CONTAINER_IMAGE to use it for all groups, or give it to one:
berth groups set FOLDER --image ` + fullImage + `.`,
		Example: `  berth image build
  berth image build --full --arg CLAUDE=2.1.329
  berth image build --from-rootfs ./rootfs --tag my-agent:1`,
		Args: cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			if full && rootfs != "" {
				return misusef("give --full or --from-rootfs, not both")
			}
			if !full && rootfs == "" && tag != fullImage {
				return misusef("--tag goes with --full or --from-rootfs")
			}
			if !full && len(args) > 0 {
				return misusef("--arg goes with --full")
			}
			values := make(map[string]string, len(args))
			for _, arg := range args {
				name, value, ok := strings.Cut(arg, "=")
				if !ok || name == "" {
					return misusef("--arg %q: give NAME=VALUE", arg)
				}
				values[name] = value
			}
			cfg, err := a.config()
			if err != nil {
				return err
			}
			files, err := imageFiles()
			if err != nil {
				return err
			}
			engine, err := openDocker(cfg)
			if err != nil {
				return err
			}
			progress := func(step string) { a.note("%s", step) }
			ref := tag
			switch {
			case full:
				err = engine.BuildFromDockerfile(ctx, container.Dockerfile, files.Runner, tag, values, progress)
			case rootfs != "":
				_, err = engine.BuildFromRootfs(ctx, rootfs, files.Runner, tag, progress)
			default:
				ref, _, err = engine.BuildImage(ctx, files, progress)
			}
			if err := errors.Join(err, engine.Close()); err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.stdout, ref)
			return err
		}),
	}
	cmd.Flags().BoolVar(&full, "full", false, "make the large image from registries")
	cmd.Flags().StringVar(&rootfs, "from-rootfs", "", "make an image of this root file system")
	cmd.Flags().StringVar(&tag, "tag", fullImage, "name of the image, with --full or --from-rootfs")
	cmd.Flags().StringArrayVar(&args, "arg", nil, "a value for container/Dockerfile, such as OPENCODE=1.18.33; may be repeated")
	return cmd
}

type imageStatus struct {
	Ref     string `json:"ref"`
	Present bool   `json:"present"`
	Own     bool   `json:"own"` // made here, not named by CONTAINER_IMAGE
}

// findImage says which image containers are made from, and whether the engine
// has it.
func findImage(ctx context.Context, cfg Config, engine *docker.Engine) (imageStatus, error) {
	s := imageStatus{Ref: cfg.Image, Own: cfg.Image == ""}
	if s.Own {
		files, err := imageFiles()
		if err != nil {
			return s, err
		}
		if s.Ref, err = engine.ImageRef(files); err != nil {
			return s, err
		}
	}
	var err error
	s.Present, err = engine.ImagePresent(ctx, s.Ref)
	return s, err
}

func (a *app) imageStatusCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "status",
		Aliases: []string{"ls"},
		Short:   "Say which image the agents run in, and whether it is there",
		Example: "  berth image status --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(ctx context.Context, _ []string) error {
			cfg, err := a.config()
			if err != nil {
				return err
			}
			engine, err := openDocker(cfg)
			if err != nil {
				return err
			}
			s, err := findImage(ctx, cfg, engine)
			if err := errors.Join(err, engine.Close()); err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(s)
			}
			state := "present"
			if !s.Present {
				state = "missing: \"berth image build\" makes it"
				if !s.Own {
					state = "missing: pull it, or change CONTAINER_IMAGE"
				}
			}
			return a.printTable([][]string{{"IMAGE", "STATE"}, {s.Ref, state}})
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
