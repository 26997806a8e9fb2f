package explore

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/reconfigure"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// The decision on one configuration: three voters, and two operators with
// different proposals and two attempts each, whose messages are lost, doubled
// and late, and who die between any two steps. Voters and counting are the
// shipped code.
const (
	dVoters    = 3
	dOperators = 2
	dAttempts  = 2
)

type decideRules struct {
	early   bool // a proposal is used as soon as one voter has accepted it [H9]
	ownOnly bool // what another one has left accepted is not finished
	forget  bool // a voter may forget its promise
}

// decideState is immutable; answers are what an operator has been told in its
// present attempt, from which the shipped Decision is built anew.
type decideState struct {
	voters   [dVoters]config.Register
	attempt  [dOperators]int
	promises [dOperators][dVoters]*config.Register
	accepts  [dOperators][dVoters]bool
	// sent has every Accept ever sent, by ballot.
	sent    map[config.Ballot]*pb.ClusterConfiguration
	decided *pb.ClusterConfiguration
}

func (s decideState) key() string {
	out := make([]byte, 0, 128)
	ballot := func(b config.Ballot) {
		out = append(out, byte(b.Round))
		out = append(append(out, b.Proposer...), 0)
	}
	reg := func(r config.Register) {
		ballot(r.Promised)
		ballot(r.Accepted)
		out = append(out, byte(len(r.Proposed.GetVoters())))
	}
	for o := range dOperators {
		out = append(out, byte(s.attempt[o]))
		for v := range dVoters {
			if s.accepts[o][v] {
				out = append(out, 'a')
			}
			if p := s.promises[o][v]; p != nil {
				reg(*p)
			}
			out = append(out, ';')
		}
		for attempt := 1; attempt <= dAttempts; attempt++ {
			out = append(out, byte(len(s.sent[config.Ballot{Round: uint64(attempt), Proposer: string(rune('p' + o))}].GetVoters())))
		}
	}
	for _, v := range s.voters {
		reg(v)
	}
	return string(append(out, byte(len(s.decided.GetVoters()))))
}

type decideWorld struct {
	rules decideRules
	// lossy: answers are lost, and messages are late and doubled.
	lossy bool
	now   *pb.ClusterConfiguration
	want  [dOperators]*pb.ClusterConfiguration
}

func newDecideWorld(rules decideRules) *decideWorld {
	w := &decideWorld{rules: rules, now: newCfgExplorer(cfgOption{chain: chainReplace}).confs[1]}
	w.want[0] = config.WithoutVoter(w.now, "witness/w")
	w.want[1] = config.WithVoter(w.now, &pb.Voter{Id: "witness/x", Incarnation: 1})
	return w
}

func (w *decideWorld) ballot(o, attempt int) config.Ballot {
	return config.Ballot{Round: uint64(attempt), Proposer: string(rune('p' + o))}
}

func (w *decideWorld) answer(v int, r config.Register) (*pb.Voter, *pb.ConfigRegister) {
	return w.now.GetVoters()[v], r.Proto()
}

// decision is operator o's, from all that it was told.
func (w *decideWorld) decision(s decideState, o int) *reconfigure.Decision {
	d := reconfigure.NewDecision(w.now, w.ballot(o, s.attempt[o]), w.want[o])
	for v, p := range s.promises[o] {
		if p != nil {
			if w.rules.ownOnly {
				p = &config.Register{Promised: p.Promised}
			}
			voter, reg := w.answer(v, *p)
			d.Promised(&pb.PrepareConfigResponse{Voter: voter, Promised: true, Register: reg})
		}
	}
	d.Accept()
	for v, yes := range s.accepts[o] {
		if yes {
			d.Accepted(&pb.AcceptConfigResponse{Voter: w.now.GetVoters()[v], Accepted: true})
		}
	}
	return d
}

// next yields every state one step on, and a violation.
func (w *decideWorld) next(s decideState, yield func(decideState, string)) {
	voter := func(v int) config.Voter { return config.Voter{Decided: w.now, Register: s.voters[v]} }
	for o := range dOperators {
		if s.attempt[o] < dAttempts {
			n := s
			n.attempt[o]++
			n.promises[o], n.accepts[o] = [dVoters]*config.Register{}, [dVoters]bool{}
			yield(n, "")
		}
		if s.attempt[o] == 0 {
			continue
		}
		b := w.ballot(o, s.attempt[o])
		for v := range dVoters {
			next, yes, err := voter(v).Prepare("c", register.Era{}, 1, b)
			if err != nil {
				panic(err)
			}
			if n := s; yes {
				n.voters[v] = next
				if w.lossy {
					yield(n, "") // the answer is lost
				}
				if s.promises[o][v] == nil {
					n.promises[o][v] = &next
					yield(n, "")
				}
			}
		}
		req := w.decision(s, o).Accept()
		if req == nil {
			continue
		}
		if s.sent[b] == nil {
			n := s
			n.sent = map[config.Ballot]*pb.ClusterConfiguration{b: req.GetProposed()}
			for k, c := range s.sent {
				n.sent[k] = c
			}
			yield(n, "")
			continue
		}
		for v := range dVoters {
			next, yes, err := voter(v).Accept("c", register.Era{}, 1, b, s.sent[b])
			if err != nil || !yes || s.accepts[o][v] {
				continue
			}
			n := s
			n.voters[v], n.accepts[o][v] = next, true
			decided, ok := w.decision(n, o).Decided()
			if w.rules.early {
				decided, ok = s.sent[b], true
			}
			bad := ""
			if ok {
				if n.decided != nil && !proto.Equal(n.decided, decided) {
					bad = "two configurations of one version are in use"
				}
				n.decided = decided
			}
			yield(n, bad)
		}
	}
	late := s.sent
	if !w.lossy {
		late = nil
	}
	for b, c := range late { // its answer is lost
		for v := range dVoters {
			if next, yes, err := voter(v).Accept("c", register.Era{}, 1, b, c); err == nil && yes && !next.Equal(s.voters[v]) {
				n := s
				n.voters[v] = next
				yield(n, "")
			}
		}
	}
	if w.rules.forget {
		for v := range dVoters {
			if s.voters[v].Promised != s.voters[v].Accepted {
				n := s
				n.voters[v].Promised = n.voters[v].Accepted
				yield(n, "")
			}
		}
	}
}

func (w *decideWorld) search(limit int) (states int, decidedSomewhere bool, bad string) {
	seen := map[string]bool{}
	queue := []decideState{{}}
	seen[queue[0].key()] = true
	for len(queue) > 0 && bad == "" && len(seen) < limit {
		s := queue[0]
		queue = queue[1:]
		decidedSomewhere = decidedSomewhere || s.decided != nil
		w.next(s, func(n decideState, b string) {
			if b != "" {
				bad = b
			}
			if k := n.key(); !seen[k] {
				seen[k] = true
				queue = append(queue, n)
			}
		})
	}
	return len(seen), decidedSomewhere, bad
}

// TestH9OneConfigurationIsDecidedPerVersion, whatever two operators do.
func TestH9OneConfigurationIsDecidedPerVersion(t *testing.T) {
	w := newDecideWorld(decideRules{})
	w.lossy = true
	states, decided, bad := w.search(max(40_000/raceShare, 10_000)) // fewer do not get to a decision
	t.Logf("%d states", states)
	if bad != "" || !decided {
		t.Errorf("decided %v, %s", decided, bad)
	}
	for name, rules := range map[string]decideRules{
		"used before it is decided": {early: true}, "a half accepted proposal is not finished": {ownOnly: true}, "a promise is forgotten": {forget: true},
	} {
		t.Run(name, func(t *testing.T) {
			states, _, bad := newDecideWorld(rules).search(400_000)
			t.Logf("%d states: %s", states, bad)
			if bad == "" {
				t.Error("not found")
			}
		})
	}
}
