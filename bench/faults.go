package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

func init() {
	workloads = append(workloads,
		&workload{name: "W5", title: "leader fault: time to the next successful acquire (fresh cluster per driver)", rounds: 1, run: runW5,
			cols: []col{{"outage", "median ms", 1, "%.0f", ""}, {"outage", "max ms", 1, "%.0f", "max"}, {"foreign", "foreign CPUs", 1, "%.2f", ""}}},
		&workload{name: "W7", title: "safety: two clients that both believe to hold one key (fresh cluster per cell)", rounds: 1, run: runW7,
			cols: []col{{"overlap", "overlap ms (API)", 1, "%.0f", "max"}, {"overlap_len", "overlap ms (lenient reading)", 1, "%.0f", "max"},
				{"a_end", "A stops believing, s after fault", 1, "%.1f", ""}, {"b_start", "B granted, s after fault", 1, "%.1f", ""},
				{"a_alive", "A alive at the end", 1, "%.0f", ""}, {"tok_ok", "B's token > A's", 1, "%.0f", ""}, {"foreign", "foreign CPUs", 1, "%.2f", ""}}})
}

// prober makes clients try to acquire all the time; first(t) is the first
// success of a try that began after t.
type prober struct {
	stop  atomic.Bool
	wg    sync.WaitGroup
	mu    sync.Mutex
	oks   []probe
	fails []probe
	ds    []Driver
}

type probe struct {
	start, end time.Time
	who        int
}

func startProber(ctx context.Context, ds []Driver, prefix string, try, pause time.Duration) *prober {
	p := &prober{ds: ds}
	for i, d := range ds {
		p.wg.Add(1)
		go func() {
			defer p.wg.Done()
			for n := 0; !p.stop.Load() && ctx.Err() == nil; n++ {
				key := fmt.Sprintf("%s-%d-%d", prefix, i, n)
				// Random limits keep the clients out of step: a try that was sent to
				// a dead leader hangs until its limit.
				c, cancel := context.WithTimeout(ctx, try/10+time.Duration(rand.Int64N(int64(try-try/10))))
				s := time.Now()
				tok, err := d.Acquire(c, key, 5*time.Second)
				e := time.Now()
				cancel()
				p.mu.Lock()
				if err == nil {
					p.oks = append(p.oks, probe{s, e, i})
				} else {
					p.fails = append(p.fails, probe{s, e, i})
				}
				p.mu.Unlock()
				if err == nil {
					c, cancel := context.WithTimeout(ctx, try)
					_ = d.Release(c, key, tok)
					cancel()
				}
				time.Sleep(pause)
			}
		}()
	}
	return p
}

// first returns the end of the first success among tries begun after t by a
// client in who (nil: any).
func (p *prober) first(t time.Time, who func(int) bool) (time.Time, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var best time.Time
	for _, o := range p.oks {
		if o.start.After(t) && (who == nil || who(o.who)) && (best.IsZero() || o.end.Before(best)) {
			best = o.end
		}
	}
	return best, !best.IsZero()
}

func (p *prober) waitFirst(t time.Time, who func(int) bool, max time.Duration) (time.Duration, bool) {
	for time.Since(t) < max {
		if e, ok := p.first(t, who); ok {
			return e.Sub(t), true
		}
		time.Sleep(2 * time.Millisecond)
	}
	return max, false
}

func (p *prober) trim() {
	p.mu.Lock()
	p.oks, p.fails = nil, nil
	p.mu.Unlock()
}

func (p *prober) end() {
	p.stop.Store(true)
	p.wg.Wait()
}

func runW5(ctx context.Context, r *Runner, specs []*Spec, rounds int) {
	for round := 0; round < rounds; round++ {
		for _, sp := range specs {
			if ctx.Err() != nil {
				return
			}
			if err := faultCell(ctx, r, sp, round); err != nil {
				r.add("W5", "", sp.Name, round+1, nil, "", err)
			}
		}
	}
}

func faultCell(ctx context.Context, r *Runner, sp *Spec, round int) error {
	waitQuiet(ctx, *flagForeign, *flagQuietWait)
	sys, stop, err := r.fresh(ctx, sp.System)
	if err != nil {
		return err
	}
	defer stop()
	members := len(sys.Procs())
	probe := func(name string, first func(i int) int) (p *prober, end func(), err error) {
		ds, err := openAll(ctx, sys, sp, 16, func(i int) []int {
			n, f := allNodes(members), first(i)%members
			return append(n[f:], n[:f]...)
		}, nil)
		if err != nil {
			return nil, nil, err
		}
		p = startProber(ctx, ds, fmt.Sprintf("w5-%d%s", round, name), 400*time.Millisecond, 5*time.Millisecond)
		return p, func() { p.end(); closeAll(ds) }, nil
	}
	var p *prober
	if !sp.LeaderPin {
		var end func()
		if p, end, err = probe("", func(i int) int { return i }); err != nil {
			return err
		}
		defer end()
	}
	one := func(variant string, k int, fault, repair func(l int) error) error {
		if !strings.Contains(variant, *flagVariants) {
			return nil
		}
		if err := poll(ctx, 200*time.Millisecond, 40*time.Second, sys.Ready); err != nil {
			return fmt.Errorf("not ready before fault %d: %w", k, err)
		}
		time.Sleep(2 * time.Second)
		l, err := sys.Leader(ctx)
		if err != nil {
			return err
		}
		p := p
		if sp.LeaderPin { // clients of one fault stay where it has driven them
			var end func()
			if p, end, err = probe(fmt.Sprintf("-%s-%d", variant[:4], k), func(int) int { return l }); err != nil {
				return err
			}
			defer end()
			time.Sleep(time.Second)
		}
		if _, ok := p.waitFirst(time.Now(), nil, 20*time.Second); !ok {
			return fmt.Errorf("no acquire before fault %d", k)
		}
		p.trim()
		mk := mark()
		t := time.Now()
		if err := fault(l); err != nil {
			return err
		}
		d, ok := p.waitFirst(t, nil, 40*time.Second)
		f := mk.foreign()
		m := map[string]float64{"outage": float64(d) / 1e6, "foreign": f}
		note := ""
		if members == 1 {
			note = "single server: restarted at once by the harness (kill) or resumed after 5 s (stop); there is no failover"
		} else if sp.Name == "redlock5" {
			note = "no leader: one of five servers is hit"
		}
		if !ok {
			err = fmt.Errorf("no acquire in 40 s")
		}
		r.add("W5", variant, sp.Name, k+1, m, note, err)
		return repair(l)
	}
	for k := 0; k < *flagKills; k++ {
		err := one("kill -9", k, func(l int) error {
			sys.Procs()[l].kill()
			if members == 1 {
				return sys.Restart(ctx, l)
			}
			return nil
		}, func(l int) error {
			if members == 1 {
				return nil
			}
			time.Sleep(500 * time.Millisecond)
			return sys.Restart(ctx, l)
		})
		if err != nil {
			return err
		}
	}
	for k := 0; k < (*flagKills+1)/2; k++ {
		err := one("SIGSTOP (hung)", k, func(l int) error {
			sys.Procs()[l].pause()
			if members == 1 {
				time.AfterFunc(5*time.Second, sys.Procs()[l].resume)
			}
			return nil
		}, func(l int) error { sys.Procs()[l].resume(); return nil })
		if err != nil {
			return err
		}
	}
	return nil
}

func runW7(ctx context.Context, r *Runner, specs []*Spec, rounds int) {
	for round := 1; round <= rounds; round++ {
		for _, mode := range []string{"leader stopped 2xTTL, A bound to it", "leader stopped 2xTTL, A knows all", "server killed and restarted, A knows all"} {
			if !strings.Contains(mode, *flagVariants) {
				continue
			}
			for _, sp := range specs {
				if ctx.Err() != nil {
					return
				}
				waitQuiet(ctx, *flagForeign, *flagQuietWait)
				m, note, err := safetyCell(ctx, r, sp, mode)
				r.add("W7", mode, sp.Name, round, m, note, err)
			}
		}
	}
}

func safetyCell(ctx context.Context, r *Runner, sp *Spec, mode string) (map[string]float64, string, error) {
	sys, stop, err := r.fresh(ctx, sp.System)
	if err != nil {
		return nil, "", err
	}
	defer stop()
	ttl := *flagW7TTL
	members := len(sys.Procs())
	l, err := sys.Leader(ctx)
	if err != nil {
		return nil, "", err
	}
	aNodes := []int{l}
	if mode != "leader stopped 2xTTL, A bound to it" {
		aNodes = append(aNodes, without(members, l)...)
		if members == 1 {
			aNodes = aNodes[:1]
		}
	}
	da, err := sp.Open(ctx, sys, Opts{Nodes: aNodes})
	if err != nil {
		return nil, "", err
	}
	defer func() { go func() { _ = da.Close() }() }()
	db, err := sp.Open(ctx, sys, Opts{Nodes: without(members, l)})
	if err != nil {
		return nil, "", err
	}
	defer func() { go func() { _ = db.Close() }() }()
	sa, err := da.OpenSession(ctx, ttl)
	if err != nil {
		return nil, "", err
	}
	const key = "w7-key"
	tokA, err := sa.Hold(ctx, key)
	if err != nil {
		return nil, "", err
	}
	if err := sa.StartKeepAlive(); err != nil {
		return nil, "", err
	}
	defer sa.Abandon()
	sb, err := db.OpenSession(ctx, ttl)
	if err != nil {
		return nil, "", err
	}
	if err := sb.StartKeepAlive(); err != nil {
		return nil, "", err
	}
	defer sb.Abandon()
	time.Sleep(ttl + ttl/4)

	var tokB atomic.Uint64
	var bHas atomic.Bool
	var bAt atomic.Int64
	var over atomic.Bool
	mk := mark()
	t0 := time.Now()
	if mode == "server killed and restarted, A knows all" {
		sys.Procs()[l].kill()
		if err := sys.Restart(ctx, l); err != nil {
			return nil, "", err
		}
	} else {
		sys.Procs()[l].pause()
		time.AfterFunc(2*ttl, sys.Procs()[l].resume)
	}
	var wg sync.WaitGroup
	wg.Add(1)
	var bMu sync.Mutex
	bs := sb
	go func() {
		defer wg.Done()
		for !over.Load() && ctx.Err() == nil {
			bMu.Lock()
			s := bs
			bMu.Unlock()
			c, cancel := context.WithTimeout(ctx, time.Second)
			tok, err := s.Hold(c, key)
			cancel()
			if err == nil {
				tokB.Store(tok)
				bAt.Store(int64(time.Since(t0)))
				bHas.Store(true)
				return
			}
			if !s.Alive() { // B's own session may be lost too: take a new one
				c, cancel := context.WithTimeout(ctx, time.Second)
				if n, err := db.OpenSession(c, ttl); err == nil && n.StartKeepAlive() == nil {
					bMu.Lock()
					bs = n
					bMu.Unlock()
				}
				cancel()
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
	loose, isLoose := sa.(LenientSession)
	var strict, lenient time.Duration
	aEnd := time.Duration(-1)
	last := time.Now()
	for time.Since(t0) < 2*ttl+ttl && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
		now := time.Now()
		a := sa.Alive()
		bMu.Lock()
		b := bHas.Load() && bs.Alive()
		bMu.Unlock()
		if !a && aEnd < 0 {
			aEnd = now.Sub(t0)
		}
		if a && b {
			strict += now.Sub(last)
		}
		al := a
		if isLoose {
			al = loose.AliveLenient()
		}
		if al && b {
			lenient += now.Sub(last)
		}
		last = now
	}
	over.Store(true)
	aAlive := 0.0
	if sa.Alive() {
		aAlive = 1
	}
	wg.Wait()
	m := map[string]float64{"overlap": float64(strict) / 1e6, "overlap_len": float64(lenient) / 1e6, "a_alive": aAlive, "foreign": mk.foreign()}
	if aEnd >= 0 {
		m["a_end"] = aEnd.Seconds()
	}
	if bHas.Load() {
		m["b_start"] = time.Duration(bAt.Load()).Seconds()
		m["tok_ok"] = 0
		if tokB.Load() > tokA {
			m["tok_ok"] = 1
		}
	}
	return m, "", nil
}
