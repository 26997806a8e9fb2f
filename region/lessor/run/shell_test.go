package run

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	d    = 4 * time.Second
	ttl  = 10 * time.Second
	self = 7
	hour = time.Hour
)

// rig is a shell that leads, over the shipped state machine on a Raft group of
// one whose commits and checks the test can hold.
type rig struct {
	t     *testing.T
	clock *jumpy
	shell *Shell
	end   func()

	mu      sync.Mutex
	machine *state.Machine
	index   uint64
	term    uint64
	stale   bool
	unknown bool         // commits take effect, and their answers are lost
	check   func() error // nil: checks pass at once
	began   []instant.Instant
	kinds   map[string]int // commands proposed by the lessor
}

// start runs a rig that owns partition p and has sessions a and b.
func start(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, clock: &jumpy{Clock: clock.NewRuntime()}, machine: state.New(), kinds: map[string]int{}}
	r.shell = New(Config{Raft: r, Clock: r.clock})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.shell.Run(ctx) }()
	r.end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(r.end)
	me := &pb.Voter{Id: "region/eu", Incarnation: self}
	r.apply(&pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: "eu", Incarnation: self}}})
	r.apply(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: &pb.ClusterConfiguration{
		ClusterId: "c", ClusterName: "c", Version: 1, Shards: 1, DNs: int64(d), Voters: []*pb.Voter{me, {Id: "witness/w", Incarnation: 9}},
		Partitions: []*pb.PartitionSpec{{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 0}}, Prefer: []string{"eu"}}},
	}}}})
	r.elect()
	b := register.Ballot{Round: 1, Region: "eu", Incarnation: self}
	v := register.Value{Owner: register.Region{Name: "eu", Incarnation: self}, Epoch: 1, D: d}
	r.apply(&pb.Command{Term: 1, Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{Items: []*pb.AcceptedItem{{
		Partition: "p", Guard: register.Record{}.Guard().Proto(), Ballot: b.Proto(), Value: v.Proto(),
	}}}}})
	r.apply(&pb.Command{Term: 1, Kind: &pb.Command_Adopt{Adopt: &pb.AdoptCommand{Partition: "p", Epoch: 1, Ballot: b.Proto()}}})
	r.own()
	for _, id := range []string{"a", "b"} {
		r.apply(&pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{
			SessionId: id, SecretHash: make([]byte, 32), TtlMs: ttl.Milliseconds(), Identity: "client/" + id,
		}}})
	}
	synctest.Wait()
	return r
}

// own holds the head lease for an hour.
func (r *rig) own() { r.shell.Held("p", 1, r.clock.Now().Add(hour)) }

// apply commits a command as the FSM goroutine would.
func (r *rig) apply(cmd *pb.Command) *pb.CommandResult {
	r.mu.Lock()
	r.index++
	res, events := r.machine.Apply(r.index, r.term, cmd)
	r.mu.Unlock()
	if res.GetError() != nil {
		r.t.Fatalf("%v: %v", cmd, res)
	}
	r.shell.Applied(events)
	return res
}

func (r *rig) acquire(session string, request uint64, wait bool) uint64 {
	r.t.Helper()
	res := r.apply(&pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
		SessionId: session, RequestId: request, LowestOpenRequest: request, Resource: "lock/x", Partition: "p", Epoch: 1, Wait: wait,
	}}})
	return res.GetAcquire().GetGranted().GetToken()
}

func (r *rig) elect() {
	r.set(func() { r.term++ })
	r.shell.Deposed(r.term - 1)
	r.apply(&pb.Command{Term: r.term, Kind: &pb.Command_BeginTerm{BeginTerm: &pb.BeginTermCommand{Server: "eu-1"}}})
	r.mu.Lock()
	view := r.machine.View()
	r.mu.Unlock()
	r.shell.Begin(r.term, view)
}

func (r *rig) set(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// proposed counts the lessor's commands of a kind.
func (r *rig) proposed(kind string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.kinds[kind]
}

func (r *rig) ProposeUrgent(_ context.Context, cmd *pb.Command) (*pb.CommandResult, error) {
	m := cmd.ProtoReflect()
	r.mu.Lock()
	r.kinds[string(m.WhichOneof(m.Descriptor().Oneofs().ByName("kind")).Name())]++
	unknown := r.unknown
	r.mu.Unlock()
	res := r.apply(cmd)
	if unknown {
		return nil, errors.New("outcome unknown")
	}
	return res, nil
}

func (r *rig) Check(context.Context) (uint64, error) {
	r.mu.Lock()
	r.began = append(r.began, r.clock.Now())
	check, term := r.check, r.term
	r.mu.Unlock()
	if check == nil {
		return term, nil
	}
	return term, check()
}

func (r *rig) PulseFresh(instant.Instant) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.stale
}

// attach opens a stream whose messages are collected until it ends.
func (r *rig) attach() (*Stream, *inbox) {
	r.t.Helper()
	q := NewQueue()
	st, err := r.shell.Attach(q)
	if err != nil {
		r.t.Fatal(err)
	}
	in := &inbox{}
	go func() {
		for {
			ms, err := q.Next(context.Background())
			in.mu.Lock()
			in.all, in.err = append(in.all, ms...), err
			in.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return st, in
}

type inbox struct {
	mu  sync.Mutex
	all []*pb.AttachResponse
	err error
}

// acks are the sequences acknowledged, after all is done that can be.
func (in *inbox) acks() (out []*pb.Ack) {
	settle()
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, m := range in.all {
		if a := m.GetAck(); a != nil {
			out = append(out, a)
		}
	}
	return out
}

// settle lets all be done that can be, a leadership check included.
func settle() {
	synctest.Wait()
	time.Sleep(50 * time.Millisecond) // virtual; what a check may wait for others
	synctest.Wait()
}

func (in *inbox) ended() error {
	synctest.Wait()
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.err
}

func keepalive(session string, sequence uint64) *pb.Keepalive {
	return &pb.Keepalive{SessionId: session, Sequence: sequence}
}

func TestAKeepaliveIsAcknowledgedAfterACheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		st, in := r.attach()
		r.set(func() { r.began = nil })
		arrived := r.clock.Now()
		st.Keepalive(keepalive("a", 1))
		acks := in.acks()
		if len(acks) != 1 || acks[0].GetSequence() != 1 || !acks[0].GetComplete() ||
			acks[0].GetSessionUntil() != int64(arrived.Add(ttl)) || acks[0].GetReceivedAt() != int64(arrived) {
			t.Fatalf("%v", acks)
		}
		if len(r.began) != 1 || r.began[0] < arrived {
			t.Errorf("checks began at %v, the keepalive came at %v", r.began, arrived)
		}
		r.set(func() { r.began = nil })
		time.Sleep(3 * time.Second) // the bubble's time
		synctest.Wait()
		if len(r.began) != 0 {
			t.Errorf("%d checks while nobody waits", len(r.began))
		}
	})
}

// TestKeepalivesShareACheck: one that has time left waits for others.
func TestKeepalivesShareACheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		st, in := r.attach()
		st.Keepalive(keepalive("a", 1))
		st.Keepalive(keepalive("b", 1))
		in.acks()
		time.Sleep(3 * time.Second) // the bubble's time
		r.set(func() { r.began = nil })
		first := r.clock.Now()
		st.Keepalive(keepalive("a", 2))
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
		if len(r.began) != 0 {
			t.Errorf("checks began at once: %v", r.began)
		}
		st.Keepalive(keepalive("b", 2))
		if acks := in.acks(); len(acks) != 4 {
			t.Errorf("%d acks of 2 keepalives each of 2 sessions", len(acks))
		}
		if len(r.began) != 1 || r.began[0].Sub(first) != 50*time.Millisecond {
			t.Errorf("checks began at %v, the first keepalive came at %v", r.began, first)
		}
		r.set(func() { r.began = nil })
		st.Keepalive(keepalive("a", 3))
		time.Sleep(time.Millisecond)
		other, _ := r.attach()
		other.Keepalive(keepalive("b", 1)) // begins to speak for it
		synctest.Wait()
		time.Sleep(checkEvery)
		synctest.Wait()
		if len(r.began) != 1 {
			t.Errorf("a new stream's first keepalive waits: checks began at %v", r.began)
		}
	})
}

// TestF1ACheckThatRunsCoversNothingThatArrivesMeanwhile.
func TestF1ACheckThatRunsCoversNothingThatArrivesMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		st, in := r.attach()
		pass := make(chan struct{})
		r.set(func() { r.check = func() error { <-pass; return nil } })
		st.Keepalive(keepalive("a", 1))
		settle() // its check runs
		time.Sleep(time.Second)
		st.Keepalive(keepalive("a", 2))
		st.Keepalive(keepalive("b", 1))
		pass <- struct{}{}
		if acks := in.acks(); len(acks) != 1 || acks[0].GetSequence() != 1 || acks[0].GetSessionId() != "a" {
			t.Fatalf("after the first check: %v", acks)
		}
		pass <- struct{}{}
		if acks := in.acks(); len(acks) != 3 || acks[1].GetSequence()+acks[2].GetSequence() != 3 {
			t.Fatalf("after the second check: %v", acks)
		}
		r.set(func() { r.check = nil })
		close(pass)
	})
}

func TestF7WithoutAPassedCheckNothingIsSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		st, in := r.attach()
		r.set(func() { r.check = func() error { return errors.New("no majority") }; r.began = nil })
		st.Keepalive(keepalive("a", 1))
		time.Sleep(time.Second)
		if acks := in.acks(); len(acks) != 0 {
			t.Fatalf("%v", acks)
		}
		if n := len(r.began); n < 10 || n > 110 {
			t.Errorf("%d checks in a second of failures", n)
		}
		r.set(func() { r.check = nil })
		time.Sleep(time.Second)
		if acks := in.acks(); len(acks) != 1 {
			t.Errorf("when checks pass again: %v", acks)
		}
	})
}

func TestF30WithAStalePulseNothingIsSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		st, in := r.attach()
		token := r.acquire("a", 1, false)
		r.set(func() { r.stale = true })
		st.Keepalive(keepalive("a", 1))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, _, err := r.shell.Answer(ctx, "a", "lock/x", fence.Token(token)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("answered: %v", err)
		}
		if acks := in.acks(); len(acks) != 0 {
			t.Errorf("acknowledged: %v", acks)
		}
		r.set(func() { r.stale = false })
		time.Sleep(time.Second)
		if acks := in.acks(); len(acks) != 1 {
			t.Errorf("with a fresh pulse: %v", acks)
		}
	})
}

func TestAnswerWaitsForTheFirstCheckOfTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		token := r.acquire("a", 1, false)
		pass := make(chan struct{})
		r.set(func() { r.check = func() error { <-pass; return nil } })
		r.elect()
		r.own()
		answered := make(chan *pb.Held, 1)
		go func() {
			held, term, err := r.shell.Answer(t.Context(), "a", "lock/x", fence.Token(token))
			if err != nil || term != 2 {
				t.Error(term, err)
			}
			answered <- held
		}()
		time.Sleep(time.Second)
		select {
		case held := <-answered:
			t.Fatalf("answered before a check: %v", held)
		default:
		}
		close(pass)
		if held := <-answered; held.GetToken() != token || held.GetUntil() > int64(r.clock.Now().Add(ttl)) {
			t.Errorf("%v", held)
		}
		r.shell.Deposed(2)
		if _, _, err := r.shell.Answer(t.Context(), "a", "lock/x", fence.Token(token)); !errors.Is(err, ErrNotLeading) {
			t.Errorf("deposed: %v", err)
		}
	})
}

func TestDeposedEndsStreamsAndWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		st, in := r.attach()
		r.shell.Deposed(1)
		if err := in.ended(); !errors.Is(err, ErrNotLeading) {
			t.Errorf("the stream ended with %v", err)
		}
		st.Keepalive(keepalive("a", 1)) // nobody's
		if _, err := r.shell.Attach(NewQueue()); !errors.Is(err, ErrNotLeading) {
			t.Error(err)
		}
		r.elect()
		st.Keepalive(keepalive("a", 2)) // a stream of another term
		st.Close()
		if in.acks() != nil {
			t.Error("a stream of an ended term was answered")
		}
		_, in = r.attach()
		r.shell.ClockGap()
		if err := in.ended(); !errors.Is(err, ErrDetached) {
			t.Errorf("after a clock gap the stream ended with %v", err)
		}
	})
}

func TestASlowReaderIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		q := NewQueue()
		st, err := r.shell.Attach(q) // and nobody reads
		if err != nil {
			t.Fatal(err)
		}
		for i := range uint64(maxQueued + 1) {
			st.Keepalive(keepalive("a", i+1))
			settle()
		}
		select {
		case <-q.Done():
		default:
			t.Fatal("still open")
		}
		if n := r.shell.Stats().Streams; n != 0 {
			t.Errorf("the lessor has %d streams", n)
		}
		ms, err := q.Next(t.Context())
		if len(ms) != maxQueued || err != nil {
			t.Errorf("%d messages, %v", len(ms), err)
		}
		if _, err := q.Next(t.Context()); !errors.Is(err, ErrSlow) {
			t.Error(err)
		}
	})
}

// TestF22AnExpiryIsProposedOnce, also when its answer is lost: the session is
// gone by then.
func TestF22AnExpiryIsProposedOnce(t *testing.T) {
	for _, unknown := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := start(t)
			r.acquire("a", 1, false)
			r.acquire("b", 1, true)
			st, in := r.attach()
			r.set(func() { r.unknown = unknown })
			for i := range uint64(5) { // b lives, a does not
				st.Keepalive(keepalive("b", i+1))
				time.Sleep(ttl / 4)
			}
			synctest.Wait()
			if r.proposed("expire") != 1 {
				t.Errorf("unknown %v: %d expiries proposed", unknown, r.proposed("expire"))
			}
			granted := 0
			in.acks()
			for _, m := range in.all {
				if m.GetGrant() != nil {
					granted++
				}
			}
			if granted != 1 {
				t.Errorf("unknown %v: the waiter heard %d grants", unknown, granted)
			}
		})
	}
}

// jumpy is a clock that the test sets ahead.
type jumpy struct {
	clock.Clock
	ahead atomic.Int64
}

func (j *jumpy) Now() instant.Instant { return j.Clock.Now().Add(time.Duration(j.ahead.Load())) }

// TestF19AClockThatJumpsEndsNoSession, whoever reads it first: all of them get
// their time anew, and the streams end, because no instant of before counts.
func TestF19AClockThatJumpsEndsNoSession(t *testing.T) {
	for name, first := range map[string]func(r *rig){
		"the tick":     func(*rig) { time.Sleep(tick); synctest.Wait() },
		"a commit":     func(r *rig) { r.acquire("b", 1, true) },
		"the campaign": func(r *rig) { r.shell.Hold("p") },
	} {
		synctest.Test(t, func(t *testing.T) {
			r := start(t)
			r.acquire("a", 1, false)
			_, in := r.attach()
			synctest.Wait()
			r.clock.ahead.Store(int64(hour))
			first(r)
			settle()
			if left, ok := r.shell.SessionLeft("a"); !ok || left < ttl-2*time.Second || in.ended() == nil || r.proposed("expire") != 0 {
				t.Errorf("%s: %v left, stream %v, %d expiries", name, left, in.ended(), r.proposed("expire"))
			}
			time.Sleep(ttl + tick)
			synctest.Wait()
			if r.proposed("expire") == 0 {
				t.Errorf("%s: nobody is heard, and no session ends", name)
			}
		})
	}
}

func TestStopEndsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		_, in := r.attach()
		r.end()
		if err := in.ended(); !errors.Is(err, ErrNotLeading) {
			t.Errorf("the stream ended with %v", err)
		}
		r.elect() // late, from a replica that stops after it
		if _, err := r.shell.Attach(NewQueue()); !errors.Is(err, ErrNotLeading) {
			t.Errorf("a stopped shell leads: %v", err)
		}
	})
}
