package state

import (
	"fmt"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// The refusals of commands, as they go into results and to waiting clients.

func errInvalid(field, remedy string) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_Invalid{Invalid: &pb.Invalid{Field: field, Remedy: remedy}}}
}

func errRefused(reason string) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_Refused{Refused: &pb.Refused{Reason: reason}}}
}

func errWrongTerm(term uint64) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_WrongTerm{WrongTerm: &pb.WrongTerm{Term: term}}}
}

func errUninitialised() *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_Uninitialised{Uninitialised: &pb.Uninitialised{}}}
}

func errSessionExpired(id string) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_SessionExpired{SessionExpired: &pb.SessionExpired{SessionId: id}}}
}

func errStaleRequest(id uint64) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_StaleRequest{StaleRequest: &pb.StaleRequest{RequestId: id}}}
}

func errNotHolder(resource string, token fence.Token) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_NotHolder{NotHolder: &pb.NotHolder{Resource: resource, Token: uint64(token)}}}
}

func errOverloaded(what string) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_Overloaded{Overloaded: &pb.Overloaded{What: what}}}
}

func errLapsed(partition string) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_Lapsed{Lapsed: &pb.Lapsed{Partition: partition}}}
}

func errMoved(p *partition) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_Moved{Moved: &pb.Moved{Partition: p.name, Successor: p.successor}}}
}

func errWaitEnded(resource string, millis int64) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_WaitEnded{WaitEnded: &pb.WaitEnded{Resource: resource, WaitedMs: millis}}}
}

// errNotOwner names the owner that the region's own register shows, if it is
// another region: a hint to the client, never authority.
func (m *Machine) errNotOwner(p *partition) *pb.ErrorDetail {
	n := &pb.NotOwner{Partition: p.name}
	if v := p.record.Value; !v.Released() && v.Owner.Name != m.region {
		n.Owner, n.Epoch = v.Owner.Name, uint32(v.Epoch)
	}
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_NotOwner{NotOwner: n}}
}

func errOtherCluster(c *pb.ClusterConfiguration) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_OtherCluster{OtherCluster: &pb.OtherCluster{
		ClusterId: c.GetClusterId(), Version: c.GetVersion(),
	}}}
}

func failed(e *pb.ErrorDetail) *pb.CommandResult { return &pb.CommandResult{Error: e} }

func errTokensUsedUp(p *partition) *pb.ErrorDetail {
	return errOverloaded(fmt.Sprintf("the tokens of partition %q, epoch %d are used up until its owner raises the epoch", p.name, p.epoch))
}

func errSessionFull(s *session) *pb.ErrorDetail {
	return errOverloaded(fmt.Sprintf("session %s has %d leases and queue places; release some", s.id, MaxSessionLeases))
}

func errTooManyGaps(session string) *pb.ErrorDetail {
	return errOverloaded(fmt.Sprintf("the request ids of session %s have over %d gaps; count them up one by one and raise lowest_open_request", session, MaxSeenRanges))
}

func errRegionFull(n int) *pb.ErrorDetail {
	return errOverloaded(fmt.Sprintf("the region has %d leases; release some", n))
}

func errOtherPartition(name, in, given string) *pb.ErrorDetail {
	return errRefused(fmt.Sprintf("%s is in partition %q, not in %q", name, in, given))
}
