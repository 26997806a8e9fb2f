package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/clusterfile/load"
)

func newConfigCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show and change the cluster's configuration; examples and checks of the cluster file",
		Example: `  headlease config example > cluster.yaml
  headlease config check cluster.yaml
  headlease config show
  headlease config apply cluster.yaml`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newConfigExampleCmd(a), newConfigCheckCmd(a), newConfigShowCmd(a), newConfigApplyCmd(a))
	return cmd
}

func newConfigExampleCmd(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "example",
		Short:   "Print a commented cluster file",
		Example: "  headlease config example > cluster.yaml",
		Args:    usage(cobra.NoArgs),
		RunE:    func(*cobra.Command, []string) error { return a.printf("%s", clusterfile.Example()) },
	}
}

func newConfigCheckCmd(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "check [FILE]",
		Short: "Report everything wrong with a cluster file",
		Long: `Check reads the cluster file (FILE, or --config) together with the HEADLEASE_
variables and reports all faults at once, each with the field, the value and the
remedy.`,
		Example: "  headlease config check cluster.yaml",
		Args:    usage(cobra.MaximumNArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			path := a.config
			if len(args) == 1 {
				path = args[0]
			}
			f, warnings, err := load.File(path)
			for _, w := range warnings {
				if _, err := fmt.Fprintf(a.stderr, "warning: %s\n", w); err != nil {
					return err
				}
			}
			if err != nil {
				return err
			}
			return a.printf("%s is good: cluster %s, %s with %s, %s, %s over %d shards, d %v\n", path, f.Cluster,
				count(len(f.Regions), "region"), count(len(f.Processes())-len(f.Witnesses), "server"),
				count(len(f.Witnesses), "witness"), count(len(f.Partitions), "partition"), f.Shards, f.D)
		},
	}
}

// count writes a number with its noun: "1 region", "3 witnesses".
func count(n int, noun string) string {
	switch {
	case n == 1:
	case noun == "witness":
		noun = "witnesses"
	default:
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
