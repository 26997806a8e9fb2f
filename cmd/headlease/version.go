package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/internal/version"
)

// versionLine is what 'headlease version' and --version print.
func versionLine() string {
	v := version.Get()
	commit := ""
	if v.Commit != "" {
		commit = " (" + v.Commit + ")"
	}
	return fmt.Sprintf("%s%s %s %s/%s", v.Version, commit, v.Go, v.OS, v.Arch)
}

func newVersionCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print what this build is",
		Example: "  headlease version\n  headlease version --json",
		Args:    usage(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if asJSON {
				out, err := json.Marshal(version.Get())
				if err != nil {
					return err
				}
				return a.printf("%s\n", out)
			}
			return a.printf("headlease %s\n", versionLine())
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
