package replica

import (
	"time"

	"github.com/hashicorp/raft"
)

// patience is for how long a follower bears its leader's silence, and what it
// does then.
//
// hashicorp/raft alone looks at that silence once in one to two heartbeat
// timeouts, whenever the leader was heard last, and a server refuses others its
// vote until it has looked itself and found too much. So a leader is replaced when
// the last server that is needed for a majority happens to look, which is after
// two timeouts and more; a candidate that asked just before that waits for one
// more, and so does one whose log is behind another's. This one looks when it is
// due, and has the others look. It decides nothing: it makes Raft look now, in an
// order in which one of them wins.
//
// A server whose patience is over asks the others for a pre-vote, by Raft's own
// request, which changes nothing in who answers it, before it becomes a candidate.
// Who is asked, and misses the leader too, gives it up and so grants the next one;
// unless its own log is longer: then it asks in the place of the other.
type patience struct {
	heartbeat time.Duration
	self      raft.ServerID
	// place among those who may have to give the leader up: they do it one after the
	// other, since of two candidates at once neither may win.
	place int
	// asks: it asks the others already.
	asks bool
	// asked is when another server first asked for this one's pre-vote in the
	// silence that lasts; zero: none did. by is the one of those to be elected.
	asked time.Time
	by    rival
}

// rival for a pre-vote.
type rival struct {
	id  raft.ServerID
	end logEnd
}

// logEnd is the last entry of a log.
type logEnd struct{ term, index uint64 }

func (e logEnd) after(o logEnd) bool {
	return e.term > o.term || e.term == o.term && e.index > o.index
}

// before: of the two, a is to be elected.
func (a rival) before(b rival) bool {
	return a.end.after(b.end) || a.end == b.end && a.id < b.id
}

// heardAsk notes that another server asks.
func (p *patience) heardAsk(now time.Time, by rival) {
	switch {
	case p.asked.IsZero():
		p.asked, p.by = now, by
	case by.id == p.by.id || by.before(p.by):
		p.by = by
	}
}

// heardLeader: what was before that is over.
func (p *patience) heardLeader(at time.Time) {
	if at.After(p.asked) {
		p.asked, p.by = time.Time{}, rival{}
	}
}

// due returns when something is to be done about a leader heard last at that
// time: the others are to be asked, or the leader is to be given up for the one who
// asks. end is of the own log.
//
// The steps of those who are not asked are about as long as the pause between two
// heartbeats, so that who is first hangs little on whom the leader has told last.
func (p *patience) due(heard time.Time, end logEnd) (at time.Time, ask bool) {
	if p.asked.IsZero() {
		return heard.Add(p.alone() + time.Duration(p.place)*p.heartbeat/4), true
	}
	at = p.asked.Add(time.Duration(p.place) * p.heartbeat / 8)
	if own := heard.Add(p.heartbeat); own.After(at) {
		at = own
	}
	return at, end.after(p.by.end) || p.asks && end == p.by.end && p.self < p.by.id
}

// alone is the patience of a server that nobody has asked, a third more: a leader
// that was not scheduled for a moment has lost nobody.
func (p *patience) alone() time.Duration { return patienceAlone(p.heartbeat) }

func patienceAlone(heartbeat time.Duration) time.Duration { return heartbeat + heartbeat/3 }

// place of a voter among those other than the leader and the one that asks, and
// how many voters there are.
func place(servers []raft.Server, self, leader, by raft.ServerID) (n, voters int, voter bool) {
	for _, s := range servers {
		if s.Suffrage != raft.Voter {
			continue
		}
		voters++
		switch {
		case s.ID == self:
			voter = true
		case s.ID != leader && s.ID != by && s.ID < self:
			n++
		}
	}
	return n, voters, voter
}
