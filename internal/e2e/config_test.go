package e2e

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/reconfigure"
	"github.com/headlease/headlease/internal/clusterfile"
	fileload "github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// spare is a witness that runs and is no voter until it is added.
const spare = "w-mumbai"

// startWithSpare runs two regions of one server each and four witnesses, of
// which init is told of three.
func startWithSpare(t *testing.T) *cluster {
	t.Helper()
	return startWith(t, devcluster.Options{Regions: 2, Servers: 1, Witnesses: 4, AllowEvenWitnesses: true},
		func(f clusterfile.File) clusterfile.File {
			f.Witnesses = slices.DeleteFunc(slices.Clone(f.Witnesses), func(w clusterfile.Witness) bool { return w.Name == spare })
			f.AllowEvenWitnesses = false
			return f
		})
}

// operator is an admin's machine: a directory of its own with the cluster file
// and the certificates.
func (c *cluster) operator(t *testing.T, extra ...grpc.DialOption) *admin.Cluster {
	t.Helper()
	dir := t.TempDir()
	for from, to := range map[string]string{c.Dir(): dir, filepath.Join(c.Dir(), "certs"): filepath.Join(dir, "certs")} {
		if err := os.MkdirAll(to, 0o700); err != nil {
			t.Fatal(err)
		}
		files, err := os.ReadDir(from)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if !f.Type().IsRegular() {
				continue
			}
			raw, err := os.ReadFile(filepath.Join(from, f.Name()))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(to, f.Name()), raw, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	f, _, err := fileload.File(filepath.Join(dir, "cluster.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	id := pki.Identity{Cluster: f.Cluster, Role: pki.RoleAdmin}
	creds, err := pki.Load(pki.LoadConfig{Dir: filepath.Join(dir, "certs"), Want: id})
	if err != nil {
		t.Fatal(err)
	}
	links, err := link.New(link.Config{Identity: id, Credentials: creds, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	a := admin.New(f, dialer{links, extra})
	t.Cleanup(func() {
		_ = a.Close()
		_ = links.Close()
	})
	return a
}

// dialer adds options to every connection.
type dialer struct {
	*link.Links
	extra []grpc.DialOption
}

func (d dialer) DialGRPC(plane link.Plane, peer link.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error) {
	return d.Links.DialGRPC(plane, peer, append(extra, d.extra...)...)
}

// dies runs a command on a machine of its own that dies with the end of the
// n-th of its calls: nothing leaves it any more. It reports whether the command
// was done before, and how many calls were made.
func (c *cluster) dies(t *testing.T, n int, do func(context.Context, *admin.Cluster) error) (done bool, calls int) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(within(t, stepTimeout))
	defer cancel(nil)
	errDead := errors.New("the operator's machine is dead")
	var made atomic.Int64
	a := c.operator(t, grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		i := int(made.Add(1))
		if i > n {
			return status.Error(codes.Canceled, errDead.Error())
		}
		err := invoke(ctx, method, req, reply, cc, opts...)
		if i == n {
			cancel(errDead)
			return status.Error(codes.Canceled, errDead.Error())
		}
		return err
	}))
	err := do(ctx, a)
	if err != nil && !errors.Is(context.Cause(ctx), errDead) {
		t.Fatal(err)
	}
	return err == nil, int(made.Load())
}

// epochs of the partitions at their owners.
func (c *cluster) epochs(t *testing.T) map[string]admin.Owner {
	t.Helper()
	ctx := within(t, stepTimeout)
	if err := c.admin.WaitOwned(ctx); err != nil {
		t.Fatal(err)
	}
	out := map[string]admin.Owner{}
	for _, o := range c.admin.Look(ctx).Owners(c.File()) {
		o.Held = 0
		out[o.Partition] = o
	}
	return out
}

// TestVotersAreReplacedWhileOperatorsDie replaces a lost witness by another,
// and a wiped one by itself, and turns the preferences of a partition, while the
// operator's machine dies again and again, each time later, and the command is
// begun anew on another one. Workers take and hand over leases meanwhile; no
// head lease ends, no epoch changes, and no lease is lost.
func TestVotersAreReplacedWhileOperatorsDie(t *testing.T) {
	c := startWithSpare(t)
	leases := hold(t, c.client("", 10*time.Second), 3)
	l := startLoad(t, []*client.Client{c.client("", 10*time.Second), c.client("", 10*time.Second)}, 2, *seed)
	l.progress(5, stepTimeout)
	before := c.epochs(t)
	unchanged := func(when string) {
		t.Helper()
		stillHeld(t, when, leases)
		if now := c.epochs(t); fmt.Sprint(now) != fmt.Sprint(before) {
			t.Fatalf("%s: owners %v, before %v", when, now, before)
		}
	}
	// until dies k calls later each time until the command is done.
	until := func(what string, step int, do func(context.Context, *admin.Cluster) error) {
		t.Helper()
		runs, began := 0, time.Now()
		for n := 1; ; n += step {
			runs++
			if done, calls := c.dies(t, n, do); done {
				t.Logf("%s: done in run %d with %d calls, %v in all", what, runs, calls, time.Since(began).Round(time.Millisecond))
				break
			}
		}
		unchanged(what)
	}

	if err := c.Kill(within(t, stepTimeout), "w-oregon"); err != nil {
		t.Fatal(err)
	}
	until("lost witness replaced by another", 1, func(ctx context.Context, a *admin.Cluster) error {
		_, err := a.ReplaceWitness(ctx, "w-oregon", spare, func(string) {})
		return err
	})

	p, _ := c.Process("w-london")
	if err := c.Kill(within(t, stepTimeout), p.Name); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(p.DataDir); err != nil {
		t.Fatal(err)
	}
	if err := c.StartProcess(p.Name); err != nil {
		t.Fatal(err)
	}
	until("wiped witness replaced by itself", 3, func(ctx context.Context, a *admin.Cluster) error {
		_, err := a.ReplaceWitness(ctx, p.Name, p.Name, func(string) {})
		return err
	})

	file := c.File()
	file.Partitions = slices.Clone(file.Partitions)
	file.Partitions[0].Prefer = slices.Clone(file.Partitions[0].Prefer)
	slices.Reverse(file.Partitions[0].Prefer)
	file.D += time.Second
	until("preferences turned and d longer", 2, func(ctx context.Context, a *admin.Cluster) error {
		_, err := a.Change(ctx, admin.Change{Goal: reconfigure.Settings(file)})
		return err
	})

	conf, described, err := c.operator(t).Configuration(within(t, stepTimeout))
	if err != nil {
		t.Fatal(err)
	}
	if config.VoterIncarnation(conf, config.WitnessVoter("w-oregon")) != 0 || config.VoterIncarnation(conf, config.WitnessVoter(spare)) == 0 || len(conf.GetVoters()) != 5 {
		t.Errorf("%v", conf.GetVoters())
	}
	if conf.GetVersion() != 6 || conf.GetPartitions()[0].GetPrefer()[0] != file.Partitions[0].Prefer[0] {
		t.Errorf("configuration %d: %v", conf.GetVersion(), conf.GetPartitions()[0])
	}
	for _, v := range conf.GetVoters() {
		if got := described[v.GetId()].GetConfiguration().GetVersion(); got != conf.GetVersion() {
			t.Errorf("%s has configuration %d", v.GetId(), got)
		}
	}
	waitForD(t, c, file.D)
	l.progress(5, stepTimeout)
	unchanged("at the end")
	l.stop()
}

// TestAWipedRegionIsReplacedByItself loses all data of a region, which another
// one takes over, starts it anew and replaces it: it is a new incarnation, is
// reported and not counted until then, and its old head leases and tokens never
// come back.
func TestAWipedRegionIsReplacedByItself(t *testing.T) {
	c := start(t, devcluster.Options{Regions: 2, Servers: 1, Witnesses: 3})
	before := c.epochs(t)
	const lost = "us-virginia"
	var partition string
	for _, o := range before {
		if o.Region == lost {
			partition = o.Partition
		}
	}
	p, _ := c.Process(lost + "-1")
	if err := c.Kill(within(t, stepTimeout), p.Name); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(p.DataDir); err != nil {
		t.Fatal(err)
	}
	taken := c.epochs(t)
	if taken[partition].Region == lost || taken[partition].Epoch <= before[partition].Epoch {
		t.Fatalf("not taken over: %v, before %v", taken[partition], before[partition])
	}
	if err := c.StartProcess(p.Name); err != nil {
		t.Fatal(err)
	}
	runs := 0
	for n := 2; ; n += 4 {
		runs++
		done, _ := c.dies(t, n, func(ctx context.Context, a *admin.Cluster) error {
			_, err := a.ReplaceRegion(ctx, lost, func(string) {})
			return err
		})
		if done {
			break
		}
	}
	t.Logf("replaced in %d runs", runs)
	ctx := within(t, stepTimeout)
	conf, described, err := c.admin.Configuration(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range conf.GetVoters() {
		if d := described[v.GetId()]; d.GetState().GetVoter().GetIncarnation() != v.GetIncarnation() || d.GetConfiguration().GetVersion() != 3 {
			t.Errorf("%v: %v", v, d)
		}
	}
	after := c.epochs(t)
	for name, o := range after {
		if o.Epoch < taken[name].Epoch {
			t.Errorf("%s: epoch %d after %d", name, o.Epoch, taken[name].Epoch)
		}
	}
	// It votes again: with one witness less there is a majority only with it.
	if err := c.Kill(ctx, "w-oregon", "w-london"); err != nil {
		t.Fatal(err)
	}
	l, err := c.client("eu-frankfurt", 10*time.Second).Acquire(ctx, "lock/after")
	if err != nil {
		t.Fatal(err)
	}
	d := c.File().D
	select {
	case <-l.Context().Done():
		t.Errorf("the lease was lost: the new region's vote does not count: %v", context.Cause(l.Context()))
	case <-time.After(2 * d):
	}
}

// waitForD waits until the owners have taken a ballot with the new D.
func waitForD(t *testing.T, c *cluster, d time.Duration) {
	t.Helper()
	ctx := within(t, stepTimeout)
	for {
		old := 0
		for _, r := range c.File().RegionNames() {
			st, err := c.admin.RegionStatus(ctx, r)
			if err != nil {
				t.Fatal(err)
			}
			old += len(slices.DeleteFunc(st.GetPartitions(), func(p *pb.PartitionStatus) bool {
				return p.GetHeldNs() == 0 || time.Duration(p.GetRegister().GetValue().GetDNs()) == d
			}))
		}
		if old == 0 {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%d partitions still have the D of before", old)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
