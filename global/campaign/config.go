package campaign

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
)

// Voter is a member of the global quorum under one incarnation of its data.
type Voter struct {
	// ID is "region/NAME" or "witness/NAME".
	ID          string
	Incarnation register.Incarnation
	Witness     bool
}

// Partition is what the configuration says of a partition.
type Partition struct {
	Name string
	// Prefer lists the regions that may own it, best first.
	Prefer []string
}

// Own is the state of a partition in the region's own state machine.
type Own struct {
	// Record is the own register as applied.
	Record register.Record
	// Live is the epoch whose leases exist here; zero when none was adopted
	// or the last one was dropped.
	Live fence.Epoch
	// Floor is the highest epoch ever adopted or dropped here. It never goes
	// down.
	Floor fence.Epoch
}

// Rand is the source of jitter; *math/rand/v2.Rand has it.
type Rand interface {
	// Int64N returns a number in [0, n).
	Int64N(n int64) int64
}

// Config is the unchanging part of a Leader. It is not modified and may be
// shared.
type Config struct {
	// Self is the own region.
	Self register.Region
	// Era of the configuration, of every ballot and value proposed. A Leader never
	// goes on in another one.
	Era register.Era
	// OwnVoter is the ID of the own region among Voters.
	OwnVoter string
	// Voters are all members of one configuration; at most 64.
	Voters     []Voter
	Partitions []Partition
	// D is the head lease's length in values proposed from now on.
	D time.Duration
	// Rho bounds the rates of all clocks: 0.01 is 1 %. Zero means exact
	// clocks; there is no default, since a wrong one costs I1.
	Rho float64
	// GiveUp is how long a dry Prepare or a Prepare may stay undecided;
	// default max(1.5 s, D/2).
	GiveUp time.Duration
	// Manual: begin a campaign only when told to by Hurry. What is owned is
	// kept and renewed all the same.
	Manual bool
	// Rand is needed for back-off.
	Rand Rand
}

func (c Config) withDefaults() Config {
	if c.GiveUp == 0 {
		c.GiveUp = max(1500*time.Millisecond, c.D/2)
	}
	return c
}

// Validate returns all faults of the configuration.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if c.Self.Name == "" || c.Self.Incarnation == 0 {
		bad("self: name and incarnation must be set, have %q and %x", c.Self.Name, c.Self.Incarnation)
	}
	if len(c.Voters) == 0 || len(c.Voters) > maxVoters {
		bad("voters: have %d, need 1 to %d", len(c.Voters), maxVoters)
	}
	seen := map[string]bool{}
	for _, v := range c.Voters {
		if v.ID == "" || seen[v.ID] {
			bad("voters: id %q is empty or listed twice", v.ID)
		}
		seen[v.ID] = true
	}
	if !seen[c.OwnVoter] {
		bad("own voter: %q is not among the voters; only a member of the configuration may campaign", c.OwnVoter)
	}
	names := map[string]bool{}
	for _, p := range c.Partitions {
		if p.Name == "" || names[p.Name] {
			bad("partitions: name %q is empty or listed twice", p.Name)
		}
		names[p.Name] = true
	}
	if c.D <= 0 {
		bad("D: %v must be above 0", c.D)
	}
	if c.Rho < 0 || c.Rho >= 1 || math.IsNaN(c.Rho) {
		bad("rho: %v must be at least 0 and below 1", c.Rho)
	}
	if c.GiveUp < 0 {
		bad("give up: %v must not be negative", c.GiveUp)
	}
	if c.Rand == nil {
		bad("rand: must be set")
	}
	return errors.Join(errs...)
}

// Hold returns how long an owner holds from T0 under a value's d when all
// clocks run within ±rho of real time: d·(1-rho)/(1+rho), rounded down. The
// bound is tight: a voter's clock may be as fast as the owner's is slow.
func Hold(d time.Duration, rho float64) time.Duration {
	return time.Duration(math.Floor(float64(d) * (1 - rho) / (1 + rho)))
}

const maxVoters = 64

// votes is a set of voters by their index in the configuration.
type votes uint64

func (s votes) has(i int) bool { return s>>i&1 == 1 }

// quorum holds what Config means for counting.
type quorum struct {
	own        int
	all        votes
	witnesses  votes
	maj, wmaj  int
	index      map[string]int
	partitions map[string]int
}

func newQuorum(c Config) *quorum {
	q := &quorum{own: -1, index: map[string]int{}, partitions: map[string]int{}}
	for i, v := range c.Voters {
		q.index[v.ID] = i
		q.all |= 1 << i
		if v.Witness {
			q.witnesses |= 1 << i
		}
		if v.ID == c.OwnVoter {
			q.own = i
		}
	}
	q.maj = count(q.all)/2 + 1
	if n := count(q.witnesses); n > 0 {
		q.wmaj = n/2 + 1 // with no witness the second condition is void
	}
	for i, p := range c.Partitions {
		q.partitions[p.Name] = i
	}
	return q
}

// reached reports whether s is a majority of the voters with the own vote
// [H2], and for a promotion one of the witnesses too.
func (q *quorum) reached(s votes, promotion bool) bool {
	return s.has(q.own) && count(s) >= q.maj && (!promotion || count(s&q.witnesses) >= q.wmaj)
}

func (c Config) prefers(partition int) int {
	return slices.Index(c.Partitions[partition].Prefer, c.Self.Name)
}
