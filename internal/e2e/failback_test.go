package e2e

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
)

// TestAutomaticFailback: a region that is lost and comes back gets back, after a
// minute in which it was steady, the partition that says so, and not the one that
// leaves it to an operator. Holders are told, and no write of an old one passes.
func TestAutomaticFailback(t *testing.T) {
	const home, away = "us-virginia", "eu-frankfurt"
	c := startWith(t, devcluster.Options{Regions: 2, Servers: 1, Witnesses: 1, D: 2 * time.Second}, func(f clusterfile.File) clusterfile.File {
		f.Partitions = append([]clusterfile.Partition(nil), f.Partitions...)
		for i := range f.Partitions {
			f.Partitions[i].Prefer = []string{home, away}
			if f.Partitions[i].Name == "us" {
				f.Partitions[i].Failback = clusterfile.FailbackAuto
			}
		}
		return f
	})
	for name, o := range c.epochs(t) {
		if o.Region != home { // the other one was first at the start
			c.mustCLI("partition", "transfer", name, "--to", home, "--drain", "0s")
		}
	}
	before := c.epochs(t)
	if err := c.Kill(within(t, stepTimeout), home+"-1"); err != nil {
		t.Fatal(err)
	}
	lost := c.epochs(t)
	for name, o := range lost {
		if o.Region != away || o.Epoch <= before[name].Epoch {
			t.Fatalf("%s: %+v, before %+v", name, o, before[name])
		}
	}
	j := startJournal(t)
	w := j.work(c.client("", 10*time.Second), 4)
	w.until(t, 5, stepTimeout)
	if err := c.StartProcess(home + "-1"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	// Steady for a minute: a machine that stands still meanwhile begins it anew, and
	// may cost the holder its lease.
	cl, lock := c.client("", 10*time.Second), c.lockIn("us")
	told := false
	ctx := within(t, 6*time.Minute)
	for c.epochs(t)["us"].Region != home {
		lease, err := cl.Acquire(ctx, lock, client.Wait())
		if err != nil {
			t.Fatalf("not handed back after %v: %v", time.Since(began), err)
		}
		if lease.Region() == home {
			break // it came while this was asked
		}
		select {
		case <-lease.Context().Done():
			told = told || lease.Valid() && lease.Region() == away
		case <-ctx.Done():
			t.Fatalf("not handed back: %v", context.Cause(ctx))
		}
		if err := lease.Release(within(t, stepTimeout)); err != nil {
			t.Log(err) // it was lost
		}
	}
	took := time.Since(began)
	t.Logf("back %v after the start of the region that was lost", took.Round(100*time.Millisecond))
	if took < time.Minute {
		t.Error("that is before it was steady for a minute")
	}
	if !told {
		t.Error("the holder was not told while it had time to stop")
	}
	now := c.epochs(t)
	if now["us"].Region != home || now["us"].Epoch <= lost["us"].Epoch {
		t.Errorf("partition us: %+v, before %+v", now["us"], lost["us"])
	}
	if now["eu"] != lost["eu"] {
		t.Errorf("partition eu, whose failback is manual: %+v, before %+v", now["eu"], lost["eu"])
	}
	w.anew(t, 5, stepTimeout)
	w.stop()
	j.highest() // fails if a lower token was accepted after a higher one
	if audit, want := c.mustCLI("audit", "export"), `"successor":"`+home+`","by":"failback"`; !strings.Contains(audit, want) {
		t.Errorf("the audit lacks %s:\n%s", want, audit)
	}
}

// TestF26ADrainOutlivesItsLeader: the leader of a region is killed in the middle of
// a drain. The next one goes on with it: the holder is told, nothing is granted
// meanwhile, and the partition ends where it was sent, under the next epoch.
func TestF26ADrainOutlivesItsLeader(t *testing.T) {
	c := start(t, devcluster.Options{Regions: 2, Servers: 3, Witnesses: 1, D: 2 * time.Second})
	was := c.epochs(t)["eu"]
	to := "us-virginia"
	if was.Region == to {
		to = "eu-frankfurt"
	}
	j := startJournal(t)
	w := j.work(c.client("", 10*time.Second), 4)
	w.until(t, 5, stepTimeout)
	cl := c.client("", 10*time.Second)
	lock := c.lockIn(was.Partition)
	lease, err := cl.Acquire(within(t, stepTimeout), lock)
	if err != nil {
		t.Fatal(err)
	}
	type end struct {
		done *admin.Transferred
		err  error
	}
	ended := make(chan end, 1)
	draining := make(chan struct{})
	told := false
	go func() {
		done, err := c.admin.Transfer(within(t, startTimeout), admin.Transfer{
			Partition: was.Partition, To: to, Drain: 20 * time.Second,
			Progress: func(p admin.TransferProgress) {
				if p.Stage == "draining" && p.Leases > 0 && !told {
					told = true
					close(draining)
				}
			},
		})
		ended <- end{done, err}
	}()
	select {
	case <-draining:
	case e := <-ended:
		t.Fatalf("the transfer was over before it drained: %+v, %v", e.done, e.err)
	}
	old := c.leader(was.Region)
	if err := c.Kill(within(t, stepTimeout), old); err != nil {
		t.Fatal(err)
	}
	select {
	case <-lease.Context().Done():
	case <-time.After(stepTimeout):
		t.Fatal("the holder was not told of the drain")
	}
	_ = lease.Release(within(t, stepTimeout)) // it may be over by now
	e := <-ended
	if e.err != nil {
		t.Fatal(e.err)
	}
	if next := c.leader(was.Region); next == old {
		t.Errorf("%s still leads", old)
	}
	now := c.epochs(t)[was.Partition]
	if now.Region != to || now.Epoch != was.Epoch+1 {
		t.Fatalf("after the transfer: %+v, before: %+v", now, was)
	}
	t.Logf("%s: %s -> %s, epoch %d, %s killed in the drain, without an owner for at most %v", e.done.Partition, e.done.From, e.done.To, e.done.Epoch, old, e.done.Unowned.Round(time.Millisecond))
	again, err := cl.Acquire(within(t, stepTimeout), lock, client.Wait())
	if err != nil {
		t.Fatal(err)
	}
	if again.Token() <= lease.Token() || again.Region() != to {
		t.Errorf("token %v by %s after %v", again.Token(), again.Region(), lease.Token())
	}
	w.anew(t, 5, stepTimeout)
	w.stop()
	j.highest() // fails if a lower token was accepted after a higher one
}
