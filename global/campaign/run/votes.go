package run

import (
	"context"
	"strings"
	"time"

	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// minPatience is how long a round waits at least before it goes out again on
// a fresh connection [F50].
const minPatience = 1500 * time.Millisecond

// answered is a voter's answer, ready for the leader.
type answered struct {
	state *pb.VoterState
	feed  func(l *campaign.Leader, now instant.Instant, voter string, inc register.Incarnation, round uint64) []campaign.Effect
}

func prepareAnswer(res *pb.PrepareResponse) answered {
	answers := make([]campaign.PrepareAnswer, 0, len(res.GetAnswers()))
	for _, a := range res.GetAnswers() {
		answers = append(answers, campaign.PrepareAnswer{
			Partition: a.GetPartition(), Rule: ruleOf(a.GetRefusal()), Record: register.RecordOf(a.GetRegister()),
			Remaining: time.Duration(a.GetRemainingNs()), Verdict: register.VerdictOf(a.GetVerdict()),
		})
	}
	return answered{res.GetState(), func(l *campaign.Leader, now instant.Instant, voter string, inc register.Incarnation, round uint64) []campaign.Effect {
		return l.PrepareAnswered(now, voter, inc, round, answers)
	}}
}

func acceptAnswer(res *pb.AcceptResponse) answered {
	answers := make([]campaign.AcceptAnswer, 0, len(res.GetAnswers()))
	for _, a := range res.GetAnswers() {
		answers = append(answers, campaign.AcceptAnswer{
			Partition: a.GetPartition(), Rule: ruleOf(a.GetRefusal()), Record: register.RecordOf(a.GetRegister()),
		})
	}
	return answered{res.GetState(), func(l *campaign.Leader, now instant.Instant, voter string, inc register.Incarnation, round uint64) []campaign.Effect {
		return l.AcceptAnswered(now, voter, inc, round, answers)
	}}
}

func ruleOf(r *pb.Refusal) register.Rule {
	if r == nil {
		return register.RuleNone
	}
	return register.RuleOf(r.GetRule())
}

// send asks a voter in a goroutine of the leader and asks again, with patience,
// as long as the round is open. s.mu is held.
func (s *Shell) send(voter campaign.Voter, round uint64, ask func(context.Context, Voter) (answered, error)) {
	leader, ctx := s.leader, s.asking
	target, own := s.cfg.Own, voter.ID == "region/"+s.self.Name
	if !own {
		if target = s.cfg.Remote.Voter(voter.ID); target == nil {
			s.cfg.Logger.Error("a voter of the configuration is not in the cluster file", "voter", voter.ID)
			return
		}
	}
	seen := s.lives[voter.ID]
	s.work.Go(func() {
		for wait := 50 * time.Millisecond; ; wait = min(2*wait, 500*time.Millisecond) {
			attempt, cancel := context.WithTimeout(ctx, max(minPatience, 3*s.cfg.Remote.RTT(voter.ID)))
			a, err := ask(attempt, target)
			cancel()
			if err == nil {
				s.answer(leader, voter, round, own, seen, a)
				return
			}
			s.cfg.Logger.Debug("vote unanswered", "voter", voter.ID, "round", round, "error", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
			if !s.open(leader, round) {
				return
			}
		}
	})
}

func (s *Shell) open(leader *campaign.Leader, round uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leader == leader && leader.Open(round)
}

func (s *Shell) answer(leader *campaign.Leader, voter campaign.Voter, round uint64, own bool, seen life, a answered) {
	st := a.state
	if st.GetVoter().GetId() != voter.ID || st.GetRound() != round {
		s.cfg.Logger.Warn("vote of another voter or round", "asked", voter.ID, "round", round, "answered", st.GetVoter().GetId(), "its-round", st.GetRound())
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leader != leader || (!own && !s.lived(voter, seen, st)) {
		return
	}
	s.step(leader, func(l *campaign.Leader, now instant.Instant) []campaign.Effect {
		return a.feed(l, now, voter.ID, register.Incarnation(st.GetVoter().GetIncarnation()), round)
	})
}

// life is the last life and count of durable writes seen of a voter under one
// incarnation [F5].
type life struct {
	incarnation  register.Incarnation
	life, writes uint64
}

// livesOf returns what the view has of the voters, with and without their
// writes.
func livesOf(view state.View) (lives, recorded map[string]life) {
	lives, recorded = map[string]life{}, map[string]life{}
	for v := range view.Voters() {
		lives[v.ID] = life{v.Incarnation, v.Life, v.Writes}
		recorded[v.ID] = life{incarnation: v.Incarnation, life: v.Life}
	}
	return lives, recorded
}

// lived reports whether a voter's answer may count: its life is the one seen
// before the question was sent, or a later one of the same line, and it has not
// forgotten writes that were seen by then. The life is committed, so that a
// successor of this leader knows it. s.mu is held.
func (s *Shell) lived(voter campaign.Voter, seen life, st *pb.VoterState) bool {
	now := life{register.Incarnation(st.GetVoter().GetIncarnation()), st.GetLife(), st.GetWrites()}
	if now.incarnation != voter.Incarnation {
		return true // the leader does not count it, and says so
	}
	switch {
	case seen.incarnation != now.incarnation:
	case now.writes < seen.writes, now.life != seen.life && now.writes == seen.writes: // each start is a write
		s.cfg.Logger.Error("a voter forgot durable writes; its votes are not counted: remove it and add it again",
			"voter", voter.ID, "writes", now.writes, "seen", seen.writes)
		return false
	case now.life != seen.life && seen.life != 0 && !st.GetContinues():
		s.cfg.Logger.Error("a voter's line of lives broke (its data was copied or rolled back); its votes are not counted: remove it and add it again",
			"voter", voter.ID, "life", now.life, "seen", seen.life)
		return false
	}
	switch old := s.lives[voter.ID]; {
	case old.incarnation != now.incarnation || old == seen || now.life == old.life && now.writes > old.writes:
		s.lives[voter.ID] = now
	default: // overtaken by the answer to another question
		return true
	}
	s.record(st)
	return true
}

// record commits a voter's life if it is another than the committed one. s.mu
// is held.
func (s *Shell) record(st *pb.VoterState) {
	id := st.GetVoter().GetId()
	now := life{incarnation: register.Incarnation(st.GetVoter().GetIncarnation()), life: st.GetLife()}
	if s.recorded[id] == now {
		return
	}
	s.recorded[id] = now // or on its way
	s.propose(&pb.Command{Term: s.term, Kind: &pb.Command_RecordVoters{RecordVoters: &pb.RecordVotersCommand{Voters: []*pb.VoterRecord{{
		Voter: st.GetVoter(), Life: st.GetLife(), Writes: st.GetWrites(),
	}}}}},
		func(*campaign.Leader, instant.Instant, *pb.CommandResult) []campaign.Effect { return nil },
		func(*campaign.Leader, instant.Instant) []campaign.Effect {
			delete(s.recorded, id) // the next answer tries again
			return nil
		})
}

func isWitness(voter string) bool { return strings.HasPrefix(voter, "witness/") }
