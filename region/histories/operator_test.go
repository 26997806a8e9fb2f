package histories

import (
	"context"
	"strings"
	"time"

	"github.com/headlease/headlease/internal/history"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// revoke takes a lease back, as an operator does.
func (n *nemesis) revoke() {
	p := n.w.leader()
	if p == nil {
		return
	}
	lock := n.locks[n.rng.IntN(len(n.locks))]
	if l, ok := p.replica.View().Lease(lock); ok && l.Token != 0 {
		n.revokeLease(p, l)
	}
}

// revokeThenCut takes a lease back that its holder keeps, and cuts the holder off
// just before it passes on: what the stream told it meanwhile must not outlive
// that [F9].
func (n *nemesis) revokeThenCut() {
	p := n.w.leader()
	if p == nil {
		return
	}
	before := p.replica.View()
	time.Sleep(100 * time.Millisecond) // virtual: most locks are held for less
	after := p.replica.View()
	for _, lock := range n.locks {
		l, _ := before.Lease(lock)
		now, _ := after.Lease(lock)
		name := strings.TrimPrefix(l.Holder, "client/")
		if l.Token == 0 || l.Token != now.Token || !strings.HasPrefix(name, "sdk-") {
			continue
		}
		if !n.revokeLease(p, l) {
			return
		}
		time.Sleep(n.between(headLease/2, headLease)) // virtual
		n.held("holder of a revoked lease cut off", func() {
			set := func(on bool) {
				for _, s := range n.w.servers {
					n.w.net.cut(s.name, name, on)
					n.w.net.cut(name, s.name, on)
				}
			}
			set(true)
			time.Sleep(n.between(headLease, 2*headLease)) // virtual
			set(false)
		})
		return
	}
}

// revokeLease reports whether the lease was taken back.
func (n *nemesis) revokeLease(p *process, l state.Lease) bool {
	lock := l.Resource
	term, ok := p.replica.Leading()
	if !ok {
		return false
	}
	op := n.w.recorder.Begin(history.Op{Client: "operator", Kind: history.Revoke, Resource: lock, Token: uint64(l.Token)})
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	res, err := p.propose(ctx, &pb.Command{Term: term, Kind: &pb.Command_Revoke{Revoke: &pb.RevokeCommand{
		Resource: lock, Token: uint64(l.Token), Reason: "an operator's wish",
	}}})
	switch {
	case neverApplied(err):
		n.w.recorder.End(op, history.Answer{Code: history.Refused})
	case err != nil:
		n.w.recorder.End(op, history.Answer{Code: history.Unknown, Error: err.Error()})
	case res.GetError().GetNotHolder() != nil:
		n.w.recorder.End(op, history.Answer{Code: history.NotHolder})
	case res.GetError().GetInvalid() != nil:
		n.w.t.Errorf("seed %d: the revocation is refused: %v", n.w.seed, res.GetError())
		fallthrough
	case res.GetError() != nil:
		n.w.recorder.End(op, history.Answer{Code: history.Refused, Error: res.GetError().String()})
	default:
		n.w.recorder.End(op, history.Answer{Code: history.OK})
		n.w.counts.add("lease revoked")
		return true
	}
	return false
}

// drain begins a planned transfer and takes it back, as an operator does: its
// grants stop at an entry of the log, and go on at another [F26]. Mostly it is
// taken back before the leases are gone; if it is not, the region releases the
// partition, and wins it again.
func (n *nemesis) drain() {
	p := n.w.leader()
	if p == nil {
		return
	}
	part, ok := p.replica.View().Partition(partition)
	if !ok || !part.Live() {
		return
	}
	began := time.Now()
	start := &pb.StartDrainCommand{Partition: partition, Epoch: uint32(part.Epoch), Successor: "us", By: "operator"}
	if n.propose(&pb.Command{Kind: &pb.Command_StartDrain{StartDrain: start}}) == withoutEffect {
		return
	}
	n.w.counts.add("drain")
	time.Sleep(n.between(20*time.Millisecond, headLease)) // virtual
	abort := &pb.AbortDrainCommand{Partition: partition, Epoch: uint32(part.Epoch), By: "operator"}
	for time.Since(began) < longestFault-2*time.Second {
		if n.propose(&pb.Command{Kind: &pb.Command_AbortDrain{AbortDrain: abort}}) == tookEffect {
			n.w.counts.add("drain taken back")
			return
		}
		if p := n.w.leader(); p != nil {
			if now, ok := p.replica.View().Partition(partition); ok && now.Epoch != part.Epoch {
				n.w.counts.add("drained partition released and won again")
				return
			}
		}
		time.Sleep(100 * time.Millisecond) // virtual
	}
	n.w.t.Errorf("seed %d: a drain cannot be taken back", n.w.seed)
}

// outcome of a command, as its proposer knows it.
type outcome int

const (
	tookEffect outcome = iota
	withoutEffect
	unknown // it may be in the log, and take effect under the next leader
)

func (n *nemesis) propose(c *pb.Command) outcome {
	p := n.w.leader()
	if p == nil {
		return withoutEffect
	}
	term, ok := p.replica.Leading()
	if !ok {
		return withoutEffect
	}
	c.Term = term
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	res, err := p.propose(ctx, c)
	switch {
	case neverApplied(err) || err == nil && res.GetError() != nil:
		return withoutEffect
	case err != nil:
		return unknown
	default:
		return tookEffect
	}
}
