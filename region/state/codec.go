package state

import (
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func ballotFrom(b *pb.Ballot) register.Ballot {
	return register.Ballot{Round: b.GetRound(), Region: b.GetRegion(), Incarnation: register.Incarnation(b.GetIncarnation())}
}

func ballotTo(b register.Ballot) *pb.Ballot {
	if b.IsZero() {
		return nil
	}
	return &pb.Ballot{Round: b.Round, Region: b.Region, Incarnation: uint64(b.Incarnation)}
}

func guardFrom(g *pb.RegisterGuard) register.Guard {
	return register.Guard{Promised: ballotFrom(g.GetPromised()), Accepted: ballotFrom(g.GetAccepted())}
}

func valueFrom(v *pb.Value) register.Value {
	return register.Value{
		Owner:     register.Region{Name: v.GetOwner(), Incarnation: register.Incarnation(v.GetOwnerIncarnation())},
		Epoch:     fence.Epoch(v.GetEpoch()),
		D:         time.Duration(v.GetDNs()),
		Successor: v.GetSuccessor(),
		Reason:    v.GetReason(),
	}
}

func valueTo(v register.Value) *pb.Value {
	if v == (register.Value{}) {
		return nil
	}
	return &pb.Value{
		Owner: v.Owner.Name, OwnerIncarnation: uint64(v.Owner.Incarnation), Epoch: uint32(v.Epoch),
		DNs: int64(v.D), Successor: v.Successor, Reason: v.Reason,
	}
}

func recordFrom(r *pb.Register) register.Record {
	return register.Record{
		Promised: ballotFrom(r.GetPromised()), Accepted: ballotFrom(r.GetAccepted()),
		Value: valueFrom(r.GetValue()), Alarm: r.GetAlarm(),
	}
}

func recordTo(r register.Record) *pb.Register {
	return &pb.Register{Promised: ballotTo(r.Promised), Accepted: ballotTo(r.Accepted), Value: valueTo(r.Value), Alarm: r.Alarm}
}
