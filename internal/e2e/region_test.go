package e2e

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
)

// one region of three servers, one witness, one partition.
func oneRegion() devcluster.Options {
	return devcluster.Options{Regions: 1, Servers: 3, Witnesses: 1}
}

// hold takes locks that are held to the end of the test.
func hold(t *testing.T, c *client.Client, n int) []*client.Lease {
	t.Helper()
	var leases []*client.Lease
	for i := range n {
		l, err := c.Acquire(within(t, stepTimeout), fmt.Sprintf("lock/held-%d", i))
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, l)
	}
	return leases
}

// stillHeld fails the test if a lease was lost.
func stillHeld(t *testing.T, when string, leases []*client.Lease) {
	t.Helper()
	for _, l := range leases {
		if err := l.Context().Err(); err != nil || !l.Valid() {
			t.Errorf("%s: lease on %s (token %v) was lost: %v, valid %v", when, l.Resource(), l.Token(), err, l.Valid())
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

// TestEveryProcessKilledInTurn kills each process with -9 and starts it again,
// under load: no acknowledged grant is lost, no token comes twice, nobody has
// to lift a finger.
func TestEveryProcessKilledInTurn(t *testing.T) {
	c := start(t, oneRegion())
	holder := c.client("", 10*time.Second)
	leases := hold(t, holder, 5)
	l := startLoad(t, []*client.Client{c.client("", 10*time.Second), c.client("", 10*time.Second)}, 3, *seed)
	l.progress(20, stepTimeout)

	rnd := rand.New(rand.NewPCG(*seed, 1))
	names := []string{}
	for _, p := range c.State().Processes {
		names = append(names, p.Name)
	}
	names = append(names, "leader", "leader")
	rnd.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	for _, name := range names {
		if name == "leader" {
			name = c.leader("eu-frankfurt")
		}
		began := time.Now()
		if err := c.Kill(within(t, stepTimeout), name); err != nil {
			t.Fatal(err)
		}
		l.progress(10, stepTimeout)
		t.Logf("killed %s; ten leases later after %v", name, time.Since(began).Round(time.Millisecond))
		stillHeld(t, "after kill -9 of "+name, leases)
		if err := c.StartProcess(name); err != nil {
			t.Fatal(err)
		}
		l.progress(10, stepTimeout)
		stillHeld(t, "after restart of "+name, leases)
	}
	l.stop()
	// What is held is held by the region's word too.
	for _, lease := range leases {
		info, err := holder.Get(within(t, stepTimeout), lease.Resource())
		if err != nil {
			t.Fatal(err)
		}
		if info.GetToken() != uint64(lease.Token()) {
			t.Errorf("%s: the region has token %d, the holder %v", lease.Resource(), info.GetToken(), lease.Token())
		}
	}
}

// TestLeaderFrozenForTwoTTLs stops the leader with SIGSTOP for two TTLs under
// load and continues it, repeatedly: no lease that is kept alive elsewhere is
// lost, and the old leader acknowledges nothing.
func TestLeaderFrozenForTwoTTLs(t *testing.T) {
	o := oneRegion()
	o.Timing = clusterfile.TimingLAN // as a region runs in production; calm needs a TTL of 10 s
	c := start(t, o)
	const ttl = 6 * time.Second
	leases := hold(t, c.client("", ttl), 5)
	l := startLoad(t, []*client.Client{c.client("", ttl), c.client("", ttl)}, 2, *seed)
	l.progress(10, stepTimeout)
	for range 3 {
		frozen := c.leader("eu-frankfurt")
		if err := c.Signal(frozen, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		l.progress(5, stepTimeout)
		t.Logf("%s frozen; served again after %v", frozen, time.Since(began).Round(time.Millisecond))
		for time.Since(began) < 2*ttl {
			<-time.After(100 * time.Millisecond)
			stillHeld(t, "while "+frozen+" is frozen", leases)
		}
		if err := c.Signal(frozen, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		l.progress(10, stepTimeout)
		stillHeld(t, "after "+frozen+" was continued", leases)
	}
	l.stop()
}

// TestSecondStartResumes starts a cluster twice on one directory: the second
// has the state of the first, and tokens go on rising.
func TestSecondStartResumes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dev")
	o := oneRegion()
	o.Dir = dir
	first := start(t, o)
	a, err := first.client("", 10*time.Second).Acquire(within(t, stepTimeout), "lock/resume")
	if err != nil {
		t.Fatal(err)
	}
	before, err := first.admin.RegionStatus(within(t, stepTimeout), "eu-frankfurt")
	if err != nil {
		t.Fatal(err)
	}
	first.stop()

	second := start(t, o)
	after, err := second.admin.RegionStatus(within(t, stepTimeout), "eu-frankfurt")
	if err != nil {
		t.Fatal(err)
	}
	if after.GetIncarnation() != before.GetIncarnation() || after.GetAppliedIndex() < before.GetAppliedIndex() ||
		after.GetConfiguration().GetClusterId() != before.GetConfiguration().GetClusterId() {
		t.Fatalf("another state than before:\n%v\n%v", before, after)
	}
	// The whole cluster was down for less than the holder's TTL: the lease goes
	// on under its token, and the next one is higher.
	stillHeld(t, "after the restart of all processes", []*client.Lease{a})
	if err := a.Release(within(t, stepTimeout)); err != nil {
		t.Fatal(err)
	}
	b, err := second.client("", 10*time.Second).Acquire(within(t, stepTimeout), "lock/resume")
	if err != nil {
		t.Fatal(err)
	}
	if b.Token() <= a.Token() {
		t.Fatalf("token %v after %v", b.Token(), a.Token())
	}
	if b.Token().Epoch() != a.Token().Epoch() {
		t.Errorf("epoch %d after %d: no other region owned the partition meanwhile, so the epoch must stay", b.Token().Epoch(), a.Token().Epoch())
	}
}
