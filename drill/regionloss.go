package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/headlease/headlease/drill/report"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/drill/worker"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	oldWorker = "old worker"
	newWorker = "new worker"

	// stepLimit bounds each step that has no bound of its own.
	stepLimit = 30 * time.Second
	// settle is how long the new worker works before the old one wakes up.
	settle = 300 * time.Millisecond
)

// regionLoss plays the loss twice: with the resource's guard on, then, with the
// lost region back and the one that took over lost in its turn, with it off.
func regionLoss(ctx context.Context, r *rig) (Outcome, error) {
	partition := r.cluster.File().Partitions[0].Name
	guarded, err := r.lose(ctx, partition, true)
	if err != nil {
		return Outcome{}, err
	}
	if err := r.restore(ctx, guarded.lost); err != nil {
		return Outcome{}, err
	}
	control, err := r.lose(ctx, partition, false)
	if err != nil {
		return Outcome{}, err
	}
	guarded.Violations = append(guarded.Violations, judge(headLeases, r.watch.records().claims)...)
	result := report.JudgeRegionLoss(guarded.RegionLossRun, control.RegionLossRun)
	return Outcome{Result: result, OK: result.OK}, nil
}

// loss is one loss of a region as it is played.
type loss struct {
	report.RegionLossRun
	r         *rig
	partition string
	lost      string
	lostEpoch uint64
	promoted  claim
	resource  *resource.Process
	old, new  *workerProcess
	frozen    worker.Event
	resumed   instant.Instant
	journal   []resource.Entry
	late      resource.Entry
}

// lose loses the partition's owner with a worker frozen in it.
func (r *rig) lose(ctx context.Context, partition string, guard bool) (*loss, error) {
	word := map[bool]string{true: "on", false: "off"}[guard]
	l := &loss{r: r, partition: partition, RegionLossRun: report.RegionLossRun{D: r.o.D}}
	if err := l.prepare(ctx, word); err != nil {
		return nil, err
	}
	err := l.play(ctx)
	if errors.Is(err, errNotSeen) && ctx.Err() == nil {
		l.Violations, err = append(l.Violations, err.Error()), nil
	}
	if err != nil {
		return nil, err
	}
	if err := l.finish(ctx, guard); err != nil {
		return nil, err
	}
	return l, r.o.show(l.timeline("region-loss, guard " + word))
}

// prepare starts a resource and two workers: one that holds the lock and
// writes, and one in the next region that would like to.
func (l *loss) prepare(ctx context.Context, guard string) error {
	r := l.r
	owner, ok := r.watch.owner(l.partition)
	if !ok {
		return fmt.Errorf("partition %s has no owner", l.partition)
	}
	l.lost, l.lostEpoch = owner.by, owner.number
	r.o.progress("guard %s: partition %s is held by %s with epoch %d", guard, l.partition, owner.by, owner.number)
	lock, err := r.lockIn(l.partition)
	if err != nil {
		return err
	}
	if l.resource, err = r.startResource(ctx, "resource-guard-"+guard, guard == "off"); err != nil {
		return err
	}
	p, _ := r.cluster.File().Partition(l.partition)
	next := p.Prefer[0]
	if next == l.lost {
		next = p.Prefer[1]
	}
	if l.old, err = r.startWorker(workerSpec{oldWorker, l.lost, lock, l.resource.Address}); err != nil {
		return err
	}
	if _, err := l.old.await(ctx, stepLimit, worker.Written); err != nil {
		return err
	}
	if l.new, err = r.startWorker(workerSpec{newWorker, next, lock, l.resource.Address}); err != nil {
		return err
	}
	_, err = l.new.await(ctx, stepLimit, worker.Waiting)
	return err
}

// play is the loss itself.
func (l *loss) play(ctx context.Context) error {
	r := l.r
	// A moment at random between two renewals.
	if err := sleep(ctx, time.Duration(r.rand.Int64N(int64(r.o.D/5)))); err != nil {
		return err
	}
	if err := l.old.Signal(syscall.SIGUSR1); err != nil {
		return err
	}
	var err error
	if l.frozen, err = l.old.await(ctx, stepLimit, worker.Freezing); err != nil {
		return err
	}
	l.OldToken = l.frozen.Token
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	if err := l.old.WaitStopped(limited); err != nil {
		return err
	}
	servers := r.cluster.File().RegionProcesses(l.lost)
	r.rand.Shuffle(len(servers), func(i, j int) { servers[i], servers[j] = servers[j], servers[i] })
	r.o.progress("the old worker has stopped itself between lease.Valid() and its send; killing %s", l.lost)
	l.Killed = r.clock.Now()
	for _, p := range servers {
		if err := r.cluster.Signal(p.Name, syscall.SIGKILL); err != nil {
			return err
		}
	}
	if err := l.awaitPromotion(ctx); err != nil {
		return err
	}
	written, err := l.new.await(ctx, stepLimit, worker.Written)
	if err != nil {
		return err
	}
	l.Written, l.NewToken = written.At, written.Token
	r.o.progress("failover in %s: the new worker writes with token %s; waking the old one", report.Millis(l.Written.Sub(l.Killed)), l.NewToken)
	if err := sleep(ctx, settle); err != nil {
		return err
	}
	if err := l.old.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	resumed, err := l.old.await(ctx, stepLimit, worker.Resumed)
	if err != nil {
		return err
	}
	l.resumed = resumed.At
	return l.old.Wait(limited)
}

func (l *loss) awaitPromotion(ctx context.Context) error {
	limit := report.MostPromotion(l.r.o.D, time.Second) + stepLimit
	err := l.r.watch.await(ctx, limit, "promotion of another region to "+l.partition, func(led *ledger, _ map[string]*pb.StatusResponse) bool {
		for _, c := range led.claims {
			if c.of == l.partition && c.by != l.lost && c.number > l.lostEpoch {
				l.promoted = c
				return true
			}
		}
		return false
	})
	if err != nil {
		return err
	}
	l.Promoted = l.promoted.from
	l.RTT = needed(l.r.cluster.File(), l.r.o.RTT, l.promoted.by, l.lost)
	l.r.o.progress("%s was promoted after %s, with epoch %d", l.promoted.by, report.Millis(l.Promoted.Sub(l.Killed)), l.promoted.number)
	return nil
}

// finish reads the journal, ends what was started, and checks what the journal
// and the workers say.
func (l *loss) finish(ctx context.Context, guard bool) error {
	var err error
	if l.journal, err = resource.NewClient(l.resource.Address, "drill").Journal(ctx); err != nil {
		return err
	}
	for _, c := range []*devcluster.Child{l.new.Child, l.old.Child, l.resource.Child} {
		// It has ended already if it could not be signalled.
		_ = c.Signal(syscall.SIGTERM)
		_ = c.Signal(syscall.SIGCONT)
		limited, cancel := context.WithTimeout(ctx, serveLimit)
		err = errors.Join(err, c.Wait(limited))
		cancel()
	}
	l.check(guard)
	return err
}

// check adds what is wrong to the violations.
func (l *loss) check(guard bool) {
	violated := func(format string, args ...any) { l.Violations = append(l.Violations, fmt.Sprintf(format, args...)) }
	for _, e := range l.journal {
		if e.Op == resource.OpWrite && e.Writer == oldWorker && l.frozen.Value != "" && e.Value == l.frozen.Value {
			l.late = e
			l.LateRefused, l.LateAccepted = e.Outcome == resource.Stale, e.Outcome == resource.Accepted
		}
	}
	broken := resource.Violations(l.journal)
	if guard {
		l.Violations = append(l.Violations, broken...)
	} else if l.LateAccepted && len(broken) == 0 {
		// The write was accepted, but not after one with a higher token.
		l.LateAccepted = false
	}
	l.Violations = append(l.Violations, judge(locks, append(l.old.beliefs(), l.new.beliefs()...))...)
	if l.NewToken != 0 && uint64(l.NewToken.Epoch()) < l.promoted.number {
		violated("I2: token %s was granted after epoch %d was, and is of epoch %d", l.NewToken, l.promoted.number, l.NewToken.Epoch())
	}
	for _, e := range l.new.all() {
		switch e.Kind {
		case worker.Refused, worker.Failed, worker.Lost:
			violated("the new worker, whose lease nobody took: %s: %s", e.Kind, e.Reason)
		}
	}
}

// restore starts the lost region's processes on their old data and waits until
// it is a voter like the others again.
func (r *rig) restore(ctx context.Context, lost string) error {
	began := time.Now()
	for _, p := range r.cluster.File().RegionProcesses(lost) {
		limited, cancel := context.WithTimeout(ctx, serveLimit)
		err := r.cluster.Wait(limited, p.Name)
		cancel()
		if err == nil {
			err = r.cluster.StartProcess(p.Name)
		}
		if err != nil {
			return err
		}
	}
	r.o.progress("starting %s again, on its old data", lost)
	err := r.settled(ctx)
	if err == nil {
		r.o.progress("it is back after %.1f s", time.Since(began).Seconds())
	}
	return err
}

func alive(v pb.Verdict) bool { return v == pb.Verdict_VERDICT_HEALTHY || v == pb.Verdict_VERDICT_SLOW }

// needed is the longest round trip from a region to a voter that its majority
// needs while another region is lost: the fastest majority of all voters, and
// the fastest majority of the witnesses.
func needed(f clusterfile.File, m devcluster.Matrix, from, lost string) time.Duration {
	var all, witnesses []time.Duration
	for _, region := range f.RegionNames() {
		if region != lost {
			all = append(all, m.RTT(from, region)) // the own vote at no distance
		}
	}
	for _, w := range f.Witnesses {
		all = append(all, m.RTT(from, w.Name))
		witnesses = append(witnesses, m.RTT(from, w.Name))
	}
	slices.Sort(all)
	slices.Sort(witnesses)
	most := all[min(len(all)-1, (len(f.Regions)+len(f.Witnesses))/2)]
	if n := len(witnesses); n > 0 {
		most = max(most, witnesses[n/2])
	}
	return most
}

// timeline tells the loss.
func (l *loss) timeline(title string) report.Timeline {
	t := report.Timeline{Title: title, Zero: l.Killed}
	old, standby := l.old.all(), l.new.all()
	t.Enter(old[0].At, l.lost, report.Holds)
	if l.promoted.by != "" {
		t.Enter(old[0].At, l.promoted.by, report.Waits)
	}
	var names []string
	for _, p := range l.r.cluster.File().RegionProcesses(l.lost) {
		names = append(names, p.Name)
	}
	t.Enter(l.Killed, l.lost, report.Dead)
	t.Add(l.Killed, l.lost, "SIGKILL to %s", strings.Join(names, ", "))
	if l.Promoted != 0 {
		t.Enter(l.Promoted, l.promoted.by, report.Holds)
		t.Add(l.Promoted, l.promoted.by, "promoted: holds partition %s with epoch %d", l.partition, l.promoted.number)
	}
	narrate(&t, oldWorker, old)
	narrate(&t, newWorker, standby)
	if l.late.N != 0 {
		what := "ACCEPTED the late write: nothing looked at its token"
		if l.late.Outcome == resource.Stale {
			what = fmt.Sprintf("REFUSED the late write: token %s is below %s", l.late.Token, l.late.Mark)
		}
		t.Add(lateAt(old, l.resumed), "resource", "%s (journal entry %d)", what, l.late.N)
	}
	return t
}

// lateAt is when the worker had the answer to its late write.
func lateAt(events []worker.Event, resumed instant.Instant) instant.Instant {
	for _, e := range slices.Backward(events) {
		if e.At > resumed && (e.Kind == worker.Refused || e.Kind == worker.Written) {
			return e.At
		}
	}
	return resumed
}

// narrate adds what a worker reported; of its writes the first.
func narrate(t *report.Timeline, actor string, events []worker.Event) {
	wrote := map[fence.Token]bool{}
	frozen := false
	for _, e := range events {
		switch e.Kind {
		case worker.Waiting:
			t.Enter(e.At, actor, report.Waits)
			t.Add(e.At, actor, "would like the lock too, and asks again and again")
		case worker.Acquired:
			t.Enter(e.At, actor, report.Holds)
			t.Add(e.At, actor, "acquired the lock in %s with token %s", e.Region, e.Token)
		case worker.Written:
			if !wrote[e.Token] {
				t.Add(e.At, actor, "has claimed the resource, and its first write is accepted")
			}
			wrote[e.Token] = true
		case worker.Freezing:
			frozen = true
			t.Enter(e.At, actor, report.Frozen)
			t.Add(e.At, actor, "lease.Valid() says yes; SIGSTOP before the send")
		case worker.Resumed:
			t.Enter(e.At, actor, report.Waits)
			t.Add(e.At, actor, "SIGCONT: knows nothing of it all, and its write goes out")
		case worker.Lost, worker.Failed:
			t.Enter(e.At, actor, report.Waits)
			t.Add(e.At, actor, "%s: %s", e.Kind, e.Reason)
		case worker.Refused:
			switch {
			case !frozen:
				t.Add(e.At, actor, "%s: %s", e.Kind, e.Reason)
			case e.Until == 0:
				t.Add(e.At, actor, "is told so, and lease.Valid() says no by now")
			}
		case worker.Claimed:
		}
	}
}
