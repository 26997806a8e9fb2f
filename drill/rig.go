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
	"time"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

const (
	clusterDir = "cluster"
	drillLog   = "drill.log"
	stopLimit  = 15 * time.Second
	// serveLimit bounds the start of a resource or a worker process.
	serveLimit = 20 * time.Second
	// sessionTTL of the workers; it has no part in a failover between regions.
	sessionTTL = 5 * time.Second
)

// rig is what a scenario runs on: a cluster that is ready, watched, and a group
// for the processes beside it.
type rig struct {
	o       Options
	dir     string
	cluster *devcluster.Cluster
	group   *devcluster.Group
	admin   *admin.Cluster
	watch   *watch
	clock   clock.Clock
	rand    *rand.Rand
	closers []func(context.Context) error
}

// openRig starts a cluster in dir. Close the rig also after an error.
func openRig(ctx context.Context, dir string, o Options) (*rig, error) {
	r := &rig{o: o, dir: dir, rand: rand.New(rand.NewPCG(o.Seed, 0))}
	sys, err := clock.NewSystem()
	if err != nil {
		return r, err
	}
	r.clock = sys
	log, err := os.Create(filepath.Join(dir, drillLog))
	if err != nil {
		return r, err
	}
	r.onClose(func(context.Context) error { return log.Close() })
	logger := slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	began := time.Now()
	r.cluster, err = devcluster.New(devcluster.Options{
		Dir: filepath.Join(dir, clusterDir), Binary: o.Binary, D: o.D, RTT: o.RTT, Timing: clusterfile.TimingCalm,
		Ready: o.Ready, Logger: logger,
	})
	if err != nil {
		return r, err
	}
	r.onClose(r.cluster.Stop)
	f := r.cluster.File()
	o.progress("starting a cluster of its own: %d processes, %d regions and %d witnesses", len(f.Processes()), len(f.Regions), len(f.Witnesses))
	if err := r.cluster.Start(ctx); err != nil {
		return r, err
	}
	adm, closeAdmin, err := o.Admin(r.cluster.File(), r.cluster.Dir())
	if err != nil {
		return r, err
	}
	r.admin = adm
	r.onClose(func(context.Context) error { return closeAdmin() })
	r.watch = newWatch(r.clock, adm, logger)
	r.onClose(func(context.Context) error { r.watch.close(); return nil })
	r.group = devcluster.NewGroup()
	r.onClose(func(ctx context.Context) error { r.group.Stop(ctx, 3*time.Second); return nil })
	if err := r.settled(ctx); err != nil {
		return r, err
	}
	err = r.watch.await(ctx, serveLimit, "an owner of each partition", func(l *ledger, _ map[string]*pb.StatusResponse) bool {
		return len(l.owners) == len(f.Partitions)
	})
	if err != nil {
		return r, err
	}
	o.progress("ready and settled after %.1f s", time.Since(began).Seconds())
	return r, nil
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

// lockIn returns a fresh lock of a partition.
func (r *rig) lockIn(partition string) (string, error) {
	p, ok := r.cluster.File().Partition(partition)
	if !ok {
		return "", fmt.Errorf("partition %s: not in the cluster file", partition)
	}
	for {
		name := fmt.Sprintf("lock/ledger-%d", r.rand.IntN(10_000))
		res, err := shard.Parse(name)
		if err != nil {
			return "", err
		}
		n, err := res.Shard(r.cluster.File().Shards)
		if err != nil {
			return "", err
		}
		if slices.ContainsFunc(p.Shards, func(s clusterfile.ShardRange) bool { return s.First <= n && n <= s.Last }) {
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

// sleep waits on the wall; it returns ctx's cause if that ends first.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
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
