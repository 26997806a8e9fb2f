package replica

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// TestF1DelayedLeader: a leader that is far from the others when leadership
// moves learns of it late. Whatever passes its check must have seen everything
// that was acknowledged before the check began. The same readers ask
// hashicorp/raft's VerifyLeader, which lets stale reads pass in this very
// schedule: so the schedule is sharp, and the test can fail.
func TestF1DelayedLeader(t *testing.T) {
	const transfers = 6
	var passed, passedVerify, stale, staleVerify atomic.Int64
	for run := range transfers {
		synctest.Test(t, func(t *testing.T) {
			sim := newSimNet()
			c := newCluster(t, sim, three, func(cfg *Config) { cfg.Timing = TimingCalm() })
			c.start()
			far := c.setup()
			var near []string
			for _, n := range c.all() {
				if n != far {
					near = append(near, n.name)
				}
			}
			sim.far(far.name, 100*time.Millisecond, near...)
			ctx, cancel := context.WithCancel(context.Background())
			var mu sync.Mutex
			var acked atomic.Uint64 // the highest round acknowledged by anybody
			rng := rand.New(rand.NewPCG(uint64(run), 1))

			read := func(verify func() error, passed, stale *atomic.Int64) {
				for ctx.Err() == nil {
					want := acked.Load()
					if verify() == nil {
						passed.Add(1)
						if far.r.View().BallotRound() < want {
							stale.Add(1)
						}
					}
					time.Sleep(3 * time.Millisecond)
				}
			}
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					read(func() error { _, err := far.r.Check(ctx); return err }, &passed, &stale)
				})
				wg.Go(func() {
					read(func() error { return far.r.raft.Load().VerifyLeader().Error() }, &passedVerify, &staleVerify)
				})
			}
			// Writers on whoever leads.
			for _, n := range c.all() {
				wg.Go(func() {
					for ctx.Err() == nil {
						if got, err := n.reserve(ctx); err == nil {
							mu.Lock()
							acked.Store(max(acked.Load(), got))
							mu.Unlock()
						}
						time.Sleep(5 * time.Millisecond)
					}
				})
			}
			time.Sleep(time.Second + time.Duration(rng.IntN(200))*time.Millisecond)
			_ = far.r.raft.Load().LeadershipTransfer().Error()
			time.Sleep(2 * time.Second)
			cancel()
			wg.Wait()
			c.stop()
		})
	}
	t.Logf("stale reads: %d of %d after Check, %d of %d after VerifyLeader",
		stale.Load(), passed.Load(), staleVerify.Load(), passedVerify.Load())
	if stale.Load() != 0 {
		t.Errorf("%d stale reads passed the leadership check", stale.Load())
	}
	if staleVerify.Load() == 0 {
		t.Error("VerifyLeader let no stale read pass: this schedule shows nothing any more")
	}
	if passed.Load() == 0 {
		t.Error("no check passed at all")
	}
}

// gatedAsker answers on the test's word.
type gatedAsker struct {
	asked  chan string
	answer chan func(server string) (*pb.CurrentTermResponse, error)
}

func (g *gatedAsker) AskTerm(ctx context.Context, server string) (*pb.CurrentTermResponse, error) {
	select {
	case g.asked <- server:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case f := <-g.answer:
		return f(server)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// gated is a cluster whose first leader asks through a gatedAsker.
func gated(t *testing.T, f func(c *cluster, n *node, g *gatedAsker, same func(string) (*pb.CurrentTermResponse, error))) {
	synctest.Test(t, func(t *testing.T) {
		g := &gatedAsker{asked: make(chan string, 16), answer: make(chan func(string) (*pb.CurrentTermResponse, error))}
		c := newCluster(t, newSimNet(), three, func(cfg *Config) { cfg.Terms = g })
		c.start()
		n := c.setup()
		same := func(server string) (*pb.CurrentTermResponse, error) {
			return c.get(server).r.PeerServer().CurrentTerm(context.Background(), nil)
		}
		f(c, n, g, same)
		c.stop()
	})
}

// TestF1NeverJoinsARunningCheck: two slots. Calls made while a check runs all
// share the next one, whose requests go out after them.
func TestF1NeverJoinsARunningCheck(t *testing.T) {
	gated(t, func(c *cluster, n *node, g *gatedAsker, same func(string) (*pb.CurrentTermResponse, error)) {
		type outcome struct {
			first bool
			err   error
		}
		done := make(chan outcome, 100)
		call := func(first bool) {
			arrived := c.clock.Now()
			_, began, err := n.r.CheckAt(context.Background())
			if err == nil && began.Before(arrived) {
				t.Errorf("a check that began %v before the call answered it", arrived.Sub(began))
			}
			done <- outcome{first, err}
		}
		go call(true)
		<-g.asked
		<-g.asked // both others are asked: the check runs
		time.Sleep(time.Millisecond)
		for range 50 {
			go call(false)
		}
		synctest.Wait()
		g.answer <- same
		if o := <-done; !o.first || o.err != nil {
			t.Fatalf("the running check answered a later call: %+v", o)
		}
		synctest.Wait()
		if n := len(done); n != 0 {
			t.Fatalf("the running check answered %d later calls", n)
		}
		<-g.asked
		<-g.asked
		g.answer <- same
		for range 50 {
			if o := <-done; o.err != nil {
				t.Error(o.err)
			}
		}
		synctest.Wait()
		if extra := len(g.asked); extra != 0 {
			t.Errorf("50 calls took more than one more check: %d more questions", extra)
		}
	})
}

// TestF1Answers: which answers make a check pass.
func TestF1Answers(t *testing.T) {
	type answer = func(string) (*pb.CurrentTermResponse, error)
	edit := func(same answer, f func(*pb.CurrentTermResponse)) answer {
		return func(s string) (*pb.CurrentTermResponse, error) {
			r, err := same(s)
			f(r)
			return r, err
		}
	}
	refuse := func(string) (*pb.CurrentTermResponse, error) { return nil, errors.New("connection refused") }
	for _, tc := range []struct {
		name    string
		answers func(same answer) [2]answer
		pass    bool
	}{
		{"one agrees", func(s answer) [2]answer { return [2]answer{refuse, s} }, true},
		{"none answers", func(answer) [2]answer { return [2]answer{refuse, refuse} }, false},
		{"a higher term", func(s answer) [2]answer {
			return [2]answer{edit(s, func(r *pb.CurrentTermResponse) { r.Term++ }), s}
		}, false},
		{"lower terms", func(s answer) [2]answer {
			low := edit(s, func(r *pb.CurrentTermResponse) { r.Term-- })
			return [2]answer{low, low}
		}, false},
		{"F3 another data directory", func(s answer) [2]answer {
			return [2]answer{refuse, edit(s, func(r *pb.CurrentTermResponse) { r.RaftId += "x" })}
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			gated(t, func(c *cluster, n *node, g *gatedAsker, same func(string) (*pb.CurrentTermResponse, error)) {
				done := make(chan error, 1)
				go func() { _, err := n.r.Check(context.Background()); done <- err }()
				<-g.asked
				<-g.asked
				for _, a := range tc.answers(same) {
					select {
					case g.answer <- a:
					case <-time.After(time.Millisecond): // decided already
					}
					synctest.Wait()
				}
				err := <-done
				switch {
				case tc.pass && err != nil:
					t.Error(err)
				case !tc.pass && !errors.Is(err, ErrCheckFailed):
					t.Errorf("check: %v, want %v", err, ErrCheckFailed)
				}
			})
		})
	}
}

// TestF1Silence: a check that nobody answers fails after one heartbeat timeout.
func TestF1Silence(t *testing.T) {
	gated(t, func(c *cluster, n *node, g *gatedAsker, _ func(string) (*pb.CurrentTermResponse, error)) {
		began := time.Now()
		_, err := n.r.Check(context.Background())
		if !errors.Is(err, ErrCheckFailed) {
			t.Errorf("check: %v, want %v", err, ErrCheckFailed)
		}
		if took := time.Since(began); took != n.r.cfg.Timing.Heartbeat {
			t.Errorf("failed after %v, want %v", took, n.r.cfg.Timing.Heartbeat)
		}
	})
}

// TestF1NonVotersAreNotCounted: a non-voter in our term makes no majority.
func TestF1NonVotersAreNotCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := newSimNet()
		names := []string{"eu-1", "eu-2", "eu-3", "eu-4", "eu-5"}
		asks := map[string]*countingAsker{}
		c := newCluster(t, sim, names, func(cfg *Config) {
			asks[cfg.Name] = &countingAsker{in: cfg.Terms, count: map[string]int{}}
			cfg.Terms = asks[cfg.Name]
		})
		for _, name := range names {
			c.open(name)
		}
		servers := c.servers()
		for i := range servers {
			servers[i].Voter = i < 3
		}
		for i, n := range c.all() {
			if i < 3 { // the non-voters stay uninitialised: they could only answer
				if err := n.r.Bootstrap(servers); err != nil {
					t.Fatal(err)
				}
			}
			n.run()
		}
		n := c.setup()
		asked := map[string]bool{}
		for _, s := range n.r.Servers() {
			asked[s.Name] = s.Voter
		}
		if len(asked) != 5 || asked["eu-4"] || asked["eu-5"] {
			t.Fatalf("servers: %v", asked)
		}
		if _, err := n.r.Check(context.Background()); err != nil {
			t.Fatal(err)
		}
		ask := asks[n.name]
		ask.mu.Lock()
		if len(ask.count) == 0 || ask.count["eu-4"]+ask.count["eu-5"] != 0 {
			t.Errorf("asked %v, want voters only", ask.count)
		}
		ask.mu.Unlock()
		c.stop()
	})
}

type countingAsker struct {
	in    TermAsker
	mu    sync.Mutex
	count map[string]int
}

func (a *countingAsker) AskTerm(ctx context.Context, server string) (*pb.CurrentTermResponse, error) {
	a.mu.Lock()
	a.count[server]++
	a.mu.Unlock()
	return a.in.AskTerm(ctx, server)
}
