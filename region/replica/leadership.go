package replica

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// leadership is what this server knows of its own leadership. elected is the
// term in which Raft made it leader, led the same once its BeginTerm is applied
// and the observer has been told; 0 for none.
type leadership struct {
	elected atomic.Uint64
	led     atomic.Uint64
	// order keeps a deposition from running beside the observer's building of
	// that term's tables.
	order sync.Mutex
	// gained is poked when led is set.
	gained chan struct{}
}

// begin tells the observer of an own BeginTerm and, if it is of the leadership
// that lasts, makes this server the serving leader. FSM goroutine.
func (l *leadership) begin(term uint64, tell func()) {
	l.order.Lock()
	defer l.order.Unlock()
	tell()
	if l.elected.Load() == term {
		l.led.Store(term)
		wake.Up(l.gained)
	}
}

// end ends the leadership of term and calls tell.
func (l *leadership) end(term uint64, tell func(term uint64)) {
	l.order.Lock()
	defer l.order.Unlock()
	l.led.Store(0)
	l.elected.Store(0)
	tell(term)
}

// leads returns the term in which Raft holds this server leader now. Term and
// state change in this order: state first when a leader steps down, term first
// when a candidate begins; so a Leader state between two equal terms belongs to
// that term.
func leads(r *raft.Raft) (term uint64, ok bool) {
	before := r.CurrentTerm()
	if r.State() != raft.Leader {
		return 0, false
	}
	return before, r.CurrentTerm() == before
}

// Leading returns the term in which this server leads and serves: it is
// elected, its BeginTerm is applied, the observer has been told, and Raft has
// not seen the end of it. This alone proves nothing to anybody else; see Check.
func (r *Replica) Leading() (term uint64, ok bool) {
	led := r.lead.led.Load()
	rf := r.raft.Load()
	if led == 0 || rf == nil {
		return 0, false
	}
	term, ok = leads(rf)
	return led, ok && term == led
}

// Begins reports whether term is the one in which this server is elected,
// also before it serves. For the observer's TermBegun.
func (r *Replica) Begins(term uint64) bool {
	return term != 0 && r.lead.elected.Load() == term
}

// Leader returns the name of the leader as far as this server knows ("" if
// unknown), the current term, and whether it is this server.
func (r *Replica) Leader() (name string, term uint64, self bool) {
	rf := r.raft.Load()
	if rf == nil {
		return "", 0, false
	}
	term = rf.CurrentTerm()
	_, id := rf.LeaderWithID()
	return nameOf(id), term, id == r.id
}

// retryBegin is how long a leader waits before it proposes BeginTerm again,
// when a failed transfer of leadership made Raft refuse it.
const retryBegin = 50 * time.Millisecond

// watchLeadership follows Raft's elections: proposes BeginTerm when this
// server gains a term, tells the observer when it loses it. hashicorp/raft's
// channel holds only the newest value, so a term lost and regained shows as
// one more true: the term decides.
func (r *Replica) watchLeadership(ctx context.Context, rf *raft.Raft) {
	var (
		cur     uint64
		refused = make(chan uint64, 8) // terms whose BeginTerm was refused
		retry   <-chan time.Time
	)
	propose := func() {
		term := cur
		data, err := proto.Marshal(&pb.Command{
			Term: term,
			Kind: &pb.Command_BeginTerm{BeginTerm: &pb.BeginTermCommand{Server: r.cfg.Name}},
		})
		if err != nil {
			r.fatal(err)
			return
		}
		r.whenDone(rf.Apply(appendCommand(nil, data), 0), func(_ any, err error) {
			if errors.Is(err, raft.ErrLeadershipTransferInProgress) {
				select {
				case refused <- term:
				case <-ctx.Done():
				}
			}
		})
	}
	for {
		term, ok := leads(rf)
		if cur != 0 && (!ok || term != cur) {
			r.depose(cur)
			cur, retry = 0, nil
		}
		if rf.State() == raft.Shutdown && !r.stopping.Load() {
			r.fatal(errors.New("this server was removed from its group while it led; " +
				"to use it again, give it an empty data directory and add it"))
		}
		if ok && cur == 0 {
			cur = term
			r.log.Info("elected leader", "term", term)
			r.lead.elected.Store(term)
			propose()
		}
		select {
		case <-ctx.Done():
			if cur != 0 {
				r.depose(cur)
			}
			return
		case <-rf.LeaderCh():
		case t := <-refused:
			if t == cur {
				retry = time.After(retryBegin)
			}
		case <-retry:
			retry = nil
			if t, ok := leads(rf); ok && t == cur {
				propose()
			}
		}
	}
}

func (r *Replica) depose(term uint64) {
	r.lead.end(term, r.cfg.Observer.Deposed)
	r.prop.flush()
	r.log.Info("no longer leader", "term", term)
}
