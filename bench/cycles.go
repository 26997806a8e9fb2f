package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"os"
)

func init() {
	loopCols := []col{{"ops", "cycles/s", 1, "%.0f", ""},
		{"acq_p50", "acq p50 ms", 1e6, "%.2f", ""}, {"acq_p99", "acq p99 ms", 1e6, "%.2f", ""}, {"acq_p999", "acq p99.9 ms", 1e6, "%.2f", ""},
		{"rel_p50", "rel p50 ms", 1e6, "%.2f", ""}, {"rel_p99", "rel p99 ms", 1e6, "%.2f", ""},
		{"cpu_us", "server CPU us/cycle", 1, "%.0f", ""}, {"ccpu_us", "client CPU us/cycle", 1, "%.0f", ""},
		{"dev", "disk KiB/cycle", 1024, "%.1f", ""}, {"fl", "flushes/cycle", 1, "%.2f", ""}, {"rss", "RSS MiB", 1 << 20, "%.0f", ""}, {"foreign", "foreign CPUs", 1, "%.2f", ""}, {"errs", "errors", 1, "%.0f", ""}}
	workloads = append(workloads,
		&workload{name: "W1", title: "uncontended acquire+release, 1 client, sequential, connected to the leader", rounds: 5, cols: loopCols,
			run: func(ctx context.Context, r *Runner, ds []*Spec, rounds int) {
				runLoop(ctx, r, ds, rounds, "W1", []int{1})
			}},
		&workload{name: "W2", title: "acquire+release, distinct keys, one connection per client, clients spread over members", rounds: 3, cols: loopCols,
			run: func(ctx context.Context, r *Runner, ds []*Spec, rounds int) {
				runLoop(ctx, r, ds, rounds, "W2", []int{64, 512})
			}},
		&workload{name: "W3", title: "one hot key, constant queue of waiters: from release call to next grant", rounds: 3, run: runW3,
			cols: []col{{"ho_p50", "handoff p50 ms", 1e6, "%.2f", ""}, {"ho_p99", "p99 ms", 1e6, "%.2f", ""}, {"ho_max", "max ms", 1e6, "%.1f", "max"},
				{"rate", "handoffs/s", 1, "%.0f", ""}, {"notif", "notifications/release", 1, "%.1f", ""}, {"cpu_us", "server CPU us/handoff", 1, "%.0f", ""},
				{"ccpu_us", "client CPU us/handoff", 1, "%.0f", ""}, {"dev", "disk KiB/handoff", 1024, "%.1f", ""}, {"self", "granted to the releaser again %", 1, "%.0f", ""}, {"enq", "enqueue all s", 1, "%.1f", ""},
				{"two", "two holders", 1, "%.0f", "sum"}, {"foreign", "foreign CPUs", 1, "%.2f", ""}, {"errs", "errors", 1, "%.0f", ""}}})
}

// openAll opens n drivers, some at a time.
func openAll(ctx context.Context, sys System, sp *Spec, n int, nodes func(i int) []int, dial DialCtx) ([]Driver, error) {
	ds := make([]Driver, n)
	var first error
	var mu sync.Mutex
	sem := make(chan struct{}, 32)
	var wg sync.WaitGroup
	for i := 0; i < n; i++ {
		wg.Add(1)
		sem <- struct{}{}
		go func() {
			defer func() { <-sem; wg.Done() }()
			d, err := sp.Open(ctx, sys, Opts{Nodes: nodes(i), Dial: dial})
			if err != nil {
				mu.Lock()
				first = err
				mu.Unlock()
				return
			}
			ds[i] = d
		}()
	}
	wg.Wait()
	if first != nil {
		closeAll(ds)
	}
	return ds, first
}

func closeAll(ds []Driver) {
	var wg sync.WaitGroup
	sem := make(chan struct{}, 256)
	for _, d := range ds {
		if d == nil {
			continue
		}
		wg.Add(1)
		sem <- struct{}{}
		go func() {
			defer func() { <-sem; wg.Done() }()
			_ = d.Close()
		}()
	}
	wg.Wait()
}

func runLoop(ctx context.Context, r *Runner, specs []*Spec, rounds int, w string, clients []int) {
	for _, sp := range specs { // start everything first, so that all peers are equally warm
		if _, err := r.system(ctx, sp.System); err != nil {
			r.add(w, "", sp.Name, 0, nil, "", err)
		}
	}
	prewarm(ctx, r, specs)
	for _, n := range clients {
		for round := 1; round <= rounds; round++ {
			for _, sp := range specs {
				if ctx.Err() != nil {
					return
				}
				sys := r.started[sp.System]
				if sys == nil {
					continue
				}
				r.cell(ctx, w, fmt.Sprintf("%d clients", n), sp.Name, round, 3, func() (map[string]float64, string, error) {
					m, err := loopCell(ctx, sys, sp, n, w)
					return m, "", err
				})
			}
		}
	}
}

func loopCell(ctx context.Context, sys System, sp *Spec, n int, w string) (map[string]float64, error) {
	l, err := sys.Leader(ctx)
	if err != nil {
		return nil, err
	}
	members := len(sys.Procs())
	nodes := func(i int) []int {
		if n == 1 || sp.LeaderPin {
			return []int{l}
		}
		return spread(i, members)
	}
	ds, err := openAll(ctx, sys, sp, n, nodes, nil)
	if err != nil {
		return nil, err
	}
	defer closeAll(ds)
	// First use of every client (sessions, parents, script loading) before warm-up.
	var wg sync.WaitGroup
	sem := make(chan struct{}, 32)
	for i, d := range ds {
		wg.Add(1)
		sem <- struct{}{}
		go func() {
			defer func() { <-sem; wg.Done() }()
			key := fmt.Sprintf("%s-%d-%d", w, n, i)
			if t, err := d.Acquire(ctx, key, 30*time.Second); err == nil {
				_ = d.Release(ctx, key, t)
			}
		}()
	}
	wg.Wait()

	var phase atomic.Int32 // 0 warm-up, 1 recording, 2 over
	acq := make([][]int64, n)
	rel := make([][]int64, n)
	var errs atomic.Int64
	var lastErr atomic.Value
	for i, d := range ds {
		wg.Add(1)
		go func() {
			defer wg.Done()
			key := fmt.Sprintf("%s-%d-%d", w, n, i)
			for phase.Load() < 2 {
				p := phase.Load()
				c, cancel := context.WithTimeout(ctx, 10*time.Second)
				t0 := time.Now()
				tok, err := d.Acquire(c, key, 30*time.Second)
				t1 := time.Now()
				if err == nil {
					err = d.Release(c, key, tok)
				}
				t2 := time.Now()
				cancel()
				if t2.Sub(t0) > 2*time.Second && n == 1 {
					logf("%s %s: slow cycle: acquire %v, release %v, err %v", w, sp.Name, t1.Sub(t0), t2.Sub(t1), err)
				}
				if err != nil {
					errs.Add(1)
					lastErr.Store(err.Error())
					time.Sleep(10 * time.Millisecond)
					continue
				}
				if p == 1 && phase.Load() == 1 {
					acq[i] = append(acq[i], int64(t1.Sub(t0)))
					rel[i] = append(rel[i], int64(t2.Sub(t1)))
				}
			}
		}()
	}
	time.Sleep(*flagWarm)
	procs := sys.Procs()
	mk := mark()
	u0, c0, f0, w0, t0 := usage(procs), pidUsage(os.Getpid()), diskFlushes(), diskWritten(), time.Now()
	phase.Store(1)
	time.Sleep(*flagDur)
	phase.Store(2)
	u1, c1, f1, w1, secs := usage(procs), pidUsage(os.Getpid()), diskFlushes(), diskWritten(), time.Since(t0).Seconds()
	foreign := mk.foreign()
	wg.Wait()
	var a, b []int64
	for i := range acq {
		a = append(a, acq[i]...)
		b = append(b, rel[i]...)
	}
	sorted64(a)
	sorted64(b)
	k := float64(len(a))
	if k == 0 {
		e, _ := lastErr.Load().(string)
		return nil, fmt.Errorf("no successful cycle (%d errors, last: %s)", errs.Load(), e)
	}
	u := u1.sub(u0)
	m := map[string]float64{"ops": k / secs, "acq_p50": percentile(a, 50), "acq_p99": percentile(a, 99), "acq_p999": percentile(a, 99.9),
		"rel_p50": percentile(b, 50), "rel_p99": percentile(b, 99), "rel_p999": percentile(b, 99.9),
		"cpu_us": u.CPU * 1e6 / k, "ccpu_us": (c1.CPU - c0.CPU) * 1e6 / k, "wb": float64(u.WriteBytes) / k, "dev": float64(w1-w0) / k, "fl": float64(f1-f0) / k,
		"rss": float64(u1.RSS), "foreign": foreign, "errs": float64(errs.Load())}
	if e, ok := lastErr.Load().(string); ok {
		return m, fmt.Errorf("errors seen: %s", e)
	}
	return m, nil
}

func runW3(ctx context.Context, r *Runner, specs []*Spec, rounds int) {
	for _, sp := range specs {
		if _, err := r.system(ctx, sp.System); err != nil {
			r.add("W3", "", sp.Name, 0, nil, "", err)
		}
	}
	prewarm(ctx, r, specs)
	for _, n := range []int{64, 1000} {
		for round := 1; round <= rounds; round++ {
			for _, sp := range specs {
				sys := r.started[sp.System]
				if sys == nil || ctx.Err() != nil {
					continue
				}
				try := 0
				r.cell(ctx, "W3", fmt.Sprintf("%d waiters", n), sp.Name, round, 2, func() (map[string]float64, string, error) {
					try++
					m, err := hotCell(ctx, sys, sp, n, fmt.Sprintf("hot-%s-%d-%d-%d", sp.Name, n, round, try))
					return m, "", err
				})
			}
		}
	}
}

func hotCell(ctx context.Context, sys System, sp *Spec, n int, key string) (map[string]float64, error) {
	l, err := sys.Leader(ctx)
	if err != nil {
		return nil, err
	}
	members := len(sys.Procs())
	ds, err := openAll(ctx, sys, sp, n+1, func(i int) []int {
		if sp.LeaderPin {
			return []int{l}
		}
		return spread(i, members)
	}, nil)
	if err != nil {
		return nil, err
	}
	defer closeAll(ds)
	const ttl = 60 * time.Second
	first, ds2 := ds[n], ds[:n]
	tok, err := first.AcquireWait(ctx, key, ttl)
	if err != nil {
		return nil, err
	}
	wctx, stop := context.WithCancel(ctx)
	defer stop()
	var relStart, holders, two, errs, self, last atomic.Int64
	var phase atomic.Int32
	var mu sync.Mutex
	var lat []int64
	var lastErr atomic.Value
	var wg sync.WaitGroup
	for i, d := range ds2 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for phase.Load() < 2 {
				tok, err := d.AcquireWait(wctx, key, ttl)
				now := time.Now()
				if err != nil {
					if wctx.Err() != nil {
						return
					}
					if !errors.Is(err, context.Canceled) {
						errs.Add(1)
						lastErr.Store(err.Error())
					}
					time.Sleep(20 * time.Millisecond)
					continue
				}
				if holders.Add(1) > 1 {
					two.Add(1)
				}
				if phase.Load() == 1 {
					if last.Swap(int64(i)+1) == int64(i)+1 {
						self.Add(1)
					}
					mu.Lock()
					lat = append(lat, now.UnixNano()-relStart.Load())
					mu.Unlock()
				}
				holders.Add(-1)
				relStart.Store(time.Now().UnixNano())
				if err := d.Release(wctx, key, tok); err != nil && wctx.Err() == nil {
					errs.Add(1)
					lastErr.Store("release: " + err.Error())
				}
			}
		}()
	}
	// The queue is full when the servers and this process fall quiet.
	tq := time.Now()
	quiet(sys.Procs(), 12*time.Second)
	enq := time.Since(tq).Seconds()
	n0 := notifs(ds)
	mk := mark()
	u0, c0, w0, t0 := usage(sys.Procs()), pidUsage(os.Getpid()), diskWritten(), time.Now()
	phase.Store(1)
	relStart.Store(time.Now().UnixNano())
	if err := first.Release(ctx, key, tok); err != nil {
		return nil, fmt.Errorf("first release: %w", err)
	}
	time.Sleep(*flagDur)
	phase.Store(2)
	u1, c1, w1, secs := usage(sys.Procs()), pidUsage(os.Getpid()), diskWritten(), time.Since(t0).Seconds()
	foreign := mk.foreign()
	n1 := notifs(ds)
	mu.Lock()
	a := sorted64(append([]int64(nil), lat...))
	mu.Unlock()
	stop()
	wg.Wait()
	k := float64(len(a))
	if k == 0 {
		e, _ := lastErr.Load().(string)
		return nil, fmt.Errorf("no handoff (%d errors, last: %s)", errs.Load(), e)
	}
	u := u1.sub(u0)
	m := map[string]float64{"ho_p50": percentile(a, 50), "ho_p99": percentile(a, 99), "ho_p999": percentile(a, 99.9), "ho_max": float64(a[len(a)-1]),
		"rate": k / secs, "notif": float64(n1-n0) / k, "cpu_us": u.CPU * 1e6 / k, "ccpu_us": (c1.CPU - c0.CPU) * 1e6 / k,
		"wb": float64(u.WriteBytes) / k, "dev": float64(w1-w0) / k, "self": float64(self.Load()) / k * 100, "enq": enq, "foreign": foreign, "two": float64(two.Load()), "errs": float64(errs.Load())}
	if e, ok := lastErr.Load().(string); ok {
		return m, fmt.Errorf("errors seen: %s", e)
	}
	return m, nil
}

func notifs(ds []Driver) uint64 {
	var n uint64
	for _, d := range ds {
		n += d.Notifications()
	}
	return n
}

// quiet waits until servers and harness together use less than 12% of one CPU
// (or 40% after half of the time), at least 1 s and at most max.
func quiet(ps []*Proc, max time.Duration) {
	end := time.Now().Add(max)
	half := time.Now().Add(max / 4)
	time.Sleep(500 * time.Millisecond)
	for time.Now().Before(end) {
		a := usage(ps).CPU + pidUsage(os.Getpid()).CPU
		time.Sleep(500 * time.Millisecond)
		b := usage(ps).CPU + pidUsage(os.Getpid()).CPU
		if b-a < 0.06 || (b-a < 0.2 && time.Now().After(half)) {
			return
		}
	}
}

// prewarm drives every started system once with 32 clients for some seconds and
// throws the numbers away, so that no peer is measured cold (the JVM compiles
// its hot code only after some thousands of calls).
func prewarm(ctx context.Context, r *Runner, specs []*Spec) {
	done := map[string]bool{}
	for _, sp := range specs {
		sys := r.started[sp.System]
		if sys == nil || done[sp.System] || r.warmed[sp.System] == sys || ctx.Err() != nil {
			continue
		}
		done[sp.System] = true
		r.warmed[sp.System] = sys
		d := *flagDur
		*flagDur = *flagPrewarm
		_, err := loopCell(ctx, sys, sp, 32, "warm")
		*flagDur = d
		if err != nil {
			logf("prewarm %s: %v", sp.System, err)
		}
	}
}
