package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/headlease/headlease/drill/report"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/drill/worker"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	faultID = "cable-cut"
	// cutMargin is what the cut lasts beyond 3 D, and cutSpare the time after
	// which it ends by itself should the drill die.
	cutMargin = time.Second
	cutSpare  = 15 * time.Second
	// cutSlack is how much of the cut a detector may have heard: what was on
	// its way, and the time to set the faults in each process.
	cutSlack = time.Second
	// maxSpread bounds the tries to get two owners.
	maxSpread = 3
)

// cableCut cuts two regions from each other for 3 D, in both directions and on
// all planes, while a worker in each holds a lock and writes.
func cableCut(ctx context.Context, r *rig) (Outcome, error) {
	c := &cut{r: r}
	if err := c.prepare(ctx); err != nil {
		return Outcome{}, err
	}
	if err := c.play(ctx); err != nil {
		return Outcome{}, err
	}
	if err := c.finish(ctx); err != nil {
		return Outcome{}, err
	}
	result := c.judge()
	if err := r.o.show(c.timeline()); err != nil {
		return Outcome{}, err
	}
	return Outcome{Result: result, OK: result.OK, Inconclusive: result.Inconclusive}, nil
}

// cut is one cut as it is played.
type cut struct {
	r        *rig
	sides    [2]side
	resource *resource.Process
	// began before the first fault was set, complete when all were; healing
	// began before the first was cleared.
	began, complete, healing, healed instant.Instant
	journal                          []resource.Entry
}

// side is one of the two regions.
type side struct {
	region, partition string
	worker            *workerProcess
	// crashed is when its detector gave the other region up; 0: not seen.
	crashed instant.Instant
	// silent is how long it had not heard the other one at the end of the cut.
	silent time.Duration
}

// prepare chooses two regions that own a partition each, and starts a worker
// in each.
func (c *cut) prepare(ctx context.Context) error {
	if err := c.choose(ctx); err != nil {
		return err
	}
	var err error
	if c.resource, err = c.r.startResource(ctx, "resource", false); err != nil {
		return err
	}
	for i := range c.sides {
		s := &c.sides[i]
		lock, err := c.r.lockIn(s.partition)
		if err != nil {
			return err
		}
		if s.worker, err = c.r.startWorker(workerSpec{"worker in " + s.region, s.region, lock, c.resource.Address}); err != nil {
			return err
		}
	}
	for _, s := range c.sides {
		if _, err := s.worker.await(ctx, stepLimit, worker.Written); err != nil {
			return err
		}
	}
	return nil
}

// choose finds two regions that own a partition each. Who was first at the
// cluster's start may own them all; then that one is lost once, so that others
// are promoted.
func (c *cut) choose(ctx context.Context) error {
	for tries := 0; ; tries++ {
		n := 0
		for _, p := range c.r.cluster.File().Partitions {
			owner, ok := c.r.watch.owner(p.Name)
			if ok && n < 2 && (n == 0 || owner.by != c.sides[0].region) {
				c.sides[n] = side{region: owner.by, partition: p.Name}
				n++
			}
		}
		if n == 2 {
			return nil
		}
		if tries == maxSpread {
			return errors.New("one region owns all partitions again and again, so there are no two to cut from each other")
		}
		if err := c.r.spread(ctx, c.sides[0].region); err != nil {
			return err
		}
	}
}

// spread loses a region that owns all partitions and brings it back.
func (r *rig) spread(ctx context.Context, region string) error {
	r.o.progress("%s was first and owns all partitions; it is killed and started again, so that others get some", region)
	for _, p := range r.cluster.File().RegionProcesses(region) {
		if err := r.cluster.Signal(p.Name, syscall.SIGKILL); err != nil {
			return err
		}
	}
	err := r.watch.await(ctx, stepLimit, "other owners", func(l *ledger, _ map[string]*pb.StatusResponse) bool {
		for _, c := range l.owners {
			if c.by == region {
				return false
			}
		}
		return true
	})
	if err != nil {
		return err
	}
	return r.restore(ctx, region)
}

func (c *cut) play(ctx context.Context) error {
	r := c.r
	lasts := 3*r.o.D + cutMargin
	c.began = r.clock.Now()
	for i, s := range c.sides {
		if err := c.each(s.region, func(p clusterfile.Process) error {
			return r.admin.SetFaults(ctx, p, &pb.SetFaultsRequest{Faults: []*pb.Fault{{
				Id: faultID, Peer: "region/" + c.sides[1-i].region, Drop: true, ExpiresMs: (lasts + cutSpare).Milliseconds(),
			}}})
		}); err != nil {
			return fmt.Errorf("cut: %w", err)
		}
	}
	c.complete = r.clock.Now()
	r.o.progress("%s and %s are cut from each other for %v; both see the witnesses", c.sides[0].region, c.sides[1].region, lasts)
	// The cut lasts so long whatever the detectors say.
	over, cancel := context.WithTimeout(ctx, lasts)
	defer cancel()
	err := r.watch.await(over, lasts, "the cut", func(_ *ledger, latest map[string]*pb.StatusResponse) bool {
		now, all := r.clock.Now(), true
		for i := range c.sides {
			s := &c.sides[i]
			if p := peer(latest[s.region], c.sides[1-i].region); s.crashed == 0 && p.GetVerdict() == pb.Verdict_VERDICT_CRASHED {
				s.crashed = now
			}
			all = all && s.crashed != 0
		}
		return all
	})
	if err == nil {
		r.o.progress("each has given the other up")
		<-over.Done()
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	// A cut that has no effect leaves the silence short.
	look := r.admin.Look(ctx)
	for i := range c.sides {
		s := &c.sides[i]
		for _, v := range look.Regions {
			if v.Name == s.region {
				s.silent = time.Duration(peer(v.Status, c.sides[1-i].region).GetSilentNs())
			}
		}
	}
	return c.heal(ctx)
}

// heal mends the cable and gives the cluster time to do something wrong.
func (c *cut) heal(ctx context.Context) error {
	r := c.r
	c.healing = r.clock.Now()
	for _, s := range c.sides {
		if err := c.each(s.region, func(p clusterfile.Process) error { return r.admin.ClearFaults(ctx, p) }); err != nil {
			return fmt.Errorf("heal: %w", err)
		}
	}
	err := r.watch.await(ctx, stepLimit, "both regions in sight of each other again", func(_ *ledger, latest map[string]*pb.StatusResponse) bool {
		for i, s := range c.sides {
			if !alive(peer(latest[s.region], c.sides[1-i].region).GetVerdict()) {
				return false
			}
		}
		return true
	})
	if err != nil {
		return err
	}
	c.healed = r.clock.Now()
	r.o.progress("healed: they see each other again after %s", report.Millis(c.healed.Sub(c.healing)))
	return sleep(ctx, r.o.D+cutMargin)
}

func (c *cut) each(region string, do func(clusterfile.Process) error) error {
	var errs []error
	for _, p := range c.r.cluster.File().RegionProcesses(region) {
		errs = append(errs, do(p))
	}
	return errors.Join(errs...)
}

func peer(st *pb.StatusResponse, region string) *pb.PeerReport {
	for _, p := range st.GetPeers() {
		if p.GetRegion() == region {
			return p
		}
	}
	return nil
}

func (c *cut) finish(ctx context.Context) error {
	var err error
	if c.journal, err = resource.NewClient(c.resource.Address, "drill").Journal(ctx); err != nil {
		return err
	}
	for _, p := range []*workerProcess{c.sides[0].worker, c.sides[1].worker} {
		_ = p.Signal(syscall.SIGTERM) // one that has ended is found below
		limited, cancel := context.WithTimeout(ctx, serveLimit)
		err = errors.Join(err, p.Wait(limited))
		cancel()
	}
	return err
}

func (c *cut) judge() report.CableCut {
	records := c.r.watch.records()
	changes := records.changes(c.began)
	result := report.CableCut{DMS: c.r.o.D.Milliseconds(), CutMS: c.healing.Sub(c.complete).Milliseconds(), Promotions: len(changes)}
	result.Violations = append(changes, judge(headLeases, records.claims)...)
	for _, l := range records.lapses {
		if l.at > c.began {
			result.Lapses++
			result.Violations = append(result.Violations, fmt.Sprintf("%s says that it holds partition %s no more, %s after the cut", l.region, l.partition, report.Millis(l.at.Sub(c.began))))
		}
	}
	result.Violations = append(result.Violations, resource.Violations(c.journal)...)
	var beliefs []claim
	for _, s := range c.sides {
		writes, wrong := work(s.worker.spec.name, s.worker.all(), c.complete, c.healing)
		result.WritesAccepted += writes
		result.Violations = append(result.Violations, wrong...)
		beliefs = append(beliefs, s.worker.beliefs()...)
		if heard := c.healing.Sub(c.complete) - s.silent; heard > cutSlack {
			result.Inconclusive = fmt.Sprintf("the cut did not work: at its end %s had heard the other region %s before", s.region, report.Millis(s.silent))
		}
	}
	result.Violations = append(result.Violations, judge(locks, beliefs)...)
	return report.JudgeCableCut(result)
}

// work checks one worker's events: it may acquire once and then only write, in
// the cut and after it. It returns the writes accepted in the cut.
func work(name string, events []worker.Event, from, to instant.Instant) (writes int, wrong []string) {
	grants, after := 0, 0
	for _, e := range events {
		switch e.Kind {
		case worker.Written:
			if e.At >= from && e.At < to {
				writes++
			}
			if e.At >= to {
				after++
			}
		case worker.Acquired:
			grants++
		case worker.Refused, worker.Failed, worker.Lost:
			wrong = append(wrong, fmt.Sprintf("the %s, whose lease nobody took: %s: %s", name, e.Kind, e.Reason))
		case worker.Waiting, worker.Claimed, worker.Freezing, worker.Resumed:
		}
	}
	if grants != 1 || writes == 0 || after == 0 {
		wrong = append(wrong, fmt.Sprintf("the %s had %d grants, %d writes accepted in the cut and %d after it; one grant and writes throughout were expected",
			name, grants, writes, after))
	}
	return writes, wrong
}

// timeline tells the cut.
func (c *cut) timeline() report.Timeline {
	t := report.Timeline{Title: "cable-cut", Zero: c.began}
	end := c.r.clock.Now()
	for i, s := range c.sides {
		other := c.sides[1-i].region
		first := s.worker.all()[0].At
		t.Enter(first, s.region, report.Holds)
		t.Enter(first, s.worker.spec.name, report.Holds)
		if s.crashed != 0 {
			t.Add(s.crashed, s.region, "holds %s for crashed; the witnesses go on answering, so nothing follows", other)
		}
	}
	for _, s := range c.sides {
		acquired := slices.IndexFunc(s.worker.all(), func(e worker.Event) bool { return e.Kind == worker.Acquired })
		if e := s.worker.all()[max(acquired, 0)]; acquired >= 0 {
			t.Add(e.At, s.worker.spec.name, "acquired its lock with token %s, and writes all the time", e.Token)
		}
	}
	t.Add(c.began, "cable", "%s and %s are cut: all planes, both directions", c.sides[0].region, c.sides[1].region)
	t.Add(c.healing, "cable", "mended")
	t.Add(c.healed, "cable", "both regions see each other again")
	t.Add(end, "cable", "end of the watch")
	return t
}
