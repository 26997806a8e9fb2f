package regiontest

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
	"github.com/headlease/headlease/region/lessor/run"
	"github.com/headlease/headlease/region/replica"
	"github.com/headlease/headlease/region/state"
	"github.com/headlease/headlease/region/watch"
)

// Partition is the one partition of a region's configuration: all shards.
const Partition = "all"

// Config of a Region.
type Config struct {
	// Name of the region; needed.
	Name string
	// Servers is how many it has, named NAME-1 and so on; 0 means 3.
	Servers int
	// D of its head lease; 0 means 4 s.
	D time.Duration
	// Clock of the leader; nil is a clock of the bubble's time.
	Clock  clock.Clock
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Servers == 0 {
		c.Servers = 3
	}
	if c.D == 0 {
		c.D = 4 * time.Second
	}
	if c.Clock == nil {
		c.Clock = clock.NewRuntime()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Region is a region in memory: one state machine, which all its servers
// share, and the lessor of the present term. It is safe for concurrent use.
type Region struct {
	t       testing.TB
	network *Network
	cfg     Config
	lessor  *run.Shell
	watches *watch.Hub
	servers []*Server

	mu      sync.Mutex
	machine *state.Machine
	index   uint64
	term    uint64
	leader  int // index of the server that leads; -1: none
	lapsed  bool
	checks  int
	applied chan struct{} // closed and made anew at each command
}

// Region starts a region. Its first server leads; it owns nothing yet. It runs
// until the test ends.
func (n *Network) Region(cfg Config) *Region {
	cfg = cfg.withDefaults()
	r := &Region{t: n.t, network: n, cfg: cfg, machine: state.New(), leader: -1, applied: make(chan struct{})}
	r.lessor = run.New(run.Config{Raft: r, Clock: cfg.Clock, Lessor: lessor.Config{PushEvery: cfg.D / 5}, Logger: cfg.Logger})
	r.watches = watch.New(watch.Config{State: func() watch.State { return watch.Of(cfg.Name, r.View()) }, Logger: cfg.Logger})
	for i := range cfg.Servers {
		r.servers = append(r.servers, newServer(r, fmt.Sprintf("%s-%d", cfg.Name, i+1)))
	}
	n.mu.Lock()
	n.order = append(n.order, r)
	for _, s := range r.servers {
		n.servers[s.name] = s
	}
	n.mu.Unlock()

	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { _ = r.lessor.Run(ctx) })
	work.Go(func() { _ = r.watches.Run(ctx) })
	work.Go(func() { r.hold(ctx) })
	n.t.Cleanup(func() {
		for _, s := range r.servers {
			s.Thaw()
			s.Kill()
		}
		cancel()
		work.Wait()
	})
	r.Elect(0)
	r.must(&pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: cfg.Name, Incarnation: r.incarnation()}}})
	r.must(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: r.configuration()}}})
	r.must(&pb.Command{Kind: &pb.Command_RaiseLevel{RaiseLevel: &pb.RaiseLevelCommand{Level: state.MaxLevel}}})
	for _, s := range r.servers {
		s.Start()
	}
	return r
}

func (r *Region) incarnation() uint64 { return 1 }

func (r *Region) configuration() *pb.ClusterConfiguration {
	return &pb.ClusterConfiguration{
		ClusterId: "c1", ClusterName: "test", Version: 1, Shards: 256, DNs: r.cfg.D.Nanoseconds(),
		Voters:     []*pb.Voter{{Id: "region/" + r.cfg.Name, Incarnation: r.incarnation()}, {Id: "witness/w1", Incarnation: 5}},
		Partitions: []*pb.PartitionSpec{{Name: Partition, Shards: []*pb.ShardRange{{First: 0, Last: 255}}, Prefer: []string{r.cfg.Name}}},
	}
}

// Configure gives the region the next configuration.
func (r *Region) Configure(change func(*pb.ClusterConfiguration)) {
	r.t.Helper()
	next := config.Next(r.View().Configuration())
	change(next)
	r.must(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: next}}})
}

// Server returns the i-th server, from 0.
func (r *Region) Server(i int) *Server { return r.servers[i] }

// View is the state now.
func (r *Region) View() state.View {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.machine.View()
}

// Elect makes a server the leader of a new term, which renews the head lease at
// once.
func (r *Region) Elect(server int) {
	r.Depose()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.term++
	r.leader = server
	res, _ := r.apply(&pb.Command{Term: r.term, Kind: &pb.Command_BeginTerm{BeginTerm: &pb.BeginTermCommand{Server: r.servers[server].name}}})
	if res.GetError() != nil {
		panic(fmt.Sprintf("regiontest: begin term: %v", res.GetError()))
	}
	r.lessor.Begin(r.term, r.machine.View())
	r.renewLocked()
	r.led()
}

// led tells the servers that the leadership has moved. r.mu is held.
func (r *Region) led() {
	leader := ""
	if r.leader >= 0 {
		leader = r.servers[r.leader].name
	}
	for _, s := range r.servers {
		go func() { // a server that is being killed has its lock
			if leader != "" {
				s.ledBy(leader)
			}
			if e := s.Edge(); e != nil {
				e.LeaderChanged()
			}
		}()
	}
}

// Depose leaves the region without a leader.
func (r *Region) Depose() {
	r.mu.Lock()
	term := r.term
	r.leader = -1
	r.mu.Unlock()
	r.lessor.Deposed(term)
}

// Lapse stops (or takes up again) the renewal of the head lease. It runs out
// by itself.
func (r *Region) Lapse(lapsed bool) {
	r.mu.Lock()
	r.lapsed = lapsed
	r.mu.Unlock()
}

// ClockGap makes the leader begin anew in its term, as one whose clock had a gap.
// It holds nothing until it renews the head lease.
func (r *Region) ClockGap() { r.lessor.ClockGap() }

// Own makes the region the owner of the partition under an epoch.
func (r *Region) Own(epoch fence.Epoch) {
	b := r.Accept(r.cfg.Name, epoch)
	r.must(r.stamped(&pb.Command{Kind: &pb.Command_Adopt{Adopt: &pb.AdoptCommand{Partition: Partition, Epoch: uint32(epoch), Ballot: b}}}))
	r.renew()
}

// Lose ends an epoch here, because the named region has the next one.
func (r *Region) Lose(epoch fence.Epoch, to string) {
	r.Accept(to, epoch+1)
	r.must(r.stamped(&pb.Command{Kind: &pb.Command_Drop{Drop: &pb.DropCommand{Partition: Partition, Epoch: uint32(epoch)}}}))
}

// Accept makes the region's register name an owner.
func (r *Region) Accept(owner string, epoch fence.Epoch) *pb.Ballot {
	b := r.must(&pb.Command{Kind: &pb.Command_ReserveBallot{ReserveBallot: &pb.ReserveBallotCommand{}}}).GetReserved().GetBallot()
	guard := func() *pb.RegisterGuard {
		p, _ := r.View().Partition(Partition)
		return p.Register.Guard().Proto()
	}
	r.must(r.stamped(&pb.Command{Kind: &pb.Command_Promise{Promise: &pb.PromiseCommand{
		Items: []*pb.PromiseItem{{Partition: Partition, Guard: guard(), Ballot: b}},
	}}}))
	v := &pb.Value{Owner: owner, OwnerIncarnation: r.incarnation(), Epoch: uint32(epoch), DNs: r.cfg.D.Nanoseconds()}
	r.must(r.stamped(&pb.Command{Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{
		Items: []*pb.AcceptedItem{{Partition: Partition, Guard: guard(), Ballot: b, Value: v}},
	}}}))
	return b
}

// Revoke revokes the lease on a resource, if there is one.
func (r *Region) Revoke(resource string) {
	if l, ok := r.View().Lease(resource); ok {
		r.must(r.stamped(&pb.Command{Kind: &pb.Command_Revoke{Revoke: &pb.RevokeCommand{
			Resource: resource, Token: uint64(l.Token), Reason: "test",
		}}}))
	}
}

// CloseSession ends a session as an operator would.
func (r *Region) CloseSession(id string) {
	r.must(&pb.Command{Kind: &pb.Command_CloseSession{CloseSession: &pb.CloseSessionCommand{SessionId: id}}})
}

// Wait waits until ok says so of the state, and fails the test if that takes
// longer than within.
func (r *Region) Wait(within time.Duration, what string, ok func(state.View) bool) {
	r.t.Helper()
	late := time.After(within)
	for {
		r.mu.Lock()
		view, applied := r.machine.View(), r.applied
		r.mu.Unlock()
		if ok(view) {
			return
		}
		select {
		case <-applied:
		case <-late:
			r.t.Fatalf("regiontest: %s: not within %v", what, within)
		}
	}
}

func (r *Region) stamped(c *pb.Command) *pb.Command {
	r.mu.Lock()
	defer r.mu.Unlock()
	c.Term = r.term
	return c
}

func (r *Region) must(c *pb.Command) *pb.CommandResult {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	res, events := r.apply(c)
	if res.GetError() != nil {
		r.t.Fatalf("regiontest: %v: %v", c, res.GetError())
	}
	r.lessor.Applied(events)
	return res
}

// apply commits a command. r.mu is held.
func (r *Region) apply(c *pb.Command) (*pb.CommandResult, []state.Event) {
	r.index++
	res, events := r.machine.Apply(r.index, r.term, c)
	r.watches.Applied(r.index, r.cfg.Name, events)
	close(r.applied)
	r.applied = make(chan struct{})
	return res, events
}

// hold renews the head lease, as the campaign would.
func (r *Region) hold(ctx context.Context) {
	tick := time.NewTicker(r.cfg.D / 5)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			r.renew()
		}
	}
}

func (r *Region) renew() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.renewLocked()
}

func (r *Region) renewLocked() {
	p, ok := r.machine.View().Partition(Partition)
	if !ok || !p.Live() || r.lapsed || r.leader < 0 {
		return
	}
	r.lessor.Held(Partition, p.Epoch, r.cfg.Clock.Now().Add(r.cfg.D*99/101)) // D(1-ρ)/(1+ρ)
}

// Propose applies a command.
func (r *Region) Propose(ctx context.Context, c *pb.Command) (*pb.CommandResult, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leader < 0 {
		return nil, &replica.NotLeaderError{}
	}
	res, events := r.apply(c)
	if err := r.machine.Poisoned(); err != nil {
		return nil, err
	}
	r.lessor.Applied(events)
	return res, nil
}

// ProposeUrgent is Propose.
func (r *Region) ProposeUrgent(ctx context.Context, c *pb.Command) (*pb.CommandResult, error) {
	return r.Propose(ctx, c)
}

// Check passes while there is a leader.
func (r *Region) Check(ctx context.Context) (uint64, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leader < 0 {
		return 0, replica.ErrCheckFailed
	}
	r.checks++
	return r.term, nil
}

// Checks is how many leadership checks have passed.
func (r *Region) Checks() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.checks
}

// PulseFresh is always true: the double's disk does not hang.
func (r *Region) PulseFresh(instant.Instant) bool { return true }
