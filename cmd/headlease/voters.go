package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// changeTimeout is how long a change of the members waits by default.
const changeTimeout = 2 * time.Minute

// resumable is what every command that changes the configuration says of itself.
const resumable = `

All it knows it asks the voters, so it may be broken off at any point and run
again from any machine; leases and campaigns go on meanwhile.`

// member makes a command that changes the members.
type member struct {
	use, short, long, example string
	args                      int
	do                        func(ctx context.Context, c *cluster.Cluster, args []string, progress func(string)) (*pb.ClusterConfiguration, error)
}

func newMemberCmd(a *app, m member) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: m.use, Short: m.short, Long: m.long + resumable, Example: m.example, Args: usage(cobra.ExactArgs(m.args)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.change(cmd.Context(), timeout, func(ctx context.Context, c *cluster.Cluster, progress func(string)) (*pb.ClusterConfiguration, error) {
				return m.do(ctx, c, args, progress)
			})
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", changeTimeout, "how long to wait for voters that do not answer")
	return cmd
}

// change runs a change of the configuration, with its progress on the standard
// error stream, and prints where it ended.
func (a *app) change(ctx context.Context, timeout time.Duration, do func(context.Context, *cluster.Cluster, func(string)) (*pb.ClusterConfiguration, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errors.New("the time given by --timeout is over"))
	defer cancel()
	return a.withCluster(func(c *cluster.Cluster) error {
		conf, err := do(ctx, c, func(step string) { _, _ = fmt.Fprintln(a.stderr, step) })
		if err != nil {
			return err
		}
		return a.printf("configuration %d, %s\n", conf.GetVersion(), count(len(conf.GetVoters()), "voter"))
	})
}

func witnessMemberCmds(a *app) []*cobra.Command {
	return []*cobra.Command{
		newMemberCmd(a, member{
			use: "add NAME", short: "Make a witness of the cluster file a voter", args: 1,
			long: `Add makes a witness of the cluster file a voter of the cluster. Start it first, with
an empty data directory, and put it into the cluster file of every process. An
odd number of witnesses is best: with an even one, one more must answer and none
more may be lost.`,
			example: "  headlease witness add w4 -f cluster.yaml --certs certs",
			do: func(ctx context.Context, c *cluster.Cluster, args []string, progress func(string)) (*pb.ClusterConfiguration, error) {
				return c.AddWitness(ctx, args[0], progress)
			},
		}),
		newMemberCmd(a, member{
			use: "remove NAME", short: "End the membership of a witness", args: 1,
			long: `Remove takes a witness out of the voters; it need not run, nor be in the cluster
file. Its data directory is of no use afterwards.`,
			example: "  headlease witness remove w4 -f cluster.yaml --certs certs",
			do: func(ctx context.Context, c *cluster.Cluster, args []string, progress func(string)) (*pb.ClusterConfiguration, error) {
				return c.RemoveWitness(ctx, args[0], progress)
			},
		}),
		newMemberCmd(a, member{
			use: "replace OLD NEW", short: "Make one witness a voter instead of another", args: 2,
			long: `Replace adds the witness NEW and removes the witness OLD, one after the other. NEW
runs, with an empty data directory, and is in the cluster file of every process;
OLD may be lost. A witness whose data was wiped is replaced by itself: give its
name twice.`,
			example: `  headlease witness replace w2 w4 -f cluster.yaml --certs certs
  headlease witness replace w2 w2 -f cluster.yaml --certs certs   # after its disk was lost`,
			do: func(ctx context.Context, c *cluster.Cluster, args []string, progress func(string)) (*pb.ClusterConfiguration, error) {
				return c.ReplaceWitness(ctx, args[0], args[1], progress)
			},
		}),
	}
}

func regionMemberCmds(a *app) []*cobra.Command {
	return []*cobra.Command{
		newMemberCmd(a, member{
			use: "add NAME", short: "Make a region of the cluster file a voter", args: 1,
			long: `Add makes the Raft group of a region of the cluster file, if it has none, and makes
the region a voter. Start its servers first, and put them into the cluster file
of every process. It owns nothing until a partition prefers it: see 'headlease
config apply'.`,
			example: "  headlease region add ap -f cluster.yaml --certs certs",
			do: func(ctx context.Context, c *cluster.Cluster, args []string, progress func(string)) (*pb.ClusterConfiguration, error) {
				return c.AddRegion(ctx, args[0], progress)
			},
		}),
		newMemberCmd(a, member{
			use: "remove NAME", short: "End the membership of a region that owns nothing", args: 1,
			long: `Remove takes a region out of the voters. While it owns a partition it is refused:
drain it first ('headlease region drain'), and take it out of the lists of preferred
regions ('headlease config apply'), so that it becomes no owner meanwhile. A region
whose servers are lost for good need not run; its partitions have new owners by
then.`,
			example: `  headlease region drain ap -f cluster.yaml --certs certs
  headlease region remove ap -f cluster.yaml --certs certs`,
			do: func(ctx context.Context, c *cluster.Cluster, args []string, progress func(string)) (*pb.ClusterConfiguration, error) {
				return c.RemoveRegion(ctx, args[0], progress)
			},
		}),
		newMemberCmd(a, member{
			use: "replace NAME", short: "Make a region whose data is new a voter instead of its old self", args: 1,
			long: `Replace removes a region's old incarnation and adds the present one, after all its
data was lost and its servers started with empty data directories, or after a
restore. Sessions and leases of the old one are lost; tokens go on rising.`,
			example: "  headlease region replace eu -f cluster.yaml --certs certs",
			do: func(ctx context.Context, c *cluster.Cluster, args []string, progress func(string)) (*pb.ClusterConfiguration, error) {
				return c.ReplaceRegion(ctx, args[0], progress)
			},
		}),
	}
}

// confirm asks on the terminal, or needs yes.
func (a *app) confirm(yes bool, diff []string) error {
	for _, line := range diff {
		if _, err := fmt.Fprintln(a.stderr, line); err != nil {
			return err
		}
	}
	if yes {
		return nil
	}
	if _, err := fmt.Fprint(a.stderr, "apply this? [y/N] "); err != nil {
		return err
	}
	var answer string
	if _, err := fmt.Fscanln(a.stdin(), &answer); err != nil || answer != "y" && answer != "yes" {
		return errors.New("not applied: answer y, or give --yes")
	}
	return nil
}
