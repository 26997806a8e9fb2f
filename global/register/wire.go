package register

import (
	"errors"
	"fmt"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// This file turns the voter's types into wire messages and back. All of it is
// total: a nil or partly filled message gives zero values, never a panic, and
// what is zero here is absent on the wire.

// Proto returns b as a message; nil for the zero ballot.
func (b Ballot) Proto() *pb.Ballot {
	if b.IsZero() {
		return nil
	}
	return &pb.Ballot{Round: b.Round, Region: b.Region, Incarnation: uint64(b.Incarnation), Era: b.Era.Proto()}
}

// BallotOf reads a ballot; nil is the zero ballot.
func BallotOf(m *pb.Ballot) Ballot {
	return Ballot{Round: m.GetRound(), Region: m.GetRegion(), Incarnation: Incarnation(m.GetIncarnation()), Era: EraOf(m.GetEra())}
}

// Proto returns v as a message; nil for the zero value.
func (v Value) Proto() *pb.Value {
	if v == (Value{}) {
		return nil
	}
	return &pb.Value{
		Owner:            v.Owner.Name,
		OwnerIncarnation: uint64(v.Owner.Incarnation),
		Epoch:            uint32(v.Epoch),
		DNs:              int64(v.D),
		Successor:        v.Successor,
		Reason:           v.Reason,
		Era:              v.Era.Proto(),
	}
}

// ValueOf reads a value; nil is the zero value.
func ValueOf(m *pb.Value) Value {
	return Value{
		Owner:     Region{Name: m.GetOwner(), Incarnation: Incarnation(m.GetOwnerIncarnation())},
		Epoch:     fence.Epoch(m.GetEpoch()),
		D:         time.Duration(m.GetDNs()),
		Successor: m.GetSuccessor(),
		Reason:    m.GetReason(),
		Era:       EraOf(m.GetEra()),
	}
}

// MaxD is the longest head lease that a voter takes.
const MaxD = 60 * time.Second

// Check reports what is wrong with a value that came from outside, all faults
// at once. A voter takes no value that fails it: it would have to honour a D
// out of range, or an epoch from which no token can be made.
func (v Value) Check() error {
	var errs []error
	if v.D <= 0 || v.D > MaxD {
		errs = append(errs, fmt.Errorf("value.d_ns: %d is out of range; use 1 to %d (%v)", int64(v.D), int64(MaxD), MaxD))
	}
	if v.Epoch == 0 || v.Epoch > fence.MaxEpoch {
		errs = append(errs, fmt.Errorf("value.epoch: %d is out of range; epochs are 1 to %d", v.Epoch, fence.MaxEpoch))
	}
	if (v.Owner.Name == "") != (v.Owner.Incarnation == 0) {
		errs = append(errs, errors.New("value.owner: name and incarnation must both be set (owned) or both be empty (released)"))
	}
	return errors.Join(errs...)
}

// Proto returns r as a message, never nil.
func (r Record) Proto() *pb.Register {
	return &pb.Register{Promised: r.Promised.Proto(), Accepted: r.Accepted.Proto(), Value: r.Value.Proto(), Alarm: r.Alarm}
}

// RecordOf reads a record; nil is the empty record of a register that has
// promised and accepted nothing.
func RecordOf(m *pb.Register) Record {
	return Record{
		Promised: BallotOf(m.GetPromised()),
		Accepted: BallotOf(m.GetAccepted()),
		Value:    ValueOf(m.GetValue()),
		Alarm:    m.GetAlarm(),
	}
}

// Proto returns g as a message, never nil.
func (g Guard) Proto() *pb.RegisterGuard {
	return &pb.RegisterGuard{Promised: g.Promised.Proto(), Accepted: g.Accepted.Proto()}
}

// GuardOf reads a guard; nil is the guard of an empty record.
func GuardOf(m *pb.RegisterGuard) Guard {
	return Guard{Promised: BallotOf(m.GetPromised()), Accepted: BallotOf(m.GetAccepted())}
}

// CandidateOf returns who sent a vote message.
func CandidateOf(h *pb.VoteHeader) Region {
	return Region{Name: h.GetCandidate(), Incarnation: Incarnation(h.GetCandidateIncarnation())}
}

// Proto returns v for the wire; unknown is unspecified.
func (v Verdict) Proto() pb.Verdict { return pb.Verdict(v) }

// VerdictOf reads a verdict; what it does not know is unknown, which V3 does
// not take for alive.
func VerdictOf(v pb.Verdict) Verdict {
	if v < pb.Verdict_VERDICT_UNSPECIFIED || v > pb.Verdict_VERDICT_CRASHED {
		return VerdictUnknown
	}
	return Verdict(v)
}

// Proto returns r for the wire.
func (r Rule) Proto() pb.RefusalRule { return pb.RefusalRule(r) }

// RuleOf reads a rule. One that this build does not know is RuleRetry: a
// refusal stays a refusal.
func RuleOf(r pb.RefusalRule) Rule {
	if r < pb.RefusalRule_REFUSAL_RULE_UNSPECIFIED || r > pb.RefusalRule_REFUSAL_RULE_UNKNOWN_PARTITION {
		return RuleRetry
	}
	return Rule(r)
}

// RefusalOf returns the refusal that rule means for register r at now; nil for
// RuleNone.
func RefusalOf(r Register, now instant.Instant, rule Rule, verdict Verdict) *pb.Refusal {
	if rule == RuleNone {
		return nil
	}
	ref := &pb.Refusal{Rule: rule.Proto(), Verdict: verdict.Proto()}
	switch rule {
	case RuleV1Ballot:
		ref.Text = fmt.Sprintf("ballot %v is already promised; take a higher one", r.Promised)
	case RuleV2Running:
		left := r.Remaining(now)
		ref.RemainingNs = int64(left)
		switch {
		case r.Value.Successor == nobody:
			ref.Text = fmt.Sprintf("era %v began here, and head leases of before may run for %v more", r.Value.Era, left)
		case r.Value.Released():
			ref.Text = fmt.Sprintf("released to %s alone for %v more", r.Value.Successor, left)
		default:
			ref.Text = fmt.Sprintf("the head lease of %s (epoch %d) runs here for %v more", r.Value.Owner.Name, r.Value.Epoch, left)
		}
	case RuleV3Alive:
		ref.Text = fmt.Sprintf("%s is heard here (%v) though its head lease is over", r.Value.Owner.Name, verdict)
	case RuleAlarm:
		ref.Text = "the register is alarmed and answers nothing until an operator clears it: " + r.Alarm
	default:
		ref.Text = rule.String()
	}
	return ref
}

// PrepareAnswerOf is the answer to a Prepare for one partition: r is the
// register after the decision took effect, rule RuleNone for a promise.
func PrepareAnswerOf(partition string, r Register, now instant.Instant, rule Rule, verdict Verdict) *pb.PrepareAnswer {
	return &pb.PrepareAnswer{
		Partition:   partition,
		Refusal:     RefusalOf(r, now, rule, verdict),
		Register:    r.Proto(),
		RemainingNs: int64(r.Remaining(now)),
		Verdict:     verdict.Proto(),
	}
}

// AcceptAnswerOf is the answer to an Accept or renewal for one partition: r is
// the register after the decision took effect, rule RuleNone for a yes.
func AcceptAnswerOf(partition string, r Register, now instant.Instant, rule Rule) *pb.AcceptAnswer {
	a := &pb.AcceptAnswer{Partition: partition, Refusal: RefusalOf(r, now, rule, VerdictUnknown)}
	if rule != RuleNone {
		a.Register = r.Proto()
	}
	return a
}
