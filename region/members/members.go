// Package members judges changes of a region's Raft group: who may join, when a
// non-voter may become a voter, whom the group can lose. Pure: the caller asks
// the servers, and carries the change out under one lock on the leader.
//
// What it guarantees, if its caller obeys it and the answers are true:
//   - a member's name is never given to another data directory while the member
//     is in the group [F3];
//   - no change leaves a group without a live majority of its voters;
//   - a voter that is made has the log, so that it can vote in earnest at once;
//   - the feature level rises only to what every member's program knows.
package members

import (
	"fmt"
	"strings"
)

// Member of a group as its leader sees it at one time.
type Member struct {
	Name string
	// RaftID is "name/uuid".
	RaftID string
	Voter  bool
	Leader bool
	// Live: it answered as this very member, in the leader's term.
	Live bool
	// Problem says why it is not live.
	Problem string
	// Ahead: it is in a later term than the leader, whose leadership is over or
	// about to be.
	Ahead bool
	// LastIndex is the newest entry of its log, AppliedIndex the newest applied.
	LastIndex, AppliedIndex uint64
	// Level is the highest feature level that its program knows; 0 if it did not
	// answer.
	Level uint32
}

// Behind is how many committed entries its log lacks.
func (m Member) Behind(commit uint64) uint64 { return commit - min(commit, m.LastIndex) }

// Refusal is why a change is not made, and the remedy.
type Refusal struct{ Reason string }

func (r *Refusal) Error() string { return r.Reason }

func refuse(format string, args ...any) *Refusal { return &Refusal{fmt.Sprintf(format, args...)} }

// MaxLag is how many committed entries a non-voter may lack when it becomes a
// voter: it gets them within the time of a few messages, and under load it
// always lacks some.
const MaxLag = 512

// majority of n voters.
func majority(n int) int { return n/2 + 1 }

// quorum of a group's voters.
type quorum struct {
	voters, live int
	dead         []string
}

func quorumOf(group []Member, without string) quorum {
	var q quorum
	for _, m := range group {
		switch {
		case !m.Voter || m.RaftID == without:
		case m.Live:
			q.voters++
			q.live++
		default:
			q.voters++
			q.dead = append(q.dead, fmt.Sprintf("%s (%s)", m.Name, m.Problem))
		}
	}
	return q
}

// spare is how many more voters it can lose; negative: it has no majority.
func (q quorum) spare() int { return q.live - majority(q.voters) }

// Find returns the member of that name.
func Find(group []Member, name string) (Member, bool) {
	for _, m := range group {
		if m.Name == name {
			return m, true
		}
	}
	return Member{}, false
}

// GoodRaftID reports whether a Raft id is the name with a uuid.
func GoodRaftID(name, raftID string) bool {
	rest, ok := strings.CutPrefix(raftID, name+"/")
	return ok && name != "" && rest != "" && !strings.Contains(rest, "/")
}

// MayJoin judges whether the server may be added as a non-voter; already: it is
// a member.
func MayJoin(group []Member, name, raftID string) (already bool, refusal *Refusal) {
	if !GoodRaftID(name, raftID) {
		return false, refuse("raft id %q is not %q with a uuid", raftID, name+"/")
	}
	m, ok := Find(group, name)
	switch {
	case !ok:
		return false, nil
	case m.RaftID == raftID:
		return true, nil
	}
	return false, refuse("server %s is a member of the group with another data directory (%s, not %s): what it promised there is not here [F3]; "+
		"start it on that directory, or if that is lost, run `headlease server replace %s %s`", name, m.RaftID, raftID, name, name)
}

// MayPromote judges whether the named non-voter may become a voter; caught: its
// log is near enough. commit is the leader's commit index before it was asked.
func MayPromote(group []Member, name string, commit uint64, level uint32) (already, caught bool, refusal *Refusal) {
	m, ok := Find(group, name)
	switch {
	case !ok:
		return false, false, refuse("server %s is not a member yet; start it with an empty data directory and --join", name)
	case m.Voter:
		return true, true, nil
	case !m.Live:
		return false, false, refuse("server %s cannot become a voter: %s", name, m.Problem)
	case m.Level < level:
		return false, false, refuse("server %s knows feature level %d and the region uses %d; upgrade its program", name, m.Level, level)
	case m.Behind(commit) > MaxLag:
		return false, false, nil
	}
	q := quorumOf(group, "")
	q.voters++
	q.live++
	if q.spare() < 0 {
		return false, true, refuse("with server %s the group would have %d voters, of which %d answer, too few to decide: %s; bring them back or remove them first",
			name, q.voters, q.live, strings.Join(q.dead, ", "))
	}
	return false, true, nil
}

// MayRemove judges whether the named member may leave the group; already: it is
// no member. A raftID that is not empty must be the member's.
func MayRemove(group []Member, name, raftID string, force bool) (already bool, refusal *Refusal) {
	m, ok := Find(group, name)
	switch {
	case !ok:
		return true, nil
	case raftID != "" && m.RaftID != raftID:
		return false, refuse("server %s is a member as %s, not as %s any more; list the servers and decide again", name, m.RaftID, raftID)
	case !m.Voter:
		return false, nil
	}
	before, after := quorumOf(group, ""), quorumOf(group, m.RaftID)
	switch {
	case after.voters == 0:
		return false, refuse("server %s is the only voter: without it the region is gone", name)
	case after.spare() < 0:
		return false, refuse("without server %s the group would have %d voters, of which %d answer, too few to decide: %s; bring them back, or add a server first",
			name, after.voters, after.live, strings.Join(after.dead, ", "))
	case after.spare() == 0 && before.spare() > 0 && !force:
		return false, refuse("without server %s the group of %d voters would survive no loss, and now it survives one; "+
			"add a server first (`headlease server replace` does both), or use --force", name, after.voters)
	}
	return false, nil
}

// MayLead judges whether leadership may be handed to the named member; already:
// it leads.
func MayLead(group []Member, name string) (already bool, refusal *Refusal) {
	m, ok := Find(group, name)
	switch {
	case !ok:
		return false, refuse("server %s is not a member of the group; `headlease server list` shows who is", name)
	case m.Leader:
		return true, nil
	case !m.Voter:
		return false, refuse("server %s is not a voter, and only a voter can lead; make it one with `headlease server add %s`", name, name)
	case !m.Live:
		return false, refuse("server %s cannot take over: %s", name, m.Problem)
	}
	return false, nil
}

// Successor is the live voter with the most of the log, to which the leader may
// hand over; false: there is none.
func Successor(group []Member) (Member, bool) {
	var best Member
	found := false
	for _, m := range group {
		if m.Voter && m.Live && !m.Leader && (!found || m.LastIndex > best.LastIndex) {
			best, found = m, true
		}
	}
	return best, found
}

// Level is the feature level to raise to, given the committed one and the one
// that the leader's own program knows; false: not now. Every member counts,
// voter or not, and one that did not answer holds the level back: a partial
// answer raises nothing.
func Level(group []Member, committed, own uint32) (uint32, bool) {
	level := own
	for _, m := range group {
		if !m.Live {
			return 0, false
		}
		level = min(level, m.Level)
	}
	return level, len(group) > 0 && level > committed
}

// Warning is what an operator should know of a group of so many voters; empty:
// nothing.
func Warning(voters int) string {
	switch {
	case voters == 1:
		return "1 voter: its death is the region's; for development only, use 3 or 5"
	case voters%2 == 0:
		return fmt.Sprintf("%d voters, an even number, which survives no more losses than %d; add or remove one", voters, voters-1)
	case voters > 5:
		return fmt.Sprintf("%d voters: each commit waits for %d disks; 5 survive two losses", voters, majority(voters))
	}
	return ""
}
