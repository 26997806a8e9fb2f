package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

func init() {
	workloads = append(workloads,
		&workload{name: "W4", title: "many sessions kept alive (fresh cluster per cell)", rounds: 2, run: runW4,
			cols: []col{{"sessions", "sessions", 1, "%.0f", ""}, {"conns", "connections", 1, "%.0f", ""}, {"open_s", "open all s", 1, "%.1f", ""},
				{"cpu_pct", "server CPU %", 1, "%.1f", ""}, {"cpu_us", "server CPU us/keepalive", 1, "%.1f", ""}, {"cli_us", "client CPU us/keepalive", 1, "%.1f", ""},
				{"wb", "bytes written/keepalive", 1, "%.0f", ""}, {"rate", "keepalives/s", 1, "%.0f", ""}, {"rss", "server RSS/session KiB", 1024, "%.1f", ""},
				{"idle_pct", "idle CPU %", 1, "%.1f", ""}, {"lost", "lost", 1, "%.0f", "sum"}, {"foreign", "foreign CPUs", 1, "%.2f", ""}}},
		&workload{name: "W6", title: "mass expiry: all sessions die at once, each holding one key (fresh cluster per cell)", rounds: 2, run: runW6,
			cols: []col{{"sessions", "sessions", 1, "%.0f", ""}, {"first_s", "first key free s", 1, "%.1f", ""}, {"all_s", "all free s", 1, "%.1f", ""},
				{"over_s", "all free - TTL s", 1, "%.1f", ""}, {"b_p50", "unrelated acq before p50 ms", 1e6, "%.2f", ""}, {"b_p99", "before p99 ms", 1e6, "%.2f", ""},
				{"m_p50", "meanwhile p50 ms", 1e6, "%.2f", ""}, {"m_p99", "meanwhile p99 ms", 1e6, "%.2f", ""}, {"m_max", "meanwhile max ms", 1e6, "%.0f", "max"},
				{"b_rate", "acq/s before", 1, "%.0f", ""}, {"m_rate", "acq/s meanwhile", 1, "%.0f", ""}, {"verify", "of 100 re-acquired", 1, "%.0f", ""}, {"foreign", "foreign CPUs", 1, "%.2f", ""}}})
}

// openSessions opens n sessions, share of them per Driver, and if prefix is set
// lets each hold one key.
func openSessions(ctx context.Context, sys System, sp *Spec, n int, ttl time.Duration, prefix string) ([]Driver, []Session, error) {
	share := max(sp.Share, 1)
	members := len(sys.Procs())
	nd := (n + share - 1) / share
	ds, err := openAll(ctx, sys, sp, nd, func(i int) []int { return spread(i, members) }, nil)
	if err != nil {
		return nil, nil, err
	}
	ss := make([]Session, n)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var first error
	sem := make(chan struct{}, 64)
	for i := range ss {
		wg.Add(1)
		sem <- struct{}{}
		go func() {
			defer func() { <-sem; wg.Done() }()
			s, err := ds[i%nd].OpenSession(ctx, ttl)
			if err == nil && prefix != "" {
				_, err = s.Hold(ctx, fmt.Sprintf("%s%d", prefix, i))
			}
			if err == nil {
				err = s.StartKeepAlive()
			}
			if err != nil {
				mu.Lock()
				first = err
				mu.Unlock()
				return
			}
			ss[i] = s
		}()
	}
	wg.Wait()
	return ds, ss, first
}

// dropAll forgets sessions and drivers after their servers are gone.
func dropAll(ds []Driver, ss []Session) {
	for _, s := range ss {
		if s != nil {
			s.Abandon()
		}
	}
	closeAll(ds)
	time.Sleep(1500 * time.Millisecond)
}

func runW4(ctx context.Context, r *Runner, specs []*Spec, rounds int) {
	for round := 1; round <= rounds; round++ {
		for _, sp := range specs {
			if ctx.Err() != nil {
				return
			}
			r.cell(ctx, "W4", fmt.Sprintf("%d sessions, TTL %v", *flagSessions, *flagTTL), sp.Name, round, 2, func() (map[string]float64, string, error) {
				return keepAliveCell(ctx, r, sp)
			})
		}
	}
}

func keepAliveCell(ctx context.Context, r *Runner, sp *Spec) (map[string]float64, string, error) {
	sys, stop, err := r.fresh(ctx, sp.System)
	if err != nil {
		return nil, "", err
	}
	defer stop()
	time.Sleep(2 * time.Second)
	i0 := usage(sys.Procs())
	time.Sleep(3 * time.Second)
	i1 := usage(sys.Procs())
	t := time.Now()
	ds, ss, err := openSessions(ctx, sys, sp, *flagSessions, *flagTTL, "")
	defer func() { dropAll(ds, ss) }()
	if err != nil {
		return nil, "", err
	}
	openS := time.Since(t).Seconds()
	time.Sleep(*flagTTL / 2)
	mk := mark()
	n0 := keepAlives(ss)
	u0, c0, w0 := usage(sys.Procs()), pidUsage(os.Getpid()), diskWritten()
	t = time.Now()
	time.Sleep(*flagHold)
	n1 := keepAlives(ss)
	u1, c1, w1 := usage(sys.Procs()), pidUsage(os.Getpid()), diskWritten()
	secs := time.Since(t).Seconds()
	f := mk.foreign()
	lost := 0
	for _, s := range ss {
		if !s.Alive() {
			lost++
		}
	}
	k := float64(n1 - n0)
	u := u1.sub(u0)
	return map[string]float64{"sessions": float64(len(ss)), "conns": float64(len(ds)), "open_s": openS, "cpu_pct": u.CPU / secs * 100,
		"cpu_us": u.CPU * 1e6 / k, "cli_us": (c1.CPU - c0.CPU) * 1e6 / k, "wb": float64(u.WriteBytes) / k, "dev": float64(w1-w0) / k, "rate": k / secs,
		"rss": float64(u1.RSS-i1.RSS) / float64(len(ss)), "idle_pct": (i1.CPU - i0.CPU) / 3 * 100, "lost": float64(lost), "foreign": f}, "", nil
}

func keepAlives(ss []Session) uint64 {
	var n uint64
	for _, s := range ss {
		n += s.KeepAlives()
	}
	return n
}

func runW6(ctx context.Context, r *Runner, specs []*Spec, rounds int) {
	for round := 1; round <= rounds; round++ {
		for _, sp := range specs {
			if ctx.Err() != nil {
				return
			}
			r.cell(ctx, "W6", fmt.Sprintf("%d sessions, TTL %v", *flagSessions, *flagTTL), sp.Name, round, 2, func() (map[string]float64, string, error) {
				return expiryCell(ctx, r, sp)
			})
		}
	}
}

func expiryCell(ctx context.Context, r *Runner, sp *Spec) (map[string]float64, string, error) {
	sys, stop, err := r.fresh(ctx, sp.System)
	if err != nil {
		return nil, "", err
	}
	defer stop()
	n, ttl := *flagSessions, *flagTTL
	ds, ss, err := openSessions(ctx, sys, sp, n, ttl, "x6-")
	defer func() { dropAll(ds, ss) }()
	if err != nil {
		return nil, "", err
	}
	members := len(sys.Procs())
	others, err := openAll(ctx, sys, sp, 9, func(i int) []int { return spread(i, members) }, nil)
	if err != nil {
		return nil, "", err
	}
	defer closeAll(others)
	counter, ok := others[8].(HeldCounter)
	if !ok {
		return nil, "", ErrUnsupported
	}
	// Unrelated clients in a closed loop with a pause of 5 ms, so that they see
	// latency and do not saturate the machine themselves.
	var phase atomic.Int32 // 0 settle, 1 before, 2 meanwhile, 3 over
	var mu sync.Mutex
	var before, mean []int64
	var wg sync.WaitGroup
	defer wg.Wait()
	defer phase.Store(3)
	for i := 0; i < 8; i++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for phase.Load() < 3 && ctx.Err() == nil {
				p := phase.Load()
				key := fmt.Sprintf("u6-%d", i)
				c, cancel := context.WithTimeout(ctx, 20*time.Second)
				t := time.Now()
				tok, err := others[i].Acquire(c, key, 30*time.Second)
				d := int64(time.Since(t))
				if err == nil {
					_ = others[i].Release(c, key, tok)
				}
				cancel()
				mu.Lock()
				switch {
				case p == 1:
					before = append(before, d)
				case p == 2:
					mean = append(mean, d)
				}
				mu.Unlock()
				time.Sleep(5 * time.Millisecond)
			}
		}()
	}
	held, err := counter.CountHeld(ctx, "x6-", n)
	if err != nil {
		return nil, "", err
	}
	note := ""
	if held != n {
		note = fmt.Sprintf("only %d of %d held at the start", held, n)
	}
	time.Sleep(ttl)
	phase.Store(1)
	tb := time.Now()
	time.Sleep(4 * time.Second)
	bSecs := time.Since(tb).Seconds()
	mk := mark()
	phase.Store(2)
	t0 := time.Now()
	var wa sync.WaitGroup
	for i := 0; i < 16; i++ {
		wa.Add(1)
		go func() {
			defer wa.Done()
			for j := i; j < len(ss); j += 16 {
				ss[j].Abandon()
			}
		}()
	}
	wa.Wait()
	first, all := -1.0, -1.0
	start := held
	for time.Since(t0) < 12*ttl && ctx.Err() == nil {
		c, cancel := context.WithTimeout(ctx, 10*time.Second)
		h, err := counter.CountHeld(c, "x6-", n)
		cancel()
		if err == nil {
			if h < start && first < 0 {
				first = time.Since(t0).Seconds()
			}
			if h == 0 {
				all = time.Since(t0).Seconds()
				break
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	mSecs := time.Since(t0).Seconds()
	phase.Store(3)
	wg.Wait()
	f := mk.foreign()
	if all < 0 {
		return nil, "", fmt.Errorf("keys still held %v after the death", 12*ttl)
	}
	// Are the keys really acquirable?
	okN := 0
	s, err := others[0].OpenSession(ctx, ttl)
	if err == nil {
		for i := 0; i < 100; i++ {
			if _, err := s.Hold(ctx, fmt.Sprintf("x6-%d", i*n/100)); err == nil {
				okN++
			}
		}
	}
	sorted64(before)
	sorted64(mean)
	m := map[string]float64{"sessions": float64(n), "first_s": first, "all_s": all, "over_s": all - ttl.Seconds(),
		"b_p50": percentile(before, 50), "b_p99": percentile(before, 99), "m_p50": percentile(mean, 50), "m_p99": percentile(mean, 99),
		"b_rate": float64(len(before)) / bSecs, "m_rate": float64(len(mean)) / mSecs, "verify": float64(okN), "foreign": f}
	if len(mean) > 0 {
		m["m_max"] = float64(mean[len(mean)-1])
	}
	return m, note, nil
}
