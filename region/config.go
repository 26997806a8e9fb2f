package region

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/internal/telemetry"
	"github.com/headlease/headlease/region/state"
)

// Rho is the bound on the rates of all clocks that head leases rest on: 1 %.
const Rho = 0.01

// Config of a region server.
type Config struct {
	// File is the cluster file, Name this server in it.
	File clusterfile.File
	Name string
	// DataDir is this server's alone; made if it does not exist.
	DataDir string
	// Join makes a server whose directory is empty ask its region to be added;
	// otherwise it waits for init.
	Join bool
	// MaxLevel is the highest feature level that this server takes on; 0: what its
	// program knows (state.MaxLevel). Tests set it lower, to be an older program.
	MaxLevel uint32
	// Files tells of changes of the cluster file; nil: it never changes.
	Files *load.Watcher
	// Credentials with the gossip key; nil only with Insecure.
	Credentials *pki.Credentials
	// Insecure is plain text on loopback, for development.
	Insecure bool
	// Faults of this process; Drills lets an admin set more.
	Faults *fault.Table
	Drills bool
	// Clock is the lease clock; faults of the table are applied to it here.
	Clock clock.Clock
	// Version of the build, for status.
	Version string
	// Registry of the process's metrics, served at the file's metrics address; nil:
	// the server makes one.
	Registry *prometheus.Registry
	// Traces of requests go here; nil: none are made.
	Traces trace.TracerProvider
	// Logger defaults to slog.Default.
	Logger *slog.Logger
	// Exit ends the process when its disk hangs, or a new term cannot be written; nil: exit with status 75.
	Exit func(reason error)
}

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.MaxLevel == 0 {
		c.MaxLevel = state.MaxLevel
	}
	if c.Registry == nil {
		c.Registry = telemetry.NewRegistry(c.Version)
	}
	return c
}

func (c Config) links(process clusterfile.Process) link.Config {
	return link.Config{
		Identity:    link.Identity{Cluster: c.File.Cluster, Role: pki.RoleRegion, Region: process.Region, Name: process.Name},
		Credentials: c.Credentials, Insecure: c.Insecure, Faults: c.Faults, Logger: c.Logger,
	}
}

// Validate reports all faults at once.
func (c Config) Validate() error {
	var errs []error
	if p, ok := c.File.Process(c.Name); !ok || p.Role != clusterfile.RoleRegion {
		errs = append(errs, fmt.Errorf("name: %q is not a region server of the cluster file; give one of its servers", c.Name))
	} else if err := c.links(p).Validate(); err != nil {
		errs = append(errs, err)
	}
	if c.DataDir == "" {
		errs = append(errs, errors.New("data_dir: is empty; name a directory for this server alone"))
	}
	if c.Clock == nil {
		errs = append(errs, errors.New("clock: is missing"))
	}
	if c.Drills && c.Faults == nil {
		errs = append(errs, errors.New("drills: need a fault table"))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("region server: %w", err)
	}
	return nil
}
