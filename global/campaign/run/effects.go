package run

import (
	"context"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// step feeds one input to the leader it belongs to, and to no other: each
// counts its rounds from 1, so an answer to a round of the one before would
// count for a round of the same number that began after it. s.mu is held.
func (s *Shell) step(leader *campaign.Leader, input func(l *campaign.Leader, now instant.Instant) []campaign.Effect) {
	if s.leader != leader {
		return
	}
	now := s.cfg.Clock.Now()
	s.look(now)
	s.perform(input(s.leader, now))
	s.kick() // Next may have come nearer
}

// perform carries out effects in their order. s.mu is held.
func (s *Shell) perform(effects []campaign.Effect) {
	for _, e := range effects {
		switch e := e.(type) {
		case campaign.SendPrepare:
			req := &pb.PrepareRequest{Header: s.header(e.Voter, e.Round), Ballot: e.Ballot.Proto(), Dry: e.Dry, Partitions: e.Partitions}
			s.send(e.Voter, e.Round, func(ctx context.Context, v Voter) (answered, error) {
				res, err := v.Prepare(ctx, req)
				return prepareAnswer(res), err
			})
		case campaign.SendAccept:
			req := &pb.AcceptRequest{Header: s.header(e.Voter, e.Round)}
			for _, it := range e.Items {
				req.Items = append(req.Items, &pb.AcceptItem{Partition: it.Partition, Ballot: it.Ballot.Proto(), Value: it.Value.Proto()})
			}
			s.send(e.Voter, e.Round, func(ctx context.Context, v Voter) (answered, error) {
				res, err := v.Accept(ctx, req)
				return acceptAnswer(res), err
			})
		case campaign.Reserve:
			s.propose(&pb.Command{Term: s.term, Kind: &pb.Command_ReserveBallot{ReserveBallot: &pb.ReserveBallotCommand{Above: e.Above}}},
				func(l *campaign.Leader, now instant.Instant, res *pb.CommandResult) []campaign.Effect {
					return l.Reserved(now, e.ID, register.BallotOf(res.GetReserved().GetBallot()))
				},
				func(l *campaign.Leader, now instant.Instant) []campaign.Effect { return l.ReserveFailed(now, e.ID) })
		case campaign.Adopt:
			s.propose(&pb.Command{Term: s.term, Kind: &pb.Command_Adopt{Adopt: &pb.AdoptCommand{
				Partition: e.Partition, Epoch: uint32(e.Epoch), Ballot: e.Ballot.Proto(),
				Planned: e.Planned && s.cfg.Raft.View().Level() >= 2,
			}}},
				func(l *campaign.Leader, now instant.Instant, _ *pb.CommandResult) []campaign.Effect {
					s.cfg.Logger.Info("promoted", "partition", e.Partition, "epoch", e.Epoch, "ballot", e.Ballot.String(), "planned", e.Planned)
					if e.Epoch >= fence.AlarmEpoch {
						s.cfg.Logger.Error("the partition's epochs run out; its shards need a new partition before the last one", "partition", e.Partition, "epoch", e.Epoch, "last", fence.MaxEpoch)
					}
					return l.Adopted(now, e.Partition, e.Epoch)
				},
				func(l *campaign.Leader, now instant.Instant) []campaign.Effect {
					return l.AdoptFailed(now, e.Partition, e.Epoch)
				})
		case campaign.Drop:
			s.cfg.Logger.Warn("dropping an epoch that another owner or a higher epoch has ended", "partition", e.Partition, "epoch", e.Epoch)
			s.propose(&pb.Command{Term: s.term, Kind: &pb.Command_Drop{Drop: &pb.DropCommand{Partition: e.Partition, Epoch: uint32(e.Epoch)}}},
				func(l *campaign.Leader, now instant.Instant, _ *pb.CommandResult) []campaign.Effect {
					return l.Dropped(now, e.Partition, e.Epoch)
				},
				func(l *campaign.Leader, now instant.Instant) []campaign.Effect {
					return l.DropFailed(now, e.Partition, e.Epoch)
				})
		case campaign.Held:
			s.cfg.Heads.Held(e.Partition, e.Epoch, e.Until)
		case campaign.Released:
			s.cfg.Logger.Info("released", "partition", e.Partition, "epoch", e.Epoch)
		case campaign.Lapsed:
			s.cfg.Logger.Warn("head lease lapsed", "partition", e.Partition, "epoch", e.Epoch)
			s.cfg.Heads.Lapsed(e.Partition, e.Epoch)
		}
	}
}

func (s *Shell) header(voter campaign.Voter, round uint64) *pb.VoteHeader {
	return &pb.VoteHeader{
		SeenLife:  s.lives[voter.ID].life,
		ClusterId: s.config.GetClusterId(), Era: s.config.GetEra(), ConfigVersion: s.config.GetVersion(),
		Candidate: s.self.Name, CandidateIncarnation: uint64(s.self.Incarnation), Round: round,
	}
}

// propose commits a command in a goroutine of the term and then calls done or
// failed, under the lock. An unknown outcome is told to nobody: it comes with the
// end of the term. s.mu is held.
func (s *Shell) propose(cmd *pb.Command,
	done func(*campaign.Leader, instant.Instant, *pb.CommandResult) []campaign.Effect,
	failed func(*campaign.Leader, instant.Instant) []campaign.Effect,
) {
	term, ctx, leader := s.term, s.ctx, s.leader
	s.commands++
	s.work.Go(func() {
		res, err := s.cfg.Raft.ProposeUrgent(ctx, cmd)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.term != term {
			return
		}
		switch {
		case err == nil && res.GetError() == nil:
			s.commands--
			s.step(leader, func(l *campaign.Leader, now instant.Instant) []campaign.Effect { return done(l, now, res) })
		case err == nil, s.cfg.NeverApplied(err):
			if err == nil {
				s.cfg.Logger.Warn("command refused", "command", protoName(cmd), "reason", res.GetError())
			}
			s.commands--
			s.step(leader, failed)
		default:
			// It stays on its way until the term is over.
			s.cfg.Logger.Warn("command with unknown outcome", "command", protoName(cmd), "error", err)
			return
		}
		if s.leader == nil {
			s.build(s.cfg.Raft.View())
		}
	})
}

func protoName(cmd *pb.Command) string {
	r := cmd.ProtoReflect()
	if f := r.WhichOneof(r.Descriptor().Oneofs().ByName("kind")); f != nil {
		return string(f.Name())
	}
	return string(proto.MessageName(cmd))
}
