package main

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
)

func newInitCmd(a *app) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Set a new cluster up",
		Long: `Init sets the cluster of the cluster file up: it makes each region's Raft group
and gives every voter the cluster's first configuration. All processes must run.

It may be run again at any time, also after it was broken off: what is there
already is kept.`,
		Example: `  headlease init -f cluster.yaml --certs certs`,
		Args:    usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), timeout, errors.New("init: the time given by --timeout is over"))
			defer cancel()
			return a.withCluster(func(c *cluster.Cluster) error {
				var printed error
				_, err := c.Init(ctx, func(step string) { printed = errors.Join(printed, a.printf("%s\n", step)) })
				return errors.Join(err, printed)
			})
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 30*time.Second, "how long to wait for processes that do not answer yet")
	return cmd
}

// withCluster runs an operator's command on the cluster of the cluster file.
func (a *app) withCluster(do func(*cluster.Cluster) error) error {
	f, err := a.clusterFile()
	if err != nil {
		return err
	}
	l, err := a.links(f, admin())
	if err != nil {
		return err
	}
	c := cluster.New(f, l)
	err = do(c)
	return errors.Join(err, c.Close(), l.Close())
}
