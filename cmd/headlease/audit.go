package main

import (
	"fmt"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
)

func newAuditCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Show what changed who owns what",
		Long: `Every region server keeps an append-only record of changes of ownership, planned
transfers, leaders, configurations and alarms in its data directory, of at most two
files of 16 MiB.`,
		Example: `  headlease audit export -f cluster.yaml --certs certs > audit.jsonl`,
		Args:    usage(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newAuditExportCmd(a))
	return cmd
}

func newAuditExportCmd(a *app) *cobra.Command {
	var regions []string
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Print the audit records of all regions as JSON lines",
		Long: `Export asks every region server for its record and prints each entry once: those of
a region in the order of its log, those of several regions merged by time. A server
that does not answer is told on the standard error stream, and the exit code is 1;
the others of its region have the same entries.`,
		Example: `  headlease audit export -f cluster.yaml --certs certs > audit.jsonl
  headlease audit export --region eu`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withCluster(func(c *cluster.Cluster) error {
				lines, err := c.Audit(cmd.Context(), regions...)
				for _, line := range lines {
					if _, err := fmt.Fprintln(a.stdout, line); err != nil {
						return err
					}
				}
				return err
			})
		},
	}
	cmd.Flags().StringSliceVar(&regions, "region", nil, "only these regions")
	return cmd
}
