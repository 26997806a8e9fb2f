package api

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// MaxDrain is the longest time that a transfer gives to holders.
const MaxDrain = 10 * time.Minute

// Partitions is the PartitionService on the leader.
type Partitions struct {
	pb.UnimplementedPartitionServiceServer
	Region string
	Raft   Raft
	// Leases says who else owns a partition.
	Leases   *Leases
	Heads    Heads
	Releases Releases
	// Verdict is the own detector's on a region: a hint.
	Verdict  func(region string) register.Verdict
	Identify func(context.Context) (policy.Caller, bool)
	Logger   *slog.Logger
}

// Heads is what the lessor's shell does for a transfer.
type Heads interface {
	Hold(partition string) (epoch fence.Epoch, until instant.Instant, ok bool)
	Grace(partition string, grace time.Duration)
}

// Releases is what the campaign's shell does for an abort.
type Releases interface {
	KeepOn(partition string) (forget func(), ok bool)
}

// partition finds a partition of the configuration and its state.
func (s *Partitions) partition(view state.View, name string) (*pb.PartitionSpec, state.Partition, error) {
	specs := view.Configuration().GetPartitions()
	i := slices.IndexFunc(specs, func(p *pb.PartitionSpec) bool { return p.GetName() == name })
	if i < 0 {
		return nil, state.Partition{}, invalid("partition", "%q is not a partition of the configuration; 'headlease status' lists them", name)
	}
	p, _ := view.Partition(name)
	return specs[i], p, nil
}

// TransferPartition commits the drain. The lessor revokes what is held, and the
// campaign releases the partition when nothing is.
func (s *Partitions) TransferPartition(ctx context.Context, req *pb.TransferPartitionRequest) (*pb.TransferPartitionResponse, error) {
	view := s.Raft.View()
	spec, p, err := s.partition(view, req.GetPartition())
	if err != nil {
		return nil, err
	}
	to, grace := req.GetSuccessor(), time.Duration(req.GetDrainMs())*time.Millisecond
	switch {
	case to == "":
		return nil, invalid("successor", "is missing; name one of %v", spec.GetPrefer())
	case !slices.Contains(spec.GetPrefer(), to):
		return nil, invalid("successor", "%q is not among the regions that may own partition %s; choose one of %v, or change them with 'headlease config apply'", to, p.Name, spec.GetPrefer())
	case config.VoterIncarnation(view.Configuration(), config.RegionVoter(to)) == 0:
		return nil, invalid("successor", "%q is no member of the cluster; add it first with 'headlease region add'", to)
	case req.GetDrainMs() < 0 || grace > MaxDrain:
		return nil, invalid("drain_ms", "%d is out of range; choose 0 to %d", req.GetDrainMs(), MaxDrain.Milliseconds())
	case p.Draining() && p.Successor == to:
		return &pb.TransferPartitionResponse{Epoch: uint32(p.Epoch), Already: true}, nil
	case p.Draining():
		return nil, refused("partition %s is being transferred to region %s; abort that first", p.Name, p.Successor)
	}
	epoch, _, holds := s.Heads.Hold(p.Name)
	switch {
	case !holds:
		return nil, s.Leases.notHeld(view, p.Name)
	case to == s.Region:
		return nil, refused("region %s owns partition %s already (epoch %d)", to, p.Name, epoch)
	case !s.Verdict(to).Alive():
		return nil, refused("region %s does not hear region %s (%v); a transfer there could leave partition %s without an owner", s.Region, to, s.Verdict(to), p.Name)
	}
	term, err := s.Raft.Check(ctx)
	if err != nil {
		return nil, resultError(nil, err)
	}
	s.Heads.Grace(p.Name, grace)
	res, err := s.Raft.Propose(ctx, &pb.Command{Term: term, Kind: &pb.Command_StartDrain{StartDrain: &pb.StartDrainCommand{
		Partition: p.Name, Epoch: uint32(epoch), Successor: to, By: s.caller(ctx),
	}}})
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	s.Logger.Info("transfer begins", "partition", p.Name, "epoch", epoch, "successor", to, "drain", grace, "by", s.caller(ctx))
	return &pb.TransferPartitionResponse{Epoch: uint32(epoch)}, nil
}

// AbortTransfer returns a draining partition to active.
func (s *Partitions) AbortTransfer(ctx context.Context, req *pb.AbortTransferRequest) (*pb.AbortTransferResponse, error) {
	view := s.Raft.View()
	_, p, err := s.partition(view, req.GetPartition())
	switch {
	case err != nil:
		return nil, err
	case !p.Live():
		return nil, s.Leases.notHeld(view, p.Name)
	case !p.Draining():
		return &pb.AbortTransferResponse{Epoch: uint32(p.Epoch), Already: true}, nil
	}
	term, err := s.Raft.Check(ctx)
	if err != nil {
		return nil, resultError(nil, err)
	}
	forget, ok := s.Releases.KeepOn(p.Name)
	if !ok {
		return nil, refused("partition %s is being released to region %s already; transfer it back from there", p.Name, p.Successor)
	}
	res, err := s.Raft.Propose(ctx, &pb.Command{Term: term, Kind: &pb.Command_AbortDrain{AbortDrain: &pb.AbortDrainCommand{
		Partition: p.Name, Epoch: uint32(p.Epoch), By: s.caller(ctx),
	}}})
	if err == nil && res.GetError() != nil {
		forget() // it will not take effect; with an unknown outcome it may
	}
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	s.Logger.Info("transfer aborted", "partition", p.Name, "epoch", p.Epoch, "successor", p.Successor, "by", s.caller(ctx))
	return &pb.AbortTransferResponse{Epoch: uint32(p.Epoch)}, nil
}

func (s *Partitions) caller(ctx context.Context) string {
	c, _ := s.Identify(ctx)
	return c.Name
}
