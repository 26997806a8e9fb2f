package doctor

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
)

func judgeFiles(limit uint64) Check {
	c := Check{
		Name: "limits: open files", Verdict: OK, Found: fmt.Sprint(limit),
		Needed: "65536: each client's connection is one",
		Remedy: "raise it (LimitNOFILE= of the systemd unit, nofile in limits.conf, ulimits of a container)",
	}
	if limit > math.MaxInt64 {
		c.Found = "unlimited"
	}
	switch {
	case limit < 1024:
		c.Verdict = Fail
	case limit < 65536:
		c.Verdict = Warn
	default:
		c.Remedy = ""
	}
	return c
}

func judgeSpace(bytes, inodes, free uint64) Check {
	c := Check{
		Name: "disk: free space", Verdict: OK, Found: fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30)),
		Needed: "2 GiB: a server whose disk is full stops", Remedy: "free some, or give the data directory a file system of its own",
	}
	few := inodes > 0 && free < 1000
	if few {
		c.Found += fmt.Sprintf(", %d inodes", free)
	}
	switch {
	case bytes < 256<<20 || few:
		c.Verdict = Fail
	case bytes < 2<<30:
		c.Verdict = Warn
	default:
		c.Remedy = ""
	}
	return c
}

const (
	clockTime = 2 * time.Second
	tickEvery = 10 * time.Millisecond
	// rho is the bound on clock rates on which leases rest.
	rho = 0.01
)

// examineClocks compares the lease clock with REALTIME, and looks at how late
// timers are.
func examineClocks(ctx context.Context, raft pace) []Check {
	system, err := clock.NewSystem()
	if err != nil {
		return []Check{{Name: "clock: lease clock", Verdict: Fail, Found: err.Error(), Needed: "leases are counted on it", Remedy: "use Linux"}}
	}
	wall := func() int64 { return time.Now().UnixNano() } // without Go's monotonic part
	startLease, startWall := system.Now(), wall()
	late := lateness(ctx, system)
	lease, real := time.Duration(system.Now().Sub(startLease)), time.Duration(wall()-startWall)
	out := []Check{judgeRate(lease, real), judgeLateness(late, raft)}
	slept, err := suspends()
	out = append(out, judgeSuspend(slept, err))
	if ok, off, err := synchronised(); err == nil {
		out = append(out, judgeSynchronised(ok, off))
	}
	return out
}

// lateness are how late the ticks of a fast ticker were, by the lease clock.
func lateness(ctx context.Context, c clock.Clock) latencies {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	end := time.NewTimer(clockTime)
	defer end.Stop()
	var late []time.Duration
	var last instant.Instant
	for {
		select {
		case <-tick.C:
			now := c.Now()
			if last != 0 {
				late = append(late, max(0, time.Duration(now.Sub(last))-tickEvery))
			}
			last = now
		case <-end.C:
			return summarise(late)
		case <-ctx.Done():
			return summarise(late)
		}
	}
}

func judgeRate(lease, real time.Duration) Check {
	c := Check{
		Name: "clock: rate against REALTIME", Verdict: OK, Needed: "within 1 %, on which all leases rest",
		Remedy: "check the hypervisor's clock source (tsc, kvm-clock) and the time service; while it steps the wall clock, measure again",
	}
	if lease <= 0 {
		c.Verdict, c.Found = Fail, "the lease clock stood still"
		return c
	}
	drift := math.Abs(float64(real)/float64(lease) - 1)
	c.Found = fmt.Sprintf("%.4f %% apart over %v", drift*100, lease.Round(100*time.Millisecond))
	switch {
	case drift > rho:
		c.Verdict = Fail
	case drift > rho/10:
		c.Verdict = Warn
	default:
		c.Remedy = ""
	}
	return c
}

func judgeLateness(l latencies, raft pace) Check {
	c := Check{
		Name: "clock: timers", Verdict: level(l.p99, raft.lease/5, raft.lease*3/4),
		Found:  fmt.Sprintf("p99 %s late, worst %s", ms(l.p99), ms(l.max)),
		Needed: fmt.Sprintf("p99 to %s: a leader's lease is %s (timing %s), and a gap of 1 s counts as a restart", ms(raft.lease/5), ms(raft.lease), raft.name),
		Remedy: "give the host more or less shared CPU" + raft.remedy,
	}
	if l.max > time.Second {
		c.Verdict = Fail
	}
	if l.n == 0 {
		c.Verdict, c.Found = Fail, "no timer fired"
	}
	if c.Verdict == OK {
		c.Remedy = ""
	}
	return c
}

func judgeSuspend(slept time.Duration, err error) Check {
	c := Check{Name: "clock: suspend detection", Verdict: OK, Needed: "a suspended host must not believe in what it held before"}
	switch {
	case err != nil:
		c.Verdict, c.Found, c.Remedy = Fail, err.Error(), "use a kernel with CLOCK_BOOTTIME"
	case slept > time.Second:
		c.Verdict = Warn
		c.Found = fmt.Sprintf("works; this host has been suspended for %v since it was started", slept.Round(time.Second))
		c.Remedy = "switch suspending off: it costs every lease held here"
	default:
		c.Found = "works"
	}
	return c
}

func judgeSynchronised(ok bool, off time.Duration) Check {
	c := Check{Name: "clock: time service", Verdict: OK, Found: fmt.Sprintf("synchronised, within %s", ms(off)), Needed: "for logs only: leases do not rest on it"}
	if !ok {
		c.Verdict, c.Found, c.Remedy = Warn, "not synchronised", "run a time service (chrony, systemd-timesyncd)"
	}
	return c
}
