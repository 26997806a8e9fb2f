package lessor

import (
	"fmt"
	"testing"
	"time"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

const (
	ttl  = 10 * time.Second
	d    = 4 * time.Second
	ms   = time.Millisecond
	t0   = instant.Instant(1000 * time.Second)
	part = "p"
)

// rig is a Lessor over the real state machine, with a clock that the test
// sets.
type rig struct {
	testing.TB
	m    *state.Machine
	l    *Lessor
	term uint64
	now  instant.Instant
	// What the Lessor wanted done since the last look.
	sends    map[StreamID][]*pb.AttachResponse
	commands []Command
	closes   []StreamID
	seq      uint64
	request  uint64
}

// newRig has a region with one live partition and sessions s0 to s(n-1).
func newRig(t testing.TB, n int) *rig {
	r := &rig{TB: t, m: state.New(), term: 1, now: t0, sends: map[StreamID][]*pb.AttachResponse{}}
	r.must(&pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: "eu", Incarnation: 1}}})
	r.must(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: &pb.ClusterConfiguration{
		ClusterId: "c", Version: 1, Shards: 1, DNs: int64(d), Voters: []*pb.Voter{{Id: "region/eu", Incarnation: 1}, {Id: "witness/w", Incarnation: 2}},
		Partitions: []*pb.PartitionSpec{{Name: part, Shards: []*pb.ShardRange{{}}, Prefer: []string{"eu"}}},
	}}}})
	r.must(&pb.Command{Kind: &pb.Command_RaiseLevel{RaiseLevel: &pb.RaiseLevelCommand{Level: state.MaxLevel}}})
	r.adopt(1)
	for i := range n {
		r.open(fmt.Sprintf("s%d", i), ttl)
	}
	r.lead()
	return r
}

func (r *rig) open(id string, ttl time.Duration) {
	r.must(&pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{
		SessionId: id, SecretHash: make([]byte, 32), TtlMs: ttl.Milliseconds(),
	}}})
}

func (r *rig) adopt(epoch fence.Epoch) {
	b := r.must(&pb.Command{Kind: &pb.Command_ReserveBallot{ReserveBallot: &pb.ReserveBallotCommand{}}}).GetReserved().GetBallot()
	p, _ := r.m.View().Partition(part)
	v := register.Value{Owner: register.Region{Name: "eu", Incarnation: 1}, Epoch: epoch, D: d}
	r.must(&pb.Command{Term: r.term, Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{Items: []*pb.AcceptedItem{{
		Partition: part, Guard: &pb.RegisterGuard{Promised: p.Register.Promised.Proto(), Accepted: p.Register.Accepted.Proto()},
		Ballot: b, Value: v.Proto(),
	}}}}})
	r.must(&pb.Command{Term: r.term, Kind: &pb.Command_Adopt{Adopt: &pb.AdoptCommand{Partition: part, Epoch: uint32(epoch), Ballot: b}}})
}

// apply commits a command and feeds the Lessor.
func (r *rig) apply(c *pb.Command) *pb.CommandResult {
	res, events := r.m.Apply(1, r.term, c)
	if r.l != nil {
		r.l.Applied(r.now, events)
		r.take()
	}
	return res
}

func (r *rig) must(c *pb.Command) *pb.CommandResult {
	r.Helper()
	res := r.apply(c)
	if res.GetError() != nil {
		r.Fatalf("%v: %v", c, res.GetError())
	}
	return res
}

// lead builds the tables of the term, with a fresh pulse.
func (r *rig) lead() {
	r.l = New(Config{}, r.m.View(), r.term, r.now)
	r.l.PulseFresh(r.now, true)
	r.take()
}

func (r *rig) take() {
	out := r.l.Take()
	for _, s := range out.Sends {
		if s.Message.GetTerm() != r.term {
			r.Errorf("a message of term %d from the leader of %d", s.Message.GetTerm(), r.term)
		}
		r.sends[s.Stream] = append(r.sends[s.Stream], s.Message)
	}
	r.commands = append(r.commands, out.Commands...)
	r.closes = append(r.closes, out.Closes...)
}

func (r *rig) sent(on StreamID) []*pb.AttachResponse {
	m := r.sends[on]
	delete(r.sends, on)
	return m
}

// only returns the one message sent to a stream.
func (r *rig) only(on StreamID) *pb.AttachResponse {
	r.Helper()
	m := r.sent(on)
	if len(m) != 1 {
		r.Fatalf("%d messages, want one: %v", len(m), m)
	}
	return m[0]
}

func (r *rig) ack(on StreamID) *pb.Ack {
	r.Helper()
	a := r.only(on).GetAck()
	if a == nil {
		r.Fatal("not an ack")
	}
	return a
}

// proposed takes the one command proposed.
func (r *rig) proposed() Command {
	r.Helper()
	if len(r.commands) != 1 {
		r.Fatalf("%d commands proposed, want one: %v", len(r.commands), r.commands)
	}
	c := r.commands[0]
	r.commands = nil
	if c.Command.GetTerm() != r.term {
		r.Errorf("the command carries term %d, not %d", c.Command.GetTerm(), r.term)
	}
	return c
}

func (r *rig) none() {
	r.Helper()
	if len(r.commands) != 0 {
		r.Fatalf("proposed: %v", r.commands)
	}
}

// commit applies a proposed command and tells its outcome.
func (r *rig) commit(c Command) {
	r.Helper()
	res := r.must(c.Command)
	r.l.CommandDone(r.now, c.ID, res, nil)
	r.take()
}

// to moves the clock to t0+d and ticks.
func (r *rig) to(d time.Duration) {
	r.now = t0.Add(d)
	r.l.Tick(r.now)
	r.take()
}

func (r *rig) stream(id StreamID) {
	r.l.StreamOpened(r.now, id)
}

func (r *rig) keepalive(on StreamID, session string, held map[string]fence.Token) {
	r.seq++
	r.l.Keepalive(r.now, on, &pb.Keepalive{SessionId: session, Sequence: r.seq, TokensHash: validity.TokensHash(held)})
	r.take()
}

func (r *rig) check() {
	r.l.CheckPassed(r.now, r.l.CheckBegun(r.now))
	r.take()
}

// attach brings a session onto a stream, past its first ack.
func (r *rig) attach(on StreamID, session string, held map[string]fence.Token) *pb.Ack {
	r.Helper()
	r.stream(on)
	r.keepalive(on, session, held)
	r.check()
	return r.ack(on)
}

func (r *rig) hold(until time.Duration) {
	r.l.HeadLease(r.now, part, r.epoch(), t0.Add(until))
	r.take()
}

func (r *rig) epoch() fence.Epoch {
	p, _ := r.m.View().Partition(part)
	return p.Epoch
}

// acquire returns the token, 0 if the request waits.
func (r *rig) acquire(session, resource string) fence.Token {
	r.Helper()
	r.request++
	res := r.must(&pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
		SessionId: session, RequestId: r.request, Resource: resource, Partition: part, Epoch: uint32(r.epoch()), Wait: true,
	}}})
	return fence.Token(res.GetAcquire().GetGranted().GetToken())
}

func (r *rig) release(session, resource string, token fence.Token) {
	r.must(&pb.Command{Kind: &pb.Command_Release{Release: &pb.ReleaseCommand{SessionId: session, Resource: resource, Token: uint64(token)}}})
}

func (r *rig) revoke(resource string, token fence.Token) {
	r.must(&pb.Command{Term: r.term, Kind: &pb.Command_Revoke{Revoke: &pb.RevokeCommand{
		Resource: resource, Token: uint64(token), Reason: "operator",
	}}})
}

// elect starts the next term, of another leader at once.
func (r *rig) elect() {
	r.term++
	r.commands, r.closes = nil, nil
	clear(r.sends)
	r.lead()
}

func since(i int64) time.Duration { return instant.Instant(i).Sub(t0) }
