package main

import (
	"encoding/json"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/internal/version"
)

func newVersionCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print what this build is",
		Example: "  headlease version\n  headlease version --json",
		Args:    usage(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			v := version.Get()
			if asJSON {
				out, err := json.Marshal(v)
				if err != nil {
					return err
				}
				return a.printf("%s\n", out)
			}
			commit := ""
			if v.Commit != "" {
				commit = " (" + v.Commit + ")"
			}
			return a.printf("headlease %s%s %s %s/%s\n", v.Version, commit, v.Go, v.OS, v.Arch)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
