package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/drill/scenarios"
	"github.com/headlease/headlease/drill/worker"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterclient"
	"github.com/headlease/headlease/internal/devcluster"
)

func newDrillCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "drill",
		Short: "Break a cluster on purpose and check what it promised",
		Long: `Drill plays scenarios that break a cluster, with a fenced workload beside it, and
checks the invariants of docs/design.md and what the scenario expects. A scenario
is a file: what is broken, when, and what must hold.`,
		Example: `  headlease drill list
  headlease drill run region-loss
  headlease drill run cable-cut --junit report.xml
  headlease drill show cable-cut > mine.yaml
  headlease drill validate mine.yaml
  headlease drill run ./mine.yaml`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newDrillListCmd(a), newDrillShowCmd(a), newDrillValidateCmd(a), newDrillRunCmd(a), newDrillReportCmd(a), newDrillAgentCmd(a), newDrillResourceCmd(a), newDrillWorkerCmd(a))
	return cmd
}

func newDrillListCmd(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the scenarios that are shipped",
		Example: `  headlease drill list`,
		Args:    usage(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			w := tabwriter.NewWriter(a.stdout, 0, 4, 2, ' ', 0)
			for _, name := range scenarios.Names() {
				s, err := scenarios.Get(name)
				if err != nil {
					return err
				}
				fmt.Fprintf(w, "%s\t%s\n", s.Name, s.Summary)
			}
			return w.Flush()
		},
	}
}

func newDrillShowCmd(a *app) *cobra.Command {
	var schema bool
	cmd := &cobra.Command{
		Use:   "show SCENARIO",
		Short: "Print the file of a shipped scenario",
		Long: `Show prints the file of a shipped scenario, to read it or to begin one of your own
with it; --schema prints the JSON schema of scenario files, for your editor.`,
		Example: `  headlease drill show cable-cut > mine.yaml
  headlease drill show --schema > schema.json`,
		Args: usage(func(cmd *cobra.Command, args []string) error {
			if schema {
				return cobra.NoArgs(cmd, args)
			}
			return oneScenario(cmd, args)
		}),
		RunE: func(_ *cobra.Command, args []string) error {
			if schema {
				return a.printf("%s", scenarios.Schema())
			}
			text, err := scenarios.Text(args[0])
			if err != nil {
				return err
			}
			return a.printf("%s", text)
		},
	}
	cmd.Flags().BoolVar(&schema, "schema", false, "print the JSON schema of scenario files")
	return cmd
}

func newDrillValidateCmd(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE...",
		Short: "Report everything wrong with scenario files",
		Long: `Validate reads scenario files and reports all that is wrong with them at once,
each with its line and field.`,
		Example: `  headlease drill validate mine.yaml`,
		Args:    usage(cobra.MinimumNArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			var errs []error
			for _, path := range args {
				s, err := scenarioFile(path)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				if err := a.printf("%s is good: %s, %s, %s\n", path, s.Name, count(len(s.Steps), "step"), count(len(s.Expect), "expectation")); err != nil {
					return err
				}
			}
			return errors.Join(errs...)
		},
	}
}

func oneScenario(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return errors.New("which scenario? 'headlease drill list' lists them")
	}
	return cobra.ExactArgs(1)(cmd, args)
}

// scenario is a shipped one by its name, or that of a file: what has a dot or a
// slash in it is a file's name.
func scenario(name string) (plan.Scenario, error) {
	if strings.ContainsAny(name, "./") {
		return scenarioFile(name)
	}
	return scenarios.Get(name)
}

func scenarioFile(path string) (plan.Scenario, error) {
	file, err := os.Open(path)
	if err != nil {
		return plan.Scenario{}, fmt.Errorf("scenario file: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(file, plan.MaxSize+1))
	if err = errors.Join(err, file.Close()); err != nil {
		return plan.Scenario{}, fmt.Errorf("scenario file: %w", err)
	}
	s, err := plan.Parse(text)
	if bad := (*plan.Error)(nil); errors.As(err, &bad) {
		bad.Source = path
	}
	return s, err
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
	as, name, home, lock, resource string
	ttl                            time.Duration
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
	f.StringVar(&o.as, "as", devcluster.DefaultClient, "name in the client certificate")
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
	file, err := a.clusterFile()
	if err != nil {
		return err
	}
	links, err := a.links(file, identity(o.as))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, links.Close()) }()
	sys, err := clock.NewSystem()
	if err != nil {
		return err
	}
	c, err := client.New(client.Config{
		Regions: clusterclient.Regions(file), Home: o.home, Links: links, TTL: o.ttl, Clock: sys, Logger: log,
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
