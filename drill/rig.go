package drill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/netns"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

const (
	clusterDir = "cluster"
	drillLog   = "drill.log"
	stopLimit  = 15 * time.Second
	// serveLimit bounds the start of a resource or a worker process.
	serveLimit = 20 * time.Second
	// stepLimit bounds each wait that has no bound of its own.
	stepLimit = 60 * time.Second
)

// Processes signals and starts the processes of a cluster. Safe for concurrent
// use.
type Processes interface {
	// Reach says, for the first of the processes that nothing here can signal
	// and start, why; nil: all can be.
	Reach(ctx context.Context, names []string) error
	// Signal sends SIGKILL, SIGTERM, SIGSTOP or SIGCONT. A stopped process goes
	// on by itself, and a killed one is started again, after heals at the
	// latest, should the drill be gone.
	Signal(ctx context.Context, name string, sig syscall.Signal, heals time.Duration) error
	// MayEnd says that a process may end by itself: then it is started again after
	// heals at the latest, should the drill be gone.
	MayEnd(ctx context.Context, name string, heals time.Duration) error
	// Ended waits until the process runs no more.
	Ended(ctx context.Context, name string) error
	// Start starts a process that does not run; one that does is no error.
	Start(ctx context.Context, name string) error
}

// private is the processes of a cluster of the drill's own, which ends with
// the drill.
type private struct{ c *devcluster.Cluster }

func (p private) Reach(context.Context, []string) error { return nil }

func (p private) Signal(_ context.Context, name string, sig syscall.Signal, _ time.Duration) error {
	return p.c.Signal(name, sig)
}

func (p private) MayEnd(context.Context, string, time.Duration) error { return nil }

func (p private) Ended(ctx context.Context, name string) error { return p.c.Wait(ctx, name) }

func (p private) Start(_ context.Context, name string) error {
	if now, ok := p.c.Process(name); ok && now.Running {
		return nil
	}
	return p.c.StartProcess(name)
}

// nobody can signal or start anything.
type nobody struct{}

var errNoProcesses = errors.New("nothing here can signal or start processes; run 'headlease drill agent' on its host, " +
	"or drill a cluster of 'headlease dev' on this machine")

func (nobody) Reach(_ context.Context, names []string) error {
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", names[0], errNoProcesses)
}

func (nobody) Signal(context.Context, string, syscall.Signal, time.Duration) error {
	return errNoProcesses
}
func (nobody) MayEnd(context.Context, string, time.Duration) error { return errNoProcesses }
func (nobody) Ended(context.Context, string) error                 { return errNoProcesses }
func (nobody) Start(context.Context, string) error                 { return errNoProcesses }

// rig is what a scenario runs on: a cluster that is ready, watched, and a group
// for the processes beside it.
type rig struct {
	o       Options
	dir     string
	cluster clusterfile.File
	// config and certs are for the worker processes.
	config, certs, client string
	processes             Processes
	// oneMachine: all processes share this machine's clocks.
	oneMachine bool
	rtt        func() time.Duration
	// lab is the private cluster's network namespaces; nil: it is on loopback.
	lab     *netns.Lab
	group   *devcluster.Group
	admin   *admin.Cluster
	links   client.Links
	watch   *watch
	clock   clock.Clock
	rand    *rand.Rand
	log     *slog.Logger
	closers []func(context.Context) error
}

func (r *rig) file() clusterfile.File { return r.cluster }

// openRig makes what a scenario needs. Close the rig also after an error.
func openRig(ctx context.Context, dir string, s plan.Scenario, o Options, log *slog.Logger) (*rig, error) {
	r := &rig{o: o, dir: dir, rand: rand.New(rand.NewPCG(o.Seed, 0)), log: log}
	sys, err := clock.NewSystem()
	if err != nil {
		return r, err
	}
	r.clock = sys
	began := time.Now()
	if o.Running != nil {
		r.running(o.Running)
	} else if err := r.private(ctx, s, log); err != nil {
		return r, err
	}
	if err := (world{file: r.file()}).check(s); err != nil {
		return r, fmt.Errorf("scenario %s does not fit the cluster: %w", s.Name, err)
	}
	if err := r.reach(ctx, s); err != nil {
		return r, err
	}
	c, err := o.Connect(r.file(), r.certs, r.client)
	if err != nil {
		return r, err
	}
	r.admin, r.links = c.Admin, c.Links
	r.onClose(func(context.Context) error { return c.Close() })
	if err := r.faultable(ctx, s); err != nil {
		return r, err
	}
	r.watch = newWatch(r.clock, r.admin, log)
	r.onClose(func(context.Context) error { r.watch.close(); return nil })
	if r.rtt == nil {
		r.rtt = r.watch.longestRTT
	}
	r.group = devcluster.NewGroup()
	r.onClose(func(ctx context.Context) error { r.group.Stop(ctx, 3*time.Second); return nil })
	if err := r.settled(ctx, stepLimit); err != nil {
		return r, err
	}
	err = r.watch.await(ctx, serveLimit, "an owner of each partition", func(l *check.Ledger, latest map[string]*pb.StatusResponse) bool {
		return len(l.Owners) == len(r.file().Partitions) && len(latest) == len(r.file().Regions)
	})
	if err != nil {
		return r, err
	}
	o.progress("ready and settled after %.1f s", time.Since(began).Seconds())
	if o.Running != nil {
		return r, r.blast(ctx, s)
	}
	return r, nil
}

// blast tells what a drill of a running cluster will break, before it does.
func (r *rig) blast(ctx context.Context, s plan.Scenario) error {
	v := r.admin.Look(ctx)
	r.o.progress("this drill breaks the running cluster %s:", r.file().Cluster)
	for _, x := range v.Regions {
		r.o.progress("  region %s serves %d sessions with %d leases and %d waiters", x.Name, x.Status.GetSessions(), x.Status.GetLeases(), x.Status.GetWaiters())
	}
	w := world{file: r.file(), owners: map[string]string{}, leaders: map[string]string{}, pick: func(int) int { return 0 }}
	for _, o := range v.Owners(r.file()) {
		w.owners[o.Partition] = o.Region
		r.o.progress("  partition %s is held by %s with epoch %d", o.Partition, o.Region, o.Epoch)
	}
	for _, name := range r.file().RegionNames() {
		w.leaders[name] = r.watch.leader(name)
	}
	for i, st := range s.Steps {
		whom, err := w.whom(st)
		if err != nil {
			return fmt.Errorf("step %d (%s): %w", i+1, st.Title(), err)
		}
		r.o.progress("  step %d, at %v: %s%s", i+1, st.At, st.Title(), whom)
	}
	return nil
}

// whom says whom a step concerns as things are now.
func (w world) whom(s plan.Step) (string, error) {
	var names []string
	switch {
	case s.Links():
		links, err := w.links(s)
		if err != nil {
			return "", err
		}
		for _, l := range links {
			for _, name := range []string{l.from.name, l.to.name} {
				if !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
	case s.Do == plan.RedisDown:
		regions, err := w.cacheRegions(s)
		if err != nil {
			return "", err
		}
		for _, region := range regions {
			names = append(names, devcluster.RedisName(region))
		}
	case s.Target.Who != plan.Nobody, s.Do == plan.HandOver:
		target := s.Target
		if s.Do == plan.HandOver {
			target = s.To
		}
		processes, err := w.processes(target)
		if err != nil {
			return "", err
		}
		names, _ = namesOf(processes)
	default:
		return "", nil
	}
	return fmt.Sprintf(" (now %s)", strings.Join(names, ", ")), nil
}

func (r *rig) running(c *Running) {
	r.cluster, r.config, r.certs, r.client, r.oneMachine = c.File, c.Config, c.Certs, c.Client, c.OneMachine
	if r.processes = c.Processes; r.processes == nil {
		r.processes = nobody{}
	}
}

// private starts a cluster of the drill's own.
func (r *rig) private(ctx context.Context, s plan.Scenario, log *slog.Logger) error {
	matrix, err := devcluster.ParseMatrix(s.Cluster.RTT)
	if err != nil {
		return fmt.Errorf("scenario %s: cluster.rtt: %w", s.Name, err)
	}
	if r.o.RTT != nil {
		matrix = *r.o.RTT
	}
	o := devcluster.Options{
		Dir: filepath.Join(r.dir, clusterDir), Binary: r.o.Binary, Regions: s.Cluster.Regions, Servers: s.Cluster.Servers,
		Witnesses: s.Cluster.Witnesses, D: s.Cluster.D, RTT: matrix, Redis: s.Cluster.Redis, Timing: clusterfile.TimingCalm, Ready: r.o.Ready, Logger: log,
	}
	if r.o.Namespaces {
		if err := filterable(s); err != nil {
			return err
		}
		if r.lab, err = netns.New(ctx, o.Sites()); err != nil {
			return err
		}
		r.onClose(func(context.Context) error { return r.lab.Close() })
		o.Places = r.lab
	}
	c, err := devcluster.New(o)
	if err != nil {
		return err
	}
	r.onClose(c.Stop)
	r.cluster, r.processes, r.oneMachine = c.File(), private{c}, true
	r.config, r.certs, r.client = filepath.Join(c.Dir(), "cluster.yaml"), filepath.Join(c.Dir(), "certs"), devcluster.DefaultClient
	longest := longestOf(r.cluster, matrix)
	r.rtt = func() time.Duration { return longest }
	f := r.cluster
	r.o.progress("D %v, seed %d, in %s", f.D, r.o.Seed, r.dir)
	with := ""
	if n := len(caches(f)); n > 0 {
		with = fmt.Sprintf(", and %d redis-servers", n)
	}
	r.o.progress("starting a cluster of its own: %d processes, %d regions and %d witnesses%s", len(f.Processes()), len(f.Regions), len(f.Witnesses), with)
	return c.Start(ctx)
}

// longestOf is the longest round trip between two sites.
func longestOf(f clusterfile.File, m devcluster.Matrix) (longest time.Duration) {
	sites := f.RegionNames()
	for _, w := range f.Witnesses {
		sites = append(sites, w.Name)
	}
	for i, a := range sites {
		for _, b := range sites[i+1:] {
			longest = max(longest, m.RTT(a, b))
		}
	}
	return longest
}

// reach refuses a scenario, before its first step, if a process that it
// signals cannot be signalled, or if it needs what the cluster has not.
func (r *rig) reach(ctx context.Context, s plan.Scenario) error {
	var all []string
	for _, p := range r.file().Processes() {
		all = append(all, p.Name)
	}
	for i, st := range s.Steps {
		// Roles may be anybody's when the step begins.
		if st.Processes() {
			if err := r.processes.Reach(ctx, all); err != nil {
				return fmt.Errorf("step %d (%s) needs processes that can be signalled and started: %w", i+1, st.Title(), err)
			}
		}
		switch st.Do {
		case plan.RedisDown:
			var names []string
			for _, region := range caches(r.file()) {
				names = append(names, devcluster.RedisName(region.Name))
			}
			if err := r.processes.Reach(ctx, names); err != nil {
				return fmt.Errorf("step %d (%s) needs the processes of the lease caches: %w", i+1, st.Title(), err)
			}
		case plan.DiskHang, plan.DiskFull:
			// It ends the process, which somebody must start again.
			if err := r.processes.Reach(ctx, all); err != nil {
				return fmt.Errorf("step %d (%s) ends a process, which must be started again: %w", i+1, st.Title(), err)
			}
		default:
		}
	}
	return nil
}

// faultable refuses a scenario, before its first step, if a process has no
// fault table or does not let this admin set it.
func (r *rig) faultable(ctx context.Context, s plan.Scenario) error {
	i := slices.IndexFunc(s.Steps, func(st plan.Step) bool {
		return st.Links() || st.Do == plan.DiskHang || st.Do == plan.DiskFull || st.Do == plan.ClockStep
	})
	if i < 0 {
		return nil
	}
	for _, p := range r.file().Processes() {
		if _, err := r.admin.ListFaults(ctx, p); err != nil {
			return fmt.Errorf("step %d (%s): %s takes no faults: %w; is it started with --drills?", i+1, s.Steps[i].Title(), p.Name, err)
		}
	}
	return nil
}

func (r *rig) onClose(f func(context.Context) error) { r.closers = append(r.closers, f) }

// close stops everything, whatever became of the scenario.
func (r *rig) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer cancel()
	var errs []error
	for _, f := range slices.Backward(r.closers) {
		errs = append(errs, f(ctx))
	}
	return errors.Join(errs...)
}

// lockIn returns a lock of a partition; others have other numbers.
func (r *rig) lockIn(partition string, taken map[string]bool) (string, error) {
	p, ok := r.file().Partition(partition)
	if !ok {
		return "", fmt.Errorf("partition %s: not in the cluster file", partition)
	}
	for {
		name := fmt.Sprintf("lock/drill-%d", r.rand.IntN(1_000_000))
		res, err := shard.Parse(name)
		if err != nil {
			return "", err
		}
		n, err := res.Shard(r.file().Shards)
		if err != nil {
			return "", err
		}
		if !taken[name] && slices.ContainsFunc(p.Shards, func(s clusterfile.ShardRange) bool { return s.First <= n && n <= s.Last }) {
			taken[name] = true
			return name, nil
		}
	}
}

// startResource starts a resource process with data of its own.
func (r *rig) startResource(ctx context.Context, name string, unguarded bool) (*resource.Process, error) {
	ctx, cancel := context.WithTimeout(ctx, serveLimit)
	defer cancel()
	return resource.StartProcess(ctx, resource.ProcessOptions{
		Group: r.group, Binary: r.binary(), Dir: filepath.Join(r.dir, name),
		Log: filepath.Join(r.dir, name+".log"), UnguardedForDrill: unguarded,
	})
}

func (r *rig) binary() string {
	if r.o.Binary != "" {
		return r.o.Binary
	}
	path, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return path
}

// makeDir makes the drill's directory: a temporary one, or the named one, which
// must be new or empty.
func makeDir(dir string) (string, error) {
	if dir == "" {
		return os.MkdirTemp("", "headlease-drill-")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("dir: %w", err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("dir: %w; make its parent first", err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return "", fmt.Errorf("dir: %w", err)
	}
	_, err = d.Readdirnames(1)
	switch {
	case err == nil:
		err = errors.New("is not empty; a drill wants a cluster of its own, so name a new directory")
	case errors.Is(err, io.EOF):
		err = nil
	}
	if err = errors.Join(err, d.Close()); err != nil {
		return "", fmt.Errorf("dir %s: %w", dir, err)
	}
	return dir, nil
}
