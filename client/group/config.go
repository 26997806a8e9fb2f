package group

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/group/plan"
	"github.com/headlease/headlease/internal/clock"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

// Defaults and bounds.
const (
	DefaultRejoinGrace = 30 * time.Second
	DefaultJoinSettle  = 300 * time.Millisecond
	DefaultDrainLimit  = 30 * time.Second
	// MaxMembers of a group.
	MaxMembers = 1000
)

// ErrReplaced ends a member when another process has joined under its name.
var ErrReplaced = errors.New("another process has joined the group under this member's name")

// ErrDrainLimit is why the context of a shard's work ended that went on for
// DrainLimit after the shard was to move.
var ErrDrainLimit = errors.New("the drain limit is over")

// ErrNewLease is what Work returns to have the shard's lease released and
// acquired anew at once, for a higher token.
var ErrNewLease = errors.New("the shard needs a new lease")

// Shard is one that this member holds.
type Shard struct {
	Number uint32
	// Lease of the shard; its token goes with every write.
	Lease *client.Lease

	drain <-chan struct{}
}

// Drain is closed when the shard is to move: begin nothing new, and return when
// what is under way is done.
func (s *Shard) Drain() <-chan struct{} { return s.drain }

// Config of a member. All members of a group need the same Name, Shards,
// Resource, MinMembers and RejoinGrace.
type Config struct {
	Client *client.Client
	// Session's TTL: how long a lost member's shards stand still at most, but
	// for the region's own failures; default the Client's.
	TTL time.Duration
	// Name of the group, as in lock/group/NAME.
	Name string
	// Member is this process's name, the same after a restart.
	Member string
	// Capacity beside that of others: twice as much, twice as many shards;
	// default 1.
	Capacity uint32
	// Shards that the group divides. Without Resource the dedicated shards of keys
	// whose hash shard is among them are added, as keys are pinned (headlease
	// shard pin): their numbers are from shard.FirstDedicated up.
	Shards []uint32
	// Resource to lease for a shard; default shard/N. Groups with different work
	// on the same shards need different resources.
	Resource func(shard uint32) string
	// MinMembers that must be there before shards are assigned at first.
	MinMembers int
	// RejoinGrace is how long the shards of a member that stopped with Return
	// wait for it.
	RejoinGrace time.Duration
	// JoinSettle is how long an assignment waits for more members to join.
	JoinSettle time.Duration
	// DrainLimit is how long Work may go on after Drain, before its context ends.
	DrainLimit time.Duration
	// Return: a stopped member comes back, as in a rolling deploy.
	Return bool
	// Work on a shard until its context or Drain ends. The context ends with the
	// lease. An error is logged; while the shard is this member's, Work is called
	// again after a pause.
	Work func(ctx context.Context, s *Shard) error
	// Changed, if set, is told which shards are assigned to this member, by the
	// goroutine that decides: it must not block.
	Changed func(shards []uint32)
	// Clock defaults to the machine's lease clock.
	Clock  clock.Clock
	Logger *slog.Logger

	// dedicated shards are added.
	dedicated bool
}

// Shards are those below n.
func Shards(n uint32) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i)
	}
	return out
}

func (c Config) withDefaults() (Config, error) {
	if c.Capacity == 0 {
		c.Capacity = 1
	}
	if c.Resource == nil {
		c.dedicated = true
		c.Resource = func(shard uint32) string { return "shard/" + strconv.FormatUint(uint64(shard), 10) }
	}
	if c.RejoinGrace == 0 {
		c.RejoinGrace = DefaultRejoinGrace
	}
	if c.JoinSettle == 0 {
		c.JoinSettle = DefaultJoinSettle
	}
	if c.DrainLimit == 0 {
		c.DrainLimit = DefaultDrainLimit
	}
	if c.Changed == nil {
		c.Changed = func([]uint32) {}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Clock == nil {
		sys, err := clock.NewSystem()
		if err != nil {
			return c, err
		}
		c.Clock = sys
	}
	return c, nil
}

// Validate reports all faults at once.
func (c Config) Validate() error {
	var errs []error
	fault := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	fault(c.Client == nil, "client: missing; make one with client.New")
	fault(c.Work == nil, "work: missing; give the function that works on a shard")
	_, err := shard.Parse(resourceOf(c.Name))
	fault(err != nil, "name: %q cannot be part of a lock's name (%v)", c.Name, err)
	fault(c.Member == "" || len(c.Member) > shard.MaxKey, "member: has %d bytes; give a name of 1 to %d that is the same after a restart", len(c.Member), shard.MaxKey)
	fault(len(c.Shards) == 0, "shards: none; group.Shards(256) are all of a cluster with 256")
	seen := make(map[uint32]bool, len(c.Shards))
	for _, s := range c.Shards {
		fault(seen[s], "shards: %d is listed twice", s)
		seen[s] = true
	}
	fault(c.MinMembers < 0 || c.MinMembers > MaxMembers, "min_members: %d is out of range; choose 0 to %d", c.MinMembers, MaxMembers)
	for name, d := range map[string]time.Duration{"rejoin_grace": c.RejoinGrace, "join_settle": c.JoinSettle, "drain_limit": c.DrainLimit} {
		fault(d < 0, "%s: %v is negative; leave it out for the default", name, d)
	}
	return errors.Join(errs...)
}

func resourceOf(name string) string { return "lock/group/" + name }

func (c Config) plan() plan.Config {
	return plan.Config{Shards: c.Shards, MinMembers: c.MinMembers, RejoinGrace: c.RejoinGrace}
}

var states = map[plan.State]pb.GroupMemberState{
	plan.Active:    pb.GroupMemberState_GROUP_MEMBER_STATE_ACTIVE,
	plan.Returning: pb.GroupMemberState_GROUP_MEMBER_STATE_RETURNING,
	plan.Leaving:   pb.GroupMemberState_GROUP_MEMBER_STATE_LEAVING,
}

func encodeMember(name string, capacity uint32, state plan.State) ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.Marshal(&pb.GroupMember{Name: name, Capacity: capacity, State: states[state]})
}

// decodeMember returns false for what no member of this version wrote.
func decodeMember(value []byte) (plan.Seen, bool) {
	var m pb.GroupMember
	if err := proto.Unmarshal(value, &m); err != nil || m.GetName() == "" {
		return plan.Seen{}, false
	}
	for state, s := range states {
		if s == m.GetState() {
			return plan.Seen{Member: plan.Member{Name: m.GetName(), Capacity: m.GetCapacity()}, State: state}, true
		}
	}
	return plan.Seen{}, false
}

func encodeAssignment(version uint64, a plan.Assignment) ([]byte, error) {
	members := map[string]bool{}
	for _, m := range a {
		members[m] = true
	}
	msg := &pb.GroupAssignment{Version: version}
	for _, m := range sortedKeys(members) {
		msg.Shares = append(msg.Shares, &pb.GroupShare{Member: m, Shards: a.Of(m)})
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(msg)
	if err == nil && len(b) > client.MaxValue {
		return nil, fmt.Errorf("the assignment of %d shards to %d members has %d bytes, of at most %d; make two groups of it", len(a), len(members), len(b), client.MaxValue)
	}
	return b, err
}

// decodeAssignment returns false where there is none.
func decodeAssignment(value []byte) (version uint64, a plan.Assignment, ok bool) {
	var msg pb.GroupAssignment
	if err := proto.Unmarshal(value, &msg); err != nil || msg.GetVersion() == 0 {
		return 0, nil, false
	}
	a = plan.Assignment{}
	for _, share := range msg.GetShares() {
		for _, s := range share.GetShards() {
			a[s] = share.GetMember()
		}
	}
	return msg.GetVersion(), a, true
}
