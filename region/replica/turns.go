package replica

import "github.com/hashicorp/raft"

// turnLooks is how often a server is offered its turn before the next one is: it
// may have failed at once.
const turnLooks = 3

// turns is who may write a snapshot: one server of the group, each in its turn.
type turns struct {
	holder raft.ServerID
	looks  int  // since holder got it and does not write
	wrote  bool // holder has been seen to write
	round  int
	had    map[raft.ServerID]int // the round of the last turn
}

// turnState is what is known of a server that answered lately.
type turnState struct {
	id      raft.ServerID
	leader  bool
	due     bool
	running bool
	backlog uint64
}

// next moves the turn on. Nobody gets one while a server writes. Then come, of
// those that want one, the one whose last turn is longest ago, followers before
// the leader, the longest backlog first.
func (t *turns) next(states []turnState) {
	for _, s := range states {
		if s.running {
			t.holder, t.wrote = s.id, true
			return
		}
	}
	for _, s := range states {
		if s.id == t.holder && s.due && !t.wrote && t.looks < turnLooks {
			t.looks++
			return
		}
	}
	var best *turnState
	for i := range states {
		if s := &states[i]; s.due && (best == nil || t.before(s, best)) {
			best = s
		}
	}
	t.holder, t.looks, t.wrote = "", 0, false
	if best == nil {
		return
	}
	if t.had == nil {
		t.had = make(map[raft.ServerID]int)
	}
	t.round++
	t.holder = best.id
	t.had[best.id] = t.round
	if len(t.had) > 4*len(states) { // servers that are gone
		clear(t.had)
	}
}

func (t *turns) before(a, b *turnState) bool {
	switch {
	case t.had[a.id] != t.had[b.id]:
		return t.had[a.id] < t.had[b.id]
	case a.leader != b.leader:
		return b.leader
	case a.backlog != b.backlog:
		return a.backlog > b.backlog
	default:
		return a.id < b.id
	}
}
