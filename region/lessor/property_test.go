package lessor

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// brute is the deadlines by their definition: all arrivals and all checks are
// kept, and every answer is a search through them.
type brute struct {
	start    instant.Instant
	ttl      time.Duration
	arrivals []bruteArrival
	// passed checks, by how many arrivals there were when each began.
	covered int
}

type bruteArrival struct {
	session string
	at      instant.Instant
	taken   bool
}

func (b *brute) deadlines(session string) (expiry, sendable instant.Instant) {
	expiry, sendable = b.start.Add(b.ttl), b.start.Add(b.ttl)
	for i, a := range b.arrivals {
		if a.session != session || !a.taken {
			continue
		}
		expiry = max(expiry, a.at.Add(b.ttl))
		if i < b.covered {
			sendable = max(sendable, a.at.Add(b.ttl))
		}
	}
	return expiry, sendable
}

// TestDeadlinesAgainstBruteForce drives random keepalives, checks that fail and
// pass late, and time; after each step both deadlines are those of the
// definition, acks say the sendable one, and a session is expired exactly when
// its expiry deadline has passed. With checks that overlap, of which the oldest
// may cover what the Lessor has forgotten for something newer, the sendable
// deadline is at most the one of the definition, and equal once the newest check
// has passed and none has failed.
func TestDeadlinesAgainstBruteForce(t *testing.T) {
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 7))
		overlap, failed := seed%2 == 1, false
		const n = 4
		r := newRig(t, n)
		b := &brute{start: t0, ttl: ttl}
		type check struct {
			ticket Ticket
			began  int
		}
		var running []check
		expiring := map[string]Command{}
		ended := map[string]bool{}
		for i := range n {
			r.stream(StreamID(i + 1))
		}
		for range 150 {
			exact := !overlap
			id := rng.IntN(n)
			s, on := fmt.Sprintf("s%d", id), StreamID(id+1)
			switch op := rng.IntN(10); {
			case op < 4:
				r.keepalive(on, s, nil)
				_, busy := expiring[s]
				b.arrivals = append(b.arrivals, bruteArrival{s, r.now, !busy && !ended[s]})
			case op < 6 && (overlap || len(running) == 0):
				running = append(running, check{r.l.CheckBegun(r.now), len(b.arrivals)})
			case op < 8 && len(running) > 0:
				k := rng.IntN(len(running))
				c := running[k]
				running = slices.Delete(running, k, k+1)
				if rng.IntN(4) == 0 {
					r.l.CheckFailed(r.now, c.ticket)
					failed = true
					break
				}
				r.l.CheckPassed(r.now, c.ticket)
				b.covered = max(b.covered, c.began)
				exact = exact || !failed && c.ticket.order == r.l.begun
			case op == 8 && len(expiring) > 0 && rng.IntN(3) == 0:
				for _, id := range slices.Sorted(mapsKeys(expiring)) {
					c := expiring[id]
					for _, x := range c.Command.GetExpire().GetSessionIds() {
						delete(expiring, x)
						ended[x] = true
					}
					r.commit(c)
					break
				}
			default:
				r.now = r.now.Add(time.Duration(rng.Int64N(int64(3 * time.Second))))
				r.l.Tick(r.now)
			}
			r.take()
			for i := range n {
				s := fmt.Sprintf("s%d", i)
				if ended[s] {
					continue
				}
				wantExpiry, wantSendable := b.deadlines(s)
				expiry, sendable, ok := r.l.Deadlines(s)
				if !ok || expiry != wantExpiry || sendable > wantSendable || exact && sendable != wantSendable {
					t.Fatalf("seed %d, %s: deadlines %v and %v, want %v and %v", seed, s,
						expiry.Sub(t0), sendable.Sub(t0), wantExpiry.Sub(t0), wantSendable.Sub(t0))
				}
				for _, m := range r.sent(StreamID(i + 1)) {
					if a := m.GetAck(); a != nil && (a.SessionUntil != int64(sendable) || a.ReceivedAt+int64(ttl) > a.SessionUntil) {
						t.Fatalf("seed %d, %s: acknowledged %v, want until %v", seed, s, a, sendable.Sub(t0))
					}
				}
			}
			for _, c := range r.commands {
				for _, x := range c.Command.GetExpire().GetSessionIds() {
					expiry, _ := b.deadlines(x)
					if expiry > r.now {
						t.Fatalf("seed %d: %s expires %v too early", seed, x, expiry.Sub(r.now))
					}
					if _, twice := expiring[x]; twice {
						t.Fatalf("seed %d: %s is expired twice at once", seed, x)
					}
					expiring[x] = c
				}
			}
			r.commands = nil
			r.l.Tick(r.now)
			r.take()
			for i := range n {
				s := fmt.Sprintf("s%d", i)
				expiry, _ := b.deadlines(s)
				_, busy := expiring[s]
				for _, c := range r.commands {
					busy = busy || slices.Contains(c.Command.GetExpire().GetSessionIds(), s)
				}
				if !ended[s] && !busy && expiry <= r.now {
					t.Fatalf("seed %d: %s is over for %v and not expired", seed, s, r.now.Sub(expiry))
				}
			}
			for _, c := range r.commands {
				for _, x := range c.Command.GetExpire().GetSessionIds() {
					expiring[x] = c
				}
			}
			r.commands = nil
		}
	}
}

func mapsKeys(m map[string]Command) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// TestStreamsAgainstAClient drives random grants, releases, revocations,
// breaks and elections against shipped clients that take the streams in order
// with delays, and checks that the client's hash is understood: no stream in
// order ever meets a mismatch, and after a quiet exchange client and region
// agree.
func TestStreamsAgainstAClient(t *testing.T) {
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 11))
		r := newRig(t, 2)
		c := validity.New(validity.Config{})
		c.OpenSession("s0", ttl)
		var on validity.StreamID
		var queue []*pb.AttachResponse
		first := true
		deliver := func(n int) {
			for ; n > 0 && len(queue) > 0; n-- {
				for _, e := range c.Received(r.now, on, queue[0]) {
					if e.Kind == validity.Stranger {
						t.Fatalf("seed %d: stranger %+v", seed, e)
					}
				}
				queue = queue[1:]
			}
		}
		connect := func() {
			if on != 0 {
				c.StreamBroken(on)
			}
			queue = nil
			on = c.StreamOpened()
			r.stream(StreamID(on))
		}
		keepalive := func() {
			r.l.Keepalive(r.now, StreamID(on), c.Keepalive(r.now, "s0", on))
			r.check()
			for _, m := range r.sent(StreamID(on)) {
				if a := m.GetAck(); a.GetComplete() && !first {
					t.Fatalf("seed %d: a stream in order met a mismatch: %v", seed, a)
				}
				queue = append(queue, m)
			}
		}
		// A keepalive sent before the first ack came cannot follow the stream;
		// here none is.
		begin := func() {
			connect()
			first = true
			keepalive()
			deliver(len(queue))
			first = false
		}
		begin()
		for range 200 {
			r.now = r.now.Add(time.Duration(rng.Int64N(int64(200 * ms))))
			r.hold(r.now.Add(d).Sub(t0))
			r.l.Tick(r.now)
			r.take()
			for _, cmd := range r.commands {
				r.commit(cmd)
			}
			r.commands = nil
			resource := fmt.Sprintf("lock/%d", rng.IntN(6))
			l, held := r.m.View().Lease(resource)
			switch op := rng.IntN(12); {
			case op < 3 && !held:
				r.request++
				c.RequestBegun("s0", r.request, resource)
				r.must(&pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
					SessionId: "s0", RequestId: r.request, Resource: resource, Partition: part, Epoch: 1,
				}}})
			case op < 5 && held:
				c.Releasing(r.now, "s0", resource, l.Token)
				r.release("s0", resource, l.Token)
				c.Released(r.now, "s0", resource, l.Token)
			case op == 5 && held && !l.Revoked:
				r.revoke(resource, l.Token)
			case op == 6 && rng.IntN(4) == 0:
				begin()
			case op == 7 && rng.IntN(6) == 0:
				r.elect()
				begin()
			case op < 9:
				keepalive()
			default:
				deliver(rng.IntN(4))
			}
			queue = append(queue, r.sent(StreamID(on))...)
		}
		// A quiet exchange: all is delivered, no revocation is left.
		r.hold(r.now.Add(d).Sub(t0))
		keepalive()
		deliver(len(queue))
		for res := range 6 {
			resource := fmt.Sprintf("lock/%d", res)
			l, held := r.m.View().Lease(resource)
			token, known := c.Lease("s0", resource)
			if held && !l.Revoked && (!known || token != l.Token || !c.Valid(r.now, "s0", resource, token)) {
				t.Fatalf("seed %d: %s: the region's %v is not the client's %v", seed, resource, l.Token, token)
			}
			if !held && known && c.Valid(r.now, "s0", resource, token) {
				t.Fatalf("seed %d: %s: the client believes in %v, held by nobody", seed, resource, token)
			}
		}
	}
}

// A clone shares nothing and behaves alike.
func TestCloneIsIndependent(t *testing.T) {
	r, k := offer(t)
	r.keepalive(2, "s1", nil)
	form := r.l.AppendState(nil, r.now, false)
	c := r.l.Clone()
	if got := c.AppendState(nil, r.now, false); string(got) != string(form) {
		t.Fatalf("the clone differs:\n%q\n%q", got, form)
	}
	c.CheckPassed(r.now, c.CheckBegun(r.now))
	c.Keepalive(r.now, 2, &pb.Keepalive{SessionId: "s1", TokensHash: validity.TokenHash("lock/a", k)})
	c.Tick(r.now.Add(time.Hour))
	c.ClockGap(r.now.Add(time.Hour))
	if got := r.l.AppendState(nil, r.now, false); string(got) != string(form) {
		t.Error("a change of the clone shows in the original")
	}
	if got := c.AppendState(nil, r.now, false); string(got) == string(form) {
		t.Error("the form does not show the change")
	}
	if out := r.l.Take(); !out.Empty() {
		t.Errorf("the clone's effects are in the original: %+v", out)
	}
}

// Whoever adds a field must think of Clone and AppendState.
func TestModelKnowsEveryField(t *testing.T) {
	for typ, want := range map[reflect.Type]int{
		reflect.TypeFor[Lessor]():    29,
		reflect.TypeFor[partition](): 17,
		reflect.TypeFor[session]():   25,
		reflect.TypeFor[lease]():     16,
		reflect.TypeFor[stream]():    8,
		reflect.TypeFor[arrival]():   4,
		reflect.TypeFor[timer]():     4,
		reflect.TypeFor[inflight]():  9,
		reflect.TypeFor[point]():     2,
		reflect.TypeFor[waiter]():    6,
		reflect.TypeFor[delay]():     6,
	} {
		if got := typ.NumField(); got != want {
			t.Errorf("%v has %d fields, model.go was written for %d: look at Clone and AppendState", typ, got, want)
		}
	}
}

// BenchmarkKeepalive is one keepalive of one of 20,000 sessions with four
// leases each, with its share of a check for all.
func BenchmarkKeepalive(b *testing.B) {
	const n = 20_000
	r := newRig(b, n)
	held := make([]tokens, n)
	for i := range n {
		held[i] = tokens{}
		for k := range 4 {
			res := fmt.Sprintf("lock/%d-%d", i, k)
			held[i][res] = r.acquire(fmt.Sprintf("s%d", i), res)
		}
		r.stream(StreamID(i + 1))
	}
	msgs := make([]*pb.Keepalive, n)
	for i := range msgs {
		msgs[i] = &pb.Keepalive{SessionId: fmt.Sprintf("s%d", i), Sequence: 1, TokensHash: validity.TokensHash(held[i])}
	}
	r.hold(d)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		k := i % n
		r.l.Keepalive(r.now, StreamID(k+1), msgs[k])
		if k%500 == 499 {
			r.l.CheckPassed(r.now, r.l.CheckBegun(r.now))
			r.l.Take()
			r.now = r.now.Add(50 * ms)
			r.l.HeadLease(r.now, part, 1, r.now.Add(d))
			r.l.Tick(r.now)
		}
	}
}
