package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
)

func newPartitionCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "partition",
		Short: "Move partitions between regions",
		Long: `A partition is owned by one region at a time. It passes to another one by itself
when its region is lost; these commands move it in order.`,
		Example: `  headlease partition transfer eu-equities --to us -f cluster.yaml --certs certs`,
		Args:    usage(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newTransferCmd(a))
	return cmd
}

// drainFlags are those of commands that drain.
type drainFlags struct{ drain, timeout time.Duration }

func (d *drainFlags) add(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&d.drain, "drain", cluster.DefaultDrain, "how long holders may go on after they are told")
	cmd.Flags().DurationVar(&d.timeout, "timeout", 2*time.Minute, "abort what is not done after so long")
}

func (d *drainFlags) context(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if d.drain < 0 || d.drain > 10*time.Minute {
		return nil, nil, errors.New("--drain: choose 0s to 10m")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, d.timeout, errors.New("the time given by --timeout is over"))
	return ctx, cancel, nil
}

func newTransferCmd(a *app) *cobra.Command {
	var to string
	var abort bool
	var flags drainFlags
	cmd := &cobra.Command{
		Use:   "transfer PARTITION --to REGION",
		Short: "Hand a partition over to another region",
		Long: `Transfer moves a partition to another of its preferred regions, in order: its owner
grants nothing more and sends waiters to the new region; holders are told to stop and
have until the end of the drain to do so and release; when no lease is left, the
owner lets go and the other region takes over. Tokens go on rising.

The regions do it by themselves. An interrupt aborts the transfer, and so does
--abort from elsewhere: the partition is active again at the same epoch, without
the leases that were revoked. Once the owner has begun to let go it is too late.`,
		Example: `  headlease partition transfer eu-equities --to us -f cluster.yaml --certs certs
  headlease partition transfer eu-equities --to us --drain 1m
  headlease partition transfer eu-equities --abort`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if abort == (to != "") {
				return &usageError{cmd.CommandPath(), errors.New("give either --to REGION or --abort")}
			}
			ctx, cancel, err := flags.context(cmd.Context())
			if err != nil {
				return &usageError{cmd.CommandPath(), err}
			}
			defer cancel()
			return a.withCluster(func(c *cluster.Cluster) error {
				if abort {
					return a.abortTransfer(ctx, c, args[0])
				}
				p := newProgress(a.stderr)
				defer p.end()
				done, err := c.Transfer(ctx, cluster.Transfer{Partition: args[0], To: to, Drain: flags.drain, Progress: func(t cluster.TransferProgress) { p.transfer(t) }})
				if err != nil {
					return err
				}
				p.end()
				return a.transferred(*done)
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "the region that is to own it")
	cmd.Flags().BoolVar(&abort, "abort", false, "abort the transfer that runs")
	flags.add(cmd)
	return cmd
}

func (a *app) abortTransfer(ctx context.Context, c *cluster.Cluster, partition string) error {
	region, res, err := c.AbortTransfer(ctx, partition)
	switch {
	case err != nil:
		return err
	case res.GetAlready():
		return a.printf("no transfer of partition %s runs; region %s owns it at epoch %d\n", partition, region, res.GetEpoch())
	}
	return a.printf("transfer aborted; partition %s is active in region %s at epoch %d\n", partition, region, res.GetEpoch())
}

func (a *app) transferred(t cluster.Transferred) error {
	switch {
	case t.Already:
		return a.printf("region %s owns partition %s already (epoch %d)\n", t.To, t.Partition, t.Epoch)
	case t.Unowned > 0:
		return a.printf("partition %s: %s -> %s, epoch %d; without an owner for at most %v after the drain\n", t.Partition, t.From, t.To, t.Epoch, t.Unowned.Round(time.Millisecond))
	}
	return a.printf("partition %s: %s -> %s, epoch %d\n", t.Partition, t.From, t.To, t.Epoch)
}

func (p *progress) transfer(t cluster.TransferProgress) {
	var detail string
	if t.Leases > 0 || t.LockDelays > 0 || t.Left > 0 {
		detail = fmt.Sprintf("%d leases and %d lock delays left, %v to go", t.Leases, t.LockDelays, t.Left.Round(100*time.Millisecond))
	}
	p.show(fmt.Sprintf("partition %s: %s -> %s", t.Partition, t.From, t.To), t.Stage, detail)
}

func newRegionDrainCmd(a *app) *cobra.Command {
	var flags drainFlags
	cmd := &cobra.Command{
		Use:   "drain REGION",
		Short: "Hand over all partitions that a region owns",
		Long: `Drain transfers every partition that a region owns to the first other region of
its list that can take it ('headlease partition transfer'). The region goes on
voting, and is a candidate again when another one is lost; partitions that came by a
transfer do not go back by themselves.`,
		Example: `  headlease region drain eu -f cluster.yaml --certs certs`,
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel, err := flags.context(cmd.Context())
			if err != nil {
				return &usageError{cmd.CommandPath(), err}
			}
			defer cancel()
			return a.withCluster(func(c *cluster.Cluster) error {
				p := newProgress(a.stderr)
				defer p.end()
				done, err := c.Drain(ctx, args[0], flags.drain, p.transfer)
				p.end()
				for _, t := range done {
					if err := a.transferred(t); err != nil {
						return err
					}
				}
				if err == nil {
					err = a.printf("region %s owns no partition\n", args[0])
				}
				return err
			})
		},
	}
	flags.add(cmd)
	return cmd
}
