package campaign

import (
	"slices"
	"testing"

	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// reconfigure gives every leader of the mesh a changed configuration.
func (m *mesh) reconfigure(change func(*Config)) {
	for _, name := range []string{"eu", "us"} {
		l := m.leaders[name]
		if l == nil {
			continue
		}
		cfg := *l.cfg
		cfg.Voters, cfg.Partitions = slices.Clone(cfg.Voters), slices.Clone(cfg.Partitions)
		change(&cfg)
		for _, v := range cfg.Voters {
			if m.voters[v.ID] == nil {
				m.voters[v.ID] = map[string]*register.Register{}
			}
			for _, p := range cfg.Partitions {
				if m.voters[v.ID][p.Name] == nil {
					m.voters[v.ID][p.Name] = &register.Register{}
				}
			}
		}
		own := make([]Own, len(cfg.Partitions))
		for i, p := range cfg.Partitions {
			if m.own[name][p.Name] == nil {
				m.own[name][p.Name] = &Own{}
			}
			own[i] = *m.own[name][p.Name]
		}
		effects, err := l.Reconfigure(m.now, cfg, own)
		if err != nil {
			m.t.Fatal(err)
		}
		m.do(name, effects)
	}
}

func without(id string) func(*Config) {
	return func(c *Config) {
		c.Voters = slices.DeleteFunc(c.Voters, func(v Voter) bool { return v.ID == id })
	}
}

func with(v Voter) func(*Config) { return func(c *Config) { c.Voters = append(c.Voters, v) } }

// TestOwnerHoldsOnThroughAReplacement: the head lease never ends while one
// voter is added and another removed, and the epoch stays.
func TestOwnerHoldsOnThroughAReplacement(t *testing.T) {
	m := newMesh(t, testConfig(nil), testConfig(us))
	m.run(10 * sec)
	held := func(when string) {
		t.Helper()
		if r, e := m.holder("p"); r != "eu" || e != 1 || len(m.log) != 1 {
			t.Fatalf("%s: holder %q epoch %d, log %v", when, r, e, m.log)
		}
	}
	m.reconfigure(with(Voter{"witness/w2", 7, true}))
	held("w2 joined")
	if rec := m.voters["witness/w2"]["p"].Record; rec.Value.Epoch != 1 {
		t.Errorf("the joined voter was not sent the value at once: %+v", rec)
	}
	for range 50 {
		m.run(200 * msec)
		held("with w2")
	}
	m.reconfigure(without("witness/w1"))
	m.down["witness/w1"] = true
	for range 50 {
		m.run(200 * msec)
		held("without w1")
	}
	m.down["region/us"] = true // eu and w2 are two of three
	for range 50 {
		m.run(200 * msec)
		held("without w1 and us")
	}
}

// collect keeps the SendAccepts of effects.
func accepts(effects []Effect) (out []SendAccept) {
	for _, e := range effects {
		if a, ok := e.(SendAccept); ok {
			out = append(out, a)
		}
	}
	return out
}

func heldUntil(effects []Effect) (until instant.Instant) {
	for _, e := range effects {
		if h, ok := e.(Held); ok {
			until = h.Until
		}
	}
	return until
}

// resumed is eu's leader with epoch 1 at a recorded ballot, and its first
// round.
func resumed(t *testing.T, change func(*Config)) (*Leader, []SendAccept) {
	t.Helper()
	b := register.Ballot{Round: 3, Region: "eu", Incarnation: 1}
	v := register.Value{Owner: region("eu"), Epoch: 1, D: 4 * sec}
	l, err := New(testConfig(change), []Own{{Record: register.Record{Promised: b, Accepted: b, Value: v}, Live: 1, Floor: 1}}, instant.Instant(sec))
	if err != nil {
		t.Fatal(err)
	}
	return l, accepts(l.Tick(instant.Instant(sec)))
}

// TestH10AnswersAreCountedPerVersion: what was answered to a round of the
// configuration before does not count, neither by its number nor towards the
// round of the next.
func TestH10AnswersAreCountedPerVersion(t *testing.T) {
	five := func(c *Config) {
		c.Voters = append(c.Voters, Voter{"witness/w2", 1, true}, Voter{"witness/w3", 1, true})
	}
	l, first := resumed(t, five)
	yes := []AcceptAnswer{{Partition: "p"}}
	now := instant.Instant(sec)
	for _, id := range []string{"region/eu", "witness/w1"} {
		if until := heldUntil(l.AcceptAnswered(now, id, 1, first[0].Round, yes)); until != 0 {
			t.Fatalf("two of five are a majority: %v", until)
		}
	}
	cfg := testConfig(five)
	without("witness/w3")(&cfg) // four voters, majority 3
	effects, err := l.Reconfigure(now, cfg, []Own{{}})
	if err != nil {
		t.Fatal(err)
	}
	second := accepts(effects)
	if len(second) != 4 || second[0].Round == first[0].Round || second[0].Items[0].Ballot != first[0].Items[0].Ballot {
		t.Fatalf("the value is sent again to the four, at the same ballot, in a round of its own: %v", second)
	}
	if until := heldUntil(l.AcceptAnswered(now, "witness/w2", 1, first[0].Round, yes)); until != 0 {
		t.Error("an answer to the round before counted")
	}
	for i, id := range []string{"region/eu", "witness/w2", "region/us"} {
		until := heldUntil(l.AcceptAnswered(now, id, 1, second[0].Round, yes))
		if (until != 0) != (i == 2) {
			t.Errorf("after %d answers under the new configuration: held until %v", i+1, until)
		}
	}
}

func TestCampaignBeginsAnewUnderANewConfiguration(t *testing.T) {
	l, err := New(testConfig(nil), []Own{{}}, 0)
	if err != nil {
		t.Fatal(err)
	}
	prepares := func(effects []Effect) (out []SendPrepare) {
		for _, e := range effects {
			if p, ok := e.(SendPrepare); ok {
				out = append(out, p)
			}
		}
		return out
	}
	dry := prepares(l.Tick(0))
	yes := []PrepareAnswer{{Partition: "p"}}
	l.PrepareAnswered(0, "region/eu", 1, dry[0].Round, yes)
	cfg := testConfig(with(Voter{"witness/w2", 1, true}))
	effects, err := l.Reconfigure(0, cfg, []Own{{}})
	if err != nil {
		t.Fatal(err)
	}
	again := prepares(effects)
	if len(again) != 4 || !again[0].Dry {
		t.Fatalf("the four are not asked at once: %v", effects)
	}
	for _, e := range l.PrepareAnswered(0, "witness/w1", 1, dry[0].Round, yes) {
		t.Errorf("an answer to the round before led to %v", e)
	}
	var reserve *Reserve
	for _, id := range []string{"region/eu", "witness/w1", "witness/w2"} {
		for _, e := range l.PrepareAnswered(0, id, 1, again[0].Round, yes) {
			if r, ok := e.(Reserve); ok {
				reserve = &r
			}
		}
	}
	if reserve == nil {
		t.Fatal("no ballot is reserved")
	}
	// A ballot that is being reserved meanwhile is used under the next one.
	if _, err := l.Reconfigure(0, testConfig(nil), []Own{{}}); err != nil {
		t.Fatal(err)
	}
	sent := prepares(l.Reserved(0, reserve.ID, register.Ballot{Round: 1, Region: "eu", Incarnation: 1}))
	if len(sent) != 3 || sent[0].Dry {
		t.Errorf("%v", sent)
	}
}

func TestReconfigureAddsAndRemovesPartitionsAndChangesD(t *testing.T) {
	m := newMesh(t, testConfig(nil))
	m.run(sec)
	m.reconfigure(func(c *Config) { c.Partitions = append(c.Partitions, Partition{"q", []string{"eu"}}) })
	m.run(sec)
	if r, e := m.holder("q"); r != "eu" || e != 1 {
		t.Fatalf("q: holder %q epoch %d", r, e)
	}
	m.reconfigure(func(c *Config) { c.D = 10 * sec })
	for range 60 {
		m.run(100 * msec)
		if r, e := m.holder("p"); r != "eu" || e != 1 {
			t.Fatalf("p while D changes: holder %q epoch %d", r, e)
		}
	}
	if v := m.voters["witness/w1"]["p"].Value; v.D != 10*sec || v.Epoch != 1 {
		t.Errorf("the owner took no new ballot for the new D: %+v", v)
	}
	m.reconfigure(func(c *Config) { c.Partitions = c.Partitions[1:] })
	if r, _ := m.holder("p"); r != "" {
		t.Errorf("p is no partition any more, %q holds it", r)
	}
	m.run(sec)
	if r, _ := m.holder("q"); r != "eu" {
		t.Errorf("q: holder %q", r)
	}
}

func TestReconfigureRefusesAStranger(t *testing.T) {
	l, _ := resumed(t, nil)
	for name, change := range map[string]func(*Config){
		"not a member":        without("region/eu"),
		"another incarnation": func(c *Config) { c.Self.Incarnation++ },
	} {
		if _, err := l.Reconfigure(instant.Instant(2*sec), testConfig(change), []Own{{}}); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if _, err := l.Reconfigure(instant.Instant(2*sec), testConfig(nil), nil); err == nil {
		t.Error("no own state for a partition: taken")
	}
}
