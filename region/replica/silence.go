package replica

import (
	"context"
	"strconv"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// overslept: who looks so much later than it wanted to had no processor for
	// itself, and heartbeats may be waiting for it to read them.
	overslept = 20 * time.Millisecond
	// askAgain is the first pause between two questions for pre-votes; each is half
	// as long again as the one before.
	askAgain = 10 * time.Millisecond
	// lookAgain is how soon Raft is made to look at a silence again.
	lookAgain = 20 * time.Millisecond
)

// silence watches a follower's leader: the shell of patience.
type silence struct {
	r     *Replica
	rf    *raft.Raft
	trans transport

	p       patience
	voters  int
	servers []raft.Server
	answers chan preVote
	// open are the servers that have not answered the last question yet, yes those
	// that have granted one in this silence.
	open, yes map[raft.ServerID]bool
	// next question at the earliest, and the pause after it.
	next  time.Time
	pause time.Duration
	// impatient: Raft's patience is cut short.
	impatient bool
}

// preVote is an answer to a question.
type preVote struct {
	from    raft.ServerID
	granted bool
}

func newSilence(r *Replica, rf *raft.Raft, trans transport) *silence {
	return &silence{
		r: r, rf: rf, trans: trans, p: patience{heartbeat: r.cfg.Timing.Heartbeat, self: r.id},
		answers: make(chan preVote, 16), open: map[raft.ServerID]bool{}, yes: map[raft.ServerID]bool{}, pause: askAgain,
	}
}

// watchSilence makes Raft look at its leader's silence when it is time to. It looks
// some six times a second itself, at LAN timing.
func (r *Replica) watchSilence(ctx context.Context, rf *raft.Raft, trans transport) {
	asks := make(chan raft.Observation, 8)
	observer := raft.NewObserver(asks, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.RequestPreVoteRequest)
		return ok
	})
	rf.RegisterObserver(observer)
	defer rf.DeregisterObserver(observer)
	s := newSilence(r, rf, trans)
	timer := time.NewTimer(s.p.heartbeat)
	defer timer.Stop()
	want := time.Now().Add(s.p.heartbeat)
	for {
		select {
		case <-ctx.Done():
			return
		case o := <-asks:
			// Whom nobody can elect, as one that was removed and has not been told, asks for
			// ever, and would have every short silence end its leader.
			if req, ok := o.Data.(raft.RequestPreVoteRequest); ok {
				if _, votes := r.voter(string(req.ID)); votes {
					s.p.heardAsk(time.Now(), rival{raft.ServerID(req.ID), logEnd{req.LastLogTerm, req.LastLogIndex}})
				}
			}
		case a := <-s.answers:
			delete(s.open, a.from)
			s.yes[a.from] = s.yes[a.from] || a.granted
		case <-timer.C:
		}
		now := time.Now()
		want = s.woken(now, want)
		timer.Reset(time.Until(want))
	}
}

// woken looks, at a time when it wanted to or later.
func (s *silence) woken(now, want time.Time) (next time.Time) {
	return s.look(now, now.Sub(want) < overslept)
}

// look does what is due and returns when to look again.
func (s *silence) look(now time.Time, punctual bool) time.Time {
	if s.impatient {
		s.impatient = false
		s.reload(s.p.alone())
	}
	heard := s.rf.LastContact()
	s.p.heardLeader(heard)
	_, leader := s.rf.LeaderWithID()
	s.servers = s.rf.GetConfiguration().Configuration().Servers
	var voter bool
	s.p.place, s.voters, voter = place(s.servers, s.r.id, leader, s.p.by.id)
	if !voter || leader == "" || leader == s.r.id || s.rf.State() != raft.Follower {
		s.over() // Raft's own timers do
		s.p.heardLeader(now)
		return now.Add(s.p.heartbeat)
	}
	var end logEnd
	if !s.p.asked.IsZero() || s.p.asks {
		end = endOf(s.rf)
	}
	at, ask := s.p.due(heard, end)
	switch {
	case at.After(now):
		s.over()
		return at
	case !punctual:
		return now.Add(lookAgain)
	case !ask:
		s.r.log.Debug("giving up a silent leader for another server", "leader", nameOf(leader), "silent", now.Sub(heard), "for", nameOf(s.p.by.id))
		return s.giveUp(now)
	case s.granted() > s.voters/2:
		s.r.log.Debug("campaigning in place of a silent leader", "leader", nameOf(leader), "silent", now.Sub(heard))
		return s.giveUp(now)
	}
	if !s.next.After(now) {
		s.ask(leader, endOf(s.rf))
		s.next = now.Add(s.pause)
		s.pause = min(s.pause*3/2, s.p.heartbeat)
	}
	return s.next
}

// over: there is no silence.
func (s *silence) over() {
	s.p.asks, s.pause, s.next = false, askAgain, time.Time{}
	clear(s.yes)
}

// granted pre-votes, with the own one.
func (s *silence) granted() int {
	n := 1
	for _, srv := range s.servers {
		if srv.Suffrage == raft.Voter && srv.ID != s.r.id && s.yes[srv.ID] {
			n++
		}
	}
	return n
}

// ask the other voters for their pre-votes: those that have answered before, and
// not the leader, which would hold such a question until the transport's timeout.
func (s *silence) ask(leader raft.ServerID, end logEnd) {
	s.p.asks = true
	req := &raft.RequestPreVoteRequest{
		RPCHeader: raft.RPCHeader{
			ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(s.r.id), Addr: s.trans.EncodePeer(s.r.id, s.trans.LocalAddr()),
		},
		Term: s.rf.CurrentTerm() + 1, LastLogTerm: end.term, LastLogIndex: end.index,
	}
	for _, srv := range s.servers {
		if srv.Suffrage != raft.Voter || srv.ID == s.r.id || srv.ID == leader || s.open[srv.ID] {
			continue
		}
		s.open[srv.ID] = true
		s.r.asking.run(func() { // as long as the transport's timeout
			var resp raft.RequestPreVoteResponse
			err := s.trans.RequestPreVote(srv.ID, srv.Address, req, &resp)
			select {
			case s.answers <- preVote{srv.ID, err == nil && resp.Granted}:
			case <-s.r.stopped:
			}
		})
	}
}

// giveUp makes a follower's main loop look at its leader's silence at once, and
// campaign: hashicorp/raft looks when its heartbeat timeout becomes shorter.
func (s *silence) giveUp(now time.Time) time.Time {
	s.impatient = true
	s.reload(s.p.heartbeat)
	return now.Add(lookAgain)
}

func (s *silence) reload(heartbeat time.Duration) {
	c := s.rf.ReloadableConfig()
	c.HeartbeatTimeout = heartbeat
	if err := s.rf.ReloadConfig(c); err != nil {
		s.r.log.Warn("raft's patience with a silent leader cannot be changed", "error", err)
	}
}

// endOf the own log, as Raft would say in a request for votes.
func endOf(rf *raft.Raft) logEnd {
	st := rf.Stats()
	at := func(what string) logEnd {
		term, _ := strconv.ParseUint(st["last_"+what+"_term"], 10, 64)
		index, _ := strconv.ParseUint(st["last_"+what+"_index"], 10, 64)
		return logEnd{term, index}
	}
	log, snap := at("log"), at("snapshot")
	if snap.index > log.index {
		return snap
	}
	return log
}
