package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/drill"
	"github.com/headlease/headlease/drill/report"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/drill/worker"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/devcluster"
)

// exitInconclusive: a drill could not break what it wanted to break.
const exitInconclusive = 2

func newDrillCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "drill",
		Short: "Break a cluster on purpose and check what it promised",
		Long: `Drill plays scenarios that break a development cluster of its own, with a fenced
workload beside it, and checks the invariants of docs/design.md.`,
		Example: `  headlease drill list
  headlease drill run region-loss`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newDrillListCmd(a), newDrillRunCmd(a), newDrillResourceCmd(a), newDrillWorkerCmd(a))
	return cmd
}

func newDrillListCmd(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the scenarios",
		Example: `  headlease drill list`,
		Args:    usage(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			w := tabwriter.NewWriter(a.stdout, 0, 4, 2, ' ', 0)
			for _, s := range drill.Scenarios() {
				fmt.Fprintf(w, "%s\t%s\n", s.Name, s.Summary)
			}
			return w.Flush()
		},
	}
}

func newDrillRunCmd(a *app) *cobra.Command {
	var o drill.Options
	var asJSON bool
	var rtt string
	cmd := &cobra.Command{
		Use:   "run SCENARIO",
		Short: "Play a scenario on a cluster of its own",
		Long: `Run starts a development cluster in a temporary directory, plays the scenario on
it, stops it, and prints what it found. The directory is kept when something is
wrong, or with --keep.

Exit codes: 0 everything held; 1 a violation, or the drill could not be played;
2 nothing was shown, since what was to be broken did not break.`,
		Example: `  headlease drill run region-loss
  headlease drill run cable-cut --json
  headlease drill run region-loss --d 4s --seed 7 --keep`,
		Args: usage(func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("which scenario? 'headlease drill list' lists them")
			}
			return cobra.ExactArgs(1)(cmd, args)
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if o.RTT, err = devcluster.ParseMatrix(rtt); err != nil {
				return &usageError{cmd.CommandPath(), fmt.Errorf("--rtt: %w", err)}
			}
			return runDrill(cmd.Context(), a, args[0], o, asJSON)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false, "print the result as one line of JSON, and progress to the standard error stream")
	f.StringVar(&o.Dir, "dir", "", "directory of the drill's cluster, new or empty; it is kept (default: a temporary one)")
	f.BoolVar(&o.Keep, "keep", false, "keep the temporary directory also when everything held")
	f.DurationVar(&o.D, "d", drill.DefaultD, "length of head leases, 1s to 60s")
	f.StringVar(&rtt, "rtt", "default", "round trips between sites, as for 'headlease dev'")
	f.Uint64Var(&o.Seed, "seed", 0, "chooses locks, the order of kills and their moment (default: any, and printed)")
	return cmd
}

func runDrill(ctx context.Context, a *app, scenario string, o drill.Options, asJSON bool) error {
	o.Ready, o.Admin = initAndWait, devAdmin
	o.Progress = a.stdout
	if asJSON {
		o.Progress = a.stderr
	}
	out, err := drill.Run(ctx, scenario, o)
	if err != nil {
		if ctx.Err() != nil {
			return errors.New("interrupted; everything that the drill started is stopped")
		}
		return err
	}
	if asJSON {
		err = report.WriteJSON(a.stdout, out.Result)
	} else {
		err = out.Result.Render(a.stdout)
	}
	if err == nil && out.Dir != "" {
		_, err = fmt.Fprintf(o.Progress, "  logs and data are in %s\n", out.Dir)
	}
	switch {
	case err != nil:
		return err
	case out.Inconclusive != "":
		return &exitError{exitInconclusive, fmt.Errorf("inconclusive: %s", out.Inconclusive)}
	case !out.OK:
		return &exitError{code: exitFailed}
	}
	return nil
}

func newDrillResourceCmd(a *app) *cobra.Command {
	var c resource.Config
	var guard string
	cmd := &cobra.Command{
		Use:    "resource",
		Short:  "Serve the guarded resource that a drill writes to",
		Hidden: true,
		Args:   usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if c.UnguardedForDrill, err = resource.ParseGuard(guard); err != nil {
				return &usageError{cmd.CommandPath(), fmt.Errorf("--guard: %w", err)}
			}
			if c.Logger, err = a.logger(); err != nil {
				return err
			}
			c.Ready = resource.PrintReady(a.stdout)
			return resource.Run(cmd.Context(), c)
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Dir, "dir", "", "directory of the resource's data")
	f.StringVar(&guard, "guard", "on", "on, or off for a control run")
	f.StringVar(&c.Address, "address", "", "loopback address (default 127.0.0.1:0)")
	return cmd
}

// drillWorker is the flags of a drill's worker process.
type drillWorker struct {
	dir, name, home, lock, resource string
	ttl                             time.Duration
}

func newDrillWorkerCmd(a *app) *cobra.Command {
	var o drillWorker
	cmd := &cobra.Command{
		Use:    "worker",
		Short:  "Work on a lock and report it as JSON lines; SIGUSR1 freezes it before a send",
		Hidden: true,
		Args:   usage(cobra.NoArgs),
		RunE:   func(cmd *cobra.Command, _ []string) error { return runDrillWorker(cmd.Context(), a, o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.dir, "dir", "", "directory of the development cluster")
	f.StringVar(&o.name, "name", "worker", "who writes, for the journal")
	f.StringVar(&o.home, "home", "", "region to ask first")
	f.StringVar(&o.lock, "lock", "", "lock to acquire, and resource to write to")
	f.StringVar(&o.resource, "resource", "", "address of the resource")
	f.DurationVar(&o.ttl, "ttl", client.DefaultTTL, "TTL of sessions")
	return cmd
}

func runDrillWorker(ctx context.Context, a *app, o drillWorker) (err error) {
	log, err := a.logger()
	if err != nil {
		return err
	}
	file, _, err := load.File(filepath.Join(o.dir, "cluster.yaml"))
	if err != nil {
		return err
	}
	links, err := devLinks(file.Cluster, o.dir, identity(devcluster.DefaultClient))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, links.Close()) }()
	sys, err := clock.NewSystem()
	if err != nil {
		return err
	}
	c, err := client.New(client.Config{
		Regions: regions(file), Home: o.home, Links: links, TTL: o.ttl, Clock: sys, Logger: log,
		Labels: map[string]string{"worker": strings.ReplaceAll(o.name, " ", "-")},
	})
	if err != nil {
		return err
	}
	defer func() {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		// What cannot be closed expires.
		if err := c.Close(limited); err != nil {
			log.Info("sessions not closed", "error", err)
		}
	}()
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	defer signal.Stop(asked)
	freeze := make(chan struct{})
	go func() {
		select {
		case <-asked:
		case <-ctx.Done():
			return
		}
		select {
		case freeze <- struct{}{}:
		case <-ctx.Done():
		}
	}()
	enc := json.NewEncoder(a.stdout)
	return worker.Run(ctx, worker.Config{
		Name: o.name, Lock: o.lock, Clock: sys,
		Acquire: func(ctx context.Context, lock string) (worker.Lease, error) {
			l, err := c.Acquire(ctx, lock)
			if err != nil {
				return nil, err
			}
			return l, nil
		},
		Resource: resource.NewClient(o.resource, o.name),
		Freeze:   freeze,
		Stop:     worker.Freeze,
		Report: func(e worker.Event) {
			// It fails if the drill has gone; then nobody needs it.
			_ = enc.Encode(e)
		},
	})
}
