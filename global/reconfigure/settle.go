package reconfigure

import (
	"slices"
	"time"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Settling has every register accepted once more under c, by a majority of c,
// after c was stored ([Stored]): it must be made after that, and asked for its
// messages only then. Values stay as they are, so it neither waits for head
// leases (V2) nor ends any.
//
// Cheapest first: a value that is found is sent again at its own ballot, which
// restarts the clocks as a renewal does and costs a running owner nothing. Where
// a majority cannot take that (a higher ballot is promised, or nothing was ever
// accepted), a ballot of its own is prepared by V1 alone, and the value of the
// highest accepted ballot among a majority of promises is accepted under it.
type Settling struct {
	c        *pb.ClusterConfiguration
	operator register.Incarnation
	parts    []*settling
}

type settling struct {
	name string
	// found is the record with the highest accepted ballot of any voter; seen
	// the highest round promised anywhere.
	found register.Record
	seen  uint64

	// ballot and value are what is being accepted.
	ballot   register.Ballot
	value    register.Value
	accepted map[string]bool

	preparing register.Ballot
	promised  map[string]bool
	best      register.Record
	done      bool
	alarm     string
}

// NewSettling begins with all partitions of c. operator is random.
func NewSettling(c *pb.ClusterConfiguration, operator uint64) *Settling {
	s := &Settling{c: c, operator: register.Incarnation(operator)}
	for _, p := range c.GetPartitions() {
		s.parts = append(s.parts, &settling{name: p.GetName()})
	}
	return s
}

// Found takes what a voter of c says of its registers: a hint of what to send
// again.
func (s *Settling) Found(d *pb.DescribeVoterResponse) {
	for _, r := range d.GetRegisters() {
		if p := s.part(r.GetPartition()); p != nil {
			p.learn(register.RecordOf(r.GetRegister()))
		}
	}
}

func (s *Settling) part(name string) *settling {
	i := slices.IndexFunc(s.parts, func(p *settling) bool { return p.name == name })
	if i < 0 {
		return nil
	}
	return s.parts[i]
}

func (p *settling) learn(rec register.Record) {
	p.seen = max(p.seen, rec.Promised.Round)
	if p.found.Accepted.Less(rec.Accepted) {
		p.found = rec
	}
	if rec.Alarm != "" {
		p.alarm = rec.Alarm
	}
}

// Resend is an AcceptAgain for every voter of c, with all values that were
// found, at their own ballots; nil if there are none. Answers to an earlier
// round do not count any more.
func (s *Settling) Resend() *pb.AcceptAgainRequest {
	for _, p := range s.parts {
		p.ballot, p.value, p.accepted = p.found.Accepted, p.found.Value, map[string]bool{}
	}
	return s.accept()
}

// accept is an AcceptAgain of what each partition that is not done has.
func (s *Settling) accept() *pb.AcceptAgainRequest {
	req := &pb.AcceptAgainRequest{Era: s.c.GetEra(), ClusterId: s.c.GetClusterId(), Version: s.c.GetVersion()}
	for _, p := range s.parts {
		if !p.done && !p.ballot.IsZero() {
			req.Items = append(req.Items, &pb.AcceptItem{Partition: p.name, Ballot: p.ballot.Proto(), Value: p.value.Proto()})
		}
	}
	if len(req.Items) == 0 {
		return nil
	}
	return req
}

// Accepted takes a voter's answers to the last AcceptAgain.
func (s *Settling) Accepted(a *pb.AcceptAgainResponse) {
	if !config.Member(s.c, a.GetVoter()) {
		return
	}
	for _, in := range a.GetAnswers() {
		p := s.part(in.GetPartition())
		switch {
		case p == nil || p.done || p.ballot.IsZero():
		case in.GetRefusal() != nil:
			p.learn(register.RecordOf(in.GetRegister()))
		default:
			p.accepted[a.GetVoter().GetId()] = true
			p.done = len(p.accepted) >= config.QuorumOf(s.c).Voters
		}
	}
}

// Prepare is a PrepareAgain for every voter of c, for the partitions that are
// not done, under a ballot above all that were seen.
func (s *Settling) Prepare() *pb.PrepareAgainRequest {
	round := uint64(0)
	for _, p := range s.parts {
		if !p.done {
			round = max(round, p.seen)
		}
	}
	b := register.Ballot{Era: config.EraOf(s.c), Round: round + 1, Region: config.Operator, Incarnation: s.operator}
	req := &pb.PrepareAgainRequest{Era: s.c.GetEra(), ClusterId: s.c.GetClusterId(), Version: s.c.GetVersion(), Ballot: b.Proto()}
	for _, p := range s.parts {
		if p.done {
			continue
		}
		p.seen = b.Round // never again under this ballot
		p.preparing, p.promised, p.best = b, map[string]bool{}, register.Record{}
		p.ballot, p.value, p.accepted = register.Ballot{}, register.Value{}, map[string]bool{}
		req.Partitions = append(req.Partitions, p.name)
	}
	if len(req.Partitions) == 0 {
		return nil
	}
	return req
}

// Promised takes a voter's answers to the last PrepareAgain.
func (s *Settling) Promised(a *pb.PrepareAgainResponse) {
	if !config.Member(s.c, a.GetVoter()) {
		return
	}
	for _, in := range a.GetAnswers() {
		p := s.part(in.GetPartition())
		if p == nil || p.done || p.promised == nil {
			continue
		}
		rec := register.RecordOf(in.GetRegister())
		p.learn(rec)
		if in.GetRefusal() != nil {
			continue
		}
		p.promised[a.GetVoter().GetId()] = true
		if p.best.Accepted.Less(rec.Accepted) {
			p.best = rec
		}
	}
}

// Accept is an AcceptAgain for every voter of c with the values of the
// partitions that a majority has promised; nil if there are none. A register
// that nobody has owned gets a released value of no epoch.
func (s *Settling) Accept() *pb.AcceptAgainRequest {
	for _, p := range s.parts {
		if p.done || !p.ballot.IsZero() || len(p.promised) < config.QuorumOf(s.c).Voters {
			continue
		}
		p.ballot, p.value = p.preparing, p.best.Value
		if p.best.Accepted.IsZero() {
			p.value = register.Value{D: time.Duration(s.c.GetDNs()), Reason: "never owned", Era: config.EraOf(s.c)}
		}
	}
	return s.accept()
}

// Open are the partitions that are not settled yet.
func (s *Settling) Open() (names []string) {
	for _, p := range s.parts {
		if !p.done {
			names = append(names, p.name)
		}
	}
	return names
}

// Alarm is a partition whose register has an alarm at some voter, and the
// alarm; empty if there is none among the open ones.
func (s *Settling) Alarm() (partition, alarm string) {
	for _, p := range s.parts {
		if !p.done && p.alarm != "" {
			return p.name, p.alarm
		}
	}
	return "", ""
}
