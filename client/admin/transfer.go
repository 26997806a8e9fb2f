package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// DefaultDrain is how long holders may go on after they are told of a
	// transfer.
	DefaultDrain = 10 * time.Second
	// transferPoll is how often a transfer is looked at, and transferFine while
	// nobody owns the partition.
	transferPoll = 200 * time.Millisecond
	transferFine = 20 * time.Millisecond
	// abortTimeout bounds an abort after the caller has given up.
	abortTimeout = 5 * time.Second
)

// Transfer moves a partition to another region.
type Transfer struct {
	Partition, To string
	// Drain is how long holders may go on; it may be zero.
	Drain time.Duration
	// Progress is told how far it is, often; nil: nobody.
	Progress func(TransferProgress)
}

// TransferProgress is how far a transfer is.
type TransferProgress struct {
	Partition, From, To string
	// Stage is a word for the present step.
	Stage string
	// Leases and LockDelays are left in the drain, which lasts Left more.
	Leases, LockDelays uint64
	Left               time.Duration
}

// Transferred is the end of a transfer.
type Transferred struct {
	Partition, From, To string
	// Epoch is the new owner's.
	Epoch uint32
	// Already: To owned the partition before.
	Already bool
	// Unowned is the longest time that the partition may have been without an
	// owner after its drain, as the polls saw it.
	Unowned time.Duration
}

// ErrAborted: the transfer was aborted, and the partition is active where it was.
var ErrAborted = errors.New("transfer aborted")

// Holder finds the region that holds a partition's head lease, and its status.
func (c *Cluster) Holder(ctx context.Context, partition string) (region string, p *pb.PartitionStatus, err error) {
	type found struct {
		p   *pb.PartitionStatus
		err error
	}
	all := make([]found, len(c.file.Regions))
	var wg sync.WaitGroup
	for i, r := range c.file.Regions {
		wg.Go(func() { all[i].p, all[i].err = c.partitionAt(ctx, r.Name, partition) })
	}
	wg.Wait()
	var errs []error
	for i, f := range all {
		errs = append(errs, f.err)
		if f.p.GetHeldNs() > 0 && f.p.GetEpoch() > p.GetEpoch() {
			region, p = c.file.Regions[i].Name, f.p
		}
	}
	if p != nil {
		return region, p, nil
	}
	return "", nil, errors.Join(append([]error{fmt.Errorf("partition %s has no owner now; see 'headlease status'", partition)}, errs...)...)
}

// partitionAt asks a region's leader about a partition.
func (c *Cluster) partitionAt(ctx context.Context, region, partition string) (*pb.PartitionStatus, error) {
	var out *pb.PartitionStatus
	err := c.anyServer(ctx, region, func(ctx context.Context, conn *grpc.ClientConn) error {
		res, err := pb.NewClusterServiceClient(conn).ListPartitions(ctx, &pb.ListPartitionsRequest{})
		for _, p := range res.GetPartitions() {
			if p.GetName() == partition {
				out = p
			}
		}
		return err
	})
	if err == nil && out == nil {
		return nil, fmt.Errorf("region %s knows no partition %q", region, partition)
	}
	return out, err
}

// anyServer asks a region's servers in turn until one answers or refuses.
func (c *Cluster) anyServer(ctx context.Context, region string, call func(context.Context, *grpc.ClientConn) error) error {
	servers := c.file.RegionProcesses(region)
	if len(servers) == 0 {
		return fmt.Errorf("%q is not a region of the cluster file", region)
	}
	var errs []error
	for _, p := range servers {
		err := c.ask(ctx, link.PlaneAPI, p, askTimeout, call)
		if err == nil || errors.As(err, new(*Refused)) {
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Transfer moves a partition and follows it to its end. The regions do it by
// themselves; when ctx ends first, it is aborted, unless it is too late for
// that.
func (c *Cluster) Transfer(ctx context.Context, t Transfer) (*Transferred, error) {
	if t.Progress == nil {
		t.Progress = func(TransferProgress) {}
	}
	if len(c.file.RegionProcesses(t.To)) == 0 {
		return nil, fmt.Errorf("--to %q is not a region of the cluster file", t.To)
	}
	from, p, err := c.Holder(ctx, t.Partition)
	if err != nil {
		return nil, err
	}
	out := &Transferred{Partition: t.Partition, From: from, To: t.To, Epoch: p.GetEpoch()}
	if from == t.To {
		out.Already = true
		return out, nil
	}
	if err := c.ready(ctx, t.To, t.Partition); err != nil {
		return nil, err
	}
	err = c.anyServer(ctx, from, func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := pb.NewPartitionServiceClient(conn).TransferPartition(ctx, &pb.TransferPartitionRequest{
			Partition: t.Partition, Successor: t.To, DrainMs: t.Drain.Milliseconds(),
		})
		return err
	})
	if err != nil && ctx.Err() == nil {
		return nil, err
	}
	return c.follow(ctx, t, out, p.GetEpoch())
}

// ready checks that a region can take a partition: its leader answers, and it
// hears enough voters.
func (c *Cluster) ready(ctx context.Context, region, partition string) error {
	st, err := c.RegionStatus(ctx, region)
	if err != nil {
		return fmt.Errorf("region %s cannot take partition %s: %w", region, partition, err)
	}
	witnesses, all, lost, mute := 0, len(st.GetConfiguration().GetVoters()), 0, 0
	silent := func(voter string) bool {
		return slices.ContainsFunc(st.GetVoterProblems(), func(p *pb.VoterProblem) bool { return p.GetVoter() == voter })
	}
	for _, v := range st.GetConfiguration().GetVoters() {
		if config.IsWitness(v.GetId()) {
			witnesses++
			if silent(v.GetId()) {
				lost++
			}
		}
		if silent(v.GetId()) {
			mute++
		}
	}
	if 2*mute >= all || witnesses > 0 && 2*lost >= witnesses {
		return fmt.Errorf("region %s cannot take partition %s: %d of %d voters do not answer it; see 'headlease status'", region, partition, mute, all)
	}
	return nil
}

// follow polls both regions until the new one holds the partition.
func (c *Cluster) follow(ctx context.Context, t Transfer, out *Transferred, epoch uint32) (*Transferred, error) {
	var lost time.Time // the last poll at which the old owner held it, or it was not drained
	seen := time.Now()
	step := TransferProgress{Partition: t.Partition, From: out.From, To: t.To, Stage: "begins"}
	for {
		pause := transferPoll
		now := time.Now()
		old, oldErr := c.partitionAt(ctx, out.From, t.Partition)
		next, nextErr := c.partitionAt(ctx, t.To, t.Partition)
		if ctx.Err() != nil {
			return c.giveUp(ctx, t, out, epoch)
		}
		switch tr := old.GetTransfer(); {
		case next.GetHeldNs() > 0 && next.GetEpoch() > epoch:
			out.Epoch = next.GetEpoch()
			if !lost.IsZero() {
				out.Unowned = time.Since(lost)
			}
			return out, nil
		case oldErr != nil && nextErr != nil:
			step.Stage = "neither region answers"
		case tr != nil && tr.GetSuccessor() != t.To:
			return nil, fmt.Errorf("partition %s is being transferred to region %s by somebody else", t.Partition, tr.GetSuccessor())
		case tr.GetStage() == pb.TransferStage_TRANSFER_STAGE_DRAINING:
			step.Stage, step.Leases, step.LockDelays, step.Left = "draining", tr.GetLeases(), tr.GetLockDelays(), time.Duration(tr.GetLeftNs())
			if left := step.Left; left > 0 && left < transferPoll {
				pause = transferFine
			}
			lost = now
		case tr.GetStage() == pb.TransferStage_TRANSFER_STAGE_DRAINED && old.GetHeldNs() > 0:
			step.Stage, pause = "drained, waiting to release", transferFine
			step.Leases, step.LockDelays, step.Left = 0, 0, 0
			if lost.IsZero() {
				lost = now
			}
		case old.GetHeldNs() > 0 && old.GetEpoch() == epoch && tr == nil && now.Sub(seen) > transferPoll:
			return nil, fmt.Errorf("%w: partition %s is active in region %s, at epoch %d", ErrAborted, t.Partition, out.From, epoch)
		case old.GetHeldNs() > 0 && old.GetEpoch() > epoch:
			return nil, fmt.Errorf("region %s has not taken partition %s; it is with region %s again, at epoch %d", t.To, t.Partition, out.From, old.GetEpoch())
		default:
			step.Stage, pause = "released, waiting for "+t.To, transferFine
			step.Leases, step.LockDelays, step.Left = 0, 0, 0
		}
		t.Progress(step)
		select {
		case <-ctx.Done():
			return c.giveUp(ctx, t, out, epoch)
		case <-time.After(pause):
		}
	}
}

// giveUp aborts a transfer whose caller has gone.
func (c *Cluster) giveUp(ctx context.Context, t Transfer, out *Transferred, epoch uint32) (*Transferred, error) {
	cause := context.Cause(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
	defer cancel()
	if _, err := c.abortAt(ctx, out.From, t.Partition); err != nil {
		return nil, fmt.Errorf("partition %s: %w, and the transfer could not be aborted: %w; it may still come to its end, see 'headlease status'", t.Partition, cause, err)
	}
	return nil, fmt.Errorf("%w (%w): partition %s is active in region %s, at epoch %d", ErrAborted, cause, t.Partition, out.From, epoch)
}

// AbortTransfer returns a partition that is being transferred to active where it
// is. The epoch is the one it goes on with.
func (c *Cluster) AbortTransfer(ctx context.Context, partition string) (region string, res *pb.AbortTransferResponse, err error) {
	region, _, err = c.Holder(ctx, partition)
	if err != nil {
		return "", nil, err
	}
	res, err = c.abortAt(ctx, region, partition)
	return region, res, err
}

func (c *Cluster) abortAt(ctx context.Context, region, partition string) (res *pb.AbortTransferResponse, err error) {
	err = c.anyServer(ctx, region, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		res, err = pb.NewPartitionServiceClient(conn).AbortTransfer(ctx, &pb.AbortTransferRequest{Partition: partition})
		return err
	})
	return res, err
}

// Drain moves everything that a region owns to other regions, each partition to
// the first in its list of preferences that can take it, all at once.
func (c *Cluster) Drain(ctx context.Context, region string, drain time.Duration, progress func(TransferProgress)) ([]Transferred, error) {
	st, err := c.RegionStatus(ctx, region)
	if err != nil {
		return nil, err
	}
	type move struct {
		done *Transferred
		err  error
	}
	var owned []*pb.PartitionStatus
	for _, p := range st.GetPartitions() {
		if p.GetEpoch() != 0 && p.GetHeldNs() > 0 {
			owned = append(owned, p)
		}
	}
	moves := make([]move, len(owned))
	turns := make(chan struct{}, maxTransfers)
	var wg sync.WaitGroup
	for i, p := range owned {
		wg.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			to, err := c.takerOf(ctx, region, p)
			if err != nil {
				moves[i].err = err
				return
			}
			moves[i].done, moves[i].err = c.Transfer(ctx, Transfer{Partition: p.GetName(), To: to, Drain: drain, Progress: progress})
		})
	}
	wg.Wait()
	var done []Transferred
	var errs []error
	for _, m := range moves {
		if m.done != nil {
			done = append(done, *m.done)
		}
		errs = append(errs, m.err)
	}
	return done, errors.Join(errs...)
}

// maxTransfers bounds the transfers of one Drain that run at once.
const maxTransfers = 32

// takerOf is the first preferred region, other than the given one, that can take
// a partition.
func (c *Cluster) takerOf(ctx context.Context, region string, p *pb.PartitionStatus) (string, error) {
	var errs []error
	for _, to := range p.GetPrefer() {
		if to == region {
			continue
		}
		err := c.ready(ctx, to, p.GetName())
		if err == nil {
			return to, nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return "", fmt.Errorf("partition %s prefers region %s alone; add another one to its list with 'headlease config apply'", p.GetName(), region)
	}
	return "", fmt.Errorf("no region can take partition %s: %w", p.GetName(), errors.Join(errs...))
}

// Owned lists the partitions that a region's data has a live epoch of, or whose
// head lease it holds.
func (c *Cluster) Owned(ctx context.Context, region string) ([]string, error) {
	st, err := c.RegionStatus(ctx, region)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, p := range st.GetPartitions() {
		if p.GetEpoch() != 0 || p.GetHeldNs() > 0 {
			names = append(names, p.GetName())
		}
	}
	return names, nil
}
