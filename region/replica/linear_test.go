package replica

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/anishathalye/porcupine"
)

type ticketOp struct{ read bool }

// ticketModel is a counter: a reserve answers the next number; one whose
// outcome is unknown may have taken it, then or at any later time, or never.
var ticketModel = porcupine.Model{
	Init: func() any { return uint64(0) },
	Step: func(s, in, out any) (bool, any) {
		n, got := s.(uint64), out.(uint64)
		if in.(ticketOp).read {
			return got == n, n
		}
		return got == 0 || got == n+1, n + 1
	},
}

// TestLinearizable: reserves and checked reads from all servers, while
// leadership moves by transfers and cuts.
func TestLinearizable(t *testing.T) {
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) {
			sim := newSimNet()
			c := newCluster(t, sim, three, nil)
			c.start()
			c.setup()
			for i, a := range three {
				sim.far(a, time.Duration(i+1)*3*time.Millisecond, three[:i]...)
			}
			began := time.Now()
			ctx, cancel := context.WithCancel(context.Background())
			var mu sync.Mutex
			var history []porcupine.Operation
			record := func(client int, op ticketOp, from time.Duration, got uint64, unknown bool) {
				to := int64(time.Since(began))
				if unknown {
					to, got = math.MaxInt64, 0
				}
				mu.Lock()
				defer mu.Unlock()
				history = append(history, porcupine.Operation{ClientId: client, Input: op, Call: int64(from), Output: got, Return: to})
			}
			var wg sync.WaitGroup
			for client := range 9 {
				n := c.all()[client%3]
				rng := rand.New(rand.NewPCG(seed, uint64(client)))
				wg.Go(func() {
					for ctx.Err() == nil {
						time.Sleep(time.Duration(rng.IntN(40)) * time.Millisecond)
						from := time.Since(began)
						if rng.IntN(2) == 0 {
							if _, err := n.r.Check(ctx); err == nil {
								record(client, ticketOp{read: true}, from, n.r.View().BallotRound(), false)
							}
							continue
						}
						got, err := n.reserve(ctx)
						if err == nil || errors.Is(err, ErrUnknown) {
							record(client, ticketOp{}, from, got, err != nil)
						}
					}
				})
			}
			rng := rand.New(rand.NewPCG(seed, 99))
			for range 8 {
				time.Sleep(300 * time.Millisecond)
				n := c.leader()
				if rng.IntN(2) == 0 {
					// To one that is ready for it, as ever: Raft's own waiting for a server can
					// leave goroutines of it behind.
					others := slices.DeleteFunc(c.all(), func(o *node) bool { return o == n })
					_ = n.r.TransferLeadership(ctx, others[rng.IntN(len(others))].r.RaftID())
					continue
				}
				sim.isolate(n.name, true)
				time.Sleep(time.Duration(rng.IntN(400)) * time.Millisecond)
				sim.isolate(n.name, false)
			}
			time.Sleep(300 * time.Millisecond)
			cancel()
			wg.Wait()
			nodes := c.all()
			c.stop()
			for _, n := range nodes {
				n.obs.check(t)
			}
			reads, unknown := 0, 0
			for _, op := range history {
				if op.Input.(ticketOp).read {
					reads++
				} else if op.Return == math.MaxInt64 {
					unknown++
				}
			}
			t.Logf("seed %d: %d operations, %d reads, %d unknown", seed, len(history), reads, unknown)
			if len(history) < 100 || reads < 20 {
				t.Error("too little happened to show anything")
			}
			checkHistory(t, history)
		})
	}
}

func checkHistory(t *testing.T, history []porcupine.Operation) {
	t.Helper()
	if res := porcupine.CheckOperationsTimeout(ticketModel, history, 0); res != porcupine.Ok {
		t.Errorf("history is %v", res)
	}
}

// TestLinearizableModelRefuses: the model refuses what it must.
func TestLinearizableModelRefuses(t *testing.T) {
	op := func(read bool, from, to int64, got uint64) porcupine.Operation {
		return porcupine.Operation{Input: ticketOp{read}, Call: from, Return: to, Output: got}
	}
	for name, h := range map[string][]porcupine.Operation{
		"the same number twice": {op(false, 0, 1, 1), op(false, 2, 3, 1)},
		"a stale read":          {op(false, 0, 1, 1), op(true, 2, 3, 0)},
		"a lost number":         {op(false, 0, 1, 1), op(false, 2, 3, 2), op(true, 4, 5, 1)},
	} {
		if porcupine.CheckOperations(ticketModel, h) {
			t.Errorf("%s passed", name)
		}
	}
}
