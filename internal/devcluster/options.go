package devcluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/headlease/headlease/internal/clusterfile"
)

// Defaults of a new cluster.
const (
	DefaultRegions   = 3
	DefaultServers   = 3
	DefaultWitnesses = 3
	DefaultCluster   = "dev"
	// DefaultClient is the name in the client certificate that is always made.
	DefaultClient = "dev"

	defaultGrace = 5 * time.Second
)

// Options of a development cluster. The shape (Cluster, Regions, Servers,
// Witnesses, D, Redis, Timing) is fixed when the directory is made: a zero field means
// the default then, and what the directory has ever after.
type Options struct {
	// Dir is made if its parent exists.
	Dir string
	// Binary is the headlease executable; default: the running one.
	Binary string

	Cluster string
	// Regions, 1 to MaxRegions, with Servers each: 1, 3 or 5.
	Regions, Servers int
	// Witnesses, 0 to MaxWitnesses; NoWitnesses asks for none.
	Witnesses   int
	NoWitnesses bool
	// AllowEvenWitnesses as in the cluster file.
	AllowEvenWitnesses bool
	// D is the length of a head lease.
	D time.Duration
	// Redis: each region has a lease cache on a redis-server of its own, found in
	// PATH. A directory's cluster that has caches keeps them without being asked.
	Redis bool
	// Timing of the regional Raft groups; default calm.
	Timing clusterfile.Timing
	// RTT between the sites. It is not part of the shape: each start may have
	// another.
	RTT Matrix
	// Places are where the sites are; nil: everything is on loopback.
	Places Places
	// Clients get a certificate each, besides DefaultClient and the admin.
	Clients []string

	// Ready waits until the cluster serves, having initialised it if it is
	// new. Its context ends when a child exits, with that as cause. Nil:
	// running children are enough.
	Ready func(ctx context.Context, c *Cluster) error
	// OnExit is called, from the child's reaper, when a child has ended by
	// whatever reason. It must not block and must not call the Cluster.
	OnExit func(Exit)
	// Args of a process; default DefaultArgs.
	Args func(Process) []string
	// Env is added to the children's environment, which otherwise is this
	// process's without HEADLEASE_ variables: those would override the file.
	Env []string
	// Grace is how long Stop waits after SIGTERM before SIGKILL; default 5 s.
	Grace  time.Duration
	Logger *slog.Logger
}

// Places are where the sites of a cluster are: regions by name, witnesses by
// name. A directory is started with the places that it was made with.
type Places interface {
	// Host is the address that a site's processes listen on.
	Host(site string) string
	// Enter is the command that runs the one appended to it at the site, as the
	// same process.
	Enter(site string) []string
}

// Sites are the names of the sites that a new cluster of these options has.
func (o Options) Sites() []string {
	o = o.withShapeDefaults()
	return slices.Concat(regionNames[:o.Regions], witnessNames[:o.Witnesses])
}

// Exit tells how a child ended.
type Exit struct {
	Name string
	PID  int
	// State is the exit in words: "exit status 1", "signal: killed".
	State string
	// Wanted: Stop, or Signal with a signal that ends processes, was called.
	Wanted bool
}

func (o Options) withDefaults() Options {
	if o.Args == nil {
		o.Args = DefaultArgs
	}
	if o.Grace == 0 {
		o.Grace = defaultGrace
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.OnExit == nil {
		o.OnExit = func(Exit) {}
	}
	return o
}

// withShapeDefaults fills in the shape of a new cluster.
func (o Options) withShapeDefaults() Options {
	if o.Cluster == "" {
		o.Cluster = DefaultCluster
	}
	if o.Regions == 0 {
		o.Regions = DefaultRegions
	}
	if o.Servers == 0 {
		o.Servers = DefaultServers
	}
	if o.Witnesses == 0 && !o.NoWitnesses {
		o.Witnesses = DefaultWitnesses
	}
	if o.D == 0 {
		o.D = clusterfile.DefaultD
	}
	if o.Timing == "" {
		o.Timing = clusterfile.TimingCalm
	}
	return o
}

// Validate reports all faults of the options at once.
func (o Options) Validate() error {
	var errs []error
	if o.Dir == "" {
		errs = append(errs, errors.New("dir: empty; name a directory for the cluster"))
	}
	within := func(field string, n, low, high int) {
		if n != 0 && (n < low || n > high) {
			errs = append(errs, fmt.Errorf("%s: %d; use %d to %d", field, n, low, high))
		}
	}
	within("regions", o.Regions, 1, MaxRegions)
	if !slices.Contains([]int{0, 1, 3, 5}, o.Servers) {
		errs = append(errs, fmt.Errorf("servers: %d; use 3 or 5 (or 1, which survives no loss)", o.Servers))
	}
	within("witnesses", o.Witnesses, 0, MaxWitnesses)
	if o.NoWitnesses && o.Witnesses != 0 {
		errs = append(errs, fmt.Errorf("witnesses: %d and none are asked for; choose one", o.Witnesses))
	}
	if o.D != 0 && (o.D < clusterfile.MinD || o.D > clusterfile.MaxD) {
		errs = append(errs, fmt.Errorf("d: %v; use %v to %v", o.D, clusterfile.MinD, clusterfile.MaxD))
	}
	if o.Grace < 0 {
		errs = append(errs, fmt.Errorf("grace: %v; use 0 for the default or more", o.Grace))
	}
	return errors.Join(errs...)
}

// resolve makes the paths absolute: a child has them on its command line and
// scripts read them from dev.json.
func (o Options) resolve() (Options, error) {
	var err error
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return o, fmt.Errorf("dir: %w", err)
	}
	if o.Binary == "" {
		if o.Binary, err = os.Executable(); err != nil {
			return o, fmt.Errorf("binary: %w; name the headlease executable", err)
		}
	}
	if o.Binary, err = filepath.Abs(o.Binary); err != nil {
		return o, fmt.Errorf("binary: %w", err)
	}
	info, err := os.Stat(o.Binary)
	if err == nil && (info.IsDir() || info.Mode()&0o111 == 0) {
		err = errors.New("not an executable file")
	}
	if err != nil {
		return o, fmt.Errorf("binary %s: %w; build it or name another", o.Binary, err)
	}
	return o, nil
}

// DefaultArgs is how a process of the cluster is started.
func DefaultArgs(p Process) []string {
	return []string{
		p.Role,
		"--config", p.Config,
		"--name", p.Name,
		"--data-dir", p.DataDir,
		"--certs", p.Certs,
		"--faults", p.Faults,
		"--drills",
	}
}
