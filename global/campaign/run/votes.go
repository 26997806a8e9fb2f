package run

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

const (
	// minPatience is how long a round waits at least before it goes out again on
	// a fresh connection [F50].
	minPatience = 1500 * time.Millisecond
	// maxAttempts of one question are under way at a time, none for longer than
	// maxAttempt: a voter that is far away for a while answers the first one before
	// a fresh connection is there.
	maxAttempts = 3
	maxAttempt  = 10 * time.Second
)

// patienceWith a voter at a measured round trip.
func patienceWith(rtt time.Duration) time.Duration { return max(minPatience, 3*rtt) }

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
	leader, ctx, conf := s.leader, s.asking, s.config
	target, own := s.cfg.Own, voter.ID == config.RegionVoter(s.self.Name)
	var remote RemoteVoter
	if !own {
		if remote = s.cfg.Remote.Voter(voter.ID); remote == nil {
			s.report(Problem{voter.ID, "it is not in this server's cluster file", false})
			return
		}
		target = remote
	}
	seen := s.lives[voter.ID]
	s.work.Go(func() {
		q := &question{s: s, leader: leader, voter: voter, replies: make(chan reply, maxAttempts)}
		q.longest = maxAttempt
		if own {
			q.longest = minPatience
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		q.try = func(ctx context.Context) reply {
			a, err := ask(ctx, target)
			return reply{a, err, err != nil && s.agree(ctx, leader, voter.ID, remote, conf, err)}
		}
		if a, ok := q.ask(ctx, round); ok {
			s.answer(leader, voter, round, own, seen, a)
		}
	})
}

// question to one voter in one round, until it is answered.
type question struct {
	s       *Shell
	leader  *campaign.Leader
	voter   campaign.Voter
	try     func(context.Context) reply
	longest time.Duration // of an attempt
	replies chan reply
	under   int // way
}

// reply to one attempt. taught: the voter was behind, and has now what it lacked.
type reply struct {
	answered
	err    error
	taught bool
}

func (q *question) begin(ctx context.Context) {
	if q.under == maxAttempts {
		return
	}
	q.under++
	q.s.work.Go(func() {
		attempt, cancel := context.WithTimeout(ctx, q.longest)
		defer cancel()
		q.replies <- q.try(attempt) // has room for all that are under way
	})
}

// ask returns the first answer; ok is false when the round is over, or ctx. It
// asks again when an attempt fails, after a pause that grows, and beside those
// under way when they stay silent.
func (q *question) ask(ctx context.Context, round uint64) (a answered, ok bool) {
	q.begin(ctx)
	patience := func() time.Duration { return patienceWith(q.s.cfg.Remote.RTT(q.voter.ID)) }
	silence := time.NewTimer(patience())
	defer silence.Stop()
	for pause := 50 * time.Millisecond; ; {
		select {
		case <-ctx.Done():
			return answered{}, false
		case <-silence.C:
			q.s.unanswered(q.leader, q.voter.ID, errSilent)
		case r := <-q.replies:
			q.under--
			if r.err == nil {
				return r.answered, true
			}
			if !r.taught {
				q.s.unanswered(q.leader, q.voter.ID, r.err)
				select {
				case <-ctx.Done():
					return answered{}, false
				case <-time.After(pause):
				}
				pause = min(2*pause, 500*time.Millisecond)
			}
		}
		if !q.s.open(q.leader, round) {
			return answered{}, false
		}
		q.begin(ctx)
		silence.Reset(patience())
	}
}

var errSilent = errors.New("it does not answer")

// agree does what a refusal asks for that was about versions: it stores the
// newer configuration here, or gives the voter the one that the question was
// asked under, which is decided. It reports whether it did the latter.
func (s *Shell) agree(ctx context.Context, leader *campaign.Leader, id string, remote RemoteVoter, conf *pb.ClusterConfiguration, err error) bool {
	behind := false
	for _, detail := range status.Convert(err).Details() {
		switch d := detail.(type) {
		case *pb.VersionMismatch:
			if d.GetNewer() != nil {
				s.learn(leader, id, d.GetNewer())
				return false
			}
			behind = d.GetVersion() < conf.GetVersion()
		case *pb.EraMismatch:
			s.meet(leader, id, register.EraOf(d.GetEra()))
			return false
		case *pb.ErrorDetail:
			behind = behind || d.GetUninitialised() != nil
		}
	}
	if !behind || remote == nil {
		return false
	}
	res, err := remote.Configure(ctx, &pb.ConfigureRequest{Configuration: conf})
	if err != nil {
		s.cfg.Logger.Warn("a voter that is behind does not take the configuration", "voter", id, "version", conf.GetVersion(), "error", err)
		return false
	}
	s.cfg.Logger.Info("gave a voter the configuration", "voter", id, "version", res.GetVersion())
	return true
}

// meet ends this region's part in its era when a voter is in another one that
// is not below it: what it holds and proposes is of an era that is over, or of
// one of two [F16].
func (s *Shell) meet(leader *campaign.Leader, voter string, era register.Era) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leader != leader || s.met == era || !(&config.EraError{Own: config.EraOf(s.config), Theirs: era}).Stops() {
		return
	}
	s.met = era
	s.propose(&pb.Command{Kind: &pb.Command_StopInEra{StopInEra: &pb.StopInEraCommand{Stop: &pb.EraStop{Era: era.Proto(), By: voter}}}},
		func(*campaign.Leader, instant.Instant, *pb.CommandResult) []campaign.Effect { return nil },
		func(*campaign.Leader, instant.Instant) []campaign.Effect {
			s.met = register.Era{} // the next refusal tries again
			return nil
		})
}

// learn stores a newer configuration that a voter has attached to a refusal:
// nobody gives one out before it is decided.
func (s *Shell) learn(leader *campaign.Leader, from string, c *pb.ClusterConfiguration) {
	if err := config.Check(c); err != nil {
		s.cfg.Logger.Error("a voter gave out a configuration that is none", "voter", from, "error", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leader != leader || c.GetClusterId() != s.config.GetClusterId() || config.EraOf(c) != config.EraOf(s.config) || c.GetVersion() <= max(s.config.GetVersion(), s.learning) {
		return
	}
	s.learning = c.GetVersion()
	s.cfg.Logger.Info("learnt of a newer configuration", "voter", from, "version", c.GetVersion(), "own", s.config.GetVersion())
	s.propose(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: c}}},
		func(*campaign.Leader, instant.Instant, *pb.CommandResult) []campaign.Effect { return nil },
		func(*campaign.Leader, instant.Instant) []campaign.Effect {
			s.learning = 0 // the next refusal tries again
			return nil
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
		s.notCounted(voter.ID, fmt.Sprintf("its data was made anew: it has incarnation %x, the configuration has %x", uint64(now.incarnation), uint64(voter.Incarnation)))
		return false
	}
	switch {
	case seen.incarnation != now.incarnation:
	case now.writes < seen.writes, now.life != seen.life && now.writes == seen.writes: // each start is a write
		s.notCounted(voter.ID, "it forgot durable writes")
		return false
	case now.life != seen.life && seen.life != 0 && !st.GetContinues():
		s.notCounted(voter.ID, "its line of lives broke: its data was copied or rolled back")
		return false
	}
	delete(s.problems, voter.ID)
	switch old := s.lives[voter.ID]; {
	case old.incarnation != now.incarnation || old == seen || now.life == old.life && now.writes > old.writes:
		s.lives[voter.ID] = now
	default: // overtaken by the answer to another question
		return true
	}
	s.record(st)
	return true
}

// notCounted reports a vote that does not count. s.mu is held.
func (s *Shell) notCounted(voter, why string) {
	s.uncounted.WithLabelValues(voter).Inc()
	s.report(Problem{voter, why, true})
}

// report keeps a problem for the status and logs it once. s.mu is held.
func (s *Shell) report(p Problem) {
	old := s.problems[p.Voter]
	s.problems[p.Voter] = p
	switch {
	case p.Uncounted && old != p:
		s.cfg.Logger.Error("a voter's votes are not counted; replace it", "voter", p.Voter, "why", p.Text)
	case old.Voter == "":
		s.cfg.Logger.Warn("a voter does not answer", "voter", p.Voter, "why", p.Text)
	}
}

// unanswered reports that a voter did not answer in time, or refused.
func (s *Shell) unanswered(leader *campaign.Leader, voter string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leader == leader && !errors.Is(err, context.Canceled) && status.Code(err) != codes.Canceled {
		s.report(Problem{voter, link.Reason(err), false})
	}
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
