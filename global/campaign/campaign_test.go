package campaign

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

const (
	sec  = time.Second
	msec = time.Millisecond
)

// zero is a source without jitter: every back-off is its shortest.
type zero struct{}

func (zero) Int64N(int64) int64 { return 0 }

func region(name string) register.Region { return register.Region{Name: name, Incarnation: 1} }

// testConfig is region "eu" among eu, us, w1 with D = 4 s and exact clocks.
func testConfig(change func(*Config)) Config {
	c := Config{
		Self: region("eu"), OwnVoter: "region/eu",
		Voters:     []Voter{{"region/eu", 1, false}, {"region/us", 1, false}, {"witness/w1", 1, true}},
		Partitions: []Partition{{"p", []string{"eu", "us"}}},
		D:          4 * sec, Rand: zero{},
	}
	if change != nil {
		change(&c)
	}
	return c
}

// mesh joins Leaders and pure voters by messages that arrive at once, and
// plays the region's Apply. Voters in down neither hear nor answer.
type mesh struct {
	t       testing.TB
	now     instant.Instant
	leaders map[string]*Leader
	voters  map[string]map[string]*register.Register
	own     map[string]map[string]*Own
	round   map[string]uint64
	down    map[string]bool
	// cut has "region voter" of pairs that do not reach each other.
	cut     map[string]bool
	verdict register.Verdict
	held    map[string]Held
	log     []string
}

func newMesh(t testing.TB, cfgs ...Config) *mesh {
	m := &mesh{
		t: t, now: instant.Instant(100 * sec), leaders: map[string]*Leader{}, voters: map[string]map[string]*register.Register{},
		own: map[string]map[string]*Own{}, round: map[string]uint64{}, down: map[string]bool{}, cut: map[string]bool{}, held: map[string]Held{},
	}
	for _, c := range cfgs {
		for _, v := range c.Voters {
			m.voters[v.ID] = map[string]*register.Register{}
			for _, p := range c.Partitions {
				m.voters[v.ID][p.Name] = &register.Register{}
			}
		}
	}
	for _, c := range cfgs {
		m.own[c.Self.Name] = map[string]*Own{}
		for _, p := range c.Partitions {
			m.own[c.Self.Name][p.Name] = &Own{}
		}
		m.lead(c)
	}
	return m
}

// lead begins a new term in a region.
func (m *mesh) lead(c Config) {
	var own []Own
	for _, p := range c.Partitions {
		reg := m.voters[c.OwnVoter][p.Name]
		*reg = register.Restart(reg.Record, m.now)
		o := m.own[c.Self.Name][p.Name]
		o.Record = reg.Record
		own = append(own, *o)
	}
	l, err := New(c, own, m.now)
	if err != nil {
		m.t.Fatal(err)
	}
	m.leaders[c.Self.Name] = l
}

// run lets d pass, ticking every Leader when it asks for it.
func (m *mesh) run(d time.Duration) {
	end := m.now.Add(d)
	for {
		next := end
		for _, l := range m.leaders {
			next = min(next, max(l.Next(), m.now))
		}
		m.now = next
		for name, l := range m.leaders {
			m.do(name, l.Tick(m.now))
		}
		if m.now == end {
			return
		}
	}
}

func (m *mesh) do(name string, effects []Effect) {
	l := m.leaders[name]
	for _, e := range effects {
		switch e := e.(type) {
		case SendPrepare:
			if m.down[e.Voter.ID] || m.cut[name+" "+e.Voter.ID] {
				continue
			}
			var out []PrepareAnswer
			for _, p := range e.Partitions {
				reg := m.voters[e.Voter.ID][p]
				d := reg.Prepare(m.now, register.PrepareInput{Candidate: l.cfg.Self, Ballot: e.Ballot, Dry: e.Dry, Verdict: m.verdict})
				if d.Action == register.Write {
					rec, ok := register.Update(reg.Record, d.Change)
					if !ok {
						m.t.Fatalf("update refused: %+v", d)
					}
					*reg = reg.Written(m.now, rec)
				}
				out = append(out, PrepareAnswer{Partition: p, Rule: d.Rule, Record: reg.Record, Remaining: reg.Remaining(m.now), Verdict: m.verdict})
			}
			m.do(name, l.PrepareAnswered(m.now, e.Voter.ID, e.Voter.Incarnation, e.Round, out))
		case SendAccept:
			if m.down[e.Voter.ID] || m.cut[name+" "+e.Voter.ID] {
				continue
			}
			var out []AcceptAnswer
			for _, it := range e.Items {
				reg := m.voters[e.Voter.ID][it.Partition]
				d := reg.Accept(it.Ballot, it.Value)
				switch d.Action {
				case register.Write:
					rec, _ := register.Update(reg.Record, d.Change)
					*reg = reg.Written(m.now, rec)
					if other := strings.TrimPrefix(e.Voter.ID, "region/"); m.leaders[other] != nil {
						m.do(other, m.leaders[other].RegisterChanged(m.now, it.Partition, rec))
					}
				case register.Renew:
					*reg, _ = reg.Renewed(m.now, it.Ballot, it.Value)
				}
				out = append(out, AcceptAnswer{Partition: it.Partition, Rule: d.Rule, Record: reg.Record})
			}
			m.do(name, l.AcceptAnswered(m.now, e.Voter.ID, e.Voter.Incarnation, e.Round, out))
		case Reserve:
			m.round[name] = max(m.round[name], e.Above) + 1
			m.do(name, l.Reserved(m.now, e.ID, register.Ballot{Round: m.round[name], Region: name, Incarnation: 1}))
		case Adopt:
			o := m.own[name][e.Partition]
			if m.voters[l.cfg.OwnVoter][e.Partition].Accepted != e.Ballot || e.Epoch <= o.Floor {
				m.do(name, l.AdoptFailed(m.now, e.Partition, e.Epoch))
				continue
			}
			o.Live, o.Floor = e.Epoch, e.Epoch
			m.log = append(m.log, fmt.Sprintf("%s adopts %s %d", name, e.Partition, e.Epoch))
			m.do(name, l.Adopted(m.now, e.Partition, e.Epoch))
		case Drop:
			if o := m.own[name][e.Partition]; o.Live == e.Epoch {
				o.Live = 0
			}
			m.log = append(m.log, fmt.Sprintf("%s drops %s %d", name, e.Partition, e.Epoch))
			m.do(name, l.Dropped(m.now, e.Partition, e.Epoch))
		case Held:
			for other, h := range m.held {
				if other != name+"/"+e.Partition && h.Partition == e.Partition && h.Until > m.now {
					m.t.Fatalf("I1: %s holds %+v while %s holds %+v", name, e, other, h)
				}
			}
			m.held[name+"/"+e.Partition] = e
		case Lapsed:
			delete(m.held, name+"/"+e.Partition)
		}
	}
}

func (m *mesh) holder(partition string) (string, fence.Epoch) {
	for k, h := range m.held {
		if h.Partition == partition && h.Until > m.now {
			return k[:len(k)-len(partition)-1], h.Epoch
		}
	}
	return "", 0
}

func us(c *Config) { c.Self, c.OwnVoter = region("us"), "region/us" }

func TestPreferredRegionWinsThenNextOneAfterItsLoss(t *testing.T) {
	m := newMesh(t, testConfig(nil), testConfig(us))
	m.run(10 * sec)
	if r, e := m.holder("p"); r != "eu" || e != 1 {
		t.Fatalf("holder %q epoch %d, want eu 1; log %v", r, e, m.log)
	}
	delete(m.leaders, "eu")
	m.down["region/eu"] = true
	m.do("us", m.leaders["us"].Suspicion(m.now, "eu", register.VerdictCrashed))
	m.run(4*sec + 50*msec)
	if r, e := m.holder("p"); r != "us" || e != 2 {
		t.Fatalf("holder %q epoch %d, want us 2; log %v\n%+v", r, e, m.log, m.leaders["us"].Explain(m.now))
	}
	// eu comes back as a new leader with epoch 1 live: it must drop it, never resume it.
	m.down["region/eu"] = false
	m.lead(testConfig(nil))
	m.run(10 * sec)
	if r, _ := m.holder("p"); r != "us" || m.own["eu"]["p"].Live != 0 {
		t.Fatalf("holder %q, eu has live %d; log %v", r, m.own["eu"]["p"].Live, m.log)
	}
}

// An owner that reaches half of the voters can renew nothing, and must not keep
// the rest from having an owner: its renewals would restart their clocks.
func TestF31AnOwnerWithoutAMajorityKeepsNobodyOut(t *testing.T) {
	six := func(c *Config) {
		c.Voters = []Voter{
			{"region/eu", 1, false},
			{"region/us", 1, false},
			{"region/as", 1, false},
			{"witness/w1", 1, true},
			{"witness/w2", 1, true},
			{"witness/w3", 1, true},
		}
	}
	m := newMesh(t, testConfig(six), testConfig(func(c *Config) { six(c); us(c) }))
	m.verdict = register.VerdictHealthy // it is heard all the time
	m.run(4 * sec)
	if r, _ := m.holder("p"); r != "eu" {
		t.Fatalf("%q holds", r)
	}
	m.cut["eu region/us"], m.cut["eu region/as"], m.cut["eu witness/w3"] = true, true, true
	m.cut["us region/eu"] = true
	m.run(4*4*sec + sec)
	if r, e := m.holder("p"); r != "us" || e != 2 {
		t.Fatalf("%q holds epoch %d %v after the cut, want us and 2; %v", r, e, 4*4*sec+sec, m.leaders["eu"].Explain(m.now))
	}
}

// The same of one whose disks do not move: its rounds count for nothing.
func TestF30AStalePulseRenewsNothing(t *testing.T) {
	m := newMesh(t, testConfig(nil), testConfig(us))
	m.run(4 * sec)
	m.do("eu", m.leaders["eu"].PulseStale(m.now, true))
	m.verdict = register.VerdictCrashed
	m.do("us", m.leaders["us"].Suspicion(m.now, "eu", register.VerdictCrashed))
	m.run(4*sec + 50*msec)
	if r, e := m.holder("p"); r != "us" || e != 2 {
		t.Fatalf("%q holds epoch %d, want us and 2", r, e)
	}
	if at := m.leaders["eu"].Next(); at <= m.now {
		t.Errorf("a leader with a stale pulse wants to be woken at %v, now is %v", at, m.now)
	}
}

func TestLapseThenResumeKeepsTheEpoch(t *testing.T) {
	m := newMesh(t, testConfig(nil))
	m.run(1 * sec)
	m.down["region/us"], m.down["witness/w1"] = true, true
	m.run(6 * sec)
	if r, _ := m.holder("p"); r != "" {
		t.Fatalf("%s holds without a majority", r)
	}
	m.down["witness/w1"] = false
	m.run(3 * sec) // the mesh loses for good what it loses, so the question under way must end first
	if r, e := m.holder("p"); r != "eu" || e != 1 || len(m.log) != 1 {
		t.Fatalf("holder %q epoch %d, log %v", r, e, m.log)
	}
	// The same over a change of leader: nothing is held before its first complete round.
	delete(m.held, "eu/p")
	m.lead(testConfig(nil))
	m.run(100 * msec)
	if r, e := m.holder("p"); r != "eu" || e != 1 || len(m.log) != 1 {
		t.Fatalf("holder %q epoch %d after a new term, log %v", r, e, m.log)
	}
}

func TestH2ReleaseWaitsForDAndHandsOverToTheSuccessor(t *testing.T) {
	m := newMesh(t, testConfig(nil), testConfig(us))
	m.run(3 * sec)
	m.do("eu", m.leaders["eu"].Release(m.now, "p", "us", "test"))
	m.run(500 * msec)
	if r, _ := m.holder("p"); r != "eu" {
		t.Fatalf("holder %q before eu has led for D", r)
	}
	m.run(1 * sec)
	if r, e := m.holder("p"); r != "us" || e != 2 || m.own["eu"]["p"].Live != 0 {
		t.Fatalf("holder %q epoch %d, log %v", r, e, m.log)
	}
	m.run(20 * sec)
	if r, e := m.holder("p"); r != "us" || e != 2 {
		t.Fatalf("holder %q epoch %d, log %v: failback must be manual", r, e, m.log)
	}
}

func TestF39NobodyCampaignsAgainstAHealthyOwner(t *testing.T) {
	m := newMesh(t, testConfig(nil), testConfig(us))
	m.run(3 * sec)
	m.verdict = register.VerdictHealthy
	dry, prepares := 0, 0
	l := m.leaders["us"]
	for end := m.now.Add(60 * sec); m.now < end; {
		m.now = min(m.leaders["eu"].Next(), max(l.Next(), m.now))
		m.do("eu", m.leaders["eu"].Tick(m.now))
		effects := l.Tick(m.now)
		for _, e := range effects {
			if p, ok := e.(SendPrepare); ok && p.Dry {
				dry++
			} else if ok {
				prepares++
			}
		}
		m.do("us", effects)
	}
	// About one round of questions, three messages, per D; and no trace of them.
	if prepares != 0 || dry == 0 || dry > 3*20 {
		t.Fatalf("us sent %d dry Prepares and %d Prepares in 60 s beside a healthy owner", dry, prepares)
	}
	if r, e := m.holder("p"); r != "eu" || e != 1 {
		t.Fatalf("holder %q %d", r, e)
	}
}

// TestI7OwnerThatIsHeardButCannotRenew: V3 gives way when the lease has been
// over for 2D more.
func TestI7OwnerThatIsHeardButCannotRenew(t *testing.T) {
	m := newMesh(t, testConfig(nil), testConfig(us))
	m.run(3 * sec)
	m.verdict = register.VerdictHealthy
	m.do("us", m.leaders["us"].Suspicion(m.now, "eu", register.VerdictHealthy))
	delete(m.leaders, "eu") // its voter still answers, and gossip goes on
	cut := m.now
	for m.own["us"]["p"].Live == 0 && m.now < cut.Add(30*sec) {
		m.run(100 * msec)
	}
	if took := m.now.Sub(cut); took < 2*4*sec || took > 4*4*sec+sec+4*sec/4 {
		t.Fatalf("us promoted after %v, want within 3D + 1 s and its place's wait", took)
	}
}

func TestThousandPartitionsInOneCampaign(t *testing.T) {
	many := func(c *Config) {
		c.Partitions = nil
		for i := range 1000 {
			c.Partitions = append(c.Partitions, Partition{fmt.Sprintf("p%d", i), []string{"eu"}})
		}
	}
	m := newMesh(t, testConfig(many))
	m.run(2 * sec)
	if len(m.held) != 1000 || m.round["eu"] != 1 {
		t.Fatalf("%d held, %d ballots reserved; want all by one ballot", len(m.held), m.round["eu"])
	}
}

func TestCloneAndStateFormAgree(t *testing.T) {
	m := newMesh(t, testConfig(nil), testConfig(us))
	for range 40 {
		m.run(333 * msec)
		for name, l := range m.leaders {
			c := l.Clone()
			if string(c.AppendState(nil)) != string(l.AppendState(nil)) {
				t.Fatalf("%s: a clone's form differs", name)
			}
			before := string(l.AppendState(nil))
			c.Tick(m.now.Add(30 * sec))
			c.Hurry(m.now.Add(30*sec), "p")
			if string(l.AppendState(nil)) != before {
				t.Fatalf("%s: a clone shares state", name)
			}
		}
	}
}

func TestConfigNamesEveryFault(t *testing.T) {
	err := Config{Voters: []Voter{{"a", 1, false}, {"a", 1, false}}, OwnVoter: "b", Rho: 1, D: -1, Partitions: []Partition{{}}}.Validate()
	for _, want := range []string{"self:", "listed twice", "own voter:", "D:", "rho:", "rand:", "partitions:"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: does not name %s", err, want)
		}
	}
	if _, err := New(testConfig(nil), nil, 0); err == nil {
		t.Error("own state missing and no error")
	}
}

func TestHoldBound(t *testing.T) {
	for _, rho := range []float64{0, 0.001, 0.01, 0.1, 1.0 / 3} {
		for _, d := range []time.Duration{sec, 4 * sec, 60 * sec} {
			h := Hold(d, rho)
			// The slowest owner against the fastest voter: never later, and not a
			// millionth earlier than it must be.
			owner, voter := float64(h)/(1-rho), float64(d)/(1+rho)
			if owner > voter+1 || owner < voter*(1-1e-6) {
				t.Errorf("rho %v D %v: the owner lets go after %v, a voter after %v", rho, d, owner, voter)
			}
		}
	}
}

// The second candidate waits its place from the suspicion on, when the first
// one begins, though its own voter has known for long that the lease is over:
// else the two campaign against each other.
func TestPlaceCountsFromTheSuspicion(t *testing.T) {
	cfg := testConfig(func(c *Config) {
		c.Self, c.OwnVoter = region("us"), "region/us"
		c.Partitions[0].Prefer = []string{"eu", "ap", "us"}
	})
	eu := register.Ballot{Round: 1, Region: "eu", Incarnation: 1}
	rec := register.Record{Promised: eu, Accepted: eu, Value: register.Value{Owner: region("eu"), Epoch: 1, D: cfg.D}}
	l, err := New(cfg, []Own{{Record: rec}}, origin)
	if err != nil {
		t.Fatal(err)
	}
	for _, other := range []string{"eu", "ap"} {
		l.Suspicion(origin, other, register.VerdictHealthy)
	}
	suspected := origin.Add(cfg.D/2 - time.Millisecond) // place 2 is not over yet
	if out := l.Suspicion(suspected, "eu", register.VerdictCrashed); len(out) != 0 {
		t.Errorf("asks at once: %v", out)
	}
	if due := l.dueAt(0); due != suspected.Add(cfg.D/4) {
		t.Errorf("asks %v after the suspicion; its place is %v after it", due.Sub(suspected), cfg.D/4)
	}
}
