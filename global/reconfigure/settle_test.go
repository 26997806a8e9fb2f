package reconfigure

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// voters are the shipped registers of a configuration, by voter and partition.
type voters map[string]map[string]register.Register

func (vs voters) again(c *pb.ClusterConfiguration, v *pb.Voter, req *pb.AcceptAgainRequest) *pb.AcceptAgainResponse {
	res := &pb.AcceptAgainResponse{Voter: v}
	for _, it := range req.GetItems() {
		r := vs[v.GetId()][it.GetPartition()]
		d := r.Accept(register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue()))
		switch d.Action {
		case register.Write:
			rec, _ := register.Update(r.Record, d.Change)
			r = r.Written(instant.Instant(time.Second), rec)
		case register.Renew:
			r, _ = r.Renewed(instant.Instant(time.Second), register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue()))
		}
		vs[v.GetId()][it.GetPartition()] = r
		res.Answers = append(res.Answers, register.AcceptAnswerOf(it.GetPartition(), r, 0, d.Rule))
	}
	return res
}

func (vs voters) prepare(v *pb.Voter, req *pb.PrepareAgainRequest) *pb.PrepareAgainResponse {
	res := &pb.PrepareAgainResponse{Voter: v}
	for _, p := range req.GetPartitions() {
		r := vs[v.GetId()][p]
		d := r.PrepareAgain(register.BallotOf(req.GetBallot()))
		if d.Action == register.Write {
			rec, _ := register.Update(r.Record, d.Change)
			r = r.Written(0, rec)
			vs[v.GetId()][p] = r
		}
		res.Answers = append(res.Answers, register.PrepareAnswerOf(p, r, 0, d.Rule, register.VerdictUnknown))
	}
	return res
}

func (vs voters) describe(v *pb.Voter) *pb.DescribeVoterResponse {
	d := &pb.DescribeVoterResponse{}
	for p, r := range vs[v.GetId()] {
		d.Registers = append(d.Registers, &pb.RegisterStatus{Partition: p, Register: r.Proto()})
	}
	return d
}

// TestRule4bEveryRegisterIsAcceptedAgainByAMajority from whatever records: what
// a majority had accepted stays, owner and epoch never change, the accepts
// restart the clocks, and an answer of another incarnation counts nowhere.
func TestRule4bEveryRegisterIsAcceptedAgainByAMajority(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		_, c := example(t)
		c.Version = 2
		need := config.QuorumOf(c).Voters
		first := register.Ballot{Round: 1, Region: "eu", Incarnation: 100}
		second := register.Ballot{Round: 2, Region: "us", Incarnation: 101}
		byFirst := register.Value{Owner: register.Region{Name: "eu", Incarnation: 100}, Epoch: 1, D: 4 * time.Second}
		vs := voters{}
		chosen := map[string]register.Value{}
		for _, p := range c.GetPartitions() {
			took := rapid.SliceOfN(rapid.Bool(), len(c.GetVoters()), len(c.GetVoters())).Draw(rt, "took first "+p.GetName())
			n := 0
			for _, yes := range took {
				if yes {
					n++
				}
			}
			bySecond := register.Value{Owner: register.Region{Name: "us", Incarnation: 101}, Epoch: 2, D: 4 * time.Second}
			if n >= need { // it was chosen, so every later ballot carries it on
				bySecond = byFirst
				chosen[p.GetName()] = byFirst
			}
			for i, v := range c.GetVoters() {
				r := register.Register{}
				if took[i] {
					r.Record = register.Record{Promised: first, Accepted: first, Value: byFirst}
				}
				switch rapid.IntRange(0, 2).Draw(rt, "then") {
				case 1:
					r.Record = register.Record{Promised: second, Accepted: second, Value: bySecond}
				case 2:
					r.Promised = register.Ballot{Round: 9, Region: "us", Incarnation: 101}
				}
				if vs[v.GetId()] == nil {
					vs[v.GetId()] = map[string]register.Register{}
				}
				vs[v.GetId()][p.GetName()] = r
			}
		}
		s := NewSettling(c, 77)
		heard := func(what string) bool { return rapid.IntRange(0, 3).Draw(rt, what) > 0 }
		deliver := func(req *pb.AcceptAgainRequest) {
			for _, v := range c.GetVoters() {
				if req == nil || !heard("request") {
					continue
				}
				res := vs.again(c, v, req)
				if rapid.IntRange(0, 9).Draw(rt, "stranger") == 0 {
					res.Voter = &pb.Voter{Id: v.GetId(), Incarnation: 1}
					s.Accepted(res)
				} else if heard("answer") {
					s.Accepted(res)
					s.Accepted(res) // twice
				}
			}
		}
		for range 200 {
			for _, v := range c.GetVoters() {
				if heard("describe") {
					s.Found(vs.describe(v))
				}
			}
			deliver(s.Resend())
			if len(s.Open()) == 0 {
				break
			}
			req := s.Prepare()
			for _, v := range c.GetVoters() {
				if heard("prepare") {
					s.Promised(vs.prepare(v, req))
				}
			}
			deliver(s.Accept())
		}
		if open := s.Open(); len(open) > 0 {
			rt.Fatalf("not settled: %v", open)
		}
		for _, p := range c.GetPartitions() {
			by := map[register.Ballot]int{}
			var values []register.Value
			for _, v := range c.GetVoters() {
				r := vs[v.GetId()][p.GetName()]
				if r.Since == instant.Instant(time.Second) && !r.Accepted.IsZero() {
					if by[r.Accepted]++; by[r.Accepted] >= need {
						values = append(values, r.Value)
					}
				}
			}
			if len(values) == 0 {
				rt.Fatalf("%s: no ballot was accepted again by a majority: %v", p.GetName(), by)
			}
			if want, ok := chosen[p.GetName()]; ok && values[0] != want {
				rt.Fatalf("%s: %+v was chosen, %+v is now", p.GetName(), want, values[0])
			}
		}
	})
}

func TestSettlingWritesAReleasedValueOfNoEpochWhereThereIsNone(t *testing.T) {
	_, c := example(t)
	s := NewSettling(c, 77)
	if req := s.Resend(); req != nil {
		t.Fatal(req)
	}
	req := s.Prepare()
	vs := voters{}
	for _, v := range c.GetVoters() {
		vs[v.GetId()] = map[string]register.Register{}
		s.Promised(vs.prepare(v, req))
	}
	acc := s.Accept()
	if len(acc.GetItems()) != 2 || acc.GetItems()[0].GetValue().GetEpoch() != 0 || acc.GetItems()[0].GetValue().GetOwner() != "" || config.CheckAcceptAgain(acc) != nil {
		t.Fatal(acc, config.CheckAcceptAgain(acc))
	}
	for _, v := range c.GetVoters()[:3] {
		s.Accepted(vs.again(c, v, acc))
	}
	if open := s.Open(); len(open) > 0 {
		t.Fatal(open)
	}
	// Whoever campaigns now may take it at once, with epoch 1 or more.
	r := vs["region/eu"]["east"]
	if d := r.Prepare(0, register.PrepareInput{Candidate: register.Region{Name: "us", Incarnation: 101}, Dry: true}); d.Action != register.Answer {
		t.Error(d)
	}
}

func TestSettlingReportsAnAlarm(t *testing.T) {
	_, c := example(t)
	s := NewSettling(c, 77)
	s.Found(&pb.DescribeVoterResponse{Registers: []*pb.RegisterStatus{{Partition: "west", Register: &pb.Register{Alarm: "two values"}}}})
	if p, alarm := s.Alarm(); p != "west" || alarm != "two values" {
		t.Error(p, alarm)
	}
}

func TestRule4aStoredByMajoritiesOfBoth(t *testing.T) {
	_, c := example(t)
	next := config.WithVoter(c, voter("witness/w4", 7)) // 5 before, 6 now: 3 and 4
	all := next.GetVoters()
	for name, tc := range map[string]struct {
		by   []*pb.Voter
		want bool
	}{
		"four of the six, three of the five": {append(slices.Clone(all[:3]), all[5]), true},
		"three of both":                      {all[:3], false},
		"the new one counts now only":        {append(slices.Clone(all[:2]), all[5]), false},
		"another incarnation":                {append(slices.Clone(all[:3]), voter("witness/w4", 8)), false},
		"one counts once":                    {[]*pb.Voter{all[0], all[0], all[0], all[0]}, false},
		"nobody":                             {nil, false},
	} {
		if got := Stored(next, tc.by); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	if !Stored(c, all[:3]) || Stored(c, all[:2]) {
		t.Error("version 1 needs a majority of its own voters")
	}
}
