package reconfigure

import (
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Decision is one attempt, under one ballot, to decide on the version after c.
// Answers of others than the voters of c under their incarnations do not count,
// and a voter counts once.
type Decision struct {
	c      *pb.ClusterConfiguration
	ballot config.Ballot
	want   *pb.ClusterConfiguration

	promised, accepted map[string]bool
	best               config.Register
	// chosen is set when the promises are a majority.
	chosen  *pb.ClusterConfiguration
	highest uint64
}

// NewDecision begins an attempt to decide on want, or on what another one has
// left accepted; a nil want only finishes what others have begun.
func NewDecision(c *pb.ClusterConfiguration, ballot config.Ballot, want *pb.ClusterConfiguration) *Decision {
	return &Decision{c: c, ballot: ballot, want: want, promised: map[string]bool{}, accepted: map[string]bool{}}
}

// Prepare is what to send to every voter of c.
func (d *Decision) Prepare() *pb.PrepareConfigRequest {
	return &pb.PrepareConfigRequest{ClusterId: d.c.GetClusterId(), Era: d.c.GetEra(), Version: d.c.GetVersion(), Ballot: d.ballot.Proto()}
}

// Promised takes an answer to Prepare.
func (d *Decision) Promised(a *pb.PrepareConfigResponse) {
	r := config.RegisterOf(a.GetRegister())
	d.highest = max(d.highest, r.Promised.Round)
	if !a.GetPromised() || !config.Member(d.c, a.GetVoter()) {
		return
	}
	d.promised[a.GetVoter().GetId()] = true
	if d.best.Accepted.Less(r.Accepted) {
		d.best = r
	}
}

// Accept is what to send to every voter of c once a majority has promised; nil
// before, and when there is nothing to decide. The proposal is the one of the
// highest ballot that any of the promises shows as accepted: it may be decided
// already.
func (d *Decision) Accept() *pb.AcceptConfigRequest {
	if len(d.promised) < config.QuorumOf(d.c).Voters {
		return nil
	}
	if d.chosen == nil { // once: a ballot has one proposal
		if d.chosen = d.want; d.best.Proposed != nil {
			d.chosen = d.best.Proposed
		}
	}
	if d.chosen == nil {
		return nil
	}
	return &pb.AcceptConfigRequest{ClusterId: d.c.GetClusterId(), Era: d.c.GetEra(), Version: d.c.GetVersion(), Ballot: d.ballot.Proto(), Proposed: d.chosen}
}

// Accepted takes an answer to Accept.
func (d *Decision) Accepted(a *pb.AcceptConfigResponse) {
	d.highest = max(d.highest, a.GetRegister().GetPromised().GetRound())
	if a.GetAccepted() && config.Member(d.c, a.GetVoter()) {
		d.accepted[a.GetVoter().GetId()] = true
	}
}

// Promising and Accepting count the voters that said yes.
func (d *Decision) Promising() int { return len(d.promised) }

// Accepting counts the voters that have accepted.
func (d *Decision) Accepting() int { return len(d.accepted) }

// Decided returns the decided configuration once a majority has accepted it.
func (d *Decision) Decided() (*pb.ClusterConfiguration, bool) {
	if d.chosen == nil || len(d.accepted) < config.QuorumOf(d.c).Voters {
		return nil, false
	}
	return proto.CloneOf(d.chosen), true
}

// Above is the highest round seen: the next attempt's is above it.
func (d *Decision) Above() uint64 { return max(d.highest, d.ballot.Round) }

// Stored reports whether c is stored by majorities of its own voters and of
// those of the version before, and so whether no majority of those answers
// under that version any more. by has the voters that said so.
func Stored(c *pb.ClusterConfiguration, by []*pb.Voter) bool {
	return majority(c.GetVoters(), by) && (c.GetVersion() == 1 || majority(c.GetPreviousVoters(), by))
}

func majority(of, by []*pb.Voter) bool {
	got := map[string]bool{}
	for _, v := range of {
		for _, b := range by {
			if proto.Equal(v, b) {
				got[v.GetId()] = true
			}
		}
	}
	return len(got) > len(of)/2
}
