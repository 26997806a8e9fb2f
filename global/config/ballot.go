package config

import (
	"cmp"
	"fmt"

	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Ballot orders the proposals for the next configuration. The zero ballot is
// below all.
type Ballot struct {
	Round uint64
	// Proposer is random, made by each run of an operator's command, so that no
	// ballot ever has two values.
	Proposer string
}

// Compare orders ballots by round, then proposer.
func (b Ballot) Compare(o Ballot) int {
	return cmp.Or(cmp.Compare(b.Round, o.Round), cmp.Compare(b.Proposer, o.Proposer))
}

// Less reports whether b is below o.
func (b Ballot) Less(o Ballot) bool { return b.Compare(o) < 0 }

// IsZero reports whether b is no ballot.
func (b Ballot) IsZero() bool { return b == Ballot{} }

func (b Ballot) String() string {
	if b.IsZero() {
		return "none"
	}
	return fmt.Sprintf("%d.%.8s", b.Round, b.Proposer)
}

// Proto returns b as a message; nil for the zero ballot.
func (b Ballot) Proto() *pb.ConfigBallot {
	if b.IsZero() {
		return nil
	}
	return &pb.ConfigBallot{Round: b.Round, Proposer: b.Proposer}
}

// BallotOf reads a ballot; nil is the zero ballot.
func BallotOf(m *pb.ConfigBallot) Ballot {
	return Ballot{Round: m.GetRound(), Proposer: m.GetProposer()}
}

// Register is a voter's durable record of the decision on the version after
// its configuration. It is a value; Proposed is never changed.
type Register struct {
	Promised, Accepted Ballot
	Proposed           *pb.ClusterConfiguration
}

// Proto returns r as a message, never nil.
func (r Register) Proto() *pb.ConfigRegister {
	return &pb.ConfigRegister{Promised: r.Promised.Proto(), Accepted: r.Accepted.Proto(), Proposed: r.Proposed}
}

// RegisterOf reads a register; nil is the empty one.
func RegisterOf(m *pb.ConfigRegister) Register {
	return Register{Promised: BallotOf(m.GetPromised()), Accepted: BallotOf(m.GetAccepted()), Proposed: m.GetProposed()}
}

// Equal reports whether two registers say the same.
func (r Register) Equal(o Register) bool {
	return r.Promised == o.Promised && r.Accepted == o.Accepted && proto.Equal(r.Proposed, o.Proposed)
}
