package replica

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// TestResultsReachTheirCallers: many callers, several kinds of commands, every
// one gets the answer to its own. In virtual time, so that a busy machine changes
// no leader.
func TestResultsReachTheirCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		n := c.setup()
		ctx := context.Background()
		var seen sync.Map
		var wg sync.WaitGroup
		for w := range 64 {
			rng := rand.New(rand.NewPCG(1, uint64(w)))
			wg.Go(func() {
				for i := range 40 {
					propose := n.r.Propose
					if rng.IntN(4) == 0 {
						propose = n.r.ProposeUrgent
					}
					var err error
					var res *pb.CommandResult
					id := fmt.Sprintf("%d-%d", w, i)
					switch rng.IntN(3) {
					case 0:
						res, err = propose(ctx, ticket(0))
						if b := res.GetReserved(); err == nil && b == nil {
							t.Errorf("%s: reserve answered %v", id, res)
						} else if _, twice := seen.LoadOrStore(b.GetBallot().GetRound(), id); err == nil && twice {
							t.Errorf("%s: round %d was answered twice", id, b.GetBallot().GetRound())
						}
					case 1: // refused by Apply, with a text of its own
						bad := openSession(id)
						bad.GetOpenSession().TtlMs = -int64(w*1000 + i + 1)
						res, err = propose(ctx, bad)
						if want := fmt.Sprintf("%d is out of range", -(w*1000 + i + 1)); err == nil && !strings.Contains(res.GetError().String(), want) {
							t.Errorf("%s: answered %v, want %q", id, res.GetError(), want)
						}
					case 2:
						res, err = propose(ctx, openSession(id))
						if err == nil && (res.GetError() != nil || res.GetKind() != nil) {
							t.Errorf("%s: open answered %v", id, res)
						}
					}
					if err != nil {
						t.Errorf("%s: %v", id, err)
					}
				}
			})
		}
		wg.Wait()
		c.stop()
	})
}

// TestBatching: what arrives while an entry is in flight shares the next ones.
func TestBatching(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three[:1], nil)
		c.start()
		n := c.setup()
		time.Sleep(time.Second)
		before := n.r.raft.Load().LastIndex()
		n.disk.hang() // the first entry stays in flight
		var wg sync.WaitGroup
		for i := range 600 {
			wg.Go(func() {
				if _, err := n.r.Propose(context.Background(), openSession(fmt.Sprint("s", i))); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		if q := n.r.Stats(); q.InFlight > n.r.prop.slots-urgentReserve || q.Queued+maxBatch*q.InFlight < 600 {
			t.Errorf("in flight %d, queued %d", q.InFlight, q.Queued)
		}
		n.disk.release()
		wg.Wait()
		if entries := n.r.raft.Load().LastIndex() - before; entries > 8 {
			t.Errorf("600 commands took %d entries", entries)
		}
		c.stop()
	})
}

// TestOverloadAndUrgentLane: a flood is refused at the bound, and an urgent
// command passes all of it that waits.
func TestOverloadAndUrgentLane(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three[:1], func(cfg *Config) { cfg.QueueLimit = 4000 })
		c.start()
		n := c.setup()
		n.disk.hang()
		var done, overloaded atomic.Int64
		var wg sync.WaitGroup
		for i := range 8000 {
			wg.Go(func() {
				_, err := n.r.Propose(context.Background(), openSession(fmt.Sprint("s", i)))
				switch {
				case errors.Is(err, ErrOverloaded):
					overloaded.Add(1)
				case err != nil:
					t.Error(err)
				default:
					done.Add(1)
				}
			})
		}
		synctest.Wait()
		if overloaded.Load() == 0 || overloaded.Load() > 4000 {
			t.Errorf("%d of 8000 refused at a bound of 4000", overloaded.Load())
		}
		wg.Go(func() {
			if _, err := n.r.ProposeUrgent(context.Background(), ticket(0)); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		n.r.prop.mu.Lock()
		urgent, normal := len(n.r.prop.lanes[urgentLane].items), len(n.r.prop.lanes[normalLane].items)
		n.r.prop.mu.Unlock()
		if urgent != 0 || normal < 3000 {
			t.Errorf("%d urgent commands wait beside %d of the flood", urgent, normal)
		}
		n.disk.release()
		wg.Wait()
		if got := done.Load() + overloaded.Load(); got != 8000 {
			t.Errorf("%d answers of 8000", got)
		}
		if got, most := sessionsBeforeTicket(t, n), n.r.prop.slots*maxBatch; got > most {
			t.Errorf("%d sessions were opened before the urgent command, want at most the %d in flight", got, most)
		}
		c.stop()
	})
}

// sessionsBeforeTicket counts in the log.
func sessionsBeforeTicket(t *testing.T, n *node) int {
	t.Helper()
	sessions := 0
	for i := uint64(1); i <= n.r.raft.Load().LastIndex(); i++ {
		var l raft.Log
		var entry pb.Entry
		if err := n.r.stores.logs.GetLog(i, &l); err != nil {
			t.Fatal(err)
		}
		if l.Type != raft.LogCommand {
			continue
		}
		if err := proto.Unmarshal(l.Data, &entry); err != nil {
			t.Fatal(err)
		}
		for _, cmd := range entry.Commands {
			switch {
			case cmd.GetReserveBallot() != nil:
				return sessions
			case cmd.GetOpenSession() != nil:
				sessions++
			}
		}
	}
	t.Fatal("the urgent command is not in the log")
	return 0
}

// TestH4CallerGivesUp: a command not yet proposed when its caller gives up is
// never proposed; one already proposed has an unknown outcome.
func TestH4CallerGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three[:1], nil)
		c.start()
		n := c.setup()
		time.Sleep(time.Second)
		n.disk.hang()
		ctx, cancel := context.WithCancel(context.Background())
		errs := make([]error, overlap+1)
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { _, errs[i] = n.r.Propose(ctx, openSession(fmt.Sprint("s", i))) })
			synctest.Wait() // all but the last are in flight
		}
		cancel()
		wg.Wait()
		if !errors.Is(errs[0], ErrUnknown) || !errors.Is(errs[0], context.Canceled) {
			t.Errorf("in flight: %v", errs[0])
		}
		if last := errs[overlap]; errors.Is(last, ErrUnknown) || !errors.Is(last, context.Canceled) {
			t.Errorf("queued: %v", last)
		}
		n.disk.release()
		if _, err := n.reserve(context.Background()); err != nil {
			t.Fatal(err)
		}
		if _, ok := n.r.View().Session(fmt.Sprint("s", overlap)); ok {
			t.Error("a withdrawn command was proposed")
		}
		c.stop()
	})
}

// TestH4NeverInAnotherTerm: what waits when leadership goes is refused, not
// proposed in the next term.
func TestH4NeverInAnotherTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three[:1], nil)
		c.start()
		n := c.setup()
		p, err := n.r.enqueue(context.Background(), openSession("s"), normalLane)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.r.wait(context.Background(), p); err != nil {
			t.Fatal(err)
		}
		old := &proposal{data: p.data, term: p.term - 1, done: make(chan proposed, 1)}
		if err := n.r.prop.push(old, normalLane); err != nil {
			t.Fatal(err)
		}
		if _, err := n.r.wait(context.Background(), old); !errors.Is(err, ErrNotLeader) {
			t.Errorf("a command of an older term: %v", err)
		}
		c.stop()
	})
}
