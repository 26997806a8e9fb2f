package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/client"
)

// standAgain is the pause before a candidate that has lost the lead stands
// again.
const standAgain = time.Second

func newElectCmd(a *app) *cobra.Command {
	var o leaseOptions
	cmd := &cobra.Command{
		Use:   "elect RESOURCE [flags] -- COMMAND [ARGS…]",
		Short: "Stand for election, and run a command while leading",
		Long: `Elect waits until this candidate leads: until it holds the resource. Candidates are
served in their order. It runs the command while it leads, as 'headlease run'
does: with the fencing token in HEADLEASE_TOKEN, and with SIGTERM, then SIGKILL,
before the lead has ended.

When the lead is lost the command is ended, and elect stands again. When the
command ends by itself elect resigns, and exits with its code.

'headlease get' shows the leader and its value, 'headlease watch' each change.`,
		Example: `  headlease elect lock/scheduler --value "$HOSTNAME:8080" -- scheduler --listen :8080`,
		Args:    usage(resourceAndCommand),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.validate(cmd, args[0]); err != nil {
				return err
			}
			if _, err := exec.LookPath(args[1]); err != nil {
				return cannotStart(args[1], err)
			}
			o.wait.set = true
			log, err := a.logger()
			if err != nil {
				return err
			}
			return a.withClient(o, func(_ client.Config, c *client.Client) error {
				for {
					err := lead(cmd.Context(), a, c.Election(args[0]), o, o.acquireTimeout(cmd), args[1:])
					if !errors.Is(err, client.ErrLost) || cmd.Context().Err() != nil {
						return err
					}
					log.Warn("the lead was lost; standing again", "resource", args[0], "error", err)
					select {
					case <-cmd.Context().Done():
						return err
					case <-time.After(standAgain):
					}
				}
			})
		},
	}
	o.who(cmd)
	o.session(cmd)
	o.terms(cmd)
	return cmd
}

// lead waits for the lead, runs the command under it, and resigns.
func lead(ctx context.Context, a *app, e *client.Election, o leaseOptions, timeout time.Duration, argv []string) error {
	standing, cancel := within(ctx, timeout)
	defer cancel()
	l, err := e.Campaign(standing, []byte(o.value), o.options()...)
	if err != nil {
		return fmt.Errorf("elect %s: %w", e.Resource(), err)
	}
	err = runUnder(a, l, argv)
	if rel := release(ctx, l); rel != nil {
		return errors.Join(err, rel)
	}
	return err
}
