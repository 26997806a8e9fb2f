package main

import (
	"encoding/json"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func newGetCmd(a *app) *cobra.Command {
	var o leaseOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "get RESOURCE",
		Short: "Show who holds a resource",
		Long: `Get asks the owning region who holds a resource. The answer is true at some time
between the question and the answer; it may be over when it is read.

It exits with 1 when nobody holds it.`,
		Example: `  headlease get lock/nightly-report
  headlease get shard/68 --json`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.validate(cmd, args[0]); err != nil {
				return err
			}
			return a.withClient(o, func(_ client.Config, c *client.Client) error {
				ctx, cancel := within(cmd.Context(), o.timeout)
				defer cancel()
				l, err := c.Get(ctx, args[0])
				if err != nil {
					return fmt.Errorf("get %s: %w", args[0], err)
				}
				if err := printLease(a, args[0], l, asJSON); err != nil {
					return err
				}
				if l == nil {
					return &exitError{code: exitFailed}
				}
				return nil
			})
		},
	}
	o.who(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// leaseSummary is the JSON form of a lease.
type leaseSummary struct {
	Resource  string      `json:"resource"`
	Held      bool        `json:"held"`
	Token     fence.Token `json:"token,omitempty"`
	Holder    string      `json:"holder,omitempty"`
	Session   string      `json:"session,omitempty"`
	Partition string      `json:"partition,omitempty"`
	Region    string      `json:"region,omitempty"`
	Waiters   uint32      `json:"waiters"`
	Revoked   bool        `json:"revoked,omitempty"`
	jsonValue
	LockDelay string `json:"lock_delay,omitempty"`
	Revision  uint64 `json:"revision,omitempty"`
}

// jsonValue is a value in JSON: as text if it is, otherwise in base64.
type jsonValue struct {
	Value string `json:"value,omitempty"`
	Bytes []byte `json:"value_base64,omitempty"`
}

func valueOf(b []byte) jsonValue {
	if utf8.Valid(b) {
		return jsonValue{Value: string(b)}
	}
	return jsonValue{Bytes: b}
}

func summariseLease(resource string, l *pb.LeaseInfo) leaseSummary {
	lockDelay := ""
	if ms := l.GetLockDelayMs(); ms != 0 {
		lockDelay = (time.Duration(ms) * time.Millisecond).String()
	}
	return leaseSummary{
		jsonValue: valueOf(l.GetValue()), LockDelay: lockDelay, Revision: l.GetRevision(),
		Resource: resource, Held: l != nil, Token: fence.Token(l.GetToken()), Holder: l.GetHolder(), Session: l.GetSessionId(),
		Partition: l.GetPartition(), Region: l.GetRegion(), Waiters: l.GetWaiters(), Revoked: l.GetRevoked(),
	}
}

func printLease(a *app, resource string, l *pb.LeaseInfo, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(a.stdout).Encode(summariseLease(resource, l))
	}
	if l == nil {
		return a.printf("%s is held by nobody\n", resource)
	}
	more := ""
	if len(l.GetValue()) > 0 {
		more += fmt.Sprintf("\nvalue %q", l.GetValue())
	}
	if l.GetRevoked() {
		more += "\nrevoked yes"
	}
	return a.printf("holder %s\ntoken %s\nsession %s\nregion %s\npartition %s\nwaiters %d%s\n",
		l.GetHolder(), fence.Token(l.GetToken()), l.GetSessionId(), l.GetRegion(), l.GetPartition(), l.GetWaiters(), more)
}
