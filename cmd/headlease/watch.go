package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/fence"
)

func newWatchCmd(a *app) *cobra.Command {
	var o leaseOptions
	var prefix string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "watch RESOURCE | --prefix PREFIX",
		Short: "Show who holds a resource, or all with a prefix, as it changes",
		Long: `Watch shows who holds a resource, and its value, and then each change, until it is
interrupted. With --prefix it shows all resources whose name begins so, in all
regions. It goes on over lost servers and regions; where it may have missed
something it begins again, with a reset and all that is held.

What it shows is what some server of the region has applied: a hint. 'headlease
get' asks the leader.

With --json each line is an object with kind (reset, held, synced, granted, value,
revoked or ended), region and revision, the index of the region's log.`,
		Example: `  headlease watch lock/leader
  headlease watch --prefix lock/ --json`,
		Args: usage(func(cmd *cobra.Command, args []string) error {
			if (len(args) == 0) != cmd.Flags().Changed("prefix") || len(args) > 1 {
				return errors.New("give one resource, or --prefix (--prefix '' for all)")
			}
			return nil
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			resource := ""
			if len(args) > 0 {
				resource = args[0]
			}
			if err := o.validate(cmd, args...); err != nil {
				return err
			}
			return a.withClient(o, func(_ client.Config, c *client.Client) error {
				seq := c.WatchPrefix(cmd.Context(), prefix)
				if resource != "" {
					seq = c.Watch(cmd.Context(), resource)
				}
				for e, err := range seq {
					if err != nil {
						return err
					}
					if err := printWatch(a, e, asJSON); err != nil {
						return err
					}
				}
				return nil // interrupted
			})
		},
	}
	cmd.Flags().StringVar(&o.client, "client", "", "act as this client, with its certificate (default the admin)")
	cmd.Flags().StringVar(&prefix, "prefix", "", "watch all resources that begin so, for example lock/")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, one event a line")
	return cmd
}

// watchLine is the JSON form of an event.
type watchLine struct {
	Kind     string      `json:"kind"`
	Region   string      `json:"region"`
	Revision uint64      `json:"revision"`
	Resource string      `json:"resource,omitempty"`
	Token    fence.Token `json:"token,omitempty"`
	Holder   string      `json:"holder,omitempty"`
	Session  string      `json:"session,omitempty"`
	jsonValue
	Reason string `json:"reason,omitempty"`
}

func printWatch(a *app, e client.WatchEvent, asJSON bool) error {
	if e.Kind == client.WatchProgress {
		return nil
	}
	if asJSON {
		return json.NewEncoder(a.stdout).Encode(watchLine{
			Kind: e.Kind.String(), Region: e.Region, Revision: e.Revision, Resource: e.Resource, Token: e.Token,
			Holder: e.Holder, Session: e.Session, jsonValue: valueOf(e.Value), Reason: e.Reason,
		})
	}
	value := ""
	if len(e.Value) > 0 {
		value = fmt.Sprintf(" with value %q", e.Value)
	}
	what := ""
	switch e.Kind {
	case client.WatchReset:
		what = fmt.Sprintf("region %s at revision %d: %s", e.Region, e.Revision, e.Reason)
	case client.WatchSynced:
		what = fmt.Sprintf("region %s at revision %d: that is all", e.Region, e.Revision)
	case client.WatchHeld:
		what = fmt.Sprintf("%s is held by %s, token %s%s", e.Resource, e.Holder, e.Token, value)
	case client.WatchGranted:
		what = fmt.Sprintf("%s is granted to %s, token %s%s", e.Resource, e.Holder, e.Token, value)
	case client.WatchValue:
		what = fmt.Sprintf("%s, token %s, has value %q", e.Resource, e.Token, e.Value)
	case client.WatchRevoked:
		what = fmt.Sprintf("%s, token %s, is revoked: %s", e.Resource, e.Token, e.Reason)
	case client.WatchEnded:
		what = fmt.Sprintf("%s, token %s, has ended: %s", e.Resource, e.Token, e.Reason)
	case client.WatchProgress:
	}
	return a.printf("%s %s\n", time.Now().Format(time.TimeOnly), what)
}
