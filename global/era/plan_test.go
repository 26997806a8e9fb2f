package era

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// cluster has three regions and three witnesses, and one partition.
func cluster() *pb.ClusterConfiguration {
	c := &pb.ClusterConfiguration{
		ClusterId: "c", ClusterName: "c", Version: 4, Shards: 1, DNs: int64(4 * time.Second),
		Partitions: []*pb.PartitionSpec{{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 0}}, Prefer: []string{"eu", "us", "ap"}}},
	}
	for i, id := range []string{"region/eu", "region/us", "region/ap", "witness/w1", "witness/w2", "witness/w3"} {
		c.Voters = append(c.Voters, &pb.Voter{Id: id, Incarnation: uint64(i + 1)})
	}
	return c
}

// factsOf are those of a voter of c, of each server of a region of one or three.
func factsOf(c *pb.ClusterConfiguration, id string, epoch uint32) []*pb.VoterFacts {
	f := &pb.VoterFacts{
		Cluster: c.GetClusterName(), Voter: &pb.Voter{Id: id, Incarnation: config.VoterIncarnation(c, id)}, Configuration: c,
		Epochs: []*pb.EraEpoch{{Partition: "p", Epoch: epoch, DNs: c.GetDNs()}},
	}
	if config.IsWitness(id) {
		return []*pb.VoterFacts{f}
	}
	var out []*pb.VoterFacts
	for i := range 3 {
		g := proto.CloneOf(f)
		g.Server, g.Group, g.FeatureLevel = fmt.Sprintf("s%d", i), []string{"s0", "s1", "s2"}, Level
		out = append(out, g)
	}
	return out
}

// others are the voters of c that are not named.
func others(c *pb.ClusterConfiguration, named ...string) (out []string) {
	for _, v := range c.GetVoters() {
		if !slices.Contains(named, v.GetId()) {
			out = append(out, v.GetId())
		}
	}
	return out
}

func TestF16PlanRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		bend func(in *Input)
		want string
	}{
		"nobody":          {func(in *Input) { in.Facts = nil }, "no facts are given"},
		"no names":        {func(in *Input) { in.Destroyed = nil }, "witness/w3 is neither named as destroyed nor are its facts given"},
		"a stranger":      {func(in *Input) { in.Destroyed = append(in.Destroyed, "witness/w9") }, "witness/w9 is named as destroyed and is no voter"},
		"named and given": {func(in *Input) { in.Destroyed = append(in.Destroyed, "region/eu") }, "it is one or the other"},
		"a majority is left": {func(in *Input) {
			in.Facts = slices.Concat(in.Facts, factsOf(cluster(), "witness/w2", 1), factsOf(cluster(), "witness/w3", 1))
			in.Destroyed = []string{"region/us", "region/ap"}
		}, "not needed: 4 of 6 voters are left"},
		"one server of three": {func(in *Input) { in.Facts = slices.Delete(in.Facts, 0, 2) }, "a quorum of s0, s1, s2 is needed"},
		"made anew": {func(in *Input) {
			for _, f := range in.Facts[:3] {
				f.Voter = &pb.Voter{Id: "region/eu", Incarnation: 99}
			}
		}, "it was made anew"},
		"an old copy beside": {func(in *Input) { in.Facts[0].Voter = &pb.Voter{Id: "region/eu", Incarnation: 99} }, "one of the two is old data"},
		"another cluster":    {func(in *Input) { in.Facts[3].Configuration.ClusterId = "x" }, "give the facts of one cluster"},
		"not configured":     {func(in *Input) { in.Facts[3].Configuration = nil }, "it is no voter yet"},
		"an old program":     {func(in *Input) { in.Facts[0].FeatureLevel = 2 }, "eras need 3"},
		"no region":          {func(in *Input) { in.Facts = in.Facts[3:]; in.Destroyed = append(in.Destroyed, "region/eu") }, "no region survives"},
		"epochs used up":     {func(in *Input) { in.Facts[3].Epochs[0].Epoch = uint32(fence.MaxEpoch) - uint32(Jump) }, "leaves no room"},
		"no id":              {func(in *Input) { in.ID = 0 }, "make a random one"},
		"eras of two sides": {func(in *Input) {
			in.Facts[0].Configuration.Era, in.Facts[3].Configuration.Era = &pb.Era{Counter: 1, Id: 1}, &pb.Era{Counter: 1, Id: 2}
		}, "choose one side"},
		"removed in between": {func(in *Input) {
			c := config.WithoutVoter(cluster(), "witness/w1")
			for _, f := range in.Facts[:3] {
				f.Configuration = c
			}
		}, "witness/w1 is no voter of configuration 5"},
	} {
		in := Input{Facts: slices.Concat(factsOf(cluster(), "region/eu", 7), factsOf(cluster(), "witness/w1", 9)), Destroyed: others(cluster(), "region/eu", "witness/w1"), ID: 77}
		for i, f := range in.Facts {
			in.Facts[i] = proto.CloneOf(f)
		}
		tc.bend(&in)
		if p, _, err := Plan(in); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, %v; want %q", name, p, err, tc.want)
		}
	}
}

func TestF16PlanOfTheSurvivors(t *testing.T) {
	in := Input{Facts: slices.Concat(factsOf(cluster(), "region/eu", 7), factsOf(cluster(), "witness/w1", 9)), Destroyed: others(cluster(), "region/eu", "witness/w1"), ID: 77}
	in.Facts[3].ConfigRegister = &pb.ConfigRegister{Proposed: config.WithoutVoter(cluster(), "region/ap")}
	p, notes, err := Plan(in)
	if err != nil {
		t.Fatal(err)
	}
	c := p.GetConfiguration()
	if config.EraOf(c) != (register.Era{Counter: 1, ID: 77}) || c.GetVersion() != stride+uint64(Jump) || c.GetLastDedicated() != config.FirstException+uint32(stride+uint64(Jump)) || len(c.GetVoters()) != 2 || len(c.GetDestroyedVoters()) != 4 {
		t.Errorf("%v", c)
	}
	if e := p.GetEpochs()[0]; e.GetEpoch() != uint32(stride+uint64(Jump)) { // eu is the second of its regions by name
		t.Errorf("%v", e)
	}
	if len(notes) != 1 || !strings.Contains(notes[0], "- voter region/ap") {
		t.Errorf("%q", notes)
	}
	// The steps after it are ordinary ones, and a replaced voter is declared
	// destroyed no more.
	next := config.WithVoter(c, &pb.Voter{Id: "witness/w2", Incarnation: 50})
	if err := config.CheckChange(c, next); err != nil || len(next.GetDestroyedVoters()) != 3 {
		t.Error(err, next.GetDestroyedVoters())
	}
	// One survivor has begun the era, the other one not, and the plan is lost:
	// another one takes both further.
	begun := factsOf(cluster(), "region/eu", p.GetEpochs()[0].GetEpoch())
	for _, f := range begun {
		f.Configuration = c
	}
	p, _, err = Plan(Input{Facts: slices.Concat(begun, factsOf(cluster(), "witness/w1", 9)), ID: 78})
	if err != nil || p.GetConfiguration().GetEra().GetCounter() != 2 || len(p.GetConfiguration().GetVoters()) != 2 {
		t.Error(p, err)
	}
	// Both have: there is nothing to force.
	w1 := factsOf(cluster(), "witness/w1", p.GetEpochs()[0].GetEpoch())
	w1[0].Configuration = c
	if _, _, err := Plan(Input{Facts: slices.Concat(begun, w1), ID: 78}); err == nil || !strings.Contains(err.Error(), "not needed") {
		t.Error(err)
	}
	// Unless they have met another side's, and stopped.
	for _, f := range append(begun, w1...) {
		f.EraStop = &pb.EraStop{Era: &pb.Era{Counter: 1, Id: 5}, By: "region/us"}
	}
	// The other side's voters are declared destroyed already; to name them again is
	// what the runbook says.
	for _, named := range [][]string{nil, others(cluster(), "region/eu", "witness/w1")} {
		p, _, err := Plan(Input{Facts: slices.Concat(begun, w1), Destroyed: named, ID: 78})
		if err != nil || p.GetConfiguration().GetEra().GetCounter() != 2 || len(p.GetConfiguration().GetDestroyedVoters()) != 4 {
			t.Error(named, p, err)
		}
	}
}

// drawnSide are the survivors of one side: their configuration, and what each
// has seen.
type drawnSide struct {
	ids  []string
	conf *pb.ClusterConfiguration
	seen uint32
}

func (s *drawnSide) facts() (out []*pb.VoterFacts) {
	for _, id := range s.ids {
		out = append(out, factsOf(s.conf, id, s.seen)...)
	}
	return out
}

// TestF16NoTwoSidesUseOneEpoch: a cluster in pieces, the operator of each takes
// the others for destroyed and forces a quorum. Whatever each side knew, no
// epoch, no version and no number of a shard is used by two of them; and whoever
// is forced once more, when they have met, goes on above all of them.
func TestF16NoTwoSidesUseOneEpoch(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c := cluster()
		c.Voters = append(c.Voters, &pb.Voter{Id: "region/sa", Incarnation: 7}, &pb.Voter{Id: "witness/w4", Incarnation: 8}, &pb.Voter{Id: "witness/w5", Incarnation: 9})
		before := uint32(rapid.IntRange(0, 200_000).Draw(rt, "epoch"))
		sides := make([]*drawnSide, rapid.IntRange(2, 4).Draw(rt, "sides"))
		for i, id := range rapid.Permutation([]string{"region/eu", "region/us", "region/ap", "region/sa"}).Draw(rt, "regions") {
			if i < len(sides) {
				sides[i] = &drawnSide{conf: proto.CloneOf(c), seen: before + uint32(rapid.IntRange(0, int(Jump)-1).Draw(rt, "seen"))}
				sides[i].conf.Version += uint64(rapid.IntRange(0, int(Jump)-1).Draw(rt, "versions seen"))
			}
			s := sides[i%len(sides)]
			s.ids = append(s.ids, id)
		}
		for _, w := range []string{"witness/w1", "witness/w2", "witness/w3", "witness/w4", "witness/w5"} {
			if s := sides[rapid.IntRange(0, len(sides)-1).Draw(rt, "side of "+w)]; len(s.ids) < 4 { // no majority
				s.ids = append(s.ids, w)
			}
		}
		highest := uint32(0)
		epochs, versions, shards := map[uint32]int{}, map[uint64]int{}, map[uint32]int{}
		for i, s := range sides {
			p, _, err := Plan(Input{Facts: s.facts(), Destroyed: others(c, s.ids...), ID: uint64(i + 1)})
			if err != nil {
				rt.Fatal(err)
			}
			s.conf = p.GetConfiguration()
			first := p.GetEpochs()[0].GetEpoch()
			if first < s.seen+uint32(Jump) {
				rt.Fatalf("epoch %d after %d", first, s.seen)
			}
			// All that it may use before they meet.
			for n := range uint32(Jump) {
				epochs[first+n]++
				versions[s.conf.GetVersion()+uint64(n)]++
				shards[s.conf.GetLastDedicated()+1+n]++
			}
			s.seen = first + uint32(rapid.IntRange(0, int(Jump)-1).Draw(rt, "changes of owner"))
		}
		if n := len(sides) * int(Jump); len(epochs) != n || len(versions) != n || len(shards) != n {
			rt.Fatalf("%d sides use %d epochs, %d versions and %d shards of their own", len(sides), len(epochs), len(versions), len(shards))
		}
		// Some are forced again before they meet.
		counter := uint64(1)
		for _, s := range sides {
			for n := rapid.IntRange(0, 2).Draw(rt, "more eras"); n > 0; n-- {
				p, _, err := Plan(Input{Facts: stoppedAt(s.facts(), s.conf.GetEra().GetCounter()), ID: rapid.Uint64Min(200).Draw(rt, "id")})
				if err != nil {
					rt.Fatal(err)
				}
				s.conf = p.GetConfiguration()
				s.seen = p.GetEpochs()[0].GetEpoch() + uint32(rapid.IntRange(0, int(Jump)-1).Draw(rt, "changes of owner"))
			}
			counter, highest = max(counter, s.conf.GetEra().GetCounter()), max(highest, s.seen)
		}
		for _, s := range sides {
			p, _, err := Plan(Input{Facts: stoppedAt(s.facts(), counter), ID: 100})
			if err != nil {
				rt.Fatal(err)
			}
			if first := p.GetEpochs()[0].GetEpoch(); first <= highest {
				rt.Fatalf("the side that is chosen begins at %d; %d was used", first, highest)
			}
			if got := p.GetConfiguration().GetEra().GetCounter(); got <= counter {
				rt.Fatalf("the side that is chosen has era %d; %d was used", got, counter)
			}
		}
	})
}

// stoppedAt has voters stop at an era that they have met.
func stoppedAt(facts []*pb.VoterFacts, counter uint64) []*pb.VoterFacts {
	for _, f := range facts {
		f.EraStop = &pb.EraStop{Era: &pb.Era{Counter: counter, Id: 99}}
	}
	return facts
}

// TestF16NothingOfBeforeWins whatever the survivors knew: each begins the era
// with the same register, above all that any of them has seen; nobody takes it
// before D has passed, then anybody; and no ballot of before is ever taken again.
func TestF16NothingOfBeforeWins(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c := cluster()
		ids := others(c)
		n := rapid.IntRange(1, 3).Draw(rt, "survivors")
		survivors := append([]string{"region/eu"}, rapid.Permutation(slices.DeleteFunc(ids, func(id string) bool { return id == "region/eu" })).Draw(rt, "others")[:n-1]...)
		var facts []*pb.VoterFacts
		records := map[string]register.Record{}
		highest := fence.Epoch(0)
		for _, id := range survivors {
			epoch := fence.Epoch(rapid.IntRange(0, 5000).Draw(rt, "epoch of "+id))
			highest = max(highest, epoch)
			b := register.Ballot{Round: rapid.Uint64Range(1, 1<<62).Draw(rt, "round"), Region: "us", Incarnation: 2}
			records[id] = register.Record{Promised: b, Accepted: b, Value: register.Value{Owner: register.Region{Name: "us", Incarnation: 2}, Epoch: epoch, D: time.Duration(c.GetDNs())}}
			facts = append(facts, factsOf(c, id, uint32(epoch))...)
		}
		p, _, err := Plan(Input{Facts: facts, Destroyed: others(c, survivors...), ID: rapid.Uint64Min(1).Draw(rt, "id")})
		if err != nil {
			rt.Fatal(err)
		}
		var first register.Record
		for i, id := range survivors {
			self := &pb.Voter{Id: id, Incarnation: config.VoterIncarnation(c, id)}
			v, stored, err := config.Voter{Decided: c}.BeginEra(self, p)
			if err != nil || !stored {
				rt.Fatal(stored, err)
			}
			if _, stored, err := v.BeginEra(self, p); stored || err != nil {
				rt.Fatal("again: ", stored, err)
			}
			old := records[id]
			rec, err := config.EraRecord(p, "p", old.Value.Epoch)
			if err != nil {
				rt.Fatal(err)
			}
			if i == 0 {
				first = rec
			}
			if rec != first || rec.Value.Epoch < highest+Jump || rec.Value.Check() != nil {
				rt.Fatalf("%s: %+v, others %+v, highest %d", id, rec, first, highest)
			}
			began := instant.Instant(time.Hour)
			r := register.Restart(rec, began)
			ask := register.PrepareInput{Candidate: register.Region{Name: "eu", Incarnation: 1}, Dry: true}
			d := time.Duration(c.GetDNs())
			if r.Prepare(began.Add(d-1), ask).Rule != register.RuleV2Running || r.Prepare(began.Add(d), ask).Action != register.Answer {
				rt.Fatal("D is not waited for, or for ever")
			}
			if r.Accept(old.Accepted, old.Value).Rule != register.RuleV1Ballot {
				rt.Fatal("a ballot of before is taken")
			}
		}
		for _, v := range p.GetConfiguration().GetDestroyedVoters() {
			if _, _, err := (config.Voter{Decided: c}).BeginEra(v, p); err == nil {
				rt.Fatal("a destroyed voter begins the era")
			}
		}
		if _, err := config.EraRecord(p, "p", fence.Epoch(p.GetEpochs()[0].GetEpoch())); err == nil {
			rt.Fatal("a plan made without the highest epoch is applied")
		}
	})
}

// TestF16WhoStops of two voters that meet: who is in the lower era; both when two
// operators have forced one each.
func TestF16WhoStops(t *testing.T) {
	in := func(e register.Era) config.Voter {
		c := cluster()
		c.Era = e.Proto()
		return config.Voter{Decided: c}
	}
	none, a, b, second := register.Era{}, register.Era{Counter: 1, ID: 5}, register.Era{Counter: 1, ID: 6}, register.Era{Counter: 2, ID: 4}
	for _, tc := range []struct {
		own, met register.Era
		stops    bool
	}{
		{none, none, false}, {none, a, true}, {a, none, false}, {a, b, true}, {b, a, true}, {a, a, false}, {a, second, true}, {second, b, false},
	} {
		v := in(tc.own)
		err := config.CheckVersion(v.Decided, "c", tc.met, 4)
		if (err != nil) != (tc.own != tc.met) {
			t.Errorf("%v meets %v: %v", tc.own, tc.met, err)
		}
		next, stored := v.Meet(tc.met, "region/x")
		if stored != tc.stops || (next.Stop != nil) != tc.stops {
			t.Errorf("%v meets %v: stored %v, %v", tc.own, tc.met, stored, next.Stop)
		}
		if !stored {
			continue
		}
		if _, again := next.Meet(tc.met, "region/x"); again {
			t.Error("stored twice")
		}
		if _, _, err := next.Prepare("c", tc.own, 4, config.Ballot{Round: 1, Proposer: "x"}); err == nil {
			t.Error("a stopped voter promises")
		}
		if _, _, err := next.Learn(v.Decided.GetVoters()[0], config.Next(v.Decided)); err == nil {
			t.Error("a stopped voter learns")
		}
	}
	// A voter of no era enters a later one by a plan only, and one that joins by
	// its configuration.
	later := config.Next(in(a).Decided)
	if _, _, err := in(none).Learn(later.GetVoters()[0], later); err == nil {
		t.Error("a configuration brings another era")
	}
	if _, stored, err := (config.Voter{}).Learn(later.GetVoters()[0], later); err != nil || !stored {
		t.Error(err)
	}
}
