package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/devcluster"
)

// lockIn returns a lock that is in a partition.
func (c *cluster) lockIn(partition string) string {
	c.t.Helper()
	m, err := config.NewMap(config.FromFile(c.File(), "x"))
	if err != nil {
		c.t.Fatal(err)
	}
	for i := range 10_000 {
		name := fmt.Sprintf("lock/kept-%d", i)
		if p, err := m.Locate(name); err == nil && p.Partition == partition {
			return name
		}
	}
	c.t.Fatalf("no lock is in partition %s", partition)
	return ""
}

// TestF26PlannedTransfer moves a partition between two regions while workers
// write to fenced resources: an operator who breaks the transfer off gets the
// partition back at the same epoch; one who does not finds it in the other region,
// under the next one. No write of an old holder is accepted, and a lock delay need
// not be waited out.
func TestF26PlannedTransfer(t *testing.T) {
	c := start(t, devcluster.Options{Regions: 2, Servers: 1, Witnesses: 1, D: 2 * time.Second})
	before := c.epochs(t)
	var was admin.Owner
	var to string
	for _, was = range before {
		break
	}
	for _, name := range c.File().RegionNames() {
		if name != was.Region {
			to = name
		}
	}
	j := startJournal(t)
	w := j.work(c.client("", 10*time.Second), 4)
	w.until(t, 10, stepTimeout)
	cl := c.client("", 10*time.Second)

	// Aborted by an interrupt of the command.
	lock := c.lockIn(was.Partition)
	lease, err := cl.Acquire(within(t, stepTimeout), lock)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(within(t, startTimeout), binary, "-f", filepath.Join(c.Dir(), "cluster.yaml"), "--certs", filepath.Join(c.Dir(), "certs"),
		"partition", "transfer", was.Partition, "--to", to, "--drain", "1m")
	said, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	interrupted := false
	for lines := bufio.NewScanner(said); lines.Scan(); {
		text.WriteString(lines.Text() + "\n")
		if strings.Contains(lines.Text(), ": draining") && !interrupted {
			interrupted = true
			select {
			case <-lease.Context().Done():
			case <-time.After(stepTimeout):
				t.Error("the holder was not told of the drain")
			}
			if !lease.Valid() {
				t.Error("the holder has no time to stop")
			}
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
		}
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || !strings.Contains(text.String(), "transfer aborted") {
		t.Fatalf("interrupted: %v\n%s", err, text.String())
	}
	if err := lease.Release(within(t, stepTimeout)); err != nil {
		t.Fatal(err)
	}
	if got := c.epochs(t)[was.Partition]; got != was {
		t.Fatalf("after the abort: %+v, before: %+v", got, was)
	}
	// It grants again where it was.
	lease, err = cl.Acquire(within(t, stepTimeout), lock)
	if err != nil {
		t.Fatal(err)
	}
	if got := lease.Region(); got != was.Region {
		t.Errorf("granted by region %s, not by the owner %s", got, was.Region)
	}

	// Not aborted.
	moved := make(chan struct{})
	go func() { // a worker that stops in order
		defer close(moved)
		<-lease.Context().Done()
		_ = lease.Release(context.WithoutCancel(t.Context()))
	}()
	done, err := c.admin.Transfer(within(t, startTimeout), admin.Transfer{Partition: was.Partition, To: to, Drain: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	<-moved
	t.Logf("%s: %s -> %s, epoch %d, without an owner for at most %v after the drain", done.Partition, done.From, done.To, done.Epoch, done.Unowned.Round(time.Millisecond))
	now := c.epochs(t)[was.Partition]
	if now.Region != to || now.Epoch != was.Epoch+1 {
		t.Fatalf("after the transfer: %+v, before: %+v", now, was)
	}
	delayed, err := cl.Acquire(within(t, stepTimeout), lock, client.WithLockDelay(30*time.Second))
	if err != nil {
		t.Fatalf("a lock delay is waited out although the partition was drained: %v", err)
	}
	if delayed.Token() <= lease.Token() || delayed.Region() != to {
		t.Errorf("token %v by %s after %v", delayed.Token(), delayed.Region(), lease.Token())
	}
	if err := delayed.Release(within(t, stepTimeout)); err != nil {
		t.Fatal(err)
	}

	// All that the other region owns goes back.
	out := c.mustCLI("region", "drain", to, "--drain", "3s")
	t.Log(strings.TrimSpace(out))
	for _, o := range c.epochs(t) {
		if o.Region == to {
			t.Errorf("partition %s is still with the drained region", o.Partition)
		}
	}
	if _, errs, err := c.cli(within(t, stepTimeout), "region", "remove", was.Region); err == nil || !strings.Contains(errs, "prefers region") {
		t.Errorf("a region that is preferred was removed: %v %s", err, errs)
	}
	w.anew(t, 5, stepTimeout)
	w.stop()
	// What happened can be told afterwards.
	audit := c.mustCLI("audit", "export")
	for _, want := range []string{
		`"kind":"transfer aborted","partition":"` + was.Partition + `","epoch":1,"by":"admin"`,
		`"kind":"draining","partition":"` + was.Partition + `","epoch":1,"successor":"` + to + `","by":"admin"`,
		`"kind":"adopted","partition":"` + was.Partition + `","epoch":2`, `"kind":"configured"`,
	} {
		if !strings.Contains(audit, want) {
			t.Errorf("the audit lacks %s:\n%s", want, audit)
		}
	}
	explained := c.mustCLI("explain", "partition", was.Partition)
	for _, want := range []string{"region " + was.Region + " holds epoch 3", "by a planned transfer", "witness/w-oregon"} {
		if !strings.Contains(explained, want) {
			t.Errorf("the explanation lacks %q:\n%s", want, explained)
		}
	}
	j.highest() // fails if a lower token was accepted after a higher one
}
