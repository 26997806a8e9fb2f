package drill

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/drill/report"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/internal/instant"
)

// record gathers what was collected.
func (p *player) record() *check.Record {
	w := p.rig.watch
	rec := &check.Record{
		D: p.d, RTT: p.rtt, TTL: max(p.plan.Workload.TTL, sessionTTL), Began: p.began, Ended: p.ended,
		Faults: p.faults, Actors: p.load.records(), Stalls: p.stalls, Pressure: p.pressure, SettledAt: p.settledAt, Unsettled: p.unsettled,
	}
	slices.SortStableFunc(rec.Faults, func(a, b check.Fault) int { return cmp.Compare(a.Step, b.Step) })
	for _, q := range p.rig.file().Partitions {
		rec.Partitions = append(rec.Partitions, q.Name)
	}
	rec.Lookups = p.looks.record()
	if p.pair != nil {
		rec.Actors = append(rec.Actors, p.pair.records()...)
		rec.Late = p.pair.late(p.journal)
	}
	for _, e := range p.journal {
		rec.Journal = append(rec.Journal, check.Entry{
			N: e.N, Op: string(e.Op), Resource: e.Resource, Writer: e.Writer, Token: e.Token, Accepted: e.Outcome == resource.Accepted,
		})
	}
	w.mu.Lock()
	for _, a := range w.answers {
		// A control run begins where the run before it ended.
		if a.Answered > p.began.Add(-p.d) && a.Asked <= p.ended {
			rec.Answers = append(rec.Answers, a)
		}
	}
	for _, name := range sortedKeys(w.heard) {
		var heard []instant.Instant
		for _, at := range w.heard[name] {
			if at > p.began && at <= p.ended {
				heard = append(heard, at)
			}
		}
		rec.Watched = append(rec.Watched, check.Watched{Name: name, Heard: heard})
	}
	w.mu.Unlock()
	if w.full {
		rec.Faults = append(rec.Faults, check.Fault{Title: "the collection", NoEffect: "more was said than a drill keeps"})
	}
	return rec
}

// report judges the play.
func (p *player) report(s plan.Scenario, began time.Time) *report.Report {
	rec := p.record()
	p.rig.o.progress("checking what was collected")
	rec.Histories = p.histories(check.Moved(rec))
	v := check.Check(rec, s.Expect)
	f := p.rig.file()
	out := report.New(report.Header{
		Scenario: s.Name, Summary: s.Summary, About: s.About, Began: began, Seed: p.rig.o.Seed,
		Cluster: f.Cluster, Private: p.rig.o.Running == nil, Regions: f.RegionNames(), Servers: len(f.Processes()) - len(f.Witnesses),
		Witnesses: len(f.Witnesses),
	}, rec, v)
	p.addPhi(out)
	if p.pair != nil {
		out.Failover(rec, oldWorker, newWorker)
	}
	return out
}

// addPhi adds what the detectors said.
func (p *player) addPhi(out *report.Report) {
	w := p.rig.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.samples {
		if s.at > p.began && s.at <= p.ended {
			out.AddPhi(s.at.Sub(p.began), s.observer, s.region, s.phi)
		}
	}
}

// Live is a drill in progress.
type Live struct {
	Scenario string
	At       time.Duration
	// Faults in progress, in words.
	Faults []string
	// Owners of the partitions, in words.
	Owners []string
	// Grants, Writes, Refused and Lost so far; Acquire and Write are the 99th
	// percentiles of the last seconds.
	Grants, Writes, Refused, Lost int64
	Acquire, Write                time.Duration
}

const (
	liveEvery = 200 * time.Millisecond
	// liveWindow is over which the live view's percentiles are.
	liveWindow = 5 * time.Second
)

// watchLive shows the state of the drill until the returned function is
// called.
func (p *player) watchLive() (stop func()) {
	done := make(chan struct{})
	ended := make(chan struct{})
	began := p.rig.clock.Now()
	go func() {
		defer close(ended)
		tick := time.NewTicker(liveEvery)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			now := p.rig.clock.Now()
			l := Live{
				Scenario: p.plan.Name, At: now.Sub(began),
				Grants: p.load.counters.grants.Load(), Writes: p.load.counters.writes.Load(),
				Refused: p.load.counters.refused.Load(), Lost: p.load.counters.lost.Load(),
			}
			p.mu.Lock()
			for _, i := range sortedIndexes(p.active) {
				l.Faults = append(l.Faults, p.active[i])
			}
			p.mu.Unlock()
			owners := p.rig.watch.owners()
			for _, part := range sortedKeys(owners) {
				c := owners[part]
				state := fmt.Sprintf("%s: %s, epoch %d", part, c.By, c.Number)
				if c.Until < now {
					state += " (lapsed)"
				}
				l.Owners = append(l.Owners, state)
			}
			actors := p.load.records()
			l.Acquire = check.Quantile(check.Latencies(actors, check.Acquired, now.Add(-liveWindow), now), 0.99)
			l.Write = check.Quantile(check.Latencies(actors, check.Wrote, now.Add(-liveWindow), now), 0.99)
			p.rig.o.Live(l)
		}
	}()
	return func() { close(done); <-ended }
}

func sortedIndexes(m map[int]string) []int {
	out := make([]int, 0, len(m))
	for i := range m {
		out = append(out, i)
	}
	slices.Sort(out)
	return out
}
