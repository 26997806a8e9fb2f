package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/internal/telemetry"
	"github.com/headlease/headlease/internal/telemetry/gometrics"
	"github.com/headlease/headlease/internal/telemetry/tracing"
	"github.com/headlease/headlease/internal/version"
	"github.com/headlease/headlease/region"
)

func newRegionCmd(a *app) *cobra.Command {
	var name, dataDir, faults string
	var drills, join bool
	cmd := &cobra.Command{
		Use:   "region",
		Short: "Run a region server, or change which regions vote",
		Long: `Region runs one region server of the cluster file: a member of its region's Raft
group. It serves leases after 'headlease init' has set the cluster up.

A server of a running region starts with an empty data directory and --join, and
'headlease server add' makes it a voter. Names and addresses of other processes
are read again when the cluster file changes, and at once on SIGHUP.

It ends when its disk fails or hangs, on SIGTERM and on an interrupt, handing its
leadership over first.`,
		Example: `  headlease region -f cluster.yaml --name eu-1 --data-dir /var/lib/headlease --certs /etc/headlease/certs`,
		Args:    usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := a.clusterFile()
			if err != nil {
				return err
			}
			if name != "" {
				f.Name = name
			}
			if dataDir != "" {
				f.DataDir = dataDir
			}
			return runRegion(cmd.Context(), a, f, faults, drills, join)
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "which region server of the cluster file this is (HEADLEASE_NAME)")
	cmd.Flags().StringVar(&dataDir, "data-dir", "", "directory for this server alone (HEADLEASE_DATA_DIR)")
	cmd.Flags().BoolVar(&join, "join", false, "with an empty data directory, ask the region to be added instead of waiting for init ('headlease server')")
	cmd.Flags().BoolVar(&drills, "drills", false, "let an admin inject faults; never in production")
	cmd.Flags().StringVar(&faults, "faults", "", "file of the faults in force from the start; needs --drills")
	cmd.AddCommand(regionMemberCmds(a)...)
	cmd.AddCommand(newRegionDrainCmd(a))
	return cmd
}

func runRegion(ctx context.Context, a *app, f clusterfile.File, faults string, drills, join bool) error {
	log, err := a.logger()
	if err != nil {
		return err
	}
	process, err := findServer(f)
	if err != nil {
		return err
	}
	cfg := region.Config{
		File: f, Name: process.Name, DataDir: f.DataDir, Join: join, Insecure: a.insecure, Drills: drills,
		Version: version.String(), Logger: log.With("server", process.Name),
	}
	var errs []error
	if f.DataDir == "" {
		errs = append(errs, errors.New("data_dir: is not set; give --data-dir or HEADLEASE_DATA_DIR"))
	}
	switch {
	case a.insecure:
	case f.Certs == "":
		errs = append(errs, errors.New("certs: is not set; give --certs or HEADLEASE_CERTS ('headlease certs' makes a set), or --insecure on loopback"))
	default:
		want := pki.Identity{Cluster: f.Cluster, Role: pki.RoleRegion, Region: process.Region, Name: process.Name}
		if cfg.Credentials, err = pki.Load(pki.LoadConfig{Dir: f.Certs, Want: want, Gossip: true}); err != nil {
			errs = append(errs, fmt.Errorf("certs: %w", err))
		}
	}
	if cfg.Faults, err = fault.Startup(faults, drills); err != nil {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if cfg.Clock, err = clock.NewSystem(); err != nil {
		return err
	}
	cfg.Registry = telemetry.NewRegistry(cfg.Version)
	if err := gometrics.Install(cfg.Registry); err != nil {
		return err
	}
	logRedis(cfg.Logger)
	var flush func(context.Context) error
	cfg.Traces, flush, err = tracing.FromEnvironment(ctx, tracing.Process{
		Service: "headlease-region", Instance: process.Name, Region: process.Region, Version: cfg.Version, Logger: cfg.Logger,
	})
	if err != nil {
		return err
	}
	defer func() { // what is left is sent, but nobody waits long for a collector that is down
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := flush(ctx); err != nil {
			cfg.Logger.Warn("the last traces were not sent", "error", err)
		}
	}()
	cfg.Files = load.NewWatcher(a.config, cfg.Logger)
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	cfg.Files.Hup = hup
	s, err := region.New(ctx, cfg)
	if err != nil {
		return err
	}
	defer followLoad()()
	return s.Run(ctx)
}

// findServer returns the region server that this process is.
func findServer(f clusterfile.File) (clusterfile.Process, error) {
	if p, ok := f.Process(f.Name); ok && p.Role == clusterfile.RoleRegion {
		return p, nil
	}
	var names []string
	for _, p := range f.Processes() {
		if p.Role == clusterfile.RoleRegion {
			names = append(names, p.Name)
		}
	}
	known := strings.Join(names, ", ")
	if f.Name == "" {
		return clusterfile.Process{}, fmt.Errorf("name: is not set; give --name or HEADLEASE_NAME, a region server of the cluster file (it has %s)", known)
	}
	if _, ok := f.Witness(f.Name); ok {
		return clusterfile.Process{}, fmt.Errorf("name: %q is a witness, not a region server; start it with 'headlease witness'", f.Name)
	}
	return clusterfile.Process{}, fmt.Errorf("name: %q is not a region server of the cluster file (it has %s)", f.Name, known)
}
