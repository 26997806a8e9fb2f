package replica

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// checker runs leadership checks [F1].
//
// hashicorp/raft's VerifyLeader may count answers to messages that were sent
// before the call, so a leader that was paused, or that is far from the others
// while leadership moves, can pass it long after another has committed. This one
// asks the other voters for their current term, by requests sent after the call.
// A leader of a later term needed a majority that had stored that term first;
// our majority meets it, so at least one answer would show the later term.
//
// Two slots, one running and one next: a call joins the next one, never the one
// that runs, whose requests went out before the call.
type checker struct {
	r    *Replica
	wake chan struct{}
	mu   sync.Mutex
	next *checkRound
}

type checkRound struct {
	done  chan struct{}
	term  uint64
	began instant.Instant
	err   error
}

func newChecker(r *Replica) *checker { return &checker{r: r, wake: make(chan struct{}, 1)} }

// Check proves that this server was the only possible leader at some instant
// after the call, and returns its term, the one in which its tables were built.
// It fails with NotLeaderError or ErrCheckFailed, at the latest one heartbeat
// timeout after the check began, or with ctx's error. Thousands may call at once.
func (r *Replica) Check(ctx context.Context) (term uint64, err error) {
	term, _, err = r.CheckAt(ctx)
	return term, err
}

// CheckAt is Check that also returns the instant at which the check began:
// whatever arrived before it is covered.
func (r *Replica) CheckAt(ctx context.Context) (term uint64, began instant.Instant, err error) {
	if err := ctx.Err(); err != nil {
		return 0, 0, err
	}
	if _, ok := r.Leading(); !ok {
		return 0, 0, r.notLeader()
	}
	c := r.check
	c.mu.Lock()
	round := c.next
	if round == nil {
		round = &checkRound{done: make(chan struct{})}
		c.next = round
		wake.Up(c.wake)
	}
	c.mu.Unlock()
	select {
	case <-round.done:
		return round.term, round.began, round.err
	case <-ctx.Done():
		return 0, 0, ctx.Err()
	case <-r.stopped:
		return 0, 0, ErrClosed
	}
}

func (c *checker) run(ctx context.Context, rf *raft.Raft) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		}
		c.mu.Lock()
		round := c.next
		c.next = nil // from here on nobody joins it
		c.mu.Unlock()
		if round == nil {
			continue
		}
		round.began = c.r.cfg.Clock.Now()
		started := time.Now()
		round.term, round.err = c.r.confirm(ctx, rf)
		c.r.metric.checked(time.Since(started), round.err)
		close(round.done)
	}
}

// confirm is one check.
func (r *Replica) confirm(ctx context.Context, rf *raft.Raft) (uint64, error) {
	term, ok := r.Leading()
	if !ok {
		return 0, r.notLeader()
	}
	f := rf.GetConfiguration()
	if err := f.Error(); err != nil {
		return 0, fmt.Errorf("%w: read the raft configuration: %w", ErrCheckFailed, err)
	}
	var others []raft.Server
	voters, agree := 0, 0
	for _, s := range f.Configuration().Servers {
		if s.Suffrage != raft.Voter {
			continue
		}
		voters++
		if s.ID == r.id {
			agree++ // and looked at again at the end
		} else {
			others = append(others, s)
		}
	}
	need := voters/2 + 1
	if agree < need {
		if err := r.poll(ctx, others, term, need-agree); err != nil {
			return 0, err
		}
	}
	if now, ok := r.Leading(); !ok || now != term {
		return 0, r.notLeader()
	}
	return term, nil
}

type termAnswer struct {
	server raft.Server
	resp   *pb.CurrentTermResponse
	err    error
}

// poll asks the servers at once and returns nil when need of them are exactly
// in term.
func (r *Replica) poll(ctx context.Context, servers []raft.Server, term uint64, need int) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timing.Heartbeat)
	defer cancel()
	answers := make(chan termAnswer, len(servers))
	for _, s := range servers {
		r.asking.run(func() {
			resp, err := r.cfg.Terms.AskTerm(ctx, string(s.Address))
			answers <- termAnswer{s, resp, err}
		})
	}
	var last error
	agree := 0
	for range servers {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %d of %d other voters needed are in term %d after %v",
				ErrCheckFailed, agree, need, term, r.cfg.Timing.Heartbeat)
		case a := <-answers:
			switch {
			case a.err != nil:
				last = fmt.Errorf("%s: %w", a.server.Address, a.err)
			case a.resp.GetRaftId() != string(a.server.ID):
				// Another data directory under a known name speaks for nobody [F3].
				last = fmt.Errorf("%s: answered as %s, not as %s", a.server.Address, a.resp.GetRaftId(), a.server.ID)
			case a.resp.GetTerm() > term:
				return fmt.Errorf("%w: %s is in term %d, after our %d", ErrCheckFailed, a.server.Address, a.resp.GetTerm(), term)
			case a.resp.GetTerm() == term:
				agree++
			default:
				last = fmt.Errorf("%s: is in term %d, before our %d", a.server.Address, a.resp.GetTerm(), term)
			}
		}
		if agree >= need {
			return nil
		}
	}
	return fmt.Errorf("%w: %d of %d other voters needed are in term %d: %w", ErrCheckFailed, agree, need, term, last)
}

// PeerServer answers the other servers' leadership checks.
type PeerServer struct {
	pb.UnimplementedPeerServiceServer
	r *Replica
}

var _ pb.PeerServiceServer = (*PeerServer)(nil)

// PeerServer returns the handler of PeerService.
func (r *Replica) PeerServer() *PeerServer { return &PeerServer{r: r} }

// CurrentTerm answers with this server's Raft id and current term, 0 while Raft
// does not run, which agrees with nobody, and says how far it is. A leader's
// hints in the request are taken if it leads this server's term.
func (p *PeerServer) CurrentTerm(_ context.Context, req *pb.CurrentTermRequest) (*pb.CurrentTermResponse, error) {
	resp := &pb.CurrentTermResponse{RaftId: p.r.RaftID(), FeatureLevel: p.r.cfg.FeatureLevel}
	rf := p.r.raft.Load()
	if rf == nil {
		return resp, nil
	}
	resp.Term, resp.LastIndex = rf.CurrentTerm(), rf.LastIndex()
	resp.AppliedIndex, resp.SnapshotIndex = p.r.fsm.applied.Load(), p.r.stores.snaps.newest.Load()
	if req.GetLeaderTerm() != 0 {
		if req.GetLeaderTerm() == resp.Term {
			p.r.compact.hear(req)
		}
		p.r.compact.answer(resp)
	}
	return resp, nil
}
