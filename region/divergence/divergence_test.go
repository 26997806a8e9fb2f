package divergence

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// group is a leader and a follower that apply the same commands; the follower's
// state can be made another one.
type group struct {
	mu       sync.Mutex
	machines [2]*state.Machine
	index    uint64
	leads    bool
	fail     error
	told     []*pb.StateHashCommand
}

func newGroup(level uint32) *group {
	g := &group{machines: [2]*state.Machine{state.New(), state.New()}, leads: true}
	g.apply(&pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: "eu", Incarnation: 1}}})
	g.apply(&pb.Command{Kind: &pb.Command_RaiseLevel{RaiseLevel: &pb.RaiseLevelCommand{Level: level}}})
	return g
}

func (g *group) apply(c *pb.Command) *pb.CommandResult {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.index++
	var res *pb.CommandResult
	for i, m := range g.machines {
		if r, _ := m.Apply(g.index, 1, c); i == 0 {
			res = r
		}
	}
	return res
}

// diverge makes the follower's state another one.
func (g *group) diverge() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.index++
	c := &pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{SessionId: "x", SecretHash: make([]byte, 32), TtlMs: 1000}}}
	g.machines[1].Apply(g.index, 1, c)
}

// pass lets time and the log go on to an index.
func (g *group) pass(index uint64) {
	for g.at() < index {
		g.apply(&pb.Command{Kind: &pb.Command_Pulse{Pulse: &pb.PulseCommand{}}})
	}
	time.Sleep(2 * every) // virtual
	synctest.Wait()
}

func (g *group) at() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.index
}

// set changes the group while the teller may look.
func (g *group) set(leads bool, fail error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leads, g.fail = leads, fail
}

func (g *group) Leading() (uint64, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return 1, g.leads
}

func (g *group) View() state.View {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.machines[0].View()
}

func (g *group) Propose(_ context.Context, c *pb.Command) (*pb.CommandResult, error) {
	g.mu.Lock()
	fail := g.fail
	if fail == nil {
		g.told = append(g.told, c.GetStateHash())
	}
	g.mu.Unlock()
	if fail != nil {
		return nil, fail
	}
	return g.apply(c), nil
}

func run(t *testing.T, level uint32, f func(t *testing.T, g *group)) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(level)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- (&Teller{Raft: g}).Run(ctx) }()
		f(t, g)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestTheLeaderTellsEachHashOnce, and again what was refused.
func TestTheLeaderTellsEachHashOnce(t *testing.T) {
	run(t, 2, func(t *testing.T, g *group) {
		g.pass(state.HashEvery - 1)
		if len(g.told) != 0 {
			t.Fatalf("told %v before there is one", g.told)
		}
		g.set(true, errors.New("overloaded"))
		g.pass(state.HashEvery + 100)
		g.set(true, nil)
		g.pass(state.HashEvery + 200)
		g.pass(state.HashEvery + 300)
		if len(g.told) != 1 || g.told[0].GetIndex() != state.HashEvery {
			t.Fatalf("told %v", g.told)
		}
		g.set(false, nil)
		g.pass(2*state.HashEvery + 100)
		if len(g.told) != 1 {
			t.Fatalf("a follower told %v", g.told)
		}
		g.set(true, nil)
		g.pass(2*state.HashEvery + 200)
		if len(g.told) != 2 || g.told[1].GetIndex() != 2*state.HashEvery {
			t.Fatalf("told %v", g.told)
		}
		for i, m := range g.machines {
			if err := m.Poisoned(); err != nil {
				t.Errorf("server %d stopped: %v", i, err)
			}
		}
	})
}

// TestAServerThatHasDivergedStops, and the leader goes on.
func TestAServerThatHasDivergedStops(t *testing.T) {
	run(t, 2, func(t *testing.T, g *group) {
		g.diverge()
		g.pass(state.HashEvery + 100)
		if err := g.machines[0].Poisoned(); err != nil {
			t.Errorf("the leader stopped: %v", err)
		}
		if err := g.machines[1].Poisoned(); !errors.Is(err, state.ErrDiverged) {
			t.Errorf("the server with another state: %v", err)
		}
	})
}

// TestBelowItsLevelNoHashIsTold: an older server would not know the command.
func TestBelowItsLevelNoHashIsTold(t *testing.T) {
	run(t, 1, func(t *testing.T, g *group) {
		g.pass(state.HashEvery + 100)
		if len(g.told) != 0 {
			t.Errorf("told %v", g.told)
		}
	})
}
