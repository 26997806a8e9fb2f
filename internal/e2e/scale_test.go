package e2e

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

var scaleSessions = flag.Int("scale.sessions", 1000, "sessions of the scale test, over a connection for each 200, at least 12")

var scalePause = flag.Duration("scale.pause", 0, "pause of the rolling restart after each server that has caught up")

// TestManySessionsOutliveTheServers: sessions in processes of their own, over
// connections to all three servers, each with a lock: a killed leader, a rolling
// restart of all servers, and the redeployment of half of the client processes
// lose none of the others' leases, and a redeployment wakes each waiter once. make
// scale runs it with 20,000.
func TestManySessionsOutliveTheServers(t *testing.T) {
	const processes = 4
	connections := max(*scaleSessions/200, 12)
	o := oneRegion()
	c := start(t, o)
	remotes := make([]*scaleRemote, processes)
	for i := range remotes {
		remotes[i] = startScale(t, scaleConfig{
			Dir: c.Dir(), Name: fmt.Sprint("p", i), TTL: 10 * time.Second,
			Sessions: *scaleSessions / processes, Connections: connections / processes,
			Peer: fmt.Sprint("p", (i+processes/2)%processes),
		})
	}
	all := func(what string, who ...*scaleRemote) {
		t.Helper()
		reports := make([]scaleReport, len(who))
		var work sync.WaitGroup
		began, servers := time.Now(), c.cpu()
		for i, r := range who {
			work.Go(func() { reports[i] = r.do(what) })
		}
		work.Wait()
		took := time.Since(began)
		held, lost, closing, clients := 0, 0, int64(0), time.Duration(0)
		for i, r := range reports {
			held, lost, closing, clients = held+r.Held, lost+r.Lost, max(closing, r.Closing), clients+r.CPU
			if r.Error != "" || r.Lost > 0 || r.Held != who[i].cfg.Sessions {
				t.Errorf("%s of %s: %d held of %d, %d lost; %s %v", what, who[i].cfg.Name, r.Held, who[i].cfg.Sessions, r.Lost, r.Error, r.Why)
			}
		}
		t.Logf("%-9s %d processes: %d held, %d lost, after %v (closing %d ms); processor time: clients %v, servers %v", what, len(who),
			held, lost, took.Round(time.Millisecond), closing, clients.Round(time.Millisecond), c.spentSince(servers))
		if t.Failed() {
			t.FailNow()
		}
	}
	all("open", remotes...)
	c.quiet(t, 8*time.Second)
	all("report", remotes...)

	leader := c.leader("eu-frankfurt")
	if err := c.Kill(within(t, stepTimeout), leader); err != nil {
		t.Fatal(err)
	}
	c.quiet(t, 4*time.Second)
	if err := c.StartProcess(leader); err != nil {
		t.Fatal(err)
	}
	c.caughtUp(leader)
	all("report", remotes...)

	for _, p := range c.File().RegionProcesses("eu-frankfurt") {
		if err := c.Signal(p.Name, syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := c.Wait(within(t, stepTimeout), p.Name); err != nil {
			t.Fatal(err)
		}
		if err := c.StartProcess(p.Name); err != nil {
			t.Fatal(err)
		}
		c.caughtUp(p.Name)
		if *scalePause > 0 {
			<-time.After(*scalePause)
		}
	}
	all("report", remotes...)

	waiting := remotes[processes/2:]
	all("wait", waiting...)
	c.waiters(len(waiting) * waitersOf(*scaleSessions/processes))
	all("redeploy", remotes[:processes/2]...)
	c.waiters(0)
	for _, r := range waiting {
		r.wokenOnce(t)
	}
	all("report", remotes...)
	c.quiet(t, 11*time.Second) // a lost keepalive shows after a TTL
	all("report", remotes...)
}

// waiters waits until so many wait in the region's queues.
func (c *cluster) waiters(want int) {
	c.t.Helper()
	ctx := within(c.t, stepTimeout)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		st, err := c.admin.RegionStatus(ctx, "eu-frankfurt")
		if err == nil && st.GetWaiters() == uint64(want) {
			return
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("%d wait, want %d: %v", st.GetWaiters(), want, err)
		case <-tick.C:
		}
	}
}

// wokenOnce checks that each of the process's waiters was woken, and that the
// locks they waited for were granted to them and to their next holders, and to
// nobody else meanwhile.
func (r *scaleRemote) wokenOnce(t *testing.T) {
	t.Helper()
	n := waitersOf(r.cfg.Sessions)
	ctx := within(t, stepTimeout)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	got := r.do("waited")
	for !got.Missed && got.Error == "" && got.Grants[0]+got.Grants[1] > 0 { // the watch comes later
		select {
		case <-ctx.Done():
			t.Fatalf("waiters of %s: %d of %d woken; locks by grants since: %v", r.cfg.Name, got.Woken, n, got.Grants)
		case <-tick.C:
			got = r.do("waited")
		}
	}
	t.Logf("waiters of %s: %d of %d woken; locks by grants since: %v", r.cfg.Name, got.Woken, n, got.Grants)
	if got.Error != "" || got.Woken != n {
		t.Errorf("waiters of %s: %d of %d were woken: %s", r.cfg.Name, got.Woken, n, got.Error)
	}
	if got.Missed {
		t.Logf("the watch of %s began again: what it saw says nothing", r.cfg.Name)
	} else if got.Grants[2] != n {
		t.Errorf("locks that %s waited for, by how often they were granted: %v, want %d twice", r.cfg.Name, got.Grants, n)
	}
}

// quiet lets the cluster run for a time and logs what its servers spent.
func (c *cluster) quiet(t *testing.T, d time.Duration) {
	t.Helper()
	before := c.cpu()
	<-time.After(d)
	after := c.cpu()
	for name, spent := range after {
		if was, ok := before[name]; ok && strings.HasPrefix(name, "eu-") {
			t.Logf("%s: %.0f %% of a CPU", name, 100*(spent-was).Seconds()/d.Seconds())
		}
	}
}

// spentSince is the processor time of the region's servers since before.
func (c *cluster) spentSince(before map[string]time.Duration) (sum time.Duration) {
	for name, spent := range c.cpu() {
		if was, ok := before[name]; ok && strings.HasPrefix(name, "eu-") {
			sum += spent - was
		}
	}
	return sum
}

// cpu is the time that each running process has spent.
func (c *cluster) cpu() map[string]time.Duration {
	out := map[string]time.Duration{}
	for _, p := range c.State().Processes {
		raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.PID), "stat"))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(raw), ") ")
		fields := strings.Fields(rest)
		if len(fields) < 13 {
			continue
		}
		user, _ := strconv.Atoi(fields[11])
		system, _ := strconv.Atoi(fields[12])
		out[p.Name] = time.Duration(user+system) * 10 * time.Millisecond
	}
	return out
}

// caughtUp waits until a server has applied what its leader has.
func (c *cluster) caughtUp(name string) {
	c.t.Helper()
	ctx := within(c.t, stepTimeout)
	process, _ := c.File().Process(name)
	describe := func(p clusterfile.Process) (*pb.DescribeServerResponse, error) {
		conn, err := c.links.DialGRPC(link.PlaneAPI, link.Peer{Name: p.Name, Region: p.Region, Role: pki.RoleRegion, Address: p.API})
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		return pb.NewClusterServiceClient(conn).DescribeServer(ctx, &pb.DescribeServerRequest{})
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		leader, err := c.admin.RegionStatus(ctx, process.Region)
		if err == nil && leader.GetLeader() != "" {
			at, _ := c.File().Process(leader.GetLeader())
			want, err1 := describe(at)
			for err1 == nil {
				have, err := describe(process)
				if err == nil && have.GetAppliedIndex() >= want.GetAppliedIndex() {
					return
				}
				select {
				case <-ctx.Done():
					c.t.Fatalf("%s has not caught up: %v, %v", name, err, context.Cause(ctx))
				case <-tick.C:
				}
			}
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("%s has not caught up: %v", name, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// startScale starts a client process; it ends with the test.
func startScale(t *testing.T, cfg scaleConfig) *scaleRemote {
	t.Helper()
	raw, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), scaleVar+"="+string(raw))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r := &scaleRemote{cfg: cfg, wait: cmd.Wait, errors: &strings.Builder{}}
	cmd.Stderr = r.errors
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.in, r.reports = in, json.NewDecoder(out)
	t.Cleanup(func() {
		_ = in.Close() // it ends at the end of its commands
		if err := r.wait(); err != nil {
			t.Errorf("client process %s: %v\n%s", cfg.Name, err, r.errors)
		}
	})
	return r
}

// do has the client process run a command.
func (r *scaleRemote) do(command string) scaleReport {
	var report scaleReport
	if _, err := fmt.Fprintln(r.in, command); err != nil {
		return scaleReport{Error: err.Error()}
	}
	if err := r.reports.Decode(&report); err != nil {
		return scaleReport{Error: err.Error() + "\n" + r.errors.String()}
	}
	return report
}
