package explore

import (
	"encoding/binary"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

const (
	resource  = "lock/x"
	partition = "p"
	region    = "eu"
)

var sessionIDs = [2]string{"s0", "s1"}

// regionState is one state of the replicated state machine, interned: equal
// states are one object, so a world refers to it by a pointer. It is reached by
// a path of commands, which makes it again when a new command is tried.
type regionState struct {
	id     uint64
	parent *regionState
	term   uint64
	cmd    *pb.Command
	// acquires counts each session's requests: their ids are seen.
	acquires [2]uint64
	view     state.View
	next     map[string]applied
}

type applied struct {
	to     *regionState
	result *pb.CommandResult
	events []state.Event
}

// regionStates interns.
type regionStates struct {
	byForm map[string]*regionState
	root   *regionState
}

func newRegionStates(o options) *regionStates {
	rs := &regionStates{byForm: map[string]*regionState{}}
	m := state.New()
	rs.root = rs.intern(m, &regionState{})
	at := rs.root
	do := func(cmd *pb.Command) *pb.CommandResult {
		a := rs.apply(at, 1, cmd)
		if a.result.GetError() != nil {
			panic(fmt.Sprintf("set-up: %v: %v", cmd, a.result.GetError()))
		}
		at = a.to
		return a.result
	}
	do(&pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: region, Incarnation: 1}}})
	do(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: &pb.ClusterConfiguration{
		ClusterId: "c", Version: 1, Shards: 1, DNs: int64(o.d), Voters: []*pb.Voter{{Id: "region/" + region, Incarnation: 1}, {Id: "witness/w", Incarnation: 2}},
		Partitions: []*pb.PartitionSpec{{Name: partition, Shards: []*pb.ShardRange{{}}, Prefer: []string{region}}},
	}}}})
	do(&pb.Command{Kind: &pb.Command_RaiseLevel{RaiseLevel: &pb.RaiseLevelCommand{Level: state.MaxLevel}}})
	at = rs.adopt(at, 1, 1, o.d)
	for _, id := range sessionIDs {
		do(&pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{
			SessionId: id, SecretHash: make([]byte, 32), TtlMs: o.ttl.Milliseconds(), Identity: id,
		}}})
	}
	rs.root = at
	return rs
}

// adopt wins the epoch in the own register and makes it live.
func (rs *regionStates) adopt(at *regionState, term uint64, epoch fence.Epoch, d time.Duration) *regionState {
	do := func(cmd *pb.Command) *pb.CommandResult {
		cmd.Term = term
		a := rs.apply(at, term, cmd)
		if a.result.GetError() != nil {
			panic(fmt.Sprintf("adopt: %v: %v", cmd, a.result.GetError()))
		}
		at = a.to
		return a.result
	}
	p, _ := at.view.Partition(partition)
	ballot := do(&pb.Command{Kind: &pb.Command_ReserveBallot{ReserveBallot: &pb.ReserveBallotCommand{Above: p.Register.Promised.Round}}}).GetReserved().GetBallot()
	guard := &pb.RegisterGuard{Promised: p.Register.Promised.Proto(), Accepted: p.Register.Accepted.Proto()}
	do(&pb.Command{Kind: &pb.Command_Promise{Promise: &pb.PromiseCommand{Items: []*pb.PromiseItem{{
		Partition: partition, Guard: guard, Ballot: ballot,
	}}}}})
	value := register.Value{Owner: register.Region{Name: region, Incarnation: 1}, Epoch: epoch, D: d}
	do(&pb.Command{Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{Items: []*pb.AcceptedItem{{
		Partition: partition, Guard: &pb.RegisterGuard{Promised: ballot, Accepted: p.Register.Accepted.Proto()},
		Ballot: ballot, Value: value.Proto(),
	}}}}})
	do(&pb.Command{Kind: &pb.Command_Adopt{Adopt: &pb.AdoptCommand{Partition: partition, Epoch: uint32(epoch), Ballot: ballot, Planned: true}}})
	return at
}

// apply applies a command, from memory if it was applied to this state before.
func (rs *regionStates) apply(at *regionState, term uint64, cmd *pb.Command) applied {
	form, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend([]byte{byte(term)}, cmd)
	if err != nil {
		panic(err)
	}
	name := string(form)
	if a, ok := at.next[name]; ok {
		return a
	}
	m := rs.machine(at)
	result, events := m.Apply(1, term, cmd)
	if err := m.Poisoned(); err != nil {
		panic(err)
	}
	to := &regionState{parent: at, term: term, cmd: cmd, acquires: at.acquires}
	if c := cmd.GetAcquire(); c != nil {
		for i, id := range sessionIDs {
			if id == c.GetSessionId() {
				to.acquires[i] = max(to.acquires[i], c.GetRequestId())
			}
		}
	}
	a := applied{to: rs.intern(m, to), result: result, events: events}
	at.next[name] = a
	return a
}

func (rs *regionStates) machine(at *regionState) *state.Machine {
	if at.parent == nil {
		return state.New()
	}
	m := rs.machine(at.parent)
	m.Apply(1, at.term, at.cmd)
	return m
}

func (rs *regionStates) intern(m *state.Machine, s *regionState) *regionState {
	s.view = m.View()
	form := string(s.form())
	if old, ok := rs.byForm[form]; ok {
		return old
	}
	s.id = uint64(len(rs.byForm))
	s.next = map[string]applied{}
	rs.byForm[form] = s
	return s
}

func (s *regionState) form() []byte {
	var b []byte
	u := func(x uint64) { b = binary.AppendUvarint(b, x) }
	u(uint64(s.view.Incarnation()))
	u(s.view.BallotRound())
	u(uint64(s.view.Level()))
	for p := range s.view.Partitions() {
		u(uint64(p.Epoch))
		u(uint64(p.Seq))
		u(uint64(p.Phase))
		u(uint64(p.Dropped))
		u(p.Register.Promised.Round)
		u(p.Register.Accepted.Round)
		u(uint64(p.Register.Value.Epoch))
	}
	for _, n := range s.acquires {
		u(n)
	}
	for q := range s.view.Sessions() {
		b = append(append(b, q.ID...), 0)
		if q.Closing {
			b = append(b, 1)
		}
		u(q.LowestOpen)
	}
	if l, ok := s.view.Lease(resource); ok {
		b = append(append(b, l.Session...), 0)
		u(uint64(l.Token))
		u(l.Request)
		b = fmt.Appendf(b, "%v%v", l.Offered, l.Revoked)
	}
	if d, ok := s.view.Delay(resource); ok {
		u(uint64(d.Token))
	}
	for w := range s.view.Waiters(resource) {
		b = append(append(b, w.Session...), 0)
		u(w.Request)
	}
	return b
}

func (s *regionState) lease() (state.Lease, bool) { return s.view.Lease(resource) }

func (s *regionState) alive(i int) bool {
	q, ok := s.view.Session(sessionIDs[i])
	return ok && !q.Closing
}

func (s *regionState) epoch() fence.Epoch {
	p, _ := s.view.Partition(partition)
	if !p.Live() {
		return 0
	}
	return p.Epoch
}
