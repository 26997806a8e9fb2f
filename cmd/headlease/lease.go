package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/clusterclient"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/shard"
)

const (
	// tryTimeout is how long the commands look for a region that can decide.
	tryTimeout = 30 * time.Second
	// partingTimeout bounds what a command does after its work.
	partingTimeout = 5 * time.Second
)

// leaseOptions are the flags of the commands that use leases.
type leaseOptions struct {
	client, region string
	ttl, timeout   time.Duration
	wait           waitFlag
	value          string
	lockDelay      time.Duration
	slots          int
}

// waitFlag is --wait, for as long as it takes, or --wait=30s.
type waitFlag struct {
	set    bool
	atMost time.Duration // 0: as long as it takes
}

const waitForever = "forever"

func (w *waitFlag) String() string {
	switch {
	case !w.set:
		return ""
	case w.atMost == 0:
		return waitForever
	}
	return w.atMost.String()
}

func (w *waitFlag) Type() string { return "time" }

func (w *waitFlag) Set(v string) error {
	switch v {
	case waitForever, "true":
		*w = waitFlag{set: true}
		return nil
	case "false":
		*w = waitFlag{}
		return nil
	}
	d, err := time.ParseDuration(v)
	if err != nil || d <= 0 || d > client.MaxWait {
		return fmt.Errorf("write --wait, or a time up to %v, for example --wait=30s", client.MaxWait)
	}
	*w = waitFlag{set: true, atMost: d}
	return nil
}

// who adds the flags of every command.
func (o *leaseOptions) who(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.client, "client", "", "act as this client, with its certificate (default the admin)")
	f.DurationVar(&o.timeout, "timeout", tryTimeout, "give up after this time, 0 for never")
}

// session adds the flags of the commands that open a session.
func (o *leaseOptions) session(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.region, "region", "", "the region to ask first (default the first of the cluster file)")
	f.DurationVar(&o.ttl, "ttl", client.DefaultTTL, fmt.Sprintf("the session's time to live, %v to %v", client.MinTTL, client.MaxTTL))
}

// acquire adds the flags of the commands that acquire.
func (o *leaseOptions) acquire(cmd *cobra.Command) {
	o.who(cmd)
	o.session(cmd)
	f := cmd.Flags()
	f.Var(&o.wait, "wait", "wait in the queue while somebody else holds it, as long as it takes (or until --timeout), or --wait=30s at most")
	f.Lookup("wait").NoOptDefVal = waitForever
	f.IntVar(&o.slots, "slots", 0, fmt.Sprintf("acquire any free slot of a semaphore of so many, 1 to %d", client.MaxSlots))
	o.terms(cmd)
}

// terms adds the flags of what a lease comes with.
func (o *leaseOptions) terms(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.value, "value", "", "keep this beside the lease, for 'headlease get' and 'headlease watch' to show")
	f.DurationVar(&o.lockDelay, "lock-delay", 0, fmt.Sprintf("if the lease ends without a release, nobody gets the resource for so long, up to %v", client.MaxLockDelay))
}

// acquireTimeout is how long to try: for ever in a queue, unless told otherwise.
func (o *leaseOptions) acquireTimeout(cmd *cobra.Command) time.Duration {
	if o.wait.set && !cmd.Flags().Changed("timeout") {
		return 0
	}
	return o.timeout
}

// validate reports all faults of the flags and the resources at once.
func (o *leaseOptions) validate(cmd *cobra.Command, resources ...string) error {
	var errs []error
	for _, r := range resources {
		if _, err := shard.Parse(r); err != nil {
			errs = append(errs, err)
		}
	}
	if cmd.Flags().Lookup("ttl") != nil && (o.ttl < client.MinTTL || o.ttl > client.MaxTTL) {
		errs = append(errs, fmt.Errorf("--ttl %v is out of range; choose %v to %v", o.ttl, client.MinTTL, client.MaxTTL))
	}
	if o.slots < 0 || o.slots > client.MaxSlots || o.slots == 0 && cmd.Flags().Changed("slots") {
		errs = append(errs, fmt.Errorf("--slots %d is out of range; choose 1 to %d", o.slots, client.MaxSlots))
	}
	if o.lockDelay < 0 || o.lockDelay > client.MaxLockDelay {
		errs = append(errs, fmt.Errorf("--lock-delay %v is out of range; choose up to %v", o.lockDelay, client.MaxLockDelay))
	}
	if len(o.value) > client.MaxValue {
		errs = append(errs, fmt.Errorf("--value has %d bytes; at most %d are kept", len(o.value), client.MaxValue))
	}
	if o.timeout < 0 {
		errs = append(errs, fmt.Errorf("--timeout %v is negative; give a time, or 0 for none", o.timeout))
	}
	if err := errors.Join(errs...); err != nil {
		return &usageError{cmd.CommandPath(), err}
	}
	return nil
}

// checkRegion makes sure that a named region exists.
func checkRegion(f clusterfile.File, name string) error {
	var names []string
	for _, r := range f.Regions {
		if r.Name == name || name == "" {
			return nil
		}
		names = append(names, r.Name)
	}
	return fmt.Errorf("--region %q is not in the cluster file; it has %s", name, strings.Join(names, ", "))
}

// withConfig calls do with what a client of the cluster file needs.
func (a *app) withConfig(o leaseOptions, do func(client.Config) error) (err error) {
	log, err := a.logger()
	if err != nil {
		return err
	}
	f, err := a.clusterFile()
	if err != nil {
		return err
	}
	if err := checkRegion(f, o.region); err != nil {
		return err
	}
	l, err := a.links(f, identity(o.client))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	return do(client.Config{Cluster: f.Cluster, Regions: clusterclient.Regions(f), Home: o.region, Links: l, TTL: o.ttl, Logger: log})
}

// withClient calls do with a client and closes it afterwards, with its
// sessions, unless do has left it.
func (a *app) withClient(o leaseOptions, do func(client.Config, *client.Client) error) error {
	return a.withConfig(o, func(cfg client.Config) (err error) {
		c, err := client.New(cfg)
		if err != nil {
			return err
		}
		defer func() {
			ctx, cancel := context.WithTimeout(context.Background(), partingTimeout)
			defer cancel()
			err = errors.Join(err, c.Close(ctx))
		}()
		return do(cfg, c)
	})
}

// within bounds ctx; 0 is for ever.
func within(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if d == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, d, fmt.Errorf("gave up after %v (--timeout)", d))
}

// take acquires as the flags say.
func (o *leaseOptions) take(cmd *cobra.Command, c *client.Client, resource string) (*client.Lease, error) {
	ctx, cancel := within(cmd.Context(), o.acquireTimeout(cmd))
	defer cancel()
	options := o.options()
	switch {
	case o.wait.atMost > 0:
		options = append(options, client.WaitAtMost(o.wait.atMost))
	case o.wait.set:
		options = append(options, client.Wait())
	}
	acquire := func() (*client.Lease, error) { return c.Acquire(ctx, resource, options...) }
	if o.slots > 0 {
		acquire = func() (*client.Lease, error) { return c.AcquireSlot(ctx, resource, o.slots, options...) }
	}
	l, err := acquire()
	if err != nil {
		return nil, fmt.Errorf("acquire %s: %w", resource, err)
	}
	return l, nil
}

// options are what the lease comes with.
func (o *leaseOptions) options() (out []client.Option) {
	if o.value != "" {
		out = append(out, client.WithValue([]byte(o.value)))
	}
	if o.lockDelay > 0 {
		out = append(out, client.WithLockDelay(o.lockDelay))
	}
	return out
}
