package replica

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
)

// TestSilentStreamUnderLoad: a follower whose streams went silent while entries
// were in flight gets entries again once it can be reached, under the same
// leader.
func TestSilentStreamUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, func(cfg *Config) { cfg.TransportTimeout = 300 * time.Millisecond })
		c.start()
		n := c.setup()
		term, _ := n.r.Leading()
		var other *node
		for _, f := range c.all() {
			if f != n {
				other = f
			}
		}
		c.sim.far(n.name, 10*time.Millisecond, other.name) // always some in flight
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for ctx.Err() == nil {
					_, _ = n.reserve(ctx)
					time.Sleep(3 * time.Millisecond)
				}
			})
		}
		time.Sleep(100 * time.Millisecond)
		c.sim.isolate(other.name, true)
		time.Sleep(20 * time.Millisecond)
		c.sim.isolate(other.name, false) // the streams that were open stay silent
		time.Sleep(500 * time.Millisecond)
		cancel()
		wg.Wait()
		if now, ok := n.r.Leading(); !ok || now != term {
			t.Fatalf("leadership moved: this run shows nothing")
		}
		want := n.r.View().BallotRound()
		c.until("catching up", func() bool { return other.r.View().BallotRound() >= want })
		c.stop()
	})
}

// stuckPipeline is hashicorp/raft's pipeline after its reader has gone:
// AppendEntries waits until Close.
type stuckPipeline struct {
	done   chan raft.AppendFuture
	closed chan struct{}
	once   sync.Once
}

func (p *stuckPipeline) AppendEntries(*raft.AppendEntriesRequest, *raft.AppendEntriesResponse) (raft.AppendFuture, error) {
	<-p.closed
	return nil, raft.ErrPipelineShutdown
}
func (p *stuckPipeline) Consumer() <-chan raft.AppendFuture { return p.done }
func (p *stuckPipeline) Close() error                       { p.once.Do(func() { close(p.closed) }); return nil }

type answered struct {
	raft.AppendFuture
	req  raft.AppendEntriesRequest
	resp raft.AppendEntriesResponse
}

func (a *answered) Request() *raft.AppendEntriesRequest   { return &a.req }
func (a *answered) Response() *raft.AppendEntriesResponse { return &a.resp }

// TestPipelineClosesWithItsReader: after the answer at which the reader stops,
// the sender is free, whether or not the reader takes that answer.
func TestPipelineClosesWithItsReader(t *testing.T) {
	for name, last := range map[string]raft.AppendEntriesResponse{
		"newer term": {Term: 8, Success: true},
		"refused":    {Term: 7},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				in := &stuckPipeline{done: make(chan raft.AppendFuture), closed: make(chan struct{})}
				p := newPipeline(in, nil)
				sent := make(chan error, 1)
				go func() { _, err := p.AppendEntries(nil, nil); sent <- err }()
				in.done <- &answered{req: raft.AppendEntriesRequest{Term: 7}, resp: raft.AppendEntriesResponse{Term: 7, Success: true}}
				<-p.Consumer()
				synctest.Wait()
				if len(sent) != 0 {
					t.Fatal("closed by an answer that goes on")
				}
				in.done <- &answered{req: raft.AppendEntriesRequest{Term: 7}, resp: last}
				if err := <-sent; !errors.Is(err, raft.ErrPipelineShutdown) {
					t.Errorf("sender: %v", err)
				}
				if err := p.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}
