package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
)

func newExplainCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "explain",
		Short:   "Say why something is as it is",
		Long:    `Explain asks all processes and puts together what they know.`,
		Example: `  headlease explain partition eu-equities -f cluster.yaml --certs certs`,
		Args:    usage(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newExplainPartitionCmd(a))
	return cmd
}

func newExplainPartitionCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "partition PARTITION",
		Short: "Say who owns a partition, why, and what every voter knows of it",
		Long: `Partition shows the owner of a partition, its epoch and how it came by it; for
every voter what it has promised and accepted, when it last renewed the head
lease, how long that still runs there, and what it hears of the owner; what each
region does about the partition, with the refusals that it last met; and what
would be needed to get an owner or another one.`,
		Example: `  headlease explain partition eu-equities -f cluster.yaml --certs certs
  headlease explain partition eu-equities --json`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withCluster(func(c *cluster.Cluster) error {
				e, err := c.Explain(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				if asJSON {
					out := json.NewEncoder(a.stdout)
					out.SetIndent("", "  ")
					return out.Encode(e)
				}
				return printExplanation(a.stdout, e)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON; durations are in nanoseconds")
	return cmd
}

func printExplanation(out io.Writer, e *cluster.Explanation) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	ms := func(d time.Duration) string { return d.Round(time.Millisecond).String() }
	if e.Owner != "" {
		fmt.Fprintf(w, "partition %s: region %s holds epoch %d, for %s more\n", e.Partition, e.Owner, e.Epoch, ms(e.Left))
	} else {
		fmt.Fprintf(w, "partition %s: nobody holds it\n", e.Partition)
	}
	fmt.Fprintf(w, "configuration %d, d %v, prefer %s\n", e.Version, e.D, strings.Join(e.Prefer, ", "))
	for _, line := range e.Why {
		fmt.Fprintf(w, "why: %s\n", line)
	}
	for _, line := range e.Needs {
		fmt.Fprintf(w, "needs: %s\n", line)
	}
	fmt.Fprintf(w, "\nVOTER\tPROMISED\tACCEPTED\tOWNER\tEPOCH\tRENEWED\tREMAINING\tVERDICT\tPHI\tCONFIG\tVERSION\tPROBLEM\n")
	for _, v := range e.Voters {
		owner, renewed, verdict := v.Owner, "-", v.Verdict
		if owner == "" {
			owner = "-"
		}
		if v.Renewed >= 0 {
			renewed = ms(v.Renewed) + " ago"
		}
		if verdict == "" {
			verdict = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%.2f\t%d\t%s\t%s\n", v.ID, v.Promised, v.Accepted, owner, v.Epoch, renewed, ms(v.Remaining), verdict, v.Phi, v.Version, v.Software, v.Problem)
	}
	fmt.Fprintf(w, "\nREGION\tPHASE\tWHAT IT DOES\n")
	for _, r := range e.Regions {
		var does []string
		for _, s := range []string{r.Activity, r.Problem} {
			if s != "" {
				does = append(does, s)
			}
		}
		if r.Transfer != "" {
			does = append(does, "transfer "+r.Transfer)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", r.Name, r.Phase, strings.Join(does, "; "))
	}
	return w.Flush()
}
