package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/fence"
)

func newAcquireCmd(a *app) *cobra.Command {
	var o acquireOptions
	cmd := &cobra.Command{
		Use:   "acquire RESOURCE",
		Short: "Acquire a lease, and print its fencing token",
		Long: `Acquire takes a lease on a resource, shard/N or lock/NAME, or with --slots on any
free slot lock/NAME#I of a semaphore, and prints the resource, its fencing token and the path of a handle file, with which 'headlease release' ends it. The
file has a secret: only its owner can read it.

Without --hold nothing keeps the lease: it ends with its session, one TTL later,
at the time that is printed. With --hold the command stays and keeps it; it exits
with 1 when the lease is lost, and releases it when interrupted.

To keep a lease while a command runs, use 'headlease run'.`,
		Example: `  headlease acquire lock/nightly-report --ttl 1m
  headlease acquire shard/68 --wait --hold
  headlease acquire lock/build --slots 4 --wait=30s --value "$HOSTNAME"
  headlease acquire lock/deploy --json | jq .token`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.validate(cmd, args[0]); err != nil {
				return err
			}
			return a.withClient(o.leaseOptions, func(_ client.Config, c *client.Client) error { return runAcquire(cmd, a, o, c, args[0]) })
		},
	}
	o.acquire(cmd)
	cmd.Flags().BoolVar(&o.hold, "hold", false, "stay, and keep the lease until it is lost or this command is interrupted")
	cmd.Flags().StringVar(&o.handle, "handle", "", "the handle file to write (default RESOURCE.TOKEN.json in this directory)")
	cmd.Flags().BoolVar(&o.asJSON, "json", false, "print JSON")
	return cmd
}

type acquireOptions struct {
	leaseOptions
	hold   bool
	handle string
	asJSON bool
}

// acquired is the JSON form of acquire's output.
type acquired struct {
	Resource string      `json:"resource"`
	Token    fence.Token `json:"token"`
	Region   string      `json:"region"`
	Session  string      `json:"session"`
	Handle   string      `json:"handle"`
	// Expires is absent when the command holds the lease.
	Expires *time.Time `json:"expires,omitempty"`
}

func runAcquire(cmd *cobra.Command, a *app, o acquireOptions, c *client.Client, resource string) (err error) {
	if o.handle != "" {
		if _, err := os.Lstat(o.handle); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("--handle %s exists; release it with 'headlease release', or name another file", o.handle)
		}
	}
	l, err := o.take(cmd, c, resource)
	if err != nil {
		return err
	}
	// A lease that nobody was told of is given back, by the client's close.
	if o.handle == "" {
		o.handle = fmt.Sprintf("%s.%s.json", strings.NewReplacer("/", "-", ":", "-", "#", "-").Replace(l.Resource()), l.Token())
	}
	file, err := os.OpenFile(o.handle, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("handle: %w; name another file with --handle (the lease was released)", err)
	}
	keep := false
	defer func() {
		if !keep {
			err = errors.Join(err, os.Remove(o.handle))
		}
	}()
	out := acquired{Resource: l.Resource(), Token: l.Token(), Region: l.Region(), Session: l.Session(), Handle: o.handle}
	if !o.hold {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), partingTimeout)
		defer cancel()
		if err := c.Leave(ctx); err != nil {
			return errors.Join(fmt.Errorf("acquire %s: %w", resource, err), file.Close())
		}
		expires := l.Handle().Expires
		out.Expires = &expires
	}
	if err := errors.Join(json.NewEncoder(file).Encode(l.Handle()), file.Close()); err != nil {
		return fmt.Errorf("handle: %w", err)
	}
	if err := o.print(a, out); err != nil {
		return err
	}
	if !o.hold {
		keep = true
		return nil
	}
	return hold(cmd.Context(), a, l)
}

func (o acquireOptions) print(a *app, out acquired) error {
	if o.asJSON {
		return json.NewEncoder(a.stdout).Encode(out)
	}
	if err := a.printf("token %s\nhandle %s\n", out.Token, out.Handle); err != nil {
		return err
	}
	if out.Expires == nil {
		return a.printf("held until interrupted\n")
	}
	return a.printf("expires %s unless released before\n", out.Expires.Format(time.RFC3339))
}

// hold keeps the lease until it is lost or ctx ends, and then releases it.
func hold(ctx context.Context, a *app, l *client.Lease) error {
	select {
	case <-l.Context().Done():
		return context.Cause(l.Context())
	case <-ctx.Done():
	}
	if err := release(ctx, l); err != nil {
		return err
	}
	return a.printf("released %s\n", l.Resource())
}

// release gives a lease back at the end of a command, also of an interrupted
// one.
func release(ctx context.Context, l *client.Lease) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), partingTimeout)
	defer cancel()
	return l.Release(ctx)
}
