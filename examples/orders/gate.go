package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/headlease/headlease/drill/worker"
	"github.com/headlease/headlease/fence"
)

// gate is the worst place to be frozen at, between the check of a lease and
// the send: told by SIGUSR1, it gathers the chains that come there, stops the
// process, and lets them go when it is continued, whatever has become of their
// leases meanwhile.
type gate struct {
	mu     sync.Mutex
	closed chan struct{} // not nil: gathering; closed when the process goes on
	inside map[string]int
	held   []heldShard
}

const (
	// Chains are gathered until there are gatherEnough of each store, gatherMost at
	// most, for gatherFor; longer only while there is none of one of them.
	gatherEach   = 200 * time.Millisecond
	gatherFor    = 3 * time.Second
	gatherAtMost = 10 * time.Second
	gatherEnough = 15
	gatherMost   = 20
	// lateLimit bounds a write that passed the gate.
	lateLimit = 10 * time.Second
)

func newGate() *gate { return &gate{} }

// send does a write that was checked. Chains of even shards are gathered before
// one store, those of odd ones before the other.
func (g *gate) send(ctx context.Context, shard uint32, held heldShard, store string, write func(ctx context.Context) error) error {
	g.mu.Lock()
	closed := g.closed
	if closed == nil || g.inside[store] >= gatherMost || (shard%2 == 0) != (store == inPostgres) {
		g.mu.Unlock()
		return write(ctx)
	}
	g.inside[store]++
	g.held = append(g.held, held)
	g.mu.Unlock()
	<-closed
	// As a packet on its way does, it knows nothing of the lease's end.
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), lateLimit)
	defer cancel()
	err := write(late)
	var stale *fence.StaleError
	say(report{Event: eventLate, Store: store, Refused: errors.As(err, &stale)})
	return err
}

// run waits for SIGUSR1 until ctx ends.
func (g *gate) run(ctx context.Context) {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	go func() {
		defer signal.Stop(asked)
		for {
			select {
			case <-ctx.Done():
				return
			case <-asked:
				g.freeze()
			}
		}
	}()
}

func (g *gate) freeze() {
	g.mu.Lock()
	g.closed, g.inside, g.held = make(chan struct{}), map[string]int{}, nil
	g.mu.Unlock()
	gather := time.NewTicker(gatherEach)
	defer gather.Stop()
	var held []heldShard
	for began := time.Now(); ; {
		<-gather.C
		g.mu.Lock()
		held = g.held[:len(g.held):len(g.held)]
		n := min(g.inside[inPostgres], g.inside[inRedis])
		g.mu.Unlock()
		if took := time.Since(began); n >= gatherEnough || n > 0 && took > gatherFor || took > gatherAtMost {
			break
		}
	}
	say(report{Event: eventFreezing, Held: held})
	// As SIGSTOP from outside would; it returns after SIGCONT.
	if err := worker.Freeze(); err != nil {
		fmt.Fprintln(os.Stderr, "freeze:", err)
	}
	g.mu.Lock()
	close(g.closed)
	g.closed = nil
	g.mu.Unlock()
}
