package lessor

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func (r *rig) drain(grace time.Duration) {
	r.l.Grace(r.now, part, grace)
	r.must(&pb.Command{Term: r.term, Kind: &pb.Command_StartDrain{StartDrain: &pb.StartDrainCommand{
		Partition: part, Epoch: uint32(r.epoch()), Successor: "us",
	}}})
}

func (r *rig) abort() {
	r.must(&pb.Command{Term: r.term, Kind: &pb.Command_AbortDrain{AbortDrain: &pb.AbortDrainCommand{
		Partition: part, Epoch: uint32(r.epoch()),
	}}})
}

// commitAll commits what is proposed until nothing is.
func (r *rig) commitAll() {
	for len(r.commands) > 0 {
		c := r.commands[0]
		r.commands = r.commands[1:]
		res := r.apply(c.Command)
		r.l.CommandDone(r.now, c.ID, res, nil)
		r.take()
	}
}

// A drain tells every holder at once when it has to stop, and the partition is
// drained when the last lease is gone: released, or at that time.
func TestF26ADrainRevokesWithADeadline(t *testing.T) {
	r := newRig(t, 2)
	a, b := r.acquire("s0", "a"), r.acquire("s1", "b")
	r.attach(1, "s0", tokens{"a": a})
	r.attach(2, "s1", tokens{"b": b})
	r.hold(4 * time.Second)
	clear(r.sends)
	if _, ok := r.l.Drain(r.now, part); ok {
		t.Fatal("it drains before it was asked to")
	}
	r.drain(10 * time.Second)
	if _, drained := r.l.Drained(r.now, part, 1); drained || len(r.commands) != 2 {
		t.Fatalf("drained %v, proposed %v", drained, r.commands)
	}
	r.commitAll()
	for on, token := range map[StreamID]fence.Token{1: a, 2: b} {
		if w := r.only(on).GetWithdrawal(); w.GetToken() != uint64(token) || since(w.GetUntil()) != 10*time.Second || w.GetReason() != pb.WithdrawalReason_WITHDRAWAL_REASON_REVOKED {
			t.Fatalf("withdrawn: %v", w)
		}
	}
	r.release("s0", "a", a)
	if got, _ := r.l.Drain(r.now, part); got != (Draining{Epoch: 1, Successor: "us", Leases: 1, Left: 10 * time.Second}) {
		t.Fatalf("%+v", got)
	}
	for at := time.Second; at < 10*time.Second; at += time.Second {
		r.keepalive(2, "s1", nil)
		r.to(at)
		r.hold(at + 4*time.Second)
	}
	r.none()
	r.to(10 * time.Second)
	r.commitAll()
	settled, drained := r.l.Drained(r.now, part, 1)
	if !settled || !drained {
		t.Fatalf("settled %v, drained %v", settled, drained)
	}
	if _, wrong := r.l.Drained(r.now, part, 2); wrong {
		t.Fatal("another epoch is drained")
	}
}

// Lock delays that the drain itself may bring are waited for until its end, and
// then left to the next owner.
func TestF26ADrainWaitsForLockDelays(t *testing.T) {
	for _, c := range []struct {
		delay   int64
		settled bool
	}{{2_000, true}, {60_000, false}} {
		r := newRig(t, 1)
		r.must(&pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
			SessionId: "s0", RequestId: 1, Resource: "a", Partition: part, Epoch: 1, LockDelayMs: c.delay,
		}}})
		r.must(&pb.Command{Term: r.term, Kind: &pb.Command_Expire{Expire: &pb.ExpireCommand{SessionIds: []string{"s0"}}}})
		r.drain(5 * time.Second)
		if d, _ := r.l.Drain(r.now, part); d.Leases != 0 || d.Delays != 1 {
			t.Fatalf("%+v", d)
		}
		if _, drained := r.l.Drained(r.now, part, 1); drained {
			t.Fatal("drained while a lock delay runs")
		}
		r.to(5 * time.Second)
		r.commitAll()
		if settled, drained := r.l.Drained(r.now, part, 1); !drained || settled != c.settled {
			t.Errorf("delay of %d ms: settled %v, drained %v", c.delay, settled, drained)
		}
	}
}

// What is not revoked when the drain is aborted is held as before; what is, passes
// on.
func TestAnAbortedDrainRevokesNoMore(t *testing.T) {
	r := newRig(t, 1)
	r.attach(1, "s0", nil)
	r.hold(4 * time.Second)
	tok := tokens{}
	for i := range maxInflight + 10 {
		name := fmt.Sprintf("a%03d", i)
		tok[name] = r.acquire("s0", name)
	}
	r.drain(time.Second)
	if len(r.commands) != maxInflight {
		t.Fatalf("%d proposed", len(r.commands))
	}
	r.abort()
	first, rest := r.commands[0], r.commands[1:]
	r.commands = nil
	r.commit(first)
	for _, c := range rest { // refused, or lost: nothing more is proposed for them
		r.l.CommandDone(r.now, c.ID, nil, nil)
	}
	r.to(9 * time.Second)
	revoked := 0
	for l := range r.m.View().Leases() {
		if l.Revoked {
			revoked++
		}
	}
	for _, c := range r.commands {
		if e := c.Command.GetEndRevocation(); e == nil || e.GetResource() != "a000" {
			t.Errorf("proposed: %v", c.Command)
		}
	}
	if revoked != 1 || r.l.Stats().Revocations != 1 {
		t.Errorf("%d revoked", revoked)
	}
	if _, ok := r.l.Drain(r.now, part); ok {
		t.Error("it drains")
	}
}

// A new leader goes on with the drain that it finds. What it was not told it
// takes from what may have been sent.
func TestF26ANewLeaderGoesOnWithADrain(t *testing.T) {
	r := newRig(t, 1)
	r.acquire("s0", "a")
	r.acquire("s0", "b")
	r.drain(time.Hour)
	r.commit(r.commands[0])
	r.elect()
	if len(r.commands) != 1 || r.commands[0].Command.GetRevoke().GetResource() != "b" {
		t.Fatalf("proposed: %v", r.commands)
	}
	r.commitAll()
	r.to(d - ms)
	r.none()
	r.to(d)
	r.commitAll()
	if settled, drained := r.l.Drained(r.now, part, 1); !settled || !drained {
		t.Errorf("settled %v, drained %v", settled, drained)
	}
}

// TestI4ADrainedLeaseIsBelievedByNobody drives random drains, aborts, releases,
// keepalives, broken streams and elections against a shipped client that takes
// its messages late: whatever the region holds for nobody, or for another token,
// the client does not believe in, at any time. A resumed drain finds no lease that
// the client still believes in.
func TestI4ADrainedLeaseIsBelievedByNobody(t *testing.T) {
	drains, believed, extended := 0, 0, 0
	for seed := range uint64(150) {
		rng := rand.New(rand.NewPCG(seed, 13))
		r := newRig(t, 1)
		c := validity.New(validity.Config{})
		c.OpenSession("s0", ttl)
		var on validity.StreamID
		var queue []*pb.AttachResponse
		connect := func() {
			if on != 0 {
				c.StreamBroken(on)
			}
			queue = nil
			on = c.StreamOpened()
			r.stream(StreamID(on))
		}
		connect()
		holding := map[string]fence.Token{}
		revokedAt := map[fence.Token]instant.Instant{}
		for range 300 {
			r.now = r.now.Add(time.Duration(rng.Int64N(int64(300 * ms))))
			r.l.Tick(r.now)
			r.take()
			r.commitAll()
			p, _ := r.m.View().Partition(part)
			resource := fmt.Sprintf("lock/%d", rng.IntN(4))
			l, held := r.m.View().Lease(resource)
			switch op := rng.IntN(14); {
			case op < 3 && !held && !p.Draining():
				r.request++
				c.RequestBegun("s0", r.request, resource)
				res := r.must(&pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
					SessionId: "s0", RequestId: r.request, Resource: resource, Partition: part, Epoch: 1,
				}}})
				holding[resource] = fence.Token(res.GetAcquire().GetGranted().GetToken())
			case op == 3 && held:
				c.Releasing(r.now, "s0", resource, l.Token)
				r.release("s0", resource, l.Token)
				c.Released(r.now, "s0", resource, l.Token)
			case op == 4 && !p.Draining() && rng.IntN(3) == 0:
				r.drain(time.Duration(rng.Int64N(int64(8 * time.Second))))
				drains++
			case op == 5 && p.Draining() && rng.IntN(4) == 0:
				r.abort()
			case op == 6 && rng.IntN(6) == 0:
				connect()
			case op == 7 && rng.IntN(10) == 0:
				r.elect()
				connect()
			case op < 10:
				r.l.Keepalive(r.now, StreamID(on), c.Keepalive(r.now, "s0", on))
				r.check()
			case op < 12:
				r.hold(r.now.Add(d).Sub(t0))
			default:
				for n := rng.IntN(6); n > 0 && len(queue) > 0; n-- {
					c.Received(r.now, on, queue[0])
					queue = queue[1:]
				}
			}
			queue = append(queue, r.sent(StreamID(on))...)
			p, _ = r.m.View().Partition(part)
			for resource, token := range holding {
				l, held := r.m.View().Lease(resource)
				valid := c.Valid(r.now, "s0", resource, token)
				if held && l.Token == token {
					if l.Revoked && revokedAt[token] == 0 {
						revokedAt[token] = r.now
					}
					if valid {
						believed++
						if at := revokedAt[token]; at != 0 && r.now.Sub(at) > d {
							extended++
						}
					}
					continue
				}
				if valid {
					t.Fatalf("seed %d: the client believes in %v on %s, which is held no more", seed, token, resource)
				}
				delete(holding, resource)
			}
			if _, drained := r.l.Drained(r.now, part, 1); drained != (p.Draining() && r.m.View().Counts().Leases == 0) {
				t.Fatalf("seed %d: drained %v with %+v", seed, drained, r.m.View().Counts())
			}
		}
	}
	t.Logf("%d drains, %d times a lease was believed in, %d of them longer after its revocation than a head lease lasts", drains, believed, extended)
	if drains == 0 || believed == 0 || extended == 0 {
		t.Error("the walks show nothing")
	}
}
