package main

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the linker for a release.
var version string

type versionInfo struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// buildVersion returns the version of this build.
func buildVersion() string { return thisBuild().Version }

func thisBuild() versionInfo {
	v := versionInfo{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = new(debug.BuildInfo)
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	if v.Version == "" {
		v.Version = info.Main.Version
	}
	if v.Version == "" {
		v.Version = "(devel)"
	}
	return v
}

func (a *app) versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Say which build this is",
		Example: "  berth version --json",
		Args:    cobra.NoArgs,
		RunE: a.do(func(context.Context, []string) error {
			v := thisBuild()
			if asJSON {
				return a.printJSON(v)
			}
			text := "berth " + v.Version
			if v.Revision != "" {
				text += " " + v.Revision[:min(12, len(v.Revision))]
				if v.Modified {
					text += " (modified)"
				}
			}
			_, err := fmt.Fprintf(a.stdout, "%s, %s, %s\n", text, v.Go, v.Platform)
			return err
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
